"""Built-in clips, series and documents: seeded, disjoint halves, regions exactly where the pixels say."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmlens import load_task
from mmlens.errors import OptionError
from mmlens.evidence.regions import Box, PageRegion, Tube
from mmlens.tasks.scenes import CELL, COLORS, KINDS, SHAPES, SIDE, palette, shape_masks
from mmlens.tasks.scenes_document import LINE, PAPER, ScenesDocumentTask
from mmlens.tasks.scenes_multi import ScenesMultiTask
from mmlens.tasks.scenes_video import ScenesVideoTask, draw_paths
from mmlens.toys.build import WORDS

CLASSES = {"video": ScenesVideoTask, "multi": ScenesMultiTask, "document": ScenesDocumentTask}
EVERY = [
    pytest.param(kind, domain, options, id=f"{kind}-{domain}-{'-'.join(options)}")
    for kind, options in (
        ("video", {}),
        ("video", {"hidden": True}),
        ("multi", {}),
        ("document", {}),
        ("document", {"ask": "word"}),
    )
    for domain in ("shapes", "digits")
]


@cache
def _drawn(kind, domain, split, n, options):
    return CLASSES[kind](domain, **dict(options)).examples(split, n)


def drawn(kind, domain, split="judge", n=32, **options):
    """Examples, drawn once for all tests."""
    return _drawn(kind, domain, split, n, tuple(options.items()))


def pictures(example):
    return list(example.pictures) if example.video is None else list(example.video)


def everything(example):
    """All that a model or a score could see of an example."""
    told = (example.question, example.answers, example.subject, example.evidence, example.distractors)
    return b"".join(p.tobytes() for p in pictures(example)) + repr((told, dict(example.meta))).encode()


def on_picture(region, k):
    """A region's box on picture or frame `k`, or None."""
    if isinstance(region, Tube):
        return region.at(frame=k, second=float("nan"))
    return region.region if region.number == k else None


def crop(picture, box):
    x0, y0, x1, y1 = map(int, box.corners)
    return picture[y0:y1, x0:x1]


def inside(shape, boxes):
    """How many boxes hold each pixel."""
    held = np.zeros(shape[:2], int)
    for box in boxes:
        x0, y0, x1, y1 = map(int, box.corners)
        assert 0 <= x0 < x1 <= shape[1] and 0 <= y0 < y1 <= shape[0]
        held[y0:y1, x0:x1] += 1
    return held


def colored(picture):
    """Pixels that are no grey: seven standard deviations above the noise."""
    picture = picture.astype(float) / 255
    return picture.max(-1) - picture.min(-1) > 0.3


def color_of(cell):
    """The palette's colour nearest to any pixel."""
    distance = np.abs(cell.astype(float) / 255 - palette()[:, None, None]).sum(-1)
    return tuple(COLORS)[distance.reshape(len(COLORS), -1).min(1).argmin()]


def kind_of(cell):
    """The shape whose outline is nearest to a cell's coloured pixels."""
    seen, masks = colored(cell), shape_masks() > 0.5
    return SHAPES[((seen & masks).sum((1, 2)) / (seen | masks).sum((1, 2))).argmax()]


@pytest.mark.parametrize("kind, domain, options", EVERY)
def test_examples_are_a_pure_function_of_half_number_and_seed(kind, domain, options):
    a, b = (CLASSES[kind](domain, **options) for _ in range(2))
    first = a.examples("rank", 3, 3)
    assert [everything(e) for e in first] == [everything(b.example("rank", i, 3)) for i in range(3)]
    others = {everything(a.example(s, i, seed)) for s in ("rank", "judge") for i in (0, 1) for seed in (0, 1)}
    assert len(others) == 8
    assert first[2].id == "rank/3/2"


