"""Values of `jaxgpuops.topk` and `jaxgpuops.lax.top_k`: every dtype, flag and bit pattern, against NumPy and
jax.lax."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from reference import x64

import jaxgpuops

plan_topk = jaxgpuops._native.modules["cpu"].plan_topk


def assert_topk(out, x, k, axis=-1, largest=True, sorted=True, names=None):
    values, indices = out
    expected_bits, expected = reference.topk(x, k, axis, largest, sorted)
    assert values.dtype == x.dtype and indices.dtype == np.int32
    assert values.shape == indices.shape == expected.shape
    wrong = (np.asarray(indices) != expected) | (reference.bits(values) != expected_bits)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        row = f" ({names[at[0] % len(names)]})" if names else ""
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} wrong for {x.dtype}{x.shape}, k={k}, axis={axis}, largest={largest}, "
            f"sorted={sorted}; the first at {at}{row}: index {np.asarray(indices)[at]} instead of {expected[at]}"
        )


def check(x, k, axis=-1, names=None, **flags):
    with x64(x.dtype):
        assert_topk(jaxgpuops.topk(x, k, axis=axis, **flags), x, k, axis, names=names, **flags)


def check_all(arrays, k, names):
    """Checks several arrays in one program, because most of the time of a test goes into compiling."""
    with x64(arrays[0].dtype):
        results = jax.jit(lambda arrays: [jaxgpuops.topk(x, k) for x in arrays])(arrays)
    for x, result in zip(arrays, results, strict=True):
        assert_topk(result, x, k, -1, names=names)


# ---- Anything goes --------------------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_any_array(data):
    shape = data.draw(reference.SHAPES)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    k = data.draw(st.one_of(st.integers(0, min(shape[axis], 70)), st.integers(0, shape[axis])))
    dtype = data.draw(st.sampled_from(reference.DTYPES))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    x = reference.random_bits(rng, shape, dtype)
    kind = data.draw(st.sampled_from(["random bits", "special values", "both", "few values"]))
    if kind != "random bits":
        palette = x.ravel()[:5] if kind == "few values" else reference.special_values(dtype)
        replaced = rng.random(shape) < (0.5 if kind == "both" else 1)
        x = np.where(replaced, palette[rng.integers(0, len(palette), shape)], x)
    check(x, k, axis, largest=data.draw(st.booleans()), sorted=data.draw(st.booleans()))


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 700), (70, 6), (2, 90, 5)], ids=str)
def test_every_dtype(dtype, shape):
    rng = np.random.default_rng(0)
    for k in (1, 5):
        for largest in (True, False):
            for sorted in (True, False):
                check(reference.random_bits(rng, shape, dtype), k, 1, largest=largest, sorted=sorted)


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_equals_jax_lax(dtype):
    """Runs on CPU only, because JAX's own GPU kernels order NaNs in other ways."""
    rng = np.random.default_rng(0)
    special = reference.special_values(dtype)
    x = np.stack([reference.random_bits(rng, (500,), dtype), special[rng.integers(0, len(special), 500)]])
    if dtype.name in ("bfloat16", "float8_e5m2"):  # XLA:CPU computes on these in wider types, without NaN payloads
        nan = np.array(np.nan, dtype)
        x = np.where(reference.is_nan(x), np.where(np.signbit(x), -nan, nan), x)
    if dtype.name == "bfloat16":  # on some of its threads, XLA:CPU treats denormals as zeros
        x = np.where(abs(x) < jnp.finfo(dtype).smallest_normal, np.copysign(np.zeros((), dtype), x), x)
    with x64(dtype):
        for k in (1, 7, 500):
            values, indices = jaxgpuops.topk(x, k)
            with jax.default_device(jax.devices("cpu")[0]):
                expected = np.asarray(jax.lax.top_k(jnp.asarray(x), k)[1])
            np.testing.assert_array_equal(indices, expected)
            # Even the values that it returns may be other NaNs than those of x.
            np.testing.assert_array_equal(reference.bits(values), np.take_along_axis(reference.bits(x), expected, 1))


def test_lax_top_k():
    x = reference.random_bits(np.random.default_rng(0), (4, 50, 3), np.float32)
    for axis in range(3):
        out = jaxgpuops.lax.top_k(x, 2, axis=axis)
        assert isinstance(out, tuple | list)
        assert_topk(out, x, 2, axis)


