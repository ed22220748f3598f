"""Sums, maxima, minima, means and dot products along axes."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad
from jax.typing import ArrayLike

from jaxgpuops import _arguments, _native
from jaxgpuops._arguments import FLOATS, FLOATS8, INTEGERS, ORDERED_DTYPES, Axis, AxisName, given
from jaxgpuops._axes import Merged
from jaxgpuops._derivatives import def_jvp, def_jvp_by_fallback
from jaxgpuops._primitive import Kernel, align, like
from jaxgpuops._split import RULES, Rule, all_axes, filled_axes, manual, plain_rule
from jaxgpuops.lax.order import from_keys, identity, to_keys

# ---- Primitives -------------------------------------------------------------------------------------------------------

SUMMED_DTYPES = FLOATS | FLOATS8 | INTEGERS


# What is left to XLA on a GPU, as measured on an H200.
# Plain JAX adds up rows of up to so many floats in one expression, so that the order is always the same. On a GPU,
# kernels take rows of exactly so many, except float64.
SHORT = 16


def _leaves_exact(rows, avals, *, masked, **_):
    """Whether XLA is faster at maxima, minima and sums of integers, which have the same bits in any order."""
    (outer, length, inner), dtype = rows, avals[0].dtype
    if masked or length == 0 or dtype in FLOATS8:
        return False
    size = outer * length * inner * dtype.itemsize
    if inner > 1:  # longer axes are two kernels, and one more that pads them if they cannot be divided
        if dtype.itemsize == 2 and length <= 4096 and inner >= 2048 and inner % 8:  # 6 x 2048 x 4309: 33 us, ours 61
            return True
        few = (inner in (2, 4, 8, 16, 32) and outer <= 32) or (size <= 16 << 20 and outer * inner <= 512)
        if few and length > 4096 and dtype.itemsize in (2, 4):  # 11651 x 156 float32: 5 us, ours 7
            return True
        # 1102 x 2048 x 15 float32: 35 us, ours 50. (Of 16 bits, ours are as fast if lines are whole vectors.)
        if length <= 4096 and dtype.itemsize in (2, 4) and not (dtype.itemsize == 2 and inner % 8 == 0):
            return True
        return size <= 1 << 20 or length <= 1024 or (length > 4096 and length % 8 == 0 and inner <= 128)
    if dtype in FLOATS and dtype.itemsize < 8:
        if size >= 64 << 20 and length * dtype.itemsize % 16 == 0 and length <= 1 << 17:
            return False
        # Rows that XLA does not divide evenly: 500 x 20000 float32 take 7 us, XLA's 12.
        if dtype.itemsize == 4 and length % 4096 == 0:  # 92 x 32768: 4.9 us, XLA's 5.7
            return not (outer >= 64 and 1 << 14 <= length <= 1 << 16)
        # 8 x 20000 float32: 1.7 us, XLA's 2.0; 5 x 754988 float16: 4.5, XLA's 6.1; 48 x 418625 bfloat16: 12.4, 14.7.
        half = dtype.itemsize == 2
        return not (
            1 << 14 < length < (1 << 20 if half and outer <= 8 else 1 << 19 if half and outer >= 40 else 1 << 17)
        )
    return True


def _leaves_extreme(rows, avals, *, masked, **_):
    """As ``_leaves_exact``, but our kernels take large arrays of columns of 32 bits that XLA does not divide evenly
    among warps: minima of 12 x 533 x 3450 int32 took 28 us, XLA's 41 (of floats, 24), and those of 1134 x 66 x 425
    float32 45, XLA's 56."""
    (outer, length, inner), dtype = rows, avals[0].dtype
    size = outer * length * inner * dtype.itemsize
    # Lines that are not whole sectors: 20000 x 100 x 10 take 47 us, XLA's 79. (x 16: 63 and 59; x 45: 112 and 110.)
    if not masked and dtype in FLOATS and dtype.itemsize == 8 and 1 < inner <= 32 and inner % 16 and size >= 8 << 20:
        return not (8 < length <= 128 or (length > 4096 and size >= 64 << 20))  # 6 x 72224 x 21: 24 us, XLA's 28
    # Lines and axes that are not whole vectors: 10582 x 31 x 10 float16 take 6.4 us, XLA's 10.2.
    odd = dtype in FLOATS and dtype.itemsize == 2 and inner % 8 and length % 8
    if not masked and odd and 1 < inner < 32 and 16 < length < 64 and outer >= 4096:
        return False
    if not masked and dtype.itemsize == 4 and inner >= 256:
        if dtype in INTEGERS and 64 <= length <= 1024 and inner % 32 and size >= 24 << 20:
            return False
        if dtype in FLOATS and 32 < length <= 128 and inner % 8 and size >= 48 << 20:
            return False
    return _leaves_exact(rows, avals, masked=masked)


