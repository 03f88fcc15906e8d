"""Regions to tokens and back: units, unions, tubes, pages, reasons, heat maps, and what must hold whatever the box."""

import subprocess
import sys

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlens import Box, HookedVLM, Mask, Page, PageRegion, Polygon, TokenSet, Tube, evidence
from mmlens.errors import OptionError, RegionError
from mmlens.evidence.area import area_of
from mmlens.evidence.schemes import (
    anyres_views,
    cropped_views,
    padded_views,
    pan_and_scan,
    qwen_clip,
    qwen_views,
    scanned_views,
    tiled_views,
)
from mmlens.evidence.views import edges

PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))

# Every scheme, as a function of the picture's size.
SCHEMES = {
    "stretch": lambda size: qwen_views(size, (6, 5), cell=28),
    "crop": lambda size: cropped_views(size, edge=336, crop=336, cell=14),
    "pad": lambda size: padded_views(size, side=336, cells=24, cell=14),
    "anyres": lambda size: anyres_views(size, pinpoints=PINPOINTS, tile=336, side=24, cell=14),
    "anyres shrunk": lambda size: anyres_views(size, pinpoints=PINPOINTS, tile=336, side=24, cell=14, most=1),
    "anyres bordered": lambda size: anyres_views(size, pinpoints=((384, 768),), tile=384, side=27, cell=14),
    "tiles": lambda size: tiled_views(size, (3, 2), tile=448, side=16, cell=28),
    "one tile": lambda size: tiled_views(size, None, tile=448, side=16, cell=28),
    "scan": lambda size: scanned_views(size, pan_and_scan(size, least=64, most=4, ratio=1.2), side=896, cells=16),
}
KEEPS_ALL = ("stretch", "tiles", "one tile", "scan")  # no padding, nothing cropped, no pixel without a token
sizes = st.tuples(st.integers(8, 700), st.integers(8, 700))


@st.composite
def boxes(draw, size):
    x = sorted(draw(st.lists(st.integers(0, size[0]), min_size=2, max_size=2, unique=True)))
    y = sorted(draw(st.lists(st.integers(0, size[1]), min_size=2, max_size=2, unique=True)))
    return Box(x[0], y[0], x[1], y[1])


def _shares(shown, region):
    found = evidence.locate((shown,), region)
    return dict(zip(found.positions, found.coverage))


# ---------------------------------------------------------------------- what holds for every box
@given(st.sampled_from(sorted(SCHEMES)), sizes, st.data())
@settings(max_examples=150)
def test_a_partition_of_the_picture_partitions_each_token(scheme, size, data):
    shown = SCHEMES[scheme](size)
    w, h = size
    cut_x, cut_y = data.draw(st.integers(1, w - 1)), data.draw(st.integers(1, h - 1))
    total = {}
    for x0, x1 in ((0, cut_x), (cut_x, w)):
        for y0, y1 in ((0, cut_y), (cut_y, h)):
            for token, share in _shares(shown, Box(x0, y0, x1, y1)).items():
                total[token] = total.get(token, 0) + share
    whole = _shares(shown, Box(0, 0, w, h))
    assert total.keys() == whole.keys()
    assert all(abs(total[t] - whole[t]) < 1e-6 and whole[t] <= 1 + 1e-9 for t in whole)


@given(st.sampled_from(sorted(SCHEMES)), sizes)
def test_the_whole_picture_is_every_token_that_shows_any_of_it(scheme, size):
    shown = SCHEMES[scheme](size)
    whole = _shares(shown, Box(0, 0, *size))
    carriers = set(range(shown.count)) - set(shown.newlines)
    assert set(whole) <= carriers and set(whole) == set(_shares(shown, Page(0)))
    if scheme in KEEPS_ALL:
        assert set(whole) == carriers and min(whole.values()) > 1 - 1e-6
    padding = carriers - set(whole)
    for token in list(padding)[:20]:  # those left out hold padding only
        view = next(v for v in shown.views if (v.ordinals == token).any())
        x0, y0, x1, y1 = view.source_box(token)
        assert x0 >= size[0] - 1e-6 or y0 >= size[1] - 1e-6 or x1 <= 1e-6 or y1 <= 1e-6


