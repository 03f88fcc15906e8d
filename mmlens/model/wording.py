"""The words of a prompt: the chat template, which characters play which part, and which tokens they become."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmlens.errors import PromptError, UnknownWordError
from mmlens.model.prompt import Example, Roles

Span = tuple[int, int]


def render(example: Example, processor: Any) -> tuple[str, dict[str, list[Span]]]:
    """The chat template's text, and the characters of the system text, the question and what follows it.

    The template is rendered a second time with a private mark for every text part, which tells exactly where each
    part stands, whatever the words.
    """
    if getattr(processor, "chat_template", None) is None:
        raise PromptError(
            "this processor has no chat template",
            expected="a processor with chat_template set",
            fix="set processor.chat_template, or encode the text yourself and pass the processor's output",
        )

    def template(messages: Sequence[Mapping[str, Any]]) -> str:
        return processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    parts = [(t, part) for t, turn in enumerate(example.messages) for part in turn["content"] if part["type"] == "text"]
    marks = [f"\ue000{i}\ue001" for i in range(len(parts))]
    remaining = iter(marks)
    marked = [
        {**turn, "content": [{**p, "text": next(remaining)} if p["type"] == "text" else p for p in turn["content"]]}
        for turn in example.messages
    ]
    text, skeleton = template(example.messages), template(marked)
    spans: dict[str, list[Span]] = {"system": [], "question": []}
    at, rest = 0, skeleton
    for mark, (turn, part) in zip(marks, parts):
        before, found, rest = rest.partition(mark)
        body = next((b for b in (part["text"], part["text"].strip()) if text.startswith(before + b, at)), None)
        if not found or body is None:
            raise PromptError(
                f"the chat template rewrites the text {part['text']!r}",
                expected="a template that copies message texts as they are (outer blanks aside)",
                fix="encode the prompt yourself and pass the processor's output",
            )
        span = (at + len(before), at + len(before) + len(body))
        if example.messages[turn]["role"] == "system":
            spans["system"].append(span)
        elif turn == len(example.messages) - 1:
            spans["question"].append(span)
        at = span[1]
    if text[at:] != rest:
        raise PromptError(
            "the chat template's ending depends on the message text",
            expected="a template whose fixed parts are the same for every text",
            fix="encode the prompt yourself and pass the processor's output",
        )
    spans["suffix"] = [(at, len(text))]
    return text, spans


def refuse_unknown(
    tokenizer: Any,
    text: str,
    ids: Sequence[int],
    spans: Sequence[Span],
    *,
    ours: Callable[[Span], bool] = lambda span: False,
) -> None:
    """Raise for words that the tokenizer has no token for; the message lists a small vocabulary whole.

    Spans for which `ours` holds were written by the processor and do not count.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in ids:
        return
    words = sorted({text[a:b] for i, (a, b) in zip(ids, spans) if i == unknown and not ours((a, b))})
    if not words:
        return
    special = set(tokenizer.all_special_tokens)
    vocabulary = sorted(w for w in tokenizer.get_vocab() if w not in special and w.strip())
    listed = " ".join(vocabulary) if len(vocabulary) <= 200 else f"{len(vocabulary)} words"
    raise UnknownWordError(
        f"this model has never seen {', '.join(map(repr, words))}",
        expected=f"its vocabulary: {listed}",
        fix="use those words only, or a model with an open vocabulary",
    )


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text without special tokens around it; raises UnknownWordError."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    refuse_unknown(tokenizer, text, encoded["input_ids"], encoded["offset_mapping"])
    return list(encoded["input_ids"])


def with_text_roles(
    roles: Roles,
    example: Example,
    spans: Mapping[str, list[Span]],
    where: Sequence[tuple[int, Span]],
    forced: int,
) -> Roles:
    """`roles` with the groups that depend on the words: system, question, subject, suffix, last, output.

    `where` gives each prompt column's characters in the expanded text, `spans` the parts' characters there.
    """
    every = roles["all"]

    def inside(chosen: list[Span]) -> tuple[int, ...]:
        return tuple(c for c, (a, b) in where if b > a and any(a < high and b > low for low, high in chosen))

    roles = {**roles, "suffix": inside(spans["suffix"])}
    for name in ("system", "question"):
        if inside(spans[name]):
            roles[name] = inside(spans[name])
    roles["last"] = every[len(every) - forced - 1 : len(every) - forced]
    if example.answer is not None:
        roles["output"] = every[len(every) - forced - 1 :]
    if example.subject is not None:
        roles["subject"] = inside([_subject_span(example, spans["question"])])
    return roles


def _subject_span(example: Example, question: list[Span]) -> Span:
    """Characters of the subject in the rendered text, from a substring or a span of the question's text."""
    texts = [p["text"] for p in example.messages[-1]["content"] if p["type"] == "text"]
    if not texts:
        raise PromptError(
            "a subject= of a question without words", expected="text in the last message", fix="drop subject="
        )
    text = texts[-1]
    lead = len(text) - len(text.lstrip()) if question[-1][1] - question[-1][0] < len(text) else 0
    start = question[-1][0] - lead
    if isinstance(example.subject, str):
        n = text.count(example.subject) if example.subject else 0
        if n != 1:
            raise PromptError(
                f"subject {example.subject!r} stands {n} times in {text!r}",
                expected="a substring that stands in the question exactly once",
                fix="give a (start, end) character span of the question instead",
            )
        low = text.index(example.subject)
        high = low + len(example.subject)
    else:
        if not isinstance(example.subject, tuple | list) or len(example.subject) != 2:
            raise PromptError(
                f"subject={example.subject!r}",
                expected="a substring of the question, or a (start, end) character span",
                fix="subject='star'",
            )
        low, high = example.subject
        if not 0 <= low < high <= len(text):
            raise PromptError(
                f"subject span {example.subject} in a question of {len(text)} characters",
                expected="0 <= start < end <= length",
                fix="count characters of the question's own text",
            )
    return start + low, start + high
