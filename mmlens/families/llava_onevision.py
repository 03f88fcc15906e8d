"""LLaVA-OneVision: SigLIP tower, any-resolution pictures (large mosaics shrunk), padded squares, pooled frames."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mmlens.evidence.schemes import anyres_views, padded_views, pooled_clip
from mmlens.evidence.views import Kind, PictureViews
from mmlens.families.base import Source, number, root
from mmlens.families.layout import Grid, Item, Layout, Segments, square, tile_segments
from mmlens.families.llava_next import AnyRes, pairs


class LlavaOnevision(AnyRes):
    """One picture is tiled; several in one question are padded squares; a video is 14 x 14 tokens a frame."""

    name = "llava-onevision"
    architectures = ("LlavaOnevisionForConditionalGeneration",)
    processors = ("LlavaOnevisionProcessor",)
    nested_pictures = True
    has_video = True

    def most_tiles(self, source: Any) -> int | None:
        return int(source.vision_aspect_ratio.removeprefix("anyres_max_"))

    def is_tiled(self, config: Any, inputs: Mapping[str, Any], picture: int) -> bool:
        if inputs.get("batch_num_images") is None:
            return True
        for n in map(int, inputs["batch_num_images"]):
            if picture < n:
                return n == 1
            picture -= n
        return True

    def views(self, processor: Any, source: Source, config: Any = None) -> PictureViews:
        pixels = processor.image_processor if source.kind == "image" else processor.video_processor
        tile = number(pixels, "size", "height", options=source.options)
        side = root(number(processor, "num_image_tokens"))
        # the processor does not know its model's patches; only one size of them fits so many in a side
        cell = tile // side if config is None else config.vision_config.patch_size
        if source.kind == "video":
            tokens = math.ceil(side / 2)
            return pooled_clip(source.size, side=tile, cells=side, tokens=tokens, cell=cell, n_frames=source.n_frames)
        if not source.alone:
            return padded_views(source.size, side=tile, cells=side, cell=cell, newline=True)
        pinpoints = pairs(number(pixels, "image_grid_pinpoints", options=source.options))
        most = self.most_tiles(processor)
        return anyres_views(source.size, pinpoints=pinpoints, tile=tile, side=side, cell=cell, most=most)

    def given(
        self, config: Any, inputs: Mapping[str, Any], processor: Any, items: Sequence[Item], index: int
    ) -> dict[str, Any]:
        return {"alone": self.is_tiled(config, inputs, index)} if items[index].kind == "image" else {}

    def _pooled(self, config: Any) -> int:
        return math.ceil(self.side(config) / 2)

    def counts(self, config: Any, inputs: Mapping[str, Any], processor: Any) -> dict[Kind, list[int]]:
        found = super().counts(config, inputs, processor)
        videos = inputs.get("pixel_values_videos")
        if videos is not None:
            found["video"] = [len(frames) * self._pooled(config) ** 2 + 1 for frames in videos]
        return found

    def layout(
        self, config: Any, inputs: Mapping[str, Any], processor: Any, items: Sequence[Item], index: int
    ) -> Layout:
        if items[index].kind == "image":
            return super().layout(config, inputs, processor, items, index)
        videos = inputs["pixel_values_videos"]
        mine = sum(i.kind == "video" for i in items[:index])
        start = sum(len(frames) for frames in videos[:mine])
        side, small = self.side(config), self._pooled(config)
        grids = []
        for f in range(len(videos[mine])):
            tokens = square(small, f * small * small)
            handed = square(side, (start + f) * self.base_tokens(config))
            patches = square(side, (start + f) * self.tower_rows(config))
            grids.append(Grid(f"frame:{f}", tokens, handed, patches, frames=(f,)))
        return Layout(tuple(grids), (), (len(grids) * small * small,))

    def segments(self, config: Any, inputs: Mapping[str, Any], items: Sequence[Item], layer: int) -> Segments:
        if items[0].kind == "image":
            return super().segments(config, inputs, items, layer)
        return tile_segments(self.tower_rows(config), [len(frames) for frames in inputs["pixel_values_videos"]])


LLAVA_ONEVISION = LlavaOnevision()
