"""Generation with capture, and forced answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmlens.errors import OptionError, TokenGroupError
from mmlens.model.cache import ActivationCache
from mmlens.model.engine import Engine, HeadsLike, PromptLike
from mmlens.model.prompt import Prompt
from mmlens.model.run import plain_call
from mmlens.model.sites import NamesFilter, Site
from mmlens.tokens import Group


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


def generate(
    engine: Engine,
    prompt: PromptLike,
    *,
    max_new_tokens: int,
    names_filter: NamesFilter,
    rows: Group | None,
    heads: HeadsLike,
    positions: Group | None,
    device: str | torch.device | None,
) -> Generation:
    """See `HookedVLM.generate`."""
    prompt = engine.as_prompt(prompt)
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise OptionError(
            f"max_new_tokens={max_new_tokens!r}", expected="an int, at least 1", fix="ask for one token or more"
        )
    given, prompt = prompt, prompt.unforced()
    for name, group in (("rows", rows), ("positions", positions)):
        if prompt is not given and group is not None and not isinstance(group, str):
            raise TokenGroupError(
                f"{name}= by columns for a prompt that ends with answer tokens",
                expected="a name expression: the answer is left out of what is continued, which moves columns",
                fix=f"use a name ({name}='subject'), or build the prompt without answer=",
            )
    selection = engine.selection(prompt, rows, heads, positions)
    steps: list[dict[str, Tensor]] = []

    def keep(site: Site, value: Tensor) -> None:
        if not steps or site.name in steps[-1]:
            steps.append({})
        steps[-1][site.name] = value if device is None else value.to(device)

    actions = engine.captures(prompt, names_filter, selection, keep)
    ids = engine.run(
        prompt,
        actions,
        call=lambda holder: plain_call(engine.hf.generate, holder, max_new_tokens=max_new_tokens, do_sample=False),
        steps=True,
    )
    new = ids[:, prompt.n_columns :]
    text = [] if engine.processor is None else engine.processor.tokenizer.batch_decode(new, skip_special_tokens=True)
    steps += [{} for _ in range(new.shape[1] - len(steps))] if actions else []  # the tower runs in the first step only
    caches = [
        ActivationCache(values, engine.sites, prompt, selection, step=i, engine=engine)
        for i, values in enumerate(steps)
    ]
    return Generation(new, [t.strip() for t in text], caches)


def _extended(prompt: Prompt, tokens: Sequence[int]) -> Prompt:
    """The prompt with the same tokens after every example; old columns keep their numbers and roles."""
    n, columns = len(prompt), prompt.n_columns
    inputs = dict(prompt.inputs)
    for key, value in (("attention_mask", 1), ("mm_token_type_ids", 0), ("token_type_ids", 0)):
        if key in inputs:
            inputs[key] = torch.cat([inputs[key], inputs[key].new_full((n, len(tokens)), value)], 1)
    added = torch.tensor([list(tokens)] * n, dtype=torch.long, device=inputs["input_ids"].device).view(n, len(tokens))
    inputs["input_ids"] = torch.cat([inputs["input_ids"], added], 1)
    new = tuple(range(columns, columns + len(tokens)))
    roles = tuple({**r, "all": r["all"] + new, "text": r["text"] + new} for r in prompt.roles)
    return replace(prompt, inputs=inputs, roles=roles)


def answer_logprobs(
    engine: Engine, prompt: PromptLike, answers: Sequence[Sequence[int]]
) -> Float[Tensor, "batch answer"]:
    """See `HookedVLM.answer_logprobs`; answers are token ids."""
    prompt = engine.as_prompt(prompt)
    ids = [list(a) for a in answers]
    if not ids or not all(ids):
        raise OptionError(
            f"answers with {[len(i) for i in ids]} tokens",
            expected="at least one answer, none empty",
            fix="give the candidates",
        )
    prompt = prompt.unforced()
    last = [r["all"][-1] for r in prompt.roles]
    batch = torch.arange(len(prompt))
    scores = torch.zeros(len(prompt), len(ids))
    by_prefix: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for answer, tokens in enumerate(ids):
        for i, token in enumerate(tokens):
            by_prefix.setdefault(tuple(tokens[:i]), []).append((answer, token))
    for prefix, wanted in by_prefix.items():
        logits = (
            engine.forward(_extended(prompt, prefix), [])[batch, [c + len(prefix) for c in last]]
            .float()
            .log_softmax(-1)
            .cpu()
        )
        for answer, token in wanted:
            scores[:, answer] += logits[:, token]
    return scores
