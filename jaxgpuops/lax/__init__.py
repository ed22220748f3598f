"""The primitive tier: names and signatures of `jax.lax`, kernels underneath, forward and reverse mode."""

from jaxgpuops.lax import scan_rules, softmax_rules  # noqa: F401  registers them
from jaxgpuops.lax._reduce import dot, mean
from jaxgpuops.lax._reduce import max as max
from jaxgpuops.lax._reduce import min as min
from jaxgpuops.lax._reduce import sum as sum
from jaxgpuops.lax._scan import cumlogsumexp, cummax, cummin, cumprod, cumsum, linear_scan
from jaxgpuops.lax._softmax import log_softmax, logsumexp, softmax, softmax_cross_entropy
from jaxgpuops.lax._sort import sort
from jaxgpuops.lax._topk import argmax, argmin, top_k
from jaxgpuops.lax._topk_softmax import topk_softmax

# Without max, min and sum, as in `jaxgpuops`.
__all__ = [
    "argmax",
    "argmin",
    "cumlogsumexp",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "dot",
    "linear_scan",
    "log_softmax",
    "logsumexp",
    "mean",
    "softmax",
    "softmax_cross_entropy",
    "sort",
    "top_k",
    "topk_softmax",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "max", "min", "sum"])
