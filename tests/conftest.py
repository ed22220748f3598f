"""The same suite runs with JAX_PLATFORMS=cpu (8 virtual devices) and, on a machine with a GPU, JAX_PLATFORMS=cuda."""

import gc
import os
import pathlib
import tempfile

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes may share a GPU
if os.environ.get("JAX_PLATFORMS") == "cuda":
    os.environ["JAX_PLATFORMS"] = "cuda,cpu"  # the CPU's jax.lax is what results are compared with
else:
    # Half of the suite's time goes into compiling for the CPU what then runs once: LLVM need not optimise that.
    fast_to_compile = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {fast_to_compile}"

import jax
import pytest

import jaxgpuops
from jaxgpuops import _native, _primitive

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", False)
jax.config.update("jax_default_matmul_precision", "highest")  # GPUs round float32 to TF32 otherwise

# Many tests clear JAX's caches and then compile the same small programs again: more than half the time of some groups.
# Here they find them on disk; each process has a folder of its own.
_compiled = tempfile.TemporaryDirectory(prefix="jaxgpuops-tests-")
jax.config.update("jax_compilation_cache_dir", _compiled.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_configure(config):
    # `python -m pytest` in a source tree imports the tree, which has no compiled modules, and would test the fallback.
    if reason := _native.missing("cpu"):
        folder = pathlib.Path(jaxgpuops.__file__).parent
        raise pytest.UsageError(f"the jaxgpuops in {folder} has no kernels ({reason}); install it and run `pytest`")


def pytest_collection_finish(session):
    # What is imported stays, and JAX traces into many small objects: looking through them all takes 5 % of the time.
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def pytest_report_header(config):
    cuda = _native.missing("cuda") or "kernels built"
    return f"jaxgpuops {jaxgpuops.__version__} in {pathlib.Path(jaxgpuops.__file__).parent}; cuda: {cuda}"


@pytest.fixture
def several_devices():
    """The largest power of two of devices, at most 8; with fewer than two the test is skipped."""
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip(f"partitioning needs two devices or more; {jax.default_backend()} has {len(devices)}")
    return devices[: min(8, 1 << (len(devices).bit_length() - 1))]


@pytest.fixture
def mesh(several_devices):
    """A mesh with two axes, the first of which has more than one device even if there are only two."""
    n = len(several_devices)
    shape = (n // 2, 2) if n > 2 else (2, 1)
    return jax.make_mesh(shape, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=several_devices)


@pytest.fixture
def kernels(monkeypatch):
    """Makes calls take our kernels, also where XLA's own are faster."""
    for kernel in _primitive.KERNELS.values():
        monkeypatch.setattr(kernel, "leaves", None)


@pytest.fixture
def cuda_build(monkeypatch):
    """Lowers for CUDA as a full build does, also in a build without _cuda."""
    if _native.modules["cuda"] is None:
        monkeypatch.setitem(_native.modules, "cuda", _native.modules["cpu"])


@pytest.fixture
def cuda(cuda_build, kernels):
    """Lowers for CUDA as a full build does, and takes our kernels, also where XLA's own are faster."""


@pytest.fixture(params=["", "all"], ids=["kernels", "plain JAX"])
def paths(request, monkeypatch):
    """Runs a test with the kernels, and again with the plain JAX that replaces them elsewhere."""
    monkeypatch.setenv("JAXGPUOPS_DISABLE", request.param)
    jax.clear_caches()
    yield
    jax.clear_caches()
