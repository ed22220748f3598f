"""Arrays that are expanded to larger shapes, with gradients that are our sums."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxgpuops import _arguments
from jaxgpuops._arguments import FLOATS, FLOATS8
from jaxgpuops._primitive import align
from jaxgpuops.lax._reduce import sum as total


def expand(x: ArrayLike, shape: int | Sequence[int]) -> jax.Array:
    """An array broadcast to a shape: `jax.numpy.broadcast_to`, whose gradient adds up with `jaxgpuops.sum`.

    Args:
      x: array of any dtype.
      shape: the shape, static, that ``x`` broadcasts to by NumPy's rules.

    Returns:
      An array of that shape and the dtype of ``x``. XLA makes it, and fuses it with what uses it: nothing is stored
      that need not be.

    Derivatives: the cotangent is summed over the dimensions that ``x`` does not have: floats of 8 and 16 bits in
    float32, rounded once, in an order that does not depend on the run. (JAX's adds up in the dtype itself.) For forward
    mode at the bottom use `jax.numpy.broadcast_to`; here JAX raises TypeError.

    Raises:
      TypeError: for a ``shape`` that is not integers known at trace time.
      ValueError: where ``x`` does not broadcast to it.

    Algorithms: as `jaxgpuops.sum`.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.expand(jnp.array([[1.0], [2.0]]), (2, 3)).tolist()
    [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    >>> jax.grad(lambda x: jaxgpuops.expand(x, (4, 2)).sum())(jnp.ones(2)).tolist()
    [4.0, 4.0]
    """
    op = "jaxgpuops.expand"
    x = _arguments.array(op, "x", x, keys=True)
    sizes = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    sizes = tuple(_arguments.integer(op, "shape", n) for n in sizes)
    try:
        fits = jnp.broadcast_shapes(x.shape, sizes) == sizes
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(f"{op}: x of shape {x.shape} must broadcast to shape {sizes}")
    return _jitted_expand(x, sizes)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _jitted_expand(x, shape):
    return _expand(x, x.shape, shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _expand(x, own, shape):
    return jnp.broadcast_to(x, shape)


_expand.defvjp(
    lambda x, own, shape: (jnp.broadcast_to(x, shape), None),
    lambda own, shape, _, ct: (_summed_to(ct, own),),
)


def where(condition: ArrayLike, x: ArrayLike, y: ArrayLike) -> jax.Array:
    """Elements of one array or another: `jax.numpy.where`, whose gradients add up with `jaxgpuops.sum`.

    Args:
      condition: booleans.
      x: what is taken where they are True.
      y: what is taken where they are False; promoted to one dtype with ``x``. The three broadcast by NumPy's rules.

    Returns:
      An array of the shape that they broadcast to. XLA makes it, and fuses it with what uses it.

    Derivatives: the cotangent of the elements that were taken, summed over the dimensions that an array does not have,
    as that of `jaxgpuops.expand`, with the same bits in every run; the sum reads the mask, nothing is expanded for it.
    A cotangent of an element that was not taken does not count, even if it is NaN. For forward mode at the bottom use
    `jax.numpy.where`; here JAX raises TypeError.

    Raises:
      TypeError: for a ``condition`` of another dtype.
      ValueError: for shapes that do not broadcast.

    Algorithms: as `jaxgpuops.sum`.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> jaxgpuops.where(x > 2, x, 0.0).tolist()
    [[0.0, 0.0], [3.0, 4.0]]
    >>> jax.grad(lambda y: jaxgpuops.where(x > 1, x, y).sum())(0.0).tolist()
    1.0
    """
    op = "jaxgpuops.where"
    arrays = {"condition": condition, "x": x, "y": y}
    arrays = {name: _arguments.array(op, name, value, keys=True) for name, value in arrays.items()}
    _arguments.dtype(op, "condition", arrays["condition"].dtype, [np.dtype(bool)])
    return _jitted_where(*arrays.values())


@functools.partial(jax.jit, inline=True)
def _jitted_where(condition, x, y):
    dtype = _arguments.promoted("jaxgpuops.where", x=x, y=y)
    try:
        shape = jnp.broadcast_shapes(condition.shape, x.shape, y.shape)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "jaxgpuops.where: condition, x and y must broadcast to one shape, got "
            f"{condition.shape}, {x.shape} and {y.shape}"
        ) from error
    arrays = (condition, x.astype(dtype), y.astype(dtype))
    condition, x, y = align(*(lax.expand_dims(a, range(len(shape) - a.ndim)) for a in arrays))
    return _where(condition, x, y, x.shape, y.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _where(condition, x, y, x_shape, y_shape):
    return jnp.where(condition, x, y)


def _where_backward(x_shape, y_shape, condition, ct):
    return None, _summed_to(ct, x_shape, condition), _summed_to(ct, y_shape, ~condition)


_where.defvjp(lambda condition, x, y, *shapes: (jnp.where(condition, x, y), condition), _where_backward)


def _summed_to(ct: Any, shape: tuple[int, ...], where: Any = None):
    """Returns the cotangent of an array of this shape, given that of its broadcast; only entries of ``where`` count."""
    if ct.dtype == jax.dtypes.float0:  # integers: no gradient
        return None
    if jnp.issubdtype(ct.dtype, jnp.complexfloating):
        parts: list[Any] = [_summed_to(part, shape, where) for part in (ct.real, ct.imag)]
        return lax.complex(*parts)
    added = ct.ndim - len(shape)
    axes = (*range(added), *(d + added for d, n in enumerate(shape) if n != ct.shape[d + added]))
    if axes:
        # Floats of other formats, such as float4_e2m1fn, are added up in float32, too.
        wide = ct if ct.dtype in FLOATS | FLOATS8 else ct.astype(np.float32)
        ct = total(wide, axis=axes, where=where, keepdims=True).astype(ct.dtype)
    elif where is not None:
        ct = jnp.where(where, ct, np.zeros((), ct.dtype))
    return lax.squeeze(ct, range(added))
