"""LLaVA-NeXT: a picture as one squashed look and a mosaic of tiles, rows ended by newline tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mmlens.evidence.schemes import Canvas, anyres_views, canvas_of, shrunk
from mmlens.evidence.views import Kind, PictureViews
from mmlens.families.base import Source, number
from mmlens.families.layout import Grid, Item, Layout, Raster, Segments, mosaic, tile_segments
from mmlens.families.llava import LlavaBase


def pairs(pinpoints: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Pinpoints (height, width) as something that can be a key."""
    return tuple((int(h), int(w)) for h, w in pinpoints)


class AnyRes(LlavaBase):
    """Base look first, then the mosaic; `image_sizes` (height, width) says how each picture was tiled."""

    tiled = True

    def canvas(self, config: Any, inputs: Mapping[str, Any], picture: int) -> Canvas:
        """The canvas of a picture, from the size that the processor returned."""
        height, width = torch.as_tensor(inputs["image_sizes"])[picture].tolist()
        return canvas_of(
            (width, height),
            pinpoints=pairs(config.image_grid_pinpoints),
            tile=config.vision_config.image_size,
            side=self.side(config),
        )

    def most_tiles(self, source: Any) -> int | None:
        """Tiles above which mosaics are shrunk, as a config or a processor says; None where they never are."""
        return None

    def mosaic_shape(self, config: Any, canvas: Canvas) -> tuple[int, int]:
        """(rows, cols) of the mosaic's tokens."""
        return shrunk(canvas, side=self.side(config), most=self.most_tiles(config))

    def views(self, processor: Any, source: Source, config: Any = None) -> PictureViews:
        pixels = processor.image_processor
        tile, cell = number(pixels, "crop_size", "height", options=source.options), number(processor, "patch_size")
        return anyres_views(
            source.size,
            pinpoints=pairs(number(pixels, "image_grid_pinpoints", options=source.options)),
            tile=tile,
            side=tile // cell,
            cell=cell,
            extra=self.extra(processor),
        )

    def is_tiled(self, config: Any, inputs: Mapping[str, Any], picture: int) -> bool:
        """Whether a picture is tiled at all."""
        return True

    def tiles(self, config: Any, inputs: Mapping[str, Any], picture: int) -> int:
        """Tiles of a picture in the tower, the base look among them."""
        if not self.is_tiled(config, inputs, picture):
            return 1
        canvas = self.canvas(config, inputs, picture)
        return 1 + canvas.tile_rows * canvas.tile_cols

    def base_tokens(self, config: Any) -> int:
        """Tokens of the base look."""
        return self.tower_rows(config) - self.dropped(config)

    def n_pictures(self, inputs: Mapping[str, Any]) -> int:
        """Pictures of the batch."""
        return 0 if inputs.get("pixel_values") is None else len(inputs["image_sizes"])

    def counts(self, config: Any, inputs: Mapping[str, Any], processor: Any) -> dict[Kind, list[int]]:
        found = []
        for picture in range(self.n_pictures(inputs)):
            extra = 1
            if self.is_tiled(config, inputs, picture):
                rows, cols = self.mosaic_shape(config, self.canvas(config, inputs, picture))
                extra = rows * (cols + 1)
            found.append(self.base_tokens(config) + extra)
        return {"image": found} if found else {}

    def layout(
        self, config: Any, inputs: Mapping[str, Any], processor: Any, items: Sequence[Item], index: int
    ) -> Layout:
        side = self.side(config)
        start = sum(self.tiles(config, inputs, i) for i in range(index))
        base, tiled = self.base_tokens(config), self.is_tiled(config, inputs, index)
        thumbnail = self.whole_tile(config, "thumbnail" if tiled else "whole", tile=start, first=0)
        if not tiled:
            return Layout((thumbnail,), (tuple(range(base)),), (base,))
        canvas = self.canvas(config, inputs, index)
        rows, cols = self.mosaic_shape(config, canvas)
        tokens = Raster(rows, cols, tuple(base + r * (cols + 1) + c for r in range(rows) for c in range(cols)))
        newlines = tuple(base + r * (cols + 1) + cols for r in range(rows))

        def kept(first: int, stride: int) -> Raster:
            whole = mosaic(canvas.tile_rows, canvas.tile_cols, side, stride=stride, first=first)
            places = [
                whole.index[(r + canvas.cut_rows) * whole.cols + c + canvas.cut_cols]
                for r in range(canvas.rows)
                for c in range(canvas.cols)
            ]
            return Raster(canvas.rows, canvas.cols, tuple(places))

        handed = self.base_tokens(config)
        cls = int(self.has_cls(config))
        grid = Grid(
            "tiles",
            tokens,
            kept((start + 1) * handed + self.kept_cls(config), handed),
            kept((start + 1) * self.tower_rows(config) + cls, self.tower_rows(config)),
        )
        tiles: list[list[int]] = [[] for _ in range(canvas.tile_rows * canvas.tile_cols)]
        for i, token in enumerate(tokens.index):
            # a shrunk mosaic's token belongs to the tile that holds its middle
            r = int((i // cols + 0.5) * canvas.rows / rows) + canvas.cut_rows
            c = int((i % cols + 0.5) * canvas.cols / cols) + canvas.cut_cols
            tiles[(r // side) * canvas.tile_cols + c // side].append(token)
        return Layout((thumbnail, grid), (tuple(range(base)), *map(tuple, tiles)), newlines)

    def segments(self, config: Any, inputs: Mapping[str, Any], items: Sequence[Item], layer: int) -> Segments:
        return tile_segments(self.tower_rows(config), [self.tiles(config, inputs, i) for i in range(len(items))])


class LlavaNext(AnyRes):
    """CLIP tower, Llama or Mistral decoder."""

    name = "llava-next"
    architectures = ("LlavaNextForConditionalGeneration",)
    processors = ("LlavaNextProcessor",)


LLAVA_NEXT = LlavaNext()
