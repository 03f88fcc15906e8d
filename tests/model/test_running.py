"""Gradients, reductions, early stops, group mass, spliced modules, generation and video: on every family."""

import oracle
import pytest
import tiny
import torch

from mmlens import HookedVLM
from mmlens.errors import (
    CacheError,
    GradientError,
    HookNotReachedError,
    HookValueError,
    OptionError,
    PictureError,
    PromptError,
)


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def vlm(family):
    with HookedVLM.from_model(*tiny.FAMILIES[family]()) as opened:
        yield opened


@pytest.fixture(scope="module")
def prompt(vlm):
    return oracle.prompts(vlm)["batch"]


def _real(prompt):
    return prompt.inputs["attention_mask"].bool()


# ---------------------------------------------------------------------- gradients
def test_gradients_equal_those_of_the_stock_model(family, vlm, prompt):
    logits, cache = vlm.run_with_cache(prompt, ["resid_pre", "mlp_out", "vision.resid_post"], grad=True)
    logits[:, -1, 7].sum().backward()
    stock = tiny.FAMILIES[family]()[0]
    inputs = vlm.model_inputs(prompt)
    inputs["pixel_values"] = inputs["pixel_values"].clone().requires_grad_()
    kept = {}
    language, _, tower, _, _ = oracle.PLACES[family]

    def keep(name):
        def hook(module, args, kwargs):
            kept[name] = args[0] if args else next(iter(kwargs.values()))
            kept[name].retain_grad()

        return hook

    stock.model.get_submodule(language).layers[1].register_forward_pre_hook(keep("text"), with_kwargs=True)
    stock.model.get_submodule(tower)[1].register_forward_pre_hook(keep("tower"), with_kwargs=True)
    stock(**inputs).logits[:, -1, 7].sum().backward()
    assert torch.allclose(cache.grad(("resid_pre", 1)), kept["text"].grad, atol=1e-6)
    want = kept["tower"].grad
    assert torch.allclose(cache.grad(("vision.resid_post", 0)).reshape(want.shape), want, atol=1e-6)
    assert torch.allclose(cache.grad("pixel_values"), inputs["pixel_values"].grad, atol=1e-6)
    assert all(p.grad is None for p in vlm.hf.parameters())


def test_a_gradient_predicts_what_a_small_edit_does(vlm, prompt):
    """Along a random direction, on every kind of writable site: the slope equals a central difference."""
    names = ["hook_embed", "q", "k", "v", "rot_q", "rot_k", "z", "pattern", "attn_out", "resid_mid", "mlp_out"]
    logits, cache = vlm.run_with_cache(prompt, names, grad=True)
    logits[:, -1, 7].sum().backward()
    layered = [n if n == "hook_embed" else (n, 1) for n in names]
    for key in layered:
        slope = cache.grad(key)
        site = cache._name(key)
        direction = torch.randn(slope.shape, generator=torch.Generator().manual_seed(0))
        step = 2e-4 / direction.norm() * max(float(cache[key].detach().norm()), 1e-3)

        def moved(sign, site=site, direction=direction, step=step):
            hook = lambda t, hook: t + sign * step * direction
            return vlm.run_with_hooks(prompt, [(site, hook)])[:, -1, 7].sum()

        got = (moved(1) - moved(-1)) / (2 * step)
        want = (slope * direction).sum()
        assert abs(float(got - want)) <= 0.05 * abs(float(want)) + 0.03 * float(slope.norm()), key


def test_gradients_of_cut_values_are_cut_alike(vlm, prompt):
    logits, cache = vlm.run_with_cache(prompt, ["z", "resid_post"], positions="question", heads=[1, 4], grad=True)
    logits[:, -1].sum().backward()
    assert cache.grad(("z", 1)).shape == cache["z", 1].shape
    whole_logits, whole = vlm.run_with_cache(prompt, ["z"], grad=True)
    whole_logits[:, -1].sum().backward()
    columns = list(prompt.tokens("question").per_example[0])
    got = cache.grad(("z", 1))[0, : len(columns)]
    assert torch.allclose(got, whole.grad(("z", 1))[0, columns][:, [1, 4]], atol=1e-6)


def test_gradients_that_are_not_there_say_why(vlm, prompt):
    _, plain = vlm.run_with_cache(prompt, ["z"])
    with pytest.raises(GradientError, match="without gradients"):
        plain.grad(("z", 0))
    logits, cache = vlm.run_with_cache(prompt, ["z", "result"], grad=True)
    with pytest.raises(GradientError, match="no gradient yet"):
        cache.grad(("z", 0))
    logits.sum().backward()
    with pytest.raises(GradientError, match="derived"):
        cache.grad(("result", 0))


