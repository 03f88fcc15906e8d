"""Built-in documents with known answers: pages of text, and captioned figures of shapes or tinted handwriting."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any, Literal

import numpy as np
from jaxtyping import Int, UInt8
from numpy import ndarray

from mmlens.errors import OptionError
from mmlens.evidence.regions import Box, PageRegion
from mmlens.tasks.base import Example, Split, Task
from mmlens.tasks.scenes import (
    BACKGROUND,
    CELL,
    COLORS,
    KINDS,
    SHAPES,
    Domain,
    check_range,
    draw_masks,
    grain,
    named,
    palette,
    stream,
)

Ask = Literal["figure", "word"]
Unit = tuple[str, ...]  # words that a line break never parts

LINE = 16  # pixels a line; two patches, so that a line of text is one row of the embedded model's tokens
WIDTH, HEIGHT = 192, 256
MARGIN = 14
TOP = 12  # pixels above the heading
BODY = range(2, 15)  # lines below the heading
BASELINE = 12  # pixels below a line's top
TEXT, SMALL, HEADING = 11, 10, 13  # pixels of the font
SPACE = 4  # pixels between words
PAPER, INK = np.array([250, 248, 243]), np.array([38, 38, 46])

FRAME = CELL // 4  # pixels of ground around a figure's cell
BAND = 5  # lines that figures and their captions take
CENTERS = {1: (WIDTH // 2,), 2: (WIDTH // 4, WIDTH * 3 // 4)}
PER_PAGE = 4
MAX_PAGES = 64
STATEMENTS = 3  # of ask="word": the asked one and others beside it; no page has fewer lines of text

PEOPLE = ("gardener", "teacher", "captain", "baker", "painter", "farmer", "doctor", "pilot", "writer", "neighbor")
NATURES = ("patient", "gentle", "careful", "famous", "young", "tall", "kind", "clever")  # of people
THINGS = ("lamp", "boat", "letter", "map", "basket", "clock", "ladder", "kettle", "mirror", "chair", "piano", "coat")
QUALITIES = ("old", "small", "heavy", "plain", "new", "warm", "lovely", "broken", "empty")  # of things
DEEDS = ("mends", "carries", "finds", "keeps", "paints", "sells", "shows", "moves", "cleans", "buys", "forgets")
PLACES = ("near the river", "after the rain", "by the market", "in the morning", "on the hill", "before dinner")


@cache
def ink(word: str, size: int) -> tuple[UInt8[ndarray, "height width 3"], int, int, int]:
    """A word's pixels on paper, cut to where ink is; their offset from pen and baseline; how far the pen goes on."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size)
    image = Image.new("L", (size * (len(word) + 2), size * 3), 0)
    ImageDraw.Draw(image).text((size, size * 2), word, fill=255, font=font, anchor="ls")
    x0, y0, x1, y1 = image.getbbox() or (0, 0, 1, 1)
    cover = np.asarray(image)[y0:y1, x0:x1, None] / 255
    pixels = (PAPER + (INK - PAPER) * cover).round().astype(np.uint8)
    return pixels, x0 - size, y0 - size * 2, round(font.getlength(word))


@cache
def length(words: Unit, size: int) -> int:
    """Pixels that words in one line take."""
    return sum(ink(word, size)[3] for word in words) + SPACE * (len(words) - 1)


def wrap(units: Sequence[Unit]) -> list[list[Unit]]:
    """Units in lines no wider than a page's text."""
    lines: list[list[Unit]] = []
    at = WIDTH
    for unit in units:
        wide = length(unit, TEXT)
        if at + SPACE + wide > WIDTH - MARGIN:
            lines.append([])
            at = MARGIN - SPACE
        lines[-1].append(unit)
        at += SPACE + wide
    return lines


def union(boxes: Sequence[Box]) -> Box:
    """The smallest box around several."""
    if len(boxes) == 1:
        return boxes[0]
    x0, y0, x1, y1 = np.array([b.corners for b in boxes]).T
    return Box.from_xyxy(x0.min(), y0.min(), x1.max(), y1.max())


