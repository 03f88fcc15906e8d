"""What can be told of an unknown model by looking at its modules: for the error that asks for a family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmlens.families.base import Family, Stack

_TOWER_WORDS = ("vis", "image", "siglip", "clip", "vit")
_PROJECTOR_WORDS = ("projector", "connector", "merger", "mlp1", "resampler", "aligner", "bridge")
_ROLES = {
    "attn": ("attn", "attention"),
    "mlp": ("mlp", "ffn", "feed_forward", "moe"),
    "norms": ("norm", "ln"),
}


def _block_lists(model: Any) -> Iterator[tuple[str, Any]]:
    """Lists of modules of one class that hold an attention module."""
    for path, module in model.named_modules():
        alike = type(module).__name__ == "ModuleList" and len(module) > 0 and len({type(b) for b in module}) == 1
        if alike and any("attn" in n or "attention" in n for n, _ in module[0].named_children()):
            yield path, module


def _children(block: Any) -> dict[str, list[str]]:
    """Names of a block's direct children by the part that they seem to be."""
    names = [n for n, _ in block.named_children()]
    found = {role: [n for n in names if any(w in n.lower() for w in words)] for role, words in _ROLES.items()}
    found["attn"] = [n for n in found["attn"] if n not in found["norms"]]
    return found


def survey(model: Any) -> str:
    """Text blocks, tower and projector as far as names tell, and what could not be named."""
    told: list[str] = []
    missing: list[str] = []
    towers: list[tuple[str, Any]] = []
    decoders: list[tuple[str, Any]] = []
    for path, blocks in _block_lists(model):
        (towers if any(w in path.lower() for w in _TOWER_WORDS) else decoders).append((path, blocks))
    for what, found in (("text blocks", decoders), ("picture tower", towers)):
        if not found:
            missing.append(what)
        for path, blocks in found:
            parts = _children(blocks[0])
            told.append(
                f"{what} {path} ({len(blocks)} x {type(blocks[0]).__name__}: "
                + ", ".join(f"{role} {'/'.join(names) or '?'}" for role, names in parts.items())
                + ")"
            )
    projectors = [
        path for path, _ in model.named_modules() if any(w in path.rsplit(".", 1)[-1].lower() for w in _PROJECTOR_WORDS)
    ]
    told += [f"projector {path}" for path in projectors[:3]]
    missing += [] if projectors else ["projector"]
    text = "; ".join(told) or "no list of blocks with attention"
    return text + (f"; could not be named: {', '.join(missing)}" if missing else "")


def _stack_paths(model: Any, stack: Stack) -> Iterator[str]:
    yield stack.blocks
    try:
        first = model.get_submodule(stack.blocks)[0]
    except (AttributeError, IndexError, TypeError):
        return
    parts = [stack.attn, *(f"{stack.attn}.{p}" for p in (*stack.qkv, stack.out)), stack.ln1, stack.ln2, stack.mlp]
    parts += [p for p in (stack.attn_added, stack.mlp_added) if p is not None]
    for part in parts:
        if not has_module(first, part):
            yield f"{stack.blocks}.0.{part}"


def has_module(root: Any, path: str) -> bool:
    """Whether a dotted path leads to a module."""
    try:
        root.get_submodule(path)
    except AttributeError:
        return False
    return True


def missing_paths(model: Any, family: Family) -> list[str]:
    """Paths that a family names and a model does not have."""
    wanted = [family.language_model, family.embed, family.final_norm, family.unembed, family.projector]
    wanted += [family.deepstack] if family.deepstack is not None else []
    for stack in (family.decoder, family.tower):
        wanted += list(_stack_paths(model, stack))
    return [path for path in dict.fromkeys(wanted) if not has_module(model, path)]
