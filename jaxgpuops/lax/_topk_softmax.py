"""The gate of a mixture of experts as a primitive."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxgpuops import _arguments, _native
from jaxgpuops._arguments import AxisName
from jaxgpuops._derivatives import def_jvp
from jaxgpuops._primitive import Kernel, align
from jaxgpuops._split import RULES, Rule, manual
from jaxgpuops.lax._topk import top_k_p
from jaxgpuops.lax.along_axis import put_along_axis, take_along_axis
from jaxgpuops.lax.logsumexp_primitives import logsumexp_p
from jaxgpuops.lax.softmax_primitives import bind, softmax_p

# The largest sizes that the kernel takes, as in topk_softmax/plan.h. Beyond them, the gate is made of other kernels.
MAX_LENGTH, MAX_K, MAX_GROUPS = 1024, 64, 64


Score = Literal["softmax", "sigmoid", "sqrt_softplus"]
SCORES: tuple[Score, ...] = get_args(Score)  # params and handlers give a score as its index in this tuple
SOFTMAX = SCORES.index("softmax")


class TopKSoftmax(NamedTuple):
    """The chosen experts of `jaxgpuops.topk_softmax`, and their weights.

    Attributes:
      weights: ``(*before, k, *after)``, of the dtype of the logits.
      indices: the experts that were chosen; int32, of the same shape.
    """

    weights: jax.Array
    indices: jax.Array


# ---- Scores ---------------------------------------------------------------------------------------------------------


def _shares(scores, axis):
    """Divides numbers, which are given by their logarithms, by their sum."""
    top = jnp.max(scores, axis, keepdims=True, initial=-jnp.inf)
    e = jnp.exp(scores - top)
    return e / e.sum(axis, keepdims=True)


# Below this, softplus(z) rounds to e^z in every dtype, and its square root is computed as e^(z/2): e^z may underflow
# where e^(z/2) does not.
_FAR = -40.0


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


_OWN = {  # keys are indices of scores; softmax is missing, since it depends on all logits
    1: _Own(jax.nn.sigmoid, lambda z, axis: _shares(jax.nn.log_sigmoid(z), axis), lambda z: jax.nn.sigmoid(-z)),
    2: _Own(_sqrt_softplus, _shares_of_sqrt_softplus, _slope_of_sqrt_softplus),
}


def _scores_of(logits, axis, score, split=None):
    """Returns the scores of all experts. Those of softmax add up to 1."""
    return _OWN[score].score(logits) if score in _OWN else _softmax(logits, axis, split)


def _softmax(logits, axis, split=None):
    """Returns `_shares` by one kernel. XLA might make three."""
    return bind(softmax_p, (logits, None, None, None), axis, 1.0, None, split)[0]


def shares_of(logits, axis, score):
    """Returns scores divided by their sum. They are scaled first, so that they do not all underflow."""
    return _OWN[score].shares(logits, axis) if score in _OWN else _softmax(logits, axis)


# ---- The gate -------------------------------------------------------------------------------------------------------


def _best_sums(keys, axis, chunks, best):
    """Returns the ``best`` largest keys of each of ``chunks`` equal parts of the axis."""
    # All sizes are named: JAX cannot compute one of an array without elements.
    grouped = keys.reshape(*keys.shape[:axis], chunks, keys.shape[axis] // chunks, *keys.shape[axis + 1 :])
    return top_k_p(grouped, axis=axis + 1, k=min(best, grouped.shape[axis + 1]), largest=True, sorted=True)[0]


def _in_chosen_groups(keys, axis, groups, topk_groups, best, split):
    """Returns the keys of the experts; those of experts outside the best groups come after all others. Groups are
    compared by the sum of their ``best`` first keys. Devices that share the axis have whole groups, or several devices
    share one group (`_groups_fit`)."""
    length = keys.shape[axis] if split is None else split.length
    size = length // groups
    own = min(size, keys.shape[axis])  # how many elements of a group this device has
    of_groups = _best_sums(keys, axis, keys.shape[axis] // own, best)
    if split is not None:
        of_groups = split.gather(of_groups, axis)
    if own != size:
        of_groups = jax.lax.collapse(of_groups, axis, axis + 2)
        of_groups = _best_sums(of_groups, axis, groups, best)
    of_groups = of_groups.sum(axis + 1)
    of_groups = jnp.where(jnp.isnan(of_groups), jnp.nan, of_groups) if best > 1 else of_groups
    chosen = top_k_p(of_groups, axis=axis, k=topk_groups, largest=True, sorted=True)[1]
    place = jax.lax.broadcasted_iota(np.int32, keys.shape, axis) if split is None else split.positions(keys.shape, axis)
    kept = (jnp.expand_dims(chosen, axis + 1) == jnp.expand_dims(place // size, axis)).any(axis)
    bits = np.dtype(f"int{8 * keys.dtype.itemsize}")
    # The NaN with a sign that comes after all other numbers.
    last = jax.lax.bitcast_convert_type(jnp.asarray(-1, bits), keys.dtype)
    return jnp.where(kept, keys, last)


def composed(
    logits,
    *bias,
    axis,
    k,
    score,
    normalize,
    biased,
    groups=1,
    topk_groups=1,
    scale=1.0,
    log_sums=False,
    split=None,
    differentiable=True,
):
    """The gate, made of other kernels and plain JAX: what the primitive computes, for any dtype and size. Where the
    primitive's own rule gives the derivatives, ``differentiable=False`` spares a read."""
    wide = logits.astype(_arguments.wide(logits.dtype))
    keys, scores = jax.lax.stop_gradient(logits), None
    if biased or not normalize:
        scores = _scores_of(wide, axis, score, split)
    if biased:
        keys = jax.lax.stop_gradient(scores) + bias[0]
        keys = jnp.where(jnp.isnan(keys), jnp.nan, keys)  # all NaNs get the same sign
    if groups > 1 and keys.shape[axis] != 0:
        keys = _in_chosen_groups(keys, axis, groups, topk_groups, 2 if biased else 1, split)
    found, indices = top_k_p(keys, axis=axis, k=k, largest=True, sorted=True, split=split)
    if normalize:
        chosen = take_along_axis(logits, indices, axis, split) if biased or differentiable else found
        weights = shares_of(chosen.astype(wide.dtype), axis, score)
    else:
        weights = take_along_axis(scores, indices, axis, split)
    return (weights * scale).astype(logits.dtype), indices, *([_log_sum(wide, axis, split)] if log_sums else [])


