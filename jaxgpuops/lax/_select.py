"""Elements by their rank, without a sort, as primitives."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgpuops import _arguments, _native
from jaxgpuops._arguments import int32
from jaxgpuops._derivatives import def_jvp, def_jvp_by_formula, def_linear, differentiated
from jaxgpuops._primitive import Kernel, align, batch_first
from jaxgpuops._split import RULES, Rule
from jaxgpuops.lax._segments import take_rows
from jaxgpuops.lax._sort import permutation, rows_to_exchange, sort_operands, sort_p
from jaxgpuops.lax.along_axis import put_along_axis, take_along_axis

# The dtypes of quantiles that the kernels write themselves.
QUANTILE_DTYPES = frozenset(np.dtype(name) for name in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))
MOST_RANKS = 9  # the most ranks of a selection, as in select/plan.h: 8 quantiles, and the last element


def _select_fallback(x, ranks, *, axis):
    ranks = jnp.clip(ranks, 0, x.shape[axis] - 1)
    shape = (*x.shape[:axis], ranks.shape[axis], *x.shape[axis + 1 :])
    values, order = sort_p(x, axis=axis, descending=False, values=True, indices=True, kth=-1)
    if all(n == 1 for d, n in enumerate(ranks.shape) if d != axis):  # all rows have the same ranks
        return [take_rows(y, ranks, axis, False) for y in (values, order)]
    # One after the other: ranks may be equal, and one call must not take an element twice.
    each = [lax.slice_in_dim(jnp.broadcast_to(ranks, shape), i, i + 1, axis=axis) for i in range(shape[axis])]
    return [jnp.concatenate([take_along_axis(y, r, axis) for r in each], axis) for y in (values, order)]


def _plan_select(rows, avals, compute_capability, axis):
    x, ranks = avals
    return _native.modules["cpu"].plan_select(*rows, ranks.shape[axis], 8 * x.dtype.itemsize, compute_capability)


select_p = Kernel(
    "select",
    results=lambda x, ranks, *, axis: [(ranks.shape[axis], x.dtype), (ranks.shape[axis], np.int32)],
    fallback=_select_fallback,
    accepts=_arguments.ORDERED_DTYPES.__contains__,
    broadcasts=lambda count, **_: (1,),
    shortest=512,
    plan=_plan_select,
    reindexes=True,
)


def select(x: jax.Array, ranks: jax.Array, axis: int, split=None) -> list[jax.Array]:
    """Returns the elements of these ranks along the axis, and their indices: ``sort(x)[.., ranks, ..]`` and the same of
    the argsort."""
    return select_p(*align(x, ranks, apart=axis), axis=axis, split=split)


def _follow_fallback(x, indices, *, axis, split=None):
    """Takes the elements one after the other, since indices may be equal."""
    count = indices.shape[axis]
    each = [lax.slice_in_dim(indices, i, min(i + 1, count), axis=axis) for i in range(max(count, 1))]
    return [jnp.concatenate([take_along_axis(x, i, axis, split) for i in each], axis)]


# The elements of few indices, which may be equal. It is a primitive to have its own transpose.
follow_p = Kernel(
    "follow",
    results=lambda x, indices, *, axis: [(indices.shape[axis], x.dtype)],
    fallback=_follow_fallback,
    accepts=None,
    reindexes=True,
)
# XLA computes the small cotangents again for each element of the large one, up to so many elements: a kernel less.
MOST_COMPUTED_AGAIN = 1 << 18


def _follow_transpose(ct, aval, indices, *, axis):
    """Each element compares its place with all indices, so one kernel writes the zeros and adds up what is the same."""
    if any(aval.sharding.spec) or indices.shape[axis] > MOST_RANKS:  # over an explicit mesh, or too many
        own = lambda i: (lax.slice_in_dim(y, i, i + 1, axis=axis) for y in (ct, indices))
        along = aval.sharding.spec[axis]
        return sum(put_along_axis(*own(i), axis, aval.shape[axis], along) for i in range(indices.shape[axis]))
    size = math.prod(aval.shape)
    if jax.export.is_symbolic_dim(size) or size > MOST_COMPUTED_AGAIN:
        ct, indices = lax.optimization_barrier((ct, indices))
    # Numbers of 8 and 16 bits are added as float32, and rounded once.
    wide = np.promote_types(aval.dtype, np.float32) if jnp.issubdtype(aval.dtype, jnp.floating) else aval.dtype
    place, out = lax.broadcasted_iota(np.int32, aval.shape, axis), jnp.zeros(aval.shape, wide)
    for i in range(indices.shape[axis]):
        own, index = (lax.slice_in_dim(y, i, i + 1, axis=axis) for y in (ct, indices))
        out = out + jnp.where(place == index, own.astype(wide), np.zeros((), wide))
    return out.astype(aval.dtype)


def_linear(follow_p, _follow_transpose)


def follow(x: jax.Array, indices: jax.Array, count: int, axis: int, split=None) -> jax.Array:
    """Returns the elements of the first ``count`` indices, which may be equal."""
    indices = lax.slice_in_dim(indices, 0, count, axis=axis)
    if split is not None:
        return _follow_fallback(x, indices, axis=axis, split=split)[0]
    return follow_p(x, indices, axis=axis)[0]


def _select_jvp(outs, primals, tangents, *, axis, split=None):
    return follow(tangents[0], outs[1], outs[1].shape[axis], axis, split), None


def_jvp(select_p, _select_jvp)


def _and_last(length, ranks, axis):
    """Returns the ranks and, after them, that of the last element, which is NaN if any element of the row is."""
    return lax.pad(ranks, int32(length - 1), [(0, int(d == axis), 0) for d in range(ranks.ndim)])


def _taken_from_sort(x, ranks, axis):
    [values], _ = sort_operands([x], axis, 1)
    return take_rows(*align(values, ranks, apart=axis), axis, False)


def _ranked_fallback(x, ranks, *, axis):
    count = ranks.shape[axis]
    all_ranks = _and_last(x.shape[axis], ranks, axis)
    at = select(x, all_ranks, axis)[0] if count < MOST_RANKS else _taken_from_sort(x, all_ranks, axis)
    own, last = lax.slice_in_dim(at, 0, count, axis=axis), lax.slice_in_dim(at, count, None, axis=axis)
    return own, jnp.isnan(last)


def _ranked_jvp(outs, primals, tangents, *, axis, split=None):
    x, ranks = primals
    count, length = ranks.shape[axis], x.shape[axis] if split is None else split.length
    if count < MOST_RANKS:  # XLA notices that the primal computation has the same selection
        indices = select(lax.stop_gradient(x), _and_last(length, ranks, axis), axis, split)[1]
        return follow(tangents[0], indices, count, axis, split), None
    if split is not None:
        ranks = jnp.broadcast_to(ranks, [count if d == axis else n for d, n in enumerate(x.shape)])
        indices = follow(permutation([x], axis, split=split), ranks, count, axis, split)
        return follow(tangents[0], indices, count, axis, split), None
    return differentiated(lambda x: _taken_from_sort(x, ranks, axis), [x], tangents[:1]), None


# It is a primitive so that devices that share a split axis exchange only the elements that are taken, and one bit for
# each row.
ranked_p = Kernel(
    "ranked",
    results=lambda x, ranks, *, axis: [(ranks.shape[axis], x.dtype), (1, np.bool_)],
    fallback=_ranked_fallback,
    accepts=None,
    broadcasts=lambda count, **_: (1,),
    reindexes=True,
    splits_as_one=True,
)
batch_first(ranked_p)
def_jvp(ranked_p, _ranked_jvp)


def ranked(x: jax.Array, ranks: jax.Array, axis: int, split=None) -> list[jax.Array]:
    """Returns the elements of these ranks, which all rows share, and whether the last element of each row is NaN."""
    return ranked_p(*align(x, ranks, apart=axis), axis=axis, split=split)


def between(low: jax.Array, high: jax.Array, share: jax.Array, midpoint: bool) -> jax.Array:
    """Returns the number that is ``share`` of the way from one element to another; of a midpoint, their mean."""
    one, half = share.dtype.type(1), share.dtype.type(0.5)
    if midpoint:
        return low * half + high * half
    low = jnp.where(share == one, high, low)  # no infinity times 0, where share has been rounded to 1
    step = high - low
    near = jnp.where(share < half, low + step * share, high - step * (one - share))
    # The step is not finite if an end is infinite, or if it overflows.
    return jnp.where(jnp.isfinite(step), near, low * (one - share) + high * share)


def _quantiles_of(at, is_nan, ranks, shares, axis, midpoint):
    """Returns quantiles, given the elements of the ranks beside them, and whether the row has a NaN."""
    count, wide = shares.shape[axis], shares.dtype
    part = lambda y, i: lax.slice_in_dim(y, i * count, (i + 1) * count, axis=axis)
    y = part(at, 0).astype(wide)
    if at.shape[axis] > count:
        is_one = part(ranks, 0) == part(ranks, 1)
        y = jnp.where(is_one, y, between(y, part(at, 1).astype(wide), shares, midpoint))
    return jnp.where(is_nan | jnp.isnan(shares), np.array(np.nan, wide), y)


def _quantile_fallback(x, ranks, shares, *, axis, midpoint, before):
    own = lax.slice_in_dim(ranks, 0, ranks.shape[axis] - 1, axis=axis)
    return [_quantiles_of(*ranked(x, own, axis), own, shares, axis, midpoint).astype(x.dtype)]


quantile_p = Kernel(
    "quantile",
    results=lambda x, ranks, shares, *, axis, midpoint, before: [(shares.shape[axis], x.dtype)],
    fallback=_quantile_fallback,
    accepts=QUANTILE_DTYPES.__contains__,
    attributes=("midpoint",),
    lies="before",
    broadcasts=lambda count, **_: (1, 2),
    shortest=512,
    plan=lambda rows, avals, compute_capability, axis, **_: _plan_select(rows, avals[:2], compute_capability, axis),
    reindexes=True,
    splits_as_one=True,
)
def_jvp_by_formula(quantile_p, _quantile_fallback)


def quantiles(x: jax.Array, ranks: jax.Array, shares: jax.Array, axis: int, midpoint: bool, split) -> jax.Array:
    """Returns the numbers between the elements of the first and the second half of the ranks, or the elements of all
    ranks, if there is one for each share. NaN where the row has a NaN, or the share is NaN. The axis of several
    quantiles is moved to the front by callers, so the kernel puts it there."""
    length, count = x.shape[axis], ranks.shape[axis]
    takes = x.dtype in QUANTILE_DTYPES and 0 < count < MOST_RANKS
    if takes and split is None and isinstance(length, int):
        operands = align(x, _and_last(length, ranks, axis), shares, apart=axis)
        return quantile_p(*operands, axis=axis, midpoint=midpoint, before=0 if shares.shape[axis] > 1 else axis)[0]
    at, is_nan = ranked(x, ranks, axis, split)
    return _quantiles_of(at, is_nan, ranks, shares, axis, midpoint)


def _select_split(select, splits, x, *others, axis, **params):
    """Devices exchange their parts of the axis for rows, select in these, and gather the results."""
    split = splits[axis]
    dim = rows_to_exchange(split, x, others[-1], axis)
    there = lax.slice_in_dim(split.exchange(x, dim, axis), 0, split.length, axis=axis)
    return tuple(split.gather(y, dim) for y in select(there, *others, axis=axis, **params))


for _kernel, _select in (
    (select_p, select_p.primitive.bind),
    (ranked_p, _ranked_fallback),
    (quantile_p, quantile_p.primitive.bind),
):
    RULES[_kernel.name] = Rule(
        functools.partial(_select_split, _select),
        operands=(0,),
        pays=lambda split, avals, *, axis, **_: rows_to_exchange(split, *avals[:2], axis) is not None,
    )
