"""The `mmlens` command: one short function per verb; heavy libraries are imported when a verb runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mmlens.errors import HeadError, MMLensError, OptionError

app = typer.Typer(
    name="mmlens",
    help="The insides of vision-language models, by name: score heads, cut them, publish the page.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Argument(help="Embedded name (toy-qwen3-vl), local folder, or hub id.")]
TaskName = Annotated[str, typer.Argument(help="Task name; `mmlens tasks` lists them.")]
Data = Annotated[str | None, typer.Option("--data", help="Folder of a data set, or hub:owner/name.")]
Options = Annotated[
    list[str] | None, typer.Option("--option", "-o", help="Of the task: name=value, such as n_objects=4 or subset=val.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON only, for other programs.")]
N = Annotated[int | None, typer.Option("--n", help="Examples; default the task's own number.")]
Seed = Annotated[int, typer.Option(help="Draws the examples.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; default the CPU.")]


def _load(model: str, device: str | None) -> Any:
    from transformers.utils import logging

    from mmlens import HookedVLM

    logging.disable_progress_bar()
    return HookedVLM.from_pretrained(model, device=device)


def _task(name: str, data: str | None, options: list[str] | None) -> Any:
    from mmlens.tasks import load_task

    chosen: dict[str, Any] = {}
    for text in options or []:
        key, sign, value = text.partition("=")
        if not sign:
            raise OptionError(f"--option {text}", expected="name=value", fix="--option n_objects=4")
        if key in ("name", "path"):
            raise OptionError(
                f"--option {text}", expected="an option of the task", fix="the task's name and --data say this"
            )
        try:
            chosen[key] = json.loads(value)
        except ValueError:
            chosen[key] = value
    return load_task(name, data, **chosen)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1, sort_keys=True))


def _table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(markup=False, emoji=False).print(table)  # a file may be called [/b]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for index.html and results.json.")] = Path("demo"),
    model: Annotated[str, typer.Option(help="Embedded name, local folder, or hub id.")] = "toy-qwen3-vl",
    task: Annotated[str, typer.Option(help="Task name.")] = "scenes/image",
    data: Data = None,
    option: Options = None,
    seed: Seed = 0,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """The whole story on one model: score every head, cut the best, write the page."""
    from rich.console import Console

    from mmlens.studies.core_heads import Protocol, core_heads, tell
    from mmlens.viz.page import write_page

    console = Console(stderr=True, quiet=as_json)
    with console.status("loading") as status:
        source = _task(task, data, option)
        vlm = _load(model, device)
        result = core_heads(vlm, source, protocol=Protocol(seed=seed), progress=lambda text: status.update(text))
        status.update("writing the page")
        more = "".join(f" -o {text}" for text in option or []) + ("" if data is None else f" --data {data}")
        command = f"mmlens demo --model {model} --task {task}{more} --seed {seed}"
        page = write_page(result, tell(vlm, source, result), out / "index.html", command=command)
    body = result.results()
    (out / "results.json").write_text(json.dumps(body, indent=1, sort_keys=True))
    if as_json:
        _print_json(body)
        return
    k = body["k"]
    rows = [["none", f"{body['accuracy']:.3f}", f"{body['accuracy']:.3f}"]]
    for kind in ("top", "layer_matched", "random", "bottom", "top_question"):
        values = [body[mode][kind] for mode in ("visual_mask", "output_zero")]
        rows.append([kind, *(" ".join(f"{x:.2f}" for x in v) if isinstance(v, list) else f"{v:.3f}" for v in values)])
    _table(f"accuracy after cutting {k} of {body['n_heads']} heads", ["heads", "visual_mask", "output_zero"], rows)
    print(f"page: {page}\nresults: {out / 'results.json'}")


@app.command()
def models(as_json: Json = False) -> None:
    """What ships with mmlens: models, families, tasks."""
    from mmlens.families import FAMILIES
    from mmlens.model.loading import embedded_models
    from mmlens.tasks import DATA_SETS, TASKS

    found: dict[str, Any] = {
        "embedded": sorted(embedded_models()),
        "families": {f.name: list(f.architectures) for f in FAMILIES},
        "tasks": sorted([*TASKS, *DATA_SETS]),
    }
    if as_json:
        _print_json(found)
        return
    rows = [["embedded model", name, ""] for name in found["embedded"]]
    rows += [["family", name, ", ".join(classes)] for name, classes in found["families"].items()]
    rows += [["task", name, ""] for name in found["tasks"]]
    _table("what ships with mmlens", ["kind", "name", "classes"], rows)


def _numbers(option: str, text: str, n: int) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if len(found) != n:
        raise OptionError(
            f"{option} {text!r}",
            expected=f"{n} numbers joined by commas",
            fix=f"{option} " + ",".join(["10", "20", "64", "32"][:n]),
        )
    return found


@app.command()
def locate(
    model: Model,
    image: Annotated[Path, typer.Argument(help="A picture, or a video file.")],
    box: Annotated[list[str], typer.Option(help="x0,y0,x1,y1; several are joined.")],
    units: Annotated[str, typer.Option(help="pixels, fraction (0..1), thousandths (0..1000) or points.")] = "pixels",
    page_size: Annotated[str | None, typer.Option(help="width,height in points, with --units points.")] = None,
    coverage: Annotated[float, typer.Option(help="Least fraction of a token that must lie in the box.")] = 0.0,
    views: Annotated[str, typer.Option(help="all, tiles or thumbnail.")] = "all",
    seconds: Annotated[str | None, typer.Option(help="Of a video: from,to.")] = None,
    fps: Annotated[float | None, typer.Option(help="Of a video: frames a second that are shown.")] = None,
    max_frames: Annotated[int | None, typer.Option(help="Of a video: frames at most.")] = None,
    question: Annotated[str | None, typer.Option(help="The words around the picture; they shift positions.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also draw the tokens over the picture: .html or .png.")] = None,
    as_json: Json = False,
) -> None:
    """Which tokens of a prompt lie under a box; reads the model's config and processor, not its weights."""
    from mmlens.evidence.regions import Box, Tube
    from mmlens.model.video import is_video
    from mmlens.model.weightless import weightless_prompt
    from mmlens.viz.overlay import overlay

    page = None if page_size is None else _numbers("--page-size", page_size, 2)
    regions: list[Any] = [
        Box.from_xyxy(*_numbers("--box", text, 4), units=units, page_size=page)  # type: ignore[arg-type]
        for text in box
    ]
    clip = is_video(image)
    if seconds is not None:
        start, end = _numbers("--seconds", seconds, 2)
        regions = [Tube.from_seconds({start: region, end: region}) for region in regions]
    shown: dict[str, Any] = {"videos": [image], "fps": fps, "max_frames": max_frames} if clip else {"images": [image]}
    if not clip and (seconds, fps, max_frames) != (None, None, None):
        raise OptionError(
            f"--seconds {seconds} --fps {fps} --max-frames {max_frames} for the picture {image}",
            expected="a video file with them",
            fix="leave them out",
        )
    # The embedded model knows few words; the picture's tokens are the same whatever is asked.
    asked = question if question is not None else "what is the color ?" if model.startswith("toy-") else "What is this?"
    prompt = weightless_prompt(model, asked, **shown)
    where = prompt.locate(regions, coverage=coverage, views=views)
    if out is not None:
        overlay(prompt, regions, coverage=coverage, views=views).save(out)
    if as_json:
        body = {
            "positions": list(where.positions),
            "coverage": list(where.coverage),
            "by_view": {name: list(tokens.positions) for name, tokens in where.by_view.items()},
            "reason": where.reason,
            "image_tokens": len(prompt.items[0].columns),
            "size": list(prompt.items[0].size or ()),
        }
        _print_json(body if out is None else {**body, "drawing": str(out)})
        return
    rows = [
        [name, str(len(tokens)), f"{sum(tokens.coverage):.2f}", _ranges(tokens.positions)]
        for name, tokens in where.by_view.items()
    ]
    title = f"{len(where)} of {len(prompt.items[0].columns)} picture tokens" + (
        f": {where.reason}" if where.reason else ""
    )
    _table(title, ["view", "tokens", "cells covered", "positions"], rows)
    if out is not None:
        print(f"drawing: {out}")


