"""Problems: cumulative operations and linear recurrences."""

import math

import jax
import jax.numpy as jnp

import jaxgpuops
from benchmarks.problems.problem import Problem, bytes_of, is_near, rounding_of
from benchmarks.scan import associative_scan


def _follows(y, step, axis, reverse, tolerance):
    """Whether each result is ``step(the one before, place)``; ``step(None, place)`` at the first."""
    n = y.shape[axis]
    place = lambda z, start, stop: jax.lax.slice_in_dim(z, start, stop, axis=axis)
    first, rest, before = (
        (slice(n - 1, n), slice(0, n - 1), slice(1, n)) if reverse else (slice(0, 1), slice(1, n), slice(0, n - 1))
    )
    at = lambda part: lambda z: place(z, part.start, part.stop)
    right = True
    for here, previous in ((first, None), (rest, before)):
        prior = None if previous is None else at(previous)(y)
        wanted = step(prior, at(here))
        if tolerance is None:
            right &= (at(here)(y) == wanted).all()
        else:
            right &= is_near(at(here)(y), wanted, tolerance(at(here)(y), prior, wanted))
    return right


def _peak(*arrays, axis):
    """The largest finite magnitude of each row."""
    wide = (abs(x.astype(jnp.float64)) for x in arrays)
    largest = [jnp.where(jnp.isfinite(x), x, 0).max(axis, keepdims=True) for x in wide]
    return sum(largest) + 1


def _scan_tolerance(y, peak, n, relative):
    own, arithmetic = rounding_of(y.dtype)

    def tolerance(here, prior, wanted):
        if relative:  # the results are products, which may be taken in any order
            return (2 * own + 8 * math.sqrt(n) * arithmetic) * abs(wanted) + float(jnp.finfo(y.dtype).tiny)
        rounded = abs(here.astype(jnp.float64)) + (0 if prior is None else abs(prior.astype(jnp.float64)))
        return own * rounded + 64 * arithmetic * peak

    return tolerance


def _is_cumulative(op, x, y, axis, reverse):
    floats = jnp.issubdtype(x.dtype, jnp.floating)
    wide = (lambda z: z.astype(jnp.float64)) if floats and op not in ("cummax", "cummin") else lambda z: z
    fold = {
        "cumsum": jnp.add,
        "cumprod": jnp.multiply,
        "cummax": jnp.maximum,
        "cummin": jnp.minimum,
        "cumlogsumexp": jnp.logaddexp,
    }[op]

    def step(prior, at):
        return wide(at(x)) if prior is None else fold(wide(prior), wide(at(x)))

    exact = not floats or op in ("cummax", "cummin")
    tolerance = None if exact else _scan_tolerance(y, _peak(x, y, axis=axis), x.shape[axis], op == "cumprod")
    return _follows(y, step, axis, reverse, tolerance)


def _is_recurrence(a, b, y, axis, reverse):
    wide = lambda z: z.astype(jnp.float64)

    def step(prior, at):
        return wide(at(b)) if prior is None else wide(at(a)) * wide(prior) + wide(at(b))

    return _follows(y, step, axis, reverse, _scan_tolerance(y, _peak(b, y, axis=axis), y.shape[axis], False))


def scan(shape, axis, dtype, *, op="cumsum", reverse=False, **kwargs) -> Problem:
    def of_torch(x):
        if op in ("cumsum", "cumprod"):
            return getattr(x, op)(axis, dtype=x.dtype)
        return x.logcumsumexp(axis) if op == "cumlogsumexp" else getattr(x, op)(axis)

    return Problem(
        "scan",
        op + " reverse" * reverse,
        shape,
        axis,
        dtype,
        2 * bytes_of(shape, dtype),
        ours=lambda x: getattr(jaxgpuops, op)(x, axis=axis, reverse=reverse),
        jax=lambda x: getattr(jax.lax, op)(x, axis=axis, reverse=reverse),
        torch=None if reverse else of_torch,
        right=lambda operands, results: _is_cumulative(op, *operands, *results, axis, reverse),
        kind="factors" if op == "cumprod" else "values",
        **kwargs,
    )


def linear(shape, axis, dtype, *, reverse=False, **kwargs) -> Problem:
    def of_jax(a, b):
        if not reverse:
            return associative_scan(a, b, axis)
        return jnp.flip(associative_scan(jnp.flip(a, axis), jnp.flip(b, axis), axis), axis)

    return Problem(
        "linear",
        "linear_scan" + " reverse" * reverse,
        shape,
        axis,
        dtype,
        3 * bytes_of(shape, dtype),
        ours=lambda a, b: jaxgpuops.linear_scan(a, b, axis=axis, reverse=reverse),
        jax=of_jax,
        right=lambda operands, results: _is_recurrence(*operands, *results, axis, reverse),
        kind="decay",
        others=(("values", shape, dtype),),
        **kwargs,
    )
