"""Gemma3: norms before and after each sublayer, sliding windows, picture tokens that attend both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmlens.evidence.schemes import pan_and_scan, scanned_views
from mmlens.evidence.views import Kind, PictureViews
from mmlens.families.base import CLIP_BLOCKS, LLAMA_BLOCKS, Family, Source, number, picture_columns, root
from mmlens.families.layout import Grid, Item, Layout, Segments, runs, square, tile_segments

# What Gemma3's processor passes on unless its call says otherwise; the picture processor's own settings are not asked.
_SCAN = {
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


class Gemma3(Family):
    """Every look is pooled to the same square of tokens; pan and scan adds crops, each a run of its own."""

    name = "gemma3"
    architectures = ("Gemma3ForConditionalGeneration",)
    processors = ("Gemma3Processor",)
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

    def views(self, processor: Any, source: Source, config: Any = None) -> PictureViews:
        side = number(processor.image_processor, "size", "height", options=source.options)
        cells = root(number(processor, "image_seq_length"))
        scan = _SCAN | {k: v for k, v in source.options.items() if k in _SCAN}
        crops: tuple[tuple[int, int, int, int], ...] = ()
        if scan["do_pan_and_scan"]:
            crops = pan_and_scan(
                source.size,
                least=scan["pan_and_scan_min_crop_size"],
                most=scan["pan_and_scan_max_num_crops"],
                ratio=scan["pan_and_scan_min_ratio_to_activate"],
            )
        return scanned_views(source.size, crops, side=side, cells=cells)

    def layout(
        self, config: Any, inputs: Mapping[str, Any], processor: Any, items: Sequence[Item], index: int
    ) -> Layout:
        item, (side, q) = items[index], self._sides(config)
        start, looks = sum(self._looks(config, i) for i in items[:index]), self._looks(config, item)
        grids = [
            Grid(
                f"crop:{t - 1}" if t else "whole",
                square(q, t * q * q),
                square(q, (start + t) * q * q),
                square(side, (start + t) * side * side),
            )
            for t in range(looks)
        ]
        return Layout(tuple(grids), tuple(grid.tokens.index for grid in grids))

    def segments(self, config: Any, inputs: Mapping[str, Any], items: Sequence[Item], layer: int) -> Segments:
        return tile_segments(self._sides(config)[0] ** 2, [self._looks(config, i) for i in items])


GEMMA3 = Gemma3()
