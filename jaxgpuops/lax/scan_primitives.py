"""Cumulative operations and linear recurrences as primitives.

The derivative of each operation is a linear recurrence along the same axis, with factors that the forward pass knows.
It needs no division and no scatter, and its cost is not quadratic. So there are three kinds of kernels: the cumulative
operations, their derivatives as linear maps of a tangent (or, transposed, of a cotangent), and the linear recurrence,
by which all higher derivatives are expressed.

"Before" and "previous" refer to the direction of the scan. Segments begin where ``starts`` is True, in the order of the
array and for either direction. So the transpose of a scan is a scan in the other direction with the same segments.
"""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec

from jaxgpuops import _native
from jaxgpuops._arguments import COMPLEX, FLOATS, FLOATS8, INTEGERS, ORDERED_DTYPES, given, wide
from jaxgpuops._derivatives import def_jvp, def_jvp_by_fallback, sum_to, times
from jaxgpuops._primitive import Kernel, as_automatic, asks_partitioner, groups_after, is_unused
from jaxgpuops.lax.order import identity

# ---- What scans share -----------------------------------------------------------------------------------------------

SHORT = 3  # axes of up to so many positions are scanned in one expression


def _leaves(name, rows, avals, **_):
    """Whether XLA is faster on a GPU, as measured on an H200: it makes one loop of a scan along a short axis, its
    gradient, and what is around them. (Ours are faster at forward scans of 16-bit rows that they load as vectors:
    without h0 and segments, and with an a of the whole shape.) The choice does not depend on how many rows there are,
    so neither do the bits of floats.
    """
    _, length, inner = rows
    linear = name == "linear_scan"
    forward = (linear or (name in _FOLD and name != "cumlogsumexp")) and len(avals) == 1 + linear
    vectors = inner == 1 and avals[0].dtype.itemsize == 2 and avals[0].shape == avals[-1].shape
    return 0 < length <= SHORT and not (forward and vectors)


def _kernel(name, operands, *, results=1, broadcasts=(), shortest=4, make=Kernel, **kwargs):
    """Makes a kernel with this many operands, followed by h0 if the param ``initial`` is True, and then by starts if
    any."""

    def plan(
        rows, avals, compute_capability, axis, *, initial=False, exclusive=False, transpose=False, from_x=False, **_
    ):
        segmented = len(avals) > operands + initial
        call = name, *rows, avals[0].dtype.name, segmented, groups_after(avals, axis), compute_capability
        a = avals[1].shape if operands == 2 else avals[0].shape
        # From position to position, and from row to row, as the handler has them.
        stride = math.prod(a[axis + 1 :]) if a[axis] > 1 else 0
        of_row = math.prod(a[axis:]) if math.prod(a[:axis]) > 1 else 0
        options = {"exclusive": exclusive, "transpose": transpose, "initial": initial, "from_x": from_x}
        options |= {"dense": a == avals[0].shape, "a_axis_stride": stride, "a_outer_stride": of_row}
        return _native.modules["cpu"].plan_scan(*call, **options)

    return make(
        name,
        results=lambda x, *_, axis, **__: [(x.shape[axis], x.dtype)] * results,
        broadcasts=lambda count, initial=False, **_: (*broadcasts, *range(operands + initial, count)),
        shortest=shortest,
        plan=plan,
        leaves=functools.partial(_leaves, name),
        **kwargs,
    )


def _optional(rest, initial):
    """Returns h0 and starts (None if absent) from the operands after the required ones."""
    h0, *rest = rest if initial else (None, *rest)
    return h0, rest[0] if rest else None


def _wide(x):
    """Converts x to the dtype in which it is computed. None stays None."""
    if x is None:
        return None
    return x.astype(np.uint8 if x.dtype == np.dtype(bool) else wide(x.dtype))


def _first(x, axis, reverse):
    def first(x):
        at = x.shape[axis] - 1 if reverse else 0
        return lax.slice_in_dim(x, at, at + 1, axis=axis)

    return as_automatic(first, _spec_without(x, axis), x)


