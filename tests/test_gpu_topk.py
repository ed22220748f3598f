"""Top-k on a GPU: see gpu.py."""

import functools
import itertools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from gpu import (
    busy_stream,
    expected_topk,
    in_subprocess,
    memory,
    needs_memory,
    plan,
    run_in_command_buffers,
    same_bits,
    spread,
)

import jaxgpuops
from jaxgpuops import _primitive
from jaxgpuops.lax.along_axis import put_along_axis

# Every kernel and form of it: (shape, axis, k).
REGIMES = {
    "argmax, teams": ((300, 9), 1, 1),
    "argmax, teams of two windows": ((3000, 130), 1, 1),
    "argmax, teams of four windows": ((2000, 477), 1, 1),
    "argmax, teams of whole rows": ((20_000, 64), 1, 1),
    "argmax, two rows in a vector": ((30_001, 4), 1, 1),
    "argmax, four rows in a vector": ((30_003, 2), 1, 1),
    "argmax, few elements of long rows": ((7, 3003), 1, 1),
    "argmax, slices of long rows": ((2, 100_003), 1, 1),
    "argmax, slices of one row": ((1, 1_000_003), 1, 1),
    "argmax, a cluster a column": ((2, 40_001, 3), 1, 1),
    "argmax, few elements of columns": ((9, 31, 7), 1, 1),
    "argmax, a block a column": ((1, 901, 3), 1, 1),
    "argmax, tiles": ((9000, 1100), 1, 1),
    "argmax, tiles of columns": ((30_000, 7, 11), 1, 1),
    "argmax, a warp a row": ((3000, 1001), 1, 1),
    "argmax, a block a row": ((300, 5003), 1, 1),
    "argmax, a larger block a row": ((60, 20_003), 1, 1),
    "argmax, a cluster a row": ((7, 30_001), 1, 1),
    "argmax, rows": ((500, 70_001), 1, 1),
    "argmax, shared rows": ((2, 3_000_001), 1, 1),
    "argmax, columns": ((400, 3001, 6), 1, 1),
    "argmax, shared columns": ((1, 2_500_001, 3), 1, 1),
    "argmax, shared columns of many elements": ((1, 5_600_001, 3), 1, 1),
    "argmax, a column in which sectors are few": ((700, 2049, 2), 1, 1),
    "argmax, two columns that small blocks merge": ((1, 400_001, 2), 1, 1),
    "argmax, long rows of columns": ((3, 301, 8 * 1031), 1, 1),
    "argmax, strided": ((2, 5003, 1001), 1, 1),
    "argmax, strided, not large": ((20, 300, 512), 1, 1),
    "argmax, words of columns": ((4, 1003, 1001), 1, 1),
    "argmax, aligned words of columns": ((2, 1500, 1002), 1, 1),
    "argmax, a thread a column": ((200, 5, 2501), 1, 1),
    "argmax, a thread a vector of columns": ((4, 19, 70_000), 1, 1),
    "argmax, several threads a vector of columns": ((1, 64, 140_000), 1, 1),
    "argmax, a large cluster a row": ((3, 150_001), 1, 1),
    "argmax, blocks share two rows": ((2, 300_001), 1, 1),
    "argmax, two columns that warps merge": ((1, 3_500_001, 2), 1, 1),
    "argmax, four columns that warps merge": ((1, 1_700_001, 4), 1, 1),
    "rows, sorting networks": ((30_000, 61), 1, 5),
    "rows, 4 lanes": ((30_000, 100), 1, 2),
    "rows, 8 lanes": ((30_000, 250), 1, 8),
    "rows, 16 lanes": ((3000, 501), 1, 32),
    "rows, 32 lanes": ((3000, 1000), 1, 64),
    "rows, a block a row": ((3000, 4096), 1, 64),
    "rows, a block for each of few rows": ((200, 4096), 1, 64),
    "rows, larger blocks": ((600, 16_001), 1, 50),
    "rows, whole vectors": ((600, 16_000), 1, 50),
    "rows, 32 lanes, whole vectors": ((600, 1024), 1, 40),
    "rows, more than 64 of a row": ((300, 5001), 1, 100),
    "rows, more than 64, whole vectors": ((300, 16_000), 1, 128),
    "rows, columns": ((7, 3001, 4), 1, 20),
    "rows, short columns": ((40, 300, 5), 1, 9),
    "rows, more than 64 of a column": ((5, 8001, 6), 1, 90),
    "held, long rows": ((6, 200_003), 1, 40),
    "sort, a thread a row": ((400_000, 15), 1, 15),
    "sort, a few lanes": ((3000, 100), 1, 97),
    "sort, a warp": ((700, 500), 1, 500),
    "sort, a block": ((300, 5003), 1, 3000),
    "sort, few of many": ((700, 2003), 1, 140),
    "sort, columns": ((5, 290, 70), 1, 290),
    "sort, a part of a warp": ((3000, 200), 1, 70),
    "sort, few columns": ((3000, 100, 3), 1, 70),
    "few, a lane a column": ((3000, 11, 22), 1, 2),
    "few, lanes share columns": ((40, 121, 70), 1, 7),
    "few, a block for eight columns": ((70, 6001, 12), 1, 5),
    "few, smaller blocks for eight columns": ((180, 4101, 12), 1, 3),
    "few, rows": ((300, 201), 1, 3),
    "few, tiles of rows": ((40_001, 27), 1, 3),
    "few, tiles of rows with gaps": ((40_001, 22), 1, 2),
    "few, several short rows a lane": ((600_001, 2), 1, 2),
    "short": ((300, 5, 1000), 1, 3),
    "compare": ((9, 300), 1, 90),
    "compare, a row of many blocks": ((1, 3001), 1, 1000),
    "compare, columns": ((3, 170, 50), 1, 40),
    "compare, 4 lanes a row": ((1003, 3), 1, 2),
    "compare, 8 lanes a row": ((1003, 7), 1, 7),
    "compare, 16 lanes a column": ((11, 13, 9), 1, 5),
    "compare, a warp a row": ((70, 19), 1, 18),
    "compare, two elements a lane": ((70, 61), 1, 20),
    "compare, four warps a row": ((70, 101), 1, 40),
    "compare, four warps a column": ((3, 70, 50), 1, 40),
    "held, a block a row": ((256, 32_000), 1, 10),
    "held, cluster": ((64, 128_256), 1, 50),
    "held, eight blocks": ((8, 100_003), 1, 64),
    "stream, a block a row": ((600, 33_001), 1, 50),
    "stream, cluster": ((17, 511_133), 1, 59),
    "stream, a guess": ((300, 131_072), 1, 138),
    "stream, large k": ((600, 30_001), 1, 2048),
    "buckets, few of columns that lie apart": ((1, 3_000_001, 3), 1, 50),
    "sieve, two rows": ((2, 1_500_003), 1, 721),
    "sieve, columns that are transposed": ((1, 20_001, 3), 1, 300),
    "wave, columns that are transposed": ((1, 200_001, 3), 1, 50),
    "rows, columns that are transposed": ((1, 7107, 165), 1, 11),
    "stream, columns that are transposed": ((1, 8192, 47), 1, 354),
    "sort, a warp selects": ((3000, 700), 1, 100),
    "sort, a warp selects hundreds": ((3000, 700), 1, 300),
    "sort, a warp selects from a column": ((20, 700, 9), 1, 100),
    "sort, a warp selects from a short column": ((300, 300, 9), 1, 84),
    "buckets, which the sample divides": ((2, 524_288), 1, 4_131),
    "sieve, small k": ((58, 22_091), 1, 73),
    "sieve, small k in shared rows": ((17, 150_003), 1, 90),
    "wave": ((3, 100_003), 1, 50),
    "wave, five rows": ((5, 2_000_003), 1, 90),
    "wave, one row": ((1, 1_000_003), 1, 120),
    "wave, no few candidates": ((1, 262_144), 1, 128),
    "sieve": ((100, 66_003), 1, 2048),
    "sieve, rows of 16 bits whole": ((100, 50_003), 1, 2048),
    "sieve, rows of few steps": ((100, 17_003), 1, 700),
    "sieve, shared rows": ((3, 2_000_003), 1, 300),
    "sieve, an odd number of blocks": ((44, 100_003), 1, 300),
    "sieve, one row": ((1, 5_000_003), 1, 2048),
    "sieve, thousands": ((100, 70_003), 1, 4096),
    "sieve, thousands of 16 bits": ((100, 65_536), 1, 4000),
    "columns": ((16, 4093, 130), 1, 32),
    "streamed columns": ((64, 4093, 250), 1, 32),
    "held, columns that are transposed": ((1, 20_003, 7), 1, 20),
    "buckets": ((3, 300_001), 1, 20_000),
    "buckets, one row": ((1, 5_000_003), 1, 25_000),
    "buckets, more rows than blocks": ((300, 36_001), 1, 2_500),  # of 16 bits
    "radix, many rows": ((150, 20_001), 1, 4_000),
    "buckets, columns": ((1, 300_001, 3), 1, 9_000),
    "buckets, many columns": ((40, 50_001, 21), 1, 500),
    "buckets, few of columns": ((1, 1_300_003, 7), 1, 20),
    "buckets, as many columns as possible": ((1, 70_001, 128), 1, 300),
    "digits": ((300, 9001), 1, 800),
    "digits, shared rows in the order of indices": ((5, 60_001), 1, 900),
    "digits, columns of 16 bits; strided stream": ((20, 5001, 7), 1, 200),
    "radix": ((3, 1_000_003), 1, 200_000),
    "radix, blocks sort what is chosen": ((70, 70_001), 1, 7_600),
    "radix, columns": ((1, 100_001, 140), 1, 4_100),
    "columns that are transposed": ((2, 13_001, 180), 1, 700),
    "few columns that are transposed": ((20, 20_001, 13), 1, 700),
    "block, nearly all of rows that a block sorts": ((300, 9001), 1, 9000),
    "half of a row": ((5, 20_001), 1, 15_000),
    "most of rows of 64 bits": ((3, 70_001), 1, 69_000),
    "most of columns": ((1, 70_001, 3), 1, 60_000),
}
regimes = pytest.mark.parametrize("shape, axis, k", REGIMES.values(), ids=REGIMES)


