"""Every reader on a hand-made data set in the published layout, and each trap of the formats by name."""

import json
import re
from collections import Counter

import datasets
import numpy as np
import pytest
from tasks import fixtures as fx

from mmlens.errors import DataError, OptionError
from mmlens.evidence.regions import Box, Mask, Page, PageRegion, Polygon, Tube
from mmlens.model.video import VideoFile
from mmlens.tasks import load_task
from mmlens.tasks.base import Example
from mmlens.tasks.writing import write_examples


def every(task):
    """All usable examples by id; the halves must share no group."""
    halves = {half: list(task.split(half)) for half in ("rank", "judge")}
    found = {e.id: e for half in halves.values() for e in half}
    assert len(found) == sum(map(len, halves.values()))
    return found


def one(task):
    (example,) = every(task).values()
    return example


def whys(task):
    return list(task.check().faults.values())


def halves_share_nothing(task, of):
    seen = [{of(e) for e in task.split(half)} for half in ("rank", "judge")]
    assert seen[0] and seen[1] and not seen[0] & seen[1]


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
    assert example.meta["size"] == (200, 180) and example.meta["split"] == "UMD val"
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


# ---------------------------------------------------------------------- VidSTG
def test_vidstg_segment_ends_are_inclusive_and_relation_ends_exclusive(tmp_path):
    example = one(load_task("vidstg", fx.vidstg(tmp_path)))
    (tube,) = example.evidence
    assert [when for when, _ in tube.places] == [4, 5, 6, 7, 8]  # temporal_gt is [4, 9)
    assert tube.at(frame=8, second=0.0) == Box.from_xyxy(8, 5, 18, 20) and tube.at(frame=9, second=0.0) is None
    assert isinstance(example.video, VideoFile) and (example.video.begin, example.video.end) == (2, 12)


def test_vidstg_answers_and_distractors(tmp_path):
    task = load_task("vidstg", fx.vidstg(tmp_path))
    example = one(task)
    assert example.answers == ("ball", "sports ball") and example.meta["category"] == "ball/sports_ball"
    assert example.question == "what does the adult lift? Answer with its name."
    assert len(example.distractors) == 1 and example.distractors[0].places[0][1] == Box.from_xyxy(1, 2, 21, 40)
    assert task.score("A sports ball.", example) == 1.0 and task.score("adult", example) == 0.0
    asked = one(load_task("vidstg", tmp_path, ask="caption"))
    assert asked.answers == ("adult",) and asked.subject == "an adult lifts a ball"
    assert asked.evidence[0].places[0][1] == Box.from_xyxy(1, 2, 21, 40)


def test_vidstg_relation_may_end_one_frame_after_the_segment(tmp_path):
    record = fx.vidstg_record(temporal_gt={"begin_fid": 10, "end_fid": 12})  # 12 frames: the last is 11
    fx.vidstg(tmp_path, records=[record], moves=fx.trajectories(12, 0, 12))
    assert [when for when, _ in one(load_task("vidstg", tmp_path)).evidence[0].places] == [10, 11]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"temporal_gt": {"begin_fid": 4, "end_fid": 13}}, r"frames \[4, 13\) of the segment 2 to 11"),
        ({"temporal_gt": {"begin_fid": 1, "end_fid": 9}}, r"frames \[1, 9\)"),
        ({"temporal_gt": {"begin_fid": 4, "end_fid": 10}}, "no box of thing 1 in frame 9"),
        ({"frame_count": 13}, "VidOR says frame_count 12, VidSTG 13"),
        ({"width": 65}, "VidOR says width 64"),
        ({"vid": "9999"}, "9999.json is missing"),
        ({"questions": [{"description": "?", "type": "object", "target_id": 7}]}, "no box of thing 7"),
        ({"subject/objects": []}, "thing 1 is not among"),
    ],
)
def test_vidstg_faults(tmp_path, change, why):
    fx.vidstg(tmp_path, records=[fx.vidstg_record(**change)])
    (found,) = whys(load_task("vidstg", tmp_path))
    assert re.search(why, found), found


def test_vidstg_decoded_frames_must_be_as_many_as_the_record_says(tmp_path):
    fx.vidstg(tmp_path, frames=12, shown=11)
    assert whys(load_task("vidstg", tmp_path)) == [
        "the video has 11 frames of 64 x 48, VidOR's 12 of 64 x 48",
    ]


