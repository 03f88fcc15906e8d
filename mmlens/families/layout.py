"""Where a picture's tokens, projected features and patches lie: data that families fill in, and how to build it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mmlens.errors import RegionError
from mmlens.evidence.locate import Sampling
from mmlens.evidence.views import Kind, View


@dataclass(frozen=True)
class Segments:
    """How a tower block's rows are grouped: lengths in rows of what attends together, and the picture of each.

    Pictures are numbered over the batch in prompt order; tiles and frames of one picture share its number.
    """

    lengths: tuple[int, ...]
    pictures: tuple[int, ...]


@dataclass(frozen=True)
class Item:
    """One picture or video of a prompt.

    Attributes
    ----------
    kind
        "image" or "video".
    example
        Which example of the batch shows it.
    columns
        Its tokens' columns in the encoded batch.
    size
        (width, height) of the source in pixels, or None for inputs that came ready-made.
    sampling
        For a video whose source is known: which of its frames the model is shown.
    """

    kind: Kind
    example: int
    columns: tuple[int, ...] = field(repr=False)
    size: tuple[int, int] | None = None
    sampling: Sampling | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Raster:
    """A grid of places in raster order (row after row), each the index of a row of some tensor."""

    rows: int
    cols: int
    index: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True)
class Grid:
    """One look at a picture: the whole of it, its tiles stitched together, its thumbnail, or one frame of a video.

    Attributes
    ----------
    name
        "whole", "tiles", "thumbnail", "crop:0" or "frame:3" (of the grid's first frame).
    tokens
        Ordinals among the picture's own tokens in the decoder.
    projected
        Rows of the projector's output, all its axes but the last flattened.
    patches
        Rows of the tower's streams, likewise.
    view
        Where source pixels lie in it; None until the prompt, which knows the source's size, adds it.
    frames
        For a video: which of the model's frames it holds.
    """

    name: str
    tokens: Raster
    projected: Raster
    patches: Raster
    view: View | None = None
    frames: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Everything about where one picture or video lies: its grids, its tiles' tokens, its newline tokens."""

    grids: tuple[Grid, ...]
    tiles: tuple[tuple[int, ...], ...] = ()
    newlines: tuple[int, ...] = ()

    def grid(self, name: str | None = None) -> Grid:
        """A grid by name; by default the finest that covers the picture, or a video's first frame."""
        names = [g.name for g in self.grids]
        if name is None:
            return self.grids[names.index("tiles") if "tiles" in names else 0]
        for grid in self.grids:
            if grid.name == name or (name.startswith("frame:") and int(name[6:]) in grid.frames):
                return grid
        raise RegionError(
            f"view {name!r}",
            expected=f"one of {', '.join(names)}",
            fix="leave it out for the finest grid that covers the picture",
        )


def square(side: int, start: int = 0) -> Raster:
    """A `side` x `side` raster of consecutive rows from `start` on."""
    return Raster(side, side, tuple(range(start, start + side * side)))


def mosaic(tile_rows: int, tile_cols: int, side: int, *, stride: int, first: int) -> Raster:
    """Tiles of `side` x `side`, row-major, stitched: tile t starts at `first + t * stride`."""
    rows, cols = tile_rows * side, tile_cols * side
    index = [
        first + ((r // side) * tile_cols + c // side) * stride + (r % side) * side + c % side
        for r in range(rows)
        for c in range(cols)
    ]
    return Raster(rows, cols, tuple(index))


def tiled_layout(
    kind: Kind, shape: tuple[int, int] | None, *, tiles: int, start: int, side: int, q: int, rows: int
) -> Layout:
    """Tiles of q x q tokens row by row, the whole picture last; of a video one such square a frame.

    Parameters
    ----------
    shape
        (rows, cols) of tiles, or None where nobody knows; then only the thumbnail is a grid.
    tiles, start
        Tiles of this picture, and in the tower before it.
    side, rows
        Patches along a tile's side, and rows of a tile in the tower (a CLS row first, where there is one more).
    """
    cls = rows - side * side

    def one(name: str, tile: int, frames: tuple[int, ...] = ()) -> Grid:
        here = start + tile
        return Grid(
            name, square(q, tile * q * q), square(q, here * q * q), square(side, here * rows + cls), frames=frames
        )

    each = tuple(tuple(range(t * q * q, (t + 1) * q * q)) for t in range(tiles))
    if kind == "video":
        return Layout(tuple(one(f"frame:{f}", f, (f,)) for f in range(tiles)))
    if tiles == 1:
        return Layout((one("whole", 0),), each)
    if shape is None:
        return Layout((one("thumbnail", tiles - 1),), each)
    stitched = Grid(
        "tiles",
        mosaic(*shape, q, stride=q * q, first=0),
        mosaic(*shape, q, stride=q * q, first=start * q * q),
        mosaic(*shape, side, stride=rows, first=start * rows + cls),
    )
    return Layout((stitched, one("thumbnail", tiles - 1)), each)


def runs(columns: Sequence[int]) -> list[tuple[int, ...]]:
    """Columns split wherever another token stands between two of them."""
    found: list[list[int]] = []
    for column in columns:
        if found and column == found[-1][-1] + 1:
            found[-1].append(column)
        else:
            found.append([column])
    return [tuple(run) for run in found]


def tile_segments(rows: int, tiles: Sequence[int]) -> Segments:
    """Segments of a tower in which every tile attends within itself: `tiles[i]` tiles of `rows` rows for picture i."""
    return Segments((rows,) * sum(tiles), tuple(i for i, n in enumerate(tiles) for _ in range(n)))
