"""Lowerings of calls on each platform, for which no GPU is needed; explain, the log, and what importing does."""

import doctest
import functools
import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
import warnings

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgpuops
from jaxgpuops import _native, _primitive
from jaxgpuops.lax import _count as count
from jaxgpuops.lax import _segments as segments
from jaxgpuops.lax.along_axis import put_along_axis, take_along_axis

SHAPE = (3, 5, 4)


def shape_of(shape=SHAPE, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def lowered(fn, *args, platforms):
    return jax.jit(lambda *args: fn(*args)).trace(*args).lower(lowering_platforms=platforms).as_text()


def custom_calls(text):
    return re.findall(r"custom_call @(jaxgpuops\.\w+)", text)


def mask(x, axis):
    """Segment starts, the same for all rows."""
    return np.expand_dims(np.arange(x.shape[axis]) % 2 == 0, [d for d in range(x.ndim) if d != axis])


LABELS = [np.zeros((*SHAPE[:axis], *SHAPE[axis + 1 :]), np.int32) for axis in range(3)]
REDUCTIONS = {"argmax", "argmin", "logsumexp", "softmax_cross_entropy", "sum", "lax.max", "dot"}

# op -> its target, and a function of x and an axis
OPS = {
    "topk": ("jaxgpuops.topk", lambda x, axis: jaxgpuops.topk(x, 2, axis=axis)),
    "lax.top_k": ("jaxgpuops.topk", lambda x, axis: jaxgpuops.lax.top_k(x, 2, axis=axis)),
    "argmax": ("jaxgpuops.argmax", lambda x, axis: jaxgpuops.lax.argmax(x, axis, np.int32)),
    "argmin": ("jaxgpuops.argmax", lambda x, axis: jaxgpuops.lax.argmin(x, axis, np.int32)),
    "take": ("jaxgpuops.take_along_axis", lambda x, axis: take_along_axis(x, x.astype(np.int32), axis)),
    "put": ("jaxgpuops.put_along_axis", lambda x, axis: put_along_axis(x, x.astype(np.int32), axis, 9)),
    "topk_softmax": ("jaxgpuops.topk_softmax", lambda x, axis: jaxgpuops.topk_softmax(x, 2, axis=axis)),
    "lax.topk_softmax": ("jaxgpuops.topk_softmax", lambda x, axis: jaxgpuops.lax.topk_softmax(x, 2, axis=axis)),
    "cumsum": ("jaxgpuops.cumsum", lambda x, axis: jaxgpuops.cumsum(x, axis=axis, segment_starts=mask(x, axis))),
    "lax.cummax": ("jaxgpuops.cummax", lambda x, axis: jaxgpuops.lax.cummax(x, axis, reverse=True)),
    "linear_scan": ("jaxgpuops.linear_scan", lambda x, axis: jaxgpuops.linear_scan(0.5, x, axis=axis)),
    "softmax": (
        "jaxgpuops.softmax",
        lambda x, axis: jaxgpuops.softmax(x, axis=axis, where=mask(x, axis), bias=mask(x, 0) * 1.0, scale=2.0),
    ),
    "lax.log_softmax": ("jaxgpuops.log_softmax", lambda x, axis: jaxgpuops.lax.log_softmax(x, axis=axis)),
    "logsumexp": ("jaxgpuops.logsumexp", lambda x, axis: jaxgpuops.logsumexp(x, axis=axis, scale=jnp.full(1, 2.0))),
    "softmax_cross_entropy": (
        "jaxgpuops.cross_entropy",
        lambda x, axis: jaxgpuops.softmax_cross_entropy(x, LABELS[axis], axis=axis),
    ),
    "sum": ("jaxgpuops.sum", lambda x, axis: jaxgpuops.sum(x, axis=axis, where=mask(x, axis))),
    "lax.max": ("jaxgpuops.max", lambda x, axis: jaxgpuops.lax.max(x, axis=axis)),
    "dot": ("jaxgpuops.dot", lambda x, axis: jaxgpuops.dot(x, x, axis=axis)),
    "bincount": ("jaxgpuops.bincount", lambda x, axis: count.bincount(x.astype(np.int32), axis, 9)),
    "searchsorted": ("jaxgpuops.searchsorted", lambda x, axis: jaxgpuops.searchsorted(x, x, axis=axis)),
    "segment_sum": (
        "jaxgpuops.segment_sum",
        lambda x, axis: segments.segments(segments.segment_sum_p, x, mask(x, axis).astype(np.int32), axis, 5, False),
    ),
    "lax.linear_scan": ("jaxgpuops.linear_scan", lambda x, axis: jaxgpuops.lax.linear_scan(x, x, 1.0, axis=axis)),
}


def batched(fn, op, axis, batch):
    """vmap over dimension `batch`. The batch dimension of the result is where it then is, so that nothing needs to
    move."""
    out = batch - 1 if op in REDUCTIONS and batch > axis else batch
    return jax.vmap(functools.partial(fn, axis=axis), in_axes=batch, out_axes=out)


# ---- No copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("op", OPS)
def test_cuda_lowering_is_one_custom_call(cuda, op, axis):
    target, fn = OPS[op]
    text = lowered(functools.partial(fn, axis=axis), shape_of(), platforms=("cuda",))
    assert custom_calls(text) == [target]
    assert "stablehlo.transpose" not in text
    for batch in range(4):
        text = lowered(batched(fn, op, axis, batch), shape_of((*SHAPE[:batch], 6, *SHAPE[batch:])), platforms=("cuda",))
        assert custom_calls(text) == [target]
        assert "stablehlo.transpose" not in text


def test_a_mean_is_one_call(cuda):
    """The kernel divides by the length. With a mask, XLA counts the elements that it takes, and divides."""
    x = jnp.ones((3, 5), jnp.bfloat16)
    for fn in (jaxgpuops.mean, jaxgpuops.lax.mean, jax.vmap(jaxgpuops.mean)):
        text = lowered(fn, x, platforms=("cuda",))
        assert text.count("stablehlo.custom_call") == 1 and "divisor = 5" in text, text
        assert "stablehlo.multiply" not in text and "stablehlo.divide" not in text, text
    text = lowered(lambda x: jaxgpuops.mean(x, where=x > 0), x, platforms=("cuda",))
    assert "divisor = 1" in text and "stablehlo.divide" in text, text


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("op", OPS)
def test_compiled_program_has_no_copy(kernels, op, axis):
    target, fn = OPS[op]
    shape = (*SHAPE[:axis], 8, *SHAPE[axis + 1 :])  # on the CPU, the shortest rows have no kernel
    for batch in range(4):
        x = shape_of((*shape[:batch], 6, *shape[batch:]))
        hlo = jax.jit(batched(fn, op, axis, batch)).lower(x).compile().as_text()
        assert f'custom_call_target="{target}"' in hlo
        assert not re.search(r"\b(copy|transpose)(-start)?\(", hlo)


@pytest.mark.parametrize("axis", range(3))
def test_gradient_is_one_kernel_each_way(cuda, axis):
    pull_back = lambda x, ct: jax.vjp(lambda x: jaxgpuops.topk(x, 2, axis=axis).values, x)[1](ct)
    ct_shape = (*SHAPE[:axis], 2, *SHAPE[axis + 1 :])
    for batch in range(4):
        x, ct = (shape_of((*shape[:batch], 6, *shape[batch:])) for shape in (SHAPE, ct_shape))
        text = lowered(jax.vmap(pull_back, in_axes=batch, out_axes=batch), x, ct, platforms=("cuda",))
        assert custom_calls(text) == ["jaxgpuops.topk", "jaxgpuops.put_along_axis"]
        assert "stablehlo.transpose" not in text and "scatter" not in text


@pytest.mark.parametrize("tokens, k, own", [(512, 8, False), (513, 8, True), (256, 16, False), (257, 16, True)])
def test_gradient_of_a_small_gate_has_no_kernel_of_its_own(cuda, tokens, k, own):
    pull_back = lambda x, ct: jax.vjp(lambda x: jaxgpuops.topk_softmax(x, k).weights, x)[1](ct)
    text = lowered(pull_back, shape_of((tokens, 128)), shape_of((tokens, k)), platforms=("cuda",))
    assert custom_calls(text) == ["jaxgpuops.topk_softmax", *(["jaxgpuops.put_along_axis"] if own else [])]


def scan_of(module, name):
    if name == "linear_scan":
        return lambda x: module.linear_scan(x, x, axis=1)
    return lambda x: getattr(module, name)(x, axis=1)


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "linear_scan"])
def test_gradient_of_a_scan_is_one_kernel_each_way(cuda, name):
    back = {"cumsum": "cumsum", "linear_scan": "linear_scan_vjp"}.get(name, f"{name}_jvp")
    for module in (jaxgpuops, jaxgpuops.lax):
        pull_back = lambda x, ct, module=module: jax.vjp(scan_of(module, name), x)[1](ct)
        forward = [] if name == "cumsum" else [f"jaxgpuops.{name}"]  # linear: nothing of it is needed
        for batch in range(4):
            x = shape_of((*SHAPE[:batch], 6, *SHAPE[batch:]))
            text = lowered(jax.vmap(pull_back, in_axes=batch, out_axes=batch), x, x, platforms=("cuda",))
            assert custom_calls(text) == [*forward, f"jaxgpuops.{back}"]
            assert "stablehlo.transpose" not in text and "scatter" not in text


