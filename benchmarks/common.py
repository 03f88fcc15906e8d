"""Paired measurements: interleaved runs, CPU time, medians with spread, a table and JSON."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch


@dataclass
class Row:
    """One result. For unit "x" `ratio` is a quotient; for "MiB" it is the value itself."""

    name: str
    shape: str
    ratio: float
    low: float
    high: float
    must: float | None
    better: str  # "lower" | "higher"
    unit: str = "x"

    @property
    def held(self) -> bool | None:
        if self.must is None:
            return None
        return self.ratio <= self.must if self.better == "lower" else self.ratio >= self.must


def steady_malloc() -> None:
    """Give freed tensors back to the system at once, so that resident memory is what is alive (glibc only).

    By default glibc moves its mmap threshold up as it goes and keeps freed blocks, and growth then tells the history of
    the process more than the run.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD


class PeakMemory:
    """Peak resident memory of this process while the block runs, sampled every 5 ms (MiB)."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self._process, self._stop = psutil.Process(), threading.Event()
        self.before = self.peak = self._process.memory_info().rss / 2**20
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, self._process.memory_info().rss / 2**20)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def growth(self) -> float:
        return self.peak - self.before


def interleave(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """CPU seconds and memory growth of every case, one after another, `rounds` times, the order turning each time."""
    names = list(cases)
    found = {name: {"seconds": [], "growth": []} for name in names}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            with PeakMemory() as memory:
                start = time.process_time()
                result = cases[name]()
                spent = time.process_time() - start
            del result
            found[name]["seconds"].append(spent)
            found[name]["growth"].append(memory.growth)
    return found


def ratio(name: str, shape: str, a: list[float], b: list[float], *, must: float | None, better: str) -> Row:
    """Median of the paired quotients a / b, with the least and the greatest."""
    quotients = [x / y for x, y in zip(a, b)]
    return Row(name, shape, statistics.median(quotients), min(quotients), max(quotients), must, better)


def difference(name: str, shape: str, a: list[float], b: list[float], *, must: float | None) -> Row:
    """Median of the paired differences a - b, in MiB."""
    gaps = [x - y for x, y in zip(a, b)]
    return Row(name, shape, statistics.median(gaps), min(gaps), max(gaps), must, "lower", "MiB")


def options(description: str) -> argparse.Namespace:
    """--quick, --json FILE, --threads N."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--quick", action="store_true", help="every row that has a must, at least 3 pairs, under 3 minutes"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    steady_malloc()
    return chosen


def report(rows: list[Row], chosen: argparse.Namespace) -> None:
    """Print the table, write the JSON, exit 1 if a must is missed."""
    from rich.console import Console
    from rich.table import Table

    table = Table("row", "shape", "median", "low", "high", "must", "")
    for row in rows:
        sign = "<=" if row.better == "lower" else ">="
        must = "" if row.must is None else f"{sign} {row.must:g} {row.unit}"
        verdict = {None: "", True: "held", False: "MISSED"}[row.held]
        values = [
            f"{v:.3f} {row.unit}" if row.unit == "x" else f"{v:.1f} {row.unit}" for v in (row.ratio, row.low, row.high)
        ]
        table.add_row(row.name, row.shape, *values, must, verdict)
    Console(width=150).print(table)
    if chosen.json:
        chosen.json.write_text(
            json.dumps({"quick": chosen.quick, "threads": chosen.threads, "rows": [asdict(r) for r in rows]}, indent=1)
        )
    if any(row.held is False for row in rows):
        raise SystemExit(1)