def _leaves_sum(rows, avals, **params):
    if avals[0].dtype in INTEGERS:
        return _leaves_exact(rows, avals, **params)
    (outer, length, inner), dtype = rows, avals[0].dtype
    # Our kernels take rows of SHORT floats: 800000 x 16 float32 take 14 us, the expression 24.
    if params["masked"] or dtype not in FLOATS or inner > 1 or not 0 < length <= SHORT - (dtype.itemsize < 8):
        return False
    # They also take many rows of 8 or 16 bytes. There both add up in the same order, so that it does not matter which
    # of them a call takes: 5993813 x 4 bfloat16 take 15 us, the expression 30.
    return not (dtype.itemsize == 2 and length in (4, 8) and outer * length >= 1 << 22)


def _total(x, axis, dtype):
    """Adds up an axis; a short one of floats in the order of its positions, whatever XLA would choose."""
    if not isinstance(axis, int) or not isinstance(x.shape[axis], int) or not 1 < x.shape[axis] <= SHORT:
        return jnp.sum(x, axis, dtype=dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.sum(x, axis, dtype=dtype)
    return functools.reduce(jnp.add, (jax.lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])))


def _kernel(name, operands, *attributes, **kwargs):
    """Makes a kernel with this many operands, followed by ``where`` if the param ``masked`` is True."""

    def plan(rows, avals, compute_capability, axis, *, masked, **_):
        return _native.modules["cpu"].plan_reduce(name, *rows, avals[0].dtype.name, masked, compute_capability)

    return Kernel(
        name,
        attributes=("masked", *attributes),
        broadcasts=lambda count, **_: range(operands, count),
        shortest=2,
        plan=plan,
        **kwargs,
    )


def _where(where, x, fill):
    return jnp.where(where[0], x, np.array(fill, x.dtype)) if where else x


def _sum_dtype(x, wide):
    return _arguments.wide(x.dtype) if wide else x.dtype


def _divided(total, divisor):
    """Divides by multiplying with the inverse, as XLA and our kernels do if the divisor is a constant."""
    one = np.ones((), total.dtype)
    return total if divisor == 1 else total * (one / one.dtype.type(divisor))


def _sum_fallback(x, *where, axis, masked, wide, divisor):
    total = _total(_where(where, x.astype(_arguments.wide(x.dtype)), 0), axis, _arguments.wide(x.dtype))
    return (_divided(total, divisor).astype(_sum_dtype(x, wide)),)


# With the param ``wide`` the result has the dtype in which it is computed, else the dtype of x. Sums of floats are
# divided by the param ``divisor`` before they are rounded.
sum_p = _kernel(
    "sum",
    1,
    "divisor",
    results=lambda x, *_, wide, **__: [(None, _sum_dtype(x, wide))],
    fallback=_sum_fallback,
    accepts=SUMMED_DTYPES.__contains__,
    leaves=_leaves_sum,
)


def sum_cotangent(ct, aval, where, axis, divisor, split=None):
    """Returns the cotangent of x: a row's cotangent over the divisor at each of its entries that count, else 0."""
    ct = ct if split is None else split.cotangent(ct)
    ct = ct if divisor == 1 else _divided(ct.astype(_arguments.wide(ct.dtype)), divisor)
    return _where(where, like(jnp.expand_dims(ct, axis), aval, split), 0).astype(aval.dtype)


def _sum_transpose(cts, x, *where, axis, divisor, split=None, **_):
    ct = None if isinstance(cts[0], ad.Zero) else sum_cotangent(cts[0], x.aval, where, axis, divisor, split)
    return [ct, *(None for _ in where)]


def_jvp(sum_p, lambda outs, primals, tangents, **params: sum_p(tangents[0], *primals[1:], **params))
ad.primitive_transposes[sum_p.primitive] = _sum_transpose


def _dot_fallback(x, y, *where, axis, masked, wide):
    dtype = _arguments.wide(x.dtype)
    products = _where(where, x.astype(dtype) * y.astype(dtype), 0)
    return (jnp.sum(products, axis, dtype=dtype).astype(_sum_dtype(x, wide)),)


