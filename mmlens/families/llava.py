"""LLaVA-1.5: a CLIP tower whose last block is unused, a two-layer projector, a Llama decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmlens.evidence.views import View, pad_to_square, shortest_edge_center_crop
from mmlens.families.base import LLAMA_BLOCKS, Family, Segments, Shape, Stack


class Llava(Family):
    """Every picture gives the same square of tokens; the tower's CLS row is dropped before the projector."""

    name = "llava-1.5"
    architectures = ("LlavaForConditionalGeneration",)
    decoder = LLAMA_BLOCKS
    tower = Stack(
        blocks="model.vision_tower.encoder.layers",
        attn="self_attn",
        qkv=("q_proj", "k_proj", "v_proj"),
        out="out_proj",
        ln1="layer_norm1",
        ln2="layer_norm2",
        mlp="mlp",
        mlp_in="fc1",
        mlp_out="fc2",
    )
    final_norm = "model.language_model.norm"
    unembed = "lm_head"
    projector = "model.multi_modal_projector"

    def tower_shape(self, config: Any) -> Shape:
        vision = config.vision_config
        heads = vision.num_attention_heads
        return Shape(vision.num_hidden_layers, heads, heads, vision.hidden_size // heads, vision.hidden_size)

    def used_tower_layers(self, config: Any) -> int:
        layer = config.vision_feature_layer
        n = self.tower_shape(config).n_layers
        # hidden_states[0] is the embedding, hidden_states[i] the output of block i - 1
        return max((i if i >= 0 else n + 1 + i) for i in ([layer] if isinstance(layer, int) else layer))

    def _side(self, config: Any) -> int:
        vision = config.vision_config
        return int(vision.image_size // vision.patch_size)

    def _has_cls(self, config: Any) -> bool:
        return bool(config.vision_config.model_type == "clip_vision_model")

    def picture_tokens(self, config: Any, inputs: Mapping[str, Any]) -> list[int]:
        if inputs.get("pixel_values") is None:
            return []
        rows = self._side(config) ** 2 + self._has_cls(config)
        dropped = config.vision_feature_select_strategy == "default"
        return [rows - dropped] * len(inputs["pixel_values"])

    def views(self, processor: Any, inputs: Mapping[str, Any], picture: int, size: tuple[int, int]) -> Sequence[View]:
        pixels = processor.image_processor
        crop = pixels.crop_size["height"]
        if getattr(pixels, "do_pad", False):
            return [pad_to_square(*size, side=crop, cell=processor.patch_size)]
        edge = pixels.size["shortest_edge"]
        return [shortest_edge_center_crop(*size, edge=edge, crop=crop, cell=processor.patch_size)]

    def token_grid(self, config: Any, inputs: Mapping[str, Any], picture: int) -> tuple[int, int]:
        return self._side(config), self._side(config)

    def tower_segments(self, config: Any, inputs: Mapping[str, Any]) -> Segments:
        n = len(inputs["pixel_values"])
        return Segments((self._side(config) ** 2 + self._has_cls(config),) * n, tuple(range(n)))

    def tower_raster(self, config: Any, inputs: Mapping[str, Any], picture: int) -> tuple[tuple[int, int], list[int]]:
        side, cls = self._side(config), int(self._has_cls(config))
        return (side, side), list(range(cls, side * side + cls))


LLAVA = Llava()
