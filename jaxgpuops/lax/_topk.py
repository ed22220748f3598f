"""Top-k, argmax and argmin as primitives."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxgpuops import _arguments, _native
from jaxgpuops._arguments import FLOATS, FLOATS8, AxisName
from jaxgpuops._derivatives import def_jvp
from jaxgpuops._primitive import Kernel
from jaxgpuops._split import RULES, Rule, manual
from jaxgpuops.lax.along_axis import take_along_axis
from jaxgpuops.lax.order import from_keys, identity, sort_keys, to_keys

# ---- Top-k ----------------------------------------------------------------------------------------------------------


def _top_k_fallback(x, *, axis, k, largest, sorted):
    keys = to_keys(x)
    keys, indices = lax.top_k(keys if largest else ~keys, k, axis=axis)
    if not sorted:
        indices, keys = lax.sort((indices, keys), dimension=axis, num_keys=1)
    # Without the barrier XLA would move bfloat16 values instead of keys, which on CPU flushes denormals to zero.
    keys = lax.optimization_barrier(keys)
    return from_keys(keys if largest else ~keys, x.dtype), indices


def _plan_top_k(rows, avals, compute_capability, axis, *, k, sorted, **_):
    return _native.modules["cpu"].plan_topk(*rows, k, 8 * avals[0].dtype.itemsize, sorted, compute_capability)


top_k_p = Kernel(
    "topk",
    reindexes=True,
    results=lambda x, *, axis, k, largest, sorted: [(k, x.dtype), (k, np.int32)],
    fallback=_top_k_fallback,
    accepts=_arguments.ORDERED_DTYPES.__contains__,
    attributes=("largest", "sorted"),
    plan=_plan_top_k,
)
# The selection is locally constant, so the tangents are those of the selected elements.
def_jvp(
    top_k_p,
    lambda outs, primals, tangents, *, axis, split=None, **_: (
        take_along_axis(tangents[0], outs[1], axis, split),
        None,
    ),
)


def _top_k_pays(split, avals, *, k, **_):
    itemsize = avals[0].dtype.itemsize
    return min(k, split.part) * split.shards * (itemsize + 4) < split.length * itemsize


def _top_k_split(splits, x, *, axis, k, **order):
    """Computes the top-k of the devices' top-k. Equal elements are gathered in the order of their indices, so ties are
    right."""
    split = splits[axis]
    if split.uneven:  # padding is the least element and has the highest indices, so it comes last
        least = 0 if order["largest"] else np.iinfo(to_keys(x).dtype).max
        x = from_keys(lax.optimization_barrier(split.fill(to_keys(x), axis, least)), x.dtype)
    bind = functools.partial(top_k_p.primitive.bind, axis=axis, **order)
    values, indices = bind(x, k=min(k, split.part))
    best = values, indices + split.start()
    # If there are many rows, each device merges a part of the rows and gets the results of the others: it receives 2 k
    # numbers for each row, instead of k numbers from each device.
    size = values.size * split.shards * (x.dtype.itemsize + 4)
    rows = [d for d, n in enumerate(x.shape) if d != axis and n % split.shards == 0]
    if split.shards <= 2 or size < _MANY or not rows:
        return _merged(*(split.gather(a, axis) for a in best), axis, k, bind)
    merged = _merged(*(split.exchange(a, rows[0], axis) for a in best), axis, k, bind)
    return tuple(split.gather(a, rows[0]) for a in merged)


_MANY = 1 << 20  # from so many bytes of candidates on, two more collectives save time


def _merged(values, indices, axis, k, bind):
    values, at = bind(values, k=k)
    return values, take_along_axis(indices, at, axis)


RULES["topk"] = Rule(_top_k_split, pays=_top_k_pays)


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _top_k(operand, k, axis, names):
    op = "jaxgpuops.lax.top_k"
    axis = _arguments.ordered(op, "operand", operand, axis)
    split = manual(op, names, operand.shape[axis])
    k = _arguments.count(op, "k", k, operand, axis, split)
    return top_k_p(operand, axis=axis, k=k, largest=True, sorted=True, split=split)


def top_k(operand: ArrayLike, k: int, *, axis: int = -1, axis_name: AxisName = None) -> tuple[jax.Array, jax.Array]:
    """The ``k`` largest elements along ``axis`` and their indices: `jax.lax.top_k` as a kernel.

    Values, order, ties, NaNs, signed zeros and errors are those of `jaxgpuops.topk`. Unlike that function,
    this one also has forward-mode derivatives (`jax.jvp`, `jax.jacfwd`, `jax.linearize`).

    Args:
      operand: array of shape ``(*before, n, *after)``.
      k: how many, ``0 <= k <= n``; static.
      axis: the axis of length ``n``.
      axis_name: inside `jax.shard_map`, what the axis is split along, as for `jaxgpuops.topk`.

    Returns:
      ``[values, indices]``, both of shape ``(*before, k, *after)``; values of the operand's dtype, indices int32.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([3.0, 1.0, 4.0, 1.0, 5.0])
    >>> values, indices = jaxgpuops.lax.top_k(x, 2)
    >>> values.tolist(), indices.tolist()
    ([5.0, 4.0], [4, 2])
    >>> jax.jacfwd(lambda x: jaxgpuops.lax.top_k(x, 2)[0])(x).tolist()
    [[0.0, 0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0, 0.0]]
    """
    op = "jaxgpuops.lax.top_k"
    operand = _arguments.array(op, "operand", operand)
    k, axis = _arguments.integer(op, "k", k), _arguments.integer(op, "axis", axis)
    return _top_k(operand, k, axis, _arguments.names(op, axis_name))


# ---- argmax, argmin -------------------------------------------------------------------------------------------------


def _argmax_keys(x, largest):
    """Returns unsigned integers of which the largest is the best element: NaNs are the best, and both zeros are
    equal."""
    keys = sort_keys(x)
    if largest:
        return keys
    return jnp.where(jnp.isnan(x), keys, ~keys) if jnp.issubdtype(x.dtype, jnp.floating) else ~keys


def _argmax_fallback(x, *, axis, largest):
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return ((lax.argmax if largest else lax.argmin)(x, axis, np.int32),)
    # On a GPU, XLA's reduction of floats does not return the first NaN: of two NaNs it keeps its first operand,
    # whatever the index. So integer keys are compared, which have no NaN.
    return (lax.argmax(_argmax_keys(x, largest), axis, np.int32),)


def _goes_one_by_one(x, axis):
    """Whether an elementwise expression is faster than a reduction, as measured on an H200: 10^6 rows of 3 float32 take 2.9
    us, not 5.8, and rows of lengths that are powers of two up to 60 times less."""
    length, item = x.shape[axis], x.dtype.itemsize
    if not isinstance(length, int) or item == 8:
        return False
    if all(n == 1 for n in x.shape[axis + 1 :]):
        return length <= 16
    return length <= (24 if item <= 2 else 8)


def _argmax_left(x, *, axis, largest):
    """As the fallback, but compares floats and not keys, since XLA's GPU backend sometimes makes one more kernel for keys.
    XLA's CPU backend needs the keys: it takes subnormal floats for zeros."""
    if _goes_one_by_one(x, axis):
        return (_argmax_one_by_one(x, axis, largest),)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(np.int32) if x.dtype.itemsize < 4 else x  # a fifth faster on a GPU
        return ((lax.argmax if largest else lax.argmin)(x, axis, np.int32),)

    def best(one, other):
        (x, i), (y, j) = one, other
        x_holds, y_holds = (x >= y, y >= x) if largest else (x <= y, y <= x)  # not if one is a NaN
        x_wins, y_wins = ~y_holds & (y == y), ~x_holds & (x == x)
        return lax.select(x_wins, x, y), lax.select(x_wins | (~y_wins & (i < j)), i, j)

    worst = np.array(-np.inf if largest else np.inf, x.dtype)
    indices = lax.broadcasted_iota(np.int32, x.shape, axis)
    return (lax.reduce((x, indices), (worst, np.int32(0)), best, (axis,))[1],)


