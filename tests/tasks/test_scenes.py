"""Scenes: seeded, disjoint halves, boxes where the object is, handwriting kept apart."""

import numpy as np
import pytest

from mmlens import load_task
from mmlens.errors import OptionError, UnknownTaskError
from mmlens.tasks.scenes import CELL, COLORS, DIGITS, SHAPES, digit_masks, palette, shape_masks

TASKS = ("scenes/image", "scenes/digits")


@pytest.mark.parametrize("name", TASKS)
def test_examples_are_a_pure_function_of_half_number_and_seed(name):
    task = load_task(name)
    a, b = task.examples("rank", 5, 0), task.examples("rank", 5, 0)
    assert all(np.array_equal(x.images[0], y.images[0]) and x.question == y.question for x, y in zip(a, b))
    assert [e.key for e in task.examples("rank", 3, 0)] == [e.key for e in a[:3]]
    assert not np.array_equal(a[0].images[0], task.example("rank", 0, 1).images[0])


@pytest.mark.parametrize("name", TASKS)
def test_the_halves_share_no_scene(name):
    task = load_task(name)
    layout = lambda e: (e.question, e.answer, e.evidence, e.distractors)
    for seed in (0, 1):
        rank = {layout(e) for e in task.examples("rank", 300, seed)}
        judge = {layout(e) for e in task.examples("judge", 300, 0)}
        assert len(rank) > 295 and not rank & judge


@pytest.mark.parametrize("name", TASKS)
def test_the_evidence_box_holds_the_answers_color(name):
    task = load_task(name, n_objects=4)
    for example in task.examples("judge", 40, 0):
        box = example.evidence[0]
        cell = example.images[0][int(box.y0) : int(box.y1), int(box.x0) : int(box.x1)].astype(float) / 255
        assert cell.shape == (CELL, CELL, 3)
        distance = np.abs(cell[None] - palette()[:, None, None]).sum(-1)
        nearest = distance.reshape(8, -1).min(1).argmin()
        assert tuple(COLORS)[nearest] == example.answer
        assert len(example.distractors) == 3 and box not in example.distractors
        assert example.subject in example.question and example.subject in (*SHAPES, *DIGITS)


def test_handwriting_for_questions_was_never_for_training():
    train, held = digit_masks("train"), digit_masks("held_out")
    assert sum(map(len, train)) == 1437 and sum(map(len, held)) == 360
    flat = lambda pools: {m.tobytes() for pool in pools for m in pool}
    assert len(flat(train) & flat(held)) <= 2  # the data set itself holds a few doubles


def test_shapes_differ():
    masks = shape_masks()
    assert masks.shape == (8, CELL, CELL)
    for i in range(8):
        for j in range(i):
            assert np.abs(masks[i] - masks[j]).mean() > 0.03


@pytest.mark.parametrize("n", [0, 9])
def test_impossible_scenes(n):
    with pytest.raises(OptionError):
        load_task("scenes/image", n_objects=n)


def test_wrong_task_names_get_the_closest(as_users):
    with pytest.raises(UnknownTaskError, match="scenes/image"):
        load_task("scene/images")
    with pytest.raises(UnknownTaskError):
        load_task(None)
    with pytest.raises(OptionError, match="objects"):
        load_task("scenes/image", objects=3)
    with pytest.raises(OptionError):
        load_task("scenes/image").examples("train")
