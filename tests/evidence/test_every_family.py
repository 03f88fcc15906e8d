"""Grids on every family: tokens, projected features and patches in raster order, and the views that go with them."""

import numpy as np
import oracle
import pytest
import tiny
import torch

from mmlens import Box, HookedVLM


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


def test_views_and_grids_name_the_same_tokens(vlm):
    pictures = [tiny.picture(64, 48), tiny.picture(40, 64, seed=1)]
    prompts = [vlm.prompt("what", images=pictures), vlm.prompt("what", images=pictures[:1])]
    if vlm.family.has_video:
        prompts += [vlm.prompt("what", videos=[[tiny.picture(64, 48, seed=i) for i in range(n)]]) for n in (4, 5)]
    for prompt in prompts:
        for number, item in enumerate(prompt.items):
            layout, shown = prompt.layout(number), prompt.views(number)
            assert {g.name for g in layout.grids} == {v.name for v in shown.views}
            for grid in layout.grids:
                assert tuple(grid.view.ordinals.ravel().tolist()) == grid.tokens.index
                assert (grid.view.rows, grid.view.cols, grid.view.frames) == (
                    grid.tokens.rows,
                    grid.tokens.cols,
                    grid.frames,
                )
            assert shown.count == len(item.columns) and set(shown.newlines) == set(layout.newlines)
