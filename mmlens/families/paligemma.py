"""PaliGemma's picture geometry: one squashed square in front of the text. Its model has no family here yet."""

from __future__ import annotations

from typing import Any

from mmlens.evidence.schemes import square_views
from mmlens.evidence.views import PictureViews
from mmlens.families.base import Geometry, Source, number, root


class PaliGemma(Geometry):
    """224, 448 or 896 pixels a side, 14 a token; `token_type_ids` there tell prefix from suffix, not pictures."""

    name = "paligemma"
    processors = ("PaliGemmaProcessor",)

    def views(self, processor: Any, source: Source, config: Any = None) -> PictureViews:
        side = number(processor.image_processor, "size", "height", options=source.options)
        cells = root(number(processor, "image_seq_length"))
        return square_views(source.size, side=side, cells=cells, cell=side / cells)


PALIGEMMA = PaliGemma()
