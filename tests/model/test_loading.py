"""Names, folders and ids that cannot be loaded, each named."""

import json
import shutil
from importlib import resources
from pathlib import Path

import pytest

from mmlens import HookedVLM
from mmlens.errors import ModelNotFoundError, OptionError, UnknownFamilyError

TOY = Path(str(resources.files("mmlens"))) / "toys" / "toy-qwen3-vl"


@pytest.mark.parametrize("name", ["toy-qwen3vl", "/nowhere/at/all", "./toy", "a/b/c", "nobody/nothing", ""])
def test_names_that_lead_nowhere(name):
    with pytest.raises(ModelNotFoundError):
        HookedVLM.from_pretrained(name)


def test_the_closest_embedded_name_is_offered():
    with pytest.raises(ModelNotFoundError, match="closest: 'toy-qwen3-vl'"):
        HookedVLM.from_pretrained("toy-qwen3vl")


def test_a_folder_without_config(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        HookedVLM.from_pretrained(tmp_path)


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(TOY, tmp_path / "copy")
    return tmp_path / "copy"


def test_cut_off_weights(copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelNotFoundError, match="cannot be loaded"):
        HookedVLM.from_pretrained(copy)


def test_missing_weights_and_broken_config(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="cannot be loaded"):
        HookedVLM.from_pretrained(copy)
    (copy / "config.json").write_text("{ not json")
    with pytest.raises(ModelNotFoundError, match="cannot be loaded"):
        HookedVLM.from_pretrained(copy)


def test_a_checkpoint_that_lacks_weights(copy):
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    gone = [k for k in weights if "layers.3.self_attn" in k]
    save_file({k: v for k, v in weights.items() if k not in gone}, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotFoundError, match=f"lacks {len(gone)} weights"):
        HookedVLM.from_pretrained(copy)


@pytest.mark.parametrize(
    "options", [dict(dtype="float99"), dict(dtype=3), dict(device="gpu"), dict(device="cuda:7"), dict(dtype="nn")]
)
def test_dtypes_and_devices_that_do_not_exist(options, as_users):
    with pytest.raises(OptionError):
        HookedVLM.from_pretrained("toy-qwen3-vl", **options)


def test_a_family_that_nobody_described(copy):
    config = json.loads((copy / "config.json").read_text())
    config.update(architectures=["LlamaForCausalLM"], model_type="llama")
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownFamilyError, match="LlamaForCausalLM"):
        HookedVLM.from_pretrained(copy)
    config.update(architectures=["NewVLM"], model_type="new_vlm")
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownFamilyError, match="new_vlm"):
        HookedVLM.from_pretrained(copy)


def test_a_loaded_model_of_no_family_tells_what_was_found():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    with pytest.raises(UnknownFamilyError, match=r"model\.layers"):
        HookedVLM.from_model(LlamaForCausalLM(config))


def test_options_that_contradict():
    with pytest.raises(OptionError, match="device_map"):
        HookedVLM.from_pretrained("toy-qwen3-vl", device="cpu", device_map="auto")
    with pytest.raises(ModelNotFoundError, match="revision"):
        HookedVLM.from_pretrained("toy-qwen3-vl", revision="main")
    with pytest.raises(TypeError):
        HookedVLM.from_pretrained("toy-qwen3-vl", dtpye="float32")


def test_dtype_and_device_are_obeyed():
    import torch

    with HookedVLM.from_pretrained("toy-qwen3-vl", dtype=torch.bfloat16, device="cpu") as vlm:
        assert vlm.dtype == torch.bfloat16 and vlm.device.type == "cpu"
        assert vlm.identity()["dtype"] == "bfloat16"
    with HookedVLM.from_pretrained("toy-qwen3-vl") as other:
        assert other.dtype == torch.float32 and other.identity()["fingerprint"] != vlm.identity()["fingerprint"]
