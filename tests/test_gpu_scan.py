"""Scans on a GPU: see gpu.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import LARGE, busy_stream, memory, needs_memory, noise, plan, run_in_command_buffers, same_bits
from scan_reference import leaks

import jaxgpuops
from jaxgpuops.lax import scan_primitives

pytestmark = pytest.mark.usefixtures("kernels")

# Every kernel: (shape, axis). A row of "look-ahead, one row" is so long that it takes that kernel
# alone, and in a large batch another.
REGIMES = {
    "few, rows": ((40, 77), 1),
    "few, rows of several warps": ((9, 501), 1),
    "few, rows of twelve warps": ((9, 1501), 1),
    "few, columns": ((70, 47, 5), 1),  # of recurrences
    "rows, a tile": ((3000, 250), 1),
    "rows, aligned": ((3000, 4096), 1),
    "walk": ((600, 70_001), 1),
    "rows, a cluster": ((3, 20_001), 1),
    "resident": ((3, 300_001), 1),
    "resident, aligned": ((1, 1 << 20), 1),
    "resident, two tiles a block": ((7, 299_001), 1),
    "look-ahead, along, one row": ((1, 2_200_003), 1),
    "look-ahead, along": ((2, 8_000_004), 1),
    "columns": ((16, 1003, 2048), 1),
    "columns, a cluster": ((5, 2003, 64), 1),
    "columns, twice, few tiles": ((5, 3003, 64), 1),
    "columns, twice": ((2, 8003, 64), 1),
    "spans, twice, lines of odd length": ((2, 9001, 70), 1),  # of cumulative operations
    "look-ahead, across": ((1, 60_001, 128), 1),
    "spans": ((600, 5003, 3), 1),  # and clusters in turns
    "spans, a tile": ((400, 163, 23), 1),
    "spans, a cluster": ((3, 4103, 3), 1),
    "spans, resident": ((3, 20_001, 5), 1),
    "spans, twice, few tiles": ((40, 20_001, 5), 1),
    "spans, twice, few columns": ((1, 1_000_003, 3), 1),
    "sums of two columns, a tile": ((70, 1003, 2), 1),  # they are rows of complex numbers
    "sums of two columns, resident": ((3, 70_001, 2), 1),
    "sums of two columns, look-ahead": ((1, 2_000_003, 2), 1),
    "spans, twice": ((2, 50_001, 19), 1),
    "spans, twice, more rows": ((30, 30_001, 5), 1),
    "packs, rows of two": ((70_003, 2), 1),
    "packs, rows of two packs": ((70_003, 8), 1),
    "packs, rows of four packs": ((70_003, 16), 1),
    "packs, rows of three": ((70_003, 3), 1),
    "packs, rows of eleven": ((70_003, 11), 1),
    "packs, rows of seven packs": ((9001, 28), 1),
    "packs, rows of nine packs": ((9001, 31), 1),
    "short, rows of whole vectors": ((150_001, 28), 1),
    "short, rows": ((150_001, 31), 1),
    "short, a few columns": ((80_001, 7, 5), 1),
    "short, columns": ((1000, 3, 1003), 1),
    "lanes, a few columns": ((5001, 7, 5), 1),
    "lanes, columns": ((33, 3, 1003), 1),
    "small, rows of two": ((3001, 2), 1),
    "small, rows": ((901, 31), 1),
    "small, columns": ((50, 7, 5), 1),
    "pieces, maxima in rounds": ((3, 300, 5), 1),
    "pieces": ((3, 2601, 5), 1),
    "pieces, columns": ((2, 1203, 66), 1),
    "pieces, many columns": ((1, 200, 701), 1),
}
regimes = pytest.mark.parametrize("shape, axis", REGIMES.values(), ids=REGIMES)


def integers(key, shape):
    """Integers so small that their sums are exact in any order."""
    return jax.random.randint(key, shape, -99, 100, jnp.int8).astype(jnp.float32)


def normal(key, shape):
    return 30 * jax.random.normal(key, shape)


def starts_of(x):
    return jnp.floor(x) == 77


def factors_of(x):
    """-1, 0 and 1 where x is an integer: the states of a recurrence are sums, too. Otherwise something near them."""
    whole = jnp.floor(x)
    return jnp.where(whole == 50, 0, jnp.where(whole % 2 == 0, 1, -1)) * jnp.where(
        x == whole, 1, 0.99 + 0.02 * (x - whole)
    )


def before_first(x, axis):
    return jnp.expand_dims(jnp.take(x, 1, axis), axis)


def going_on(name, x, axis, *starts):
    """A cumulative operation with an h0, as every device but the first calls it along a split axis."""
    params = {"axis": axis, "reverse": False, "exclusive": False, "initial": True}
    return scan_primitives.CUMULATIVE[name](x, before_first(x, axis), *starts, **params)[0]


def all_scans(x, axis):
    """Returns by name the results of all kernels that have code of their own."""
    starts, factors = starts_of(x), factors_of(x)
    gradient = lambda fn, *primals: jax.vjp(fn, *primals)[1](x)
    return {
        "cumsum that goes on": going_on("cumsum", x, axis),
        "cummin of segments that goes on": going_on("cummin", x, axis, starts),
        "cumlogsumexp that goes on": going_on("cumlogsumexp", x / 9, axis),
        "cumsum": jaxgpuops.cumsum(x, axis=axis),
        "cumsum of segments": jaxgpuops.cumsum(x, axis=axis, reverse=True, exclusive=True, segment_starts=starts),
        "cumprod": jaxgpuops.cumprod(factors, axis=axis, segment_starts=starts),
        "cummin": jaxgpuops.cummin(x, axis=axis, segment_starts=starts),
        "cumlogsumexp": jaxgpuops.cumlogsumexp(x / 9, axis=axis),
        "linear_scan": jaxgpuops.linear_scan(factors, x, jnp.take(x, 1, axis), axis=axis, segment_starts=starts),
        "gradients of linear_scan": gradient(
            lambda a, b: jaxgpuops.linear_scan(a, b, axis=axis, reverse=True), factors, x
        ),
        "gradient of cumprod": gradient(lambda x: jaxgpuops.cumprod(x, axis=axis, segment_starts=starts), factors),
        "gradient of cummax": gradient(lambda x: jaxgpuops.cummax(x, axis=axis), x),
        "gradient of cumlogsumexp": gradient(lambda x: jaxgpuops.cumlogsumexp(x, axis=axis), x / 9),
    }


run_scans = jax.jit(all_scans, static_argnums=1)


def shifted(x, axis, by, fill):
    """The elements one position before (by = 1) or after (by = -1)."""
    return jax.lax.pad(x, jnp.array(fill, x.dtype), [(by, -by, 0) if d == axis else (0, 0, 0) for d in range(x.ndim)])


@functools.partial(jax.jit, static_argnums=2)
def follow(x, results, axis):
    """Returns by name whether each result follows from the one before it, and so, by induction, whether all are right.

    x holds integers: everything but logarithms is exact, whatever the order of operations.
    """
    starts, factors = starts_of(x), factors_of(x)
    before = lambda y, fill: shifted(y, axis, 1, fill)
    after = lambda y, fill: shifted(y, axis, -1, fill)
    right = {}
    y = results["cumsum"]
    right["cumsum"] = y == before(y, 0) + x
    y = results["cumsum of segments"]  # the scan is in reverse, so a segment ends where the next one starts
    right["cumsum of segments"] = y == jnp.where(after(starts, True), 0, after(x + y, 0))
    y = results["cumprod"]
    right["cumprod"] = y == jnp.where(starts, 1, before(y, 1)) * factors
    y = results["cummin"]
    right["cummin"] = y == jnp.where(starts, x, jnp.minimum(before(y, jnp.inf), x))
    y = results["cumlogsumexp"]  # about 20
    right["cumlogsumexp"] = abs(y - jnp.logaddexp(before(y, -jnp.inf), x / 9)) < 1e-4
    first = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) == 0
    h0 = before_first(x, axis)
    y = results["cumsum that goes on"]
    right["cumsum that goes on"] = y == jnp.where(first, h0, before(y, 0)) + x
    y = results["cummin of segments that goes on"]
    state = jnp.where(first, h0, jnp.where(starts, jnp.inf, before(y, 0)))
    right["cummin of segments that goes on"] = y == jnp.minimum(state, x)
    y = results["cumlogsumexp that goes on"]
    state = jnp.where(first, h0 / 9, before(y, 0))
    right["cumlogsumexp that goes on"] = abs(y - jnp.logaddexp(state, x / 9)) < 1e-4
    y = results["linear_scan"]
    state = jnp.where(first, h0, jnp.where(starts, 0, before(y, 0)))
    right["linear_scan"] = y == factors * state + x
    da, db = results["gradients of linear_scan"]
    h = jaxgpuops.linear_scan(factors, x, axis=axis, reverse=True)
    right["gradients of linear_scan"] = (db == before(factors * db, 0) + x) & (da == db * after(h, 0))
    return {name: where.all() for name, where in right.items()}


def test_every_kernel_has_a_regime():
    found = set()
    for shape, axis in REGIMES.values():
        chosen = plan(functools.partial(jaxgpuops.cumsum, axis=axis), jax.ShapeDtypeStruct(shape, jnp.float32))
        found.add(chosen["algorithm"])
    assert found == {
        "small",
        "short",
        "lanes",
        "packs",
        "pieces",
        "few",
        "rows",
        "walk",
        "resident",
        "row_look_ahead",
    } | {
        *("columns", "column_look_ahead", "column_twice", "spans", "span_twice")
    }  # missing: chunk_look_ahead and chunk_twice, which gradients and segments take, and lane_rows, of 8 and 16 bits


@regimes
def test_scans_follow_from_one_to_the_next(shape, axis):
    x = integers(jax.random.key(0), shape)
    right = follow(x, run_scans(x, axis), axis)
    assert all(right.values()), right


@regimes
def test_gradients_of_scans(shape, axis):
    """With T the linear map of tangents and T' that of cotangents, <T t, g> = <t, T' g>."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, t, g = (jax.random.normal(key, shape) for key in keys)

    @jax.jit
    def products(x, t, g):
        results = {}
        for name in ("cumprod", "cummax", "cumlogsumexp"):
            fn = functools.partial(getattr(jaxgpuops.lax, name), axis=axis)
            at = jnp.copysign(jnp.exp2(x / 64), x) if name == "cumprod" else x
            forward, backward = jax.jvp(fn, (at,), (t,))[1] * g, jax.vjp(fn, at)[1](g)[0] * t
            results[name] = abs(forward.sum() - backward.sum()) / (abs(forward).sum() + abs(backward).sum())
        return results

    differences = products(x, t, g)
    assert all(d < 1e-4 for d in differences.values()), differences


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_tangents_that_make_y_have_the_bits_of_two_kernels(dtype):
    """The same columns are in a small array, whose gradient is one kernel, and in a large one, whose gradient is
    two."""
    with jax.enable_x64(dtype == "float64"):
        for length, inner in ((4, 1), (5, 7), (16, 1), (16, 3), (29, 1), (32, 2)):
            many = 300_000 // (length * inner)
            t = jax.random.normal(jax.random.key(length), (many, length, inner), dtype)
            x = jnp.round(2 * jnp.roll(t, 1, 0)) / 2
            for i, value in enumerate((jnp.nan, jnp.inf, -jnp.inf)):
                x = x.at[i, i + 1].set(value)
            for name, options in (
                ("cumprod", {}), ("cummax", {}), ("cummin", {"reverse": True}),
                ("cumprod", {"exclusive": True}), ("cummax", {"exclusive": True, "reverse": True}),
            ):  # fmt: skip
                fn = functools.partial(getattr(jaxgpuops, name), axis=1, **options)
                pull = jax.jit(lambda x, t, fn=fn: jax.vjp(fn, x)[1](t)[0])
                whole = pull(x, t)
                for few in (slice(0, 3), slice(3, 40), slice(many - 1, many)):
                    assert same_bits(pull(x[few], t[few]), whole[few]), (length, inner, name, options)


