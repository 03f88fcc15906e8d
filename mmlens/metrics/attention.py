"""Scores of one head's attention pattern beside RAM: where within the picture, how sharp, sinks, induction.

A pattern is (..., head, row, key) after softmax; `query` picks rows, `evidence` and `visual` pick keys, as for `ram`.
Sums are float32 or better. A head without a sound answer is NaN, never 0.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mmlens.errors import MetricError
from mmlens.metrics.ram import Keys, Rows, _mask, _rows

Pattern = Float[Tensor, "*batch head row key"]
PerHead = Float[Tensor, "*batch head"]


def _mass(pattern: Tensor, keys: Tensor) -> Tensor:
    return torch.einsum("...hxy,...y->...hx", pattern.float(), keys.float())


def _mean_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Mean over chosen rows that are not NaN; NaN where none is."""
    kept = rows[..., None, :] & ~values.isnan()
    return torch.where(kept, values, 0.0).sum(-1) / kept.sum(-1).where(kept.any(-1), torch.nan)


def attention_sum(pattern: Pattern, query: Rows, visual: Keys) -> PerHead:
    """Mean mass on the picture: sum over V of A, averaged over the query rows.

    With one row, the last of the prompt, this is the attention sum of Localization Heads (arXiv 2503.06287).

    Examples
    --------
    >>> import torch
    >>> from mmlens.metrics import attention_sum
    >>> attention_sum(torch.tensor([[[0.1, 0.2, 0.3, 0.4]]]), None, [1, 2])
    tensor([0.5000])
    """
    keys = _mask(visual, pattern, -1)
    found = _mean_rows(_mass(pattern, keys), _rows(query, pattern))
    return found.where(keys.any(-1)[..., None], torch.nan)


def visual_share(pattern: Pattern, query: Rows, evidence: Keys, visual: Keys) -> PerHead:
    """Share of the picture's attention that falls on the evidence, whatever share the picture has.

    visual_share[h] = mean_{x in Q} ( sum_{Omega} A / sum_V A );  rows that do not look at the picture are left out

    Examples
    --------
    >>> import torch
    >>> from mmlens.metrics import visual_share
    >>> visual_share(torch.tensor([[[0.1, 0.2, 0.3, 0.4]]]), None, [1], [1, 2])
    tensor([0.4000])
    """
    omega, keys = _mask(evidence, pattern, -1), _mask(visual, pattern, -1)
    share = _mass(pattern, omega & keys) / _mass(pattern, keys)  # 0 / 0 is NaN
    return _mean_rows(share, _rows(query, pattern)).where((omega & keys).any(-1)[..., None], torch.nan)


def density_lift(pattern: Pattern, query: Rows, evidence: Keys, visual: Keys) -> PerHead:
    """`visual_share` over what the evidence's size alone would give: 1 is uniform within the picture.

    density_lift = visual_share * |V| / |Omega|

    Examples
    --------
    >>> import torch
    >>> from mmlens.metrics import density_lift
    >>> density_lift(torch.tensor([[[0.1, 0.2, 0.3, 0.4]]]), None, [1], [1, 2])
    tensor([0.8000])
    """
    omega, keys = _mask(evidence, pattern, -1), _mask(visual, pattern, -1)
    size = keys.sum(-1) / (omega & keys).sum(-1)
    return visual_share(pattern, query, evidence, visual) * size[..., None]


def sink_free(pattern: Pattern, query: Rows, evidence: Keys, visual: Keys, sinks: Keys) -> PerHead:
    """`visual_share` with sink tokens taken out of evidence and picture."""
    omega, keys, sunk = (_mask(k, pattern, -1) for k in (evidence, visual, sinks))
    return visual_share(pattern, query, omega & ~sunk, keys & ~sunk)


def calibrated(asked: PerHead, null: PerHead) -> PerHead:
    """A score less the same score under a question that asks nothing ("N/A" in its slot); may be negative.

    Source: ICR (arXiv 2410.02642), QRHead (arXiv 2506.09944).
    """
    if asked.shape != null.shape:
        raise MetricError(
            f"scores of shapes {tuple(asked.shape)} and {tuple(null.shape)}", expected="one shape", fix="same heads"
        )
    return asked - null


def contrast(masses: Float[Tensor, "*batch region"]) -> Float[Tensor, "*batch"]:
    """Log-probability of the true region (the first) against distractor regions of equal size.

    contrast = log ( m_0 / sum_i m_i ), a log-softmax over the log masses; 0 is all on the true one, -log n chance

    Examples
    --------
    >>> import torch
    >>> from mmlens.metrics import contrast
    >>> round(float(contrast(torch.tensor([0.2, 0.2]))), 4)
    -0.6931
    """
    total = masses.double().sum(-1)
    return (masses[..., 0].double() / total).log()


