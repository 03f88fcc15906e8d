"""Qwen2-VL, 2.5-VL, 3-VL: packed towers in merge-block order (2.5: and in windows), 3-D positions, DeepStack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmlens.evidence.views import stretch
from mmlens.families.base import Family, Grid, Item, Kind, Layout, Raster, Segments, Shape, Stack, grid_rows

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

    def _place(self, inputs: Mapping[str, Any], items: Sequence[Item], number: int) -> tuple[int, int, int, int]:
        """(frame groups, rows, cols) in patches, and the item's first row in the tower."""
        kind = items[number].kind
        grids = grid_rows(inputs, _KEYS[kind])
        index = sum(item.kind == kind for item in items[:number])
        return *grids[index], sum(t * h * w for t, h, w in grids[:index])

    def units(self, config: Any, frames: int, rows: int, cols: int) -> list[int]:
        """For each merge block in raster order, frame after frame: its place in the tower."""
        return list(range(frames * rows * cols))

    def layout(
        self, config: Any, inputs: Mapping[str, Any], processor: Any, items: Sequence[Item], number: int
    ) -> Layout:
        vision, item = config.vision_config, items[number]
        m = vision.spatial_merge_size
        t, h, w, start = self._place(inputs, items, number)
        rows, cols = h // m, w // m
        place = self.units(config, t, rows, cols)
        view = None if item.size is None else stretch(*item.size, cols=cols, rows=rows, cell=vision.patch_size * m)
        per_group = vision.temporal_patch_size if item.kind == "video" else 0
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
                    None if view is None else replace(view, ordinals=tuple(range(first, first + rows * cols))),
                    tuple(range(g * per_group, (g + 1) * per_group)),
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

    def tower_shape(self, config: Any) -> Shape:
        vision = config.vision_config
        d = vision.embed_dim
        return Shape(vision.depth, vision.num_heads, vision.num_heads, d // vision.num_heads, d)


class Qwen25VL(QwenVL):
    """Most tower blocks attend within windows, and every stream of the tower is in the order of the windows."""

    name = "qwen2.5-vl"
    architectures = ("Qwen2_5_VLForConditionalGeneration",)
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
