"""How much of each cell of a grid a region fills: exact areas, in source pixels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mmlens.errors import RegionError
from mmlens.evidence.regions import Box, Mask, Polygon, Shape

Edges = np.ndarray  # (2, n): where each cell of an axis starts and ends


class Area(ABC):
    """A set of points of a picture, known by how much of any rectangle it fills."""

    @abstractmethod
    def filled(self, across: Edges, down: Edges) -> np.ndarray:
        """Square pixels of it in every cell: (rows, cols)."""

    def share(self, across: Edges, down: Edges) -> np.ndarray:
        """Fraction (0..1) of every cell that it fills: (rows, cols)."""
        size = np.outer(down[1] - down[0], across[1] - across[0])
        return np.clip(self.filled(across, down) / size, 0.0, 1.0)

    def total(self) -> float:
        """Square pixels of it."""
        far = np.array([[-1e9], [1e9]])
        return float(self.filled(far, far)[0, 0])


class Boxes(Area):
    """Rectangles that do not overlap."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = _disjoint(boxes)

    def filled(self, across: Edges, down: Edges) -> np.ndarray:
        """As `Area.filled`: a box's part of a cell is the product of its parts of both sides."""
        found = np.zeros((down.shape[1], across.shape[1]))
        for x0, y0, x1, y1 in self.boxes:
            found += np.outer(_inside(down, y0, y1), _inside(across, x0, x1))
        return found


class Outlines(Area):
    """Polygons, boxes among them."""

    def __init__(self, shapes: Sequence[Box | Polygon], width: float, height: float) -> None:
        import shapely

        parts: list[Any] = []
        for shape in shapes:
            if isinstance(shape, Box):
                parts.append(shapely.box(*shape.corners))
            else:
                parts += [shapely.make_valid(shapely.Polygon(ring)) for ring in shape.rings]
        self.geometry = shapely.intersection(shapely.union_all(parts), shapely.box(0, 0, width, height))
        if not self.geometry.area > 0:
            raise RegionError(
                f"a polygon outside its picture of {width:g} x {height:g} pixels, or without area",
                expected="an outline that encloses a part of the picture",
                fix="check its units and its points",
            )
        shapely.prepare(self.geometry)

    def filled(self, across: Edges, down: Edges) -> np.ndarray:
        """As `Area.filled`: cells inside count whole, those on an edge are cut."""
        import shapely

        x0, y0, x1, y1 = self.geometry.bounds
        found = np.zeros((down.shape[1], across.shape[1]))
        rows = np.flatnonzero((down[1] > y0) & (down[0] < y1))
        cols = np.flatnonzero((across[1] > x0) & (across[0] < x1))
        if len(rows) and len(cols):
            r, c = (i.ravel() for i in np.meshgrid(rows, cols, indexing="ij"))
            cells = shapely.box(across[0, c], down[0, r], across[1, c], down[1, r])
            inside = shapely.contains_properly(self.geometry, cells)
            values = (across[1, c] - across[0, c]) * (down[1, r] - down[0, r])
            values[~inside] = shapely.area(shapely.intersection(self.geometry, cells[~inside]))
            found[r, c] = values
        return found


class Pixels(Area):
    """A mask stretched onto its picture."""

    def __init__(self, mask: Mask, width: float, height: float) -> None:
        if not mask.pixels.any():
            raise RegionError("a mask without any pixel", expected="at least one", fix="check the record")
        self.mask, self.size = mask, (width, height)

    def filled(self, across: Edges, down: Edges) -> np.ndarray:
        """As `Area.filled`: differences of running sums, read between pixels."""
        rows, cols = self.mask.pixels.shape
        sx, sy = cols / self.size[0], rows / self.size[1]
        corners = _sampled(_sampled(self.mask.integral, down.ravel() * sy).T, across.ravel() * sx).T
        n, m = down.shape[1], across.shape[1]
        parts = corners[n:, m:] - corners[:n, m:] - corners[n:, :m] + corners[:n, :m]
        return parts / (sx * sy)


def _sampled(table: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Rows of a table of running sums at fractional places."""
    at = np.clip(at, 0, len(table) - 1)
    low = np.minimum(at.astype(int), len(table) - 2)
    share = (at - low)[:, None]
    return table[low] * (1 - share) + table[low + 1] * share


def _inside(cells: Edges, low: float, high: float) -> np.ndarray:
    """How much of each cell of an axis lies in [low, high)."""
    return np.maximum(np.minimum(cells[1], high) - np.maximum(cells[0], low), 0.0)


def _disjoint(boxes: Sequence[Box]) -> list[tuple[float, float, float, float]]:
    """Rectangles that cover the same points without overlapping: strips between the boxes' edges."""
    if len(boxes) == 1:
        return [boxes[0].corners]
    found = []
    cuts = sorted({y for b in boxes for y in (b.y0, b.y1)})
    for top, bottom in pairwise(cuts):
        spans = sorted((b.x0, b.x1) for b in boxes if b.y0 <= top and b.y1 >= bottom)
        at: list[list[float]] = []
        for low, high in spans:
            if at and low <= at[-1][1]:
                at[-1][1] = max(at[-1][1], high)
            else:
                at.append([low, high])
        found += [(low, top, high, bottom) for low, high in at]
    return found


def area_of(shapes: Sequence[Shape], width: float, height: float) -> Area:
    """The union of shapes on a picture of this size.

    Boxes and polygons are exact. With a mask among them, the others become masks of its resolution (a pixel belongs to
    them if its centre does).

    Raises
    ------
    RegionError
        For a shape outside the picture.
    """
    boxes = [s.clip(width, height) for s in shapes if isinstance(s, Box)]
    polygons = [s.in_pixels(width, height) for s in shapes if isinstance(s, Polygon)]
    masks = [s for s in shapes if isinstance(s, Mask)]
    if masks:
        return Pixels(_painted(masks, [*boxes, *polygons], width, height), width, height)
    return Outlines([*boxes, *polygons], width, height) if polygons else Boxes(boxes)


def _painted(masks: Sequence[Mask], shapes: Sequence[Box | Polygon], width: float, height: float) -> Mask:
    if len(masks) == 1 and not shapes:
        return masks[0]
    rows, cols = (max(m.pixels.shape[axis] for m in masks) for axis in (0, 1))
    x, y = (np.arange(cols) + 0.5) * width / cols, (np.arange(rows) + 0.5) * height / rows
    whole = np.zeros((rows, cols), bool)
    for mask in masks:
        h, w = mask.pixels.shape
        whole |= mask.pixels[np.minimum((y * h / height).astype(int), h - 1)][
            :, np.minimum((x * w / width).astype(int), w - 1)
        ]
    for shape in shapes:
        if isinstance(shape, Box):
            whole |= ((y >= shape.y0) & (y < shape.y1))[:, None] & ((x >= shape.x0) & (x < shape.x1))[None]
        else:
            import shapely

            geometry = Outlines([shape], width, height).geometry
            shapely.prepare(geometry)
            whole |= shapely.contains_xy(geometry, *np.meshgrid(x, y))
    return Mask(whole)
