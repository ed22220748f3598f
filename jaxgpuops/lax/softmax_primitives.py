"""Softmax and its logarithm as primitives, and what logsumexp_primitives.py and cross_entropy_primitives.py share with
them.

All are functions of logits ``z = factor * scale * x + bias``, where ``scale`` and ``bias`` are optional and broadcast,
and of a mask. An entry is masked where ``where`` is False and, in a causal call, where its position along the axis is
after the index of its query, which is that along the dimension ``query_axis``. A masked entry has no influence,
whatever its value.

The derivatives are kernels, which are linear in a tangent and can be transposed.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxgpuops import _arguments, _native, _partition
from jaxgpuops._arguments import FLOATS, given
from jaxgpuops._derivatives import def_jvp, def_jvp_by_fallback, sum_to
from jaxgpuops._primitive import LEFT, Kernel, asks_partitioner, is_unused
from jaxgpuops.lax import _pairs

# ---- Logits -----------------------------------------------------------------------------------------------------------


# Rows of up to so many numbers are left to XLA on a GPU: softmax and log_softmax of pairs, log-sum-exps of SHORT
# numbers. Each is one expression of a row, so the order of additions is fixed, and XLA fuses it with the operations
# around it.
SHORT = 8
# Log-sum-exps of float32 columns of up to SHORT_COLUMN numbers are left to XLA, too, if at least BESIDE columns lie
# side by side.
SHORT_COLUMN, BESIDE = 16, 16


def _is_short(shape, axis, dtype):
    """Whether the log-sum-exp is written as one expression of a row, or column."""
    length, *after = shape[axis:]
    if not all(isinstance(n, int) for n in (length, *after)):
        return False
    inner = math.prod(after)
    return 1 < length <= (SHORT if inner == 1 else SHORT_COLUMN if dtype == np.float32 and inner >= BESIDE else 0)


def _leaves_pairs(rows, avals, *, factor=1.0, scaled=False, biased=False, masked=False, query_axis=None, **_):
    return rows[1] == _pairs.PAIR and not (factor != 1 or scaled or biased or masked or query_axis is not None)


def _leaves_short(rows, avals, **params):
    plain = _leaves_pairs((1, _pairs.PAIR, 1), avals, **params)
    return plain and _is_short(rows, 1, avals[0].dtype)


def _kernel(name, operands, *, plan=True, shortest=2, make=Kernel, **kwargs):
    """Makes a kernel with this many operands that do not broadcast, which optional operands follow.

    XLA can simplify operations on rows of one element, except their logarithms, whose kernels have ``shortest=0``.
    """

    def plan_softmax(
        rows,
        avals,
        compute_capability,
        axis,
        *,
        factor=1.0,
        scaled=False,
        biased=False,
        masked=False,
        query_axis=None,
        transpose=False,
        of_logits=False,
        **_,
    ):
        if name == "cross_entropy_grad" and rows[1] == 0:  # the kernel takes it that there is nothing to write
            return {"algorithm": "none"}
        options = factor, scaled, biased, masked or query_axis is not None
        dtype = avals[0].dtype.name
        plan = _native.modules["cpu"].plan_softmax
        return plan(name, *rows, dtype, *options, compute_capability, transpose=transpose, of_logits=of_logits)

    return make(
        name,
        broadcasts=lambda count, of_logits=False, **_: range(operands + of_logits, count),
        plan=plan_softmax if plan else None,
        shortest=shortest,
        **kwargs,
    )


def _like_first(x, *_, axis, **__):
    return [(x.shape[axis], x.dtype)]


def _optional(rest, *present):
    """Returns the optional operands, with None for those that are not ``present``."""
    rest = iter(rest)
    return [next(rest) if p else None for p in present]


def wide(x: jax.Array) -> jax.Array:
    return x.astype(_arguments.wide(x.dtype))


def _position(shape, axis, split=None):
    return lax.broadcasted_iota(np.int32, shape, axis) if split is None else split.positions(shape, axis)


def _sum(x, axis, split):
    """Sums rows, also over the devices that have parts of them. What pads their parts is not counted."""
    return jnp.sum(x, axis) if split is None else split.sum(jnp.sum(split.fill(x, axis, 0), axis))


def _mask(where, shape, axis, query_axis, split=None):
    """Returns where entries count, in a shape that broadcasts against ``shape``, or None if all entries count."""
    if query_axis is None:
        return where
    dims = [n if d in (axis, query_axis) else 1 for d, n in enumerate(shape)]
    causal = _position(dims, axis, split) <= _position(dims, query_axis)
    return causal if where is None else where & causal


def _where(mask, x, fill):
    return x if mask is None else jnp.where(mask, x, np.array(fill, x.dtype))


def _logits(x, scale, bias, mask, factor):
    """Returns the logits z, with -inf where masked, in the dtype in which they are computed."""
    z = wide(_where(mask, x, 0))
    if scale is not None:
        z = z * (np.array(factor, z.dtype) * scale)
    elif factor != 1:
        z = z * np.array(factor, z.dtype)
    if bias is not None:
        z = z + wide(bias)
    return _where(mask, z, -np.inf)


def _maximum(z, axis):
    """Returns the maximum of each row as a constant (-inf for an empty row), and the same with 0 where it is not
    finite."""
    m = lax.stop_gradient(jnp.max(z, axis, keepdims=True, initial=-np.inf))
    return m, jnp.where(jnp.isfinite(m), m, np.zeros((), m.dtype))


def _below(z, m):
    """Returns z - m for z <= m, which is exactly 0 where they are equal.

    Without the correction it might not be: XLA may compute z again where it is used, and fuse the product in z with the
    subtraction. The difference would then be the rounding error of z, which is large for large numbers.
    """
    d = z - m
    return d - lax.stop_gradient(jnp.where(z == m, d, np.zeros((), d.dtype)))


def _log_sum(z, m, axis):
    """Returns log(sum of e^(z - m)), accurate to the last digit even if the largest element is almost all of the
    sum."""
    d, largest = _below(z, m), z == m
    e = jnp.exp(d)
    count = jnp.sum(largest, axis, dtype=z.dtype, keepdims=True)
    rest = jnp.sum(jnp.where(largest, jnp.expm1(d), e), axis, keepdims=True) + (count - 1)
    return jnp.where(jnp.isfinite(rest) & (count > 0), jnp.log1p(rest), jnp.log(jnp.sum(e, axis, keepdims=True)))


def _call(x, rest, axis, factor, scaled, biased, masked, query_axis, split=None):
    """Returns the logits and the mask of a call."""
    scale, bias, where = _optional(rest, scaled, biased, masked)
    mask = _mask(where, x.shape, axis, query_axis, split)
    return _logits(x, scale, bias, mask, factor), mask


def or_zero(p: jax.Array, x: jax.Array) -> jax.Array:
    """Returns ``p * x``, and 0 where p is 0, whatever x is."""
    return p * jnp.where(p == 0, np.zeros((), x.dtype), x)


# ---- Derivatives of softmax and log_softmax ---------------------------------------------------------------------------
# Where a probability p is near 1, the sum of the other probabilities stands for 1 - p, which rounding would lose. An
# entry is likely if p is above 0.75, and not a half, since rounded logarithms can give two probabilities above a half.


def _is_likely(p):
    return p > 0.75


def _relative(t, p, axis):
    """Subtracts the tangent of the likely entry, if there is one, from all tangents. That changes their mean by as
    much."""
    most = _pairs.row_sum(jnp.where(_is_likely(p), t, np.zeros((), t.dtype)), axis)
    return t - most


def _times(y, factor, scale):
    y = y if factor == 1 else y * np.array(factor, y.dtype)
    return y if scale is None else y * scale


def _is_loose(aval, axis):
    """Whether rows are not whole vectors, and long enough for loose_rows.cu."""
    length, *columns = aval.shape[axis:]
    if aval.dtype.itemsize == 8 or not isinstance(length, int) or any(n != 1 for n in columns):
        return False
    row = length * aval.dtype.itemsize
    return row % 16 != 0 and 512 < row <= 28 << 10


class _Derivative(Kernel):
    """A derivative of y = softmax(x) or log_softmax(x), whose operands are a tangent or cotangent, and y.

    A call without a scale and a mask may have the param ``of_logits``, and x as a last operand. The CUDA handler may
    then be given x in the place of y, and computes y itself: if nothing else needs y, XLA drops the kernel that made
    it. Where the handler is given y, x is left out. A function that is left to XLA has both.
    """

    looks_at_uses = True
    # Where something else needs y, x would stay in memory until the backward pass, too, so it is taken in arrays of up
    # to so many bytes. The shortest rows are seldom scores of attention, of which a program has many arrays.
    _MOST_BYTES, _MOST_BYTES_OF_SHORT = 16 << 20, 128 << 20

    def _lower(self, platform, ctx, *operands, axis, of_logits=False, **params):
        if of_logits:
            unused = is_unused(operands[1])
            kept = self._kept(platform, ctx.avals_in, asks_partitioner(ctx), axis, unused, **params)
            operands, ctx = [operands[i] for i in kept], ctx.replace(avals_in=[ctx.avals_in[i] for i in kept])
            params |= {"of_logits": True} if 2 in kept else {}
        return super()._lower(platform, ctx, *operands, axis=axis, **params)

    def _kept(self, platform, avals, partitioned, axis, unused, **params):
        """Returns which of the operands t, y and x are needed."""
        if platform != "cuda":
            return 0, 1
        choice = self.choose(platform, avals[:2], axis=axis, of_logits=True, **params)
        if choice.why == LEFT and not partitioned:
            return 0, 1, 2
        if choice.kernel is None or not self._takes_x(choice, avals[0], partitioned, unused):
            return 0, 1
        # Where XLA splits the call, devices that have parts of rows need y.
        return (0, 1, 2) if partitioned and not _partition.missing else (0, 2)

    def _takes_x(self, choice, aval, partitioned, unused):
        # A row or columns too long to be held are read once before their maximum and sum are known, so that the bits
        # are not those of a gradient made from y. The choice must then not depend on the batch: it holds for arrays of
        # any size, split over devices or not.
        # The same holds for columns of few positions, whose sums are added up in another order.
        if choice.plan["algorithm"] in ("rows_split", "columns_flat", "columns_walk", "small"):
            return True
        # The same holds for the rows that loose_rows.cu takes. There, x is not kept if something else needs y anyway: such
        # arrays are large.
        if _is_loose(aval, choice.params["axis"]):
            return unused
        size, row = math.prod(aval.shape) * aval.dtype.itemsize, aval.shape[choice.params["axis"]] * aval.dtype.itemsize
        is_short = row <= 32 or (row <= 64 and row % 16 == 0)
        most = self._MOST_BYTES_OF_SHORT if is_short else self._MOST_BYTES
        return not partitioned and (unused or not (jax.export.is_symbolic_dim(size) or size > most))

    def _custom_call(self, ctx, operands, choice, *, of_logits=False, **params):
        return super()._custom_call(ctx, operands, choice, of_logits=of_logits, **params)


class _DerivativeOfLogs(_Derivative):
    """That of log_softmax. Programs mostly read its result once, at labels, so x stays in memory in its place: x is
    taken in arrays of any size.
    """

    def _takes_x(self, choice, aval, partitioned, unused):
        loose = _is_loose(aval, choice.params["axis"])
        return not partitioned or loose or super()._takes_x(choice, aval, partitioned, unused)


def _softmax_jvp_fallback(t, y, *rest, axis, factor, scaled, of_logits=False):
    dtype, t, y, scale = t.dtype, wide(t), wide(y), () if of_logits else rest
    t = _relative(jnp.where(y == 0, np.zeros((), t.dtype), t), y, axis)
    out = or_zero(y, t - _pairs.row_sum(or_zero(y, t), axis))
    return (_times(out, factor, *_optional(scale, scaled)).astype(dtype),)


def _softmax_jvp_left(t, y, *rest, axis, of_logits=False, **params):
    """The gradient of pairs is made of x: the probabilities cost less than y, which XLA then need not make.

    XLA compiles the chain of reductions of rows to one kernel, which reads each element once.
    """
    if not of_logits:
        return _softmax_jvp_fallback(t, y, *rest, axis=axis, of_logits=of_logits, **params)
    if _pairs.has_elementwise_gradient(t, axis):
        p, q = _pairs.probabilities(wide(rest[-1]), axis)
        slope, own, other = p * q, wide(t), _pairs.other(wide(t), axis)
        return ((or_zero(slope, own) - or_zero(slope, other)).astype(t.dtype),)
    _, e = _pairs.below_larger(wide(rest[-1]), axis)
    slope, sign = e / ((1 + e) * (1 + e)), np.array([1, -1], e.dtype)
    own = jnp.where(slope == 0, np.zeros((), e.dtype), wide(t))
    return ((sign * slope * jnp.sum(sign * own, axis, keepdims=True)).astype(t.dtype),)


# The tangent of y, given the tangent of x. The map is its own transpose.
softmax_jvp_p = _kernel(
    "softmax_jvp",
    2,
    results=_like_first,
    fallback=_softmax_jvp_fallback,
    left=_softmax_jvp_left,
    accepts=FLOATS.__contains__,
    attributes=("factor", "scaled", "of_logits"),
    leaves=_leaves_pairs,
    make=_Derivative,
)


def _log_softmax_jvp_fallback(t, y, *rest, axis, factor, scaled, masked, query_axis, transpose, of_logits=False):
    dtype, t, y = t.dtype, wide(t), wide(y)
    scale, where = _optional(rest, scaled, masked)
    mask = _mask(where, t.shape, axis, query_axis)
    t, p = _where(mask, t, 0), _where(mask, jnp.exp(y), 0)
    zero = np.zeros((), t.dtype)
    if transpose and _pairs.are_pairs(t, axis):
        # The sum of a row's result is 0. So that of the likely entry is the negative of the other one.
        likely = _is_likely(p)
        others = jnp.where(likely, zero, t - p * _pairs.row_sum(t, axis))
        out = others - jnp.where(likely, _pairs.row_sum(others, axis), zero)
    elif transpose:
        likely = _is_likely(p)
        total, others, q = (
            _pairs.row_sum(a, axis) for a in (t, jnp.where(likely, zero, t), jnp.where(likely, zero, p))
        )
        out = jnp.where(likely, q * total - others, t - p * total)
    else:
        t = _relative(t, p, axis)
        out = t - _pairs.row_sum(or_zero(p, t), axis)
    return (_where(mask, _times(out, factor, scale), 0).astype(dtype),)


def _log_softmax_jvp_left(t, y, *rest, axis, transpose, of_logits=False, **params):
    """The gradient of pairs is made of x. With p the probability of t's logit, and q that of the other one, it is q t
    minus the same of the other one.

    XLA compiles the chain of reductions of rows to one kernel, but several if y is in it.
    """
    if not (transpose and of_logits):
        return _log_softmax_jvp_fallback(t, y, *rest, axis=axis, transpose=transpose, of_logits=of_logits, **params)
    if _pairs.has_elementwise_gradient(t, axis):
        p, q = _pairs.probabilities(wide(rest[-1]), axis)
        return ((q * wide(t) - p * _pairs.other(wide(t), axis)).astype(t.dtype),)
    d, e = _pairs.below_larger(wide(rest[-1]), axis)
    q = jnp.where(d < 0, np.ones((), d.dtype), e) / (1 + e)
    sign = np.array([1, -1], d.dtype)
    return ((sign * jnp.sum(sign * wide(t) * q, axis, keepdims=True)).astype(t.dtype),)


# The tangent of y, given the tangent of x; transposed, the cotangent of x, given the cotangent of y.
log_softmax_jvp_p = _kernel(
    "log_softmax_jvp",
    2,
    results=_like_first,
    fallback=_log_softmax_jvp_fallback,
    left=_log_softmax_jvp_left,
    accepts=FLOATS.__contains__,
    attributes=("factor", "scaled", "masked", "transpose", "of_logits"),
    dimensions=("query_axis",),
    leaves=_leaves_pairs,
    make=_DerivativeOfLogs,
)


def _def_transpose(kernel, transposed):
    """Defines the transpose of a kernel that is linear in its first operand: ``transposed(cts, aval, *others,
    **params)`` returns the cotangent of that operand."""

    def rule(cts, t, *others, **params):
        nothing = [None for _ in others]
        if all(isinstance(ct, ad.Zero) for ct in cts):
            return [None, *nothing]
        return [transposed(cts, t.aval, *others, **params), *nothing]

    ad.primitive_transposes[kernel.primitive] = rule
    def_jvp_by_fallback(kernel)


_def_transpose(softmax_jvp_p, lambda cts, aval, *others, **params: softmax_jvp_p(*cts, *others, **params)[0])
_def_transpose(
    log_softmax_jvp_p,
    lambda cts, aval, *others, transpose, **params: log_softmax_jvp_p(*cts, *others, transpose=not transpose, **params)[
        0
    ],
)


def _finite(x):
    """Returns x in wide dtype with 0 for infinities and NaNs, as the derivative with respect to the scale needs it.

    Where an infinity or NaN would count, the row is NaN anyway, or the probability is 0.
    """
    return jnp.where(jnp.isfinite(x), wide(x), np.zeros((), _arguments.wide(x.dtype)))


def _tangent(primals, tangents, factor, scaled, biased, masked):
    """Returns t, scale (or None) and factor, such that the tangent of the logits is factor * scale * t."""
    x, *rest = primals
    tx, *trest = tangents
    scale, *_ = _optional(rest, scaled, biased, masked)
    tscale, tbias, _ = _optional(trest, scaled, biased, masked)
    if tscale is None and tbias is None:
        return tx, scale, factor
    terms = []
    if tx is not None:
        terms.append(_times(wide(tx), factor, scale))
    if tscale is not None:
        terms.append(_times(_finite(x), factor, tscale))
    if tbias is not None:
        terms.append(wide(tbias))
    return jnp.broadcast_to(functools.reduce(jnp.add, terms), x.shape).astype(x.dtype), None, 1.0


def logit_cotangents(dz, x, scale, bias, factor):
    """Returns the cotangents of x, scale and bias (None for operands that are None), given that of the logits in wide
    dtype."""
    dx = _times(dz, factor, scale).astype(x.dtype)
    dscale = None if scale is None else sum_to(_times(dz * _finite(x), factor, None), scale.shape)
    return dx, dscale, None if bias is None else sum_to(dz, bias.shape).astype(bias.dtype)


# ---- Softmax and log_softmax ------------------------------------------------------------------------------------------

_LOGITS = {"attributes": ("factor", "scaled", "biased", "masked"), "dimensions": ("query_axis",)}


def _softmax_fallback(x, *rest, axis, **logits):
    z, mask = _call(x, rest, axis, **logits)
    # Numbers of 64 bits are faster elementwise.
    if _pairs.are_rows(x, rest, axis, **logits) and mask is None and x.dtype.itemsize < 8:
        d, e = _pairs.below_larger(z, axis)
        return ((jnp.where(d < 0, e, np.ones((), d.dtype)) / (1 + e)).astype(x.dtype),)
    if _pairs.are_pairs(x, axis) and mask is None:
        y = 1 / (1 + jnp.exp(_pairs.other(z, axis) - z))
        return ((y + _pairs.nan_if_infinite(z, axis)).astype(x.dtype),)
    e = _where(mask, jnp.exp(_below(z, _maximum(z, axis)[0])), 0)
    return (_where(mask, e / jnp.sum(e, axis, keepdims=True), 0).astype(x.dtype),)


softmax_p = _kernel(
    "softmax",
    1,
    results=_like_first,
    fallback=_softmax_fallback,
    accepts=FLOATS.__contains__,
    leaves=_leaves_pairs,
    **_LOGITS,
)


def _log_softmax_fallback(x, *rest, axis, **logits):
    z, mask = _call(x, rest, axis, **logits)
    if _pairs.are_rows(x, rest, axis, **logits) and mask is None:
        d, rest = _pairs.below_larger(z, axis)
        return ((d - jnp.log1p(rest)).astype(x.dtype),)
    if _pairs.are_pairs(x, axis) and mask is None:
        d = _pairs.other(z, axis) - z
        y = -(jnp.maximum(d, 0) + _pairs.log1p(jnp.exp(-abs(d)), x.dtype))
        return ((y + _pairs.nan_if_infinite(z, axis)).astype(x.dtype),)
    m, _ = _maximum(z, axis)
    return (_where(mask, _below(z, m) - _log_sum(z, m, axis), -np.inf).astype(x.dtype),)


log_softmax_p = _kernel(
    "log_softmax",
    1,
    shortest=0,
    results=_like_first,
    fallback=_log_softmax_fallback,
    accepts=FLOATS.__contains__,
    leaves=_leaves_pairs,
    **_LOGITS,
)


def _softmax_jvp(outs, primals, tangents, *, axis, factor, scaled, biased, masked, query_axis, split=None):
    t, scale, factor = _tangent(primals, tangents, factor, scaled, biased, masked)
    return softmax_jvp_p(*given(t, outs[0], scale), axis=axis, factor=factor, scaled=scale is not None, split=split)


def _log_softmax_jvp(outs, primals, tangents, *, axis, factor, scaled, biased, masked, query_axis, split=None):
    t, scale, factor = _tangent(primals, tangents, factor, scaled, biased, masked)
    *_, where = _optional(primals[1:], scaled, biased, masked)
    params = {"axis": axis, "factor": factor, "scaled": scale is not None, "masked": masked, "query_axis": query_axis}
    return log_softmax_jvp_p(*given(t, outs[0], scale, where), transpose=False, split=split, **params)


def_jvp(softmax_p, _softmax_jvp)
def_jvp(log_softmax_p, _log_softmax_jvp)


def bind(kernel, operands, axis, factor, query_axis, split=None, **params):
    """Returns the results of softmax, log_softmax or logsumexp for operands (x, scale, bias, where)."""
    _, scale, bias, where = operands
    flags = {"scaled": scale is not None, "biased": bias is not None, "masked": where is not None}
    return kernel(*given(*operands), axis=axis, factor=factor, query_axis=query_axis, split=split, **flags, **params)
