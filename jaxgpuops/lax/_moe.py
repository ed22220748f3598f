"""The rows of a mixture of experts, as primitives: the plan, the dispatch to the experts, and the combination.

The operands are x or y, with tokens or rows along the axis; the indices that the call follows; the indices that its
transpose follows; and the weights of the assignments, if any. Indices and weights have nothing after the axis, and may
lack dimensions before it. Weights have the dtype of sums, or that of x or y if it has 16 bits.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jaxgpuops import _arguments, _native
from jaxgpuops._derivatives import def_jvp
from jaxgpuops._primitive import Kernel, as_automatic, batch_first, like
from jaxgpuops._split import RULES, Rule, all_axes, filled_axes
from jaxgpuops.lax.along_axis import put_along_axis_p

MAX_EXPERTS = 4096  # kMostExperts of ffi_src/moe/plan.h

# ---- The plan -------------------------------------------------------------------------------------------------------


def rows_of(assignments: int, num_experts: int, capacity: int, align: int) -> int:
    """Returns a number of rows that suffices for any routing. A negative capacity means that there is none."""
    rows = (assignments + num_experts * (align - 1)) // align * align
    return rows if capacity < 0 else jax.core.min_dim(rows, num_experts * (-(-capacity // align) * align))


def plan_fallback(experts, *, axis, num_experts, capacity, align, room):
    def one(experts):
        count = experts.shape[0]
        experts = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts)
        # A sort of keys together with their places is an argsort. (In a shard_map, the result of jnp.argsort would not
        # vary over the mesh axes of its keys.)
        places = jnp.arange(count, dtype=np.int32) + jnp.zeros_like(experts)
        order = jax.lax.sort((experts, places), num_keys=1)[1]
        found = jnp.zeros(num_experts + 1, np.int32).at[experts].add(1)
        sizes = found[:-1] if capacity < 0 else jnp.minimum(found[:-1], capacity)
        padded = (sizes + (align - 1)) // align * align
        offsets = jnp.concatenate([jnp.zeros(1, np.int32), jnp.cumsum(padded, dtype=np.int32)])
        expert = experts[order]
        rank = jnp.arange(count, dtype=np.int32) - (jnp.cumsum(found, dtype=np.int32) - found)[expert]
        kept = (expert < num_experts) & (rank < jnp.append(sizes, 0)[expert])
        row = jnp.where(kept, offsets[expert] + rank, -1)
        assignment_of_row = jnp.full(room, -1, np.int32).at[jnp.where(kept, row, room)].set(order, mode="drop")
        return assignment_of_row, jnp.zeros(count, np.int32).at[order].set(row), sizes, offsets

    for d in reversed(range(experts.ndim)):
        if d != axis:
            one = jax.vmap(one, in_axes=0, out_axes=0)
    outs = one(jnp.moveaxis(experts, axis, -1))
    return [jnp.moveaxis(out, -1, axis) for out in outs]


def _is_single(assignments) -> bool:
    """Whether there is one assignment in all. XLA computes its plan, dispatch and combination in one kernel."""
    return assignments.shape == (1,) * len(assignments.shape)


def _plan_of_one(experts, *, axis, num_experts, capacity, align, room):
    """The plan of a single assignment, without a sort: XLA computes it where it is used."""
    number = lambda count: jax.lax.broadcasted_iota(np.int32, (*experts.shape[:axis], count), axis)
    kept = (experts >= 0) & (experts < num_experts) & (capacity != 0)
    row = jnp.where(kept, np.int32(0), np.int32(-1))
    sizes = (kept & (number(num_experts) == experts)).astype(np.int32)
    offsets = jnp.where(kept & (number(num_experts + 1) > experts), np.int32(align), np.int32(0))
    return [jnp.where(number(room) == 0, row, np.int32(-1)), row, sizes, offsets]


def _plan_moe(rows, avals, compute_capability, axis, *, num_experts, capacity, align, **_):
    return _native.modules["cpu"].plan_moe(rows[0], rows[1], num_experts, capacity, align, compute_capability)


moe_plan_p = Kernel(
    "moe_plan",
    results=lambda experts, *, axis, num_experts, capacity, align, room: [
        (room, np.int32),
        (experts.shape[axis], np.int32),
        (num_experts, np.int32),
        (num_experts + 1, np.int32),
    ],
    fallback=plan_fallback,
    accepts={np.dtype(np.int32)}.__contains__,
    attributes=("capacity", "align"),
    reindexes=True,
    plan=_plan_moe,
    leaves=lambda rows, avals, **_: _is_single(avals[0]),
    left=_plan_of_one,
)


# ---- There and back -------------------------------------------------------------------------------------------------


def _over_batch(fn, x, others, axis):
    """Maps ``fn`` over the batch. It gets x with the axis first and one dimension after it, and the others with the
    axis only."""
    batch, inner = x.shape[:axis], math.prod(x.shape[axis + 1 :])
    others = [jnp.broadcast_to(y.reshape(y.shape[: axis + 1]), (*batch, y.shape[axis])) for y in others]
    for _ in batch:
        fn = jax.vmap(fn)
    out = fn(x.reshape(*batch, x.shape[axis], inner), *others)
    return out.reshape(*batch, out.shape[axis], *(x.shape[axis + 1 :] if out.ndim > axis + 1 else ()))


def _dispatch_fallback(x, assignment_of_row, row_of_assignment, *weights, axis, choices):
    wide = _arguments.wide(x.dtype)

    def one(x, assignment, *weights):
        there, assignment = (assignment >= 0)[:, None], jnp.maximum(assignment, 0)
        rows = x[assignment // choices]
        if weights:
            rows = (weights[0][assignment][:, None].astype(wide) * rows.astype(wide)).astype(x.dtype)
        return jnp.where(there, rows, jnp.zeros((), x.dtype))

    if row_of_assignment.shape[axis] == 0:
        return (jnp.zeros((*x.shape[:axis], assignment_of_row.shape[axis], *x.shape[axis + 1 :]), x.dtype),)
    return (_over_batch(one, x, [assignment_of_row, *weights], axis),)


def _combine_fallback(y, row_of_assignment, assignment_of_row, *weights, axis, choices):
    wide = _arguments.wide(y.dtype)

    def one(y, row, *weights):
        tokens = row.shape[0] // choices
        there, row = (row >= 0).reshape(tokens, choices, 1), jnp.maximum(row, 0)
        rows = y.astype(wide)[row].reshape(tokens, choices, y.shape[1])
        if weights:
            rows = weights[0].reshape(tokens, choices, 1).astype(wide) * rows
        total = jnp.zeros((tokens, y.shape[1]), wide)
        for j in range(choices):
            total = total + jnp.where(there[:, j], rows[:, j], 0)
        return total.astype(y.dtype)

    if assignment_of_row.shape[axis] == 0:
        tokens = row_of_assignment.shape[axis] // choices
        return (jnp.zeros((*y.shape[:axis], tokens, *y.shape[axis + 1 :]), y.dtype),)
    return (_over_batch(one, y, [row_of_assignment, *weights], axis),)


def _kernel(name, results, fallback, row_of_assignment):
    """``row_of_assignment`` is the number of that operand."""
    return Kernel(
        name,
        results=results,
        fallback=fallback,
        accepts=(_arguments.FLOATS | _arguments.FLOATS8).__contains__,
        attributes=("choices",),
        reindexes=True,
        broadcasts=lambda count, **_: range(1, count),
        leaves=lambda rows, avals, **_: _is_single(avals[row_of_assignment]),
    )


moe_dispatch_p = _kernel(
    "moe_dispatch",
    lambda x, assignment_of_row, *_, axis, choices: [(assignment_of_row.shape[axis], x.dtype)],
    _dispatch_fallback,
    row_of_assignment=2,
)
moe_combine_p = _kernel(
    "moe_combine",
    lambda y, row_of_assignment, *_, axis, choices: [(row_of_assignment.shape[axis] // choices, y.dtype)],
    _combine_fallback,
    row_of_assignment=1,
)


def _own_rows(split, row_of_assignment):
    """Returns the row of each assignment, counted from the device's first row; -1 if the row is on another device."""
    own = row_of_assignment - split.start()
    return jnp.where((own >= 0) & (own < split.part), own, -1)


