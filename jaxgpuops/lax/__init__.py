"""The primitive tier: names and signatures of `jax.lax`, kernels underneath, forward and reverse mode."""

from jaxgpuops.lax import softmax_rules  # noqa: F401  registers them
from jaxgpuops.lax.reduce import dot, max, mean, min, sum
from jaxgpuops.lax.scan import cumlogsumexp, cummax, cummin, cumprod, cumsum, linear_scan
from jaxgpuops.lax.softmax import log_softmax, logsumexp, softmax, softmax_cross_entropy
from jaxgpuops.lax.sort import sort
from jaxgpuops.lax.topk import argmax, argmin, top_k
from jaxgpuops.lax.topk_softmax import topk_softmax

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
    "max",
    "mean",
    "min",
    "softmax",
    "softmax_cross_entropy",
    "sort",
    "sum",
    "top_k",
    "topk_softmax",
]
