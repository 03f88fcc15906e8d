"""ActivationCache: what a run captured, by full name or by (short name, layer)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmlens.errors import TokenGroupError, UnknownHookError, closest
from mmlens.model.prompt import Prompt
from mmlens.model.select import Selection
from mmlens.model.sites import Sites


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
        self, values: dict[str, Tensor], sites: Sites, prompt: Prompt, selection: Selection, *, step: int = 0
    ) -> None:
        self._values, self._sites, self.prompt, self._selection, self.step = values, sites, prompt, selection, step

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
        return ActivationCache(moved, self._sites, self.prompt, self._selection, step=self.step)

    def index(self, key: str | tuple[str, int]) -> Index:
        """Columns and heads of a value's axes, for values that `rows=`, `positions=` or `heads=` cut."""
        site = self._sites.get(self._name(key))
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
        if not site.tower:
            raise UnknownHookError(
                f"{site.name!r} has no segments", expected="a tower hook", fix="name one that starts with 'vision.'"
            )
        found = self.prompt.family.tower_segments(self.prompt.config, self.prompt.inputs)
        return found.lengths, found.pictures

    def grid(self, key: str | tuple[str, int], image: int = 0) -> Float[Tensor, "rows cols d"]:
        """A stream over the picture, in raster order: tower patches, projected tokens or decoder positions.

        Parameters
        ----------
        key
            A value with one vector for each patch, token or position.
        image
            Which picture, numbered over the whole batch in prompt order.
        """
        site = self._sites.get(self._name(key))
        value, prompt = self[site.name], self.prompt
        counts = prompt.picture_counts
        if not 0 <= image < len(counts):
            raise TokenGroupError(
                f"image {image} of a prompt with {len(counts)} pictures",
                expected=f"0 to {len(counts) - 1}",
                fix="count from 0",
            )
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
        packed = prompt.family.tower.packed
        if site.tower:
            segments = prompt.family.tower_segments(prompt.config, prompt.inputs)
            (rows, cols), order = prompt.family.tower_raster(prompt.config, prompt.inputs, image)
            if packed:
                start = sum(n for n, p in zip(segments.lengths, segments.pictures) if p < image)
                picked = value[0, [start + o for o in order]]
            else:
                picked = value[image, order]
        else:
            rows, cols = prompt.family.token_grid(prompt.config, prompt.inputs, image)
            if site.axes[0] == "row":
                start = sum(counts[:image])
                picked = value[0, start : start + counts[image]] if packed else value[image]
            else:
                example, columns = prompt.picture_columns(image)
                if self._selection.positions is not None:
                    raise TokenGroupError(
                        f"grid of {site.name!r}, which positions= has cut",
                        expected="a value over all positions",
                        fix="run again without positions=",
                    )
                picked = value[example, list(columns)]
        return picked.view(rows, cols, -1)
