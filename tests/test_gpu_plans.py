"""What is planned is what runs: calls for a part of the batch that was planned, and the kernels that `explain`
names."""

import glob
import itertools
import re

import gpu  # noqa: F401  skips this file where there is no GPU
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import same_bits

import jaxgpuops
from jaxgpuops._primitive import KERNELS as KERNELS_BY_NAME


def cross_entropy(x):
    return jaxgpuops.softmax_cross_entropy(x, jnp.arange(x.shape[0], dtype=jnp.int32))


@pytest.mark.parametrize(
    "fn", [jaxgpuops.logsumexp, jaxgpuops.sum, jaxgpuops.softmax, cross_entropy], ids=lambda fn: fn.__name__
)
@pytest.mark.parametrize("length", [65536, 262144, 300001])
def test_exports_with_a_symbolic_batch(fn, length):
    """The workspace is that of a plan for many rows; few rows take other kernels, with the same bits."""
    [batch] = jax.export.symbolic_shape("batch")
    shape = jax.ShapeDtypeStruct((batch, length), jnp.float32)
    checks = jaxgpuops.export_checks()
    exported = jax.export.export(jax.jit(fn), platforms=["cuda"], disabled_checks=checks)(shape)
    call = jax.jit(jax.export.deserialize(exported.serialize()).call)
    x = jax.random.normal(jax.random.key(0), (201, length))
    for rows in (1, 9, 132, 133, 201):
        assert same_bits(call(x[:rows]), jax.jit(fn)(x[:rows])), rows


