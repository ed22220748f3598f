"""Sort on a GPU: see gpu.py."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from gpu import needs_memory, plan, run_in_command_buffers, same_bits, spread

import jaxgpuops
from jaxgpuops.lax._select import quantile_p, select_p
from jaxgpuops.lax._sort import lexsort_p, sort_p, sort_segments_p
from jaxgpuops.lax.order import sort_keys
from jaxgpuops.ops import select as ops

# Every kernel and form of it: (shape, axis), its name in the plan, and whether columns are transposed to rows.
REGIMES = {
    "one element": ((1000, 1), 1, "short", False),
    "two elements": ((3001, 2), 1, "short", False),
    "a thread": ((3000, 7), 1, "short", False),
    "eight elements": ((300, 8), 1, "short", False),
    "columns in threads": ((5, 6, 67), 1, "short", False),
    "columns in tiles": ((500, 5, 3), 1, "short", False),
    "whole tiles of columns": ((320, 8, 16), 1, "short", False),
    "columns far from many": ((500, 8, 17), 1, "team", False),
    "parts of a warp": ((3000, 61), 1, "team", False),
    "a block": ((300, 1001), 1, "team", False),
    "comparisons": ((7, 412), 1, "compare", False),
    "comparisons of several rows": ((300, 9), 1, "compare", False),
    "comparisons of columns": ((3, 101, 7), 1, "compare", False),
    "a block with more threads": ((9, 701), 1, "team", False),
    "two warps for a row": ((1401, 633), 1, "team", False),
    "a warp for a row": ((1701, 633), 1, "network", False),
    "half a warp for a row": ((3301, 301), 1, "network", False),
    "warps for columns": ((50, 300, 67), 1, "network", False),
    "columns in registers": ((5, 300, 67), 1, "team", False),
    "a block for each of few columns": ((30, 801, 3), 1, "team", False),
    "256 threads": ((300, 2049), 1, "block", False),
    "256 threads with fewer elements": ((300, 2047), 1, "block", False),
    "512 threads": ((70, 8192), 1, "block", False),
    "1024 threads": ((70, 8193), 1, "block", False),
    "few rows of a block": ((7, 9001), 1, "sweep", False),
    "columns in a block": ((2, 3000, 45), 1, "block", True),
    "tiny tiles": ((2, 51_305), 1, "sweep", False),
    "few tiles": ((5, 41_001), 1, "sweep", False),
    "groups of tiles": ((1, 300_003), 1, "sweep", False),
    "groups of the tiles of rows": ((3, 250_001), 1, "sweep", False),
    "one sweep": ((1, 1_100_003), 1, "sweep", False),
    "a large tile for each multiprocessor": ((3, 300_001), 1, "sweep", False),
    "a huge tile for each multiprocessor": ((1, 2_200_003), 1, "sweep", False),
    "huge tiles of rows": ((25, 80_003), 1, "sweep", False),
    "more tiles than blocks that wait": ((1, 4_000_037), 1, "sweep", False),
    "many sweeps": ((37, 70_001), 1, "sweep", False),
    "sweeps of few columns": ((2, 33_001, 5), 1, "sweep", False),
    "sweeps of few columns in small tiles": ((1, 100_001, 3), 1, "sweep", False),
    "sweeps of columns": ((2, 70_001, 9), 1, "sweep", True),
    "merges of 64 bits": ((20, 9001), 1, "sweep", False),
    "merges of columns of 64 bits": ((3, 1501, 5), 1, "block", True),
}
regimes = pytest.mark.parametrize("shape, axis, algorithm, turns", REGIMES.values(), ids=REGIMES)


def data(shape, axis, dtype):
    """Rows of arbitrary bits, of special values, of few values, of one value, ascending, and descending."""
    rng, n = np.random.default_rng(0), shape[axis]
    special = reference.special_values(dtype)
    rows = [reference.random_bits(rng, (n,), dtype), rng.choice(special, n), rng.choice(special[:2], n)]
    rows += [np.full(n, special[-1]), np.arange(n).astype(dtype), np.arange(n)[::-1].astype(dtype)]
    return spread(jnp.asarray(np.stack(rows)), shape, axis, 0)


@functools.partial(jax.jit, static_argnums=(1, 2))
def expected(x, axis, descending):
    return sort_p.fallback(x, axis=axis, descending=descending, values=True, indices=True, kth=-1)


@functools.partial(jax.jit, static_argnums=(1, 2))
def ours(x, axis, descending):
    flags = {"axis": axis, "descending": descending}
    values, indices = sort_p(x, **flags, values=True, indices=True, kth=-1)
    return values, indices, jaxgpuops.sort(x, **flags), jaxgpuops.argsort(x, **flags)


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "int8", "float64", "int64", "uint16"])
@regimes
def test_order_is_that_of_the_fallback(shape, axis, algorithm, turns, dtype):
    with jax.enable_x64(dtype in ("float64", "int64")):
        x = data(shape, axis, jnp.dtype(dtype))
        chosen = plan(lambda x: jaxgpuops.argsort(x, axis=axis), x)
        if jnp.dtype(dtype).itemsize == 1 and algorithm == "network":
            algorithm = "team"
        if jnp.dtype(dtype).itemsize < 8:
            turns = turns or (algorithm == "sweep" and x.ndim == 3 and jnp.dtype(dtype).itemsize == 1)
            assert (chosen["algorithm"], chosen["turns"]) == (algorithm, turns)
        for descending in (False, True):
            values, indices = expected(x, axis, descending)
            assert same_bits(ours(x, axis, descending), (values, indices, values, indices))


# Rows that networks sort if only values are wanted, in parts of warps, warps and blocks.
NETWORKS = [((3300, 100), 1), ((1601, 256), 1), ((801, 300), 1), ((400, 700), 1), ((300, 1025), 1), ((6, 4096), 1)]
NETWORKS += [((100, 40, 90), 1), ((4, 901, 103), 1), ((1024, 401), 0), ((2, 2500, 9), 1)]
NETWORKS += [((3301, 97), 1), ((529, 1204), 1), ((529, 1501), 1), ((2, 1500, 400), 1)]  # pairs of rows of 16 bits


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "uint8"])
@pytest.mark.parametrize("shape, axis", NETWORKS, ids=str)
def test_equal_values_keep_their_order(shape, axis, dtype):
    """Networks sort keys alone, but zeros and NaNs that have other bits must stay in the order of the row."""
    x = data(shape, axis, jnp.dtype(dtype))
    sort = functools.partial(jaxgpuops.sort, axis=axis)
    if dtype == "float32":
        assert plan(sort, x)["algorithm"] == "network"
    for descending in (False, True):
        assert same_bits(jax.jit(functools.partial(sort, descending=descending))(x), expected(x, axis, descending)[0])


# Rows of which each multiprocessor has one tile at most, of each length of tiles.
SPLIT = [
    ((1, 4097), 1),
    ((1, 20_001), 1),
    ((3, 40_001), 1),
    ((1, 135_168), 1),
    ((1, 270_001), 1),
    ((1, 33_001, 3), 1),
    ((2, 9001, 5), 1),
]


def hidden(x, axis, items):
    """Makes all samples of each row (place_of_sample in sort/cuda/splitters.cu) the same. A thread has ``items``."""
    n = x.shape[axis]
    samples = (8 if x.dtype.itemsize == 4 and items <= 2 else 16) * min(-(-n // (512 * items)), 128)
    i = np.arange(samples, dtype=np.uint64)
    places = ((i << 16 | (i * 2654435761 & 0xFFFFFFFF) >> 16) * np.uint64((n << 20) // samples)) >> 36
    rows = jnp.moveaxis(jnp.abs(x), axis, 0)
    return jnp.moveaxis(rows.at[places.astype(np.int64)].set(-1), 0, axis)


@pytest.mark.parametrize("dtype", ["float32", "int32", "float64", "int64"])
@pytest.mark.parametrize("shape, axis", SPLIT, ids=str)
def test_rows_are_split_by_samples(shape, axis, dtype):
    """Where samples say nothing about the other elements, one block would get them all, and passes sort them."""
    with jax.enable_x64(dtype in ("float64", "int64")):
        x = data(shape, axis, jnp.dtype(dtype))
        items = plan(lambda x: jaxgpuops.argsort(x, axis=axis), x)["items"]
        for rows in (hidden(x, axis, items), x):
            for descending in (False, True):
                values, indices = expected(rows, axis, descending)
                assert same_bits(ours(rows, axis, descending), (values, indices, values, indices))


@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16", "int64"])
@pytest.mark.parametrize("shape", [(5, 40_001), (1, 1_100_003), (37, 70_001), (70, 8193), (2, 33_001, 5)], ids=str)
def test_carried_numbers_follow_the_elements(shape, dtype):
    with jax.enable_x64(dtype == "int64"):
        x = data(shape, 1, jnp.dtype(dtype))
        numbers = jax.random.bits(jax.random.key(0), shape).astype(np.int32)
        for descending in (False, True):
            values, indices = expected(x, 1, descending)
            params = {"axis": 1, "descending": descending, "indices": True, "kth": -1}
            both = jax.jit(functools.partial(sort_p, **params, values=True))(x, numbers)
            follow = jnp.take_along_axis(numbers, indices, 1)
            assert same_bits(both, (values, follow))
            assert same_bits(jax.jit(functools.partial(sort_p, **params, values=False))(x, numbers), (follow,))


# Keys by how many of their bytes differ: those of a row, which sorts by them.
DIFFERENT = {
    0: lambda key, shape: jnp.full(shape, 7, np.uint32),
    1: lambda key, shape: jax.random.bits(key, shape) & 0xFF0000,
    2: lambda key, shape: jax.random.randint(key, shape, 0, 1000).astype(np.uint32),
    3: lambda key, shape: jax.random.bits(key, shape) & np.uint32(0xFF00FFFF),
    4: lambda key, shape: jax.random.bits(key, shape),
}


@pytest.mark.parametrize("shape", [(1, 1_500_007), (1, 600_011), (70, 9001), (37, 70_001), (2, 8_500_001)], ids=str)
@pytest.mark.parametrize("high, low", [(0, 0), (0, 4), (1, 0), (2, 3), (2, 4), (4, 2), (4, 3), (3, 4), (4, 4)])
def test_two_keys_at_once(shape, high, low):
    keys = [DIFFERENT[n](jax.random.key(i), shape) for i, n in enumerate((high, low))]
    for types in ((np.uint32, np.uint32), (np.int32, np.float32), (np.float32, np.int32)):
        own = [jax.lax.bitcast_convert_type(x, dtype) for x, dtype in zip(keys, types, strict=True)]
        own = [x.at[:, 3].set(-0.0).at[:, 5].set(-jnp.nan) if x.dtype == np.float32 else x for x in own]
        call = functools.partial(lexsort_p, axis=1)
        assert plan(functools.partial(call, descending=False), *own)["algorithm"] == "keys"
        for descending in (False, True):
            [order] = jax.jit(functools.partial(call, descending=descending))(*own)
            bits = [~sort_keys(x) if descending else sort_keys(x) for x in own]
            first, second = (jnp.take_along_axis(x, order, 1) for x in bits)
            rises = (first[:, 1:] > first[:, :-1]) | (
                (first[:, 1:] == first[:, :-1]) & (second[:, 1:] > second[:, :-1])
            )
            same = (first[:, 1:] == first[:, :-1]) & (second[:, 1:] == second[:, :-1])
            assert (rises | (same & (order[:, 1:] > order[:, :-1]))).all()
            counts = jnp.zeros(shape, np.int32).at[jnp.arange(shape[0])[:, None], order].add(1)
            assert (counts == 1).all()


@regimes
def test_rows_of_a_batch_and_misaligned_ones(shape, axis, algorithm, turns):
    x = data(shape, axis, jnp.dtype("float32"))[:2]
    values, indices = expected(x, axis, False)
    shifted = jax.jit(lambda y: ours(y[3:].reshape(x.shape), axis, False))(jnp.append(jnp.zeros(3), x))
    assert same_bits(shifted, (values, indices, values, indices))


# Rows whose segments a block sorts, and longer ones, if indices are wanted; of values alone, networks sort many.
SEGMENTS = {
    "comparisons of one element": ((7, 1), "compare"),
    "comparisons of several rows": ((500, 33), "compare"),
    "comparisons in short rows": ((100, 255), "compare"),
    "comparisons in a few rows": ((9, 3001), "compare"),
    "comparisons in long rows": ((3, 9001), "compare"),
    "comparisons in many rows": ((900, 60), "compare"),
    "256 threads": ((70, 1001), "segments"),
    "512 threads": ((17, 4001), "segments"),
    "512 threads with more elements": ((140, 8001), "segments"),
    "1024 threads": ((9, 8001), "segments"),
    "1024 threads with more elements": ((70, 9001), "segments"),
    "half of the warps": ((200, 2049), "segments"),
    "a network of a warp": ((3000, 333), "network"),
    "a network of several warps": ((700, 3500), "network"),
    "a merge": ((3, 17_001), "merge"),
    "merges": ((2, 70_001), "merge"),
    "sweeps": ((9, 150_001), "sweep"),
    "sweeps of many elements": ((2, 1_100_003), "sweep"),
}


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "int8", "float16", "float64", "int64"])
@pytest.mark.parametrize("shape, algorithm", SEGMENTS.values(), ids=SEGMENTS)
def test_segments(shape, algorithm, dtype):
    """Many short segments, few long ones, and offsets out of order and out of range."""
    n, rng = shape[1], np.random.default_rng(0)
    every = [np.arange(min(1, n - 1), n, 3), np.array([0, n]), np.array([5, n // 3, n // 2, n - 9]), np.zeros(1)]
    compares = lambda count: n <= 256 or shape[0] * n <= 1024 * count
    every += [rng.integers(-n // 2, 2 * n, 70), np.sort(rng.integers(0, n, 2 * n))]
    every += [np.append(np.arange(0, n // 3, 2), n), np.arange(0, n + 1, 150)]  # with one long segment; around a limit
    with jax.enable_x64(dtype in ("float64", "int64")):
        x = data(shape, 1, jnp.dtype(dtype))
        for offsets, descending in itertools.product(every, (False, True)):
            offsets = jnp.asarray(offsets, jnp.int32)
            both = lambda x, of: [f(x, offsets=of, descending=descending) for f in (jaxgpuops.sort, jaxgpuops.argsort)]
            if algorithm == "compare":
                is_known = compares(offsets.size) and (n < 8192 or np.dtype(x.dtype).itemsize < 8)
            elif algorithm == "segments":
                is_known = n <= 8192 or np.dtype(x.dtype).itemsize < 8
            elif algorithm == "network":
                is_known = n <= 3072 or np.dtype(x.dtype).itemsize >= 4
            else:
                mean, least = n / offsets.size, 8192 if np.dtype(x.dtype).itemsize == 8 else 1536
                is_known = mean <= 256 if algorithm == "merge" else mean >= least
            if is_known:
                # Values alone are sorted by networks; with indices, other calls sort so many short rows.
                fn = jaxgpuops.sort if algorithm == "network" else jaxgpuops.argsort
                calls = jaxgpuops.explain(functools.partial(fn, descending=descending), x, offsets=offsets)
                assert {call.plan["algorithm"] for call in calls if call.op == "sort_segments"} == {algorithm}
            fallback = functools.partial(sort_segments_p.fallback, axis=1, descending=descending)
            wanted = jax.jit(functools.partial(fallback, values=True, indices=True))(x, offsets[None])
            assert same_bits(jax.jit(both)(x, offsets), wanted)
        rows = min(3, shape[0])
        own = jnp.stack([jnp.sort(jax.random.randint(jax.random.key(i), (9,), 0, n)) for i in range(rows)])
        many = jax.jit(jax.vmap(lambda x, of: jaxgpuops.argsort(x, offsets=of)))(x[:rows], own)
        one = jax.jit(lambda x, of: jaxgpuops.argsort(x, offsets=of))
        assert all(same_bits(many[i], one(x[i], own[i])) for i in range(rows))


def command_buffers():
    for name, (shape, axis, *_) in REGIMES.items():
        program = jax.jit(lambda x: [jaxgpuops.argsort(x + i, axis=axis) for i in range(3)])
        for seed in range(3):  # new inputs, at new addresses
            x = jnp.round(jax.random.normal(jax.random.key(seed), shape) * 100) / 8
            for i, indices in enumerate(program(x)):
                assert (indices == expected(x + i, axis, False)[1]).all(), (name, seed, i)


def test_command_buffers_with_changing_inputs():
    run_in_command_buffers("test_gpu_sort")


def test_more_elements_than_int32_counts():
    needs_memory(40)
    x = jax.random.bits(jax.random.key(0), (33_000, 70_000), np.uint8)
    indices = jax.jit(jaxgpuops.argsort)(x)
    assert (indices[-2:] == expected(x[-2:], 1, False)[1]).all()


KINDS = {
    "normal": lambda y: y,
    "near": lambda y: 5 + y / 100,
    "few values": jnp.round,
    "one value": jnp.zeros_like,
    "two ends": lambda y: jnp.where(y > 0, y + 1e30, y - 1e30),
    "rising": lambda y: jnp.sort(y, 1),  # what is near a rank is all in one part of the row
}


def of_kind(kind, shape, dtype):
    x = (20 * KINDS[kind](jax.random.normal(jax.random.key(0), shape))).astype(dtype)
    return x if dtype == "int8" else x.at[:, 3].set(-jnp.nan).at[:, 7].set(-jnp.inf)


ranked_data = pytest.mark.parametrize(
    "kind, dtype", [(kind, dtype) for kind in KINDS for dtype in ("int8", "bfloat16", "float32", "float64")]
)


@ranked_data
@pytest.mark.parametrize(
    "shape",
    [
        (5000, 8),
        (501, 100),
        (300, 1025),
        (5000, 1101),
        (1300, 4096),
        (41, 4096),
        (3, 20_001),
        (40, 70_001),
        (3, 250_001),
        (1, 1 << 22),
        (269, 131_072),
    ],
)
def test_elements_by_rank(shape, kind, dtype):
    """Selected elements are those of the sort, in rows that a block holds and in longer ones. If elements are near or
    equal, many are left after the first step."""
    n = shape[1]
    with jax.enable_x64(dtype == "float64"):
        x = of_kind(kind, shape, dtype)
        whole, order = jaxgpuops.sort(x), jaxgpuops.argsort(x)
        for places in (
            [n // 2],
            [0, 1, n // 2 + 2, n // 2, n // 2, n // 2 + 1, n - 2, n - 1],
            [i * (n - 1) // 8 for i in range(9)],
        ):
            ranks = np.array([places], np.int32)
            select = jax.jit(lambda x, ranks=ranks: select_p(x, ranks, axis=1))
            values, indices = select(x)
            np.testing.assert_array_equal(indices, order[:, ranks[0]])
            assert same_bits(values, whole[:, ranks[0]])
            assert same_bits(select(x[1:2]), [values[1:2], indices[1:2]])


@ranked_data
@pytest.mark.parametrize(
    "shape", [(600, 8, 7), (7, 200, 33), (3, 700, 401), (2, 1000, 1), (7, 3000, 5), (2, 250_001, 3)]
)
def test_elements_by_rank_of_columns(shape, kind, dtype):
    with jax.enable_x64(dtype == "float64"):
        x = of_kind(kind, shape, dtype)
        whole, order = jaxgpuops.sort(x, axis=1), jaxgpuops.argsort(x, axis=1)
        n = shape[1]
        places = np.array([0, n // 3, n - 1], np.int32)
        values, indices = jax.jit(lambda x: select_p(x, places[None, :, None], axis=1))(x)
        np.testing.assert_array_equal(indices, order[:, places])
        assert same_bits(values, whole[:, places])
        each = np.resize(np.array([0, n - 1, 5, 6, 7], np.int32), (1, 1, shape[2]))
        values, indices = jax.jit(lambda x: select_p(x, each, axis=1))(x)
        np.testing.assert_array_equal(indices, np.take_along_axis(np.asarray(order), each, 1))


@ranked_data
@pytest.mark.parametrize(
    "shape",
    [
        (300, 1025, 1),
        (5000, 1101, 1),
        (1300, 4096, 1),
        (41, 4096, 1),
        (3, 20_001, 1),
        (2, 5000, 3),
        (2, 1_000_001, 1),
        (1, 2_500_003, 1),
    ],
)
def test_parts_around_an_element(shape, kind, dtype):
    """The kth element is that of a sort. Before it and after it are the elements that a sort has there, in order of
    appearance."""
    n = shape[1]
    with jax.enable_x64(dtype == "float64"):
        x = of_kind(kind, shape, dtype)
        order = np.asarray(jaxgpuops.argsort(x, axis=1))
        for kth in (0, n // 3, n - 1):
            parts = lambda x, **wanted: sort_p(x, axis=1, descending=False, kth=kth, **wanted)
            algorithm = plan(jax.jit(lambda x: parts(x, values=True, indices=False)), x)["algorithm"]
            if dtype == "int8" and n >= 1500:  # a sort takes less time
                assert algorithm == ("block" if n <= 8192 else "sweep")
                assert same_bits(jaxgpuops.partition(x, kth, axis=1), jaxgpuops.sort(x, axis=1))
                continue
            assert algorithm == "part"
            values, indices = jax.jit(lambda x: parts(x, values=True, indices=True))(x)
            expected = np.concatenate(
                [np.sort(order[:, :kth], 1), order[:, kth : kth + 1], np.sort(order[:, kth + 1 :], 1)], 1
            )
            np.testing.assert_array_equal(indices, expected)
            assert same_bits(values, jnp.take_along_axis(x, indices, 1))
            assert same_bits(jaxgpuops.partition(x, kth, axis=1), values)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(300, 700), (2500, 1101), (4200, 4096), (8200, 4100)])
def test_quantiles_of_many_rows(shape, dtype):
    """Several quantiles of rows, of which some have a NaN or infinities, or one value only."""
    x = jax.random.normal(jax.random.key(1), shape).astype(dtype).at[5].set(3)
    x = x.at[::7, 11].set(jnp.nan).at[3, 4].set(jnp.inf).at[4, 40].set(-jnp.inf)
    for q in ([0.5], [0.1, 0.5, 0.9], [0.0, 1.0]):
        found = jax.jit(lambda x, q=q: jaxgpuops.quantile(x, q, axis=1))(x)
        ordered, ends = jnp.sort(x.astype(jnp.float32), 1), [p * (shape[1] - 1) for p in q]
        low, high = (jnp.stack([ordered[:, int(f(p))] for p in ends]) for f in (np.floor, np.ceil))
        share = jnp.array([p - np.floor(p) for p in ends])[:, None]
        expected = jnp.where(low == high, low, low + (high - low) * share)
        expected = jnp.where(jnp.isnan(ordered[:, -1]), jnp.nan, expected)
        rtol = 1e-2 if dtype != "float32" else 1e-5
        np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "shape",
    [
        (6, 900_001),
        (300, 60_001),
        (1, 1 << 22),
        (5, 300_001),
        (3, 100_001),
        (150, 30_001),
        (900, 100),
        (1500, 40, 3),
        (2300, 1101),
        (4200, 3001),
    ],
)
def test_quantiles_are_those_of_the_elements(shape, dtype):
    """Several quantiles, bit for bit, of rows that are random, of few values, zeros of both signs, in order, of one
    value, or with a NaN. Where blocks share a row, keys tell the elements, but for zeros."""
    with jax.enable_x64(dtype == "float64"):
        x = jax.random.normal(jax.random.key(2), shape)
        kinds = [x, jnp.round(3 * x), jnp.where(x > 0.3, x, jnp.where(x > -0.3, 0.0, -0.0)), jnp.sort(x, 1)]
        kinds += [jnp.full_like(x, 1.5), x.at[:, 5].set(jnp.nan)]
        row = jnp.arange(shape[0]).reshape(-1, *(1,) * (len(shape) - 1)) % len(kinds)
        for first in range(len(kinds) if shape[0] == 1 else 1):
            y = jnp.select([row == (i - first) % len(kinds) for i in range(len(kinds))], kinds).astype(dtype)
            for q, method in (([0.31, 0.5, 0.77], "linear"), ([0.5], "midpoint"), ([0.0, 1.0], "lower")):
                found, expected = jax.jit(functools.partial(_both_quantiles, q=q, method=method))(y)
                assert same_bits(jnp.nan_to_num(found, nan=-7), jnp.nan_to_num(expected, nan=-7))


def _both_quantiles(x, q, method):
    low, high, share = ops._places(np, np.asarray(q), x.shape[1], method)
    ranks = [*low, *high] if method in ops.BETWEEN else low
    ranks = np.array([*ranks, x.shape[1] - 1], np.int32).reshape(1, -1, *(1,) * (x.ndim - 2))
    shares = share.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    shares = shares.reshape(1, -1, *(1,) * (x.ndim - 2))
    [y] = quantile_p.fallback(x, ranks, shares, axis=1, midpoint=method == "midpoint", before=1)
    return jaxgpuops.quantile(x, q, axis=1, method=method), jnp.moveaxis(y, 1, 0)