def _spec_without(x, axis):
    return PartitionSpec(*(None if d == axis else s for d, s in enumerate(jax.typeof(x).sharding.spec)))


def _shift(x, axis, by, fill):
    config = [(by, -by, 0) if d == axis else (0, 0, 0) for d in range(x.ndim)]
    shift = lambda x: lax.pad(x, np.array(fill, x.dtype), config)
    return as_automatic(shift, jax.typeof(x).sharding.spec, x)


def last(h, axis, reverse):
    """Returns the last element in the direction of the scan, without the axis."""
    return lax.squeeze(_first(h, axis, not reverse), (axis,))


# If the axis is split over devices, these formulas get the `Split`, and exchange the elements that are needed across
# the borders of parts.


def _cut(starts, axis, reverse, split=None):
    """Returns where nothing passes to a position from the previous one."""
    return _previous(starts, axis, True, False, split=split) if reverse else starts


def _previous(x, axis, reverse, fill, starts=None, split=None):
    """Returns the element at the previous position, or ``fill`` where there is none."""
    if split is None:
        before = _shift(x, axis, -1 if reverse else 1, fill)
    else:
        x = split.fill(x, axis, fill)
        border = split.from_previous(_first(x, axis, not reverse), reverse)
        border = jnp.where(split.is_first(reverse), np.array(fill, x.dtype), border)
        length = x.shape[axis]
        rest = lax.slice_in_dim(x, int(reverse), length - 1 + int(reverse), axis=axis)
        before = lax.concatenate([rest, border] if reverse else [border, rest], axis)
    return before if starts is None else jnp.where(_cut(starts, axis, reverse, split), np.array(fill, x.dtype), before)


def _at_first(x, axis, reverse, length, split=None):
    """Returns x, which has size 1 along the axis, at the first position, and zeros elsewhere."""
    if split is not None:
        shape = [length if d == axis else n for d, n in enumerate(x.shape)]
        is_first = split.positions(shape, axis) == (split.length - 1 if reverse else 0)
        return jnp.where(is_first, x, np.zeros((), x.dtype))
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (length - 1, 0, 0) if reverse else (0, length - 1, 0)
    return lax.pad(x, np.zeros((), x.dtype), config)


def _scan_in_turn(fold, operands, *, axis, reverse):
    """`lax.associative_scan` of a tuple of arrays along a short axis, one position after the other, of which XLA makes
    one loop."""

    def accumulated(*operands):
        each = range(operands[0].shape[axis])
        positions = [tuple(lax.slice_in_dim(x, i, i + 1, axis=axis) for x in operands) for i in each]
        folds = list(itertools.accumulate(reversed(positions) if reverse else positions, fold))
        folds = reversed(folds) if reverse else folds
        return tuple(lax.concatenate(each, axis) for each in zip(*folds, strict=True))

    return as_automatic(accumulated, tuple(jax.typeof(x).sharding.spec for x in operands), *operands)


# ---- Linear recurrences: h_k = a_k h_{k-1} + b_k ---------------------------------------------------------------------


def _linear_scan_fallback(b, a, *rest, axis, reverse, transpose, initial, accumulate=lax.associative_scan):
    h0, starts = _optional(rest, initial)
    if b.shape[axis] == 0:
        return (b,)
    dtype, b, a = b.dtype, _wide(b), _wide(a)
    if initial:  # h0 is added before segments cut, so that it reaches the first segment
        b = b + _at_first(times(_first(a, axis, reverse), _wide(h0)), axis, reverse, b.shape[axis])
    a = jnp.broadcast_to(a, b.shape)
    if transpose:
        a = _previous(a, axis, reverse, 0, starts)
    elif starts is not None:
        a = jnp.where(_cut(starts, axis, reverse), np.zeros((), a.dtype), a)

    def fold(before, after):  # steps are maps h -> a h + b
        (a1, b1), (a2, b2) = before, after
        return jnp.where(a2 == 0, a2, times(a1, a2)), jnp.where(a2 == 0, b2, a2 * b1 + b2)

    return (accumulate(fold, (a, b), axis=axis, reverse=reverse)[1].astype(dtype),)


