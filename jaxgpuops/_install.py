"""`install()`: lower JAX's own primitives to our kernels, so that unchanged programs run on them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

# No public API looks up or removes a lowering rule.
from jax._src.interpreters.mlir import _lowerings, _platform_specific_lowerings
from jax.extend.core import Primitive, primitives
from jax.interpreters import mlir

from jaxgpuops import _primitive
from jaxgpuops.lax.scan import CUMULATIVE
from jaxgpuops.lax.topk import argmax_p, top_k_p

_PLATFORMS = ("cpu", "cuda")


class _Route(NamedTuple):
    """How one of JAX's primitives maps to a kernel."""

    primitive: Primitive
    kernel: _primitive.Kernel
    params: Any  # from the primitive's params to the kernel's


def _top_k_params(*, k, axis, is_stable=True):  # jax 0.11 added is_stable; stable is right for both
    return {"k": k, "axis": axis, "largest": True, "sorted": True}


def _cumulative_params(*, axis, reverse):
    return {"axis": axis, "reverse": reverse, "exclusive": False}


_ROUTES = {
    "top_k": _Route(primitives.top_k_p, top_k_p, _top_k_params),
    "argmax": _Route(primitives.argmax_p, argmax_p, lambda *, axes, index_dtype: {"axis": axes[0], "largest": True}),
    "argmin": _Route(primitives.argmin_p, argmax_p, lambda *, axes, index_dtype: {"axis": axes[0], "largest": False}),
    **{
        name: _Route(getattr(primitives, f"{name}_p"), kernel, _cumulative_params)
        for name, kernel in CUMULATIVE.items()
    },
}

_lock = threading.RLock()
_replaced: dict[str, dict[str, Any]] = {}  # name -> platform -> the entry that was there, or None


def _rule(name: str, platform: str, original):
    primitive, kernel, translate = _ROUTES[name]

    def lower(ctx, operand, **params):
        ours = translate(**params)
        choice = kernel.choose(platform, ctx.avals_in, **ours)
        if ctx.module_context.lowering_parameters.for_export:
            why = "an exported program that never mentions jaxgpuops must run without it"
            choice = dataclasses.replace(choice, kernel=None, plan={}, why=why)
        if choice.kernel is None:
            _primitive.record(choice)
            return original(ctx, operand, **params)

        def call(x):
            outs = kernel(x, **ours)
            outs = [jax.lax.convert_element_type(out, a.dtype) for out, a in zip(outs, ctx.avals_out, strict=True)]
            return outs if primitive.multiple_results else outs[0]

        return mlir.lower_fun(call, multiple_results=primitive.multiple_results)(ctx, operand)

    return lower


class Installed:
    """What `install` returns: as a context manager, it uninstalls at the end what that call installed."""

    def __init__(self, names: list[str]):
        self.names = names

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *exc) -> None:
        uninstall(self.names)

    def __repr__(self) -> str:
        return f"Installed({self.names})"


def _names(names: Iterable[str] | str | None) -> list[str]:
    names = list(_ROUTES) if names is None else [names] if isinstance(names, str) else list(names)
    if unknown := [name for name in names if name not in _ROUTES]:
        raise ValueError(f"jaxgpuops.install: names must be among {', '.join(_ROUTES)}; got {', '.join(unknown)}")
    return names


def install(names: Iterable[str] | str | None = None) -> Installed:
    """Routes JAX's own primitives to jaxgpuops kernels, on CPU and CUDA.

    Afterwards `jax.lax.top_k`, `jnp.argmax`, `jnp.cumsum` and whatever is built on them run on our kernels, with JAX's
    own derivative, batching and sharding rules. Calls that no kernel covers go JAX's way as before, and so do programs
    under `jax.export`, which must run where jaxgpuops is not. Functions that are compiled already are compiled again
    when called next: JAX's caches are cleared whenever something changes. Calling it again is harmless.

    Args:
      names: any of ``"top_k"``, ``"argmax"``, ``"argmin"``, ``"cumsum"``, ``"cumprod"``, ``"cummax"``, ``"cummin"``,
        ``"cumlogsumexp"``; all of them by default.

    Returns:
      A context manager that undoes what this call did.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> with jaxgpuops.install(["top_k"]):
    ...     jax.lax.top_k(jnp.array([1.0, 3.0, 2.0]), 2)[1].tolist()
    [1, 2]
    """
    with _lock:
        new = [name for name in _names(names) if name not in _replaced]
        for name in new:
            primitive = _ROUTES[name].primitive
            _replaced[name] = {}
            for platform in _PLATFORMS:
                entry = _platform_specific_lowerings[platform].get(primitive)
                _replaced[name][platform] = entry
                original = (entry or _lowerings[primitive]).rule
                mlir.register_lowering(primitive, _rule(name, platform, original), platform=platform)
        if new:
            jax.clear_caches()
        return Installed(new)


def uninstall(names: Iterable[str] | str | None = None) -> None:
    """Gives JAX's primitives their own lowering rules back; undoes `install`. What is not installed is left alone."""
    with _lock:
        old = [name for name in _names(names) if name in _replaced]
        for name in old:
            primitive = _ROUTES[name].primitive
            for platform, entry in _replaced.pop(name).items():
                if entry is None:
                    del _platform_specific_lowerings[platform][primitive]
                else:
                    _platform_specific_lowerings[platform][primitive] = entry
        if old:
            jax.clear_caches()
