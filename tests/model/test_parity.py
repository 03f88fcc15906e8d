"""Everything that is read equals stock transformers: every family and dtype, alone, in a padded batch, two pictures."""

import oracle
import pytest
import tiny
import torch

from mmlens import HookedVLM


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def family(request):
    return request.param


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module", params=sorted(DTYPES))
def dtype(request):
    return DTYPES[request.param]


@pytest.fixture(scope="module", params=["single", "batch", "several"])
def case(request, family, dtype):
    """(family, a run of everything, what stock computed, the prompt)."""
    model, processor = tiny.FAMILIES[family](dtype=dtype)
    with HookedVLM.from_model(model, processor) as vlm:
        prompt = oracle.prompts(vlm)[request.param]
        inputs = vlm.model_inputs(prompt)
        logits, cache = vlm.run_with_cache(prompt, lambda name: True)
    with oracle.recorded(model, family) as stock:
        oracle.run(model, inputs)
    stock["plain logits"] = oracle.run(model, inputs)
    return family, prompt, logits, cache, stock


def _rows(prompt):
    return prompt.inputs["attention_mask"].bool()


def test_reading_everything_leaves_logits_bitwise(case):
    _, _, logits, _, stock = case
    assert torch.equal(logits, stock["plain logits"])


def test_streams_equal_plain_torch_hooks_bitwise(case):
    _, prompt, _, cache, stock = case
    compared = 0
    for name, want in stock.items():
        if name.endswith("calls") or name == "plain logits":
            continue
        got = cache[name]
        if name.endswith("attn.hook_z") and not name.startswith("vision."):
            keep = _rows(prompt)
            got, want = got[keep], want[keep]
        assert torch.equal(got, want), name
        compared += 1
    assert compared > 80


def test_rotated_queries_and_keys_are_what_attention_received(case):
    family, _, _, cache, stock = case
    for name, calls in stock.items():
        if not name.endswith("calls"):
            continue
        prefix = name.removesuffix("calls")
        for i, letter in enumerate("qk"):
            want = torch.cat([call[i] for call in calls], 2).transpose(1, 2)
            assert torch.equal(cache[f"{prefix}attn.hook_rot_{letter}"], want), (family, prefix)


def test_patterns_are_the_exact_softmax(case):
    family, prompt, _, cache, stock = case
    for name, calls in stock.items():
        if not name.endswith("calls"):
            continue
        prefix = name.removesuffix("calls")
        pattern = cache[prefix + "attn.hook_pattern"]
        assert pattern.dtype == torch.float32
        causal = not prefix.startswith("vision.")
        if family in oracle.PACKED and not causal:
            for i, (q, k, _, mask, scaling, _) in enumerate(calls):
                want = oracle.exact_pattern(q, k, mask, scaling, causal)[0]
                n = want.shape[-1]
                assert torch.allclose(pattern[i, :, :n, :n].double(), want, atol=2e-6, rtol=0)
                assert pattern[i, :, n:].abs().sum() == 0 and pattern[i, :, :, n:].abs().sum() == 0
        else:
            q, k, _, mask, scaling, _ = calls[0]
            want = oracle.exact_pattern(q, k, mask, scaling, causal)
            assert torch.allclose(pattern.double(), want, atol=2e-6, rtol=0), prefix


def test_patterns_are_peaked_so_that_parity_can_fail(case):
    _, prompt, _, cache, _ = case
    rows = _rows(prompt)[:, None, :].expand(-1, 6, -1)
    for layer in range(3):
        assert cache["pattern", layer].amax(-1)[rows].mean() > 0.4


def test_patterns_and_z_of_padding_rows_are_zero(case):
    _, prompt, _, cache, _ = case
    padding = ~_rows(prompt)
    for layer in range(3):
        assert cache["pattern", layer].transpose(1, 2)[padding].abs().sum() == 0
        assert cache["z", layer][padding].abs().sum() == 0


def test_patterns_of_real_rows_sum_to_one(case):
    _, prompt, _, cache, _ = case
    rows = _rows(prompt)[:, None, :].expand(-1, 6, -1)
    for layer in range(3):
        assert (cache["pattern", layer].sum(-1)[rows] - 1).abs().max() < 1e-5


def test_residual_identities(case):
    family, _, _, cache, stock = case
    bf16 = cache["hook_embed"].dtype == torch.bfloat16
    for prefix in ("", "vision."):
        for layer in range(3):
            at = lambda name: cache[f"{prefix}blocks.{layer}.{name}"]
            for left, added, right in (
                ("hook_resid_pre", "hook_attn_out", "hook_resid_mid"),
                ("hook_resid_mid", "hook_mlp_out", "hook_resid_post"),
            ):
                total = at(left) + at(added)
                assert torch.equal(total, at(right)) if bf16 else torch.allclose(total, at(right), atol=1e-5)


def test_deepstack_is_what_stands_between_blocks(case):
    family, _, _, cache, _ = case
    for layer in range(2):
        post, pre = cache["resid_post", layer], cache["resid_pre", layer + 1]
        if family in oracle.DEEPSTACK:
            added = cache["deepstack_in", layer]
            assert added.abs().max() > 0.1
            assert torch.equal(post + added, pre)
            image = cache.prompt.inputs["input_ids"] == cache.prompt.config.image_token_id
            assert added[~image].abs().sum() == 0
        else:
            assert torch.equal(post, pre)


def test_results_sum_to_attention_output(case):
    family, _, _, cache, _ = case
    tolerance = 2e-5 if cache["hook_embed"].dtype == torch.float32 else 0.15
    rows = _rows(cache.prompt)
    for layer in range(3):
        total = cache["result", layer].sum(2)
        assert torch.allclose(total[rows].float(), cache["attn_out", layer][rows].float(), atol=tolerance)


def test_scales_divide_the_stream_into_the_normalized_stream(case):
    _, _, _, cache, _ = case
    tolerance = 1e-5 if cache["hook_embed"].dtype == torch.float32 else 5e-2
    divided = (cache["resid_pre", 1] / cache["ln1.scale", 1]).flatten(0, 1)
    normalized = cache["ln1.normalized", 1].float().flatten(0, 1)
    gain = (normalized * divided).sum(0) / divided.pow(2).sum(0)
    assert (normalized - divided * gain).abs().max() < tolerance


def test_tower_and_decoder_have_names_of_their_own(case):
    _, _, _, cache, _ = case
    assert cache["z", 2].shape[1] != cache["vision.z", 2].shape[1]
    assert cache["vision.z", 2].shape[-2:] == (3, 8) and cache["z", 2].shape[-2:] == (6, 8)


def test_eager_patterns_agree_in_fp32(family):
    model, processor = tiny.FAMILIES[family](attn="eager")
    with HookedVLM.from_model(model, processor) as vlm:
        prompt = oracle.prompts(vlm)["single"]
        _, cache = vlm.run_with_cache(prompt, "pattern")
        inputs = vlm.model_inputs(prompt)
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
    for layer, want in enumerate(attentions):
        assert torch.allclose(cache["pattern", layer], want, atol=2e-5)
