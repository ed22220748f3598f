"""Values of cumulative operations and linear recurrences, their determinism and errors."""

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
import scan_reference
from reference import assert_close, x64

import jaxgpuops
from jaxgpuops.lax import scan_primitives as scan

NAMES = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
FLOATS = [np.dtype(d) for d in ("float32", "float64", "float16", ml_dtypes.bfloat16)]
LINEAR_DTYPES = [*FLOATS, np.dtype("complex64"), np.dtype("complex128")]
DTYPES = {name: sorted(scan.CUMULATIVE_DTYPES[name], key=str) for name in NAMES}


def values(rng, shape, dtype, name=""):
    """Moderate values: products neither overflow nor vanish, and sums cancel."""
    dtype = np.dtype(dtype)
    if dtype == bool:
        return rng.integers(0, 2, shape).astype(bool)
    if not reference.is_float(dtype):
        return reference.random_bits(rng, shape, dtype)
    x = rng.standard_normal(shape)
    if name == "cumprod":
        x = np.sign(x) * np.exp2(0.1 * x)
    if dtype.kind == "c":
        x = x * np.exp(1j * rng.standard_normal(shape))
    return x.astype(dtype)


def check(name, x, axis=-1, **flags):
    """The public function against the loop."""
    check_all([(name, x, axis, flags)])


def check_all(calls):
    """Checks several calls of one width in one program, because most of the time of a test goes into compiling."""
    starts = [flags.pop("starts", None) for *_, flags in calls]

    def run(arrays, starts):
        return [
            getattr(jaxgpuops, name)(x, axis=axis, segment_starts=s, **flags)
            for (name, _, axis, flags), x, s in zip(calls, arrays, starts, strict=True)
        ]

    with x64(calls[0][1].dtype):
        results = jax.jit(run)([x for _, x, _, _ in calls], starts)
    for (name, x, axis, flags), s, y in zip(calls, starts, results, strict=True):
        assert y.dtype == x.dtype
        expected = scan_reference.cumulative(name, x, axis, starts=s, **flags)
        assert_close(y, expected, scan_reference.cumulative_bound(name, x, axis, starts=s, **flags))


def check_linear(a, b, h0=None, axis=-1, starts=None, **flags):
    with x64(np.result_type(a, b)):
        h, last = jaxgpuops.linear_scan(a, b, h0, axis=axis, segment_starts=starts, return_last=True, **flags)
    compare_linear(h, last, a, b, h0, axis, starts, **flags)
    return h


def compare_linear(h, last, a, b, h0, axis, starts=None, **flags):
    assert h.dtype == last.dtype == np.result_type(a, b)
    expected = scan_reference.linear(a, b, h0, axis, starts=starts, **flags)
    assert_close(h, expected, scan_reference.linear_bound(a, b, h0, axis, starts=starts, **flags))
    np.testing.assert_array_equal(last, np.take(np.asarray(h), 0 if flags.get("reverse") else -1, axis))


# ---- Anything goes --------------------------------------------------------------------------------------------------

SHAPES = st.one_of(scan_reference.SHAPES, st.tuples(st.integers(1000, 1600), st.integers(2, 40)))


@st.composite
def problems(draw, dtypes):
    shape = draw(SHAPES)
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    starts = None
    if draw(st.booleans()):
        of = tuple(n if d == axis % len(shape) or draw(st.booleans()) else 1 for d, n in enumerate(shape))
        starts = rng.random(of) < draw(st.sampled_from([0.01, 0.2, 1.0]))
    return shape, axis, rng, draw(st.sampled_from(dtypes)), draw(st.booleans()), starts


