"""Problems: counts in bins, and reductions of segments."""

import jax
import jax.numpy as jnp

import jaxgpuops
from benchmarks.problems.problem import Problem, bytes_of, is_near, rounding_of


def _is_count(x, counts):
    bins = jax.lax.broadcasted_iota(jnp.int32, counts.shape, 1)
    ordered = jnp.sort(x, 1)
    below = jax.vmap(lambda row, b: jnp.searchsorted(row, b, side="right") - jnp.searchsorted(row, b))
    return (counts == below(ordered, bins)).all()


def _is_segments(op, x, ids, y):
    reduce = getattr(jax.ops, op)
    if op != "segment_sum" or not jnp.issubdtype(x.dtype, jnp.floating):
        wide = x.astype(jnp.int64) if op == "segment_sum" else x  # quick where many meet at one address
        return (y == reduce(wide, ids, y.shape[0]).astype(y.dtype)).all()
    own, arithmetic = rounding_of(y.dtype)
    wanted, sizes = (reduce(z.astype(jnp.float64), ids, y.shape[0]) for z in (x, abs(x)))
    return is_near(y, wanted, own * abs(wanted) + 64 * arithmetic * sizes)


def count(shape, axis, dtype, *, op="segment_sum", bins, **kwargs) -> Problem:
    """Counts in rows of int32 ids, or reductions of segments whose ids are in no order."""
    if op == "bincount":
        return Problem(
            "count",
            f"bincount {bins}",
            shape,
            1,
            "int32",
            bytes_of(shape, "int32") + shape[0] * bins * 4,
            ours=lambda x: jaxgpuops.bincount(x, bins),
            jax=jax.vmap(lambda x: jnp.bincount(x, length=bins)),
            torch=(lambda x: x[0].bincount(minlength=bins)) if shape[0] == 1 else None,
            right=lambda operands, results: _is_count(*operands, *results),
            kind=f"ids below {bins}",
            **kwargs,
        )

    # XLA adds narrow numbers by compare-and-swap, torch those of 8 bits. Where many meet at one address, one run takes
    # seconds to minutes and cannot be interrupted.
    crowded = op == "segment_sum" and shape[0] // bins > 1 << 14
    size = jnp.dtype(dtype).itemsize

    def of_torch(x, ids):
        import torch

        if op == "segment_sum":
            return torch.zeros(bins, *x.shape[1:], dtype=x.dtype, device=x.device).index_add_(0, ids, x)
        start = torch.full((bins, *x.shape[1:]), 0, dtype=x.dtype, device=x.device)
        return start.index_reduce_(0, ids, x, "amax" if op == "segment_max" else "amin", include_self=False)

    return Problem(
        "count",
        f"{op} {bins}",
        shape,
        0,
        dtype,
        bytes_of(shape, dtype) + bytes_of((bins, *shape[1:]), dtype) + shape[0] * 4,
        ours=lambda x, ids: getattr(jaxgpuops, op)(x, ids, bins),
        jax=None if crowded and size < 4 else lambda x, ids: getattr(jax.ops, op)(x, ids, bins),
        torch=None if crowded and size == 1 else of_torch,
        right=lambda operands, results: _is_segments(op, *operands, *results),
        others=((f"ids below {bins}", shape[:1], "int32"),),
        **kwargs,
    )
