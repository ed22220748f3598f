"""Plan, dispatch and combine of a mixture of experts: results are exact if numbers are moved or whole, and compared
with float64 otherwise."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgpuops
from jaxgpuops.lax import _moe

DTYPES = ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"]


def plan_reference(ids, num_experts, capacity=None, align=1):
    """The expected plan: the assignments of each expert, in order, and padding, one group after the other."""
    flat = ids.ravel()
    groups = [np.flatnonzero(flat == e)[:capacity] for e in range(num_experts)]
    padded = [np.pad(group, (0, -len(group) % align), constant_values=-1) for group in groups]
    rows = np.concatenate([np.zeros(0, int), *padded])
    inverse = np.full(ids.size, -1)
    inverse[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
    sizes, offsets = np.array([len(group) for group in groups]), np.cumsum([0, *map(len, padded)])
    return rows, inverse.reshape(ids.shape), sizes, offsets


def check_plan(ids, num_experts, **options):
    plan = jaxgpuops.moe_plan(ids, num_experts, **options)
    rows, inverse, sizes, offsets = plan_reference(ids, num_experts, **options)
    padded = np.full(plan.assignment_of_row.shape[-1], -1)
    padded[: len(rows)] = rows  # no routing has more rows than there is room for
    np.testing.assert_array_equal(plan.assignment_of_row, padded)
    np.testing.assert_array_equal(plan.row_of_assignment, inverse)
    np.testing.assert_array_equal(plan.group_sizes, sizes)
    np.testing.assert_array_equal(plan.group_offsets, offsets)
    np.testing.assert_array_equal(plan.token_of_row, np.where(padded < 0, -1, padded // max(ids.shape[-1], 1)))


def ids_of(kind, tokens, k, experts, rng):
    return {
        "uniform": lambda: rng.integers(0, experts, (tokens, k)),
        "out of range": lambda: rng.integers(-2, experts + 2, (tokens, k)),
        "one": lambda: np.full((tokens, k), experts - 1),
        "skewed": lambda: np.minimum(rng.geometric(0.5, (tokens, k)) - 1, experts - 1),
        "most have none": lambda: rng.integers(0, experts, (tokens, k)) // 5 * 5,
        "k times the same": lambda: np.repeat(rng.integers(0, experts, (tokens, 1)), k, 1),
        "all of them": lambda: (np.arange(tokens)[:, None] + np.arange(k)) % experts,  # neighbouring experts
    }[kind]().astype(np.int32)


KINDS = ["uniform", "out of range", "one", "skewed", "most have none", "k times the same", "all of them"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "tokens, k, experts",
    [
        (1, 1, 1),
        (7, 2, 8),
        (4, 7, 40),
        (64, 8, 128),
        (33, 3, 5),
        (0, 2, 4),
        (5, 0, 4),
        (40, 8, 8),  # k = num_experts
        (3000, 8, 300),
        (9, 2, 5000),
    ],
)
def test_plan(tokens, k, experts, kind):
    ids = ids_of(kind, tokens, k, experts, np.random.default_rng(tokens))
    check_plan(ids, experts)
    check_plan(ids, experts, align=16)
    check_plan(ids, experts, capacity=3)
    check_plan(ids, experts, capacity=5, align=4)
    check_plan(ids, experts, capacity=0)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_ids_of_any_integer_dtype(dtype):
    with jax.enable_x64(True):
        ids = np.array([[1, 100], [0, 1], [np.iinfo(dtype).max, np.iinfo(dtype).min]], dtype)
        plan = jaxgpuops.moe_plan(ids, 2)
    assert plan.row_of_assignment.tolist() == plan_reference(ids.astype(object), 2)[1].tolist()


def test_many_experts_take_plain_jax():
    check_plan(np.random.default_rng(0).integers(0, 9000, (50, 2)).astype(np.int32), 9000)


def numbers(shape, dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [(), (1,), (5,), (16,), (3, 24), (1000,)])
def test_dispatch_and_combine(features, dtype):
    """Whole numbers: sums are exact, and rounded once."""
    with jax.enable_x64(True):
        ids = ids_of("out of range", 21, 2, 6, np.random.default_rng(1))
        plan = jaxgpuops.moe_plan(ids, 6, align=4)
        x = numbers((21, *features), dtype)
        rows = np.asarray(plan.token_of_row)
        there = (rows >= 0).reshape(-1, *(1 for _ in features))
        wide = np.asarray(x.astype(np.float64))
        dispatched = np.where(there, wide[np.maximum(rows, 0)], 0)
        out = jaxgpuops.moe_dispatch(x, plan)
        assert out.dtype == x.dtype
        np.testing.assert_array_equal(out.astype(np.float64), dispatched)

        weights = numbers((21, 2), "float32", 2)
        inverse = np.asarray(plan.row_of_assignment)
        for w in (None, weights, weights.astype(dtype if x.dtype.itemsize > 1 else "float16")):
            picked = np.where((inverse >= 0)[(..., *(None for _ in features))], dispatched[np.maximum(inverse, 0)], 0)
            scale = 1 if w is None else np.asarray(w, np.float64)[(..., *(None for _ in features))]
            combined = jaxgpuops.moe_combine(out, plan, w)
            assert combined.dtype == x.dtype
            expected = jnp.asarray((scale * picked).sum(1)).astype(dtype)
            np.testing.assert_array_equal(combined.astype(np.float64), expected.astype(np.float64))


def test_gradients():
    ids = ids_of("out of range", 12, 3, 5, np.random.default_rng(3))
    plan = jaxgpuops.moe_plan(ids, 5, align=2)
    there = plan.row_of_assignment >= 0
    x, w = numbers((12, 7), "float32", 4), numbers((12, 3), "float32", 5)
    ct = numbers((12, 7), "float32", 6)

    def ours(x, w):
        y = jaxgpuops.moe_dispatch(x, plan)
        return (jaxgpuops.moe_combine(y * y, plan, w) * ct).sum()

    def plain(x, w):
        return ((w * there)[..., None] * (x * x)[:, None] * ct[:, None]).sum()

    for order in (
        jax.grad,
        lambda f, argnums: jax.grad(lambda *args: sum(g.sum() for g in jax.grad(f, argnums)(*args)), argnums),
    ):
        for a, b in zip(order(ours, argnums=(0, 1))(x, w), order(plain, argnums=(0, 1))(x, w), strict=True):
            np.testing.assert_array_equal(a, b)


INNER = [(), (1,), (5,), (16,), (3, 24), (0,), (1000,)]


@pytest.mark.parametrize(
    "dtype, weights, inner",
    # The sizes differ in how rows are read, which depends on the width of the dtype: some with a tail, some without.
    [
        (dtype, weights, inner)
        for dtype in DTYPES
        for weights in ("float32", *([dtype] if dtype in ("float16", "bfloat16") else []))
        for inner in (INNER if dtype in ("float32", "bfloat16") else [(5,), (3, 24)])
    ],
)
@pytest.mark.parametrize("tokens, k, align", [(21, 3, 4), (0, 2, 4), (7, 1, 1), (5, 9, 1)])
def test_gradients_of_combine(tokens, k, align, inner, dtype, weights):
    """Both gradients come from one read. Numbers are whole; weights of dropped assignments have no gradient."""
    with jax.enable_x64(True):
        plan = jaxgpuops.moe_plan(ids_of("out of range", tokens, k, 6, np.random.default_rng(28)), 6, align=align)
        row, assignment = np.asarray(plan.row_of_assignment), np.asarray(plan.assignment_of_row)
        y, w = numbers((len(assignment), *inner), dtype, 29), numbers((tokens, k), weights, 30)
        ct = numbers((tokens, *inner), dtype, 31)
        _, pull = jax.vjp(lambda y, w: jaxgpuops.moe_combine(y, plan, w), y, w)
        dy, dw = pull(ct)
        assert dy.dtype == y.dtype and dw.dtype == w.dtype
        lines = lambda x: np.asarray(x.astype(np.float64)).reshape(len(x), int(np.prod(inner)))
        expected = np.zeros((len(assignment), int(np.prod(inner))))
        for r, a in enumerate(assignment):
            if a >= 0:
                expected[r] = np.float64(w).reshape(-1)[a] * lines(ct)[a // k]
        np.testing.assert_array_equal(lines(dy), lines(jnp.asarray(expected).astype(dtype)))
        products = (
            (lines(y)[np.maximum(row, 0)] * lines(ct)[:, None]).sum(-1) if len(assignment) else np.zeros(row.shape)
        )
        expected = jnp.asarray(np.where(row >= 0, products, 0)).astype(w.dtype)
        np.testing.assert_array_equal(dw.astype(np.float64), expected.astype(np.float64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_a_batch_shares(dtype):
    """vmap with indices, or weights, that the batch does not have."""
    ids = ids_of("uniform", 6, 2, 3, np.random.default_rng(7))
    plan, w = jaxgpuops.moe_plan(ids, 3), numbers((6, 2), dtype, 8)
    ys = numbers((4, 12, 5), dtype, 9)
    loss = lambda w: jax.vmap(lambda y: jaxgpuops.moe_combine(y, plan, w))(ys).sum()
    np.testing.assert_array_equal(
        jax.grad(loss)(w), sum(jax.grad(lambda w: jaxgpuops.moe_combine(y, plan, w).sum())(w) for y in ys)
    )


def test_batches():
    rng = np.random.default_rng(10)
    ids = np.stack([ids_of(kind, 10, 2, 4, rng) for kind in KINDS])
    x, w = numbers((len(KINDS), 10, 6), "float32", 11), numbers((len(KINDS), 10, 2), "float32", 12)

    def layer(ids, x, w):
        plan = jaxgpuops.moe_plan(ids, 4)
        return plan, jaxgpuops.moe_combine(jaxgpuops.moe_dispatch(x, plan), plan, w)

    whole, mapped = layer(ids, x, w), jax.vmap(layer)(ids, x, w)
    alone = [layer(*args) for args in zip(ids, x, w, strict=True)]
    for a, b, *c in zip(*map(jax.tree.leaves, (whole, mapped, *alone)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, np.stack(c))


def test_empty_batches():
    plan = jaxgpuops.moe_plan(np.zeros((0, 3, 2), np.int32), 4)
    y = jaxgpuops.moe_dispatch(jnp.zeros((0, 3, 5)), plan)
    assert plan.assignment_of_row.shape == (0, 6) and y.shape == (0, 6, 5)
    assert jaxgpuops.moe_combine(y, plan, jnp.zeros((0, 3, 2))).shape == (0, 3, 5)


@pytest.mark.parametrize("align", [1, 8])
def test_no_choices(align):
    """Without assignments, all rows are padding, and tokens get zeros."""
    plan = jaxgpuops.moe_plan(np.zeros((5, 0), np.int32), 4, align=align)
    x, w = jnp.ones((5, 3), jnp.bfloat16), jnp.ones((5, 0))
    for weights in (None, w):
        out, pull = jax.vjp(lambda x, w=weights: jaxgpuops.moe_combine(jaxgpuops.moe_dispatch(x, plan), plan, w), x)
        assert out.shape == x.shape and out.dtype == x.dtype and not out.any() and not pull(out)[0].any()


@pytest.mark.parametrize("align", [1, 8])
def test_a_layer_is_that_of_every_expert_for_every_token(align):
    """Compares with `jax.lax.ragged_dot`, forward and backward. Elements are whole numbers, so that every order of
    addition gives the same sums."""
    tokens, k, experts, width, hidden = 10, 2, 4, 6, 3
    logits = jnp.asarray(np.random.default_rng(13).normal(size=(tokens, experts)), jnp.float32)
    x, w_in = numbers((tokens, width), "float32", 14), numbers((experts, width, hidden), "float32", 15)
    w_out = numbers((experts, hidden, width), "float32", 16)

    def sparse(x, w_in, w_out):
        weights, _, plan = jaxgpuops.moe_route(logits, k, align=align)
        sizes = jnp.diff(plan.group_offsets)
        rows = jax.lax.ragged_dot(jaxgpuops.moe_dispatch(x, plan), w_in, sizes)
        return jaxgpuops.moe_combine(jax.lax.ragged_dot(jax.nn.relu(rows), w_out, sizes), plan, jnp.ones_like(weights))

    def dense(x, w_in, w_out):
        _, ids = jax.lax.top_k(logits, k)
        gate = jax.nn.one_hot(ids, experts).sum(1)
        every = jnp.einsum("teh,ehd->ted", jax.nn.relu(jnp.einsum("td,edh->teh", x, w_in)), w_out)
        return jnp.einsum("te,ted->td", gate, every)

    np.testing.assert_array_equal(sparse(x, w_in, w_out), dense(x, w_in, w_out))
    of = lambda layer: jax.grad(lambda *args: layer(*args).sum(), argnums=(0, 1, 2))(x, w_in, w_out)
    jax.tree.map(np.testing.assert_array_equal, of(sparse), of(dense))


def test_capacity_bounds_the_rows_of_symbolic_tokens():
    (tokens,) = jax.export.symbolic_shape("tokens")
    fn = jax.jit(lambda ids: jaxgpuops.moe_plan(ids, 4, capacity=2, align=4))
    export = jax.export.export(fn, disabled_checks=jaxgpuops.export_checks())
    exported = export(jax.ShapeDtypeStruct((tokens, 2), np.int32))
    for count in (1, 2, 50):
        ids = np.random.default_rng(count).integers(-1, 5, (count, 2)).astype(np.int32)
        jax.tree.map(np.testing.assert_array_equal, exported.call(ids), fn(ids))


@pytest.mark.parametrize("fn", [jaxgpuops.moe_dispatch, jaxgpuops.moe_combine])
def test_choices_must_be_known(fn):
    (k,) = jax.export.symbolic_shape("k")
    call = lambda ids: fn(jnp.ones((3, 2)), jaxgpuops.moe_plan(ids, 4))
    with pytest.raises(ValueError, match="how many experts a token has must be known, got k"):
        jax.eval_shape(call, jax.ShapeDtypeStruct((3, k), np.int32))


def idiom_of_maxtext(ids, x, w, experts, capacity, expert):
    """Plans by an argsort, takes and a bincount, and another argsort for the way back."""
    order = jnp.argsort(ids.ravel())
    rows = jnp.take(x, order // ids.shape[1], axis=0)
    y = expert(rows, jnp.sort(ids.ravel()))
    back = jnp.take(y, jnp.argsort(order), axis=0).reshape(*ids.shape, -1)
    return jnp.bincount(ids.ravel(), length=experts), jnp.einsum("tkd,tk->td", back, w)


def idiom_of_tunix(ids, x, w, experts, capacity, expert):
    """Plans by an argsort of an argsort, and combines by a sum without weights."""
    y = expert(x[jnp.argsort(ids.ravel()) // ids.shape[1]], jnp.sort(ids.ravel()))
    back = y[jnp.argsort(jnp.argsort(ids.ravel()))]
    return jnp.bincount(ids.ravel(), length=experts), back.reshape(*ids.shape, -1).sum(1)


def idiom_of_flax(ids, x, w, experts, capacity, expert):
    """Plans by a cumulative sum of one-hot vectors, and moves rows by a mask over tokens, experts and capacity."""
    one_hot = jax.nn.one_hot(ids.ravel(), experts, dtype=jnp.int32)
    position = (jnp.cumsum(one_hot, axis=0) * one_hot).sum(-1) - 1
    mask = jax.nn.one_hot(ids.ravel(), experts)[..., None] * jax.nn.one_hot(position, capacity)[:, None]
    mask = mask.reshape(*ids.shape, experts, capacity)
    rows = jnp.einsum("td,tkec->ecd", x, mask)
    y = expert(rows.reshape(experts * capacity, -1), jnp.repeat(jnp.arange(experts), capacity))
    out = jnp.einsum("ecd,tkec,tk->td", y.reshape(experts, capacity, -1), mask, w)
    return jnp.minimum(one_hot.sum(0), capacity), out


@pytest.mark.parametrize("kind", ["uniform", "one", "skewed"])
@pytest.mark.parametrize(
    "idiom, weighted, capacity",
    [(idiom_of_maxtext, True, None), (idiom_of_tunix, False, None), (idiom_of_flax, True, 9)],
)
def test_idioms_of_others(idiom, weighted, capacity, kind):
    """Compares the programs of docs/moe.md with ours, forward and backward. Numbers are whole, so any order of
    additions is right."""
    tokens, k, experts = 40, 2, 6
    ids = jnp.asarray(ids_of(kind, tokens, k, experts, np.random.default_rng(17)))
    x, w, ct = (numbers((tokens, n), "float32", seed) for n, seed in ((5, 18), (k, 19), (5, 20)))
    expert = lambda rows, of: rows * rows * (of[:, None] + 1)  # an expert whose answers are as long as its rows

    def ours(x, w):
        plan = jaxgpuops.moe_plan(ids, experts, capacity=capacity)
        of = jnp.repeat(jnp.arange(experts), plan.group_sizes, total_repeat_length=plan.assignment_of_row.size)
        y = expert(jaxgpuops.moe_dispatch(x, plan), of)
        return plan.group_sizes, jaxgpuops.moe_combine(y, plan, w if weighted else None)

    theirs = lambda x, w: idiom(ids, x, w, experts, capacity, expert)
    jax.tree.map(np.testing.assert_array_equal, ours(x, w), theirs(x, w))
    gradients = [jax.grad(lambda x, w, f=f: (f(x, w)[1] * ct).sum(), argnums=(0, 1))(x, w) for f in (ours, theirs)]
    jax.tree.map(np.testing.assert_array_equal, *gradients)


def test_forward_mode_of_the_primitives():
    from jaxgpuops.lax._moe import moe_combine_p

    ids = ids_of("uniform", 4, 2, 3, np.random.default_rng(20))
    plan, w = jaxgpuops.moe_plan(ids, 3), numbers((8, 1), "float32", 21)
    y, dy, dw = numbers((8, 3), "float32", 22), numbers((8, 3), "float32", 23), numbers((8, 1), "float32", 24)
    first, second = plan.row_of_assignment.reshape(8, 1), plan.assignment_of_row.reshape(8, 1)
    call = lambda y, w: moe_combine_p(y, first, second, w, axis=0, choices=2)[0]
    out, tangent = jax.jvp(call, (y, w), (dy, dw))
    np.testing.assert_array_equal(tangent, call(dy, w) + call(y, dw))
    transposed = jax.linear_transpose(functools.partial(call, y), w)(jnp.ones_like(out))[0]
    np.testing.assert_array_equal(transposed, jax.grad(lambda w: call(y, w).sum())(w))


def test_the_plan_of_the_cuda_kernel():
    plan_moe = functools.partial(jaxgpuops._native.modules["cpu"].plan_moe, capacity=-1, align=1)
    shared = {75: 64, 80: 163, 86: 99, 90: 227, 100: 227, 120: 99}
    for assignments in (0, 1, 33, 65, 256, 257, 512, 513, 1024, 1025, 2048, 4096, 16384, 32768, 32769, 1 << 20):
        for experts in (1, 32, 33, 128, 129, 512, 1024, 4096):
            most = -1 if experts <= 32 else 64 if experts <= 128 else 256  # assignments that every warp looks at
            for capability in shared:
                problem = {"assignments": assignments, "experts": experts, "compute_capability": capability}
                best, aligned = plan_moe(1, **problem), plan_moe(1, **problem, align=8)
                capped = plan_moe(1, **problem, capacity=3)
                poor = plan_moe(1, **problem, workspace_bytes=0)
                some = plan_moe(1, **problem, workspace_bytes=best["workspace_bytes"] // 2)
                many, few = plan_moe(132, **problem, align=8), plan_moe(20, **problem, align=8)
                small = capability >= 90 and experts <= 128 and (512 if experts > 32 else 1024) < assignments <= 2048
                if small:  # so few experts are counted in registers
                    small_plan = {"algorithm": "cluster", "blocks": 4 if assignments <= 1024 else 8, "threads": 128}
                    assert small_plan.items() <= best.items() and small_plan.items() <= aligned.items()
                elif assignments <= 1024:
                    assert best["algorithm"] == ("warp" if assignments <= most else "block")
                    assert capped["algorithm"] == ("warp" if assignments <= min(most, 32) else "block")
                    assert aligned["algorithm"] == "block"
                elif capability >= 90 and assignments <= (1 << 14 if capability == 120 else 1 << 15) and experts <= 512:
                    assert best["algorithm"] == "cluster"
                elif assignments > (1536 if capability < 90 else 1 << 15):
                    assert best["algorithm"] == "grid"
                assert many["algorithm"] == "block" and (poor["algorithm"] != "grid")
                assert 1 <= some["blocks"] <= best["blocks"] <= 132 and 20 * few["blocks"] <= 132
                for plan in (best, poor, some, many, few, aligned, capped):
                    assert 32 <= plan["threads"] <= 1024
                    grid = plan["algorithm"] == "grid"
                    assert plan["workspace_bytes"] == (4 * experts * (plan["blocks"] + 1) if grid else 0)
                    assert plan["shared_bytes"] <= shared[capability] << 10
                    if plan["algorithm"] == "cluster":
                        assert plan["blocks"] in (2, 4, 8, 16) and plan["blocks"] <= (8 if capability == 120 else 16)


def test_the_blocks_of_a_grid():
    """With 33 to 1024 experts, there are eight clusters of eight blocks, or twelve. With more experts or many
    assignments, if blocks have many totals together, they wait twice."""
    for assignments, experts, blocks, capability, told in [
        (262_144, 512, 96, 90, 8), (262_145, 512, 132, 90, 0), (185_048, 512, 96, 90, 8), (185_048, 512, 121, 80, 0),
        (40_000, 512, 64, 90, 8), (60_000, 16, 59, 90, 0), (98_304, 64, 64, 90, 8), (42_672, 64, 64, 90, 8), (994_904, 16, 132, 90, 0),
        (1_600_000, 64, 132, 90, 0), (573_680, 2048, 132, 90, 0),
    ]:  # fmt: skip
        plan_moe = functools.partial(jaxgpuops._native.modules["cpu"].plan_moe, experts=experts, capacity=-1, align=1)
        found = plan_moe(1, assignments, compute_capability=capability)
        assert (found["algorithm"], found["blocks"]) == ("grid", blocks)
        # Where a block has many assignments to many experts, it puts them into order.
        rows = (2 + told + found["threads"] // 32) * experts
        assert (found["shared_bytes"] > 4 * rows) == (experts > 32 and assignments > 64 << 10)
    # So does a block of a cluster, of fewer if experts are many, and has more warps then.
    for experts, most in ((64, 1 << 14), (128, 9216)):
        plan_moe = functools.partial(jaxgpuops._native.modules["cpu"].plan_moe, experts=experts, capacity=-1, align=1)
        found = [plan_moe(1, most + more, compute_capability=90) for more in (0, 1)]
        assert [plan["algorithm"] for plan in found] == ["cluster", "cluster"]
        assert [plan["threads"] for plan in found] == [256, 512]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_losses(score):
    """Against float64, with a choice that is skewed, has experts without tokens, and ids out of range."""
    rng = np.random.default_rng(25)
    logits = rng.normal(size=(3, 50, 6)).astype(np.float32)
    ids = rng.integers(-1, 4, (3, 50, 2)).astype(np.int32)
    with jax.enable_x64(True):

        def plain(logits):
            scores = {
                "softmax": jax.nn.softmax,
                "sigmoid": jax.nn.sigmoid,
                "sqrt_softplus": lambda z: jnp.sqrt(jax.nn.softplus(z)),
            }[score](logits)
            shares = (scores / scores.sum(-1, keepdims=True)).mean(1)
            counts = np.stack([np.bincount(row[row >= 0], minlength=6) for row in ids])
            balance = (6 * counts / counts.sum(-1, keepdims=True) * shares).sum(-1)
            return balance, (jnp.log(jnp.exp(logits).sum(-1)) ** 2).mean(-1)

        ours = lambda logits: tuple(jaxgpuops.moe_losses(logits, ids, score=score))
        exact = np.float64(logits)
        total = lambda fn: lambda logits: sum((i + 1) * loss.sum() for i, loss in enumerate(fn(logits)))
        for a, b in zip(ours(logits), plain(exact), strict=True):
            assert a.dtype == np.float32
            np.testing.assert_allclose(a, b, rtol=1e-5)
        gradients = jax.grad(total(ours))(logits), jax.grad(total(plain))(exact)
        np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-6)


def test_losses_count_ids_of_any_integer_dtype():
    logits = np.random.default_rng(0).normal(size=(3, 300)).astype(np.float32)
    ids = np.array([[0, 1], [44, 2], [-1, 100]])
    wanted = jaxgpuops.moe_losses(logits, ids).load_balance
    for dtype in (np.int8, np.int16, np.int64):
        assert jaxgpuops.moe_losses(logits, ids.astype(dtype)).load_balance == wanted
    of_bytes = ids.astype(np.uint8)  # 255 is an expert
    wanted = jaxgpuops.moe_losses(logits, of_bytes.astype(np.int32)).load_balance
    assert jaxgpuops.moe_losses(logits, of_bytes).load_balance == wanted


def test_losses_at_the_ends():
    even, one = (jnp.array(ids, jnp.int32) for ids in ([[0, 1], [2, 3]], [[1, 1], [1, 1]]))
    assert jaxgpuops.moe_losses(jnp.zeros((2, 4)), even).load_balance == 1
    assert jaxgpuops.moe_losses(jnp.zeros((2, 4)).at[:, 1].set(200), one).load_balance == 4
    losses = jaxgpuops.moe_losses(jnp.zeros((3, 0, 4)), jnp.zeros((3, 0, 2), int))
    assert all(loss.shape == (3,) and not loss.any() for loss in losses)
    assert (
        jaxgpuops.moe_losses(jnp.full((2, 4), -300.0), even, score="sigmoid").load_balance == 1
    )  # and not NaN from 0 / 0


def test_a_route_is_a_gate_and_its_plan():
    logits = jnp.asarray(np.random.default_rng(26).normal(size=(30, 16)), jnp.float32)
    flags = {"groups": 4, "topk_groups": 2, "scale": 2.5, "bias": jnp.linspace(0, 0.1, 16), "score": "sigmoid"}
    weights, ids, plan = jaxgpuops.moe_route(logits, 3, capacity=7, align=2, **flags)
    gate = jaxgpuops.topk_softmax(logits, 3, **flags)
    np.testing.assert_array_equal(weights, gate.weights)
    np.testing.assert_array_equal(ids, gate.indices)
    jax.tree.map(np.testing.assert_array_equal, plan, jaxgpuops.moe_plan(ids, 16, capacity=7, align=2))
    assert (np.unique(np.asarray(ids) // 4 + 10 * np.arange(30)[:, None]).size) <= 60  # two groups a token


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("dtype, capacity", [("float32", None), ("float32", 7), ("bfloat16", 7), ("float64", None)])
def test_losses_of_a_route(dtype, score, capacity):
    """Values and gradients are those of the functions one by one, of batches, too."""
    with jax.enable_x64(dtype == "float64"):
        logits = jnp.asarray(np.random.default_rng(28).normal(size=(2, 30, 16)), dtype)
        ct = jnp.asarray(np.random.default_rng(29).normal(size=(2, 30, 3)), dtype)
        flags = {"groups": 4, "topk_groups": 2, "scale": 2.5, "score": score}

        def of_route(logits):
            weights, ids, plan, losses = jaxgpuops.moe_route(logits, 3, capacity=capacity, losses=True, **flags)
            return (weights * ct).sum() + losses.load_balance @ jnp.arange(1.0, 3) + losses.z.sum(), (ids, plan, losses)

        def of_parts(logits):
            weights, ids = jaxgpuops.topk_softmax(logits, 3, **flags)
            losses = jaxgpuops.moe_losses(logits, ids, score=score)
            plan = jaxgpuops.moe_plan(ids, 16, capacity=capacity)
            return (weights * ct).sum() + losses.load_balance @ jnp.arange(1.0, 3) + losses.z.sum(), (ids, plan, losses)

        (total, (ids, plan, losses)), gradient = jax.jit(jax.value_and_grad(of_route, has_aux=True))(logits)
        (expected, (*exact, parts)), wanted = jax.jit(jax.value_and_grad(of_parts, has_aux=True))(logits)
        jax.tree.map(np.testing.assert_array_equal, (ids, plan), tuple(exact))
        rtol = 1e-12 if dtype == "float64" else 3e-6
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol), losses, parts)
        np.testing.assert_allclose(np.float64(total), np.float64(expected), rtol=1e-5 if dtype != "bfloat16" else 2**-6)
        assert gradient.dtype == logits.dtype
        atol = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 2**-7}[dtype] * float(abs(wanted).max())
        np.testing.assert_allclose(np.float64(gradient), np.float64(wanted), rtol=0, atol=atol)


def is_free(line):
    """Whether an operation does no work on the device. Broadcasts to new dimensions of size 1, and sums over these, do
    none."""
    sizes = [np.prod([int(n) for n in re.findall(r"(\d+)x", shape)]) for shape in re.findall(r"tensor<([^>]*)>", line)]
    name = line.removeprefix("stablehlo.").partition("(")[0].split()[0]
    return name in ("constant", "reshape") or (name in ("broadcast_in_dim", "reduce") and sizes[0] == sizes[-1])


def operations_on_cuda(function, *shapes):
    """The names of kernels and XLA operations of an exported program that do work on a GPU."""
    exported = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=jaxgpuops.export_checks())(
        *shapes
    )
    lines = [line.partition(" = ")[2] for line in exported.mlir_module().splitlines() if " = stablehlo" in line]
    found = [line for line in lines if not is_free(line)]
    return [line.partition("@jaxgpuops.")[2].partition("(")[0] or line for line in found]


def test_a_route_is_two_kernels(cuda):
    """On a GPU, a gate with all its options and its plan are two kernels, and XLA adds no third."""
    bias = np.linspace(0, 0.1, 64, dtype=np.float32)
    flags = {"groups": 8, "topk_groups": 4, "scale": 2.5, "bias": bias, "score": "sqrt_softplus"}
    route = lambda logits: jaxgpuops.moe_route(logits, 4, **flags)
    found = operations_on_cuda(route, jax.ShapeDtypeStruct((100, 64), jnp.float32))
    assert found == ["topk_softmax", "moe_plan"]


def test_a_layer_is_a_kernel_for_each_step_and_its_gradient_two(cuda):
    """Programs have no sort, scatter or transpose, and the backward pass has no second plan."""

    def layer(x, weights, ids):
        plan = jaxgpuops.moe_plan(ids, 16)
        return jaxgpuops.moe_combine(jaxgpuops.moe_dispatch(x, plan), plan, weights)

    of_tokens = jax.ShapeDtypeStruct((100, 64), jnp.bfloat16)
    of_ids = jax.ShapeDtypeStruct((100, 4), jnp.int32)
    forward = ["moe_plan", "moe_dispatch", "moe_combine"]

    def step(x, weights, ids, ct):
        out, pull = jax.vjp(lambda x, weights: layer(x, weights, ids), x, weights)
        return out, pull(ct)

    for dtype in (jnp.float32, jnp.bfloat16):  # weights of either dtype are read as they are
        args = of_tokens, jax.ShapeDtypeStruct((100, 4), dtype), of_ids
        assert operations_on_cuda(layer, *args) == forward
        assert operations_on_cuda(step, *args, of_tokens) == [*forward, "moe_combine_vjp", "moe_combine"]


def test_a_single_assignment_takes_no_kernel(cuda_build):
    """XLA computes its plan, dispatch and combination together."""

    def layer(x, weights, ids):
        plan = jaxgpuops.moe_plan(ids, 16)
        return jaxgpuops.moe_combine(jaxgpuops.moe_dispatch(x, plan), plan, weights)

    for tokens, k in ((1, 1), (1, 2), (2, 1)):
        args = [
            jax.ShapeDtypeStruct((tokens, n), dtype) for n, dtype in ((64, "float32"), (k, "float32"), (k, "int32"))
        ]
        found = [name for name in operations_on_cuda(layer, *args) if name.startswith("moe_")]
        assert found == ([] if tokens * k == 1 else ["moe_plan", "moe_dispatch", "moe_combine"])


@pytest.mark.parametrize("capacity", [-1, 0, 1])
@pytest.mark.parametrize("align", [1, 4])
def test_the_plan_of_a_single_assignment(capacity, align):
    for expert, batch in itertools.product((-1, 0, 3, 6, 7), ((), (2, 3))):
        experts = np.full((*batch, 1), expert, np.int32)
        room = _moe.rows_of(1, 7, capacity, align)
        params = {"axis": len(batch), "num_experts": 7, "capacity": capacity, "align": align, "room": room}
        for own, wanted in zip(
            _moe._plan_of_one(experts, **params), _moe.plan_fallback(experts, **params), strict=True
        ):
            np.testing.assert_array_equal(own, wanted)
            assert own.dtype == wanted.dtype


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda p: jaxgpuops.moe_plan(np.zeros((3, 2)), 4), TypeError, "moe_plan: expert_ids has dtype float"),
        (lambda p: jaxgpuops.moe_plan(np.zeros(3, int), 4), ValueError, r"moe_plan: expert_ids must have shape"),
        (lambda p: jaxgpuops.moe_plan(np.zeros((3, 2), int), 0), ValueError, "num_experts must be between 1 and 2147483647, got 0"),
        (lambda p: jaxgpuops.moe_plan(np.zeros((3, 2), int), 4, align=0), ValueError, "align must be between 1 and"),
        (lambda p: jaxgpuops.moe_plan(np.zeros((3, 2), int), 4, capacity=-1), ValueError, "capacity must be between 0 and"),
        (lambda p: jaxgpuops.moe_plan(np.zeros((3, 2), int), 4.0), TypeError, "num_experts must be an integer"),
        (lambda p: jaxgpuops.moe_dispatch(np.zeros((4, 2), np.float32), p), ValueError, r"moe_dispatch: x must have shape \(3,\)"),
        (lambda p: jaxgpuops.moe_dispatch(np.zeros((3, 2), np.int32), p), TypeError, "moe_dispatch: x has dtype int32"),
        (lambda p: jaxgpuops.moe_combine(np.zeros((5, 2), np.float32), p), ValueError, r"moe_combine: y must have shape \(6,\)"),
        (
            lambda p: jaxgpuops.moe_combine(np.zeros((6, 2), np.float32), p, np.zeros((3, 1), np.float32)),
            ValueError, r"moe_combine: weights must have the shape \(3, 2\)",
        ),
        (lambda p: jaxgpuops.moe_plan(np.zeros((3, 2), int), 1 << 31), ValueError, "num_experts must be between 1 and"),
        (lambda p: jaxgpuops.moe_plan(np.zeros((3, 2), int), 4, capacity=1 << 64), ValueError, "capacity must be between 0"),
        (lambda p: jaxgpuops.moe_plan(np.zeros((3, 2), int), 3, align=1 << 30), ValueError, "moe_plan: rows are numbered by int32"),
        (
            lambda p: jaxgpuops.moe_dispatch(np.zeros((3, 2), np.float32), jaxgpuops.MoEPlan(1, 2, 3, 4)),
            ValueError, r"plan must have assignment_of_row of shape \(\*batch, rows\)",
        ),
        (
            lambda p: jaxgpuops.moe_combine(np.zeros((6, 2), np.float32), p._replace(assignment_of_row=np.zeros(6, np.float32))),
            TypeError, "moe_combine: plan.assignment_of_row has dtype float32; allowed are int32",
        ),
        (lambda p: jaxgpuops.moe_dispatch(np.zeros((3, 2), np.float32), None), TypeError, "moe_dispatch: plan must be a MoEPlan"),
        (lambda p: jaxgpuops.moe_combine(np.zeros((6, 2), np.float32), tuple(p)), TypeError, "moe_combine: plan must be a MoEPlan"),
        (lambda p: jaxgpuops.moe_route(np.zeros(3, np.float32), 1), ValueError, "moe_route: logits must have shape"),
        (lambda p: jaxgpuops.moe_route(np.zeros((3, 2), np.float32), 1, align=0), ValueError, "moe_route: align must be between 1 and"),
        (lambda p: jaxgpuops.moe_losses(np.zeros((3, 2), np.float32), np.zeros((2, 1), int)), ValueError, "moe_losses: logits and expert_ids"),
        (lambda p: jaxgpuops.moe_losses(np.zeros((3, 2), int), np.zeros((3, 1), int)), TypeError, "moe_losses: logits has dtype int"),
        (lambda p: jaxgpuops.moe_losses(np.zeros((3, 2), np.float32), np.zeros((3, 1), int), score="relu"), ValueError, "moe_losses: score must be"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    plan = jaxgpuops.moe_plan(np.zeros((3, 2), np.int32), 4)
    with pytest.raises(error, match=message):
        call(plan)


def test_explain_names_the_kernels():
    def layer(ids, x):
        plan = jaxgpuops.moe_plan(ids, 8)
        return jaxgpuops.moe_combine(jaxgpuops.moe_dispatch(x, plan), plan)

    args = jax.ShapeDtypeStruct((100, 2), jnp.int32), jax.ShapeDtypeStruct((100, 64), jnp.bfloat16)
    calls = jaxgpuops.explain(layer, *args, platform="cpu")
    assert [call.kernel for call in calls] == [f"jaxgpuops.moe_{name}" for name in ("plan", "dispatch", "combine")]


# ---- Experts that are split over devices ----------------------------------------------------------------------------


def ragged_all_to_all(operands, outputs, sizes):
    """Does what `jax.lax.ragged_all_to_all` does by its documentation, since XLA has that for GPUs and TPUs only."""
    outputs = [output.copy() for output in outputs]
    for i, (operand, own) in enumerate(zip(operands, sizes, strict=True)):
        for j, (start, size, place) in enumerate(
            zip(own.input_offsets, own.send_sizes, own.output_offsets, strict=True)
        ):
            assert size == sizes[j].recv_sizes[i] and start + size <= len(operand) and place + size <= len(outputs[j])
            outputs[j][place : place + size] = operand[start : start + size]
    return outputs


def on_devices(function, *arrays, names, shape):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, names)
    spec = jax.P(names)
    put = [jax.device_put(array, jax.NamedSharding(mesh, spec)) for array in arrays]
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)), put


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
@pytest.mark.parametrize("capacity", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens, k, experts", [(9, 2, 16), (5, 8, 8), (0, 2, 8), (33, 3, 64)])
@pytest.mark.parametrize("names, shape", [(("x",), (8,)), (("x", "y"), (4, 2))])
def test_plans_of_experts_that_are_split(names, shape, tokens, k, experts, kind, capacity):
    """Rows reach their experts, and the answers their tokens, by the sizes of the plan."""
    ids = ids_of(kind, 8 * tokens, k, experts, np.random.default_rng(27))
    plan = lambda ids: jaxgpuops.moe_plan(ids, experts, capacity=capacity, axis_name=names)
    run, arrays = on_devices(lambda ids: jax.tree.map(lambda x: x[None], plan(ids)), ids, names=names, shape=shape)
    whole = jax.tree.map(np.asarray, run(*arrays))
    plans = [jax.tree.map(lambda x, i=i: x[i], whole) for i in range(8)]
    alone = [jaxgpuops.moe_plan(part, experts, capacity=capacity) for part in np.split(ids, 8)]
    for one, expected in zip(plans, alone, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one._replace(exchange=None), expected)

    # A row says which device and assignment it is, and which expert it wants.
    rows = []
    for i, (one, part) in enumerate(zip(plans, np.split(ids, 8), strict=True)):
        a = one.assignment_of_row
        wanted = part.reshape(-1)[np.maximum(a, 0)] if a.size and part.size else np.zeros_like(a)
        rows.append(np.stack([np.full_like(a, i), a, wanted], 1))
    room = plans[0].exchange.expert_ids.shape[0]
    came = ragged_all_to_all(rows, [np.full((room, 3), -7, np.int32)] * 8, [one.exchange.there for one in plans])
    own = experts // 8
    for j, (one, found) in enumerate(zip(plans, came, strict=True)):
        local = one.exchange.expert_ids[:, 0]
        there = local >= 0
        np.testing.assert_array_equal(there, np.arange(room) < one.exchange.there.recv_sizes.sum())
        np.testing.assert_array_equal(found[there, 2], local[there] + j * own)
        assert (found[~there] == -7).all()
    back = ragged_all_to_all(came, [np.full_like(r, -9) for r in rows], [one.exchange.back for one in plans])
    for one, sent, returned in zip(plans, rows, back, strict=True):
        there = one.assignment_of_row >= 0
        np.testing.assert_array_equal(returned[there], sent[there])
        assert (returned[~there] == -9).all()


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
def test_the_sizes_are_what_jax_takes():
    """Differentiated, and lowered for a GPU."""

    def layer(ids, x):
        plan = jaxgpuops.moe_plan(ids, 16, axis_name="x")
        there = jnp.zeros((plan.exchange.expert_ids.shape[0], x.shape[1]))
        rows = jaxgpuops.moe_dispatch(x, plan)
        came = jax.lax.ragged_all_to_all(rows, there, *plan.exchange.there, axis_name="x")
        own = jaxgpuops.moe_plan(plan.exchange.expert_ids, 2)
        answers = jaxgpuops.moe_combine(jaxgpuops.moe_dispatch(came, own) ** 2, own)
        back = jax.lax.ragged_all_to_all(answers, jnp.zeros_like(rows), *plan.exchange.back, axis_name="x")
        return jaxgpuops.moe_combine(back, plan)

    devices = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("x",))
    mapped = jax.shard_map(layer, mesh=devices, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False)
    gradient = jax.jit(jax.grad(lambda x, ids: mapped(ids, x).sum()))
    args = jax.ShapeDtypeStruct((16, 4), jnp.float32), jax.ShapeDtypeStruct((16, 2), jnp.int32)
    text = gradient.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert (
        text.count("@ragged_all_to_all") == 3
    )  # one on the way to the experts, and two in the gradient, which does not need the answers


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
def test_a_plan_of_split_experts_moves_their_counts_only():
    run, [ids] = on_devices(
        lambda ids: jax.tree.map(lambda x: x[None], jaxgpuops.moe_plan(ids, 16, axis_name="x")),
        np.zeros((800, 2), np.int32), names=("x",), shape=(8,),
    )  # fmt: skip
    text = run.lower(ids).compile().as_text()
    moved = [line for line in text.splitlines() if any(f" {c}(" in line or f" {c}-start(" in line for c in COLLECTIVES)]
    assert len(moved) == 1 and "all-gather" in moved[0] and "s32[8,16]" in moved[0].replace("s32[8,1,16]", "s32[8,16]")


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def test_errors_of_axis_names():
    ids = np.zeros((8, 2), np.int32)
    with pytest.raises(ValueError, match="moe_plan: axis_name must be a mesh axis of a jax.shard_map"):
        jaxgpuops.moe_plan(ids, 4, axis_name="x")
    with pytest.raises(TypeError, match="moe_plan: axis_name must be a name of a mesh axis"):
        jaxgpuops.moe_plan(ids, 4, axis_name=3)
    count = len(jax.devices())
    for plan in (
        lambda ids: jaxgpuops.moe_plan(ids, 8, align=4, axis_name="x"),
        lambda ids: jaxgpuops.moe_plan(ids[None], 8, axis_name="x"),
        *([lambda ids: jaxgpuops.moe_plan(ids, count + 1, axis_name="x")] if count > 1 else []),
    ):
        run, args = on_devices(lambda ids, plan=plan: plan(ids).group_sizes, ids, names=("x",), shape=(count,))
        with pytest.raises(ValueError, match=r"with axis_name, expert_ids must have shape \(tokens, k\)"):
            run(*args)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
@pytest.mark.parametrize("k", [1, 2])
def test_weights_of_16_bits_on_several_devices(k):
    """Where rows, tokens or features are split, sums over devices are of float32, and rounded once. Numbers are
    whole."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    plan = jaxgpuops.moe_plan(ids_of("out of range", 32, k, 6, np.random.default_rng(40)), 6, align=8)
    y, w = numbers((plan.assignment_of_row.size, 16), "bfloat16", 41), numbers((32, k), "bfloat16", 42)
    ct = numbers((32, 16), "bfloat16", 43)

    def gradients(y, w, ct):
        out, pull = jax.vjp(lambda y, w: jaxgpuops.moe_combine(y, plan, w), y, w)
        return out, *pull(ct)

    expected = gradients(y, w, ct)
    for rows, tokens in (("x", None), (None, "x"), ("x", "x"), (None, None)):
        features = None if rows or tokens else "x"
        specs = (rows, features), (tokens, None), (tokens, features)
        where = [jax.NamedSharding(mesh, jax.P(*spec)) for spec in specs]
        found = jax.jit(gradients)(*jax.device_put([y, w, ct], where))
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))
