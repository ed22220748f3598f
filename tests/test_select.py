"""Places in sorted rows, elements by their rank, what a mask chooses, and arrays that are expanded."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxgpuops
from jaxgpuops import _arguments
from jaxgpuops.lax._search import choose_p, unique_p
from jaxgpuops.lax._select import quantile_p, select_p
from jaxgpuops.lax.order import sort_keys
from jaxgpuops.ops import select as ops

FLOATS = ("float16", "bfloat16", "float32")
DTYPES = (*FLOATS, "float64", "int8", "uint16", "int32", "int64", "bool")
SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 2.5, 1e-40]


def data(seed, shape, dtype, special=True):
    """Few different values, so that many are equal; among floats also NaNs, infinities, both zeros, subnormal
    numbers."""
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jnp.floating):
        return rng.choice(SPECIAL if special else [-2.0, 0.5, 1.0, 3.0, 7.0, -11.0], shape).astype(dtype)
    return rng.integers(0, 5, shape).astype(dtype)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def bits(x):
    x = np.asarray(x)
    return x.view(f"uint{8 * x.itemsize}") if jnp.issubdtype(x.dtype, jnp.floating) else x


# ---- Places in sorted rows ------------------------------------------------------------------------------------------


def ranked(row):
    """Numbers in the order of the sort: NaNs equal and last, zeros equal."""
    return np.where(np.isnan(row), np.inf, np.clip(row, -1e300, 1e300)) if row.dtype.kind == "f" else row


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_searchsorted(dtype, side):
    for n, m in ((1, 5), (2, 3), (37, 50), (1000, 300)):
        rows = np.asarray(jaxgpuops.sort(data(n, (3, n), dtype)))
        queries = data(m + 1, (3, m), dtype)
        found = jaxgpuops.searchsorted(rows, queries, side)
        assert found.dtype == np.int32
        wide = (lambda x: ranked(x.astype(np.float64))) if jnp.issubdtype(dtype, jnp.floating) else lambda x: x
        expected = [np.searchsorted(wide(r), wide(q), side) for r, q in zip(rows, queries, strict=True)]
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(jaxgpuops.searchsorted(rows.T, queries.T, side, axis=0).T, expected)
        shared = [np.searchsorted(wide(rows[0]), wide(q), side) for q in queries]
        np.testing.assert_array_equal(jaxgpuops.searchsorted(rows[0], queries, side), shared)
        np.testing.assert_array_equal(jaxgpuops.searchsorted(rows[:1], queries, side), shared)
        batched = jax.vmap(lambda r, q: jaxgpuops.searchsorted(r, q, side))
        np.testing.assert_array_equal(jax.jit(batched)(rows, queries), expected)
        one_row = jax.vmap(lambda q: jaxgpuops.searchsorted(rows[0], q, side), in_axes=1, out_axes=1)
        np.testing.assert_array_equal(one_row(queries), shared)


def test_searchsorted_of_edges():
    assert jaxgpuops.searchsorted(np.zeros(0, np.float32), np.ones(3, np.float32)).tolist() == [0, 0, 0]
    assert jaxgpuops.searchsorted(np.ones(3), np.zeros((2, 0))).shape == (2, 0)
    assert jaxgpuops.searchsorted(np.ones((0, 3)), np.zeros((0, 2))).shape == (0, 2)
    assert int(jaxgpuops.searchsorted(np.arange(5), 3)) == 3
    assert jaxgpuops.searchsorted(np.arange(5, dtype=np.int32), 2.5).tolist() == 3  # promoted
    columns = np.sort(np.random.default_rng(0).standard_normal((2, 9, 3)), axis=1)
    queries = np.random.default_rng(1).standard_normal((1, 4, 3))
    expected = [[np.searchsorted(c, q) for c, q in zip(rows.T, queries[0].T, strict=True)] for rows in columns]
    np.testing.assert_array_equal(jaxgpuops.searchsorted(columns, queries, axis=1), np.swapaxes(expected, 1, 2))
    gradient = jax.grad(lambda x: (x[jaxgpuops.searchsorted(jnp.sort(x), x)]).sum())(jnp.array([2.0, 1.0]))
    assert gradient.tolist() == [1.0, 1.0]


# ---- Ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["linear", "lower", "higher", "midpoint", "nearest", "inverted_cdf"])
def test_quantile_is_numpys(method):
    rng = np.random.default_rng(3)
    q = np.array([0.0, 0.1, 0.25, 0.5, 2 / 3, 0.99, 1.0])
    for shape in ((1,), (2, 3), (4, 10), (3, 101)):
        x = rng.standard_normal(shape)
        found = jaxgpuops.quantile(x, q, method=method)
        np.testing.assert_allclose(found, np.quantile(x, q, axis=-1, method=method), rtol=1e-14, atol=1e-15)
        one = jaxgpuops.quantile(x, 0.5, axis=None, method=method, keepdims=True)
        np.testing.assert_allclose(one, np.quantile(x, 0.5, method=method, keepdims=True), rtol=1e-14, atol=1e-15)
    np.testing.assert_array_equal(jax.jit(jaxgpuops.quantile)(x, jnp.array([0, 1])), [x.min(-1), x.max(-1)])
    x = rng.standard_normal((2, 3, 4))
    for axis in (0, 1, (0, 2), (1, 2)):
        found = jaxgpuops.quantile(x, q, axis=axis, method=method, keepdims=True)
        expected = np.quantile(x, q, axis=axis, method=method, keepdims=True)
        np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-15)
        traced = jax.jit(lambda x, q, axis=axis: jaxgpuops.quantile(x, q, axis=axis, method=method))(x, q)
        np.testing.assert_allclose(traced, np.quantile(x, q, axis=axis, method=method), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "int32", "int64", "uint16"])
def test_quantile_of_other_dtypes(dtype):
    x = data(1, (5, 40), dtype, special=False)
    wanted = np.asarray(x, np.float64)
    for q in (0.0, 0.31, 0.5, 1.0):
        found = jaxgpuops.quantile(x, q, method="lower")
        np.testing.assert_array_equal(np.asarray(found, np.float64), np.quantile(wanted, q, axis=-1, method="lower"))
    floats = jnp.issubdtype(dtype, jnp.floating)
    assert found.dtype == (dtype if floats else np.float64 if dtype == "int64" else np.float32)
    eps = float(jnp.finfo(found.dtype).eps)
    np.testing.assert_allclose(
        np.asarray(jaxgpuops.median(x), np.float64), np.median(wanted, axis=-1), rtol=eps, atol=0
    )


def test_quantiles_of_nans_infinities_and_nothing():
    x = np.array([[1.0, np.nan, 3.0], [np.inf, 1.0, 2.0], [-np.inf, np.inf, np.inf]])
    assert jaxgpuops.median(x).tolist()[1:] == [2.0, np.inf] and np.isnan(jaxgpuops.median(x)[0])
    assert jaxgpuops.quantile(x[2], 1.0).tolist() == np.inf
    assert np.isnan(jaxgpuops.quantile(np.zeros((2, 0)), [0.1, 0.2])).all()
    assert np.isnan(jaxgpuops.quantile(x[1], jnp.array([2.0, -1.0, np.nan]))).all()
    assert jaxgpuops.quantile(np.zeros((0, 3)), 0.5).shape == (0,)
    assert jaxgpuops.quantile(np.ones((4, 3)), np.zeros(0)).shape == (0, 4)


@pytest.mark.parametrize("dtype", [*FLOATS, "float64"])
def test_quantiles_of_the_kernel_are_those_of_the_fallback(dtype):
    """Rows and columns of every kernel, with NaNs, infinities, zeros of both signs and subnormal numbers."""
    calls = [([0.31], "linear"), ([0.5], "midpoint"), ([0.3], "higher"), ([1.0], "lower"), ([0.1, 0.5, 0.9], "linear")]
    shapes = ((58, 5), (40, 30), (7, 64, 3), (40, 172), (9, 700), (5, 3000), (2, 9000), (1, 30_001), (3, 70_001))
    for n, shape in enumerate(shapes):
        x = np.random.default_rng(n).standard_normal(shape)
        rare = np.random.default_rng(n + 1).random(shape)
        x[rare < 0.4] = data(n, shape, "float64")[rare < 0.4] if n % 2 else 0.25
        if n % 2 == 0:
            x[rare > 1 - 0.3 / shape[1]] = np.nan
        x = jnp.asarray(x).astype(dtype)
        names = {call.op for call in jaxgpuops.explain(lambda x: jaxgpuops.median(x, axis=1), x)}
        assert shape[1] < 512 or names == {"quantile"}

        def both(x, q, method):
            found = jaxgpuops.quantile(x, q, axis=1, method=method)
            low, high, share = ops._places(np, np.asarray(q), x.shape[1], method)
            ranks = [*low, *high] if method in ops.BETWEEN else low
            ranks = np.array([*ranks, x.shape[1] - 1], np.int32).reshape(1, -1, *(1,) * (x.ndim - 2))
            shares = share.astype(_arguments.wide(x.dtype)).reshape(1, -1, *(1,) * (x.ndim - 2))
            [y] = quantile_p.fallback(x, ranks, shares, axis=1, midpoint=method == "midpoint", before=1)
            return found, jnp.moveaxis(y, 1, 0)

        for found, expected in jax.jit(lambda x: [both(x, *call) for call in calls])(x):
            found, expected = np.asarray(found), np.asarray(expected)
            numbers = ~np.isnan(expected)
            np.testing.assert_array_equal(np.isnan(found), ~numbers)
            np.testing.assert_array_equal(bits(found)[numbers], bits(expected)[numbers])


def test_quantiles_lie_as_they_are_wanted():
    """Of several quantiles, the kernel writes the first one of each row, then the second one of each, and so on."""
    q = [0.1, 0.5, 0.9]
    x = np.random.default_rng(7).standard_normal((3, 600, 5, 2)).astype(np.float32)
    calls = [
        (lambda x: jaxgpuops.quantile(x, q, axis=1), np.quantile(x, q, axis=1)),
        (lambda x: jaxgpuops.quantile(x, q, axis=1, keepdims=True), np.quantile(x, q, axis=1, keepdims=True)),
        (lambda x: jaxgpuops.quantile(x[0, :, 0, 0], q), np.quantile(x[0, :, 0, 0], q)),
        (jax.vmap(lambda x: jaxgpuops.quantile(x, q, axis=0)), np.moveaxis(np.quantile(x, q, axis=1), 0, 1)),
        (jax.vmap(lambda x: jaxgpuops.quantile(x, q, axis=1), 2, 1), np.moveaxis(np.quantile(x, q, axis=1), 2, 1)),
        (
            jax.vmap(jax.vmap(lambda x: jaxgpuops.quantile(x, q, axis=0)), 3, 2),
            np.quantile(x, q, axis=1).transpose(1, 0, 3, 2),
        ),
    ]
    for n, (call, expected) in enumerate(calls):
        compiled = jax.jit(call).lower(x).compile()
        assert 'custom_call_target="jaxgpuops.quantile"' in compiled.as_text()
        if n not in (1, 4, 5):  # dimensions of size 1 are added; the batch is to lie behind other dimensions
            assert not re.search(r"\b(copy|transpose)(-start)?\(", compiled.as_text()), n
        np.testing.assert_allclose(compiled(x), expected, rtol=1e-5, atol=1e-6)


def test_quantiles_of_several_calls():
    """A batch of probabilities, numbers that are no probabilities, and no numbers at all."""
    x = np.random.default_rng(6).standard_normal((4, 600)).astype(np.float32)
    q = np.array([[0.1, 0.5], [0.25, 1.0], [-1.0, 0.3]], np.float32)
    found = jax.jit(jax.vmap(lambda q: jaxgpuops.quantile(x, q), out_axes=1))(q)
    assert found.shape == (2, 3, 4) and np.isnan(found[0, 2]).all()
    expected = np.quantile(x.astype(np.float64), np.abs(q.T), axis=1)
    np.testing.assert_allclose(found[:, :2], expected[:, :2], rtol=1e-5, atol=1e-6)
    both = jax.jit(jax.vmap(lambda x, q: jaxgpuops.quantile(x, q)))(np.stack([x] * 3), q)
    np.testing.assert_array_equal(both, np.swapaxes(found, 0, 1))
    assert jaxgpuops.quantile(x, np.zeros(0)).shape == (0, 4)
    value, gradient = jax.value_and_grad(lambda x: jaxgpuops.median(x).sum())(x)
    np.testing.assert_allclose(value, np.median(x, 1).sum(), rtol=1e-5)
    assert ((gradient == 0.5).sum(1) == 2).all() and (gradient.sum(1) == 1).all()


def test_weighted_quantile_is_numpys():
    rng = np.random.default_rng(4)
    x, weights = rng.standard_normal((6, 31)), rng.integers(0, 4, (6, 31)).astype(np.float64)
    weights[:, 0] += 1
    for q in (0.0, 0.2, 0.5, 0.77, 1.0):
        found = jaxgpuops.quantile(x, q, method="inverted_cdf", weights=weights)
        expected = np.quantile(x, q, axis=-1, method="inverted_cdf", weights=weights)
        np.testing.assert_array_equal(found, expected)
    assert np.isnan(jaxgpuops.quantile(x[0], 0.5, method="inverted_cdf", weights=np.zeros(31)))


def test_weighted_quantiles_along_an_axis_of_symbolic_length():
    n, m = jax.export.symbolic_shape("n, m")
    rng = np.random.default_rng(8)
    x, weights = rng.standard_normal((7, 4, 3)).astype(np.float32), rng.random((7, 4, 3)).astype(np.float32)
    shape = (n, 4, m)
    for axis in range(3):
        for own in (weights, np.moveaxis(weights, axis, 0)[:, 0, 0]):
            fn = lambda x, w, axis=axis: jaxgpuops.quantile(x, [0.2, 0.5], axis=axis, method="inverted_cdf", weights=w)
            of = [jax.ShapeDtypeStruct(shape, np.float32)]
            of.append(of[0] if own is weights else jax.ShapeDtypeStruct((shape[axis],), np.float32))
            exported = jax.export.export(jax.jit(fn), disabled_checks=jaxgpuops.export_checks())(*of)
            np.testing.assert_array_equal(exported.call(x, own), fn(x, own))


def test_derivatives_of_quantiles_are_jaxs():
    x = np.random.default_rng(5).permutation(np.arange(24.0)).reshape(4, 6)
    for method in ("linear", "lower", "midpoint"):
        ours = lambda x, m=method: (jaxgpuops.quantile(x, jnp.array([0.3, 0.8]), axis=1, method=m) ** 2).sum()
        jaxs = lambda x, m=method: (jnp.quantile(x, jnp.array([0.3, 0.8]), axis=1, method=m) ** 2).sum()
        np.testing.assert_allclose(jax.grad(ours)(x), jax.grad(jaxs)(x), rtol=1e-12)
        np.testing.assert_allclose(jax.jvp(ours, (x,), (x,))[1], jax.jvp(jaxs, (x,), (x,))[1], rtol=1e-12)
    of_q = lambda q: jaxgpuops.quantile(x[0], q)
    several = jax.jit(lambda q: jaxgpuops.quantile(x[0], [q, 0.5]))(0.25)
    np.testing.assert_allclose(several, np.quantile(x[0], [0.25, 0.5]), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(of_q)(0.37), jax.grad(lambda q: jnp.quantile(x[0], q))(0.37), rtol=1e-12)
    none, tangents = jax.jvp(lambda x: jaxgpuops.quantile(x, [], axis=1), (x,), (x,))
    assert none.shape == tangents.shape == (0, 4)
    assert jax.grad(lambda x: jaxgpuops.quantile(x, []).sum())(x).tolist() == np.zeros((4, 6)).tolist()


def test_ranks_along_an_axis_of_symbolic_length():
    (n,) = jax.export.symbolic_shape("n")
    both = lambda x: (*jaxgpuops.kth_value(x, 1), jaxgpuops.partition(x, 1)[1])
    export = jax.export.export(jax.jit(both), disabled_checks=jaxgpuops.export_checks())
    results = export(jax.ShapeDtypeStruct((n,), np.float32)).call(jnp.array([3.0, 1.0, 2.0], np.float32))
    assert [y.tolist() for y in results] == [2, 2, 2]
    with pytest.raises(ValueError, match="kth_value: k must not be negative if the length of axis 0 is symbolic"):
        jax.export.export(jax.jit(lambda x: jaxgpuops.kth_value(x, -1)))(jax.ShapeDtypeStruct((n,), np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_kth_value_and_partition(dtype):
    x = data(7, (4, 23, 3), dtype)
    keys = ranked(x.astype(np.float64)) if jnp.issubdtype(dtype, jnp.floating) else x
    order = np.argsort(keys, axis=1, kind="stable")
    for k in (0, 11, 22, -1, -23):
        values, indices = jaxgpuops.kth_value(x, k, axis=1)
        np.testing.assert_array_equal(indices, order[:, k])
        np.testing.assert_array_equal(bits(values), bits(np.take_along_axis(x, order[:, [k]], 1)[:, 0]))
        parts = np.asarray(jaxgpuops.partition(x, k, axis=1))
        np.testing.assert_array_equal(bits(parts[:, k]), bits(values))
        wide = parts.astype(np.float64)
        numbers = np.nan_to_num(wide, nan=np.inf, posinf=1e300, neginf=-1e300)
        assert (numbers[:, : k % 23] <= numbers[:, [k]]).all() and (numbers[:, k % 23 :] >= numbers[:, [k]]).all()


# ---- What a mask chooses ---------------------------------------------------------------------------------------------


@given(
    st.integers(0, 1 << 30), st.sampled_from([(0,), (1,), (7,), (64,), (3, 5), (0, 4)]), st.sampled_from([0, 1, 4, 80])
)
@settings(max_examples=40, deadline=None)
def test_nonzero_is_jaxs(seed, shape, size):
    x = np.random.default_rng(seed).integers(-1, 2, shape)
    for fill in (None, -1) if x.size else (None,):  # for an empty array, JAX ignores the fill value
        found = jaxgpuops.nonzero(x, size=size, fill_value=fill)
        for ours, theirs in zip(found, jnp.nonzero(x, size=size, fill_value=fill), strict=True):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.dtype == np.int32


@pytest.mark.parametrize("n", [0, 1, 6, 31, 32])
def test_bits_of_short_masks_are_one_word(n):
    """What a GPU computes for rows of up to 32 elements."""
    kernel = choose_p
    assert kernel.leaves((1, 32, 1), ()) and not kernel.leaves((1, 33, 1), ())
    rng = np.random.default_rng(n)
    mask = np.stack([rng.random(n) < share for share in (0, 0.3, 0.5, 0.9, 1) for _ in range(20)])
    fill = np.full((1, 1), -7, np.int32)
    for size in (0, 1, 5, 32, 50):
        both = [jax.jit(functools.partial(f, axis=1, size=size))(mask, fill) for f in (kernel.left, kernel.fallback)]
        np.testing.assert_array_equal(*both[0], *both[1])


@given(st.integers(0, 1 << 30), st.sampled_from([0, 1, 9, 100]), st.sampled_from([0, 1, 5, 120]))
@settings(max_examples=30, deadline=None)
def test_compact(seed, n, size):
    rng = np.random.default_rng(seed)
    x, mask = rng.standard_normal((3, n, 2)), rng.random((3, n)) < 0.4
    found = jaxgpuops.compact(x, mask, size=size, fill_value=-7)
    expected = np.full((3, size, 2), -7.0)
    for i in range(3):
        chosen = x[i][mask[i]][:size]
        expected[i, : len(chosen)] = chosen
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(
        jax.vmap(lambda x, m: jaxgpuops.compact(x, m, size=size, fill_value=-7))(x, mask), expected
    )
    gradient = jax.grad(lambda x: jaxgpuops.compact(x, mask, size=size).sum())(x)
    first = mask & (mask.cumsum(1) <= size)
    np.testing.assert_array_equal(gradient, np.broadcast_to(first[..., None], x.shape).astype(x.dtype))


@pytest.mark.parametrize("dtype", [*FLOATS, "float8_e4m3fn", "float8_e5m2"])
def test_elements_are_moved_bit_for_bit(dtype, monkeypatch):
    """All patterns of 8 bits, and denormal numbers and NaNs of 16 and 32 bits."""
    bits = np.arange(256, dtype=f"u{np.dtype(dtype).itemsize}")
    bits = np.concatenate([bits, ~bits, bits << 7, np.asarray(np.full(8, np.inf, dtype)).view(bits.dtype) + bits[:8]])
    x, mask = bits.view(dtype), np.arange(bits.size) % 3 > 0
    read = lambda y: np.asarray(y).view(bits.dtype).tolist()
    expected, order = read(x[mask]), np.random.default_rng(0).permutation(bits.size)
    for disabled in ("", "all"):
        monkeypatch.setenv("JAXGPUOPS_DISABLE", disabled)
        for run in (jax.jit, lambda f: f):
            compact = run(lambda x: jaxgpuops.compact(x, mask, size=len(expected)))
            assert read(compact(x)) == expected
            assert read(compact(x[:, None])[:, 0]) == expected
            carried = run(lambda x: jaxgpuops.sort_key_val(np.argsort(order), x, x))(x)
            assert [read(y) for y in carried[1:]] == [read(x[order])] * 2


@pytest.mark.parametrize("n", [9, 1 << 19])
def test_the_inverse_of_no_elements(n):
    """With size 0 there is still an inverse to write."""
    x = np.arange(n, dtype=np.int32) * 7 % n
    inverse = jax.jit(lambda x: jaxgpuops.unique(x, size=0, return_inverse=True)[1])
    np.testing.assert_array_equal(inverse(x), x)  # a permutation of all numbers below n
    calls = jaxgpuops.explain(inverse, x, platform="cuda")
    assert not [call for call in calls if call.op == "unique" and call.kernel]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 2, 30])
def test_unique_is_jaxs(dtype, size):
    for shape in ((1,), (4, 9)):
        # Of -0 and +0, JAX may keep the other one.
        x = np.abs(data(8, shape, dtype)) if jnp.issubdtype(dtype, jnp.floating) else data(8, shape, dtype)
        x = np.where(x == 0, np.zeros((), x.dtype), x)
        if dtype == "bfloat16":  # NumPy cannot sort bfloat16 with NaNs
            x = np.nan_to_num(x.astype(np.float32), nan=3.0).astype(dtype)
        flags: Any = {"return_index": True, "return_inverse": True, "return_counts": True}
        fills = (None, 3)

        @jax.jit
        def results(x):
            calls = [functools.partial(jaxgpuops.unique, x, size=size, fill_value=fill) for fill in fills]
            return [(call(**flags), call()) for call in calls]

        for fill, (found, alone) in zip(fills, results(x), strict=True):
            different, index, inverse, counts = np.unique(x, **flags)
            count = min(size, len(different))
            np.testing.assert_array_equal(np.asarray(found[0])[:count], different[:count])
            rest = np.asarray(fill if fill is not None else different[0]).astype(dtype)
            np.testing.assert_array_equal(np.asarray(found[0])[count:], np.broadcast_to(rest, size - count))
            np.testing.assert_array_equal(np.asarray(found[1])[:count], index[:count])
            np.testing.assert_array_equal(found[2], inverse.reshape(shape))
            np.testing.assert_array_equal(found[3], np.pad(counts[:count], (0, size - count)))
            np.testing.assert_array_equal(alone, found[0])


@pytest.mark.parametrize("dtype", ["int8", "float8_e5m2", "uint16", "float16", "bfloat16"])
def test_unique_of_many_elements_of_few_bits(dtype):
    """These are counted, not sorted. Of -0 and +0, and of NaNs, the first is kept, and gradients reach the first of
    equal elements."""
    dtype = jnp.dtype(dtype)
    n = 1 << 19 if jnp.issubdtype(dtype, jnp.floating) else 20_000
    rng, unsigned = np.random.default_rng(0), np.dtype(f"uint{8 * dtype.itemsize}")
    every = rng.integers(0, np.iinfo(unsigned).max, n, unsigned, endpoint=True)
    if dtype == "float8_e5m2":  # without NaNs, whose payloads XLA does not keep on a CPU
        every &= unsigned.type(0xFB)
    few = rng.choice(np.append(every[:40], unsigned.type(0)), n)
    for x in (every.view(dtype), few.view(dtype), np.where(few == 0, unsigned.type(1), few).view(dtype)):
        keys = np.asarray(sort_keys(jnp.asarray(x)))
        order = np.argsort(keys, kind="stable")
        starts = np.flatnonzero(np.append(True, np.diff(keys[order]) != 0))
        wanted, counts = bits(x)[order[starts]], np.diff(np.append(starts, n))
        for size in (7, n + 3):
            found, found_counts = jaxgpuops.unique(x, size=size, return_counts=True)
            count, rest = min(size, len(starts)), max(0, size - len(starts))
            np.testing.assert_array_equal(bits(found), np.pad(wanted[:count], (0, rest), constant_values=wanted[0]))
            np.testing.assert_array_equal(found_counts, np.pad(counts[:count], (0, rest)))
    if dtype.itemsize == 2 and jnp.issubdtype(dtype, jnp.floating):
        gradient = jax.grad(lambda x: jaxgpuops.unique(x, size=5).astype(np.float32).sum())(jnp.asarray(x))
        assert sorted(np.flatnonzero(gradient).tolist()) == sorted(order[starts[:5]].tolist())


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a test of the CPU's kernel")
@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "uint8"])
@pytest.mark.parametrize("fill", [False, True])
def test_kernel_of_unique_is_its_fallback(dtype, fill):
    """The CPU's kernel, which no call takes."""
    rng = np.random.default_rng(0)
    for shape, size in (((3, 700), 5), ((2, 60), 80), ((1, 1), 3), ((2, 40), 0)):
        with jax.enable_x64(True):
            x = jnp.asarray(rng.integers(-9, 9, shape) if dtype != "uint8" else rng.integers(0, 20, shape), dtype)
            if jnp.issubdtype(x.dtype, jnp.floating):
                x = jnp.where(x == 3, jnp.nan, jnp.where(x == 4, -0.0, x)).astype(dtype)
            operands = [x, *[jnp.full((1, 1), 7, dtype)] * fill]
            own = ((size, x.dtype), (size, np.int32), (shape[1], np.int32), (size, np.int32))
            results = [jax.ShapeDtypeStruct((shape[0], n), d) for n, d in own]
            call = jax.ffi.ffi_call("jaxgpuops.unique", results)
            found = call(*operands, axis=np.int64(1), index=True, inverse=True)
            fallback = unique_p.fallback(*operands, axis=1, size=size, index=True, inverse=True)
            for y, wanted in zip(found, fallback, strict=True):
                np.testing.assert_array_equal(bits(y), bits(wanted))