dot_p = _kernel(
    "dot",
    2,
    results=lambda x, *_, wide, **__: [(None, _sum_dtype(x, wide))],
    fallback=_dot_fallback,
    accepts=SUMMED_DTYPES.__contains__,
)


def _dot_jvp(outs, primals, tangents, **params):
    x, y, *where = primals
    tx, ty, *_ = tangents
    terms = given(
        None if tx is None else dot_p(tx, y, *where, **params)[0],
        None if ty is None else dot_p(x, ty, *where, **params)[0],
    )
    return [functools.reduce(jnp.add, terms)]


def dot_cotangent(ct, other, where, axis):
    """Returns the cotangent of one of the two arrays of a dot product."""
    dtype = _arguments.wide(other.dtype)
    ct = jnp.expand_dims(ct.astype(dtype), axis)
    return _where(where, ct * other.astype(dtype), 0).astype(other.dtype)


def _dot_transpose(cts, x, y, *where, axis, split=None, **_):
    nothing = [None for _ in where]
    if isinstance(cts[0], ad.Zero):
        return [None, None, *nothing]
    ct = cts[0] if split is None else split.cotangent(cts[0])
    if ad.is_undefined_primal(x):
        return [dot_cotangent(ct, y, where, axis), None, *nothing]
    return [None, dot_cotangent(ct, x, where, axis), *nothing]


def_jvp(dot_p, _dot_jvp)
ad.primitive_transposes[dot_p.primitive] = _dot_transpose


def _extreme_fallback(name):
    def fallback(x, *where, axis, masked):
        if where:
            x = jnp.where(where[0], x, identity(name, x.dtype))
        return (getattr(jnp, name)(x, axis),)

    return fallback


def _extreme_kernel(name):
    return _kernel(
        name,
        1,
        results=lambda x, *_, **__: [(None, x.dtype)],
        fallback=_extreme_fallback(name),
        accepts=ORDERED_DTYPES.__contains__,
        leaves=_leaves_extreme,
    )


max_p, min_p = _extreme_kernel("max"), _extreme_kernel("min")


def _takes(x, y, where, axis, split=None):
    """Returns which entries equal the maximum or minimum y, which has the axis, and their number. If y is NaN, NaNs
    do."""
    takes = (x == y) | jnp.isnan(x)
    if where:
        takes &= where[0]
    # Counts as integers: XLA's sum of floats would be many times slower on the CPU.
    count = jnp.sum(takes, axis, dtype=np.uint32, keepdims=True)
    count = count if split is None else split.sum(count)
    # A row whose entries are all masked has a count of 0.
    return takes, jnp.maximum(count, 1).astype(_arguments.wide(x.dtype))


def _extreme_jvp_fallback(t, x, y, *where, axis, masked, split=None):
    takes, count = _takes(x, y, where, axis, split)
    mean = jnp.sum(jnp.where(takes, t.astype(count.dtype) / count, np.zeros((), count.dtype)), axis)
    return ((mean if split is None else split.sum(mean)).astype(t.dtype),)


# The tangent of a maximum or minimum y, given the tangent of x; equal entries share it, as in JAX. There is no kernel
# for it, since XLA fuses the plain JAX. It is a primitive so that only x and y are kept as residuals.
extreme_jvp_p = Kernel(
    "extreme_jvp",
    results=lambda t, *_, **__: [(None, t.dtype)],
    fallback=_extreme_jvp_fallback,
    accepts=None,
    broadcasts=lambda count, **_: range(1, count),
)


def extreme_cotangent(ct, x, y, where, axis, split=None):
    """Returns the cotangent of x, given the cotangent of its maximum or minimum y, which has the axis."""
    ct = ct if split is None else split.cotangent(ct)
    takes, count = _takes(x, y, where, axis, split)
    share = jnp.expand_dims(ct, axis).astype(count.dtype) / count
    return jnp.where(takes, share, np.zeros((), share.dtype)).astype(ct.dtype)


def _extreme_jvp_transpose(cts, t, x, y, *where, axis, masked, split=None):
    others = [None for _ in (x, y, *where)]
    if isinstance(cts[0], ad.Zero):
        return [None, *others]
    return [like(extreme_cotangent(cts[0], x, y, where, axis, split), t.aval), *others]