@pytest.mark.parametrize("name", ["cumprod", "cummax", "cummin", "cumlogsumexp"])
def test_gradient_of_a_scan_is_made_of_x(cuda, name):
    """Its kernel does not read the result of the forward pass, so that XLA drops the kernel that made that. If
    something else reads it, only kernels of few elements do without it."""

    def operands(shape, beside=False, **options):
        def gradient(x, ct):
            y, pull_back = jax.vjp(functools.partial(getattr(jaxgpuops, name), axis=1, **options), x)
            return (y + ct if beside else None), pull_back(ct)

        text = lowered(gradient, shape_of(shape), shape_of(shape), platforms=("cuda",))
        [own] = re.findall(rf"custom_call @jaxgpuops\.{name}_jvp\(([^)]*)\)", text)
        return own.count("%")

    logs = name == "cumlogsumexp"  # it has no kernel of few elements
    for beside in (False, True):
        assert operands((7, 4, 3), beside) == 2 + (logs and beside)
        assert operands((9, 20), beside, reverse=True, exclusive=True) == 2 + logs
        assert operands((7, 33), beside, exclusive=True) == operands((3, 2049), beside) == 3
        for shape in ((7, 33), (3, 2048), (1 << 16, 4), (1 << 14, 31), (700, 12, 40), (2, 8192, 2)):
            assert operands(shape, beside) == 2 + beside
    assert operands((7, 4), segment_starts=np.ones((7, 4), bool)) == 4