def test_unique_of_nothing_and_under_transforms():
    assert jaxgpuops.unique(np.zeros((0, 3)), size=2, fill_value=7.0).tolist() == [7.0, 7.0]
    assert jaxgpuops.unique(np.zeros(0), size=0).shape == (0,)
    x = np.random.default_rng(9).integers(0, 4, (3, 10))
    found = jax.jit(jax.vmap(lambda x: jaxgpuops.unique(x, size=4, fill_value=-1)))(x)
    expected = [np.pad(u := np.unique(row), (0, 4 - len(u)), constant_values=-1) for row in x]
    np.testing.assert_array_equal(found, expected)
    gradient = jax.grad(lambda x: jaxgpuops.unique(x, size=2).sum())(jnp.array([3.0, 1.0, 3.0]))
    assert gradient.tolist() == [1.0, 1.0, 0.0]


def test_nonzero_of_many_numbers():
    x = np.random.default_rng(0).integers(0, 50, (3, 349_527)) // 49
    for size in (7, 40_000):
        found = jaxgpuops.nonzero(x.astype(np.int8), size=size, fill_value=-1)
        for own, wanted in zip(found, np.nonzero(x), strict=True):
            count = min(size, len(wanted))
            np.testing.assert_array_equal(own, np.pad(wanted[:count], (0, size - count), constant_values=-1))
    [row] = jaxgpuops.nonzero(x.ravel()[:5000], size=300_000, fill_value=-1)  # most are fills in any case
    assert row.tolist() == [*np.flatnonzero(x.ravel()[:5000]), *[-1] * (300_000 - (x.ravel()[:5000] > 0).sum())]
    [row] = jaxgpuops.nonzero(x.ravel().astype(np.float32), size=40_000, fill_value=-1)
    np.testing.assert_array_equal(row, np.pad(np.flatnonzero(x), (0, 40_000 - (x > 0).sum()), constant_values=-1))


