"""Counts and segments on a GPU: see gpu.py."""

import fractions
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import run_in_command_buffers, same_bits

import jaxgpuops
from jaxgpuops.lax._search import choose, pick, unique_p

# Every form of the kernel: (shape, bins), counted along axis 1.
COUNTS = {
    "lanes of rows": ((70_001, 100), 10),
    "short rows": ((3000, 300), 10),
    "a block a row": ((600, 5000), 300),
    "slices of rows": ((3, 300_001), 256),
    "one table": ((2, 300_001), 40_000),
    "clusters": ((1, 518_279), 35_547),
    "clusters of rows": ((3, 400_003), 20_001),
    "clusters with all bins": ((5, 300_001), 50_003),
    "few ids for many bins": ((1, 300_001), 100_003),
    "ranges of bins": ((1, 1_000_003), 130_000),
    "few ids": ((3, 20_003), 12_345),
    "as many ids as bins": ((1, 4000), 500),
    "too many bins": ((2, 300_001), 1_000_000),
    "parts of rows": ((9, 270_001), 300_001),
    "parts of slices": ((1, 3_000_001), 600_000),
    "columns": ((3, 5001, 7), 20),
}

# (length, features, segments, is sorted)
SEGMENTS = {
    "very few scalars": (139, (), 78, False),
    "very few rows": (633, (7,), 100, False),
    "very few sorted scalars": (640, (), 800, True),
    "some rows": (1400, (9,), 20, False),
    "few scalars": (3001, (), 40, False),
    "lanes of slices": (300_001, (), 500, False),
    "pairs": (300_001, (2,), 255, False),
    "pairs, one by one": (100_001, (2,), 300, False),
    "lanes of columns": (100_001, (3,), 64, False),
    "tables of slices": (300_001, (), 1000, False),
    "tables of columns": (30_001, (5,), 1000, False),
    "a table a block": (600_001, (), 2000, False),
    "a large table a block": (700_001, (), 20_000, False),
    "tables of all columns": (120_001, (28,), 200, False),
    "tables of odd rows": (40_001, (9,), 61, False),
    "lanes of wide rows": (20_001, (77,), 100, False),
    "wide rows in order": (42_001, (100,), 100, False),
    "few wide rows": (57, (512,), 31, False),
    "few rows": (2048, (3,), 1500, False),
    "few rows of scalars": (8192, (), 10_000, False),
    "few rows of pairs": (4096, (2,), 500, False),
    "few sorted scalars": (8001, (), 15, True),
    "ranges of few scalars": (20_001, (), 840, False),
    "ranges of few wide rows": (2048, (198,), 6344, False),
    "short ranges of few wide rows": (958, (3000,), 73, False),
    "picked scalars": (20_001, (), 180, False),
    "picked rows": (5001, (14,), 300, False),
    "a few thousand rows": (5001, (6,), 100, False),
    "picked wide rows": (4235, (37,), 320, False),
    "picked columns": (30_001, (4,), 300, False),
    "atomics of few columns": (30_001, (3,), 300, False),
    "ranges of rows": (4273, (270,), 2337, False),
    "ranges of odd rows": (8191, (15,), 3000, False),
    "ranges of vectors": (12_001, (64,), 4000, False),
    "ranges of wide rows": (428, (1001,), 63, False),
    "ranges of more wide rows": (3001, (700,), 300, False),
    "results of few rows": (20, (4100,), 9000, False),
    "one row": (1, (1000,), 3, False),
    "few sorted rows": (300, (40,), 100, True),
    "atomics": (70_001, (8,), 3000, False),
    "atomics of scalars": (300_001, (), 30_000, False),
    "atomics of few scalars": (20_001, (), 15_000, False),
    "a scatter of scalars": (3001, (), 500, False),
    "a scatter of rows": (3001, (11,), 1500, False),
    "a scatter of long rows": (501, (130,), 101, False),
    "atomics of wide rows": (20_001, (33,), 3000, False),
    "atomics of rows": (30_001, (12,), 5000, False),
    "atomics of rows, a table a block": (200_001, (6,), 600, False),
    "buckets of rows": (600_001, (4,), 300_000, False),
    "buckets of scalars": (300_001, (), 200_000, False),
    "buckets of odd rows": (270_001, (3,), 200_000, False),
    "buckets of pairs": (70_001, (2,), 150_000, False),
    "tables of few rows": (8193, (19,), 60, False),
    "tables of wide rows": (2101, (100,), 15, False),
    "one pass": (5000, (11,), 400, False),
    "ranges of ids": (70_001, (9,), 30_000, False),
    "two passes": (100_001, (9,), 30_000, False),
    "three passes": (60_001, (), 2_000_000, False),
    "more segments than rows": (150_001, (18,), 160_000, False),
    "long gaps": (20_001, (66,), 300_000, True),
    "shares of pairs with gaps": (100_001, (2,), 4_000_000, True),
    "three teams of a block": (70_001, (170,), 3000, True),
    "scalars": (1_000_003, (), 1000, True),
    "many segments of scalars": (300_001, (), 200_000, True),
    "vectors": (100_001, (128,), 5000, True),
    "odd rows": (20_001, (257,), 300, False),
    "long rows": (3001, (4096,), 5000, False),
}


