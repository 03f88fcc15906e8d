"""Building prompts: chat template, processor, and which characters (hence tokens) play which part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmlens.errors import (
    NoProcessorError,
    PictureCountError,
    PictureError,
    PlaceholderError,
    PromptError,
    UnknownWordError,
)
from mmlens.evidence.regions import Box
from mmlens.families.base import Family
from mmlens.model.guard import check_inputs
from mmlens.model.pictures import load_picture
from mmlens.model.prompt import Example, Prompt, Roles, basic_roles, located

Span = tuple[int, int]


def make_examples(
    question: Any,
    images: Any,
    *,
    system: str | None,
    subject: Any,
    answer: Any,
    evidence: Any,
    distractors: Any,
) -> list[Example]:
    """Examples from the forms that `vlm.prompt` takes: a question, chat messages, or a list of either."""
    if _is_chat(question) or isinstance(question, str):
        boxes = lambda x: (x,) if isinstance(x, Box) else tuple(x or ())  # noqa: E731
        pictures = [] if images is None else list(images) if isinstance(images, list | tuple) else [images]
        return [
            Example(
                _messages(question, pictures, system),
                tuple(load_picture(p) for p in pictures or _pictures_in(question)),
                subject,
                answer,
                boxes(evidence),
                boxes(distractors),
            )
        ]
    if not isinstance(question, list | tuple) or not question:
        raise PromptError(
            f"a question given as {type(question).__name__}" + ("" if question else ", empty"),
            expected="a string, chat messages [{'role': ..., 'content': ...}], or a list of either",
            fix="vlm.prompt('What color is the star?', images=[picture])",
        )
    n = len(question)
    columns = {}
    for name, value in dict(
        images=images, subject=subject, answer=answer, evidence=evidence, distractors=distractors
    ).items():
        if value is None:
            value = [None] * n
        if not isinstance(value, list | tuple) or len(value) != n:
            got = len(value) if isinstance(value, list | tuple) else type(value).__name__
            raise PromptError(
                f"{name}= for {n} questions: {got}",
                expected=f"a list with one entry for each of the {n} questions",
                fix=f"{name}=[...] in the order of the questions",
            )
        columns[name] = value
    return [make_examples(q, **{k: v[i] for k, v in columns.items()}, system=system)[0] for i, q in enumerate(question)]


def _is_chat(question: Any) -> bool:
    return isinstance(question, list | tuple) and bool(question) and isinstance(question[0], Mapping)


def _pictures_in(question: Any) -> list[Any]:
    """Pictures that chat messages carry themselves."""
    if isinstance(question, str):
        return []
    parts = [p for m in question if not isinstance(m["content"], str) for p in m["content"]]
    return [p["image"] for p in parts if p.get("type") == "image" and "image" in p]


def _messages(question: Any, pictures: Sequence[Any], system: str | None) -> tuple[dict[str, Any], ...]:
    """Chat messages with every content as a list of parts and no picture data in them."""
    if isinstance(question, str):
        content = [{"type": "image"}] * len(pictures) + [{"type": "text", "text": question}]
        turns = [{"role": "user", "content": content}]
    else:
        turns = []
        for turn in question:
            if "role" not in turn or "content" not in turn:
                raise PromptError(
                    f"a chat message with keys {sorted(turn)}",
                    expected="'role' and 'content' in every message",
                    fix="[{'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': '...'}]}]",
                )
            content = turn["content"]
            if not isinstance(content, str) and not all(isinstance(p, Mapping) and "type" in p for p in content):
                raise PromptError(
                    f"chat content {content!r}",
                    expected="text, or a list of parts {'type': 'image'} and {'type': 'text', 'text': ...}",
                    fix="give every part its type",
                )
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            turns.append(
                {
                    "role": turn["role"],
                    "content": [{k: v for k, v in part.items() if k in ("type", "text")} for part in parts],
                }
            )
    if system is not None:
        turns.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
    if turns[-1]["role"] != "user":
        raise PromptError(
            f"chat messages that end with the role {turns[-1]['role']!r}",
            expected="a user message at the end; the answer goes into answer=",
            fix="drop the last message, or pass it as answer='...'",
        )
    return tuple(turns)


def encode(examples: Sequence[Example], family: Family, config: Any, processor: Any) -> Prompt:
    """The prompt of some examples: template, processor, roles, evidence."""
    if processor is None:
        raise NoProcessorError(
            "a question for a model that was wrapped without its processor",
            expected="a processor",
            fix="HookedVLM.from_model(model, processor=processor), or pass the processor's own output instead",
        )
    rendered = [render(example, processor) for example in examples]
    texts = [text for text, _ in rendered]
    short = [_short_encoding(text, processor, config, len(e.images)) for text, e in zip(texts, examples)]
    pictures = [picture for example in examples for picture in example.images]
    try:
        encoded = processor(text=texts, images=pictures or None, return_tensors="pt", padding=True, padding_side="left")
    except ValueError as error:
        given = ", ".join(f"{p.width} x {p.height}" for p in pictures)
        raise PictureError(
            f"the processor refuses pictures of {given or 'no size'}: {error}",
            expected="pictures that this model's processor takes",
            fix="crop or scale them first",
        ) from error
    inputs = {k: v for k, v in encoded.items() if isinstance(v, torch.Tensor)}
    check_inputs(family, config, inputs)
    for example in examples:
        if example.answer is not None and not isinstance(example.answer, str):
            raise PromptError(f"answer={example.answer!r}", expected="a text", fix=f"answer={str(example.answer)!r}")
    answers = [tokenize(processor.tokenizer, e.answer) if e.answer is not None else [] for e in examples]
    forced = tuple(max(len(a) - 1, 0) for a in answers)
    inputs = append_tokens(inputs, [a[:-1] for a in answers], pad_id=_pad_id(processor))
    roles = basic_roles(inputs, family, config)
    for i, example in enumerate(examples):
        roles[i] = _with_text_roles(roles[i], example, rendered[i][1], short[i], config, forced[i], i)
    sizes = tuple(picture.size for picture in pictures)
    prompt = Prompt(inputs, tuple(roles), tuple(examples), sizes, family, config, processor, forced)
    for i, example in enumerate(examples):
        if example.evidence:
            roles[i]["evidence"] = located(prompt, i, example.evidence)
        if example.distractors:
            roles[i]["distractor"] = located(prompt, i, example.distractors)
    return replace(prompt, roles=tuple(roles))


def _pad_id(processor: Any) -> int:
    pad = processor.tokenizer.pad_token_id
    return 0 if pad is None else pad


def append_tokens(inputs: Mapping[str, Any], extra: Sequence[Sequence[int]], *, pad_id: int) -> dict[str, Any]:
    """The batch with each example's own tokens after its last one, padded on the left again."""
    if not any(extra):
        return dict(inputs)
    fills = {"input_ids": pad_id, "attention_mask": 0, "mm_token_type_ids": 0, "token_type_ids": 0}
    grown = dict(inputs)
    for key, fill in fills.items():
        if key not in inputs:
            continue
        rows = []
        for row, real, ids in zip(inputs[key].tolist(), inputs["attention_mask"].tolist(), extra):
            added = list(ids) if key == "input_ids" else [int(key == "attention_mask")] * len(ids)
            rows.append([v for v, keep in zip(row, real) if keep] + added)
        width = max(map(len, rows))
        grown[key] = torch.tensor([[fill] * (width - len(r)) + r for r in rows], dtype=inputs[key].dtype)
    return grown


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


