"""Long sweeps, and the site: `make test-slow`."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from mmlens import Box, HookedVLM, load_task
from mmlens.studies.core_heads import Protocol, core_heads

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent


def test_the_site_builds_without_a_warning(tmp_path):
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "reference/index.html").read_text()
    assert "run_with_cache" in page and "answer_logprobs" in page


def test_heads_that_read_shapes_are_found_again_for_handwriting_and_on_the_other_half(toy):
    shapes, digits = load_task("scenes/image"), load_task("scenes/digits")
    found = {
        (task.name, split): toy.scan(task, query="subject", n=200, split=split).top(fraction=0.05)
        for task in (shapes, digits)
        for split in ("rank", "judge")
    }
    for task in (shapes, digits):
        assert len(found[task.name, "rank"] & found[task.name, "judge"]) >= 4
    assert len(found["scenes/image", "rank"] & found["scenes/digits", "rank"]) >= 3


def test_cutting_the_top_heads_breaks_handwriting_too(toy):
    result = core_heads(toy, load_task("scenes/digits"), protocol=Protocol(doses=(), draws=3))
    masked = result.headline["visual_mask"]
    assert result.accuracy - masked["top"] >= 0.3
    assert result.accuracy - np.mean(masked["layer_matched"]) <= 0.1


@pytest.mark.parametrize("family", ["qwen3-vl", "llava-1.5"])
def test_located_tokens_over_many_sizes_and_boxes(family):
    """A cell-aligned box lights exactly its own tokens, through the real processor."""
    rng = np.random.default_rng(0)
    cell = {"qwen3-vl": 8, "llava-1.5": 7}[family]
    with HookedVLM.from_model(*tiny.FAMILIES[family]()) as vlm:
        for _ in range(60):
            if family == "qwen3-vl":
                cols, rows = rng.integers(1, 8, 2)
                size = (int(cols) * cell, int(rows) * cell)
                view_offset = 0
            else:
                rows, cols, size = 4, 4, (28 + 2 * int(rng.integers(0, 30)), 28)
                view_offset = (size[0] - 28) // 2
            r, c = int(rng.integers(rows)), int(rng.integers(cols))
            x0, y0 = view_offset + c * cell, r * cell
            found = vlm.prompt("what", images=[tiny.picture(*size)]).locate(Box.from_xywh(x0, y0, cell, cell))
            image = vlm.prompt("what", images=[tiny.picture(*size)]).tokens("image").positions
            assert [image.index(p) for p in found.positions] == [r * int(cols) + c], (size, r, c)
            assert found.coverage == pytest.approx((1.0,))


def test_ragged_batches_of_many_shapes_equal_single_runs():
    words = ["what", "color", "is", "the", "star?", "the", "square", "is", "red", "and", "the", "circle", "is", "blue."]
    rng = np.random.default_rng(1)
    for name in sorted(tiny.FAMILIES):
        with HookedVLM.from_model(*tiny.FAMILIES[name]()) as vlm:
            for _ in range(6):
                n = int(rng.integers(2, 5))
                questions = [" ".join(rng.choice(words, int(rng.integers(1, 12)))) for _ in range(n)]
                images = [
                    [tiny.picture(int(rng.integers(20, 60)), int(rng.integers(20, 60)), seed=i)] for i in range(n)
                ]
                batch = vlm.prompt(questions, images=images)
                logits, cache = vlm.run_with_cache(batch, "pattern", rows="question", heads=[0, 5])
                for i in range(n):
                    alone, own = vlm.run_with_cache(batch[i], "pattern", rows="question", heads=[0, 5])
                    rows, width = own["pattern", 2].shape[2:]
                    assert torch.allclose(logits[i, -alone.shape[1] :], alone[0], atol=5e-5)
                    assert torch.allclose(cache["pattern", 2][i, :, :rows, -width:], own["pattern", 2][0], atol=2e-5)
                    assert cache["pattern", 2][i, :, rows:].isnan().all()
