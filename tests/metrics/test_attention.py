"""Scores of attention patterns: worked values by hand, and what must hold whatever the pattern."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmlens.errors import MetricError
from mmlens.metrics import (
    attention_sum,
    box_iou,
    calibrated,
    concentration,
    contrast,
    copy_hits,
    density_lift,
    image_centric,
    induction,
    lift,
    localisation_ap,
    ocr_hits,
    pointing,
    previous_token,
    ram,
    sink_free,
    sink_share,
    sink_tokens,
    spatial_entropy,
    value_weighted,
    visual_share,
)

ROW = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])


def approx(value):
    return pytest.approx(value, abs=1e-5, nan_ok=True)


def test_worked_values():
    """Row [.1, .2, .3, .4], evidence {1}, picture {1, 2}: raw .2, share .4, density lift .8."""
    assert float(ram(ROW, None, [1])) == approx(0.2)
    assert float(visual_share(ROW, None, [1], [1, 2])) == approx(0.4)
    assert float(density_lift(ROW, None, [1], [1, 2])) == approx(0.8)
    assert float(attention_sum(ROW, None, [1, 2])) == approx(0.5)
    assert float(sink_share(ROW, None, [1, 2], [2])) == approx(0.6)
    assert float(sink_free(ROW, None, [1, 3], [1, 2, 3], [3])) == approx(0.2 / 0.5)
    assert float(calibrated(torch.tensor([0.2]), torch.tensor([0.3]))) == approx(-0.1)
    assert float(contrast(torch.tensor([0.3, 0.1, 0.2]))) == approx(math.log(0.5))
    norms = torch.tensor([[1.0, 4.0, 1.0, 0.0]])
    assert float(value_weighted(ROW, None, [1], norms)) == approx(0.8 / 1.2)
    assert float(value_weighted(ROW, None, [1], norms, [1, 2])) == approx(0.8 / 1.1)
    assert float(value_weighted(ROW, None, [3], norms)) == approx(0.0)


def test_uniform_causal_attention_is_chance():
    """T = 6, evidence {1, 2}, queries {4, 5}: RAM (2/5 + 2/6) / 2, lift 1, density lift 1 within any picture."""
    uniform = (torch.tril(torch.ones(6, 6)) / torch.arange(1, 7)[:, None])[None]
    assert float(ram(uniform, [4, 5], [1, 2])) == approx(0.366667)
    assert float(lift(uniform, [4, 5], [1, 2])) == approx(1)
    assert float(density_lift(uniform, [4, 5], [1, 2], [0, 1, 2, 3])) == approx(1)


def test_maps():
    assert float(concentration(torch.tensor([0.0, 0.0]))) == approx(math.nan)
    assert float(concentration(torch.tensor([1.0]))) == approx(math.nan)
    assert float(concentration(torch.tensor([3.0, 1.0]))) == approx(1 - 0.562335 / math.log(2))
    blob = np.zeros((6, 6))
    blob[1:3, 1:3] = 1
    two = blob.copy()
    two[4:6, 4:6] = 1
    diagonal = np.eye(6)
    assert spatial_entropy(blob) == approx(0) and spatial_entropy(two) == approx(math.log(2))
    assert spatial_entropy(diagonal) == approx(0)  # parts are joined over corners
    assert spatial_entropy(np.ones((4, 4))) == math.inf == spatial_entropy(np.zeros((4, 4)))
    faint = blob + 0.0
    faint[5, 5] = 0.2
    assert spatial_entropy(faint) > 0 and spatial_entropy(faint, subtract=2.0) == approx(0)
    maps = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.0, 0.0, 0.0]])
    assert pointing(maps, torch.tensor([False, True, False])).tolist() == approx([1.0, 0.0, math.nan])
    assert float(pointing(maps[0], torch.zeros(3, dtype=torch.bool))) == approx(math.nan)


def test_boxes_of_maps():
    heat = np.zeros((10, 10))
    heat[2:6, 2:6] = 1
    assert box_iou(heat, (2, 2, 6, 6)) == 1 and box_iou(heat, (6, 6, 9, 9)) == 0
    assert box_iou(heat, (2, 2, 6, 10)) == approx(0.5)
    heat[8, 8] = 0.4
    assert box_iou(heat, (2, 2, 6, 6), keep=0.3) == approx(16 / 49)
    heat[0, 0] = np.nan
    assert box_iou(heat, (2, 2, 6, 6)) == 1 and math.isnan(box_iou(np.zeros((3, 3)), (0, 0, 1, 1)))
    assert localisation_ap([1.0, 0.5, 0.4, np.nan]) == approx(2 / 3)
    assert localisation_ap([1.0, 0.5, 0.4], threshold=0.45) == approx(2 / 3) and math.isnan(localisation_ap([np.nan]))


def test_sinks():
    hidden = torch.ones(4, 1000)
    hidden[2, 7] = 1e4
    assert sink_tokens(hidden, [7]).tolist() == [False, False, True, False]
    assert not sink_tokens(hidden, [8]).any() and not sink_tokens(hidden, [7], threshold=40.0).any()
    heads = torch.tensor([[[0.1, 0.3, 0.1, 0.5]], [[0.1, 0.05, 0.35, 0.5]], [[0.9, 0.05, 0.05, 0.0]]])
    assert image_centric(heads, None, [1, 2], [2]).tolist() == [True, False, False]
    assert image_centric(heads, None, [1, 2], [2], sink=0.9, mass=0.05).tolist() == [True, True, True]


def test_text_heads():
    n = 5
    pattern = torch.zeros(3, 2 * n, 2 * n)
    for t in range(1, 2 * n):
        pattern[0, t, t - 1] = 1
    for t in range(n, 2 * n):
        pattern[1, t, t - n + 1] = 1
    assert previous_token(pattern).tolist() == [1, 0, 0]
    assert induction(pattern, n).tolist() == [0, 1, 0]
    assert float(induction(torch.full((1, 2 * n, 2 * n), 0.1), n)) == approx(0.1)


def test_hits_while_generating():
    """Two steps, two heads: head 0 points into the needle at the said token both times, head 1 never."""
    rows = torch.tensor([[[0.1, 0.8, 0.1], [0.8, 0.1, 0.1]], [[0.1, 0.1, 0.8], [0.1, 0.8, 0.1]]])
    needle = torch.tensor([False, True, True])
    assert copy_hits(rows, needle, [7, 8, 9], [8, 9]).tolist() == [1.0, 0.0]
    assert copy_hits(rows, needle, [7, 8, 9], [8, 8]).tolist() == [0.5, 0.5]
    assert ocr_hits(rows, needle).tolist() == [1.0, 0.5]
    nothing = torch.zeros(3, dtype=torch.bool)
    assert copy_hits(rows, nothing, [7, 8, 9], [8, 9]).isnan().all() and ocr_hits(rows, nothing).isnan().all()


# ---------------------------------------------------------------------- properties
@st.composite
def patterns(draw):
    b, h, r = (draw(st.integers(1, 3)) for _ in range(3))
    k = draw(st.integers(4, 9))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    pattern = torch.rand(b, h, r, k, generator=g).softmax(-1)
    visual = torch.zeros(k, dtype=torch.bool)
    visual[: draw(st.integers(2, k - 1))] = True
    evidence = visual & (torch.rand(k, generator=g) < 0.5)
    return pattern, evidence, visual, g


@given(patterns())
def test_shares_lie_between_nothing_and_all(case):
    pattern, evidence, visual, _ = case
    share = visual_share(pattern, None, evidence, visual)
    if not evidence.any():
        assert share.isnan().all() and density_lift(pattern, None, evidence, visual).isnan().all()
        return
    assert ((share >= 0) & (share <= 1 + 1e-6)).all()
    rest = visual & ~evidence
    if rest.any():
        assert torch.allclose(share + visual_share(pattern, None, rest, visual), torch.ones(()), atol=1e-5)
    assert torch.allclose(visual_share(pattern, None, visual, visual), torch.ones(()), atol=1e-5)
    assert torch.allclose(density_lift(pattern, None, visual, visual), torch.ones(()), atol=1e-5)
    assert torch.allclose(sink_free(pattern, None, evidence, visual, []), share, atol=1e-6)


@given(patterns())
def test_order_and_scale_change_nothing(case):
    pattern, evidence, visual, g = case
    order = torch.randperm(pattern.shape[-1], generator=g)
    rows = torch.randperm(pattern.shape[-2], generator=g)
    same = visual_share(pattern[..., rows, :][..., order], None, evidence[order], visual[order])
    assert torch.allclose(same, visual_share(pattern, None, evidence, visual), atol=1e-5, equal_nan=True)
    norms = torch.ones(pattern.shape[0], pattern.shape[1], pattern.shape[-1])
    plain = ram(pattern, None, evidence)
    assert torch.allclose(value_weighted(pattern, None, evidence, 3 * norms), plain, atol=1e-5, equal_nan=True)


@given(patterns())
def test_evidence_shuffled_within_the_picture_is_chance_on_average(case):
    pattern, evidence, visual, g = case
    n = int(visual.sum())
    if not evidence.any():
        return
    found = []
    for i in range(n):  # every rotation of the evidence within the picture: each token counts equally often
        turned = torch.zeros_like(evidence)
        turned[:n] = evidence[:n].roll(i)
        found.append(density_lift(pattern, None, turned, visual))
    assert torch.allclose(torch.stack(found).mean(0), torch.ones(()), atol=1e-4)


@given(patterns())
def test_padded_rows_are_left_out(case):
    pattern, evidence, visual, _ = case
    padded = torch.cat([pattern, torch.full_like(pattern[..., :1, :], torch.nan)], -2)
    for score in (
        lambda p: visual_share(p, None, evidence, visual),
        lambda p: attention_sum(p, None, visual),
    ):
        assert torch.allclose(score(padded), score(pattern), atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda: calibrated(torch.ones(2), torch.ones(3)),
        lambda: spatial_entropy(np.ones(4)),
        lambda: box_iou(np.ones(4), (0, 0, 1, 1)),
        lambda: box_iou(np.ones((4, 4)), (0, 0, 1, 1), keep=0.0),
        lambda: induction(torch.ones(1, 6, 6), 4),
        lambda: induction(torch.ones(1, 6, 6), 1),
    ],
)
def test_what_means_nothing_is_refused(as_users, call):
    with pytest.raises(MetricError):
        call()
