"""View geometry: how source pixels become token cells. Pure data, no tensors; the one home of this arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from mmlens.evidence.regions import Box


@dataclass(frozen=True)
class View:
    """One resampled look at a picture, cut into a grid of tokens.

    A source pixel (x, y) lies at (x * scale_x + offset_x, y * scale_y + offset_y) in the view; cell (r, c) covers
    [c * cell, (c + 1) * cell) x [r * cell, (r + 1) * cell) there, and is the picture's token number
    `first + r * cols + c`.
    """

    scale_x: float
    scale_y: float
    offset_x: float
    offset_y: float
    rows: int
    cols: int
    cell: float
    first: int = 0
    name: str = "base"

    def coverage(self, box: Box) -> dict[int, float]:
        """Fraction (0..1) of each token's cell inside the box, for the tokens that it touches."""
        x0, x1 = (x * self.scale_x + self.offset_x for x in (box.x0, box.x1))
        y0, y1 = (y * self.scale_y + self.offset_y for y in (box.y0, box.y1))
        across = _overlaps(x0 / self.cell, x1 / self.cell, self.cols)
        down = _overlaps(y0 / self.cell, y1 / self.cell, self.rows)
        return {
            self.first + r * self.cols + c: part_y * part_x
            for r, part_y in down.items()
            for c, part_x in across.items()
        }

    def source_box(self, token: int) -> tuple[float, float, float, float]:
        """Source pixels (x0, y0, x1, y1) of a token's cell; may reach outside a padded or cropped picture."""
        r, c = divmod(token - self.first, self.cols)
        xs = ((c + d) * self.cell for d in (0, 1))
        ys = ((r + d) * self.cell for d in (0, 1))
        x0, x1 = ((x - self.offset_x) / self.scale_x for x in xs)
        y0, y1 = ((y - self.offset_y) / self.scale_y for y in ys)
        return x0, y0, x1, y1


def _overlaps(low: float, high: float, n: int) -> dict[int, float]:
    """Length of [low, high) inside each unit cell of [0, n), cells without any left out."""
    # A box whose edge lies on a cell's edge must not touch the next cell through rounding.
    tiny = 1e-9
    first, last = max(int(low), 0), min(int(high) + 1, n)
    parts = {i: min(high, i + 1) - max(low, i) for i in range(first, last)}
    return {i: min(part, 1.0) for i, part in parts.items() if part > tiny}


def stretch(width: int, height: int, *, cols: int, rows: int, cell: float) -> View:
    """The whole picture squeezed into the grid, each axis by its own scale."""
    return View(cols * cell / width, rows * cell / height, 0.0, 0.0, rows, cols, cell)


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