def test_short_scans_of_16_bits_that_are_left_to_xla(cuda_build):
    """Kernels take those whose rows they load as vectors."""
    x, row, half = shape_of((500, 3), "bfloat16"), shape_of((3,), "bfloat16"), np.asarray(0.5, jnp.bfloat16)

    def is_left(fn, *args):
        return not any(call.kernel for call in jaxgpuops.explain(fn, *args, platform="cuda"))

    assert not is_left(jaxgpuops.cumsum, x) and not is_left(jaxgpuops.linear_scan, x, x)
    assert is_left(jaxgpuops.cumlogsumexp, x) and is_left(jaxgpuops.cumsum, shape_of((500, 3)))
    assert is_left(jaxgpuops.linear_scan, row, x) and is_left(jaxgpuops.linear_scan, x, x, shape_of((500,), "bfloat16"))
    scan = lambda x: jaxgpuops.linear_scan(half, x)
    assert is_left(scan, x) and is_left(lambda x, ct: jax.vjp(scan, x)[1](ct), x, x)
    assert is_left(lambda x: jaxgpuops.cumsum(x, segment_starts=np.array([True, False, True])), x)
    assert not is_left(scan, shape_of((500, 4), "bfloat16"))


@pytest.mark.parametrize("shape", [(111, 11), (7, 9, 5), (1, 5000, 3), (3, 1 << 20), (4, 60_000, 6), (2, 1 << 18, 3)])
def test_gradient_of_logsumexp_is_made_of_x(cuda_build, shape):
    pull_back = lambda x, ct: jax.vjp(functools.partial(jaxgpuops.logsumexp, axis=1), x)[1](ct)
    x, ct = shape_of(shape), shape_of((*shape[:1], *shape[2:]))
    text = lowered(pull_back, x, ct, platforms=("cuda",))
    own = re.findall(r"custom_call @jaxgpuops\.logsumexp_grad\(([^)]*)\)", text)
    read_twice = shape in ((1, 5000, 3), (3, 1 << 20), (4, 60_000, 6), (2, 1 << 18, 3))
    assert [operands.count("%") for operands in own] == [2] * (not read_twice)
    assert read_twice == ("stablehlo.exponential" in text)
    narrow = lowered(pull_back, x.update(dtype="bfloat16"), ct.update(dtype="bfloat16"), platforms=("cuda",))
    made_of_x = shape not in ((1, 5000, 3), (4, 60_000, 6))
    assert custom_calls(narrow) == ["jaxgpuops.logsumexp", "jaxgpuops.logsumexp_grad"][: 1 + made_of_x]
    *_, left = jaxgpuops.explain(pull_back, shape_of((9, 4)), shape_of((9,)), platform="cuda")
    assert left.op == "logsumexp_grad" and left.kernel is None and left.why == _primitive.LEFT
    on_cpu = jaxgpuops.explain(pull_back, x, ct, platform="cpu")
    assert on_cpu[-1].op == "logsumexp_grad" and on_cpu[-1].kernel is None


def test_gradient_of_a_gate_goes_to_the_chosen_logits(cuda):
    for module in (jaxgpuops, jaxgpuops.lax):
        gate = lambda x, module=module: module.topk_softmax(x, 2, axis=1).weights
        pull_back = lambda x, ct, gate=gate: jax.vjp(gate, x)[1](ct)
        for after in (4, 40_000):
            text = lowered(pull_back, shape_of((3, 6, after)), shape_of((3, 2, after)), platforms=("cuda",))
            put = [] if module is jaxgpuops and after == 4 else ["jaxgpuops.put_along_axis"]  # few are left to XLA
            assert custom_calls(text) == ["jaxgpuops.topk_softmax", *put]
            assert "stablehlo.exponential" not in text and "scatter" not in text


def test_operands_that_broadcast_are_not_expanded(cuda):
    def operand_types(fn, *args):
        text = lowered(fn, *args, platforms=("cuda",))
        assert "stablehlo.transpose" not in text
        return re.findall(r"custom_call @jaxgpuops.* : \((.*)\) ->", text)

    fn = lambda a, b, starts: jaxgpuops.linear_scan(a, b, axis=1, segment_starts=starts)
    a, b, starts = shape_of((4,)), shape_of(), shape_of((5, 1), np.bool_)
    assert operand_types(fn, a, b, starts) == ["tensor<3x5x4xf32>, tensor<1x1x4xf32>, tensor<1x5x1xi1>"]
    for batch in range(4):
        shape = (*SHAPE[:batch], 6, *SHAPE[batch:])
        many = "x".join(map(str, shape))
        factors, segments = (
            "x".join(map(str, (*shape[:batch], 1, *shape[batch:]))) for shape in ((1, 1, 4), (1, 5, 1))
        )
        vmapped = jax.vmap(fn, (None, batch, None), batch)
        expected = f"tensor<{many}xf32>, tensor<{factors}xf32>, tensor<{segments}xi1>"
        assert operand_types(vmapped, a, shape_of(shape), starts) == [expected]
        cumulative = jax.vmap(
            lambda x, starts: jaxgpuops.cumsum(x, axis=1, segment_starts=starts), (batch, None), batch
        )
        assert operand_types(cumulative, shape_of(shape), starts) == [f"tensor<{many}xf32>, tensor<{segments}xi1>"]
    histograms = jax.vmap(lambda pairs, bins: jaxgpuops.segment_sum(pairs, bins, 9), in_axes=(None, 0))
    types = operand_types(histograms, shape_of((50, 2)), shape_of((6, 50), np.int32))
    assert types == ["tensor<1x50x2xf32>, tensor<6x50x1xi32>"]
    counts = operand_types(lambda x, w: jaxgpuops.bincount(x, 9, w), shape_of((6, 50), np.int32), shape_of((50,)))
    assert counts == ["tensor<1x50xf32>, tensor<6x50xi32>"]


