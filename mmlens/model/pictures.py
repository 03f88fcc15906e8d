"""Pictures as users hand them over, made RGB images; broken ones refused by name."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any, Union

import numpy as np
from PIL import Image, UnidentifiedImageError

from mmlens.errors import PictureError

Picture = Union["Image.Image", str, Path, bytes, np.ndarray]

# Pixels above which a file is refused before it is decoded.
MOST_PIXELS = 2**27


def load_picture(picture: Any) -> Image.Image:
    """An RGB image from a PIL image, a path, a file's bytes, or a uint8 array (height, width, 3).

    The stored orientation is kept, whatever EXIF says: boxes of data sets are for it.
    """
    size = getattr(picture, "shape", None) or getattr(picture, "size", None)
    if isinstance(size, tuple) and 0 in size:
        raise PictureError("a picture without pixels", expected="at least one pixel", fix="check how it was cut out")
    try:
        if isinstance(picture, str | Path | bytes):
            return _decoded(io.BytesIO(picture) if isinstance(picture, bytes) else picture)
        if isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.ndim in (2, 3):
            return Image.fromarray(picture).convert("RGB")
        if isinstance(picture, Image.Image):
            return _rgb(picture)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, ValueError, TypeError) as error:
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
        expected="a PIL image, a path, a file's bytes, or a uint8 array (height, width, 3)",
        fix="convert it first, for instance PIL.Image.fromarray((x * 255).astype('uint8'))",
    )


def _rgb(image: Image.Image) -> Image.Image:
    """Eight bits a channel; greys of 16 bits are scaled. Transparency is dropped, as transformers' own loader does."""
    if image.mode.startswith("I;16"):
        grey = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise PictureError(
            f"a picture of mode {image.mode!r}, whose range nobody knows",
            expected="8 or 16 bits a channel",
            fix="scale it to 0..255 first: Image.fromarray((x * 255).astype('uint8'))",
        )
    return image.convert("RGB")


def _decoded(file: Any) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is below
        with Image.open(file) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise PictureError(
                    f"a picture of {opened.width} x {opened.height} pixels",
                    expected=f"at most {MOST_PIXELS} pixels; larger ones are refused before they are decoded",
                    fix="scale it down first",
                )
            return _rgb(opened)
