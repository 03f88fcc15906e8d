"""From places in a picture or video to a prompt's columns, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mmlens.errors import GeometryError, OptionError, RegionError, TokenGroupError
from mmlens.evidence import one_picture
from mmlens.evidence.locate import Found, find
from mmlens.evidence.regions import Box, Region, as_regions, picture_of
from mmlens.evidence.views import PictureViews
from mmlens.families.base import Source
from mmlens.families.layout import Item
from mmlens.tokens import TokenSet

if TYPE_CHECKING:
    from mmlens.model.prompt import Prompt


@dataclass(frozen=True)
class Place:
    """What one picture token sees.

    Attributes
    ----------
    image
        Which picture of its example.
    view
        Which look at it: "whole", "tiles", "thumbnail", "crop:0", "frame:3".
    box
        Pixels of the source picture; cut to the picture, so that a cell half in padding is half as large.
    row, col
        Its cell in the view's grid.
    frames, seconds
        For a video: source frames that it shows, and their times.
    """

    image: int
    view: str
    box: Box
    row: int
    col: int
    frames: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()


def item_number(prompt: Prompt, image: int, example: int) -> int:
    """Which item of the batch picture `image` of an example is."""
    mine = [n for n, item in enumerate(prompt.items) if item.example == example]
    whole = all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in (image, example))
    if not whole or not 0 <= example < len(prompt) or not 0 <= image < len(mine):
        raise RegionError(
            f"image {image!r} of example {example!r}",
            expected=f"an example below {len(prompt)} and an image below {len(mine)}",
            fix="count both from 0",
        )
    return mine[image]


def views_of(prompt: Prompt, number: int) -> PictureViews:
    """Worked out: the looks at an item, whose count must be that of its placeholders."""
    item = prompt.items[number]
    if item.size is None:
        raise RegionError(
            "a region in a prompt that was made of ready inputs, whose source picture is unknown",
            expected="a prompt from vlm.prompt(...)",
            fix="build it with vlm.prompt(question, images=[...])",
        )
    family = prompt.family
    given = family.given(prompt.config, prompt.inputs, prompt.processor, prompt.items, number)
    n_frames = 0 if item.sampling is None else len(item.sampling.indices)
    options = prompt.images_kwargs if item.kind == "image" else {}
    source = Source(item.size, item.kind, n_frames, options=options, **given)
    shown = family.views(prompt.processor, source, prompt.config)
    if shown.count != len(item.columns):
        raise GeometryError(
            f"{len(item.columns)} placeholders for a {item.kind} of {item.size[0]} x {item.size[1]} pixels, where "
            f"{family.name}'s arithmetic gives {shown.count}",
            expected="the two to be equal; otherwise no token's place is known",
            fix="set the processor's options in vlm.prompt(images_kwargs=...), not on its parts; if they agree, report "
            "the processor's version",
        )
    return shown


def _columns(prompt: Prompt, item: Item, ordinals: Mapping[int, float], reason: str | None = None) -> TokenSet:
    """Ordinals of one item as a set over the whole batch."""
    empty: list[tuple] = [()] * len(prompt)
    positions, shares = list(empty), list(empty)
    positions[item.example] = tuple(map(item.columns.__getitem__, ordinals))
    shares[item.example] = tuple(ordinals.values())
    return TokenSet(tuple(positions), tuple(shares), reason)


def search(
    prompt: Prompt, regions: Sequence[Region], *, image: int, example: int, coverage: float, views: str
) -> tuple[Item, Found]:
    """The tokens of one picture that some regions touch."""
    number = item_number(prompt, image, example)
    item = prompt.items[number]
    shown = prompt.views(number)
    return item, find(shown, regions, sampling=item.sampling, coverage=coverage, views=views)


def locate(prompt: Prompt, region: Any, *, image: int | None, example: int, coverage: float, views: str) -> TokenSet:
    """See `Prompt.locate`."""
    regions = as_regions(region)
    item, found = search(
        prompt, regions, image=one_picture(regions, image), example=example, coverage=coverage, views=views
    )
    whole = _columns(prompt, item, found.shares, found.reason)
    several = len(found.by_view) > 1
    by_view = {name: _columns(prompt, item, mine) if several else whole for name, mine in found.by_view.items()}
    return TokenSet(whole.per_example, whole.shares, whole.reason, by_view)


def located(prompt: Prompt, example: int, regions: Sequence[Region]) -> tuple[int, ...]:
    """Columns of an example under any of several regions; each on its own picture, plain ones on the first."""
    by_picture: dict[int, list[Region]] = {}
    for region in regions:
        by_picture.setdefault(picture_of(region, 0), []).append(region)
    found: set[int] = set()
    for image, mine in by_picture.items():
        item, here = search(prompt, mine, image=image, example=example, coverage=0.0, views="all")
        found.update(item.columns[o] for o in here.shares)
    return tuple(sorted(found))


def _token_values(prompt: Prompt, values: Any, item: Item) -> np.ndarray:
    """A value for each of the item's own tokens, from any per-token vector."""
    if isinstance(values, TokenSet) and len(values.per_example) == len(prompt):
        shares = values.shares[item.example] if values.shares else (1.0,) * len(values.per_example[item.example])
        held = dict(zip(values.per_example[item.example], shares))
        return np.array([held.get(c, 0.0) for c in item.columns])
    try:
        array = values.detach().float().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values, float)
    except (TypeError, ValueError):
        array = np.empty((0, 0, 0))
    if array.ndim == 2 and array.shape == (len(prompt), prompt.n_columns):
        array = array[item.example]
    if array.shape == (prompt.n_columns,):
        return array[list(item.columns)].astype(float)
    if array.shape == (len(item.columns),):
        return array.astype(float)
    raise OptionError(
        f"values of shape {array.shape} for a heat map",
        expected=f"one for each column of the batch ({prompt.n_columns}) or each of the picture's own tokens "
        f"({len(item.columns)}), or a TokenSet",
        fix="take one row: pattern[0, head, -1], or its mean",
    )