LIKE_SOFTMAX = ("softmax", "log_softmax", "logsumexp")


@pytest.mark.parametrize("name", LIKE_SOFTMAX)
def test_gradient_of_softmax_is_one_kernel_each_way(cuda, name):
    for module in (jaxgpuops, jaxgpuops.lax):
        fn = lambda x, module=module: getattr(module, name)(x, axis=1, scale=0.5)
        pull_back = lambda x, ct, fn=fn: jax.vjp(fn, x)[1](ct)
        for batch in range(4):
            shape = (*SHAPE[:batch], 6, *SHAPE[batch:])
            ct = shape if name != "logsumexp" else np.delete(shape, 1 + (batch <= 1))
            ct_batch = batch - (name == "logsumexp" and batch > 1)
            pulled = jax.vmap(pull_back, in_axes=(batch, ct_batch), out_axes=batch)
            text = lowered(pulled, shape_of(shape), shape_of(tuple(ct)), platforms=("cuda",))
            back = [] if name == "logsumexp" else [f"jaxgpuops.{name}_jvp"]
            assert custom_calls(text) == [f"jaxgpuops.{name}", *back]
            assert "scatter" not in text
            for size in re.findall(r"stablehlo.transpose .*-> tensor<(.*)xf32>", text):  # numbers of rows only
                assert name == "logsumexp" and np.prod([int(n) for n in size.split("x")]) == np.prod(ct)


def test_gradient_of_cross_entropy_is_in_place_where_that_saves_memory(cuda):
    labels = shape_of((3, 4), np.int32)
    loss = lambda x, labels: jaxgpuops.softmax_cross_entropy(x, labels, axis=1, reduction="mean")
    gradient = jax.value_and_grad(loss)
    computed = lambda x, labels: gradient(x + 1, labels)
    flat = lambda x, labels: gradient(x.reshape(labels.size, -1), labels)
    large = shape_of((1 << 14, 1 << 10)), shape_of((1 << 14,), np.int32)
    for fn, x, own, in_place in (
        (computed, shape_of(), labels, False),
        (computed, *large, True),
        (gradient, *large, False),  # XLA would copy the logits, which the caller keeps
        (flat, shape_of((1 << 24,)), large[1], False),
    ):
        text = lowered(fn, x, own, platforms=("cuda",))
        assert custom_calls(text) == ["jaxgpuops.cross_entropy_grad"]
        [call] = re.findall(r"custom_call @jaxgpuops.cross_entropy_grad.*", text)
        alias = "output_operand_alias<output_tuple_indices = [0], operand_index = 0"
        assert (alias in call) == in_place, fn
    donated = jax.jit(gradient, donate_argnums=0).trace(*large).lower(lowering_platforms=("cuda",)).as_text()
    assert alias in donated
    assert custom_calls(lowered(loss, shape_of(), labels, platforms=("cuda",))) == ["jaxgpuops.cross_entropy"]
    for module in (jaxgpuops, jaxgpuops.lax):
        losses = lambda x, labels, module=module: module.softmax_cross_entropy(x, labels, axis=1).sum()
        text = lowered(jax.grad(losses), shape_of(), labels, platforms=("cuda",))
        assert custom_calls(text) == ["jaxgpuops.cross_entropy"]


@pytest.mark.parametrize("name", LIKE_SOFTMAX)
def test_operands_of_softmax_are_not_expanded(cuda, name):
    fn = functools.partial(getattr(jaxgpuops, name), axis=1)
    arguments = {"scale": shape_of((3, 1, 1)), "bias": shape_of((4,)), "where": shape_of((5, 1), np.bool_)}
    for batch in range(4):
        shape = (*SHAPE[:batch], 6, *SHAPE[batch:])
        out = batch - (name == "logsumexp" and batch > 1)
        vmapped = jax.vmap(lambda x, kwargs: fn(x, **kwargs), (batch, None), out)
        text = lowered(vmapped, shape_of(shape), arguments, platforms=("cuda",))
        assert "stablehlo.transpose" not in text
        types = [
            "x".join(map(str, (*s[:batch], n, *s[batch:]))) + f"x{dtype}"
            for s, n, dtype in ((SHAPE, 6, "f32"), ((3, 1, 1), 1, "f32"), ((1, 1, 4), 1, "f32"), ((1, 5, 1), 1, "i1"))
        ]
        [operands] = re.findall(r"custom_call @jaxgpuops.* : \((.*)\) ->", text)
        assert operands == ", ".join(f"tensor<{t}>" for t in types)


