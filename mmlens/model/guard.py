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
    UnknownFamilyError,
    UnsupportedAttentionError,
)
from mmlens.families.base import Family, Shape


def check_processor(family: Family, config: Any, processor: Any) -> None:
    """The processor and the model must mean the same token by 'picture'."""
    theirs = [i for i in getattr(processor, "image_token_ids", None) or [] if i is not None]
    if theirs and config.image_token_id not in theirs:
        raise PictureTokenError(
            f"the processor marks pictures with token {theirs[0]}, the model's config with {config.image_token_id}",
            expected="one id in both",
            fix="load both from the same checkpoint, or set model.config.image_token_id",
        )


def check_model(model: Any, family: Family, decoder: Shape, tower: Shape) -> None:
    """What can be told of a model without running it: sizes as the config says, attention that mmlens computes."""
    for what, stack, shape in (("decoder", family.decoder, decoder), ("tower", family.tower, tower)):
        blocks = model.get_submodule(stack.blocks)
        if len(blocks) != shape.n_layers:
            raise UnknownFamilyError(
                f"{len(blocks)} {what} blocks where the config says {shape.n_layers}",
                expected=f"as many blocks in {stack.blocks} as layers",
                fix="correct the family's paths or its sizes; see docs/add-a-family.md",
            )
        for layer, block in enumerate(blocks):
            attn = block.get_submodule(stack.attn)
            width = getattr(attn.get_submodule(stack.out), "in_features", None)
            if width is not None and width != shape.n_heads * shape.d_head:
                raise UnknownFamilyError(
                    f"{what} block {layer} has head outputs of width {width}",
                    expected=f"{shape.n_heads} heads x {shape.d_head}, as the config says",
                    fix="correct the family's sizes; see docs/add-a-family.md",
                )
            for name in ("attn_logit_softcapping", "sinks", "relative_attention_bias"):
                if getattr(attn, name, None) is not None:
                    raise UnsupportedAttentionError(
                        f"{name!r} in the attention of {what} block {layer}",
                        expected="plain softmax attention, with or without sliding windows",
                        fix="this model cannot be wrapped: its patterns would be silently wrong",
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