def test_every_kernel_has_a_regime():
    found = set()
    for shape, axis, k in REGIMES.values():
        fn = functools.partial(jaxgpuops.topk, k=k, axis=axis)
        found.add(plan(fn, jax.ShapeDtypeStruct(shape, jnp.float32))["algorithm"])
    assert found == {"argmax", "rows", "few", "sort", "compare", "held", "stream", "wave", "sieve"} | {
        "columns",
        "buckets",
        "digits",
        "radix",
        "short",
        "block",
        "sweep",
    }


# ---- Values, at sizes that would take minutes on a CPU ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@regimes
def test_adversarial(shape, axis, k, dtype):
    distributions = reference.adversarial(np.random.default_rng(0), shape[axis], jnp.dtype(dtype))
    names, rows = list(distributions), jnp.asarray(np.stack(list(distributions.values())))
    lanes = math.prod(shape) // shape[axis]
    for largest, sorted in [(True, True), (False, False)]:
        expected = jax.jit(expected_topk, static_argnums=(1, 2, 3, 4))(rows, k, 1, largest, sorted)
        fn = jax.jit(lambda x: jaxgpuops.topk(x, k, axis=axis, largest=largest, sorted=sorted))
        for shift in range(0, len(rows), lanes):
            wanted = jax.tree.map(lambda e: spread(e, shape, axis, shift), expected)
            assert same_bits(tuple(fn(spread(rows, shape, axis, shift))), wanted), names[shift : shift + lanes]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float64"])