def test_query_axis_moves_with_the_batch(cuda):
    for batch, query_axis in enumerate((2, 2, 1, 1)):
        fn = jax.vmap(functools.partial(jaxgpuops.softmax, causal=True), batch, batch)
        [call] = jaxgpuops.explain(fn, shape_of((*SHAPE[:batch], 6, *SHAPE[batch:])), platform="cuda")
        assert call.params["query_axis"] == query_axis and call.params["axis"] == (3 if batch < 3 else 2)
    text = lowered(jaxgpuops.softmax, shape_of(), platforms=("cuda",))
    assert "query_axis = -1 : i64" in text and "factor = 1.000000e+00 : f64" in text


# ---- Platforms ------------------------------------------------------------------------------------------------------


def test_workspace_is_a_hidden_result_per_outer_row(cuda):
    fn = lambda x: jaxgpuops.topk(x, 2, axis=1)
    text = lowered(fn, shape_of(), platforms=("cuda",))
    [types] = re.findall(r"custom_call @jaxgpuops.topk.*-> (\(.*\))", text)
    assert re.fullmatch(r"\(tensor<3x2x4xf32>, tensor<3x2x4xi32>, tensor<3x\d+xui8>\)", types)
    assert "ui8" not in lowered(fn, shape_of(), platforms=("cpu",))


def test_other_platforms_get_plain_jax(cuda):
    fn = lambda x: jaxgpuops.topk(x, 2).values.sum()
    assert custom_calls(lowered(jax.grad(fn), shape_of(), platforms=("tpu",))) == []
    text = lowered(fn, shape_of(), platforms=("cpu", "cuda", "tpu"))
    assert custom_calls(text) == ["jaxgpuops.topk"] * 2 and "top_k" in text


def test_exports_for_cuda_without_a_gpu(cuda):
    fn = jax.jit(lambda x: jaxgpuops.topk(x, 2, axis=1))
    exported = jax.export.export(fn, platforms=["cuda"], disabled_checks=jaxgpuops.export_checks())(shape_of())
    assert custom_calls(exported.mlir_module()) == ["jaxgpuops.topk"]


@pytest.mark.parametrize(
    "fn, target",
    [
        (lambda x: jax.grad(lambda x: jaxgpuops.topk(x, 2).values.sum())(x), "put_along_axis"),
        (lambda x: jax.grad(lambda x: (jaxgpuops.softmax(x) ** 2).sum())(x), "softmax_jvp"),
        (lambda x: jax.grad(lambda x: (jaxgpuops.cumprod(x) ** 2).sum())(x), "cumprod_jvp"),
        (lambda x: jaxgpuops.sort_key_val(x, x)[1], "take_along_axis"),
        (jaxgpuops.median, ""),
        (lambda x: jaxgpuops.take(x, np.array([2, 0])), ""),
    ],
    ids=["topk", "softmax", "cumprod", "sort_key_val", "median", "take"],
)
def test_exports_for_several_platforms(cuda, fn, target):
    """JAX fails to lower for several platforms what has a rule for each of them, if these must not be cached."""
    x = np.random.default_rng(0).permutation(15).reshape(3, 5).astype(np.float32)
    export = jax.export.export(jax.jit(fn), platforms=("cpu", "cuda", "tpu"), disabled_checks=jaxgpuops.export_checks())
    exported = export(x)
    assert not target or f"jaxgpuops.{target}" in custom_calls(exported.mlir_module())  # short rows are plain JAX
    np.testing.assert_array_equal(exported.call(x), jax.jit(fn)(x))


def test_named_results_can_be_serialized():
    def call(x):
        ids = x[:, :2].astype(np.int32)
        gate = jaxgpuops.topk_softmax(x, 2)
        return jaxgpuops.topk(x, 2), gate, jaxgpuops.moe_plan(ids, 4), jaxgpuops.moe_losses(x, ids)

    x = jnp.arange(12.0).reshape(3, 4)
    exported = jax.export.export(jax.jit(call), disabled_checks=jaxgpuops.export_checks())(x)
    pytest.importorskip("flatbuffers", reason="JAX serializes by it")
    again = jax.export.deserialize(exported.serialize()).call(x)
    assert jax.tree.structure(again) == jax.tree.structure(call(x))
    jax.tree.map(np.testing.assert_array_equal, again, call(x))


def test_symbolic_shapes_on_cuda(cuda):
    b, n = jax.export.symbolic_shape("b, n")
    fn = lambda x: jaxgpuops.topk(x, 2)
    [call] = jaxgpuops.explain(fn, shape_of((b, 64)), platform="cuda")
    assert call.kernel == "jaxgpuops.topk"
    assert call.plan == jaxgpuops.explain(fn, shape_of((1 << 20, 64)), platform="cuda")[0].plan
    exported = jax.export.export(jax.jit(fn), platforms=["cuda"], disabled_checks=jaxgpuops.export_checks())
    assert custom_calls(exported(shape_of((b, 64))).mlir_module()) == ["jaxgpuops.topk"]
    [call] = jaxgpuops.explain(lambda x: jaxgpuops.topk(x, 0), shape_of((b, n)), platform="cuda")
    assert call.kernel is None and "axis" in call.why