linear_scan_p = _kernel(
    "linear_scan",
    2,
    fallback=_linear_scan_fallback,
    left=functools.partial(_linear_scan_fallback, accumulate=_scan_in_turn),
    accepts=(FLOATS | COMPLEX).__contains__,
    attributes=("reverse", "transpose", "initial"),
    broadcasts=(1,),
)


def _scan(b, a, starts, axis, reverse, transpose=False, split=None):
    """The recurrence without h0; transposed, h_k = a_{k-1} h_{k-1} + b_k."""
    operands = given(b, a, starts)
    params = {"axis": axis, "reverse": reverse, "transpose": transpose, "initial": False}
    return linear_scan_p(*operands, split=split, **params)[0]


def _previous_state(h, h0, starts, axis, reverse, split=None):
    """Returns h_{k-1}, which is h0 at the first position and 0 where a segment begins."""
    previous = _previous(h, axis, reverse, 0, starts, split)
    return previous if h0 is None else previous + _at_first(h0, axis, reverse, h.shape[axis], split)


def _linear_scan_vjp_fallback(g, a, h, *rest, axis, reverse, initial, split=None):
    h0, starts = _optional(rest, initial)
    db = _scan(_wide(g), _wide(a), starts, axis, not reverse, transpose=True, split=split)
    da = times(_previous_state(_wide(h), _wide(h0), starts, axis, reverse, split), db)
    return da.astype(g.dtype), db.astype(g.dtype)


# Returns the cotangents of a and b, given g, the cotangent of h.
linear_scan_vjp_p = _kernel(
    "linear_scan_vjp",
    3,
    results=2,
    fallback=_linear_scan_vjp_fallback,
    accepts=(FLOATS | COMPLEX).__contains__,
    attributes=("reverse", "initial"),
)


def _linear_scan_jvp_fallback(db, da, a, h, *rest, axis, reverse, initial, split=None):
    h0, starts = _optional(rest, initial)
    push = _wide(da) * _previous_state(_wide(h), _wide(h0), starts, axis, reverse, split)
    return (_scan((_wide(db) + push).astype(db.dtype), a, starts, axis, reverse, split=split),)


# The tangent of h, given the tangents of b and a. It is a primitive so that its transpose is one kernel.
linear_scan_jvp_p = _kernel(
    "linear_scan_jvp",
    4,
    fallback=_linear_scan_jvp_fallback,
    accepts=None,
    broadcasts=(1, 2, 3, 4),
)


def _pull_back(g, a, h, h0, starts, axis, reverse, shape, split=None):
    """Returns the cotangents of a, summed to ``shape``, and of b, given g, the cotangent of h. Other operands may
    broadcast against g."""
    if a.shape == h.shape == g.shape:
        if h0 is not None:
            h0 = jnp.broadcast_to(h0, (*g.shape[:axis], 1, *g.shape[axis + 1 :]))
        operands = given(g, a, h, h0, starts)
        da, db = linear_scan_vjp_p(*operands, axis=axis, reverse=reverse, initial=h0 is not None, split=split)
        return sum_to(da, shape), db
    db = _scan(g, a, starts, axis, not reverse, transpose=True, split=split)
    da = _wide(db) * _previous_state(_wide(h), _wide(h0), starts, axis, reverse, split)
    return sum_to(da, shape).astype(g.dtype), db


def linear_scan_cotangents(g, a, h, h0, starts, axis, reverse):
    """Returns the cotangents of a, b and h0 (None without h0), given g, the cotangent of h."""
    da, db = _pull_back(g, a, h, h0, starts, axis, reverse, a.shape)
    return da, db, None if h0 is None else _initial_cotangent(a, db, axis, reverse)


