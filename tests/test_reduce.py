"""Values and derivatives of row reductions: against NumPy in higher precision and jnp."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.test_util
import ml_dtypes
import numpy as np
import pytest
import reference
import scan_reference
from reference import assert_close, x64

import jaxgpuops
from jaxgpuops.lax import _reduce as reduce

NAMES = ("sum", "mean", "max", "min", "dot")
DTYPES = sorted(reduce.SUMMED_DTYPES, key=str)
INF, NAN = np.inf, np.nan
TIERS = {"public": jaxgpuops, "lax": jaxgpuops.lax}
tiers = pytest.mark.parametrize("module", TIERS.values(), ids=TIERS)


def values(rng, shape, dtype):
    if not reference.is_float(dtype):
        return reference.random_bits(rng, shape, dtype)
    return rng.standard_normal(shape).astype(dtype)


def check(name, arrays, axis=-1, where=None):
    """The public function against NumPy, in the widest type; integers exactly."""
    with x64(arrays[0].dtype):
        y = np.asarray(getattr(jaxgpuops, name)(*arrays, axis=axis, where=where))
    compare(y, name, arrays, axis, where)


def check_all(calls):
    """Several calls (name, arrays, options) of one dtype, in one program: most of a test's time goes into compiling."""

    @jax.jit
    def results(arrays):
        return [getattr(jaxgpuops, name)(*of, **options) for of, (name, _, options) in zip(arrays, calls, strict=True)]

    with x64(calls[0][1][0].dtype):
        found = [np.asarray(y) for y in results([arrays for _, arrays, _ in calls])]
    for y, (name, arrays, options) in zip(found, calls, strict=True):
        compare(y, name, arrays, **options)


def compare(y, name, arrays, axis=-1, where=None):
    dtype = arrays[0].dtype
    axes = tuple(range(arrays[0].ndim)) if axis is None else axis
    is_float = reference.is_float(dtype)
    mask = np.ones(arrays[0].shape, bool) if where is None else np.broadcast_to(where, arrays[0].shape)
    wide = np.longdouble if is_float or name == "mean" else dtype
    x = functools.reduce(np.multiply, (a.astype(wide) for a in arrays))
    if name in ("max", "min"):
        identity = scan_reference.identity(f"cum{name}", dtype)
        fold = np.max if name == "max" else np.min
        expected, bound = fold(np.where(mask, x, np.asarray(identity).astype(wide)), axis=axes), 0
        assert y.dtype == dtype
    else:
        x = np.where(mask, x, 0)
        expected, bound = x.sum(axes, dtype=wide), 0
        if is_float:
            bound = scan_reference.eps(dtype) * (4 + np.log2(x.size + 1)) * abs(x).sum(axes)
        if name == "mean":
            count = mask.sum(axes)
            assert y.dtype == (dtype if is_float else np.float64 if dtype.itemsize == 8 else np.float32)
            with np.errstate(invalid="ignore"):
                expected = expected.astype(np.longdouble) / count
            bound = (
                bound / np.maximum(count, 1) if is_float else 1e-5 * abs(x.astype(np.longdouble)).max(axes, initial=1)
            )
        else:
            assert y.dtype == dtype
        bound = bound + 2 * scan_reference.rounding(dtype, np.nan_to_num(expected)) if is_float else bound
    assert_close(y, expected, bound)


@pytest.mark.parametrize("name", ["sum", "max", "dot"])
@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_any_array(name, data):
    shape = data.draw(scan_reference.SHAPES)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rank = len(shape)
    axis = data.draw(st.one_of(st.integers(-rank, rank - 1), st.just(None)))
    where = None
    if data.draw(st.booleans()):
        sizes = tuple(n if data.draw(st.booleans()) else 1 for n in shape)[data.draw(st.integers(0, rank)) :]
        where = rng.random(sizes) < data.draw(st.sampled_from([0.1, 0.7]))
    dtype = data.draw(st.sampled_from(DTYPES))
    arrays = [values(rng, shape, dtype) for _ in range(1 + (name == "dot"))]
    check(name, arrays, axis, where)


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype(name):
    rng = np.random.default_rng(0)
    for dtype in DTYPES:
        if name == "mean" and not reference.is_float(dtype) and dtype.itemsize == 8:
            continue  # an integer of 64 bits loses digits when it becomes a float
        where = rng.random((3, 1, 5)) < 0.5
        arrays = [values(rng, (3, 40, 5), dtype) for _ in range(1 + (name == "dot"))]
        check(name, arrays, 1, where)
        check(name, arrays, (1, 2))


