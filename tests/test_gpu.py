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
        x = jnp.where(x == 0, 0, x)  # XLA makes -0 of -0 + 0, when it compiles that
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


# ---- The gate -------------------------------------------------------------------------------------------------------

# Every form of the kernel: (shape, axis, k).
GATE_REGIMES = {
    "8 elements a lane": ((30_000, 64), 1, 6),
    "rows that are not vectors": ((30_000, 61), 1, 6),
    "16 elements a lane": ((30_000, 128), 1, 8),
    "8 lanes": ((30_000, 256), 1, 8),
    "8 lanes, most of k": ((3000, 256), 1, 16),
    "16 lanes": ((3000, 512), 1, 20),
    "32 lanes": ((3000, 1024), 1, 64),
    "columns": ((16, 256, 130), 1, 8),
}
gate_regimes = pytest.mark.parametrize("shape, axis, k", GATE_REGIMES.values(), ids=GATE_REGIMES)


@functools.partial(jax.jit, static_argnums=(1, 2))
def gates(x, axis, k):
    bias = jnp.linspace(0, 0.1, x.shape[axis])
    return [
        jaxgpuops.topk_softmax(x, k, axis=axis, **flags)
        for flags in (
            {},
            {"normalize": False},
            {"score": "sigmoid"},
            {"bias": bias},
            {"score": "sigmoid", "bias": bias},
        )
    ]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@gate_regimes
def test_gates_are_those_of_the_cpu(shape, axis, k, dtype):
    distributions = reference.adversarial(np.random.default_rng(0), shape[axis], jnp.dtype(dtype))
    rows = jnp.asarray(
        np.stack(
            [*distributions.values(), *(3 * np.random.default_rng(1).standard_normal((50, shape[axis])))],
            dtype=jnp.dtype(dtype),
        )
    )
    x = spread(rows, shape, axis, 0)
    with jax.default_device(jax.devices("cpu")[0]):
        of_cpu = gates(jax.device_put(np.asarray(x), jax.devices("cpu")[0]), axis, k)
    tolerance = {"float32": 4e-6, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    for i, (ours, theirs) in enumerate(zip(gates(x, axis, k), of_cpu, strict=True)):
        if i < 3:
            np.testing.assert_array_equal(ours.indices, theirs.indices)
        else:  # sums of scores and bias differ in their last bit, and so may a choice that hangs on it
            assert np.mean(np.asarray(ours.indices) != theirs.indices) < 1e-3
        same = np.asarray(ours.indices) == theirs.indices
        a, b = (np.asarray(gate.weights, np.float32)[same] for gate in (ours, theirs))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=1e-7 if dtype != "float32" else 1e-37)


@gate_regimes
def test_gates_of_a_row_are_those_of_the_row_in_its_batch(shape, axis, k):
    x = 3 * jax.random.normal(jax.random.key(0), (5, *shape[1:]))
    whole = gates(x, axis, k)
    for i in range(5):
        assert same_bits(gates(x[i : i + 1], axis, k), jax.tree.map(lambda y: y[i : i + 1], whole))  # noqa: B023
    assert same_bits(jax.tree.map(lambda y: y[-5:], gates(jnp.concatenate([x] * 120), axis, k)), whole)
    shifted = jax.jit(lambda x: gates(x[3:].reshape(5, *shape[1:]), axis, k))(jnp.append(jnp.zeros(3), x))
    assert same_bits(shifted, whole)  # rows that are not aligned


GATE_GRAPHS = """
import jax, jax.numpy as jnp
from test_gpu import GATE_REGIMES, expected_topk, gates
for name, (shape, axis, k) in GATE_REGIMES.items():
    program = jax.jit(lambda x: [gates(x + i, axis, k) for i in range(3)])
    for seed in range(4):  # new inputs, at new addresses
        x = jnp.round(jax.random.normal(jax.random.key(seed), shape) * 100) / 8
        for i, results in enumerate(program(x)):
            expected = expected_topk(x + i, k, axis, True, True)[1]
            chosen = jax.nn.softmax(jnp.take_along_axis(x + i, expected, axis), axis)
            assert (results[0].indices == expected).all(), (name, seed, i)
            assert abs(results[0].weights - chosen).max() < 1e-6, (name, seed, i)
print("graphs ok")
"""


