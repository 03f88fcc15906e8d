"""Whether an example can be used: its words, pictures, video and regions, before any model sees them."""

from __future__ import annotations

import io
from collections.abc import Iterable
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmlens.evidence.area import area_of
from mmlens.evidence.regions import Box, Page, PageRegion, Shape, Tube
from mmlens.model.pictures import load_picture
from mmlens.model.video import Video, VideoFile, probe, read_video
from mmlens.tasks.base import Example
from mmlens.tasks.rows import Fault

Size = tuple[int, int]  # width, height


def check_example(example: Example) -> None:
    """A Fault, PictureError, RegionError or VideoError for an example that no prompt could be made of.

    What one processor refuses and another takes (a strip of 2000 x 1 pixels, a single frame, its own marks among the
    words) is not known here.
    """
    check_words(example)
    check_pictures(example)
    if example.video is not None:
        check_video(example)


def check_words(example: Example) -> None:
    """The question says something, and the subject stands there once."""
    for text in (example.id, example.question, *example.answers):
        text.encode()  # half a surrogate pair is no text
    if not example.question.strip():
        raise Fault(f"the question {example.question!r} has no words")
    if example.subject is not None:
        n = example.question.count(example.subject) if example.subject else 0
        if n != 1 or not example.subject.strip():
            raise Fault(f"the subject {example.subject!r} stands {n} times in the question, not once")


def check_pictures(example: Example) -> None:
    """Every picture decodes, the first has the size that its record says, and each region covers a part of its own."""
    sizes = [load_picture(picture).size for picture in example.pictures]
    said = _size_said(example)
    if said is not None and sizes and said != sizes[0]:
        raise Fault(
            "the file says that its picture is turned (EXIF), and the boxes are for the turned one"
            if is_turned(example.pictures[0])
            else f"the picture has {sizes[0][0]} x {sizes[0][1]} pixels, not {said[0]} x {said[1]} as the record says"
        )
    if example.video is not None and not sizes:
        return
    for region in _regions(example):
        if isinstance(region, Tube):
            raise Fault("a tube on a picture; tubes go through videos")
        number = region.number if isinstance(region, Page | PageRegion) else 0
        if not 0 <= number < len(sizes):
            raise Fault(f"evidence on picture {number} of {len(sizes)}")
        if isinstance(region, Page):
            continue
        if (said is None or number) and is_turned(example.pictures[number]):
            raise Fault("the file says that its picture is turned (EXIF), and the record not which way its boxes are")
        check_shape(region.region if isinstance(region, PageRegion) else region, sizes[number])


def check_video(example: Example) -> None:
    """A video decodes where the example begins, and has the frames and the room that the example's regions name."""
    n, size = _frames_in(example.video)
    for region in _regions(example):
        if isinstance(region, Page | PageRegion):
            raise Fault("a page, or a region on a numbered picture, of a video; tubes say when")
        if not isinstance(region, Tube):
            check_shape(region, size)
            continue
        if region.by == "frame" and region.places[-1][0] >= n:
            raise Fault(f"evidence in frame {region.places[-1][0]:g} of a video of {n}")
        for shape in dict.fromkeys(shape for _, shape in region.places):
            check_shape(shape, size)


def check_shape(shape: Shape, size: Size) -> None:
    """RegionError for a shape that covers nothing of a picture of this size."""
    if isinstance(shape, Box):
        shape.clip(*size)
    else:
        area_of([shape], *size)


def _regions(example: Example) -> Iterable[Any]:
    return (*example.evidence, *example.distractors)


def _size_said(example: Example) -> Size | None:
    """The first picture's size as the record has it."""
    said = example.meta.get("picture_size")
    if isinstance(said, tuple | list) and len(said) == 2 and all(isinstance(v, Real) for v in said):
        return (said[0], said[1])
    return None


def _frames_in(video: Any) -> tuple[int, Size]:
    """How many frames a video has, and their size; at least the first to be shown is decoded."""
    if isinstance(video, str | Path | VideoFile):
        clip = video if isinstance(video, VideoFile) else VideoFile(video)
        info = probe(clip.path)
        read_video(clip, indices=[clip.begin])
        return info.n_frames, (info.width, info.height)
    if isinstance(video, np.ndarray):
        load_picture(video[0])
        return len(video), (video.shape[2], video.shape[1])
    if not isinstance(video, Video) and not len(video):
        raise Fault("a video without frames")
    if isinstance(video, Video):
        return video.n_source, video.size
    sizes = {load_picture(frame).size for frame in video}
    if len(sizes) > 1:
        raise Fault(f"a video whose frames have several sizes: {', '.join(f'{w} x {h}' for w, h in sorted(sizes))}")
    return len(video), sizes.pop()


def is_turned(picture: Any) -> bool:
    """Whether a picture file asks viewers to turn it (EXIF orientation)."""
    if isinstance(picture, str | Path):
        with Image.open(picture) as opened:
            return opened.getexif().get(0x0112, 1) != 1
    if isinstance(picture, bytes):
        with Image.open(io.BytesIO(picture)) as opened:
            return opened.getexif().get(0x0112, 1) != 1
    return isinstance(picture, Image.Image) and picture.getexif().get(0x0112, 1) != 1
