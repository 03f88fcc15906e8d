"""Idefics3 and SmolVLM: pictures cut into tiles that are named in the text, the whole picture last."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmlens.evidence.schemes import framed_clip, idefics_grid, tiled_views
from mmlens.evidence.views import Kind, PictureViews
from mmlens.families.base import CLIP_BLOCKS, LLAMA_BLOCKS, Family, Source, number, picture_columns, root
from mmlens.families.layout import Item, Layout, Segments, runs, tile_segments, tiled_layout

_PLACE = re.compile(r"<row_(\d+)_col_(\d+)>")


class Idefics3(Family):
    """Each tile is a run of placeholders behind its mark `<row_r_col_c>`; the last run is the whole picture."""

    name = "idefics3"
    architectures = ("Idefics3ForConditionalGeneration",)
    processors = ("Idefics3Processor",)
    decoder = replace(LLAMA_BLOCKS, blocks="model.text_model.layers")
    language_model = "model.text_model"
    embed = "model.text_model.embed_tokens"
    final_norm = "model.text_model.norm"
    tower = replace(CLIP_BLOCKS, blocks="model.vision_model.encoder.layers")
    projector = "model.connector"
    nested_pictures = True
    tiled = True

    def _sides(self, config: Any) -> tuple[int, int]:
        """Patches, and tokens, along a tile's side."""
        vision = config.vision_config
        side = vision.image_size // vision.patch_size
        return side, side // config.scale_factor

    def counts(self, config: Any, inputs: Mapping[str, Any], processor: Any) -> dict[Kind, list[int]]:
        if inputs.get("pixel_values") is None:
            return {}
        tile = self._sides(config)[1] ** 2
        last = None if processor is None else processor.tokenizer.convert_tokens_to_ids(self._whole_mark(processor))
        found: list[int] = []
        for example, ids in enumerate(inputs["input_ids"].tolist()):
            n = 0
            columns = picture_columns(inputs, config, example)
            for at in range(0, len(columns), tile):
                n += tile
                # without a processor the marks' ids are unknown: all tiles of an example count as one picture
                if last is not None and ids[columns[at] - 1] == last:
                    found.append(n)
                    n = 0
            if n:
                found.append(n)
        return {"image": found} if found else {}

    def filled(self, config: Any, inputs: Mapping[str, Any], processor: Any) -> int:
        tiles = inputs.get("pixel_values")
        if tiles is None:
            return 0
        # tiles of zeros are padding to the batch's most tiles; the model leaves them out
        return int((tiles != 0).flatten(2).any(-1).sum()) * self._sides(config)[1] ** 2

    def _whole_mark(self, processor: Any) -> str:
        """The mark in front of the whole picture."""
        return str(processor.global_image_tag)

    def _tiles(self, config: Any, item: Item) -> int:
        return len(item.columns) // self._sides(config)[1] ** 2

    def _shape(self, inputs: Mapping[str, Any], processor: Any, item: Item, tiles: int) -> tuple[int, int] | None:
        """(rows, cols) of tiles, as the marks in the text tell."""
        if processor is None:
            return None
        ids = inputs["input_ids"][item.example].tolist()
        marks = processor.tokenizer.convert_ids_to_tokens([ids[run[0] - 1] for run in runs(item.columns)])
        places = [(int(m[1]), int(m[2])) for m in map(_PLACE.fullmatch, marks) if m]
        if not places or len(places) != tiles - 1:
            return None
        return max(r for r, _ in places), max(c for _, c in places)

    def views(self, processor: Any, source: Source, config: Any = None) -> PictureViews:
        q = root(number(processor, "image_seq_len"))
        part = processor.image_processor if source.kind == "image" else processor.video_processor
        tile = number(part, "max_image_size", "longest_edge", options=source.options)
        # whole patches of the model fill a tile but for its last pixels; without a model, whole pixels a token do
        vision = None if config is None else config.vision_config
        cell = tile // q if vision is None else vision.patch_size * config.scale_factor
        if source.kind == "video":
            return framed_clip(source.size, tile=tile, side=q, cell=cell, n_frames=source.n_frames)
        grid = source.grid
        if grid is None and source.options.get("do_image_splitting", part.do_image_splitting):
            longest = number(part, "size", "longest_edge", options=source.options)
            grid = idefics_grid(source.size, longest=longest, tile=tile)
        shape = None if grid is None else (grid[0], grid[1])
        return tiled_views(source.size, shape, tile=tile, side=q, cell=cell)

    def given(
        self, config: Any, inputs: Mapping[str, Any], processor: Any, items: Sequence[Item], index: int
    ) -> dict[str, Any]:
        item = items[index]
        shape = self._shape(inputs, processor, item, self._tiles(config, item)) if item.kind == "image" else None
        return {} if shape is None else {"grid": (shape[1], shape[0])}

    def layout(
        self, config: Any, inputs: Mapping[str, Any], processor: Any, items: Sequence[Item], index: int
    ) -> Layout:
        item, (side, q) = items[index], self._sides(config)
        tiles = self._tiles(config, item)
        shape = self._shape(inputs, processor, item, tiles) if item.kind == "image" else None
        start = sum(self._tiles(config, i) for i in items[:index])
        return tiled_layout(item.kind, shape, tiles=tiles, start=start, side=side, q=q, rows=side * side)

    def segments(self, config: Any, inputs: Mapping[str, Any], items: Sequence[Item], layer: int) -> Segments:
        return tile_segments(self._sides(config)[0] ** 2, [self._tiles(config, i) for i in items])


class SmolVLM(Idefics3):
    """The same blocks; frames of a video are whole pictures."""

    name = "smolvlm"
    architectures = ("SmolVLMForConditionalGeneration",)
    processors = ("SmolVLMProcessor",)
    has_video = True
    pixels: Mapping[Kind, str] = {"image": "pixel_values", "video": "pixel_values"}

    def _whole_mark(self, processor: Any) -> str:
        return str(processor.global_image_token)

    def token_ids(self, config: Any) -> dict[int, Kind]:
        return {config.image_token_id: "image"}  # frames use the picture's placeholder


IDEFICS_FAMILIES: tuple[Family, ...] = (Idefics3(), SmolVLM())