def gradient_in_turn(name, x, y, t):
    """The gradient along axis 1, one position after the other, from the last to the first."""
    if name == "cumlogsumexp":
        weights, factors = np.exp(x - y), np.exp(y[:, :-1] - y[:, 1:])
    elif name == "cumprod":
        weights, factors = np.concatenate([np.ones_like(y[:, :1]), y[:, :-1]], 1), x[:, 1:]
    else:
        weights, factors = (x == y).astype(x.dtype), 1.0 - (x == y)[:, 1:]
    result, later = np.empty_like(x), t[:, -1]
    for k in range(x.shape[1] - 1, -1, -1):
        later = t[:, k] + (factors[:, k] * later if k + 1 < x.shape[1] else 0)
        result[:, k] = weights[:, k] * later
    return result


@pytest.mark.parametrize(
    "shape",
    (
        *((3000, 250, 1), (700, 1023, 1), (600, 3001, 1), (3, 15_001, 1), (700, 15_000, 1), (60, 40_000, 1)),
        *((300, 101, 64), (2, 5003, 66), (40, 700, 128), (400, 163, 5), (3, 9001, 5)),
    ),
)
def test_gradients_of_float64(shape):
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 2)
        x, t = (jax.random.normal(key, shape, jnp.float64) for key in keys)
        for name in ("cumlogsumexp", "cumprod", "cummax"):
            fn = functools.partial(getattr(jaxgpuops, name), axis=1)
            some = 3 * x if name != "cumprod" else jnp.where(abs(x) < 1e-3, 0, jnp.sign(x) * (1 + x / 100))
            pull = jax.jit(lambda x, t, fn=fn: jax.vjp(fn, x)[1](t)[0])
            whole = pull(some, t)
            row = slice(shape[0] - 1, None)
            assert same_bits(pull(some[row], t[row]), whole[row]), name
            few = slice(shape[0] - 3, None)
            right = gradient_in_turn(name, *(np.asarray(a[few]) for a in (some, fn(some), t)))
            scale = abs(gradient_in_turn(name, *(np.asarray(a[few]) for a in (some, fn(some), abs(t)))))
            assert (abs(np.asarray(whole[few]) - right) <= 1e-10 * (scale + 1)).all(), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_gradients_that_make_y_have_the_bits_of_two_kernels(dtype):
    """If something else reads the forward result, the gradient is a kernel of its own."""
    with jax.enable_x64(dtype == "float64"):
        check_gradients_that_make_y(dtype)


