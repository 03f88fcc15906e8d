"""mmlens's own format: one example a line, checked against a schema; and writing any examples in it."""

from __future__ import annotations

import json
import posixpath
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

from mmlens.model.video import VideoFile
from mmlens.tasks.base import Example
from mmlens.tasks.data import DataTask
from mmlens.tasks.frames import StoredFrames
from mmlens.tasks.regions_json import from_json, region_of
from mmlens.tasks.rows import Fault, Folder, JsonLines, Row, Rows
from mmlens.tasks.scoring import choice_letter, exact


@cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator

    text = files("mmlens.tasks").joinpath("schema/examples.schema.json").read_text("utf-8")
    return Draft202012Validator(json.loads(text))


def faulty_field(row: Row) -> str | None:
    """The field of a record that its schema refuses, and why; None for a good one."""
    from jsonschema.exceptions import best_match

    if ("answers" in row) == ("answer" in row):
        return "answers: needed, or answer, and not both"
    if sum(name in row for name in ("images", "pages", "video")) > 1:
        return "images, pages, video: at most one of the three"
    video = row.get("video")
    if isinstance(video, dict):
        if ("path" in video) == ("frames" in video):
            return "video: path, or frames, and not both"
        for name, of in (("begin", "path"), ("end", "path"), ("fps", "frames")):
            if name in video and of not in video:
                return f"video.{name}: only with {of}"
    error = best_match(_validator().iter_errors(row))
    if error is None:
        return None
    why = str(error.message)
    return f"{error.json_path.removeprefix('$.')}: {why if len(why) < 160 else why[:157] + '...'}"


class JsonLinesTask(DataTask):
    """Examples from `examples.jsonl` (or another .jsonl file), with the files that it names beside it.

    An answer is right if it is an accepted one after normalising (lower case, no articles and punctuation), or if it
    chooses the right letter where the choices are letters.
    """

    name = "jsonl"
    layout = (
        "examples.jsonl with one object a line: id, question, answers, and images, pages or video (files inside the "
        "folder), subject, evidence, distractors, choices, meta; see docs/data.md and examples.schema.json"
    )
    subsets: ClassVar[tuple[str, ...]] = ("all",)
    max_new_tokens = 32

    def open(self) -> Rows:
        given = Path(self.path)
        if self.hub or not given.is_file():
            self.folder = self._folder()
            return JsonLines(self.folder.first("examples.jsonl"))
        self.folder = Folder(given.parent, layout=self.layout)
        return JsonLines(given)

    def record_id(self, row: Row) -> str:
        return str(row["id"])

    def group(self, row: Row) -> str:
        shown = [*(row.get("images") or ()), *(row.get("pages") or ())][:1]
        video = row.get("video")
        if not shown and video is not None:
            shown = (
                [video] if isinstance(video, str) else [video["path"]] if "path" in video else video.get("frames", ())
            )
        # "0.png" and "./0.png" are one file
        return str(row.get("group") or ",".join(posixpath.normpath(str(name)) for name in shown) or row["id"])

    def read(self, row: Row) -> Example:
        wrong = faulty_field(row)
        if wrong is not None:
            raise Fault(wrong)
        meta = from_json(row.get("meta", {}))
        return Example(
            id=row["id"],
            question=row["question"],
            answers=tuple(row["answers"]) if "answers" in row else (row["answer"],),
            images=tuple(map(self.folder.inside, row.get("images", ()))),
            video=self._video(row.get("video")),
            pages=tuple(map(self.folder.inside, row.get("pages", ()))),
            subject=row.get("subject"),
            evidence=tuple(map(region_of, row.get("evidence", ()))),
            distractors=tuple(map(region_of, row.get("distractors", ()))),
            choices=tuple(row.get("choices", ())),
            meta=meta,
        )

    def _video(self, given: Any) -> Any:
        if given is None:
            return None
        if isinstance(given, str):
            return str(self.folder.inside(given))
        if "frames" in given:
            frames = [self.folder.inside(name) for name in given["frames"]]
            if "fps" not in given:
                return frames
            if not isfinite(given["fps"]):
                raise Fault(f"video.fps: {given['fps']}")
            return StoredFrames(frames, fps=given["fps"])
        end = given.get("end")
        return VideoFile(
            self.folder.inside(given["path"]), int(given.get("begin", 0)), None if end is None else int(end)
        )

    def score(self, said: str, example: Example) -> float:
        if _letters(example):
            return float(choice_letter(said, dict.fromkeys(example.choices, "")) in example.answers)
        return float(exact(said, example.answers))

    def well_formed(self, said: str, example: Example) -> bool:
        if _letters(example):
            return choice_letter(said, dict.fromkeys(example.choices, "")) is not None
        return exact(said, example.choices) if example.choices else bool(said.strip())


def _letters(example: Example) -> bool:
    return bool(example.choices) and all(len(c) == 1 and c.isalpha() and c.isupper() for c in example.choices)
