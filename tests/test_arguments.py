"""Flags, words, masks and labels, which every op checks alike: what is wrong is named, before anything is launched."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgpuops

X = np.ones((3, 4), np.float32)
LABELS = np.zeros(3, np.int32)
CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
REDUCTIONS = ("sum", "mean", "max", "min", "dot")
# function -> its arrays, its flags, and its other arrays
OPS = {
    "topk": ([X, 2], ["largest", "sorted"], ["offsets", "lengths"]),
    "sort": ([X], ["descending"], ["offsets"]),
    "argsort": ([X], ["descending"], ["offsets"]),
    "searchsorted": ([X, X], [], []),
    "quantile": ([X, 0.5], ["keepdims"], []),
    "median": ([X], ["keepdims"], []),
    "topk_softmax": ([X, 2], ["normalize"], ["bias", "scale"]),
    **{name: ([X], ["reverse", "exclusive"], ["segment_starts"]) for name in CUMULATIVE},
    "linear_scan": ([X, X], ["reverse", "return_last"], ["segment_starts", "h0"]),
    **{name: ([X] * (1 + (name == "dot")), ["keepdims"], ["where"]) for name in REDUCTIONS},
    "softmax": ([X], ["causal"], ["where", "bias"]),
    "log_softmax": ([X], ["causal"], ["where", "bias"]),
    "logsumexp": ([X], ["causal", "keepdims"], ["where", "bias"]),
    "softmax_cross_entropy": ([X, LABELS], [], ["where"]),
}
FUNCTIONS = {
    f"{module.__name__}.{name}": (getattr(module, name), *of)
    for module, (name, of) in itertools.product((jaxgpuops, jaxgpuops.lax), OPS.items())
    if callable(getattr(module, name, None))
    and (module, name) != (jaxgpuops.lax, "sort")  # jaxgpuops.lax.sort has the signature of jax.lax.sort
}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_flags_are_bools(op):
    function, arrays, flags, _ = FUNCTIONS[op]
    for flag in flags:
        for value in ("no", None, 1, np.zeros(2, bool), jnp.array(True)):
            with pytest.raises(TypeError, match=f"{op}: {flag} must be True or False, known at trace time, got "):
                function(*arrays, **{flag: value})
        with pytest.raises(TypeError, match=f"{op}: {flag} must be True or False, known at trace time, got .*racer"):
            jax.jit(lambda value: function(*arrays, **{flag: value}))(True)
        function(*arrays, **{flag: np.False_})


@pytest.mark.parametrize("op", FUNCTIONS)
def test_other_arrays_are_arrays(op):
    function, arrays, _, others = FUNCTIONS[op]
    for name, value in itertools.product(others, ("no", object(), {"a": 1}, [1, "b"])):
        with pytest.raises(TypeError, match=f"{op}: {name} must be an array of numbers or booleans, got "):
            function(*arrays, **{name: value})


@pytest.mark.parametrize(
    "function, name, allowed",
    [
        ("topk_softmax", "score", "'softmax', 'sigmoid' or 'sqrt_softplus'"),
        ("softmax_cross_entropy", "reduction", "None, 'sum' or 'mean'"),
    ],
)
@pytest.mark.parametrize("value", ["max", 1, ["sum"], X], ids=str)
def test_words(function, name, allowed, value):
    for module in (jaxgpuops, jaxgpuops.lax):
        with pytest.raises(ValueError, match=f"{module.__name__}.{function}: {name} must be {allowed}, got "):
            getattr(module, function)(*OPS[function][0], **{name: value})


@pytest.mark.parametrize("platform", ["gup", "CPU", "", "tpu", 3])
def test_platforms_of_explain(platform):
    with pytest.raises(ValueError, match="jaxgpuops.explain: platform must be 'cpu', 'cuda' or 'gpu', got "):
        jaxgpuops.explain(jaxgpuops.topk, X, 2, platform=platform)


def test_explain_takes_gpu_for_cuda():
    fn = lambda x: jaxgpuops.topk(x, 2)
    [gpu], [cuda], [cpu] = (jaxgpuops.explain(fn, X, platform=platform) for platform in ("gpu", "cuda", "cpu"))
    assert gpu == cuda and (gpu.platform, cpu.platform) == ("cuda", "cpu")


@pytest.mark.parametrize("x64", [False, True])
def test_dtypes_that_jax_does_not_promote(x64):
    with jax.enable_x64(x64):
        narrow, wide = X.astype(jnp.float8_e5m2), X.astype(np.float64)
        calls = {
            "where": lambda: jaxgpuops.where(X > 0, narrow, wide),
            "searchsorted": lambda: jaxgpuops.searchsorted(wide, narrow),
            "dot": lambda: jaxgpuops.dot(wide, narrow),
            "lax.dot": lambda: jaxgpuops.lax.dot(wide, narrow),
            "linear_scan": lambda: jaxgpuops.linear_scan(narrow, wide),
            "lax.linear_scan": lambda: jaxgpuops.lax.linear_scan(wide, wide, narrow[:, 0]),
        }
        for name, call in calls.items():
            with pytest.raises(
                TypeError, match=f"jaxgpuops.{name}: JAX does not promote the dtypes .* has float8_e5m2"
            ):
                call()


def test_explain_wants_a_function():
    with pytest.raises(TypeError, match="jaxgpuops.explain: fn must be a function, got 3"):
        jaxgpuops.explain(3, X)


@pytest.mark.parametrize("x64", [False, True])
def test_labels_do_not_wrap_into_range(x64):
    labels = np.array([0, 1 << 32, 3, (1 << 32) + 1, -(1 << 32), 1 << 62])
    logits = np.arange(24, dtype=np.float32).reshape(6, 4)
    with jax.enable_x64(x64):
        for module in (jaxgpuops, jaxgpuops.lax):
            for given in (labels, labels.tolist(), np.where(labels < 0, 1 << 63, labels.astype(np.uint64))):
                loss = module.softmax_cross_entropy(logits, given)
                assert np.isnan(loss).tolist() == [False, True, False, True, True, True]


def test_integers_become_the_floats_of_jax():
    for x64 in (False, True):
        with jax.enable_x64(x64):
            for dtype in ("bool", "int8", "uint16", "int32", "uint32", *(("int64", "uint64") if x64 else ())):
                x = jnp.ones((2, 3), dtype)
                for module in (jaxgpuops, jaxgpuops.lax):
                    assert module.mean(x).dtype == jnp.mean(x).dtype
                    assert module.logsumexp(x).dtype == jax.nn.logsumexp(x).dtype
                    for name in ("softmax", "log_softmax") if dtype != "bool" else ():  # JAX takes no bools
                        assert getattr(module, name)(x).dtype == getattr(jax.nn, name)(x).dtype


class Variable:
    """What libraries of neural networks hand over as an array."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


