"""The rows of a mixture of experts: `jaxgpuops.moe_plan`, `moe_dispatch`, `moe_combine` and `moe_route`."""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple, overload

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxgpuops import _arguments
from jaxgpuops._arguments import AxisName
from jaxgpuops._primitive import align as aligned
from jaxgpuops._primitive import like
from jaxgpuops._split import manual
from jaxgpuops.lax._moe import (
    MAX_EXPERTS,
    combine_vjp,
    moe_combine_p,
    moe_dispatch_p,
    moe_plan_p,
    plan_fallback,
    rows_of,
)
from jaxgpuops.lax._segments import as_int32
from jaxgpuops.lax._topk_softmax import SCORES, SOFTMAX, Score, arguments, shares_of
from jaxgpuops.lax.along_axis import gathered
from jaxgpuops.ops.topk_softmax import gated


class RaggedSizes(NamedTuple):
    """The arguments of `jax.lax.ragged_all_to_all` after its two arrays, on one device; all int32 of shape
    ``(devices,)``.

    Attributes:
      input_offsets: where the rows that go to each device begin on this one.
      send_sizes: how many rows go to each device.
      output_offsets: where these rows begin on that device.
      recv_sizes: how many rows come from each device.
    """

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


class MoEExchange(NamedTuple):
    """How rows reach the devices of their experts and come back. Each device has equally many neighbouring experts.

    Attributes:
      there: the sizes for dispatched rows on their way to the experts.
      back: the sizes for the experts' answers on their way to the tokens.
      expert_ids: ``(room, 1)``, int32: the expert of each row that arrives on this device, counted from the device's
        first expert; -1 in unused rows. `moe_plan` makes of it the plan of this device's experts. There is room for any
        routing.
    """

    there: RaggedSizes
    back: RaggedSizes
    expert_ids: jax.Array


