"""Cutting values to the rows, heads and positions that a caller asked for, and putting edited cuts back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from mmlens.model.requests import LayerAsk, Rows, pad_rows
from mmlens.model.sites import Site

Heads = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Selection:
    """What one caller wants of every value; None means all of it.

    `rows` cuts the query axis of scores and patterns, `positions` the position axis of everything else but rot_k,
    `heads` the (query) head axis, layer by layer. Only the decoder is cut.
    """

    rows: Rows | None = None
    positions: Rows | None = None
    heads: Heads | None = None

    def heads_of(self, site: Site) -> tuple[int, ...] | None:
        """The heads wanted of a site, or None where it has no head axis or all are wanted."""
        if self.heads is None or site.tower or "head" not in site.axes:
            return None
        return () if site.layer is None else self.heads.get(site.layer, ())

    def columns_of(self, site: Site, *, decoding: bool) -> Rows | None:
        """The rows or positions wanted of a site. A decoding step holds one new position, which is always kept."""
        if site.tower or decoding:
            return None
        if "query_pos" in site.axes:
            return self.rows
        return self.positions if "pos" in site.axes else None


@dataclass(frozen=True)
class Cut:
    """A selection worked out for one value: an index for the head axis and a padded index for the position axis."""

    site: Site
    heads: Tensor | None
    columns: Tensor | None  # (batch, n), -1 where padded

    def take(self, value: Tensor) -> Tensor:
        """A copy of the chosen part, NaN where ragged examples are padded."""
        if self.heads is not None:
            value = value.index_select(self.site.axes.index("head"), self.heads)
        if self.columns is None:
            return value.clone() if self.heads is None else value
        axis = self._column_axis
        shape = [len(self.columns) if i == 0 else -1 if i == axis else 1 for i in range(value.ndim)]
        index = self.columns.clamp(min=0).view(shape)
        value = torch.take_along_dim(value, index, axis)
        return value.masked_fill((self.columns < 0).view(shape), float("nan"))

    def put(self, value: Tensor, part: Tensor) -> Tensor:
        """`value` with the chosen part replaced; padding is left out."""
        if self.heads is None and self.columns is None:
            return part
        value = value.clone()
        batch = torch.arange(value.shape[0], device=value.device)
        for example in batch.tolist():
            target, source = value[example], part[example]
            if self.columns is not None:
                axis = self._column_axis - 1
                kept = self.columns[example] >= 0
                source = source.index_select(axis, kept.nonzero()[:, 0])
                if self.heads is None:
                    target.index_copy_(axis, self.columns[example][kept], source)
                else:
                    inner = target.index_select(self._head_axis - 1, self.heads)
                    inner.index_copy_(axis, self.columns[example][kept], source)
                    target.index_copy_(self._head_axis - 1, self.heads, inner)
            elif self.heads is not None:
                target.index_copy_(self._head_axis - 1, self.heads, source)
        return value

    @property
    def _column_axis(self) -> int:
        return self.site.axes.index("query_pos" if "query_pos" in self.site.axes else "pos")

    @property
    def _head_axis(self) -> int:
        return self.site.axes.index("head")


def cut_of(site: Site, selection: Selection, ask: LayerAsk | None, *, decoding: bool, device: torch.device) -> Cut:
    """How to cut a site's value, given what the attention function was asked to build of it."""
    heads, columns = selection.heads_of(site), selection.columns_of(site, decoding=decoding)
    built = ask if "query_pos" in site.axes else None
    if built is not None and built.heads is not None:
        heads = built.heads if heads is None else heads
        heads = None if heads == built.heads else tuple(built.heads.index(h) for h in heads)
    padded = None if columns is None else pad_rows(columns, device)
    if built is not None and built.rows is not None and columns is not None:
        places = tuple(tuple(have.index(c) for c in want) for want, have in zip(columns, built.rows))
        padded = pad_rows(places, device)
    index = None if heads is None else torch.tensor(heads, dtype=torch.long, device=device)
    return Cut(site, index, padded)


def blank_padding(site: Site, value: Tensor, real: Bool[Tensor, "batch pos"] | None) -> Tensor:
    """Head outputs of padding rows as 0: what they hold is an accident of the attention kernel."""
    if real is None or site.tower or not site.name.endswith(("hook_z", "hook_result")):
        return value
    if value.shape[1] != real.shape[1]:
        return value
    return value.masked_fill(~real.view(*real.shape, *[1] * (value.ndim - 2)), 0)
