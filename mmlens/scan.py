"""The one loop over examples: scoring heads and judging answers, in a run directory that survives a kill."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mmlens.errors import OptionError, RunFolderError, TokenGroupError, UnknownTaskError
from mmlens.metrics.scanned import SCANNED, Asked
from mmlens.model.hooked import HookedVLM
from mmlens.model.prompt import Prompt
from mmlens.model.requests import pad_rows
from mmlens.model.sites import Site
from mmlens.scores import HeadScores, write_whole
from mmlens.tasks.base import Example, Split, Task
from mmlens.tokens import Group, PerExample, TokenSet

METRICS = tuple(SCANNED)
QUERIES = ("question", "subject", "last", "output")


def versions() -> dict[str, str]:
    """Versions of what computes the numbers."""
    return {name: version(name) for name in ("mmlens", "torch", "transformers", "nnsight")}


# ---------------------------------------------------------------------- the loop
@dataclass(frozen=True)
class Batch:
    """Some examples of a task, encoded together."""

    number: int
    examples: tuple[Example, ...]
    prompt: Prompt

    @cached_property
    def n_bytes(self) -> int:
        """Of the encoded inputs."""
        return sum(v.nbytes for v in self.prompt.inputs.values() if isinstance(v, Tensor))


# By model: (id of the task, half, n, seed, answers) -> the task itself and its ready batches.
_ENCODED: WeakKeyDictionary[HookedVLM, OrderedDict[tuple, tuple[Task, dict[int, Batch]]]] = WeakKeyDictionary()
KEPT_EXAMPLES = 2000  # stay encoded, over all sets of a model
KEPT_BYTES = 2**30  # and so much of their inputs; large pictures are encoded again


def encode_batch(vlm: HookedVLM, task: Task, examples: Sequence[Example], *, answers: bool) -> Prompt:
    """The prompt of some examples, with their subjects and evidence; `answers` teacher-forces the gold answers."""
    videos = [[] if e.video is None else [e.video] for e in examples]
    shown: dict[str, Any] = {"videos": videos, **task.video_options} if any(videos) else {}
    return vlm.prompt(
        [e.question for e in examples],
        [list(e.pictures) for e in examples],
        subject=[e.subject for e in examples],
        answer=[e.answer if answers else None for e in examples],
        evidence=[list(e.evidence) for e in examples],
        distractors=[list(e.distractors) for e in examples],
        **shown,
    )


def batches(
    vlm: HookedVLM,
    task: Task,
    *,
    split: Split,
    n: int | None,
    seed: int,
    answers: bool,
    skip: set[int] | None = None,
    keep: bool = True,
) -> Iterator[Batch]:
    """The task's batches in order, those in `skip` left out; with `keep` the last sets stay encoded, for evaluations
    that differ only in the interventions around them."""
    n = task.count(split, n, seed)
    kept = _ENCODED.setdefault(vlm, OrderedDict())
    key = (id(task), split, n, seed, answers, task.batch)
    # The entry holds the task, so its id cannot be another's.
    _, ready = kept.setdefault(key, (task, {})) if keep and n <= KEPT_EXAMPLES else (task, {})
    if key in kept:
        kept.move_to_end(key)
    while sum(k[2] for k in kept) > KEPT_EXAMPLES:
        kept.popitem(last=False)
    # Batches are a pure function of the task: their size and padding shift results by rounding.
    for number, start in enumerate(range(0, n, task.batch)):
        if skip and number in skip:
            continue
        if number not in ready:
            chunk = tuple(task.example(split, i, seed) for i in range(start, min(start + task.batch, n)))
            batch = Batch(number, chunk, encode_batch(vlm, task, chunk, answers=answers))
            held = sum(b.n_bytes for _, of in kept.values() for b in of.values())
            if key not in kept or held + batch.n_bytes > KEPT_BYTES:
                yield batch
                continue
            ready[number] = batch
        yield ready[number]


def track(items: Iterator[Any], *, total: int, what: str) -> Iterator[Any]:
    """A progress bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(stderr=True)
    if not console.is_terminal or total < 2:
        yield from items
        return
    yield from rich_track(items, description=what, total=total, console=console, transient=True)


