"""Family: where a model family keeps its parts, mostly as data, so that one file describes one family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mmlens.errors import GeometryError, OptionError
from mmlens.evidence.views import Kind, PictureViews, Size
from mmlens.families.layout import Item, Layout, Segments


@dataclass(frozen=True)
class Stack:
    """Where a stack of blocks keeps its parts; paths below `blocks` are relative to one block.

    Attributes
    ----------
    attn, qkv, out
        The attention module; its projections: one fused (three equal slices, q, k, v) or three; the output projection.
    ln1, ln2
        The norms that attention and MLP read. The stream between the two sublayers is what `ln2` is given.
    mlp, mlp_in, mlp_linear, mlp_out
        The MLP; its first linear layer (the gate, where there is one), the up projection beside a gate, the last
        linear layer. Blocks without these (mixtures of experts) have no hooks inside the MLP.
    attn_added, mlp_added
        Modules whose outputs are added to the stream, where they are not the sublayers themselves (norms after them).
    norm_offset
        Added to the norms' weights before they multiply (1 where a weight of 0 means "as it is").
    attn_scale, mlp_scale
        Parameters of the block that multiply the sublayers' outputs before they are added (layer scale).
    packed
        Tensors are (row, d) and hold all pictures one after another.
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
    attn_added: str | None = None
    mlp_added: str | None = None
    norm_offset: float = 0.0
    attn_scale: str | None = None
    mlp_scale: str | None = None
    packed: bool = False


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