def _own_indices(splits, assignment_of_row, row_of_assignment, axis, choices):
    """Returns both indices for a device's rows and all assignments. If a device has the indices of only some tokens, it
    computes the others from the assignments of its rows, so no index is sent."""
    split, tokens = splits.get(axis), splits.get(assignment_of_row.ndim)
    if split:
        assignment_of_row = split.fill(assignment_of_row, axis, -1)
    if not tokens:
        return assignment_of_row, _own_rows(split, row_of_assignment) if split else row_of_assignment
    after = 1 + jax.lax.broadcasted_iota(np.int32, assignment_of_row.shape, axis)
    params = {"axis": axis, "length": tokens.length * choices, "along": None, "permutes": False, "drops": True}
    return assignment_of_row, put_along_axis_p.primitive.bind(after, assignment_of_row, **params)[0] - 1


def _dispatch_split(splits, x, *rest, axis, choices):
    """The axis is the one of rows. Tokens and weights are whole on every device, so each device fills its own rows."""
    indices, weights = _own_indices(splits, *rest[:2], axis, choices), rest[2:]
    return moe_dispatch_p.primitive.bind(x, *indices, *weights, axis=axis, choices=choices)


def _combine_split(splits, y, row_of_assignment, *rest, axis, choices):
    """Each device adds up the rows that it has, in wide dtype, and then the devices add up these sums."""
    if axis not in splits:  # only tokens are split: each device adds up the rows of its own tokens
        return moe_combine_p.primitive.bind(y, row_of_assignment, *rest, axis=axis, choices=choices)
    split = splits[axis]
    own, (assignment_of_row, *weights) = _own_rows(split, row_of_assignment), rest
    wide, *weights = (x.astype(_arguments.wide(y.dtype)) for x in (y, *weights))
    [total] = moe_combine_p.primitive.bind(wide, own, assignment_of_row, *weights, axis=axis, choices=choices)
    return (split.sum(total).astype(y.dtype),)


