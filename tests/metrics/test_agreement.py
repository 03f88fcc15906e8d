"""Agreement of rankings: worked values, and what must hold whatever the scores."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mmlens.errors import MetricError
from mmlens.metrics import (
    concentration_share,
    jaccard,
    layer_spread,
    spearman,
    top_k,
    topk_overlap,
    universal_heads,
)

vectors = st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.7, 1.0, 2.0]), min_size=3, max_size=30)
pairs = st.integers(3, 30).flatmap(
    lambda n: st.tuples(*[st.lists(st.floats(0, 1, width=16), min_size=n, max_size=n)] * 2)
)


def test_worked_values():
    """[.9, .5, .1, 0] against [.8, .6, .05, .1]: .8; sets {0, 1, 2} and {0, 1, 3}: overlap 2/3, Jaccard .5."""
    assert spearman([0.9, 0.5, 0.1, 0], [0.8, 0.6, 0.05, 0.1]) == pytest.approx(0.8)
    a, b = [4, 3, 2, 1], [4, 3, 1, 2]
    assert topk_overlap(a, b, 3) == pytest.approx(2 / 3) and jaccard(a, b, 3) == pytest.approx(0.5)
    assert concentration_share([4, 3, 2, 1]) == 0.5
    assert concentration_share([4, 3, 2, 1], mass=0.4) == 0.25 and concentration_share([1, -5, np.nan]) == 0.5
    assert math.isnan(concentration_share([0, -1]))


@pytest.mark.parametrize("k,chance", [(58, 0.0074), (100, 0.065), (200, 1.05)])
def test_chance_of_universal_heads(k, chance):
    """N = 1152 heads, four data sets."""
    found = universal_heads([np.arange(1152.0)] * 4)
    assert found.chance[k] == pytest.approx(chance, abs=0.005) and found.sizes[k] == k


def test_chance_is_what_independent_rankings_give():
    rng = np.random.default_rng(0)
    sizes = np.mean([universal_heads([rng.random(40) for _ in range(3)]).sizes for _ in range(300)], 0)
    expected = universal_heads([np.zeros(40)] * 3).chance
    assert np.abs(sizes - expected).max() < 0.6


@given(pairs)
def test_spearman_is_scipys_and_blind_to_increasing_maps(pair):
    a, b = map(np.array, pair)
    mine = spearman(a, b)
    if len(set(a)) < 2 or len(set(b)) < 2:
        assert math.isnan(mine)
        return
    assert mine == pytest.approx(float(stats.spearmanr(a, b).statistic), abs=1e-9)
    assert mine == pytest.approx(spearman(np.exp(3 * a), b), abs=1e-9) and spearman(b, a) == pytest.approx(mine)


@given(pairs)
def test_heads_without_a_score_are_left_out(pair):
    a, b = map(np.array, pair)
    more = lambda x, y: (np.append(x, np.nan), np.append(y, 0.3))
    assert spearman(*more(a, b)) == pytest.approx(spearman(a, b), nan_ok=True)
    assert len(a) not in top_k(np.append(a, np.nan), len(a))


@given(vectors)
def test_top_k_is_nested_and_ties_go_by_index(values):
    order = top_k(values, len(values)).tolist()
    assert order == sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert all(top_k(values, k).tolist() == order[:k] for k in range(len(values) + 1))


@given(pairs, st.data())
def test_overlap_and_jaccard_are_symmetric_and_tied_to_each_other(pair, data):
    a, b = map(np.array, pair)
    k = data.draw(st.integers(1, len(a)))
    o, j = topk_overlap(a, b, k), jaccard(a, b, k)
    assert j == pytest.approx(o / (2 - o)) and (o, j) == (topk_overlap(b, a, k), jaccard(b, a, k))
    assert topk_overlap(a, a, k) == jaccard(a, a, k) == 1 and 0 <= o <= 1
    assert topk_overlap(a, b, len(a)) == 1


@given(pairs)
def test_universal_sets_grow_and_end_at_all(pair):
    a, b = map(np.array, pair)
    found, other = universal_heads([a, b]), universal_heads([b, a])
    assert (np.diff(found.sizes) >= 0).all() and found.sizes[0] == 0 and found.sizes[-1] == len(a)
    assert (found.sizes == other.sizes).all() and (found.first == other.first).all()
    for k in range(len(a) + 1):
        both = set(top_k(a, k).tolist()) & set(top_k(b, k).tolist())
        assert set(found.heads(k)) == both and len(both) == found.sizes[k]


@given(vectors)
def test_concentration_is_a_least_share(values):
    share = concentration_share(values)
    total = sum(values)
    if not total:
        assert math.isnan(share)
        return
    best = sorted(values, reverse=True)
    n = round(share * len(values))
    assert sum(best[:n]) >= total / 2 - 1e-9 and sum(best[: n - 1]) < total / 2 + 1e-9


def test_where_the_best_heads_lie():
    even = layer_spread(np.ones((4, 5)), 20)
    assert (
        even.depth == pytest.approx(0.5)
        and even.entropy == pytest.approx(math.log(4))
        and even.gini == pytest.approx(0)
    )
    one = np.zeros((4, 5))
    one[3, 2] = 1
    found = layer_spread(one, 1)
    assert (found.depth, found.entropy) == (1.0, 0.0) and found.gini == pytest.approx(1 - 1 / 20)
    assert layer_spread(np.zeros((4, 5)), 3).depth == 0 and math.isnan(layer_spread(np.zeros((4, 5)), 3).gini)


@pytest.mark.parametrize(
    "call",
    [
        lambda: spearman([1, 2], [1, 2, 3]),
        lambda: top_k([1.0, np.nan], 2),
        lambda: top_k([1.0], -1),
        lambda: topk_overlap([[1.0, 2.0]], [1.0, 2.0], 1),
        lambda: concentration_share([1.0], mass=0.0),
        lambda: universal_heads([]),
        lambda: universal_heads([np.ones(3), np.ones(4)]),
        lambda: layer_spread(np.ones(3), 1),
    ],
)
def test_scores_of_different_heads_are_not_compared(as_users, call):
    with pytest.raises(MetricError):
        call()
