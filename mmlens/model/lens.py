"""TransformerLens's pieces, taught picture prompts: the only module that imports transformer_lens.

Its ActivationCache does the algebra over a view of our model; what a vision-language model adds is put in here: the
merged embedding as `hook_embed`, DeepStack as terms of its own, head results behind post-attention norms, and the
final norm's gain folded into token directions instead of into the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import FactoredMatrix
from transformer_lens.ActivationCache import ActivationCache as LensCache
from transformer_lens.utilities import Slice

from mmlens.errors import CacheError, OptionError
from mmlens.model.access import effective_weight, norm_gain
from mmlens.model.engine import Engine
from mmlens.model.sites import head_outputs

__all__ = ["FactoredMatrix", "LensCache", "ModelView", "PictureCache", "algebra"]

Labelled = tuple[Tensor, list[str]]


class ModelView:
    """What TransformerLens's cache asks of a model."""

    def __init__(self, engine: Engine) -> None:
        shape = engine.decoder
        self.engine = engine
        self.ln_final: nn.Module = engine.hf.get_submodule(engine.family.final_norm)
        kind = "LN" if isinstance(self.ln_final, nn.LayerNorm) else "RMS"
        self.cfg = SimpleNamespace(
            n_layers=shape.n_layers,
            n_heads=shape.n_heads,
            d_model=shape.d_model,
            normalization_type=kind,
            attn_only=False,
            device=engine.device,
        )
        self.unembed = engine.hf.get_submodule(engine.family.unembed)

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding."""
        return effective_weight(self.unembed).T

    def to_single_token(self, text: str) -> int:
        """The id of a text that is one token."""
        return int(self.engine.to_single_token(text))  # type: ignore[attr-defined]

    def tokens_to_residual_directions(self, tokens: Any) -> Float[Tensor, "*tokens d_model"]:
        """The direction in the normalized stream (before the final norm's gain) that each token's logit reads."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        tokens = torch.as_tensor(tokens, dtype=torch.long)
        rows = effective_weight(self.unembed)
        outside = tokens[(tokens < 0) | (tokens >= len(rows))]
        if outside.numel():
            raise OptionError(
                f"token id {int(outside[0])}", expected=f"0 to {len(rows) - 1}", fix="vlm.to_single_token('red')"
            )
        picked = rows[tokens.to(rows.device)]
        return picked.float() * norm_gain(self.ln_final, self.engine.family.decoder.norm_offset).float()


class PictureCache(LensCache):
    """TransformerLens's cache of one picture prompt; `decompose_resid` has DeepStack's terms."""

    def decompose_resid(  # type: ignore[override]
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: str = "all",
        apply_ln: bool = False,
        pos_slice: Any = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Any:
        """As TransformerLens's, with what DeepStack adds after block L as the term `L_deepstack`."""
        if not isinstance(pos_slice, Slice):
            pos_slice = Slice(pos_slice)
        n_layers = self.model.cfg.n_layers
        layer = n_layers if layer is None or layer == -1 else layer
        terms: list[tuple[str, Tensor]] = [("embed", self["hook_embed"])] if incl_embeds else []
        for at in range(layer):
            if mode != "mlp":
                terms.append((f"{at}_attn_out", self["attn_out", at]))
            if mode != "attn":
                terms.append((f"{at}_mlp_out", self["mlp_out", at]))
            deepstack = f"blocks.{at}.hook_deepstack_in"
            if mode == "all" and deepstack in self.cache_dict:
                terms.append((f"{at}_deepstack", self.cache_dict[deepstack]))
        if mlp_input and mode != "mlp":
            terms.append((f"{layer}_attn_out", self["attn_out", layer]))
        stack = torch.stack([pos_slice.apply(value, dim=-2) for _, value in terms])
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, pos_slice=pos_slice, mlp_input=mlp_input)
        return (stack, [label for label, _ in terms]) if return_labels else stack


class Algebra:
    """The algebra of one cache: TransformerLens's methods, their errors in our words."""

    def __init__(self, values: Mapping[str, Tensor], engine: Engine, n_deepstack: int, *, grad: bool) -> None:
        self.engine, self.n_deepstack, self.grad = engine, n_deepstack, grad
        # Sums are exact only in single precision; half-precision values are themselves exact there.
        singles = {
            k: v.float() if v.is_floating_point() else v for k, v in values.items() if not k.startswith("vision.")
        }
        self.view = ModelView(engine)
        self.lens = PictureCache(singles, self.view)

    def call(self, method: str, **options: Any) -> Any:
        """A method of the TransformerLens cache."""
        try:
            with torch.set_grad_enabled(self.grad):
                return getattr(self.lens, method)(**options)
        except KeyError as error:
            raise CacheError(
                f"{method} of a cache without {error.args[0]!r}",
                expected="every hook that the sum needs",
                fix="run_with_cache(prompt) with no names_filter, or with 'hook_embed', 'resid_pre', 'resid_mid', "
                "'resid_post', 'attn_out', 'mlp_out', 'deepstack_in', 'z' and 'ln_final.hook_scale' in it",
            ) from None
        except (ValueError, AssertionError, IndexError) as error:
            raise OptionError(
                f"{method} with {', '.join(f'{k}={_shown(v)}' for k, v in options.items() if v is not None)}: {error}",
                expected="options that fit this cache's shapes",
                fix="see the docstring for shapes and defaults",
            ) from error

    def need_deepstack(self, layer: int | None) -> None:
        """The sum of the parts would silently lack DeepStack's."""
        last = self.n_deepstack if layer is None or layer == -1 else min(layer, self.n_deepstack)
        for at in range(last):
            if f"blocks.{at}.hook_deepstack_in" not in self.lens.cache_dict:
                raise CacheError(
                    f"decompose_resid of a cache without blocks.{at}.hook_deepstack_in",
                    expected="what DeepStack adds after each of the first blocks; without it the parts do not sum",
                    fix="ask for 'deepstack_in' too, or leave out names_filter",
                )

    def head_results(self, layer: int) -> None:
        """Per-head results of every layer below `layer`, from z, behind whatever stands before the stream."""
        family, shape = self.engine.family, self.engine.decoder
        blocks = self.engine.hf.get_submodule(family.decoder.blocks)
        for at in range(layer):
            name = f"blocks.{at}.attn.hook_result"
            if name in self.lens.cache_dict:
                continue
            z = self.lens.cache_dict.get(f"blocks.{at}.attn.hook_z")
            if z is None or z.shape[-2] != shape.n_heads:
                raise CacheError(
                    f"stack_head_results of a cache with {'no' if z is None else 'some heads of'} {name}",
                    expected="hook_z or hook_result of all heads in every layer below",
                    fix="run_with_cache(prompt, ['z', 'resid_post', 'ln_final.hook_scale']) without heads=",
                )
            with torch.set_grad_enabled(self.grad):
                self.lens.cache_dict[name] = head_outputs(blocks[at], family.decoder, shape)(z)

    def logit_lens(self, layers: Sequence[int] | None, tokens: Tensor | None, incl_mid: bool) -> Labelled:
        """Logits that the final norm and the unembedding make of each stream, and the streams' labels."""
        stack, labels = self.call("accumulated_resid", incl_mid=incl_mid, return_labels=True)
        if layers is not None:
            n = len(stack)
            wrong = [i for i in layers if not -n <= i < n]
            if wrong:
                raise OptionError(
                    f"layers={wrong}", expected=f"streams {-n} to {n - 1}: {labels}", fix="-1 is the final stream"
                )
            stack, labels = stack[list(layers)], [labels[i] for i in layers]
        norm, head = self.view.ln_final, self.view.unembed
        weight = effective_weight(head)
        found = []
        with torch.set_grad_enabled(self.grad):
            for stream in stack:
                normalized = norm(stream.to(self.engine.device, self.engine.dtype))
                if tokens is None:
                    found.append(head(normalized).float())
                    continue
                logits = normalized @ weight[tokens.to(weight.device)].T
                bias = getattr(head, "bias", None)
                found.append((logits if bias is None else logits + bias[tokens]).float())
        return torch.stack(found), labels


def _shown(value: Any) -> str:
    return f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def algebra(values: Mapping[str, Tensor], engine: Engine, *, grad: bool) -> Algebra:
    """The algebra over captured values of a model; with `grad`, part of the graph that they belong to."""
    return Algebra(values, engine, engine.family.deepstack_layers(engine.config), grad=grad)
