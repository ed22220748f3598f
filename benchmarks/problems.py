"""Problems of the sweep: calls of every family on any shape, random ones and those of real programs.

A problem knows our function of its operands, that of JAX and that of torch, how to draw operands, how many bytes have
to move, and how to tell whether results are right. The last needs no other library's results: it is cheaper to see that
results are right than to find them. Top-k is right if its elements are in order and as many as k are not below the
last, a scan if each result follows from the one before. Derivatives are compared with those of JAX in float64.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jaxgpuops
from benchmarks.scan import associative_scan
from benchmarks.softmax import jax_cross_entropy, torch_cross_entropy

FLOATS = ["float32"] * 4 + ["bfloat16"] * 3 + ["float16", "float64"]
DTYPES = FLOATS * 2 + ["int32"] * 3 + ["int8", "uint8", "int16", "int64"]
DATA = ["normal"] * 4 + ["ties", "constant", "rising", "falling"]  # "ties": of some 25 values
EXPERTS = [8, 16, 60, 64, 128, 160, 256, 384, 512]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call along an axis of an array.

    call: what is called, as text.
    bytes: what has to be moved at least.
    ours, jax, torch: the function of arrays of each library; a tree of arrays. The last may be missing.
    right: ``right(operands, results)`` is a boolean scalar, in JAX.
    others: kind, shape and dtype of operands after the first: "values", "labels" (indices along the axis), "cotangent",
      "ids below 9" (or another number), "offsets" (which ascend, up to the length of the axis).
    kind: of the first: "values", "factors" (whose products neither vanish nor overflow), "decay" (in 0 to 1) or ids.
    data: distribution of values.
    """

    family: str
    call: str
    shape: tuple[int, ...]
    axis: int
    dtype: str
    bytes: int
    ours: Callable
    jax: Callable
    right: Callable
    torch: Callable | None = None
    others: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    kind: str = "values"
    data: str = "normal"
    name: str = ""

    def __str__(self) -> str:
        axis = f" axis {self.axis}" if self.axis < len(self.shape) - 1 else ""
        return f"{self.name}: {self.call} {'x'.join(map(str, self.shape))}{axis} {self.dtype} {self.data}"

    def _operands(self):
        return [(self.kind, self.shape, self.dtype), *self.others]

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in self._operands()]

    def draw(self, pool: jax.Array, start: jax.Array) -> tuple[jax.Array, ...]:
        """Operands, made of the normal numbers of the pool from there on.

        No random numbers are made here: that would take longer to compile than the call itself.
        """
        return tuple(
            self._drawn(kind, jax.lax.dynamic_slice(pool, (start + i,), (math.prod(shape),)).reshape(shape), dtype)
            for i, (kind, shape, dtype) in enumerate(self._operands())
        )

    def _drawn(self, kind, x, dtype):
        n = self.shape[self.axis]
        if kind == "labels":
            return (_mixed_bits(x) % n).astype(dtype)
        if kind == "offsets":
            return jnp.sort(_mixed_bits(x) % (n + 1)).astype(dtype)
        if kind.startswith("ids below "):
            return (_mixed_bits(self._values(x)) % int(kind.split()[-1])).astype(dtype)
        if kind == "decay":
            return jax.nn.sigmoid(x).astype(dtype)
        if kind != "cotangent":
            x = self._values(x)
        if not jnp.issubdtype(dtype, jnp.floating):
            if self.data == "normal":  # any bits
                return _mixed_bits(x).astype(dtype)
            return (8 * x + 32 * (dtype == "uint8")).astype("int32").astype(dtype)
        if kind == "factors":
            x = 1 + x / (4 * math.sqrt(n) if self.data in ("normal", "ties") else n)
        return x.astype(dtype)

    def _values(self, x):
        if self.data == "ties":
            return jnp.round(4 * x) / 4
        if self.data == "constant":
            return jnp.full_like(x, 0.5)
        if self.data in ("rising", "falling"):
            axis = min(self.axis, x.ndim - 1)  # of ids, that may have no other
            place = jax.lax.broadcasted_iota(jnp.float32, x.shape, axis)
            return (6 * place / x.shape[axis] - 3) * (1 if self.data == "rising" else -1)
        return x


