"""Sort: `jaxgpuops.sort` and `argsort` on normal random data and on hostile rows, `sort_key_val`, two keys,
segments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jaxgpuops
from benchmarks.runner import Case, array_name

GPU = [
    # (shape, axis, dtype)
    ((1, 1 << 24), 1, "float32"),
    ((1, 1 << 24), 1, "int32"),
    ((1, 1 << 24), 1, "bfloat16"),
    ((1, 1 << 20), 1, "float32"),
    ((1, 1 << 16), 1, "float32"),
    ((16, 1 << 20), 1, "float32"),
    ((64, 128256), 1, "float32"),
    ((256, 65536), 1, "float32"),
    ((4096, 4096), 1, "bfloat16"),
    ((4096, 1024), 1, "float32"),
    ((65536, 256), 1, "float32"),
    ((4096, 4096), 0, "float32"),
    ((65536, 256), 0, "float32"),
    ((256, 65536), 0, "float32"),
    ((64, 1024, 256), 1, "float32"),
]
GPU_WIDE = [
    ((1, 1 << 24), 1, "int64"),
    ((1, 1 << 24), 1, "float64"),
    ((4096, 1024), 1, "int64"),
]  # measured with JAX_ENABLE_X64=1
CPU = [
    ((1, 1 << 20), 1, "float32"),
    ((1, 1 << 20), 1, "int32"),
    ((16, 65536), 1, "float32"),
    ((1024, 1024), 1, "bfloat16"),
    ((4096, 64), 1, "float32"),
    ((65536, 8), 1, "float32"),
    ((1024, 1024), 0, "float32"),
]


def _hostile(axis):
    return {
        "rising": lambda x: (jnp.sort(x, axis),),
        "falling": lambda x: (-jnp.sort(x, axis),),
        "equal": lambda x: (jnp.ones_like(x),),
        "two values": lambda x: ((x > 0).astype(x.dtype),),
    }


def sort_case(shape, axis, dtype):
    size = np.prod(shape, dtype=np.int64).item() * jnp.dtype(dtype).itemsize
    functions = {
        "jaxgpuops": lambda x: (jaxgpuops.sort(x, axis=axis),),
        "jax": lambda x: (jnp.sort(x, axis),),
        "torch": lambda x: (x.sort(axis).values,),
    }
    if dtype != "bfloat16":  # NumPy and CuPy do not have bfloat16
        functions |= {"numpy": lambda x: (np.sort(x, axis),), "cupy": lambda x: (_cupy().sort(x, axis),)}
    return Case(
        name=f"sort {array_name(shape, axis, dtype)}",
        inputs=lambda key: (jax.random.normal(key, shape).astype(dtype),),
        functions=functions,
        bytes=2 * size,
        floor=("copy", 2 * size),
        hostile=_hostile(axis),
    )


def argsort_case(shape, axis, dtype):
    elements = np.prod(shape, dtype=np.int64).item()
    moved = elements * (jnp.dtype(dtype).itemsize + 4)
    return Case(
        name=f"argsort {array_name(shape, axis, dtype)}",
        inputs=lambda key: (jax.random.normal(key, shape).astype(dtype),),
        functions={
            "jaxgpuops": lambda x: (jaxgpuops.argsort(x, axis=axis),),
            "jax": lambda x: (jnp.argsort(x, axis),),
            "torch": lambda x: (x.sort(dim=axis, stable=True).indices.int(),),
        },
        bytes=moved,
        floor=("copy", moved),
        hostile=_hostile(axis),
    )


def key_val_case(shape, axis, dtype):
    size = np.prod(shape, dtype=np.int64).item() * jnp.dtype(dtype).itemsize
    return Case(
        name=f"sort_key_val {array_name(shape, axis, dtype)}",
        inputs=lambda key: tuple(jax.random.normal(k, shape).astype(dtype) for k in jax.random.split(key)),
        functions={
            "jaxgpuops": lambda x, y: jaxgpuops.sort_key_val(x, y, axis=axis),
            "jax": lambda x, y: tuple(jax.lax.sort((x, y), axis, num_keys=1)),
            "torch": lambda x, y: _torch_key_val(x, y, axis),
            "cupy": lambda x, y: _cupy_key_val(x, y, axis),
        },
        bytes=4 * size,
        floor=("copy", 4 * size),
    )


def _torch_key_val(x, y, axis):
    keys, order = x.sort(dim=axis, stable=True)
    return keys, y.gather(axis, order)


def _cupy_key_val(x, y, axis):
    order = _cupy().argsort(x, axis)  # a radix sort, which is stable
    return tuple(_cupy().take_along_axis(z, order, axis) for z in (x, y))


def two_keys_case(n):
    """Sorts by two keys. The first key has 1000 different values."""

    def of_torch(x, y):  # torch sorts one key of 64 bits
        return (((x.long() << 32) + y).sort().indices.int(),)

    def of_cupy(x, y):
        return (_cupy().lexsort(_cupy().stack([y, x])),)

    def inputs(key):
        keys = jax.random.split(key)
        return jax.random.randint(keys[0], (n,), 0, 1000), jax.random.randint(keys[1], (n,), 0, 1 << 30)

    place = lambda x: jax.lax.iota(jnp.int32, x.size)
    return Case(
        name=f"lexsort of two {array_name((n,), 0, 'int32')}",
        inputs=inputs,
        functions={
            "jaxgpuops": lambda x, y: (jaxgpuops.lax.sort((x, y, place(x)), num_keys=2)[2],),
            "jax": lambda x, y: (jnp.lexsort((y, x)),),
            "torch": of_torch,
            "cupy": of_cupy,
            "numpy": lambda x, y: (np.lexsort((y, x)),),
        },
        bytes=3 * 4 * n,
        floor=("copy", 3 * 4 * n),
    )


def segments_case(n, segments):
    """Sorts segments of random lengths, whose offsets are sorted random numbers."""

    def inputs(key):
        keys = jax.random.split(key)
        cuts = jnp.sort(jax.random.randint(keys[1], (segments - 1,), 0, n))
        zero = jnp.zeros(1, jnp.int32)
        return jax.random.normal(keys[0], (n,)), jnp.concatenate([zero, cuts, zero + n])

    def ids(offsets):
        return jnp.searchsorted(offsets, jax.lax.iota(jnp.int32, n), side="right")

    def of_torch(x, offsets):
        import torch

        by_value = x.sort(stable=True).indices
        of_place = torch.repeat_interleave(torch.arange(segments, device=x.device), offsets.diff(), output_size=n)
        return (x[by_value[of_place[by_value].sort(stable=True).indices]],)

    return Case(
        name=f"sort {array_name((n,), 0, 'float32')} in {segments} segments",
        inputs=inputs,
        functions={
            "jaxgpuops": lambda x, offsets: (jaxgpuops.sort(x, offsets=offsets),),
            "jax": lambda x, offsets: (jax.lax.sort((ids(offsets), x), num_keys=2)[1],),
            "torch": of_torch,
        },
        bytes=2 * 4 * n,
        floor=("copy", 2 * 4 * n),
    )


def _cupy():
    import cupy

    return cupy


def cases(platform: str) -> list[Case]:
    points = GPU if platform == "gpu" else CPU
    if platform == "gpu" and jax.config.jax_enable_x64:
        points = points + GPU_WIDE
    n = 1 << (24 if platform == "gpu" else 18)
    others = [key_val_case(*points[0]), two_keys_case(n), segments_case(n, n >> 12), segments_case(n, n >> 5)]
    return [case(*point) for point in points for case in (sort_case, argsort_case)] + others
