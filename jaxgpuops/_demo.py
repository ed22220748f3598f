"""The demo of ``python -m jaxgpuops``: k nearest neighbours classify handwritten digits, with top-k from here and from
JAX."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxgpuops
from jaxgpuops import _native

NEIGHBOURS = 10
TEMPERATURE = 100.0  # how fast the weight of a neighbour's vote falls with its squared distance


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns 1797 scans of handwritten digits, of 8 x 8 pixels from 0 to 16: images and labels for training, then for
    testing."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order].astype(np.float32), labels[order].astype(np.int32)
    return images[:1200], labels[:1200], images[1200:], labels[1200:]


def nearest(distances: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jaxgpuops.topk(distances, NEIGHBOURS, largest=False)


def nearest_by_lax(distances: jax.Array) -> tuple[jax.Array, jax.Array]:
    negated, indices = jax.lax.top_k(-distances, NEIGHBOURS)
    return -negated, indices


def classifier(nearest: Callable) -> Callable:
    """Returns a jitted function of known images, their labels and new images, which predicts the labels of the new
    images."""

    def classify(known, labels, image):
        distances = jnp.sum((known - image) ** 2, axis=1)  # sums of small integers, which are exact in any order
        distances, indices = nearest(distances)
        weights = jax.nn.softmax(-distances / TEMPERATURE)
        votes = jnp.zeros(10).at[labels[indices]].add(weights)
        return jnp.argmax(votes)

    return jax.jit(jax.vmap(classify, in_axes=(None, None, 0)))


def milliseconds(fn: Callable, *args) -> float:
    """Returns the time of one call among many: all calls are queued, and one wait ends them."""
    jax.block_until_ready(fn(*args))
    calls, elapsed = 1, 0.0
    while elapsed < 0.1:
        calls *= 2
        start = time.perf_counter()
        for _ in range(calls):
            out = fn(*args)
        jax.block_until_ready(out)
        elapsed = time.perf_counter() - start
    return elapsed / calls * 1e3


def classify_digits() -> None:
    print("k nearest neighbours on scikit-learn's handwritten digits: compiling and classifying ..", flush=True)
    known, labels, images, truth = digits()
    predictions = {}
    for name, method in [("jaxgpuops.topk", nearest), ("jax.lax.top_k", nearest_by_lax)]:
        predict = classifier(method)
        predictions[name] = np.asarray(predict(known, labels, images))
        took = milliseconds(predict, *map(jnp.asarray, (known, labels, images)))
        right = np.sum(predictions[name] == truth)
        print(f"  {name:<15} {right} of {len(truth)} right ({right / len(truth):.1%}), {took:.2f} ms", flush=True)
    ours, theirs = predictions.values()
    if not np.array_equal(ours, theirs):
        raise AssertionError(f"{np.sum(ours != theirs)} of {len(truth)} predictions differ")
    print("  all predictions are the same")


def time_topk() -> None:
    device = jax.devices()[0]
    scale = 1 if device.platform == "gpu" else 16
    print(f"milliseconds of a top-k on {device.device_kind}, float32 (in earnest: python -m benchmarks topk)")
    print(f"  {'rows x length, k':<22} {'jax.lax':>9} {'jaxgpuops':>10}")
    for rows, n, k in [(1024, 64, 6), (8192, 1024, 32), (64, 128256, 50), (1, 1 << 24, 64)]:
        rows, n = (rows // scale, n) if rows > 1 else (rows, n // scale)
        x = jax.random.normal(jax.random.key(0), (rows, n))
        print(f"  {f'{rows} x {n}, k = {k}':<22}", end="", flush=True)
        for top_k in (jax.lax.top_k, jaxgpuops.topk):
            print(f" {milliseconds(jax.jit(lambda x: top_k(x, k)), x):9.3f}", end="", flush=True)  # noqa: B023
        print()


def main() -> None:
    if why := _native.missing(_native.lowering_platform(jax.default_backend())):
        raise SystemExit(f"The demo compares kernels with jax.lax, and there are none to run: {why}.")
    try:
        import sklearn  # noqa: F401
    except ImportError:
        print('The demo needs scikit-learn: pip install ".[demo]" brings it.')
        return
    classify_digits()
    print()
    time_topk()
