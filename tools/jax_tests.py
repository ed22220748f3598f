"""Runs JAX's own tests of everything that `jaxgpuops.install()` can replace, with it replaced.

    python -P tools/jax_tests.py <source tree of JAX, of the version that is installed> [arguments for pytest]

The tree is a checkout of github.com/jax-ml/jax at the tag of that version (jax-v0.10.2, for instance): JAX's wheels
have no tests. Needs pytest and absl-py. This file is the plugin that pytest loads, too.
"""

import os
import pathlib
import subprocess
import sys

FILES = (
    *("lax_test", "lax_autodiff_test", "lax_vmap_test", "lax_numpy_reducers_test", "lax_numpy_test", "lax_scipy_test"),
    *("lax_control_flow_test", "batching_test", "nn_test", "pjit_test", "shard_map_test", "shape_poly_test"),
    *("jet_test", "custom_api_test", "array_api_test", "scipy_stats_test", "random_test"),
    *("lax_numpy_setops_test", "lax_numpy_indexing_test"),
)
NAMES = (  # upper or lower case does not matter
    *("op_k", "topk", "argm", "cum", "softmax", "logsumexp", "log_sum_exp"),
    # Sorts, and what is built on them and on segments.
    *("sort", "unique", "digitize", "bincount", "histogram", "segment"),
    *("quantile", "percentile", "median", "partition"),
)
# This test counts the arrays that JAX's softmax keeps for its derivative; ours keeps another number.
NOT_OURS = "testSoftmaxGradFlag"


def pytest_configure(config):
    import jaxgpuops
    from jaxgpuops._install import _NAMES, _ROUTES

    jaxgpuops.install([*_ROUTES, *_NAMES])


def main(tree: str, *arguments: str) -> int:
    tests = pathlib.Path(tree) / "tests"
    here = str(pathlib.Path(__file__).resolve().parent)
    # How many cases run of each test that samples shapes and dtypes.
    environment = {"JAX_NUM_GENERATED_CASES": "40"} | os.environ
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), here]))
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "jax_tests", "-p", "no:cacheprovider"]
    command += [str(tests / f"{name}.py") for name in FILES] + ["-k", f"({' or '.join(NAMES)}) and not {NOT_OURS}"]
    return subprocess.run([*command, *arguments], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
