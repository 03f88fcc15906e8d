"""Hook names: every place in a model that can be read or written, with its order of execution."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from mmlens.errors import ReadOnlyHookError, UnknownHookError, closest
from mmlens.families.base import Family, Shape, Stack
from mmlens.families.discover import has_module
from mmlens.model.access import Access, DeepStackAccess, HeadOutputs, fused, norm_scale, plain, scaled, split, then
from mmlens.model.requests import Address, Point

NamesFilter = str | Iterable[str] | Callable[[str], bool] | None

# Left out of `names_filter=None`: each is as large as everything else together.
HEAVY = ("hook_attn_scores", "hook_pattern", "hook_result")


@dataclass(frozen=True)
class Site:
    """One named place.

    Attributes
    ----------
    name
        Full name, as `blocks.3.attn.hook_z`.
    order
        Sorts sites by execution.
    axes
        What each axis is: "batch", "pos", "row" (of the tower), "head", "kv_head", "query_pos", "key_pos", "d".
    address, point
        For the inside of attention: which module and which point must be asked for.
    used
        False where the value changes nothing downstream (the last tower block of LLaVA).
    """

    name: str
    order: tuple[int, ...]
    access: Access = field(repr=False)
    axes: tuple[str, ...]
    layer: int | None = None
    tower: bool = False
    address: Address | None = None
    point: Point | None = None
    used: bool = True

    @property
    def writable(self) -> bool:
        """Whether a hook may change it."""
        return self.access.write is not None

    @property
    def picture_only(self) -> bool:
        """Whether only prompts with pictures reach it."""
        return self.tower or self.name.startswith("projector.") or self.name.endswith("hook_deepstack_in")

    @property
    def short(self) -> str:
        """The name for all layers: "attn.z" of `blocks.3.attn.hook_z`, "vision.resid_pre" of the tower's."""
        return re.sub(r"blocks\.\d+\.", "", self.name).replace("hook_", "")

    def read(self) -> Tensor:
        """The live value, inside a trace."""
        return self.access.read()

    def write(self, new: Tensor) -> None:
        """Put a value in its place, inside a trace."""
        if not self.writable:
            raise ReadOnlyHookError(
                f"{self.name!r} is derived from other values and cannot be written",
                expected="a hook that holds a value of the forward pass",
                fix=f"write {_SOURCE.get(self.name.rsplit('.', 1)[-1], 'the value that it is derived from')} instead",
            )
        self.access.put(new)


_SOURCE = {
    "hook_result": "attn.hook_z",
    "hook_scale": "the stream before the norm, or hook_normalized",
    "hook_deepstack_in": "projector.deepstack.{i}.hook_out, or the next block's hook_resid_pre",
}


def aliases(short: str) -> set[str]:
    """Every short name a site answers to: "attn.z" is also "z", "mlp.post" also "post"."""
    prefix = "vision." if short.startswith("vision.") else ""
    rest = short.removeprefix(prefix)
    return {prefix + name for name in (rest, rest.removeprefix("attn."), rest.removeprefix("mlp."))}


