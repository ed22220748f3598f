"""Problems: sorts and softmax of segments of an axis, top-k of padded rows."""

import jax
import jax.numpy as jnp

import jaxgpuops
from benchmarks.problems.problem import Problem, as_ordered, bytes_of, is_near, rounding_of


def _segment_of(offsets, n):
    """The number of the segment of each place, from 1 on; 0, or one more than there are segments, outside all
    segments."""
    return jnp.searchsorted(offsets, jax.lax.iota(jnp.int32, n), side="right")


def _within(offsets, x, key):
    """Puts x into the order of the key within each segment; elements of no segment stay."""
    ids = _segment_of(offsets, x.size)
    own = jnp.where((ids > 0) & (ids < offsets.size), key, jnp.zeros_like(key))
    return jax.lax.sort((ids, own, x), num_keys=2)[2]


def _exact_sums(terms, ids, count):
    """Sums of numbers from 0 to 1 as integers: in float64, ten thousand equal terms add up to errors of 2^-44."""
    high = jnp.floor(terms * 2.0**32)
    low = jnp.floor((terms * 2.0**32 - high) * 2.0**32)
    total = lambda part: jax.ops.segment_sum(part.astype(jnp.int64), ids, count).astype(jnp.float64)
    return (total(high) + total(low) / 2.0**32) / 2.0**32


def ragged(shape, axis, dtype, *, op="sort", count=1, k=1, **kwargs) -> Problem:
    """Sorts or softmax of segments (of all of shape[1], the same in all rows), or top-k of padded rows."""
    rows, n = shape
    offsets = (("offsets", (count + 1,), "int32"),)
    row_ids = ((f"ids below {count}", shape[1:], "int32"),)
    lengths = ((f"ids below {n + 1}", shape[:1], "int32"),)

    def same(x, y):  # -0 is +0
        ordered = lambda z: as_ordered(jnp.where(z == 0, jnp.zeros_like(z), z))
        return (ordered(x) == ordered(y)).all()

    def is_sorted(operands, results):
        [x, offsets], [y] = operands, results
        key = lambda row: as_ordered(jnp.where(row == 0, jnp.zeros_like(row), row))
        return same(y, jax.vmap(lambda row: _within(offsets, row, key(row)))(x))

    def is_selected(operands, results):
        [x, lengths], [values, indices] = operands, results
        own = jax.lax.iota(jnp.int32, n) < lengths[:, None]
        key = as_ordered(x)
        _, wanted = jax.lax.top_k(jnp.where(own, key, jnp.iinfo(key.dtype).min), k)
        there = jax.lax.iota(jnp.int32, k) < lengths[:, None]
        moved = same(jnp.where(there, values, 0), jnp.where(there, jnp.take_along_axis(x, wanted, 1), 0))
        return (indices == jnp.where(there, wanted, -1)).all() & moved

    def softmax_of(x, ids, sums=jax.ops.segment_sum):
        wide = x.T
        terms = jnp.exp(wide - jax.ops.segment_max(wide, ids, count)[ids])
        return (terms / sums(terms, ids, count)[ids]).T

    def is_softmax(operands, results):
        [x, ids], [y] = operands, results
        own, arithmetic = rounding_of(y.dtype)
        wanted = softmax_of(x.astype(jnp.float64), ids, _exact_sums)
        return is_near(y, wanted, (2 * own + 128 * arithmetic) * wanted + float(jnp.finfo(y.dtype).tiny))

    def masked(x, lengths):
        least = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
        return jax.lax.top_k(jnp.where(jax.lax.iota(jnp.int32, n) < lengths[:, None], x, least), k)

    ours, of_jax, right, others = {
        "sort": (
            lambda x, offsets: jaxgpuops.sort(x, offsets=offsets),
            lambda x, offsets: jax.vmap(lambda row: _within(offsets, row, row))(x),
            is_sorted,
            offsets,
        ),
        "topk": (lambda x, lengths: tuple(jaxgpuops.topk(x, k, lengths=lengths)), masked, is_selected, lengths),
        "softmax": (
            lambda x, ids: jaxgpuops.segment_softmax(x.T, ids, count).T,
            softmax_of,
            is_softmax,
            row_ids,
        ),
    }[op]
    size = bytes_of(shape, dtype)
    about = {"sort": f"sort of {count} segments", "topk": f"topk k={k} of lengths", "softmax": f"softmax {count}"}
    return Problem(
        "ragged",
        about[op],
        shape,
        1,
        dtype,
        size + (rows * k * (jnp.dtype(dtype).itemsize + 4) if op == "topk" else size),
        ours=ours,
        jax=of_jax,
        right=right,
        others=others,
        **kwargs,
    )
