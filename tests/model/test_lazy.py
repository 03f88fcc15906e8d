"""Only what is asked for is ever built."""

import oracle
import pytest
import tiny
import torch

from mmlens import HookedVLM, PerExample
from mmlens.errors import HeadError, TokenGroupError


@pytest.fixture
def long(family):
    """A model and a prompt whose S x S is larger than anything else."""
    with HookedVLM.from_model(*tiny.FAMILIES[family]()) as vlm:
        words = " ".join(["the square is red and the circle is blue"] * 60)
        yield vlm, vlm.prompt(words + " what color is the star?", images=[tiny.picture()], subject="star")


def _largest(call):
    with oracle.Operations() as seen:
        out = call()
    return out, seen.largest


def test_nothing_asked_builds_no_square(long):
    vlm, prompt = long
    square = prompt.n_columns**2
    _, largest = _largest(lambda: vlm.run_with_cache(prompt, "resid_post"))
    assert largest < square


def test_rows_and_heads_build_rows_and_heads_only(long):
    vlm, prompt = long
    n = prompt.n_columns
    idle = _largest(lambda: vlm(prompt))[1]
    (_, cache), largest = _largest(lambda: vlm.run_with_cache(prompt, "pattern", rows="subject"))
    assert largest <= max(idle, 6 * len(prompt.tokens("subject")) * n)
    assert cache["pattern", 0].shape == (1, 6, len(prompt.tokens("subject")), n)
    (_, cache), largest = _largest(lambda: vlm.run_with_cache(prompt, "pattern", heads=[4]))
    assert largest <= max(idle, n * n) and cache["pattern", 2].shape == (1, 1, n, n)


def test_ablations_build_no_square(long):
    vlm, prompt = long
    for mode in ("output_zero", "visual_mask"):
        with vlm.ablate([(1, 2)], mode=mode):
            _, largest = _largest(lambda: vlm(prompt))
        assert largest < prompt.n_columns**2, mode


def test_a_pattern_in_one_layer_makes_that_layer_explicit_only(wrapped):
    prompt = oracle.prompts(wrapped)["single"]
    with oracle.Operations() as seen:
        wrapped.run_with_cache(prompt, "blocks.1.attn.hook_pattern")
    softmaxes = [c for c in seen.calls if "softmax" in c]
    assert len(softmaxes) == 1
    with oracle.Operations() as seen:
        wrapped.run_with_cache(prompt, "z")
    assert not [c for c in seen.calls if "softmax" in c]


@pytest.mark.parametrize(
    "rows", ["question", "subject", "last", "image:0", [3, -1], "question+suffix", PerExample(["last", [5, 2, 9]])]
)
def test_cut_rows_equal_the_whole_pattern_at_those_rows(wrapped, rows):
    prompt = oracle.prompts(wrapped)["batch"]
    _, whole = wrapped.run_with_cache(prompt, ["pattern", "attn_scores"])
    _, cut = wrapped.run_with_cache(prompt, ["pattern", "attn_scores"], rows=rows, heads={0: [5, 1], 2: [3]})
    for layer, heads in ((0, (1, 5)), (2, (3,))):
        for name in ("pattern", "attn_scores"):
            index = cut.index((name, layer))
            assert index.heads == heads
            for i in range(2):
                for r, column in enumerate(index.positions[i].tolist()):
                    got = cut[name, layer][i, :, r]
                    if column < 0:
                        assert got.isnan().all()
                    else:
                        assert torch.allclose(got, whole[name, layer][i, list(heads), column], atol=2e-6)
    assert cut["pattern", 1].shape[1] == 0


def test_cut_positions_equal_the_whole_stream(wrapped):
    prompt = oracle.prompts(wrapped)["batch"]
    names = ["resid_post", "z", "q", "k", "rot_k", "mlp_out", "mlp.post", "vision.resid_post", "logits"]
    _, whole = wrapped.run_with_cache(prompt, names)
    _, cut = wrapped.run_with_cache(prompt, names, positions="question")
    for name in cut:
        index = cut.index(name)
        if name.startswith("vision.") or "rot_k" in name:
            assert torch.equal(cut[name], whole[name])
            continue
        for i in range(2):
            for r, column in enumerate(index.positions[i].tolist()):
                want = torch.full_like(cut[name][i, r], float("nan")) if column < 0 else whole[name][i, column]
                assert torch.equal(cut[name][i, r].nan_to_num(7), want.nan_to_num(7)), name


