"""Segments and rows of a table, as primitives."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpuops import _arguments, _native
from jaxgpuops._derivatives import def_jvp, def_linear, sum_to
from jaxgpuops._primitive import Kernel, batch_first
from jaxgpuops._split import RULES, Rule, all_axes, ends, filled_axes, plain_rule
from jaxgpuops.lax.along_axis import along
from jaxgpuops.lax.order import from_keys, identity, moved, to_keys

# Ids stand along the axis (or axes; segments may have several). After it they have size 1. Before it, ids, data and
# tables may have size 1 where others have more: the ids of several features may share data.


def _in_range(ids, length):
    """Replaces ids out of range by ``length``, since JAX would count negative ones from the end."""
    return jnp.where((ids >= 0) & (ids < length), ids, length)


def _each(fn, x, ids, axis):
    """``fn(rows, ids)`` over the dimensions before the axis, where rows or ids may be shared."""
    shared = [[d for d in range(axis) if a.shape[d] == 1 and b.shape[d] != 1] for a, b in ((x, ids), (ids, x))]
    for d in reversed(range(axis)):
        fn = jax.vmap(fn, in_axes=[None if d in own else 0 for own in shared])
    return fn(
        *(
            a.reshape([n for d, n in enumerate(a.shape) if d not in own])
            for a, own in zip((x, ids), shared, strict=True)
        )
    )


def empty(name: str, dtype: np.dtype):
    """Returns the result of a segment without rows."""
    return np.zeros((), dtype) if name == "segment_sum" else identity(name.removeprefix("segment_"), dtype)


def _segments_fallback(data, ids, *, axis, length, sorted, name, along=None):
    if ids.dtype == np.dtype(np.uint8):  # not every kernel reads ids of 8 bits
        return (segments(SEGMENT_KERNELS[name], data, ids.astype(np.int32), axis, length, sorted, along),)
    method = {"segment_sum": "add", "segment_max": "max", "segment_min": "min"}[name]
    wide = _arguments.wide(data.dtype) if name == "segment_sum" else data.dtype

    first, after = ends(axis)

    def one(rows, ids):
        ids = ids.reshape(ids.shape[: after - first])
        start = jnp.full((length, *rows.shape[ids.ndim :]), empty(name, wide), wide)
        put = getattr(start.at[_in_range(ids, length)], method)
        return put(rows.astype(wide), mode="drop", indices_are_sorted=False).astype(data.dtype)

    return (_each(one, data, ids, first),)


def _plan_segments(rows, avals, compute_capability, axis, *, length, sorted, name, along):
    byte_ids = avals[1].dtype == np.dtype(np.uint8)
    dtype = str(avals[0].dtype)
    return _native.modules["cpu"].plan_segments(name, *rows, length, dtype, sorted, byte_ids, compute_capability)


def _leaves_segments(rows, avals, *, name, **_):
    """Whether XLA's atomics are faster on an H200: at few numbers whose fold is the same in any order, and that one
    atomic instruction takes. So are sums of one or two numbers."""
    dtype, size = avals[0].dtype, math.prod(rows)
    exact = dtype in _arguments.INTEGERS or (dtype == np.dtype(np.float32) and (name != "segment_sum" or rows[1] <= 2))
    return exact and dtype.itemsize >= 4 and (size <= 1 << 11 or (rows[1] <= 512 and size <= 1 << 14))


def _segments_kernel(name):
    return Kernel(
        name,
        results=lambda data, ids, *, axis, length, sorted, along: [(length, data.dtype)],
        fallback=functools.partial(_segments_fallback, name=name),
        accepts=(_arguments.INTEGERS | _arguments.FLOATS).__contains__,
        attributes=("sorted",),
        broadcasts=lambda count, **_: (0, 1),
        reindexes=True,
        plan=functools.partial(_plan_segments, name=name),
        leaves=functools.partial(_leaves_segments, name=name),
    )


segment_sum_p, segment_max_p, segment_min_p = map(_segments_kernel, ("segment_sum", "segment_max", "segment_min"))


SEGMENT_KERNELS = {kernel.name: kernel for kernel in (segment_sum_p, segment_max_p, segment_min_p)}


def _take_fallback(table, ids, *, axis, sorted, fill, along=None):
    def one(rows, ids):
        shape = (ids.shape[0], *rows.shape[1:])
        if rows.shape[0] == 0:  # JAX refuses to gather from nothing
            return jnp.zeros(shape, rows.dtype)
        # The ids as they are, not reshaped: XLA's partitioner gathers an array once for all that need it whole, and the
        # gradient needs the same one.
        ids = ids if rows.ndim > 1 else ids[:, None]
        features = tuple(range(ids.ndim - 1, ids.ndim + rows.ndim - 2))
        numbers = jax.lax.GatherDimensionNumbers(features, collapsed_slice_dims=(0,), start_index_map=(0,))
        gather = functools.partial(jax.lax.gather, mode="fill" if fill else "clip", fill_value=0)
        take = lambda rows: gather(rows, ids, numbers, (1, *rows.shape[1:])).reshape(shape)
        return moved(take, rows)

    return (_each(one, table, ids, axis),)


# XLA gathers rows at the speed of memory, so there is no kernel. It is a primitive to have its own derivative, and to
# be split over devices as the gradient is: where both need the same ids, these are gathered once.
take_rows_p = Kernel(
    "take_rows",
    results=lambda table, ids, *, axis, sorted, fill, along: [(ids.shape[axis], table.dtype)],
    fallback=_take_fallback,
    accepts=None,
    broadcasts=lambda count, **_: (0, 1),
    reindexes=True,
    splits_as_one=True,
)


for _kernel in (*SEGMENT_KERNELS.values(), take_rows_p):
    batch_first(_kernel)


def segments(
    kernel: Kernel,
    data: jax.Array,
    ids: jax.Array,
    axis: int | tuple[int, ...],
    length: int,
    sorted: bool,
    along=None,
    split=None,
) -> jax.Array:
    """Reduces segments. Of several axes, the result has one, the segments. Over an explicit mesh, this is split
    ``along`` these mesh axes."""
    return kernel(data, ids, axis=axis, length=length, sorted=sorted, along=along, split=split)[0]


def as_ids(ids: jax.Array, length: int) -> jax.Array:
    """Converts ids for `segments`, which takes uint8 as they are: bins of boosted trees are a quarter of the bytes."""
    return ids if ids.dtype == np.dtype(np.uint8) else as_int32(ids, length)


def as_int32(ids: jax.Array, length: int) -> jax.Array:
    """Converts ids of any integer dtype. Those that int32 might not represent become -1 or ``length``: order stays."""
    if ids.dtype.itemsize < 4 or ids.dtype == np.dtype(np.int32):
        return ids.astype(np.int32)
    least = -1 if np.issubdtype(ids.dtype, np.signedinteger) else 0
    return jnp.clip(ids, least, length).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(0, 3, 4), inline=True)
def segments_of_rows(name: str, data: jax.Array, ids: jax.Array, length: int, sorted: bool) -> jax.Array:
    """Replaces functions of `jax.ops`, for one dimension of ids. Forward mode works."""
    ids = as_int32(ids, length).reshape(-1, *(1,) * (data.ndim - 1))
    return segments(SEGMENT_KERNELS[name], data, ids, 0, length, sorted)


def take_rows(table: jax.Array, ids: jax.Array, axis: int, sorted: bool, fill: bool = True) -> jax.Array:
    """Returns ``out[.., j, ..] = table[.., ids[.., j], ..]``, with zeros where an id is out of range.

    Without ``fill``, it has any values there: filling is a choice, and XLA's CPU backend makes slow loops of what
    follows one.
    """
    return take_rows_p(table, ids.astype(np.int32), axis=axis, sorted=sorted, fill=fill, along=along(ids, axis))[0]


def rows_of_segments(table: jax.Array, ids: jax.Array, axis: int | tuple[int, ...], sorted: bool) -> jax.Array:
    """Returns for each row the result of its segment: `take_rows` of a result of `segments`, with the same ids and
    axes."""
    first, after = ends(axis)
    return take_rows(jax.lax.expand_dims(table, range(first, after - 1)), ids, after - 1, sorted)


def _segment_sum_transpose(ct, data, ids, *, axis, length, sorted, along, split=None):
    ct = ct if split is None else split.cotangent(ct)
    return sum_to(rows_of_segments(ct, ids, axis, sorted), data.shape)


def _take_transpose(ct, table, ids, *, axis, sorted, fill, along):
    # Ids of all dimensions just before the axis that share the table are those of one sum.
    first = axis
    while first and table.shape[first - 1] == 1 and ids.shape[first - 1] != 1:
        first -= 1
    axes = tuple(range(first, axis + 1)) if first < axis else axis
    ct = segments(segment_sum_p, ct, ids, axes, table.shape[axis], sorted and first == axis, table.sharding.spec[axis])
    return sum_to(jax.lax.expand_dims(ct, range(first, axis)), table.shape)


def_linear(segment_sum_p, _segment_sum_transpose)
def_linear(take_rows_p, _take_transpose)


def share_of_ties(out, data, ids, axis, sorted, split=None):
    """Returns each row's share of its segment's maximum or minimum: one over the number of rows that have it, else
    0."""
    wide = _arguments.wide(data.dtype)
    mine = (data == rows_of_segments(out, ids, axis, sorted)).astype(wide)
    ties = segments(segment_sum_p, mine, ids, axis, out.shape[ends(axis)[0]], sorted, split=split)
    return mine / rows_of_segments(jnp.maximum(ties, 1), ids, axis, sorted).clip(1)


def _extreme_jvp(outs, primals, tangents, *, axis, length, sorted, along, split=None):
    data, ids = primals
    shares = share_of_ties(outs[0], data, ids, axis, sorted, split)
    tangents = shares * tangents[0].astype(shares.dtype)
    tangent = segments(segment_sum_p, tangents, ids, axis, length, sorted, along, split)
    return (tangent.astype(data.dtype),)


def_jvp(segment_max_p, _extreme_jvp)
def_jvp(segment_min_p, _extreme_jvp)


# ---- Softmax of segments ----------------------------------------------------------------------------------------------


def exponentials(x, ids, axis, length, sorted, split=None):
    """Returns exponentials that do not overflow, and what was subtracted from their arguments. Rows without a segment
    get any value."""
    largest = segments(segment_max_p, x, ids, axis, length, sorted, split=split)
    largest = jnp.where(jnp.isfinite(largest), largest, np.zeros((), x.dtype))
    return jnp.exp(x - take_rows(largest, ids, axis, sorted, fill=False)), largest


def _softmax_fallback(x, ids, *, axis, length, sorted, split=None):
    wide = x.astype(_arguments.wide(x.dtype))
    terms, _ = exponentials(wide, ids, axis, length, sorted, split)
    sums = segments(segment_sum_p, terms, ids, axis, length, sorted, split=split)
    shares = terms / take_rows(sums, ids, axis, sorted, fill=False)
    return (jnp.where((ids >= 0) & (ids < length), shares, np.zeros((), wide.dtype)).astype(x.dtype),)


def _logsumexp_fallback(x, ids, *, axis, length, sorted, split=None):
    terms, largest = exponentials(x.astype(_arguments.wide(x.dtype)), ids, axis, length, sorted, split)
    logs = jnp.log(segments(segment_sum_p, terms, ids, axis, length, sorted, split=split)) + largest
    return (logs.astype(x.dtype),)


def _plan_segment_softmax(rows, avals, compute_capability, axis, *, length, sorted):
    dtype = str(avals[0].dtype)
    return _native.modules["cpu"].plan_segment_softmax(*rows, length, dtype, sorted, compute_capability)


def _softmax_kernel(name, results, fallback):
    def others(x, ids, **params):
        """Converts numbers of 16 bits, whose kernels are for rows in no order, to those of the other kernels."""
        wide = _arguments.wide(x.dtype)
        if wide == x.dtype:
            return fallback(x, ids, **params)
        [y] = kernel(x.astype(wide), ids, **params)
        return (y.astype(x.dtype),)

    kernel = Kernel(
        name,
        results=results,
        fallback=fallback,
        accepts=_arguments.FLOATS.__contains__,
        attributes=("length", "sorted"),
        broadcasts=lambda count, **_: (0, 1),
        reindexes=name == "segment_logsumexp",
        plan=_plan_segment_softmax,
        others=others,
    )
    return kernel


segment_softmax_p = _softmax_kernel(
    "segment_softmax", lambda x, ids, *, axis, length, sorted: [(x.shape[axis], x.dtype)], _softmax_fallback
)
segment_logsumexp_p = _softmax_kernel(
    "segment_logsumexp", lambda x, ids, *, axis, length, sorted: [(length, x.dtype)], _logsumexp_fallback
)
for _kernel in (segment_softmax_p, segment_logsumexp_p):
    batch_first(_kernel)


def of_segments(x, ids, length):
    """Returns x in rows that have a segment, and 0 in others, which may have NaNs."""
    return jnp.where((ids >= 0) & (ids < length), x, np.zeros((), x.dtype))


def _softmax_jvp(outs, primals, tangents, *, axis, length, sorted, split=None):
    ids, products = primals[1], outs[0] * tangents[0]
    sums = segments(segment_sum_p, products, ids, axis, length, sorted, split=split)
    return (of_segments(products - outs[0] * take_rows(sums, ids, axis, sorted, fill=False), ids, length),)


def _logsumexp_jvp(outs, primals, tangents, *, axis, length, sorted, split=None):
    x, ids = primals
    zero = np.zeros((), x.dtype)
    out = take_rows(jnp.where(jnp.isneginf(outs[0]), zero, outs[0]), ids, axis, sorted, fill=False)
    shares = of_segments(jnp.exp(of_segments(jnp.minimum(x - out, zero), ids, length)), ids, length)
    return (segments(segment_sum_p, shares * tangents[0], ids, axis, length, sorted, split=split),)


def_jvp(segment_softmax_p, _softmax_jvp)
def_jvp(segment_logsumexp_p, _logsumexp_jvp)


# ---- A split axis ---------------------------------------------------------------------------------------------------


def _segments_split(name, splits, data, ids, *, axis, length, sorted, along):
    """Each device reduces its part of the rows, to those segments that it is to have a part of. Sums of floats are
    added in the order of `psum`."""
    rows = [splits[d] for d in range(*ends(axis)) if d in splits]
    units = splits.get(data.ndim)  # of the segments
    if units or any(split.uneven for split in rows):
        ids = filled_axes(splits, ids.astype(np.int32), axis, length)
    shared = ()
    if units:
        shared = tuple(n for n in units.names if any(n in split.names for split in rows))
        ids, length, sorted = _own_segments(units, shared, ids, length, sorted)
    [own] = SEGMENT_KERNELS[name].primitive.bind(data, ids, axis=axis, length=length, sorted=sorted, along=along)
    if not rows:
        return (own,)
    split = all_axes(splits, axis)
    if name == "segment_sum":
        y, dim = own.astype(_arguments.wide(own.dtype)), ends(axis)[0]
        rest = split.only([n for n in split.names if n not in shared])
        if shared and rest.names and units.part % rest.shards == 0:
            # If rows are split over further devices, each of these first sums only a part of the result; then the parts
            # are gathered. A sum of the whole on each device would move as many bytes again.
            both = dataclasses.replace(rest, names=shared + rest.names)
            y = rest.gather(both.sum_parts(y, dim), dim)
        else:
            y = units.only(shared).sum_parts(y, dim) if shared else y
            y = rest.sum(y) if rest.names else y
        return (y.astype(own.dtype),)
    # Maxima are taken of integer keys, in which NaN is the largest, because all-reduces of floats may lose NaNs.
    keys = to_keys(own) if name == "segment_max" else ~to_keys(own)
    floats = jnp.issubdtype(own.dtype, jnp.floating)
    all_bits = ~jnp.zeros_like(keys)
    keys = split.max(jnp.where(jnp.isnan(own), all_bits, keys) if floats else keys)
    out = from_keys(keys if name == "segment_max" else ~keys, own.dtype)
    return (jnp.where(keys == all_bits, jnp.asarray(jnp.nan, own.dtype), out) if floats else out,)


def _own_segments(units, shared, ids, length, sorted):
    """Returns ids of the segments of which a device reduces its rows, counted from the first of them, how many segments
    these are, and whether ids are sorted: its own segments, and those of the devices along the mesh axes ``shared``,
    among which sums are scattered."""
    if not shared:
        return ids - units.start(), units.part, sorted
    part, shards = ids // units.part, units.shards
    own, index = (ids >= 0) & (ids < length), 0
    for name in units.names:
        shards //= units.mesh.shape[name]
        digit = part // shards % units.mesh.shape[name]
        if name in shared:
            index = index * units.mesh.shape[name] + digit
        else:
            own &= digit == jax.lax.axis_index(name)
    count = units.part * math.prod(units.mesh.shape[name] for name in shared)
    return jnp.where(own, index * units.part + ids % units.part, count), count, False


def _segments_move(splits, avals, *, axis, **_):
    data, _, out = avals
    split, units = all_axes(splits, axis), splits.get(data.ndim)
    shared = [n for n in split.names if units and n in units.names]
    rest = split.only([n for n in split.names if n not in shared]).shards
    size = out.size * _arguments.wide(data.dtype).itemsize
    if shared and rest > 1 and units.part % rest == 0:
        return size // rest + size
    return size * (bool(shared) + (rest > 1))


def _take_split(splits, table, ids, *, axis, **params):
    """Each device gives the rows of its part of the table, as bits, and zeros for others. Along mesh axes along which
    the result is split, too, it has the ids of all devices, and each gets the rows of its own."""
    if axis not in splits:
        return take_rows_p.primitive.bind(table, ids, axis=axis, **params)
    split, shared = splits[axis], _shared(splits, axis, table.ndim)
    own = jnp.where((ids >= 0) & (ids < split.length), ids - split.start(), -1)
    [rows] = take_rows_p.primitive.bind(table, own, axis=axis, **(params | {"fill": True}))
    among = dataclasses.replace(split, names=(*itertools.chain(*shared.values()),))
    rest = split.only([n for n in split.names if n not in among.names])
    if shared:  # the new first dimension has a part for each device: join_parts gives each device its own
        shards = [math.prod(split.mesh.shape[n] for n in shared.get(d, ())) for d in range(rows.ndim)]
        part = [n // m for n, m in zip(rows.shape, shards, strict=True)]
        rows = rows.reshape([*itertools.chain(*zip(shards, part, strict=True))])
        rows = rows.transpose([*range(0, rows.ndim, 2), *range(1, rows.ndim, 2)])
        rows = among.join_parts(rows.reshape(among.shards, *part), 0)[0]
    return (rest.join(rows) if rest.names else rows,)


def _shared(splits, axis, rank) -> dict[int, tuple[str, ...]]:
    """Returns for each dimension of ids the mesh axes along which it is split, and the table, too."""
    of_ids = {d: splits[e].names for d, e in enumerate((*range(axis), rank)) if e in splits}
    shared = {d: tuple(n for n in names if n in splits[axis].names) for d, names in of_ids.items()}
    return {d: names for d, names in shared.items() if names}


def _take_moves(splits, avals, *, axis, **_):
    out = avals[2]
    shared = _shared(splits, axis, out.ndim)
    for d, names in shared.items():
        of_ids = splits[d if d < axis else out.ndim]
        # The ids that devices have together must be those of neighbouring parts.
        if of_ids.names[-len(names) :] != names or of_ids.uneven:
            return math.inf
    among = {*itertools.chain(*shared.values())}
    return out.size * out.dtype.itemsize * (bool(among) + any(n not in among for n in splits[axis].names))


RULES["take_rows"] = Rule(
    _take_split, operands=(0,), free={1: 1, ~0: 1}, scatters=True, gathers=(1,), moves=_take_moves
)
for _name in ("segment_sum", "segment_max", "segment_min"):
    RULES[_name] = Rule(
        functools.partial(_segments_split, _name), free={~0: 1}, scatters=_name == "segment_sum", moves=_segments_move
    )
RULES["segment_softmax"] = plain_rule(segment_softmax_p, keeps=True)
RULES["segment_logsumexp"] = plain_rule(segment_logsumexp_p)
