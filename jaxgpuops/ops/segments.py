"""Segments, and rows of a table."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxgpuops import _arguments
from jaxgpuops._arguments import AxisName
from jaxgpuops._derivatives import sum_to
from jaxgpuops._primitive import align
from jaxgpuops._split import manual
from jaxgpuops.lax import _segments as _lax
from jaxgpuops.lax._segments import (
    SEGMENT_KERNELS,
    as_ids,
    as_int32,
    of_segments,
    segment_logsumexp_p,
    segment_max_p,
    segment_softmax_p,
    segment_sum_p,
)
from jaxgpuops.lax.along_axis import along


def integers(op: str, name: str, x) -> jax.Array:
    x = _arguments.labels(op, name, x)
    _arguments.dtype(op, name, x.dtype, _arguments.INTEGERS)
    return x


def check_data(op, name, data, bools=False):
    allowed = _arguments.INTEGERS | _arguments.FLOATS | (frozenset([np.dtype(bool)]) if bools else _arguments.COMPLEX)
    _arguments.dtype(op, name, data.dtype, allowed)


def _rows_of_ids(op, data, segment_ids, num_segments):
    ids = integers(op, "segment_ids", segment_ids)
    num_segments = _arguments.size(op, "num_segments", num_segments)
    if ids.ndim != 1 or data.shape[:1] != ids.shape:
        raise ValueError(
            f"{op}: segment_ids must have shape (n,) where data has (n, ...), got {ids.shape} and {data.shape}"
        )
    return ids, num_segments


def _segment_op(op, kernel, data, segment_ids, num_segments, indices_are_sorted, axis_name):
    data = _arguments.array(op, "data", data)
    check_data(op, "data", data, bools=kernel is not segment_sum_p)
    ids, num_segments = _rows_of_ids(op, data, segment_ids, num_segments)
    is_sorted = _arguments.flag(op, "indices_are_sorted", indices_are_sorted)
    return _jitted_segments(data, ids, kernel.name, num_segments, is_sorted, op, _arguments.names(op, axis_name))


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6), inline=True)
def _jitted_segments(data, ids, name, length, sorted, op, names):
    split = manual(op, names, ids.shape[0])
    ids = as_ids(ids, length).reshape(-1, *(1,) * (data.ndim - 1))
    own = data.astype(np.uint8) if data.dtype == np.dtype(bool) else data
    return reduced_along(SEGMENT_KERNELS[name], own, ids, 0, length, sorted, split).astype(data.dtype)


def reduced_along(kernel, data, ids, axis, length, sorted, split) -> Any:
    data, ids = align(data, ids)
    if jnp.issubdtype(data.dtype, jnp.complexfloating):
        each = (data.real, data.imag)
        parts: list[Any] = [reduced_along(kernel, part, ids, axis, length, sorted, split) for part in each]
        return jax.lax.complex(*parts)
    if split is not None:
        return _lax.segments(kernel, data, ids, axis, length, sorted, split=split)
    return _reduced(data, ids, kernel.name, axis, length, sorted, data.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5, 6))
# `shape` is that of the data, which the backward pass needs.
def _reduced(data, ids, name, axis, length, sorted, shape):
    return _lax.segments(SEGMENT_KERNELS[name], data, ids, axis, length, sorted)


def _reduced_forward(data, ids, name, axis, length, sorted, shape):
    out = _lax.segments(SEGMENT_KERNELS[name], data, ids, axis, length, sorted)
    return out, (ids, None if name == "segment_sum" else (data, out))


def _reduced_backward(name, axis, length, sorted, shape, residuals, ct):
    ids, extreme = residuals
    rows = _lax.take_rows(ct, ids, axis, sorted)
    if extreme is not None:
        data, out = extreme
        shares = _lax.share_of_ties(out, data, ids, axis, sorted)
        rows = (shares * rows.astype(shares.dtype)).astype(ct.dtype)
    return sum_to(rows, shape), None


_reduced.defvjp(_reduced_forward, _reduced_backward)


def segment_sum(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    *,
    indices_are_sorted: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """Sums of the rows that have the same id.

    Args:
      data: of shape ``(n, *features)``; integers, float16, bfloat16, float32, float64 or complex.
      segment_ids: integers of shape ``(n,)``. Rows whose id is not in ``[0, num_segments)`` are dropped.
      num_segments: how many segments, static.
      indices_are_sorted: True promises that ids ascend, so that they need not be sorted. If they do not, the result is
        undefined.
      axis_name: inside `jax.shard_map`, what ``n`` is split along, as for `jaxgpuops.bincount`: data and ids are this
        device's parts, and all devices get the same result.

    Returns:
      ``out[s] = sum of data[j] over all j with segment_ids[j] == s``, of shape ``(num_segments, *features)`` and the
      dtype of data; 0 for a segment without rows. Floats of 16 bits are added up in float32 and rounded once; integers
      wrap around; a NaN makes its segment NaN. Sums are exact, or their order depends on n, the features,
      ``num_segments`` and the ids only: the same bits in every run, in every batch.

    Raises:
      TypeError: for other dtypes, for ``num_segments`` that is no integer and a flag that is not True or False, known
        at trace time.
      ValueError: for shapes that do not fit, or a negative number of segments.

    Derivatives: the gradient gathers rows of the cotangent. Reverse mode works, and whatever is built on top of it;
    there is no forward mode (JAX raises TypeError).

    Algorithms: docs/count.md.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.segment_sum(jnp.array([1.0, 2.0, 4.0, 8.0]), jnp.array([0, 2, 0, 7]), 3).tolist()
    [5.0, 0.0, 2.0]
    """
    return _segment_op(
        "jaxgpuops.segment_sum", segment_sum_p, data, segment_ids, num_segments, indices_are_sorted, axis_name
    )


def segment_max(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    *,
    indices_are_sorted: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """The largest of the rows that have the same id, for each feature; as `segment_sum` otherwise.

    Args:
      data: of shape ``(n, *features)``; bools, integers, float16, bfloat16, float32 or float64.
      segment_ids, num_segments, indices_are_sorted, axis_name: as for `segment_sum`.

    Returns:
      An array of shape ``(num_segments, *features)`` and the dtype of data. A segment without rows has -inf, the
      smallest integer or False, as `jax.ops.segment_max` gives. NaN if a row has a NaN. The same bits in every run and
      batch.

    Derivatives: rows that tie share the cotangent, as in JAX. Otherwise as `segment_sum`.

    Raises:
      TypeError, ValueError: as `segment_sum`.

    Algorithms: docs/count.md.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.segment_max(jnp.array([1.0, 2.0, 4.0]), jnp.array([0, 2, 0]), 3).tolist()
    [4.0, -inf, 2.0]
    """
    return _segment_op(
        "jaxgpuops.segment_max", segment_max_p, data, segment_ids, num_segments, indices_are_sorted, axis_name
    )


def segment_min(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    *,
    indices_are_sorted: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """The smallest of the rows that have the same id, for each feature.

    Arguments, shapes, dtypes, NaNs, ties, derivatives and errors are those of `segment_max`. A segment without rows has
    inf, the largest integer or True.

    Algorithms: docs/count.md.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.segment_min(jnp.array([1.0, 2.0, 4.0]), jnp.array([0, 2, 0]), 3).tolist()
    [1.0, inf, 2.0]
    """
    kernel = SEGMENT_KERNELS["segment_min"]
    return _segment_op("jaxgpuops.segment_min", kernel, data, segment_ids, num_segments, indices_are_sorted, axis_name)


# ---- Rows of a table ------------------------------------------------------------------------------------------------


def take(table: ArrayLike, ids: ArrayLike, *, axis_name: AxisName = None) -> jax.Array:
    """Rows of a table, as an embedding looks them up; the gradient is a `segment_sum`.

    Args:
      table: of shape ``(rows, *features)``; integers, float16, bfloat16, float32, float64 or complex.
      ids: integers of any shape.
      axis_name: inside `jax.shard_map`, what the rows of the table are split along, as for `jaxgpuops.bincount`: table
        is this device's part. Ids count the rows of the whole table, and must be the same on all devices, which all get
        the same result: the rows cross, never the table.

    Returns:
      ``out[.., *features] = table[ids[..]]``, of shape ``(*ids.shape, *features)`` and the dtype of the table, bit for
      bit; zeros where an id is out of range, which neither wraps nor clamps.

    Derivatives: the gradient of the table is a `segment_sum`, with the same bits in every run; that of a table of 16
    bits is added up in float32. Reverse mode works, and whatever is built on top of it; here forward mode raises
    TypeError.

    Raises:
      TypeError: for other dtypes of the table, and ids that are not integers.
      ValueError: for a table that is a scalar, or has 2**31 rows or more.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> jaxgpuops.take(table, jnp.array([1, 1, -1])).tolist()
    [[3.0, 4.0], [3.0, 4.0], [0.0, 0.0]]
    >>> jax.grad(lambda table: jaxgpuops.take(table, jnp.array([1, 1, -1])).sum())(table).tolist()
    [[0.0, 0.0], [2.0, 2.0]]
    """
    op = "jaxgpuops.take"
    table, ids = _arguments.array(op, "table", table), integers(op, "ids", ids)
    check_data(op, "table", table)
    _arguments.indexed_axis(op, "table", table, 0)
    return _jitted_take(table, ids, _arguments.names(op, axis_name))


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _jitted_take(table, ids, names):
    split = manual("jaxgpuops.take", names, table.shape[0])
    shape = (*ids.shape, *table.shape[1:])
    table = jnp.expand_dims(table, 1) if table.ndim == 1 else table  # for ids of two dimensions, as a gather has
    rows = as_int32(ids, split.length if split else table.shape[0])
    if split:  # each device takes zeros in place of other devices' rows
        rows = rows - split.start()
    # Ids keep their dimensions, because each may be split over devices.
    axis = max(ids.ndim - 1, 0)
    rows = jax.lax.expand_dims(rows, range(ids.ndim, axis + table.ndim))
    table, rows = align(jax.lax.expand_dims(table, range(axis)), rows, apart=axis)
    is_complex = jnp.issubdtype(table.dtype, jnp.complexfloating)
    take = lambda part: _taken(part, rows, axis, table.shape[axis], along(part, axis), split)
    out: Any = jax.lax.complex(take(table.real), take(table.imag)) if is_complex else take(table)
    return out.reshape(shape)


def _rows_taken(table, ids, axis, split):
    rows = _lax.take_rows(table, ids, axis, False)
    return split.join(rows) if split else rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
# `length` is that of the table, which the backward pass needs.
def _taken(table, ids, axis, length, along, split):
    return _rows_taken(table, ids, axis, split)


def _taken_backward(axis, length, along, split, ids, ct):
    ct, ids = align(split.cotangent(ct) if split else ct, ids)
    of_ids = tuple(range(axis + 1)) if axis else 0  # the dimensions before the axis are those of ids, too
    sums = _lax.segments(segment_sum_p, ct, ids, of_ids, length, False, along)
    return jax.lax.expand_dims(sums, range(axis)), None


_taken.defvjp(
    lambda table, ids, axis, length, along, split: (_rows_taken(table, ids, axis, split), ids), _taken_backward
)


# ---- Composed of the above ------------------------------------------------------------------------------------------


def _segment_floats(op, data, segment_ids, num_segments, indices_are_sorted, axis_name):
    """Checks the arguments; returns the data, the ids, and the segments."""
    data = _arguments.array(op, "data", data)
    _arguments.dtype(op, "data", data.dtype, _arguments.FLOATS)
    ids, count = _rows_of_ids(op, data, segment_ids, num_segments)
    is_sorted = _arguments.flag(op, "indices_are_sorted", indices_are_sorted)
    of = _Of(op, count, is_sorted, _arguments.names(op, axis_name))
    return data, as_int32(ids, count), of


class _Of(NamedTuple):
    """Segments: how many there are, and how rows belong to them."""

    op: str
    segments: int
    sorted: bool
    names: tuple[str, ...] | None

    # These are made of primitives, which have forward mode, so that forward over reverse (`jax.hessian`) works.
    def sums(self, x, ids):
        return self.whole(functools.partial(segment_sum_p, along=None), x, ids)

    def of_rows(self, table, ids):
        """Returns for each row what its segment has; any value for rows without a segment."""
        table, ids = align(table, ids, apart=0)
        return _lax.take_rows(table, ids, 0, False, fill=False)

    def whole(self, kernel, x, ids):
        """Softmax of segments, the logarithms of their sums, or sums."""
        x, ids, split = *align(x, ids), manual(self.op, self.names, ids.shape[0])
        return kernel(x, ids, axis=0, length=self.segments, sorted=self.sorted, split=split)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _logsumexp(x, ids, of):
    return of.whole(segment_logsumexp_p, x, ids)


def _logsumexp_forward(x, ids, of):
    out = of.whole(segment_logsumexp_p, x.astype(_arguments.wide(x.dtype)), ids)
    return out.astype(x.dtype), (x, ids, out)


def _logsumexp_backward(of, residuals, ct):
    x, ids, out = residuals
    split = manual(of.op, of.names, ids.shape[0])
    ct = (ct if split is None else split.cotangent(ct)).astype(out.dtype)
    zero = np.zeros((), out.dtype)
    out = of.of_rows(jnp.where(jnp.isneginf(out), zero, out), ids)
    below = of_segments(jnp.minimum(x.astype(out.dtype) - out, zero), ids, of.segments)
    return of_segments(jnp.exp(below) * of.of_rows(ct, ids), ids, of.segments).astype(x.dtype), None


_logsumexp.defvjp(_logsumexp_forward, _logsumexp_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _softmax(x, ids, of):
    return of.whole(segment_softmax_p, x, ids)


def _softmax_forward(x, ids, of):
    y = of.whole(segment_softmax_p, x.astype(_arguments.wide(x.dtype)), ids)
    return y.astype(x.dtype), (y, ids)


def _softmax_backward(of, residuals, ct):
    y, ids = residuals
    dtype, ct = ct.dtype, ct.astype(y.dtype)
    return of_segments(y * (ct - of.of_rows(of.sums(y * ct, ids), ids)), ids, of.segments).astype(dtype), None


_softmax.defvjp(_softmax_forward, _softmax_backward)


def segment_logsumexp(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    *,
    indices_are_sorted: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """The logarithm of the sum of the exponentials of the rows that have the same id, for each feature.

    Args:
      data: of shape ``(n, *features)``; float16, bfloat16, float32 or float64.
      segment_ids, num_segments, indices_are_sorted, axis_name: as for `segment_sum`.

    Returns:
      An array of shape ``(num_segments, *features)`` and the dtype of data, computed in float32 at least and without
      overflow. -inf for a segment without rows or with rows of -inf only, NaN for one that has a NaN, otherwise inf for
      one that has inf. The same bits in every run and batch.

    Derivatives: the gradient is one pass over the data. Otherwise as `segment_sum`.

    Raises:
      TypeError, ValueError: as `segment_sum`.

    Algorithms: docs/count.md.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.log(jnp.array([1.0, 2.0, 4.0]))
    >>> jnp.exp(jaxgpuops.segment_logsumexp(x, jnp.array([0, 2, 0]), 3)).round(4).tolist()
    [5.0, 0.0, 2.0]
    """
    op = "jaxgpuops.segment_logsumexp"
    x, ids, of = _segment_floats(op, data, segment_ids, num_segments, indices_are_sorted, axis_name)
    return _jitted_composed(_logsumexp, x, ids, of)


def segment_softmax(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    *,
    indices_are_sorted: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """Exponentials divided by their sum over the rows that have the same id: softmax over segments, of each feature.

    Args:
      data: of shape ``(n, *features)``; float16, bfloat16, float32 or float64.
      segment_ids, num_segments, indices_are_sorted, axis_name: as for `segment_sum`.

    Returns:
      An array of the shape and dtype of data, computed in float32 at least; rows whose id is out of range have 0. A
      segment is NaN if it has a NaN, or rows of -inf only. Beside inf, whose rows are NaN, the others have 0. The same
      bits in every run and batch.

    Derivatives: the gradient has one segment sum. Otherwise as `segment_sum`.

    Raises:
      TypeError, ValueError: as `segment_sum`.

    Algorithms: docs/count.md.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.log(jnp.array([1.0, 2.0, 3.0]))
    >>> jaxgpuops.segment_softmax(x, jnp.array([0, 2, 0]), 3).round(4).tolist()
    [0.25, 1.0, 0.75]
    """
    op = "jaxgpuops.segment_softmax"
    x, ids, of = _segment_floats(op, data, segment_ids, num_segments, indices_are_sorted, axis_name)
    return _jitted_composed(_softmax, x, ids, of)


@functools.partial(jax.jit, static_argnums=(0, 3), inline=True)
def _jitted_composed(function, x, ids, of):
    return function(*align(x, ids.reshape(-1, *(1,) * (x.ndim - 1))), of)
