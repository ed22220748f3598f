"""`jaxgpuops.topk`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxgpuops import _arguments
from jaxgpuops._arguments import AxisName
from jaxgpuops._primitive import like
from jaxgpuops._split import manual
from jaxgpuops.lax._segments import as_int32
from jaxgpuops.lax._sort import bounds, permutation, sort_p
from jaxgpuops.lax._topk import top_k_p
from jaxgpuops.lax.along_axis import along, gathered, put_along_axis, take_along_axis
from jaxgpuops.lax.order import from_keys, identity, to_keys


class TopK(NamedTuple):
    """The selected elements of `jaxgpuops.topk`, and their indices.

    Attributes:
      values: ``(*before, k, *after)``, of the dtype of ``x``.
      indices: the place of each value along the axis; int32, of the same shape.
    """

    values: jax.Array
    indices: jax.Array


def topk(
    x: ArrayLike,
    k: int,
    *,
    axis: int = -1,
    largest: bool = True,
    sorted: bool = True,
    offsets: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> TopK:
    """The ``k`` largest (or smallest) elements along an axis, and their indices.

    With default flags the result equals ``jax.lax.top_k(x, k, axis=axis)`` on CPU bit for bit, on every platform.

    Args:
      x: array of shape ``(*before, n, *after)``, ``n < 2**31``, of dtype bool, int8 to int64, uint8 to uint64,
        float8_e4m3fn, float8_e5m2, float16, bfloat16, float32 or float64.
      k: how many, ``0 <= k <= n``; static.
      axis: the axis of length ``n``. No axis costs a transpose.
      largest: True for the largest, descending; False for the smallest, ascending.
      sorted: False for the same elements in the order of their indices.
      offsets: of segments along the axis, as for `jaxgpuops.sort`: integers of shape ``(segments + 1,)``. The ``k``
        largest of each are selected, for any ``k``; indices count from the start of the axis.
      lengths: of rows that are padded: integers that broadcast to ``(*before, *after)``. Only the first ``length``
        elements of a row can be selected.
      axis_name: inside `jax.shard_map`, the name of the mesh axis that ``axis`` is split along, or several, the slowest
        first. ``x`` is then this device's part; ``n``, ``k``, offsets, lengths and indices are of the whole axis, and
        all devices get the same result. See docs/sharding.md.

    Returns:
      ``TopK(values, indices)``, both of shape ``(*before, k, *after)``; values of dtype ``x.dtype``, indices int32.
      With offsets the shape is ``(*before, segments, k, *after)``. If a segment, or a row of a given length, has fewer
      than ``k`` elements, index -1 and a fill value follow them: the lowest value of the dtype (-inf, or the smallest
      number of a dtype without it); for the smallest elements, the highest.

    Order: floats follow the IEEE total order, in which -NaN < -inf < .. < -0 < +0 < .. < inf < NaN, so NaNs come first
    among the largest and -0 before +0 among the smallest. Of equal elements the one with the lower index comes first,
    for both values of ``largest``. Values are moved, not computed: NaN payloads survive (with offsets or lengths on a
    CPU not always those of floats of 8 and 16 bits). The result of a row does not depend on the run, on the batch it is
    in, or on how it is sharded.

    Derivatives: the gradient puts the cotangents of the values back where the values came from, and zeros elsewhere;
    indices have none. Reverse mode works, and whatever is built on top of it (`jax.grad`, `jax.jacrev`, `jax.hessian`,
    gradients of gradients). For forward mode at the bottom (`jax.jvp`, `jax.jacfwd`, `jax.linearize`) use
    `jaxgpuops.lax.top_k`; here JAX raises TypeError, but for calls with offsets or lengths.

    Lengths cost a pass over ``x``, which XLA may fuse with the computation of ``x``. Offsets cost a sort of the axis by
    segments (see `jaxgpuops.sort`), whatever ``k`` and the lengths of segments are.

    Raises:
      TypeError: for other dtypes, for ``k`` or ``axis`` that are not integers, and flags that are not True or False,
        known at trace time; for offsets and lengths that are not integers.
      ValueError: for a scalar ``x``, ``axis`` out of range, ``k`` not in ``[0, n]``, ``n >= 2**31``, offsets or lengths
        of another shape, both offsets and lengths.

    Algorithms: threshold filtering and radix selection on ordered keys; cf. Alabi et al., "Fast k-selection algorithms
    for graphics processing units" (2012), and Zhang et al., "Parallel top-K algorithms on GPU" (2023).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    >>> values, indices = jaxgpuops.topk(x, 2)
    >>> values.tolist(), indices.tolist()
    ([[5, 4], [9, 6]], [[4, 2], [0, 2]])
    >>> jaxgpuops.topk(x, 2, axis=0, largest=False).values.tolist()
    [[3, 1, 4, 1, 3], [9, 2, 6, 5, 5]]
    >>> jaxgpuops.topk(x, 2, sorted=False).indices.tolist()
    [[2, 4], [0, 2]]
    >>> jaxgpuops.topk(jnp.array([3, 1, 4, 1, 5]), 2, offsets=[0, 4, 5]).indices.tolist()
    [[2, 0], [4, -1]]
    >>> jaxgpuops.topk(x, 2, lengths=[4, 1]).indices.tolist()
    [[2, 0], [0, -1]]
    >>> jax.grad(lambda x: jaxgpuops.topk(x, 2).values.sum())(jnp.array([3.0, 1.0, 4.0])).tolist()
    [1.0, 0.0, 1.0]
    """
    op = "jaxgpuops.topk"
    x = _arguments.array(op, "x", x)
    k, axis = _arguments.integer(op, "k", k), _arguments.integer(op, "axis", axis)
    largest, sorted = _arguments.flag(op, "largest", largest), _arguments.flag(op, "sorted", sorted)
    names = _arguments.names(op, axis_name)
    offsets = _arguments.offsets(op, offsets)
    lengths = None if lengths is None else _arguments.labels(op, "lengths", lengths)
    if offsets is not None and lengths is not None:
        raise ValueError(f"{op}: only one of offsets and lengths may be given")
    if offsets is not None:
        return _of_segments(x, offsets, k, axis, largest, sorted, names)
    if lengths is not None:
        return _of_lengths(x, lengths, k, axis, largest, sorted, names)
    return _jitted(x, k, axis, largest, sorted, names)


# Checks of shapes and dtypes run while tracing: an eager call that has been made before costs one dispatch.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5), inline=True)
def _jitted(x, k, axis, largest, sorted, names):
    axis = _arguments.ordered("jaxgpuops.topk", "x", x, axis)
    split = manual("jaxgpuops.topk", names, x.shape[axis])
    k = _arguments.count("jaxgpuops.topk", "k", k, x, axis, split)
    if split is not None:
        return TopK(*top_k_p(x, axis=axis, k=k, largest=largest, sorted=sorted, split=split))
    return _topk(x, (x.shape[axis], along(x, axis)), k, axis, largest, sorted)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6), inline=True)
def _of_lengths(x, lengths, k, axis, largest, sorted, names):
    op = "jaxgpuops.topk"
    axis = _arguments.ordered(op, "x", x, axis)
    split = manual(op, names, x.shape[axis])
    k = _arguments.count(op, "k", k, x, axis, split)
    _arguments.dtype(op, "lengths", lengths.dtype, _arguments.INTEGERS)
    lengths = as_int32(lengths, x.shape[axis] if split is None else split.length)
    lengths = _arguments.broadcasting(op, "lengths", lengths, (*x.shape[:axis], *x.shape[axis + 1 :]))
    lengths = jnp.expand_dims(lengths, axis)
    fill = identity("max" if largest else "min", x.dtype)
    # The types of an explicit mesh demand that masks are split as what they select from.
    within = lambda y, lengths: like(jax.lax.broadcasted_iota(np.int32, y.shape, axis) < lengths, jax.typeof(y))

    # Keys, not values: XLA may lose what tells NaNs of 8 bits apart. And a key is its value, which need not be taken
    # from x again; only tangents are.
    keys = to_keys(jax.lax.stop_gradient(x))
    # No key comes after that of padding; of equal keys, padding comes last.
    last = np.asarray(0 if largest else jnp.iinfo(keys.dtype).max, keys.dtype)
    own = within(keys, lengths) if split is None else split.positions(keys.shape, axis) < lengths
    keys, indices = top_k_p(jnp.where(own, keys, last), axis=axis, k=k, largest=largest, sorted=sorted, split=split)
    values = from_keys(jnp.where(within(keys, lengths), keys, to_keys(jnp.asarray(fill))), x.dtype)

    @jax.custom_jvp
    def taken(x, values, indices, lengths):
        return values

    def taken_jvp(primals, tangents) -> Any:  # only x has a tangent
        _, values, indices, lengths = primals
        moved = take_along_axis(tangents[0], indices, axis, split)
        return taken(*primals), jnp.where(within(values, lengths), moved, jnp.zeros_like(moved))

    taken.defjvp(taken_jvp, symbolic_zeros=True)
    if jnp.issubdtype(x.dtype, jnp.floating):
        values = taken(x, values, indices, lengths)
    return TopK(values, jnp.where(within(indices, lengths), indices, -1))


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6), inline=True)
def _of_segments(x, offsets, k, axis, largest, sorted, names):
    op = "jaxgpuops.topk"
    axis = _arguments.ordered(op, "x", x, axis)
    split = manual(op, names, x.shape[axis])
    length = x.shape[axis] if split is None else split.length
    if k < 0:
        raise ValueError(f"{op}: k must not be negative, got {k}")
    places = length + (offsets.shape[0] - 1) * k
    if not jax.export.is_symbolic_dim(places) and places >= 1 << 31:
        raise ValueError(
            f"{op}: the length of the axis and segments times k must be less than 2**31 together, got shape {x.shape}, "
            f"{offsets.shape[0] - 1} segments and k={k}"
        )
    x, offsets = gathered(x, axis), gathered(offsets, 0)
    of_row = functools.partial(
        _of_segments_of_row, offsets=offsets, length=length, k=k, largest=largest, sorted=sorted, split=split
    )
    for _ in range(axis):
        of_row = jax.vmap(of_row)
    for _ in range(x.ndim - 1 - axis):
        of_row = jax.vmap(of_row, in_axes=-1, out_axes=-1)
    return of_row(x)


def _of_segments_of_row(x, offsets, length, k, largest, sorted, split):
    fill = identity("max" if largest else "min", x.dtype)
    if length == 0:  # JAX refuses to gather from an axis of length 0, even with a fill value
        shape = (offsets.shape[0] - 1, k)
        return TopK(jnp.full(shape, fill), jnp.full(shape, np.int32(-1)))
    order = permutation([to_keys(x)], 0, largest, split, offsets)
    ends = bounds(offsets, length)
    place = ends[:-1, None] + jax.lax.broadcasted_iota(np.int32, (ends.shape[0] - 1, k), 1)
    there = place < ends[1:, None]
    indices = jnp.where(there, _at(order, jnp.where(there, place, 0), split), length)
    if not sorted:
        [indices] = sort_p(indices, axis=1, descending=False, values=True, indices=False, kth=-1)
    there = indices < length
    # No index occurs twice, so that the gradient's scatter needs no atomics: indices out of range differ, too.
    own = jnp.where(there, indices, length + jnp.arange(indices.size, dtype=np.int32).reshape(indices.shape))
    if split is None:
        # Under vmap, the row gets the batch of the offsets, and its sharding: over an explicit mesh, JAX refuses to gather
        # at indices that are split from an array that is not. XLA removes the selection, and its gradient.
        any_offset = offsets[0]
        row: Any = jnp.where(any_offset == any_offset, x, jax.lax.stop_gradient(x))
        values = row.at[own].get(mode="fill", fill_value=fill, unique_indices=True)
    else:
        values = _at(x, own, split)
    return TopK(jnp.where(there, values, fill), jnp.where(there, indices, -1))


def _at(x, places, split):
    """Returns the elements at these places of one dimension; if it is split, any value where places are out of
    range."""
    if split is None:
        return x.at[places].get(mode="promise_in_bounds")
    # Takes the elements in parts that are shorter than x, so that devices exchange what is taken, and not x.
    flat, most = places.ravel(), max(1, split.length - 1)
    parts = [take_along_axis(x, flat[i : i + most], 0, split) for i in range(0, max(1, flat.size), most)]
    return jnp.concatenate(parts).reshape(places.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def _topk(x, size, k, axis, largest, sorted):  # `size` is the length of the axis, which the backward pass needs
    return TopK(*top_k_p(x, axis=axis, k=k, largest=largest, sorted=sorted))


def _forward(x, size, k, axis, largest, sorted):
    # The primitive, not `_topk`: it has forward mode, so that forward over reverse (`jax.hessian`) works.
    out = TopK(*top_k_p(x, axis=axis, k=k, largest=largest, sorted=sorted))
    return out, out.indices


def _backward(size, k, axis, largest, sorted, indices, cotangent):
    if cotangent.values.dtype == jax.dtypes.float0:  # integers: no gradient
        return (None,)
    return (put_along_axis(cotangent.values, indices, axis, *size),)


_topk.defvjp(_forward, _backward)
