"""CoRe heads on one model: rank by RAM, cut, judge; the protocol is fixed before the first evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mmlens.evidence.regions import Box
from mmlens.model.hooked import HookedVLM
from mmlens.model.prompt import Prompt
from mmlens.scan import versions
from mmlens.scores import HeadScores, HeadSet
from mmlens.tasks.base import Task

# Fixed before the first evaluation of the trained model.
MODES = ("output_zero", "visual_mask")
THRESHOLDS = {
    "accuracy": 0.95,  # of the model itself, on unseen scenes with 6 objects
    "cost": 0.3,  # accuracy that the top heads must cost
    "visual_mask_ratio": 5.0,  # top's cost over the mean cost of layer-matched draws
    "output_zero_ratio": 3.0,  # top's cost over the median cost of layer-matched draws
}


@dataclass(frozen=True)
class Protocol:
    """What is drawn and counted.

    Attributes
    ----------
    fraction
        The headline cut, as a share of all heads.
    n_rank, n_judge, n_dose
        Examples that rank, that judge the headline, and that judge the other doses.
    draws, dose_draws
        Random and layer-matched draws at the headline and at the other doses; draw i has seed i.
    doses
        Numbers of heads cut, besides the headline.
    """

    seed: int = 0
    fraction: float = 0.05
    n_rank: int = 100
    n_judge: int = 200
    n_dose: int = 100
    draws: int = 5
    dose_draws: int = 2
    doses: tuple[int, ...] = (1, 2, 3, 8, 16)


@dataclass(frozen=True)
class CoReResult:
    """Everything that the page shows, and `results.json` holds.

    `curves[mode][kind]` is a list of (k, [accuracy of each draw]); `headline[mode]` the same at k for every control.
    """

    ram: HeadScores = field(repr=False)
    ram_question: HeadScores = field(repr=False)
    top: HeadSet
    bottom: HeadSet
    top_question: HeadSet
    accuracy: float
    n_format_failures: int
    headline: dict[str, dict[str, Any]]
    curves: dict[str, dict[str, list[tuple[int, list[float]]]]]
    protocol: Protocol
    provenance: dict[str, Any]

    def results(self) -> dict[str, Any]:
        """Plain data for results.json."""
        values = self.ram.values
        return {
            "accuracy": self.accuracy,
            "chance": self.provenance["chance"],
            "k": len(self.top),
            "n_heads": int(values.size),
            "n": self.protocol.n_judge,
            "seed": self.protocol.seed,
            "ram_top": [[layer, head, float(values[layer, head])] for layer, head in self.top],
            **self.headline,
            "curves": self.curves,
            "format_failures": self.n_format_failures,
            "protocol": asdict(self.protocol),
            "thresholds": THRESHOLDS,
            "checks": checks(self.accuracy, self.headline),
            "provenance": self.provenance,
        }


def checks(accuracy: float, headline: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each threshold beside its figure; a cost of nothing makes the ratio infinite (None in JSON)."""
    found: dict[str, dict[str, Any]] = {
        "accuracy": {"value": accuracy, "threshold": THRESHOLDS["accuracy"], "held": accuracy >= THRESHOLDS["accuracy"]}
    }
    for mode, middle in (("visual_mask", mean), ("output_zero", median)):
        cost = accuracy - headline[mode]["top"]
        control = middle(accuracy - a for a in headline[mode]["layer_matched"])
        ratio = THRESHOLDS[f"{mode}_ratio"]
        found[f"{mode}_cost"] = {"value": cost, "threshold": THRESHOLDS["cost"], "held": cost >= THRESHOLDS["cost"]}
        found[f"{mode}_ratio"] = {
            "value": cost / control if control > 0 else None,
            "control_cost": control,
            "control": f"{middle.__name__} of layer-matched draws",
            "threshold": ratio,
            "held": cost >= ratio * control,
        }
    return found


