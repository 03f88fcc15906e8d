"""How a named value leaves and enters a module: sides, reshapes, slices, and values derived from others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum
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

    def _raw(self) -> Any:
        return getattr(self.envoy, self.side)

    def read(self) -> Tensor:
        """The value as users see it; not a copy."""
        raw = self._raw()
        return self.view(raw[0] if isinstance(raw, tuple) else raw)

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


def heads_of(out: Any, shape: Shape) -> Callable[[Tensor], Tensor]:
    """Each head's share of the attention output (without the bias): z W_O, per head."""

    def result(z: Tensor) -> Tensor:
        weight = out.weight.unflatten(1, (shape.n_heads, shape.d_head))
        return einsum(z, weight, "batch pos head d_head, d_model head d_head -> batch pos head d_model")

    return result