def test_vidstg_undecodable_and_missing_videos(tmp_path):
    fx.vidstg(tmp_path, vids=("9001", "9002"))
    (tmp_path / "videos/0001/9001.mp4").write_bytes(b"no video")
    (tmp_path / "videos/0001/9002.mp4").unlink()
    found = sorted(whys(load_task("vidstg", tmp_path)))
    assert found[0] == "0001/9002.mp4 is missing" and "cannot be read" in found[1]


def test_vidstg_halves_share_no_video_and_test_is_of_vidors_validation(tmp_path):
    vids = [str(9000 + i) for i in range(6)]
    fx.vidstg(tmp_path, vids, records=[fx.vidstg_record(v) for v in vids for _ in range(2)])
    task = load_task("vidstg", tmp_path)
    halves_share_nothing(task, lambda e: e.video.path)
    fx.write_json(tmp_path / "annotations" / "test_annotations.json", [fx.vidstg_record()])
    with pytest.raises(DataError, match="validation"):
        load_task("vidstg", tmp_path, subset="test")


# ---------------------------------------------------------------------- MMLongBench-Doc
def test_mmlongbench_doc_pages_count_from_one(tmp_path):
    example = one(load_task("mmlongbench-doc", fx.mmlongbench_doc(tmp_path, [fx.doc_row()])))
    assert example.evidence == (Page(2),) and example.pages[2].name == "3.png" and len(example.pages) == 5
    assert example.meta["sources"] == ("Figure",)


def test_mmlongbench_doc_pages_sort_by_number_and_limits_keep_the_evidence(tmp_path):
    fx.mmlongbench_doc(tmp_path, [fx.doc_row(evidence_pages="[10]")], pages=11)
    example = one(load_task("mmlongbench-doc", tmp_path, max_pages=3))
    assert [p.name for p in example.pages] == ["1.png", "2.png", "10.png"] and example.evidence == (Page(2),)
    assert example.meta["document_pages"] == (1, 2, 10)
    with pytest.raises(OptionError, match="max_pages=0"):
        load_task("mmlongbench-doc", tmp_path, max_pages=0)


def test_mmlongbench_doc_unanswerable_questions_have_no_evidence(tmp_path):
    row = fx.doc_row(answer="Not answerable", answer_format="None", evidence_pages="[]", evidence_sources="[]")
    task = load_task("mmlongbench-doc", fx.mmlongbench_doc(tmp_path, [row]))
    example = one(task)
    assert example.evidence == () and example.answers == ("Not answerable",)
    assert task.score("Not answerable", example) == 1.0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"evidence_pages": "[6]"}, "page 5 \\(from 0\\) of 5"),
        ({"evidence_pages": "[0]"}, "page -1"),
        ({"evidence_pages": "__import__('os')"}, "is no list"),
        ({"answer_format": "Set"}, "the answer format 'Set'"),
        ({"doc_id": "../etc.pdf"}, "a document named"),
        ({"doc_id": "other.pdf"}, "pages/other has no page pictures"),
    ],
)
def test_mmlongbench_doc_faults(tmp_path, change, why):
    fx.mmlongbench_doc(tmp_path, [fx.doc_row(**change)])
    (found,) = whys(load_task("mmlongbench-doc", tmp_path))
    assert re.search(why, found), found


def test_mmlongbench_doc_missing_pages_and_parquet(tmp_path):
    fx.mmlongbench_doc(tmp_path, [fx.doc_row()])
    fx.write_parquet(tmp_path / "data" / "train-0.parquet", [fx.doc_row(answer="6", answer_format="Int")])
    task = load_task("mmlongbench-doc", tmp_path)
    assert task.score("6", one(task)) == 1.0 and task.score("7", one(task)) == 0.0
    (tmp_path / "pages/leaflet/2.png").unlink()
    assert whys(task) == ["page 2 of pages/leaflet is missing"]


# ---------------------------------------------------------------------- MMDocIR
def test_mmdocir_boxes_are_points_and_pages_count_from_zero_within_the_document(tmp_path):
    example = one(load_task("mmdocir", fx.mmdocir(tmp_path, [fx.docir_question()])))
    (place,) = example.evidence
    assert isinstance(place, PageRegion) and place.number == 2 and len(example.pages) == 5
    assert place.region.in_pixels(612, 792) == Box.from_xyxy(60, 100, 300, 260)
    # the JPEG has 120 x 80 pixels: each axis has its own scale
    assert place.region.in_pixels(120, 80).corners == pytest.approx(
        (60 * 120 / 612, 100 * 80 / 792, 58.82353, 26.26263)
    )


