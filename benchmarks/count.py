"""Counts and segments: bincount, histogram, segment sums, extremes and softmax, and the gradient of an embedding.

Ids are uniform, or, under another name, such that one bin or segment has 90 % or all of them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxgpuops
from benchmarks.runner import Case, array_name

GPU_BINCOUNT = [(1 << 26, 256), (1 << 26, 4096), (1 << 26, 65536), (1 << 26, 1 << 20)]
GPU_WEIGHTED = [(1 << 26, 256)]
GPU_HISTOGRAM = [(1 << 26, 256)]
GPU_PAIRS = [(10_000_000, 28, 255, "float32"), (10_000_000, 28, 255, "int32"), (1 << 17, 28, 255, "float32")]
GPU_SEGMENTS = [
    # (op, rows, features, segments, dtype, sorted)
    ("segment_sum", 1 << 20, 128, 1 << 16, "float32", True),
    ("segment_sum", 1 << 20, 128, 1 << 16, "float32", False),
    ("segment_sum", 1 << 20, 128, 1 << 16, "bfloat16", True),
    ("segment_sum", 1 << 20, 128, 1 << 16, "bfloat16", False),
    ("segment_sum", 1 << 24, 1, 1 << 20, "float32", True),
    ("segment_max", 1 << 20, 128, 1 << 16, "float32", False),
    ("segment_softmax", 1 << 20, 8, 1 << 16, "float32", True),
    ("segment_softmax", 1 << 20, 8, 1 << 16, "bfloat16", True),
    ("segment_logsumexp", 1 << 20, 8, 1 << 16, "float32", True),
]
GPU_TAKE = [(65536, 4096, 128256, "bfloat16"), (65536, 4096, 128256, "float32")]

CPU_BINCOUNT = [(1 << 20, 256), (1 << 20, 65536)]
CPU_WEIGHTED = [(1 << 20, 256)]
CPU_HISTOGRAM = [(1 << 20, 256)]
CPU_PAIRS = [(1 << 16, 28, 255, "float32")]
CPU_SEGMENTS = [
    ("segment_sum", 1 << 16, 64, 1 << 12, "float32", True),
    ("segment_sum", 1 << 16, 64, 1 << 12, "float32", False),
    ("segment_max", 1 << 16, 64, 1 << 12, "float32", False),
    ("segment_softmax", 1 << 16, 8, 1 << 12, "float32", True),
]
CPU_TAKE = [(4096, 256, 16384, "float32")]

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # relative to the largest result; JAX and torch may add up in bfloat16


def _size(*shape, dtype="int32"):
    return int(np.prod(shape, dtype=np.int64)) * jnp.dtype(dtype).itemsize


def _hot(ids, length):
    """Replaces 90 % of the ids by the middle one."""
    places = jax.lax.iota(jnp.int32, ids.size)
    return jnp.where(places % 10 != 0, jnp.full_like(ids, length // 2), ids)


def _zipf(ids, length):
    """Draws ids distributed approximately as the words of a text: the n-th occurs 1 / n times as often as the first."""
    share = (ids.astype(jnp.float32) + 0.5) / length
    return jnp.minimum(jnp.exp(share * np.log(length)).astype(jnp.int32) - 1, length - 1)


def _hostile(length, sorted=False):
    """Makes hostile arguments from the last argument, the ids."""
    forms = {"90 % in one": _hot, "all in one": lambda ids, length: jnp.full_like(ids, length // 2)}
    in_order = jnp.sort if sorted else lambda ids: ids
    of_last = lambda form: lambda *args: (*args[:-1], in_order(form(args[-1], length)))
    return {name: of_last(form) for name, form in forms.items()}


def _drawn(key, n, length, sorted=False):
    ids = jax.random.randint(key, (n,), 0, length, jnp.int32)
    return jnp.sort(ids) if sorted else ids


def bincount_case(n, length):
    return Case(
        name=f"bincount {array_name((n,), 0, 'int32')} into {array_name((length,), 0, '').strip()}",
        inputs=lambda key: (_drawn(key, n, length),),
        functions={
            "jaxgpuops": lambda x: (jaxgpuops.bincount(x, length),),
            "jax": lambda x: (jnp.bincount(x, length=length),),
            "torch": lambda x: (x.bincount(minlength=length),),
            "cupy": lambda x: (_cupy().bincount(x, minlength=length),),
            "numpy": lambda x: (np.bincount(x, minlength=length),),
        },
        bytes=_size(n) + _size(length),
        floor=("read", _size(n)),
        hostile=_hostile(length),
    )


def weighted_case(n, length):
    return Case(
        name=f"bincount {array_name((n,), 0, 'float32')} weights into {length}",
        inputs=lambda key: (jax.random.uniform(key, (n,)), _drawn(key, n, length)),
        functions={
            "jaxgpuops": lambda w, x: (jaxgpuops.bincount(x, length, w),),
            "jax": lambda w, x: (jnp.bincount(x, w, length=length),),
            "torch": lambda w, x: (x.bincount(w, minlength=length),),
            "cupy": lambda w, x: (_cupy().bincount(x, w, minlength=length),),
            "numpy": lambda w, x: (np.bincount(x, w, minlength=length),),
        },
        bytes=2 * _size(n) + _size(length),
        floor=("read", 2 * _size(n)),
        tolerance=1e-3,  # sums of so many float32 numbers in plain order have this error
        hostile=_hostile(length),
    )


def histogram_case(n, bins):
    low, high = -4.0, 4.0

    def of_torch(x):
        import torch

        return (torch.histc(x, bins, low, high),)

    return Case(
        name=f"histogram {array_name((n,), 0, 'float32')} into {bins}",
        inputs=lambda key: (jax.random.normal(key, (n,)),),
        functions={
            "jaxgpuops": lambda x: jaxgpuops.histogram(x, bins, range=(low, high))[:1],
            "jax": lambda x: jnp.histogram(x, bins, (low, high))[:1],
            "torch": of_torch,
            "cupy": lambda x: _cupy().histogram(x, bins, (low, high))[:1],
            "numpy": lambda x: np.histogram(x, bins, (low, high))[:1],
        },
        bytes=_size(n) + _size(bins),
        floor=("read", _size(n)),
        tolerance=1e-4,  # torch and CuPy round at the edges of bins in their own ways
    )


def pairs_case(n, features, bins, dtype):
    """The sums of boosted trees: gradients and hessians by bin, for each feature."""
    one_by_one = lambda of_one: jax.vmap(lambda pairs, ids: of_one(pairs, ids, bins), in_axes=(None, 0))

    def inputs(key):
        ids = jax.random.randint(key, (features, n), 0, bins, jnp.int32)
        draw = jax.random.normal if dtype == "float32" else lambda *a: jax.random.randint(*a, -99, 99, jnp.int32)
        return draw(key, (n, 2)), ids

    def of_torch(pairs, ids):
        rows = (ids + bins * ids.new_tensor(range(features))[:, None]).ravel()
        out = pairs.new_zeros((features * bins, 2))
        return (out.index_add_(0, rows, pairs.repeat(features, 1)).reshape(features, bins, 2),)

    return Case(
        name=f"pairs {array_name((features, n), 1, dtype)} into {bins}",
        inputs=inputs,
        functions={
            "jaxgpuops": lambda pairs, ids: (one_by_one(jaxgpuops.segment_sum)(pairs, ids),),
            "jax": lambda pairs, ids: (one_by_one(jax.ops.segment_sum)(pairs, ids),),
            "torch": of_torch,
        },
        bytes=_size(features, n) + _size(n, 2) + _size(features, bins, 2),
        floor=("read", _size(features, n)),
        tolerance=1e-3 if dtype == "float32" else 0.0,
        hostile={"90 % in one": lambda pairs, ids: (pairs, _hot(ids.ravel(), bins).reshape(ids.shape))},
    )


def _jax_segments(op, segments, sorted):
    reduce = functools.partial(jax.ops.segment_sum, num_segments=segments, indices_are_sorted=sorted)
    largest = functools.partial(jax.ops.segment_max, num_segments=segments, indices_are_sorted=sorted)

    def softmax(x, ids):
        wide = x.astype(jnp.float32)
        terms = jnp.exp(wide - largest(wide, ids)[ids])
        return (terms / reduce(terms, ids)[ids]).astype(x.dtype)

    def logsumexp(x, ids):
        most = largest(x, ids)
        return jnp.log(reduce(jnp.exp(x - most[ids]), ids)) + most

    return {"segment_sum": reduce, "segment_max": largest, "segment_softmax": softmax, "segment_logsumexp": logsumexp}[
        op
    ]


def _torch_segments(op, segments):
    def reduced(x, ids, how):
        out = x.new_zeros((segments, *x.shape[1:]))
        if how == "sum":
            return out.index_add_(0, ids, x)
        return out.fill_(float("-inf")).index_reduce_(0, ids, x, "amax")

    def softmax(x, ids):
        wide = x.float()
        terms = (wide - reduced(wide, ids, "max")[ids]).exp()
        return (terms / reduced(terms, ids, "sum")[ids]).to(x.dtype)

    def logsumexp(x, ids):
        most = reduced(x, ids, "max")
        return reduced((x - most[ids]).exp(), ids, "sum").log() + most

    return {
        "segment_sum": lambda x, ids: reduced(x, ids, "sum"),
        "segment_max": lambda x, ids: reduced(x, ids, "max"),
        "segment_softmax": softmax,
        "segment_logsumexp": logsumexp,
    }[op]


def segments_case(op, rows, features, segments, dtype, sorted):
    ours = functools.partial(getattr(jaxgpuops, op), num_segments=segments, indices_are_sorted=sorted)
    of_jax, of_torch = _jax_segments(op, segments, sorted), _torch_segments(op, segments)
    data, results = _size(rows, features, dtype=dtype), _size(segments, features, dtype=dtype)

    def inputs(key):
        # Every segment has a row. So no logarithm is infinite, and libraries need not agree on the result of an empty
        # segment.
        ids = _drawn(key, rows, segments).at[:segments].set(jnp.arange(min(rows, segments), dtype=jnp.int32))
        return jax.random.normal(key, (rows, features)).astype(dtype), jnp.sort(ids) if sorted else ids

    return Case(
        name=f"{op} {array_name((rows, features), 1, dtype)} into {segments}{', sorted' * sorted}",
        inputs=inputs,
        functions={
            "jaxgpuops": lambda x, ids: (ours(x, ids),),
            "jax": lambda x, ids: (of_jax(x, ids),),
            "torch": lambda x, ids: (of_torch(x, ids),),
        },
        bytes=data + _size(rows) + (data if op == "segment_softmax" else results),
        floor=("copy", data) if op == "segment_softmax" else ("read", data),
        tolerance=0.0 if op == "segment_max" else TOLERANCE[dtype],
        hostile=_hostile(segments, sorted),
    )


def take_case(count, features, rows, dtype):
    """The gradient of an embedding, which writes the whole table."""

    def gradient(take):
        table = jax.ShapeDtypeStruct((rows, features), dtype)
        zeros = lambda: jnp.zeros(table.shape, table.dtype)
        return lambda ct, ids: jax.vjp(lambda table: take(table, ids), zeros())[1](ct)

    def of_torch(ct, ids):
        return (ct.new_zeros((rows, features)).index_add_(0, ids, ct),)

    return Case(
        name=f"gradient take {array_name((count, features), 1, dtype)} into {rows}",
        inputs=lambda key: (jax.random.normal(key, (count, features)).astype(dtype), _drawn(key, count, rows)),
        functions={
            "jaxgpuops": gradient(jaxgpuops.take),
            "jax": gradient(lambda table, ids: jnp.take(table, ids, axis=0)),
            "torch": of_torch,
        },
        bytes=_size(count, features, dtype=dtype) + _size(rows, features, dtype=dtype) + _size(count),
        floor=("write", _size(rows, features, dtype=dtype)),
        tolerance=TOLERANCE[dtype],
        hostile={"Zipf": lambda ct, ids: (ct, _zipf(ids, rows))},
    )


def _cupy():
    import cupy

    return cupy


def cases(platform: str) -> list[Case]:
    grids = (
        (bincount_case, GPU_BINCOUNT, CPU_BINCOUNT),
        (weighted_case, GPU_WEIGHTED, CPU_WEIGHTED),
        (histogram_case, GPU_HISTOGRAM, CPU_HISTOGRAM),
        (pairs_case, GPU_PAIRS, CPU_PAIRS),
        (segments_case, GPU_SEGMENTS, CPU_SEGMENTS),
        (take_case, GPU_TAKE, CPU_TAKE),
    )
    return [make(*point) for make, gpu, cpu in grids for point in (gpu if platform == "gpu" else cpu)]
