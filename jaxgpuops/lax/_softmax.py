"""Softmax, log_softmax, logsumexp and cross-entropy with forward and reverse mode, and the argument checks of both
tiers."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxgpuops import _arguments
from jaxgpuops._arguments import FLOATS, FLOATS8, INTEGERS, Axis, AxisName, given
from jaxgpuops._axes import Merged
from jaxgpuops._primitive import align
from jaxgpuops._split import manual
from jaxgpuops.lax.cross_entropy_primitives import cross_entropy_p, sum_of_losses
from jaxgpuops.lax.logsumexp_primitives import logsumexp_p
from jaxgpuops.lax.softmax_primitives import bind, log_softmax_p, softmax_p

# ---- Arguments --------------------------------------------------------------------------------------------------------


DTYPES = FLOATS | FLOATS8 | INTEGERS | {np.dtype(bool)}


def arguments(op, x, scale, bias, where, axis, names, **flags):
    """Checks what must be checked before tracing; returns arrays, axis, axis_name, ``scale`` as a number if it is none
    of the arrays, and flags."""
    x, factor = _arguments.array(op, "x", x), 1.0
    if isinstance(scale, np.ndarray | jax.Array) or hasattr(scale, "__jax_array__"):
        scale = _arguments.array(op, "scale", scale)
    elif scale is not None:
        factor, scale = _arguments.number(op, "scale", scale), None
    bias, where = _arguments.optional(op, "bias", bias), _arguments.optional(op, "where", where)
    flags = (_arguments.flag(op, name, value) for name, value in flags.items())
    return x, scale, bias, where, _arguments.axes(op, axis), _arguments.names(op, names), factor, *flags


def evaluate(op, name, function, x, axis, names, scale, bias, where, causal):
    """Calls ``function(operands, axis, query_axis, split)`` with aligned operands (None where missing) and one axis,
    counted from the front.

    Returns its result, and how the axes were merged.
    """
    _arguments.dtype(op, name, x.dtype, DTYPES)
    x = x if x.dtype in FLOATS | FLOATS8 else x.astype(_arguments.inexact(x.dtype))
    axes = _arguments.axes_of(op, name, x.shape, axis)
    if scale is not None:
        scale = _float(op, "scale", scale)
        scale = _arguments.broadcasting(op, "scale", scale.astype(_arguments.wide(x.dtype)), x.shape)
        if any(scale.shape[d] != 1 for d in axes):
            raise ValueError(
                f"{op}: scale must have size 1 along axis {axis}, one number a row, got {scale.shape} for {name} of "
                f"shape {x.shape}"
            )
    if bias is not None:
        bias = _float(op, "bias", bias)
        bias = _arguments.broadcasting(op, "bias", bias.astype(x.dtype), x.shape)
    where = _arguments.mask(op, "where", where, x.shape)
    if causal and (x.ndim < 2 or axes != (x.ndim - 1,)):
        raise ValueError(
            f"{op}: causal needs the axis to be the last of two dimensions or more, got axis={axis} for {name} of shape "
            f"{x.shape}"
        )
    merged = Merged(x.shape, axes)
    operands = [None if a is None else merged.merge(a) for a in (x, scale, bias, where)]
    aligned = iter(align(*given(*operands)))
    operands = [None if a is None else next(aligned) for a in operands]
    split = manual(op, names, x.shape[axes[0]]) if _arguments.one_axis(op, names, axes) else None
    return function(operands, merged.axis, merged.axis - 1 if causal else None, split), merged


def _float(op, name, x):
    _arguments.dtype(op, name, x.dtype, DTYPES - {np.dtype(bool)})
    return x


def cross_entropy_arguments(op, logits, labels, where, axis, names):
    """Checks what must be checked before tracing, besides numbers."""
    logits, labels = _arguments.array(op, "logits", logits), _arguments.labels(op, "labels", labels)
    where, axis = _arguments.optional(op, "where", where), _arguments.integer(op, "axis", axis)
    return logits, labels, where, axis, _arguments.names(op, names)


def losses(op, label_smoothing, z_loss, reduction):
    """Checks the numbers of a cross-entropy, and its reduction."""
    label_smoothing = _arguments.number(op, "label_smoothing", label_smoothing)
    z_loss = _arguments.number(op, "z_loss", z_loss)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing must be between 0 and 1, got {label_smoothing}")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"{op}: z_loss must be a number not below 0, got {z_loss}")
    return label_smoothing, z_loss, _arguments.choice(op, "reduction", reduction, (None, "sum", "mean"))


def cross_entropy_operands(op, logits, labels, where, axis, names, reduction) -> tuple[Any, ...]:
    """Returns aligned logits, labels and ``where`` (or None) with the axis, the axis counted from the front, its split,
    and what the sum of the losses is multiplied by."""
    _arguments.dtype(op, "logits", logits.dtype, FLOATS | FLOATS8)
    axis = _arguments.indexed_axis(op, "logits", logits, axis)
    _arguments.dtype(op, "labels", labels.dtype, INTEGERS)
    rows = (*logits.shape[:axis], *logits.shape[axis + 1 :])
    if labels.shape != rows:
        raise ValueError(f"{op}: labels must have shape {rows}, that of logits without axis {axis}, got {labels.shape}")
    split = manual(op, names, logits.shape[axis])
    # Large labels must not wrap into the range of classes.
    if labels.dtype.itemsize == 8 or labels.dtype == np.dtype(np.uint32):
        length = logits.shape[axis] if split is None else split.length
        labels = jnp.where((labels >= 0) & (labels < length), labels, labels.dtype.type(2**31 - 1))
    labels = lax.expand_dims(labels.astype(np.int32), (axis,))
    where = _arguments.mask(op, "where", where, rows)
    if where is not None:
        where = lax.expand_dims(where, (axis,))
    # The weight is computed before operands are aligned: devices that share the axis have the same number of rows.
    dtype = _arguments.wide(logits.dtype)
    weight = _mean_weight(labels, where, dtype) if reduction == "mean" else np.ones((), dtype)
    return *align(*given(logits, labels, where)), *(() if where is not None else (None,)), axis, split, weight


def _mean_weight(labels, where, dtype) -> jax.Array:
    """Returns one over the number of rows that count, or 1 if there are none."""
    rows = labels.shape
    if where is None:
        count = jnp.asarray(math.prod(rows))
    else:
        missing = math.prod(n for n, m in zip(rows, where.shape, strict=True) if m != n)
        count = jnp.sum(where) * missing
    return 1 / jnp.maximum(count, 1).astype(dtype)


# ---- Functions --------------------------------------------------------------------------------------------------------


def evaluate_primitive(op, name, x, axis, names, factor, scale, bias, where, causal):
    """Computes softmax, log_softmax or logsumexp; returns the result, and how axes were merged."""
    kernel = {"softmax": softmax_p, "log_softmax": log_softmax_p, "logsumexp": logsumexp_p}[name]
    parts = {"parts": False} if name == "logsumexp" else {}

    def function(operands, axis, query_axis, split):
        return bind(kernel, operands, axis, factor, query_axis, split, **parts)[0]

    return evaluate(op, "x", function, x, axis, names, scale, bias, where, causal)


@functools.partial(jax.jit, static_argnums=(0, 5, 6, 7, 8), inline=True)
def _softmax(name, x, scale, bias, where, axis, names, factor, causal):
    op = f"jaxgpuops.lax.{name}"
    y, merged = evaluate_primitive(op, name, x, axis, names, factor, scale, bias, where, causal)
    return merged.split(y)


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7, 8), inline=True)
def _logsumexp(x, scale, bias, where, axis, names, factor, causal, keepdims):
    op = "jaxgpuops.lax.logsumexp"
    y, merged = evaluate_primitive(op, "logsumexp", x, axis, names, factor, scale, bias, where, causal)
    return merged.reduced(y, keepdims)


def softmax(
    x: ArrayLike,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    causal: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """Softmax as `jaxgpuops.softmax` defines it. This one also has forward-mode derivatives (`jax.jvp`, `jax.jacfwd`).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.log(jnp.array([1.0, 3.0]))
    >>> jaxgpuops.lax.softmax(x).round(4).tolist()
    [0.25, 0.75]
    >>> jax.jacfwd(jaxgpuops.lax.softmax)(x).round(4).tolist()
    [[0.1875, -0.1875], [-0.1875, 0.1875]]
    """
    op = "jaxgpuops.lax.softmax"
    return _softmax("softmax", *arguments(op, x, scale, bias, where, axis, axis_name, causal=causal))


def log_softmax(
    x: ArrayLike,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    causal: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """Logarithm of softmax as `jaxgpuops.log_softmax` defines it. This function also has forward-mode derivatives.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.log(jnp.array([1.0, 3.0]))
    >>> jnp.exp(jaxgpuops.lax.log_softmax(x)).round(4).tolist()
    [0.25, 0.75]
    >>> jax.jacfwd(jaxgpuops.lax.log_softmax)(x).round(4).tolist()
    [[0.75, -0.75], [-0.25, 0.25]]
    """
    op = "jaxgpuops.lax.log_softmax"
    return _softmax("log_softmax", *arguments(op, x, scale, bias, where, axis, axis_name, causal=causal))


def logsumexp(
    x: ArrayLike,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    causal: bool = False,
    keepdims: bool = False,
    axis_name: AxisName = None,
) -> jax.Array:
    """Log-sum-exp as `jaxgpuops.logsumexp` defines it. This function also has forward-mode derivatives.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.log(jnp.array([1.0, 3.0]))
    >>> print(jnp.exp(jaxgpuops.lax.logsumexp(x)).round(4))
    4.0
    >>> jax.jacfwd(jaxgpuops.lax.logsumexp)(x).round(4).tolist()
    [0.25, 0.75]
    """
    op = "jaxgpuops.lax.logsumexp"
    return _logsumexp(*arguments(op, x, scale, bias, where, axis, axis_name, causal=causal, keepdims=keepdims))


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7), inline=True)
def _cross_entropy(logits, labels, where, axis, names, label_smoothing, z_loss, reduction):
    op = "jaxgpuops.lax.softmax_cross_entropy"
    operands = cross_entropy_operands(op, logits, labels, where, axis, names, reduction)
    return reduced_cross_entropy(*operands, label_smoothing=label_smoothing, z_loss=z_loss, reduction=reduction)


def reduced_cross_entropy(logits, labels, where, axis, split, weight, *, label_smoothing, z_loss, reduction):
    params = {"masked": where is not None, "label_smoothing": label_smoothing, "z_loss": z_loss}
    operands, params = given(logits, labels, where), params | {"axis": axis, "split": split}
    if reduction is None:
        return cross_entropy_p(*operands, **params)[0]
    return sum_of_losses(*operands, **params) * weight


def softmax_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    axis: int = -1,
    where: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["sum", "mean"] | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """Cross-entropy as `jaxgpuops.softmax_cross_entropy` defines it. This function also has forward-mode derivatives.

    With a reduction, its gradient is a second pass over the logits, where that function computes it in the first.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> logits = jnp.log(jnp.array([[1.0, 3.0]]))
    >>> jnp.exp(-jaxgpuops.lax.softmax_cross_entropy(logits, jnp.array([0]))).round(4).tolist()
    [0.25]
    >>> jax.jacfwd(jaxgpuops.lax.softmax_cross_entropy)(logits, jnp.array([0])).round(4).tolist()
    [[[-0.75, 0.75]]]
    """
    op = "jaxgpuops.lax.softmax_cross_entropy"
    arrays_and_axis = cross_entropy_arguments(op, logits, labels, where, axis, axis_name)
    return _cross_entropy(*arrays_and_axis, *losses(op, label_smoothing, z_loss, reduction))
