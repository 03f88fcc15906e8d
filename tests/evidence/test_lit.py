"""On every family, in every mode: the tokens that light up are exactly the located ones, as bright as their coverage."""

from dataclasses import replace

import lit
import numpy as np
import pytest
import tiny
import torch
from lit import QUESTION

from mmlens import Box, HookedVLM, Tube
from mmlens.evidence.views import Axis, edges
from mmlens.metrics import ram

SCAN = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 40, "pan_and_scan_min_ratio_to_activate": 1.2}


def _padding(processor):
    processor.image_processor.do_pad = True


def _whole(processor):
    processor.image_processor.do_image_splitting = False


# mode -> (family, sizes of the pictures of one question, what is done to the processor, options of the prompt)
MODES = {
    **{name: (name, [(160, 120)], None, {}) for name in tiny.FAMILIES},
    **{f"{name} upright": (name, [(90, 200)], None, {}) for name in tiny.FAMILIES},
    **{f"{name} long": (name, [(330, 60)], None, {}) for name in tiny.FAMILIES},
    **{f"{name} two": (name, [(120, 160), (150, 150)], None, {}) for name in tiny.FAMILIES},
    "llava-1.5 padded": ("llava-1.5", [(160, 90)], _padding, {}),
    "gemma3 scanned": ("gemma3", [(330, 110)], None, {"images_kwargs": SCAN}),
    "gemma3 scanned upright": ("gemma3", [(90, 250)], None, {"images_kwargs": SCAN}),
    "idefics3 whole": ("idefics3", [(160, 120)], _whole, {}),
    "smolvlm whole": ("smolvlm", [(160, 120)], _whole, {}),
    "qwen2.5-vl large": ("qwen2.5-vl", [(640, 427)], None, {}),
    "qwen3-vl small": (
        "qwen3-vl",
        [(40, 24)],
        None,
        {"images_kwargs": {"size": {"shortest_edge": 4096, "longest_edge": 8192}}},
    ),
}
CLIPS = {f"{name} {n} frames": (name, (160, 120), n) for name in sorted(tiny.HAS_VIDEO) for n in (4, 5)}


@pytest.fixture(scope="module")
def opened():
    """Lit models by name, each built once."""
    held = {}

    def get(name, change=None):
        if (name, change) not in held:
            model, processor = tiny.FAMILIES[name]()
            lit.plain_pixels(processor, name)
            if change is not None:
                change(processor)
            held[name, change] = HookedVLM.from_model(lit.light(model, name), processor)
        return held[name, change]

    yield get
    for vlm in held.values():
        vlm.close()