@pytest.mark.parametrize("name", NAMES)
@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_any_array(name, data):
    shape, axis, rng, dtype, reverse, starts = data.draw(problems(DTYPES[name]))
    if dtype == bool and name not in ("cummax", "cummin"):
        return
    x = values(rng, shape, dtype, name)
    check(name, x, axis, reverse=reverse, exclusive=data.draw(st.booleans()), starts=starts)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_any_recurrence(data):
    shape, axis, rng, dtype, reverse, starts = data.draw(problems(LINEAR_DTYPES))
    a_shape = tuple(n if data.draw(st.booleans()) else 1 for n in shape)[data.draw(st.integers(0, len(shape))) :]
    a = values(rng, a_shape, dtype, "cumprod") * np.dtype(dtype).type(0.9)
    a = np.where(rng.random(a_shape) < 0.1, np.zeros((), dtype), a)
    state = shape[: axis % len(shape)] + shape[axis % len(shape) + 1 :]
    h0 = values(rng, state, dtype) if data.draw(st.booleans()) else None
    check_linear(a, values(rng, shape, dtype), h0, axis, starts, reverse=reverse)


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype(name):
    rng = np.random.default_rng(0)
    for dtype, shape in itertools.product(DTYPES[name], [(3, 70), (2, 33, 5)]):
        starts = rng.random((shape[0], shape[1], *(1 for _ in shape[2:]))) < 0.1
        first, second = (values(rng, shape, dtype, name) for _ in range(2))
        check_all([(name, first, 1, {"exclusive": True, "starts": starts}), (name, second, 1, {"reverse": True})])


def lengths(up_to):
    powers = [2**k for k in range(11)]
    around = {p + d for p in powers for d in (-1, 0, 1)} | {4095, 4097, 65536, 65537, 1_000_000}
    return sorted(n for n in around if 1 <= n <= up_to)


@pytest.mark.parametrize("inner", [1, 3], ids="inner={}".format)
def test_lengths_of_recurrences(inner):
    rng = np.random.default_rng(0)
    operands = []
    for n in lengths(1_000_000 if inner == 1 else 5000):
        a = values(rng, (n, inner), np.float32, "cumprod") * np.float32(0.95)
        operands.append((a, values(rng, (n, inner), np.float32), values(rng, (inner,), np.float32)))
    of_all = lambda operands: [jaxgpuops.linear_scan(*each, axis=0, return_last=True) for each in operands]
    for each, results in zip(operands, jax.jit(of_all)(operands), strict=True):
        compare_linear(*results, *each, axis=0)


@pytest.mark.parametrize("name", NAMES)
def test_lengths(name):
    rng = np.random.default_rng(0)
    calls = []
    for n in lengths(5000):
        calls.append((name, values(rng, (2, n), np.float32, name), -1, {}))
        calls.append((name, values(rng, (n, 3), np.float32, name), 0, {"reverse": True}))
    check_all(calls)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_several_blocks(name, reverse, exclusive):
    rng = np.random.default_rng(0)
    for dtype in ("int8", "float32"):
        if np.dtype(dtype) in DTYPES[name]:
            check(name, values(rng, (33_003,), dtype, name), reverse=reverse, exclusive=exclusive)


# ---- As jax.lax ------------------------------------------------------------------------------------------------------


def of_jax_lax(name, x, *args):
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(getattr(jax.lax, name)(jnp.asarray(x), *args))


@pytest.mark.parametrize("name", NAMES)
def test_signature_and_results_of_jax_lax(name):
    ours = getattr(jaxgpuops.lax, name)
    x = np.random.default_rng(0).integers(-2, 3, (4, 5)).astype(np.float32)
    # The bound is relative to the largest element, because a logarithm near 0 is a difference of numbers of that size.
    atol = 4 * np.finfo(np.float32).eps * np.abs(x).max() if name == "cumlogsumexp" else 0
    for args in ((), (1,), (1, True), (0, True)):
        np.testing.assert_allclose(ours(x, *args), of_jax_lax(name, x, *args), rtol=1e-6, atol=atol)
    np.testing.assert_array_equal(ours(x, axis=1, reverse=True), ours(x, -1, True))


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin"])
def test_integers_equal_jax_lax(name):
    rng = np.random.default_rng(0)
    for dtype in DTYPES[name]:
        if dtype.kind not in "iu":
            continue
        x = reference.random_bits(rng, (50, 4), dtype)
        with x64(dtype):
            for reverse in (False, True):
                actual = getattr(jaxgpuops.lax, name)(x, 0, reverse)
                np.testing.assert_array_equal(actual, of_jax_lax(name, x, 0, reverse))


