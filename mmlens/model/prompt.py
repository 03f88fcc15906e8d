"""Prompt: inputs encoded once, and the role of every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from mmlens.errors import PlaceholderError, PromptError, RegionError, TokenGroupError
from mmlens.evidence.locate import covered_tokens
from mmlens.evidence.regions import Box
from mmlens.families.base import Family, Item, Kind, Layout, Segments
from mmlens.model.guard import check_inputs
from mmlens.tokens import Group, TokenSet, resolve_group

Roles = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Example:
    """What one example of a prompt was built from."""

    messages: tuple[Mapping[str, Any], ...] = ()
    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()
    fps: float | None = None
    subject: str | tuple[int, int] | None = None
    answer: str | None = None
    evidence: tuple[Box, ...] = ()
    distractors: tuple[Box, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One or several questions as a model takes them, left padded, with the role of every token.

    Attributes
    ----------
    inputs
        What the model is called with: input_ids (batch, pos), attention_mask, pixel_values, ...
    roles
        For every example, the columns of each token group that has a meaning there.
    examples
        What each example was built from; empty entries for inputs that came ready-made.
    items
        Every picture and video, in prompt order over the batch.
    forced
        For every example, how many answer tokens stand at its end (teacher forcing of multi-token answers).
    """

    inputs: Mapping[str, Any] = field(repr=False)
    roles: tuple[Roles, ...] = field(repr=False)
    examples: tuple[Example, ...] = field(repr=False)
    items: tuple[Item, ...] = field(repr=False)
    family: Family = field(repr=False)
    config: Any = field(repr=False)
    processor: Any = field(repr=False)
    forced: tuple[int, ...] = ()

    @classmethod
    def from_inputs(cls, inputs: Mapping[str, Any], family: Family, config: Any, processor: Any) -> Prompt:
        """A prompt around a processor's own output; knows the groups that need no words: all, text, image, last, ..."""
        inputs = dict(inputs)
        check_inputs(family, config, inputs, processor)
        ids = inputs["input_ids"]
        if inputs.get("attention_mask") is None:
            inputs["attention_mask"] = torch.ones_like(ids)
        items = counted_items(inputs, family, config, processor)
        roles = tuple(basic_roles(inputs, items))
        blank = tuple(Example() for _ in roles)
        prompt = cls(inputs, roles, blank, tuple(items), family, config, processor, (0,) * len(roles))
        return prompt.with_layout_roles()

    def __len__(self) -> int:
        return len(self.roles)

    def __getitem__(self, example: int) -> Prompt:
        """One example of a batch as a prompt of its own, encoded again without padding."""
        from mmlens.model.encode import encode

        if not -len(self) <= example < len(self):
            raise IndexError(example)
        chosen = self.examples[example]
        if not chosen.messages:
            raise PromptError(
                "indexing a prompt that was made of ready inputs",
                expected="a prompt from vlm.prompt(...), which knows what it was built from",
                fix="encode the one example with the processor",
            )
        return encode([chosen], self.family, self.config, self.processor)

    def unforced(self) -> Prompt:
        """The same prompt without answer tokens at its end: what generation goes on from."""
        from mmlens.model.encode import encode

        if not any(self.forced):
            return self
        bare = [replace(example, answer=None) for example in self.examples]
        return encode(bare, self.family, self.config, self.processor)

    @property
    def n_columns(self) -> int:
        """Columns of the encoded batch."""
        return int(self.inputs["input_ids"].shape[1])

    @property
    def has_picture(self) -> bool:
        """Whether the tower will run."""
        return any(self.inputs.get(key) is not None for key in self.family.pixels.values())

    @property
    def kinds(self) -> set[Kind]:
        """What the prompt shows: pictures, videos, both or nothing."""
        return {item.kind for item in self.items}

    @property
    def real(self) -> Bool[Tensor, "batch pos"] | None:
        """Which columns are not padding; None where none is."""
        mask = self.inputs["attention_mask"].bool()
        return None if bool(mask.all()) else mask

    def layout(self, number: int) -> Layout:
        """Where a picture or video (numbered over the batch) lies in the tokens, the projector and the tower."""
        if not 0 <= number < len(self.items):
            raise TokenGroupError(
                f"image {number} of a prompt with {len(self.items)} pictures",
                expected=f"0 to {len(self.items) - 1}" if self.items else "a prompt with a picture",
                fix="count from 0, over the whole batch",
            )
        return self.family.layout(self.config, self.inputs, self.processor, self.items, number)

    def segments(self, layer: int) -> Segments:
        """What attends together in a tower block."""
        return self.family.segments(self.config, self.inputs, self.items, layer)

    def with_layout_roles(self) -> Prompt:
        """The same prompt with the groups tile:i.t, frame:t and newline, where the family has them."""
        roles = [dict(r) for r in self.roles]
        for number, item in enumerate(self.items):
            if item.kind == "image" and not self.family.tiled:
                continue
            mine = roles[item.example]
            index = sum(other.example == item.example for other in self.items[:number])
            found = self.layout(number)
            for t, tile in enumerate(found.tiles):
                mine[f"tile:{index}.{t}"] = tuple(item.columns[o] for o in tile)
            for grid in found.grids:
                for frame in grid.frames:
                    name = f"frame:{frame}"
                    mine[name] = tuple(sorted({*mine.get(name, ()), *(item.columns[o] for o in grid.tokens.index)}))
            if found.newlines:
                newlines = (item.columns[o] for o in found.newlines)
                mine["newline"] = tuple(sorted({*mine.get("newline", ()), *newlines}))
        return replace(self, roles=tuple(roles))

    def tokens(self, group: Group) -> TokenSet:
        """Positions of a token group in every example.

        Parameters
        ----------
        group
            A name ("question", "image-evidence", ...), an int, ints, a TokenSet, or a PerExample of these.

        Raises
        ------
        TokenGroupError
            For a name that has no meaning in this prompt.
        """
        return TokenSet(
            tuple(
                resolve_group(group, roles, length=self.n_columns, example=i, batch=len(self))
                for i, roles in enumerate(self.roles)
            )
        )

    def locate(self, region: Box, *, image: int = 0, example: int = 0) -> TokenSet:
        """The picture tokens that a region touches, with the fraction of each that it covers.

        Parameters
        ----------
        region
            In pixels of the source picture.
        image, example
            Which picture of which example.

        Raises
        ------
        RegionError
            For a region outside the picture. A region that the processor's crop removed gives an empty set with
            `.reason`.
        """
        if not isinstance(region, Box):
            raise RegionError(
                f"a region given as {type(region).__name__}",
                expected="a Box",
                fix="Box.from_xyxy(x0, y0, x1, y1) or Box.from_xywh(x, y, width, height)",
            )
        if not 0 <= example < len(self) or not 0 <= image < _n_pictures(self.roles[example]):
            shown = _n_pictures(self.roles[example]) if 0 <= example < len(self) else 0
            raise RegionError(
                f"image {image} of example {example}",
                expected=f"an example below {len(self)} and an image below {shown}",
                fix="count both from 0",
            )
        number = sum(_n_pictures(r) for r in self.roles[:example]) + image
        item = self.items[number]
        if item.size is None:
            raise RegionError(
                "a region in a prompt that was made of ready inputs, whose source picture is unknown",
                expected="a prompt from vlm.prompt(...)",
                fix="build it with vlm.prompt(question, images=[...])",
            )
        if item.kind == "video":
            raise RegionError(
                f"a box in image {image}, which is a video",
                expected="a picture",
                fix="take a frame's tokens by name: prompt.tokens('frame:3')",
            )
        views = [grid.view for grid in self.layout(number).grids]
        known = [view for view in views if view is not None]
        if len(known) < len(views):
            raise RegionError(
                f"a box in a picture of {item.size[0]} x {item.size[1]} pixels, whose tiles were shrunk together",
                expected="a picture small enough that every token holds its own pixels",
                fix="scale the picture down first",
            )
        found = covered_tokens(known, region, width=item.size[0], height=item.size[1])
        columns = self.roles[example][f"image:{image}"]
        positions: list[tuple[int, ...]] = [()] * len(self)
        coverage: list[tuple[float, ...]] = [()] * len(self)
        positions[example] = tuple(columns[o] for o in found)
        coverage[example] = tuple(found.values())
        reason = None if found else f"the processor's crop shows the model nothing of {region}"
        return TokenSet(tuple(positions), tuple(coverage), reason)


