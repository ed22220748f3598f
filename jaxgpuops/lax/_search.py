"""Places, as primitives: of queries in sorted rows, and of what a mask chooses."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxgpuops import _arguments, _native
from jaxgpuops._derivatives import def_jvp, zero_tangent
from jaxgpuops._primitive import Kernel, align, batch_first
from jaxgpuops._split import RULES, Rule
from jaxgpuops.lax._count import bincount
from jaxgpuops.lax._scan import cumsum
from jaxgpuops.lax._segments import take_rows
from jaxgpuops.lax._sort import sort_operands
from jaxgpuops.lax.along_axis import put_along_axis, take_along_axis
from jaxgpuops.lax.order import from_bits, from_keys, sort_keys, to_bits

# ---- Places in sorted rows -------------------------------------------------------------------------------------------


def _search_fallback(queries, sorted, *, axis, right):
    """A binary search whose steps are the same for all queries; a query's result is in [first, first + left]."""
    left = sorted.shape[axis]
    rows = jnp.broadcast_to(sort_keys(sorted), (*queries.shape[:axis], left, *queries.shape[axis + 1 :]))
    keys = sort_keys(queries)
    first = jnp.zeros(queries.shape, np.int32)

    def step(first, place, size):
        element = take_along_axis(rows, place, axis)
        return jnp.where(element <= keys if right else element < keys, first + np.int32(size), first)

    while left > 1:
        half = left // 2
        first = step(first, first + np.int32(half - 1), half)
        left -= half
    return (step(first, first, 1) if left else first,)


searchsorted_p = Kernel(
    "searchsorted",
    results=lambda queries, sorted, *, axis, right: [(queries.shape[axis], np.int32)],
    fallback=_search_fallback,
    accepts=_arguments.ORDERED_DTYPES.__contains__,
    attributes=("right",),
    broadcasts=lambda count, **_: (1,),
)
def_jvp(searchsorted_p, lambda outs, primals, tangents, **_: (None,))


def searchsorted(sorted: jax.Array, queries: jax.Array, axis: int, right: bool = False) -> jax.Array:
    """Returns for each query, as int32, how many elements of its sorted row come before it. Rows have the axis, and may
    have size 1 in dimensions where queries have more."""
    return searchsorted_p(queries, sorted, axis=axis, right=right)[0]


# Each device searches for its part of the queries.
RULES["searchsorted"] = Rule(
    lambda splits, queries, sorted, **params: searchsorted_p.primitive.bind(queries, sorted, **params),
    operands=(0,),
    keeps=True,
)

# ---- What a mask chooses --------------------------------------------------------------------------------------------


def starts_of(x, axis):
    """Returns where elements differ from the one before."""
    keys = sort_keys(x)  # two keys are equal where the elements are
    part = lambda first, after: lax.slice_in_dim(keys, first, after, axis=axis)
    first = jnp.full_like(part(0, jax.core.min_dim(x.shape[axis], 1)), True, np.bool_)
    return jnp.concatenate([first, part(1, None) != part(0, -1)], axis) if x.shape[axis] else first


def _choose_fallback(mask, fill, *, axis, size):
    length = mask.shape[axis]
    if length == 0:
        return (jnp.broadcast_to(fill, (*mask.shape[:axis], size, *mask.shape[axis + 1 :])),)
    count = cumsum(mask.astype(np.int32), axis)
    total = lax.slice_in_dim(count, length - 1, length, axis=axis)
    place = lax.broadcasted_iota(np.int32, mask.shape, axis)
    # Elements that are not chosen go behind those that are. So each element has its own target, and nothing is added
    # up.
    target = jnp.where(mask, count - np.int32(1), total + place - count)
    place, target = align(place, target)
    chosen = put_along_axis(place, target, axis, length)
    known = jax.core.min_dim(size, length)
    chosen = lax.slice_in_dim(chosen, 0, known, axis=axis)
    if known != size:
        chosen = lax.pad(chosen, np.int32(0), [(0, size - known if d == axis else 0, 0) for d in range(mask.ndim)])
    return (jnp.where(lax.broadcasted_iota(np.int32, chosen.shape, axis) < total, chosen, fill),)


