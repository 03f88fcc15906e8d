"""Readers of boxes on pictures, and all hub copies: the published layouts, and each trap of the formats by name."""

import json

import datasets
import pytest
from tasks import fixtures as fx
from tasks.reading import every, halves_share_nothing, one, whys

from mmlens.errors import DataError, OptionError
from mmlens.evidence.regions import Box, Mask, Polygon
from mmlens.tasks import load_task


# ---------------------------------------------------------------------- RefCOCOg
@pytest.mark.parametrize("pickled", [fx.python2_pickle, fx.python2_text_pickle])
def test_refcocog_has_one_example_for_each_sentence(tmp_path, pickled):
    task = load_task("refcocog", fx.refcocog(tmp_path, pickled=pickled))
    found = every(task)
    assert len(found) == 16 and not task.check().faults
    example = found["7/70"]
    assert example.question == (
        "Where is grey dog by the door? Answer with its box as x0, y0, x1, y1 in thousandths of the picture."
    )
    assert example.subject == "grey dog by the door" and example.images[0].name == "COCO_train2014_000000000042.jpg"
    assert example.meta["picture_size"] == (200, 180) and example.meta["split"] == "UMD val"
    halves_share_nothing(task, lambda e: e.images[0])


def test_refcocog_boxes_are_x_y_width_height(tmp_path):
    example = every(load_task("refcocog", fx.refcocog(tmp_path, 1)))["7/70"]
    assert example.evidence == (Box.from_xyxy(100.5, 40, 180.75, 160),)
    assert example.answers == ("502, 222, 904, 889",)  # round(100.5 / 200 * 1000) is 502 (half to even), 40 / 180 ...


def test_refcocog_distractors_leave_out_crowds_and_broken_boxes(tmp_path):
    example = every(load_task("refcocog", fx.refcocog(tmp_path, 1)))["7/70"]
    assert example.distractors == (Box.from_xywh(10, 10, 30, 40),)


def test_refcocog_ignores_the_refs_own_file_name(tmp_path):
    example = every(load_task("refcocog", fx.refcocog(tmp_path, 1)))["7/70"]
    assert "_500" not in example.images[0].name


def test_refcocog_takes_the_split_of_the_ref(tmp_path):
    fx.refcocog(tmp_path)
    assert {e.meta["split"] for e in every(load_task("refcocog", tmp_path, subset="test")).values()} == {"UMD test"}
    with pytest.raises(DataError, match="0 usable"):
        load_task("refcocog", tmp_path, subset="train").examples("rank", 1)


def test_refcocog_judges_boxes_by_overlap(tmp_path):
    task = load_task("refcocog", fx.refcocog(tmp_path, 1))
    example = every(task)["7/70"]
    assert task.score(example.answer, example) == 1.0
    assert task.score("[500, 220, 900, 890]", example) == 1.0
    assert task.score("100, 40, 181, 160", example) == 0.0  # pixels
    assert task.score("502, 222, 302, 400", example) == 0.0
    assert task.well_formed("1, 2, 3, 4", example) and not task.well_formed("there", example)
    assert not task.well_formed("1, 2, 3000, 4000", example)


def test_refcocog_asks_for_categories_and_segmentations(tmp_path):
    fx.refcocog(tmp_path, 1)
    task = load_task("refcocog", tmp_path, ask="category", evidence="segmentation")
    example = every(task)["7/70"]
    assert example.answers == ("dog",) and example.choices == ("chair", "dog")
    assert example.question == "What kind of thing is grey dog by the door? Answer with its name."
    assert example.evidence == (Polygon.from_flat([[100.5, 40, 180.75, 40, 180.75, 160]]),)
    assert task.score("A dog.", example) == 1.0 and task.score("cat", example) == 0.0
    assert task.identity()["ask"] == "category" != load_task("refcocog", tmp_path).identity()["ask"]


def test_refcocog_subject_of_a_word_that_the_question_repeats(tmp_path):
    example = every(load_task("refcocog", fx.refcocog(tmp_path, 1)))["7/71"]
    assert example.subject == "box?" and example.question.count("box?") == 1


