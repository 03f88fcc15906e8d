"""Gemma3: norms before and after each sublayer, sliding windows, picture tokens that attend both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmlens.evidence.views import squash
from mmlens.families.base import (
    CLIP_BLOCKS,
    LLAMA_BLOCKS,
    Family,
    Grid,
    Item,
    Kind,
    Layout,
    Segments,
    picture_columns,
    runs,
    square,
    tile_segments,
)


class Gemma3(Family):
    """Every look is pooled to the same square of tokens; pan and scan adds crops, each a run of its own."""

    name = "gemma3"
    architectures = ("Gemma3ForConditionalGeneration",)
    decoder = replace(
        LLAMA_BLOCKS,
        ln2="pre_feedforward_layernorm",
        attn_added="post_attention_layernorm",
        mlp_added="post_feedforward_layernorm",
        norm_offset=1.0,
    )
    tower = CLIP_BLOCKS
    projector = "model.multi_modal_projector"
    nested_pictures = True
    tiled = True
    bidirectional_pictures = True

    def _sides(self, config: Any) -> tuple[int, int]:
        """Patches, and tokens, along a look's side."""
        vision = config.vision_config
        return vision.image_size // vision.patch_size, int(config.mm_tokens_per_image**0.5)

    def counts(self, config: Any, inputs: Mapping[str, Any], processor: Any) -> dict[Kind, list[int]]:
        if inputs.get("pixel_values") is None:
            return {}
        examples = range(len(inputs["input_ids"]))
        return {"image": [len(run) for e in examples for run in runs(picture_columns(inputs, config, e))]}

    def filled(self, config: Any, inputs: Mapping[str, Any], processor: Any) -> int:
        looks = inputs.get("pixel_values")
        return 0 if looks is None else len(looks) * config.mm_tokens_per_image

    def _looks(self, config: Any, item: Item) -> int:
        return len(item.columns) // config.mm_tokens_per_image

    def layout(
        self, config: Any, inputs: Mapping[str, Any], processor: Any, items: Sequence[Item], number: int
    ) -> Layout:
        item, (side, q) = items[number], self._sides(config)
        start = sum(self._looks(config, i) for i in items[:number])
        pixels = config.vision_config.image_size
        tokens = square(q)
        view = None
        if item.size is not None:
            view = replace(squash(*item.size, side=pixels, cell=pixels / q), ordinals=tokens.index)
        whole = Grid("whole", tokens, square(q, start * q * q), square(side, start * side * side), view)
        each = tuple(tuple(range(t * q * q, (t + 1) * q * q)) for t in range(self._looks(config, item)))
        return Layout((whole,), each)

    def segments(self, config: Any, inputs: Mapping[str, Any], items: Sequence[Item], layer: int) -> Segments:
        return tile_segments(self._sides(config)[0] ** 2, [self._looks(config, i) for i in items])


GEMMA3 = Gemma3()
