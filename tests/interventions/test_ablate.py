"""Both ways to cut heads: exact semantics, undone without a trace, right on grouped heads, in prefill and decoding."""

import oracle
import pytest
import tiny
import torch

from mmlens import HeadSet, HookedVLM
from mmlens.errors import HeadError, OptionError


def _capture(vlm, prompt, names=("z", "pattern", "v", "attn_out")):
    return vlm.run_with_cache(prompt, list(names))[1]


@pytest.mark.parametrize("case", ["single", "batch"])
def test_output_zero_equals_zeroing_columns_of_w_o(wrapped, case):
    prompt = oracle.prompts(wrapped)[case]
    heads = [(0, 2), (0, 5), (2, 1)]
    with wrapped.ablate(heads):
        got = wrapped(prompt)
    weights = [wrapped.hf.model.language_model.layers[layer].self_attn.o_proj.weight for layer in range(3)]
    saved = [w.clone() for w in weights]
    with torch.no_grad():
        for layer, head in heads:
            weights[layer][:, 8 * head : 8 * head + 8] = 0
        want = wrapped(prompt)
        for w, s in zip(weights, saved):
            w.copy_(s)
    real = prompt.inputs["attention_mask"].bool()
    assert torch.allclose(got[real], want[real], atol=1e-5)
    assert not torch.allclose(got[real], wrapped(prompt)[real], atol=1e-2)


@pytest.mark.parametrize("case", ["single", "batch"])
def test_visual_mask_is_the_pattern_without_pictures_renormalised(wrapped, case):
    prompt = oracle.prompts(wrapped)[case]
    clean = _capture(wrapped, prompt)
    image = prompt.inputs["input_ids"] == prompt.config.image_token_id
    with wrapped.ablate([(0, 3), (0, 0)], mode="visual_mask"):
        cut = _capture(wrapped, prompt)
    want = clean["pattern", 0].masked_fill(image[:, None, None, :], 0)
    want = want / want.sum(-1, keepdim=True).clamp(min=1e-30)
    real = prompt.inputs["attention_mask"].bool()
    v = clean["v", 0].repeat_interleave(3, 2)
    z = torch.einsum("bhqk,bkhd->bqhd", want, v)
    for head in range(6):
        is_cut = head in (0, 3)
        target = want if is_cut else clean["pattern", 0]
        assert torch.allclose(cut["pattern", 0][:, head][real], target[:, head][real], atol=2e-6)
        if is_cut:
            assert torch.allclose(cut["z", 0][:, :, head][real], z[:, :, head][real], atol=1e-5)
        else:
            assert torch.equal(cut["z", 0][:, :, head], clean["z", 0][:, :, head])


def test_a_worked_row():
    """a=[.1,.2,.3,.4], v=[1,2,3,4], picture keys {1,2}: untouched 3.0, output_zero 0, visual_mask 3.4."""
    from mmlens.model.attention import Link, attach, attention
    from mmlens.model.requests import HeadEdit, Request, Requests

    module = torch.nn.Module()
    module.is_causal = True
    requests = Requests()
    attach(module, Link(requests, ("decoder", 0)))
    query = torch.zeros(1, 1, 4, 4)
    query[0, 0, 3] = 1
    key = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().view(1, 1, 4, 1).expand(1, 1, 4, 4) / 4
    value = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4, 1).expand(1, 1, 4, 4)
    requests.columns = torch.tensor([[False, True, True, False]])

    def last(*modes):
        edits = {("decoder", 0): tuple(HeadEdit((0,), m) for m in modes)}
        with requests.ask(Request(edits=edits)):
            return attention(module, query, key, value, None, scaling=1.0)[0][0, 3, 0, 0].item()

    assert last() == pytest.approx(3.0, abs=1e-5)
    assert last("output_zero") == 0
    assert last("visual_mask") == pytest.approx(3.4, abs=1e-5)
    assert last("visual_mask", "output_zero") == 0


@pytest.mark.parametrize("padded", [False, True])
def test_a_row_that_sees_only_hidden_keys_gives_zero_not_nan(padded):
    from mmlens.model.attention import Link, attach, attention
    from mmlens.model.requests import HeadEdit, Request, Requests

    module, requests = torch.nn.Module(), Requests()
    module.is_causal = True
    attach(module, Link(requests, ("decoder", 0)))
    q, k, v = torch.randn(3, 2, 1, 5, 8).unbind(0)
    mask = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5) if padded else None
    requests.columns = torch.tensor([[True, True, False, False, False]] * 2)
    with requests.ask(Request(edits={("decoder", 0): (HeadEdit((0,), "visual_mask"),)})):
        out = attention(module, q, k, v, mask)[0]
    assert torch.equal(out[:, :2], torch.zeros(2, 2, 1, 8)) and out[:, 2:].abs().min() > 0


def test_text_only_prompts_are_left_alone_by_visual_mask(wrapped):
    prompt = wrapped.prompt("what color is the star?")
    want = wrapped(prompt)
    with wrapped.ablate([(0, 0), (1, 1)], mode="visual_mask"):
        assert torch.equal(wrapped(prompt), want)


@pytest.mark.parametrize("mode", ["output_zero", "visual_mask"])
def test_an_empty_set_is_a_no_op_bit_for_bit(wrapped, mode):
    prompt = oracle.prompts(wrapped)["batch"]
    want = wrapped(prompt)
    with wrapped.ablate(HeadSet((), 3, 6), mode=mode):
        assert torch.equal(wrapped(prompt), want)


