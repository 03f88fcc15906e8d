"""ActivationCache: what a run captured, by full name or by (short name, layer)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmlens.errors import CacheError, GradientError, TokenGroupError, UnknownHookError, closest
from mmlens.model.prompt import Prompt
from mmlens.model.select import Cut, Selection
from mmlens.model.sites import Site, Sites

if TYPE_CHECKING:
    from pathlib import Path

    from pandas import DataFrame

    from mmlens.model.engine import Engine
    from mmlens.model.lens import Algebra


@dataclass(frozen=True)
class Index:
    """Where a cached value's axes come from.

    Attributes
    ----------
    positions
        (batch, n) columns of the encoded batch along the cut axis, -1 where a ragged example is padded.
    heads
        The query heads kept, or None where the value has no head axis.
    """

    positions: Int[Tensor, "batch n"]
    heads: tuple[int, ...] | None


class ActivationCache(Mapping[str, Tensor]):
    """A read-only mapping from hook names to tensors.

    `cache["blocks.5.attn.hook_pattern"]`, `cache["pattern", 5]`, `cache["resid_post", -1]` and `cache["vision.z", 3]`
    all work. Values are copies; see docs/concepts.md for the axes of each name.
    """

    def __init__(
        self,
        values: dict[str, Tensor],
        sites: Sites,
        prompt: Prompt,
        selection: Selection,
        *,
        step: int = 0,
        engine: Engine | None = None,
        reduced: frozenset[str] = frozenset(),
        kept: Mapping[str, tuple[Tensor, Cut | None]] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self._values, self._sites, self.prompt, self._selection, self.step = values, sites, prompt, selection, step
        self._engine, self.reduced, self._kept = engine, reduced, kept
        self._algebra: Algebra | None = None
        self._provenance = None if provenance is None else dict(provenance)

    @property
    def provenance(self) -> dict[str, Any]:
        """The model (with a fingerprint of its weights, taken when first asked for) and the libraries' versions."""
        if self._provenance is None:
            names = ("mmlens", "torch", "transformers", "nnsight")
            model = {} if self._engine is None else {"model": self._engine.identity()}
            self._provenance = {**model, "versions": {name: version(name) for name in names}}
        return self._provenance

    def __getitem__(self, key: str | tuple[str, int]) -> Tensor:
        name = self._name(key)
        if name not in self._values:
            raise UnknownHookError(
                f"{name!r} is not in this cache",
                expected=f"one of its {len(self._values)} names; closest: {closest(name, self._values)}",
                fix="ask for it: run_with_cache(prompt, names_filter=[...])",
            )
        return self._values[name]

    def _name(self, key: str | tuple[str, int]) -> str:
        if isinstance(key, tuple):
            if len(key) != 2 or not isinstance(key[0], str) or not isinstance(key[1], int):
                raise UnknownHookError(
                    f"cache key {key!r}", expected="(short name, layer)", fix="cache['pattern', 5] or a full name"
                )
            return self._sites.layer(*key).name
        if key in self._values or key in self._sites.by_name:
            return key
        matched = self._sites.match(key)
        if len(matched) == 1:
            return matched[0].name
        raise UnknownHookError(
            f"{key!r} names {len(matched)} hooks",
            expected="one hook",
            fix=f"say the layer: cache[{key!r}, {matched[0].layer}]",
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, str | tuple):
            return False
        try:
            return self._name(key) in self._values
        except UnknownHookError:
            return False

    def __repr__(self) -> str:
        size = sum(v.numel() * v.element_size() for v in self._values.values())
        return f"ActivationCache({len(self)} values, {size / 2**20:.1f} MiB)"

    def to(self, device: str | torch.device) -> ActivationCache:
        """The same cache with every value on `device`."""
        moved = {name: value.to(device) for name, value in self._values.items()}
        return ActivationCache(
            moved,
            self._sites,
            self.prompt,
            self._selection,
            step=self.step,
            engine=self._engine,
            reduced=self.reduced,
            kept=self._kept,
            provenance=self._provenance,
        )

    def _whole(self, key: str | tuple[str, int]) -> Site:
        """The site of a value that no `reduce=` has replaced."""
        site = self._sites.get(self._name(key))
        if site.name in self.reduced:
            raise CacheError(
                f"{site.name!r}, of which only reduce='s result was kept",
                expected="a value with its own axes",
                fix="ask for it in names_filter instead",
            )
        return site

    def index(self, key: str | tuple[str, int]) -> Index:
        """Columns and heads of a value's axes, for values that `rows=`, `positions=` or `heads=` cut."""
        site = self._whole(key)
        value = self[site.name]
        columns = self._selection.columns_of(site, decoding=self.step > 0)
        axis = next((site.axes.index(a) for a in ("query_pos", "pos") if a in site.axes), 1)
        if columns is None:
            # a later generation step holds the one new position
            first = self.prompt.n_columns + self.step - 1 if self.step and site.axes[axis] != "key" else 0
            positions = torch.arange(first, first + value.shape[axis]).expand(value.shape[0], -1)
        else:
            width = value.shape[axis]
            positions = torch.tensor([[*c, *[-1] * (width - len(c))] for c in columns], dtype=torch.long)
        heads = None
        if "head" in site.axes:
            wanted = self._selection.heads_of(site)
            heads = wanted if wanted is not None else tuple(range(value.shape[site.axes.index("head")]))
        return Index(positions, heads)

    def segments(self, key: str | tuple[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Lengths in rows of what attends together in the tower, and the picture that each belongs to."""
        site = self._sites.get(self._name(key))
        if not site.tower or site.layer is None:
            raise UnknownHookError(
                f"{site.name!r} has no segments", expected="a tower hook", fix="name one that starts with 'vision.'"
            )
        found = self.prompt.segments(site.layer)
        return found.lengths, found.pictures

    def grid(
        self, key: str | tuple[str, int], image: int = 0, *, view: str | None = None
    ) -> Float[Tensor, "rows cols d"]:
        """A stream over the picture, in raster order: tower patches, projected tokens or decoder positions.

        Parameters
        ----------
        key
            A value with one vector for each patch, token or position.
        image
            Which picture or video, numbered over the whole batch in prompt order.
        view
            "tiles" (all tiles stitched together), "thumbnail", or "frame:3"; default the finest that covers the
            picture, or a video's first frame.
        """
        site = self._whole(key)
        value, prompt = self[site.name], self.prompt
        grid = prompt.layout(image).grid(view)
        if site.axes not in (("batch", "pos", "d"), ("batch", "row", "d"), ("row", "row", "d")):
            raise UnknownHookError(
                f"{site.name!r} has axes {site.axes}",
                expected="one vector for each patch, token or position",
                fix="take a stream (resid_pre, resid_post, attn_out, mlp_out) or the projector's output",
            )
        if self.step > 0:
            raise TokenGroupError(
                "a grid of a later generation step, which holds one new token",
                expected="the first step, which holds the picture",
                fix="generation.steps[0].grid(...)",
            )
        if site.axes[1] == "row":
            raster = grid.patches if site.tower else grid.projected
            return value.flatten(0, 1)[list(raster.index)].view(raster.rows, raster.cols, -1)
        if self._selection.positions is not None:
            raise TokenGroupError(
                f"grid of {site.name!r}, which positions= has cut",
                expected="a value over all positions",
                fix="run again without positions=",
            )
        item = prompt.items[image]
        columns = [item.columns[o] for o in grid.tokens.index]
        return value[item.example, columns].view(grid.tokens.rows, grid.tokens.cols, -1)

    # ------------------------------------------------------------------ gradients
    def grad(self, key: str | tuple[str, int]) -> Tensor:
        """The gradient of a captured value, after `backward()` of something made of the run with `grad=True`.

        Parameters
        ----------
        key
            A captured hook; or "pixel_values" (whatever input carries the pictures), for the gradient to the pixels
            as the processor hands them over.

        Returns
        -------
        Tensor
            Of the captured value's shape, NaN where that is padded.

        Raises
        ------
        GradientError
            Without `grad=True`, before `backward()`, or for a value that the run does not go through.

        Examples
        --------
        >>> from mmlens import HookedVLM, load_task
        >>> vlm, example = HookedVLM.from_pretrained("toy-qwen3-vl"), load_task("scenes/image").example("rank", 0, 0)
        >>> prompt = vlm.prompt(example.question, images=list(example.images))
        >>> logits, cache = vlm.run_with_cache(prompt, ["hook_embed", "z"], grad=True)
        >>> logits[0, -1].max().backward()
        >>> cache.grad(("z", 0)).shape == cache["z", 0].shape
        True
        """
        if self._kept is None:
            raise GradientError(
                "grad() of a cache from a run without gradients",
                expected="run_with_cache(prompt, names, grad=True)",
                fix="run again with grad=True, then call backward() on what you differentiate",
            )
        name = key if isinstance(key, str) and key in self._kept else self._whole(key).name
        if name not in self._kept:
            raise GradientError(
                f"the gradient of {name!r}",
                expected=f"a captured value that later ones are made of; closest: {closest(name, self._kept)}",
                fix="derived values (result, scale, deepstack_in) have none: take the value that they come from",
            )
        raw, cut = self._kept[name]
        if raw.grad is None:
            raise GradientError(
                f"{name!r} has no gradient yet",
                expected="backward() on a scalar that depends on it",
                fix="logits[0, -1, token].backward(), then cache.grad(...)",
            )
        if cut is None:
            return raw.grad
        access = cut.site.access
        return cut.take((access.grad_view or access.view)(raw.grad)).detach()

    # ------------------------------------------------------------------ algebra
    def _lens(self, method: str) -> Algebra:
        if self._engine is None:
            raise CacheError(
                f"{method} of a cache without its model",
                expected="a cache of run_with_cache, or one loaded with its model",
                fix="ActivationCache.load(path, vlm=vlm)",
            )
        if self.step > 0:
            raise CacheError(
                f"{method} of generation step {self.step}",
                expected="a run_with_cache cache, or the first step",
                fix="run_with_cache on the prompt with the new tokens in it",
            )
        if self._algebra is None:
            from mmlens.model.lens import algebra

            values = {name: v for name, v in self._values.items() if name not in self.reduced}
            self._algebra = algebra(values, self._engine, grad=self._kept is not None)
        return self._algebra

    def as_transformer_lens(self) -> Any:
        """The decoder's values as a `transformer_lens.ActivationCache`, for that library's own tools."""
        return self._lens("as_transformer_lens").lens

    def decompose_resid(
        self,
        layer: int | None = None,
        *,
        mlp_input: bool = False,
        mode: Literal["all", "mlp", "attn"] = "all",
        apply_ln: bool = False,
        pos_slice: Any = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Any:
        """The stream in front of a block as the sum of what was added to it: embedding, attention, MLP, DeepStack.

        Exact at picture positions too: the embedding is the merged one, and what DeepStack adds after block L is the
        term `L_deepstack`. Computed in single precision. As TransformerLens's method of this name.

        Parameters
        ----------
        layer
            Up to the input of this block; None or the number of layers means the final stream.
        mlp_input
            Up to the input of this block's MLP instead.
        mode
            "all", or only the "mlp" or "attn" terms.
        apply_ln
            Divide every term by the norm's scale in this run.
        pos_slice
            Positions to keep: an int, a (start, stop) tuple or a list.
        incl_embeds
            Whether the embedding is a term.
        return_labels
            Return (terms, labels).

        Returns
        -------
        Float[Tensor, "term batch pos d_model"], or it and a list of labels.

        Raises
        ------
        CacheError
            If hooks that the sum needs were not captured.
        """
        lens = self._lens("decompose_resid")
        if mode == "all":
            lens.need_deepstack(layer)
        return lens.call(
            "decompose_resid",
            layer=layer,
            mlp_input=mlp_input,
            mode=mode,
            apply_ln=apply_ln,
            pos_slice=pos_slice,
            incl_embeds=incl_embeds,
            return_labels=return_labels,
        )

    def accumulated_resid(
        self,
        layer: int | None = None,
        *,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Any = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Any:
        """The stream in front of every block up to `layer`, stacked. As TransformerLens's method of this name.

        Parameters
        ----------
        layer
            None or the number of layers: all of them and the final stream.
        incl_mid
            Also the streams between attention and MLP.
        apply_ln
            Put each through the norm in front of `layer` (the final norm, its statistics recomputed, by default).
        pos_slice, mlp_input, return_labels
            As in `decompose_resid`.

        Returns
        -------
        Float[Tensor, "stream batch pos d_model"], or it and a list of labels.
        """
        return self._lens("accumulated_resid").call(
            "accumulated_resid",
            layer=layer,
            incl_mid=incl_mid,
            apply_ln=apply_ln,
            pos_slice=pos_slice,
            mlp_input=mlp_input,
            return_labels=return_labels,
        )

    def stack_head_results(
        self,
        layer: int | None = None,
        *,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: Any = None,
        apply_ln: bool = False,
    ) -> Any:
        """What every head below `layer` added to the stream, labelled L0H0, L0H1, ...

        Made of `hook_z` where `hook_result` was not captured. Where a norm stands between attention and the stream
        (Gemma3), results are behind it, so that a layer's still sum to `attn_out` (less the output bias).

        Parameters
        ----------
        incl_remainder
            Add the rest of the stream as a last term.
        layer, return_labels, pos_slice, apply_ln
            As in `decompose_resid`.

        Returns
        -------
        Float[Tensor, "head batch pos d_model"], or it and a list of labels.
        """
        lens = self._lens("stack_head_results")
        n = lens.view.cfg.n_layers
        lens.head_results(n if layer is None or layer == -1 else layer)
        return lens.call(
            "stack_head_results",
            layer=-1 if layer is None else layer,
            return_labels=return_labels,
            incl_remainder=incl_remainder,
            pos_slice=pos_slice,
            apply_ln=apply_ln,
        )

    def logit_attrs(
        self,
        residual_stack: Tensor,
        tokens: Any,
        incorrect_tokens: Any = None,
        *,
        pos_slice: Any = None,
        batch_slice: Any = None,
        has_batch_dim: bool = True,
    ) -> Tensor:
        """What each term of a stack adds to a token's logit, or to the difference of two.

        The final norm's gain is part of the token's direction, so no weight is changed; the attributions of
        `decompose_resid()` sum to the logit (less the unembedding's bias), at every position.

        Parameters
        ----------
        residual_stack
            (term, batch, pos, d_model), from `decompose_resid`, `stack_head_results`, ...
        tokens, incorrect_tokens
            A text that is one token, an id, or ids of shape (), (batch,) or (batch, pos).
        pos_slice, batch_slice
            The slices that the stack was cut with.

        Returns
        -------
        Float[Tensor, "term batch pos"]
        """
        return self._lens("logit_attrs").call(
            "logit_attrs",
            residual_stack=residual_stack.float(),
            tokens=tokens,
            incorrect_tokens=incorrect_tokens,
            pos_slice=pos_slice,
            batch_slice=batch_slice,
            has_batch_dim=has_batch_dim,
        )

    def apply_ln_to_stack(
        self,
        residual_stack: Tensor,
        layer: int | None = None,
        *,
        mlp_input: bool = False,
        pos_slice: Any = None,
        batch_slice: Any = None,
        has_batch_dim: bool = True,
        recompute_ln: bool = False,
    ) -> Tensor:
        """Every term of a stack divided by the scale that the norm in front of `layer` had in this run.

        The gain is left out (`logit_attrs` has it in its directions). As TransformerLens's method of this name.
        """
        return self._lens("apply_ln_to_stack").call(
            "apply_ln_to_stack",
            residual_stack=residual_stack.float(),
            layer=layer,
            mlp_input=mlp_input,
            pos_slice=pos_slice,
            batch_slice=batch_slice,
            has_batch_dim=has_batch_dim,
            recompute_ln=recompute_ln,
        )

    def logit_lens(
        self,
        *,
        layers: Sequence[int] | None = None,
        tokens: Sequence[int] | None = None,
        incl_mid: bool = False,
        return_labels: bool = False,
    ) -> Any:
        """The logits that the final norm and the unembedding would make of every stream.

        Exact at picture positions; the last stream's are the model's own logits. With a large vocabulary name the
        `tokens` wanted, or cut the run with `positions=`: the whole result has streams x positions x d_vocab numbers.

        Parameters
        ----------
        layers
            Which streams, as `accumulated_resid` stacks them; -1 is the final one; default all.
        tokens
            Ids of the tokens whose logits are wanted; default the whole vocabulary.
        incl_mid
            Also the streams between attention and MLP.
        return_labels
            Return (logits, labels).

        Returns
        -------
        Float[Tensor, "stream batch pos token"], or it and a list of labels.
        """
        chosen = None if tokens is None else torch.as_tensor(list(tokens), dtype=torch.long)
        logits, labels = self._lens("logit_lens").logit_lens(layers, chosen, incl_mid)
        return (logits, labels) if return_labels else logits

    # ------------------------------------------------------------------ out of the process
    def to_pandas(self) -> DataFrame:
        """What `reduce=` kept, as a table: one row for each number, with hook, layer and its place in the result."""
        import pandas as pd

        if not self.reduced:
            raise CacheError(
                "to_pandas() of a cache without reductions",
                expected="run_with_cache(prompt, reduce={glob: fn})",
                fix="reduce values to a few numbers each; whole activations are no table",
            )
        rows = []
        for name in (n for n in self._values if n in self.reduced):
            value = self._values[name]
            site = self._sites.get(name)
            for place, number in zip(np.ndindex(*value.shape), value.detach().float().flatten().tolist()):
                axes = {f"axis_{i}": at for i, at in enumerate(place)}
                rows.append({"hook": name, "short": site.short, "layer": site.layer, **axes, "value": number})
        return pd.DataFrame(rows)

    def save(self, path: str | Path) -> None:
        """Write values, names, indexes and provenance into one safetensors file, whole or not at all."""
        from mmlens.model.saved import save

        save(self, path)

    @classmethod
    def load(cls, path: str | Path, *, vlm: Engine | None = None) -> ActivationCache:
        """Read what `save` wrote; nothing in the file is ever executed.

        Parameters
        ----------
        vlm
            The model that the cache came from, for the algebra (`decompose_resid`, `logit_lens`, ...). Everything else
            works without it.

        Raises
        ------
        CacheError
            If the file is no saved cache, or `vlm` is another model.
        """
        from mmlens.model.saved import load

        return load(path, vlm)
