"""View geometry: how source pixels become token cells. Pure data, no tensors; `schemes.py` has each processor's."""

from __future__ import annotations

from dataclasses import dataclass, field
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