@given(st.sampled_from(sorted(SCHEMES)), sizes, st.data())
def test_a_tokens_own_pixels_are_that_token(scheme, size, data):
    shown = SCHEMES[scheme](size)
    view = data.draw(st.sampled_from(shown.views))
    token = int(view.ordinals.ravel()[data.draw(st.integers(0, view.rows * view.cols - 1))])
    x0, y0, x1, y1 = view.source_box(token)
    x0, y0, x1, y1 = max(x0, 0), max(y0, 0), min(x1, size[0]), min(y1, size[1])
    if x1 - x0 < 1e-6 or y1 - y0 < 1e-6:
        return
    mine = _shares(shown, Box(x0, y0, x1, y1))
    here = {t: s for t, s in mine.items() if (view.ordinals == t).any() and s > 1e-6}
    assert max(here, key=here.get) == token
    if view.x.n == view.x.cells and view.y.n == view.y.cells:
        assert set(here) == {token}


@given(sizes, st.data())
def test_a_partition_along_cell_edges_partitions_the_tokens(size, data):
    for scheme in ("stretch", "one tile"):
        shown = SCHEMES[scheme](size)
        view = shown.views[0]
        cut = data.draw(st.integers(1, view.cols - 1))
        at = float(edges(view.x)[0, cut])
        left, right = (_shares(shown, Box(*b)) for b in ((0, 0, at, size[1]), (at, 0, *size)))
        assert not set(left) & set(right)
        assert set(left) | set(right) == set(range(shown.count))


@given(st.sampled_from(["stretch", "tiles", "pad", "one tile"]), sizes, st.data())
def test_mirrored_boxes_hit_mirrored_columns(scheme, size, data):
    size = (size[0] * 2, size[1] * 2)  # padding and cropping then halve evenly
    shown = SCHEMES[scheme](size)
    box = data.draw(boxes(size))
    mirrored = Box(size[0] - box.x1, box.y0, size[0] - box.x0, box.y1)
    here, there = _shares(shown, box), _shares(shown, mirrored)
    for view in shown.views:
        flipped = dict(zip(view.ordinals.ravel().tolist(), view.ordinals[:, ::-1].ravel().tolist()))
        a = {flipped[t] for t, s in here.items() if t in flipped and s > 1e-6}
        b = {t for t, s in there.items() if t in flipped and s > 1e-6}
        assert a == b


@given(st.sampled_from(sorted(SCHEMES)), sizes, st.data())
def test_growing_a_region_only_adds(scheme, size, data):
    shown = SCHEMES[scheme](size)
    box = data.draw(boxes(size))
    wide = Box(max(box.x0 - 3, 0), max(box.y0 - 3, 0), min(box.x1 + 3, size[0]), min(box.y1 + 3, size[1]))
    small, large = _shares(shown, box), _shares(shown, wide)
    assert all(large[t] >= s - 1e-9 for t, s in small.items())


@given(st.sampled_from(sorted(SCHEMES)), sizes, st.data())
@settings(max_examples=60)
def test_the_heat_of_a_box_covers_it_and_nothing_a_cell_away(scheme, size, data):
    shown = SCHEMES[scheme](size)
    box = data.draw(boxes(size))
    share = _shares(shown, box)
    for view in shown.views:
        values = np.vectorize(lambda t: float(t in share))(view.ordinals)
        heat = view.painted(values, *size)
        inside = heat[int(box.y0) : int(box.y1), int(box.x0) : int(box.x1)]
        assert not (inside <= 0).any()  # NaN where no token of this look sees the pixel
        far = np.ones(size[::-1], bool)
        reach = [2 * (edges(a)[1] - edges(a)[0]).max() + 1 if a.n == a.cells else 1e9 for a in (view.x, view.y)]
        y0, y1 = int(max(box.y0 - reach[1], 0)), int(min(box.y1 + reach[1], size[1]) + 1)
        x0, x1 = int(max(box.x0 - reach[0], 0)), int(min(box.x1 + reach[0], size[0]) + 1)
        far[y0:y1, x0:x1] = False
        assert not (heat[far] > 0).any()