def test_nothing_is_filled():
    assert jaxgpuops.nonzero(np.zeros(0), size=2, fill_value=-1)[0].tolist() == [-1, -1]
    assert jaxgpuops.take(np.zeros((0, 3)), np.array([1, 2])).tolist() == [[0.0] * 3] * 2


# ---- Expanded arrays -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "int32"])
def test_expand_and_where(dtype):
    rng = np.random.default_rng(10)
    draw = lambda shape: rng.integers(-3, 4, shape).astype(dtype)
    condition = rng.random((3, 1, 5)) < 0.5
    for own, shape in (((), (4,)), ((5,), (3, 4, 5)), ((4, 1), (3, 4, 5)), ((3, 4, 5), (3, 4, 5)), ((1, 0), (6, 0))):
        x = draw(own)
        np.testing.assert_array_equal(jaxgpuops.expand(x, shape), np.broadcast_to(x, shape))
        if dtype == "int32":
            continue
        ct = draw(shape)
        [found] = jax.vjp(lambda x, shape=shape: jaxgpuops.expand(x, shape), jnp.asarray(x))[1](jnp.asarray(ct))
        [wanted] = jax.vjp(lambda x, shape=shape: jnp.broadcast_to(x, shape), jnp.asarray(x))[1](jnp.asarray(ct))
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)  # small integers: exact in any order
    x, y = draw((4, 1)), draw(5)
    np.testing.assert_array_equal(jaxgpuops.where(condition, x, y), np.where(condition, x, y))
    if dtype == "int32":
        return
    ct = jnp.asarray(draw((3, 4, 5)))
    found = jax.vjp(lambda x, y: jaxgpuops.where(condition, x, y), jnp.asarray(x), jnp.asarray(y))[1](ct)
    wanted = jax.vjp(lambda x, y: jnp.where(condition, x, y), jnp.asarray(x), jnp.asarray(y))[1](ct)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["float8_e3m4", "float8_e5m2fnuz", "float4_e2m1fn"])