@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_extremes_are_moved_bit_for_bit(name):
    rng = np.random.default_rng(0)
    for dtype in DTYPES[name]:
        special = reference.special_values(dtype)
        rows = [reference.random_bits(rng, (60,), dtype)]
        rows += [special[rng.integers(0, len(special), 60)] for _ in range(20)]
        if reference.is_float(dtype):  # zeros of both signs and denormals among NaN-free rows
            rows += [special[rng.choice(np.flatnonzero(~reference.is_nan(special)), 60)] for _ in range(20)]
            tiny = np.array([0.0, -0.0, 1e-45], np.float32).astype(dtype)
            rows += [tiny[rng.integers(0, 3, 60)] for _ in range(5)]
        x = np.stack(rows)
        key = reference.keys(x)
        if reference.is_float(dtype):  # NaNs win
            key = np.where(reference.is_nan(x), ~np.uint64(0) if name == "cummax" else np.uint64(0), key)
        fold = np.maximum if name == "cummax" else np.minimum
        for reverse in (False, True):
            step = -1 if reverse else 1
            expected = fold.accumulate(key[:, ::step], 1)[:, ::step]
            with x64(dtype):
                y = np.asarray(getattr(jaxgpuops, name)(x, reverse=reverse))
            actual = reference.keys(y)
            if reference.is_float(dtype):
                actual = np.where(reference.is_nan(y), ~np.uint64(0) if name == "cummax" else np.uint64(0), actual)
            np.testing.assert_array_equal(actual, expected, err_msg=str(dtype))


def test_booleans():
    x = np.array([False, True, False, True])
    for name in ("cumsum", "cumprod"):
        y = getattr(jaxgpuops, name)(x)
        expected = getattr(jnp, name)(x)
        assert y.dtype == expected.dtype
        np.testing.assert_array_equal(y, expected)
    assert jaxgpuops.cummax(x).tolist() == [False, True, True, True]
    assert jaxgpuops.cummin(x, exclusive=True).tolist() == [True, False, False, False]


# ---- NaN, infinities, rounding ---------------------------------------------------------------------------------------

INF, NAN = np.inf, np.nan


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nonfinite_values(name, dtype):
    rng = np.random.default_rng(0)
    palette = np.array([INF, -INF, NAN, 0.0, 1.0, -2.0])
    x = np.where(rng.random((60, 40)) < 0.05, palette[rng.integers(0, 6, (60, 40))], 1 + rng.random((60, 40)))
    x = x.astype(dtype)
    with x64(dtype):
        y = getattr(jaxgpuops, name)(x)
    expected = scan_reference.cumulative(name, x)
    for kind in (np.isnan, np.isposinf, np.isneginf):
        if name == "cumprod" and kind is not np.isnan:  # 0 and infinity meet in another order, or overflow
            continue
        np.testing.assert_array_equal(kind(np.asarray(y).astype(np.float64)), kind(expected.astype(np.float64)))


@pytest.mark.parametrize("dtype, digits", ((np.float32, 1e-6), (np.float64, 1e-15)))
def test_logsumexp_of_little_and_much(dtype, digits):
    x = np.array([-INF, -INF, -1e30, 0.0, 0.0, 1e30, 5.0, INF, 1.0], dtype)
    expected = [-INF, -INF, -1e30, 0.0, np.log(2), 1e30, 1e30, INF, INF]
    with x64(dtype):
        np.testing.assert_allclose(jaxgpuops.cumlogsumexp(x), np.array(expected, dtype), rtol=digits)
    # A small sum before a large one is not lost, as it would be relative to a maximum of the whole row.
    x = np.append(np.full(1000, -200.0), 200.0).astype(dtype)
    with x64(dtype):
        y = jaxgpuops.cumlogsumexp(x)
    np.testing.assert_allclose(y[:-1], -200 + np.log(np.arange(1, 1001)), rtol=10 * digits)