def test_refcocog_faults(tmp_path):
    def ref(n, **more):
        return {
            **fx.refs(1)[0],
            "ref_id": n,
            "sentences": [{"sent_id": n, "sent": "it", "raw": "", "tokens": []}],
            **more,
        }

    fx.refcocog(
        tmp_path, 2, more=[ref(90, ann_id=999), ref(91, ann_id=503), ref(92, image_id=999), ref(93, sentences=None)]
    )
    (tmp_path / "images/train2014/COCO_train2014_000000000043.jpg").unlink()
    faults = load_task("refcocog", tmp_path).check().faults
    assert faults["90/90"] == "annotation 999 is not in the instances file"
    assert "has no area" in faults["91/91"]  # zero width
    assert faults["92/92"] == "picture 999 is not in the instances file"
    assert faults["8/72"] == "COCO_train2014_000000000043.jpg is missing"
    assert "the record lacks a list 'sentences'" in faults.values()


def test_refcocog_faults_of_boxes_off_the_picture_and_turned_pictures(tmp_path):
    fx.refcocog(tmp_path, 2)
    path = tmp_path / "refcocog" / "instances.json"
    found = json.loads(path.read_text())
    found["annotations"][0]["bbox"] = [150, 40, 80, 120]
    path.write_text(json.dumps(found))
    fx.picture(tmp_path / "images/train2014/COCO_train2014_000000000043.jpg", 180, 200, orientation=6)
    faults = load_task("refcocog", tmp_path).check().faults
    assert faults["7/70"] == "the box (150.0, 40.0, 230.0, 160.0) leaves its picture of 200 x 180"
    assert "EXIF" in faults["8/72"]


def test_refcocog_lmms_copy_has_expressions_as_answers_and_another_val(tmp_path):
    fx.refcocog_shipped(tmp_path)
    found = every(load_task("refcocog", tmp_path))
    example = found["500/1"]
    assert len(found) == 12 and example.question.startswith("Where is dog at the door?")
    assert example.evidence == (Box.from_xywh(100.5, 40, 80.25, 120),) and isinstance(example.images[0], bytes)
    assert example.meta["split"] == "lmms-lab val, which is not UMD val"
    with pytest.raises(OptionError, match="category names"):
        load_task("refcocog", tmp_path, ask="category")
    with pytest.raises(DataError, match="subset='test'"):
        load_task("refcocog", tmp_path, subset="test")


def test_refcocog_jxu124_copy_tells_the_order_of_each_box_by_its_annotation(tmp_path):
    fx.refcocog_copied(tmp_path)
    task = load_task("refcocog", tmp_path)
    found = every(task)
    assert [found[i].evidence for i in ("7/70", "8/72")] == [(Box.from_xyxy(100.5, 40, 180.75, 160),)] * 2
    assert set(task.check().faults) == {"9/74", "9/75"} and "neither" in whys(task)[0]


def test_refcocog_streams_the_lmms_copy(tmp_path, monkeypatch):
    path, whole = fx.refcocog_shipped(tmp_path), datasets.load_dataset
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, config, *, split, streaming: whole(
            "parquet", data_files=str(path), split="train", streaming=True, cache_dir=str(tmp_path / "c")
        ).cast_column("image", datasets.Image()),
    )
    far = load_task("refcocog", "hub:lmms-lab/RefCOCOg")
    assert every(far) == every(load_task("refcocog", tmp_path))
    assert len(far.examples("rank", 2, 1)) == 2


# ---------------------------------------------------------------------- COCO
def coco(root, n=6):
    found = fx.instances(n)
    fx.write_json(root / "annotations" / "instances_val2017.json", found)
    for image in found["images"]:
        fx.picture(root / "val2017" / image["file_name"], image["width"], image["height"])
    return root


def test_coco_asks_for_what_a_picture_shows_once(tmp_path):
    task = load_task("coco", coco(tmp_path))
    found = every(task)
    assert set(found) == {str(500 + 10 * i) for i in range(6)}  # three chairs in each picture, a crowd among them
    example = found["500"]
    assert example.subject == "the dog" and example.question.startswith("Where is the dog?")
    assert example.evidence == (Box.from_xywh(100.5, 40, 80.25, 120),)
    assert example.distractors == (Box.from_xywh(10, 10, 30, 40),)
    halves_share_nothing(task, lambda e: e.images[0])


