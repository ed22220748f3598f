"""logsumexp as a primitive; softmax_primitives.py says what its operands are.

Its derivatives, and those of cross-entropy, need only two numbers of a row, which the forward pass has found. So they
(but the gradient of logsumexp of an array alone, for which a GPU has a kernel) are elementwise plain JAX, which XLA
compiles to one read and one write; they are primitives, so that only the arguments are kept as residuals, and so that
they are batched like kernels. The logsumexp is kept in two parts, the maximum m and the logarithm of the sum of
e^(z - m). If their sum were rounded to one number, the probabilities of large logits would be lost.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxgpuops import _arguments, _native
from jaxgpuops._arguments import FLOATS
from jaxgpuops._derivatives import def_jvp_by_fallback, zero_tangent
from jaxgpuops._primitive import LEFT, Kernel, like
from jaxgpuops.lax.softmax_primitives import (
    _LOGITS,
    _below,
    _call,
    _def_transpose,
    _is_short,
    _kernel,
    _leaves_short,
    _like_first,
    _log_sum,
    _maximum,
    _sum,
    _tangent,
    _times,
    or_zero,
    wide,
)


def _logsumexp_fallback(x, *rest, axis, parts, **logits):
    z, _ = _call(x, rest, axis, **logits)
    if _is_short(x.shape, axis, x.dtype):
        each = [lax.index_in_dim(z, i, axis, keepdims=False) for i in range(x.shape[axis])]
        m = functools.reduce(jnp.maximum, each)
        m = jnp.where(jnp.isfinite(m), m, np.zeros((), m.dtype))
        both = [m, jnp.log(functools.reduce(jnp.add, (jnp.exp(a - m) for a in each)))]
        return both if parts else (whole(both, x.dtype),)
    _, m = _maximum(z, axis)
    both = [lax.squeeze(a, (axis,)) for a in (m, _log_sum(z, m, axis))]
    return both if parts else (whole(both, x.dtype),)


def whole(parts: list[jax.Array], dtype: np.dtype) -> jax.Array:
    """Returns the logsumexp, given its parts."""
    m, log_sum = parts
    return (m + log_sum).astype(dtype)


# The result has the dtype of x. If the param ``parts`` is True, the results are m and log_sum, in the dtype in which
# they are computed.
logsumexp_p = _kernel(
    "logsumexp",
    1,
    shortest=0,
    results=lambda x, *_, parts, **__: [(None, _arguments.wide(x.dtype))] * 2 if parts else [(None, x.dtype)],
    fallback=_logsumexp_fallback,
    accepts=FLOATS.__contains__,
    attributes=(*_LOGITS["attributes"], "parts"),
    leaves=_leaves_short,
    dimensions=_LOGITS["dimensions"],
)


def _probabilities(x, m, log_sum, *rest, axis, factor, scaled, **logits):
    """Returns the probability of each entry, given the parts of its row's logsumexp; 0 where z is -inf, for any row."""
    z, _ = _call(x, rest, axis, factor, scaled, **logits)
    is_product = scaled or factor != 1
    d = _below(z, m) if is_product else z - m
    return jnp.exp(jnp.where(z == -np.inf, z, d - log_sum))


def _logsumexp_jvp_fallback(t, x, m, log_sum, *rest, axis, split=None, **logits):
    p = _probabilities(x, m, log_sum, *rest, axis=axis, split=split, **logits)
    return (_sum(or_zero(p, t), axis, split),)


# The tangent of logsumexp, given the tangent of its logits. All operands but x and the bias have wide dtype.
logsumexp_jvp_p = _kernel(
    "logsumexp_jvp",
    1,
    plan=False,
    results=lambda t, *_, **__: [(None, t.dtype)],
    fallback=_logsumexp_jvp_fallback,
    accepts=None,
    dimensions=("query_axis",),
)


def _logsumexp_vjp_fallback(x, m, log_sum, ct, *rest, axis, **logits):
    return (or_zero(_probabilities(x, m, log_sum, *rest, axis=axis, **logits), ct),)