@pytest.mark.parametrize("name", ["sum", "max", "dot"])
def test_lengths(name):
    rng = np.random.default_rng(0)
    lengths = [1, 2, 3, 7, 8, 9, 31, 33, 63, 65, 127, 129, 255, 257, 1023, 1025, 4097, 50257, 70_000]
    for n in lengths:
        arrays = [values(rng, (2, n), np.dtype(np.float32)) for _ in range(1 + (name == "dot"))]
        check(name, arrays)
        if n < 2000:
            check(name, [a.reshape(n, 2) for a in arrays], 0)


@tiers
@pytest.mark.parametrize("axis", [0, -2, None, (0, 1), (2, 1), (0, 2), (-1, 0, 1), (), [1, 2]], ids=str)
def test_axes(module, axis):
    rng = np.random.default_rng(0)
    x, ct = rng.standard_normal((2, 3, 4, 5)), rng.standard_normal((2, 3, 4, 5))
    options = [{"where": w, "keepdims": k} for w, k in ((None, False), (rng.random((3, 1, 1)) < 0.7, True))]
    initial = {"max": {"initial": -INF}, "min": {"initial": INF}}
    theirs = {name: functools.partial(getattr(jnp, name), **initial.get(name, {})) for name in NAMES[:4]}
    theirs["dot"] = lambda x, y, **options: jnp.sum(x * y, **options)

    def results(functions, axis):
        for (name, function), option in itertools.product(functions.items(), options):
            fn = lambda x: function(*[x] * (1 + (name == "dot")), axis=axis, **option)
            y, pull = jax.vjp(fn, x)
            yield y, pull(ct.ravel()[: y.size].reshape(y.shape))[0]

    with jax.enable_x64(True):
        actual = jax.jit(lambda: list(results({name: getattr(module, name) for name in NAMES}, axis)))()
        expected = jax.jit(lambda: list(results(theirs, tuple(axis) if isinstance(axis, list) else axis)))()
        for (y, gradient), (y_expected, gradient_expected) in zip(actual, expected, strict=True):
            assert y.shape == y_expected.shape
            np.testing.assert_allclose(y, y_expected, rtol=1e-12)
            np.testing.assert_allclose(gradient, gradient_expected, rtol=1e-12)


@tiers
def test_booleans(module):
    x = np.array([[True, False, True], [False, False, False]])
    assert module.sum(x).dtype == jnp.sum(x).dtype and module.sum(x).tolist() == [2, 0]
    assert module.dot(x, x).tolist() == [2, 0]
    assert module.max(x).tolist() == [True, False] and module.min(x).tolist() == [False, False]
    assert module.min(x, where=x).tolist() == [True, True]
    np.testing.assert_allclose(module.mean(x), [2 / 3, 0])
    with jax.numpy_dtype_promotion("strict"):  # the mean of integers is a float by our rule, and not implicit
        np.testing.assert_allclose(module.mean(x.astype(np.int32)), [2 / 3, 0])


@tiers
def test_empty_rows(module):
    x = np.zeros((2, 0), np.float32)
    assert module.sum(x).tolist() == module.dot(x, x).tolist() == [0.0, 0.0]
    assert np.isnan(module.mean(x)).all()
    assert module.sum(x, axis=0).shape == (0,) and module.max(x, axis=0).shape == (0,)
    for name in ("max", "min"):
        with pytest.raises(ValueError, match=rf"{name}: there is no {name} of no elements: x has shape \(2, 0\)"):
            getattr(module, name)(x)


