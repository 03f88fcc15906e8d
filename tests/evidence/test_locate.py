"""Boxes to tokens on both families, against the real processors."""

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlens import Box, HookedVLM
from mmlens.evidence.views import pad_to_square, shortest_edge_center_crop, stretch

SIZES = {
    "qwen3-vl": [(32, 24), (40, 32), (64, 16), (30, 21), (20, 50)],
    "llava-1.5": [(28, 28), (50, 28), (31, 64), (14, 14), (90, 40)],
}


def _brightness(family, vlm, box, size):
    """How bright each token's own pixels are when only the box is white: an independent account of coverage."""
    width, height = size
    picture = np.zeros((height, width, 3), np.uint8)
    picture[int(box.y0) : int(box.y1), int(box.x0) : int(box.x1)] = 255
    dark = vlm.prompt("what", images=[np.zeros_like(picture)])
    prompt = vlm.prompt("what", images=[picture])
    change = prompt.inputs["pixel_values"] - dark.inputs["pixel_values"]
    if family == "qwen3-vl":
        # rows are patches in 2 x 2 blocks: four rows make a token
        return prompt, change.reshape(-1, 4, change.shape[1]).mean((1, 2))
    tiles = change[0].unfold(1, 7, 7).unfold(2, 7, 7)
    return prompt, tiles.mean((0, 3, 4)).flatten()


@pytest.mark.parametrize("index", range(5))
def test_located_tokens_are_the_lit_ones(family, index):
    size = SIZES[family][index]
    rng = np.random.default_rng(index)
    with HookedVLM.from_model(*tiny.FAMILIES[family]()) as vlm:
        white = _brightness(family, vlm, Box.from_xyxy(0, 0, *size), size)[1].max()
        hits = 0
        for _ in range(8):
            x0, y0 = int(rng.integers(0, size[0] - 6)), int(rng.integers(0, size[1] - 6))
            box = Box.from_xyxy(x0, y0, int(rng.integers(x0 + 5, size[0] + 1)), int(rng.integers(y0 + 5, size[1] + 1)))
            prompt, lit = _brightness(family, vlm, box, size)
            found = prompt.locate(box)
            columns = prompt.tokens("image:0").positions
            coverage = torch.zeros(len(columns))
            for c, share in zip(found.positions, found.coverage[0]):
                coverage[columns.index(c)] = share
            # resampling blurs edges by a pixel or two; a cell is 7 or 8 pixels wide
            assert (lit / white - coverage).abs().max() < 0.3
            hits += len(found)
        assert hits > 8


def test_the_whole_picture_is_every_token_of_it(wrapped):
    prompt = wrapped.prompt("what", images=[tiny.picture(40, 32)])
    assert prompt.locate(Box.from_xyxy(0, 0, 40, 32)).positions == prompt.tokens("image:0").positions


def test_evidence_becomes_a_group_and_the_second_picture_has_its_own_tokens(wrapped):
    box = Box.from_xyxy(0, 0, 10, 10)
    prompt = wrapped.prompt(
        ["what color is the star?", "what"],
        images=[[tiny.picture()], [tiny.picture(40, 32), tiny.picture()]],
        evidence=[[box], [box]],
    )
    assert prompt.tokens("evidence").per_example[0] == prompt.locate(box).per_example[0]
    second = prompt.locate(box, example=1, image=1)
    assert second.per_example[0] == () and set(second.per_example[1]) <= set(prompt.tokens("image").per_example[1])
    assert set(second.per_example[1]) <= set(prompt.roles[1]["image:1"])


def test_llava_crops_what_lies_outside_and_says_so():
    with HookedVLM.from_model(*tiny.llava_1_5()) as vlm:
        prompt = vlm.prompt("what", images=[tiny.picture(90, 28)])
        found = prompt.locate(Box.from_xyxy(0, 0, 20, 28))
        assert found.positions == () and "crop" in found.reason
        assert prompt.locate(Box.from_xyxy(31, 0, 59, 28)).positions == prompt.tokens("image").positions


def test_llava_that_pads_keeps_everything():
    model, processor = tiny.llava_1_5()
    processor.image_processor.do_pad = True
    with HookedVLM.from_model(model, processor) as vlm:
        prompt = vlm.prompt("what", images=[tiny.picture(56, 28)])
        whole = prompt.locate(Box.from_xyxy(0, 0, 56, 28))
        rows = {prompt.tokens("image").positions.index(c) // 4 for c in whole.positions}
        assert rows == {1, 2} and whole.coverage[0] == pytest.approx([1.0] * 8)


# ------------------------------------------------------------------ arithmetic
VIEWS = {
    "stretch": lambda w, h: stretch(w, h, cols=6, rows=5, cell=8),
    "crop": lambda w, h: shortest_edge_center_crop(w, h, edge=28, crop=28, cell=7),
    "pad": lambda w, h: pad_to_square(w, h, side=28, cell=7),
}


@given(st.sampled_from(sorted(VIEWS)), st.integers(8, 300), st.integers(8, 300), st.data())
@settings(max_examples=200)
def test_a_partition_of_the_picture_covers_each_token_once(kind, w, h, data):
    view = VIEWS[kind](w, h)
    cut_x, cut_y = data.draw(st.integers(1, w - 1)), data.draw(st.integers(1, h - 1))
    total = {}
    for x0, x1 in ((0, cut_x), (cut_x, w)):
        for y0, y1 in ((0, cut_y), (cut_y, h)):
            for token, share in view.coverage(Box(x0, y0, x1, y1)).items():
                total[token] = total.get(token, 0) + share
    whole = view.coverage(Box(0, 0, w, h))
    assert total.keys() == whole.keys()
    assert all(abs(total[t] - whole[t]) < 1e-6 and whole[t] <= 1 + 1e-9 for t in whole)
    if kind == "stretch":
        assert len(whole) == 30 and all(abs(s - 1) < 1e-6 for s in whole.values())


@given(st.sampled_from(sorted(VIEWS)), st.integers(8, 300), st.integers(8, 300), st.data())
def test_a_token_cell_covers_itself_and_nothing_else(kind, w, h, data):
    view = VIEWS[kind](w, h)
    token = data.draw(st.integers(0, view.rows * view.cols - 1))
    x0, y0, x1, y1 = view.source_box(token)
    found = {t: s for t, s in view.coverage(Box(x0, y0, x1, y1)).items() if s > 1e-6}
    assert set(found) == {token} and found[token] == pytest.approx(1, abs=1e-6)


@given(st.integers(8, 300), st.integers(8, 300), st.data())
def test_mirrored_boxes_hit_mirrored_columns(w, h, data):
    x0, x1 = sorted(data.draw(st.lists(st.integers(0, w), min_size=2, max_size=2, unique=True)))
    view = VIEWS["stretch"](w, h)
    left, right = view.coverage(Box(x0, 0, x1, h)), view.coverage(Box(w - x1, 0, w - x0, h))
    mirrored = {r * 6 + 5 - c: s for t, s in left.items() for r, c in [divmod(t, 6)]}
    strong = lambda d: {t for t, s in d.items() if s > 1e-6}
    assert strong(mirrored) == strong(right)


@given(st.integers(8, 300), st.integers(8, 300), st.data())
def test_growing_a_box_only_adds(w, h, data):
    view = VIEWS["pad"](w, h)
    x = data.draw(st.integers(0, w - 2))
    small, large = view.coverage(Box(x, 0, x + 1, h)), view.coverage(Box(x, 0, x + 2, h))
    assert all(large[t] >= s - 1e-9 for t, s in small.items())
