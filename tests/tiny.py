"""Tiny random models of both families: peaked attention, odd sizes, everything that hides faults made visible."""

from __future__ import annotations

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.llava.image_processing_llava import LlavaImageProcessor

SPECIAL = ["<pad>", "<bos>", "<eos>", "<image>", "<video>", "<vs>", "<ve>", "<turn>"]
TEXT = "what color is the star? the square is red and the circle is blue. answer with one word, please: 0123456789"

TEMPLATE = (
    "{%- for m in messages %}{{ '<turn>' + m.role + '\n' }}"
    "{%- for p in m.content %}{%- if p.type == 'image' %}{{ IMAGE }}{%- else %}{{ p.text }}{%- endif %}{%- endfor %}"
    "{{ '<eos>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<turn>assistant\n' }}{%- endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on one line."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        extra_special_tokens={
            "image_token": "<image>",
            "video_token": "<video>",
            "vision_start_token": "<vs>",
            "vision_end_token": "<ve>",
            "turn_token": "<turn>",
        },
    )


def _text(words: PreTrainedTokenizerFast, **more) -> dict:
    return dict(
        vocab_size=len(words),
        hidden_size=42,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        tie_word_embeddings=False,
        **more,
    )


def sharpen(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random biases and gains, and query/key weights large enough for peaked attention."""
    generator = torch.Generator().manual_seed(seed)
    noise = lambda p: torch.randn(p.shape, generator=generator)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1 and name.endswith("bias"):
                p.copy_(0.1 * noise(p))
            elif p.ndim == 1:
                p.copy_(1 + 0.2 * noise(p))
            elif p.ndim == 2 and not name.endswith(("embed_tokens.weight", "pos_embed.weight")):
                p.copy_(noise(p) / p.shape[1] ** 0.5)
            else:
                p.copy_(0.5 * noise(p))
            if name.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")):
                p.mul_(2.0)
            if name.endswith("qkv.weight"):
                p[: 2 * p.shape[0] // 3].mul_(1.6)
    return model.eval()


def qwen3(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    """(model, processor) of the Qwen3-VL class."""
    words = tokenizer()
    config = Qwen3VLConfig(
        text_config=_text(
            words,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1], mrope_interleaved=True),
        ),
        vision_config=dict(
            depth=3,
            hidden_size=24,
            intermediate_size=44,
            num_heads=3,
            in_channels=3,
            patch_size=4,
            temporal_patch_size=2,
            spatial_merge_size=2,
            out_hidden_size=42,
            num_position_embeddings=64,
            deepstack_visual_indexes=[0, 1],
        ),
        tie_word_embeddings=False,
        image_token_id=words.image_token_id,
        video_token_id=words.video_token_id,
        vision_start_token_id=words.vision_start_token_id,
        vision_end_token_id=words.vision_end_token_id,
    )
    torch.manual_seed(0)
    model = sharpen(Qwen3VLForConditionalGeneration._from_config(config, attn_implementation=attn)).to(dtype)
    pixels = dict(
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 64, "longest_edge": 64 * 64},
    )
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        video_processor=Qwen3VLVideoProcessor(**pixels),
        tokenizer=words,
        chat_template=TEMPLATE.replace("IMAGE", "'<vs><image><ve>'"),
    )
    return model, processor


def llava(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    """(model, processor) of the LLaVA-1.5 class."""
    words = tokenizer()
    vision = CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=44,
        num_hidden_layers=3,
        num_attention_heads=3,
        image_size=28,
        patch_size=7,
        projection_dim=24,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**_text(words)),
        image_token_index=words.image_token_id,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=16,
    )
    torch.manual_seed(0)
    model = sharpen(LlavaForConditionalGeneration._from_config(config, attn_implementation=attn)).to(dtype)
    processor = LlavaProcessor(
        image_processor=LlavaImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer=words,
        patch_size=7,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE.replace("IMAGE", "'<image>'"),
    )
    return model, processor


FAMILIES = {"qwen3": qwen3, "llava": llava}


def picture(width: int = 32, height: int = 24, seed: int = 0) -> Image.Image:
    """A random picture."""
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy())
