"""The study: thresholds arithmetic, pooled patterns, and the whole protocol in small."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmlens.studies.core_heads import Protocol, checks, core_heads, pooled_pattern, tell


def _headline(top, matched):
    return {mode: {"top": top, "layer_matched": matched} for mode in ("visual_mask", "output_zero")}


def test_checks_compare_costs_with_mean_and_median_of_controls():
    found = checks(1.0, _headline(0.4, [1.0, 1.0, 1.0, 1.0, 0.5]))
    assert found["visual_mask_ratio"]["control_cost"] == pytest.approx(0.1) and found["visual_mask_ratio"]["held"]
    assert found["visual_mask_ratio"]["value"] == pytest.approx(6.0)
    assert found["output_zero_ratio"]["control_cost"] == 0 and found["output_zero_ratio"]["value"] is None
    missed = checks(0.9, _headline(0.7, [0.85] * 5))
    assert not any(missed[k]["held"] for k in ("accuracy", "visual_mask_cost", "visual_mask_ratio"))
    assert missed["output_zero_ratio"]["held"]  # 0.2 is four times 0.05


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 1000))
def test_pooled_patterns_keep_rows_summing_to_one_and_pool_what_they_say(before, after, seed):
    n = before + 16 + after
    pattern = torch.rand(n, n, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    tokens = [f"t{i}" for i in range(n)]
    pooled, labels = pooled_pattern(pattern, tokens, list(range(before, before + 16)), (4, 4), (2, 2))
    assert len(labels) == before + 4 + after and labels[before : before + 4] == ["[0,0]", "[0,1]", "[1,0]", "[1,1]"]
    assert torch.allclose(pooled.sum(-1), torch.ones(len(labels)), atol=1e-5)
    block = [before + r * 4 + c for r in (0, 1) for c in (2, 3)]
    assert pooled[before, before + 1] == pytest.approx(
        pattern[[before + r * 4 + c for r in (0, 1) for c in (0, 1)]][:, block].sum(-1).mean().item(), abs=1e-5
    )
    if after:
        assert pooled[-1, before + 1] == pytest.approx(pattern[-1, block].sum().item(), abs=1e-5)


@pytest.fixture(scope="module")
def small(toy, scenes):
    protocol = Protocol(n_rank=20, n_judge=20, n_dose=20, draws=2, dose_draws=1, doses=(1,))
    return protocol, core_heads(toy, scenes, protocol=protocol)


def test_results_hold_what_they_promise(small):
    protocol, result = small
    body = result.results()
    assert (
        body["k"] == 5 and body["n_heads"] == 96 and body["n"] == 20 and body["seed"] == 0 and body["chance"] == 0.125
    )
    for mode in ("output_zero", "visual_mask"):
        assert set(body[mode]) == {"top", "layer_matched", "random", "bottom", "top_question"}
        assert len(body[mode]["layer_matched"]) == len(body[mode]["random"]) == 2
        assert [k for k, _ in body["curves"][mode]["top"]] == [0, 1, 5]
    assert len(body["ram_top"]) == 5 and body["ram_top"][0][2] == pytest.approx(result.ram.values.max())


def test_the_published_figures_hold(toy, scenes):
    """The demo's own protocol at the headline; thresholds were committed before the first evaluation."""
    result = core_heads(toy, scenes, protocol=Protocol(doses=()))
    found = result.results()["checks"]
    assert all(check["held"] for check in found.values()), found
    assert all(
        len(result.headline[mode][kind]) == 5 for mode in result.headline for kind in ("random", "layer_matched")
    )


def test_what_ranks_never_judges(toy, scenes, monkeypatch):
    used = []
    real = type(scenes).example
    monkeypatch.setattr(
        type(scenes), "example", lambda self, split, i, seed: used.append(split) or real(self, split, i, seed)
    )
    protocol = Protocol(seed=5, n_rank=4, n_judge=6, n_dose=2, draws=1, dose_draws=1, doses=())
    core_heads(toy, scenes, protocol=protocol)
    assert used.count("rank") % 4 == 0 and used.index("judge") > used.count("rank") - 1


def test_the_story_is_of_the_model(toy, scenes, small):
    _, result = small
    story = tell(toy, scenes, result)
    example = scenes.example("judge", 0, 0)
    assert story.question == example.question and story.answer == example.answer
    assert len(story.cells) == 64 and set(story.coverage.values()) == {1.0} and len(story.coverage) == 4
    assert sum(p for _, p in story.chances) <= 1 + 1e-5 and story.chances[0][1] >= story.chances[1][1]
    prompt = toy.prompt(example.question, images=list(example.images), subject=example.subject)
    layer, head = result.top.heads[0]
    _, cache = toy.run_with_cache(prompt, "pattern")
    row = cache["pattern", layer][0, head, prompt.tokens("subject").positions[0]]
    assert np.allclose(story.top[0].weights, row[list(prompt.tokens("image").positions)], atol=1e-5)
    x0, y0, x1, y1 = story.cells[next(iter(story.coverage))]
    box = example.evidence[0]
    assert box.x0 <= x0 < x1 <= box.x1 and box.y0 <= y0 < y1 <= box.y1
