"""Problems: softmax, cross-entropy, gates and reductions."""

import jax
import jax.numpy as jnp

import jaxgpuops
from benchmarks.problems.problem import Problem, bytes_of, is_near, rounding_of
from benchmarks.problems.selection import is_topk
from benchmarks.softmax import jax_cross_entropy, torch_cross_entropy

JAX_SOFTMAX = {"softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax, "logsumexp": jax.nn.logsumexp}


def _is_softmax(op, x, y, axis):
    own, arithmetic = rounding_of(y.dtype)
    wanted = JAX_SOFTMAX[op](x.astype(jnp.float64), axis)
    relative = 2 * own + 128 * arithmetic
    if op == "softmax":
        return is_near(y, wanted, relative * wanted + float(jnp.finfo(y.dtype).tiny))
    return is_near(y, wanted, relative * (1 + abs(wanted)))


def _is_reduction(op, x, y, axis):
    if op in ("max", "min"):
        return (y == getattr(x, op)(axis)).all()
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return (y == x.sum(axis, dtype=y.dtype)).all()
    own, arithmetic = rounding_of(y.dtype)
    wide = x.astype(jnp.float64)
    return is_near(
        y, getattr(wide, op)(axis), own * abs(getattr(wide, op)(axis)) + 64 * arithmetic * getattr(abs(wide), op)(axis)
    )


def _is_cross_entropy(x, labels, loss, gradient):
    own, arithmetic = rounding_of(x.dtype)
    wide, rows = x.astype(jnp.float64), x.shape[0]
    logarithms = jax.nn.log_softmax(wide, 1)
    wanted = -jnp.take_along_axis(logarithms, labels[:, None], 1).mean()
    hit = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) == labels[:, None]
    p = jnp.exp(logarithms)
    tolerance = (2 * own + 128 * arithmetic) * (p + hit) / rows + float(jnp.finfo(x.dtype).tiny)
    return is_near(loss, wanted, (2 * own + 128 * arithmetic) * (1 + wanted)) & is_near(
        gradient, (p - hit) / rows, tolerance
    )


def _is_gate(x, weights, experts):
    own, arithmetic = rounding_of(weights.dtype)
    values = jnp.take_along_axis(x, experts, 1)
    wanted = jax.nn.softmax(values.astype(jnp.float64), 1)
    right = is_near(weights, wanted, (2 * own + 128 * arithmetic) * wanted + float(jnp.finfo(weights.dtype).tiny))
    return right & is_topk(x, values, experts, 1, True, True)


def softmax(shape, axis, dtype, *, op="softmax", **kwargs) -> Problem:
    size = bytes_of(shape, dtype)
    return Problem(
        "softmax",
        op,
        shape,
        axis,
        dtype,
        size + (size // shape[axis] if op == "logsumexp" else size),
        ours=lambda x: getattr(jaxgpuops, op)(x, axis=axis),
        jax=lambda x: JAX_SOFTMAX[op](x, axis),
        torch=lambda x: getattr(x, op)(axis),
        right=lambda operands, results: _is_softmax(op, *operands, *results, axis),
        **kwargs,
    )


def ce(shape, axis, dtype, **kwargs) -> Problem:
    """The mean cross-entropy and its gradient."""

    def of_torch(x, labels):
        import torch

        x = x.detach().requires_grad_()
        loss = torch_cross_entropy(x, labels)
        return torch.autograd.grad(loss, x)[0], loss.detach()

    def of_jax(loss):
        return lambda x, labels: jax.value_and_grad(loss)(x, labels)

    return Problem(
        "ce",
        "cross-entropy and gradient",
        shape,
        axis,
        dtype,
        2 * bytes_of(shape, dtype),
        ours=of_jax(lambda x, labels: jaxgpuops.softmax_cross_entropy(x, labels, reduction="mean")),
        jax=of_jax(lambda x, labels: jax_cross_entropy(x, labels).mean()),
        torch=of_torch,
        right=lambda operands, results: _is_cross_entropy(*operands, *results),
        others=(("labels", shape[:1], "int32"),),
        **kwargs,
    )


def gate(shape, axis, dtype, *, k, **kwargs) -> Problem:
    def of_jax(x):
        values, experts = jax.lax.top_k(x, k)
        return jax.nn.softmax(values.astype(jnp.float32)), experts

    def of_torch(x):
        values, experts = x.topk(k)
        return values.float().softmax(-1), experts

    return Problem(
        "gate",
        f"topk_softmax k={k}",
        shape,
        axis,
        dtype,
        bytes_of(shape, dtype) + shape[0] * k * (jnp.dtype(dtype).itemsize + 4),
        ours=lambda x: tuple(jaxgpuops.topk_softmax(x, k)),
        jax=of_jax,
        torch=of_torch,
        right=lambda operands, results: _is_gate(*operands, *results),
        **kwargs,
    )


def reduce(shape, axis, dtype, *, op="sum", **kwargs) -> Problem:
    def of_torch(x):
        return x.sum(axis, dtype=x.dtype) if op == "sum" else {"max": x.amax, "min": x.amin, "mean": x.mean}[op](axis)

    def of_jax(x):
        return x.sum(axis, dtype=x.dtype) if op == "sum" else getattr(x, op)(axis)

    return Problem(
        "reduce",
        op,
        shape,
        axis,
        dtype,
        bytes_of(shape, dtype) + bytes_of(shape, dtype) // shape[axis],
        ours=lambda x: getattr(jaxgpuops, op)(x, axis=axis),
        jax=of_jax,
        torch=of_torch,
        right=lambda operands, results: _is_reduction(op, *operands, *results, axis),
        **kwargs,
    )