@pytest.mark.parametrize("scale", (1e-3, 1.0, 300.0))
def test_logsumexp_of_float64_has_its_digits(scale):
    x = np.random.default_rng(0).standard_normal((9, 300)) * scale
    with x64(np.float64):
        y = np.asarray(jaxgpuops.cumlogsumexp(x, axis=1))
    want = np.logaddexp.accumulate(x.astype(np.longdouble), axis=1)
    assert (abs(y - want) <= 3e-15 * (2 + abs(want))).all()


@pytest.mark.parametrize("length", (2, 4, 5, 8, 16))
def test_logsumexp_of_short_rows(length):
    """Such rows share a vector with others, which do not change their results."""
    for dtype in (np.float16, np.float32):
        x = np.random.default_rng(0).choice(np.array([-INF, -300.0, 0.0, 1.0, 250.0], dtype), (3001, length))
        for reverse in (False, True):
            check("cumlogsumexp", x, axis=1, reverse=reverse)


def test_16_bit_floats_accumulate_in_float32():
    for dtype in (np.float16, ml_dtypes.bfloat16):
        ones = np.ones(5000, dtype)
        exact = np.arange(1, 5001).astype(dtype)
        np.testing.assert_array_equal(jaxgpuops.cumsum(ones), exact)
        np.testing.assert_array_equal(jaxgpuops.linear_scan(np.ones((), dtype), ones), exact)
    for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        np.testing.assert_array_equal(jaxgpuops.cumsum(np.ones(200, dtype)), np.arange(1, 201).astype(dtype))


@pytest.mark.parametrize("bad", [INF, NAN], ids=str)
def test_zero_factors_and_segments_are_hard_resets(bad):
    b = np.array([1.0, bad, 2.0, 3.0, bad, 4.0], np.float32)
    a = np.array([1.0, 1.0, 0.0, 1.0, 1.0, 0.0], np.float32)
    assert jaxgpuops.linear_scan(a, b)[jnp.array([2, 3, 5])].tolist() == [2.0, 5.0, 4.0]
    starts = a == 0
    assert jaxgpuops.linear_scan(np.float32(1), b, segment_starts=starts)[jnp.array([2, 3, 5])].tolist() == [2, 5, 4]
    assert jaxgpuops.cumsum(b, segment_starts=starts)[jnp.array([2, 3, 5])].tolist() == [2.0, 5.0, 4.0]
    h0 = np.float32(bad)
    assert jaxgpuops.linear_scan(np.zeros(1, np.float32), np.ones(1, np.float32), h0).tolist() == [1.0]
    assert jaxgpuops.linear_scan(a[::-1], b[::-1], reverse=True)[::-1][jnp.array([2, 3, 5])].tolist() == [2, 5, 4]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape, axis", [((2, 344), 1), ((16, 4832), 1), ((321, 4), 0), ((48, 8), 0), ((3, 77, 5), 1)])
def test_nothing_passes_a_start(shape, axis, dtype):
    with x64(dtype):
        assert scan_reference.leaks(shape, axis, dtype) == []