# ---------------------------------------------------------------------- run directories
class RunFolder:
    """run.json (what is run, and when and where) and one shard for each batch, written whole or not at all."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder, self.shards = folder, folder / "shards"
        described = json.loads(json.dumps(identity))
        run = folder / "run.json"
        if run.exists():
            self._check(run, described)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunFolderError(
                f"{folder} is no empty folder and holds no run.json",
                expected="a new or empty folder, or the folder of an earlier call of the same scan",
                fix="give another out=",
            )
        started = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "host": platform.node()}
        self._run = json.dumps({"identity": described, **started}, indent=1, sort_keys=True).encode()

    @staticmethod
    def _check(run: Path, identity: dict[str, Any]) -> None:
        try:
            theirs = json.loads(run.read_text())["identity"]
        except (OSError, ValueError, KeyError) as error:
            raise RunFolderError(
                f"{run} cannot be read: {error}", expected="a run.json that mmlens wrote", fix="give another out="
            ) from None
        differing = sorted(k for k in {*theirs, *identity} if theirs.get(k) != identity.get(k))
        if differing:
            told = "; ".join(f"{k} was {theirs.get(k)!r}, is {identity.get(k)!r}" for k in differing)
            raise RunFolderError(
                f"{run.parent} is the folder of another run: {told}",
                expected="the same model, task and options, to go on",
                fix="give another out=, or repeat the earlier call",
            )

    def path(self, number: int) -> Path:
        """File of a batch's shard."""
        return self.shards / f"{number:06d}.safetensors"

    def read(self) -> dict[int, tuple[np.ndarray, dict[str, str]]]:
        """Every whole shard: values and the reasons of NaN rows; broken ones are dropped and computed again."""
        from safetensors import SafetensorError, safe_open

        found = {}
        for path in sorted(self.shards.glob("*.safetensors")):
            try:
                with safe_open(path, "numpy") as shard:
                    found[int(path.stem)] = shard.get_tensor("values"), json.loads(shard.metadata()["reasons"])
            except (SafetensorError, OSError, ValueError, KeyError):
                path.unlink()
        return found

    def write(self, number: int, values: np.ndarray, reasons: dict[str, str]) -> None:
        """Add a batch."""
        from safetensors.numpy import save

        body = save({"values": np.ascontiguousarray(values)}, {"reasons": json.dumps(reasons, sort_keys=True)})
        self.write_shard(number, body)

    def whole(self) -> set[int]:
        """Numbers of the shards that are there whole; only their headers are read. Broken ones are dropped."""
        from safetensors import SafetensorError, safe_open

        found = set()
        for path in sorted(self.shards.glob("*.safetensors")):
            try:
                with safe_open(path, "numpy"):
                    found.add(int(path.stem))
            except (SafetensorError, OSError, ValueError):
                path.unlink()
        return found

    def write_shard(self, number: int, body: bytes) -> None:
        """Add a batch that is already in its file's form."""
        if not (self.folder / "run.json").exists():  # only now: a call that fails before leaves nothing behind
            write_whole(self.folder / "run.json", self._run)
        write_whole(self.path(number), body)


# ---------------------------------------------------------------------- scoring heads
def scan(
    vlm: HookedVLM,
    task: Task,
    *,
    metric: str = "ram",
    query: Group = "question",
    n: int | None = None,
    seed: int = 0,
    split: Split = "rank",
    out: str | Path | None = None,
) -> HeadScores:
    """Score every decoder head over a task's examples.

    Only the query rows of each pattern are built, and only each head's score is kept.

    Parameters
    ----------
    metric
        "ram" (attention mass on the evidence) or "lift" (the same over uniform attention).
    query
        Query set Q, any token group; "question", "subject", "last" and "output" are the usual ones.
    n, seed, split
        Which examples: the first `n` of a half, drawn with `seed`.
    out
        A run directory. Killed and called again, the scan goes on after the last whole batch, to the same bytes.

    Returns
    -------
    HeadScores
        NaN samples (nothing of the evidence left by a crop, a question before its picture) are counted with reasons.

    Raises
    ------
    OptionError, TokenGroupError, RunFolderError
    """
    return _scan(vlm, task, (metric,), {"kind": "scan", "metric": metric}, query, n, seed, split, out)[metric]


def scan_many(
    vlm: HookedVLM,
    task: Task,
    *,
    metrics: Sequence[str],
    query: Group = "question",
    n: int | None = None,
    seed: int = 0,
    split: Split = "rank",
    out: str | Path | None = None,
) -> dict[str, HeadScores]:
    """Several metrics of every decoder head in one pass over a task; each as `scan` gives it.

    Parameters
    ----------
    metrics
        Names, each once; see `METRICS`.
    query, n, seed, split, out
        As for `scan`. With `out`, each metric's result is saved in a folder of its name inside.
    """
    if isinstance(metrics, str) or not metrics or len(set(metrics)) < len(metrics):
        raise OptionError(
            f"metrics={metrics!r}", expected="a list of different names", fix=f"metrics={list(METRICS[:2])}"
        )
    asked = {"kind": "scan_many", "metrics": list(metrics)}
    return _scan(vlm, task, tuple(metrics), asked, query, n, seed, split, out)


