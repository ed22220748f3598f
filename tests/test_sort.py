"""Values of `jaxgpuops.sort`, `argsort`, `sort_key_val` and `jaxgpuops.lax.sort`, against NumPy and jax.lax."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference import x64

import jaxgpuops
from jaxgpuops.lax._sort import lexsort_p, sort_p, sort_segments_p
from jaxgpuops.lax.order import sort_keys

plan_sort = jaxgpuops._native.modules["cpu"].plan_sort


def order_of(x, axis, descending):
    """NaNs are equal and last, -0 equals +0."""
    keys = reference.keys(x)
    if reference.is_float(x.dtype):
        keys = np.where(reference.bits(x) << 1 == 0, reference.keys(np.zeros((), x.dtype)), keys)
        keys = np.where(reference.is_nan(x), ~np.uint64(0), keys)
    return np.argsort(~keys if descending else keys, axis=axis, kind="stable").astype(np.int32)


def check(x, axis=-1, descending=False):
    order = order_of(x, axis, descending)
    expected = np.take_along_axis(reference.bits(x), order, axis)
    places = np.arange(x.size, dtype=np.int32).reshape(x.shape)
    flags = {"axis": axis, "descending": descending}

    @jax.jit
    def results(x, places):
        return jaxgpuops.argsort(x, **flags), jaxgpuops.sort(x, **flags), jaxgpuops.sort_key_val(x, places, **flags)

    with x64(x.dtype):
        indices, alone, (keys, values) = results(x, places)
    assert indices.dtype == np.int32
    np.testing.assert_array_equal(indices, order)
    for out in (alone, keys):
        np.testing.assert_array_equal(reference.bits(out), expected)
    np.testing.assert_array_equal(values, np.take_along_axis(places, order, axis))


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_any_array(data):
    shape = data.draw(st.one_of(reference.SHAPES, st.sampled_from([(0,), (0, 7)])))
    dtype = data.draw(st.sampled_from(reference.DTYPES))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    if data.draw(st.booleans()):
        x = reference.random_bits(rng, shape, dtype)
    else:
        x = rng.choice(reference.special_values(dtype), shape)
    check(x, data.draw(st.integers(-len(shape), len(shape) - 1)), data.draw(st.booleans()))


@pytest.mark.parametrize("dtype", ["float32", "int16", "float64"])
@pytest.mark.parametrize("shape, axis", [((300_001,), 0), ((3, 200_000), 1), ((2, 140_000, 3), 1)])
def test_long_rows(shape, axis, dtype):
    rng = np.random.default_rng(0)
    for x in (reference.random_bits(rng, shape, dtype), rng.integers(-3, 3, shape).astype(dtype)):
        for descending in (False, True):
            check(x, axis, descending)


def segments_of(offsets, n):
    """Returns where each segment begins and ends. Offsets that are out of range or out of order are moved."""
    ends = np.maximum.accumulate(np.clip(offsets, 0, n))
    return list(zip(ends[:-1], ends[1:], strict=True))


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_segments(dtype):
    rng = np.random.default_rng(0)
    n = 301
    every_length = np.cumsum([0, *range(24)])  # 276
    many = np.sort(rng.integers(0, n, 300))  # more segments than 8 bits can number
    hostile = [np.array([0, 301]), np.array([7]), np.array([-9, 40, 30, 35, 50, 9999]), np.array([0, 0, 0, 5, 5])]
    cases = list(itertools.product((every_length, many, *hostile), (False, True)))

    @jax.jit
    def results(x, offsets):
        given = [{"descending": descending, "offsets": of} for of, (_, descending) in zip(offsets, cases, strict=True)]
        return [(jaxgpuops.argsort(x, **each), jaxgpuops.sort(x, **each)) for each in given]

    with x64(dtype):
        for x in (reference.random_bits(rng, (n,), dtype), rng.choice(reference.special_values(dtype), n)):
            all_results = results(x, [offsets.astype(np.int32) for offsets, _ in cases])
            for (offsets, descending), (indices, out) in zip(cases, all_results, strict=True):
                order = np.arange(n)
                for begin, end in segments_of(offsets, n):
                    order[begin:end] = begin + order_of(x[begin:end], 0, descending)
                np.testing.assert_array_equal(indices, order)
                np.testing.assert_array_equal(reference.bits(out), reference.bits(x)[order])


def test_segments_of_columns_and_batches():
    rng = np.random.default_rng(0)
    x, payload = rng.integers(-9, 9, (3, 40, 5)), rng.standard_normal((3, 40, 5)).astype(np.float32)
    offsets = np.array([[0, 10, 40], [5, 5, 30], [0, 1, 39]], np.int32)
    each = jax.jit(jax.vmap(lambda x, y, offsets: jaxgpuops.sort_key_val(x, y, axis=0, offsets=offsets)))
    keys, values = each(x, payload, offsets)
    for i, own in enumerate(offsets):
        order = np.broadcast_to(np.arange(40)[:, None], (40, 5)).copy()
        for begin, end in segments_of(own, 40):
            order[begin:end] = begin + np.argsort(x[i, begin:end], 0, kind="stable")
        np.testing.assert_array_equal(keys[i], np.take_along_axis(x[i], order, 0))
        np.testing.assert_array_equal(values[i], np.take_along_axis(payload[i], order, 0))


@pytest.mark.parametrize("rows, n, offsets", [
    (1, 300_001, [0, 140_000, 140_003, 300_001]),  # threads sort a long segment together
    (1, 40_001, np.arange(3, 40_001, 3)),
    (9, 3001, [5, 20, 20, 36, 37, 300, 2900]),
])  # fmt: skip
def test_long_and_short_segments(rows, n, offsets):
    x = np.random.default_rng(0).integers(-99, 99, (rows, n)).astype(np.int16)
    sort = jax.jit(lambda x, offsets, **flags: (jaxgpuops.sort(x, offsets=offsets, **flags),))
    order = np.broadcast_to(np.arange(n), x.shape).copy()
    for begin, end in segments_of(np.asarray(offsets), n):
        order[:, begin:end] = begin + np.argsort(x[:, begin:end], 1, kind="stable")
    np.testing.assert_array_equal(sort(x, np.asarray(offsets))[0], np.take_along_axis(x, order, 1))
    np.testing.assert_array_equal(jax.jit(jaxgpuops.argsort)(x, offsets=np.asarray(offsets)), order)


def test_derivatives_of_segments():
    x, offsets = np.array([3.0, 1.0, 2.0, 5.0, 4.0], np.float32), np.array([0, 3, 5])
    weighed = lambda x: (jaxgpuops.sort(x, offsets=offsets) * jnp.arange(1.0, 6.0)).sum()
    assert jax.grad(weighed)(x).tolist() == [3, 1, 2, 5, 4]
    assert jax.jit(jax.hessian(lambda x: weighed(x * x)))(x).diagonal().tolist() == [6, 2, 4, 10, 8]


def test_complex_segments():
    x = np.array([2 + 1j, 2 - 1j, 1, 3, 0], np.complex64)
    assert jaxgpuops.argsort(x, offsets=[0, 3, 5]).tolist() == [2, 1, 0, 4, 3]


def test_empty_axis_of_segments():
    assert jaxgpuops.sort(np.zeros((2, 0), np.float32), offsets=[0, 0, 3]).shape == (2, 0)


@pytest.mark.parametrize("offsets", [np.int32(3), np.zeros((2, 2), np.int32), np.zeros(0, np.int32)])
def test_offsets_of_other_shapes(offsets):
    for fn in (jaxgpuops.sort, jaxgpuops.argsort, lambda x, offsets: jaxgpuops.topk(x, 1, offsets=offsets)):
        with pytest.raises(ValueError, match=r"offsets must have shape \(segments \+ 1,\), got \("):
            fn(np.zeros(4, np.float32), offsets=offsets)
    with pytest.raises(TypeError, match="jaxgpuops.sort: offsets has dtype float32"):
        jaxgpuops.sort(np.zeros(4, np.float32), offsets=np.zeros(2, np.float32))


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_fallback_is_the_kernel(dtype):
    rng = np.random.default_rng(1)
    x = np.concatenate(
        [reference.random_bits(rng, (50, 3), dtype), rng.choice(reference.special_values(dtype), (50, 3))]
    )
    with x64(dtype):
        for descending in (False, True):
            params = {"axis": 0, "descending": descending, "values": True, "indices": True}
            values, indices = jax.jit(functools.partial(sort_p.fallback, **params, kth=-1))(x)
            order = order_of(x, 0, descending)
            np.testing.assert_array_equal(indices, order)
            np.testing.assert_array_equal(reference.bits(values), np.take_along_axis(reference.bits(x), order, 0))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("count", [300, 70_000])  # numbers of segments of 16 and of 32 bits
def test_fallback_of_segments_is_the_kernel(count, dtype):
    rng, n = np.random.default_rng(1), 9001
    x = rng.choice(reference.special_values(jnp.dtype(dtype)), (2, n))
    offsets = np.sort(rng.integers(9, n - 9, (1, count))).astype(np.int32)
    for descending in (False, True):
        params = {"axis": 1, "descending": descending, "values": True, "indices": False}
        [plain] = jax.jit(functools.partial(sort_segments_p.fallback, **params))(x, offsets)
        [ours] = jax.jit(functools.partial(sort_segments_p, **params))(x, offsets)
        np.testing.assert_array_equal(reference.bits(plain), reference.bits(ours))


@pytest.mark.parametrize("count", [1, 2, 20])
def test_fallback_of_offsets_in_no_order_is_the_kernel(count):
    """Places are compared with so few offsets, whichever of them are out of order or out of range."""
    rng, n = np.random.default_rng(2), 5001
    x = rng.integers(0, 99, (3, n)).astype(np.float32)
    for seed in range(3):
        offsets = np.random.default_rng(seed).integers(-n // 4, n + n // 4, (1, count)).astype(np.int32)
        params = {"axis": 1, "descending": False, "values": False, "indices": True}
        [plain] = jax.jit(functools.partial(sort_segments_p.fallback, **params))(x, offsets)
        [ours] = jax.jit(functools.partial(sort_segments_p, **params))(x, offsets)
        np.testing.assert_array_equal(plain, ours)


def test_places_are_not_gathered():
    """An iota that is sorted by keys is their permutation."""
    lexsort = lambda x, y: jaxgpuops.lax.sort((x, y, jax.lax.broadcasted_iota(np.int32, x.shape, 1)), num_keys=2)[2]
    x = np.random.default_rng(0).integers(0, 4, (2, 3, 50)).astype(np.int32)
    text = jax.jit(lexsort).lower(*x).as_text()
    gathered = [line for line in text.splitlines() if "take_along_axis" in line]
    assert len(gathered) == 2  # the keys, which nobody uses
    np.testing.assert_array_equal(jax.jit(lexsort)(*x), np.lexsort((x[1], x[0])))
    other = lambda x: jaxgpuops.lax.sort((x, x, jax.lax.broadcasted_iota(np.int32, x.shape, 0)), num_keys=2)[2]
    places = np.broadcast_to(np.arange(3, dtype=np.int32)[:, None], (3, 50))
    np.testing.assert_array_equal(jax.jit(other)(x[0]), places)


def assert_same_bits(a, b):
    assert (a.dtype, a.shape, np.asarray(a).tobytes()) == (b.dtype, b.shape, np.asarray(b).tobytes())


def normal(dtype, shape=(40, 30)):
    """Ties, signed zeros and NaNs, but no subnormal numbers: XLA's CPU backend takes these for zeros."""
    rng = np.random.default_rng(2)
    if np.dtype(dtype).kind == "c":
        parts = [normal("float32", (*shape, 1)), normal("float32", (*shape, 1))[::-1]]
        return np.concatenate(parts, -1).view(dtype)[..., 0]
    values = [0, 1, 2] if np.dtype(dtype).kind in "iub" else [-0.0, 0.0, 1.0, -1.0, 2.5, np.nan, np.inf, -np.inf]
    return rng.choice(np.array(values), shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "complex64"])
