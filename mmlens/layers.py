"""What every attention and MLP module does to the residual stream, over a task: RID, MixIG, eRank, TME by layer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from mmlens.errors import OptionError, RunFolderError
from mmlens.metrics.mixing import tme
from mmlens.metrics.residual import Rtol, Spectrum, cut_of
from mmlens.metrics.statistics import mean_interval
from mmlens.model.hooked import HookedVLM
from mmlens.scan import batches, track, versions
from mmlens.scores import N_RESAMPLES, write_whole
from mmlens.tasks.base import Split, Task
from mmlens.tokens import Group

if TYPE_CHECKING:
    import pandas as pd

    from mmlens.viz.figures import Figure

Metric = Literal["rid", "complexity", "support", "mixig", "erank", "tme"]
PROFILE_METRICS: tuple[Metric, ...] = ("rid", "complexity", "support", "mixig", "erank", "tme")
MODULES = ("attn", "mlp")


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """Numbers of every module of every layer, kept per example.

    Attributes
    ----------
    samples
        For each metric (example, module, layer); NaN where an example has no sound answer.
    modules
        What the module axis counts.
    ranks
        (example, layer): the rank at which the support of each layer's input was cut.
    reasons
        Why examples are NaN: {index as text: reason}.
    """

    samples: Mapping[str, Float[ndarray, "example module layer"]] = field(repr=False)
    modules: tuple[str, ...]
    ranks: ndarray = field(repr=False)
    provenance: Mapping[str, Any] = field(repr=False)
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def metrics(self) -> tuple[str, ...]:
        """What was measured."""
        return tuple(self.samples)

    @property
    def n_valid(self) -> int:
        """Examples with a sound answer."""
        return len(next(iter(self.samples.values()))) - len(self.reasons)

    def values(self, metric: str) -> Float[ndarray, "module layer"]:
        """Mean over the valid examples."""
        valid = self._valid(metric)
        return valid.mean(0) if len(valid) else np.full(valid.shape[1:], np.nan)

    def interval(self, metric: str) -> tuple[Float[ndarray, "module layer"], Float[ndarray, "module layer"]]:
        """95 % bootstrap interval over examples."""
        seed = [int(self.provenance.get("seed", 0)), 7]
        return mean_interval(self._valid(metric), seed=seed, n_resamples=N_RESAMPLES)

    def _valid(self, metric: str) -> ndarray:
        if metric not in self.samples:
            raise OptionError(
                f"metric {metric!r} of this profile",
                expected=f"one of {', '.join(self.samples)}",
                fix="ask for it when the profile is made",
            )
        found = self.samples[metric]
        return found[~np.isnan(found).all((1, 2))]

    def to_pandas(self) -> pd.DataFrame:
        """One row for each metric, module and layer: mean and interval."""
        import pandas as pd

        rows = []
        for metric in self.samples:
            mean, (low, high) = self.values(metric), self.interval(metric)
            for m, module in enumerate(self.modules):
                for layer in range(mean.shape[1]):
                    rows.append((metric, module, layer, mean[m, layer], low[m, layer], high[m, layer]))
        return pd.DataFrame(rows, columns=["metric", "module", "layer", "mean", "low", "high"])

    def save(self, folder: str | Path) -> Path:
        """Write profile.safetensors and profile.json into a folder."""
        from safetensors.numpy import save

        folder = Path(folder)
        arrays = {f"samples:{m}": np.ascontiguousarray(v) for m, v in self.samples.items()}
        arrays["ranks"] = np.ascontiguousarray(self.ranks)
        body = {
            "metrics": list(self.samples),
            "modules": list(self.modules),
            "reasons": dict(self.reasons),
            "provenance": dict(self.provenance),
        }
        write_whole(folder / "profile.safetensors", save(arrays))
        write_whole(folder / "profile.json", json.dumps(body, indent=1, sort_keys=True).encode())
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> LayerProfile:
        """Read what `save` wrote."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        folder = Path(folder)
        try:
            body = json.loads((folder / "profile.json").read_text())
            arrays = load_file(folder / "profile.safetensors")
            samples = {m: arrays[f"samples:{m}"] for m in body["metrics"]}
            return cls(samples, tuple(body["modules"]), arrays["ranks"], body["provenance"], body["reasons"])
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise RunFolderError(
                f"{folder} holds no whole profile: {error}",
                expected="profile.json and profile.safetensors, as LayerProfile.save writes them",
                fix="make the profile again",
            ) from None

    def plot(self, metric: str | None = None) -> Figure:
        """Lines over layers, a band for the interval; by default of the first metric."""
        from mmlens.viz.figures import layer_lines

        return layer_lines(self, self.metrics[0] if metric is None else metric)


