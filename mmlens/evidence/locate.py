"""Which of a picture's tokens a region touches, and which pixels a token sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mmlens.errors import OptionError, RegionError
from mmlens.evidence.area import Area, area_of
from mmlens.evidence.regions import WHOLE, Mask, Page, PageRegion, Region, Shape, Tube
from mmlens.evidence.views import TINY, PictureViews

VIEWS = ("all", "tiles", "thumbnail")


@dataclass(frozen=True)
class Sampling:
    """Which frames of a source video the model is shown: their numbers in the source, and their times in seconds."""

    indices: tuple[int, ...]
    times: tuple[float, ...]


@dataclass(frozen=True)
class Found:
    """Ordinals among a picture's own tokens, in order, with the fraction of each that lies in the region."""

    shares: Mapping[int, float]
    by_view: Mapping[str, Mapping[int, float]] = field(repr=False)
    reason: str | None = None


def find(
    shown: PictureViews,
    regions: Sequence[Region],
    *,
    sampling: Sampling | None = None,
    coverage: float = 0.0,
    views: str = "all",
) -> Found:
    """Tokens of a picture or video of which more than `coverage` lies in the union of some regions.

    Parameters
    ----------
    coverage
        0 takes every token that a region touches; above it, tokens of which at least this fraction is covered.
    views
        "all", "tiles" or "thumbnail"; for pictures of one look the three are the same.

    Raises
    ------
    RegionError
        For a region outside the picture. One that is not shown to the model gives nothing, with the reason.
    """
    if views not in VIEWS:
        raise OptionError(f"views={views!r}", expected=f"one of {', '.join(VIEWS)}", fix="leave it out for all")
    if isinstance(coverage, bool) or not isinstance(coverage, int | float) or not 0 <= coverage <= 1:
        raise OptionError(f"coverage={coverage!r}", expected="a fraction from 0 to 1", fix="coverage=0.5")
    if shown.kind == "image":
        areas: dict[int, Area | None] = {-1: area_of(shapes_at(regions, None), *shown.size)}
    else:
        there = {f: shapes_at(regions, f, sampling) for f in range(shown.n_frames)}
        areas = {f: area_of(shapes, *shown.size) if shapes else None for f, shapes in there.items()}
    shares: dict[int, float] = {}
    by_view: dict[str, dict[int, float]] = {}
    for view in shown.chosen(views):
        inside = [areas[f] for f in (view.frames or (-1,))]
        # A token of several frames holds the mean of their pixels.
        share = sum((view.share(a) for a in inside if a is not None), np.zeros((view.rows, view.cols))) / len(inside)
        taken = (share >= coverage - TINY) & (share > 0)
        mine = dict(zip(view.ordinals[taken].tolist(), share[taken].tolist()))
        mine = dict(sorted(mine.items())) if view.tile_side else mine  # tiles are not in raster order
        if mine:
            by_view[view.name] = mine
            shares = {**shares, **mine} if shares else mine
    reason = None if shares else _reason(shown, regions, sampling, coverage, any(a is not None for a in areas.values()))
    return Found(dict(sorted(shares.items())) if len(by_view) > 1 else shares, by_view, reason)


def shapes_at(regions: Sequence[Region], frame: int | None, sampling: Sampling | None = None) -> list[Shape]:
    """What of some regions is on a picture (`frame` None), or in one of the frames that the model is shown."""
    shapes: list[Shape] = []
    for region in regions:
        if isinstance(region, Page):
            shapes.append(WHOLE)
        elif isinstance(region, PageRegion):
            shapes.append(region.region)
        elif not isinstance(region, Tube):
            shapes.append(region)
        elif frame is None:
            raise RegionError(
                "a tube on a picture", expected="a video", fix="take one of its boxes: tube.at(frame=12, second=0.4)"
            )
        else:
            at = (frame, frame / 2) if sampling is None else (sampling.indices[frame], sampling.times[frame])
            here = region.at(frame=at[0], second=at[1])
            shapes += [] if here is None else [here]
    return shapes


def _reason(
    shown: PictureViews, regions: Sequence[Region], sampling: Sampling | None, coverage: float, present: bool
) -> str:
    what = ", ".join(_told(r) for r in regions) if len(regions) < 4 else f"{len(regions)} regions"
    if shown.kind == "video" and not present:
        seen = sampling or Sampling(tuple(range(shown.n_frames)), ())
        at = ", ".join(map(str, seen.indices[:12])) + (", ..." if len(seen.indices) > 12 else "")
        when = f" at {seen.times[0]:.2f} to {seen.times[-1]:.2f} s" if seen.times else ""
        return f"{what} falls between the frames that the model is shown: {at}{when}; a higher fps shows more"
    if coverage > 0:
        return f"no token lies to {coverage:.0%} in {what}"
    return f"the model is shown nothing of {what}: cropped away by the processor, or too small for any token"


def _told(region: Region) -> str:
    if isinstance(region, Tube):
        first, last = region.places[0][0], region.places[-1][0]
        unit = "frame" if region.by == "frame" else "second"
        return f"a tube from {unit} {first:g} to {last:g}"
    return f"a mask of {int(region.pixels.sum())} pixels" if isinstance(region, Mask) else str(region)