@pytest.mark.parametrize("axis", [0, 1])
def test_lax_sort_is_that_of_jax(dtype, axis):
    x = normal(jnp.dtype(dtype))
    payload = np.arange(x.size).reshape(x.shape)
    for operand in (x, (x, payload), [x, payload, payload.astype(np.float32), normal("complex64")]):
        ours = jaxgpuops.lax.sort(operand, dimension=axis)
        with jax.default_device(jax.devices("cpu")[0]):  # on a GPU it changes the bits of bfloat16's NaNs
            theirs = jax.lax.sort(operand, dimension=axis)
        assert type(ours) is type(theirs)
        jax.tree.map(assert_same_bits, ours, theirs)


@pytest.mark.parametrize("num_keys", [1, 2, 3, 4])
def test_several_keys(num_keys):
    keys = [normal(dtype) for dtype in ("int32", "bool", "complex64", "float32")]
    operands = [*keys, np.arange(keys[0].size).reshape(keys[0].shape)]
    ours = jaxgpuops.lax.sort(operands, 0, num_keys=num_keys)
    jax.tree.map(assert_same_bits, tuple(ours), jax.lax.sort(operands, 0, num_keys=num_keys))


def test_gradients_follow_the_elements():
    x = np.random.default_rng(3).permutation(60).reshape(4, 5, 3).astype(np.float32)
    weights, factors = np.arange(60.0, dtype=np.float32).reshape(x.shape), x[::-1] % 7
    for axis in range(3):
        ours = lambda x, y: sum((weights * a**2).sum() for a in jaxgpuops.sort_key_val(x, y, axis=axis))
        lax = lambda x, y: sum((weights * a**2).sum() for a in jaxgpuops.lax.sort((x, y), axis))
        theirs = lambda x, y: sum((weights * a**2).sum() for a in jax.lax.sort((x, y), axis))
        expected = jax.grad(theirs, (0, 1))(x, factors)
        for fn in (ours, lax):
            jax.tree.map(np.testing.assert_array_equal, jax.grad(fn, (0, 1))(x, factors), expected)
        tangents = (factors, weights)
        assert jax.jvp(lax, (x, factors), tangents)[1] == jax.jvp(theirs, (x, factors), tangents)[1]


