"""What is asked of one model's attention: a stack of requests, merged per layer; nothing asked means plain SDPA."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Address = tuple[str, int]  # ("decoder" | "tower", layer)
Mode = Literal["output_zero", "visual_mask"]
Point = Literal["rot_q", "rot_k", "attn_scores", "pattern"]
PATTERN_LIMIT = 2 * 2**30
Rows = tuple[tuple[int, ...], ...]  # query columns, one tuple an example


@dataclass(frozen=True)
class HeadEdit:
    """A change of some query heads that the attention function makes itself."""

    heads: tuple[int, ...]
    mode: Mode


@dataclass(frozen=True)
class MassAsk:
    """Token groups whose attention mass is wanted for every head and row, and who takes it.

    `members` is (batch, key, group); `sink` gets the address and (batch, row, head, group) in the model's dtype.
    """

    members: Tensor
    sink: Callable[[Address, Tensor], None]


@dataclass(frozen=True)
class Request:
    """One caller's wishes. `rows` and `heads` narrow scores and patterns of the decoder; None means all.

    `through` lets the patterns that are built carry the run (and its gradients), `mass` asks every decoder layer.
    """

    points: Mapping[Address, frozenset[Point]] = field(default_factory=dict)
    rows: Rows | None = None
    heads: Mapping[int, tuple[int, ...]] | None = None
    edits: Mapping[Address, tuple[HeadEdit, ...]] = field(default_factory=dict)
    through: bool = False
    mass: MassAsk | None = None


@dataclass(frozen=True)
class LayerAsk:
    """Everything that is asked of one attention module in this run."""

    points: frozenset[Point]
    rows: Rows | None
    heads: tuple[int, ...] | None
    edits: tuple[HeadEdit, ...]
    through: bool = False
    mass: MassAsk | None = None

    @property
    def explicit(self) -> bool:
        """Whether scores or patterns must be built."""
        return bool(self.points & {"attn_scores", "pattern"})


class Requests:
    """The stack of one model, guarded by one lock.

    Attributes
    ----------
    columns
        The picture tokens of the run in progress, for edits that need to know them.
    pattern_limit
        Bytes of the largest scores or pattern that may be built.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.columns: Tensor | None = None
        self.pattern_limit = PATTERN_LIMIT
        self._stack: list[Request] = []
        self._live: dict[Address, set[Point]] = {}
        self._merged: dict[Address, LayerAsk | None] = {}

    @contextmanager
    def ask(self, request: Request) -> Iterator[None]:
        """Put a request on the stack for the time of the block."""
        with self.lock:
            self._stack.append(request)
            self._merged.clear()
        try:
            yield
        finally:
            with self.lock:
                # By identity: two equal requests may be on the stack, and blocks may end in any order.
                self._stack = [r for r in self._stack if r is not request]
                self._merged.clear()

    def ask_live(self, address: Address, point: Point) -> None:
        """Ask from inside a trace, where a value is wanted only once its read is met; ends with the trace."""
        self._live.setdefault(address, set()).add(point)
        self._merged.pop(address, None)

    def end_live(self) -> None:
        """Forget what a trace asked."""
        self._live.clear()
        self._merged.clear()

    @property
    def tower_points(self) -> bool:
        """Whether anything inside the tower's attention is asked."""
        return any(a[0] == "tower" for r in self._stack for a, points in r.points.items() if points) or any(
            a[0] == "tower" for a in self._live
        )

    def at(self, address: Address) -> LayerAsk | None:
        """What is asked of one attention module; None is the common case."""
        if address not in self._merged:
            self._merged[address] = self._merge(address)
        return self._merged[address]

    def _merge(self, address: Address) -> LayerAsk | None:
        live = frozenset(self._live.get(address, ()))
        asking = [r for r in self._stack if r.points.get(address)]
        points = live.union(*(r.points[address] for r in asking))
        edits = tuple(edit for r in self._stack for edit in r.edits.get(address, ()))
        mass = next((r.mass for r in self._stack if r.mass is not None), None) if address[0] == "decoder" else None
        if not points and not edits and mass is None:
            return None
        viewers = [r for r in asking if r.points[address] & {"attn_scores", "pattern"}]
        whole = bool(live & {"attn_scores", "pattern"}) or address[0] == "tower"
        rows = None if whole else _merge_rows([r.rows for r in viewers])
        heads = (
            None if whole else _merge_heads([None if r.heads is None else r.heads.get(address[1], ()) for r in viewers])
        )
        return LayerAsk(points, rows, heads, edits, any(r.through for r in asking), mass)


def _merge_rows(asked: list[Rows | None]) -> Rows | None:
    named = [rows for rows in asked if rows is not None]
    if not asked or len(named) < len(asked):
        return None
    return tuple(tuple(sorted({c for columns in example for c in columns})) for example in zip(*named))


def _merge_heads(asked: list[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    named = [heads for heads in asked if heads is not None]
    if not asked or len(named) < len(asked):
        return None
    return tuple(sorted({h for heads in named for h in heads}))


def pad_rows(rows: Rows, device: torch.device | str = "cpu") -> Tensor:
    """Ragged rows as a (batch, n) tensor, -1 where padded."""
    width = max(map(len, rows), default=0)
    return torch.tensor([[*r, *[-1] * (width - len(r))] for r in rows], dtype=torch.long, device=device).view(
        len(rows), width
    )
