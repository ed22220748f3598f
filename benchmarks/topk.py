"""Top-k: `jaxgpuops.topk` with default flags on normal random data and on hostile rows, and its gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jaxgpuops
from benchmarks.runner import Case, array_name
from jaxgpuops.lax.along_axis import put_along_axis

# Cases for GPUs. `target` and `floor` are in us on an H200; the floor is the time of a kernel that only reads the
# input. `record` is the fastest kernel known on an H200 before this package, under whatever contract. Peers in torch
# and JAX are measured beside ours; records are not.
GPU = [
    # (shape, axis, dtype, k, target, floor, record)
    ((1, 1 << 20), 1, "float32", 64, 8, 2.8, "20.6 CUB, unsorted"),
    ((1, 1 << 27), 1, "float32", 64, 140, 121, "284 RAFT, unsorted"),
    ((1, 1 << 27), 1, "float32", 2048, 150, 122, "287 RAFT, unsorted"),
    ((4, 1 << 24), 1, "float32", 128, 80, 62, "217 RAFT, unsorted"),
    ((16, 1 << 20), 1, "float32", 2048, 32, 18, "70 RAFT, unsorted"),
    ((100, 1 << 20), 1, "float32", 256, 125, 96, "287 FlashInfer, unsorted"),
    ((1, 128256), 1, "float32", 50, 6, 1.6, "10.5 CUB, unsorted"),
    ((64, 128256), 1, "float32", 50, 16, 9.8, "40 RAFT, unsorted"),
    ((64, 128256), 1, "bfloat16", 50, 12, 6.2, "32 CUB, unsorted"),
    ((256, 32000), 1, "float32", 10, 13, 9.9, "24 FlashInfer, unsorted"),
    ((128, 65536), 1, "float32", 2048, 20, 10.1, "36 FlashInfer, unsorted"),
    ((128, 65536), 1, "bfloat16", 2048, 15, 6.5, "35 FlashInfer, unsorted"),
    ((1024, 131072), 1, "float32", 1, 128, 121, "141 XLA"),
    ((8192, 4096), 1, "float32", 64, 48, 33, "142 RAFT, unsorted"),
    ((8192, 4096), 1, "float32", 2, 38, 33, "99 RAFT"),
    ((65536, 1024), 1, "float32", 32, 85, 62, "336 CUB, unsorted"),
    ((32768, 256), 1, "float32", 8, 14, 10.2, "64 CUB, unsorted"),
    ((32768, 128), 1, "bfloat16", 8, 6.5, 3.9, "7.8 QuACK"),
    ((4096, 64), 1, "float32", 6, 3.0, 1.8, "3.7 Triton"),
    ((64, 4096, 256), 1, "float32", 32, 2, 1, ""),  # twice the time of reading the input
]
# The gradient writes zeros and k cotangents a row: 1.2 times the time of only writing.
GPU_GRADIENT = [
    ((1, 1 << 27), 1, "float32", 64),
    ((100, 1 << 20), 1, "float32", 256),
    ((64, 128256), 1, "float32", 50),
    ((8192, 4096), 1, "float32", 64),
    ((65536, 1024), 1, "float32", 32),
    ((32768, 128), 1, "bfloat16", 8),
    ((64, 4096, 256), 1, "float32", 32),
]

CPU = [
    ((1, 1 << 20), 1, "float32", 64),
    ((1, 1 << 20), 1, "float32", 2048),
    ((16, 128256), 1, "float32", 50),
    ((16, 128256), 1, "bfloat16", 50),
    ((64, 32000), 1, "float32", 10),
    ((8, 65536), 1, "float32", 2048),
    ((16, 131072), 1, "float32", 1),
    ((512, 4096), 1, "float32", 64),
    ((512, 4096), 1, "float32", 2),
    ((4096, 1024), 1, "float32", 32),
    ((4096, 256), 1, "float32", 8),
    ((4096, 128), 1, "bfloat16", 8),
    ((4096, 64), 1, "float32", 6),
    ((4, 4096, 64), 1, "float32", 32),
]
CPU_GRADIENT = [((16, 128256), 1, "float32", 50), ((4096, 1024), 1, "float32", 32)]


def name_of(shape, axis, dtype, k):
    return f"{array_name(shape, axis, dtype)}, k = {k}"


def _hostile(axis, k):
    """Rows that are hard for some way to select. They must take at most three times as long as random rows."""
    return {
        "rising": lambda x: (jnp.sort(x, axis),),
        "falling": lambda x: (-jnp.sort(x, axis),),
        "equal": lambda x: (jnp.ones_like(x),),
        "two values": lambda x: ((x > 0).astype(x.dtype),),
        "few ones": lambda x: ((x > jax.scipy.special.ndtri(1 - k / 2 / x.shape[axis])).astype(x.dtype),),
        "half NaN": lambda x: (jnp.where(x > 0, jnp.nan, x),),
        "high bits": lambda x: (1 + abs(x) * 2**-10,),
    }


def _numpy_topk(x, k, axis):
    chosen = np.argpartition(x, x.shape[axis] - k, axis)
    values = np.take_along_axis(x, np.take(chosen, range(-k, 0), axis), axis)
    return (np.flip(np.sort(values, axis), axis),)


def _cupy_topk(x, k, axis):  # argpartition of CuPy is a sort
    import cupy

    chosen = cupy.take(cupy.argsort(x, axis), cupy.arange(-1, -k - 1, -1), axis)
    return (cupy.take_along_axis(x, chosen, axis),)


def topk_case(shape, axis, dtype, k, target=None, floor=None, record=""):
    elements, size = np.prod(shape, dtype=np.int64).item(), jnp.dtype(dtype).itemsize
    functions = {
        "jaxgpuops": lambda x: jaxgpuops.topk(x, k, axis=axis),
        "jax": lambda x: jax.lax.top_k(x, k, axis=axis),
        "torch": lambda x: (x.topk(k, axis).values,),  # torch does not specify the indices of ties
    }
    if dtype != "bfloat16":  # NumPy and CuPy do not have bfloat16
        functions |= {
            "numpy": lambda x: _numpy_topk(x, k, axis),
            "cupy": lambda x: _cupy_topk(x, k, axis),
        }
    return Case(
        name=name_of(shape, axis, dtype, k),
        inputs=lambda key: (jax.random.normal(key, shape).astype(dtype),),
        functions=functions,
        bytes=elements * size + elements // shape[axis] * k * (size + 4),
        floor=("read", elements * size),
        target=target and target / floor,
        hostile=_hostile(axis, k),
        facts={"record": record},
    )


def gradient_case(shape, axis, dtype, k):
    elements, size = np.prod(shape, dtype=np.int64).item(), jnp.dtype(dtype).itemsize
    length = shape[axis]

    def inputs(key):
        x = jax.random.normal(key, shape).astype(dtype)
        values, indices = jaxgpuops.topk(x, k, axis=axis)
        return values, indices  # the values serve as cotangents

    # The derivative of `jax.lax.top_k` is a gather, and this is its transpose.
    def transposed_gather(cotangents, indices):
        take = lambda x: jnp.take_along_axis(x, indices, axis, mode="promise_in_bounds")
        return jax.linear_transpose(take, jax.ShapeDtypeStruct(shape, cotangents.dtype))(cotangents)

    return Case(
        name="gradient " + name_of(shape, axis, dtype, k),
        inputs=inputs,
        functions={
            "jaxgpuops": lambda cotangents, indices: (put_along_axis(cotangents, indices, axis, length),),
            "jax": transposed_gather,
        },
        bytes=elements * size + elements // length * k * (size + 4),
        floor=("write", elements * size),
        target=1.2,
    )


def cases(platform: str) -> list[Case]:
    if platform == "gpu":
        return [topk_case(*point) for point in GPU] + [gradient_case(*point) for point in GPU_GRADIENT]
    return [topk_case(*point) for point in CPU] + [gradient_case(*point) for point in CPU_GRADIENT]
