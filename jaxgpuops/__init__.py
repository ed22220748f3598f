"""Row operations at memory speed, as JAX primitives that behave exactly like `jax.lax`."""

from importlib.metadata import PackageNotFoundError, version

from jaxgpuops import lax
from jaxgpuops._inspect import explain, export_checks
from jaxgpuops._install import install, uninstall
from jaxgpuops.ops.scan import cumlogsumexp, cummax, cummin, cumprod, cumsum, linear_scan
from jaxgpuops.ops.topk import TopK, topk

try:
    __version__ = version("jaxgpuops")
except PackageNotFoundError:  # used from a source tree
    __version__ = "0+unknown"

__all__ = [
    "TopK",
    "__version__",
    "cumlogsumexp",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "explain",
    "export_checks",
    "install",
    "lax",
    "linear_scan",
    "topk",
    "uninstall",
]
