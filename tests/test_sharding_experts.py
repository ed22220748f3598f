"""Experts whose tokens, rows or features are split over devices: results are those of one device, and no more bytes
move than with JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding_axis import assert_close, moved

import jaxgpuops
from jaxgpuops.lax._moe import plan_fallback

ROWS = np.linspace(1, 2, 32, dtype=np.float32)  # factors of the rows, in place of experts


def experts_by_jax(choices, x, logits):
    """A mixture of experts that choose their tokens by a sort, without our functions."""
    weights, experts = jax.lax.top_k(logits, choices)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    rows = ROWS[: order.size, None] * x[order // choices]
    row = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    return (jax.nn.softmax(weights)[..., None] * rows[row].reshape(*experts.shape, -1)).sum(1)


def experts(choices, x, logits):
    weights, _, plan = jaxgpuops.moe_route(logits, choices)
    rows = jaxgpuops.moe_dispatch(x, plan)
    return jaxgpuops.moe_combine(ROWS[: len(rows), None] * rows, plan, weights)


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("derived", [False, True])
def test_experts(mesh, derived, choices):
    of = (lambda f: jax.grad(lambda x, y: (f(x, y) ** 2).sum(), (0, 1))) if derived else lambda f: f
    ours, plain = (of(jax.vmap(functools.partial(f, choices))) for f in (experts, experts_by_jax))
    x, logits = (np.random.default_rng(3).standard_normal((4, 16, n)).astype(np.float32) for n in (8, 3))
    # A batch, features, or tokens are split. Gradients are asked for with the splits of their operands, because JAX
    # might leave them whole.
    for specs in ((P("a"), P("a")), (P("a", None, "b"), P("a")), (P(None, "a"), P(None, "a"))):
        where = [NamedSharding(mesh, s) for s in specs]
        operands = jax.device_put([x, logits], where)
        program = lambda f, where=where, operands=operands: (
            jax.jit(f, out_shardings=tuple(where) if derived else None).lower(*operands).compile()
        )
        mine, theirs = program(ours), program(plain)
        assert_close(mine(*operands), plain(x, logits), False)
        assert moved(mine.as_text())[0] <= moved(theirs.as_text())[0]
        assert specs != (P("a"), P("a")) or moved(mine.as_text()) == (0, 0)


def test_a_plan_of_split_tokens(mesh):
    """A batch and tokens, and tokens alone: JAX sorts the experts, and says where each assignment and each row goes."""
    ids = np.random.default_rng(4).integers(-1, 6, (4, 256, 2)).astype(np.int32)
    ours = jax.vmap(lambda ids: jaxgpuops.moe_plan(ids, 6))
    plain = jax.vmap(lambda ids: plan_fallback(ids.reshape(-1), axis=0, num_experts=6, capacity=-1, align=1, room=512))
    for spec in (P("a", "b"), P("b", "a"), P(None, ("a", "b"))):
        operand = jax.device_put(ids, NamedSharding(mesh, spec))
        mine, theirs = (jax.jit(f).lower(operand).compile() for f in (ours, plain))
        assert_close(mine(operand), ours(ids), True)
        assert moved(mine.as_text())[0] <= ids.size // (mesh.shape[spec[0]] if spec[0] else 1)  # one byte for each id
        assert moved(mine.as_text())[0] <= moved(theirs.as_text())[0]


def test_a_combination_of_split_tokens(mesh):
    """Only the plan and the weights are split: each device adds up the rows of its own tokens."""
    rng = np.random.default_rng(4)
    plan = jaxgpuops.moe_plan(rng.integers(-1, 5, (16, 3)), 4, align=8)
    y, weights = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((plan.assignment_of_row.size, 4), (16, 3))
    )
    where = plan.row_of_assignment

    def ours(y, where, weights):
        return jaxgpuops.moe_combine(y, plan._replace(row_of_assignment=where), weights)

    def plain(y, where, weights):
        rows = jnp.where(where[..., None] >= 0, y[jnp.maximum(where, 0)], 0)
        return (rows * weights[..., None]).sum(1)

    for names in ("a", ("b", "a")):
        split, whole = NamedSharding(mesh, P(names)), NamedSharding(mesh, P())
        operands = [jax.device_put(a, s) for a, s in ((y, whole), (where, split), (weights, split))]
        mine, theirs = (jax.jit(f).lower(*operands).compile() for f in (ours, plain))
        assert_close(mine(*operands), plain(y, where, weights), False)
        assert moved(mine.as_text()) == moved(theirs.as_text()) == (0, 0)
        assert mine(*operands).sharding.is_equivalent_to(split, 2)
    # Gradients of rows and weights; of these, the rows may be split, too
    gradients = lambda f: jax.grad(lambda y, where, weights: (f(y, where, weights) ** 2).sum(), (0, 2))
    for specs in ((P(), P("a")), (P("a"), P("a")), (P("a"), P())):
        rows, tokens = (NamedSharding(mesh, s) for s in specs)
        operands = [jax.device_put(a, s) for a, s in ((y, rows), (where, tokens), (weights, tokens))]
        mine, theirs = (jax.jit(gradients(f)).lower(*operands).compile() for f in (ours, plain))
        assert_close(mine(*operands), gradients(plain)(y, where, weights), False)
        assert moved(mine.as_text())[0] <= moved(theirs.as_text())[0]
    # Rows that are split, too, on the same devices and on others; and parts that would not be equal
    for specs in ((P("a"), P("b")), (P("a"), P("a"))):
        rows, tokens = (NamedSharding(mesh, s) for s in specs)
        operands = [jax.device_put(a, s) for a, s in ((y, rows), (where, tokens), (weights, tokens))]
        assert_close(jax.jit(ours)(*operands), plain(y, where, weights), False)
        unweighted = jax.jit(lambda y, where: jaxgpuops.moe_combine(y, plan._replace(row_of_assignment=where)))
        assert_close(unweighted(*operands[:2]), plain(y, where, np.ones_like(weights)), False)
    split = lambda where: jax.lax.with_sharding_constraint(where, NamedSharding(mesh, P(("a", "b"))))
    odd = jax.jit(lambda where: ours(y, split(where), weights[:13]))
    assert_close(odd(where[:13]), plain(y, where[:13], weights[:13]), False)


def test_gradients_of_experts_whose_features_are_not_split_evenly(mesh):
    rng = np.random.default_rng(4)
    plan = jaxgpuops.moe_plan(rng.integers(-1, 5, (16, 3)), 4, align=8)
    y, weights = (rng.standard_normal(s).astype(np.float32) for s in ((plan.assignment_of_row.size, 13), (16, 3)))
    for spec in (P(None, "a"), P("b", "a")):
        split = lambda x, spec=spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
        f = lambda y, weights: (jnp.cos(jaxgpuops.moe_combine(y, plan, weights)) ** 2).sum()
        g = jax.grad(lambda y, weights, f=f, split=split: f(jnp.cos(split(y)), weights), (0, 1))
        expected = jax.grad(lambda y, weights, f=f: f(jnp.cos(y), weights), (0, 1))
        assert_close(jax.jit(g)(y, weights), expected(y, weights), False)


def test_rows_of_experts_are_split(mesh):
    plan = jaxgpuops.moe_plan(np.random.default_rng(4).integers(-1, 5, (16, 3)), 4, align=8)
    x = np.random.default_rng(3).standard_normal((16, 4)).astype(np.float32)
    rows = NamedSharding(mesh, P(("a", "b")))
    dispatch = jax.jit(lambda x: jaxgpuops.moe_dispatch(x, plan), out_shardings=rows).lower(x).compile()
    assert moved(dispatch.as_text()) == (0, 0)
    y = dispatch(x)
    assert_close(y, jaxgpuops.moe_dispatch(x, plan), True)
    combine = jax.jit(lambda y: jaxgpuops.moe_combine(y, plan)).lower(y).compile()
    assert moved(combine.as_text()) == (x.nbytes, 1)
    assert_close(combine(y), jaxgpuops.moe_combine(np.asarray(y), plan), False)


def test_gradients_of_experts_have_the_types_of_what_they_are_of(mesh):
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 8, (32, 2)).astype(np.int32)
    weights, x, y = (rng.standard_normal(shape).astype(np.float32) for shape in ((32, 2), (32, 16), (64, 16)))

    def loss(x, y, weights, ids):
        plan = jaxgpuops.moe_plan(ids, 8)
        outs = jaxgpuops.moe_dispatch(x, plan), jaxgpuops.moe_combine(y, plan, weights), jaxgpuops.moe_combine(y, plan)
        return sum((out**2).sum() for out in outs)

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    expected = gradient(x, y, weights, ids)
    explicit = jax.make_mesh(mesh.axis_sizes, ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        for specs in ((P("a"), P("a"), P("a"), P("a")), (P("a", "b"), P("a", "b"), P(), P())):
            pairs = zip((x, y, weights, ids), specs, strict=True)
            operands = [jax.device_put(a, NamedSharding(explicit, s)) for a, s in pairs]
            for found, of, wanted in zip(gradient(*operands), operands, expected, strict=False):
                assert jax.typeof(found) == jax.typeof(of)
                assert_close(found, wanted, False)


def test_one_token_in_a_program_for_several_devices(mesh):
    x, ids = np.ones((1, 3), np.float32), np.array([[1, 0]])
    split = jax.device_put(x, NamedSharding(mesh, P()))
    layer = lambda x, plan: jaxgpuops.moe_combine(jaxgpuops.moe_dispatch(x, plan), plan).sum()
    gradient = jax.jit(lambda x: jax.grad(layer)(x, jaxgpuops.moe_plan(ids, 2)))(split)
    assert gradient.tolist() == [[2.0] * 3]
