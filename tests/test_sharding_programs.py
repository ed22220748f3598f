"""Whole programs on meshes: partitioners, lowering without devices, caches, donation, export, install, two
processes."""

import functools
import math
import os
import pathlib
import socket
import subprocess
import sys
import types

import jax
import jax.export
import jax.numpy as jnp
import mesh_step
import numpy as np
import pytest
import test_sharding_axis as table
from jax._src.lib import xla_client  # HloSharding has no public name
from jax.experimental import serialize_executable
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding_axis import moved

import jaxgpuops
from jaxgpuops import _partition, _private

# Programs in which only our calls move bytes; derivatives move more, in plain JAX.
EXPLAINED = ["top-k", "argmax", "sum where", "dot", "min", "cumsum", "cumsum of segments", "cummax", "linear_scan"]
EXPLAINED += ["softmax", "cross-entropy", "sum of cross-entropy", "cross-entropy and gradient", "segment_sum"]
EXPLAINED += ["argsort", "sort_key_val", "median", "bincount"]


def example(shape=(8, 512)):
    return np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32)


def several(x):
    return tuple(jaxgpuops.topk(x, 4)), jaxgpuops.cumsum(x), jaxgpuops.softmax(40 * x)


def assert_equal(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def split(mesh, *spec):
    return jax.device_put(example(), NamedSharding(mesh, P(*spec)))


def test_gspmd(mesh):
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        x = split(mesh, "b", "a")
        compiled = jax.jit(lambda x: several(x)).lower(x).compile()
        assert_equal(compiled(x), several(example()))
        assert moved(compiled.as_text())[0] < example().nbytes // 4
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def test_axes_of_a_mesh_in_any_order(several_devices):
    if len(several_devices) < 8:
        pytest.skip("needs eight devices")
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    for spec in (("b", ("c", "a")), (None, ("b", "c", "a")), (("c", "b"), "a")):
        x = split(mesh, *spec)
        assert_equal(jax.jit(several)(x), several(example()))


def test_lowering_for_devices_that_are_not_there():
    sharding = NamedSharding(AbstractMesh((16, 4), ("a", "b")), P("b", "a"))
    x = jax.ShapeDtypeStruct((64, 4096), np.float32, sharding=sharding)
    text = jax.jit(several).trace(x).lower(lowering_platforms=("cpu",)).as_text()
    assert text.count(f"@{_partition._TARGET}(") == 3


def test_donated_arrays_are_written_over(mesh):
    x = split(mesh, None, ("a", "b"))
    program = jax.jit(lambda x: jaxgpuops.cumsum(x), donate_argnums=0).lower(x).compile()
    assert "input_output_alias={ {}: (0, {}" in program.as_text()
    assert_equal(program(x), np.cumsum(example(), 1))
    assert x.is_deleted()


def test_serialized_executables(mesh):
    x = split(mesh, "b", "a")
    compiled = jax.jit(several).lower(x).compile()
    loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
    assert_equal(loaded(x), several(example()))


def test_compiled_programs_are_found_on_disk(mesh):
    x, hits = split(mesh, "b", "a"), []
    jax.jit(several).lower(x).compile()
    jax.clear_caches()
    jax.monitoring.register_event_listener(lambda event, **_: hits.append("cache_hits" in event))
    try:
        compiled = jax.jit(several).lower(x).compile()
    finally:
        jax.monitoring.clear_event_listeners()
    assert any(hits)
    assert_equal(compiled(x), several(example()))


def test_exported_programs_know_nothing_of_the_partitioner(mesh):
    x = split(mesh, "a")
    exported = jax.export.export(jax.jit(several), disabled_checks=jaxgpuops.export_checks())(x)
    text = exported.mlir_module()
    assert _partition._TARGET not in text and "num_batch_dims" in text
    assert_equal(jax.jit(exported.call)(x), several(example()))


def test_explain_says_what_each_device_has_and_gets(mesh):
    rows, columns = example().shape
    a, b = mesh.shape.values()
    every_part = (rows // b, columns // a), (rows // a, columns)
    candidates = rows // b * 4 * a  # candidates have 8 bytes each
    for spec, part, moved_bytes in zip((("b", "a"), ("a",)), every_part, (candidates * 8, 0), strict=True):
        x = split(mesh, *spec)
        for _ in range(2):  # XLA asks once about equal calls
            topk, cumsum = jaxgpuops.explain(lambda x: jaxgpuops.cumsum(jaxgpuops.topk(x, 4).values[:, :1] + x), x)
            assert (topk.op, topk.part) == ("topk", part)
            assert sum(topk.collectives.values()) == moved_bytes and cumsum.op == "cumsum"
    assert f"each device has {list(part)}, nothing moves" in str(topk)
    [whole] = jaxgpuops.explain(lambda x: jaxgpuops.topk(x, 4), example())
    assert whole.part is None and "device" not in str(whole)


@pytest.mark.parametrize("name", EXPLAINED)
def test_explain_says_what_the_compiled_program_moves(mesh, name):
    function = table.OPS[name][0]
    for spec in table.SPECS:
        x = jax.device_put(table.integers(), NamedSharding(mesh, spec))
        calls = jaxgpuops.explain(function, x)
        said = sum(sum(call.collectives.values()) for call in calls)
        assert said == moved(jax.jit(function).lower(x).compile().as_text())[0]
        assert calls[-1].part is not None and "each device has" in str(calls[-1]) and "plain JAX" not in str(calls[-1])


def test_explain_of_an_abstract_mesh_knows_no_parts_and_hides_no_failure(mesh, monkeypatch):
    sharding = NamedSharding(AbstractMesh((4, 2), ("a", "b")), P("b", "a"))
    x = jax.ShapeDtypeStruct((64, 4096), np.float32, sharding=sharding)
    calls = jaxgpuops.explain(several, x)
    assert [call.op for call in calls] == ["topk", "cumsum", "softmax"]
    assert all(call.partitioned and call.part is None for call in calls)

    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: no memory")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no memory"):
        jaxgpuops.explain(several, split(mesh, "b", "a"))
    assert not _partition.listeners


def test_shardings_of_no_mesh_are_gathered(monkeypatch):
    """XLA numbers devices. If no mesh has their order, nothing is split, which is right but slow."""
    meshes = _partition._Meshes(types.SimpleNamespace(num_devices=12))

    def decoded(dimensions, devices):
        sharding = xla_client.OpSharding()
        sharding.type = xla_client.OpSharding.Type.OTHER
        sharding.tile_assignment_dimensions = dimensions
        sharding.tile_assignment_devices = devices
        full, _, [entries] = meshes.decode([((12, 24), xla_client.HloSharding.from_proto(sharding))])
        return [math.prod(full.shape[name] for name in names) for names in entries]

    in_order = np.arange(12)
    for sizes in ((12, 1), (1, 12), (3, 4), (4, 3), (2, 6), (6, 2)):
        assert decoded(sizes, in_order.tolist()) == list(sizes)
        assert decoded(sizes, in_order.reshape(sizes[::-1]).T.ravel().tolist()) == list(sizes)
    # Each of these is refused by another step of JAX's parser.
    for order in ([1, 0, *range(2, 12)], [0, 5, *range(1, 5), *range(6, 12)], [0, 1, 3, 2, *range(4, 12)]):
        assert decoded((3, 4), order) == [1, 1]

    def broken(*_):
        raise TypeError("another signature")

    monkeypatch.setattr(_private, "parse_flatten_op_sharding", broken)
    with pytest.raises(TypeError, match="another signature"):
        decoded((3, 4), in_order.tolist())


INSTALLED = {
    "top_k": lambda x: jax.lax.top_k(x, 3),
    "argmax": lambda x: jnp.argmax(x, 1),
    "cumsum": lambda x: jax.lax.cumsum(x, 1),
    "gradient of cumsum": jax.grad(lambda x: (jax.lax.cumsum(x, 1) ** 2).sum()),
    "softmax": lambda x: jax.nn.softmax(x),
    "gradient of logsumexp": jax.grad(lambda x: jax.nn.logsumexp(x, 1).sum()),
    "one-hot loss": lambda x: -(jax.nn.log_softmax(x) * jax.nn.one_hot(jnp.arange(8) * 60, 512)).sum(1),
    "gradient of a one-hot loss of constants": jax.value_and_grad(
        lambda x: -(jax.nn.log_softmax(x) * jax.nn.one_hot(jnp.arange(8) * 60, 512)).sum()
    ),
    "gradient of a one-hot loss": jax.value_and_grad(
        lambda x: -(jax.nn.log_softmax(x) * jax.nn.one_hot(jnp.argmax(x, 1), 512)).sum()
    ),
    "gradient of a loss": jax.grad(
        lambda x: -jnp.take_along_axis(jax.nn.log_softmax(x), jnp.arange(8)[:, None] * 60, 1).sum()
    ),
    "categorical": lambda x: jax.random.categorical(jax.random.key(0), x),
}
ROUTED = ["top_k", "argmax", "cumsum", "cummax", "softmax", "log_softmax", "logsumexp"]


@pytest.mark.parametrize("name", INSTALLED)
def test_an_installed_program_moves_no_more(mesh, name):
    program = INSTALLED[name]
    x = split(mesh, "b", "a")
    plain = jax.jit(lambda x: program(x)).lower(x).compile()
    with jaxgpuops.install(ROUTED):
        ours = jax.jit(lambda x: program(x)).lower(x).compile()
    expected = jax.jit(lambda x: program(x))(example())
    assert moved(ours.as_text())[0] <= moved(plain.as_text())[0] or table.is_wrong(plain(x), expected)
    assert_equal(ours(x), expected)


# ---- Programs of users, whose functions are ours or plain JAX's --------------------------------------------------------

OURS = types.SimpleNamespace(
    softmax=jaxgpuops.softmax,
    logsumexp=jaxgpuops.logsumexp,
    cumsum=jaxgpuops.cumsum,
    topk=lambda x, k: tuple(jaxgpuops.topk(x, k)),
    argmax=lambda x: jaxgpuops.lax.argmax(x, x.ndim - 1, np.int32),
    max=jaxgpuops.max,
    sort=jaxgpuops.sort,
    take=jaxgpuops.take,
    descending=lambda x, y: jaxgpuops.sort_key_val(x, y, descending=True),
    loss=functools.partial(jaxgpuops.softmax_cross_entropy, reduction="mean"),
)
PLAIN = types.SimpleNamespace(
    softmax=jax.nn.softmax,
    logsumexp=lambda x: jax.nn.logsumexp(x, -1),
    cumsum=lambda x, axis=-1: jnp.cumsum(x, axis),
    topk=jax.lax.top_k,
    argmax=lambda x: jnp.argmax(x, -1),
    max=lambda x, keepdims: jnp.max(x, -1, keepdims=keepdims),
    sort=jnp.sort,
    take=lambda table, ids: table[ids],
    descending=lambda x, y: jax.lax.sort_key_val(-x, y),
    loss=lambda x, labels: -jnp.take_along_axis(jax.nn.log_softmax(x), labels[..., None], -1).mean(),
)
NORMAL = np.random.default_rng(7).standard_normal((512, 64)).astype(np.float32)
WORDS = np.random.default_rng(8).integers(0, 512, (2, 8, 16)).astype(np.int32)


def language_model(ops, parameters, words, following):
    """A step of training: rows of a table, layers with attention in a scan with remat, and a loss of all words."""

    def layer(x, weights):
        scores = jnp.where(np.tri(16, dtype=bool), x @ x.swapaxes(1, 2) / 4, -1e9)
        x = x + ops.softmax(scores) @ x @ weights[0]
        return x + jnp.tanh(ops.cumsum(0.1 * x, axis=1) @ weights[1]), None

    def loss(parameters):
        table, layers, head = parameters
        x = jax.lax.scan(jax.checkpoint(layer), ops.take(table, words), layers)[0]
        return ops.loss(x @ head, following)

    value, gradients = jax.value_and_grad(loss)(parameters)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)


