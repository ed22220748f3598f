"""Cross-entropy of the softmax of logits as primitives, beside those of softmax_primitives.py.

Its derivatives need only two numbers of a row, as those of logsumexp do. With a reduction, the loss and its gradient
are one kernel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgpuops import _arguments
from jaxgpuops._arguments import FLOATS
from jaxgpuops._derivatives import def_jvp, def_jvp_by_fallback, times
from jaxgpuops._primitive import like
from jaxgpuops.lax.logsumexp_primitives import logsumexp_jvp_p
from jaxgpuops.lax.softmax_primitives import (
    _below,
    _def_transpose,
    _kernel,
    _like_first,
    _log_sum,
    _maximum,
    _optional,
    _position,
    _sum,
    _where,
    wide,
)


def _cross_entropy_terms(logits, labels, where, axis, label_smoothing, z_loss):
    """Returns the loss and the parts of logsumexp of each row, z, e^(z - m), and where the label is; all with the
    axis."""
    z = wide(_where(where, logits, 0))
    n = z.shape[axis]
    _, m = _maximum(z, axis)
    is_label = _position(z.shape, axis) == labels
    log_sum = _log_sum(z, m, axis)
    lse = m + log_sum
    at_label = jnp.sum(jnp.where(is_label, z, np.zeros((), z.dtype)), axis, keepdims=True)
    loss = (m - at_label) + log_sum
    if label_smoothing:
        loss = (1 - label_smoothing) * loss
        loss = loss + label_smoothing * ((m - jnp.sum(z / n, axis, keepdims=True)) + log_sum)
    if z_loss:
        loss = loss + z_loss * lse**2
    loss = jnp.where((labels >= 0) & (labels < n), loss, np.nan)
    rows = [_where(where, a, 0) for a in (loss, m, log_sum)]
    return *rows, z, jnp.exp(_below(z, m)), is_label


def _cross_entropy_fallback(logits, labels, *where, axis, masked, **losses):
    rows = _cross_entropy_terms(logits, labels, *_optional(where, masked), axis, **losses)[:3]
    return [lax.squeeze(a, (axis,)) for a in rows]


_LOSSES = ("label_smoothing", "z_loss", "masked")

# The loss and the parts of logsumexp of each row, in wide dtype.
cross_entropy_p = _kernel(
    "cross_entropy",
    2,
    results=lambda x, *_, **__: [(None, _arguments.wide(x.dtype))] * 3,
    fallback=_cross_entropy_fallback,
    accepts=FLOATS.__contains__,
    attributes=_LOSSES,
)


def _slope(p, less_one, is_label, lse, label_smoothing, z_loss, n):
    """Returns the derivative of a row's loss with respect to its logits; ``less_one`` is p - 1 at the label."""
    slope = jnp.where(is_label, less_one, p)
    if z_loss:
        slope += p * (2 * z_loss * lse)
    if label_smoothing:
        share = label_smoothing / (max(n, 1) if isinstance(n, int) else n)  # n may be 0, or a symbol
        slope += jnp.where(is_label, label_smoothing - share, -share)
    return slope


def _nan_unless_differentiable(x, is_class, log_sum):
    """Returns x, with NaN in rows whose loss has no derivative: the label is no class, or a logit is NaN or
    infinite."""
    return jnp.where(is_class & jnp.isfinite(log_sum), x, np.array(np.nan, x.dtype))


def _cross_entropy_slope(logits, labels, m, log_sum, *where, axis, masked, label_smoothing, z_loss, split=None):
    """Returns the derivative of each row's loss with respect to its logits, in wide dtype. It is elementwise, given
    what the forward pass found, and the logit of the label.

    It does not use the loss, which devices then need not add up if the axis is split and nothing else needs it.
    """
    [where] = _optional(where, masked)
    z = wide(_where(where, logits, 0))
    is_label = _position(z.shape, axis, split) == labels
    n = z.shape[axis] if split is None else split.length
    log_sum = _nan_unless_differentiable(log_sum, (labels >= 0) & (labels < n), log_sum)
    # At a label that is the maximum this is exactly -log_sum, which is what remains of 1 - p when p rounds to 1.
    d = (z - m) - log_sum
    # p - 1 of the label alone: for all entries it would take longer than reading and writing them.
    own = jnp.clip(labels if split is None else labels - split.start(), 0, z.shape[axis] - 1)
    less_one = jnp.expm1((jnp.take_along_axis(z, own, axis, mode="promise_in_bounds") - m) - log_sum)
    slope = _slope(jnp.exp(d), less_one, is_label, m + log_sum, label_smoothing, z_loss, n)
    return _where(where, slope, 0)


def _cross_entropy_jvp_fallback(t, *operands, axis, split=None, **params):
    slope = _cross_entropy_slope(*operands, axis=axis, split=split, **params)
    return (_sum(times(slope, wide(t)), axis, split),)


# The tangent of the loss, given the tangent of the logits. XLA would move the logits of labels if it split this and the
# next one by itself.
cross_entropy_jvp_p = _kernel(
    "cross_entropy_jvp",
    1,
    plan=False,
    results=lambda t, *_, **__: [(None, _arguments.wide(t.dtype))],
    fallback=_cross_entropy_jvp_fallback,
    accepts=None,
    splits_as_one=True,
)


def _cross_entropy_vjp_fallback(logits, labels, m, log_sum, ct, *where, **params):
    slope = _cross_entropy_slope(logits, labels, m, log_sum, *where, **params)
    return (times(slope, ct).astype(logits.dtype),)


