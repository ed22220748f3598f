"""A mixture of experts, trained: each sample goes through the 2 of 8 experts that a router scores highest, and gradients
flow back through the scores that were selected."""

import jax
import jax.numpy as jnp

import jaxgpuops

EXPERTS, ACTIVE, WIDTH = 8, 2, 16


def model(parameters, x):
    """One sample; `jax.vmap` makes the batch."""
    scores, chosen = jaxgpuops.topk(parameters["router"] @ x, ACTIVE)
    outputs = jnp.tanh(parameters["experts"][chosen] @ x)
    return jax.nn.softmax(scores) @ outputs


def loss(parameters, xs, ys):
    return jnp.mean((jax.vmap(model, in_axes=(None, 0))(parameters, xs) - ys) ** 2)


@jax.jit
def step(parameters, xs, ys):
    value, gradient = jax.value_and_grad(loss)(parameters, xs, ys)
    return value, jax.tree.map(lambda p, g: p - 0.5 * g, parameters, gradient)


def main():
    keys = jax.random.split(jax.random.key(0), 4)
    xs = jax.random.normal(keys[0], (512, WIDTH))
    ys = jnp.where(xs[:, :1] > 0, jnp.tanh(xs), jnp.tanh(-xs[:, ::-1]))  # two regimes: work for two experts or more
    parameters = {
        "router": jax.random.normal(keys[1], (EXPERTS, WIDTH)),
        "experts": jax.random.normal(keys[2], (EXPERTS, WIDTH, WIDTH)) / 4,
    }
    values = []
    for i in range(301):
        value, parameters = step(parameters, xs, ys)
        values.append(float(value))
        if i % 100 == 0:
            print(f"step {i}: loss {value:.4f}")
    assert values[-1] < values[0] / 2


if __name__ == "__main__":
    main()