def _ranges(positions: tuple[int, ...]) -> str:
    """Columns with runs written as 4-9."""
    runs: list[list[int]] = []
    for p in positions:
        if runs and p == runs[-1][1] + 1:
            runs[-1][1] = p
        else:
            runs.append([p, p])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@app.command()
def tasks(
    action: Annotated[str | None, typer.Argument(help="Nothing to list them; `check` to read a data set.")] = None,
    name: Annotated[str | None, typer.Argument(help="Of check: the reader's name.")] = None,
    path: Annotated[
        str | None, typer.Argument(help="Of check: the data set's folder or file, or hub:owner/name.")
    ] = None,
    option: Options = None,
    show: Annotated[int, typer.Option(help="Of check: faulty records to list.")] = 20,
    as_json: Json = False,
) -> None:
    """List the tasks; or `tasks check NAME PATH`: read every record, and exit with 1 if none is usable."""
    if action is None:
        _list_tasks(as_json)
        return
    if action != "check" or name is None or path is None:
        raise OptionError(
            " ".join(filter(None, ("mmlens tasks", action, name, path))),
            expected="`mmlens tasks`, or `mmlens tasks check NAME PATH`",
            fix="mmlens tasks check refcocog data/refcocog",
        )
    from mmlens.tasks import task_class

    task_class(name)
    task = _task(name, path, option)
    found = task.check()
    if as_json:
        _print_json({"task": name, "subset": task.subset, "n_usable": found.n_usable, "faults": found.faults})
    else:
        rows = [[record, why] for record, why in list(found.faults.items())[:show]]
        _table(f"{found.n_usable} usable records, {len(found.faults)} faulty", ["record", "why"], rows)
        if len(found.faults) > len(rows):
            print(f"and {len(found.faults) - len(rows)} more; --json lists all")
    if not found.n_usable:
        raise typer.Exit(1)


