"""Values of cross-entropy, its gradients and errors."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import ml_dtypes
import numpy as np
import pytest
import scan_reference
from reference import assert_close, x64
from softmax_reference import cross_entropy
from test_softmax import FLOATS, INF, NAN, TIERS, X, tiers

import jaxgpuops


def check_cross_entropy(logits, labels, axis=-1, where=None, module=jaxgpuops, **options):
    loss, _, slope = cross_entropy(logits, labels, axis, where, **options)
    fn = functools.partial(module.softmax_cross_entropy, axis=axis, where=where, **options)
    eps = scan_reference.eps(logits.dtype)
    size = 1 + np.nan_to_num(abs(logits.astype(np.longdouble)), posinf=0).max(initial=0)
    off = eps * (64 + 4 * size) * (1 + options.get("z_loss", 0) * 8 * size)
    with x64(logits.dtype):
        ct = np.random.default_rng(1).standard_normal(loss.shape).astype(np.float32)

        @jax.jit
        def results(logits):
            losses, pull = jax.vjp(lambda logits: fn(logits, labels), logits)
            sums = [functools.partial(fn, labels=labels, reduction=reduction) for reduction in ("sum", "mean")]
            both = [(jax.value_and_grad(total)(logits), total(logits)) for total in sums]
            return losses, pull(ct.astype(losses.dtype))[0], both

        actual, of_losses, sums = results(logits)
        assert actual.dtype == (np.float64 if logits.dtype == np.float64 else np.float32)
        assert_close(actual, loss, off * (1 + abs(np.nan_to_num(loss))))
        expected = slope * np.expand_dims(ct.astype(np.longdouble), axis)
        size = 1 + np.expand_dims(abs(ct), axis)
        bound = off * abs(np.nan_to_num(expected)) + off * 1e-2 * size
        bound = bound + 2 * scan_reference.rounding(logits.dtype, expected)
        assert_close(of_losses, expected, bound)
        rows = max(1, loss.size if where is None else np.broadcast_to(where, loss.shape).sum())
        for weight, ((total, gradient), alone) in zip((1, 1 / np.longdouble(rows)), sums, strict=True):
            assert total.dtype == actual.dtype and gradient.dtype == logits.dtype
            limit = off * weight * (loss.size + abs(np.nan_to_num(loss)).sum())
            assert_close(np.asarray(total), np.asarray(loss.sum() * weight), limit)
            np.testing.assert_allclose(alone, total, rtol=1e-6)
            bound = off * weight * (1e-2 + abs(np.nan_to_num(slope)))
            bound = bound + 2 * scan_reference.rounding(logits.dtype, slope * weight)
            assert_close(gradient, slope * weight, bound)


OPTIONS = [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"label_smoothing": 1.0, "z_loss": 0.1}]


@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_any_cross_entropy(data):
    shape = data.draw(scan_reference.SHAPES)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = (3 * rng.standard_normal(shape)).astype(data.draw(st.sampled_from(FLOATS)))
    rows = tuple(np.delete(shape, axis))
    labels = rng.integers(0, shape[axis], rows)
    where = rng.random(rows) < 0.7 if data.draw(st.booleans()) else None
    if where is not None:
        labels = np.where(where, labels, -100)
        logits = np.where(np.expand_dims(where, axis), logits, np.array(NAN, logits.dtype))
    options = data.draw(st.sampled_from(OPTIONS))
    check_cross_entropy(logits, labels.astype(data.draw(st.sampled_from(["int32", "int16"]))), axis, where, **options)


@pytest.mark.parametrize("n", [1, 2, 1000, 32000, 50257])
def test_vocabularies(n):
    rng = np.random.default_rng(0)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        check_cross_entropy((2 * rng.standard_normal((3, n))).astype(dtype), rng.integers(0, n, 3))


@pytest.mark.parametrize("n", [1, 2, 10, 25, 65])
def test_many_short_rows(n):
    """There are more rows than one strip has, and the last strip is not full. Each row has the bits that it has
    alone."""
    rng = np.random.default_rng(0)
    x = 4 * rng.standard_normal((2100, n)).astype(np.float32)
    labels, rows = rng.integers(0, n, 2100), rng.random(2100) < 0.8
    for dtype, options in zip((np.float32, ml_dtypes.bfloat16, np.float32, np.float64), OPTIONS, strict=True):
        check_cross_entropy(x.astype(dtype), np.where(rows, labels, -1), where=rows, **options)
    x3, where, labels3 = x.reshape(700, n, 3), rows.reshape(700, 3), labels.reshape(700, 3)  # three side by side
    check_cross_entropy(x3, np.where(where, labels3, -1), axis=1, where=where, **OPTIONS[1])
    loss = jax.jit(lambda x, label: jax.value_and_grad(jaxgpuops.softmax_cross_entropy)(x, label, reduction="sum")[1])
    np.testing.assert_array_equal(loss(x, labels)[-3:], loss(x[-3:], labels[-3:]))


def test_labels_that_are_no_class(paths):
    logits = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
    labels = np.array([-1, 5, 4, 2**31 - 1, -(2**31), 0])
    check_cross_entropy(logits, labels.astype(np.int32))
    check_cross_entropy(logits, labels.astype(np.int32), label_smoothing=0.1, z_loss=0.01)
    with jax.enable_x64(True):
        loss = jaxgpuops.softmax_cross_entropy(logits, np.array([1 << 32, 4, -(1 << 32), (1 << 32) + 1, 0, 1]))
        assert np.isnan(loss).tolist() == [True, False, True, True, False, False]
    loss = jaxgpuops.softmax_cross_entropy(logits[:2], np.array([2**32 - 1, 1], np.uint32))
    assert np.isnan(loss).tolist() == [True, False]
    for dtype in ("int8", "uint32"):
        np.testing.assert_array_equal(
            jaxgpuops.softmax_cross_entropy(logits, np.arange(6).astype(dtype) % 5),
            jaxgpuops.softmax_cross_entropy(logits, np.arange(6) % 5),
        )


def test_rows_that_do_not_count(paths):
    logits = np.array([[1.0, 2.0], [NAN, INF], [3.0, 1.0]], np.float32)
    labels, where = np.array([0, 7, 1]), np.array([True, False, True])
    fn = functools.partial(jaxgpuops.softmax_cross_entropy, labels=labels, where=where)
    assert fn(logits)[1] == 0
    for reduction in ("sum", "mean"):
        gradient = np.asarray(jax.grad(functools.partial(fn, reduction=reduction))(logits))
        assert gradient[1].tolist() == [0.0, 0.0] and np.isfinite(gradient).all()
    np.testing.assert_allclose(fn(logits, reduction="mean"), np.asarray(fn(logits))[[0, 2]].mean(), rtol=1e-6)
    nothing = functools.partial(fn, where=np.zeros(3, bool), reduction="mean")
    assert nothing(logits) == 0 and np.all(np.asarray(jax.grad(nothing)(logits)) == 0)
    shared = jaxgpuops.softmax_cross_entropy(
        np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), int), where=np.array([True, False, True]), reduction="mean"
    )
    np.testing.assert_allclose(shared, np.log(4), rtol=1e-6)


def test_infinite_logits_of_cross_entropy(paths):
    logits = np.array([[0.0, -INF, 1.0], [0.0, INF, 1.0], [-INF, -INF, -INF], [NAN, 0.0, 0.0]], np.float32)
    for label in range(3):
        labels = np.full(4, label)
        log_p = np.asarray(jax.nn.log_softmax(logits))[:, label]
        loss = np.asarray(jaxgpuops.softmax_cross_entropy(logits, labels))
        np.testing.assert_allclose(loss[0], -log_p[0], rtol=1e-6)
        assert not np.isfinite(loss[1:]).any() and np.isnan(loss[2:]).all()
        gradients = [
            jax.grad(lambda x: jaxgpuops.softmax_cross_entropy(x, labels).sum())(logits),
            jax.grad(lambda x: jaxgpuops.softmax_cross_entropy(x, labels, reduction="sum"))(logits),
        ]
        np.testing.assert_allclose(*gradients, rtol=1e-6)
        assert np.isfinite(gradients[0][0]).all() and np.isnan(gradients[0][1:]).all()


def test_reductions_are_reductions_of_losses():
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((50, 20)).astype(np.float32), rng.integers(0, 20, 50)
    where = rng.random(50) < 0.5
    loss = np.asarray(jaxgpuops.softmax_cross_entropy(logits, labels, where=where))
    for module in TIERS.values():
        fn = functools.partial(module.softmax_cross_entropy, logits, labels, where=where)
        np.testing.assert_allclose(fn(reduction="sum"), loss.sum(), rtol=1e-6)
        np.testing.assert_allclose(fn(reduction="mean"), loss[where].mean(), rtol=1e-6)


@tiers
def test_cross_entropy_without_classes(module, paths):
    """No label is a class, so losses are NaN; there is nothing that could have a gradient."""
    for reduction in (None, "mean"):
        loss = functools.partial(
            module.softmax_cross_entropy, labels=np.zeros(3, int), label_smoothing=0.1, z_loss=0.1, reduction=reduction
        )
        value, gradient = jax.value_and_grad(lambda x, loss=loss: loss(x).sum())(np.zeros((3, 0), np.float32))
        assert np.isnan(value) and gradient.shape == (3, 0)


WRONG_CROSS_ENTROPY = {
    "logits dtype": (TypeError, {"logits": np.zeros((3, 4), int)}, "logits has dtype int"),
    "labels dtype": (TypeError, {"labels": np.zeros(3)}, "labels has dtype float32; allowed are int16"),
    "labels shape": (ValueError, {"labels": np.zeros((3, 1), int)}, r"labels must have shape \(3,\).* got \(3, 1\)"),
    "axis": (ValueError, {"axis": 2}, "axis must be between -2 and 1 for logits"),
    "where": (ValueError, {"where": np.zeros((3, 4), bool)}, r"where must broadcast to shape \(3,\)"),
    "label_smoothing": (ValueError, {"label_smoothing": 1.5}, "label_smoothing must be between 0 and 1, got 1.5"),
    "label_smoothing type": (TypeError, {"label_smoothing": "0"}, "label_smoothing must be a number known at trace"),
    "z_loss": (ValueError, {"z_loss": -1}, "z_loss must be a number not below 0, got -1"),
    "reduction": (ValueError, {"reduction": "max"}, "reduction must be None, 'sum' or 'mean', got 'max'"),
}  # fmt: skip


@tiers
@pytest.mark.parametrize("error, arguments, message", WRONG_CROSS_ENTROPY.values(), ids=WRONG_CROSS_ENTROPY)
def test_errors_of_cross_entropy(module, error, arguments, message):
    op = "jaxgpuops." if module is jaxgpuops else "jaxgpuops.lax."
    with pytest.raises(error, match=f"{op}softmax_cross_entropy: {message}"):
        module.softmax_cross_entropy(**({"logits": X, "labels": np.zeros(3, int)} | arguments))


@pytest.mark.parametrize("module", [jaxgpuops, jaxgpuops.lax])
@pytest.mark.parametrize("reduction", [None, "sum"])
def test_second_derivatives_where_the_first_are_zero(module, reduction):
    """Equal logits with labels that are smoothed to equal ones: the gradient is 0, but not its derivative."""
    z = np.zeros((2, 4), np.float32)

    def loss(z):
        labels = np.array([1, 3])
        return module.softmax_cross_entropy(z, labels, label_smoothing=1.0, reduction=reduction).sum()

    assert not jax.grad(loss)(z).any()
    wanted = jax.hessian(lambda z: jax.nn.logsumexp(z, 1).sum())(z)
    for hessian in (jax.hessian(loss), jax.jacrev(jax.grad(loss))):
        np.testing.assert_allclose(jax.jit(hessian)(z), wanted, atol=1e-6)


def test_rows_without_classes():
    """No label is a class then. The gradient has no elements, but the losses are written."""
    rows, where = np.zeros((3, 0), np.float32), np.array([True, False, True])
    total = functools.partial(jaxgpuops.softmax_cross_entropy, labels=np.zeros(3, np.int32), reduction="sum")
    for mask, expected in ((where, np.nan), (where & False, 0)):
        loss, gradient = jax.jit(jax.value_and_grad(functools.partial(total, where=mask)))(rows)
        np.testing.assert_array_equal(loss, expected)
        assert gradient.shape == rows.shape
    calls = jaxgpuops.explain(jax.value_and_grad(total), rows, platform="cuda")
    assert [call.kernel for call in calls] == [None]
