"""Which tokens lie under a region, drawn over the picture: one panel for each look, as an HTML page or a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mmlens.errors import OptionError
from mmlens.evidence.locate import find, shapes_at
from mmlens.evidence.regions import Box, Polygon, Shape, as_regions
from mmlens.evidence.views import PictureViews, View, edges, mixing
from mmlens.model.prompt import Prompt
from mmlens.viz.html import document, escape, write
from mmlens.viz.picture import picture_uri

HIT, EDGE, OUTLINE = (255, 210, 63), (255, 255, 255), (255, 93, 115)
MOST_PANELS = 12


@dataclass(frozen=True)
class Panel:
    """One look at a picture: where its cells lie in source pixels, and which are hit.

    Attributes
    ----------
    cells
        (x0, y0, x1, y1, share, name of the token) of every token under the region.
    lines
        Where the grid's lines lie, across and down.
    outlines
        The region's own outlines, as points.
    """

    title: str
    picture: Image.Image
    cells: tuple[tuple[float, float, float, float, float, str], ...]
    lines: tuple[tuple[float, ...], tuple[float, ...]] = field(repr=False)
    outlines: tuple[tuple[tuple[float, float], ...], ...] = field(repr=False)


@dataclass(frozen=True)
class Overlay:
    """Tokens over a picture; shows itself in notebooks, saves as .html or .png."""

    title: str
    note: str
    panels: tuple[Panel, ...] = field(repr=False)

    def save(self, path: str | Path) -> Path:
        """Write one self-contained HTML file, or a PNG, by the path's ending."""
        path = Path(path)
        if path.suffix.lower() not in (".html", ".png"):
            raise OptionError(f"a figure saved as {path.name!r}", expected="a .html or .png file", fix="tokens.html")
        try:
            if path.suffix.lower() == ".html":
                return write(path, self._page())
            path.parent.mkdir(parents=True, exist_ok=True)
            self.image().save(path)
        except OSError as error:
            raise OptionError(
                f"{path} cannot be written: {error}", expected="a file in a writable folder", fix="give another path"
            ) from error
        return path

    def _page(self) -> str:
        return document(self.title, f"<main>{self._section()}</main>", libraries=(), charts={}, patterns={})

    def show(self) -> None:
        """Show in a notebook, or open the PNG."""
        try:
            from IPython.core.getipython import get_ipython
            from IPython.display import display
        except ImportError:
            get_ipython = lambda: None  # noqa: E731
        if get_ipython() is None:
            self.image().show()
        else:
            display(self)

    def _repr_html_(self) -> str:
        return f"<div>{self._section(inline=True)}</div>"

    def _section(self, *, inline: bool = False) -> str:
        style = ' style="display:flex;flex-wrap:wrap;gap:12px"' if inline else ' class="looks"'
        shown = "".join(
            f'<figure style="margin:0;flex:1 1 280px;max-width:560px">{_svg(p)}'
            f"<figcaption>{escape(p.title)}</figcaption></figure>"
            for p in self.panels
        )
        head = "" if inline else f"<h2>{escape(self.title)}</h2>"
        return f"<section>{head}<p>{escape(self.note)}</p><div{style}>{shown}</div></section>"

    def image(self, *, width: int = 480) -> Image.Image:
        """All panels on one sheet."""
        drawn = [_drawn(p, width) for p in self.panels]
        columns = 1 if len(drawn) == 1 else 2 if len(drawn) <= 4 else 3
        rows = [drawn[i : i + columns] for i in range(0, len(drawn), columns)]
        gap = 16
        heights = [max(p.height for p in row) for row in rows]
        wide = max(sum(p.width for p in row) + gap * (len(row) - 1) for row in rows)
        sheet = Image.new("RGB", (wide + 2 * gap, sum(heights) + gap * (len(rows) + 1)), (255, 255, 255))
        y = gap
        for row, high in zip(rows, heights):
            x = gap
            for panel in row:
                sheet.paste(panel, (x, y))
                x += panel.width + gap
            y += high + gap
        return sheet


def overlay(
    prompt: Prompt,
    region: Any,
    *,
    image: int | None = None,
    example: int = 0,
    coverage: float = 0.0,
    views: str = "all",
) -> Overlay:
    """The tokens that `prompt.locate` gives for the same arguments, over the picture they come from.

    Examples
    --------
    >>> from mmlens import Box, HookedVLM, load_task
    >>> from mmlens.viz.overlay import overlay
    >>> vlm = HookedVLM.from_pretrained("toy-qwen3-vl")
    >>> picture = load_task("scenes/image").example("rank", 0, 0).images[0]
    >>> prompt = vlm.prompt("what color is the star ?", images=[picture])
    >>> overlay(prompt, Box.from_xyxy(0, 0, 32, 32)).note
    '4 tokens: 4, 5, 12, 13'
    """
    from mmlens.evidence import one_picture
    from mmlens.model.places import item_number

    where = prompt.locate(region, image=image, example=example, coverage=coverage, views=views)
    regions = as_regions(region)
    number = item_number(prompt, one_picture(regions, image), example)
    item, shown, source = prompt.items[number], prompt.views(number), prompt.examples[example]
    index = sum(other.example == example for other in prompt.items[:number])
    frames = source.videos[index].frames if item.kind == "video" else (source.images[index],)
    when = item.sampling
    panels = panels_of(
        shown,
        regions,
        frames,
        names=[str(c) for c in item.columns],
        coverage=coverage,
        views=views,
        sampling=when,
    )
    return Overlay("Tokens under a region", where.reason or _note(where.per_example[example]), panels)


