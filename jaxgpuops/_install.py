"""`install()`: lower JAX's own primitives to our kernels, so that unchanged programs run on them.

Softmax, log_softmax, logsumexp and the segment operations are functions in JAX, not primitives. Only the names of these
functions can be replaced.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import numbers
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.nn
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jaxgpuops import _primitive, lax
from jaxgpuops._arguments import COMPLEX, FLOATS, FLOATS8, INTEGERS, ORDERED_DTYPES
from jaxgpuops._private import Primitive, lowerings, platform_lowerings, uncacheable
from jaxgpuops.lax._segments import SEGMENT_KERNELS, segments_of_rows
from jaxgpuops.lax._sort import MAX_KEYS, sort_operands, sort_p
from jaxgpuops.lax._topk import argmax_p, top_k_p
from jaxgpuops.lax.scan_primitives import CUMULATIVE

_PLATFORMS = ("cpu", "cuda")


class _Route(NamedTuple):
    """How one of JAX's primitives maps to a kernel."""

    primitive: Primitive
    kernel: _primitive.Kernel
    params: Any  # a function from the primitive's params to the kernel's
    # Maps the operands' types and the primitive's params to a function that calls the kernel, or to the reason why
    # there is none.
    call: Any = None


def _top_k_params(*, k, axis, is_stable=True):  # jax 0.11 added is_stable; a stable order is right for both
    return {"k": k, "axis": axis, "largest": True, "sorted": True}


def _argmax_params(*, axes, index_dtype, largest):
    return {"axis": int(axes[0]), "largest": largest}  # under vmap, JAX makes a NumPy integer of it


def _cumulative_params(*, axis, reverse):
    return {"axis": axis, "reverse": reverse, "exclusive": False}


def _sort_params(*, dimension, is_stable, num_keys):
    return {"axis": dimension, "descending": False, "values": True, "indices": True, "kth": -1}


def _sort_call(avals, *, dimension, is_stable, num_keys):
    keys = {aval.dtype for aval in avals[:num_keys]}
    if num_keys > MAX_KEYS:
        return f"it has more than {MAX_KEYS} keys"
    if any(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) for aval in avals):
        return "it moves random keys"
    if not keys <= ORDERED_DTYPES | COMPLEX:
        return f"no kernel takes all of {', '.join(sorted(map(str, keys)))}"
    return lambda *operands: sort_operands(operands, dimension, num_keys)[0]


class _Pays(NamedTuple):
    """The least sizes of a call for which a kernel on a GPU makes whole programs faster."""

    bytes: int = 0  # bytes of the operand
    length: int = 1  # length of the axis
    inner: int = 1  # the least product of the dimensions after the axis, if it is not 1


# What `install()` routes by default. XLA fuses its own argmax and short scans with the operations around them. A kernel
# of ours cannot be fused: the operand is written and read once more, and the host needs some 10 us for the additional
# launches. Measured on an H100 with scans between elementwise functions: for axes of at least 64 positions XLA makes
# three kernels or more, and takes 1.2 to 1.5 times as long as ours from 16 MiB on (cumlogsumexp: 3 times, from 1 MiB
# on); with shorter axes, or few channels, our kernels take longer. XLA cannot fuse its own top-k either. An operation
# that is not listed here is routed only if asked for by name, and then always.
_PAYS = {
    "top_k": _Pays(),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), _Pays(16 << 20, 64, 32)),
    "cumlogsumexp": _Pays(1 << 20, 16, 32),
}

_ROUTES = {
    "top_k": _Route(jax.lax.top_k_p, top_k_p, _top_k_params),
    "argmax": _Route(jax.lax.argmax_p, argmax_p, functools.partial(_argmax_params, largest=True)),
    "argmin": _Route(jax.lax.argmin_p, argmax_p, functools.partial(_argmax_params, largest=False)),
    **{name: _Route(getattr(jax.lax, f"{name}_p"), kernel, _cumulative_params) for name, kernel in CUMULATIVE.items()},
    "sort": _Route(jax.lax.sort_p, sort_p, _sort_params, _sort_call),
}