class MoEPlan(NamedTuple):
    """Which row each assignment of a token to an expert has, and what is in each row; all int32.

    Attributes:
      assignment_of_row: ``(*batch, rows)``: assignment ``token * k + choice`` of each row, -1 where there is none.
      row_of_assignment: ``(*batch, tokens, k)``: its inverse, -1 where an assignment is dropped.
      group_sizes: ``(*batch, num_experts)``: the assignments that each expert keeps.
      group_offsets: ``(*batch, num_experts + 1)``: the first row of each expert's group, and the end of the last.
      exchange: a `MoEExchange`; None without ``axis_name``.
    """

    assignment_of_row: jax.Array
    row_of_assignment: jax.Array
    group_sizes: jax.Array
    group_offsets: jax.Array
    # The type is not optional, since only callers who gave axis_name read it.
    exchange: MoEExchange = None  # pyright: ignore[reportAssignmentType]

    @property
    def token_of_row(self) -> jax.Array:
        """``(*batch, rows)``: the token of each row, -1 where there is none."""
        a = self.assignment_of_row
        return jnp.where(a >= 0, a // self.row_of_assignment.shape[-1], -1)


def moe_plan(
    expert_ids: ArrayLike,
    num_experts: int,
    *,
    capacity: int | None = None,
    align: int = 1,
    axis_name: AxisName = None,
) -> MoEPlan:
    """Where the rows of a mixture of experts go: in the order of experts, then of tokens, then of choices.

    Args:
      expert_ids: integers of shape ``(*batch, tokens, k)``: the experts that each token has chosen. Those out of range
        are dropped.
      num_experts: how many experts there are, static.
      capacity: how many assignments an expert keeps, the first ones; static. None: all.
      align: each group begins at a multiple of this many rows, as matrix kernels of tiles want it; static.
      axis_name: inside `jax.shard_map`, the mesh axis, or axes, over whose devices experts are split: the first device
        has the first ``num_experts / devices``. The plan is one of this device's tokens, with all experts, and its
        ``exchange`` says how its rows reach the experts. For it the devices exchange ``num_experts`` numbers each.
        ``align`` must be 1, and there are no batches: padding is for the plan that the experts' device makes.

    Returns:
      A `MoEPlan`. Its number of rows is static, enough for any routing: ``tokens * k`` with ``align=1``, else up to
      ``align - 1`` more for each expert.

    Exactly ``argsort(expert_ids.ravel(), stable=True)`` and ``bincount``: assignments of one expert keep their order,
    and the plan is the same in every run. One launch of a counting sort without atomics.

    Raises:
      TypeError: for ids that are not integers, and arguments that are not integers known at trace time.
      ValueError: for ids of fewer than two dimensions, ``num_experts`` or ``align`` below 1, ``capacity`` below 0, and
        2**31 rows or more; with ``axis_name``, for a name that is not of a `jax.shard_map` around the call, experts
        that devices cannot share evenly, batches, and ``align`` above 1.

    Algorithms: docs/moe.md.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> plan = jaxgpuops.moe_plan(jnp.array([[2, 0], [0, 1], [2, 1]]), 3)
    >>> plan.token_of_row.tolist(), plan.group_sizes.tolist()
    ([0, 1, 1, 2, 0, 2], [2, 2, 2])
    >>> plan.row_of_assignment.tolist()
    [[4, 0], [1, 2], [5, 3]]
    """
    return _checked_plan("jaxgpuops.moe_plan", expert_ids, num_experts, capacity, align, axis_name)


def _checked_plan(op, expert_ids, num_experts, capacity, align, axis_name):
    expert_ids = _arguments.labels(op, "expert_ids", expert_ids)
    _arguments.dtype(op, "expert_ids", expert_ids.dtype, _arguments.INTEGERS)
    if expert_ids.ndim < 2:
        raise ValueError(f"{op}: expert_ids must have shape (..., tokens, k), got {expert_ids.shape}")
    num_experts, align = _arguments.size(op, "num_experts", num_experts, 1), _arguments.size(op, "align", align, 1)
    capacity = -1 if capacity is None else _arguments.size(op, "capacity", capacity)
    split = manual(op, _arguments.names(op, axis_name), expert_ids.shape[-2])
    if split is None:
        return _plan(expert_ids, num_experts, capacity, align)
    if expert_ids.ndim != 2 or align != 1 or num_experts % split.shards:
        raise ValueError(
            f"{op}: with axis_name, expert_ids must have shape (tokens, k), align must be 1 and the {split.shards} devices "
            f"must divide num_experts; got {expert_ids.shape}, {align} and {num_experts}"
        )
    plan = _plan(expert_ids, num_experts, capacity, 1)
    return plan._replace(exchange=_exchange(plan, split, capacity))


def _exchange(plan, split, capacity):
    shards, here = split.shards, split.index()
    sizes = jax.lax.all_gather(plan.group_sizes, split.names).reshape(shards, shards, -1)  # indices: from, to, expert
    own = sizes.shape[-1]
    rows = sizes.sum(-1, dtype=np.int32)  # indices: from, to
    before = lambda x, axis: jnp.cumsum(x, axis, dtype=np.int32) - x
    starts, places = before(rows, 1), before(rows, 0)  # where rows begin on the device they are from, and go to
    there = RaggedSizes(starts[here], rows[here], places[here], rows[:, here])
    back = RaggedSizes(places[:, here], rows[:, here], starts[:, here], rows[here])
    # Rows come device after device, and expert after expert from each.
    ends = jnp.cumsum(sizes[:, here].reshape(-1), dtype=np.int32)
    room = rows_of(shards * plan.row_of_assignment.size, own, capacity if capacity < 0 else capacity * shards, 1)
    part = jnp.searchsorted(ends, jnp.arange(room, dtype=np.int32), side="right", method="compare_all")
    expert_ids = jnp.where(part < shards * own, part % own, -1).astype(np.int32)
    return MoEExchange(there, back, expert_ids[:, None])


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _plan(expert_ids, num_experts, capacity, align):
    *batch, tokens, choices = expert_ids.shape
    if not np.can_cast(expert_ids.dtype, np.int32):
        valid = (expert_ids >= 0) & (expert_ids < num_experts)
        expert_ids = jnp.where(valid, expert_ids, -1)
    experts = gathered(expert_ids.astype(np.int32), len(batch) + 1).reshape(*batch, tokens * choices)
    params = {"num_experts": num_experts, "capacity": capacity, "align": align}
    params["room"] = room = rows_of(tokens * choices, num_experts, capacity, align)
    if isinstance(room, int) and room >= 1 << 31:
        raise ValueError(
            f"jaxgpuops.moe_plan: rows are numbered by int32, so there must be fewer than 2**31; got {room} rows for "
            f"expert_ids of shape {expert_ids.shape}, num_experts={num_experts} and align={align}"
        )
    make = moe_plan_p if num_experts <= MAX_EXPERTS else plan_fallback
    assignment_of_row, row_of_assignment, sizes, offsets = make(experts, axis=experts.ndim - 1, **params)
    return MoEPlan(assignment_of_row, row_of_assignment.reshape(expert_ids.shape), sizes, offsets)


def _operands(op, name, x, plan, length, weights):
    """Returns x, indices and weights of one rank, and the axis of tokens or rows."""
    batch, axis = plan.assignment_of_row.shape[:-1], plan.assignment_of_row.ndim - 1
    _arguments.dtype(op, name, x.dtype, _arguments.FLOATS | _arguments.FLOATS8)
    if x.shape[: axis + 1] != (*batch, length):
        raise ValueError(
            f"{op}: {name} must have shape {(*batch, length)} and what follows, as plan says; got {x.shape}"
        )
    after = tuple(range(axis + 1, x.ndim))

    def entries(a):  # those of a token stand together
        a = a if a.ndim == axis + 1 else gathered(a, axis + 1)
        return jnp.expand_dims(a.reshape(*batch, math.prod(a.shape[axis:])), after)

    if weights is not None and not (weights.dtype == x.dtype and x.dtype.itemsize == 2):
        weights = weights.astype(_arguments.wide(x.dtype))
    more = [] if weights is None else [entries(weights)]
    return aligned(x, entries(plan.assignment_of_row), entries(plan.row_of_assignment), *more, apart=axis), axis


def _nothing(x, axis, lines):
    """Zeros for each of the lines: tokens that have chosen no experts, or rows of these."""
    return jnp.zeros((*x.shape[:axis], lines.shape[axis], *x.shape[axis + 1 :]), x.dtype)


def moe_dispatch(x: ArrayLike, plan: MoEPlan) -> jax.Array:
    """Tokens to the rows of their experts: ``out[row] = x[plan.token_of_row[row]]``, zeros where a row has none.

    Args:
      x: ``(*batch, tokens, *features)``, of a floating dtype.
      plan: as `moe_plan` makes it.

    Returns:
      ``(*batch, rows, *features)``: operands of `jax.lax.ragged_dot` with ``plan.group_sizes``, if ``align`` is 1.

    Elements are moved bit for bit, NaNs too. Each token is read once.

    Derivatives: the gradient of a token adds up the cotangents of its rows, in the order of its choices: a gather, not
    a scatter, with the same bits in every run. Reverse mode works, and whatever is built on top of it; forward mode
    raises TypeError.

    Raises:
      TypeError: for other dtypes, and a plan that is no `MoEPlan`.
      ValueError: where x and plan do not belong together.

    Algorithms: docs/moe.md.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> plan = jaxgpuops.moe_plan(jnp.array([[1], [0], [1]]), 2)
    >>> jaxgpuops.moe_dispatch(jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), plan).tolist()
    [[3.0, 4.0], [1.0, 2.0], [5.0, 6.0]]
    """
    op = "jaxgpuops.moe_dispatch"
    return _jitted_dispatch(_arguments.array(op, "x", x), _plan_of(op, plan))


def _plan_of(op, plan):
    """Checks what the kernels read of a plan."""
    if not isinstance(plan, MoEPlan):
        raise TypeError(f"{op}: plan must be a MoEPlan, as moe_plan makes it, got {plan!r}")
    rows, assignments = (
        _arguments.array(op, f"plan.{name}", getattr(plan, name)) for name in ("assignment_of_row", "row_of_assignment")
    )
    _arguments.dtype(op, "plan.assignment_of_row", rows.dtype, [np.dtype(np.int32)])
    _arguments.dtype(op, "plan.row_of_assignment", assignments.dtype, [np.dtype(np.int32)])
    if rows.ndim == 0 or assignments.ndim != rows.ndim + 1 or assignments.shape[:-2] != rows.shape[:-1]:
        raise ValueError(
            f"{op}: plan must have assignment_of_row of shape (*batch, rows) and row_of_assignment of shape (*batch, "
            f"tokens, k), got {rows.shape} and {assignments.shape}"
        )
    if jax.export.is_symbolic_dim(assignments.shape[-1]):
        raise ValueError(f"{op}: how many experts a token has must be known, got {assignments.shape[-1]}")
    return plan._replace(assignment_of_row=rows, row_of_assignment=assignments)


@functools.partial(jax.jit, inline=True)
def _jitted_dispatch(x, plan):
    tokens, choices = plan.row_of_assignment.shape[-2:]
    operands, axis = _operands("jaxgpuops.moe_dispatch", "x", x, plan, tokens, None)
    if choices == 0:
        return _nothing(x, axis, plan.assignment_of_row)
    return _dispatch(*operands, axis, choices, jax.typeof(operands[0]))


def _dispatched(x, assignment_of_row, row_of_assignment, axis, choices, aval):  # aval: of x, for the backward pass
    return moe_dispatch_p(x, assignment_of_row, row_of_assignment, axis=axis, choices=choices)[0]


_dispatch = jax.custom_vjp(_dispatched, nondiff_argnums=(3, 4, 5))


def _dispatch_forward(x, *rest):
    return _dispatched(x, *rest), rest[:2]


def _dispatch_backward(axis, choices, aval, indices, cotangent):
    assignment_of_row, row_of_assignment = indices
    [dx] = moe_combine_p(cotangent, row_of_assignment, assignment_of_row, axis=axis, choices=choices)
    return like(dx, aval), None, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


def moe_combine(y: ArrayLike, plan: MoEPlan, weights: ArrayLike | None = None) -> jax.Array:
    """Experts' rows back to their tokens: ``out[t] = sum_j weights[t, j] * y[plan.row_of_assignment[t, j]]``.

    Args:
      y: ``(*batch, rows, *features)``, of a floating dtype: what experts have made of dispatched rows.
      plan: as `moe_plan` makes it.
      weights: ``(*batch, tokens, k)``, floating: how much each choice counts. None: 1.

    Returns:
      ``(*batch, tokens, *features)``, of the dtype of y: sums in float32 (float64 of float64) in the order of choices,
      without atomics, so the same bits in every run. Dropped assignments add nothing; a NaN makes its feature of the
      token NaN.

    Derivatives: with respect to y and weights, both from one read of y. Reverse mode works, and whatever is built on
    top of it; forward mode raises TypeError.

    Raises:
      TypeError: for other dtypes, and a plan that is no `MoEPlan`.
      ValueError: where y, plan and weights do not belong together.

    Algorithms: docs/moe.md.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> plan = jaxgpuops.moe_plan(jnp.array([[1, 0], [0, 1]]), 2)
    >>> y = jnp.array([[1.0], [2.0], [30.0], [40.0]])
    >>> jaxgpuops.moe_combine(y, plan, jnp.array([[0.5, 0.5], [1.0, 0.0]])).tolist()
    [[15.5], [2.0]]
    """
    op = "jaxgpuops.moe_combine"
    y, weights = _arguments.array(op, "y", y), _arguments.optional(op, "weights", weights)
    plan = _plan_of(op, plan)
    if weights is not None:
        _arguments.dtype(op, "weights", weights.dtype, _arguments.FLOATS)
        if weights.shape != plan.row_of_assignment.shape:
            raise ValueError(
                f"{op}: weights must have the shape {plan.row_of_assignment.shape} of plan, got {weights.shape}"
            )
    return _jitted_combine(y, plan, weights)


@functools.partial(jax.jit, inline=True)
def _jitted_combine(y, plan, weights):
    choices, rows = plan.row_of_assignment.shape[-1], plan.assignment_of_row.shape[-1]
    operands, axis = _operands("jaxgpuops.moe_combine", "y", y, plan, rows, weights)
    if choices == 0:
        return _nothing(y, axis, plan.row_of_assignment)
    avals = tuple(jax.typeof(x) for x in (operands[0], operands[-1]))
    return _combine(*operands, *(() if len(operands) == 4 else (None,)), axis, choices, avals)


def _combined(y, assignment_of_row, row_of_assignment, weights, axis, choices, avals):  # avals: of y and weights
    more = _arguments.given(weights)
    return moe_combine_p(y, row_of_assignment, assignment_of_row, *more, axis=axis, choices=choices)[0]


_combine = jax.custom_vjp(_combined, nondiff_argnums=(4, 5, 6))


def _combine_forward(y, *rest):
    return _combined(y, *rest), (None if rest[2] is None else y, *rest[:3])


def _combine_backward(axis, choices, avals, residuals, cotangent):
    y, assignment_of_row, row_of_assignment, weights = residuals
    if weights is None:
        [dy] = moe_dispatch_p(cotangent, assignment_of_row, row_of_assignment, axis=axis, choices=choices)
        return like(dy, avals[0]), None, None, None
    dy, dw = combine_vjp(y, cotangent, row_of_assignment, assignment_of_row, weights, axis, choices)
    return like(dy, avals[0]), None, None, like(dw, avals[1])


_combine.defvjp(_combine_forward, _combine_backward)


class MoELosses(NamedTuple):
    """The auxiliary losses of a router, from `moe_losses`. A training loss adds them, multiplied by small factors.

    Attributes:
      load_balance: how uneven the load of the experts is; of shape ``batch``, float32 (float64 of float64).
      z: how large the logits are; of the same shape and dtype.
    """

    load_balance: jax.Array
    z: jax.Array


@overload
def moe_route(
    logits: ArrayLike,
    k: int,
    *,
    capacity: int | None = None,
    align: int = 1,
    normalize: bool = True,
    score: Score = "softmax",
    bias: ArrayLike | None = None,
    groups: int = 1,
    topk_groups: int | None = None,
    scale: ArrayLike | None = None,
    losses: Literal[False] = False,
    axis_name: AxisName = None,
) -> tuple[jax.Array, jax.Array, MoEPlan]: ...
@overload
def moe_route(
    logits: ArrayLike,
    k: int,
    *,
    capacity: int | None = None,
    align: int = 1,
    normalize: bool = True,
    score: Score = "softmax",
    bias: ArrayLike | None = None,
    groups: int = 1,
    topk_groups: int | None = None,
    scale: ArrayLike | None = None,
    losses: Literal[True],
    axis_name: AxisName = None,
) -> tuple[jax.Array, jax.Array, MoEPlan, MoELosses]: ...
def moe_route(
    logits: ArrayLike,
    k: int,
    *,
    capacity: int | None = None,
    align: int = 1,
    normalize: bool = True,
    score: Score = "softmax",
    bias: ArrayLike | None = None,
    groups: int = 1,
    topk_groups: int | None = None,
    scale: ArrayLike | None = None,
    losses: bool = False,
    axis_name: AxisName = None,
):
    """A gate and its plan: `topk_softmax` of logits ``(*batch, tokens, num_experts)``, then `moe_plan` of its choice.

    These are two kernels, with nothing between them.

    Args:
      logits, k, normalize, score, bias, groups, topk_groups, scale: as for `topk_softmax`.
      capacity, align: as for `moe_plan`.
      losses: whether to return the gate's `moe_losses`, too. Their log-sum-exps come from the gate's kernel, and counts
        from the plan, so that the logits are read only once more, to add up shares.
      axis_name: as for `moe_plan` and `moe_losses`: each device has some of the tokens, with the logits of all experts.

    Returns:
      ``(weights, expert_ids, plan)``: weights (of the dtype of the logits) and ids (int32) of shape ``(*batch, tokens,
      k)``, and a `MoEPlan`. With ``losses`` a fourth result, `MoELosses`. Gradients reach the logits through weights
      and losses.

    Ties, NaNs and bits: as for `topk_softmax` and `moe_plan`.

    Raises:
      TypeError, ValueError: as `topk_softmax` and `moe_plan`.

    Algorithms: as `topk_softmax` and `moe_plan`.

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> weights, ids, plan = jaxgpuops.moe_route(jnp.array([[0.0, 5.0, 5.0], [9.0, 0.0, 9.0]]), 2)
    >>> weights.tolist(), ids.tolist(), plan.group_sizes.tolist()
    ([[0.5, 0.5], [0.5, 0.5]], [[1, 2], [0, 2]], [1, 1, 2])
    """
    op = "jaxgpuops.moe_route"
    operands = arguments(op, logits, bias, scale, k, -1, None, score, normalize, groups, topk_groups)
    logits, options = operands[0], operands[-1]
    if logits.ndim < 2:
        raise ValueError(f"{op}: logits must have shape (..., tokens, experts), got {logits.shape}")
    losses = _arguments.flag(op, "losses", losses)
    weights, ids, *log_sum = gated(op, *operands[:-1], options._replace(log_sums=losses))
    plan = _checked_plan(op, ids, logits.shape[-1], capacity, align, axis_name)
    if not losses:
        return weights, ids, plan
    counts = plan.group_sizes if capacity is None else _counts(ids, logits.shape[-1])
    names = _arguments.names(op, axis_name)
    number, assignments = SCORES.index(options.score), max(math.prod(ids.shape[-2:]), 1)
    return weights, ids, plan, _losses(logits, counts, log_sum[0], assignments, number, op, names)


def moe_losses(
    logits: ArrayLike,
    expert_ids: ArrayLike,
    *,
    score: Score = "softmax",
    axis_name: AxisName = None,
) -> MoELosses:
    """The auxiliary losses of a gate: how uneven the load of its experts is, and how large its logits are.

    Args:
      logits: ``(*batch, tokens, num_experts)``, floating: what the gate has chosen from.
      expert_ids: integers of shape ``(*batch, tokens, k)``: what it has chosen. Those out of range do not count.
      score: the scores of that gate, as of `topk_softmax`.
      axis_name: inside `jax.shard_map`, the mesh axis, or axes, along which tokens are split: losses are those of the
        tokens of all devices, which exchange a number for each expert, and two.

    Returns:
      ``MoELosses(load_balance, z)`` of shape ``batch``, float32 (float64 of float64):

      - load_balance: ``num_experts * sum_e f[e] * p[e]``, where ``f[e]`` is the share of the assignments that expert e
        has, and ``p[e]`` the mean over tokens of its share of the token's scores. 1 where the load is even, and up to
        ``num_experts``, if one expert has all.
      - z: the mean over tokens of the square of the logits' log-sum-exp.

      Both are 0 where there are no tokens, and NaN if a logit is NaN.

    Gradients reach the logits, through ``p`` and z. This is plain JAX, which XLA fuses; `moe_route` gets most of it
    from its kernels.

    Raises:
      TypeError: for logits that are not floats, ids that are not integers.
      ValueError: for shapes that do not belong together, another ``score``.

    Load balance: Fedus et al., "Switch Transformers" (2022), with shares of scores as in DeepSeek-AI, "DeepSeek-V3
    technical report" (2024); z: Zoph et al., "ST-MoE" (2022).

    >>> import jax.numpy as jnp
    >>> import jaxgpuops
    >>> even = jaxgpuops.moe_losses(jnp.zeros((2, 4)), jnp.array([[0, 1], [2, 3]]))
    >>> float(even.load_balance), round(float(even.z), 3)
    (1.0, 1.922)
    >>> logits = jnp.array([[0.0, 100.0], [0.0, 100.0]])
    >>> jaxgpuops.moe_losses(logits, jnp.array([[1], [1]])).load_balance.tolist()
    2.0
    """
    op = "jaxgpuops.moe_losses"
    logits, ids = _arguments.array(op, "logits", logits), _arguments.labels(op, "expert_ids", expert_ids)
    _arguments.dtype(op, "logits", logits.dtype, _arguments.FLOATS)
    _arguments.dtype(op, "expert_ids", ids.dtype, _arguments.INTEGERS)
    if logits.ndim < 2 or ids.ndim != logits.ndim or ids.shape[:-1] != logits.shape[:-1]:
        raise ValueError(
            f"{op}: logits and expert_ids must have shapes (..., tokens, experts) and (..., tokens, k), got "
            f"{logits.shape} and {ids.shape}"
        )
    place = SCORES.index(_arguments.choice(op, "score", score, SCORES))
    return _losses(logits, _counts(ids, logits.shape[-1]), None, None, place, op, _arguments.names(op, axis_name))


def _counts(ids, experts):
    """Returns the number of assignments of each expert."""
    each = jax.lax.broadcasted_iota(np.int32, (*ids.shape, experts), ids.ndim)
    return (as_int32(ids, experts)[..., None] == each).sum((-3, -2))


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6), inline=True)
def _losses(logits, counts, log_sum, assignments, score, op, names):
    """Computes `moe_losses` from `counts`, the assignments of each expert that are of this device's tokens.
    ``assignments`` is their number if it is known, else None."""
    *batch, tokens, experts = logits.shape
    logits = logits.astype(_arguments.wide(logits.dtype))
    if tokens == 0 or experts == 0:
        nothing = jnp.zeros(batch, logits.dtype)
        return MoELosses(nothing, nothing)
    if log_sum is None:
        log_sum = jax.nn.logsumexp(logits, -1)
    own = score != SOFTMAX
    shares = shares_of(logits, logits.ndim - 1, score) if own else jnp.exp(logits - log_sum[..., None])
    counts, split = counts.astype(logits.dtype), manual(op, names, tokens)
    if split is not None:
        counts = split.sum(jax.lax.stop_gradient(counts))
    if assignments is None:
        assignments = jnp.maximum(counts.sum(-1), 1)[..., None]
    elif split is not None:
        assignments *= split.shards
    # The shares of each token are multiplied by the loads of the experts and added up, before tokens are added up. That
    # takes a sum of each row and one of the rows' results. The mean of the shares of each expert would take a sum of
    # columns, and then one more. The divisors of the means are multiplied in before the last sum.
    of_tokens = (counts[..., None, :] * shares).sum(-1)
    balance, z = (of_tokens * (experts / tokens / assignments)).sum(-1), (log_sum**2 / tokens).sum(-1)
    if split is not None:  # devices have equally many tokens, so the mean over all is the mean of their means
        balance, z = (split.sum(x) / split.shards for x in (balance, z))
    return MoELosses(balance, z)
