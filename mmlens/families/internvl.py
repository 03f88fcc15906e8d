"""InternVL3 and 3.5: a ViT with layer scale, pictures squashed onto tiles, thumbnail last, four patches a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmlens.evidence.schemes import framed_clip, tile_grid, tiled_views
from mmlens.evidence.views import Kind, PictureViews
from mmlens.families.base import CLIP_BLOCKS, Family, Source, last_feature_block, number, picture_columns, root
from mmlens.families.layout import Item, Layout, Segments, runs, tile_segments, tiled_layout


class InternVL(Family):
    """A picture is one unbroken run of placeholders between its start and end marks; so is each frame of a video."""

    name = "internvl"
    architectures = ("InternVLForConditionalGeneration",)
    processors = ("InternVLProcessor",)
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

    def views(self, processor: Any, source: Source, config: Any = None) -> PictureViews:
        q = root(number(processor, "image_seq_length"))
        if source.kind == "video":
            tile = number(processor.video_processor, "size", "height")
            return framed_clip(source.size, tile=tile, side=q, cell=tile / q, n_frames=source.n_frames)
        pixels = processor.image_processor
        tile = number(pixels, "size", "height", options=source.options)
        cols, rows = 1, 1
        if source.options.get("crop_to_patches", True):  # the processor's default, whatever its picture processor says
            least, most = (number(pixels, name, options=source.options) for name in ("min_patches", "max_patches"))
            cols, rows = tile_grid(source.size, tile=(tile, tile), least=least, most=most)
        shape = None if cols * rows == 1 else (cols, rows)
        return tiled_views(source.size, shape, tile=tile, side=q, cell=tile / q)

    def layout(
        self, config: Any, inputs: Mapping[str, Any], processor: Any, items: Sequence[Item], index: int
    ) -> Layout:
        item, (side, q) = items[index], self._sides(config)
        tiles, shape = self._tiles(config, item), None
        if item.size is not None and processor is not None and item.kind == "image" and tiles > 1:
            mosaic = self.views(processor, Source(item.size)).views[0]
            if mosaic.rows * mosaic.cols == (tiles - 1) * q * q:
                shape = mosaic.rows // q, mosaic.cols // q
        start = sum(self._tiles(config, i) for i in items[:index])
        return tiled_layout(item.kind, shape, tiles=tiles, start=start, side=side, q=q, rows=self._tower_rows(config))

    def segments(self, config: Any, inputs: Mapping[str, Any], items: Sequence[Item], layer: int) -> Segments:
        return tile_segments(self._tower_rows(config), [self._tiles(config, i) for i in items])


INTERNVL = InternVL()