def test_gradient_does_not_sort_again():
    text = str(jax.make_jaxpr(jax.grad(lambda x: jaxgpuops.sort(x)[0]))(np.ones(5, np.float32)))
    assert text.count("jaxgpuops.sort[") == 1 and "scatter" not in text


def test_values_of_any_dtype():
    keys = jnp.array([[3.0, 1.0, 2.0]])
    for dtype in ("int4", "uint4", "float4_e2m1fn", "float8_e4m3fnuz", "bool", "complex64"):
        values = jnp.array([[1, 2, 0]]).astype(dtype)
        for moved in (jaxgpuops.sort_key_val(keys, values)[1], jaxgpuops.lax.sort((keys, values))[1]):
            assert moved.dtype == dtype and moved.tolist() == values[:, jnp.array([1, 2, 0])].tolist()


def test_long_rows_carry_values():
    """The sort of long rows moves 32-bit values with the keys, and shorter ones widened."""
    rng = np.random.default_rng(4)
    keys = rng.integers(-9, 9, (2, 9001)).astype(np.float32)
    order = np.argsort(keys, 1, kind="stable")
    for dtype in ("float32", "uint32", "bfloat16", "int8", "bool", "float8_e5m2", "int4", "complex64"):
        values = jnp.asarray(rng.integers(0, 2, keys.shape) * 3).astype(dtype)
        assert_same_bits(jaxgpuops.sort_key_val(keys, values)[1], np.take_along_axis(np.asarray(values), order, 1))