# ---- Determinism ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [7, 1000, 40_000])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(n):
    rng = np.random.default_rng(0)
    x = values(rng, (5, n), np.float32)
    a = values(rng, (5, n), np.float32, "cumprod")
    fns = [getattr(jaxgpuops, name) for name in NAMES] + [functools.partial(jaxgpuops.linear_scan, a)]
    for fn in fns[:-1]:
        np.testing.assert_array_equal(np.stack([fn(row) for row in x]), fn(x))
        np.testing.assert_array_equal(jax.vmap(fn)(x), fn(x))
    together = jaxgpuops.linear_scan(a, x)
    np.testing.assert_array_equal(np.stack([jaxgpuops.linear_scan(*rows) for rows in zip(a, x, strict=True)]), together)
    # An operand that broadcasts is the same as its copies.
    np.testing.assert_array_equal(
        jaxgpuops.linear_scan(a[0], x), jaxgpuops.linear_scan(np.broadcast_to(a[0], x.shape).copy(), x)
    )
    np.testing.assert_array_equal(jaxgpuops.linear_scan(a, x), together)  # a second call gives the same bits


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_many_short_rows(n, axis):
    """There are more rows than lanes, in both layouts. Rows of a batch have the bits that they have alone."""
    rng = np.random.default_rng(0)
    shape = (1300, n) if axis == 1 else (n, 1300)
    starts = rng.random(shape) < 0.3
    for dtype in (np.float32, ml_dtypes.bfloat16, np.complex64):
        x, a = values(rng, shape, dtype), values(rng, shape, dtype, "cumprod")
        check_linear(a, x, axis=axis)
        check_linear(a[:1], x, rng.standard_normal(1300).astype(dtype), axis, starts, reverse=True)
        check_linear(a[:, :1], x, axis=axis, reverse=True)
        pull = lambda a, x: jax.vjp(lambda *ab: jaxgpuops.linear_scan(*ab, axis=axis), a, x)[1](x)
        if axis == 1:  # columns are not a batch: with fewer of them they may be added up in another order
            for some, alone in zip(pull(a, x), pull(a[-3:], x[-3:]), strict=True):
                np.testing.assert_array_equal(some[-3:], alone)
    for name, reverse in itertools.product(NAMES, (False, True)):
        x, fn = values(rng, shape, np.float32, name), functools.partial(getattr(jaxgpuops, name), axis=axis)
        check(name, x, axis, reverse=reverse, exclusive=reverse, starts=starts)
        pull = lambda x: jax.vjp(fn, x)[1](x)[0]
        if axis == 1:
            np.testing.assert_array_equal(pull(x)[-3:], pull(x[-3:]))


# ---- Segments and states ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", [*NAMES, "linear_scan"])
def test_segments_are_scans_of_their_own(name, reverse):
    rng = np.random.default_rng(0)
    bounds = [0, 1, 4, 5, 20, 50]
    x = values(rng, (2, 50, 3), np.float32, name)
    starts = np.isin(np.arange(50), bounds[1:-1])[:, None]
    fns = [functools.partial(getattr(jaxgpuops, name), axis=1, reverse=reverse)]
    if name == "linear_scan":
        fns = [functools.partial(fns[0], np.float32(0.75))]
    else:
        fns.append(functools.partial(fns[0], exclusive=True))
    for fn in fns:
        parts = [fn(x[:, i:j]) for i, j in itertools.pairwise(bounds)]
        np.testing.assert_allclose(fn(x, segment_starts=starts), np.concatenate(parts, 1), rtol=2e-5, atol=1e-5)
        # A start at the first position changes nothing.
        both = [fn(x, segment_starts=np.isin(np.arange(50), b)[:, None]) for b in ([0], [])]
        np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("reverse", [False, True])
