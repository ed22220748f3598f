"""The compiled modules `_cpu` and `_cuda`: imported if they exist, checked, and registered with XLA.

Both modules register the same target names, each for its own platform. What is missing is remembered with the reason,
so that lowering can fall back to plain JAX and say why.
"""

from __future__ import annotations

import functools
import importlib
import os
import pathlib
import re
import warnings
from types import ModuleType

import jax
import jax.ffi
import jaxlib

REBUILD = "JAXGPUOPS_CUDA=ON pip install --force-reinstall --no-deps ."

# JAX's names of lowering platforms, and the names under which XLA registers targets for them.
_XLA_PLATFORM = {"cpu": "cpu", "cuda": "CUDA"}


def running_ffi_api() -> tuple[int, int]:
    """Returns the FFI API version of the installed jaxlib, which the header that it ships says."""
    header = (pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    major, minor = (int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", header)[1]) for part in ("MAJOR", "MINOR"))
    return major, minor


def check_ffi_api(built: tuple[int, int], running: tuple[int, int]) -> None:
    """Raises ImportError if handlers are newer than the running XLA, which accepts its own FFI API version and older
    ones.

    XLA checks this itself when a backend starts, but then a handler that is too new makes JAX's whole CPU backend
    fail. So we check before anything is registered.
    """
    if tuple(built) > tuple(running):
        raise ImportError(
            f"jaxgpuops was built with the XLA FFI API {built[0]}.{built[1]}, but jaxlib {jaxlib.__version__} runs "
            f"{running[0]}.{running[1]} and refuses newer handlers. Upgrade jax and jaxlib, or rebuild jaxgpuops from "
            "its source against the installed jaxlib: pip install --force-reinstall --no-deps --no-build-isolation ."
        )


def _load(name: str) -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module(f"jaxgpuops.{name}"), ""
    except ModuleNotFoundError as error:
        if error.name != f"jaxgpuops.{name}":
            raise
        return None, f"jaxgpuops.{name} was not built"
    except ImportError as error:  # the module was built, but this system cannot load it
        return None, f"jaxgpuops.{name} cannot be loaded: {error}"


modules: dict[str, ModuleType | None] = {}
_absent: dict[str, str] = {}  # platform -> why its module is missing
for _platform in _XLA_PLATFORM:
    modules[_platform], _absent[_platform] = _load(f"_{_platform}")
if modules["cpu"] and not modules["cuda"] and (_reason := modules["cpu"].build_info()["cuda_reason"]):
    _absent["cuda"] += f": {_reason}"

if modules["cpu"] is None:
    warnings.warn(
        f"jaxgpuops was imported from {pathlib.Path(__file__).parent}, where there are no kernels ({_absent['cpu']}): "
        "plain JAX takes their place, which may be many times slower. Install it with pip; if it is installed and this is "
        "its source tree, start Python with -P, or from another directory",
        stacklevel=2,
    )

for _module in filter(None, modules.values()):
    check_ffi_api(_module.ffi_api_version(), running_ffi_api())


def _register() -> None:
    names = set()
    for platform, module in modules.items():
        if module is None:
            continue
        for name, handler in module.targets().items():
            jax.ffi.register_ffi_target(name, handler, platform=_XLA_PLATFORM[platform])
            names.add(name)
    for name in names:  # one part of the sharding contract; `_partition.contract` is the rest
        jax.ffi.register_ffi_target_as_batch_partitionable(name)


_register()


def lowering_platform(backend: str) -> str:
    """Returns the name that lowering has for the platform of a backend: "cuda" for "gpu"."""
    return "cuda" if backend == "gpu" else backend


def targets(platform: str) -> list[str]:
    """Returns the names of the targets that are registered for a platform."""
    module = modules.get(platform)
    return sorted(module.targets()) if module else []


def missing(platform: str, target: str | None = None) -> str:
    """Returns why kernels, or the kernel of one target, cannot be used on a platform; an empty string if they can."""
    if platform not in _XLA_PLATFORM:
        return f"no kernels for platform {platform}"
    if modules[platform] is None:
        return _absent[platform]
    # The module _cpu plans the CUDA calls, too, so that they can be planned where there is no GPU.
    if modules["cpu"] is None:
        return _absent["cpu"]
    if target and target not in modules[platform].targets():
        return f"jaxgpuops._{platform} has no {target}"
    if platform == "cuda" and (capability := device_capability()):
        architectures = modules["cuda"].build_info()["cuda_architectures"]
        if not covers(architectures, capability):
            return (
                f"jaxgpuops._cuda was compiled for {architectures}, which does not run on a GPU of compute capability "
                f"{capability / 10}, but CUDAARCHS={capability}-real would"
            )
    return ""


# Names of functions that differ from the names of their kernels.
_KERNELS_OF = {
    "top_k": ["topk"],
    "argmin": ["argmax"],
    "mean": ["sum"],
    "softmax_cross_entropy": ["cross_entropy", "cross_entropy_grad"],
}


def disabled(op: str) -> bool:
    """Whether JAXGPUOPS_DISABLE (names of kernels or functions with commas between, or ``all``) names the op.

    Read at each lowering.
    """
    names = _disabled(os.environ.get("JAXGPUOPS_DISABLE", ""))
    return op in names or "all" in names


@functools.cache  # cached, so that it warns once
def _disabled(value: str) -> frozenset[str]:
    names = {name.strip().lower() for name in value.split(",")} - {""}
    kernels = {target.removeprefix("jaxgpuops.") for target in targets("cpu")}
    known = kernels | _KERNELS_OF.keys() | {"all"}
    if kernels and (unknown := sorted(names - known)):
        warnings.warn(
            f"JAXGPUOPS_DISABLE: there is no {', '.join(unknown)}; there are {', '.join(sorted(known))}", stacklevel=2
        )
    return frozenset(kernel for name in names for kernel in _KERNELS_OF.get(name, [name]))


def covers(architectures: str, capability: int) -> bool:
    """Returns whether code for a list of CMake's CUDA architectures runs on a GPU of that compute capability."""

    def runs(architecture: str) -> bool:
        number, _, kind = architecture.partition("-")
        if not number.isdigit():  # a word such as "native" or "all-major": assume that it covers the GPU
            return True
        same = int(number) // 10 == capability // 10  # unlike machine code, PTX also runs on later generations
        return int(number) <= capability and (same or kind != "real")

    return any(map(runs, architectures.split(";")))


@functools.cache
def device_capability() -> int | None:
    """Returns the compute capability of the GPU at hand, as 90 for 9.0, or None without a GPU."""
    try:
        return int(jax.local_devices(backend="cuda")[0].compute_capability.replace(".", ""))
    except RuntimeError:  # this process has no CUDA backend
        return None


def compute_capability() -> int:
    """Returns the compute capability to plan for, as 90 for 9.0: that of an H200 if there is no GPU. The handlers obey
    the same environment variable."""
    if pretended := os.environ.get("JAXGPUOPS_COMPUTE_CAPABILITY"):
        return int(pretended)
    return device_capability() or 90
