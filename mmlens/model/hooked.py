"""HookedVLM: load, prompt, run_with_cache, run_with_hooks, generate, trace, close."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mmlens.errors import (
    ClosedError,
    HeadError,
    NoPictureError,
    NoProcessorError,
    OptionError,
    PromptError,
)
from mmlens.families import find_family
from mmlens.model.cache import ActivationCache
from mmlens.model.encode import append_tokens, encode, make_examples, to_device
from mmlens.model.guard import check_inputs, check_processor
from mmlens.model.loading import load
from mmlens.model.prompt import Prompt, require_prompt_group
from mmlens.model.requests import Request, Requests
from mmlens.model.run import Action, Capture, Hook, HookFn, Sink, Visitor, no_grad_call, request_of, trace
from mmlens.model.select import Selection
from mmlens.model.sites import NamesFilter, Site, build_sites
from mmlens.model.tracing import TracedSite, tracer_class
from mmlens.model.wrap import Wrapped
from mmlens.tokens import Group

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from mmlens.scores import HeadScores, HeadSet
    from mmlens.tasks.base import Task

PromptLike = Union[Prompt, Mapping[str, Any]]
HeadsLike = Union[Iterable[int], Mapping[int, Iterable[int]], "HeadSet"]


@dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    Attributes
    ----------
    tokens
        (batch, n_new) ids of the new tokens only.
    text
        The decoded new tokens of every example.
    steps
        One cache for each step (the first is the prompt's), empty if nothing was asked for.
    """

    tokens: Int[Tensor, "batch n_new"]
    text: list[str]
    steps: list[ActivationCache]


