"""Retrieval Attention Mass: how much of the question's attention lands on the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Rows = Union[Bool[Tensor, "*#batch row"], Sequence[int], None]
Keys = Union[Bool[Tensor, "*#batch key"], Sequence[int], None]


def ram(pattern: Float[Tensor, "*batch head row key"], query: Rows, evidence: Keys) -> Float[Tensor, "*batch head"]:
    """RAM of each query head.

    RAM[h] = (1 / |Q|) * sum_{x in Q} sum_{y in Omega} A[h, x, y]

    Parameters
    ----------
    pattern
        Attention after softmax. Rows may be a cut of the prompt, padded with NaN.
    query
        Q, as indexes of the pattern's row axis or a mask over it; None means all rows given, NaN padding left out.
    evidence
        Omega, as indexes of the key axis or a mask over it.

    Returns
    -------
    In [0, 1]; NaN where Q or Omega is empty (no sound answer, never 0). Sums are float32. Scores live per query head:
    under grouped key/value heads the pattern already has one row set per query head.

    Source: CoRe heads, arXiv 2606.05843; the same form as QRHead's score, arXiv 2506.09944.

    Examples
    --------
    >>> import torch
    >>> from mmlens.metrics import ram
    >>> row = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])
    >>> ram(row, None, [1, 2])
    tensor([0.5000])
    """
    rows, omega = _rows(query, pattern), _mask(evidence, pattern, -1)
    mass = torch.einsum("...hxy,...y->...hx", pattern.float(), omega.float())
    return _row_mean(mass, rows, omega)


def lift(
    pattern: Float[Tensor, "*batch head row key"],
    query: Rows,
    evidence: Keys,
    *,
    visible: Int[Tensor, "*batch row"] | None = None,
) -> Float[Tensor, "*batch head"]:
    """RAM over what uniform causal attention would give: 1 is chance, whatever the evidence's size and place.

    lift[h] = RAM[h] / mean_{x in Q} ( |Omega| / n_visible(x) )

    Parameters
    ----------
    pattern, query, evidence
        As for `ram`.
    visible
        Keys that each row may look at; default: the rows are the last of a causal sequence without padding.

    Examples
    --------
    >>> import torch
    >>> from mmlens.metrics import lift
    >>> uniform = torch.tril(torch.ones(6, 6)) / torch.arange(1, 7)[:, None]
    >>> lift(uniform[None], [4, 5], [1, 2])
    tensor([1.])
    """
    n_rows, n_keys = pattern.shape[-2:]
    if visible is None:
        visible = torch.arange(n_keys - n_rows + 1, n_keys + 1, device=pattern.device)
    rows, omega = _rows(query, pattern), _mask(evidence, pattern, -1)
    chance = omega.sum(-1, keepdim=True).float() / visible.clamp(min=1)
    expected = _row_mean(chance.broadcast_to(rows.shape)[..., None, :], rows, omega)
    return ram(pattern, query, evidence) / expected


def macro_mean(samples: Float[Tensor, sample * rest]) -> Float[Tensor, "*rest"]:  # noqa: F821
    """Mean over samples, each counting once however many query rows it had; NaN samples are left out."""
    return samples.nanmean(0)


def _row_mean(
    mass: Float[Tensor, "*batch head row"], rows: Bool[Tensor, "*batch row"], omega: Bool[Tensor, "*batch key"]
) -> Float[Tensor, "*batch head"]:
    """Mean over the chosen rows; NaN where there are none, or nothing to find."""
    total = mass.masked_fill(~rows[..., None, :], 0).sum(-1)
    n = rows.sum(-1, keepdim=True)
    sound = (n > 0) & omega.any(-1, keepdim=True)
    return torch.where(sound, total / n, torch.nan)


def _rows(query: Any, pattern: Tensor) -> Bool[Tensor, "*batch row"]:
    """The query rows, without the NaN rows that pad ragged examples."""
    rows = _mask(query, pattern, -2)
    return rows & ~pattern.isnan().any(-1).all(-2) if query is None and pattern.shape[-3] else rows


def _mask(chosen: Any, pattern: Tensor, axis: int) -> Bool[Tensor, "*batch axis"]:
    """A mask over one axis of the pattern, with the pattern's leading axes."""
    size = pattern.shape[axis]
    if isinstance(chosen, Sequence) and any(isinstance(c, bool) for c in chosen):
        chosen = torch.tensor(chosen)
    if isinstance(chosen, Tensor) and chosen.dtype == torch.bool:
        mask = chosen
    else:
        mask = torch.full((size,), chosen is None, dtype=torch.bool)
        if chosen is not None:
            mask[torch.as_tensor(chosen, dtype=torch.long)] = True
    return mask.to(pattern.device).broadcast_to(*pattern.shape[:-3], size)
