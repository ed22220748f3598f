"""The sort as a primitive."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad
from jax.typing import ArrayLike

from jaxgpuops import _arguments, _native
from jaxgpuops._arguments import AxisName
from jaxgpuops._derivatives import zero_tangent
from jaxgpuops._primitive import Kernel, align
from jaxgpuops._split import RULES, Rule, by_rows, manual
from jaxgpuops.lax._count import bincount
from jaxgpuops.lax._scan import cummax, cumsum
from jaxgpuops.lax.along_axis import gathered, take_along_axis
from jaxgpuops.lax.order import from_bits, sort_keys, to_bits

MAX_KEYS = 4
# The segment of each place is found by comparing it with all offsets, if there are at most so many pairs: XLA makes one
# kernel of that, where counting and gathering take four. A GPU compares many more pairs in that time.
MOST_COMPARED, MOST_COMPARED_ON_GPU = 1 << 18, 1 << 22
# The longest rows that are sorted by two keys at once if that takes integers of 64 bits. To sort longer rows twice
# takes no longer on a GPU, and half the time on a CPU.
MOST_TOGETHER = 1024
# Longer rows are sorted by several blocks of a GPU if they are few (longest_of_one_block in sort/plan.cc).
MOST_OF_BLOCK = 8192
# The kernel for segments of longer rows expects offsets that ascend (kMostUnordered in sort/plan.cc).
MOST_UNORDERED = 8192


def _sort_fallback(x, *carried, axis, descending, values, indices, kth):
    keys = sort_keys(x)
    iota = lax.broadcasted_iota(np.int32, x.shape, axis)
    permutation = lax.sort((~keys if descending else keys, iota), dimension=axis, num_keys=1)[1]
    outs = []
    if values:
        moved = lax.optimization_barrier(take_along_axis(to_bits(x), permutation, axis, permutes=True))
        outs.append(from_bits(moved, x.dtype))
    return [*outs, *_followed(permutation, carried, axis)] if indices else outs


def _followed(permutation, carried, axis):
    """Returns what stands in place of the indices: the numbers that are carried, if there are any."""
    return [take_along_axis(numbers, permutation, axis, permutes=True) for numbers in carried] or [permutation]


def _carried_later(x, *carried, axis, **params):
    *values, permutation = sort_p(x, axis=axis, **params)
    return [*values, *_followed(permutation, carried, axis)]


def _results(x, *carried, axis, descending, values, indices, kth):
    return [(x.shape[axis], dtype) for wanted, dtype in ((values, x.dtype), (indices, np.int32)) if wanted]


def _plan_sort(rows, avals, compute_capability, axis, *, values, indices, kth, **_):
    bits = 8 * avals[0].dtype.itemsize
    return _native.modules["cpu"].plan_sort(
        *rows, bits, values, indices, compute_capability, kth, carries=len(avals) > 1
    )


# If `kth` is not negative, only the element of that rank need be in its place, with those that come first before it and
# the others after it. The CPU's kernel and the fallback return a sorted row, which fulfils that.
#
# A second operand is of int32 numbers that are carried with the elements, and returned in place of the indices. The
# kernel for long rows moves them in its passes. Other rows are sorted first, and the numbers follow the indices.
sort_p = Kernel(
    "sort",
    results=_results,
    fallback=_sort_fallback,
    accepts=_arguments.ORDERED_DTYPES.__contains__,
    attributes=("descending", "values", "indices", "kth"),
    plan=_plan_sort,
    others=_carried_later,
)


def _takes_32_bits(dtype):
    return dtype in _arguments.ORDERED_DTYPES and dtype.itemsize == 4


def _sort_jvp(primals, tangents, *, indices, axis, values, split=None, **params):
    """The permutation is locally constant, so tangents are permuted like the elements."""
    outs = sort_p(*primals, axis=axis, values=values, indices=True, split=split, **params)
    return _with_tangents(outs, tangents[0], axis, values, indices, split)


def _with_tangents(outs, tangent, axis, values, indices, split=None):
    """Returns the results that are wanted, of values and indices, and their tangents."""
    if not values:
        return outs, [zero_tangent(outs[0])]
    is_zero = isinstance(tangent, ad.Zero)
    moved = zero_tangent(outs[0]) if is_zero else take_along_axis(tangent, outs[1], axis, split, permutes=True)
    return outs[: 1 + indices], [moved, zero_tangent(outs[1])][: 1 + indices]


ad.primitive_jvps[sort_p.primitive] = _sort_jvp
RULES["sort"] = by_rows(sort_p)


def _lexsort_fallback(high, low, *, axis, descending):
    order = functools.partial(sort_p, axis=axis, descending=descending, values=False, indices=True, kth=-1)
    [indices] = order(low)
    return order(take_along_axis(high, indices, axis, permutes=True), indices)


# The permutation that sorts by two keys, of which the first counts most.
lexsort_p = Kernel(
    "lexsort",
    results=lambda high, low, *, axis, descending: [(high.shape[axis], np.int32)],
    fallback=_lexsort_fallback,
    accepts=_takes_32_bits,
    attributes=("descending",),
    plan=lambda rows, avals, capability, axis, **_: _native.modules["cpu"].plan_lexsort(*rows, capability),
)
RULES["lexsort"] = by_rows(lexsort_p)


def _real(keys: Sequence[jax.Array]) -> list[jax.Array]:
    """Replaces complex keys by their real and imaginary parts, which give the same order."""
    parts = ((lax.real(x), lax.imag(x)) if jnp.issubdtype(x.dtype, jnp.complexfloating) else (x,) for x in keys)
    return [part for pair in parts for part in pair]


def _clipped(offsets: jax.Array, length: int) -> jax.Array:
    wide = offsets.astype(np.int32) if offsets.dtype.itemsize < 4 else offsets
    return jnp.clip(wide, 0, length).astype(np.int32)


def bounds(offsets: jax.Array, length: int) -> jax.Array:
    """Returns offsets as int32, clipped to the axis and made ascending, so that no access can be out of bounds."""
    return cummax(_clipped(offsets, length), 0)


def _segments(shape: Sequence[int], offsets: jax.Array, axis: int, split, most: int) -> jax.Array:
    """Returns the number of the segment of each place, which is how many offsets are at or before it."""
    length, count = shape[axis] if split is None else split.length, offsets.shape[0]
    dtype = np.dtype(np.int32) if jax.export.is_symbolic_dim(count) else np.min_scalar_type(count)
    known = not any(map(jax.export.is_symbolic_dim, (length, count)))
    if split is None and known and count * length <= most:
        place, number = (lax.broadcasted_iota(np.int32, (length, count), d) for d in (0, 1))
        # A place has passed all offsets that stand before the first one beyond it. So offsets need not ascend.
        passed = jnp.min(jnp.where(_clipped(offsets, length) > place, number, count), 1, initial=count).astype(dtype)
    else:
        passed = cumsum(bincount(bounds(offsets, length), 0, length + 1), 0)[:length].astype(dtype)
    return lax.broadcast_in_dim(passed if split is None else split.part_of(passed, 0), shape, (axis,))


def _of_segments(
    keys: Sequence[jax.Array], offsets: jax.Array, axis: int, descending: bool, split=None, most: int = MOST_COMPARED
) -> list[jax.Array]:
    """Returns the numbers of segments, and keys, whose ascending order is that of ``keys`` in each segment. All
    elements before the first segment are equal, and so are those after the last one, so that they stay where they
    are."""
    segments, count = _segments(keys[0].shape, offsets, axis, split, most), offsets.shape[0]
    inside = (segments > 0) & (segments < count)
    keys = [~sort_keys(key) if descending else sort_keys(key) for key in keys]
    return [segments, *(jnp.where(inside, key, key.dtype.type(0)) for key in keys)]


def _joined(keys: Sequence[jax.Array], axis: int, split=None) -> list[jax.Array]:
    """Returns keys of the same order, each an integer of as many neighbouring keys as have room in it."""
    length = keys[0].shape[axis]
    is_short = split is None and not jax.export.is_symbolic_dim(length) and length <= MOST_TOGETHER
    joined = [keys[0]]
    for key in keys[1:]:
        bits = 8 * key.dtype.itemsize
        both = 1 << (8 * joined[-1].dtype.itemsize + bits - 1).bit_length()
        if both > (64 if is_short else 32):
            joined.append(key)
            continue
        with jax.enable_x64(both == 64 or jax.config.jax_enable_x64):
            both = np.dtype(f"uint{both}")
            joined[-1] = sort_keys(joined[-1]).astype(both) << both.type(bits) | sort_keys(key).astype(both)
    return joined


def permutation(
    keys: Sequence[jax.Array],
    axis: int,
    descending: bool = False,
    split=None,
    offsets: jax.Array | None = None,
) -> jax.Array:
    """Returns the int32 indices that sort by the first key, where it is equal by the second, and so on; in each segment
    if there are offsets."""
    keys = _real(map(lax.stop_gradient, keys))
    if offsets is not None:
        if len(keys) == 1 and split is None:
            return sort_segments(keys[0], offsets, axis, descending, values=False, indices=True)[0]
        keys, descending = _of_segments(keys, gathered(offsets, 0), axis, descending, split), False
    return _permutation(keys, axis, descending, split)


def _as_32_bits(keys, axis):
    """Returns keys of 32 bits in the same order, or None if some have more. In rows that are not long, two sorts by
    shorter keys take less time."""
    if all(_takes_32_bits(key.dtype) for key in keys):
        return keys
    if _is_long(keys[0], axis) and all(key.dtype.itemsize <= 4 for key in keys):
        return [sort_keys(key).astype(np.uint32) for key in keys]
    return None


def _permutation(keys, axis, descending=False, split=None):
    order = functools.partial(sort_p, axis=axis, descending=descending, values=False, indices=True, kth=-1, split=split)
    *before, last = _joined(keys, axis, split)
    if before and (pair := _as_32_bits([before[-1], last], axis)):
        before.pop()
        [indices] = lexsort_p(*pair, axis=axis, descending=descending, split=split)
    else:
        [indices] = order(last)
    for key in reversed(before):  # since sorts are stable, a sort by one key keeps the order by less significant keys
        [indices] = order(take_along_axis(key, indices, axis, split, permutes=True), indices)
    return indices


def _can_carry(x, axis: int) -> bool:
    """Whether elements fit the numbers that a sort carries. Those of less than 32 bits are widened before and narrowed
    after the sort, which pays in rows that the kernel for long ones sorts."""
    itemsize = x.dtype.itemsize
    return x.dtype in _arguments.ORDERED_DTYPES and (itemsize == 4 or (itemsize < 4 and _is_long(x, axis)))


def _is_long(x, axis: int) -> bool:
    return jax.export.is_symbolic_dim(x.shape[axis]) or x.shape[axis] > MOST_OF_BLOCK


def _sort_pair(key, other, axis: int, descending: bool, values: bool = True) -> list[jax.Array]:
    """Returns the sorted key, if its values are wanted, and the other array in its order."""
    bits = to_bits(other)
    *sorted_key, numbers = sort_p(
        key,
        lax.bitcast_convert_type(bits.astype(np.uint32), np.int32),
        axis=axis,
        descending=descending,
        values=values,
        indices=True,
        kth=-1,
    )
    return [*sorted_key, from_bits(lax.bitcast_convert_type(numbers, np.uint32).astype(bits.dtype), other.dtype)]


def _sort_together_fallback(key, *others, axis, num_keys, descending, indices):
    follow = functools.partial(take_along_axis, axis=axis, permutes=True)
    is_pair = (
        len(others) == 1 and not indices and key.dtype in _arguments.ORDERED_DTYPES and _can_carry(others[0], axis)
    )
    if is_pair and num_keys == 1:
        return _sort_pair(key, others[0], axis, descending)
    if is_pair and _can_carry(key, axis) and len(_joined((key, *others), axis)) == 2:  # both are keys
        other, key = _sort_pair(others[0], key, axis, descending)
        return _sort_pair(key, other, axis, descending)
    if num_keys > 1 or key.dtype not in _arguments.ORDERED_DTYPES:
        order = permutation((key, *others)[:num_keys], axis, descending)
        values = follow(key, order)
    else:
        values, order = sort_p(key, axis=axis, descending=descending, values=True, indices=True, kth=-1)
    return [values, *(follow(x, order) for x in others), *([order] if indices else [])]


# Sorts several arrays, or keys of several parts; the permutation is the last result. It is made of other kernels. It is
# a primitive so that devices exchange the parts of a split axis once for all arrays.
sort_together_p = Kernel(
    "sort_together",
    results=lambda *operands, axis, num_keys, descending, indices: [
        *((x.shape[axis], x.dtype) for x in operands),
        *([(operands[0].shape[axis], np.int32)] if indices else []),
    ],
    fallback=_sort_together_fallback,
    accepts=None,
    splits_as_one=True,
)
RULES["sort_together"] = by_rows(sort_together_p)


def _sort_together_jvp(primals, tangents, *, axis, indices, split=None, **params):
    *outs, order = sort_together_p(*primals, axis=axis, indices=True, split=split, **params)
    follow = lambda t: take_along_axis(t, order, axis, split, permutes=True)
    tangents = [zero_tangent(y) if isinstance(t, ad.Zero) else follow(t) for t, y in zip(tangents, outs, strict=True)]
    return ([*outs, order], [*tangents, zero_tangent(order)]) if indices else (outs, tangents)


ad.primitive_jvps[sort_together_p.primitive] = _sort_together_jvp


def sort_operands(
    operands: Sequence[jax.Array],
    axis: int,
    num_keys: int,
    descending: bool = False,
    indices: bool = False,
    split=None,
    offsets: jax.Array | None = None,
) -> tuple[list[jax.Array], jax.Array | None]:
    """Returns the operands in the order of the first ``num_keys`` of them, and the permutation if it is wanted or
    needed."""
    if offsets is not None:
        if len(operands) == 1 and operands[0].dtype in _arguments.ORDERED_DTYPES and split is None:
            outs = sort_segments(*operands, offsets, axis, descending, values=True, indices=indices)
            return outs[:1], outs[-1] if indices else None
        order = permutation(operands[:num_keys], axis, descending, split, offsets)
        return [take_along_axis(x, order, axis, split, permutes=True) for x in operands], order
    params = {"axis": axis, "descending": descending, "indices": indices, "split": split}
    if len(operands) == 1 and operands[0].dtype in _arguments.ORDERED_DTYPES:
        outs = sort_p(*operands, values=True, kth=-1, **params)
    else:
        outs = sort_together_p(*operands, num_keys=num_keys, **params)
    return outs[: len(operands)], outs[-1] if indices else None


# ---- Segments -------------------------------------------------------------------------------------------------------


def _sort_segments_fallback(x, offsets, *, axis, descending, values, indices, most=MOST_COMPARED):
    if any(n != 1 for d, n in enumerate(offsets.shape) if d != axis):  # rows have offsets of their own
        shape = (*x.shape[:axis], offsets.shape[axis], *x.shape[axis + 1 :])
        rows, of_rows = (jnp.moveaxis(a, axis, -1) for a in (x, jnp.broadcast_to(offsets, shape)))
        one = functools.partial(
            _sort_segments_fallback, axis=0, descending=descending, values=values, indices=indices, most=most
        )
        before = rows.shape[:-1]
        outs = jax.vmap(one)(*(a.reshape(math.prod(before), a.shape[-1]) for a in (rows, of_rows)))
        return [jnp.moveaxis(y.reshape(*before, y.shape[-1]), -1, axis) for y in outs]
    keys = _of_segments([x], offsets.ravel(), axis, descending, most=most)
    if values and not indices and _can_carry(x, axis):
        segments, joined = keys[0], _joined(keys, axis)
        if len(joined) == 1:
            return _sort_pair(*joined, x, axis, False, values=False)
        inside = (segments > 0) & (segments < offsets.size)
        by_key, segments = _sort_pair(x, segments, axis, descending)
        [by_segment] = _sort_pair(segments, by_key, axis, False, values=False)
        return [from_bits(lax.select(inside, to_bits(by_segment), to_bits(x)), x.dtype)]
    order = _permutation(keys, axis)
    return [*([take_along_axis(x, order, axis, permutes=True)] if values else []), *([order] if indices else [])]


def _plan_sort_segments(rows, avals, compute_capability, axis, *, values, indices, **_):
    x, offsets = avals
    shared = all(n == 1 for d, n in enumerate(offsets.shape) if d != axis)
    return _native.modules["cpu"].plan_sort_segments(
        *rows, offsets.shape[axis], 8 * x.dtype.itemsize, compute_capability, values, indices, shared
    )


sort_segments_p = Kernel(
    "sort_segments",
    results=lambda x, offsets, **params: _results(x, **params, kth=-1),
    fallback=_sort_segments_fallback,
    others=functools.partial(_sort_segments_fallback, most=MOST_COMPARED_ON_GPU),
    accepts=_arguments.ORDERED_DTYPES.__contains__,
    attributes=("descending", "values", "indices"),
    broadcasts=lambda count, **_: (1,),
    plan=_plan_sort_segments,
)


def sort_segments(x, offsets, axis: int, descending: bool, values: bool, indices: bool) -> list[jax.Array]:
    """Sorts each segment of an axis by itself. Returns the elements, their indices along the axis, or both."""
    length, offsets = x.shape[axis], gathered(offsets, 0)
    if offsets.dtype != np.dtype(np.int32):
        offsets = bounds(offsets, length)
    elif jax.export.is_symbolic_dim(length) or length > MOST_UNORDERED:
        offsets = cummax(offsets, 0)
    offsets = lax.expand_dims(offsets, [d for d in range(x.ndim) if d != axis])
    return sort_segments_p(
        *align(x, offsets, apart=axis), axis=axis, descending=descending, values=values, indices=indices
    )


def _sort_segments_jvp(primals, tangents, *, axis, indices, values, **params):
    outs = sort_segments_p(*primals, axis=axis, values=values, indices=True, **params)
    return _with_tangents(outs, tangents[0], axis, values, indices)


ad.primitive_jvps[sort_segments_p.primitive] = _sort_segments_jvp


def rows_to_exchange(split, x, ranks, axis):
    """Returns a dimension along which devices can have equal parts, and ranks do not differ."""
    sizes = enumerate(zip(x.shape, ranks.shape, strict=True))
    return next((d for d, (n, m) in sizes if d != axis and n and n % split.shards == 0 and m == 1), None)


def _sort_segments_split(splits, x, offsets, *, axis, **params):
    """Devices exchange their parts of the axis for rows, and back."""
    split = splits[axis]
    dim = rows_to_exchange(split, x, offsets, axis)
    there = lax.slice_in_dim(split.exchange(x, dim, axis), 0, split.length, axis=axis)
    outs = sort_segments_p.primitive.bind(there, offsets, axis=axis, **params)
    return tuple(split.exchange(split.padded(y, axis), axis, dim) for y in outs)


RULES["sort_segments"] = Rule(
    _sort_segments_split,
    operands=(0,),
    keeps=True,
    pays=lambda split, avals, *, axis, **_: rows_to_exchange(split, *avals[:2], axis) is not None,
)


def check_operands(
    op: str, names: Sequence[str], operands: Sequence[jax.Array], axis: int, num_keys: int, argument: str = "axis"
) -> int:
    """Checks that the operands can be sorted along ``axis`` together; returns the axis counted from the front."""
    first = operands[0]
    for name, x in zip(names, operands, strict=True):
        if x.shape != first.shape:
            raise ValueError(f"{op}: {name} must have the shape of {names[0]}, {first.shape}, got {x.shape}")
    for name, x in zip(names[:num_keys], operands, strict=False):
        _arguments.dtype(op, name, x.dtype, _arguments.ORDERED_DTYPES | _arguments.COMPLEX)
    return _arguments.indexed_axis(op, names[0], first, axis, argument)


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _sort(operands, dimension, num_keys, axis_names):
    op = "jaxgpuops.lax.sort"
    names = [f"operand[{i}]" for i in range(len(operands))] if len(operands) > 1 else ["operand"]
    axis = check_operands(op, names, operands, dimension, num_keys, "dimension")
    split = manual(op, axis_names, operands[0].shape[axis])
    return tuple(sort_operands(operands, axis, num_keys, split=split)[0])


def sort(
    operand: ArrayLike | Sequence[ArrayLike],
    dimension: int = -1,
    is_stable: bool = True,
    num_keys: int = 1,
    *,
    axis_name: AxisName = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Sorts one array, or several by the first of them: `jax.lax.sort` as a kernel.

    Order, ties, NaNs and determinism are those of `jaxgpuops.sort`. Unlike that function, this one also has
    forward-mode derivatives (`jax.jvp`, `jax.jacfwd`, `jax.linearize`).

    Args:
      operand: array, or arrays of one shape; keys of the dtypes of `jaxgpuops.sort`, the others of any.
      dimension: the axis to sort along.
      is_stable: True or False; the result is that of a stable sort in any case.
      num_keys: how many arrays are keys, the first of which counts most; 4 at most.
      axis_name: inside `jax.shard_map`, what the axis is split along, as for `jaxgpuops.sort`.

    Returns:
      The sorted array, or a tuple of arrays in the order of the keys.

    Raises:
      TypeError, ValueError: as `jaxgpuops.sort`; also TypeError for no arrays, and ValueError for arrays of different
        shapes and ``num_keys`` out of range.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> jaxgpuops.lax.sort(jnp.array([3.0, 1.0, 2.0])).tolist()
    [1.0, 2.0, 3.0]
    >>> keys, letters = jaxgpuops.lax.sort((jnp.array([2, 1, 2]), jnp.array([7, 8, 9])))
    >>> keys.tolist(), letters.tolist()
    ([1, 2, 2], [8, 7, 9])
    """
    op = "jaxgpuops.lax.sort"
    dimension, num_keys = _arguments.integer(op, "dimension", dimension), _arguments.integer(op, "num_keys", num_keys)
    _arguments.flag(op, "is_stable", is_stable)
    several = isinstance(operand, list | tuple)
    if several and not operand:
        raise TypeError(f"{op}: operand must have at least one array, got none")
    operands = [_arguments.array(op, "operand", x) for x in (operand if several else [operand])]
    if not 1 <= num_keys <= min(len(operands), MAX_KEYS):
        raise ValueError(f"{op}: num_keys must be between 1 and {min(len(operands), MAX_KEYS)}, got {num_keys}")
    # Inside a traced function, `jit` would hide how operands are made (`Kernel.known`).
    traced = any(isinstance(x, jax.core.Tracer) for x in operands)
    outs = (_sort.__wrapped__ if traced else _sort)(operands, dimension, num_keys, _arguments.names(op, axis_name))
    return outs if several else outs[0]