def test_mmdocir_page_indices_are_inclusive_rows_of_the_pages_file(tmp_path):
    fx.mmdocir(tmp_path, [fx.docir_question(page=4)], before=2, pages=5)
    example = one(load_task("mmdocir", tmp_path))
    assert len(example.pages) == 5 and example.evidence[0].number == 4
    from mmlens.model.pictures import load_picture

    reds = [round(np.asarray(load_picture(p))[..., 0].mean() / 20) for p in example.pages]
    assert reds == [0, 1, 2, 3, 4]


def test_mmdocir_without_boxes_the_evidence_is_pages(tmp_path):
    fx.mmdocir(tmp_path, [fx.docir_question(layout_mapping=[], page_id=[1, 3])])
    assert one(load_task("mmdocir", tmp_path)).evidence == (Page(1), Page(3))
    assert one(load_task("mmdocir", tmp_path, max_pages=3)).evidence == (Page(1), Page(2))


def test_mmdocir_clamps_a_box_that_leaves_the_page_a_little(tmp_path):
    fx.mmdocir(tmp_path, [fx.docir_question(bbox=[-3, 100, 615, 260.5])])
    (place,) = one(load_task("mmdocir", tmp_path)).evidence
    assert place.region.corners == (0, 100, 612, 260.5)


@pytest.mark.parametrize(
    ("question", "why"),
    [
        (fx.docir_question(bbox=[60, 100, 900, 260]), "leaves its page"),
        (fx.docir_question(bbox=[60, 100, 60, 260]), "has no area"),
        (fx.docir_question(page=182), "page 182 \\(from 0\\) of 5"),
        (fx.docir_question(page_id=[5]), "page 5 \\(from 0\\) of 5"),
    ],
)
def test_mmdocir_faults(tmp_path, question, why):
    fx.mmdocir(tmp_path, [question])
    (found,) = whys(load_task("mmdocir", tmp_path))
    assert re.search(why, found), found


def test_mmdocir_notices_pages_of_another_document(tmp_path):
    fx.mmdocir(tmp_path, [fx.docir_question()], last=7)
    assert whys(load_task("mmdocir", tmp_path)) == ["row 7 of the pages is of 'last.pdf', not of 'leaflet.pdf'"]


def test_mmdocir_scores_by_likeness(tmp_path):
    task = load_task("mmdocir", fx.mmdocir(tmp_path, [fx.docir_question()]))
    assert task.score("The green!", one(task)) == 1.0 and task.score("blue", one(task)) == 0.0


# ---------------------------------------------------------------------- MMLongBench
def docqa_row(pages=(2, 3, 7), answers=(3,), **more):
    row = {
        "id": "docqa_3", "doc_name": "manual_x", "page_list": [f"img/manual_x/manual_x_page{n}.jpg" for n in pages],
        "ans_page_list": list(answers), "question": "How many bolts?", "answer": "6", "answer_format": "Int",
    }  # fmt: skip
    return {**row, **more}


def test_mmlongbench_evidence_pages_are_matched_by_file_name(tmp_path):
    task = load_task("mmlongbench", fx.docqa(tmp_path, [docqa_row()]))
    example = one(task)
    assert example.evidence == (Page(1),) and len(example.pages) == 3  # page 3 of the document, the second shown
    assert task.score("Answer: There are 6", example) == 1.0 and task.score("Answer: 7", example) == 0.0


def test_mmlongbench_padding_pages_of_another_document_do_not_count(tmp_path):
    row = docqa_row()
    row["page_list"] = ["img/other/other_page3.jpg", *row["page_list"]]
    assert one(load_task("mmlongbench", fx.docqa(tmp_path, [row]))).evidence == (Page(2),)


def test_mmlongbench_slidevqa_file_names_count_from_one(tmp_path):
    row = docqa_row(doc_name="deck_1", page_list=[f"img/deck_1/what-clients-want-{n}-1024.jpg" for n in (3, 4, 5)])
    fx.docqa(tmp_path, [row], "slidevqa_K8")
    assert one(load_task("mmlongbench", tmp_path, subset="slidevqa")).evidence == (Page(1),)


def test_mmlongbench_cut_evidence_and_names_without_number_are_faults(tmp_path):
    fx.docqa(tmp_path, [docqa_row(answers=(4,)), docqa_row(id="b", page_list=["img/manual_x/cover.jpg"])])
    found = whys(load_task("mmlongbench", tmp_path))
    assert found[0] == "page 4 (from 0) of manual_x is not among the pages shown" and "has no page number" in found[1]


