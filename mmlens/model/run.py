"""One run of the model: which sites are visited, what happens there, and the trace that carries it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import nnsight
import torch
from torch import Tensor

from mmlens.errors import HookNotReachedError, HookValueError
from mmlens.model.access import Access
from mmlens.model.requests import LayerAsk, Request
from mmlens.model.select import Cut, Selection, blank_padding, cut_of
from mmlens.model.sites import Site


@dataclass(frozen=True)
class HookPointInfo:
    """What a hook function learns of the place it runs at.

    Attributes
    ----------
    name
        Full hook name.
    """

    name: str
    _layer: int | None = field(default=None, repr=False)

    def layer(self) -> int | None:
        """The block's number, or None outside blocks."""
        return self._layer


HookFn = Callable[..., Tensor | None]
Sink = Callable[[Site, Tensor], None]
RawSink = Callable[[Site, Tensor, Cut], None]


@dataclass(frozen=True)
class Hook:
    """A user's function at one site."""

    site: Site
    fn: HookFn
    selection: Selection


@dataclass(frozen=True)
class Capture:
    """A copy of one site's value, handed to `sink`; `raw_sink` gets the module's own tensor, to keep gradients on."""

    site: Site
    sink: Sink
    selection: Selection
    raw_sink: RawSink | None = None


Action = Hook | Capture


def request_of(actions: Sequence[Action], *, through: bool = False) -> Request:
    """What the attention functions must do for these actions of one caller; `through`: see Request."""
    points: dict = {}
    for action in actions:
        if action.site.address is not None:
            points.setdefault(action.site.address, set()).add(action.site.point)
    selection = actions[0].selection if actions else Selection()
    frozen = {address: frozenset(names) for address, names in points.items()}
    return Request(frozen, selection.rows, selection.heads, through=through)


class Visitor:
    """Visits sites in order of execution; runs inside the trace."""

    def __init__(self, actions: Sequence[Action], ask: Callable[[Site], LayerAsk | None], real: Tensor | None) -> None:
        by_site: dict[str, list[Action]] = {}
        for action in actions:
            by_site.setdefault(action.site.name, []).append(action)
        self._plan = sorted(by_site.values(), key=lambda acts: acts[0].site.order)
        self._ask, self._real = ask, real
        self.failure: BaseException | None = None
        self.waiting_at: str | None = None

    @property
    def runs_again(self) -> bool:
        """Whether later generation steps have a site to visit; a loop over steps that waits for none never ends."""
        return any(not actions[0].site.picture_only for actions in self._plan)

    def visit(self, step: int = 0) -> None:
        """Every site once; from the second generation step on, only what runs again then."""
        for actions in self._plan:
            site = actions[0].site
            if step > 0 and site.picture_only:
                continue
            self.waiting_at = site.name
            value = site.read()
            try:
                self._act(site, value, actions, decoding=step > 0)
            except BaseException as error:
                # The engine rewrites tracebacks; the user's own error is raised again outside the trace.
                self.failure = error
                raise
        self.waiting_at = None

    def _act(self, site: Site, value: Tensor, actions: Sequence[Action], *, decoding: bool) -> None:
        ask = self._ask(site)
        for action in actions:
            cut = cut_of(site, action.selection, ask, decoding=decoding, device=value.device)
            part = cut.take(blank_padding(site, value, None if decoding else self._real))
            if isinstance(action, Capture):
                action.sink(site, part)
                if action.raw_sink is not None:
                    action.raw_sink(site, site.access.raw(), cut)
                continue
            version = part._version
            given = action.fn(part, hook=HookPointInfo(site.name, site.layer))
            if given is None and part._version == version:
                continue
            new = part if given is None else _checked(site, part, given)
            site.write(cut.put(value, new.to(value.dtype)))
            value = site.read()


def _checked(site: Site, part: Tensor, given: Any) -> Tensor:
    if not isinstance(given, Tensor) or given.shape != part.shape:
        got = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise HookValueError(
            f"the hook function at {site.name!r} returned {got}",
            expected=f"None, or a tensor of shape {tuple(part.shape)} ({', '.join(site.axes)})",
            fix="edit the tensor in place and return nothing, or return one of the same shape",
        )
    return given.to(part.device)


@dataclass
class Stop:
    """Where a run ends early: the value of `access`, read after everything else, is its result."""

    access: Access
    value: Tensor | None = None


def trace(
    root: Any,
    visitor: Visitor,
    call: Callable[..., Any],
    inputs: Mapping[str, Any],
    *,
    steps: bool,
    stop: Stop | None = None,
) -> None:
    """Run `call(**inputs)` with the visitor inside it; `steps` for a call that runs the model many times."""
    try:
        if stop is not None:
            _trace_until(root, visitor, call, inputs, stop)
        elif steps:
            with warnings.catch_warnings():
                # An open loop over generation steps ends by outrunning the model; the engine warns each time.
                warnings.filterwarnings("ignore", message=".*was never reached.*")
                _trace_steps(root, visitor, call, inputs)
        else:
            _trace_once(root, visitor, call, inputs)
    except nnsight.intervention.interleaver.OutOfOrderError:
        raise HookNotReachedError(
            f"{visitor.waiting_at!r} never ran",
            expected="a hook that this input reaches",
            fix="leave it out of names_filter, or use a glob, which skips what cannot be reached",
        ) from None
    except BaseException as error:
        if visitor.failure is None:
            raise
        raise visitor.failure from (None if visitor.failure is error else visitor.failure.__cause__)


def _trace_once(root: Any, visitor: Visitor, call: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
    with root.trace(fn=call, **inputs):
        visitor.visit()


def _trace_until(root: Any, visitor: Visitor, call: Callable[..., Any], inputs: Mapping[str, Any], stop: Stop) -> None:
    with root.trace(fn=call, **inputs) as tracer:
        visitor.visit()
        stop.value = stop.access.read().clone()
        tracer.stop()


def _trace_steps(root: Any, visitor: Visitor, call: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
    with root.trace(fn=call, **inputs) as tracer:
        for step in tracer.iter[:]:
            visitor.visit(step)
            if not visitor.runs_again:
                break


def plain_call(
    function: Callable[..., Any], holder: dict[str, Any], *, grad: bool = False, **options: Any
) -> Callable[..., Any]:
    """The traced call: a forward or a generation, without a graph unless asked, its result kept in `holder`."""

    def call(**inputs: Any) -> Any:
        with torch.set_grad_enabled(grad):
            holder["result"] = function(**inputs, **options)
        return holder["result"]

    return call
