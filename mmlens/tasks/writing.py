"""Any examples written as examples.jsonl with their pictures beside it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mmlens.errors import DataError
from mmlens.model.pictures import load_picture
from mmlens.model.video import VideoFile
from mmlens.tasks.base import Example, Task
from mmlens.tasks.regions_json import region_json, to_json


def write_examples(examples: Task | Iterable[Example], folder: str | Path) -> Path:
    """Save examples so that `load_task("jsonl", folder)` gives them back.

    Pictures become PNG files named by their pixels, so that one is stored once; video files are copied. Halves are
    drawn anew when the folder is read.

    Parameters
    ----------
    examples
        Examples, or a task: all of a data set, `default_n` of each half of a generated one.
    folder
        A new or empty folder.

    Returns
    -------
    Path
        The file examples.jsonl.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise DataError(f"{folder} is not empty", expected="a new or empty folder", fix="give another")
    path, unfinished = folder / "examples.jsonl", folder / ".examples.jsonl.part"
    with unfinished.open("w", encoding="utf-8") as file:
        for example in examples:
            file.write(json.dumps(_record(example, folder), ensure_ascii=False) + "\n")
    os.replace(unfinished, path)
    return path


def _record(example: Example, folder: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"id": example.id, "question": example.question, "answers": list(example.answers)}
    for name in ("images", "pages"):
        if getattr(example, name):
            row[name] = [_picture(p, folder) for p in getattr(example, name)]
    if example.video is not None:
        row["video"] = _video(example.video, folder)
    if example.subject is not None:
        row["subject"] = example.subject
    for name in ("evidence", "distractors"):
        if getattr(example, name):
            row[name] = [region_json(r) for r in getattr(example, name)]
    if example.choices:
        row["choices"] = list(example.choices)
    if example.meta:
        row["meta"] = to_json(example.meta)
    return row


def _picture(picture: Any, folder: Path) -> str:
    image = load_picture(picture)
    digest = hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()[:24]
    path = folder / "pictures" / f"{digest}.png"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        image.save(path)
    return f"pictures/{path.name}"


def _video(video: Any, folder: Path) -> Any:
    if isinstance(video, list | tuple | np.ndarray):
        return {"frames": [_picture(frame, folder) for frame in video]}
    if not isinstance(video, str | Path | VideoFile):
        raise DataError(
            f"a video given as {type(video).__name__}", expected="a file, or frames", fix="give list(video.frames)"
        )
    source = Path(video.path if isinstance(video, VideoFile) else video)
    with source.open("rb") as file:
        name = hashlib.file_digest(file, "sha256").hexdigest()[:24] + source.suffix
    copy = folder / "videos" / name
    if not copy.exists():
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, copy)
    if isinstance(video, VideoFile):
        return {"path": f"videos/{name}", "begin": video.begin, "end": video.end}
    return f"videos/{name}"