def test_16_bit_floats_accumulate_in_float32():
    for dtype in (np.float16, ml_dtypes.bfloat16):
        x = np.ones((2, 5000), dtype)
        expected = np.asarray(5000).astype(dtype)
        assert np.all(np.asarray(jaxgpuops.sum(x)) == expected) and np.all(np.asarray(jaxgpuops.dot(x, x)) == expected)
        assert np.all(np.asarray(jaxgpuops.mean(np.full((2, 4097), 3, dtype))) == 3)
    big = np.full((1, 100), 60000, np.float16)
    assert jaxgpuops.mean(big).tolist() == [60000.0]  # the sum would be infinite


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_nans_and_infinities(dtype):
    palette = np.array([1.0, INF, -INF, NAN]).astype(dtype)
    x = palette[np.array(list(itertools.product(range(4), repeat=4)))]
    with x64(dtype), np.errstate(invalid="ignore"):
        for name in ("sum", "max", "min"):
            np.testing.assert_array_equal(getattr(jaxgpuops, name)(x), getattr(np, name)(x, axis=-1))
        where = np.isfinite(x)
        np.testing.assert_array_equal(jaxgpuops.sum(x, where=where), where.sum(-1))
        np.testing.assert_array_equal(jaxgpuops.dot(x, x, where=where), where.sum(-1))
        np.testing.assert_array_equal(jaxgpuops.max(x, where=where), np.where(where.any(-1), 1, -INF))


