"""LLaVA-1.5: a CLIP tower whose last block is unused, a two-layer projector, a Llama decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmlens.evidence.schemes import cropped_views, padded_views
from mmlens.evidence.views import Kind, PictureViews
from mmlens.families.base import CLIP_BLOCKS, Family, Source, last_feature_block, number
from mmlens.families.layout import Grid, Item, Layout, Segments, square, tile_segments


class LlavaBase(Family):
    """What every LLaVA shares: towers of which one block's output is taken, with or without a CLS row."""

    tower = CLIP_BLOCKS
    projector = "model.multi_modal_projector"

    def used_tower_layers(self, config: Any) -> int:
        return last_feature_block(config, self.tower_shape(config).n_layers)

    def side(self, config: Any) -> int:
        """Patches along a tile's side."""
        vision = config.vision_config
        return int(vision.image_size // vision.patch_size)

    def has_cls(self, config: Any) -> bool:
        """Whether the tower's streams start with a CLS row."""
        return bool(config.vision_config.model_type == "clip_vision_model")

    def tower_rows(self, config: Any) -> int:
        """Rows of one tile in the tower."""
        return self.side(config) ** 2 + self.has_cls(config)

    def kept_cls(self, config: Any) -> int:
        """1 where the CLS row is handed on to the decoder."""
        return int(self.has_cls(config) and config.vision_feature_select_strategy == "full")

    def dropped(self, config: Any) -> int:
        """Rows in front of a tile that the feature selection leaves out."""
        return int(config.vision_feature_select_strategy == "default")

    def extra(self, processor: Any) -> int:
        """Tokens in front of a look's square that show no pixels of their own (a CLS row that is handed on)."""
        strategy = number(processor, "vision_feature_select_strategy")
        return int(processor.num_additional_image_tokens - (strategy == "default"))

    def whole_tile(self, config: Any, name: str, *, tile: int, first: int) -> Grid:
        """The grid of one whole tile: `tile` is its number in the tower, `first` its first token's ordinal."""
        side, cls = self.side(config), int(self.has_cls(config))
        kept = self.kept_cls(config)
        handed = self.tower_rows(config) - self.dropped(config)
        return Grid(
            name,
            square(side, first + kept),
            square(side, tile * handed + kept),
            square(side, tile * self.tower_rows(config) + cls),
        )


class Llava(LlavaBase):
    """Every picture gives the same square of tokens; the tower's CLS row is dropped before the projector."""

    name = "llava-1.5"
    architectures = ("LlavaForConditionalGeneration",)
    processors = ("LlavaProcessor",)

    def counts(self, config: Any, inputs: Mapping[str, Any], processor: Any) -> dict[Kind, list[int]]:
        if inputs.get("pixel_values") is None:
            return {}
        return {"image": [self.tower_rows(config) - self.dropped(config)] * len(inputs["pixel_values"])}

    def views(self, processor: Any, source: Source, config: Any = None) -> PictureViews:
        pixels = processor.image_processor
        cell, extra = number(processor, "patch_size"), self.extra(processor)
        crop = number(pixels, "crop_size", "height", options=source.options)
        if source.options.get("do_pad", getattr(pixels, "do_pad", False)):
            return padded_views(source.size, side=crop, cells=crop // cell, cell=cell, extra=extra)
        edge = number(pixels, "size", "shortest_edge", options=source.options)
        return cropped_views(source.size, edge=edge, crop=crop, cell=cell, extra=extra)

    def layout(
        self, config: Any, inputs: Mapping[str, Any], processor: Any, items: Sequence[Item], index: int
    ) -> Layout:
        return Layout((self.whole_tile(config, "whole", tile=index, first=0),))

    def segments(self, config: Any, inputs: Mapping[str, Any], items: Sequence[Item], layer: int) -> Segments:
        return tile_segments(self.tower_rows(config), [1] * len(items))


LLAVA = Llava()