@pytest.mark.parametrize("kind, domain, options", EVERY)
def test_the_halves_share_no_scene(kind, domain, options):
    layout = lambda e: repr((e.question, e.answers, e.evidence, e.distractors, dict(e.meta)))
    rank, judge = (
        {layout(e) for e in drawn(kind, domain, split, n, **options)} for split, n in (("rank", 8), ("judge", 32))
    )
    assert len(rank) == 8 and len(judge) == 32 and not rank & judge


@pytest.mark.parametrize("kind, domain, options", EVERY)
def test_questions_and_answers_are_in_the_embedded_models_words(kind, domain, options):
    task = CLASSES[kind](domain, **options)
    examples = drawn(kind, domain, **options)
    assert task.candidates == tuple(COLORS) and len({e.answer for e in examples}) >= 7
    assert len({e.subject for e in examples}) >= 6
    assert task.chance == 1 / 8
    for e in examples:
        assert e.answer in COLORS and e.subject in KINDS[domain]
        assert len(e.answers) == 1 and e.question == f"What color is the {e.subject}?"
        assert set(e.question.lower().replace("?", " ?").split()) <= set(WORDS)


@pytest.mark.parametrize("kind, domain, options", [p for p in EVERY if "ask" not in p.id])
def test_every_colored_pixel_is_in_a_region_and_the_evidence_has_the_answers_color(kind, domain, options):
    for example in drawn(kind, domain, **options)[:12]:
        shown = 0
        for k, picture in enumerate(pictures(example)):
            boxes = [on_picture(r, k) for r in (*example.evidence, *example.distractors)]
            held = inside(picture.shape, [b for b in boxes if b is not None])
            assert held.max() <= 1 and not (colored(picture) & (held == 0)).any()
            assert all(colored(crop(picture, b)).sum() > 40 for b in boxes if b is not None)
            near = np.abs(picture.astype(float) - COLORS[example.answer]).max(-1) < 30
            for region in example.evidence:
                if (box := on_picture(region, k)) is not None:
                    shown += 1
                    rest = inside(picture.shape, [b for b in boxes if b not in (None, box)]) > 0
                    assert color_of(crop(picture, box)) == example.answer
                    assert crop(near, box).sum() > 10 and near[~rest].sum() == crop(near, box).sum()
        assert shown > 0


@pytest.mark.parametrize("domain", ["shapes", "digits"])
def test_a_tube_follows_its_object_to_the_pixel(domain):
    for example in ScenesVideoTask(domain, n_objects=5).examples("rank", 15):
        assert example.video.shape == (8, SIDE, SIDE, 3) and example.video.dtype == np.uint8
        for tube in (*example.evidence, *example.distractors):
            cells = np.stack([crop(f, tube.at(frame=k, second=0.0)) for k, f in enumerate(example.video)]).astype(float)
            assert cells.shape[1:] == (CELL, CELL, 3)
            assert np.abs(cells - cells[0]).mean() < 12  # the noise alone; one pixel aside is 20 and more at an edge
            still = [np.abs(np.roll(c, 2, 1) - cells[0]).mean() for c in cells[1:]]
            assert np.abs(cells[1:] - cells[0]).mean() < min(still)


@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 12))
def test_objects_keep_apart_on_straight_paths(seed, n_objects, n_frames):
    paths = draw_paths(np.random.default_rng(seed), n_objects, n_frames)
    for frame in range(n_frames):
        boxes = [Box.from_xywh(*map(float, paths[i, frame]), CELL, CELL) for i in range(n_objects)]
        assert inside((SIDE, SIDE), boxes).max() == 1
    way = (paths[:, -1:] - paths[:, :1]).astype(float)
    step = paths - paths[:, :1]
    aside = np.abs(way[..., 0] * step[..., 1] - way[..., 1] * step[..., 0])
    assert (aside <= 0.5 * np.abs(way).sum(-1)).all()  # whole pixels
    assert (np.diff((step * way).sum(-1), axis=1) >= 0).all()  # never back


def test_objects_move():
    ways = [draw_paths(np.random.default_rng(s), 4, 8) for s in range(40)]
    far = np.array([np.abs(p[:, -1] - p[:, 0]).max(-1) for p in ways])
    assert (far.mean(1) > 8).all() and far.mean() > 30


