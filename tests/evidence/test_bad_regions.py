"""Wrong regions, options and calls: an error that says what to do, never a bare traceback, never a wrong set."""

import numpy as np
import pytest
import tiny
import torch
from PIL import Image

from mmlens import Box, HookedVLM, Mask, Page, PageRegion, Polygon, TokenSet, Tube, VideoFile, evidence
from mmlens.errors import MMLensError, OptionError, PictureError, RegionError, VideoError
from mmlens.evidence.regions import WHOLE
from mmlens.model.pictures import load_picture
from mmlens.viz.overlay import overlay

HUGE = 10**400
B = Box(0, 0, 9, 9)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Box("1", None, "3", "4"),
        lambda: Box(None, 0, 1, 1),
        lambda: Box(0, 0, HUGE, 9),
        lambda: Box(0, 0, 9, 9, "points", 5),
        lambda: Polygon.from_points(5),
        lambda: Polygon.from_flat([0, 0, 10, 0, 10, 10]),
        lambda: Polygon(([[0, 0], [1]],)),
        lambda: Polygon((((0, 0), (HUGE, 0), (1, 1)),)),
        lambda: Mask.from_rle([3], size="ab"),
        lambda: Mask.from_rle(None, size=(3, 3)),
        lambda: Mask.from_rle("é", size=(3, 3)),
        lambda: Mask.from_rle([10**13], size=(10**7, 10**6)),
        lambda: Mask.from_rle([9], size=(3.0, 3.0)),
        lambda: Tube((0, 1)),
        lambda: Tube.span("a", "b"),
        lambda: Tube.span(5, 3),
        lambda: Tube.span(0, float("nan")),
        lambda: Tube.from_seconds({float("nan"): B}),
        lambda: Tube.from_seconds({float("inf"): B}),
        lambda: Page("0"),
        lambda: Page(None),
        lambda: Page(0.0),
        lambda: Page(-1),
        lambda: PageRegion(0, "x"),
        lambda: PageRegion(0, Page(0)),
        lambda: PageRegion(0, Tube.span(0, 1)),
        lambda: PageRegion(True, B),
    ],
)
def test_regions_of_wrong_types_are_refused(as_users, make):
    with pytest.raises(RegionError):
        make()


def test_numbers_of_any_kind_make_a_box(as_users):
    assert Box("1", np.float32(2), 3, np.int64(4)) == Box(1.0, 2.0, 3.0, 4.0)


@pytest.fixture(scope="module")
def qwen():
    with HookedVLM.from_model(*tiny.FAMILIES["qwen3-vl"]()) as vlm:
        yield vlm


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.locate(B, image="0"),
        lambda p: p.locate(B, image=1.0),
        lambda p: p.locate(B, example="a"),
        lambda p: p.heatmap("x"),
        lambda p: p.heatmap(TokenSet.of()),
        lambda p: p.heatmap(torch.zeros(p.n_columns), image="a"),
        lambda p: p.heatmap(torch.zeros(p.n_columns), views="tile"),
        lambda p: p.pixels_of("a"),
        lambda p: p.pixels_of(10**6),
        lambda p: evidence.layout(p.processor, sizes=(640, 480)),
        lambda p: evidence.layout(p.processor, sizes=[(64, 48)], images_kwargs={"max_pixel": 1}),
        lambda p: evidence.layout(p.processor, sizes=[(64, 48)], images_kwargs={"do_pan_and_scan": True}),
        lambda p: evidence.layout(p.processor, sizes=[(64, 48)], images_kwargs=["max_pixels"]),
        lambda p: evidence.layout(p.processor, sizes=[(64, 48)], frames=4, images_kwargs={"max_pixels": 4096}),
        lambda p: evidence.locate("x", B),
    ],
)
def test_calls_with_wrong_arguments_are_refused(as_users, qwen, call):
    with pytest.raises(MMLensError):
        call(qwen.prompt("what", images=[tiny.picture()]))


CLIP = [[tiny.picture(64, 48, seed=i) for i in range(4)]]


