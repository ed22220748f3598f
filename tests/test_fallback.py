"""Plain JAX, where it takes the place of a kernel, gives the same results."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from reference import bits

import jaxgpuops
from jaxgpuops import _primitive
from jaxgpuops._arguments import ORDERED_DTYPES
from jaxgpuops.lax import _reduce as reduce
from jaxgpuops.lax import cross_entropy_primitives, logsumexp_primitives, scan_primitives, softmax_primitives


def awkward(dtype, shape, seed=0):
    """Arbitrary bits (NaNs of either sign with payloads, denormals), with zeros, infinities, extremes and many ties."""
    rng = np.random.default_rng(seed)
    if dtype == np.dtype(bool):
        return rng.integers(0, 2, shape).astype(bool)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    info = ml_dtypes.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype)
    special = np.append(np.array([info.min, info.max, 0, 1], dtype).view(unsigned), unsigned.type(1))  # 1: a denormal
    sign = unsigned.type(1 << (8 * dtype.itemsize - 1))
    any_bits = functools.partial(rng.integers, 0, np.iinfo(unsigned).max, dtype=unsigned, endpoint=True)
    repeated = rng.choice(np.concatenate([special, special ^ sign, any_bits(6)]), shape)
    return np.where(rng.random(shape) < 0.5, repeated, any_bits(shape)).view(dtype)


def both_ways(monkeypatch, calls, *arrays):
    """Returns the results of calls of these arrays, in one program with the kernels, and in one with plain JAX."""
    both = []
    for disable in ("", "all"):
        monkeypatch.setenv("JAXGPUOPS_DISABLE", disable)
        program = jax.jit(lambda arrays: [call(*arrays) for call in calls])
        with _primitive.recording() as lowerings:
            both.append(program(arrays))
        assert lowerings and {call.kernel is None for call in lowerings} == {disable == "all"}
    return both


@pytest.mark.parametrize("dtype", sorted(ORDERED_DTYPES, key=str), ids=str)
def test_fallback_equals_kernel(monkeypatch, dtype):
    with jax.enable_x64(True):
        x = awkward(dtype, (4, 33, 3))
        every = str(dtype) in ("float32", "bfloat16", "int64", "uint8", "bool")
        calls = [
            functools.partial(jaxgpuops.topk, k=k, axis=axis, largest=largest, sorted=sorted)
            for largest, sorted in itertools.product((True, False), (True, False))
            # The fallback treats dtypes differently only for the flags. So one dtype of each kind tries all axes and k.
            for axis in ((0, 1, 2) if every else (1,))
            for k in ((0, 1, x.shape[axis] - 1, x.shape[axis]) if every else (3, x.shape[axis]))
        ]
        calls += [
            functools.partial(f, axis=1, index_dtype=np.int32) for f in (jaxgpuops.lax.argmax, jaxgpuops.lax.argmin)
        ]
        for call, kernel, plain in zip(calls, *both_ways(monkeypatch, calls, x), strict=True):
            for a, b in zip(jax.tree.leaves(kernel), jax.tree.leaves(plain), strict=True):
                np.testing.assert_array_equal(bits(a), bits(b), err_msg=str(call))


def test_sorts_by_joined_keys(monkeypatch):
    """Without x64, too, keys of 32 bits are joined to integers of 64 bits."""
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, (3, 40)).astype(np.float32)
    y, offsets = x[:, ::-1].astype(np.int32), np.array([0, 7, 4, 30])
    calls = [
        lambda x, y: jaxgpuops.sort(x, offsets=offsets, descending=True),
        lambda x, y: jaxgpuops.argsort(x, offsets=offsets),
        lambda x, y: jaxgpuops.topk(x, 3, offsets=offsets),
        lambda x, y: jaxgpuops.sort(jax.lax.complex(x, y.astype(x.dtype))),
        lambda x, y: jaxgpuops.lax.sort((x, y, y.astype(np.int8), -x), num_keys=4),
        lambda x, y: jax.grad(lambda x: (jaxgpuops.sort(x, offsets=offsets) * y).sum())(x),
    ]
    kernels, plain = both_ways(monkeypatch, calls, x, y)
    jax.tree.map(np.testing.assert_array_equal, kernels, plain)


def scan_calls(kind, dtype):
    """Kernel calls on small integers: sums and products of them are exact, so that every order gives the same."""
    rng = np.random.default_rng(0)
    integers = lambda *shape: jnp.asarray(rng.integers(-1, 3, shape), dtype)
    shape, state = (3, 9, 4), (3, 1, 4)
    masks = [(), *([rng.random(s) < 0.3] for s in ((1, 9, 1), (3, 9, 1), (1, 9, 4), shape))]
    flags = lambda *names: [
        dict(zip(names, values, strict=True)) for values in itertools.product((False, True), repeat=len(names))
    ]
    for i, starts in enumerate(masks):
        # How masks and factors broadcast does not depend on the dtype, so float32 alone tries every shape of them.
        if dtype != np.float32 and i in (1, 2, 3):
            continue
        if kind == "linear":
            for options in flags("reverse", "transpose", "initial"):
                if options["transpose"] and options["initial"]:
                    continue
                h0 = [integers(*state)] if options["initial"] else []
                a = integers(*[shape, (1, 9, 1), (3, 1, 4), (1, 1, 4), (1, 1, 1)][i])
                yield functools.partial(
                    scan_primitives.linear_scan_p, integers(*shape), a, *h0, *starts, axis=1, **options
                )
            for options in flags("reverse", "initial"):
                h0 = [integers(*state)] if options["initial"] else []
                operands = (integers(*shape), integers(*shape), integers(*shape), *h0, *starts)
                yield functools.partial(scan_primitives.linear_scan_vjp_p, *operands, axis=1, **options)
        else:
            for options in flags("reverse", "exclusive"):
                x = integers(*shape)
                forward = functools.partial(scan_primitives.CUMULATIVE[kind], x, *starts, axis=1, **options)
                yield forward
                if jnp.issubdtype(dtype, jnp.inexact) and kind in scan_primitives.TANGENT:
                    for transpose in (False, True):
                        operands = (integers(*shape), x, forward()[0], *starts)
                        yield functools.partial(
                            scan_primitives.TANGENT[kind], *operands, axis=1, transpose=transpose, **options
                        )


@pytest.mark.parametrize(
    "kind, dtype",
    [
        *itertools.product(["cumsum", "cumprod", "cummax", "cummin", "linear"], ["float32", "bfloat16"]),
        *itertools.product(["cumsum", "cumprod", "linear"], ["complex64"]),
        *itertools.product(["cumsum", "cumprod", "cummax", "cummin"], ["int8", "uint32"]),
        ("cummax", "bool"),
        ("cumlogsumexp", "float32"),
    ],
)
def test_fallback_of_scans_equals_kernel(monkeypatch, kind, dtype):
    calls = list(scan_calls(kind, jnp.dtype(dtype)))
    for call, kernel, plain in zip(calls, *both_ways(monkeypatch, calls), strict=True):
        for a, b in zip(kernel, plain, strict=True):
            a, b = (np.asarray(y).astype(np.complex64 if dtype == "complex64" else np.float32) for y in (a, b))
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 if kind == "cumlogsumexp" else 0, err_msg=str(call))


def softmax_calls(dtype):
    """Kernel calls with every operand there is, on logits that are far apart and near."""
    rng = np.random.default_rng(0)
    shape = (3, 9, 4)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape) * 3, dtype)
    wide = np.float64 if dtype == "float64" else np.float32
    x, bias = normal(*shape), normal(1, 9, 1)
    scale, where = jnp.asarray(rng.uniform(0.5, 2, (3, 1, 4)), wide), jnp.asarray(rng.random((3, 9, 1)) < 0.7)
    t = normal(*shape)
    for scaled, biased, masked, query_axis in itertools.product((False, True), (False, True), (False, True), (None, 0)):
        operands = [a for a, there in ((scale, scaled), (bias, biased), (where, masked)) if there]
        flags = {"axis": 1, "factor": 0.5, "scaled": scaled, "masked": masked, "query_axis": query_axis}
        for kernel in (softmax_primitives.softmax_p, softmax_primitives.log_softmax_p):
            yield functools.partial(kernel, x, *operands, biased=biased, **flags)
        for parts in (False, True):
            yield functools.partial(logsumexp_primitives.logsumexp_p, x, *operands, biased=biased, parts=parts, **flags)
        if not biased:
            for transpose in (False, True):
                [y] = softmax_primitives.log_softmax_p(x, *operands, biased=False, **flags)
                kernel = functools.partial(softmax_primitives.log_softmax_jvp_p, transpose=transpose, **flags)
                yield functools.partial(kernel, t, y, *operands)
        if not biased and not masked:
            [y] = softmax_primitives.softmax_p(x, *operands, biased=False, **flags)
            flags = {"axis": 1, "factor": 0.5, "scaled": scaled}
            yield functools.partial(softmax_primitives.softmax_jvp_p, t, y, *operands, **flags)
    labels = jnp.asarray(rng.integers(-1, 10, (3, 1, 4)), np.int32)
    rows, cotangent = jnp.asarray(rng.random((1, 1, 4)) < 0.5), jnp.asarray(rng.standard_normal((3, 1, 1)), wide)
    for masked, options in itertools.product((False, True), ((0.0, 0.0), (0.1, 0.01))):
        flags = {"axis": 1, "masked": masked} | dict(zip(("label_smoothing", "z_loss"), options, strict=True))
        where = [rows] if masked else []
        yield functools.partial(cross_entropy_primitives.cross_entropy_p, x, labels, *where, **flags)
        yield functools.partial(cross_entropy_primitives.cross_entropy_grad_p, x, labels, cotangent, *where, **flags)


def reduce_calls(dtype):
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.integers(0, 5, (3, 9, 4)), dtype) for _ in range(2))  # sums are exact
    for where in ((), (jnp.asarray(rng.random((3, 1, 4)) < 0.7),), (jnp.asarray(rng.random((1, 9, 4)) < 0.7),)):
        flags = {"axis": 1, "masked": bool(where)}
        yield from (functools.partial(kernel, x, *where, **flags) for kernel in (reduce.max_p, reduce.min_p))
        if dtype != "bool":
            for wide in (False, True):
                yield functools.partial(reduce.sum_p, x, *where, wide=wide, divisor=1, **flags)
                yield functools.partial(reduce.dot_p, x, y, *where, wide=wide, **flags)


@pytest.mark.parametrize(
    "family, dtype",
    [
        *itertools.product([softmax_calls], ["float32", "float64", "float16", "bfloat16"]),
        *itertools.product([reduce_calls], ["float32", "bfloat16", "float8_e5m2", "int8", "uint32", "bool"]),
    ],
)
def test_fallback_of_rows_equals_kernel(monkeypatch, kernels, family, dtype):
    with jax.enable_x64(dtype == "float64"):
        calls = list(family(dtype))
        both = both_ways(monkeypatch, calls)
    tolerance = 4 * float(jnp.finfo(dtype).eps) + 1e-12 if family is softmax_calls else 0
    size_of = lambda y: np.abs(y[np.isfinite(y)]).max(initial=0)
    for call, *results in zip(calls, *both, strict=True):
        assert [a.dtype for a in results[0]] == [b.dtype for b in results[1]]
        kernel, plain = ([np.asarray(y).astype(np.float64) for y in of] for of in results)
        for a, b in zip(kernel, plain, strict=True):
            # Parts of one number are as exact as the larger one.
            largest = max(map(size_of, plain if call.keywords.get("parts") else [b]))
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * largest, err_msg=str(call))
