"""The embedded model: what it can do, how it is made, that it is the real class."""

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch

from mmlens import HookedVLM, load_task
from mmlens.errors import UnknownWordError
from mmlens.toys.build import SYSTEM, VOCABULARY, build_model, build_processor
from mmlens.toys.train import Recipe, Trainer, patchify, sequences

FOLDER = Path(str(resources.files("mmlens"))) / "toys" / "toy-qwen3-vl"


def test_it_is_the_stock_class_with_its_files_beside_it(toy):
    assert type(toy.hf).__name__ == "Qwen3VLForConditionalGeneration"
    assert type(toy.hf).__module__.startswith("transformers.")
    assert toy.n_layers * toy.n_heads >= 96
    names = {p.name for p in FOLDER.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "processor_config.json",
        "chat_template.jinja",
        "README.md",
    } <= names
    assert sum(p.stat().st_size for p in FOLDER.iterdir()) < 6 * 2**20


def test_a_folder_loads_as_the_name_does(toy, scenes):
    with HookedVLM.from_pretrained(FOLDER) as again:
        example = scenes.example("judge", 0, 0)
        prompt = again.prompt(example.question, images=list(example.images))
        assert torch.equal(again(prompt), toy(prompt))


def test_accuracy_on_five_hundred_unseen_scenes_with_six_objects(toy, scenes):
    result = scenes.evaluate(toy, n=500, seed=11)
    assert result.accuracy >= 0.95, result
    assert result.n_format_failures == 0


def test_accuracy_on_held_out_handwriting_is_what_the_card_says(toy):
    result = load_task("scenes/digits").evaluate(toy, n=500, seed=11)
    card = json.loads((FOLDER / "accuracy.json").read_text())
    assert abs(result.accuracy - card["scenes/digits"]["accuracy"]) < 0.03
    assert result.accuracy > 0.85


def test_a_system_turn_is_part_of_what_it_learned(toy, scenes):
    examples = scenes.examples("judge", 40, 3)
    prompt = toy.prompt([e.question for e in examples], [list(e.images) for e in examples], system=SYSTEM)
    right = [a == e.answer for a, e in zip(toy.generate(prompt, max_new_tokens=2).text, examples)]
    assert np.mean(right) > 0.85


def test_deepstack_contributes(toy, scenes):
    example = scenes.example("judge", 1, 0)
    prompt = toy.prompt(example.question, images=list(example.images))
    _, cache = toy.run_with_cache(prompt, ["deepstack_in", "resid_post"])
    for layer in range(2):
        assert cache["deepstack_in", layer].norm() > 0.05 * cache["resid_post", layer].norm()


def test_unknown_words_raise_and_list_the_vocabulary(toy, scenes):
    image = scenes.example("judge", 0, 0).images[0]
    with pytest.raises(UnknownWordError, match=r"'elephant'.*\n.*star") as caught:
        toy.prompt("What color is the elephant?", images=[image])
    assert "seven" in str(caught.value) and "<|image_pad|>" not in caught.value.expected
    prompt = toy.prompt("What color is the star?", images=[image])
    for call in (
        lambda: toy.prompt("What color is the star?", images=[image], answer="mauve"),
        lambda: toy.prompt("What color is the star?", images=[image], system="Be brief."),
        lambda: toy.answer_logprobs(prompt, ["red", "mauve"]),
        lambda: toy.to_tokens("mauve"),
        lambda: toy.to_single_token("mauve"),
    ):
        with pytest.raises(UnknownWordError):
            call()


def test_capitals_and_digits_of_subjects_map_to_words(toy, scenes):
    prompt = toy.prompt("What COLOR is the star?", images=[scenes.example("judge", 0, 0).images[0]], subject="star")
    (column,) = prompt.tokens("subject").positions
    assert toy.to_str_tokens(prompt)[column] == "star"


