"""What is built, what is registered, and which kernel a call takes."""

from __future__ import annotations

import dataclasses
import platform as _platform
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.export
import jaxlib

from jaxgpuops import _arguments, _native, _partition
from jaxgpuops._primitive import KERNELS, Lowering, recording


def explain(
    fn: Callable, *args: Any, platform: Literal["cpu", "cuda", "gpu"] | None = None, **kwargs: Any
) -> list[Lowering]:
    """Tells which kernels a function takes.

    Args:
      fn: a function of arrays. It is traced and lowered, not run.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`.
      platform: "cpu", "cuda" or "gpu" (the same), or None for the platform of JAX. No GPU is needed to ask about
        "cuda": plans are then made for an H200.

    Returns:
      A list with one record for each jaxgpuops call that ``fn`` lowers. A record has ``op``, ``shape``, ``dtype``,
      ``params``, ``platform``, ``kernel`` (the custom call; None for plain JAX), ``plan`` (what the CUDA kernel's
      planner chose) and ``why`` (the reason for plain JAX). Equal calls are lowered, and listed, once. A call that
      devices share, and that is made of other kernels, has no ``kernel``; ``why`` says so.

    In a program for several devices of this machine, which is then compiled too, calls that XLA partitions also have
    ``part``, the shape of each device's part, and ``collectives``, the bytes that a device receives for the call, by
    kind: ``{}`` if nothing moves. Arrays that XLA gathers because the call needs them whole are not counted; ``part``
    is then the whole shape. With an abstract mesh, ``part`` is None: a program for no devices is not compiled.

    Raises:
      TypeError: for a ``fn`` that cannot be called.
      ValueError: for another ``platform``.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> [call] = jaxgpuops.explain(lambda x: jaxgpuops.topk(x, 3), jax.ShapeDtypeStruct((8, 100), jnp.float32))
    >>> call.op, call.shape, call.dtype
    ('topk', (8, 100), 'float32')
    """

    if not callable(fn):
        raise TypeError(f"jaxgpuops.explain: fn must be a function, got {fn!r}")
    if platform is not None:
        platform = _arguments.choice("jaxgpuops.explain", "platform", platform, ("cpu", "cuda", "gpu"))
    lowered_for = _native.lowering_platform(platform or jax.default_backend())

    def fresh(*args, **kwargs):  # a new function, so that none of JAX's caches hides the lowering
        return fn(*args, **kwargs)

    # A new name, so that a compilation cache on disk does not hide the partitioning.
    fresh.__name__ = f"explained_{time.time_ns()}"
    with recording() as lowerings:
        lowered = jax.jit(fresh).trace(*args, **kwargs).lower(lowering_platforms=(lowered_for,))
        if any(call.partitioned for call in lowerings) and lowered_for == _native.lowering_platform(
            jax.default_backend()
        ):
            count = len(lowerings)
            _complete(lowerings, lowered)
            del lowerings[count:]  # these are the calls that each device makes
    return lowerings


def _complete(lowerings, lowered) -> None:
    """Compiles the program and adds what XLA's partitioner makes of the calls."""

    def listen(choice, part):
        if choice in lowerings:
            parts = {"part": part.shape, "collectives": dict(part.collectives)}
            lowerings[lowerings.index(choice)] = dataclasses.replace(choice, **parts)

    _partition.listeners.append(listen)
    try:
        lowered.compile()
    except RuntimeError as error:
        # An abstract mesh has no devices, so JAX has nothing to compile for, and the calls have no parts yet. JAX then
        # raises a bare RuntimeError, which only its text distinguishes from a failure.
        if "device_assignment" not in str(error):
            raise
    finally:
        _partition.listeners.remove(listen)


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Returns the checks that `jax.export.export` must disable so that it accepts our custom calls.

    The names and signatures of targets are stable within a minor version of jaxgpuops.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> best = jax.jit(lambda x: jaxgpuops.topk(x, 2).values)
    >>> exported = jax.export.export(best, disabled_checks=jaxgpuops.export_checks())(jnp.arange(4.0))
    >>> exported.call(jnp.array([3.0, 1.0, 4.0, 1.0])).tolist()
    [4.0, 3.0]
    """
    return [jax.export.DisabledSafetyCheck.custom_call(kernel.target) for kernel in KERNELS.values()]


def info() -> dict[str, str]:
    """Versions, builds, targets and devices by name, as `python -m jaxgpuops` prints them."""
    from jaxgpuops import __version__

    facts = {
        "jaxgpuops": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": _platform.python_version(),
        "FFI API of jaxlib": "{}.{}".format(*_native.running_ffi_api()),
    }
    for platform, module in _native.modules.items():
        facts[f"{platform} kernels"] = _native.missing(platform) or ", ".join(_native.targets(platform))
        if module is not None:
            build = module.build_info()
            facts[f"{platform} build"] = ", ".join(
                [
                    "FFI API {}.{}".format(*module.ffi_api_version()),
                    build["compiler"],
                    *([f"nvcc {build['cuda_version']}", build["cuda_architectures"]] if platform == "cuda" else []),
                ]
            )
    disabled = [name for name in KERNELS if _native.disabled(name)]
    facts["disabled"] = ", ".join(disabled) or "nothing"
    facts["devices"] = ", ".join(f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices())
    return facts
