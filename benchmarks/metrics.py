"""What the fast forms save: RID and the RID + MixIG profile against the direct form, and a scan of ten metrics.

The direct form takes two whole singular value decompositions and two TMEs a module, float64. One thread, interleaved.
The profile is over the states of an 8-layer chain (attention and MLP of each layer), shared states decomposed once.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import itertools

import common
import torch

from mmlens import HookedVLM, load_task
from mmlens.metrics.mixing import tme
from mmlens.metrics.residual import Spectrum, cut_of
from mmlens.scan import METRICS

LAYERS = 8


def chain(tokens: int, features: int, n: int) -> list[torch.Tensor]:
    """A stream of states, each the last plus a small update."""
    generator = torch.Generator().manual_seed(tokens)
    draw = lambda: torch.randn(tokens, features, dtype=torch.float64, generator=generator)
    states = [draw()]
    for _ in range(n):
        states.append(states[-1] + 0.1 * draw())
    return states


def direct_rid(x: torch.Tensor, y: torch.Tensor) -> float:
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    after = torch.linalg.svd(y, full_matrices=False)[1]
    kept = s > max(x.shape) * torch.finfo(torch.float64).eps * s[0]
    u, vh = u[:, kept], vh[kept]
    ranks = []
    for values in (s, after):
        p = values / values.sum()
        ranks.append(torch.exp(-torch.special.xlogy(p, p).sum()))
    new = (y - u @ (u.T @ y)).norm() + (y - (y @ vh.T) @ vh).norm()
    return float((ranks[1] - ranks[0]).abs() / min(x.shape) + new / (2 * y.norm()))


def direct_tme(x: torch.Tensor) -> float:
    z = x / x.norm(dim=-1, keepdim=True)
    w = (z @ z.T + 1) / 2
    p = w / w.sum(-1, keepdim=True)
    return float(-(p * p.log()).sum(-1).mean())


def rid_alone(tokens: int, features: int, rounds: int) -> common.Row:
    states = chain(tokens, features, LAYERS)
    cut = cut_of(states[0], None)

    def ours():
        old, found = Spectrum.of(states[0]), []
        for state in states[1:]:
            new = Spectrum.of(state)
            found.append(float(old.to(new, cut).total))
            old = new
        return found

    def direct():
        return [direct_rid(a, b) for a, b in itertools.pairwise(states)]

    assert torch.allclose(torch.tensor(ours()), torch.tensor(direct()), rtol=1e-6)
    times = common.interleave({"ours": ours, "direct": direct}, rounds)
    shape = f"S={tokens} H={features}, {LAYERS} updates"
    return common.ratio(
        "RID: direct / ours", shape, times["direct"]["seconds"], times["ours"]["seconds"], must=3.5, better="higher"
    )


def profile(tokens: int, features: int, rounds: int, must: float) -> common.Row:
    states = chain(tokens, features, 2 * LAYERS)
    cut = cut_of(states[0], None)

    def ours():
        old, mixed, found = Spectrum.of(states[0]), float(tme(states[0])), []
        for state in states[1:]:
            new, now = Spectrum.of(state), float(tme(state))
            found.append((float(old.to(new, cut).total), now - mixed))
            old, mixed = new, now
        return found

    def direct():
        return [(direct_rid(a, b), direct_tme(b) - direct_tme(a)) for a, b in itertools.pairwise(states)]

    times = common.interleave({"ours": ours, "direct": direct}, rounds)
    shape = f"S={tokens} H={features}, {LAYERS} layers x 2 modules"
    return common.ratio(
        "RID + MixIG profile: direct / ours",
        shape,
        times["direct"]["seconds"],
        times["ours"]["seconds"],
        must=must,
        better="higher",
    )


def scans(rounds: int) -> common.Row:
    vlm, task = HookedVLM.from_pretrained("toy-qwen3-vl"), load_task("scenes/image")
    vlm.scan(task, n=50)  # encoded once
    cases = {
        "all": lambda: vlm.scan_many(task, metrics=list(METRICS), n=50),
        "ram": lambda: vlm.scan(task, metric="ram", n=50),
    }
    times = common.interleave(cases, rounds)
    return common.ratio(
        f"a scan of {len(METRICS)} metrics / of RAM alone",
        "toy-qwen3-vl, 50 examples, every question row",
        times["all"]["seconds"],
        times["ram"]["seconds"],
        must=1.3,
        better="lower",
    )


def main() -> None:
    chosen = common.options(__doc__)
    torch.set_num_threads(1)
    rounds = 3 if chosen.quick else 7
    rows = [rid_alone(600, 1024, rounds), rid_alone(2000, 512, rounds)]
    rows += [profile(600, 1024, rounds, 3.0), profile(2000, 512, rounds, 2.7)]
    rows.append(scans(2 * rounds))
    common.report(rows, chosen)


if __name__ == "__main__":
    main()
