"""Pictures as users hand them over, made RGB images; broken ones refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Union

import numpy as np
from PIL import Image, UnidentifiedImageError

from mmlens.errors import PictureError

Picture = Union["Image.Image", str, Path, np.ndarray]


def load_picture(picture: Any) -> Image.Image:
    """An RGB image from a PIL image, a path, or a uint8 array (height, width, 3); stored orientation is kept."""
    size = getattr(picture, "shape", None) or getattr(picture, "size", None)
    if isinstance(size, tuple) and 0 in size:
        raise PictureError("a picture without pixels", expected="at least one pixel", fix="check how it was cut out")
    try:
        if isinstance(picture, str | Path):
            with Image.open(picture) as opened:
                return opened.convert("RGB")
        if isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.ndim in (2, 3):
            return Image.fromarray(picture).convert("RGB")
        if isinstance(picture, Image.Image):
            return picture.convert("RGB")
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError, TypeError) as error:
        shown = picture if isinstance(picture, str | Path) else type(picture).__name__
        raise PictureError(
            f"picture {str(shown)!r} cannot be read: {error}",
            expected="a whole picture file that Pillow opens",
            fix="check the path and the file (a cut-off download is the usual cause)",
        ) from error
    kind = (
        f"{picture.dtype} array of shape {picture.shape}" if isinstance(picture, np.ndarray) else type(picture).__name__
    )
    raise PictureError(
        f"a picture given as {kind}",
        expected="a PIL image, a path, or a uint8 array (height, width, 3)",
        fix="convert it first, for instance PIL.Image.fromarray((x * 255).astype('uint8'))",
    )
