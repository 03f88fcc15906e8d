"""CoRe heads on one model: rank by RAM, cut, judge; the protocol is fixed before the first evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any

from mmlens.model.hooked import HookedVLM
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
    scan = dict(metric="ram", n=protocol.n_rank, seed=protocol.seed)
    ram = vlm.scan(task, query="subject", **scan)
    ram_question = vlm.scan(task, query="question", **scan)
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
