"""Scans: cumulative operations and linear recurrences, and their gradients, on random data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jaxgpuops
from benchmarks.runner import Case, array_name

# Cases for GPUs. `target` and `floor` are in us on an H200; the floor is the time of a kernel that copies as many bytes
# as have to be moved. The target is that of cumsum, which the other operations share (cumlogsumexp may take 1.15 times
# as long). The records are the fastest kernels of cumsum, cummax and cumlogsumexp known on an H200 before this package,
# other than those of torch and JAX, which are measured beside ours.
GPU = [
    # (shape, axis, dtype, target, floor, *records)
    ((1 << 27,), 0, "float32", 290, 275, "381 CUB", "384 CUB", "775 CUB"),
    ((1, 1 << 20), 1, "float32", 5, 3.4, "7.0 CUB", "7.1 CUB", "15.6 CUB"),
    ((1024, 65536), 1, "float32", 146, 139, "160 Triton", "245 CUB", "684 CUB"),
    ((65536, 1024), 1, "float32", 143, 139, "144 Triton", "194 CUB", "475 CUB"),
    ((65536, 1024), 1, "bfloat16", 75, 71, "81 Triton", "", ""),
    ((8, 4096, 2048), 1, "float32", 148, 139, "183 Triton", "", ""),
    ((65536, 1024), 0, "float32", 155, 139, "1447 Triton", "", ""),
    ((16, 128256), 1, "float32", 7, 4.9, "13.6 CUB", "13.6 CUB", "583 CUB"),
    ((4096, 128), 1, "float32", 3.2, 2.5, "4.2 Triton", "6.1 CUB", "16.7 CUB"),
]
# The floor: 3 arrays at the rate of a large copy.
GPU_LINEAR = [
    # (shape, axis, dtype, target, floor, record)
    ((8, 2048, 4096), 2, "float32", 190, 188, "192 accelerated-scan"),
    ((8, 4096, 2048), 1, "float32", 190, 188, ""),
    ((8, 2048, 4096), 2, "bfloat16", 98, 94, "109 accelerated-scan"),
    ((8, 2048, 1024), 2, "float32", 52, 47, "61 accelerated-scan"),
    ((32, 1024, 256), 2, "float32", 30, 23.5, "44 accelerated-scan"),
    ((1, 2048, 65536), 2, "float32", 385, 375, "394 accelerated-scan"),
    ((1, 16, 65536), 2, "float32", 9, 4.2, "28 accelerated-scan"),
    ((1, 1, 1 << 24), 2, "float32", 52, 47, "85 CUB"),
]
GPU_GRADIENT = [
    ("cumsum", (65536, 1024), 1, "float32"),
    ("cumprod", (1024, 65536), 1, "float32"),
    ("cumprod", (8, 4096, 2048), 1, "float32"),
    ("cummax", (65536, 1024), 1, "float32"),
    ("cumlogsumexp", (65536, 1024), 1, "float32"),
    ("linear_scan", (8, 2048, 4096), 2, "float32"),
    ("linear_scan", (8, 4096, 2048), 1, "float32"),
    ("linear_scan", (8, 2048, 4096), 2, "bfloat16"),
]

CPU = [
    ("cumsum", (1 << 22,), 0, "float32"),
    ("cumsum", (16, 128256), 1, "float32"),
    ("cumsum", (4096, 1024), 1, "float32"),
    ("cumsum", (4096, 1024), 1, "bfloat16"),
    ("cumsum", (8, 1024, 512), 1, "float32"),
    ("cumsum", (4096, 1024), 0, "float32"),
    ("cumsum", (4096, 128), 1, "float32"),
    ("cumprod", (4096, 1024), 1, "float32"),
    ("cummax", (4096, 1024), 1, "float32"),
    ("cummax", (8, 1024, 512), 1, "float32"),
    ("cumlogsumexp", (512, 1024), 1, "float32"),  # JAX needs a microsecond for each element
    ("cumlogsumexp", (1, 1024, 512), 1, "float32"),
]
CPU_LINEAR = [
    ((4, 512, 2048), 2, "float32"),
    ((4, 2048, 512), 1, "float32"),
    ((4, 512, 2048), 2, "bfloat16"),
    ((256, 512), 0, "float32"),
    ((1, 1, 1 << 20), 2, "float32"),
]
CPU_GRADIENT = [
    ("cumsum", (4096, 1024), 1, "float32"),
    ("cumprod", (4096, 1024), 1, "float32"),
    ("cummax", (4096, 1024), 1, "float32"),
    ("cumlogsumexp", (4096, 1024), 1, "float32"),
    ("linear_scan", (4, 512, 2048), 2, "float32"),
    ("linear_scan", (4, 2048, 512), 1, "float32"),
]

HEADLINES = {
    "cumsum 2^27 float32",
    "cumsum 65536 x 1024 float32",
    "cumsum 65536 x 1024 bfloat16",
    "cumsum 8 x 4096 x 2048 float32, axis 1",
    "cumsum 1 x 2^20 float32",
    "cummax 65536 x 1024 float32",
    "cumlogsumexp 65536 x 1024 float32",
    "linear_scan 8 x 2048 x 4096 float32",
    "linear_scan 8 x 4096 x 2048 float32, axis 1",
    "linear_scan 1 x 16 x 65536 float32",
    "gradient cumprod 1024 x 65536 float32",
    "gradient linear_scan 8 x 2048 x 4096 float32",
}

# The tolerance is relative to the largest result. JAX and torch add in bfloat16, or round to it more than once.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
NUMPY = {
    "cumsum": np.cumsum,
    "cumprod": np.cumprod,
    "cummax": np.maximum.accumulate,
    "cummin": np.minimum.accumulate,
    "cumlogsumexp": np.logaddexp.accumulate,
}
# Arrays that a gradient moves; those not listed move 4: the cotangent, x, y and the result.
ARRAYS = {"cumsum": 2, "linear_scan": 5}


def associative_scan(a, b, axis):
    def fold(before, after):
        return before[0] * after[0], after[0] * before[1] + after[1]

    return jax.lax.associative_scan(fold, (a, b), axis=axis)[1]


def loop(a, b, axis):
    def step(h, now):
        h = now[0] * h + now[1]
        return h, h

    a, b = jnp.moveaxis(a, axis, 0), jnp.moveaxis(b, axis, 0)
    return jnp.moveaxis(jax.lax.scan(step, jnp.zeros_like(b[0]), (a, b))[1], 0, axis)


def operands(name, key, shape, axis, dtype):
    """Returns values of x, or of a and b, whose results neither overflow nor vanish."""
    keys = jax.random.split(key)
    x = jax.random.normal(keys[0], shape)
    if name == "linear_scan":
        return jax.random.uniform(keys[1], shape).astype(dtype), x.astype(dtype)
    if name == "cumprod":
        x = jnp.sign(x) + (x == 0)  # these products are the same with any rounding and any order of factors
    return (x.astype(dtype),)


def functions(name, axis):
    """Returns the functions of the operands, ours and that of JAX."""
    if name == "linear_scan":
        return lambda a, b: jaxgpuops.linear_scan(a, b, axis=axis), lambda a, b: associative_scan(a, b, axis)
    return lambda x: getattr(jaxgpuops, name)(x, axis=axis), lambda x: getattr(jax.lax, name)(x, axis=axis)


def case(name, shape, axis, dtype, target=None, floor=None, record=""):
    size = np.prod(shape, dtype=np.int64).item() * jnp.dtype(dtype).itemsize
    arrays = 3 if name == "linear_scan" else 2
    ours, of_jax = functions(name, axis)
    of_library = {"jaxgpuops": lambda *args: (ours(*args),), "jax": lambda *args: (of_jax(*args),)}
    if name == "linear_scan":
        if jax.default_backend() == "cpu":  # on a GPU this takes milliseconds
            of_library["loop"] = lambda a, b: (loop(a, b, axis),)
    else:
        # On a GPU torch takes 24 to 377 ms along the first axis, but for sums of one row.
        if axis > 0 or jax.default_backend() == "cpu" or (len(shape) == 1 and name not in ("cummax", "cummin")):
            of_library["torch"] = lambda x: (_torch(name, x, axis),)
        if dtype != "bfloat16":  # NumPy and CuPy do not have bfloat16
            of_library["numpy"] = lambda x: (NUMPY[name](x, axis),)
            if name in ("cumsum", "cumprod"):
                of_library["cupy"] = lambda x: (getattr(x, name)(axis),)
    full_name = f"{name} {array_name(shape, axis, dtype)}"
    return Case(
        name=full_name,
        inputs=lambda key: operands(name, key, shape, axis, dtype),
        functions=of_library,
        bytes=arrays * size,
        floor=("copy", arrays * size // 2),
        target=target and target / floor * (1.15 if name == "cumlogsumexp" else 1),
        tolerance=TOLERANCE[dtype],
        facts={"record": record, "headline": full_name in HEADLINES},
    )


def _torch(name, x, axis):
    import torch

    if name == "cumlogsumexp":
        return x.logcumsumexp(axis)
    result = getattr(torch, name)(x, axis)
    return result.values if name in ("cummax", "cummin") else result


def gradient_case(name, shape, axis, dtype):
    """The backward pass alone, given what JAX saved in the forward pass."""
    size = np.prod(shape, dtype=np.int64).item() * jnp.dtype(dtype).itemsize
    arrays = ARRAYS.get(name, 4)
    ours, of_jax = functions(name, axis)

    def inputs(key):
        keys = jax.random.split(key)
        xs = operands(name, keys[0], shape, axis, dtype)
        if name == "cummax":  # no ties, because JAX splits the gradient of ties
            row = jnp.broadcast_to(jnp.arange(shape[axis], dtype=dtype), shape)
            xs = (jax.random.permutation(keys[0], row, axis, independent=True),)
        return jax.random.normal(keys[1], shape).astype(dtype), *(jax.vjp(fn, *xs)[1] for fn in (ours, of_jax))

    full_name = f"gradient {name} {array_name(shape, axis, dtype)}"
    return Case(
        name=full_name,
        inputs=inputs,
        functions={
            "jaxgpuops": lambda cotangent, pull, _: pull(cotangent),
            "jax": lambda cotangent, _, pull: pull(cotangent),
        },
        bytes=arrays * size,
        floor=("copy", arrays * size // 2),
        target=1.15,
        tolerance=TOLERANCE[dtype],
        facts={"headline": full_name in HEADLINES},
    )


def cases(platform: str) -> list[Case]:
    if platform == "gpu":
        some = [GPU[0], GPU[3], GPU[5]]  # cumprod and cummin use the same kernels as cumsum and cummax
        return [
            *(case("cumsum", *point[:5], point[5]) for point in GPU),
            *(case("cumprod", *point[:5]) for point in some),
            *(case("cummax", *point[:5], point[6]) for point in GPU),
            *(case("cummin", *point[:5]) for point in some),
            *(case("cumlogsumexp", *point[:5], point[7]) for point in GPU),
            *(case("linear_scan", *point) for point in GPU_LINEAR),
            *(gradient_case(*point) for point in GPU_GRADIENT),
        ]
    return [
        *(case(*point) for point in CPU),
        *(case("linear_scan", *point) for point in CPU_LINEAR),
        *(gradient_case(*point) for point in CPU_GRADIENT),
    ]
