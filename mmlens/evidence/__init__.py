"""From regions of pictures, pages and videos to token positions, with or without a model.

>>> from mmlens import Box, HookedVLM, evidence
>>> vlm = HookedVLM.from_pretrained("toy-qwen3-vl")
>>> shown = evidence.layout(vlm.processor, sizes=[(128, 128), (64, 96)])
>>> [picture.count for picture in shown]
[64, 24]
>>> evidence.locate(shown, Box.from_xyxy(0, 0, 32, 16)).positions
(0, 1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmlens.errors import GeometryError, OptionError, RegionError
from mmlens.evidence.locate import Sampling, find
from mmlens.evidence.regions import as_regions, picture_of
from mmlens.evidence.views import PictureViews
from mmlens.tokens import TokenSet


def layout(
    processor: Any,
    *,
    sizes: Sequence[tuple[int, int]],
    frames: int | Sequence[int] | None = None,
    images_kwargs: Mapping[str, Any] | None = None,
) -> tuple[PictureViews, ...]:
    """What a model is shown of pictures of these sizes; needs its processor only.

    Parameters
    ----------
    processor
        A Hugging Face processor of a known family.
    sizes
        (width, height) in pixels of every picture of ONE question, in prompt order.
    frames
        For videos: frames that the model is given, one number for all or one for each.
    images_kwargs
        As in the processor's call: {"do_pan_and_scan": True}, {"max_pixels": 200704}, ...

    Returns
    -------
    tuple of PictureViews
        `.count` placeholders, `.views` with their grids, `.newlines`.

    Raises
    ------
    GeometryError
        For a processor of no known family, or a size that it refuses.
    """
    from mmlens.families import Source, find_geometry
    from mmlens.families.base import checked_options

    geometry = find_geometry(processor)
    options = checked_options(processor, images_kwargs)
    for size in sizes:
        if not isinstance(size, list | tuple) or len(size) != 2 or not all(isinstance(s, int) and s > 0 for s in size):
            raise OptionError(f"size {size!r}", expected="(width, height) in whole pixels", fix="sizes=[(640, 480)]")
    if frames is None:
        alone = len(sizes) == 1
        return tuple(geometry.views(processor, Source((w, h), alone=alone, options=options)) for w, h in sizes)
    if options:
        raise OptionError(
            f"images_kwargs={images_kwargs} with frames={frames}",
            expected="one of them: these options do not reach videos",
            fix="leave it out; options of the video processor are set on it",
        )
    counts = [frames] * len(sizes) if isinstance(frames, int) else list(frames)
    if len(counts) != len(sizes) or not all(isinstance(n, int) and n > 0 for n in counts):
        raise OptionError(f"frames={frames!r}", expected="frames of each video, above 0", fix="frames=8")
    if not geometry.has_video:
        raise GeometryError(f"videos for {geometry.name}", expected="pictures", fix="leave frames= out")
    return tuple(geometry.views(processor, Source((w, h), "video", n)) for (w, h), n in zip(sizes, counts))


def locate(
    layout: Sequence[PictureViews],
    region: Any,
    *,
    image: int | None = None,
    coverage: float = 0.0,
    views: str = "all",
    sampling: Sampling | None = None,
) -> TokenSet:
    """Ordinals, within the picture's own run of placeholders, of the tokens that a region touches.

    Parameters
    ----------
    region
        A region, or a list of them (their union), all on one picture.
    image
        Which picture; by default the region's own (Page, PageRegion), else 0.
    coverage, views
        As `prompt.locate`.
    sampling
        For tubes: which source frames are shown; by default frames 0, 1, 2, ... at 2 a second.
    """
    regions = as_regions(region)
    number = one_picture(regions, image)
    if not isinstance(layout, list | tuple) or not all(isinstance(p, PictureViews) for p in layout):
        raise OptionError(
            f"a layout given as {type(layout).__name__}",
            expected="what evidence.layout gives",
            fix="see docs/evidence.md",
        )
    if not 0 <= number < len(layout):
        raise RegionError(f"image {number} of {len(layout)}", expected="one of the layout's", fix="count from 0")
    found = find(layout[number], regions, sampling=sampling, coverage=coverage, views=views)
    by_view = {name: TokenSet((tuple(mine),), (tuple(mine.values()),)) for name, mine in found.by_view.items()}
    return TokenSet((tuple(found.shares),), (tuple(found.shares.values()),), found.reason, by_view)


def one_picture(regions: Sequence[Any], image: int | None) -> int:
    """The one picture that some regions lie on; raises RegionError where they, or `image`, disagree."""
    if image is not None and (isinstance(image, bool) or not isinstance(image, int)):
        raise RegionError(f"image={image!r}", expected="an int, from 0", fix="image=0")
    numbers = {picture_of(region, 0 if image is None else image) for region in regions}
    if image is not None:
        numbers.add(image)
    if len(numbers) != 1:
        raise RegionError(
            f"regions on pictures {sorted(numbers)}" if numbers else "no region",
            expected="regions of one picture at a time",
            fix="locate each by itself; sets of tokens are joined with |",
        )
    return numbers.pop()