def _short_encoding(text: str, processor: Any, config: Any, n_pictures: int) -> list[tuple[int, Span]]:
    """(token id, character span) of the text before pictures are expanded."""
    encoded = processor.tokenizer(text, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    marks = ids.count(config.image_token_id)
    if marks != n_pictures:
        raise PictureCountError(
            f"{n_pictures} pictures for {marks} picture marks in the prompt",
            expected="one picture for each {'type': 'image'} part",
            fix="pass images=[...] in the order of the marks",
        )
    spans = encoded["offset_mapping"]
    refuse_unknown(processor.tokenizer, text, ids, spans)
    return list(zip(ids, map(tuple, spans)))


def refuse_unknown(tokenizer: Any, text: str, ids: Sequence[int], spans: Sequence[Span]) -> None:
    """Raise for words that the tokenizer has no token for; the message lists a small vocabulary whole."""
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in ids:
        return
    words = sorted({text[a:b] for i, (a, b) in zip(ids, spans) if i == unknown})
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


def _with_text_roles(
    roles: Roles,
    example: Example,
    spans: Mapping[str, list[Span]],
    short: Sequence[tuple[int, Span]],
    config: Any,
    forced: int,
    number: int,
) -> Roles:
    """`roles` with the groups that depend on the words: system, question, subject, suffix, last, output."""
    every = roles["all"]
    prompt_columns = every[: len(every) - forced]
    columns: list[tuple[int, Span]] = []  # text columns and their characters
    at, picture = 0, 0
    for token, span in short:
        if token == config.image_token_id:
            at += len(roles[f"image:{picture}"])
            picture += 1
        else:
            columns.append((prompt_columns[at] if at < len(prompt_columns) else -1, span))
            at += 1
    if at != len(prompt_columns):
        raise PlaceholderError(
            f"example {number}: the template's {len(short)} tokens account for {at} of {len(prompt_columns)} columns",
            expected="a processor that replaces each picture mark by that picture's tokens and changes nothing else",
            fix="report the processor's version; ready inputs can still be passed as they are",
        )

    def inside(chosen: list[Span]) -> tuple[int, ...]:
        return tuple(c for c, (a, b) in columns if b > a and any(a < high and b > low for low, high in chosen))

    roles = {**roles, "suffix": inside(spans["suffix"])}
    for name in ("system", "question"):
        if inside(spans[name]):
            roles[name] = inside(spans[name])
    roles["last"] = prompt_columns[-1:]
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


def to_device(inputs: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs on the model's device, pictures in its dtype."""
    moved = {}
    for key, value in inputs.items():
        if isinstance(value, Tensor):
            value = value.to(device, dtype if value.is_floating_point() else None)
        moved[key] = value
    return moved
