"""RAM and lift: right values, rules for what has no answer, properties."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmlens.metrics import lift, macro_mean, ram


def _uniform(n):
    return (torch.tril(torch.ones(n, n)) / torch.arange(1, n + 1)[:, None])[None]


def _reference(pattern, query, evidence):
    """The definition, spelt out: a mean over query rows of a sum over evidence keys."""
    out = []
    for head in pattern:
        total = 0.0
        for x in query:
            for y in evidence:
                total += float(head[x, y])
        out.append(total / len(query))
    return torch.tensor(out)


def test_uniform_causal_attention_has_the_worked_value():
    """(2/5 + 2/6) / 2, worked by hand."""
    assert ram(_uniform(6), [4, 5], [1, 2]).item() == pytest.approx(0.366667, abs=1e-6)


def test_uniform_causal_attention_has_lift_one():
    assert lift(_uniform(6), [4, 5], [1, 2]).item() == pytest.approx(1.0)


def test_one_row():
    row = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])
    assert ram(row, None, [1]).item() == pytest.approx(0.2)


def test_macro_mean_counts_samples_not_tokens():
    """Sample a has one row of RAM 1, sample b three rows of RAM 0: macro .5, pooled .25."""
    a, b = torch.ones(1, 1, 2), torch.zeros(1, 3, 2)
    a[..., 1], b[..., 1] = 0, 1
    samples = torch.stack([ram(a, None, [0]), ram(b, None, [0])])
    assert macro_mean(samples).item() == pytest.approx(0.5)


@pytest.mark.parametrize(("query", "evidence"), [([], [1]), ([2], []), ([], [])])
def test_nothing_asked_or_nothing_to_find_is_nan_never_zero(query, evidence):
    assert ram(_uniform(4), query, evidence).isnan().all()
    assert lift(_uniform(4), query, evidence).isnan().all()


def test_nan_samples_are_left_out_of_the_mean():
    assert macro_mean(torch.tensor([[1.0, float("nan")], [0.0, 0.5]])).tolist() == [0.5, 0.5]


def test_padded_rows_do_not_spread_their_nan():
    pattern = _uniform(5).repeat(2, 1, 1, 1)[..., 2:, :]
    pattern[1, :, 2] = float("nan")
    rows = torch.tensor([[True, True, True], [True, True, False]])
    got = ram(pattern, rows, [0])
    assert got[:, 0].tolist() == pytest.approx([(1 / 3 + 1 / 4 + 1 / 5) / 3, (1 / 3 + 1 / 4) / 2])


def test_all_rows_given_means_all_real_rows():
    pattern = _uniform(5).repeat(2, 1, 1, 1)[..., 2:, :]
    pattern[1, :, 2] = float("nan")
    rows = torch.tensor([[True, True, True], [True, True, False]])
    assert torch.equal(ram(pattern, None, [0]), ram(pattern, rows, [0]))
    assert torch.equal(lift(pattern, None, [0]), lift(pattern, rows, [0]))


def test_lists_of_bools_are_masks():
    assert torch.equal(ram(_uniform(3), [False, True, True], [True, False, False]), ram(_uniform(3), [1, 2], [0]))


def test_sums_are_float32_in_bfloat16():
    pattern = torch.full((1, 1, 4096), 1 / 4096, dtype=torch.bfloat16)
    got = ram(pattern, None, list(range(4096)))
    assert got.dtype == torch.float32 and got.item() == pytest.approx(1.0, abs=1e-3)


def test_repeated_key_value_heads_change_only_the_head_count():
    pattern = torch.rand(3, 5, 5).softmax(-1)
    twice = pattern.repeat_interleave(2, 0)
    assert torch.equal(ram(twice, [3, 4], [1]), ram(pattern, [3, 4], [1]).repeat_interleave(2))


@st.composite
def cases(draw):
    n, heads = draw(st.integers(2, 9)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    scores = 4 * torch.randn(heads, n, n, generator=generator)
    pattern = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf")).softmax(-1)
    subset = st.lists(st.integers(0, n - 1), min_size=1, unique=True)
    return pattern, draw(subset), draw(subset), n


@given(cases())
def test_fast_form_equals_the_definition(case):
    pattern, query, evidence, _ = case
    assert torch.allclose(ram(pattern, query, evidence), _reference(pattern, query, evidence), atol=1e-5)


@given(cases())
def test_ram_is_a_share_of_attention(case):
    pattern, query, evidence, n = case
    got = ram(pattern, query, evidence)
    assert (got >= 0).all() and (got <= 1 + 1e-6).all()
    assert torch.allclose(ram(pattern, query, list(range(n))), torch.ones(len(pattern)), atol=1e-5)


@given(cases())
def test_ram_adds_over_disjoint_regions_and_grows_with_the_region(case):
    pattern, query, evidence, n = case
    rest = [i for i in range(n) if i not in evidence]
    if rest:
        total = ram(pattern, query, evidence) + ram(pattern, query, rest)
        assert torch.allclose(total, torch.ones(len(pattern)), atol=1e-5)
    assert (ram(pattern, query, [*evidence, *rest[:1]]) >= ram(pattern, query, evidence) - 1e-6).all()


@given(cases(), st.randoms())
def test_order_inside_the_sets_does_not_matter(case, random):
    pattern, query, evidence, _ = case
    shuffled_query, shuffled_evidence = random.sample(query, len(query)), random.sample(evidence, len(evidence))
    assert torch.equal(ram(pattern, query, evidence), ram(pattern, shuffled_query, shuffled_evidence))


@given(cases())
def test_ram_is_linear_in_attention(case):
    pattern, query, evidence, n = case
    other = _uniform(n).expand_as(pattern)
    mixed = ram(0.3 * pattern + 0.7 * other, query, evidence)
    want = 0.3 * ram(pattern, query, evidence) + 0.7 * ram(other, query, evidence)
    assert torch.allclose(mixed, want, atol=1e-5)


@given(cases())
def test_batches_are_examples_side_by_side(case):
    pattern, query, evidence, _ = case
    batch = torch.stack([pattern, pattern.flip(0)])
    got = ram(batch, query, evidence)
    assert torch.allclose(got[0], ram(pattern, query, evidence), atol=1e-6)
    assert torch.allclose(got[1], got[0].flip(0), atol=1e-6)


@given(st.integers(2, 12), st.integers(0, 5), st.data())
def test_lift_of_uniform_attention_is_one_under_any_padding(n, pad, data):
    evidence = data.draw(st.lists(st.integers(0, n - 1), min_size=1, unique=True))
    query = [i for i in range(n) if i >= max(evidence)]
    pattern = torch.nn.functional.pad(_uniform(n), (pad, 0, pad, 0))
    visible = torch.arange(n + pad) - pad + 1
    got = lift(pattern, [q + pad for q in query], [e + pad for e in evidence], visible=visible)
    assert torch.allclose(got, torch.ones(1), atol=1e-5)
