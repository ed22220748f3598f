"""Reductions of rows: sum, mean, max, min, dot."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxgpuops._arguments import Axis, AxisName
from jaxgpuops.lax import _reduce as primitives


def sum(
    x: ArrayLike,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """Sums along an axis, or several.

    Args:
      x: array of dtype bool, int8 to int64, uint8 to uint64, float8_e4m3fn, float8_e5m2, float16, bfloat16, float32 or
        float64.
      axis: the axis, or several, or None for all. (Of `jnp.sum` the default is None.) No single axis costs a transpose,
        nor do neighbouring ones; others are first moved to the end, a copy.
      where: boolean mask that broadcasts to ``x``; an element where it is False does not count, whatever it is. It is
        read as it is, not expanded (to all of ``axis``, if that is several and it has some of them).
      keepdims: True to keep the axes, with length 1.
      axis_name: inside `jax.shard_map`, what ``axis`` is split along, as for `jaxgpuops.topk`; with one ``axis`` only.

    Returns:
      An array of the shape of ``x`` without the axes, of the dtype of ``x`` (`jnp.sum` widens small integers); int32
      for bool (int64 with x64 enabled). 0 for no elements.

    Numbers: floats of 8 and 16 bits are summed in float32 and rounded once, others are summed in their own dtype;
    integers wrap around; a NaN that counts makes the sum NaN. The order of the additions depends on the length, the
    dimensions after the axis and the dtype, not on the run, on the batch, or on how it is sharded: a row has the same
    bits wherever it is.

    Derivatives: the gradient is the cotangent at each element that counts, and 0 at the others. Reverse mode works, and
    whatever is built on top of it (`jax.grad`, `jax.jacrev`, `jax.hessian`, gradients of gradients). For forward mode
    at the bottom (`jax.jvp`, `jax.jacfwd`, `jax.linearize`) use `jaxgpuops.lax.sum`; here JAX raises TypeError.

    Raises:
      TypeError: for other dtypes, for an ``axis`` or a ``keepdims`` that is not known at trace time, and for ``where``
        that are not booleans.
      ValueError: for ``axis`` out of range or given twice, and for ``where`` that do not broadcast to ``x``.

    Algorithms: lanes of a row that are added pairwise at the end, Harris, "Optimizing parallel reduction in CUDA"
    (2007).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([[1, 2, 3], [4, 5, 6]])
    >>> jaxgpuops.sum(x).tolist(), jaxgpuops.sum(x, axis=0).tolist(), jaxgpuops.sum(x, axis=None).tolist()
    ([6, 15], [5, 7, 9], 21)
    >>> jaxgpuops.sum(x, where=x % 2 == 0, keepdims=True).tolist()
    [[2], [10]]
    >>> jax.grad(lambda x: jaxgpuops.sum(x, where=x > 0))(jnp.array([-1.0, 2.0])).tolist()
    [0.0, 1.0]
    """
    return _jitted("sum", *primitives.arguments("jaxgpuops.sum", axis, where, keepdims, axis_name, x=x))


def mean(
    x: ArrayLike,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """Means along an axis, or several: `jaxgpuops.sum` over the number of elements that count.

    Args:
      x, axis, where, keepdims, axis_name: as for `jaxgpuops.sum`.

    Returns:
      An array of the shape of ``x`` without the axes, of the dtype of ``x``; for integers and bools, which are
      converted first, float32, or float64 where they have 64 bits, as `jnp.mean`. NaN for no elements.

    Numbers, derivatives: as for `jaxgpuops.sum`; the sum of 16-bit floats is rounded only after the division. The sum
    is multiplied by the reciprocal of the number, as XLA does for `jnp.mean`. With ``where``, XLA decides whether to
    divide or multiply, so the last bit may depend on the program around the call. Forward mode: `jaxgpuops.lax.mean`.

    Raises:
      TypeError, ValueError: as `jaxgpuops.sum`.

    Algorithms: as `jaxgpuops.sum`.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([[1.0, 2.0, 6.0], [4.0, 5.0, 6.0]])
    >>> jaxgpuops.mean(x).tolist(), jaxgpuops.mean(x, where=x > 1).tolist()
    ([3.0, 5.0], [4.0, 5.0])
    >>> jax.grad(lambda x: jaxgpuops.mean(x, axis=(0, 1), where=x > 5))(x).tolist()
    [[0.0, 0.0, 0.5], [0.0, 0.0, 0.5]]
    """
    return _jitted("mean", *primitives.arguments("jaxgpuops.mean", axis, where, keepdims, axis_name, x=x))


def max(
    x: ArrayLike,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """The largest elements along an axis, or several.

    Args:
      x, axis, where, keepdims, axis_name: as for `jaxgpuops.sum`. There must be an element.

    Returns:
      An array of the shape of ``x`` without the axes, of the dtype of ``x``. Where no element counts, the lowest value:
      -inf (-448 for float8_e4m3fn, which has no infinity), the smallest integer, False.

    Order: NaN if an element that counts is NaN; which NaN, of several, and which zero, of -0 and +0, is not specified.

    Derivatives: equal elements that are the maximum share the cotangent, as in JAX; of NaNs, all do. Computed from
    ``x`` and the result in plain JAX. Forward mode: `jaxgpuops.lax.max`.

    Raises:
      TypeError, ValueError: as `jaxgpuops.sum`; also ValueError where an axis has length 0.

    Algorithms: as `jaxgpuops.sum`.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([[1.0, 3.0, 3.0], [5.0, 4.0, 0.0]])
    >>> jaxgpuops.max(x).tolist(), jaxgpuops.max(x, axis=None, where=x < 4).tolist()
    ([3.0, 5.0], 3.0)
    >>> jax.grad(lambda x: jaxgpuops.max(x).sum())(x).tolist()
    [[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]
    """
    return _jitted("max", *primitives.arguments("jaxgpuops.max", axis, where, keepdims, axis_name, x=x))


def min(
    x: ArrayLike,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """The smallest elements along an axis, or several.

    Args:
      x, axis, where, keepdims, axis_name: as for `jaxgpuops.sum`. There must be an element.

    Returns:
      An array of the shape of ``x`` without the axes, of the dtype of ``x``. Where no element counts, the highest
      value: inf (448 for float8_e4m3fn, which has no infinity), the largest integer, True.

    Order: NaN if an element that counts is NaN; which NaN, of several, and which zero, of -0 and +0, is not specified.

    Derivatives: as for `jaxgpuops.max`: equal elements share the cotangent. Forward mode: `jaxgpuops.lax.min`.

    Raises:
      TypeError, ValueError: as `jaxgpuops.max`.

    Algorithms: as `jaxgpuops.sum`.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([[1, 3, 3], [5, 4, 0]])
    >>> jaxgpuops.min(x).tolist(), jaxgpuops.min(x, axis=0, keepdims=True).tolist()
    ([1, 0], [[1, 3, 0]])
    """
    return _jitted("min", *primitives.arguments("jaxgpuops.min", axis, where, keepdims, axis_name, x=x))


def dot(
    x: ArrayLike,
    y: ArrayLike,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """Sums of ``x * y`` along an axis, or several, without the products being stored.

    Args:
      x, y: arrays of the dtypes of `jaxgpuops.sum`, promoted to one dtype and expanded to one shape if they differ.
      axis, where, keepdims, axis_name: as for `jaxgpuops.sum`, for what ``x`` and ``y`` broadcast to.

    Returns:
      An array of the shape of ``x * y`` without the axes, of the promoted dtype; int32 for bools (int64 with x64
      enabled).

    Numbers: as for `jaxgpuops.sum` of the products: the same bits in every run and batch. Products of floats of 8 and
    16 bits are not rounded.

    Derivatives: with respect to both, the other array times the cotangent. Forward mode: `jaxgpuops.lax.dot`.

    Raises:
      TypeError, ValueError: as `jaxgpuops.sum`; also ValueError for arrays that do not broadcast.

    Algorithms: as `jaxgpuops.sum`.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x, y = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[5.0, 6.0], [7.0, 8.0]])
    >>> jaxgpuops.dot(x, y).tolist(), jaxgpuops.dot(x, y, axis=0).tolist(), jaxgpuops.dot(x, y, axis=None).tolist()
    ([17.0, 53.0], [26.0, 44.0], 70.0)
    >>> jax.grad(jaxgpuops.dot)(x[0], y[0]).tolist()
    [5.0, 6.0]
    """
    return _jitted("dot", *primitives.arguments("jaxgpuops.dot", axis, where, keepdims, axis_name, x=x, y=y))


# Checks of shapes and dtypes run while tracing: an eager call that has been made before costs one dispatch.
@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5), inline=True)
def _jitted(name, arrays, where, axis, keepdims, names):
    def function(name, operands, axis, **params):
        if names is not None:
            return primitives.bind(name, operands, axis, **params)
        return _reduce(name, axis, tuple(params.items()), *operands)

    return primitives.evaluate(f"jaxgpuops.{name}", name, function, arrays, axis, where, keepdims, names)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _reduce(name, axis, params, *operands):
    return _forward(name, axis, params, *operands)[0]


# The primitive, not `_reduce`: it has forward mode, so that forward over reverse (`jax.hessian`) works.
def _forward(name, axis, params, *operands):
    [out] = primitives.KERNELS[name](*operands, axis=axis, **dict(params))
    return out, (out, operands)


def _backward(name, axis, params, residuals, ct):
    out, (x, *others) = residuals
    nothing = [None for _ in others]
    if ct.dtype == jax.dtypes.float0:  # integers: no gradient
        return None, *nothing
    if name == "dot":
        y, *where = others
        dx, dy = (primitives.dot_cotangent(ct, other, where, axis) for other in (y, x))
        return dx, dy, *nothing[1:]
    if name == "sum":
        return primitives.sum_cotangent(ct, jax.typeof(x), others, axis, dict(params)["divisor"]), *nothing
    return primitives.extreme_cotangent(ct, x, jnp.expand_dims(out, axis), others, axis), *nothing


_reduce.defvjp(_forward, _backward)