def _initial_cotangent(a, db, axis, reverse, split=None):
    ct = times(_first(a, axis, reverse), _first(db, axis, reverse))
    return ct if split is None else jnp.where(split.is_first(reverse), ct, np.zeros((), ct.dtype))


def _linear_scan_jvp(outs, primals, tangents, *, axis, reverse, transpose, initial, split=None):
    b, a, *rest = primals
    db, da, *dh0 = tangents[: 2 + initial]
    _, starts = _optional(rest, initial)
    dh0 = dh0[0] if dh0 else None
    if db is None:
        db = jnp.zeros_like(b)
    if da is None:
        params = {"axis": axis, "reverse": reverse, "transpose": transpose, "initial": dh0 is not None}
        return linear_scan_p(db, a, *given(dh0, starts), split=split, **params)
    if transpose:
        push = _previous(da * outs[0], axis, reverse, 0, starts, split)
        return [_scan(db + push, a, starts, axis, reverse, True, split)]
    if dh0 is not None:
        db = db + _at_first(_first(a, axis, reverse) * dh0, axis, reverse, b.shape[axis], split)
    return linear_scan_jvp_p(db, da, a, outs[0], *rest, axis=axis, reverse=reverse, initial=initial, split=split)


def _linear_scan_transpose(cts, b, a, *rest, axis, reverse, transpose, initial, split=None):
    h0, starts = _optional(rest, initial)
    [ct] = cts
    db = None if isinstance(ct, ad.Zero) else _scan(ct, a, starts, axis, not reverse, not transpose, split)
    out = [db if ad.is_undefined_primal(b) else None, *(None for _ in (a, *rest))]
    if ad.is_undefined_primal(h0) and db is not None:
        out[2] = _initial_cotangent(a, db, axis, reverse, split)
    return out


def _linear_scan_jvp_transpose(cts, db, da, a, h, *rest, axis, reverse, initial, split=None):
    h0, starts = _optional(rest, initial)
    [ct] = cts
    others = [None for _ in (a, h, *rest)]
    if isinstance(ct, ad.Zero):
        return [None, None, *others]
    ct_a, ct_b = _pull_back(ct, a, h, h0, starts, axis, reverse, da.aval.shape, split)
    return [ct_b if ad.is_undefined_primal(db) else None, ct_a, *others]


def_jvp(linear_scan_p, _linear_scan_jvp)
ad.primitive_transposes[linear_scan_p.primitive] = _linear_scan_transpose
ad.primitive_transposes[linear_scan_jvp_p.primitive] = _linear_scan_jvp_transpose


def_jvp_by_fallback(linear_scan_jvp_p)
def_jvp_by_fallback(linear_scan_vjp_p)


def _batch_linear_scan_vjp(operands, dims, **params):
    # If all of the batch shares a or h, this kernel would need expanded copies of it, and the recurrence alone does
    # not.
    if None not in dims[1:3]:
        return linear_scan_vjp_p._batch(operands, dims, **params)
    formula = functools.partial(_linear_scan_vjp_fallback, **params)
    return jax.vmap(formula, dims, 0)(*operands), (0, 0)


batching.primitive_batchers[linear_scan_vjp_p.primitive] = _batch_linear_scan_vjp

# ---- Derivatives of cumulative operations -----------------------------------------------------------------------------


def _factors(name, x, y, before):
    """Returns c and w of the derivative s_k = c_k s_{k-1} + w_k t_k of y, where ``before`` is the fold up to the
    previous position."""
    if name == "cumprod":
        return x, before
    if name == "cumlogsumexp":
        return _exp_difference(before, y), jnp.where(x == -np.inf, np.zeros((), x.dtype), _exp_difference(x, y))
    # Whether position k sets the running extreme; of equal elements, each sets it, so the last one counts.
    takes = (x == y) | jnp.isnan(x)
    return 1 - takes.astype(x.dtype), takes.astype(x.dtype)