# ---------------------------------------------------------------------- reductions, early stops
def test_reductions_keep_only_their_result(vlm, prompt):
    logits, cache = vlm.run_with_cache(
        prompt, ["resid_post"], reduce={"pattern": lambda p: p.amax(-1), "vision.*hook_z": lambda z: float(z.norm())}
    )
    _, whole = vlm.run_with_cache(prompt, ["pattern", "vision.z", "resid_post"])
    assert torch.equal(cache["pattern", 1], whole["pattern", 1].amax(-1))
    assert cache["vision.z", 1] == whole["vision.z", 1].norm()
    assert torch.equal(cache["resid_post", 1], whole["resid_post", 1])
    assert len(vlm.run_with_cache(prompt, reduce={"z": torch.norm})[1]) == 3
    table = cache.to_pandas()
    assert set(table["short"]) == {"attn.pattern", "vision.attn.z"}
    row = table[(table["hook"] == "blocks.2.attn.hook_pattern")].iloc[-1]
    assert row["value"] == pytest.approx(float(cache["pattern", 2][-1, -1, -1]))
    with pytest.raises(CacheError, match="only reduce"):
        cache.index(("pattern", 0))
    with pytest.raises(CacheError, match="reductions"):
        whole.to_pandas()
    with pytest.raises(HookValueError, match="returned str"):
        vlm.run_with_cache(prompt, reduce={"z": lambda z: "x"})


def test_stopping_in_front_of_a_layer_gives_its_input(vlm, prompt):
    _, whole = vlm.run_with_cache(prompt, ["resid_pre", "resid_post", "vision.z"])
    for layer in (0, 2, -1):
        stream, cache = vlm.run_with_cache(prompt, ["resid_post", "vision.z"], stop_at_layer=layer)
        at = layer % 3
        assert torch.equal(stream, whole["resid_pre", at])
        assert set(cache) == {f"blocks.{i}.hook_resid_post" for i in range(at)} | {
            f"vision.blocks.{i}.attn.hook_z" for i in range(3)
        }
        assert all(torch.equal(cache[n], whole[n]) for n in cache)
    assert torch.equal(vlm.run_with_cache(prompt, [], stop_at_layer=3)[0], whole["resid_post", 2])
    with pytest.raises(HookNotReachedError, match="stops in front of block 1"):
        vlm.run_with_cache(prompt, "blocks.2.hook_resid_pre", stop_at_layer=1)
    with pytest.raises(OptionError, match="stop_at_layer"):
        vlm.run_with_cache(prompt, [], stop_at_layer=4)


# ---------------------------------------------------------------------- group mass
def test_group_mass_is_the_patterns_sum(vlm, prompt):
    groups = ["image", "text-question", prompt.tokens("question")]
    mass = vlm.attention_mass(prompt, groups)
    _, cache = vlm.run_with_cache(prompt, "pattern")
    assert mass.values.shape == (3, 2, 6, prompt.n_columns, 3) and mass.groups[0] == "image"
    for layer in range(3):
        for g, group in enumerate(groups):
            for i, columns in enumerate(prompt.tokens(group).per_example):
                want = cache["pattern", layer][i][:, :, list(columns)].sum(-1)
                assert torch.allclose(mass.values[layer, i, :, :, g], want, atol=2e-6), (layer, g)
    some = vlm.attention_mass(prompt, groups, rows="question")
    for i in range(2):
        kept = some.positions[i] >= 0
        assert torch.allclose(some.values[:, i, :, kept], mass.values[:, i, :, some.positions[i][kept]], atol=2e-6)
    table = some.to_pandas()
    assert len(table) == 3 * 6 * 3 and table["mass"].between(0, 1.00001).all()


def test_group_mass_builds_no_square_matrix(vlm):
    prompt = vlm.prompt("what color is the star? " * 60, images=[tiny.picture()])
    n = prompt.n_columns
    vlm(prompt)
    with oracle.Operations() as plain:
        vlm(prompt)
    with oracle.Operations() as seen:
        vlm.attention_mass(prompt, ["image"])
    assert n > 250 and seen.largest <= plain.largest  # d_vocab x n is the largest either way


@pytest.mark.parametrize("mode", ["visual_mask", "output_zero"])
def test_group_mass_sees_interventions(vlm, prompt, mode):
    plain = vlm.attention_mass(prompt, ["image", "text"]).values
    with vlm.ablate([(1, 2)], mode=mode):
        cut = vlm.attention_mass(prompt, ["image", "text"]).values
        rows = vlm.attention_mass(prompt, ["image", "text"], rows="question")
    question = list(prompt.tokens("question").per_example[0])
    assert torch.allclose(cut[0], plain[0], atol=2e-6)
    assert (cut[1, 0, 2, question, 0] == 0).all() == (mode == "visual_mask")
    assert torch.allclose(cut[1, 0][:, question], rows.values[1, 0][:, : len(question)], atol=2e-6)


def test_group_mass_needs_groups(vlm, prompt):
    with pytest.raises(OptionError, match="groups"):
        vlm.attention_mass(prompt, [])


# ---------------------------------------------------------------------- spliced modules
def test_a_spliced_identity_changes_nothing(vlm, prompt):
    want = vlm(prompt)
    for name in ("resid_post", "z", "mlp_out", "vision.resid_mid", "vision.attn_out", "hook_embed"):
        for error_term in (False, True):
            with vlm.splice(name, torch.nn.Identity(), error_term=error_term):
                assert torch.equal(vlm(prompt), want), (name, error_term)