def test_gates_in_command_buffers_with_changing_inputs():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_graph_min_graph_size=1"
    program = f"import sys; sys.path.append({str(HERE)!r})\n{GATE_GRAPHS}"
    assert "graphs ok" in in_subprocess("-c", program, XLA_FLAGS=flags)


# ---- Softmax and reductions -----------------------------------------------------------------------------------------

# Every kernel and form of it: (shape, axis).
ROW_REGIMES = {
    "rows, a few lanes": ((30_000, 7), 1),
    "rows, 4 lanes": ((30_000, 61), 1),
    "rows, 16 lanes": ((30_000, 250), 1),
    "rows, a warp a row": ((3000, 1000), 1),
    "rows, a block a row": ((3000, 4093), 1),
    "rows, larger blocks": ((600, 16_001), 1),
    "rows, aligned": ((600, 16_384), 1),
    "rows, cluster": ((5, 50_257), 1),
    "streamed rows": ((600, 50_257), 1),
    "streamed rows, large cluster": ((64, 128_256), 1),
    "streamed rows, largest cluster": ((40, 300_001), 1),
    "split rows": ((40, 600_001), 1),
    "one split row": ((1, 20_000_003), 1),
    "columns": ((300, 30, 5), 1),
    "columns, vectors": ((64, 1024, 256), 1),
    "columns, cluster": ((16, 1001, 130), 1),
    "split columns": ((16, 8093, 130), 1),
    "long split columns": ((1, 200_003, 7), 1),
}
row_regimes = pytest.mark.parametrize("shape, axis", ROW_REGIMES.values(), ids=ROW_REGIMES)
SOFTMAX = ("softmax", "log_softmax", "logsumexp")


def row_operands(shape, axis, key=0, dtype=jnp.float32):
    """x, a tangent, labels, and scale, bias and mask that some dimensions share."""
    keys = jax.random.split(jax.random.key(key), 6)
    along = [n if d == axis else 1 for d, n in enumerate(shape)]
    rows = [1 if d == axis else n for d, n in enumerate(shape)]
    return {
        "x": 3 * jax.random.normal(keys[0], shape, dtype),
        "t": jax.random.normal(keys[1], shape, dtype),
        "labels": jax.random.randint(keys[2], [n for d, n in enumerate(shape) if d != axis], 0, shape[axis]),
        "scale": jax.random.uniform(keys[3], rows, jnp.float32, 0.5, 2),
        "bias": jax.random.normal(keys[4], along, dtype),
        "where": jax.random.uniform(keys[5], along) < 0.8,
    }


def all_rows(x, t, labels, scale, bias, where, *, axis, module=jaxgpuops):
    """Results of every kernel, and of those that optional operands take."""
    results = {}
    for name in SOFTMAX:
        plain = functools.partial(getattr(module, name), axis=axis)
        general = functools.partial(plain, scale=scale, bias=bias, where=where)
        results[name], pull = jax.vjp(plain, x)
        results[f"{name} of all operands"], pull_general = jax.vjp(general, x)
        if name != "logsumexp":
            results[f"gradient of {name}"] = pull(t)[0]
            results[f"gradient of {name} of all operands"] = pull_general(t)[0]
    loss = functools.partial(module.softmax_cross_entropy, labels=labels, axis=axis, label_smoothing=0.1, z_loss=0.01)
    results["cross_entropy"] = loss(x)
    results["cross_entropy_grad"] = jax.grad(lambda x: loss(x, reduction="sum"))(x)
    for name in ("sum", "max", "min"):
        fn = functools.partial(getattr(module, name), axis=axis)
        results[name], results[f"{name} where"] = fn(x), fn(x, where=where)
    results["dot"] = module.dot(x, t, axis=axis)
    return results


