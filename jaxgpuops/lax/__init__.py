"""The primitive tier: names and signatures of `jax.lax`, kernels underneath, forward and reverse mode."""

from jaxgpuops.lax.scan import cumlogsumexp, cummax, cummin, cumprod, cumsum, linear_scan
from jaxgpuops.lax.topk import argmax, argmin, top_k

__all__ = [
    "argmax",
    "argmin",
    "cumlogsumexp",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "linear_scan",
    "top_k",
]