@pytest.mark.parametrize("dtypes", [("float32", "int32"), ("bool", "bfloat16"), ("int16", "float32")])
def test_two_keys_of_long_rows(dtypes):
    operands = [normal(jnp.dtype(dtype), (2, 9001)) for dtype in dtypes]
    ours = jaxgpuops.lax.sort(operands, 1, num_keys=2)
    with jax.default_device(jax.devices("cpu")[0]):  # on a GPU it changes the bits of bfloat16's NaNs
        jax.tree.map(assert_same_bits, tuple(ours), jax.lax.sort(operands, 1, num_keys=2))


@pytest.mark.parametrize(
    "shape, axis", [((3, 40), 1), ((2, 9001), 1), ((70, 3, 5), 0), ((2, 300, 7), 1), ((1, 140_000), 1)]
)
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("int32", "float32"), ("uint32", "int32")])
def test_two_keys_at_once(dtypes, shape, axis):
    rng = np.random.default_rng(8)
    few = [(rng.integers(-4, 4, shape) / 2).astype(dtype) for dtype in dtypes]
    few = [np.where(x == 1.5, np.nan, np.where(x == -0.5, -0.0, x)) if x.dtype.kind == "f" else x for x in few]
    for keys in (few, [few[0], rng.integers(0, 1 << 32, shape, np.uint32).view(dtypes[1])]):
        for descending in (False, True):
            params = {"axis": axis, "descending": descending}
            [plain] = jax.jit(functools.partial(lexsort_p.fallback, **params))(*keys)
            [ours] = jax.jit(functools.partial(lexsort_p, **params))(*keys)
            bits = [np.asarray(sort_keys(jnp.asarray(key))).astype(np.int64) for key in reversed(keys)]
            wanted = np.lexsort([-x if descending else x for x in bits], axis)
            np.testing.assert_array_equal(ours, wanted)
            np.testing.assert_array_equal(plain, wanted)