@pytest.mark.parametrize("n_frames", [2, 3, 8, 17])
def test_a_hidden_object_is_there_for_a_part_only(n_frames):
    firsts = set()
    for example in ScenesVideoTask("shapes", n_frames=n_frames, hidden=True).examples("rank", 10):
        frames = [int(when) for when, _ in example.evidence[0].places]
        assert frames == list(range(frames[0], frames[-1] + 1)) and 1 <= len(frames) <= max(1, n_frames // 2)
        assert all(len(t.places) == n_frames for t in example.distractors)
        firsts.add(frames[0])
    assert len(firsts) > 1


def test_needles_share_a_color_and_no_other_picture_holds_their_kind():
    for needles in (1, 2, 4):
        task = ScenesMultiTask("shapes", n_images=5, n_objects=6, needles=needles)
        for example in task.examples("judge", 12):
            assert len({r.number for r in example.evidence}) == needles == len(example.evidence)
            for region in (*example.evidence, *example.distractors):
                cell = crop(example.images[region.number], region.region)
                assert (kind_of(cell) == example.subject) == (region in example.evidence)
                assert region not in example.evidence or color_of(cell) == example.answer


@pytest.mark.parametrize("domain", ["shapes", "digits"])
def test_a_series_of_128_pictures(domain):
    example = ScenesMultiTask(domain, n_images=128, n_objects=2).example("judge", 0, 0)
    assert len(example.images) == 128 and len(example.evidence) == 2 and len(example.distractors) == 254
    assert all(p.shape == (SIDE, SIDE, 3) and p.dtype == np.uint8 for p in example.images)
    everywhere = ScenesMultiTask(domain, n_images=128, n_objects=1, needles=128).example("judge", 0, 0)
    assert [r.number for r in everywhere.evidence] == list(range(128)) and everywhere.distractors == ()


DOCUMENTS = [("shapes", {"n_figures": 6}), ("digits", {"n_figures": 6}), ("shapes", {"ask": "word", "n_pages": 1})]


@pytest.mark.parametrize("domain, options", DOCUMENTS)
def test_word_boxes_hold_all_ink_and_only_their_own_words(domain, options):
    looks = {}
    for example in drawn("document", domain, n=10, **options):
        for k, page in enumerate(example.pages):
            figures = [r.region for _, _, r in example.meta["figures"] if r.number == k]
            words = [(w, r.region) for w, r in example.meta["words"] if r.number == k]
            ink = (page != PAPER).any(-1) & (inside(page.shape, figures) == 0)
            held = inside(page.shape, [*figures, *(box for _, box in words)])
            assert held.max() == 1 and not (ink & (held == 0)).any()
            for word, box in words:
                cut = crop(ink, box)
                assert cut[0].any() and cut[-1].any() and cut[:, 0].any() and cut[:, -1].any()
                assert crop(page, box).max(-1).min() < 140
                looks.setdefault((word, cut.shape), set()).add(crop(page, box).tobytes())
    assert len(looks) > 40 and all(len(seen) == 1 for seen in looks.values())


@pytest.mark.parametrize("domain", ["shapes", "digits"])
def test_figures_have_captions_and_no_text_gives_the_color_away(domain):
    for example in drawn("document", domain, n=10, n_figures=6):
        words = [w.strip(".:") for w, _ in example.meta["words"]]
        assert not set(words) & set(COLORS)
        assert len({kind for kind, _, _ in example.meta["figures"]}) == 6
        for number, (kind, color, at) in enumerate(example.meta["figures"]):
            assert words.count(kind) == 1 and words[words.index(kind) - 2 : words.index(kind)] == [
                "Figure",
                f"{number + 1}",
            ]
            caption = example.meta["words"][words.index(kind)][1]
            whole = example.evidence if kind == example.subject else example.distractors
            held = [r for r in whole if r.number == at.number and contains(r, at)]
            assert len(held) == 1 and contains(held[0], caption)
            assert color_of(crop(example.pages[at.number], at.region)) == color
            if domain == "shapes":
                assert kind_of(crop(example.pages[at.number], at.region)[8:-8, 8:-8]) == kind


def contains(outer, inner):
    a, b = outer.region, inner.region
    return outer.number == inner.number and a.x0 <= b.x0 and a.y0 <= b.y0 and b.x1 <= a.x1 and b.y1 <= a.y1


@pytest.mark.parametrize("options", [{}, {"n_pages": 1}, {"n_figures": 7}, {"n_pages": 4, "n_figures": 1}], ids=str)
def test_a_stated_color_is_the_evidence_of_a_kind_without_a_figure(options):
    for example in drawn("document", "shapes", n=12, ask="word", **options):
        (evidence,) = example.evidence
        inside_it = [w for w, r in example.meta["words"] if contains(evidence, r)]
        assert inside_it == ["The", example.subject, "is", f"{example.answer}."]
        assert evidence.region.y1 - evidence.region.y0 < LINE
        assert [w.strip(".:") for w, _ in example.meta["words"]].count(example.subject) == 1
        assert example.subject not in {kind for kind, _, _ in example.meta["figures"]}
        texts = [[w for w, r in example.meta["words"] if contains(d, r)] for d in example.distractors]
        assert all(text[0] in ("The", "Figure") for text in texts)


@pytest.mark.parametrize(
    "kind, option, value",
    [
        *(("video", *p) for p in (("n_objects", 3), ("n_frames", 6), ("fps", 1.0), ("hidden", True))),
        *(("multi", *p) for p in (("n_objects", 3), ("n_images", 6), ("needles", 1))),
        *(("document", *p) for p in (("n_pages", 2), ("n_figures", 3), ("ask", "word"))),
    ],
)
def test_every_option_matters_and_is_told(kind, option, value):
    plain, other = CLASSES[kind]("shapes"), CLASSES[kind]("shapes", **{option: value})
    assert other.identity() == plain.identity() | {option: value}
    if option == "fps":
        assert (plain.video_options, other.video_options) == ({"fps": 2.0}, {"fps": 1.0})
    else:
        assert everything(plain.example("rank", 0, 0)) != everything(other.example("rank", 0, 0))


@pytest.mark.parametrize(
    "kind, options",
    [
        *(("video", {"n_objects": n}) for n in (0, 9, 2.0, True)),
        *(("video", {"n_frames": n}) for n in (0, "8", 10_000)),
        *(("video", {"fps": f}) for f in (0, -1.0, "2", float("nan"), float("inf"), True)),
        ("video", {"hidden": "yes"}),
        ("video", {"hidden": True, "n_frames": 1}),
        *(("multi", {"n_images": n}) for n in (0, 129, None)),
        *(("multi", {"n_objects": n}) for n in (0, 8)),
        *(("multi", {"needles": n}) for n in (0, 5, 1.5)),
        *(("document", {"n_pages": n}) for n in (0, 65, "3")),
        *(("document", {"n_figures": n}) for n in (0, 9)),
        ("document", {"n_figures": 5, "n_pages": 1}),
        ("document", {"n_figures": 8, "ask": "word"}),
        *(("document", {"ask": a}) for a in ("words", None, ["word"])),
    ],
    ids=str,
)
def test_options_that_mean_nothing(kind, options, as_users):
    with pytest.raises(OptionError):
        CLASSES[kind]("shapes", **options)


@pytest.mark.parametrize("kind", CLASSES)
def test_tasks_are_found_by_name(kind):
    for name, domain in ((f"scenes/{kind}", "shapes"), (f"scenes/{kind}:digits", "digits")):
        task = load_task(name)
        assert isinstance(task, CLASSES[kind]) and (task.name, task.domain) == (name, domain)
        assert all(isinstance(r, Tube | PageRegion) for r in task.example("rank", 0, 0).evidence)
