"""Idle means free and exact, again after every kind of use; close() gives the model back."""

import copy
import gc

import oracle
import pytest
import tiny
import torch
from transformers import AutoModelForImageTextToText

from mmlens import HookedVLM
from mmlens.errors import AlreadyWrappedError, ClosedError, MMLensError


@pytest.fixture(params=tiny.FAMILIES)
def family(request):
    return request.param


@pytest.fixture(params=["fp32", "bf16"])
def opened(request, family):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[request.param]
    model, processor = tiny.FAMILIES[family](dtype=dtype)
    with HookedVLM.from_model(model, processor) as vlm:
        yield vlm, tiny.FAMILIES[family](dtype=dtype)[0]


def _operations(call):
    with oracle.Operations() as seen, torch.no_grad():
        out = call()
    return out, seen.calls


def _assert_idle(vlm, stock, after, cases=("batch",)):
    prompts = oracle.prompts(vlm)
    for case in cases:
        inputs = vlm.model_inputs(prompts[case])
        want, wanted = _operations(lambda: stock(**inputs).logits)
        got, calls = _operations(lambda: vlm(prompts[case]))
        direct, direct_calls = _operations(lambda: vlm.hf(**inputs).logits)
        assert torch.equal(got, want) and torch.equal(direct, want), after
        assert direct_calls == wanted, after
        # vlm(prompt) checks its inputs first: a few comparisons of integers, then stock's own calls
        assert calls[-len(wanted) :] == wanted and len(calls) - len(wanted) < 20, after


class Mine(Exception):
    pass


def _fail(tensor, hook):
    raise Mine("kept as it is")


def _capture(vlm, prompt):
    vlm.run_with_cache(prompt, lambda name: True)


def _ablate(vlm, prompt):
    for mode in ("output_zero", "visual_mask"):
        with vlm.ablate([(0, 1), (2, 5)], mode=mode):
            assert not torch.equal(vlm(prompt), vlm.hf(**vlm.model_inputs(prompt)).logits * 0)


def _hook_error(vlm, prompt):
    for name in ("resid_mid", "vision.pattern", "pattern"):
        with pytest.raises(Mine, match="kept as it is"):
            vlm.run_with_hooks(prompt, [(name, _fail)])


def _block_error(vlm, prompt):
    with pytest.raises(ZeroDivisionError), vlm.ablate([(0, 0)], mode="visual_mask"):
        raise ZeroDivisionError


def _generate(vlm, prompt):
    vlm.generate(prompt, max_new_tokens=3, names_filter=["pattern", "vision.pattern"])


def _trace(vlm, prompt):
    with vlm.trace(prompt):
        pattern = vlm.site("blocks.1.attn.hook_pattern").read().save()
    assert pattern.shape[1] == 6


def _gradient(vlm, prompt):
    logits, cache = vlm.run_with_cache(prompt, ["z", "pattern"], grad=True)
    logits[:, -1].amax().backward()
    assert cache.grad(("z", 0)).abs().sum() > 0
    assert all(p.grad is None and p.requires_grad for p in vlm.hf.parameters())


def _stopped(vlm, prompt):
    vlm.run_with_cache(prompt, ["resid_post", "vision.pattern"], stop_at_layer=1)


def _mass(vlm, prompt):
    vlm.attention_mass(prompt, ["image", "text"])


def _splice(vlm, prompt):
    with vlm.splice("blocks.1.hook_mlp_out", torch.nn.Identity()):
        vlm(prompt)


USES = (_capture, _ablate, _hook_error, _block_error, _generate, _trace, _gradient, _stopped, _mass, _splice)


def test_idle_is_exact_and_free_on_every_prompt(opened):
    _assert_idle(*opened, "opening", ("single", "batch", "several"))


def test_idle_again_after_every_kind_of_use(opened):
    vlm, stock = opened
    prompt = oracle.prompts(vlm)["batch"]
    for use in USES:
        use(vlm, prompt)
        _assert_idle(vlm, stock, use.__name__)


def test_close_restores_everything(family):
    model, processor = tiny.FAMILIES[family]()
    with HookedVLM.from_model(model, processor) as vlm:
        inputs = vlm.model_inputs(oracle.prompts(vlm)["single"])
    oracle.run(model, inputs)  # the first forward leaves transformers' own marks (rope deltas, recorders)
    names = [n for n, _ in model.named_modules()]
    configs = {n: id(m.config) for n, m in model.named_modules() if hasattr(m, "config")}
    forwards = {n: m.__dict__.get("forward") for n, m in model.named_modules()}
    keys = {n: set(m.__dict__) for n, m in model.named_modules()}
    prompt_logits = {}
    with HookedVLM.from_model(model, processor) as vlm:
        prompts = oracle.prompts(vlm)
        for name, prompt in prompts.items():
            prompt_logits[name] = vlm.run_with_cache(prompt, ["pattern", "vision.pattern"])[0]
    assert [n for n, _ in model.named_modules()] == names
    assert {n: id(m.config) for n, m in model.named_modules() if hasattr(m, "config")} == configs
    assert {n: m.__dict__.get("forward") for n, m in model.named_modules()} == forwards
    assert {n: set(m.__dict__) for n, m in model.named_modules()} == keys
    assert model.config._attn_implementation == "sdpa"
    stock = tiny.FAMILIES[family]()[0]
    for name, prompt in prompts.items():
        inputs = vlm.model_inputs(prompt)
        got, calls = _operations(lambda: model(**inputs).logits)
        want, wanted = _operations(lambda: stock(**inputs).logits)
        assert torch.equal(got, prompt_logits[name]) and torch.equal(got, want) and calls == wanted