def _mixed_bits(x):
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) * jnp.uint32(2654435761)
    return (bits ^ bits >> 15) * jnp.uint32(2246822519)


def _size(shape, dtype):
    return math.prod(shape) * jnp.dtype(dtype).itemsize


# ---- What is right --------------------------------------------------------------------------------------------------


def _rounding(dtype):
    """Of one result, and of the arithmetic before it."""
    own = float(jnp.finfo(dtype).eps)
    return own, min(own, float(jnp.finfo(jnp.float32).eps))


def _near(actual, wanted, tolerance):
    """Of all elements, but where what is wanted is near the largest number of the dtype, or beyond."""
    beyond = ~(abs(wanted) < 0.99 * float(jnp.finfo(actual.dtype).max))
    return ((abs(actual.astype(jnp.float64) - wanted) <= tolerance) | beyond).all()


def _ordered(x):
    """Integers in the order of the elements: that of IEEE 754's total order."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, integer)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)


def _first(x, axis):
    return jax.lax.slice_in_dim(x, 0, 1, axis=axis)


def _is_topk(x, values, indices, axis, largest, in_order):
    key = _ordered(x) if largest else ~_ordered(x)
    n, k = x.shape[axis], indices.shape[axis]
    inside = (indices >= 0) & (indices < n)
    of_k = jnp.take_along_axis(key, indices, axis)
    moved = _ordered(values) == _ordered(jnp.take_along_axis(x, indices, axis))
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
            right &= _near(at(here)(y), wanted, tolerance(at(here)(y), prior, wanted))
    return right


def _scan_tolerance(y, peak, n, relative):
    own, arithmetic = _rounding(y.dtype)

    def tolerance(here, prior, wanted):
        if relative:  # of products, whose order is free
            return (2 * own + 8 * math.sqrt(n) * arithmetic) * abs(wanted) + float(jnp.finfo(y.dtype).tiny)
        rounded = abs(here.astype(jnp.float64)) + (0 if prior is None else abs(prior.astype(jnp.float64)))
        return own * rounded + 64 * arithmetic * peak

    return tolerance


def _peak(*arrays, axis):
    """The largest finite magnitude of each row."""
    wide = (abs(x.astype(jnp.float64)) for x in arrays)
    largest = [jnp.where(jnp.isfinite(x), x, 0).max(axis, keepdims=True) for x in wide]
    return sum(largest) + 1


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


def _is_softmax(op, x, y, axis):
    own, arithmetic = _rounding(y.dtype)
    wanted = _JAX_SOFTMAX[op](x.astype(jnp.float64), axis)
    relative = 2 * own + 128 * arithmetic
    if op == "softmax":
        return _near(y, wanted, relative * wanted + float(jnp.finfo(y.dtype).tiny))
    return _near(y, wanted, relative * (1 + abs(wanted)))


def _is_reduction(op, x, y, axis):
    if op in ("max", "min"):
        return (y == getattr(x, op)(axis)).all()
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return (y == x.sum(axis, dtype=y.dtype)).all()
    own, arithmetic = _rounding(y.dtype)
    wide = x.astype(jnp.float64)
    return _near(
        y, getattr(wide, op)(axis), own * abs(getattr(wide, op)(axis)) + 64 * arithmetic * getattr(abs(wide), op)(axis)
    )


def _is_count(x, counts):
    bins = jax.lax.broadcasted_iota(jnp.int32, counts.shape, 1)
    ordered = jnp.sort(x, 1)
    below = jax.vmap(lambda row, b: jnp.searchsorted(row, b, side="right") - jnp.searchsorted(row, b))
    return (counts == below(ordered, bins)).all()


def _is_segments(op, x, ids, y):
    reduce = getattr(jax.ops, op)
    if op != "segment_sum" or not jnp.issubdtype(x.dtype, jnp.floating):
        return (y == reduce(x, ids, y.shape[0])).all()
    own, arithmetic = _rounding(y.dtype)
    wanted, sizes = (reduce(z.astype(jnp.float64), ids, y.shape[0]) for z in (x, abs(x)))
    return _near(y, wanted, own * abs(wanted) + 64 * arithmetic * sizes)


def _is_cross_entropy(x, labels, loss, gradient):
    own, arithmetic = _rounding(x.dtype)
    wide, rows = x.astype(jnp.float64), x.shape[0]
    logarithms = jax.nn.log_softmax(wide, 1)
    wanted = -jnp.take_along_axis(logarithms, labels[:, None], 1).mean()
    hit = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) == labels[:, None]
    p = jnp.exp(logarithms)
    tolerance = (2 * own + 128 * arithmetic) * (p + hit) / rows + float(jnp.finfo(x.dtype).tiny)
    return _near(loss, wanted, (2 * own + 128 * arithmetic) * (1 + wanted)) & _near(
        gradient, (p - hit) / rows, tolerance
    )


def _is_gate(x, weights, experts):
    own, arithmetic = _rounding(weights.dtype)
    values = jnp.take_along_axis(x, experts, 1)
    wanted = jax.nn.softmax(values.astype(jnp.float64), 1)
    right = _near(weights, wanted, (2 * own + 128 * arithmetic) * wanted + float(jnp.finfo(weights.dtype).tiny))
    return right & _is_topk(x, values, experts, 1, True, True)


def _is_gradient(op, function, axis):
    def right(operands, results):
        x, cotangent = operands
        result = results[0].astype(jnp.float64)
        wide = cotangent.astype(jnp.float64)
        own, arithmetic = _rounding(x.dtype)
        if op == "cummax":  # ties may share a cotangent as they like
            wanted, result = wide.sum(axis), result.sum(axis)
            scale = abs(wide).sum(axis)
        else:
            wanted = jax.vjp(function, x.astype(jnp.float64))[1](wide)[0]
            scale = abs(wanted).max() + 1
        beyond = ~(abs(wanted) < 0.99 * float(jnp.finfo(x.dtype).max))
        return ((abs(result - wanted) <= (16 * own + 1024 * arithmetic) * scale) | beyond).all()

    return right


# ---- Families -------------------------------------------------------------------------------------------------------

_JAX_SOFTMAX = {"softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax, "logsumexp": jax.nn.logsumexp}


def topk(shape, axis, dtype, *, k, largest=True, sorted=True, **kwargs) -> Problem:
    def of_jax(x):
        if largest:
            return jax.lax.top_k(x, k, axis=axis)
        # JAX has no smallest. Negated keys are what its users write.
        return jax.lax.top_k(-x if jnp.issubdtype(x.dtype, jnp.floating) else ~x, k, axis=axis)

    return Problem(
        "topk",
        f"topk k={k}" + "" * largest + " smallest" * (not largest) + " unsorted" * (not sorted),
        shape,
        axis,
        dtype,
        _size(shape, dtype) + math.prod(shape) // shape[axis] * k * (jnp.dtype(dtype).itemsize + 4),
        ours=lambda x: tuple(jaxgpuops.topk(x, k, axis=axis, largest=largest, sorted=sorted)),
        jax=of_jax,
        torch=lambda x: x.topk(k, axis, largest, sorted),
        right=lambda operands, results: _is_topk(*operands, *results, axis, largest, sorted),
        **kwargs,
    )


def sort(shape, axis, dtype, *, op="sort", **kwargs) -> Problem:
    size = _size(shape, dtype)

    def of_torch(x):
        values, indices = x.sort(axis, stable=op == "argsort")
        return values if op == "sort" else indices

    def right(operands, results):
        [x], [y] = operands, results
        ordered = lambda z: _ordered(jnp.where(z == 0, jnp.zeros_like(z), z))  # -0 is +0
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
        _size(shape, dtype),
        ours=lambda x: getattr(jaxgpuops.lax, op)(x, axis, jnp.int32),
        jax=lambda x: getattr(jax.lax, op)(x, axis, jnp.int32),
        torch=lambda x: getattr(x, op)(axis),
        right=lambda operands, results: _is_argument(*operands, *results, axis, op == "argmax"),
        **kwargs,
    )


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
        2 * _size(shape, dtype),
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
        3 * _size(shape, dtype),
        ours=lambda a, b: jaxgpuops.linear_scan(a, b, axis=axis, reverse=reverse),
        jax=of_jax,
        right=lambda operands, results: _is_recurrence(*operands, *results, axis, reverse),
        kind="decay",
        others=(("values", shape, dtype),),
        **kwargs,
    )


def softmax(shape, axis, dtype, *, op="softmax", **kwargs) -> Problem:
    size = _size(shape, dtype)
    return Problem(
        "softmax",
        op,
        shape,
        axis,
        dtype,
        size + (size // shape[axis] if op == "logsumexp" else size),
        ours=lambda x: getattr(jaxgpuops, op)(x, axis=axis),
        jax=lambda x: _JAX_SOFTMAX[op](x, axis),
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
        2 * _size(shape, dtype),
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
        _size(shape, dtype) + shape[0] * k * (jnp.dtype(dtype).itemsize + 4),
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
        _size(shape, dtype) + _size(shape, dtype) // shape[axis],
        ours=lambda x: getattr(jaxgpuops, op)(x, axis=axis),
        jax=of_jax,
        torch=of_torch,
        right=lambda operands, results: _is_reduction(op, *operands, *results, axis),
        **kwargs,
    )


def count(shape, axis, dtype, *, op="segment_sum", bins, **kwargs) -> Problem:
    """Counts of the rows of int32 ids, or segments of rows that are given ids in no order."""
    if op == "bincount":
        return Problem(
            "count",
            f"bincount {bins}",
            shape,
            1,
            "int32",
            _size(shape, "int32") + shape[0] * bins * 4,
            ours=lambda x: jaxgpuops.bincount(x, bins),
            jax=jax.vmap(lambda x: jnp.bincount(x, length=bins)),
            torch=(lambda x: x[0].bincount(minlength=bins)) if shape[0] == 1 else None,
            right=lambda operands, results: _is_count(*operands, *results),
            kind=f"ids below {bins}",
            **kwargs,
        )

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
        _size(shape, dtype) + _size((bins, *shape[1:]), dtype) + shape[0] * 4,
        ours=lambda x, ids: getattr(jaxgpuops, op)(x, ids, bins),
        jax=lambda x, ids: getattr(jax.ops, op)(x, ids, bins),
        torch=of_torch,
        right=lambda operands, results: _is_segments(op, *operands, *results),
        others=((f"ids below {bins}", shape[:1], "int32"),),
        **kwargs,
    )


# ---- Segments of an axis, padded rows, experts ----------------------------------------------------------------------


def _segment_of(offsets, n):
    """The number of each place's segment, from 1 on; 0, or one more than there are, for none."""
    return jnp.searchsorted(offsets, jax.lax.iota(jnp.int32, n), side="right")