def heatmap(prompt: Prompt, values: Any, *, image: int, example: int, views: str) -> np.ndarray:
    """See `Prompt.heatmap`."""
    number = item_number(prompt, image, example)
    item, shown = prompt.items[number], prompt.views(number)
    held = _token_values(prompt, values, item)
    if views not in ("all", "tiles", "thumbnail"):
        raise OptionError(f"views={views!r}", expected="'all', 'tiles' or 'thumbnail'", fix="leave it out for all")
    width, height = shown.size
    layers: dict[int, list[np.ndarray]] = {}
    for view in shown.chosen(views):
        painted = view.painted(held[view.ordinals], width, height)
        for frame in view.frames or (-1,):
            layers.setdefault(frame, []).append(painted)
    maps = [_mean(layers[frame]) for frame in sorted(layers)]
    return np.stack(maps) if shown.kind == "video" else maps[0]


def _mean(layers: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over the looks that see a pixel; NaN where none does."""
    if len(layers) == 1:
        return layers[0]
    stack = np.stack(layers)
    seen = ~np.isnan(stack)
    with np.errstate(invalid="ignore"):
        return np.where(seen, stack, 0.0).sum(0) / seen.sum(0)


def pixels_of(prompt: Prompt, position: int, *, example: int) -> Place:
    """See `Prompt.pixels_of`."""
    n = prompt.n_columns
    if not isinstance(position, int | np.integer) or isinstance(position, bool) or not -n <= position < n:
        raise TokenGroupError(f"position {position!r}", expected=f"a column of the batch, below {n}", fix="an int")
    column = int(position) % n
    mine = [i for i, item in enumerate(prompt.items) if item.example == example]
    for image, number in enumerate(mine):
        item = prompt.items[number]
        if column in item.columns:
            return _place(prompt.views(number), item, image, item.columns.index(column), column)
    raise RegionError(
        f"column {column} of example {example}, which is no picture token",
        expected="a column of the group 'image'",
        fix=f"prompt.tokens('image').per_example[{example}] lists them",
    )


def _place(shown: PictureViews, item: Item, image: int, ordinal: int, column: int) -> Place:
    width, height = shown.size
    for view in shown.views:
        at = np.argwhere(view.ordinals == ordinal)
        if not len(at):
            continue
        x0, y0, x1, y1 = view.source_box(ordinal)
        x0, y0, x1, y1 = max(x0, 0.0), max(y0, 0.0), min(x1, float(width)), min(y1, float(height))
        if x0 >= x1 or y0 >= y1:
            raise RegionError(
                f"column {column}, whose cell holds nothing but padding",
                expected="a token that shows a part of the picture",
                fix="prompt.locate(region) gives those",
            )
        seen = [item.sampling.indices[f] for f in view.frames] if item.sampling else []
        times = [item.sampling.times[f] for f in view.frames] if item.sampling else []
        return Place(image, view.name, Box(x0, y0, x1, y1), int(at[0, 0]), int(at[0, 1]), tuple(seen), tuple(times))
    raise RegionError(
        f"column {column}, which carries no pixels (a newline or a summary token)",
        expected="a token that shows a part of the picture",
        fix="leave out the group 'newline'",
    )
