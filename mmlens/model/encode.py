"""Building prompts: chat template, processor, and which characters (hence tokens) play which part."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmlens.errors import (
    NoProcessorError,
    OptionError,
    PictureCountError,
    PictureError,
    PlaceholderError,
    PromptError,
)
from mmlens.evidence.locate import Sampling
from mmlens.evidence.regions import as_regions
from mmlens.families.base import Family, checked_options
from mmlens.families.layout import Item
from mmlens.model.guard import check_inputs
from mmlens.model.pictures import load_picture
from mmlens.model.places import located
from mmlens.model.prompt import Example, Prompt, basic_roles
from mmlens.model.video import Video, VideoFile, frames_of, processor_options, read_video
from mmlens.model.wording import Span, refuse_unknown, render, tokenize, with_text_roles


def make_examples(question: Any, images: Any, *, fps: Any = None, max_frames: Any = None, **more: Any) -> list[Example]:
    """Examples from the forms that `vlm.prompt` takes; frame options without any video raise."""
    built = _examples(question, images, fps=fps, max_frames=max_frames, **more)
    if (fps, max_frames) != (None, None) and not any(e.videos for e in built):
        raise OptionError(
            f"fps={fps}, max_frames={max_frames} for a prompt without a video",
            expected="videos= with them",
            fix="leave them out",
        )
    return built


def _examples(
    question: Any,
    images: Any,
    *,
    videos: Any = None,
    fps: float | None = None,
    max_frames: int | None = None,
    system: str | None,
    subject: Any,
    answer: Any,
    evidence: Any,
    distractors: Any,
) -> list[Example]:
    """Examples from the forms that `vlm.prompt` takes: a question, chat messages, or a list of either."""
    if _is_chat(question) or isinstance(question, str):
        regions = lambda x: () if x is None else as_regions(x)  # noqa: E731
        pictures = [] if images is None else list(images) if isinstance(images, list | tuple) else [images]
        clips = [] if videos is None else list(videos) if isinstance(videos, list | tuple) else [videos]
        return [
            Example(
                _messages(question, pictures, clips, system),
                tuple(load_picture(p) for p in pictures or _inside(question, "image")),
                tuple(_video(v, fps=fps, max_frames=max_frames) for v in clips or _inside(question, "video")),
                subject,
                answer,
                regions(evidence),
                regions(distractors),
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
        images=images, videos=videos, subject=subject, answer=answer, evidence=evidence, distractors=distractors
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
    return [
        _examples(q, **{k: v[i] for k, v in columns.items()}, system=system, fps=fps, max_frames=max_frames)[0]
        for i, q in enumerate(question)
    ]


def _video(video: Any, *, fps: float | None, max_frames: int | None) -> Video:
    """A video to show: a file's frames at `fps`, or frames as they are."""
    if isinstance(video, str | os.PathLike | VideoFile):
        return read_video(video, fps=2.0 if fps is None else fps, max_frames=64 if max_frames is None else max_frames)
    if max_frames is not None or (fps is not None and isinstance(video, Video)):
        raise OptionError(
            f"fps={fps}, max_frames={max_frames} for frames that are already chosen",
            expected="a video file with them (a list of frames may say its fps)",
            fix="leave them out, or pass the file's path",
        )
    return video if isinstance(video, Video) else frames_of(video, fps=2.0 if fps is None else fps)


def _is_chat(question: Any) -> bool:
    return isinstance(question, list | tuple) and bool(question) and isinstance(question[0], Mapping)


def _inside(question: Any, kind: str) -> list[Any]:
    """Pictures or videos that chat messages carry themselves."""
    if isinstance(question, str):
        return []
    parts = [p for m in question if not isinstance(m["content"], str) for p in m["content"]]
    return [p[kind] for p in parts if p.get("type") == kind and kind in p]


def _messages(
    question: Any, pictures: Sequence[Any], videos: Sequence[Any], system: str | None
) -> tuple[dict[str, Any], ...]:
    """Chat messages with every content as a list of parts and no picture data in them."""
    if isinstance(question, str):
        shown = [{"type": "image"}] * len(pictures) + [{"type": "video"}] * len(videos)
        content = [*shown, {"type": "text", "text": question}]
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