@regimes
def test_other_widths(shape, axis, k, dtype):
    with jax.enable_x64(dtype == "float64"):
        key = jax.random.key(0)
        if dtype == "float64":
            x = jax.random.normal(key, shape, dtype)
        else:
            x = jax.random.bits(key, shape, f"uint{8 * jnp.dtype(dtype).itemsize}").astype(dtype)
        values, indices = jaxgpuops.topk(x, k, axis=axis)
        order = ~x if dtype != "float64" else -x  # descending
        iota = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        expected = jax.lax.sort((order, iota), dimension=axis, is_stable=True, num_keys=1)[1]
        expected = jax.lax.slice_in_dim(expected, 0, k, axis=axis)
        assert (indices == expected).all()
        assert (values == jnp.take_along_axis(x, expected, axis)).all()


@pytest.mark.parametrize("length", [1024, 2047, 8192])
@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_rows_of_64_bits(dtype, length):
    """Rows of 64 bits that a warp or a block holds, also those in which many elements tie."""
    with jax.enable_x64(True):
        rows = reference.adversarial(np.random.default_rng(0), length, jnp.dtype(dtype))
        x = np.stack(list(rows.values()))
        for k, largest, in_order in [(2, True, True), (33, False, True), (64, True, False)]:
            result = jaxgpuops.topk(x, k, largest=largest, sorted=in_order)
            assert same_bits(tuple(result), reference.topk(x, k, 1, largest, in_order)), (k, largest)


