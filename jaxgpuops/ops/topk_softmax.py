"""`jaxgpuops.topk_softmax`."""

from __future__ import annotations

import functools
from typing import Literal

import jax
from jax.typing import ArrayLike

from jaxgpuops import _arguments
from jaxgpuops.lax._topk_softmax import TopKSoftmax, checked, cotangent_of_logits, gate, saved
from jaxgpuops.lax.along_axis import along


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
    """The gate of a mixture of experts: the ``k`` experts with the highest scores, and their weights, in one kernel.

    Args:
      logits: array of shape ``(*before, n, *after)``, a logit for each of ``n`` experts, of dtype float16, bfloat16,
        float32 or float64.
      k: how many experts, ``0 <= k <= n``; static.
      axis: the axis of length ``n``.
      normalize: whether the weights of the chosen experts are divided by their sum.
      score: "softmax" (over all experts) or "sigmoid" of the logits.
      bias: added to the scores to choose experts, and to nothing else, as for a balanced load without an auxiliary
        loss. Of shape ``(n,)``, or any that broadcasts to that of the logits.
      axis_name: inside `jax.shard_map`, what ``axis`` is split along, as for `jaxgpuops.topk`; a
        ``bias`` of one number an expert is this device's part.

    Returns:
      ``TopKSoftmax(weights, indices)``, both of shape ``(*before, k, *after)``; weights of the dtype of the logits,
      computed in float32 at least and rounded once, in descending order of what chose them; indices int32.

    Order: without a bias the choice is that of ``jax.lax.top_k(logits, k)`` exactly, so a NaN comes first and ties go
    to the lower index. With one it is made by ``score + bias``, in float32 (float64 where the logits are): the lower
    index wins a tie, NaNs come first. Weights that include a NaN are NaN, as those of softmax over +inf are.

    Derivatives: of the weights with respect to the logits; the choice is constant, the bias gets no gradient. With
    softmax and ``normalize``, and with sigmoid, only logits of chosen experts have one. Reverse mode works, and
    whatever is built on top of it; for forward mode at the bottom use `jaxgpuops.lax.topk_softmax`.

    One kernel takes ``n <= 1024`` and ``k <= 64`` (not float64); larger calls are composed of top-k and other kernels.

    Raises:
      TypeError: for other dtypes, for ``k`` or ``axis`` that are not integers, and a flag that is not True or False,
        known at trace time.
      ValueError: for a scalar, ``axis`` or ``k`` out of range, another ``score``, a ``bias`` that does not broadcast.

    Gates of this kind: Shazeer et al., "Outrageously large neural networks" (2017); sigmoid scores with a bias for
    the choice: DeepSeek-AI, "DeepSeek-V3 technical report" (2024).

    >>> import jax, jax.numpy as jnp
    >>> import jaxgpuops
    >>> logits = jnp.log(jnp.array([[1.0, 4.0, 2.0, 1.0], [2.0, 1.0, 1.0, 4.0]]))
    >>> weights, experts = jaxgpuops.topk_softmax(logits, 2)
    >>> (3 * weights).round(3).tolist(), experts.tolist()
    ([[2.0, 1.0], [2.0, 1.0]], [[1, 2], [3, 0]])
    >>> jaxgpuops.topk_softmax(logits, 2, normalize=False).weights.round(3).tolist()
    [[0.5, 0.25], [0.5, 0.25]]
    >>> jaxgpuops.topk_softmax(logits, 2, bias=jnp.array([9.0, 0.0, 0.0, 0.0])).indices.tolist()
    [[0, 1], [0, 3]]
    """
    op = "jaxgpuops.topk_softmax"
    logits = _arguments.array(op, "logits", logits)
    bias = _arguments.optional(op, "bias", bias)
    k, axis = _arguments.integer(op, "k", k), _arguments.integer(op, "axis", axis)
    score = _arguments.choice(op, "score", score, ("softmax", "sigmoid"))
    names, normalize = _arguments.names(op, axis_name), _arguments.flag(op, "normalize", normalize)
    return _jitted(logits, bias, k, axis, names, score, normalize)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6), inline=True)
def _jitted(logits, bias, k, axis, names, score, normalize):
    logits, bias, axis, k, split = checked("jaxgpuops.topk_softmax", logits, bias, k, axis, names)
    if split is not None:
        return gate(logits, bias, split, k=k, axis=axis, sigmoid=score == "sigmoid", normalize=normalize)
    size = logits.shape[axis], along(logits, axis)
    return _topk_softmax(logits, bias, size, k, axis, score == "sigmoid", normalize)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5, 6))
def _topk_softmax(logits, bias, size, k, axis, sigmoid, normalize):  # `size` is what the backward pass must know
    return gate(logits, bias, k=k, axis=axis, sigmoid=sigmoid, normalize=normalize)


def _forward(logits, bias, size, k, axis, sigmoid, normalize):
    kind = {"axis": axis, "sigmoid": sigmoid, "normalize": normalize}
    out = gate(logits, bias, k=k, **kind)
    return out, (out, saved(logits, out.indices, **kind))


def _backward(size, k, axis, sigmoid, normalize, residuals, cotangent):
    (weights, indices), rest = residuals
    kind = {"axis": axis, "sigmoid": sigmoid, "normalize": normalize}
    length, along = size
    return cotangent_of_logits(cotangent.weights, rest, weights, indices, length=length, along=along, **kind), None


_topk_softmax.defvjp(_forward, _backward)
