"""Counts and segments: exact for integers, against float64 for floats, with ids of every kind."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxgpuops
from jaxgpuops import _arguments
from jaxgpuops.lax import _segments as segments_lax

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
REDUCTIONS = ["segment_sum", "segment_max", "segment_min"]


def ids_of(kind, n, segments, rng):
    """Ids that are hard: some are out of range, most rows have the same one, and some segments have no rows."""
    ids = {
        "uniform": lambda: rng.integers(-2, segments + 2, n),
        "hot": lambda: np.where(rng.random(n) < 0.9, segments // 2, rng.integers(0, max(segments, 1), n)),
        "one": lambda: np.full(n, max(segments - 1, 0)),
        "none": lambda: np.full(n, -1),
        "sparse": lambda: rng.integers(0, max(segments, 1), n) // 7 * 7,
    }[kind]()
    return ids.astype(np.int32)


def expected_of(name, data, ids, segments):
    """The expected result, computed row by row in float64 or in the integers' own dtype."""
    wide = data.astype(np.float64) if jnp.issubdtype(data.dtype, jnp.floating) else data
    info = None if wide.dtype == np.float64 or wide.dtype == bool else np.iinfo(wide.dtype)
    start = {
        "segment_sum": 0,
        "segment_max": -np.inf if info is None else info.min,
        "segment_min": np.inf if info is None else info.max,
    }[name]
    out = np.full((segments, *data.shape[1:]), start, wide.dtype)
    fold = {"segment_sum": np.add, "segment_max": np.maximum, "segment_min": np.minimum}[name]
    with np.errstate(all="ignore"):
        for row, i in zip(wide, ids, strict=True):
            if 0 <= i < segments:
                out[i] = fold(out[i], row)
    return out


@pytest.mark.parametrize("dtype", INTEGERS)
def test_bincount(paths, dtype):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        for shape, length in [((3, 1000), 7), ((2, 0), 3), ((0, 5), 3), ((5,), 0), ((2, 3, 70), 300), ((300_000,), 17)]:
            x = rng.integers(0, min(120, length + 2), shape).astype(dtype)
            if dtype.startswith("i"):
                x[..., :2] = -1
            expected = np.zeros((*shape[:-1], length), np.int32)
            for place in np.ndindex(shape[:-1]):
                own = x[place].astype(np.int64)
                expected[place] = np.bincount(own[(own >= 0) & (own < length)], minlength=length)
            counts = jaxgpuops.bincount(x, length)
            assert counts.dtype == np.int32
            np.testing.assert_array_equal(counts, expected)


def test_bincount_of_columns():
    x = np.random.default_rng(0).integers(-1, 5, (3, 40, 6))
    ours = jax.vmap(lambda x: jaxgpuops.bincount(x, 4), in_axes=2, out_axes=2)(x)
    expected = (x[:, :, None] == np.arange(4)[:, None]).sum(1)
    np.testing.assert_array_equal(ours, expected)


def test_weights_are_added_up():
    rng = np.random.default_rng(0)
    x, w = rng.integers(-1, 6, (3, 200)), rng.standard_normal((3, 200)).astype(np.float32)
    expected = np.stack([expected_of("segment_sum", w[i], x[i], 5) for i in range(3)])
    np.testing.assert_allclose(jaxgpuops.bincount(x, 5, weights=w), expected, rtol=1e-5, atol=1e-5)
    shared = jaxgpuops.bincount(x, 5, weights=w[0])
    expected = np.stack([expected_of("segment_sum", w[0], x[i], 5) for i in range(3)])
    np.testing.assert_allclose(shared, expected, rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda w: (jaxgpuops.bincount(x, 5, weights=w) ** 2).sum())(w)
    sums = np.asarray(jaxgpuops.bincount(x, 5, weights=w))
    rows = np.arange(3)[:, None]
    np.testing.assert_allclose(gradient, np.where((x >= 0) & (x < 5), 2 * sums[rows, x.clip(0, 4)], 0), rtol=1e-6)