def drawn(kind, shape, high, key):
    ids = jax.random.randint(jax.random.key(key), shape, -1, high + 1, jnp.int32)
    hot = jax.random.uniform(jax.random.key(key + 1), shape) < {"uniform": 0, "hot": 0.9, "one": 1}[kind]
    return jnp.where(hot, high // 2, ids)


def expected_counts(x, bins):
    x = np.moveaxis(np.asarray(x), 1, -1)
    flat = x.reshape(-1, x.shape[-1])
    counts = np.stack([np.bincount(row[(row >= 0) & (row < bins)], minlength=bins) for row in flat])
    return np.moveaxis(counts.reshape(*x.shape[:-1], bins), -1, 1)


def count(x, bins):
    for _ in x.shape[2:]:
        return jax.vmap(functools.partial(jaxgpuops.bincount, length=bins), in_axes=2, out_axes=2)(x)
    return jaxgpuops.bincount(x, bins)


@pytest.mark.parametrize("kind", ["uniform", "hot", "one"])
@pytest.mark.parametrize("shape, bins", COUNTS.values(), ids=COUNTS)
def test_counts(shape, bins, kind):
    x = drawn(kind, shape, bins, 0)
    np.testing.assert_array_equal(jax.jit(count, static_argnums=1)(x, bins), expected_counts(x, bins))
    shifted = jax.jit(lambda x: count(x[3:].reshape(shape), bins))(jnp.append(jnp.zeros(3, jnp.int32), x))
    np.testing.assert_array_equal(shifted, expected_counts(x, bins))  # rows that are not aligned


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "int64"])
def test_counts_of_every_width(dtype):
    with jax.enable_x64("64" in dtype):
        x = drawn("uniform", (3, 100_001), 100, 0).astype(dtype)
        for bins in (90, 300):
            np.testing.assert_array_equal(count(x, bins), expected_counts(np.asarray(x).astype(np.int64), bins))


def reductions(data, ids, segments, is_sorted):
    return [
        getattr(jaxgpuops, name)(data, ids, segments, indices_are_sorted=is_sorted)
        for name in ("segment_sum", "segment_max", "segment_min")
    ]


@pytest.mark.parametrize("kind", ["uniform", "hot", "one"])
@pytest.mark.parametrize("length, features, segments, is_sorted", SEGMENTS.values(), ids=SEGMENTS)
def test_segments(length, features, segments, is_sorted, kind):
    """Elements are integers, whose sums as floats are exact in any order; JAX's kernels are the reference."""
    ids = drawn(kind, (length,), segments, 0)
    ids = jnp.sort(ids) if is_sorted else ids
    for dtype in ("float32", "int32"):
        data = jax.random.randint(jax.random.key(2), (length, *features), -9, 10).astype(dtype)
        ours = jax.jit(reductions, static_argnums=(2, 3))(data, ids, segments, is_sorted)
        for result, name in zip(ours, ("segment_sum", "segment_max", "segment_min"), strict=True):
            np.testing.assert_array_equal(result, getattr(jax.ops, name)(data, ids, segments))


@pytest.mark.parametrize("columns", [1, 3, 9])
@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "uint64"])
def test_sums_of_integers_in_frequent_segments(dtype, columns):
    """Some 25 segments have most rows, so that many atomics meet."""
    with jax.enable_x64(dtype.endswith("64")):
        rng = np.random.default_rng(0)
        length, segments = 600_001, 100_000
        ids = rng.integers(-1, segments + 1, length).astype(np.int32)
        ids = np.where(rng.random(length) < 0.9, rng.choice(ids, 25)[rng.integers(0, 25, length)], ids)
        info = np.iinfo(dtype)
        data = rng.integers(info.min, info.max, (length, columns), dtype, endpoint=True)
        total = lambda data, ids: jaxgpuops.segment_sum(data, ids, segments)
        assert jaxgpuops.explain(total, data, ids)[0].plan["algorithm"] == "atomics"
        valid, wanted = (ids >= 0) & (ids < segments), np.zeros((segments, columns), dtype)
        np.add.at(wanted, ids[valid], data[valid])
        np.testing.assert_array_equal(jax.jit(total)(data, ids), wanted)


@pytest.mark.parametrize("kind", ["uniform", "hot", "one"])
def test_buckets_of_narrow_scalars(kind):
    """Rows of two bytes, of which there is an odd number, that begin anywhere."""
    for length, segments, first in [(300_001, 700_000, 0), (270_003, 500_000, 1), (1_000_001, 800_000, 0)]:
        data = jax.random.randint(jax.random.key(2), (length + first,), -9, 10).astype(jnp.bfloat16)[first:]
        ids = drawn(kind, (length,), segments, 0)
        total = lambda data, ids, segments=segments: jaxgpuops.segment_sum(data, ids, segments)
        assert jaxgpuops.explain(total, data, ids)[0].plan["algorithm"] == "buckets"
        wanted = jax.ops.segment_sum(data.astype(jnp.float32), ids, segments).astype(jnp.bfloat16)
        np.testing.assert_array_equal(jax.jit(total)(data, ids), wanted)


@pytest.mark.parametrize("features", [(), (16,)], ids=["scalars", "rows"])
def test_ids_that_do_not_ascend(features):
    """If the caller wrongly says that ids ascend, results are undefined, but kernels do not leave their buffers."""
    ids, data = drawn("hot", (100_001,), 1000, 0), jnp.ones((100_001, *features))
    jax.block_until_ready(reductions(data, ids, 1000, True))
    expected = jaxgpuops.segment_sum(data, ids, 1000)
    np.testing.assert_array_equal(jaxgpuops.segment_sum(data, jnp.sort(ids), 1000, indices_are_sorted=True), expected)


