"""Places: of queries in sorted rows, and of what a mask chooses."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, overload

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxgpuops import _arguments
from jaxgpuops._arguments import AxisName, int32
from jaxgpuops._axes import Merged
from jaxgpuops._primitive import align
from jaxgpuops._split import manual
from jaxgpuops.lax import _search as _lax
from jaxgpuops.lax._segments import take_rows
from jaxgpuops.lax.along_axis import gathered
from jaxgpuops.lax.order import moved


def searchsorted(
    sorted: ArrayLike,
    queries: ArrayLike,
    side: Literal["left", "right"] = "left",
    *,
    axis: int = -1,
    axis_name: AxisName = None,
) -> jax.Array:
    """Where queries belong in sorted rows: `jax.numpy.searchsorted` for one row or a batch of them.

    Args:
      sorted: array of shape ``(*before, n, *after)``, ``n < 2**31``, of dtype bool, int8 to int64, uint8 to uint64,
        float8_e4m3fn, float8_e5m2, float16, bfloat16, float32 or float64, whose rows along ``axis`` ascend in the order
        of `jaxgpuops.sort`. In rows that do not, a place is anything between 0 and ``n``.
      queries: array of shape ``(*before, m, *after)``, where either array may have size 1 in a dimension off the axis
        and is then shared, not copied if it is ``sorted``; or of any shape, a scalar too, if ``sorted`` has one
        dimension. Of a dtype as ``sorted``; different dtypes are promoted as in JAX.
      side: "left" for the first place that keeps the order, "right" for the last: before or after equal elements.
      axis: the axis of ``sorted``, and of ``queries`` unless ``sorted`` has one dimension.
      axis_name: inside `jax.shard_map`, what the rows of ``sorted`` are split along, as for `jaxgpuops.topk`: queries
        are the same on all devices, and so are the places, which are of the whole rows. One number crosses for each.

    Returns:
      int32 array: for each query how many elements of its row are smaller ("left"), or smaller or equal ("right").

    Order: that of `jaxgpuops.sort`. NaNs are equal to each other and above every number, -0 and +0 are equal, subnormal
    numbers are not zeros (as they are for XLA's CPU backend). The result is exact, and the same in every run. There is
    no derivative: places are integers.

    Raises:
      TypeError: for other dtypes, and an ``axis`` that is not an integer.
      ValueError: for another ``side``, an ``axis`` out of range, shapes that do not fit, ``n >= 2**31``.

    Algorithms: binary searches, search trees and tables (docs/select.md).

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.searchsorted(jnp.array([1, 3, 3, 5]), jnp.array([0, 3, 9])).tolist()
    [0, 1, 4]
    >>> jaxgpuops.searchsorted(jnp.array([1, 3, 3, 5]), 3, side="right").tolist()
    3
    >>> jaxgpuops.searchsorted(jnp.array([[1, 3, 5], [2, 4, 6]]), jnp.array([[3], [7]])).tolist()
    [[1], [3]]
    """
    op = "jaxgpuops.searchsorted"
    sorted, queries = _arguments.array(op, "sorted", sorted), _arguments.array(op, "queries", queries)
    side = _arguments.choice(op, "side", side, ("left", "right"))
    axis, names = _arguments.integer(op, "axis", axis), _arguments.names(op, axis_name)
    return _searchsorted(sorted, queries, axis, side == "right", names)


# Checks of shapes and dtypes run while tracing: an eager call that has been made before costs one dispatch.
@functools.partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
def _searchsorted(sorted, queries, axis, right, names):
    op = "jaxgpuops.searchsorted"
    for name, x in (("sorted", sorted), ("queries", queries)):
        _arguments.dtype(op, name, x.dtype, _arguments.ORDERED_DTYPES)
    axis = _arguments.indexed_axis(op, "sorted", sorted, axis)
    split = manual(op, names, sorted.shape[axis])
    dtype, shape = _arguments.promoted(op, sorted=sorted, queries=queries), queries.shape
    sorted, queries = sorted.astype(dtype), queries.astype(dtype)
    if sorted.ndim == 1:
        queries = queries.reshape(shape or (1,))
        axis = queries.ndim - 1
        sorted = lax.expand_dims(sorted, range(axis))
    else:
        shape = _shape_of_places(op, sorted.shape, queries.shape, axis)
        queries = jnp.broadcast_to(queries, shape)
    queries, sorted = align(queries, gathered(sorted, axis), apart=axis)
    places = _lax.searchsorted(sorted, queries, axis, right).reshape(shape)
    return places if split is None else split.sum(places)


def _shape_of_places(op, sorted, queries, axis):
    """Returns the shape of the queries, with the dimensions that only the rows have."""
    fits = len(sorted) == len(queries) and all(
        d == axis or n == m or 1 in (n, m) for d, (n, m) in enumerate(zip(sorted, queries, strict=True))
    )
    if not fits:
        raise ValueError(
            f"{op}: queries must have the shape of sorted, {sorted}, but for axis {axis} and dimensions of size 1, or "
            f"sorted one dimension; got {queries}"
        )
    return tuple(m if d == axis or n == 1 else n for d, (n, m) in enumerate(zip(sorted, queries, strict=True)))


# ---- What a mask chooses --------------------------------------------------------------------------------------------


def _fill(op: str, value: ArrayLike, dtype: np.dtype) -> jax.Array:
    """Checks that a fill value is a scalar; returns it in this dtype."""
    fill = _arguments.array(op, "fill_value", value)
    if fill.ndim:
        raise ValueError(f"{op}: fill_value must be a scalar, got shape {fill.shape}")
    if fill.dtype in _arguments.COMPLEX and dtype not in _arguments.COMPLEX:
        raise TypeError(f"{op}: fill_value must not be complex where x has dtype {dtype}, got {fill.dtype}")
    return fill.astype(dtype)


def _flat(op, name, x):
    """Returns all of x as one row, which must be short enough for int32 indices."""
    x = Merged(x.shape, tuple(range(x.ndim))).merge(x).reshape(-1)
    _arguments.indexed_axis(op, name, x, 0)
    return x


def _index(op: str, value: ArrayLike | None) -> Any:
    """Checks that what comes after the last index is an integer, or None, which is 0; returns it as int32."""
    if value is None:
        return np.int32(0)
    value = _arguments.array(op, "fill_value", value)
    _arguments.dtype(op, "fill_value", value.dtype, _arguments.INTEGERS)
    if value.ndim:
        raise ValueError(f"{op}: each fill_value must be a scalar, got shape {value.shape}")
    return value.astype(np.int32)


def nonzero(
    x: ArrayLike, *, size: int, fill_value: ArrayLike | tuple[ArrayLike, ...] | None = None
) -> tuple[jax.Array, ...]:
    """The indices of the elements that are not zero, in row-major order: `jax.numpy.nonzero` with a static size.

    Args:
      x: array of any shape but a scalar, of less than ``2**31`` elements: bools, or numbers of any dtype. NaN is not
        zero.
      size: how many indices, static. If more are not zero, the first ``size`` of them.
      fill_value: what comes after the last: an integer, or one for each dimension; 0 by default.

    Returns:
      A tuple with an int32 array of shape ``(size,)`` for each dimension of ``x``.

    Raises:
      TypeError: for a ``size`` that is not an integer known at trace time, and a ``fill_value`` of no integers.
      ValueError: for a scalar ``x``, a negative ``size``, and another number of ``fill_value`` than dimensions.

    The result is exact, and the same in every run; -0 is zero. Algorithms: docs/select.md.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> rows, columns = jaxgpuops.nonzero(jnp.array([[0, 7, 0], [8, 0, 9]]), size=4, fill_value=-1)
    >>> rows.tolist(), columns.tolist()
    ([0, 1, 1, -1], [1, 0, 2, -1])
    """
    op = "jaxgpuops.nonzero"
    x = _arguments.array(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    fills = fill_value if isinstance(fill_value, tuple) else (fill_value,) * x.ndim
    if len(fills) != x.ndim:
        raise ValueError(f"{op}: fill_value must have one entry for each of {x.ndim} dimensions, got {len(fills)}")
    fills = [_index(op, value) for value in fills]
    computed = x.dtype != np.dtype(bool) or isinstance(x, jax.core.Tracer)
    size = _arguments.size(op, "size", size)
    return _nonzero(x, fills, size, computed)


# XLA computes four elements of a mask in a thread only if their number is a multiple of four. Padding is free: it is
# fused. (It is a copy if a program gets the mask as an argument, and makes none.)
def _padded(mask):
    n = mask.shape[-1]
    if jax.export.is_symbolic_dim(n) or n < 1 << 20 or n % 16 == 0:
        return mask
    return lax.pad(mask, np.False_, [*[(0, 0, 0)] * (mask.ndim - 1), (0, -n % 16, 0)])


@functools.partial(jax.jit, static_argnums=(2, 3), inline=True)
def _nonzero(x, fills, size, computed):
    mask = x if x.dtype == np.dtype(bool) else x != np.zeros((), x.dtype)
    row = gathered(_flat("jaxgpuops.nonzero", "x", mask), 0)
    row = _padded(row) if computed else row
    if x.ndim == 1:
        return (_lax.choose(row, size, fills[0]),)
    place = _lax.choose(row, size)
    found = place < int32(x.size)
    indices = []
    for n in reversed(x.shape):
        n = int32(jax.core.max_dim(n, 1))
        indices.append(place % n)
        place = place // n
    return tuple(jnp.where(found, i, fill) for i, fill in zip(reversed(indices), fills, strict=True))


def compact(x: ArrayLike, mask: ArrayLike, *, size: int, fill_value: ArrayLike = 0) -> jax.Array:
    """The elements, or rows, that a mask chooses, one after another.

    Args:
      x: array of shape ``(*batch, n, *features)``, ``n < 2**31``, of any dtype.
      mask: booleans of shape ``(*batch, n)``.
      size: how many elements of each row of the batch, static. If more are chosen, the first ``size`` of them.
      fill_value: what comes after the last: a scalar.

    Returns:
      An array of shape ``(*batch, size, *features)`` and the dtype of ``x``: ``x[mask]`` of each row of the batch, cut
      or filled. Elements are moved bit for bit, in the order in which they were; the result is the same in every run.

    Derivatives: the cotangents go back to where elements came from; fills have none, nor has the mask. Both modes.

    Raises:
      TypeError: for a mask that is not of bools, and a ``size`` that is not an integer known at trace time.
      ValueError: for a mask of another shape, a negative ``size``, and a ``fill_value`` that is not a scalar.

    Algorithms: docs/select.md.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    >>> jaxgpuops.compact(x, x % 2 == 0, size=2, fill_value=-1.0).tolist()
    [[2.0, -1.0], [4.0, 6.0]]
    >>> jaxgpuops.compact(x, jnp.array([False, True]), size=1).tolist()  # rows
    [[4.0, 5.0, 6.0]]
    """
    op = "jaxgpuops.compact"
    x, mask = _arguments.array(op, "x", x), _arguments.array(op, "mask", mask)
    _arguments.dtype(op, "mask", mask.dtype, [np.dtype(bool)])
    if mask.ndim == 0 or x.shape[: mask.ndim] != mask.shape:
        raise ValueError(f"{op}: mask must have the first dimensions of x, of shape {x.shape}, got {mask.shape}")
    fill, size = _fill(op, fill_value, x.dtype), _arguments.size(op, "size", size)
    return _compact(x, mask, fill, size, isinstance(mask, jax.core.Tracer))


@functools.partial(jax.jit, static_argnums=(3, 4), inline=True)
def _compact(x, mask, fill, size, computed):
    axis = _arguments.indexed_axis("jaxgpuops.compact", "x", x, mask.ndim - 1)
    mask = gathered(mask, mask.ndim - 1)
    place = _lax.choose(_padded(mask) if computed else mask, size)
    place = place.reshape(*place.shape, *(1,) * (x.ndim - mask.ndim))
    rows, place = align(gathered(x, axis), place)
    select = _selected if jnp.issubdtype(x.dtype, jnp.floating) else jnp.where
    return select(place < int32(x.shape[axis]), take_rows(rows, place, axis, True), fill)


@jax.custom_jvp
def _selected(condition, x, y):
    return moved(functools.partial(jnp.where, condition), x, y)


# To JAX, bits have no derivative: tangents are moved as floats.
_selected.defjvp(lambda primals, tangents: (_selected(*primals), jnp.where(primals[0], *tangents[1:])))


@overload
def unique(x: ArrayLike, *, size: int, fill_value: ArrayLike | None = None) -> jax.Array: ...
@overload
def unique(
    x: ArrayLike,
    *,
    size: int,
    fill_value: ArrayLike | None = None,
    return_index: Literal[True],
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[jax.Array, ...]: ...
@overload
def unique(
    x: ArrayLike,
    *,
    size: int,
    fill_value: ArrayLike | None = None,
    return_index: bool = False,
    return_inverse: Literal[True],
    return_counts: bool = False,
) -> tuple[jax.Array, ...]: ...
@overload
def unique(
    x: ArrayLike,
    *,
    size: int,
    fill_value: ArrayLike | None = None,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: Literal[True],
) -> tuple[jax.Array, ...]: ...
def unique(
    x: ArrayLike,
    *,
    size: int,
    fill_value: ArrayLike | None = None,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> jax.Array | tuple[jax.Array, ...]:
    """The different elements of an array, in ascending order: `jax.numpy.unique` with a static size.

    Args:
      x: array of any shape, of less than ``2**31`` elements, of the dtypes of `jaxgpuops.searchsorted`.
      size: how many elements, static. If there are more different ones, the smallest ``size`` of them.
      fill_value: what comes after the last; by default the smallest element. An ``x`` without elements needs one,
        unless ``size`` is 0.
      return_index: True for the index in the flattened ``x`` at which each element occurs first; in place of fills,
        that of the smallest element.
      return_inverse: True for the place of each element of ``x`` among the different ones, which may be beyond
        ``size``.
      return_counts: True for how often each is there, 0 in place of fills.

    Returns:
      An array of shape ``(size,)``; with flags a tuple of it and of int32 arrays, in the order of the flags, of shape
      ``(size,)``, but for the inverse, which has that of ``x``.

    Order: that of `jaxgpuops.sort`: NaNs are equal and last; of -0 and +0, which are equal, the first is kept. The
    result is the same in every run. Derivatives: the cotangent of an element goes to its first occurrence. Both modes.

    Raises:
      TypeError: for other dtypes, a ``size`` that is not an integer, and flags that are not True or False, known at
        trace time.
      ValueError: for ``size`` out of range, and where there is nothing to fill with.

    Algorithms: a sort, and a comparison of neighbours; hash tables, if few of many elements are different; of elements
    of 8 or 16 bits, the count of each possible element (docs/select.md).

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([3, 1, 3, 2])
    >>> jaxgpuops.unique(x, size=3).tolist()
    [1, 2, 3]
    >>> values, index, inverse, counts = jaxgpuops.unique(
    ...     x, size=4, fill_value=0, return_index=True, return_inverse=True, return_counts=True
    ... )
    >>> values.tolist(), inverse.tolist(), counts.tolist()
    ([1, 2, 3, 0], [2, 0, 2, 1], [1, 1, 2, 0])
    """
    op = "jaxgpuops.unique"
    x = _arguments.array(op, "x", x)
    fill = None if fill_value is None else _fill(op, fill_value, x.dtype).reshape(1)
    flags = {"return_index": return_index, "return_inverse": return_inverse, "return_counts": return_counts}
    wanted = tuple(_arguments.flag(op, name, value) for name, value in flags.items())
    outs = _unique(x, fill, _arguments.size(op, "size", size), wanted)
    return outs if any(wanted) else outs[0]


@functools.partial(jax.jit, static_argnums=(2, 3), inline=True)
def _unique(x, fill, size, wanted):
    op = "jaxgpuops.unique"
    _arguments.dtype(op, "x", x.dtype, _arguments.ORDERED_DTYPES)
    row = _flat(op, "x", x)
    length = math.prod(x.shape)
    if length == 0 and fill is None:
        if size != 0:
            raise ValueError(f"{op}: x of shape {x.shape} has no elements, so fill_value must be given")
        fill = np.zeros(1, x.dtype)
    index, inverse, counts = wanted
    *outs, count = _lax.unique(gathered(row, 0), fill, size, index, inverse)
    if inverse:
        outs[-1] = outs[-1].reshape(x.shape)
    return (*outs, count) if counts else tuple(outs)
