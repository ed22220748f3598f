"""`jaxgpuops.sort`, `argsort` and `sort_key_val`."""

from __future__ import annotations

import functools

import jax
from jax.typing import ArrayLike

from jaxgpuops import _arguments
from jaxgpuops._arguments import AxisName
from jaxgpuops._primitive import align
from jaxgpuops._split import manual
from jaxgpuops.lax._sort import check_operands, permutation, sort_operands
from jaxgpuops.lax.along_axis import put_along_axis


def sort(
    x: ArrayLike,
    *,
    axis: int = -1,
    descending: bool = False,
    offsets: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """The elements along an axis in ascending (or descending) order.

    The result equals ``jax.lax.sort(x, axis)`` on CPU bit for bit, on every platform.

    Args:
      x: array of shape ``(*before, n, *after)``, ``n < 2**31``, of dtype bool, int8 to int64, uint8 to uint64,
        float8_e4m3fn, float8_e5m2, float16, bfloat16, float32, float64, complex64 or complex128.
      axis: the axis of length ``n``.
      descending: True for the largest first.
      offsets: of segments along the axis, each of which is sorted alone: integers of shape ``(segments + 1,)``, which
        ascend from 0 to ``n``; segment s is ``x[offsets[s]:offsets[s + 1]]``. They need not be known at trace time.
        Elements before the first offset and from the last one on stay where they are. An offset out of range counts as
        the nearest one in range, and one that is less than an earlier offset counts as that; so there is no access out
        of bounds.
      axis_name: inside `jax.shard_map`, the name of the mesh axis that ``axis`` is split along, or several, the slowest
        first. ``x`` is then this device's part, and so is the result: of the whole axis, sorted. See docs/sharding.md.
        ``offsets`` are those of the whole axis, the same on all devices.

    Returns:
      An array like ``x``.

    Order: numbers as usual, complex ones by their real parts and then by their imaginary parts. NaNs are equal to each
    other and above every number, so they come last, or first where ``descending``; -0 and +0 are equal. The sort is
    always stable: equal elements stay in the order in which they were, in both directions. Elements are moved, not
    computed: signs of zeros, NaN payloads and subnormal numbers survive, and the last are compared as what they are
    (XLA's CPU backend takes them for zeros). The result of a row does not depend on the run, on the batch it is in, or
    on how it is sharded.

    Derivatives: the gradient puts the cotangents back where the elements came from, by the permutation of the forward
    pass. Reverse mode works, and whatever is built on top of it. For forward mode at the bottom (`jax.jvp`,
    `jax.jacfwd`, `jax.linearize`) use `jaxgpuops.lax.sort`; here JAX raises TypeError.

    With segments, a GPU compares few elements with the others of their segments. It sorts more of them as a whole, by
    the elements and by the numbers of the segments: in one sort if that is faster, otherwise in two. Then the lengths
    of segments do not matter. A CPU sorts one segment after another.

    Raises:
      TypeError: for other dtypes, for an ``axis`` that is not an integer, and a ``descending`` that is not True or
        False, known at trace time; for offsets that are not integers.
      ValueError: for a scalar ``x``, ``axis`` out of range, ``n >= 2**31``, offsets of another shape.

    Algorithms: radix sorts and bitonic networks (docs/sort.md); Adinets & Merrill, "Onesweep: a faster least
    significant digit radix sort for GPUs" (2022).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([[3.0, 1.0, 2.0], [0.0, jnp.nan, -1.0]])
    >>> jaxgpuops.sort(x).tolist()
    [[1.0, 2.0, 3.0], [-1.0, 0.0, nan]]
    >>> jaxgpuops.sort(x, axis=0, descending=True).tolist()
    [[3.0, nan, 2.0], [0.0, 1.0, -1.0]]
    >>> jaxgpuops.sort(jnp.array([3, 1, 2, 9, 0, 5]), offsets=[0, 2, 6]).tolist()
    [1, 3, 0, 2, 5, 9]
    >>> jax.grad(lambda x: jaxgpuops.sort(x)[-1])(jnp.array([1.0, 3.0, 2.0])).tolist()
    [0.0, 1.0, 0.0]
    """
    op = "jaxgpuops.sort"
    x = _arguments.array(op, "x", x)
    axis, descending = _arguments.integer(op, "axis", axis), _arguments.flag(op, "descending", descending)
    offsets, names = _arguments.offsets(op, offsets), _arguments.names(op, axis_name)
    return _jitted((x,), offsets, op, ("x",), axis, descending, names)[0]


def argsort(
    x: ArrayLike,
    *,
    axis: int = -1,
    descending: bool = False,
    offsets: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """The int32 indices that sort along an axis: ``jnp.take_along_axis(x, indices, axis)`` is `jaxgpuops.sort`.

    Args:
      x, axis, descending, offsets, axis_name: as for `jaxgpuops.sort`.

    Returns:
      An int32 array of the shape of ``x``. Indices count from the start of the axis, also those of segments; with
      ``axis_name`` they count along the whole axis.

    Order: that of `jaxgpuops.sort`: stable in both directions, so equal elements keep the order of their indices; NaNs
    are equal and last (or first). The result does not depend on the run or on the batch. Indices have no derivative.

    Raises:
      TypeError, ValueError: as `jaxgpuops.sort`.

    Algorithms: as `jaxgpuops.sort`.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.argsort(jnp.array([3, 1, 3, 2])).tolist()
    [1, 3, 0, 2]
    >>> jaxgpuops.argsort(jnp.array([3, 1, 3, 2]), descending=True).tolist()
    [0, 2, 3, 1]
    """
    op = "jaxgpuops.argsort"
    x = _arguments.array(op, "x", x)
    axis, descending = _arguments.integer(op, "axis", axis), _arguments.flag(op, "descending", descending)
    return _argsort(x, _arguments.offsets(op, offsets), axis, descending, _arguments.names(op, axis_name))


def sort_key_val(
    keys: ArrayLike,
    *values: ArrayLike,
    axis: int = -1,
    descending: bool = False,
    offsets: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> tuple[jax.Array, ...]:
    """Sorts keys along an axis, and other arrays with them.

    Args:
      keys: array as for `jaxgpuops.sort`.
      *values: arrays of the same shape and any dtype.
      axis: the axis to sort along.
      descending: True for the largest key first.
      offsets: of segments, each of which is sorted alone, as for `jaxgpuops.sort`.
      axis_name: inside `jax.shard_map`, what the axis is split along, as for `jaxgpuops.sort`.

    Returns:
      ``(sorted keys, *values in the order of the keys)``, of the shapes and dtypes of the arguments.

    Order, determinism and derivatives: those of `jaxgpuops.sort`. The sort is stable, NaN keys are equal to each other,
    and values have gradients, too.

    Raises:
      TypeError, ValueError: as `jaxgpuops.sort`; also ValueError for values of another shape than the keys.

    Algorithms: as `jaxgpuops.sort`. Long rows of one array of values of up to 32 bits are moved with the keys; other
    values are gathered by the permutation.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> keys, a, b = jaxgpuops.sort_key_val(jnp.array([2, 1, 2]), jnp.array([1.0, 2.0, 3.0]), jnp.array([7, 8, 9]))
    >>> keys.tolist(), a.tolist(), b.tolist()
    ([1, 2, 2], [2.0, 1.0, 3.0], [8, 7, 9])
    """
    op = "jaxgpuops.sort_key_val"
    names = ("keys", *(f"values[{i}]" for i in range(len(values))))
    operands = tuple(_arguments.array(op, name, x) for name, x in zip(names, (keys, *values), strict=True))
    axis, descending = _arguments.integer(op, "axis", axis), _arguments.flag(op, "descending", descending)
    return _jitted(
        operands, _arguments.offsets(op, offsets), op, names, axis, descending, _arguments.names(op, axis_name)
    )


# Checks of shapes and dtypes run while tracing: an eager call that has been made before costs one dispatch.
@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6), inline=True)
def _jitted(operands, offsets, op, names, axis, descending, axis_names):
    axis = check_operands(op, names, operands, axis, 1)
    operands = tuple(align(*operands))
    if (split := manual(op, axis_names, operands[0].shape[axis])) is not None:
        return tuple(sort_operands(operands, axis, 1, descending, split=split, offsets=offsets)[0])
    return _sort(operands, offsets, operands[0].shape[axis], axis, descending)


@functools.partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
def _argsort(x, offsets, axis, descending, names):
    op = "jaxgpuops.argsort"
    axis = check_operands(op, ("x",), (x,), axis, 1)
    return permutation([x], axis, descending, manual(op, names, x.shape[axis]), offsets)


# `length` is that of the axis, which the backward pass needs.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _sort(operands, offsets, length, axis, descending):
    return tuple(sort_operands(operands, axis, 1, descending, offsets=offsets)[0])


def _forward(operands, offsets, length, axis, descending):
    # The primitives, not `_sort`: they have forward mode, so that forward over reverse (`jax.hessian`) works.
    outs, indices = sort_operands(operands, axis, 1, descending, indices=True, offsets=offsets)
    return tuple(outs), indices


def _backward(length, axis, descending, indices, cotangents):
    put = functools.partial(put_along_axis, indices=indices, axis=axis, length=length, permutes=True)
    return tuple(None if ct.dtype == jax.dtypes.float0 else put(ct) for ct in cotangents), None


_sort.defvjp(_forward, _backward)
