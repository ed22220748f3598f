"""Derivatives of the softmax family: where they are hard, and what they keep in memory."""

import functools
import itertools

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
import scan_reference
from reference import assert_close, x64
from softmax_reference import Logits, cross_entropy, tiny
from test_cross_entropy import OPTIONS
from test_softmax import FLOATS, INF, NAMES, NAN, SIZES, TIERS, X, arrays_of, large, numbers_of, tiers

import jaxgpuops
from jaxgpuops.lax import softmax_primitives

# Plain JAX has one rule for both tiers.
tiers_and_paths = pytest.mark.parametrize(
    "module, paths",
    [(jaxgpuops, ""), (jaxgpuops.lax, ""), (jaxgpuops.lax, "all")],
    indirect=["paths"],
    ids=["public-kernels", "lax-kernels", "lax-plain JAX"],
)


# ---- What JAX gets wrong ---------------------------------------------------------------------------------------------


@tiers
def test_float16_cotangents_of_log_softmax_do_not_overflow(paths, module):
    # Their sum, 2^17, is more than float16 holds.
    x = jnp.zeros((1, 1 << 17), jnp.float16)
    gradient = jax.grad(lambda x: module.log_softmax(x).astype(np.float32).sum())(x)
    assert np.all(abs(np.asarray(gradient)) < 0.01)  # 1 - 2^17 p, where p is from a logarithm of 16 bits
    gradient = jax.grad(lambda x: module.log_softmax(x)[0, 0].astype(np.float32) * 2**15)(x)
    assert gradient[0, 0] == 2**15
    np.testing.assert_allclose(np.asarray(gradient[0, 1:]).astype(np.float32), -0.25, rtol=1e-2)


