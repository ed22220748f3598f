"""`jaxgpuops.topk_softmax`: choices equal to `jax.lax.top_k`, weights and derivatives to those of float64."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jaxgpuops
from jaxgpuops import _primitive
from jaxgpuops.lax._topk_softmax import MAX_GROUPS, MAX_K, MAX_LENGTH

DTYPES = ["float16", "bfloat16", "float32", "float64"]
KINDS = list(itertools.product(["softmax", "sigmoid", "sqrt_softplus"], [True, False]))
kinds = pytest.mark.parametrize("score, normalize", KINDS)


def scores_of(logits, axis, score):
    """The expected scores in float64, with JAX's conventions for infinities."""
    with np.errstate(all="ignore"):
        z = np.asarray(logits, np.float64)
        if score == "sigmoid":
            return 1 / (1 + np.exp(-z))
        if score == "sqrt_softplus":
            return np.sqrt(np.logaddexp(0, z))
        e = np.exp(z - np.max(z, axis, keepdims=True, initial=-np.inf))
        return e / e.sum(axis, keepdims=True)


def weights_of(logits, indices, axis, score, normalize):
    """The expected weights of the chosen experts."""
    with np.errstate(all="ignore"):
        chosen = np.take_along_axis(np.asarray(logits, np.float64), indices, axis)
    if not normalize:
        return np.take_along_axis(scores_of(logits, axis, score), indices, axis)
    with np.errstate(all="ignore"):
        if score == "sigmoid":
            chosen = -np.logaddexp(0, -chosen)
        if score == "sqrt_softplus":
            chosen = np.where(chosen < -500, chosen, np.log(np.logaddexp(0, chosen))) / 2
    return scores_of(chosen, axis, "softmax")


def assert_weights(actual, expected, dtype):
    info = jnp.finfo(dtype)
    rtol = max(2e-6 if dtype != "float64" else 1e-12, float(info.eps))
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=rtol, atol=2 * float(info.smallest_normal), equal_nan=True
    )


def check(logits, k, axis=-1, score="softmax", normalize=True):
    with jax.enable_x64(logits.dtype == np.float64):
        weights, indices = jaxgpuops.topk_softmax(logits, k, axis=axis, score=score, normalize=normalize)
    assert weights.dtype == logits.dtype and indices.dtype == np.int32
    np.testing.assert_array_equal(indices, reference.topk(logits, k, axis)[1])
    expected = weights_of(logits, np.asarray(indices), axis, score, normalize)
    assert_weights(weights, expected, logits.dtype.name)


def rounding_of_keys(length, keys, dtype):
    """How far score + bias may be from that in float64, where nothing but rounding is wrong: a number for each row.

    In halves of an epsilon, relative to the largest number or 1: the argument of exp is rounded, which moves a score by
    at most |x| e^-|x| < 1, and exp is off by up to 8, as are log and square root; the reciprocal, the product and the
    sum with the bias add 1 each. The sum of all exps is off by what each is, whose arguments have a weighted mean of at
    most log(length), and by one for each addition in a row, of which every kernel has at most length / 8 + 8.
    """
    units = 8 + 4 + 8 + 2 * np.log(length) + length / 8 + 8
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    finite = np.where(np.isfinite(keys), abs(keys), 0)
    return units * float(np.finfo(wide).eps) / 2 * np.maximum(1, finite.max(-1, keepdims=True))


def in_tiers(keys):
    """Keys as finite numbers. Where rounding does not decide, equal ones are far apart, and the first is the highest:
    NaNs, then infinities; -inf comes last."""
    spread = 2 - np.arange(keys.shape[-1]) / keys.shape[-1]
    tiers = [
        (np.isnan(keys), 1e300 * spread),
        (keys == np.inf, 1e200 * spread),
        (keys == -np.inf, 1e200 * (spread - 3)),
    ]
    return np.select(*map(list, zip(*tiers, strict=True)), keys)


