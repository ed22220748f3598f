"""Derivatives of kernels: what a rule of JAX's for forward or reverse mode must say, but for the formula."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jaxgpuops._primitive import Kernel, as_automatic
from jaxgpuops._split import rule_of


def zero_tangent(out: jax.Array) -> ad.Zero:
    """Returns the tangent of a result that does not depend on what is differentiated."""
    return ad.Zero(jax.typeof(out).to_tangent_aval())


def sum_to(x: jax.Array, shape: tuple) -> jax.Array:
    """Returns the cotangent of an operand of this shape, given that of its broadcast."""
    axes = tuple(d for d, (n, m) in enumerate(zip(x.shape, shape, strict=True)) if n != m)
    return jnp.sum(x, axes, keepdims=True) if axes else x


def times(factor: jax.Array, x: jax.Array) -> jax.Array:
    """Returns ``factor * x``, and 0 where the factor is 0, even if x is not finite. The derivative with respect to a
    factor of 0 is x, if that is finite."""
    return factor * jnp.where((factor == 0) & ~jnp.isfinite(x), np.zeros((), x.dtype), x)


def def_jvp(kernel: Kernel, rule: Callable[..., Sequence[jax.Array | None]]) -> None:
    """Defines the derivative: ``rule(outs, primals, tangents, **params)`` returns the tangents of the results. None
    stands for zero."""

    def jvp(primals, tangents, **params):
        outs = kernel(*primals, **params)
        tangents = [None if isinstance(t, ad.Zero) else t for t in tangents]
        if all(t is None for t in tangents):
            return outs, [zero_tangent(out) for out in outs]
        douts = rule(outs, primals, tangents, **params)
        return outs, [zero_tangent(out) if d is None else d for out, d in zip(outs, douts, strict=True)]

    ad.primitive_jvps[kernel.primitive] = jvp


def evaluated(formula: Callable, primals: Sequence, tangents: Sequence):
    """Returns ``formula(*primals)`` and its tangents, computed in plain JAX. A tangent that is None is zero."""
    active = [i for i, t in enumerate(tangents) if t is not None]

    def of_active(*values):
        operands = list(primals)
        for i, value in zip(active, values, strict=True):
            operands[i] = value
        return formula(*operands)

    return jax.jvp(of_active, [primals[i] for i in active], [tangents[i] for i in active])


def differentiated(formula: Callable, primals: Sequence, tangents: Sequence):
    """Returns the tangents of ``formula(*primals)``, computed in plain JAX. A tangent that is None is zero."""
    return evaluated(formula, primals, tangents)[1]


def def_jvp_by_fallback(kernel: Kernel) -> None:
    """Differentiates the fallback, which is made of differentiable parts, in place of the kernel."""

    def rule(outs, primals, tangents, split=None, **params):
        if split is not None:
            local = functools.partial(rule_of(kernel, params).local, {params["axis"]: split}, **params)
            return differentiated(lambda *primals: tuple(local(*primals)), primals, tangents)
        specs = tuple(jax.typeof(out).sharding.spec for out in outs)
        fallback = lambda *primals: tuple(kernel.fallback(*primals, **params))
        return differentiated(functools.partial(as_automatic, fallback, specs), primals, tangents)

    def_jvp(kernel, rule)


def def_jvp_by_formula(kernel: Kernel, formula: Callable[..., Sequence[jax.Array]]) -> None:
    """Defines the kernel's derivative as that of ``formula(*primals, **params)``, which is plain JAX.

    A differentiated call takes its results from the formula, too, not from the kernel, so nothing is computed twice.
    """

    def jvp(primals, tangents, **params):
        tangents = [None if isinstance(t, ad.Zero) else t for t in tangents]
        if all(t is None for t in tangents):
            outs = kernel(*primals, **params)
            return outs, [zero_tangent(out) for out in outs]
        outs, douts = evaluated(functools.partial(formula, **params), primals, tangents)
        return list(outs), list(douts)

    ad.primitive_jvps[kernel.primitive] = jvp


def def_linear(kernel: Kernel, transpose: Callable[..., jax.Array]) -> None:
    """Declares that a kernel of one result is linear in its first operand; its other operands are integers.

    ``transpose(ct, aval, *others, **params)`` gives the cotangent of the first operand, whose type is ``aval``.
    """

    def rule(outs, primals, tangents, **params):
        return kernel(tangents[0], *primals[1:], **params)

    def transposed(cts, x, *others, **params):
        ct = None if isinstance(cts[0], ad.Zero) else transpose(cts[0], x.aval, *others, **params)
        return [ct, *(None for _ in others)]

    def_jvp(kernel, rule)
    ad.primitive_transposes[kernel.primitive] = transposed
