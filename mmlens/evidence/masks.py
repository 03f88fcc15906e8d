"""Masks: any set of pixels, from arrays or from COCO's run lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mmlens.errors import RegionError

MOST_MASK_PIXELS = 2**28


@dataclass(frozen=True, eq=False)
class Mask:
    """Any set of pixels of a picture.

    Attributes
    ----------
    pixels
        Boolean array (height, width); a mask of another size than the picture is stretched onto it.
    """

    pixels: np.ndarray = field(repr=False)

    def __post_init__(self) -> None:
        array = np.asarray(self.pixels)
        if array.ndim != 2 or array.dtype not in (np.bool_, np.uint8) or 0 in array.shape:
            raise RegionError(
                f"a mask given as {array.dtype} array of shape {array.shape}",
                expected="a boolean array (height, width)",
                fix="Mask(array > 0)",
            )
        object.__setattr__(self, "pixels", array.astype(bool))

    @cached_property
    def integral(self) -> np.ndarray:
        """(height + 1, width + 1): how many pixels lie above and left of each corner."""
        height, width = self.pixels.shape
        whole = np.zeros((height + 1, width + 1))
        np.cumsum(np.cumsum(self.pixels, 0, dtype=np.int64), 1, out=whole[1:, 1:])
        return whole

    @classmethod
    def from_rle(cls, counts: str | bytes | Sequence[int], *, size: tuple[int, int]) -> Mask:
        """From COCO's run lengths, plain or compressed; `size` is COCO's (height, width), runs go down columns."""
        try:
            height, width = size
            runs = _unpacked(counts) if isinstance(counts, str | bytes) else [int(r) for r in counts]
            sound = isinstance(height, int) and isinstance(width, int) and 0 < height * width <= MOST_MASK_PIXELS
        except (TypeError, ValueError, OverflowError, UnicodeError):
            sound = False
        if not sound:
            raise RegionError(
                f"run lengths for a mask of size {size!r}",
                expected=f"runs, and (height, width) of at most {MOST_MASK_PIXELS} pixels",
                fix="check the record; `size` is (height, width)",
            )
        if sum(runs) != height * width or any(r < 0 for r in runs):
            raise RegionError(
                f"runs over {sum(runs)} pixels for a mask of {height} x {width}",
                expected="runs that fill the mask",
                fix="check the record; `size` is (height, width)",
            )
        flat = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
        return cls(flat.reshape(width, height).T)


def _unpacked(text: str | bytes) -> list[int]:
    """Run lengths of COCO's compressed form: 5 bits a character, low first; from the third on, differences."""
    codes = [c - 48 for c in (text.encode("ascii") if isinstance(text, str) else text)]
    runs: list[int] = []
    at = 0
    while at < len(codes):
        value = shift = 0
        while True:
            if at >= len(codes):
                raise RegionError("compressed run lengths that break off", expected="whole ones", fix="check the data")
            code = codes[at]
            at += 1
            value |= (code & 31) << shift
            shift += 5
            if not code & 32:
                break
        if code & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
    return runs
