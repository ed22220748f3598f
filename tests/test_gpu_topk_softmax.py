"""The gate on a GPU: see gpu.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from gpu import expected_topk, run_in_command_buffers, same_bits, spread
from test_topk_softmax import check_choice

import jaxgpuops

# Every form of the kernel: (shape, axis, k).
REGIMES = {
    "a lane a row": ((30_000, 8), 1, 6),
    "a lane a row that is not a vector": ((30_001, 13), 1, 8),
    "a lane a column": ((30, 16, 1001), 1, 3),
    "8 elements a lane": ((30_000, 64), 1, 6),
    "rows that are not vectors": ((30_000, 61), 1, 6),
    "16 elements a lane": ((30_000, 128), 1, 8),
    "8 lanes": ((30_000, 256), 1, 8),
    "8 lanes, most of k": ((3000, 256), 1, 16),
    "16 lanes": ((3000, 512), 1, 20),
    "32 lanes": ((3000, 1024), 1, 64),
    "columns": ((16, 256, 130), 1, 8),
    "halves of vectors": ((30_000, 60), 1, 6),
    "the first": ((3000, 256), 1, 1),
    "the first of halves of vectors": ((3000, 60), 1, 1),
    "the first, 16 lanes": ((3000, 500), 1, 1),
    "the first, 32 lanes": ((3000, 1024), 1, 1),
    "the first of columns": ((16, 160, 130), 1, 1),
    "ranked, 8 lanes": ((300, 7), 1, 5),
    "ranked, 16 lanes": ((300, 16), 1, 12),
    "ranked, a warp": ((300, 31), 1, 20),
    "ranked, two logits a lane": ((300, 60), 1, 40),
    "ranked, columns": ((12, 13, 7), 1, 6),
    "few rows": ((300, 128), 1, 8),
    "few rows, 8 elements a lane": ((300, 256), 1, 16),
    "few rows that are not vectors": ((300, 61), 1, 6),
    "few columns": ((12, 160, 7), 1, 6),
}
regimes = pytest.mark.parametrize("shape, axis, k", REGIMES.values(), ids=REGIMES)


GROUPS = {256: 8}  # groups by the number of experts; for others 4, or one for each expert


def flags_of(length, k):
    """The results of several gates: first of those whose choice is exact, then of those that choose by score and
    bias."""
    bias = jnp.linspace(0, 0.1, length)
    groups = {"groups": GROUPS.get(length, length if length % 4 else 4)}
    groups["topk_groups"] = max(2, -(-k * groups["groups"] // length))
    return [
        {},
        {"normalize": False},
        {"score": "sigmoid"},
        {"score": "sqrt_softplus", "normalize": False},
        {"scale": 2.5, **groups},
        {"bias": bias},
        {"score": "sigmoid", "bias": bias},
        {"score": "sqrt_softplus", "bias": bias},
        {"score": "sigmoid", "bias": bias, **groups},
        {"bias": bias, "normalize": False, **groups},
    ]


@functools.partial(jax.jit, static_argnums=(1, 2))
def gates(x, axis, k):
    return [jaxgpuops.topk_softmax(x, k, axis=axis, **flags) for flags in flags_of(x.shape[axis], k)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@regimes
def test_gates_are_those_of_the_cpu(shape, axis, k, dtype):
    """Results are equal. Only choices by score and bias may differ, in last bits; exact keys show that these are
    right."""
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
    turns = np.arange(x.size // shape[axis]) % len(rows)  # the number of the row that each row of x repeats
    lines = lambda a: np.moveaxis(np.asarray(a), axis, -1).reshape(-1, a.shape[axis])
    for flags, ours, theirs in zip(flags_of(shape[axis], k), gates(x, axis, k), of_cpu, strict=True):
        if "bias" in flags:
            named = {name: flags[name] for name in ("score", "groups", "topk_groups") if name in flags}
            chosen = lines(ours.indices)
            check_choice(chosen[: len(rows)], rows, flags["bias"], k, **named)
            np.testing.assert_array_equal(chosen, chosen[turns])
        else:
            np.testing.assert_array_equal(ours.indices, theirs.indices)
        same = np.asarray(ours.indices) == theirs.indices
        a, b = (np.asarray(gate.weights, np.float32)[same] for gate in (ours, theirs))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=1e-7 if dtype != "float32" else 1e-37)


@regimes
def test_gates_of_a_row_are_those_of_the_row_in_its_batch(shape, axis, k):
    x = 3 * jax.random.normal(jax.random.key(0), (5, *shape[1:]))
    whole = gates(x, axis, k)
    for i in range(5):
        assert same_bits(gates(x[i : i + 1], axis, k), jax.tree.map(lambda y: y[i : i + 1], whole))
    assert same_bits(jax.tree.map(lambda y: y[-5:], gates(jnp.concatenate([x] * 450), axis, k)), whole)
    shifted = jax.jit(lambda x: gates(x[3:].reshape(5, *shape[1:]), axis, k))(jnp.append(jnp.zeros(3), x))
    assert same_bits(shifted, whole)  # rows that are not aligned


def command_buffers():
    for name, (shape, axis, k) in REGIMES.items():
        program = jax.jit(lambda x: [gates(x + i, axis, k) for i in range(3)])
        for seed in range(4):  # new inputs, at new addresses
            x = jnp.round(jax.random.normal(jax.random.key(seed), shape) * 100) / 8
            for i, results in enumerate(program(x)):
                expected = expected_topk(x + i, k, axis, True, True)[1]
                chosen = jax.nn.softmax(jnp.take_along_axis(x + i, expected, axis), axis)
                assert (results[0].indices == expected).all(), (name, seed, i)
                assert abs(results[0].weights - chosen).max() < 1e-6, (name, seed, i)


def test_command_buffers_with_changing_inputs():
    run_in_command_buffers("test_gpu_topk_softmax")