def _n_pictures(roles: Roles) -> int:
    return sum(name.startswith("image:") for name in roles)


def counted_items(inputs: Mapping[str, Any], family: Family, config: Any, processor: Any) -> list[Item]:
    """Pictures and videos of inputs that came ready-made, told apart by how many tokens each fills."""
    kinds = family.token_ids(config)
    counts = {kind: list(found) for kind, found in family.counts(config, inputs, processor).items()}
    items: list[Item] = []
    for example, row in enumerate(inputs["input_ids"].tolist()):
        columns = [i for i, token in enumerate(row) if token in kinds]
        while columns:
            kind = kinds[row[columns[0]]]
            n = counts[kind].pop(0) if counts.get(kind) else 0
            if not 0 < n <= len(columns):
                raise PlaceholderError(
                    f"example {example} has {len(columns)} more picture tokens, which no whole picture fills",
                    expected="whole pictures in every example, in prompt order",
                    fix="encode each text with its own pictures, in one call of the processor",
                )
            items.append(Item(kind, example, tuple(columns[:n])))
            columns = columns[n:]
    return items


def basic_roles(inputs: Mapping[str, Any], items: Sequence[Item]) -> list[Roles]:
    """The groups that need nothing but the encoded batch."""
    found: list[Roles] = []
    for example, real in enumerate(inputs["attention_mask"].tolist()):
        every = tuple(i for i, keep in enumerate(real) if keep)
        mine = [item.columns for item in items if item.example == example]
        image = {c for columns in mine for c in columns}
        roles: Roles = {"all": every, "text": tuple(i for i in every if i not in image), "last": every[-1:]}
        if image:
            roles["image"] = tuple(sorted(image))
        roles.update({f"image:{i}": columns for i, columns in enumerate(mine)})
        found.append(roles)
    return found


def located(prompt: Prompt, example: int, boxes: Sequence[Box]) -> tuple[int, ...]:
    """Columns under any of several boxes of the example's first picture."""
    found: set[int] = set()
    for box in boxes:
        found.update(prompt.locate(box, example=example).per_example[example])
    return tuple(sorted(found))


def require_prompt_group(prompt: Prompt, group: Group, what: str) -> tuple[tuple[int, ...], ...]:
    """Columns of a group for every example, as the keyword `what` of a run takes them."""
    try:
        return prompt.tokens(group).per_example
    except TokenGroupError as error:
        raise TokenGroupError(f"{what}={group!r}: {error.given}", expected=error.expected, fix=error.fix) from None