run_rows = jax.jit(all_rows, static_argnames="axis")


class Plain:
    """The same in plain JAX."""

    @staticmethod
    def _logits(name, x, axis, scale=1, bias=0, where=None):
        z = getattr(jax.nn, name)(x * scale + bias, axis=axis, where=where)
        return z if where is None or name != "log_softmax" else jnp.where(where, z, -jnp.inf)

    softmax = functools.partial(_logits, "softmax")
    log_softmax = functools.partial(_logits, "log_softmax")
    logsumexp = functools.partial(_logits, "logsumexp")
    sum = staticmethod(jnp.sum)
    max = staticmethod(functools.partial(jnp.max, initial=-jnp.inf))
    min = staticmethod(functools.partial(jnp.min, initial=jnp.inf))

    @staticmethod
    def dot(x, y, axis):
        return (x * y).sum(axis)

    @staticmethod
    def softmax_cross_entropy(x, labels, axis, label_smoothing, z_loss, reduction=None):
        lse = jax.nn.logsumexp(x, axis)
        at_label = jnp.take_along_axis(x, jnp.expand_dims(labels, axis), axis).squeeze(axis)
        loss = (1 - label_smoothing) * (lse - at_label) + label_smoothing * (lse - x.mean(axis)) + z_loss * lse**2
        return loss if reduction is None else loss.sum()


for _name in SOFTMAX:
    setattr(Plain, _name, staticmethod(getattr(Plain, _name)))