def test_mmlongbench_lengths_and_summaries(tmp_path):
    fx.docqa(tmp_path, [docqa_row()], "mmlongdoc_K128")
    assert len(every(load_task("mmlongbench", tmp_path, length="K128"))) == 1
    with pytest.raises(DataError, match="mmlongdoc_K8"):
        load_task("mmlongbench", tmp_path)
    with pytest.raises(OptionError, match="summaries have no short answer"):
        load_task("mmlongbench", tmp_path, subset="summ")
    with pytest.raises(OptionError, match="length='K9'"):
        load_task("mmlongbench", tmp_path, length="K9")


def niah(root, name, row, pictures):
    for i, path in enumerate(pictures):
        fx.picture(root / "mmlb_image" / path, 20, 20, (i, 0, 0))
    fx.write_lines(root / "mmlb_data" / "NIAH" / name, [row])
    return root


def test_mmlongbench_choice_pictures_come_last_and_pair_with_their_marks(tmp_path):
    row = {
        "id": "r1", "question": "Which is in the text?", "answer": 1, "ctxs": [{"text": "a<image>b"}, {"text": "<image>"}],
        "image_list": ["h/1.jpg", "h/2.jpg"], "choices_image": ["c/a.jpg", "c/b.jpg"],
    }  # fmt: skip
    niah(tmp_path, "retrieval-image_test_K8_dep6.jsonl", row, [*row["image_list"], *row["choices_image"]])
    task = load_task("mmlongbench", tmp_path, subset="retrieval-image")
    example = one(task)
    assert [p.name for p in example.images] == ["1.jpg", "2.jpg", "a.jpg", "b.jpg"]
    assert "a[picture 1]b" in example.question and example.question.endswith("\nA. [picture 3]\nB. [picture 4]")
    assert example.answers == ("B",) and "<image>" not in example.question
    assert task.score("Answer: B", example) == 1.0 and task.score("Answer: A or B", example) == 0.0


def test_mmlongbench_counted_needles_and_marks_without_pictures(tmp_path):
    row = {
        "id": "c1", "question": "How many <image>?", "answer": [1, 2], "ctxs": [{"text": "x<image>"}],
        "image_list": ["h/1.jpg"], "needle_image_list": ["n/1.jpg"],
    }  # fmt: skip
    niah(tmp_path, "counting-image_test_K8_dep3.jsonl", row, ["h/1.jpg", "n/1.jpg"])
    task = load_task("mmlongbench", tmp_path, subset="counting-image")
    example = one(task)
    assert example.images[1].parent.name == "n" and example.question.endswith("How many [picture 2]?")
    assert task.score("[2, 1]", example) == 1.0 and task.score("[1, 1]", example) == 0.0  # the sum counts
    niah(tmp_path, "counting-image_test_K8_dep3.jsonl", {**row, "needle_image_list": []}, [])
    assert whys(load_task("mmlongbench", tmp_path, subset="counting-image")) == ["2 marks for 1 pictures"]


def test_mmlongbench_retrieved_texts_haystacks_and_examples(tmp_path):
    fx.picture(tmp_path / "mmlb_image" / "e/1.jpg")
    fx.picture(tmp_path / "mmlb_image" / "e/2.jpg")
    texts = [{"title": "T", "text": "words", "doc_id": 1}]
    rag = {"id": "v", "image": "e/1.jpg", "question": "Who?", "answer": ["Ada"], "ctxs": texts, "positive_ctxs": texts}
    fx.write_lines(tmp_path / "mmlb_data/vrag/infoseek_K8_dep3.jsonl", [rag])
    task = load_task("mmlongbench", tmp_path, subset="infoseek")
    assert task.score("Answer: it was Ada L.", one(task)) == 1.0 and "Document (Title: T): words" in one(task).question
    hay = {"id": "h", "question": "Is there a dog?", "answer": "Yes", "ctxs": ["e/1.jpg", "e/2.jpg"]}
    fx.write_lines(tmp_path / "mmlb_data/NIAH/vh_single_test_1000_K8_dep6.jsonl", [hay])
    task = load_task("mmlongbench", tmp_path, subset="vh_single")
    assert one(task).answers == ("yes",) and len(one(task).images) == 2 and task.score("Answer: Yes", one(task)) == 1.0
    shots = [[{"image": "e/1.jpg", "id": 3}, {"image": "e/2.jpg", "id": 5}]]
    cars = {"cars": {"exemplar_list": [shots], "test_example": [{"image": "e/2.jpg", "answer": 5}]}}
    fx.write_json(tmp_path / "mmlb_data/ICL/cars196_K8.json", cars)
    task = load_task("mmlongbench", tmp_path, subset="cars196")
    example = one(task)
    (page,) = example.evidence
    assert example.images[page.number].name == "2.jpg" and page.number < 2 and len(example.images) == 3
    assert f"Picture {page.number + 1}: label: 5" in example.question
    assert task.score("label: 5", example) == 1.0 and task.score("label: 3", example) == 0.0