HARD = [(dtype, kind) for dtype in ("bfloat16", "float32", "int32") for kind in ("hot", "one", "none", "sparse")]


@pytest.mark.parametrize("dtype, kind", [*((dtype, "uniform") for dtype in (*INTEGERS, *FLOATS)), *HARD])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_segments(name, dtype, kind):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        for n, segments, features in [(300, 9, (2, 3)), (0, 3, (2,)), (50, 200, ())]:
            ids = ids_of(kind, n, segments, rng)
            data = rng.integers(0, 200, (n, *features)) / (1 if dtype in INTEGERS else 8) - 10 * (dtype[0] != "u")
            data = jnp.asarray(data, dtype)
            for is_sorted in (False, True):
                ids = np.sort(ids) if is_sorted else ids
                fn = getattr(jaxgpuops, name)
                out = fn(data, ids, segments, indices_are_sorted=is_sorted)
                expected = expected_of(name, np.asarray(data), ids, segments)
                assert out.dtype == data.dtype and out.shape == expected.shape
                if name == "segment_sum" and dtype in FLOATS:  # every sum of eighths is exact before it is rounded
                    expected = expected.astype(out.dtype)
                np.testing.assert_array_equal(np.asarray(out), expected.astype(out.dtype))
            if kind == "uniform" and dtype not in ("float16", "bfloat16"):
                np.testing.assert_array_equal(out, getattr(jax.ops, name)(data, ids, segments))


def test_short_floats_add_up_in_float32():
    data = np.full(4096, 1 / 128, ml_dtypes.bfloat16)
    assert float(jaxgpuops.segment_sum(data, np.zeros(4096, np.int32), 1)[0]) == 32


def test_many_rows_on_many_threads():
    """Sizes that take every way in which threads share the work."""
    rng = np.random.default_rng(0)
    for n, segments, features in [(300_000, 1000, 1), (3000, 40, 200), (100_000, 2, 3)]:
        data = rng.integers(-50, 50, (n, features)).astype(np.float32)
        ids = ids_of("hot", n, segments, rng)
        expected = np.zeros((segments, features))
        np.add.at(expected, ids, data)
        np.testing.assert_array_equal(jaxgpuops.segment_sum(data, ids, segments), expected)


@pytest.mark.parametrize("name", ["segment_max", "segment_min"])
def test_nans_and_bools(name):
    fn = getattr(jaxgpuops, name)
    data = np.array([1, np.nan, 2, -np.inf, np.inf, 3], np.float32)
    ids = np.array([0, 0, 1, 1, 1, 5])
    out = np.asarray(fn(data, ids, 4))
    np.testing.assert_array_equal(np.isnan(out), [True, False, False, False])
    assert out[1] == (np.inf if name == "segment_max" else -np.inf) and np.isinf(out[2:]).all()
    bools = np.array([True, False, True, True])
    assert (
        fn(bools, np.array([0, 0, 1, 1]), 3).tolist()
        == getattr(jax.ops, name)(bools, jnp.array([0, 0, 1, 1]), 3).tolist()
    )


def test_complex_sums():
    data = np.arange(8).astype(np.complex64) * (1 + 2j)
    ids = np.array([0, 1, 0, 1, 2, 2, 9, -1])
    np.testing.assert_array_equal(jaxgpuops.segment_sum(data, ids, 4), jax.ops.segment_sum(data, ids, 4))