def test_large_offsets_do_not_wrap():
    x = np.arange(6.0)[::-1]
    for dtype in (np.int64, np.uint64):
        offsets = np.array([2, (1 << 32) + 3], dtype)
        for wide in (False, True):
            with jax.enable_x64(wide):
                assert jaxgpuops.sort(x, offsets=offsets).tolist() == [5, 4, 0, 1, 2, 3]
                assert jaxgpuops.topk(x, 2, offsets=offsets).indices.tolist() == [[2, 3]]
                assert jaxgpuops.topk(x, 2, lengths=offsets[1]).indices.tolist() == [0, 1]


def test_arguments():
    x = np.ones((2, 3), np.float32)
    with pytest.raises(TypeError, match=r"jaxgpuops.sort: axis must be an integer known at trace time, got 1.0"):
        jaxgpuops.sort(x, axis=1.0)
    with pytest.raises(ValueError, match=r"jaxgpuops.argsort: axis must be between -2 and 1 for x of shape"):
        jaxgpuops.argsort(x, axis=2)
    with pytest.raises(
        ValueError, match=r"jaxgpuops.lax.sort: dimension must be between -2 and 1 for operand of shape"
    ):
        jaxgpuops.lax.sort(x, dimension=100)
    with pytest.raises(ValueError, match=r"jaxgpuops.sort: x must have at least one dimension"):
        jaxgpuops.sort(np.float32(1))
    with pytest.raises(TypeError, match=r"jaxgpuops.sort: x has dtype float8_e4m3b11fnuz; allowed are bfloat16, "):
        jaxgpuops.sort(x.astype(jnp.float8_e4m3b11fnuz))
    with pytest.raises(ValueError, match=r"jaxgpuops.sort_key_val: values\[0\] must have the shape of keys, \(2, 3\)"):
        jaxgpuops.sort_key_val(x, x.T)
    with pytest.raises(ValueError, match=r"jaxgpuops.lax.sort: num_keys must be between 1 and 1, got 2"):
        jaxgpuops.lax.sort(x, num_keys=2)
    with pytest.raises(
        TypeError, match=r"sort_key_val: values\[0\] must be an array of numbers .* got one of dtype key"
    ):
        jaxgpuops.sort_key_val(x, jax.random.split(jax.random.key(0), (2, 3)))
    with pytest.raises(TypeError, match=r"jaxgpuops.lax.sort: operand must have at least one array, got none"):
        jaxgpuops.lax.sort([])


# ---- The plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute_capability", [75, 80, 86, 90, 120])
def test_plan_fits_every_gpu(compute_capability):
    shared = {75: 64, 80: 163, 86: 99, 90: 227, 120: 99}[compute_capability] << 10
    for length in (1, 7, 1024, 1025, 4096, 4097, 16_384, 16_385, 1 << 20, (1 << 31) - 1):
        for outer, inner, bits in ((1, 1, 8), (1000, 1, 32), (3, 5, 16), (1, 1000, 64)):
            plan = plan_sort(outer, length, inner, bits, True, True, compute_capability)
            assert plan["shared_bytes"] + 1024 <= shared and plan["threads"] <= 1024
            assert plan["turns"] <= (inner > 1 and length > 1024)


@pytest.mark.parametrize(
    "outer, length, inner, bits, in_place",
    [
        (1, 16_384, 4, 32, True), (1, 16_384, 16, 16, True), (1, 9000, 17, 16, False), (1, 9000, 3, 32, True),
        (2, 33_001, 5, 32, True), (2, 70_001, 9, 32, False), (1, 16_384, 4, 8, False), (1, 60_000, 4, 64, True),
    ],
)  # fmt: skip
def test_few_columns_are_swept_in_place(outer, length, inner, bits, in_place):
    plan = plan_sort(outer, length, inner, bits, True, True, 90)
    assert plan["algorithm"] == "sweep" and plan["turns"] == (not in_place)
    for rows in range(1, outer):  # a part of the batch
        part = plan_sort(rows, length, inner, bits, True, True, 90, workspace_bytes=plan["workspace_bytes"])
        assert part["algorithm"] == "sweep" and part["workspace_bytes"] <= plan["workspace_bytes"]