# ---------------------------------------------------------------------- HallusionBench
def hallusion(root):
    rows = [
        fx.hallusion_row(),
        fx.hallusion_row(question="1", answer="0"),
        fx.hallusion_row(figure="1", answer="0", filename="./hallusion_bench/VD/a/0_1.png"),
        fx.hallusion_row("VS", filename=None, visual_input="0"),
        fx.hallusion_row("VS", figure="1", filename="./hallusion_bench/VS/a/0_1.png"),
    ]
    for row in rows:
        if row["filename"]:
            fx.picture(root / row["filename"])
    fx.write_json(root / "HallusionBench.json", rows)
    return root


def test_hallusionbench_asks_some_questions_without_picture(tmp_path):
    task = load_task("hallusionbench", hallusion(tmp_path))
    found = every(task)
    assert [len(e.images) for e in found.values()].count(0) == 1 and found["VS_a_0_0_0"].images == ()
    assert set(every(load_task("hallusionbench", tmp_path, subset="non_image"))) == {"VS_a_0_0_0"}
    assert len(every(load_task("hallusionbench", tmp_path, subset="image"))) == 4
    assert found["VD_a_0_0_1"].answers == ("no",) and found["VD_a_0_0_0"].answers == ("yes",)


def test_hallusionbench_halves_share_no_set_of_figures(tmp_path):
    rows = [fx.hallusion_row(figure=f, set_id=str(s), filename=None) for s in range(8) for f in "01"]
    fx.write_json(tmp_path / "HallusionBench.json", rows)
    halves_share_nothing(load_task("hallusionbench", tmp_path), lambda e: e.meta["set_id"])


def test_hallusionbench_summary_is_its_authors(tmp_path):
    task = load_task("hallusionbench", hallusion(tmp_path))
    names = ["VD_a_0_0_0", "VD_a_0_0_1", "VD_a_0_1_0", "VS_a_0_0_0", "VS_a_0_1_0"]
    examples = [every(task)[n] for n in names]
    said = ["Yes", "No", "Yes", "I cannot tell", "It is not sure"]
    # right: yes, yes, no, yes (unsure without picture), no (unsure with one)
    assert [task.score(s, e) for s, e in zip(said, examples)] == [1, 1, 0, 1, 0]
    found = task.summary(examples, said)
    # figures VD/0 (both right), VD/1, VS/1; VS/0 is no figure. Pairs VD/0 (figures 0 and 1), VD/1, VS/0
    assert found == {"aAcc": 0.6, "fAcc": pytest.approx(1 / 3), "qAcc": pytest.approx(1 / 3)}
    assert task.well_formed("I cannot tell", examples[0]) and not task.well_formed("a circle", examples[0])


# ---------------------------------------------------------------------- MMMU
def mmmu(root, *rows):
    fx.write_parquet(root / "Art" / "validation-00000-of-00001.parquet", list(rows))
    return root


def test_mmmu_pictures_come_in_the_order_of_their_marks(tmp_path):
    task = load_task("mmmu", mmmu(tmp_path, fx.mmmu_row()))
    example = one(task)
    from mmlens.model.pictures import load_picture

    assert [load_picture(p).getpixel((0, 0))[0] for p in example.images] == [2, 1, 3]
    assert example.question.startswith(
        "Look at <image 1>, then at <image 2>: which is red?\nA. the first\nB. <image 3>\n"
    )
    assert example.meta["options"] == ("the first", "<image 3>", "neither's")  # a literal list in a string
    assert example.choices == ("A", "B", "C") and task.score("(B)", example) == 1.0
    assert task.score("no idea", example) == 0.0 and not task.well_formed("no idea", example)


def test_mmmu_open_questions_and_faults(tmp_path):
    rows = [
        fx.mmmu_row(1, question_type="open", options="[]", answer="['$6', '6']", question="How much is <image 1>?"),
        fx.mmmu_row(2, answer="?"),
        fx.mmmu_row(3, image_2=None),
        fx.mmmu_row(4, question="Which?", options="['a', 'b']"),
        fx.mmmu_row(5, options="oh"),
    ]
    task = load_task("mmmu", mmmu(tmp_path, *rows))
    example = one(task)
    assert example.answers == ("$6", "6") and example.choices == () and len(example.images) == 1
    assert task.score("The answer is 6.", example) == 1.0 and task.score("7", example) == 0.0
    assert list(task.check().faults) == [f"validation_Art_{n}" for n in (2, 3, 4, 5)]
    with pytest.raises(DataError, match="0 usable"):
        load_task("mmmu", tmp_path, subject="Music").examples("rank", 1)
    with pytest.raises(OptionError, match="without subject="):
        load_task("mmmu", "hub:MMMU/MMMU")


