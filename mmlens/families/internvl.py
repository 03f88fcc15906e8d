"""InternVL3 and 3.5: a ViT with layer scale, pictures squashed onto tiles, thumbnail last, four patches a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmlens.evidence.views import View, squash
from mmlens.families.base import (
    CLIP_BLOCKS,
    Family,
    Grid,
    Item,
    Kind,
    Layout,
    Segments,
    last_feature_block,
    mosaic,
    picture_columns,
    runs,
    square,
    tile_segments,
)


class InternVL(Family):
    """A picture is one unbroken run of placeholders between its start and end marks; so is each frame of a video."""

    name = "internvl"
    architectures = ("InternVLForConditionalGeneration",)
    tower = replace(
        CLIP_BLOCKS,
        blocks="model.vision_tower.encoder.layer",
        attn="attention",
        out="projection_layer",
        ln1="layernorm_before",
        ln2="layernorm_after",
        attn_scale="lambda_1",
        mlp_scale="lambda_2",
    )
    projector = "model.multi_modal_projector"
    has_video = True
    tiled = True
    pixels: Mapping[Kind, str] = {"image": "pixel_values", "video": "pixel_values"}

    def token_ids(self, config: Any) -> dict[int, Kind]:
        return {config.image_token_id: "image"}  # frames use the picture's placeholder

    def used_tower_layers(self, config: Any) -> int:
        return last_feature_block(config, self.tower_shape(config).n_layers)

    def _sides(self, config: Any) -> tuple[int, int]:
        """Patches, and tokens, along a tile's side."""
        vision = config.vision_config
        side = vision.image_size[0] // vision.patch_size[0]
        return side, int(side * config.downsample_ratio)

    def _tower_rows(self, config: Any) -> int:
        return self._sides(config)[0] ** 2 + 1  # CLS first

    def counts(self, config: Any, inputs: Mapping[str, Any], processor: Any) -> dict[Kind, list[int]]:
        if inputs.get("pixel_values") is None:
            return {}
        examples = range(len(inputs["input_ids"]))
        return {"image": [len(run) for e in examples for run in runs(picture_columns(inputs, config, e))]}

    def filled(self, config: Any, inputs: Mapping[str, Any], processor: Any) -> int:
        tiles = inputs.get("pixel_values")
        return 0 if tiles is None else len(tiles) * self._sides(config)[1] ** 2

    def _tiles(self, config: Any, item: Item) -> int:
        return len(item.columns) // self._sides(config)[1] ** 2

    def _tile_grid(self, processor: Any, size: tuple[int, int], tiles: int) -> tuple[int, int] | None:
        """(rows, cols) of tiles: the processor's own choice for a source of this size."""
        from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

        pixels = processor.image_processor
        tile = (pixels.size["height"], pixels.size["width"])
        cols, rows = get_optimal_tiled_canvas((size[1], size[0]), tile, pixels.min_patches, pixels.max_patches)
        return (rows, cols) if rows * cols == tiles - (tiles > 1) else None

    def layout(
        self, config: Any, inputs: Mapping[str, Any], processor: Any, items: Sequence[Item], number: int
    ) -> Layout:
        item, (side, q) = items[number], self._sides(config)
        start = sum(self._tiles(config, i) for i in items[:number])
        tiles, rows = self._tiles(config, item), self._tower_rows(config)
        pixels, cell = config.vision_config.image_size[0], config.vision_config.patch_size[0] * side / q

        def one(name: str, tile: int, frames: tuple[int, ...] = ()) -> Grid:
            tokens = square(q, tile * q * q)
            view = None if item.size is None else squash(*item.size, side=pixels, cell=cell)
            view = None if view is None else replace(view, name=name, ordinals=tokens.index)
            projected = square(q, (start + tile) * q * q)
            return Grid(name, tokens, projected, square(side, (start + tile) * rows + 1), view, frames)

        each = tuple(tuple(range(t * q * q, (t + 1) * q * q)) for t in range(tiles))
        if item.kind == "video":
            return Layout(tuple(one(f"frame:{f}", f, (f,)) for f in range(tiles)))
        if tiles == 1:
            return Layout((one("whole", 0),), each)
        grids = [one("thumbnail", tiles - 1)]
        shape = None if item.size is None or processor is None else self._tile_grid(processor, item.size, tiles)
        if shape is not None and item.size is not None:
            r, c = shape
            tokens = mosaic(r, c, q, stride=q * q, first=0)
            width, height = item.size
            view = View(c * pixels / width, r * pixels / height, 0, 0, r * q, c * q, cell, "tiles", tokens.index)
            grids.append(
                Grid(
                    "tiles",
                    tokens,
                    mosaic(r, c, q, stride=q * q, first=start * q * q),
                    mosaic(r, c, side, stride=rows, first=start * rows + 1),
                    view,
                )
            )
        return Layout(tuple(grids), each)

    def segments(self, config: Any, inputs: Mapping[str, Any], items: Sequence[Item], layer: int) -> Segments:
        return tile_segments(self._tower_rows(config), [self._tiles(config, i) for i in items])


INTERNVL = InternVL()
