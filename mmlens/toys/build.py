"""toy-qwen3-vl before training: its configuration, word tokenizer, chat template and processor, all made here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmlens.tasks.scenes import COLORS, DIGITS, SHAPES

if TYPE_CHECKING:
    from transformers import Qwen3VLForConditionalGeneration, Qwen3VLProcessor

PATCH, MERGE = 8, 2  # pixels, patches: one token is 16 x 16 pixels
INIT = 0.08  # standard deviation of fresh weights; transformers' 0.02 is too small for widths of 64 and 96
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|unknown|>",
)
SYSTEM = "answer with a color ."
WORDS = (
    *("\n", "user", "assistant", "system", "what", "color", "is", "the", "?", "."),
    *("answer", "with", "a"),
    *SHAPES,
    *DIGITS,
    *COLORS,
)
VOCABULARY = (*SPECIAL, *WORDS)
ID = {word: i for i, word in enumerate(VOCABULARY)}

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{ message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- else %}{{ part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def build_model(*, seed: int = 0) -> Qwen3VLForConditionalGeneration:
    """The untrained model: 8 layers x 12 heads of 8 (6 KV heads), a 3-block tower, DeepStack from blocks 0 and 1."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    width = 96
    config = Qwen3VLConfig(
        text_config=dict(
            vocab_size=len(VOCABULARY),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=8,
            num_attention_heads=12,
            num_key_value_heads=6,
            head_dim=8,
            max_position_embeddings=1024,
            pad_token_id=ID["<|endoftext|>"],
            bos_token_id=ID["<|endoftext|>"],
            eos_token_id=ID["<|im_end|>"],
            tie_word_embeddings=False,
            initializer_range=INIT,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1], mrope_interleaved=True),
        ),
        vision_config=dict(
            depth=3,
            hidden_size=64,
            intermediate_size=128,
            num_heads=4,
            in_channels=3,
            patch_size=PATCH,
            temporal_patch_size=2,
            spatial_merge_size=MERGE,
            out_hidden_size=width,
            num_position_embeddings=256,
            deepstack_visual_indexes=[0, 1],
            initializer_range=INIT,
        ),
        tie_word_embeddings=False,
        image_token_id=ID["<|image_pad|>"],
        video_token_id=ID["<|video_pad|>"],
        vision_start_token_id=ID["<|vision_start|>"],
        vision_end_token_id=ID["<|vision_end|>"],
    )
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    model.generation_config.eos_token_id = ID["<|im_end|>"]
    model.generation_config.pad_token_id = ID["<|endoftext|>"]
    return model


def build_processor() -> Qwen3VLProcessor:
    """A lower-casing word tokenizer over `VOCABULARY` and picture processing without resampling at 128 x 128."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    words = Tokenizer(models.WordLevel(dict(ID), unk_token="<|unknown|>"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n"), "isolated"),
            pre_tokenizers.Split(Regex(r"[^\S\n]+"), "removed"),
            pre_tokenizers.Punctuation("isolated"),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<|unknown|>",
        pad_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        padding_side="left",
        model_max_length=1024,
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
            "turn_token": "<|im_start|>",
        },
    )
    pixels = dict(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 512 * 512},
    )
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        video_processor=Qwen3VLVideoProcessor(**pixels, cap_pixels_per_frame=False),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
