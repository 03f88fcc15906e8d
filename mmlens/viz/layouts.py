"""How a family cuts a picture into tokens, drawn: the looks, the run of tokens, and where a box lands in both.

`python -m mmlens.viz.layouts docs/img` draws the published settings of every family for docs/evidence.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmlens.evidence.locate import find
from mmlens.evidence.regions import Box, as_regions
from mmlens.evidence.schemes import (
    anyres_views,
    cropped_views,
    idefics_grid,
    padded_views,
    pan_and_scan,
    qwen_cells,
    qwen_clip,
    qwen_views,
    scanned_views,
    square_views,
    tile_grid,
    tiled_views,
)
from mmlens.evidence.views import PictureViews, View, edges, mixing
from mmlens.viz.html import escape

PALETTE = ("#0b6e8f", "#edae49", "#6a4c93", "#3d8b5f", "#d1495b", "#8a97a8")
HIT, INK, SOFT, PAPER = "#d1495b", "#1b2330", "#5b6676", "#ffffff"
PANEL, GAP, STRIP = 190.0, 18.0, 26.0


def drawing(shown: PictureViews, region: Any, *, title: str = "") -> str:
    """An SVG: each look as a grid on the source picture, and the picture's run of tokens below.

    Parameters
    ----------
    shown
        From `prompt.views(...)` or `evidence.layout(...)`.
    region
        A region or several, in any units.
    """
    regions = as_regions(region)
    found = find(shown, regions)
    looks = shown.views[:5]
    width, height = shown.size
    scale = min(PANEL / width, PANEL / height)
    wide = max(len(looks) * (PANEL + GAP) + GAP, 580.0)
    high = 34 + height * scale + 46 + STRIP + 32
    parts = [f'<text x="{GAP}" y="20" font-weight="600">{escape(title)}</text>']
    for i, view in enumerate(looks):
        x = GAP + i * (PANEL + GAP)
        parts.append(
            f'<g transform="translate({x:.1f},34)">{_look(shown, view, found.by_view.get(view.name, {}), i, scale)}'
            f'{_outline(regions, shown.size, scale)}<text class="s" y="{height * scale + 15:.1f}">'
            f"{escape(view.name)}: {view.rows} x {view.cols}</text></g>"
        )
    parts.append(
        f'<g transform="translate({GAP},{34 + height * scale + 46:.1f})">{_strip(shown, found.shares, wide)}</g>'
    )
    note = f"{shown.count} tokens in the run, {len(found.shares)} under the box"
    if shown.newlines:
        note += f", {len(shown.newlines)} newline" + ("s" if len(shown.newlines) > 1 else "")
    parts.append(f'<text class="s" x="{GAP}" y="{high - 8:.1f}">{escape(note)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" width="{wide:.0f}" role="img" '
        f'aria-label="{escape(title)}: {escape(note)}" font-family="system-ui, sans-serif" font-size="13" fill="{INK}">'
        f"<style>.s{{font-size:11px;fill:{SOFT}}}</style>"
        f'<rect width="100%" height="100%" fill="{PAPER}"/>{"".join(parts)}</svg>'
    )


def _look(shown: PictureViews, view: View, hit: Any, number: int, scale: float) -> str:
    width, height = (s * scale for s in shown.size)
    color = PALETTE[number % len(PALETTE)]
    clip = "".join(c for c in f"c{number}-{shown.kind}-{shown.count}-{view.name}" if c.isalnum() or c == "-")
    (x0, x1), (y0, y1) = (
        (max(float(edges(a).min()) * scale, 0.0), min(float(edges(a).max()) * scale, most))
        for a, most in ((view.x, width), (view.y, height))
    )
    lines = []
    for axis, vertical in ((view.x, True), (view.y, False)):
        if mixing(axis) is None:
            for at in sorted({round(float(e) * scale, 2) for e in edges(axis).ravel()}):
                lines.append(f"M{at} {y0:.1f}V{y1:.1f}" if vertical else f"M{x0:.1f} {at}H{x1:.1f}")
    cells = "".join(
        f'<rect x="{a * scale:.2f}" y="{b * scale:.2f}" width="{(c - a) * scale:.2f}" '
        f'height="{(d - b) * scale:.2f}" fill="{HIT}" fill-opacity="{0.2 + 0.6 * share:.2f}"/>'
        for token, share in hit.items()
        for a, b, c, d in [view.source_box(token)]
    )
    shadow = (
        f'<rect width="{width:.1f}" height="{height:.1f}" fill="{SOFT}" fill-opacity=".08"/>'
        f'<rect x="{x0:.1f}" y="{y0:.1f}" width="{x1 - x0:.1f}" height="{y1 - y0:.1f}" fill="{color}" '
        f'fill-opacity=".12"/>'
        f'<clipPath id="{clip}"><rect width="{width:.1f}" height="{height:.1f}"/></clipPath>'
    )
    grid = f'<path d="{"".join(lines)}" stroke="{color}" stroke-opacity=".55" stroke-width=".5" fill="none"/>'
    frame = f'<rect width="{width:.1f}" height="{height:.1f}" fill="none" stroke="{color}"/>'
    return f'{shadow}<g clip-path="url(#{clip})">{cells}{grid}</g>{frame}'


def _outline(regions: Sequence[Any], size: tuple[int, int], scale: float) -> str:
    found = ""
    for region in regions:
        if isinstance(region, Box):
            x0, y0, x1, y1 = (v * scale for v in region.clip(*size).corners)
            found += (
                f'<rect x="{x0:.1f}" y="{y0:.1f}" width="{x1 - x0:.1f}" height="{y1 - y0:.1f}" fill="none" '
                f'stroke="{INK}" stroke-width="1.6"/>'
            )
    return found


def _strip(shown: PictureViews, shares: Any, wide: float) -> str:
    """The run of tokens from left to right: its looks in their colours, tokens under the region marked."""
    step = (wide - 2 * GAP) / shown.count
    owner = {}
    for number, view in enumerate(shown.views):
        owner.update(dict.fromkeys(view.ordinals.ravel().tolist(), number))
    blocks, start = [], 0
    for token in range(1, shown.count + 1):
        if token == shown.count or owner.get(token) != owner.get(start):
            mine = owner.get(start)
            color = INK if mine is None else PALETTE[mine % len(PALETTE)]
            blocks.append(
                f'<rect x="{start * step:.2f}" width="{(token - start) * step:.2f}" height="{STRIP}" fill="{color}" '
                f'fill-opacity="{0.9 if mine is None else 0.3}"/>'
            )
            start = token
    marks = "".join(f"M{(t + 0.5) * step:.2f} 0V{STRIP}" for t in shares)
    line = f'<path d="{marks}" stroke="{HIT}" stroke-width="{max(step, 0.4):.2f}" fill="none"/>'
    return f'{"".join(blocks)}{line}<text class="s" y="-5">the run of tokens, first to last</text>'


PHOTO, BOX = (640, 427), Box(330, 150, 470, 330)
_NEXT = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_ONE = tuple((384 * r, 384 * c) for r in range(1, 7) for c in range(1, 7))


def _qwen(factor: int, least: int, most: int) -> PictureViews:
    cells = qwen_cells(PHOTO, factor=factor, least=least, most=most)
    assert cells is not None
    return qwen_views(PHOTO, cells, cell=factor)


# Published settings: file name -> (title, what is shown)
PUBLISHED: dict[str, tuple[str, Callable[[], PictureViews]]] = {
    "qwen2.5-vl": ("Qwen2-VL, Qwen2.5-VL: stretched to multiples of 28", lambda: _qwen(28, 3136, 12845056)),
    "qwen3-vl": ("Qwen3-VL: stretched to multiples of 32", lambda: _qwen(32, 65536, 16777216)),
    "qwen-video": (
        "Qwen video: two frames share their tokens",
        lambda: qwen_clip(PHOTO, (23, 15), cell=28, n_frames=5, per_group=2),
    ),
    "llava-1.5": (
        "LLaVA-1.5: the middle square only",
        lambda: cropped_views(PHOTO, edge=336, crop=336, cell=14),
    ),
    "llava-1.5-pad": (
        "LLaVA-1.5 with do_pad: padded to a square",
        lambda: padded_views(PHOTO, side=336, cells=24, cell=14),
    ),
    "llava-next": (
        "LLaVA-NeXT: thumbnail, then a mosaic with a newline after each row",
        lambda: anyres_views(PHOTO, pinpoints=_NEXT, tile=336, side=24, cell=14),
    ),
    "llava-onevision": (
        "LLaVA-OneVision: the same with 27 x 27 tiles",
        lambda: anyres_views(PHOTO, pinpoints=_ONE, tile=384, side=27, cell=14, most=9),
    ),
    "internvl": (
        "InternVL3, InternVL3.5: tiles one after another, thumbnail last",
        lambda: tiled_views(PHOTO, tile_grid(PHOTO, tile=(448, 448), least=1, most=12), tile=448, side=16, cell=28),
    ),
    "gemma3": ("Gemma3: one square of 16 x 16", lambda: scanned_views(PHOTO, (), side=896, cells=16)),
    "gemma3-scan": (
        "Gemma3 with pan and scan: crops along the long side follow",
        lambda: scanned_views(PHOTO, pan_and_scan(PHOTO, least=256, most=4, ratio=1.2), side=896, cells=16),
    ),
    "idefics3": (
        "Idefics3: tiles named in the text, the whole picture last",
        lambda: tiled_views(PHOTO, idefics_grid(PHOTO, longest=1456, tile=364), tile=364, side=13, cell=28),
    ),
    "smolvlm": (
        "SmolVLM: the same with 8 x 8 tokens a tile",
        lambda: tiled_views(PHOTO, idefics_grid(PHOTO, longest=2048, tile=512), tile=512, side=8, cell=64),
    ),
    "paligemma": ("PaliGemma: one square of 16 x 16", lambda: square_views(PHOTO, side=224, cells=16, cell=14)),
}


def draw_published(folder: Path) -> list[Path]:
    """One SVG for each published setting."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (title, make) in PUBLISHED.items():
        path = folder / f"layout-{name}.svg"
        path.write_text(drawing(make(), BOX, title=title) + "\n")
        written.append(path)
    return written


if __name__ == "__main__":
    print("\n".join(str(p) for p in draw_published(Path(sys.argv[1]))))
