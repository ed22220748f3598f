"""Softmax and its family where the axis, or the dimension of causal queries, is split over devices.

Along a split axis a row is reduced on each device and the numbers of all devices are reduced to one: the maximum, then
what is summed. The rest is elementwise. Written in plain JAX, as the kernels give no statistics of a
row: three reads of the logits where two would do. Small remainders next to 1 are not told apart as the kernels do it:
that would take one more number a row than JAX moves.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgpuops._arguments import given
from jaxgpuops._partition import RULES, Rule, plain_rule
from jaxgpuops.lax.softmax_primitives import (
    _below,
    _logits,
    _nan_unless_differentiable,
    _optional,
    _slope,
    _times,
    _where,
    cross_entropy_jvp_p,
    cross_entropy_vjp_p,
    log_softmax_jvp_p,
    log_softmax_p,
    logsumexp_jvp_p,
    logsumexp_p,
    logsumexp_vjp_p,
    or_zero,
    softmax_p,
    whole,
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


def _maximum(z, axis, split):
    """The largest of each row, and the same with 0 where it is not finite."""
    m = split.max(lax.stop_gradient(jnp.max(z, axis, keepdims=True)))
    return m, jnp.where(jnp.isfinite(m), m, np.zeros((), m.dtype))


def _sums(split, axis, *terms):
    """Of each term its sum over rows: a collective for each, so that XLA drops what nothing needs, and may join them."""
    return [split.sum(jnp.sum(term, axis, keepdims=True)) for term in terms]


def _forward(name):
    def local(splits, x, *rest, axis, factor, scaled, biased, masked, query_axis, **params):
        scale, bias, where = _optional(rest, scaled, biased, masked)
        mask = _mask(splits, x.shape, where, axis, query_axis)
        if axis not in splits:  # only the causal queries are split, and rows are whole
            flags = {"factor": factor, "scaled": scaled, "biased": biased, "masked": mask is not None}
            operands = given(x, scale, bias, mask)
            return _KERNELS[name].primitive.bind(*operands, axis=axis, query_axis=None, **flags, **params)
        split = splits[axis]
        z = _logits(x, scale, bias, mask, factor)
        m, finite = _maximum(z, axis, split)
        if name == "logsumexp":
            [total] = _sums(split, axis, jnp.exp(_below(z, finite)))
            parts = [lax.squeeze(a, (axis,)) for a in (finite, jnp.log(total))]
            return parts if params["parts"] else [whole(parts, x.dtype)]
        d = _below(z, m)
        e = _where(mask, jnp.exp(d), 0)
        [total] = _sums(split, axis, e)
        y = _where(mask, e / total, 0) if name == "softmax" else _where(mask, d - jnp.log(total), -np.inf)
        return [y.astype(x.dtype)]

    return local


def _softmax_jvp(splits, t, y, *scale, axis, factor, scaled):
    split, dtype = splits[axis], t.dtype
    t, y = wide(split.fill(t, axis, 0)), wide(split.fill(y, axis, 0))
    [mean] = _sums(split, axis, or_zero(y, t))
    return [_times(or_zero(y, t - mean), factor, *_optional(scale, scaled)).astype(dtype)]


def _log_softmax_jvp(splits, t, y, *rest, axis, factor, scaled, masked, query_axis, transpose):
    scale, where = _optional(rest, scaled, masked)
    mask = _mask(splits, t.shape, where, axis, query_axis)
    if axis not in splits:
        flags = {"factor": factor, "scaled": scaled, "masked": mask is not None, "transpose": transpose}
        return log_softmax_jvp_p.primitive.bind(*given(t, y, scale, mask), axis=axis, query_axis=None, **flags)
    split, dtype = splits[axis], t.dtype
    t, p = _where(mask, wide(t), 0), _where(mask, jnp.exp(wide(y)), 0)
    [total] = _sums(split, axis, t if transpose else or_zero(p, t))
    out = t - p * total if transpose else t - total
    return [_where(mask, _times(out, factor, scale), 0).astype(dtype)]


def _cross_entropy_terms(split, logits, labels, where, axis, label_smoothing, z_loss):
    """As in softmax_primitives.py. Labels are of the whole axis."""
    z = wide(_where(where, split.fill(logits, axis, 0), 0))
    shape = z.shape
    padding = split.is_padding(shape, axis) if split.uneven else None
    counted = z if padding is None else jnp.where(padding, -np.inf, z)
    _, m = _maximum(counted, axis, split)
    is_label = split.positions(shape, axis) == labels
    e = jnp.exp(_below(counted, m))
    # What the loss subtracts, a sum with weights of the logits: one number a row with smoothing, too.
    target = jnp.where(is_label, z if not label_smoothing else (1 - label_smoothing) * z, np.zeros((), z.dtype))
    if label_smoothing:
        target += label_smoothing * (z / split.length)
    total, target = _sums(split, axis, e, target)
    log_sum = jnp.log(total)
    loss = (m - target) + log_sum
    if z_loss:
        loss += z_loss * (m + log_sum) ** 2
    loss = jnp.where((labels >= 0) & (labels < split.length), loss, np.nan)
    return *(_where(where, a, 0) for a in (loss, m, log_sum)), e / total, is_label


def _cross_entropy(splits, logits, labels, *where, axis, masked, **losses):
    [where] = _optional(where, masked)
    rows = _cross_entropy_terms(splits[axis], logits, labels, where, axis, **losses)[:3]
    return [lax.squeeze(a, (axis,)) for a in rows]


def _cross_entropy_grad(splits, logits, labels, cotangent, *where, axis, masked, **losses):
    [where] = _optional(where, masked)
    loss, m, log_sum, p, is_label = _cross_entropy_terms(splits[axis], logits, labels, where, axis, **losses)
    n = splits[axis].length
    slope = _slope(p, p - 1, is_label, m + log_sum, n=n, **losses)
    slope = _where(where, _nan_unless_differentiable(slope, (labels >= 0) & (labels < n), log_sum), 0)
    return or_zero(slope, cotangent).astype(logits.dtype), lax.squeeze(loss, (axis,))


RULES["softmax"] = Rule(_forward("softmax"), keeps=True)
RULES["log_softmax"] = Rule(_forward("log_softmax"), keeps=True)
RULES["logsumexp"] = Rule(_forward("logsumexp"))
RULES["softmax_jvp"] = Rule(_softmax_jvp, keeps=True)
RULES["log_softmax_jvp"] = Rule(_log_softmax_jvp, keeps=True)
RULES["logsumexp_jvp"] = plain_rule(logsumexp_jvp_p)
RULES["logsumexp_vjp"] = plain_rule(logsumexp_vjp_p, keeps=True)
RULES["cross_entropy"] = Rule(_cross_entropy)
RULES["cross_entropy_jvp"] = plain_rule(cross_entropy_jvp_p)
RULES["cross_entropy_vjp"] = plain_rule(cross_entropy_vjp_p, keeps=True)
RULES["cross_entropy_grad"] = Rule(_cross_entropy_grad, keeps=True)