@pytest.mark.parametrize("columns", [68, 70])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "bfloat16"])
def test_narrow_rows_in_order(dtype, columns):
    """Rows of which only 4 bytes, or 2, make a vector."""
    rng = np.random.default_rng(0)
    data = jnp.asarray(rng.integers(0, 50, (9001, columns))).astype(dtype)
    ids = jnp.asarray(np.where(rng.random(9001) < 0.3, 7, rng.integers(-1, 3001, 9001)), jnp.int32)
    ours = reductions(data, ids, 3000, False)
    for result, name in zip(ours, ("segment_sum", "segment_max", "segment_min"), strict=True):
        wide = getattr(jax.ops, name)(data.astype(jnp.int32), ids, 3000)
        there = np.isin(np.arange(3000), np.asarray(ids))
        np.testing.assert_array_equal(result[there], wide.astype(dtype)[there])


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "uint64", "float16", "bfloat16", "float64"])
def test_segments_of_every_dtype(dtype):
    """The CPU's handlers are the reference; sums of eighths are exact before they are rounded."""
    with jax.enable_x64(dtype.endswith("64")):
        rng = np.random.default_rng(0)
        for features, is_sorted in itertools.product(((), (16,), (7,), (8,)), (False, True)):
            data = jnp.asarray(rng.integers(0, 200, (5000, *features)) / (8 if "float" in dtype else 1)).astype(dtype)
            ids = jnp.asarray(rng.integers(-1, 60, 5000), jnp.int32) // 2
            ids = jnp.sort(ids) if is_sorted else ids
            ours = reductions(data, ids, 40, is_sorted)
            with jax.default_device(cpu := jax.devices("cpu")[0]):
                theirs = reductions(jax.device_put(data, cpu), jax.device_put(ids, cpu), 40, is_sorted)
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("length, features, segments, is_sorted", SEGMENTS.values(), ids=SEGMENTS)
def test_data_that_features_share(length, features, segments, is_sorted):
    """If only ids have a batch, results have the bits of calls with one row of ids each."""
    ids = jnp.stack([drawn("hot", (length,), segments, seed) for seed in range(5)])
    ids = jnp.sort(ids) if is_sorted else ids
    data = jax.random.normal(jax.random.key(2), (length, *features))
    one = lambda data, ids: reductions(data, ids, segments, is_sorted)
    alone = [jax.jit(one)(data, row) for row in ids]
    many = jax.jit(jax.vmap(one, in_axes=(None, 0)))(data, ids)
    for name, of_all in enumerate(many):
        assert same_bits(of_all, jnp.stack([own[name] for own in alone]))


@pytest.mark.parametrize("size, columns, has_table", [(300_000, 1, 0), (300_000, 3, 0), (300_000, 8, 0)] + [
    (40_000, 12, 0), (1_500_000, 1, 1), (1_500_000, 3, 1),
])  # fmt: skip
@pytest.mark.parametrize("hot", [0, 0.9])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_atomics_add_exactly(dtype, hot, size, columns, has_table):
    """Tests sums that cancel, of numbers of all sizes, and infinities and NaNs. The rows of one segment that a warp
    adds up need several accumulators; of many rows, blocks have some of these in shared memory."""
    check_exact_sums(dtype, hot, size, columns, has_table)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("hot", [0, 0.9])
def test_atomics_add_float64_exactly(hot, columns):
    with jax.enable_x64(True):
        check_exact_sums("float64", hot, 100_000, columns, 0)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("low, high", [(0, 1), (-1074, -1030), (-60, 60), (-1000, 1000), (1023, 1024)])
def test_sums_of_float64_are_rounded_once(low, high, columns):
    """Numbers of few sizes need the usual accumulators, others need more; sums may be denormal, or overflow."""
    rng = np.random.default_rng(0)
    length, segments = 60_000, 5000
    ids = np.where(rng.random(length) < 0.3, 7, rng.integers(0, segments, length)).astype(np.int32)
    data = rng.uniform(-1, 1, (length, columns)) * np.exp2(rng.integers(low, high, (length, columns)))
    with jax.enable_x64(True):
        out = np.asarray(jaxgpuops.segment_sum(data, ids, segments))
    order = np.argsort(ids, kind="stable")
    starts = np.searchsorted(ids[order], np.arange(1, segments))
    for own, rows in zip(out, np.split(data[order], starts), strict=True):
        for found, numbers in zip(own, rows.T, strict=True):
            total = sum(map(fractions.Fraction, numbers), fractions.Fraction(0))
            try:
                assert found == float(total)
            except OverflowError:
                assert found == (np.inf if total > 0 else -np.inf)


def check_exact_sums(dtype, hot, size, columns, has_table):
    rng = np.random.default_rng(0)
    info = jnp.finfo(dtype)
    sizes = rng.integers(int(np.log2(float(info.smallest_subnormal))), info.maxexp - 12, size)
    numbers = np.asarray(jnp.asarray(rng.standard_normal(size) * np.exp2(sizes)).astype(dtype)).astype(np.float64)
    order = rng.permutation(2 * size)
    ids = np.where(rng.random(size) < hot, 7, np.arange(size) % 3000)
    ids = np.repeat(ids, 2)[order]
    pairs = np.stack([numbers, -numbers], 1).ravel()[order]
    one = np.asarray(jnp.asarray(rng.standard_normal(3000)).astype(dtype)).astype(np.float64)
    specials = [
        np.inf,
        np.inf,
        -np.inf,
        np.nan,
        -np.inf,
        float(info.max),
        float(info.max),
        float(info.smallest_subnormal),
    ]
    signs = np.where(np.arange(columns) % 3 == 1, -1, 1)
    data = np.concatenate([pairs, one, specials])[:, None] * signs
    wide = np.float64 if dtype == "float64" else np.float32
    data = jnp.asarray(data, wide).astype(dtype)
    ids = jnp.asarray(np.concatenate([ids, np.arange(3000), 3000 + np.array([0, 1, 1, 2, 3, 4, 4, 5])]), jnp.int32)
    total = lambda data, ids: jaxgpuops.segment_sum(data, ids, 3007)
    plan = jaxgpuops.explain(total, data, ids)[0].plan
    assert plan["algorithm"] == "atomics" and (plan["shared_bytes"] > 0) >= has_table
    out = np.asarray(jax.jit(total)(data, ids).astype(wide))
    tiny = float(info.smallest_subnormal)
    wanted = np.concatenate([one, [np.inf, np.nan, np.nan, -np.inf, np.inf, tiny, 0]])[:, None] * signs
    np.testing.assert_array_equal(out, wanted.astype(wide))