def _log_sum(wide, axis, split):
    return bind(logsumexp_p, (wide, None, None, None), axis, 1.0, None, split, parts=False)[0]


def _plan(rows, avals, compute_capability, axis, *, k, groups, score, normalize, biased, log_sums, **_):
    sums_rows = log_sums or (score == SOFTMAX and (biased or not normalize))
    return _native.modules["cpu"].plan_topk_softmax(*rows, k, groups, biased, sums_rows)


topk_softmax_p = Kernel(
    "topk_softmax",
    reindexes=True,
    results=lambda logits, *_, axis, k, log_sums, **params: [
        (k, logits.dtype),
        (k, np.int32),
        *([(None, _arguments.wide(logits.dtype))] if log_sums else []),
    ],
    fallback=functools.partial(composed, differentiable=False),
    accepts=(_arguments.FLOATS - {np.dtype(np.float64)}).__contains__,
    attributes=("score", "normalize", "biased", "groups", "topk_groups", "scale", "log_sums"),
    broadcasts=lambda count, **_: range(1, count),
    plan=_plan,
)


def saved(logits, indices, *, axis, score, normalize, log_sums, **_):
    """Returns what derivatives need besides the results: the logits of the chosen experts, and those of all."""
    chosen = take_along_axis(logits, indices, axis) if score in _OWN else None
    return chosen, logits if log_sums or (score == SOFTMAX and not normalize) else None


def _inverse(scale):
    return 1 / scale if scale else 0.0  # weights that are all 0 have no derivatives


def tangents(t, rest, outs, *, axis, score, normalize, scale, **_):
    """Returns the tangents of the results. The tangent of a weight is the weight times the tangent of its logarithm;
    the choice is locally constant."""
    weights, indices, *log_sum = outs
    chosen, logits = rest
    w = weights.astype(_arguments.wide(weights.dtype))
    wide = lambda x: x.astype(w.dtype)
    dlog = wide(take_along_axis(t, indices, axis))
    if score in _OWN:
        dlog *= _OWN[score].slope(wide(chosen))
    if normalize:
        dlog -= (w * dlog).sum(axis, keepdims=True) * _inverse(scale)
    elif score == SOFTMAX:
        dlog -= (_shares(wide(logits), axis) * wide(t)).sum(axis, keepdims=True)
    of_sums = [(jnp.exp(wide(logits) - jnp.expand_dims(s, axis)) * wide(t)).sum(axis) for s in log_sum]
    return [(w * dlog).astype(weights.dtype), None, *of_sums]


