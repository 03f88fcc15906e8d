"""Wrapping a Hugging Face model, and giving it back exactly as it was."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from mmlens.errors import AlreadyWrappedError, AttentionChangedError
from mmlens.families.base import Family
from mmlens.model.attention import NAME, PACKED_NAME, Link, attach, detach
from mmlens.model.requests import Requests

_MARK = "_mmlens_wrapped"
_ENGINE_STATE = "__nnsight__"  # where the engine keeps its state on a module it has wrapped


class Wrapped:
    """What was changed on a model, and how to undo it.

    While open, every module of the model reads its settings from private copies of the config objects (transformers
    switches attention through them, and two models may share one config object).
    """

    def __init__(self, model: Any, family: Family, requests: Requests, owner: object) -> None:
        from nnsight import NNsight

        _refuse_second(model)
        self.model, self.family = model, family
        self._forwards = {m: m.__dict__.get("forward") for m in model.modules()}
        self._engine = {m for m in model.modules() if _ENGINE_STATE in m.__dict__}
        self._configs: list[tuple[nn.Module, str, Any]] = []
        self._copy_configs()
        self.attentions = {
            (kind, layer): block.get_submodule(stack.attn)
            for kind, stack in (("decoder", family.decoder), ("tower", family.tower))
            for layer, block in enumerate(model.get_submodule(stack.blocks))
        }
        for address, module in self.attentions.items():
            attach(module, Link(requests, address))
        model.config._attn_implementation = NAME
        self.root = NNsight(model)
        model.__dict__[_MARK] = (weakref.ref(owner), self)

    def _copy_configs(self) -> None:
        memo: dict[int, Any] = {}
        for module in self.model.modules():
            for name, value in list(module.__dict__.items()):
                if isinstance(value, PreTrainedConfig):
                    self._configs.append((module, name, value))
                    module.__dict__[name] = copy.deepcopy(value, memo)

    @contextmanager
    def stock(self) -> Iterator[None]:
        """The model's own SDPA for a moment: what idle runs are compared with."""
        config = self.model.config
        try:
            config._attn_implementation = "sdpa"
            yield
        finally:
            config._attn_implementation = NAME

    def check_attention(self) -> None:
        """Raise if somebody switched the model's attention away from the registered function."""
        for kind in ("decoder", "tower"):
            now = self.attentions[kind, 0].config._attn_implementation
            if now not in (NAME, PACKED_NAME):
                raise AttentionChangedError(
                    f"the {kind}'s attention implementation is {now!r}, changed after the model was wrapped",
                    expected=f"{NAME!r}, which mmlens set; with another one no pattern could be read or edited",
                    fix="close() first, then set_attn_implementation(...), then wrap again (mmlens always runs SDPA)",
                )

    def pack_tower(self, packed: bool) -> None:
        """One attention call for all pictures (to see inside the tower) or one a picture (stock's own operations)."""
        if self.family.tower.packed:
            self.model.config.vision_config._attn_implementation = PACKED_NAME if packed else NAME

    def undo(self) -> None:
        """Put back forwards, configs and module trees."""
        for module in self.attentions.values():
            detach(module)
        for module, name, value in self._configs:
            module.__dict__[name] = value
        for module, forward in self._forwards.items():
            if module in self._engine:
                continue
            module.__dict__.pop(_ENGINE_STATE, None)
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward
        self.model.__dict__.pop(_MARK, None)


def _refuse_second(model: nn.Module) -> None:
    """One open wrapper a model; one that was dropped without close() is undone first."""
    mark = model.__dict__.get(_MARK)
    if mark is None:
        return
    owner, wrapped = mark
    if owner() is None:
        wrapped.undo()
        return
    raise AlreadyWrappedError(
        f"this {type(model).__name__} already has a HookedVLM",
        expected="one open HookedVLM for each model",
        fix="use that one, or call its close() first",
    )
