"""Runs every kernel once on small arrays and checks the results: the program that tools/gpu.sh runs under
compute-sanitizer. Shapes are odd on purpose, so that rows are misaligned and last tiles are not full.

    python tools/every_kernel.py [topk | sorts | gates | rows | columns | streamed | scans | counts | moe ...]
"""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxgpuops
from jaxgpuops._primitive import KERNELS
from jaxgpuops.lax import scan_primitives as scan
from jaxgpuops.lax._search import choose, pick, unique_p
from jaxgpuops.lax._select import select
from jaxgpuops.lax.along_axis import put_along_axis, put_along_axis_p, take_along_axis

for _kernel in KERNELS.values():
    _kernel.leaves = None  # kernels run where XLA's own are faster, too

TOPK = [
    # (shape, axis, k)
    ((37, 61), 1, 5),
    ((9, 301), 1, 17),
    ((3, 701), 1, 300),  # results in the order of indices take clusters
    ((70, 19), 1, 18),
    ((2, 130, 5), 1, 60),
    ((700, 301), 1, 17),
    ((900, 301), 1, 250),
    ((300, 2001), 1, 100),
    ((5, 4093), 1, 64),
    ((7, 5, 60), 1, 3),
    ((70, 61, 9), 1, 2),
    ((3, 121, 7), 1, 4),
    ((5000, 11, 3), 1, 7),
    ((5000, 13), 1, 3),
    ((37, 21), 1, 1),  # few elements
    ((3, 1001), 1, 1),
    ((3, 31, 7), 1, 1),
    ((600, 301), 1, 1),
    ((2000, 301), 1, 1),
    ((5000, 31, 11), 1, 1),
    ((40, 3001, 33), 1, 1),
    ((1, 300_001), 1, 1),
    ((3, 20_001), 1, 1),
    ((300, 5001), 1, 1),
    ((600, 1001), 1, 1),
    ((600, 5001), 1, 33),
    ((9, 20_001), 1, 20),
    ((5, 100_001), 1, 64),
    ((70, 33_001), 1, 300),
    ((65, 9001), 1, 100),
    ((3, 70_001), 1, 2048),
    ((44, 100_001), 1, 300),
    ((58, 22_091), 1, 73),
    ((6, 300_001), 1, 50),
    ((1, 500_001), 1, 50),
    ((1, 100_001), 1, 5000),
    ((3, 9001), 1, 700),  # digits
    ((2, 60_001), 1, 900),
    ((3, 3001, 5), 1, 100),
    ((2, 40_001, 3), 1, 300),
    ((1, 40_001, 70), 1, 9),
    ((3, 5001), 1, 5001),
    ((2, 40_001), 1, 30_001),
    ((1, 33_001, 3), 1, 33_000),
    ((2, 301, 67), 1, 7),
    ((33_001, 9), 1, 2),  # tiles
    ((4, 70_001), 1, 66_000),
    ((33, 17_001, 9), 1, 700),  # transposed
    ((3, 9001, 5), 1, 300),  # where they are
    ((1, 70_001, 17), 1, 5000),
    ((396, 2049, 17), 1, 9),  # streamed columns
    ((30_001, 4), 1, 1),  # several rows in a vector
    ((30_003, 2), 1, 1),
    ((21, 70_001), 1, 1),  # a cluster a row
    ((2, 300_001), 1, 1),  # slices of rows
    ((3, 301, 5), 1, 1),  # a block a column
    ((2, 20_001, 3), 1, 1),  # a cluster a column
    ((1, 2_200_001, 2), 1, 1),  # columns that warps merge
    ((1, 20_001, 5), 1, 40),
]


def run_topk(rng):
    kernels = set()
    for shape, axis, k in TOPK:
        for dtype in ("uint8", "bfloat16", "float32", "int64"):
            with jax.enable_x64(dtype == "int64"):
                x = jnp.asarray((rng.standard_normal(shape) * 50).astype(np.int64) % 199).astype(dtype)
                for flags in ({}, {"largest": False, "sorted": False}):
                    fn = lambda x: jaxgpuops.topk(x, k, axis=axis, **flags)
                    kernels |= {call.plan.get("algorithm", "cpu") for call in jaxgpuops.explain(fn, x)}
                    values, indices = map(np.asarray, fn(x))
                    order = np.argsort(np.asarray(x, np.int64) * (1 if flags else -1), axis, kind="stable")
                    expected = np.take(order, range(k), axis)
                    np.testing.assert_array_equal(indices, np.sort(expected, axis) if flags else expected)
                if dtype != "uint8":
                    take = take_along_axis(x, jnp.asarray(indices), axis)
                    np.testing.assert_array_equal(np.asarray(take), values)
                    put = put_along_axis(take, jnp.asarray(indices), axis, shape[axis])
                    assert np.count_nonzero(np.asarray(put)) == np.count_nonzero(values)
                    half = shape[axis] // 2
                    first = min(7, half)
                    params = {"axis": axis, "length": half, "along": None, "permutes": False, "drops": True}
                    [part] = put_along_axis_p(take, jnp.asarray(indices) - first, **params)
                    np.testing.assert_array_equal(part, np.take(put, range(first, first + half), axis))
        largest = jaxgpuops.lax.argmax(x, axis, np.int32)
        np.testing.assert_array_equal(largest, np.argmax(np.asarray(x), axis))
    return kernels


SORTS = [  # (shape, axis)
    ((37, 1), 1),
    ((301, 7), 1),
    ((3, 5, 70), 1),
    ((37, 61), 1),
    ((3, 1001), 1),  # few
    ((400, 1001), 1),
    ((1401, 633), 1),  # many
    ((2, 301, 67), 1),
    ((3, 4001), 1),
    ((3, 8001), 1),
    ((2, 16_001), 1),  # few
    ((50, 9001), 1),
    ((2, 3001, 17), 1),
    ((2, 40_001), 1),
    ((3, 50_001), 1),
    ((1, 33_001, 5), 1),
    ((1, 1_100_003), 1),
    ((1, 1_300_003), 1),
    ((1, 600_011), 1),
    ((1, 600_008), 1),
    ((1601, 700), 1),
    ((60, 300, 67), 1),
]


