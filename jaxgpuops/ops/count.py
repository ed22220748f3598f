"""Counts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxgpuops import _arguments
from jaxgpuops._arguments import AxisName
from jaxgpuops._primitive import align, as_automatic
from jaxgpuops._split import manual
from jaxgpuops.lax import _count as _lax
from jaxgpuops.lax._segments import as_ids, segment_sum_p
from jaxgpuops.ops import reduce
from jaxgpuops.ops.segments import check_data, integers, reduced_along


def bincount(x: ArrayLike, length: int, weights: ArrayLike | None = None, *, axis_name: AxisName = None) -> jax.Array:
    """How often each of the numbers 0 to ``length - 1`` is there, along the last axis.

    Args:
      x: integers of shape ``(*batch, n)``, of any integer dtype. Those out of range, negative ones too, are not counted
        (`jax.numpy.bincount` counts negative ones as 0).
      length: how many bins, static.
      weights: what each number adds to its bin in place of 1, of the shape of x, or any that broadcasts to it.
      axis_name: inside `jax.shard_map`, the name of the mesh axis that the last axis of ``x`` is split along, or
        several, the slowest first. ``x`` is then this device's part; all devices get the counts of the whole axis. See
        docs/sharding.md.

    Returns:
      Counts of shape ``(*batch, length)``, int32, or sums of the dtype of the weights. A NaN weight makes its bin NaN.
      A row has the same bits in every run, alone or in a batch. Gradients reach the weights.

    Raises:
      TypeError: for numbers that are not integers, weights of bools or floats of 8 bits, and a ``length`` that is not
        an integer known at trace time.
      ValueError: for a scalar ``x``, a negative ``length``, and weights that do not broadcast to x.

    Algorithms: docs/count.md.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.bincount(jnp.array([[1, 1, 3], [0, 9, -1]]), 4).tolist()
    [[0, 2, 0, 1], [1, 0, 0, 0]]
    >>> jaxgpuops.bincount(jnp.array([1, 1, 3]), 4, weights=jnp.array([0.5, 1.0, 2.0])).tolist()
    [0.0, 1.5, 0.0, 2.0]
    """
    op = "jaxgpuops.bincount"
    x = integers(op, "x", x)
    length = _arguments.size(op, "length", length)
    _arguments.axis_of(op, "x", x.shape, -1)
    return _jitted_bincount(x, _weights(op, weights, x.shape), length, op, _arguments.names(op, axis_name))


def _weights(op, weights, shape):
    """Checks that weights are None or numbers that broadcast to ``shape``."""
    weights = _arguments.optional(op, "weights", weights)
    if weights is None:
        return None
    check_data(op, "weights", weights)
    return _arguments.broadcasting(op, "weights", weights, shape)


@functools.partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
def _jitted_bincount(x, weights, length, op, names):
    split = manual(op, names, x.shape[-1])
    if weights is None:
        return _lax.bincount(x, x.ndim - 1, length, split)
    weights = jnp.broadcast_to(weights, (*weights.shape[:-1], x.shape[-1]))  # rows of x may share weights
    return reduced_along(segment_sum_p, weights, as_ids(x, length), x.ndim - 1, length, False, split)


def histogram(
    x: ArrayLike,
    bins: int | ArrayLike = 10,
    *,
    range: tuple[ArrayLike, ArrayLike] | None = None,
    weights: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> tuple[jax.Array, jax.Array]:
    """How many numbers fall between edges, along the last axis.

    Args:
      x: numbers of shape ``(*batch, n)``: integers, float16, bfloat16, float32 or float64. NaNs and numbers beyond the
        edges are not counted.
      bins: how many bins of equal width, static; or their edges, which ascend, of shape ``(bins + 1,)``.
      range: the first and the last edge, where ``bins`` is a number; those of all of x by default.
      weights: what each number adds in place of 1, of the shape of x, or any that broadcasts to it.
      axis_name: inside `jax.shard_map`, what the last axis is split along, as for `jaxgpuops.bincount`. Edges are then
        those of all of x on all devices.

    Returns:
      ``(counts, edges)``, as `jax.numpy.histogram` of each row gives them, but for the dtype of counts, which is int32:
      a bin has its lower edge, the last one has both. Of shapes ``(*batch, bins)`` and ``(bins + 1,)``. Sums of weights
      have the same bits in every run.

    Raises:
      TypeError: for other dtypes, and ``bins`` that is neither an integer known at trace time nor an array.
      ValueError: for a scalar ``x``, edges of another shape, fewer than two of them, a ``range`` that is not two
        numbers or goes with edges, and weights that do not broadcast.

    Algorithms: docs/count.md.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> counts, edges = jaxgpuops.histogram(jnp.array([0.0, 0.1, 0.9, 2.0]), 4)
    >>> counts.tolist(), edges.tolist()
    ([2, 1, 0, 1], [0.0, 0.5, 1.0, 1.5, 2.0])
    """
    op = "jaxgpuops.histogram"
    x = _arguments.array(op, "x", x)
    _arguments.dtype(op, "x", x.dtype, _arguments.INTEGERS | _arguments.FLOATS)
    _arguments.axis_of(op, "x", x.shape, -1)
    if x.dtype not in _arguments.FLOATS:
        x = x.astype(_arguments.inexact(x.dtype))
    weights, names = _weights(op, weights, x.shape), _arguments.names(op, axis_name)
    bins = jnp.asarray(bins) if hasattr(bins, "__jax_array__") else bins
    even = not isinstance(bins, list | tuple) and np.ndim(bins) == 0
    if even:
        count = _arguments.size(op, "bins", bins)
        ends: Any = None if range is None else _range(op, range, x.dtype)
        if ends is None and manual(op, names, x.shape[-1]) is not None and x.size:
            ends = (reduce.min(x.ravel(), axis_name=names), reduce.max(x.ravel(), axis_name=names))
        edges = _even_edges(x, count, ends)
    else:
        if range is not None:
            raise ValueError(f"{op}: range is that of bins of equal width; got edges and range={range}")
        edges = _arguments.array(op, "bins", bins)
        _arguments.dtype(op, "bins", edges.dtype, _arguments.INTEGERS | _arguments.FLOATS)
        if edges.ndim != 1 or edges.shape[0] < 2:
            raise ValueError(f"{op}: edges must have shape (bins + 1,), got {edges.shape}")
        count = edges.shape[0] - 1
    edges = edges.astype(x.dtype)
    if even and weights is None and count > 0:
        return _jitted_histogram(x, edges, names), edges
    return _jitted_bincount(_places(x, edges), weights, count, op, names), edges


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _even_edges(x, count, ends):
    return jnp.histogram_bin_edges(x, count, ends)


@functools.partial(jax.jit, inline=True)
def _places(x, edges) -> Any:
    """Returns the bin of each number."""
    flat = lambda x, edges: _lax.bins_of(x, edges.reshape(*(1,) * (x.ndim - 1), -1), x.ndim - 1)
    return as_automatic(flat, jax.typeof(x).sharding.spec, x, edges)


def _range(op, range, dtype):
    """Returns the first and the last edge as an array."""
    ends = _arguments.array(op, "range", range)
    _arguments.dtype(op, "range", ends.dtype, _arguments.INTEGERS | _arguments.FLOATS)
    if ends.shape != (2,):
        raise ValueError(f"{op}: range must be two numbers, got an array of shape {ends.shape}")
    return ends.astype(dtype)


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _jitted_histogram(x, edges, names):
    split = manual("jaxgpuops.histogram", names, x.shape[-1])
    x, edges = align(x, edges.reshape(*(1,) * (x.ndim - 1), -1))
    return _lax.histogram(x, edges, x.ndim - 1, split)
