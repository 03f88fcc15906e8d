"""Boxes and grids on every family: with the tower's attention silenced, the tokens that light up are the located ones."""

import numpy as np
import oracle
import pytest
import tiny
import torch

from mmlens import Box, HookedVLM
from mmlens.errors import RegionError

SIZES = ((64, 48), (40, 64), (56, 56), (100, 30))


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def vlm(request):
    """The tower's blocks add nothing, so that a token depends on its own pixels alone."""
    model, processor = tiny.FAMILIES[request.param]()
    _, _, path, at, _ = oracle.PLACES[request.param]
    with torch.no_grad():
        for block in model.model.get_submodule(path):
            for p in block.get_submodule(f"{at['attn']}.{at['o']}").parameters():
                p.zero_()
    with HookedVLM.from_model(model, processor) as opened:
        yield opened


def _lit(vlm, size, box):
    """The prompt, and how much each picture token's embedding changes when the box turns white."""
    width, height = size
    dark = np.zeros((height, width, 3), np.uint8)
    light = dark.copy()
    light[int(box.y0) : int(box.y1), int(box.x0) : int(box.x1)] = 255
    prompts = [vlm.prompt("what color is the star?", images=[picture]) for picture in (dark, light)]
    streams = [vlm.run_with_cache(p, ["hook_embed"], stop_at_layer=0)[1] for p in prompts]
    change = (streams[1]["hook_embed"] - streams[0]["hook_embed"])[0].norm(dim=-1)
    return prompts[1], streams, change


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_lit_tokens_are_the_located_ones(vlm, size):
    rng = np.random.default_rng(sum(size))
    checked = 0
    for _ in range(6):
        w, h = (int(rng.integers(s // 4, s // 2 + 1)) for s in size)
        x, y = int(rng.integers(0, size[0] - w + 1)), int(rng.integers(0, size[1] - h + 1))
        box = Box.from_xywh(x, y, w, h)
        prompt, _, change = _lit(vlm, size, box)
        canvas = prompt.layout(0).grids[-1]
        if (
            canvas.name == "tiles"
            and canvas.tokens.rows * canvas.tokens.cols < canvas.patches.rows * canvas.patches.cols
        ) and vlm.family.name == "llava-onevision":  # a large mosaic is shrunk: no token holds its own pixels
            with pytest.raises(RegionError, match="shrunk"):
                prompt.locate(box)
            return
        found = prompt.locate(box)
        coverage = dict(zip(found.positions, found.coverage[0]))
        # resampling blurs edges: a cell reaches as far as a few source pixels around it
        wide = Box.from_xyxy(max(x - 5, 0), max(y - 5, 0), min(x + w + 5, size[0]), min(y + h + 5, size[1]))
        near = set(prompt.locate(wide).positions)
        lit = {c for c in prompt.tokens("image").positions if change[c] > 1e-4}
        assert lit <= near, sorted(lit - near)
        missed = [c for c, share in coverage.items() if share > 0.3 and c not in lit]
        assert not missed, missed
        newlines = set(prompt.roles[0].get("newline", ()))
        assert not newlines & lit and not newlines & set(found.positions)
        checked += len(coverage)
    assert checked > 6


def test_grids_are_in_raster_order(vlm):
    """A white corner lights the same corner of every grid: tokens, projected features and patches."""
    size = (64, 48)
    for x, y in ((0, 0), (40, 0), (0, 30), (40, 30)):
        box = Box.from_xywh(x, y, 24, 18)
        prompt, _, _ = _lit(vlm, size, box)
        dark = vlm.prompt("what color is the star?", images=[np.zeros((48, 64, 3), np.uint8)])
        names = ["hook_embed", "projector.hook_out", "vision.blocks.0.hook_resid_pre"]
        caches = [vlm.run_with_cache(p, names)[1] for p in (prompt, dark)]
        for view in [g.name for g in prompt.layout(0).grids]:
            for name in names:
                a, b = (c.grid(name, view=view) for c in caches)
                change = (a - b).norm(dim=-1)
                rows, cols = change.shape
                if rows < 2 or cols < 2:
                    continue
                half = lambda n, low: slice(0, n // 2) if low else slice(-(n // 2), None)
                corner = change[half(rows, y == 0), half(cols, x == 0)].sum()
                assert corner > 0.5 * change.sum(), (view, name, x, y)


def test_tiles_cover_the_picture_once(vlm):
    prompt = vlm.prompt("what color is the star?", images=[tiny.picture(64, 48), tiny.picture(40, 64, seed=1)])
    for number, item in enumerate(prompt.items):
        layout = prompt.layout(number)
        ordinals = [o for grid in layout.grids for o in grid.tokens.index]
        assert sorted([*ordinals, *layout.newlines]) == list(range(len(item.columns)))
        if layout.tiles:
            assert sorted([*(o for t in layout.tiles for o in t), *layout.newlines]) == list(range(len(item.columns)))
            index = f"tile:{number}.0"
            assert prompt.tokens(index).positions == tuple(item.columns[o] for o in layout.tiles[0])
