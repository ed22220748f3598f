"""What tests of values share: top-k and argmax in NumPy, on integer keys, data that is hard on selection algorithms,
and a comparison of floats."""

import jax
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

DTYPES = [
    *map(np.dtype, ("float32", "float16", "float64", "bool")),
    *(np.dtype(f"{kind}int{bits}") for kind in ("", "u") for bits in (8, 16, 32, 64)),
    *map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)),
]

# Shapes of up to three dimensions, and of a few longer rows.
SHAPES = st.one_of(
    st.tuples(st.integers(1, 300)),
    st.tuples(st.integers(1, 40), st.integers(1, 200)),
    st.tuples(st.integers(1, 6), st.integers(1, 60), st.integers(1, 40)),
    st.tuples(st.integers(1, 3), st.integers(2000, 6000)),
)


def x64(dtype):
    """64-bit arrays exist in JAX only where they are enabled."""
    return jax.enable_x64(np.dtype(dtype) in map(np.dtype, ("int64", "uint64", "float64", "complex128")))


def is_float(dtype):
    return np.dtype(dtype).kind not in "iub"


def bits(x):
    """The array as unsigned integers of its width."""
    x = np.asarray(x)
    return np.ascontiguousarray(x).view(f"uint{8 * x.dtype.itemsize}")


def is_nan(x):
    with np.errstate(invalid="ignore"):  # ml_dtypes reports "invalid" for signaling NaNs
        return np.isnan(x)


def keys(x):
    """uint64 whose order is the total order of x: -NaN < -inf < .. < -0 < +0 < .. < inf < NaN."""
    x = np.asarray(x)
    key = bits(x).astype(np.uint64)
    sign = np.uint64(1 << (8 * x.dtype.itemsize - 1))
    everything = sign | (sign - np.uint64(1))
    if is_float(x.dtype):
        return np.where(key & sign, key ^ everything, key ^ sign)
    return key ^ sign if x.dtype.kind == "i" else key


def topk(x, k, axis=-1, largest=True, sorted=True):
    """Bits of the values, and indices."""
    indices = np.argsort(~keys(x) if largest else keys(x), axis=axis, kind="stable")
    indices = np.take(indices, range(k), axis=axis)
    if not sorted:
        indices = np.sort(indices, axis=axis)
    return np.take_along_axis(bits(x), indices, axis), indices.astype(np.int32)


def argmax(x, axis, largest=True):
    """The index of the first largest element; -0 equals +0, and NaNs are larger than numbers."""
    x = np.asarray(x)
    key = keys(x)
    if is_float(x.dtype):
        key = np.where(bits(x) << 1 == 0, keys(np.zeros((), x.dtype)), key)  # the sign is shifted out
    if not largest:
        key = ~key
    if is_float(x.dtype):
        key = np.where(is_nan(x), ~np.uint64(0), key)
    return np.argmax(key, axis).astype(np.int32)


def random_bits(rng, shape, dtype):
    """Every bit pattern, so for floats also NaNs with payloads, infinities and denormals."""
    dtype = np.dtype(dtype)
    if dtype == bool:
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


def special_values(dtype):
    """Zeros, infinities, NaNs of both signs, denormals, and their neighbours; for integers the extremes."""
    dtype = np.dtype(dtype)
    if dtype == bool:
        return np.array([False, True])
    if not is_float(dtype):
        info = np.iinfo(dtype)
        return np.array([info.min, info.min + 1, 0, 1, info.max - 1, info.max], dtype)
    info = ml_dtypes.finfo(dtype)
    numbers = [0.0, info.smallest_subnormal, info.smallest_normal, 1.0, info.max, np.inf, np.nan]
    positive = np.array([float(number) for number in numbers]).astype(dtype)
    return np.concatenate([positive, (bits(positive) | bits(np.array(-0.0, dtype))).view(dtype)])


def adversarial(rng, n, dtype):
    """Rows of length n, by name, each of a distribution that defeats some way to select: returns a dict."""
    dtype = np.dtype(dtype)
    normal = rng.standard_normal(n)
    position = np.arange(n)
    rows = {
        "random": normal,
        "ascending": np.sort(normal),
        "descending": np.sort(normal)[::-1],
        "equal": np.ones(n),
        "two values": (normal > 0).astype(float),
        "one above equals": (position == n // 3) * 3.0,
        "relu": np.maximum(normal, 0),
        "few values": np.round(normal),
        "high bits shared": 1 + np.abs(normal) * 2.0**-20,
        "low bits shared": np.floor(normal * 4) / 4,
        "period 32": normal + 5 * (position % 32 == 7),
        "period 128": normal + 5 * (position % 128 < 4),
        "large at the start": normal + 5 * (position < max(n // 16, 1)),
        "large at the end": normal + 5 * (position >= n - max(n // 16, 1)),
        "large in the first block": normal + 5 * (position < 64),
        "alternating": np.where(position % 2, -1.0, 1.0) * (1 + position / n),
        "few above equals": (normal > 2.5) * 1.0,
        "few above zeros": np.maximum(normal - 2, 0),
        "outliers above ascending": np.sort(normal) + 8 * (normal > 2.5),
        "stairs": -(position // 97 / 1000.0),
        "stairs of values": np.round(np.sort(normal) * 8) / 8,
        "large in every fourth block": normal + 5 * (position % 1024 < 256),
    }
    if is_float(dtype):
        rows["NaNs"] = np.where(normal > 0.3, np.nan, normal)
        rows["few NaNs"] = np.where(normal > 2.3, np.nan, normal)
        rows["only NaNs"] = np.full(n, np.nan)
        rows["infinities"] = np.where(normal > 0, np.inf, -np.inf)
        rows["zeros of both signs"] = np.where(normal > 0, 0.0, -0.0)
        rows = {name: row.astype(dtype) for name, row in rows.items()}
    else:
        info = np.iinfo(np.uint8 if dtype == bool else dtype)
        scale = min(info.max, 1 << 20) / 16  # the distributions reach from about -10 to 10
        shift = 8 * scale if info.min == 0 else 0
        rows = {name: np.clip(row * scale + shift, info.min, info.max // 2).astype(dtype) for name, row in rows.items()}
    rows["random bits"] = random_bits(rng, (n,), dtype)
    ones, sign = (1 << 8 * dtype.itemsize) - 1, 1 << 8 * dtype.itemsize - 1
    least, most = {"i": (sign, ones ^ sign), "u": (0, ones), "b": (0, 1)}.get(dtype.kind, (ones, ones ^ sign))
    rows["least of all keys"] = np.full(n, least, f"uint{8 * dtype.itemsize}").view(dtype)
    rows["most of all keys"] = np.full(n, most, f"uint{8 * dtype.itemsize}").view(dtype)
    special = special_values(dtype)
    rows["special values"] = special[rng.integers(0, len(special), n)]
    return rows


def assert_close(actual, expected, bound):
    """Same NaNs and infinities, and no further off than the bound; 0 stands for equal."""
    if is_float(actual.dtype) and np.isnan(np.array(np.inf, actual.dtype)):
        expected = np.where(np.isinf(expected), np.nan, expected)
    actual = np.asarray(actual).astype(expected.dtype)
    assert actual.shape == expected.shape
    with np.errstate(invalid="ignore", over="ignore"):
        same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
        exact = np.ndim(bound) == 0 and bound == 0
        wrong = ~same if exact else ~(same | (np.abs(actual - expected) <= bound))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        limit = np.broadcast_to(bound, wrong.shape)[at]
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} wrong; the first at {at}: {actual[at]} for {expected[at]} +- {limit}"
        )