def test_coco_does_not_ask_for_a_crowd(tmp_path):
    coco(tmp_path, 1)
    path = tmp_path / "annotations" / "instances_val2017.json"
    found = json.loads(path.read_text())
    found["annotations"][2]["category_id"] = 99
    found["categories"].append({"id": 99, "name": "person"})
    path.write_text(json.dumps(found))
    assert one(load_task("coco", tmp_path)).subject == "the dog"


@pytest.mark.parametrize("counts", [[2, 3, 1], "231"])
def test_coco_masks_from_plain_and_compressed_runs(tmp_path, counts):
    found = {
        "images": [{"id": 1, "file_name": "a.png", "width": 2, "height": 3}],
        "annotations": [
            {
                "id": 1,
                "image_id": 1,
                "category_id": 1,
                "bbox": [0, 0, 2, 3],
                "segmentation": {"counts": counts, "size": [3, 2]},
            }
        ],
        "categories": [{"id": 1, "name": "dog"}],
    }
    fx.write_json(tmp_path / "instances.json", found)
    fx.picture(tmp_path / "a.png", 2, 3)
    (mask,) = one(load_task("coco", tmp_path, evidence="segmentation")).evidence
    assert isinstance(mask, Mask) and mask.pixels.T.ravel().tolist() == [False, False, True, True, True, False]


def test_coco_layouts(tmp_path, as_users):
    with pytest.raises(DataError, match="0 instances files"):
        load_task("coco", tmp_path)
    coco(tmp_path)
    fx.write_json(tmp_path / "annotations" / "instances_train2017.json", [])
    with pytest.raises(DataError, match="2 instances files"):
        load_task("coco", tmp_path)
    with pytest.raises(DataError, match="no instances file"):
        load_task("coco", tmp_path, subset="train")
    with pytest.raises(OptionError, match="evidence='points'"):
        load_task("coco", tmp_path, subset="val", evidence="points")
    assert len(every(load_task("coco", tmp_path, subset="val"))) == 6


# ---------------------------------------------------------------------- streamed from the hub
STREAMS = {
    "mmmu": ("hub:lmms-lab/MMMU", {}, None, "validation", [fx.mmmu_row(i) for i in range(6)]),
    "mmmu-art": ("hub:MMMU/MMMU", {"subject": "Art"}, "Art", "validation", [fx.mmmu_row(i) for i in range(6)]),
    "hallusionbench": (
        "hub:lmms-lab/HallusionBench",
        {"subset": "image"},
        None,
        "image",
        [{**fx.hallusion_row(set_id=str(i)), "image": fx.cell()} for i in range(6)],
    ),
    "3dsrbench": (
        "hub:oscarqjh/3DSRBench_lmmseval",
        {},
        "3dsr_circular",
        "test",
        [{**fx.tsv_row(i, f"AAAAAAA{i}"), "image": fx.cell()} for i in range(6)],
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_readers_stream_their_hub_copies(tmp_path, monkeypatch, name):
    hub, options, config, split, rows = STREAMS[name]
    path, whole, asked = fx.write_parquet(tmp_path / "a.parquet", rows), datasets.load_dataset, []

    def streamed(repository, config, *, split, streaming):
        asked.append((f"hub:{repository}", config, split))
        return whole("parquet", data_files=str(path), split="train", streaming=True, cache_dir=str(tmp_path / "c"))

    monkeypatch.setattr(datasets, "load_dataset", streamed)
    task = load_task(name.removesuffix("-art"), hub, **options)
    assert asked == [(hub, config, split)] and len(every(task)) == 6 and not task.faults
    assert all(isinstance(e.images[0], bytes) for e in task)


def test_hub_copies_that_lack_something_say_so():
    with pytest.raises(OptionError, match="subset='all'"):
        load_task("hallusionbench", "hub:lmms-lab/HallusionBench")
