"""Scenes: seeded, disjoint halves, boxes where the object is, handwriting kept apart."""

import hashlib

import numpy as np
import pytest

from mmlens import load_task
from mmlens.errors import OptionError, UnknownTaskError
from mmlens.tasks.scenes import CELL, COLORS, DIGITS, SHAPES, digit_masks, palette, shape_masks

TASKS = ("scenes/image", "scenes/digits")
# Of pictures, questions, answers and boxes as version 0.1.0 drew them; the embedded models and published figures
# depend on them.
DRAWN = {
    ("scenes/image", 6, "rank", 0, 0): "02e966df8b23aa5f87720eba81cd42c36ee6a12fa064b0a0cf3b129d1214d66f",
    ("scenes/image", 2, "rank", 0, 0): "ca18e2a6ec54fc579109cb78c5a76ca5c81d7f3624ac864215ea5be67e5c0efb",
    ("scenes/image", 6, "judge", 7, 0): "2a0776ea02f2bc1b9f6ae61ae0a631d00a2094b545bad5c389567e90d2cf49f6",
    ("scenes/image", 2, "judge", 7, 0): "23325adc05e4d446bcbfb3cba71c6ed2fc9d4935723ac815dcae909a4cd3ee27",
    ("scenes/image", 6, "judge", 3, 5): "0964e0a95fda71748dee0e99d06a135b23753ef598c54980ffc535fe59010535",
    ("scenes/digits", 6, "rank", 0, 0): "fb9a778641d6e313edf9e503a9ca8e0e9065df06ea0ba5c40b061267a99184ff",
    ("scenes/digits", 2, "rank", 0, 0): "5ec02433731218b89e77ca48cd63888e5ebe32b1fda6fe4f13a5076aaec59574",
    ("scenes/digits", 6, "judge", 7, 0): "2240ae704ebdab4192a870f9e26dc41f1b35094e8f9fadcbff7ea59f6cb6117b",
    ("scenes/digits", 2, "judge", 7, 0): "a060fc2dda9396a111658716650621d7056843c785787ab45828753387964868",
    ("scenes/digits", 6, "judge", 3, 5): "7cbcf3668867d39939ea902217e890f7f91da2f7a562bf15653320845ee9fb21",
}


@pytest.mark.parametrize("drawn", DRAWN, ids=str)
def test_pictures_stay_as_first_published(drawn):
    name, n_objects, split, index, seed = drawn
    example = load_task(name, n_objects=n_objects).example(split, index, seed)
    told = hashlib.sha256(example.images[0].tobytes())
    boxes = [tuple(map(float, box.corners)) for box in (*example.evidence, *example.distractors)]
    told.update(repr((example.id, example.question, example.answer, example.subject, boxes)).encode())
    assert told.hexdigest() == DRAWN[drawn]


def test_digits_have_two_names_and_one_identity():
    a, b = load_task("scenes/digits"), load_task("scenes/image:digits")
    assert a.name == b.name == "scenes/digits" and a.identity() == b.identity()
    assert a.example("judge", 3, 1).images[0].tobytes() == b.example("judge", 3, 1).images[0].tobytes()


@pytest.mark.parametrize("name", TASKS)
def test_examples_are_a_pure_function_of_half_number_and_seed(name):
    task = load_task(name)
    a, b = task.examples("rank", 5, 0), task.examples("rank", 5, 0)
    assert all(np.array_equal(x.images[0], y.images[0]) and x.question == y.question for x, y in zip(a, b))
    assert [e.id for e in task.examples("rank", 3, 0)] == [e.id for e in a[:3]]
    assert not np.array_equal(a[0].images[0], task.example("rank", 0, 1).images[0])


@pytest.mark.parametrize("name", TASKS)
def test_the_halves_share_no_scene(name):
    task = load_task(name)
    layout = lambda e: (e.question, e.answer, e.evidence, e.distractors)
    for seed in (0, 1):
        rank = {layout(e) for e in task.examples("rank", 120, seed)}
        judge = {layout(e) for e in task.examples("judge", 120, 0)}
        assert len(rank) > 117 and not rank & judge


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


@pytest.mark.parametrize("n", [0, 9, True, 2.5, "4", None])
def test_impossible_scenes(n, as_users):
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