@pytest.mark.parametrize("name", ["sum", "max", "softmax", "logsumexp"])
@pytest.mark.parametrize("segments", [2, None])
def test_symbolic_rows(name, segments):
    (n,) = jax.export.symbolic_shape("n")
    function = getattr(jaxgpuops, f"segment_{name}")
    loss = lambda x, ids: (jnp.exp(function(x, ids, segments or x.shape[0])) ** 2).sum()
    step = jax.jit(jax.value_and_grad(loss))
    of = jax.ShapeDtypeStruct((n, 3), np.float32), jax.ShapeDtypeStruct((n,), np.int32)
    exported = jax.export.export(step, disabled_checks=jaxgpuops.export_checks())(*of)
    x, ids = np.arange(12, dtype=np.float32).reshape(4, 3) / 8, np.array([0, 1, 1, -1], np.int32)
    for found, wanted in zip(exported.call(x, ids), step(x, ids), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("name", ["segment_sum", "segment_max", "segment_min", "segment_softmax", "segment_logsumexp"])
def test_gradients_of_16_bits_with_strict_promotion(name):
    data, ids = jnp.array([1.0, 3.0, 3.0], np.float16), jnp.array([0, 1, 1])
    with jax.numpy_dtype_promotion("strict"):
        _, pull = jax.vjp(lambda x: getattr(jaxgpuops, name)(x, ids, 2), data)
        assert pull(jnp.ones_like(_))[0].dtype == np.float16


@pytest.mark.parametrize("name", ["segment_softmax", "segment_logsumexp"])
def test_rows_without_a_segment_have_no_nan(name):
    x = jnp.array([1, np.nan, np.nan, 3, np.nan])
    for ids in ([1, 0, 5, 1, -1], [0, 1, 5, 0, -1]):  # the segment of NaNs is the first, and the last
        gradient = jax.grad(lambda x, ids=ids: (getattr(jaxgpuops, name)(x, np.array(ids), 2) ** 2).sum())
        for found in (gradient(x), jax.grad(lambda x, gradient=gradient: gradient(x).sum())(x)):
            assert np.isnan(found).tolist() == [False, True, False, False, False] and (found[2] == found[4] == 0)


def test_gradient_of_segment_logsumexp_beside_infinities():
    """That of `jax.nn.logsumexp` of each segment."""
    x, ids = jnp.array([np.inf, 1, -np.inf, -np.inf, 2, -np.inf]), np.array([0, 0, 0, 1, 2, 2])
    gradient = jax.grad(lambda x: jaxgpuops.segment_logsumexp(x, ids, 3) @ jnp.array([2.0, 3.0, 4.0]))(x)
    np.testing.assert_array_equal(gradient, [np.nan, 0, 0, 0, 4, 0])


def test_histograms_in_a_shard_map():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    edges, x = np.array([-3.0, -1.0, 0.5, 4.0]), np.array([[-4.0, -3, -2, -1, 0, 0.5, 4, 5, np.nan]], np.float32)
    split = jax.shard_map(
        lambda x: jaxgpuops.histogram(x, edges)[0], mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a")
    )
    assert jax.jit(split)(x).tolist() == [np.histogram(x[0, :-1], edges)[0].tolist()] == [[2, 2, 2]]


def test_ties_share_the_gradient():
    data, ids = jnp.array([1.0, 3.0, 3.0, 2.0, 5.0]), jnp.array([0, 0, 0, 1, 7])
    weights = jnp.array([6.0, 5.0, 1.0])
    for name, x in (("segment_max", data), ("segment_min", -data)):
        ours = jax.grad(lambda x, name=name: (getattr(jaxgpuops, name)(x, ids, 2) * weights[:2]).sum())(x)
        assert ours.tolist() == [0, 3, 3, 5, 0]


def test_take():
    rng = np.random.default_rng(0)
    table = rng.integers(-9, 9, (11, 3)).astype(np.float32)
    ids = rng.integers(-3, 14, (4, 5))
    valid = (ids >= 0) & (ids < 11)
    expected = np.where(valid[..., None], table[ids.clip(0, 10)], 0)
    np.testing.assert_array_equal(jaxgpuops.take(table, ids), expected)
    ct = rng.integers(-9, 9, (4, 5, 3)).astype(np.float32)
    [gradient] = jax.vjp(lambda t: jaxgpuops.take(t, ids), table)[1](ct)
    expected = np.zeros_like(table)
    np.add.at(expected, ids[valid], ct[valid])
    np.testing.assert_array_equal(gradient, expected)


def by_segment(fn, x, ids, segments):
    """fn(rows) of each segment that has rows, in JAX and float64."""
    return {s: fn(np.asarray(x, np.float64)[ids == s]) for s in range(segments) if (ids == s).any()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(60, 3), (40000, 1), (20000, 3), (1000, 40)])
