"""How many tokens a picture fills, on every family with its published settings: arithmetic, and the real processors."""

import functools
import math

import numpy as np
import pytest
import tiny
import torch
import transformers as hf
from PIL import Image
from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor
from transformers.models.qwen2_vl import image_processing_qwen2_vl as qwen2
from transformers.models.qwen3_vl import video_processing_qwen3_vl as qwen3

from mmlens import Page, evidence
from mmlens.errors import GeometryError, OptionError

PRIMES = [(7, 13), (101, 103), (337, 557), (853, 641), (1009, 997)]
EXTREMES = [
    (1, 1),
    (1, 150),
    (150, 1),
    (2, 400),
    (400, 2),
    (200, 1),
    (1, 200),
    (28, 28),
    (336, 336),
    (384, 384),
    (448, 448),
]
EXTREMES += [(364, 364), (512, 512), (640, 427), (427, 640), (42, 70), (98, 126), (1280, 960), *PRIMES]


def _sizes(n, seed, most):
    """Extreme sizes first, then random ones, log-uniform, so that small and narrow ones are frequent."""
    rng = np.random.default_rng(seed)
    return EXTREMES + [tuple(int(s) for s in np.exp(rng.uniform(0, math.log(most), 2))) for _ in range(n)]


def _set(part, **settings):
    for name, value in settings.items():
        setattr(part, name, value)


def _tiny(name):
    return tiny.FAMILIES[name]()[1]


def _qwen(name, patch, least, most):
    processor = _tiny(name)
    for part in (processor.image_processor, processor.video_processor):
        _set(part, patch_size=patch, size={"shortest_edge": least, "longest_edge": most})
    return processor


