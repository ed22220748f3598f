"""Problems: the plan of a mixture of experts, and moving rows to the experts and back."""

import jax
import jax.numpy as jnp

import jaxgpuops
from benchmarks.problems.problem import Problem, bytes_of, is_near, rounding_of


def moe(shape, axis, dtype, *, experts, k, op="plan", **kwargs) -> Problem:
    """The plan for experts of shape (tokens, k); or tokens of shape (tokens, width) that are dispatched and
    combined."""
    tokens = shape[0]
    ids = ((f"ids below {experts}", (tokens, k), "int32"),)

    def rows_of(ids):
        return jnp.argsort(ids.ravel(), stable=True).astype(jnp.int32)

    def plan_of_jax(ids):
        order = rows_of(ids)
        inverse = jnp.zeros_like(order).at[order].set(jax.lax.iota(jnp.int32, order.size), unique_indices=True)
        sizes = jnp.bincount(ids.ravel(), length=experts).astype(jnp.int32)
        return order, inverse.reshape(ids.shape), sizes, jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes)])

    def is_plan(operands, results):
        wanted = plan_of_jax(*operands)
        return jnp.stack([(a == b).all() for a, b in zip(results, wanted, strict=True)]).all()

    if op == "plan":
        return Problem(
            "moe",
            f"moe_plan {experts}",
            (tokens, k),
            0,
            "int32",
            3 * bytes_of((tokens, k), "int32"),
            ours=lambda ids: tuple(jaxgpuops.moe_plan(ids, experts)),
            jax=plan_of_jax,
            right=is_plan,
            kind=ids[0][0],
            **kwargs,
        )

    def there_and_back(x, ids, weights):
        plan = jaxgpuops.moe_plan(ids, experts)
        rows = jaxgpuops.moe_dispatch(x, plan)
        return rows, jaxgpuops.moe_combine(rows, plan, weights)

    def of_jax(x, ids, weights):
        order, inverse, *_ = plan_of_jax(ids)
        rows = x[order // k]
        return rows, (rows[inverse] * weights[..., None]).sum(1).astype(x.dtype)

    def right(operands, results):
        [x, ids, weights], [rows, out] = operands, results
        own, arithmetic = rounding_of(x.dtype)
        wide, weights = x.astype(jnp.float64), weights.astype(jnp.float64)
        error = 2 * own * abs(weights.sum(1, keepdims=True)) + 64 * arithmetic * abs(weights).sum(1, keepdims=True)
        moved = (rows == x[rows_of(ids) // k]).all()
        return moved & is_near(
            out, wide * weights.sum(1, keepdims=True), error * abs(wide) + float(jnp.finfo(x.dtype).tiny)
        )

    return Problem(
        "moe",
        f"dispatch and combine {k} of {experts}",
        shape,
        0,
        dtype,
        (2 + 2 * k) * bytes_of(shape, dtype),
        ours=there_and_back,
        jax=of_jax,
        right=right,
        others=(*ids, ("decay", (tokens, k), dtype)),
        **kwargs,
    )