def test_softmax_and_logsumexp_of_segments(shape, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(100 * rng.standard_normal(shape), dtype)
    ids = rng.integers(-1, 8, shape[0]) // 2 * 2
    tolerance = 1e-2 if dtype == "bfloat16" else 1e-5
    sums = np.full((7, shape[1]), -np.inf)
    shares = np.zeros(shape)
    for s, rows in by_segment(lambda rows: rows, x, ids, 7).items():
        sums[s] = jax.nn.logsumexp(rows, axis=0)
        shares[ids == s] = jax.nn.softmax(rows, axis=0)
    ours = jaxgpuops.segment_logsumexp(x, ids, 7)
    assert ours.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(ours, np.float64), sums, rtol=tolerance)
    ours = jaxgpuops.segment_softmax(x, ids, 7)
    assert ours.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(ours, np.float64), shares, atol=tolerance)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_softmax_of_16_bits_is_rounded_once(dtype):
    rng = np.random.default_rng(0)
    for shape, segments in [((5000,), 30), ((300, 3), 7), ((0, 3), 4), ((9, 2, 2), 5)]:
        x, ids = jnp.asarray(rng.standard_normal(shape), dtype), rng.integers(-1, segments + 1, shape[0])
        for fn in (jaxgpuops.segment_softmax, jaxgpuops.segment_logsumexp):
            one = lambda x, ids, fn=fn, n=segments: fn(x, ids, n)
            ours, wide = one(x, ids), one(x.astype(np.float32), ids)
            assert ours.dtype == x.dtype
            np.testing.assert_array_equal(ours, wide.astype(dtype))
            many = jax.vmap(one, in_axes=(None, 0))(x, np.stack([ids, ids[::-1]]))  # the ids share the data
            np.testing.assert_array_equal(many[0], ours)
            total = lambda x, one=one, ids=ids: jnp.sum(one(x, ids) ** 2, where=jnp.isfinite(one(x, ids)))
            slope, of_wide = jax.grad(total)(x), jax.grad(total)(x.astype(np.float32))
            assert slope.dtype == x.dtype
            tolerance = 4 * float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(slope.astype(np.float32), of_wide, rtol=tolerance, atol=tolerance)


def test_softmax_beside_an_infinity(paths):
    x = np.array([np.inf, 1, -np.inf, np.nan, 1, -np.inf], np.float32)
    shares = jaxgpuops.segment_softmax(x, np.array([0, 0, 0, 1, 1, 2]), 3)
    np.testing.assert_array_equal(shares, [np.nan, 0, 0, np.nan, np.nan, np.nan])


def test_softmax_of_float64():
    rng = np.random.default_rng(0)
    x, ids = 100 * rng.standard_normal((300, 2)), rng.integers(-1, 8, 300)
    x[rng.random((300, 2)) < 0.1] = -np.inf
    with jax.enable_x64(True):
        shares, logs = jaxgpuops.segment_softmax(x, ids, 7), jaxgpuops.segment_logsumexp(x, ids, 7)
        for s in range(7):
            rows = x[ids == s]
            np.testing.assert_allclose(shares[ids == s], jax.nn.softmax(rows, axis=0), rtol=1e-12)
            np.testing.assert_allclose(logs[s], jax.nn.logsumexp(rows, axis=0), rtol=1e-14)
        assert not shares[(ids < 0) | (ids > 6)].any()


