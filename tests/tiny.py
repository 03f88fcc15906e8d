"""Tiny random models of every family: peaked attention, odd sizes, everything that hides faults made visible."""

from __future__ import annotations

import torch
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "<image>", "<video>", "<vs>", "<ve>", "<turn>"]
TILE_MARKS = [f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 4)]
TEXT = "what color is the star? the square is red and the circle is blue. answer with one word, please: 0123456789"

TEMPLATE = (
    "{%- for m in messages %}{{ '<turn>' + m.role + '\n' }}"
    "{%- for p in m.content %}{%- if p.type == 'image' %}{{ IMAGE }}{%- elif p.type == 'video' %}{{ VIDEO }}"
    "{%- else %}{{ p.text }}{%- endif %}{%- endfor %}"
    "{{ '<eos>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<turn>assistant\n' }}{%- endif %}"
)


def template(image: str, video: str = "") -> str:
    """The chat template with a family's own marks."""
    return TEMPLATE.replace("IMAGE", repr(image)).replace("VIDEO", repr(video))


def tokenizer(more: dict[str, str] | None = None, extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on one line; `more` names special tokens, `extra` adds nameless ones."""
    more = more or {}
    special = [*SPECIAL, *(t for t in (*more.values(), *extra) if t not in SPECIAL)]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=330 + len(special), special_tokens=special, initial_alphabet=alphabet)
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
            **more,
        },
    )


def _text(words: PreTrainedTokenizerFast, **more) -> dict:
    return dict(
        vocab_size=len(words),
        hidden_size=more.pop("hidden_size", 42),
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
    unit_offset = {f"{n}.weight" for n, m in model.named_modules() if type(m).__name__ == "Gemma3RMSNorm"}
    generator = torch.Generator().manual_seed(seed)
    noise = lambda p: torch.randn(p.shape, generator=generator)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1 and name.endswith("bias"):
                p.copy_(0.1 * noise(p))
            elif p.ndim == 1:
                p.copy_((name not in unit_offset) + 0.2 * noise(p))
            elif p.ndim == 3 and "experts" in name:
                p.copy_(noise(p) / p.shape[-1] ** 0.5)
            elif p.ndim == 2 and not name.endswith(
                ("embed_tokens.weight", "pos_embed.weight", "position_embedding.weight")
            ):
                p.copy_(noise(p) / p.shape[1] ** 0.5)
            else:
                p.copy_(0.5 * noise(p))
            if name.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")):
                p.mul_(2.0)
                if name in unit_offset:  # a gain of 2 is a weight of 1
                    p.add_(1.0)
            if name.endswith("qkv.weight"):
                p[: 2 * p.shape[0] // 3].mul_(1.6)
    return model.eval()


ROPE = dict(rope_type="default", rope_theta=1e4)
MROPE = dict(**ROPE, mrope_section=[2, 1, 1])


def built(cls, config, attn: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return sharpen(cls._from_config(config, attn_implementation=attn)).to(dtype)


def _ids(words: PreTrainedTokenizerFast) -> dict:
    return dict(
        image_token_id=words.image_token_id,
        video_token_id=words.video_token_id,
        vision_start_token_id=words.vision_start_token_id,
        vision_end_token_id=words.vision_end_token_id,
    )


def _qwen_pixels() -> dict:
    return dict(
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 64, "longest_edge": 64 * 64},
    )


def _qwen_vision(**more) -> dict:
    return (
        dict(
            depth=3,
            hidden_size=24,
            intermediate_size=44,
            num_heads=3,
            in_channels=3,
            patch_size=4,
            temporal_patch_size=2,
            spatial_merge_size=2,
            out_hidden_size=42,
        )
        | more
    )


def _qwen_processor(cls, video, words: PreTrainedTokenizerFast):
    return cls(
        image_processor=tf.Qwen2VLImageProcessor(**_qwen_pixels()),
        video_processor=video(**_qwen_pixels()),
        tokenizer=words,
        chat_template=template("<vs><image><ve>", "<vs><video><ve>"),
    )


def qwen2_vl(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    words = tokenizer()
    config = tf.Qwen2VLConfig(
        # this family has no head_dim of its own: the width is heads x d_head
        text_config=_text(words, hidden_size=48, rope_parameters=MROPE),
        vision_config=_qwen_vision(embed_dim=24, hidden_size=48, mlp_ratio=2),
        tie_word_embeddings=False,
        **_ids(words),
    )
    model = built(tf.Qwen2VLForConditionalGeneration, config, attn, dtype)
    return model, _qwen_processor(tf.Qwen2VLProcessor, tf.Qwen2VLVideoProcessor, words)


def qwen2_5_vl(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    words = tokenizer()
    config = tf.Qwen2_5_VLConfig(
        text_config=_text(words, hidden_size=48, rope_parameters=MROPE),
        vision_config=_qwen_vision(out_hidden_size=48, window_size=16, fullatt_block_indexes=[1]),
        tie_word_embeddings=False,
        **_ids(words),
    )
    model = built(tf.Qwen2_5_VLForConditionalGeneration, config, attn, dtype)
    return model, _qwen_processor(tf.Qwen2_5_VLProcessor, tf.Qwen2VLVideoProcessor, words)


def _qwen3_vision() -> dict:
    return _qwen_vision(num_position_embeddings=64, deepstack_visual_indexes=[0, 1])


def qwen3_vl(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    words = tokenizer()
    config = tf.Qwen3VLConfig(
        text_config=_text(words, rope_parameters={**MROPE, "mrope_interleaved": True}),
        vision_config=_qwen3_vision(),
        tie_word_embeddings=False,
        **_ids(words),
    )
    model = built(tf.Qwen3VLForConditionalGeneration, config, attn, dtype)
    return model, _qwen_processor(tf.Qwen3VLProcessor, tf.Qwen3VLVideoProcessor, words)


def qwen3_vl_moe(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    words = tokenizer()
    # grouped products want rows of 16 bytes, in bf16 too
    moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1])
    config = tf.Qwen3VLMoeConfig(
        text_config=_text(words, rope_parameters={**MROPE, "mrope_interleaved": True}, hidden_size=48, **moe),
        vision_config=_qwen3_vision() | dict(out_hidden_size=48),
        tie_word_embeddings=False,
        **_ids(words),
    )
    model = built(tf.Qwen3VLMoeForConditionalGeneration, config, attn, dtype)
    return model, _qwen_processor(tf.Qwen3VLProcessor, tf.Qwen3VLVideoProcessor, words)


def _vision(cls, **more):
    sizes = dict(hidden_size=24, intermediate_size=44, num_hidden_layers=3, num_attention_heads=3)
    return cls(**sizes, **(dict(image_size=28, patch_size=7) | more))


def llava_1_5(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    words = tokenizer()
    config = tf.LlavaConfig(
        vision_config=_vision(tf.CLIPVisionConfig, projection_dim=24),
        text_config=tf.LlamaConfig(**_text(words)),
        image_token_index=words.image_token_id,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=16,
    )
    model = built(tf.LlavaForConditionalGeneration, config, attn, dtype)
    from transformers.models.llava.image_processing_llava import LlavaImageProcessor

    processor = tf.LlavaProcessor(
        image_processor=LlavaImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer=words,
        patch_size=7,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        chat_template=template("<image>"),
    )
    return model, processor


PINPOINTS = [[28, 56], [56, 28], [56, 56]]


def llava_next(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    words = tokenizer()
    config = tf.LlavaNextConfig(
        vision_config=_vision(tf.CLIPVisionConfig, projection_dim=24),
        text_config=tf.LlamaConfig(**_text(words)),
        image_token_index=words.image_token_id,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_grid_pinpoints=PINPOINTS,
    )
    model = built(tf.LlavaNextForConditionalGeneration, config, attn, dtype)
    processor = tf.LlavaNextProcessor(
        image_processor=tf.LlavaNextImageProcessor(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=PINPOINTS
        ),
        tokenizer=words,
        patch_size=7,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        chat_template=template("<image>"),
    )
    return model, processor


def llava_onevision(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    words = tokenizer()
    size = {"height": 28, "width": 28}
    config = tf.LlavaOnevisionConfig(
        vision_config=_vision(tf.SiglipVisionConfig, vision_use_head=False),
        text_config=tf.Qwen2Config(**_text(words)),
        image_token_id=words.image_token_id,
        video_token_id=words.video_token_id,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_grid_pinpoints=PINPOINTS,
    )
    model = built(tf.LlavaOnevisionForConditionalGeneration, config, attn, dtype)
    processor = tf.LlavaOnevisionProcessor(
        image_processor=tf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=PINPOINTS),
        video_processor=tf.LlavaOnevisionVideoProcessor(size=size),
        tokenizer=words,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=template("<image>", "<video>"),
    )
    return model, processor


def internvl(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    words = tokenizer(
        dict(start_image_token="<vs>", end_image_token="<ve>", context_image_token="<image>", video_token="<video>")
    )
    config = tf.InternVLConfig(
        vision_config=_vision(tf.InternVLVisionConfig, image_size=[28, 28], patch_size=[7, 7], attention_bias=True),
        text_config=tf.Qwen3Config(**_text(words)),
        image_token_id=words.image_token_id,
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    model = built(tf.InternVLForConditionalGeneration, config, attn, dtype)
    size = {"height": 28, "width": 28}
    processor = tf.InternVLProcessor(
        image_processor=tf.GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=6),
        video_processor=tf.InternVLVideoProcessor(size=size),
        tokenizer=words,
        image_seq_length=4,
        chat_template=template("<image>", "<video>"),
    )
    return model, processor


def gemma3(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    words = tokenizer(dict(boi_token="<vs>", eoi_token="<ve>"))
    text = _text(
        words,
        query_pre_attn_scalar=8,
        sliding_window=16,  # shorter than the prompts
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(full_attention=ROPE, sliding_attention=ROPE),
    )
    config = tf.Gemma3Config(
        vision_config=_vision(tf.SiglipVisionConfig, vision_use_head=False).to_dict(),
        text_config=text,
        mm_tokens_per_image=4,
        boi_token_index=words.boi_token_id,
        eoi_token_index=words.eoi_token_id,
        image_token_index=words.image_token_id,
        tie_word_embeddings=False,
    )
    model = built(tf.Gemma3ForConditionalGeneration, config, attn, dtype)
    processor = tf.Gemma3Processor(
        image_processor=tf.Gemma3ImageProcessor(size={"height": 28, "width": 28}, image_seq_length=4),
        tokenizer=words,
        image_seq_length=4,
        chat_template=template("<vs>"),
    )
    return model, processor


def _idefics(model_cls, config_cls, vision_cls, attn, dtype, more, marks):
    words = tokenizer(more, marks)
    config = config_cls(
        vision_config=_vision(vision_cls),
        text_config=tf.LlamaConfig(**_text(words)),
        image_token_id=words.image_token_id,
        pad_token_id=words.pad_token_id,
        scale_factor=2,
        tie_word_embeddings=False,
    )
    return built(model_cls, config, attn, dtype), words


def idefics3(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    marks = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILE_MARKS)
    vision = tf.models.idefics3.configuration_idefics3.Idefics3VisionConfig
    model, words = _idefics(tf.Idefics3ForConditionalGeneration, tf.Idefics3Config, vision, attn, dtype, None, marks)
    sizes = dict(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    processor = tf.Idefics3Processor(
        image_processor=tf.Idefics3ImageProcessor(**sizes),
        tokenizer=words,
        image_seq_len=4,
        chat_template=template("<image>"),
    )
    return model, processor


def smolvlm(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    more = dict(fake_image_token="<fake_token_around_image>", global_image_token="<global-img>")
    marks = ("<end_of_utterance>", *TILE_MARKS)
    vision = tf.models.smolvlm.configuration_smolvlm.SmolVLMVisionConfig
    model, words = _idefics(tf.SmolVLMForConditionalGeneration, tf.SmolVLMConfig, vision, attn, dtype, more, marks)
    sizes = dict(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    processor = tf.SmolVLMProcessor(
        image_processor=tf.SmolVLMImageProcessor(**sizes),
        video_processor=tf.SmolVLMVideoProcessor(**sizes),
        tokenizer=words,
        image_seq_len=4,
        chat_template=template("<image>", "<video>"),
    )
    return model, processor


FAMILIES = {
    "qwen2-vl": qwen2_vl,
    "qwen2.5-vl": qwen2_5_vl,
    "qwen3-vl": qwen3_vl,
    "qwen3-vl-moe": qwen3_vl_moe,
    "llava-1.5": llava_1_5,
    "llava-next": llava_next,
    "llava-onevision": llava_onevision,
    "internvl": internvl,
    "gemma3": gemma3,
    "idefics3": idefics3,
    "smolvlm": smolvlm,
}
HAS_VIDEO = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "llava-onevision", "internvl", "smolvlm")


def picture(width: int = 32, height: int = 24, seed: int = 0) -> Image.Image:
    """A random picture."""
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy())


def video(n_frames: int = 4, width: int = 32, height: int = 24, seed: int = 0) -> list[Image.Image]:
    """Random frames."""
    return [picture(width, height, seed + i) for i in range(n_frames)]