# ---------------------------------------------------------------------- 3DSRBench
def test_3dsrbench_circular_counts_a_question_once(tmp_path):
    ids = ["AB12CD34", "AB12CD34-1", "AB12CD34-flip", "AB12CD34-flip-1"]
    rows = [fx.tsv_row(i, qid, answer="AB"[i % 2]) for i, qid in enumerate(ids, 1)]
    fx.write_tsv(tmp_path / "3dsrbench_v1_vlmevalkit_circular.tsv", rows)
    task = load_task("3dsrbench", tmp_path)
    examples = [every(task)[i] for i in ids]
    assert examples[0].choices == ("A", "B") and examples[0].question.startswith('Which is "higher"?\nA. the lamp\n')
    said = ["B", "A", "B", "B"]  # the last is wrong
    assert task.summary(examples, said) == {"flip": 0.5, "circular": 0.5, "flip_circular": 0.0}
    assert task.summary(examples, ["B", "A"] * 2)["flip_circular"] == 1.0


def test_3dsrbench_rows_may_point_to_another_rows_picture(tmp_path):
    rows = [fx.tsv_row(1, "AAAAAAAA"), fx.tsv_row(2, "BBBBBBBB", image="1"), fx.tsv_row(3, "CCCCCCCC", image="!")]
    fx.write_tsv(tmp_path / "3dsrbench_circular.tsv", rows)
    task = load_task("3dsrbench", tmp_path)
    found = every(task)
    assert found["AAAAAAAA"].images == found["BBBBBBBB"].images and whys(task) == ["a picture that is no base64"]
    assert task.group(rows[0]) == task.group(rows[1]) != task.group(rows[2])


def test_3dsrbench_parquet_with_links_reads_the_pictures_beside_it(tmp_path):
    rows = [
        {**fx.tsv_row(i, f"Q{i}"), "image_url": f"http://images.cocodataset.org/val2017/{i // 2}.png"} for i in range(8)
    ]
    for row in rows:
        del row["image"]
    for i in range(4):
        fx.picture(tmp_path / "coco_images" / f"{i}.png")
    fx.write_parquet(tmp_path / "test.parquet", rows)
    task = load_task("3dsrbench", tmp_path, subset="plain")
    assert len(every(task)) == 8
    halves_share_nothing(task, lambda e: e.images[0])


# ---------------------------------------------------------------------- Video-MME, MLVU
def test_videomme_options_come_with_their_letters(tmp_path):
    row = {
        "video_id": "001", "duration": "short", "domain": "Knowledge", "sub_category": "Art", "url": "https://x", "videoID": "abc",
        "question_id": "001-1", "task_type": "Counting", "question": "How many?", "options": ["A. One.", "B. Two."], "answer": "B",
    }  # fmt: skip
    rows = [
        row,
        {**row, "question_id": "001-2", "duration": "long", "videoID": "none"},
        {**row, "question_id": "001-3", "answer": "E"},
    ]
    fx.write_parquet(tmp_path / "videomme" / "test-00000-of-00001.parquet", rows)
    fx.video(tmp_path / "videos" / "abc.mp4")
    task = load_task("video-mme", tmp_path)
    example = one(task)
    assert example.question == "How many?\nA. One.\nB. Two.\nAnswer with the letter of the right choice."
    assert example.meta["options"] == ("One.", "Two.") and example.video.endswith("videos/abc.mp4")
    assert task.score("Two.", example) == 1.0 and task.score("A. One.", example) == 0.0
    assert whys(task) == ["none.mp4 is missing", "the answer 'E' to 2 choices"]
    with pytest.raises(DataError, match="0 usable"):
        load_task("video-mme", tmp_path, subset="medium").examples("rank", 1)


