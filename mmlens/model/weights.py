"""Weights by layer and head in TransformerLens's shapes, and OV and QK circuits; the decoder's and the tower's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mmlens.errors import HeadError, HookNotReachedError, OptionError
from mmlens.families.base import Shape, Stack
from mmlens.families.discover import has_module
from mmlens.model.access import effective_weight
from mmlens.model.engine import Engine

if TYPE_CHECKING:
    from mmlens.model.lens import FactoredMatrix


class PerLayer:
    """One kind of weight, indexed by layer: `vlm.W_Q[3]`, `vlm.W_Q[-1]`, or `vlm.W_Q[:]` for all of them stacked."""

    def __init__(self, name: str, get: Callable[[int], Tensor], n_layers: int, n_groups: int = 1) -> None:
        self.name, self._get, self._n, self._groups = name, get, n_layers, n_groups

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, layer: int | slice) -> Tensor:
        if isinstance(layer, slice):
            return torch.stack([self._get(i) for i in range(*layer.indices(self._n))])
        if isinstance(layer, bool) or not isinstance(layer, int) or not -self._n <= layer < self._n:
            raise OptionError(
                f"{self.name}[{layer!r}]",
                expected=f"a layer from {-self._n} to {self._n - 1}, or a slice",
                fix="see len()",
            )
        return self._get(layer % self._n)

    def expand(self) -> PerLayer:
        """Key and value heads repeated for every query head that reads them; others as they are."""
        n = self._groups
        return PerLayer(self.name, lambda layer: self._get(layer).repeat_interleave(n, 0), self._n)

    def __repr__(self) -> str:
        return f"{self.name}: {self._n} layers of {tuple(self._get(0).shape)}"


class StackWeights:
    """Weights of one stack of blocks; matrices multiply from the right, as in TransformerLens: `x @ W`."""

    def __init__(self, engine: Engine, stack: Stack, shape: Shape) -> None:
        self._engine, self._stack, self._shape = engine, stack, shape

    @property
    def blocks(self) -> Any:
        """The engine's view of every block, for use inside `vlm.trace(...)`."""
        root = self._engine.opened().root
        if not root.interleaver.interleaving:
            raise HookNotReachedError(
                "blocks read outside a trace", expected="`with vlm.trace(prompt):` around it", fix="see docs/trace.md"
            )
        return root.get(self._stack.blocks)

    def _module(self, layer: int, path: str) -> Any:
        block = self._engine.hf.get_submodule(self._stack.blocks)[layer]
        if not has_module(block, path):
            raise OptionError(
                f"a weight of {path!r} in block {layer}, which has none (a mixture of experts, or no gate)",
                expected="a layer with such a matrix",
                fix=f"look at the block itself: vlm.hf.get_submodule({self._stack.blocks!r})[{layer}]",
            )
        return block.get_submodule(path)

    def _projection(self, letter: str, what: str) -> PerLayer:
        stack, shape = self._stack, self._shape
        heads = shape.n_heads if letter == "q" else shape.n_key_value_heads
        part = "qkv".index(letter)

        def get(layer: int) -> Tensor:
            fused = len(stack.qkv) == 1
            linear = self._module(layer, f"{stack.attn}.{stack.qkv[0 if fused else part]}")
            n = heads * shape.d_head
            rows = slice(part * n, (part + 1) * n) if fused else slice(None)
            if what == "b":
                bias = getattr(linear, "bias", None)
                like = next(linear.parameters())
                flat = torch.zeros(n, dtype=like.dtype, device=like.device) if bias is None else bias[rows]
                return flat.detach().unflatten(0, (heads, shape.d_head))
            return effective_weight(linear)[rows].detach().unflatten(0, (heads, shape.d_head)).transpose(1, 2)

        return PerLayer(f"{what}_{letter.upper()}", get, shape.n_layers, shape.n_heads // heads)

    @property
    def W_Q(self) -> PerLayer:
        """(head, d_model, d_head) of a layer."""
        return self._projection("q", "W")

    @property
    def W_K(self) -> PerLayer:
        """(kv_head, d_model, d_head) of a layer; `.expand()` gives one for every query head."""
        return self._projection("k", "W")

    @property
    def W_V(self) -> PerLayer:
        """(kv_head, d_model, d_head) of a layer; `.expand()` gives one for every query head."""
        return self._projection("v", "W")

    @property
    def b_Q(self) -> PerLayer:
        """(head, d_head) of a layer; zeros where there is none."""
        return self._projection("q", "b")

    @property
    def b_K(self) -> PerLayer:
        """(kv_head, d_head) of a layer; zeros where there is none."""
        return self._projection("k", "b")

    @property
    def b_V(self) -> PerLayer:
        """(kv_head, d_head) of a layer; zeros where there is none."""
        return self._projection("v", "b")

    @property
    def W_O(self) -> PerLayer:
        """(head, d_head, d_model) of a layer."""
        shape = self._shape

        def get(layer: int) -> Tensor:
            weight = effective_weight(self._module(layer, f"{self._stack.attn}.{self._stack.out}"))
            return weight.detach().T.unflatten(0, (shape.n_heads, shape.d_head))

        return PerLayer("W_O", get, shape.n_layers)

    @property
    def b_O(self) -> PerLayer:
        """(d_model,) of a layer; zeros where there is none."""

        def get(layer: int) -> Tensor:
            linear = self._module(layer, f"{self._stack.attn}.{self._stack.out}")
            bias = getattr(linear, "bias", None)
            return effective_weight(linear).new_zeros(self._shape.d_model) if bias is None else bias.detach()

        return PerLayer("b_O", get, self._shape.n_layers)

    def _mlp(self, name: str, part: str | None) -> PerLayer:
        def get(layer: int) -> Tensor:
            return effective_weight(self._module(layer, f"{self._stack.mlp}.{part}")).detach().T

        return PerLayer(name, get, self._shape.n_layers)

    @property
    def W_in(self) -> PerLayer:
        """(d_model, d_mlp) of a layer: the up projection beside a gate, else the first matrix."""
        return self._mlp("W_in", self._stack.mlp_linear or self._stack.mlp_in)

    @property
    def W_gate(self) -> PerLayer:
        """(d_model, d_mlp) of a layer."""
        if self._stack.mlp_linear is None:
            raise OptionError("W_gate of an MLP without a gate", expected="a gated MLP", fix="use W_in")
        return self._mlp("W_gate", self._stack.mlp_in)

    @property
    def W_out(self) -> PerLayer:
        """(d_mlp, d_model) of a layer."""
        return self._mlp("W_out", self._stack.mlp_out)

    def _head(self, layer: int, head: int) -> tuple[int, int]:
        shape = self._shape
        for name, value, n in (("layer", layer, shape.n_layers), ("head", head, shape.n_heads)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < n:
                raise HeadError(f"{name} {value!r}", expected=f"{name}s 0 to {n - 1}", fix="count query heads from 0")
        return head, head // (shape.n_heads // shape.n_key_value_heads)

    def OV(self, layer: int, head: int) -> FactoredMatrix:
        """What a head writes for what it reads: W_V W_O, (d_model, d_model), kept as its two factors.

        Parameters
        ----------
        layer, head
            A query head; its group's value matrix is used.
        """
        from mmlens.model.lens import FactoredMatrix

        query, kv = self._head(layer, head)
        return FactoredMatrix(self.W_V[layer][kv], self.W_O[layer][query])

    def QK(self, layer: int, head: int) -> FactoredMatrix:
        """What a head looks for: W_Q W_K^T, (d_model, d_model), kept as its two factors.

        The weights alone: biases, query/key norms and rotary positions, where a family has them, act between the two.
        """
        from mmlens.model.lens import FactoredMatrix

        query, kv = self._head(layer, head)
        return FactoredMatrix(self.W_Q[layer][query], self.W_K[layer][kv].T)


class ModelWeights(StackWeights):
    """The decoder's weights, the embeddings, and the tower's under `vision`."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, engine.family.decoder, engine.decoder)

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """Token embeddings, as stored (some families scale them on the way in)."""
        return self._engine.hf.get_submodule(self._engine.family.embed).weight.detach()

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding; the final norm's gain is not folded in."""
        return effective_weight(self._engine.hf.get_submodule(self._engine.family.unembed)).detach().T

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        """The unembedding's bias; zeros where there is none."""
        head = self._engine.hf.get_submodule(self._engine.family.unembed)
        bias = getattr(head, "bias", None)
        return self.W_U.new_zeros(self.W_U.shape[1]) if bias is None else bias.detach()
