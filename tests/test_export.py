"""Exported activations equal the cache's, at flat memory, and survive a kill."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from mmlens.errors import OptionError, RunFolderError
from mmlens.export import ActivationShards

NAMES = ["blocks.3.hook_resid_post", "blocks.1.attn.hook_z"]


@pytest.mark.parametrize("positions", [None, "subject", "image"])
def test_rows_equal_the_cache(toy, scenes, tmp_path, positions):
    shards = toy.activations(scenes, NAMES, out=tmp_path, positions=positions, n=60)
    assert len(shards) == 2 and shards.names == ["blocks.1.attn.hook_z", "blocks.3.hook_resid_post"]
    example, position = shards.load("example"), shards.load("position")
    for i in (0, 49, 50, 59):
        asked = scenes.example("rank", i, 0)
        prompt = toy.prompt(asked.question, images=list(asked.images), subject=asked.subject)
        _, cache = toy.run_with_cache(prompt, NAMES)
        columns = list(prompt.tokens(positions or "all").positions)
        mine = example == i
        assert position[mine].tolist() == columns
        for name in NAMES:
            assert torch.allclose(shards.load(name)[mine], cache[name][0, columns], atol=1e-5)
    assert shards.n_rows == len(example) == sum(len(b) for b in shards.minibatches(NAMES[0], size=100))


def test_shuffled_pieces_hold_every_row_once(toy, scenes, tmp_path):
    shards = toy.activations(scenes, NAMES[:1], out=tmp_path, positions="last", n=120)
    whole = shards.load(NAMES[0])
    a, b = (torch.cat(list(shards.minibatches(NAMES[0], size=7, seed=3))) for _ in range(2))
    assert torch.equal(a, b) and not torch.equal(a, whole)
    assert torch.equal(a.sum(1).sort().values, whole.sum(1).sort().values)
    assert not torch.equal(a, torch.cat(list(shards.minibatches(NAMES[0], size=7, seed=4))))


def test_an_unfinished_export_is_resumed_to_the_same_rows(toy, scenes, tmp_path):
    whole = toy.activations(scenes, NAMES[:1], out=tmp_path / "whole", n=120)
    part = tmp_path / "part"
    toy.activations(scenes, NAMES[:1], out=part, n=120)
    (part / "index.json").unlink()
    (part / "shards" / "000001.safetensors").write_bytes(b"cut off")
    (part / "shards" / "000002.safetensors").unlink()
    with pytest.raises(RunFolderError, match="no finished export"):
        ActivationShards(part)
    again = toy.activations(scenes, NAMES[:1], out=part, n=120)
    assert torch.equal(again.load(NAMES[0]), whole.load(NAMES[0]))
    with pytest.raises(RunFolderError, match="another run"):
        toy.activations(scenes, NAMES[:1], out=part, n=110)


def test_killed_and_started_again_nothing_is_lost(toy, scenes, tmp_path):
    code = (
        "from mmlens import HookedVLM, load_task\n"
        "vlm = HookedVLM.from_pretrained('toy-qwen3-vl')\n"
        f"vlm.activations(load_task('scenes/image'), {NAMES[:1]!r}, out={str(tmp_path)!r}, n=1000)\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    child = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while len(list((tmp_path / "shards").glob("*.safetensors"))) < 2 and time.time() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    finished = {p: p.stat().st_mtime_ns for p in (tmp_path / "shards").glob("0*.safetensors")}
    assert 2 <= len(finished) < 20
    shards = toy.activations(scenes, NAMES[:1], out=tmp_path, n=1000)
    assert len(shards) == 20 and len(set(shards.load("example").tolist())) == 1000
    assert all(p.stat().st_mtime_ns == t for p, t in finished.items())


def _alive():
    """Resident bytes without what glibc keeps of freed blocks, which goes up and down by tens of MiB."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return psutil.Process().memory_info().rss


@pytest.mark.slow
def test_two_thousand_examples_at_flat_memory(toy, scenes, tmp_path):
    memory = []

    class Watched(type(scenes)):
        def example(self, split, index, seed):
            if index % 50 == 0:
                memory.append(_alive())
            return super().example(split, index, seed)

    watched = Watched.__new__(Watched)
    watched.__dict__ = dict(scenes.__dict__)
    shards = toy.activations(watched, NAMES[:1], out=tmp_path, positions="subject", n=2000)
    assert len(shards) == 40 and len(memory) >= 40
    assert max(memory[20:]) - max(memory[5:20]) < 10 * 2**20


@pytest.mark.parametrize("names", ["pattern", "vision.resid_post", []])
def test_what_has_no_rows_is_refused(toy, scenes, tmp_path, names):
    with pytest.raises(OptionError, match="to export"):
        toy.activations(scenes, names, out=tmp_path, n=4)


def test_wrong_options_are_named(toy, scenes, tmp_path):
    shards = toy.activations(scenes, NAMES[:1], out=tmp_path, n=4)
    with pytest.raises(OptionError, match="size=0"):
        list(shards.minibatches(NAMES[0], size=0))
    with pytest.raises(OptionError, match="resid_post"):
        shards.load("blocks.0.hook_resid_post")
