"""Scans along an axis that is split over devices.

Each device folds its part. The folds are gathered and scanned, and each device scans its part from the fold of what
comes before it. (The fold of a linear recurrence is the last value of its scan.)
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgpuops._arguments import COMPLEX, given
from jaxgpuops._split import RULES, Rule, plain_rule
from jaxgpuops.lax._reduce import max_p, min_p, sum_p
from jaxgpuops.lax.logsumexp_primitives import logsumexp_p
from jaxgpuops.lax.scan_primitives import (
    CUMULATIVE,
    TANGENT,
    _as_initial,
    _cut,
    _first,
    _identity,
    _optional,
    _previous,
    _wide,
    linear_scan_jvp_p,
    linear_scan_p,
    linear_scan_vjp_p,
)


def _before_part(ends, axis, reverse, split):
    """Returns, of the ends of all parts, the end of the previous part; on the first device any of them."""
    at = split.index() + (1 if reverse else -1)
    return lax.dynamic_slice_in_dim(ends, jnp.clip(at, 0, split.shards - 1), 1, axis)


def _linear_scan_split(split, b, a, *rest, axis, reverse, transpose, initial):
    """Each part is a map of the state before it: (product of a, last state from 0). It is scanned twice, which moves
    the fewest bytes."""
    h0, starts = _optional(rest, initial)
    dtype, b, a, h0 = b.dtype, split.fill(_wide(b), axis, 0), _wide(a), _wide(h0)
    starts = None if starts is None else split.fill(starts, axis, False)
    if split.uneven or transpose:
        a = jnp.broadcast_to(a, [n if d != axis else b.shape[axis] for d, n in enumerate(a.shape)])
    a = split.fill(a, axis, 1)  # with the factor 1, padding keeps the state
    if transpose:
        a, starts = _previous(a, axis, reverse, 0, starts, split), None
    cut = None if starts is None else _cut(starts, axis, reverse, split)
    scan = functools.partial(linear_scan_p.primitive.bind, axis=axis, reverse=reverse, transpose=False)
    zero, is_first = np.zeros((), b.dtype), split.is_first(reverse)
    h0 = None if h0 is None else jnp.where(is_first, h0, zero)

    [h] = scan(b, a, *given(h0, starts), initial=initial)
    one = a.shape[axis] == 1
    factor = lax.integer_pow(a, b.shape[axis]) if one else jnp.prod(a, axis, keepdims=True)
    if cut is not None:
        factor = jnp.where(jnp.any(cut, axis, keepdims=True), zero, factor)
    ends = split.gather(_first(h, axis, not reverse), axis)
    [ends] = scan(ends, split.gather(factor, axis), initial=False)
    before = _before_part(ends, axis, reverse, split)
    if cut is not None:
        before = jnp.where(_first(cut, axis, reverse), zero, before)
    before = jnp.where(is_first, zero if h0 is None else h0, before)
    return (scan(b, a, *given(before, starts), initial=True)[0].astype(dtype),)


def _fold_of_part(name, x, where, axis):
    """Returns the fold of all positions of a part, or of those where ``where`` is True, with the axis."""
    masked, operands = where is not None, given(x, where)
    if name == "cumsum" and x.dtype not in COMPLEX:
        [total] = sum_p.primitive.bind(*operands, axis=axis, masked=masked, wide=True, divisor=1)
    elif name in ("cummax", "cummin"):
        [total] = (max_p if name == "cummax" else min_p).primitive.bind(*operands, axis=axis, masked=masked)
    elif name == "cumlogsumexp":
        logits = {"factor": 1.0, "scaled": False, "biased": False, "masked": masked, "query_axis": None}
        total = sum(logsumexp_p.primitive.bind(*operands, axis=axis, parts=True, **logits))
    else:
        x, fold = _wide(x), jnp.sum if name == "cumsum" else jnp.prod
        total = fold(x, axis, dtype=x.dtype, where=where)
    return lax.expand_dims(total, (axis,))


def _since_last(cut, axis, reverse):
    """Returns True from the last start on (reversed: up to the first one), and everywhere if there is no start."""
    at, n = lax.broadcasted_iota(np.int32, cut.shape, axis), cut.shape[axis]
    if reverse:
        return at <= jnp.min(jnp.where(cut, at, np.int32(n)), axis, keepdims=True)
    return at >= jnp.max(jnp.where(cut, at, np.int32(-1)), axis, keepdims=True)


def _cumulative_split(name):
    def local(splits, x, *starts, axis, reverse, exclusive):
        split, dtype = splits[axis], x.dtype
        if reverse:  # if not reversed, padding comes last, where it affects nothing
            x = split.fill(x, axis, _identity(name, dtype))
            starts = [split.fill(a, axis, False) for a in starts]
        scan = functools.partial(CUMULATIVE[name].primitive.bind, axis=axis)
        if not starts:
            ends = split.gather(_fold_of_part(name, x, None, axis), axis)
            [ends] = scan(ends, reverse=reverse, exclusive=False)
            is_first = split.is_first(reverse)
        else:
            cut = _cut(starts[0], axis, reverse, split)
            ends = split.gather(_fold_of_part(name, x, _since_last(cut, axis, reverse), axis), axis)
            cuts = split.gather(jnp.any(cut, axis, keepdims=True), axis)
            in_order = functools.partial(jnp.flip, axis=axis) if reverse else lambda x: x
            ends = in_order(scan(in_order(ends), in_order(cuts), reverse=False, exclusive=False)[0])
            is_first = split.is_first(reverse) | _first(cut, axis, reverse)
        before = _before_part(ends, axis, reverse, split)
        before = jnp.where(is_first, np.array(_identity(name, dtype), before.dtype), before)
        return scan(x, _as_initial(name, before), *starts, reverse=reverse, exclusive=exclusive, initial=True)

    return local


def _pays(numbers, split, avals, **_):
    """Whether this many numbers for each device and row are less than the row."""
    itemsize = avals[0].dtype.itemsize
    return split.shards * numbers * (1 + max(itemsize, 4)) < split.length * itemsize


for _name in CUMULATIVE:
    RULES[_name] = Rule(_cumulative_split(_name), keeps=True, pays=functools.partial(_pays, 1))
for _name, _kernel_of_tangents in TANGENT.items():
    RULES[_kernel_of_tangents.name] = plain_rule(_kernel_of_tangents, keeps=True, pays=functools.partial(_pays, 3))


def _with_axis(rule, h0):
    """Returns the rule for a call's params. Operand number ``h0`` is the initial state, if there is one: it has size 1
    along the axis, as a part of one position has, but is never split."""
    after = (*range(h0), h0 + 1)
    return lambda initial, **_: dataclasses.replace(rule, operands=after if initial else None)


_linear_scan_rule = Rule(
    lambda splits, *operands, axis, **params: _linear_scan_split(splits[axis], *operands, axis=axis, **params),
    keeps=True,
    pays=lambda split, avals, *, transpose, initial, **_: not (transpose and initial) and _pays(2, split, avals),
)
RULES["linear_scan"] = _with_axis(_linear_scan_rule, 2)
RULES["linear_scan_vjp"] = _with_axis(plain_rule(linear_scan_vjp_p, keeps=True, pays=functools.partial(_pays, 3)), 3)
RULES["linear_scan_jvp"] = _with_axis(plain_rule(linear_scan_jvp_p, keeps=True), 4)
