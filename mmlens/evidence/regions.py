"""Regions that a user can point at: boxes, polygons, masks, tubes through a video, pages."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union

import numpy as np

from mmlens.errors import RegionError
from mmlens.evidence.masks import Mask

Units = Literal["pixels", "fraction", "thousandths", "points"]
UNITS: tuple[Units, ...] = ("pixels", "fraction", "thousandths", "points")
Size = tuple[float, float]
Corners = tuple[float, float, float, float]


def _scale(units: Units, page_size: Size | None, width: float, height: float) -> Size:
    """Source pixels that one unit spans, across and down."""
    if units == "pixels":
        return 1.0, 1.0
    whole = page_size if page_size is not None else (1.0, 1.0) if units == "fraction" else (1000.0, 1000.0)
    return width / whole[0], height / whole[1]


def _check_units(units: Any, page_size: Any) -> None:
    if units not in UNITS:
        raise RegionError(
            f"units={units!r}",
            expected=f"one of {', '.join(UNITS)}",
            fix="pixels of the source picture, fractions 0..1, thousandths 0..1000, or PDF points with page_size=",
        )
    if (units == "points") != (page_size is not None):
        raise RegionError(
            f"units={units!r} with page_size={page_size}",
            expected="page_size=(width, height) in points with units='points', and only then",
            fix="Box.from_xyxy(60, 100, 300, 260, units='points', page_size=(612, 792))",
        )
    if page_size is not None and not (
        isinstance(page_size, list | tuple) and len(page_size) == 2 and 0 < min(_numbers(*page_size)) < math.inf
    ):
        raise RegionError(f"page_size={page_size}", expected="(width, height) above 0, in points", fix="(612, 792)")


@dataclass(frozen=True, repr=False)
class Box:
    """A half-open rectangle on a picture, origin top left.

    Attributes
    ----------
    x0, y0, x1, y1
        Corners, in `units`.
    units
        "pixels" of the source picture (as stored in its file), "fraction" (0..1), "thousandths" (0..1000), or
        "points" of a PDF page whose size in points is `page_size`.

    Examples
    --------
    >>> from mmlens import Box
    >>> Box.from_xywh(10, 20, 30, 40)
    Box(x0=10.0, y0=20.0, x1=40.0, y1=60.0)
    >>> Box.from_xyxy(0.25, 0, 0.5, 1, units="fraction").in_pixels(640, 480)
    Box(x0=160.0, y0=0.0, x1=320.0, y1=480.0)
    """

    x0: float
    y0: float
    x1: float
    y1: float
    units: Units = "pixels"
    page_size: Size | None = None

    def __post_init__(self) -> None:
        _check_units(self.units, self.page_size)
        for name, value in zip(("x0", "y0", "x1", "y1"), _numbers(*self.corners)):
            object.__setattr__(self, name, value)
        if not all(map(math.isfinite, self.corners)):
            raise RegionError(f"a box from {self.corners}", expected="finite numbers", fix="check the record")
        if not (self.x0 < self.x1 and self.y0 < self.y1):
            raise RegionError(
                f"a box from ({self.x0}, {self.y0}) to ({self.x1}, {self.y1}) has no area",
                expected="x0 < x1 and y0 < y1",
                fix="Box.from_xyxy takes two corners, Box.from_xywh a corner and a size: check which one your data has",
            )
        most = {"fraction": 1.0, "thousandths": 1000.0}.get(self.units)
        if most is not None and max(map(abs, self.corners)) > 1.5 * most:
            raise RegionError(
                f"a box from {self.corners} in units of {self.units}",
                expected=f"numbers from 0 to {most:g}",
                fix="these look like other units: 'pixels', 'thousandths' or 'points'?",
            )

    def __repr__(self) -> str:
        text = f"Box(x0={self.x0}, y0={self.y0}, x1={self.x1}, y1={self.y1}"
        text += "" if self.units == "pixels" else f", units={self.units!r}"
        return text + ("" if self.page_size is None else f", page_size={self.page_size}") + ")"

    @property
    def corners(self) -> Corners:
        """(x0, y0, x1, y1)."""
        return self.x0, self.y0, self.x1, self.y1

    @classmethod
    def from_xyxy(
        cls, x0: float, y0: float, x1: float, y1: float, *, units: Units = "pixels", page_size: Size | None = None
    ) -> Box:
        """From two corners."""
        x0, y0, x1, y1 = _numbers(x0, y0, x1, y1)
        return cls(x0, y0, x1, y1, units, page_size)

    @classmethod
    def from_xywh(
        cls, x: float, y: float, width: float, height: float, *, units: Units = "pixels", page_size: Size | None = None
    ) -> Box:
        """From the top left corner and a size (COCO's order)."""
        x, y, width, height = _numbers(x, y, width, height)
        return cls(x, y, x + width, y + height, units, page_size)

    def in_pixels(self, width: float, height: float) -> Box:
        """The same box in pixels of a picture of this size; each axis has its own scale."""
        across, down = _scale(self.units, self.page_size, width, height)
        return Box(self.x0 * across, self.y0 * down, self.x1 * across, self.y1 * down)

    def clip(self, width: float, height: float) -> Box:
        """The part inside a picture of this size, in its pixels; raises where there is none."""
        whole = self.in_pixels(width, height)
        x0, y0 = max(whole.x0, 0.0), max(whole.y0, 0.0)
        x1, y1 = min(whole.x1, float(width)), min(whole.y1, float(height))
        if not (x0 < x1 and y0 < y1):
            raise RegionError(
                f"{self} lies outside its picture of {width:g} x {height:g} pixels",
                expected="a box that overlaps the picture",
                fix="say what the numbers are: units='pixels' of the source picture (not of a resized one), "
                "'fraction', 'thousandths' or 'points'",
            )
        return Box(x0, y0, x1, y1)


@dataclass(frozen=True)
class Polygon:
    """One or several closed outlines; a point belongs to the region if any of them holds it.

    Attributes
    ----------
    rings
        Outlines, each at least three points (x, y), in `units` (as `Box`).

    Examples
    --------
    >>> from mmlens import Polygon
    >>> Polygon.from_points([(0, 0), (40, 0), (0, 30)]).area(100, 100)
    600.0
    """

    rings: tuple[tuple[tuple[float, float], ...], ...]
    units: Units = "pixels"
    page_size: Size | None = None

    def __post_init__(self) -> None:
        _check_units(self.units, self.page_size)
        try:
            rings = tuple(tuple((float(x), float(y)) for x, y in ring) for ring in self.rings)
        except (TypeError, ValueError, OverflowError):
            raise RegionError(
                f"outlines {self.rings!r}",
                expected="outlines of points (x, y)",
                fix="Polygon.from_points([(x, y), ...])",
            ) from None
        object.__setattr__(self, "rings", rings)
        if not self.rings or any(len(set(ring)) < 3 for ring in self.rings):
            raise RegionError(
                f"a polygon with outlines of {[len(r) for r in self.rings]} points",
                expected="at least three different points in each outline",
                fix="Polygon.from_points([(x, y), (x, y), (x, y)])",
            )
        if not all(math.isfinite(v) for ring in self.rings for point in ring for v in point):
            raise RegionError("a polygon with points at infinity", expected="finite numbers", fix="check the record")

    @classmethod
    def from_points(
        cls, points: Iterable[Sequence[float]], *, units: Units = "pixels", page_size: Size | None = None
    ) -> Polygon:
        """One outline from its points (x, y)."""
        try:
            pairs = [_numbers(*p) for p in points]
        except TypeError:
            raise RegionError(f"points {points!r}", expected="pairs (x, y)", fix="[(0, 0), (40, 0), (0, 30)]") from None
        if any(len(p) != 2 for p in pairs):
            raise RegionError(f"points {pairs[:3]}", expected="pairs (x, y)", fix="Polygon.from_flat takes x, y, x, y")
        return cls((tuple((p[0], p[1]) for p in pairs),), units, page_size)

    @classmethod
    def from_flat(
        cls, rings: Iterable[Sequence[float]], *, units: Units = "pixels", page_size: Size | None = None
    ) -> Polygon:
        """Several outlines, each as x, y, x, y, ... (COCO's `segmentation`)."""
        try:
            flat = [_numbers(*ring) for ring in rings]
        except TypeError:
            raise RegionError(
                f"outlines {rings!r}", expected="a list of outlines, each x, y, x, y, ...", fix="[[0, 0, 40, 0, 0, 30]]"
            ) from None
        if any(len(ring) % 2 for ring in flat):
            raise RegionError("an outline of an odd count of numbers", expected="x, y, x, y, ...", fix="check the data")
        return cls(tuple(tuple(zip(r[::2], r[1::2])) for r in flat), units, page_size)

    def in_pixels(self, width: float, height: float) -> Polygon:
        """The same outlines in pixels of a picture of this size."""
        across, down = _scale(self.units, self.page_size, width, height)
        return Polygon(tuple(tuple((x * across, y * down) for x, y in ring) for ring in self.rings))

    def area(self, width: float, height: float) -> float:
        """Square pixels of it inside a picture of this size."""
        from mmlens.evidence.area import area_of

        return area_of([self], width, height).total()


Shape = Union[Box, Polygon, Mask]


@dataclass(frozen=True)
class Tube:
    """A region that moves through a video.

    Attributes
    ----------
    places
        (when, shape) in order: `when` is a frame number of the source video (counted from 0, before any sampling), or
        seconds.
    by
        "frame" or "second".
    between
        Whether the region is also there between two places (boxes are interpolated, other shapes stay as before).
    """

    places: tuple[tuple[float, Shape], ...]
    by: Literal["frame", "second"] = "frame"
    between: bool = False

    def __post_init__(self) -> None:
        if self.by not in ("frame", "second"):
            raise RegionError(f"by={self.by!r}", expected="'frame' or 'second'", fix="Tube.from_frames({12: box})")
        try:
            times = [float(when) for when, _ in self.places]
        except (TypeError, ValueError):
            times = []
        if not times or times != sorted(set(times)) or not 0 <= times[0] <= times[-1] < math.inf:
            raise RegionError(
                f"a tube at {times[:6]}",
                expected="at least one place, each at its own time of 0 or later",
                fix="Tube.from_frames({12: box, 13: box})",
            )
        wrong = [shape for _, shape in self.places if not isinstance(shape, Box | Polygon | Mask)]
        if wrong:
            raise RegionError(
                f"a tube through {type(wrong[0]).__name__}", expected="boxes, polygons or masks", fix="Box.from_xyxy"
            )

    @classmethod
    def from_frames(cls, places: Mapping[int, Shape], *, between: bool = False) -> Tube:
        """From {frame number of the source video: shape}."""
        if not isinstance(places, Mapping) or not all(isinstance(k, int | np.integer) for k in places):
            raise RegionError(f"a tube from {places!r}", expected="{frame: shape}", fix="Tube.from_frames({12: box})")
        return cls(tuple(sorted(places.items(), key=lambda p: p[0])), "frame", between)

    @classmethod
    def from_seconds(cls, places: Mapping[float, Shape]) -> Tube:
        """From {seconds: shape}; the region is there from the first to the last, boxes interpolated in between."""
        if not isinstance(places, Mapping) or not all(isinstance(k, int | float) for k in places):
            raise RegionError(f"a tube from {places!r}", expected="{seconds: shape}", fix="Tube.from_seconds({0.5: b})")
        return cls(tuple(sorted(places.items(), key=lambda p: p[0])), "second", True)

    @classmethod
    def span(cls, start: float, end: float, *, by: Literal["frame", "second"] = "second") -> Tube:
        """The whole picture from `start` to `end`, both included: evidence in time only."""
        if not (isinstance(start, int | float) and isinstance(end, int | float) and start <= end):
            raise RegionError(f"a span from {start!r} to {end!r}", expected="start <= end", fix="Tube.span(1.0, 2.5)")
        return cls(((start, WHOLE), (end, WHOLE)) if end > start else ((start, WHOLE),), by, True)

    def at(self, *, frame: int, second: float) -> Shape | None:
        """Where the region is in the frame that has this number in the source video and this time; None if nowhere."""
        when = frame if self.by == "frame" else second
        times = [t for t, _ in self.places]
        after = bisect.bisect_left(times, when)
        if after < len(times) and times[after] == when:
            return self.places[after][1]
        if not self.between or not 0 < after < len(times):
            return None
        (t0, a), (t1, b) = self.places[after - 1 : after + 1]
        if not (isinstance(a, Box) and isinstance(b, Box) and (a.units, a.page_size) == (b.units, b.page_size)):
            return a
        share = (when - t0) / (t1 - t0)
        x0, y0, x1, y1 = (p + share * (q - p) for p, q in zip(a.corners, b.corners))
        return Box(x0, y0, x1, y1, a.units, a.page_size)


@dataclass(frozen=True)
class Page:
    """A whole picture of several: a page of a document, a picture of a series. `number` counts a prompt's from 0."""

    number: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", _index(self.number))


@dataclass(frozen=True)
class PageRegion:
    """A region on one picture of several.

    Examples
    --------
    >>> from mmlens import Box, PageRegion
    >>> PageRegion(2, Box.from_xyxy(60, 100, 300, 260, units="points", page_size=(612, 792))).number
    2
    """

    number: int
    region: Shape

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", _index(self.number))
        if not isinstance(self.region, Box | Polygon | Mask):
            raise RegionError(
                f"a region on picture {self.number} given as {type(self.region).__name__}",
                expected="a Box, Polygon or Mask",
                fix="PageRegion(2, Box.from_xyxy(x0, y0, x1, y1)); a whole picture is Page(2)",
            )


Region = Union[Box, Polygon, Mask, Tube, Page, PageRegion]
REGIONS = (Box, Polygon, Mask, Tube, Page, PageRegion)


def as_regions(given: Any) -> tuple[Region, ...]:
    """One region or several as a tuple; raises RegionError for anything else."""
    several = tuple(given) if isinstance(given, list | tuple) else (given,)
    for region in several:
        if not isinstance(region, REGIONS):
            raise RegionError(
                f"a region given as {type(region).__name__}",
                expected=f"{', '.join(r.__name__ for r in REGIONS)}, or a list of these",
                fix="Box.from_xyxy(x0, y0, x1, y1) or Box.from_xywh(x, y, width, height)",
            )
    return several


def picture_of(region: Region, default: int) -> int:
    """The picture of an example that a region lies on: its own number, where it has one."""
    return region.number if isinstance(region, Page | PageRegion) else default


def _index(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 0:
        raise RegionError(
            f"picture number {number!r}", expected="an int, from 0", fix="count the prompt's pictures from 0"
        )
    return int(number)


def _numbers(*values: Any) -> tuple[float, ...]:
    try:
        return tuple(float(v) for v in values)
    except (TypeError, ValueError, OverflowError):
        raise RegionError(
            f"a box from {values}", expected="four numbers", fix="Box.from_xyxy(x0, y0, x1, y1)"
        ) from None


WHOLE = Box(0.0, 0.0, 1.0, 1.0, "fraction")