@pytest.mark.parametrize(
    "fn, shapes",
    [
        (lambda x, at: jaxgpuops.sort(x, offsets=at), ("9", "m")),
        (lambda x, at: jaxgpuops.topk(x, 2, offsets=at), ("n, 9", "m")),
        (lambda x, at: jaxgpuops.histogram(x, at.astype(np.float32))[0], ("n, 9", "m")),
        (lambda x, at: jaxgpuops.nonzero(x, size=4), ("n", "m")),
        (lambda x, at: jaxgpuops.compact(x, x > 0, size=4), ("m, n", "m")),
    ],
    ids=["sort", "topk", "histogram", "nonzero", "compact"],
)
def test_symbolic_sizes_that_plans_would_need(monkeypatch, cuda, fn, shapes):
    """On CUDA such calls are exported as plain JAX."""
    scope = jax.export.SymbolicScope(["m >= 2"])
    x, at = (jax.export.symbolic_shape(shape, scope=scope) for shape in shapes)
    export = jax.export.export(jax.jit(fn), platforms=["cuda"], disabled_checks=jaxgpuops.export_checks())
    export(shape_of(x), shape_of(at, np.int32))
    monkeypatch.setenv("JAXGPUOPS_DISABLE", "all")  # that plain JAX, run on the CPU
    exported = jax.export.export(jax.jit(lambda *args: fn(*args)))(shape_of(x), shape_of(at, np.int32))
    for sizes in ({"m": 3, "n": 7}, {"m": 6, "n": 2}):
        x, at = (tuple(int(sizes.get(d, d)) for d in shape.split(", ")) for shape in shapes)
        args = np.random.default_rng(0).normal(size=x).astype(np.float32), np.arange(*at, dtype=np.int32)
        jax.tree.map(np.testing.assert_array_equal, exported.call(*args), jax.jit(fn)(*args))


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_shortest_rows_on_the_cpu(monkeypatch, length):
    """The shortest rows take plain JAX, unless their length is not known. Kernels give them the same results."""
    a, b, h0, g = np.random.default_rng(length).integers(-4, 5, (4, 7, length, 5)).astype(np.float32)  # nothing rounds
    h0 = h0[:, 0]

    def fn(a, b, h0, g):
        out = [jaxgpuops.sum(a, axis=1), jaxgpuops.max(a, axis=1), jaxgpuops.dot(a, b, axis=1)]
        for of, *args in (jaxgpuops.linear_scan, a, b, h0), (jaxgpuops.cumprod, a), (jaxgpuops.cummax, a):
            y, pull = jax.vjp(functools.partial(of, axis=1), *args)
            out += [y, *pull(g)]
        return out

    def kernels():
        return {call.op for call in jaxgpuops.explain(fn, a, b, h0, g, platform="cpu") if call.kernel}

    lengths = dict.fromkeys(["linear_scan", "linear_scan_vjp", "cumprod_jvp", "cummax_jvp"], 4)  # the shortest
    lengths |= dict.fromkeys(["cumprod", "cummax"], 3) | dict.fromkeys(["sum", "max", "dot"], 2)
    assert kernels() == {name for name, shortest in lengths.items() if length >= shortest}
    plain = jax.jit(fn)(a, b, h0, g)
    for name in lengths:
        monkeypatch.setattr(_primitive.KERNELS[name], "shortest", 0)
    assert kernels() == lengths.keys()
    for y, expected in zip(jax.jit(fn)(a, b, h0, g), plain, strict=True):
        np.testing.assert_array_equal(y, expected)


def test_rows_of_one_element_on_the_cpu(monkeypatch):
    labels = np.array([[0, 0, 1], [-1, 0, 0]])  # some labels are no class
    x = np.array([[[1, np.inf, np.nan]], [[-np.inf, 0, 300]]], np.float32)

    def fn(x, g):
        y, pull = jax.vjp(lambda x: jaxgpuops.softmax(x, axis=1), x)
        z, pull_z = jax.vjp(lambda x: jaxgpuops.log_softmax(x, axis=1), x)
        losses, pull_losses = jax.vjp(lambda x: jaxgpuops.softmax_cross_entropy(x, labels, axis=1), x)
        loss = lambda x: jaxgpuops.softmax_cross_entropy(x, labels, axis=1, reduction="sum")
        return y, *pull(g), z, *pull_z(g), losses, *pull_losses(g[:, 0]), *jax.value_and_grad(loss)(x)

    def kernels():
        return {call.op for call in jaxgpuops.explain(fn, x, x, platform="cpu") if call.kernel}

    others = {"softmax", "softmax_jvp", "log_softmax_jvp", "cross_entropy", "cross_entropy_grad"}
    assert kernels() == {"log_softmax"}
    plain = jax.jit(fn)(x, x)
    for name in others:
        monkeypatch.setattr(_primitive.KERNELS[name], "shortest", 0)
    assert kernels() == {"log_softmax"} | others
    for y, expected in zip(jax.jit(fn)(x, x), plain, strict=True):
        np.testing.assert_array_equal(y, expected)


def test_missing_cuda_module_warns_once(monkeypatch):
    monkeypatch.setitem(_native.modules, "cuda", None)
    monkeypatch.setitem(_native._absent, "cuda", "jaxgpuops._cuda was not built: a test says so")
    _primitive._warn_missing_cuda.cache_clear()
    fn = lambda x: jaxgpuops.topk(x, 2).indices
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (5, 6):
            assert custom_calls(lowered(fn, shape_of((n,)), platforms=("cuda",))) == []
    [warning] = [w for w in caught if "jaxgpuops" in str(w.message)]
    assert "a test says so" in str(warning.message) and _native.REBUILD in str(warning.message)


