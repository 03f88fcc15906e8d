"""HookedVLM: load, prompt, run_with_cache, run_with_hooks, generate, trace, close."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mmlens.errors import NoProcessorError, OptionError
from mmlens.families.base import Family
from mmlens.model.cache import ActivationCache
from mmlens.model.decode import Generation, answer_logprobs, generate
from mmlens.model.encode import encode, make_examples
from mmlens.model.engine import Engine, HeadsLike, PromptLike
from mmlens.model.loading import as_device, as_dtype, load, shown_name
from mmlens.model.prompt import Prompt
from mmlens.model.reading import GroupMass, attention_mass, run_with_cache, splice_hook
from mmlens.model.run import HookFn
from mmlens.model.select import Selection
from mmlens.model.sites import NamesFilter
from mmlens.model.tracing import TracedSite, open_trace
from mmlens.model.weights import ModelWeights, StackWeights
from mmlens.model.wording import tokenize
from mmlens.tokens import Group

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from mmlens.export import ActivationShards
    from mmlens.layers import LayerProfile
    from mmlens.model.verify import Report
    from mmlens.scores import HeadScores
    from mmlens.tasks.base import Split, Task


class HookedVLM(Engine, ModelWeights):
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

    def __init__(
        self, model: Any, processor: Any, *, name: str, revision: str | None, family: Family | None = None
    ) -> None:
        super().__init__(model, processor, family, name=name, revision=revision)
        ModelWeights.__init__(self, self)
        self.vision = StackWeights(self, self.family.tower, self.tower)

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
        target = None if device is None else as_device(device)
        model, processor = load(
            str(name),
            dtype=as_dtype(dtype),
            device_map=device_map,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        if target is not None:
            model = model.to(target)
        revision = revision or getattr(model.config, "_commit_hash", None)
        return cls(model, processor, name=shown_name(str(name)), revision=revision)

    @classmethod
    def from_model(cls, model: nn.Module, processor: Any = None, *, family: Family | None = None) -> HookedVLM:
        """Wrap a loaded Hugging Face model; without a processor, calls take ready inputs only.

        Parameters
        ----------
        model
            Also one that PEFT has put adapters into: hooks then see the adapted values.
        family
            Where the model keeps its parts, for one that mmlens does not know.

        Raises
        ------
        UnknownFamilyError, AlreadyWrappedError, PictureTokenError
        """
        name = getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
        return cls(model, processor, name=shown_name(name), revision=None, family=family)

    def __enter__(self) -> HookedVLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ facts
    def __repr__(self) -> str:
        state = "" if self._wrapped is not None else ", closed"
        return (
            f"HookedVLM({self.name!r}, {self.family.name}, {self.n_layers} layers x {self.n_heads} heads, "
            f"tower {self.tower.n_layers} x {self.tower.n_heads}{state})"
        )

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
        videos: Any = None,
        fps: float | None = None,
        max_frames: int | None = None,
        images_kwargs: Mapping[str, Any] | None = None,
        system: str | None = None,
        subject: Any = None,
        answer: Any = None,
        evidence: Any = None,
        distractors: Any = None,
    ) -> Prompt:
        """Encode a question about pictures once, with the role of every token.

        For a batch, `videos`, `subject`, `answer`, `evidence` and `distractors` are lists, as `images` is.

        Parameters
        ----------
        question
            Text; or chat messages (the last from the user); or a list of either, which makes a left-padded batch.
        images
            Pictures of the question, in order: PIL images, paths, or uint8 arrays. For a batch, one list a question.
        videos
            Videos of the question, instead of pictures: files (a path or a VideoFile), of which frames are decoded
            exactly; or frames already chosen (a list of pictures, a uint8 array (frame, height, width, 3), a Video),
            which are taken as they are.
        fps, max_frames
            Of files: how many frames a second are shown (default 2), and how many at most (default 64, then evenly
            spaced). Of frames: how many a second they are (default 2), for families that are told times.
        images_kwargs
            Options of the picture processor for this prompt: {"do_pan_and_scan": True}, {"max_pixels": 200704}, ...
        system
            A system turn put first.
        subject
            The words that name the asked thing: a substring that stands in the question once, or a character span.
        answer
            The gold answer; all its tokens but the last are appended, so that `output` predicts every one of them.
        evidence, distractors
            Where the answer can be seen, and where other things are: a region or several. Plain ones lie on the first
            picture (or in the video), Page and PageRegion say which.

        Returns
        -------
        Prompt
            `.tokens(group)`, `.locate(region)`, `.heatmap(values)`, `.inputs`.

        Raises
        ------
        PromptError, PictureError, PictureCountError, UnknownWordError, RegionError, NoProcessorError
        """
        examples = make_examples(
            question,
            images,
            videos=videos,
            fps=fps,
            max_frames=max_frames,
            system=system,
            subject=subject,
            answer=answer,
            evidence=evidence,
            distractors=distractors,
        )
        return encode(examples, self.family, self.config, self.processor, images_kwargs)

    def to_tokens(self, text: str) -> Int[Tensor, "1 pos"]:
        """Token ids of a text, without special tokens around it."""
        return torch.tensor([tokenize(self.tokenizer, text)], dtype=torch.long)

    def to_str_tokens(self, prompt: PromptLike | str) -> list[str] | list[list[str]]:
        """Every token as text: a list for one text or example, a list of lists for a batch."""
        if isinstance(prompt, str):
            return self.tokenizer.convert_ids_to_tokens(self.to_tokens(prompt)[0].tolist())
        rows = self.as_prompt(prompt).inputs["input_ids"].tolist()
        named = [[self.tokenizer.decode([i]) or str(i) for i in row] for row in rows]
        return named[0] if len(named) == 1 else named

    def to_single_token(self, text: str) -> int:
        """The id of a text that is one token; raises OptionError otherwise."""
        ids = self.to_tokens(text)[0].tolist()
        if len(ids) != 1:
            raise OptionError(
                f"{text!r} is {len(ids)} tokens: {self.tokenizer.convert_ids_to_tokens(ids)}",
                expected="a text that is exactly one token of this tokenizer",
                fix="try it with or without a leading space, or use answer_logprobs, which takes several tokens",
            )
        return ids[0]

    # ------------------------------------------------------------------ running
    def __call__(self, prompt: PromptLike) -> Float[Tensor, "batch pos d_vocab"]:
        """Logits at every position, under the hooks and interventions in force. No gradient graph is kept."""
        return self.forward(self.as_prompt(prompt), [])

    def run_with_cache(
        self,
        prompt: PromptLike,
        names_filter: NamesFilter = None,
        *,
        rows: Group | None = None,
        heads: HeadsLike | None = None,
        positions: Group | None = None,
        reduce: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        stop_at_layer: int | None = None,
        grad: bool = False,
        device: str | torch.device | None = None,
    ) -> tuple[Float[Tensor, "batch pos d"], ActivationCache]:
        """Run once and keep copies of what was asked for.

        Reading never changes the run: the logits are bitwise those of the plain model.

        Parameters
        ----------
        names_filter
            A name, a short name ("resid_post" means every layer), a glob, a list of these, or a callable; None means
            everything but attn_scores, pattern and result (nothing, beside `reduce`); [] nothing.
        rows
            Token group that cuts the query axis of scores and patterns; other rows are never built.
        heads
            Query heads: ints (every layer), {layer: ints}, or a HeadSet.
        positions
            Token group that cuts the position axis of everything else but rot_k.
        reduce
            {name, short name or glob: fn}: `fn(value)` runs as the value appears, and only its result is kept, under
            the hook's name; memory holds one value at a time.
        stop_at_layer
            Run only the decoder blocks in front of this one (negative: from the end); the first result is then the
            stream that this block would have read, as in TransformerLens.
        grad
            Keep the graph, from pixels and token embeddings to the logits, for `backward()` and `cache.grad(name)`.
            Values in the cache are then part of it, patterns that were asked for carry the run (logits agree with the
            plain ones to rounding), and weights stay outside: their `.grad` is not touched.
        device
            Where the copies go; default where they were made.

        Returns
        -------
        logits, cache

        Raises
        ------
        UnknownHookError, NoPictureError, HookNotReachedError, TokenGroupError, HeadError, OptionError,
        PatternTooLargeError, NonFiniteError
        """
        return run_with_cache(
            self,
            self.as_prompt(prompt),
            names_filter,
            rows=rows,
            heads=heads,
            positions=positions,
            reduce=reduce,
            stop_at_layer=stop_at_layer,
            grad=grad,
            device=None if device is None else as_device(device),
        )

    def attention_mass(self, prompt: PromptLike, groups: Sequence[Group], *, rows: Group | None = None) -> GroupMass:
        """How much attention every head of every layer pays to token groups; no query x key matrix is built.

        Parameters
        ----------
        groups
            Token groups to sum over: ["image", "system", "text-system"], boxes' TokenSets, ...
        rows
            Token group of the queries; default every position. Few rows cost next to nothing; all of them about as
            much as the attention itself once more on short prompts, and far less on long ones.

        Returns
        -------
        GroupMass
            `.values` (layer, batch, head, row, group), each the share (0..1) of a query's attention; NaN where ragged
            examples are padded, 0 in rows that are padding. `.positions` says which row is which column.

        Examples
        --------
        >>> from mmlens import HookedVLM, load_task
        >>> vlm, example = HookedVLM.from_pretrained("toy-qwen3-vl"), load_task("scenes/image").example("rank", 0, 0)
        >>> prompt = vlm.prompt(example.question, images=list(example.images))
        >>> mass = vlm.attention_mass(prompt, ["image", "text"], rows="last")
        >>> mass.values.shape, bool((mass.values.sum(-1) - 1).abs().max() < 1e-5)
        (torch.Size([8, 1, 12, 1, 2]), True)
        """
        return attention_mass(self, self.as_prompt(prompt), list(groups), rows)

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
        prompt = self.as_prompt(prompt)
        selection = self.selection(prompt, rows, heads, None)
        return self.forward(prompt, self.hook_actions(fwd_hooks, selection, prompt))

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
        self.opened()
        self.hook_actions(fwd_hooks, Selection(), None)  # wrong names and heads raise here, not at the first run
        if heads is not None:
            self.head_table(heads)
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
        names_filter: NamesFilter = None,
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
            As in `run_with_cache`, but None captures nothing. `rows` and `positions` cut the first step only:
            each later step has one new position.
        """
        return generate(
            self,
            prompt,
            max_new_tokens=max_new_tokens,
            names_filter=() if names_filter is None else names_filter,
            rows=rows,
            heads=heads,
            positions=positions,
            device=None if device is None else as_device(device),
        )

    def trace(self, prompt: PromptLike, *, max_new_tokens: int | None = None) -> Any:
        """The raw nnsight block: `with vlm.trace(prompt): value = vlm.site(name).read().save()`.

        Sites and `vlm.blocks[3]` / `vlm.vision.blocks[1]` must be read in order of execution; only saved values survive
        the block. No gradient graph is kept. Ablations hold inside it; `vlm.hooks(...)` do not, and are refused.

        Parameters
        ----------
        max_new_tokens
            Generate, greedily; the block then binds steps with `for step in tracer.iter[:3]:`.
        """
        if self._hooks:
            raise OptionError(
                "a trace inside vlm.hooks(...), whose functions a raw block would not run",
                expected="trace outside hooks()",
                fix="write to the sites inside the block instead: vlm.site(name).write(value)",
            )
        return open_trace(self, self.as_prompt(prompt), max_new_tokens)

    @contextmanager
    def splice(
        self, name: str, encode_decode: Callable[[Tensor], Tensor], *, error_term: bool = False
    ) -> Iterator[HookedVLM]:
        """Put a module (a sparse autoencoder, a transcoder) in place of a hook's values, for a block.

        Parameters
        ----------
        name
            A writable hook, short name or glob.
        encode_decode
            Called with the value, returns its replacement of the same shape. A module's own dtype and device are used.
        error_term
            Add back what the replacement lost, so that the run's values stay as they were while gradients go through
            the module.

        Examples
        --------
        >>> import torch
        >>> from mmlens import HookedVLM
        >>> vlm = HookedVLM.from_pretrained("toy-qwen3-vl")
        >>> with vlm.splice("blocks.3.hook_mlp_out", torch.nn.Identity()):
        ...     logits = vlm(vlm.prompt("what color is the star ?"))
        """
        if not callable(encode_decode):
            raise OptionError(
                f"encode_decode={encode_decode!r}",
                expected="a module or function of one tensor",
                fix="pass sae.forward",
            )
        with self.hooks([(name, splice_hook(encode_decode, error_term=error_term))]):
            yield self

    def answer_logprobs(self, prompt: PromptLike, answers: Sequence[str]) -> Float[Tensor, "batch answer"]:
        """Log-probability (nats) of each answer, forced token by token after the prompt.

        Parameters
        ----------
        answers
            The same candidates for every example; of any number of tokens.
        """
        if isinstance(answers, str) or not all(isinstance(a, str) for a in answers):
            raise OptionError(
                f"answers={answers!r}", expected="a list of texts", fix="answer_logprobs(prompt, ['red', 'blue'])"
            )
        return answer_logprobs(self, prompt, [self.to_tokens(a)[0].tolist() for a in answers])

    # ------------------------------------------------------------------ comfort
    def verify(self, prompt: PromptLike | None = None) -> Report:
        """Check this model against itself, hook by hook; see `mmlens.model.verify.verify`."""
        from mmlens.model.verify import verify

        return verify(self, prompt)

    def activations(
        self,
        task: Task,
        names_filter: NamesFilter,
        *,
        out: str | Path,
        positions: Group | None = None,
        n: int | None = None,
        seed: int = 0,
        split: Split = "rank",
    ) -> ActivationShards:
        """Write a whole task's activations to disk; see `mmlens.export.activations`."""
        from mmlens.export import activations

        return activations(self, task, names_filter, out=out, positions=positions, n=n, seed=seed, split=split)

    def scan(
        self,
        task: Task,
        *,
        metric: str = "ram",
        query: Group = "question",
        n: int | None = None,
        seed: int = 0,
        split: Split = "rank",
        out: str | Path | None = None,
    ) -> HeadScores:
        """Score every head over a task; see `mmlens.scan.scan`."""
        from mmlens.scan import scan

        return scan(self, task, metric=metric, query=query, n=n, seed=seed, split=split, out=out)

    def scan_many(
        self,
        task: Task,
        *,
        metrics: Sequence[str],
        query: Group = "question",
        n: int | None = None,
        seed: int = 0,
        split: Split = "rank",
        out: str | Path | None = None,
    ) -> dict[str, HeadScores]:
        """Score every head by several metrics in one pass; see `mmlens.scan.scan_many`."""
        from mmlens.scan import scan_many

        return scan_many(self, task, metrics=metrics, query=query, n=n, seed=seed, split=split, out=out)

    def layer_profile(self, task: Task, **options: Any) -> LayerProfile:
        """RID, MixIG, eRank and TME of every module, layer by layer; see `mmlens.layers.layer_profile`."""
        from mmlens.layers import layer_profile

        return layer_profile(self, task, **options)

    def ablate(self, heads: Any, *, mode: str = "output_zero") -> AbstractContextManager[HookedVLM]:
        """Switch heads off for a block; see `mmlens.interventions.ablate.ablate`."""
        from mmlens.interventions.ablate import ablate

        return ablate(self, heads, mode=mode)
