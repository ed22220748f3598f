"""Softmax of pairs, and its gradients, as expressions that XLA's GPU backend compiles to one kernel, which it fuses
with the operations around it."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

PAIR = 2  # the length of the axis


def are_pairs(x, axis):
    """Whether the axis has two numbers; a symbol has not."""
    return isinstance(x.shape[axis], int) and x.shape[axis] == PAIR


def other(x, axis):
    """Returns the other number of each pair."""
    return lax.rev(x, (axis,))


def row_sum(x, axis):
    """Returns sums of rows, in a shape that broadcasts; those of pairs along other axes elementwise, in the shape of x.

    For pairs along the last axis, the results before are reductions, too (see ``below_larger``). XLA compiles a chain
    of reductions of rows to one kernel, but not if some of its steps are elementwise sums.
    """
    if are_pairs(x, axis) and axis != x.ndim - 1:
        return x + other(x, axis)
    return jnp.sum(x, axis, keepdims=True)


def nan_if_infinite(z, axis):
    """Returns NaN for pairs that have a NaN or +inf, or are -inf, else 0."""
    m = jnp.maximum(z, other(z, axis))
    return m - m


def are_rows(x, rest, axis, factor=1.0, **_):
    """Whether pairs are rows of an array whose elements are the logits."""
    return are_pairs(x, axis) and axis == x.ndim - 1 and not rest and factor == 1


def probabilities(z, axis):
    """Returns the probability of each number and that of the other number of its pair, both accurate where they are
    small, with one exponential for each number."""
    d = other(z, axis) - z
    e = jnp.exp(-abs(d))
    larger = 1 / (1 + e)
    smaller, nan = e * larger, nan_if_infinite(z, axis)
    return jnp.where(d > 0, smaller, larger) + nan, jnp.where(d > 0, larger, smaller) + nan


def has_elementwise_gradient(x, axis):
    """Whether XLA is faster if the gradient of pairs is an elementwise expression, made from x.

    It is not for rows of pairs of 16 bits, as it reads each element twice.
    """
    return axis != x.ndim - 1 or x.dtype.itemsize > 2


def below_larger(z, axis):
    """Returns each pair minus its larger number, and e^ of what the smaller one has left then, in a shape that
    broadcasts: of the two one is 0, so a sum is the other.

    XLA's GPU backend compiles such reductions of rows to one kernel, in which each row has two exponentials. An
    elementwise expression takes twice as long, since each element has them.
    """
    d = z - jnp.max(z, axis, keepdims=True)
    return d, jnp.exp(jnp.sum(d, axis, keepdims=True))


# log(1 + e) / e for 0 <= e <= 1, from the highest power on. The relative error is 1e-5; 16-bit floats round by 2e-4 or
# more.
_LOG1P = (-0.0233356, 0.09986385, -0.20883141, 0.32475758, -0.49930251, 0.99999033)


def log1p(e, dtype):
    """Returns log(1 + e) for e from 0 to 1, accurate to the last digit of ``dtype``, also where e is small.

    XLA's own logarithm takes a quarter of the time of an elementwise kernel whose numbers have 16 bits.
    """
    if dtype.itemsize > 2:
        return jnp.log1p(e)
    return e * functools.reduce(lambda sum, c: sum * e + c, np.array(_LOG1P, e.dtype))
