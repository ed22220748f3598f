"""Problems: top-k, sorts, and where the largest or the smallest element is."""

import math

import jax
import jax.numpy as jnp

import jaxgpuops
from benchmarks.problems.problem import Problem, as_ordered, bytes_of


def is_topk(x, values, indices, axis, largest, in_order):
    key = as_ordered(x) if largest else ~as_ordered(x)
    n, k = x.shape[axis], indices.shape[axis]
    inside = (indices >= 0) & (indices < n)
    of_k = jnp.take_along_axis(key, indices, axis)
    moved = as_ordered(values) == as_ordered(jnp.take_along_axis(x, indices, axis))
    before = lambda y: jax.lax.slice_in_dim(y, 0, k - 1, axis=axis)
    after = lambda y: jax.lax.slice_in_dim(y, 1, k, axis=axis)
    in_index_order = before(indices) < after(indices)
    falling = (before(of_k) > after(of_k)) | ((before(of_k) == after(of_k)) & in_index_order)
    last = of_k.min(axis, keepdims=True)
    last_index = jnp.where(of_k == last, indices, -1).max(axis, keepdims=True)
    place = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    count = ((key > last) | ((key == last) & (place <= last_index))).sum(axis)
    order = falling if in_order else in_index_order
    return inside.all() & moved.all() & order.all() & (count == k).all()


def _is_argument(x, index, axis, largest):
    best = (x.max if largest else x.min)(axis, keepdims=True)
    place = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return (index == jnp.where(x == best, place, x.shape[axis]).min(axis)).all()


def topk(shape, axis, dtype, *, k, largest=True, sorted=True, **kwargs) -> Problem:
    def of_jax(x):
        if largest:
            return jax.lax.top_k(x, k, axis=axis)
        # JAX has no top-k of the smallest elements. Its users negate the keys.
        return jax.lax.top_k(-x if jnp.issubdtype(x.dtype, jnp.floating) else ~x, k, axis=axis)

    return Problem(
        "topk",
        f"topk k={k}" + "" * largest + " smallest" * (not largest) + " unsorted" * (not sorted),
        shape,
        axis,
        dtype,
        bytes_of(shape, dtype) + math.prod(shape) // shape[axis] * k * (jnp.dtype(dtype).itemsize + 4),
        ours=lambda x: tuple(jaxgpuops.topk(x, k, axis=axis, largest=largest, sorted=sorted)),
        jax=of_jax,
        torch=lambda x: x.topk(k, axis, largest, sorted),
        right=lambda operands, results: is_topk(*operands, *results, axis, largest, sorted),
        **kwargs,
    )


def sort(shape, axis, dtype, *, op="sort", **kwargs) -> Problem:
    size = bytes_of(shape, dtype)

    def of_torch(x):
        values, indices = x.sort(dim=axis, stable=op == "argsort")
        return values if op == "sort" else indices

    def right(operands, results):
        [x], [y] = operands, results
        ordered = lambda z: as_ordered(jnp.where(z == 0, jnp.zeros_like(z), z))  # -0 is +0
        if op == "argsort":
            key, places, n = ordered(x), jnp.sort(y, axis), x.shape[axis]
            permutation = (places == jax.lax.broadcasted_iota(places.dtype, x.shape, axis)).all()
            of_place = jnp.take_along_axis(key, y, axis)
            before = lambda z: jax.lax.slice_in_dim(z, 0, n - 1, axis=axis)
            after = lambda z: jax.lax.slice_in_dim(z, 1, n, axis=axis)
            tie = (before(of_place) == after(of_place)) & (before(y) < after(y))
            return permutation & ((before(of_place) < after(of_place)) | tie).all()
        return (ordered(y) == jnp.sort(ordered(x), axis)).all()

    return Problem(
        "sort",
        op,
        shape,
        axis,
        dtype,
        2 * size if op == "sort" else size + 4 * math.prod(shape),
        ours=lambda x: getattr(jaxgpuops, op)(x, axis=axis),
        jax=lambda x: getattr(jnp, op)(x, axis),
        torch=of_torch,
        right=right,
        **kwargs,
    )


def arg(shape, axis, dtype, *, op="argmax", **kwargs) -> Problem:
    return Problem(
        "arg",
        op,
        shape,
        axis,
        dtype,
        bytes_of(shape, dtype),
        ours=lambda x: getattr(jaxgpuops.lax, op)(x, axis, jnp.int32),
        jax=lambda x: getattr(jax.lax, op)(x, axis, jnp.int32),
        torch=lambda x: getattr(x, op)(axis),
        right=lambda operands, results: _is_argument(*operands, *results, axis, op == "argmax"),
        **kwargs,
    )