# ------------------------------------------------------------------ the recipe
def test_training_pictures_are_what_the_processor_makes():
    scenes = load_task("scenes/digits")
    pictures = np.stack([e.images[0] for e in scenes.examples("rank", 3, 0)])
    from PIL import Image

    want = build_processor().image_processor([Image.fromarray(p) for p in pictures], return_tensors="pt")
    got = patchify((torch.from_numpy(pictures).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5)
    assert torch.allclose(got, want["pixel_values"], atol=1e-6)


@pytest.mark.parametrize("system", [False, True])
def test_training_sequences_are_what_the_chat_template_makes(system):
    from mmlens.tasks.scenes import KINDS, draw_layout, draw_masks, paint

    rng = np.random.default_rng(0)
    layout = draw_layout(rng, "digits", 1, 4)
    picture = paint(rng, "digits", layout, draw_masks(rng, "digits", layout.kinds))[0]
    ids, labels = sequences("digits", layout, np.array([[2, 0]]), short=False, system=system)
    processor, kind = build_processor(), KINDS["digits"][layout.kinds[0, 2]]
    user = [{"type": "image", "image": picture}, {"type": "text", "text": f"What color is the {kind}?"}]
    turns = [{"role": "user", "content": user}]
    if system:
        turns.insert(0, {"role": "system", "content": [{"type": "text", "text": SYSTEM}]})
    text = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    from PIL import Image

    want = processor(text=[text], images=[Image.fromarray(picture)], return_tensors="pt")["input_ids"][0]
    assert ids[0, : len(want)].tolist() == want.tolist()
    from mmlens.tasks.scenes import COLORS

    assert VOCABULARY[labels[0, len(want)]] == tuple(COLORS)[layout.colors[0, 2]]
    assert (labels[0, : len(want)] == -100).all() and (labels[0] != -100).sum() == 4


def test_training_goes_on_from_its_checkpoint_to_the_same_weights(tmp_path):
    recipe = replace(Recipe(), warmup_steps=2, short_steps=2, steps=4, batch=2, warmup_batch=2)
    whole = Trainer(recipe, tmp_path)
    whole.run(every=100)
    (tmp_path / "half").mkdir()
    first = Trainer(recipe, tmp_path / "half")
    step, first.main_step = first.main_step, None
    calls = []

    def stop_after_two(number):
        if number == 2:
            raise KeyboardInterrupt
        calls.append(number)
        return step(number)

    first.main_step = stop_after_two
    with pytest.raises(KeyboardInterrupt):
        first.run(every=1)
    second = Trainer(recipe, tmp_path / "half")
    second.run(every=1)
    assert len(second.log) == 6 and calls == [0, 1]
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_another_recipes_checkpoint_is_refused(tmp_path):
    recipe = replace(Recipe(), warmup_steps=1, short_steps=1, steps=2, batch=2, warmup_batch=2)
    Trainer(recipe, tmp_path).run()
    with pytest.raises(SystemExit, match="another recipe"):
        Trainer(replace(recipe, seed=1), tmp_path).run()


def test_the_group_lasso_removes_whole_heads(tmp_path):
    recipe = replace(Recipe(), head_sparsity=1e9)
    trainer = Trainer(recipe, tmp_path)
    trainer.shrink_heads()
    assert all(layer.self_attn.o_proj.weight.abs().sum() == 0 for layer in trainer.model.model.language_model.layers)
    gentle = Trainer(replace(Recipe(), head_sparsity=1.0), tmp_path)
    before = (
        gentle.model.model.language_model.layers[0].self_attn.o_proj.weight.view(-1, 12, 8).norm(dim=(0, 2)).clone()
    )
    gentle.shrink_heads()
    after = gentle.model.model.language_model.layers[0].self_attn.o_proj.weight.view(-1, 12, 8).norm(dim=(0, 2))
    step = gentle.main.param_groups[0]["lr"]
    assert torch.allclose(before - after, torch.full((12,), step), atol=1e-6)


def test_the_same_seed_builds_the_same_model():
    a, b = build_model(seed=3), build_model(seed=3)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert not torch.equal(next(a.parameters()), next(build_model(seed=4).parameters()))
