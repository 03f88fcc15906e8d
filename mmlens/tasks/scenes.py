"""Built-in pictures with known answers: coloured shapes, or tinted handwriting, on a 4 x 4 grid."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int, UInt8
from numpy import ndarray

from mmlens.errors import OptionError
from mmlens.evidence.regions import Box
from mmlens.tasks.base import SPLITS, Example, Split, Task, check_index

Domain = Literal["shapes", "digits"]

GRID = 4  # cells a side
CELL = 32  # pixels a cell
SIDE = GRID * CELL  # pixels a picture

SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond", "ring", "bar")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLORS = {
    "red": (230, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (240, 220, 40),
    "purple": (150, 50, 200),
    "orange": (250, 140, 30),
    "cyan": (50, 210, 220),
    "pink": (250, 150, 190),
}
KINDS: dict[Domain, tuple[str, ...]] = {"shapes": SHAPES, "digits": DIGITS}
BACKGROUND: dict[Domain, float] = {"shapes": 0.0, "digits": 0.5}
NOISE = 0.03  # standard deviation of the pixel noise, as a fraction of full scale
N_TRAIN_DIGITS = 1437  # of the 1,797 bundled digits; the other 360 are never trained on


@cache
def palette() -> Float[ndarray, "color 3"]:
    """The eight colours, each channel in 0..1, in the order of `COLORS`."""
    return np.array(list(COLORS.values()), dtype=np.float32) / 255


@cache
def shape_masks() -> Float[ndarray, "kind 32 32"]:
    """One antialiased opacity mask in 0..1 for each of `SHAPES`."""
    from PIL import Image, ImageDraw

    side, margin = CELL * 4, CELL // 2
    masks = []
    for shape in SHAPES:
        image = Image.new("L", (side, side), 0)
        draw = ImageDraw.Draw(image)
        whole = (margin, margin, side - margin, side - margin)
        if shape == "circle":
            draw.ellipse(whole, fill=255)
        elif shape == "square":
            draw.rectangle(whole, fill=255)
        elif shape == "triangle":
            draw.polygon([(side / 2, margin), (side - margin, side - margin), (margin, side - margin)], fill=255)
        elif shape == "star":
            radius = np.where(np.arange(10) % 2 == 0, (side - margin) / 2, side / 5.5)
            angle = -np.pi / 2 + np.arange(10) * np.pi / 5
            points = np.stack([side / 2 + radius * np.cos(angle), side / 2 + radius * np.sin(angle)], -1)
            draw.polygon([tuple(p) for p in points.tolist()], fill=255)
        elif shape == "cross":
            draw.rectangle((side * 0.38, margin, side * 0.62, side - margin), fill=255)
            draw.rectangle((margin, side * 0.38, side - margin, side * 0.62), fill=255)
        elif shape == "diamond":
            draw.polygon(
                [(side / 2, margin), (side - margin, side / 2), (side / 2, side - margin), (margin, side / 2)], fill=255
            )
        elif shape == "ring":
            draw.ellipse(whole, fill=255)
            draw.ellipse((side * 0.32, side * 0.32, side * 0.68, side * 0.68), fill=0)
        else:
            draw.rectangle((margin, side * 0.36, side - margin, side * 0.64), fill=255)
        small = image.resize((CELL, CELL), Image.Resampling.BILINEAR)
        masks.append(np.asarray(small, dtype=np.float32) / 255)
    return np.stack(masks)


@cache
def digit_masks(pool: Literal["train", "held_out"]) -> tuple[Float[ndarray, "n 32 32"], ...]:
    """Opacity masks of scikit-learn's bundled handwriting, one array for each of `DIGITS`.

    The split is fixed: a permutation with seed 0, the first `N_TRAIN_DIGITS` for training, the rest held out.
    """
    from PIL import Image
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    chosen = order[:N_TRAIN_DIGITS] if pool == "train" else order[N_TRAIN_DIGITS:]
    masks = np.zeros((len(chosen), CELL, CELL), dtype=np.float32)
    for row, index in enumerate(chosen):
        grey = Image.fromarray((data.images[index] * (255 / 16)).astype(np.uint8))
        big = grey.resize((CELL - 4, CELL - 4), Image.Resampling.BILINEAR)
        masks[row, 2:-2, 2:-2] = np.asarray(big, dtype=np.float32) / 255
    return tuple(masks[data.target[chosen] == digit] for digit in range(10))


@dataclass(frozen=True)
class Layout:
    """What stands where in a batch of scenes: indexes into `KINDS[domain]`, `COLORS` and the cells in raster order."""

    kinds: Int[ndarray, "scene object"]
    colors: Int[ndarray, "scene object"]
    cells: Int[ndarray, "scene object"]


def draw_layout(rng: np.random.Generator, domain: Domain, n_scenes: int, n_objects: int) -> Layout:
    """Random scenes in which no two objects share a kind or a cell (colours may repeat)."""
    kinds = rng.permuted(np.tile(np.arange(len(KINDS[domain])), (n_scenes, 1)), axis=1)[:, :n_objects]
    cells = rng.permuted(np.tile(np.arange(GRID * GRID), (n_scenes, 1)), axis=1)[:, :n_objects]
    return Layout(kinds, rng.integers(0, len(COLORS), (n_scenes, n_objects)), cells)


def draw_masks(
    rng: np.random.Generator,
    domain: Domain,
    kinds: Int[ndarray, "scene object"],
    pool: Literal["train", "held_out"] = "held_out",
) -> Float[ndarray, "scene object 32 32"]:
    """The opacity mask of every object; for digits, a random piece of handwriting from `pool`."""
    if domain == "shapes":
        return shape_masks()[kinds]
    masks = digit_masks(pool)
    flat = [masks[k][rng.integers(len(masks[k]))] for k in kinds.ravel()]
    return np.stack(flat).reshape(*kinds.shape, CELL, CELL)


def paint(
    rng: np.random.Generator,
    domain: Domain,
    layout: Layout,
    masks: Float[ndarray, "scene object 32 32"],
) -> UInt8[ndarray, "scene 128 128 3"]:
    """The pictures: each object's colour laid over the background through its mask, then pixel noise."""
    ground = BACKGROUND[domain]
    n_scenes = len(layout.kinds)
    canvas = np.full((n_scenes, GRID * GRID, CELL, CELL, 3), ground, dtype=np.float32)
    tint = palette()[layout.colors][:, :, None, None, :] - ground
    canvas[np.arange(n_scenes)[:, None], layout.cells] = ground + tint * masks[..., None]
    picture = canvas.reshape(n_scenes, GRID, GRID, CELL, CELL, 3).transpose(0, 1, 3, 2, 4, 5)
    return grain(rng, picture.reshape(n_scenes, SIDE, SIDE, 3))