def _exp_difference(a, b):
    """Returns e^(a - b), and 1 where a and b are the same infinity."""
    return jnp.exp(jnp.where((a == b) & jnp.isinf(a), np.zeros((), a.dtype), a - b))


def _tangent_fallback(name):
    def fallback(t, x, y, *starts, axis, reverse, exclusive, transpose, split=None):
        dtype, t, x, y = t.dtype, _wide(t), _wide(x), _wide(y)
        starts = starts[0] if starts else None
        if exclusive:
            y, before = _FOLD[name](y, x), y
        else:
            before = _previous(y, axis, reverse, _identity(name, y.dtype), starts, split)
        c, w = _factors(name, x, y, before)
        if not transpose:
            s = _scan(times(w, t), c, starts, axis, reverse, split=split)
            return ((_previous(s, axis, reverse, 0, starts, split) if exclusive else s).astype(dtype),)
        s = _scan(t, c, starts, axis, not reverse, transpose=not exclusive, split=split)
        if exclusive:
            s = _previous(s, axis, not reverse, 0, starts, split)
        return (times(w, s).astype(dtype),)

    return fallback


def _fold_in_turn(name, x, before):
    """Returns the fold up to a position, and `_factors` there, given the fold up to the previous position (None at the
    first). Of logsumexps, all three follow from one exponential.
    """
    identity = _identity(name, x.dtype)
    if name != "cumlogsumexp":
        y = x if before is None else _FOLD[name](before, x)
        return y, *_factors(name, x, y, jnp.full_like(x, identity) if before is None else before)
    zero, one = np.zeros((), x.dtype), np.ones((), x.dtype)
    if before is None:
        return x, None, jnp.where(x == -np.inf, zero, jnp.where(jnp.isnan(x), x, one))
    equal = (x == before) & jnp.isinf(x)
    apart = jnp.where(equal, zero, x - before)
    less = jnp.exp(-abs(apart))
    most = one / (one + less)
    c, w = jnp.where(apart > 0, less, one) * most, jnp.where(apart > 0, one, less) * most
    c, w = jnp.where(equal, one, c), jnp.where(x == -np.inf, zero, jnp.where(equal, one, w))
    return jnp.maximum(x, before) + jnp.log1p(less), c, w


def _tangent_in_turn(name):
    """Of a short axis, one position after the other: XLA makes one loop of it. It folds y again, which a kernel may
    compute, so that the loop waits for none."""

    def derivative(t, x, *starts, axis, reverse, exclusive, transpose):
        order = range(x.shape[axis])[:: -1 if reverse else 1]
        apart = lambda a: [lax.slice_in_dim(a, i, i + 1, axis=axis) for i in order]
        t, x = apart(t), apart(x)
        begins = [apart(a) for a in starts]
        if reverse:
            begins = [[None, *a[:-1]] for a in begins]

        def crossing(k, a, fill):
            """What passes from position k - 1 to k, or the other way: ``fill`` where a segment begins."""
            return jnp.where(begins[0][k], np.array(fill, a.dtype), a) if begins else a

        identity = _identity(name, x[0].dtype)
        y, c, w = ([each] for each in _fold_in_turn(name, x[0], None))
        for k in range(1, len(x)):
            for all_of, one in zip((y, c, w), _fold_in_turn(name, x[k], crossing(k, y[-1], identity)), strict=True):
                all_of.append(one)
        added = lambda k, s, b: jnp.where(c[k] == 0, b, c[k] * s + b)
        nothing, last = jnp.zeros_like(t[0]), len(t) - 1
        if transpose and exclusive:
            s = [nothing]
            for k in range(last, 0, -1):
                s.append(crossing(k, t[k] if k == last else added(k, s[-1], t[k]), 0))
        elif transpose:
            s = [t[last]]
            for k in range(last, 0, -1):
                s.append(t[k - 1] + crossing(k, added(k, s[-1], nothing), 0))
        else:
            s = [times(w[0], t[0])]
            for k in range(1, len(t)):
                s.append(times(w[k], t[k]) + crossing(k, added(k, s[-1], nothing), 0))
            s = [nothing, *(crossing(k, s[k - 1], 0) for k in range(1, len(s)))] if exclusive else s
        if transpose:
            s = list(map(times, w, reversed(s)))
        s = s[:: -1 if reverse else 1]
        # Of pairs, XLA's loop mostly takes less time if it chooses than if it concatenates: down to half for 16 bits.
        if len(s) == 2:
            shape = [2 if d == axis else n for d, n in enumerate(s[0].shape)]
            return jnp.where(lax.broadcasted_iota(np.int32, shape, axis) == 0, *s)
        return lax.concatenate(s, axis)

    def left(t, x, y, *starts, **params):
        s = as_automatic(
            functools.partial(derivative, **params), jax.typeof(x).sharding.spec, _wide(t), _wide(x), *starts
        )
        return (s.astype(t.dtype),)

    return left