def test_missing_target_falls_back(monkeypatch):
    class Older:  # a build of another version
        targets = staticmethod(lambda: {"jaxgpuops.topk": None})
        build_info = staticmethod(lambda: {"cuda_architectures": "75"})

    monkeypatch.setitem(_native.modules, "cuda", Older)
    [call] = jaxgpuops.explain(jaxgpuops.cumsum, shape_of(), platform="cuda")
    assert call.kernel is None and call.why == "jaxgpuops._cuda has no jaxgpuops.cumsum"


@pytest.mark.filterwarnings("ignore:jaxgpuops uses plain JAX")
@pytest.mark.parametrize(
    ("architectures", "covered", "not_covered"),
    [
        ("90-real", [90], [75, 89, 100, 120]),
        ("80-real", [80, 86, 89], [75, 90]),
        ("90", [90, 100, 120], [89]),  # PTX, too
        ("75-real;80-real;120", [75, 80, 86, 120, 121], [90, 100]),
        ("90-virtual", [90, 100], [80]),
        ("all-major", [75, 120], []),
    ],
)
def test_gpus_that_the_build_does_not_cover_get_plain_jax(cuda, monkeypatch, architectures, covered, not_covered):
    monkeypatch.setattr(_native.modules["cuda"], "build_info", lambda: {"cuda_architectures": architectures})
    for capability in covered + not_covered:
        monkeypatch.setattr(_native, "device_capability", lambda capability=capability: capability)
        [call] = jaxgpuops.explain(jaxgpuops.cumsum, shape_of(), platform="cuda")
        assert (call.kernel is None) == (capability in not_covered), capability
        assert call.kernel or f"CUDAARCHS={capability}-real" in call.why


# ---- explain, JAXGPUOPS_LOG, JAXGPUOPS_DISABLE ----------------------------------------------------------------------


def test_explain(cuda):
    fn = jax.grad(lambda x: jaxgpuops.topk(x, 2, axis=0).values.sum())
    top, put = jaxgpuops.explain(fn, shape_of(), platform="cuda")
    assert (top.op, top.shape, top.dtype, top.platform) == ("topk", SHAPE, "float32", "cuda")
    assert top.params == {"axis": 0, "k": 2, "largest": True, "sorted": True}
    assert (top.kernel, put.kernel, top.why) == ("jaxgpuops.topk", "jaxgpuops.put_along_axis", "")
    assert top.plan["algorithm"] and top.plan["workspace_bytes"] >= 0
    assert jaxgpuops.explain(fn, shape_of(), platform="cuda") == [top, put]  # no cache hides it
    with _primitive.recording() as lowerings:  # a platform without kernels
        jax.jit(fn).trace(shape_of()).lower(lowering_platforms=("tpu",))
    tpu, _ = lowerings
    assert tpu.kernel is None and "tpu" in tpu.why
    assert jaxgpuops.explain(lambda x: x + 1, shape_of()) == []


def test_explain_plans_the_call_that_runs(cuda):
    """Element types of one width, segments, masks and operands that broadcast take kernels of their own."""

    def plan(fn, *args):
        [call] = jaxgpuops.explain(fn, *args, platform="cuda")
        return call.plan

    def layout(dtype, *starts):
        segmented = lambda x, *starts: jaxgpuops.cumsum(x, segment_starts=starts[0] if starts else None)
        return plan(segmented, jax.ShapeDtypeStruct((64, 1 << 20), dtype), *starts)["layout"]

    starts = jax.ShapeDtypeStruct((64, 1 << 20), bool)
    assert layout(np.int16) == layout(np.float16) == layout(np.float32, starts) == "along"
    assert layout(np.int16, starts) == "spans"

    logits, mask = jax.ShapeDtypeStruct((8192, 65536), jnp.bfloat16), jax.ShapeDtypeStruct((1, 65536), bool)
    assert plan(jaxgpuops.softmax, logits)["vectors"] == 8
    assert plan(lambda x, mask: jaxgpuops.softmax(x, where=mask), logits, mask)["vectors"] == 4
    causal = functools.partial(jaxgpuops.softmax, causal=True)
    assert plan(causal, jax.ShapeDtypeStruct((8, 65536, 65536), jnp.bfloat16))["vectors"] == 4

    b = jax.ShapeDtypeStruct((8, 4096, 16, 16), jnp.float32)
    for shape, expected in [((8, 4096, 16, 16), "across"), ((4096, 16, 1), "spans"), ((4096, 1, 1), "across")]:
        scan = functools.partial(jaxgpuops.linear_scan, axis=1)
        assert plan(scan, jax.ShapeDtypeStruct(shape, jnp.float32), b)["layout"] == expected, shape


def test_log(monkeypatch, capfd):
    monkeypatch.setenv("JAXGPUOPS_LOG", "1")
    jaxgpuops.explain(lambda x: jaxgpuops.topk(x, 2, axis=1), shape_of(), platform="cpu")
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("jaxgpuops: topk(float32[3,5,4], axis=1, k=2, ") and "on cpu: jaxgpuops.topk" in line
    monkeypatch.setenv("JAXGPUOPS_LOG", "0")
    jaxgpuops.explain(lambda x: jaxgpuops.topk(x, 2, axis=1), shape_of(), platform="cpu")
    assert capfd.readouterr().err == ""


