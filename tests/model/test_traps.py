"""The traps that these families set, one test each."""

import oracle
import pytest
import tiny
import torch

from mmlens import HookedVLM


def test_llava_states_recorded_by_transformers_do_not_hide_writes():
    """After its first forward transformers records tower states by a hook of its own; writes must still act."""
    with HookedVLM.from_model(*tiny.llava_1_5()) as vlm:
        prompt = oracle.prompts(vlm)["single"]
        vlm(prompt)
        clean = vlm(prompt)
        cut = vlm.run_with_hooks(prompt, [("vision.blocks.1.hook_resid_post", lambda t, hook: t * 0)])
        assert (cut - clean).abs().max() > 0.1


def test_qwen_tower_is_one_packed_call_only_while_it_is_looked_into():
    model, processor = tiny.qwen3_vl()
    with HookedVLM.from_model(model, processor) as vlm:
        prompt = oracle.prompts(vlm)["batch"]
        _, cache = vlm.run_with_cache(prompt, ["vision.pattern", "vision.rot_q"])
        lengths, pictures = cache.segments("vision.blocks.0.attn.hook_pattern")
        assert lengths == (48, 80) and pictures == (0, 1)
        assert cache["vision.pattern", 0].shape == (2, 3, 80, 80)
        assert cache["vision.rot_q", 0].shape == (1, 128, 3, 8)
        assert cache["vision.pattern", 0][0, :, 48:].abs().sum() == 0
        assert "flash" not in model.config.vision_config._attn_implementation
        # writing one picture's pattern leaves the other picture's rows as they were, to rounding
        clean = vlm.run_with_cache(prompt, "vision.z")[1]["vision.z", 1]

        def flatten(t, hook):
            t[0] = 1 / 48

        with vlm.hooks([("vision.blocks.1.attn.hook_pattern", flatten)]):
            z = vlm.run_with_cache(prompt, "vision.z")[1]["vision.z", 1]
        assert torch.allclose(z[:, 48:], clean[:, 48:], atol=1e-6)
        assert not torch.allclose(z[:, :48], clean[:, :48], atol=1e-2)


def test_packed_tower_logits_are_bitwise_those_of_the_plain_calls():
    with HookedVLM.from_model(*tiny.qwen3_vl()) as vlm:
        for prompt in oracle.prompts(vlm).values():
            assert torch.equal(vlm.run_with_cache(prompt, "vision.attn_scores")[0], vlm(prompt))


def test_deepstack_that_contributes_nothing_would_be_noticed():
    """Default indexes on a shallow tower silently give none."""
    with HookedVLM.from_model(*tiny.qwen3_vl()) as vlm:
        _, cache = vlm.run_with_cache(oracle.prompts(vlm)["single"], ["deepstack_in", "projector.deepstack.*"])
        assert [n for n in cache if "deepstack_in" in n] == ["blocks.0.hook_deepstack_in", "blocks.1.hook_deepstack_in"]
        for i in range(2):
            image = list(cache.prompt.tokens("image").positions)
            assert torch.equal(cache["deepstack_in", i][0, image], cache[f"projector.deepstack.{i}.hook_out"][0])


def test_saved_values_survive_later_in_place_edits(wrapped):
    prompt = oracle.prompts(wrapped)["single"]

    def zero(t, hook):
        t.zero_()

    with wrapped.hooks([("blocks.1.hook_resid_mid", zero)]):
        _, cache = wrapped.run_with_cache(prompt, ["attn_out", "resid_pre", "resid_mid"])
    assert cache["attn_out", 1].abs().max() > 0 and cache["resid_pre", 1].abs().max() > 0
    assert cache["resid_mid", 1].abs().max() == 0


def test_key_value_heads_keep_their_own_count(wrapped):
    _, cache = wrapped.run_with_cache(oracle.prompts(wrapped)["single"], ["q", "k", "v", "rot_q", "rot_k"], heads=[5])
    assert [cache[n, 0].shape[2] for n in ("q", "rot_q", "k", "v", "rot_k")] == [1, 1, 2, 2, 2]


def test_q_is_the_projection_and_rot_q_is_not(wrapped):
    _, cache = wrapped.run_with_cache(oracle.prompts(wrapped)["single"], ["q", "rot_q"])
    assert (cache["q", 1] - cache["rot_q", 1]).abs().max() > 0.1


def test_left_padding_changes_logits_by_rounding_only(wrapped):
    batch = oracle.prompts(wrapped)["batch"]
    logits = wrapped(batch)
    for i in range(2):
        alone = wrapped(batch[i])
        assert torch.allclose(logits[i, -alone.shape[1] :], alone[0], atol=2e-5)


