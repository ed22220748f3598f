"""Softmax and its family where the axis, or the dimension of causal queries, is split over devices.

Along a split axis each device reduces its part of a row in one read, by the kernel of logsumexp, which gives the
maximum and the logarithm of the sum. Collectives then reduce the numbers of all devices: first the maxima, then the
sums. The results are elementwise, plain JAX, which reads the array a second time. A probability near 1 loses digits of
1 - p here, which the kernels keep: to keep them across devices would take one more number for each row than JAX moves.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgpuops._arguments import given
from jaxgpuops._derivatives import times
from jaxgpuops._split import RULES, Rule, all_axes, filled_axes, plain_rule
from jaxgpuops.lax.cross_entropy_primitives import (
    _cross_entropy_slope,
    cross_entropy_grad_p,
    cross_entropy_jvp_p,
    cross_entropy_p,
    cross_entropy_vjp_p,
)
from jaxgpuops.lax.logsumexp_primitives import logsumexp_grad_p, logsumexp_jvp_p, logsumexp_p, logsumexp_vjp_p, whole
from jaxgpuops.lax.softmax_primitives import (
    _below,
    _logits,
    _optional,
    _times,
    _where,
    log_softmax_jvp_p,
    log_softmax_p,
    or_zero,
    softmax_p,
    wide,
)

_KERNELS = {kernel.name: kernel for kernel in (softmax_p, log_softmax_p, logsumexp_p)}


def _mask(splits, shape, where, axis, query_axis):
    """Returns where entries count, or None if all do. Positions are those in the whole array, and padding never
    counts."""

    def positions(dim):
        if dim in splits:
            return splits[dim].positions(shape, dim)
        return lax.broadcasted_iota(np.int32, [n if d == dim else 1 for d, n in enumerate(shape)], dim)

    masks = given(where)
    if axis in splits and splits[axis].uneven:
        masks.append(~splits[axis].is_padding(shape, axis))
    if query_axis is not None:
        masks.append(positions(axis) <= positions(query_axis))
    return functools.reduce(jnp.logical_and, masks) if masks else None


def _statistics(split, x, scale, bias, mask, axis, factor):
    """Returns for whole rows, with the axis: the largest logit m (0 where it is not finite), and this device's summand
    of the sum of e^(z - m)."""
    flags = {"factor": factor, "scaled": scale is not None, "biased": bias is not None, "masked": mask is not None}
    operands = given(x, scale, bias, mask)
    own = logsumexp_p.primitive.bind(*operands, axis=axis, query_axis=None, parts=True, **flags)
    m, log_sum = (lax.expand_dims(a, (axis,)) for a in own)
    # If the maximum of a row is not finite, the kernel returns 0 for it, and the maximum itself as the logarithm.
    most = jnp.where(jnp.isfinite(log_sum), m, log_sum)
    # The maximum is an element of x, so it is exchanged in the dtype of x.
    if factor == 1 and scale is None and bias is None:
        most = most.astype(x.dtype)
    most = split.max(most).astype(m.dtype)
    most = jnp.where(jnp.isfinite(most), most, np.zeros((), m.dtype))
    return most, jnp.exp((m - most) + log_sum)


def _total(split, x, axis):
    return split.sum(jnp.sum(x, axis, keepdims=True))


def _forward(name):
    def local(splits, x, *rest, axis, factor, scaled, biased, masked, query_axis, **params):
        scale, bias, where = _optional(rest, scaled, biased, masked)
        mask = _mask(splits, x.shape, where, axis, query_axis)
        if axis not in splits:  # rows are whole; only the dimension of causal queries is split
            flags = {"factor": factor, "scaled": scaled, "biased": biased, "masked": mask is not None}
            operands = given(x, scale, bias, mask)
            return _KERNELS[name].primitive.bind(*operands, axis=axis, query_axis=None, **flags, **params)
        m, own = _statistics(splits[axis], x, scale, bias, mask, axis, factor)
        total = splits[axis].sum(own)
        if name == "logsumexp":
            parts = [lax.squeeze(a, (axis,)) for a in (m, jnp.log(total))]
            return parts if params["parts"] else [whole(parts, x.dtype)]
        d = _below(_logits(x, scale, bias, mask, factor), m)
        total = jnp.where((total > 0) & (total < np.inf), total, np.array(np.nan, total.dtype))
        y = _where(mask, jnp.exp(d) / total, 0) if name == "softmax" else _where(mask, d - jnp.log(total), -np.inf)
        return [y.astype(x.dtype)]

    return local


def _softmax_jvp(splits, t, y, *rest, axis, factor, scaled, of_logits=False):
    split, dtype = splits[axis], t.dtype
    scale = () if of_logits else rest
    t, y = wide(split.fill(t, axis, 0)), wide(split.fill(y, axis, 0))
    mean = _total(split, or_zero(y, t), axis)
    return [_times(or_zero(y, t - mean), factor, *_optional(scale, scaled)).astype(dtype)]


def _log_softmax_jvp(splits, t, y, *rest, axis, factor, scaled, masked, query_axis, transpose, of_logits=False):
    scale, where, *beside = *_optional(rest, scaled, masked), *rest[scaled + masked + of_logits :]
    mask = _mask(splits, t.shape, where, axis, query_axis)
    if axis not in splits:
        flags = {"factor": factor, "scaled": scaled, "masked": mask is not None, "transpose": transpose}
        return log_softmax_jvp_p.primitive.bind(*given(t, y, scale, mask), axis=axis, query_axis=None, **flags)
    split, dtype = splits[axis], t.dtype
    t, p = _where(mask, wide(t), 0), _where(mask, jnp.exp(wide(y)), 0)
    [total] = beside or [_total(split, t if transpose else or_zero(p, t), axis)]
    out = t - p * total if transpose else t - total
    return [_where(mask, _times(out, factor, scale), 0).astype(dtype)]


def _sum_of_cotangents(t, y, *rest, axis, scaled, masked, query_axis, **_):
    """Returns the sum of each row of cotangents. If they are constants, XLA computes it when it compiles."""
    _, where = _optional(rest, scaled, masked)
    mask = _mask({}, t.shape, where, axis, query_axis)
    return (jnp.sum(_where(mask, wide(t), 0), axis, keepdims=True),)


def _cross_entropy_rows(split, logits, labels, axis, label_smoothing):
    """Returns for each row, with the axis: the maximum, and this device's summands of what all devices add up, the sum
    of e^(z - m) and the maximum minus the target. Labels count along the whole axis."""
    padding = split.is_padding(logits.shape, axis) if split.uneven else None
    m, own_sum = _statistics(split, logits, None, None, None if padding is None else ~padding, axis, 1.0)
    own = labels - split.start()
    is_own = (own >= 0) & (own < split.part)
    at_label = wide(jnp.take_along_axis(logits, jnp.where(is_own, own, 0), axis, mode="promise_in_bounds"))
    # The loss subtracts a weighted sum of a row's logits. Each logit is subtracted from the maximum first, because sums
    # of large logits would be rounded.
    share = jnp.where(is_own, (1 - label_smoothing) * (m - at_label), 0)
    if label_smoothing:
        less = m - wide(logits)
        less = less if padding is None else jnp.where(padding, 0, less)
        share += label_smoothing * jnp.sum(less / split.length, axis, keepdims=True)
    return m, own_sum, share


def _sum_of_losses(splits, share, common, axis, summed, others):
    """Returns the sum of the losses of rows that are split in the dimensions ``others``, given each device's summand of
    them, and the rest, which all devices that share a row have. The devices exchange one number."""
    share, common = (jnp.sum(filled_axes(splits, a, others, 0), summed, keepdims=True) for a in (share, common))
    once = jnp.where(splits[axis].is_first(), common, 0) if axis in splits else common
    return all_axes(splits, (axis, *others)).sum(share + once)


def _cross_entropy(splits, logits, labels, *rest, axis, masked, gradient=False, summed=None, **losses):
    """Returns the losses or their sum, and the parts of logsumexp; for the gradient, the gradient and then the losses
    or their sum."""
    cotangent, *operands = rest if gradient else (None, *rest)
    params = {"axis": axis, "masked": masked, **losses}
    others = tuple(d for d in summed or () if d in splits and splits[d].length > 1)
    add = (lambda a: a) if summed is None else lambda a: jnp.sum(a, summed, keepdims=True)
    if axis in splits:
        split, [where] = splits[axis], _optional(operands, masked)
        m, own, share = _cross_entropy_rows(split, logits, labels, axis, losses["label_smoothing"])
        share = _where(where, share, 0)
        total, share = (split.sum(own), share) if others else split.sums(own, add(share))
        log_sum = jnp.log(total)
        common = log_sum + losses["z_loss"] * (m + log_sum) ** 2 if losses["z_loss"] else log_sum
        common = jnp.where((labels >= 0) & (labels < split.length), common, np.nan)
        common, *parts = (_where(where, a, 0) for a in (common, m, log_sum))
        if gradient:
            slope = _cross_entropy_slope(logits, labels, *parts, *operands, split=split, **params)
            parts = [times(slope, cotangent).astype(logits.dtype)]
        else:
            parts = [lax.squeeze(a, (axis,)) for a in parts]
    else:  # the sum of losses, over rows that are split
        if gradient:
            *parts, loss = cross_entropy_grad_p.primitive.bind(logits, labels, cotangent, *operands, **params)
        else:
            loss, *parts = cross_entropy_p.primitive.bind(logits, labels, *operands, **params)
        common = lax.expand_dims(loss, (axis,))
        share = jnp.zeros_like(common)
    loss = _sum_of_losses(splits, share, common, axis, summed, others) if others else share + add(common)
    loss = loss if cotangent is None or summed is None else loss * cotangent
    loss = lax.squeeze(loss, (axis,)) if summed is None else loss
    return [*parts, loss] if gradient else [loss, *parts]


RULES["softmax"] = Rule(_forward("softmax"), keeps=True)
RULES["log_softmax"] = Rule(_forward("log_softmax"), keeps=True)
RULES["logsumexp"] = Rule(_forward("logsumexp"))
RULES["softmax_jvp"] = Rule(_softmax_jvp, keeps=True)
RULES["log_softmax_jvp"] = lambda transpose, **_: Rule(
    _log_softmax_jvp, keeps=True, beside=_sum_of_cotangents if transpose else None
)
RULES["logsumexp_jvp"] = plain_rule(logsumexp_jvp_p)
RULES["logsumexp_vjp"] = plain_rule(logsumexp_vjp_p, keeps=True)
RULES["logsumexp_grad"] = plain_rule(logsumexp_grad_p, keeps=True)
RULES["cross_entropy"] = RULES["cross_entropy_sum"] = Rule(_cross_entropy)
RULES["cross_entropy_jvp"] = plain_rule(cross_entropy_jvp_p)
RULES["cross_entropy_vjp"] = plain_rule(cross_entropy_vjp_p, keeps=True)
for _name in ("cross_entropy_grad", "cross_entropy_sum_grad"):
    RULES[_name] = Rule(functools.partial(_cross_entropy, gradient=True), keeps=True)