# ---------------------------------------------------------------------- units
def test_one_box_in_four_units():
    pixels = Box.from_xyxy(64, 24, 128, 96)
    same = [
        Box.from_xyxy(0.25, 0.125, 0.5, 0.5, units="fraction"),
        Box.from_xyxy(250, 125, 500, 500, units="thousandths"),
        Box.from_xyxy(153, 99, 306, 396, units="points", page_size=(612, 792)),
        Box.from_xywh(64, 24, 64, 72),
    ]
    assert all(box.in_pixels(256, 192) == pixels for box in same)
    shown = (SCHEMES["tiles"]((256, 192)),)
    assert len({evidence.locate(shown, box).positions for box in [pixels, *same]}) == 1


@pytest.mark.parametrize(
    "make,told",
    [
        (lambda: Box.from_xyxy(10, 20, 10, 40), "no area"),
        (lambda: Box.from_xyxy(10, 20, 5, 40), "no area"),
        (lambda: Box.from_xyxy(10, 20, 50, float("nan")), "finite"),
        (lambda: Box.from_xyxy(10, 20, 50, 80, units="fraction"), "other units"),
        (lambda: Box.from_xyxy(10, 20, 50, 4000, units="thousandths"), "other units"),
        (lambda: Box.from_xyxy(10, 20, 50, 80, units="percent"), "pixels, fraction"),
        (lambda: Box.from_xyxy(10, 20, 50, 80, units="points"), "page_size"),
        (lambda: Box.from_xyxy(10, 20, 50, 80, page_size=(612, 792)), "page_size"),
        (lambda: Box.from_xyxy(10, 20, 50, 80, units="points", page_size=(0, 792)), "above 0"),
        (lambda: Box.from_xyxy("a", 20, 50, 80), "four numbers"),
        (lambda: Polygon.from_points([(0, 0), (1, 1)]), "three"),
        (lambda: Polygon.from_flat([[0, 0, 1, 1, 2]]), "x, y, x, y"),
        (lambda: Mask(np.zeros((2, 2, 3), bool)), "height, width"),
        (lambda: Tube.from_frames({}), "at least one place"),
        (lambda: Tube.from_frames({-1: Box(0, 0, 1, 1)}), "0 or later"),
        (lambda: Tube.from_frames({0: (0, 0, 1, 1)}), "boxes"),
        (lambda: Mask.from_rle([3, 4], size=(3, 3)), "fill the mask"),
    ],
)
def test_regions_that_mean_nothing_are_refused(as_users, make, told):
    with pytest.raises(RegionError, match=told):
        make()


# ---------------------------------------------------------------------- areas
def _edges(cuts):
    return np.stack([np.array(cuts[:-1], float), np.array(cuts[1:], float)])


@given(st.lists(boxes((40, 30)), min_size=1, max_size=5))
def test_a_union_of_boxes_is_counted_once(several):
    """Against counting pixels."""
    canvas = np.zeros((30, 40))
    for b in several:
        canvas[int(b.y0) : int(b.y1), int(b.x0) : int(b.x1)] = 1
    found = area_of(several, 40, 30).filled(_edges(range(0, 41, 8)), _edges(range(0, 31, 6)))
    assert found == pytest.approx(canvas.reshape(5, 6, 5, 8).sum((1, 3)))
    as_mask = area_of([Mask(canvas.astype(bool))], 40, 30).filled(_edges(range(0, 41, 8)), _edges(range(0, 31, 6)))
    assert as_mask == pytest.approx(found)
    polygons = [Polygon.from_points([(b.x0, b.y0), (b.x1, b.y0), (b.x1, b.y1), (b.x0, b.y1)]) for b in several]
    assert area_of(polygons, 40, 30).filled(_edges(range(0, 41, 8)), _edges(range(0, 31, 6))) == pytest.approx(found)


