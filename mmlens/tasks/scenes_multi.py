"""Built-in series of pictures with known answers: the asked object stands in a few of them, the needles."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmlens.evidence.regions import Box, PageRegion
from mmlens.tasks.base import Example, Split, Task
from mmlens.tasks.scenes import (
    COLORS,
    GRID,
    KINDS,
    SHAPES,
    Domain,
    Layout,
    cell_box,
    check_range,
    draw_masks,
    named,
    paint,
    stream,
)

MAX_IMAGES = 128


def draw_series(
    rng: np.random.Generator, domain: Domain, n_images: int, n_objects: int, needles: int
) -> tuple[Layout, int, int, list[tuple[int, int]]]:
    """A layout of the pictures, the asked kind and its colour, and where it stands: (picture, object) of each needle.

    No two objects of a picture share a kind or a cell; the asked kind stands nowhere but in the needles.
    """
    n_kinds = len(KINDS[domain])
    asked, color = int(rng.integers(n_kinds)), int(rng.integers(len(COLORS)))
    kinds = rng.permuted(np.tile(np.arange(n_kinds - 1), (n_images, 1)), axis=1)[:, :n_objects]
    kinds = kinds + (kinds >= asked)
    cells = rng.permuted(np.tile(np.arange(GRID * GRID), (n_images, 1)), axis=1)[:, :n_objects]
    colors = rng.integers(0, len(COLORS), (n_images, n_objects))
    pictures = np.sort(rng.permutation(n_images)[:needles])
    objects = rng.integers(0, n_objects, needles)
    kinds[pictures, objects], colors[pictures, objects] = asked, color
    return Layout(kinds, colors, cells), asked, color, list(zip(pictures.tolist(), objects.tolist()))


class ScenesMultiTask(Task):
    """ "What color is the star?" about several pictures drawn here; the star's cells in the needles are the evidence.

    Parameters
    ----------
    domain
        "shapes" (scenes/multi) or "digits" (scenes/multi:digits, handwriting that no training picture used).
    n_images
        Pictures of each example, 1 to 128.
    n_objects
        Objects in each picture, 1 to 7.
    needles
        Pictures that hold the asked object, in the same colour; the others hold none of its kind. 1 to `n_images`.
    """

    candidates = tuple(COLORS)
    chance = 1 / len(COLORS)
    batch = 10

    def __init__(self, domain: Domain, *, n_images: int = 4, n_objects: int = 4, needles: int = 2) -> None:
        check_range("n_images", n_images, 1, MAX_IMAGES, "leave n_images= out, or give one")
        check_range("n_objects", n_objects, 1, len(SHAPES) - 1, "one kind is kept for the needles")
        check_range("needles", needles, 1, n_images, "give at least as many n_images=")
        self.domain, self.n_images, self.n_objects, self.needles = domain, n_images, n_objects, needles
        self.name = named("multi", domain)

    def identity(self) -> dict[str, Any]:
        """Name and options."""
        return {
            "name": self.name,
            "n_images": self.n_images,
            "n_objects": self.n_objects,
            "needles": self.needles,
        }

    def example(self, split: Split, index: int, seed: int) -> Example:
        """Series number `index` of a half."""
        rng = stream(split, self.domain, index, seed, 2)
        layout, asked, color, needles = draw_series(rng, self.domain, self.n_images, self.n_objects, self.needles)
        pictures = paint(rng, self.domain, layout, draw_masks(rng, self.domain, layout.kinds))
        kind = KINDS[self.domain][asked]
        regions = {
            (picture, i): PageRegion(picture, Box.from_xyxy(*cell_box(cell)))
            for picture, row in enumerate(layout.cells.tolist())
            for i, cell in enumerate(row)
        }
        return Example(
            id=f"{split}/{seed}/{index}",
            question=f"What color is the {kind}?",
            answers=(tuple(COLORS)[color],),
            images=tuple(pictures),
            subject=kind,
            evidence=tuple(regions[at] for at in needles),
            distractors=tuple(region for at, region in regions.items() if at not in needles),
        )