def test_mlvu_answers_are_texts_and_open_tasks_faults(tmp_path):
    plot = {
        "video": "movie.mp4", "duration": 246, "question": "What color?", "candidates": ["Yellow", "Red"], "answer": "Red",
        "question_type": "plotQA",
    }  # fmt: skip
    twice = {**plot, "candidates": ["Red", "Red"]}
    fx.write_json(tmp_path / "json" / "1_plotQA.json", [plot, {**plot, "answer": "Blue"}, twice])
    fx.write_json(tmp_path / "json" / "9_summary.json", [{"video": "movie.mp4", "question": "Sum up", "answer": "So."}])
    fx.video(tmp_path / "video" / "1_plotQA" / "movie.mp4")
    task = load_task("mlvu", tmp_path)
    example = one(task)
    assert example.answers == ("B",) and example.choices == ("A", "B") and example.meta["task"] == "plotQA"
    assert sorted(Counter(whys(task)).values()) == [1, 1, 1] and any("open task" in w for w in whys(task))
    assert len(every(load_task("mlvu", tmp_path, subset="plotQA"))) == 1
    with pytest.raises(DataError, match="1_plotQA"):
        load_task("mlvu", tmp_path / "video")


# ---------------------------------------------------------------------- our own format
def lines(root, *rows):
    fx.picture(root / "a.png", 64, 48)
    fx.write_lines(
        root / "examples.jsonl", [{"id": str(i), "question": "What?", "answer": "dog", **r} for i, r in enumerate(rows)]
    )
    return root


def test_jsonl_reads_every_kind_of_region(tmp_path):
    row = {
        "images": ["a.png", "a.png"],
        "evidence": [
            {"box": [1, 2, 3, 4]},
            {"box": [1, 2, 3, 4], "format": "xywh", "units": "thousandths", "image": 1},
            {"box": [60, 100, 300, 260], "units": "points", "page_size": [612, 792]},
            {"polygon": [[0, 0], [9, 0], [0, 9]]},
            {"polygon": [[[0, 0], [9, 0], [0, 9]], [[1, 1], [2, 1], [1, 2]]]},
            {"rle": {"counts": [2, 3, 1], "size": [3, 2]}},
            {"page": 1},
        ],
    }
    evidence = one(load_task("jsonl", lines(tmp_path, row))).evidence
    assert evidence[0] == Box.from_xyxy(1, 2, 3, 4)
    assert evidence[1] == PageRegion(1, Box.from_xywh(1, 2, 3, 4, units="thousandths"))
    assert evidence[2] == Box.from_xyxy(60, 100, 300, 260, units="points", page_size=(612.0, 792.0))
    assert evidence[3] == Polygon.from_points([(0, 0), (9, 0), (0, 9)]) and len(evidence[4].rings) == 2
    assert evidence[5].pixels.T.ravel().tolist() == [False, False, True, True, True, False] and evidence[6] == Page(1)


def test_jsonl_reads_tubes_by_frame_and_second(tmp_path):
    fx.video(tmp_path / "v.mp4")
    tubes = [
        {"tube": [{"frame": 3, "box": [1, 2, 3, 4]}, {"frame": 1, "box": [1, 2, 3, 4]}]},
        {"tube": [{"second": 0.1, "box": [1, 2, 3, 4]}], "between": False},
    ]
    example = one(
        load_task("jsonl", lines(tmp_path, {"video": {"path": "v.mp4", "begin": 1, "end": 9}, "evidence": tubes}))
    )
    assert [w for w, _ in example.evidence[0].places] == [1, 3] and not example.evidence[0].between
    assert example.evidence[1] == Tube(((0.1, Box.from_xyxy(1, 2, 3, 4)),), "second", False)
    assert (example.video.begin, example.video.end) == (1, 9)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"images": "a.png"}, "images: 'a.png' is not of type 'array'"),
        ({"images": ["a.png"], "evidence": [{"box": [1, 2, 3]}]}, r"evidence\[0\].box: \[1, 2, 3\]"),
        ({"images": ["a.png"], "evidence": [{"box": [1, 2, 3, 4], "units": "inch"}]}, r"evidence\[0\].units"),
        ({"colour": "red"}, "'colour' was unexpected"),
        ({"answers": ["a"]}, "answers: needed, or answer, and not both"),
        ({"images": ["a.png"], "pages": ["a.png"]}, "images, pages, video: at most one"),
        ({"images": ["b.png"]}, "b.png is missing"),
        ({"images": ["../a.png"]}, "leaves the data set's folder"),
        ({"images": ["/etc/passwd"]}, "leaves the data set's folder"),
        ({"images": ["a.png"], "evidence": [{"page": 1}]}, "evidence on picture 1 of 1"),
        ({"images": ["a.png"], "evidence": [{"box": [70, 2, 90, 4]}]}, "lies outside its picture"),
        ({"images": ["a.png"], "evidence": [{"box": [7, 2, 7, 4]}]}, "has no area"),
        ({"images": ["a.png"], "evidence": [{"box": [7, 2, 9, 4], "units": "points"}]}, "page_size"),
        ({"images": ["turned.jpg"], "evidence": [{"box": [7, 2, 9, 4]}]}, "EXIF"),
        ({"video": "no.mp4"}, "no.mp4 is missing"),
        ({"video": "bad.mp4"}, "cannot be read"),
        ({"video": {"path": "v.mp4", "end": 99}}, "12 frames"),
        ({"video": "v.mp4", "evidence": [{"tube": [{"frame": 12, "box": [1, 2, 3, 4]}]}]}, "frame 12 of a video of 12"),
    ],
)
def test_jsonl_faults_name_the_field(tmp_path, row, why):
    fx.picture(tmp_path / "turned.jpg", 64, 48, orientation=8)
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    fx.video(tmp_path / "v.mp4")
    (found,) = whys(load_task("jsonl", lines(tmp_path, row)))
    assert re.search(why, found), found
    assert len(found) < 250 and "\n" not in found


