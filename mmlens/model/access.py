"""How a named value leaves and enters a module: sides, reshapes, slices, and values derived from others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from mmlens.families.base import Shape


@dataclass(frozen=True)
class Access:
    """How a value leaves and enters a module: one of its sides, seen through a pair of reshapes.

    `write` gets the module-side value and the user's value and returns the new module-side value.
    """

    envoy: Any
    side: str  # "input" | "output"
    view: Callable[[Tensor], Tensor] = lambda raw: raw
    write: Callable[[Tensor, Tensor], Tensor] | None = lambda raw, new: new.reshape(raw.shape)
    in_place: bool = False
    grad_view: Callable[[Tensor], Tensor] | None = None  # of the module-side gradient; None: the same reshape as `view`
    prepare: Callable[[], None] | None = None  # called before a run that reads it

    def _raw(self) -> Any:
        return getattr(self.envoy, self.side)

    def read(self) -> Tensor:
        """The value as users see it; not a copy."""
        return self.view(self.raw())

    def raw(self) -> Tensor:
        """The module-side tensor itself: what a gradient is kept on."""
        raw = self._raw()
        return raw[0] if isinstance(raw, tuple) else raw

    def put(self, new: Tensor) -> None:
        """Replace the value for the rest of the run."""
        assert self.write is not None  # Site.write refuses before
        raw = self._raw()
        old = raw[0] if isinstance(raw, tuple) else raw
        value = self.write(old, new).to(old.dtype)
        if self.in_place:
            old[...] = value
        elif self.side == "input":
            self.envoy.input = value
        else:
            self.envoy.output = (value, *raw[1:]) if isinstance(raw, tuple) else value


@dataclass(frozen=True)
class DeepStackAccess(Access):
    """What DeepStack adds after a block, spread over the positions of the picture tokens."""

    layer: int = 0
    write: None = None

    def read(self) -> Tensor:
        """Zeros, with the features at the picture's positions."""
        _, kwargs = self.envoy.inputs
        embeds, features = kwargs["inputs_embeds"], kwargs["deepstack_visual_embeds"]
        full = torch.zeros_like(embeds)
        full[kwargs["visual_pos_masks"]] = features[self.layer].to(full.dtype)
        return full


def plain(envoy: Any, side: str, *, packed: bool) -> Access:
    """A side as it is; packed (row, d) tensors get a first axis."""
    return Access(envoy, side, lambda raw: raw.unsqueeze(0)) if packed else Access(envoy, side)


def norm_scale(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """The divisor of a norm: root mean square (LayerNorm: standard deviation) of its input, as (.., 1)."""
    eps = float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 0.0)
    centred = isinstance(norm, nn.LayerNorm)

    def scale(x: Tensor) -> Tensor:
        x = x.float()
        x = x - x.mean(-1, keepdim=True) if centred else x
        return (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()

    return scale


def then(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """One view after another."""
    return lambda raw: second(first(raw))


def scaled(envoy: Any, block: nn.Module, name: str | None, lift: Callable[[Tensor], Tensor]) -> Access:
    """A sublayer's output times a parameter of its block (layer scale), where there is one: what is added."""
    if name is None:
        return Access(envoy, "output", lift)

    def write(raw: Tensor, new: Tensor) -> Tensor:
        # The model multiplies again: what is left as it was keeps its bits, and where the scale is 0 nothing can act.
        scale, new = getattr(block, name), new.reshape(raw.shape)
        return torch.where((scale == 0) | (new == scale * raw), raw, new / scale)

    return Access(
        envoy,
        "output",
        lambda raw: lift(getattr(block, name) * raw),
        write,
        grad_view=lambda grad: lift(grad / getattr(block, name)),
    )


def split(envoy: Any, side: str, heads: int, d_head: int, lift: Callable[[Tensor], Tensor]) -> Access:
    """A flat (.., heads * d_head) tensor as (batch, pos, head, d_head)."""
    return Access(envoy, side, lambda raw: lift(raw).unflatten(-1, (heads, d_head)))


def fused(envoy: Any, part: int, heads: int, d_head: int, lift: Callable[[Tensor], Tensor]) -> Access:
    """One third of a fused q, k, v projection."""
    low, high = part * heads * d_head, (part + 1) * heads * d_head

    def write(raw: Tensor, new: Tensor) -> Tensor:
        raw = raw.clone()
        raw[..., low:high] = new.reshape(*raw.shape[:-1], high - low)
        return raw

    return Access(envoy, "output", lambda raw: lift(raw)[..., low:high].unflatten(-1, (heads, d_head)), write)


def effective_weight(linear: Any) -> Tensor:
    """(out, in) weight that a linear layer really applies, adapters and quantization included.

    A plain layer's own parameter; of anything else (LoRA, 4-bit, 8-bit) the matrix is read off its outputs.
    """
    if type(linear) is nn.Linear and not linear.weight.is_meta:
        return linear.weight
    with torch.no_grad():
        like = next((p for p in linear.parameters() if p.is_floating_point() and not p.is_meta), torch.empty(0))
        eye = torch.eye(linear.in_features, dtype=like.dtype, device=like.device)
        forward = linear.forward
        return (forward(eye) - forward(torch.zeros_like(eye[:1]))).T


def norm_gain(norm: nn.Module, offset: float) -> Tensor:
    """What a norm multiplies the normalized stream by; some families store it less one (`offset` 1)."""
    weight = getattr(norm, "weight", None)
    return torch.ones(()) if weight is None else weight + offset


@dataclass
class HeadOutputs:
    """Each head's share of what attention adds to the stream, as a function of z: without the bias, behind the norm
    or layer scale that stands between the output projection and the stream. The shares of a layer sum to `attn_out`
    less the bias's share."""

    out: Any
    shape: Shape
    norm: nn.Module | None = None
    offset: float = 0.0
    block: nn.Module | None = None
    scale: str | None = None
    weight: Tensor | None = None

    def prepare(self) -> None:
        """Work out the matrix of a layer that has no plain one (adapters, quantization): inside a trace it cannot."""
        self.weight = None if type(self.out) is nn.Linear else effective_weight(self.out)

    def __call__(self, z: Tensor) -> Float[Tensor, "batch pos head d_model"]:
        """(batch, pos, head, d_head) -> (batch, pos, head, d_model)."""
        weight = effective_weight(self.out) if self.weight is None else self.weight
        weight = weight.to(z.device, z.dtype).unflatten(1, (self.shape.n_heads, self.shape.d_head))
        result = einsum(z, weight, "batch pos head d_head, d_model head d_head -> batch pos head d_model")
        bias = getattr(self.out, "bias", None)
        if self.norm is not None:
            total = result.sum(2) if bias is None else result.sum(2) + bias.to(z.device, z.dtype)
            factor = norm_gain(self.norm, self.offset).to(z.device) / norm_scale(self.norm)(total)
            result = (result.float() * factor[:, :, None]).to(z.dtype)
        if self.scale is not None:
            result = result * getattr(self.block, self.scale).to(z.device, z.dtype)
        return result
