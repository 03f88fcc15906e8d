"""The raw trace block: sites inside it, and the model's lock around it."""

from __future__ import annotations

from typing import Any

import nnsight
from torch import Tensor

from mmlens.errors import HookNotReachedError, OptionError
from mmlens.model.engine import Engine
from mmlens.model.prompt import Prompt
from mmlens.model.run import plain_call
from mmlens.model.sites import Site


class TracedSite:
    """A site for use inside `vlm.trace(...)`: reading one of attention's insides makes that layer build it."""

    def __init__(self, site: Site, vlm: Engine) -> None:
        self._site, self._vlm = site, vlm
        self.name = site.name

    def _announce(self) -> None:
        if not self._vlm.opened().root.interleaver.interleaving:
            raise HookNotReachedError(
                f"{self.name!r} read outside a trace",
                expected="`with vlm.trace(prompt):` around it",
                fix="use run_with_cache(prompt, name) to read a value without a block",
            )
        if self._site.address is None or self._site.point is None:
            return
        self._vlm.requests.ask_live(self._site.address, self._site.point)
        if self._site.tower:
            self._vlm.opened().pack_tower(True)

    def read(self) -> Tensor:
        """The live value; nnsight's own reference, not a copy."""
        self._announce()
        return self._site.read()

    def write(self, value: Tensor) -> None:
        """Put a value in its place."""
        self._announce()
        self._site.write(value)


def tracer_class(vlm: Engine) -> type:
    """nnsight's tracer, holding the model's lock and forgetting what the block asked once it is over."""

    class Tracer(nnsight.intervention.tracer.InterleavingTracer):
        def execute(self, code: Any) -> None:
            with vlm.requests.lock:
                try:
                    super().execute(code)
                except nnsight.intervention.interleaver.OutOfOrderError as error:
                    raise HookNotReachedError(
                        f"inside trace: {error}",
                        expected="sites read in order of execution, and only those that this input reaches",
                        fix="order the reads as vlm.hook_names() lists them; tower sites need a picture",
                    ) from None
                finally:
                    vlm.requests.end_live()
                    if vlm.is_open:
                        vlm.opened().pack_tower(False)

    return Tracer


def open_trace(vlm: Engine, prompt: Prompt, max_new_tokens: int | None) -> Any:
    """See `HookedVLM.trace`."""
    root = vlm.opened().root
    vlm.opened().check_attention()
    inputs = vlm.model_inputs(prompt)
    if max_new_tokens is None:
        return root.trace(fn=plain_call(vlm.hf, {}), tracer_cls=tracer_class(vlm), **inputs)
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise OptionError(
            f"max_new_tokens={max_new_tokens!r}", expected="an int, at least 1", fix="leave it out for one forward"
        )
    call = plain_call(vlm.hf.generate, {}, max_new_tokens=max_new_tokens, do_sample=False)
    return root.trace(fn=call, tracer_cls=tracer_class(vlm), **vlm.model_inputs(prompt.unforced()))