def core_heads(
    vlm: HookedVLM,
    task: Task,
    *,
    protocol: Protocol | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> CoReResult:
    """Rank heads by RAM over the naming word, cut the best, and judge against matched controls on the other half.

    Source: CoRe heads, arXiv 2606.05843 (RAM, causal masking of the top heads). The controls (random, layer-matched,
    bottom, and the ranking over the whole question) are ours.
    """
    protocol = protocol or Protocol()
    progress("ranking heads by RAM")
    ram, ram_question = (
        vlm.scan(task, metric="ram", query=query, n=protocol.n_rank, seed=protocol.seed)
        for query in ("subject", "question")
    )
    top, bottom = ram.top(fraction=protocol.fraction), ram.bottom(fraction=protocol.fraction)
    top_question = ram_question.top(fraction=protocol.fraction)
    whole = task.evaluate(vlm, n=protocol.n_judge, seed=protocol.seed)

    def judge(heads: HeadSet, mode: str, n: int) -> float:
        with vlm.ablate(heads, mode=mode):
            return task.evaluate(vlm, n=n, seed=protocol.seed).accuracy

    headline: dict[str, dict[str, Any]] = {}
    curves: dict[str, dict[str, list[tuple[int, list[float]]]]] = {}
    for mode in MODES:
        progress(f"cutting {len(top)} heads, {mode}")
        n, seeds = protocol.n_judge, range(protocol.draws)
        headline[mode] = {
            "top": judge(top, mode, n),
            "layer_matched": [judge(top.layer_matched(seed=s), mode, n) for s in seeds],
            "random": [judge(top.random(seed=s), mode, n) for s in seeds],
            "bottom": judge(bottom, mode, n),
            "top_question": judge(top_question, mode, n),
        }
        at_k = {k: v if isinstance(v, list) else [v] for k, v in headline[mode].items()}
        curves[mode] = {kind: [(0, [whole.accuracy]), (len(top), values)] for kind, values in at_k.items()}
        for k in protocol.doses:
            progress(f"cutting {k} heads, {mode}")
            chosen, n = ram.top(k=k), protocol.n_dose
            few = range(protocol.dose_draws)
            for kind, values in (
                ("top", [judge(chosen, mode, n)]),
                ("layer_matched", [judge(chosen.layer_matched(seed=s), mode, n) for s in few]),
                ("random", [judge(chosen.random(seed=s), mode, n) for s in few]),
                ("bottom", [judge(ram.bottom(k=k), mode, n)]),
            ):
                curves[mode][kind].append((k, values))
        for points in curves[mode].values():
            points.sort(key=lambda p: p[0])
    provenance = {
        "model": vlm.identity(),
        "task": task.identity(),
        "chance": task.chance,
        "versions": versions(),
        "borrowed": [top.layer_matched(seed=s).provenance["borrowed"] for s in range(protocol.draws)],
    }
    return CoReResult(
        ram,
        ram_question,
        top,
        bottom,
        top_question,
        whole.accuracy,
        whole.n_format_failures,
        headline,
        curves,
        protocol,
        provenance,
    )


@dataclass(frozen=True)
class HeadLook:
    """Where one head looks from the subject words.

    Attributes
    ----------
    weights
        Mean attention of the subject rows on each picture token, in the picture's token order.
    """

    layer: int
    head: int
    ram: float
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Story:
    """One example in full, as the page tells it.

    Attributes
    ----------
    tokens
        (text, role) of every token outside the picture's run; the run is one entry with role "image".
    cells
        Source pixels of every picture token.
    coverage
        {picture token: fraction of it inside the evidence}.
    chances
        (candidate, probability), best first.
    pattern, pattern_tokens
        The best head's attention with picture tokens pooled (summed as keys, averaged as queries), and its labels.
    """

    question: str
    answer: str
    said: str
    image: Any
    boxes: tuple[tuple[float, float, float, float], ...]
    tokens: tuple[tuple[str, str], ...]
    cells: tuple[tuple[float, float, float, float], ...]
    coverage: dict[int, float]
    chances: tuple[tuple[str, float], ...]
    top: tuple[HeadLook, ...]
    bottom: tuple[HeadLook, ...]
    pattern: list[list[float]]
    pattern_tokens: list[str]
    pool: tuple[int, int]


def tell(vlm: HookedVLM, task: Task, result: CoReResult, *, index: int = 0) -> Story:
    """One example of the judging half, looked into with the heads of a result."""
    example = task.example("judge", index, result.protocol.seed)
    prompt = vlm.prompt(
        example.question,
        images=list(example.pictures),
        subject=example.subject,
        evidence=list(example.evidence),
    )
    best = result.top.heads[0]
    layers = sorted({layer for layer, _ in (*result.top, *result.bottom)})
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in layers]
    _, cache = vlm.run_with_cache(prompt, names)
    grid, item = prompt.layout(0).grid(), prompt.items[0]
    image_columns, subject = [item.columns[o] for o in grid.tokens.index], list(prompt.tokens("subject").positions)

    def look(head: tuple[int, int]) -> HeadLook:
        weights = cache["pattern", head[0]][0, head[1]][subject][:, image_columns].mean(0)
        return HeadLook(*head, float(result.ram.values[head]), tuple(weights.tolist()))

    view, rows, cols = grid.view, grid.tokens.rows, grid.tokens.cols
    assert view is not None  # the prompt was built from a picture of known size
    where = prompt.locate(example.evidence[0])
    coverage = {
        image_columns.index(c): share for c, share in zip(where.positions, where.coverage) if c in image_columns
    }
    chances = vlm.answer_logprobs(prompt, task.candidates)[0].exp().tolist()
    pool = (2, 2) if rows % 2 == 0 and cols % 2 == 0 else (1, 1)
    pattern, labels = pooled_pattern(
        cache["pattern", best[0]][0, best[1]], str_tokens(vlm, prompt), image_columns, (rows, cols), pool
    )
    return Story(
        question=example.question,
        answer=example.answers[0],
        said=vlm.generate(prompt, max_new_tokens=4).text[0],
        image=prompt.examples[0].images[0],
        boxes=tuple(b.in_pixels(*item.size).corners for b in example.evidence if isinstance(b, Box) and item.size),
        tokens=_shown_tokens(vlm, prompt),
        cells=tuple(view.source_box(o) for o in grid.tokens.index),
        coverage=coverage,
        chances=tuple(sorted(zip(task.candidates, chances), key=lambda c: -c[1])),
        top=tuple(look(h) for h in result.top),
        bottom=tuple(look(h) for h in result.bottom),
        pattern=[[round(v, 4) for v in row] for row in pattern.tolist()],
        pattern_tokens=labels,
        pool=pool,
    )


