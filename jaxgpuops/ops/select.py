"""Elements by their rank: quantiles, medians, the k-th smallest, partitions. Made of a selection, or of the sort."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxgpuops import _arguments
from jaxgpuops._arguments import Axis, AxisName
from jaxgpuops._axes import Merged
from jaxgpuops._primitive import align
from jaxgpuops._split import manual
from jaxgpuops.lax._scan import cumsum
from jaxgpuops.lax._search import searchsorted
from jaxgpuops.lax._select import follow, quantiles, select
from jaxgpuops.lax._sort import check_operands, permutation, sort_operands, sort_p
from jaxgpuops.lax.along_axis import along, gathered, take_along_axis

Method = Literal["linear", "lower", "higher", "midpoint", "nearest", "inverted_cdf"]
BETWEEN = ("linear", "midpoint")  # methods that take two elements
METHODS = ("linear", "lower", "higher", "midpoint", "nearest", "inverted_cdf")


def quantile(
    x: ArrayLike,
    q: ArrayLike | Sequence[float],
    *,
    axis: Axis = -1,
    method: Method = "linear",
    weights: ArrayLike | None = None,
    keepdims: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """Quantiles along an axis, or several: `jax.numpy.quantile` on a sort of its own.

    Args:
      x: array of dtype bool, int8 to int64, uint8 to uint64, float8_e4m3fn, float8_e5m2, float16, bfloat16, float32 or
        float64.
      q: probabilities from 0 to 1, a scalar or one dimension of them. Numbers that are known at trace time (Python's
        and NumPy's) are counted with in float64, so that the elements are the right ones in rows of any length; those
        of a JAX array in its dtype, float32 at least.
      axis: the axis, or several, or None for all. (Of `jnp.quantile` the default is None.) Axes that are not neighbours
        are first moved to the end, a copy.
      method: what is taken of the two elements whose ranks are next to ``q * (n - 1)``: "linear" interpolates, "lower"
        and "higher" take one, "midpoint" their mean, "nearest" the nearer, that of even rank if both are as near;
        "inverted_cdf" takes the first element up to which there is a share of at least ``q``.
      weights: how much each element counts, not negative; of the shape of ``x``, or of that of ``axis``, if that is
        one. With method "inverted_cdf" only.
      keepdims: True to keep the axes, with length 1.
      axis_name: inside `jax.shard_map`, what ``axis`` is split along, as for `jaxgpuops.topk`; with one ``axis`` only.
        Weights of the shape of ``axis`` are those of this device's part.

    Returns:
      An array of the shape of ``q`` and that of ``x`` without the axes, of the dtype of ``x``; for integers and bools
      float32, or float64 where they have 64 bits. Unlike JAX's, it does not have the dtype of ``q``. Interpolation is
      in float32 at least, rounded once.

    NaN where a row has a NaN, or no elements; where ``q`` is NaN or, if it is not known at trace time, not between 0
    and 1; and where weights add up to 0. Infinities stay infinities (NumPy makes NaNs of some). A row has the same bits
    in every run and batch.

    Derivatives: with respect to ``x``, and to ``q`` where it is traced; each element has its share of the cotangent.
    Both modes. Weights have none.

    Raises:
      TypeError: for other dtypes, for an ``axis`` or a ``keepdims`` that is not known at trace time.
      ValueError: for ``q`` of more than one dimension or out of range, ``axis`` out of range or given twice, another
        ``method``, weights with another method or of another shape.

    After Hyndman and Fan, "Sample quantiles in statistical packages" (1996): "linear" is their definition 7.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([[4.0, 1.0, 3.0, 2.0], [0.0, 10.0, 30.0, 20.0]])
    >>> jaxgpuops.quantile(x, 0.25).tolist(), jaxgpuops.quantile(x, [0.0, 0.5], method="lower").tolist()
    ([1.75, 7.5], [[1.0, 0.0], [2.0, 10.0]])
    >>> jaxgpuops.quantile(x[0], 0.5, method="inverted_cdf", weights=jnp.array([9.0, 1.0, 1.0, 1.0])).tolist()
    4.0
    >>> jax.grad(lambda x: jaxgpuops.quantile(x, 0.25))(x[0]).tolist()
    [0.0, 0.25, 0.0, 0.75]
    """
    return _checked("jaxgpuops.quantile", x, q, axis, method, weights, keepdims, axis_name)


def median(x: ArrayLike, *, axis: Axis = -1, keepdims: bool = False, axis_name: AxisName = None) -> jax.Array:
    """Medians along an axis, or several: `jaxgpuops.quantile` of one half, with method "midpoint".

    Args:
      x, axis, keepdims, axis_name: as for `jaxgpuops.quantile`.

    Returns:
      An array of the shape of ``x`` without the axes, of the dtype of ``x``; for integers and bools float32, or float64
      where they have 64 bits. With an even number of elements, the mean of the two in the middle. NaN where a row has a
      NaN or no elements.

    Determinism and derivatives: as for `jaxgpuops.quantile`; the elements in the middle share the cotangent.

    Raises:
      TypeError, ValueError: as `jaxgpuops.quantile`.

    Algorithms: as `jaxgpuops.kth_value`.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([[4.0, 1.0, 3.0], [0.0, 10.0, 30.0]])
    >>> jaxgpuops.median(x).tolist(), jaxgpuops.median(x, axis=None).tolist()
    ([3.0, 10.0], 3.5)
    """
    return _checked("jaxgpuops.median", x, 0.5, axis, "midpoint", None, keepdims, axis_name)


def _checked(op, x, q, axis, method, weights, keepdims, axis_name):
    x, weights = _arguments.array(op, "x", x), _arguments.optional(op, "weights", weights)
    axis, keepdims = _arguments.axes(op, axis), _arguments.flag(op, "keepdims", keepdims)
    method = _arguments.choice(op, "method", method, METHODS)
    if weights is not None and method != "inverted_cdf":
        raise ValueError(f"{op}: weights go with method 'inverted_cdf' only, got {method!r}")
    axes = _arguments.axes_of(op, "x", x.shape, axis)
    names = _arguments.names(op, axis_name)
    length = math.prod(x.shape[d] for d in axes)
    if (split := _split(op, names, x.shape, axes)) is not None:
        length = split.length
    _arguments.indexed_length(op, length, x.shape, axis)
    q = np.asarray(q, np.float64) if _is_numeric(q) else _arguments.array(op, "q", q)
    if isinstance(q, np.ndarray):
        if not ((q >= 0) & (q <= 1)).all():
            raise ValueError(f"{op}: q must be between 0 and 1, got {q}")
    elif q.dtype in _arguments.INTEGERS:
        q = q.astype(_arguments.inexact(q.dtype))
    elif not jnp.issubdtype(q.dtype, jnp.floating):
        raise TypeError(f"{op}: q must be floats, got {q.dtype}")
    if q.ndim > 1:
        raise ValueError(f"{op}: q must be a scalar or have one dimension, got shape {q.shape}")
    if isinstance(q, jax.Array) and q.ndim:
        q = gathered(q, 0)
    if isinstance(q, np.ndarray) and not jax.export.is_symbolic_dim(length):
        places = _places(np, q, length, method)
    else:
        q = jnp.asarray(q)
        places = _places(jnp, q.astype(_arguments.wide(q.dtype)), length, method)
    return _quantile(x, q, places, weights, op, axes, method, keepdims, names)


def _split(op, names, shape, axes):
    return manual(op, names, shape[axes[0]]) if _arguments.one_axis(op, names, axes) else None


def _is_numeric(q: Any) -> bool:
    """Whether NumPy can convert it to real numbers, and it is no JAX array."""
    try:
        return not isinstance(q, jax.Array) and np.asarray(q).dtype.kind in "iuf"
    except (TypeError, ValueError):
        return False


def _places(xp, q, length, method):
    """Ranks of the elements below and above each quantile, and how far it is from the first to the second."""
    one = q.dtype.type(1)
    q = xp.where((q >= 0) & (q <= 1), q, q.dtype.type(0))  # others give NaN, whatever is taken
    last = length - one
    at = q * last
    if method == "inverted_cdf":
        low = high = xp.ceil(q * (last + one)) - one
    elif method in ("lower", "linear", "midpoint"):
        low, high = xp.floor(at), xp.floor(at) if method == "lower" else xp.ceil(at)
    else:
        low = high = xp.ceil(at) if method == "higher" else xp.round(at)
    place = lambda rank: xp.clip(rank, 0, last).astype(np.int32)
    return place(low), place(high), at - low


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7, 8), inline=True)
def _quantile(x, q, places, weights, op, axes, method, keepdims, names):
    _arguments.dtype(op, "x", x.dtype, _arguments.ORDERED_DTYPES)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    dtype = x.dtype if is_float else _arguments.inexact(x.dtype)
    merged = Merged(x.shape, axes)
    rows = merged.merge(x)
    axis, length = merged.axis, rows.shape[merged.axis]
    count, split = q.size, _split(op, names, x.shape, axes)
    along = lambda v: v.reshape(*(1,) * axis, -1, *(1,) * (rows.ndim - 1 - axis))
    wide = _arguments.wide(dtype)
    if isinstance(length, int) and length == 0:
        y = jnp.full((*rows.shape[:axis], count, *rows.shape[axis + 1 :]), np.nan, wide)
    else:
        valid = (q >= q.dtype.type(0)) & (q <= q.dtype.type(1))
        if weights is None:
            ranks = jnp.concatenate([jnp.asarray(p).reshape(-1) for p in places[: 1 + (method in BETWEEN)]])
            shares = jnp.where(valid, places[2], np.array(np.nan, places[2].dtype)).astype(wide)
            y = quantiles(rows, along(ranks), along(shares), axis, method == "midpoint", split)
        else:
            weights = _rows_of_weights(op, weights, x, axes, merged)
            y, last, total = _weighted(rows, q, weights, axis, wide, split)
            y = jnp.where(total > np.zeros((), wide), y.astype(wide), np.array(np.nan, wide))
            is_nan = jnp.isnan(last) if is_float else np.False_
            y = jnp.where(is_nan | ~along(valid), np.array(np.nan, wide), y)
    y = y.astype(dtype)
    if q.ndim:
        y = jnp.moveaxis(y, axis, 0)
        return lax.expand_dims(y, [d + 1 for d in axes]) if keepdims else y
    return merged.reduced(lax.squeeze(y, (axis,)), keepdims)


def _rows_of_weights(op, weights, x, axes, merged):
    _arguments.dtype(op, "weights", weights.dtype, _arguments.INTEGERS | _arguments.FLOATS)
    if weights.shape != x.shape:
        if len(axes) != 1 or weights.shape != (x.shape[axes[0]],):
            raise ValueError(
                f"{op}: weights must have the shape of x, {x.shape}, or that of its axis, if it is one; got {weights.shape}"
            )
        weights = jnp.broadcast_to(lax.expand_dims(weights, range(1, x.ndim - axes[0])), x.shape)
    return merged.merge(lax.stop_gradient(weights))


def _weighted(rows, q, weights, axis, wide, split):
    """Quantiles of rows, the last elements of their order, and the sums of the weights."""
    values, weights = sort_operands(align(rows, weights.astype(wide)), axis, 1, split=split)[0]
    length = rows.shape[axis] if split is None else split.length
    sums = cumsum(weights, axis, axis_name=None if split is None else split.names)
    total, last = (_at(x, length - 1, axis, split) for x in (sums, values))
    share = sums / total
    share = jnp.where(
        share == np.zeros((), wide), np.array(-1, wide), share
    )  # elements before the first weight are never taken
    queries = q.astype(wide).reshape(*(1,) * axis, -1, *(1,) * (rows.ndim - 1 - axis))
    queries = jnp.broadcast_to(queries, (*rows.shape[:axis], q.size, *rows.shape[axis + 1 :]))
    place = searchsorted(*align(gathered(share, axis), queries), axis)
    place = jnp.minimum(place if split is None else split.sum(place), jnp.full((), length - 1, np.int32))
    values, place = align(values, place, apart=axis)
    return follow(values, place, q.size, axis, split), last, total


def _at(x, place, axis, split):
    """Returns the element at one place of the axis."""
    if split is None and along(x, axis) is None:
        return lax.slice_in_dim(x, place, place + 1, axis=axis)
    places = jnp.full([1 if d == axis else n for d, n in enumerate(x.shape)], place, np.int32)
    x, places = align(x, places, apart=axis)
    return take_along_axis(x, places, axis, split)


# ---- One rank -------------------------------------------------------------------------------------------------------


def _ranked(op: str, name: str, x: ArrayLike, rank: Any, axis: Any, axis_name: AxisName):
    """Checks an array and a rank along an axis. The rank counts from the largest if it is negative; returns the array,
    the rank from the smallest, the axis and its names."""
    x = _arguments.array(op, "x", x)
    axis = check_operands(op, ("x",), (x,), _arguments.integer(op, "axis", axis), 1)
    names = _arguments.names(op, axis_name)
    split = manual(op, names, x.shape[axis])
    length, of = (x.shape[axis], "of") if split is None else (split.length, f"of {split.shards} devices with parts of")
    rank = _arguments.integer(op, name, rank)
    if jax.export.is_symbolic_dim(length):
        if rank < 0:
            raise ValueError(f"{op}: {name} must not be negative if the length of axis {axis} is symbolic, got {rank}")
        return x, rank, axis, names
    if not -length <= rank < length:
        raise ValueError(
            f"{op}: {name} must be between {-length} and {length - 1} for axis {axis} {of} shape {x.shape}, got {rank}"
        )
    return x, rank % length, axis, names


def kth_value(x: ArrayLike, k: int, *, axis: int = -1, axis_name: AxisName = None) -> tuple[jax.Array, jax.Array]:
    """The element of rank k along an axis, and its index.

    Args:
      x: array of the dtypes of `jaxgpuops.sort`.
      k: the rank, static: 0 is that of the smallest element; -1 that of the largest. (`torch.kthvalue` counts from 1.)
        Not negative if the axis has a symbolic length (`jax.export`).
      axis: the axis that the rank is along.
      axis_name: inside `jax.shard_map`, what ``axis`` is split along, as for `jaxgpuops.topk`: ranks and indices are of
        the whole axis.

    Returns:
      ``(values, indices)``, of the shape of ``x`` without the axis: ``sort(x)[..., k]`` bit for bit, and
      ``argsort(x)[..., k]``, int32: of equal elements those at lower indices have lower ranks.

    Order: that of `jaxgpuops.sort`: NaNs are equal and last, -0 and +0 are equal. The result is the same in every run.

    Derivatives: the cotangent goes to the element itself. Both modes.

    Raises:
      TypeError: for other dtypes, for ``k`` or ``axis`` that is not an integer.
      ValueError: for ``k`` or ``axis`` out of range.

    Algorithms: Floyd & Rivest, "Expected time bounds for selection" (1975); docs/select.md.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> value, index = jaxgpuops.kth_value(jnp.array([[3.0, 1.0, 3.0], [7.0, 9.0, 8.0]]), 1)
    >>> value.tolist(), index.tolist()
    ([3.0, 8.0], [0, 2])
    >>> jax.grad(lambda x: jaxgpuops.kth_value(x, -1)[0])(jnp.array([1.0, 3.0, 2.0])).tolist()
    [0.0, 1.0, 0.0]
    """
    return _kth_value(*_ranked("jaxgpuops.kth_value", "k", x, k, axis, axis_name))


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _kth_value(x, k, axis, names):
    x, split = gathered(x, axis), manual("jaxgpuops.kth_value", names, x.shape[axis])
    if x.dtype in _arguments.ORDERED_DTYPES:
        rank = jnp.full((1,) * x.ndim, k, np.int32)
        value, index = select(x, rank, axis, split)
    else:
        index = _at(permutation([x], axis, split=split), k, axis, split)
        value = take_along_axis(x, index, axis, split)
    return lax.squeeze(value, (axis,)), lax.squeeze(index, (axis,))


def partition(x: ArrayLike, kth: int, *, axis: int = -1, axis_name: AxisName = None) -> jax.Array:
    """The elements along an axis, reordered: the kth is the one that a sort puts there, none before it is larger, and
    none after it is smaller. That is the contract of `jax.numpy.partition`.

    Args:
      x: array of the dtypes of `jaxgpuops.sort`.
      kth: the rank, static; negative from the largest, if the length of the axis is known.
      axis: the axis.
      axis_name: inside `jax.shard_map`, what ``axis`` is split along, as for `jaxgpuops.sort`: the rank is of the whole
        axis, and the result this device's part.

    Returns:
      An array of the shape and dtype of ``x``. The elements before and after ``kth`` are in the order of appearance, or
      sorted, whichever is faster; do not rely on it. It is the same in every run.

    Order and derivatives: those of `jaxgpuops.sort`: NaNs are equal and last, equal elements go by index.

    Raises:
      TypeError, ValueError: as `jaxgpuops.sort`; also ValueError for ``kth`` out of range.

    Algorithms: as `jaxgpuops.kth_value`, or a sort.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.partition(jnp.array([4, 1, 3, 2]), 1)[1].tolist()
    2
    """
    return _partition(*_ranked("jaxgpuops.partition", "kth", x, kth, axis, axis_name))


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _partition(x, kth, axis, names):
    split = manual("jaxgpuops.partition", names, x.shape[axis])
    if x.dtype not in _arguments.ORDERED_DTYPES:
        return sort_operands([x], axis, 1, split=split)[0][0]
    [values] = sort_p(gathered(x, axis), axis=axis, descending=False, values=True, indices=False, kth=kth, split=split)
    return values
