"""Tiny random models of every family: peaked attention, odd sizes, everything that hides faults made visible."""

from __future__ import annotations

import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
from transformers.models.llava.image_processing_llava import LlavaImageProcessor

SPECIAL = ["<pad>", "<bos>", "<eos>", "<image>", "<video>", "<vs>", "<ve>", "<turn>"]
TILES = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
TILES += [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
TEXT = "what color is the star? the square is red and the circle is blue. answer with one word, please: 0123456789"

TEMPLATE = (
    "{%- for m in messages %}{{ '<turn>' + m.role + '\n' }}"
    "{%- for p in m.content %}{%- if p.type == 'image' %}{{ 'IMAGE' }}{%- elif p.type == 'video' %}{{ 'VIDEO' }}"
    "{%- else %}{{ p.text }}{%- endif %}{%- endfor %}"
    "{{ '<eos>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<turn>assistant\n' }}{%- endif %}"
)


def tokenizer(more: tuple[str, ...] | list[str] = (), **named: str) -> hf.PreTrainedTokenizerFast:
    """Byte-level BPE trained on one line; more special tokens, and attributes for some, as a family needs them."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = SPECIAL + list(more)
    trainer = trainers.BpeTrainer(
        vocab_size=322 + len(special),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([TEXT], trainer)
    return hf.PreTrainedTokenizerFast(
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
            **named,
        },
    )


def _text(words: hf.PreTrainedTokenizerFast, **more) -> dict:
    """The decoder: 6 query heads on 2 key/value heads of 8, so that heads x size is not the width."""
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
    ) | dict(more)


def _tower(**more) -> dict:
    """A plain tower: 3 blocks of 3 heads of 8."""
    sizes = dict(hidden_size=24, intermediate_size=44, num_hidden_layers=3, num_attention_heads=3)
    return sizes | dict(image_size=28, patch_size=7) | dict(more)


def _template(image: str, video: str = "") -> str:
    return TEMPLATE.replace("IMAGE", image).replace("VIDEO", video)


def sharpen(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random biases and gains, and query/key weights large enough for peaked attention."""
    generator = torch.Generator().manual_seed(seed)
    noise = lambda p: torch.randn(p.shape, generator=generator)
    around_zero = {id(m.weight) for m in model.modules() if isinstance(m, Gemma3RMSNorm)}  # gain is 1 + weight
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1 and name.endswith("bias"):
                p.copy_(0.1 * noise(p))
            elif p.ndim == 1:
                p.copy_(1 + 0.2 * noise(p))
            elif name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                p.copy_(noise(p) / p.shape[-1] ** 0.5)
            elif p.ndim == 2 and not name.endswith(("embed_tokens.weight", "pos_embed.weight")):
                p.copy_(noise(p) / p.shape[1] ** 0.5)
            else:
                p.copy_(0.5 * noise(p))
            if name.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")):
                p.mul_(2.0)
            if name.endswith("qkv.weight"):
                p[: 2 * p.shape[0] // 3].mul_(2.0)
            if id(p) in around_zero:
                p.sub_(1)
    return model.eval()


def _model(cls: type, config, attn: str, dtype: torch.dtype):
    torch.manual_seed(0)
    return sharpen(cls._from_config(config, attn_implementation=attn)).to(dtype)


def _qwen(name: str, attn: str, dtype: torch.dtype, text: dict, vision: dict, video: type):
    """(model, processor) of a Qwen class: one tokenizer, one patch arithmetic, their own towers and decoders."""
    words = tokenizer()
    sizes = dict(depth=3, num_heads=3, in_channels=3, patch_size=4, temporal_patch_size=2, spatial_merge_size=2)
    sections = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
    if name.startswith("Qwen3"):
        sections["mrope_interleaved"] = True
    config = getattr(hf, f"{name}Config")(
        text_config=_text(words, rope_parameters=sections, **text),
        vision_config=sizes | vision,
        tie_word_embeddings=False,
        image_token_id=words.image_token_id,
        video_token_id=words.video_token_id,
        vision_start_token_id=words.vision_start_token_id,
        vision_end_token_id=words.vision_end_token_id,
    )
    pixels = dict(patch_size=4, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    images = hf.Qwen2VLImageProcessor(**pixels, size={"shortest_edge": 64, "longest_edge": 64 * 64})
    videos = video(**pixels, size={"shortest_edge": 64, "longest_edge": 8 * 64 * 64}, cap_pixels_per_frame=False)
    processor = getattr(hf, f"{name.removesuffix('Moe')}Processor")(
        image_processor=images,
        video_processor=videos,
        tokenizer=words,
        chat_template=_template("<vs><image><ve>", "<vs><video><ve>"),
    )
    return _model(getattr(hf, f"{name}ForConditionalGeneration"), config, attn, dtype), processor


def qwen2_vl(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    """Qwen2-VL; its decoder's head size is hidden / heads, so hidden is 48; its tower's width is `embed_dim`."""
    vision = dict(embed_dim=24, hidden_size=48, mlp_ratio=2)
    return _qwen("Qwen2VL", attn, dtype, dict(hidden_size=48), vision, hf.Qwen2VLVideoProcessor)


def qwen2_5_vl(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    """Qwen2.5-VL with windows of 2 x 2 tokens in blocks 0 and 2; hidden is 48 for the same reason."""
    vision = dict(hidden_size=24, intermediate_size=44, out_hidden_size=48, window_size=16, fullatt_block_indexes=[1])
    return _qwen("Qwen2_5_VL", attn, dtype, dict(hidden_size=48), vision, hf.Qwen2VLVideoProcessor)


def _deepstack(width: int) -> dict:
    """A tower whose blocks 0 and 1 also add to the decoder."""
    sizes = dict(hidden_size=24, intermediate_size=44, out_hidden_size=width)
    return sizes | dict(num_position_embeddings=64, deepstack_visual_indexes=[0, 1])


def qwen3_vl(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    """Qwen3-VL with DeepStack."""
    return _qwen("Qwen3VL", attn, dtype, {}, _deepstack(42), hf.Qwen3VLVideoProcessor)


def qwen3_vl_moe(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    """Qwen3-VL with 4 experts, 2 a token, in decoder layers 0 and 2; layer 1 is dense.

    Hidden is 40: the kernel for grouped products wants rows of whole 16 bytes, in bfloat16 too.
    """
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1])
    text = experts | dict(hidden_size=40)
    return _qwen("Qwen3VLMoe", attn, dtype, text, _deepstack(40), hf.Qwen3VLVideoProcessor)


def llava_1_5(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    """LLaVA-1.5: CLIP, the block before the last."""
    words = tokenizer()
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**_tower(projection_dim=24)),
        text_config=hf.LlamaConfig(**_text(words)),
        image_token_index=words.image_token_id,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=16,
    )
    processor = hf.LlavaProcessor(
        image_processor=LlavaImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer=words,
        patch_size=7,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        chat_template=_template("<image>"),
    )
    return _model(hf.LlavaForConditionalGeneration, config, attn, dtype), processor


def _pinpoints(side: int) -> list[list[int]]:
    return [[side, 2 * side], [2 * side, side], [2 * side, 2 * side], [3 * side, side], [side, 3 * side]]


def llava_next(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    """LLaVA-NeXT: a 32 x 24 picture is a base and 1 x 2 tiles, a 40 x 32 picture a base and 2 x 2."""
    words = tokenizer()
    config = hf.LlavaNextConfig(
        vision_config=hf.CLIPVisionConfig(**_tower(projection_dim=24)),
        text_config=hf.LlamaConfig(**_text(words)),
        image_token_index=words.image_token_id,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_grid_pinpoints=_pinpoints(28),
        image_seq_length=16,
    )
    processor = hf.LlavaNextProcessor(
        image_processor=hf.LlavaNextImageProcessor(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=_pinpoints(28)
        ),
        tokenizer=words,
        patch_size=7,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        chat_template=_template("<image>"),
    )
    return _model(hf.LlavaNextForConditionalGeneration, config, attn, dtype), processor


def llava_onevision(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    """LLaVA-OneVision: 5 x 5 patches cover 30 of a tile's 31 pixels; grids above 2 tiles are shrunk."""
    words = tokenizer()
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**_tower(image_size=31, patch_size=6, vision_use_head=False)),
        text_config=hf.Qwen2Config(**_text(words)),
        image_token_index=words.image_token_id,
        video_token_index=words.video_token_id,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
        image_grid_pinpoints=_pinpoints(31),
    )
    size = {"height": 31, "width": 31}
    processor = hf.LlavaOnevisionProcessor(
        image_processor=hf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=_pinpoints(31)),
        video_processor=hf.LlavaOnevisionVideoProcessor(size=size),
        tokenizer=words,
        num_image_tokens=25,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
        chat_template=_template("<image>", "<video>"),
    )
    return _model(hf.LlavaOnevisionForConditionalGeneration, config, attn, dtype), processor


def internvl(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    """InternVL: a 32 x 24 picture is 3 x 2 tiles and a thumbnail, a 40 x 32 picture is one tile without."""
    words = tokenizer(
        ["<context>"],
        start_image_token="<vs>",
        end_image_token="<ve>",
        context_image_token="<context>",
    )
    config = hf.InternVLConfig(
        vision_config=hf.InternVLVisionConfig(**_tower(image_size=[28, 28], patch_size=[7, 7], attention_bias=True)),
        text_config=hf.Qwen3Config(**_text(words)),
        image_token_id=words.context_image_token_id,
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    size = {"height": 28, "width": 28}
    processor = hf.InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, min_patches=1, max_patches=6),
        video_processor=hf.InternVLVideoProcessor(size=size),
        tokenizer=words,
        image_seq_length=4,
        chat_template=_template("<context>", "<video>"),
    )
    return _model(hf.InternVLForConditionalGeneration, config, attn, dtype), processor


def gemma3(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    """Gemma3: 16 tokens a picture, windows of 16 in layers 0 and 2, a scale that is not the head size's."""
    words = tokenizer(["<boi>", "<eoi>"], boi_token="<boi>", eoi_token="<eoi>")
    text = _text(
        words,
        query_pre_attn_scalar=10,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**_tower(image_size=56, vision_use_head=False)),
        text_config=hf.Gemma3TextConfig(**text),
        image_token_index=words.image_token_id,
        boi_token_index=words.boi_token_id,
        eoi_token_index=words.eoi_token_id,
        mm_tokens_per_image=16,
        tie_word_embeddings=False,
    )
    processor = hf.Gemma3Processor(
        image_processor=hf.Gemma3ImageProcessor(size={"height": 56, "width": 56}),
        tokenizer=words,
        image_seq_length=16,
        chat_template=_template("<boi>"),
    )
    return _model(hf.Gemma3ForConditionalGeneration, config, attn, dtype), processor


def _tiled(name: str, attn: str, dtype: torch.dtype, side: int, patch: int, scale: int):
    """(model, processor) of an Idefics3 class: the longest edge is always 4 tiles, tiles have 2 x 2 tokens."""
    words = tokenizer(TILES, fake_image_token=TILES[0], global_image_token=TILES[1], end_of_utterance_token=TILES[2])
    config = getattr(hf, f"{name}Config")(
        vision_config=_tower(image_size=side, patch_size=patch),
        text_config=hf.LlamaConfig(**_text(words)),
        image_token_id=words.image_token_id,
        scale_factor=scale,
        tie_word_embeddings=False,
    )
    sizes = dict(size={"longest_edge": 4 * side}, max_image_size={"longest_edge": side})
    parts = dict(image_processor=getattr(hf, f"{name}ImageProcessor")(**sizes), tokenizer=words, image_seq_len=4)
    if name == "SmolVLM":
        parts["video_processor"] = hf.SmolVLMVideoProcessor(**sizes)
    processor = getattr(hf, f"{name}Processor")(**parts, chat_template=_template("<image>", "<video>"))
    return _model(getattr(hf, f"{name}ForConditionalGeneration"), config, attn, dtype), processor


def idefics3(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    """Idefics3: a 32 x 24 picture is 4 x 3 tiles and a global view, a 40 x 32 picture 4 x 4 and one."""
    return _tiled("Idefics3", attn, dtype, side=28, patch=7, scale=2)


def smolvlm(attn: str = "sdpa", dtype: torch.dtype = torch.float32):
    """SmolVLM: the same with smaller patches, of which 4 x 4 make a token."""
    return _tiled("SmolVLM", attn, dtype, side=32, patch=4, scale=4)


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
HAS_VIDEO = {"qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "llava-onevision", "internvl", "smolvlm"}


def picture(width: int = 32, height: int = 24, seed: int = 0) -> Image.Image:
    """A random picture."""
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy())


def video(n_frames: int = 4, width: int = 32, height: int = 24, seed: int = 0) -> list[Image.Image]:
    """The frames of a random video."""
    return [picture(width, height, seed=1000 * (seed + 1) + i) for i in range(n_frames)]