def test_a_triangle_covers_half_of_each_cell_on_its_edge():
    triangle = Polygon.from_points([(0, 0), (40, 0), (0, 40)])
    share = area_of([triangle], 40, 40).share(_edges(range(0, 41, 10)), _edges(range(0, 41, 10)))
    expected = [[1.0 if r + c < 3 else 0.5 if r + c == 3 else 0.0 for c in range(4)] for r in range(4)]
    assert share == pytest.approx(np.array(expected))
    assert triangle.area(40, 40) == pytest.approx(800)
    assert triangle.area(20, 40) == pytest.approx(600)  # cut at the picture's edge


def test_masks_of_another_resolution_are_stretched_and_mix_with_shapes():
    half = Mask(np.array([[True, False]]))
    share = area_of([half], 40, 40).share(_edges([0, 10, 20, 30, 40]), _edges([0, 40]))
    assert share == pytest.approx(np.array([[1, 1, 0, 0]]))
    both = area_of(
        [Mask(np.eye(4, dtype=bool)), Box(0, 0, 4, 1), Polygon.from_points([(0, 3), (0, 4), (4, 4), (4, 3)])], 4, 4
    )
    assert both.total() == 4 + 2 + 4


def test_run_lengths_as_coco_writes_them():
    """A 3 x 4 mask whose columns are 000 011 110 000, plain; the compressed text is pycocotools' of the same mask."""
    mask = Mask.from_rle([4, 4, 4], size=(3, 4))
    assert mask.pixels.astype(int).tolist() == [[0, 0, 1, 0], [0, 1, 1, 0], [0, 1, 0, 0]]
    assert (Mask.from_rle("444", size=(3, 4)).pixels == mask.pixels).all()
    with pytest.raises(RegionError):
        Mask.from_rle("44", size=(3, 4))


# ---------------------------------------------------------------------- tubes
def test_a_tube_is_where_and_when_it_is():
    tube = Tube.from_frames({3: Box(0, 0, 10, 10), 5: Box(10, 0, 20, 10)})
    assert tube.at(frame=3, second=9) == Box(0, 0, 10, 10)
    assert tube.at(frame=4, second=9) is None and tube.at(frame=2, second=9) is None
    filled = Tube.from_frames({3: Box(0, 0, 10, 10), 5: Box(10, 0, 20, 10)}, between=True)
    assert filled.at(frame=4, second=9) == Box(5, 0, 15, 10)
    seconds = Tube.from_seconds({1.0: Box(0, 0, 10, 10), 2.0: Box(0, 10, 10, 20)})
    assert seconds.at(frame=0, second=1.25) == Box(0, 2.5, 10, 12.5)
    assert seconds.at(frame=0, second=2.5) is None
    assert Tube.span(1, 2).at(frame=0, second=1.5) == Box(0, 0, 1, 1, "fraction")


def test_a_group_of_two_frames_holds_the_mean_of_both():
    clip = qwen_clip((40, 20), (4, 2), cell=10, n_frames=5, per_group=2)
    assert clip.count == 3 * 8 and [v.frames for v in clip.views] == [(0, 1), (2, 3), (4,)]
    found = evidence.locate(
        (clip,), Tube.from_frames({1: Box(0, 0, 10, 10), 2: Box(10, 0, 20, 10), 4: Box(0, 10, 5, 20)})
    )
    assert dict(zip(found.positions, found.coverage)) == {0: 0.5, 9: 0.5, 20: 0.5}
    assert {name: s.positions for name, s in found.by_view.items()} == {
        "frame:0": (0,),
        "frame:2": (9,),
        "frame:4": (20,),
    }


