"""The gate of a mixture of experts as a primitive."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxgpuops import _arguments, _native
from jaxgpuops._partition import RULES, Rule, manual
from jaxgpuops._primitive import Kernel, align, def_jvp
from jaxgpuops.lax._topk import top_k_p
from jaxgpuops.lax.along_axis import put_along_axis, take_along_axis
from jaxgpuops.lax.softmax_primitives import bind, softmax_p

# What the kernel takes, as in topk_softmax/plan.h; longer rows and larger k are composed of other kernels.
MAX_LENGTH, MAX_K = 1024, 64


Score = Literal["softmax", "sigmoid", "sqrt_softplus"]
SCORES: tuple[Score, ...] = get_args(Score)  # a primitive and its handler know a score by its place


class TopKSoftmax(NamedTuple):
    """The weights of the chosen experts, and the indices of these."""

    weights: jax.Array
    indices: jax.Array


# ---- Scores ---------------------------------------------------------------------------------------------------------


def _shares(scores, axis):
    """Divides numbers, which are given by their logarithms, by their sum."""
    top = jnp.max(scores, axis, keepdims=True, initial=-jnp.inf)
    e = jnp.exp(scores - top)
    return e / e.sum(axis, keepdims=True)


_FAR = -40.0  # below this, softplus(z) is e^z in every dtype, and underflows long before its square root does


def _sqrt_softplus(z, shift=0):
    """Returns the square root of softplus(z). Below _FAR it is divided by e^(shift / 2), so that it cannot
    underflow."""
    far, near = jnp.minimum(z, _FAR), jnp.maximum(z, _FAR)
    return jnp.where(z < _FAR, jnp.exp((far - shift) / 2), jnp.sqrt(jax.nn.softplus(near)))


def _shares_of_sqrt_softplus(z, axis):
    top = jnp.max(jax.lax.stop_gradient(z), axis, keepdims=True, initial=-jnp.inf)
    scores = _sqrt_softplus(z, jnp.where(top < _FAR, top, 0))
    # The sum is NaN if the largest logit is infinite, as for softmax.
    return scores / (scores.sum(axis, keepdims=True) + (top - top))


def _slope_of_sqrt_softplus(z):
    near = jnp.maximum(z, _FAR)
    return jnp.where(z < _FAR, 0.5, 0.5 * jax.nn.sigmoid(near) / jax.nn.softplus(near))


class _Own(NamedTuple):
    """A score that depends on one logit only: the score, scores divided by their sum, and the derivative of its
    logarithm."""

    score: Callable[[jax.Array], jax.Array]
    shares: Callable[[jax.Array, int], jax.Array]
    slope: Callable[[jax.Array], jax.Array]


_OWN = {  # by the index of the score; softmax is missing, since it depends on all logits
    1: _Own(jax.nn.sigmoid, lambda z, axis: _shares(jax.nn.log_sigmoid(z), axis), lambda z: jax.nn.sigmoid(-z)),
    2: _Own(_sqrt_softplus, _shares_of_sqrt_softplus, _slope_of_sqrt_softplus),
}


def _scores_of(logits, axis, score, split=None):
    """Returns the scores of all experts. Those of softmax add up to 1."""
    if score in _OWN:
        return _OWN[score].score(logits)
    if split is None:
        return _shares(logits, axis)
    return bind(softmax_p, (logits, None, None, None), axis, 1.0, None, split)[0]


def shares_of(logits, axis, score):
    """Returns scores divided by their sum. They are scaled first, so that they do not all underflow."""
    return _OWN[score].shares(logits, axis) if score in _OWN else _shares(logits, axis)


# ---- The gate -------------------------------------------------------------------------------------------------------


def _in_chosen_groups(keys, axis, groups, topk_groups, best):
    """Keys of the experts of the best groups, and -inf of the others. A group counts by the sum of its ``best`` first."""
    size = keys.shape[axis] // groups
    grouped = keys.reshape(*keys.shape[:axis], groups, size, *keys.shape[axis + 1 :])
    top_k = functools.partial(top_k_p, largest=True, sorted=True)
    of_groups = top_k(grouped, axis=axis + 1, k=min(best, size))[0].sum(axis + 1)
    chosen = top_k(of_groups, axis=axis, k=topk_groups)[1]
    place = jnp.arange(groups).reshape(groups, *(1 for _ in keys.shape[axis + 1 :]))
    kept = (jnp.expand_dims(chosen, axis + 1) == place).any(axis)
    return jnp.where(jnp.expand_dims(kept, axis + 1), grouped, -jnp.inf).reshape(keys.shape)


def composed(logits, *bias, axis, k, score, normalize, biased, groups=1, topk_groups=1, split=None):
    """The gate, made of other kernels and plain JAX: what the primitive computes, for any dtype and size."""
    wide = logits.astype(_arguments.wide(logits.dtype))
    keys, scores = jax.lax.stop_gradient(logits), None
    if biased or not normalize:
        scores = _scores_of(wide, axis, score, split)
    if biased:
        keys = jax.lax.stop_gradient(scores) + bias[0]
        keys = jnp.where(jnp.isnan(keys), jnp.nan, keys)  # all NaNs get the same sign
    if groups > 1:
        keys = _in_chosen_groups(keys, axis, groups, topk_groups, 2 if biased else 1)
    indices = top_k_p(keys, axis=axis, k=k, largest=True, sorted=True, split=split)[1]
    if normalize:
        weights = shares_of(take_along_axis(logits, indices, axis, split).astype(wide.dtype), axis, score)
    else:
        weights = take_along_axis(scores, indices, axis, split)
    return weights.astype(logits.dtype), indices


def _plan(rows, avals, compute_capability, axis, *, k, **_):
    return _native.modules["cpu"].plan_topk_softmax(*rows, k)


topk_softmax_p = Kernel(
    "topk_softmax",
    reindexes=True,
    results=lambda logits, *_, axis, k, **params: [(k, logits.dtype), (k, np.int32)],
    fallback=composed,
    accepts=(_arguments.FLOATS - {np.dtype(np.float64)}).__contains__,
    attributes=("score", "normalize", "biased"),
    broadcasts=lambda count, **_: range(1, count),
    plan=_plan,
)


def saved(logits, indices, *, axis, score, normalize, **_):
    """What derivatives need beside the results."""
    if score in _OWN:
        return take_along_axis(logits, indices, axis)
    return None if normalize else logits


def tangent(t, rest, weights, indices, *, axis, score, normalize, **_):
    """The tangent of the weights: each times that of its logarithm. The choice is locally constant."""
    w = weights.astype(_arguments.wide(weights.dtype))
    dlog = take_along_axis(t, indices, axis).astype(w.dtype)
    if score in _OWN:
        dlog *= _OWN[score].slope(rest.astype(w.dtype))
    if normalize:
        dlog -= (w * dlog).sum(axis, keepdims=True)
    elif score not in _OWN:
        dlog -= (_shares(rest.astype(w.dtype), axis) * t.astype(w.dtype)).sum(axis, keepdims=True)
    return (w * dlog).astype(weights.dtype)


def cotangent_of_logits(ct, rest, weights, indices, *, length, along, axis, score, normalize, **_):
    """The transpose of `tangent`."""
    w = weights.astype(_arguments.wide(weights.dtype))
    c = w * ct.astype(w.dtype)
    total = c.sum(axis, keepdims=True)
    if normalize:
        c -= w * total
    if score in _OWN:
        c *= _OWN[score].slope(rest.astype(w.dtype))
    if normalize or score in _OWN:
        return put_along_axis(c.astype(ct.dtype), indices, axis, length, along)
    return (put_along_axis(c, indices, axis, length, along) - _shares(rest.astype(w.dtype), axis) * total).astype(
        ct.dtype
    )


def _jvp(outs, primals, tangents, **kind):
    if tangents[0] is None:  # only the bias moves
        return None, None
    weights, indices = outs
    return tangent(tangents[0], saved(primals[0], indices, **kind), weights, indices, **kind), None


def_jvp(topk_softmax_p, _jvp)


def _pays(split, avals, *, k, biased, **_):
    """Whether candidates, what is taken and the numbers of softmax are less than the rows."""
    itemsize = avals[0].dtype.itemsize
    wide = _arguments.wide(avals[0].dtype).itemsize
    candidates = min(k, split.part) * split.shards * ((wide if biased else itemsize) + 4)
    return candidates + (k + 2) * wide < split.length * itemsize


RULES["topk_softmax"] = Rule(
    lambda splits, *operands, axis, **params: composed(*operands, axis=axis, split=splits[axis], **params), pays=_pays
)


def gate(logits, bias, split=None, **params) -> TopKSoftmax:
    """The primitive, or what it is composed of, on checked arguments."""
    length, k = logits.shape[params["axis"]], params["k"]
    operands, biased = _arguments.given(logits, bias), bias is not None
    fits = isinstance(length, int) and isinstance(k, int) and length <= MAX_LENGTH and k <= MAX_K
    if split is None and fits and params["groups"] == 1 and params["score"] < 2:
        params = {name: p for name, p in params.items() if name not in ("groups", "topk_groups")}
        return TopKSoftmax(*topk_softmax_p(*operands, biased=biased, **params))
    return TopKSoftmax(*composed(*operands, biased=biased, split=split, **params))


def checked(op: str, logits, bias, k, axis, names, score, normalize, groups, topk_groups):
    """Logits and bias of one rank, aligned, the split of the axis, and the params of `gate`."""
    _arguments.dtype(op, "logits", logits.dtype, _arguments.FLOATS)
    axis = _arguments.ordered(op, "logits", logits, axis)
    split = manual(op, names, logits.shape[axis])
    k = _arguments.count(op, "k", k, logits, axis, split)
    groups, topk_groups = _groups(op, logits.shape[axis], k, groups, topk_groups)
    if groups > 1 and split is not None:
        raise ValueError(f"{op}: groups are of experts that one device has; with axis_name it must be 1, got {groups}")
    if bias is not None:
        wide = _arguments.wide(logits.dtype)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"{op}: bias must have a float dtype, got {bias.dtype}")
        if bias.ndim == 1:  # the bias has one number for each expert
            bias = bias.reshape(*bias.shape, *(1 for _ in logits.shape[axis + 1 :]))
        bias = _arguments.broadcasting(op, "bias", bias, logits.shape).astype(wide)
        logits, bias = align(logits, bias)
    params = {"axis": axis, "k": k, "score": SCORES.index(score), "normalize": normalize}
    return logits, bias, split, params | {"groups": groups, "topk_groups": topk_groups}


def _groups(op, length, k, groups, topk_groups):
    """Checks groups; returns one group if all groups are chosen."""
    if groups < 1 or groups > 1 and (not isinstance(length, int) or length % groups):
        raise ValueError(f"{op}: groups must be 1 or more and divide the {length} experts, got {groups}")
    topk_groups = groups if topk_groups is None else topk_groups
    if not 1 <= topk_groups <= groups:
        raise ValueError(f"{op}: topk_groups must be between 1 and {groups}, the number of groups, got {topk_groups}")
    if topk_groups == groups:
        return 1, 1
    if k > topk_groups * (length // groups):
        raise ValueError(
            f"{op}: k must be at most {topk_groups * (length // groups)}, the experts of {topk_groups} groups, got {k}"
        )
    return groups, topk_groups


class Options(NamedTuple):
    """The static options of a call, checked except for what depends on the logits."""

    k: int
    axis: int
    names: tuple[str, ...] | None
    score: Score
    normalize: bool
    groups: int
    topk_groups: int | None


def arguments(op: str, logits, bias, scale, k, axis, axis_name, score, normalize, groups, topk_groups):
    """Logits, bias and scale as arrays or None, and the options."""
    logits = _arguments.array(op, "logits", logits)
    bias, scale = _arguments.optional(op, "bias", bias), _arguments.optional(op, "scale", scale)
    if scale is not None:
        _arguments.dtype(op, "scale", scale.dtype, _arguments.FLOATS | _arguments.INTEGERS)
        if scale.shape:
            raise ValueError(f"{op}: scale must be one number, got shape {scale.shape}")
    k, axis = _arguments.integer(op, "k", k), _arguments.integer(op, "axis", axis)
    groups = _arguments.integer(op, "groups", groups)
    topk_groups = None if topk_groups is None else _arguments.integer(op, "topk_groups", topk_groups)
    score = _arguments.choice(op, "score", score, SCORES)
    names, normalize = _arguments.names(op, axis_name), _arguments.flag(op, "normalize", normalize)
    return logits, bias, scale, Options(k, axis, names, score, normalize, groups, topk_groups)


def scaled(gated: TopKSoftmax, scale) -> TopKSoftmax:
    """Weights times a number."""
    if scale is None:
        return gated
    weights, wide = gated.weights, _arguments.wide(gated.weights.dtype)
    return gated._replace(weights=(weights.astype(wide) * scale.astype(wide)).astype(weights.dtype))


@functools.partial(jax.jit, static_argnums=3, inline=True)
def _topk_softmax(logits, bias, scale, options):
    logits, bias, split, params = checked("jaxgpuops.lax.topk_softmax", logits, bias, *options)
    return scaled(gate(logits, bias, split, **params), scale)


def topk_softmax(
    logits: ArrayLike,
    k: int,
    *,
    axis: int = -1,
    normalize: bool = True,
    score: Score = "softmax",
    bias: ArrayLike | None = None,
    groups: int = 1,
    topk_groups: int | None = None,
    scale: ArrayLike | None = None,
    axis_name: _arguments.AxisName = None,
) -> TopKSoftmax:
    """The ``k`` experts with the highest scores, and their weights: as `jaxgpuops.topk_softmax` defines them.

    Unlike that function, this one also has forward-mode derivatives (`jax.jvp`, `jax.jacfwd`, `jax.linearize`).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> logits = jnp.log(jnp.array([1.0, 4.0, 2.0, 1.0]))
    >>> weights, indices = jaxgpuops.lax.topk_softmax(logits, 2, normalize=False)
    >>> weights.round(3).tolist(), indices.tolist()
    ([0.5, 0.25], [1, 2])
    >>> gate = lambda logits: jaxgpuops.lax.topk_softmax(logits, 2, normalize=False).weights
    >>> jax.jvp(gate, (logits,), (jnp.array([1.0, 0.0, 0.0, 0.0]),))[1].round(4).tolist()
    [-0.0625, -0.031199999153614044]
    """
    op = "jaxgpuops.lax.topk_softmax"
    return _topk_softmax(*arguments(op, logits, bias, scale, k, axis, axis_name, score, normalize, groups, topk_groups))
