"""Prompts without a model: encoded by its config and processor alone, no weights read."""

from __future__ import annotations

from typing import Any

from mmlens.families import FAMILIES
from mmlens.model.encode import encode, make_examples
from mmlens.model.loading import load_parts
from mmlens.model.prompt import Prompt


def weightless_prompt(
    name: str,
    question: Any,
    images: Any = None,
    *,
    videos: Any = None,
    fps: float | None = None,
    max_frames: int | None = None,
    images_kwargs: Any = None,
    revision: str | None = None,
) -> Prompt:
    """The prompt that `HookedVLM.from_pretrained(name).prompt(...)` makes, without loading the weights.

    Knows every token's role and place, so that `locate`, `heatmap` and `pixels_of` work for models of any size.

    Parameters
    ----------
    name, revision
        As `HookedVLM.from_pretrained` takes them.
    question, images, videos, fps, max_frames, images_kwargs
        As `HookedVLM.prompt` takes them.

    Examples
    --------
    >>> import numpy as np
    >>> from mmlens import Box
    >>> from mmlens.model.weightless import weightless_prompt
    >>> prompt = weightless_prompt("toy-qwen3-vl", "what color is the star ?", [np.zeros((64, 64, 3), np.uint8)])
    >>> prompt.locate(Box.from_xyxy(0, 0, 16, 16)).positions
    (4,)
    """
    config, processor = load_parts(name, revision=revision)
    family = next(f for f in FAMILIES if set(f.architectures) & set(config.architectures))
    examples = make_examples(
        question,
        images,
        videos=videos,
        fps=fps,
        max_frames=max_frames,
        system=None,
        subject=None,
        answer=None,
        evidence=None,
        distractors=None,
    )
    return encode(examples, family, config, processor, images_kwargs)
