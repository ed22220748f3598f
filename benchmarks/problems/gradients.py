"""Problems: functions and their gradients."""

import jax
import jax.numpy as jnp

import jaxgpuops
from benchmarks.problems.problem import Problem, bytes_of, rounding_of
from benchmarks.problems.rows import JAX_SOFTMAX
from benchmarks.scan import associative_scan


def _is_gradient(op, function, axis):
    def right(operands, results):
        x, cotangent = operands
        result = results[0].astype(jnp.float64)
        wide = cotangent.astype(jnp.float64)
        own, arithmetic = rounding_of(x.dtype)
        if op == "cummax":  # ties may share a cotangent as they like
            wanted, result = wide.sum(axis), result.sum(axis)
            scale = abs(wide).sum(axis)
        else:
            wanted = jax.vjp(function, x.astype(jnp.float64))[1](wide)[0]
            scale = abs(wanted).max() + 1
        beyond = ~(abs(wanted) < 0.99 * float(jnp.finfo(x.dtype).max))
        # The derivative of a product is made of products of up to so many factors, each rounded.
        roundings = 1024 + (x.shape[axis] if op == "cumprod" else 0)
        return ((abs(result - wanted) <= (16 * own + roundings * arithmetic) * scale) | beyond).all()

    return right


# How many times the array a function and its gradient move.
MOVED = {"topk": 1, "cumsum": 2, "cumprod": 4, "cummax": 3, "cumlogsumexp": 4, "linear_scan": 2, "logsumexp": 2}


def grad(shape, axis, dtype, *, op, k=None, **kwargs) -> Problem:
    """A function and its gradient, in one program."""

    def decays(x):
        return jnp.full(x.shape, 0.9, x.dtype)

    ours, of_jax = {
        "topk": (
            lambda x: jaxgpuops.topk(x, k, axis=axis).values,
            lambda x: jax.lax.top_k(x, k, axis=axis)[0],
        ),
        "linear_scan": (
            lambda x: jaxgpuops.linear_scan(jnp.asarray(0.9, x.dtype), x, axis=axis),
            lambda x: associative_scan(decays(x), x, axis),
        ),
    }.get(op) or (
        lambda x: getattr(jaxgpuops, op)(x, axis=axis),
        lambda x: JAX_SOFTMAX[op](x, axis) if op in JAX_SOFTMAX else getattr(jax.lax, op)(x, axis=axis),
    )

    def gradient(function):
        return lambda x, cotangent: jax.vjp(function, x)[1](cotangent)

    result = (
        shape[:axis]
        + ((k,) if op == "topk" else () if op == "logsumexp" else shape[axis : axis + 1])
        + shape[axis + 1 :]
    )
    return Problem(
        "grad",
        f"gradient of {op}" + f" k={k}" * (op == "topk"),
        shape,
        axis,
        dtype,
        MOVED.get(op, 3) * bytes_of(shape, dtype),
        ours=gradient(ours),
        jax=gradient(of_jax),
        right=_is_gradient(op, of_jax, axis),
        kind="factors" if op == "cumprod" else "values",
        others=(("cotangent", result, dtype),),
        **kwargs,
    )