def test_plan_of_a_part_of_a_batch_needs_no_more():
    """The workspace is given for one outer index, since a sharded call has fewer outer indices."""
    for length, inner, bits in itertools.product((2000, 9000, 70_000), (1, 3), (8, 16, 32, 64)):
        for outer, part in ((5, 1), (64, 1), (64, 5), (1000, 64)):
            bytes_of = lambda n, given=-1, rest=(length, inner, bits, True, True, 90): plan_sort(
                n, *rest, workspace_bytes=given
            )["workspace_bytes"]
            assert bytes_of(part, bytes_of(outer)) <= bytes_of(outer)


def test_few_rows_are_spread():
    """Blocks that share a row need a workspace; a call that has none, since it is a part of many rows, does without."""
    for length, bits, algorithm in (
        (4097, 32, "sweep"),
        (8193, 32, "sweep"),
        (16_384, 16, "sweep"),
        (4097, 64, "sweep"),
        (7000, 64, "sweep"),
    ):
        few, many = (plan_sort(outer, length, 1, bits, True, True, 90) for outer in (5, 500))
        assert (few["algorithm"], many["algorithm"]) == (algorithm, "block")
        assert few["workspace_bytes"] > many["workspace_bytes"] == 0
        assert plan_sort(5, length, 1, bits, True, True, 90, workspace_bytes=0) == {**many, "blocks": 5}
    for outer, length in ((5, 4096), (33, 8000), (70, 8192)):
        assert plan_sort(outer, length, 1, 32, True, True, 90)["algorithm"] == "block"
    items = {(1, 67_584): 1, (1, 67_585): 2, (18, 6208): 2, (1, 270_336): 4, (1, 270_337): 0}
    for (outer, length), expected in items.items():
        assert plan_sort(outer, length, 1, 32, True, True, 90)["items"] == expected


@pytest.mark.parametrize("compute_capability", [75, 80, 86, 90, 120])
def test_plan_of_two_keys(compute_capability):
    plan = lambda *rows, **given: jaxgpuops._native.modules["cpu"].plan_lexsort(*rows, compute_capability, **given)
    for rows in ((1, 1 << 24, 1), (64, 128_256, 1), (400, 16_385, 1)):
        whole = plan(*rows)
        assert whole["algorithm"] == "keys"
        assert 20 * rows[1] < whole["workspace_bytes"] < 25 * rows[1]
        for outer in (0, 1, 5, 64):  # a part of the batch has the kernels of the whole
            part = plan(outer, *rows[1:], workspace_bytes=whole["workspace_bytes"])
            assert part["algorithm"] == "keys" and part["workspace_bytes"] <= whole["workspace_bytes"]
    for rows in ((1, 1 << 24, 1), (64, 128_256, 1)):  # one key of 64 bits
        order = lambda outer, rows=rows, **given: plan_sort(
            outer, *rows[1:], 64, False, True, compute_capability, **given
        )
        assert order(rows[0])["algorithm"] == "keys"
        given = order(rows[0])["workspace_bytes"]
        assert all(order(n, workspace_bytes=given)["workspace_bytes"] <= given for n in (1, 2, 5, 64))
    assert plan_sort(1, 1 << 20, 1, 64, True, True, compute_capability)["algorithm"] == "sweep"
    for rows in (
        (1, (1 << 24) + 1, 1),
        (1, 1 << 20, 2),
        (1, 9000, 1),
        (10_000, 3000, 1),
        (1000, 16_385, 1),
        (1, 0, 1),
        (0, 70_000, 1),
    ):
        assert plan(*rows)["algorithm"] == "none"


def test_only_a_sweep_carries_numbers():
    carrying = lambda *rows, given=-1: plan_sort(*rows, 32, True, True, 90, carries=True, workspace_bytes=given)
    for rows in ((1, 8193, 1), (5, 40_000, 1), (1000, 16_385, 1)):
        assert carrying(*rows) == plan_sort(*rows, 32, True, True, 90)
    for rows in ((1, 4096, 1), (60, 8192, 1), (1000, 16_384, 1), (1, 70_000, 2), (9, 7, 1)):
        assert carrying(*rows)["algorithm"] == "none"
    # a part of a batch has the kernel of the whole
    for part in (1, 5, 64):
        whole = carrying(1000, 16_385, 1)["workspace_bytes"]
        plan = carrying(part, 16_385, 1, given=whole)
        assert plan["algorithm"] == "sweep" and plan["workspace_bytes"] <= whole