class Sheet:
    """A page as it is written: its pixels, and every word with its box."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pixels = np.full((HEIGHT, WIDTH, 3), PAPER, dtype=np.uint8)
        self.words: list[tuple[str, PageRegion]] = []

    def write(self, words: Unit, x: int, top: int, size: int = TEXT) -> Box:
        """Words in one line from `x` on, the line's top at `top`; the box around their ink."""
        boxes = []
        for word in words:
            pixels, across, down, advance = ink(word, size)
            height, width = pixels.shape[:2]
            left, high = x + across, top + BASELINE + down
            self.pixels[high : high + height, left : left + width] = pixels
            boxes.append(Box(float(left), float(high), float(left + width), float(high + height)))
            self.words.append((word, PageRegion(self.number, boxes[-1])))
            x += advance + SPACE
        return union(boxes)

    def paragraph(self, lines: Sequence[Sequence[Unit]], row: int) -> dict[Unit, PageRegion]:
        """Lines of text from a row on; where each unit of several words stands."""
        found = {}
        for number, line in enumerate(lines):
            x = MARGIN
            for unit in line:
                box = self.write(unit, x, (row + number) * LINE)
                x += length(unit, TEXT) + SPACE
                if len(unit) > 1:
                    found[unit] = PageRegion(self.number, box)
        return found

    def figure(self, pixels: UInt8[ndarray, "side side 3"], caption: Unit, x: int, row: int) -> tuple[Box, Box]:
        """A figure around `x` in the band from `row` on; the box of the picture, and the box that has its caption."""
        side = len(pixels)
        left, top = x - side // 2, row * LINE + LINE - FRAME
        self.pixels[top : top + side, left : left + side] = pixels
        picture = Box.from_xywh(left, top, side, side)
        below = self.write(caption, x - length(caption, SMALL) // 2, top + side + 1, SMALL)
        return picture, union([picture, below])


def sentence(rng: np.random.Generator) -> list[Unit]:
    """A plain sentence that names no colour and nothing that can be asked for."""
    pick = lambda words: words[rng.integers(len(words))]  # noqa: E731
    if rng.random() < 0.4:
        text = f"The {pick(THINGS)} is {pick(QUALITIES)}."
    else:
        text = f"The {pick(NATURES)} {pick(PEOPLE)} {pick(DEEDS)} the {pick(THINGS)} {pick(PLACES)}."
    return [(word,) for word in text.split()]


def compose(rng: np.random.Generator, statements: Sequence[Unit], n_lines: int) -> list[list[Unit]]:
    """Statements with sentences around them, in at most so many lines."""
    parts: list[list[Unit]] = [[s] for s in statements]
    misses = 0
    while misses < 4:
        at = int(rng.integers(len(parts) + 1))
        longer = [*parts[:at], sentence(rng), *parts[at:]]
        if len(wrap([*chain(*longer)])) <= n_lines:
            parts = longer
        else:
            misses += 1
    return wrap([*chain(*parts)])


def plates(
    rng: np.random.Generator, domain: Domain, kinds: Int[ndarray, " figure"], colors: Int[ndarray, " figure"]
) -> UInt8[ndarray, "figure 48 48 3"]:
    """The figures: a coloured object on the domain's ground, with pixel noise."""
    ground, side = BACKGROUND[domain], CELL + 2 * FRAME
    canvas = np.full((len(kinds), side, side, 3), ground, dtype=np.float32)
    masks = draw_masks(rng, domain, kinds[None])[0]
    inner = slice(FRAME, FRAME + CELL)
    canvas[:, inner, inner] += (palette()[colors] - ground)[:, None, None] * masks[..., None]
    return grain(rng, canvas)


def plan(rng: np.random.Generator, n_pages: int, n_figures: int) -> list[list[tuple[int, int]]]:
    """Every page's parts, top to bottom: (figures side by side, lines of text below them); the first has no figures."""
    places = rng.permutation(n_pages * PER_PAGE)[:n_figures] // PER_PAGE
    pages = []
    for count in np.bincount(places, minlength=n_pages).tolist():
        bands = {0: [], 1: [1], 4: [2, 2]}.get(count)
        if bands is None:
            bands = ([[2], [1, 1]] if count == 2 else [[2, 1], [1, 2]])[rng.integers(2)]
        lines = len(BODY) - BAND * len(bands)
        cuts = [0, *sorted(rng.integers(0, lines + 1, len(bands)).tolist()), lines]
        pages.append(list(zip([0, *bands], np.diff(cuts).tolist())))
    return pages


def typeset(
    rng: np.random.Generator,
    pages: list[list[tuple[int, int]]],
    pictures: UInt8[ndarray, "figure 48 48 3"],
    captions: Sequence[Unit],
    statements: Sequence[Unit],
) -> tuple[list[Sheet], list[PageRegion], list[PageRegion], dict[Unit, PageRegion]]:
    """The pages of a `plan`; where each figure is, without and with its caption; and where each statement is."""
    # A statement takes at most a line, so different lines hold them all.
    lines = [(p, b) for p, bands in enumerate(pages) for b, (_, n) in enumerate(bands) for _ in range(n)]
    chosen = [lines[i] for i in rng.permutation(len(lines))[: len(statements)]]
    sheets: list[Sheet] = []
    plain: list[PageRegion] = []
    captioned: list[PageRegion] = []
    said: dict[Unit, PageRegion] = {}
    for number, bands in enumerate(pages):
        sheet, row = Sheet(number), BODY[0]
        title = f"The {QUALITIES[rng.integers(len(QUALITIES))]} {THINGS[rng.integers(len(THINGS))]}"
        sheet.write(tuple(title.split()), MARGIN, TOP, HEADING)
        folio = (str(number + 1),)
        sheet.write(folio, WIDTH - MARGIN - length(folio, SMALL), TOP, SMALL)
        for band, (side_by_side, n_lines) in enumerate(bands):
            for x in CENTERS.get(side_by_side, ()):
                i = len(plain)
                picture, whole = sheet.figure(pictures[i], captions[i], x, row)
                plain.append(PageRegion(number, picture))
                captioned.append(PageRegion(number, whole))
            row += BAND if side_by_side else 0
            here = [s for s, place in zip(statements, chosen) if place == (number, band)]
            said |= sheet.paragraph(compose(rng, here, n_lines), row)
            row += n_lines
        sheets.append(sheet)
    return sheets, plain, captioned, said


class ScenesDocumentTask(Task):
    """ "What color is the star?" about pages drawn here; the figure, or the line of text that says it, is the evidence.

    `meta["words"]` lists every drawn word with its exact box, `meta["figures"]` every figure's kind, colour and box.

    Parameters
    ----------
    domain
        "shapes" (scenes/document) or "digits" (scenes/document:digits, handwriting that no training picture used).
    n_pages
        Pages of each document, 1 to 64, each 192 x 256 pixels.
    n_figures
        Figures in each document, 1 to 8, at most 4 a page; no two are of a kind.
    ask
        "figure": the colour of a figure; the evidence is the figure with its caption. "word": the colour that a line
        of text states of a kind that no figure shows; the evidence is that statement.
    """

    candidates = tuple(COLORS)
    chance = 1 / len(COLORS)
    batch = 10

    def __init__(self, domain: Domain, *, n_pages: int = 3, n_figures: int = 4, ask: Ask = "figure") -> None:
        if ask not in ("figure", "word"):
            raise OptionError(f"ask={ask!r}", expected="'figure' or 'word'", fix="ask='figure'")
        check_range("n_pages", n_pages, 1, MAX_PAGES, "leave n_pages= out, or give one")
        most = min(len(SHAPES) - (ask == "word"), PER_PAGE * n_pages)
        check_range("n_figures", n_figures, 1, most, f"{PER_PAGE} fit on a page, and no two are of a kind")
        self.domain, self.n_pages, self.n_figures, self.ask = domain, n_pages, n_figures, ask
        self.name = named("document", domain)

    def identity(self) -> dict[str, Any]:
        """Name and options."""
        return {"name": self.name, "n_pages": self.n_pages, "n_figures": self.n_figures, "ask": self.ask}

    def example(self, split: Split, index: int, seed: int) -> Example:
        """Document number `index` of a half."""
        rng = stream(split, self.domain, index, seed, 3)
        kinds = rng.permutation(len(KINDS[self.domain]))
        colors = rng.integers(0, len(COLORS), len(kinds))
        shown = slice(0, self.n_figures)
        told = slice(self.n_figures, self.n_figures + STATEMENTS if self.ask == "word" else self.n_figures)
        name = lambda i: KINDS[self.domain][kinds[i]]  # noqa: E731
        color = lambda i: tuple(COLORS)[colors[i]]  # noqa: E731
        statements = {i: ("The", name(i), "is", f"{color(i)}.") for i in range(len(kinds))[told]}
        pictures = plates(rng, self.domain, kinds[shown], colors[shown])
        captions = [("Figure", f"{i + 1}:", name(i)) for i in range(self.n_figures)]
        pages = plan(rng, self.n_pages, self.n_figures)
        sheets, plain, captioned, said = typeset(rng, pages, pictures, captions, list(statements.values()))
        regions = dict(enumerate(captioned)) | {i: said[s] for i, s in statements.items()}
        asked = self.n_figures if self.ask == "word" else int(rng.integers(self.n_figures))
        return Example(
            id=f"{split}/{seed}/{index}",
            question=f"What color is the {name(asked)}?",
            answers=(color(asked),),
            pages=tuple(sheet.pixels for sheet in sheets),
            subject=name(asked),
            evidence=(regions[asked],),
            distractors=tuple(r for i, r in regions.items() if i != asked),
            meta={
                "words": tuple(w for s in sheets for w in s.words),
                "figures": tuple((name(i), color(i), r) for i, r in enumerate(plain)),
            },
        )