def noise(x):
    return jax.random.gumbel(jax.random.key(1), x.shape, x.dtype)


def chosen(ops, words, scores):
    return jnp.take_along_axis(words, ops.argmax(scores + noise(scores))[..., None], -1)


def sample_top_k(ops, logits):
    best, words = ops.topk(logits, 20)
    return chosen(ops, words, best)


def sample_top_p(ops, logits):
    words = jnp.broadcast_to(np.arange(logits.shape[1], dtype=np.int32), logits.shape)
    _, words = ops.descending(logits, words)
    best = jnp.take_along_axis(logits, words, 1)
    shares = ops.softmax(best)
    return chosen(ops, words, jnp.where(ops.cumsum(shares) - shares < 0.9, best, -np.inf))


def sample_min_p(ops, logits):
    shares = ops.softmax(logits)
    likely = shares >= 0.05 * ops.max(shares, keepdims=True)
    return ops.argmax(jnp.where(likely, logits + noise(logits), -np.inf))


def rows_of_all_kinds(ops, x):
    def row(x):
        def body(x, _):
            x = x + ops.softmax(x) / 2 + ops.cumsum(x) / 64
            return x, ops.topk(x, 4)[0].sum() + ops.logsumexp(x)

        x, ys = jax.lax.scan(jax.checkpoint(body), x, None, length=3)
        return (ops.sort(x) ** 2).sum() + ys.sum()

    return jax.value_and_grad(lambda x: jax.vmap(row)(x).sum())(x)


