"""Qwen2-VL, 2.5-VL, 3-VL: packed towers in merge-block order (2.5: and in windows), 3-D positions, DeepStack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmlens.errors import GeometryError
from mmlens.evidence.schemes import qwen_cells, qwen_clip, qwen_views
from mmlens.evidence.views import Kind, PictureViews, Size
from mmlens.families.base import Family, Shape, Source, Stack, grid_rows, number
from mmlens.families.layout import Grid, Item, Layout, Raster, Segments

_KEYS: dict[Kind, str] = {"image": "image_grid_thw", "video": "video_grid_thw"}


class QwenVL(Family):
    """What the three have in common: (row, d) tensors, and one token for each block of merge x merge patches."""

    tower = Stack(
        blocks="model.visual.blocks",
        attn="attn",
        qkv=("qkv",),
        out="proj",
        ln1="norm1",
        ln2="norm2",
        mlp="mlp",
        mlp_in="fc1",
        mlp_out="fc2",
        packed=True,
    )
    projector = "model.visual.merger"
    clip_budget = False  # whether a video's pixels are budgeted over the whole clip
    needs_token_types = True
    has_video = True

    def tower_shape(self, config: Any) -> Shape:
        vision = config.vision_config
        d = vision.hidden_size
        return Shape(vision.depth, vision.num_heads, vision.num_heads, d // vision.num_heads, d)

    def counts(self, config: Any, inputs: Mapping[str, Any], processor: Any) -> dict[Kind, list[int]]:
        unit = config.vision_config.spatial_merge_size**2
        grids = {kind: grid_rows(inputs, key) for kind, key in _KEYS.items()}
        return {kind: [t * h * w // unit for t, h, w in rows] for kind, rows in grids.items() if rows}

    def _place(self, inputs: Mapping[str, Any], items: Sequence[Item], index: int) -> tuple[int, int, int, int]:
        """(frame groups, rows, cols) in patches, and the item's first row in the tower."""
        kind = items[index].kind
        grids = grid_rows(inputs, _KEYS[kind])
        mine = sum(item.kind == kind for item in items[:index])
        return *grids[mine], sum(t * h * w for t, h, w in grids[:mine])

    def views(self, processor: Any, source: Source, config: Any = None) -> PictureViews:
        part = processor.image_processor if source.kind == "image" else processor.video_processor
        merge = number(part, "merge_size", options=source.options)
        factor = number(part, "patch_size", options=source.options) * merge
        grid = source.grid
        cells = self._cells(part, source, factor) if grid is None else (grid[2] // merge, grid[1] // merge)
        if source.kind == "image":
            return qwen_views(source.size, cells, cell=factor)
        per_group = number(part, "temporal_patch_size")
        return qwen_clip(source.size, cells, cell=factor, n_frames=source.n_frames, per_group=per_group)

    def _cells(self, part: Any, source: Source, factor: int) -> Size:
        """(cols, rows) that the processor will choose."""
        options, n_frames = source.options, source.n_frames
        least, most = (number(part, "size", key, options=options) for key in ("shortest_edge", "longest_edge"))
        least, most = (options.get(k, v) for k, v in (("min_pixels", least), ("max_pixels", most)))
        frames, per_group = 0, 1
        if n_frames:
            per_group = number(part, "temporal_patch_size")
            frames = n_frames if self.clip_budget else 0
            if getattr(part, "cap_pixels_per_frame", None):
                total = int(part.max_video_tokens * factor * factor * 0.9)
                most = max(min(most, total * per_group // n_frames), int(least * 1.05))
        found = qwen_cells(source.size, factor=factor, least=least, most=most, frames=frames, per_group=per_group)
        if found is None:
            raise GeometryError(
                f"a picture of {source.size[0]} x {source.size[1]} pixels",
                expected="sides at most 200 : 1, as this processor takes them",
                fix="crop it first",
            )
        return found

    def given(
        self, config: Any, inputs: Mapping[str, Any], processor: Any, items: Sequence[Item], index: int
    ) -> dict[str, Any]:
        return {"grid": self._place(inputs, items, index)[:3]}

    def units(self, config: Any, frames: int, rows: int, cols: int) -> list[int]:
        """For each merge block in raster order, frame after frame: its place in the tower."""
        return list(range(frames * rows * cols))

    def layout(
        self, config: Any, inputs: Mapping[str, Any], processor: Any, items: Sequence[Item], index: int
    ) -> Layout:
        vision, item = config.vision_config, items[index]
        m = vision.spatial_merge_size
        t, h, w, start = self._place(inputs, items, index)
        rows, cols = h // m, w // m
        place = self.units(config, t, rows, cols)
        per_group = vision.temporal_patch_size if item.kind == "video" else 0
        n_frames = t * per_group if item.sampling is None else len(item.sampling.indices)
        grids = []
        for g in range(t):
            first = g * rows * cols
            units = [place[first + i] for i in range(rows * cols)]
            patches = [
                start + units[(r // m) * cols + c // m] * m * m + (r % m) * m + c % m
                for r in range(h)
                for c in range(w)
            ]
            grids.append(
                Grid(
                    f"frame:{g * per_group}" if per_group else "whole",
                    Raster(rows, cols, tuple(range(first, first + rows * cols))),
                    Raster(rows, cols, tuple(start // (m * m) + u for u in units)),
                    Raster(h, w, tuple(patches)),
                    frames=tuple(range(g * per_group, min((g + 1) * per_group, n_frames))),
                )
            )
        return Layout(tuple(grids))

    def segments(self, config: Any, inputs: Mapping[str, Any], items: Sequence[Item], layer: int) -> Segments:
        kind: Kind = items[0].kind
        frames = [(h * w, i) for i, (t, h, w) in enumerate(grid_rows(inputs, _KEYS[kind])) for _ in range(t)]
        return Segments(tuple(n for n, _ in frames), tuple(i for _, i in frames))


class Qwen2VL(QwenVL):
    """LayerNorm, a tower that sees each frame whole."""

    name = "qwen2-vl"
    architectures = ("Qwen2VLForConditionalGeneration",)
    processors = ("Qwen2VLProcessor",)

    def tower_shape(self, config: Any) -> Shape:
        vision = config.vision_config
        d = vision.embed_dim
        return Shape(vision.depth, vision.num_heads, vision.num_heads, d // vision.num_heads, d)


class Qwen25VL(QwenVL):
    """Most tower blocks attend within windows, and every stream of the tower is in the order of the windows."""

    name = "qwen2.5-vl"
    architectures = ("Qwen2_5_VLForConditionalGeneration",)
    processors = ("Qwen2_5_VLProcessor",)
    tower = replace(QwenVL.tower, mlp_in="gate_proj", mlp_linear="up_proj", mlp_out="down_proj")

    def _windows(self, config: Any, frames: int, rows: int, cols: int) -> Iterator[list[int]]:
        """Merge blocks (numbered in raster order) of every window that holds any, in the tower's order."""
        vision = config.vision_config
        side = vision.window_size // vision.spatial_merge_size // vision.patch_size
        for f in range(frames):
            for top in range(0, rows, side):
                for left in range(0, cols, side):
                    yield [
                        f * rows * cols + r * cols + c
                        for r in range(top, min(top + side, rows))
                        for c in range(left, min(left + side, cols))
                    ]

    def units(self, config: Any, frames: int, rows: int, cols: int) -> list[int]:
        order = [block for window in self._windows(config, frames, rows, cols) for block in window]
        place = [0] * len(order)
        for i, block in enumerate(order):
            place[block] = i
        return place

    def segments(self, config: Any, inputs: Mapping[str, Any], items: Sequence[Item], layer: int) -> Segments:
        vision = config.vision_config
        if layer in vision.fullatt_block_indexes:
            return super().segments(config, inputs, items, layer)
        m = vision.spatial_merge_size
        found = [
            (len(window) * m * m, i)
            for i, (t, h, w) in enumerate(grid_rows(inputs, _KEYS[items[0].kind]))
            for window in self._windows(config, t, h // m, w // m)
        ]
        return Segments(tuple(n for n, _ in found), tuple(i for _, i in found))


class Qwen3VL(QwenVL):
    """Picture features enter at the placeholders, and again (DeepStack) after each of the first decoder blocks."""

    name = "qwen3-vl"
    architectures = ("Qwen3VLForConditionalGeneration",)
    processors = ("Qwen3VLProcessor",)
    clip_budget = True
    tower = replace(QwenVL.tower, mlp_in="linear_fc1", mlp_out="linear_fc2")
    deepstack = "model.visual.deepstack_merger_list"

    def deepstack_layers(self, config: Any) -> int:
        depth = config.vision_config.depth
        return sum(i < depth for i in config.vision_config.deepstack_visual_indexes)


class Qwen3VLMoe(Qwen3VL):
    """Qwen3-VL whose decoder MLPs are mixtures of experts; those blocks have no hooks inside the MLP."""

    name = "qwen3-vl-moe"
    architectures = ("Qwen3VLMoeForConditionalGeneration",)


QWEN_FAMILIES: tuple[Family, ...] = (Qwen2VL(), Qwen25VL(), Qwen3VL(), Qwen3VLMoe())