def _cuts(shown, axis, length, rng, far):
    """Two edges that no look blurs into the next cell: at least `far` resampled pixels from every cell's edge."""
    good = []
    for at in range(1, length):
        near = [np.abs(edges(getattr(v, axis)) - at).min() * getattr(v, axis).scale for v in shown.views]
        if min(near) >= far:
            good.append(at)
    lengths = [(a, b) for a in good for b in good if length // 8 <= b - a <= length * 3 // 4]
    return lengths[rng.integers(len(lengths))] if lengths else None


def _tight_box(shown, seed, far=1.6):
    rng = np.random.default_rng(seed)
    x, y = _cuts(shown, "x", shown.size[0], rng, far), _cuts(shown, "y", shown.size[1], rng, far)
    return None if x is None or y is None else Box.from_xyxy(x[0], y[0], x[1], y[1])


def _white(vlm, prompt):
    """The same pictures or clip, all white."""
    example = prompt.examples[0]
    if example.videos:
        clip = example.videos[0]
        return vlm.prompt(QUESTION, videos=[np.full((len(clip), *clip.size[::-1], 3), 255, np.uint8)])
    full = [np.full((*p.size[::-1], 3), 255, np.uint8) for p in example.images]
    return vlm.prompt(QUESTION, images=full, images_kwargs=prompt.images_kwargs)


class Lamp:
    """How bright each picture token is, 0 for a black picture and 1 for a white one."""

    def __init__(self, vlm, dark):
        self.vlm = vlm
        self.dark = lit.brightness(vlm, dark)
        self.white = (lit.brightness(vlm, _white(vlm, dark)) - self.dark)[list(dark.tokens("image").positions)].max()

    def error(self, prompt, where):
        """The largest difference between light and coverage; raises where the lit set is not the located one."""
        light = (lit.brightness(self.vlm, prompt) - self.dark) / self.white
        picture = prompt.tokens("image").positions
        share = dict(zip(where.positions, where.coverage))
        # 8 bits a pixel: a share below 1 % may be lit or not
        assert {c for c in picture if light[c] > 0.012} == {c for c in share if share[c] > 0.012}
        assert all(share.get(c, 0.0) > 0 for c in picture if light[c] > 0.005)
        return max(abs(light[c] - share.get(c, 0.0)) for c in picture)


def _boxes(vlm, mode, n=3):
    """(picture, box, dark prompt, lit prompt) for some boxes in every picture of a mode."""
    _, sizes, _, options = MODES[mode]
    black = [np.zeros((h, w, 3), np.uint8) for w, h in sizes]
    dark = vlm.prompt(QUESTION, images=black, **options)
    far = 2.3 if mode.split()[0] in lit.DROPS_ZEROS else 1.6  # these resample twice, rounding to 8 bits between
    for image, size in enumerate(sizes):
        for seed in range(n):
            box = _tight_box(dark.views(image), seed, far)
            if box is not None:
                pictures = [lit.lamp(size, box) if i == image else b for i, b in enumerate(black)]
                yield image, box, dark, vlm.prompt(QUESTION, images=pictures, **options)


@pytest.mark.parametrize("mode", MODES)
def test_lit_tokens_are_exactly_the_located_ones(opened, mode):
    vlm = opened(*_model(mode))
    checked, lamp = 0, None
    for image, box, dark, prompt in _boxes(vlm, mode):
        lamp = lamp or Lamp(vlm, dark)
        where = prompt.locate(box, image=image)
        if where:
            assert lamp.error(prompt, where) <= (0.01 if vlm.family.name in lit.DROPS_ZEROS else 0.005)
            checked += 1
    assert checked, "no box is tight: use another size"


def _model(mode):
    return MODES[mode][0], MODES[mode][2]


@pytest.mark.parametrize("mode", MODES)
def test_a_head_that_looks_for_light_has_all_its_mass_on_the_evidence(opened, mode):
    """RAM (CoRe heads, eq. 1) of such a head is 1, whatever is written around the picture."""
    vlm = opened(*_model(mode))
    for image, box, _, prompt in _boxes(vlm, mode, n=1):
        where = prompt.locate(box, image=image)
        if where:
            assert _mass(vlm, prompt, where) == pytest.approx(1, abs=1e-3)


def _mass(vlm, prompt, where):
    layer = lit.LOOKS.get(vlm.family.name, 0)
    _, cache = vlm.run_with_cache(prompt, [f"blocks.{layer}.attn.hook_pattern"], rows="question")
    pattern = cache["pattern", layer]
    keys = torch.zeros(1, prompt.n_columns, dtype=torch.bool)
    keys[0, list(where.positions)] = True
    return float(ram(pattern, torch.ones(1, pattern.shape[2], dtype=torch.bool), keys)[0, 0])


# ---------------------------------------------------------------------- clips
def _clip_boxes(size, n):
    """A box that jumps: another place in every frame, none in the last."""
    w, h = size
    return {f: Box.from_xywh(10 + 25 * (f % 4), 15 + 20 * (f % 3), 41, 37) for f in range(n - 1)}


@pytest.mark.parametrize("mode", CLIPS)
def test_lit_tokens_of_a_clip_are_those_of_the_tube(opened, mode):
    name, size, n = CLIPS[mode]
    vlm = opened(name, None)
    black = np.zeros((n, size[1], size[0], 3), np.uint8)
    dark = vlm.prompt(QUESTION, videos=[black])
    tight = {f: box for f in range(n - 1) if (box := _tight_box(dark.views(0), f)) is not None}
    assert len(tight) == n - 1
    frames = np.stack([lit.lamp(size, tight[f]) if f in tight else black[f] for f in range(n)])
    prompt = vlm.prompt(QUESTION, videos=[frames])
    where = prompt.locate(Tube.from_frames(tight))
    # frames are mixed by two in some families, so that the share of each is half as exact
    assert Lamp(vlm, dark).error(prompt, where) <= 0.005
    assert _mass(vlm, prompt, where) == pytest.approx(1, abs=1e-3)
    assert len(where.by_view) >= 2
    heat = prompt.heatmap(where)
    assert heat.shape == (n, size[1], size[0])
    for f, box in tight.items():
        assert np.nanmin(heat[f][int(box.y0) : int(box.y1), int(box.x0) : int(box.x1)]) > 0


# ---------------------------------------------------------------------- mutations
def _without_newlines(shown):
    return replace(shown, views=tuple(replace(v, stride=0) for v in shown.views))


def _swapped(shown):
    """Tiles where the thumbnail is, and the other way round."""
    a, b = shown.views
    if a.name == "tiles":
        return replace(shown, views=(replace(a, first=b.rows * b.cols), replace(b, first=0)))
    return replace(shown, views=(replace(a, first=b.rows * b.cols), replace(b, first=0, stride=b.stride, name="tiles")))


def _stretched(shown):
    """Whatever the processor does, taken for a squeeze of the whole picture onto the grid."""
    axes = lambda axis, size: Axis(axis.cells * axis.cell / size, 0.0, axis.cell, axis.cells, tokens=axis.tokens)
    w, h = shown.size
    return replace(shown, views=tuple(replace(v, x=axes(v.x, w), y=axes(v.y, h)) for v in shown.views))


def _unresized(shown):
    """Source pixels taken for view pixels."""
    return replace(
        shown, views=tuple(replace(v, x=replace(v.x, scale=1.0), y=replace(v.y, scale=1.0)) for v in shown.views)
    )


def _row_major(shown):
    """Tiles taken for one raster."""
    return replace(shown, views=tuple(replace(v, tile_side=0) for v in shown.views))


def _transposed(shown):
    return replace(shown, views=tuple(replace(v, x=v.y, y=v.x, stride=0) for v in shown.views))


def _no_dead_border(shown):
    axes = lambda axis: replace(axis, cell=axis.tile / axis.per_tile if axis.per_tile else axis.cell)
    return replace(shown, views=tuple(replace(v, x=axes(v.x), y=axes(v.y)) for v in shown.views))


def _uncut(shown):
    """Padding rows and columns that the model dropped taken for kept."""
    return replace(shown, views=tuple(replace(v, x=replace(v.x, cut=0), y=replace(v.y, cut=0)) for v in shown.views))


def _shifted(shown):
    """One token further on."""
    return replace(shown, views=tuple(replace(v, first=v.first + 1) for v in shown.views))


MUTATIONS = {
    "qwen3-vl": (_unresized, _transposed, _shifted),
    "qwen2.5-vl large": (_unresized, _transposed, _shifted),
    "llava-1.5": (_stretched, _unresized, _shifted),
    "llava-1.5 padded": (_stretched, _unresized),
    "llava-next": (_without_newlines, _swapped, _shifted),
    "llava-next long": (_stretched, _uncut, _without_newlines),
    "llava-onevision": (_without_newlines, _no_dead_border, _swapped),
    "llava-onevision two": (_stretched, _shifted),
    "internvl": (_swapped, _row_major, _shifted),
    "gemma3 scanned": (_stretched, _shifted),
    "idefics3": (_swapped, _row_major),
    "smolvlm": (_swapped, _row_major),
}


@pytest.mark.parametrize("mode,mutate", [(m, f) for m, of in MUTATIONS.items() for f in of])
def test_planted_faults_of_geometry_are_seen(opened, mode, mutate, monkeypatch):
    vlm = opened(*_model(mode))
    cases = list(_boxes(vlm, mode))
    lamp = Lamp(vlm, cases[0][2])
    true = type(vlm.family).views
    monkeypatch.setattr(type(vlm.family), "views", lambda *a, **k: mutate(true(*a, **k)))

    def passes(image, box, prompt):
        try:
            return lamp.error(prompt, prompt.locate(box, image=image)) <= 0.005
        except (AssertionError, IndexError):
            return False

    assert not all(passes(image, box, prompt) for image, box, _, prompt in cases)
