"""Cumulative operations and `jaxgpuops.linear_scan`."""

from __future__ import annotations

import functools
from typing import Literal, overload

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxgpuops import _arguments
from jaxgpuops._arguments import AxisName, given
from jaxgpuops._primitive import INLINE
from jaxgpuops._split import manual
from jaxgpuops.lax import _scan as scan
from jaxgpuops.lax import scan_primitives


def cumsum(
    x: ArrayLike,
    *,
    axis: int = -1,
    reverse: bool = False,
    exclusive: bool = False,
    segment_starts: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """Sums of the elements up to each position of an axis.

    Args:
      x: array of shape ``(*before, n, *after)`` of dtype bool, int8 to int64, uint8 to uint64, float8_e4m3fn,
        float8_e5m2, float16, bfloat16, float32, float64, complex64 or complex128.
      axis: the axis of length ``n``. No axis costs a transpose.
      reverse: True to go from the end of the axis to its start.
      exclusive: True to leave out the element at the position itself; the first result is then 0.
      segment_starts: boolean mask that broadcasts to the shape of ``x`` and has all of the axis. The sum begins anew
        at each True, and with ``reverse`` just before it: segments are the same in both directions.
      axis_name: inside `jax.shard_map`, what ``axis`` is split along, as for `jaxgpuops.topk`; the result is this
        device's part.

    Returns:
      An array of the shape and dtype of ``x``; int32 for bool (int64 with x64 enabled), as `jnp.cumsum`.

    Numbers: floats of 8 and 16 bits are summed in float32 and rounded once, others are summed in their own dtype;
    integers wrap around. The order of the additions depends on ``n``, the dimensions after the axis and the dtype, not
    on the run, on the batch, or on how it is sharded: a row has the same bits wherever it is. NaNs and infinities
    reach every later position of their segment, and none of another.

    Derivatives: the gradient is the same sum of the cotangent in the other direction. Reverse mode works, and whatever
    is built on top of it (`jax.grad`, `jax.jacrev`, `jax.hessian`, gradients of gradients). For forward mode at the
    bottom (`jax.jvp`, `jax.jacfwd`, `jax.linearize`) use `jaxgpuops.lax.cumsum`; here JAX raises TypeError.

    Raises:
      TypeError: for other dtypes, for an ``axis`` that is not an integer and flags that are not True or False, known at
        trace time, and for ``segment_starts`` that are not booleans.
      ValueError: for a scalar ``x``, ``axis`` out of range, and ``segment_starts`` that do not broadcast.

    Algorithms: prefix sums by blocks, Blelloch, "Prefix sums and their applications" (1990); in one pass over the data,
    Merrill & Garland, "Single-pass parallel prefix scan with decoupled look-back" (2016).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([[1, 2, 3], [4, 5, 6]])
    >>> jaxgpuops.cumsum(x).tolist()
    [[1, 3, 6], [4, 9, 15]]
    >>> jaxgpuops.cumsum(x, axis=0, reverse=True).tolist()
    [[5, 7, 9], [4, 5, 6]]
    >>> jaxgpuops.cumsum(x, exclusive=True).tolist()
    [[0, 1, 3], [0, 4, 9]]
    >>> jaxgpuops.cumsum(jnp.ones(6), segment_starts=jnp.array([0, 0, 1, 0, 0, 1], bool)).tolist()
    [1.0, 2.0, 1.0, 2.0, 3.0, 1.0]
    >>> jax.grad(lambda x: jaxgpuops.cumsum(x)[-2])(jnp.array([1.0, 2.0, 3.0])).tolist()
    [1.0, 1.0, 0.0]
    """
    return _function("cumsum", x, axis, reverse, exclusive, segment_starts, axis_name)


def cumprod(
    x: ArrayLike,
    *,
    axis: int = -1,
    reverse: bool = False,
    exclusive: bool = False,
    segment_starts: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """Products of the elements up to each position of an axis.

    Args:
      x: array of shape ``(*before, n, *after)``, of the dtypes of `jaxgpuops.cumsum`.
      axis: the axis of length ``n``.
      reverse: True to go from the end of the axis to its start.
      exclusive: True to leave out the element at the position itself; the first result is then 1.
      segment_starts: where the product begins anew, as for `jaxgpuops.cumsum`.
      axis_name: as for `jaxgpuops.cumsum`.

    Returns:
      An array of the shape and dtype of ``x``; int32 for bool (int64 with x64 enabled), as `jnp.cumprod`.

    Numbers: as for `jaxgpuops.cumsum`, with a fixed order of multiplications and the same NaNs. Factors are multiplied
    within blocks first: the product of a block may overflow, or become 0, where the product from the start would not.

    Derivatives: the gradient is one linear recurrence in the other direction, without a division: exact with any number
    of zeros in ``x``, to every order. Forward mode: `jaxgpuops.lax.cumprod`.

    Raises:
      TypeError, ValueError: as `jaxgpuops.cumsum`.

    Algorithms: as `jaxgpuops.cumsum`; derivatives as recurrences, docs/scan.md.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([2.0, 3.0, 0.0, 4.0])
    >>> jaxgpuops.cumprod(x).tolist()
    [2.0, 6.0, 0.0, 0.0]
    >>> jaxgpuops.cumprod(x, exclusive=True, reverse=True).tolist()
    [0.0, 0.0, 4.0, 1.0]
    >>> jax.grad(lambda x: jaxgpuops.cumprod(x)[-1])(x).tolist()
    [0.0, 0.0, 24.0, 0.0]
    """
    return _function("cumprod", x, axis, reverse, exclusive, segment_starts, axis_name)


def cummax(
    x: ArrayLike,
    *,
    axis: int = -1,
    reverse: bool = False,
    exclusive: bool = False,
    segment_starts: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """The largest element up to each position of an axis.

    Args:
      x: array of shape ``(*before, n, *after)`` of dtype bool, int8 to int64, uint8 to uint64, float8_e4m3fn,
        float8_e5m2, float16, bfloat16, float32 or float64.
      axis: the axis of length ``n``.
      reverse: True to go from the end of the axis to its start.
      exclusive: True to leave out the element at the position itself; the first result is then the lowest value: -inf
        (-448 for float8_e4m3fn, which has no infinity), the smallest integer, False.
      segment_starts: where the maximum begins anew, as for `jaxgpuops.cumsum`.
      axis_name: as for `jaxgpuops.cumsum`.

    Returns:
      An array of the shape and dtype of ``x``.

    Order: that of `jax.lax.cummax` on CPU. A NaN stays until the segment ends; which NaN, of several, is not specified.
    -0 is smaller than +0. The result does not depend on the run or on the batch.

    Derivatives: the gradient sums the cotangents of all positions that an element is the maximum of; of equal elements
    the last in the direction of the scan has it all, where JAX splits it in a way that depends on the length, and a NaN
    counts as larger than anything. Forward mode: `jaxgpuops.lax.cummax`.

    Raises:
      TypeError, ValueError: as `jaxgpuops.cumsum`.

    Algorithms: as `jaxgpuops.cumsum`.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([1.0, 3.0, 3.0, 2.0])
    >>> jaxgpuops.cummax(x).tolist()
    [1.0, 3.0, 3.0, 3.0]
    >>> jaxgpuops.cummax(x, reverse=True, exclusive=True).tolist()
    [3.0, 3.0, 2.0, -inf]
    >>> jax.grad(lambda x: jaxgpuops.cummax(x).sum())(x).tolist()
    [1.0, 1.0, 2.0, 0.0]
    """
    return _function("cummax", x, axis, reverse, exclusive, segment_starts, axis_name)


def cummin(
    x: ArrayLike,
    *,
    axis: int = -1,
    reverse: bool = False,
    exclusive: bool = False,
    segment_starts: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """The smallest element up to each position of an axis.

    Args:
      x, axis, reverse, exclusive, segment_starts, axis_name: as for `jaxgpuops.cummax`. With ``exclusive`` the first
        result is the highest value: inf (448 for float8_e4m3fn, which has no infinity), the largest integer, True.

    Returns:
      An array of the shape and dtype of ``x``.

    Order: that of `jax.lax.cummin` on CPU. A NaN stays until the segment ends; which NaN, of several, is not specified.
    -0 is smaller than +0. The result does not depend on the run or on the batch.

    Derivatives: as for `jaxgpuops.cummax`; a NaN counts as smaller than anything. Forward mode: `jaxgpuops.lax.cummin`.

    Raises:
      TypeError, ValueError: as `jaxgpuops.cumsum`.

    Algorithms: as `jaxgpuops.cumsum`.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([[3, 5, 1], [2, 4, 6]])
    >>> jaxgpuops.cummin(x).tolist()
    [[3, 3, 1], [2, 2, 2]]
    >>> jaxgpuops.cummin(x, axis=0).tolist()
    [[3, 5, 1], [2, 4, 1]]
    """
    return _function("cummin", x, axis, reverse, exclusive, segment_starts, axis_name)


def cumlogsumexp(
    x: ArrayLike,
    *,
    axis: int = -1,
    reverse: bool = False,
    exclusive: bool = False,
    segment_starts: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """The logarithm of the sum of the exponentials of the elements up to each position of an axis.

    Args:
      x: array of shape ``(*before, n, *after)`` of dtype float8_e4m3fn, float8_e5m2, float16, bfloat16, float32 or
        float64.
      axis: the axis of length ``n``.
      reverse: True to go from the end of the axis to its start.
      exclusive: True to leave out the element at the position itself; the first result is then -inf (NaN for
        float8_e4m3fn, which has no infinity).
      segment_starts: where the sum begins anew, as for `jaxgpuops.cumsum`.
      axis_name: as for `jaxgpuops.cumsum`.

    Returns:
      An array of the shape and dtype of ``x``.

    Numbers: nothing overflows on the way, and no element is lost to a larger one that comes after it. Elements that are
    -inf add nothing, and a sum of only these is -inf; inf and NaN stay until the segment ends. Otherwise as for
    `jaxgpuops.cumsum`: the same bits in every run and batch.

    Derivatives: the gradient is one linear recurrence in the other direction with factors between 0 and 1; elements
    that are -inf have the gradient 0. It is computed from the result, whose rounding it sees, as JAX's does: of
    float32, 3 % at 10^6. The gradient with respect to ``x - x.max()`` is the same, and accurate. Forward mode:
    `jaxgpuops.lax.cumlogsumexp`.

    Raises:
      TypeError, ValueError: as `jaxgpuops.cumsum`.

    Algorithms: as `jaxgpuops.cumsum`, with the pairs of maximum and sum of Milakov & Gimelshein, "Online normalizer
    calculation for softmax" (2018).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([1000.0, 1000.0, -jnp.inf, 1000.0])
    >>> jnp.exp(jaxgpuops.cumlogsumexp(x) - 1000).round().tolist()
    [1.0, 2.0, 2.0, 3.0]
    >>> print(jax.grad(lambda x: jaxgpuops.cumlogsumexp(x)[-1])(x).round(3))
    [0.333 0.333 0.    0.333]
    """
    return _function("cumlogsumexp", x, axis, reverse, exclusive, segment_starts, axis_name)


def _function(name, x, axis, reverse, exclusive, segment_starts, names):
    op = f"jaxgpuops.{name}"
    x = _arguments.array(op, "x", x)
    return _jitted(name, x, *scan.options(op, segment_starts, axis, names, reverse=reverse, exclusive=exclusive))


# Checks of shapes and dtypes run while tracing: an eager call that has been made before costs one dispatch.
@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5, 6), inline=INLINE)
def _jitted(name, x, starts, axis, names, reverse, exclusive):
    if x.dtype == np.dtype(bool) and name in ("cumsum", "cumprod"):
        x = x.astype(int)
    operands, axis, split = scan.cumulative_operands(f"jaxgpuops.{name}", "x", name, x, starts, axis, names)
    if split is not None:
        params = {"reverse": reverse, "exclusive": exclusive}
        return scan_primitives.CUMULATIVE[name](*operands, axis=axis, split=split, **params)[0]
    return _cumulative(name, axis, reverse, exclusive, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _cumulative(name, axis, reverse, exclusive, x, starts=None):
    operands = given(x, starts)
    return scan_primitives.CUMULATIVE[name](*operands, axis=axis, reverse=reverse, exclusive=exclusive)[0]


def _cumulative_forward(name, axis, reverse, exclusive, x, starts=None):
    # The primitive, not `_cumulative`: it has forward mode, so that forward over reverse (`jax.hessian`) works.
    operands = given(x, starts)
    y = scan_primitives.CUMULATIVE[name](*operands, axis=axis, reverse=reverse, exclusive=exclusive)[0]
    return y, (starts,) if name == "cumsum" else (x, y, starts)


def _cumulative_backward(name, axis, reverse, exclusive, residuals, ct):
    *values, starts = residuals
    if ct.dtype == jax.dtypes.float0:  # integers: no gradient
        return None, None
    if name == "cumsum":
        [dx] = scan_primitives.cumsum_p(*given(ct, starts), axis=axis, reverse=not reverse, exclusive=exclusive)
    else:
        params = {"axis": axis, "reverse": reverse, "exclusive": exclusive, "transpose": True}
        [dx] = scan_primitives.TANGENT[name](ct, *values, *given(starts), **params)
    return dx, None


_cumulative.defvjp(_cumulative_forward, _cumulative_backward)

# ---- Linear recurrences -----------------------------------------------------------------------------------------------


@overload
def linear_scan(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = ...,
    *,
    axis: int = ...,
    reverse: bool = ...,
    segment_starts: ArrayLike | None = ...,
    return_last: Literal[False] = ...,
    axis_name: AxisName = ...,
) -> jax.Array: ...
@overload
def linear_scan(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = ...,
    *,
    axis: int = ...,
    reverse: bool = ...,
    segment_starts: ArrayLike | None = ...,
    return_last: Literal[True],
    axis_name: AxisName = ...,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def linear_scan(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = ...,
    *,
    axis: int = ...,
    reverse: bool = ...,
    segment_starts: ArrayLike | None = ...,
    return_last: bool = ...,
    axis_name: AxisName = ...,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def linear_scan(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = None,
    *,
    axis: int = -1,
    reverse: bool = False,
    segment_starts: ArrayLike | None = None,
    return_last: bool = False,
    axis_name: AxisName = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The linear recurrence ``h[k] = a[k] * h[k - 1] + b[k]`` along an axis.

    The scan of state-space models, gated linear units, exponential averages, discounted returns and advantages.

    Args:
      a: factors. ``a`` and ``b`` broadcast, as in NumPy, to the shape ``(*before, n, *after)`` of the result: ``a`` may
        be a number, or have one value per channel or per step, and is then read as it is, not expanded.
      b: what is added. Float16, bfloat16, float32, float64, complex64 or complex128; ``a``, ``b`` and ``h0`` are
        promoted to one dtype, as in `jnp.add`.
      h0: the state before the first step, which broadcasts to the shape of the result without the axis; default 0.
      axis: the axis of length ``n``. No axis costs a transpose: (batch, channel, time) and (batch, time, channel) are
        equally good.
      reverse: True to go from the end of the axis to its start: ``h[k] = a[k] * h[k + 1] + b[k]``.
      segment_starts: boolean mask that broadcasts to the shape of the result and has all of the axis. The recurrence
        begins anew, from 0, at each True, and with ``reverse`` just before it: segments are the same in both
        directions. ``h0`` enters the segment that comes first.
      return_last: True to return the state after the last step too.
      axis_name: inside `jax.shard_map`, what ``axis`` is split along, as for `jaxgpuops.topk`: ``h`` is this device's
        part, ``h0`` and ``last`` are of the whole axis.

    Returns:
      The states ``h``; with ``return_last``, ``(h, last)``, where ``last`` has the shape of ``h`` without the axis. As
      ``h0`` of another call it continues the recurrence.

    Numbers: 16-bit floats are computed in float32 and rounded once. Where ``a[k]`` is 0, ``h[k]`` is ``b[k]`` even
    after an infinity or NaN. The recurrence is computed by blocks, in an order that depends on ``n``, the dimensions
    after the axis and the dtype, not on the run, on the batch, or on how it is sharded; with ``abs(a) > 1`` the factor
    of a block may overflow where the states would not.

    Derivatives: the gradient is the recurrence of the cotangent in the other direction; a cotangent of ``a`` that
    broadcasts is summed over the dimensions that it lacks. Reverse mode works, and whatever is built on top of it
    (`jax.grad`, `jax.jacrev`, `jax.hessian`, gradients of gradients). For forward mode at the bottom (`jax.jvp`,
    `jax.jacfwd`, `jax.linearize`) use `jaxgpuops.lax.linear_scan`; here JAX raises TypeError. Complex gradients are
    JAX's, not conjugated.

    Raises:
      TypeError: for other dtypes, for an ``axis`` that is not an integer and flags that are not True or False, known at
        trace time, and for ``segment_starts`` that are not booleans.
      ValueError: for ``axis`` out of range, and for shapes that do not broadcast.

    Algorithms: Blelloch, "Prefix sums and their applications" (1990), section 1.4; for recurrent networks, Martin &
    Cundy, "Parallelizing linear recurrent neural nets over sequence length" (2018).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.linear_scan(0.5, jnp.array([4.0, 2.0, 1.0])).tolist()  # an exponential average
    [4.0, 4.0, 3.0]
    >>> a, b = jnp.array([1.0, 0.5]), jnp.ones((3, 2))  # (time, channel), one factor per channel
    >>> h, last = jaxgpuops.linear_scan(a, b, h0=jnp.array([0.0, 2.0]), axis=0, return_last=True)
    >>> h.tolist(), last.tolist()
    ([[1.0, 2.0], [2.0, 2.0], [3.0, 2.0]], [3.0, 2.0])
    >>> rewards, done = jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([False, True, False, False])
    >>> jaxgpuops.linear_scan(0.5 * ~done, rewards, reverse=True).tolist()  # discounted returns of two episodes
    [1.0, 0.0, 1.5, 1.0]
    >>> jax.grad(lambda a: jaxgpuops.linear_scan(a, jnp.ones(3))[-1])(0.5).tolist()
    2.0
    """
    op = "jaxgpuops.linear_scan"
    a, b = _arguments.array(op, "a", a), _arguments.array(op, "b", b)
    h0 = _arguments.optional(op, "h0", h0)
    checked = scan.options(op, segment_starts, axis, axis_name, reverse=reverse, return_last=return_last)
    return _jitted_linear(a, b, h0, *checked)


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7), inline=True)
def _jitted_linear(a, b, h0, starts, axis, names, reverse, return_last):
    op = "jaxgpuops.linear_scan"
    b, a, h0, starts, axis = scan.linear_operands(op, a, b, h0, starts, axis)
    if names is not None:
        return scan.states(b, a, h0, starts, axis, manual(op, names, b.shape[axis]), reverse, return_last)
    h = _linear(axis, reverse, a, b, scan.entering(h0, b, axis), starts)
    return scan.with_last(h, h0, axis, reverse) if return_last else h


def _linear_forward(axis, reverse, a, b, h0, starts):
    operands = given(b, a, h0, starts)
    [h] = scan_primitives.linear_scan_p(*operands, axis=axis, reverse=reverse, transpose=False, initial=h0 is not None)
    return h, (a, h, h0, starts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear(axis, reverse, a, b, h0, starts):
    return _linear_forward(axis, reverse, a, b, h0, starts)[0]


def _linear_backward(axis, reverse, residuals, ct):
    a, h, h0, starts = residuals
    return *scan_primitives.linear_scan_cotangents(ct, a, h, h0, starts, axis, reverse), None


_linear.defvjp(_linear_forward, _linear_backward)
