"""What only a GPU can show. The values of results are tested everywhere, by the other files."""

import functools
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jaxgpuops
from jaxgpuops.lax.along_axis import put_along_axis

if jax.default_backend() != "gpu":
    pytest.skip("needs a CUDA device; JAX has none here", allow_module_level=True)

HERE = pathlib.Path(__file__).parent

# Every kernel and form of it: (shape, axis, k).
REGIMES = {
    "argmax, warps": ((5000, 300), 1, 1),
    "argmax, blocks": ((500, 70_001), 1, 1),
    "argmax, sliced": ((2, 3_000_001), 1, 1),
    "rows, sorting networks": ((30_000, 61), 1, 5),
    "rows, 4 lanes": ((30_000, 100), 1, 2),
    "rows, 8 lanes": ((30_000, 250), 1, 8),
    "rows, 16 lanes": ((3000, 501), 1, 32),
    "rows, 32 lanes": ((3000, 1000), 1, 64),
    "rows, a block a row": ((3000, 4096), 1, 64),
    "rows, larger blocks": ((600, 16_001), 1, 50),
    "rows, cluster": ((64, 128_256), 1, 50),
    "stream, whole row": ((600, 2000), 1, 200),
    "stream, a block a row": ((600, 33_001), 1, 50),
    "stream, cluster": ((64, 128_256), 1, 100),
    "stream, large k": ((600, 33_001), 1, 2048),
    "grid": ((3, 2_000_003), 1, 100),
    "grid, one row": ((1, 20_000_003), 1, 2048),
    "columns": ((16, 4093, 130), 1, 32),
    "strided stream": ((1, 200_003, 7), 1, 20),
    "radix": ((3, 300_001), 1, 20_000),
    "stream, any k": ((40, 5003), 1, 5003),
    "radix, whole rows sorted": ((5, 20_001), 1, 15_000),
}
regimes = pytest.mark.parametrize("shape, axis, k", REGIMES.values(), ids=REGIMES)


def plan(fn, *args):
    [call] = jaxgpuops.explain(fn, *args)
    assert call.platform == "cuda" and call.kernel, call.why
    return call.plan