@pytest.mark.parametrize(
    "outer, length, inner, bits, values, indices",
    [
        (4096, 1024, 1, 32, "network", "network"), (64, 1024, 256, 32, "network", "network"),
        (65_536, 193, 1, 16, "network", "network"), (65_536, 192, 1, 32, "network", "team"),
        (65_536, 65, 1, 32, "network", "team"), (65_536, 64, 1, 32, "team", "team"),
        (9, 33, 65_536, 32, "network", "team"), (9, 32, 65_536, 32, "team", "team"),
        (395, 1024, 1, 32, "team", "team"), (396, 1024, 1, 32, "network", "team"),
        (1583, 1024, 1, 32, "network", "team"), (1584, 1024, 1, 32, "network", "network"),
        (6335, 256, 1, 32, "network", "team"), (6336, 256, 1, 32, "network", "network"),
        (4096, 1024, 6, 32, "network", "network"), (4096, 1024, 5, 32, "network", "team"),
        (4096, 1024, 4, 32, "network", "team"), (4096, 1024, 3, 32, "team", "team"),
        (4096, 1024, 1, 64, "team", "team"), (4096, 1024, 1, 8, "network", "team"), (1, 1025, 1, 32, "network", "block"),
        (1, 4096, 5, 32, "network", "block"), (60, 4097, 1, 32, "block", "block"), (9, 1025, 1, 16, "block", "block"),
        (395, 1024, 1, 8, "team", "team"), (396, 1024, 1, 8, "network", "team"), (64, 200, 99, 8, "network", "team"),
        (527, 2048, 1, 16, "block", "block"), (528, 2048, 1, 16, "network", "block"),
        (528, 2049, 1, 16, "block", "block"), (9, 1025, 60, 16, "network", "block"), (999, 1025, 1, 8, "block", "block"),
    ],
)  # fmt: skip
def test_networks_sort_short_rows(outer, length, inner, bits, values, indices):
    """With indices, networks pay only for many rows."""
    found = [
        plan_sort(outer, length, inner, bits, *wanted, 90) for wanted in ((True, False), (False, True), (True, True))
    ]
    assert [plan["algorithm"] for plan in found] == [values, indices, indices]
    assert all(plan["turns"] == (inner > 1 and length > 1024) for plan in found)
    assert all(plan["workspace_bytes"] == 0 for plan in found if not plan["turns"])


@pytest.mark.parametrize("length, inner", [(256, 1), (1000, 1), (1500, 1), (200, 512)])
def test_a_network_sorts_two_rows_of_narrow_elements(length, inner):
    half, whole = (plan_sort(8000, length, inner, bits, True, False, 90)["blocks"] for bits in (16, 32))
    assert 2 * half == whole


def test_threads_of_a_block_have_fewer_elements_in_short_and_few_rows():
    threads = lambda *shape: plan_sort(*shape, 1, 32, False, True, 90)["threads"]
    assert [threads(rows, 4096) for rows in (132, 133)] == [512, 256]
    assert [threads(rows, 4097) for rows in (132, 133)] == [512, 512]
    shared = [plan_sort(200, length, 1, 16, False, True, 90)["shared_bytes"] for length in (1536, 1537, 2048, 2049)]
    assert shared[0] < shared[1] == shared[2] < shared[3]


@pytest.mark.parametrize(
    "outer, length, inner, bits, algorithm",
    [
        (1, 1025, 1, 64, "merge"), (60, 1025, 1, 64, "merge"), (70, 1025, 1, 64, "block"), (4, 1 << 15, 1, 64, "sweep"),
        (4, (1 << 15) + 1, 1, 64, "sweep"), (32, 16_384, 1, 64, "merge"), (33, 16_384, 1, 64, "sweep"),
        (60, 8192, 1, 64, "merge"), (100, 8192, 1, 64, "block"), (60, 6656, 1, 64, "block"), (1, 4096, 2, 64, "merge"),
        (1, 2000, 16, 64, "merge"), (1, 2000, 17, 64, "block"), (1, 16_384, 1, 32, "sweep"),
    ],
)  # fmt: skip
def test_few_elements_are_merged(outer, length, inner, bits, algorithm):
    plan = plan_sort(outer, length, inner, bits, True, True, 90)
    assert plan["algorithm"] == algorithm
    assert plan["turns"] == (inner > 1 and algorithm != "merge")