def test_a_tube_between_the_shown_frames_is_empty_with_a_reason():
    clip = (qwen_clip((40, 20), (4, 2), cell=10, n_frames=2, per_group=2),)
    seen = evidence.Sampling((0, 30), (0.0, 1.0))
    tube = Tube.from_frames({f: Box(0, 0, 10, 10) for f in range(10, 20)})
    found = evidence.locate(clip, tube, sampling=seen)
    assert found.positions == () and "between the frames" in found.reason and "0, 30" in found.reason
    assert evidence.locate(clip, Tube.from_seconds({0.2: Box(0, 0, 9, 9), 0.4: Box(0, 0, 9, 9)}), sampling=seen).reason
    assert evidence.locate(clip, Box(0, 0, 10, 10), sampling=seen).positions == (0,)  # a plain box is in every frame


def test_a_tube_is_no_region_of_a_picture():
    with pytest.raises(RegionError, match="video"):
        evidence.locate((SCHEMES["tiles"]((64, 64)),), Tube.span(0, 1))


# ---------------------------------------------------------------------- options
def test_coverage_and_views_choose():
    shown = (SCHEMES["tiles"]((96, 64)),)
    box = Box(0, 0, 7, 5)
    every = evidence.locate(shown, box)
    half = evidence.locate(shown, box, coverage=0.5)
    assert set(half.positions) < set(every.positions) and min(half.coverage) >= 0.5
    assert all(s < 0.5 for t, s in zip(every.positions, every.coverage) if t not in half.positions)
    tiles, thumbnail = (evidence.locate(shown, box, views=v) for v in ("tiles", "thumbnail"))
    assert tiles.positions == every.by_view["tiles"].positions
    assert thumbnail.positions == every.by_view["thumbnail"].positions
    assert set(tiles.positions) | set(thumbnail.positions) == set(every.positions)
    assert "no token" in evidence.locate(shown, Box(0, 0, 1, 1), coverage=0.9).reason
    for wrong in (dict(views="tile"), dict(coverage=2), dict(coverage=True)):
        with pytest.raises(OptionError):
            evidence.locate(shown, box, **wrong)
    with pytest.raises(RegionError):
        evidence.locate(shown, box, image=1)
    with pytest.raises(RegionError, match="outside"):
        evidence.locate(shown, Box(200, 0, 300, 64))
    with pytest.raises(RegionError, match="region given as"):
        evidence.locate(shown, (0, 0, 10, 10))


# ---------------------------------------------------------------------- prompts
def test_pages_say_themselves_which_picture_they_are(wrapped):
    prompt = wrapped.prompt("what", images=[tiny.picture(), tiny.picture(40, 32)], evidence=[Page(1), Box(0, 0, 8, 8)])
    assert prompt.locate(Page(1)).positions == prompt.locate(Box(0, 0, 40, 32), image=1).positions
    region = Box(0, 0, 16, 16)
    assert prompt.locate(PageRegion(1, region)).positions == prompt.locate(region, image=1).positions
    both = set(prompt.locate(Page(1)).positions) | set(prompt.locate(Box(0, 0, 8, 8)).positions)
    assert set(prompt.tokens("evidence").positions) == both
    with pytest.raises(RegionError, match="one picture at a time"):
        prompt.locate(Page(1), image=0)
    with pytest.raises(RegionError, match="one picture at a time"):
        prompt.locate([Page(0), Page(1)])
    with pytest.raises(RegionError):
        prompt.locate(Page(2))


def test_a_batch_shifts_positions_and_nothing_else(wrapped):
    box = Box(3, 3, 20, 20)
    alone = wrapped.prompt("what", images=[tiny.picture()])
    batch = wrapped.prompt(
        ["what color is the star? please answer", "what"], images=[[tiny.picture(40, 32)], [tiny.picture()]]
    )
    one, two = alone.locate(box), batch.locate(box, example=1)
    shift = two.per_example[1][0] - one.positions[0]
    assert two.per_example == ((), tuple(p + shift for p in one.positions)) and two.shares[1] == one.coverage
    first = batch.locate(box, example=0)
    assert set(first.per_example[0]) <= set(batch.tokens("image:0").per_example[0])