class HookedVLM:
    """A vision-language model whose insides have names.

    Made by `from_pretrained` or `from_model`. One open HookedVLM per Hugging Face model; `close()` (or leaving a
    `with` block) gives the model back as it was.

    Examples
    --------
    >>> from mmlens import HookedVLM
    >>> with HookedVLM.from_pretrained("toy-qwen3-vl") as vlm:
    ...     vlm.n_layers, vlm.n_heads
    (8, 12)
    """

    def __init__(self, model: nn.Module, processor: Any, *, name: str, revision: str | None) -> None:
        self.family = find_family(model)
        if processor is not None:
            check_processor(self.family, model.config, processor)
        self.hf, self.processor, self.name, self.revision = model, processor, name, revision
        self.requests = Requests()
        self._wrapped: Wrapped | None = Wrapped(model, self.family, self.requests, self)
        self.config = model.config
        self.decoder = self.family.decoder_shape(self.config)
        self.tower = self.family.tower_shape(self.config)
        self.sites = build_sites(self.family, self.config, self._wrapped.root)
        self._hooks: list[list[Action]] = []

    # ------------------------------------------------------------------ loading
    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        device_map: Any = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> HookedVLM:
        """Load a model by embedded name, local folder or hub id.

        Parameters
        ----------
        name
            "toy-qwen3-vl", a folder written by `save_pretrained`, or "owner/name" on the hub.
        device
            Where to put it; default the CPU. Not together with `device_map`.
        dtype
            "auto" (the checkpoint's own), or a torch dtype or its name.
        device_map
            Passed to transformers, to spread a large model.
        revision
            Of a hub id.
        trust_remote_code
            Run code from the hub; off unless you say so.

        Raises
        ------
        ModelNotFoundError, UnknownFamilyError
        """
        if device is not None and device_map is not None:
            raise OptionError(
                "device= and device_map= together", expected="one of them", fix="drop device= to spread the model"
            )
        model, processor = load(
            str(name), dtype=dtype, device_map=device_map, revision=revision, trust_remote_code=trust_remote_code
        )
        if device is not None:
            model = model.to(device)
        return cls(model, processor, name=str(name), revision=revision or getattr(model.config, "_commit_hash", None))

    @classmethod
    def from_model(cls, model: nn.Module, processor: Any = None) -> HookedVLM:
        """Wrap a loaded Hugging Face model; without a processor, calls take ready inputs only.

        Raises
        ------
        UnknownFamilyError, AlreadyWrappedError, PictureTokenError
        """
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        return cls(model, processor, name=name, revision=None)

    def close(self) -> None:
        """Give the Hugging Face model back exactly as it was. A second call does nothing."""
        if self._wrapped is not None:
            self._wrapped.undo()
            self._wrapped = None

    def __enter__(self) -> HookedVLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Wrapped:
        if self._wrapped is None:
            raise ClosedError(
                f"this HookedVLM of {self.name!r} is closed",
                expected="an open one",
                fix="wrap the model again: HookedVLM.from_model(model, processor)",
            )
        return self._wrapped

    # ------------------------------------------------------------------ facts
    def __repr__(self) -> str:
        state = "" if self._wrapped is not None else ", closed"
        return (
            f"HookedVLM({self.name!r}, {self.family.name}, {self.n_layers} layers x {self.n_heads} heads, "
            f"tower {self.tower.n_layers} x {self.tower.n_heads}{state})"
        )

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

    @property
    def tokenizer(self) -> Any:
        """The processor's tokenizer."""
        if self.processor is None:
            raise NoProcessorError(
                "the tokenizer of a model that was wrapped without its processor",
                expected="a processor",
                fix="HookedVLM.from_model(model, processor=processor)",
            )
        return self.processor.tokenizer

    def identity(self) -> dict[str, Any]:
        """What tells this model from others in a result's provenance; the fingerprint samples every weight tensor."""
        digest = hashlib.sha256()
        for name, tensor in self.hf.state_dict().items():
            flat = tensor.detach().reshape(-1)
            ends = torch.cat([flat[:4], flat[flat.numel() // 2 :][:4], flat[-4:]]).float().cpu()
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}{ends.tolist()}".encode())
        return {
            "name": self.name,
            "revision": self.revision,
            "family": self.family.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "fingerprint": digest.hexdigest()[:16],
        }

    def hook_names(self, pattern: str = "*") -> list[str]:
        """Hook names that match a glob, in order of execution.

        >>> from mmlens import HookedVLM
        >>> vlm = HookedVLM.from_pretrained("toy-qwen3-vl")
        >>> vlm.hook_names("blocks.0.hook_resid_*")
        ['blocks.0.hook_resid_pre', 'blocks.0.hook_resid_mid', 'blocks.0.hook_resid_post']
        """
        found = [s.name for s in self.sites if fnmatch.fnmatchcase(s.name, pattern)]
        return found or [s.name for s in self.sites.match(pattern)]

    def site(self, name: str) -> TracedSite:
        """A named place to read or write inside a `trace` block."""
        return TracedSite(self.sites.get(name), self)

    # ------------------------------------------------------------------ prompts
    def prompt(
        self,
        question: Any,
        images: Any = None,
        *,
        system: str | None = None,
        subject: Any = None,
        answer: Any = None,
        evidence: Any = None,
        distractors: Any = None,
    ) -> Prompt:
        """Encode a question about pictures once, with the role of every token.

        Parameters
        ----------
        question
            Text; or chat messages (the last from the user); or a list of either, which makes a left-padded batch.
        images
            Pictures of the question, in order: PIL images, paths, or uint8 arrays. For a batch, one list a question.
        system
            A system turn put first.
        subject
            The words that name the asked thing: a substring that stands in the question once, or a character span.
        answer
            The gold answer; all its tokens but the last are appended, so that `output` predicts every one of them.
        evidence, distractors
            Boxes on the first picture: where the answer can be seen, and where other things are.

        For a batch, `subject`, `answer`, `evidence` and `distractors` are lists too.

        Returns
        -------
        Prompt
            `.tokens(group)`, `.locate(box)`, `.inputs`.

        Raises
        ------
        PromptError, PictureError, PictureCountError, UnknownWordError, RegionError, NoProcessorError
        """
        examples = make_examples(
            question,
            images,
            system=system,
            subject=subject,
            answer=answer,
            evidence=evidence,
            distractors=distractors,
        )
        return encode(examples, self.family, self.config, self.processor)

    def _as_prompt(self, prompt: PromptLike) -> Prompt:
        if isinstance(prompt, Prompt):
            check_inputs(self.family, self.config, prompt.inputs)
            return prompt
        if not isinstance(prompt, Mapping):
            raise PromptError(
                f"a prompt given as {type(prompt).__name__}",
                expected="a Prompt, or a processor's output",
                fix="vlm.prompt('What color is the star?', images=[picture])",
            )
        return Prompt.from_inputs(prompt, self.family, self.config, self.processor)

    def to_tokens(self, text: str) -> Int[Tensor, "1 pos"]:
        """Token ids of a text, without special tokens around it."""
        return torch.tensor([self.tokenizer(text, add_special_tokens=False)["input_ids"]], dtype=torch.long)

    def to_str_tokens(self, prompt: PromptLike | str) -> list[str] | list[list[str]]:
        """Every token as text: a list for one text or example, a list of lists for a batch."""
        if isinstance(prompt, str):
            return self.tokenizer.convert_ids_to_tokens(self.to_tokens(prompt)[0].tolist())
        rows = self._as_prompt(prompt).inputs["input_ids"].tolist()
        named = [[self.tokenizer.decode([i]) or str(i) for i in row] for row in rows]
        return named[0] if len(named) == 1 else named

    def to_single_token(self, text: str) -> int:
        """The id of a text that is one token; raises OptionError otherwise."""
        ids = self.to_tokens(text)[0].tolist()
        if len(ids) != 1 or ids[0] == self.tokenizer.unk_token_id:
            raise OptionError(
                f"{text!r} is {len(ids)} tokens: {self.tokenizer.convert_ids_to_tokens(ids)}",
                expected="a text that is exactly one token of this tokenizer",
                fix="try it with or without a leading space, or use answer_logprobs, which takes several tokens",
            )
        return ids[0]

    # ------------------------------------------------------------------ running
    def __call__(self, prompt: PromptLike) -> Float[Tensor, "batch pos d_vocab"]:
        """Logits at every position, under the hooks and interventions in force. No gradient graph is kept."""
        return self._forward(self._as_prompt(prompt), [])

    def run_with_cache(
        self,
        prompt: PromptLike,
        names_filter: NamesFilter = None,
        *,
        rows: Group | None = None,
        heads: HeadsLike | None = None,
        positions: Group | None = None,
        device: str | torch.device | None = None,
    ) -> tuple[Float[Tensor, "batch pos d_vocab"], ActivationCache]:
        """Run once and keep copies of what was asked for.

        Reading never changes the run: the logits are bitwise those of the plain model.

        Parameters
        ----------
        names_filter
            A name, a short name ("resid_post" means every layer), a glob, a list of these, or a callable; None means
            everything but attn_scores, pattern and result; [] nothing.
        rows
            Token group that cuts the query axis of scores and patterns; other rows are never built.
        heads
            Query heads: ints (every layer), {layer: ints}, or a HeadSet.
        positions
            Token group that cuts the position axis of everything else but rot_k.
        device
            Where the copies go; default where they were made.

        Returns
        -------
        logits, cache

        Raises
        ------
        UnknownHookError, NoPictureError, TokenGroupError, HeadError
        """
        prompt = self._as_prompt(prompt)
        selection = self._selection(prompt, rows, heads, positions)
        values: dict[str, Tensor] = {}

        def keep(site: Site, value: Tensor) -> None:
            values[site.name] = value if device is None else value.to(device)

        logits = self._forward(prompt, self._captures(prompt, names_filter, selection, keep))
        return logits, ActivationCache(values, self.sites, prompt, selection)

    def run_with_hooks(
        self,
        prompt: PromptLike,
        fwd_hooks: Sequence[tuple[Any, HookFn]],
        *,
        rows: Group | None = None,
        heads: HeadsLike | None = None,
    ) -> Float[Tensor, "batch pos d_vocab"]:
        """Logits of a run in which functions may change values.

        Parameters
        ----------
        fwd_hooks
            Pairs (name | glob | callable, fn), in any order. `fn(tensor, hook=point)` edits in place or returns a
            replacement; None without an edit leaves the value. `point.name` and `point.layer()` say where it is.
        rows, heads
            Cut what the functions see; the rest of each value stays.

        Raises
        ------
        UnknownHookError, ReadOnlyHookError, HookValueError, NoPictureError
        """
        prompt = self._as_prompt(prompt)
        selection = self._selection(prompt, rows, heads, None)
        return self._forward(prompt, self._hook_actions(fwd_hooks, selection, prompt))

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[tuple[Any, HookFn]],
        *,
        rows: Group | None = None,
        heads: HeadsLike | None = None,
    ) -> Iterator[HookedVLM]:
        """Every run of this HookedVLM inside the block goes through these functions; blocks nest.

        Takes what `run_with_hooks` takes. Outer blocks run first, then inner ones, then the call's own.
        """
        self._open()
        self._hook_actions(fwd_hooks, Selection(), None)  # wrong names raise here, not at the first run
        entry = (list(fwd_hooks), rows, heads)
        self._hooks.append(entry)
        try:
            yield self
        finally:
            self._hooks = [e for e in self._hooks if e is not entry]

    def generate(
        self,
        prompt: PromptLike,
        *,
        max_new_tokens: int = 32,
        names_filter: NamesFilter | None = (),
        rows: Group | None = None,
        heads: HeadsLike | None = None,
        positions: Group | None = None,
        device: str | torch.device | None = None,
    ) -> Generation:
        """Greedy decoding with the KV cache, optionally with a cache of activations for every step.

        Parameters
        ----------
        max_new_tokens
            Stops there, or at the end token.
        names_filter, rows, heads, positions, device
            As in `run_with_cache`; nothing is captured by default. `rows` and `positions` cut the first step only:
            each later step has one new position.
        """
        prompt = self._as_prompt(prompt)
        if max_new_tokens < 1:
            raise OptionError(f"max_new_tokens={max_new_tokens}", expected="at least 1", fix="ask for one token or more")
        prompt = prompt.unforced()
        selection = self._selection(prompt, rows, heads, positions)
        steps: list[dict[str, Tensor]] = []

        def keep(site: Site, value: Tensor) -> None:
            if not steps or site.name in steps[-1]:
                steps.append({})
            steps[-1][site.name] = value if device is None else value.to(device)

        actions = self._captures(prompt, names_filter, selection, keep)
        ids = self._run(
            prompt,
            actions,
            call=lambda holder: _generate_call(self.hf, holder, max_new_tokens),
            steps=True,
        )
        new = ids[:, prompt.n_columns :]
        text = self.tokenizer.batch_decode(new, skip_special_tokens=True) if self.processor is not None else []
        caches = [ActivationCache(values, self.sites, prompt, selection) for values in steps]
        return Generation(new, [t.strip() for t in text], caches)

    def trace(self, prompt: PromptLike) -> Any:
        """The raw nnsight block: `with vlm.trace(prompt): value = vlm.site(name).read().save()`.

        Sites must be read in order of execution; only saved values survive the block. No gradient graph is kept.
        """
        prompt = self._as_prompt(prompt)
        inputs = self._inputs(prompt)
        return self._open().root.trace(
            fn=no_grad_call(self.hf, {}), tracer_cls=tracer_class(self), **inputs
        )

    def answer_logprobs(self, prompt: PromptLike, answers: Sequence[str]) -> Float[Tensor, "batch answer"]:
        """Log-probability (nats) of each answer, forced token by token after the prompt.

        Parameters
        ----------
        answers
            The same candidates for every example; of any number of tokens.
        """
        prompt = self._as_prompt(prompt)
        ids = [self.to_tokens(a)[0].tolist() for a in answers]
        if not ids or not all(ids):
            raise OptionError(
                f"answers={list(answers)!r}", expected="at least one answer, none empty", fix="give the candidates"
            )
        prompt = prompt.unforced()
        last = [r["last"][0] for r in prompt.roles]
        batch = torch.arange(len(prompt))
        scores = torch.zeros(len(prompt), len(ids))
        by_prefix: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for answer, tokens in enumerate(ids):
            for i, token in enumerate(tokens):
                by_prefix.setdefault(tuple(tokens[:i]), []).append((answer, token))
        for prefix, wanted in by_prefix.items():
            grown = append_tokens(prompt.inputs, [prefix] * len(prompt), pad_id=0)
            longer = Prompt.from_inputs(grown, self.family, self.config, self.processor)
            logits = self._forward(longer, [])[batch, [c + len(prefix) for c in last]].float().log_softmax(-1).cpu()
            for answer, token in wanted:
                scores[:, answer] += logits[:, token]
        return scores

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
        prompt = self._as_prompt(prompt)
        selection = self._selection(prompt, rows, heads, positions)
        actions = [a for names, sink in sinks.items() for a in self._captures(prompt, names, selection, sink)]
        self._forward(prompt, actions, logits_to_keep=1)

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

    # ------------------------------------------------------------------ comfort
    def scan(
        self,
        task: Task,
        *,
        metric: str = "ram",
        query: Group = "question",
        n: int | None = None,
        seed: int = 0,
        split: str = "rank",
        out: str | Path | None = None,
    ) -> HeadScores:
        """Score every head over a task; see `mmlens.scan.scan`."""
        from mmlens.scan import scan

        return scan(self, task, metric=metric, query=query, n=n, seed=seed, split=split, out=out)

    def ablate(self, heads: Any, *, mode: str = "output_zero") -> AbstractContextManager[HookedVLM]:
        """Switch heads off for a block; see `mmlens.interventions.ablate.ablate`."""
        from mmlens.interventions.ablate import ablate

        return ablate(self, heads, mode=mode)

    # ------------------------------------------------------------------ inside
    def head_table(self, heads: HeadsLike) -> dict[int, tuple[int, ...]]:
        """Heads in any accepted form as {layer: sorted heads}; raises HeadError for heads that are not there."""
        by_layer = getattr(heads, "by_layer", None)
        if callable(by_layer):
            table = by_layer()
        elif isinstance(heads, Mapping):
            table = heads
        else:
            listed = list(heads) if isinstance(heads, Iterable) and not isinstance(heads, str) else [heads]
            if all(isinstance(h, tuple) and len(h) == 2 for h in listed):
                table = {layer: [h for at, h in listed if at == layer] for layer, _ in listed}
            else:
                table = {layer: listed for layer in range(self.n_layers)}
        found = {}
        for layer, chosen in table.items():
            chosen = list(chosen)
            wrong = [h for h in chosen if not isinstance(h, int) or isinstance(h, bool) or not 0 <= h < self.n_heads]
            if not isinstance(layer, int) or not 0 <= layer < self.n_layers or wrong:
                raise HeadError(
                    f"heads {wrong or chosen} of layer {layer}",
                    expected=f"layers 0 to {self.n_layers - 1}, query heads 0 to {self.n_heads - 1}",
                    fix="heads are ints, {layer: ints}, (layer, head) pairs or a HeadSet of this model",
                )
            found[layer] = tuple(sorted(set(chosen)))
        return found

    def _selection(self, prompt: Prompt, rows: Any, heads: Any, positions: Any) -> Selection:
        return Selection(
            None if rows is None else require_prompt_group(prompt, rows, "rows"),
            None if positions is None else require_prompt_group(prompt, positions, "positions"),
            None if heads is None else self.head_table(heads),
        )

    def _captures(
        self, prompt: Prompt, names: NamesFilter, selection: Selection, sink: Sink
    ) -> list[Action]:
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

    def _hook_actions(
        self, fwd_hooks: Sequence[tuple[Any, HookFn]], selection: Selection, prompt: Prompt | None
    ) -> list[Action]:
        actions: list[Action] = []
        for entry in fwd_hooks:
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

    def _inputs(self, prompt: Prompt) -> dict[str, Any]:
        return to_device(prompt.inputs, self.device, self.dtype)

    def _forward(self, prompt: Prompt, actions: list[Action], **options: Any) -> Tensor:
        result = self._run(
            prompt, actions, call=lambda holder: no_grad_call(self.hf, holder, **options), steps=False
        )
        return result.logits

    def _run(
        self,
        prompt: Prompt,
        actions: list[Action],
        *,
        call: Callable[[dict[str, Any]], Callable[..., Any]],
        steps: bool,
    ) -> Any:
        """Every run of the model goes through here: hooks in force first, then the call's own actions."""
        wrapped = self._open()
        callers: list[list[Action]] = []
        for fwd_hooks, rows, heads in self._hooks:
            callers.append(self._hook_actions(fwd_hooks, self._selection(prompt, rows, heads, None), prompt))
        callers.append(actions)
        everything = [a for caller in callers for a in caller]
        holder: dict[str, Any] = {}
        inputs = self._inputs(prompt)
        with self.requests.lock:
            if not everything:
                call(holder)(**inputs)
                return holder["result"]
            real = prompt.real
            visitor = Visitor(
                everything,
                lambda site: None if site.address is None else self.requests.at(site.address),
                None if real is None else real.to(self.device),
            )
            with self._asked([request_of(caller) for caller in callers if caller]):
                wrapped.pack_tower(self.requests.tower_points)
                try:
                    trace(wrapped.root, visitor, call(holder), inputs, steps=steps)
                finally:
                    wrapped.pack_tower(False)
        return holder["result"]

    @contextmanager
    def _asked(self, requests: Sequence[Request]) -> Iterator[None]:
        if not requests:
            yield
            return
        with self.requests.ask(requests[0]), self._asked(requests[1:]):
            yield


def _generate_call(model: Any, holder: dict[str, Any], max_new_tokens: int) -> Callable[..., Any]:
    def call(**inputs: Any) -> Any:
        with torch.no_grad():
            holder["result"] = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        return holder["result"]

    return call
