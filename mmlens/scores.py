"""What scans return: HeadScores (a number for every head, with its spread) and HeadSet (some heads)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from mmlens.errors import HeadError, RunFolderError

if TYPE_CHECKING:
    import pandas as pd

    from mmlens.viz.figures import Figure

Head = tuple[int, int]  # (layer, head)
N_RESAMPLES = 1000


@dataclass(frozen=True)
class HeadSet:
    """Some heads of one model, in order of rank.

    Examples
    --------
    >>> from mmlens import HeadSet
    >>> a = HeadSet.of([(0, 1), (3, 2)], n_layers=4, n_heads=8)
    >>> len(a | HeadSet.of([(0, 1), (1, 1)], n_layers=4, n_heads=8)), (3, 2) in a
    (3, True)
    """

    heads: tuple[Head, ...]
    n_layers: int
    n_heads: int
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        wrong = [h for h in self.heads if not (0 <= h[0] < self.n_layers and 0 <= h[1] < self.n_heads)]
        if wrong or len(set(self.heads)) < len(self.heads):
            raise HeadError(
                f"heads {wrong or self.heads}",
                expected=f"distinct (layer, head) pairs below ({self.n_layers}, {self.n_heads})",
                fix="check the model's size: vlm.n_layers, vlm.n_heads",
            )

    @classmethod
    def of(cls, heads: Iterable[Head], *, n_layers: int, n_heads: int, **provenance: Any) -> HeadSet:
        """A set from (layer, head) pairs."""
        try:
            pairs = tuple((int(a), int(b)) for a, b in heads)
        except (TypeError, ValueError) as error:
            raise HeadError(
                f"heads {heads!r}: {error}", expected="(layer, head) pairs of ints", fix="HeadSet.of([(0, 3)], ...)"
            ) from None
        return cls(pairs, n_layers, n_heads, provenance)

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[Head]:
        return iter(self.heads)

    def __contains__(self, head: object) -> bool:
        return head in self.heads

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeadSet):
            return NotImplemented
        return set(self.heads) == set(other.heads) and self.shape == other.shape

    def __hash__(self) -> int:
        return hash((frozenset(self.heads), self.shape))

    @property
    def shape(self) -> tuple[int, int]:
        """(n_layers, n_heads) of the model."""
        return self.n_layers, self.n_heads

    def _join(self, other: HeadSet, keep: Iterable[Head], sign: str) -> HeadSet:
        if other.shape != self.shape:
            raise HeadError(
                f"head sets of models with {self.shape} and {other.shape} layers and heads",
                expected="two sets of one model",
                fix="rank both on the same model",
            )
        origin = {"operation": sign, "of": [dict(self.provenance), dict(other.provenance)]}
        return HeadSet(tuple(dict.fromkeys(keep)), *self.shape, origin)

    def __or__(self, other: HeadSet) -> HeadSet:
        return self._join(other, (*self.heads, *other.heads), "|")

    def __and__(self, other: HeadSet) -> HeadSet:
        return self._join(other, (h for h in self.heads if h in other), "&")

    def __sub__(self, other: HeadSet) -> HeadSet:
        return self._join(other, (h for h in self.heads if h not in other), "-")

    def by_layer(self) -> dict[int, tuple[int, ...]]:
        """{layer: sorted heads}, layers without heads left out."""
        layers = sorted({layer for layer, _ in self.heads})
        return {layer: tuple(sorted(h for at, h in self.heads if at == layer)) for layer in layers}

    def complement(self) -> HeadSet:
        """Every head that is not in the set."""
        every = [(a, b) for a in range(self.n_layers) for b in range(self.n_heads)]
        return HeadSet(
            tuple(h for h in every if h not in set(self.heads)), *self.shape, {"complement_of": dict(self.provenance)}
        )

    def random(self, *, seed: int) -> HeadSet:
        """A control: as many heads, drawn from all the others."""
        others = self.complement().heads
        if len(others) < len(self):
            raise HeadError(
                f"a random control of {len(self)} heads from the {len(others)} others",
                expected="a set of at most half of all heads",
                fix="use a smaller set",
            )
        picked = np.random.default_rng([seed, 0]).choice(len(others), len(self), replace=False)
        return HeadSet(tuple(others[i] for i in sorted(picked)), *self.shape, {"control": "random", "seed": seed})

    def layer_matched(self, *, seed: int) -> HeadSet:
        """A control with the set's own layers: per layer as many heads, drawn from that layer's others.

        Where a layer has too few others, all of them are taken and the rest comes from the nearest layers (the lower
        one first); `provenance["borrowed"]` reports how many, by layer.
        """
        rng = np.random.default_rng([seed, 1])
        free: dict[int, list[int]] = {}
        for layer, head in self.complement():
            free.setdefault(layer, []).append(head)
        if sum(map(len, free.values())) < len(self):
            return self.random(seed=seed)  # raises the same error
        drawn: list[Head] = []
        missing: dict[int, int] = {}
        for layer, heads in self.by_layer().items():
            own = free.get(layer, [])
            n = min(len(heads), len(own))
            for head in sorted(rng.choice(own, n, replace=False)) if n else []:
                own.remove(head)
                drawn.append((layer, int(head)))
            if n < len(heads):
                missing[layer] = len(heads) - n
        for layer, n in missing.items():
            near = sorted((at for at in free if free[at]), key=lambda at: (abs(at - layer), at))
            for at in near:
                taken = min(n, len(free[at]))
                for head in sorted(rng.choice(free[at], taken, replace=False)):
                    free[at].remove(head)
                    drawn.append((at, int(head)))
                n -= taken
                if n == 0:
                    break
        borrowed = {str(layer): n for layer, n in missing.items()}
        return HeadSet(tuple(drawn), *self.shape, {"control": "layer_matched", "seed": seed, "borrowed": borrowed})

    def save(self, path: str | Path) -> Path:
        """Write a JSON file."""
        path = Path(path)
        body = {"heads": self.heads, "n_layers": self.n_layers, "n_heads": self.n_heads, "provenance": self.provenance}
        write_whole(path, json.dumps(body, indent=1, sort_keys=True).encode())
        return path

    @classmethod
    def load(cls, path: str | Path) -> HeadSet:
        """Read what `save` wrote."""
        body = _read_json(Path(path))
        try:
            return cls(tuple((a, b) for a, b in body["heads"]), body["n_layers"], body["n_heads"], body["provenance"])
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderError(
                f"{path} is no head set: {error}", expected="a file that HeadSet.save wrote", fix="save it again"
            ) from None


@dataclass(frozen=True)
class HeadScores:
    """A score for every head, kept per example so that its spread can be told.

    Attributes
    ----------
    samples
        (sample, layer, head); NaN where an example has no sound answer.
    tower
        "decoder" or "vision".
    unit
        "query" or "kv": what a column of `values` is.
    reasons
        Why examples are NaN: {index of the sample as text: reason}.
    provenance
        Model, task, metric and every option, versions, n, seed.
    """

    samples: Float[ndarray, "sample layer head"] = field(repr=False)
    provenance: Mapping[str, Any]
    tower: Literal["decoder", "vision"] = "decoder"
    unit: Literal["query", "kv"] = "query"
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def n_valid(self) -> int:
        """Examples with a sound answer."""
        return int((~np.isnan(self.samples).all((1, 2))).sum())

    @property
    def values(self) -> Float[ndarray, "layer head"]:
        """Macro mean over the valid examples; NaN where there is none."""
        return _nanmean(self.samples)

    @property
    def interval(self) -> tuple[Float[ndarray, "layer head"], Float[ndarray, "layer head"]]:
        """95 % bootstrap interval over examples (percentiles of 1,000 resamples, seeded by the scan's own seed)."""
        from mmlens.metrics.statistics import mean_interval  # brings torch, which reading scores does not need

        valid = self.samples[~np.isnan(self.samples).all((1, 2))]
        return mean_interval(valid, seed=[int(self.provenance.get("seed", 0)), 7], n_resamples=N_RESAMPLES)

    def _ranked(self, *, best: bool) -> list[Head]:
        values = self.values
        scored = [(float(values[a, b]), (a, b)) for a, b in np.ndindex(*values.shape) if not np.isnan(values[a, b])]
        # Ties by (layer, head), so that a rerun gives the same order.
        return [head for _, head in sorted(scored, key=lambda s: (-s[0] if best else s[0], s[1]))]

    def _count(self, k: int | None, fraction: float | int | None) -> int:
        n = int(np.prod(self.values.shape))
        if (k is None) == (fraction is None):
            raise HeadError(
                f"k={k} with fraction={fraction}", expected="exactly one of them", fix="top(k=5) or top(fraction=0.05)"
            )
        if fraction is not None:
            if not isinstance(fraction, Real) or not 0 < fraction <= 1:
                raise HeadError(f"fraction={fraction}", expected="0 < fraction <= 1", fix="5 % is fraction=0.05")
            k = ceil(fraction * n - 1e-9)
        scored = len(self._ranked(best=True))
        if not isinstance(k, Integral) or not 0 <= k <= scored:
            raise HeadError(
                f"k={k} of {n} heads, of which {scored} have a score",
                expected=f"0 <= k <= {scored}",
                fix="ask for fewer heads",
            )
        return int(k)

    def _set(self, heads: list[Head], which: str) -> HeadSet:
        n_layers, n_heads = self.values.shape
        return HeadSet(tuple(heads), n_layers, n_heads, {**self.provenance, "chosen": which, "k": len(heads)})

    def top(self, *, k: int | None = None, fraction: float | int | None = None) -> HeadSet:
        """The best heads: k of them, or ceil(fraction * all)."""
        n = self._count(k, fraction)
        return self._set(self._ranked(best=True)[:n], "top")

    def bottom(self, *, k: int | None = None, fraction: float | int | None = None) -> HeadSet:
        """The worst heads that have a score."""
        n = self._count(k, fraction)
        return self._set(self._ranked(best=False)[:n], "bottom")

    def to_pandas(self) -> pd.DataFrame:
        """One row a head: layer, head, score, low, high, rank (1 is best; NaN last)."""
        import pandas as pd

        low, high = self.interval
        layers, heads = np.indices(self.values.shape)
        table = pd.DataFrame(
            {
                "layer": layers.ravel(),
                "head": heads.ravel(),
                "score": self.values.ravel(),
                "low": low.ravel(),
                "high": high.ravel(),
            }
        )
        rank = {head: i + 1 for i, head in enumerate(self._ranked(best=True))}
        table["rank"] = [rank.get((a, b), np.nan) for a, b in zip(table["layer"], table["head"])]
        return table

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeadScores):
            return NotImplemented
        return (
            np.array_equal(self.samples, other.samples, equal_nan=True)
            and dict(self.provenance) == dict(other.provenance)
            and (self.tower, self.unit, dict(self.reasons)) == (other.tower, other.unit, dict(other.reasons))
        )

    __hash__ = None  # type: ignore[assignment]

    def save(self, folder: str | Path) -> Path:
        """Write scores.safetensors and scores.json into a folder; no time, host or path goes into either."""
        from safetensors.numpy import save

        folder = Path(folder)
        low, high = self.interval
        arrays = {"samples": self.samples, "values": self.values, "low": low, "high": high}
        body = {
            "tower": self.tower,
            "unit": self.unit,
            "n": len(self.samples),
            "n_valid": self.n_valid,
            "reasons": dict(self.reasons),
            "provenance": dict(self.provenance),
        }
        write_whole(
            folder / "scores.safetensors", save({k: np.ascontiguousarray(v, np.float32) for k, v in arrays.items()})
        )
        write_whole(folder / "scores.json", json.dumps(body, indent=1, sort_keys=True).encode())
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> HeadScores:
        """Read what `save` wrote."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        folder = Path(folder)
        body = _read_json(folder / "scores.json")
        try:
            samples = load_file(folder / "scores.safetensors")["samples"]
            return cls(samples, body["provenance"], body["tower"], body["unit"], body["reasons"])
        except (OSError, KeyError, SafetensorError) as error:
            raise RunFolderError(
                f"{folder} holds no whole scores: {error}",
                expected="scores.json and scores.safetensors, as HeadScores.save writes them",
                fix="run the scan again with the same out=",
            ) from None

    def plot(self) -> Figure:
        """The layer x head map; `.save("heads.html")` writes one self-contained file."""
        from mmlens.viz.figures import head_map

        return head_map(self)


def _nanmean(samples: Float[ndarray, "sample layer head"]) -> Float[ndarray, "layer head"]:
    counts = (~np.isnan(samples)).sum(0)
    with np.errstate(invalid="ignore"):
        return (np.nansum(samples, 0, dtype=np.float64) / np.where(counts, counts, np.nan)).astype(np.float32)


def write_whole(path: Path, body: bytes) -> None:
    """The whole file or none of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_bytes(body)
        os.replace(part, path)
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be written: {error}",
            expected="a folder on a disk with room, that may be written to",
            fix="make room or give another out=; what was written is whole, and the same call goes on from it",
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{path} cannot be read: {error}", expected="a file that mmlens wrote", fix="check the path"
        ) from None
