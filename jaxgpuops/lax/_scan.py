"""Cumulative operations and linear recurrences with the signatures of `jax.lax`: scan_primitives.py has the kernels."""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxgpuops import _arguments
from jaxgpuops._arguments import COMPLEX, FLOATS, AxisName, given
from jaxgpuops._primitive import align
from jaxgpuops._split import manual
from jaxgpuops.lax.scan_primitives import CUMULATIVE, CUMULATIVE_DTYPES, last, linear_scan_p


def cumulative_operands(op, arg, name, x, starts, axis, names):
    """Checks the operands of a cumulative primitive; returns them, the axis counted from the front, and its split."""
    _arguments.dtype(op, arg, x.dtype, CUMULATIVE_DTYPES[name])
    axis = _arguments.axis_of(op, arg, x.shape, axis)
    operands = align(*given(x, _arguments.starts(op, starts, x.shape, axis)))
    return operands, axis, manual(op, names, x.shape[axis])


def options(op, segment_starts, axis, names, **flags) -> tuple[Any, ...]:
    """Checks what must be checked before tracing besides arrays: segment_starts, axis, axis_name and flags."""
    starts = _arguments.optional(op, "segment_starts", segment_starts)
    flags = (_arguments.flag(op, name, value) for name, value in flags.items())
    return starts, _arguments.integer(op, "axis", axis), _arguments.names(op, names), *flags


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5, 6), inline=True)
def _cumulative(name, operand, starts, axis, names, reverse, exclusive):
    op = f"jaxgpuops.lax.{name}"
    operands, axis, split = cumulative_operands(op, "operand", name, operand, starts, axis, names)
    return CUMULATIVE[name](*operands, axis=axis, reverse=reverse, exclusive=exclusive, split=split)[0]


def _function(name: str, operand, axis, reverse, exclusive, segment_starts, names) -> jax.Array:
    op = f"jaxgpuops.lax.{name}"
    operand = _arguments.array(op, "operand", operand)
    checked = options(op, segment_starts, axis, names, reverse=reverse, exclusive=exclusive)
    return _cumulative(name, operand, *checked)