def _list_tasks(as_json: bool) -> None:
    from mmlens.tasks import DATA_SETS, TASKS, task_class

    readers = {name: task_class(name) for name in DATA_SETS}
    sets = {name: {"subsets": list(reader.subsets), "layout": reader.layout} for name, reader in readers.items()}
    if as_json:
        _print_json({"drawn here": sorted(TASKS), "data sets": sets})
        return
    rows = [[name, "drawn here", ""] for name in sorted(TASKS)]
    rows += [[name, ", ".join(reader.subsets), reader.layout] for name, reader in readers.items()]
    _table("tasks", ["name", "subsets", "files"], rows)


@app.command()
def hooks(
    model: Model,
    match: Annotated[str, typer.Option(help="Glob or short name: 'blocks.0.*', 'pattern', 'vision.z'.")] = "*",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Every hook of a model by name, in order of execution."""
    vlm = _load(model, device)
    sites = [vlm.sites.get(name) for name in vlm.hook_names(match)]
    facts = [
        {"name": s.name, "axes": list(s.axes), "writable": s.writable, "used": s.used, "needs_picture": s.picture_only}
        for s in sites
    ]
    if as_json:
        _print_json(facts)
        return
    rows = [
        [f["name"], " ".join(f["axes"]), ("" if f["writable"] else "read only") + ("" if f["used"] else "unused")]
        for f in facts
    ]
    _table(f"{len(facts)} hooks of {model}", ["name", "axes", ""], rows)


@app.command()
def scan(
    model: Model,
    task: TaskName = "scenes/image",
    metric: Annotated[
        str, typer.Option(help="One, or several joined by commas: ram,density_lift,concentration. See docs/metrics.md.")
    ] = "ram",
    query: Annotated[
        str, typer.Option(help="Token group that asks: question, subject, last, output, ...")
    ] = "question",
    data: Data = None,
    option: Options = None,
    n: N = None,
    seed: Seed = 0,
    split: Annotated[str, typer.Option(help="rank or judge.")] = "rank",
    out: Annotated[
        Path | None, typer.Option(help="Run directory; the same call goes on after an interruption.")
    ] = None,
    top: Annotated[int, typer.Option(help="Heads to print.")] = 10,
    plot: Annotated[Path | None, typer.Option(help="Also write the head map as HTML.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Score every head of a model over a task."""
    vlm, source = _load(model, device), _task(task, data, option)
    options: dict[str, Any] = {"query": query, "n": n, "seed": seed, "split": split, "out": out}
    names = metric.split(",")
    if len(names) == 1:
        found = {metric: vlm.scan(source, metric=metric, **options)}
    else:
        found = vlm.scan_many(source, metrics=names, **options)
    if plot is not None:
        for name, scores in found.items():
            scores.plot().save(plot if len(names) == 1 else plot.with_name(f"{plot.stem}-{name}{plot.suffix}"))
    if as_json:
        told = {name: _scores_json(scores, top) for name, scores in found.items()}
        _print_json(told[metric] if len(names) == 1 else told)
        return
    for name, scores in found.items():
        rows = [
            [str(r["rank"]), f"L{r['layer']} H{r['head']}", f"{r['score']:.4f}", f"{r['low']:.4f} to {r['high']:.4f}"]
            for r in _scores_json(scores, top)["top"]
        ]
        title = f"{name} over {task}, query {query}: {scores.n_valid} of {len(scores.samples)} examples"
        _table(title, ["rank", "head", name, "95 % interval"], rows)


def _scores_json(scores: Any, top: int) -> dict[str, Any]:
    best = scores.to_pandas().dropna(subset=["rank"]).sort_values("rank").head(top)
    return {
        "n": len(scores.samples),
        "n_valid": scores.n_valid,
        "reasons": dict(scores.reasons),
        "top": [
            {k: float(v) if k in ("score", "low", "high") else int(v) for k, v in r.items()} for _, r in best.iterrows()
        ],
        "provenance": dict(scores.provenance),
    }


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of scans of one model (or of models of one size).")],
    k: Annotated[int, typer.Option(help="Best heads whose overlap is told.")] = 10,
    as_json: Json = False,
) -> None:
    """Do scans agree on which heads matter: rank correlation, overlap of the best k, heads among the best of all."""
    from mmlens.metrics import spearman, topk_overlap, universal_heads
    from mmlens.scores import HeadScores

    if len(runs) < 2:
        raise OptionError(f"{len(runs)} run", expected="at least two", fix="mmlens compare runs/ram runs/lift")
    scores = [HeadScores.load(run).values for run in runs]
    pairs: list[dict[str, Any]] = [
        {
            "a": str(runs[i]),
            "b": str(runs[j]),
            "spearman": spearman(scores[i], scores[j]),
            "overlap": topk_overlap(scores[i], scores[j], k),
        }
        for i in range(len(runs))
        for j in range(i + 1, len(runs))
    ]
    shared = universal_heads(scores)
    heads = [list(divmod(h, scores[0].shape[1])) for h in shared.heads(k)]
    if as_json:
        chance = float(shared.chance[k])
        _print_json({"k": k, "pairs": pairs, "universal": heads, "universal_chance": chance})
        return
    rows = [[p["a"], p["b"], f"{p['spearman']:.3f}", f"{p['overlap']:.2f}"] for p in pairs]
    _table(f"agreement of {len(runs)} scans", ["run", "with", "Spearman", f"top-{k} overlap"], rows)
    named = " ".join(f"L{a}H{b}" for a, b in heads) or "none"
    print(f"among the best {k} of every run: {named} ({shared.chance[k]:.2f} expected by chance)")


