"""The gate of a mixture of experts as a primitive."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

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


class TopKSoftmax(NamedTuple):
    """Weights of the chosen experts, and which these are."""

    weights: jax.Array
    indices: jax.Array


def _shares(scores, axis):
    """Numbers divided by their sum, given their logarithms."""
    top = jnp.max(scores, axis, keepdims=True, initial=-jnp.inf)
    e = jnp.exp(scores - top)
    return e / e.sum(axis, keepdims=True)


def composed(logits, *bias, axis, k, sigmoid, normalize, biased, split=None):
    """The gate, made of other kernels and plain JAX: what the primitive computes, for any dtype and size."""
    wide = logits.astype(_arguments.wide(logits.dtype))
    if sigmoid:
        scores = jax.nn.sigmoid(wide)
    elif split is None:
        scores = _shares(wide, axis)
    else:
        scores = bind(softmax_p, (wide, None, None, None), axis, 1.0, None, split)[0]
    top_k = functools.partial(top_k_p, axis=axis, k=k, largest=True, sorted=True, split=split)
    if biased:
        keys = jax.lax.stop_gradient(scores) + bias[0]
        keys = jnp.where(jnp.isnan(keys), jnp.nan, keys)  # all of one sign
        indices = top_k(keys)[1]
    else:
        indices = top_k(jax.lax.stop_gradient(logits))[1]
    if normalize:
        chosen = take_along_axis(logits, indices, axis, split).astype(wide.dtype)
        weights = _shares(jax.nn.log_sigmoid(chosen) if sigmoid else chosen, axis)
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
    attributes=("sigmoid", "normalize", "biased"),
    broadcasts=lambda count, **_: range(1, count),
    plan=_plan,
)


def saved(logits, indices, *, axis, sigmoid, normalize):
    """What derivatives need beside the results."""
    if sigmoid:
        return take_along_axis(logits, indices, axis)
    return None if normalize else logits


def tangent(t, rest, weights, indices, *, axis, sigmoid, normalize):
    """The tangent of the weights: each times that of its logarithm. The choice is locally constant."""
    w = weights.astype(_arguments.wide(weights.dtype))
    dlog = take_along_axis(t, indices, axis).astype(w.dtype)
    if sigmoid:
        dlog *= jax.nn.sigmoid(-rest.astype(w.dtype))
    if normalize:
        dlog -= (w * dlog).sum(axis, keepdims=True)
    elif not sigmoid:
        dlog -= (_shares(rest.astype(w.dtype), axis) * t.astype(w.dtype)).sum(axis, keepdims=True)
    return (w * dlog).astype(weights.dtype)


def cotangent_of_logits(ct, rest, weights, indices, *, length, along, axis, sigmoid, normalize):
    """The transpose of `tangent`."""
    w = weights.astype(_arguments.wide(weights.dtype))
    c = w * ct.astype(w.dtype)
    total = c.sum(axis, keepdims=True)
    if normalize:
        c -= w * total
    if sigmoid:
        c *= jax.nn.sigmoid(-rest.astype(w.dtype))
    if normalize or sigmoid:
        return put_along_axis(c.astype(ct.dtype), indices, axis, length, along)
    return (put_along_axis(c, indices, axis, length, along) - _shares(rest.astype(w.dtype), axis) * total).astype(
        ct.dtype
    )


def _jvp(outs, primals, tangents, *, axis, k, sigmoid, normalize, biased):
    if tangents[0] is None:  # only the bias moves
        return None, None
    kind = {"axis": axis, "sigmoid": sigmoid, "normalize": normalize}
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
    if split is not None:
        return TopKSoftmax(*composed(*_arguments.given(logits, bias), biased=bias is not None, split=split, **params))
    fits = isinstance(length, int) and isinstance(k, int) and length <= MAX_LENGTH and k <= MAX_K
    operands = _arguments.given(logits, bias)
    return TopKSoftmax(*(topk_softmax_p if fits else composed)(*operands, biased=bias is not None, **params))


def checked(op: str, logits, bias, k, axis, names):
    """Logits and bias of one rank, aligned, axis, k, and the split of the axis."""
    _arguments.dtype(op, "logits", logits.dtype, _arguments.FLOATS)
    axis = _arguments.ordered(op, "logits", logits, axis)
    split = manual(op, names, logits.shape[axis])
    k = _arguments.count(op, "k", k, logits, axis, split)
    if bias is not None:
        wide = _arguments.wide(logits.dtype)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"{op}: bias must have a float dtype, got {bias.dtype}")
        if bias.ndim == 1:  # one for each expert, wherever the axis is
            bias = bias.reshape(*bias.shape, *(1 for _ in logits.shape[axis + 1 :]))
        bias = _arguments.broadcasting(op, "bias", bias, logits.shape).astype(wide)
        logits, bias = align(logits, bias)
    return logits, bias, axis, k, split


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6), inline=True)
def _topk_softmax(logits, bias, k, axis, names, score, normalize):
    logits, bias, axis, k, split = checked("jaxgpuops.lax.topk_softmax", logits, bias, k, axis, names)
    return gate(logits, bias, split, axis=axis, k=k, sigmoid=score == "sigmoid", normalize=normalize)


def topk_softmax(
    logits: ArrayLike,
    k: int,
    *,
    axis: int = -1,
    normalize: bool = True,
    score: Literal["softmax", "sigmoid"] = "softmax",
    bias: ArrayLike | None = None,
    axis_name: _arguments.AxisName = None,
) -> TopKSoftmax:
    """The ``k`` experts with the highest scores, and their weights: `jaxgpuops.topk_softmax`, which see.

    Unlike that function, this one has forward-mode derivatives too (`jax.jvp`, `jax.jacfwd`, `jax.linearize`).

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
    logits = _arguments.array(op, "logits", logits)
    bias = _arguments.optional(op, "bias", bias)
    k, axis = _arguments.integer(op, "k", k), _arguments.integer(op, "axis", axis)
    score = _arguments.choice(op, "score", score, ("softmax", "sigmoid"))
    names, normalize = _arguments.names(op, axis_name), _arguments.flag(op, "normalize", normalize)
    return _topk_softmax(logits, bias, k, axis, names, score, normalize)
