"""Models as people bring them: unknown ones, own families, adapters, quantized layers, half precision, spread out."""

import dataclasses

import oracle
import peft
import pytest
import tiny
import torch
import transformers as tf
from torch import nn

from mmlens import HookedVLM
from mmlens.errors import (
    AttentionChangedError,
    NonFiniteError,
    OptionError,
    PatternTooLargeError,
    UnknownFamilyError,
    UnsupportedAttentionError,
)
from mmlens.families import FAMILIES
from mmlens.families.llava import Llava


def test_every_family_verifies():
    """The check that users run first holds on every family, in the precision that checkpoints come in too."""
    for name, build in tiny.FAMILIES.items():
        with HookedVLM.from_model(*build()) as vlm:
            report = vlm.verify(oracle.prompts(vlm)["several"])
            assert report.ok, (name, str(report))
            assert "every site causal" in str(report) and name in str(report)


def test_verify_finds_a_site_that_lies():
    model, processor = tiny.llava_1_5()

    class Wrong(Llava):
        name = "wrong"
        decoder = dataclasses.replace(Llava.decoder, ln2="input_layernorm")

    with HookedVLM.from_model(model, processor, family=Wrong()) as vlm:
        report = vlm.verify()
    assert not report.ok and {"residual identities"} <= {c.name for c in report.checks if not c.ok}


def test_every_family_has_a_tiny_model_and_one_name():
    assert [f.name for f in FAMILIES] == list(tiny.FAMILIES)
    classes = [c for f in FAMILIES for c in f.architectures]
    assert len(set(classes)) == len(classes)


