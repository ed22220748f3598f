"""Softmax, its relatives and reductions on a GPU: see gpu.py."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import LARGE, busy_stream, memory, needs_memory, noise, plan, run_in_command_buffers, same_bits

import jaxgpuops
from jaxgpuops.lax import softmax_primitives
from jaxgpuops.lax.cross_entropy_primitives import cross_entropy_grad_p

# These tests are of the kernels, also where XLA's own are faster.
pytestmark = pytest.mark.usefixtures("kernels")

# Every kernel and form of it: (shape, axis).
REGIMES = {
    "rows, a few lanes": ((30_000, 7), 1),
    "rows, 4 lanes": ((30_000, 61), 1),
    "rows, whole vectors": ((30_000, 64), 1),
    "rows, a warp of whole vectors": ((3000, 256), 1),
    "rows, 16 lanes": ((30_000, 250), 1),
    "rows, 16 lanes in tiles": ((30_000, 135), 1),
    "rows, 32 lanes in tiles": ((30_000, 301), 1),
    "shorter rows": ((200_003, 3), 1),
    "rows, a warp a row": ((3000, 1000), 1),
    "rows, a block a row": ((3000, 4093), 1),
    "rows, larger blocks": ((600, 16_001), 1),
    "rows, aligned": ((600, 16_384), 1),
    "rows, cluster": ((5, 50_257), 1),
    "rows, many clusters": ((600, 50_257), 1),
    "rows, large cluster": ((64, 128_256), 1),
    "rows, 1 MiB": ((3, 262_144), 1),
    "streamed rows": ((1100, 17_001), 1),
    "streamed rows, largest cluster": ((40, 300_001), 1),
    "two rows, together": ((2, 300_001), 1),
    "one aligned row, together": ((1, 200_000), 1),
    "one longer row, together": ((1, 1_500_001), 1),
    "split rows": ((40, 600_001), 1),
    "split rows of whole vectors": ((40, 600_008), 1),
    "one split row": ((1, 8_000_003), 1),
    "columns, walked by threads": ((60, 3, 5001), 1),
    "columns, walked by threads, longer": ((60, 20, 701), 1),
    "columns, walked by two warps": ((60, 31, 501), 1),
    "columns in tiles": ((3001, 20, 5), 1),
    "columns in tiles, without gaps": ((3001, 3, 7), 1),
    "columns in tiles, by two threads": ((3001, 31, 5), 1),
    "columns in tiles, by eight threads": ((301, 128, 6), 1),
    "few columns in larger tiles": ((9, 24, 501), 1),
    "few flat rows, shared": ((4, 1501, 5), 1),
    "columns, walked in packs": ((40, 3, 50_003), 1),
    "columns, walked in aligned packs": ((40, 2, 50_000), 1),
    "columns, walked by warps": ((16, 401, 130), 1),
    "few columns of two positions": ((50, 2, 3), 1),
    "few columns": ((50, 7, 5), 1),
    "few columns of three batches": ((50, 21, 5), 1),
    "few columns, of two warps": ((50, 31, 5), 1),
    "few columns, of eight warps": ((50, 127, 5), 1),
    "few columns in vectors": ((50, 21, 32), 1),
    "few columns in vectors, four batches": ((50, 29, 32), 1),
    "columns, walked though aligned": ((3000, 40, 64), 1),
    "few flat columns": ((30, 500, 3), 1),
    "flat columns of 16 bytes": ((300, 501, 4), 1),
    "flat columns": ((300, 1000, 5), 1),
    "few columns that a block holds": ((300, 100, 5), 1),
    "columns, vectors": ((64, 1024, 256), 1),
    "columns, cluster": ((16, 1001, 132), 1),
    "columns, streamed gradients": ((4, 4000, 264), 1),
    "columns, streamed": ((3, 500, 6144), 1),
    "split flat columns": ((16, 8093, 130), 1),
    "strips of loose columns": ((3, 2001, 301), 1),
    "slices of flat columns": ((3, 1101, 2051), 1),
    "flat columns of a cluster": ((5, 9001, 3), 1),
    "flat columns of many clusters": ((70, 9001, 6), 1),
    "few rows, one vector in a lane": ((300, 53), 1),
    "few rows, two vectors in a lane": ((460, 200), 1),
    "few rows, four vectors in a lane": ((4000, 449), 1),
    "few rows, a block a row": ((9, 740), 1),
    "long split flat columns": ((1, 200_003, 7), 1),
    "split vectors of columns": ((1, 40_000, 64), 1),
}
regimes = pytest.mark.parametrize("shape, axis", REGIMES.values(), ids=REGIMES)
SOFTMAX = ("softmax", "log_softmax", "logsumexp")


def row_operands(shape, axis, key=0, dtype=jnp.float32):
    """Returns x, a tangent, labels, and a scale, a bias and a mask that broadcast along some dimensions."""
    keys = jax.random.split(jax.random.key(key), 6)
    along = [n if d == axis else 1 for d, n in enumerate(shape)]
    rows = [1 if d == axis else n for d, n in enumerate(shape)]
    return {
        "x": 3 * jax.random.normal(keys[0], shape, dtype),
        "t": jax.random.normal(keys[1], shape, dtype),
        "labels": jax.random.randint(keys[2], [n for d, n in enumerate(shape) if d != axis], 0, shape[axis]),
        "scale": jax.random.uniform(keys[3], rows, jnp.float32, 0.5, 2),
        "bias": jax.random.normal(keys[4], along, dtype),
        "where": jax.random.uniform(keys[5], along) < 0.8,
    }


def all_rows(x, t, labels, scale, bias, where, *, axis, module=jaxgpuops):
    """Results of every kernel, with and without optional operands."""
    results = {}
    for name in SOFTMAX:
        plain = functools.partial(getattr(module, name), axis=axis)
        general = functools.partial(plain, scale=scale, bias=bias, where=where)
        results[name], pull = jax.vjp(plain, x)
        results[f"{name} of all operands"], pull_general = jax.vjp(general, x)
        results[f"gradient of {name}"] = pull(jnp.take(t, 0, axis) if name == "logsumexp" else t)[0]
        if name != "logsumexp":
            results[f"gradient of {name} of all operands"] = pull_general(t)[0]
    loss = functools.partial(module.softmax_cross_entropy, labels=labels, axis=axis, label_smoothing=0.1, z_loss=0.01)
    results["cross_entropy"] = loss(x)
    results["cross_entropy_grad"] = jax.grad(lambda x: loss(x, reduction="sum"))(x)
    for name in ("sum", "max", "min"):
        fn = functools.partial(getattr(module, name), axis=axis)
        results[name], results[f"{name} where"] = fn(x), fn(x, where=where)
    results["dot"] = module.dot(x, t, axis=axis)
    return results


run_rows = jax.jit(all_rows, static_argnames="axis")


class Plain:
    """The same operations in plain JAX."""

    @staticmethod
    def _logits(name, x, axis, scale=1, bias=0, where=None):
        z = getattr(jax.nn, name)(x * scale + bias, axis=axis, where=where)
        return z if where is None or name != "log_softmax" else jnp.where(where, z, -jnp.inf)

    softmax = functools.partial(_logits, "softmax")
    log_softmax = functools.partial(_logits, "log_softmax")
    logsumexp = functools.partial(_logits, "logsumexp")
    sum = staticmethod(jnp.sum)
    max = staticmethod(functools.partial(jnp.max, initial=-jnp.inf))
    min = staticmethod(functools.partial(jnp.min, initial=jnp.inf))

    @staticmethod
    def dot(x, y, axis):
        return (x * y).sum(axis)

    @staticmethod
    def softmax_cross_entropy(x, labels, axis, label_smoothing, z_loss, reduction=None):
        lse = jax.nn.logsumexp(x, axis)
        at_label = jnp.take_along_axis(x, jnp.expand_dims(labels, axis), axis).squeeze(axis)
        loss = (1 - label_smoothing) * (lse - at_label) + label_smoothing * (lse - x.mean(axis)) + z_loss * lse**2
        return loss if reduction is None else loss.sum()


for _name in SOFTMAX:
    setattr(Plain, _name, staticmethod(getattr(Plain, _name)))


def test_every_kernel_has_a_regime():
    found = set()
    for shape, axis in REGIMES.values():
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        chosen = [plan(functools.partial(fn, axis=axis), x) for fn in (jaxgpuops.softmax, jaxgpuops.sum)]
        found |= {(c["algorithm"], c["blocks"] > 1) for c in chosen}
    assert found == {
        ("rows", False), ("rows", True), ("rows_tiles", False), ("rows_stream", False), ("rows_stream", True),
        ("rows_together", True), ("rows_split", True),
        ("columns", False), ("columns", True), ("columns_stream", False), ("columns_stream", True),
        ("small", False), ("small", True), ("columns_split", True), ("columns_walk", False), ("columns_flat", False), ("columns_flat", True),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@regimes
def test_rows_are_those_of_plain_jax(shape, axis, dtype):
    operands = row_operands(shape, axis, dtype=dtype)
    actual = run_rows(**operands, axis=axis)
    with jax.enable_x64(True):
        exact = {k: v.astype(jnp.float64) if jnp.issubdtype(v.dtype, jnp.floating) else v for k, v in operands.items()}
        expected = jax.jit(functools.partial(all_rows, axis=axis, module=Plain))(**exact)
    eps = float(jnp.finfo(dtype).eps)
    for name, y in actual.items():
        a, b = y.astype(jnp.float32), expected[name].astype(jnp.float32)
        b = jnp.where(jnp.abs(b) > float(jnp.finfo(y.dtype).max), jnp.copysign(jnp.inf, b), b)
        # A gradient is computed from rounded results, and is a difference of numbers that may be larger than itself.
        t = jnp.abs(operands["t"]).astype(jnp.float32)
        sizes = {"gradient of softmax": 2 * t.max(axis, keepdims=True)}
        sizes["gradient of log_softmax"] = t.sum(axis, keepdims=True)
        sizes["cross_entropy_grad"] = 1  # a probability minus the label's share
        largest = jnp.abs(jnp.where(jnp.isfinite(b), b, 0)).max(axis if b.ndim == len(shape) else None, keepdims=True)
        largest = jnp.maximum(largest, sizes.get(name.removesuffix(" of all operands"), 0))
        if name in ("sum", "sum where", "dot"):  # the summands cancel
            largest = largest + 10 * shape[axis] ** 0.5 * (eps < 1e-4)
        error = jnp.maximum(jnp.abs(a - b) - float(jnp.finfo(y.dtype).smallest_subnormal), 0)  # the finest step
        off = jnp.where((a == b) | (jnp.isnan(a) & jnp.isnan(b)), 0, error / (largest + 1e-30)).max()
        assert off < 8 * eps + 2e-6, (name, float(off))


@regimes
def test_repeats_bit_for_bit_while_another_stream_is_busy(shape, axis):
    operands = row_operands(shape, axis)
    first = jax.block_until_ready(run_rows(**operands, axis=axis))
    with busy_stream() as keep_busy:
        for _ in range(20):
            keep_busy()
            assert same_bits(run_rows(**operands, axis=axis), first)


ROWWISE = ("x", "t", "labels", "scale")


@regimes
def test_a_row_is_that_of_the_row_in_its_batch(shape, axis):
    operands = row_operands((5, *shape[1:]), axis)
    part = lambda of: {k: of(v) if k in ROWWISE else v for k, v in operands.items()}
    whole = run_rows(**operands, axis=axis)
    for i in range(5):
        row = lambda v: v[i : i + 1]
        assert same_bits(run_rows(**part(row), axis=axis), jax.tree.map(row, whole))
    # more elements than the kernels for few elements take
    many = max(1, min(max(220, (1 << 20) // operands["x"].size), memory() // (200 * operands["x"].nbytes)))
    repeated = run_rows(**part(lambda v: jnp.concatenate([v] * many)), axis=axis)
    assert same_bits(jax.tree.map(lambda y: y[-5:], repeated), whole)
    if axis == 1 and len(shape) == 2:  # rows that are not aligned

        @jax.jit
        def shifted(flat):
            return all_rows(**operands | {"x": flat[3:].reshape(5, -1)}, axis=axis)

        assert same_bits(shifted(jnp.append(jnp.zeros(3), operands["x"])), whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_few_rows_have_the_bits_of_many(dtype):
    """If rows are few, a lane has one or two vectors; if they are many, as many as its registers hold, or rows of
    float64 go through shared memory."""

    def derivatives(fn):
        return lambda x, t: jax.vjp(fn, x)[1](t)[0]

    with jax.enable_x64(dtype == "float64"):
        for length in (8, 131, 260, 449, 513, 1000, 2979, 4096, 8191):
            many = 4400 if length > 8 else 40_000
            x = 3 * jax.random.normal(jax.random.key(length), (many, length), dtype)
            x = x.at[1].set(-jnp.inf).at[1, length // 2].set(2).at[2, 7].set(jnp.inf).at[3, 8].set(jnp.nan)
            t = jnp.roll(x, 1, 0)
            for fn in (jaxgpuops.softmax, jaxgpuops.log_softmax):
                whole, back = jax.jit(fn)(x), jax.jit(derivatives(fn))(x, t)
                for few in (slice(0, 4), slice(2, 3), slice(many - 1, many)):
                    assert same_bits(jax.jit(fn)(x[few]), whole[few]), (length, few)
                    assert same_bits(jax.jit(derivatives(fn))(x[few], t[few]), back[few]), (length, few)
            labels = jnp.arange(many, dtype=jnp.int32) % length
            for smoothing in (0, 0.1):
                loss = functools.partial(jaxgpuops.softmax_cross_entropy, label_smoothing=smoothing, reduction="sum")
                slope = jax.jit(jax.grad(loss))
                whole = slope(x, labels)
                for few in (slice(0, 4), slice(100, 200), slice(many - 1, many)):
                    assert same_bits(slope(x[few], labels[few]), whole[few]), (length, few)
            for fn in (jaxgpuops.logsumexp, jaxgpuops.sum):
                whole = jax.jit(fn)(x)
                for few in (slice(0, 4), slice(many - 1, many)):
                    assert same_bits(jax.jit(fn)(x[few]), whole[few]), (length, few)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_that_are_not_whole_vectors(dtype):
    """Such rows do not begin at vectors, those of 16 bits not even at words. How many warps share a row depends on the
    number of rows."""
    item = jnp.dtype(dtype).itemsize
    for size in (1026, 1030, 1540, 2050, 3076, 4098, 8210, 12_294, 16_398, 32_766):
        length = size // item
        x = 3 * jax.random.normal(jax.random.key(length), (700, length), dtype)
        for fn, plain in ((jaxgpuops.softmax, jax.nn.softmax), (jaxgpuops.log_softmax, jax.nn.log_softmax)):
            whole = jax.jit(fn)(x)
            with jax.enable_x64(True):
                exact = plain(x.astype(jnp.float64))
            tolerance = 2 * float(jnp.finfo(dtype).eps)
            assert jnp.allclose(whole.astype(jnp.float64), exact, rtol=tolerance, atol=1e-5), (length, fn)
            special = (
                x.at[0].set(-jnp.inf).at[1].set(-jnp.inf).at[1, -1].set(2).at[2, 0].set(jnp.inf).at[3, 5].set(jnp.nan)
            )
            special = jax.jit(fn)(special)
            one = jnp.where(jnp.arange(length) == length - 1, 1, 0)
            assert jnp.isnan(special[0]).all() and jnp.isnan(special[2:4]).all(), (length, fn)
            assert (special[1] == (one if fn is jaxgpuops.softmax else jnp.log(one.astype(dtype)))).all(), (length, fn)
            assert same_bits(special[4:], whole[4:]), (length, fn)
            for begin, rows in ((0, 1), (1, 1), (5, 40), (1, 300)):
                assert same_bits(jax.jit(fn)(x[begin : begin + rows]), whole[begin : begin + rows]), (length, fn, rows)


def gradient_is_near(name, result, x, t, axis):
    """Whether the gradient of softmax or log_softmax is that of float64 within the rounding of each of its terms. What
    it is computed from is either the result, rounded to the dtype (a logarithm of -50, by 50 times as much), or the
    distance of a logit to the largest one, in float32."""
    eps, least = float(jnp.finfo(x.dtype).eps), float(jnp.finfo(x.dtype).smallest_subnormal)
    own = min(eps, 2.0**-23)  # of float32, in which 16-bit floats are computed
    with jax.enable_x64(True):
        x, t, result = (v.astype(jnp.float64) for v in (x, t, result))
        log_y = jax.nn.log_softmax(x, axis)
        y = jnp.exp(log_y)
        terms = y * t if name == "softmax" else t
        total, sizes = terms.sum(axis, keepdims=True), abs(terms).sum(axis, keepdims=True)
        limit = own * y * sizes + max(4 * least, 2.0**-126)
        if name == "softmax":
            exact, size = y * (t - total), y * (abs(t) + sizes)
            limit += least * (abs(t) + sizes + y * abs(t).sum(axis, keepdims=True))
        else:
            exact, size = t - y * total, abs(t) + y * (1 + abs(log_y)) * abs(total)
        return (abs(result - exact) <= limit + (4 * eps + 64 * own) * size).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_statistics_and_gradients_of_rows_that_are_not_whole_vectors(dtype):
    """Rows have the same bits in any batch, and results near those of float64: also where the label is the likely class,
    the only class, or none."""

    def derivative(fn):
        return lambda x, t: jax.vjp(fn, x)[1](t)[0]

    def entropy(x, labels):
        loss = functools.partial(jaxgpuops.softmax_cross_entropy, labels=labels, reduction=None)
        plain = jax.grad(lambda x: jaxgpuops.softmax_cross_entropy(x, labels, reduction="sum"))(x)
        smoothed = jax.grad(lambda x: loss(x, label_smoothing=0.1, z_loss=0.01).sum())(x)
        return loss(x), plain, smoothed

    sums = [functools.partial(fn, axis=-1) for fn in (jaxgpuops.logsumexp, jax.nn.logsumexp)]
    item, smallest = jnp.dtype(dtype).itemsize, float(jnp.finfo(dtype).smallest_subnormal)
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    for size in (516, 1030, 2050, 3076, 8210, 16_398):
        length = size // item
        x = 3 * jax.random.normal(jax.random.key(length), (700, length), dtype)
        labels = (7 * jnp.arange(700, dtype=jnp.int32)) % length
        x = x.at[jnp.arange(100, 200), labels[100:200]].set(40)
        x = x.at[1].set(-jnp.inf).at[1, labels[1]].set(2).at[2, 0].set(jnp.inf).at[3, 5].set(jnp.nan)
        t = jax.random.normal(jax.random.key(1), x.shape, dtype)
        calls = {
            "logsumexp": (sums[0], (x,)),
            "softmax": (derivative(jaxgpuops.softmax), (x, t)),
            "log_softmax": (derivative(jaxgpuops.log_softmax), (x, t)),
            "of logsumexp": (derivative(sums[0]), (x, t[:, 0])),
        }
        for name, (fn, operands) in calls.items():
            whole = jax.jit(fn)(*operands)
            if name in ("softmax", "log_softmax"):
                near = gradient_is_near(name, whole[4:], x[4:], t[4:], 1)
            else:
                plain = derivative(sums[1]) if name == "of logsumexp" else sums[1]
                with jax.enable_x64(True):
                    exact = plain(*(v[4:].astype(jnp.float64) for v in operands))
                    limits = {"rtol": tolerance + 64 * 2.0**-23, "atol": max(4 * smallest, 2.0**-126)}
                    near = jnp.allclose(whole[4:].astype(jnp.float64), exact, **limits)
            assert near, (length, name)
            for begin, rows in ((0, 1), (1, 1), (5, 40), (1, 300)):
                part = [v[begin : begin + rows] for v in operands]
                assert same_bits(jax.jit(fn)(*part), whole[begin : begin + rows]), (length, name, rows)
        whole = jax.jit(entropy)(x, labels.at[4].set(-1))
        assert all(jnp.isnan(part[4]).all() for part in whole)
        with jax.enable_x64(True):
            wide = x[5:].astype(jnp.float64)
            logs = jax.nn.log_softmax(wide)
            exact = jnp.exp(logs) - jax.nn.one_hot(labels[5:], length)
            assert jnp.allclose(whole[0][5:], -logs[jnp.arange(695), labels[5:]], rtol=1e-5, atol=1e-9), length
            assert jnp.allclose(whole[1][5:].astype(jnp.float64), exact, rtol=tolerance, atol=1e-5), length
        for begin, rows in ((5, 1), (5, 40), (6, 300)):
            end = begin + rows
            part = jax.jit(entropy)(x[begin:end], labels[begin:end])
            assert same_bits(part, tuple(v[begin:end] for v in whole)), (length, rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_few_columns_that_a_block_holds(dtype):
    with jax.enable_x64(dtype == "float64"):
        for length, inner in ((65, 31), (173, 4), (335, 3), (700, 5), (1001, 8), (250, 32), (3999, 2)):
            x = 3 * jax.random.normal(jax.random.key(length), (40, length, inner), dtype)
            x = x.at[1].set(-jnp.inf).at[1, -1, 1].set(2).at[2, 0, 0].set(jnp.inf).at[3, 5, -1].set(jnp.nan)
            for fn, plain in (
                (jaxgpuops.softmax, jax.nn.softmax),
                (jaxgpuops.log_softmax, jax.nn.log_softmax),
                (jaxgpuops.logsumexp, jax.nn.logsumexp),
            ):
                fn, plain = functools.partial(fn, axis=1), functools.partial(plain, axis=1)
                whole = jax.jit(fn)(x)
                with jax.enable_x64(True):
                    exact = plain(x.astype(jnp.float64))
                tolerance = 2 * float(jnp.finfo(dtype).eps)
                close = jnp.allclose(whole.astype(exact.dtype), exact, rtol=tolerance, atol=1e-5, equal_nan=True)
                assert close, (length, inner, fn)
                for few in (slice(0, 1), slice(1, 4), slice(39, 40)):
                    assert same_bits(jax.jit(fn)(x[few]), whole[few]), (length, inner, fn)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_plain_cross_entropy_has_the_bits_of_any(dtype):
    """Gradients with one cotangent, and without label smoothing and z_loss, have kernels of their own."""

    @functools.partial(jax.jit, static_argnums=4)
    def both(x, labels, where, ct, cotangents):
        where, ct = where[:, None], jnp.broadcast_to(ct, (cotangents, 1))
        params = {"label_smoothing": 0.0, "z_loss": 0.0, "masked": True}
        return cross_entropy_grad_p(x, labels[:, None], ct, where, axis=1, **params)

    with jax.enable_x64(dtype == "float64"):
        for rows, length in itertools.product((5, 600, 5000), (3, 8, 61, 131, 260, 512, 1000, 1114, 2310, 4096, 9001)):
            x = 3 * jax.random.normal(jax.random.key(length), (rows, length), dtype)
            x = x.at[1].set(-jnp.inf).at[1, length // 2].set(2).at[2, -1].set(jnp.inf).at[3, 1].set(jnp.nan)
            labels = (jnp.arange(rows, dtype=jnp.int32) % (length + 1)).at[0].set(-1)
            where = (jnp.arange(rows) % 4 != 3).at[3].set(False)
            ct = jnp.ones((1, 1), "float64" if dtype == "float64" else "float32") / 3
            assert same_bits(both(x, labels, where, ct, 1), both(x, labels, where, ct, rows)), (rows, length)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_losses_of_likely_labels_keep_their_digits(dtype):
    """They are near 0, as a probability is near 1."""
    with jax.enable_x64(True):
        for length in (3, 8, 61, 260, 1000, 1114, 4096, 9001, 30_001):
            rows = jnp.arange(40, dtype=jnp.int32)
            labels = rows % length
            x = jax.random.normal(jax.random.key(length), (len(rows), length), dtype)
            x = x.at[rows, labels].set((8 + rows / 2).astype(dtype))
            ct = jnp.ones((1, 1), "float64" if dtype == "float64" else "float32")
            params = {"label_smoothing": 0.0, "z_loss": 0.0, "masked": False}
            losses = cross_entropy_grad_p(x, labels[:, None], ct, axis=1, **params)[1]
            below = x.astype("float64") - x[rows, labels][:, None].astype("float64")
            others = jnp.exp(below).at[rows, labels].set(0).sum(1)
            np.testing.assert_allclose(losses, jnp.log1p(others), rtol=1e-12 if dtype == "float64" else 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_gradients_from_x_have_the_bits_of_those_from_the_result(dtype, monkeypatch):
    """The same rows are in a small array, whose gradient is one kernel, and in a large one, whose gradient is two:
    something else reads the result."""
    for name in ("_MOST_BYTES", "_MOST_BYTES_OF_SHORT"):
        monkeypatch.setattr(softmax_primitives._Derivative, name, 4 << 20)
    item = jnp.dtype(dtype).itemsize
    with jax.enable_x64(dtype == "float64"):
        for size in (
            12,
            16,
            20,
            32,
            36,
            100,
            256,
            1000,
            1572,
            2044,
            2048,
            2056,
            6232,
            32_768,
            32_776,
            262_144,
            400_008,
        ):
            length = size // item
            many = (5 << 20) // (length * item)
            x = 3 * jax.random.normal(jax.random.key(length), (many, length), dtype)
            x = (
                x.at[1]
                .set(-jnp.inf)
                .at[1, length // 2]
                .set(2)
                .at[2, -1]
                .set(jnp.inf)
                .at[3, 1]
                .set(jnp.nan)
                .at[4, 0]
                .set(60)
            )
            t = jnp.roll(x, 1, 0).at[5].set(0)
            for fn in (jaxgpuops.softmax, jaxgpuops.log_softmax):

                @jax.jit
                def both(x, t, fn=fn):
                    y, pull = jax.vjp(fn, x)
                    return y + t, pull(t)[0]

                pull = lambda x, t, both=both: both(x, t)[1]
                whole = pull(x, t)
                for few in (slice(0, 3), slice(3, 1000), slice(many - 1, many)):
                    assert same_bits(pull(x[few], t[few]), whole[few]), (length, few)


WALKED = ((2, 5001), (3, 999), (4, 256), (5, 333), (7, 2051), (8, 257), (20, 500), (25, 1000), (333, 999))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8", "uint8", "int16", "int32"])
def test_many_columns_have_the_bits_of_few(dtype):
    """If columns are many, warps walk strips of them; for results along short axes, lanes hold 16 bytes of them."""

    def derivative(fn):
        return lambda x, axis: jax.vjp(functools.partial(fn, axis=axis), x)[1](x[::-1])[0]

    calls = {name: getattr(jaxgpuops, name) for name in ("sum", "mean", "max", "min")}
    floating = jnp.issubdtype(dtype, jnp.floating)
    if floating:
        calls |= {name: getattr(jaxgpuops, name) for name in SOFTMAX}
        calls |= {f"derivative of {name}": derivative(calls[name]) for name in ("softmax", "log_softmax")}
    for length, inner in WALKED:
        many = -(-600_000 // inner)
        x = (40 * jax.random.normal(jax.random.key(length), (many, length, inner))).astype(dtype)
        if floating:
            for i, value in enumerate((jnp.nan, -jnp.nan, jnp.inf, -0.0, 0.0)):
                x = x.at[:, i % length, i::7].set(value)
        ends = jnp.array([0, -1])
        for name, call in calls.items():
            fn = jax.jit(functools.partial(call, axis=1))
            whole = fn(x)
            assert same_bits(fn(x[ends]), whole[ends]), (length, inner, name)
            if name in ("max", "min"):
                np.testing.assert_array_equal(whole.astype("float64"), getattr(jnp, name)(x, axis=1).astype("float64"))


def assert_gradients_are_of_any_batch(x, t):
    """Gradients of few columns have the bits that they have in all of x, and are right from the fourth row on."""
    for name in ("softmax", "log_softmax"):
        fn = functools.partial(getattr(jaxgpuops, name), axis=1)
        pull = jax.jit(lambda x, t, fn=fn: jax.vjp(fn, x)[1](t)[0])
        whole = pull(x, t)
        for few in (slice(0, 1), slice(1, 3), slice(-1, None)):
            assert same_bits(pull(x[few], t[few]), whole[few]), (x.shape, name)
        assert gradient_is_near(name, whole[3:], x[3:], t[3:], 1), (x.shape, name)


SHARED = ((25, 1001), (33, 40), (100, 17), (127, 801), (256, 77), (300, 65), (500, 33))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_gradients_of_columns_that_warps_share(dtype):
    with jax.enable_x64(True):
        for length, inner in SHARED:
            many = -(-1_000_000 // (length * inner)) + 3
            x = (4 * jax.random.normal(jax.random.key(length), (many, length, inner))).astype(dtype)
            for i, value in enumerate((jnp.nan, jnp.inf, -jnp.inf, 90)):
                x = x.at[0, i % length, i].set(value)
            x = x.at[1, :, 1].set(-jnp.inf)
            t = jnp.roll(x, 1, 0).at[1].set(1).at[2].set(0.5)
            assert_gradients_are_of_any_batch(x, t)


FLAT = (
    (64, 4),
    (257, 2),
    (301, 3),
    (2001, 2),
    (4096, 2),
    (8192, 4),
    (5001, 8),
    (65_536, 4),
    (100_003, 3),
    (300_007, 3),
    (400_000, 2),
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_of_flat_columns_do_not_depend_on_the_batch(dtype):
    """A cluster holds a flat row, or all multiprocessors hold few longer ones; two kernels read others. Rows begin
    anywhere in memory."""
    for length, inner in FLAT:
        many = min(2000, max(3, 3_000_000 // (length * inner)))
        x = (4 * jax.random.normal(jax.random.key(length), (many, length, inner))).astype(dtype)
        for i, value in enumerate((jnp.nan, jnp.inf, -jnp.inf, -0.0, 60)):
            x = x.at[0, i % length, i % inner].set(value)
        x = x.at[1, :, 1].set(-jnp.inf)
        t = jnp.roll(x, 1, 0)
        for fn in (jaxgpuops.softmax, jaxgpuops.log_softmax):
            pull = jax.jit(lambda x, t, fn=fn: jax.vjp(functools.partial(fn, axis=1), x)[1](t)[0])
            whole = pull(x, t)
            for few in (slice(0, 1), slice(1, 3)):
                assert same_bits(pull(x[few], t[few]), whole[few]), (length, inner, few)


PARTS = ((520, 300), (600, 17), (3001, 20), (3001, 41), (8192, 70), (9001, 40), (30_001, 15), (60_000, 30))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_of_columns_in_parts_do_not_depend_on_the_batch(dtype):
    """A cluster holds an outer index, or several are held at a time by all multiprocessors."""
    for length, inner in PARTS:
        many = min(300, 3 + 2_000_000 // (length * inner))
        x = (4 * jax.random.normal(jax.random.key(length), (many, length, inner))).astype(dtype)
        for i, value in enumerate((jnp.nan, jnp.inf, -jnp.inf, -0.0, 60)):
            x = x.at[0, i % length, i % inner].set(value)
        x = x.at[1, :, 1].set(-jnp.inf).at[2, length // 2, 3].set(90)
        t = jnp.roll(x, 1, 0).at[2].set(0.5)
        assert_gradients_are_of_any_batch(x, t)


@regimes
def test_infinities_in_parts_of_rows(shape, axis):
    """Parts of rows are -inf or masked. They are as long as the parts into which kernels divide rows."""
    shape = (min(shape[0], 20), *shape[1:])
    n = shape[axis]
    x = jax.random.normal(jax.random.key(0), shape)
    position = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    for counts in (position >= n - 3, position < 3, abs(position - n // 2) < 2):
        low = jnp.where(counts, x, -jnp.inf)
        for name in SOFTMAX:
            fn = jax.jit(functools.partial(getattr(jaxgpuops, name), axis=axis))
            expected = getattr(jax.nn, name)(low, axis=axis)
            np.testing.assert_allclose(fn(low), expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(fn(jnp.where(counts, x, jnp.nan), where=counts), expected, rtol=1e-5, atol=1e-6)


def test_causal_rows():
    for queries, keys in [(7, 7), (300, 200), (1000, 1000), (16, 20_000)]:
        x = jax.random.normal(jax.random.key(0), (3, queries, keys))
        triangle = jnp.tri(queries, keys, dtype=bool)
        poisoned = jnp.where(triangle, x, jnp.nan)
        for name in SOFTMAX:
            y, pull = jax.vjp(lambda x: getattr(jaxgpuops, name)(x, causal=True), poisoned)
            masked = functools.partial(getattr(jaxgpuops, name), where=triangle)
            expected, pull_expected = jax.vjp(masked, x)
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(
                pull(jnp.ones_like(y))[0], pull_expected(jnp.ones_like(y))[0], rtol=1e-4, atol=1e-5
            )


def command_buffers():
    for regime, (shape, axis) in REGIMES.items():
        shape = (min(shape[0], 50), *shape[1:])
        program = jax.jit(lambda o: all_rows(**o, axis=axis))
        for seed in range(4):  # new inputs, at new addresses
            operands = row_operands(shape, axis, seed)
            results = program(operands)
            again = {name: jax.jit(lambda o: all_rows(**o, axis=axis)[name])(operands) for name in ("softmax", "sum")}
            assert same_bits({name: results[name] for name in again}, again), (regime, seed)
            assert abs(results["softmax"].sum(axis) - 1).max() < 1e-4, (regime, seed)
            assert (
                abs(results["log_softmax"] + jnp.expand_dims(results["logsumexp"], axis) - operands["x"]).max() < 1e-4
            )


def test_command_buffers_with_changing_inputs():
    run_in_command_buffers("test_gpu_softmax")


@pytest.mark.alone
@pytest.mark.parametrize("shape, axis", LARGE.values(), ids=LARGE)
def test_more_than_2_to_the_31_elements(shape, axis):
    needs_memory(40)
    x = jax.jit(lambda: (noise(shape) % 16).astype(jnp.bfloat16) / 4)()
    lse = jax.jit(lambda x: jaxgpuops.logsumexp(x, axis=axis, keepdims=True))(x).astype(jnp.float32)
    for name in ("softmax", "log_softmax"):
        y = jax.jit(lambda x: getattr(jaxgpuops, name)(x, axis=axis))(x)
        log = jnp.log if name == "softmax" else lambda y: y
        worst = jax.jit(lambda x, y, lse: abs(log(y.astype(jnp.float32)) + lse - x).max())(x, y, lse)
        assert worst < 0.2, name  # lse and y have 8 bits
        del y
    bytes_ = x.astype(jnp.int8)
    largest = jax.jit(lambda x: [jaxgpuops.max(x, axis=axis), jaxgpuops.min(x, axis=axis)])(bytes_)
    assert (largest[0] == 3).all() and (largest[1] == 0).all()
    total = jax.jit(lambda x: jaxgpuops.sum(x, axis=axis))(bytes_)
    assert (total == jnp.sum(bytes_, axis, dtype=jnp.int8)).all()  # wraps around
