"""What it costs to find the tokens under a box: a 4k picture, every scheme, after the first call.

Two quotients a scheme: CPU time of one call over 5 ms, the budget; and over a plain loop over the picture's tokens that
gives the same set. A measurement is 20 calls.
"""

from __future__ import annotations

import common

from mmlens import Box, evidence
from mmlens.evidence.schemes import (
    anyres_views,
    idefics_grid,
    padded_views,
    qwen_cells,
    qwen_views,
    tile_grid,
    tiled_views,
)

SIZE, CALLS, BUDGET = (3840, 2160), 20, 0.005
BOX = Box(1000, 500, 2900, 1600)
ONEVISION = tuple((384 * r, 384 * c) for r in range(1, 7) for c in range(1, 7))

SCHEMES = {
    "qwen2-vl": lambda: qwen_views(SIZE, qwen_cells(SIZE, factor=28, least=3136, most=12845056), cell=28),
    "qwen3-vl": lambda: qwen_views(SIZE, qwen_cells(SIZE, factor=32, least=65536, most=16777216), cell=32),
    "llava-1.5 padded": lambda: padded_views(SIZE, side=336, cells=24, cell=14),
    "llava-onevision": lambda: anyres_views(SIZE, pinpoints=ONEVISION, tile=384, side=27, cell=14, most=9),
    "internvl": lambda: tiled_views(
        SIZE, tile_grid(SIZE, tile=(448, 448), least=1, most=12), tile=448, side=16, cell=28
    ),
    "idefics3": lambda: tiled_views(SIZE, idefics_grid(SIZE, longest=1456, tile=364), tile=364, side=13, cell=28),
}


def ours(make) -> tuple[int, ...]:
    for _ in range(CALLS):
        found = evidence.locate([make()], BOX)
    return found.positions


def loop(make) -> tuple[int, ...]:
    """Every token's own box against the region's, one after another; boxes of tokens worked out once before."""
    cells = make.cells
    for _ in range(CALLS):
        found = [
            token
            for token, (x0, y0, x1, y1) in cells
            if min(x1, BOX.x1) - max(x0, BOX.x0) > 1e-9 and min(y1, BOX.y1) - max(y0, BOX.y0) > 1e-9
        ]
    return tuple(sorted(found))


class Loop:
    """The loop's own table of token boxes."""

    def __init__(self, make) -> None:
        self.cells = [(t, v.source_box(t)) for v in make().views for t in v.ordinals.ravel().tolist()]


def main() -> None:
    chosen = common.options(__doc__)
    rows = []
    for name, make in SCHEMES.items():
        table = Loop(make) if name != "llava-onevision" else None  # mixed tokens have no box of their own
        cases = {"ours": lambda: ours(make)} | ({} if table is None else {"loop": lambda: loop(table)})
        if table is not None:
            assert ours(make) == loop(table), name
        found = common.interleave(cases, 5 if chosen.quick else 15)
        mine = found["ours"]["seconds"]
        shape = f"{make().count} tokens"
        rows.append(
            common.ratio(f"{name}: locate / 5 ms", shape, mine, [CALLS * BUDGET] * len(mine), must=1.0, better="lower")
        )
        if table is not None:
            rows.append(
                common.ratio(f"{name}: locate / loop", shape, mine, found["loop"]["seconds"], must=None, better="lower")
            )
    common.report(rows, chosen)


if __name__ == "__main__":
    main()
