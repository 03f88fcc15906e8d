"""Engine: every run of a model goes through here; HookedVLM is its public face."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Integral
from typing import Any, Union

import torch
from torch import Tensor, nn

from mmlens.errors import (
    ClosedError,
    HeadError,
    HookNotReachedError,
    NoPictureError,
    OptionError,
    PromptError,
    closest,
)
from mmlens.families import find_family
from mmlens.families.base import Family
from mmlens.model.access import Access
from mmlens.model.encode import to_device
from mmlens.model.guard import check_inputs, check_model, check_processor, placeholder_ids
from mmlens.model.loading import fingerprint
from mmlens.model.prompt import Prompt, require_prompt_group
from mmlens.model.requests import MassAsk, Request, Requests
from mmlens.model.run import Action, Capture, Hook, HookFn, RawSink, Sink, Stop, Visitor, plain_call, request_of, trace
from mmlens.model.select import Selection
from mmlens.model.sites import NamesFilter, Site, build_sites
from mmlens.model.wrap import Wrapped
from mmlens.tokens import Group

PromptLike = Union[Prompt, Mapping[str, Any]]
# ints (every layer), {layer: ints}, (layer, head) pairs, or anything with .by_layer() (a HeadSet)
HeadsLike = Any
_INPUTS = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw", "mm_token_type_ids")


class Engine:
    """A wrapped model: its sites, its request stack, and the one way to run it."""

    def __init__(
        self, model: Any, processor: Any, family: Family | None = None, *, name: str, revision: str | None
    ) -> None:
        self.name, self.revision = name, revision
        adapted = getattr(model, "get_base_model", None)
        model = adapted() if callable(adapted) else model  # PEFT's own wrapper; its adapters sit inside the model
        self.family = find_family(model, family)
        if processor is not None:
            check_processor(self.family, model.config, processor)
        check_model(model, self.family, self.family.decoder_shape(model.config), self.family.tower_shape(model.config))
        self.hf, self.processor = model, processor
        self.requests = Requests()
        self._wrapped: Wrapped | None = Wrapped(model, self.family, self.requests, self)
        self.config = model.config
        self.decoder = self.family.decoder_shape(self.config)
        self.tower = self.family.tower_shape(self.config)
        self.sites = build_sites(self.family, self.config, self._wrapped.root)
        self._hooks: list[tuple[list[tuple[Any, HookFn]], Any, Any]] = []

    def close(self) -> None:
        """Give the Hugging Face model back exactly as it was. A second call does nothing."""
        if self._wrapped is not None:
            self._wrapped.undo()
            self._wrapped = None

    no_cut = Selection()

    @property
    def pattern_limit(self) -> int:
        """Bytes of the largest scores or pattern that one layer may build; larger asks are refused."""
        return self.requests.pattern_limit

    @pattern_limit.setter
    def pattern_limit(self, size: int) -> None:
        self.requests.pattern_limit = int(size)

    @property
    def hooked(self) -> bool:
        """Whether hook functions are in force."""
        return bool(self._hooks)

    def identity(self) -> dict[str, Any]:
        """What tells this model from others in a result's provenance; the fingerprint samples every weight tensor."""
        return {
            "name": self.name,
            "revision": self.revision,
            "family": self.family.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "fingerprint": fingerprint(self.hf),
        }

    @property
    def is_open(self) -> bool:
        """Whether `close()` has not been called."""
        return self._wrapped is not None

    def opened(self) -> Wrapped:
        """The wrapped model; raises ClosedError after `close()`."""
        if self._wrapped is None:
            raise ClosedError(
                "this HookedVLM is closed",
                expected="an open one",
                fix="wrap the model again: HookedVLM.from_model(model, processor)",
            )
        return self._wrapped

    @property
    def n_layers(self) -> int:
        """Decoder blocks."""
        return self.decoder.n_layers

    @property
    def n_heads(self) -> int:
        """Query heads of a decoder block."""
        return self.decoder.n_heads

    @property
    def n_key_value_heads(self) -> int:
        """Key/value heads of a decoder block."""
        return self.decoder.n_key_value_heads

    @property
    def d_model(self) -> int:
        """Width of the decoder's stream."""
        return self.decoder.d_model

    @property
    def d_head(self) -> int:
        """Width of a decoder head."""
        return self.decoder.d_head

    @property
    def device(self) -> torch.device:
        """Device of the first parameter that is loaded; inputs go there."""
        return next((p.device for p in self.hf.parameters() if not p.is_meta), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the model computes in."""
        return self.hf.dtype

    def reduce(
        self,
        prompt: PromptLike,
        sinks: Mapping[str, Sink],
        *,
        rows: Group | None = None,
        heads: HeadsLike | None = None,
        positions: Group | None = None,
    ) -> None:
        """Run once and hand each asked value to a function as it appears; nothing is kept.

        What scans stand on: memory holds one value at a time.

        Parameters
        ----------
        sinks
            {name, short name or glob: fn(site, value)}; `site.layer` says which layer.
        rows, heads, positions
            As in `run_with_cache`.
        """
        prompt = self.as_prompt(prompt)
        selection = self.selection(prompt, rows, heads, positions)
        actions = [a for names, sink in sinks.items() for a in self.captures(prompt, names, selection, sink)]
        self.forward(prompt, actions, logits_to_keep=1)

    @contextmanager
    def picture_columns(self) -> Iterator[None]:
        """While open, every forward notes which keys are picture tokens, for edits that need to know."""

        def note(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            ids = kwargs.get("input_ids", args[0] if args else None)
            cache = kwargs.get("cache", kwargs.get("past_key_values"))
            if cache is not None and cache.get_seq_length() > 0:
                return  # decoding: the prompt's columns stand, and new tokens are text
            if ids is None:
                raise PromptError(
                    "a forward with inputs_embeds under an intervention that must know the picture tokens",
                    expected="input_ids",
                    fix="pass input_ids, or use mode='output_zero'",
                )
            self.requests.columns = torch.isin(ids, placeholder_ids(self.family, self.config, ids))

        handle = self.hf.register_forward_pre_hook(note, with_kwargs=True)
        before = self.requests.columns
        try:
            yield
        finally:
            handle.remove()
            self.requests.columns = before

    # ------------------------------------------------------------------ what a call asks for
    def as_prompt(self, prompt: PromptLike) -> Prompt:
        """A checked Prompt, from one or from a processor's output."""
        if isinstance(prompt, Prompt):
            check_inputs(self.family, self.config, prompt.inputs, self.processor)
            return prompt
        known = inspect.signature(type(self.hf).forward).parameters
        unknown = [k for k in prompt if k not in known] if isinstance(prompt, Mapping) else []
        if unknown:
            raise PromptError(
                f"inputs with {unknown}, which {type(self.hf).__name__} does not take",
                expected=f"names such as {', '.join(k for k in known if k in _INPUTS)}",
                fix=f"closest: {closest(str(unknown[0]), known)}; a misspelt name would be swallowed without a sign",
            )
        if not isinstance(prompt, Mapping):
            raise PromptError(
                f"a prompt given as {type(prompt).__name__}",
                expected="a Prompt, or a processor's output",
                fix="vlm.prompt('What color is the star?', images=[picture])",
            )
        return Prompt.from_inputs(prompt, self.family, self.config, self.processor)

    def head_table(self, heads: HeadsLike) -> dict[int, tuple[int, ...]]:
        """Heads in any accepted form as {layer: sorted heads}; raises HeadError for heads that are not there."""
        by_layer = getattr(heads, "by_layer", None)
        if callable(by_layer):
            if tuple(heads.shape) != (self.n_layers, self.n_heads):
                raise HeadError(
                    f"a head set of a model with {heads.shape[0]} layers of {heads.shape[1]} heads",
                    expected=f"a set of this model: {self.n_layers} layers of {self.n_heads} query heads",
                    fix="rank this model's heads, or load the other model",
                )
            table = by_layer()
        elif isinstance(heads, Mapping):
            table = heads
        else:
            listed = list(heads) if isinstance(heads, Iterable) and not isinstance(heads, str) else [heads]
            if all(isinstance(h, tuple) and len(h) == 2 for h in listed):
                table = {layer: [h for at, h in listed if at == layer] for layer, _ in listed}
            else:
                table = dict.fromkeys(range(self.n_layers), listed)
        found = {}
        for layer, chosen in table.items():
            chosen = list(chosen) if isinstance(chosen, Iterable) and not isinstance(chosen, str) else [chosen]
            wrong = [h for h in chosen if not _is_index(h, self.n_heads)]
            if wrong or not _is_index(layer, self.n_layers):
                raise HeadError(
                    f"heads {wrong or chosen} of layer {layer}",
                    expected=f"layers 0 to {self.n_layers - 1}, query heads 0 to {self.n_heads - 1}",
                    fix="heads are ints, {layer: ints}, (layer, head) pairs or a HeadSet of this model",
                )
            found[int(layer)] = tuple(sorted({int(h) for h in chosen}))
        return found

    def selection(self, prompt: Prompt, rows: Any, heads: Any, positions: Any) -> Selection:
        """The cut that a caller asks for."""
        return Selection(
            None if rows is None else require_prompt_group(prompt, rows, "rows"),
            None if positions is None else require_prompt_group(prompt, positions, "positions"),
            None if heads is None else self.head_table(heads),
        )

    def captures(
        self,
        prompt: Prompt,
        names: NamesFilter,
        selection: Selection,
        sink: Sink,
        *,
        raw_sink: RawSink | None = None,
        stop: int | None = None,
    ) -> list[Action]:
        """Captures of everything that a filter names and this prompt reaches, in front of decoder block `stop`."""
        sites, exact = self.sites.choose(names)
        reached = self._reachable(sites, exact, prompt)
        if stop is not None:
            literal = {names} if isinstance(names, str) else set(names) if isinstance(names, Iterable) else set()
            past = {s.name for s in reached if s.order >= (2, stop) and s.name != "hook_embed"}
            beyond = next((s for s in reached if s.name in past & literal), None)
            if beyond is not None:
                raise HookNotReachedError(
                    f"{beyond.name!r} of a run that stops in front of block {stop}",
                    expected="hooks that the run still reaches",
                    fix="raise stop_at_layer, or use a short name or a glob, which skip what cannot be reached",
                )
            reached = [s for s in reached if s.name not in past]
        return [Capture(site, sink, selection, raw_sink) for site in reached]

    def _reachable(self, sites: list[Site], exact: set[str], prompt: Prompt) -> list[Site]:
        if prompt.has_picture:
            return sites
        for site in sites:
            if site.picture_only and site.name in exact:
                raise NoPictureError(
                    f"{site.name!r} asked of a prompt without a picture",
                    expected="a prompt with a picture, for every hook of the tower and the projector",
                    fix="vlm.prompt(question, images=[...]), or use a glob, which skips what cannot be reached",
                )
        return [s for s in sites if not s.picture_only]

    def hook_actions(
        self, fwd_hooks: Sequence[tuple[Any, HookFn]], selection: Selection, prompt: Prompt | None
    ) -> list[Action]:
        """Hooks at everything that each entry names."""
        actions: list[Action] = []
        for entry in fwd_hooks if isinstance(fwd_hooks, Iterable) else [fwd_hooks]:
            if not isinstance(entry, tuple) or len(entry) != 2 or not callable(entry[1]):
                raise OptionError(
                    f"fwd_hooks entry {entry!r}",
                    expected="a pair (name, glob or callable, function)",
                    fix="fwd_hooks=[('blocks.3.attn.hook_z', fn)]",
                )
            names, fn = entry
            sites, exact = self.sites.choose(names)
            if prompt is not None:
                sites = self._reachable(sites, exact, prompt)
            actions += [Hook(site, fn, selection) for site in sites]
        return actions

    def model_inputs(self, prompt: Prompt) -> dict[str, Any]:
        """A prompt's inputs on the model's device, pictures in its dtype."""
        return to_device(prompt.inputs, self.device, self.dtype)

    def forward(
        self, prompt: Prompt, actions: list[Action], *, leaves: dict[str, Tensor] | None = None, **options: Any
    ) -> Tensor:
        """Logits of one forward; with a graph if `leaves` is given, which then gets the pictures it starts from."""
        grad = leaves is not None
        result = self.run(
            prompt,
            actions,
            call=lambda holder: plain_call(self.hf, holder, grad=grad, **options),
            steps=False,
            leaves=leaves,
        )
        return result.logits

    def forward_until(
        self, prompt: Prompt, actions: list[Action], layer: int, *, leaves: dict[str, Tensor] | None = None
    ) -> Tensor:
        """The stream in front of decoder block `layer` (behind the last one, for the number of layers)."""
        grad = leaves is not None
        blocks = self.opened().root.get(self.family.decoder.blocks)
        stop = Stop(Access(blocks[layer], "input") if layer < self.n_layers else Access(blocks[layer - 1], "output"))
        self.run(
            prompt,
            actions,
            call=lambda holder: plain_call(self.hf, holder, grad=grad, logits_to_keep=1),
            steps=False,
            leaves=leaves,
            stop=stop,
        )
        assert stop.value is not None
        return stop.value

    def run(
        self,
        prompt: Prompt,
        actions: list[Action],
        *,
        call: Callable[[dict[str, Any]], Callable[..., Any]],
        steps: bool,
        leaves: dict[str, Tensor] | None = None,
        stop: Stop | None = None,
        mass: MassAsk | None = None,
    ) -> Any:
        """Every run of the model goes through here: hooks in force first, then the call's own actions."""
        wrapped = self.opened()
        wrapped.check_attention()
        callers: list[list[Action]] = []
        for fwd_hooks, rows, heads in self._hooks:
            callers.append(self.hook_actions(fwd_hooks, self.selection(prompt, rows, heads, None), prompt))
        callers.append(actions)
        everything = [a for caller in callers for a in caller]
        holder: dict[str, Any] = {}
        inputs = self.model_inputs(prompt)
        if prompt.kinds == {"image", "video"} and any(a.site.picture_only for a in everything):
            raise HookNotReachedError(
                "hooks of the tower in a prompt with both pictures and videos, for each of which the tower runs",
                expected="pictures, or videos",
                fix="ask for decoder hooks only, or put the pictures and the video into two prompts",
            )
        # Hooks tell edits from looks by version counters, which inference mode switches off.
        with self.requests.lock, torch.inference_mode(False), torch.no_grad(), ExitStack() as asked:
            if leaves is not None:
                asked.enter_context(self._differentiable(inputs, leaves))
            if mass is not None:
                asked.enter_context(self.requests.ask(Request(mass=mass)))
            if not everything and stop is None:
                call(holder)(**inputs)
                return holder["result"]
            for action in everything:
                if action.site.access.prepare is not None:
                    action.site.access.prepare()
            real = prompt.real
            visitor = Visitor(
                everything,
                lambda site: None if site.address is None else self.requests.at(site.address),
                None if real is None else real.to(self.device),
            )
            for caller in callers:
                if caller:
                    asked.enter_context(self.requests.ask(request_of(caller, through=leaves is not None)))
            wrapped.pack_tower(self.requests.tower_points)
            try:
                trace(wrapped.root, visitor, call(holder), inputs, steps=steps, stop=stop)
            finally:
                wrapped.pack_tower(False)
        return holder.get("result")

    @contextmanager
    def _differentiable(self, inputs: dict[str, Any], leaves: dict[str, Tensor]) -> Iterator[None]:
        """A graph from pixels and token embeddings on. Weights stay out of it: their `.grad` is never touched."""

        def lead(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            return output if output.requires_grad else output.requires_grad_()

        for key in self.family.pixels.values():
            if inputs.get(key) is not None:
                inputs[key] = leaves[key] = inputs[key].detach().clone().requires_grad_()
        handle = self.hf.get_submodule(self.family.embed).register_forward_hook(lead)
        learning = [p for p in self.hf.parameters() if p.requires_grad]
        try:
            for p in learning:
                p.requires_grad_(False)
            yield
        finally:
            handle.remove()
            for p in learning:
                p.requires_grad_(True)


def _is_index(value: Any, size: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < size