def test_jsonl_takes_a_file_and_counts_cut_lines(tmp_path):
    lines(tmp_path, {"images": ["a.png"]})
    path = tmp_path / "examples.jsonl"
    path.write_text(path.read_text() + '{"id": "cut", "quest')
    task = load_task("jsonl", path)
    assert task.check().n_usable == 1 and "no JSON" in whys(task)[0]
    assert task.identity()["data"] == "examples.jsonl"
    with pytest.raises(DataError, match=r"examples\.jsonl"):
        load_task("jsonl", tmp_path / "none")


def test_jsonl_scores_letters_choices_and_texts(tmp_path):
    task = load_task("jsonl", lines(tmp_path, {"choices": ["A", "B"], "answer": "B"}, {"choices": ["dog", "cat"]}, {}))
    letter, choice, text = (every(task)[str(i)] for i in range(3))
    assert task.score("(B)", letter) == 1.0 and not task.well_formed("A or B", letter)
    assert task.score("The dog.", choice) == 1.0 and not task.well_formed("horse", choice)
    assert task.score("Dog", text) == 1.0 and task.well_formed("horse", text) and not task.well_formed(" ", text)


def test_examples_of_any_task_survive_being_written(tmp_path):
    mask = Mask(np.eye(48, 64, dtype=bool))
    made = Example(
        id="x", question="Where is the é?", answers=("a", "b"), images=(fx.picture(tmp_path / "p.png"), fx.encoded()),
        subject="the é", choices=("a", "b"),
        evidence=(PageRegion(1, mask), Box.from_xyxy(0.1, 0, 0.5, 1, units="fraction"), Page(1)),
        meta={"n": np.int64(3), "box": (1.5, 2), "shape": Polygon.from_points([(0, 0), (4, 0), (0, 4)])},
    )  # fmt: skip
    write_examples([made], tmp_path / "out")
    read = one(load_task("jsonl", tmp_path / "out"))
    assert (read.question, read.answers, read.subject, read.choices) == (
        made.question,
        made.answers,
        made.subject,
        made.choices,
    )
    assert (read.evidence[0].region.pixels == mask.pixels).all() and read.evidence[1:] == made.evidence[1:]
    assert read.meta == {**made.meta, "n": 3}
    assert len(list((tmp_path / "out/pictures").iterdir())) == 1  # the same picture twice
    with pytest.raises(DataError, match="not empty"):
        write_examples([made], tmp_path / "out")
    with pytest.raises(DataError, match="meta with a object"):
        write_examples([Example(id="y", question="q", answers=("a",), meta={"o": object()})], tmp_path / "other")


@pytest.mark.parametrize("name", ["scenes/image", "scenes/video", "scenes/multi", "scenes/document"])
def test_generated_scenes_survive_being_written(tmp_path, name):
    scenes = load_task(name).examples("rank", 3)
    write_examples(scenes, tmp_path / "out")
    task = load_task("jsonl", tmp_path / "out")
    assert not task.check().faults
    read = every(task)
    for example in scenes:
        other = read[example.id]
        assert (other.question, other.answers, other.evidence) == (example.question, example.answers, example.evidence)
        assert other.distractors == example.distractors


def test_a_clip_survives_being_written(tmp_path):
    task = load_task("vidstg", fx.vidstg(tmp_path / "in"))
    write_examples(task, tmp_path / "out")
    read, made = one(load_task("jsonl", tmp_path / "out")), one(task)
    assert (read.evidence, read.distractors, read.video.begin, read.video.end) == (
        made.evidence,
        made.distractors,
        2,
        12,
    )


def test_the_schema_ships_with_the_package_and_is_valid():
    from importlib.resources import files

    from jsonschema import Draft202012Validator

    schema = json.loads(files("mmlens.tasks").joinpath("schema/examples.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