class _Tangent(Kernel):
    """A tangent, whose operands are t, x and y.

    Where blocks have whole columns, the CUDA handler can make y of x. If nothing else needs y, or if there are few
    elements along a short axis, it does so: XLA then drops the kernel that would make y. The bits are those of the two
    kernels. Such calls have no ``starts``.
    """

    looks_at_uses = True

    def _lower(self, platform, ctx, *operands, axis, split=None, **params):
        if platform == "cuda" and split is None and len(operands) == 3 and not asks_partitioner(ctx):
            choice = self.choose(platform, ctx.avals_in, axis=axis, from_x=True, **params)
            if choice.kernel and (choice.plan["algorithm"] == "small" or is_unused(operands[2])):
                operands, ctx = operands[:2], ctx.replace(avals_in=ctx.avals_in[:2])
        return super()._lower(platform, ctx, *operands, axis=axis, split=split, **params)


def _tangent_kernel(name):
    kernel = _kernel(
        f"{name}_jvp",
        3,
        make=_Tangent,
        fallback=_tangent_fallback(name),
        left=_tangent_in_turn(name),
        accepts=(FLOATS | COMPLEX if name == "cumprod" else FLOATS).__contains__,
        attributes=("reverse", "exclusive", "transpose"),
    )

    def transpose_rule(cts, t, x, y, *starts, transpose, **params):
        others = [None for _ in (x, y, *starts)]
        if isinstance(cts[0], ad.Zero):
            return [None, *others]
        return [*kernel(cts[0], x, y, *starts, transpose=not transpose, **params), *others]

    ad.primitive_transposes[kernel.primitive] = transpose_rule
    def_jvp_by_fallback(kernel)
    return kernel


cumprod_jvp_p = _tangent_kernel("cumprod")
cummax_jvp_p = _tangent_kernel("cummax")
cummin_jvp_p = _tangent_kernel("cummin")
cumlogsumexp_jvp_p = _tangent_kernel("cumlogsumexp")

# ---- Cumulative operations --------------------------------------------------------------------------------------------


_FOLD = {"cumsum": lax.add, "cumprod": lax.mul, "cummax": lax.max, "cummin": lax.min, "cumlogsumexp": jnp.logaddexp}


def _identity(name, dtype):
    """Returns the first result of an exclusive scan."""
    if name in ("cummax", "cummin"):
        return identity(name.removeprefix("cum"), dtype)
    return {"cumsum": 0, "cumprod": 1, "cumlogsumexp": -np.inf}[name]


def _as_initial(name, x):
    """Converts to the dtype of h0: sums have more digits than elements."""
    return x if name in ("cummax", "cummin") and x.dtype != np.dtype(bool) else _wide(x)


