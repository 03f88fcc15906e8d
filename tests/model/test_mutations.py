"""Planted faults: each must be caught by the comparison with stock transformers that the parity tests make."""

import functools

import oracle
import pytest
import tiny
import torch

from mmlens import HookedVLM
from mmlens.model import attention, sites


@pytest.fixture(params=tiny.FAMILIES)
def family(request):
    return request.param


EVERYTHING = ["attn.pattern", "attn.z", "attn.rot_q", "attn.rot_k", "attn.q", "attn.k", "attn.v", "resid_mid", "logits"]


@functools.cache
def _stock(family: str):
    """A model, its processor, a prompt's inputs, and what stock transformers computes of them."""
    model, processor = tiny.FAMILIES[family]()
    with HookedVLM.from_model(model, processor) as vlm:
        prompt = oracle.prompts(vlm)["batch"]
        inputs = vlm.model_inputs(prompt)
    with oracle.recorded(model, family) as stock:
        oracle.run(model, inputs)
    return model, processor, prompt, stock, oracle.run(model, inputs)


def _faults(family: str) -> list[str]:
    """Names of what differs between mmlens and stock, by the parity tests' own comparisons."""
    model, processor, prompt, stock, logits = _stock(family)
    with HookedVLM.from_model(model, processor) as vlm:
        _, cache = vlm.run_with_cache(prompt, EVERYTHING)
        # a pattern written back as it was read must not change the run
        echo = vlm.run_with_hooks(prompt, [("pattern", lambda t, hook: t.clone())], rows="question")
    real = prompt.inputs["attention_mask"].bool()
    found = [] if torch.allclose(echo[real], logits[real], atol=1e-4) else ["echo"]
    for name in cache:
        got = cache[name]
        if name.endswith(("hook_pattern", "hook_rot_q", "hook_rot_k")):
            q, k, _, mask, scaling, _ = stock[name.split("attn.")[0] + "calls"][0]
            want = (
                oracle.exact_pattern(q, k, mask, scaling, True)
                if "pattern" in name
                else {"q": q, "k": k}[name[-1]].transpose(1, 2)
            )
            if not torch.allclose(got.double(), want.double(), atol=2e-6):
                found.append(name)
        elif not torch.equal(got[real], stock[name][real]):
            found.append(name)
    return found


def _swap_heads(x, axis):
    order = list(range(x.shape[axis]))
    order[0], order[1] = order[1], order[0]
    return x.index_select(axis, torch.tensor(order))


def _wrap(monkeypatch, name, change):
    real = getattr(attention, name)
    monkeypatch.setattr(attention, name, lambda *args, **kwargs: change(real, *args, **kwargs))


MUTATIONS = {
    "two heads swapped in the scores": lambda m: _wrap(m, "_scores", lambda real, *a: _swap_heads(real(*a), 1)),
    "rows shifted by one": lambda m: _wrap(m, "_scores", lambda real, *a: real(*a).roll(1, 2)),
    "keys shifted by one": lambda m: _wrap(m, "_scores", lambda real, *a: real(*a).roll(1, 3)),
    "the mask lost": lambda m: m.setattr(attention, "_mask", lambda scores, allowed: scores),
    "scaling forgotten": lambda m: _wrap(m, "_scores", lambda real, *a: real(*a) * 8**0.5),
    "a wrong KV group": lambda m: _wrap(m, "_scores", lambda real, call, q, k, *rest: real(call, q, k.flip(1), *rest)),
    "part written to the wrong heads": lambda m: _wrap(
        m, "_overwrite", lambda real, out, part, heads, index: real(out, part, [(h + 1) % 6 for h in heads], index)
    ),
    "part written one row off": lambda m: _wrap(
        m, "_overwrite", lambda real, out, part, heads, index: real(out, part, heads, (index - 1).clamp(min=0))
    ),
    "q and k exchanged": lambda m: _wrap_sites(m, {"hook_q": "hook_k"}),
    "attention output read as the stream": lambda m: _wrap_sites(m, {"hook_resid_mid": "hook_attn_out"}),
}


def _wrap_sites(monkeypatch, exchange):
    """Read one name from another name's place."""
    real = sites._stack_sites

    def mutated(*args):
        found = real(*args)
        by_name = {s.name: s for s in found}
        import dataclasses

        out = []
        for site in found:
            last = site.name.rsplit(".", 1)[-1]
            other = by_name.get(site.name.replace(last, exchange.get(last, "")) if last in exchange else "")
            out.append(site if other is None else dataclasses.replace(site, access=other.access, order=other.order))
        return out

    monkeypatch.setattr(sites, "_stack_sites", mutated)


def test_without_a_fault_nothing_differs(family):
    assert _faults(family) == []


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_planted_faults_are_caught(family, mutation, monkeypatch):
    MUTATIONS[mutation](monkeypatch)
    try:
        found = _faults(family)
    except (RuntimeError, IndexError) as error:
        found = [str(error)]
    assert found, mutation


def test_a_lost_mask_function_is_caught(family, monkeypatch):
    """Without a registered mask transformers hands over None: padding would be attended to."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, attention.NAME, lambda *a, **k: None)
    model, processor = tiny.FAMILIES[family]()
    with HookedVLM.from_model(model, processor) as vlm:
        prompt = oracle.prompts(vlm)["batch"]
        logits, inputs = vlm(prompt), vlm.model_inputs(prompt)
    real = prompt.inputs["attention_mask"].bool()
    assert not torch.allclose(logits[real], oracle.run(model, inputs)[real], atol=1e-3)
