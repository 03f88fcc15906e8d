"""Roles of tokens, and everything that a prompt refuses."""

import numpy as np
import oracle
import pytest
import tiny
import torch
from PIL import Image

from mmlens import Box, HookedVLM, PerExample, TokenSet
from mmlens.errors import (
    HookNotReachedError,
    MissingTokenTypesError,
    NoPictureError,
    NoProcessorError,
    OptionError,
    PictureCountError,
    PictureError,
    PictureTokenError,
    PlaceholderError,
    PromptError,
    RegionError,
    RightPaddingError,
    TokenGroupError,
    UnknownFamilyError,
    UnknownHookError,
)


def _words(vlm, prompt, group, example=0):
    ids = prompt.inputs["input_ids"][example]
    return vlm.tokenizer.decode(ids[list(prompt.tokens(group).per_example[example])])


def test_roles_are_the_words_they_name(wrapped):
    prompt = wrapped.prompt(
        "what color is the star?",
        images=[tiny.picture()],
        system="answer with one word, please:",
        subject="the star",
        answer="red and blue",
    )
    assert _words(wrapped, prompt, "system") == "answer with one word, please:"
    assert _words(wrapped, prompt, "question") == "what color is the star?"
    assert _words(wrapped, prompt, "subject") == " the star"
    assert _words(wrapped, prompt, "suffix") == "<eos>\n<turn>assistant\n"
    assert _words(wrapped, prompt, "last") == "\n"
    assert (
        prompt.tokens("question-subject").positions
        == prompt.tokens("question").positions[:3] + prompt.tokens("question").positions[-1:]
    )
    assert (prompt.tokens("image") | prompt.tokens("text")) == prompt.tokens("all")
    assert len(prompt.tokens("all")) == prompt.n_columns


def test_output_positions_predict_the_gold_answer(wrapped):
    prompt = wrapped.prompt("what color is the star?", images=[tiny.picture()], answer="red and blue")
    ids = prompt.inputs["input_ids"][0]
    gold = wrapped.to_tokens("red and blue")[0].tolist()
    out = prompt.tokens("output").positions
    assert len(out) == len(gold) and out[0] == prompt.tokens("last").positions[0]
    assert [int(ids[c + 1]) for c in out[:-1]] == gold[:-1]


def test_batches_are_left_padded_and_roles_shift_with_them(wrapped):
    prompt = oracle.prompts(wrapped)["batch"]
    for i, question in enumerate(oracle.QUESTIONS):
        assert _words(wrapped, prompt, "question", i) == question
    assert prompt.tokens("last").per_example == ((prompt.n_columns - 1,),) * 2
    single = prompt[0]
    shift = prompt.n_columns - single.n_columns
    assert [c + shift for c in single.tokens("question").positions] == list(prompt.tokens("question").per_example[0])


def test_several_pictures_have_numbers(wrapped):
    prompt = wrapped.prompt("what color is the star?", images=[tiny.picture(), tiny.picture(40, 32, seed=2)])
    a, b = prompt.tokens("image:0").positions, prompt.tokens("image:1").positions
    assert max(a) < min(b) and (*a, *b) == prompt.tokens("image").positions
    assert (len(a), len(b)) == tuple(len(item.columns) for item in prompt.items)


def test_chat_messages_carry_pictures_or_leave_them_to_images(wrapped):
    parts = [
        {"type": "text", "text": "what color"},
        {"type": "image", "image": tiny.picture()},
        {"type": "text", "text": "is the star?"},
    ]
    prompt = wrapped.prompt([{"role": "user", "content": parts}])
    assert _words(wrapped, prompt, "question") == "what coloris the star?"
    assert len(prompt.tokens("image")) == len(prompt.items[0].columns)
    chat = [
        {"role": "user", "content": "is the square red?"},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "what color is the star?"},
    ]
    assert _words(wrapped, wrapped.prompt(chat), "question") == "what color is the star?"