def test_what_is_left_of_1_is_not_lost_by_derivatives(paths):
    with jax.enable_x64(True):
        for dtype in (np.float32, np.float64):
            x = jnp.array([3.0, 40.0, 0.0], dtype)
            p = np.exp(np.array([3.0, 40, 0]) - 40)
            q = p[0] + p[2]
            for module in TIERS.values():
                gradient = jax.grad(lambda x: module.softmax(x)[1])(x)
                np.testing.assert_allclose(gradient, [-p[0], q, -p[2]], rtol=1e-5)
                gradient = jax.grad(lambda x: module.log_softmax(x)[1])(x)
                np.testing.assert_allclose(gradient, [-p[0], q, -p[2]], rtol=1e-5)
            t = jnp.array([0.0, 1.0, 0.0], dtype)
            tangent = jax.jvp(jaxgpuops.lax.log_softmax, (x,), (t,))[1]
            np.testing.assert_allclose(tangent, [-1, q, -1], rtol=1e-5)
            tangent = jax.jvp(jaxgpuops.lax.softmax, (x,), (t,))[1]
            np.testing.assert_allclose(tangent, [-p[0], q, -p[2]], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_gradient_of_pairs_that_is_left_to_xla_on_a_gpu(name, dtype):
    far, large = (11, 1e4) if dtype == "float16" else (40, 1e30)
    x = np.array([[0, 0], [3, far], [far, 3], [-INF, 3], [3, -INF], [large, 1], [-300, -301.5]], dtype)
    ct = np.array([[1, -2], [0, 1], [0, 1], [1, 2], [1, 2], [5, 7], [0.25, 3]], dtype)
    p = np.exp(x.astype(float) - x.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    own = ct * p[:, ::-1] * (p if name == "softmax" else 1)
    expected = own - own[:, ::-1]
    with jax.enable_x64(dtype == "float64"):
        for axis in (1, 0):  # rows, and columns
            kernel = getattr(softmax_primitives, f"{name}_jvp_p")
            params = {"axis": axis, "factor": 1.0, "scaled": False, "of_logits": True}
            if name == "log_softmax":
                params |= {"masked": False, "query_axis": None, "transpose": True}
            turned = lambda a, axis=axis: jnp.asarray(a if axis == 1 else a.T)
            left = lambda x, ct, kernel=kernel, params=params: jax.jit(
                lambda x, ct: kernel.left(ct, getattr(jax.nn, name)(x, params["axis"]), x, **params)[0]
            )(x, ct)
            gradient = left(turned(x), turned(ct))
            assert gradient.dtype == dtype
            rtol = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
            np.testing.assert_allclose(gradient, turned(expected), rtol=rtol, atol=1e-7 if dtype == "float16" else 0)
            for row in ([-INF, -INF], [INF, 1], [NAN, 1]):
                x_of_row = turned(np.array([row], dtype))
                assert np.all(np.isnan(left(x_of_row, x_of_row)))
            if name == "softmax":  # an infinite cotangent does not count where the probability is 0
                assert np.all(left(turned(np.array([[-INF, 1]], dtype)), turned(np.array([[INF, 1]], dtype))) == 0)


@tiers
def test_gradient_of_logsumexp_of_nothing_is_0(paths, module):
    x = jnp.array([[-INF, -INF], [0.0, -INF]])
    gradient = jax.grad(lambda x: module.logsumexp(x).sum())
    assert gradient(x).tolist() == [[0.0, 0.0], [1.0, 0.0]]
    assert gradient(jnp.zeros((2, 0))).shape == (2, 0)
    masked = jax.grad(lambda x: module.logsumexp(x, where=jnp.zeros(2, bool)).sum())
    assert masked(jnp.array([NAN, INF])).tolist() == [0.0, 0.0]
    second = jax.hessian(lambda x: module.logsumexp(x).sum())(x)
    assert np.all(np.asarray(second) == 0)


@tiers
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_masked_entries_are_0(paths, module, name):
    """Masked entries have no gradient, whatever they hold and whatever their cotangents are, also to second order."""
    where = np.array([[True, False, True, False], [False, False, False, False], [True, True, True, True]])
    ct = np.full(3 if name == "logsumexp" else (3, 4), 1.5, np.float32)
    if name != "logsumexp":
        ct = np.where(where, ct, NAN if name == "softmax" else INF).astype(np.float32)
    fn = lambda x: getattr(module, name)(x, where=where)
    total = lambda x: (jnp.where(jnp.isfinite(y := fn(x)), y, 0) ** 2).sum()

    @jax.jit
    def results(x):
        y, pull = jax.vjp(fn, x)
        return y, pull(ct)[0], jax.hessian(total)(x)

    x = np.arange(12, dtype=np.float32).reshape(3, 4) / 4
    good = results(np.where(where, x, 0))
    for bad in (NAN, INF, -INF, 1e30):
        y, gradient, second = map(np.asarray, results(np.where(where, x, np.float32(bad))))
        np.testing.assert_array_equal(y, good[0])
        np.testing.assert_array_equal(gradient, good[1])
        assert np.all(gradient[~where] == 0)
        assert np.all(second[~where] == 0) and np.all(second[:, :, ~where] == 0)


# ---- Large logits ----------------------------------------------------------------------------------------------------


def derivatives(module, fn, x, ct, t, arrays):
    """The value, the gradient, and the tangent where there is one."""
    fn = functools.partial(fn, **arrays)
    y, pull = jax.vjp(fn, x)
    return y, pull(ct.astype(y.dtype))[0], jax.jvp(fn, (x,), (t,))[1] if module is jaxgpuops.lax else None


def relative_error(reference):
    """The relative error of probabilities that are computed again from the maximum and the logarithm of the sum: that
    of the exponent, and 4 units for the second exponential and the products."""
    return reference._exponent() + 4 * scan_reference.eps(reference.dtype)


@tiers_and_paths
@pytest.mark.parametrize("dtype", FLOATS[:2] + FLOATS[3:], ids=str)
def test_derivatives_of_logsumexp_at_large_logits(paths, module, dtype):
    rng = np.random.default_rng(0)
    wide = np.longdouble
    where = rng.random((4, 7, 50)) < 0.8
    scale = np.full((4, 1, 1), 0.5, np.float64 if dtype == np.float64 else np.float32)
    ct, t = rng.standard_normal((4, 7)).astype(dtype), rng.standard_normal((4, 7, 50)).astype(dtype)
    for kind in ({}, {"where": where}, {"bias": ...}, {"scale": 0.5, "causal": True}, {"scale": scale, "where": where}):
        numbers, factor = {k: v for k, v in numbers_of(kind).items() if v is not ...}, 0.5 if "scale" in kind else 1
        run = jax.jit(functools.partial(derivatives, module, functools.partial(module.logsumexp, **numbers)))
        for size in SIZES:
            x, unit = large(rng, size, dtype, (4, 7, 50))
            z, arrays = x * dtype.type(factor), arrays_of(kind)
            if "bias" in kind:
                arrays = {"bias": (unit * rng.integers(-9, 9, (7, 1))).astype(dtype)}
                z = x + arrays["bias"]
            reference = Logits(z.astype(dtype), 2, where=kind.get("where"), causal=kind.get("causal", False))
            p, off = reference.softmax(), relative_error(reference)
            with x64(dtype):
                y, gradient, tangent = run(x, ct, t, arrays)
            assert_close(y, reference.logsumexp(), reference.logsumexp_bound())
            expected = factor * p * ct.astype(wide)[..., None]
            bound = off * abs(expected) + scan_reference.rounding(dtype, expected) + tiny(dtype)
            assert_close(gradient, expected, bound)
            if tangent is not None:
                terms = factor * p * t.astype(wide)
                # A sum of 50 numbers, in any order.
                bound = ((off + 50 * scan_reference.eps(dtype)) * abs(terms)).sum(-1)
                bound = bound + 2 * scan_reference.rounding(dtype, bound + abs(terms.sum(-1)))
                assert_close(tangent, terms.sum(-1), bound)


@tiers_and_paths
@pytest.mark.parametrize("dtype", FLOATS[:2] + FLOATS[3:], ids=str)
def test_cross_entropy_at_large_logits(paths, module, dtype):
    rng = np.random.default_rng(0)
    labels, where, eps = rng.integers(0, 50, 6), np.arange(6) != 2, scan_reference.eps(dtype)
    ct, t = rng.standard_normal(6).astype(np.float32), rng.standard_normal((6, 50)).astype(dtype)
    for options in OPTIONS:
        fn = functools.partial(module.softmax_cross_entropy, labels=labels, where=where, **options)
        run = jax.jit(functools.partial(derivatives, module, fn))
        smoothing, z_loss = (options.get(name, 0) for name in ("label_smoothing", "z_loss"))
        for size in SIZES[:-1] if z_loss else SIZES:  # the square of the last is infinite
            logits, _ = large(rng, size, dtype, (6, 50))
            reference = Logits(logits, 1)
            p, off = reference.softmax(), relative_error(reference)
            loss, lse, slope = cross_entropy(logits, labels, -1, where, **options)
            with x64(dtype):
                actual, gradient, tangent = run(logits, ct, t, {})
            # Only the mean of the logits and the square of lse are large, and lose what numbers of their size lose.
            bound = 2 * reference._exponent().max(-1) + 4 * eps * abs(loss)
            bound += 8 * eps * (smoothing * abs(logits.astype(np.longdouble)).max(-1) + z_loss * lse**2)
            assert_close(actual, loss, bound)
            # The error of each entry: of p, of the weight that z_loss gives it, and of the numbers that are subtracted.
            pull = 1 + 2 * z_loss * abs(lse)[:, None]
            terms = p * pull + smoothing + abs(slope)
            expected = ct.astype(np.longdouble)[:, None] * slope
            bound = abs(ct[:, None]) * ((off + 4 * eps) * terms + tiny(dtype) * pull)
            bound = bound + scan_reference.rounding(dtype, expected) + tiny(dtype)
            assert_close(gradient, expected, bound)
            if tangent is not None:
                expected = (slope * t.astype(np.longdouble)).sum(-1)
                assert_close(tangent, expected, ((off + 54 * eps) * terms * abs(t.astype(np.longdouble))).sum(-1))


@tiers
def test_second_derivatives_at_large_logits(paths, module):
    rng = np.random.default_rng(0)
    for size in SIZES:
        x, _ = large(rng, size, np.dtype(np.float32), (6,))
        reference = Logits(x, 0)
        p, off = reference.softmax(), relative_error(reference)
        expected = np.diag(p) - np.outer(p, p)
        bound = 3 * np.maximum.outer(off, off) * (np.diag(p) + np.outer(p, p)) + tiny(np.float32)
        for fn in (module.logsumexp, lambda x: module.softmax_cross_entropy(x, np.array(2))):
            for second in (jax.hessian(fn), jax.jacrev(jax.grad(fn))):
                assert_close(jax.jit(second)(x), expected, bound)


# ---- Finite differences, transposes ----------------------------------------------------------------------------------


@tiers
@pytest.mark.parametrize("name", [*NAMES, "softmax_cross_entropy"])
def test_finite_differences(module, name):
    rng = np.random.default_rng(0)
    function = getattr(module, name)
    with jax.enable_x64(True):
        x, scale, bias = rng.standard_normal((2, 3, 4)), rng.uniform(0.5, 2, (2, 1, 1)), rng.standard_normal((3, 1))
        where, labels, rows = rng.random((1, 4)) < 0.7, rng.integers(0, 4, (2, 3)), rng.random((2, 1)) < 0.7

        def all_operands(x, scale, bias):
            y = function(x, scale=scale, bias=bias, where=where, causal=True)
            return jnp.where(jnp.isfinite(y), y, 0)

        checks = [(all_operands, (x, scale, bias)), (lambda x: function(x, scale=-1.5, axis=1), (x,))]
        if name == "softmax_cross_entropy":
            fused = functools.partial(function, labels=labels, where=rows, z_loss=0.3, reduction="mean")
            checks = [(lambda x: function(x, labels), (x,)), (lambda x: fused(x, label_smoothing=0.1), (x,))]
        modes = ("fwd", "rev") if module is jaxgpuops.lax else ("rev",)
        for order, (fn, args) in zip((2, 1), checks, strict=True):
            jax.test_util.check_grads(jax.jit(fn), args, order=order, modes=modes, atol=1e-6, rtol=1e-6)


def test_derivatives_are_the_transposes_of_each_other(paths):
    rng = np.random.default_rng(0)
    x, t, g = (rng.standard_normal((3, 40)).astype(np.float32) for _ in range(3))
    where = rng.random((3, 40)) < 0.8
    for name in ("softmax", "log_softmax"):
        fn = functools.partial(getattr(jaxgpuops.lax, name), where=where, scale=0.5)
        tangent = jax.jvp(fn, (x,), (t,))[1]
        [cotangent] = jax.vjp(fn, x)[1](g)
        np.testing.assert_allclose(
            np.sum(np.asarray(tangent) * np.where(where, g, 0)), np.sum(np.asarray(cotangent) * t), rtol=1e-4
        )


# ---- Memory ----------------------------------------------------------------------------------------------------------


def temporary_bytes(fn, *args, donate=()):
    memory = jax.jit(fn, donate_argnums=donate).lower(*args).compile().memory_analysis()
    return memory.temp_size_in_bytes, memory.alias_size_in_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reduction", [None, "sum", "mean"])
def test_gradient_of_cross_entropy_needs_no_further_array(dtype, reduction):
    """The gradient takes the place of the logits, and no other array is as large."""
    rows, n = 1 << 15, 1024  # compiled, not run; on a GPU small arrays do not take each other's place
    logits, labels = jax.ShapeDtypeStruct((rows, n), dtype), jax.ShapeDtypeStruct((rows,), np.int32)
    size = rows * n * logits.dtype.itemsize

    def gradient(logits, labels):
        fn = lambda x: jaxgpuops.softmax_cross_entropy(x, labels, label_smoothing=0.1, reduction=reduction).sum()
        return jax.value_and_grad(fn)(logits)

    temporary, aliased = temporary_bytes(gradient, logits, labels, donate=(0,))
    assert temporary < size / 8 and aliased >= size
    # Logits that are not donated stay, and the gradient has memory of its own.
    temporary, _ = temporary_bytes(gradient, logits, labels)
    assert temporary < size / 8

    # Logits that the program computes.
    def layer(weights, x, labels):
        fn = lambda w: jaxgpuops.softmax_cross_entropy(x @ w, labels, reduction=reduction).sum()
        return jax.grad(fn)(weights)

    arrays = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((8, n), (rows, 8)))
    temporary, _ = temporary_bytes(layer, *arrays, labels)
    # A CPU multiplies matrices of 16 bits as float32.
    assert temporary < size * (1.5 if dtype == "float32" else 6)


def test_the_two_tiers_keep_the_same_residuals():
    x, labels = jnp.zeros((64, 256)), jnp.zeros(64, int)
    for fn in (
        lambda module, x: module.softmax_cross_entropy(x, labels),
        lambda module, x: module.logsumexp(x),
        lambda module, x: module.softmax(x),
        lambda module, x: module.log_softmax(x, scale=2.0),
    ):
        residuals = [
            sum(a.nbytes for a in jax.tree.leaves(jax.vjp(functools.partial(fn, module), x)[1]))
            for module in TIERS.values()
        ]
        assert max(residuals) <= 3 * x.nbytes


# ---- Errors ----------------------------------------------------------------------------------------------------------


def test_forward_mode_is_refused_with_a_reason():
    for fn in (
        jaxgpuops.softmax,
        jaxgpuops.logsumexp,
        lambda x: jaxgpuops.softmax_cross_entropy(x, np.zeros(3, int)),
        lambda x: jaxgpuops.softmax_cross_entropy(x, np.zeros(3, int), reduction="sum"),
    ):
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(fn, (X,), (X,))


def test_gradients_make_the_result_again(cuda_build):
    """On a GPU small gradients, and those of rows that no cluster holds and of columns that blocks hold, are made from x, so
    that XLA drops the forward kernel if nothing else needs its result. So are those of rows of log_softmax of any
    size."""
    shaped = lambda *shape, dtype="float32": jax.ShapeDtypeStruct(shape, dtype)

    def from_x(fn, x, beside=True):
        def gradient(x, ct):
            y, pull = jax.vjp(fn, x)
            return (y + ct if beside else None), pull(ct)

        *_, backward = jaxgpuops.explain(gradient, x, x, platform="cuda")
        return backward.params.get("of_logits", False)

    for name in ("softmax", "log_softmax"):
        fn = getattr(jaxgpuops, name)
        for dtype, size in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
            for n in (
                2,
                3,
                2048 // size,
                (32 << 10) // size + 1,
                (1 << 20) // size,
                (1 << 20) // size + 1,
            ):
                assert from_x(fn, shaped(7, n, dtype=dtype))
                assert from_x(jax.vmap(fn), shaped(2, 7, n, dtype=dtype))
            # Rows that are not whole vectors are added up in another order in the forward pass: the size does not matter.
            for rows, n in itertools.product((7, 10_000), (512 // size + 1, 2048 // size + 1, (28 << 10) // size - 1)):
                assert from_x(fn, shaped(rows, n, dtype=dtype)) == (name == "log_softmax")
                assert from_x(fn, shaped(rows, n, dtype=dtype), beside=False)
            # What is too large is not kept if something else reads the result.
            for n in (2048 // size + 1, (32 << 10) // size + 8):
                assert from_x(fn, shaped(10_000, n, dtype=dtype)) == (name == "log_softmax")
                assert from_x(fn, shaped(10_000, n, dtype=dtype), beside=False)
            for n, inner in ((3, 2), (24, 8), (512, 9)):
                assert from_x(functools.partial(fn, axis=0), shaped(n, inner, dtype=dtype))
            assert not from_x(functools.partial(fn, axis=0), shaped(25, 8, dtype=dtype))
        assert from_x(fn, shaped((1 << 16) + 1, 64)) == (name == "log_softmax")
        assert from_x(fn, shaped(1 << 21, 16)) and from_x(fn, shaped(1 << 21, 32, dtype="bfloat16"))
        assert from_x(fn, shaped((1 << 21) + 1, 16)) == (name == "log_softmax")
        assert from_x(fn, shaped(1 << 20, 15)) == (name == "log_softmax")
        assert from_x(fn, shaped(1 << 18, 15)) and from_x(fn, shaped(1 << 22, 7))
        for n in (17, 29):  # aligned rows of 16 bits are faster from x, and few others
            assert from_x(fn, shaped(1 << 15, n, dtype="bfloat16"))
            assert not from_x(fn, shaped(1 << 17, n, dtype="bfloat16"))
        assert from_x(fn, shaped(1 << 12, 1 << 19))  # long rows have the same bits in any batch
        least = {
            ("float32", 128): (2, 4),
            ("bfloat16", 256): (2, 4),
            ("float32", 512): (3, 8),
            ("float16", 1 << 18): (3,),
        }
        for (dtype, size), inners in least.items():
            for outer, inner in itertools.product((1, 5000), inners):
                n = -(-size // inner)
                assert from_x(functools.partial(fn, axis=1), shaped(outer, n, inner, dtype=dtype))
                assert not from_x(functools.partial(fn, axis=1), shaped(outer, n - 1, inner, dtype=dtype))
        with jax.enable_x64(True):
            for n, is_short in ((3, True), (256, True), (257, True), (1 << 16, True), ((1 << 16) + 1, False)):
                assert from_x(fn, shaped(7, n, dtype="float64")) == is_short
            assert from_x(fn, shaped(5000, 32, dtype="float64"))
            assert from_x(fn, shaped(10_000, 1025, dtype="float64"), beside=False)
            for n, is_short in ((3, True), (16, True), (17, False), (1 << 14, False)):
                assert from_x(functools.partial(fn, axis=1), shaped(1, n, 2, dtype="float64")) == is_short
        for n in (513, 1 << 20):  # blocks hold the parts of columns, if they are not too long
            assert from_x(functools.partial(fn, axis=0), shaped(n, 9)) == (n == 513)
            for options in ({"scale": 2.0}, {"bias": jnp.zeros(n)}, {"where": jnp.ones(n, bool)}, {"causal": True}):
                assert not from_x(functools.partial(fn, **options), shaped(7, n))
            assert not from_x(getattr(jaxgpuops.lax, name), shaped(7, n))
