"""Runs every kernel once on small arrays and checks the results: the program that tools/gpu.sh runs under
compute-sanitizer. Shapes are odd on purpose, so that rows are misaligned and last tiles are not full."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxgpuops
from jaxgpuops.lax.along_axis import put_along_axis, take_along_axis

TOPK = [
    # (shape, axis, k)
    ((37, 61), 1, 5),
    ((9, 301), 1, 17),
    ((5, 4093), 1, 64),
    ((3, 1001), 1, 1),
    ((1, 300_001), 1, 1),
    ((600, 5001), 1, 33),
    ((65, 9001), 1, 100),
    ((3, 70_001), 1, 2048),
    ((1, 500_001), 1, 50),
    ((1, 100_001), 1, 5000),
    ((3, 5001), 1, 5001),
    ((2, 301, 67), 1, 7),
    ((1, 20_001, 5), 1, 40),
]


def main():
    rng = np.random.default_rng(0)
    kernels = set()
    for shape, axis, k in TOPK:
        for dtype in ("uint8", "bfloat16", "float32", "int64"):
            with jax.enable_x64(dtype == "int64"):
                x = jnp.asarray((rng.standard_normal(shape) * 50).astype(np.int64) % 199).astype(dtype)
                for flags in ({}, {"largest": False, "sorted": False}):
                    fn = lambda x: jaxgpuops.topk(x, k, axis=axis, **flags)  # noqa: B023  called here
                    kernels |= {call.plan.get("algorithm", "cpu") for call in jaxgpuops.explain(fn, x)}
                    values, indices = map(np.asarray, fn(x))
                    order = np.argsort(np.asarray(x, np.int64) * (1 if flags else -1), axis, kind="stable")
                    expected = np.take(order, range(k), axis)
                    np.testing.assert_array_equal(indices, np.sort(expected, axis) if flags else expected)
                if dtype != "uint8":
                    take = take_along_axis(x, jnp.asarray(indices), axis)
                    np.testing.assert_array_equal(np.asarray(take), values)
                    put = put_along_axis(take, jnp.asarray(indices), axis, shape[axis])
                    assert np.count_nonzero(np.asarray(put)) == np.count_nonzero(values)
        largest = jaxgpuops.lax.argmax(x, axis, np.int32)
        np.testing.assert_array_equal(largest, np.argmax(np.asarray(x), axis))
    print("kernels:", ", ".join(sorted(kernels)))


if __name__ == "__main__":
    main()
