"""Sort: `jaxgpuops.sort` and `argsort` on normal random data and on hostile rows, and `sort_key_val`."""

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
    if dtype != "bfloat16":  # which NumPy and CuPy do not know
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
            "torch": lambda x: (x.sort(axis, stable=True).indices.int(),),
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
        },
        bytes=4 * size,
        floor=("copy", 4 * size),
    )


def _cupy():
    import cupy

    return cupy


def cases(platform: str) -> list[Case]:
    points = GPU if platform == "gpu" else CPU
    return [case(*point) for point in points for case in (sort_case, argsort_case)] + [key_val_case(*points[0])]
