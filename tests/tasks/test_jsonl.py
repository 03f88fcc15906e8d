"""mmlens's own format: every kind of region, faults that name the field, and writing it."""

import json
import re

import numpy as np
import pytest
from tasks import fixtures as fx
from tasks.reading import every, one, whys

from mmlens.errors import DataError
from mmlens.evidence.regions import Box, Mask, Page, PageRegion, Polygon, Tube
from mmlens.tasks import load_task
from mmlens.tasks.base import Example
from mmlens.tasks.writing import write_examples


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
