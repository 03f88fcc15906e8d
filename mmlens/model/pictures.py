"""Pictures as users hand them over, made RGB images; broken ones refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union

import numpy as np
from PIL import Image, UnidentifiedImageError

from mmlens.errors import OptionError, PictureError

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


def load_video(video: Any) -> tuple[Image.Image, ...]:
    """RGB frames of one size, from a list of pictures or a uint8 array (frame, height, width, 3)."""
    if isinstance(video, np.ndarray) and (video.ndim != 4 or video.dtype != np.uint8):
        raise PictureError(
            f"a video given as {video.dtype} array of shape {video.shape}",
            expected="a list of pictures, or a uint8 array (frame, height, width, 3)",
            fix="decode it to frames first",
        )
    if not isinstance(video, Sequence | np.ndarray) or isinstance(video, str) or len(video) == 0:
        raise PictureError(
            f"a video given as {type(video).__name__}" + (", without frames" if hasattr(video, "__len__") else ""),
            expected="a list of pictures, or a uint8 array (frame, height, width, 3)",
            fix="decode it to frames first: videos=[[frame, frame, ...]]",
        )
    frames = tuple(load_picture(frame) for frame in video)
    if len({frame.size for frame in frames}) > 1:
        raise PictureError(
            f"a video with frames of {sorted({f.size for f in frames})} pixels",
            expected="frames of one size",
            fix="scale them first",
        )
    return frames


def video_options(videos: Sequence[Sequence[Image.Image]], rates: Sequence[float | None]) -> dict[str, Any]:
    """A processor's options for frames that are already chosen: none dropped, their times from the frame rate."""
    from transformers.video_utils import VideoMetadata

    metadata = []
    for frames, rate in zip(videos, rates):
        fps = 2.0 if rate is None else float(rate)
        if not fps > 0:
            raise OptionError(f"fps={rate!r}", expected="frames per second, above 0", fix="fps=2.0")
        n = len(frames)
        width, height = frames[0].size
        metadata.append(
            VideoMetadata(
                total_num_frames=n, fps=fps, width=width, height=height, duration=n / fps, frames_indices=list(range(n))
            )
        )
    return {"videos": [list(f) for f in videos], "video_metadata": metadata, "do_sample_frames": False}