# ---- Data that defeats selection algorithms -------------------------------------------------------------------------


@functools.cache
def boundaries(rows, k, key_bits, up_to):
    """Lengths n for which the plan takes another form than for n - 1. Of each kind of change it has the first and the
    last, since some changes occur at every length that is a whole number of vectors."""

    def form(n):
        plan = plan_topk(rows, n, 1, k, key_bits, True, 90)
        return plan["algorithm"], plan["lanes"], plan["threads"], plan["slices"] > 1

    changes: dict[tuple, list[int]] = {}
    for n in range(k + 1, up_to + 1):
        if form(n) != form(n - 1):
            changes.setdefault((form(n - 1), form(n)), []).append(n)
    return sorted({n for each in changes.values() for n in (each[0], each[-1])})


def lengths(rows, k, key_bits, up_to):
    around = {n + d for n in (k, 32, 128, 256, 1024, 4096, *boundaries(rows, k, key_bits, up_to)) for d in (-1, 0, 1)}
    return sorted(n for n in around if k <= n <= up_to)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "int64"])
@pytest.mark.parametrize("k", [1, 2, 8, 33, 64, 65, 257])
def test_adversarial_rows(dtype, k):
    dtype = np.dtype(jnp.dtype(dtype))
    rng = np.random.default_rng(0)
    names = list(reference.adversarial(rng, 8, dtype))
    rows = [reference.adversarial(rng, n, dtype) for n in lengths(len(names), k, 8 * dtype.itemsize, 20_000)]
    check_all([np.stack([each[name] for name in names]) for each in rows], k, names)


