"""Problems: top-k, sorts, elements by their rank, places, and where the largest or the smallest element is."""

import math

import jax
import jax.numpy as jnp

import jaxgpuops
from benchmarks.problems.problem import Problem, as_ordered, bytes_of, is_near, rounding_of


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


def _number(x):
    """The elements, of which -0 is +0: so equal ones have equal bits."""
    return as_ordered(jnp.where(x == 0, jnp.zeros_like(x), x))


def _is_kth(x, value, index, axis, k):
    key, value, index = _number(x), _number(jnp.expand_dims(value, axis)), jnp.expand_dims(index, axis)
    place = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    before = ((key < value) | ((key == value) & (place < index))).sum(axis)
    return ((before == k) & ((key == value) & (place == index)).any(axis)).all()


def _is_partition(x, y, axis, k):
    key = _number(y)
    middle = jax.lax.slice_in_dim(key, k, k + 1, axis=axis)
    place = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    parted = jnp.where(place < k, key <= middle, key >= middle).all()
    return parted & (jnp.sort(key, axis) == jnp.sort(_number(x), axis)).all()


def _are_quantiles(x, y, axis, q):
    """Whether each result is as far between its two elements as it should be, but for two roundings."""
    ordered, at = jnp.sort(x.astype(jnp.float64), axis), [p * (x.shape[axis] - 1) for p in q]
    low, high = (jnp.stack([jnp.take(ordered, int(f(p)), axis) for p in at]) for f in (math.floor, math.ceil))
    wanted = low + (high - low) * jnp.array([p - math.floor(p) for p in at]).reshape(-1, *(1,) * (x.ndim - 1))
    own, arithmetic = rounding_of(y.dtype)
    return is_near(y, wanted, (own + 4 * arithmetic) * jnp.maximum(abs(low), abs(high)))


def rank(shape, axis, dtype, *, op="kth_value", k=0, **kwargs) -> Problem:
    """Elements by their rank."""
    size, rows = bytes_of(shape, dtype), math.prod(shape) // shape[axis]
    of_sort = lambda x: jax.lax.index_in_dim(jnp.sort(x, axis), k, axis, keepdims=False)
    q = [0.1, 0.5, 0.9] if op == "quantile" else [0.5]
    of_torch = None
    if dtype in ("float32", "float64") and math.prod(shape) < 1 << 24:  # more than torch.quantile takes
        of_torch = lambda x: x.quantile(x.new_tensor(q), axis)
    calls = {
        "kth_value": (
            lambda x: jaxgpuops.kth_value(x, k, axis=axis),
            lambda x: (of_sort(x), jnp.argsort(x, axis)),
            lambda x: x.kthvalue(k + 1, axis),
            lambda operands, results: _is_kth(*operands, *results, axis, k),
            size + rows * (jnp.dtype(dtype).itemsize + 4),
        ),
        "partition": (
            lambda x: jaxgpuops.partition(x, k, axis=axis),
            lambda x: jnp.sort(x, axis),
            lambda x: x.sort(axis).values,
            lambda operands, results: _is_partition(*operands, *results, axis, k),
            2 * size,
        ),
        "median": (
            lambda x: jaxgpuops.median(x, axis=axis),
            lambda x: jnp.median(x, axis),
            of_torch,
            lambda operands, results: _are_quantiles(*operands, results[0][None], axis, q),
            size + rows * jnp.dtype(dtype).itemsize,
        ),
        "quantile": (
            lambda x: jaxgpuops.quantile(x, q, axis=axis),
            lambda x: jnp.quantile(x, jnp.array(q, dtype), axis),
            of_torch,
            lambda operands, results: _are_quantiles(*operands, *results, axis, q),
            size + 3 * rows * jnp.dtype(dtype).itemsize,
        ),
    }
    ours, of_jax, of_torch, right, moved = calls[op]
    call = f"{op} k={k}" if op in ("kth_value", "partition") else op
    return Problem("rank", call, shape, axis, dtype, moved, ours, of_jax, right, of_torch, **kwargs)


def _are_places(queries, sorted, places, axis):
    n = sorted.shape[axis]
    at = lambda place: _number(jnp.take_along_axis(sorted, jnp.clip(place, 0, n - 1), axis))
    above, key = (places == 0) | (at(places - 1) < _number(queries)), _number(queries)
    return ((places >= 0) & (places <= n) & above & ((places == n) | (at(places) >= key))).all()


def _are_chosen(mask, places):
    """Whether places, those of a mask in order and then -1, are where the mask is True."""
    found = places >= 0
    rising = (places[1:] > places[:-1]) | ~found[1:]
    right = found == (jnp.arange(len(places)) < mask.sum())
    return (right & (~found | mask[jnp.maximum(places, 0)])).all() & rising.all()


def _are_unique(x, y, counts):
    key, values, found = jnp.sort(_number(x)), _number(y), counts > 0
    own = jnp.searchsorted(key, values, side="right") - jnp.searchsorted(key, values)
    rising = ((values[1:] > values[:-1]) | ~found[1:]).all()
    full = found.all() | (counts.sum() == x.size)
    first = (values[0] == key[0]) & (~found | (own == counts)).all()
    return full & rising & first & ((found[1:] <= found[:-1]).all())


def places(shape, axis, dtype, *, op="searchsorted", size, **kwargs) -> Problem:
    """Places of queries in sorted rows of so many elements; of what a mask chooses; different elements. The last two of
    all elements as one row."""
    n, item = math.prod(shape), jnp.dtype(dtype).itemsize

    def searchsorted_of_torch(x, y):
        import torch

        return torch.searchsorted(y, x, out_int32=True)

    if op == "searchsorted":
        return Problem(
            "places",
            f"searchsorted in {size}",
            shape,
            1,
            dtype,
            n * (item + 4) + shape[0] * size * item,
            ours=lambda x, y: jaxgpuops.searchsorted(y, x),
            jax=jax.vmap(lambda x, y: jnp.searchsorted(y, x)),
            torch=searchsorted_of_torch,
            right=lambda operands, results: _are_places(*operands, *results, 1),
            others=(("sorted", (shape[0], size), dtype),),
            **kwargs,
        )
    calls = {
        "nonzero": (
            lambda x: jaxgpuops.nonzero(x > 0, size=size, fill_value=-1)[0],
            lambda x: jnp.nonzero(x > 0, size=size, fill_value=-1)[0],
            lambda x: (x > 0).nonzero(),
            lambda operands, results: _are_chosen(operands[0] > 0, *results),
        ),
        "unique": (
            lambda x: jaxgpuops.unique(x, size=size, return_counts=True),
            lambda x: jnp.unique(x, size=size, return_counts=True),
            lambda x: x.unique(return_counts=True),
            lambda operands, results: _are_unique(*operands, *results),
        ),
    }
    moved = n * item + size * (4 if op == "nonzero" else item + 4)
    ours, of_jax, of_torch, right = calls[op]
    return Problem("places", f"{op} of {size}", (n,), 0, dtype, moved, ours, of_jax, right, of_torch, **kwargs)


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