def panels_of(
    shown: PictureViews,
    regions: Sequence[Any],
    frames: Sequence[Image.Image],
    *,
    names: Sequence[str],
    coverage: float,
    views: str,
    sampling: Any = None,
) -> tuple[Panel, ...]:
    """One panel for each look (of a clip, those that hold some of the region first, at most twelve)."""
    found = find(shown, regions, sampling=sampling, coverage=coverage, views=views)
    looks = [v for v in shown.chosen(views) if shown.kind == "image" or v.name in found.by_view]
    looks = (looks or list(shown.chosen(views)))[:MOST_PANELS]
    panels = []
    for view in looks:
        mine = found.by_view.get(view.name, {})
        # of frames that share their tokens, the first that holds some of the region
        first = view.frames[0] if view.frames else None
        frame = next((f for f in view.frames if shapes_at(regions, f, sampling)), first)
        cells = tuple((*view.source_box(o), share, names[o]) for o, share in mine.items())
        title = f"{view.name}: {view.rows} x {view.cols} tokens, {len(mine)} under the region"
        lines = _lines(view)
        outlines = _outlines(shapes_at(regions, frame, sampling), *shown.size)
        panels.append(Panel(title, frames[frame or 0], cells, lines, outlines))
    return tuple(panels)


def _note(positions: Sequence[int]) -> str:
    listed = ", ".join(map(str, positions[:24])) + (", ..." if len(positions) > 24 else "")
    return f"{len(positions)} tokens: {listed}"


def _lines(view: View) -> tuple[tuple[float, ...], tuple[float, ...]]:
    across, down = (
        () if mixing(axis) is not None else tuple(sorted({round(float(e), 3) for e in edges(axis).ravel()}))
        for axis in (view.x, view.y)
    )
    return across, down


def _outlines(shapes: Sequence[Shape], width: int, height: int) -> tuple[Any, ...]:
    found: list[tuple[tuple[float, float], ...]] = []
    for shape in shapes:
        if isinstance(shape, Box):
            x0, y0, x1, y1 = shape.clip(width, height).corners
            found.append(((x0, y0), (x1, y0), (x1, y1), (x0, y1)))
        elif isinstance(shape, Polygon):
            found += shape.in_pixels(width, height).rings
        else:
            rows, cols = np.nonzero(shape.pixels)
            sy, sx = height / shape.pixels.shape[0], width / shape.pixels.shape[1]
            x0, x1, y0, y1 = cols.min() * sx, (cols.max() + 1) * sx, rows.min() * sy, (rows.max() + 1) * sy
            found.append(((x0, y0), (x1, y0), (x1, y1), (x0, y1)))
    return tuple(found)


def _svg(panel: Panel) -> str:
    width, height = panel.picture.size
    thin = max(width, height) / 500
    grid = "".join(f"M{x:.1f} 0V{height}" for x in panel.lines[0]) + "".join(
        f"M0 {y:.1f}H{width}" for y in panel.lines[1]
    )
    hit = "".join(
        f'<rect x="{x0:.1f}" y="{y0:.1f}" width="{x1 - x0:.1f}" height="{y1 - y0:.1f}" fill="rgb{HIT}" '
        f'fill-opacity="{0.15 + 0.5 * share:.3f}"><title>token {escape(name)}: {share:.0%} covered</title></rect>'
        for x0, y0, x1, y1, share, name in panel.cells
    )
    outlines = "".join(
        f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in ring)}" fill="none" stroke="rgb{OUTLINE}" '
        f'stroke-width="{thin * 3:.2f}"/>'
        for ring in panel.outlines
    )
    return (
        f'<svg class="picture" viewBox="0 0 {width} {height}" style="width:100%;height:auto" role="img" '
        f'aria-label="{escape(panel.title)}"><image href="{picture_uri(panel.picture)}" width="{width}" '
        f'height="{height}"/><rect width="{width}" height="{height}" fill="#0b1220" fill-opacity=".25"/>'
        f'<path d="{grid}" stroke="#fff" stroke-opacity=".35" stroke-width="{thin:.2f}" fill="none"/>'
        f"{hit}{outlines}</svg>"
    )


def _drawn(panel: Panel, width: int) -> Image.Image:
    scale = width / panel.picture.width
    size = (width, max(1, round(panel.picture.height * scale)))
    base = panel.picture.resize(size, Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST)
    layer = Image.new("RGBA", size, (11, 18, 32, 64))
    draw = ImageDraw.Draw(layer)
    for x0, y0, x1, y1, share, _ in panel.cells:
        left, top = x0 * scale, y0 * scale
        corner = max(x1 * scale - 1, left), max(y1 * scale - 1, top)  # cells thinner than a drawn pixel
        draw.rectangle((left, top, *corner), fill=(*HIT, int(40 + 125 * share)))
    for x in panel.lines[0]:
        draw.line((x * scale, 0, x * scale, size[1]), fill=(*EDGE, 90))
    for y in panel.lines[1]:
        draw.line((0, y * scale, size[0], y * scale), fill=(*EDGE, 90))
    for ring in panel.outlines:
        points = [(x * scale, y * scale) for x, y in (*ring, ring[0])]
        draw.line(points, fill=(*OUTLINE, 255), width=3, joint="curve")
    drawn = Image.alpha_composite(base.convert("RGBA"), layer).convert("RGB")
    sheet = Image.new("RGB", (size[0], size[1] + 22), (255, 255, 255))
    sheet.paste(drawn, (0, 0))
    ImageDraw.Draw(sheet).text((0, size[1] + 4), panel.title, fill=(27, 35, 48), font=ImageFont.load_default(13))
    return sheet
