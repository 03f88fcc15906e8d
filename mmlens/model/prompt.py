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
from mmlens.families.base import Family
from mmlens.model.guard import check_inputs
from mmlens.tokens import Group, TokenSet, resolve_group

Roles = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Example:
    """What one example of a prompt was built from."""

    messages: tuple[Mapping[str, Any], ...] = ()
    images: tuple[Any, ...] = ()
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
    sizes
        (width, height) in pixels of every picture, in prompt order over the batch.
    forced
        For every example, how many answer tokens stand at its end (teacher forcing of multi-token answers).
    """

    inputs: Mapping[str, Any] = field(repr=False)
    roles: tuple[Roles, ...] = field(repr=False)
    examples: tuple[Example, ...] = field(repr=False)
    sizes: tuple[tuple[int, int], ...]
    family: Family = field(repr=False)
    config: Any = field(repr=False)
    processor: Any = field(repr=False)
    forced: tuple[int, ...] = ()

    @classmethod
    def from_inputs(cls, inputs: Mapping[str, Any], family: Family, config: Any, processor: Any) -> Prompt:
        """A prompt around a processor's own output; knows the groups all, text, image, image:i and last."""
        inputs = dict(inputs)
        check_inputs(family, config, inputs)
        ids = inputs["input_ids"]
        if inputs.get("attention_mask") is None:
            inputs["attention_mask"] = torch.ones_like(ids)
        roles = tuple(basic_roles(inputs, family, config))
        blank = tuple(Example() for _ in roles)
        return cls(inputs, roles, blank, (), family, config, processor, (0,) * len(roles))

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
        return self.inputs.get("pixel_values") is not None

    @property
    def real(self) -> Bool[Tensor, "batch pos"] | None:
        """Which columns are not padding; None where none is."""
        mask = self.inputs["attention_mask"].bool()
        return None if bool(mask.all()) else mask

    @property
    def picture_counts(self) -> list[int]:
        """Tokens of every picture, in prompt order over the batch."""
        return self.family.picture_tokens(self.config, self.inputs)

    def picture_columns(self, picture: int) -> tuple[int, tuple[int, ...]]:
        """The example that shows a picture (numbered over the batch), and the columns of its tokens."""
        numbered = [
            (example, positions)
            for example, roles in enumerate(self.roles)
            for positions in (roles[f"image:{i}"] for i in range(_n_pictures(roles)))
        ]
        return numbered[picture]

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
        if not self.sizes:
            raise RegionError(
                "a region in a prompt that was made of ready inputs, whose source picture is unknown",
                expected="a prompt from vlm.prompt(...)",
                fix="build it with vlm.prompt(question, images=[...])",
            )
        width, height = self.sizes[number]
        views = self.family.views(self.processor, self.inputs, number, (width, height))
        found = covered_tokens(views, region, width=width, height=height)
        columns = self.roles[example][f"image:{image}"]
        positions: list[tuple[int, ...]] = [()] * len(self)
        coverage: list[tuple[float, ...]] = [()] * len(self)
        positions[example] = tuple(columns[o] for o in found)
        coverage[example] = tuple(found.values())
        reason = None if found else f"the processor's crop shows the model nothing of {region}"
        return TokenSet(tuple(positions), tuple(coverage), reason)


def _n_pictures(roles: Roles) -> int:
    return sum(name.startswith("image:") for name in roles)


def basic_roles(inputs: Mapping[str, Any], family: Family, config: Any) -> list[Roles]:
    """The groups that need nothing but the encoded batch."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    counts = list(family.picture_tokens(config, inputs))
    found: list[Roles] = []
    for example, (row, real) in enumerate(zip(ids.tolist(), mask.tolist())):
        every = tuple(i for i, keep in enumerate(real) if keep)
        image = tuple(i for i in every if row[i] == config.image_token_id)
        roles: Roles = {"all": every, "text": tuple(i for i in every if row[i] != config.image_token_id)}
        roles["last"] = every[-1:]
        if image:
            roles["image"] = image
        start, number = 0, 0
        while start < len(image):
            n = counts.pop(0) if counts else 0
            if not 0 < n <= len(image) - start:
                raise PlaceholderError(
                    f"example {example} has {len(image)} picture tokens, which no number of whole pictures fills",
                    expected="whole pictures in every example, in prompt order",
                    fix="encode each text with its own pictures, in one call of the processor",
                )
            roles[f"image:{number}"] = image[start : start + n]
            start, number = start + n, number + 1
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