def test_two_callers_with_other_rows_each_get_their_own(wrapped):
    prompt = oracle.prompts(wrapped)["batch"]
    _, whole = wrapped.run_with_cache(prompt, "pattern")
    seen = {}
    with wrapped.hooks(
        [("pattern", lambda t, hook: seen.__setitem__(hook.layer(), t.clone()))], rows="last", heads=[2]
    ):
        _, cut = wrapped.run_with_cache(prompt, "pattern", rows="question", heads=[0, 5])
    assert seen[1].shape[1:3] == (1, 1)
    assert torch.allclose(seen[1][:, 0, 0], whole["pattern", 1][:, 2, -1], atol=2e-6)
    rows = prompt.tokens("question").per_example
    for i in range(2):
        assert torch.allclose(
            cut["pattern", 1][i, 1, : len(rows[i])], whole["pattern", 1][i, 5, list(rows[i])], atol=2e-6
        )


def test_the_default_filter_leaves_out_what_is_huge(wrapped):
    _, cache = wrapped.run_with_cache(oracle.prompts(wrapped)["single"])
    assert not [n for n in cache if n.endswith(("hook_pattern", "hook_attn_scores", "hook_result"))]
    assert "blocks.0.hook_resid_mid" in cache and "vision.blocks.0.attn.hook_z" in cache


def test_an_empty_filter_keeps_nothing(wrapped):
    logits, cache = wrapped.run_with_cache(oracle.prompts(wrapped)["single"], [])
    assert len(cache) == 0 and logits.shape[0] == 1


@pytest.mark.parametrize("rows", [[], "image-image", PerExample([[], "last"])])
def test_empty_groups_give_empty_axes(wrapped, rows):
    prompt = oracle.prompts(wrapped)["batch"]
    logits, cache = wrapped.run_with_cache(prompt, ["pattern", "resid_post", "z"], rows=rows, positions=rows)
    n = 0 if not isinstance(rows, PerExample) else 1
    assert cache["pattern", 0].shape[2] == cache["resid_post", 0].shape[1] == cache["z", 0].shape[1] == n
    assert torch.equal(logits, wrapped(prompt)) and cache.index(("z", 0)).positions.shape == (2, n)
    if n:
        assert cache["resid_post", 0][0].isnan().all() and not cache["resid_post", 0][1].isnan().any()


def test_groups_of_another_batch_are_refused(wrapped):
    prompts = oracle.prompts(wrapped)
    with pytest.raises(TokenGroupError, match="2 examples for a batch of 1"):
        wrapped.run_with_cache(prompts["single"], "pattern", rows=prompts["batch"].tokens("last"))


def test_everything_works_under_inference_mode(wrapped):
    prompt = oracle.prompts(wrapped)["batch"]
    want = wrapped.run_with_cache(prompt, "pattern")
    with torch.inference_mode():
        logits, cache = wrapped.run_with_cache(prompt, "pattern")
        edited = wrapped.run_with_hooks(prompt, [("pattern", lambda t, hook: t.flip(-1))])
    assert torch.equal(logits, want[0]) and torch.equal(cache["pattern", 1], want[1]["pattern", 1])
    assert not torch.equal(edited, logits)


def test_numpy_heads_and_single_heads_are_heads(wrapped):
    import numpy as np

    prompt = oracle.prompts(wrapped)["single"]
    for heads in (np.array([1, 4]), {1: np.int64(4)}, {1: 4}):
        _, cache = wrapped.run_with_cache(prompt, "pattern", heads=heads)
        assert 4 in cache.index(("pattern", 1)).heads


def test_a_head_set_of_another_model_is_refused(wrapped):
    from mmlens import HeadSet

    with (
        pytest.raises(HeadError, match="40 layers of 40 heads"),
        wrapped.ablate(HeadSet.of([(0, 0)], n_layers=40, n_heads=40)),
    ):
        pass


@pytest.mark.parametrize("heads", [[6], [-1], {3: [0]}, {0: [0.5]}, "all"])
def test_heads_that_are_not_there_are_named(wrapped, heads, as_users):
    with pytest.raises(HeadError, match="query heads 0 to 5"):
        wrapped.run_with_cache(oracle.prompts(wrapped)["single"], "pattern", heads=heads)


@pytest.mark.parametrize("rows", ["frame:0", "evidence", "question+", "Question", [10_000], 2.5, True])
def test_rows_that_mean_nothing_are_named(wrapped, rows, as_users):
    with pytest.raises(TokenGroupError):
        wrapped.run_with_cache(oracle.prompts(wrapped)["single"], "pattern", rows=rows)