def rows_of_a_table(ops, table, words):
    return table - 0.1 * jax.grad(lambda table: (ops.take(table, words) ** 2).sum())(table)


PARAMETERS = NORMAL[:, :16], (NORMAL[:48, 16:32].reshape(3, 16, 16) / 9,) * 2, NORMAL[:, :16].T / 9
LOGITS = 3 * NORMAL[:64].reshape(8, 512)
# name -> a program, its arguments, and how they are split
USERS = {
    "a language model, batch and words": (
        language_model,
        (PARAMETERS, *WORDS),
        ((P("b"), P(), P(None, "b")), P("a"), P("a")),
    ),
    "a language model, weights": (
        language_model,
        (PARAMETERS, *WORDS),
        ((P("a"), P(None, "a"), P("a")), P("a"), P("a")),
    ),
    "rows of a table": (rows_of_a_table, (NORMAL[:, :16], WORDS[0]), (P(("a", "b")), P("a"))),
    "matrices of a table": (rows_of_a_table, (NORMAL.reshape(512, 4, 16), WORDS[0]), (P(("a", "b")), P("a"))),
    "numbers of a table": (rows_of_a_table, (NORMAL[:, 0], WORDS[0]), (P(("a", "b")), P("a"))),
    "top-k sampling": (sample_top_k, (LOGITS,), (P("b", "a"),)),
    "top-p sampling": (sample_top_p, (LOGITS,), (P("b", "a"),)),
    "min-p sampling": (sample_min_p, (LOGITS,), (P("b", "a"),)),
    "rows of all kinds, batch": (rows_of_all_kinds, (LOGITS,), (P(("a", "b")),)),
    "rows of all kinds, parts": (rows_of_all_kinds, (LOGITS,), (P("b", "a"),)),
}


