"""mmlens: the insides of vision-language models, by name.

Everything below is imported on first use, so that `import mmlens` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "HookedVLM": "mmlens.model.hooked",
    "Prompt": "mmlens.model.prompt",
    "ActivationCache": "mmlens.model.cache",
    "Generation": "mmlens.model.decode",
    "Box": "mmlens.evidence.regions",
    "Polygon": "mmlens.evidence.regions",
    "Mask": "mmlens.evidence.regions",
    "Tube": "mmlens.evidence.regions",
    "Page": "mmlens.evidence.regions",
    "PageRegion": "mmlens.evidence.regions",
    "Video": "mmlens.model.video",
    "VideoFile": "mmlens.model.video",
    "read_video": "mmlens.model.video",
    "TokenSet": "mmlens.tokens",
    "PerExample": "mmlens.tokens",
    "Task": "mmlens.tasks",
    "Example": "mmlens.tasks",
    "load_task": "mmlens.tasks",
    "HeadScores": "mmlens.scores",
    "HeadSet": "mmlens.scores",
    "LayerProfile": "mmlens.layers",
    "MMLensError": "mmlens.errors",
}
_ROOMS = ("errors", "evidence", "families", "interventions", "metrics", "model", "scan", "scores", "tasks", "tokens")

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from mmlens.errors import MMLensError
    from mmlens.evidence.regions import Box, Mask, Page, PageRegion, Polygon, Tube
    from mmlens.layers import LayerProfile
    from mmlens.model.cache import ActivationCache
    from mmlens.model.decode import Generation
    from mmlens.model.hooked import HookedVLM
    from mmlens.model.prompt import Prompt
    from mmlens.model.video import Video, VideoFile, read_video
    from mmlens.scores import HeadScores, HeadSet
    from mmlens.tasks import Example, Task, load_task
    from mmlens.tokens import PerExample, TokenSet


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"mmlens.{name}")
    raise AttributeError(f"module 'mmlens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_ROOMS])
