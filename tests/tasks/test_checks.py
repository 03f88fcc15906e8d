"""What a reader refuses before a model sees it: regions, videos, words, names and ids that no scan could use."""

import re

import pytest
from tasks import fixtures as fx
from tasks.reading import one, whys

from mmlens.errors import DataError, OptionError
from mmlens.evidence.regions import Box, Page, PageRegion
from mmlens.tasks import load_task
from mmlens.tasks.base import Example, check_index
from mmlens.tasks.checks import check_example
from mmlens.tasks.rows import Fault

BOX = {"box": [1, 2, 30, 40]}
HUGE = 10**400


def folder(root, *rows):
    for name in ("a.png", "b.png"):
        fx.picture(root / name, 64, 48)
    fx.picture(root / "small.png", 8, 8)
    fx.picture(root / "turned.jpg", 64, 48, orientation=6)
    fx.video(root / "v.mp4")
    (root / "broken.png").write_bytes(b"")
    if not (root / "loop").is_symlink():
        (root / "loop").symlink_to("loop")
    plain = [{"id": str(i), "question": "What is it?", "answer": "dog"} for i in range(len(rows))]
    fx.write_lines(root / "examples.jsonl", [{**p, **row} for p, row in zip(plain, rows)])
    return load_task("jsonl", root)


def on_picture(*evidence, **more):
    return {"images": ["a.png", "b.png"], "evidence": list(evidence), **more}


def on_video(*evidence):
    return {"video": "v.mp4", "evidence": list(evidence)}


def frames(*names, **more):
    return {"video": {"frames": list(names)}, **more}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (on_picture({"polygon": [[500, 500], [510, 500], [510, 510]]}), "polygon outside its picture"),
        (on_picture({"polygon": [[0, 0], [10, 10], [20, 20]]}), "without area"),
        (on_picture({"rle": {"counts": [3072], "size": [48, 64]}, "image": 1}), "a mask without any pixel"),
        (on_picture({"tube": [{"frame": 0, **BOX}]}), "a tube on a picture"),
        ({"images": ["a.png"], "distractors": [{"polygon": [[90, 0], [99, 0], [99, 9]]}]}, "polygon outside"),
        (on_video({"box": [70, 2, 90, 4]}), "lies outside its picture of 64 x 48"),
        (on_video({"polygon": [[500, 500], [510, 500], [510, 510]]}), "polygon outside"),
        (on_video({"tube": [{"frame": 0, **BOX}, {"frame": 1, "box": [70, 2, 90, 4]}]}), "lies outside its picture"),
        (on_video({"tube": [{"second": 0, "rle": {"counts": [4], "size": [2, 2]}}]}), "a mask without any pixel"),
        (on_video({**BOX, "image": 0}), "a numbered picture, of a video"),
        (on_video({"page": 0}), "a page, or"),
        (frames("a.png", "b.png", evidence=[{"box": [70, 2, 90, 4]}]), "lies outside its picture"),
        (frames("a.png", "b.png", evidence=[{"tube": [{"frame": 2, **BOX}]}]), "frame 2 of a video of 2"),
        (frames("a.png", "small.png"), "several sizes: 8 x 8, 64 x 48"),
        (frames("a.png", "broken.png"), "cannot be read"),
        (frames(), "video.frames"),
        ({"video": {"frames": ["a.png", "small.png"], "fps": 4}}, "sizes"),
        ({"video": {"frames": ["a.png"], "fps": 0}}, "video.fps"),
        ({"video": {"frames": ["a.png"], "fps": float("nan")}}, "video.fps"),
        ({"video": {"frames": ["a.png"], "path": "v.mp4"}}, "video: path, or frames, and not both"),
        ({"video": {"begin": 1}}, "video: path, or frames, and not both"),
        ({"video": {"path": "v.mp4", "fps": 2}}, "video.fps"),
        ({"video": {"frames": ["a.png"], "begin": 0}}, "video.begin"),
        ({"subject": "zebra"}, "stands 0 times"),
        ({"subject": ""}, "stands 0 times"),
        ({"subject": "i"}, "stands 2 times"),
        ({"subject": " ", "question": "a b"}, "subject"),
        ({"question": " \n"}, "has no words"),
        ({"question": "\ud800"}, "surrogates"),
        (on_picture({"box": [0, 0, HUGE, 3]}), "."),
        (on_picture({"polygon": [[0, 0], [HUGE, 3], [3, 3]]}), "too large"),
        (on_picture({"rle": {"counts": [0, HUGE], "size": [HUGE, 1]}}), "."),
        (on_video({"tube": [{"frame": HUGE, **BOX}]}), "too large"),
        (on_video({"tube": [{"second": float("nan"), **BOX}]}), "nan"),
        ({"images": ["a" * 4000]}, "File name too long"),
        ({"images": ["loop"]}, "loop"),
        ({"images": ["\ud800.png"]}, "no file can be named"),
    ],
)
def test_records_that_would_stop_a_scan_are_faults(tmp_path, row, why):
    (found,) = whys(folder(tmp_path, row))
    assert re.search(why, found), found
    assert len(found) <= 240 and found.encode()