def test_raster_grid_undoes_merge_groups(family):
    """Each patch lands where a picture that lights one patch after another says it should."""
    with HookedVLM.from_model(*tiny.FAMILIES[family]()) as vlm:
        size = {"qwen3-vl": (24, 16), "llava-1.5": (28, 28)}[family]
        patch = {"qwen3-vl": 4, "llava-1.5": 7}[family]
        import numpy as np

        rows, cols = size[1] // patch, size[0] // patch
        base = np.zeros((size[1], size[0], 3), np.uint8)
        dark = vlm.run_with_cache(
            vlm.prompt("what", images=[base]), ["vision.blocks.0.hook_resid_pre", "projector.out"]
        )[1]
        lit_grid = torch.zeros(rows, cols)
        for r in range(rows):
            for c in range(cols):
                lit = base.copy()
                lit[r * patch : (r + 1) * patch, c * patch : (c + 1) * patch] = 255
                _, cache = vlm.run_with_cache(vlm.prompt("what", images=[lit]), "vision.blocks.0.hook_resid_pre")
                change = (
                    cache.grid("vision.blocks.0.hook_resid_pre") - dark.grid("vision.blocks.0.hook_resid_pre")
                ).norm(dim=-1)
                assert change.argmax() == r * cols + c
                lit_grid += change > 1e-3
        assert (lit_grid == 1).all()
        side = {"qwen3-vl": (2, 3), "llava-1.5": (4, 4)}[family]
        assert dark.grid("projector.out").shape[:2] == side


def test_grid_of_the_decoder_is_the_picture_positions(wrapped):
    prompt = oracle.prompts(wrapped)["batch"]
    _, cache = wrapped.run_with_cache(prompt, ["resid_post", "projector.out", "hook_embed"])
    for image in range(2):
        grid = cache.grid("hook_embed", image=image)
        assert torch.equal(grid, cache.grid("projector.out", image=image))


@pytest.mark.parametrize("variant", ["softcap", "s_aux"])
def test_attention_variants_are_refused_not_ignored(wrapped, variant):
    from mmlens.errors import UnsupportedAttentionError
    from mmlens.model.attention import _Call

    call = _Call(torch.nn.Module(), None, 0.0, None, None, {variant: 1.0})
    with pytest.raises(UnsupportedAttentionError, match=variant):
        call.refuse_unknown()


def test_layer_scale_is_part_of_what_is_added():
    """InternVL multiplies each sublayer's output before adding it: the module's own output is not the contribution."""
    model, processor = tiny.internvl()
    with HookedVLM.from_model(model, processor) as vlm:
        prompt = oracle.prompts(vlm)["single"]
        _, cache = vlm.run_with_cache(prompt, ["vision.attn_out", "vision.resid_pre", "vision.resid_mid"])
        with vlm.trace(prompt):
            own = vlm.vision.blocks[1].attention.output.save()
        added = cache["vision.attn_out", 1]
        assert torch.equal(cache["vision.resid_pre", 1] + added, cache["vision.resid_mid", 1])
        assert not torch.allclose(own[0], added, atol=1e-2)
        double = vlm.run_with_hooks(prompt, [("vision.blocks.1.hook_attn_out", lambda t, hook: t * 2)])
        with torch.no_grad():
            model.model.vision_tower.encoder.layer[1].lambda_1.mul_(2)
        assert torch.allclose(double, vlm(prompt), atol=1e-5)


def test_what_gemma3_adds_is_behind_its_post_norms():
    model, processor = tiny.gemma3()
    with HookedVLM.from_model(model, processor) as vlm:
        prompt = oracle.prompts(vlm)["single"]
        _, cache = vlm.run_with_cache(prompt, ["attn_out", "mlp_out", "z"])
        with vlm.trace(prompt):
            attention = vlm.blocks[1].self_attn.output[0].save()
            mlp = vlm.blocks[1].mlp.output.save()
    block = model.model.language_model.layers[1]
    with torch.no_grad():
        assert torch.equal(block.post_attention_layernorm(attention), cache["attn_out", 1])
        assert torch.equal(block.post_feedforward_layernorm(mlp), cache["mlp_out", 1])
    assert not torch.allclose(attention, cache["attn_out", 1], atol=0.1)


def test_edits_of_the_embedding_are_in_the_stream_that_block_0_reads():
    """transformers' own hidden_states[0] is recorded from call arguments and misses them."""
    with HookedVLM.from_model(*tiny.llava_1_5()) as vlm:
        prompt = oracle.prompts(vlm)["single"]
        with vlm.hooks([("hook_embed", lambda t, hook: t * 3)]):
            _, cache = vlm.run_with_cache(prompt, ["hook_embed", "blocks.0.hook_resid_pre", "blocks.0.hook_resid_mid"])
            attn = vlm.run_with_cache(prompt, "attn_out")[1]["attn_out", 0]
        assert torch.equal(cache["hook_embed"], cache["resid_pre", 0])
        assert torch.allclose(cache["resid_pre", 0] + attn, cache["resid_mid", 0], atol=1e-5)


def test_captured_values_are_copies_that_later_edits_do_not_reach():
    with HookedVLM.from_model(*tiny.qwen3_vl()) as vlm:
        prompt = oracle.prompts(vlm)["single"]
        want = vlm.run_with_cache(prompt, "resid_pre")[1]["resid_pre", 1]
        seen = {}

        def zero(tensor, hook):
            tensor.zero_()

        hooks = [
            ("blocks.1.hook_resid_pre", lambda t, hook: seen.update(kept=t)),
            ("blocks.1.hook_resid_mid", zero),
            ("blocks.1.hook_resid_post", zero),
        ]
        vlm.run_with_hooks(prompt, hooks)
        assert torch.equal(seen["kept"], want)