ad.primitive_transposes[extreme_jvp_p.primitive] = _extreme_jvp_transpose
def_jvp_by_fallback(extreme_jvp_p)


def _extreme_jvp(outs, primals, tangents, *, axis, **params):
    x, *where = primals
    return extreme_jvp_p(tangents[0], x, jnp.expand_dims(outs[0], axis), *where, axis=axis, **params)


def_jvp(max_p, _extreme_jvp)
def_jvp(min_p, _extreme_jvp)

# ---- A split axis, or several -----------------------------------------------------------------------------------------


def _sum_split(kernel, operands):
    def local(splits, *arrays, axis, masked, wide, **divisor):
        filled = (filled_axes(splits, x, axis, 0) for x in arrays[:operands])
        params = {"axis": axis, "masked": masked, "wide": True} | dict.fromkeys(divisor, 1)
        [total] = kernel.primitive.bind(*filled, *arrays[operands:], **params)
        total = _divided(all_axes(splits, axis).sum(total), divisor.get("divisor", 1))
        return (total.astype(_sum_dtype(arrays[0], wide)),)

    return local


def _extreme_split(kernel):
    def local(splits, x, *where, axis, masked):
        """Takes the maximum of integer keys, since XLA's collectives of floats may lose a NaN."""
        is_min = kernel.name == "min"
        x = filled_axes(splits, x, axis, identity(kernel.name, x.dtype))
        [y] = kernel.primitive.bind(x, *where, axis=axis, masked=masked)
        keys = ~to_keys(y) if is_min else to_keys(y)
        keys = all_axes(splits, axis).max(jnp.where(jnp.isnan(y), np.array(np.iinfo(keys.dtype).max, keys.dtype), keys))
        return (from_keys(~keys if is_min else keys, x.dtype),)

    return local


RULES["sum"] = Rule(_sum_split(sum_p, 1))
RULES["dot"] = Rule(_sum_split(dot_p, 2))
RULES["max"] = Rule(_extreme_split(max_p))
RULES["min"] = Rule(_extreme_split(min_p))
RULES["extreme_jvp"] = plain_rule(extreme_jvp_p)

# ---- Arguments --------------------------------------------------------------------------------------------------------

KERNELS = {"sum": sum_p, "max": max_p, "min": min_p, "dot": dot_p}


def evaluate(op, name, function, arrays, axis, where, keepdims, names=None):
    """Computes a reduction. ``function(name, operands, where, axis, **params)`` reduces aligned arrays along one
    axis."""
    mean = name == "mean"
    name = "sum" if mean else name
    if len(arrays) == 2:
        dtype = _arguments.promoted(op, x=arrays[0], y=arrays[1])
        try:
            arrays = jnp.broadcast_arrays(*(x.astype(dtype) for x in arrays))
        except ValueError as error:
            raise ValueError(
                f"{op}: x and y must broadcast to one shape, got {arrays[0].shape} and {arrays[1].shape}"
            ) from error
    [dtype] = {x.dtype for x in arrays}
    _arguments.dtype(op, "x", dtype, ORDERED_DTYPES)
    if mean and dtype not in FLOATS | FLOATS8:
        dtype = _arguments.inexact(dtype)
    elif dtype == np.dtype(bool) and name in ("sum", "dot"):
        dtype = jnp.result_type(int)
    shape = arrays[0].shape
    axes = _arguments.axes_of(op, "x", shape, axis)
    where = _arguments.mask(op, "where", where, shape)
    if name in ("max", "min") and any(shape[d] == 0 for d in axes):
        raise ValueError(f"{op}: there is no {name} of no elements: x has shape {shape}, axis is {axis}")
    merged = Merged(shape, axes)
    # Kernels whose results lack the axis can take several neighbouring axes, but at least one.
    own, place = (merged.together, merged.neighbours) if len(axes) > 1 else (merged.merge, merged.axis)
    *arrays, where = (None if a is None else own(a) for a in (*(x.astype(dtype) for x in arrays), where))
    operands = align(*given(*arrays, where))
    split = manual(op, names, shape[axes[0]]) if _arguments.one_axis(op, names, axes) else None
    params = {"split": split} if split else {}
    divides = mean and where is None and split is None and all(isinstance(shape[d], int) and shape[d] > 0 for d in axes)
    if name in ("sum", "dot"):
        params["wide"] = mean and not divides
    if name == "sum":
        params["divisor"] = math.prod(shape[d] for d in axes) if divides else 1
    y = function(name, operands, place, masked=where is not None, **params)
    if mean and not divides:
        y = (y / _count(where, arrays[0].shape, place, y.dtype, split)).astype(dtype)
    return merged.reduced(y, keepdims)