# Their kernels count the places of an axis by int32. (So does JAX's top-k, which refuses longer ones.)
_INDEXED = ("argmax", "argmin", "sort")


class _Name(NamedTuple):
    """A function of JAX, the modules that have it, and our function that replaces it, which also has forward mode."""

    places: tuple[str, ...]  # names of the modules, which are imported when the function is asked for
    ours: Callable


_NAMES = {
    "softmax": _Name(("jax.nn",), lax.softmax),
    "log_softmax": _Name(("jax.nn",), lax.log_softmax),
    "logsumexp": _Name(("jax.nn", "jax.scipy.special"), lax.logsumexp),
    **{name: _Name(("jax.ops",), functools.partial(segments_of_rows, name)) for name in SEGMENT_KERNELS},
}

_lock = threading.RLock()
# For each name that is installed: the replaced lowering (or None) by platform, or the replaced function by module.
_replaced: dict[str, dict[Any, Any]] = {}
_asked: set[str] = set()  # installed names that were asked for by name


def _function(name: str, original: Callable) -> Callable:
    signature = inspect.signature(original)
    axis_default = signature.parameters["axis"].default

    @functools.wraps(original)
    def function(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        x, axis = next(iter(given.values())), given.get("axis", axis_default)
        options = {k: v for k, v in list(given.items())[1:] if v is not signature.parameters[k].default and k != "axis"}
        where = options.get("where", True)
        # With ``where``, JAX's softmax of integers returns the default float dtype; our softmax does not, so integers
        # are not routed.
        dtypes = FLOATS | FLOATS8 if "where" in options else FLOATS | FLOATS8 | INTEGERS
        covered = options.keys() <= {"where", "keepdims"} and jnp.result_type(x) in dtypes
        # JAX takes any keepdims that is true or false, and an array of axes.
        covered = covered and isinstance(options.get("keepdims", True), bool) and not isinstance(axis, np.ndarray)
        if not covered or jnp.result_type(where) != bool or jnp.ndim(where) > jnp.ndim(x):
            return original(*args, **kwargs)
        return _NAMES[name].ours(x, axis=axis, **options)

    return function


def _segments(name: str, original: Callable) -> Callable:
    """Returns our function in place of JAX's. It ignores `unique_indices`, since our kernels need no such promise."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def function(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        data, ids, length, is_sorted, _, *rest = given.arguments.values()
        covered = (
            all(option is None for option in rest)
            and isinstance(length, numbers.Integral)
            and 0 <= int(length) < 1 << 31
            and jnp.result_type(data) in FLOATS | INTEGERS
            and jnp.result_type(ids) in INTEGERS
            and jnp.ndim(ids) == 1
            and jnp.shape(data)[:1] == jnp.shape(ids)
        )
        if not covered:
            return original(*args, **kwargs)
        return _NAMES[name].ours(jnp.asarray(data), jnp.asarray(ids), int(length), bool(is_sorted))

    return function


def _does_not_pay(name: str, operand, axis: int) -> str:
    """Returns why a kernel would not make the call faster, or an empty string if it would."""
    least, length, inner = _PAYS[name], operand.shape[axis], math.prod(operand.shape[axis + 1 :])
    if jax.export.is_symbolic_dim(operand.size):
        return ""
    if operand.size * operand.dtype.itemsize < least.bytes:
        what = f"less than {least.bytes >> 20} MiB"
    elif length < least.length:
        what = f"less than {least.length} places"
    elif 1 < inner < least.inner:
        what = f"less than {least.inner} numbers a place"
    else:
        return ""
    return f"XLA fuses a {name} of {what} with what stands around it; install({name!r}) routes all"


def _replaceable(primitive) -> tuple[str | None, ...]:
    """Returns the platforms whose lowering of a primitive must be replaced; None stands for the one of all platforms
    that have none of their own. A rule for each platform is avoided, since exports for several platforms may fail with
    these (`Kernel._lower_uncached`)."""
    own = any(primitive in _rules_of(platform) for platform in _PLATFORMS)
    return _PLATFORMS if own else (None,)


def _rules_of(platform: str | None) -> dict:
    return lowerings if platform is None else platform_lowerings[platform]


def _rule(name: str, original):
    primitive, kernel, translate, call_of = _ROUTES[name]

    def lower(ctx, *operands, **params):
        platforms = ctx.platforms or ctx.module_context.platforms
        if len(platforms) > 1 or platforms[0] not in _PLATFORMS:
            return original(ctx, *operands, **params)
        [platform] = platforms
        ours = translate(**params)
        call = call_of(ctx.avals_in, **params) if call_of else functools.partial(kernel, **ours)
        x = ctx.avals_in[0]
        length = x.shape[ours["axis"]]
        if name in _INDEXED and isinstance(length, int) and length >= 1 << 31:
            call = "int32 cannot index so long an axis"
        if call_of and x.dtype in COMPLEX:  # the kernel sorts real and imaginary parts
            x = x.update(dtype=np.dtype(f"float{4 * x.dtype.itemsize}"))
        choice = kernel.choose(platform, [x], partitioned=_primitive.asks_partitioner(ctx), **ours)
        if isinstance(call, str):
            choice = dataclasses.replace(choice, kernel=None, plan={}, why=call)
        if (
            platform == "cuda"
            and choice.kernel
            and name not in _asked
            and (why := _does_not_pay(name, x, ours["axis"]))
        ):
            choice = dataclasses.replace(choice, kernel=None, plan={}, why=why)
        if ctx.module_context.lowering_parameters.for_export:
            why = "an exported program that never mentions jaxgpuops must run without it"
            choice = dataclasses.replace(choice, kernel=None, plan={}, why=why)
        if choice.kernel is None or isinstance(call, str):
            _primitive.record(choice)
            return original(ctx, *operands, **params)

        def converted(*xs):
            outs = call(*xs)
            outs = [jax.lax.convert_element_type(out, a.dtype) for out, a in zip(outs, ctx.avals_out, strict=True)]
            return outs if primitive.multiple_results else outs[0]

        return mlir.lower_fun(converted, multiple_results=primitive.multiple_results)(ctx, *operands)

    return lower


class Installed:
    """The result of `install`. As a context manager, it undoes at its end what that call did."""

    def __init__(self, names: list[str], asked: list[str]):
        self.names = names
        self._asked = asked  # includes names that an earlier call had installed by default

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *exc) -> None:
        uninstall(self.names)
        _ask_no_more(self._asked)

    def __repr__(self) -> str:
        return f"Installed({self.names})"


def _names(function: str, names: Iterable[str] | str) -> list[str]:
    known = [*_ROUTES, *_NAMES]
    listed = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else None
    if listed is None or not all(isinstance(name, str) for name in listed):
        raise TypeError(f"jaxgpuops.{function}: names must be a string, strings or None; got {names!r}")
    if unknown := [name for name in listed if name not in known]:
        raise ValueError(f"jaxgpuops.{function}: names must be among {', '.join(known)}; got {', '.join(unknown)}")
    return listed


def _ask_no_more(names: Iterable[str]) -> None:
    with _lock:
        if _asked.intersection(names):
            _asked.difference_update(names)
            jax.clear_caches()


def install(names: Iterable[str] | str | None = None) -> Installed:
    """Routes JAX's own primitives to jaxgpuops kernels, on CPU and CUDA.

    Afterwards `jax.lax.top_k`, `jnp.cumsum` and whatever is built on them run on our kernels, with JAX's own
    derivative, batching and sharding rules. By default only those calls are routed that make whole programs faster: on
    a GPU every top-k, and scans that are large enough. XLA fuses small scans, and every argmax, with the operations
    around them, which no kernel of ours can. Operations that are asked for by name are always routed.
    `jaxgpuops.explain` says what became of each call, and why.

    Calls that no kernel covers are lowered by JAX as before, and so are programs under `jax.export`, which must run
    where jaxgpuops is not installed. Functions that are already compiled are compiled again when they are called next,
    since JAX's caches are cleared whenever something changes. To call `install` again is harmless.

    Softmax, log_softmax and logsumexp are functions in JAX. They are replaced only when asked for by name, and only
    where a program looks them up as `jax.nn.softmax`, `jax.nn.log_softmax`, `jax.nn.logsumexp` or
    `jax.scipy.special.logsumexp`; a function that was imported before, under a name of its own, stays JAX's.
    Derivatives are then those of `jaxgpuops.lax`, and exported programs contain our calls. Calls that we do not cover
    (complex numbers, ``b``, ``return_sign``) run JAX's own function. The same holds for `jax.ops.segment_sum`,
    `segment_max` and `segment_min`, with a static number of segments.

    Args:
      names: any of ``"top_k"``, ``"cumsum"``, ``"cumprod"``, ``"cummax"``, ``"cummin"``, ``"cumlogsumexp"``,
        ``"sort"``, ``"argmax"``, ``"argmin"``, ``"softmax"``, ``"log_softmax"``, ``"logsumexp"``, ``"segment_sum"``,
        ``"segment_max"``, ``"segment_min"``: every call of these is routed.

    Returns:
      A context manager that undoes what this call did.

    Raises:
      TypeError: for names that are no strings.
      ValueError: for unknown names.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> with jaxgpuops.install(["top_k"]):
    ...     jax.lax.top_k(jnp.array([1.0, 3.0, 2.0]), 2)[1].tolist()
    [1, 2]
    """
    with _lock:
        chosen = _names("install", _PAYS if names is None else names)
        new = [name for name in chosen if name not in _replaced]
        asked = [] if names is None else [name for name in chosen if name not in _asked]
        _asked.update(asked)
        for name in new:
            if name in _NAMES:
                places = list(map(importlib.import_module, _NAMES[name].places))
                _replaced[name] = {place: getattr(place, name) for place in places}
                replace = _segments if name in SEGMENT_KERNELS else _function
                for place in places:
                    setattr(place, name, replace(name, _replaced[name][place]))
                continue
            primitive = _ROUTES[name].primitive
            _replaced[name] = {}
            for platform in _replaceable(primitive):
                entry = _rules_of(platform).get(primitive)
                _replaced[name][platform] = entry
                rule = _rule(name, (entry or lowerings[primitive]).rule)
                # A cacheable rule would not see how operands are made, which sorts by several keys look at
                # (`Kernel.known`).
                mlir.register_lowering(primitive, rule, platform=platform, cacheable=name != "sort")
        if new or asked:
            jax.clear_caches()
        return Installed(new, asked)


def uninstall(names: Iterable[str] | str | None = None) -> None:
    """Undoes `install`.

    Args:
      names: as for `install`; None for all names that are installed. Names that are not installed are ignored.

    Raises:
      TypeError: for names that are no strings.
      ValueError: for names that `install` does not know.

    >>> import jaxgpuops
    >>> installed = jaxgpuops.install(["top_k", "cumsum"])
    >>> jaxgpuops.uninstall("cumsum")  # top_k stays
    >>> jaxgpuops.uninstall()
    """
    with _lock:
        old = [name for name in _names("uninstall", list(_replaced) if names is None else names) if name in _replaced]
        for name in old:
            for key, entry in _replaced.pop(name).items():
                if name in _NAMES:
                    setattr(key, name, entry)
                elif entry is None:
                    del _rules_of(key)[_ROUTES[name].primitive]
                else:
                    _rules_of(key)[_ROUTES[name].primitive] = entry
            if name == "sort":
                uncacheable.discard(jax.lax.sort_p)
        _asked.difference_update(old)
        if old:
            jax.clear_caches()