def test_closed_raises_and_may_be_wrapped_again(family):
    model, processor = tiny.FAMILIES[family]()
    vlm = HookedVLM.from_model(model, processor)
    prompt = oracle.prompts(vlm)["single"]
    vlm.close()
    vlm.close()
    with pytest.raises(ClosedError):
        vlm(prompt)
    for context in (lambda: vlm.ablate([(0, 0)]), lambda: vlm.hooks([])):
        with pytest.raises(ClosedError), context():
            raise AssertionError("entered")
    with pytest.raises(ClosedError):
        vlm.trace(prompt)
    with HookedVLM.from_model(model, processor) as again:
        again.run_with_cache(prompt, "pattern")


def test_a_second_wrapper_is_refused_until_close(family):
    model, processor = tiny.FAMILIES[family]()
    vlm = HookedVLM.from_model(model, processor)
    with pytest.raises(AlreadyWrappedError):
        HookedVLM.from_model(model, processor)
    vlm.run_with_cache(oracle.prompts(vlm)["single"], "pattern")
    vlm.close()


def test_a_dropped_wrapper_does_not_block_the_next(family):
    model, processor = tiny.FAMILIES[family]()
    vlm = HookedVLM.from_model(model, processor)
    prompt = oracle.prompts(vlm)["single"]
    want = vlm(prompt)
    del vlm
    gc.collect()
    with HookedVLM.from_model(model, processor) as again:
        assert torch.equal(again.run_with_cache(prompt, "pattern")[0], want)


def test_models_of_one_config_do_not_see_each_other(family):
    model, processor = tiny.FAMILIES[family]()
    torch.manual_seed(1)
    other = type(model)._from_config(model.config, attn_implementation="sdpa").eval()
    third = type(model)._from_config(model.config, attn_implementation="sdpa").eval()
    third.load_state_dict(other.state_dict())
    assert other.config is model.config
    with HookedVLM.from_model(model, processor) as a, HookedVLM.from_model(other, processor) as b:
        prompt = oracle.prompts(a)["single"]
        inputs = a.model_inputs(prompt)
        assert third.config._attn_implementation == "sdpa"
        with a.ablate([(0, 0), (1, 1)]):
            assert torch.equal(b.run_with_cache(prompt, "pattern")[0], oracle.run(third, inputs))
        want, calls = _operations(lambda: third(**inputs).logits)
        got, b_calls = _operations(lambda: b(prompt))
        assert torch.equal(want, got) and calls == b_calls[-len(calls) :]


def test_saving_writes_a_stock_model(family, tmp_path):
    model, processor = tiny.FAMILIES[family]()
    keys = set(model.state_dict())
    with HookedVLM.from_model(model, processor) as vlm:
        prompt = oracle.prompts(vlm)["single"]
        want, inputs = vlm(prompt), vlm.model_inputs(prompt)
        assert set(vlm.hf.state_dict()) == keys
        vlm.hf.save_pretrained(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(oracle.run(loaded.eval(), inputs), want)


def test_no_gradient_graph_is_kept(wrapped):
    prompt = oracle.prompts(wrapped)["single"]
    logits, cache = wrapped.run_with_cache(prompt, lambda name: True)
    assert not logits.requires_grad and not any(v.requires_grad for v in cache.values())


def test_threads_take_turns(wrapped):
    import threading

    prompt = oracle.prompts(wrapped)["single"]
    want = wrapped.run_with_cache(prompt, "pattern")[1]["pattern", 1]
    seen, failures = [], []

    def work():
        try:
            for _ in range(5):
                seen.append(wrapped.run_with_cache(prompt, ["pattern", "vision.z"])[1]["pattern", 1])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures and len(seen) == 15 and all(torch.equal(s, want) for s in seen)


@pytest.mark.parametrize("family", ["qwen3-vl", "llava-1.5"])
def test_memory_stays_flat_over_fifty_runs(wrapped):
    import psutil

    prompt = oracle.prompts(wrapped)["batch"]
    process = psutil.Process()
    sizes = []
    for _ in range(50):
        wrapped.run_with_cache(prompt, ["pattern", "resid_post", "vision.pattern"])
        wrapped.generate(prompt, max_new_tokens=2, names_filter="pattern")
        with wrapped.ablate([(0, 0)], mode="visual_mask"):
            wrapped.run_with_hooks(prompt, [("z", lambda t, hook: t * 2)])
        with wrapped.trace(prompt):
            wrapped.site("blocks.1.attn.hook_pattern").read()
        sizes.append(process.memory_info().rss)
    assert max(sizes[10:]) - sizes[10] < 5 * 2**20


def test_a_deep_copy_is_not_needed_to_keep_values(wrapped):
    prompt = oracle.prompts(wrapped)["single"]
    _, cache = wrapped.run_with_cache(prompt, ["resid_post", "resid_mid", "z"])
    before = copy.deepcopy(dict(cache))

    def wreck(tensor, hook):
        tensor.zero_()

    wrapped.run_with_hooks(prompt, [("resid_mid", wreck), ("z", wreck)])
    assert all(torch.equal(before[name], cache[name]) for name in before)


def test_every_error_is_ours():
    from mmlens import errors

    found = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(found) > 20 and all(issubclass(e, MMLensError) for e in found)