def _next():
    processor = _tiny("llava-next")
    pinpoints = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    sizes = dict(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    _set(processor.image_processor, image_grid_pinpoints=pinpoints, **sizes)
    _set(processor, patch_size=14)
    return processor


def _onevision():
    processor = _tiny("llava-onevision")
    pinpoints = [[384 * r, 384 * c] for r in range(1, 7) for c in range(1, 7)]
    _set(processor.image_processor, image_grid_pinpoints=pinpoints, size={"height": 384, "width": 384})
    _set(processor.video_processor, size={"height": 384, "width": 384})
    _set(processor, num_image_tokens=729, vision_aspect_ratio="anyres_max_9")
    return processor


def _llava(pad=False):
    processor = _tiny("llava-1.5")
    sizes = dict(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    _set(processor.image_processor, do_pad=pad, **sizes)
    _set(processor, patch_size=14)
    return processor


def _internvl():
    processor = _tiny("internvl")
    _set(processor.image_processor, size={"height": 448, "width": 448}, max_patches=12)
    _set(processor.video_processor, size={"height": 448, "width": 448})
    _set(processor, image_seq_length=256)
    return processor


def _gemma3():
    processor = _tiny("gemma3")
    _set(processor.image_processor, size={"height": 896, "width": 896})
    _set(processor, image_seq_length=256, full_image_sequence=f"\n\n<boi>{'<image>' * 256}<eoi>\n\n")
    return processor


def _tiled(name, longest, tile, n):
    processor = _tiny(name)
    for part in (processor.image_processor, getattr(processor, "video_processor", None)):
        if part is not None:
            _set(part, size={"longest_edge": longest}, max_image_size={"longest_edge": tile})
    _set(processor, image_seq_len=n)
    return processor


def _paligemma():
    words = tiny.tokenizer()
    pixels = hf.SiglipImageProcessor(size={"height": 224, "width": 224})
    pixels.image_seq_length = 256
    return hf.PaliGemmaProcessor(image_processor=pixels, tokenizer=words)


SCAN = {"do_pan_and_scan": True}

# mode -> (processor with published settings, images_kwargs)
MODES = {
    "qwen2-vl": (lambda: _qwen("qwen2-vl", 14, 3136, 12845056), {}),
    "qwen2.5-vl": (lambda: _qwen("qwen2.5-vl", 14, 3136, 1003520), {}),
    "qwen3-vl": (lambda: _qwen("qwen3-vl", 16, 65536, 16777216), {}),
    "llava-1.5": (_llava, {}),
    "llava-1.5 padded": (lambda: _llava(pad=True), {}),
    "llava-next": (_next, {}),
    "llava-onevision": (_onevision, {}),
    "internvl": (_internvl, {}),
    "gemma3": (_gemma3, {}),
    "gemma3 scanned": (_gemma3, SCAN),
    "idefics3": (lambda: _tiled("idefics3", 1456, 364, 169), {}),
    "smolvlm": (lambda: _tiled("smolvlm", 2048, 512, 64), {}),
    "smolvlm2": (lambda: _tiled("smolvlm", 1536, 384, 81), {}),
    "paligemma": (_paligemma, {}),
}


@functools.cache
def _processor(mode):
    return MODES[mode][0]()


# ---------------------------------------------------------------------- what transformers itself says
def _qwen_says(processor, size):
    part = processor.image_processor
    factor = part.patch_size * part.merge_size
    h, w = qwen2.smart_resize(
        size[1], size[0], factor, min_pixels=part.size["shortest_edge"], max_pixels=part.size["longest_edge"]
    )
    return (h // factor) * (w // factor)


def _anyres_says(processor, size):
    # the count in its call leaves out the base look's CLS row
    cls = getattr(processor, "vision_feature_select_strategy", "") == "default"
    return -cls + processor._get_number_of_features(size[1], size[0], *_tile(processor))


def _tile(processor):
    pixels = processor.image_processor
    found = getattr(pixels, "crop_size", None) or pixels.size
    return found["height"], found["width"]


def _internvl_says(processor, size):
    return 256 * processor.image_processor.get_number_of_image_patches(size[1], size[0], {"crop_to_patches": True})


def _tiled_says(processor, size):
    patches = processor.image_processor.get_number_of_image_patches(size[1], size[0], {"do_image_splitting": True})
    return processor.image_seq_len * (patches[0] if isinstance(patches, tuple) else patches)


def _scanned_says(processor, size):
    crops = Gemma3ImageProcessor().pan_and_scan_batched(torch.empty(1, 3, size[1], size[0], device="meta"), 256, 4, 1.2)
    return 256 * (1 + len(crops))


SAYS = {
    "qwen": _qwen_says,
    "llava-1.5": lambda p, s: 576,
    "llava-next": _anyres_says,
    "llava-onevision": _anyres_says,
    "internvl": _internvl_says,
    "gemma3 scanned": _scanned_says,
    "gemma3": lambda p, s: 256,
    "idefics3": _tiled_says,
    "smolvlm": _tiled_says,
    "paligemma": lambda p, s: 256,
}


def _says(mode):
    return next(f for name, f in SAYS.items() if mode.startswith(name))


@pytest.mark.parametrize("mode", MODES)
def test_counts_of_two_thousand_sizes(mode):
    processor, says = _processor(mode), _says(mode)
    for size in _sizes(2000, 1, 5000):
        try:
            expected = says(processor, size)
        except ValueError:  # 200 : 1
            with pytest.raises(GeometryError, match="200 : 1"):
                evidence.layout(processor, sizes=[size])
            continue
        shown = evidence.layout(processor, sizes=[size], images_kwargs=MODES[mode][1])[0]
        assert shown.count == expected, size
        named = [o for view in shown.views for o in view.ordinals.ravel().tolist()] if shown.count < 3000 else None
        assert named is None or sorted([*named, *shown.newlines]) == list(range(shown.count)), size


def _placeholders(processor, sizes, options):
    """Runs of the real processor: placeholders in the text of one question."""
    pictures = [Image.new("RGB", size) for size in sizes]
    mark = getattr(processor, "boi_token", None) or getattr(processor, "image_token", "<image>")
    if type(processor).__name__.startswith("Qwen"):
        mark = "<vs><image><ve>"
    token = processor.tokenizer.image_token_id if hasattr(processor, "boi_token") else processor.image_token_id
    nested = (
        [pictures]
        if not type(processor).__name__.startswith(("Qwen", "InternVL", "LlavaNext", "LlavaProcessor"))
        else pictures
    )
    out = processor(text=[mark * len(sizes) + "what"], images=nested, images_kwargs=options, return_tensors="pt")
    return int((out["input_ids"] == token).sum())


@pytest.mark.parametrize("mode", MODES)
def test_counts_of_the_real_processor(mode):
    processor, options = _processor(mode), MODES[mode][1]
    checked = 0
    for size in _sizes(50, 2, 900):
        try:
            found = _placeholders(processor, [size], options)
        except ValueError:
            continue  # this processor refuses the size (200 : 1, or less than a pixel after scaling)
        assert found == evidence.layout(processor, sizes=[size], images_kwargs=options)[0].count, size
        checked += 1
    assert checked >= 60
    pair = [(640, 427), (300, 500)]
    assert _placeholders(processor, pair, options) == sum(
        p.count for p in evidence.layout(processor, sizes=pair, images_kwargs=options)
    )


CLIPS = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "llava-onevision", "internvl", "smolvlm")


@pytest.mark.parametrize("mode", CLIPS)
def test_counts_of_clips(mode):
    processor = _processor(mode)
    rng = np.random.default_rng(3)
    for _ in range(12):
        size, n = (int(rng.integers(20, 300)), int(rng.integers(20, 300))), int(rng.integers(2, 8))
        clip = [Image.new("RGB", size) for _ in range(n)]
        metadata = [
            hf.video_utils.VideoMetadata(total_num_frames=n, fps=2.0, duration=n / 2, frames_indices=list(range(n)))
        ]
        text = "<vs><video><ve>" if mode.startswith("qwen") else "<video>"
        out = processor(
            text=[text], videos=[clip], video_metadata=metadata, do_sample_frames=False, return_tensors="pt"
        )
        token = processor.image_token_id if mode in ("internvl", "smolvlm") else processor.video_token_id
        shown = evidence.layout(processor, sizes=[size], frames=n)[0]
        assert int((out["input_ids"] == token).sum()) == shown.count, (size, n)
        assert evidence.locate([shown], Page(0)).positions == tuple(
            sorted(set(range(shown.count)) - set(shown.newlines))
        )


def test_two_thousand_clips_by_arithmetic():
    """Qwen3-VL budgets the whole clip, Qwen2-VL each frame."""
    for mode, says in (("qwen3-vl", _clip3), ("qwen2-vl", _clip2)):
        processor = _processor(mode)
        rng = np.random.default_rng(4)
        for size in _sizes(1000, 5, 3000):
            n = int(rng.integers(2, 200))
            try:
                h, w = says(processor.video_processor, size, n)
            except ValueError:
                with pytest.raises(GeometryError):
                    evidence.layout(processor, sizes=[size], frames=n)
                continue
            factor = processor.video_processor.patch_size * 2
            expected = -(-n // 2) * (h // factor) * (w // factor)
            assert evidence.layout(processor, sizes=[size], frames=n)[0].count == expected, (size, n)


def _clip3(part, size, n):
    limits = dict(min_pixels=part.size["shortest_edge"], max_pixels=part.size["longest_edge"])
    return qwen3.smart_resize(n, size[1], size[0], 2, part.patch_size * 2, **limits)


def _clip2(part, size, n):
    limits = dict(min_pixels=part.size["shortest_edge"], max_pixels=part.size["longest_edge"])
    return qwen2.smart_resize(size[1], size[0], part.patch_size * 2, **limits)


def test_a_picture_as_published():
    """Tokens of a 640 x 427 picture with published settings, as counted once through the real models."""
    expected = {"qwen2-vl": 345, "qwen3-vl": 260, "llava-1.5": 576, "llava-next": 2144, "llava-onevision": 2709}
    expected |= {"internvl": 1792, "gemma3": 256, "idefics3": 2197, "smolvlm": 832, "paligemma": 256}
    found = {mode: evidence.layout(_processor(mode), sizes=[(640, 427)])[0].count for mode in expected}
    assert found == expected
    two = evidence.layout(_processor("llava-onevision"), sizes=[(640, 427), (640, 427)])
    assert [p.count for p in two] == [730, 730]
    assert evidence.layout(_processor("llava-onevision"), sizes=[(1280, 960)])[0].count == 7309
    assert evidence.layout(_processor("llava-onevision"), sizes=[(640, 427)], frames=8)[0].count == 8 * 196 + 1
    assert evidence.layout(_processor("smolvlm2"), sizes=[(900, 600)])[0].count == 1053


@pytest.mark.parametrize(
    "call,error",
    [
        (lambda: evidence.layout(object(), sizes=[(4, 4)]), GeometryError),
        (lambda: evidence.layout(_processor("gemma3"), sizes=[(4, 4)], frames=2), GeometryError),
        (lambda: evidence.layout(_processor("qwen3-vl"), sizes=[(4, 4)], frames=0), OptionError),
        (lambda: evidence.layout(_processor("qwen3-vl"), sizes=[(4, 4)], frames=[2, 3]), OptionError),
        (lambda: evidence.layout(_processor("qwen3-vl"), sizes=[(4, 0)]), OptionError),
        (lambda: evidence.layout(_processor("qwen3-vl"), sizes=[(4.5, 4)]), OptionError),
    ],
)
def test_layouts_that_mean_nothing_are_refused(as_users, call, error):
    with pytest.raises(error):
        call()
