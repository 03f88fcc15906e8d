"""Intervals that cover, reliabilities that tell noise from signal, and error rates that are what they say."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmlens.errors import MetricError
from mmlens.metrics import against, benjamini_hochberg, bootstrap, paired, permutation_p, split_half


def test_bootstrap_intervals_cover_the_mean_as_often_as_they_say():
    rng = np.random.default_rng(0)
    data = rng.exponential(1.0, (60, 300))
    for level in (0.8, 0.95):
        low, high = bootstrap(data, level=level)
        assert ((low <= 1) & (high >= 1)).mean() == pytest.approx(level, abs=0.07)
    assert (bootstrap(data, level=0.8)[0] >= bootstrap(data, level=0.95)[0]).all()


def test_bootstrap_is_seeded_and_leaves_out_what_is_unknown():
    data = np.random.default_rng(1).random((20, 2, 3))
    assert np.array_equal(bootstrap(data, seed=3), bootstrap(data, seed=3))
    assert not np.array_equal(bootstrap(data, seed=3), bootstrap(data, seed=4))
    assert not np.array_equal(bootstrap(data), bootstrap(data, n_resamples=50))
    holes = np.concatenate([data, np.full((1, 2, 3), np.nan)])
    assert np.array_equal(bootstrap(holes), bootstrap(data))
    assert np.isnan(bootstrap(np.full((3, 2), np.nan))).all()


def test_split_halves_tell_signal_from_noise():
    rng = np.random.default_rng(2)
    heads = rng.random((8, 12))
    signal = split_half(heads + 0.01 * rng.standard_normal((40, 8, 12)), 10)
    noise = split_half(rng.standard_normal((40, 8, 12)), 10)
    assert signal.spearman > 0.98 and signal.overlap > 0.9 and signal.full >= signal.spearman
    assert abs(noise.spearman) < 0.2 and noise.overlap < 0.35
    mixed = split_half(heads + rng.standard_normal((40, 8, 12)), 10)
    assert noise.spearman < mixed.spearman < signal.spearman
    assert mixed.full == pytest.approx(2 * mixed.spearman / (1 + mixed.spearman))
    data = rng.random((10, 6))
    assert split_half(data, 2, seed=1) == split_half(data, 2, seed=1) != split_half(data, 2, seed=2)
    assert split_half(data, 2, n_splits=3) != split_half(data, 2)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_adjusted_p_values_are_the_definition(values):
    p = np.array(values)
    order = np.argsort(p, kind="stable")
    m = len(p)
    raw = [p[order[i]] * m / (i + 1) for i in range(m)]
    expected = np.empty(m)
    expected[order] = [min(1.0, min(raw[i:])) for i in range(m)]
    assert benjamini_hochberg(p) == pytest.approx(expected, abs=1e-12)
    with_hole = benjamini_hochberg(np.append(p, np.nan))
    assert np.isnan(with_hole[-1]) and with_hole[:-1] == pytest.approx(expected, abs=1e-12)


def test_false_discoveries_stay_rare():
    rng = np.random.default_rng(3)
    wrong = []
    for _ in range(20):
        data = rng.standard_normal((30, 96))
        data[:, :10] += 1.5
        found = benjamini_hochberg(against(data, 0.0)) < 0.1
        assert found[:10].all()
        wrong.append(found[10:].sum() / max(found.sum(), 1))
    assert np.mean(wrong) < 0.13


def test_paired_runs_and_chance():
    rng = np.random.default_rng(4)
    a = rng.random((40, 2, 3))
    b = a + 0.01 * rng.standard_normal(a.shape)
    b[:, 1, 2] += 0.1
    p = paired(a, b)
    assert p.shape == (2, 3) and p[1, 2] < 1e-6 and np.delete(p.ravel(), 5).min() > 1e-3
    assert np.isnan(paired(a, a)).all()  # no difference at all: undecidable
    assert np.isnan(against(a[:4], 0.0)).all()  # too few
    assert (against(a, 0.5) > 1e-4).all() and (against(a, 0.0) < 1e-6).all()


def test_permutation_p_values_are_uniform_under_the_null():
    rng = np.random.default_rng(5)
    found = [permutation_p(rng.standard_normal(), lambda g: g.standard_normal(), n=99, seed=i) for i in range(200)]
    assert np.mean(np.array(found) <= 0.2) == pytest.approx(0.2, abs=0.08)
    assert permutation_p(9.0, lambda g: g.standard_normal(), n=9) == 0.1
    assert permutation_p(-9.0, lambda g: g.standard_normal(), n=9) == 1.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: bootstrap(np.ones(3), level=1.5),
        lambda: bootstrap(np.ones(3), n_resamples=0),
        lambda: bootstrap(np.ones((0, 2))),
        lambda: split_half(np.ones((3, 4)), 2),
        lambda: benjamini_hochberg([0.5, 1.5]),
        lambda: paired(np.ones((3, 2)), np.ones((4, 2))),
        lambda: permutation_p(1.0, lambda g: 0.0, n=0),
    ],
)
def test_what_means_nothing_is_refused(as_users, call):
    with pytest.raises(MetricError):
        call()


def test_constant_scores_have_no_reliability():
    found = split_half(np.ones((6, 4)), 2)
    assert math.isnan(found.spearman) and found.overlap == 1.0