def encode(
    examples: Sequence[Example],
    family: Family,
    config: Any,
    processor: Any,
    images_kwargs: Mapping[str, Any] | None = None,
) -> Prompt:
    """The prompt of some examples: template, processor, roles, evidence."""
    if processor is None:
        raise NoProcessorError(
            "a question for a model that was wrapped without its processor",
            expected="a processor",
            fix="HookedVLM.from_model(model, processor=processor), or pass the processor's own output instead",
        )
    rendered = [render(example, processor) for example in examples]
    texts = [text for text, _ in rendered]
    for text, example in zip(texts, examples):
        _check_marks(text, example, family, processor)
    options = checked_options(processor, images_kwargs)
    if options and not any(e.images for e in examples):
        raise OptionError(
            f"images_kwargs={images_kwargs} for a prompt without pictures",
            expected="pictures: these options do not reach videos",
            fix="leave it out; options of the video processor are set on it",
        )
    encoded = _call(processor, texts, examples, family, options)
    offsets = torch.as_tensor(encoded.pop("offset_mapping")).tolist()
    replaced = encoded.pop("text_replacement_offsets", None)
    inputs = {k: torch.as_tensor(v) for k, v in encoded.items()}
    check_inputs(family, config, inputs, processor)
    for example in examples:
        if example.answer is not None and not isinstance(example.answer, str):
            raise PromptError(f"answer={example.answer!r}", expected="a text", fix=f"answer={str(example.answer)!r}")
    answers = [tokenize(processor.tokenizer, e.answer) if e.answer is not None else [] for e in examples]
    forced = tuple(max(len(a) - 1, 0) for a in answers)
    real = inputs["attention_mask"].bool()
    spans = [[tuple(s) for s, keep in zip(row, kept) if keep] for row, kept in zip(offsets, real.tolist())]
    inputs = append_tokens(inputs, [a[:-1] for a in answers], pad_id=_pad_id(processor))
    # without any picture some processors return an empty tensor here, not a list for each text
    rows = replaced if isinstance(replaced, list) and len(replaced) == len(texts) else [()] * len(texts)
    expanded = [_Expanded(text, list(row)) for text, row in zip(texts, rows)]
    every = [[i for i, keep in enumerate(row) if keep] for row in inputs["attention_mask"].tolist()]
    columns = [row[: len(row) - n] for row, n in zip(every, forced)]
    for i, ids in enumerate(inputs["input_ids"].tolist()):
        told = [ids[c] for c in columns[i]]
        # what the processor itself writes around frames (times) is not the user's to change
        refuse_unknown(processor.tokenizer, expanded[i].text, told, spans[i], ours=expanded[i].inserted)
    items = _items(examples, family, config, inputs, expanded, columns, spans)
    roles = basic_roles(inputs, items)
    for i, example in enumerate(examples):
        where = list(zip(columns[i], spans[i]))
        roles[i] = with_text_roles(roles[i], example, expanded[i].moved(rendered[i][1]), where, forced[i])
    prompt = Prompt(inputs, tuple(roles), tuple(examples), tuple(items), family, config, processor, forced, options)
    prompt = prompt.with_layout_roles()
    for i, example in enumerate(examples):
        if example.evidence:
            prompt.roles[i]["evidence"] = located(prompt, i, example.evidence)
        if example.distractors:
            prompt.roles[i]["distractor"] = located(prompt, i, example.distractors)
    return prompt