class Sites:
    """All sites of one model, by name and in order."""

    def __init__(self, sites: Iterable[Site]) -> None:
        self.by_name = {site.name: site for site in sorted(sites, key=lambda s: s.order)}
        self._short: dict[str, list[Site]] = {}
        for site in self.by_name.values():
            for alias in aliases(site.short):
                self._short.setdefault(alias, []).append(site)

    def __iter__(self) -> Any:
        return iter(self.by_name.values())

    def get(self, name: str) -> Site:
        """The site of an exact name."""
        if name not in self.by_name:
            raise self._unknown(name)
        return self.by_name[name]

    def _unknown(self, name: str) -> UnknownHookError:
        known = [*self.by_name, *self._short]
        return UnknownHookError(
            f"no hook is named {name!r}",
            expected=f"a full name, a short name or a glob; closest: {closest(name, known)}",
            fix="list them with vlm.hook_names('*pattern*') or `mmlens hooks MODEL`",
        )

    def layer(self, short: str, layer: int) -> Site:
        """The site of a short name and a layer; negative layers count from the end."""
        sites = [s for s in self._short.get(short.replace("hook_", ""), ()) if s.layer is not None]
        if not sites:
            raise self._unknown(short)
        n = 1 + max(s.layer for s in self if s.layer is not None and s.tower == sites[0].tower)
        wanted = layer % n if -n <= layer < n else None
        for site in sites:
            if site.layer == wanted:
                return site
        raise UnknownHookError(
            f"{short!r} has no layer {layer}",
            expected=f"one of {[s.layer for s in sites]}, or a negative layer counted from {n}",
            fix="pick a layer that this model has",
        )

    def match(self, name: str) -> list[Site]:
        """Sites of a full name, a short name or a glob, in order of execution."""
        if name in self.by_name:
            return [self.by_name[name]]
        short = name.replace("hook_", "")
        if short in self._short:
            return self._short[short]
        if any(c in name for c in "*?["):
            found = [s for s in self if fnmatch.fnmatchcase(s.name, name)]
            if found:
                return found
        raise self._unknown(name)

    def choose(self, names: NamesFilter) -> tuple[list[Site], set[str]]:
        """Sites of a filter in order of execution, and the names that were asked for exactly."""
        exact: set[str] = set()
        if names is None:
            return [s for s in self if not s.name.endswith(HEAVY)], exact
        if callable(names):
            return [s for s in self if names(s.name)], exact
        found: dict[str, Site] = {}
        if not isinstance(names, Iterable):
            names = [names]
        for name in [names] if isinstance(names, str) else names:
            if not isinstance(name, str):
                raise UnknownHookError(
                    f"{name!r} in names_filter",
                    expected="a name, a glob, a list of them, a callable or None",
                    fix="cache entries of one layer are named in full: 'blocks.3.attn.hook_z'",
                )
            matched = self.match(name)
            found.update((s.name, s) for s in matched)
            if not any(c in name for c in "*?["):
                exact.update(s.name for s in matched)
        return sorted(found.values(), key=lambda s: s.order), exact


def build_sites(family: Family, config: Any, root: Any) -> Sites:
    """Every site of a model; `root` is the tracing engine's view of it."""
    sites: list[Site] = []
    decoder, tower = family.decoder_shape(config), family.tower_shape(config)
    used = family.used_tower_layers(config)
    sites += _stack_sites("vision.", family.tower, tower, root, 0, used)
    sites.append(
        Site(
            "projector.hook_out",
            (1, 0),
            plain(root.get(family.projector), "output", packed=family.tower.packed),
            ("row", "row", "d"),
        )
    )
    n_deepstack = family.deepstack_layers(config)
    if family.deepstack is not None:
        indexes = config.vision_config.deepstack_visual_indexes
        for i in range(n_deepstack):
            sites.append(
                Site(
                    f"projector.deepstack.{i}.hook_out",
                    (0, indexes[i] + 1, -1),
                    plain(root.get(f"{family.deepstack}.{i}"), "output", packed=family.tower.packed),
                    ("row", "row", "d"),
                )
            )
    language = root.get(family.language_model)
    for layer in range(n_deepstack):
        sites.append(
            Site(
                f"blocks.{layer}.hook_deepstack_in",
                (2, -1, layer),
                DeepStackAccess(language, "input", layer=layer),
                ("batch", "pos", "d"),
                layer=layer,
            )
        )
    first = root.get(f"{family.decoder.blocks}.0")
    sites.append(Site("hook_embed", (2, 0, 0), Access(first, "input"), ("batch", "pos", "d")))
    sites += _stack_sites("", family.decoder, decoder, root, 2, decoder.n_layers)
    norm = root.get(family.final_norm)
    sites.append(
        Site(
            "ln_final.hook_scale", (3, 0), Access(norm, "input", norm_scale(norm._module), None), ("batch", "pos", "d")
        )
    )
    sites.append(Site("ln_final.hook_normalized", (3, 1), Access(norm, "output"), ("batch", "pos", "d")))
    sites.append(Site("hook_logits", (4,), Access(root.get(family.unembed), "output"), ("batch", "pos", "d")))
    return Sites(sites)


def head_outputs(block: Any, stack: Stack, shape: Shape) -> HeadOutputs:
    """How a block's head outputs z become what its attention adds to the stream."""
    norm = None if stack.attn_added is None else block.get_submodule(stack.attn_added)
    out = block.get_submodule(f"{stack.attn}.{stack.out}")
    return HeadOutputs(out, shape, norm, stack.norm_offset, block, stack.attn_scale)


