"""View geometry: how source pixels become token cells. Pure data, no tensors; the one home of this arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmlens.evidence.regions import Box


@dataclass(frozen=True)
class View:
    """One resampled look at a picture, cut into a grid of tokens.

    A source pixel (x, y) lies at (x * scale_x + offset_x, y * scale_y + offset_y) in the view; cell (r, c) covers
    [c * cell, (c + 1) * cell) x [r * cell, (r + 1) * cell) there, and is the picture's token number
    `ordinals[r * cols + c]`.

    Attributes
    ----------
    cut_rows, cut_cols
        Rows and columns of cells that stand before the first kept one.
    tile, per_tile
        For stitched tiles: pixels and cells of a tile's side. Where `per_tile * cell < tile`, the last pixels of each
        tile reach no token.
    """

    scale_x: float
    scale_y: float
    offset_x: float
    offset_y: float
    rows: int
    cols: int
    cell: float
    name: str = "whole"
    ordinals: tuple[int, ...] = field(default=(), repr=False)
    cut_rows: int = 0
    cut_cols: int = 0
    tile: float = 0.0
    per_tile: int = 0

    def _low(self, cell: int) -> float:
        """Where a cell of one axis starts, in view pixels."""
        if not self.per_tile:
            return cell * self.cell
        return (cell // self.per_tile) * self.tile + (cell % self.per_tile) * self.cell

    def _overlaps(self, low: float, high: float, n: int, cut: int) -> dict[int, float]:
        """Fraction of each kept cell of an axis inside [low, high), cells without any left out."""
        # A box whose edge lies on a cell's edge must not touch the next cell through rounding.
        tiny = 1e-9
        parts = {}
        for i in range(n):
            start = self._low(i + cut)
            part = (min(high, start + self.cell) - max(low, start)) / self.cell
            if part > tiny:
                parts[i] = min(part, 1.0)
        return parts

    def coverage(self, box: Box) -> dict[int, float]:
        """Fraction (0..1) of each token's cell inside the box, for the tokens that it touches."""
        x0, x1 = (x * self.scale_x + self.offset_x for x in (box.x0, box.x1))
        y0, y1 = (y * self.scale_y + self.offset_y for y in (box.y0, box.y1))
        across = self._overlaps(x0, x1, self.cols, self.cut_cols)
        down = self._overlaps(y0, y1, self.rows, self.cut_rows)
        return {
            self._ordinal(r * self.cols + c): part_y * part_x
            for r, part_y in down.items()
            for c, part_x in across.items()
        }

    def _ordinal(self, cell: int) -> int:
        return self.ordinals[cell] if self.ordinals else cell

    def source_box(self, token: int) -> tuple[float, float, float, float]:
        """Source pixels (x0, y0, x1, y1) of a token's cell; may reach outside a padded or cropped picture."""
        r, c = divmod(self.ordinals.index(token) if self.ordinals else token, self.cols)
        left, top = self._low(c + self.cut_cols), self._low(r + self.cut_rows)
        x0, x1 = ((x - self.offset_x) / self.scale_x for x in (left, left + self.cell))
        y0, y1 = ((y - self.offset_y) / self.scale_y for y in (top, top + self.cell))
        return x0, y0, x1, y1


def stretch(width: int, height: int, *, cols: int, rows: int, cell: float) -> View:
    """The whole picture squeezed into the grid, each axis by its own scale."""
    return View(cols * cell / width, rows * cell / height, 0.0, 0.0, rows, cols, cell)


def squash(width: int, height: int, *, side: float, cell: float) -> View:
    """The whole picture squeezed into `side` x `side` pixels; a last part smaller than a cell reaches no token."""
    n = int(side // cell)
    return View(side / width, side / height, 0.0, 0.0, n, n, cell)


def shortest_edge_center_crop(width: int, height: int, *, edge: int, crop: int, cell: float) -> View:
    """CLIP's way: the short side to `edge` pixels, then the middle `crop` x `crop` pixels."""
    short, long = min(width, height), max(width, height)
    other = int(edge * long / short)
    new_width, new_height = (edge, other) if width <= height else (other, edge)
    left, top = (new_width - crop) // 2, (new_height - crop) // 2
    side = int(crop / cell)
    return View(new_width / width, new_height / height, -left, -top, side, side, cell)


def pad_to_square(width: int, height: int, *, side: int, cell: float) -> View:
    """LLaVA's own way: background added to a square (floor on the left and top), then `side` x `side` pixels."""
    whole = max(width, height)
    left, top = (whole - width) // 2, (whole - height) // 2
    scale = side / whole
    n = int(side / cell)
    return View(scale, scale, left * scale, top * scale, n, n, cell)
