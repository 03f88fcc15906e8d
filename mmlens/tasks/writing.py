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
from mmlens.model.video import Video, VideoFile
from mmlens.tasks.base import Example, Half, Task
from mmlens.tasks.jsonl import faulty_field
from mmlens.tasks.regions_json import region_json, to_json


def write_examples(examples: Task | Iterable[Example], folder: str | Path) -> Path:
    """Save examples so that `load_task("jsonl", folder)` gives them back.

    Pictures become PNG files named by their pixels, so that one is stored once; video files are copied. Halves are
    drawn anew when the folder is read; what a reader kept in one half stays in one.

    Parameters
    ----------
    examples
        Examples; or a task or a half of one: all of a data set, `default_n` of each half of a generated one. Only a
        task says how many frames a second its clips of plain frames have; without it they are read at 2.
    folder
        A new or empty folder.

    Raises
    ------
    DataError
        At the first example that could not be read again: no answers, chosen frames of a `Video`, ...

    Returns
    -------
    Path
        The file examples.jsonl.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        filled = any(folder.iterdir())
    except OSError as error:
        raise DataError(
            f"{folder} cannot be a folder: {error.strerror}", expected="a new or empty folder", fix="give another"
        ) from None
    if filled:
        raise DataError(f"{folder} is not empty", expected="a new or empty folder", fix="give another")
    task = examples.task if isinstance(examples, Half) else examples
    fps = task.video_options.get("fps") if isinstance(task, Task) else None
    path, unfinished = folder / "examples.jsonl", folder / ".examples.jsonl.part"
    with unfinished.open("w", encoding="utf-8") as file:
        for example in examples:
            text = json.dumps(_record(example, folder, fps), ensure_ascii=False, default=_plain)
            wrong = faulty_field(json.loads(text))
            if wrong is not None:
                raise DataError(
                    f"the example {example.id!r} cannot be written: {wrong}",
                    expected="what examples.schema.json allows",
                    fix="give it answers, and texts as str; see docs/data.md",
                )
            file.write(text + "\n")
    os.replace(unfinished, path)
    return path


def _plain(value: Any) -> Any:
    """numpy's numbers as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise DataError(f"an example with a {type(value).__name__}", expected="texts and numbers", fix="convert it first")


def _record(example: Example, folder: Path, fps: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"id": str(example.id), "question": example.question, "answers": list(example.answers)}
    if example._group is not None:
        row["group"] = example._group
    for name in ("images", "pages"):
        if getattr(example, name):
            row[name] = [_picture(p, folder) for p in getattr(example, name)]
    if example.video is not None:
        row["video"] = _video(example.video, folder, fps)
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


def _video(video: Any, folder: Path, fps: float | None) -> Any:
    if isinstance(video, Video) and _is_whole(video):
        video, fps = video.frames, video.fps
    if isinstance(video, list | tuple | np.ndarray):
        rate = {} if fps is None else {"fps": fps}
        return {"frames": [_picture(frame, folder) for frame in video], **rate}
    if not isinstance(video, str | Path | VideoFile):
        raise DataError(
            f"a video given as {type(video).__name__}" + (", of chosen frames" if isinstance(video, Video) else ""),
            expected="a file, or every frame of a video",
            fix="give the file's path or a VideoFile, or frames_of(frames, fps=...)",
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


def _is_whole(video: Video) -> bool:
    """Whether frame i of a video stands at i / fps, as in one of pictures that are all its frames."""
    n = len(video)
    even = all(abs(t - i / video.fps) < 1e-6 for i, t in enumerate(video.times))
    return video.indices == tuple(range(n)) and video.n_source == n and even
