"""Problems: functions and their gradients."""

import math

import jax
import jax.numpy as jnp

import jaxgpuops
from benchmarks.problems.problem import Problem, bytes_of, rounding_of
from benchmarks.problems.rows import JAX_SOFTMAX
from benchmarks.scan import associative_scan


def _of_products(n, dtype):
    """Bounds the rounding error of a derivative of cumulative products, given the same derivative of magnitudes.

    Element j is the sum of c[i] times all factors up to i but the j-th. In whatever order these up to n numbers are
    multiplied, each multiplication rounds once; so does each of up to n additions that a term takes part in. A rounding
    changes a term by half an eps at most: 2 n of them by exp(n eps) - 1. The products that the derivative is made from,
    and the derivative, are also rounded to the dtype. A smaller bound would not do: equal factors
    are rounded alike, and so are those near 1, so in long rows any library reaches a tenth of this bound.
    """
    own, arithmetic = rounding_of(dtype)
    wide = float(jnp.finfo("float64").eps)  # the reference is rounded, too
    return own + math.expm1(n * arithmetic) + math.expm1(n * wide)


def _is_gradient(op, function, axis):
    def right(operands, results):
        x, cotangent = operands
        result = results[0].astype(jnp.float64)
        wide = cotangent.astype(jnp.float64)
        own, arithmetic = rounding_of(x.dtype)
        gradient = lambda x, cotangent: jax.vjp(function, x)[1](cotangent)[0]
        tolerance = 16 * own + 1024 * arithmetic
        if op == "cummax":  # ties may share a cotangent as they like
            wanted, result = wide.sum(axis), result.sum(axis)
            scale = abs(wide).sum(axis)
        elif op == "cumprod":
            wanted = gradient(x.astype(jnp.float64), wide)
            scale = gradient(abs(x).astype(jnp.float64), abs(wide))
            tolerance = _of_products(x.shape[axis], x.dtype)
        else:
            wanted = gradient(x.astype(jnp.float64), wide)
            scale = abs(wanted).max() + 1
        beyond = ~(abs(wanted) < 0.99 * float(jnp.finfo(x.dtype).max))
        least = float(jnp.finfo(x.dtype).smallest_subnormal)
        return ((abs(result - wanted) <= tolerance * scale + least) | beyond).all()

    return right


# How many arrays of the size of x a function and its gradient must move together: top-k reads x and writes its
# gradient.
MOVED = {"topk": 2, "cumsum": 2, "cumprod": 4, "cummax": 3, "cumlogsumexp": 4, "linear_scan": 2, "logsumexp": 2}


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
