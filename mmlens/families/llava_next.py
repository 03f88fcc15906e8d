"""LLaVA-NeXT: a picture as one squashed look and a mosaic of tiles, rows ended by newline tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmlens.evidence.views import View, squash
from mmlens.families.base import Grid, Item, Kind, Layout, Raster, Segments, mosaic, tile_segments
from mmlens.families.llava import LlavaBase


@dataclass(frozen=True)
class Canvas:
    """How a picture of (width, height) lies on its canvas of tiles, in cells of the feature grid.

    Rows and columns of cells that hold nothing but padding are cut: `cut_rows` above, `cut_cols` on the left.
    """

    tile_rows: int
    tile_cols: int
    rows: int
    cols: int
    cut_rows: int
    cut_cols: int


def best_canvas(width: int, height: int, pinpoints: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(height, width) of the pinpoint that shows most of the picture; among equals the least wasteful."""

    def fit(canvas: Sequence[int]) -> tuple[int, int]:
        scale = min(canvas[1] / width, canvas[0] / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        return shown, shown - canvas[0] * canvas[1]

    best = max(pinpoints, key=fit)  # the first of equals, as the processors choose
    return int(best[0]), int(best[1])


def canvas_of(width: int, height: int, *, pinpoints: Sequence[Sequence[int]], tile: int, side: int) -> Canvas:
    """The canvas of a picture, and which of its cells the model keeps ("unpadding" in whole cells)."""
    canvas_height, canvas_width = best_canvas(width, height, pinpoints)
    tile_rows, tile_cols = canvas_height // tile, canvas_width // tile
    rows, cols = tile_rows * side, tile_cols * side
    if width / height > cols / rows:
        kept = int(round(height * (cols / width), 7))
        cut = (rows - kept) // 2
        return Canvas(tile_rows, tile_cols, rows - 2 * cut, cols, cut, 0)
    kept = int(round(width * (rows / height), 7))
    cut = (cols - kept) // 2
    return Canvas(tile_rows, tile_cols, rows, cols - 2 * cut, 0, cut)


def canvas_view(width: int, height: int, canvas: Canvas, *, tile: int, cell: float, side: int) -> View:
    """Where source pixels lie on the canvas: scaled to touch two edges, centred (floor), black around."""
    target_width, target_height = canvas.tile_cols * tile, canvas.tile_rows * tile
    across, down = target_width / width, target_height / height
    if across < down:
        new_width, new_height = target_width, min(-int(-height * across // 1), target_height)
    else:
        new_width, new_height = min(-int(-width * down // 1), target_width), target_height
    return View(
        new_width / width,
        new_height / height,
        (target_width - new_width) // 2,
        (target_height - new_height) // 2,
        canvas.rows,
        canvas.cols,
        cell,
        "tiles",
        (),
        canvas.cut_rows,
        canvas.cut_cols,
        tile,
        side,
    )


class AnyRes(LlavaBase):
    """Base look first, then the mosaic; `image_sizes` (height, width) says how each picture was tiled."""

    tiled = True

    def canvas(self, config: Any, inputs: Mapping[str, Any], picture: int) -> Canvas:
        """The canvas of a picture, from the size that the processor returned."""
        height, width = torch.as_tensor(inputs["image_sizes"])[picture].tolist()
        return canvas_of(
            width,
            height,
            pinpoints=config.image_grid_pinpoints,
            tile=config.vision_config.image_size,
            side=self.side(config),
        )

    def shrunk(self, config: Any, canvas: Canvas) -> tuple[int, int]:
        """(rows, cols) of the mosaic's tokens; equal to its cells unless the family shrinks large mosaics."""
        return canvas.rows, canvas.cols

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
                rows, cols = self.shrunk(config, self.canvas(config, inputs, picture))
                extra = rows * (cols + 1)
            found.append(self.base_tokens(config) + extra)
        return {"image": found} if found else {}

    def base_view(self, config: Any, item: Item, *, tiled: bool) -> View | None:
        """Where source pixels lie in the base look."""
        vision = config.vision_config
        return None if item.size is None else squash(*item.size, side=vision.image_size, cell=vision.patch_size)

    def layout(
        self, config: Any, inputs: Mapping[str, Any], processor: Any, items: Sequence[Item], number: int
    ) -> Layout:
        item, vision, side = items[number], config.vision_config, self.side(config)
        start = sum(self.tiles(config, inputs, i) for i in range(number))
        base, tiled = self.base_tokens(config), self.is_tiled(config, inputs, number)
        view = self.base_view(config, item, tiled=tiled)
        thumbnail = self.whole_tile(config, "thumbnail" if tiled else "whole", tile=start, first=0, view=view)
        if not tiled:
            return Layout((thumbnail,), (tuple(range(base)),), (base,))
        canvas = self.canvas(config, inputs, number)
        rows, cols = self.shrunk(config, canvas)
        tokens = Raster(rows, cols, tuple(base + r * (cols + 1) + c for r in range(rows) for c in range(cols)))
        newlines = tuple(base + r * (cols + 1) + cols for r in range(rows))

        def kept(first: int, stride: int) -> Raster:
            whole = mosaic(canvas.tile_rows, canvas.tile_cols, side, stride=stride, first=first)
            index = [
                whole.index[(r + canvas.cut_rows) * whole.cols + c + canvas.cut_cols]
                for r in range(canvas.rows)
                for c in range(canvas.cols)
            ]
            return Raster(canvas.rows, canvas.cols, tuple(index))

        handed = self.base_tokens(config)
        cls = int(self.has_cls(config))
        view = None
        if item.size is not None and (rows, cols) == (canvas.rows, canvas.cols):
            plain = canvas_view(*item.size, canvas, tile=vision.image_size, cell=vision.patch_size, side=side)
            view = View(**{**plain.__dict__, "ordinals": tokens.index})
        grid = Grid(
            "tiles",
            tokens,
            kept((start + 1) * handed + self.kept_cls(config), handed),
            kept((start + 1) * self.tower_rows(config) + cls, self.tower_rows(config)),
            view,
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


LLAVA_NEXT = LlavaNext()