def cumsum(
    operand: ArrayLike,
    axis: int = 0,
    reverse: bool = False,
    *,
    exclusive: bool = False,
    segment_starts: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """Sums of the elements up to each position: `jax.lax.cumsum` as a kernel.

    Arguments, dtypes and numbers are those of `jaxgpuops.cumsum`. Unlike that function, this one also has
    forward-mode derivatives (`jax.jvp`, `jax.jacfwd`, `jax.linearize`).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.lax.cumsum(jnp.array([1.0, 2.0, 3.0])).tolist()
    [1.0, 3.0, 6.0]
    >>> jax.jacfwd(jaxgpuops.lax.cumsum)(jnp.array([1.0, 2.0])).tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """
    return _function("cumsum", operand, axis, reverse, exclusive, segment_starts, axis_name)


def cumprod(
    operand: ArrayLike,
    axis: int = 0,
    reverse: bool = False,
    *,
    exclusive: bool = False,
    segment_starts: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """Products of the elements up to each position: `jax.lax.cumprod` as a kernel.

    Arguments, dtypes and numbers are those of `jaxgpuops.cumprod`. Unlike that function, this one also has
    forward-mode derivatives (`jax.jvp`, `jax.jacfwd`, `jax.linearize`).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.lax.cumprod(jnp.array([2.0, 0.0, 3.0])).tolist()
    [2.0, 0.0, 0.0]
    >>> jax.jvp(jaxgpuops.lax.cumprod, (jnp.array([2.0, 0.0, 3.0]),), (jnp.array([0.0, 1.0, 0.0]),))[1].tolist()
    [0.0, 2.0, 6.0]
    """
    return _function("cumprod", operand, axis, reverse, exclusive, segment_starts, axis_name)


def cummax(
    operand: ArrayLike,
    axis: int = 0,
    reverse: bool = False,
    *,
    exclusive: bool = False,
    segment_starts: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """The largest element up to each position: `jax.lax.cummax` as a kernel.

    Arguments, dtypes and numbers are those of `jaxgpuops.cummax`. Unlike that function, this one also has
    forward-mode derivatives (`jax.jvp`, `jax.jacfwd`, `jax.linearize`).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.lax.cummax(jnp.array([1.0, 3.0, 2.0])).tolist()
    [1.0, 3.0, 3.0]
    >>> jax.jacfwd(jaxgpuops.lax.cummax)(jnp.array([3.0, 1.0])).tolist()
    [[1.0, 0.0], [1.0, 0.0]]
    """
    return _function("cummax", operand, axis, reverse, exclusive, segment_starts, axis_name)


def cummin(
    operand: ArrayLike,
    axis: int = 0,
    reverse: bool = False,
    *,
    exclusive: bool = False,
    segment_starts: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """The smallest element up to each position: `jax.lax.cummin` as a kernel.

    Arguments, dtypes and numbers are those of `jaxgpuops.cummin`. Unlike that function, this one also has
    forward-mode derivatives (`jax.jvp`, `jax.jacfwd`, `jax.linearize`).

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.lax.cummin(jnp.array([[3, 1, 2], [4, 0, 5]]), 1, reverse=True).tolist()
    [[1, 1, 2], [0, 0, 5]]
    """
    return _function("cummin", operand, axis, reverse, exclusive, segment_starts, axis_name)


def cumlogsumexp(
    operand: ArrayLike,
    axis: int = 0,
    reverse: bool = False,
    *,
    exclusive: bool = False,
    segment_starts: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """The logarithm of the sum of exponentials up to each position: `jax.lax.cumlogsumexp` as a kernel.

    Arguments, dtypes and numbers are those of `jaxgpuops.cumlogsumexp`. Unlike that function, this one also has
    forward-mode derivatives (`jax.jvp`, `jax.jacfwd`, `jax.linearize`).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.log(jnp.array([1.0, 3.0]))
    >>> jnp.exp(jaxgpuops.lax.cumlogsumexp(x)).round(4).tolist()
    [1.0, 4.0]
    >>> jax.jacfwd(jaxgpuops.lax.cumlogsumexp)(x).round(4).tolist()
    [[1.0, 0.0], [0.25, 0.75]]
    """
    return _function("cumlogsumexp", operand, axis, reverse, exclusive, segment_starts, axis_name)


def linear_operands(op, a, b, h0, starts, axis) -> tuple[Any, ...]:
    """Returns the operands (b, a, h0, starts) of the primitive, broadcast as far as it needs, and the axis counted from
    the front.

    They are aligned here, outside of `jax.custom_vjp`, which wants cotangents of the very types of its arguments.
    """
    dtype = _arguments.promoted(op, a=a, b=b, **({} if h0 is None else {"h0": h0}))
    _arguments.dtype(op, "the result", dtype, FLOATS | COMPLEX)
    try:
        shape = jnp.broadcast_shapes(a.shape, b.shape)
    except ValueError as error:
        raise ValueError(f"{op}: a and b must broadcast to one shape, got {a.shape} and {b.shape}") from error
    axis = _arguments.axis_of(op, "the result", shape, axis)
    a = a.astype(dtype).reshape((1,) * (len(shape) - a.ndim) + a.shape)
    b = jnp.broadcast_to(b.astype(dtype), shape)
    if h0 is not None:
        state = (*shape[:axis], *shape[axis + 1 :])
        try:
            h0 = jnp.expand_dims(jnp.broadcast_to(h0.astype(dtype), state), axis)
        except ValueError as error:
            raise ValueError(
                f"{op}: h0 must broadcast to {state}, the shape of the result without axis {axis}, got {h0.shape}"
            ) from error
    operands = b, a, h0, _arguments.starts(op, starts, shape, axis)
    aligned = iter(align(*given(*operands)))
    return *(None if x is None else next(aligned) for x in operands), axis


def with_last(h, h0, axis, reverse, split=None):
    """Returns all states and the last one. If there are no states, the last one is the state before the first."""
    if h.shape[axis] != 0:
        end = last(h, axis, reverse)
    else:  # the sum of nothing is 0, and varies over devices as h does
        end = h.sum(axis, dtype=h.dtype) if h0 is None else lax.squeeze(h0, (axis,))
    if split is not None:
        end = split.sum(jnp.where(split.is_first(not reverse), end, jnp.zeros((), h.dtype)))
    return h, end


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7), inline=True)
def _linear_scan(a, b, h0, starts, axis, names, reverse, return_last):
    op = "jaxgpuops.lax.linear_scan"
    b, a, h0, starts, axis = linear_operands(op, a, b, h0, starts, axis)
    return states(b, a, h0, starts, axis, manual(op, names, b.shape[axis]), reverse, return_last)


def entering(h0, b, axis):
    """Returns the state that enters a recurrence: none if there are no steps."""
    return None if b.shape[axis] == 0 else h0


def states(b, a, h0, starts, axis, split, reverse, return_last):
    own = entering(h0, b, axis)
    operands = given(b, a, own, starts)
    [h] = linear_scan_p(*operands, axis=axis, reverse=reverse, transpose=False, initial=own is not None, split=split)
    return with_last(h, h0, axis, reverse, split) if return_last else h


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
    """The linear recurrence ``h[k] = a[k] * h[k - 1] + b[k]`` along ``axis``, as `jaxgpuops.linear_scan` defines it.

    Unlike that function, this one also has forward-mode derivatives (`jax.jvp`, `jax.jacfwd`, `jax.linearize`).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> a, b = jnp.array([0.5, 0.5, 2.0]), jnp.array([4.0, 2.0, 1.0])
    >>> jaxgpuops.lax.linear_scan(a, b).tolist()
    [4.0, 4.0, 9.0]
    >>> jax.jvp(lambda a: jaxgpuops.lax.linear_scan(a, b), (a,), (jnp.array([0.0, 1.0, 0.0]),))[1].tolist()
    [0.0, 4.0, 8.0]
    """
    op = "jaxgpuops.lax.linear_scan"
    a, b = _arguments.array(op, "a", a), _arguments.array(op, "b", b)
    h0 = _arguments.optional(op, "h0", h0)
    checked = options(op, segment_starts, axis, axis_name, reverse=reverse, return_last=return_last)
    return _linear_scan(a, b, h0, *checked)
