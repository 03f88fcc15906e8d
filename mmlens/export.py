"""A whole task's activations on disk, in shards that survive a kill and are read through the memory map."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mmlens.errors import OptionError, RunFolderError, UnknownTaskError
from mmlens.model.hooked import HookedVLM
from mmlens.model.sites import NamesFilter, Site
from mmlens.scan import Batch, RunFolder, batches, track, versions
from mmlens.scores import write_whole
from mmlens.tasks.base import Split, Task
from mmlens.tokens import Group

_PLACES = ("example", "position")


def activations(
    vlm: HookedVLM,
    task: Task,
    names_filter: NamesFilter,
    *,
    out: str | Path,
    positions: Group | None = None,
    n: int | None = None,
    seed: int = 0,
    split: Split = "rank",
) -> ActivationShards:
    """Write a task's decoder activations to disk, one row for each token: what training a sparse autoencoder needs.

    Memory holds one batch at a time. Killed and called again with the same arguments, it goes on after the last whole
    shard.

    Parameters
    ----------
    names_filter
        Hooks with one value a position: streams, sublayer outputs, q, k, v, z, MLP insides.
    out
        The folder.
    positions
        Token group to keep ("image", "subject", ...); default every token that is no padding.
    n, seed, split
        Which examples of the task.

    Returns
    -------
    ActivationShards
        The folder, ready to read.

    Raises
    ------
    OptionError, RunFolderError, TokenGroupError, UnknownHookError

    Examples
    --------
    >>> import tempfile
    >>> from mmlens import HookedVLM, load_task
    >>> vlm = HookedVLM.from_pretrained("toy-qwen3-vl")
    >>> shards = vlm.activations(load_task("scenes/image"), "blocks.3.hook_resid_post", out=tempfile.mkdtemp(), n=4)
    >>> shards.load("blocks.3.hook_resid_post").shape == (shards.n_rows, vlm.d_model)
    True
    """
    if not isinstance(task, Task):
        raise UnknownTaskError(
            f"a task given as {type(task).__name__}", expected="a Task", fix="load_task('scenes/image'), or your own"
        )
    if not isinstance(out, str | os.PathLike):
        raise OptionError(f"out={out!r}", expected="a folder's path", fix="out='runs/activations'")
    sites, _ = vlm.sites.choose(names_filter)
    wrong = [s.name for s in sites if s.axes[:2] != ("batch", "pos")]
    if wrong or not sites:
        raise OptionError(
            f"{wrong[0] if wrong else 'no hook'} to export",
            expected="decoder hooks with one value a position (resid_post, mlp_out, z, ...)",
            fix="for patterns and tower streams use run_with_cache(..., reduce=...) batch by batch",
        )
    names = [s.name for s in sites]
    n = task.count(split, n, seed)
    identity = {
        "kind": "activations",
        "model": vlm.identity(),
        "task": task.identity(),
        "names": names,
        "positions": positions if isinstance(positions, str | int | None) else str(positions),
        "n": n,
        "seed": seed,
        "split": split,
        "batch": task.batch,
        "versions": versions(),
    }
    folder = RunFolder(Path(out), identity)
    done = folder.whole()
    answers = isinstance(positions, str) and "output" in positions
    todo = batches(vlm, task, split=split, n=n, seed=seed, answers=answers, skip=done, keep=False)
    for batch in track(todo, total=-(-n // task.batch) - len(done), what=f"activations of {task.name}"):
        folder.write_shard(batch.number, _shard(vlm, batch, names, positions, first=batch.number * task.batch))
    write_whole(folder.folder / "index.json", json.dumps(identity, indent=1, sort_keys=True).encode())
    return ActivationShards(folder.folder)


def _shard(vlm: HookedVLM, batch: Batch, names: list[str], positions: Group | None, *, first: int) -> bytes:
    from safetensors.torch import save

    columns = batch.prompt.tokens("all" if positions is None else positions).per_example
    rows = [(example, column) for example, chosen in enumerate(columns) for column in chosen]
    where = torch.tensor(rows, dtype=torch.long).view(-1, 2)
    kept: dict[str, Tensor] = {}

    def keep(site: Site, value: Tensor) -> None:
        kept[site.name] = value[where[:, 0].to(value.device), where[:, 1].to(value.device)].cpu().contiguous()

    vlm.reduce(batch.prompt, dict.fromkeys(names, keep))
    starts = [roles["all"][0] for roles in batch.prompt.roles]
    kept["example"] = where[:, 0] + first
    # counted from the example's own first token, so that padding does not show
    kept["position"] = where[:, 1] - torch.tensor(starts)[where[:, 0]]
    return save(kept, {"batch": str(batch.number)})


class ActivationShards:
    """A folder that `activations` wrote. Rows are tokens; values are read through the memory map, a shard at a time.

    Attributes
    ----------
    names
        The hooks in it.
    provenance
        Model, task and every option.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.provenance: dict[str, Any] = json.loads((self.folder / "index.json").read_text())
        except (OSError, ValueError) as error:
            raise RunFolderError(
                f"{self.folder} holds no finished export: {error}",
                expected="a folder that vlm.activations(..., out=folder) wrote to its end",
                fix="call it again with the same arguments: it goes on where it stopped",
            ) from None
        self.names: list[str] = self.provenance["names"]
        self._paths = sorted((self.folder / "shards").glob("*.safetensors"))
        self._rows = [self._open(path).get_slice("example").get_shape()[0] for path in self._paths]

    @staticmethod
    def _open(path: Path) -> Any:
        from safetensors import safe_open

        return safe_open(str(path), "pt")

    def __len__(self) -> int:
        """Shards."""
        return len(self._paths)

    def __repr__(self) -> str:
        return f"ActivationShards({str(self.folder)!r}, {self.n_rows} rows of {len(self.names)} hooks)"

    @property
    def n_rows(self) -> int:
        """Tokens over all shards."""
        return sum(self._rows)

    def _check(self, name: str) -> None:
        if name not in self.names and name not in _PLACES:
            raise OptionError(f"{name!r}", expected=f"one of {', '.join((*self.names, *_PLACES))}", fix="see .names")

    def shard(self, number: int, name: str) -> Tensor:
        """One shard's rows of a hook, or its "example" or "position" numbers."""
        self._check(name)
        return self._open(self._paths[number]).get_tensor(name)

    def load(self, name: str) -> Tensor:
        """All rows of a hook, in order; or their "example" and "position" numbers."""
        self._check(name)
        return torch.cat([self.shard(i, name) for i in range(len(self))])

    def minibatches(
        self, name: str, *, size: int = 1024, seed: int | None = None
    ) -> Iterator[Float[Tensor, "row ..."]]:
        """Rows in pieces of `size`, for training; memory holds one shard at a time.

        Parameters
        ----------
        size
            Rows of a piece; the last of a shard may be smaller.
        seed
            Shuffles the shards and the rows within each; None keeps the order.
        """
        self._check(name)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise OptionError(f"size={size!r}", expected="an int, at least 1", fix="size=1024")
        rng = None if seed is None else np.random.default_rng(seed)
        order = np.arange(len(self)) if rng is None else rng.permutation(len(self))
        for number in order.tolist():
            rows = self.shard(number, name)
            if rng is not None:
                rows = rows[torch.from_numpy(rng.permutation(len(rows)))]
            yield from rows.split(size)
