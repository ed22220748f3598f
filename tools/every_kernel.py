"""Runs every kernel once on small arrays and checks the results: the program that tools/gpu.sh runs under
compute-sanitizer. Shapes are odd on purpose, so that rows are misaligned and last tiles are not full."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxgpuops
from jaxgpuops.lax import scan
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


def run_topk(rng):
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
    return kernels


# ---- Scans ----------------------------------------------------------------------------------------------------------

SCANS = [  # along axis 1
    ((37, 61), "float32"),  # a tile holds the row
    ((9, 4093), "float32"),
    ((300, 9001), "float32"),
    ((2, 70_001), "float32"),
    ((1, 65_536), "float32"),  # aligned
    ((1, 2_100_001), "float32"),  # more tiles than two passes take
    ((268, 270, 32), "float32"),  # columns in vectors
    ((2, 1001, 16), "float32"),
    ((1, 135_001, 16), "float32"),
    ((304, 301, 7), "float32"),  # columns one by one
    ((2, 3001, 3), "float32"),
    ((1, 265_001, 3), "float32"),
    *(((5, 5001), dtype) for dtype in ("bfloat16", "float64", "int8", "int32", "complex64")),
    *(((3, 501, 32), dtype) for dtype in ("bfloat16", "float64", "int16", "complex64")),
    *(((3, 501, 5), dtype) for dtype in ("float16", "int64", "complex128")),
    ((3, 5001), "float8_e5m2"),
]


@functools.partial(jax.jit, static_argnums=6)
def scans(x, a, t, y, h0, starts, reverse):
    """Every kernel that takes the dtype."""
    flags = {"axis": 1, "reverse": reverse}
    calls = {
        "cumsum": (x, False),
        "cummax": (x, False),
        "cumlogsumexp": (x, False),
        "cumsum of segments": (x, starts, True),
        "cumprod of segments": (a, starts, False),
        "cummin of segments": (x, starts, False),
    }
    results = {}
    for name, (*operands, exclusive) in calls.items():
        op = name.split()[0]
        if x.dtype in scan.CUMULATIVE_DTYPES[op]:
            results[name] = scan.CUMULATIVE[op](*operands, exclusive=exclusive, **flags)[0]
    if x.dtype in scan.FLOATS | scan.COMPLEX:
        linear = functools.partial(scan.linear_scan_p, transpose=False, **flags)
        results["linear_scan"] = linear(t, a, h0, starts, initial=True)[0]
        results["linear_scan, shared"] = linear(t, a[:1, :, :1] if a.ndim > 2 else a[:1], initial=False)[0]
        results["linear_scan_vjp"] = scan.linear_scan_vjp_p(t, a, y, h0, initial=True, **flags)
        flags["exclusive"] = False
        results["cumprod_jvp"] = scan.cumprod_jvp_p(t, a, y, transpose=True, **flags)[0]
    if x.dtype in scan.FLOATS:
        flags["transpose"] = False
        results["cummax_jvp"] = scan.cummax_jvp_p(t, a, y, starts, **flags)[0]
        results["cummin_jvp"] = scan.cummin_jvp_p(t, a, y, **flags)[0]
        results["cumlogsumexp_jvp"] = scan.cumlogsumexp_jvp_p(t, x, results["cumlogsumexp"], **flags)[0]
    return results


def check_scans(results, x, a, t, y, h0, starts, reverse):
    """Each result is what the operation makes of the one before it. But for logarithms, numbers are small integers."""
    dtype = x.dtype
    kind = np.complex128 if dtype.kind == "c" else np.int64 if dtype.kind == "i" else np.float64

    def in_time(array, kind=kind):
        return np.moveaxis(np.asarray(array), 1, 0)[:: -1 if reverse else 1].astype(kind)

    def before(array, first=0):
        return np.concatenate([np.broadcast_to(first, array[:1].shape), array[:-1]])

    def after(array):
        return np.concatenate([array[1:], np.zeros_like(array[:1])])

    x, a, t, y, h0 = map(in_time, (x, a, t, y, h0))
    cut = in_time(starts, bool)
    cut = np.broadcast_to(before(cut, False) if reverse else cut, x.shape)
    shared = a[(slice(None), *(slice(0, 1) for _ in a.shape[1:]))]
    lowest = np.iinfo(dtype).min if kind is np.int64 else -np.inf
    for name, result in results.items():
        r, *more = (in_time(array) for array in (result if isinstance(result, list) else [result]))
        tolerance = 0
        if name == "cumsum":
            expected = before(r) + x
        elif name == "cummax":
            expected = np.maximum(before(r, lowest), x)
        elif name == "cumlogsumexp":
            expected = np.logaddexp(before(r, -np.inf), x)
            tolerance = 1e-4 + 2 * float(jnp.finfo(dtype).eps) * abs(expected).max()
        elif name == "cumsum of segments":  # exclusive
            expected = np.where(cut, 0, before(r + x))
        elif name == "cumprod of segments":
            expected = np.where(cut, 1, before(r, 1)) * a
        elif name == "cummin of segments":
            expected = np.where(cut, x, np.minimum(before(r, -(lowest + 1)), x))
        elif name == "linear_scan":
            first = np.arange(len(x)).reshape(-1, *(1 for _ in x.shape[1:])) == 0
            expected = a * np.where(cut & ~first, 0, before(r, h0)) + t
        elif name == "linear_scan, shared":
            expected = shared * before(r) + t
        elif name == "linear_scan_vjp":
            np.testing.assert_array_equal(more[0], t + after(a * more[0]), err_msg=name)
            expected = (more[0] * before(y, h0)).astype(dtype)
        elif name == "cumprod_jvp":  # y is -1 or 1
            r *= before(y, 1)
            expected = t + after(a * r)
        elif name in ("cummax_jvp", "cummin_jvp"):
            expected = np.where(a == y, t, np.where(cut if name == "cummax_jvp" else False, 0, before(r)))
        else:
            logsum = in_time(results["cumlogsumexp"])
            expected = np.exp(before(logsum, -np.inf) - logsum) * before(r) + np.exp(x - logsum) * t
            tolerance = 0.1 if dtype.itemsize < 4 else 1e-4
        np.testing.assert_allclose(r, expected.astype(kind), rtol=0, atol=tolerance, err_msg=name)


def run_scans(rng):
    kernels = set()
    for i, (shape, dtype) in enumerate(SCANS):
        with jax.enable_x64("64" in dtype or dtype == "complex128"):
            # Sums are differences of small numbers, states end at factors of 0.
            x = np.diff(rng.integers(-4, 5, shape), axis=1, prepend=0)
            a, y = rng.choice([-1, 1, 1, 0], shape), rng.choice([-1, 1], shape)
            t, h0 = rng.integers(-1, 2, shape), rng.integers(-1, 2, (shape[0], 1, *shape[2:]))
            starts = rng.random((1, *shape[1:])) < 0.1
            args = (*(jnp.asarray(v).astype(dtype) for v in (x, a, t, y, h0)), jnp.asarray(starts))
            reverse = bool(i % 2)
            for call in jaxgpuops.explain(lambda *args: scans(*args, reverse), *args):  # noqa: B023  called here
                if call.plan:
                    kernels.add(f"{call.plan['algorithm']} {call.plan['layout']}")
            check_scans(jax.device_get(scans(*args, reverse)), *args, reverse)
    return kernels or {"cpu"}


def main():
    rng = np.random.default_rng(0)
    kernels = run_topk(rng) | run_scans(rng)
    print("kernels:", ", ".join(sorted(kernels)))


if __name__ == "__main__":
    main()