# The cotangent of the logits in wide dtype, given the cotangent of logsumexp.
logsumexp_vjp_p = _kernel(
    "logsumexp_vjp",
    1,
    plan=False,
    results=lambda x, *_, axis, **__: [(x.shape[axis], _arguments.wide(x.dtype))],
    fallback=_logsumexp_vjp_fallback,
    accepts=None,
    dimensions=("query_axis",),
)
def_jvp_by_fallback(logsumexp_vjp_p)


def _logsumexp_grad_fallback(x, ct, m, log_sum, *, axis, split=None):
    plain = {"factor": 1.0, "scaled": False, "biased": False, "masked": False, "query_axis": None}
    return (_logsumexp_vjp_fallback(x, m, log_sum, wide(ct), axis=axis, split=split, **plain)[0].astype(x.dtype),)


class _LogSumExpGrad(Kernel):
    """The cotangent of x, given that of logsumexp(x) and the parts that the forward pass found.

    The CUDA handler makes it of x and the cotangent alone: if nothing else needs the result, XLA drops the forward
    pass. Rows and columns that no kernel holds would be read twice, so they are left to XLA, but for 16-bit rows, short
    columns and long ones. The bits are others, so the choice is that of a large batch.
    """

    def choose(self, platform, avals, *, axis, **params):
        choice = super().choose(platform, avals, axis=axis, **params)
        if choice.kernel is None:
            return choice
        why = "it has no kernel of its own"
        if platform == "cuda":
            shape, why = avals[0].shape, LEFT
            length, inner = shape[axis], math.prod(shape[axis + 1 :])
            plan = self.plan((1 << 20, length, inner), avals, _native.compute_capability(), axis)
            narrow = avals[0].dtype.itemsize == 2 and (inner == 1 or not 1 << 10 < length < 1 << 18)
            if narrow or plan["algorithm"] not in ("rows_split", "columns_flat"):
                return choice
        return dataclasses.replace(choice, kernel=None, plan={}, why=why)

    def _custom_call(self, ctx, operands, choice, **params):
        return super()._custom_call(ctx.replace(avals_in=ctx.avals_in[:2]), operands[:2], choice, **params)


logsumexp_grad_p = _kernel(
    "logsumexp_grad",
    1,
    results=_like_first,
    fallback=_logsumexp_grad_fallback,
    accepts=FLOATS.__contains__,
    leaves=_leaves_short,
    make=_LogSumExpGrad,
)
def_jvp_by_fallback(logsumexp_grad_p)


def _logsumexp_jvp_transposed(cts, aval, x, m, log_sum, *rest, axis, split=None, **logits):
    ct = lax.expand_dims(cts[0] if split is None else split.cotangent(cts[0]), (axis,))
    x = like(x, aval)
    return logsumexp_vjp_p(x, m, log_sum, ct, *rest, axis=axis, split=split, **logits)[0]


_def_transpose(logsumexp_jvp_p, _logsumexp_jvp_transposed)


def _logsumexp_jvp(primals, tangents, *, axis, parts, factor, scaled, biased, masked, query_axis, split=None):
    x, *rest = primals
    logits = {"axis": axis, "factor": factor, "scaled": scaled, "biased": biased, "masked": masked, "split": split}
    both = logsumexp_p(x, *rest, parts=True, query_axis=query_axis, **logits)
    outs = both if parts else [whole(both, x.dtype)]
    zeros = list(map(zero_tangent, outs))
    tangents = [None if isinstance(t, ad.Zero) else t for t in tangents]
    if all(t is None for t in tangents):
        return outs, zeros
    t, scale, factor_t = _tangent(primals, tangents, factor, scaled, biased, masked)
    t = _times(wide(t), factor_t, scale)
    rows = (lax.expand_dims(a, (axis,)) for a in both)
    [dlse] = logsumexp_jvp_p(t, x, *rows, *rest, query_axis=query_axis, **logits)
    # The result depends on m + log_sum alone, so m may be treated as a constant.
    return outs, [*zeros[:-1], dlse.astype(outs[-1].dtype)]


ad.primitive_jvps[logsumexp_p.primitive] = _logsumexp_jvp