def test_heat_maps_take_any_vector_and_pixels_come_back(wrapped):
    prompt = wrapped.prompt("what color is the star?", images=[tiny.picture(64, 48)])
    box = Box(8, 8, 40, 40)
    where = prompt.locate(box)
    heat = prompt.heatmap(where)
    assert heat.shape == (48, 64) and np.nanmax(heat) <= 1
    assert np.nansum(heat[8:40, 8:40]) > 0.9 * np.nansum(heat) * 32 * 32 / (32 * 32 + 900)
    columns = torch.zeros(prompt.n_columns)
    columns[list(where.positions)] = torch.tensor(where.coverage)
    own = columns[list(prompt.items[0].columns)]
    for values in (columns, own.numpy(), columns[None]):
        assert np.allclose(prompt.heatmap(values), heat, equal_nan=True)
    with pytest.raises(OptionError, match="heat map"):
        prompt.heatmap(torch.zeros(3))
    for position in prompt.tokens("image").positions:
        if position in prompt.roles[0].get("newline", ()):
            with pytest.raises(RegionError, match="no pixels"):
                prompt.pixels_of(position)
        elif prompt.locate(Page(0)).per_example[0].count(position):
            place = prompt.pixels_of(position)
            assert position in prompt.locate(place.box).positions
            assert place.box.x1 <= 64 and place.box.y1 <= 48 and place.image == 0
    with pytest.raises(RegionError, match="no picture token"):
        prompt.pixels_of(prompt.tokens("last").positions[0])


def test_llava_crops_what_lies_outside_and_says_so():
    with HookedVLM.from_model(*tiny.llava_1_5()) as vlm:
        prompt = vlm.prompt("what", images=[tiny.picture(90, 28)])
        found = prompt.locate(Box.from_xyxy(0, 0, 20, 28))
        assert found.positions == () and "crop" in found.reason
        assert np.isnan(prompt.heatmap(torch.ones(prompt.n_columns))[:, :20]).all()
        assert prompt.locate(Box.from_xyxy(31, 0, 59, 28)).positions == prompt.tokens("image").positions


def test_a_count_at_odds_with_the_arithmetic_is_an_error():
    from mmlens.errors import GeometryError

    model, processor = tiny.FAMILIES["internvl"]()
    with HookedVLM.from_model(model, processor) as vlm:
        prompt = vlm.prompt("what", images=[tiny.picture(64, 48)])
        processor.image_processor.max_patches = 1
        with pytest.raises(GeometryError, match="28 placeholders"):
            prompt.locate(Box(0, 0, 8, 8))


def test_options_of_the_picture_processor_reach_it_and_unknown_ones_raise():
    with HookedVLM.from_model(*tiny.FAMILIES["qwen3-vl"]()) as vlm:
        small = vlm.prompt(
            "what", images=[tiny.picture(64, 48)], images_kwargs={"size": {"shortest_edge": 64, "longest_edge": 512}}
        )
        assert len(small.tokens("image")) < len(vlm.prompt("what", images=[tiny.picture(64, 48)]).tokens("image"))
        assert len(small.locate(Page(0))) == len(small.tokens("image"))
        with pytest.raises(OptionError, match="max_pixel"):
            vlm.prompt("what", images=[tiny.picture()], images_kwargs={"max_pixel": 512})


def test_locate_needs_no_tensors_and_no_model():
    """Geometry alone: importing it loads neither torch nor transformers."""
    code = (
        "import sys; from mmlens.evidence import schemes; from mmlens.evidence.locate import find; from mmlens import Box;"
        "shown = schemes.qwen_views((3840, 2160), (120, 68), cell=32);"
        "found = find(shown, [Box(100, 100, 2000, 900)]); assert len(found.shares) == 60 * 26, len(found.shares);"
        "assert not {'torch', 'transformers', 'nnsight'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sets_of_regions_stay_sets_of_tokens(wrapped):
    prompt = wrapped.prompt("what", images=[tiny.picture(64, 48)])
    a, b = Box(0, 0, 20, 20), Box(10, 10, 40, 40)
    union = prompt.locate([a, b])
    assert union.positions == (prompt.locate(a) | prompt.locate(b)).positions
    assert max(union.coverage) <= 1 and isinstance(union - prompt.locate(a), TokenSet)
