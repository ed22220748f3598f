"""Values of `jaxgpuops.lax.argmax` and `argmin`: every dtype and bit pattern, against NumPy and jax.lax."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference import x64

import jaxgpuops
from jaxgpuops._arguments import FLOATS8
from jaxgpuops.lax._topk import _argmax_fallback, _argmax_left

plan_argmax = jaxgpuops._native.modules["cpu"].plan_argmax


def check(x, axis, names=None):
    with x64(x.dtype):
        for largest in (True, False):
            fn = jaxgpuops.lax.argmax if largest else jaxgpuops.lax.argmin
            out, expected = fn(x, axis, np.int32), reference.argmax(x, axis, largest)
            assert out.dtype == np.int32 and out.shape == expected.shape
            wrong = np.argwhere(np.asarray(out) != expected)
            which = f"{fn.__name__} of {x.dtype}{x.shape}, axis {axis}"
            assert not wrong.size, f"{which}: {len(wrong)} wrong, {names and [names[w[0] % len(names)] for w in wrong]}"


def flushed(x):
    """x with zeros in the place of subnormal numbers."""
    if not reference.is_float(x.dtype):
        return x
    normal = reference.bits(np.array(jnp.finfo(x.dtype).smallest_normal, x.dtype))
    return np.where(reference.bits(np.abs(x)) < normal, np.zeros((), x.dtype), x)


@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_any_array(data):
    shape = data.draw(reference.SHAPES)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    dtype = data.draw(st.sampled_from(reference.DTYPES))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    x = reference.random_bits(rng, shape, dtype)
    palette = data.draw(st.sampled_from([None, x.ravel()[:5], reference.special_values(dtype)]))
    check(x if palette is None else palette[rng.integers(0, len(palette), shape)], axis)


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_every_dtype_and_special_value(dtype):
    rng = np.random.default_rng(0)
    special = reference.special_values(dtype)
    check(np.stack(np.meshgrid(special, special)).reshape(2, -1), 0)  # every pair, in both orders
    check(special[rng.integers(0, len(special), (30, 50))], 1)
    check(reference.random_bits(rng, (4, 3001), dtype), 1)


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_the_fallback_has_the_same_results(dtype):
    """Plain JAX also treats subnormal numbers, zeros and NaNs as the kernels do, since it compares integers. What is
    left to XLA on a GPU compares floats; for these, XLA's CPU backend takes subnormal numbers for zeros."""
    rng = np.random.default_rng(1)
    special = reference.special_values(dtype)
    short = [special[rng.integers(0, len(special), (200, n))] for n in (1, 2, 7, 24, 25)]
    for x in (*short, special[rng.integers(0, len(special), (30, 50))], reference.random_bits(rng, (4, 3001), dtype)):
        normal = flushed(x) if jax.default_backend() == "cpu" else x
        for largest in (True, False):
            with x64(dtype):
                [out] = jax.jit(functools.partial(_argmax_fallback, axis=1, largest=largest))(x)
                [left] = jax.jit(functools.partial(_argmax_left, axis=1, largest=largest))(normal)
            np.testing.assert_array_equal(out, reference.argmax(x, 1, largest))
            if dtype not in FLOATS8:  # which are never left to XLA
                np.testing.assert_array_equal(left, reference.argmax(normal, 1, largest))