def _combine_pays(split, avals, *, axis, choices):
    y, row_of_assignment, *_ = avals
    sums = row_of_assignment.shape[axis] // choices * _arguments.wide(y.dtype).itemsize
    return sums < split.length * y.dtype.itemsize


def _plan_split(splits, experts, *, axis, num_experts, **params):
    """Each device plans for all tokens: their experts are gathered, in as few bytes as their numbers fit in."""
    split = splits[axis]
    experts = jnp.where((experts >= 0) & (experts < num_experts), experts, -1)
    experts = split.gather(experts.astype(np.int8 if num_experts <= 128 else np.int16), axis)
    experts = jax.lax.slice_in_dim(experts, 0, split.length, axis=axis).astype(np.int32)
    return moe_plan_p.primitive.bind(experts, axis=axis, num_experts=num_experts, **params)


# The split axis is that of rows. The axis of tokens may be split as well; then a device has the indices of its tokens
# only. It adds up the rows of these tokens, and computes the indices of other tokens from those of rows.
RULES["moe_plan"] = Rule(_plan_split)
RULES["moe_dispatch"] = lambda choices, **_: Rule(_dispatch_split, operands=(1,), keeps=True, free={2: choices})
RULES["moe_combine"] = lambda choices, **_: Rule(
    _combine_split, operands=(0, 2), pays=_combine_pays, free={1: choices, 3: choices, ~0: 1}
)


# ---- Derivatives ----------------------------------------------------------------------------------------------------


