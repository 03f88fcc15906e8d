"""View geometry: how source pixels become token cells. Pure data, no tensors; the one home of this arithmetic.

Every scheme is one function from sizes and a processor's numbers to `PictureViews`, cached by its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from mmlens.evidence.area import Area

Size = tuple[int, int]  # (width, height) in pixels
Kind = Literal["image", "video"]

# Shares below this are rounding: a box whose edge lies on a cell's edge does not touch the next cell.
TINY = 1e-9


@dataclass(frozen=True)
class Axis:
    """One axis of a view: an affine map from source to view pixels, and the cells that tokens are made of.

    A source coordinate u lies at `u * scale + offset` in the view; cell i covers `cell` view pixels from
    `(i + cut) * cell` on.

    Attributes
    ----------
    cells
        Kept cells.
    cut
        Cells in front of the first kept one (padding that the model drops).
    tile, per_tile
        For stitched tiles: view pixels and cells of a tile's side. Where `per_tile * cell < tile`, the last pixels of
        each tile reach no token.
    tokens
        Where it differs from `cells`: the grid is resampled bilinearly to so many tokens, each a mix of up to two
        cells.
    """

    scale: float
    offset: float
    cell: float
    cells: int
    cut: int = 0
    tile: float = 0.0
    per_tile: int = 0
    tokens: int = 0

    @property
    def n(self) -> int:
        """Tokens along the axis."""
        return self.tokens or self.cells


@lru_cache(maxsize=4096)
def edges(axis: Axis) -> np.ndarray:
    """(2, cells): where each cell starts and ends, in source pixels; may reach outside a padded or cropped picture."""
    i = np.arange(axis.cells) + axis.cut
    start = i * axis.cell if not axis.per_tile else (i // axis.per_tile) * axis.tile + (i % axis.per_tile) * axis.cell
    return (np.stack([start, start + axis.cell]) - axis.offset) / axis.scale


@lru_cache(maxsize=256)
def mixing(axis: Axis) -> np.ndarray | None:
    """(tokens, cells): each cell's share in each token (bilinear, corners not aligned); None without mixing."""
    if axis.n == axis.cells:
        return None
    weights = np.zeros((axis.n, axis.cells))
    at = np.maximum((np.arange(axis.n) + 0.5) * axis.cells / axis.n - 0.5, 0.0)
    low = np.minimum(at.astype(int), axis.cells - 1)
    high = np.minimum(low + 1, axis.cells - 1)
    np.add.at(weights, (np.arange(axis.n), low), 1 - (at - low))
    np.add.at(weights, (np.arange(axis.n), high), at - low)
    return weights


@dataclass(frozen=True)
class View:
    """One resampled look at a picture, or at some frames of a video, cut into a grid of tokens.

    Token (r, c) is number `first + r * stride + c` of the picture's own tokens, or, with `tile_side`, tile after tile
    of `tile_side` x `tile_side`, each row-major.

    Attributes
    ----------
    name
        "whole", "tiles", "thumbnail", "crop:1" or "frame:3" (of its first frame).
    frames
        For a video: which of the frames that the model is shown.
    """

    name: str
    x: Axis
    y: Axis
    first: int = 0
    stride: int = 0
    tile_side: int = 0
    frames: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Tokens down."""
        return self.y.n

    @property
    def cols(self) -> int:
        """Tokens across."""
        return self.x.n

    @property
    def ordinals(self) -> np.ndarray:
        """(rows, cols): each token's number among the picture's own."""
        return _ordinals(self)

    def share(self, area: Area) -> np.ndarray:
        """(rows, cols): fraction (0..1) of each token's pixels that the area fills."""
        found = area.share(edges(self.x), edges(self.y))
        down, across = mixing(self.y), mixing(self.x)
        found = found if down is None else down @ found
        found = found if across is None else found @ across.T
        return np.where(found > TINY, found, 0.0)

    def source_box(self, token: int) -> tuple[float, float, float, float]:
        """Source pixels (x0, y0, x1, y1) that a token sees; may reach outside a padded or cropped picture."""
        r, c = (int(i[0]) for i in np.nonzero(self.ordinals == token))
        (y0, y1), (x0, x1) = _span(self.y, r), _span(self.x, c)
        return x0, y0, x1, y1

    def painted(self, values: np.ndarray, width: int, height: int) -> np.ndarray:
        """(height, width): a value for each token, laid over the source picture; NaN where no token sees a pixel."""
        down, across = _pixels(self.y, height), _pixels(self.x, width)
        with np.errstate(invalid="ignore"):
            return (down @ values @ across.T) / np.outer(down.sum(1), across.sum(1))