def _scan(
    vlm: HookedVLM,
    task: Task,
    metrics: tuple[str, ...],
    asked: dict[str, Any],
    query: Group,
    n: int | None,
    seed: int,
    split: Split,
    out: str | Path | None,
) -> dict[str, HeadScores]:
    unknown = [m for m in metrics if m not in METRICS]
    if unknown:
        raise OptionError(f"metric={unknown[0]!r}", expected=f"one of {', '.join(METRICS)}", fix="see docs/metrics.md")
    if not isinstance(task, Task):
        raise UnknownTaskError(
            f"a task given as {type(task).__name__}",
            expected="a Task",
            fix="load_task('scenes/image'), or a Task of your own",
        )
    if out is not None and not isinstance(out, str | os.PathLike):
        raise OptionError(f"out={out!r}", expected="a folder's path", fix="out='runs/ram'")
    n = task.count(split, n, seed)
    entries = query.per_example if isinstance(query, TokenSet) else query if isinstance(query, PerExample) else None
    if entries is not None and len(entries) != n:
        raise TokenGroupError(
            f"query= over {len(entries)} examples for a scan of {n}",
            expected="one entry for each example of the scan",
            fix="use a name expression, which means the same in every example",
        )
    identity = {
        **asked,
        "model": vlm.identity(),
        "task": task.identity(),
        "query": query if isinstance(query, str | int) else _described(query),
        "n": n,
        "seed": seed,
        "split": split,
        "batch": task.batch,
        "versions": versions(),
    }
    folder = None if out is None else RunFolder(Path(out), identity)
    done = {} if folder is None else {number: _as_now(*shard, metrics) for number, shard in folder.read().items()}
    answers = isinstance(query, str) and "output" in query
    todo = batches(vlm, task, split=split, n=n, seed=seed, answers=answers, skip=set(done))
    total = -(-n // task.batch)
    for batch in track(todo, total=total - len(done), what=f"{', '.join(metrics)} over {task.name}"):
        rows = query if entries is None else PerExample(entries[batch.number * task.batch :][: len(batch.examples)])
        done[batch.number] = _score_batch(vlm, batch, metrics, rows)
        if folder is not None:
            folder.write(batch.number, *done[batch.number])
    found = {}
    for i, metric in enumerate(metrics):
        samples = np.concatenate([done[b][0][i] for b in range(total)])
        reasons = {
            str(b * task.batch + int(k.split("/")[0])): why
            for b in range(total)
            for k, why in done[b][1].items()
            if k.split("/")[1] == metric
        }
        own = {**identity, "kind": "scan", "metric": metric}
        own.pop("metrics", None)
        scores = HeadScores(samples, json.loads(json.dumps(own)), "decoder", "query", reasons)
        if folder is not None:
            scores.save(folder.folder if len(metrics) == 1 and "metric" in asked else folder.folder / metric)
        found[metric] = scores
    return found


def _as_now(values: np.ndarray, reasons: dict[str, str], metrics: Sequence[str]) -> tuple[np.ndarray, dict[str, str]]:
    """A shard in today's form; earlier ones held a single metric without its name."""
    if values.ndim == 4:
        return values, reasons
    return values[None], {f"{example}/{metrics[0]}": why for example, why in reasons.items()}


def _described(query: Any) -> Any:
    return query.per_example if isinstance(query, TokenSet) else list(query)


def _score_batch(
    vlm: HookedVLM, batch: Batch, metrics: Sequence[str], query: Group
) -> tuple[np.ndarray, dict[str, str]]:
    """(metric, example, layer, head) values, and the reasons of NaN ones by "example/metric"."""
    prompt = batch.prompt
    rows = prompt.tokens(query).per_example
    columns = {
        "evidence": [roles.get("evidence", ()) for roles in prompt.roles],
        "visual": [tuple(sorted({*r.get("image", ())} - {*r.get("newline", ())})) for r in prompt.roles],
        "distractor": [roles.get("distractor", ()) for roles in prompt.roles],
    }
    reasons = {
        f"{i}/{metric}": why
        for metric in metrics
        for i, q in enumerate(rows)
        if (why := _unsound(q, {k: columns[k][i] for k in sorted(SCANNED[metric].needs)}, batch.examples[i]))
    }
    # An unsound example keeps one row, so that the batch stays rectangular; its values are replaced by NaN.
    safe = tuple(q or prompt.roles[i]["last"] for i, q in enumerate(rows))
    index = pad_rows(safe)
    masks = {name: torch.zeros(len(prompt), prompt.n_columns, dtype=torch.bool) for name in columns}
    for name, per_example in columns.items():
        for i, chosen in enumerate(per_example):
            masks[name][i, list(chosen)] = True
    visible = index - torch.tensor([roles["all"][0] for roles in prompt.roles])[:, None] + 1
    asked = Asked(index >= 0, visible=visible, **masks)
    values = torch.full((len(metrics), len(prompt), vlm.n_layers, vlm.n_heads), torch.nan)

    def score(site: Site, pattern: Float[Tensor, "batch head row key"]) -> None:
        here = asked.to(pattern.device)
        for m, metric in enumerate(metrics):
            values[m, :, site.layer] = SCANNED[metric].compute(pattern, here).float().cpu()

    vlm.reduce(prompt, {"pattern": score}, rows=TokenSet.of(*safe))
    for key in reasons:
        example, metric = key.split("/")
        values[list(metrics).index(metric), int(example)] = torch.nan
    return values.numpy(), reasons


def _unsound(query: Sequence[int], needed: dict[str, Sequence[int]], example: Example) -> str | None:
    if "evidence" in needed and not needed["evidence"]:
        return "the model sees nothing of the evidence" if example.evidence else "the example has no evidence"
    if "distractor" in needed and not needed["distractor"]:
        return "the example has no distractors"
    if "visual" in needed and not needed["visual"]:
        return "the example has no picture"
    if not query:
        return "the query group is empty"
    keys = needed.get("evidence") or needed.get("visual") or (0,)
    if max(query) < min(keys):
        what = "evidence" if "evidence" in needed else "picture"
        return f"every query token stands before the {what}"
    return None


# ---------------------------------------------------------------------- judging answers
@dataclass(frozen=True)
class Evaluation:
    """Accuracy of a model's own answers.

    Attributes
    ----------
    accuracy
        Mean of the task's score over the examples; of tasks with one right answer the share of exact matches.
    n, n_format_failures
        Examples, and those whose answer has not the form that the question asks for.
    answers, gold
        What the model said and what it should have, in order.
    scores
        The task's score of each answer, 0 to 1.
    summary
        The data set's own numbers over a whole evaluation, where its authors define some.
    """

    accuracy: float
    n: int
    n_format_failures: int
    answers: tuple[str, ...] = field(repr=False)
    gold: tuple[str, ...] = field(repr=False)
    provenance: dict[str, Any] = field(repr=False, default_factory=dict)
    scores: tuple[float, ...] = field(repr=False, default=())
    summary: dict[str, float] = field(default_factory=dict)

    def __float__(self) -> float:
        return self.accuracy


def evaluate(vlm: HookedVLM, task: Task, *, n: int | None = None, seed: int = 0, split: Split = "judge") -> Evaluation:
    """Ask the model every question of a half, under whatever interventions are in force; scored as the task says.

    Parameters
    ----------
    n, seed, split
        Which examples. Scans rank on the other half.
    """
    n = task.count(split, n, seed)
    said: list[str] = []
    asked: list[Example] = []
    longest = task.max_new_tokens
    if longest is None:
        longest = max((len(vlm.to_tokens(c)[0]) for c in task.candidates), default=15) + 1
    todo = batches(vlm, task, split=split, n=n, seed=seed, answers=False)
    for batch in track(todo, total=-(-n // task.batch), what=f"answers to {task.name}"):
        said += vlm.generate(batch.prompt, max_new_tokens=longest).text
        asked += batch.examples
    scores = tuple(task.score(a, e) for a, e in zip(said, asked))
    wrong_form = sum(not task.well_formed(a, e) for a, e in zip(said, asked))
    gold = tuple(e.answer or "" for e in asked)
    options = {"n": n, "seed": seed, "split": split, "max_new_tokens": longest}
    provenance = {"model": vlm.identity(), "task": task.identity(), **options, "versions": versions()}
    return Evaluation(sum(scores) / n, n, wrong_form, tuple(said), gold, provenance, scores, task.summary(asked, said))
