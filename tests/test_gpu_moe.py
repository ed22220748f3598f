"""Plan, dispatch and combine on a GPU: see gpu.py. tests/test_moe.py has what is the same on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import run_in_command_buffers, same_bits
from test_moe import KINDS, check_plan, ids_of

import jaxgpuops

SIZES = [(2000, 8, 128), (2049, 8, 64), (16384, 6, 64), (8192, 2, 8), (5000, 16, 512), (9000, 2, 4096)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens, k, experts", SIZES)
def test_plans_of_several_blocks(tokens, k, experts, kind):
    ids = ids_of(kind, tokens, k, experts, np.random.default_rng(0))
    for options in ({}, {"align": 128}, {"capacity": tokens * k // experts}):
        check_plan(ids, experts, **options)


def layer(ids, x, w):
    plan = jaxgpuops.moe_plan(ids, 64)
    y = jaxgpuops.moe_dispatch(x, plan)
    return plan, y, jaxgpuops.moe_combine(y, plan, w)


def operands(seed, tokens=4000, width=1000, dtype="bfloat16"):
    keys = jax.random.split(jax.random.key(seed), 3)
    ids = jax.random.randint(keys[0], (tokens, 6), -1, 66)
    return ids, jax.random.normal(keys[1], (tokens, width), dtype), jax.random.uniform(keys[2], (tokens, 6))


@pytest.mark.parametrize("width", [1, 8, 1000, 1001])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_those_of_plain_jax(width, dtype):
    ids, x, w = operands(1, 500, width, dtype)
    plan, y, out = jax.jit(layer)(ids, x, w)
    rows = plan.token_of_row
    assert same_bits(y, jnp.where((rows >= 0)[:, None], x[rows], 0))
    there = (plan.row_of_assignment >= 0)[..., None]
    terms = jnp.where(there, w[..., None].astype(jnp.float32) * y[plan.row_of_assignment].astype(jnp.float32), 0)
    off = jnp.abs(out.astype(jnp.float32) - terms.sum(1))
    assert (off <= 8 * float(jnp.finfo(dtype).eps) * jnp.abs(terms).sum(1)).all()


def command_buffers():
    run = jax.jit(layer)
    for seed in (1, 2, 1, 3):  # the first call captures a graph, and later ones run it
        args = operands(seed)
        plan, y, out = run(*args)
        expected = jaxgpuops.moe_plan(args[0], 64)
        assert same_bits(plan, expected)
        assert same_bits(y, jnp.where((expected.token_of_row >= 0)[:, None], args[1][expected.token_of_row], 0))
        assert same_bits(out, jaxgpuops.moe_combine(y, expected, args[2]))


def test_command_buffers_with_changing_inputs():
    run_in_command_buffers("test_gpu_moe")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32"])
@pytest.mark.parametrize("width", [24, 1000, 7168])
def test_gradients_of_combine_have_the_same_bits_in_every_run(width, dtype):
    """Also where XLA hands over a slice whose rows are not aligned to vectors: the order of adding is the same."""
    ids, x, w = operands(2, 300, width, dtype)
    plan = jaxgpuops.moe_plan(ids, 64)
    y = jaxgpuops.moe_dispatch(x[::-1], plan)
    gradients = jax.jit(lambda y, w, ct: jax.vjp(lambda y, w: jaxgpuops.moe_combine(y, plan, w), y, w)[1](ct))
    expected = gradients(y, w, x)
    there = (plan.row_of_assignment >= 0)[..., None]
    terms = jnp.where(there, y[plan.row_of_assignment].astype(jnp.float32) * x[:, None].astype(jnp.float32), 0)
    assert (jnp.abs(expected[1] - terms.sum(2)) <= 1e-4 * jnp.abs(terms).sum(2)).all()
    moved = jax.jit(lambda y, ct: gradients(y[3:].reshape(expected[0].shape), w, ct[3:].reshape(x.shape)))
    shifted = lambda a: jnp.concatenate([jnp.zeros(3, a.dtype), a.ravel()])
    for _ in range(3):
        assert same_bits(moved(shifted(y), shifted(x)), expected)
