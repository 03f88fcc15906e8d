"""Pure functions: tensors in, tensor out, the formula beside each."""

from mmlens.metrics.ram import lift, macro_mean, ram

__all__ = ["lift", "macro_mean", "ram"]