def grain(rng: np.random.Generator, picture: Float[ndarray, "*any 3"]) -> UInt8[ndarray, "*any 3"]:
    """Channels in 0..1 with pixel noise, as bytes."""
    picture = picture + NOISE * rng.standard_normal(picture.shape, dtype=np.float32)
    return (picture.clip(0, 1) * 255).round().astype(np.uint8)


def cell_box(cell: int) -> tuple[int, int, int, int]:
    """Pixels (x0, y0, x1, y1) of a cell, half open."""
    y, x = divmod(cell, GRID)
    return x * CELL, y * CELL, (x + 1) * CELL, (y + 1) * CELL


def check_range(name: str, value: Any, least: int, most: int, why: str) -> None:
    """Raise OptionError unless an option is an int from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise OptionError(f"{name}={value!r}", expected=f"an int, {least} to {most}", fix=why)


def named(variant: str, domain: Domain) -> str:
    """A task's name: "scenes/video", "scenes/video:digits"."""
    return f"scenes/{variant}" + ("" if domain == "shapes" else f":{domain}")


def stream(split: Split, domain: Domain, index: int, seed: int, *variant: int) -> np.random.Generator:
    """The random numbers of one example; no two halves, domains or variants of the task share any."""
    check_index(split, index, seed)
    # Halves are streams 0 and 1; training draws from stream 2 of another generator.
    return np.random.default_rng([seed, SPLITS.index(split), tuple(KINDS).index(domain), index, *variant])


class ScenesTask(Task):
    """ "What color is the star?" about pictures drawn here; the asked object's cell is the evidence.

    Parameters
    ----------
    domain
        "shapes" (scenes/image) or "digits" (scenes/digits, handwriting that no training picture used).
    n_objects
        Objects in each picture, 1 to 8.
    """

    candidates = tuple(COLORS)
    chance = 1 / len(COLORS)
    default_n = 100

    def __init__(self, domain: Domain, *, n_objects: int = 6) -> None:
        check_range("n_objects", n_objects, 1, len(SHAPES), "no two objects share a kind")
        self.domain, self.n_objects = domain, n_objects
        self.name = "scenes/image" if domain == "shapes" else "scenes/digits"

    def identity(self) -> dict[str, object]:
        """Name and options."""
        return {"name": self.name, "n_objects": self.n_objects}

    def example(self, split: Split, index: int, seed: int) -> Example:
        """Scene number `index` of a half."""
        rng = stream(split, self.domain, index, seed)
        layout = draw_layout(rng, self.domain, 1, self.n_objects)
        picture = paint(rng, self.domain, layout, draw_masks(rng, self.domain, layout.kinds))[0]
        asked = int(rng.integers(self.n_objects))
        kind = KINDS[self.domain][layout.kinds[0, asked]]
        boxes = [Box.from_xyxy(*cell_box(c)) for c in layout.cells[0].tolist()]
        return Example(
            id=f"{split}/{seed}/{index}",
            question=f"What color is the {kind}?",
            answers=(tuple(COLORS)[layout.colors[0, asked]],),
            images=(picture,),
            subject=kind,
            evidence=(boxes[asked],),
            distractors=tuple(b for i, b in enumerate(boxes) if i != asked),
        )
