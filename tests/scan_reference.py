"""Scans in NumPy: loops along the axis in the widest type there is, with bounds on what rounding may do to the
result."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from reference import is_float

import jaxgpuops

# Shapes for "any array" of the ops whose results are checked by what rounding may do.
SHAPES = st.one_of(
    st.tuples(st.integers(1, 300)),
    st.tuples(st.integers(1, 40), st.integers(1, 200)),
    st.tuples(st.integers(1, 6), st.integers(1, 60), st.integers(1, 40)),
    st.tuples(*[st.integers(1, 5)] * 4),
    st.tuples(st.integers(1, 3), st.integers(1000, 3000)),
)


def wide(dtype):
    """The type in which the reference computes."""
    dtype = np.dtype(dtype)
    if dtype.kind == "c":
        return np.dtype(np.clongdouble)
    return np.dtype(np.longdouble) if is_float(dtype) else dtype


def eps(dtype):
    """Unit of rounding of the type in which an op computes: float32 for narrower floats."""
    dtype = np.dtype(dtype)
    return float(np.finfo(dtype if dtype.itemsize >= 4 else np.float32).eps)


def rounding(dtype, values):
    """The error of the last rounding, to a float of 8 or 16 bits; 0 for other types."""
    dtype = np.dtype(dtype)
    if dtype.itemsize >= 4:
        return 0.0
    info = ml_dtypes.finfo(dtype)
    return np.abs(values) * float(info.eps) + float(info.smallest_subnormal)


def identity(name, dtype):
    """The first result of an exclusive scan."""
    dtype = np.dtype(dtype)
    if name in ("cumsum", "cumprod"):
        return dtype.type(name == "cumprod")
    if name == "cumlogsumexp":
        return -np.inf
    largest = name == "cummin"
    if dtype == bool:
        return np.bool_(largest)
    if not is_float(dtype):
        return np.iinfo(dtype).max if largest else np.iinfo(dtype).min
    infinity = np.array(np.inf if largest else -np.inf, dtype)
    return ml_dtypes.finfo(dtype).max * (1 if largest else -1) if np.isnan(infinity) else infinity


FOLD = {
    "cumsum": np.add,
    "cumprod": np.multiply,
    "cummax": np.maximum,
    "cummin": np.minimum,
    "cumlogsumexp": np.logaddexp,
}


def positions(n, reverse):
    return range(n)[:: -1 if reverse else 1]


def begins(starts, k, reverse):
    """Whether nothing passes to position k from the one before it in the direction of the scan."""
    if starts is None:
        return False
    if not reverse:
        return starts[k]
    return starts[k + 1] if k + 1 < len(starts) else False


def along(axis, shape, *arrays):
    """Arrays broadcast to a shape, with the axis first; None stays."""
    return [None if x is None else np.moveaxis(np.broadcast_to(x, shape), axis, 0) for x in arrays]


def cumulative(name, x, axis=-1, reverse=False, exclusive=False, starts=None):
    x = np.asarray(x)
    first = identity(name, x.dtype)
    rows, starts = along(axis, x.shape, x.astype(wide(x.dtype)), starts)
    out = np.empty_like(rows)
    y = np.full(rows.shape[1:], first, rows.dtype)
    with np.errstate(all="ignore"):
        for k in positions(len(rows), reverse):
            y = np.where(begins(starts, k, reverse), np.array(first, rows.dtype), y)
            if exclusive:
                out[k] = y
            y = FOLD[name](y, rows[k])
            if not exclusive:
                out[k] = y
    return np.moveaxis(out, 0, axis)


def linear(a, b, h0=None, axis=-1, reverse=False, starts=None):
    """h0 has the shape of the result without the axis."""
    shape = np.broadcast_shapes(np.shape(a), np.shape(b))
    dtype = wide(np.result_type(np.asarray(a).dtype, np.asarray(b).dtype))
    axis %= len(shape)
    a, b, starts = along(axis, shape, np.asarray(a, dtype), np.asarray(b, dtype), starts)
    if b.size == len(b) > 1000 and starts is None:
        return _one_long_row(a.ravel(), b.ravel(), h0, reverse).reshape(shape)
    out = np.empty(b.shape, dtype)
    h = np.zeros(b.shape[1:], dtype) if h0 is None else np.broadcast_to(np.asarray(h0, dtype), b.shape[1:])
    with np.errstate(all="ignore"):
        for i, k in enumerate(positions(len(b), reverse)):
            reset = (a[k] == 0) | (begins(starts, k, reverse) & (i > 0))
            h = np.where(reset, b[k], a[k] * h + b[k])
            out[k] = h
    return np.moveaxis(out, 0, axis)


def _one_long_row(a, b, h0, reverse):
    """The reference for one long row. It computes in Python's own floats, which is faster where no steps can be
    vectorised."""
    h, out, step = 0.0 if h0 is None else float(np.squeeze(h0)), [], -1 if reverse else 1
    for x, y in zip(a[::step].tolist(), b[::step].tolist(), strict=True):
        h = x * h + y if x else y
        out.append(h)
    return np.array(out[::step], a.dtype)


def cumulative_bound(name, x, axis=-1, reverse=False, exclusive=False, starts=None):
    """How far any order of folding in the op's own arithmetic may be from `cumulative`.

    A sum of n terms, in any order: each term goes through at most n - 1 additions, so it is off by a factor of
    1 + n eps. A product is off by that factor too (complex ones by 4 times as much). A logarithm of a sum is off by
    eps relative to the largest value on its way for each of n steps, and by n eps more from the sum itself; the factor
    4 is for exp and log, which are not correctly rounded.
    """
    x = np.asarray(x)
    n = x.shape[axis]
    flags = (axis, reverse, exclusive, starts)
    y = cumulative(name, x, *flags)
    if name in ("cummax", "cummin") or not is_float(x.dtype):
        return 0.0
    unit = n * eps(x.dtype)
    with np.errstate(all="ignore"):
        if name == "cumsum":
            bound = unit * cumulative("cumsum", np.abs(x), *flags)
        elif name == "cumprod":
            bound = unit * np.abs(y) * (4 if x.dtype.kind == "c" else 1)
        else:
            largest = np.max(np.abs(np.where(np.isfinite(y), y, 0)), axis, keepdims=True, initial=0)
            bound = 4 * unit * (1 + largest)
        return bound + rounding(x.dtype, y)


def linear_bound(a, b, h0=None, axis=-1, reverse=False, starts=None):
    """The bound of `cumulative_bound` for a recurrence: each term goes through at most n products and n sums."""
    h = linear(np.abs(a), np.abs(b), None if h0 is None else np.abs(h0), axis, reverse, starts)
    dtype = np.result_type(np.asarray(a).dtype, np.asarray(b).dtype)
    return 2 * h.shape[axis] * eps(dtype) * h * (4 if dtype.kind == "c" else 1) + rounding(dtype, h)


def leaks(shape, axis, dtype):
    """Returns the calls in which NaNs or infinities pass a start, or a factor of 0, with the direction they take.

    The results of positions from the start on must have the same bits whatever comes before. So must the gradients of
    positions before the start, whatever the operands and the cotangents are from there on.
    """
    length = shape[axis]
    position = np.arange(length).reshape([length if i == axis else 1 for i in range(len(shape))])
    at = 2 * length // 3
    scans = {
        name: lambda starts, x, name=name: getattr(jaxgpuops, name)(x, axis=axis, segment_starts=starts)
        for name in ("cumsum", "cumprod", "cummax", "cumlogsumexp")
    }
    scans["linear_scan of segments"] = lambda starts, b, a: jaxgpuops.linear_scan(
        a, b, axis=axis, segment_starts=starts
    )
    scans["linear_scan with a factor of 0"] = lambda starts, b, a: jaxgpuops.linear_scan(
        jnp.where(starts, jnp.zeros((), a.dtype), a), b, axis=axis
    )

    # The masks are arguments: XLA would take long to fold constants of this size.
    @functools.partial(jax.jit, static_argnums=0)
    def differences(scan, starts, earlier, bad, g, *operands):
        def values(bad):
            return [jnp.where(earlier, 0, scan(starts, *(jnp.where(earlier, bad, x) for x in operands)))]

        def gradients(bad):
            g_, *operands_ = (jnp.where(earlier, x, bad) for x in (g, *operands))
            pull = jax.vjp(functools.partial(scan, starts), *operands_)[1]
            return [jnp.where(earlier, x, 0) for x in pull(g_)]

        def differ(fn):
            zero = jnp.zeros_like(bad)
            bits = [
                [jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") for x in fn(v)] for v in (bad, zero)
            ]
            return jnp.stack([(x != y).any() for x, y in zip(*bits, strict=True)]).any()

        return {"values": differ(values), "gradients": differ(gradients)}

    g, *operands = (jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(length), 3))
    return [
        (name, direction, bad)
        for bad in (np.nan, np.inf, -np.inf)
        for name, scan in scans.items()
        for direction, wrong in differences(
            scan, position == at, position < at, jnp.asarray(bad, dtype), g, *operands[: 1 + name.startswith("linear")]
        ).items()
        if wrong
    ]
