"""Qwen3-VL: a packed tower in 2 x 2 block order, 3-D positions, DeepStack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmlens.evidence.views import View, stretch
from mmlens.families.base import LLAMA_BLOCKS, Family, Segments, Shape, Stack


class Qwen3VL(Family):
    """Picture features enter at the placeholders, and again (DeepStack) after each of the first decoder blocks."""

    name = "qwen3-vl"
    architectures = ("Qwen3VLForConditionalGeneration",)
    decoder = LLAMA_BLOCKS
    tower = Stack(
        blocks="model.visual.blocks",
        attn="attn",
        qkv=("qkv",),
        out="proj",
        ln1="norm1",
        ln2="norm2",
        mlp="mlp",
        mlp_in="linear_fc1",
        mlp_out="linear_fc2",
        packed=True,
    )
    final_norm = "model.language_model.norm"
    unembed = "lm_head"
    projector = "model.visual.merger"
    deepstack = "model.visual.deepstack_merger_list"
    needs_token_types = True
    vision_keys = ("pixel_values", "image_grid_thw")

    def tower_shape(self, config: Any) -> Shape:
        vision = config.vision_config
        d_head = vision.hidden_size // vision.num_heads
        return Shape(vision.depth, vision.num_heads, vision.num_heads, d_head, vision.hidden_size)

    def deepstack_layers(self, config: Any) -> int:
        depth = config.vision_config.depth
        return sum(i < depth for i in config.vision_config.deepstack_visual_indexes)

    def _grid(self, inputs: Mapping[str, Any], picture: int) -> tuple[int, int, int]:
        t, h, w = inputs["image_grid_thw"][picture].tolist()
        return t, h, w

    def picture_tokens(self, config: Any, inputs: Mapping[str, Any]) -> list[int]:
        if inputs.get("image_grid_thw") is None:
            return []
        merge = config.vision_config.spatial_merge_size**2
        return [int(n) // merge for n in inputs["image_grid_thw"].prod(-1).tolist()]

    def views(self, processor: Any, inputs: Mapping[str, Any], picture: int, size: tuple[int, int]) -> Sequence[View]:
        _, h, w = self._grid(inputs, picture)
        pixels = processor.image_processor
        merge = pixels.merge_size
        return [stretch(*size, cols=w // merge, rows=h // merge, cell=pixels.patch_size * merge)]

    def token_grid(self, config: Any, inputs: Mapping[str, Any], picture: int) -> tuple[int, int]:
        _, h, w = self._grid(inputs, picture)
        merge = config.vision_config.spatial_merge_size
        return h // merge, w // merge

    def tower_segments(self, config: Any, inputs: Mapping[str, Any]) -> Segments:
        grids = [self._grid(inputs, i) for i in range(len(inputs["image_grid_thw"]))]
        frames = [(h * w, i) for i, (t, h, w) in enumerate(grids) for _ in range(t)]
        return Segments(tuple(n for n, _ in frames), tuple(i for _, i in frames))

    def tower_raster(self, config: Any, inputs: Mapping[str, Any], picture: int) -> tuple[tuple[int, int], list[int]]:
        _, h, w = self._grid(inputs, picture)
        m = config.vision_config.spatial_merge_size
        order = []
        for r in range(h):
            for c in range(w):
                block = (r // m) * (w // m) + c // m
                order.append(block * m * m + (r % m) * m + c % m)
        return (h, w), order


QWEN3_VL = Qwen3VL()
