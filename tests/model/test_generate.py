"""Generation with capture says the same, and every step's cache is right."""

import oracle
import pytest
import tiny
import torch

from mmlens import HookedVLM
from mmlens.errors import OptionError, TokenGroupError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", ["single", "batch"])
def test_capture_gives_the_same_tokens_as_stock(family, case, dtype):
    wrapped = HookedVLM.from_model(*tiny.FAMILIES[family](dtype=dtype))
    prompt = oracle.prompts(wrapped)[case]
    generation = wrapped.generate(prompt, max_new_tokens=5, names_filter=["pattern", "resid_post", "vision.z", "rot_k"])
    inputs = wrapped.model_inputs(prompt)
    wrapped.close()
    with torch.no_grad():
        stock = wrapped.hf.generate(**inputs, max_new_tokens=5, do_sample=False)
    assert torch.equal(generation.tokens, stock[:, prompt.n_columns :])
    assert len(generation.steps) == generation.tokens.shape[1]
    assert len(generation.text) == len(prompt)


def test_steps_hold_one_new_row_over_the_whole_cache(wrapped):
    prompt = oracle.prompts(wrapped)["batch"]
    generation = wrapped.generate(
        prompt, max_new_tokens=4, names_filter=["pattern", "rot_k", "vision.z", "resid_post"], rows="last", heads=[1, 2]
    )
    n = prompt.n_columns
    first, *later = generation.steps
    assert first["pattern", 0].shape == (2, 2, 1, n) and "vision.blocks.0.attn.hook_z" in first
    for i, step in enumerate(later, 1):
        assert step["pattern", 0].shape == (2, 2, 1, n + i)
        assert step["rot_k", 0].shape[1] == n + i and step["resid_post", 2].shape[1] == 1
        assert (step["pattern", 1].sum(-1) - 1).abs().max() < 1e-5
        assert "vision.blocks.0.attn.hook_z" not in step


def test_step_patterns_equal_one_forward_over_everything(wrapped):
    prompt = oracle.prompts(wrapped)["single"]
    generation = wrapped.generate(prompt, max_new_tokens=3, names_filter="pattern")
    from mmlens.model.encode import append_tokens

    grown = append_tokens(prompt.inputs, [generation.tokens[0, :2].tolist()], pad_id=0)
    _, cache = wrapped.run_with_cache(grown, "pattern")
    n = prompt.n_columns
    for step in (1, 2):
        for layer in range(3):
            want = cache["pattern", layer][:, :, n + step - 1, : n + step]
            assert torch.allclose(generation.steps[step]["pattern", layer][:, :, 0], want, atol=2e-5)


def test_nothing_asked_keeps_no_steps(wrapped):
    assert wrapped.generate(oracle.prompts(wrapped)["single"], max_new_tokens=2).steps == []


def test_a_forced_answer_is_not_continued(wrapped):
    bare = wrapped.prompt("what color is the star?", images=[tiny.picture()])
    forced = wrapped.prompt("what color is the star?", images=[tiny.picture()], answer="red and blue")
    assert forced.n_columns == bare.n_columns + 2
    assert torch.equal(
        wrapped.generate(bare, max_new_tokens=3).tokens, wrapped.generate(forced, max_new_tokens=3).tokens
    )


def test_groups_by_column_are_refused_where_columns_move(wrapped):
    batch = wrapped.prompt(
        list(oracle.QUESTIONS),
        images=[[tiny.picture()], [tiny.picture()]],
        subject=["star", "square"],
        answer=["red", "red and blue"],
    )
    with pytest.raises(TokenGroupError, match="name expression"):
        wrapped.generate(batch, max_new_tokens=1, names_filter="pattern", rows=batch.tokens("subject"))
    steps = wrapped.generate(batch, max_new_tokens=1, names_filter="pattern", rows="subject").steps
    bare = batch.unforced()
    want = wrapped.run_with_cache(bare, "pattern", rows="subject")[1]
    assert torch.allclose(steps[0]["pattern", 1], want["pattern", 1], atol=1e-5)
    assert steps[0].index(("pattern", 1)).positions.tolist() == [list(p) for p in bare.tokens("subject").per_example]