def test_gradients_of_expand_and_where_of_rare_floats(dtype):
    x, ct = jnp.ones(3).astype(dtype), jnp.ones((2, 3)).astype(dtype)
    assert jax.vjp(lambda x: jaxgpuops.expand(x, (2, 3)), x)[1](ct)[0].tolist() == [2, 2, 2]
    mask = np.array([[True, False, True], [True, True, False]])
    found = jax.vjp(lambda x, y: jaxgpuops.where(mask, x, y), x, ct)[1](ct)
    assert {y.dtype for y in found} == {x.dtype}
    assert found[0].tolist() == [2, 1, 1]
    np.testing.assert_array_equal(found[1].astype(np.float32), ~mask)


def test_expand_and_where_of_symbolic_shapes():
    (n,) = jax.export.symbolic_shape("n")

    def total(x):
        return (jaxgpuops.expand(x[:, None], (x.shape[0], 2, 3)) ** 2).sum() + jaxgpuops.where(x > 0, x, x[:1]).sum()

    step, x = jax.jit(jax.value_and_grad(total)), np.arange(-4.0, 8.0, dtype=np.float32).reshape(4, 3)
    of = jax.ShapeDtypeStruct((n, 3), np.float32)
    exported = jax.export.export(step, disabled_checks=jaxgpuops.export_checks())(of)
    for found, wanted in zip(exported.call(x), step(x), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jaxgpuops.nonzero(x, size=5, fill_value=-1),
        lambda x: jaxgpuops.compact(x, x > 0, size=3),
        lambda x: jaxgpuops.compact(x.T, x.T > 0, size=3),
        lambda x: jax.grad(lambda x: (jaxgpuops.compact(x, x > 0, size=3) ** 2).sum())(x),
        lambda x: jax.grad(lambda x: (jaxgpuops.unique(x, size=4, fill_value=1) ** 2).sum())(x),
        lambda x: jaxgpuops.quantile(x, 0.3, method="inverted_cdf", weights=x + 3),
        lambda x: jaxgpuops.unique(x, size=x.shape[0], return_inverse=True, return_counts=True),
    ],
)
def test_places_of_symbolic_shapes(fn):
    m, n = jax.export.symbolic_shape("m, n")
    fn = jax.jit(fn)
    exported = jax.export.export(fn, disabled_checks=jaxgpuops.export_checks())(
        jax.ShapeDtypeStruct((m, n), np.float32)
    )
    for shape in ((3, 4), (5, 1), (2, 7)):
        x = np.random.default_rng(0).integers(-2, 3, shape).astype(np.float32)
        jax.tree.map(np.testing.assert_array_equal, exported.call(x), fn(x))