def _argmax_one_by_one(x, axis, largest):
    """Compares the elements of a short axis one after the other, in one elementwise kernel."""
    best = lax.index_in_dim(x, 0, axis, keepdims=False)
    index = lax.full_like(best, 0, np.int32)
    for i in range(1, x.shape[axis]):
        element = lax.index_in_dim(x, i, axis, keepdims=False)
        holds = best >= element if largest else best <= element  # not if one is a NaN
        wins = ~holds & (best == best)
        best, index = jnp.where(wins, element, best), jnp.where(wins, np.int32(i), index)
    return index


def _to(most):
    return range(most + 1)


def _from(least):
    return range(least, 1 << 63)


class _Class(NamedTuple):
    """A class of problems: of each number that describes one, the values that are in the class."""

    inner: Collection[int]
    length: Collection[int]
    item: Collection[int] = (1, 2, 4, 8)  # bytes of an element
    elements: Collection[int] = _from(0)
    bytes: Collection[int] = _from(0)
    columns: Collection[int] = _from(0)  # outer * inner
    line: Collection[int] = _from(0)  # bytes of a line
    loose: Collection[int] = range(16)  # bytes of a line that no whole vector has
    is_float: Collection[bool] = (False, True)


# Where XLA is faster on an H200, with the same result. Beside each class: how many of 763 random problems (`arg` of the
# sweep, seeds 951 to 954) it left to XLA, and our kernel's time over that of XLA's: the geometric mean and the least.
_FASTER_IN_XLA = [
    # Short columns: a thread of XLA's has one. Ours read whole vectors, if many lie side by side.
    _Class(_from(2), _to(24), bytes=_to(4 << 20)),  # 20: 1.14, 0.95
    _Class(_from(2), range(3, 25), bytes=_to(16 << 20)),  # 1: 1.52
    _Class(_from(2), range(3, 25), line=_to(511)),  # 1: 1.24
    _Class(_from(2), range(3, 25), loose=range(1, 16)),  # 4: 1.35, 1.15
    # Columns of some length, if there are enough of them, but not so many side by side. (48 x 42861 float32 take 5.7 us,
    # XLA's 10.3, and 108 x 21406 bfloat16 4.6 and 6.4.)
    _Class(range(24, 8192), range(25, 513), item=(1, 2, 4), columns=_from(512), bytes=_to(8 << 20)),  # 3: 1.41, 1.16
    _Class((2, 4), range(25, 513), item=(2, 4), elements=_from(1 << 16)),  # 1: 1.49
    # Few long columns, as two kernels. (Of 16 bits, if XLA need not pad them: 71329 x 2 take 4.0 us, XLA's 6.6.)
    _Class((2, 4, 8), _from(1 << 16), item=(1, 4), elements=_to(1 << 24)),  # 10: 1.27, 1.05
    _Class((2, 4, 8), range(1 << 16, 1 << 63, 8), item=(2,), elements=_to(1 << 22)),  # 2: 1.41, 1.31
    # Short axes, one element after the other: 500000 x 8 float16 3.8 us, ours 4.9; 8 x 2 x 262144 float32 4.2, ours 6.5.
    _Class(_to(1), _to(16), item=(4,)),
    # (Rows of 2 and 4 are ours in large arrays: a thread reads several in one vector. 5316453 x 4 float16 took 26 us in
    # XLA, and takes 17.)
    _Class(_to(1), [n for n in range(17) if n not in (2, 4)], item=(2,)),
    _Class(_to(1), [n for n in range(17) if n != 4], item=(1,)),
    _Class(_to(1), (2, 4), item=(1, 2), bytes=_to(1 << 19)),
    _Class(_from(2), _to(4), item=(1, 2, 4)),
    _Class(_from(2), _to(24), item=(2,)),
    # Other short rows: a thread has one, but not if the length is a power of two.
    _Class(_to(1), [n for n in range(32) if n & (n - 1)]),  # 48: 1.17, 0.73
    # Rows of at least a warp.
    _Class(_to(1), range(32, 128), item=(1,), elements=_to(1 << 17)),  # 3: 1.17, 1.15
    _Class(_to(1), range(32, 128), item=(2,), elements=_to(1 << 18)),  # 7: 1.07, 0.97
    _Class(_to(1), range(32, 128), item=(4,), elements=_to(1 << 19)),  # 18: 1.12, 1.07
    _Class(_to(1), range(32, 65), item=(8,), elements=_to(1 << 20)),  # 6: 1.17, 1.14
    # Longer rows. Our kernels take longer to begin, but read narrow numbers faster, and rows that begin anywhere.
    _Class(_to(1), _from(65), item=(8,)),  # 55: 1.20, 0.87
    # (Of 32 bits, 2 x 1048576 float32 take 5.3 us, XLA's 5.8, and 3 x 1363155 int32 7.4 and 8.3.)
    _Class(_to(1), _from(128), item=(4,), bytes=_to(6 << 20)),  # 80: 1.15, 0.77
    _Class(_to(1), _from(128), item=(4,), bytes=_to(12 << 20), is_float=(False,)),  # 7 apart from those: 1.18, 1.10
    _Class(_to(1), range(192, 2048), item=(4,)),
    _Class(_to(1), range(2048, (1 << 14) + 1), item=(4,), is_float=(False,)),
    _Class(_to(1), range(1024, 1 << 63, 1024), item=(4,), is_float=(False,)),  # 7: 1.03, 0.99
    _Class(_to(1), _from(1017), item=(2,), bytes=_to(1 << 19)),
    _Class(_to(1), range(1017, 1 << 14), item=(2,), bytes=_to(2 << 20), is_float=(True,)),
    _Class(_to(1), range(1017, 1 << 13), item=(2,), bytes=_to(7 << 19), is_float=(False,)),
    _Class(_to(1), _from(128), item=(1,), bytes=_to(1 << 20), is_float=(False,)),
    _Class(_to(1), range(128, 1 << 16), item=(1,), bytes=_to(7 << 19), is_float=(False,)),
]