def test_words_that_also_stand_in_the_template_are_not_confused(wrapped):
    prompt = wrapped.prompt("user", images=[tiny.picture()], system="user", subject="user")
    q, s = prompt.tokens("question").positions, prompt.tokens("system").positions
    assert max(s) < min(prompt.tokens("image").positions) < min(q) and prompt.tokens("subject").positions == q


def test_ready_inputs_are_taken_as_they_are(wrapped):
    prompt = oracle.prompts(wrapped)["batch"]
    ready = dict(prompt.inputs)
    assert torch.equal(wrapped(ready), wrapped(prompt))
    _, cache = wrapped.run_with_cache(ready, "pattern", rows="last")
    assert cache["pattern", 0].shape[2] == 1
    with pytest.raises(TokenGroupError, match="question"):
        wrapped.run_with_cache(ready, "pattern", rows="question")


def test_the_processors_own_output_is_taken(wrapped):
    content = [{"type": "image"}, {"type": "text", "text": oracle.QUESTIONS[0]}]
    text = wrapped.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    ready = wrapped.processor(text=[text], images=[tiny.picture()], return_tensors="pt")
    assert torch.equal(wrapped(ready), wrapped(oracle.prompts(wrapped)["single"]))
    assert torch.equal(
        wrapped.generate(ready, max_new_tokens=3).tokens,
        wrapped.generate(oracle.prompts(wrapped)["single"], max_new_tokens=3).tokens,
    )


def test_misspelt_input_names_are_not_swallowed(wrapped):
    prompt = oracle.prompts(wrapped)["single"]
    with pytest.raises(PromptError, match="'pixel_value'"):
        wrapped(dict(prompt.inputs, pixel_value=prompt.inputs["pixel_values"]))


def test_arguments_of_the_wrong_kind_are_each_named(wrapped, as_users):
    prompt = oracle.prompts(wrapped)["single"]
    image = tiny.picture()
    for error, call in (
        (UnknownHookError, lambda: wrapped.run_with_cache(prompt, 5)),
        (UnknownHookError, lambda: wrapped.run_with_cache(prompt, [("z", 3)])),
        (OptionError, lambda: wrapped.run_with_cache(prompt, "z", device="gpu")),
        (OptionError, lambda: wrapped.run_with_hooks(prompt, None)),
        (OptionError, lambda: wrapped.run_with_hooks(prompt, [("z", 3)])),
        (OptionError, lambda: wrapped.generate(prompt, max_new_tokens="3")),
        (OptionError, lambda: wrapped.answer_logprobs(prompt, "red")),
        (OptionError, lambda: wrapped.answer_logprobs(prompt, [1, 2])),
        (PromptError, lambda: wrapped.prompt("what", images=[image], answer=3)),
        (PromptError, lambda: wrapped.prompt("what", images=[image], subject=3)),
        (RegionError, lambda: wrapped.prompt("what", images=[image], evidence=(1, 2, 3, 4))),
        (HookNotReachedError, lambda: wrapped.site("hook_logits").read()),
        (UnknownFamilyError, lambda: HookedVLM.from_model(None)),
    ):
        with pytest.raises(error):
            call()
    assert torch.equal(wrapped(prompt), wrapped(oracle.prompts(wrapped)["single"]))


def test_pictures_that_the_processor_refuses():
    with HookedVLM.from_model(*tiny.qwen3_vl()) as vlm, pytest.raises(PictureError, match="1 x 900"):
        vlm.prompt("what", images=[tiny.picture(1, 900)])


def test_a_model_without_processor_takes_ready_inputs_only(family):
    model, processor = tiny.FAMILIES[family]()
    with HookedVLM.from_model(model, processor) as vlm:
        inputs = dict(oracle.prompts(vlm)["single"].inputs)
    with HookedVLM.from_model(model) as bare:
        bare.run_with_cache(inputs, "pattern")
        with pytest.raises(NoProcessorError):
            bare.prompt("what color is the star?")


