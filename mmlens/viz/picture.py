"""Pictures with boxes, token cells and attention drawn over them, as inline SVG."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence

from PIL import Image

from mmlens.viz.html import escape

Cells = Sequence[tuple[float, float, float, float]]  # source pixels of each token, in the picture's token order


def picture_uri(image: Image.Image) -> str:
    """The picture as a PNG data URI."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _svg(image: Image.Image, label: str, inner: str) -> str:
    width, height = image.size
    return (
        f'<svg class="picture" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f'<image href="{picture_uri(image)}" width="{width}" height="{height}" style="image-rendering:auto"/>{inner}</svg>'
    )


def evidence_picture(
    image: Image.Image, cells: Cells, coverage: Mapping[int, float], boxes: Sequence[tuple[float, float, float, float]]
) -> str:
    """The picture, its token grid, the evidence boxes, and the tokens that they touch (shaded by coverage)."""
    thin = max(image.size) / 400
    grid = "".join(
        f'<rect x="{x0:.2f}" y="{y0:.2f}" width="{x1 - x0:.2f}" height="{y1 - y0:.2f}" fill="none" '
        f'stroke="#ffffff" stroke-opacity=".28" stroke-width="{thin:.2f}"/>'
        for x0, y0, x1, y1 in cells
    )
    hit = "".join(
        f'<rect x="{cells[i][0]:.2f}" y="{cells[i][1]:.2f}" width="{cells[i][2] - cells[i][0]:.2f}" '
        f'height="{cells[i][3] - cells[i][1]:.2f}" fill="#ffffff" fill-opacity="{0.28 * share:.3f}" stroke="#ffffff" '
        f'stroke-opacity=".8" stroke-width="{thin:.2f}"/>'
        for i, share in coverage.items()
    )
    drawn = "".join(
        f'<rect x="{x0}" y="{y0}" width="{x1 - x0}" height="{y1 - y0}" fill="none" stroke="#ff5d73" '
        f'stroke-width="{thin * 4:.2f}" rx="{thin * 4:.2f}"/>'
        for x0, y0, x1, y1 in boxes
    )
    return _svg(image, "the picture with its token grid and the evidence box", grid + hit + drawn)


def attention_picture(image: Image.Image, cells: Cells, weights: Sequence[float], *, peak: float, label: str) -> str:
    """The picture darkened, and lit where a head looks; `peak` is the weight drawn brightest."""
    top = max(peak, 1e-9)
    lit = "".join(
        f'<rect x="{x0:.2f}" y="{y0:.2f}" width="{x1 - x0:.2f}" height="{y1 - y0:.2f}" fill="#ffd23f" '
        f'fill-opacity="{min(w / top, 1) ** 0.7 * 0.82:.3f}"><title>{w:.3f}</title></rect>'
        for (x0, y0, x1, y1), w in zip(cells, weights)
        if w / top > 0.01
    )
    width, height = image.size
    shade = f'<rect width="{width}" height="{height}" fill="#0b1220" fill-opacity=".55"/>'
    return _svg(image, label, shade + lit)