def test_gradients_of_softmax_and_logsumexp_of_segments():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 20, 3)).astype(np.float32)
    ids = rng.permutation(np.arange(20) % 6 - 1)
    hot = (ids[:, None] == np.arange(4)).astype(np.float32)
    exp_sums = lambda x: jnp.einsum("is,ij->sj", hot, jnp.exp(x))
    log_sums = lambda x: jnp.log(exp_sums(x)).sum()
    shares = lambda x: (w * jnp.exp(x) * jnp.einsum("is,sj->ij", hot, 1 / exp_sums(x))).sum()
    ours = jax.grad(lambda x: jaxgpuops.segment_logsumexp(x, ids, 4).sum())(x)
    np.testing.assert_allclose(ours, jax.grad(log_sums)(x), atol=1e-6)
    ours = jax.grad(lambda x: (w * jaxgpuops.segment_softmax(x, ids, 4)).sum())(x)
    np.testing.assert_allclose(ours, jax.grad(shares)(x), atol=1e-6)
    empty = jax.grad(lambda x: jnp.where(jnp.isfinite(y := jaxgpuops.segment_logsumexp(x, ids, 9)), y, 0).sum())(x)
    assert np.isfinite(empty).all()


def test_histogram():
    rng = np.random.default_rng(0)
    x = np.append(rng.standard_normal((3, 500)), [[0, np.nan, np.inf, -np.inf, 2.0]] * 3, 1).astype(np.float32)
    edges = np.array([-1, -0.5, 0, 0.1, 2], np.float32)
    for bins, span in [(10, (-2, 2)), (7, (-0.3, 0.3)), (1, (0, 2)), (1000, (-1, 1)), (edges, None)]:
        counts, found = jaxgpuops.histogram(x, bins, range=span)
        for row, own in zip(x, counts, strict=True):
            theirs, places = jnp.histogram(row[np.isfinite(row)], bins, span)
            np.testing.assert_array_equal(own, theirs)
            np.testing.assert_array_equal(found, places)
    finite = np.nan_to_num(x, posinf=1, neginf=1)
    counts, found = jaxgpuops.histogram(finite[0], weights=np.full(505, 0.5, np.float32))
    theirs, places = jnp.histogram(finite[0])
    np.testing.assert_array_equal(counts, theirs / 2)
    np.testing.assert_array_equal(found, places)
    assert jaxgpuops.histogram(np.arange(10), 5)[0].tolist() == [2] * 5


@pytest.mark.parametrize(
    "dtype, low, high, bins",
    [("float32", 1e6, 1e6 + 1, 256), ("bfloat16", -4, 4, 256), ("bfloat16", -4, 4, 1000), ("float16", -4, 4, 5000)],
)
def test_histograms_whose_edges_are_rounded(dtype, low, high, bins):
    """Rounding moves edges by many bins, so that a number's bin cannot be computed from its value."""
    x = np.random.default_rng(0).uniform(low, high, 2000).astype(dtype)
    low, high = (np.asarray(end, dtype) for end in (low, high))
    counts, edges = jaxgpuops.histogram(x, bins, range=(low, high))
    assert (np.diff(np.asarray(edges, np.float64)) >= 0).all()
    place = np.searchsorted(np.asarray(edges, np.float64), x.astype(np.float64), side="right") - 1
    expected = np.bincount(np.where(x == high, bins - 1, place), minlength=bins)
    np.testing.assert_array_equal(counts, expected)
    weighted, _ = jaxgpuops.histogram(x, bins, range=(low, high), weights=np.full(2000, 2, np.int32))
    np.testing.assert_array_equal(weighted, 2 * expected)
    rows = jax.vmap(lambda x: jaxgpuops.histogram(x, bins, range=(low, high), weights=jnp.ones_like(x, np.int32))[0])
    np.testing.assert_array_equal(rows(jnp.asarray(x).reshape(2, 1000)).sum(0), expected)


