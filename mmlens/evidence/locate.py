"""Which of a picture's tokens a region touches."""

from __future__ import annotations

from collections.abc import Sequence

from mmlens.evidence.regions import Box
from mmlens.evidence.views import View


def covered_tokens(views: Sequence[View], box: Box, *, width: int, height: int) -> dict[int, float]:
    """Ordinals of the picture's own tokens under the box, with the fraction of each cell that it covers.

    Empty where the processor's crop left nothing of the box; raises RegionError for a box outside the picture.
    """
    inside = box.clip(width, height)
    found: dict[int, float] = {}
    for view in views:
        found.update(view.coverage(inside))
    return dict(sorted(found.items()))