@pytest.mark.parametrize("name", USERS)
def test_programs_of_users_move_no_more_than_in_plain_jax(mesh, name):
    program, arguments, specs = USERS[name]
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P))
    operands = jax.device_put(arguments, where)
    ours, plain = (jax.jit(functools.partial(program, ops)).lower(*operands).compile() for ops in (OURS, PLAIN))
    expected = jax.jit(functools.partial(program, OURS))(*arguments)
    for a, b in zip(jax.tree.leaves(ours(*operands)), jax.tree.leaves(expected), strict=True):
        # Sums of at most 2^10 terms, in two orders, each of a few steps that may amplify (see `table.assert_close`).
        np.testing.assert_allclose(a, b, rtol=0, atol=2**11 * 2.0**-24 * np.abs(b).max() if b.dtype != np.int32 else 0)
    fewer = moved(ours.as_text())[0] <= moved(plain.as_text())[0]
    assert fewer or table.is_wrong(plain(*operands), expected)


def test_two_processes_are_as_one(tmp_path):
    on_cpu = jax.default_backend() == "cpu"
    if len(jax.devices()) < (8 if on_cpu else 2):
        pytest.skip("needs eight virtual devices of the CPU, or two GPUs")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu" if on_cpu else "cuda,cpu",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(pathlib.Path(jaxgpuops.__file__).parents[1]), os.environ.get("PYTHONPATH")])
        ),
    }
    paths = [tmp_path / f"{process}.npz" for process in range(2)]
    command = [sys.executable, "-P", mesh_step.__file__]
    running = [
        subprocess.Popen([*command, str(i), address, str(path)], env=environment, stderr=subprocess.PIPE, text=True)
        for i, path in enumerate(paths)
    ]
    errors = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    program, arguments = mesh_step.lowered()
    expected = [np.asarray(a) for a in jax.tree.leaves(program.compile()(**arguments))]
    for path in paths:
        found = np.load(path)
        assert str(found["text"]) == program.as_text()  # both hosts compile the same program without communicating
        for i, a in enumerate(expected):
            np.testing.assert_allclose(found[f"arr_{i}"], a, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(found["arr_4"], expected[4])  # the indices of the best words
        np.testing.assert_array_equal(found["arr_5"], expected[5])  # sums
