"""Values of softmax, log_softmax and logsumexp, their determinism and errors."""

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
import scan_reference
from reference import assert_close, x64
from softmax_reference import Logits

import jaxgpuops
from jaxgpuops.lax import logsumexp_primitives, softmax_primitives

NAMES = ("softmax", "log_softmax", "logsumexp")
FLOATS = [np.dtype(d) for d in ("float32", "float64", "float16", ml_dtypes.bfloat16)]
FLOATS8 = [np.dtype(d) for d in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)]
INF, NAN = np.inf, np.nan
TIERS = {"public": jaxgpuops, "lax": jaxgpuops.lax}
tiers = pytest.mark.parametrize("module", TIERS.values(), ids=TIERS)


def check(name, x, **options):
    """Values, and with a cotangent the gradients, against the reference."""
    check_all([(name, x, options)])


def check_all(calls):
    """Checks several calls in one program, because most of the time of a test goes into compiling."""
    calls = [(name, x, as_arrays(x.dtype, options)) for name, x, options in calls]
    programs = [functools.partial(evaluate, name, numbers_of(options)) for name, _, options in calls]
    arrays = [(x, arrays_of(options)) for _, x, options in calls]
    with x64(max((x.dtype for _, x, _ in calls), key=lambda dtype: dtype.itemsize)):
        results = jax.jit(lambda arrays: [run(*each) for run, each in zip(programs, arrays, strict=True)])(arrays)
    for (name, x, options), (y, gradients) in zip(calls, results, strict=True):
        compare(y, gradients, name, x, **options)


def arrays_of(options):
    return {k: v for k, v in options.items() if isinstance(v, np.ndarray)}


def numbers_of(options):
    return {k: v for k, v in options.items() if not isinstance(v, np.ndarray)}


def as_arrays(dtype, options):
    """Returns the options with the mask as an array, and the scale as an array of the dtype in which logits are
    computed."""
    where, scale = options.get("where"), options.get("scale")
    if where is not None:
        options = options | {"where": np.asarray(where)}
    if scale is not None and not np.isscalar(scale):
        options = options | {"scale": np.asarray(scale, np.float64 if dtype == np.float64 else np.float32)}
    return options


def evaluate(name, numbers, x, arrays):
    """The result, and gradients by the name of the operand if there is a cotangent."""
    fn = functools.partial(getattr(jaxgpuops, name), **{k: v for k, v in numbers.items() if k != "ct"})
    operands = {"x": x} | {k: v for k, v in arrays.items() if k in ("scale", "bias")}
    y, pull = jax.vjp(lambda operands: fn(**operands, where=arrays.get("where")), operands)
    return y, pull(arrays["ct"].astype(x.dtype))[0] if "ct" in arrays else {}


def compare(y, gradients, name, x, axis=-1, scale=None, bias=None, where=None, causal=False, ct=None):
    reference = Logits(x, axis % x.ndim, where, scale, bias, causal)
    arrays = {"x": x, "scale": scale, "bias": bias}
    assert y.dtype == x.dtype
    assert_close(y, getattr(reference, name)(), getattr(reference, f"{name}_bound")())
    if ct is None:
        return
    dz = getattr(reference, f"{name}_cotangent")(ct.astype(x.dtype).astype(np.longdouble))
    # The sums over rows are exact to a few units of what is added up.
    eps = scan_reference.eps(x.dtype)
    last = float(ml_dtypes.finfo(x.dtype).eps)  # the forward result was rounded to it
    exponent = 1 if name == "softmax" else np.nan_to_num(abs(reference.log_softmax()), posinf=0, neginf=0)
    size = abs(ct).sum(axis, keepdims=True) if name != "logsumexp" else abs(np.expand_dims(ct, axis))
    off = reference._exponent() + 16 * eps + (0 if name == "logsumexp" else 2 * last * np.max(exponent, initial=1))
    bound = off * (abs(ct) + size if name != "logsumexp" else size)
    for key, gradient in gradients.items():
        terms = {"x": reference.factor, "scale": reference.x, "bias": np.longdouble(1)}[key]
        terms, bounds = np.broadcast_to(dz * terms, x.shape), np.broadcast_to(bound * abs(terms), x.shape)
        shape = (1,) * (x.ndim - arrays[key].ndim) + arrays[key].shape
        axes = tuple(d for d in range(x.ndim) if shape[d] != x.shape[d])
        expected = terms.sum(axes, keepdims=True).reshape(arrays[key].shape)
        limit = bounds.sum(axes, keepdims=True).reshape(arrays[key].shape)
        limit = limit + 2 * scan_reference.rounding(arrays[key].dtype, limit + abs(expected)) + 1e-30
        assert gradient.dtype == arrays[key].dtype
        assert_close(gradient, expected, limit)