def test_histograms_of_rows_and_columns():
    x = np.random.default_rng(0).standard_normal((5, 300, 3)).astype(np.float32)
    counts, edges = jax.vmap(lambda row: jaxgpuops.histogram(row, 7))(x[..., 0])  # each row has edges of its own
    for row, own, places in zip(x[..., 0], counts, edges, strict=True):
        np.testing.assert_array_equal(own, np.histogram(row, places)[0])
        # Two programs may round differently. An edge is low * (1 - t) + high * t: at most four roundings in each.
        bound = 4 * np.finfo(np.float32).eps * abs(row).max()
        np.testing.assert_allclose(places, jnp.histogram_bin_edges(row, 7), rtol=0, atol=bound)
    columns = jax.vmap(lambda x: jaxgpuops.histogram(x, 7, range=(-1, 1))[0], in_axes=2, out_axes=2)(x)
    for i in range(3):
        np.testing.assert_array_equal(columns[..., i], jaxgpuops.histogram(x[..., i], 7, range=(-1, 1))[0])


def test_ids_of_a_byte():
    """Ids of 8 bits give the results of wider ids, also if there are more segments than 8 bits can number."""
    rng = np.random.default_rng(0)
    pairs, ids = rng.standard_normal((3000, 2)).astype(np.float32), rng.integers(0, 256, (4, 3000)).astype(np.uint8)
    for segments in (9, 255, 300):
        of = jax.vmap(lambda pairs, ids, n=segments: jaxgpuops.segment_sum(pairs, ids, n), in_axes=(None, 0))
        np.testing.assert_array_equal(of(pairs, ids), of(pairs, ids.astype(np.int32)))
        loss = lambda pairs, ids, of=of: (of(pairs, ids) ** 2).sum()
        np.testing.assert_array_equal(jax.grad(loss)(pairs, ids), jax.grad(loss)(pairs, ids.astype(np.int32)))
        counts = jaxgpuops.bincount(ids, segments, pairs[:, 0])
        np.testing.assert_array_equal(counts, jaxgpuops.bincount(ids.astype(np.int32), segments, pairs[:, 0]))


def test_vmap_shares_ids():
    """If only the data has a batch, the call is one, with a single row of ids."""
    data, ids = jnp.ones((6, 4, 3)), jnp.array([0, 2, 0, 7, -1, 2])
    for axis in (0, 1, 2):
        x = jnp.moveaxis(data, 1, axis)
        fn = jax.vmap(lambda x: jaxgpuops.segment_sum(x, ids, 3), in_axes=axis, out_axes=axis)
        jaxpr = str(jax.make_jaxpr(fn)(x))
        assert "transpose" not in jaxpr
        expected = np.broadcast_to(np.array([2, 0, 2])[:, None, None], (3, 4, 3))
        np.testing.assert_array_equal(fn(x), np.moveaxis(expected, 1, axis))


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_ids_of_many_features_share_data(name, dtype):
    """Rows of ids share the data, as in histograms of gradients and hessians: results have the bits of one feature at a
    time, and the data is not copied."""
    rng = np.random.default_rng(0)
    for n, segments, columns in [
        (3000, 9, (2,)),
        (70_000, 255, (2,)),
        (500, 3000, ()),
        (400, 7, (3, 11)),
        (0, 4, (2,)),
    ]:
        data = jnp.asarray(rng.integers(0, 99, (n, *columns)) / 8, dtype)
        ids = rng.integers(-1, segments + 1, (3, n))
        one = lambda data, ids: getattr(jaxgpuops, name)(data, ids, segments)
        many = jax.vmap(one, in_axes=(None, 0))
        operands = [e.invars for e in equations(jax.make_jaxpr(many)(data, ids).jaxpr) if "segment" in e.primitive.name]
        assert [x.aval.shape for x in operands[-1]] == [(1, n, *columns), (3, n, *(1 for _ in columns))]
        alone = np.stack([one(data, own) for own in ids])
        if n < 1000:
            expected = [expected_of(name, np.asarray(data), own, segments).astype(alone.dtype) for own in ids]
            np.testing.assert_array_equal(alone, expected)
        np.testing.assert_array_equal(np.asarray(many(data, ids)), alone)
        outer = jax.vmap(many, in_axes=(None, 1), out_axes=1)(data, ids[:, None].repeat(2, 1))
        np.testing.assert_array_equal(np.asarray(outer)[:, 1], alone)