def check_choice(indices, logits, bias, k, axis=-1, score="softmax", groups=1, topk_groups=1):
    """Checks a choice by exact keys: it must be one to which keys within the error bound can lead."""
    logits, bias = np.asarray(logits), np.asarray(bias)
    column = bias.reshape(-1, *[1] * (logits.ndim - 1 - axis % logits.ndim)) if bias.ndim == 1 else bias
    with np.errstate(invalid="ignore"):
        keys = np.moveaxis(scores_of(logits, axis, score) + column, axis, -1)
    length, indices = keys.shape[-1], np.moveaxis(np.asarray(indices), axis, -1)
    off = rounding_of_keys(length, keys, logits.dtype)
    assert indices.shape[-1] == k and (indices >= 0).all() and (indices < length).all()
    assert (np.diff(np.sort(indices, -1), axis=-1) > 0).all()
    tiers, allowed = in_tiers(keys), np.ones(keys.shape, bool)
    if groups > 1:
        size, best = length // groups, min(2, length // groups)
        grouped = keys.reshape(*keys.shape[:-1], groups, size)
        first = np.take_along_axis(grouped, np.argsort(-in_tiers(grouped), -1, kind="stable")[..., :best], -1)
        with np.errstate(invalid="ignore"):
            of_groups = in_tiers(first.sum(-1))
        falling, twice = (
            -np.sort(-of_groups, -1),
            2 * (best * off + rounding_of_keys(1, of_groups * 0 + 1, logits.dtype)),
        )
        least, next_one = falling[..., topk_groups - 1, None], falling[..., topk_groups, None]
        assert (np.take_along_axis(of_groups, indices // size, -1) >= least - twice).all()
        assert all(len(set(row)) <= topk_groups for row in (indices // size).reshape(-1, k))
        allowed = np.repeat(of_groups > next_one + twice, size, -1)  # groups that may be chosen with any rounding
    chosen = np.take_along_axis(tiers, indices, -1)
    assert (chosen[..., :-1] >= chosen[..., 1:] - 2 * off).all()
    np.put_along_axis(allowed, indices, False, -1)
    others = np.where(allowed, tiers, -np.inf).max(-1, keepdims=True)
    assert (chosen.min(-1, keepdims=True) >= others - 2 * off).all()


def check_biased(logits, bias, k, axis=-1, score="softmax", normalize=True):
    """The choice may differ from that in float64 where sums are equal but for rounding."""
    with jax.enable_x64(logits.dtype == np.float64):
        weights, indices = jaxgpuops.topk_softmax(logits, k, axis=axis, score=score, normalize=normalize, bias=bias)
    indices = np.asarray(indices)
    check_choice(indices, logits, bias, k, axis, score)
    assert_weights(weights, weights_of(logits, indices, axis, score, normalize), logits.dtype.name)


def normal(shape, dtype, seed=0, scale=3):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(jnp.dtype(dtype))


# Every form of the kernel, its boundaries, and what is composed of other kernels: (length, k).
SIZES = [
    (1, 1),
    (8, 2),
    (7, 3),
    (60, 4),
    (64, 16),
    (65, 8),
    (128, 8),
    (129, 9),
    (256, 8),
    (257, 8),
    (200, 17),
    (512, 32),
]
SIZES += [(513, 5), (384, 33), (1024, 64), (100, 65), (1025, 3)]
CASES = [(*size, dtype) for dtype in ("float32", "bfloat16") for size in SIZES[:: 1 if dtype == "float32" else 2]]
CASES += [(60, 4, "float16"), (512, 32, "float16"), (64, 6, "float64")]


@pytest.mark.parametrize("length, k, dtype", CASES)
def test_values(length, k, dtype):
    logits = normal((37, length), dtype)
    bias = np.random.default_rng(1).uniform(-0.1, 0.1, length).astype(np.float32)
    for i, (score, normalize) in enumerate(KINDS):
        check(logits, k, score=score, normalize=normalize)
        if i % 2 == length % 2:
            check_biased(logits, bias, k, score=score, normalize=normalize)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_axes(axis):
    logits = normal((9, 12, 10), "float32")
    for score, normalize in KINDS:
        check(logits, 3, axis, score, normalize)
    for i, shape in enumerate([(logits.shape[axis],), (9, 12, 10), (12, 10), (9, 1, 10), ()]):
        bias = np.random.default_rng(1).uniform(-0.1, 0.1, shape).astype(np.float32)
        check_biased(logits, bias, 3, axis, *KINDS[i % 4])


@kinds
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_adversarial_rows(dtype, score, normalize):
    """Ties, NaNs, infinities, zeros of both signs, arbitrary bits: the choice is exact."""
    for length, k in [(8, 2), (64, 6), (256, 8), (1024, 64)]:
        rows = reference.adversarial(np.random.default_rng(length), length, np.dtype(jnp.dtype(dtype)))
        check(np.stack(list(rows.values())), k, -1, score, normalize)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_any_bits(data):
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 300), st.integers(1, 3)))
    k = data.draw(st.integers(0, min(shape[1], 70)))
    dtype = np.dtype(jnp.dtype(data.draw(st.sampled_from(DTYPES[:3]))))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = reference.random_bits(rng, shape, dtype)
    palette = reference.special_values(dtype) if data.draw(st.booleans()) else logits.ravel()[:5]
    logits = np.where(rng.random(shape) < 0.5, palette[rng.integers(0, len(palette), shape)], logits)
    indices = jaxgpuops.topk_softmax(logits, k, axis=1).indices
    np.testing.assert_array_equal(indices, reference.topk(logits, k, 1)[1])


def test_masked_experts():
    logits = np.float32([[-np.inf, 1, -np.inf, 2], [-np.inf] * 4, [0, np.inf, 1, 2], [0, np.nan, 1, 2]])
    weights, indices = jaxgpuops.topk_softmax(logits, 3)
    np.testing.assert_array_equal(indices, [[3, 1, 0], [0, 1, 2], [1, 3, 2], [1, 3, 2]])
    p = jax.nn.softmax(jnp.float32([2, 1]))
    np.testing.assert_allclose(weights, [[*p, 0], *[[np.nan] * 3] * 3], rtol=1e-6)
    weights, _ = jaxgpuops.topk_softmax(logits, 2, normalize=False)
    np.testing.assert_allclose(weights, [p, *[[np.nan] * 2] * 3], rtol=1e-6)
    weights, indices = jaxgpuops.topk_softmax(logits, 3, score="sigmoid", bias=np.float32([0.5, 0, 0, 0]))
    np.testing.assert_array_equal(indices, [[3, 1, 0], [0, 1, 2], [0, 1, 3], [1, 0, 3]])
    assert weights[0, 2] == 0 and np.isnan(weights[1]).all() and np.isfinite(weights[2]).all()


def test_normalised_sigmoids_do_not_vanish():
    """exp(-200) is 0 in float32; the shares of such scores are not."""
    weights, _ = jaxgpuops.topk_softmax(jnp.float32([-200, -201, -300]), 2, score="sigmoid")
    np.testing.assert_allclose(weights, jax.nn.softmax(jnp.float32([-200, -201])), rtol=1e-6)


def test_bias_only_chooses():
    logits = normal((5, 16), "float32")
    bias = np.where(np.arange(16) < 4, 10, 0).astype(np.float32)
    weights, indices = jaxgpuops.topk_softmax(logits, 4, bias=bias, normalize=False)
    np.testing.assert_array_equal(np.sort(indices, 1), np.tile(np.arange(4), (5, 1)))
    np.testing.assert_allclose(weights, np.take_along_axis(jax.nn.softmax(logits), np.asarray(indices), 1), rtol=2e-6)
    tied = jaxgpuops.topk_softmax(np.zeros((1, 16), np.float32), 6, bias=bias, score="sigmoid")
    np.testing.assert_array_equal(tied.indices, [np.arange(6)])
    several = np.zeros(16, np.float32)
    several[[3, 9]] = np.nan, -np.nan
    np.testing.assert_array_equal(jaxgpuops.topk_softmax(logits, 2, bias=several).indices, [[3, 9]] * 5)


@pytest.mark.parametrize("biased", [False, True])
@kinds
def test_a_row_has_the_same_bits_in_every_batch(score, normalize, biased):
    logits = normal((64, 200), "float32")
    bias = np.linspace(0, 0.1, 200, dtype=np.float32) if biased else None
    fn = jax.jit(lambda x: jaxgpuops.topk_softmax(x, 8, score=score, normalize=normalize, bias=bias))
    whole = fn(logits)
    from_third = jax.jit(lambda x: fn(x[3:].reshape(64, 200)))  # rows that are not aligned
    for a, b in zip(whole, from_third(np.append(np.zeros(3, np.float32), logits)), strict=True):
        np.testing.assert_array_equal(a, b)
    for i in range(3):
        for a, b in zip(whole, fn(logits[i : i + 1]), strict=True):
            np.testing.assert_array_equal(a[i], b[0])


@pytest.mark.parametrize("shape, axis", [((0, 5), 1), ((5, 0), 1), ((3, 4, 0), 1), ((4,), 0)])
def test_nothing_to_do(shape, axis):
    for k in {0, min(2, shape[axis])}:
        weights, indices = jaxgpuops.topk_softmax(np.zeros(shape, np.float32), k, axis=axis)
        assert weights.shape == indices.shape == (*shape[:axis], k, *shape[axis + 1 :])
    gradient = jax.grad(lambda x: jaxgpuops.topk_softmax(x, 0, axis=axis).weights.sum())(np.zeros(shape, np.float32))
    assert gradient.shape == shape and not gradient.any()


def test_groups_without_experts(paths):
    weights, indices = jaxgpuops.topk_softmax(np.zeros((3, 0), np.float32), 0, groups=2, topk_groups=1)
    assert weights.shape == indices.shape == (3, 0)


@pytest.mark.parametrize("length", [16, 2000])
def test_no_rows_of_groups(length):
    """The composition of more experts than the kernel takes has no rows, either."""
    gate = lambda x: jaxgpuops.topk_softmax(x, 4, axis=1, groups=8, topk_groups=4).weights
    x = np.zeros((0, length), np.float32)
    assert gate(x).shape == (0, 4)
    assert jax.vmap(gate)(x[None]).shape == (1, 0, 4)
    assert jax.grad(lambda x: gate(x).sum())(x).shape == x.shape


# ---- Groups, other scores, a factor ---------------------------------------------------------------------------------


def published(logits, k, score, normalize, bias=None, groups=1, topk_groups=1, scale=1.0):
    """Computes the published gates of DeepSeek-V2, V3 and V4 in plain JAX, along the last axis."""
    scores = {
        "softmax": jax.nn.softmax,
        "sigmoid": jax.nn.sigmoid,
        "sqrt_softplus": lambda z: jnp.sqrt(jax.nn.softplus(z)),
    }[score](logits)
    keys = jax.lax.stop_gradient(scores if bias is None else scores + bias)
    if groups > 1:
        grouped = keys.reshape(*keys.shape[:-1], groups, -1)
        best = jax.lax.top_k(grouped, min(1 if bias is None else 2, grouped.shape[-1]))[0].sum(-1)
        kept = jax.nn.one_hot(jax.lax.top_k(best, topk_groups)[1], groups).sum(-2) > 0
        keys = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(keys.shape)
    indices = jax.lax.top_k(keys, k)[1]
    weights = jnp.take_along_axis(scores, indices, -1)
    if normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights * scale, indices


GATES = [  # experts, k, groups, topk_groups
    (256, 8, 8, 4),  # DeepSeek-V3
    (160, 6, 8, 3),  # DeepSeek-V2
    (64, 6, 1, None),
    (12, 4, 6, 2),  # all experts of two groups
    (8, 3, 8, 3),  # groups of one
    (60, 7, 4, 4),
    (512, 16, 16, 5),
    (1056, 3, 32, 7),  # no kernel of its own
]
SCORES = ["softmax", "sigmoid", "sqrt_softplus"]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("experts, k, groups, topk_groups", GATES)
def test_published_gates(experts, k, groups, topk_groups, score):
    logits = jnp.asarray(normal((40, experts), "float32", seed=experts, scale=1))
    bias = jnp.asarray(np.random.default_rng(2).uniform(-0.1, 0.1, experts).astype(np.float32))
    ct = jnp.asarray(normal((40, k), "float32", seed=3))

    def both(gate, topk_groups, logits, bias, scale, normalize):
        of = lambda z, scale: gate(
            z, k, score=score, normalize=normalize, bias=bias, groups=groups, topk_groups=topk_groups, scale=scale
        )
        loss = lambda z, scale: (of(z, scale)[0] * ct).sum()
        return tuple(of(logits, scale)), jax.grad(loss, argnums=(0, 1))(logits, scale)

    # Half of the four combinations: gates beside each other in the table, and other scores, have the other half.
    odd = (GATES.index((experts, k, groups, topk_groups)) + SCORES.index(score)) % 2
    combinations = ((True, bias), (False, None)) if odd else ((True, None), (False, bias))

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def results(gate, topk_groups, logits, scale):
        return [both(gate, topk_groups, logits, b, scale, normalize) for normalize, b in combinations]

    actual = results(jaxgpuops.topk_softmax, topk_groups, logits, 2.5)
    references = results(published, topk_groups or groups, logits, 2.5)
    for (_, b), ((weights, indices), gradients), ((expected, chosen), wanted) in zip(
        combinations, actual, references, strict=True
    ):
        same = np.asarray(indices == chosen)
        keys = scores_of(logits, -1, score) + (0 if b is None else np.asarray(b))
        of = lambda indices, keys=keys: np.take_along_axis(keys, np.asarray(indices), -1)
        np.testing.assert_allclose(of(indices), of(chosen), rtol=0, atol=1e-6)  # equal but for rounding
        assert same.mean() > 0.99
        np.testing.assert_allclose(weights[same], expected[same], rtol=3e-6)
        if same.all():
            np.testing.assert_allclose(gradients[0], wanted[0], rtol=1e-4, atol=2e-6 * float(abs(wanted[0]).max()))
            terms = float(abs(ct * expected).sum()) / 2.5  # the terms nearly cancel
            np.testing.assert_allclose(gradients[1], wanted[1], rtol=1e-5, atol=1e-6 * terms)


@pytest.mark.parametrize("biased", [False, True])
def test_groups_along_any_axis_and_in_batches(biased):
    logits = jnp.asarray(normal((3, 24, 5), "float32", scale=1))
    bias = jnp.linspace(0, 0.2, 24) if biased else None
    flags = {"groups": 6, "topk_groups": 2, "bias": bias, "score": "sigmoid"}
    whole = jaxgpuops.topk_softmax(logits, 5, axis=1, **flags)
    rows = published(jnp.moveaxis(logits, 1, -1), 5, "sigmoid", True, bias, 6, 2)
    mapped = jax.vmap(lambda x: jaxgpuops.topk_softmax(x, 5, axis=1, **flags), in_axes=2, out_axes=2)(logits)
    np.testing.assert_array_equal(whole.indices, jnp.moveaxis(rows[1], -1, 1))
    np.testing.assert_allclose(whole.weights, jnp.moveaxis(rows[0], -1, 1), rtol=2e-6)
    np.testing.assert_array_equal(whole.indices, mapped.indices)
    np.testing.assert_allclose(whole.weights, mapped.weights, rtol=1e-6)


def test_hostile_groups():
    """Ties go to the lower group and index; NaNs come first; what is not in a chosen group counts as -inf."""
    choose = lambda logits, k, **flags: jaxgpuops.topk_softmax(np.float32(logits), k, **flags).indices.tolist()
    pairs = {"groups": 3, "topk_groups": 1}
    assert choose([0, 0, 0, 0, 0, 0], 2, **pairs) == [0, 1]
    # Groups ranked by the sum of their best two.
    assert choose([9, -9, 5, 5, 0, 0], 1, bias=np.zeros(6, np.float32), score="sigmoid", **pairs) == [2]
    assert choose([9, -9, 5, 5, 0, 0], 2, **pairs) == [0, 1]  # groups ranked by their best score
    assert choose([0, 9, 5, np.nan, 7, 8], 2, **pairs) == [3, 2]
    assert choose([np.nan, 9, 5, np.nan, 7, 8], 2, **pairs) == [0, 1]
    assert choose([-np.inf] * 6, 2, **pairs) == [0, 1]
    assert choose([-np.inf, -np.inf, -np.inf, 1, 2, 3], 3, groups=3, topk_groups=2) == [5, 4, 3]
    bias = np.float32([-np.inf, -np.inf, 0, 0, 0, 0])
    assert choose([9, 9, 1, 2, 0, 0], 2, bias=bias, score="sigmoid", **pairs) == [3, 2]
    for dtype in ("bfloat16", "float16"):
        logits = normal((20, 32), dtype)
        weights, indices = jaxgpuops.topk_softmax(logits, 4, groups=4, topk_groups=2)
        _, chosen = published(jnp.asarray(logits, jnp.float32), 4, "softmax", True, None, 4, 2)
        assert weights.dtype == logits.dtype
        np.testing.assert_array_equal(np.sort(indices, 1), np.sort(chosen, 1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("length, k, groups, topk_groups", [(256, 8, 8, 4), (60, 7, 4, 3), (64, 6, 64, 9)])
def test_hostile_rows_in_groups(monkeypatch, length, k, groups, topk_groups, dtype):
    """Experts of a group that is not chosen are never chosen, whatever their scores; the kernel and the composition
    agree."""
    rows = reference.adversarial(np.random.default_rng(length), length, np.dtype(jnp.dtype(dtype)))
    logits = np.stack(list(rows.values()))
    bias = jnp.linspace(-1, 1, length).at[length // 3].set(jnp.nan).at[0].set(-jnp.inf)
    flags = {"groups": groups, "topk_groups": topk_groups}

    def both(logits):
        plain = jaxgpuops.topk_softmax(logits, k, **flags)
        return plain, jaxgpuops.topk_softmax(logits, k, bias=bias, score="sqrt_softplus", **flags)

    outs = jax.jit(lambda x: both(x))(logits)
    monkeypatch.setenv("JAXGPUOPS_DISABLE", "all")
    others = jax.jit(lambda x: both(x))(logits)
    np.testing.assert_array_equal(outs[0].indices, others[0].indices)
    for weights, indices in outs:
        of_groups = np.sort(np.asarray(indices) // (length // groups), 1)
        assert (1 + (np.diff(of_groups, axis=1) > 0).sum(1) <= topk_groups).all()
        assert (np.diff(np.sort(indices, 1), axis=1) > 0).all() and weights.dtype == dtype
    for _, indices in (outs[1], others[1]):
        check_choice(indices, logits, bias, k, -1, "sqrt_softplus", groups, topk_groups)


@kinds
def test_scale(score, normalize):
    """A scale that is a number is part of the kernel, which rounds once; a traced one multiplies the kernel's
    result."""
    logits = jnp.asarray(normal((50, 64), "bfloat16", scale=1))
    call = lambda z, scale=None: jaxgpuops.topk_softmax(z, 4, score=score, normalize=normalize, scale=scale).weights
    exact = 2.5 * weights_of(logits, np.asarray(jaxgpuops.topk_softmax(logits, 4).indices), -1, score, normalize)
    assert_weights(call(logits, 2.5), exact, "bfloat16")
    np.testing.assert_allclose(
        np.float64(jax.jit(call)(logits, jnp.float32(2.5))), exact, rtol=3 * float(jnp.finfo(jnp.bfloat16).eps)
    )
    z, t = logits.astype(np.float32), jnp.asarray(normal((50, 64), "float32", seed=1))
    for module in (jaxgpuops, jaxgpuops.lax):
        of = lambda scale, module=module: jax.grad(
            lambda z: (
                module.topk_softmax(z, 4, score=score, normalize=normalize, scale=scale).weights * t[:, :4]
            ).sum()
        )(z)
        np.testing.assert_allclose(of(-2.5), -2.5 * of(None), rtol=1e-5, atol=1e-6)
        assert not of(0).any()
    of = lambda scale: jax.jvp(
        lambda z: jaxgpuops.lax.topk_softmax(z, 4, score=score, normalize=normalize, scale=scale).weights, (z,), (t,)
    )[1]
    np.testing.assert_allclose(of(np.float32(3)), 3 * of(None), rtol=1e-5, atol=1e-6)


def test_sqrt_softplus_does_not_vanish():
    """The score neither underflows nor overflows: its square is about e^z far below 0, and z far above."""
    z = jnp.float32([-200, -202, 30000, -60, 0])
    weights, _ = jaxgpuops.topk_softmax(z[:2], 2, score="sqrt_softplus")
    np.testing.assert_allclose(weights, jax.nn.softmax(z[:2] / 2), rtol=1e-6)
    weights, indices = jaxgpuops.topk_softmax(z, 5, score="sqrt_softplus", normalize=False)
    exact = np.sqrt(np.logaddexp(0, np.float64(z)))[np.asarray(indices)]
    np.testing.assert_allclose(weights, exact, rtol=1e-6, atol=1e-37)
    slopes = jax.grad(lambda z: jaxgpuops.topk_softmax(z, 5, score="sqrt_softplus", normalize=False).weights.sum())(z)
    wide = np.float64(z)
    expected = 1 / (1 + np.exp(-wide)) / (2 * np.sqrt(np.logaddexp(0, wide)))
    np.testing.assert_allclose(slopes, expected, rtol=1e-5, atol=1e-37)


# ---- Derivatives ----------------------------------------------------------------------------------------------------


def plain(logits, k, axis, score, normalize, bias=None):
    """The gate in differentiable JAX."""
    scores = {
        "softmax": functools.partial(jax.nn.softmax, axis=axis),
        "sigmoid": jax.nn.sigmoid,
        "sqrt_softplus": lambda z: jnp.sqrt(jax.nn.softplus(z)),
    }[score](logits)
    keys = logits if bias is None else scores + bias
    indices = jnp.argsort(-jax.lax.stop_gradient(keys), axis).take(jnp.arange(k), axis)
    weights = jnp.take_along_axis(scores, indices, axis)
    return weights / weights.sum(axis, keepdims=True) if normalize else weights


@pytest.mark.parametrize("biased", [False, True])
@kinds
def test_derivatives(score, normalize, biased):
    logits = jnp.asarray(normal((3, 6, 2), "float32", scale=1))
    ct, t, bias = logits[:, :2], logits[::-1], jnp.linspace(0, 0.3, 6)[:, None] if biased else None
    flags = {"score": score, "normalize": normalize, "bias": bias}

    @jax.jit
    def derivatives(x):
        results = {}
        ours, lax = (
            lambda x, module=module: module.topk_softmax(x, 2, axis=1, **flags).weights
            for module in (jaxgpuops, jaxgpuops.lax)
        )
        for name, fn in {"ours": ours, "lax": lax, "plain": lambda x: plain(x, 2, 1, **flags)}.items():
            gradient = jax.grad(lambda x, fn=fn: (fn(x) ** 2 * ct).sum())
            results[name] = [gradient(x), jax.grad(lambda x, gradient=gradient: (gradient(x) * t).sum())(x)]
            if name != "ours":
                results[name].append(jax.jvp(fn, (x,), (t,)))
        return results

    results = derivatives(logits)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6)
    jax.tree.map(close, results["lax"], results["plain"])
    jax.tree.map(close, results["ours"], results["plain"][:2])


def test_derivatives_of_what_is_composed():
    with jax.enable_x64(True):
        x = jnp.asarray(normal((2, 1030), "float64"))

        @jax.jit
        def both(x):
            ours = lambda x: (jaxgpuops.topk_softmax(x, 3, normalize=False).weights ** 2).sum()
            theirs = lambda x: (plain(x, 3, 1, "softmax", False) ** 2).sum()
            return jax.grad(ours)(x), jax.jvp(ours_lax, (x,), (x,)), jax.grad(theirs)(x), jax.jvp(theirs, (x,), (x,))

        ours_lax = lambda x: (jaxgpuops.lax.topk_softmax(x, 3, normalize=False).weights ** 2).sum()
        gradient, tangent, *expected = both(x)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10), [gradient, tangent], expected)


@kinds
def test_gradients_of_16_bits_are_rounded_once(score, normalize):
    logits = normal((50, 64), "bfloat16", scale=1)
    ct = normal((50, 4), "bfloat16", seed=1)
    pull = lambda x, ct: jax.vjp(lambda x: jaxgpuops.topk_softmax(x, 4, score=score, normalize=normalize).weights, x)[
        1
    ](ct)[0]
    gradient = pull(logits, ct)
    assert gradient.dtype == jnp.bfloat16
    exact = pull(logits.astype(np.float32), ct.astype(np.float32))
    # The weights that it starts from are rounded.
    np.testing.assert_allclose(gradient.astype(np.float32), exact, atol=2**-7 * abs(exact).max())


def test_bias_has_no_gradient():
    logits, bias = jnp.asarray(normal((3, 8), "float32")), jnp.zeros(8)
    for module in (jaxgpuops, jaxgpuops.lax):
        loss = lambda bias, module=module: module.topk_softmax(logits, 2, bias=bias).weights[:, 0].sum()
        assert not jax.grad(loss)(bias).any()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: jaxgpuops.topk_softmax(x, 2).weights, (logits,), (logits,))


@kinds
@pytest.mark.parametrize("biased", [False, True])
def test_composition_equals_kernel(monkeypatch, score, normalize, biased):
    logits = normal((5, 40, 3), "bfloat16")
    bias = jnp.linspace(0, 0.1, 40) if biased else None
    call = lambda x: jaxgpuops.topk_softmax(x, 4, axis=1, score=score, normalize=normalize, bias=bias)
    weights, indices = jax.jit(lambda x: call(x))(logits)
    monkeypatch.setenv("JAXGPUOPS_DISABLE", "all")
    with _primitive.recording() as lowerings:
        others = jax.jit(lambda x: call(x))(logits)
    assert lowerings and {lowering.kernel for lowering in lowerings} == {None}
    np.testing.assert_array_equal(indices, others.indices)
    np.testing.assert_allclose(weights.astype(np.float32), others.weights.astype(np.float32), rtol=2**-8)


# ---- Limits, errors -------------------------------------------------------------------------------------------------


def test_limits_are_those_of_the_kernel():
    plan = jaxgpuops._native.modules["cpu"].plan_topk_softmax
    assert plan(5, MAX_LENGTH, 1, MAX_K, 1, False, False)["algorithm"] == "rows"
    for length, k, groups in [(MAX_LENGTH + 1, 1, 1), (MAX_LENGTH, MAX_K + 1, 1), (MAX_LENGTH, 1, MAX_GROUPS + 1)]:
        with pytest.raises(ValueError, match="no kernel takes"):
            plan(5, length, 1, k, groups, False, False)
    for groups in (MAX_GROUPS, 2 * MAX_GROUPS):
        call = functools.partial(jaxgpuops.topk_softmax, k=2, groups=groups, topk_groups=3, score="sqrt_softplus")
        ops = [call.op for call in jaxgpuops.explain(call, jnp.zeros((2, 256)))]
        assert ops == ["topk_softmax"] if groups == MAX_GROUPS else "topk_softmax" not in ops
    for length, k in [(MAX_LENGTH, MAX_K), (MAX_LENGTH + 1, MAX_K), (MAX_LENGTH, MAX_K + 1)]:
        calls = jaxgpuops.explain(functools.partial(jaxgpuops.topk_softmax, k=k), jnp.zeros((2, length)))
        fits = length <= MAX_LENGTH and k <= MAX_K
        assert [call.op for call in calls if call.op.startswith("topk")] == ["topk_softmax" if fits else "topk"]


@pytest.mark.parametrize(
    "rows, length, k, biased, algorithm",
    [(20, 16, 8, False, "ranked"), (8192, 8, 2, False, "ranked"), (8193, 8, 2, False, "rows")]
    + [(20, 17, 8, False, "rows"), (20, 17, 9, False, "ranked"), (90_000, 32, 9, False, "ranked")]
    + [(2048, 64, 9, False, "ranked"), (2049, 64, 9, False, "rows"), (20, 65, 9, False, "few")]
    + [(20, 16, 8, True, "few")],
)
def test_few_logits_are_ranked(rows, length, k, biased, algorithm):
    """Each case is on one side of a limit, beyond which another kernel took less time on an H200."""
    plan = jaxgpuops._native.modules["cpu"].plan_topk_softmax
    assert plan(rows, length, 1, k, 1, biased, False)["algorithm"] == algorithm
    groups = 2 - length % 2
    if groups > 1 and k <= length // 2:
        assert plan(rows, length, 1, k, groups, biased, False)["algorithm"] != "ranked"
    assert plan(rows, length, 1, k, 1, biased, True)["algorithm"] == "rows"  # a sum over the row


X = np.zeros((3, 5), np.float32)
ERRORS = [
    ((X, 6), {}, ValueError, ["k must be between 0 and 5", "6"]),
    ((X, 2.0), {}, TypeError, ["k must be an integer", "2.0"]),
    ((X, 2), {"axis": 2}, ValueError, ["axis must be between -2 and 1"]),
    ((X.astype(np.int32), 2), {}, TypeError, ["logits has dtype int32", "float32"]),
    ((X, 2), {"score": "tanh"}, ValueError, ["score must be", "tanh"]),
    ((X, 2), {"bias": np.zeros(4, np.float32)}, ValueError, ["bias must broadcast", "(3, 5)", "4"]),
    ((X, 2), {"bias": np.zeros(5, np.int32)}, TypeError, ["bias must have a float dtype", "int32"]),
    ((np.float32(1), 1), {}, ValueError, ["at least one dimension"]),
    ((X, 2), {"groups": 2}, ValueError, ["groups must be 1 or more and divide the 5 experts", "2"]),
    ((X, 2), {"groups": 0}, ValueError, ["groups must be 1 or more", "0"]),
    ((X, 2), {"groups": 5, "topk_groups": 6}, ValueError, ["topk_groups must be between 1 and 5", "6"]),
    ((X, 2), {"groups": 5, "topk_groups": 1}, ValueError, ["k must be at most 1, the experts of 1 groups", "2"]),
    ((X, 2), {"groups": 1.0}, TypeError, ["groups must be an integer", "1.0"]),
    ((X, 2), {"scale": np.ones(3, np.float32)}, ValueError, ["scale must be one number", "(3,)"]),
    ((X, 2), {"scale": 1j}, TypeError, ["scale has dtype complex"]),
]


@pytest.mark.parametrize("args, kwargs, error, parts", ERRORS)
@pytest.mark.parametrize("module", [jaxgpuops, jaxgpuops.lax], ids=["ops", "lax"])
def test_errors(module, args, kwargs, error, parts):
    with pytest.raises(error) as caught:
        module.topk_softmax(*args, **kwargs)
    for part in [module.__name__ + ".topk_softmax", *parts]:
        assert part in str(caught.value)