def test_what_is_left_to_xla_on_a_gpu(cuda_build):
    """By size: short rows of threads, few elements, long rows of wide numbers; not what XLA reads slowly."""

    def is_left(*shape, dtype="float32"):
        with x64(dtype):
            fn = functools.partial(jaxgpuops.lax.argmax, axis=1, index_dtype=np.int32)
            [call] = jaxgpuops.explain(fn, jax.ShapeDtypeStruct(shape, dtype), platform="cuda")
        assert call.kernel or call.why == "XLA's own kernels are faster"
        return not call.kernel

    for dtype in ("int8", "int32", "bfloat16", "float32", "float64"):
        for shape in ((3, 4096), (800, 7), (1, 70_001), (2000, 9, 40)):
            assert is_left(*shape, dtype=dtype)
        for shape in ((300_000, 32), (500, 70_001, 3), (1, 3_000_000, 5), (2, 32, 1 << 20)):
            assert not is_left(*shape, dtype=dtype)
        # Short axes of less than 64 bits are compared one by one.
        for shape in ((300_000, 8), (3_000_000, 16), (8, 4, 1 << 20)):
            assert is_left(*shape, dtype=dtype) == (dtype != "float64")
        assert is_left(2, 16, 1 << 20, dtype=dtype) == (dtype == "bfloat16")
        assert is_left(4096, 8192, dtype=dtype) == (dtype in ("int32", "float64"))
    assert (
        is_left(65_533, 98, dtype="float64") and is_left(3, 131_072, 2) and not is_left(3, 131_072, 2, dtype="float64")
    )
    assert is_left(2, 700_001) and not is_left(5, 440_000) and not is_left(2, 1_000_001)
    assert is_left(3, 1_000_001, dtype="int32") and not is_left(3, 1_363_155, dtype="int32")
    assert not is_left(3, 4096, dtype="float8_e4m3fn")
    # Teams of lanes have short rows of 16 bits, and clusters few long ones.
    assert not is_left(333, 512, dtype="bfloat16") and not is_left(200, 300, dtype="int16")
    assert is_left(333, 1030, dtype="bfloat16") and is_left(100, 60, dtype="bfloat16")
    assert not is_left(30, 32_768, dtype="bfloat16") and is_left(21, 11_221, dtype="float16")
    assert not is_left(7, 524_288, dtype="int8") and is_left(6, 92_158, dtype="uint8")
    # Rows of XLA's own argmax are a little faster; rows compared as the CPU does are not, if they are long.
    assert not is_left(16_037, 2048) and is_left(5000, 1000) and is_left(51_079, 403)


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_equals_jax_lax(dtype):
    """Runs on CPU only. XLA:CPU takes denormals for zeros while it compares, so they are left out here."""
    rng = np.random.default_rng(0)
    special = reference.special_values(dtype)
    x = np.concatenate([reference.random_bits(rng, (40, 30), dtype), special[rng.integers(0, len(special), (40, 30))]])
    x = flushed(x)
    with x64(dtype):
        for ours, theirs in [(jaxgpuops.lax.argmax, jax.lax.argmax), (jaxgpuops.lax.argmin, jax.lax.argmin)]:
            with jax.default_device(jax.devices("cpu")[0]):
                expected = theirs(jnp.asarray(x), 1, np.int32)
            np.testing.assert_array_equal(ours(x, 1, np.int32), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "int64"])
def test_adversarial_rows(dtype):
    dtype = np.dtype(jnp.dtype(dtype))
    rng = np.random.default_rng(0)
    count = len(reference.adversarial(rng, 8, dtype))

    def form(n):
        plan = plan_argmax(count, n, 1, 8 * dtype.itemsize, 90)
        return plan["lanes"], plan["threads"], plan["slices"] > 1

    boundaries = [n for n in range(2, 20_000) if form(n) != form(n - 1)]
    for n in sorted({n + d for n in (2, 32, 256, 1024, *boundaries) for d in (-1, 0, 1)}):
        rows = reference.adversarial(rng, n, dtype)
        check(np.stack(list(rows.values())), 1, names=list(rows))


def test_adversarial_lone_rows_and_columns():
    rng = np.random.default_rng(0)
    for n in (300_001, 7001):
        rows = reference.adversarial(rng, n, np.float32)
        for name, row in rows.items():
            check(row, 0, names=[name])
        check(np.stack(list(rows.values()), axis=1)[:, :19], 0)


@pytest.mark.parametrize("index_dtype", ["int8", "int32", "uint32", "int64"])
def test_index_dtype(index_dtype):
    with jax.enable_x64(index_dtype == "int64"):
        out = jaxgpuops.lax.argmax(np.arange(7.0, dtype=np.float32), 0, np.dtype(index_dtype))
        assert out.dtype == index_dtype and out == 6


@pytest.mark.filterwarnings("error")
def test_index_dtype_of_python():
    for wide in (False, True):
        with jax.enable_x64(wide):
            assert jaxgpuops.lax.argmax(np.arange(7, dtype=np.int8), 0, int).dtype == jnp.asarray(0).dtype


def test_zero_rows():
    assert jaxgpuops.lax.argmax(np.zeros((0, 3), np.float32), 1, np.int32).shape == (0,)


@pytest.mark.parametrize("op, name", [(jaxgpuops.lax.argmax, "argmax"), (jaxgpuops.lax.argmin, "argmin")])
def test_errors(op, name):
    x = np.zeros((3, 5), np.float32)
    for args, error, parts in [
        ((np.zeros((3, 0), np.float32), 1, np.int32), ValueError, ["must not be empty", "(3, 0)"]),
        ((x, 2, np.int32), ValueError, ["axis must be between -2 and 1", "(3, 5)", "2"]),
        ((x, 1.0, np.int32), TypeError, ["axis must be an integer", "1.0"]),
        ((x, 1, np.float32), TypeError, ["index_dtype must be an integer dtype", "float32"]),
        ((x, 1, "many"), TypeError, ["index_dtype must be an integer dtype", "'many'"]),
        ((x, 1, 4), TypeError, ["index_dtype must be an integer dtype", "got 4"]),
        ((x.astype(np.complex64), 1, np.int32), TypeError, ["dtype complex64"]),
    ]:
        with pytest.raises(error) as caught:
            op(*args)
        for part in [f"jaxgpuops.lax.{name}", *parts]:
            assert part in str(caught.value)