def test_tokens_as_text(wrapped):
    assert wrapped.to_single_token(" red") == int(wrapped.to_tokens(" red"))
    with pytest.raises(OptionError, match="tokens"):
        wrapped.to_single_token("red and blue")
    prompt = oracle.prompts(wrapped)["single"]
    names = wrapped.to_str_tokens(prompt)
    assert len(names) == prompt.n_columns and names[prompt.tokens("subject").positions[0]] == " star"
    assert len(wrapped.to_str_tokens(oracle.prompts(wrapped)["batch"])) == 2


# ------------------------------------------------------------------ refusals
def test_inputs_with_faults_are_each_named(wrapped, family, as_users):
    prompt = oracle.prompts(wrapped)["batch"]
    good = dict(prompt.inputs)
    right = dict(good, attention_mask=good["attention_mask"].flip(1))
    with pytest.raises(RightPaddingError):
        wrapped(right)
    ids = good["input_ids"].clone()
    ids[0, prompt.tokens("image").per_example[0][0]] = 5
    with pytest.raises(PlaceholderError, match="picture tokens"):
        wrapped(dict(good, input_ids=ids))
    without = {k: v for k, v in good.items() if "pixel" not in k and "grid" not in k}
    with pytest.raises(PlaceholderError):
        wrapped(without)
    if family == "qwen3-vl":
        with pytest.raises(MissingTokenTypesError):
            wrapped({k: v for k, v in good.items() if k != "mm_token_type_ids"})
    for nonsense in ({}, {"input_ids": [1, 2]}, "a question", None, 3):
        with pytest.raises(PromptError):
            wrapped(nonsense)


def test_picture_tokens_are_counted_in_every_example(wrapped):
    prompt = oracle.prompts(wrapped)["batch"]
    ids = prompt.inputs["input_ids"].clone()
    ids[0, prompt.tokens("image").per_example[0][0]] = 5
    ids[1, prompt.tokens("question").per_example[1][0]] = prompt.config.image_token_id
    with pytest.raises(PlaceholderError, match="example 0"):
        wrapped.run_with_cache(dict(prompt.inputs, input_ids=ids), "pattern")


def test_chat_parts_without_a_type_or_words(wrapped):
    for content in ([{"text": "what"}], ["what"]):
        with pytest.raises(PromptError, match="type"):
            wrapped.prompt([{"role": "user", "content": content}])
    with pytest.raises(PromptError, match="without words"):
        wrapped.prompt([{"role": "user", "content": [{"type": "image"}]}], images=[tiny.picture()], subject="star")


def test_a_picture_token_at_odds_with_the_processor_is_named(family):
    model, processor = tiny.FAMILIES[family]()
    processor.image_token_id += 1
    with pytest.raises(PictureTokenError, match="one id in both"):
        HookedVLM.from_model(model, processor)


def test_picture_counts_must_match_the_marks(wrapped):
    two = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "what"}]
    with pytest.raises(PictureCountError, match="1 pictures for 2"):
        wrapped.prompt([{"role": "user", "content": two}], images=[tiny.picture()])
    with pytest.raises(PictureCountError):
        wrapped.prompt("what is <image>?", images=[tiny.picture()])


@pytest.mark.parametrize(
    "picture",
    ["missing.png", 3, np.zeros((4, 4, 3)), None, np.zeros((0, 4, 3), np.uint8), Image.new("RGB", (0, 4))],
    ids=["path", "int", "floats", "none", "empty", "no width"],
)
def test_pictures_that_cannot_be_read_are_named(wrapped, picture, as_users):
    with pytest.raises(PictureError):
        wrapped.prompt("what", images=[picture])


