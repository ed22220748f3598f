"""Softmax, log-sum-exp, cross-entropy, the top-k gate, reductions, and gradients, on normal random data."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxgpuops
from benchmarks.runner import Case, array_name

# Cases for GPUs. `target` and `floor` are in us on an H200; the floor is the time of a kernel that copies as many bytes
# as have to be moved, or reads them. Floors that were not measured are computed from the rate of a large copy, 3.93
# TB/s. `record` is the fastest kernel known on an H200 before this package, other than those of JAX and torch, which
# are measured beside ours.
GPU_SOFTMAX = [
    # (shape, axis, dtype, target, floor, record)
    ((32768, 256), 1, "bfloat16", 9.3, 9.1, "9.9 QuACK"),
    ((32768, 256), 1, "float32", 18.2, 17.9, "18.6 QuACK"),
    ((32768, 1024), 1, "bfloat16", 35, 36.9, "35.3 QuACK"),
    ((32768, 1024), 1, "float32", 67, 71.3, "67.0 Triton"),
    ((32768, 4096), 1, "bfloat16", 131, 140, "132 Triton"),
    ((32768, 4096), 1, "float32", 258, 275, ""),
    ((16384, 16384), 1, "bfloat16", 258, 275, "261 QuACK"),
    ((16384, 16384), 1, "float32", 515, 546, "518 Triton"),
    ((8192, 65536), 1, "bfloat16", 513, 547, "516 QuACK"),
    ((8192, 65536), 1, "float32", 1022, 1095, "1028 QuACK"),
    ((4096, 262144), 1, "bfloat16", 1040, 1090, "1076 QuACK"),
    ((2048, 262144), 1, "float32", 1040, 1092, "1107 QuACK"),
    ((64, 128256), 1, "bfloat16", 10.5, 9.2, "12.0 QuACK"),
    ((64, 128256), 1, "float32", 19, 17.3, "26.0 QuACK"),
    ((1, 128256), 1, "float32", 4.5, 2.6, "7.3 QuACK"),
    ((1, 1 << 26), 1, "float32", 1.25, 1, ""),  # time of moving three times the array
    ((4096, 32768), 0, "float32", 1.06, 1, ""),
    ((64, 1024, 2048), 1, "float32", 1.06, 1, ""),
]
GPU_GRADIENT = [
    ((32768, 256), 1, "float32", 25, 26, "26.0 QuACK"),
    ((16384, 16384), 1, "bfloat16", 370, 410, "377 Triton"),
    ((16384, 16384), 1, "float32", 735, 819, "740 QuACK"),
    ((8192, 131072), 1, "bfloat16", 1520, 1639, "1879 QuACK"),
    ((2048, 262144), 1, "float32", 1520, 1639, "1799 QuACK"),
    ((64, 128256), 1, "float32", 27, 26, "34 QuACK"),
]
GPU_CROSS_ENTROPY = [((8192, 128256), "bfloat16", 490, 465, "579 QuACK")]
GPU_CROSS_ENTROPY_GRADIENT = [
    ((8192, 128256), "bfloat16", 1100, 1066, "1210 QuACK"),
    ((4096, 262144), "bfloat16", 1130, 1089, "1585 QuACK"),
]
GPU_GATE = [
    # (shape, dtype, k, target, floor)
    ((32768, 256), "float32", 8, 15, 10.2),
    ((4096, 64), "float32", 6, 3.2, 1.8),
    ((32768, 128), "bfloat16", 8, None, None),
]
GPU_REDUCTIONS = [  # 1.08 times the time of reading
    ("sum", (65536, 1024), 1, "float32"),
    ("sum", (16384, 16384), 1, "bfloat16"),
    ("sum", (4096, 32768), 0, "float32"),
    ("sum", (1, 1 << 26), 1, "float32"),
    ("max", (65536, 1024), 1, "float32"),
    ("max", (16384, 16384), 1, "bfloat16"),
    ("dot", (65536, 1024), 1, "float32"),
]

CPU_SOFTMAX = [
    ((4096, 64), 1, "float32"),
    ((4096, 1024), 1, "float32"),
    ((4096, 1024), 1, "bfloat16"),
    ((128, 32000), 1, "float32"),
    ((16, 128256), 1, "float32"),
    ((1, 128256), 1, "float32"),
    ((1, 1 << 22), 1, "float32"),
    ((8, 1024, 512), 1, "float32"),
    ((4096, 1024), 0, "float32"),
]
CPU_GRADIENT = [((4096, 1024), 1, "float32"), ((4096, 1024), 1, "bfloat16"), ((8, 1024, 512), 1, "float32")]
CPU_CROSS_ENTROPY = [((256, 32000), "float32"), ((256, 32000), "bfloat16")]
CPU_GATE = [((4096, 256), "float32", 8), ((4096, 64), "float32", 6), ((4096, 128), "bfloat16", 8)]
CPU_REDUCTIONS = [
    ("sum", (4096, 1024), 1, "float32"),
    ("sum", (4096, 1024), 1, "bfloat16"),
    ("sum", (4096, 1024), 0, "float32"),
    ("sum", (1 << 22,), 0, "float32"),
    ("max", (4096, 1024), 1, "float32"),
    ("dot", (4096, 1024), 1, "float32"),
]

HEADLINES = {
    "softmax 32768 x 256 float32",
    "softmax 32768 x 4096 bfloat16",
    "softmax 16384 x 16384 float32",
    "softmax 8192 x 65536 bfloat16",
    "softmax 64 x 128256 float32",
    "softmax 1 x 128256 float32",
    "softmax 64 x 1024 x 2048 float32, axis 1",
    "gradient softmax 16384 x 16384 bfloat16",
    "cross-entropy 8192 x 128256 bfloat16",
    "cross-entropy and gradient 8192 x 128256 bfloat16",
    "topk_softmax 32768 x 256 float32, k = 8",
    "topk_softmax 4096 x 64 float32, k = 6",
}

# The tolerance is relative to the largest result. JAX and torch round to bfloat16 more than once.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


def bytes_of(shape, dtype):
    return np.prod(shape, dtype=np.int64).item() * jnp.dtype(dtype).itemsize


def normal(shape, dtype):
    return lambda key: (jax.random.normal(key, shape).astype(dtype),)


def compiled(fn):
    """`torch.compile` of a function, applied at its first call."""

    @functools.cache
    def get():
        import torch

        torch._dynamo.reset()  # else torch would go on without compiling, for want of room in its cache
        return torch.compile(fn, dynamic=False)

    return lambda *args: get()(*args)


def of_torch(fn):
    """A function of torch, both as it is and compiled. A CPU machine may have no compiler."""
    both = {"torch": fn}
    return both if jax.default_backend() == "cpu" else both | {"torch.compile": compiled(fn)}


def named(name, **kwargs):
    return Case(name=name, facts={"record": kwargs.pop("record", ""), "headline": name in HEADLINES}, **kwargs)


def softmax_case(shape, axis, dtype, target=None, floor=None, record=""):
    size = bytes_of(shape, dtype)
    functions = {
        "jaxgpuops": lambda x: (jaxgpuops.softmax(x, axis=axis),),
        "jax": lambda x: (jax.nn.softmax(x, axis),),
        **of_torch(lambda x: (x.softmax(axis),)),
    }
    if axis == len(shape) - 1 and len(shape) == 2 and shape[1] <= 65536:
        functions["triton"] = _triton
    return named(
        f"softmax {array_name(shape, axis, dtype)}",
        inputs=normal(shape, dtype),
        functions=functions,
        bytes=2 * size,
        floor=("copy", size * 3 // 2 if shape == (1, 1 << 26) else size),
        target=target and target / floor,
        tolerance=TOLERANCE[dtype],
        record=record,
    )


def _triton(x):
    from benchmarks.triton_softmax import softmax

    return (softmax(x),)


def logsumexp_case(shape, axis, dtype):
    size = bytes_of(shape, dtype)
    return named(
        f"logsumexp {array_name(shape, axis, dtype)}",
        inputs=normal(shape, dtype),
        functions={
            "jaxgpuops": lambda x: (jaxgpuops.logsumexp(x, axis=axis),),
            "jax": lambda x: (jax.nn.logsumexp(x, axis),),
            **of_torch(lambda x: (x.logsumexp(axis),)),
        },
        bytes=size + size // shape[axis],
        floor=("read", size),
        target=1.08,
        tolerance=TOLERANCE[dtype],
    )


def gradient_case(shape, axis, dtype, target=None, floor=None, record=""):
    """The backward pass alone, given what the forward pass saved."""
    size = bytes_of(shape, dtype)

    def inputs(key):
        keys = jax.random.split(key)
        x, ct = (jax.random.normal(key, shape).astype(dtype) for key in keys)
        y, ours = jax.vjp(lambda x: jaxgpuops.softmax(x, axis=axis), x)
        return ct, y, ours, jax.vjp(lambda x: jax.nn.softmax(x, axis), x)[1]

    def gradient_of_torch(ct, y):
        import torch

        return (torch._softmax_backward_data(ct, y, axis, ct.dtype),)

    of_both = lambda fn: lambda ct, y, ours, theirs: fn(ct, y)
    return named(
        f"gradient softmax {array_name(shape, axis, dtype)}",
        inputs=inputs,
        functions={
            "jaxgpuops": lambda ct, y, ours, theirs: ours(ct),
            "jax": lambda ct, y, ours, theirs: theirs(ct),
            **{name: of_both(fn) for name, fn in of_torch(gradient_of_torch).items()},
        },
        bytes=3 * size,
        floor=("copy", 3 * size // 2),
        target=target and target / floor,
        tolerance=TOLERANCE[dtype],
        record=record,
    )


def logits_and_labels(shape, dtype):
    def inputs(key):
        keys = jax.random.split(key)
        return jax.random.normal(keys[0], shape).astype(dtype), jax.random.randint(keys[1], shape[:1], 0, shape[1])

    return inputs


def jax_cross_entropy(logits, labels):
    """The formula of optax, after the usual cast."""
    logits = logits.astype(jnp.float32)
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]


def torch_cross_entropy(logits, labels, **kwargs):
    import torch

    return torch.nn.functional.cross_entropy(logits, labels.long(), **kwargs)


def cross_entropy_case(shape, dtype, target=None, floor=None, record=""):
    size = bytes_of(shape, dtype)
    return named(
        f"cross-entropy {array_name(shape, 1, dtype)}",
        inputs=logits_and_labels(shape, dtype),
        functions={
            "jaxgpuops": lambda x, labels: (jaxgpuops.softmax_cross_entropy(x, labels),),
            "jax": lambda x, labels: (jax_cross_entropy(x, labels),),
            **of_torch(lambda x, labels: (torch_cross_entropy(x, labels, reduction="none"),)),
        },
        bytes=size + 8 * shape[0],
        floor=("read", size),
        target=target and target / floor,
        tolerance=TOLERANCE[dtype],
        record=record,
    )


def cross_entropy_gradient_case(shape, dtype, target=None, floor=None, record=""):
    """The gradient of the mean loss and that loss. The gradient takes the place of the logits, which nothing needs any
    more, as in a training step."""
    size = bytes_of(shape, dtype)

    def of_jax(loss):
        def both(x, labels):
            value, gradient = jax.value_and_grad(loss)(x, labels)
            return gradient, value

        return both

    def both_of_torch(x, labels):
        import torch

        x = x.detach().requires_grad_()
        value = torch_cross_entropy(x, labels)
        return torch.autograd.grad(value, x)[0], value.detach()

    return named(
        f"cross-entropy and gradient {array_name(shape, 1, dtype)}",
        inputs=logits_and_labels(shape, dtype),
        functions={
            "jaxgpuops": of_jax(lambda x, labels: jaxgpuops.softmax_cross_entropy(x, labels, reduction="mean")),
            "jax": of_jax(lambda x, labels: jax_cross_entropy(x, labels).mean()),
            **of_torch(both_of_torch),
        },
        bytes=2 * size + 4 * shape[0],
        floor=("copy", size),
        target=target and target / floor,
        tolerance=TOLERANCE[dtype],
        in_place=True,
        record=record,
    )


def gate_case(shape, dtype, k, target=None, floor=None):
    size = bytes_of(shape, dtype)

    def of_jax(x):
        values, indices = jax.lax.top_k(x, k)
        return jax.nn.softmax(values), indices

    return named(
        f"topk_softmax {array_name(shape, 1, dtype)}, k = {k}",
        inputs=normal(shape, dtype),
        functions={
            "jaxgpuops": lambda x: jaxgpuops.topk_softmax(x, k),
            "jax": of_jax,
            **of_torch(lambda x: (x.topk(k).values.softmax(-1),)),  # torch does not specify the indices of ties
        },
        bytes=size + shape[0] * k * (jnp.dtype(dtype).itemsize + 4),
        floor=("read", size),
        target=target and target / floor,
        tolerance=TOLERANCE[dtype],
    )


def reduction_case(name, shape, axis, dtype):
    size, count = bytes_of(shape, dtype), 2 if name == "dot" else 1
    of_numpy = {"sum": np.sum, "max": np.max, "dot": lambda x, y, axis: np.einsum("ij,ij->i", x, y)}[name]
    of_jax = {"sum": jnp.sum, "max": jnp.max, "dot": lambda x, y, axis: (x * y).sum(axis)}[name]
    by_torch = {
        "sum": lambda x: (x.sum(axis),),
        "max": lambda x: (x.amax(axis),),
        "dot": lambda x, y: ((x * y).sum(axis),),
    }[name]
    functions = {
        "jaxgpuops": lambda *xs: (getattr(jaxgpuops, name)(*xs, axis=axis),),
        "jax": lambda *xs: (of_jax(*xs, axis=axis),),
        **of_torch(by_torch),
    }
    if dtype != "bfloat16":
        functions["numpy"] = lambda *xs: (of_numpy(*xs, axis=axis),)
    return named(
        f"{name} {array_name(shape, axis, dtype)}",
        inputs=lambda key: tuple(jax.random.normal(k, shape).astype(dtype) for k in jax.random.split(key, count)),
        functions=functions,
        bytes=count * size + size // shape[axis],
        floor=("read", count * size),
        target=1.08,
        tolerance=TOLERANCE[dtype],
    )


def cases(platform: str) -> list[Case]:
    gpu = platform == "gpu"
    softmax = GPU_SOFTMAX if gpu else CPU_SOFTMAX
    entropy = GPU_CROSS_ENTROPY if gpu else CPU_CROSS_ENTROPY
    return [
        *(softmax_case(*point) for point in softmax),
        *(gradient_case(*point) for point in (GPU_GRADIENT if gpu else CPU_GRADIENT)),
        *(logsumexp_case(*point[:3]) for point in softmax),
        *(cross_entropy_case(*point) for point in entropy),
        *(cross_entropy_gradient_case(*point) for point in (GPU_CROSS_ENTROPY_GRADIENT if gpu else entropy)),
        *(gate_case(*point) for point in (GPU_GATE if gpu else CPU_GATE)),
        *(reduction_case(*point) for point in (GPU_REDUCTIONS if gpu else CPU_REDUCTIONS)),
    ]