def test_a_spliced_module_stands_in_for_the_value(vlm, prompt):
    zero = lambda x: torch.zeros_like(x)
    with vlm.splice("blocks.1.hook_mlp_out", zero):
        cut = vlm(prompt)
    assert torch.equal(cut, vlm.run_with_hooks(prompt, [("blocks.1.hook_mlp_out", lambda t, hook: t * 0)]))
    with vlm.splice("blocks.1.hook_mlp_out", zero, error_term=True):
        assert torch.equal(vlm(prompt), vlm(prompt)) and torch.allclose(
            vlm(prompt), vlm.hf(**vlm.model_inputs(prompt)).logits
        )
    with (
        pytest.raises(HookValueError, match="returned shape"),
        vlm.splice("blocks.1.hook_mlp_out", lambda x: x[..., :1]),
    ):
        vlm(prompt)


def test_gradients_go_through_a_spliced_module(vlm, prompt):
    module = torch.nn.Linear(vlm.d_model, vlm.d_model)
    with vlm.splice("blocks.1.hook_mlp_out", module, error_term=True):
        logits, _ = vlm.run_with_cache(prompt, [], grad=True)
    logits[:, -1].amax().backward()
    assert module.weight.grad.abs().sum() > 0


def test_wrong_kinds_are_named(vlm, prompt, as_users):
    with pytest.raises(OptionError, match="reduce="):
        vlm.run_with_cache(prompt, reduce=["z"])
    with pytest.raises(OptionError, match="encode_decode"), vlm.splice("blocks.1.hook_mlp_out", 3):
        raise AssertionError("entered")


# ---------------------------------------------------------------------- generation and raw traces
def test_generating_with_capture_gives_the_same_tokens(vlm, prompt):
    plain = vlm.hf.generate(**vlm.model_inputs(prompt), max_new_tokens=4, do_sample=False)[:, prompt.n_columns :]
    run = vlm.generate(prompt, max_new_tokens=4, names_filter=["pattern", "resid_post", "vision.z"])
    assert torch.equal(run.tokens, plain) and len(run.steps) == run.tokens.shape[1]
    sums = run.steps[1]["pattern", 1].sum(-1)
    assert run.steps[1]["pattern", 1].shape[2:] == (1, prompt.n_columns + 1) or vlm.family.name == "gemma3"
    assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)


def test_a_raw_trace_has_blocks_and_sites_while_generating(vlm, prompt):
    _, cache = vlm.run_with_cache(prompt, ["vision.resid_post", "resid_post"])
    with vlm.trace(prompt):
        tower = vlm.vision.blocks[1].output.save()
        stream = vlm.blocks[2].output.save()
    assert torch.equal(
        (tower[0] if isinstance(tower, tuple) else tower).reshape(-1), cache["vision.resid_post", 1].flatten()
    )
    assert torch.equal(stream[0] if isinstance(stream, tuple) else stream, cache["resid_post", 2])
    seen = []
    with vlm.trace(prompt, max_new_tokens=3) as tracer:
        for _ in tracer.iter[:3]:
            seen.append(vlm.site("blocks.1.attn.hook_z").read().shape[1])
    with pytest.raises(HookNotReachedError, match="outside a trace"):
        vlm.blocks  # noqa: B018
    with pytest.raises(OptionError, match="max_new_tokens"):
        vlm.trace(prompt, max_new_tokens=0)


# ---------------------------------------------------------------------- video
def test_videos_have_frames(family, vlm):
    if family not in tiny.HAS_VIDEO:
        with pytest.raises((PromptError, PictureError)):
            vlm.prompt("what color is the star?", videos=[tiny.video()])
        return
    frames = tiny.video()
    prompt = vlm.prompt("what color is the star?", videos=[frames])
    _, cache = vlm.run_with_cache(prompt)
    parts = [set(prompt.tokens(f"frame:{i}").positions) for i in range(4)]
    assert set.union(*parts) <= set(prompt.tokens("image").positions) and not parts[0] & parts[3]
    error = cache.decompose_resid().sum(0) - cache["resid_post", -1]
    assert error.norm() <= 1e-6 * cache["resid_post", -1].norm()
    assert torch.equal(vlm(prompt), vlm.hf(**vlm.model_inputs(prompt)).logits)
    # a frame's own patches and tokens: change one frame, and the others' embeddings stay where towers see one frame
    other = vlm.prompt("what color is the star?", videos=[[*frames[:3], tiny.picture(seed=99)]])
    _, moved = vlm.run_with_cache(other, ["vision.resid_pre", "hook_embed"])
    for frame in (0, 3):
        same = torch.equal(
            cache.grid("hook_embed", view=f"frame:{frame}"), moved.grid("hook_embed", view=f"frame:{frame}")
        )
        patches = [c.grid(("vision.resid_pre", 0), view=f"frame:{frame}") for c in (cache, moved)]
        assert same == torch.equal(*patches) == (frame == 0)


def test_pictures_and_videos_do_not_mix(vlm):
    with pytest.raises(PromptError, match=r"in one prompt|takes no videos"):
        vlm.prompt("what color is the star?", images=[tiny.picture()], videos=[tiny.video()])