# ---- Arguments -------------------------------------------------------------------------------------------------------

X = np.ones((2, 3), np.float32)
WRONG = {
    "searchsorted side": (lambda: jaxgpuops.searchsorted(X, X, "middle"), ValueError, "searchsorted: side must be "),
    "searchsorted shape": (lambda: jaxgpuops.searchsorted(X, X[:, :, None]), ValueError, "queries must have the shape"),
    "searchsorted dtype": (lambda: jaxgpuops.searchsorted(X + 0j, X), TypeError, "sorted has dtype complex64"),
    "searchsorted axis": (lambda: jaxgpuops.searchsorted(X, X, axis=2), ValueError, "axis must be between -2 and 1"),
    "quantile q": (lambda: jaxgpuops.quantile(X, 1.5), ValueError, "quantile: q must be between 0 and 1, got 1.5"),
    "quantile q rank": (lambda: jaxgpuops.quantile(X, [[0.5]]), ValueError, "q must be a scalar or have one dimension"),
    "quantile q dtype": (lambda: jaxgpuops.quantile(X, 0.5j), TypeError, "quantile: q must be floats, got complex"),
    "quantile method": (lambda: jaxgpuops.quantile(X, 0.5, method="mean"), ValueError, "quantile: method must be "),
    "quantile weights": (lambda: jaxgpuops.quantile(X, 0.5, weights=X), ValueError, "weights go with method"),
    "median length": (
        lambda: jax.eval_shape(
            functools.partial(jaxgpuops.median, axis=None), jax.ShapeDtypeStruct((1 << 16, 1 << 15), np.int8)
        ),
        ValueError,
        "median: indices are int32, so an axis must be shorter than",
    ),
    "median dtype": (lambda: jaxgpuops.median(X + 0j), TypeError, "median: x has dtype complex64"),
    "kth_value k": (lambda: jaxgpuops.kth_value(X, 3), ValueError, "kth_value: k must be between -3 and 2"),
    "partition kth": (lambda: jaxgpuops.partition(X, 1.0), TypeError, "partition: kth must be an integer"),
    "nonzero scalar": (lambda: jaxgpuops.nonzero(1, size=1), ValueError, "x must have at least one dimension"),
    "nonzero size": (lambda: jaxgpuops.nonzero(X, size=-1), ValueError, "nonzero: size must be between 0 and"),
    "nonzero fills": (lambda: jaxgpuops.nonzero(X, size=1, fill_value=(1,)), ValueError, "one entry for each of 2"),
    "compact fill": (
        lambda: jaxgpuops.compact(X, X > 0, size=1, fill_value=1j),
        TypeError,
        "compact: fill_value must not be complex where x has dtype float32",
    ),
    "unique fill": (lambda: jaxgpuops.unique(X, size=1, fill_value=1j), TypeError, "unique: fill_value must not be "),
    "nonzero keys": (
        lambda: jaxgpuops.nonzero(jax.random.split(jax.random.key(0)), size=1),
        TypeError,
        "nonzero: x must be an array of numbers or booleans, got one of dtype key",
    ),
    "compact mask": (lambda: jaxgpuops.compact(X, X, size=1), TypeError, "compact: mask has dtype float32"),
    "compact shape": (
        lambda: jaxgpuops.compact(X, X[0] > 0, size=1),
        ValueError,
        "mask must have the first dimensions",
    ),
    "unique nothing": (lambda: jaxgpuops.unique(X[:0], size=1), ValueError, "fill_value must be given"),
    "unique flag": (lambda: jaxgpuops.unique(X, size=1, return_index=1), TypeError, "unique: return_index must be"),
    "expand": (lambda: jaxgpuops.expand(X, (3, 3)), ValueError, r"expand: x of shape \(2, 3\) must broadcast"),
    "where": (lambda: jaxgpuops.where(X, X, X), TypeError, "where: condition has dtype float32"),
    "where shapes": (lambda: jaxgpuops.where(X > 0, X, X.T), ValueError, "must broadcast to one shape"),
}