# ---- Anything goes --------------------------------------------------------------------------------------------------


@st.composite
def problems(draw):
    """Arguments of `check`."""
    shape = draw(scan_reference.SHAPES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    causal = len(shape) > 1 and draw(st.booleans())
    axis = -1 if causal else draw(st.integers(-len(shape), len(shape) - 1))
    dtype = draw(st.sampled_from(FLOATS))

    def part():
        """Draws a shape that broadcasts to `shape`."""
        sizes = tuple(n if draw(st.booleans()) else 1 for n in shape)
        return sizes[draw(st.integers(0, len(shape))) :]

    arguments = {"x": (3 * rng.standard_normal(shape)).astype(dtype), "axis": axis, "causal": causal}
    kind = draw(st.sampled_from(["none", "number", "array"]))
    if kind == "number":
        arguments["scale"] = draw(st.sampled_from([0.125, 0.3, -1.0, 0.0]))
    elif kind == "array":
        sizes = list(part())
        if len(sizes) >= (-axis if axis < 0 else len(shape) - axis):
            sizes[axis if axis < 0 else axis - len(shape)] = 1
        arguments["scale"] = rng.uniform(0.1, 2, sizes)
    if draw(st.booleans()):
        arguments["bias"] = rng.standard_normal(part()).astype(dtype)
    if draw(st.booleans()):
        arguments["where"] = rng.random(part()) < draw(st.sampled_from([0.1, 0.7, 1.0]))
    return rng, arguments


@pytest.mark.parametrize("name", NAMES)
@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_any_array(name, data):
    rng, arguments = data.draw(problems())
    x = arguments["x"]
    shape = x.shape if name != "logsumexp" else np.delete(x.shape, arguments["axis"])
    ct = rng.standard_normal(shape) if data.draw(st.booleans()) else None
    check(name, ct=ct, **arguments)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [*FLOATS, *FLOATS8], ids=str)
def test_every_dtype(name, dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 70)).astype(dtype)
    check(name, x)
    check(name, x.reshape(3, 7, 10), axis=1)


def lengths(up_to):
    powers = [2**k for k in range(4, 12)]
    around = {p + d for p in powers for d in (-1, 0, 1)} | {4095, 4097, 32000, 50257, 65537}
    return sorted(n for n in around if 1 <= n <= up_to)


@pytest.mark.parametrize("name", NAMES)
def test_lengths(name):
    rng = np.random.default_rng(0)
    calls = []
    for n in lengths(70_000):
        ct = rng.standard_normal((2, n) if name != "logsumexp" else 2) if n < 3000 else None
        calls.append((name, 4 * rng.standard_normal((2, n), np.float32), {"ct": ct}))
    for n in lengths(3000):
        calls.append((name, rng.standard_normal((n, 3)).astype(ml_dtypes.bfloat16), {"axis": 0}))
    check_all(calls)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length, inner", [(3, 65), (2500, 65), (300, 1056), (40, 2100), (20, 5000)])
def test_columns(name, length, inner):
    """Many columns are side by side, in blocks and strips. They have the same bits however many arrays of them there
    are."""
    rng = np.random.default_rng(0)
    x, ct = (4 * rng.standard_normal((1, length, inner)).astype(np.float32) for _ in range(2))
    check(name, x, axis=1, ct=ct if name != "logsumexp" else ct[:, 0])
    check(name, x.astype(ml_dtypes.bfloat16), axis=1, bias=ct[:, :, :1].astype(ml_dtypes.bfloat16), where=ct > -2)
    fn = functools.partial(getattr(jaxgpuops, name), axis=1)
    np.testing.assert_array_equal(fn(np.tile(x, (17, 1, 1)))[-1:], fn(x))


