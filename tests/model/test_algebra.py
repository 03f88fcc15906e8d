"""The cache's algebra adds up at every position of every family, pictures included; circuits equal hand-made products."""

import oracle
import pytest
import tiny
import torch

from mmlens import ActivationCache, HookedVLM
from mmlens.errors import CacheError, HeadError, OptionError


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def case(request):
    """(model, prompt, logits, cache) of a padded batch, and of two pictures."""
    with HookedVLM.from_model(*tiny.FAMILIES[request.param]()) as vlm:
        runs = {}
        for name in ("batch", "several"):
            prompt = oracle.prompts(vlm)[name]
            runs[name] = (prompt, *vlm.run_with_cache(prompt))
        yield vlm, runs


def _relative(got, want, real):
    return ((got - want)[real].norm(dim=-1) / want[real].norm(dim=-1)).max()


@pytest.fixture(params=["batch", "several"])
def run(request, case):
    vlm, runs = case
    prompt, logits, cache = runs[request.param]
    return vlm, prompt.inputs["attention_mask"].bool(), logits, cache


def test_parts_sum_to_the_stream_at_every_position(run):
    vlm, real, _, cache = run
    parts, labels = cache.decompose_resid(return_labels=True)
    assert len(labels) == len(parts) == 1 + 2 * 3 + vlm.family.deepstack_layers(vlm.config)
    assert _relative(parts.sum(0), cache["resid_post", -1], real) <= 1e-6
    assert _relative(cache.decompose_resid(2).sum(0), cache["resid_pre", 2], real) <= 1e-6
    assert _relative(cache.decompose_resid(1, mlp_input=True).sum(0), cache["resid_mid", 1], real) <= 1e-6


def test_attributions_sum_to_the_true_logit_difference(run):
    _, real, logits, cache = run
    parts = cache.decompose_resid()
    attributed = cache.logit_attrs(parts, 11, 23).sum(0)
    want = logits[..., 11] - logits[..., 23]
    assert (attributed - want)[real].abs().max() <= 1e-5 * want[real].abs().max()
    per_example = cache.logit_attrs(parts, torch.tensor([7] * len(logits))).sum(0)
    assert torch.allclose(per_example[real], logits[..., 7][real], atol=1e-4)


def test_head_results_sum_to_what_attention_adds(run):
    vlm, real, _, cache = run
    results, labels = cache.stack_head_results(return_labels=True)
    assert labels[:7] == ["L0H0", "L0H1", "L0H2", "L0H3", "L0H4", "L0H5", "L1H0"]
    added = torch.stack([cache["attn_out", layer] for layer in range(3)]).sum(0)
    assert _relative(results.sum(0), added, real) <= 2e-6
    whole = cache.stack_head_results(incl_remainder=True).sum(0)
    assert _relative(whole, cache["resid_post", -1], real) <= 2e-6


def test_captured_results_are_the_same_contributions(case):
    vlm, runs = case
    prompt, _, cache = runs["batch"]
    _, captured = vlm.run_with_cache(prompt, "result")
    results = cache.stack_head_results()
    real = prompt.inputs["attention_mask"].bool()
    assert torch.allclose(captured["result", 1].permute(2, 0, 1, 3)[:, real], results[6:12][:, real], atol=1e-5)


def test_logit_lens_of_the_last_stream_is_the_logits(run):
    _, real, logits, cache = run
    lens, labels = cache.logit_lens(return_labels=True)
    assert labels == ["0_pre", "1_pre", "2_pre", "final_post"] and lens.shape == (4, *logits.shape)
    assert (lens[-1] - logits)[real].abs().max() <= 1e-5
    some = cache.logit_lens(layers=[-1, 0], tokens=[5, 9])
    assert torch.allclose(some[0], lens[-1][..., [5, 9]], atol=1e-5)
    assert torch.allclose(some[1], lens[0][..., [5, 9]], atol=1e-5)
    assert len(cache.logit_lens(incl_mid=True)) == 7


def test_accumulated_streams_and_norms(run):
    _, real, logits, cache = run
    streams, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
    assert labels == ["0_pre", "0_mid", "1_pre", "1_mid", "2_pre", "2_mid", "final_post"]
    assert torch.equal(streams[3], cache["resid_mid", 1])
    scaled = cache.apply_ln_to_stack(cache.decompose_resid())
    assert _relative(scaled.sum(0) * cache["ln_final.hook_scale"], cache["resid_post", -1], real) <= 1e-6


def test_what_a_sum_lacks_is_named(case):
    vlm, runs = case
    prompt = runs["several"][0]
    _, cache = vlm.run_with_cache(prompt, ["hook_embed", "attn_out", "resid_post"])
    with pytest.raises(CacheError, match=r"mlp_out|deepstack_in"):
        cache.decompose_resid()
    with pytest.raises(CacheError, match="hook_result"):
        cache.stack_head_results()
    with pytest.raises(OptionError, match="token id"):
        runs["several"][2].logit_attrs(runs["several"][2].decompose_resid(), 10**6)
    with pytest.raises(OptionError, match="layers"):
        runs["several"][2].logit_lens(layers=[9])


def test_bf16_sums_in_single_precision():
    with HookedVLM.from_model(*tiny.qwen3_vl(dtype=torch.bfloat16)) as vlm:
        prompt = oracle.prompts(vlm)["single"]
        _, cache = vlm.run_with_cache(prompt)
        parts = cache.decompose_resid()
    assert parts.dtype == torch.float32 and not cache.logit_attrs(parts, 3).requires_grad
    error = (parts.sum(0) - cache["resid_post", -1].float()).norm(dim=-1) / cache["resid_post", -1].float().norm(dim=-1)
    assert error.max() < 0.03  # the model itself rounded at every addition