# The tower blocks of CLIP and SigLIP.
CLIP_BLOCKS = Stack(
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


@dataclass(frozen=True)
class Shape:
    """Sizes of a stack."""

    n_layers: int
    n_heads: int
    n_key_value_heads: int
    d_head: int
    d_model: int


@dataclass(frozen=True)
class Source:
    """A picture or video to be shown to a model.

    Attributes
    ----------
    size
        (width, height) in pixels.
    kind, n_frames
        "image", or "video" and the frames that the model is given.
    alone
        Whether it is the only picture of its question.
    grid
        What the processor returned of its own choice, where it does; else the choice is worked out again.
    options
        `images_kwargs` of the processor's call.
    """

    size: Size
    kind: Kind = "image"
    n_frames: int = 0
    alone: bool = True
    grid: tuple[int, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Geometry(ABC):
    """What a family's processor makes of a picture; knows no model.

    Attributes
    ----------
    name, processors
        Short name, and the Hugging Face processor classes that it covers.
    has_video
        Whether prompts may hold videos.
    """

    name: str
    processors: tuple[str, ...] = ()
    has_video: bool = False

    @abstractmethod
    def views(self, processor: Any, source: Source, config: Any = None) -> PictureViews:
        """The looks at a picture, or at a video; `config` is the model's, where there is a model."""


def number(source: Any, name: str, *keys: str, options: Mapping[str, Any] | None = None) -> Any:
    """A processor's setting, `options` first; of a size the first of `keys` that it has."""
    value = (options or {}).get(name, getattr(source, name, None))
    for key in keys:
        found = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
        if found is not None:
            return found
    if keys or value is None:
        raise GeometryError(
            f"{type(source).__name__} with {name}={value!r}",
            expected=f"{name}" + (f" with {' or '.join(keys)}" if keys else ""),
            fix="load the processor from the checkpoint's own files",
        )
    return value


def checked_options(processor: Any, options: Any) -> dict[str, Any]:
    """`images_kwargs` whose names the picture processor knows; it would ignore others without a word."""
    if options is None:
        return {}
    part = getattr(processor, "image_processor", None)
    known = set(getattr(getattr(part, "valid_kwargs", None), "__annotations__", {}))
    unknown = sorted(map(str, set(options) - known)) if isinstance(options, Mapping) else [repr(options)]
    if unknown:
        raise OptionError(
            f"images_kwargs with {', '.join(unknown)}",
            expected=f"names that {type(part).__name__} knows: {', '.join(sorted(known))}",
            fix="check the spelling",
        )
    return dict(options)


def root(n: int) -> int:
    """The side of a square of `n` tokens."""
    side = round(n**0.5)
    if side * side != n:
        raise GeometryError(f"{n} tokens a tile", expected="a square number", fix="check the processor's settings")
    return side


class Family(Geometry):
    """What mmlens must know of a model family; subclasses fill in data and the few methods below.

    Attributes
    ----------
    name, architectures, processors
        Short name, and the Hugging Face classes that it covers.
    decoder, tower
        Where the blocks are.
    language_model, embed, final_norm, unembed, projector
        Module paths.
    deepstack
        Path of the list of DeepStack projectors, or None.
    vision_config
        Name of the tower's part of the config.
    needs_token_types
        Whether positions are built from `mm_token_type_ids`.
    nested_pictures
        Whether the processor wants one list of pictures for each example.
    bidirectional_pictures
        Whether picture tokens attend both ways, so that earlier rows do depend on later ones.
    tiled
        Whether a picture may have tiles or newline tokens, which then have token groups of their own.
    pixels
        Input name that carries each kind.
    """

    architectures: tuple[str, ...]
    decoder: Stack = LLAMA_BLOCKS
    tower: Stack
    language_model: str = "model.language_model"
    embed: str = "model.language_model.embed_tokens"
    final_norm: str = "model.language_model.norm"
    unembed: str = "lm_head"
    projector: str
    deepstack: str | None = None
    vision_config: str = "vision_config"
    needs_token_types: bool = False
    nested_pictures: bool = False
    bidirectional_pictures: bool = False
    tiled: bool = False
    pixels: Mapping[Kind, str] = {"image": "pixel_values", "video": "pixel_values_videos"}

    # ------------------------------------------------------------------ sizes
    def decoder_shape(self, config: Any) -> Shape:
        """Sizes of the decoder."""
        text = config.text_config
        d_head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        kv = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        return Shape(text.num_hidden_layers, text.num_attention_heads, kv, d_head, text.hidden_size)

    def tower_shape(self, config: Any) -> Shape:
        """Sizes of the picture tower."""
        vision = config.vision_config
        heads = vision.num_attention_heads
        return Shape(vision.num_hidden_layers, heads, heads, vision.hidden_size // heads, vision.hidden_size)

    def deepstack_layers(self, config: Any) -> int:
        """How many decoder layers get picture features added after them."""
        return 0

    def used_tower_layers(self, config: Any) -> int:
        """Tower blocks from the first that reach the decoder; later ones run but change nothing."""
        return self.tower_shape(config).n_layers

    # ------------------------------------------------------------------ pictures in a prompt
    def token_ids(self, config: Any) -> dict[int, Kind]:
        """Ids of the placeholders that picture features replace, and the kind that each stands for."""
        found: dict[int, Kind] = {config.image_token_id: "image"}
        if self.has_video and getattr(config, "video_token_id", None) is not None:
            found.setdefault(config.video_token_id, "video")
        return found

    @abstractmethod
    def counts(self, config: Any, inputs: Mapping[str, Any], processor: Any) -> dict[Kind, list[int]]:
        """Tokens that each picture and each video fills, in prompt order over the batch; {} without any."""

    def filled(self, config: Any, inputs: Mapping[str, Any], processor: Any) -> int:
        """Tokens that the features in these inputs fill, told from the pixels alone."""
        return sum(n for found in self.counts(config, inputs, processor).values() for n in found)

    def given(
        self, config: Any, inputs: Mapping[str, Any], processor: Any, items: Sequence[Item], number: int
    ) -> dict[str, Any]:
        """What the processor said of item `number`, as `grid` and `alone` of `views`."""
        return {}

    @abstractmethod
    def layout(
        self, config: Any, inputs: Mapping[str, Any], processor: Any, items: Sequence[Item], number: int
    ) -> Layout:
        """Where item `number` lies: in its own run of tokens, in the projector's output and in the tower's streams."""

    @abstractmethod
    def segments(self, config: Any, inputs: Mapping[str, Any], items: Sequence[Item], layer: int) -> Segments:
        """What attends together in a tower block."""


def last_feature_block(config: Any, n_layers: int) -> int:
    """How many tower blocks `vision_feature_layer` (an index, or several) needs."""
    layer = config.vision_feature_layer
    # hidden_states[0] is the embedding, hidden_states[i] the output of block i - 1
    return max((i if i >= 0 else n_layers + 1 + i) for i in ([layer] if isinstance(layer, int) else layer))


def picture_columns(inputs: Mapping[str, Any], config: Any, example: int) -> list[int]:
    """Columns of an example that hold the picture placeholder."""
    return (inputs["input_ids"][example] == config.image_token_id).nonzero()[:, 0].tolist()


def grid_rows(inputs: Mapping[str, Any], key: str) -> list[tuple[int, int, int]]:
    """(frames, rows, cols) in patches of every picture, as Qwen processors return them."""
    grid = inputs.get(key)
    return [] if grid is None else [tuple(row) for row in torch.as_tensor(grid).tolist()]