@tiers
def test_gradients_of_extremes(module):
    x = jnp.array([[1.0, 2.0, 2.0], [NAN, 1.0, NAN], [3.0, NAN, 5.0]])
    where = jnp.array([[True, True, True], [True, True, True], [False, False, False]])
    gradient = jax.grad(lambda x: jnp.nan_to_num(module.max(x, where=where), neginf=0).sum())(x)
    assert gradient[0].tolist() == [0.0, 0.5, 0.5] and gradient[2].tolist() == [0.0, 0.0, 0.0]
    [pulled] = jax.vjp(lambda x: module.min(x, where=where), x)[1](jnp.ones(3))
    assert pulled.tolist() == [[1.0, 0.0, 0.0], [0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]


@tiers
def test_gradients_of_masked_elements_are_0(module):
    x = jnp.array([[1.0, NAN, 3.0], [INF, 2.0, NAN]])
    where = jnp.isfinite(x)
    for name in NAMES:
        fn = lambda x: getattr(module, name)(*[x] * (1 + (name == "dot")), where=where).sum()
        gradient = np.asarray(jax.grad(fn)(x))
        assert np.isfinite(gradient).all() and np.all(gradient[~np.asarray(where)] == 0)


@tiers
def test_finite_differences(module):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, y, where = rng.standard_normal((2, 3, 4)), rng.standard_normal((3, 1)), rng.random((3, 4)) < 0.8
        modes = ("fwd", "rev") if module is jaxgpuops.lax else ("rev",)
        for name in NAMES[:4]:
            fn = lambda x: getattr(module, name)(x, axis=1, where=where) ** 2
            fn_finite = lambda x: jnp.where(jnp.isfinite(out := fn(x)), out, 0)
            jax.test_util.check_grads(jax.jit(fn_finite), (x,), order=2, modes=modes, atol=1e-6, rtol=1e-6)
        dot = lambda x, y: module.dot(x, y, axis=(1, 2), where=where)
        jax.test_util.check_grads(jax.jit(dot), (x, y), order=2, modes=modes, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("n", [1, 3, 12, 13])
def test_many_short_rows(n):
    """There are more rows than one strip has, and the last strip is not full. Each row has the bits that it has
    alone."""
    rng = np.random.default_rng(0)
    where = rng.random((2100, n)) < 0.8
    for dtype in ("float32", "float64", ml_dtypes.bfloat16, "int8", "uint16"):
        operands = {name: [values(rng, (2100, n), dtype) for _ in range(1 + (name == "dot"))] for name in NAMES}
        calls = [
            (name, arrays, {"where": mask}) for name, arrays in operands.items() for mask in (None, where, where[0])
        ]
        if dtype == "float32":
            beside = {name: [x.reshape(525, n, 4) for x in arrays] for name, arrays in operands.items()}  # four
            for mask in (None, where.reshape(525, n, 4)):
                calls += [(name, arrays, {"axis": 1, "where": mask}) for name, arrays in beside.items()]

            @jax.jit
            def results(operands, beside):
                return [
                    getattr(jaxgpuops, name)(*arrays[name], axis=1) for arrays in (operands, beside) for name in NAMES
                ]

            last = [{name: [x[-3:] for x in arrays] for name, arrays in of.items()} for of in (operands, beside)]
            for y, alone in zip(results(operands, beside), results(*last), strict=True):
                np.testing.assert_array_equal(y[-3:], alone)
        check_all(calls)


@pytest.mark.parametrize("n", [7, 1000, 40_000])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(n):
    rng = np.random.default_rng(0)
    x, where = rng.standard_normal((5, n)).astype(np.float32), rng.random(n) < 0.7
    for name in ("sum", "max", "dot"):
        fn = lambda x: getattr(jaxgpuops, name)(*[x] * (1 + (name == "dot")), where=where)
        np.testing.assert_array_equal(np.stack([fn(row) for row in x]), fn(x))
        np.testing.assert_array_equal(jax.vmap(fn)(x), fn(x))


X = np.zeros((3, 4), np.float32)
WRONG = {
    "axis": (ValueError, {"axis": 2}, "axis must be between -2 and 1"),
    "axis twice": (ValueError, {"axis": (1, -1)}, "axis has duplicates"),
    "axis type": (TypeError, {"axis": "0"}, "axis must be an integer known at trace time, got '0'"),
    "dtype": (TypeError, {"x": X.astype(np.complex64)}, "x has dtype complex64"),
    "where": (ValueError, {"where": np.zeros(3, bool)}, r"where must broadcast to shape \(3, 4\), got \(3,\)"),
    "where dtype": (TypeError, {"where": np.zeros(4)}, "where must be a mask of dtype bool"),
}


@tiers
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("error, arguments, message", WRONG.values(), ids=WRONG)
def test_errors(module, name, error, arguments, message):
    arguments = {"x": X} | arguments
    if name == "dot":
        arguments["y"] = arguments["x"]
    with pytest.raises(error, match=f"{name}: {message}"):
        getattr(module, name)(**arguments)


def test_arrays_of_a_dot_product_broadcast():
    x, y = np.arange(12.0, dtype=np.float32).reshape(3, 4), np.arange(4)
    assert jaxgpuops.dot(x, y).tolist() == (x @ y).tolist()
    with pytest.raises(ValueError, match=r"dot: x and y must broadcast to one shape, got \(3, 4\) and \(3,\)"):
        jaxgpuops.dot(x, np.zeros(3))


def test_what_is_left_to_xla_on_a_gpu(cuda_build):
    """What has the same bits in any order, by its size; short rows of floats, whatever their number is."""

    def kernel_of(name, *shape, dtype="float32", axis=1):
        fn = functools.partial(getattr(jaxgpuops, name), axis=axis)
        [call] = jaxgpuops.explain(fn, jax.ShapeDtypeStruct(shape, dtype), platform="cuda")
        assert call.kernel or call.why == "XLA's own kernels are faster"
        return call.kernel

    for shape in ((5, 4096), (1691, 421), (15_184_311, 3), (1, 4_996_344), (3, 500, 7), (1, 1 << 19, 2)):
        for dtype in ("int8", "int32", "bfloat16", "float32"):
            assert not kernel_of("max", *shape, dtype=dtype) and not kernel_of("min", *shape, dtype=dtype)
        assert not kernel_of("sum", *shape, dtype="int32")
        assert bool(kernel_of("sum", *shape)) == (shape[1] >= 16)
    assert kernel_of("max", 1 << 16, 1024) and not kernel_of("max", 1 << 16, 1024, dtype="int32")
    assert kernel_of("min", 494, 30_184, dtype="bfloat16") and kernel_of("min", 494, 30_184)
    assert kernel_of("max", 10, 200_000, dtype="bfloat16") and not kernel_of("max", 9, 300_000, dtype="bfloat16")
    assert kernel_of("max", 8, 200_000, dtype="bfloat16") and not kernel_of("max", 8, 1 << 20, dtype="bfloat16")
    assert kernel_of("max", 1, 20_000) and not kernel_of("max", 1, 16_384) and not kernel_of("max", 60, 32_768)
    assert kernel_of("max", 2, 65_536) and not kernel_of("max", 2, 131_072)
    assert not kernel_of("max", 1, 140_000) and kernel_of("max", 300, 32_768)
    assert kernel_of("max", 48, 418_625, dtype="bfloat16") and not kernel_of("max", 30, 418_625, dtype="bfloat16")
    assert kernel_of("max", 10_582, 31, 10, dtype="float16") and not kernel_of("max", 550, 128, 20, dtype="float16")
    assert kernel_of("max", 2, 2_013_253, 5) and not kernel_of("max", 35, 4096, 130)
    assert kernel_of("max", 40, 1536, 200, dtype="bfloat16") and not kernel_of("max", 40, 1536, 201, dtype="bfloat16")
    # Few long columns, whatever XLA can divide; not many.
    for shape in ((1, 11_651, 156), (1, 3_605_797, 2), (5, 300_007, 32)):
        assert (
            not kernel_of("max", *shape) and not kernel_of("min", *shape, dtype="bfloat16") and kernel_of("sum", *shape)
        )
    # Odd columns of 16 bits, if XLA cannot divide the axis.
    assert kernel_of("min", 2, 195_987, 5, dtype="bfloat16") and not kernel_of("min", 2, 195_984, 5, dtype="bfloat16")
    assert kernel_of("max", 16, 8009, 64) and kernel_of("max", 3, 2_000_003, 3) and kernel_of("max", 4, 5001, 256)
    # Large arrays of columns of integers that XLA does not divide.
    assert kernel_of("min", 12, 533, 3450, dtype="int32") and kernel_of("max", 200, 65, 1001, dtype="uint32")
    for shape in ((12, 533, 3456), (3, 533, 3450), (2000, 37, 500), (1000, 100, 100)):
        assert not kernel_of("min", *shape, dtype="int32")
    assert not kernel_of("sum", 12, 533, 3450, dtype="int32") and not kernel_of("min", 12, 533, 3450)
    # And of floats, along axes of some 10^2 positions.
    for shape in ((1134, 66, 425), (2000, 40, 300), (200, 66, 3001), (600, 100, 425)):
        assert kernel_of("min", *shape) and kernel_of("max", *shape)
    for shape in ((1134, 66, 424), (300, 200, 425), (3000, 20, 425), (220, 66, 425), (6000, 66, 75)):
        assert not kernel_of("min", *shape)
    assert not kernel_of("max", 1134, 66, 425, dtype="bfloat16")
    with x64("float64"):  # columns of float64 whose lines XLA does not read evenly
        for shape in ((29_539, 71, 19), (100_000, 31, 3), (20_000, 100, 10)):
            assert kernel_of("max", *shape, dtype="float64") and kernel_of("min", *shape, dtype="float64")
            assert not kernel_of("max", *shape, dtype="int64")
        for shape in ((30_000, 64, 16), (20_000, 50, 45), (100, 71, 19), (300, 1000, 27)):
            assert not kernel_of("max", *shape, dtype="float64")
    assert kernel_of("max", 40, 50, dtype="float8_e5m2") and kernel_of("sum", 3, 4, 5)
    for rows in (1, 1 << 22):
        assert not kernel_of("mean", rows, 15) and kernel_of("mean", rows, 16)
        with x64("float64"):
            assert not kernel_of("mean", rows, 16, dtype="float64") and kernel_of("mean", rows, 17, dtype="float64")
    for length, dtype in itertools.product((4, 8), ("bfloat16", "float16")):  # of 16 bits, many have a kernel
        assert kernel_of("sum", 1 << 20, length, dtype=dtype) and not kernel_of("sum", 1000, length, dtype=dtype)
        assert not kernel_of("sum", 1 << 20, length) and not kernel_of("sum", 1 << 20, length + 1, dtype=dtype)
    masked = lambda x: jaxgpuops.max(x, where=x > 0)
    [call] = jaxgpuops.explain(masked, jax.ShapeDtypeStruct((5, 9), "float32"), platform="cuda")
    assert call.kernel