@pytest.mark.parametrize("call, error, message", WRONG.values(), ids=WRONG)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_dtypes():
    assert {np.dtype(d) for d in DTYPES} <= _arguments.ORDERED_DTYPES


# ---- The kernel -----------------------------------------------------------------------------------------------------


def hard_rows(kind, shape, dtype, rng):
    """Rows whose keys share all digits, the first ones, or none; with NaNs of both signs, zeros and infinities."""
    whole = {
        "uniform": lambda: rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0],
        "few values": lambda: rng.integers(-1, 2, shape).astype(dtype),
        "one value": lambda: np.ones(shape, dtype),
        "near": lambda: (100 + rng.standard_normal(shape)).astype(dtype),
        "ascending": lambda: np.sort(rng.integers(-100, 100, shape), 1).astype(dtype),
    }
    return whole[kind]()


@pytest.mark.parametrize("kind", ["uniform", "few values", "one value", "near", "ascending"])
@pytest.mark.parametrize("dtype", ["int8", "uint16", "bfloat16", "float16", "float32", "int64", "float64"])
def test_elements_by_rank(dtype, kind):
    """Elements are those of the sort, bit for bit: along either axis, for ranks that rows share and for those of each
    row."""
    rng = np.random.default_rng(0)
    bits = lambda y: np.asarray(y).view(f"uint{8 * np.dtype(dtype).itemsize}")
    with jax.enable_x64("64" in dtype):
        for length in (513, 20_000, 30_001):
            x = jnp.asarray(hard_rows(kind, (3, length), np.dtype(dtype), rng))
            ranks = np.array([0, length // 2, length // 2 + 1, length // 2, length - 1, -5, length + 5], np.int32)
            places = ranks.clip(0, length - 1)
            values, order = (np.asarray(f(x)) for f in (jaxgpuops.sort, jaxgpuops.argsort))
            for own, indices in (
                select_p(x, ranks[None], axis=1),
                [y.T for y in select_p(x.T, ranks[:, None], axis=0)],
                jax.vmap(lambda x, r: select_p(x, r, axis=0))(x, jnp.stack([ranks] * 3)),
                jax.vmap(lambda r: select_p(x, r[None], axis=1), out_axes=0)(ranks[None])[0:2],
            ):
                own, indices = (y.reshape(3, -1) for y in (own, indices))
                np.testing.assert_array_equal(indices, order[:, places])
                np.testing.assert_array_equal(bits(own), bits(values[:, places]))


def test_traced_quantiles_of_16_bits_with_strict_promotion():
    x, q = jnp.arange(5, dtype=jnp.bfloat16), jnp.array([0.25, 1], jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        assert jax.jit(jaxgpuops.quantile)(x, q).tolist() == [1, 4]


def test_gradients_of_equal_ranks_add_up():
    x = jnp.asarray(np.random.default_rng(0).permutation(600), jnp.float32)
    gradient = jax.grad(lambda x: (select_p(x, np.array([5, 7, 5], np.int32), axis=0)[0] * jnp.array([1, 2, 4])).sum())(
        x
    )
    assert gradient[x == 5] == 5 and gradient[x == 7] == 2 and (gradient != 0).sum() == 2
    _, tangent = jax.jvp(lambda x: select_p(x, np.array([5, 5], np.int32), axis=0)[0], (x,), (10 * x,))
    assert tangent.tolist() == [50, 50]
    plain = jax.grad(lambda x: jnp.quantile(x, jnp.array([0.3, 0.31])).sum())(x)
    np.testing.assert_allclose(jax.grad(lambda x: jaxgpuops.quantile(x, [0.3, 0.31]).sum())(x), plain, rtol=1e-3)
