"""How alike tokens are, and whether a module makes them more so: TME, MixIG; and the key region's share of a graph.

Everything is computed in float64.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mmlens.errors import MetricError
from mmlens.metrics.residual import State, check_pair, finite

TmeRows = Literal["mean", "last", "all"]


def tme(
    x: State, *, alpha: float = 1.0, rows: TmeRows = "mean", normalize: bool = False, kernel: str = "shift"
) -> Tensor:
    """Token mixing entropy: how evenly a token's likeness is spread over all tokens, in nats.

    z_t = x_t / ||x_t||;  w_tj = ((z_t . z_j + 1) / 2)^alpha;  P = w with rows summing to 1
    TME = mean over t of -sum_j P_tj log P_tj

    Parameters
    ----------
    alpha
        Sharpness. At 1, as the paper writes it, ordinary states differ in the third digit only; its code uses 8.
    rows
        "mean" over all tokens, the "last" one only (a product of one row, no S x S), or "all" (a value for each token).
    normalize
        Divided by log S.
    kernel
        "shift": (cos + 1) / 2, or "relu": max(cos, 0).

    Returns
    -------
    In [0, log S]; 0 for one token. Future tokens count: the definition has no causal mask. A zero row is as like one
    token as any other.

    Source: arXiv 2605.05668.

    Examples
    --------
    >>> import torch
    >>> from mmlens.metrics import tme
    >>> round(float(tme(torch.eye(3))), 6)
    1.039721
    """
    if rows not in ("mean", "last", "all"):
        raise MetricError(f"rows={rows!r}", expected="'mean', 'last' or 'all'", fix="rows='mean'")
    if kernel not in ("shift", "relu"):
        raise MetricError(f"kernel={kernel!r}", expected="'shift' or 'relu'", fix="kernel='shift'")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha > 0:
        raise MetricError(f"alpha={alpha!r}", expected="a number above 0", fix="alpha=1.0")
    x = finite(x)
    norm = x.norm(dim=-1, keepdim=True)
    z = x / torch.where(norm > 0, norm, 1.0)
    asked = z[..., -1:, :] if rows == "last" else z
    w = asked @ z.mT
    w = w.add_(1).mul_(0.5).clamp_(0, 1) if kernel == "shift" else w.clamp_(min=0)
    if alpha != 1:
        w = w.pow_(alpha)
    total = w.sum(-1)
    # -sum P log P = log(total) - sum w log w / total, without forming P
    entropy = total.log() - torch.special.xlogy(w, w).sum(-1) / total
    if kernel == "relu":  # a row of zeros is uniform
        entropy = torch.where(total > 0, entropy, torch.log(torch.tensor(float(x.shape[-2]))))
    entropy = entropy.clamp(min=0)
    if normalize:
        entropy = entropy / max(torch.log(torch.tensor(float(x.shape[-2]))).item(), torch.finfo(torch.float64).tiny)
    return entropy if rows == "all" else entropy.mean(-1)


def tme_reference(x: State, *, alpha: float = 1.0) -> Float[Tensor, "*batch"]:
    """`tme` as defined, with rows="mean": the whole graph, its rows normalised."""
    x = finite(x)
    norm = x.norm(dim=-1, keepdim=True)
    z = torch.where(norm > 0, x / norm, 0.0)
    w = ((z @ z.mT + 1) / 2).clamp(0, 1) ** alpha
    p = w / w.sum(-1, keepdim=True)
    return -torch.special.xlogy(p, p).sum(-1).mean(-1)


def mixig(
    before: State,
    after: State,
    *,
    alpha: float = 1.0,
    rows: TmeRows = "mean",
    normalize: bool = False,
    kernel: str = "shift",
) -> Tensor:
    """Mixing information gain of an update: TME(X') - TME(X). Positive where tokens become more alike.

    Options as for `tme`. Sums along a chain of updates; drifts with the number of tokens, so compare at equal S.

    Source: arXiv 2605.05668.

    Examples
    --------
    >>> import torch
    >>> from mmlens.metrics import mixig
    >>> round(float(mixig(torch.ones(2, 2), torch.eye(2))), 6)
    -0.056633
    """
    check_pair(before, after)
    options = dict(alpha=alpha, rows=rows, normalize=normalize, kernel=kernel)
    return tme(after, **options) - tme(before, **options)  # type: ignore[arg-type]


def key_region_ratio(
    graph: Float[Tensor, "*batch row key"],
    key: Bool[Tensor, "*batch key"],
    visual: Bool[Tensor, "*batch key"],
    rows: Bool[Tensor, "*batch row"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Share of the picture's in-degree that the key region has, in a mixing graph or an attention pattern.

    KRDR = sum_{j in K} deg(j) / sum_{j in V} deg(j),  deg(j) = sum over query rows of P_tj

    Returns
    -------
    |K| / |V| under a uniform graph; NaN where K is empty or the picture has no degree. Masses are pooled, then
    divided.

    Source: our reading of the ratio reported in arXiv 2605.05668, whose formula is not given.

    Examples
    --------
    >>> import torch
    >>> from mmlens.metrics import key_region_ratio
    >>> graph = torch.tensor([[1.0, 3.0, 2.0, 2.0]])
    >>> key = torch.tensor([False, True, False, False])
    >>> float(key_region_ratio(graph, key, torch.ones(4, dtype=torch.bool)))
    0.375
    """
    graph = graph.double()
    degree = graph.sum(-2) if rows is None else torch.einsum("...tj,...t->...j", graph, rows.double())
    whole = (degree * visual).sum(-1)
    found = (degree * (key & visual)).sum(-1) / whole
    sound = (key & visual).any(-1) & (whole > 0)
    return torch.where(sound, found, torch.nan)