def _within(offsets, x, key):
    """x in the order of the key within segments; what is in no segment stays."""
    ids = _segment_of(offsets, x.size)
    own = jnp.where((ids > 0) & (ids < offsets.size), key, jnp.zeros_like(key))
    return jax.lax.sort((ids, own, x), num_keys=2)[2]


def ragged(shape, axis, dtype, *, op="sort", count=1, k=1, **kwargs) -> Problem:
    """Sorts of segments and softmax of them (of the whole of shape[1], rows alike), or top-k of padded rows."""
    rows, n = shape
    offsets = (("offsets", (count + 1,), "int32"),)
    row_ids = ((f"ids below {count}", shape[1:], "int32"),)
    lengths = ((f"ids below {n + 1}", shape[:1], "int32"),)

    def same(x, y):  # -0 is +0
        ordered = lambda z: _ordered(jnp.where(z == 0, jnp.zeros_like(z), z))
        return (ordered(x) == ordered(y)).all()

    def is_sorted(operands, results):
        [x, offsets], [y] = operands, results
        key = lambda row: _ordered(jnp.where(row == 0, jnp.zeros_like(row), row))
        return same(y, jax.vmap(lambda row: _within(offsets, row, key(row)))(x))

    def is_selected(operands, results):
        [x, lengths], [values, indices] = operands, results
        own = jax.lax.iota(jnp.int32, n) < lengths[:, None]
        key = _ordered(x)
        _, wanted = jax.lax.top_k(jnp.where(own, key, jnp.iinfo(key.dtype).min), k)
        there = jax.lax.iota(jnp.int32, k) < lengths[:, None]
        moved = same(jnp.where(there, values, 0), jnp.where(there, jnp.take_along_axis(x, wanted, 1), 0))
        return (indices == jnp.where(there, wanted, -1)).all() & moved

    def softmax_of(x, ids):
        wide = x.T
        terms = jnp.exp(wide - jax.ops.segment_max(wide, ids, count)[ids])
        return (terms / jax.ops.segment_sum(terms, ids, count)[ids]).T

    def is_softmax(operands, results):
        [x, ids], [y] = operands, results
        own, arithmetic = _rounding(y.dtype)
        wanted = softmax_of(x.astype(jnp.float64), ids)
        return _near(y, wanted, (2 * own + 128 * arithmetic) * wanted + float(jnp.finfo(y.dtype).tiny))

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
    size = _size(shape, dtype)
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