def test_weights_have_transformer_lens_shapes_and_make_the_activations(case):
    vlm, runs = case
    prompt, _, cache = runs["batch"]
    d, n = vlm.d_model, len(vlm.W_Q)
    assert n == 3 and vlm.W_Q[0].shape == (6, d, 8) and vlm.W_K[1].shape == (2, d, 8) and vlm.W_O[2].shape == (6, 8, d)
    assert vlm.W_K.expand()[1].shape == (6, d, 8) and torch.equal(vlm.W_K.expand()[1][4], vlm.W_K[1][1])
    assert vlm.W_V[:].shape == (3, 2, d, 8) and torch.equal(vlm.W_V[-1], vlm.W_V[2])
    assert vlm.W_E.shape[::-1] == vlm.W_U.shape and vlm.b_U.shape == vlm.W_U.shape[1:]
    for stack, prefix in ((vlm, ""), (vlm.vision, "vision.")):
        read = cache[prefix + "ln1.normalized", 1]
        for letter in "qkv":
            weight, bias = getattr(stack, f"W_{letter.upper()}")[1], getattr(stack, f"b_{letter.upper()}")[1]
            made = torch.einsum("bpm,hmd->bphd", read, weight) + bias
            assert torch.allclose(made, cache[prefix + letter, 1], atol=1e-4), letter
    if vlm.family.name != "qwen3-vl-moe":
        assert torch.allclose(cache["post", 0] @ vlm.W_out[0], cache["mlp_out", 0], atol=1e-3) or (
            vlm.family.name == "gemma3"  # a norm stands behind the MLP
        )
        assert torch.allclose(cache["ln2.normalized", 0] @ vlm.W_gate[0], cache["pre", 0], atol=1e-4)
        assert torch.allclose(cache["ln2.normalized", 0] @ vlm.W_in[0], cache["pre_linear", 0], atol=1e-4)
    else:
        with pytest.raises(OptionError, match="mixture"):
            vlm.W_in[0]


def test_circuits_equal_products_made_by_hand(case):
    vlm, _ = case
    for stack, head, group in ((vlm, 4, 1), (vlm.vision, 2, 2)):
        ov, qk = stack.OV(1, head), stack.QK(1, head)
        assert torch.allclose(ov.AB, stack.W_V[1][group] @ stack.W_O[1][head], atol=1e-5)
        assert torch.allclose(qk.AB, stack.W_Q[1][head] @ stack.W_K[1][group].T, atol=1e-5)
        assert ov.AB.shape == qk.AB.shape and torch.linalg.matrix_rank(ov.AB) <= 8
    with pytest.raises(HeadError, match="head 6"):
        vlm.OV(0, 6)
    with pytest.raises(OptionError, match="layer"):
        vlm.W_Q[3]


def test_a_saved_cache_is_the_same_cache(case, tmp_path):
    vlm, runs = case
    prompt, _, cache = runs["several"]
    cache.save(tmp_path / "deep" / "run.safetensors")
    alone = ActivationCache.load(tmp_path / "deep" / "run.safetensors")
    assert list(alone) == list(cache) and all(torch.equal(alone[n], cache[n]) for n in cache)
    assert torch.equal(alone["z", 1], cache["z", 1]) and alone.provenance == cache.provenance
    assert alone.provenance["model"]["family"] == vlm.family.name
    for key in ("resid_post", "vision.resid_post"):
        assert torch.equal(alone.grid((key, 1), image=1), cache.grid((key, 1), image=1))
    assert alone.segments(("vision.z", 0)) == cache.segments(("vision.z", 0))
    assert alone.prompt.tokens("image:1-last").positions == prompt.tokens("image:1").positions
    with pytest.raises(CacheError, match="without its model"):
        alone.decompose_resid()
    again = ActivationCache.load(tmp_path / "deep" / "run.safetensors", vlm=vlm)
    assert torch.equal(again.decompose_resid(), cache.decompose_resid())
    _, cut = vlm.run_with_cache(prompt, ["z"], positions="question", heads=[1, 4])
    cut.save(tmp_path / "cut.safetensors")
    index = ActivationCache.load(tmp_path / "cut.safetensors").index(("z", 0))
    assert index.heads == (1, 4) and torch.equal(index.positions, cut.index(("z", 0)).positions)


def test_files_that_are_no_cache_are_refused(case, tmp_path):
    vlm, runs = case
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    with pytest.raises(CacheError, match="no saved cache"):
        ActivationCache.load(tmp_path / "x.safetensors")
    with pytest.raises(CacheError, match="no saved cache"):
        ActivationCache.load(tmp_path / "missing")
    runs["several"][2].save(tmp_path / "run.safetensors")
    other = tiny.FAMILIES["llava-1.5" if vlm.family.name != "llava-1.5" else "llava-next"]
    with HookedVLM.from_model(*other()) as stranger, pytest.raises(CacheError, match="other weights"):
        ActivationCache.load(tmp_path / "run.safetensors", vlm=stranger)


def test_transformer_lens_tools_take_the_cache(case):
    _, runs = case
    lens = runs["batch"][2].as_transformer_lens()
    assert torch.equal(lens["resid_post", 1], runs["batch"][2]["resid_post", 1])
    stacked = lens.stack_activation("resid_pre")
    assert stacked.shape[0] == 3