def run_sorts(rng):
    kernels = set()
    for (shape, axis), dtype in itertools.product(SORTS, ("uint8", "bfloat16", "float32", "int64")):
        with jax.enable_x64(dtype == "int64"):
            x = jnp.asarray((rng.standard_normal(shape) * 50).astype(np.int64) % 199).astype(dtype)
            kernels |= {call.plan.get("algorithm", "cpu") for call in jaxgpuops.explain(jaxgpuops.argsort, x)}
            keys = np.asarray(x, np.int64)
            order = np.argsort(keys, axis, kind="stable")
            np.testing.assert_array_equal(jaxgpuops.argsort(x, axis=axis), order)
            np.testing.assert_array_equal(np.asarray(jaxgpuops.sort(x, axis=axis), np.int64), np.sort(keys, axis))
            middle = shape[axis] // 2
            kernels |= {
                call.plan.get("algorithm", "cpu")
                for call in jaxgpuops.explain(lambda x: jaxgpuops.partition(x, middle, axis=axis), x)
            }
            parts = np.asarray(jaxgpuops.partition(x, middle, axis=axis), np.int64)
            np.testing.assert_array_equal(parts.take(middle, axis), np.sort(keys, axis).take(middle, axis))
            outs = jaxgpuops.sort_key_val(x, np.asarray(keys, np.int32), axis=axis, descending=True)
            order = np.argsort(-keys, axis, kind="stable")
            for out in outs:
                np.testing.assert_array_equal(np.asarray(out, np.int64), np.take_along_axis(keys, order, axis))
            few, places = (keys % 3).astype(np.int32), jax.lax.broadcasted_iota(np.int32, shape, axis)
            by_both = jaxgpuops.lax.sort((few, x, places), axis, num_keys=2)[2]
            np.testing.assert_array_equal(by_both, np.lexsort((keys, few), axis))
    shapes = [(300, 30), (3000, 30), (3, 3000), (70, 1000), (17, 4000), (9, 8000), (3, 20_000), (3, 50_000)]
    for (rows, n), dtype in itertools.product(shapes, ("uint8", "bfloat16", "float32", "int64")):
        with jax.enable_x64(dtype == "int64"):
            x = jnp.asarray((rng.standard_normal((rows, n)) * 50).astype(np.int64) % 199).astype(dtype)
            offsets = np.sort(rng.integers(0, n + 1, 20)).astype(np.int32)
            sort = lambda x, offsets=offsets: jaxgpuops.sort(x, offsets=offsets)
            kernels |= {call.plan.get("algorithm", "cpu") for call in jaxgpuops.explain(sort, x)}
            wanted = np.array(x, np.int64)
            for begin, end in itertools.pairwise(offsets):
                wanted[:, begin:end].sort(1)
            np.testing.assert_array_equal(np.asarray(sort(x), np.int64), wanted)
            order = jaxgpuops.argsort(x, offsets=offsets)  # by other kernels
            np.testing.assert_array_equal(np.take_along_axis(np.asarray(x, np.int64), order, 1), wanted)
    return kernels


# ---- Mixture of experts ---------------------------------------------------------------------------------------------


def run_moe(rng):
    kernels = set()
    for (tokens, k, experts, align, width), dtype in itertools.product(
        [(7, 4, 300, 1, 61), (25, 9, 130, 1, 8), (37, 2, 5, 4, 61), (900, 8, 130, 4, 64), (6001, 3, 70, 4, 8)]
        # Choices that are loaded together, and so many bytes that the copy engine moves them.
        + [(n, n, 9, 1, 64) for n in (1, 2, 4, 6)]
        + [(25_000, 8, 64, 1, 128)],
        ("float8_e5m2", "bfloat16", "float32", "float64"),
    ):
        with jax.enable_x64(dtype == "float64"):
            ids = rng.integers(-1, experts + 1, (tokens, k)).astype(np.int32)
            x = jnp.asarray(rng.integers(-1, 2, (tokens, width))).astype(dtype)
            weights = jnp.asarray(rng.integers(0, 2, (tokens, k)), np.float32)
            narrow = [weights.astype(dtype)] if dtype == "bfloat16" else []
            make = lambda ids: jaxgpuops.moe_plan(ids, experts, align=align)
            kernels |= {call.plan.get("algorithm", "cpu") for call in jaxgpuops.explain(make, ids)}
            plan = make(ids)
            valid = (ids >= 0) & (ids < experts)
            order = np.argsort(np.where(valid, ids, experts).ravel(), kind="stable")[: valid.sum()]
            rows = np.asarray(plan.assignment_of_row)
            np.testing.assert_array_equal(rows[rows >= 0], order)
            for scale in (None, weights, *narrow):
                out = jaxgpuops.moe_combine(jaxgpuops.moe_dispatch(x, plan), plan, scale)
                counts = (valid * (1 if scale is None else np.asarray(scale))).sum(1)
                expected = jnp.asarray(counts[:, None] * np.asarray(x, np.float64)).astype(dtype)
                np.testing.assert_array_equal(np.asarray(out, np.float64), np.asarray(expected, np.float64))
            rows = jaxgpuops.moe_dispatch(x, plan)
            squares = (np.asarray(x, np.float64) ** 2).sum(1)[:, None] * valid
            for w in (weights, *narrow):
                _, pull = jax.vjp(lambda y, w, plan=plan: jaxgpuops.moe_combine(y, plan, w), rows, w)
                np.testing.assert_array_equal(pull(x)[1].astype(np.float64), squares)
    many = rng.integers(0, 3, (140, 8500, 2)).astype(np.int32)  # a block each, and more than its registers hold
    order = np.argsort(many.reshape(140, -1), 1, kind="stable")
    np.testing.assert_array_equal(jaxgpuops.moe_plan(many, 3).assignment_of_row, order)
    long = rng.integers(0, 40, (70_000, 2)).astype(np.int32)  # more assignments than a cluster holds
    make = lambda ids: jaxgpuops.moe_plan(ids, 40)
    kernels |= {call.plan.get("algorithm", "cpu") for call in jaxgpuops.explain(make, long)}
    np.testing.assert_array_equal(make(long).assignment_of_row, np.argsort(long.ravel(), kind="stable"))
    return kernels