# The cotangent of the logits, given the cotangent of the loss.
cross_entropy_vjp_p = _kernel(
    "cross_entropy_vjp",
    1,
    plan=False,
    results=_like_first,
    fallback=_cross_entropy_vjp_fallback,
    accepts=None,
    splits_as_one=True,
)
def_jvp_by_fallback(cross_entropy_vjp_p)


def _cross_entropy_jvp_transposed(cts, aval, logits, labels, m, log_sum, *where, axis, split=None, **params):
    ct = lax.expand_dims(cts[0] if split is None else split.cotangent(cts[0]), (axis,))
    logits = like(logits, aval)
    return cross_entropy_vjp_p(logits, labels, m, log_sum, ct, *where, axis=axis, split=split, **params)[0]


_def_transpose(cross_entropy_jvp_p, _cross_entropy_jvp_transposed)


def _cross_entropy_jvp(outs, primals, tangents, *, axis, masked, split=None, **losses):
    logits, labels, *where = primals
    parts = [lax.expand_dims(out, (axis,)) for out in outs[1:]]
    params = {"axis": axis, "masked": masked, "split": split}
    [dloss] = cross_entropy_jvp_p(tangents[0], logits, labels, *parts, *where, **params, **losses)
    params |= {"factor": 1.0, "scaled": False, "biased": False, "query_axis": None}
    return dloss, None, logsumexp_jvp_p(wide(tangents[0]), logits, *parts, *where, **params)[0]


def_jvp(cross_entropy_p, _cross_entropy_jvp)


def _cross_entropy_grad_fallback(logits, labels, cotangent, *where, axis, masked, **losses):
    [where] = _optional(where, masked)
    loss, m, log_sum, z, e, is_label = _cross_entropy_terms(logits, labels, where, axis, **losses)
    total = jnp.sum(e, axis, keepdims=True)
    others = jnp.sum(jnp.where(is_label, np.zeros((), e.dtype), e), axis, keepdims=True)
    slope = _slope(e / total, -others / total, is_label, m + log_sum, n=z.shape[axis], **losses)
    is_class = (labels >= 0) & (labels < z.shape[axis])
    slope = _where(where, _nan_unless_differentiable(slope, is_class, log_sum), 0)
    return times(slope, cotangent).astype(logits.dtype), lax.squeeze(loss, (axis,))


# The gradient of sum(cotangent * loss), and the losses, in one pass. The gradient may replace the logits in memory.
cross_entropy_grad_p = _kernel(
    "cross_entropy_grad",
    2,
    results=lambda x, *_, axis, **__: [(x.shape[axis], x.dtype), (None, _arguments.wide(x.dtype))],
    fallback=_cross_entropy_grad_fallback,
    accepts=FLOATS.__contains__,
    attributes=_LOSSES,
    aliases={0: 0},
)
def_jvp_by_fallback(cross_entropy_grad_p)

# ---- Sums of losses ---------------------------------------------------------------------------------------------------

# The losses of rows, added up over the dimensions ``summed``. These are made of the kernels above. They are primitives
# so that devices that share the array add up one number together, and not one for each row. The sum keeps the
# dimensions that are summed, with size 1.


def all_rows(logits: jax.Array, axis: int) -> tuple[int, ...]:
    return tuple(d for d in range(logits.ndim) if d != axis)


def _total(loss, axis, summed):
    return jnp.sum(lax.expand_dims(loss, (axis,)), summed, keepdims=True)


def _cross_entropy_sum_fallback(logits, labels, *where, axis, summed, **params):
    loss, *parts = cross_entropy_p.primitive.bind(logits, labels, *where, axis=axis, **params)
    return [_total(loss, axis, summed), *parts]


# The sum, and the parts of logsumexp of each row.
cross_entropy_sum_p = _kernel(
    "cross_entropy_sum",
    2,
    plan=False,
    results=lambda x, *_, summed, **__: [
        (1, _arguments.wide(x.dtype), summed),
        *[(None, _arguments.wide(x.dtype))] * 2,
    ],
    fallback=_cross_entropy_sum_fallback,
    accepts=None,
    dimensions=("summed",),
    splits_as_one=True,
)


def _cross_entropy_sum_jvp(outs, primals, tangents, *, axis, summed, **params):
    dloss, _, dlog_sum = _cross_entropy_jvp(outs, primals, tangents, axis=axis, **params)
    return _total(dloss, axis, summed), None, dlog_sum


def_jvp(cross_entropy_sum_p, _cross_entropy_sum_jvp)


def sum_of_losses(logits: jax.Array, *rest: jax.Array, axis: int, **params) -> jax.Array:
    total, *_ = cross_entropy_sum_p(logits, *rest, axis=axis, summed=all_rows(logits, axis), **params)
    return total.reshape(())


def _cross_entropy_sum_grad_fallback(logits, labels, cotangent, *where, axis, summed, **params):
    gradient, loss = cross_entropy_grad_p.primitive.bind(logits, labels, cotangent, *where, axis=axis, **params)
    # XLA fuses the product with the sum; of the sum alone it would make one more kernel.
    return gradient, _total(loss * lax.squeeze(cotangent, (axis,)), axis, summed)


# sum(cotangent * loss) and its gradient, in one pass. The cotangent has size 1 in the dimensions that are summed.
cross_entropy_sum_grad_p = _kernel(
    "cross_entropy_sum_grad",
    2,
    plan=False,
    results=lambda x, *_, axis, summed, **__: [(x.shape[axis], x.dtype), (1, _arguments.wide(x.dtype), summed)],
    fallback=_cross_entropy_sum_grad_fallback,
    accepts=None,
    dimensions=("summed",),
    aliases={0: 0},
    splits_as_one=True,
)
def_jvp_by_fallback(cross_entropy_sum_grad_p)