@pytest.mark.parametrize("n", [1, 2, 10, 25, 65])
def test_many_short_rows(n):
    """There are more rows than one strip has, and the last strip is not full. Each row has the bits that it has
    alone."""
    rng = np.random.default_rng(0)
    x, ct = (4 * rng.standard_normal((2100, n)).astype(np.float32) for _ in range(2))
    where, scale = rng.random(x.shape) < 0.8, rng.uniform(0.5, 2, (2100, 1))
    x3, where3, ct3 = (a.reshape(700, n, 3) for a in (x, where, ct))  # three side by side
    narrow = []
    for name in NAMES:
        g = ct if name != "logsumexp" else ct[:, 0]
        narrow.append((name, x, {"ct": g}))
        bias = ct[0].astype(ml_dtypes.bfloat16)
        narrow.append((name, x.astype(ml_dtypes.bfloat16), {"ct": g, "bias": bias, "where": where}))
        g = ct3[:, 0] if name == "logsumexp" else ct3
        narrow.append((name, x3, {"axis": 1, "where": where3, "scale": scale[:700, None], "ct": g}))
    check_all(narrow)
    check_all([(name, x.astype(np.float64), {"scale": scale, "where": where[:1]}) for name in NAMES])

    def of(name, x, ct, x3):
        fn = getattr(jaxgpuops, name)
        y, pull = jax.vjp(fn, x)
        return y, pull(ct if name != "logsumexp" else ct[:, 0]), fn(x3, axis=1)

    results = jax.jit(lambda *arrays: [of(name, *arrays) for name in NAMES])
    some = results(x[-3:], ct[-3:], x3[-3:])
    jax.tree.map(lambda y, alone: np.testing.assert_array_equal(y[-3:], alone), results(x, ct, x3), some)


# ---- As jax.nn -------------------------------------------------------------------------------------------------------


def jax_nn(name):
    return getattr(jax.nn, name)


@tiers
@pytest.mark.parametrize("axis", [0, -2, 2, None, (0, 1), (1, 2), (2, 1), (0, 2), (-1, 0, 1), (), [1, 2]], ids=str)
def test_axes(module, axis):
    rng = np.random.default_rng(0)
    x, ct = rng.standard_normal((2, 3, 4, 5)), rng.standard_normal((2, 3, 4, 5))
    wheres = None, rng.random((2, 3, 4, 5)) < 0.7, rng.random((3, 1, 1)) < 0.7

    def results(functions, axis):
        for function, where in itertools.product(functions, wheres):
            y, pull = jax.vjp(lambda x: function(x, axis=axis, where=where), x)
            yield y, pull(ct.ravel()[: y.size].reshape(y.shape))[0]

    with jax.enable_x64(True):
        actual = jax.jit(lambda: list(results([getattr(module, name) for name in NAMES], axis)))()
        jax_axis = tuple(axis) if isinstance(axis, list) else axis
        expected = jax.jit(lambda: list(results(map(jax_nn, NAMES), jax_axis)))()
        for (y, gradient), (y_expected, gradient_expected) in zip(actual, expected, strict=True):
            np.testing.assert_allclose(y, y_expected, rtol=1e-13)
            np.testing.assert_allclose(gradient, gradient_expected, atol=1e-13)


@tiers
def test_keepdims(module):
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    for axis in (1, None, (0, 2), ()):
        expected = jax.nn.logsumexp(x, axis=axis, keepdims=True)
        y = module.logsumexp(x, axis=axis, keepdims=True)
        assert y.shape == expected.shape
        np.testing.assert_allclose(y, expected, rtol=1e-6)


@tiers
def test_scale_and_bias_of_several_axes(module):
    rng = np.random.default_rng(0)
    x, bias, scale = rng.standard_normal((3, 4, 5)), rng.standard_normal((4, 1)), rng.uniform(0.5, 2, (1, 4, 1))
    with jax.enable_x64(True):
        for axes in ((0, 2), (0,)):
            y = module.softmax(x, axis=axes, scale=scale, bias=bias)
            np.testing.assert_allclose(y, jax.nn.softmax(x * scale + bias, axis=axes), rtol=1e-13)


@tiers
@pytest.mark.parametrize("dtype", ["int8", "uint32", "bool", "int32"])
def test_integers_become_floats(module, dtype):
    x = np.arange(12).reshape(3, 4).astype(dtype)
    for name in NAMES:
        expected = jax_nn(name)(x.astype(np.float32), axis=-1)
        with jax.numpy_dtype_promotion("strict"):  # the promotion is ours, and not implicit
            y = getattr(module, name)(x)
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, expected, rtol=1e-5)
    assert getattr(module, name)([[1, 2, 3]]).dtype == np.float32