def _total(x, axis):
    """Sums few elements by adding slices: XLA makes one kernel of slices and of what follows, but two of a reduction
    and of what follows."""
    k = x.shape[axis]
    if not isinstance(k, int) or not 0 < k <= 16:
        return x.sum(axis, keepdims=True)
    return sum(jax.lax.slice_in_dim(x, j, j + 1, axis=axis) for j in range(k))


# Of so many logits or fewer (half as many if k is 16), each looks for itself among the chosen ones. That takes no
# kernel of its own, but time for each of the k; XLA makes two kernels of more.
_FEW = 1 << 16


def _spread(c, indices, axis, length, along):
    """Returns what `put_along_axis` does. For few logits it is plain JAX, which XLA fuses with what makes ``c``."""
    k = c.shape[axis]
    numbers = [d for d in (*c.shape, length) if isinstance(d, int)]
    if along is not None or len(numbers) <= c.ndim or not 0 < k <= 16 or math.prod(numbers) > _FEW * min(k, 8):
        return put_along_axis(c, indices, axis, length, along)
    place = jax.lax.broadcasted_iota(np.int32, [length if d == axis else 1 for d in range(c.ndim)], axis)
    out = jnp.zeros((), c.dtype)
    for j in range(k):
        of_choice = lambda x, j=j: jax.lax.slice_in_dim(x, j, j + 1, axis=axis)
        out = jnp.where(of_choice(indices) == place, of_choice(c), out)
    return out


def cotangent_of_logits(cts, rest, outs, *, length, along, axis, score, normalize, scale, **_):
    """The transpose of `tangents`."""
    weights, indices, *log_sum = outs
    chosen, logits = rest
    ct = cts[0]
    w = weights.astype(_arguments.wide(weights.dtype))
    wide = lambda x: x.astype(w.dtype)
    c = w * wide(ct)
    total = _total(c, axis)
    dense = []  # terms of the cotangents of all logits
    if normalize:
        c -= w * total * _inverse(scale)
    elif score == SOFTMAX:
        dense.append(-_shares(wide(logits), axis) * total)
    if score in _OWN:
        c *= _OWN[score].slope(wide(chosen))
    for s, of_sum in zip(log_sum, cts[2:], strict=True):
        dense.append(jnp.exp(wide(logits) - jnp.expand_dims(s, axis)) * jnp.expand_dims(of_sum, axis))
    if not dense:
        return _spread(c.astype(ct.dtype), indices, axis, length, along)
    return sum(dense, _spread(c, indices, axis, length, along)).astype(ct.dtype)


def _jvp(outs, primals, moved, **kind):
    if moved[0] is None:  # only the bias has a tangent
        return [None for _ in outs]
    return tangents(moved[0], saved(primals[0], outs[1], **kind), outs, **kind)


def_jvp(topk_softmax_p, _jvp)


def _groups_fit(split, groups):
    """Whether each device has whole groups of the axis, or a part of one."""
    size = split.length // groups
    return not split.uneven and (split.part % size == 0 or size % split.part == 0)


def _pays(split, avals, *, k, biased, groups, **_):
    """Whether the candidates, the elements that are taken, the groups and the sums of softmax have fewer bytes than the
    rows."""
    itemsize = avals[0].dtype.itemsize
    wide = _arguments.wide(avals[0].dtype).itemsize
    if groups > 1 and not _groups_fit(split, groups):
        return False
    key = wide if biased else itemsize
    candidates = min(k, split.part) * split.shards * (key + 4)
    of_groups = max(groups, split.shards) * (2 if biased else 1) * key if groups > 1 else 0
    return candidates + of_groups + (k + 2) * wide < split.length * itemsize


RULES["topk_softmax"] = Rule(
    lambda splits, *operands, axis, **params: composed(*operands, axis=axis, split=splits[axis], **params), pays=_pays
)


