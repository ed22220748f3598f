"""Softmax, its logarithm, logsumexp, and cross-entropy with integer labels."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxgpuops._arguments import Axis, AxisName, given
from jaxgpuops._primitive import INLINE
from jaxgpuops.lax import cross_entropy_primitives as entropy
from jaxgpuops.lax import logsumexp_primitives
from jaxgpuops.lax import softmax_primitives as primitives
from jaxgpuops.lax._softmax import (
    arguments,
    cross_entropy_arguments,
    cross_entropy_operands,
    evaluate,
    evaluate_primitive,
    losses,
    reduced_cross_entropy,
)


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
    """Exponentials along an axis, divided by their sum: of the logits ``z = scale * x + bias``.

    Args:
      x: array of shape ``(*before, n, *after)``, of dtype float8_e4m3fn, float8_e5m2, float16, bfloat16, float32 or
        float64. Integers and bools are converted to float32, those of 64 bits to float64, as in `jax.nn.softmax`.
      axis: the axis of length ``n``, or several, which are taken together, or None for all. No single axis costs a
        transpose, nor do neighbouring ones; others are first moved to the end, a copy.
      where: boolean mask that broadcasts to ``x``; False masks an entry. Like ``scale`` and ``bias``, it is read as it
        is, not expanded (to all of ``axis``, if that is several and it has some of them).
      scale: a number, or an array that broadcasts to ``x`` and has size 1 along the axis: one number a row, such as an
        inverse temperature. A number is compiled into the program, so one that changes should be an array.
      bias: array that broadcasts to ``x``. It is converted to the dtype of ``x``.
      causal: True to mask entry (q, k) of the last two dimensions where k > q. The axis must be the last.
      axis_name: inside `jax.shard_map`, what ``axis`` is split along, as for `jaxgpuops.topk`, with one ``axis`` only;
        the result, ``bias`` and ``where`` are this device's part.

    Returns:
      An array of the shape and dtype of ``x``. Masked entries are 0, whatever ``x`` holds there.

    Numbers: floats of 8 and 16 bits are computed in float32 and rounded once, others in their own dtype; ``scale`` and
    what is computed from it have that dtype too. The maximum of a row is subtracted from the logits after these are
    scaled and rounded, so that nothing overflows. The order of the additions depends on ``n``, the dimensions after the
    axis and the dtype, not on the run, on the batch, or on how it is sharded: a row has the same bits wherever it is.
    As in `jax.nn.softmax`, a row with a NaN or +inf that is not masked is NaN, and so is one that is -inf everywhere; a
    row that is masked whole is 0.

    Derivatives: with respect to ``x``, ``scale`` and ``bias``; a cotangent that broadcasts is summed. That of ``x`` is
    one kernel, which reads the cotangent and the result (``x``, if nothing else in the program reads the result, of
    rows in small arrays, and along short axes). Masked entries have the gradient 0, never NaN. Reverse mode works, and
    whatever is built on top of it (`jax.grad`, `jax.jacrev`, `jax.hessian`, gradients of gradients). For forward mode
    at the bottom (`jax.jvp`, `jax.jacfwd`, `jax.linearize`) use `jaxgpuops.lax.softmax`; here JAX raises TypeError.

    Raises:
      TypeError: for other dtypes, for an ``axis`` or a flag that is not known at trace time, and for ``where`` that are
        not booleans.
      ValueError: for ``axis`` out of range or given twice, for operands that do not broadcast to ``x``, for a ``scale``
        that has the axis, and for ``causal`` along another axis than the last.

    Algorithms: one pass, with maxima and sums of parts combined, Milakov & Gimelshein, "Online normalizer calculation
    for softmax" (2018).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.log(jnp.array([[1.0, 1.0, 2.0], [2.0, 1.0, 1.0]]))
    >>> print(jaxgpuops.softmax(x).round(4))
    [[0.25 0.25 0.5 ]
     [0.5  0.25 0.25]]
    >>> print(jaxgpuops.softmax(x, where=jnp.array([True, True, False])).round(4))
    [[0.5    0.5    0.    ]
     [0.6667 0.3333 0.    ]]
    >>> temperatures = jnp.array([[1.0], [0.1]])
    >>> print(jaxgpuops.softmax(x, scale=1 / temperatures).round(3))
    [[0.25  0.25  0.5  ]
     [0.998 0.001 0.001]]
    >>> jaxgpuops.softmax(jnp.zeros((2, 2)), causal=True).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    >>> jax.grad(lambda x: jaxgpuops.softmax(x)[2])(x[0]).round(4).tolist()
    [-0.125, -0.125, 0.25]
    """
    op = "jaxgpuops.softmax"
    return _jitted("softmax", *arguments(op, x, scale, bias, where, axis, axis_name, causal=causal))


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
    """The logarithm of `jaxgpuops.softmax`: logits less their `jaxgpuops.logsumexp`, accurate where softmax is near 0.

    Args:
      x, axis, where, scale, bias, causal, axis_name: as for `jaxgpuops.softmax`.

    Returns:
      An array of the shape and dtype of ``x``. Masked entries are -inf, whatever ``x`` holds there.

    Numbers: as for `jaxgpuops.softmax`, NaNs and fixed bits included; a row that is masked whole is -inf.

    Derivatives: as for `jaxgpuops.softmax`. Cotangents of 16-bit floats are summed in float32: their sum may pass the
    range of float16. Forward mode: `jaxgpuops.lax.log_softmax`.

    Raises:
      TypeError, ValueError: as `jaxgpuops.softmax`.

    Algorithms: as `jaxgpuops.softmax`.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.log_softmax(jnp.array([0.0, -200.0])).tolist()
    [0.0, -200.0]
    >>> print(jaxgpuops.log_softmax(jnp.array([3.0, 3.0, jnp.nan]), where=jnp.array([True, True, False])).round(4))
    [-0.6931 -0.6931    -inf]
    >>> jax.grad(lambda x: jaxgpuops.log_softmax(x)[0])(jnp.zeros(4)).tolist()
    [0.75, -0.25, -0.25, -0.25]
    """
    op = "jaxgpuops.log_softmax"
    return _jitted("log_softmax", *arguments(op, x, scale, bias, where, axis, axis_name, causal=causal))


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
    """The logarithm of the sum of the exponentials along an axis: of the logits ``z = scale * x + bias``.

    Args:
      x, axis, where, scale, bias, causal, axis_name: as for `jaxgpuops.softmax`. (`jax.nn.logsumexp` has another
        default axis.)
      keepdims: True to keep the axes, with length 1.

    Returns:
      An array of the shape of ``x`` without the axes, of the dtype of ``x``.

    Numbers: as for `jaxgpuops.softmax`, with fixed bits and with no overflow in between. -inf for a row that is masked
    whole, -inf everywhere, or empty; NaN for one with a NaN; else +inf for one with a +inf.

    Derivatives: the softmax of the logits times the cotangent, from ``x`` and two numbers a row; 0 for a row whose
    result is -inf, and for masked entries. It is as accurate for large logits as for small ones, and elementwise plain
    JAX, which XLA fuses with what is around it; of ``x`` alone, without other operands, a GPU mostly has a kernel for
    it, which makes it from ``x`` in one pass. Forward mode: `jaxgpuops.lax.logsumexp`.

    Raises:
      TypeError, ValueError: as `jaxgpuops.softmax`.

    Algorithms: as `jaxgpuops.softmax`.

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> x = jnp.array([[1000.0, 1000.0], [-jnp.inf, -jnp.inf]])
    >>> print(jaxgpuops.logsumexp(x).round(4))
    [1000.6932      -inf]
    >>> print(jax.grad(lambda x: jaxgpuops.logsumexp(x).sum())(x).round(4))
    [[0.5 0.5]
     [0.  0. ]]
    """
    op = "jaxgpuops.logsumexp"
    return _jitted(
        "logsumexp", *arguments(op, x, scale, bias, where, axis, axis_name, causal=causal, keepdims=keepdims)
    )


# Checks of shapes and dtypes run while tracing: an eager call that has been made before costs one dispatch.
@functools.partial(jax.jit, static_argnums=(0, 5, 6, 7, 8, 9), inline=INLINE)
def _jitted(name, x, scale, bias, where, axis, names, factor, causal, keepdims=False):
    op = f"jaxgpuops.{name}"
    if names is None:
        function = lambda operands, axis, query_axis, _: _softmax(name, axis, factor, query_axis, *operands)
        y, merged = evaluate(op, "x", function, x, axis, None, scale, bias, where, causal)
    else:
        y, merged = evaluate_primitive(op, name, x, axis, names, factor, scale, bias, where, causal)
    return merged.reduced(y, keepdims) if name == "logsumexp" else merged.split(y)


_KERNELS = {"softmax": primitives.softmax_p, "log_softmax": primitives.log_softmax_p}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _softmax(name, axis, factor, query_axis, *operands):
    if name == "logsumexp":
        return primitives.bind(logsumexp_primitives.logsumexp_p, operands, axis, factor, query_axis, parts=False)[0]
    return primitives.bind(_KERNELS[name], operands, axis, factor, query_axis)[0]


# The forward passes call primitives, not `_softmax`: these have forward mode, so that forward over reverse
# (`jax.hessian`) works.
def _forward(name, axis, factor, query_axis, *operands):
    if name == "logsumexp":
        parts = primitives.bind(logsumexp_primitives.logsumexp_p, operands, axis, factor, query_axis, parts=True)
        return logsumexp_primitives.whole(parts, operands[0].dtype), (parts, operands)
    [y] = primitives.bind(_KERNELS[name], operands, axis, factor, query_axis)
    return y, (y, operands)


def _backward(name, axis, factor, query_axis, residuals, ct):
    y, (x, scale, bias, where) = residuals
    plain = all(operand is None for operand in residuals[1][1:]) and factor == 1 and query_axis is None

    def pull(scale, factor):
        """Returns the cotangent of x, which becomes logits when it is multiplied by scale and factor."""
        params = {"axis": axis, "factor": factor, "scaled": scale is not None}
        made_from, params = (x, params | {"of_logits": True}) if plain else (None, params)
        if name == "softmax":
            return primitives.softmax_jvp_p(*given(ct, y, scale, made_from), **params)[0]
        operands = given(ct, y, scale, where, made_from)
        params |= {"masked": where is not None, "query_axis": query_axis, "transpose": True}
        return primitives.log_softmax_jvp_p(*operands, **params)[0]

    if name == "logsumexp":
        *parts, ct = (lax.expand_dims(a, (axis,)) for a in (*y, ct))
        if plain:
            return *logsumexp_primitives.logsumexp_grad_p(x, ct, *parts, axis=axis), None, None, None
        rows = *parts, primitives.wide(ct)
        flags = {"scaled": scale is not None, "biased": bias is not None, "masked": where is not None}
        rest = given(scale, bias, where)
        params = {"axis": axis, "factor": factor, "query_axis": query_axis} | flags
        [dz] = logsumexp_primitives.logsumexp_vjp_p(x, *rows, *rest, **params)
        dx, dscale, dbias = primitives.logit_cotangents(dz, x, scale, bias, factor)
    else:
        # Most calls need the cotangent of x only, so the kernel also multiplies by the scale.
        dx, dscale, dbias = pull(scale, factor), None, None
        if scale is not None or bias is not None:
            dz = dx if scale is None and factor == 1 else pull(None, 1.0)
            _, dscale, dbias = primitives.logit_cotangents(primitives.wide(dz), x, scale, bias, factor)
    return dx, dscale, dbias, None


_softmax.defvjp(_forward, _backward)

# ---- Cross-entropy ----------------------------------------------------------------------------------------------------


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
    """Cross-entropy of the softmax of logits, with integer labels.

    For a row of logits z with logarithm of the sum of exponentials lse it is
    ``(1 - label_smoothing) * (lse - z[label]) + label_smoothing * (lse - mean(z)) + z_loss * lse**2``.

    Args:
      logits: array of shape ``(*before, n, *after)``, of dtype float8_e4m3fn, float8_e5m2, float16, bfloat16, float32
        or float64. They are read as they are: 16-bit logits need not be converted.
      labels: the right classes: integers of shape ``(*before, *after)``.
      axis: the axis of the ``n`` classes.
      where: boolean mask that broadcasts to ``labels``; rows where it is False do not count: their loss and gradient
        are 0, whatever their logits and labels are. ``where=labels != -100`` ignores an index.
      label_smoothing: a number from 0 to 1: the part of the weight that all classes share.
      z_loss: a number not below 0, the weight of the square of lse, which keeps it small.
      reduction: None for a loss per row, ``"sum"``, or ``"mean"`` over the rows that count (0 if there are none).
      axis_name: inside `jax.shard_map`, what ``axis`` is split along, as for `jaxgpuops.topk`: labels are of the whole
        axis, and all devices get the same losses.

    Returns:
      The losses, of shape ``(*before, *after)``, or a scalar with a reduction; float32, or float64 for float64 logits.

    Numbers: floats of 8 and 16 bits are computed in float32, others in their own dtype; a row has the same bits
    wherever it is. The loss of a row that counts is NaN for a label that is no class (negative, or ``n`` and more, also
    of 64 bits where JAX has 32), and its gradient is too; NaNs and infinities are treated as by `jaxgpuops.logsumexp`.

    Derivatives: with respect to the logits. With a reduction, the gradient is computed together with the loss, by one
    kernel that reads the logits once and writes it once, in their place if they are not used any more (donated, or
    computed in the same program; on a GPU, if they take 64 MiB or more: there, logits that live on are copied first);
    the backward pass multiplies it by the cotangent. Without one, the backward pass computes it from the logits and
    two numbers a row, elementwise, in plain JAX. Either way no other array of the size of the logits is kept or made.
    The gradient at the label is minus the sum of the other probabilities, not rounded away where that of the label is
    almost 1, and all of it is as accurate for large logits as for small ones. Reverse mode works, and whatever is built
    on top of it. For forward mode at the bottom (`jax.jvp`, `jax.jacfwd`) use `jaxgpuops.lax.softmax_cross_entropy`;
    here JAX raises TypeError.

    Raises:
      TypeError: for other dtypes, and for arguments that must be, and are not, numbers known at trace time.
      ValueError: for ``axis`` out of range, shapes that do not fit, numbers out of range, and another ``reduction``.

    Algorithms: the gradient in the pass of the loss, in place, as in Hsu et al., "Liger Kernel: Efficient Triton
    Kernels for LLM Training" (2024).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> logits = jnp.log(jnp.array([[1.0, 1.0, 2.0], [6.0, 3.0, 1.0]]))
    >>> labels = jnp.array([2, -100])
    >>> print(jaxgpuops.softmax_cross_entropy(logits, labels, where=labels != -100).round(4))
    [0.6931 0.    ]
    >>> loss = lambda z: jaxgpuops.softmax_cross_entropy(z, labels, where=labels != -100, reduction="mean")
    >>> jax.grad(loss)(logits).round(4).tolist()
    [[0.25, 0.25, -0.5], [0.0, 0.0, 0.0]]
    """
    op = "jaxgpuops.softmax_cross_entropy"
    arrays_and_axis = cross_entropy_arguments(op, logits, labels, where, axis, axis_name)
    return _jitted_cross_entropy(*arrays_and_axis, *losses(op, label_smoothing, z_loss, reduction))


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7), inline=INLINE)
def _jitted_cross_entropy(logits, labels, where, axis, names, label_smoothing, z_loss, reduction):
    op = "jaxgpuops.softmax_cross_entropy"
    operands = cross_entropy_operands(op, logits, labels, where, axis, names, reduction)
    logits, labels, where, axis, split, weight = operands
    if split is not None:
        return reduced_cross_entropy(*operands, label_smoothing=label_smoothing, z_loss=z_loss, reduction=reduction)
    config = axis, label_smoothing, z_loss
    if reduction is None:
        return _losses(config, logits, labels, where)
    return _weighted_sum(config, logits, labels, where, weight)


def _params(config, where):
    axis, label_smoothing, z_loss = config
    return {"axis": axis, "label_smoothing": label_smoothing, "z_loss": z_loss, "masked": where is not None}


def _losses_forward(config, logits, labels, where):
    loss, *parts = entropy.cross_entropy_p(*given(logits, labels, where), **_params(config, where))
    return loss, (logits, labels, where, *parts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(config, logits, labels, where):
    return _losses_forward(config, logits, labels, where)[0]


def _losses_backward(config, residuals, ct):
    logits, labels, where, *rows = residuals
    rows = (lax.expand_dims(a, (config[0],)) for a in (*rows, ct))
    operands = given(logits, labels, *rows, where)
    return *entropy.cross_entropy_vjp_p(*operands, **_params(config, where)), None, None


_losses.defvjp(_losses_forward, _losses_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_sum(config, logits, labels, where, weight):
    return entropy.sum_of_losses(*given(logits, labels, where), **_params(config, where)) * weight


def _weighted_sum_forward(config, logits, labels, where, weight):
    cotangent = jnp.broadcast_to(weight, (1,) * logits.ndim)
    operands = given(logits, labels, cotangent, where)
    summed = entropy.all_rows(logits, config[0])
    gradient, total = entropy.cross_entropy_sum_grad_p(*operands, summed=summed, **_params(config, where))
    return total.reshape(()), gradient


def _weighted_sum_backward(config, gradient, ct):
    # XLA removes the multiplication by 1, the cotangent that `jax.grad` begins with.
    return (primitives.wide(gradient) * ct).astype(gradient.dtype), None, None, None


_weighted_sum.defvjp(_weighted_sum_forward, _weighted_sum_backward)
