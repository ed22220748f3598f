"""Cumulative operations and linear recurrences with the signatures of `jax.lax`: scan_primitives.py has the kernels."""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxgpuops import _arguments
from jaxgpuops._arguments import COMPLEX, FLOATS, given
from jaxgpuops._primitive import align
from jaxgpuops.lax.scan_primitives import CUMULATIVE, CUMULATIVE_DTYPES, linear_scan_p


def cumulative_operands(op, arg, name, x, starts, axis):
    """Checked operands of a cumulative primitive, and the axis counted from the front."""
    _arguments.dtype(op, arg, x.dtype, CUMULATIVE_DTYPES[name])
    axis = _arguments.axis_of(op, arg, x.shape, axis)
    return align(*given(x, _arguments.starts(op, starts, x.shape, axis))), axis


def options(op, segment_starts, axis, **flags) -> tuple[Any, ...]:
    """segment_starts, axis and flags: what must be checked before tracing, beside the arrays."""
    starts = _arguments.optional(op, "segment_starts", segment_starts)
    flags = (_arguments.flag(op, name, value) for name, value in flags.items())
    return starts, _arguments.integer(op, "axis", axis), *flags


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5), inline=True)
def _cumulative(name, operand, starts, axis, reverse, exclusive):
    operands, axis = cumulative_operands(f"jaxgpuops.lax.{name}", "operand", name, operand, starts, axis)
    return CUMULATIVE[name](*operands, axis=axis, reverse=reverse, exclusive=exclusive)[0]


def _function(name: str, operand, axis, reverse, exclusive, segment_starts) -> jax.Array:
    op = f"jaxgpuops.lax.{name}"
    operand = _arguments.array(op, "operand", operand)
    return _cumulative(name, operand, *options(op, segment_starts, axis, reverse=reverse, exclusive=exclusive))


def cumsum(
    operand: ArrayLike,
    axis: int = 0,
    reverse: bool = False,
    *,
    exclusive: bool = False,
    segment_starts: ArrayLike | None = None,
) -> jax.Array:
    """Sums of the elements up to each position: `jax.lax.cumsum` as a kernel.

    Arguments, dtypes and numbers are those of `jaxgpuops.cumsum`, which see. Unlike that function, this one has
    forward-mode derivatives too (`jax.jvp`, `jax.jacfwd`, `jax.linearize`).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.lax.cumsum(jnp.array([1.0, 2.0, 3.0])).tolist()
    [1.0, 3.0, 6.0]
    >>> jax.jacfwd(jaxgpuops.lax.cumsum)(jnp.array([1.0, 2.0])).tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """
    return _function("cumsum", operand, axis, reverse, exclusive, segment_starts)


def cumprod(
    operand: ArrayLike,
    axis: int = 0,
    reverse: bool = False,
    *,
    exclusive: bool = False,
    segment_starts: ArrayLike | None = None,
) -> jax.Array:
    """Products of the elements up to each position: `jax.lax.cumprod` as a kernel.

    Arguments, dtypes and numbers are those of `jaxgpuops.cumprod`, which see. Unlike that function, this one has
    forward-mode derivatives too (`jax.jvp`, `jax.jacfwd`, `jax.linearize`).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.lax.cumprod(jnp.array([2.0, 0.0, 3.0])).tolist()
    [2.0, 0.0, 0.0]
    >>> jax.jvp(jaxgpuops.lax.cumprod, (jnp.array([2.0, 0.0, 3.0]),), (jnp.array([0.0, 1.0, 0.0]),))[1].tolist()
    [0.0, 2.0, 6.0]
    """
    return _function("cumprod", operand, axis, reverse, exclusive, segment_starts)