def check_gradients_that_make_y(dtype):
    size = jnp.dtype(dtype).itemsize
    lengths = (33, 35, 77, 100, 257, 380, 511, 512, 1000, 8192 // size - 1, 8192 // size)
    rows = [(n, length, 1) for n in (3, 300) for length in lengths] + [(1 << 16, 16 // size, 1), (50_003, 4, 1)]
    short = [(30_001, 5, 1), (9001, 15, 1), (7001, 32, 1), (7001, 4, 5), (3001, 12, 7), (70, 31, 40), (3, 9, 4001)]
    columns = [(40, 33, 3), (3, 600, 5), (2, 8192, 2), (7, 100, 64), (1, 1574, 48), (2, 400, 20), (4, 77, 322)]
    for shape in rows + short + columns:
        t = jax.random.normal(jax.random.key(shape[1]), shape, dtype)
        x = jnp.round(2 * jnp.roll(t, 1, 0)) / 2
        for i, value in enumerate((jnp.nan, jnp.inf, -jnp.inf)):
            x = x.at[i % shape[0], i + 1].set(value)
        for name, options in (("cumprod", {}), ("cummax", {"reverse": True}), ("cummin", {}), ("cumlogsumexp", {})):
            fn = functools.partial(getattr(jaxgpuops, name), axis=1, **options)
            if name == "cumlogsumexp":
                x -= 4  # results are near 0 in the middle of rows, so their differences are rounded

            def alone(x, t, fn=fn):
                return jax.vjp(fn, x)[1](t)[0]

            def beside(x, t, fn=fn):
                y, pull = jax.vjp(fn, x)
                return y + t, pull(t)[0]

            assert same_bits(jax.jit(alone)(x, t), jax.jit(beside)(x, t)[1]), (shape, name)


@regimes
def test_repeats_bit_for_bit_while_another_stream_is_busy(shape, axis):
    x = normal(jax.random.key(0), shape)
    first = jax.block_until_ready(run_scans(x, axis))
    with busy_stream() as keep_busy:
        for _ in range(20):
            keep_busy()
            assert same_bits(run_scans(x, axis), first)


@jax.jit
def differ(results, whole, i):
    """Returns by name whether results are other bits than those of as many rows of `whole`, from row i on."""
    return {
        name: ~same_bits(y, jax.tree.map(lambda z, y: jax.lax.dynamic_slice_in_dim(z, i, len(y)), whole[name], y))
        for name, y in results.items()
    }


@regimes
def test_scans_of_a_row_are_those_of_the_row_in_its_batch(shape, axis):
    x = normal(jax.random.key(0), (5, *shape[1:]))
    whole = run_scans(x, axis)
    for i in range(5):
        assert not [name for name, wrong in differ(run_scans(x[i : i + 1], axis), whole, i).items() if wrong]
    # There are enough rows for the kernel that gives each to one block, and more elements than the kernels for few
    # take; or as many as there is memory for.
    many = max(1, min(max(120, (1 << 22) // x.size + 1), memory() // (160 * x.nbytes)))
    repeated = run_scans(jnp.concatenate([x] * many), axis)
    assert not [name for name, wrong in differ(whole, repeated, 5 * (many - 1)).items() if wrong]


@regimes
def test_nothing_passes_a_start(shape, axis):
    assert leaks(shape, axis, jnp.float32) == []


def command_buffers():
    for regime, (shape, axis) in REGIMES.items():
        program = jax.jit(lambda x: [all_scans(x + i, axis) for i in range(2)])
        for seed in range(4):  # new inputs, at new addresses
            x = integers(jax.random.key(seed), shape)
            for i, results in enumerate(program(x)):
                right = follow(x + i, results, axis)
                assert all(right.values()), (regime, seed, i, right)


@pytest.mark.parametrize(
    "shape", ((3, 4103, 3), (3, 20_001, 5), (2, 50_001, 19), (700, 5003, 3), (5, 2003, 64), (9, 3001, 12), (9, 501, 7))
)
def test_one_factor_for_all_positions(shape):
    """Where the factor is the same at all positions, lanes may load it once. Sums of integers are exact."""
    x = integers(jax.random.key(0), shape)
    starts = starts_of(x)

    @functools.partial(jax.jit, static_argnums=2)
    def scans(a, x, full):
        a = jax.lax.optimization_barrier(jnp.broadcast_to(a, shape)) if full else a
        h, pull = jax.vjp(lambda x: jaxgpuops.linear_scan(a, x, axis=1), x)
        reverse = jaxgpuops.linear_scan(a, x, x[:, 0], axis=1, reverse=True, segment_starts=starts)
        return h, pull(x), reverse

    for factors in (jnp.float32([[[-1]]]), jnp.arange(shape[2], dtype=jnp.float32) % 3 - 1):
        for some, dtype in ((x, jnp.float32), (x, jnp.float64)):
            with jax.enable_x64(dtype == jnp.float64):
                args = factors.astype(dtype), some.astype(dtype)
                assert same_bits(scans(*args, False), scans(*args, True)), (factors.shape, dtype)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32", "float64"))
@pytest.mark.parametrize("rows, length", ((70_003, 2), (9001, 5), (70_003, 8), (20_001, 16), (9001, 27), (3001, 32)))
def test_one_factor_of_short_rows(rows, length, dtype):
    """Rows in packs, whose lanes load the factor once, and make the bits of an array of factors."""
    with jax.enable_x64(dtype == "float64"):
        x = jax.random.normal(jax.random.key(0), (rows, length), dtype)

        @functools.partial(jax.jit, static_argnums=2)
        def scans(a, x, full):
            a = jax.lax.optimization_barrier(jnp.broadcast_to(a, x.shape)) if full else a
            h, pull = jax.vjp(lambda x: jaxgpuops.linear_scan(a, x, axis=1), x)
            return h, pull(x), jaxgpuops.linear_scan(a, x, axis=1, reverse=True)

        for a in (
            jnp.full((1, 1), 0.9, dtype),
            jnp.zeros((1, 1), dtype),
            jnp.linspace(-1, 1, rows, dtype=dtype)[:, None],
        ):
            assert same_bits(scans(a, x, False), scans(a, x, True)), a.shape


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32", "float64"))
@pytest.mark.parametrize("tiles", (0.1, 0.5, 1, 2, 3, 9, 40))
def test_extremes_of_odd_rows(tiles, dtype):
    """Tiles of extremes begin at vectors of memory; the bits are those of rows of whole vectors, which end with
    elements that change nothing."""
    with jax.enable_x64(dtype == "float64"):
        in_vector = 16 // jnp.dtype(dtype).itemsize
        for more in (-in_vector, -1, 1, in_vector - 1):
            rows, length = 5, int(tiles * 1024 * in_vector) + more
            x = jax.random.normal(jax.random.key(length), (rows, length), dtype)
            x = jnp.where(abs(x) < 0.5, jnp.copysign(jnp.zeros((), dtype), x), x)
            x = x.at[2, length // 2].set(jnp.nan).at[3, :7].set(-jnp.inf).at[4, -7:].set(jnp.inf)
            for name, fill in (("cummax", -jnp.inf), ("cummin", jnp.inf)):
                for reverse in (False, True):
                    fn = jax.jit(functools.partial(getattr(jaxgpuops, name), axis=1, reverse=reverse))
                    rest = -length % in_vector
                    ends = ((0, 0), (rest, 0) if reverse else (0, rest))
                    wide = fn(jnp.pad(x, ends, constant_values=fill))
                    assert same_bits(fn(x), wide[:, rest:] if reverse else wide[:, :length]), (length, name, reverse)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
@pytest.mark.parametrize(
    "rows, length",
    (
        *((300, 20_001), (3, 20_001), (5, 2_000_001), (2, 16_391), (200, 3001), (700, 701), (999, 333), (9, 67)),
        *((20_000, 33), (20_000, 70), (20_000, 72), (20_000, 127), (20_000, 128), (3, 4095), (3000, 4095), (5000, 901)),
        *(
            (2, 8193),
            (2, 8955),
            (33, 10_397),
            (18, 32_771),
            (120, 9001),
        ),  # clusters, whose last tiles have few elements
    ),
)
def test_odd_rows_are_those_of_the_row_alone(rows, length, dtype):
    """In a batch, rows begin at any place between two vectors; a row alone, scanned forward, is aligned."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, factors = (jax.random.normal(key, (rows, length), dtype) for key in keys)
    factors = factors / (1 + abs(factors))

    @jax.jit
    def scans(factors, x):
        h, gradient = jax.vjp(lambda a, b: jaxgpuops.linear_scan(a, b, axis=1), factors, x)
        y, back = jax.vjp(lambda x: jaxgpuops.cumprod(x, axis=1), factors)
        return jaxgpuops.cumsum(x, axis=1), jaxgpuops.cummax(x, axis=1, reverse=True), h, gradient(x), y, back(x)

    together = scans(factors, x)
    for row in {0, 1, rows - 1}:
        alone = scans(factors[row : row + 1], x[row : row + 1])
        for some, one in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            bits = jnp.uint16 if dtype == jnp.bfloat16 else jnp.uint32
            assert jnp.array_equal(some[row].view(bits), one[0].view(bits))


@pytest.mark.parametrize("dtype", ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"))
@pytest.mark.parametrize(
    "rows, length",
    (
        *((40_001, 3), (9001, 31), (1003, 301), (300, 8192), (5, 9001), (700, 20_001), (2, 5_000_001)),
        *((3, 8191), (2, 8193), (7, 24_577), (900, 1023), (77, 509)),
        *((40_001, 70), (40_001, 96), (40_001, 250)),
    ),
)
def test_rows_of_integers(rows, length, dtype):
    """Rows that have a kernel for any operator, whatever their length; NumPy wraps around, too."""
    info = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(info.min, info.max, (rows, length), dtype, endpoint=True)
    with jax.enable_x64(True):
        for reverse in (False, True):
            for name, fn in (
                ("cumsum", np.add),
                ("cumprod", np.multiply),
                ("cummax", np.maximum),
                ("cummin", np.minimum),
            ):
                from_front = x[:, ::-1] if reverse else x
                want = fn.accumulate(from_front | 1 if name == "cumprod" else from_front, 1, dtype=dtype)
                got = getattr(jaxgpuops, name)(x | 1 if name == "cumprod" else x, axis=1, reverse=reverse)
                assert np.array_equal(got, want[:, ::-1] if reverse else want), name


def test_command_buffers_with_changing_inputs():
    run_in_command_buffers("test_gpu_scan")


LARGE_AND_LOOSE = LARGE | {"columns of no whole vectors": ((3, 1031, (1 << 20) + 1), 1)}


@pytest.mark.alone
@pytest.mark.parametrize("shape, axis", LARGE_AND_LOOSE.values(), ids=LARGE_AND_LOOSE)
def test_more_than_2_to_the_31_elements(shape, axis):
    needs_memory(40)
    before = lambda y: shifted(y, axis, 1, 0)
    place = lambda: jax.lax.broadcasted_iota(jnp.uint32, shape, axis)

    x = jax.jit(lambda: noise(shape).astype(jnp.int8))()
    y = jax.jit(lambda x: jaxgpuops.cumsum(x, axis=axis))(x)
    assert jax.jit(lambda x, y: (y == before(y) + x).all())(x, y)  # wraps around
    # Rising along the axis, with noise; all values are exact in float16.
    x = jax.jit(lambda: (jnp.floor(place() * (2000 / shape[axis])) + noise(shape) % 64).astype(jnp.float16))()
    y = jax.jit(lambda x: jaxgpuops.cummax(x, axis=axis))(x)
    assert jax.jit(lambda x, y: (y == jnp.maximum(before(y), x)).all())(x, y)
    del y
    # Starts anew so often that states are exact in float16.
    recurrence = lambda x: ((x % 8 != 0).astype(x.dtype), x % 3 - 1)
    h = jax.jit(lambda x: jaxgpuops.linear_scan(*recurrence(x), axis=axis))(x)
    assert jax.jit(lambda x, h: (h == recurrence(x)[0] * before(h) + recurrence(x)[1]).all())(x, h)
