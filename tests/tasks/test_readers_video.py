"""Readers of videos: the published layouts, and each trap of the formats by name."""

import re
from collections import Counter

import pytest
from tasks import fixtures as fx
from tasks.reading import every, halves_share_nothing, one, whys

from mmlens.errors import DataError
from mmlens.evidence.regions import Box
from mmlens.model.video import VideoFile
from mmlens.tasks import load_task


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


def test_vidstg_broken_trajectories_are_a_fault(tmp_path):
    fx.vidstg(tmp_path)
    (tmp_path / "vidor/training/0001/9001.json").write_text('{"cut')
    assert whys(load_task("vidstg", tmp_path)) == ["VidOR's 9001.json is no JSON"]


def test_vidstg_halves_share_no_video_and_test_is_of_vidors_validation(tmp_path):
    vids = [str(9000 + i) for i in range(6)]
    fx.vidstg(tmp_path, vids, records=[fx.vidstg_record(v) for v in vids for _ in range(2)])
    task = load_task("vidstg", tmp_path)
    halves_share_nothing(task, lambda e: e.video.path)
    fx.write_json(tmp_path / "annotations" / "test_annotations.json", [fx.vidstg_record()])
    with pytest.raises(DataError, match="validation"):
        load_task("vidstg", tmp_path, subset="test")


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