def value_weighted(
    pattern: Pattern, query: Rows, evidence: Keys, norms: Float[Tensor, "*batch head key"], visible: Keys = None
) -> PerHead:
    """RAM with each key's mass weighted by what the head would write for it: A times ||v_y W_O^h||, normalised.

    sum_{Omega} A_xy n_y / sum_y A_xy n_y, averaged over the query rows. Attention to a key whose value is nearly zero
    moves nothing.

    Parameters
    ----------
    norms
        ||v_y W_O^h|| for every head and key.
    """
    omega, keys = _mask(evidence, pattern, -1), _mask(visible, pattern, -1)
    weighted = pattern.float() * norms.float()[..., None, :]
    share = _mass(weighted, omega & keys) / _mass(weighted, keys)
    return _mean_rows(share, _rows(query, pattern)).where(omega.any(-1)[..., None], torch.nan)


# ---------------------------------------------------------------------- shape of a map
def concentration(maps: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch"]:
    """How sharp a map is: 1 - H / log n; 0 uniform, 1 all on one key. NaN for a map without mass, or of one key.

    Examples
    --------
    >>> import torch
    >>> from mmlens.metrics import concentration
    >>> concentration(torch.tensor([[1.0, 1.0], [1.0, 0.0]])).tolist()
    [0.0, 1.0]
    """
    maps = maps.double()
    total = maps.sum(-1, keepdim=True)
    p = maps / total
    n = maps.shape[-1]
    found = 1 + torch.special.xlogy(p, p).sum(-1) / (math.log(n) if n > 1 else math.nan)
    return found.where(total[..., 0] > 0, torch.nan).clamp(0, 1)


def spatial_entropy(grid: Any, *, subtract: float = 1.0, threshold: float = 1e-3) -> float:
    """Entropy (nats) over the connected parts of a map: 0 is one blob, log 2 two equal ones, inf no mass.

    The map less `subtract` times its mean, negative parts cut, binarised above `threshold`; 8-connected parts; entropy
    of their masses.

    Source: Localization Heads, arXiv 2503.06287.

    Parameters
    ----------
    grid
        (rows, cols) of attention mass.
    subtract
        1 as in the paper; a released version subtracts twice the mean.


    Examples
    --------
    >>> import numpy as np
    >>> from mmlens.metrics import spatial_entropy
    >>> two = np.zeros((5, 5)); two[0, 0] = two[4, 4] = 1.0
    >>> round(spatial_entropy(two), 4)
    0.6931
    """
    from scipy.ndimage import label

    values = np.asarray(grid, float)
    if values.ndim != 2:
        raise MetricError(f"a map of shape {values.shape}", expected="(rows, cols)", fix="cache.grid(...) or heatmap")
    left = np.maximum(values - subtract * values.mean(), 0)
    parts, n = label(left > threshold, structure=np.ones((3, 3)))
    if not n:
        return math.inf
    masses = np.array([left[parts == i].sum() for i in range(1, n + 1)])
    p = masses / masses.sum()
    return float(abs((p * np.log(p)).sum()))


def pointing(maps: Float[Tensor, "*batch key"], evidence: Bool[Tensor, "*more key"]) -> Float[Tensor, "*batch"]:
    """1 where the brightest key of a map lies in the evidence, else 0; NaN for a map without mass or without evidence.

    Examples
    --------
    >>> import torch
    >>> from mmlens.metrics import pointing
    >>> float(pointing(torch.tensor([0.1, 0.7, 0.2]), torch.tensor([False, True, False])))
    1.0
    """
    evidence = evidence.broadcast_to(maps.shape)
    hit = evidence.gather(-1, maps.argmax(-1, keepdim=True))[..., 0].double()
    return hit.where((maps.sum(-1) > 0) & evidence.any(-1), torch.nan)


def box_iou(heat: Any, box: Any, *, keep: float = 0.5) -> float:
    """Overlap of a box with the box around the brightest pixels of a heat map: intersection over union.

    Parameters
    ----------
    heat
        (height, width), as `prompt.heatmap` gives; NaN counts as dark.
    box
        (x0, y0, x1, y1) in its pixels, half open.
    keep
        Pixels count as bright from this share of the maximum on.

    Examples
    --------
    >>> import numpy as np
    >>> from mmlens.metrics import box_iou
    >>> heat = np.zeros((4, 4)); heat[:2, :2] = 1
    >>> box_iou(heat, (0, 0, 2, 4))
    0.5
    """
    values = np.nan_to_num(np.asarray(heat, float))
    if values.ndim != 2 or not 0 < keep <= 1:
        raise MetricError(
            f"a map of shape {values.shape}, keep={keep}", expected="(height, width), 0 < keep <= 1", fix=""
        )
    top = values.max()
    if not top > 0:
        return math.nan
    rows, cols = np.nonzero(values >= keep * top)
    x0, y0, x1, y1 = cols.min(), rows.min(), cols.max() + 1, rows.max() + 1
    wide = max(0.0, min(x1, box[2]) - max(x0, box[0]))
    high = max(0.0, min(y1, box[3]) - max(y0, box[1]))
    union = (x1 - x0) * (y1 - y0) + (box[2] - box[0]) * (box[3] - box[1]) - wide * high
    return float(wide * high / union)


def localisation_ap(overlaps: Any, *, threshold: float = 0.5) -> float:
    """Share of samples whose `box_iou` reaches a threshold (AP at one detection a picture); NaN samples left out."""
    found = np.asarray(overlaps, float)
    found = found[~np.isnan(found)]
    return float((found >= threshold).mean()) if len(found) else math.nan


# ---------------------------------------------------------------------- sinks
def sink_tokens(
    hidden: Float[Tensor, "*batch pos d_model"], dims: list[int], *, threshold: float = 20.0, eps: float = 1e-6
) -> Bool[Tensor, "*batch pos"]:
    """Tokens with a massive activation: the largest of some features' absolute RMS-normed values is over a threshold.

    Source: visual attention sinks, arXiv 2503.03321.

    Parameters
    ----------
    dims
        Sink features of the model: (1415, 2533) in LLaMA-2-7B, (2100, 4743) in 13B.

    """
    x = hidden.float()
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed[..., list(dims)].abs().amax(-1) > threshold


def sink_share(pattern: Pattern, query: Rows, visual: Keys, sinks: Keys) -> PerHead:
    """Share of the picture's attention that sinks take."""
    return visual_share(pattern, query, sinks, visual)


def image_centric(
    pattern: Pattern, query: Rows, visual: Keys, sinks: Keys, *, mass: float = 0.2, sink: float = 0.5
) -> Bool[Tensor, "*batch head"]:
    """Heads with at least `mass` on the picture of which sinks take at most `sink`.

    Source: VAR, arXiv 2503.03321.
    """
    looks = attention_sum(pattern, query, visual) >= mass
    sunk = sink_share(pattern, query, visual, sinks)
    return looks & ~(sunk > sink)


# ---------------------------------------------------------------------- text heads
def previous_token(pattern: Float[Tensor, "*batch head pos pos2"]) -> PerHead:
    """Mean attention of every token to the one before it."""
    return pattern.float().diagonal(-1, -2, -1).mean(-1)


def induction(pattern: Float[Tensor, "*batch head pos pos2"], n: int) -> PerHead:
    """On a random block of `n` tokens shown twice: mean attention of the second half to what followed its copy.

    mean_t A[t, t - n + 1] over the last n rows. Source: Olsson et al. 2022.
    """
    if not 1 < n <= pattern.shape[-1] // 2:
        raise MetricError(
            f"n={n} of {pattern.shape[-1]} keys", expected="2 to half of them", fix="repeat the block twice"
        )
    return pattern.float().diagonal(1 - n, -2, -1)[..., -n:].mean(-1)


# ---------------------------------------------------------------------- while generating
def copy_hits(
    rows: Float[Tensor, "step head key"], needle: Bool[Tensor, " key"], keys: Any, said: Any
) -> Float[Tensor, " head"]:
    """Retrieval score: while generating, how often a head's brightest key lies in the needle and holds the said token.

    Each hit counts 1 / |needle|.

    Source: Wu et al., arXiv 2404.15574 (who count runs with ROUGE-1 recall above 50 only).

    Parameters
    ----------
    rows
        Attention of each generated token's row over the prompt's keys.
    keys, said
        Token ids of the prompt's keys, and of what was generated at each step.

    """
    ids, spoken = torch.as_tensor(keys), torch.as_tensor(said)
    top = rows.argmax(-1)
    hit = needle[top] & (ids[top] == spoken[:, None])
    n = int(needle.sum())
    return hit.double().sum(0) / n if n else torch.full(hit.shape[1:], torch.nan, dtype=torch.float64)


def ocr_hits(rows: Float[Tensor, "step head key"], evidence: Bool[Tensor, " key"]) -> Float[Tensor, " head"]:
    """OCR score: share of generated tokens whose brightest key lies in the evidence. Source: arXiv 2505.15865."""
    if not bool(evidence.any()):
        return torch.full(rows.shape[1:2], torch.nan, dtype=torch.float64)
    return evidence[rows.argmax(-1)].double().mean(0)