def test_whole_numbers_written_with_a_point_are_read_as_whole(tmp_path):
    rows = [
        on_picture({"page": 1.0}, {**BOX, "image": 1.0}, {"rle": {"counts": [1.0, 3.0], "size": [2.0, 2.0]}}),
        {"video": {"path": "v.mp4", "begin": 3.0, "end": 9.0}, "evidence": [{"tube": [{"frame": 4.0, **BOX}]}]},
    ]
    first, second = folder(tmp_path, *rows)
    numbers = [first.evidence[0].number, first.evidence[1].number, second.video.begin, second.video.end]
    numbers.append(second.evidence[0].places[0][0])
    assert numbers == [1, 1, 3, 9, 4] and all(type(n) is int for n in numbers)


def test_the_size_that_a_record_says_is_of_the_first_picture_only(tmp_path):
    turned = on_picture({**BOX, "image": 1}, images=["a.png", "turned.jpg"], meta={"picture_size": [64, 48]})
    assert "EXIF" in whys(folder(tmp_path, turned))[0]
    turned["images"].reverse()
    turned["evidence"] = [BOX]
    assert not whys(folder(tmp_path, turned))


@pytest.mark.parametrize(
    "meta", [{"size": "large"}, {"size": 5}, {"picture_size": "large"}, {"x": {"region": {"foo": 1}}}]
)
def test_meta_of_a_users_own_never_makes_a_record_faulty(tmp_path, meta):
    assert one(folder(tmp_path, on_picture(BOX, meta=meta))).meta == meta


def test_checks_of_an_example_need_no_reader():
    good = Example("a", "What?", ("b",), images=(fx.encoded(),), evidence=(PageRegion(0, Box.from_xyxy(0, 0, 9, 9)),))
    check_example(good)
    with pytest.raises(Fault, match="picture 1 of 1"):
        check_example(Example("a", "What?", ("b",), images=good.images, evidence=(Page(1),)))


# ---------------------------------------------------------------------- ids
def test_an_id_that_stands_twice_is_told_and_every_fault_is_counted(tmp_path):
    rows = [
        {"id": "b", "images": ["gone.png"]},
        {"id": "b", "images": ["a.png"]},
        {"id": "b", "images": ["gone too.png"]},
        {"id": "b", "images": ["b.png"]},
        {"id": "c", "images": ["b.png"]},
    ]
    task = folder(tmp_path, *rows)
    for _ in range(2):  # the same again
        found = task.check()
        assert (found.n_usable, list(found.faults)) == (2, ["b", "b (2)", "b (3)"])
        assert [why.split()[-1] for why in found.faults.values()] == ["missing", "missing", "twice"]
    task = load_task("jsonl", tmp_path)
    halves = [e for half in ("rank", "judge") for seed in (0, 1) for e in _all(task, half, seed)]
    assert {(e.id, e.images[0].name) for e in halves} == {("b", "a.png"), ("c", "b.png")}
    assert len(task.faults) == 3


def _all(task, half, seed):
    try:
        return task.examples(half, task.count(half, None, seed), seed)
    except DataError:  # nothing fell into this half
        return []


@pytest.mark.parametrize("name", ["jsonl", "scenes/image", "scenes/video"])
def test_an_index_or_a_half_that_does_not_exist_is_an_option_error(tmp_path, name):
    folder(tmp_path, on_picture(BOX))
    task = load_task(name, tmp_path if name == "jsonl" else None)
    with pytest.raises(OptionError, match="index=-1"):
        task.example("rank", -1, 0)
    # type hints are checked in tests, so a half that is none does not get as far as the task
    for given, told in ((("foo", 0, 0), "split='foo'"), (("rank", 1.5, 0), "index=1.5"), (("rank", 0, -1), "seed=-1")):
        with pytest.raises(OptionError, match=told):
            check_index(*given)


def test_one_picture_by_two_names_is_in_one_half(tmp_path):
    rows = []
    for i in range(20):
        fx.picture(tmp_path / f"{i}.png", 8, 8)
        rows += [{"id": f"{i}a", "images": [f"{i}.png"]}, {"id": f"{i}b", "images": [f"./x/../{i}.png"]}]
    (tmp_path / "x").mkdir()
    task = folder(tmp_path, *rows)
    shown = [{e.images[0].resolve() for e in task.split(half)} for half in ("rank", "judge")]
    assert len(shown[0] | shown[1]) == 20 and not shown[0] & shown[1]


def test_a_file_without_records_is_named(tmp_path):
    (tmp_path / "coco_pope_random.json").write_text("")
    with pytest.raises(DataError, match=r"coco_pope_random\.json holds no records"):
        load_task("pope", tmp_path)