def _count(where, shape, axis, dtype, split):
    """Returns how many entries of each row count."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    if where is None:
        return jnp.asarray(math.prod(shape[d] for d in axes) if split is None else split.length).astype(dtype)
    count, lacking = jnp.sum(where, axis, dtype=dtype), [d for d in axes if where.shape[d] != shape[d]]
    if split is not None:
        return count * split.length if lacking else split.sum(count)
    return count * math.prod(shape[d] for d in lacking) if lacking else count


def arguments(op, axis, where, keepdims, names=None, **arrays):
    """Checks what must be checked before tracing, and returns arrays, where, axis, keepdims and the names of
    axis_name."""
    arrays = [_arguments.array(op, name, x) for name, x in arrays.items()]
    where = _arguments.optional(op, "where", where)
    axis, keepdims = _arguments.axes(op, axis), _arguments.flag(op, "keepdims", keepdims)
    return arrays, where, axis, keepdims, _arguments.names(op, names)


# ---- Functions --------------------------------------------------------------------------------------------------------


def bind(name, operands, axis, **params):
    return KERNELS[name](*operands, axis=axis, **params)[0]


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5), inline=True)
def _reduce(name, arrays, where, axis, keepdims, names):
    return evaluate(f"jaxgpuops.lax.{name}", name, bind, arrays, axis, where, keepdims, names)


def sum(
    x: ArrayLike,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """Sum as `jaxgpuops.sum` defines it. This function also has forward-mode derivatives (`jax.jvp`, `jax.jacfwd`).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.lax.sum(jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [3.0, 7.0]
    >>> jax.jacfwd(jaxgpuops.lax.sum)(jnp.array([1.0, 2.0])).tolist()
    [1.0, 1.0]
    """
    return _reduce("sum", *arguments("jaxgpuops.lax.sum", axis, where, keepdims, axis_name, x=x))


def mean(
    x: ArrayLike,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """Mean as `jaxgpuops.mean` defines it. This function also has forward-mode derivatives (`jax.jvp`, `jax.jacfwd`).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.lax.mean(jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [1.5, 3.5]
    >>> jax.jacfwd(jaxgpuops.lax.mean)(jnp.array([1.0, 2.0])).tolist()
    [0.5, 0.5]
    """
    return _reduce("mean", *arguments("jaxgpuops.lax.mean", axis, where, keepdims, axis_name, x=x))


def max(
    x: ArrayLike,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """Maximum as `jaxgpuops.max` defines it. This function also has forward-mode derivatives (`jax.jvp`, `jax.jacfwd`).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.lax.max(jnp.array([[1.0, 2.0], [4.0, 3.0]])).tolist()
    [2.0, 4.0]
    >>> jax.jacfwd(jaxgpuops.lax.max)(jnp.array([1.0, 2.0])).tolist()
    [0.0, 1.0]
    """
    return _reduce("max", *arguments("jaxgpuops.lax.max", axis, where, keepdims, axis_name, x=x))


def min(
    x: ArrayLike,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """Minimum as `jaxgpuops.min` defines it. This function also has forward-mode derivatives (`jax.jvp`, `jax.jacfwd`).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.lax.min(jnp.array([[1.0, 2.0], [4.0, 3.0]])).tolist()
    [1.0, 3.0]
    >>> jax.jacfwd(jaxgpuops.lax.min)(jnp.array([1.0, 1.0])).tolist()
    [0.5, 0.5]
    """
    return _reduce("min", *arguments("jaxgpuops.lax.min", axis, where, keepdims, axis_name, x=x))


def dot(
    x: ArrayLike,
    y: ArrayLike,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """Dot product as `jaxgpuops.dot` defines it. This one also has forward-mode derivatives (`jax.jvp`, `jax.jacfwd`).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.lax.dot(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1.0, -1.0])).tolist()
    [-1.0, -1.0]
    >>> jax.jacfwd(jaxgpuops.lax.dot)(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])).tolist()
    [3.0, 4.0]
    """
    return _reduce("dot", *arguments("jaxgpuops.lax.dot", axis, where, keepdims, axis_name, x=x, y=y))
