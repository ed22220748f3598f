"""`jaxgpuops.topk`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
from jax.typing import ArrayLike

from jaxgpuops import _arguments
from jaxgpuops._partition import manual
from jaxgpuops.lax._topk import top_k_p
from jaxgpuops.lax.along_axis import along, put_along_axis


class TopK(NamedTuple):
    """Selected elements and where they were."""

    values: jax.Array
    indices: jax.Array


def topk(
    x: ArrayLike,
    k: int,
    *,
    axis: int = -1,
    largest: bool = True,
    sorted: bool = True,
    axis_name: _arguments.AxisName = None,
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
      axis_name: inside `jax.shard_map`, the name of the mesh axis that ``axis`` is split along, or several, the slowest
        first. ``x`` is then this device's part; ``n``, ``k`` and indices are of the whole axis, and all devices get the
        same result. See docs/sharding.md.

    Returns:
      ``TopK(values, indices)``, both of shape ``(*before, k, *after)``; values of dtype ``x.dtype``, indices int32.

    Order: floats follow the IEEE total order, in which -NaN < -inf < .. < -0 < +0 < .. < inf < NaN, so NaNs come first
    among the largest and -0 before +0 among the smallest. Of equal elements the one with the lower index comes first,
    for both values of ``largest``. Values are moved, not computed: NaN payloads survive. The result of a row does not
    depend on the run, on the batch it is in, or on how it is sharded.

    Derivatives: the gradient puts the cotangents of the values back where the values came from, and zeros elsewhere;
    indices have none. Reverse mode works, and whatever is built on top of it (`jax.grad`, `jax.jacrev`, `jax.hessian`,
    gradients of gradients). For forward mode at the bottom (`jax.jvp`, `jax.jacfwd`, `jax.linearize`) use
    `jaxgpuops.lax.top_k`; here JAX raises TypeError.

    Raises:
      TypeError: for other dtypes, for ``k`` or ``axis`` that are not integers, and flags that are not True or False,
        known at trace time.
      ValueError: for a scalar ``x``, ``axis`` out of range, ``k`` not in ``[0, n]``, ``n >= 2**31``.

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
    >>> jax.grad(lambda x: jaxgpuops.topk(x, 2).values.sum())(jnp.array([3.0, 1.0, 4.0])).tolist()
    [1.0, 0.0, 1.0]
    """
    op = "jaxgpuops.topk"
    x = _arguments.array(op, "x", x)
    k, axis = _arguments.integer(op, "k", k), _arguments.integer(op, "axis", axis)
    largest, sorted = _arguments.flag(op, "largest", largest), _arguments.flag(op, "sorted", sorted)
    return _jitted(x, k, axis, largest, sorted, _arguments.names("jaxgpuops.topk", axis_name))


# Checks of shapes and dtypes run while tracing: an eager call that has been made before costs one dispatch.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5), inline=True)
def _jitted(x, k, axis, largest, sorted, names):
    axis = _arguments.ordered("jaxgpuops.topk", "x", x, axis)
    split = manual("jaxgpuops.topk", names, x.shape[axis])
    k = _arguments.count("jaxgpuops.topk", "k", k, x, axis, split)
    if split is not None:
        return TopK(*top_k_p(x, axis=axis, k=k, largest=largest, sorted=sorted, split=split))
    return _topk(x, (x.shape[axis], along(x, axis)), k, axis, largest, sorted)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def _topk(x, size, k, axis, largest, sorted):  # `size` is what the backward pass must know of the axis
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
