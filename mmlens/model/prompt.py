"""Prompt: inputs encoded once, and the role of every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from mmlens.errors import PlaceholderError, PromptError, TokenGroupError
from mmlens.evidence.regions import Region
from mmlens.evidence.views import Kind, PictureViews
from mmlens.families.base import Family
from mmlens.families.layout import Item, Layout, Segments
from mmlens.model import places
from mmlens.model.guard import check_inputs
from mmlens.tokens import Group, TokenSet, resolve_group

Roles = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Example:
    """What one example of a prompt was built from."""

    messages: tuple[Mapping[str, Any], ...] = ()
    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()
    subject: str | tuple[int, int] | None = None
    answer: str | None = None
    evidence: tuple[Region, ...] = ()
    distractors: tuple[Region, ...] = ()


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
    images_kwargs
        Options of the picture processor that the prompt was encoded with.
    """

    inputs: Mapping[str, Any] = field(repr=False)
    roles: tuple[Roles, ...] = field(repr=False)
    examples: tuple[Example, ...] = field(repr=False)
    items: tuple[Item, ...] = field(repr=False)
    family: Family = field(repr=False)
    config: Any = field(repr=False)
    processor: Any = field(repr=False)
    forced: tuple[int, ...] = ()
    images_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)

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
        return encode([chosen], self.family, self.config, self.processor, self.images_kwargs)

    def unforced(self) -> Prompt:
        """The same prompt without answer tokens at its end: what generation goes on from."""
        from mmlens.model.encode import encode

        if not any(self.forced):
            return self
        bare = [replace(example, answer=None) for example in self.examples]
        return encode(bare, self.family, self.config, self.processor, self.images_kwargs)

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

    def _item(self, number: int) -> Item:
        if not 0 <= number < len(self.items):
            raise TokenGroupError(
                f"image {number} of a prompt with {len(self.items)} pictures",
                expected=f"0 to {len(self.items) - 1}" if self.items else "a prompt with a picture",
                fix="count from 0, over the whole batch",
            )
        return self.items[number]

    def layout(self, number: int) -> Layout:
        """Where a picture or video (numbered over the batch) lies in the tokens, the projector and the tower."""
        item = self._item(number)
        found = self.family.layout(self.config, self.inputs, self.processor, self.items, number)
        if item.size is None:
            return found
        views = {view.name: view for view in self.views(number).views}
        return replace(found, grids=tuple(replace(grid, view=views[grid.name]) for grid in found.grids))

    def views(self, number: int) -> PictureViews:
        """What the model is shown of a picture or video (numbered over the batch): its looks, and their tokens.

        Raises
        ------
        RegionError
            For ready inputs, whose source nobody knows.
        GeometryError
            If the picture's placeholders are not as many as its family's arithmetic says.
        """
        self._item(number)
        return places.views_of(self, number)

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

    def locate(
        self, region: Any, *, image: int | None = None, example: int = 0, coverage: float = 0.0, views: str = "all"
    ) -> TokenSet:
        """The picture tokens that a region touches, with the fraction of each that it covers.

        Parameters
        ----------
        region
            Box, Polygon, Mask, Tube (videos), Page, PageRegion, or a list of them: their union.
        image, example
            Which picture of which example; by default the region's own (Page, PageRegion), else the first.
        coverage
            0 takes every token that the region touches; above it, tokens of which at least this fraction is covered.
        views
            "all" looks at the picture, its "tiles" only (the finest look), or its "thumbnail".

        Returns
        -------
        TokenSet
            `.positions`, `.coverage` beside them, `.by_view`. A region of which the model is shown nothing (cropped
            away, between two frames) gives an empty set with `.reason`.

        Raises
        ------
        RegionError
            For a region outside the picture.

        Examples
        --------
        >>> from mmlens import Box, HookedVLM, load_task
        >>> vlm = HookedVLM.from_pretrained("toy-qwen3-vl")
        >>> picture = load_task("scenes/image").example("rank", 0, 0).images[0]
        >>> prompt = vlm.prompt("what color is the star ?", images=[picture])
        >>> where = prompt.locate(Box.from_xyxy(0, 0, 32, 8))
        >>> where.positions, where.coverage
        ((4, 5), (0.5, 0.5))
        """
        return places.locate(self, region, image=image, example=example, coverage=coverage, views=views)

    def heatmap(self, values: Any, *, image: int = 0, example: int = 0, views: str = "all") -> np.ndarray:
        """Any per-token numbers laid over the source picture.

        Parameters
        ----------
        values
            One for each column of the batch (a row of an attention pattern) or each of the picture's own tokens; or a
            TokenSet, whose coverage is drawn.
        image, example
            Which picture or video of which example.
        views
            Which looks are averaged: "all", "tiles" or "thumbnail".

        Returns
        -------
        np.ndarray
            (height, width) of the source, or (frame, height, width) for the frames that the model is shown. A pixel
            has the mean of the tokens that see it, by area; NaN where none does.
        """
        return places.heatmap(self, values, image=image, example=example, views=views)

    def pixels_of(self, position: int, *, example: int = 0) -> places.Place:
        """What one picture token sees: its picture, view, box in source pixels, and frames.

        Raises
        ------
        RegionError
            For a column that is no picture token, or a token that carries no pixels.
        """
        return places.pixels_of(self, position, example=example)


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


def require_prompt_group(prompt: Prompt, group: Group, what: str) -> tuple[tuple[int, ...], ...]:
    """Columns of a group for every example, as the keyword `what` of a run takes them."""
    try:
        return prompt.tokens(group).per_example
    except TokenGroupError as error:
        raise TokenGroupError(f"{what}={group!r}: {error.given}", expected=error.expected, fix=error.fix) from None
