"""How XLA's partitioner splits our calls: compiled HLO for several devices."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxgpuops
from jaxgpuops import _partition, _primitive, _split
from jaxgpuops.lax import softmax_primitives
from jaxgpuops.lax.along_axis import put_along_axis, take_along_axis

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
SHAPE = (8, 8, 16, 8)
AXIS = 2


@pytest.fixture
def explicit_mesh(mesh, several_devices):
    return jax.make_mesh(mesh.axis_sizes, ("a", "b"), axis_types=(AxisType.Explicit,) * 2, devices=several_devices)


def topk_values(x):
    return jaxgpuops.topk(x, 3, axis=AXIS).values


def indices_of(x):
    return jax.lax.top_k(x, 3, axis=AXIS)[1]


STARTS = (np.arange(16) % 5 == 0)[:, None]
FACTORS = np.array([0, 1, -1, 1, 1, 0, -1, 1], np.float32)


def recurrence(x, starts=None):
    return jaxgpuops.linear_scan(FACTORS, x, axis=AXIS, segment_starts=starts)


def loop(x, factors=1, segmented=False):
    states = [x[:, :, 0]]
    for k in range(1, 16):
        states.append((0 if segmented and STARTS[k, 0] else factors * states[-1]) + x[:, :, k])
    return jnp.stack(states, AXIS)


# name -> a function of x, and the same on jax.lax. Kernels of two operands get both from x.
FUNCTIONS = {
    "topk": (lambda x: jaxgpuops.topk(x, 3, axis=AXIS), lambda x: jax.lax.top_k(x, 3, axis=AXIS)),
    "gradient": (
        jax.grad(lambda x: (topk_values(x) ** 2).sum()),
        jax.grad(lambda x: (jax.lax.top_k(x, 3, axis=AXIS)[0] ** 2).sum()),
    ),
    "argmax": (
        lambda x: jaxgpuops.lax.argmax(x, AXIS, np.int32),
        lambda x: jax.lax.argmax(x, AXIS, np.int32),
    ),
    "take_along_axis": (
        lambda x: take_along_axis(x, jaxgpuops.topk(-x, 3, axis=AXIS).indices, AXIS),
        lambda x: jnp.take_along_axis(x, indices_of(-x), AXIS),
    ),
    "put_along_axis": (
        lambda x: put_along_axis(topk_values(x), jaxgpuops.topk(x, 3, axis=AXIS).indices, AXIS, 16),
        lambda x: jnp.put_along_axis(
            jnp.zeros_like(x), indices_of(x), jax.lax.top_k(x, 3, axis=AXIS)[0], AXIS, inplace=False
        ),
    ),
    "cumsum of segments": (
        lambda x: jaxgpuops.cumsum(x, axis=AXIS, segment_starts=STARTS),
        lambda x: loop(x, segmented=True),
    ),
    "gradient of cummax": (
        jax.grad(lambda x: (jaxgpuops.cummax(x, axis=AXIS) ** 2).sum()),
        jax.grad(lambda x: (jax.lax.cummax(x, axis=AXIS) ** 2).sum()),
    ),
    "sum where": (
        lambda x: jaxgpuops.sum(x, axis=AXIS, where=STARTS),
        lambda x: jnp.sum(x, axis=AXIS, where=STARTS),
    ),
    "gradient of max": (
        jax.grad(lambda x: (jaxgpuops.max(x, axis=AXIS) ** 2).sum()),
        jax.grad(lambda x: (jnp.max(x, axis=AXIS) ** 2).sum()),
    ),
    # Logits so far apart that their softmax is exactly 0 or 1.
    "softmax where": (
        lambda x: jaxgpuops.softmax(
            x, axis=AXIS, where=STARTS, scale=np.full((8, 1, 1, 1), 128, np.float32), bias=-FACTORS
        ),
        lambda x: jax.nn.softmax(128 * x - FACTORS, axis=AXIS, where=STARTS),
    ),
    "linear_scan": (recurrence, lambda x: loop(x, FACTORS)),
    "gradient of linear_scan": (
        jax.grad(lambda x: (recurrence(x, STARTS) ** 2).sum()),
        jax.grad(lambda x: (loop(x, FACTORS, segmented=True) ** 2).sum()),
    ),
}
BATCH_SPECS = [P("a"), P(None, "b"), P("a", "b"), P(("a", "b")), P("b", "a")]
OTHER_SPECS = [
    P(None, None, "a"),
    P(None, None, None, "a"),
    P("b", None, "a"),
    P("a", None, None, "b"),
    P(None, "b", ("a",), None),
]


def example():
    return np.random.default_rng(0).permutation(8 * 8 * 16 * 8).reshape(SHAPE).astype(np.float32)


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(actual), jax.tree.leaves(expected))


@pytest.mark.parametrize("spec", BATCH_SPECS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_batch_dimensions_shard_without_collectives(mesh, name, spec):
    fn, reference = FUNCTIONS[name]
    x = jax.device_put(example(), NamedSharding(mesh, spec))
    compiled = jax.jit(fn).lower(x).compile()
    hlo = compiled.as_text()
    assert "jaxgpuops." in hlo
    assert not [c for c in COLLECTIVES if c in hlo]
    outs = compiled(x)
    for out in jax.tree.leaves(outs):
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), out.ndim)
    assert_equal(outs, reference(example()))


@pytest.mark.parametrize("spec", OTHER_SPECS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_dimensions_are_gathered(mesh, name, spec):
    fn, reference = FUNCTIONS[name]
    x = jax.device_put(example(), NamedSharding(mesh, spec))
    assert_equal(jax.jit(fn)(x), reference(example()))


@pytest.mark.parametrize("axis", range(4))
def test_any_axis_under_any_one_dimensional_sharding(mesh, axis):
    expected = jax.lax.top_k(example(), 2, axis=axis)
    for dim in range(4):
        x = jax.device_put(example(), NamedSharding(mesh, P(*(None,) * dim, ("a", "b"))))
        assert_equal(jax.jit(functools.partial(jaxgpuops.topk, k=2, axis=axis))(x), expected)


def test_vmap_shards_its_batch_without_collectives(mesh):
    x = jax.device_put(example(), NamedSharding(mesh, P(("a", "b"))))
    fn = jax.jit(jax.vmap(jax.grad(lambda x: (jaxgpuops.topk(x, 3, axis=-1).values ** 2).sum())))
    hlo = fn.lower(x).compile().as_text()
    assert "jaxgpuops.put_along_axis" in hlo
    assert not [c for c in COLLECTIVES if c in hlo]


def test_batch_of_offsets_alone_may_be_split_by_type(explicit_mesh):
    x, offsets = example()[0, 0].T, np.stack([np.array([0, n, 16]) for n in range(8)])

    def functions(x, offsets):
        topk = lambda x, offsets: jaxgpuops.topk(x, 3, offsets=offsets)
        gradient = jax.grad(lambda x, offsets: (topk(x, offsets).values[..., :1] ** 2).sum())
        return [jax.vmap(f, (None, 0))(x, offsets) for f in (topk, gradient)]

    expected = jax.jit(functions)(x, offsets)
    with jax.set_mesh(explicit_mesh):
        split = jax.device_put(offsets, NamedSharding(explicit_mesh, P("a")))
        results = jax.jit(functions)(x, split)
    assert_equal(results, expected)
    assert all(y.sharding.spec[0] == "a" for y in jax.tree.leaves(results))


@pytest.mark.parametrize("spec", [P("a"), P(None, "a", None, "b")], ids=str)
def test_lengths_of_rows_that_are_split_by_type(explicit_mesh, spec):
    x, lengths = example(), np.arange(8, dtype=np.int32)

    def functions(x):
        values = lambda x: jaxgpuops.topk(x, 3, axis=AXIS, lengths=lengths).values
        return values(x), jax.grad(lambda x: (jnp.maximum(values(x), 0) ** 2).sum())(x), jax.jvp(values, (x,), (x,))[1]

    expected = jax.jit(functions)(x)
    with jax.set_mesh(explicit_mesh):
        results = jax.jit(functions)(jax.device_put(x, NamedSharding(explicit_mesh, spec)))
    assert_equal(results, expected)


def test_several_axes_whose_first_cannot_be_split(explicit_mesh):
    x = example()[:1, 0]  # of shape (1, 16, 8)

    def functions(x):
        softmax = lambda x: jaxgpuops.softmax(x / 64, axis=None)
        return softmax(x), jax.grad(lambda x: (softmax(x) ** 2).sum())(x)

    expected = jax.jit(functions)(x)
    with jax.set_mesh(explicit_mesh):
        results = jax.jit(functions)(jax.device_put(x, NamedSharding(explicit_mesh, P(None, "a"))))
    jax.tree.map(lambda y, e: np.testing.assert_allclose(y, e, rtol=1e-5, atol=1e-9), results, expected)


def test_as_many_quantiles_as_elements_of_rows_that_are_split_by_type(explicit_mesh):
    x = example()[0, 0, :8].T
    gradient = lambda x: jax.grad(lambda x: jaxgpuops.quantile(x, np.linspace(0, 1, 4), axis=0).sum())(x)
    expected = jax.jit(gradient)(x)
    with jax.set_mesh(explicit_mesh):
        result = jax.jit(gradient)(jax.device_put(x, NamedSharding(explicit_mesh, P("a"))))
    assert_equal(result, expected)


IDS, WEIGHTS = np.arange(16, dtype=np.int32).reshape(8, 2) * 5 % 4, np.arange(1, 17, dtype=np.float32).reshape(8, 2)


def combined(y, ids, weights):
    return (jaxgpuops.moe_combine(y, jaxgpuops.moe_plan(ids, 4), weights) ** 2).sum()


# name -> a function, its arrays, and how explicit types split them: in ways that some of the arrays cannot share.
SPLIT_OPERANDS = {
    "offsets of a sort": (
        lambda x, offsets: jaxgpuops.sort(x, offsets=offsets),
        (example()[0, 0, :3].T, np.array([0, 1, 2, 3])),
        (P("a"), P("b")),
    ),
    "offsets of complex numbers": (
        lambda x, offsets: jaxgpuops.argsort(x + 1j * x, offsets=offsets),
        (example()[0, 0], np.array([0, 3, 3, 8])),
        (P(None, "a"), P("b")),
    ),
    "offsets of top-k": (
        lambda x, offsets: jaxgpuops.topk(x, 2, offsets=offsets),
        (example()[0, 0], np.array([0, 3, 3, 8])),
        (P("b"), P("a")),
    ),
    "ranks of quantiles": (
        lambda x, q: jaxgpuops.quantile(x, q),
        (example()[0, 0], np.linspace(0, 1, 8, dtype=np.float32)),
        (P("b"), P("a")),
    ),
    "gradients of a batch of ranks": (
        lambda x, q: jax.grad(
            lambda x: jax.vmap(functools.partial(jaxgpuops.quantile, method="midpoint"), (None, 0))(x, q).sum()
        )(x),
        (example()[0, 0, 0], np.linspace(0, 1, 8, dtype=np.float32)),
        (P(), P("a")),
    ),
    "a split axis with weights": (
        lambda x, w: jax.value_and_grad(
            lambda x: (jaxgpuops.quantile(x, [0.3, 0.7], method="inverted_cdf", weights=w) ** 2).sum()
        )(x),
        (example()[0, 0], np.arange(1, 129, dtype=np.float32).reshape(16, 8)),
        (P(None, "a"), P(None, "a")),
    ),
    "a loss of one row": (
        lambda x: jax.value_and_grad(lambda x: jaxgpuops.softmax_cross_entropy(x, 3, reduction="mean"))(x),
        (-example()[0, 0, 0],),
        (P("a"),),
    ),
    "choices of a token": (combined, (example()[0, 0], IDS, WEIGHTS), (P(), P(None, "b"), P("a"))),
    "second derivatives of weighted rows": (
        lambda y, *others: jax.grad(lambda y: (jax.grad(combined, 2)(y, *others) ** 2).sum())(y),
        (np.sqrt(example()[0, 0]), IDS, WEIGHTS / 16),
        (P("a"), P(), P("a")),
    ),
}


@pytest.mark.parametrize("name", SPLIT_OPERANDS)
def test_operands_that_are_split_by_type(explicit_mesh, name):
    function, arrays, specs = SPLIT_OPERANDS[name]
    expected = jax.jit(function)(*arrays)
    if any(p and n % explicit_mesh.shape[p] for x, s in zip(arrays, specs, strict=True) for n, p in zip(x.shape, s)):
        pytest.skip("the mesh does not divide the arrays")
    with jax.set_mesh(explicit_mesh):
        results = jax.jit(function)(*map(jax.device_put, arrays, specs))
    for y, e in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-5)


@pytest.mark.parametrize("workspace_bytes", [0, 96])
@pytest.mark.parametrize("name", ["topk", "argmax", "linear_scan"])
def test_workspaces_shard_with_the_batch(mesh, monkeypatch, kernels, name, workspace_bytes):
    # The extra result of CUDA calls, compiled (not run) for the devices at hand.
    choose = _primitive.Kernel.choose
    planned = lambda *args, **kwargs: dataclasses.replace(
        choose(*args, **kwargs), plan={"workspace_bytes": workspace_bytes}
    )
    monkeypatch.setattr(_primitive.Kernel, "choose", planned)
    x = jax.device_put(example(), NamedSharding(mesh, P("a", "b")))
    fn = lambda x: FUNCTIONS[name][0](x)  # a new function, so that no cache hides the lowering
    hlo = jax.jit(fn).lower(x).compile().as_text()
    assert f"u8[{8 // mesh.shape['a']},{8 // mesh.shape['b']},{workspace_bytes}]" in hlo
    assert not [c for c in COLLECTIVES if c in hlo]


@pytest.mark.parametrize("shape", [(8, 8, 16, 8), (8, 1, 16, 1), (1, 8, 1, 8), (1, 1, 16, 8), (1, 1, 1, 1)], ids=str)
def test_operands_that_broadcast(mesh, shape):
    # XLA would pad a dimension of size 1 that it splits: devices would read zeros.
    a = np.random.default_rng(0).integers(-1, 2, shape).astype(np.float32)
    x_host = example() % 4  # these numbers are so small that the sums below are exact
    for spec in (P("a"), P(None, "b"), P("a", "b"), P(("a", "b"))):
        x = jax.device_put(x_host, NamedSharding(mesh, spec))
        for module in (jaxgpuops, jaxgpuops.lax):
            fn = jax.jit(functools.partial(module.linear_scan, axis=AXIS))
            hlo = fn.lower(a, x).compile().as_text()
            assert "jaxgpuops.linear_scan" in hlo
            assert not [c for c in COLLECTIVES if c in hlo]
            states = [x_host[:, :, 0]]
            for k in range(1, 16):
                states.append(np.broadcast_to(a, SHAPE)[:, :, k] * states[-1] + x_host[:, :, k])
            assert_equal(fn(a, x), np.stack(states, AXIS))
            # The cotangent of a sums over devices: it has its own shape and needs a collective, but is right.
            pull = jax.jit(
                lambda a, x, module=module: jax.vjp(lambda a: module.linear_scan(a, x, axis=AXIS), a)[1](x)[0]
            )
            np.testing.assert_array_equal(pull(a, x), pull(a, x_host))


def test_operands_that_broadcast_inside_shard_map(mesh):
    # A device has all of its part inside a shard_map, so the operand that broadcasts is not expanded.
    body = lambda a, x: jaxgpuops.linear_scan(a, x, axis=AXIS)
    fn = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P(), P("a", "b")), out_specs=P("a", "b")))
    text = fn.lower(FACTORS, example()).as_text()
    assert "tensor<1x1x1x8xf32>" in re.search(r"custom_call @jaxgpuops.linear_scan.*", text)[0]
    assert_equal(fn(FACTORS, example()), loop(example(), FACTORS))


def test_empty_arrays(mesh):
    x = jax.device_put(np.zeros((8, 0), np.float32), NamedSharding(mesh, P("a")))
    values, indices = jax.jit(lambda x: jaxgpuops.topk(x, 0))(x)
    assert values.shape == indices.shape == (8, 0)


def test_explicit_types_keep_batch_shardings(explicit_mesh):
    with jax.set_mesh(explicit_mesh):
        x = jax.device_put(example(), P("a", "b"))

        @jax.jit
        def fn(x):
            values, indices = jaxgpuops.topk(x, 3, axis=AXIS)
            gradient = jax.grad(lambda x: topk_values(x).sum())(x)
            first = jaxgpuops.lax.argmax(x, AXIS, np.int32)
            assert jax.typeof(values).sharding.spec == jax.typeof(indices).sharding.spec == P("a", "b", None, None)
            assert jax.typeof(gradient).sharding.spec == P("a", "b", None, None)
            assert jax.typeof(first).sharding.spec == P("a", "b", None)
            return values, indices, gradient, first

        hlo = fn.lower(x).compile().as_text()
        assert not [c for c in COLLECTIVES if c in hlo]
        values, indices, _, first = fn(x)
    assert_equal((values, indices), jax.lax.top_k(example(), 3, axis=AXIS))
    assert_equal(first, np.argmax(example(), AXIS))


def test_explicit_types_of_an_empty_axis(explicit_mesh):
    with jax.set_mesh(explicit_mesh):
        x = jax.sharding.reshard(jnp.zeros((4, 0)), P(None, "a"))
        states, last = jaxgpuops.linear_scan(x, x, jnp.ones(4), return_last=True)
        assert states.shape == (4, 0) and last.tolist() == [1.0] * 4


def test_explicit_types_of_operands_that_broadcast(explicit_mesh):
    with jax.set_mesh(explicit_mesh):
        x = jax.device_put(example(), P("a", "b"))
        a = jax.device_put(FACTORS, P())

        @jax.jit
        def fn(a, x):
            h = jaxgpuops.linear_scan(a, x, axis=AXIS, segment_starts=STARTS)
            da, dx = jax.grad(lambda a, x: jaxgpuops.linear_scan(a, x, axis=AXIS).sum(), (0, 1))(a, x)
            assert jax.typeof(h).sharding.spec == jax.typeof(dx).sharding.spec == P("a", "b", None, None)
            assert jax.typeof(da).sharding.spec == P(None)
            return h, da, dx

        h, da, dx = fn(a, x)
    assert_equal(h, loop(example(), FACTORS, segmented=True))
    expected = jax.grad(lambda a, x: loop(x, a).sum(), (0, 1))(FACTORS, example())
    np.testing.assert_allclose(da, expected[0], rtol=1e-4, atol=1)
    assert_equal(dx, expected[1])


def test_explicit_types_keep_shardings_after_the_axis(explicit_mesh):
    with jax.set_mesh(explicit_mesh):
        x = jax.device_put(example(), P(None, None, None, "b"))
        out = jax.jit(lambda x: jaxgpuops.topk(x, 3, axis=AXIS))(x)
        assert out.values.sharding.spec == P(None, None, None, "b")
    assert_equal(out, jax.lax.top_k(example(), 3, axis=AXIS))


def test_explicitly_sharded_axis(explicit_mesh):
    with jax.set_mesh(explicit_mesh):
        x, y = (jax.device_put(example(), P(None, None, name)) for name in "ab")
        with pytest.raises(Exception, match="sharded differently in dimension 2") as error:
            jax.jit(lambda x, y: jaxgpuops.dot(x, y, axis=AXIS))(x, y)
        assert type(error.value).__name__ == "ShardingTypeError"  # the error that x * y raises, too
        of_rows, columns = jax.device_put(np.ones((8, 1)), P("a")), jax.device_put(np.ones((8, 8)), P(None, "a"))
        with pytest.raises(type(error.value), match="sharded along one mesh axis in several dimensions"):
            jaxgpuops.linear_scan(of_rows, columns)
        for name, spec in {"topk": P(None, None, None, None), "cumsum of segments": P(None, None, "a", None)}.items():
            ours, reference = FUNCTIONS[name]
            out = jax.jit(lambda x, ours=ours: ours(x))(x)
            assert {y.sharding.spec for y in jax.tree.leaves(out)} == {spec}
            assert_equal(out, reference(example()))
        assert jax.jit(lambda x: jaxgpuops.sum(x, axis=AXIS))(x).sharding.spec == P(None, None, None)


# ---- Dimensions that a result depends on by their index -------------------------------------------------------------

SQUARES = (8, 4, 8, 8)  # with queries and keys


def squares():
    return np.random.default_rng(0).standard_normal(SQUARES).astype(np.float32)


CAUSAL = {
    "softmax": lambda module, x: module.softmax(x, causal=True),
    "log_softmax": lambda module, x: jnp.maximum(module.log_softmax(x, causal=True), -1e9),
    "logsumexp": lambda module, x: module.logsumexp(x, causal=True),
    "gradient": lambda module, x: jax.grad(lambda x: (module.softmax(x, causal=True) ** 2).sum())(x),
    "gradient of log_softmax": lambda module, x: jax.grad(
        lambda x: (jnp.exp(module.log_softmax(x, causal=True)) ** 2).sum()
    )(x),
    "batch between": lambda module, x: jax.vmap(lambda x: module.softmax(x, causal=True), 2, 2)(x),
}


def causal_by_jax(name, x):
    class Module:
        softmax = staticmethod(lambda x, causal: jax.nn.softmax(masked(x)))
        log_softmax = staticmethod(lambda x, causal: jax.nn.log_softmax(masked(x)))
        logsumexp = staticmethod(lambda x, causal: jax.nn.logsumexp(masked(x), -1))

    masked = lambda x: jnp.where(jnp.tri(*x.shape[-2:], dtype=bool), x, -1e9)
    return CAUSAL[name](Module, x)


@pytest.mark.parametrize("name", CAUSAL)
def test_queries_are_not_split(mesh, name):
    expected = causal_by_jax(name, squares())
    for spec in (
        P("a"),
        P("b", "a"),
        P(None, None, "a"),
        P("a", None, "b"),
        P(None, None, ("a", "b")),
        P(None, None, "b", "a"),
    ):
        x = jax.device_put(squares(), NamedSharding(mesh, spec))
        fn = jax.jit(lambda x: CAUSAL[name](jaxgpuops, x))
        hlo = fn.lower(x).compile().as_text()
        assert "jaxgpuops." in hlo
        if len(spec) <= 2 and name != "batch between":
            assert not [c for c in COLLECTIVES if c in hlo]
        np.testing.assert_allclose(np.maximum(fn(x), -1e9), expected, rtol=1e-5, atol=1e-6)


def test_explicit_types_of_queries(explicit_mesh):
    with jax.set_mesh(explicit_mesh):
        x = jax.device_put(squares(), P("a", None, "b"))
        y = jax.jit(lambda x: jaxgpuops.softmax(x, causal=True))(x)
        assert y.sharding.spec == P("a", None, "b", None)
    np.testing.assert_allclose(y, causal_by_jax("softmax", squares()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_gradients_that_devices_may_make_from_logits(mesh, monkeypatch, name):
    """Gradients of rows that no cluster holds are made from x where a device has whole rows, and else from y, which
    takes no more collectives."""
    kept = lambda self, platform, avals, partitioned, *_, **params: (0, 1, 2) if partitioned else (0, 1)
    monkeypatch.setattr(softmax_primitives._Derivative, "_kept", kept)
    x = squares().reshape(32, 64)
    gradient = lambda module: lambda x: jax.vjp(getattr(module, name), x)[1](x[:, ::-1])[0]
    for spec, collectives in ((P(("a", "b")), 0), (P(None, "b"), 3), (P("a", "b"), 3)):
        sharded = jax.device_put(x, NamedSharding(mesh, spec))
        compiled = jax.jit(gradient(jaxgpuops)).lower(sharded).compile()
        hlo = compiled.as_text()
        assert len(re.findall(r" all-reduce(?:-done)?\(", hlo)) <= collectives and "all-gather" not in hlo
        np.testing.assert_allclose(compiled(sharded), gradient(jax.nn)(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", [None, "mean"])
def test_cross_entropy_of_a_sharded_batch(mesh, reduction):
    """Rows are split without being gathered; only scalars cross."""
    logits, labels = squares().reshape(32, 64), np.arange(32) % 64
    fn = lambda x, labels: jaxgpuops.softmax_cross_entropy(x, labels, reduction=reduction).sum()
    sharded = (jax.device_put(a, NamedSharding(mesh, P(("a", "b")))) for a in (logits, labels))
    compiled = jax.jit(jax.value_and_grad(fn)).lower(*(sharded := list(sharded))).compile()
    hlo = compiled.as_text()
    assert "jaxgpuops.cross_entropy" in hlo and "all-gather" not in hlo and "all-to-all" not in hlo
    # The partitioned program's arguments may be anything in the whole program, so the gradient is in their place. (On a
    # GPU that is not worth a copy of so few.)
    in_place = reduction == "mean" and jax.default_backend() == "cpu"
    assert ("output_to_operand_aliasing" in hlo) == in_place
    loss, gradient = compiled(*sharded)
    expected = jax.value_and_grad(fn)(logits, labels)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-5, atol=1e-7)


# ---- The mechanism ----------------------------------------------------------------------------------------------------


def test_jax_has_the_private_names_that_partitioning_needs():
    # Where this fails, JAX has changed: find the new name and add it to _private.py beside the old one.
    assert not _partition.missing


def test_every_kernel_has_a_rule():
    # The operands of some are gathered: each device could only find its own part of the results. `follow` is made of
    # kernels that have rules.
    assert {*_primitive.KERNELS} - {"choose", "pick", "unique", "follow"} == {*_split.RULES}


@pytest.mark.filterwarnings("ignore:jaxgpuops gathers arrays")
def test_without_them_other_dimensions_are_gathered(mesh, monkeypatch):
    monkeypatch.setattr(_partition, "missing", "no such name")
    _primitive._warn_missing_partitioner.cache_clear()
    x = jax.device_put(example(), NamedSharding(mesh, P("b", None, "a")))
    fn = jax.jit(lambda x: jaxgpuops.cummax(x, axis=AXIS))
    with pytest.warns(UserWarning, match="no such name"):
        compiled = fn.lower(x).compile()
    assert "all-gather" in compiled.as_text()
    assert_equal(compiled(x), np.maximum.accumulate(example(), AXIS))


def test_programs_for_one_device_and_exports_have_calls_of_kernels():
    fn = jax.jit(lambda x: jaxgpuops.cummax(x, axis=AXIS))
    assert _partition._TARGET not in fn.lower(example()).as_text()
    mesh = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1])
    assert _partition._TARGET not in fn.lower(jax.device_put(example(), NamedSharding(mesh, P("a")))).as_text()


def test_two_meshes_and_manual_axes(mesh, several_devices):
    other = jax.make_mesh((2, len(several_devices) // 2), ("b", "c"), axis_types=(AxisType.Auto,) * 2)
    scan = lambda x: jaxgpuops.cumsum(x, axis=AXIS)

    @jax.jit
    def fn(x, y):
        partly = jax.shard_map(scan, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}, check_vma=False)
        return scan(x), scan(y), partly(x)

    x = jax.device_put(example(), NamedSharding(mesh, P(None, None, "b", "a")))
    y = jax.device_put(example(), NamedSharding(other, P(None, None, ("c", "b"))))
    assert_equal(fn(x, y), [np.cumsum(example(), AXIS)] * 3)
