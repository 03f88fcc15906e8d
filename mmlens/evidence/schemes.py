"""How each processor cuts pictures and clips: one function a scheme, from sizes and the processor's numbers to views.

Plain arithmetic, cached by its arguments; the one home of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from mmlens.evidence.views import Axis, PictureViews, Size, View


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