@pytest.mark.parametrize("dtype", ["float32", "uint32"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_equal_extremes_beside_keys_alike_but_for_low_bits(dtype, k):
    """One warp has both rows, and the second one must not take room from the first."""
    least, most = (2**32 - 1, 2**31 - 1) if dtype == "float32" else (0, 2**32 - 1)
    for n in (8, 9, 33, 64):
        i = np.arange(n)
        up, down = (np.where(i < n // 2, 2**30 + sign * i, i) for sign in (1, -1))
        rows = np.stack([np.full(n, most), up, np.full(n, least), down])
        x = rows.astype(np.uint32).view(dtype)
        check(x, k)
        check(x, k, largest=False)


@pytest.mark.parametrize("flags", [{"largest": False}, {"sorted": False}, {"largest": False, "sorted": False}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_adversarial_rows_with_flags(dtype, flags):
    rng = np.random.default_rng(0)
    for n, k in [(33, 7), (200, 64), (1023, 32), (4097, 8), (5000, 100), (17_000, 300), (9000, 4000)]:
        rows = reference.adversarial(rng, n, dtype)
        check(np.stack(list(rows.values())), k, names=list(rows), **flags)


@pytest.mark.parametrize("k", [1, 6, 32, 100])
def test_adversarial_rows_by_the_hundred(k):
    """There are so many rows that no two blocks share one."""
    rng = np.random.default_rng(0)
    for n in (100, 129, 1025, 4097):
        rows = reference.adversarial(rng, n, np.float32)
        check(np.stack(list(rows.values()) * 26), k, names=list(rows))


@pytest.mark.parametrize("k", [1, 50, 2048, 2049, 30_000])
def test_adversarial_lone_rows(k):
    """One long row, shared by many blocks."""
    rng = np.random.default_rng(0)
    for name, row in reference.adversarial(rng, 70_001, np.float32).items():
        check(row, k, names=[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("axis", [0, 1])
def test_adversarial_columns(axis, dtype):
    """The axis is not the last one; its neighbours are 22 or more distributions side by side."""
    dtype = np.dtype(jnp.dtype(dtype))
    rng = np.random.default_rng(0)
    for n, k in [(7, 2), (130, 32), (1025, 1), (4097, 8), (5001, 300), (3000, 2500)]:
        columns = np.stack(list(reference.adversarial(rng, n, dtype).values()), axis=1)
        check(columns if axis == 0 else np.stack([columns, columns[::-1]]), k, axis)


# ---- Shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64"])
@pytest.mark.parametrize("offset", [1, 3, 7])
def test_misaligned_rows(dtype, offset):
    dtype = np.dtype(jnp.dtype(dtype))
    rng = np.random.default_rng(0)
    for rows, n in [(5, 101), (3, 1025), (2, 9001)]:
        buffer = reference.random_bits(rng, (rows * n + offset,), dtype)
        with x64(dtype):
            out = jax.jit(lambda b: jaxgpuops.topk(b[offset:].reshape(rows, n), 5))(buffer)
        assert_topk(out, buffer[offset:].reshape(rows, n), 5)


@pytest.mark.parametrize(
    "shape, axis", [((0,), 0), ((0, 5), 1), ((5, 0), 1), ((5, 0), 0), ((3, 0, 4), 1), ((2, 4, 0), 1)]
)
def test_zero_size(shape, axis):
    x = np.zeros(shape, np.float32)
    for k in {0, shape[axis]}:
        check(x, k, axis)


@pytest.mark.parametrize(
    "shape, axis", [((6,), 0), ((4, 6), 1), ((6, 4), 0), ((3, 6, 2), 1), ((2000,), 0), ((1, 1), 0)]
)
def test_k_from_none_to_all(shape, axis):
    x = reference.random_bits(np.random.default_rng(0), shape, np.float32)
    n = shape[axis]
    for k in {0, 1, n // 2, n - 1, n}:
        for flags in ({}, {"largest": False, "sorted": False}):
            check(x, k, axis, **flags)


@pytest.mark.parametrize("n", [3000, 9000, 40_000])
def test_large_k(n):
    rng = np.random.default_rng(0)
    for k in (2047, 2048, 2049, n // 2, n - 1, n):
        if k <= n:
            check(reference.random_bits(rng, (2, n), np.float32), k)
            check(np.round(rng.standard_normal((2, n))).astype(np.float32), k, sorted=False)


# ---- Padded rows and segments ------------------------------------------------------------------------------------------


def filled(x, k, largest, sorted):
    """The bits and indices of a row or segment. Places after its end have index -1 and the worst value of
    the dtype."""
    extremes = [False, True] if x.dtype == bool else [-np.inf, np.inf]
    if np.issubdtype(x.dtype, np.integer):
        info = np.iinfo(x.dtype)
        extremes = [info.min, info.max]
    elif x.dtype == ml_dtypes.float8_e4m3fn:  # float8_e4m3fn has no infinity
        extremes = [-448, 448]
    fill = reference.bits(np.array(extremes[not largest]).astype(x.dtype))
    count = min(k, len(x))
    values, indices = reference.topk(x, count, 0, largest, sorted)
    return np.append(values, np.full(k - count, fill)), np.append(indices, [-1] * (k - count))


def same_but_for_payloads(values, bits):
    """The bits of an array, but one pattern for all NaNs of 8 and 16 bits, since XLA's CPU backend may move them as
    longer floats."""
    values = np.asarray(values)
    expected = bits.astype(f"uint{8 * values.dtype.itemsize}").view(values.dtype)
    if values.dtype.itemsize <= 2 and reference.is_float(values.dtype):
        np.testing.assert_array_equal(reference.is_nan(values), reference.is_nan(expected))
        values, expected = (np.where(reference.is_nan(x), 0, reference.bits(x)) for x in (values, expected))
    np.testing.assert_array_equal(reference.bits(values), reference.bits(expected))


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_lengths(dtype):
    rng = np.random.default_rng(0)
    lengths = np.array([[0, 1, 30, 99], [39, 40, 2, -7]])
    for x in (reference.random_bits(rng, (2, 4, 40), dtype), rng.choice(reference.special_values(dtype), (2, 4, 40))):
        for flags in ({}, {"largest": False}, {"sorted": False}):
            with x64(dtype):
                values, indices = jaxgpuops.topk(x, 9, lengths=lengths, **flags)
            for place in np.ndindex(2, 4):
                row = x[place][: max(0, lengths[place])]
                bits, expected = filled(row, 9, flags.get("largest", True), flags.get("sorted", True))
                np.testing.assert_array_equal(indices[place], expected)
                same_but_for_payloads(values[place], bits)


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_segments(dtype):
    rng = np.random.default_rng(0)
    n, k = 200, 7
    ragged = np.cumsum([3, *range(15)])
    cases = list(
        itertools.product(
            (ragged, np.array([0, 200]), np.array([-3, 90, 50, 60, 1000])),
            ({}, {"largest": False}, {"sorted": False}),
        )
    )

    @jax.jit
    def results(x, offsets):
        return [jaxgpuops.topk(x, k, offsets=of, **flags) for of, (_, flags) in zip(offsets, cases, strict=True)]

    for x in (reference.random_bits(rng, (n,), dtype), rng.choice(reference.special_values(dtype), n)):
        with x64(dtype):
            all_results = results(x, [offsets for offsets, _ in cases])
        for (offsets, flags), (values, indices) in zip(cases, all_results, strict=True):
            ends = np.maximum.accumulate(np.clip(offsets, 0, n))
            assert values.shape == indices.shape == (len(offsets) - 1, k)
            for s, (begin, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
                bits, expected = filled(x[begin:end], k, flags.get("largest", True), flags.get("sorted", True))
                np.testing.assert_array_equal(indices[s], np.where(expected < 0, -1, expected + begin))
                same_but_for_payloads(values[s], bits)


def test_gradients_of_lengths_and_segments():
    x = jnp.array([3.0, 1.0, 2.0, 9.0, 0.0, 5.0])
    weights = jnp.array([[1.0, 10.0, 100.0], [2.0, 20.0, 200.0]])
    weighed = lambda out: jnp.where(out.indices >= 0, out.values * weights, 0).sum()
    gradient = jax.grad(lambda x: weighed(jaxgpuops.topk(x, 3, offsets=np.array([0, 2, 6]))))(x)
    assert gradient.tolist() == [1, 10, 200, 2, 0, 20]
    gradient = jax.grad(lambda x: weighed(jaxgpuops.topk(jnp.stack([x, x]), 3, lengths=np.array([2, 5]))))(x)
    assert gradient.tolist() == [1 + 20, 10, 200, 2, 0, 0]


@pytest.mark.parametrize("dtype", [np.int8, np.int64])
def test_lengths_with_strict_promotion(dtype):
    x, lengths = np.arange(8, dtype=np.float32).reshape(2, 4), np.array([2, 100], dtype)
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(dtype == np.int64):
        assert jaxgpuops.topk(x, 3, lengths=lengths).indices.tolist() == [[1, 0, -1], [3, 2, 1]]


def test_gradients_of_lengths_of_a_symbolic_batch():
    (n,) = jax.export.symbolic_shape("n")
    gradient = jax.jit(
        jax.grad(lambda x, lengths: (jaxgpuops.topk(x, 2, lengths=lengths, largest=False).values[:, 0]).sum())
    )
    of = jax.ShapeDtypeStruct((n, 3), np.float32), jax.ShapeDtypeStruct((n,), np.int32)
    exported = jax.export.export(gradient, disabled_checks=jaxgpuops.export_checks())(*of)
    x, lengths = jnp.array([[3.0, 1.0, 2.0], [9.0, 0.0, 5.0]]), jnp.array([3, 1])
    assert exported.call(x, lengths).tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_segments_of_an_axis_of_symbolic_length():
    (n,) = jax.export.symbolic_shape("n")
    topk = jax.jit(lambda x, offsets: jaxgpuops.topk(x, 2, offsets=offsets))
    of = jax.ShapeDtypeStruct((n,), np.float32), jax.ShapeDtypeStruct((3,), np.int32)
    exported = jax.export.export(topk, disabled_checks=jaxgpuops.export_checks())(*of)
    values, indices = exported.call(jnp.array([3.0, 1.0, 2.0, 9.0]), jnp.array([0, 3, 4]))
    assert values.tolist() == [[3, 2], [9, -np.inf]] and indices.tolist() == [[0, 2], [3, -1]]


def test_lengths_take_nothing_from_x_again_but_tangents():
    x, lengths = jnp.array([[3.0, 1.0, 2.0], [9.0, 0.0, 5.0]]), jnp.array([1, 3])
    topk = lambda x: jaxgpuops.topk(x, 2, lengths=lengths)
    values, tangents = jax.jvp(lambda x: topk(x).values, (x,), (10 * x + 1,))
    assert values.tolist() == [[3, -np.inf], [9, 5]] and tangents.tolist() == [[31, 0], [91, 51]]
    assert str(jax.make_jaxpr(topk)(x)).count("along_axis") == 0
    assert topk(x.astype(np.int32)).values.tolist() == [[3, -(2**31)], [9, 5]]


def test_offsets_and_lengths_are_checked():
    x = np.ones((3, 4), np.float32)
    with pytest.raises(ValueError, match="only one of offsets and lengths may be given"):
        jaxgpuops.topk(x, 1, offsets=[0, 4], lengths=[1, 2, 3])
    with pytest.raises(ValueError, match=r"lengths must broadcast to shape \(3,\), got \(4,\)"):
        jaxgpuops.topk(x, 1, lengths=[1, 2, 3, 4])
    with pytest.raises(TypeError, match="lengths has dtype float32"):
        jaxgpuops.topk(x, 1, lengths=np.ones(3, np.float32))
    with pytest.raises(ValueError, match="k must not be negative, got -1"):
        jaxgpuops.topk(x, -1, offsets=[0, 4])
    with pytest.raises(ValueError, match="k must be between 0 and 4"):
        jaxgpuops.topk(x, 5, lengths=4)
    with pytest.raises(ValueError, match=r"less than 2\*\*31 together"):
        jax.eval_shape(lambda x: jaxgpuops.topk(x, 1 << 30, offsets=[0, 1, 4]), x)
    assert jaxgpuops.topk(x, 5, offsets=[0, 4]).values.shape == (3, 1, 5)
    assert jaxgpuops.topk(x[:, :0], 2, offsets=[0, 4]).indices.tolist() == [[[-1, -1]]] * 3


def test_result_is_a_named_tuple():
    out = jaxgpuops.topk(np.arange(4.0, dtype=np.float32), 2)
    assert isinstance(out, jaxgpuops.TopK) and out._fields == ("values", "indices")
    assert out.values.tolist() == [3, 2] and out.indices.tolist() == [3, 2]


# ---- Errors ---------------------------------------------------------------------------------------------------------

X = np.zeros((3, 5), np.float32)
ERRORS = [
    # (x, k, axis, error, what its text contains: the op, the argument, what came, what is allowed)
    (X, -1, -1, ValueError, ["k must be between 0 and 5", "-1"]),
    (X, 6, -1, ValueError, ["k must be between 0 and 5", "(3, 5)", "6"]),
    (X, 4, 0, ValueError, ["k must be between 0 and 3", "4"]),
    (X, 2, 2, ValueError, ["axis must be between -2 and 1", "(3, 5)", "2"]),
    (X, 2, -3, ValueError, ["axis must be between -2 and 1", "-3"]),
    (np.float32(1), 0, -1, ValueError, ["at least one dimension", "scalar"]),
    (X, 2.0, -1, TypeError, ["k must be an integer", "2.0"]),
    (X, True, -1, TypeError, ["k must be an integer", "True"]),
    (X, 2, 0.5, TypeError, ["axis must be an integer", "0.5"]),
    (X.astype(np.complex64), 2, -1, TypeError, ["dtype complex64", "float32"]),
    (np.zeros(3, jax.dtypes.float0), 2, -1, TypeError, ["float0"]),
    (object(), 1, -1, TypeError, ["array of numbers", "object"]),
]


@pytest.mark.parametrize("x, k, axis, error, parts", ERRORS)
@pytest.mark.parametrize("op", [jaxgpuops.topk, jaxgpuops.lax.top_k], ids=["topk", "lax.top_k"])
def test_errors(op, x, k, axis, error, parts):
    name = "jaxgpuops.topk" if op is jaxgpuops.topk else "jaxgpuops.lax.top_k"
    with pytest.raises(error) as caught:
        op(x, k, axis=axis)
    for part in [name, *parts]:
        assert part in str(caught.value)


def test_traced_k_is_an_error():
    with pytest.raises(TypeError, match="jaxgpuops.topk: k must be an integer known at trace time"):
        jax.jit(jaxgpuops.topk)(X, 2)


def test_axis_too_long_for_int32():
    x = jax.ShapeDtypeStruct((1 << 31,), jnp.int8)
    with pytest.raises(ValueError, match=r"jaxgpuops\.topk: .*int32.* shorter than 2\*\*31.*\(2147483648,\)"):
        jax.eval_shape(lambda x: jaxgpuops.topk(x, 1), x)
