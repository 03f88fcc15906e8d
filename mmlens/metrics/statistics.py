"""How sure a score is: intervals over examples, reliability of a ranking, tests with many heads at once.

`samples` has examples first; NaN examples are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from mmlens.errors import MetricError
from mmlens.metrics.agreement import Scores, spearman, topk_overlap


def _valid(samples: ndarray) -> ndarray:
    samples = np.asarray(samples, float)
    if samples.ndim < 1 or not len(samples):
        raise MetricError(f"samples of shape {samples.shape}", expected="(example, ...)", fix="HeadScores.samples")
    return samples[~np.isnan(samples).reshape(len(samples), -1).any(1)]


def mean_interval(
    valid: ndarray, *, seed: int | list[int], n_resamples: int = 1000, percent: tuple[float, float] = (2.5, 97.5)
) -> tuple[ndarray, ndarray]:
    """Percentiles of the mean over resampled examples; NaN without any example."""
    n = len(valid)
    if not n:
        blank = np.full(valid.shape[1:], np.nan)
        return blank, blank
    weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), n_resamples) / n
    low, high = np.percentile(np.tensordot(weights, valid.astype(np.float64), 1), percent, axis=0)
    return np.asarray(low), np.asarray(high)


def bootstrap(
    samples: ndarray, *, level: float = 0.95, n_resamples: int = 1000, seed: int = 0
) -> tuple[ndarray, ndarray]:
    """Interval of the mean over examples, by percentiles of resampled means.

    Examples
    --------
    >>> import numpy as np
    >>> from mmlens.metrics import bootstrap
    >>> low, high = bootstrap(np.array([0.0, 1.0] * 50))
    >>> bool(low < 0.5 < high)
    True
    """
    if not 0 < level < 1 or n_resamples < 1:
        raise MetricError(f"level={level}, n_resamples={n_resamples}", expected="0 < level < 1, 1 or more", fix="0.95")
    percent = 50 * (1 - level), 50 * (1 + level)
    return mean_interval(_valid(samples), seed=seed, n_resamples=n_resamples, percent=percent)


@dataclass(frozen=True)
class Reliability:
    """Agreement of rankings made from two halves of the examples.

    Attributes
    ----------
    spearman, overlap
        Mean over random halves, and as a full-length test would have it (Spearman-Brown) for the former.
    full
        Spearman-Brown of `spearman`: what twice as many examples give.
    """

    spearman: float
    overlap: float
    full: float


def split_half(samples: ndarray, k: int, *, n_splits: int = 50, seed: int = 0) -> Reliability:
    """How well two halves of the examples agree on the ranking, and on its best `k`.

    Examples
    --------
    >>> import numpy as np
    >>> from mmlens.metrics import split_half
    >>> steady = np.arange(6.0) + 0.01 * np.random.default_rng(0).standard_normal((20, 6))
    >>> split_half(steady, 2).overlap
    1.0
    """
    valid = _valid(samples)
    if len(valid) < 4:
        raise MetricError(f"{len(valid)} valid examples", expected="at least 4", fix="scan more examples")
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n_splits):
        order = rng.permutation(len(valid))
        a, b = (valid[order[i::2]].mean(0) for i in (0, 1))
        found.append((spearman(a, b), topk_overlap(a, b, k)))
    rho, overlap = (_mean([f[i] for f in found]) for i in (0, 1))
    return Reliability(rho, overlap, 2 * rho / (1 + rho) if rho > -1 else math.nan)


def _mean(values: list[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


def benjamini_hochberg(p: Scores) -> ndarray:
    """Adjusted p-values that control the false discovery rate over many heads; NaN stays NaN.

    q_(i) = min over j >= i of p_(j) * m / j

    Examples
    --------
    >>> from mmlens.metrics import benjamini_hochberg
    >>> benjamini_hochberg([0.01, 0.02, 0.03, 0.5]).round(3).tolist()
    [0.04, 0.04, 0.04, 0.5]
    """
    from scipy.stats import false_discovery_control

    p = np.asarray(p, float)
    known = ~np.isnan(p)
    if ((p[known] < 0) | (p[known] > 1)).any():
        raise MetricError("p-values outside 0..1", expected="p-values", fix="check what was passed")
    out = np.full(p.shape, np.nan)
    if known.any():
        out[known] = false_discovery_control(p[known], method="bh")
    return out


def against(samples: ndarray, chance: float) -> ndarray:
    """Two-sided Wilcoxon signed-rank p-value, for every head, of examples that lie about `chance`; NaN if undecidable.

    Examples
    --------
    >>> import numpy as np
    >>> from mmlens.metrics import against
    >>> p = against(np.stack([np.linspace(-1, 1, 21), np.linspace(2, 3, 21)], 1), 0.0)
    >>> bool(p[0] > 0.5), bool(p[1] < 1e-4)
    (True, True)
    """
    return _each(_valid(samples) - chance)


def paired(a: ndarray, b: ndarray) -> ndarray:
    """Two-sided Wilcoxon signed-rank p-value, for every head, of two runs over the same examples (paired by order)."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    if a.shape != b.shape:
        raise MetricError(
            f"samples of shapes {a.shape} and {b.shape}",
            expected="the same examples and heads in both",
            fix="scan both with the same task, n, seed and split",
        )
    return _each(_valid(a - b))


def _each(differences: ndarray) -> ndarray:
    from scipy.stats import wilcoxon

    flat = differences.reshape(len(differences), -1)
    out = np.full(flat.shape[1], np.nan)
    for i, column in enumerate(flat.T):
        if len(column) >= 5 and np.any(column):
            out[i] = wilcoxon(column).pvalue
    return out.reshape(differences.shape[1:])


def permutation_p(
    observed: float, draw: Callable[[np.random.Generator], float], *, n: int = 999, seed: int = 0
) -> float:
    """One-sided p-value of a score against scores under shuffled evidence: (1 + how many reach it) / (1 + n).

    Parameters
    ----------
    draw
        The score under one shuffle, given a random generator.

    Examples
    --------
    >>> from mmlens.metrics import permutation_p
    >>> permutation_p(5.0, lambda rng: rng.standard_normal(), n=99)
    0.01
    """
    if n < 1:
        raise MetricError(f"n={n}", expected="1 or more", fix="n=999")
    rng = np.random.default_rng(seed)
    return (1 + sum(draw(rng) >= observed for _ in range(n))) / (1 + n)
