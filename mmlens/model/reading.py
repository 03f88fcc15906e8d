"""Reading runs: caches with gradients and reductions, the attention mass of token groups, spliced modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mmlens.errors import HookValueError, NonFiniteError, OptionError
from mmlens.model.cache import ActivationCache
from mmlens.model.engine import Engine, HeadsLike
from mmlens.model.prompt import Prompt, require_prompt_group
from mmlens.model.requests import Address, MassAsk, pad_rows
from mmlens.model.run import Action, plain_call
from mmlens.model.select import Cut
from mmlens.model.sites import NamesFilter, Site
from mmlens.tokens import Group, TokenSet

if TYPE_CHECKING:
    from pandas import DataFrame

HALF = (torch.float16, torch.bfloat16)


def run_with_cache(
    engine: Engine,
    prompt: Prompt,
    names_filter: NamesFilter,
    *,
    rows: Group | None,
    heads: HeadsLike | None,
    positions: Group | None,
    reduce: Mapping[str, Callable[[Tensor], Tensor]] | None,
    stop_at_layer: int | None,
    grad: bool,
    device: torch.device | None,
) -> tuple[Tensor, ActivationCache]:
    """See `HookedVLM.run_with_cache`."""
    if reduce is not None and not (isinstance(reduce, Mapping) and all(map(callable, reduce.values()))):
        raise OptionError(f"reduce={reduce!r}", expected="{name or glob: function}", fix="reduce={'z': torch.norm}")
    layer = _stop(engine, stop_at_layer)
    selection = engine.selection(prompt, rows, heads, positions)
    values: dict[str, Tensor] = {}
    kept: dict[str, tuple[Tensor, Cut | None]] = {}

    def keep(site: Site, value: Tensor) -> None:
        values[site.name] = value if device is None else value.to(device)

    def keep_raw(site: Site, raw: Tensor, cut: Cut) -> None:
        if site.writable and raw.requires_grad:
            raw.retain_grad()
            kept[site.name] = (raw, cut)

    by_name: dict[str, Action] = {}
    for reduced_name, fn in (reduce or {}).items():
        for action in engine.captures(prompt, reduced_name, selection, _reducing(values, fn), stop=layer):
            by_name[action.site.name] = action
    reduced = frozenset(by_name)
    names = [] if names_filter is None and reduce else names_filter
    raw_sink = keep_raw if grad else None
    for action in engine.captures(prompt, names, selection, keep, raw_sink=raw_sink, stop=layer):
        by_name.setdefault(action.site.name, action)
    actions = sorted(by_name.values(), key=lambda a: a.site.order)
    leaves: dict[str, Tensor] | None = {} if grad else None
    if layer is None:
        result = engine.forward(prompt, actions, leaves=leaves)
    else:
        result = engine.forward_until(prompt, actions, layer, leaves=leaves)
    if result.dtype in HALF and not engine.hooked:
        _refuse_overflow(engine, prompt, result)
    kept.update({name: (leaf, None) for name, leaf in (leaves or {}).items()})
    cache = ActivationCache(
        values,
        engine.sites,
        prompt,
        selection,
        engine=engine,
        reduced=reduced,
        kept=kept if grad else None,
    )
    return result, cache


def _stop(engine: Engine, layer: int | None) -> int | None:
    n = engine.n_layers
    if layer is None:
        return None
    if isinstance(layer, bool) or not isinstance(layer, int) or not -n <= layer <= n:
        raise OptionError(
            f"stop_at_layer={layer!r}", expected=f"an int from {-n} to {n}", fix="leave it out to run to the logits"
        )
    return layer + n if layer < 0 else layer


def _reducing(values: dict[str, Tensor], fn: Callable[[Tensor], Tensor]) -> Callable[[Site, Tensor], None]:
    def reduce(site: Site, value: Tensor) -> None:
        result = fn(value)
        if isinstance(result, int | float):
            result = torch.tensor(float(result))
        if not isinstance(result, Tensor):
            raise HookValueError(
                f"the reduction of {site.name!r} returned {type(result).__name__}",
                expected="a tensor or a number",
                fix="reduce={'pattern': lambda p: p.amax(-1)}",
            )
        # a view would keep the whole value alive
        values[site.name] = result.clone() if result._base is not None else result

    return reduce


def _refuse_overflow(engine: Engine, prompt: Prompt, result: Tensor) -> None:
    """Infinities in half precision, named by where they first appear; looked for only once the result has some."""
    real = prompt.inputs["attention_mask"].bool().to(result.device)
    if bool(result[real].isfinite().all()):
        return
    first: list[tuple[Site, float]] = []

    def look(site: Site, value: Tensor) -> None:
        if not first and not bool(value.isfinite().all()):
            finite = value[value.isfinite()]
            first.append((site, float(finite.abs().max()) if finite.numel() else float("nan")))

    streams = [
        n for n in engine.sites.by_name if n.endswith(("resid_pre", "resid_mid", "resid_post", "_out", "hook_z"))
    ]
    engine.forward(prompt, engine.captures(prompt, lambda n: n in streams, engine.no_cut, look))
    where = "hook_logits" if not first else first[0][0].name
    largest = "" if not first else f" (largest finite value there: {first[0][1]:.3g})"
    raise NonFiniteError(
        f"{where!r} is not finite in {str(engine.dtype).removeprefix('torch.')}{largest}",
        expected="numbers that fit the model's precision",
        fix="load the model with dtype='bfloat16' or 'float32'; float16 ends at 65,504",
    )


@dataclass(frozen=True)
class GroupMass:
    """Attention mass of token groups.

    Attributes
    ----------
    values
        Share (0..1) of each query's attention that falls on each group.
    groups
        What the last axis counts.
    positions
        (batch, row) columns of the encoded batch, -1 where ragged examples are padded.
    """

    values: Float[Tensor, "layer batch head row group"]
    groups: tuple[str, ...]
    positions: Int[Tensor, "batch row"]

    def to_pandas(self) -> DataFrame:
        """One row for each layer, head and group: the mean over examples and their rows."""
        import pandas as pd

        kept = (self.positions >= 0)[None, :, None, :, None].to(self.values.device)
        totals = torch.where(kept, self.values, torch.zeros(())).sum((1, 3)) / kept.sum((1, 3))
        rows = [
            {"layer": layer, "head": head, "group": group, "mass": float(totals[layer, head, g])}
            for layer in range(totals.shape[0])
            for head in range(totals.shape[1])
            for g, group in enumerate(self.groups)
        ]
        return pd.DataFrame(rows)


def attention_mass(engine: Engine, prompt: Prompt, groups: Sequence[Group], rows: Group | None) -> GroupMass:
    """See `HookedVLM.attention_mass`."""
    if not groups:
        raise OptionError("groups=[]", expected="at least one token group", fix="groups=['image', 'text']")
    columns = [require_prompt_group(prompt, group, "groups") for group in groups]
    members = torch.zeros(len(prompt), prompt.n_columns, len(groups), dtype=torch.bool, device=engine.device)
    for g, per_example in enumerate(columns):
        for example, chosen in enumerate(per_example):
            members[example, list(chosen), g] = True
    found: dict[int, Tensor] = {}
    if rows is None:

        def take(address: Address, mass: Tensor) -> None:
            found[address[1]] = mass.transpose(1, 2).float()

        engine.run(
            prompt,
            [],
            call=lambda holder: plain_call(engine.hf, holder, logits_to_keep=1),
            steps=False,
            mass=MassAsk(members, take),
        )
        positions = torch.arange(prompt.n_columns).expand(len(prompt), -1)
        values = torch.stack([found[layer] for layer in range(engine.n_layers)])
        padding = ~prompt.inputs["attention_mask"].bool().to(values.device)
        values = values.masked_fill(padding[None, :, None, :, None], 0)
    else:
        chosen_rows = require_prompt_group(prompt, rows, "rows")
        positions = pad_rows(chosen_rows)
        weights = members.float()

        def sum_up(site: Site, pattern: Tensor) -> None:
            assert site.layer is not None
            found[site.layer] = torch.einsum("bhrk,bkg->bhrg", pattern, weights)

        engine.reduce(prompt, {"pattern": sum_up}, rows=TokenSet(chosen_rows))
        values = torch.stack([found[layer] for layer in range(engine.n_layers)])
    return GroupMass(values, tuple(_told(group) for group in groups), positions)


def _told(group: Any) -> str:
    return group if isinstance(group, str) else f"{len(group)} positions" if isinstance(group, TokenSet) else str(group)


def splice_hook(encode_decode: Callable[[Tensor], Tensor], *, error_term: bool) -> Callable[..., Tensor]:
    """The hook function of `HookedVLM.splice`."""
    own = next(iter(encode_decode.parameters()), None) if isinstance(encode_decode, nn.Module) else None

    def replace(value: Tensor, hook: Any) -> Tensor:
        given = value if own is None else value.to(own.device, own.dtype)
        made = encode_decode(given)
        if not isinstance(made, Tensor) or made.shape != value.shape:
            got = f"shape {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
            raise HookValueError(
                f"the module spliced in at {hook.name!r} returned {got}",
                expected=f"a tensor of shape {tuple(value.shape)}",
                fix="splice what encodes and decodes again, not the encoder alone",
            )
        made = made.to(value.device, value.dtype)
        # detached, so that gradients see the module and not the way around it
        return made + (value - made).detach() if error_term else made

    return replace
