"""The one attention function: SDPA when nothing is asked; only the rows and heads asked for are ever made explicit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmlens.errors import PatternTooLargeError, UnsupportedAttentionError
from mmlens.model.requests import PATTERN_LIMIT, Address, LayerAsk, Requests, pad_rows

NAME = "mmlens"
# Qwen towers make one packed call, instead of one a picture, when the name holds "flash".
PACKED_NAME = "mmlens_packed_flash"
POINTS = ("hook_rot_q", "hook_rot_k", "hook_attn_scores", "hook_pattern")
_LINK = "_mmlens_link"
# Added to the scaled scores of hidden keys: exp of it is 0 in float32.
_HIDDEN = -1e4


class HookPoint(nn.Module):
    """An identity that the tracing engine can see."""

    def forward(self, x: Tensor) -> Tensor:
        """The value itself."""
        return x


@dataclass(frozen=True)
class Link:
    """What an attention module knows of its wrapper."""

    requests: Requests
    address: Address


def attach(module: nn.Module, link: Link) -> None:
    """Give an attention module its hook points and its place in the request stack."""
    module.__dict__[_LINK] = link
    for point in POINTS:
        module.add_module(point, HookPoint())


def detach(module: nn.Module) -> None:
    """Undo `attach`."""
    module.__dict__.pop(_LINK, None)
    for point in POINTS:
        module._modules.pop(point, None)


def attention(
    module: Any,
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    value: Float[Tensor, "batch kv_head key d_value"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch query head d_value"], None]:
    """Registered with transformers; what reaches it is after q/k norm and rotary."""
    call = _Call(module, attention_mask, dropout, scaling, is_causal, kwargs)
    link: Link | None = module.__dict__.get(_LINK)
    ask = None if link is None else link.requests.at(link.address)
    if link is None or ask is None:
        return call.sdpa(query, key, value), None
    call.limit = link.requests.pattern_limit
    if "rot_q" in ask.points:
        query = module.hook_rot_q(query)
    if "rot_k" in ask.points:
        key = module.hook_rot_k(key)
    d_value = value.shape[-1]
    if ask.mass is not None:
        query, key, value = _widen(call, query, key, value, ask.mass.members)
    out = call.sdpa(query, key, value)
    hidden = _hidden_keys(ask, link.requests.columns, key.shape[-2])
    if hidden is not None:
        out = _hide_keys(call, query, key, value, out, *hidden)
    if ask.explicit:
        out = _explicit(call, ask, query, key, value, out, hidden)
    if ask.mass is not None:
        ask.mass.sink(link.address, out[..., d_value : d_value + ask.mass.members.shape[-1]])
        out = out[..., :d_value]
    dead = sorted({h for edit in ask.edits if edit.mode == "output_zero" for h in edit.heads})
    if dead:
        out = out.clone()
        out[:, :, dead] = 0
    return out, None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
ALL_ATTENTION_FUNCTIONS.register(PACKED_NAME, attention)
# Without a mask function of the same name transformers passes no mask at all.
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED_NAME, sdpa_mask)


class _Call:
    """One call's constants, and its plain SDPA form."""

    def __init__(
        self,
        module: nn.Module,
        mask: Tensor | None,
        dropout: float,
        scaling: float | None,
        is_causal: bool | None,
        kwargs: dict[str, Any],
    ) -> None:
        self.module, self.mask, self.dropout, self.scaling, self.kwargs = module, mask, dropout, scaling, kwargs
        self.is_causal = is_causal
        self.limit = PATTERN_LIMIT
        cu = kwargs.get("cu_seq_lens_q")
        self.lengths: list[int] | None = None if cu is None else (cu[1:] - cu[:-1]).tolist()

    @property
    def causal(self) -> bool:
        """Whether a missing mask means a causal one."""
        return getattr(self.module, "is_causal", True) if self.is_causal is None else self.is_causal

    def sdpa(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Stock SDPA, by stock operations; a packed tower segment by segment as stock does."""
        options = dict(dropout=self.dropout, scaling=self.scaling, is_causal=self.is_causal)
        if self.lengths is None:
            return sdpa_attention_forward(self.module, query, key, value, self.mask, **options, **self.kwargs)[0]
        parts = zip(*(torch.split(x, self.lengths, dim=2) for x in (query, key, value)))
        return torch.cat([sdpa_attention_forward(self.module, *part, None, **options)[0] for part in parts], dim=1)

    def refuse_large(self, *shape: int) -> None:
        """Scores or patterns of a size that would fill the memory."""
        size = 4 * math.prod(shape)
        if size > self.limit:
            raise PatternTooLargeError(
                f"scores or a pattern of {' x '.join(map(str, shape))}, {size / 2**30:.1f} GiB for one layer",
                expected=f"at most {self.limit / 2**30:.1f} GiB (vlm.pattern_limit)",
                fix="ask for some rows= or heads= (decoder), for token groups with vlm.attention_mass(...), or for a "
                "smaller picture; or raise vlm.pattern_limit",
            )

    def refuse_unknown(self) -> None:
        """A pattern computed without these would be silently wrong."""
        for name in ("softcap", "s_aux", "sinks", "position_bias"):
            if self.kwargs.get(name) is not None:
                raise UnsupportedAttentionError(
                    f"this model's attention uses {name!r}",
                    expected="plain softmax attention where scores or patterns are asked for",
                    fix="ask for other hooks (z, q, k, v, the streams) of this model",
                )


def _widen(call: _Call, query: Tensor, key: Tensor, value: Tensor, members: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Group membership as extra value columns: attention's own output then holds each group's mass.

    One SDPA call a little wider than stock's, and no query x key matrix. Queries and keys get zeros, so that all
    three stay of one width (kernels without an S x S matrix want that).
    """
    call.scaling = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    extra = -(-members.shape[-1] // 8) * 8
    columns = nn.functional.pad(members.to(value.dtype), (0, extra - members.shape[-1]))
    wide = torch.cat([value, columns[:, None].expand(*value.shape[:-1], extra)], -1)
    return nn.functional.pad(query, (0, extra)), nn.functional.pad(key, (0, extra)), wide


def _hidden_keys(
    ask: LayerAsk, columns: Bool[Tensor, "batch prompt"] | None, n_keys: int
) -> tuple[list[int], Bool[Tensor, "batch key"]] | None:
    """The heads that must not see picture keys, and those keys; keys newer than the prompt are text."""
    heads = sorted({h for edit in ask.edits if edit.mode == "visual_mask" for h in edit.heads})
    if not heads or columns is None or not columns.any():
        return None
    return heads, nn.functional.pad(columns, (0, n_keys - columns.shape[1]))


def _hide_keys(
    call: _Call, query: Tensor, key: Tensor, value: Tensor, out: Tensor, heads: list[int], hidden: Tensor
) -> Tensor:
    """`out` with some heads' attention recomputed without the hidden keys (the others renormalised).

    No query x key mask is built: one extra feature, 1 in every query and -1e4 in every hidden key, shifts those
    scores out of the softmax. A row that sees hidden keys only gives 0.
    """
    groups = query.shape[1] // key.shape[1]
    kv = [h // groups for h in heads]
    q, k, v = query[:, heads], key[:, kv], value[:, kv]
    scaling = q.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    seen = _sees_any(call, ~hidden, query.shape[-2])
    if call.mask is not None:
        mask = call.mask[..., : key.shape[-2]]
        shown = ~hidden[:, None, None, :]
        mask = mask & shown if mask.dtype == torch.bool else mask.masked_fill(~shown, torch.finfo(mask.dtype).min)
        part = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    else:
        ones = torch.ones_like(q[..., :1]).expand(*q.shape[:-1], 8)  # 8 wide: kernels want aligned heads
        shift = (hidden[:, None, :, None] * (_HIDDEN / scaling / 8)).to(k.dtype).expand(*k.shape[:-1], 8)
        q, k = torch.cat([q, ones], -1), torch.cat([k, shift], -1)
        # Kernels without an S x S matrix want one width for all three.
        wide = nn.functional.pad(v, (0, q.shape[-1] - v.shape[-1]))
        causal = call.causal and q.shape[-2] > 1
        part = nn.functional.scaled_dot_product_attention(q, k, wide, is_causal=causal, scale=scaling)
        part = part[..., : v.shape[-1]]
    part = part.transpose(1, 2).masked_fill(~seen[:, :, None, None], 0)
    out = out.clone()
    out[:, :, heads] = part
    return out


def _sees_any(call: _Call, keys: Bool[Tensor, "batch key"], n_queries: int) -> Bool[Tensor, "batch query"]:
    """Whether each query sees at least one of the given keys."""
    if call.mask is not None:
        return (_open(call.mask[:, 0, :, : keys.shape[-1]]) & keys[:, None, :]).any(-1)
    counts = keys.cumsum(-1)
    if call.causal and n_queries > 1:
        return counts[:, counts.shape[-1] - n_queries :] > 0
    return (counts[:, -1:] > 0).expand(-1, n_queries)


def _open(mask: Tensor) -> Bool[Tensor, ...]:
    """Where a boolean or additive mask lets a query look."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _explicit(
    call: _Call,
    ask: LayerAsk,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    hidden: tuple[list[int], Tensor] | None,
) -> Tensor:
    """Scores and pattern through their hook points; `out` is touched only where somebody changed them."""
    call.refuse_unknown()
    if call.lengths is not None:
        return _explicit_packed(call, call.lengths, query, key, value, out, through=ask.through)
    n_queries, n_keys = query.shape[-2], key.shape[-2]
    # Rows are prompt columns: while decoding against a cache there is one new row, and it is kept whole.
    rows = ask.rows if n_queries == n_keys else None
    index = None if rows is None else pad_rows(rows, query.device)
    heads = list(range(query.shape[1])) if ask.heads is None else list(ask.heads)
    call.refuse_large(len(query), len(heads), n_queries if index is None else index.shape[1], n_keys)
    allowed = _allowed(call, index, n_queries, n_keys, query.device)
    scores = _scores(call, query, key, heads, index)
    scores = _mask(scores, allowed)
    if hidden is not None:
        blind = torch.tensor([h in hidden[0] for h in heads], device=query.device)
        scores = scores.masked_fill(blind[:, None, None] & hidden[1][:, None, None, :], float("-inf"))
    pattern, edited = _through_points(call.module, scores)
    if not edited and not ask.through:
        return out
    groups = query.shape[1] // key.shape[1]
    part = pattern.to(value.dtype) @ value[:, [h // groups for h in heads]]
    return _overwrite(out, part.transpose(1, 2), heads, index)


def _scores(
    call: _Call, query: Tensor, key: Tensor, heads: list[int], index: Int[Tensor, "batch row"] | None
) -> Float[Tensor, "batch head row key"]:
    """Scaled dot products in float32 of the chosen heads and rows; the slices are taken before the product."""
    every = len(heads) == query.shape[1]
    groups = query.shape[1] // key.shape[1]
    q = query if every else query[:, heads]
    if index is not None:
        picked = index.clamp(min=0)[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[-1])
        q = q.gather(2, picked)
    scaling = q.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    if every and groups > 1:
        # Query heads of a group side by side: the keys are never repeated.
        batch, _, n, d = q.shape
        folded = q.reshape(batch, key.shape[1], groups * n, d).float() @ key.float().transpose(-1, -2)
        return folded.view(batch, query.shape[1], n, key.shape[-2]) * scaling
    k = key if groups == 1 and every else key[:, [h // groups for h in heads]]
    return q.float() @ k.float().transpose(-1, -2) * scaling


def _allowed(
    call: _Call, index: Int[Tensor, "batch row"] | None, n_queries: int, n_keys: int, device: torch.device
) -> Tensor | None:
    """The mask of the chosen rows, shaped to broadcast over (batch, head, row, key)."""
    if call.mask is not None:
        mask = call.mask[..., :n_keys]
        if index is None:
            return mask
        picked = index.clamp(min=0)[:, None, :, None].expand(-1, mask.shape[1], -1, n_keys)
        return mask.expand(len(index), *mask.shape[1:]).gather(2, picked)
    if not call.causal or n_queries == 1:
        return None
    own = torch.arange(n_queries, device=device)[None] if index is None else index
    return ((own[..., None] + n_keys - n_queries) >= torch.arange(n_keys, device=device))[:, None]


def _mask(scores: Tensor, allowed: Tensor | None) -> Tensor:
    if allowed is None:
        return scores
    shifted = scores if allowed.dtype == torch.bool else scores + allowed
    return shifted.masked_fill(~_open(allowed), float("-inf"))


def _softmax(scores: Tensor) -> Tensor:
    """Softmax in float32; a row that may look at nothing is 0."""
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    return torch.softmax(scores.float(), -1).masked_fill(empty, 0)


def _through_points(module: Any, scores: Tensor) -> tuple[Tensor, bool]:
    """Pass scores, then the pattern they give, to whoever waits; tells whether either was changed."""
    scores_version = scores._version
    given = module.hook_attn_scores(scores)
    edited = given is not scores or given._version != scores_version
    pattern = _softmax(given)
    version = pattern._version
    shown = module.hook_pattern(pattern)
    return shown, edited or shown is not pattern or shown._version != version


def _overwrite(
    out: Tensor, part: Float[Tensor, "batch row head d"], heads: list[int], index: Int[Tensor, "batch row"] | None
) -> Tensor:
    """`out` with the given heads (and rows) replaced."""
    out = out.clone()
    if index is None:
        out[:, :, heads] = part.to(out.dtype)
        return out
    for example, rows in enumerate(index):
        kept = rows >= 0
        out[example, rows[kept][:, None], torch.tensor(heads, device=out.device)[None]] = part[example, kept].to(
            out.dtype
        )
    return out


def _explicit_packed(
    call: _Call, lengths: list[int], query: Tensor, key: Tensor, value: Tensor, out: Tensor, *, through: bool
) -> Tensor:
    """A packed tower: (segment, head, query, key), zero-padded to the longest segment."""
    longest = max(lengths)
    call.refuse_large(len(lengths), query.shape[1], longest, longest)
    scaling = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    scores = query.new_full((len(lengths), query.shape[1], longest, longest), float("-inf"), dtype=torch.float32)
    for i, (q, k) in enumerate(zip(query.split(lengths, 2), key.split(lengths, 2))):
        scores[i, :, : lengths[i], : lengths[i]] = q[0].float() @ k[0].float().transpose(-1, -2) * scaling
    pattern, edited = _through_points(call.module, scores)
    if not edited and not through:
        return out
    parts = [
        (pattern[i, :, :n, :n].to(v.dtype) @ v[0]).transpose(0, 1)
        for i, (n, v) in enumerate(zip(lengths, value.split(lengths, 2)))
    ]
    return torch.cat(parts)[None]