@app.command()
def layers(
    model: Model,
    task: TaskName = "scenes/image",
    metric: Annotated[str, typer.Option(help="Of rid, complexity, support, mixig, erank, tme; joined by commas.")] = (
        "rid,mixig"
    ),
    tokens: Annotated[str, typer.Option(help="Token group that makes the states: all, image, question, ...")] = "all",
    reference: Annotated[str, typer.Option(help="module or block_input.")] = "module",
    norm: Annotated[bool, typer.Option(help="Normalise every token's state first.")] = False,
    alpha: Annotated[
        float, typer.Option(help="Sharpness of TME and MixIG: 1 as written, 8 as in the paper's code.")
    ] = 1.0,
    data: Data = None,
    option: Options = None,
    n: N = None,
    seed: Seed = 0,
    split: Annotated[str, typer.Option(help="rank or judge.")] = "rank",
    out: Annotated[Path | None, typer.Option(help="Folder to save the profile in.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also write each metric's lines as HTML: layers-rid.html, ...")
    ] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """What attention and MLP do to the residual stream, layer by layer: new directions, mixing of tokens."""
    vlm, source = _load(model, device), _task(task, data, option)
    names = metric.split(",")
    profile = vlm.layer_profile(
        source,
        metrics=names,
        tokens=tokens,
        reference=reference,
        norm=norm,
        alpha=alpha,
        n=n,
        seed=seed,
        split=split,
    )
    if out is not None:
        profile.save(out)
    if plot is not None:
        for name in names:
            profile.plot(name).save(plot.with_name(f"{plot.stem}-{name}{plot.suffix}"))
    if as_json:
        told = {
            "n_valid": profile.n_valid,
            "reasons": dict(profile.reasons),
            "modules": list(profile.modules),
            "mean": {name: profile.values(name).tolist() for name in names},
            "provenance": dict(profile.provenance),
        }
        _print_json(told)
        return
    for name in names:
        mean, (low, high) = profile.values(name), profile.interval(name)
        rows = [
            [
                str(layer),
                *(f"{mean[m, layer]:.4f} ({low[m, layer]:.4f} to {high[m, layer]:.4f})" for m in range(len(mean))),
            ]
            for layer in range(mean.shape[1])
        ]
        _table(f"{name} over {tokens} tokens of {task}, {profile.n_valid} examples", ["layer", *profile.modules], rows)


@app.command()
def verify(model: Model, device: Device = None, as_json: Json = False) -> None:
    """Check a model against itself, hook by hook; exit code 1 on a fault."""
    report = _load(model, device).verify()
    if as_json:
        checks = [{"name": c.name, "ok": c.ok, "told": c.told} for c in report.checks]
        _print_json({"model": report.model, "ok": report.ok, "checks": checks})
    else:
        _table(report.model, ["check", "", ""], [[c.name, "ok" if c.ok else "FAIL", c.told] for c in report.checks])
    if not report.ok:
        raise typer.Exit(1)


def _parse_heads(text: str) -> list[tuple[int, int]]:
    try:
        pairs = [tuple(int(x) for x in part.split(".")) for part in text.split(",")]
        return [(layer, head) for layer, head in pairs]
    except ValueError:
        raise HeadError(
            f"--heads {text!r}", expected="layer.head pairs joined by commas", fix="for example --heads 3.0,3.5,7.11"
        ) from None


@app.command()
def ablate(
    model: Model,
    task: TaskName = "scenes/image",
    heads: Annotated[str | None, typer.Option(help="layer.head pairs: 3.0,3.5")] = None,
    scores: Annotated[Path | None, typer.Option(help="Folder of a scan; its best heads are cut.")] = None,
    k: Annotated[int | None, typer.Option(help="With --scores: how many.")] = None,
    fraction: Annotated[float | None, typer.Option(help="With --scores: which share of all heads.")] = None,
    mode: Annotated[str, typer.Option(help="output_zero or visual_mask.")] = "output_zero",
    draws: Annotated[int, typer.Option(help="Layer-matched and random draws for comparison, with seeds 0, 1, ...")] = 5,
    data: Data = None,
    option: Options = None,
    n: N = None,
    seed: Seed = 0,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Cut heads and count the answers again, beside matched controls."""
    from mmlens.scores import HeadScores, HeadSet

    if heads is not None and (k is not None or fraction is not None):
        raise OptionError(
            f"--heads {heads} with --k {k} and --fraction {fraction}",
            expected="--k and --fraction with --scores only",
            fix="drop them: the heads you name are cut",
        )
    if (heads is None) == (scores is None):
        raise OptionError(
            f"--heads {heads} with --scores {scores}",
            expected="exactly one of them",
            fix="name heads, or a scan's folder",
        )
    vlm, source = _load(model, device), _task(task, data, option)
    if heads is not None:
        chosen = HeadSet.of(_parse_heads(heads), n_layers=vlm.n_layers, n_heads=vlm.n_heads)
    elif scores is not None:
        share = 0.05 if k is None and fraction is None else fraction
        chosen = HeadScores.load(scores).top(k=k, fraction=share)

    def judge(cut: HeadSet) -> float:
        with vlm.ablate(cut, mode=mode):
            return source.evaluate(vlm, n=n, seed=seed).accuracy

    body: dict[str, Any] = {
        "mode": mode,
        "heads": [list(h) for h in chosen],
        "accuracy": source.evaluate(vlm, n=n, seed=seed).accuracy,
        "cut": judge(chosen),
        "layer_matched": [judge(chosen.layer_matched(seed=s)) for s in range(draws)],
        "random": [judge(chosen.random(seed=s)) for s in range(draws)],
    }
    if as_json:
        _print_json(body)
        return
    rows = [["none", f"{body['accuracy']:.3f}"], ["these", f"{body['cut']:.3f}"]]
    rows += [[kind, " ".join(f"{a:.3f}" for a in body[kind])] for kind in ("layer_matched", "random")]
    _table(f"accuracy on {task} after {mode} of {len(chosen)} heads", ["heads cut", "accuracy"], rows)


def main() -> None:
    """Entry point: our errors become a message and exit code 2, never a traceback."""
    try:
        app()
    except MMLensError as error:
        if "--json" in sys.argv:
            _print_json(
                {"error": type(error).__name__, "given": error.given, "expected": error.expected, "fix": error.fix}
            )
        else:
            from rich.console import Console

            Console(stderr=True).print(f"{type(error).__name__}: {error}", style="red", markup=False, highlight=False)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted; the same call goes on where it stopped (with --out)", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
