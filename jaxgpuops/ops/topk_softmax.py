"""`jaxgpuops.topk_softmax`."""

from __future__ import annotations

import functools

import jax
from jax.typing import ArrayLike

from jaxgpuops._arguments import AxisName
from jaxgpuops.lax._topk_softmax import (
    Score,
    TopKSoftmax,
    arguments,
    checked,
    cotangent_of_logits,
    gate,
    saved,
    scaled,
)
from jaxgpuops.lax.along_axis import along


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
    """The gate of a mixture of experts: the ``k`` experts with the highest scores, and their weights, in one kernel.

    Args:
      logits: array of shape ``(*before, n, *after)``, a logit for each of ``n`` experts, of dtype float16, bfloat16,
        float32 or float64.
      k: how many experts, ``0 <= k <= n``; static.
      axis: the axis of length ``n``.
      normalize: whether the weights of the chosen experts are divided by their sum.
      score: "softmax" (over all experts), "sigmoid" or "sqrt_softplus", sqrt(log(1 + e^z)), of the logits.
      bias: added to the scores to choose experts, and to nothing else, as for a balanced load without an auxiliary
        loss. Of shape ``(n,)``, or any that broadcasts to that of the logits.
      groups: the number of groups; each has ``n / groups`` neighbouring experts, for instance those of one machine;
        static.
      topk_groups: how many groups a row chooses from; static. These are the groups with the highest sum of their two
        best ``score + bias``, or, without a bias, with the highest logit. Experts of other groups are never chosen.
        ``k`` must not exceed the number of experts in the chosen groups. None: all groups.
      scale: a number that weights are multiplied by before they are rounded; an array multiplies the rounded weights.
        None: 1.
      axis_name: inside `jax.shard_map`, what ``axis`` is split along, as for `jaxgpuops.topk`; a
        ``bias`` of one number an expert is this device's part. Devices have whole groups, or equal parts of one.

    Returns:
      ``TopKSoftmax(weights, indices)``, both of shape ``(*before, k, *after)``; weights of the dtype of the logits,
      computed in float32 at least and rounded once, in descending order of what chose them; indices int32.

    Order: without a bias the choice is that of ``jax.lax.top_k(logits, k)`` exactly, so a NaN comes first and ties go
    to the lower index. With one it is made by ``score + bias``, in float32 (float64 where the logits are): the lower
    index wins a tie, NaNs come first. Weights that include a NaN are NaN, as those of softmax over +inf are. A row has
    the same result in every run and batch.

    Derivatives: of the weights with respect to the logits and ``scale``; the choice is constant, the bias gets no
    gradient. Only the logits of chosen experts have a gradient, except with ``score="softmax"`` and
    ``normalize=False``, where all logits have one. Reverse mode works, and whatever is built on top of it; for forward
    mode at the bottom use `jaxgpuops.lax.topk_softmax`.

    One kernel takes ``n <= 1024``, ``k <= 64`` and ``groups <= 64`` (not float64); other calls are composed of top-k
    and other kernels.

    Raises:
      TypeError: for other dtypes, for ``k`` or ``axis`` that are not integers, and a flag that is not True or False,
        known at trace time.
      ValueError: for a scalar, ``axis`` or ``k`` out of range, another ``score``, a ``bias`` that does not broadcast, a
        ``scale`` that is not one number, ``groups`` that do not divide ``n`` or have too few experts, and, with
        ``axis_name``, groups that are not aligned with the devices' parts.

    Gates of this kind: Shazeer et al., "Outrageously large neural networks" (2017); sigmoid scores with a bias for
    the choice, and groups: DeepSeek-AI, "DeepSeek-V3 technical report" (2024).

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
    >>> jaxgpuops.topk_softmax(logits, 2, groups=2, topk_groups=1).indices.tolist()
    [[1, 0], [3, 2]]
    """
    op = "jaxgpuops.topk_softmax"
    operands = arguments(op, logits, bias, scale, k, axis, axis_name, score, normalize, groups, topk_groups)
    return TopKSoftmax(*gated(op, *operands))


@functools.partial(jax.jit, static_argnums=(0, 4), inline=True)
def gated(op, logits, bias, scale, options):
    """Returns weights, indices and, if the options ask for them, logarithms of sums."""
    logits, bias, split, params = checked(op, logits, bias, *options)
    if split is not None:
        return scaled(gate(logits, bias, split, **params), scale)
    size = logits.shape[params["axis"]], along(logits, params["axis"])
    return scaled(_topk_softmax(logits, bias, size, tuple(params.items())), scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
# `size` has the length of the axis and its mesh axes, which the backward pass needs.
def _topk_softmax(logits, bias, size, params):
    return gate(logits, bias, **dict(params))


def _forward(logits, bias, size, params):
    outs = gate(logits, bias, **dict(params))
    return outs, (outs, saved(logits, outs[1], **dict(params)))


def _backward(size, params, residuals, cotangents):
    outs, rest = residuals
    length, along = size
    return cotangent_of_logits(cotangents, rest, outs, length=length, along=along, **dict(params)), None


_topk_softmax.defvjp(_forward, _backward)