def _stack_sites(prefix: str, stack: Stack, shape: Shape, root: Any, stage: int, n_used: int) -> list[Site]:
    """The sites of every block of a stack; blocks from `n_used` on run, but change nothing downstream."""
    sites: list[Site] = []
    tower = prefix != ""
    pos = "row" if tower else "pos"
    stream = ("batch", pos, "d")

    def add(
        layer: int,
        name: str,
        step: int,
        access: Access,
        axes: tuple[str, ...] = stream,
        address: Address | None = None,
        point: Point | None = None,
    ) -> None:
        full = f"{prefix}blocks.{layer}.{name}"
        sites.append(Site(full, (stage, layer, step), access, axes, layer, tower, address, point, layer < n_used))

    for layer in range(shape.n_layers):
        path = f"{stack.blocks}.{layer}"
        get = lambda part: root.get(f"{path}.{part}")  # noqa: B023, E731
        block, attn = root.get(path), get(stack.attn)
        address: Address = ("tower" if tower else "decoder", layer)
        lift = (lambda raw: raw.unsqueeze(0)) if stack.packed else (lambda raw: raw)
        add(layer, "hook_resid_pre", 0, Access(block, "input", lift))
        ln1, ln2 = get(stack.ln1), get(stack.ln2)
        add(layer, "ln1.hook_scale", 1, Access(ln1, "input", then(lift, norm_scale(ln1._module)), None))
        add(layer, "ln1.hook_normalized", 2, Access(ln1, "output", lift))
        for i, letter in enumerate("qkv"):
            heads = shape.n_heads if letter == "q" else shape.n_key_value_heads
            kind = "head" if letter == "q" else "kv_head"
            if len(stack.qkv) == 1:
                access = fused(get(f"{stack.attn}.{stack.qkv[0]}"), i, heads, shape.d_head, lift)
            else:
                access = split(get(f"{stack.attn}.{stack.qkv[i]}"), "output", heads, shape.d_head, lift)
            add(layer, f"attn.hook_{letter}", 3 if len(stack.qkv) == 1 else 3 + i, access, ("batch", pos, kind, "d"))
        swap = lambda x: x.transpose(1, 2)  # noqa: E731
        for step, letter in ((6, "q"), (7, "k")):
            point = getattr(attn, f"hook_rot_{letter}")
            along = pos if letter == "q" else "key"
            add(
                layer,
                f"attn.hook_rot_{letter}",
                step,
                Access(point, "output", swap, lambda raw, new: new.transpose(1, 2)),
                ("batch", along, "head" if letter == "q" else "kv_head", "d"),
                address,
                cast(Point, f"rot_{letter}"),
            )
        for step, name in ((8, "attn_scores"), (9, "pattern")):
            add(
                layer,
                f"attn.hook_{name}",
                step,
                Access(getattr(attn, f"hook_{name}"), "output"),
                ("batch", "head", "row" if tower else "query_pos", "key"),
                address,
                cast(Point, name),
            )
        out = get(f"{stack.attn}.{stack.out}")
        z = split(out, "input", shape.n_heads, shape.d_head, lift)
        add(layer, "attn.hook_z", 10, z, ("batch", pos, "head", "d"))
        outputs = head_outputs(block._module, stack, shape)
        add(
            layer,
            "attn.hook_result",
            10,
            Access(out, "input", then(z.view, outputs), None, prepare=outputs.prepare),
            ("batch", pos, "head", "d"),
        )
        added = attn if stack.attn_added is None else get(stack.attn_added)
        add(layer, "hook_attn_out", 12, scaled(added, block._module, stack.attn_scale, lift))
        # The residual branch holds the tensor that the norm reads: a write must be in place to reach both.
        add(layer, "hook_resid_mid", 13, Access(ln2, "input", lift, in_place=True))
        add(layer, "ln2.hook_scale", 14, Access(ln2, "input", then(lift, norm_scale(ln2._module)), None))
        add(layer, "ln2.hook_normalized", 15, Access(ln2, "output", lift))
        if has_module(block._module, f"{stack.mlp}.{stack.mlp_in}"):  # a mixture of experts has no one inside
            add(layer, "mlp.hook_pre", 16, Access(get(f"{stack.mlp}.{stack.mlp_in}"), "output", lift))
            if stack.mlp_linear is not None:
                add(layer, "mlp.hook_pre_linear", 17, Access(get(f"{stack.mlp}.{stack.mlp_linear}"), "output", lift))
            add(layer, "mlp.hook_post", 18, Access(get(f"{stack.mlp}.{stack.mlp_out}"), "input", lift))
        mlp = get(stack.mlp if stack.mlp_added is None else stack.mlp_added)
        add(layer, "hook_mlp_out", 19, scaled(mlp, block._module, stack.mlp_scale, lift))
        add(layer, "hook_resid_post", 20, Access(block, "output", lift))
    return sites
