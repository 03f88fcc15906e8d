"""Interventions: context managers that nest and undo themselves."""

from mmlens.interventions.ablate import MODES, ablate

__all__ = ["MODES", "ablate"]