@pytest.mark.parametrize(
    "length, segments, columns, algorithm",
    [
        (20_001, 6000, 1, "scatter"),
        (4001, 600, 1, "scatter"),
        (20_001, 6000, 3, "scatter"),
        (5001, 600, 40, "scatter"),
        (600_001, 60_000, 1, "atomics"),
        (20_001, 50, 1, "tables"),
        (20_001, 20, 3, "lanes"),
        (4001, 600, 400, "ranges"),
        (20_001, 9000, 70, "ordered"),
    ],
)
@pytest.mark.parametrize("dtype", ["int16", "float16", "int32", "uint32", "float32", "int64", "uint64", "float64"])
def test_extremes(dtype, length, segments, columns, algorithm):
    """Extremes of numbers of both signs, of zeros, infinities and NaNs, beside those of the CPU's handlers."""
    with jax.enable_x64(dtype.endswith("64")):
        rng = np.random.default_rng(0)
        if "float" in dtype:
            x = rng.choice([0.0, -0.0, 1.5, -1.5, 3e4, -3e4], (length, columns))
            for value in (np.inf, -np.inf, np.nan, -np.nan):
                x[rng.integers(0, length, 300)] = value
        else:
            info = np.iinfo(dtype)
            x = rng.integers(info.min, info.max, (length, columns), dtype, endpoint=True)
            x[rng.integers(0, length, 300)] = info.min
            x[rng.integers(0, length, 300)] = info.max
        data = jnp.asarray(x).astype(dtype)
        ids = np.where(rng.random(length) < 0.3, 7, rng.integers(-1, segments + 1, length))
        both = lambda data, ids: [fn(data, ids, segments) for fn in (jaxgpuops.segment_max, jaxgpuops.segment_min)]
        if algorithm == "scatter" and data.dtype.itemsize < 4:
            algorithm = "few" if length == 4001 else "atomics"
        if algorithm == "lanes" and data.dtype.itemsize < 4:
            algorithm = "tables"
        assert [call.plan["algorithm"] for call in jaxgpuops.explain(both, data, ids)] == [algorithm] * 2
        found = jax.jit(both)(data, ids)
        with jax.default_device(cpu := jax.devices("cpu")[0]):
            theirs = both(jax.device_put(data, cpu), ids)
        for a, b in zip(found, theirs, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        if "float" in dtype:  # -0 is below +0
            bits = np.asarray(data, np.float64).view(np.int64)
            keys, valid = np.where(bits < 0, bits ^ np.iinfo(np.int64).max, bits), (ids >= 0) & (ids < segments)
            for a, ufunc, start in ((found[0], np.maximum, -1 << 62), (found[1], np.minimum, 1 << 62)):
                signs = np.full((segments, columns), start)
                ufunc.at(signs, ids[valid], keys[valid])
                own = np.asarray(a)
                np.testing.assert_array_equal(np.signbit(own)[~np.isnan(own)], (signs < 0)[~np.isnan(own)])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(1_000_003,), (5, 30_001), (700, 300)])
def test_histogram(shape, dtype):
    """The edges themselves and their neighbours are where rounding could go wrong."""
    with jax.enable_x64(dtype == "float64"):
        for bins in (1, 10, 100):
            counted = jax.jit(lambda x, bins=bins: jaxgpuops.histogram(x, bins, range=(-3.0, 3.0)))
            x = 2 * jax.random.normal(jax.random.key(0), shape).astype(dtype)
            edges = counted(x)[1]
            near = [jnp.nextafter(edges, jnp.full_like(edges, side)) for side in (-9, 9)] if "bf" not in dtype else []
            special = jnp.concatenate([edges, *near, jnp.asarray([jnp.nan, jnp.inf, -jnp.inf], dtype)])
            x = x.at[..., : special.size].set(special[: x.shape[-1]])
            wide, places = np.asarray(x, np.float64).reshape(-1, shape[-1]), np.asarray(edges, np.float64)
            for own, row in zip(np.asarray(counted(x)[0]).reshape(-1, bins), wide, strict=True):
                row = row[(row >= places[0]) & (row <= places[-1])]
                bin = np.minimum(np.searchsorted(places, row, "right") - 1, bins - 1)
                np.testing.assert_array_equal(own, np.bincount(bin, minlength=bins))