@tiers
def test_scalars(module):
    assert [float(getattr(module, name)(2.0, axis=None)) for name in NAMES] == [1.0, 0.0, 2.0]


@tiers
@pytest.mark.parametrize("shape, axis", [((0,), 0), ((3, 0), 1), ((0, 3), 1), ((2, 0, 3), 1), ((2, 3, 0), (0, 1))])
def test_empty_arrays(module, shape, axis):
    x = np.zeros(shape, np.float32)
    for name in NAMES:
        y, pull = jax.vjp(lambda x: getattr(module, name)(x, axis=axis), x)
        expected = jax.nn.logsumexp(x, axis=axis) if name == "logsumexp" else x
        np.testing.assert_array_equal(y, expected)
        assert pull(jnp.ones_like(y))[0].shape == shape


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_infinities_and_nans(paths, dtype, masked):
    palette = np.array([0.0, 1.0, INF, -INF, NAN])
    rows = np.array(list(itertools.product(range(5), repeat=3)))
    x = palette[rows].astype(dtype)
    wheres = [None] if not masked else list(itertools.product([False, True], repeat=3))
    theirs, ours = (
        jax.jit(lambda x, where: [fn(x, axis=-1, where=where) for fn in fns])
        for fns in ([jax_nn(name) for name in NAMES], [getattr(jaxgpuops, name) for name in NAMES])
    )
    for where in wheres:
        where = None if where is None else np.array(where)
        clean = x if where is None else np.where(where, x, 0).astype(dtype)  # JAX lets a masked NaN through
        with x64(dtype):
            for name, actual, expected in zip(NAMES, ours(x, where), theirs(clean, where), strict=True):
                actual, expected = (np.asarray(y).astype(np.float64) for y in (actual, expected))
                np.testing.assert_allclose(actual, expected, rtol=1e-2, err_msg=f"{name} {where}")


# Rows are so long that they are divided into parts, and a part is -inf, or masked, or beyond a query.
@pytest.mark.parametrize("n", [100, 5000, 70_000])
@pytest.mark.parametrize("name", NAMES)
def test_parts_that_are_masked_whole(name, n):
    x = np.random.default_rng(0).standard_normal((2, n)).astype(np.float32)
    for start, stop in [(0, n - 3), (3, n), (n // 3, n - n // 3)]:
        where = np.ones(n, bool)
        where[start:stop] = False
        check(name, x, where=where)
        reference = Logits(np.where(where, x, -INF), 1)
        y = getattr(jaxgpuops, name)(np.where(where, x, np.float32(-INF)))
        assert_close(y, getattr(reference, name)(), getattr(reference, f"{name}_bound")())


# ---- Causal ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries, keys", [(7, 7), (3, 8), (8, 3), (1, 5), (70, 300)])
def test_causal_of_any_shape(queries, keys):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, queries, keys)).astype(np.float32)
    where = rng.random((3, 1, keys)) < 0.8
    for name in NAMES:
        shape = x.shape if name != "logsumexp" else x.shape[:-1]
        check(name, x, causal=True, where=where, scale=0.25, ct=rng.standard_normal(shape))
    # vmap over any dimension, also over one between the queries and the keys.
    for batch, name in itertools.product(range(4), NAMES):
        fn = functools.partial(getattr(jaxgpuops, name), causal=True)
        out = min(batch, 2) if name == "logsumexp" else batch
        actual = jax.vmap(fn, in_axes=batch, out_axes=out)(np.moveaxis(x, 0, batch))
        np.testing.assert_allclose(np.moveaxis(actual, out, 0), fn(x), rtol=1e-5)


@tiers
def test_masked_entries_are_not_read(module):
    x = np.random.default_rng(0).standard_normal((2, 6, 6)).astype(np.float32)
    poisoned = np.where(np.tri(6, dtype=bool), x, NAN)
    for name in NAMES:
        fn = functools.partial(getattr(module, name), causal=True)
        np.testing.assert_array_equal(fn(poisoned), fn(x))


# ---- What JAX gets wrong ---------------------------------------------------------------------------------------------