def test_every_row_kernel_has_a_regime():
    found = set()
    for shape, axis in ROW_REGIMES.values():
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        chosen = [plan(functools.partial(fn, axis=axis), x) for fn in (jaxgpuops.softmax, jaxgpuops.sum)]
        found |= {(c["algorithm"], c["blocks"] > 1) for c in chosen}
    assert found == {
        ("rows", False), ("rows", True), ("rows_stream", False), ("rows_stream", True), ("rows_split", True),
        ("columns", False), ("columns", True), ("columns_split", True),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@row_regimes
def test_rows_are_those_of_plain_jax(shape, axis, dtype):
    operands = row_operands(shape, axis, dtype=dtype)
    actual = run_rows(**operands, axis=axis)
    with jax.enable_x64(True):
        exact = {k: v.astype(jnp.float64) if jnp.issubdtype(v.dtype, jnp.floating) else v for k, v in operands.items()}
        expected = jax.jit(functools.partial(all_rows, axis=axis, module=Plain))(**exact)
    eps = float(jnp.finfo(dtype).eps)
    for name, y in actual.items():
        a, b = y.astype(jnp.float32), expected[name].astype(jnp.float32)
        b = jnp.where(jnp.abs(b) > float(jnp.finfo(y.dtype).max), jnp.copysign(jnp.inf, b), b)
        # A gradient knows the results as they were rounded, and is a difference of what may be larger.
        t = jnp.abs(operands["t"]).astype(jnp.float32)
        sizes = {"gradient of softmax": 2 * t.max(axis, keepdims=True)}
        sizes["gradient of log_softmax"] = t.sum(axis, keepdims=True)
        largest = jnp.abs(jnp.where(jnp.isfinite(b), b, 0)).max(axis if b.ndim == len(shape) else None, keepdims=True)
        largest = jnp.maximum(largest, sizes.get(name.removesuffix(" of all operands"), 0))
        if name in ("sum", "sum where", "dot"):  # they cancel
            largest = largest + 10 * shape[axis] ** 0.5 * (eps < 1e-4)
        off = jnp.where((a == b) | (jnp.isnan(a) & jnp.isnan(b)), 0, jnp.abs(a - b) / (largest + 1e-30)).max()
        assert off < 8 * eps + 2e-6, (name, float(off))


@row_regimes
def test_rows_repeat_bit_for_bit_while_another_stream_is_busy(shape, axis):
    torch = pytest.importorskip("torch", reason="needs a second stream of this process: torch's")
    operands = row_operands(shape, axis)
    first = jax.block_until_ready(run_rows(**operands, axis=axis))
    matrix = torch.randn(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(stream):
            for _ in range(3):
                matrix @ matrix
        assert same_bits(run_rows(**operands, axis=axis), first)
    stream.synchronize()


ROWWISE = ("x", "t", "labels", "scale")


@row_regimes
def test_a_row_is_that_of_the_row_in_its_batch(shape, axis):
    operands = row_operands((5, *shape[1:]), axis)
    part = lambda of: {k: of(v) if k in ROWWISE else v for k, v in operands.items()}
    whole = run_rows(**operands, axis=axis)
    for i in range(5):
        row = lambda v: v[i : i + 1]  # noqa: B023  called here
        assert same_bits(run_rows(**part(row), axis=axis), jax.tree.map(row, whole))
    limit = jax.local_devices()[0].memory_stats()["bytes_limit"]
    many = max(1, min(120, limit // (100 * operands["x"].nbytes)))
    repeated = run_rows(**part(lambda v: jnp.concatenate([v] * many)), axis=axis)
    assert same_bits(jax.tree.map(lambda y: y[-5:], repeated), whole)
    if axis == 1 and len(shape) == 2:  # rows that are not aligned

        @jax.jit
        def shifted(flat):
            return all_rows(**operands | {"x": flat[3:].reshape(5, -1)}, axis=axis)

        assert same_bits(shifted(jnp.append(jnp.zeros(3), operands["x"])), whole)


@row_regimes
def test_infinities_in_parts_of_rows(shape, axis):
    """Parts that are -inf, or masked, as long as those that kernels divide rows into."""
    shape = (min(shape[0], 20), *shape[1:])
    n = shape[axis]
    x = jax.random.normal(jax.random.key(0), shape)
    position = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    for counts in (position >= n - 3, position < 3, abs(position - n // 2) < 2):
        low = jnp.where(counts, x, -jnp.inf)
        for name in SOFTMAX:
            fn = jax.jit(functools.partial(getattr(jaxgpuops, name), axis=axis))
            expected = getattr(jax.nn, name)(low, axis=axis)
            np.testing.assert_allclose(fn(low), expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(fn(jnp.where(counts, x, jnp.nan), where=counts), expected, rtol=1e-5, atol=1e-6)


def test_causal_rows():
    for queries, keys in [(7, 7), (300, 200), (1000, 1000), (16, 20_000)]:
        x = jax.random.normal(jax.random.key(0), (3, queries, keys))
        triangle = jnp.tri(queries, keys, dtype=bool)
        poisoned = jnp.where(triangle, x, jnp.nan)
        for name in SOFTMAX:
            y, pull = jax.vjp(lambda x: getattr(jaxgpuops, name)(x, causal=True), poisoned)  # noqa: B023
            masked = functools.partial(getattr(jaxgpuops, name), where=triangle)
            expected, pull_expected = jax.vjp(masked, x)
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(
                pull(jnp.ones_like(y))[0], pull_expected(jnp.ones_like(y))[0], rtol=1e-4, atol=1e-5
            )


ROW_GRAPHS = """
import jax, jax.numpy as jnp
from test_gpu import ROW_REGIMES, all_rows, row_operands, same_bits
for regime, (shape, axis) in ROW_REGIMES.items():
    shape = (min(shape[0], 50), *shape[1:])
    program = jax.jit(lambda o: all_rows(**o, axis=axis))
    for seed in range(4):  # new inputs, at new addresses
        operands = row_operands(shape, axis, seed)
        results = program(operands)
        again = {name: jax.jit(lambda o: all_rows(**o, axis=axis)[name])(operands) for name in ("softmax", "sum")}
        assert same_bits({name: results[name] for name in again}, again), (regime, seed)
        assert abs(results["softmax"].sum(axis) - 1).max() < 1e-4, (regime, seed)
        assert abs(results["log_softmax"] + jnp.expand_dims(results["logsumexp"], axis) - operands["x"]).max() < 1e-4
print("graphs ok")
"""


def test_rows_in_command_buffers_with_changing_inputs():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_graph_min_graph_size=1"
    program = f"import sys; sys.path.append({str(HERE)!r})\n{ROW_GRAPHS}"
    assert "graphs ok" in in_subprocess("-c", program, XLA_FLAGS=flags)


LARGE_ROWS = {
    "many rows": (((1 << 21) + 5, 1031), 1),
    "long rows": ((3, (1 << 30) + 3), 1),
    "a row longer than 2^31": (((1 << 31) + 5,), 0),
    "many columns": ((3, 1031, (1 << 20) + 8), 1),
    "long columns": (((1 << 28) + 3, 9), 0),
}


@pytest.mark.parametrize("shape, axis", LARGE_ROWS.values(), ids=LARGE_ROWS)
def test_rows_of_more_than_2_to_the_31_elements(shape, axis):
    limit = jax.local_devices()[0].memory_stats()["bytes_limit"]
    if limit < 40 << 30:
        pytest.skip(f"needs 40 GiB of GPU memory for JAX, has {limit >> 30}")
    iota = functools.partial(jax.lax.broadcasted_iota, jnp.uint32, shape)
    mixed = lambda: sum(iota(d) * jnp.uint32(2654435761 + 2 * d) for d in range(len(shape))) >> 24
    x = jax.jit(lambda: (mixed() % 16).astype(jnp.bfloat16) / 4)()
    lse = jax.jit(lambda x: jaxgpuops.logsumexp(x, axis=axis, keepdims=True))(x).astype(jnp.float32)
    for name in ("softmax", "log_softmax"):
        y = jax.jit(lambda x: getattr(jaxgpuops, name)(x, axis=axis))(x)  # noqa: B023
        log = jnp.log if name == "softmax" else lambda y: y
        worst = jax.jit(lambda x, y, lse: abs(log(y.astype(jnp.float32)) + lse - x).max())(x, y, lse)  # noqa: B023
        assert worst < 0.2, name  # lse and y have 8 bits
        del y
    bytes_ = x.astype(jnp.int8)
    largest = jax.jit(lambda x: [jaxgpuops.max(x, axis=axis), jaxgpuops.min(x, axis=axis)])(bytes_)
    assert (largest[0] == 3).all() and (largest[1] == 0).all()
    total = jax.jit(lambda x: jaxgpuops.sum(x, axis=axis))(bytes_)
    assert (total == jnp.sum(bytes_, axis, dtype=jnp.int8)).all()  # wraps around


# ---- Scans ----------------------------------------------------------------------------------------------------------

# Every kernel and layout of it: (shape, axis). A row of "look-ahead, one row" is so long that it takes that kernel
# alone, and in a large batch another.
SCAN_REGIMES = {
    "loop, along, a tile": ((3000, 250), 1),
    "loop, along, aligned": ((3000, 4096), 1),
    "loop, along, many tiles": ((600, 70_001), 1),
    "look-ahead, along, few tiles": ((3, 300_001), 1),
    "look-ahead, along, aligned": ((1, 1 << 20), 1),
    "look-ahead, along, one row": ((1, 2_200_003), 1),
    "look-ahead, along": ((2, 8_000_004), 1),
    "loop, across": ((16, 1003, 2048), 1),
    "look-ahead, across, few tiles": ((2, 8003, 64), 1),
    "look-ahead, across": ((1, 65_537, 256), 1),
    "loop, single": ((600, 1003, 3), 1),
    "look-ahead, single, few tiles": ((2, 100_003, 3), 1),
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
    algorithms, layouts = ("loop", "look_ahead"), ("along", "across", "single")
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