def test_few_rows_are_near_what_is_exact():
    """Of sizes that no float32 adds up; and of every batch the same bits."""
    rng = np.random.default_rng(0)
    for dtype, shape, segments in itertools.product(
        ("float32", "bfloat16"), [(2000, 3), (300, 70), (2048,), (8192,), (600,), (600, 5), (1,)], (3, 70, 900)
    ):
        data = jnp.asarray(rng.standard_normal(shape) * np.exp2(rng.integers(-30, 30, shape))).astype(dtype)
        ids = rng.integers(-1, segments + 1, shape[0])
        one = lambda data, ids, n=segments: jaxgpuops.segment_sum(data, ids, n)
        found = jax.jit(one)(data, ids)
        valid, wide = (ids >= 0) & (ids < segments), np.asarray(data.astype(jnp.float32), np.float64)
        wanted, sizes = np.zeros((segments, *shape[1:])), np.zeros((segments, *shape[1:]))
        np.add.at(wanted, ids[valid], wide[valid])
        np.add.at(sizes, ids[valid], abs(wide[valid]))
        ulp = float(jnp.finfo(dtype).eps)
        assert (abs(np.asarray(found.astype(jnp.float32)) - wanted) <= ulp * abs(wanted) + 2.0**-22 * sizes).all()
        many = jax.jit(jax.vmap(one))(jnp.stack([data[::-1], data]), np.stack([ids[::-1], ids]))
        assert same_bits(many[1], found)


def test_softmax_of_few_rows():
    rng = np.random.default_rng(0)
    for shape, segments in itertools.product([(57, 512), (2048, 3), (1,), (2000,)], (1, 31, 3000)):
        x, ids = jnp.asarray(4 * rng.standard_normal(shape), jnp.float32), rng.integers(-1, segments + 1, shape[0])
        both = lambda x, ids, n=segments: [
            fn(x, ids, n) for fn in (jaxgpuops.segment_softmax, jaxgpuops.segment_logsumexp)
        ]
        assert [call.plan["algorithm"] for call in jaxgpuops.explain(both, x, ids)] == ["cells", "cells"]
        found = jax.jit(both)(x, ids)
        with jax.default_device(cpu := jax.devices("cpu")[0]):
            theirs = both(jax.device_put(x, cpu), ids)
        for a, b in zip(found, theirs, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=3e-6, atol=1e-6)
        many = jax.jit(jax.vmap(both))(jnp.stack([x[::-1], x]), np.stack([ids[::-1], ids]))
        assert all(same_bits(of_all[1], own) for of_all, own in zip(many, found, strict=True))


