"""Models whose picture tokens ARE the brightness of their own pixels, and whose first head looks for bright tokens.

Weights by hand in the tiny models of every family: the real processor and the real packing code (tiles, newlines,
windows, merging, pooling, shrinking) run, but everything learned is a plain mean.
"""

from __future__ import annotations

import numpy as np
import oracle
import torch
from torch import nn

DROPS_ZEROS = ("idefics3", "smolvlm")  # their models take a tile of zeros for padding
LOOKS = {"gemma3": 1}  # layer 0 of the tiny one sees 16 tokens back only
QUESTION = "what color is the star?"


class Same(nn.Module):
    """What it is given, laid out as a norm lays its output out."""

    def forward(self, x):
        return x.contiguous()


def light(model: nn.Module, name: str) -> nn.Module:
    """In place: black pixels make 0 in every feature of their token, white ones 1; text is the opposite direction."""
    inner = model.model
    _, _, tower_path, at, _ = oracle.PLACES[name]
    text = inner.text_model if hasattr(inner, "text_model") else inner.language_model
    vision = [m for child, m in inner.named_children() if m is not text]
    with torch.no_grad():
        blocks = inner.get_submodule(tower_path)
        inside = {id(m) for block in blocks for m in block.modules()}
        for part in vision:
            _plain(part, inside)
        if name in DROPS_ZEROS:
            inner.vision_model.embeddings.patch_embedding.bias.fill_(-1.0)
        for block in blocks:  # attention and MLP add nothing
            for p in block.parameters():
                p.zero_()
        words = text.embed_tokens.weight
        words.copy_(_text_direction(words.shape[1]).expand_as(words))
        for layer in text.layers:
            layer.self_attn.o_proj.weight.zero_()
            for p in layer.mlp.parameters():
                p.zero_()
        _look_for_light(text, LOOKS.get(name, 0))
    return model


def _text_direction(width: int) -> torch.Tensor:
    return torch.tensor([1.0, -1.0]).repeat(width // 2 + 1)[:width]


def _plain(part: nn.Module, blocks: set[int]) -> None:
    """Norms and activations do nothing; linear layers and convolutions take means; positions and biases are 0."""
    for parent in [m for m in part.modules() if id(m) not in blocks]:
        for child_name, child in list(parent.named_children()):
            kind = type(child).__name__
            if "Norm" in kind or "GELU" in kind or "SiLU" in kind or kind.endswith("Activation"):
                setattr(parent, child_name, Same())
        for attribute in ("act", "act_fn", "activation_fn"):
            if hasattr(parent, attribute) and not isinstance(getattr(parent, attribute), Same):
                setattr(parent, attribute, Same())
    for name, p in part.named_parameters():
        if name.endswith("bias") or "position" in name or "pos_embed" in name or "class" in name or "cls" in name:
            p.zero_()
        elif name.endswith("mm_input_projection_weight"):
            p.fill_(1 / p.shape[0])
        elif p.ndim >= 2:
            p.fill_(1 / p[0].numel())


def _look_for_light(text: nn.Module, number: int) -> None:
    """Every head of one layer: text rows ask, bright tokens answer, through the slowest rotary pair only."""
    layer = text.layers[number]
    attn, width = layer.self_attn, text.embed_tokens.weight.shape[1]
    heads, d = attn.q_proj.out_features // attn.head_dim, attn.head_dim
    for name, p in layer.named_parameters():
        if p.ndim == 1:
            gain = 0.0 if name.endswith("bias") or type(layer.input_layernorm).__name__ == "Gemma3RMSNorm" else 1.0
            p.fill_(gain + (11.0 if "q_norm" in name or "k_norm" in name else 0.0))
    slow = d // 2 - 1  # the last pair of the half-split rotary turns slowest
    query, key = torch.zeros(d, width), torch.zeros(d, width)
    query[slow] = 40 * _text_direction(width) / width
    key[slow] = 40 / width
    attn.q_proj.weight.copy_(query.repeat(heads, 1))
    attn.k_proj.weight.copy_(key.repeat(attn.k_proj.out_features // d, 1))


def plain_pixels(processor, name: str) -> None:
    """0 for black, 1 for white; 1 and 2 where tiles of zeros would be dropped."""
    for part in (processor.image_processor, getattr(processor, "video_processor", None)):
        if part is not None:
            part.image_mean, part.image_std = [-1.0 if name in DROPS_ZEROS else 0.0] * 3, [1.0] * 3


def brightness(vlm, prompt) -> np.ndarray:
    """What the decoder is given at every column, in the direction of light."""
    _, cache = vlm.run_with_cache(prompt, ["hook_embed"], stop_at_layer=0)
    embed = cache["hook_embed"][0].double()
    width = embed.shape[1] // 2 * 2  # text cancels out over pairs
    return embed[:, :width].mean(1).numpy()


def lamp(size: tuple[int, int], box) -> np.ndarray:
    """A black picture with one white rectangle."""
    picture = np.zeros((size[1], size[0], 3), np.uint8)
    picture[int(box.y0) : int(box.y1), int(box.x0) : int(box.x1)] = 255
    return picture
