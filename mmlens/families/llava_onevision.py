"""LLaVA-OneVision: SigLIP tower, any-resolution pictures (large mosaics shrunk), padded squares, pooled frames."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mmlens.evidence.views import View, pad_to_square, squash
from mmlens.families.base import Grid, Item, Kind, Layout, Segments, square, tile_segments
from mmlens.families.llava_next import AnyRes, Canvas


class LlavaOnevision(AnyRes):
    """One picture is tiled; several in one question are padded squares; a video is 14 x 14 tokens a frame."""

    name = "llava-onevision"
    architectures = ("LlavaOnevisionForConditionalGeneration",)
    nested_pictures = True
    has_video = True

    def shrunk(self, config: Any, canvas: Canvas) -> tuple[int, int]:
        most = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
        ratio = math.sqrt(canvas.rows * canvas.cols / (most * self.side(config) ** 2))
        if ratio <= 1.1:
            return canvas.rows, canvas.cols
        return int(canvas.rows // ratio), int(canvas.cols // ratio)

    def is_tiled(self, config: Any, inputs: Mapping[str, Any], picture: int) -> bool:
        if inputs.get("batch_num_images") is None:
            return True
        for n in map(int, inputs["batch_num_images"]):
            if picture < n:
                return n == 1
            picture -= n
        return True

    def base_view(self, config: Any, item: Item, *, tiled: bool) -> View | None:
        vision = config.vision_config
        if item.size is None or tiled:
            return super().base_view(config, item, tiled=tiled)
        return pad_to_square(*item.size, side=vision.image_size, cell=vision.patch_size)

    def _pooled(self, config: Any) -> int:
        return math.ceil(self.side(config) / 2)

    def counts(self, config: Any, inputs: Mapping[str, Any], processor: Any) -> dict[Kind, list[int]]:
        found = super().counts(config, inputs, processor)
        videos = inputs.get("pixel_values_videos")
        if videos is not None:
            found["video"] = [len(frames) * self._pooled(config) ** 2 + 1 for frames in videos]
        return found

    def layout(
        self, config: Any, inputs: Mapping[str, Any], processor: Any, items: Sequence[Item], number: int
    ) -> Layout:
        item = items[number]
        if item.kind == "image":
            return super().layout(config, inputs, processor, items, number)
        videos = inputs["pixel_values_videos"]
        index = sum(i.kind == "video" for i in items[:number])
        start = sum(len(frames) for frames in videos[:index])
        side, small = self.side(config), self._pooled(config)
        view = None
        if item.size is not None and side == 2 * small:  # pooled two by two; odd sides mix their neighbours
            vision = config.vision_config
            view = squash(*item.size, side=vision.image_size, cell=2 * vision.patch_size)
        grids = []
        for f in range(len(videos[index])):
            tokens = square(small, f * small * small)
            handed = square(side, (start + f) * self.base_tokens(config))
            patches = square(side, (start + f) * self.tower_rows(config))
            shown = None if view is None else View(**{**view.__dict__, "ordinals": tokens.index})
            grids.append(Grid(f"frame:{f}", tokens, handed, patches, shown, (f,)))
        return Layout(tuple(grids), (), (len(grids) * small * small,))

    def segments(self, config: Any, inputs: Mapping[str, Any], items: Sequence[Item], layer: int) -> Segments:
        if items[0].kind == "image":
            return super().segments(config, inputs, items, layer)
        return tile_segments(self.tower_rows(config), [len(frames) for frames in inputs["pixel_values_videos"]])


LLAVA_ONEVISION = LlavaOnevision()
