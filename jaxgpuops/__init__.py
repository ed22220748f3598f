"""Row operations at memory speed, as JAX primitives with the semantics of `jax.lax`."""

import contextlib as _contextlib
from importlib.metadata import PackageNotFoundError, version

from jax import export as _export

from jaxgpuops import lax
from jaxgpuops._inspect import explain, export_checks
from jaxgpuops._install import install, uninstall
from jaxgpuops.ops.broadcast import expand, where
from jaxgpuops.ops.count import bincount, histogram
from jaxgpuops.ops.moe import (
    MoEExchange,
    MoELosses,
    MoEPlan,
    RaggedSizes,
    moe_combine,
    moe_dispatch,
    moe_losses,
    moe_plan,
    moe_route,
)
from jaxgpuops.ops.reduce import dot, mean
from jaxgpuops.ops.reduce import max as max
from jaxgpuops.ops.reduce import min as min
from jaxgpuops.ops.reduce import sum as sum
from jaxgpuops.ops.scan import cumlogsumexp, cummax, cummin, cumprod, cumsum, linear_scan
from jaxgpuops.ops.search import compact, nonzero, searchsorted, unique
from jaxgpuops.ops.segments import (
    segment_logsumexp,
    segment_max,
    segment_min,
    segment_softmax,
    segment_sum,
    take,
)
from jaxgpuops.ops.select import kth_value, median, partition, quantile
from jaxgpuops.ops.softmax import log_softmax, logsumexp, softmax, softmax_cross_entropy
from jaxgpuops.ops.sort import argsort, sort, sort_key_val
from jaxgpuops.ops.topk import TopK, topk
from jaxgpuops.ops.topk_softmax import TopKSoftmax, topk_softmax

try:
    __version__ = version("jaxgpuops")
except PackageNotFoundError:  # the package is used from a source tree
    __version__ = "0+unknown"

# Exported programs may have these as results, or as arguments.
for _result in (MoEExchange, MoELosses, MoEPlan, RaggedSizes, TopK, TopKSoftmax):
    with _contextlib.suppress(ValueError):  # registered before this package was reloaded
        _export.register_namedtuple_serialization(_result, serialized_name=f"jaxgpuops.{_result.__name__}")

# The names that `from jaxgpuops import *` gives: all public ones except max, min and sum, which would hide the
# builtins.
__all__ = [
    "MoEExchange",
    "MoELosses",
    "MoEPlan",
    "RaggedSizes",
    "TopK",
    "TopKSoftmax",
    "__version__",
    "argsort",
    "bincount",
    "compact",
    "cumlogsumexp",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "dot",
    "expand",
    "explain",
    "export_checks",
    "histogram",
    "install",
    "kth_value",
    "lax",
    "linear_scan",
    "log_softmax",
    "logsumexp",
    "mean",
    "median",
    "moe_combine",
    "moe_dispatch",
    "moe_losses",
    "moe_plan",
    "moe_route",
    "nonzero",
    "partition",
    "quantile",
    "searchsorted",
    "segment_logsumexp",
    "segment_max",
    "segment_min",
    "segment_softmax",
    "segment_sum",
    "softmax",
    "softmax_cross_entropy",
    "sort",
    "sort_key_val",
    "take",
    "topk",
    "topk_softmax",
    "uninstall",
    "unique",
    "where",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "max", "min", "sum"])