@lru_cache(maxsize=4096)
def _ordinals(view: View) -> np.ndarray:
    r, c = np.arange(view.rows)[:, None], np.arange(view.cols)[None]
    if view.tile_side:
        q = view.tile_side
        found = ((r // q) * (view.cols // q) + c // q) * q * q + (r % q) * q + c % q
    else:
        found = r * (view.stride or view.cols) + c
    found = found + view.first
    found.flags.writeable = False  # cached: every caller has the same array
    return found


def _span(axis: Axis, token: int) -> tuple[float, float]:
    weights = mixing(axis)
    cells = [token] if weights is None else np.flatnonzero(weights[token]).tolist()
    return float(edges(axis)[0, cells[0]]), float(edges(axis)[1, cells[-1]])


def _pixels(axis: Axis, size: int) -> np.ndarray:
    """(pixels, tokens): how much of each source pixel each token sees."""
    start, end = edges(axis)
    pixel = np.arange(size)[:, None]
    seen = np.maximum(np.minimum(end, pixel + 1) - np.maximum(start, pixel), 0.0)
    weights = mixing(axis)
    return seen if weights is None else seen @ (weights / weights.sum(0, keepdims=True).clip(TINY)).T


@dataclass(frozen=True)
class PictureViews:
    """Everything that a model is shown of one picture or video, and which of its tokens show what.

    Attributes
    ----------
    kind, size
        "image" or "video"; (width, height) of the source in pixels.
    views
        Looks in the order of their tokens.
    count
        Placeholders in the picture's own run of tokens.
    newlines
        Ordinals of tokens that carry no pixels.
    n_frames
        For a video: frames that the model is shown.
    """

    kind: Kind
    size: Size
    views: tuple[View, ...] = field(repr=False)
    count: int
    newlines: tuple[int, ...] = field(default=(), repr=False)
    n_frames: int = 0

    def chosen(self, which: str) -> tuple[View, ...]:
        """Views by "all", "tiles" (the finest) or "thumbnail" (the whole picture at once)."""
        coarse = tuple(v for v in self.views if v.name in ("thumbnail", "whole"))
        fine = tuple(v for v in self.views if v not in coarse)
        return {"all": self.views, "tiles": fine or coarse, "thumbnail": coarse or self.views}[which]


def _stretched(source: int, cells: int, cell: float) -> Axis:
    """The whole side squeezed onto so many cells."""
    return Axis(cells * cell / source, 0.0, cell, cells)


def _squashed(source: int, side: float, cells: int, cell: float) -> Axis:
    """The whole side squeezed into `side` view pixels, of which the cells may leave the last few out."""
    return Axis(side / source, 0.0, cell, cells)


def one_view(name: str, size: Size, side: float, cells: int, cell: float, *, first: int = 0) -> View:
    """The whole picture squeezed into a square."""
    x, y = (_squashed(s, side, cells, cell) for s in size)
    return View(name, x, y, first)


# ---------------------------------------------------------------------- Qwen
@lru_cache(maxsize=4096)
def qwen_cells(size: Size, *, factor: int, least: int, most: int, frames: int = 0, per_group: int = 1) -> Size | None:
    """(cols, rows) of tokens: both sides to multiples of `factor`, the area into [least, most] pixels.

    With `frames`, Qwen3-VL's rule for clips: the budget is for the whole clip, tiny sides are grown first. None for
    sides that the processor refuses (200 : 1 and more).
    """
    width, height = size
    if frames and min(width, height) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(width, height) / min(width, height) > 200:
        return None
    n = frames or 1
    rows, cols = round(height / factor), round(width / factor)
    deep = round(frames / per_group) * per_group if frames else 1
    area = deep * rows * cols * factor * factor
    if area > most:
        beta = math.sqrt(n * height * width / most)
        rows, cols = (max(1, math.floor(s / beta / factor)) for s in (height, width))
    elif area < least:
        beta = math.sqrt(least / (n * height * width))
        rows, cols = (math.ceil(s * beta / factor) for s in (height, width))
    return cols, rows


@lru_cache(maxsize=1024)
def qwen_views(size: Size, cells: Size, *, cell: int) -> PictureViews:
    """A picture stretched onto (cols, rows) tokens, each axis by its own scale."""
    cols, rows = cells
    view = View("whole", _stretched(size[0], cols, cell), _stretched(size[1], rows, cell))
    return PictureViews("image", size, (view,), cols * rows)


@lru_cache(maxsize=256)
def qwen_clip(size: Size, cells: Size, *, cell: int, n_frames: int, per_group: int) -> PictureViews:
    """A clip: groups of `per_group` frames share their tokens; an odd last frame is repeated."""
    cols, rows = cells
    views = []
    for g, start in enumerate(range(0, n_frames, per_group)):
        frames = tuple(range(start, min(start + per_group, n_frames)))
        axes = _stretched(size[0], cols, cell), _stretched(size[1], rows, cell)
        views.append(View(f"frame:{start}", *axes, first=g * rows * cols, frames=frames))
    return PictureViews("video", size, tuple(views), len(views) * rows * cols, (), n_frames)


# ---------------------------------------------------------------------- one square
@lru_cache(maxsize=1024)
def square_views(size: Size, *, side: float, cells: int, cell: float, extra: int = 0) -> PictureViews:
    """The whole picture squeezed into a square; `extra` tokens in front show no pixels of their own."""
    view = one_view("whole", size, side, cells, cell, first=extra)
    return PictureViews("image", size, (view,), extra + cells * cells, tuple(range(extra)))


@lru_cache(maxsize=1024)
def cropped_views(size: Size, *, edge: int, crop: int, cell: float, extra: int = 0) -> PictureViews:
    """CLIP's way: the short side to `edge` pixels, then the middle `crop` x `crop` pixels."""
    width, height = size
    other = int(edge * max(size) / min(size))
    resized = (edge, other) if width <= height else (other, edge)
    cells = int(crop // cell)
    x, y = (Axis(new / old, float(-((new - crop) // 2)), cell, cells) for new, old in zip(resized, size))
    return PictureViews("image", size, (View("whole", x, y, extra),), extra + cells * cells, tuple(range(extra)))


@lru_cache(maxsize=1024)
def padded_views(
    size: Size, *, side: int, cells: int, cell: float, extra: int = 0, newline: bool = False
) -> PictureViews:
    """Background added to a square (floor on the left and top), then `side` x `side` pixels; perhaps one newline."""
    whole, scale = max(size), side / max(size)
    x, y = (Axis(scale, (whole - s) // 2 * scale, cell, cells) for s in size)
    count = extra + cells * cells
    none = (*range(extra), *((count,) if newline else ()))
    return PictureViews("image", size, (View("whole", x, y, extra),), count + newline, none)


# ---------------------------------------------------------------------- any resolution (LLaVA-NeXT, OneVision)
@dataclass(frozen=True)
class Canvas:
    """How a picture lies on its canvas of tiles, in cells of the feature grid.

    Rows and columns of cells that hold nothing but padding are cut: `cut_rows` above, `cut_cols` on the left.
    """

    tile_rows: int
    tile_cols: int
    rows: int
    cols: int
    cut_rows: int
    cut_cols: int


def best_canvas(size: Size, pinpoints: Sequence[Sequence[int]]) -> Size:
    """(height, width) of the pinpoint that shows most of the picture; among equals the least wasteful."""
    width, height = size

    def fit(canvas: Sequence[int]) -> Size:
        scale = min(canvas[1] / width, canvas[0] / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        return shown, shown - canvas[0] * canvas[1]

    best = max(pinpoints, key=fit)  # the first of equals, as the processors choose
    return int(best[0]), int(best[1])


@lru_cache(maxsize=4096)
def canvas_of(size: Size, *, pinpoints: tuple[Size, ...], tile: int, side: int) -> Canvas:
    """The canvas of a picture, and which of its cells the model keeps ("unpadding" in whole cells)."""
    width, height = size
    canvas_height, canvas_width = best_canvas(size, pinpoints)
    tile_rows, tile_cols = canvas_height // tile, canvas_width // tile
    rows, cols = tile_rows * side, tile_cols * side
    if width / height > cols / rows:
        kept = int(round(height * (cols / width), 7))
        cut = (rows - kept) // 2
        return Canvas(tile_rows, tile_cols, rows - 2 * cut, cols, cut, 0)
    kept = int(round(width * (rows / height), 7))
    cut = (cols - kept) // 2
    return Canvas(tile_rows, tile_cols, rows, cols - 2 * cut, 0, cut)


def shrunk(canvas: Canvas, *, side: int, most: int | None) -> Size:
    """(rows, cols) of a mosaic's tokens: its cells, or fewer where they would fill more than `most` tiles."""
    if most is None:
        return canvas.rows, canvas.cols
    ratio = math.sqrt(canvas.rows * canvas.cols / (most * side**2))
    return (canvas.rows, canvas.cols) if ratio <= 1.1 else (int(canvas.rows // ratio), int(canvas.cols // ratio))


@lru_cache(maxsize=1024)
def anyres_views(
    size: Size,
    *,
    pinpoints: tuple[Size, ...],
    tile: int,
    side: int,
    cell: float,
    extra: int = 0,
    most: int | None = None,
) -> PictureViews:
    """The squashed whole, then a mosaic of tiles (aspect kept, centred, black around), each row ended by a newline."""
    canvas = canvas_of(size, pinpoints=pinpoints, tile=tile, side=side)
    rows, cols = shrunk(canvas, side=side, most=most)
    target = canvas.tile_cols * tile, canvas.tile_rows * tile
    across, down = (t / s for t, s in zip(target, size))
    if across < down:
        fitted = target[0], min(math.ceil(size[1] * across), target[1])
    else:
        fitted = min(math.ceil(size[0] * down), target[0]), target[1]
    x, y = (
        Axis(new / old, float((t - new) // 2), cell, cells, cut, float(tile), side, n)
        for new, old, t, cells, cut, n in zip(
            fitted, size, target, (canvas.cols, canvas.rows), (canvas.cut_cols, canvas.cut_rows), (cols, rows)
        )
    )
    base = extra + side * side
    views = one_view("thumbnail", size, tile, side, cell, first=extra), View("tiles", x, y, base, cols + 1)
    newlines = tuple(base + r * (cols + 1) + cols for r in range(rows))
    return PictureViews("image", size, views, base + rows * (cols + 1), (*range(extra), *newlines))


@lru_cache(maxsize=256)
def pooled_clip(size: Size, *, side: float, cells: int, tokens: int, cell: float, n_frames: int) -> PictureViews:
    """OneVision's clip: each frame squashed, its grid resampled to `tokens` x `tokens`; one newline for the whole."""
    x, y = (replace(_squashed(s, side, cells, cell), tokens=tokens) for s in size)
    views = tuple(View(f"frame:{f}", x, y, f * tokens * tokens, frames=(f,)) for f in range(n_frames))
    n = n_frames * tokens * tokens
    return PictureViews("video", size, views, n + 1, (n,), n_frames)


# ---------------------------------------------------------------------- tiles and a thumbnail (InternVL, Idefics3)
@lru_cache(maxsize=4096)
def tile_grid(size: Size, *, tile: Size, least: int, most: int) -> Size:
    """(cols, rows) of InternVL's tiles: the closest aspect ratio; of equals the larger, unless the picture is small."""
    width, height = size
    best, difference = (1, 1), math.inf
    grids = [(c, r) for c in range(1, most + 1) for r in range(1, most + 1) if least <= c * r <= most]
    for cols, rows in sorted(grids, key=lambda g: g[0] * g[1]):
        off = abs(width / height - cols / rows)
        if off < difference or (off == difference and width * height > 0.5 * tile[0] * tile[1] * cols * rows):
            best, difference = (cols, rows), off
    return best


def idefics_grid(size: Size, *, longest: int, tile: int, limit: int = 4096) -> Size | None:
    """(cols, rows) of Idefics3's tiles; None where the picture stays whole.

    The longest edge is scaled to `longest` (small pictures grow), the other made even, both then to whole tiles.
    """
    width, height = _to_longest(size, longest)
    ratio = width / height
    if width >= height and width > limit:
        width, height = limit, int(limit / ratio)
    elif height > width and height > limit:
        width, height = int(limit * ratio), limit
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    cols, rows = width // tile, height // tile
    return None if max(cols, rows) == 1 else (cols, rows)


def _to_longest(size: Size, longest: int) -> Size:
    width, height = size
    ratio = width / height
    if width >= height:
        other = int(longest / ratio)
        return longest, max(other + other % 2, 1)
    other = int(longest * ratio)
    return max(other + other % 2, 1), longest


@lru_cache(maxsize=1024)
def tiled_views(size: Size, grid: Size | None, *, tile: float, side: int, cell: float) -> PictureViews:
    """Tiles row by row over the squashed picture, then the whole of it; only the whole where `grid` is None."""
    n = side * side
    if grid is None:
        return PictureViews("image", size, (one_view("whole", size, tile, side, cell),), n)
    x, y = (Axis(cells * tile / s, 0.0, cell, cells * side, tile=tile, per_tile=side) for s, cells in zip(size, grid))
    tiles = grid[0] * grid[1]
    views = View("tiles", x, y, tile_side=side), one_view("thumbnail", size, tile, side, cell, first=tiles * n)
    return PictureViews("image", size, views, (tiles + 1) * n)


@lru_cache(maxsize=256)
def framed_clip(size: Size, *, tile: float, side: int, cell: float, n_frames: int) -> PictureViews:
    """A clip whose every frame is one squashed square."""
    n = side * side
    whole = one_view("whole", size, tile, side, cell)
    views = tuple(replace(whole, name=f"frame:{f}", first=f * n, frames=(f,)) for f in range(n_frames))
    return PictureViews("video", size, views, n_frames * n, (), n_frames)


# ---------------------------------------------------------------------- pan and scan (Gemma3)
def pan_and_scan(size: Size, *, least: int, most: int, ratio: float) -> tuple[tuple[int, int, int, int], ...]:
    """Crops (x0, y0, x1, y1) of a long picture along its long side, the last one perhaps narrower; () for others."""
    long, short = max(size), min(size)
    if long / short < ratio:
        return ()
    n = min(most, max(2, min(long // least, math.floor(long / short + 0.5))))
    step = math.ceil(long / n)
    if min(step, short) < least:
        return ()
    cuts = [(i * step, min((i + 1) * step, long)) for i in range(n)]
    wide = size[0] >= size[1]
    return tuple((a, 0, b, short) if wide else (0, a, short, b) for a, b in cuts)


@lru_cache(maxsize=1024)
def scanned_views(size: Size, crops: tuple[tuple[int, int, int, int], ...], *, side: float, cells: int) -> PictureViews:
    """The squashed whole, then each crop squashed to the same square."""
    cell, n = side / cells, cells * cells
    views = [one_view("whole", size, side, cells, cell)]
    for i, (x0, y0, x1, y1) in enumerate(crops):
        x, y = (Axis(side / (b - a), -a * side / (b - a), cell, cells) for a, b in ((x0, x1), (y0, y1)))
        views.append(View(f"crop:{i}", x, y, (i + 1) * n))
    return PictureViews("image", size, tuple(views), len(views) * n)
