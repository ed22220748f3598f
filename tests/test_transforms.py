"""Every op of both tiers, through the table of transforms.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transforms import CHECKS, Case, assert_same, distinct_integers, leaves_of, reference_of, small_integers

import jaxgpuops
from jaxgpuops.lax.along_axis import put_along_axis, take_along_axis


def x_only(rng, shape):
    return (distinct_integers(rng, shape),)


def x_and_indices(rng, shape):
    """Two distinct indices along axis 1."""
    iota = np.arange(shape[1], dtype=np.int32)[:, None]
    return distinct_integers(rng, shape), rng.permuted(np.broadcast_to(iota, shape), axis=1)[:, :2]


def updates_and_indices(rng, shape):
    _, indices = x_and_indices(rng, (shape[0], 5, shape[2]))
    return distinct_integers(rng, indices.shape), indices


def topk_reference(x, k, axis, largest=True, sorted=True):
    indices = jax.lax.top_k(x if largest else -x, k, axis=axis)[1]
    if not sorted:
        indices = jnp.sort(indices, axis=axis)
    return jnp.take_along_axis(x, indices, axis), indices


def put_reference(updates, indices):
    zeros = jnp.zeros((updates.shape[0], 5, updates.shape[2]), updates.dtype)
    return jnp.put_along_axis(zeros, indices, updates, axis=1, inplace=False)


def topk_case(**kwargs):
    name = "topk-" + "-".join(f"{key}={value}" for key, value in kwargs.items())
    fn, reference = functools.partial(jaxgpuops.topk, **kwargs), functools.partial(topk_reference, **kwargs)
    return Case(name, fn, reference, x_only, forward=False, representative=kwargs == {"k": 2, "axis": -1})


def lax_top_k_case(k, axis):
    fn, reference = (
        functools.partial(jaxgpuops.lax.top_k, k=k, axis=axis),
        functools.partial(jax.lax.top_k, k=k, axis=axis),
    )
    return Case(f"lax.top_k-k={k}-axis={axis}", fn, reference, x_only)


def sort_key_val_reference(x, y, axis):
    order = jnp.argsort(jax.lax.stop_gradient(x), axis)  # jax 0.10 cannot differentiate it on an explicit mesh
    return jnp.take_along_axis(x, order, axis), jnp.take_along_axis(y, order, axis)


def x_and_payload(rng, shape):
    return distinct_integers(rng, shape), distinct_integers(rng, shape)


def finite_topk(out):
    """Values of padding are replaced by 0, whose derivatives are 0, too."""
    return jnp.where(out.indices >= 0, out.values, 0), out.indices


def row_topk(x, k, count):
    """Top-k of rows along axis 1, padded to k with 0 and -1."""
    values, indices = jax.lax.top_k(jnp.moveaxis(x, 1, -1), count)
    pad = [(0, 0)] * (x.ndim - 1) + [(0, k - count)]
    return jnp.moveaxis(jnp.pad(values, pad), -1, 1), jnp.moveaxis(jnp.pad(indices, pad, constant_values=-1), -1, 1)


def padded_topk_reference(x):
    """Columns of lengths 3, 1, 2 and 0."""
    columns = [row_topk(x[:, :n, i : i + 1], 2, min(n, 2)) for i, n in enumerate([3, 1, 2, 0])]
    return tuple(jnp.concatenate(parts, 2) for parts in zip(*columns, strict=True))


def segments_topk_reference(x):
    """Segments of lengths 3, 1 and 0."""
    rows = [row_topk(x[:, at : at + n], 2, min(n, 2)) for at, n in [(0, 3), (3, 1), (4, 0)]]
    values, indices = zip(*rows, strict=True)
    return jnp.stack(values, 1), jnp.stack([indices[0], jnp.where(indices[1] < 0, -1, indices[1] + 3), indices[2]], 1)


SORT_CASES = [
    Case("sort", functools.partial(jaxgpuops.sort, axis=1), functools.partial(jnp.sort, axis=1), x_only, forward=False),
    Case(
        "sort_key_val",
        functools.partial(jaxgpuops.sort_key_val, axis=-1),
        functools.partial(sort_key_val_reference, axis=-1),
        x_and_payload,
        forward=False,
        representative=True,
    ),
    Case(
        "sort-segments",
        lambda x: jaxgpuops.sort(x, axis=1, offsets=np.array([0, 2, 2, 5])),
        lambda x: jnp.concatenate([jnp.sort(x[:, :2], 1), jnp.sort(x[:, 2:], 1)], 1),
        x_only,
        forward=False,
    ),
    Case("lax.sort", functools.partial(jaxgpuops.lax.sort, dimension=0), functools.partial(jnp.sort, axis=0), x_only),
    Case(
        "lax.sort-two-keys",
        lambda x, y: jaxgpuops.lax.sort((x % 3, y), 1, num_keys=2),
        lambda x, y: jax.lax.sort((x % 3, y), 1, num_keys=2),
        x_and_payload,
    ),
]


# ---- Scans: loops along axis 1 -----------------------------------------------------------------------------------------


def loop(fold, first, elements, reverse=False, exclusive=False, starts=None):
    """``y = fold(y, *elements)`` at each position, from ``first`` on and again from there where a segment begins."""
    elements = jnp.broadcast_arrays(*elements)
    first = jnp.broadcast_to(first, elements[0][:, :1].shape)
    n = elements[0].shape[1]
    y, out = first, [None] * n
    for i, k in enumerate(range(n)[:: -1 if reverse else 1]):
        if starts is not None and i > 0:
            y = jnp.where(starts[:, k + reverse, None], jnp.zeros_like(first), y)
        folded = fold(y, *(e[:, k : k + 1] for e in elements))
        out[k], y = y if exclusive else folded, folded
    return jnp.concatenate(out, 1)


def x_and_starts(rng, shape):
    """Starts that have all of axis 1 only."""
    return small_integers(rng, shape), rng.random((1, shape[1], 1)) < 0.4


def factors_terms_state(rng, shape):
    """a, b, h0: a recurrence with all operands."""
    return small_integers(rng, shape), small_integers(rng, shape), small_integers(rng, (shape[0], 1, shape[2]))


def terms_factors_starts(rng, shape):
    """b, a, starts: factors that are shared by the first dimension and by the steps."""
    return small_integers(rng, shape), small_integers(rng, (1, 1, shape[2])), rng.random((*shape[:2], 1)) < 0.4


def linear_scan_cases(module, tier, forward):
    step = lambda h, a, b: a * h + b
    return [
        Case(
            f"{tier}linear_scan-full",
            lambda a, b, h0: module.linear_scan(a, b, h0[:, 0], axis=1),
            lambda a, b, h0: loop(step, h0, (a, b)),
            factors_terms_state,
            forward,
        ),
        Case(
            f"{tier}linear_scan-broadcast",
            lambda b, a, starts: module.linear_scan(a, b, axis=1, reverse=True, segment_starts=starts),
            lambda b, a, starts: loop(step, 0.0, (a, b), reverse=True, starts=starts),
            terms_factors_starts,
            forward,
            representative=not forward,
        ),
    ]


def integers_only(rng, shape):
    return (small_integers(rng, shape),)


# The references are not `jax.lax.cumprod` and the like: XLA crashes on their gradients inside shard_map.
SCAN_CASES = [
    *linear_scan_cases(jaxgpuops, "", forward=False),
    *linear_scan_cases(jaxgpuops.lax, "lax.", forward=True),
    Case(
        "cumsum-reverse-exclusive-segments",
        lambda x, starts: jaxgpuops.cumsum(x, axis=1, reverse=True, exclusive=True, segment_starts=starts),
        lambda x, starts: loop(jnp.add, 0.0, (x,), reverse=True, exclusive=True, starts=starts),
        x_and_starts,
        forward=False,
        representative=True,
    ),
    Case(
        "cummax",  # elements are distinct, because JAX's gradient splits ties
        functools.partial(jaxgpuops.cummax, axis=1, reverse=True),
        lambda x: loop(jnp.maximum, -jnp.inf, (x,), reverse=True),
        x_only,
        forward=False,
    ),
    Case(
        "lax.cumprod-exclusive",
        functools.partial(jaxgpuops.lax.cumprod, axis=1, exclusive=True),
        lambda x: loop(jnp.multiply, 1.0, (x,), exclusive=True),
        integers_only,
    ),
]

# ---- The gate -----------------------------------------------------------------------------------------------------------


def logits_only(rng, shape):
    return (distinct_integers(rng, shape) / 16,)


def logits_and_bias(rng, shape):
    """A bias of each expert along axis 1."""
    return *logits_only(rng, shape), distinct_integers(rng, (1, shape[1], 1)) / 8


def gate_reference(logits, bias=None, *, axis, score="softmax", normalize=True):
    scores = {
        "softmax": functools.partial(jax.nn.softmax, axis=axis),
        "sigmoid": jax.nn.sigmoid,
        "sqrt_softplus": lambda z: jnp.sqrt(jax.nn.softplus(z)),
    }[score](logits)
    indices = jax.lax.top_k(logits if bias is None else scores + bias, 2, axis=axis)[1]
    weights = take_along_axis(scores, indices, axis % scores.ndim)  # jnp's needs help on explicit meshes
    return weights / weights.sum(axis, keepdims=True) if normalize else weights, indices


GATE_CASES = [
    Case(
        "topk_softmax-sigmoid-bias",
        lambda x, bias: jaxgpuops.topk_softmax(x, 2, axis=1, score="sigmoid", bias=bias),
        functools.partial(gate_reference, axis=1, score="sigmoid"),
        logits_and_bias,
        forward=False,
        tolerance=1e-5,
        representative=True,
    ),
    Case(
        "lax.topk_softmax-unnormalised",
        functools.partial(jaxgpuops.lax.topk_softmax, k=2, axis=-1, normalize=False),
        functools.partial(gate_reference, axis=-1, normalize=False),
        logits_only,
        tolerance=1e-5,
    ),
    Case(
        "topk_softmax-sqrt_softplus-bias",
        lambda x, bias: jaxgpuops.topk_softmax(x, 2, axis=1, score="sqrt_softplus", bias=bias),
        functools.partial(gate_reference, axis=1, score="sqrt_softplus"),
        logits_and_bias,
        forward=False,
        tolerance=1e-5,
    ),
    Case(
        "lax.topk_softmax-groups-scale",  # groups of one: the best two are those of the best two groups
        lambda x: jaxgpuops.lax.topk_softmax(x, 2, groups=x.shape[-1], topk_groups=2, scale=2.0),
        lambda x: (lambda weights, indices: (2 * weights, indices))(*gate_reference(x, axis=-1)),
        logits_only,
        tolerance=1e-5,
    ),
]

# ---- The softmax family and reductions ----------------------------------------------------------------------------------


def x_of_eighths(rng, shape):
    return distinct_integers(rng, shape) / 16


def x_bias_where(rng, shape):
    """A bias that the first dimension shares, a mask that the last shares; the first entry of the axis always
    counts."""
    where = rng.random((*shape[:2], 1)) < 0.7
    where[:, 0] = True
    return x_of_eighths(rng, shape), x_of_eighths(rng, (1, *shape[1:])), where


def x_and_scale(rng, shape):
    """One number for each row along the last dimension."""
    return x_of_eighths(rng, shape), rng.integers(1, 5, (*shape[:2], 1)).astype(np.float32) / 2


def x_and_labels(rng, shape):
    return x_of_eighths(rng, shape), rng.integers(0, shape[1], (shape[0], 1, shape[2]), np.int32)


def x_and_x(rng, shape):
    return small_integers(rng, shape), small_integers(rng, shape)


def finite(fn):
    """Puts 0 in the place of the -inf of masked entries of log_softmax, so that losses are finite."""
    return lambda *args: (jnp.where(jnp.isfinite(y := fn(*args)), y, 0),)


def cross_entropy_reference(x, labels):
    log_p = jax.nn.log_softmax(x, 1)
    return -jnp.take_along_axis(log_p, labels, 1)[:, 0] + 0.25 * jax.nn.logsumexp(x, 1) ** 2


def lower_triangle(x):
    return jnp.tri(*x.shape[-2:], dtype=bool)


SOFTMAX_CASES = [
    Case(
        "softmax-bias-where",
        lambda x, bias, where: jaxgpuops.softmax(x, axis=1, bias=bias, where=where, scale=0.5),
        lambda x, bias, where: jax.nn.softmax(0.5 * x + bias, axis=1, where=where),
        x_bias_where,
        forward=False,
        tolerance=2e-5,
    ),
    Case(
        "lax.softmax-causal-scale",
        lambda x, scale: jaxgpuops.lax.softmax(x, scale=scale, causal=True),
        lambda x, scale: jax.nn.softmax(jnp.where(lower_triangle(x), x * scale, -1e9)),
        x_and_scale,
        tolerance=2e-5,
        representative=True,
    ),
    Case(
        "lax.log_softmax-bias-where",
        finite(lambda x, bias, where: jaxgpuops.lax.log_softmax(x, axis=1, bias=bias, where=where)),
        finite(lambda x, bias, where: jax.nn.log_softmax(jnp.where(where, x + bias, 0), axis=1, where=where)),
        x_bias_where,
        tolerance=2e-5,
    ),
    Case(
        "lax.softmax_cross_entropy",
        lambda x, labels: jaxgpuops.lax.softmax_cross_entropy(x, labels[:, 0], axis=1, z_loss=0.25),
        cross_entropy_reference,
        x_and_labels,
        tolerance=2e-5,
        representative=True,
    ),
    Case("lax.dot", functools.partial(jaxgpuops.lax.dot, axis=1), lambda x, y: (x * y).sum(1), x_and_x),
]

# ---- Counts and segments ------------------------------------------------------------------------------------------------


def x_and_row_ids(rng, shape):
    """Returns an id for each index of the first dimension; some are out of range."""
    return distinct_integers(rng, shape), rng.integers(-1, 4, (shape[0], 1, 1)).astype(np.int32)


def weights_and_bins(rng, shape):
    return small_integers(rng, shape), rng.integers(-1, 4, shape).astype(np.int32)


def x_and_experts(rng, shape):
    return distinct_integers(rng, shape), rng.integers(0, 4, shape).astype(np.int32)


def rows_of(experts):
    """Returns the row of each assignment as a matrix of zeros and ones. (In a shard_map, the result of JAX's argsort
    does not vary over the mesh axes of its keys.)"""
    mine, other = experts.ravel()[:, None], experts.ravel()[None]
    earlier = jnp.tril(jnp.ones((mine.size, mine.size), bool), -1)
    return jax.nn.one_hot(((other < mine) | ((other == mine) & earlier)).sum(1), mine.size)


MOE_CASES = [
    Case(
        "moe_dispatch",
        lambda x, ids: jaxgpuops.moe_dispatch(x, jaxgpuops.moe_plan(ids[:, :, 0], 4)),
        lambda x, ids: jnp.einsum("ar,aij->rij", rows_of(ids[:, :, 0]), jnp.repeat(x, ids.shape[1], 0)),
        x_and_experts,
        forward=False,
    ),
    Case(
        "moe_combine",
        lambda y, ids: jaxgpuops.moe_combine(
            y, jaxgpuops.moe_plan(ids[:, :1, 0], 4), ids[:, 1:2, 0].astype(np.float32)
        ),
        lambda y, ids: (
            jnp.einsum("ar,rij->aij", rows_of(ids[:, 0, 0]), y) * ids[:, 1, 0, None, None].astype(np.float32)
        ),
        x_and_experts,
        forward=False,
        representative=True,
    ),
]


def softmax_of_segments(x, ids):
    """The softmax in segments 0 and 1, which may have no rows."""
    return sum(jax.nn.softmax(jnp.where(ids == s, x, -1e9), 0) * (ids == s) for s in (0, 1))


def logsumexp_of_segments(x, ids):
    has = lambda s: jnp.any(ids == s, 0)
    fold = lambda s: jax.nn.logsumexp(jnp.where((ids == s) | ~has(s), x, -1e9), 0)
    return (jnp.stack([jnp.where(has(s), fold(s), 0) for s in (0, 1)]),)


COUNT_CASES = [
    Case(
        "segment_sum",
        lambda x, ids: jaxgpuops.segment_sum(x, ids[:, 0, 0], 3),
        lambda x, ids: jax.ops.segment_sum(x, ids[:, 0, 0], 3),
        x_and_row_ids,
        forward=False,
    ),
    Case(
        "segment_sum-shared",
        lambda x, ids: jax.vmap(lambda i: jaxgpuops.segment_sum(x, i, 3))(jnp.stack([ids[:, 0, 0], ids[::-1, 0, 0]])),
        lambda x, ids: jnp.stack([jax.ops.segment_sum(x, i, 3) for i in (ids[:, 0, 0], ids[::-1, 0, 0])]),
        x_and_row_ids,
        forward=False,
        representative=True,
    ),
    Case(
        "segment_max",
        finite(lambda x, ids: jaxgpuops.segment_max(x, ids[:, 0, 0], 3)),
        finite(lambda x, ids: jax.ops.segment_max(x, ids[:, 0, 0], 3)),
        x_and_row_ids,
        forward=False,
    ),
    *(
        Case(
            name,
            finite(lambda x, ids, name=name: getattr(jaxgpuops, name)(x / 16, ids[:, 0, 0], 2)),
            lambda x, ids, fold=fold: fold(x / 16, ids[:, :1]),
            x_and_row_ids,
            forward=False,
            tolerance=2e-5,
        )
        for name, fold in (("segment_softmax", softmax_of_segments), ("segment_logsumexp", logsumexp_of_segments))
    ),
    Case(
        "take",
        lambda x, ids: jaxgpuops.take(x, ids[:, 0]),
        lambda x, ids: jnp.einsum("ani,ijk->anjk", jax.nn.one_hot(ids[:, :, 0], x.shape[0], dtype=x.dtype), x),
        x_and_row_ids,
        forward=False,
    ),
    Case(
        "quantile",
        lambda x, _: jaxgpuops.quantile(x, 0.3, axis=1, method="lower"),
        lambda x, _: jnp.quantile(x, 0.3, axis=1, method="lower"),
        x_and_row_ids,
    ),
    Case(
        "compact",
        lambda x, ids: jaxgpuops.compact(x, ids[:, 0, 0] > 0, size=2),
        lambda x, ids: jnp.where(
            jnp.arange(2).reshape(2, 1, 1) < (ids[:, 0, 0] > 0).sum(),
            x[jnp.argsort(ids[:, 0, 0] <= 0, stable=True)[:2]],
            0,
        ),
        x_and_row_ids,
    ),
    Case(
        "bincount-weights",
        lambda w, x: jaxgpuops.bincount(x, 3, weights=w),
        lambda w, x: (w[..., None] * jax.nn.one_hot(x, 3, dtype=w.dtype)).sum(-2),
        weights_and_bins,
        forward=False,
    ),
]

CASES = [
    *COUNT_CASES,
    *MOE_CASES,
    topk_case(k=2, axis=-1),
    topk_case(k=3, axis=0, largest=False),
    topk_case(k=2, axis=1, sorted=False),
    Case(
        "topk-lengths",
        lambda x: finite_topk(jaxgpuops.topk(x, 2, axis=1, lengths=np.array([3, 1, 2, 0]))),
        padded_topk_reference,
        x_only,
    ),
    Case(
        "topk-segments",
        lambda x: finite_topk(jaxgpuops.topk(x, 2, axis=1, offsets=np.array([0, 3, 4, 4]))),
        segments_topk_reference,
        x_only,
    ),
    lax_top_k_case(k=2, axis=-1),
    lax_top_k_case(k=2, axis=1),
    *(
        Case(
            f"lax.{name}",
            functools.partial(getattr(jaxgpuops.lax, name), axis=1, index_dtype=np.int32),
            functools.partial(getattr(jax.lax, name), axis=1, index_dtype=np.int32),
            x_only,
            representative=name == "argmax",
        )
        for name in ("argmax", "argmin")
    ),
    Case(
        "take_along_axis",
        functools.partial(take_along_axis, axis=1),
        functools.partial(jnp.take_along_axis, axis=1),
        x_and_indices,
    ),
    Case(
        "put_along_axis",
        functools.partial(put_along_axis, axis=1, length=5),
        put_reference,
        updates_and_indices,
        representative=True,
    ),
    *SORT_CASES,
    *SCAN_CASES,
    *GATE_CASES,
    *SOFTMAX_CASES,
]


PAIRS = [(case, check) for case in CASES for check in CHECKS if check.every or case.representative]


@pytest.mark.parametrize("case, check", PAIRS, ids=lambda part: part.name)
def test_transform(case, check):
    if check.forward and not case.forward:
        with pytest.raises(TypeError, match="forward-mode"):
            check.run(leaves_of(case.fn), case)
        return
    assert_same(check.run(leaves_of(case.fn), case), check.expected(reference_of(case), case), case.tolerance)