@pytest.mark.parametrize("k", [100, 700])
@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_rows_in_order(dtype, k):
    """The first tile of `stream` tells little about such rows; scattered elements do."""
    n = 30_001
    place = np.arange(n)
    x = np.stack([place, -place, place // 600, -place // 600, place % 600, np.zeros(n), place // 7500])
    x = np.tile(x, (10, 1)).astype(dtype)  # so many rows have a block each
    with jax.enable_x64(True):
        for largest, sorted in [(True, True), (False, False)]:
            fn = functools.partial(jaxgpuops.topk, k=k, largest=largest, sorted=sorted)
            if sorted or k < 512:
                assert plan(fn, x)["algorithm"] == "stream"
            assert same_bits(tuple(fn(x)), reference.topk(x, k, 1, largest, sorted)), (largest, sorted)


@pytest.mark.parametrize("outer, length, k", [(60, 16_384, 53), (60, 4096, 64), (700, 4096, 20), (60, 4112, 128)])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_rows_of_bytes(dtype, outer, length, k):
    """Rows that a block holds, of so few values that many elements tie."""
    distributions = reference.adversarial(np.random.default_rng(0), length, jnp.dtype(dtype))
    x = np.stack([*distributions.values()] * (outer // 20))[:outer]
    assert plan(functools.partial(jaxgpuops.topk, k=k), jnp.asarray(x))["algorithm"] == "rows"
    for largest, in_order in [(True, True), (False, True), (True, False)]:
        result = jaxgpuops.topk(x, k, largest=largest, sorted=in_order)
        assert same_bits(tuple(result), reference.topk(x, k, 1, largest, in_order)), largest


@pytest.mark.parametrize("length, k", [(129, 20), (1001, 40), (2041, 128), (5465, 74), (16_370, 64), (16_383, 64)])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "bfloat16"])
def test_rows_within_vectors(dtype, length, k):
    """Rows of narrow keys begin and end within vectors; the first row may, too. Keys of 0 tie with what is missing."""
    rows = reference.adversarial(np.random.default_rng(0), length, jnp.dtype(dtype))
    least = -np.nan if dtype == "bfloat16" else np.iinfo(dtype).min
    x = np.stack([*rows.values(), np.full(length, least).astype(jnp.dtype(dtype))])
    fn = jax.jit(jaxgpuops.topk, static_argnames=("k", "largest", "sorted"))
    for largest, in_order in [(True, True), (False, False)]:
        result = fn(x, k=k, largest=largest, sorted=in_order)
        assert same_bits(tuple(result), reference.topk(x, k, 1, largest, in_order)), largest


@pytest.mark.parametrize("length, k", [(1000, 20), (1458, 9), (2048, 10), (4096, 30), (8192, 60), (8192, 120)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32"])
def test_rows_of_ties(dtype, length, k):
    """So many elements tie with the threshold that only the first are taken. Negative NaNs rank below all others."""
    random = np.random.default_rng(0)
    few = np.round(2 * random.standard_normal((6, length)))
    few[1] = 1
    few[2] = np.arange(length) // 40
    x = jnp.asarray(few, dtype)
    if dtype == "int32":
        x = x.at[1].set(np.iinfo(dtype).max)
    else:
        x = x.at[3, ::30].set(np.nan).at[3, 1::31].set(-np.nan).at[4, ::3].set(-np.nan).at[5].set(np.nan)
    fn = jax.jit(jaxgpuops.topk, static_argnames=("k", "largest", "sorted"))
    assert plan(functools.partial(jaxgpuops.topk, k=k), x)["algorithm"] == "rows"
    for largest, in_order in [(True, True), (False, True), (True, False)]:
        result = fn(x, k=k, largest=largest, sorted=in_order)
        expected = reference.topk(np.asarray(x), k, 1, largest, in_order)
        assert same_bits(tuple(result), expected), (largest, in_order)


@pytest.mark.parametrize("dtype", ["int8", "int16", "bfloat16", "float32"])
def test_lengths(dtype):
    """Blocks guess thresholds from the first tiles that they read, which may be padding or all that is not."""
    rows, n, k = 455, 131_072, 138
    about = [tile + more for tile in range(0, n, 4096) for more in (-1, 0, 1, 900, 1000, 1700, 3000)]
    lengths = jnp.clip(jnp.asarray([*about, *range(n, n + rows)][:rows], jnp.int32), 0, n)
    x = (30 * jax.random.normal(jax.random.key(0), (rows, n))).astype(dtype)
    fn = functools.partial(jaxgpuops.topk, k=k)
    assert plan(fn, x)["algorithm"] == "stream"
    values, indices = fn(x, lengths=lengths)
    own = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < lengths[:, None]
    least = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(dtype).min
    wanted = jax.lax.top_k(jnp.where(own, x, jnp.asarray(least, dtype)), k)
    there = jax.lax.broadcasted_iota(jnp.int32, (rows, k), 1) < lengths[:, None]
    assert (indices == jnp.where(there, wanted[1], -1)).all()
    assert jnp.where(there, values == wanted[0], True).all()


def _sampled(count, length):
    """The places that scatter.cuh gives."""
    mixed = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B1)
    mixed = (mixed ^ mixed >> 15) * np.uint32(0x85EBCA77)
    mixed = (mixed ^ mixed >> 13) * np.uint32(0xC2B2AE3D)
    return mixed.astype(np.uint64) * np.uint64(length) >> np.uint64(32)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_keys_beyond_the_sample(dtype, in_order):
    """The sample of `digits` tells the range of the keys. The k-th key may be above it, or below, or the one key."""
    n, k = 20_001, 2400
    place, random = _sampled(2048, n), np.random.default_rng(0).integers(1, 1 << 20, n)
    x = np.stack([random, -random, random % 3, random, np.full(n, 7), random, random])
    x[0, place], x[1, place], x[2, place] = 0, 0, 1
    x[3, 0], x[3, 1] = np.iinfo(np.int32).max, np.iinfo(np.int32).min
    x = x.astype(dtype)
    fn = functools.partial(jaxgpuops.topk, k=k, sorted=in_order)
    assert plan(fn, x)["algorithm"] == "digits"
    for largest in (True, False):
        result = jaxgpuops.topk(x, k, largest=largest, sorted=in_order)
        assert same_bits(tuple(result), reference.topk(x, k, 1, largest, in_order)), largest


def test_samples_that_mislead():
    """Where the sampled elements of `buckets` are the largest, too few reach the threshold, and where they are the
    least, too many."""
    n, k = 300_001, 12_000
    place = _sampled(512 * 16, n)
    x = np.zeros((3, n), np.float32)
    x[0, place], x[1, place], x[2] = 1, -1, np.random.default_rng(0).standard_normal(n)
    assert plan(functools.partial(jaxgpuops.topk, k=k), x)["algorithm"] == "buckets"
    assert same_bits(tuple(jaxgpuops.topk(x, k)), tuple(jax.lax.top_k(x, k)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape, k", [((400, 150), 130), ((700, 600), 90), ((3000, 700), 400), ((900, 3000), 700)])
def test_zeros_of_both_signs(dtype, shape, k):
    """`sort` sorts words that have only some bits of each key. They must tell -0 from 0 even if keys have a large range."""
    random = np.random.default_rng(0)
    zeros = np.where(random.random(shape) < 0.5, 0.0, -0.0)
    with jax.enable_x64(dtype == "float64"):
        for others in (np.round(4 * random.standard_normal(shape)) / 4, 1e30 * random.standard_normal(shape)):
            x = jnp.asarray(np.where(random.random(shape) < 0.3, zeros, others), dtype)
            assert plan(functools.partial(jaxgpuops.topk, k=k), x)["algorithm"] == "sort"
            for largest, sorted in [(True, True), (False, True), (True, False)]:
                expected = expected_topk(x, k, 1, largest, sorted)
                assert same_bits(tuple(jaxgpuops.topk(x, k, largest=largest, sorted=sorted)), tuple(expected)), largest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows, length, k", [(4, 65_536, 433), (7, 98_982, 238), (161, 32_768, 659), (3, 700_001, 600)])
def test_rows_in_order_of_sieve(dtype, rows, length, k):
    """The largest elements of a row stand together, and maybe between the parts that `sieve` samples."""
    rising = jnp.broadcast_to(jnp.linspace(-3, 3, length, dtype=dtype), (rows, length))
    for x in (rising, -rising):
        for sorted in (True, False):
            expected = expected_topk(x, k, 1, True, sorted)
            assert same_bits(tuple(jaxgpuops.topk(x, k, sorted=sorted)), tuple(expected)), sorted


@pytest.mark.parametrize("rows, length, k", [(3, 500_003, 433), (3, 500_003, 2500), (140, 70_003, 700)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_keys_of_few_bits(dtype, rows, length, k):
    """Where keys take few values, `sieve` divides them by their indices. Single keys may have more bits than its sample
    shows."""
    random = np.random.default_rng(0)
    quarters = np.round(4 * random.standard_normal((rows, length))) / (1 if dtype == "int32" else 4)
    odd = quarters.copy()
    odd[:, random.integers(0, length, 40)] += np.arange(40) / (1 if dtype == "int32" else 32)
    fn = functools.partial(jaxgpuops.topk, k=k)
    assert plan(fn, jax.ShapeDtypeStruct((rows, length), dtype))["algorithm"] == "sieve"
    for x in (quarters, odd):
        x = jnp.asarray(x, dtype)
        for largest, sorted in [(True, True), (False, False)]:
            expected = expected_topk(x, k, 1, largest, sorted)
            assert same_bits(tuple(jaxgpuops.topk(x, k, largest=largest, sorted=sorted)), tuple(expected)), largest


@pytest.mark.parametrize("dtype", ["int8", "float16", "int32", "float64"])
@pytest.mark.parametrize("k", [5, 90, 120])
def test_ties_below_a_few_elements(dtype, k):
    """Few elements are larger than many equal ones, of which `wave` publishes only some."""
    n = 1_200_003
    place = np.arange(n)
    x = np.stack([24 - place // 40_000, place // 40_000, np.where(place % 100_000 == 7, 40 + place // 300_000, 3)])
    x[0, 0] = 100
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(x, dtype)
        assert plan(functools.partial(jaxgpuops.topk, k=k), x)["algorithm"] == "wave"
        for largest, sorted in [(True, True), (False, False)]:
            expected = expected_topk(x, k, 1, largest, sorted)
            assert same_bits(tuple(jaxgpuops.topk(x, k, largest=largest, sorted=sorted)), tuple(expected)), largest


@pytest.mark.parametrize(
    "shape, dtype",
    [
        *itertools.product([(1, 1_200_003), (3, 300_001)], ["uint8", "bfloat16", "float32", "int64"]),
        *itertools.product([(20, 270_001)], ["float32", "int64"]),  # rows of fewer bits take other kernels
    ],
)
def test_where_neighbours_are_the_largest(shape, dtype):
    """Rows in order, whose largest elements are in their middle, or equal: blocks of `wave` share these elements."""
    rows, n = shape
    place = np.arange(n)
    kinds = [place, n - place, -abs(place - n // 3), place // 9, np.where(place % 50_000 < 30, 9, place % 7), 0 * place]
    for start in range(0, len(kinds), rows):
        x = np.stack([kinds[(start + row) % len(kinds)] for row in range(rows)])
        with jax.enable_x64(dtype == "int64"):
            x = jnp.asarray(x // (n // 200) if dtype == "uint8" else x, dtype)
            for k in (3, 24):
                assert plan(functools.partial(jaxgpuops.topk, k=k), x)["algorithm"] == "wave"
                for largest, sorted in [(True, True), (False, False)]:
                    expected = expected_topk(x, k, 1, largest, sorted)
                    assert same_bits(tuple(jaxgpuops.topk(x, k, largest=largest, sorted=sorted)), tuple(expected)), k


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float16", "float32", "int64", "float64"])
@pytest.mark.parametrize("name", [name for name in REGIMES if name.startswith("argmax")])
@pytest.mark.parametrize("left", [False, True], ids=["kernels", "as planned"])
def test_argmax_and_argmin(name, dtype, left, monkeypatch):
    """Their order is another than that of top-1: NaNs are equal, and zeros. XLA, to which many are left, has it,
    too."""
    if not left:
        monkeypatch.setattr(_primitive.KERNELS["argmax"], "leaves", None)
    shape, axis, _ = REGIMES[name]
    distributions = reference.adversarial(np.random.default_rng(0), shape[axis], jnp.dtype(dtype))
    names, rows = list(distributions), np.stack(list(distributions.values()))
    lanes = math.prod(shape) // shape[axis]
    with jax.enable_x64(dtype in ("int64", "float64")):
        for largest, op in [(True, jaxgpuops.lax.argmax), (False, jaxgpuops.lax.argmin)]:
            expected = jnp.asarray(reference.argmax(rows, 1, largest))[:, None]
            fn = jax.jit(lambda x, op=op: op(x, axis, np.int32))
            for shift in range(0, len(rows), lanes):
                wanted = spread(expected, shape, axis, shift).squeeze(axis)
                actual = fn(spread(jnp.asarray(rows), shape, axis, shift))
                assert (actual == wanted).all(), names[shift : shift + lanes]


# ---- Determinism ----------------------------------------------------------------------------------------------------


@regimes
def test_repeats_bit_for_bit_while_another_stream_is_busy(shape, axis, k):
    x = jnp.round(jax.random.normal(jax.random.key(0), shape) * 100)  # with ties
    fn = jax.jit(lambda x: jaxgpuops.topk(x, k, axis=axis))
    first = jax.block_until_ready(fn(x))
    with busy_stream() as keep_busy:
        for _ in range(20):
            keep_busy()
            assert same_bits(fn(x), first)


@regimes
def test_a_row_alone_is_the_row_in_its_batch(shape, axis, k):
    x = jnp.round(jax.random.normal(jax.random.key(0), (5, *shape[1:])) * 1000)
    fn = jax.jit(lambda x: jaxgpuops.topk(x, k, axis=axis))
    whole = fn(x)
    for i in range(5):
        assert same_bits(fn(x[i : i + 1]), jax.tree.map(lambda y: y[i : i + 1], whole))
    # There are enough rows for a kernel that gives each to one block, and more elements than the kernels for few take.
    many = max(1, min(max(120, (1 << 21) // x.size + 1), memory() // (8 * x.nbytes)))
    repeated = fn(jnp.concatenate([x] * many))
    assert same_bits(jax.tree.map(lambda y: y[-5:], repeated), whole)


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------


def command_buffers():
    for name, (shape, axis, k) in REGIMES.items():
        shape = (min(shape[0], 300), *shape[1:])

        @jax.jit
        def program(x):
            results = [jaxgpuops.topk(x + i, k, axis=axis) for i in range(3)]
            gradient = jax.grad(lambda x: (jaxgpuops.topk(x, k, axis=axis).values ** 2).sum())(x)
            return results, gradient, jaxgpuops.lax.argmax(x, axis, jnp.int32)

        for seed in range(4):  # new inputs, at new addresses
            x = jnp.round(jax.random.normal(jax.random.key(seed), shape) * 100)
            x = jnp.where(x == 0, 0, x)  # XLA makes -0 of -0 + 0, when it compiles that
            results, gradient, largest = program(x)
            for i in range(3):
                assert same_bits(tuple(results[i]), expected_topk(x + i, k, axis, True, True)), (name, seed, i)
            indices = results[0].indices
            chosen = jnp.put_along_axis(jnp.zeros(shape), indices, 2 * results[0].values, axis, inplace=False)
            assert (gradient == chosen).all(), (name, seed)
            assert (largest == jnp.argmax(x, axis)).all(), (name, seed)


def test_command_buffers_with_changing_inputs():
    """XLA captures even single calls into CUDA graphs, and replays them with other buffers."""
    run_in_command_buffers("test_gpu_topk")


# ---- Older GPUs -----------------------------------------------------------------------------------------------------


def test_plans_for_older_gpus():
    """Plans are for the compute capability of JAXGPUOPS_COMPUTE_CAPABILITY. (tools/gpu.sh runs more tests with it.)"""
    if "JAXGPUOPS_COMPUTE_CAPABILITY" in os.environ:
        assert plan(lambda x: jaxgpuops.topk(x, 50), jnp.zeros((64, 128_256)))["algorithm"] == "buckets"
        return
    command = ("-m", "pytest", "test_gpu_topk.py", "-q", "-p", "no:cacheprovider", "-k", "older")
    in_subprocess(*command, JAXGPUOPS_COMPUTE_CAPABILITY="80")


# ---- More than 2^31 elements ----------------------------------------------------------------------------------------

LARGE = {
    "many short rows": (((1 << 21) + 5, 1031), 1, 5, "uint8"),
    "many rows": (((1 << 17) + 1, 16_411), 1, 70, "uint8"),
    "long rows": ((3, (1 << 30) + 3), 1, 5, "uint8"),
    "many rows, hundreds": (((1 << 15) + 5, 65_601), 1, 300, "int16"),
    "the longest row": ((1, (1 << 31) - 1), 1, 50, "uint8"),
    "columns": ((3, 1031, (1 << 20) + 1), 1, 5, "uint8"),
    "large k": ((3, (1 << 30) + 3), 1, 5000, "uint8"),
    "argmax": ((1, (1 << 31) - 1), 1, 1, "uint8"),
    "argmax of columns": ((1031, (1 << 21) + 1), 0, 1, "uint8"),
}


@pytest.mark.alone
@pytest.mark.parametrize("shape, axis, k, dtype", LARGE.values(), ids=LARGE)
def test_more_than_2_to_the_31_elements(shape, axis, k, dtype):
    needs_memory(16)
    n = shape[axis]
    iota = jax.lax.broadcasted_iota
    # Small values, and k different large places in every row, all of them in its last half.
    first = n - min(n // 2, 2 * k)
    row = jnp.arange(n, dtype=jnp.int32)
    planted = jnp.where((row >= first) & ((row - first) % 2 == 0), 200 + row % 7, row % 199).astype(dtype)
    expected = reference.topk(np.asarray(planted[max(first - 8, 0) :]), k)[1] + max(first - 8, 0)
    at = [-1 if i == axis else 1 for i in range(len(shape))]
    x = jax.jit(lambda row: jnp.broadcast_to(row.reshape(at), shape) + (iota(dtype, shape, 0) & 0))(planted)
    values, indices = jaxgpuops.topk(x, k, axis=axis)
    assert (indices == expected.reshape(at)).all()
    assert (values == planted[expected].reshape(at)).all()


@pytest.mark.alone
def test_gradient_of_more_than_2_to_the_31_elements():
    needs_memory(16)
    n, rows = (1 << 20) + 1, (1 << 11) + 5
    indices = jnp.broadcast_to(jnp.array([n - 1, 0, 77], jnp.int32), (rows, 3))
    out = put_along_axis(jnp.broadcast_to(jnp.array([1, 2, 3], jnp.uint8), (rows, 3)), indices, 1, n)
    assert out.shape == (rows, n)
    assert (out[:, jnp.array([n - 1, 0, 77])] == jnp.array([1, 2, 3], jnp.uint8)).all()
    assert (jnp.count_nonzero(out, axis=1) == 3).all()


# ---- Errors ---------------------------------------------------------------------------------------------------------


def test_errors_of_the_handler_name_the_op():
    """Calls that Python would not make; what a mismatch of versions may look like."""
    call = jax.ffi.ffi_call(
        "jaxgpuops.topk",
        [
            jax.ShapeDtypeStruct((4, 9), jnp.float32),
            jax.ShapeDtypeStruct((4, 9), jnp.int32),
            jax.ShapeDtypeStruct((4, 0), jnp.uint8),
        ],
    )
    with pytest.raises(Exception, match=r"jaxgpuops\.topk: .*k is 9 but x has length 5"):
        jax.block_until_ready(call(jnp.zeros((4, 5)), axis=np.int64(1), largest=True, sorted=True))
