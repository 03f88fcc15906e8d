"""What is particular to each model family, one file each; `find_family` picks the one for a checkpoint."""

from __future__ import annotations

from typing import Any

from mmlens.errors import GeometryError, OptionError, UnknownFamilyError
from mmlens.families.base import Family, Geometry, Source
from mmlens.families.discover import missing_paths, survey
from mmlens.families.gemma3 import GEMMA3
from mmlens.families.internvl import INTERNVL
from mmlens.families.llava import LLAVA
from mmlens.families.llava_next import LLAVA_NEXT
from mmlens.families.llava_onevision import LLAVA_ONEVISION
from mmlens.families.paligemma import PALIGEMMA
from mmlens.families.qwen_vl import QWEN_FAMILIES
from mmlens.families.smolvlm import IDEFICS_FAMILIES

FAMILIES: tuple[Family, ...] = (
    *QWEN_FAMILIES,
    LLAVA,
    LLAVA_NEXT,
    LLAVA_ONEVISION,
    INTERNVL,
    GEMMA3,
    *IDEFICS_FAMILIES,
)

__all__ = ["FAMILIES", "GEOMETRIES", "Family", "Geometry", "Source", "find_family", "find_geometry"]

GEOMETRIES: tuple[Geometry, ...] = (*FAMILIES, PALIGEMMA)


def find_geometry(processor: Any) -> Geometry:
    """The geometry of a processor, by its class; raises GeometryError for one that no family names."""
    classes = [c.__name__ for c in type(processor).__mro__]
    for known in GEOMETRIES:
        if known.processors and known.processors[0] in classes:
            return known
    raise GeometryError(
        f"a processor given as {classes[0]}",
        expected=f"one of {', '.join(g.processors[0] for g in GEOMETRIES if g.processors)}",
        fix="load it with transformers.AutoProcessor.from_pretrained",
    )


def find_family(model: Any, family: Family | None = None) -> Family:
    """The family that describes a Hugging Face model: the one given, or the one that names the model's class.

    Raises
    ------
    UnknownFamilyError
        For a class that no family names, or a family whose paths this model does not have; the message lists what
        was found in the model.
    """
    name = type(model).__name__
    if not hasattr(model, "named_modules"):
        raise UnknownFamilyError(
            f"a model given as {name}", expected="a Hugging Face model", fix="load it first, or use from_pretrained"
        )
    if family is not None:
        if not isinstance(family, Family):
            raise OptionError(
                f"family={family!r}",
                expected="an instance of a mmlens.families.base.Family subclass",
                fix="family=MyFamily(); see docs/add-a-family.md",
            )
        missing = missing_paths(model, family)
        if missing:
            raise UnknownFamilyError(
                f"the family {family.name!r} names modules that {name} does not have: {', '.join(missing)}",
                expected=f"paths of this model; found in it: {survey(model)}",
                fix="correct those paths in the family",
            )
        return family
    for known in FAMILIES:
        if name in known.architectures:
            return known
    raise UnknownFamilyError(
        f"{name} is no model that mmlens knows; found in it: {survey(model)}",
        expected=f"one of {', '.join(a for f in FAMILIES for a in f.architectures)}",
        fix="write its family, one file that says where these parts are, and pass it: "
        "HookedVLM.from_model(model, processor, family=MyFamily()); see docs/add-a-family.md",
    )