def weight_cotangent(tokens, rows, row_of_assignment, weights, axis, choices):
    """Returns for each assignment the dot product of its token and its row, in plain JAX, which reads each row once."""
    shape, wide = weights.shape, _arguments.wide(tokens.dtype)

    def one(tokens, rows, row):
        count = row.shape[0] // choices
        there, row = row >= 0, jnp.maximum(row, 0)
        picked = jnp.asarray(rows)[row].reshape(count, choices, rows.shape[1]).astype(wide)
        return jnp.where(there, (picked * tokens[:, None].astype(wide)).sum(-1).reshape(-1), 0)

    batch, inner = tokens.shape[:axis], math.prod(tokens.shape[axis + 1 :])
    row = jnp.broadcast_to(
        row_of_assignment.reshape(row_of_assignment.shape[: axis + 1]), (*batch, row_of_assignment.shape[axis])
    )
    if rows.shape[axis] == 0:
        return jnp.zeros(shape, weights.dtype)
    for _ in batch:
        one = jax.vmap(one)
    found = one(*(x.reshape(*batch, x.shape[axis], inner) for x in (tokens, rows)), row)
    lacking = tuple(d for d in range(axis) if shape[d] == 1 and batch[d] != 1)
    return found.sum(lacking, keepdims=True).reshape(shape).astype(weights.dtype)


def _combine_vjp_fallback(y, ct, row_of_assignment, assignment_of_row, weights, *, axis, choices):
    batch = (*y.shape[:axis], *weights.shape[axis:])
    dy = _dispatch_fallback(ct, assignment_of_row, row_of_assignment, weights, axis=axis, choices=choices)
    of_weights = jax.ShapeDtypeStruct(batch, weights.dtype)
    return *dy, weight_cotangent(ct, y, row_of_assignment, of_weights, axis, choices)


# Returns the cotangents of y and of the weights, given the cotangent of the tokens. The kernel reads each row of y
# once.
moe_combine_vjp_p = Kernel(
    "moe_combine_vjp",
    results=lambda y, ct, row_of_assignment, assignment_of_row, weights, *, axis, choices: [
        (y.shape[axis], y.dtype),
        (row_of_assignment.shape[axis], weights.dtype, (*range(axis + 1, y.ndim),)),
    ],
    fallback=_combine_vjp_fallback,
    accepts=(_arguments.FLOATS | _arguments.FLOATS8).__contains__,
    attributes=("choices",),
    reindexes=True,
    broadcasts=lambda count, **_: range(2, count),
)


def combine_vjp(y, ct, row_of_assignment, assignment_of_row, weights, axis, choices):
    """Returns the cotangents of y and of the weights, which may lack dimensions of the batch."""
    lacking = tuple(d for d in range(axis) if weights.shape[d] != y.shape[d])
    own = (
        weights.astype(_arguments.wide(y.dtype)) if lacking else weights
    )  # cotangents that are added up are not rounded
    dy, dw = moe_combine_vjp_p(y, ct, row_of_assignment, assignment_of_row, own, axis=axis, choices=choices)
    return dy, dw.sum(lacking, keepdims=True).astype(weights.dtype) if lacking else dw


def _combine_vjp_split(splits, y, ct, row_of_assignment, assignment_of_row, weights, *, axis, choices):
    """The axis is that of rows. Each device computes the cotangents of its own rows. The cotangents of weights are sums
    over rows and features, of which each device adds up its own, in wide dtype."""
    rows, tokens = splits.get(axis), splits.get(y.ndim)
    features, wide = tuple(range(axis + 1, y.ndim)), _arguments.wide(y.dtype)
    y, ct = (filled_axes(splits, x, features, 0) for x in (y, ct))
    indices = _own_indices(splits, assignment_of_row, row_of_assignment, axis, choices)
    params = {"axis": axis, "choices": choices}
    if tokens and choices == 1:  # weighted rows are exchanged, so weights need not be
        scaled = (weights.astype(wide) * ct.astype(wide)).astype(ct.dtype)
        dy = moe_dispatch_p.primitive.bind(tokens.gather(scaled, axis), *indices, **params)[0]
        row = _own_rows(rows, row_of_assignment) if rows else row_of_assignment
        of_weights = jax.ShapeDtypeStruct((*ct.shape[:axis], *row.shape[axis:]), wide)
        dw = weight_cotangent(ct, y, row, of_weights, **params)
    else:
        ct, every = (tokens.gather(x, axis) for x in (ct, weights)) if tokens else (ct, weights)
        dy, dw = moe_combine_vjp_p.primitive.bind(y, ct, *reversed(indices), every.astype(wide), **params)
        if tokens:
            dw = jax.lax.dynamic_slice_in_dim(dw, choices * tokens.start(), choices * tokens.part, axis)
    summed = (axis, *features)
    dw = all_axes(splits, summed).sum(dw) if any(d in splits for d in summed) else dw
    return dy, dw.astype(weights.dtype)


