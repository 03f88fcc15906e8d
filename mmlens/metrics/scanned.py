"""Which metrics a scan can compute from the query's rows of each pattern, all in one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmlens.metrics.attention import attention_sum, concentration, contrast, density_lift, pointing, visual_share
from mmlens.metrics.ram import lift, ram

Needs = Literal["evidence", "visual", "distractor"]


@dataclass(frozen=True)
class Asked:
    """What the rows and keys of a batch of patterns are.

    Attributes
    ----------
    query
        Which rows are the query's, and not padding.
    evidence, visual, distractor
        Which keys show the evidence, the picture (without newline tokens), other things than the asked one.
    visible
        Keys that each row may look at.
    """

    query: Bool[Tensor, "batch row"]
    evidence: Bool[Tensor, "batch key"]
    visual: Bool[Tensor, "batch key"]
    distractor: Bool[Tensor, "batch key"]
    visible: Int[Tensor, "batch row"]

    def to(self, device: torch.device) -> Asked:
        """On another device."""
        return Asked(*(t.to(device) for t in (self.query, self.evidence, self.visual, self.distractor, self.visible)))


Pattern = Float[Tensor, "batch head row key"]
PerHead = Float[Tensor, "batch head"]


def _map(pattern: Tensor, asked: Asked) -> Tensor:
    """The query's mean attention to each key of the picture; other keys 0."""
    rows = asked.query[:, None, :, None]
    mean = torch.where(rows, pattern, 0.0).sum(-2) / asked.query.sum(-1)[:, None, None]
    return mean * asked.visual[:, None, :]


def _concentration(pattern: Pattern, asked: Asked) -> PerHead:
    found = torch.full(pattern.shape[:2], torch.nan, dtype=torch.float64, device=pattern.device)
    maps = _map(pattern, asked)
    for i, keys in enumerate(asked.visual):
        found[i] = concentration(maps[i][:, keys])
    return found


def _pointing(pattern: Pattern, asked: Asked) -> PerHead:
    return pointing(_map(pattern, asked), asked.evidence[:, None, :].expand(*pattern.shape[:2], -1))


def _contrast(pattern: Pattern, asked: Asked) -> PerHead:
    """The evidence's attention for each of its tokens against the other things' for each of theirs."""
    masses = [ram(pattern, asked.query, keys) / keys.sum(-1)[:, None] for keys in (asked.evidence, asked.distractor)]
    return contrast(torch.stack(masses, -1))


@dataclass(frozen=True)
class Scanned:
    """A metric of a scan: what it computes, what an example must have for it, and what chance is."""

    compute: Callable[[Tensor, Asked], Tensor]
    needs: frozenset[Needs]
    chance: float = float("nan")


def _needs(*names: Needs) -> frozenset[Needs]:
    return frozenset(names)


SCANNED: dict[str, Scanned] = {
    "ram": Scanned(lambda p, a: ram(p, a.query, a.evidence), _needs("evidence")),
    "lift": Scanned(lambda p, a: lift(p, a.query, a.evidence, visible=a.visible), _needs("evidence"), 1.0),
    "visual_share": Scanned(lambda p, a: visual_share(p, a.query, a.evidence, a.visual), _needs("evidence", "visual")),
    "density_lift": Scanned(
        lambda p, a: density_lift(p, a.query, a.evidence, a.visual), _needs("evidence", "visual"), 1.0
    ),
    "contrast": Scanned(_contrast, _needs("evidence", "distractor"), -0.6931471805599453),
    "pointing": Scanned(_pointing, _needs("evidence", "visual")),
    "attention_sum": Scanned(lambda p, a: attention_sum(p, a.query, a.visual), _needs("visual")),
    "concentration": Scanned(_concentration, _needs("visual"), 0.0),
}