def _leaves_argmax(rows, avals, **_):
    (outer, length, inner), dtype = rows, avals[0].dtype
    if dtype in FLOATS8:
        return False
    item, count, line = dtype.itemsize, outer * length * inner, inner * dtype.itemsize
    problem = inner, length, item, count, count * item, outer * inner, line, line % 16, dtype in FLOATS
    return any(all(n in values for n, values in zip(problem, c, strict=True)) for c in _FASTER_IN_XLA)


def _plan_argmax(rows, avals, compute_capability, axis, **_):
    return _native.modules["cpu"].plan_argmax(*rows, 8 * avals[0].dtype.itemsize, compute_capability)


argmax_p = Kernel(
    "argmax",
    results=lambda x, *, axis, largest: [(None, np.int32)],
    fallback=_argmax_fallback,
    accepts=_arguments.ORDERED_DTYPES.__contains__,
    attributes=("largest",),
    plan=_plan_argmax,
    leaves=_leaves_argmax,
    left=_argmax_left,
)
def_jvp(argmax_p, lambda outs, primals, tangents, **_: (None,))


def _argmax_split(splits, x, *, axis, largest):
    """Returns the first of the devices' best elements: of numbers made of a key and, below it, an index, the largest
    has the best key and, among equals, the lowest index. So one all-reduce of 8 bytes for each row does it."""
    split = splits[axis]
    x = split.fill(x, axis, identity("max" if largest else "min", x.dtype))
    [at] = argmax_p.primitive.bind(x, axis=axis, largest=largest)
    best = jnp.take_along_axis(x, lax.expand_dims(at, (axis,)), axis, mode="promise_in_bounds")
    keys = _argmax_keys(lax.squeeze(best, (axis,)), largest)
    index = ~(at + split.start()).astype(np.uint32)
    if keys.dtype.itemsize < 8:
        with jax.enable_x64(True):
            both = lax.bitcast_convert_type(jnp.stack([index, keys.astype(np.uint32)], -1), np.uint64)
            index = lax.bitcast_convert_type(split.max(both), np.uint32)[..., 0]
    else:
        index = split.max(jnp.where(keys == split.max(keys), index, np.uint32(0)))
    return ((~index).astype(np.int32),)


