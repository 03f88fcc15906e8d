"""What is particular to each model family, one file each; `find_family` picks the one for a checkpoint."""

from __future__ import annotations

from typing import Any

from mmlens.errors import UnknownFamilyError
from mmlens.families.base import Family
from mmlens.families.llava import LLAVA
from mmlens.families.qwen_vl import QWEN3_VL

FAMILIES: tuple[Family, ...] = (QWEN3_VL, LLAVA)


def find_family(model: Any) -> Family:
    """The family that describes a Hugging Face model, by its class name."""
    name = type(model).__name__
    if not hasattr(model, "named_modules"):
        raise UnknownFamilyError(
            f"a model given as {name}", expected="a Hugging Face model", fix="load it first, or use from_pretrained"
        )
    for family in FAMILIES:
        if name in family.architectures:
            return family
    paths = {path for path, module in model.named_modules() if type(module).__name__ == "ModuleList"}
    known = ", ".join(a for f in FAMILIES for a in f.architectures)
    raise UnknownFamilyError(
        f"{name} is no model that mmlens knows; its block lists are {', '.join(sorted(paths)) or 'none'}",
        expected=f"one of {known}",
        fix="what is missing is a family: which list is the decoder, which the picture tower, and where the projector "
        "is; see docs/families.md for how to write one",
    )
