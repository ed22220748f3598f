"""Row operations at memory speed, as JAX primitives that behave exactly like `jax.lax`."""

from importlib.metadata import PackageNotFoundError, version

from jaxgpuops import lax
from jaxgpuops._inspect import explain, export_checks
from jaxgpuops._install import install, uninstall
from jaxgpuops.ops.count import (
    bincount,
    histogram,
    segment_logsumexp,
    segment_max,
    segment_min,
    segment_softmax,
    segment_sum,
    take,
)
from jaxgpuops.ops.reduce import dot, max, mean, min, sum
from jaxgpuops.ops.scan import cumlogsumexp, cummax, cummin, cumprod, cumsum, linear_scan
from jaxgpuops.ops.softmax import log_softmax, logsumexp, softmax, softmax_cross_entropy
from jaxgpuops.ops.topk import TopK, topk
from jaxgpuops.ops.topk_softmax import TopKSoftmax, topk_softmax

try:
    __version__ = version("jaxgpuops")
except PackageNotFoundError:  # used from a source tree
    __version__ = "0+unknown"

__all__ = [
    "TopK",
    "TopKSoftmax",
    "__version__",
    "bincount",
    "cumlogsumexp",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "dot",
    "explain",
    "export_checks",
    "histogram",
    "install",
    "lax",
    "linear_scan",
    "log_softmax",
    "logsumexp",
    "max",
    "mean",
    "min",
    "segment_logsumexp",
    "segment_max",
    "segment_min",
    "segment_softmax",
    "segment_sum",
    "softmax",
    "softmax_cross_entropy",
    "sum",
    "take",
    "topk",
    "topk_softmax",
    "uninstall",
]
