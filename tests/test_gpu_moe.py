"""Plan, dispatch and combine on a GPU: see gpu.py. tests/test_moe.py has the tests that also run on a CPU."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import in_subprocess, needs_memory, plan, run_in_command_buffers, same_bits
from test_moe import KINDS, check_plan, ids_of

import jaxgpuops

SIZES = [(0, 2, 4), (1, 1, 1), (1000, 8, 8), (2000, 8, 128), (2049, 8, 64), (16384, 6, 64), (8192, 2, 8)]
SIZES += [(100, 3, 5), (3000, 4, 16), (16000, 2, 32), (300, 4, 33), (2, 1, 512)]  # few experts, and few assignments
SIZES += [(4, 8, 255), (32, 8, 384), (33, 8, 256), (8, 8, 33), (9, 8, 128)]  # a warp looks at all assignments
SIZES += [(32, 8, 128), (80, 3, 20), (50, 5, 64)]  # a lane looks at one assignment
SIZES += [(65, 8, 128), (128, 8, 128), (256, 8, 100), (85, 7, 64), (700, 2, 9)]  # clusters of small blocks
SIZES += [(5000, 16, 512), (9000, 2, 4096), (700, 2, 2048)]  # counters that leave room for few warps
# Sizes for the largest cluster, for more than a cluster, and for more than registers hold.
SIZES += [(4096, 8, 128), (4097, 8, 128), (16384, 8, 128), (600_000, 4, 60)]
# Clusters of a grid, with assignments in order or too many for that; blocks that wait twice.
SIZES += [(5001, 8, 512), (45_083, 6, 128), (200_000, 8, 64), (700_000, 4, 64), (20_000, 2, 1024), (90_000, 3, 2048)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens, k, experts", SIZES)
def test_plans(tokens, k, experts, kind):
    ids = ids_of(kind, tokens, k, experts, np.random.default_rng(0))
    for options in ({}, {"align": 128}, {"capacity": tokens * k // experts}):
        check_plan(ids, experts, **options)


def test_plans_for_older_gpus():
    """Where there are no clusters, blocks exchange their totals through the workspace."""
    if "JAXGPUOPS_COMPUTE_CAPABILITY" in os.environ:
        assert plan(lambda ids: jaxgpuops.moe_plan(ids, 128), jnp.zeros((4096, 8), jnp.int32))["algorithm"] == "grid"
        return
    command = ("-m", "pytest", "test_gpu_moe.py", "-q", "-p", "no:cacheprovider", "-k", "older or skewed")
    in_subprocess(*command, JAXGPUOPS_COMPUTE_CAPABILITY="80")


@pytest.mark.parametrize("batch", [2, 5, 140])
def test_plans_of_batches_are_those_of_their_elements(batch):
    """Several blocks share each plan, or each block has a plan of its own and reads twice what its registers do not
    hold."""
    ids = jax.random.randint(jax.random.key(0), (batch, 8500, 2), -1, 71)
    whole = jaxgpuops.moe_plan(ids, 70, align=8)
    for i in {0, batch // 2, batch - 1}:
        assert same_bits(jax.tree.map(lambda a, i=i: a[i], whole), jaxgpuops.moe_plan(ids[i], 70, align=8))


def test_plans_have_the_same_bits_in_every_run():
    """Blocks add their counters by atomics. Sums of integers are the same in any order."""
    ids = jax.random.randint(jax.random.key(1), (30_000, 4), 0, 100)
    expected = jaxgpuops.moe_plan(ids, 100)
    for _ in range(50):
        assert same_bits(jaxgpuops.moe_plan(ids, 100), expected)


def test_losses_of_a_route_on_a_gpu():
    """Log-sums come from the gate's kernel, counts from the plan's."""
    logits = 3 * jax.random.normal(jax.random.key(2), (5000, 160))
    flags = {"groups": 8, "topk_groups": 3, "scale": 16.0}
    route = jax.jit(lambda z: jaxgpuops.moe_route(z, 6, losses=True, **flags))
    weights, ids, plan, losses = route(logits)
    gate = jaxgpuops.topk_softmax(logits, 6, **flags)
    assert same_bits((weights, ids), tuple(gate)) and same_bits(plan, jaxgpuops.moe_plan(ids, 160))
    expected = jaxgpuops.moe_losses(logits, ids)
    np.testing.assert_allclose(losses.load_balance, expected.load_balance, rtol=1e-5)
    np.testing.assert_allclose(losses.z, expected.z, rtol=1e-5)
    for _ in range(20):
        assert same_bits(route(logits), (weights, ids, plan, losses))
    gradient = lambda f: jax.jit(jax.grad(lambda z: sum(f(z))))(logits)
    ours = gradient(lambda z: jaxgpuops.moe_route(z, 6, losses=True, **flags)[3])
    np.testing.assert_allclose(ours, gradient(lambda z: jaxgpuops.moe_losses(z, ids)), rtol=1e-4, atol=1e-9)


def layer(ids, x, w):
    plan = jaxgpuops.moe_plan(ids, 64)
    y = jaxgpuops.moe_dispatch(x, plan)
    return plan, y, jaxgpuops.moe_combine(y, plan, w)


def operands(seed, tokens=4000, width=1000, dtype="bfloat16", k=6):
    keys = jax.random.split(jax.random.key(seed), 3)
    ids = jax.random.randint(keys[0], (tokens, k), -1, 66)
    return ids, jax.random.normal(keys[1], (tokens, width), dtype), jax.random.uniform(keys[2], (tokens, k))


WIDTHS = [(500, 1, 6), (500, 8, 6), (500, 1000, 6), (500, 1001, 6), (12_000, 91, 6)]
WIDTHS += [(12_000, 3, 6), (12_000, 8, 2), (12_000, 23, 4)]  # many narrow rows
# So many bytes that the copy engine moves them, a token in one strip or in several.
WIDTHS += [(12_000, 1000, 6), (1500, 20_000, 6)]
WIDTHS += [(300, 2048, k) for k in (1, 2, 4, 8, 10)]  # choices that are loaded together, or not


@pytest.mark.parametrize("tokens, width, k", WIDTHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_those_of_plain_jax(tokens, width, k, dtype):
    ids, x, w = operands(1, tokens, width, dtype, k)
    plan, y, out = jax.jit(layer)(ids, x, w)
    rows = plan.token_of_row
    assert same_bits(y, jnp.where((rows >= 0)[:, None], x[rows], 0))
    there = (plan.row_of_assignment >= 0)[..., None]
    terms = jnp.where(there, w[..., None].astype(jnp.float32) * y[plan.row_of_assignment].astype(jnp.float32), 0)
    off = jnp.abs(out.astype(jnp.float32) - terms.sum(1))
    assert (off <= 8 * float(jnp.finfo(dtype).eps) * jnp.abs(terms).sum(1)).all()
    narrow = w.astype(dtype)  # 16-bit weights are read as they are, with the same results
    combined = jax.jit(lambda w: jaxgpuops.moe_combine(y, plan, w))
    assert same_bits(combined(narrow), combined(narrow.astype(jnp.float32)))


def command_buffers():
    run = jax.jit(layer)
    route = jax.jit(lambda x: jaxgpuops.moe_route(x, 6, groups=8, topk_groups=4, score="sigmoid"))
    for seed in (4, 5, 4):
        logits = jax.random.normal(jax.random.key(seed), (3000, 64))
        weights, ids, plan = route(logits)
        gate = jaxgpuops.topk_softmax(logits, 6, groups=8, topk_groups=4, score="sigmoid")
        assert same_bits((weights, ids), tuple(gate)) and same_bits(plan, jaxgpuops.moe_plan(ids, 64))
    for seed in (1, 2, 1, 3):  # the first call captures a graph, and later ones run it
        args = operands(seed)
        plan, y, out = run(*args)
        expected = jaxgpuops.moe_plan(args[0], 64)
        assert same_bits(plan, expected)
        assert same_bits(y, jnp.where((expected.token_of_row >= 0)[:, None], args[1][expected.token_of_row], 0))
        assert same_bits(out, jaxgpuops.moe_combine(y, expected, args[2]))


def test_command_buffers_with_changing_inputs():
    run_in_command_buffers("test_gpu_moe")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "width, tokens, k",
    # Blocks that have a row, some, or all of a token; warps that have a row; rows of part of a warp, of vectors or not,
    # and too long for a block.
    [(24, 300, 6), (1001, 30, 6), (1001, 3000, 6), (1000, 400, 40), (7168, 40, 6), (7168, 600, 6), (20_000, 100, 6)]
    + [(4096, 600, 6), (2048, 250, 10)],
)
def test_gradients_of_combine_have_the_same_bits_in_every_run(width, tokens, k, dtype):
    """The order of additions is the same for a few of the tokens, and for a slice whose rows are not aligned to
    vectors."""
    with jax.enable_x64(dtype == "float64"):
        ids, x, w = operands(2, tokens, width, dtype, k)
        if dtype == "float64":
            w = w.astype(dtype)

        def gradients(ids, x, ct, w):
            plan = jaxgpuops.moe_plan(ids, 64)
            y = jaxgpuops.moe_dispatch(x, plan)
            return plan, y, *jax.vjp(lambda y, w: jaxgpuops.moe_combine(y, plan, w), y, w)[1](ct)

        plan, y, dy, dw = expected = jax.jit(gradients)(ids, x[::-1], x, w)
        there, row, a = plan.row_of_assignment >= 0, plan.row_of_assignment, plan.assignment_of_row
        products = jax.jit(
            lambda y: jnp.where(there[..., None], y[row].astype(w.dtype) * x[:, None].astype(w.dtype), 0)
        )
        terms = products(y)
        limit = 1e-4 if dtype != "float64" else 1e-13
        assert (jnp.abs(dw - terms.sum(2)) <= limit * jnp.abs(terms).sum(2)).all()
        scaled = (w.reshape(-1)[a][:, None] * x[a // k].astype(w.dtype)).astype(dtype)
        assert same_bits(dy, jnp.where((a >= 0)[:, None], scaled, 0))
        few = tokens // 4
        assert same_bits(jax.jit(gradients)(ids[:few], x[::-1][:few], x[:few], w[:few])[3], dw[:few])
        shifted = lambda a: jnp.concatenate([jnp.zeros(3, a.dtype), a.ravel()])
        pull = lambda y, ct, w=w: jax.vjp(lambda y, w: jaxgpuops.moe_combine(y, plan, w), y, w)[1](ct)
        moved = jax.jit(lambda flat_y, flat_ct: pull(flat_y[3:].reshape(y.shape), flat_ct[3:].reshape(x.shape)))
        for _ in range(3):
            assert same_bits(jax.jit(gradients)(ids, x[::-1], x, w), expected)
            assert same_bits(moved(shifted(y), shifted(x)), (dy, dw))
        if dtype == "bfloat16":  # weights of this dtype are read as they are, and their gradients rounded once
            wide_dy, wide_dw = pull(y, x, w.astype(dtype).astype(w.dtype))
            assert same_bits(pull(y, x, w.astype(dtype)), (wide_dy, wide_dw.astype(dtype)))


@pytest.mark.parametrize("k", [0, 2])
def test_no_tokens(k):
    plan = jaxgpuops.moe_plan(jnp.zeros((0, k), jnp.int32), 4, align=8)
    x, w = jnp.zeros((0, 64), jnp.bfloat16), jnp.zeros((0, k))
    layer = lambda x, w: jaxgpuops.moe_combine(jaxgpuops.moe_dispatch(x, plan), plan, w)
    out, pull = jax.vjp(layer, x, w)
    assert out.shape == x.shape and [g.shape for g in pull(out)] == [x.shape, w.shape]
    assert not jaxgpuops.moe_dispatch(x, plan).any() and not plan.group_sizes.any()


@pytest.mark.alone
@pytest.mark.parametrize("width", [8192, 8191])  # rows that are whole vectors, and rows that are not
def test_more_than_2_to_31_elements(width):
    """Tests tokens and twice as many rows. Numbers are whole and sums small, so that all are exact."""
    needs_memory(40)
    tokens, part = 270_000, 10_000
    ids = jax.random.randint(jax.random.key(6), (tokens, 2), 0, 33)
    plan = jaxgpuops.moe_plan(ids, 33)
    iota = lambda d: jax.lax.broadcasted_iota(jnp.uint32, (tokens, width), d)
    mixed = lambda seed: (
        (iota(0) * jnp.uint32(2654435761) + iota(1) * jnp.uint32(2246822519) + seed) >> 13
    )  # too many for a key
    make = jax.jit(lambda seed: (mixed(seed).astype(jnp.int32) % 3 - 1).astype("float8_e4m3fn"))
    x, ct = make(jnp.uint32(7)), make(jnp.uint32(1 << 20))
    assert x.size > 1 << 31
    cut = jax.jit(lambda a, first, size: jax.lax.dynamic_slice_in_dim(a, first, size), static_argnums=2)
    rows = jaxgpuops.moe_dispatch(x, plan)
    token = plan.token_of_row
    for first in range(0, 2 * tokens, part):
        assert same_bits(cut(rows, first, part), x[cut(token, first, part)]), first
    w = jnp.tile(jnp.array([0.0, 1.0]), (tokens, 1))
    out, pull = jax.vjp(lambda rows, w: jaxgpuops.moe_combine(rows, plan, w), rows, w)
    number = lambda a: a.astype(jnp.float32)  # -0 and 0 count as equal
    assert all((number(cut(out, t, part)) == number(cut(x, t, part))).all() for t in range(0, tokens, part))
    del out
    dy, dw = pull(ct)
    of_row = w.reshape(-1)[plan.assignment_of_row]
    for first in range(0, 2 * tokens, part):
        expected = cut(of_row, first, part)[:, None] * number(ct[cut(token, first, part)])
        assert (number(cut(dy, first, part)) == expected).all(), first
    for t in range(0, tokens, part):
        dots = (number(cut(x, t, part)) * number(cut(ct, t, part))).sum(1)
        assert (cut(dw, t, part) == dots[:, None]).all(), t


# On a machine with several GPUs: python -P -m pytest tests/test_gpu_moe.py -k other_gpus
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs: XLA has ragged_all_to_all for GPUs only")
@pytest.mark.parametrize("capacity", [None, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_reach_experts_on_other_gpus(kind, capacity):
    """Rows go to the devices of their experts, and answers and gradients come back. Numbers are whole, so that every
    order of additions gives the same sums."""
    devices = 2 ** (len(jax.devices()).bit_length() - 1)
    tokens, k, experts, features = 64 * devices, 3, 4 * devices, 24
    random = np.random.default_rng(29)
    whole = lambda *shape: random.integers(-3, 4, shape).astype(np.float32)
    ids = ids_of(kind, tokens, k, experts, random)
    x, scale, weights, ct = whole(tokens, features), whole(experts, features), whole(tokens, k), whole(tokens, features)

    def layer(scale, x, weights, ids):
        plan = jaxgpuops.moe_plan(ids, experts, capacity=capacity, axis_name="gpus")
        there, back, local_ids = plan.exchange
        rows = jaxgpuops.moe_dispatch(x, plan)
        room = jnp.zeros((len(local_ids), features))
        came = jax.lax.ragged_all_to_all(rows, room, *there, axis_name="gpus")
        own = jaxgpuops.moe_plan(local_ids, experts // devices)
        expert_of_row = local_ids[own.token_of_row, 0]
        y = jaxgpuops.moe_dispatch(came, own) ** 2 * jnp.where(
            (own.token_of_row >= 0)[:, None], scale[expert_of_row], 0
        )
        answers = jaxgpuops.moe_combine(y, own)
        answers = jax.lax.ragged_all_to_all(answers, jnp.zeros_like(rows), *back, axis_name="gpus")
        return jaxgpuops.moe_combine(answers, plan, weights)

    def expected(scale, x, weights, ids):
        kept = np.zeros(ids.shape, bool)
        for part in np.split(np.arange(tokens), devices):  # the capacity holds for the tokens of each device
            plan = jaxgpuops.moe_plan(ids[part], experts, capacity=capacity)
            kept[part] = plan.row_of_assignment >= 0
        rows = x[:, None] ** 2 * scale[np.clip(ids, 0, experts - 1)]
        return (jnp.where(kept[..., None], rows, 0) * weights[..., None]).sum(1)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("gpus",))
    split = jax.P("gpus")
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    on_devices = [jax.device_put(a, jax.NamedSharding(mesh, split)) for a in (scale, x, weights, ids)]

    def with_gradients(fn, scale, x, weights, ids):
        out, pull = jax.vjp(lambda *moved: fn(*moved, ids), scale, x, weights)
        return out, *pull(jnp.asarray(ct))

    found = jax.jit(lambda *args: with_gradients(mapped, *args))(*on_devices)
    wanted = with_gradients(expected, *map(jnp.asarray, (scale, x, weights)), ids)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
