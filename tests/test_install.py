"""install() and uninstall(): JAX's own primitives on our kernels, and back."""

import contextlib
import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax.extend.core import primitives

import jaxgpuops


@pytest.fixture(autouse=True)
def restore(kernels):
    """Routes to the kernels where XLA's own are faster, too."""
    yield
    jaxgpuops.uninstall()


def x_of(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def targets(fn, *args):
    """Custom calls of ours in what `fn` compiles to."""
    text = jax.jit(lambda *args: fn(*args)).lower(*args).as_text()
    return re.findall(r"custom_call @(jaxgpuops\.\w+)", text)


FUNCTIONS = {
    "top_k": ("jaxgpuops.topk", lambda x: jax.lax.top_k(x, 3)),
    "sort": ("jaxgpuops.sort", lambda x: jnp.sort(x, 0)),
    "argmax": ("jaxgpuops.argmax", lambda x: jnp.argmax(x, 0)),
    "argmin": ("jaxgpuops.argmax", lambda x: jnp.argmin(x, 1)),
    "cumsum": ("jaxgpuops.cumsum", lambda x: jnp.cumsum(x, 0)),
    "cumprod": ("jaxgpuops.cumprod", lambda x: jnp.cumprod(x, 1)),
    "cummax": ("jaxgpuops.cummax", lambda x: jax.lax.cummax(x, 1, reverse=True)),
    "cummin": ("jaxgpuops.cummin", lambda x: jax.lax.cummin(x)),
    "cumlogsumexp": ("jaxgpuops.cumlogsumexp", lambda x: jax.lax.cumlogsumexp(x, 1)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_name_routes_one_primitive(name):
    x = x_of(6, 7)
    expected = {n: fn(x) for n, (_, fn) in FUNCTIONS.items()}
    jaxgpuops.install([name])
    for other, (target, fn) in FUNCTIONS.items():
        assert targets(fn, x) == ([target] if other == name else [])
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), fn(x), expected[other])


def test_sort_routes_what_is_built_on_it():
    """Sorts by several keys, with payloads, of complex numbers; JAX lowers the calls that we do not cover."""
    x = x_of(6, 7).round()
    functions = [
        (lambda x: jnp.argsort(x, 0), x),
        (lambda x: jnp.argsort(x, 1, descending=True), x),
        (lambda x: jnp.lexsort((x[0], x[1])), x),
        (lambda x: jnp.unique(x, size=9, return_inverse=True), x),
        (lambda x: jnp.median(x, 1), x),
        (lambda x: jax.grad(lambda x: (jnp.sort(x)[::2] ** 2).sum())(x), x),
        (lambda x: jax.lax.sort((x, x[::-1], x), 1, is_stable=False, num_keys=2), x),
        (jnp.sort, x + 1j * x[::-1]),
    ]
    expected = [fn(x) for fn, x in functions]
    with jaxgpuops.install("sort"):
        for (fn, x), theirs in zip(functions, expected, strict=True):
            assert "jaxgpuops.sort" in targets(fn, x)
            jax.tree.map(np.testing.assert_array_equal, fn(x), theirs)
        assert targets(lambda x: jax.lax.sort([x] * 5, num_keys=5), x) == []
        keys = targets(lambda x: jnp.lexsort((x[0], x[1])), x)  # places are not gathered
        assert keys.count("jaxgpuops.take_along_axis") == 3  # the first key between the sorts, and both keys


def stays(fn, *args):
    """Why a call on a GPU stays plain JAX, by op."""
    return {call.op: call.why for call in jaxgpuops.explain(fn, *args, platform="cuda")}


def test_default_routes_what_pays(monkeypatch):
    monkeypatch.setattr(jaxgpuops._native, "missing", lambda platform, target="": "")  # as on a GPU
    program = lambda x: (jax.lax.top_k(x, 3, axis=1), jnp.argmax(x, 1), jnp.cumsum(x, 1))
    large = jax.ShapeDtypeStruct((4096, 4096), np.float32)
    small, short, few = (jax.ShapeDtypeStruct(s, np.float32) for s in ((8, 4096), (1 << 20, 32), (1, 1 << 22, 2)))
    with jaxgpuops.install():
        assert stays(program, large) == {"topk": "", "cumsum": ""}  # argmax is not even asked about
        for x, why in ((small, "less than 16 MiB"), (short, "less than 64 places"), (few, "less than 32 numbers")):
            reasons = stays(program, x)
            assert reasons["topk"] == "" and why in reasons["cumsum"]
            with jaxgpuops.install(["cumsum", "argmax"]):
                assert stays(program, x) == {"topk": "", "cumsum": "", "argmax": ""}
            assert stays(program, x) == reasons
        jaxgpuops.install("cumsum")
        assert stays(program, small)["cumsum"] == ""
    assert stays(program, small) == {}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_routes_are_planned_for_gpus(monkeypatch, name):
    monkeypatch.setattr(jaxgpuops._native, "missing", lambda platform, target="": "")  # as on a GPU
    target, fn = FUNCTIONS[name]
    with jaxgpuops.install(name):
        [call] = jaxgpuops.explain(fn, jax.ShapeDtypeStruct((4096, 4096), np.float32), platform="cuda")
    assert call.kernel == target and call.plan["algorithm"]


def test_compiled_functions_follow():
    # Three jitted calls of one function: before, during and after. The lowering is observed by explain's recorder.
    x = x_of(4, 5)
    fn = jax.jit(lambda x: jax.lax.top_k(x, 2)[1])

    def lowers_to_ours():
        with jaxgpuops._primitive.recording() as lowerings:
            fn(x)
        return [call.kernel for call in lowerings]

    assert lowers_to_ours() == []
    with jaxgpuops.install("top_k"):
        assert lowers_to_ours() == ["jaxgpuops.topk"]
    assert lowers_to_ours() == [] and targets(fn, x) == []


def test_derivatives_and_batching_are_those_of_jax():
    xs = x_of(3, 4, 5)
    loss = lambda x: (jax.lax.top_k(x, 2, axis=0)[0] ** 3).sum()
    transformed = jax.vmap(jax.hessian(loss), in_axes=2)
    expected = transformed(xs)
    with jaxgpuops.install(FUNCTIONS):
        assert "jaxgpuops.topk" in targets(transformed, xs)
        np.testing.assert_array_equal(transformed(xs), expected)


def test_derivatives_and_batching_of_scans_are_those_of_jax():
    xs = np.random.default_rng(0).integers(-1, 3, (3, 4, 5)).astype(np.float32)  # exact in any order of operations
    for name in ("cumsum", "cumprod"):
        loss = lambda x, name=name: (getattr(jax.lax, name)(x, axis=0, reverse=True) ** 2).sum()
        transformed = jax.vmap(jax.grad(loss), in_axes=2)
        primal = jax.vmap(lambda x, name=name: getattr(jnp, name)(x, 1), in_axes=2)
        expected = transformed(xs), primal(xs)
        with jaxgpuops.install(FUNCTIONS):
            assert f"jaxgpuops.{name}" in targets(primal, xs)
            np.testing.assert_array_equal(transformed(xs), expected[0])
            np.testing.assert_array_equal(primal(xs), expected[1])
    with jaxgpuops.install(FUNCTIONS):  # the transpose of a sum is one
        assert targets(jax.grad(lambda x: (jnp.cumsum(x) ** 2).sum()), xs[0, 0]) == ["jaxgpuops.cumsum"] * 2


def test_order_of_nan_zeros_and_ties():
    x = np.array([0.0, np.nan, -0.0, 1.0, np.nan, 1.0], np.float32)
    expected = jax.lax.top_k(x, 6), jnp.argmax(x), jnp.argmin(x), jnp.argmax(x[2::-2]), jnp.argmin(x[:3:2])
    with jaxgpuops.install(FUNCTIONS):
        actual = jax.lax.top_k(x, 6), jnp.argmax(x), jnp.argmin(x), jnp.argmax(x[2::-2]), jnp.argmin(x[:3:2])
    jax.tree.map(
        lambda a, e: np.testing.assert_array_equal(np.asarray(a).view(np.int32), np.asarray(e).view(np.int32)),
        actual,
        expected,
    )


def test_index_dtypes():
    x = x_of(6, 7)
    with jaxgpuops.install(FUNCTIONS), jax.enable_x64(True):
        for dtype in (np.int8, np.uint32, np.int64):
            index = jax.lax.argmax(x, 1, dtype)
            assert index.dtype == dtype
            np.testing.assert_array_equal(index, x.argmax(1))
        assert targets(lambda x: jnp.argmax(x, 1), x) == ["jaxgpuops.argmax"]


def test_axes_that_int32_cannot_index_are_left_to_jax():
    x = jax.ShapeDtypeStruct(((1 << 31) + 5,), np.int8)
    with jaxgpuops.install(["argmax", "sort", "segment_sum"]), jax.enable_x64(True):
        for fn in (lambda x: jax.lax.argmax(x, 0, np.int64), jax.lax.sort):
            [call] = jaxgpuops.explain(fn, x)
            assert call.kernel is None and "int32 cannot index" in call.why
        many = functools.partial(jax.ops.segment_sum, num_segments=1 << 31)
        assert not jaxgpuops.explain(many, jnp.ones(5), jnp.arange(5))


def test_argmax_of_batches():
    x = x_of(4, 5, 6)
    with jaxgpuops.install(FUNCTIONS):
        for axis in (0, 1, 2, -1):
            np.testing.assert_array_equal(jax.vmap(jnp.argmax, axis)(x), [a.argmax() for a in np.moveaxis(x, axis, 0)])
            rows = jax.vmap(jax.vmap(jnp.argmin, axis % 2), in_axes=axis)
            np.testing.assert_array_equal(rows(x), np.moveaxis(np.moveaxis(x, axis, 0), axis % 2 + 1, 1).argmin(2))
        np.testing.assert_array_equal(jax.lax.argmax(x, np.int64(1), np.int32), x.argmax(1))
        assert targets(jax.vmap(lambda x: jnp.argmax(x, 0)), x) == ["jaxgpuops.argmax"]


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float4_e2m1fn"])
def test_sorts_move_small_numbers(dtype):
    """XLA packs what is less than a byte, which our kernels do not read."""
    keys, values = jnp.array([3.0, 1.0, 2.0]), jnp.array([1, 2, 3]).astype(dtype)
    with jaxgpuops.install("sort"):
        moved = jax.lax.sort((keys, values), num_keys=1)[1]
        assert moved.dtype == dtype and moved.tolist() == [2, 3, 1]
        assert "jaxgpuops.sort" in targets(lambda *xs: jax.lax.sort(xs, num_keys=1), keys, values)
        shuffled = jax.jit(lambda x: jax.random.permutation(jax.random.key(0), x))(values)
    assert sorted(shuffled.tolist()) == [1, 2, 3]


def test_sorts_of_random_keys_are_left_to_jax():
    operands = jnp.arange(3), jax.random.split(jax.random.key(0), 3)
    # So far, JAX cannot lower them.
    with jaxgpuops.install("sort"), jaxgpuops._primitive.recording() as lowerings, contextlib.suppress(ValueError):
        jax.jit(lambda *xs: jax.lax.sort(xs, num_keys=1)).lower(*operands)
    assert [call.why for call in lowerings] == ["it moves random keys"]


def test_uncovered_calls_go_the_way_of_jax(monkeypatch):
    x = np.arange(12).reshape(3, 4).astype(ml_dtypes.float8_e4m3fnuz)
    calls = [lambda x: jax.lax.top_k(x, 2), lambda x: jax.lax.argmax(x, 1, np.int32)]
    expected = [call(x) for call in calls]
    with jaxgpuops.install(FUNCTIONS):
        for call, e in zip(calls, expected, strict=True):
            assert targets(call, x) == []
            jax.tree.map(np.testing.assert_array_equal, call(x), e)
            [record] = jaxgpuops.explain(call, x)
            assert record.kernel is None and "float8_e4m3fnuz" in record.why
        z = jnp.array([1 + 2j, 0.5, 3j], np.complex64)
        assert targets(jax.lax.cumsum, z) == ["jaxgpuops.cumsum"]
        assert targets(jax.lax.cummax, z) == []
        monkeypatch.setenv("JAXGPUOPS_DISABLE", "topk,cumsum")
        assert targets(jnp.cumsum, x_of(4)) == []
        np.testing.assert_array_equal(jnp.cumsum(jnp.ones(4)), [1, 2, 3, 4])
        assert targets(lambda x: jax.lax.top_k(x, 2), x_of(3, 4)) == []


def test_install_is_idempotent_and_uninstall_restores():
    tables = [mlir._lowerings, *(mlir._platform_specific_lowerings[platform] for platform in ("cpu", "cuda"))]
    rules = lambda: [
        ([table.get(p) for table in tables], p in mlir._uncacheable_primitives)
        for p in (getattr(primitives, f"{name}_p") for name in FUNCTIONS)
    ]
    before = rules()
    jaxgpuops.install(FUNCTIONS)
    installed = rules()
    assert all(now != then for now, then in zip(installed, before, strict=True))
    jaxgpuops.install(FUNCTIONS)
    with jaxgpuops.install(["top_k"]):  # this installs nothing new, so at its end it undoes nothing
        pass
    assert rules() == installed
    jaxgpuops.uninstall("argmax")
    assert targets(lambda x: jnp.argmax(x), x_of(4)) == []
    assert targets(lambda x: jnp.argmin(x), x_of(4)) == ["jaxgpuops.argmax"]
    jaxgpuops.uninstall()
    jaxgpuops.uninstall()
    assert rules() == before


def test_lowers_for_cuda_without_a_gpu(cuda):
    with jaxgpuops.install(FUNCTIONS):
        fn = jax.jit(lambda x: jax.lax.top_k(x, 2))
        text = fn.trace(x_of(3, 4)).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @jaxgpuops.topk" in text


def test_exports_stay_free_of_our_targets():
    x = x_of(3, 4)
    with jaxgpuops.install(FUNCTIONS):
        exported = jax.export.export(jax.jit(lambda x: jax.lax.top_k(x, 2)))(x)  # would refuse an unknown custom call
        assert "jaxgpuops" not in exported.mlir_module()
        jax.tree.map(np.testing.assert_array_equal, exported.call(x), jax.lax.top_k(x, 2))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_exports_for_several_platforms(name):
    """JAX fails to lower for several platforms what has a rule for each of them, if these must not be cached."""
    x, fn = x_of(4, 5), FUNCTIONS[name][1]
    expected = fn(x)
    for names in ([name], []):  # after `uninstall`, too
        with jaxgpuops.install(names):
            exported = jax.export.export(jax.jit(lambda x: fn(x)), platforms=("cpu", "cuda", "tpu"))(x)
        assert "jaxgpuops" not in exported.mlir_module()
        jax.tree.map(np.testing.assert_array_equal, exported.call(x), expected)


@pytest.mark.parametrize("function", ["install", "uninstall"])
def test_unknown_names_are_refused(function):
    call = getattr(jaxgpuops, function)
    with pytest.raises(ValueError, match=rf"jaxgpuops\.{function}: .* among top_k, argmax, argmin, .*; got softsort"):
        call(["top_k", "softsort"])
    for names in (3, ["top_k", 3]):
        with pytest.raises(
            TypeError, match=rf"jaxgpuops\.{function}: names must be a string, strings or None; got .*3"
        ):
            call(names)
    assert targets(lambda x: jax.lax.top_k(x, 2), x_of(4)) == []


# ---- Functions of JAX that are not primitives -----------------------------------------------------------------------

NAMES = {
    "softmax": [jax.nn],
    "log_softmax": [jax.nn],
    "logsumexp": [jax.nn, jax.scipy.special],
}


def originals():
    return [getattr(place, name) for name, places in NAMES.items() for place in places]


def test_functions_are_replaced_only_by_name_and_restored():
    before = originals()
    with jaxgpuops.install(FUNCTIONS):
        assert originals() == before
    with jaxgpuops.install(NAMES):
        assert not set(originals()) & set(before)
        assert jax.nn.softmax.__doc__ == before[0].__doc__
        installed = originals()
        jaxgpuops.install(NAMES)
        assert originals() == installed
        jaxgpuops.uninstall("softmax")
        assert [now is then for now, then in zip(originals(), before, strict=True)] == [True, False, False, False]
    assert originals() == before
    jaxgpuops.install("log_softmax")
    jaxgpuops.uninstall()
    assert originals() == before


@pytest.mark.parametrize("name", NAMES)
def test_functions_run_on_kernels(name):
    x, where = x_of(3, 4, 5), np.arange(5) % 2 == 0
    programs = [
        lambda x: getattr(jax.nn, name)(x),
        lambda x: getattr(jax.nn, name)(x, (0, 2)),
        lambda x: getattr(jax.nn, name)(x, axis=1, where=where),
        lambda x: jax.grad(lambda x: (jax.vmap(lambda x: getattr(jax.nn, name)(x, axis=0) ** 2)(x)).sum())(x),
        lambda x: jax.jvp(lambda x: getattr(jax.nn, name)(x, axis=0), (x,), (x,))[1],
    ]
    expected = [program(x) for program in programs]
    with jaxgpuops.install(name):
        for program, e in zip(programs, expected, strict=True):
            assert f"jaxgpuops.{name}" in targets(program, x)
            y = program(x)
            assert y.dtype == e.dtype and y.shape == e.shape
            np.testing.assert_allclose(y, e, rtol=1e-5, atol=1e-6)
    assert targets(programs[0], x) == []


def test_compiled_functions_follow_names():
    x = x_of(4, 5)
    fn = jax.jit(lambda x: jax.nn.softmax(x))
    for _ in range(2):
        assert "jaxgpuops" not in fn.lower(x).as_text()
        with jaxgpuops.install(["softmax"]):
            assert "jaxgpuops.softmax" in fn.lower(x).as_text()


def test_ways_to_call_functions():
    x = x_of(3, 4)
    calls = [
        lambda: jax.nn.logsumexp(x, b=np.full((3, 4), 2.0, np.float32)),
        lambda: jax.nn.logsumexp(x, return_sign=True),
        lambda: jax.nn.logsumexp(x + 1j * x),
        lambda: jax.nn.logsumexp(x, 1, None, True),
        lambda: jax.nn.logsumexp(x, keepdims=1),
        lambda: jax.nn.logsumexp(x, np.array([0, 1])),
        lambda: jax.nn.logsumexp(a=x, axis=(1, 0), where=x > 0),
        lambda: jax.nn.softmax(x, where=np.ones((1, 3, 4), bool)),
        lambda: jax.nn.softmax(np.arange(5), where=None),
        lambda: jax.nn.softmax(x.astype(ml_dtypes.bfloat16), axis=0),
        lambda: jax.nn.log_softmax(jnp.ones(()), axis=None),
    ]
    expected = [call() for call in calls]
    with jaxgpuops.install(NAMES):
        actual = [call() for call in calls]
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        np.testing.assert_allclose(np.asarray(a, np.complex64), np.asarray(e, np.complex64), rtol=1e-2)


def test_segments_are_routed_when_asked_for():
    x, ids = np.arange(12.0, dtype=np.float32).reshape(6, 2), np.array([0, 2, 0, 7, -1, 2])
    names = ["segment_sum", "segment_max", "segment_min"]
    call = lambda name: jax.jit(lambda x: getattr(jax.ops, name)(x, ids, 3)).lower(x)
    for name in names:
        expected = getattr(jax.ops, name)(x, ids, num_segments=3)
        _, expected_tangent = jax.jvp(lambda x, n=name: getattr(jax.ops, n)(x, ids, 3), (x,), (x,))
        with jaxgpuops.install(name):
            assert f"jaxgpuops.{name}" in call(name).as_text()
            np.testing.assert_array_equal(getattr(jax.ops, name)(x, ids, num_segments=3), expected)
            _, tangent = jax.jvp(lambda x, n=name: getattr(jax.ops, n)(x, ids, 3), (x,), (x,))
            np.testing.assert_array_equal(tangent, expected_tangent)
            assert getattr(jax.ops, name)(x, ids % 3).shape == (3, 2)  # JAX counts the segments
            with pytest.raises(ValueError, match="num_segments must be non-negative"):
                getattr(jax.ops, name)(x, ids, -1)
        with jaxgpuops.install():
            assert "jaxgpuops" not in call(name).as_text()


# ---- Programs -----------------------------------------------------------------------------------------------------------


def attention(x):
    scores = x @ x.T / 3
    causal = jnp.tril(jnp.ones(scores.shape, bool))
    return jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)) @ x