MOST_IN_WORD = 32  # elements of a row whose bits are one word


def _choose_in_word(mask, fill, *, axis, size):
    """The same for short rows: a sum gives the word of a row, and a binary search in its bits each place. XLA makes one
    or two kernels of that and of what the mask is computed from."""
    bit = lax.shift_left(np.uint32(1), lax.broadcasted_iota(np.uint32, mask.shape, axis))
    word = jnp.sum(jnp.where(mask, bit, np.uint32(0)), axis, keepdims=True, dtype=np.uint32)
    shape = tuple(size if d == axis else n for d, n in enumerate(mask.shape))
    word, number = jnp.broadcast_to(word, shape), lax.broadcasted_iota(np.int32, shape, axis)
    found = number < lax.population_count(word).astype(np.int32)
    place = jnp.zeros(shape, np.int32)
    for bits in (16, 8, 4, 2, 1):
        below = lax.population_count(word & np.uint32((1 << bits) - 1)).astype(np.int32)
        above = number >= below
        number -= jnp.where(above, below, np.int32(0))
        place += jnp.where(above, np.int32(bits), np.int32(0))
        word = jnp.where(above, word >> np.uint32(bits), word)
    return (jnp.where(found, place, fill),)


def _plan_choose(rows, avals, compute_capability, axis, *, size, starts=False):
    return _native.modules["cpu"].plan_choose(*rows, size, starts, compute_capability)


choose_p = Kernel(
    "choose",
    results=lambda mask, fill, *, axis, size: [(size, np.int32)],
    fallback=_choose_fallback,
    accepts=lambda dtype: dtype == np.dtype(bool),
    broadcasts=lambda count, **_: (1,),
    plan=_plan_choose,
    leaves=lambda rows, avals, **_: 0 < rows[1] <= MOST_IN_WORD,
    left=_choose_in_word,
    reindexes=True,
)
batch_first(choose_p, always=True)
def_jvp(choose_p, lambda outs, primals, tangents, **_: (None,))


def choose(mask: jax.Array, size: int, fill: jax.Array | None = None) -> jax.Array:
    """Returns where a mask is True along its last axis, in order, ``size`` numbers: after the last, ``fill``, a scalar,
    or the length of the axis."""
    fill = jnp.asarray(mask.shape[-1] if fill is None else fill, np.int32)
    return choose_p(mask, fill.reshape((1,) * mask.ndim), axis=mask.ndim - 1, size=size)[0]


def _fill_of(fill, place, axis):
    """Returns the fill, or its element at the first of the places if it is a row."""
    length = fill.shape[axis]
    if length == 1 or place.shape[axis] == 0:
        return lax.slice_in_dim(fill, 0, 1, axis=axis)
    first = lax.slice_in_dim(place, 0, 1, axis=axis)
    fill, first = align(fill, jnp.where(first < length, first, np.int32(0)))
    return take_rows(fill, first, axis, True)


def _pick_fallback(x, *operands, axis, size, starts):
    arrays, fills = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    length = x.shape[axis]
    mask, end = (starts_of(x, axis) if starts else x), jnp.full((1,) * x.ndim, length, np.int32)
    [place] = _choose_fallback(mask, end, axis=axis, size=size + starts)
    own = lax.slice_in_dim(place, 0, size, axis=axis)
    results = []
    for array, fill in zip(arrays, fills, strict=True):
        out = jnp.broadcast_to(_fill_of(to_bits(fill), place, axis), own.shape)
        if length:
            out = jnp.where(own < length, take_along_axis(to_bits(array), jnp.minimum(own, length - 1), axis), out)
        results.append(from_bits(out, array.dtype))
    return (*results, lax.slice_in_dim(place, 1, None, axis=axis) - own) if starts else tuple(results)