def _call(
    processor: Any,
    texts: Sequence[str],
    examples: Sequence[Example],
    family: Family,
    images_kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """The processor's output as tensors and lists."""
    pictures = [list(e.images) for e in examples]
    videos = [video for e in examples for video in e.videos]
    options: dict[str, Any] = {}
    if any(pictures):
        if images_kwargs:
            options["images_kwargs"] = dict(images_kwargs)
        options["images"] = pictures if family.nested_pictures else [p for of_one in pictures for p in of_one]
    if videos:
        options |= processor_options(videos)
    try:
        return dict(
            processor(
                text=list(texts),
                padding=True,
                padding_side="left",
                return_tensors="pt",
                return_offsets_mapping=True,
                return_text_replacement_offsets=True,
                **options,
            )
        )
    except (ValueError, TypeError, RuntimeError) as error:
        told = [f"{p.width} x {p.height}" for of_one in pictures for p in of_one]
        told += [f"{len(v)} frames of {v.size[0]} x {v.size[1]}" for v in videos]
        what = "videos" if videos else "pictures"
        fix = "crop or scale them first" + (f", or check images_kwargs={dict(images_kwargs)}" if images_kwargs else "")
        if videos:
            fix = "give each at least two frames; this processor may take clips of one length only (max_frames=)"
        raise PictureError(
            f"the processor refuses {what} of {', '.join(told) or 'no size'}: {str(error).strip().splitlines()[0]}",
            expected=f"{what} that this model's processor takes",
            fix=fix,
        ) from error


def _check_marks(text: str, example: Example, family: Family, processor: Any) -> None:
    """As many marks in the rendered prompt as pictures and videos, and not both kinds at once."""
    if example.images and example.videos:
        raise PromptError(
            "pictures and videos in one prompt",
            expected="one kind: the tower runs once for each kind, so its hooks would mean two things",
            fix="ask about the pictures and the video in two prompts",
        )
    if example.videos and not family.has_video:
        raise PromptError(
            f"a video for {family.name}", expected="pictures: this family takes no videos", fix="images=[frame, ...]"
        )
    for kind, noun, given in (("image", "picture", example.images), ("video", "video", example.videos)):
        mark = getattr(processor, f"{kind}_token", None)
        found = 0 if mark is None else text.count(mark)
        if found != len(given):
            raise PictureCountError(
                f"{len(given)} {noun}s for {found} {noun} marks in the prompt",
                expected=f"one {noun} for each {{'type': '{kind}'}} part",
                fix=f"pass {kind}s=[...] in the order of the marks",
            )


class _Expanded:
    """A rendered text after the processor put every picture's own tokens in place of its mark."""

    def __init__(self, text: str, replaced: Sequence[Mapping[str, Any]]) -> None:
        self.pictures = [(r["type"], tuple(r["new_span"])) for r in replaced]
        self._gains = [(r["span"][1], len(r["replacement"]) - (r["span"][1] - r["span"][0])) for r in replaced]
        parts, at = [], 0
        for r in replaced:
            parts += [text[at : r["span"][0]], r["replacement"]]
            at = r["span"][1]
        self.text = "".join([*parts, text[at:]])

    def inserted(self, span: Span) -> bool:
        """Whether characters stand inside what replaced a mark."""
        return any(low <= span[0] and span[1] <= high and span[1] > span[0] for _, (low, high) in self.pictures)

    def moved(self, spans: Mapping[str, list[Span]]) -> dict[str, list[Span]]:
        """Spans of the rendered text as spans of the expanded one."""

        def shift(at: int) -> int:
            return at + sum(gain for end, gain in self._gains if end <= at)

        return {
            name: [(shift(a), shift(b - 1) + 1 if b > a else shift(b)) for a, b in of] for name, of in spans.items()
        }


def _items(
    examples: Sequence[Example],
    family: Family,
    config: Any,
    inputs: Mapping[str, Any],
    expanded: Sequence[_Expanded],
    columns: Sequence[Sequence[int]],
    spans: Sequence[Sequence[Span]],
) -> list[Item]:
    """Every picture and video with its columns, told by the characters that the processor put in its place."""
    placeholders = family.token_ids(config)
    items: list[Item] = []
    for i, example in enumerate(examples):
        ids = inputs["input_ids"][i].tolist()
        for (kind, (low, high)), source in zip(expanded[i].pictures, (*example.images, *example.videos)):
            sampling = Sampling(source.indices, source.times) if isinstance(source, Video) else None
            inside = [c for c, (a, b) in zip(columns[i], spans[i]) if a >= low and b <= high and b > a]
            items.append(Item(kind, i, tuple(c for c in inside if ids[c] in placeholders), source.size, sampling))
    found = sum(len(item.columns) for item in items)
    filled = family.filled(config, inputs, None)
    if found != filled:
        raise PlaceholderError(
            f"{found} picture tokens where the processor put {len(items)} pictures, whose features fill {filled}",
            expected="as many placeholders as features",
            fix="report the processor's version; ready inputs can still be passed as they are",
        )
    return items


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


def to_device(inputs: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs on the model's device, pictures in its dtype."""
    moved = {}
    for key, value in inputs.items():
        if isinstance(value, Tensor):
            value = value.to(device, dtype if value.is_floating_point() else None)
        moved[key] = value
    return moved