def nucleus_sampling(x):
    best = jnp.sort(x, descending=True)
    below = (jnp.cumsum(jax.nn.softmax(best), -1) < 0.8).sum(-1, keepdims=True)
    kept = jnp.where(x < jnp.take_along_axis(best, below, -1), -jnp.inf, x)
    return jax.random.categorical(jax.random.key(0), kept)


def beam_search(x):
    def step(scores, logits):
        total = scores[:, None] + jax.nn.log_softmax(logits)
        scores, place = jax.lax.top_k(total.ravel(), 3)
        return scores, jnp.divmod(place, logits.size)

    return jax.lax.scan(step, jnp.zeros(3), x)


def mixture_of_experts(x):
    weights, experts = jax.lax.top_k(jax.nn.softmax(x), 2)
    order = jnp.argsort(experts.ravel())
    load = jax.ops.segment_sum(jnp.ones(order.size), experts.ravel(), num_segments=x.shape[1])
    return weights / weights.sum(-1, keepdims=True), order // 2, load


def graph_attention(x):
    to = jnp.arange(len(x)) * 3 % 5
    best = jax.ops.segment_max(x, to, 5)
    share = jnp.exp(x - best[to])
    share /= jax.ops.segment_sum(share, to, 5)[to]
    return jax.ops.segment_sum(share * x[::-1], to, 5)


def rank_statistics(x):
    chosen = jax.random.choice(jax.random.key(1), x, (4,), replace=False)
    unique = jnp.unique(x.round(), size=9, return_inverse=True, return_counts=True)
    return jnp.median(x), chosen, unique, jnp.argmin(x, 1), jax.lax.cummax(x)


@pytest.mark.parametrize(
    "program",
    [attention, nucleus_sampling, beam_search, mixture_of_experts, graph_attention, rank_statistics],
    ids=lambda program: program.__name__,
)
def test_programs_have_the_same_results(program):
    def loss(x):
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(program(x)) if jnp.issubdtype(y.dtype, jnp.floating))

    x = x_of(2, 12, 8)
    run = lambda: (jax.jit(jax.vmap(program))(x), jax.jit(jax.grad(lambda x: loss(x) + 0 * x.sum()))(x[0]))
    expected = run()
    with jaxgpuops.install([*FUNCTIONS, *NAMES, "segment_sum", "segment_max"]):
        assert targets(program, x[0])
        actual = run()
    for y, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert y.dtype == e.dtype
        np.testing.assert_allclose(y, e, rtol=1e-5, atol=1e-5)