@pytest.mark.parametrize("mode", ["output_zero", "visual_mask"])
def test_later_tokens_never_change_earlier_positions(wrapped, mode):
    """Causality: a cut head must not average over the future."""
    long = wrapped.prompt("what color is the star?", images=[tiny.picture()])
    n = long.n_columns - 4
    short = {k: v[:, :n] if v.ndim == 2 and v.shape[1] == long.n_columns else v for k, v in long.inputs.items()}
    with wrapped.ablate([(0, 1), (1, 4), (2, 0)], mode=mode):
        assert torch.allclose(wrapped(long)[:, :n], wrapped(short), atol=1e-5)


def test_cutting_a_query_head_leaves_its_key_value_group(wrapped):
    prompt = oracle.prompts(wrapped)["single"]
    clean = _capture(wrapped, prompt)
    with wrapped.ablate([(1, 0)]):
        cut = _capture(wrapped, prompt)
    assert cut["z", 1][:, :, 0].abs().max() == 0
    assert torch.equal(cut["z", 1][:, :, 1:], clean["z", 1][:, :, 1:])


def test_blocks_nest_and_undo_in_order(wrapped):
    prompt = oracle.prompts(wrapped)["single"]
    plain = wrapped(prompt)
    with wrapped.ablate([(0, 0)]):
        one = wrapped(prompt)
        with wrapped.ablate([(0, 1)], mode="visual_mask"), wrapped.ablate([(1, 1)]):
            assert not torch.equal(wrapped(prompt), one)
        assert torch.equal(wrapped(prompt), one)
        with wrapped.ablate([(0, 1)]):
            both = wrapped(prompt)
    assert torch.equal(wrapped(prompt), plain)
    with wrapped.ablate([(0, 0), (0, 1)]):
        assert torch.equal(wrapped(prompt), both)


def test_modes_differ(wrapped):
    prompt = oracle.prompts(wrapped)["single"]
    with wrapped.ablate([(0, 0)], mode="output_zero"):
        zero = wrapped(prompt)
    with wrapped.ablate([(0, 0)], mode="visual_mask"):
        assert not torch.allclose(wrapped(prompt), zero, atol=1e-3)


@pytest.mark.parametrize("mode", ["output_zero", "visual_mask"])
@pytest.mark.parametrize("case", ["single", "batch"])
def test_decoding_with_a_cache_equals_forwards_without(wrapped, mode, case):
    """The cut holds in every generated step, with the prompt's picture keys still in the cache."""
    prompt = oracle.prompts(wrapped)[case]
    from mmlens.model.encode import append_tokens

    with wrapped.ablate([(0, 2), (1, 5), (2, 3)], mode=mode):
        steps = wrapped.generate(prompt, max_new_tokens=4, names_filter="logits")
        grown = append_tokens(prompt.inputs, steps.tokens[:, :3].tolist(), pad_id=0)
        whole = wrapped(grown)
    for i, step in enumerate(steps.steps):
        want = whole[:, prompt.n_columns - 1 + i]
        assert torch.allclose(step["logits"][:, -1], want, atol=1e-4)


def test_the_hugging_face_model_itself_is_cut(wrapped):
    """What an evaluation harness calls."""
    prompt = oracle.prompts(wrapped)["batch"]
    inputs = wrapped.model_inputs(prompt)
    for mode in ("output_zero", "visual_mask"):
        with wrapped.ablate([(0, 0), (2, 2)], mode=mode):
            ours = wrapped.generate(prompt, max_new_tokens=4).tokens
            with torch.no_grad():
                theirs = wrapped.hf.generate(**inputs, max_new_tokens=4, do_sample=False)
                logits = wrapped.hf(**inputs).logits
            assert torch.equal(theirs[:, prompt.n_columns :], ours) and torch.equal(logits, wrapped(prompt))


def test_bfloat16_visual_mask_hides_pictures_completely(family):
    with HookedVLM.from_model(*tiny.FAMILIES[family](dtype=torch.bfloat16)) as vlm:
        for prompt in oracle.prompts(vlm).values():
            other = vlm.as_prompt({**prompt.inputs, "pixel_values": -prompt.inputs["pixel_values"]})
            everything = [(layer, head) for layer in range(3) for head in range(6)]
            rows = prompt.tokens("question")
            a = vlm.run_with_cache(prompt, "resid_post", positions=rows)[1]["resid_post", 2]
            b = vlm.run_with_cache(other, "resid_post", positions=rows)[1]["resid_post", 2]
            assert not torch.equal(a.nan_to_num(), b.nan_to_num())
            with vlm.ablate(everything, mode="visual_mask"):
                a = vlm.run_with_cache(prompt, "resid_post", positions=rows)[1]["resid_post", 2]
                b = vlm.run_with_cache(other, "resid_post", positions=rows)[1]["resid_post", 2]
            assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("heads", [[(3, 0)], [(0, 6)], [(0, -1)], {5: [0]}, ["0.1"]])
def test_heads_out_of_range(wrapped, heads, as_users):
    prompt = oracle.prompts(wrapped)["single"]
    want = wrapped(prompt)
    with pytest.raises(HeadError, match="query heads 0 to 5"), wrapped.ablate(heads):
        pass
    assert torch.equal(wrapped(prompt), want)


def test_unknown_modes(wrapped):
    with pytest.raises(OptionError, match="output_zero, visual_mask"), wrapped.ablate([(0, 0)], mode="zero"):
        pass
