"""HeadScores and HeadSet: ranking, controls, set algebra, files."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmlens import HeadScores, HeadSet
from mmlens.errors import HeadError, RunFolderError


def _scores(samples, **provenance):
    return HeadScores(np.asarray(samples, np.float32), {"seed": 0, **provenance})


def _random(n=12, layers=4, heads=6, seed=0):
    return _scores(np.random.default_rng(seed).random((n, layers, heads)))


def test_values_are_the_macro_mean_and_nan_samples_are_counted_out():
    samples = np.stack([np.full((2, 2), 0.25), np.full((2, 2), 0.75), np.full((2, 2), np.nan)])
    scores = _scores(samples)
    assert scores.values.tolist() == [[0.5, 0.5], [0.5, 0.5]] and scores.n_valid == 2


def test_no_valid_sample_gives_nan_everywhere():
    scores = _scores(np.full((3, 2, 2), np.nan))
    assert np.isnan(scores.values).all() and np.isnan(scores.interval[0]).all() and scores.n_valid == 0
    with pytest.raises(HeadError, match="0 have a score"):
        scores.top(k=1)


def test_ranking_breaks_ties_by_layer_and_head_and_puts_nan_last():
    scores = _scores([[[0.5, 0.9], [0.5, np.nan]]])
    assert scores.top(k=3).heads == ((0, 1), (0, 0), (1, 0))
    assert scores.bottom(k=3).heads == ((0, 0), (1, 0), (0, 1))
    with pytest.raises(HeadError):
        scores.top(k=4)


@pytest.mark.parametrize(("share", "k"), [(0.05, 5), (0.07, 7), (0.55, 53), (1.0, 96), (0.001, 1)])
def test_fraction_rounds_up_without_floating_point_surprises(share, k):
    """ceil(p * N - 1e-9) of 96 heads."""
    assert len(_random(2, 8, 12).top(fraction=share)) == k


def test_fraction_of_a_hundred_heads_is_exact():
    """Plain ceil would give 8 and 56."""
    scores = _random(2, 10, 10)
    assert len(scores.top(fraction=0.07)) == 7 and len(scores.top(fraction=0.55)) == 55


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(k=1, fraction=0.1),
        dict(k=-1),
        dict(k=25),
        dict(fraction=0),
        dict(fraction=1.1),
        dict(fraction="a"),
        dict(k=2.5),
    ],
)
def test_contradictory_or_impossible_counts_raise(options, as_users):
    with pytest.raises(HeadError):
        _random().top(**options)


@given(st.integers(0, 24), st.integers(0, 24))
def test_top_is_nested_in_k(a, b):
    scores = _random()
    small, large = sorted((a, b))
    assert set(scores.top(k=small)) <= set(scores.top(k=large))
    assert set(scores.top(k=24)) == set(scores.bottom(k=24))


@given(st.integers(1, 12))
def test_ranking_is_invariant_under_increasing_maps(k):
    scores = _random(n=1)
    mapped = _scores(np.exp(3 * scores.samples))
    assert scores.top(k=k).heads == mapped.top(k=k).heads


def test_intervals_hold_the_mean_shrink_with_n_and_repeat():
    few, many = _random(n=5), _random(n=500)
    for scores in (few, many):
        low, high = scores.interval
        assert (low <= scores.values + 1e-6).all() and (scores.values <= high + 1e-6).all()
        assert np.array_equal(low, scores.interval[0])
    assert (many.interval[1] - many.interval[0]).mean() < 0.3 * (few.interval[1] - few.interval[0]).mean()


def test_interval_of_a_known_sample_is_the_normal_one():
    """500 uniform samples: sd 1/sqrt(12), half width 1.96 sd / sqrt(n)."""
    low, high = _random(n=500).interval
    assert np.allclose((high - low).mean() / 2, 1.96 / np.sqrt(12 * 500), rtol=0.1)


def test_scores_come_back_from_disk_equal(tmp_path):
    scores = HeadScores(_random().samples, {"seed": 3, "metric": "ram"}, reasons={"4": "crop"})
    again = HeadScores.load(scores.save(tmp_path / "run"))
    assert again == scores and again != _random()
    assert set(json.loads((tmp_path / "run/scores.json").read_text())) == {
        "tower",
        "unit",
        "n",
        "n_valid",
        "reasons",
        "provenance",
    }


def test_broken_files_are_named(tmp_path):
    with pytest.raises(RunFolderError, match="cannot be read"):
        HeadScores.load(tmp_path)
    _random().save(tmp_path)
    (tmp_path / "scores.safetensors").write_bytes(b"half")
    with pytest.raises(RunFolderError, match="whole"):
        HeadScores.load(tmp_path)
    (tmp_path / "set.json").write_text("{}")
    with pytest.raises(RunFolderError):
        HeadSet.load(tmp_path / "set.json")


def test_pandas_has_one_row_a_head():
    table = _random().to_pandas()
    assert len(table) == 24 and sorted(table["rank"]) == list(range(1, 25))
    best = table.sort_values("rank").iloc[0]
    assert (best["layer"], best["head"]) == _random().top(k=1).heads[0] and best["low"] <= best["score"] <= best["high"]


# ------------------------------------------------------------------ sets
def _set(*heads, n_layers=4, n_heads=6):
    return HeadSet.of(heads, n_layers=n_layers, n_heads=n_heads)


def test_set_algebra():
    a, b = _set((0, 0), (1, 1)), _set((1, 1), (2, 2))
    assert (a | b) == _set((0, 0), (1, 1), (2, 2)) and (a & b) == _set((1, 1)) and (a - b) == _set((0, 0))
    assert len(a.complement()) == 22 and not set(a) & set(a.complement())
    assert _set((1, 1), (0, 0)) == a and hash(_set((1, 1), (0, 0))) == hash(a)
    with pytest.raises(HeadError, match="models"):
        a | _set((0, 0), n_heads=7)


def test_sets_come_back_from_disk(tmp_path):
    a = HeadSet.of([(3, 2), (0, 1)], n_layers=4, n_heads=6, metric="ram")
    again = HeadSet.load(a.save(tmp_path / "core.json"))
    assert again == a and again.heads == a.heads and again.provenance == {"metric": "ram"}


@pytest.mark.parametrize("heads", [[(4, 0)], [(0, 6)], [(-1, 0)], [(0, 0), (0, 0)], [("a", 0)], [3], None])
def test_sets_of_heads_that_are_not_there(heads, as_users):
    with pytest.raises(HeadError):
        HeadSet.of(heads, n_layers=4, n_heads=6)


@given(st.integers(0, 50))
def test_controls_are_disjoint_equal_in_size_and_seeded(seed):
    a = _set((0, 0), (0, 1), (2, 5))
    for control in (a.random, a.layer_matched):
        drawn = control(seed=seed)
        assert len(drawn) == 3 and not set(drawn) & set(a) and drawn.heads == control(seed=seed).heads
    matched = a.layer_matched(seed=seed)
    assert {k: len(v) for k, v in matched.by_layer().items()} == {0: 2, 2: 1} and matched.provenance["borrowed"] == {}


def test_controls_change_with_the_seed():
    a = _set((0, 0), (0, 1), (2, 5))
    assert len({a.random(seed=s).heads for s in range(8)}) > 4
    assert len({a.layer_matched(seed=s).heads for s in range(8)}) > 4


def test_full_layers_borrow_from_the_nearest_and_report_it():
    a = _set(*[(1, h) for h in range(5)])
    drawn = a.layer_matched(seed=0)
    assert len(drawn) == 5 and (1, 5) in drawn and drawn.provenance["borrowed"] == {"1": 4}
    assert set(drawn.by_layer()) <= {0, 1, 2} and 0 in drawn.by_layer()


def test_no_control_of_more_than_half():
    a = _set(*[(x, y) for x in range(4) for y in range(4)])
    for control in (a.random, a.layer_matched):
        with pytest.raises(HeadError, match="half"):
            control(seed=0)
