"""Writes take effect, everywhere and only where they should; hook functions mean what TransformerLens's mean."""

import oracle
import pytest
import tiny
import torch

from mmlens import HookedVLM
from mmlens.errors import HookValueError, ReadOnlyHookError


@pytest.fixture(params=tiny.FAMILIES)
def family(request):
    return request.param


def _ramp(tensor, hook):
    """Values that vary along the last axis."""
    ramp = torch.linspace(-1, 1, tensor.shape[-1]).to(tensor.dtype)
    return ramp.expand_as(tensor).clone()


@pytest.mark.parametrize("case", ["single", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_writable_used_site_reaches_the_logits(family, case, dtype):
    with HookedVLM.from_model(*tiny.FAMILIES[family](dtype=dtype)) as vlm:
        prompt = oracle.prompts(vlm)[case]
        clean = vlm(prompt)
        for site in vlm.sites:
            if not site.writable:
                continue
            logits = vlm.run_with_hooks(prompt, [(site.name, _ramp)])
            last = (logits[:, -1] - clean[:, -1]).abs().max()
            anywhere = (logits - clean).abs().max()
            assert (anywhere > 0) == site.used, site.name
            assert not site.used or site.layer is None or last > 0, site.name
        assert torch.equal(vlm(prompt), clean)


def test_unused_sites_are_the_blocks_behind_the_feature_layer(family):
    with HookedVLM.from_model(*tiny.FAMILIES[family]()) as vlm:
        unused = {s.layer for s in vlm.sites if not s.used}
    assert unused == ({2} if family in ("llava-1.5", "llava-next") else set())


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", "llava-1.5", "internvl", "gemma3"])
def test_in_place_and_returned_edits_agree_on_every_writable_site(wrapped):
    prompt = oracle.prompts(wrapped)["batch"]

    def in_place(tensor, hook):
        tensor.mul_(0.5)

    def returned(tensor, hook):
        return tensor * 0.5

    for site in wrapped.sites:
        if site.writable:
            a = wrapped.run_with_hooks(prompt, [(site.name, in_place)])
            b = wrapped.run_with_hooks(prompt, [(site.name, returned)])
            assert torch.equal(a, b), site.name


def test_looking_without_an_edit_changes_nothing(wrapped):
    prompt = oracle.prompts(wrapped)["batch"]
    seen = []
    logits = wrapped.run_with_hooks(prompt, [(lambda name: True, lambda tensor, hook: seen.append(hook.name))])
    assert torch.equal(logits, wrapped(prompt))
    assert seen == wrapped.hook_names("*")


def test_points_tell_name_and_layer(wrapped):
    told = []
    hooks = [
        ("resid_post", lambda t, hook: told.append((hook.name, hook.layer()))),
        ("hook_embed", lambda t, hook: told.append(hook.layer())),
    ]
    wrapped.run_with_hooks(oracle.prompts(wrapped)["single"], hooks)
    assert told == [None] + [(f"blocks.{i}.hook_resid_post", i) for i in range(3)]


def test_hooks_run_in_model_order_whatever_order_they_are_given_in(wrapped):
    order = []
    note = lambda t, hook: order.append(hook.name)
    names = ["hook_logits", "blocks.2.attn.hook_z", "vision.blocks.0.hook_resid_pre", "blocks.0.hook_resid_mid"]
    wrapped.run_with_hooks(oracle.prompts(wrapped)["single"], [(n, note) for n in names])
    assert order == [names[2], names[3], names[1], names[0]]


def test_resid_mid_write_reaches_the_residual_branch(wrapped):
    """Replacing a norm's input alone leaves the stream behind it as it was."""
    prompt = oracle.prompts(wrapped)["single"]
    zero = lambda t, hook: torch.zeros_like(t)
    for prefix in ("", "vision."):
        seen = {}
        keep = lambda t, hook: seen.__setitem__(hook.name, t.clone())
        n = f"{prefix}blocks.1."
        wrapped.run_with_hooks(
            prompt, [(n + "hook_resid_mid", zero), (n + "hook_mlp_out", keep), (n + "hook_resid_post", keep)]
        )
        assert torch.equal(seen[n + "hook_resid_post"], seen[n + "hook_mlp_out"])


@pytest.mark.parametrize("point", ["attn_scores", "pattern"])
def test_editing_rows_of_heads_leaves_everything_else_exactly(wrapped, point):
    prompt = oracle.prompts(wrapped)["batch"]
    clean = wrapped.run_with_cache(prompt, "z")[1]
    rows = prompt.tokens("question")

    def flip(tensor, hook):
        return tensor.flip(-1) if point == "pattern" else torch.where(tensor.isfinite(), -tensor, tensor)

    seen = {}
    wrapped.run_with_hooks(
        prompt,
        [(f"blocks.1.attn.hook_{point}", flip), ("blocks.1.attn.hook_z", lambda t, hook: seen.update(z=t.clone()))],
        rows=rows,
        heads={1: [1, 4]},
    )
    touched = torch.zeros(2, prompt.n_columns, 6, dtype=torch.bool)
    for i, columns in enumerate(rows.per_example):
        for c in columns:
            touched[i, c, [1, 4]] = True
    # z itself is cut to the same heads in this call
    assert seen["z"].shape[2] == 2
    other = wrapped.run_with_cache
    with wrapped.hooks([(f"blocks.1.attn.hook_{point}", flip)], rows=rows, heads={1: [1, 4]}):
        z = other(prompt, "z")[1]["z", 1]
    same = (z == clean["z", 1]).all(-1)
    assert same[~touched].all() and not same[touched].any()


def test_writing_a_pattern_equals_weighting_the_values(wrapped):
    prompt = oracle.prompts(wrapped)["single"]
    n = prompt.n_columns
    uniform = torch.tril(torch.ones(n, n)) / torch.arange(1, n + 1)[:, None]
    with wrapped.hooks([("blocks.1.attn.hook_pattern", lambda t, hook: uniform.expand_as(t))]):
        _, cache = wrapped.run_with_cache(prompt, ["z", "v", "pattern"])
    v = cache["v", 1].repeat_interleave(3, 2)
    want = torch.einsum("qk,bkhd->bqhd", uniform, v)
    assert torch.allclose(cache["z", 1], want, atol=1e-6)
    assert torch.equal(cache["pattern", 1], uniform.expand(1, 6, n, n))


def test_scores_edit_is_a_knock_out_of_the_values(wrapped):
    """-inf in the scores equals no weight in the pattern, renormalised."""
    prompt = oracle.prompts(wrapped)["batch"]
    image = prompt.inputs["input_ids"] == prompt.config.image_token_id

    def hide(tensor, hook):
        return tensor.masked_fill(image[:, None, None, :], float("-inf"))

    with wrapped.hooks([("blocks.0.attn.hook_attn_scores", hide)]):
        _, cut = wrapped.run_with_cache(prompt, ["pattern", "z"])
    _, clean = wrapped.run_with_cache(prompt, "pattern")
    want = clean["pattern", 0].masked_fill(image[:, None, None, :], 0)
    want = want / want.sum(-1, keepdim=True).clamp(min=1e-20)
    question = prompt.tokens("question")
    for i, columns in enumerate(question.per_example):
        c = list(columns)
        assert torch.allclose(cut["pattern", 0][i][:, c], want[i][:, c], atol=2e-6)
        assert not torch.allclose(cut["pattern", 0][i][:, c], clean["pattern", 0][i][:, c], atol=1e-2)


def test_k_and_v_writes_act_through_their_group_only(wrapped):
    prompt = oracle.prompts(wrapped)["single"]
    clean = wrapped.run_with_cache(prompt, "z")[1]["z", 1]

    def first_group(tensor, hook):
        tensor[:, :, 0] = 0

    for letter in "kv":
        with wrapped.hooks([(f"blocks.1.attn.hook_{letter}", first_group)]):
            z = wrapped.run_with_cache(prompt, "z")[1]["z", 1]
        assert torch.equal(z[:, :, 3:], clean[:, :, 3:]) and not torch.equal(z[:, :, :3], clean[:, :, :3])


def test_context_hooks_nest_and_come_before_the_calls_own(wrapped):
    prompt = oracle.prompts(wrapped)["single"]
    double = lambda t, hook: t * 2
    seen = {}
    with wrapped.hooks([("blocks.0.hook_resid_post", double)]):
        with wrapped.hooks([("blocks.0.hook_resid_post", double)]):
            wrapped.run_with_hooks(prompt, [("blocks.0.hook_resid_post", lambda t, hook: seen.update(x=t.clone()))])
    plain = wrapped.run_with_cache(prompt, "resid_post")[1]["resid_post", 0]
    assert torch.equal(seen["x"], plain * 4)


def test_writes_reach_generation(wrapped):
    prompt = oracle.prompts(wrapped)["batch"]
    plain = wrapped.generate(prompt, max_new_tokens=4).tokens
    with wrapped.hooks([("hook_logits", lambda t, hook: t.flip(-1))]):
        flipped = wrapped.generate(prompt, max_new_tokens=4).tokens
    assert not torch.equal(plain, flipped)


def test_read_only_sites_refuse(wrapped):
    prompt = oracle.prompts(wrapped)["single"]
    for name in ("blocks.0.attn.hook_result", "ln_final.hook_scale", "vision.blocks.1.ln1.hook_scale"):
        with pytest.raises(ReadOnlyHookError, match="derived"):
            wrapped.run_with_hooks(prompt, [(name, lambda t, hook: t * 2)])


@pytest.mark.parametrize("value", [3, "x", torch.zeros(2, 2)], ids=["int", "text", "shape"])
def test_wrong_return_values_are_named(wrapped, value, as_users):
    with pytest.raises(HookValueError, match=r"blocks\.1\.attn\.hook_z"):
        wrapped.run_with_hooks(oracle.prompts(wrapped)["single"], [("blocks.1.attn.hook_z", lambda t, hook: value)])


def test_trace_reads_and_writes_sites(wrapped):
    prompt = oracle.prompts(wrapped)["single"]
    _, cache = wrapped.run_with_cache(prompt, ["pattern", "vision.pattern", "logits"])
    with wrapped.trace(prompt):
        seen = wrapped.site("vision.blocks.1.attn.hook_pattern").read().save()
        pattern = wrapped.site("blocks.1.attn.hook_pattern").read().save()
        wrapped.site("blocks.2.hook_resid_post").write(torch.zeros(1, prompt.n_columns, wrapped.d_model))
        logits = wrapped.site("hook_logits").read().save()
    assert torch.equal(pattern, cache["pattern", 1]) and torch.equal(seen, cache["vision.pattern", 1])
    assert logits.abs().max() < cache["logits"].abs().max() and not logits.requires_grad


def test_trace_refuses_hooks_that_it_would_not_run(wrapped):
    from mmlens.errors import OptionError

    with pytest.raises(OptionError, match="trace"), wrapped.hooks([("hook_logits", lambda t, hook: t * 0)]):
        wrapped.trace(oracle.prompts(wrapped)["single"])


def test_wrong_heads_of_hooks_raise_at_once(wrapped):
    from mmlens.errors import HeadError

    with pytest.raises(HeadError), wrapped.hooks([("z", lambda t, hook: None)], heads=[99]):
        raise AssertionError("entered")


def test_trace_out_of_order_is_explained(wrapped):
    from mmlens.errors import HookNotReachedError

    with pytest.raises(HookNotReachedError, match="order"), wrapped.trace(oracle.prompts(wrapped)["single"]):
        wrapped.site("blocks.2.hook_resid_post").read()
        wrapped.site("blocks.0.hook_resid_post").read()