def pooled_pattern(
    pattern: Float[Tensor, "pos pos"],
    tokens: list[str],
    image_columns: list[int],
    grid: tuple[int, int],
    pool: tuple[int, int],
) -> tuple[Float[Tensor, "n n"], list[str]]:
    """A head's pattern with the picture's tokens pooled into blocks: keys summed, queries averaged.

    Rows still sum to 1. Returns the pooled pattern and a label for each of its rows.
    """
    cells = {column: cell for cell, column in enumerate(image_columns)}
    places: dict[str | int, int] = {}  # a block of the picture, or a column of its own
    member = torch.zeros(len(tokens), len(tokens))
    labels: list[str] = []
    for column, token in enumerate(tokens):
        cell = cells.get(column)
        place: str | int = column
        if cell is not None:
            token = place = f"[{cell // grid[1] // pool[0]},{cell % grid[1] // pool[1]}]"
        if place not in places:
            places[place] = len(labels)
            labels.append(token)
        member[column, places[place]] = 1
    member = member[:, : len(labels)]
    summed = pattern.float().cpu() @ member
    return (member / member.sum(0)).T @ summed, labels


def str_tokens(vlm: HookedVLM, prompt: Prompt) -> list[str]:
    """Tokens of a prompt of one example as text."""
    return [str(name) for name in vlm.to_str_tokens(prompt)]


def _shown_tokens(vlm: HookedVLM, prompt: Prompt) -> tuple[tuple[str, str], ...]:
    names = str_tokens(vlm, prompt)
    roles = prompt.roles[0]
    shown: list[tuple[str, str]] = []
    for column, name in enumerate(names):
        if column in roles["image"]:
            if not shown or shown[-1][1] != "image":
                shown.append((f"{len(roles['image'])} picture tokens", "image"))
            continue
        role = next((r for r in ("subject", "question", "system") if column in roles.get(r, ())), "template")
        shown.append((name.replace("\n", "\u21b5"), role))
    return tuple(shown)
