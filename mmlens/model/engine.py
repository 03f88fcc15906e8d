"""Engine: every run of a model goes through here; HookedVLM is its public face."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Integral
from typing import Any, Union

import torch
from torch import Tensor, nn

from mmlens.errors import ClosedError, HeadError, NoPictureError, OptionError, PromptError, closest
from mmlens.families import find_family
from mmlens.model.encode import to_device
from mmlens.model.guard import check_inputs, check_processor
from mmlens.model.prompt import Prompt, require_prompt_group
from mmlens.model.requests import Requests
from mmlens.model.run import Action, Capture, Hook, HookFn, Sink, Visitor, no_grad_call, request_of, trace
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

    def __init__(self, model: Any, processor: Any) -> None:
        self.family = find_family(model)
        if processor is not None:
            check_processor(self.family, model.config, processor)
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
        """Device of the first parameter."""
        return next(self.hf.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first parameter."""
        return next(self.hf.parameters()).dtype

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
            self.requests.columns = ids == self.config.image_token_id

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
            check_inputs(self.family, self.config, prompt.inputs)
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

    def captures(self, prompt: Prompt, names: NamesFilter, selection: Selection, sink: Sink) -> list[Action]:
        """Captures of everything that a filter names and this prompt reaches."""
        sites, exact = self.sites.choose(names)
        return [Capture(site, sink, selection) for site in self._reachable(sites, exact, prompt)]

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

    def forward(self, prompt: Prompt, actions: list[Action], **options: Any) -> Tensor:
        """Logits of one forward."""
        result = self.run(prompt, actions, call=lambda holder: no_grad_call(self.hf, holder, **options), steps=False)
        return result.logits

    def run(
        self,
        prompt: Prompt,
        actions: list[Action],
        *,
        call: Callable[[dict[str, Any]], Callable[..., Any]],
        steps: bool,
    ) -> Any:
        """Every run of the model goes through here: hooks in force first, then the call's own actions."""
        wrapped = self.opened()
        callers: list[list[Action]] = []
        for fwd_hooks, rows, heads in self._hooks:
            callers.append(self.hook_actions(fwd_hooks, self.selection(prompt, rows, heads, None), prompt))
        callers.append(actions)
        everything = [a for caller in callers for a in caller]
        holder: dict[str, Any] = {}
        inputs = self.model_inputs(prompt)
        # Hooks tell edits from looks by version counters, which inference mode switches off.
        with self.requests.lock, torch.inference_mode(False), torch.no_grad():
            if not everything:
                call(holder)(**inputs)
                return holder["result"]
            real = prompt.real
            visitor = Visitor(
                everything,
                lambda site: None if site.address is None else self.requests.at(site.address),
                None if real is None else real.to(self.device),
            )
            with ExitStack() as asked:
                for caller in callers:
                    if caller:
                        asked.enter_context(self.requests.ask(request_of(caller)))
                wrapped.pack_tower(self.requests.tower_points)
                try:
                    trace(wrapped.root, visitor, call(holder), inputs, steps=steps)
                finally:
                    wrapped.pack_tower(False)
        return holder["result"]


def _is_index(value: Any, size: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < size