def moe(shape, axis, dtype, *, experts, k, op="plan", **kwargs) -> Problem:
    """Where the rows of experts go, of shape (tokens, k); or tokens, (tokens, width), there and, weighed, back."""
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
            3 * _size((tokens, k), "int32"),
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
        own, arithmetic = _rounding(x.dtype)
        wide, weights = x.astype(jnp.float64), weights.astype(jnp.float64)
        error = 2 * own * abs(weights.sum(1, keepdims=True)) + 64 * arithmetic * abs(weights).sum(1, keepdims=True)
        moved = (rows == x[rows_of(ids) // k]).all()
        return moved & _near(
            out, wide * weights.sum(1, keepdims=True), error * abs(wide) + float(jnp.finfo(x.dtype).tiny)
        )

    return Problem(
        "moe",
        f"dispatch and combine {k} of {experts}",
        shape,
        0,
        dtype,
        (2 + 2 * k) * _size(shape, dtype),
        ours=there_and_back,
        jax=of_jax,
        right=right,
        others=(*ids, ("decay", (tokens, k), dtype)),
        **kwargs,
    )


def _drawn_ragged(source, shape, dtype, about):
    rows, n = shape[:2]
    op = source.choice(["sort", "sort", "topk", "softmax"])
    dtype = source.choice(FLOATS) if op == "softmax" and dtype not in FLOATS else dtype
    rows = min(rows, 256) if op == "softmax" else rows
    k = _log_uniform(source, 1, min(n, 1024))
    return ragged((rows, n), 1, dtype, op=op, count=_log_uniform(source, 1, n), k=k, **about)


def _drawn_moe(source, elements, dtype, about):
    experts, k = source.choice(EXPERTS), source.choice([1, 2, 4, 6, 8])
    dtype = dtype if dtype in FLOATS else source.choice(FLOATS)
    tokens = _log_uniform(source, 1, max(1, elements // 64 // k))
    width = _log_uniform(source, 1, max(1, min(8192, elements // tokens // k)))
    op = source.choice(["plan", "rows"])
    return moe((tokens, width), 0, dtype, experts=experts, k=k, op=op, **about)


# How many times the array a function and its gradient move.
_MOVED = {"topk": 1, "cumsum": 2, "cumprod": 4, "cummax": 3, "cumlogsumexp": 4, "linear_scan": 2, "logsumexp": 2}


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
        lambda x: _JAX_SOFTMAX[op](x, axis) if op in _JAX_SOFTMAX else getattr(jax.lax, op)(x, axis=axis),
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
        _MOVED.get(op, 3) * _size(shape, dtype),
        ours=gradient(ours),
        jax=gradient(of_jax),
        right=_is_gradient(op, of_jax, axis),
        kind="factors" if op == "cumprod" else "values",
        others=(("cotangent", result, dtype),),
        **kwargs,
    )


# ---- Random problems ------------------------------------------------------------------------------------------------


def _log_uniform(source: random.Random, low: int, high: int) -> int:
    return round(math.exp(source.uniform(math.log(low), math.log(max(low, high)))))


def _shape(source: random.Random, elements: int, shortest: int) -> tuple[int, ...]:
    """Rows along axis 1, half of them as long as a power of two, a quarter with a dimension after them."""
    length = _log_uniform(source, shortest, min(elements, 1 << 24))
    if source.random() < 0.5:
        length = max(shortest, 1 << length.bit_length() - 1)
    rows = _log_uniform(source, 1, max(1, elements // length))
    if rows > 1 and source.random() < 0.25:
        inner = _log_uniform(source, 2, rows)
        return max(1, rows // inner), length, inner
    return rows, length


def drawn(family: str, seed: int, index: int, elements: int, shortest: int = 2) -> Problem:
    """A random problem of a family, the same for the same arguments, of up to so many elements."""
    source = random.Random(f"{seed} {family} {index}")
    elements = elements // 2 if family in ("linear", "grad") else elements  # JAX needs several arrays more
    shape = _shape(source, elements, shortest)
    dtype = source.choice(DTYPES)
    # Most programs take few of many; some take all.
    k = source.choice([_log_uniform(source, 1, min(shape[1], 4096)), _log_uniform(source, 1, shape[1])])
    about = {"data": source.choice(DATA), "name": f"{family}/{index}"}
    if family in ("linear", "softmax", "ce", "gate", "grad") and dtype not in FLOATS:
        dtype = source.choice(FLOATS)
    if family == "topk":
        return topk(shape, 1, dtype, k=k, largest=source.random() < 0.8, sorted=source.random() < 0.8, **about)
    if family == "sort":
        return sort(shape, 1, dtype, op=source.choice(["sort", "argsort"]), **about)
    if family == "arg":
        return arg(shape, 1, dtype, op=source.choice(["argmax", "argmin"]), **about)
    if family == "scan":
        op = source.choice(["cumsum", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
        dtype = source.choice(FLOATS) if op == "cumlogsumexp" and dtype not in FLOATS else dtype
        return scan(shape, 1, dtype, op=op, reverse=source.random() < 0.3, **about)
    if family == "linear":
        return linear(shape, 1, dtype, reverse=source.random() < 0.3, **about)
    if family == "softmax":
        return softmax(shape, 1, dtype, op=source.choice(["softmax", "softmax", "log_softmax", "logsumexp"]), **about)
    if family == "ce":
        rows, classes = _log_uniform(source, 16, 16384), _log_uniform(source, 100, min(262144, elements))
        return ce((max(1, min(rows, 4 * elements // classes)), classes), 1, dtype, **about)
    if family == "gate":
        experts, rows = source.choice(EXPERTS), _log_uniform(source, 16, 1 << 17)
        rows = max(1, min(rows, elements // experts))
        return gate((rows, experts), 1, dtype, k=source.choice([1, 2, 4, 6, 8]), **about)
    if family == "reduce":
        op = source.choice(["sum", "max", "min", "mean"])
        dtype = source.choice(FLOATS) if op == "mean" and dtype not in FLOATS else dtype
        return reduce(shape, 1, dtype, op=op, **about)
    if family == "count":
        op = source.choice(["bincount", "bincount", "segment_sum", "segment_sum", "segment_max", "segment_min"])
        if op != "bincount":
            rows = _log_uniform(source, 1, elements)
            features = source.choice([1, _log_uniform(source, 1, max(1, elements // rows))])
            bins = _log_uniform(source, 1, min(2 * rows, max(1, elements // features)))
            return count((rows, min(features, 16384)), 0, dtype, op=op, bins=bins, **about)
        bins = _log_uniform(source, 1, min(1 << 20, max(2 * shape[1], 512)))
        return count((min(shape[0], max(1, elements // bins)), shape[1]), 1, "int32", op=op, bins=bins, **about)
    if family == "ragged":
        return _drawn_ragged(source, shape, dtype, about)
    if family == "moe":
        return _drawn_moe(source, elements, dtype, about)
    op = source.choice([*_MOVED, "softmax", "log_softmax"])
    return grad(shape, 1, dtype, op=op, k=min(k, 4096), **about)


FAMILIES = [
    "topk",
    "sort",
    "arg",
    "scan",
    "linear",
    "softmax",
    "ce",
    "gate",
    "reduce",
    "count",
    "ragged",
    "moe",
    "grad",
]


# ---- Shapes of programs ---------------------------------------------------------------------------------------------

# program, call, shape, axis, dtype, options of the call
PROGRAMS = [
    ("ranking", ragged, (1, 1 << 20), 1, "float32", {"count": 10000}),
    ("ranking", ragged, (4096, 1024), 1, "float32", {"op": "topk", "k": 10}),
    ("graph", ragged, (8, 1 << 20), 1, "float32", {"op": "softmax", "count": 65536}),
    ("experts", moe, (4096, 8), 0, "int32", {"experts": 128, "k": 8}),
    ("experts", moe, (4096, 7168), 0, "bfloat16", {"experts": 128, "k": 8, "op": "rows"}),
    ("ranking", sort, (64, 1000), 1, "float32", {"op": "argsort"}),
    ("samples in order", sort, (1, 1 << 20), 1, "float32", {}),
    ("segmentation", softmax, (8, 2, 262144), 1, "float32", {"op": "softmax"}),
    ("segmentation", softmax, (8, 2, 262144), 1, "bfloat16", {"op": "log_softmax"}),
    ("segmentation", softmax, (4, 19, 262144), 1, "float32", {"op": "softmax"}),
    ("segmentation", softmax, (4, 19, 262144), 1, "bfloat16", {"op": "log_softmax"}),
    ("segmentation", softmax, (2, 150, 65536), 1, "float32", {"op": "softmax"}),
    ("segmentation", softmax, (16, 5, 16384), 1, "float32", {"op": "log_softmax"}),
    ("segmentation", arg, (8, 2, 262144), 1, "float32", {}),
    ("segmentation", arg, (4, 19, 262144), 1, "float32", {}),
    ("segmentation", arg, (4, 19, 262144), 1, "bfloat16", {}),
    ("segmentation", arg, (2, 150, 65536), 1, "float32", {}),
    ("segmentation", arg, (1, 21, 1048576), 1, "float16", {}),
    ("segmentation", grad, (4, 19, 262144), 1, "float32", {"op": "log_softmax"}),
    ("attention", softmax, (37632, 49), 1, "float16", {}),
    ("attention", softmax, (151296, 197), 1, "float32", {}),
    ("attention", softmax, (151296, 197), 1, "bfloat16", {}),
    ("attention", softmax, (147712, 577), 1, "bfloat16", {}),
    ("attention", softmax, (131072, 1024), 1, "bfloat16", {}),
    ("attention", softmax, (4096, 8192), 1, "bfloat16", {}),
    ("attention", grad, (37824, 197), 1, "bfloat16", {"op": "softmax"}),
    ("decoder", arg, (1, 32000), 1, "float32", {}),
    ("decoder", arg, (8, 50257), 1, "float32", {}),
    ("decoder", arg, (32, 128256), 1, "bfloat16", {}),
    ("decoder", arg, (1, 256000), 1, "bfloat16", {}),
    ("decoder", arg, (32, 32000), 1, "float16", {}),
    ("decoder", topk, (1, 50257), 1, "float32", {"k": 40}),
    ("decoder", topk, (8, 128256), 1, "bfloat16", {"k": 50}),
    ("decoder", topk, (32, 256000), 1, "float32", {"k": 64}),
    ("decoder", topk, (4, 151936), 1, "bfloat16", {"k": 1000}),
    ("decoder", softmax, (8, 128256), 1, "float32", {"op": "log_softmax"}),
    ("beam search", topk, (16, 251285), 1, "float32", {"k": 10}),
    ("language model", ce, (2048, 50257), 1, "bfloat16", {}),
    ("language model", ce, (1024, 32000), 1, "float32", {}),
    ("language model", ce, (4096, 8192), 1, "bfloat16", {}),
    ("classifier", arg, (256, 1000), 1, "float32", {}),
    ("classifier", arg, (4096, 10), 1, "float32", {}),
    ("classifier", arg, (1024, 21841), 1, "bfloat16", {}),
    ("classifier", softmax, (256, 1000), 1, "float32", {"op": "softmax"}),
    ("classifier", softmax, (4096, 10), 1, "float32", {"op": "log_softmax"}),
    ("classifier", softmax, (65536, 2), 1, "float32", {"op": "softmax"}),
    ("classifier", topk, (256, 1000), 1, "float32", {"k": 5}),
    ("classifier", ce, (512, 1000), 1, "float32", {}),
    ("signal", scan, (1, 4194304, 2), 1, "float32", {"op": "cumsum"}),
    ("signal", scan, (16, 192000, 2), 1, "float32", {"op": "cumsum"}),
    ("signal", scan, (8, 100000, 6), 1, "float32", {"op": "cumsum"}),
    ("signal", scan, (32, 16384, 3), 1, "float32", {"op": "cummax"}),
    ("signal", scan, (1, 10000000), 1, "float64", {"op": "cumsum"}),
    ("signal", scan, (64, 44100), 1, "int32", {"op": "cumsum"}),
    ("signal", linear, (16, 48000, 2), 1, "float32", {}),
    ("neighbours", topk, (1024, 100000), 1, "float32", {"k": 10, "largest": False}),
    ("neighbours", topk, (4096, 4096), 1, "float32", {"k": 32, "largest": False}),
    ("neighbours", topk, (16384, 64), 1, "float32", {"k": 16, "largest": False}),
    ("detection", topk, (8, 120000), 1, "float32", {"k": 1000}),
    ("detection", topk, (16, 8400, 80), 1, "float32", {"k": 100}),
    ("detection", reduce, (134400, 80), 1, "float32", {"op": "max"}),
    ("gate", gate, (4096, 8), 1, "bfloat16", {"k": 2}),
    ("gate", gate, (16384, 64), 1, "float32", {"k": 6}),
    ("gate", gate, (8192, 256), 1, "float32", {"k": 8}),
    ("gate", gate, (2048, 128), 1, "bfloat16", {"k": 4}),
    ("sparse gradient", topk, (1, 25000000), 1, "float32", {"k": 25000}),
    ("sparse gradient", grad, (1024, 4096), 1, "float32", {"op": "topk", "k": 64}),
    ("sort", topk, (65536, 8), 1, "float32", {"k": 8}),
    ("sort", topk, (16384, 32), 1, "float32", {"k": 32}),
    ("sort", topk, (4096, 100), 1, "float64", {"k": 100}),
    ("sort", topk, (1024, 256), 1, "bfloat16", {"k": 256}),
    ("sort", topk, (128, 1024), 1, "float32", {"k": 1024}),
    ("state space", linear, (8, 2048, 1024), 1, "float32", {}),
    ("state space", linear, (8, 2048, 1024), 1, "bfloat16", {}),
    ("state space", linear, (1, 4096, 40960), 1, "float32", {}),
    ("state space", linear, (64, 256, 512), 1, "float32", {}),
    ("state space", grad, (4, 2048, 1024), 1, "float32", {"op": "linear_scan"}),
    ("finance", scan, (10000, 252), 1, "float64", {"op": "cumprod"}),
    ("finance", scan, (252, 5000), 0, "float32", {"op": "cummax"}),
    ("finance", scan, (128, 4096), 1, "float32", {"reverse": True}),
    ("statistics", reduce, (100000, 100), 1, "float64", {"op": "sum"}),
    ("statistics", reduce, (1024, 65536), 1, "int32", {"op": "max"}),
    ("statistics", reduce, (8192, 4096), 0, "float32", {"op": "mean"}),
    ("histogram", count, (1, 67108864), 1, "int32", {"op": "bincount", "bins": 256}),
    ("histogram", count, (1, 67108864), 1, "int32", {"op": "bincount", "bins": 65536}),
    ("histogram", count, (28, 1048576), 1, "int32", {"op": "bincount", "bins": 255}),
    ("graph", count, (1048576, 128), 0, "float32", {"bins": 65536}),
    ("graph", count, (1048576, 128), 0, "bfloat16", {"bins": 65536}),
    ("graph", count, (1048576, 8), 0, "float32", {"op": "segment_max", "bins": 65536}),
    ("graph", count, (400000, 1), 0, "float32", {"bins": 24}),
    ("embedding", count, (65536, 4096), 0, "bfloat16", {"bins": 128256}),
    ("embedding", count, (8192, 1024), 0, "float32", {"bins": 32000}),
    ("statistics", softmax, (4096, 1000), 1, "float32", {"op": "logsumexp"}),
]


def of_programs() -> list[Problem]:
    """What real programs call, each named after its program."""
    return [
        call(shape, axis, dtype, name=f"{program}/{i}", **options)
        for i, (program, call, shape, axis, dtype, options) in enumerate(PROGRAMS)
    ]