@pytest.mark.parametrize(
    "outer, length, inner, bits, items",
    [
        (1, 9000, 1, 32, 1), (1, 132 * 512, 1, 32, 1), (1, 132 * 512 + 1, 1, 32, 2), (1, 132 * 1024, 1, 32, 2),
        (1, 132 * 1024 + 1, 1, 32, 4), (1, 132 * 2048 + 1, 1, 32, 0), (1, 9000, 1, 16, 0), (1, 132 * 1024, 1, 64, 2),
        (1, 132 * 2048, 1, 64, 4), (1, 132 * 2048 + 1, 1, 64, 0), (9, 19_530, 1, 64, 4), (1, 16_384, 3, 64, 2), (2, 9001, 5, 32, 2),
    ],
)  # fmt: skip
def test_few_elements_take_one_launch(outer, length, inner, bits, items):
    plan = plan_sort(outer, length, inner, bits, True, True, 90)
    assert (plan["algorithm"], plan["items"], plan["turns"]) == ("sweep", items, False)
    given = plan["workspace_bytes"]
    again = plan_sort(outer, length, inner, bits, True, True, 90, workspace_bytes=given)
    assert again["items"] == items and again["workspace_bytes"] <= given
    for rows in range(1, outer):  # a part of the batch
        part = plan_sort(rows, length, inner, bits, True, True, 90, workspace_bytes=given)
        assert part["workspace_bytes"] <= given


def test_few_short_rows_are_spread_over_more_blocks():
    assert plan_sort(1146, 5, 1, 64, True, True, 90)["blocks"] == -(-1146 // 16)
    assert plan_sort(10**6, 8, 1, 32, True, True, 90)["blocks"] == -(-(10**6) // 256)


@pytest.mark.parametrize(
    "outer, length, inner, bits, values, indices",
    [
        (1, 16_385, 1, 32, True, True), (1, 132 * 3072, 1, 32, True, True), (1, 132 * 3072 + 1, 1, 32, True, True),
        (1, 132 * 17_664, 1, 32, True, True), (1, 132 * 17_664 + 1, 1, 32, False, False),
        (2, 33_001, 5, 32, True, True), (66, 32_768, 1, 32, True, True), (67, 32_768, 1, 32, False, False), (3, 300_001, 1, 16, True, True),
        (1, 1 << 21, 1, 16, True, True), (1, 3_000_000, 1, 16, True, False), (1, 1 << 22, 1, 16, False, False),
        (1, 32 * 6144, 1, 8, True, True), (1, 33 * 6144, 1, 8, False, False), (3, 3 << 15, 1, 64, True, True),
        (1, 500_000, 1, 64, False, False),
    ],
)  # fmt: skip
def test_tiles_exchange_counts_if_all_run_at_once(outer, length, inner, bits, values, indices):
    """Otherwise a kernel counts before the passes; it also finds passes that can be skipped."""
    found = [plan_sort(outer, length, inner, bits, wanted, not wanted, 90) for wanted in (True, False)]
    assert [plan["algorithm"] for plan in found] == ["sweep", "sweep"]
    assert [plan["exchanges"] for plan in found] == [values, indices]


@pytest.mark.parametrize(
    "outer, length, inner, bits, algorithm",
    [
        (37, 15, 1, 64, "compare"), (1, 1024, 1, 32, "compare"), (3, 1024, 1, 32, "team"), (1, 1024, 1, 64, "compare"),
        (8, 11, 7, 8, "compare"), (1024, 10, 1, 32, "compare"), (1025, 10, 1, 32, "team"), (3, 800, 1, 64, "team"),
        (534, 128, 1, 32, "team"), (2, 1025, 1, 16, "block"), (2, 8, 1, 32, "short"), (2, 9, 1, 32, "compare"),
    ],
)  # fmt: skip
def test_few_elements_are_compared(outer, length, inner, bits, algorithm):
    plan = plan_sort(outer, length, inner, bits, True, True, 90)
    assert plan["algorithm"] == algorithm
    assert plan["workspace_bytes"] == 0 and not plan["turns"]
