"""Pure functions: tensors in, tensor out, the formula beside each."""

from mmlens.metrics.agreement import (
    concentration_share,
    jaccard,
    layer_spread,
    spearman,
    top_k,
    topk_overlap,
    universal_heads,
)
from mmlens.metrics.ram import lift, macro_mean, ram
from mmlens.metrics.residual import erank, grassmann, key_region_ratio, mixig, rid, rid_parts, tme

__all__ = [
    "concentration_share",
    "erank",
    "grassmann",
    "jaccard",
    "key_region_ratio",
    "layer_spread",
    "lift",
    "macro_mean",
    "mixig",
    "ram",
    "rid",
    "rid_parts",
    "spearman",
    "tme",
    "top_k",
    "topk_overlap",
    "universal_heads",
]
