"""Regions that a user can point at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmlens.errors import RegionError


@dataclass(frozen=True)
class Box:
    """A half-open rectangle in pixels of the source picture, origin top left.

    Examples
    --------
    >>> from mmlens import Box
    >>> Box.from_xywh(10, 20, 30, 40)
    Box(x0=10.0, y0=20.0, x1=40.0, y1=60.0)
    """

    x0: float
    y0: float
    x1: float
    y1: float

    def __post_init__(self) -> None:
        if not (self.x0 < self.x1 and self.y0 < self.y1):
            raise RegionError(
                f"a box from ({self.x0}, {self.y0}) to ({self.x1}, {self.y1}) has no area",
                expected="x0 < x1 and y0 < y1, in pixels",
                fix="Box.from_xyxy takes two corners, Box.from_xywh a corner and a size: check which one your data has",
            )

    @classmethod
    def from_xyxy(cls, x0: float, y0: float, x1: float, y1: float) -> Box:
        """From two corners, in source pixels."""
        return cls(*_numbers(x0, y0, x1, y1))

    @classmethod
    def from_xywh(cls, x: float, y: float, width: float, height: float) -> Box:
        """From the top left corner and a size, in source pixels (COCO's order)."""
        x, y, width, height = _numbers(x, y, width, height)
        return cls(x, y, x + width, y + height)

    def clip(self, width: float, height: float) -> Box:
        """The part inside a picture of this size; raises where there is none."""
        x0, y0, x1, y1 = max(self.x0, 0.0), max(self.y0, 0.0), min(self.x1, float(width)), min(self.y1, float(height))
        if not (x0 < x1 and y0 < y1):
            raise RegionError(
                f"{self} lies outside its picture of {width:g} x {height:g} pixels",
                expected="a box that overlaps the picture",
                fix="boxes are in pixels of the source picture (not 0-1, not 0-1000, not the resized picture)",
            )
        return Box(x0, y0, x1, y1)


def _numbers(*values: Any) -> tuple[float, ...]:
    try:
        return tuple(float(v) for v in values)
    except (TypeError, ValueError):
        raise RegionError(
            f"a box from {values}", expected="four numbers, in pixels", fix="Box.from_xyxy(x0, y0, x1, y1)"
        ) from None