def _pick_results(x, *operands, axis, size, starts):
    own = [(size, array.dtype) for array in operands[: len(operands) // 2]]
    return own + [(size, np.int32)] * starts


# The elements of one or two arrays, the first operands after x, where x is True or, with ``starts``, differs from the
# element before; then the fill of each array, the other operands: an element, or a row as long as x, of which it is the
# element at the first place. With ``starts``, the last result says how far it is from each place to the next one, or to
# the end; it is 0 for fills.
pick_p = Kernel(
    "pick",
    results=_pick_results,
    fallback=_pick_fallback,
    accepts=_arguments.ORDERED_DTYPES.__contains__,
    attributes=("starts",),
    broadcasts=lambda count, **_: range(1 + count // 2, count),
    plan=_plan_choose,
    reindexes=True,
)
batch_first(pick_p, always=True)


def _pick_jvp(outs, primals, tangents, *, axis, size, starts):
    x, count = primals[0], len(primals) // 2
    # Places ascend, and those of fills are behind the end.
    place = cumsum(outs[-1], axis) - outs[-1] if starts else choose(x, size)

    def of(own, fill):
        if own is None and fill is None:
            return None
        out = 0 if own is None else take_rows(own, place, axis, True)
        if fill is None:
            return out
        first = _fill_of(fill, place, axis)
        return out + jnp.where(place < _arguments.int32(x.shape[axis]), jnp.zeros_like(first), first)

    tangents = [of(tangents[1 + i], tangents[1 + count + i]) for i in range(count)]
    return (*tangents, None) if starts else tuple(tangents)


def_jvp(pick_p, _pick_jvp)


def pick(x: jax.Array, arrays: list[jax.Array], fills: list[jax.Array], size: int, starts: bool = False):
    """Returns for each array its elements where x is True along its last axis, in order, ``size`` of them: after the
    last, its fill. That is one element, or a row as long as x, of which the element at the first place is taken. With
    ``starts``, x is no mask, and the places are those where it differs from the element before. Then the last result
    says how many elements begin at each place, 0 for fills."""
    return pick_p(x, *arrays, *fills, axis=x.ndim - 1, size=size, starts=starts)


# ---- Different elements ----------------------------------------------------------------------------------------------


# The least length of x where counting each possible element is faster than sorting: of integers of 1 and 2 bytes, and
# of floats, of which it must also be found which zero and which NaN comes first.
_LEAST_COUNTED, _LEAST_COUNTED_FLOATS = {1: 1 << 12, 2: 1 << 14}, 1 << 19


def _prefers_counts(dtype, length):
    if dtype.itemsize not in _LEAST_COUNTED or dtype == np.dtype(bool):
        return False
    floating = jnp.issubdtype(dtype, jnp.floating)
    return length >= (_LEAST_COUNTED_FLOATS if floating else _LEAST_COUNTED[dtype.itemsize])


def _unique_by_counts(row, fill, size):
    """Returns the different elements of few bits, then fills, and how often each is there, without a sort."""
    bits = to_bits(row)
    unsigned, patterns = bits.dtype.type, 1 << 8 * bits.dtype.itemsize
    # Counts in the order of keys. Those of equal keys (-0 and NaNs) are added up.
    key = lax.iota(bits.dtype, patterns)
    bits_of = kept = lambda key: to_bits(from_keys(key, row.dtype))
    count = bincount(bits, 0, patterns)[bits_of(key).astype(np.int32)]
    if jnp.issubdtype(row.dtype, jnp.floating):
        own, zero, nan = sort_keys(from_keys(key, row.dtype)), unsigned(patterns // 2), unsigned(patterns - 1)
        moved = jnp.where(own == key, np.int32(0), count)
        zeros = count[patterns // 2 - 1]  # the negative ones
        nans = jnp.sum(moved, dtype=np.int32) - zeros
        count = count - moved + jnp.where(key == nan, nans, np.int32(0)) + jnp.where(key == zero, zeros, np.int32(0))
        # The first of equal elements is kept.
        keys, at = sort_keys(row), lax.iota(np.int32, row.size)
        first = lambda equal: bits[jnp.min(jnp.where(keys == equal, at, np.int32(row.size - 1)))]
        first_zero, first_nan = first(zero), first(nan)
        kept = lambda key: jnp.where(key == zero, first_zero, jnp.where(key == nan, first_nan, bits_of(key)))
    values = kept(key)
    fill = values if fill is None else to_bits(fill)
    out, count = pick(count > 0, [values, count], [fill, jnp.zeros(1, np.int32)], size)
    return from_bits(out, row.dtype), count


def _unique_by_sort(x, *fill, axis, size, index, inverse):
    [values], order = sort_operands([x], axis, 1, indices=index or inverse)
    arrays, fills = [values], [*fill] or [values]
    if index:
        assert order is not None
        arrays.append(order)
        fills.append(order if x.shape[axis] else jnp.zeros((1,) * x.ndim, np.int32))
    *outs, count = pick_p(values, *arrays, *fills, axis=axis, size=size, starts=True)
    if inverse:
        assert order is not None
        rank = cumsum(starts_of(values, axis).astype(np.int32), axis) - np.int32(1)
        outs.append(put_along_axis(rank, order, axis, x.shape[axis]))
    return (*outs, count)


def _unique_fallback(x, *fill, axis, size, index, inverse):
    if index or inverse or axis + 1 < x.ndim or not _prefers_counts(x.dtype, x.shape[axis]):
        return _unique_by_sort(x, *fill, axis=axis, size=size, index=index, inverse=inverse)
    by_counts = lambda row, *fill: _unique_by_counts(row, *(fill or [None]), size)
    for _ in range(axis):
        by_counts = jax.vmap(by_counts)
    return by_counts(x, *(jnp.broadcast_to(f, (*x.shape[:axis], 1)) for f in fill))


def _unique_results(x, *fill, axis, size, index, inverse):
    integers = [size] * index + [x.shape[axis]] * inverse + [size]
    return [(size, x.dtype), *((length, np.int32) for length in integers)]


def _plan_unique(rows, avals, compute_capability, axis, *, size, index, inverse):
    dtype = avals[0].dtype
    counted = _prefers_counts(dtype, rows[1])
    return _native.modules["cpu"].plan_unique(
        *rows, size, 8 * dtype.itemsize, index, inverse, counted, compute_capability
    )


# The different elements of each row in ascending order, and how often each is there. Between them, with ``index``, where
# each is first, and with ``inverse``, the number of each element of the row among the different ones. The second operand
# is the fill; without one, the smallest element is, and the index of fills is its place. Of equal elements the first is
# kept. The CPU's kernel is for tests: calls there are made of other kernels.
unique_p = Kernel(
    "unique",
    results=_unique_results,
    fallback=_unique_fallback,
    accepts=_arguments.ORDERED_DTYPES.__contains__,
    attributes=("index", "inverse"),
    broadcasts=lambda count, **_: range(1, count),
    shortest=1 << 31,
    plan=_plan_unique,
    reindexes=True,
)
batch_first(unique_p, always=True)


def _unique_jvp(primals, tangents, *, axis, size, index, inverse):
    out, first, *rest = unique_p(*primals, axis=axis, size=size, index=True, inverse=inverse)
    own, *fill = [None if isinstance(t, ad.Zero) else t for t in tangents]
    tangent = jnp.zeros_like(out) if own is None else take_rows(own, first, axis, True)
    if fill:
        of_fill = jnp.zeros_like(primals[1]) if fill[0] is None else fill[0]
        tangent = jnp.where(rest[-1] > 0, tangent, of_fill)
    outs = [out, *[first] * index, *rest]
    return outs, [tangent, *(zero_tangent(y) for y in outs[1:])]


ad.primitive_jvps[unique_p.primitive] = _unique_jvp


def unique(
    x: jax.Array, fill: jax.Array | np.ndarray | None, size: int, index: bool, inverse: bool = False
) -> list[jax.Array]:
    """Returns the different elements of a row in ascending order, ``size`` of them; if wanted, where each is first, and
    the number of each element of x among them; and how often each is there. After the last: the fill, an array of one
    element, or the smallest element."""
    return unique_p(x, *([] if fill is None else [fill]), axis=0, size=size, index=index, inverse=inverse)
