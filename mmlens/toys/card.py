"""The model card: held-out accuracy, learning curves, the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mmlens.model.hooked import HookedVLM
from mmlens.tasks import load_task

TASKS = ("scenes/image", "scenes/digits")
JUDGED = {"n": 500, "seed": 11, "n_objects": 6}


def measure(folder: Path) -> dict[str, dict[str, Any]]:
    """Accuracy on unseen pictures of the judging half, with 6 objects."""
    with HookedVLM.from_pretrained(folder) as vlm:
        found = {}
        for name in TASKS:
            task = load_task(name, n_objects=JUDGED["n_objects"])
            result = task.evaluate(vlm, n=JUDGED["n"], seed=JUDGED["seed"])
            found[name] = {"accuracy": result.accuracy, "format_failures": result.n_format_failures, **JUDGED}
    return found


def smooth(log: list[dict[str, Any]], phase: str, domain: str, key: str, window: int = 20) -> list[tuple[int, float]]:
    """A running mean of one column of the training log."""
    points = [
        (row["step"], row[key]) for row in log if row["phase"] == phase and row["domain"] == domain and key in row
    ]
    values = np.array([v for _, v in points])
    return [(points[i][0], float(values[max(0, i - window + 1) : i + 1].mean())) for i in range(0, len(points), 5)]


def curves_svg(log: list[dict[str, Any]]) -> str:
    """Accuracy of the first answer of a sequence over training, natural questions and short form."""
    width, height, left, bottom = 720, 260, 46, 34
    last = max(row["step"] for row in log)
    x = lambda step: left + (width - left - 12) * step / last  # noqa: E731
    y = lambda value: 12 + (height - bottom - 12) * (1 - value)  # noqa: E731
    lines, legend = [], []
    series = [
        ("short", "shapes", "#8fc1d1"),
        ("short", "digits", "#f0c98a"),
        ("natural", "shapes", "#0b6e8f"),
        ("natural", "digits", "#d1742b"),
    ]
    for i, (phase, domain, color) in enumerate(series):
        points = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in smooth(log, phase, domain, "first"))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        legend.append(
            f'<text x="{left + 12 + 168 * i}" y="{height - 6}" fill="{color}" font-size="13">{domain}, {phase} form</text>'
        )
    grid = "".join(
        f'<line x1="{left}" x2="{width - 12}" y1="{y(v)}" y2="{y(v)}" stroke="#e3e7ee"/>'
        f'<text x="{left - 8}" y="{y(v) + 4}" text-anchor="end" fill="#5b6676" font-size="12">{v:.0%}</text>'
        for v in (0, 0.25, 0.5, 0.75, 1)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
        f'<rect width="{width}" height="{height}" fill="white"/>{grid}{"".join(lines)}{"".join(legend)}</svg>\n'
    )


def write_card(folder: Path, training: dict[str, Any]) -> None:
    """Write README.md, accuracy.json and curves.svg beside the weights."""
    found = measure(folder)
    (folder / "accuracy.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    (folder / "curves.svg").write_text(curves_svg(training["log"]))
    recipe = "\n".join(f"| {key} | {value} |" for key, value in training["recipe"].items())
    rows = "\n".join(
        f"| {name} | {f['accuracy']:.3f} | {f['format_failures']} | {f['n']} | {f['seed']} |"
        for name, f in found.items()
    )
    (folder / "README.md").write_text(
        f"""# {folder.name}

A tiny Qwen3-VL (the stock Hugging Face class, 1.1 million parameters) trained from nothing to answer "What color is the
star?" about pictures drawn by mmlens: coloured shapes, and real handwriting (scikit-learn's bundled digits) in colour. It
exists to be looked into: 8 layers x 12 heads (6 key/value heads of 8), a 3-block picture tower, DeepStack after blocks 0
and 1, 128-pixel pictures, 64 picture tokens. It knows {_vocabulary()} words and marks, and nothing else.

## Accuracy on unseen pictures, {JUDGED["n_objects"]} objects each (chance 0.125)

| task | accuracy | format failures | n | seed |
|---|---|---|---|---|
{rows}

The digits of `scenes/digits` were held out from training. Measured by `python -m mmlens.toys.card {folder.name}`.

## Training

`python -m mmlens.toys.train {folder.name} --out FOLDER`: {training["minutes"]:.0f} minutes for
{training["log"][-1]["step"]} steps, {training.get("threads", 1)} thread(s) of a 2-core machine, seeded. The curve is
the accuracy of the first answer of each training sequence (3 to 6 objects, growing).

![accuracy over training](curves.svg)

| option | value |
|---|---|
{recipe}

`head_sparsity` is a group lasso on the heads' output weights: this model's circuits are sparser than those of a model
trained without it, by design. Conclusions about sparsity drawn on it are conclusions about it.
"""
    )


def _vocabulary() -> int:
    from mmlens.toys.build import WORDS

    return len(WORDS)


def main() -> None:
    """Print the accuracy of an embedded model or a folder as JSON."""
    import argparse

    from mmlens.model.loading import resolve

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="embedded name or folder")
    source, _ = resolve(parser.parse_args().model)
    print(json.dumps(measure(Path(source)), indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
