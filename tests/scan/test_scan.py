"""The one loop: right values, only the rows it needs, and a run directory that survives kill -9."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch

from mmlens import Example, HeadScores, PerExample, Task, load_task
from mmlens.errors import OptionError, RunFolderError, TokenGroupError, UnknownTaskError
from mmlens.metrics import lift, ram


@pytest.mark.parametrize("query", ["question", "subject", "last", "output", "question+suffix"])
@pytest.mark.parametrize("metric", ["ram", "lift"])
def test_scores_equal_whole_patterns_read_one_by_one(toy, scenes, query, metric):
    scores = toy.scan(scenes, metric=metric, query=query, n=6)
    for i, example in enumerate(scenes.examples("rank", 6, 0)):
        prompt = toy.prompt(
            example.question,
            images=list(example.images),
            subject=example.subject,
            answer=example.answer,
            evidence=list(example.evidence),
        )
        _, cache = toy.run_with_cache(prompt, "pattern")
        rows, evidence = list(prompt.tokens(query).positions), list(prompt.tokens("evidence").positions)
        function = {"ram": ram, "lift": lift}[metric]
        for layer in range(toy.n_layers):
            want = function(cache["pattern", layer][0], rows, evidence)
            assert np.allclose(scores.samples[i, layer], want, atol=1e-4), (i, layer)


def test_only_the_rows_asked_for_are_built(toy, scenes):
    toy.scan(scenes, query="subject", n=50)  # encoded
    with oracle.Operations() as seen:
        toy.scan(scenes, query="subject", n=50)
    pictures = 50 * 256 * 384  # pixel_values, the largest thing that a forward holds anyway
    assert seen.largest == pictures < 50 * 12 * 104 * 104


def test_options_change_the_scores(toy, scenes):
    base = toy.scan(scenes, query="subject", n=8)
    for other in (
        toy.scan(scenes, query="question", n=8),
        toy.scan(scenes, query="subject", n=9),
        toy.scan(scenes, query="subject", n=8, seed=1),
        toy.scan(scenes, query="subject", n=8, split="judge"),
        toy.scan(scenes, query="subject", n=8, metric="lift"),
    ):
        assert other != base and not np.array_equal(other.values, base.values)
    assert toy.scan(scenes, query="subject", n=8) == base


def test_provenance_tells_everything_that_decides(toy, scenes):
    found = toy.scan(scenes, query="subject", n=4, seed=3).provenance
    assert found["model"]["name"] == "toy-qwen3-vl" and len(found["model"]["fingerprint"]) == 16
    assert found["task"] == {"name": "scenes/image", "n_objects": 6}
    assert (found["metric"], found["query"], found["n"], found["seed"], found["split"]) == (
        "ram",
        "subject",
        4,
        3,
        "rank",
    )
    assert {"mmlens", "torch", "transformers", "nnsight"} <= set(found["versions"])


class Odd(Task):
    """Examples with no sound answer among sound ones."""

    name = "odd"
    candidates = ("red",)

    def __init__(self, scenes):
        self.scenes = scenes

    def example(self, split, index, seed):
        real = self.scenes.example(split, index, seed)
        if index == 1:
            return replace(real, id="none", evidence=())
        return real


def test_examples_without_evidence_are_nan_with_a_reason_and_counted(toy, scenes):
    scores = toy.scan(Odd(scenes), query="subject", n=4)
    assert scores.n_valid == 3 and np.isnan(scores.samples[1]).all() and not np.isnan(scores.values).any()
    assert scores.reasons == {"1": "the example has no evidence"}
    sound = toy.scan(scenes, query="subject", n=4)
    assert np.allclose(scores.samples[[0, 2, 3]], sound.samples[[0, 2, 3]], atol=1e-5)


def test_a_question_before_its_picture_is_nan_not_zero(wrapped):
    import tiny

    from mmlens import Box
    from mmlens.scan import Batch, _score_batch

    parts = [{"type": "text", "text": "what color is the star?"}, {"type": "image"}]
    prompt = wrapped.prompt(
        [{"role": "user", "content": parts}], images=[tiny.picture(28, 28)], evidence=[Box.from_xyxy(0, 0, 28, 28)]
    )
    example = Example("a", "what", ("red",), evidence=(Box.from_xyxy(0, 0, 28, 28),))
    values, reasons = _score_batch(wrapped, Batch(0, (example,), prompt), ("ram",), "question")
    assert np.isnan(values).all() and reasons == {"0/ram": "every query token stands before the evidence"}


def test_a_query_that_means_nothing_raises(toy, scenes):
    with pytest.raises(TokenGroupError):
        toy.scan(scenes, query="frame:1", n=2)


@pytest.mark.parametrize(
    "options",
    [dict(metric="rams"), dict(split="both"), dict(n=0), dict(n=-3), dict(n=2.5), dict(seed=-1), dict(seed="a")],
)
def test_options_that_do_not_exist(toy, scenes, options, as_users, tmp_path):
    with pytest.raises(OptionError):
        toy.scan(scenes, **options, out=tmp_path / "a")
    with pytest.raises(OptionError, match="out="):
        toy.scan(scenes, out=3)
    assert not (tmp_path / "a").exists()
    with pytest.raises(TypeError):
        toy.scan(scenes, metrics="ram")


def test_a_name_is_no_task(toy, as_users):
    with pytest.raises(UnknownTaskError, match="load_task"):
        toy.scan("scenes/image")


class Mine(Task):
    """Tasks of one name over different sources."""

    name = "mine"

    def __init__(self, name):
        self.source = load_task(name)
        self.candidates = self.source.candidates

    def example(self, split, index, seed):
        return self.source.example(split, index, seed)


def test_tasks_of_one_name_do_not_share_pictures(toy):
    a, b = Mine("scenes/image").evaluate(toy, n=12), Mine("scenes/digits").evaluate(toy, n=12)
    assert a.gold == load_task("scenes/image").evaluate(toy, n=12).gold
    assert b.gold == load_task("scenes/digits").evaluate(toy, n=12).gold != a.gold


def test_only_so_many_bytes_stay_encoded(toy, monkeypatch):
    import mmlens.scan as module

    def held():
        return sum(b.n_bytes for _, ready in module._ENCODED[toy].values() for b in ready.values())

    monkeypatch.setattr(Task, "batch", 2)
    task = load_task("scenes/image", n_objects=3)
    module._ENCODED.pop(toy, None)  # other tests of this process share the model
    first = task.evaluate(toy, n=2)
    size = held()
    module._ENCODED.pop(toy)
    monkeypatch.setattr(module, "KEPT_BYTES", 2 * size)
    assert task.evaluate(toy, n=10).answers[:2] == first.answers
    assert held() == 2 * size > 0


def test_only_so_many_examples_stay_encoded(toy, monkeypatch):
    import mmlens.scan as module

    monkeypatch.setattr(module, "KEPT_EXAMPLES", 10)
    for seed in range(4):
        load_task("scenes/image").evaluate(toy, n=4, seed=seed)
    assert sum(key[2] for key in module._ENCODED[toy]) <= 10
    load_task("scenes/image").evaluate(toy, n=12)
    assert all(key[2] <= 10 for key in module._ENCODED[toy])


def test_a_query_for_each_example_follows_the_examples_over_batches(toy, scenes, monkeypatch):
    monkeypatch.setattr(Task, "batch", 2)
    columns = [[70], [71], [75], [76], [74]]
    scores = toy.scan(scenes, query=PerExample(columns), n=5)
    for i, column in enumerate(columns):
        want = toy.scan(scenes, query=PerExample([column] * 5), n=5).samples[i]
        assert np.array_equal(scores.samples[i], want)
    assert not np.allclose(scores.samples[2], toy.scan(scenes, query=70, n=5).samples[2])
    with pytest.raises(TokenGroupError, match="5 examples for a scan of 4"):
        toy.scan(scenes, query=PerExample(columns), n=4)


# ------------------------------------------------------------------ run directories
def test_a_scan_that_cannot_start_leaves_nothing_behind(toy, scenes, tmp_path):
    with pytest.raises(TokenGroupError):
        toy.scan(scenes, query="frame:1", n=2, out=tmp_path / "a")
    toy.scan(scenes, query="subject", n=2, out=tmp_path / "a")
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError):
        toy.scan(scenes, query="subject", n=2, out=tmp_path / "file")


def test_results_do_not_depend_on_where_the_model_lies(toy, scenes, tmp_path):
    import shutil
    from importlib import resources
    from pathlib import Path

    from mmlens import HookedVLM

    source = Path(str(resources.files("mmlens"))) / "toys" / "toy-qwen3-vl"
    for place in ("a", "b"):
        shutil.copytree(source, tmp_path / place / "model")
        with HookedVLM.from_pretrained(tmp_path / place / "model") as vlm:
            vlm.scan(scenes, query="subject", n=3, out=tmp_path / place / "run")
    for name in ("scores.json", "scores.safetensors"):
        text = (tmp_path / "a/run" / name).read_bytes()
        assert text == (tmp_path / "b/run" / name).read_bytes() and str(tmp_path).encode() not in text


def test_a_run_directory_holds_the_result_and_goes_on(toy, scenes, tmp_path, monkeypatch):
    monkeypatch.setattr(Task, "batch", 4)
    whole = toy.scan(scenes, query="subject", n=10, out=tmp_path / "a")
    assert HeadScores.load(tmp_path / "a") == whole
    assert [p.name for p in sorted((tmp_path / "a/shards").iterdir())] == [f"00000{i}.safetensors" for i in range(3)]
    (tmp_path / "a/shards/000001.safetensors").unlink()
    (tmp_path / "a/shards/000002.safetensors").write_bytes(b"cut off")
    kept = (tmp_path / "a/shards/000000.safetensors").stat().st_mtime_ns
    assert toy.scan(scenes, query="subject", n=10, out=tmp_path / "a") == whole
    assert (tmp_path / "a/shards/000000.safetensors").stat().st_mtime_ns == kept
    run = json.loads((tmp_path / "a/run.json").read_text())
    assert {"identity", "started", "host"} == set(run)
    for name in ("scores.json", "scores.safetensors"):
        text = (tmp_path / "a" / name).read_bytes()
        assert run["started"].encode() not in text and str(tmp_path).encode() not in text


def test_another_runs_directory_is_refused(toy, scenes, tmp_path):
    toy.scan(scenes, query="subject", n=3, out=tmp_path / "a")
    before = {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    for options in (dict(n=4), dict(seed=1), dict(query="last"), dict(metric="lift")):
        with pytest.raises(RunFolderError, match=next(iter(options))):
            toy.scan(scenes, **{"query": "subject", "n": 3, **options}, out=tmp_path / "a")
    with pytest.raises(RunFolderError, match="task"):
        toy.scan(load_task("scenes/digits"), query="subject", n=3, out=tmp_path / "a")
    assert {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()} == before


def test_a_folder_of_other_things_is_left_alone(toy, scenes, tmp_path):
    (tmp_path / "thesis.tex").write_text("do not touch")
    with pytest.raises(RunFolderError, match=r"run\.json"):
        toy.scan(scenes, n=2, out=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text("{")
    with pytest.raises(RunFolderError, match="cannot be read"):
        toy.scan(scenes, n=2, out=tmp_path / "run")


CHILD = """
import sys, torch
torch.set_num_threads(1)
from mmlens import HookedVLM, Task, load_task
Task.batch = 2
vlm = HookedVLM.from_pretrained("toy-qwen3-vl")
print("ready", flush=True)
vlm.scan(load_task("scenes/image"), query="subject", n=120, out=sys.argv[1])
print("done", flush=True)
"""


def _child(out):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CHILD, str(out)], stdout=subprocess.PIPE, env=environment
    )


def test_a_scan_killed_and_started_again_gives_the_same_bytes(tmp_path):
    broken = _child(tmp_path / "broken")
    assert broken.stdout.readline().strip() == b"ready"
    shards = tmp_path / "broken/shards"
    deadline = time.time() + 60
    while time.time() < deadline and (not shards.exists() or len(list(shards.glob("*.safetensors"))) < 5):
        time.sleep(0.005)
    broken.send_signal(signal.SIGKILL)
    broken.wait()
    done = len(list(shards.glob("*.safetensors")))
    assert 5 <= done < 60 and not (tmp_path / "broken/scores.json").exists()
    children = [_child(tmp_path / "broken"), _child(tmp_path / "whole")]
    for child in children:
        assert child.communicate(timeout=120)[0].strip().endswith(b"done")
    broken.stdout.close()
    for name in ("scores.json", "scores.safetensors"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


# ------------------------------------------------------------------ judging
def test_evaluation_counts_exact_matches_and_format_failures(toy, scenes):
    result = scenes.evaluate(toy, n=20)
    assert result.n == 20 and float(result) == result.accuracy
    assert result.accuracy == np.mean([a == b for a, b in zip(result.answers, result.gold)])
    assert result.gold == tuple(e.answer for e in scenes.examples("judge", 20, 0))

    def babble(logits, hook):
        logits[..., toy.to_single_token("what")] = 1e4

    with toy.hooks([("hook_logits", babble)]):
        wrong = scenes.evaluate(toy, n=20)
    assert wrong.accuracy == 0 and wrong.n_format_failures == 20 and wrong.answers[0] == "what what"


def test_evaluation_follows_interventions_and_forgets_them(toy, scenes):
    whole = scenes.evaluate(toy, n=30)
    with toy.ablate([(layer, head) for layer in range(8) for head in range(12)]):
        nothing = scenes.evaluate(toy, n=30)
    assert nothing.accuracy < 0.6 < whole.accuracy
    assert scenes.evaluate(toy, n=30) == whole


def test_ready_batches_do_not_outlive_the_model(scenes):
    import gc
    import weakref

    from mmlens import HookedVLM

    vlm = HookedVLM.from_pretrained("toy-qwen3-vl")
    scenes.evaluate(vlm, n=2)
    dead = weakref.ref(vlm)
    vlm.close()
    del vlm
    gc.collect()
    assert dead() is None


def test_left_padding_does_not_change_scores(toy, scenes):
    """One example alone and in a batch."""
    few, many = toy.scan(scenes, query="question", n=1), toy.scan(scenes, query="question", n=12)
    assert np.allclose(few.samples[0], many.samples[0], atol=1e-5)


def test_a_full_disk_is_named_and_loses_nothing(toy, scenes, tmp_path, monkeypatch):
    real, calls = os.replace, []

    def failing(a, b):
        calls.append(b)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        real(a, b)

    monkeypatch.setattr(Task, "batch", 2)
    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(RunFolderError, match="No space"):
        toy.scan(scenes, query="subject", n=10, out=tmp_path / "a")
    monkeypatch.setattr(os, "replace", real)
    kept = sorted(p.name for p in (tmp_path / "a/shards").glob("*.safetensors"))
    assert kept == ["000000.safetensors", "000001.safetensors"]
    again = toy.scan(scenes, query="subject", n=10, out=tmp_path / "a")
    assert again == toy.scan(scenes, query="subject", n=10)


def test_values_are_finite_and_shares(toy, scenes):
    scores = toy.scan(scenes, query="subject", n=10)
    assert scores.samples.shape == (10, 8, 12) and scores.samples.dtype == np.float32
    assert (scores.values >= 0).all() and (scores.values <= 1).all()
    assert torch.isfinite(torch.from_numpy(scores.samples)).all()


# ---------------------------------------------------------------------- several metrics in one pass
def test_many_metrics_are_each_as_alone(toy, scenes):
    from mmlens.scan import METRICS

    found = toy.scan_many(scenes, metrics=list(METRICS), query="subject", n=6)
    assert list(found) == list(METRICS)
    for metric, scores in found.items():
        alone = toy.scan(scenes, metric=metric, query="subject", n=6)
        assert np.array_equal(scores.samples, alone.samples, equal_nan=True)
        assert scores.provenance == alone.provenance and scores.n_valid == 6
    assert len({s.values.tobytes() for s in found.values()}) == len(METRICS)


def test_many_metrics_run_the_model_once(toy, scenes, monkeypatch):
    calls = []
    real = type(toy).reduce
    monkeypatch.setattr(type(toy), "reduce", lambda self, *a, **k: calls.append(1) or real(self, *a, **k))
    toy.scan_many(scenes, metrics=["ram", "lift", "density_lift", "concentration"], n=4)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "metric", ["visual_share", "density_lift", "attention_sum", "contrast", "pointing", "concentration"]
)
def test_scanned_metrics_equal_patterns_read_one_by_one(toy, scenes, metric):
    from mmlens import metrics as zoo

    scores = toy.scan(scenes, metric=metric, query="subject", n=3)
    for i, example in enumerate(scenes.examples("rank", 3, 0)):
        prompt = toy.prompt(
            example.question,
            images=list(example.images),
            subject=example.subject,
            evidence=list(example.evidence),
            distractors=list(example.distractors),
        )
        _, cache = toy.run_with_cache(prompt, "pattern", rows="subject")
        e, v, d = (list(prompt.tokens(g).positions) for g in ("evidence", "image", "distractor"))
        for layer in range(toy.n_layers):
            p = cache["pattern", layer][0].double()
            mean = p.mean(1)
            true, other = mean[:, e].sum(1) / len(e), mean[:, d].sum(1) / len(d)
            mine = {
                "visual_share": (p[:, :, e].sum(-1) / p[:, :, v].sum(-1)).mean(1),
                "density_lift": (p[:, :, e].sum(-1) / p[:, :, v].sum(-1)).mean(1) * len(v) / len(e),
                "attention_sum": p[:, :, v].sum(-1).mean(1),
                "contrast": (true / (true + other)).log(),
                "pointing": torch.tensor([float(v[int(m[v].argmax())] in e) for m in mean]),
                "concentration": zoo.concentration(mean[:, v]),
            }[metric]
            assert np.allclose(scores.samples[i, layer], mine.numpy(), atol=1e-4), (i, layer)


def test_a_metric_asks_only_for_what_it_needs(toy, scenes):
    found = toy.scan_many(Odd(scenes), metrics=["ram", "attention_sum"], query="subject", n=4)
    assert found["ram"].n_valid == 3 and found["ram"].reasons == {"1": "the example has no evidence"}
    assert found["attention_sum"].n_valid == 4 and not found["attention_sum"].reasons


def test_many_metrics_are_saved_each_in_its_folder_and_resumed(toy, scenes, tmp_path, monkeypatch):
    monkeypatch.setattr(Task, "batch", 2)
    first = toy.scan_many(scenes, metrics=["ram", "lift"], n=6, out=tmp_path / "run")
    assert HeadScores.load(tmp_path / "run/lift") == first["lift"]
    (tmp_path / "run/shards/000001.safetensors").unlink()
    again = toy.scan_many(scenes, metrics=["ram", "lift"], n=6, out=tmp_path / "run")
    assert again["ram"] == first["ram"] and again["lift"] == first["lift"]
    with pytest.raises(RunFolderError, match="metrics"):
        toy.scan_many(scenes, metrics=["lift", "ram"], n=6, out=tmp_path / "run")


@pytest.mark.parametrize("metrics", ["ram", [], ["ram", "ram"], ["ram", "mass"]])
def test_metrics_that_do_not_exist_are_refused(as_users, toy, scenes, metrics):
    with pytest.raises(OptionError):
        toy.scan_many(scenes, metrics=metrics, n=2)
