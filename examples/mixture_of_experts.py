"""A mixture of experts, trained: `jaxgpuops.topk_softmax` sends each sample to 2 of 8 experts and weighs what they say.
Gradients flow back through the weights. A bias that only chooses spreads the load: busy experts' goes down."""

import jax
import jax.numpy as jnp

import jaxgpuops

EXPERTS, ACTIVE, WIDTH = 8, 2, 16


def model(parameters, bias, xs):
    weights, chosen = jaxgpuops.topk_softmax(xs @ parameters["router"], ACTIVE, score="sigmoid", bias=bias)
    # So small a layer is cheapest computed whole. A large one sorts samples by expert.
    outputs = jnp.tanh(jnp.einsum("bi,eio->beo", xs, parameters["experts"]))
    return jnp.einsum("bk,bko->bo", weights, jnp.take_along_axis(outputs, chosen[..., None], 1)), chosen


def loss(parameters, bias, xs, ys):
    outputs, chosen = model(parameters, bias, xs)
    return jnp.mean((outputs - ys) ** 2), jnp.bincount(chosen.ravel(), length=EXPERTS)


@jax.jit
def step(parameters, bias, xs, ys):
    (value, load), gradient = jax.value_and_grad(loss, has_aux=True)(parameters, bias, xs, ys)
    parameters = jax.tree.map(lambda p, g: p - 0.5 * g, parameters, gradient)
    return value, load, parameters, bias + 0.01 * jnp.sign(load.mean() - load)


def main():
    keys = jax.random.split(jax.random.key(0), 4)
    xs = jax.random.normal(keys[0], (512, WIDTH))
    ys = jnp.where(xs[:, :1] > 0, jnp.tanh(xs), jnp.tanh(-xs[:, ::-1]))  # two regimes: work for two experts or more
    parameters = {
        "router": jax.random.normal(keys[1], (WIDTH, EXPERTS)) / 4,
        "experts": jax.random.normal(keys[2], (EXPERTS, WIDTH, WIDTH)) / 4,
    }
    bias = jnp.zeros(EXPERTS)
    values, loads = [], []
    for i in range(301):
        value, load, parameters, bias = step(parameters, bias, xs, ys)
        values.append(float(value))
        loads.append(load)
        if i % 100 == 0:
            print(f"step {i}: loss {value:.4f}, samples of each expert {load.tolist()}")
    assert values[-1] < values[0] / 2
    assert loads[-1].max() < 2 * loads[-1].mean()


if __name__ == "__main__":
    main()