def test_softmax_of_float64():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        for shape, segments in itertools.product([(57, 70), (1024, 3), (3000, 2)], (1, 31)):
            x, ids = 9 * rng.standard_normal(shape), rng.integers(-1, segments + 1, shape[0])
            both = lambda x, ids, n=segments: [
                fn(x, ids, n) for fn in (jaxgpuops.segment_softmax, jaxgpuops.segment_logsumexp)
            ]
            found = jax.jit(both)(x, ids)
            with jax.default_device(cpu := jax.devices("cpu")[0]):
                theirs = both(jax.device_put(x, cpu), ids)
            for a, b in zip(found, theirs, strict=True):
                np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-13)


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_softmax_of_16_bits_is_rounded_once(dtype, is_sorted):
    rng = np.random.default_rng(0)
    for shape, segments in [
        ((500, 3), 9),
        ((9000,), 300),
        ((3001, 7), 2000),
        ((70_001, 4), 900),
        ((100_001, 36), 9000),
    ]:
        x, ids = jnp.asarray(rng.standard_normal(shape), dtype), rng.integers(-1, segments + 1, shape[0])
        ids = np.sort(ids) if is_sorted else ids
        both = lambda x, ids, n=segments: [
            fn(x, ids, n, indices_are_sorted=is_sorted)
            for fn in (jaxgpuops.segment_softmax, jaxgpuops.segment_logsumexp)
        ]
        wide = x.astype(jnp.float32)
        plans = [[call.plan["algorithm"] for call in jaxgpuops.explain(both, y, ids)] for y in (x, wide)]
        assert plans[0] == plans[1]
        for ours, of_wide in zip(jax.jit(both)(x, ids), jax.jit(both)(wide, ids), strict=True):
            assert same_bits(ours, of_wide.astype(dtype))


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize(
    "shape, segments, algorithm",
    [
        ((9000,), 300, "cells"),
        ((300_001, 8), 30_000, "ordered"),
        ((3001, 7), 2000, "cells"),
        ((9001, 20), 150, "cells"),
        ((70_001, 4), 5, "cells"),
        ((70_001, 3), 40_000, "cells"),
        ((300_001, 3), 60_000, "cells"),
        ((800_001, 4), 5, None),
    ],
)
def test_softmax_of_many_rows(shape, segments, algorithm, is_sorted):
    """Tests tiles of rows, many of which belong to one segment; some have infinities or NaNs."""
    rng = np.random.default_rng(0)
    x = (30 * rng.standard_normal(shape)).astype(np.float32)
    for value in (np.inf, -np.inf, np.nan):
        x[rng.integers(0, shape[0], 3)] = value
    ids = rng.integers(-1, segments + 1, shape[0])
    ids = np.where(rng.random(shape[0]) < 0.5, segments // 2, ids)
    x[ids == segments // 2 + 1] = -np.inf
    x[(ids == segments // 2) & ~np.isfinite(x).reshape(shape[0], -1).all(1)] = -np.inf
    ids = np.sort(ids) if is_sorted else ids
    both = lambda x, ids: [
        fn(x, ids, segments, indices_are_sorted=is_sorted)
        for fn in (jaxgpuops.segment_softmax, jaxgpuops.segment_logsumexp)
    ]
    if is_sorted or algorithm:
        plans = [call.plan["algorithm"] for call in jaxgpuops.explain(both, x, ids)]
        assert plans == ["sorted" if is_sorted else algorithm] * 2
    found = jax.jit(both)(x, ids)
    with jax.default_device(cpu := jax.devices("cpu")[0]):
        theirs = both(jax.device_put(x, cpu), ids)
    for a, b in zip(found, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
    rows = jnp.stack([x + 1, jnp.asarray(x)])
    of_rows = np.stack([np.sort(np.roll(ids, 9)) if is_sorted else np.roll(ids, 9), ids])
    for many in (jax.jit(jax.vmap(both))(rows, of_rows), jax.jit(jax.vmap(both, in_axes=(0, None)))(rows, ids)):
        assert all(same_bits(of_all[1], own) for of_all, own in zip(many, found, strict=True))


def test_ids_of_a_byte():
    rng = np.random.default_rng(0)
    pairs, ids = jnp.asarray(rng.standard_normal((70_001, 2)), jnp.float32), rng.integers(0, 256, (5, 70_001))
    for segments, dtype in itertools.product((9, 255, 300), ("float32", "int32", "bfloat16")):
        pairs = pairs.astype(dtype)
        of = jax.jit(jax.vmap(lambda pairs, ids, n=segments: jaxgpuops.segment_sum(pairs, ids, n), in_axes=(None, 0)))
        assert same_bits(of(pairs, ids.astype(np.uint8)), of(pairs, ids.astype(np.int32)))


def test_specials():
    data = jnp.array([1, jnp.nan, -jnp.nan, 2, -jnp.inf, jnp.inf, -0.0, 0.0, 3], jnp.float32)
    ids = jnp.array([0, 0, 1, 2, 2, 2, 3, 3, 9])
    _, largest, smallest = reductions(data, ids, 5, False)
    np.testing.assert_array_equal(largest, [jnp.nan, jnp.nan, jnp.inf, 0, -jnp.inf])
    np.testing.assert_array_equal(smallest, [jnp.nan, jnp.nan, -jnp.inf, 0, jnp.inf])


@pytest.mark.parametrize("length, features, segments, is_sorted", SEGMENTS.values(), ids=SEGMENTS)
def test_sums_are_the_same_in_every_batch_and_run(length, features, segments, is_sorted):
    ids = drawn("hot", (length,), segments, 0)
    ids = jnp.sort(ids) if is_sorted else ids
    data = jax.random.normal(jax.random.key(2), (3, length, *features))
    one = lambda data, ids: jaxgpuops.segment_sum(data, ids, segments, indices_are_sorted=is_sorted)
    alone = jnp.stack([jax.jit(one)(x, ids) for x in data])
    assert same_bits(jax.jit(jax.vmap(one, in_axes=(0, None)))(data, ids), alone)
    assert same_bits(jax.jit(jax.vmap(one))(data, jnp.stack([ids] * 3)), alone)
    if features:
        bf16 = data[0].astype(jnp.bfloat16)
        wide = jax.jit(one)(bf16.astype(jnp.float32), ids)
        error = jnp.max(abs(jax.jit(one)(bf16, ids).astype(jnp.float32) - wide))
        assert error <= jnp.max(abs(wide)) / 128


def command_buffers():
    for name, (length, features, segments, is_sorted) in SEGMENTS.items():
        fn = lambda data, ids: jaxgpuops.segment_sum(data, ids, segments, indices_are_sorted=is_sorted)
        program = jax.jit(lambda data, ids: [fn(data + i, ids) for i in range(2)])
        for seed in range(2):  # new inputs, at new addresses
            ids = drawn("hot", (length,), segments, seed)
            ids = jnp.sort(ids) if is_sorted else ids
            data = jax.random.randint(jax.random.key(seed), (length, *features), -9, 10).astype(jnp.float32)
            for i, result in enumerate(program(data, ids)):
                assert (result == jax.ops.segment_sum(data + i, ids, segments)).all(), (name, seed, i)
    for name, (shape, bins) in COUNTS.items():
        x = drawn("hot", shape, bins, 5)
        assert (np.asarray(jax.jit(count, static_argnums=1)(x, bins)) == expected_counts(x, bins)).all(), name


def test_command_buffers_with_changing_inputs():
    run_in_command_buffers("test_gpu_count")


CHOICES = [
    (1, 5),
    (7, 300),
    (9, 16_369),
    (300, 5001),
    (3, 16_385),
    (5, 20_001),
    (2, 1_000_003),
    (5, 0),
    (1, 70_000_001),
]


@pytest.mark.parametrize(
    "shape, dtype",
    [(shape, None) for shape in CHOICES]
    + [(shape, dtype) for shape in CHOICES[:-1] for dtype in ("uint8", "float16", "float32", "int64")],
)
def test_choose(shape, dtype):
    """Rows of odd lengths begin anywhere in a vector. Where a result is too short for all places, it has the first;
    where it is longer, blocks without elements fill it. With a dtype, elements that differ from the one before are
    chosen."""
    rng = np.random.default_rng(0)
    rows, length = shape
    rising = np.linspace(0, 1, length, dtype=np.float32)
    for share, size in itertools.product((0, 0.01, rising, 1), (length // 9, length + 7, length + 40_000)):
        mask = rng.random(shape, np.float32) < share
        x = mask
        if dtype is not None:  # the elements of a run are equal to each other
            mask[:, :1] = True
            x = mask.cumsum(1).astype(dtype) if dtype != "uint8" else (mask.cumsum(1) % 251).astype(dtype)
        if dtype in ("float16", "float32"):  # so are zeros and NaNs of both signs
            number = mask.cumsum(1) % 7
            sign = np.where(rng.random(shape, np.float32) < 0.5, -1, 1).astype(dtype)
            x = np.where(number == 0, np.zeros((), dtype), np.where(number == 1, np.nan, number).astype(dtype))
            x = np.where(number < 2, np.copysign(x, sign), x)
        expected = np.full((rows, size), -5, np.int32)
        for row, own in zip(mask, expected, strict=True):
            places = np.flatnonzero(row)[:size]
            own[: len(places)] = places
        with jax.enable_x64(dtype == "int64"):
            if dtype is None:
                np.testing.assert_array_equal(choose(x, size, -5), expected)
                continue
            # The place of each element stands for the second array.
            place = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
            fill = np.full((1, 1), -5, np.int32)
            own, places, counts = pick(x, [x, place], [np.full((rows, 1), 3, dtype), fill], size, starts=True)
            np.testing.assert_array_equal(places, expected)
            taken = np.take_along_axis(x, np.maximum(expected, 0), 1) if length else np.zeros((rows, size), dtype)
            np.testing.assert_array_equal(_bits(own), _bits(np.where(expected < 0, np.full((), 3, dtype), taken)))
            for row, found in zip(mask, np.asarray(counts), strict=True):
                wanted = np.diff(np.append(np.flatnonzero(row), length))[:size]
                np.testing.assert_array_equal(found, np.pad(wanted, (0, size - len(wanted))))


def _bits(x):
    x = np.asarray(x)
    return x.view(f"uint{8 * x.itemsize}")


@pytest.mark.parametrize("dtypes", [("uint8", "int32"), ("float16", "float32"), ("int64", "uint16")])
@pytest.mark.parametrize("shape", CHOICES[:-1])
def test_pick(shape, dtypes):
    """The elements of two arrays where a mask is True."""
    rng = np.random.default_rng(0)
    rows, length = shape
    for share, size in itertools.product((0, 0.01, 0.7), (length // 9, length + 40_001)):
        mask = rng.random(shape, np.float32) < share
        arrays = [rng.integers(0, 99, shape).astype(dtype) for dtype in dtypes]
        fills = [
            np.arange(rows).reshape(rows, 1).astype(dtypes[0]),
            arrays[1] if length else np.full((1, 1), 7, dtypes[1]),
        ]
        with jax.enable_x64(True):
            found = pick(mask, arrays, fills, size)
        for array, fill, out in zip(arrays, fills, found, strict=True):
            fill = np.broadcast_to(fill, (rows, max(length, 1)))
            for own, of_row, chosen, filling in zip(np.asarray(out), array, mask, fill):
                wanted = of_row[chosen][:size]
                last = filling[np.argmax(chosen) if length else 0]  # at the first place
                np.testing.assert_array_equal(own, np.pad(wanted, (0, size - len(wanted)), constant_values=last))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bfloat16", "uint8"])
@pytest.mark.parametrize("different", [1, 7, 200, 300, 512, 513, 1 << 30])
def test_unique_of_long_rows(dtype, different):
    """Few different elements are found by tables, more by a sort. Of zeros, and of NaNs, the first is kept."""
    rng = np.random.default_rng(different)
    with jax.enable_x64(True):
        for n, size in ((1 << 19, 300), (600_001, 700_000)):
            numbers = rng.integers(0, min(different, 1 << 40), n)
            x = jnp.asarray(numbers % 251 if dtype == "uint8" else numbers - different // 3, dtype)
            if jnp.issubdtype(x.dtype, jnp.floating) and different > 1:
                sign = jnp.asarray(np.where(rng.random(n) < 0.5, -1, 1), dtype)
                x = jnp.where(x == 2, jnp.copysign(jnp.asarray(jnp.nan, dtype), sign), jnp.where(x == 0, x * sign, x))
            operands = {False: (x,), True: (x, jnp.full(1, 9, dtype))}[size > n]
            for index, inverse in ((False, False), (True, True)):
                params = {"axis": 0, "size": size, "index": index, "inverse": inverse}
                found = jax.jit(functools.partial(unique_p, **params))(*operands)
                wanted = jax.jit(functools.partial(unique_p.fallback, **params))(*operands)
                for y, own in zip(wanted, found, strict=True):
                    np.testing.assert_array_equal(_bits(own), _bits(y))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bfloat16", "uint8"])
@pytest.mark.parametrize("rows, n, size", [(1, 1, 3), (1, 33, 140_000), (5, 700, 300), (1, 1024, 1024)])
def test_unique_of_short_rows(dtype, rows, n, size):
    """These are compared. Of zeros, and of NaNs, the first is kept; rows have fills of their own."""
    rng = np.random.default_rng(n)
    with jax.enable_x64(True):
        for different in (1, 40, 1 << 30):
            x = jnp.asarray(rng.integers(0, min(different, 250 if dtype == "uint8" else different), (rows, n)), dtype)
            if jnp.issubdtype(x.dtype, jnp.floating) and different > 1:
                sign = jnp.asarray(np.where(rng.random((rows, n)) < 0.5, -1, 1), dtype)
                x = jnp.where(x == 2, jnp.copysign(jnp.asarray(jnp.nan, dtype), sign), jnp.where(x == 0, x * sign, x))
            for operands, index, inverse in itertools.product(((x,), (x, x[:, :1])), *((False, True),) * 2):
                params = {"axis": 1, "size": size, "index": index, "inverse": inverse}
                found = jax.jit(functools.partial(unique_p, **params))(*operands)
                wanted = jax.jit(functools.partial(unique_p.fallback, **params))(*operands)
                for y, own in zip(wanted, found, strict=True):
                    np.testing.assert_array_equal(_bits(own), _bits(y))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int32"])
@pytest.mark.parametrize("n", [(1 << 19) + 1, 2_000_003])
def test_few_of_many_different_elements(dtype, n):
    """The least elements are enough, unless too many of them are equal. Of zeros, and of NaNs, the first is kept."""
    rng = np.random.default_rng(n)
    with jax.enable_x64(True):
        normal = jnp.asarray(rng.normal(0, 1 << 20, n), dtype)
        rising, half = jnp.sort(normal), jnp.where(rng.random(n) < 0.5, jnp.zeros_like(normal), abs(normal))
        cases = [
            normal,
            rising,
            rising[::-1],
            half,
            jnp.concatenate([rising[: n // 2], jnp.full(n - n // 2, 3, dtype)]),
        ]
        if jnp.issubdtype(dtype, jnp.floating):
            sign = jnp.asarray(np.where(rng.random(n) < 0.5, -1, 1), dtype)
            some = jnp.where(rng.random(n) < 1e-3, 0 * sign, abs(normal))
            cases += [some, -some, jnp.where(half == 0, jnp.nan * sign, -half), jnp.full(n, jnp.nan)]
        for x, size in itertools.product(cases, (1, 700)):
            params = {"axis": 0, "size": size, "index": False, "inverse": False}
            found = jax.jit(functools.partial(unique_p, **params))(x)
            wanted = jax.jit(functools.partial(unique_p.fallback, **params))(x)
            for y, own in zip(wanted, found, strict=True):
                np.testing.assert_array_equal(_bits(own), _bits(y))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "uint8", "int16"])
@pytest.mark.parametrize(
    "rows, n, size", [(1, 3, 9), (1, 4096, 70), (3, 16_384, 17_000), (1, 70_001, 90_000), (1, 1 << 20, 300)]
)
def test_unique_by_counts(dtype, rows, n, size):
    """The first of equal zeros, and of NaNs, is kept; each row has a fill of its own."""
    rng = np.random.default_rng(n)
    for different in (2, 50, 1 << 16):
        key = rng.integers(0, different, (rows, n)).astype(np.uint16)
        key = key.astype(np.uint8) if dtype == "uint8" else key * np.uint16(65_535 // different)
        x = jax.lax.bitcast_convert_type(jnp.asarray(key), dtype)
        for operands in ((x,), (x, x[:, :1])):
            params = {"axis": 1, "size": size, "index": False, "inverse": False}
            found = jax.jit(functools.partial(unique_p, **params))(*operands)
            wanted = jax.jit(functools.partial(unique_p.fallback, **params))(*operands)
            for y, own in zip(wanted, found, strict=True):
                np.testing.assert_array_equal(_bits(own), _bits(y))


# (shape of the queries, shape of the sorted rows), along axis 1
SEARCHES = {
    "one row": ((1, 3_000_001), (1, 1_000_003)),
    "rows": ((300, 4000), (300, 5001)),
    "shared": ((300, 4000), (1, 5001)),
    "rows of keys": ((2, 3_000_001), (2, 60_001)),
    "columns": ((3, 400, 70), (3, 1001, 70)),
    "shared columns": ((3, 400, 70), (3, 1001, 1)),
    "one element": ((5, 300), (5, 1)),
    "a row a block": ((3, 70_001), (3, 9)),
    "rows a block": ((1000, 68), (1000, 47)),
    "shorter rows a block": ((5003, 3), (5003, 5)),
    "one query": ((5003, 1), (5003, 2)),
    "two queries": ((150_003, 2), (150_003, 3)),
    "a warp each": ((7, 40), (7, 5001)),
    "a warp each in short rows": ((7, 40), (7, 65)),
    "a warp each in columns": ((3, 31, 7), (3, 65, 7)),
    "few queries of a row": ((150_001, 7), (150_001, 14)),
    "none": ((5, 300), (5, 0)),
}


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("queries, rows", SEARCHES.values(), ids=SEARCHES)
def test_searchsorted(queries, rows, side, dtype):
    rng = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        draw = lambda shape: rng.integers(-100, 100, shape).astype(dtype)
        queries, rows = draw(queries), np.sort(draw(rows), 1)
        if dtype != "int8":
            queries[:, :3], rows[:, -2:] = np.nan, np.nan
        places = np.asarray(jaxgpuops.searchsorted(rows, queries, side, axis=1))
        in_order = np.asarray(jaxgpuops.searchsorted(rows, jnp.sort(queries, 1), side, axis=1))
        np.testing.assert_array_equal(in_order, np.sort(places, 1))
        # A block whose first queries are in order must also find queries that are not.
        mostly = jnp.sort(queries, 1)[:, ::-1].at[:, 5000::7001].set(queries[:, 5000::7001])
        found = np.asarray(jaxgpuops.searchsorted(rows, mostly, side, axis=1))
        expected = np.sort(places, 1)[:, ::-1].copy()
        expected[:, 5000::7001] = places[:, 5000::7001]
        np.testing.assert_array_equal(found, expected)
        rows = np.broadcast_to(rows, (queries.shape[0], rows.shape[1], *queries.shape[2:]))
        rows, queries, places = (np.moveaxis(x.astype(np.float64), 1, -1) for x in (rows, queries, places))
        for place in np.ndindex(rows.shape[:-1]):
            np.testing.assert_array_equal(places[place], np.searchsorted(rows[place], queries[place], side))