RULES["argmax"] = Rule(_argmax_split)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4), inline=True)
def _argmax(operand, axis, index_dtype, names, largest):
    op = f"jaxgpuops.lax.{'argmax' if largest else 'argmin'}"
    axis = _arguments.ordered(op, "operand", operand, axis)
    if isinstance(operand.shape[axis], int) and operand.shape[axis] == 0:
        raise ValueError(f"{op}: the axis must not be empty; operand has shape {operand.shape} and axis={axis}")
    split = manual(op, names, operand.shape[axis])
    return argmax_p(operand, axis=axis, largest=largest, split=split)[0].astype(index_dtype)


def _index_dtype(op, value):
    try:
        # Python's own type is the default integer dtype, as in `jax.lax.argmax`.
        dtype = jax.dtypes.canonicalize_dtype(int) if value is int else np.dtype(value)
        if np.issubdtype(dtype, np.integer):
            return dtype
    except (TypeError, ValueError):  # it is no dtype at all
        pass
    raise TypeError(f"{op}: index_dtype must be an integer dtype, got {value!r}")


def argmax(operand: ArrayLike, axis: int, index_dtype: DTypeLike, *, axis_name: AxisName = None) -> jax.Array:
    """The index of the largest element along ``axis``: `jax.lax.argmax` as a kernel.

    The first of equal elements wins, -0 and +0 are equal, and a NaN (the first) beats everything. Subnormal numbers are
    not zeros, as in NumPy; XLA's CPU backend treats them as zeros. The result does not depend on the run or on the
    other rows, and has no derivative.

    Args:
      operand: array of shape ``(*before, n, *after)``, ``n >= 1``; dtypes as for `jaxgpuops.topk`.
      axis: the axis of length ``n``.
      index_dtype: integer dtype of the result; indices are computed as int32.
      axis_name: inside `jax.shard_map`, what the axis is split along, as for `jaxgpuops.topk`.

    Returns:
      Indices of shape ``(*before, *after)`` and dtype ``index_dtype``.

    Raises:
      TypeError: for other dtypes, and an ``index_dtype`` that is no integer dtype.
      ValueError: for a scalar, an ``axis`` out of range or of length 0.

    Algorithms: docs/topk.md.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.lax.argmax(jnp.array([[3, 7, 7], [9, 0, 1]]), 1, jnp.int32).tolist()
    [1, 0]
    """
    op = "jaxgpuops.lax.argmax"
    operand = _arguments.array(op, "operand", operand)
    axis, names = _arguments.integer(op, "axis", axis), _arguments.names(op, axis_name)
    return _argmax(operand, axis, _index_dtype(op, index_dtype), names, True)


def argmin(operand: ArrayLike, axis: int, index_dtype: DTypeLike, *, axis_name: AxisName = None) -> jax.Array:
    """The index of the smallest element along ``axis``: `jax.lax.argmin` as a kernel.

    The first of equal elements wins, -0 and +0 are equal, and a NaN (the first) beats everything. Arguments, result,
    determinism and errors are those of `jaxgpuops.lax.argmax`.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.lax.argmin(jnp.array([[3.0, -2.0], [1.0, jnp.nan]]), 1, jnp.int32).tolist()
    [1, 1]
    """
    op = "jaxgpuops.lax.argmin"
    operand = _arguments.array(op, "operand", operand)
    axis, names = _arguments.integer(op, "axis", axis), _arguments.names(op, axis_name)
    return _argmax(operand, axis, _index_dtype(op, index_dtype), names, False)