@pytest.mark.parametrize(
    "options",
    [
        dict(images=[tiny.picture()], fps=2.0),
        dict(images=[tiny.picture()], max_frames=3),
        dict(videos=CLIP, max_frames=3),
        dict(videos=CLIP, fps="2"),
        dict(videos=CLIP, fps=-1.0),
        dict(videos=CLIP, images_kwargs={"max_pixels": 4096}),
        dict(images_kwargs={"max_pixels": 4096}),
        dict(images=[tiny.picture()], images_kwargs=["max_pixels"]),
    ],
)
def test_options_that_would_be_ignored_raise(as_users, qwen, options):
    with pytest.raises(OptionError):
        qwen.prompt("what", **options)


def test_what_a_processor_refuses_is_told_in_its_own_terms(qwen):
    with pytest.raises(PictureError, match="1 frames of 64 x 48"):
        qwen.prompt("what", videos=[CLIP[0][:1]])
    with pytest.raises(PictureError, match="2000 x 1"):
        qwen.prompt("what", images=[Image.new("RGB", (2000, 1))])


def test_spans_of_files_are_whole_frames(as_users):
    for begin, end in ((0.5, 2.5), ("0", "3"), (True, 3), (3, 3), (-1, 2)):
        with pytest.raises(VideoError):
            VideoFile("clip.mp4", begin, end)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_questions_without_pictures_work_on_every_family(name):
    with HookedVLM.from_model(*tiny.FAMILIES[name]()) as vlm:
        alone = vlm.prompt("what color is the star?")
        assert not alone.items and "question" in alone.roles[0] and len(vlm.prompt(["what", "what is red?"])) == 2
        with pytest.raises(RegionError):
            alone.locate(B)


def test_sets_are_sorted_whatever_the_order_of_tiles():
    for name in ("internvl", "idefics3", "smolvlm"):
        with HookedVLM.from_model(*tiny.FAMILIES[name]()) as vlm:
            prompt = vlm.prompt("what", images=[tiny.picture(200, 77)])
            for found in (prompt.locate(WHOLE, views="tiles"), *prompt.locate(WHOLE).by_view.values()):
                assert found == TokenSet.of(found.positions) and (found | found) == found
                again = {p: prompt.locate(prompt.pixels_of(p).box).positions for p in found.positions[:4]}
                assert all(p in seen for p, seen in again.items())


def test_the_second_clip_is_drawn_with_its_own_frames(qwen):
    small = [tiny.picture(80, 40, seed=i) for i in range(4)]
    prompt = qwen.prompt("what", videos=[CLIP[0], small])
    assert {p.picture.size for p in overlay(prompt, PageRegion(1, Box(0, 0, 80, 40))).panels} == {(80, 40)}
    late = overlay(prompt, Tube.from_frames({1: B}))  # only the second frame of a pair holds it
    assert len(late.panels) == 1 and late.panels[0].outlines


def test_drawings_of_narrow_cells_and_unwritable_places(tmp_path):
    with HookedVLM.from_model(*tiny.FAMILIES["gemma3"]()) as vlm:
        figure = overlay(vlm.prompt("what", images=[Image.new("RGB", (600, 4))]), WHOLE)
        assert figure.save(tmp_path / "a.png").exists()
        (tmp_path / "file").write_text("")
        for name in ("a.png", "a.html"):
            with pytest.raises(OptionError, match="cannot be written"):
                figure.save(tmp_path / "file" / name)


def test_sixteen_bits_are_scaled_and_unknown_ranges_refused(tmp_path):
    ramp = np.linspace(0, 65535, 256).reshape(16, 16).astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    seen = np.asarray(load_picture(tmp_path / "deep.png"))[..., 0].ravel()
    assert np.abs(seen.astype(int) - np.arange(256)).max() <= 1
    for mode in ("I", "F"):
        with pytest.raises(PictureError, match="range"):
            load_picture(Image.new(mode, (4, 4)))


def test_a_region_too_small_for_any_token_says_so(qwen):
    prompt = qwen.prompt("what", images=[tiny.picture()])
    assert "too small" in prompt.locate(Box(1, 1, 1 + 1e-6, 1 + 1e-6)).reason
