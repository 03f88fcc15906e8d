"""eRank, RID, TME, MixIG: worked values, properties, and the fast forms against the definitions.

Worked values were computed independently, by hand or in numpy, from the formulas beside each function.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmlens.errors import MetricError
from mmlens.metrics import erank, grassmann, key_region_ratio, mixig, rid, rid_parts, tme
from mmlens.metrics.mixing import tme_reference
from mmlens.metrics.residual import Spectrum, cut_of, principal_angles, rid_reference

T = torch.tensor


def _rotation(degrees, n=2):
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    out = torch.eye(n, dtype=torch.float64)
    out[:2, :2] = T([[c, -s], [s, c]])
    return out


E11 = T([[1.0, 0.0], [0.0, 0.0]])
LINE = T([[1.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
I2, I3 = torch.eye(2), torch.eye(3)
THREE = T([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
WIDE = T([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])


# ---------------------------------------------------------------------- worked values
@pytest.mark.parametrize(
    "x,value",
    [
        (I3, 3.0),
        (torch.outer(T([1.0, 2.0, 3.0]), T([1.0, -1.0])), 1.0),
        (torch.diag(T([3.0, 1.0])), 1.754765),
        (torch.diag(T([2.0, 1.0])), 1.889882),
        (torch.zeros(3, 4), 0.0),
    ],
)
def test_worked_effective_ranks(x, value):
    assert float(erank(x)) == pytest.approx(value, abs=1e-5)


RID = [
    ("null update", I3, I3, (0, 0)),
    ("scaled", LINE, 3 * LINE, (0, 0)),
    ("negated", LINE, -LINE, (0, 0)),
    ("to zero", E11, torch.zeros(2, 2), (0.5, 0)),
    ("line turned by 90 degrees", LINE, LINE @ _rotation(90).T, (0, 0.5)),
    ("line turned by 30 degrees", LINE, LINE @ _rotation(30).T, (0, 0.25)),
    ("identity turned", I2, _rotation(37), (0, 0)),
    ("tokens of a line swapped", E11, E11.flip(0), (0, 0.5)),
    ("tokens of the identity swapped", I2, I2.flip(0), (0, 0)),
    ("line to identity", E11, I2, (0.5, 0.707107)),
    ("identity to line", I2, E11, (0.5, 0)),
    ("one more direction", torch.diag(T([1.0, 1.0, 0.0])), I3, (0.333333, 0.577350)),
    ("a zero token becomes another", THREE, T([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), (0.014683, 0.288675)),
    ("a feature joins one token", WIDE, T([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]), (0.014683, 0.288675)),
]


@pytest.mark.parametrize("name,before,after,value", RID, ids=[r[0] for r in RID])
def test_worked_rid(name, before, after, value):
    for parts in (rid_parts(before, after), rid_reference(before, after)):
        assert float(parts.complexity) == pytest.approx(value[0], abs=1e-5)
        assert float(parts.support) == pytest.approx(value[1], abs=1e-5)
        assert float(parts.total) == pytest.approx(sum(value), abs=1e-5)
    assert float(rid(before, after)) == pytest.approx(sum(value), abs=1e-5)


@pytest.mark.parametrize(
    "x,options,value",
    [
        (torch.ones(4, 3), {}, math.log(4)),
        (T([[1.0, 2.0], [3.0, 6.0]]), {}, math.log(2)),
        (torch.ones(4, 3), {"normalize": True}, 1.0),
        (I2, {}, 0.636514),
        (I2, {"normalize": True}, 0.918296),
        (I2, {"alpha": 8.0}, 0.025475),
        (I2, {"alpha": 8.0, "normalize": True}, 0.036753),
        (T([[1.0, 0.0], [-1.0, 0.0]]), {}, 0.0),
        (I3, {}, 1.039721),
        (torch.eye(5), {}, math.log(6) - 2 * math.log(2) / 6),
        (T([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), {}, 1.072317),
        (T([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), {"rows": "last"}, 1.095734),
        (T([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]]), {}, 1.072317),
        (T([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]]), {"rows": "last"}, 1.060609),
        (torch.ones(1, 3), {}, 0.0),
        (torch.ones(1, 3), {"normalize": True}, 0.0),
        (torch.zeros(3, 2), {}, math.log(3)),
        (I3, {"kernel": "relu"}, 0.0),
    ],
)
def test_worked_mixing_entropies(x, options, value):
    assert float(tme(x, **options)) == pytest.approx(value, abs=1e-5)


def test_worked_mixing_gain_and_region_ratio():
    assert float(mixig(torch.ones(2, 2), I2)) == pytest.approx(-0.056633, abs=1e-5)
    graph = T([[1.0, 3.0, 2.0, 2.0]])
    key, whole = T([False, True, False, False]), torch.ones(4, dtype=torch.bool)
    assert float(key_region_ratio(graph, key, whole)) == pytest.approx(0.375)
    uniform = torch.full((6, 6), 1 / 6)
    visual = T([True, True, True, True, False, False])
    assert float(key_region_ratio(uniform, T([True] + [False] * 5), visual)) == pytest.approx(0.25)
    assert float(key_region_ratio(uniform, visual, visual)) == pytest.approx(1)
    assert math.isnan(float(key_region_ratio(uniform, torch.zeros(6, dtype=torch.bool), visual)))
    two = T([[0.1, 0.9], [0.5, 0.5]])
    every, last = T([True, True]), T([False, True])
    assert float(key_region_ratio(two, T([False, True]), every)) == pytest.approx(0.7)
    assert float(key_region_ratio(two, T([False, True]), every, last)) == pytest.approx(0.5)


def test_two_lines_at_thirty_degrees():
    a, b = T([[1.0, 0.0]]), T([[math.cos(math.pi / 6), math.sin(math.pi / 6)]])
    found = [float(grassmann(a, b, kind=k)) for k in ("geodesic", "chordal", "projection")]
    assert found == pytest.approx([0.523599, 0.5, 0.707107], abs=1e-5)
    assert float(grassmann(T([[1.0, 2.0]]).mT, T([[1.0, 2.0]]).mT)) == pytest.approx(0, abs=1e-8)
    tiny = 1e-7
    near = T([[1.0, tiny]], dtype=torch.float64)
    assert float(principal_angles(a.double(), near)) == pytest.approx(tiny, rel=1e-6)
    assert float(principal_angles(E11, E11.flip(0), side="token")) == pytest.approx(math.pi / 2)


def test_gaussian_states_as_derived():
    """Independent Gaussian states, S < H: support = sqrt(1 - S / H) / 2 (derived; .4146 at 20 x 64)."""
    g = torch.Generator().manual_seed(0)
    found = [
        float(rid_parts(torch.randn(20, 64, generator=g), torch.randn(20, 64, generator=g)).support) for _ in range(20)
    ]
    assert np.mean(found) == pytest.approx(math.sqrt(1 - 20 / 64) / 2, abs=0.01)


# ---------------------------------------------------------------------- properties
shapes = st.tuples(st.integers(2, 12), st.integers(2, 12))


@st.composite
def states(draw, low_rank=True):
    s, h = draw(shapes)
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    x = torch.randn(s, h, dtype=torch.float64, generator=g)
    if low_rank and draw(st.booleans()):
        r = draw(st.integers(1, min(s, h)))
        x = torch.randn(s, r, dtype=torch.float64, generator=g) @ torch.randn(r, h, dtype=torch.float64, generator=g)
    y = x + draw(st.sampled_from([0.01, 0.3, 3.0])) * torch.randn(s, h, dtype=torch.float64, generator=g)
    return x, y, g


def _orthogonal(n, g):
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=g))[0]


CUT = 1e-9  # products of random factors are low-rank up to rounding; the default would count that as support


@given(states())
def test_fast_rid_is_the_definitions(pair):
    x, y, _ = pair
    for a, b in ((x, y), (y, x), (x, x)):
        fast, slow = rid_parts(a, b, rtol=CUT), rid_reference(a, b, rtol=CUT)
        assert int(fast.rank) == int(slow.rank)
        for f, s in zip(fast[:2], slow[:2]):
            assert float(f) == pytest.approx(float(s), rel=1e-6, abs=1e-12)


@given(states())
def test_effective_rank_has_its_invariances(pair):
    x, _, g = pair
    r = float(erank(x))
    assert 1 - 1e-9 <= r <= int(torch.linalg.matrix_rank(x)) + 1e-6
    same = [3 * x, -x, x.mT, _orthogonal(x.shape[0], g) @ x, x @ _orthogonal(x.shape[1], g), x.flip(0)]
    assert [float(erank(s)) for s in same] == pytest.approx([r] * 6, rel=1e-9)


@given(states(), st.sampled_from([0.5, -2.0, 1e3]))
def test_rid_has_its_invariances(pair, scale):
    x, y, g = pair
    parts = rid_parts(x, y, rtol=CUT)
    assert 0 <= float(parts.support) <= 1 and 0 <= float(parts.complexity) < 1
    assert float(rid(x, scale * x, rtol=CUT)) == pytest.approx(0, abs=1e-9)
    u, v = _orthogonal(x.shape[0], g), _orthogonal(x.shape[1], g)
    turned = rid_parts(scale * u @ x @ v, scale * u @ y @ v, rtol=CUT)
    assert [float(p) for p in turned[:2]] == pytest.approx([float(p) for p in parts[:2]], rel=1e-6, abs=1e-9)
    assert float(rid(x.mT, y.mT, rtol=CUT)) == pytest.approx(float(parts.total), rel=1e-6, abs=1e-9)
    padded = [torch.cat([s, torch.zeros(s.shape[0], 3)], 1) for s in (x, y)]
    assert float(rid_parts(*padded, rtol=CUT).support) == pytest.approx(float(parts.support), rel=1e-6, abs=1e-9)


@given(states())
def test_support_is_zero_exactly_where_nothing_is_new(pair):
    x, y, g = pair
    inside = torch.linalg.pinv(x) @ x  # P_R
    outside = torch.linalg.pinv(x.mT) @ x.mT
    kept = outside.mT @ y @ inside
    assert float(rid_parts(x, kept, rtol=1e-7).support) < 1e-6


# states of rank one have exactly antipodal tokens, where a small alpha is not continuous
@given(states(low_rank=False), st.sampled_from([0.5, 1.0, 8.0]))
def test_mixing_entropy_has_its_invariances(pair, alpha):
    x, y, g = pair
    s = x.shape[0]
    whole = float(tme(x, alpha=alpha))
    assert -1e-12 <= whole <= math.log(s) + 1e-9
    scales = torch.rand(s, 1, dtype=torch.float64, generator=g) + 0.1
    order = torch.randperm(s, generator=g)
    same = [scales * x, x @ _orthogonal(x.shape[1], g), x[order]]
    assert [float(tme(t, alpha=alpha)) for t in same] == pytest.approx([whole] * 3, abs=1e-9)
    assert float(mixig(x, y, alpha=alpha)) == pytest.approx(-float(mixig(y, x, alpha=alpha)), abs=1e-12)
    z = y + torch.randn(y.shape, dtype=torch.float64, generator=g)
    chain = float(mixig(x, y, alpha=alpha) + mixig(y, z, alpha=alpha))
    assert chain == pytest.approx(float(mixig(x, z, alpha=alpha)), abs=1e-9)
    assert float(tme(x, alpha=1e-9)) == pytest.approx(math.log(s), abs=1e-6)


@given(states())
def test_fast_mixing_entropy_is_the_definitions(pair):
    x, _, _ = pair
    for alpha in (1.0, 8.0):
        assert float(tme(x, alpha=alpha)) == pytest.approx(float(tme_reference(x, alpha=alpha)), rel=1e-9, abs=1e-12)
    each = tme(x, rows="all")
    assert float(each[-1]) == pytest.approx(float(tme(x, rows="last")), rel=1e-12)
    assert float(each.mean()) == pytest.approx(float(tme(x)), rel=1e-12)


def test_leading_axes_are_batched():
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 3, 7, 5, generator=g), torch.randn(2, 3, 7, 5, generator=g)
    x[1, 0] = x[1, 0, :, :1] * torch.ones(5)  # one of rank 1 among full ones
    parts = rid_parts(x, y, rtol=1e-6)
    assert parts.total.shape == (2, 3) and int(parts.rank[1, 0]) == 1
    for i in range(2):
        for j in range(3):
            one = rid_reference(x[i, j], y[i, j], rtol=1e-6)
            assert [float(p[i, j]) for p in parts] == pytest.approx([float(p) for p in one], rel=1e-9)
            assert float(tme(x)[i, j]) == pytest.approx(float(tme(x[i, j])))
            assert float(erank(x)[i, j]) == pytest.approx(float(erank(x[i, j])))


# ---------------------------------------------------------------------- precision
def _large(kind, s=600, h=1024):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(s, h, dtype=torch.float64, generator=g)
    if kind == "massive":
        x[:, 3] *= 1e4
    y = x + 0.1 * torch.randn(s, h, dtype=torch.float64, generator=g)
    return (x.bfloat16(), y.bfloat16()) if kind == "bf16" else (x, y)


@pytest.mark.parametrize("kind", ["plain", "massive", "bf16"])
def test_large_states_keep_their_rank_and_their_digits(kind):
    x, y = _large(kind)
    fast, slow = rid_parts(x, y), rid_reference(x, y)
    assert int(fast.rank) == int(slow.rank) == 600
    assert [float(p) for p in fast[:2]] == pytest.approx([float(p) for p in slow[:2]], rel=1e-6)
    assert float(rid(x, x)) < 1e-12
    if kind == "bf16":
        with pytest.raises(MetricError, match="rank 0"):
            rid(x, y, rtol="input")
    if kind == "massive":  # the resolution of float32 hides half of it
        assert int(rid_parts(x.float(), y.float(), rtol="input").rank) < 600


def test_the_cut_decides():
    x = torch.diag(T([1.0, 1e-5], dtype=torch.float64))
    y = T([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    assert int(rid_parts(x, y).rank) == 2 and int(rid_parts(x, y, rtol=1e-3).rank) == 1
    assert float(rid(x, y)) < float(rid(x, y, rtol=1e-3))
    assert cut_of(x.float(), "input") == pytest.approx(2 * torch.finfo(torch.float32).eps)


def test_a_chain_shares_its_states():
    g = torch.Generator().manual_seed(2)
    chain = [torch.randn(9, 6, generator=g) for _ in range(4)]
    spectra = [Spectrum.of(s) for s in chain]
    for a, b, x, y in zip(spectra, spectra[1:], chain, chain[1:]):
        assert float(a.to(b, cut_of(x, None)).total) == pytest.approx(float(rid(x, y)), rel=1e-12)


# ---------------------------------------------------------------------- no sound answer
def test_states_that_are_not_finite_are_nan_and_spoil_no_other():
    x, y = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    y[1, 0, 0] = torch.inf
    parts = rid_parts(x, y)
    assert parts.total.isnan().tolist() == [False, True, False]
    assert float(parts.total[2]) == pytest.approx(float(rid(x[2], y[2])))
    assert erank(y).isnan().tolist() == [False, True, False] == tme(y).isnan().tolist()
    assert rid_reference(x, y).total.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    "call",
    [
        lambda: rid(torch.ones(2, 3), torch.ones(3, 2)),
        lambda: rid(torch.ones(3), torch.ones(3)),
        lambda: rid(I2, I2, rtol=2.0),
        lambda: rid(I2, I2, rtol="fp32"),
        lambda: tme(I2, rows="first"),
        lambda: tme(I2, kernel="cosine"),
        lambda: tme(I2, alpha=0.0),
        lambda: grassmann(I2, I2, kind="angle"),
        lambda: principal_angles(I2, I2, side="row"),
        lambda: principal_angles(torch.ones(2, 2, 2), torch.ones(2, 2, 2)),
    ],
)
def test_what_means_nothing_is_refused(as_users, call):
    with pytest.raises(MetricError):
        call()
