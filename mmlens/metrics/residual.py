"""What a module does to the residual stream: effective rank, and new directions (RID).

States are (token, feature). Everything is computed in float64, whatever dtype comes in; `*_reference` forms follow the
definitions word by word, the others are fast forms tested against them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Union

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmlens.errors import MetricError

Rtol = Union[float, Literal["input"], None]
State = Float[Tensor, "*batch token feature"]
EPS = torch.finfo(torch.float64).eps


class RidParts(NamedTuple):
    """The two terms of RID, and the rank at which the old state's support was cut."""

    complexity: Float[Tensor, "*batch"]
    support: Float[Tensor, "*batch"]
    rank: Int[Tensor, "*batch"]

    @property
    def total(self) -> Float[Tensor, "*batch"]:
        """RID: their sum."""
        return self.complexity + self.support


# ---------------------------------------------------------------------- effective rank
def erank(x: State) -> Float[Tensor, "*batch"]:
    """Effective rank: the exponential of the entropy of the normalised singular values.

    p_i = s_i / sum(s);  eRank = exp(-sum p_i log p_i)

    Returns
    -------
    From 1 to the rank; 0 for a zero matrix, NaN where the state is not finite.

    Source: Roy & Vetterli 2007; singular values, not their squares.

    Examples
    --------
    >>> import torch
    >>> from mmlens.metrics import erank
    >>> erank(torch.eye(3))
    tensor(3.0000, dtype=torch.float64)
    """
    return _erank(_singular(finite(x)))