def gate(logits, bias, split=None, **params):
    """Returns the results of the primitive, or of the kernels that replace it, for checked arguments."""
    length, k = logits.shape[params["axis"]], params["k"]
    operands, biased = _arguments.given(logits, bias), bias is not None
    fits = isinstance(length, int) and isinstance(k, int) and length <= MAX_LENGTH and k <= MAX_K
    if split is None and fits and params["groups"] <= MAX_GROUPS and (k > 0 or not params["log_sums"]):
        return tuple(topk_softmax_p(*operands, biased=biased, **params))
    return composed(*operands, biased=biased, split=split, **params)


def checked(op: str, logits, bias, k, axis, names, score, normalize, groups, topk_groups, scale, log_sums=False):
    """Returns logits and bias of one rank, aligned; the split of the axis; and the params of `gate`."""
    _arguments.dtype(op, "logits", logits.dtype, _arguments.FLOATS)
    axis = _arguments.ordered(op, "logits", logits, axis)
    split = manual(op, names, logits.shape[axis])
    k = _arguments.count(op, "k", k, logits, axis, split)
    groups, topk_groups = _groups(op, logits.shape[axis] if split is None else split.length, k, groups, topk_groups)
    if groups > 1 and split is not None and not _groups_fit(split, groups):
        raise ValueError(
            f"{op}: with axis_name, devices must have whole groups or equal parts of one; {split.shards} devices have "
            f"{split.part} experts each, in groups of {split.length // groups}"
        )
    if bias is not None:
        wide = _arguments.wide(logits.dtype)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"{op}: bias must have a float dtype, got {bias.dtype}")
        if bias.ndim == 1:  # the bias has one number for each expert
            bias = bias.reshape(*bias.shape, *(1 for _ in logits.shape[axis + 1 :]))
        bias = _arguments.broadcasting(op, "bias", bias, logits.shape).astype(wide)
        logits, bias = align(logits, bias)
    params = {"axis": axis, "k": k, "score": SCORES.index(score), "normalize": normalize, "scale": scale}
    return logits, bias, split, params | {"groups": groups, "topk_groups": topk_groups, "log_sums": log_sums}


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
    scale: float = 1.0
    log_sums: bool = False  # a third result: the logarithms of the sums of exponentials of whole rows


def arguments(op: str, logits, bias, scale, k, axis, axis_name, score, normalize, groups, topk_groups):
    """Returns logits, bias and scale as arrays or None, and the options. A scale that is a number is an option."""
    logits = _arguments.array(op, "logits", logits)
    bias, number = _arguments.optional(op, "bias", bias), 1.0
    if isinstance(scale, int | float | np.integer | np.floating) and not isinstance(scale, bool):
        scale, number = None, _arguments.number(op, "scale", scale)
    scale = _arguments.optional(op, "scale", scale)
    if scale is not None:
        _arguments.dtype(op, "scale", scale.dtype, _arguments.FLOATS | _arguments.INTEGERS)
        if scale.shape:
            raise ValueError(f"{op}: scale must be one number, got shape {scale.shape}")
    k, axis = _arguments.integer(op, "k", k), _arguments.integer(op, "axis", axis)
    groups = _arguments.integer(op, "groups", groups)
    topk_groups = None if topk_groups is None else _arguments.integer(op, "topk_groups", topk_groups)
    score = _arguments.choice(op, "score", score, SCORES)
    names, normalize = _arguments.names(op, axis_name), _arguments.flag(op, "normalize", normalize)
    return logits, bias, scale, Options(k, axis, names, score, normalize, groups, topk_groups, number)


def scaled(results, scale):
    """Returns the results, with the weights multiplied by a number that is known only when the program runs."""
    weights, *others = results
    if scale is not None:
        wide = _arguments.wide(weights.dtype)
        weights = (weights.astype(wide) * scale.astype(wide)).astype(weights.dtype)
    return weights, *others


@functools.partial(jax.jit, static_argnums=3, inline=True)
def _topk_softmax(logits, bias, scale, options):
    logits, bias, split, params = checked("jaxgpuops.lax.topk_softmax", logits, bias, *options)
    return TopKSoftmax(*scaled(gate(logits, bias, split, **params), scale))


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
    axis_name: AxisName = None,
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