def test_states_continue(reverse):
    rng = np.random.default_rng(0)
    a, b = values(rng, (2, 60, 3), np.float32, "cumprod"), values(rng, (2, 60, 3), np.float32)
    fn = functools.partial(jaxgpuops.linear_scan, axis=1, reverse=reverse, return_last=True)
    whole, end = fn(a, b, 2.0)
    first, second = (slice(25, None), slice(25)) if reverse else (slice(25), slice(25, None))
    h1, state = fn(a[:, first], b[:, first], 2.0)
    h2, last = fn(a[:, second], b[:, second], state)
    np.testing.assert_allclose(np.concatenate([h2, h1] if reverse else [h1, h2], 1), whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(last, end, rtol=1e-5, atol=1e-5)


def going_on(name, rng, shape, dtype, starts, flags):
    """Operands of a scan with an h0; the result of the loop for an array that begins with h0; and its error bound."""
    x, h0 = values(rng, shape, dtype, name), values(rng, (shape[0], 1, *shape[2:]), dtype, name)
    begin = lambda arrays: np.concatenate(arrays[:: -1 if flags["reverse"] else 1], 1)
    starts = None if starts is None else np.broadcast_to(starts, shape)
    loop = {"starts": None, **flags}
    if starts is not None:  # no start cuts h0 off
        own = starts.copy()
        own[:, 0] &= flags["reverse"]
        loop["starts"] = begin([np.zeros(h0.shape, bool), own])
    loop = [f(name, begin([h0, x]), 1, **loop) for f in (scan_reference.cumulative, scan_reference.cumulative_bound)]
    rest = slice(None, -1) if flags["reverse"] else slice(1, None)
    cut = lambda a: a if np.isscalar(a) else np.broadcast_to(a, loop[0].shape)[:, rest]
    return (x, scan._as_initial(name, h0), starts), *map(cut, loop)


@pytest.mark.parametrize("name", NAMES)
def test_scans_go_on(name):
    """Scans with an h0, the state before the first position, of every dtype and kernel."""
    rng = np.random.default_rng(0)
    shapes = [(3, 70), (2, 33, 5), (5, 1), (3, 2), (20, 30), (2, 3001), (1, 40_000), (2, 3, 40), (1, 2500, 40)]
    for dtype in DTYPES[name]:
        of_dtype = shapes if dtype in (np.dtype(np.float32), np.dtype(bool)) else shapes[:2]
        cases = []
        for shape, flags in itertools.product(of_dtype, [(False, False), (True, True)]):
            flags = dict(zip(("reverse", "exclusive"), flags, strict=True))
            for starts in (None, rng.random(shape) < 0.1):
                cases.append((*going_on(name, rng, shape, dtype, starts, flags), flags))
        call = lambda operands, flags: scan.CUMULATIVE[name](
            *(a for a in operands if a is not None), axis=1, initial=True, **flags
        )
        with x64(dtype):
            run = jax.jit(lambda all: [call(a, flags)[0] for a, (*_, flags) in zip(all, cases, strict=True)])
            results = run([operands for operands, *_ in cases])
        for y, (_, expected, bound, _) in zip(results, cases, strict=True):
            assert y.dtype == dtype
            assert_close(y, expected, bound)


def test_what_comes_before_has_more_digits():
    x, h0 = jnp.ones((1, 40), jnp.bfloat16), jnp.array([[257]], np.float32)  # 257 is no bfloat16
    for shape in ((1, 40), (1, 40, 1)):
        y = scan.cumsum_p(
            x.reshape(shape),
            h0.reshape(1, *(1 for _ in shape[1:])),
            axis=1,
            reverse=False,
            exclusive=False,
            initial=True,
        )[0]
        np.testing.assert_array_equal(y.ravel(), (257 + np.arange(1, 41)).astype(ml_dtypes.bfloat16))


def test_empty_arrays():
    for name in NAMES:
        for shape in ((0,), (3, 0), (0, 3)):
            x = np.zeros(shape, np.float32)
            assert getattr(jaxgpuops, name)(x, exclusive=True).shape == shape
            assert jax.grad(lambda x, name=name: getattr(jaxgpuops, name)(x).sum())(x).shape == shape
    h, last = jaxgpuops.linear_scan(
        0.5, np.zeros((3, 0), np.float32), np.arange(3.0, dtype=np.float32), return_last=True
    )
    assert h.shape == (3, 0) and last.tolist() == [0.0, 1.0, 2.0]
    assert jaxgpuops.linear_scan(0.5, np.zeros((3, 0), np.float32), return_last=True)[1].tolist() == [0.0] * 3
    assert jaxgpuops.linear_scan(0.5, np.zeros((0, 3), np.float32), 1.0).shape == (0, 3)


# ---- Broadcasting and promotion of the recurrence ---------------------------------------------------------------------


def test_operands_broadcast_as_in_numpy():
    rng = np.random.default_rng(0)
    for a_shape, b_shape, axis in [
        ((), (4, 5), 1),
        ((5,), (4, 5), 0),
        ((4, 1), (4, 5), 1),
        ((4, 5), (5,), 0),
        ((4, 1, 3), (5, 1), 1),
        ((2, 1, 3), (2, 4, 1), 1),
        ((3,), (1,), 0),
    ]:
        a, b = values(rng, a_shape, np.float32, "cumprod"), values(rng, b_shape, np.float32)
        shape = np.broadcast_shapes(a_shape, b_shape)
        check_linear(a, b, axis=axis)
        check_linear(a, b, np.float32(2), axis=axis)
        check_linear(a, b, values(rng, np.delete(shape, axis), np.float32), axis=axis, reverse=True)


def test_an_operand_may_broadcast_in_any_number_of_dimensions():
    rng = np.random.default_rng(0)
    shape, alternating = (2,) * 17 + (3,), (2, 1) * 8 + (2, 3)  # nine runs of dimensions are more than kernels count
    for axis in (0, 8, 17):
        a = rng.standard_normal(np.moveaxis(np.empty(alternating), -1, axis).shape, np.float32)
        b = rng.standard_normal(np.moveaxis(np.empty(shape), -1, axis).shape, np.float32)
        scan = functools.partial(jaxgpuops.linear_scan, axis=axis)
        np.testing.assert_array_equal(scan(a, b), scan(np.broadcast_to(a, b.shape).copy(), b))


def test_dtypes_are_promoted():
    b = jnp.ones(3, jnp.bfloat16)
    assert jaxgpuops.linear_scan(0.5, b).dtype == jnp.bfloat16  # a Python number takes the dtype of the array
    assert jaxgpuops.linear_scan(jnp.float32(0.5), b).dtype == jnp.float32
    assert jaxgpuops.linear_scan(b, jnp.arange(3)).dtype == jnp.bfloat16
    assert jaxgpuops.linear_scan(b, b, jnp.ones((), jnp.complex64)).dtype == jnp.complex64


# ---- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["public", "lax"])
def test_errors(tier):
    module = jaxgpuops if tier == "public" else jaxgpuops.lax
    op = "jaxgpuops" if tier == "public" else "jaxgpuops.lax"
    x = np.zeros((3, 4), np.float32)
    z = np.zeros(4, np.complex64)
    cases = [
        (TypeError, "cummax: .* dtype complex64; allowed are bfloat16, bool", lambda: module.cummax(z, axis=0)),
        (TypeError, "cumlogsumexp: .* dtype int32", lambda: module.cumlogsumexp(np.arange(3), axis=0)),
        (TypeError, "cumsum: axis must be an integer", lambda: module.cumsum(x, axis=1.5)),
        (TypeError, "cumsum: axis must be an integer", lambda: jax.jit(lambda i: module.cumsum(x, axis=i))(0)),
        (ValueError, "cumsum: axis must be between -2 and 1 .* got 2", lambda: module.cumsum(x, axis=2)),
        (ValueError, "cumprod: .* at least one dimension", lambda: module.cumprod(1.0, axis=0)),
        (
            TypeError,
            "cummin: segment_starts .* bool, got int32",
            lambda: module.cummin(x, axis=0, segment_starts=[1] * 4),
        ),
        (
            ValueError,
            "segment_starts must broadcast to shape",
            lambda: module.cumsum(x, axis=1, segment_starts=x[0, :3] > 0),
        ),
        (ValueError, "have all of axis 1", lambda: module.cumsum(x, axis=1, segment_starts=x[:, :1] > 0)),
        (ValueError, "have all of axis 0", lambda: module.cumsum(x, axis=0, segment_starts=x[0] > 0)),
        (TypeError, "linear_scan: the result has dtype int32", lambda: module.linear_scan(2, np.arange(3))),
        (ValueError, "linear_scan: a and b must broadcast", lambda: module.linear_scan(x[:, :2], x)),
        (ValueError, "linear_scan: h0 must broadcast to", lambda: module.linear_scan(x, x, x)),
        (ValueError, "linear_scan: the result must have at least one", lambda: module.linear_scan(1.0, 2.0)),
        (ValueError, "linear_scan: axis must be between", lambda: module.linear_scan(x, x, axis=5)),
        (TypeError, "linear_scan: segment_starts", lambda: module.linear_scan(x, x, segment_starts=x)),
        (TypeError, "cumsum: .* must be an array", lambda: module.cumsum("abc", axis=0)),
    ]
    for kind, message, call in cases:
        with pytest.raises(kind, match=message) as error:
            call()
        assert f"{op}." in str(error.value)
    if tier == "lax":
        with pytest.raises(TypeError, match="cumsum: operand has dtype bool"):  # jax.lax raises this, too
            jaxgpuops.lax.cumsum(np.array([True]))