@tiers
def test_what_is_left_of_1_is_not_lost(paths, module):
    tail = np.exp(-40.0)
    with jax.enable_x64(True):
        for dtype in (np.float32, np.float64):
            x = jnp.array([[40.0, 0.0, -INF], [0.0, 40.0, 0.0]], dtype)
            label = jnp.array([0, 1])
            for reduction in (None, "sum"):
                fn = lambda x: module.softmax_cross_entropy(x, label, reduction=reduction).sum()
                loss, gradient = jax.value_and_grad(fn)(x)
                np.testing.assert_allclose(loss, 3 * tail, rtol=1e-5)
                expected = [[-tail, tail, 0], [tail, -2 * tail, tail]]
                np.testing.assert_allclose(gradient, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_two_equal_logits(paths, dtype):
    """Rounded to 16 bits, the logarithm of a half gives a probability above a half for both entries."""
    atol = 4 * float(ml_dtypes.finfo(dtype).eps)
    with x64(dtype):
        x, ct = np.zeros((2, 2), dtype), np.array([[1, -1], [3, 2]], dtype)
        for module in (jaxgpuops, jaxgpuops.lax):
            of_softmax, of_logarithms = (jax.vjp(f, x)[1](ct)[0] for f in (module.softmax, module.log_softmax))
            np.testing.assert_array_equal(of_softmax, [[0.5, -0.5], [0.25, -0.25]])
            np.testing.assert_allclose(np.asarray(of_logarithms, np.float64), [[1, -1], [0.5, -0.5]], atol=atol)
        tangent = jax.jvp(jaxgpuops.lax.log_softmax, (x,), (ct,))[1]
        np.testing.assert_allclose(np.asarray(tangent, np.float64), [[1, -1], [0.5, -0.5]], atol=atol)


@tiers
def test_rows_that_are_masked_whole(paths, module):
    x = jnp.array([[1.0, 2.0], [3.0, NAN]])
    where = jnp.array([[True, True], [False, False]])
    assert module.softmax(x, where=where)[1].tolist() == [0.0, 0.0]
    assert module.log_softmax(x, where=where)[1].tolist() == [-INF, -INF]
    assert module.logsumexp(x, where=where)[1] == -INF
    for name in NAMES:
        fn = lambda x: jnp.where(jnp.isfinite(y := getattr(module, name)(x, where=where)), y, 0).sum()
        gradient = jax.grad(fn)(x)
        assert np.isfinite(gradient).all() and gradient[1].tolist() == [0.0, 0.0]


@tiers
@pytest.mark.parametrize("scale", [1e8, np.float32(3e30), "array"], ids=str)
def test_huge_pre_activations(paths, module, scale):
    """The product is rounded once, and the same everywhere: nothing contracts it with the subtraction."""
    x = np.random.default_rng(0).standard_normal((20, 300)).astype(np.float32)
    factor = np.float32(1e20) if scale == "array" else np.float32(scale)
    scale = np.full((20, 1), factor, np.float32) if isinstance(scale, str) else scale
    y, log_y, lse = jax.jit(lambda x: [getattr(module, name)(x * 7, scale=scale) for name in NAMES])(x)
    winners = np.argmax(x, -1)
    np.testing.assert_array_equal(y, np.eye(300)[winners])
    np.testing.assert_array_equal(np.asarray(log_y)[np.arange(20), winners], 0)
    np.testing.assert_allclose(lse, (x * np.float32(7)).max(-1) * factor, rtol=1e-6)


# ---- Large logits ----------------------------------------------------------------------------------------------------

# Log-likelihoods are as large. What is lost where the logsumexp is rounded to one number: at 10^6, 3 % of each
# probability of float32; at 10^30, all of it.
SIZES = [1e3, 1e4, 1e6, 1e7, 1e30]


def large(rng, size, dtype, shape):
    """Returns numbers near ``size`` and a unit. Halves of the numbers, and their sums with small multiples of the unit,
    are exact."""
    unit = max(1 / 16, 4 * float(ml_dtypes.finfo(dtype).eps) * size)
    return (np.array(size, dtype) + unit * rng.integers(-60, 60, shape)).astype(dtype), unit


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_at_large_logits(paths, name):
    rng = np.random.default_rng(0)
    for dtype, size in itertools.product(FLOATS[:2], SIZES):
        x, _ = large(rng, size, dtype, (5, 50))
        check(name, x, ct=rng.standard_normal(x.shape), where=rng.random(x.shape) < 0.8)


# ---- Determinism -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [7, 1000, 40_000, 65_536, 300_000])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(n):
    rng = np.random.default_rng(0)
    x, t = (rng.standard_normal((5, n)).astype(np.float32) for _ in range(2))
    bias = rng.standard_normal(n).astype(np.float32)
    for name in NAMES:
        fn = functools.partial(getattr(jaxgpuops, name), bias=bias)
        together = fn(x)
        np.testing.assert_array_equal(np.stack([fn(row) for row in x]), together)
        np.testing.assert_array_equal(jax.vmap(fn)(x), together)
        np.testing.assert_array_equal(fn(x), together)  # a second call gives the same bits
        # If rows are many, threads share them in another way.
        np.testing.assert_array_equal(fn(np.tile(x, (8, 1)))[-5:], together)
        plain = getattr(jaxgpuops, name)
        np.testing.assert_array_equal(plain(np.tile(x, (8, 1)))[-5:], plain(x))
        # An operand that broadcasts is the same as its copies.
        copies = getattr(jaxgpuops, name)(x, bias=np.broadcast_to(bias, x.shape).copy())
        np.testing.assert_array_equal(copies, together)
        if name != "logsumexp":
            pull = lambda x, t: jax.vjp(fn, x)[1](t)[0]
            np.testing.assert_array_equal(np.stack([pull(*rows) for rows in zip(x, t, strict=True)]), pull(x, t))
            np.testing.assert_array_equal(pull(np.tile(x, (8, 1)), np.tile(t, (8, 1)))[-5:], pull(x, t))
    labels = rng.integers(0, n, 5)
    loss = jax.jit(lambda x, label: jax.value_and_grad(jaxgpuops.softmax_cross_entropy)(x, label, reduction="sum"))
    rows = [loss(*row) for row in zip(x, labels, strict=True)]
    together = jax.vmap(loss)(x, labels)
    for alone, batch in zip(zip(*rows, strict=True), together, strict=True):
        np.testing.assert_array_equal(np.stack(alone), batch)
    for alone, batch in zip(loss(x, labels), loss(np.tile(x, (8, 1)), np.tile(labels, 8)), strict=True):
        if alone.ndim:  # a sum over all rows depends on how many there are
            np.testing.assert_array_equal(batch[-5:], alone)


# ---- Errors ----------------------------------------------------------------------------------------------------------

X = np.zeros((3, 4), np.float32)
WRONG = {
    "axis": (ValueError, {"axis": 2}, "axis must be between -2 and 1"),
    "axis of tuple": (ValueError, {"axis": (0, -3)}, "axis must be between -2 and 1"),
    "axis twice": (ValueError, {"axis": (1, -1)}, r"axis has duplicates .* \(1, -1\)"),
    "axis type": (TypeError, {"axis": 1.5}, "axis must be an integer known at trace time, got 1.5"),
    "scalar": (ValueError, {"x": np.float32(1)}, "must have at least one dimension"),
    "dtype": (TypeError, {"x": X.astype(np.complex64)}, "x has dtype complex64; allowed are bfloat16"),
    "where dtype": (TypeError, {"where": np.zeros(4)}, "where must be a mask of dtype bool, got float"),
    "where shape": (ValueError, {"where": np.zeros(3, bool)}, r"where must broadcast to shape \(3, 4\), got \(3,\)"),
    "where rank": (ValueError, {"where": np.zeros((1, 3, 4), bool)}, "where must broadcast to shape"),
    "bias shape": (ValueError, {"bias": np.zeros((2, 4))}, r"bias must broadcast to shape \(3, 4\), got \(2, 4\)"),
    "bias dtype": (TypeError, {"bias": np.zeros(4, bool)}, "bias has dtype bool"),
    "scale shape": (ValueError, {"scale": np.zeros((2, 1))}, "scale must broadcast to shape"),
    "scale with the axis": (ValueError, {"scale": np.ones(4)}, r"scale must have size 1 along axis -1.* got \(1, 4\)"),
    "scale type": (TypeError, {"scale": "2"}, "scale must be a number known at trace time, got '2'"),
    "scale bool": (TypeError, {"scale": True}, "scale must be a number"),
    "causal axis": (ValueError, {"causal": True, "axis": 0}, "causal needs the axis to be the last"),
    "causal rank": (ValueError, {"causal": True, "x": X[0]}, "causal needs the axis to be the last of two"),
}  # fmt: skip


@tiers
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("error, arguments, message", WRONG.values(), ids=WRONG)
def test_errors(module, name, error, arguments, message):
    op = "jaxgpuops." if module is jaxgpuops else "jaxgpuops.lax."
    with pytest.raises(error, match=rf"{op}{name}: .*{message}"):
        getattr(module, name)(**({"x": X} | arguments))


def test_parts_of_logsumexp(paths):
    x = jnp.full((5, 3000), 1, jnp.bfloat16).at[jnp.arange(1, 5), 7].set(jnp.array([3, -INF, INF, NAN], jnp.bfloat16))
    x = x.at[2].set(-INF)
    flags = dict.fromkeys(("scaled", "biased", "masked"), False)
    m, log_sum = logsumexp_primitives.logsumexp_p(x, axis=1, parts=True, factor=1.0, query_axis=None, **flags)
    assert m.dtype == log_sum.dtype == np.float32
    assert m[:4].tolist() == [1, 3, 0, 0] and np.isfinite(m[4])
    expected = [np.log(3000), np.log(1 + 2999 * np.exp(-2)), -INF, INF, NAN]
    np.testing.assert_allclose(log_sum, expected, rtol=1e-6)


def test_short_rows_are_left_to_xla_on_a_gpu(cuda_build):
    """Pairs along any axis, and the logsumexp of a few numbers, whatever their number is."""

    def has_kernel(name, *shape, dtype="float32", **options):
        fn = functools.partial(getattr(jaxgpuops, name), axis=1, **options)
        [call] = jaxgpuops.explain(fn, jax.ShapeDtypeStruct(shape, dtype), platform="cuda")
        return call.kernel is not None

    for name in NAMES[:3]:
        for rows in (1, 1 << 22):
            assert not has_kernel(name, rows, 2) and not has_kernel(name, rows, 2, dtype="bfloat16")
            assert has_kernel(name, rows, 3) == (name != "logsumexp")
            assert has_kernel(name, rows, 2, scale=2.0) and has_kernel(name, rows, 2, where=jnp.ones(2, bool))
        assert has_kernel(name, 3, 2, 5) == (name == "logsumexp")
    assert not has_kernel("logsumexp", 5, 8) and has_kernel("logsumexp", 5, 9)


@pytest.mark.parametrize("dtype, digits", [("float16", 11), ("bfloat16", 8)])
def test_columns_of_pairs_in_16_bits_are_rounded_correctly(dtype, digits):
    """On a GPU they are left to XLA, and their logarithms are a polynomial. Here are all pairs of 0 and a number."""
    d = np.arange(1 << 16, dtype=np.uint16).view(jnp.dtype(dtype))
    with np.errstate(invalid="ignore"):
        d = d[np.abs(d.astype(float)) < 80]  # beyond, exponentials underflow in float32
    logits = {"factor": 1.0, "scaled": False, "biased": False, "masked": False, "query_axis": None}
    log_softmax = functools.partial(softmax_primitives.log_softmax_p.fallback, axis=0, **logits)
    [y] = jax.jit(log_softmax)(jnp.stack([jnp.zeros_like(d), d]))
    d = d.astype(float)
    exact = -np.logaddexp(0, np.stack([d, -d]))
    spacing = np.exp2(np.maximum(np.floor(np.log2(-exact)) + 1 - digits, -24.0 if dtype == "float16" else -140))
    assert np.all(np.abs(np.asarray(y, float) - exact) <= 0.53 * spacing)
    assert y[0, 0] == y[1, 0] == jnp.log(0.5).astype(dtype)


def test_short_columns_are_one_expression(cuda_build):
    """On a GPU, XLA makes one loop of the log-sum-exp of short float32 columns, and of what is around it."""
    for shape, dtype, left in (
        ((4, 9, 21), "float32", True),
        ((4, 17, 21), "float32", False),
        ((4, 9, 15), "float32", False),
        ((4, 9, 21), "bfloat16", False),
    ):
        x = jax.ShapeDtypeStruct(shape, dtype)
        [call] = jaxgpuops.explain(lambda x: jaxgpuops.logsumexp(x, axis=1), x, platform="cuda")
        assert (call.kernel is None) == left
    x = 30 * np.random.default_rng(0).standard_normal((4, 9, 21), dtype=np.float32)
    x[0, :, 0], x[1, 2, 3], x[2, 2, 3] = -np.inf, np.nan, np.inf
    logits = {"factor": 1.0, "scaled": False, "biased": False, "masked": False, "query_axis": None}
    [y] = logsumexp_primitives.logsumexp_p.fallback(jnp.asarray(x), axis=1, parts=False, **logits)
    np.testing.assert_allclose(y, jax.nn.logsumexp(x, axis=1), rtol=1e-6)
