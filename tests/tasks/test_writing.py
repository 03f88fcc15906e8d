"""Examples written and read again: groups, frame rates, numpy's numbers, and what is refused before it is written."""

import json

import numpy as np
import pytest
from tasks import fixtures as fx
from tasks.reading import every, one

from mmlens.errors import DataError
from mmlens.evidence.regions import Box, Page, PageRegion, Tube
from mmlens.model.video import VideoFile, frames_of, read_video
from mmlens.tasks import load_task
from mmlens.tasks.base import Example
from mmlens.tasks.writing import write_examples

BOX = Box.from_xyxy(0, 0, 9, 9)


def example(**more):
    return Example(**{"id": "x", "question": "What is it?", "answers": ("dog",), **more})


def clip(n=4):
    return [np.full((16, 16, 3), 30 * i, np.uint8) for i in range(n)]


@pytest.mark.parametrize("given", ["task", "halves", "lists"])
def test_written_records_keep_their_groups_apart(tmp_path, given):
    rows = []
    for i in range(36):
        fx.picture(tmp_path / "in" / f"{i}.png", 8, 8, color=(i, 0, 0))
        rows.append({"id": str(i), "question": "q", "answer": "a", "pages": [f"{i}.png"], "group": f"doc{i // 6}"})
    fx.write_lines(tmp_path / "in/examples.jsonl", rows)
    task = load_task("jsonl", tmp_path / "in")
    some = {
        "task": lambda: task,
        "halves": lambda: [e for half in ("rank", "judge") for e in task.split(half)],
        "lists": lambda: [e for half in ("rank", "judge") for e in task.examples(half, task.count(half))],
    }[given]()
    write_examples(some, tmp_path / "out")
    read = load_task("jsonl", tmp_path / "out")
    assert len(every(read)) == 36
    documents = [{int(e.id) // 6 for e in read.split(half)} for half in ("rank", "judge")]
    assert documents[0] and documents[1] and not documents[0] & documents[1]


def test_the_rate_of_a_tasks_frames_is_kept(tmp_path):
    task = load_task("scenes/video", fps=4.0, n_frames=4)
    task.default_n = 2
    for number, given in enumerate((task, task.split("rank"))):
        out = write_examples(given, tmp_path / str(number))
        assert {json.loads(line)["video"]["fps"] for line in out.read_text().splitlines()} == {4.0}
        first = next(iter(load_task("jsonl", out)))
        made = task.example("rank", 0, 0)
        assert first.video.times == (0.0, 0.25, 0.5, 0.75) and first.video.size == (128, 128) and len(first.video) == 4
        assert all((np.asarray(a) == b).all() for a, b in zip(first.video.frames, made.video))


def test_the_rate_of_a_video_is_kept_and_a_prompt_sees_its_times(tmp_path):
    from mmlens import HookedVLM

    tube = Tube.from_seconds({0.5: BOX, 1.0: BOX})
    made = example(video=frames_of(clip(8), fps=4.0), evidence=(tube,), question="what color is the star ?")
    read = one(load_task("jsonl", write_examples([made], tmp_path / "out")))
    vlm = HookedVLM.from_pretrained("toy-qwen3-vl")
    before, after = (vlm.prompt(e.question, videos=[e.video], evidence=list(e.evidence)) for e in (made, read))
    assert before.roles == after.roles and before.items == after.items
    assert not any(hasattr(value, "getpixel") for value in vars(read.video).values())  # the paths alone are held


def test_frames_without_a_rate_stay_without(tmp_path):
    out = write_examples([example(video=clip())], tmp_path / "out")
    assert set(json.loads(out.read_text())["video"]) == {"frames"}
    assert isinstance(one(load_task("jsonl", out)).video, list)


def test_chosen_frames_of_a_video_are_refused(tmp_path):
    path = fx.video(tmp_path / "v.mp4") or tmp_path / "v.mp4"
    with pytest.raises(DataError, match="chosen frames"):
        write_examples([example(video=read_video(path, indices=[0, 3]))], tmp_path / "out")
    write_examples([example(video=VideoFile(path, 1, 5))], tmp_path / "file")


def test_numbers_of_numpy_are_written(tmp_path):
    def numpys(value, **more):  # past the type hints, which are checked in tests only
        for name, number in more.items():
            object.__setattr__(value, name, number)
        return value

    box = numpys(Box.from_xyxy(0, 0, 5, 5), x0=np.float64(0))
    tube = numpys(Tube.from_frames({1: BOX}), places=((np.int64(1), BOX), (np.int64(2), box)))
    regions = (numpys(Page(0), number=np.int64(0)), numpys(PageRegion(0, BOX), number=np.int32(0)))
    given = [
        numpys(example(images=(fx.encoded(),), evidence=regions), id=np.int64(3)),
        example(id="video", video=clip(), evidence=(tube,)),
    ]
    read = every(load_task("jsonl", write_examples(given, tmp_path / "out")))
    assert read["3"].evidence == given[0].evidence and read["video"].evidence == given[1].evidence


def test_a_span_between_frames_is_read_again(tmp_path):
    made = example(video=clip(), evidence=(Tube.span(0.5, 2, by="frame"),))
    assert one(load_task("jsonl", write_examples([made], tmp_path / "out"))).evidence == made.evidence


@pytest.mark.parametrize(
    ("more", "why"),
    [({"answers": ()}, "answers"), ({"question": ""}, "question"), ({"id": ""}, "id")],
)
def test_what_could_not_be_read_again_is_not_written(tmp_path, more, why):
    with pytest.raises(DataError, match=why):
        write_examples([example(**more)], tmp_path / "out")


def test_a_file_in_the_folders_place_is_a_data_error(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(DataError, match="cannot be a folder"):
        write_examples([example()], tmp_path / "out")
