"""``axis_name`` inside `jax.shard_map`: each device has its part of the axis, and results are those of one device."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_sharding_axis import moved

import jaxgpuops

SHAPE, AXIS = (4, 64, 4), 1
LABELS = np.random.default_rng(1).integers(0, SHAPE[AXIS], (4, 4)).astype(np.int32)
OFFSETS, LENGTHS = np.array([2, 2, 9, 40, 60]), np.array([[64, 9, 0, 33]])
IDS = np.array([[3, 63, -1], [64, 3, 20]])
ROWS = np.random.default_rng(2).standard_normal((4, 1, 4)).astype(np.float32)


def reduction(name, **options):
    return lambda ops, x, y, **names: getattr(ops, name)(x, axis=AXIS, where=y > 0, **options, **names)


def scan(name, **options):
    def function(ops, x, y, **names):
        return getattr(ops, name)(x, axis=AXIS, segment_starts=y > 1.5, **options, **names)

    return function


def largest(ops, x, y, **names):
    if ops is jaxgpuops:
        return tuple(ops.topk(x, 5, axis=AXIS, largest=False, sorted=False, **names))
    return tuple(ops.top_k(x, 20, axis=AXIS, **names))  # more elements than one device has


def softmax(name):
    def function(ops, x, y, **names):
        z = getattr(ops, name)(x, axis=AXIS, where=y > -1, scale=ROWS, bias=y, **names)
        return jnp.maximum(z, -99)

    return function


def digits(x):
    return jnp.floor(2 * jax.lax.stop_gradient(x)).astype(np.int32) + 3


def counted(f):
    """Makes a function along the last axis one along the axis of these tests."""
    return lambda ops, x, y, **names: f(*(a.transpose(0, 2, 1) for a in (x, y)), **names)


def segments(name):
    def function(ops, x, y, **names):
        one = functools.partial(getattr(jaxgpuops, name), num_segments=7, **names)
        out = jax.vmap(lambda x, y: one(x, digits(y[:, 0])))(x, y)
        return jnp.maximum(out, -9)  # a segment without rows would give -inf

    return function


def finite(top):
    return jnp.maximum(top.values, -99), top.indices


DIMENSION = {jaxgpuops: "axis", jaxgpuops.lax: "dimension"}

# name -> a function of x and of another array of its shape, and whether the result is split as x is
OPS = {
    "top-k": (largest, False),
    "argmin": (lambda ops, x, y, **names: jaxgpuops.lax.argmin(x, AXIS, np.int32, **names), False),
    "sum": (reduction("sum"), False),
    "mean": (reduction("mean", keepdims=True), False),
    "max": (reduction("max"), False),
    "dot": (lambda ops, x, y, **names: ops.dot(x, y, axis=AXIS, **names), False),
    "cumsum": (scan("cumsum", exclusive=True), True),
    "cumprod": (scan("cumprod", reverse=True), True),
    "cummin": (scan("cummin"), True),
    "cumlogsumexp": (lambda ops, x, y, **names: ops.cumlogsumexp(x, axis=AXIS, **names), True),
    "linear_scan": (
        lambda ops, x, y, **names: ops.linear_scan(y / 2, x, ROWS[:, 0], axis=AXIS, reverse=True, **names),
        True,
    ),
    "last state": (
        lambda ops, x, y, **names: ops.linear_scan(ROWS / 4, x, axis=AXIS, return_last=True, **names)[1],
        False,
    ),
    "softmax": (softmax("softmax"), True),
    "log_softmax": (softmax("log_softmax"), True),
    "logsumexp": (softmax("logsumexp"), False),
    "cross-entropy": (
        lambda ops, x, y, **names: ops.softmax_cross_entropy(
            x, LABELS, axis=AXIS, z_loss=0.1, label_smoothing=0.1, **names
        ),
        False,
    ),
    "mean cross-entropy": (
        lambda ops, x, y, **names: ops.softmax_cross_entropy(
            x, LABELS, axis=AXIS, reduction="mean", where=LABELS > 9, **names
        ),
        False,
    ),
    "gate": (lambda ops, x, y, **names: tuple(ops.topk_softmax(x, 3, axis=AXIS, bias=y, **names)), False),
    "gate of groups": (  # a device has several groups
        lambda ops, x, y, **names: tuple(
            ops.topk_softmax(x, 5, axis=AXIS, bias=y, groups=16, topk_groups=3, score="sigmoid", scale=2.5, **names)
        ),
        False,
    ),
    "gate of wide groups": (  # several devices share a group
        lambda ops, x, y, **names: tuple(ops.topk_softmax(x, 20, axis=AXIS, groups=4, topk_groups=2, **names)),
        False,
    ),
    "gate of wide groups, by pairs": (
        lambda ops, x, y, **names: tuple(
            ops.topk_softmax(x, 3, axis=AXIS, bias=y, groups=2, topk_groups=1, normalize=False, **names)
        ),
        False,
    ),
    "sort": (lambda ops, x, y, **names: ops.sort(x, **{DIMENSION[ops]: AXIS}, **names), True),
    "sort_key_val": (lambda ops, x, y, **names: jaxgpuops.sort_key_val(x, y, axis=AXIS, **names), True),
    "argsort": (lambda ops, x, y, **names: jaxgpuops.argsort(x, axis=AXIS, **names), True),
    "sort of segments": (
        lambda ops, x, y, **names: jaxgpuops.sort_key_val(x, y, axis=AXIS, offsets=OFFSETS, **names),
        True,
    ),
    "argsort of segments": (
        lambda ops, x, y, **names: jaxgpuops.argsort(x, axis=AXIS, descending=True, offsets=OFFSETS, **names),
        True,
    ),
    "top-k of segments": (
        lambda ops, x, y, **names: finite(jaxgpuops.topk(x, 3, axis=AXIS, offsets=OFFSETS, **names)),
        False,
    ),
    "top-k of many segments": (
        lambda ops, x, y, **names: finite(jaxgpuops.topk(x, 30, axis=AXIS, offsets=OFFSETS, sorted=False, **names)),
        False,
    ),
    "top-k of lengths": (
        lambda ops, x, y, **names: finite(jaxgpuops.topk(x, 20, axis=AXIS, lengths=LENGTHS, **names)),
        False,
    ),
    "sort of one row": (lambda ops, x, y, **names: jaxgpuops.sort(x[0, :, 0], axis=0, **names)[None, :, None], True),
    "bincount": (counted(lambda x, y, **names: jaxgpuops.bincount(digits(x), 7, y, **names)), False),
    "histogram": (counted(lambda x, y, **names: jaxgpuops.histogram(x, 6, **names)), False),
    "segment_sum": (segments("segment_sum"), False),
    "segment_max": (segments("segment_max"), False),
    "segment_logsumexp": (segments("segment_logsumexp"), False),
    "segment_softmax": (segments("segment_softmax"), True),
    "take": (
        lambda ops, x, y, **names: jax.vmap(functools.partial(jaxgpuops.take, ids=IDS, **names))(x + 1j * y).imag,
        False,
    ),
    "quantiles": (
        lambda ops, x, y, **names: jnp.moveaxis(jaxgpuops.quantile(x, [0.1, 0.5, 0.77], axis=AXIS, **names), 0, 1),
        False,
    ),
    "many quantiles": (  # more than the kernel of selections takes
        lambda ops, x, y, **names: jnp.moveaxis(jaxgpuops.quantile(x, np.linspace(0, 1, 9), axis=AXIS, **names), 0, 1),
        False,
    ),
    "weighted quantiles": (
        lambda ops, x, y, **names: jaxgpuops.quantile(
            x, [0.3, 0.9], axis=AXIS, method="inverted_cdf", weights=digits(y).clip(0), **names
        ).swapaxes(0, 1),
        False,
    ),
    "median": (lambda ops, x, y, **names: jaxgpuops.median(x, axis=AXIS, keepdims=True, **names), False),
    "kth_value": (lambda ops, x, y, **names: jaxgpuops.kth_value(x, -20, axis=AXIS, **names), False),
    "kth_value of complex numbers": (
        lambda ops, x, y, **names: jaxgpuops.kth_value(digits(x) + 1j * y, 40, axis=AXIS, **names)[0].imag,
        False,
    ),
    "searchsorted": (
        lambda ops, x, y, **names: jaxgpuops.searchsorted(
            jaxgpuops.sort(digits(x), axis=AXIS, **names),
            np.array([3, 0, 99]).reshape(1, 3, 1),
            "right",
            axis=AXIS,
            **names,
        ),
        False,
    ),
    "partition": (lambda ops, x, y, **names: jaxgpuops.partition(x, -20, axis=AXIS, **names), True),
    "shares": (lambda ops, x, y, **names: tuple(ops.topk_softmax(x, 3, axis=AXIS, normalize=False, **names)), False),
}


def arrays():
    x, y = np.random.default_rng(0).standard_normal((2, *SHAPE)).astype(np.float32)
    return x, y


def value_and_gradients(f, x, y):
    def loss(x, y):
        out = f(x, y)
        floats = [a for a in jax.tree.leaves(out) if a.dtype == np.float32]
        return sum((a**2).sum() for a in floats) + 0.0, out

    (_, out), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, y)
    return out, gradients


def split(f, mesh, names, keeps, check_vma):
    spec = P(None, names)
    f = functools.partial(f, axis_name=names)
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec if keeps else P(), check_vma=check_vma)


@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients(mesh, name):
    function, keeps = OPS[name]
    for ops, names, check_vma in ((jaxgpuops, ("b", "a"), True), (jaxgpuops.lax, "a", False)):
        f = functools.partial(function, ops)
        expected = jax.jit(functools.partial(value_and_gradients, f))(*arrays())
        actual = jax.jit(functools.partial(value_and_gradients, split(f, mesh, names, keeps, check_vma)))(*arrays())
        for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max(initial=0))
            assert b.dtype != np.int32 or (a == b).all()


@pytest.mark.parametrize(
    "name",
    [
        "top-k",
        "dot",
        "cumprod",
        "softmax",
        "cross-entropy",
        "mean cross-entropy",
        "sort",
        "histogram",
        "segment_max",
        "median",
    ],
)
def test_bytes_are_those_of_arrays_that_xla_splits(mesh, name):
    function, keeps = OPS[name]
    f = functools.partial(function, jaxgpuops)
    sharding = jax.NamedSharding(mesh, P(None, "a"))
    operands = [jax.device_put(a, sharding) for a in arrays()]
    result = sharding if keeps else jax.NamedSharding(mesh, P())
    by_name, by_xla = (
        moved(jax.jit(g, out_shardings=result).lower(*operands).compile().as_text())[0]
        for g in (split(f, mesh, "a", keeps, True), f)
    )
    # With a name, devices gather both elements beside the rank, and only then find their mean.
    assert 0 < by_name <= by_xla + (80 if name == "median" else 0)


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_rows_that_are_taken_keep_their_bits(mesh, dtype):
    table = np.arange(48).reshape(16, 3).astype(dtype) - np.array(9, dtype)
    if table.dtype.kind == "f":
        table[3], table[9] = -0.0, np.inf
    take = functools.partial(jaxgpuops.take, ids=np.array([9, 3, 16, -(2**31), 15, 2**31 - 1]))
    f = jax.jit(
        jax.shard_map(functools.partial(take, axis_name=("b", "a")), mesh=mesh, in_specs=P(("b", "a")), out_specs=P())
    )
    assert np.asarray(f(table)).tobytes() == np.asarray(take(table)).tobytes()
    rows = np.dtype(dtype).itemsize * 18
    assert moved(f.lower(table).compile().as_text()) == (rows, 1)


def test_gradients_inside_and_forward_mode(mesh):
    x, y = arrays()
    loss = lambda x, **names: (
        jaxgpuops.lax.cumprod(x, AXIS, **names) * jaxgpuops.lax.max(x, axis=AXIS, keepdims=True, **names)
    ).sum()

    def inside(x, y):
        own = lambda x: jax.lax.psum(loss(x, axis_name="a"), "a")
        return jax.grad(own)(x), jax.jvp(own, (x,), (y,))[1]

    spec = P(None, "a")
    f = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=(spec, P())))
    expected = jax.grad(loss)(x), jax.jvp(loss, (x,), (y,))[1]
    for a, b in zip(f(x, y), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_second_derivatives_and_vmap(mesh):
    x, y = arrays()
    f = lambda x, **names: jaxgpuops.linear_scan(0.5, x, axis=0, **names) * jaxgpuops.softmax(x, axis=0, **names)
    whole = jax.vmap(jax.vmap(f, 1, 1))
    part = jax.vmap(jax.vmap(functools.partial(f, axis_name=("a", "b")), 1, 1))
    spec = P(None, ("a", "b"))
    part = jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec)
    hessian_times = lambda f: jax.jit(lambda x, y: jax.jvp(jax.grad(lambda x: (f(x) ** 2).sum()), (x,), (y,))[1])
    np.testing.assert_allclose(hessian_times(part)(x, y), hessian_times(whole)(x, y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_second_derivatives_of_rows_that_are_taken(mesh, dtype, check_vma):
    """Rows cross as bits, which have no derivative of their own."""
    table, ids = np.arange(24.0).reshape(8, 3).astype(dtype), np.array([7, 1, 1, 9, 0, 2])
    take = functools.partial(jaxgpuops.take, ids=ids)
    part = functools.partial(take, axis_name="b")
    part = jax.shard_map(part, mesh=mesh, in_specs=P("b"), out_specs=P(), check_vma=check_vma)

    def second(take):
        loss = lambda table: (take(table) ** 3).sum()
        forward = lambda table: jax.jvp(jax.grad(loss), (table,), (table,))[1]
        return jax.jit(lambda table: (forward(table), jax.grad(lambda table: jax.grad(loss)(table).sum())(table)))

    for a, b in zip(second(part)(table), second(take)(table), strict=True):
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=0.02)
        assert np.any(b)


@pytest.mark.parametrize("name", ["segment_softmax", "segment_logsumexp"])
def test_data_that_devices_share_in_segments_of_their_own(mesh, name):
    x, ids = np.arange(4.0, dtype=np.float32), np.array([[0, 1, 2, 0], [1, 0, 2, 2]] * (mesh.shape["a"] // 2))
    loss = lambda x, ids: (getattr(jaxgpuops, name)(x, ids, 3) ** 2).sum()
    own = lambda x, ids: jax.lax.psum(loss(x, ids[0]), "a")
    parts = jax.shard_map(own, mesh=mesh, in_specs=(P(), P("a")), out_specs=P())
    expected = sum(jax.grad(loss)(x, each) for each in ids)
    np.testing.assert_allclose(jax.jit(jax.grad(parts))(x, ids), expected, rtol=1e-6)


@pytest.mark.parametrize("ops", [jaxgpuops, jaxgpuops.lax], ids=["public", "lax"])
def test_parts_of_one_position(mesh, ops):
    """The initial state has size 1 along the axis, too, but it is no part of the axis."""
    x, h0 = np.arange(6.0, dtype=np.float32).reshape(2, 3), np.arange(1.0, 4.0, dtype=np.float32)

    def states(x, a, h0, **names):
        return ops.linear_scan(a, x, h0, axis=0, **names)

    part = functools.partial(states, axis_name="b")
    part = jax.shard_map(part, mesh=mesh, in_specs=(P("b"), P("b"), P()), out_specs=P("b"), check_vma=False)
    for f in (lambda f: f, lambda f: jax.grad(lambda *args: (f(*args) ** 2).sum(), argnums=(0, 1, 2))):
        jax.tree.map(np.testing.assert_array_equal, jax.jit(f(part))(x, x, h0), jax.jit(f(states))(x, x, h0))


@pytest.mark.skipif(
    jax.__version_info__[:2] == (0, 11), reason="XLA crashes on an empty array beside a psum, also without us"
)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("ops", [jaxgpuops, jaxgpuops.lax], ids=["public", "lax"])
def test_last_state_of_no_positions(mesh, ops, reverse):
    """It is h0, and JAX must know that all devices have it."""
    x, h0 = np.zeros((3, 0), np.float32), np.arange(1.0, 4.0, dtype=np.float32)
    options = {"axis": 1, "reverse": reverse, "return_last": True, "axis_name": "b"}
    for initial in ((), (h0,)):
        part = lambda x, *h0: ops.linear_scan(x, x, *h0, **options)
        specs = {"in_specs": (P(None, "b"), *(P() for _ in initial)), "out_specs": (P(None, "b"), P())}
        states, last = jax.jit(jax.shard_map(part, mesh=mesh, **specs))(x, *initial)
        assert states.shape == x.shape
        np.testing.assert_array_equal(last, h0 if initial else np.zeros(3))


def test_nothing_is_selected(mesh):
    x = np.arange(16.0, dtype=np.float32).reshape(2, 8)

    def nothing(x):
        return [
            *jaxgpuops.topk(x, 0, axis_name="b"),
            *jaxgpuops.lax.top_k(x, 0, axis_name="b"),
            *jaxgpuops.topk_softmax(x, 0, axis_name="b"),
        ]

    found = jax.jit(jax.shard_map(nothing, mesh=mesh, in_specs=P(None, "b"), out_specs=P()))(x)
    assert [y.shape for y in found] == [(2, 0)] * 6


def test_other_dimensions_may_be_split_by_xla(mesh):
    x, y = arrays()
    f = functools.partial(jaxgpuops.topk, k=3, axis=AXIS)
    partly = jax.shard_map(
        functools.partial(f, axis_name="a"), mesh=mesh, in_specs=P(None, "a"), out_specs=P(), axis_names={"a"}
    )
    x = jax.device_put(x, jax.NamedSharding(mesh, P("b", "a")))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(partly)(x), f(x))


def test_errors(mesh):
    x, _ = arrays()
    with pytest.raises(ValueError, match=r"jaxgpuops.topk: axis_name must be a mesh axis .* got 'a'"):
        jaxgpuops.topk(x, 3, axis_name="a")
    with pytest.raises(TypeError, match=r"jaxgpuops.cumsum: axis_name must be a name of a mesh axis"):
        jaxgpuops.cumsum(x, axis_name=3)
    f = functools.partial(jaxgpuops.sum, axis=(0, 1), axis_name="a")
    with pytest.raises(ValueError, match=r"jaxgpuops.sum: axis_name works with one axis, got 2"):
        jax.shard_map(f, mesh=mesh, in_specs=P(None, "a"), out_specs=P())(x)
    f = functools.partial(jaxgpuops.topk_softmax, k=2, axis=AXIS, groups=5, topk_groups=3, axis_name="a")
    with pytest.raises(
        ValueError, match=r"whole groups or equal parts of one; \d devices have \d+ experts each, in .* 12"
    ):
        jax.shard_map(f, mesh=mesh, in_specs=P(None, "a"), out_specs=P())(x[:, :60])
    f = functools.partial(jaxgpuops.topk, k=65, axis=AXIS, axis_name="a")
    with pytest.raises(ValueError, match=r"k must be between 0 and 64"):
        jax.shard_map(f, mesh=mesh, in_specs=P(None, "a"), out_specs=P())(x)


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_route_of_split_tokens(mesh, check_vma):
    """Weights and ids are those of each device's tokens, losses those of all; the plan is that of `moe_plan`."""
    logits = np.random.default_rng(5).standard_normal((64, 8)).astype(np.float32)
    names = ("b", "a")

    def route(logits, **names):
        weights, ids, plan, losses = jaxgpuops.moe_route(logits, 2, losses=True, **names)
        again = jaxgpuops.moe_losses(logits, ids, **names)
        return weights, ids, plan, losses, again

    def parts(logits):
        weights, ids, plan, losses, again = route(logits, axis_name=names)
        expected = jaxgpuops.moe_plan(ids, 8, axis_name=names)
        same = [(a == b).all() for a, b in zip(*map(jax.tree.leaves, (plan, expected)), strict=True)]
        return weights, ids, jnp.stack(same)[None], losses, again

    specs = P(names), P(names), P(names), P(), P()
    split = jax.shard_map(parts, mesh=mesh, in_specs=P(names), out_specs=specs, check_vma=check_vma)
    weights, ids, same, losses, again = jax.jit(split)(logits)
    whole = route(logits)
    np.testing.assert_array_equal(ids, whole[1])
    np.testing.assert_array_equal(weights, whole[0])
    assert same.all()
    total = lambda f: lambda x: (f(x)[0] ** 2).sum() + sum((a**2).sum() for i in (3, 4) for a in f(x)[i])
    np.testing.assert_allclose(jax.jit(jax.grad(total(split)))(logits), jax.grad(total(route))(logits), atol=1e-6)
    for found in (losses, again):
        np.testing.assert_allclose(found, whole[3], rtol=1e-6)


# The functions without axis_name, and why they have none; docs/sharding.md says the same.
WITHOUT_AXIS_NAME = {
    "moe_dispatch": "tokens and rows are those of one device; the plan's exchange says how they reach others",
    "moe_combine": "the same, on the way back",
    "unique": "which device has an element of the result depends on values, and the result is flat",
    "nonzero": "the same",
    "compact": "which device has an element of the result depends on values",
    "where": "elementwise: a device's part of the result needs its parts only",
    "expand": "the same",
}


def test_every_function_has_an_axis_name_or_a_reason():
    no_ops = {"lax", "install", "uninstall", "explain", "export_checks"}
    functions = {
        (module.__name__, name): getattr(module, name)
        for module in (jaxgpuops, jaxgpuops.lax)
        for name in {*dir(module)} - no_ops
        if inspect.isfunction(getattr(module, name))
    }
    without = {name for (_, name), f in functions.items() if "axis_name" not in inspect.signature(f).parameters}
    assert without == WITHOUT_AXIS_NAME.keys()