def cummax(
    operand: ArrayLike,
    axis: int = 0,
    reverse: bool = False,
    *,
    exclusive: bool = False,
    segment_starts: ArrayLike | None = None,
) -> jax.Array:
    """The largest element up to each position: `jax.lax.cummax` as a kernel.

    Arguments, dtypes and numbers are those of `jaxgpuops.cummax`, which see. Unlike that function, this one has
    forward-mode derivatives too (`jax.jvp`, `jax.jacfwd`, `jax.linearize`).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.lax.cummax(jnp.array([1.0, 3.0, 2.0])).tolist()
    [1.0, 3.0, 3.0]
    >>> jax.jacfwd(jaxgpuops.lax.cummax)(jnp.array([3.0, 1.0])).tolist()
    [[1.0, 0.0], [1.0, 0.0]]
    """
    return _function("cummax", operand, axis, reverse, exclusive, segment_starts)


def cummin(
    operand: ArrayLike,
    axis: int = 0,
    reverse: bool = False,
    *,
    exclusive: bool = False,
    segment_starts: ArrayLike | None = None,
) -> jax.Array:
    """The smallest element up to each position: `jax.lax.cummin` as a kernel.

    Arguments, dtypes and numbers are those of `jaxgpuops.cummin`, which see. Unlike that function, this one has
    forward-mode derivatives too (`jax.jvp`, `jax.jacfwd`, `jax.linearize`).

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.lax.cummin(jnp.array([[3, 1, 2], [4, 0, 5]]), 1, reverse=True).tolist()
    [[1, 1, 2], [0, 0, 5]]
    """
    return _function("cummin", operand, axis, reverse, exclusive, segment_starts)


def cumlogsumexp(
    operand: ArrayLike,
    axis: int = 0,
    reverse: bool = False,
    *,
    exclusive: bool = False,
    segment_starts: ArrayLike | None = None,
) -> jax.Array:
    """The logarithm of the sum of exponentials up to each position: `jax.lax.cumlogsumexp` as a kernel.

    Arguments, dtypes and numbers are those of `jaxgpuops.cumlogsumexp`, which see. Unlike that function, this one has
    forward-mode derivatives too (`jax.jvp`, `jax.jacfwd`, `jax.linearize`).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.log(jnp.array([1.0, 3.0]))
    >>> jnp.exp(jaxgpuops.lax.cumlogsumexp(x)).round(4).tolist()
    [1.0, 4.0]
    >>> jax.jacfwd(jaxgpuops.lax.cumlogsumexp)(x).round(4).tolist()
    [[1.0, 0.0], [0.25, 0.75]]
    """
    return _function("cumlogsumexp", operand, axis, reverse, exclusive, segment_starts)


def linear_operands(op, a, b, h0, starts, axis):
    """Operands (b, a, h0, starts) of the primitive, broadcast as far as it needs, and the axis from the front.

    They are aligned here, outside of `jax.custom_vjp`, which wants cotangents of the very types of its arguments.
    """
    dtype = jnp.result_type(a, b, *given(h0))
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


def with_last(h, h0, axis, reverse):
    """All states and the last one; that is the one before the first where there are none."""
    if h.shape[axis] != 0:
        return h, lax.index_in_dim(h, 0 if reverse else h.shape[axis] - 1, axis, keepdims=False)
    shape = (*h.shape[:axis], *h.shape[axis + 1 :])
    return h, jnp.zeros(shape, h.dtype) if h0 is None else lax.squeeze(h0, (axis,))


@functools.partial(jax.jit, static_argnums=(4, 5, 6), inline=True)
def _linear_scan(a, b, h0, starts, axis, reverse, return_last):
    b, a, h0, starts, axis = linear_operands("jaxgpuops.lax.linear_scan", a, b, h0, starts, axis)
    operands = given(b, a, h0, starts)
    [h] = linear_scan_p(*operands, axis=axis, reverse=reverse, transpose=False, initial=h0 is not None)
    return with_last(h, h0, axis, reverse) if return_last else h


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
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The linear recurrence ``h[k] = a[k] * h[k - 1] + b[k]`` along ``axis``, as `jaxgpuops.linear_scan`, which see.

    Unlike that function, this one has forward-mode derivatives too (`jax.jvp`, `jax.jacfwd`, `jax.linearize`).

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
    return _linear_scan(a, b, h0, *options(op, segment_starts, axis, reverse=reverse, return_last=return_last))