@pytest.mark.parametrize("op", FUNCTIONS)
def test_variables_are_arrays(op):
    function, arrays, _, others = FUNCTIONS[op]
    given = {name: {"offsets": [0, 2], "lengths": 1}.get(name, 0.5) for name in others}
    given |= {name: np.ones((3, 4), bool) for name in others if name in ("where", "segment_starts")}
    if op.endswith("softmax_cross_entropy"):
        given["where"] = np.ones(3, bool)
    if op.endswith(("softmax", ".logsumexp")):
        given["scale"] = np.ones((3, 1), np.float32) if "topk" not in op else np.float32(2)
    for name, value in given.items():
        value = jnp.asarray(value)
        call = lambda value, name=name: function(*arrays, **{name: value})
        expected = call(value)
        jax.tree.map(np.testing.assert_array_equal, call(Variable(value)), expected)
        traced = jax.jit(lambda value, call=call: call(Variable(value)))(value)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), traced, expected)


def test_edges_of_bins_are_an_array():
    counts, edges = jaxgpuops.histogram(X, Variable(jnp.array([0.0, 1.0, 2.0])))
    assert counts.tolist() == [[0, 4]] * 3 and edges.tolist() == [0, 1, 2]


@pytest.mark.parametrize("op", FUNCTIONS)
def test_vmap_takes_constants(op):
    """JAX's `custom_vjp` refuses NumPy arrays that `vmap` has split in a program; `jit` takes them."""
    function, (x, *rest), _, _ = FUNCTIONS[op]
    batch = np.stack([x, 2 * x])
    actual = jax.jit(lambda: jax.vmap(lambda x: function(x, *rest))(batch))()
    for row in range(2):
        jax.tree.map(
            lambda y, e, row=row: np.testing.assert_allclose(y[row], e, rtol=1e-6), actual, function(batch[row], *rest)
        )


def test_numbers_beyond_float64():
    for module in (jaxgpuops, jaxgpuops.lax):
        for name, call in {
            "softmax: scale": lambda m=module: m.softmax(X, scale=10**400),
            "topk_softmax: scale": lambda m=module: m.topk_softmax(X, 2, scale=-(10**400)),
            "softmax_cross_entropy: z_loss": lambda m=module: m.softmax_cross_entropy(X, LABELS, z_loss=10**400),
        }.items():
            with pytest.raises(ValueError, match=f"{module.__name__}.{name} must be in the range of float64, got -?10"):
                call()
