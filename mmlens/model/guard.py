"""Checks of a model's inputs before the forward: each fault that models answer with silence or a riddle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mmlens.errors import (
    MissingTokenTypesError,
    PictureTokenError,
    PlaceholderError,
    PromptError,
    RightPaddingError,
)
from mmlens.families.base import Family


def check_processor(family: Family, config: Any, processor: Any) -> None:
    """The processor and the model must mean the same token by 'picture'."""
    theirs = [i for i in getattr(processor, "image_token_ids", None) or [] if i is not None]
    if theirs and config.image_token_id not in theirs:
        raise PictureTokenError(
            f"the processor marks pictures with token {theirs[0]}, the model's config with {config.image_token_id}",
            expected="one id in both",
            fix="load both from the same checkpoint, or set model.config.image_token_id",
        )


def placeholder_ids(family: Family, config: Any, ids: torch.Tensor) -> torch.Tensor:
    """Ids that picture features replace, on the device of `ids`."""
    return torch.tensor(list(family.token_ids(config)), device=ids.device)


def check_inputs(family: Family, config: Any, inputs: Mapping[str, Any], processor: Any) -> None:
    """Raise for inputs that would run but mean something else."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise PromptError(
            f"inputs with keys {sorted(inputs)}",
            expected="a processor's output: input_ids of shape (batch, pos), attention_mask, pixel_values, ...",
            fix="pass vlm.prompt(...), or call the processor with return_tensors='pt'",
        )
    mask = inputs.get("attention_mask")
    if mask is not None and bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise RightPaddingError(
            "attention_mask has padding after real tokens",
            expected="left padding, so that the last column of every example is its last token",
            fix="processor.tokenizer.padding_side = 'left', or let vlm.prompt([...]) build the batch",
        )
    n_marks = int(torch.isin(ids, placeholder_ids(family, config, ids)).sum())
    filled = family.filled(config, inputs, processor)
    if n_marks != filled:
        raise PlaceholderError(
            f"{n_marks} picture tokens in input_ids for pictures that fill {filled}",
            expected="as many placeholders as the pictures' features",
            fix="encode text and pictures in one call of the model's own processor, without truncation",
        )
    if family.needs_token_types and n_marks and inputs.get("mm_token_type_ids") is None:
        raise MissingTokenTypesError(
            f"inputs for {family.name} with {n_marks} picture tokens and no mm_token_type_ids",
            expected="mm_token_type_ids beside input_ids; without them every position is wrong",
            fix="keep everything that the processor returns, or build the prompt with vlm.prompt(...)",
        )