# ---- The gate -------------------------------------------------------------------------------------------------------

GATES = [  # (shape, axis, k)
    ((9001, 8), 1, 2),
    ((9001, 13), 1, 8),
    ((90, 16, 101), 1, 6),
    ((37, 61), 1, 6),
    ((37, 128), 1, 8),
    ((1100, 128), 1, 8),
    ((37, 255), 1, 16),
    ((9, 256), 1, 8),
    ((9, 500), 1, 20),
    ((9, 1001), 1, 64),
    ((2, 129, 5), 1, 8),
    ((1100, 60), 1, 6),
    *(((1100, n), 1, 1) for n in (60, 64, 125, 255, 500, 1001)),
    ((4, 129, 300), 1, 1),
]


def run_gates(rng):
    for (shape, axis, k), dtype in itertools.product(GATES, ("float16", "bfloat16", "float32")):
        # With ties, so that some rows are searched.
        x = jnp.asarray(np.round(2 * rng.standard_normal(shape)) + 0.0).astype(dtype).at[0].set(1)
        bias = 9 * jnp.asarray(np.arange(shape[axis]) < 3, jnp.float32)
        indices = np.argsort(-np.asarray(x, np.float64), axis, kind="stable").take(range(k), axis)
        chosen = np.take_along_axis(np.asarray(x, np.float64), indices, axis)
        expected = np.exp(chosen) / np.exp(chosen).sum(axis, keepdims=True)
        weights, found = jaxgpuops.topk_softmax(x, k, axis=axis)
        np.testing.assert_array_equal(found, indices)
        np.testing.assert_allclose(
            np.asarray(weights, np.float64), expected, rtol=2 * float(jnp.finfo(dtype).eps) + 1e-5
        )
        for score, normalize in itertools.product(("softmax", "sigmoid", "sqrt_softplus"), (False, True)):
            weights, found = jaxgpuops.topk_softmax(x, k, axis=axis, score=score, normalize=normalize, bias=bias)
            assert (np.asarray(found).take(range(min(k, 3)), axis) < 3).all()
            assert np.isfinite(np.asarray(weights, np.float32)).all()
    for (shape, axis, k), given in itertools.product([*GATES, ((9, 1024), 1, 64)], (False, True)):
        n = shape[axis]
        groups = next(g for g in (8, 5, 3, 7, 61, 13) if n % g == 0)
        x = jnp.asarray(np.round(2 * rng.standard_normal(shape)), jnp.float32)
        topk_groups = min(groups, -(-k * groups // n) + 1)
        flags = {"groups": groups, "topk_groups": topk_groups, "bias": jnp.zeros(n) if given else None}
        found = np.asarray(jaxgpuops.topk_softmax(x, k, axis=axis, score="sigmoid", **flags).indices) // (n // groups)
        of = np.sort(found, axis)
        assert (1 + (np.diff(of, axis=axis) > 0).sum(axis) <= topk_groups).all()
    logits = jnp.asarray(rng.standard_normal((37, 61)), jnp.float32)
    losses = jaxgpuops.moe_route(logits, 6, losses=True)[-1]  # log-sums
    np.testing.assert_allclose(losses.z, (jax.nn.logsumexp(logits, -1) ** 2).mean(), rtol=1e-5)
    return {"topk_softmax"}


# ---- Softmax and reductions -----------------------------------------------------------------------------------------

ROWS = [  # along axis 1
    (37, 7),
    (180_000, 3),  # tiles of rows of less than a vector
    *(((1 << 20) // n * 4 + 1, n) for n in (4, 8)),  # vectors of two rows, or one
    (37, 61),
    *((37, n) for n in (32, 64, 128, 256)),  # whole vectors
    (37, 250),
    (9, 1001),  # few rows, each with a block
    (5, 4093),
    (2701, 165),  # many rows, loaded by elements
    (801, 1001),
    (600, 1775),
    (4300, 1001),  # more of them
    (1100, 4093),
    (3, 16_001),
    (3, 16_384),  # aligned
    (3, 50_257),
    (9, 50_257),
    (10, 30_720),  # aligned
    (1100, 1024),  # many rows
    (9, 265_001),  # streamed
    (10, 265_216),  # the same, aligned
    (2, 300_001),  # all blocks together: softmax, log_softmax
    (2, 700_001),  # the same
    (3, 1_000_001),
]
COLUMNS = [
    (3, 2, 50),  # few elements
    (3, 7, 50),
    (3, 30, 5),
    (3, 127, 3),
    (3, 20, 16),  # few elements, in the order of vectors
    (3, 30, 16),  # the same, four batches
    (660, 2, 50),  # a short axis, in registers
    (60, 3, 4999),  # the same in packs; statistics of strips
    (4, 333, 4999),  # strips that warps share
    (660, 30, 5),  # in tiles
    (1001, 20, 7),  # the same, a thread for each column
    (20, 20, 701),  # walked
    (3, 1501, 5),  # flat rows, each shared by a cluster
    (3, 401, 130),  # walked by several warps
    (3, 101, 64),
    (40, 100, 5),  # that a block holds
    (300, 100, 5),
    (2, 1001, 16),
    (2, 1501, 4),  # flat rows of whole vectors
    (2, 2001, 4),  # gradients made of logits, by clusters
    (2, 3001, 2),  # the same
    (2, 8093, 5),  # flat rows, shared by clusters; float32: gradients made of logits, by all multiprocessors
    (2, 3001, 7),  # the same; gradients made of results, and of float32 of logits, by clusters
    (2, 3001, 15),  # float32: gradients in parts that a cluster holds
    (3, 8093, 70),  # gradients in parts that all multiprocessors hold
    (1, 60_000, 30),  # the same; float32: twice as many elements of a thread
    (2, 28_001, 5),  # split flat rows
    (2, 66_001, 4),  # the same; 16 bits: gradients made of logits, too
    (5, 66_001, 4),  # too many elements for all multiprocessors to hold
    (2, 1101, 2051),  # slices of flat rows
    (1, 8093, 16),
    (1, 4093, 1056),  # float32: streamed gradients
]


@jax.jit
def rows(x, t, labels, scale, bias, where):
    """Runs every kernel along axis 1, also with optional operands."""
    results = {}
    for name in ("softmax", "log_softmax", "logsumexp"):
        for form, operands in (("", {}), (" of all operands", {"scale": scale, "bias": bias, "where": where})):
            fn = functools.partial(getattr(jaxgpuops, name), axis=1, **operands)
            results[name + form], pull = jax.vjp(fn, x)
            if name != "logsumexp":
                results[f"{name}_jvp{form}"] = pull(t)[0]
    losses = functools.partial(jaxgpuops.softmax_cross_entropy, labels=labels, axis=1, label_smoothing=0.1, z_loss=0.01)
    results["cross_entropy"] = losses(x)
    plain = functools.partial(jaxgpuops.softmax_cross_entropy, labels=labels, axis=1)
    for form, fn in (("", losses), (" plain", plain)):
        results[f"cross_entropy_grad{form}"] = jax.grad(lambda x, fn=fn: fn(x, where=labels > 0, reduction="sum"))(x)
    for name in ("sum", "max", "min"):
        fn = functools.partial(getattr(jaxgpuops, name), x, axis=1)
        results[name], results[f"{name} where"] = fn(), fn(where=where)
    return results | {"dot": jaxgpuops.dot(x, t, axis=1), "sum of bytes": jaxgpuops.sum(x.astype(jnp.int8), axis=1)}


def rows_by_numpy(x, t, labels, scale, bias, where):
    """Computes the same in float64; gradients of softmax and log_softmax for the cotangent t."""
    results = {}
    for form, z, factor, mask in (
        ("", x, 1, np.ones_like(x, bool)),
        (" of all operands", x * scale + bias, scale, np.broadcast_to(where, x.shape)),
    ):
        z = np.where(mask, z, -np.inf)
        m = z.max(1, keepdims=True)
        e = np.exp(z - m)
        y = e / e.sum(1, keepdims=True)
        log_sum = np.log(e.sum(1, keepdims=True))
        ct = np.where(mask, t, 0)
        results[f"softmax{form}"] = y
        results[f"softmax_jvp{form}"] = factor * y * (ct - (y * ct).sum(1, keepdims=True))
        results[f"log_softmax{form}"] = z - m - log_sum
        results[f"log_softmax_jvp{form}"] = np.where(mask, factor * (ct - y * ct.sum(1, keepdims=True)), 0)
        results[f"logsumexp{form}"] = (m + log_sum)[:, 0]
        if not form:
            lse, p = m + log_sum, y
    n, label = x.shape[1], np.expand_dims(labels, 1)
    at_label = np.take_along_axis(x, label, 1)
    loss = 0.9 * (lse - at_label) + 0.1 * (lse - x.mean(1, keepdims=True)) + 0.01 * lse**2
    position = np.arange(n).reshape(1, n, *(1 for _ in x.shape[2:]))
    slope = p * (1 + 0.02 * lse) - 0.1 / n - 0.9 * (position == label)
    results |= {"cross_entropy": loss[:, 0], "cross_entropy_grad": np.where(label > 0, slope, 0)}
    results["cross_entropy_grad plain"] = np.where(label > 0, p - (position == label), 0)
    for form, mask in (("", True), (" where", where)):
        results[f"sum{form}"] = np.where(mask, x, 0).sum(1)
        results[f"max{form}"], results[f"min{form}"] = (
            np.where(mask, x, -np.inf).max(1),
            np.where(mask, x, np.inf).min(1),
        )
    return results | {"dot": (x * t).sum(1), "sum of bytes": x.astype(np.int64).sum(1).astype(np.int8)}


def run_rows(rng, shapes=ROWS, streamed=False):
    kernels = set()
    for shape, dtype in itertools.product(shapes, ("float16", "bfloat16", "float32", "float64")):
        with jax.enable_x64(dtype == "float64"):
            wide = jnp.float64 if dtype == "float64" else jnp.float32
            row = [1 if d == 1 else n for d, n in enumerate(shape)]
            along = [n if d == 1 else 1 for d, n in enumerate(shape)]
            where = rng.random(along) < 0.8
            where[:, -1] = True
            operands = {  # eighths: exact in every dtype
                "x": jnp.asarray(rng.integers(-20, 21, shape) / 8, dtype),
                "t": jnp.asarray(rng.integers(-8, 9, shape) / 8, dtype),
                "labels": jnp.asarray(rng.integers(0, shape[1], (shape[0], *shape[2:])), jnp.int32),
                "scale": jnp.asarray(rng.integers(1, 5, row) / 2, wide),
                "bias": jnp.asarray(rng.integers(-8, 9, along) / 8, dtype),
                "where": jnp.asarray(where),
            }
            plans = [call.plan for call in jaxgpuops.explain(rows, **operands)]
            algorithms = {plan["algorithm"] for plan in plans if plan}
            if ("rows_stream" in algorithms) != streamed:
                continue
            kernels |= algorithms
            actual = jax.device_get(rows(**operands))
        exact = {
            k: np.asarray(v, np.float64) if v.dtype != bool and k != "labels" else np.asarray(v)
            for k, v in operands.items()
        }
        eps, denormal = float(jnp.finfo(dtype).eps), float(jnp.finfo(dtype).smallest_subnormal)
        for name, expected in rows_by_numpy(**exact).items():
            size = np.abs(expected[np.isfinite(expected)]).max()
            if "log_softmax_jvp" in name:  # e^y, where y was rounded
                size += 10 * np.abs(exact["t"].sum(1)).max()
            if "sum" in name or name == "dot":
                size += 1e-2 * shape[1]
            np.testing.assert_allclose(
                np.asarray(actual[name], np.float64),
                expected,
                rtol=0,
                atol=(4 * eps + 2e-6) * size + denormal,
                err_msg=name,
            )
    return kernels or {"cpu"}


# ---- Scans ----------------------------------------------------------------------------------------------------------

SCANS = [  # along axis 1
    ((37, 7), "float32"),  # few elements
    *(((3, 31, 2), dtype) for dtype in ("bfloat16", "float64", "int8", "int32", "complex64", "complex128")),
    ((17_001, 31), "float64"),  # short axes, by shared memory
    ((9001, 5, 3), "float32"),  # the same without shared memory
    ((9001, 31), "float32"),  # as packs, in many turns
    ((60_001, 2), "float32"),  # as packs
    ((60_001, 8), "float32"),  # as packs, whose lanes take turns
    ((20_001, 7), "bfloat16"),  # the same, where rows lie across warps
    *(((9001, 17), dtype) for dtype in ("int8", "int16", "int32", "int64")),
    ((3001, 2, 50), "int8"),
    ((3, 457), "int16"),  # rare elements, that are few
    *(((37, 61), dtype) for dtype in ("float32", "bfloat16", "int16", "float64")),  # few rows
    ((70, 61, 5), "float32"),  # short columns of recurrences
    ((9, 1501), "float32"),  # the same, of many warps
    *(((17_001, length), dtype) for length in (61, 64) for dtype in ("bfloat16", "int8")),  # many rows, for lanes
    ((9001, 61), "float32"),  # a tile holds the row
    ((9, 4093), "float32"),
    ((300, 9001), "float32"),
    *(((2, 20_001), dtype) for dtype in ("float32", "int8", "int64")),  # clusters
    *(((2, 2003, inner), "float32") for inner in (3, 64)),
    ((2, 70_001), "float32"),
    ((1, 65_536), "float32"),  # aligned
    ((1, 100_001), "int8"),
    ((1, 2_100_001), "float32"),  # many tiles of one row
    ((268, 270, 32), "float32"),  # columns in vectors
    ((2, 1001, 16), "float32"),
    ((1, 135_001, 16), "float32"),
    ((704, 301, 7), "float32"),  # columns one by one
    ((2, 3001, 3), "float32"),  # few elements
    ((2, 601, 66), "bfloat16"),
    ((1, 265_001, 3), "float32"),
    *(((5, 5001), dtype) for dtype in ("bfloat16", "float64", "int8", "int32", "complex64")),
    *(((900, 481), dtype) for dtype in ("int8", "int16", "int64")),
    *(((3, 501, 32), dtype) for dtype in ("bfloat16", "float64", "int16", "complex64")),
    *(((3, 501, 5), dtype) for dtype in ("float16", "int64", "complex128")),
    ((3, 5001), "float8_e5m2"),
    ((1, 1_600_001, 3), "float32"),
    *(((2, 3001, 40), dtype) for dtype in ("float16", "float64", "complex64")),  # columns that are read twice
    *((shape, "float64") for shape in ((900, 481), (300, 9001), (40, 20_001), (150, 301, 64))),
    ((1, 60_001, 128), "float32"),  # columns that look ahead
    ((3, 900_001), "bfloat16"),  # rows of 16 bits: gradients and segments read them twice
]


@functools.partial(jax.jit, static_argnums=6)
def scans(x, a, t, y, h0, starts, reverse):
    """Every kernel that takes the dtype."""
    flags = {"axis": 1, "reverse": reverse}
    calls = {
        "cumsum": (x, False),
        "cummax": (x, False),
        "cumlogsumexp": (x, False),
        "cumsum of segments": (x, starts, True),
        "cumprod of segments": (a, starts, False),
        "cummin of segments": (x, starts, False),
    }
    results = {}
    for name, (*operands, exclusive) in calls.items():
        op = name.split()[0]
        if x.dtype in scan.CUMULATIVE_DTYPES[op]:
            results[name] = scan.CUMULATIVE[op](*operands, exclusive=exclusive, **flags)[0]
    if x.dtype in scan.CUMULATIVE_DTYPES["cumsum"]:  # with an h0, as along a split axis
        before = scan._as_initial("cumsum", h0)
        results["cumsum that goes on"] = scan.cumsum_p(x, before, exclusive=False, initial=True, **flags)[0]
    if x.dtype in scan.FLOATS | scan.COMPLEX:
        linear = functools.partial(scan.linear_scan_p, transpose=False, **flags)
        results["linear_scan"] = linear(t, a, h0, starts, initial=True)[0]
        results["linear_scan, shared"] = linear(t, a[:1, :, :1] if a.ndim > 2 else a[:1], initial=False)[0]
        results["linear_scan_vjp"] = scan.linear_scan_vjp_p(t, a, y, h0, initial=True, **flags)
        # Kernels of small arrays make the result that they are given again.
        flags["exclusive"] = False
        made = lambda op, *operands: scan.CUMULATIVE[op](*operands, **flags)[0]
        signs = jnp.where(a == 0, jnp.ones_like(a), a)
        later = signs * t  # the tangents cancel, so that sums stay small
        first = jnp.zeros_like(later[:, :1])
        later = [first, later[:, :-1]] if reverse else [later[:, 1:], first]
        cancelling = t - jnp.concatenate(later, 1)
        y_of_signs = made("cumprod", signs)
        results["cumprod_jvp"] = scan.cumprod_jvp_p(cancelling, signs, y_of_signs, transpose=True, **flags)[0]
        # If something else reads the result, so does the kernel of the gradient.
        results["cumprod and t"] = y_of_signs + t
        results["cumprod_jvp of y"] = scan.cumprod_jvp_p(cancelling, signs, y_of_signs, transpose=True, **flags)[0]
    if x.dtype in scan.FLOATS:
        if x.shape[1] <= 1 << 15:  # longer columns need their results
            for op, operand in (("cummax", a), ("cumlogsumexp", x)):
                operands = t, operand, made(op, operand)
                results[f"gradient of {op}"] = scan.TANGENT[op](*operands, transpose=True, **flags)[0]
        most, least = made("cummax", a, starts), made("cummin", a)
        flags["transpose"] = False
        results["cummax_jvp"] = scan.cummax_jvp_p(t, a, most, starts, **flags)[0]
        results["cummin_jvp"] = scan.cummin_jvp_p(t, a, least, **flags)[0]
        results["cumlogsumexp_jvp"] = scan.cumlogsumexp_jvp_p(t, x, results["cumlogsumexp"], **flags)[0]
    return results


def check_scans(results, x, a, t, y, h0, starts, reverse):
    """Checks that each result follows from the one before it. Numbers are small integers, except for logarithms."""
    dtype = x.dtype
    kind = np.complex128 if dtype.kind == "c" else np.int64 if dtype.kind == "i" else np.float64

    def in_time(array, kind=kind):
        return np.moveaxis(np.asarray(array), 1, 0)[:: -1 if reverse else 1].astype(kind)

    def before(array, first=0):
        return np.concatenate([np.broadcast_to(first, array[:1].shape), array[:-1]])

    def after(array):
        return np.concatenate([array[1:], np.zeros_like(array[:1])])

    x, a, t, y, h0 = map(in_time, (x, a, t, y, h0))
    cut = in_time(starts, bool)
    cut = np.broadcast_to(before(cut, False) if reverse else cut, x.shape)
    shared = a[(slice(None), *(slice(0, 1) for _ in a.shape[1:]))]
    lowest = np.iinfo(dtype).min if kind is np.int64 else -np.inf
    for name, result in results.items():
        r, *more = (in_time(array) for array in (result if isinstance(result, list) else [result]))
        tolerance = 0
        if name == "cumsum":
            expected = before(r) + x
        elif name == "cumsum that goes on":
            expected = before(r, h0) + x
        elif name == "cummax":
            expected = np.maximum(before(r, lowest), x)
        elif name == "cumlogsumexp":
            expected = np.logaddexp(before(r, -np.inf), x)
            tolerance = 1e-4 + 2 * float(jnp.finfo(dtype).eps) * abs(expected).max()
        elif name == "cumsum of segments":  # exclusive
            expected = np.where(cut, 0, before(r + x))
        elif name == "cumprod of segments":
            expected = np.where(cut, 1, before(r, 1)) * a
        elif name == "cummin of segments":
            expected = np.where(cut, x, np.minimum(before(r, -(lowest + 1)), x))
        elif name == "linear_scan":
            first = np.arange(len(x)).reshape(-1, *(1 for _ in x.shape[1:])) == 0
            expected = a * np.where(cut & ~first, 0, before(r, h0)) + t
        elif name == "linear_scan, shared":
            expected = shared * before(r) + t
        elif name == "linear_scan_vjp":
            np.testing.assert_array_equal(more[0], t + after(a * more[0]), err_msg=name)
            expected = (more[0] * before(y, h0)).astype(dtype)
        elif name == "cumprod and t":
            expected = np.cumprod(np.where(a == 0, 1, a), 0) + t
        elif name in ("cumprod_jvp", "cumprod_jvp of y"):
            expected = before(np.cumprod(np.where(a == 0, 1, a), 0), 1) * t
        elif name == "cummax_jvp":
            most = a.copy()
            for i in range(1, len(a)):
                most[i] = np.where(cut[i], a[i], np.maximum(most[i - 1], a[i]))
            expected = np.where(a == most, t, before(r))
        elif name.startswith("gradient"):
            logs = name == "gradient of cumlogsumexp"
            made = in_time(results["cumlogsumexp"]) if logs else np.maximum.accumulate(a)
            weight = np.exp(x - made) if logs else (a == made).astype(float)
            factor = after(np.exp(before(made, -np.inf) - made) if logs else 1 - weight)
            total = t.astype(float)
            for i in range(len(t) - 2, -1, -1):
                total[i] += factor[i] * total[i + 1]
            expected = weight * total
            tolerance = (0.1 if dtype.itemsize < 4 else 1e-3) * abs(total).max() if logs else 0
        elif name == "cummin_jvp":
            expected = np.where(a == np.minimum.accumulate(a), t, before(r))
        else:
            logsum = in_time(results["cumlogsumexp"])
            expected = np.exp(before(logsum, -np.inf) - logsum) * before(r) + np.exp(x - logsum) * t
            tolerance = 0.1 if dtype.itemsize < 4 else 1e-4
        np.testing.assert_allclose(r, expected.astype(kind), rtol=0, atol=tolerance, err_msg=name)


def run_scans(rng):
    kernels = set()
    for i, (shape, dtype) in enumerate(SCANS):
        with jax.enable_x64("64" in dtype or dtype == "complex128"):
            # Sums are of small numbers of both signs, and factors of 0 end the growth of states.
            x = np.diff(rng.integers(-3, 4, shape), axis=1, prepend=0)
            a, y = rng.choice([-1, 1, 1, 0], shape), rng.choice([-1, 1], shape)
            t, h0 = rng.integers(-1, 2, shape), rng.integers(-1, 2, (shape[0], 1, *shape[2:]))
            starts = rng.random((1, *shape[1:])) < 0.1
            args = (*(jnp.asarray(v).astype(dtype) for v in (x, a, t, y, h0)), jnp.asarray(starts))
            reverse = bool(i % 2)
            for call in jaxgpuops.explain(lambda *args: scans(*args, reverse), *args):
                if call.plan:
                    kernels.add(f"{call.plan['algorithm']} {call.plan['layout']}")
            check_scans(jax.device_get(scans(*args, reverse)), *args, reverse)
    return kernels or {"cpu"}


# ---- Counts and segments --------------------------------------------------------------------------------------------

COUNTS = [
    ((37, 61), 7),
    ((6400, 61), 7),
    ((6401, 7), 200),
    ((2601, 301), 9),
    ((2601, 601), 99),
    ((3, 30_001), 300),
    ((2, 30_001), 5001),
    ((2, 70_001), 50_001),
    ((1, 30_001), 130_001),
    ((1, 140_001), 9001),
    ((2, 5001), 500_001),
    ((8, 270_001), 300_001),
]
SEGMENTS = [
    # (shape of the data, segments): few rows; few columns, by tables of lanes or warps or by atomics; rows in order of
    # ids
    ((29, 5), 4),
    ((129, 3), 41),
    ((301, 17), 41),
    ((2001,), 30),
    ((2001, 3), 3001),
    ((9001, 40), 30),
    ((9001,), 3001),
    ((3001,), 3001),  # integers and extremes by atomics on the results: threads have one row, or four
    ((801, 130), 101),
    ((8001,), 30),  # extremes and integers by one block, or by slices
    ((50_001,), 101),
    ((40_001,), 3001),
    ((1_100_001,), 2001),  # by atomics, with tables of blocks
    ((20_001, 12), 3001),
    ((12_001, 3), 3001),
    ((9001, 2), 101),
    ((9001, 3), 101),
    ((9001, 3), 701),
    ((5001,), 2_000_001),
    ((20_001, 64), 1001),
    ((100_001, 18), 110_001),
    ((34_001, 9), 41),  # by tables of all columns
    ((301, 1030), 50),
    ((5001, 14), 301),  # by blocks that pick the rows of eight segments, or order those of a range
    ((3001, 70), 2001),
    ((300, 1501), 40),
    ((70_001, 4), 50_001),  # by buckets, whose rows are moved as whole vectors, or as several units
    ((70_001, 3), 90_001),
    ((70_001, 2), 90_001),
    ((270_001,), 600_001),  # of 16 bits, too
]


def run_counts(rng):
    kernels = set()
    for (shape, bins), dtype in itertools.product(COUNTS, ("int8", "uint16", "int32", "int64")):
        with jax.enable_x64(dtype == "int64"):
            x = rng.integers(0, min(bins + 9, 120), shape).astype(dtype)
            fn = lambda x: jaxgpuops.bincount(x, bins)
            kernels |= {call.plan.get("algorithm", "cpu") for call in jaxgpuops.explain(fn, x)}
            expected = [np.bincount(row[row < bins], minlength=bins) for row in x]
            np.testing.assert_array_equal(fn(x), expected)
    for (rows, n, m), dtype in itertools.product(
        [(3, 1, 37), (3, 301, 1001), (700, 47, 68), (140, 1030, 1030), (2, 50_001, 1_700_000)],
        ("int8", "bfloat16", "float32", "int64"),
    ):
        with jax.enable_x64(dtype == "int64"):
            table, queries = np.sort(rng.integers(-9, 9, (rows, n)), 1), rng.integers(-12, 12, (rows, m))
            found = jaxgpuops.searchsorted(jnp.asarray(table, dtype), jnp.asarray(queries, dtype))
            np.testing.assert_array_equal(found, [np.searchsorted(t, q) for t, q in zip(table, queries, strict=True)])
            shared = jaxgpuops.searchsorted(jnp.asarray(table[0], dtype), jnp.asarray(queries.T, dtype))
            np.testing.assert_array_equal(shared, np.searchsorted(table[0], queries.T))
            queries.sort()  # for queries in order, blocks need no tree
            in_order = jaxgpuops.searchsorted(jnp.asarray(table[0], dtype), jnp.asarray(queries, dtype))
            np.testing.assert_array_equal(in_order, np.searchsorted(table[0], queries))
    for (rows, n), size in itertools.product([(3, 1025), (2, 70_001), (1, 33), (2, 0)], (0, 2, 9001)):
        mask = rng.random((rows, n)) < 0.3
        kernels |= {call.plan.get("algorithm", "cpu") for call in jaxgpuops.explain(lambda m: choose(m, size), mask)}
        mask[:, :1] = True
        runs = mask.cumsum(1)
        place, end = np.broadcast_to(np.arange(n, dtype=np.int32), mask.shape), np.full((1, 1), n, np.int32)
        results = [choose(mask, size), pick(mask, [place], [end], size)[0]]
        for dtype in ("int8", "float16", "float32"):
            x = jnp.asarray(runs % 100, dtype)
            results.append(pick(x, [x, place], [jnp.zeros((1, 1), x.dtype), end], size, starts=True)[1])
        for result in results:
            for row, found in zip(mask, np.asarray(result), strict=True):
                places = np.flatnonzero(row)[:size]
                np.testing.assert_array_equal(found, np.pad(places, (0, size - len(places)), constant_values=n))
    for dtype, different in itertools.product(("float32", "float64"), (40, 1 << 20)):
        with jax.enable_x64(dtype == "float64"):
            x = rng.integers(0, different, 1 << 19).astype(dtype)
            call = functools.partial(unique_p, axis=0, size=40, index=True, inverse=True)
            kernels |= {call.plan.get("algorithm", "cpu") for call in jaxgpuops.explain(call, x)}
            values, first, inverse, count = call(jnp.asarray(x))
        wanted = np.unique(x, return_index=True, return_inverse=True, return_counts=True)
        np.testing.assert_array_equal(inverse, wanted[2])
        for own, y in zip((values, first, count), (wanted[0], wanted[1], wanted[3]), strict=True):
            np.testing.assert_array_equal(own, y[:40])
    for n, size in ((1001, 2000), (1 << 20, 500)):  # compared; the least elements
        x = jnp.asarray(rng.integers(0, 1 << 24, n), "float32")
        call = functools.partial(jaxgpuops.unique, size=size, return_counts=True)
        kernels |= {call.plan.get("algorithm", "cpu") for call in jaxgpuops.explain(call, x)}
        wanted = np.unique(x, return_counts=True)
        for own, y in zip(call(x), wanted, strict=True):
            count = min(size, len(y))
            np.testing.assert_array_equal(own[:count], y[:count])
    for dtype, n in itertools.product(("int8", "bfloat16"), (5001, 70_001)):
        x = jnp.asarray(rng.integers(-99, 99, n), dtype)
        call = functools.partial(jaxgpuops.unique, size=100, return_counts=True)
        kernels |= {call.plan.get("algorithm", "cpu") for call in jaxgpuops.explain(call, x)}
        for own, y in zip(call(x), np.unique(np.asarray(x, np.int32), return_counts=True), strict=True):
            np.testing.assert_array_equal(np.asarray(own, np.int32), y[:100])
    selections = [
        (6000, 5),
        (6000, 30),
        (3, 50),
        (3, 100),
        (3, 700),
        (1001, 300),
        (3, 1025),
        (3, 4001),
        (2, 8192),
        (2, 9001),
        (2, 17_001),
        (2, 240_001),
        (3, 1_000_001),
    ]
    for (n, m), dtype in itertools.product([*selections, (6, (1 << 22) + 1)], ("int8", "bfloat16", "float32", "int64")):
        with jax.enable_x64(dtype == "int64"):
            x = jnp.asarray(rng.integers(-99, 99, (n, m)), dtype).at[0].set(5)  # one row of equal elements
            ranks = np.array([[0, m // 2, m // 2, m - 1][m <= 1024 :]], np.int32)
            kernels |= {
                call.plan.get("algorithm", "cpu") for call in jaxgpuops.explain(lambda x: select(x, ranks, 1), x)
            }
            order = np.argsort(np.asarray(x, np.int16), 1, kind="stable")[:, ranks[0]]
            values, indices = select(x, ranks, 1)
            np.testing.assert_array_equal(indices, order)
            np.testing.assert_array_equal(values, np.take_along_axis(np.asarray(x), order, 1))
            if m <= 1024:  # columns
                values, indices = select(x.T, ranks.T, 0)
                np.testing.assert_array_equal(indices.T, order)
                np.testing.assert_array_equal(values.T, np.take_along_axis(np.asarray(x), order, 1))
            if dtype in ("bfloat16", "float32"):
                found = jaxgpuops.quantile(x, [0.31, 0.5][m <= 1024 :])
                expected = np.quantile(np.asarray(x, np.float64), [0.31, 0.5][m <= 1024 :], axis=1)
                np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=1e-2, atol=1e-6)
    for dtype, bins in itertools.product(("bfloat16", "float32", "float64"), (1, 300)):
        with jax.enable_x64(dtype == "float64"):
            x = jnp.asarray(rng.standard_normal((3, 30_001)), dtype)
            counts, edges = jaxgpuops.histogram(x, bins, range=(-1, 1))
            wide, ends = np.asarray(x, np.float64), np.asarray(edges, np.float64)
            for row, own in zip(wide, np.asarray(counts), strict=True):
                row = row[(row >= ends[0]) & (row <= ends[-1])]
                place = np.minimum(np.searchsorted(ends, row, "right") - 1, bins - 1)
                np.testing.assert_array_equal(own, np.bincount(place, minlength=bins))
    # few rows; rows that ascend; clusters; blocks that share rows, with cells in shared memory and without; rows in
    # order of ids
    softmaxes = [
        ((301, 40), 30),
        ((2048,), 3000),
        ((1030, 3), 9),
        ((6001, 4), 200),
        ((6002, 4), 200),
        ((6002,), 5000),
        ((4001, 130), 300),
    ]
    for shape, segments in (*softmaxes, ((70_002,), 200), ((20_002, 100), 5000)):
        x, ids = rng.standard_normal(shape).astype(np.float32), rng.integers(-1, segments + 1, shape[0])
        is_sorted = shape[0] % 2 == 1
        ids = np.sort(ids) if is_sorted else ids
        softmax = lambda x: jaxgpuops.segment_softmax(x, ids, segments, indices_are_sorted=is_sorted)
        kernels |= {call.plan.get("algorithm", "cpu") for call in jaxgpuops.explain(softmax, x)}
        sums = np.zeros((segments + 2, *shape[1:]))
        np.add.at(sums, ids + 1, np.exp(x))
        mine = ((ids >= 0) & (ids < segments)).reshape(-1, *(1,) * (x.ndim - 1))
        shares = np.where(mine, np.exp(x) / sums[ids + 1], 0)
        np.testing.assert_allclose(softmax(x), shares, rtol=1e-5)
        with np.errstate(divide="ignore"):
            logs = np.log(sums[1:-1])
        found = jaxgpuops.segment_logsumexp(x, ids, segments, indices_are_sorted=is_sorted)
        np.testing.assert_allclose(found, logs, rtol=1e-5, atol=1e-5)
        narrow = jaxgpuops.segment_softmax(x.astype(jnp.float16), ids, segments, indices_are_sorted=is_sorted)
        np.testing.assert_allclose(narrow, shares, rtol=2e-2, atol=1e-6)
    columns = rng.integers(0, 9, (3, 501, 5))
    found = jax.vmap(lambda x: jaxgpuops.bincount(x, 8), in_axes=2, out_axes=2)(columns)
    np.testing.assert_array_equal(found, (columns[:, :, None] == np.arange(8)[:, None]).sum(1))
    for (shape, segments), dtype in itertools.product(SEGMENTS, ("int8", "int64", "bfloat16", "float32", "float64")):
        with jax.enable_x64(dtype.endswith("64")):
            data = rng.integers(-1, 2, shape)
            ids = np.where(rng.random(shape[0]) < 0.5, segments // 2, rng.integers(-1, segments + 1, shape[0]))
            valid = (ids >= 0) & (ids < segments)
            for is_sorted in (False, True):
                ids, valid = (ids, valid) if not is_sorted else (ids[order := np.argsort(ids)], valid[order])
                expected = np.zeros((segments, *shape[1:]))
                np.add.at(expected, ids[valid], data[valid])
                x = jnp.asarray(data).astype(dtype)
                fn = lambda x: jaxgpuops.segment_sum(x, ids, segments, indices_are_sorted=is_sorted)
                kernels |= {call.plan.get("algorithm", "cpu") for call in jaxgpuops.explain(fn, x)}
                wanted = expected.astype(np.int64).astype(np.int8) if dtype == "int8" else jnp.asarray(expected, dtype)
                np.testing.assert_array_equal(np.asarray(fn(x)), np.asarray(wanted))
                shared = jax.vmap(lambda ids, x=x: jaxgpuops.segment_sum(x, ids, segments))(np.stack([ids, ids[::-1]]))
                np.testing.assert_array_equal(np.asarray(shared[0]), np.asarray(wanted))
                largest = np.full((segments, *shape[1:]), -2)
                np.maximum.at(largest, ids[valid], data[valid])
                found = np.asarray(jaxgpuops.segment_max(x, ids, segments, indices_are_sorted=is_sorted), np.float64)
                np.testing.assert_array_equal(np.maximum(found, -2), largest)
    return kernels


def main():
    families = {"topk": run_topk, "sorts": run_sorts, "gates": run_gates, "rows": run_rows, "scans": run_scans}
    families |= {"counts": run_counts, "moe": run_moe}
    families["columns"] = functools.partial(run_rows, shapes=COLUMNS)
    families["streamed"] = functools.partial(run_rows, streamed=True)
    kernels = set()
    for family in sys.argv[1:] or families:
        kernels |= families[family](np.random.default_rng(0))
    print("kernels:", ", ".join(sorted(kernels)))


if __name__ == "__main__":
    main()