def _combine_vjp_pays(split, avals, *, axis, choices):
    y, _, row_of_assignment, *_ = avals
    inner = math.prod(y.shape[axis + 1 :])
    sums = row_of_assignment.shape[axis] * _arguments.wide(y.dtype).itemsize
    return sums < split.length * inner * y.dtype.itemsize


RULES["moe_combine_vjp"] = lambda choices, **_: Rule(
    _combine_vjp_split,
    operands=(0, 3),
    keeps=True,
    pays=_combine_vjp_pays,
    free={1: 1, 2: choices, 4: choices, ~1: choices},
)


def _typed_weight_cotangent(tokens, rows, row_of_assignment, aval, axis, choices):
    """Returns `weight_cotangent` with the type ``aval``, over an explicit mesh, too."""
    function = lambda *operands: weight_cotangent(*operands, aval, axis, choices)
    return like(as_automatic(function, aval.sharding.spec, tokens, rows, row_of_assignment), aval)


def _combine_vjp_jvp(outs, primals, tangents, *, axis, choices):
    y, ct, row_of_assignment, assignment_of_row, weights = primals
    scaled = lambda ct, w: moe_dispatch_p(ct, assignment_of_row, row_of_assignment, w, axis=axis, choices=choices)[0]
    dot = lambda ct, y: _typed_weight_cotangent(ct, y, row_of_assignment, jax.typeof(outs[1]), axis, choices)
    moved_y, moved_ct, moved_weights = (tangents[i] for i in (0, 1, 4))
    parts = [scaled(moved_ct, weights)] if moved_ct is not None else []
    parts += [scaled(ct, moved_weights)] if moved_weights is not None else []
    dots = [dot(moved_ct, y)] if moved_ct is not None else []
    dots += [dot(ct, moved_y)] if moved_y is not None else []
    total = lambda parts: sum(parts[1:], parts[0]) if parts else None
    return total(parts), total(dots)


def_jvp(moe_combine_vjp_p, _combine_vjp_jvp)

for _each in (moe_plan_p, moe_dispatch_p, moe_combine_p):
    batch_first(_each)
batch_first(moe_combine_vjp_p, always=True)


def _derivatives(kernel, other, pair):
    """Defines the derivatives of dispatch or combine. Both are linear in x and in the weights. ``pair(x, ct)`` returns
    the array of tokens and the array of rows."""

    def jvp(outs, primals, tangents, **params):
        x, first, second, *weights = primals
        parts = []
        if tangents[0] is not None:
            parts += kernel(tangents[0], first, second, *weights, **params)
        if weights and tangents[3] is not None:
            parts += kernel(x, first, second, tangents[3], **params)
        return (sum(parts[1:], parts[0]),)

    def transpose(cts, x, first, second, *weights, axis, choices):
        none = [None, None, None, *(None for _ in weights)]
        if isinstance(cts[0], ad.Zero):
            return none
        if ad.is_undefined_primal(x):
            [dx] = other(cts[0], second, first, *weights, axis=axis, choices=choices)
            return [like(dx, x.aval), *none[1:]]
        row_of_assignment = second if kernel is moe_dispatch_p else first
        tokens, rows = pair(x, cts[0])
        return [*none[:3], _typed_weight_cotangent(tokens, rows, row_of_assignment, weights[0].aval, axis, choices)]

    def_jvp(kernel, jvp)
    ad.primitive_transposes[kernel.primitive] = transpose


_derivatives(moe_dispatch_p, moe_combine_p, lambda x, ct: (x, ct))
_derivatives(moe_combine_p, moe_dispatch_p, lambda y, ct: (ct, y))