def equations(jaxpr):
    for e in jaxpr.eqns:
        yield e
        for value in e.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def test_gradients_of_shared_data_add_up():
    rng = np.random.default_rng(0)
    data, ct = rng.integers(-9, 9, (20, 2)).astype(np.float32), rng.integers(-9, 9, (3, 5, 2)).astype(np.float32)
    ids = rng.integers(-1, 6, (3, 20))
    hot = (ids[:, :, None] == np.arange(5)).astype(np.float32)
    ours = lambda data: jax.vmap(lambda ids: jaxgpuops.segment_sum(data, ids, 5))(ids)
    [gradient] = jax.vjp(ours, data)[1](ct)
    np.testing.assert_array_equal(gradient, np.einsum("fns,fsc->nc", hot, ct))
    weights = jax.grad(lambda w: (jaxgpuops.bincount(ids, 5, weights=w) * ct[..., 0]).sum())(data[:, 0])
    np.testing.assert_array_equal(weights, np.einsum("fns,fs->n", hot, ct[..., 0]))
    linear = jax.linear_transpose(
        lambda d: segments_lax.segments(segments_lax.segment_sum_p, d, ids[:, :, None].astype(np.int32), 1, 5, False),
        data[None],
    )
    np.testing.assert_array_equal(linear(ct)[0][0], np.einsum("fns,fsc->nc", hot, ct))
    # Tables that rows of ids share.
    rows = jax.vmap(lambda ids: jaxgpuops.take(data, ids))(ids)
    np.testing.assert_array_equal(rows, np.where(((ids >= 0) & (ids < 20))[..., None], data[ids.clip(0, 19)], 0))
    maximum = lambda data: jax.vmap(lambda ids: jaxgpuops.segment_max(data, ids, 5))(ids)
    theirs = lambda data: jax.vmap(lambda ids: jax.ops.segment_max(data, jnp.where(ids < 0, 9, ids), 5))(ids)
    finite = lambda f: lambda data: (jnp.maximum(f(data), -99) * ct).sum()
    np.testing.assert_allclose(jax.grad(finite(maximum))(data), jax.grad(finite(theirs))(data), rtol=1e-6)