def test_every_step_has_a_cache_that_knows_its_column(wrapped):
    prompt = oracle.prompts(wrapped)["batch"]
    steps = wrapped.generate(prompt, max_new_tokens=3, names_filter=["vision.z"]).steps
    assert [len(s) for s in steps] == [3, 0, 0]
    steps = wrapped.generate(prompt, max_new_tokens=3, names_filter=["pattern", "resid_post"], rows="question").steps
    for i in (1, 2):
        assert steps[i].index(("pattern", 0)).positions.tolist() == [[prompt.n_columns + i - 1]] * 2
        assert steps[i].index(("resid_post", 0)).positions.tolist() == [[prompt.n_columns + i - 1]] * 2
        with pytest.raises(TokenGroupError, match="first step"):
            steps[i].grid(("resid_post", 0))


def test_none_captures_nothing(wrapped):
    assert wrapped.generate(oracle.prompts(wrapped)["single"], max_new_tokens=2, names_filter=None).steps == []


def test_forced_answers_keep_roles_and_padding(wrapped):
    prompt = oracle.prompts(wrapped)["batch"]
    seen = []
    with wrapped.hooks([("blocks.0.attn.hook_pattern", lambda t, hook: seen.append(t.shape))], rows="subject"):
        hooked = wrapped.answer_logprobs(prompt, ["red", "red and blue"])
    assert torch.equal(hooked, wrapped.answer_logprobs(prompt, ["red", "red and blue"])) and len(seen) == 3
    wider = {
        k: torch.nn.functional.pad(v, (3, 0)) if v.shape == prompt.inputs["input_ids"].shape else v
        for k, v in prompt.inputs.items()
    }
    assert torch.allclose(
        wrapped.answer_logprobs(wider, ["red", "blue"]), wrapped.answer_logprobs(prompt, ["red", "blue"]), atol=1e-5
    )


def test_early_stop_ends_the_steps(wrapped):
    prompt = oracle.prompts(wrapped)["single"]
    end = wrapped.tokenizer.eos_token_id

    def stop(logits, hook):
        logits[..., end] = 1e4

    with wrapped.hooks([("hook_logits", stop)]):
        generation = wrapped.generate(prompt, max_new_tokens=6, names_filter="resid_post")
    assert generation.tokens.tolist() == [[end]] and len(generation.steps) == 1


def test_zero_tokens_is_refused(wrapped):
    with pytest.raises(OptionError):
        wrapped.generate(oracle.prompts(wrapped)["single"], max_new_tokens=0)


@pytest.mark.parametrize("case", ["single", "batch"])
def test_answer_logprobs_are_the_teacher_forced_sums(wrapped, case):
    prompt = oracle.prompts(wrapped)[case]
    answers = ["red", "red and blue", "0123"]
    got = wrapped.answer_logprobs(prompt, answers)
    for i in range(len(prompt)):
        one = prompt[i]
        for j, answer in enumerate(answers):
            ids = wrapped.to_tokens(answer)[0]
            from mmlens.model.encode import append_tokens

            grown = append_tokens(one.inputs, [ids.tolist()], pad_id=0)
            logits = wrapped(grown)[0].log_softmax(-1)
            n = one.n_columns
            want = sum(logits[n - 1 + k, t] for k, t in enumerate(ids))
            assert torch.allclose(got[i, j], want, atol=2e-4)


def test_answer_logprobs_follow_interventions(wrapped):
    prompt = oracle.prompts(wrapped)["single"]
    plain = wrapped.answer_logprobs(prompt, ["red", "blue"])
    with wrapped.ablate([(0, 0), (1, 1), (2, 2)]):
        cut = wrapped.answer_logprobs(prompt, ["red", "blue"])
    assert not torch.allclose(plain, cut)


@pytest.mark.parametrize("answers", [[], [""], ["red", ""]])
def test_empty_answers_are_refused(wrapped, answers):
    with pytest.raises(OptionError):
        wrapped.answer_logprobs(oracle.prompts(wrapped)["single"], answers)
