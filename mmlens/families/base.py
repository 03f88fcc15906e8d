"""Family: where a model family keeps its parts, mostly as data, so that one file describes one family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmlens.evidence.views import View


@dataclass(frozen=True)
class Stack:
    """Where a stack of pre-norm blocks keeps its parts; paths below `blocks` are relative to one block.

    `attn.qkv` names one fused projection (three equal slices, q, k, v) or three projections; `mlp_in` is the first
    linear layer (the gate, where there is one), `mlp_linear` the up projection beside a gate, `mlp_out` the last
    linear layer.
    """

    blocks: str
    attn: str
    qkv: tuple[str, ...]
    out: str
    ln1: str
    ln2: str
    mlp: str
    mlp_in: str
    mlp_out: str
    mlp_linear: str | None = None
    packed: bool = False  # (row, d) tensors that hold all pictures one after another


# The decoder blocks of Llama, and of the many models that follow it.
LLAMA_BLOCKS = Stack(
    blocks="model.language_model.layers",
    attn="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="o_proj",
    ln1="input_layernorm",
    ln2="post_attention_layernorm",
    mlp="mlp",
    mlp_in="gate_proj",
    mlp_linear="up_proj",
    mlp_out="down_proj",
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a stack."""

    n_layers: int
    n_heads: int
    n_key_value_heads: int
    d_head: int
    d_model: int


@dataclass(frozen=True)
class Segments:
    """How a tower's rows are grouped: lengths in rows of what attends together, and the picture each belongs to."""

    lengths: tuple[int, ...]
    pictures: tuple[int, ...]


class Family(ABC):
    """What mmlens must know of a model family; subclasses fill in data and the few methods below.

    Attributes
    ----------
    name, architectures
        Short name, and the Hugging Face classes that it covers.
    decoder, tower
        Where the blocks are.
    final_norm, unembed, projector
        Module paths.
    deepstack
        Path of the list of DeepStack projectors, or None.
    needs_token_types
        Whether positions are built from `mm_token_type_ids`.
    vision_keys
        Input names that carry pictures.
    """

    name: str
    architectures: tuple[str, ...]
    decoder: Stack
    tower: Stack
    final_norm: str
    unembed: str
    projector: str
    deepstack: str | None = None
    language_model: str = "model.language_model"
    needs_token_types: bool = False
    vision_keys: tuple[str, ...] = ("pixel_values",)

    def decoder_shape(self, config: Any) -> Shape:
        """Sizes of the decoder."""
        text = config.text_config
        d_head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        kv = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        return Shape(text.num_hidden_layers, text.num_attention_heads, kv, d_head, text.hidden_size)

    @abstractmethod
    def tower_shape(self, config: Any) -> Shape:
        """Sizes of the picture tower."""

    def deepstack_layers(self, config: Any) -> int:
        """How many decoder layers get picture features added after them."""
        return 0

    def used_tower_layers(self, config: Any) -> int:
        """Tower blocks from the first that reach the decoder; later ones run but change nothing."""
        return self.tower_shape(config).n_layers

    @abstractmethod
    def picture_tokens(self, config: Any, inputs: Mapping[str, Any]) -> list[int]:
        """Tokens that each picture's features fill, in prompt order."""

    @abstractmethod
    def views(self, processor: Any, inputs: Mapping[str, Any], picture: int, size: tuple[int, int]) -> Sequence[View]:
        """The views that the processor made of a picture of `size` = (width, height) pixels."""

    @abstractmethod
    def token_grid(self, config: Any, inputs: Mapping[str, Any], picture: int) -> tuple[int, int]:
        """(rows, cols) of the picture's tokens in the decoder."""

    @abstractmethod
    def tower_segments(self, config: Any, inputs: Mapping[str, Any]) -> Segments:
        """What attends together in the tower."""

    @abstractmethod
    def tower_raster(self, config: Any, inputs: Mapping[str, Any], picture: int) -> tuple[tuple[int, int], list[int]]:
        """(rows, cols) of the picture's patches, and for each patch in raster order its row among the picture's own."""
