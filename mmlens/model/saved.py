"""Saved caches: one safetensors file with the values and, as JSON, everything that says what they are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmlens.errors import CacheError
from mmlens.evidence.locate import Sampling
from mmlens.evidence.views import Axis, PictureViews, View
from mmlens.families.layout import Grid, Item, Layout, Raster, Segments
from mmlens.model.access import Access
from mmlens.model.cache import ActivationCache
from mmlens.model.engine import Engine
from mmlens.model.prompt import Prompt
from mmlens.model.select import Selection
from mmlens.model.sites import Site, Sites

_KIND = "mmlens cache 2"


@dataclass(frozen=True)
class SavedPrompt(Prompt):
    """What a saved cache remembers of its prompt: ids, roles, pictures' places; no pixels and no words to encode."""

    layouts: tuple[Layout, ...] = ()
    shown: tuple[PictureViews | None, ...] = ()
    tower: tuple[Segments, ...] = ()

    def layout(self, number: int) -> Layout:
        """As it was when the cache was saved."""
        return self.layouts[number] if 0 <= number < len(self.layouts) else super().layout(number)

    def views(self, number: int) -> PictureViews:
        """As they were when the cache was saved."""
        known = self.shown[number] if 0 <= number < len(self.shown) else None
        return known if known is not None else super().views(number)

    def segments(self, layer: int) -> Segments:
        """As it was when the cache was saved."""
        return self.tower[layer]


def save(cache: ActivationCache, path: str | Path) -> None:
    """See `ActivationCache.save`."""
    from safetensors.torch import save as to_bytes

    prompt, sites = cache.prompt, [cache._sites.get(name) for name in cache]
    towers = [s.layer for s in sites if s.tower and s.layer is not None]
    selection = cache._selection
    body = {
        "kind": _KIND,
        "step": cache.step,
        "reduced": sorted(cache.reduced),
        "sites": [
            {"name": s.name, "axes": s.axes, "layer": s.layer, "tower": s.tower, "order": s.order, "used": s.used}
            for s in sites
        ],
        "selection": {
            "rows": selection.rows,
            "positions": selection.positions,
            "heads": None if selection.heads is None else {str(k): v for k, v in selection.heads.items()},
        },
        "roles": prompt.roles,
        "forced": prompt.forced,
        "items": [asdict(item) for item in prompt.items],
        "layouts": [asdict(prompt.layout(i)) for i in range(len(prompt.items))],
        "views": [None if item.size is None else asdict(prompt.views(i)) for i, item in enumerate(prompt.items)],
        "segments": [asdict(prompt.segments(layer)) for layer in range(max(towers) + 1)] if towers else [],
        "provenance": cache.provenance,
    }
    tensors = {name: value.detach().contiguous().clone() for name, value in cache.items()}
    tensors |= {f"input:{key}": prompt.inputs[key].clone() for key in ("input_ids", "attention_mask")}
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}")
        part.write_bytes(to_bytes(tensors, {"mmlens": json.dumps(body, sort_keys=True)}))
        os.replace(part, target)
    except OSError as error:
        raise CacheError(
            f"{target} cannot be written: {error}", expected="a file in a writable folder", fix="give another path"
        ) from error


def load(path: str | Path, vlm: Engine | None) -> ActivationCache:
    """See `ActivationCache.load`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            body = json.loads((file.metadata() or {})["mmlens"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator of its own)
        if body["kind"] != _KIND:
            raise KeyError(body["kind"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CacheError(
            f"{path} is no saved cache: {type(error).__name__} {error}",
            expected="a file that ActivationCache.save wrote",
            fix="check the path, or save it again",
        ) from None
    theirs = body["provenance"].get("model", {}).get("fingerprint")
    if vlm is not None and theirs is not None and theirs != vlm.identity()["fingerprint"]:  # type: ignore[attr-defined]
        raise CacheError(
            f"{path} came from the model {body['provenance']['model'].get('name')!r} with other weights",
            expected="the model that the cache came from",
            fix="load that model, or load the cache without vlm=",
        )
    inputs = {key: tensors.pop(f"input:{key}") for key in ("input_ids", "attention_mask")}
    sites = vlm.sites if vlm is not None else Sites(_site(facts) for facts in body["sites"])
    return ActivationCache(
        {facts["name"]: tensors[facts["name"]] for facts in body["sites"]},
        sites,
        _prompt(body, inputs, vlm),
        _selection(body["selection"]),
        step=body["step"],
        engine=vlm,
        reduced=frozenset(body["reduced"]),
        provenance=body["provenance"],
    )


def _site(facts: Mapping[str, Any]) -> Site:
    return Site(
        facts["name"],
        tuple(facts["order"]),
        Access(None, "output", write=None),
        tuple(facts["axes"]),
        facts["layer"],
        facts["tower"],
        used=facts["used"],
    )


def _rows(value: Any) -> Any:
    return None if value is None else tuple(tuple(row) for row in value)


def _selection(facts: Mapping[str, Any]) -> Selection:
    heads = facts["heads"]
    return Selection(
        _rows(facts["rows"]),
        _rows(facts["positions"]),
        None if heads is None else {int(k): tuple(v) for k, v in heads.items()},
    )


def _view(facts: Mapping[str, Any]) -> View:
    axes = {axis: Axis(**facts[axis]) for axis in ("x", "y")}
    return View(**{**facts, **axes, "frames": tuple(facts["frames"])})


def _views(facts: Mapping[str, Any] | None) -> PictureViews | None:
    if facts is None:
        return None
    looks = tuple(_view(v) for v in facts["views"])
    return PictureViews(**{**facts, "size": tuple(facts["size"]), "views": looks, "newlines": tuple(facts["newlines"])})


def _item(facts: Mapping[str, Any]) -> Item:
    size, seen = facts["size"], facts["sampling"]
    return Item(
        facts["kind"],
        facts["example"],
        tuple(facts["columns"]),
        None if size is None else tuple(size),
        None if seen is None else Sampling(tuple(seen["indices"]), tuple(seen["times"])),
    )


def _layout(facts: Mapping[str, Any]) -> Layout:
    def raster(r: Mapping[str, Any]) -> Raster:
        return Raster(r["rows"], r["cols"], tuple(r["index"]))

    grids = [
        Grid(
            g["name"],
            raster(g["tokens"]),
            raster(g["projected"]),
            raster(g["patches"]),
            None if g["view"] is None else _view(g["view"]),
            tuple(g["frames"]),
        )
        for g in facts["grids"]
    ]
    return Layout(tuple(grids), tuple(tuple(t) for t in facts["tiles"]), tuple(facts["newlines"]))


def _prompt(body: Mapping[str, Any], inputs: dict[str, Tensor], vlm: Engine | None) -> SavedPrompt:
    items = [_item(i) for i in body["items"]]
    roles = tuple({name: tuple(columns) for name, columns in r.items()} for r in body["roles"])
    from mmlens.model.prompt import Example

    return SavedPrompt(
        {key: torch.as_tensor(value) for key, value in inputs.items()},
        roles,
        tuple(Example() for _ in roles),
        tuple(items),
        None if vlm is None else vlm.family,  # type: ignore[arg-type]
        None if vlm is None else vlm.config,
        None if vlm is None else vlm.processor,
        tuple(body["forced"]),
        layouts=tuple(_layout(layout) for layout in body["layouts"]),
        shown=tuple(_views(v) for v in body["views"]),
        tower=tuple(Segments(tuple(s["lengths"]), tuple(s["pictures"])) for s in body["segments"]),
    )