@jax.jit
def same_bits(a, b):
    def one(a, b):
        unsigned = f"uint{8 * a.dtype.itemsize}"
        return (jax.lax.bitcast_convert_type(a, unsigned) == jax.lax.bitcast_convert_type(b, unsigned)).all()

    return jnp.stack([one(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]).all()


def in_subprocess(*command, **environment):
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | environment
    command = [sys.executable, "-P", *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_kernel_has_a_regime():
    found = set()
    for shape, axis, k in REGIMES.values():
        fn = functools.partial(jaxgpuops.topk, k=k, axis=axis)
        found.add(plan(fn, jax.ShapeDtypeStruct(shape, jnp.float32))["algorithm"])
    assert found == {"argmax", "rows", "stream", "grid", "columns", "radix"}


# ---- Values, at sizes that would take minutes on a CPU ---------------------------------------------------------------


def expected_topk(x, k, axis, largest, sorted):
    """By JAX's stable sort of integer keys, on the GPU."""
    bits = jax.lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
    keys = jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)  # ascending as signed integers
    iota = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    indices = jax.lax.sort((~keys if largest else keys, iota), dimension=axis, is_stable=True, num_keys=1)[1]
    indices = jax.lax.slice_in_dim(indices, 0, k, axis=axis)
    if not sorted:
        indices = jnp.sort(indices, axis)
    return jnp.take_along_axis(bits, indices, axis), indices


@functools.partial(jax.jit, static_argnums=(1, 2))
def spread(rows, shape, axis, shift):
    """An array whose rows along the axis are these rows, in turns, beginning with rows[shift]."""
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    which = (jnp.arange(outer * inner) + shift) % len(rows)
    turns = rows[which.reshape(outer, inner)]  # (outer, inner, length)
    return jnp.moveaxis(turns, 2, 1).reshape(*shape[:axis], rows.shape[1], *shape[axis + 1 :])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@regimes
def test_adversarial(shape, axis, k, dtype):
    distributions = reference.adversarial(np.random.default_rng(0), shape[axis], jnp.dtype(dtype))
    names, rows = list(distributions), jnp.asarray(np.stack(list(distributions.values())))
    lanes = math.prod(shape) // shape[axis]
    for largest, sorted in [(True, True), (False, False)]:
        expected = jax.jit(expected_topk, static_argnums=(1, 2, 3, 4))(rows, k, 1, largest, sorted)
        fn = jax.jit(lambda x: jaxgpuops.topk(x, k, axis=axis, largest=largest, sorted=sorted))  # noqa: B023
        for shift in range(0, len(rows), lanes):
            wanted = jax.tree.map(lambda e: spread(e, shape, axis, shift), expected)  # noqa: B023
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


# ---- Determinism ----------------------------------------------------------------------------------------------------


@regimes
def test_repeats_bit_for_bit_while_another_stream_is_busy(shape, axis, k):
    torch = pytest.importorskip("torch", reason="needs a second stream of this process: torch's")
    x = jnp.round(jax.random.normal(jax.random.key(0), shape) * 100)  # with ties
    fn = jax.jit(lambda x: jaxgpuops.topk(x, k, axis=axis))
    first = jax.block_until_ready(fn(x))
    matrix = torch.randn(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(stream):
            for _ in range(3):
                matrix @ matrix
        assert same_bits(fn(x), first)
    stream.synchronize()


@regimes
def test_a_row_alone_is_the_row_in_its_batch(shape, axis, k):
    x = jnp.round(jax.random.normal(jax.random.key(0), (5, *shape[1:])) * 1000)
    fn = jax.jit(lambda x: jaxgpuops.topk(x, k, axis=axis))
    whole = fn(x)
    for i in range(5):
        assert same_bits(fn(x[i : i + 1]), jax.tree.map(lambda y: y[i : i + 1], whole))  # noqa: B023
    repeated = fn(jnp.concatenate([x] * 120))  # enough rows for a kernel that gives each to one block
    assert same_bits(jax.tree.map(lambda y: y[-5:], repeated), whole)


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------

GRAPHS = """
import jax, jax.numpy as jnp, jaxgpuops
from test_gpu import REGIMES, expected_topk, same_bits
for name, (shape, axis, k) in REGIMES.items():
    shape = (min(shape[0], 300), *shape[1:])
    @jax.jit
    def program(x):
        results = [jaxgpuops.topk(x + i, k, axis=axis) for i in range(3)]
        gradient = jax.grad(lambda x: (jaxgpuops.topk(x, k, axis=axis).values ** 2).sum())(x)
        return results, gradient, jaxgpuops.lax.argmax(x, axis, jnp.int32)
    for seed in range(4):  # new inputs, at new addresses
        x = jnp.round(jax.random.normal(jax.random.key(seed), shape) * 100)
        results, gradient, largest = program(x)
        for i in range(3):
            assert same_bits(tuple(results[i]), expected_topk(x + i, k, axis, True, True)), (name, seed, i)
        indices = results[0].indices
        chosen = jnp.put_along_axis(jnp.zeros(shape), indices, 2 * results[0].values, axis, inplace=False)
        assert (gradient == chosen).all(), (name, seed)
        assert (largest == jnp.argmax(x, axis)).all(), (name, seed)
print("graphs ok")
"""


def test_command_buffers_with_changing_inputs():
    """XLA captures even single calls into CUDA graphs, and replays them with other buffers."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_graph_min_graph_size=1"
    program = f"import sys; sys.path.append({str(HERE)!r})\n{GRAPHS}"
    assert "graphs ok" in in_subprocess("-c", program, XLA_FLAGS=flags)


# ---- Older GPUs -----------------------------------------------------------------------------------------------------


def test_forms_for_older_gpus():
    """The forms that GPUs before compute capability 9.0 take, run on the GPU at hand."""
    if "JAXGPUOPS_COMPUTE_CAPABILITY" in os.environ:
        assert plan(lambda x: jaxgpuops.topk(x, 50), jnp.zeros((64, 128_256)))["algorithm"] == "grid"
        return
    tests = [
        "test_gpu.py",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "adversarial or other_widths or alone or older or follow",
    ]
    in_subprocess("-m", "pytest", *tests, JAXGPUOPS_COMPUTE_CAPABILITY="80")


# ---- More than 2^31 elements ----------------------------------------------------------------------------------------

LARGE = {
    "many short rows": (((1 << 21) + 5, 1031), 1, 5),
    "many rows": (((1 << 17) + 1, 16_411), 1, 70),
    "long rows": ((3, (1 << 30) + 3), 1, 5),
    "the longest row": ((1, (1 << 31) - 1), 1, 50),
    "columns": ((3, 1031, (1 << 20) + 1), 1, 5),
    "large k": ((3, (1 << 30) + 3), 1, 5000),
    "argmax": ((1, (1 << 31) - 1), 1, 1),
    "argmax of columns": ((1031, (1 << 21) + 1), 0, 1),
}


@pytest.mark.parametrize("shape, axis, k", LARGE.values(), ids=LARGE)
def test_more_than_2_to_the_31_elements(shape, axis, k):
    limit = jax.local_devices()[0].memory_stats()["bytes_limit"]
    if limit < 16 << 30:
        pytest.skip(f"needs 16 GiB of GPU memory for JAX, has {limit >> 30}")
    n = shape[axis]
    iota = jax.lax.broadcasted_iota
    # Small values, and k different large places in every row, all of them in its last half.
    first = n - min(n // 2, 2 * k)
    row = jnp.arange(n, dtype=jnp.int32)
    planted = jnp.where((row >= first) & ((row - first) % 2 == 0), 200 + row % 7, row % 199).astype(jnp.uint8)
    expected = reference.topk(np.asarray(planted[max(first - 8, 0) :]), k)[1] + max(first - 8, 0)
    at = [-1 if i == axis else 1 for i in range(len(shape))]
    x = jax.jit(lambda: jnp.broadcast_to(planted.reshape(at), shape) + (iota(jnp.uint8, shape, 0) & 0))()
    values, indices = jaxgpuops.topk(x, k, axis=axis)
    assert (indices == expected.reshape(at)).all()
    assert (values == planted[expected].reshape(at)).all()


def test_gradient_of_more_than_2_to_the_31_elements():
    limit = jax.local_devices()[0].memory_stats()["bytes_limit"]
    if limit < 16 << 30:
        pytest.skip(f"needs 16 GiB of GPU memory for JAX, has {limit >> 30}")
    n, rows = (1 << 20) + 1, (1 << 11) + 5
    indices = jnp.broadcast_to(jnp.array([n - 1, 0, 77], jnp.int32), (rows, 3))
    out = put_along_axis(jnp.broadcast_to(jnp.array([1, 2, 3], jnp.uint8), (rows, 3)), indices, 1, n)
    assert out.shape == (rows, n)
    assert (out[:, jnp.array([n - 1, 0, 77])] == jnp.array([1, 2, 3], jnp.uint8)).all()
    assert (jnp.count_nonzero(out, axis=1) == 3).all()


# ---- Scans ----------------------------------------------------------------------------------------------------------

# Every kernel and layout of it: (shape, axis). A row of "look-ahead, one row" is so long that it takes that kernel
# alone, and in a large batch another.
SCAN_REGIMES = {
    "loop, along, a tile": ((3000, 250), 1),
    "loop, along, aligned": ((3000, 4096), 1),
    "loop, along, many tiles": ((600, 70_001), 1),
    "two passes, along": ((3, 300_001), 1),
    "two passes, along, aligned": ((1, 1 << 20), 1),
    "look-ahead, along, one row": ((1, 2_200_003), 1),
    "look-ahead, along": ((2, 8_000_004), 1),
    "loop, across": ((16, 1003, 2048), 1),
    "two passes, across": ((2, 8003, 64), 1),
    "look-ahead, across": ((1, 65_537, 256), 1),
    "loop, single": ((600, 1003, 3), 1),
    "two passes, single": ((2, 100_003, 3), 1),
    "look-ahead, single": ((1, 1_000_003, 3), 1),
}
scan_regimes = pytest.mark.parametrize("shape, axis", SCAN_REGIMES.values(), ids=SCAN_REGIMES)


def integers(key, shape):
    """So small that their sums are exact in any order."""
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


def all_scans(x, axis):
    """By name, results of kernels that are all different code."""
    starts, factors = starts_of(x), factors_of(x)
    gradient = lambda fn, *primals: jax.vjp(fn, *primals)[1](x)
    return {
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
    """What is one position before (by = 1) or after (by = -1)."""
    return jax.lax.pad(x, jnp.array(fill, x.dtype), [(by, -by, 0) if d == axis else (0, 0, 0) for d in range(x.ndim)])


@functools.partial(jax.jit, static_argnums=2)
def follow(x, results, axis):
    """By name, whether each result is what the operation makes of the one before it: whether all are, by induction.

    x holds integers: everything but logarithms is exact, whatever the order of operations.
    """
    starts, factors = starts_of(x), factors_of(x)
    before = lambda y, fill: shifted(y, axis, 1, fill)
    after = lambda y, fill: shifted(y, axis, -1, fill)
    right = {}
    y = results["cumsum"]
    right["cumsum"] = y == before(y, 0) + x
    y = results["cumsum of segments"]  # in reverse: a segment ends where the next one starts
    right["cumsum of segments"] = y == jnp.where(after(starts, True), 0, after(x + y, 0))
    y = results["cumprod"]
    right["cumprod"] = y == jnp.where(starts, 1, before(y, 1)) * factors
    y = results["cummin"]
    right["cummin"] = y == jnp.where(starts, x, jnp.minimum(before(y, jnp.inf), x))
    y = results["cumlogsumexp"]  # about 20
    right["cumlogsumexp"] = abs(y - jnp.logaddexp(before(y, -jnp.inf), x / 9)) < 1e-4
    y = results["linear_scan"]
    first = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) == 0
    state = jnp.where(first, jnp.expand_dims(jnp.take(x, 1, axis), axis), jnp.where(starts, 0, before(y, 0)))
    right["linear_scan"] = y == factors * state + x
    da, db = results["gradients of linear_scan"]
    h = jaxgpuops.linear_scan(factors, x, axis=axis, reverse=True)
    right["gradients of linear_scan"] = (db == before(factors * db, 0) + x) & (da == db * after(h, 0))
    return {name: where.all() for name, where in right.items()}


def test_every_scan_kernel_has_a_regime():
    found = set()
    for shape, axis in SCAN_REGIMES.values():
        chosen = plan(functools.partial(jaxgpuops.cumsum, axis=axis), jax.ShapeDtypeStruct(shape, jnp.float32))
        found.add((chosen["algorithm"], chosen["layout"]))
    algorithms, layouts = ("loop", "two_pass", "look_ahead"), ("along", "across", "single")
    assert found == {(algorithm, layout) for algorithm in algorithms for layout in layouts}


@scan_regimes
def test_scans_follow_from_one_to_the_next(shape, axis):
    x = integers(jax.random.key(0), shape)
    right = follow(x, run_scans(x, axis), axis)
    assert all(right.values()), right


@scan_regimes
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


@scan_regimes
def test_scans_repeat_bit_for_bit_while_another_stream_is_busy(shape, axis):
    torch = pytest.importorskip("torch", reason="needs a second stream of this process: torch's")
    x = normal(jax.random.key(0), shape)
    first = jax.block_until_ready(run_scans(x, axis))
    matrix = torch.randn(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(stream):
            for _ in range(3):
                matrix @ matrix
        assert same_bits(run_scans(x, axis), first)
    stream.synchronize()


@scan_regimes
def test_scans_of_a_row_are_those_of_the_row_in_its_batch(shape, axis):
    x = normal(jax.random.key(0), (5, *shape[1:]))
    whole = run_scans(x, axis)
    for i in range(5):
        assert same_bits(run_scans(x[i : i + 1], axis), jax.tree.map(lambda y: y[i : i + 1], whole))  # noqa: B023
    limit = jax.local_devices()[0].memory_stats()["bytes_limit"]
    many = max(1, min(120, limit // (40 * x.nbytes)))  # enough rows for the kernel that gives each to one block
    repeated = run_scans(jnp.concatenate([x] * many), axis)
    assert same_bits(jax.tree.map(lambda y: y[-5:], repeated), whole)


SCAN_GRAPHS = """
import jax
from test_gpu import SCAN_REGIMES, all_scans, follow, integers
for regime, (shape, axis) in SCAN_REGIMES.items():
    program = jax.jit(lambda x: [all_scans(x + i, axis) for i in range(2)])
    for seed in range(4):  # new inputs, at new addresses
        x = integers(jax.random.key(seed), shape)
        for i, results in enumerate(program(x)):
            right = follow(x + i, results, axis)
            assert all(right.values()), (regime, seed, i, right)
print("graphs ok")
"""


def test_scans_in_command_buffers_with_changing_inputs():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_graph_min_graph_size=1"
    program = f"import sys; sys.path.append({str(HERE)!r})\n{SCAN_GRAPHS}"
    assert "graphs ok" in in_subprocess("-c", program, XLA_FLAGS=flags)


LARGE_SCANS = {
    "many rows": (((1 << 21) + 5, 1031), 1),
    "long rows": ((3, (1 << 30) + 3), 1),
    "a row longer than 2^31": (((1 << 31) + 5,), 0),
    "many columns": ((3, 1031, (1 << 20) + 8), 1),
    "columns of no whole vectors": ((3, 1031, (1 << 20) + 1), 1),
    "long columns": (((1 << 28) + 3, 9), 0),
}


@pytest.mark.parametrize("shape, axis", LARGE_SCANS.values(), ids=LARGE_SCANS)
def test_scans_of_more_than_2_to_the_31_elements(shape, axis):
    limit = jax.local_devices()[0].memory_stats()["bytes_limit"]
    if limit < 40 << 30:
        pytest.skip(f"needs 40 GiB of GPU memory for JAX, has {limit >> 30}")
    iota = functools.partial(jax.lax.broadcasted_iota, jnp.uint32, shape)
    mixed = lambda: sum(iota(d) * jnp.uint32(2654435761 + 2 * d) for d in range(len(shape))) >> 24
    before = lambda y: shifted(y, axis, 1, 0)

    x = jax.jit(lambda: mixed().astype(jnp.int8))()
    y = jax.jit(lambda x: jaxgpuops.cumsum(x, axis=axis))(x)
    assert jax.jit(lambda x, y: (y == before(y) + x).all())(x, y)  # wraps around
    # Rising along the axis, with noise; all values are exact in float16.
    x = jax.jit(lambda: (jnp.floor(iota(axis) * (2000 / shape[axis])) + mixed() % 64).astype(jnp.float16))()
    y = jax.jit(lambda x: jaxgpuops.cummax(x, axis=axis))(x)
    assert jax.jit(lambda x, y: (y == jnp.maximum(before(y), x)).all())(x, y)
    del y
    # Starts anew so often that states are exact in float16.
    recurrence = lambda x: ((x % 8 != 0).astype(x.dtype), x % 3 - 1)
    h = jax.jit(lambda x: jaxgpuops.linear_scan(*recurrence(x), axis=axis))(x)
    assert jax.jit(lambda x, h: (h == recurrence(x)[0] * before(h) + recurrence(x)[1]).all())(x, h)


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