def _cumulative_fallback(name):
    def fallback(x, *rest, axis, reverse, exclusive, initial=False, accumulate=lax.associative_scan):
        y = _wide(x)
        h0, starts = _optional(rest, initial)
        if initial:  # before segments cut, so that h0 reaches the first segment
            is_first = lax.broadcasted_iota(np.int32, y.shape, axis) == (y.shape[axis] - 1 if reverse else 0)
            h0 = h0.astype(y.dtype)
            y = jnp.where(is_first, _FOLD[name](jnp.broadcast_to(h0, y.shape), y), y)
        if starts is None and name == "cumlogsumexp" and accumulate is _scan_in_turn:
            [y] = accumulate(lambda before, after: (jnp.logaddexp(*before, *after),), (y,), axis=axis, reverse=reverse)
        elif starts is None:
            y = getattr(lax, name)(y, axis, reverse)
        else:

            def fold(before, after):
                (_, x), (begins, y) = before, after
                return before[0] | begins, jnp.where(begins, y, _FOLD[name](x, y))

            begins = jnp.broadcast_to(_cut(starts, axis, reverse), x.shape)
            y = accumulate(fold, (begins, y), axis=axis, reverse=reverse)[1]
        if exclusive:
            y = _previous(y, axis, reverse, _identity(name, x.dtype), starts)
            y = jnp.where(is_first, h0, y) if initial else y
        return (y.astype(x.dtype),)

    return fallback


# The dtypes of each operation are those of `jax.lax` on CPU, and bool where it makes sense.
CUMULATIVE_DTYPES = {
    "cumsum": INTEGERS | FLOATS | FLOATS8 | COMPLEX,
    "cumprod": INTEGERS | FLOATS | FLOATS8 | COMPLEX,
    "cummax": ORDERED_DTYPES,
    "cummin": ORDERED_DTYPES,
    "cumlogsumexp": FLOATS | FLOATS8,
}


def _cumulative_kernel(name, tangent_kernel=None):
    """Makes the kernel of a cumulative operation. Only the rule of a split axis calls it with h0, the fold of
    everything before the first position, and the param ``initial``."""
    kernel = _kernel(
        name,
        1,
        fallback=_cumulative_fallback(name),
        left=functools.partial(_cumulative_fallback(name), accumulate=_scan_in_turn),
        accepts=CUMULATIVE_DTYPES[name].__contains__,
        attributes=("reverse", "exclusive"),
        shortest=0 if name == "cumlogsumexp" else 3,  # XLA's logarithms are slower at any length
    )

    def jvp(outs, primals, tangents, **params):
        x, *starts = primals
        if tangent_kernel is None:
            return kernel(tangents[0], *starts, **params)
        return tangent_kernel(tangents[0], x, outs[0], *starts, transpose=False, **params)

    def_jvp(kernel, jvp)
    return kernel


cumsum_p = _cumulative_kernel("cumsum")
cumprod_p = _cumulative_kernel("cumprod", cumprod_jvp_p)
cummax_p = _cumulative_kernel("cummax", cummax_jvp_p)
cummin_p = _cumulative_kernel("cummin", cummin_jvp_p)
cumlogsumexp_p = _cumulative_kernel("cumlogsumexp", cumlogsumexp_jvp_p)


def _cumsum_transpose(cts, x, *starts, reverse, **params):
    others = [None for _ in starts]
    if isinstance(cts[0], ad.Zero):
        return [None, *others]
    return [*cumsum_p(cts[0], *starts, reverse=not reverse, **params), *others]


ad.primitive_transposes[cumsum_p.primitive] = _cumsum_transpose

TANGENT = {
    "cumprod": cumprod_jvp_p,
    "cummax": cummax_jvp_p,
    "cummin": cummin_jvp_p,
    "cumlogsumexp": cumlogsumexp_jvp_p,
}
CUMULATIVE = {
    "cumsum": cumsum_p,
    "cumprod": cumprod_p,
    "cummax": cummax_p,
    "cummin": cummin_p,
    "cumlogsumexp": cumlogsumexp_p,
}
