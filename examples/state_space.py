"""A diagonal state-space layer reads handwritten digits pixel by pixel: `jaxgpuops.linear_scan` is the recurrence. At
every step of its training, `jax.lax.associative_scan` in its place has the same loss."""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import jaxgpuops

STATES, FEATURES, CLASSES, BATCH, STEPS = 32, 64, 10, 100, 60


def scan(a, b):
    """h[t] = a * h[t - 1] + b[t] along axis 1; a has one factor per state and is not expanded."""
    return jaxgpuops.linear_scan(a, b, axis=1)


def scan_by_lax(a, b):
    def fold(before, after):
        return before[0] * after[0], after[0] * before[1] + after[1]

    return jax.lax.associative_scan(fold, (jnp.broadcast_to(a, b.shape), b), axis=1)[1]


def start(key):
    keys = jax.random.split(key, 5)
    complex_normal = lambda key, *shape: jax.random.normal(key, (*shape, 2)) / shape[0] ** 0.5
    return {
        "decay": jnp.log(jax.random.uniform(keys[0], (STATES,), minval=0.01, maxval=0.1)),
        "angle": jax.random.uniform(keys[1], (STATES,), maxval=1.0),
        "in": complex_normal(keys[2], STATES),
        "out": complex_normal(keys[3], STATES, FEATURES),
        "classes": jax.random.normal(keys[4], (FEATURES, CLASSES)) / FEATURES**0.5,
    }


def logits(parameters, pixels, scan):
    """pixels: (batch, time)."""
    as_complex = lambda name: jax.lax.complex(*jnp.moveaxis(parameters[name], -1, 0))
    decay = jnp.exp(parameters["decay"])
    a = jnp.exp(jax.lax.complex(-decay, parameters["angle"]))
    h = scan(a, pixels[:, :, None] * (decay**0.5 * as_complex("in")))
    features = jax.nn.gelu((h[:, -1] @ as_complex("out")).real)  # the state after the last pixel
    return features @ parameters["classes"]


def loss(parameters, pixels, labels, scan):
    log_p = jax.nn.log_softmax(logits(parameters, pixels, scan))
    return -jnp.take_along_axis(log_p, labels[:, None], 1).mean()


def train(scan, other_scan, parameters, pixels, labels):
    """Adam. Returns the parameters and, for each step, the loss and what it is with the other scan."""

    @jax.jit
    def step(i, parameters, mean, square, pixels, labels):
        value, gradient = jax.value_and_grad(loss)(parameters, pixels, labels, scan)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
        square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, gradient)
        rate = 0.03 * jnp.sqrt(1 - 0.99**i) / (1 - 0.9**i)
        new = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-6), parameters, mean, square)
        return new, mean, square, (value, loss(parameters, pixels, labels, other_scan))

    mean = square = jax.tree.map(jnp.zeros_like, parameters)
    values = []
    for i in range(STEPS):
        batch = slice(i * BATCH % len(pixels), i * BATCH % len(pixels) + BATCH)
        parameters, mean, square, both = step(i + 1, parameters, mean, square, pixels[batch], labels[batch])
        values.append(both)
    return parameters, *np.array(values).T


def main():
    images, classes = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    pixels, labels = jnp.asarray(images[order] / 16, jnp.float32), jnp.asarray(classes[order])
    parameters = start(jax.random.key(0))

    with jax.default_matmul_precision("highest"):  # otherwise a GPU would enlarge differences in the last bits
        trained, ours, theirs = train(scan, scan_by_lax, parameters, pixels[:1500], labels[:1500])
    for i in range(0, STEPS, 10):
        print(f"step {i:3}: loss {ours[i]:.5f} with linear_scan, {theirs[i]:.5f} with associative_scan")
    right = (logits(trained, pixels[1500:], scan).argmax(1) == labels[1500:]).mean()
    print(f"{right:.1%} of {len(pixels) - 1500} other digits are classified right")
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)  # 64 steps in float32, whose rounding error is 6e-8
    assert ours[-10:].mean() < ours[0] / 4 and right > 0.8


if __name__ == "__main__":
    main()