def test_rows_without_a_segment_do_not_reach_gradients():
    x, ids = jnp.array([1.0, 500.0, 2.0, -500.0]), np.array([0, 7, 0, -1])
    ones = jax.grad(lambda x: jaxgpuops.segment_logsumexp(x, ids, 1).sum())(x)
    np.testing.assert_allclose(ones, [jax.nn.sigmoid(-1.0), 0, jax.nn.sigmoid(1.0), 0], rtol=1e-6)
    shares = jax.grad(lambda x: jaxgpuops.segment_softmax(x, ids, 1)[0])(x)
    p = jax.nn.sigmoid(-1.0)
    np.testing.assert_allclose(shares, [p * (1 - p), 0, -p * (1 - p), 0], rtol=1e-6)
    twice = jax.jacrev(jax.grad(lambda x: jaxgpuops.segment_logsumexp(x, ids, 1).sum()))(x)
    np.testing.assert_allclose(twice[0, 0], p * (1 - p), rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
@pytest.mark.parametrize("x64", [False, True])
def test_large_ids_stay_in_order(dtype, x64):
    """A search of ids that ascend must not meet smaller ones after those out of range."""
    rng = np.random.default_rng(0)
    ids = np.sort(np.concatenate([rng.integers(0, 3000, 9000), np.array([3001, (1 << 32) - 1])]).astype(dtype))
    data = rng.integers(-1, 2, (len(ids), 3)).astype(np.float32)
    expected = np.zeros((3000, 3))
    np.add.at(expected, ids[:-2].astype(np.int64), data[:-2])
    with jax.enable_x64(x64):
        assert (np.diff(segments_lax.as_int32(_arguments.labels("segment_sum", "ids", ids), 3000)) >= 0).all()
        found = jaxgpuops.segment_sum(data, ids, 3000, indices_are_sorted=True)
    np.testing.assert_array_equal(found, expected)


def test_large_ids_do_not_wrap():
    data = np.ones(3, np.float32)
    for dtype in (np.int64, np.uint64):
        ids = np.array([0, 1 << 32, 1], dtype)
        for x64 in (False, True):
            with jax.enable_x64(x64):
                assert jaxgpuops.segment_sum(data, ids, 2).tolist() == [1, 1]
                assert jaxgpuops.bincount(ids, 2).tolist() == [1, 1]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: jaxgpuops.bincount([0.5], 2), "bincount: x has dtype float32; allowed are int16"),
        (lambda: jaxgpuops.bincount([1], -1), "bincount: length must be between 0 and"),
        (lambda: jaxgpuops.bincount([1], 2.0), "bincount: length must be an integer known at trace time"),
        (lambda: jaxgpuops.bincount(1, 2), "bincount: x must have at least one dimension, got a scalar"),
        (lambda: jaxgpuops.bincount([1, 2], 2, [1.0, 2.0, 3.0]), "bincount: weights must broadcast to shape"),
        (lambda: jaxgpuops.segment_sum([1.0], [[0]], 2), "segment_sum: segment_ids must have shape"),
        (lambda: jaxgpuops.segment_sum([1.0], [0, 1], 2), "segment_sum: segment_ids must have shape"),
        (lambda: jaxgpuops.segment_sum([True], [0], 2), "segment_sum: data has dtype bool"),
        (lambda: jaxgpuops.segment_max([1j], [0], 2), "segment_max: data has dtype complex64"),
        (
            lambda: jaxgpuops.segment_sum([1.0], [0], 2, indices_are_sorted=1),
            "indices_are_sorted must be True or False",
        ),
        (lambda: jaxgpuops.histogram([1.0], 2, weights=[1.0, 2.0]), "histogram: weights must broadcast to shape"),
        (
            lambda: jaxgpuops.histogram([1.0], 2, range=3.0),
            "histogram: range must be two numbers, got an array of shape",
        ),
        (
            lambda: jaxgpuops.histogram([1.0], 2, range="ab"),
            "histogram: range must be an array of numbers .*, got 'ab'",
        ),
        (lambda: jaxgpuops.histogram([1.0], 2, range=[0.0, 1j]), "histogram: range has dtype complex64"),
        (lambda: jaxgpuops.histogram([1.0], None), "histogram: bins must be an integer known at trace time, got None"),
        (lambda: jaxgpuops.histogram([1.0], [0, 1j]), "histogram: bins has dtype complex64"),
        (lambda: jaxgpuops.histogram([1.0], [[0], [1, 2]]), "histogram: bins must be an array of numbers"),
        (lambda: jaxgpuops.histogram([1.0], 2, axis_name="x"), "histogram: axis_name must be a mesh axis"),
        (lambda: jaxgpuops.take(1.0, [0]), "take: table must have at least one dimension"),
        (lambda: jaxgpuops.take([1.0], [0.0]), "take: ids has dtype float32"),
    ],
)
def test_arguments(call, message):
    with pytest.raises((TypeError, ValueError), match=f"jaxgpuops.*{message}"):
        call()
