"""Tokens over pictures: as many cells as located tokens, where they lie; layouts drawn without a model."""

import re

import numpy as np
import pytest
import tiny
from PIL import Image

from mmlens import Box, HookedVLM, Mask, Page, Polygon, Tube
from mmlens.errors import OptionError
from mmlens.evidence.schemes import qwen_views, tiled_views
from mmlens.viz.layouts import HIT, PUBLISHED, drawing
from mmlens.viz.overlay import overlay

BOX = Box(10, 8, 40, 30)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_every_located_token_is_drawn_once(name, tmp_path):
    with HookedVLM.from_model(*tiny.FAMILIES[name]()) as vlm:
        prompt = vlm.prompt("what", images=[tiny.picture(64, 48)])
        figure, where = overlay(prompt, BOX), prompt.locate(BOX)
        assert sum(len(p.cells) for p in figure.panels) == len(where)
        assert {c[5] for p in figure.panels for c in p.cells} == set(map(str, where.positions))
        assert figure.note.startswith(f"{len(where)} tokens: {where.positions[0]}")
        text = figure.save(tmp_path / "a.html").read_text()
        assert text.count("covered</title>") == len(where) and not re.search(r"https?://(?!www.w3.org)", text)
        with Image.open(figure.save(tmp_path / "a.png")) as sheet:
            assert sheet.width > 480 and sheet.height > 300
        assert "<svg" in figure._repr_html_()
        with pytest.raises(OptionError):
            figure.save(tmp_path / "a.svgz")


def test_the_drawn_cells_shine_where_the_box_is():
    with HookedVLM.from_model(*tiny.FAMILIES["qwen3-vl"]()) as vlm:
        prompt = vlm.prompt("what", images=[Image.new("RGB", (64, 48))])
        sheet = np.asarray(overlay(prompt, Box(0, 0, 16, 16)).image()).astype(int)
        yellow = (sheet[..., 0] > 100) & (sheet[..., 2] < 0.6 * sheet[..., 0]) & (sheet[..., 1] > 80)
        rows, cols = np.nonzero(yellow)
        scale = 480 / 64
        assert rows.max() < 16 + 16 * scale + 4 and cols.max() < 16 + 16 * scale + 4
        assert yellow.sum() > 0.6 * (16 * scale) ** 2


def test_clips_show_the_frames_that_hold_the_tube():
    with HookedVLM.from_model(*tiny.FAMILIES["qwen3-vl"]()) as vlm:
        clip = [tiny.picture(64, 48, seed=i) for i in range(6)]
        prompt = vlm.prompt("what", videos=[clip])
        figure = overlay(prompt, Tube.from_frames({2: BOX, 3: BOX}))
        assert [p.title.split(":")[1] for p in figure.panels] == ["2"]
        gone = overlay(prompt, Tube.from_seconds({9.0: BOX, 9.5: BOX}))
        assert "between the frames" in gone.note and len(gone.panels) == 3


@pytest.mark.parametrize("region", [Polygon.from_points([(0, 0), (30, 0), (0, 30)]), Mask(np.eye(48, 64) > 0), Page(0)])
def test_any_region_has_an_outline(region):
    with HookedVLM.from_model(*tiny.FAMILIES["llava-1.5"]()) as vlm:
        prompt = vlm.prompt("what", images=[tiny.picture(64, 48)])
        assert all(p.outlines for p in overlay(prompt, region).panels)


def test_layouts_are_drawn_without_a_model():
    shown = qwen_views((64, 48), (4, 3), cell=16)
    svg = drawing(shown, Box(0, 0, 16, 16), title="<b>a & b</b>")
    assert "<b>" not in svg and "&lt;b&gt;" in svg and "12 tokens in the run, 1 under the box" in svg
    tiles = drawing(tiled_views((64, 48), (2, 1), tile=28, side=2, cell=14), Box(0, 0, 64, 48))
    assert "tiles: 2 x 4" in tiles and "thumbnail: 2 x 2" in tiles and tiles.count(f'fill="{HIT}"') == 12
    assert all(drawing(make(), Box(0, 0, 9, 9)).startswith("<svg") for _, make in PUBLISHED.values())
