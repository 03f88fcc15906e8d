"""How far rankings of heads agree: between tasks, models, halves of a task; and how concentrated scores are.

Scores are (layer, head) or any one shape; NaN marks heads without a score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

import numpy as np
from numpy import ndarray

from mmlens.errors import MetricError

Scores = Union[ndarray, Sequence]


def top_k(scores: Scores, k: int) -> ndarray:
    """Flat indexes of the best `k`, best first; ties by index, NaN last (and never among them).

    Examples
    --------
    >>> import numpy as np
    >>> from mmlens.metrics import top_k
    >>> top_k(np.array([[0.1, 0.9], [0.9, np.nan]]), 2).tolist()
    [1, 2]
    """
    flat = np.asarray(scores, float).ravel()
    known = int((~np.isnan(flat)).sum())
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or not 0 <= k <= known:
        raise MetricError(f"k={k!r} of {known} scores", expected=f"an int from 0 to {known}", fix="ask for fewer")
    return np.argsort(np.where(np.isnan(flat), np.inf, -flat), kind="stable")[:k]


def _pair(a: Scores, b: Scores) -> tuple[ndarray, ndarray]:
    a, b = np.asarray(a, float), np.asarray(b, float)
    if a.shape != b.shape:
        raise MetricError(
            f"scores of shapes {a.shape} and {b.shape}",
            expected="scores of the same heads",
            fix="compare runs of one model, or of models with one number of layers and heads",
        )
    return a.ravel(), b.ravel()


def spearman(a: Scores, b: Scores) -> float:
    """Rank correlation over all heads: Pearson's of the mid-ranks.

    Heads without a score in either are left out; NaN where fewer than two are left, or one vector is constant. Ruled by
    the many heads near zero, so read `topk_overlap` beside it.

    Examples
    --------
    >>> from mmlens.metrics import spearman
    >>> round(spearman([0.9, 0.5, 0.1, 0], [0.8, 0.6, 0.05, 0.1]), 6)
    0.8
    """
    from scipy.stats import rankdata

    a, b = _pair(a, b)
    both = ~(np.isnan(a) | np.isnan(b))
    if both.sum() < 2:
        return math.nan
    x, y = rankdata(a[both]), rankdata(b[both])
    x, y = x - x.mean(), y - y.mean()
    norm = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / norm if norm > 0 else math.nan


def topk_overlap(a: Scores, b: Scores, k: int) -> float:
    """Share of the best `k` that two rankings have in common: |A and B| / k.

    Examples
    --------
    >>> from mmlens.metrics import topk_overlap
    >>> round(topk_overlap([4, 3, 2, 1], [4, 3, 1, 2], 3), 6)
    0.666667
    """
    a, b = _pair(a, b)
    if k == 0:
        return math.nan
    return len(set(top_k(a, k).tolist()) & set(top_k(b, k).tolist())) / k


def jaccard(a: Scores, b: Scores, k: int) -> float:
    """Of the best `k` of two rankings: |A and B| / |A or B|. With overlap o it is o / (2 - o).

    Examples
    --------
    >>> from mmlens.metrics import jaccard
    >>> round(jaccard([4, 3, 2, 1], [4, 3, 1, 2], 3), 6)
    0.5
    """
    a, b = _pair(a, b)
    if k == 0:
        return math.nan
    one, other = (set(top_k(s, k).tolist()) for s in (a, b))
    return len(one & other) / len(one | other)


@dataclass(frozen=True)
class Universal:
    """Heads among the best of every task, for every k.

    Attributes
    ----------
    sizes
        |U_k| for k = 0, 1, ..., N.
    chance
        Expected |U_k| of independent rankings, N (k / N)^D.
    first
        For every head (flat), the least k at which it belongs to U_k: its worst rank, from 1; 0 for heads without one.
    """

    sizes: ndarray
    chance: ndarray
    first: ndarray

    def heads(self, k: int) -> list[int]:
        """Flat indexes of U_k, the most universal first."""
        order = np.argsort(np.where(self.first > 0, self.first, np.iinfo(int).max), kind="stable")
        return [int(i) for i in order if 0 < self.first[i] <= k]


def universal_heads(scores: Sequence[Scores]) -> Universal:
    """U_k, the heads among the best k of all tasks, as a whole curve in k with its chance level.

    Source: our reading of CoRe's "universal heads" (arXiv 2606.05843), whose k is not stated; hence the curve.

    Parameters
    ----------
    scores
        One array for each task, all of one shape.


    Examples
    --------
    >>> import numpy as np
    >>> from mmlens.metrics import universal_heads
    >>> found = universal_heads([np.array([3.0, 2, 1]), np.array([3.0, 1, 2])])
    >>> found.sizes.tolist(), found.heads(1)
    ([0, 1, 1, 3], [0])
    """
    if not len(scores):
        raise MetricError("no scores", expected="at least one task's", fix="universal_heads([a, b])")
    flat = [_pair(s, scores[0])[0] for s in scores]
    n = len(flat[0])
    worst = np.zeros(n, int)
    ranked = np.ones(n, bool)
    for one in flat:
        known = int((~np.isnan(one)).sum())
        rank = np.zeros(n, int)
        rank[top_k(one, known)] = np.arange(1, known + 1)
        ranked &= rank > 0
        worst = np.maximum(worst, rank)
    first = np.where(ranked, worst, 0)
    sizes = np.array([int(((first > 0) & (first <= k)).sum()) for k in range(n + 1)])
    return Universal(sizes, n * (np.arange(n + 1) / max(n, 1)) ** len(flat), first)


def concentration_share(scores: Scores, *, mass: float = 0.5) -> float:
    """The least share of heads that holds a given part of the sum of positive scores.

    Examples
    --------
    >>> from mmlens.metrics import concentration_share
    >>> concentration_share([4, 3, 2, 1])
    0.5

    Source: MMRetHeads, arXiv 2605.27243.
    """
    if isinstance(mass, bool) or not 0 < mass <= 1:
        raise MetricError(f"mass={mass!r}", expected="a fraction above 0, to 1", fix="mass=0.5")
    flat = np.asarray(scores, float).ravel()
    flat = flat[~np.isnan(flat)]
    positive = np.sort(np.maximum(flat, 0))[::-1]
    total = positive.sum()
    if not total > 0:
        return math.nan
    return (int(np.searchsorted(np.cumsum(positive), mass * total * (1 - 1e-12))) + 1) / len(flat)


@dataclass(frozen=True)
class Spread:
    """Where in the layers the best heads lie.

    Attributes
    ----------
    depth
        Mean relative depth (0 first layer, 1 last) of the best k.
    entropy
        Entropy (nats) of their counts over layers: 0 for one layer, log L for an even spread.
    gini
        Gini coefficient of all positive scores: 0 even, towards 1 a few heads have all.
    """

    depth: float
    entropy: float
    gini: float


def layer_spread(scores: Scores, k: int) -> Spread:
    """Depth and spread of the best `k` heads of (layer, head) scores.

    Examples
    --------
    >>> import numpy as np
    >>> from mmlens.metrics import layer_spread
    >>> found = layer_spread(np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]]), 2)
    >>> found.depth, found.entropy
    (1.0, 0.0)
    """
    grid = np.asarray(scores, float)
    if grid.ndim != 2:
        raise MetricError(f"scores of shape {grid.shape}", expected="(layer, head)", fix="HeadScores.values")
    layers = top_k(grid, k) // grid.shape[1]
    counts = np.bincount(layers, minlength=grid.shape[0])
    p = counts[counts > 0] / max(k, 1)
    positive = np.sort(np.maximum(grid[~np.isnan(grid)], 0))
    n, total = len(positive), positive.sum()
    gini = float((2 * np.arange(1, n + 1) - n - 1) @ positive / (n * total)) if total > 0 else math.nan
    depth = float(layers.mean() / max(grid.shape[0] - 1, 1)) if k else math.nan
    return Spread(depth, float(abs((p * np.log(p)).sum())), gini)
