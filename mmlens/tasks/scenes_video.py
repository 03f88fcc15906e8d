"""Built-in clips with known answers: coloured shapes, or tinted handwriting, that move along straight paths."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8
from numpy import ndarray

from mmlens.errors import OptionError
from mmlens.evidence.regions import Box, Tube
from mmlens.tasks.base import Example, Split, Task
from mmlens.tasks.scenes import (
    BACKGROUND,
    CELL,
    COLORS,
    GRID,
    KINDS,
    SHAPES,
    SIDE,
    Domain,
    check_range,
    draw_masks,
    grain,
    named,
    palette,
    stream,
)

ROOM = SIDE - CELL  # pixels that a cell's corner can move
TRIES = 96  # straight paths tried for an object before it stands still
ROUNDS = 2  # over all objects; the second has more room, as the first has moved them off the grid
MAX_FRAMES = 512


def draw_paths(rng: np.random.Generator, n_objects: int, n_frames: int) -> Int[ndarray, "object frame 2"]:
    """Top left corners (x, y) of every object's cell; in no frame do two cells overlap or leave the picture."""
    cells = rng.permutation(GRID * GRID)[:n_objects]
    still = np.stack([cells % GRID, cells // GRID], -1) * CELL
    paths = np.repeat(still[:, None], n_frames, axis=1)
    for mover in np.tile(rng.permutation(n_objects), ROUNDS):
        others = np.delete(paths, mover, axis=0)
        tried = _straight(rng, paths[mover, 0], n_frames)
        apart = np.abs(tried[:, None] - others[None]).max(-1) >= CELL
        free = np.flatnonzero(apart.all((1, 2)))
        if len(free):
            paths[mover] = tried[free[0]]
    return paths


def _straight(rng: np.random.Generator, home: Int[ndarray, " 2"], n_frames: int) -> Int[ndarray, "path frame 2"]:
    """Candidates, long ways first: rest at a start, move evenly, rest at an end; the late half stays near `home`."""
    start = rng.uniform(0, ROOM, (TRIES, 2))
    end = rng.uniform(0, ROOM, (TRIES, 2))
    near = TRIES // 2
    start[near:] = home + rng.uniform(-CELL / 2, CELL / 2, (TRIES - near, 2))
    end[near:] = start[near:] + rng.uniform(-CELL, CELL, (TRIES - near, 2))
    order = np.argsort(-np.abs(end[:near] - start[:near]).sum(-1), kind="stable")
    start[:near], end[:near] = start[:near][order], end[:near][order]
    start, end = start.round().clip(0, ROOM), end.round().clip(0, ROOM)
    leaves = rng.uniform(0, 0.35, (TRIES, 1))
    arrives = rng.uniform(0.65, 1, (TRIES, 1))
    share = ((np.linspace(0, 1, n_frames) - leaves) / (arrives - leaves)).clip(0, 1)[..., None]
    return (start[:, None] + share * (end - start)[:, None]).round().astype(np.int64)


def film(
    rng: np.random.Generator,
    domain: Domain,
    masks: Float[ndarray, "object 32 32"],
    colors: Int[ndarray, " object"],
    paths: Int[ndarray, "object frame 2"],
    seen: Bool[ndarray, "object frame"],
) -> UInt8[ndarray, "frame 128 128 3"]:
    """The frames: each object's colour laid over the background where `seen` (object, frame), then pixel noise."""
    ground = BACKGROUND[domain]
    canvas = np.full((paths.shape[1], SIDE, SIDE, 3), ground, dtype=np.float32)
    which, frame = np.nonzero(seen)
    across, down = paths[which, frame].T
    steps = np.arange(CELL)
    rows, columns = down[:, None, None] + steps[:, None], across[:, None, None] + steps
    cells = ground + (palette()[colors] - ground)[:, None, None] * masks[..., None]
    canvas[frame[:, None, None], rows, columns] = cells[which]
    return grain(rng, canvas)


class ScenesVideoTask(Task):
    """ "What color is the star?" about clips drawn here; the asked object's cell in every frame is the evidence.

    Parameters
    ----------
    domain
        "shapes" (scenes/video) or "digits" (scenes/video:digits, handwriting that no training picture used).
    n_objects
        Objects in each clip, 1 to 8.
    n_frames
        Frames of each clip, 1 to 512.
    fps
        Frames a second.
    hidden
        Whether the asked object appears only for a part of the clip, a quarter to a half of its frames.
    """

    candidates = tuple(COLORS)
    chance = 1 / len(COLORS)
    batch = 10

    def __init__(
        self, domain: Domain, *, n_objects: int = 4, n_frames: int = 8, fps: float = 2.0, hidden: bool = False
    ) -> None:
        check_range("n_objects", n_objects, 1, len(SHAPES), "no two objects share a kind")
        check_range("n_frames", n_frames, 1, MAX_FRAMES, "leave n_frames= out, or give one")
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < float("inf"):
            raise OptionError(f"fps={fps!r}", expected="frames per second, above 0", fix="fps=2.0")
        if not isinstance(hidden, bool):
            raise OptionError(f"hidden={hidden!r}", expected="True or False", fix="hidden=True")
        if hidden and n_frames < 2:
            raise OptionError(
                f"hidden=True with n_frames={n_frames}", expected="at least 2 frames", fix="give more frames"
            )
        self.domain, self.n_objects, self.n_frames, self.fps, self.hidden = domain, n_objects, n_frames, fps, hidden
        self.name = named("video", domain)
        self.video_options = {"fps": float(fps)}

    def identity(self) -> dict[str, Any]:
        """Name and options."""
        return {
            "name": self.name,
            "n_objects": self.n_objects,
            "n_frames": self.n_frames,
            "fps": float(self.fps),
            "hidden": self.hidden,
        }

    def example(self, split: Split, index: int, seed: int) -> Example:
        """Clip number `index` of a half."""
        rng = stream(split, self.domain, index, seed, 1)
        kinds = rng.permutation(len(KINDS[self.domain]))[: self.n_objects]
        colors = rng.integers(0, len(COLORS), self.n_objects)
        paths = draw_paths(rng, self.n_objects, self.n_frames)
        asked = int(rng.integers(self.n_objects))
        seen = np.ones((self.n_objects, self.n_frames), dtype=bool)
        if self.hidden:
            length = int(rng.integers(max(1, self.n_frames // 4), max(1, self.n_frames // 2) + 1))
            first = int(rng.integers(self.n_frames - length + 1))
            seen[asked] = (np.arange(self.n_frames) >= first) & (np.arange(self.n_frames) < first + length)
        masks = draw_masks(rng, self.domain, kinds[None])[0]
        corners = [[Box.from_xywh(x, y, CELL, CELL) for x, y in path] for path in paths.tolist()]
        tubes = [
            Tube.from_frames({f: corners[i][f] for f in np.flatnonzero(seen[i]).tolist()}) for i in range(len(seen))
        ]
        kind = KINDS[self.domain][kinds[asked]]
        return Example(
            id=f"{split}/{seed}/{index}",
            question=f"What color is the {kind}?",
            answers=(tuple(COLORS)[colors[asked]],),
            video=film(rng, self.domain, masks, colors, paths, seen),
            subject=kind,
            evidence=(tubes[asked],),
            distractors=tuple(t for i, t in enumerate(tubes) if i != asked),
        )