def test_disable(monkeypatch):
    fn = jax.grad(lambda x: jaxgpuops.topk(x, 2).values.sum())
    kernels = lambda: [call.kernel for call in jaxgpuops.explain(fn, shape_of(), platform="cpu")]
    monkeypatch.setenv("JAXGPUOPS_DISABLE", "topk, argmax")
    assert kernels() == [None, "jaxgpuops.put_along_axis"]
    for name in ("TOPK", "top_k", " Top_K ,"):
        monkeypatch.setenv("JAXGPUOPS_DISABLE", name)
        assert kernels() == [None, "jaxgpuops.put_along_axis"]
    for name in ("all", "ALL"):
        monkeypatch.setenv("JAXGPUOPS_DISABLE", name)
        assert kernels() == [None, None]
    for name in ("argmin", "argmax"):
        monkeypatch.setenv("JAXGPUOPS_DISABLE", name)
        [call] = jaxgpuops.explain(lambda x: jaxgpuops.lax.argmin(x, 1, np.int32), shape_of(), platform="cpu")
        assert call.kernel is None
    monkeypatch.setenv("JAXGPUOPS_DISABLE", "")
    assert kernels() == ["jaxgpuops.topk", "jaxgpuops.put_along_axis"]
    monkeypatch.setenv("JAXGPUOPS_DISABLE", "topk,tokp")
    with pytest.warns(UserWarning, match=r"JAXGPUOPS_DISABLE: there is no tokp; there are .*argmin, .*top_k, topk"):
        assert kernels() == [None, "jaxgpuops.put_along_axis"]
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        kernels()


# ---- Eager calls ----------------------------------------------------------------------------------------------------


def test_second_eager_call_does_not_trace_or_lower():
    x = jnp.arange(6.0).reshape(1, 2, 3, 1)
    calls = [
        lambda: jaxgpuops.topk(x, 2, axis=2),
        lambda: jaxgpuops.lax.top_k(x, 2, axis=2),
        lambda: jaxgpuops.lax.argmax(x, 2, np.int32),
        lambda: take_along_axis(x, jnp.zeros((1, 2, 1, 1), np.int32), 2),
        lambda: jaxgpuops.topk_softmax(x, 2, axis=2),
        lambda: jaxgpuops.lax.topk_softmax(x, 2, axis=2),
        lambda: jaxgpuops.cumsum(x, axis=2),
        lambda: jaxgpuops.lax.cumprod(x, 2),
        lambda: jaxgpuops.linear_scan(0.5, x, 1.0, axis=2),
        lambda: jaxgpuops.softmax(x, axis=2, scale=0.5, where=True),
        lambda: jaxgpuops.lax.logsumexp(x, axis=(1, 2), bias=x),
        lambda: jaxgpuops.softmax_cross_entropy(x, np.zeros((1, 2, 1), int), axis=2, reduction="mean"),
        lambda: jaxgpuops.sum(x, axis=None),
        lambda: jaxgpuops.lax.dot(x, x, axis=2),
    ]
    for call in calls:
        with _primitive.recording() as first:
            call()
        with _primitive.recording() as second:
            call()
        assert len(first) == 1 and second == []


# ---- Import ---------------------------------------------------------------------------------------------------------


def test_ffi_api_versions():
    built, running = _native.modules["cpu"].ffi_api_version(), _native.running_ffi_api()
    _native.check_ffi_api(built, running)
    _native.check_ffi_api((0, 1), running)
    with pytest.raises(ImportError, match=r"0\.9.*0\.3.*rebuild"):
        _native.check_ffi_api((0, 9), (0, 3))


def test_a_build_too_new_for_jaxlib_is_refused_before_it_harms_jax(tmp_path):
    header = tmp_path / "xla/ffi/api/c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 0\n")
    program = f"""
import jax.ffi
jax.ffi.include_dir = lambda: {str(tmp_path)!r}
try:
    import jaxgpuops
except ImportError as error:
    print(error)
print(jax.numpy.arange(3).sum())
"""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-P", "-c", program], env=env, capture_output=True, text=True, check=True)
    error, total = run.stdout.splitlines()
    assert "0.0" in error and "rebuild" in error
    assert total == "3"


def test_facts_page():
    run = subprocess.run([sys.executable, "-P", "-m", "jaxgpuops"], capture_output=True, text=True, check=True)
    for fact in (jax.__version__, "jaxgpuops.topk", "FFI API", "cuda kernels", "devices"):
        assert fact in run.stdout


def modules_with_examples():
    for module in pkgutil.walk_packages(jaxgpuops.__path__, "jaxgpuops."):
        if ">>>" in (importlib.util.find_spec(module.name).loader.get_source(module.name) or ""):
            yield module.name


@pytest.mark.parametrize("module", list(modules_with_examples()))
def test_docstring_examples(module):
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted and not results.failed


def test_public_names():
    """Tab completion shows these alone; of `import *`, builtins stay what they are; functions are not modules."""
    builtin = {"max", "min", "sum"}
    for module in (jaxgpuops, jaxgpuops.lax):
        assert set(dir(module)) == {*module.__all__} | builtin and not builtin & {*module.__all__}
        assert all(callable(getattr(module, name)) for name in {*dir(module)} - {"lax", "__version__"})
    assert not any(hasattr(jaxgpuops.lax, name) for name in ("scan", "reduce", "topk"))
