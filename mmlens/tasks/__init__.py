"""Questions with answers and evidence; `load_task` finds one by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mmlens.errors import OptionError, UnknownTaskError, closest
from mmlens.tasks.base import Example, Task

# Name -> module and class, imported when asked for.
SCENES = {
    "scenes/image": "scenes:ScenesTask",
    "scenes/video": "scenes_video:ScenesVideoTask",
    "scenes/multi": "scenes_multi:ScenesMultiTask",
    "scenes/document": "scenes_document:ScenesDocumentTask",
}
DATA_SETS = {
    "jsonl": "jsonl:JsonLinesTask",
    "coco": "coco:CocoInstances",
    "refcocog": "refcocog:RefCocoG",
    "vidstg": "vidstg:VidStg",
    "mmlongbench": "mmlongbench:MMLongBench",
    "mmlongbench-doc": "mmlongbench_doc:MMLongBenchDoc",
    "mmdocir": "mmdocir:MMDocIR",
    "pope": "pope:Pope",
    "hallusionbench": "hallusionbench:HallusionBench",
    "mmmu": "mmmu:Mmmu",
    "3dsrbench": "threedsrbench:ThreeDSRBench",
    "video-mme": "videomme:VideoMme",
    "mlvu": "mlvu:Mlvu",
}


def _scene(place: str, domain: str, **options: Any) -> Task:
    return _find(place)(domain, **options)


def _find(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(f"mmlens.tasks.{module}"), name)


TASKS: dict[str, Callable[..., Task]] = {
    **{name: partial(_scene, place, "shapes") for name, place in SCENES.items()},
    **{f"{name}:digits": partial(_scene, place, "digits") for name, place in SCENES.items()},
    "scenes/digits": partial(_scene, SCENES["scenes/image"], "digits"),
}

__all__ = ["DATA_SETS", "TASKS", "Example", "Task", "load_task", "task_class"]


def task_class(name: str) -> Any:
    """The reader of a data set, by name."""
    _known(name, DATA_SETS)
    return _find(DATA_SETS[name])


def load_task(name: str, path: str | Path | None = None, **options: Any) -> Task:
    """A task by name: pictures, videos and pages drawn here, or a data set read from its own files.

    Parameters
    ----------
    name
        See `mmlens tasks` for the list.
    path
        For data sets: the folder (or file) that holds it, or "hub:owner/name" to stream it from the hub.
    **options
        Of the task; see docs/tasks.md and docs/data.md.

    Examples
    --------
    >>> from mmlens import load_task
    >>> load_task("scenes/image").examples("rank", 1)[0].question
    'What color is the star?'
    """
    _known(name, {**TASKS, **DATA_SETS})
    if (name in DATA_SETS) == (path is None):
        raise OptionError(
            f"path={path!r} for {name!r}",
            expected="a folder for data sets, and none for pictures that are drawn here",
            fix=f"load_task({name!r}, 'data/{name}')" if name in DATA_SETS else f"load_task({name!r})",
        )
    make = TASKS[name] if path is None else partial(task_class(name), path)
    try:
        return make(**options)
    except TypeError as error:
        raise OptionError(
            f"options {options} for {name!r}: {error}", expected="the task's own options", fix="see docs/tasks.md"
        ) from None


def _known(name: Any, names: Any) -> None:
    if not isinstance(name, str) or name not in names:
        raise UnknownTaskError(
            f"no task is named {name!r}",
            expected=f"one of {', '.join(names)}; closest: {closest(str(name), names)}",
            fix="check the spelling, or pass a Task of your own (docs/tasks.md)",
        )
