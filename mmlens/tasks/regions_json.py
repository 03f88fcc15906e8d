"""Regions as JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np

from mmlens.errors import DataError, RegionError
from mmlens.evidence.regions import REGIONS, Box, Mask, Page, PageRegion, Polygon, Region, Shape, Tube


def _shape(item: Mapping[str, Any], shared: Mapping[str, Any]) -> Shape:
    size = shared.get("page_size")
    units: dict[str, Any] = {"units": shared.get("units", "pixels"), "page_size": tuple(size) if size else None}
    if "box" in item:
        make = Box.from_xywh if shared.get("format") == "xywh" else Box.from_xyxy
        return make(*item["box"], **units)
    if "polygon" in item:
        rings = item["polygon"]
        rings = rings if isinstance(rings[0][0], list | tuple) else [rings]
        return Polygon(tuple(tuple((float(x), float(y)) for x, y in ring) for ring in rings), **units)
    height, width = map(int, item["rle"]["size"])  # 3.0 is an integer to a schema
    counts = item["rle"]["counts"]
    return Mask.from_rle(counts if isinstance(counts, str) else list(map(int, counts)), size=(height, width))


def _when(value: float) -> float:
    """A time of a tube: whole numbers as int; OverflowError beyond all floats."""
    if not isfinite(float(value)):
        raise RegionError(f"a tube at {value}", expected="a finite time", fix="check the record")
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(value)


def region_of(item: Mapping[str, Any]) -> Region:
    """The region that a JSON object of the schema describes."""
    if "page" in item:
        return Page(int(item["page"]))
    if "tube" in item:
        by = {"frame" if "frame" in place else "second" for place in item["tube"]}
        if len(by) != 1:
            raise RegionError(
                "a tube by frames and seconds", expected="one of the two", fix="choose one for all places"
            )
        (unit,) = by
        places = tuple(sorted(((_when(p[unit]), _shape(p, item)) for p in item["tube"]), key=lambda p: p[0]))
        return Tube(places, "frame" if unit == "frame" else "second", item.get("between", unit == "second"))
    shape = _shape(item, item)
    return PageRegion(int(item["image"]), shape) if "image" in item else shape


def runs_of(mask: Mask) -> dict[str, Any]:
    """COCO's plain run lengths of a mask."""
    flat = mask.pixels.T.ravel()
    edges = np.flatnonzero(np.diff(flat)) + 1
    runs = np.diff(np.concatenate([[0], edges, [flat.size]])).tolist()
    return {"counts": [0, *runs] if flat[0] else runs, "size": list(mask.pixels.shape)}


def _of_shape(shape: Shape) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the shape, its units) as JSON."""
    if isinstance(shape, Mask):
        return {"rle": runs_of(shape)}, {}
    units: dict[str, Any] = {} if shape.units == "pixels" else {"units": shape.units}
    units.update({} if shape.page_size is None else {"page_size": list(shape.page_size)})
    if isinstance(shape, Box):
        return {"box": list(shape.corners)}, units
    rings = [[list(point) for point in ring] for ring in shape.rings]
    return {"polygon": rings[0] if len(rings) == 1 else rings}, units


def region_json(region: Region) -> dict[str, Any]:
    """A region as a JSON object of the schema."""
    if isinstance(region, Page):
        return {"page": region.number}
    if isinstance(region, Tube):
        places: list[dict[str, Any]] = []
        units: dict[str, Any] = {}
        for when, moved in region.places:
            one, own = _of_shape(moved)
            if places and own != units:
                raise DataError("a tube whose places have several units", expected="one", fix="give all the same units")
            units = own
            places.append({region.by: when, **one})
        return {"tube": places, "between": region.between, **units}
    described, units = _of_shape(region.region if isinstance(region, PageRegion) else region)
    return {**described, **units, **({"image": region.number} if isinstance(region, PageRegion) else {})}


def to_json(value: Any) -> Any:
    """Any plain value as JSON; regions inside become {"region": ...}."""
    if isinstance(value, REGIONS):
        return {"region": region_json(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise DataError(
        f"meta with a {type(value).__name__}", expected="strings, numbers, lists, dicts, regions", fix="drop it first"
    )


def from_json(value: Any) -> Any:
    """What `to_json` made; lists become tuples. A "region" that describes none is somebody's own word."""
    if isinstance(value, dict):
        if set(value) == {"region"} and isinstance(value["region"], dict):
            try:
                return region_of(value["region"])
            except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RegionError):
                pass
        return {k: from_json(v) for k, v in value.items()}
    return tuple(map(from_json, value)) if isinstance(value, list) else value