def test_short_rows_left_to_xla_do_not_depend_on_the_batch():
    derivative = lambda fn: lambda x: jax.vjp(fn, x)[1](x[:, ::-1])[0]
    along = lambda name: lambda x: getattr(jaxgpuops, name)(x, axis=1)
    softmaxes = [along("softmax"), along("log_softmax")]
    pairs = [*softmaxes, *map(derivative, softmaxes)]
    rows = [along("sum"), along("mean"), along("logsumexp")]
    shapes = [
        (pairs, (2,)),
        (pairs, (2, 7)),
        (pairs, (2, 60)),
        (rows, (2,)),
        (rows, (3,)),
        (rows, (8,)),
        (rows[:2], (15,)),
    ]
    for (fns, shape), dtype in itertools.product(shapes, ("bfloat16", "float16", "float32")):
        some = (3 * jax.random.normal(jax.random.key(len(shape)), (50, *shape))).astype(dtype)
        for fn, batch in itertools.product(fns, (1, 20, 1000)):
            assert all(not call.kernel for call in jaxgpuops.explain(fn, some))
            whole, few = jax.jit(fn)(jnp.concatenate([some] * batch)), jax.jit(fn)(some[:3])
            assert same_bits(whole[:3], few) and same_bits(whole[-50:], whole[:50]), (shape, dtype, batch)
    for fn, length, dtype in itertools.product(rows[:2], (4, 8), ("bfloat16", "float16")):  # many rows have a kernel
        few = (3 * jax.random.normal(jax.random.key(length), (1001, length))).astype(dtype)
        many = jnp.concatenate([few] * (1 + (1 << 22) // few.size))
        [call] = jaxgpuops.explain(fn, many)
        assert call.kernel and not jaxgpuops.explain(fn, few)[0].kernel
        y = jax.jit(fn)(many)
        assert same_bits(y[:1001], jax.jit(fn)(few)) and same_bits(y[-1001:], y[:1001]), (length, dtype)


def test_sums_of_rows_that_are_not_whole_vectors():
    """How many threads share a row depends on the number of rows; the bits of a row do not."""
    rng = np.random.default_rng(0)
    lengths = [513, 1025, 2303, 2305, 9217, 18_435, 36_863, 36_865]
    for dtype, length in itertools.product(("bfloat16", "float16", "float32"), lengths):
        length = length // 2 + 1 if dtype == "float32" else length
        x = jnp.asarray(rng.standard_normal((600, length)), dtype)
        fn = lambda x: (jaxgpuops.sum(x, axis=1), jaxgpuops.mean(x, axis=1))
        total, mean = jax.jit(fn)(x)
        exact = np.asarray(x, np.float64)
        bound = 2.0**-17 * abs(exact).sum(1) + float(jnp.finfo(dtype).eps) * abs(exact.sum(1))
        assert (abs(np.asarray(total, np.float64) - exact.sum(1)) <= bound).all(), (dtype, length)
        assert (abs(np.asarray(mean, np.float64) - exact.mean(1)) <= bound / length + 1e-7).all(), (dtype, length)
        for begin, rows in ((0, 1), (1, 1), (5, 40), (1, 200)):
            some, some_mean = jax.jit(fn)(x[begin : begin + rows])
            assert same_bits(some, total[begin : begin + rows]), (dtype, length, rows)
            assert same_bits(some_mean, mean[begin : begin + rows]), (dtype, length, rows)


def test_extremes_left_to_xla_have_the_bits_of_the_kernels(monkeypatch):
    for name, dtype in itertools.product(
        ("max", "min"), ("bfloat16", "float16", "float32", "float64", "int8", "uint32")
    ):
        with jax.enable_x64(dtype == "float64"):
            for shape in (
                (100_000, 3),
                (300, 193),
                (64, 4096),
                (3, 70_001),
                (3, 300, 50),
                (2, 30, 3001),
                (2, 5003, 64),
                (2, 9001, 2),
            ):
                x = jax.random.normal(jax.random.key(shape[1]), shape)
                x = jnp.where(abs(x) < 2, jnp.copysign(0, x), x).astype(dtype)  # zeros of both signs
                if jnp.issubdtype(dtype, jnp.floating):
                    x = x.at[0, 1].set(jnp.nan).at[1, 2].set(-jnp.inf)
                fn = lambda x, name=name: getattr(jaxgpuops, name)(x, axis=1)
                plain = jax.jit(fn)(x)
                with monkeypatch.context() as patch:
                    for kernel in KERNELS_BY_NAME.values():
                        patch.setattr(kernel, "leaves", None)
                    ours = jax.jit(lambda x, fn=fn: fn(x))(x)
                same = (
                    plain == ours
                    if x.dtype.kind in "iu"
                    else (plain == ours) & (jnp.signbit(plain) == jnp.signbit(ours))
                )
                assert (same | (plain != plain) & (ours != ours)).all(), (name, dtype, shape)


def test_segments_and_counts_left_to_xla_are_those_of_the_kernels(monkeypatch):
    """Whatever the ids: random, or all the same."""
    for dtype, shape, count in itertools.product(
        ("float32", "int32", "uint32"), ((500, 30), (1000,), (7, 3)), (1, 9, 60)
    ):
        x = jax.random.normal(jax.random.key(shape[0]), shape) * 2
        x = jnp.where(abs(x) < 1, jnp.copysign(0, x), x).astype(dtype)  # zeros of both signs
        x = x.at[3].set(jnp.nan).at[4].set(-jnp.inf) if dtype == "float32" else x
        drawn = jax.random.randint(jax.random.key(9), shape[:1], -1, count + 1)

        def all_of(x, ids, count=count, dtype=dtype):
            names = (
                ("segment_max", "segment_min") if dtype == "float32" else ("segment_max", "segment_min", "segment_sum")
            )
            out = [getattr(jaxgpuops, name)(x, ids, count) for name in names]
            return [*out, jaxgpuops.bincount(ids, count), jaxgpuops.bincount(ids.reshape(-1, 1), count)]

        for ids in (drawn, jnp.full_like(drawn, count // 2)):
            assert all(not call.kernel for call in jaxgpuops.explain(all_of, x, ids))
            plain = jax.jit(all_of)(x, ids)
            with monkeypatch.context() as patch:
                for kernel in KERNELS_BY_NAME.values():
                    patch.setattr(kernel, "leaves", None)
                ours = jax.jit(lambda x, ids, all_of=all_of: all_of(x, ids))(x, ids)
            for a, b in zip(plain, ours, strict=True):
                signs = a == b if a.dtype.kind in "iu" else (a == b) & (jnp.signbit(a) == jnp.signbit(b))
                assert (signs | (a != a) & (b != b)).all(), (dtype, shape, count)


# For each algorithm of a family, as `explain` names it: how the name of one of its kernels begins.
KERNELS = {
    "topk": {
        "argmax": "argmax_",
        "rows": "rows_kernel",
        "held": "held_kernel",
        "stream": "stream_kernel",
    }
    | {"wave": "wave_kernel", "sieve": "(sieve|whole)_kernel", "columns": "columns_(stream_)?kernel"}
    | {
        "buckets": "buckets_kernel",
        "radix": "select_(firsts_)?(long_)?kernel",
        "sort": "sort_kernel",
        "compare": "compare_(team_)?kernel",
    }
    | {
        "few": "few_(tile_)?kernel",
        "digits": "digits_kernel",
        "short": "short_columns_kernel",
        "block": "block_kernel",
        "sweep": "(pass|splitters)_kernel",
    },
    "sort": {
        "short": "short_(tiles|columns)_kernel",
        "network": "(network|network_segments|pairs)_kernel",
        "team": "sort_kernel",
        "part": "select_(cluster_|registers_|teams_|long_|partition_)?kernel",
        "block": "block_kernel",
        "merge": "(merge_(tiles|runs)|network_tiles)_kernel",
        "sweep": "(pass|fill|splitters)_kernel",
        "segments": "segments_kernel",
        "compare": "compare_kernel",
    },
    "scan": {
        "small": "scan_small",
        "lanes": "scan_lanes",
        "pieces": "scan_pieces",
        "few": "scan_few",
        "short": "scan_short",
        "packs": "scan_packs",
        "rows": "scan_rows",
        "walk": "scan_walk",
        "resident": "scan_resident",
    }
    | {"row_look_ahead": "scan_row_look_ahead", "chunk_look_ahead": "scan_look_ahead"}
    | {"column_look_ahead": "scan_look_ahead"}
    | {"columns": "scan_columns", "spans": "scan_columns"}
    | {f"{layout}_twice": "scan_twice_(folds|sums|results)" for layout in ("chunk", "column", "span")},
    "row_engine": {
        "small": "(small_((flat|sums)_)?|(shared_flat|flat_sums|chain_sums|lane_columns)_)kernel",
        "rows": "((lean_|loose_|team_)?rows|spread|wide|sweep|((loose|rows|spread|wide)_)?gradient|(short|loose|packed)_sums)_kernel",
        "rows_tiles": "((part_)?tile|column_tiles)_kernel",
    }
    | {"rows_stream": "stream_kernel", "rows_together": "rows_together_kernel"}
    | {"rows_split": "(merge|results)_kernel"}
    | {
        "columns": "((held_)?columns|along)_kernel",
        "columns_stream": "columns_stream_kernel",
        "columns_split": "merge_",
    }
    | {
        "columns_flat": "(flat_(sums_)?|loose_columns_)kernel",
        "columns_walk": "((held_)?walk|walk_once|held_packs|strip|(shared_|small_)?columns_gradient)_kernel",
    },
    "count": {"tables": "(bincount|segment|segment_wide)_tables_kernel", "global": "bincount_global_kernel"}
    | {"parts": "bincount_parts_kernel", "warps": "bincount_warps_kernel"}
    | {"rows": "bincount_rows_kernel", "lanes": "segment_lanes_kernel", "few": "segment_few_kernel"}
    | {"match": "segment_match_kernel", "picks": "segment_picks_kernel", "ranges": "segment_ranges_kernel"}
    | {"atomics": "segment_(atomics|cells)_kernel", "scatter": "segment_scatter_kernel"}
    | {"recount": "choose_recount_kernel", "look_back": "choose_look_back_kernel"}
    | {"thread": "select_thread_kernel", "warp": "select_(warp|compare|sorted|bisect)_kernel"}
    | {
        "teams": "select_teams_kernel",
        "registers": "select_registers_kernel",
        "block": "select_kernel",
        "cluster": "select_cluster_kernel",
        "long": "select_long_kernel",
    }
    | {"sorted": "segment_(tiles|teams)_kernel", "ordered": "segment_(tiles|teams)_kernel"}
    | {"buckets": "segment_bucket_sum_kernel"}
    | {"cells": "segment_softmax_kernel"},
    "moe": {name: rf"route_(few_)?kernel<[^,]*Algorithm\){i}" for i, name in enumerate(("block", "cluster", "grid"), 1)}
    | {"warp": "route_warp_kernel"},
}


def ids(x, count):
    return jnp.arange(x.shape[0]) % count


def masked(fn):
    return lambda x: fn(x, where=x > 0)


CALLS = [
    (
        "moe",
        lambda x: jaxgpuops.moe_plan(ids(x[:, 0], 60)[:, None], 64),
        [(30, 1), (1000, 1), (50_000, 1), (200_000, 1)],
    ),
    ("topk", lambda x: jaxgpuops.lax.argmax(x, 1, jnp.int32), [(30, 40), (3, 5000)]),
    ("topk", lambda x: jaxgpuops.lax.argmax(x.astype(jnp.bfloat16), 1, jnp.int32), [(1 << 18, 4)]),
    ("topk", lambda x: jaxgpuops.topk(x, 8), [(4096, 256), (70, 20), (64, 128_256), (1, 1 << 22)]),
    ("topk", lambda x: jaxgpuops.topk(x, 1000), [(16, 1 << 18), (64, 4096), (200, 2500)]),
    ("topk", lambda x: jaxgpuops.topk(x, 5000), [(3, 1 << 16)]),
    ("topk", lambda x: jaxgpuops.topk(x, 60_000), [(3, 70_001)]),
    ("topk", lambda x: jaxgpuops.topk(x, 8, axis=0), [(512, 1000), (4096, 70_000)]),
    ("sort", jaxgpuops.argsort, [(4096, 5), (4096, 256), (64, 4096), (3, 70_001)]),
    ("sort", jaxgpuops.sort, [(4096, 100), (400, 700), (300, 2000)]),
    ("sort", lambda x: jaxgpuops.sort(x, axis=0), [(3000, 70)]),
    ("sort", lambda x: jaxgpuops.sort(x, axis=1), [(300, 6, 5)]),
    ("sort", lambda x: jaxgpuops.partition(x, 70), [(64, 4096), (3, 70_001), (1, 1_000_001)]),
    ("sort", lambda x: jaxgpuops.sort(x, offsets=jnp.array([0, 9, 70])), [(64, 4096), (4096, 300)]),
    (
        "count",
        lambda x: jaxgpuops.kth_value(x, 7),
        [(4096, 30), (2000, 100), (64, 700), (5000, 1500), (64, 4096), (3, 70_001), (1, 1_000_001)],
    ),
    ("count", lambda x: jaxgpuops.kth_value(x, 7, axis=0), [(3000, 70)]),
    ("scan", jaxgpuops.cumsum, [(4096, 128), (1024, 65536), (1, 1 << 20), (1, 1 << 25)]),
    ("scan", lambda x: jaxgpuops.cumsum(x, axis=0), [(65536, 1024), (1000, 3), (16, 70_001)]),
    ("scan", jaxgpuops.cumsum, [(30, 7), (30_000, 7)]),
    ("scan", lambda x: jaxgpuops.linear_scan(0.5, x, axis=0), [(7, 30)]),
    ("scan", lambda x: jaxgpuops.cumprod(x.astype(jnp.int32)), [(4096, 1024)]),
    ("scan", lambda x: jaxgpuops.linear_scan(0.5, x), [(512, 4096), (16, 65536), (100_000, 3)]),
    ("row_engine", jaxgpuops.softmax, [(4096, 100), (512, 8192), (1000, 262_144), (2, 400_000), (2, 1 << 24)]),
    ("row_engine", masked(jaxgpuops.softmax), [(512, 8192), (3, 1 << 20)]),
    ("row_engine", lambda x: jaxgpuops.softmax(x, axis=0), [(1000, 3), (4096, 32768), (1 << 18, 64), (4, 100_000)]),
    ("row_engine", jaxgpuops.logsumexp, [(32768, 256), (64, 128_256), (100, 262_144)]),
    ("row_engine", jaxgpuops.softmax, [(64, 27), (100_000, 27), (100_000, 3)]),
    ("row_engine", lambda x: jaxgpuops.max(x.astype(jnp.int32), axis=1), [(1000, 27), (3, 70_001), (9, 1 << 20)]),
    ("row_engine", lambda x: jaxgpuops.sum(x, axis=0), [(100_000, 64), (4, 100_000), (40, 100)]),
    ("row_engine", lambda x: jaxgpuops.max(x, axis=1), [(300, 7)]),
    ("row_engine", lambda x: jaxgpuops.sum(x, axis=1), [(20, 1201)]),
    ("row_engine", lambda x: jaxgpuops.sum(x.astype(jnp.bfloat16), axis=1), [(1, 2000, 521)]),
    ("row_engine", jax.grad(lambda x: jaxgpuops.softmax(x)[:, 0].sum()), [(3000, 771)]),
    ("row_engine", jax.grad(lambda x: jaxgpuops.softmax(x, axis=1)[:, 0].sum()), [(5, 128, 1779)]),
    ("row_engine", masked(jaxgpuops.sum), [(512, 8192)]),
    ("count", lambda x: jaxgpuops.bincount(x.astype(jnp.int32), 300), [(3, 100_001), (5000, 70)]),
    ("count", lambda x: jaxgpuops.bincount(x.astype(jnp.int32), 1_000_000), [(2, 100_001), (8, 300_001)]),
    ("count", lambda x: jaxgpuops.bincount(x.astype(jnp.int32), 300), [(70_000, 20)]),
    ("count", lambda x: jaxgpuops.nonzero(x, size=70)[0], [(1 << 20,), (300, 70)]),
    ("count", lambda x: jaxgpuops.histogram(x, 300, range=(0, 2))[0], [(3, 100_001)]),
    ("count", lambda x: jaxgpuops.segment_sum(x, ids(x, 50), 50), [(5000, 3), (300_001, 1)]),
    ("count", lambda x: jaxgpuops.segment_sum(x, ids(x, 5000), 5000), [(500, 3), (300_001, 1), (300_001, 16)]),
    ("count", lambda x: jaxgpuops.segment_sum(x, ids(x, 2000), 2000), [(5000, 70), (500, 900)]),
    ("count", lambda x: jaxgpuops.segment_softmax(x, ids(x, 50), 50), [(500, 3), (300_001, 1)]),
    ("count", lambda x: jaxgpuops.segment_max(x, ids(x, x.shape[0]), 9, indices_are_sorted=True), [(50_000, 3)]),
]


@pytest.mark.parametrize("family,fn,shape", [(family, fn, shape) for family, fn, shapes in CALLS for shape in shapes])
def test_explain_shows_what_is_launched(family, fn, shape, tmp_path, kernels):
    x = jnp.ones(shape)
    algorithms = {call.plan["algorithm"] for call in jaxgpuops.explain(fn, x)}
    run = jax.jit(fn).lower(x).compile()
    jax.block_until_ready(run(x))
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(run(x))
    [trace] = glob.glob(f"{tmp_path}/**/*.xplane.pb", recursive=True)
    data = jax.profiler.ProfileData.from_file(trace)
    names = {
        event.name for plane in data.planes if "GPU" in plane.name for line in plane.lines for event in line.events
    }
    launched = {name for name in names if "jaxgpuops" in name}
    for algorithm in algorithms:
        pattern = KERNELS[family][algorithm]
        assert any(re.search(rf"\b{pattern}", name) for name in launched), (algorithm, launched)