def layer_profile(
    vlm: HookedVLM,
    task: Task,
    *,
    metrics: Sequence[str] = ("rid", "mixig", "erank", "tme"),
    modules: Sequence[str] = MODULES,
    tokens: Group = "all",
    reference: Literal["module", "block_input"] = "module",
    norm: bool = False,
    alpha: float = 1.0,
    rows: Literal["mean", "last"] = "mean",
    rtol: Rtol = None,
    n: int | None = None,
    seed: int = 0,
    split: Split = "rank",
) -> LayerProfile:
    """How much each attention and MLP module innovates (RID) and mixes (MixIG), layer by layer, over a task.

    Each state is decomposed once and shared by the updates before and after it.

    Parameters
    ----------
    metrics
        Of "rid", "complexity", "support" (its two terms), "mixig", "erank" and "tme" (of the state after the module).
    modules
        "attn" and "mlp".
    tokens
        Which tokens make the state: any token group.
    reference
        What an update is measured against: the "module"'s own input, or the "block_input" for both (as the released
        helper does, so that the MLP's number holds attention's too).
    norm
        Root-mean-square-normed rows, so that a massive feature does not rule everything.
    alpha, rows
        Of TME and MixIG; see `mmlens.metrics.tme`.
    rtol
        Where the old support ends; see `mmlens.metrics.rid_parts`.

    Raises
    ------
    OptionError, TokenGroupError, MetricError

    Examples
    --------
    >>> from mmlens import HookedVLM, load_task
    >>> vlm = HookedVLM.from_pretrained("toy-qwen3-vl")
    >>> profile = vlm.layer_profile(load_task("scenes/image"), metrics=["rid"], tokens="image", n=2)
    >>> profile.values("rid").shape
    (2, 8)
    """
    for name, chosen, known in (("metrics", metrics, PROFILE_METRICS), ("modules", modules, MODULES)):
        if isinstance(chosen, str) or not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(known):
            raise OptionError(
                f"{name}={chosen!r}", expected=f"different ones of {', '.join(known)}", fix=f"{name}={list(known[:2])}"
            )
    if reference not in ("module", "block_input"):
        raise OptionError(f"reference={reference!r}", expected="'module' or 'block_input'", fix="leave it out")
    if rows not in ("mean", "last"):
        raise OptionError(f"rows={rows!r}", expected="'mean' or 'last'", fix="leave it out")
    n = task.count(split, n, seed)
    options = {
        "metrics": list(metrics),
        "modules": list(modules),
        "tokens": tokens if isinstance(tokens, str | int) else str(tokens),
        "reference": reference,
        "norm": norm,
        "alpha": alpha,
        "rows": rows,
        "rtol": rtol,
    }
    provenance = {
        "kind": "layer_profile",
        "model": vlm.identity(),
        "task": task.identity(),
        **options,
        "n": n,
        "seed": seed,
        "split": split,
        "versions": versions(),
    }
    samples = {m: np.full((n, len(modules), vlm.n_layers), np.nan) for m in metrics}
    ranks = np.zeros((n, vlm.n_layers), np.int64)
    reasons: dict[str, str] = {}
    todo = batches(vlm, task, split=split, n=n, seed=seed, answers=isinstance(tokens, str) and "output" in tokens)
    for batch in track(todo, total=-(-n // task.batch), what=f"layers over {task.name}"):
        columns = batch.prompt.tokens(tokens).per_example
        _, cache = vlm.run_with_cache(batch.prompt, ["resid_pre", "resid_mid", "resid_post"], positions=tokens)
        for i, mine in enumerate(columns):
            example = batch.number * task.batch + i
            if not mine:
                reasons[str(example)] = "the token group is empty"
                continue
            chain = None
            for layer in range(vlm.n_layers):
                states = [cache[name, layer][i, : len(mine)] for name in ("resid_pre", "resid_mid", "resid_post")]
                bad = next((k for k, s in enumerate(states) if not bool(s.isfinite().all())), None)
                if bad is not None:
                    where = ("resid_pre", "resid_mid", "resid_post")[bad]
                    reasons[str(example)] = f"infinities or NaN in blocks.{layer}.hook_{where}"
                    for metric in metrics:
                        samples[metric][example] = np.nan
                    break
                chain = _Chain(states, chain, norm=norm, alpha=alpha, rows=rows, rtol=rtol, metrics=metrics)
                ranks[example, layer] = chain.rank
                for m, module in enumerate(modules):
                    for metric, value in chain.numbers(module, reference).items():
                        samples[metric][example, m, layer] = value
    return LayerProfile(samples, tuple(modules), ranks, json.loads(json.dumps(provenance)), reasons)


class _Chain:
    """The three states of one layer, each decomposed once; the first is the layer's before, but for DeepStack."""

    def __init__(
        self,
        states: Sequence[Tensor],
        before: _Chain | None,
        *,
        norm: bool,
        alpha: float,
        rows: Any,
        rtol: Rtol,
        metrics: Sequence[str],
    ) -> None:
        self.cut, self.metrics, self.last = cut_of(states[0], rtol), metrics, states[-1]
        known = before if before is not None and torch.equal(before.last, states[0]) else None
        new = [s.double() for s in (states if known is None else states[1:])]
        if norm:
            new = [s / s.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-12) for s in new]
        spectral = bool({"rid", "complexity", "support", "erank"} & set(metrics))
        spectra = [Spectrum.of(s) for s in new] if spectral else []
        mixing = bool({"tme", "mixig"} & set(metrics))
        mixed = [float(tme(s, alpha=alpha, rows=rows)) for s in new] if mixing else []
        self.spectra: list[Spectrum] = spectra if known is None else [*known.spectra[-1:], *spectra]
        self.tme: list[float] = mixed if known is None else [*known.tme[-1:], *mixed]

    @property
    def rank(self) -> int:
        """Of the layer's input."""
        if not self.spectra:
            return 0
        s = self.spectra[0].values
        return int((s > self.cut * s[:1]).sum())

    def numbers(self, module: str, reference: str) -> dict[str, float]:
        """Every metric of one module's update."""
        after = 1 if module == "attn" else 2
        before = 0 if reference == "block_input" else after - 1
        found: dict[str, float] = {}
        if {"rid", "complexity", "support"} & set(self.metrics):
            parts = self.spectra[before].to(self.spectra[after], self.cut)
            found |= {"rid": float(parts.total), "complexity": float(parts.complexity), "support": float(parts.support)}
        if "erank" in self.metrics:
            found["erank"] = float(self.spectra[after].erank)
        if self.tme:
            found |= {"tme": self.tme[after], "mixig": self.tme[after] - self.tme[before]}
        return {k: v for k, v in found.items() if k in self.metrics}
