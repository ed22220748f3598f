"""Counts, as primitives."""

from __future__ import annotations

import math

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxgpuops import _arguments, _native
from jaxgpuops._derivatives import def_jvp
from jaxgpuops._primitive import Kernel, batch_first
from jaxgpuops._split import RULES, Rule
from jaxgpuops.lax.along_axis import take_along_axis


def _bincount_fallback(x, *, axis, length):
    if length == 1:
        return (jnp.sum(x == 0, axis, keepdims=True, dtype=np.int32),)
    x = jnp.moveaxis(x, axis, -1)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    rows = rows.astype(np.int32) if rows.dtype.itemsize < 4 else rows  # which can say ``length``
    rows = jnp.where((rows >= 0) & (rows < length), rows, length).astype(np.int32)
    count = lambda row: jnp.zeros(length, np.int32).at[row].add(np.int32(1), mode="drop")
    return (jnp.moveaxis(jax.vmap(count)(rows).reshape(*x.shape[:-1], length), -1, axis),)


def _plan_bincount(rows, avals, compute_capability, axis, *, length):
    return _native.modules["cpu"].plan_bincount(*rows, length, str(avals[0].dtype), compute_capability)


def _leaves_counts(rows, avals, *, length):
    """Whether XLA is faster on an H200: at one bin, which is a sum, and at so few ids that its atomics hardly wait for
    each other, even if all are equal."""
    size = math.prod(rows)
    return length == 1 or size <= 1 << 10 or (rows[1] <= 256 and size <= 1 << 19)


bincount_p = Kernel(
    "bincount",
    results=lambda x, *, axis, length: [(length, np.int32)],
    fallback=_bincount_fallback,
    accepts=_arguments.INTEGERS.__contains__,
    plan=_plan_bincount,
    leaves=_leaves_counts,
    reindexes=True,
)


def bincount(x: jax.Array, axis: int, length: int, split=None) -> jax.Array:
    """Returns ``out[..., b, ...]``, int32: how many of the numbers along ``axis`` are b."""
    return bincount_p(x, axis=axis, length=length, split=split)[0]


def bins_of(x, edges, axis):
    """The bin of each number, as int32, -1 if it has none. Edges ascend along the axis."""
    count = edges.shape[axis] - 1
    at = lambda place: jax.lax.slice_in_dim(edges, place, place + 1, axis=axis)
    first, last = at(0), at(count)
    place = jnp.where(x == last, _arguments.int32(count - 1), _last_not_above(edges, x, axis))
    return jnp.where((x >= first) & (x <= last), place, np.int32(-1))


def _last_not_above(edges, x, axis):
    """Returns the last place whose edge is not above x: an unrolled binary search, which XLA fuses. (In a `shard_map`,
    `jnp.searchsorted` of jax 0.11 and 0.12 fails.) To compute the places of even edges is no way: rounding moves edges
    by many bins where these are narrow."""
    count = edges.shape[axis]
    if edges.size == count:
        edge = lambda place: edges.ravel()[place]
    else:
        rows = jnp.broadcast_to(edges, (*x.shape[:axis], count, *x.shape[axis + 1 :]))
        edge = lambda place: take_along_axis(rows, place, axis)
    bits, count = 31 if jax.export.is_symbolic_dim(count) else (count - 1).bit_length(), _arguments.int32(count)
    place = jnp.zeros_like(x, np.int32)
    for bit in reversed(range(bits)):
        further = place + np.int32(1 << bit)
        found = edge(jnp.minimum(further, count - np.int32(1)))
        place = jnp.where((further < count) & (found <= x), further, place)
    return place


def _histogram_fallback(x, edges, *, axis):
    if edges.shape[axis] < 2:
        return (jnp.zeros((*x.shape[:axis], 0, *x.shape[axis + 1 :]), np.int32),)
    return (bincount(bins_of(x, edges, axis), axis, edges.shape[axis] - 1),)


def _plan_histogram(rows, avals, compute_capability, axis):
    bins = avals[1].shape[axis] - 1
    return _native.modules["cpu"].plan_histogram(*rows, bins, str(avals[0].dtype), compute_capability)


histogram_p = Kernel(
    "histogram",
    results=lambda x, edges, *, axis: [(edges.shape[axis] - 1, np.int32)],
    fallback=_histogram_fallback,
    accepts=_arguments.FLOATS.__contains__,
    broadcasts=lambda count, **_: (1,),
    plan=_plan_histogram,
    reindexes=True,
)
batch_first(histogram_p)
def_jvp(histogram_p, lambda outs, primals, tangents, **_: (None,))


def histogram(x: jax.Array, edges: jax.Array, axis: int, split=None) -> jax.Array:
    """Returns ``out[..., b, ...]``, int32: how many of the numbers along ``axis`` are in bin b of even ``edges``, which
    have the axis and size 1 after it."""
    return histogram_p(x, edges, axis=axis, split=split)[0]


# ---- A split axis ---------------------------------------------------------------------------------------------------


def _bincount_split(splits, x, *, axis, length):
    split = splits[axis]
    [counts] = bincount_p.primitive.bind(split.fill(x, axis, length), axis=axis, length=length)
    return (split.sum(counts),)


def _histogram_split(splits, x, edges, *, axis):
    split = splits[axis]
    [counts] = histogram_p.primitive.bind(split.fill(x, axis, np.nan), edges, axis=axis)
    return (split.sum(counts),)


RULES["bincount"] = Rule(_bincount_split, pays=lambda split, avals, *, axis, length: length < split.length)
RULES["histogram"] = Rule(
    _histogram_split,
    operands=(0,),
    pays=lambda split, avals, *, axis: avals[1].shape[axis] <= split.length,
)