def test_a_corrupt_picture_file_is_named(wrapped, tmp_path):
    path = tmp_path / "half.png"
    tiny.picture(64, 64).save(path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(PictureError, match=r"half\.png"):
        wrapped.prompt("what", images=[path])


def test_paths_and_arrays_and_grey_pictures_work(wrapped, tmp_path):
    tiny.picture().save(tmp_path / "a.png")
    want = wrapped(wrapped.prompt("what", images=[tiny.picture()]))
    for form in (tmp_path / "a.png", str(tmp_path / "a.png"), np.asarray(tiny.picture())):
        assert torch.equal(wrapped(wrapped.prompt("what", images=[form])), want)
    wrapped.prompt("what", images=[Image.new("L", (32, 24))])


def test_vision_hooks_on_a_text_only_prompt(wrapped):
    prompt = wrapped.prompt("what color is the star?")
    for name in ("vision.z", "vision.blocks.0.hook_resid_pre", "projector.out"):
        with pytest.raises(NoPictureError, match="without a picture"):
            wrapped.run_with_cache(prompt, name)
        with pytest.raises(NoPictureError):
            wrapped.run_with_hooks(prompt, [(name, lambda t, hook: None)])
    _, cache = wrapped.run_with_cache(prompt, "*resid_post")
    assert len(cache) == 3
    assert len(wrapped.run_with_cache(prompt)[1]) > 30


@pytest.mark.parametrize("name", ["resid_pots", "blocks.9.attn.hook_z", "vision.zz", "block.*", ""])
def test_wrong_hook_names_get_the_closest_right_ones(wrapped, name, as_users):
    with pytest.raises(UnknownHookError, match="closest"):
        wrapped.run_with_cache(oracle.prompts(wrapped)["single"], name)


def test_the_closest_name_is_the_right_one(wrapped):
    with pytest.raises(UnknownHookError, match="resid_post"):
        wrapped.run_with_cache(oracle.prompts(wrapped)["single"], "resid_pots")


@pytest.mark.parametrize(
    "options",
    [
        dict(subject="circle"),
        dict(subject="s"),
        dict(subject=(5, 2)),
        dict(subject=(0, 99)),
    ],
)
def test_subjects_that_cannot_be_placed(wrapped, options):
    with pytest.raises(PromptError, match="subject"):
        wrapped.prompt("what color is the star?", images=[tiny.picture()], **options)


@pytest.mark.parametrize("question", [[], 3, None, [{"role": "user"}], [{"role": "assistant", "content": "x"}]])
def test_questions_that_are_none(wrapped, question, as_users):
    with pytest.raises(PromptError):
        wrapped.prompt(question)


def test_lists_of_unequal_length_are_refused(wrapped):
    with pytest.raises(PromptError, match="images= for 2 questions"):
        wrapped.prompt(["what", "is"], images=[[tiny.picture()]])


def test_unknown_options_raise(wrapped):
    with pytest.raises(TypeError):
        wrapped.prompt("what", pictures=[tiny.picture()])
    with pytest.raises(TypeError):
        wrapped.run_with_cache(oracle.prompts(wrapped)["single"], row="last")


def test_boxes_outside_or_empty(wrapped, as_users):
    prompt = oracle.prompts(wrapped)["single"]
    with pytest.raises(RegionError, match="outside"):
        prompt.locate(Box.from_xyxy(100, 100, 120, 120))
    for corners in ((5, 5, 5, 9), (9, 9, 5, 5)):
        with pytest.raises(RegionError, match="no area"):
            Box.from_xyxy(*corners)
    for values in (("a", 0, 1, 1), (None, 0, 1, 1), (float("nan"), 0, 1, 1)):
        with pytest.raises(RegionError):
            Box.from_xyxy(*values)
    with pytest.raises(RegionError):
        prompt.locate(Box.from_xyxy(0, 0, 5, 5), image=1)
    with pytest.raises(RegionError, match="Box"):
        prompt.locate((0, 0, 5, 5))


def test_groups_per_example_must_fit(wrapped):
    prompt = oracle.prompts(wrapped)["batch"]
    with pytest.raises(TokenGroupError):
        prompt.tokens(PerExample(["last"]))
    assert prompt.tokens(PerExample(["last", [3]])).per_example == ((prompt.n_columns - 1,), (3,))
    assert prompt.tokens(TokenSet.of([1], [2])).per_example == ((1,), (2,))