# ---------------------------------------------------------------------- unknown models, own families
def test_an_unknown_model_is_surveyed():
    class Stranger(nn.Module):
        def __init__(self):
            super().__init__()
            layer = lambda: nn.ModuleDict(
                {"self_attn": nn.Linear(4, 4), "mlp": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
            )
            self.text_layers = nn.ModuleList([layer(), layer()])
            self.vision_blocks = nn.ModuleList([layer(), layer(), layer()])

    with pytest.raises(UnknownFamilyError) as caught:
        HookedVLM.from_model(Stranger())
    told = str(caught.value)
    for part in (
        "text blocks text_layers (2 x",
        "tower vision_blocks (3 x",
        "could not be named: projector",
        "family=",
    ):
        assert part in told, part


def test_a_family_from_outside_the_package():
    class Renamed(tf.LlavaForConditionalGeneration):
        pass

    class Mine(Llava):
        name = "mine"
        architectures = ("Renamed",)

    model, processor = tiny.llava_1_5()
    model.__class__ = Renamed
    with pytest.raises(UnknownFamilyError, match="Renamed"):
        HookedVLM.from_model(model, processor)
    with HookedVLM.from_model(model, processor, family=Mine()) as vlm:
        _, cache = vlm.run_with_cache(oracle.prompts(vlm)["single"])
        assert vlm.family.name == "mine" and torch.equal(cache["resid_post", 1], cache["resid_pre", 2])


def test_a_family_that_does_not_fit_names_its_wrong_paths():
    class Wrong(Llava):
        projector = "model.projektor"
        decoder = dataclasses.replace(Llava.decoder, ln2="norm_two")

    with pytest.raises(UnknownFamilyError) as caught:
        HookedVLM.from_model(*tiny.llava_1_5(), family=Wrong())
    assert "model.projektor" in str(caught.value) and "layers.0.norm_two" in str(caught.value)


@pytest.mark.usefixtures("as_users")
def test_a_family_must_be_an_instance():
    with pytest.raises(OptionError, match="family="):
        HookedVLM.from_model(*tiny.llava_1_5(), family="llava")


# ---------------------------------------------------------------------- attention that cannot be read
def test_softcap_and_sinks_are_refused_when_the_model_is_wrapped():
    model, processor = tiny.gemma3()
    attn = model.model.language_model.layers[1].self_attn
    attn.attn_logit_softcapping = 50.0
    with pytest.raises(UnsupportedAttentionError, match="softcapping"):
        HookedVLM.from_model(model, processor)
    attn.attn_logit_softcapping = None
    attn.sinks = nn.Parameter(torch.zeros(6))
    with pytest.raises(UnsupportedAttentionError, match="sinks"):
        HookedVLM.from_model(model, processor)


def test_sliding_windows_are_in_the_pattern():
    with HookedVLM.from_model(*tiny.gemma3()) as vlm:
        prompt = oracle.prompts(vlm)["single"]
        _, cache = vlm.run_with_cache(prompt, "pattern")
    far = torch.ones(prompt.n_columns, prompt.n_columns).tril(-16).bool()
    assert far.any() and cache["pattern", 0][..., far].abs().sum() == 0 and cache["pattern", 1][..., far].sum() > 0
    image = list(prompt.tokens("image").positions)
    ahead = cache["pattern", 1][0][:, image][..., image].triu(1)
    assert ahead.sum() > 0  # picture tokens attend both ways


def test_windowed_towers_give_patterns_by_window():
    with HookedVLM.from_model(*tiny.qwen2_5_vl()) as vlm:
        prompt = oracle.prompts(vlm)["batch"]
        _, cache = vlm.run_with_cache(prompt, "vision.pattern")
        for layer in range(3):
            lengths, pictures = cache.segments(("vision.pattern", layer))
            assert cache["vision.pattern", layer].shape[0] == len(lengths) and set(pictures) == {0, 1}
            assert sum(lengths) == 4 * sum(len(i.columns) for i in prompt.items)
        assert cache["vision.pattern", 0].shape[-1] == 16 < cache["vision.pattern", 1].shape[-1]


def test_windows_are_those_of_transformers():
    from transformers.vision_utils import get_vision_window_index

    from mmlens.families.qwen_vl import Qwen25VL

    config = tiny.qwen2_5_vl()[0].config
    vision, family = config.vision_config, Qwen25VL()
    for t, h, w in ((1, 4, 6), (1, 10, 14), (2, 8, 8), (3, 12, 2)):
        grid = torch.tensor([[t, h * 2, w * 2]])
        order, _ = get_vision_window_index(grid, vision.spatial_merge_size, vision.window_size, vision.patch_size)
        assert family.units(config, t, h, w) == torch.argsort(order).tolist()


def test_huge_patterns_are_refused_with_what_to_ask_instead(family):
    with HookedVLM.from_model(*tiny.FAMILIES[family]()) as vlm:
        prompt = oracle.prompts(vlm)["single"]
        vlm.pattern_limit = 1000
        for name in ("pattern", "vision.pattern"):
            with pytest.raises(PatternTooLargeError, match="attention_mass"):
                vlm.run_with_cache(prompt, name)
        vlm.run_with_cache(prompt, "pattern", rows="last", heads=[0])
        vlm.attention_mass(prompt, ["image"])


# ---------------------------------------------------------------------- changed behind our back
def test_a_changed_attention_implementation_is_noticed(family):
    model, processor = tiny.FAMILIES[family]()
    with HookedVLM.from_model(model, processor) as vlm:
        prompt = oracle.prompts(vlm)["single"]
        model.set_attn_implementation("eager")
        for run in (lambda: vlm(prompt), lambda: vlm.run_with_cache(prompt, "pattern"), lambda: vlm.trace(prompt)):
            with pytest.raises(AttentionChangedError, match="eager"):
                run()


def test_a_model_retyped_after_wrapping_runs_as_it_is(family):
    model, processor = tiny.FAMILIES[family]()
    with HookedVLM.from_model(model, processor) as vlm:
        prompt = oracle.prompts(vlm)["single"]
        model.to(torch.bfloat16)
        logits, cache = vlm.run_with_cache(prompt)
        assert vlm.dtype == cache["resid_post", 1].dtype == torch.bfloat16
        assert torch.equal(logits, model(**vlm.model_inputs(prompt)).logits)


def test_half_precision_overflow_names_layer_and_site(family):
    model, processor = tiny.FAMILIES[family](dtype=torch.float16)
    with torch.no_grad():
        model.model.language_model.layers[1].mlp.down_proj.weight.mul_(1e5)
    with HookedVLM.from_model(model, processor) as vlm:
        with pytest.raises(NonFiniteError, match=r"blocks\.1\.hook_mlp_out.*float16"):
            vlm.run_with_cache(oracle.prompts(vlm)["single"], ["resid_post"])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_float16(family):
    with HookedVLM.from_model(*tiny.FAMILIES[family](dtype=torch.float16)) as vlm:
        prompt = oracle.prompts(vlm)["batch"]
        logits, cache = vlm.run_with_cache(prompt, ["resid_pre", "attn_out", "resid_mid", "pattern"])
        assert torch.equal(logits, vlm(prompt)) and cache["pattern", 0].dtype == torch.float32
        assert torch.equal(cache["resid_pre", 1] + cache["attn_out", 1], cache["resid_mid", 1])


# ---------------------------------------------------------------------- adapters, quantized layers, offloading
def test_a_lora_model_shows_its_adapted_values(family):
    model, processor = tiny.FAMILIES[family]()
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "o_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config).eval()
    with HookedVLM.from_model(adapted, processor) as vlm:
        prompt = oracle.prompts(vlm)["batch"]
        inputs = vlm.model_inputs(prompt)
        logits, cache = vlm.run_with_cache(prompt)
        results = cache.stack_head_results().sum(0)
        made = torch.einsum("bpm,hmd->bphd", cache["ln1.normalized", 1], vlm.W_Q[1])
        assert torch.allclose(made + vlm.b_Q[1], cache["q", 1], atol=1e-4)
    assert torch.equal(logits, adapted(**inputs).logits)
    with oracle.recorded(model, family) as stock:
        oracle.run(adapted, inputs)
    for name in ("blocks.1.attn.hook_q", "blocks.1.hook_attn_out", "blocks.2.hook_mlp_out", "blocks.2.hook_resid_post"):
        assert torch.equal(cache[name], stock[name]), name
    real = prompt.inputs["attention_mask"].bool()
    assert torch.allclose(results[real], sum(cache["attn_out", i] for i in range(3))[real], atol=1e-4)
    with torch.no_grad(), adapted.disable_adapter():
        assert not torch.equal(logits, adapted(**inputs).logits)


class Int8Linear(nn.Linear):
    """A linear layer that keeps its weight in eight bits, as quantization libraries do."""

    @classmethod
    def of(cls, linear):
        made = cls(linear.in_features, linear.out_features, linear.bias is not None)
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        made.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        made.register_buffer("scale", scale)
        made.bias = linear.bias
        return made

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def test_quantized_layers_pass_through(family):
    model, processor = tiny.FAMILIES[family]()
    for layer in model.model.language_model.layers:
        for parent, names in ((layer.self_attn, ("q_proj", "v_proj", "o_proj")), (layer.mlp, ("down_proj",))):
            for name in names:
                setattr(parent, name, Int8Linear.of(getattr(parent, name)))
    with HookedVLM.from_model(model, processor) as vlm:
        prompt = oracle.prompts(vlm)["single"]
        logits, cache = vlm.run_with_cache(prompt)
        added = torch.stack([cache["attn_out", layer] for layer in range(3)]).sum(0)
        assert torch.allclose(cache.stack_head_results().sum(0), added, atol=1e-4)
        assert torch.allclose(
            vlm.W_O[0].flatten(0, 1), model.model.language_model.layers[0].self_attn.o_proj(torch.eye(48)), atol=1e-6
        )
        assert vlm.verify(prompt).ok
    assert torch.equal(logits, oracle.run(model, vlm.model_inputs(prompt)))


def test_a_model_spread_by_device_map(family, tmp_path):
    model, processor = tiny.FAMILIES[family]()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    last = "model.language_model.layers.2"
    places = {name: "cpu" for name, _ in model.named_children() if name != "model"}
    places |= {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "language_model"}
    places |= {
        f"model.language_model.{n}": "cpu" for n, _ in model.model.language_model.named_children() if n != "layers"
    }
    places |= {f"model.language_model.layers.{i}": "cpu" for i in range(2)} | {last: "disk"}
    spread = type(model).from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "off").eval()
    with HookedVLM.from_model(spread, processor) as vlm:
        prompt = oracle.prompts(vlm)["single"]
        logits, cache = vlm.run_with_cache(prompt, ["resid_post", "pattern", "vision.z"])
    assert torch.allclose(logits, oracle.run(model, vlm.model_inputs(prompt)), atol=1e-5)
    with HookedVLM.from_model(model, processor) as vlm:
        _, want = vlm.run_with_cache(prompt, ["resid_post", "pattern", "vision.z"])
    assert all(torch.allclose(cache[name], want[name], atol=1e-5) for name in want)