def _erank(s: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
    total = s.sum(-1, keepdim=True)
    p = s / total.clamp(min=torch.finfo(torch.float64).tiny)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    return torch.where(total[..., 0] > 0, entropy.exp(), torch.where(total[..., 0].isnan(), torch.nan, 0.0))


def finite(x: Tensor) -> Tensor:
    """In float64; a state with an infinity or NaN is NaN as a whole."""
    x = x.double()
    # an infinity or NaN anywhere makes the sum one; the whole state is looked at only then
    if bool(x.sum((-2, -1)).isfinite().all()):
        return x
    return torch.where(x.isfinite().all(-1).all(-1)[..., None, None], x, torch.nan)


def _singular(x: Tensor) -> Tensor:
    if bool(x.isnan().any()):
        bad = x.isnan().any(-1).any(-1)
        s = torch.linalg.svdvals(torch.where(bad[..., None, None], 0.0, x))
        return torch.where(bad[..., None], torch.nan, s)
    return torch.linalg.svdvals(x)


# ---------------------------------------------------------------------- RID
def cut_of(x: Tensor, rtol: Rtol) -> float:
    """The relative size below which a singular value of the old state counts as 0.

    By default max(S, H) times float64's epsilon. A number is taken as it is; "input" means the epsilon of the dtype
    that came in, and is refused where that would cut everything.
    """
    if rtol is None:
        return max(x.shape[-2:]) * EPS
    if rtol == "input":
        found = max(x.shape[-2:]) * torch.finfo(x.dtype).eps if x.is_floating_point() else 1.0
        if found >= 1:
            raise MetricError(
                f"rtol='input' for a {str(x.dtype).removeprefix('torch.')} state of {tuple(x.shape[-2:])}",
                expected=f"a cut below 1; this one is {found:.3g} and leaves rank 0",
                fix="leave rtol= out (float64), or give a number such as 1e-6",
            )
        return found
    if isinstance(rtol, bool) or not isinstance(rtol, int | float) or not 0 <= rtol < 1:
        raise MetricError(f"rtol={rtol!r}", expected="a number from 0 to below 1, 'input' or None", fix="rtol=1e-6")
    return float(rtol)


def check_pair(before: Tensor, after: Tensor) -> None:
    """Raise unless two states have one shape."""
    if before.shape != after.shape or before.ndim < 2:
        raise MetricError(
            f"states of shape {tuple(before.shape)} and {tuple(after.shape)}",
            expected="two states (..., token, feature) of one shape",
            fix="take both at the same positions",
        )


def rid_parts(before: State, after: State, *, rtol: Rtol = None) -> RidParts:
    """Both terms of the representation innovation distance of an update.

    complexity = |eRank(X') - eRank(X)| / min(S, H)
    support = (||(I - P_C) X'||_F + ||X' (I - P_R)||_F) / (2 ||X'||_F)

    with P_C, P_R the projections onto the old state's column and row space.

    Parameters
    ----------
    before, after
        X and X'; leading axes are batched.
    rtol
        Where the old state's support ends, relative to its largest singular value: None (float64's resolution), a
        number, or "input" (that of the dtype given). A state low-rank only up to float32 rounding wants 1e-6.

    Returns
    -------
    RidParts
        `.complexity` in [0, 1), `.support` in [0, 1], `.rank`. An after state of zeros has support 0.

    Raises
    ------
    MetricError
        For states of different shapes, or a cut that leaves nothing.

    Source: "Large Vision-Language Models Get Lost in Attention", arXiv 2605.05668.

    Examples
    --------
    >>> import torch
    >>> from mmlens.metrics import rid_parts
    >>> parts = rid_parts(torch.diag(torch.tensor([1.0, 1.0, 0.0])), torch.eye(3))
    >>> [round(float(p), 6) for p in (parts.complexity, parts.support, parts.total)]
    [0.333333, 0.57735, 0.910684]
    """
    check_pair(before, after)
    cut = cut_of(before, rtol)
    old = Spectrum.of(before)
    return old.to(Spectrum.of(after), cut)


def rid(before: State, after: State, *, rtol: Rtol = None) -> Float[Tensor, "*batch"]:
    """Representation innovation distance: `rid_parts`' sum, in [0, 2). Not a metric: only what is new counts.

    Examples
    --------
    >>> import torch
    >>> from mmlens.metrics import rid
    >>> x = torch.randn(5, 8)
    >>> float(rid(x, 2 * x)) < 1e-12
    True
    """
    return rid_parts(before, after, rtol=rtol).total


def rid_reference(before: State, after: State, *, rtol: Rtol = None) -> RidParts:
    """`rid_parts` as defined: two whole singular value decompositions."""
    check_pair(before, after)
    cut = cut_of(before, rtol)
    x, y = finite(before), finite(after)
    if bool(x.isnan().any() | y.isnan().any()):
        x, y, sound = _split_nan(x, y)
    else:
        sound = None
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    kept = s > cut * s[..., :1]
    u, vh = u * kept[..., None, :], vh * kept[..., None]
    left, right = y - u @ (u.mT @ y), y - (y @ vh.mT) @ vh
    parts = _parts(_erank(s), _erank(torch.linalg.svdvals(y)), left, right, y, kept.sum(-1))
    return parts if sound is None else _nan_where(parts, ~sound)


def _split_nan(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sound = ~(x.isnan().any(-1).any(-1) | y.isnan().any(-1).any(-1))
    mask = sound[..., None, None]
    return torch.where(mask, x, 0.0), torch.where(mask, y, 0.0), sound


def _nan_where(parts: RidParts, bad: Tensor) -> RidParts:
    complexity, support = (torch.where(bad, torch.nan, p) for p in parts[:2])
    return RidParts(complexity, support, torch.where(bad, 0, parts.rank))


def _parts(before: Tensor, after: Tensor, left: Tensor, right: Tensor, y: Tensor, rank: Tensor) -> RidParts:
    norm = y.flatten(-2).norm(dim=-1)
    new = left.flatten(-2).norm(dim=-1) + right.flatten(-2).norm(dim=-1)
    support = torch.where(norm > 0, new / (2 * norm).clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    return RidParts((after - before).abs() / min(y.shape[-2:]), support, rank)


@dataclass
class Spectrum:
    """A state with what RID needs of it, each computed once: consecutive updates share states.

    Attributes
    ----------
    x
        The state, float64.
    gram
        X X^T or X^T X, whichever is smaller.
    values
        Singular values, from the largest.
    """

    x: Tensor
    gram: Tensor
    values: Tensor

    @classmethod
    def of(cls, state: Tensor) -> Spectrum:
        """From a state in any dtype."""
        x = finite(state)
        short = x.shape[-2] <= x.shape[-1]
        gram = x @ x.mT if short else x.mT @ x
        return cls(x, gram, _spectrum(x, gram))

    @property
    def erank(self) -> Tensor:
        """Of the state."""
        return _erank(self.values)

    @cached_property
    def factor(self) -> Tensor | None:
        """Cholesky factor of the Gram matrix; None where it has none."""
        factor, info = torch.linalg.cholesky_ex(self.gram)
        return None if bool((info != 0).any()) else factor

    def to(self, after: Spectrum, cut: float) -> RidParts:
        """RID of the update from this state to another."""
        x, y = self.x, after.x
        bad = x.isnan().any(-1).any(-1) | y.isnan().any(-1).any(-1)
        if bool(bad.any()):
            clean = [Spectrum.of(torch.where(bad[..., None, None], 0.0, s)) for s in (x, y)]
            return _nan_where(clean[0].to(clean[1], cut), bad)
        rank = (self.values > cut * self.values[..., :1]).sum(-1)
        whole = min(x.shape[-2:])
        # Where the short side is fully supported its projection is the identity and its residual exactly 0.
        safe = bool((rank == whole).all()) and bool((self.values[..., -1] > 1e-6 * self.values[..., 0]).all())
        factor = self.factor if safe else None
        if factor is None:
            return _by_svd(self, after, cut)
        residual = self._outside(y, factor)
        if bool((self.values[..., -1] < 1e-2 * self.values[..., 0]).any()):
            # the Gram matrix squares the condition number: a second pass squares its error away
            residual = self._outside(residual, factor)
        return _parts(self.erank, after.erank, torch.zeros_like(residual), residual, y, rank)

    def _outside(self, y: Tensor, factor: Tensor) -> Tensor:
        """What of y lies outside the support of this state's long side."""
        if self.x.shape[-2] <= self.x.shape[-1]:
            return y - torch.cholesky_solve(self.x @ y.mT, factor).mT @ self.x
        return y - self.x @ torch.cholesky_solve(self.x.mT @ y, factor)


def _spectrum(x: Tensor, gram: Tensor) -> Tensor:
    """Singular values from the Gram matrix where it is well enough conditioned, else from the state itself."""
    if bool(x.isnan().any()):
        return _singular(x)
    squares = torch.linalg.eigvalsh(gram).flip(-1)
    # squaring loses half the digits: values below 1e-6 of the largest would be noise
    if bool((squares[..., -1] > 1e-12 * squares[..., 0]).all()):
        return squares.sqrt()
    return torch.linalg.svdvals(x)


def _by_svd(before: Spectrum, after: Spectrum, cut: float) -> RidParts:
    u, s, vh = torch.linalg.svd(before.x, full_matrices=False)
    kept = s > cut * s[..., :1]
    u, vh = u * kept[..., None, :], vh * kept[..., None]
    y = after.x
    left, right = y - u @ (u.mT @ y), y - (y @ vh.mT) @ vh
    return _parts(_erank(s), after.erank, left, right, y, kept.sum(-1))


# ---------------------------------------------------------------------- subspaces, for comparison
def principal_angles(before: State, after: State, *, rtol: Rtol = None, side: str = "feature") -> Float[Tensor, " k"]:
    """Angles (radians, ascending) between the supports of two states, as many as the smaller rank.

    Parameters
    ----------
    side
        "feature": row spaces; "token": column spaces.
    """
    if side not in ("feature", "token"):
        raise MetricError(f"side={side!r}", expected="'feature' or 'token'", fix="side='feature'")
    check_pair(before, after)
    if before.ndim != 2:
        raise MetricError(f"{before.ndim} axes", expected="two states (token, feature)", fix="loop over leading axes")
    bases = []
    for state in (before, after):
        u, s, vh = torch.linalg.svd(finite(state), full_matrices=False)
        kept = s > cut_of(state, rtol) * s[:1]
        bases.append(vh[kept].mT if side == "feature" else u[:, kept])
    cosines = torch.linalg.svdvals(bases[0].mT @ bases[1]).clamp(0, 1)
    # near 0 the cosine says nothing of a small angle; the sine of the residual does
    small, large = sorted(bases, key=lambda b: b.shape[1])
    sines = torch.linalg.svdvals(small - large @ (large.mT @ small)).flip(-1).clamp(0, 1)[: len(cosines)]
    return torch.where(cosines**2 > 0.5, sines.asin(), cosines.acos())


def grassmann(
    before: State, after: State, *, kind: Literal["geodesic", "chordal", "projection"] = "geodesic", rtol: Rtol = None
) -> Float[Tensor, ""]:
    """Distance of the two states' row spaces by their principal angles t: for comparison with RID's support term.

    geodesic sqrt(sum t^2), chordal sqrt(sum sin^2 t), projection sqrt(2) * chordal. Symmetric; of spaces of different
    rank only the smaller's angles count (Ye & Lim 2016).

    Examples
    --------
    >>> import math, torch
    >>> from mmlens.metrics import grassmann
    >>> a = torch.tensor([[1.0, 0.0]])
    >>> b = torch.tensor([[math.cos(math.pi / 6), math.sin(math.pi / 6)]])
    >>> [round(float(grassmann(a, b, kind=k)), 4) for k in ("geodesic", "chordal", "projection")]
    [0.5236, 0.5, 0.7071]
    """
    angles = principal_angles(before, after, rtol=rtol)
    if kind == "geodesic":
        return angles.norm()
    if kind in ("chordal", "projection"):
        return angles.sin().norm() * (2**0.5 if kind == "projection" else 1)
    raise MetricError(f"kind={kind!r}", expected="'geodesic', 'chordal' or 'projection'", fix="kind='geodesic'")
