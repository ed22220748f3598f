"""What every op must survive: one table of checks under JAX's transformations.

A `Case` is one function of arrays with its reference on `jax.lax`. Each check transforms both in the same way and wants
equal results, to the last bit where it can: the inputs are small integers stored as floats, so that sums and products
are exact in whatever order they are computed.

Most of the time goes into compiling. What the reference gives does not depend on how it is evaluated, so many checks
compare with the same few results of it, which are computed once for each case, each by one program on one device.

To put an op through the table, list its cases in test_transforms.py.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxgpuops

BATCH = 8  # divisible by every number of devices that a mesh may have


@dataclasses.dataclass(frozen=True)
class Case:
    """``fn(x, *others)`` behaves as ``reference(x, *others)``; derivatives are with respect to the float array x.

    inputs: ``inputs(rng, shape)`` makes the arguments, all of the rank of ``shape``, the shape of x or near to it.
    forward: whether fn has forward-mode derivatives. `jax.custom_vjp` functions have none, and must say so.
    tolerance: by how much results may differ, relative to the largest of them, where they cannot be exact.
    representative: whether the case stands for others with the like operands and results in the checks of `Kernel`,
      which does for all ops alike what is not a derivative.
    """

    name: str
    fn: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[np.random.Generator, tuple[int, ...]], tuple[np.ndarray, ...]]
    forward: bool = True
    tolerance: float = 0.0
    representative: bool = False

    def example(self, seed: int = 0, shape: tuple[int, ...] = (3, 5, 4)) -> tuple[np.ndarray, ...]:
        return self.inputs(np.random.default_rng(seed), shape)

    def examples(self, n: int, axis: int = 0) -> tuple[np.ndarray, ...]:
        return tuple(np.stack(arrays, axis) for arrays in zip(*(self.example(seed) for seed in range(n)), strict=True))


def distinct_integers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Distinct integers around 0 as float32: no ties, and third powers, their sums and derivatives are exact."""
    size = math.prod(shape)
    return (rng.permutation(size) - size // 2).reshape(shape).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[Callable, Case], Any]  # transforms a function of the case's arguments and returns its results
    forward: bool  # takes a forward-mode derivative of the function itself
    every: bool  # whether every case takes the check, or only those that stand for others
    expected: Callable[[Callable, Case], Any]  # the same results, of the reference


CHECKS: list[Check] = []


def check(forward: bool = False, every: bool = False, expected: Callable[[Callable, Case], Any] | None = None):
    def add(run):
        CHECKS.append(Check(run.__name__, run, forward, every, expected or run))
        return run

    return add


def assert_same(actual, expected, tolerance: float = 0.0) -> None:
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        if tolerance and jnp.issubdtype(e.dtype, jnp.inexact):
            e = np.asarray(e)
            largest = abs(e[np.isfinite(e)]).max(initial=0)
            np.testing.assert_allclose(np.asarray(a), e, rtol=0, atol=tolerance * largest)
        else:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


def leaves_of(fn):
    """Results as a list: a reference may return another container."""
    return lambda *args: jax.tree.leaves(fn(*args))


def loss(fn):
    """A scalar function with second derivatives, of every float result of fn, and of x itself."""

    def scalar(x, *others):
        total = (x**2).sum()
        for y in jax.tree.leaves(fn(x, *others)):
            if jnp.issubdtype(y.dtype, jnp.inexact):
                weights = (jnp.arange(y.size) % 3 + 1).reshape(y.shape).astype(y.dtype)
                total += (weights * y**3).sum()
        return total

    return scalar


def small_integers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Integers from -1 to 2 as float32: third powers of their sums and products are exact too."""
    return rng.integers(-1, 3, shape).astype(np.float32)


def tangent(x):
    return jnp.asarray(np.arange(np.size(x)).reshape(np.shape(x)) % 5, jnp.asarray(x).dtype)


# ---- What the reference gives ----------------------------------------------------------------------------------------


@functools.cache
def reference_of(case: Case) -> Callable:
    """Returns the same function for each call with a case, because results are cached by the function."""
    return leaves_of(jax.jit(case.reference))


@functools.cache
def value(fn, case):
    return jax.jit(fn)(*case.example())


@functools.cache
def values(fn, case, n=3):
    """The results of n examples."""
    return jax.jit(jax.vmap(fn))(*case.examples(n))


@functools.cache
def pullback(fn, case):
    """The results with derivatives, and the pullback of tangents of them."""

    def run(x, *others):
        out, pull = jax.vjp(lambda x: [y for y in fn(x, *others) if jnp.issubdtype(y.dtype, jnp.inexact)], x)
        return out, pull([tangent(y) for y in out])

    return jax.jit(run)(*case.example())


@functools.cache
def pushforward(fn, case):
    push = lambda x, *others: jax.jvp(lambda x: loss(fn)(x, *others), (x,), (tangent(x),))
    return jax.jit(push)(*case.example())


@functools.cache
def gradient(fn, case):
    return jax.jit(jax.grad(loss(fn)))(*case.example())


@functools.cache
def gradients(fn, case, n=3):
    """The gradients of the losses of n examples."""
    return jax.jit(jax.vmap(jax.grad(loss(fn))))(*case.examples(n))


@functools.cache
def second_derivatives(fn, case):
    return jax.jit(jax.hessian(loss(fn)))(*case.example())


@functools.cache
def value_and_gradient_of_batch(fn, case):
    return _value_and_gradient(jax.vmap(fn))(*case.examples(BATCH))


def _value_and_gradient(fn):
    return jax.jit(lambda *args: (fn(*args), jax.grad(loss(fn))(*args)))


# ---- Evaluation and batching ----------------------------------------------------------------------------------------


@check(expected=value)
def eager(fn, case):
    return fn(*map(jnp.asarray, case.example()))


@check(expected=value)
def numpy_arguments(fn, case):
    return fn(*case.example())


@check(every=True, expected=value)
def jit(fn, case):
    return jax.jit(fn)(*case.example())


@check(expected=lambda fn, case: (value(fn, case), values(fn, case), gradient(fn, case)))
def disable_jit(fn, case):
    """`jax.disable_jit`, which people use to debug. Every custom_vjp, batching rule and kernel is then called
    eagerly."""
    args = case.example()
    with jax.disable_jit():
        return fn(*map(jnp.asarray, args)), jax.vmap(fn)(*case.examples(3)), jax.grad(loss(fn))(*args)


@check(expected=lambda fn, case: (pullback(fn, case), values(fn, case)))
def strict_promotion(fn, case):
    """Settings with which JAX raises for implicit conversions and broadcasts. Our own code must not rely on them."""
    args = tuple(map(jnp.asarray, case.example()))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"), jax.debug_nans(True):
        out, pull = jax.vjp(lambda x: [y for y in fn(x, *args[1:]) if jnp.issubdtype(y.dtype, jnp.inexact)], args[0])
        return out, pull([tangent(y) for y in out]), jax.vmap(fn)(*case.examples(3))


@check()
def eval_shape(fn, case):
    shapes = jax.tree.leaves(jax.eval_shape(fn, *case.example()))
    return [np.zeros(s.shape, s.dtype) for s in shapes]


@check(every=True, expected=lambda fn, case: [values(fn, case)] * (case.example()[0].ndim + 1))
def vmap_over_every_axis(fn, case):
    rank = case.example()[0].ndim
    return [jax.jit(jax.vmap(fn, in_axes=axis))(*case.examples(3, axis)) for axis in range(rank + 1)]


@check(expected=lambda fn, case: [jnp.moveaxis(y, 0, -1) for y in values(fn, case)])
def vmap_out_axes(fn, case):
    return jax.vmap(fn, in_axes=1, out_axes=-1)(*case.examples(3, 1))


@check()
def vmap_nested(fn, case):
    args = tuple(np.stack([a, a[::-1]], 2) for a in case.examples(3, 0))
    return jax.vmap(jax.vmap(fn, in_axes=1), in_axes=0)(*args)


@check(every=True)
def vmap_over_some_operands(fn, case):
    one, many = case.example(), case.examples(3, 1)

    def mapped(batched, one, many):
        args = [many[i] if i == batched else one[i] for i in range(len(one))]
        return jax.vmap(fn, in_axes=[1 if i == batched else None for i in range(len(one))])(*args)

    return jax.jit(lambda one, many: [mapped(i, one, many) for i in range(len(one))])(one, many)


@check(expected=values)
def vmap_over_different_axes(fn, case):
    rank = case.example()[0].ndim
    axes = [i % (rank + 1) for i in range(len(case.example()))]
    args = [case.examples(3, axis)[i] for i, axis in enumerate(axes)]
    return jax.vmap(fn, in_axes=axes)(*args)


# ---- Derivatives ----------------------------------------------------------------------------------------------------


@check(every=True, expected=pullback)
def vjp(fn, case):
    x, *others = case.example()
    out, pull = jax.vjp(lambda x: [y for y in fn(x, *others) if jnp.issubdtype(y.dtype, jnp.inexact)], x)
    return out, pull([tangent(y) for y in out])


@check(every=True, expected=gradient)
def grad(fn, case):
    return jax.jit(jax.grad(loss(fn)))(*case.example())


@check(every=True, expected=gradient)
def jacrev(fn, case):
    return jax.jacrev(loss(fn))(*case.example())


@check(every=True, expected=gradients)
def vmap_of_grad(fn, case):
    return jax.jit(jax.vmap(jax.grad(loss(fn)), in_axes=2))(*case.examples(3, 2))


@check(every=True)
def grad_of_vmap(fn, case):
    return jax.jit(jax.grad(loss(jax.vmap(fn, in_axes=1))))(*case.examples(3, 1))


@check()
def grad_of_vmap_over_others(fn, case):
    x, *others = case.example()[:1] + case.examples(3)[1:]  # x is shared by the batch: its gradient is a sum
    return jax.grad(loss(jax.vmap(fn, in_axes=(None, *(0 for _ in others)), axis_size=3)))(x, *others)


@check(every=True, expected=second_derivatives)
def hessian(fn, case):
    return jax.jit(jax.hessian(loss(fn)))(*case.example())


@check(every=True, expected=second_derivatives)
def reverse_over_reverse(fn, case):
    return jax.jit(jax.jacrev(jax.grad(loss(fn))))(*case.example())


@check(expected=gradient)
def remat(fn, case):
    return jax.jit(jax.grad(jax.checkpoint(loss(fn))))(*case.example())


@check(forward=True, every=True, expected=pushforward)
def jvp(fn, case):
    x, *others = map(jnp.asarray, case.example())
    return jax.jvp(lambda x: loss(fn)(x, *others), (x,), (tangent(x),))


@check(forward=True, every=True)
def jvp_of_results(fn, case):
    x, *others = map(jnp.asarray, case.example())
    outs, douts = jax.jvp(lambda x: fn(x, *others), (x,), (tangent(x),))
    return outs, [d for d in douts if d.dtype != jax.dtypes.float0]


@check(forward=True, every=True, expected=pushforward)
def linearize(fn, case):
    x, *others = map(jnp.asarray, case.example())
    out, push = jax.linearize(lambda x: loss(fn)(x, *others), x)
    return out, push(tangent(x))


@check(forward=True, every=True, expected=gradient)
def jacfwd(fn, case):
    return jax.jit(jax.jacfwd(loss(fn)))(*case.example())


@check(forward=True, every=True)
def vmap_of_jvp_with_one_tangent(fn, case):
    t = tangent(case.example()[0])
    push = lambda x, *others: jax.jvp(lambda x: loss(fn)(x, *others), (x,), (t,))
    return jax.vmap(push)(*case.examples(3))


@check(forward=True, every=True)
def grad_in_the_tangent(fn, case):
    xs, *others = case.examples(3)

    def total(t):
        push = lambda x, *others: jax.jvp(lambda x: loss(fn)(x, *others), (x,), (t,))[1]
        return jax.vmap(push)(xs, *others).sum()

    return jax.grad(total)(tangent(xs[0]))


@check(forward=True, every=True, expected=second_derivatives)
def forward_over_forward(fn, case):
    return jax.jit(jax.jacfwd(jax.jacfwd(loss(fn))))(*case.example())


@check(forward=True, every=True, expected=second_derivatives)
def reverse_over_forward(fn, case):
    return jax.jit(jax.jacrev(jax.jacfwd(loss(fn))))(*case.example())


# ---- Control flow, buffers, precision -------------------------------------------------------------------------------


@check(expected=lambda fn, case: (gradients(fn, case), values(fn, case)))
def scan(fn, case):
    def total(xs, *others):
        step = lambda carry, args: (carry + loss(fn)(*args), fn(*args))
        return jax.lax.scan(step, jnp.float32(0), (xs, *others))

    return jax.jit(jax.grad(total, has_aux=True))(*case.examples(3))


@check()
def cond(fn, case):
    branch = lambda x, *others: jax.lax.cond(x.ravel()[0] > 0, loss(fn), lambda x, *others: x.sum(), x, *others)
    program = jax.jit(jax.value_and_grad(branch))
    return [program(*case.example(seed)) for seed in range(3)]


@check()
def while_loop(fn, case):
    x, *others = case.example()
    body = lambda i, x: x + jax.grad(loss(fn))(x, *others) * (i == 0)
    return jax.jit(lambda x: jax.lax.fori_loop(0, jnp.int32(x[(0,) * x.ndim] * 0) + 2, body, x))(x)


@check(expected=lambda fn, case: (value(fn, case), jnp.asarray(case.example()[0] * 2)))
def donation(fn, case):
    x, *others = map(jnp.asarray, case.example())
    with warnings.catch_warnings():  # not every platform can use the donated buffer
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        return jax.jit(lambda x: (fn(x, *others), x * 2), donate_argnums=0)(x)


def _in_x64(fn, case):
    with jax.enable_x64(True):
        x, *others = case.example()
        return _value_and_gradient(fn)(x.astype(np.float64), *others)


@check(expected=_in_x64)
def x64(fn, case):
    with jax.enable_x64(True):
        x, *others = case.example()
        return fn(x.astype(np.float64), *others), jax.grad(loss(fn))(x.astype(np.float64), *others)


# ---- Many devices ---------------------------------------------------------------------------------------------------


def mesh(kind: AxisType) -> jax.sharding.Mesh:
    devices = jax.devices()
    count = math.gcd(len(devices), BATCH)
    return jax.make_mesh((count,), ("b",), axis_types=(kind,), devices=devices[:count])


@check(expected=value_and_gradient_of_batch)
def jit_with_sharded_inputs(fn, case):
    args = jax.device_put(case.examples(BATCH), NamedSharding(mesh(AxisType.Auto), P("b")))
    return jax.jit(jax.vmap(fn))(*args), jax.jit(jax.grad(loss(jax.vmap(fn))))(*args)


@check(expected=lambda fn, case: [value_and_gradient_of_batch(fn, case) for _ in case.example()])
def jit_with_one_sharded_operand(fn, case):
    m = mesh(AxisType.Auto)
    outs = []
    for sharded in range(len(case.example())):
        specs = [P("b") if i == sharded else P() for i in range(len(case.example()))]
        args = [jax.device_put(a, NamedSharding(m, s)) for a, s in zip(case.examples(BATCH), specs, strict=True)]
        outs.append(_value_and_gradient(jax.vmap(fn))(*args))
    return outs


def _large_along(case, dim):
    return case.example(shape=tuple(BATCH if d == dim else n for d, n in enumerate((3, 5, 4))))


@check(expected=lambda fn, case: [_value_and_gradient(fn)(*_large_along(case, dim)) for dim in range(3)])
def every_dimension_sharded(fn, case):
    m = mesh(AxisType.Auto)
    outs = []
    for dim in range(3):
        spec = P(*(None,) * dim, "b")  # an operand that is too short along an axis stays whole
        args = [
            jax.device_put(a, NamedSharding(m, P() if a.shape[dim] % BATCH else spec)) for a in _large_along(case, dim)
        ]
        outs.append(_value_and_gradient(fn)(*args))
    return outs


@check(expected=lambda fn, case: (values(fn, case, BATCH), gradients(fn, case, BATCH)))
def explicit_mesh(fn, case):
    with jax.set_mesh(mesh(AxisType.Explicit)):
        args = [jax.device_put(a, P("b")) for a in case.examples(BATCH)]
        out = jax.jit(jax.vmap(fn))(*args)
        for y in jax.tree.leaves(out):
            assert jax.typeof(y).sharding.spec[0] == "b"
        gradient = jax.jit(jax.grad(lambda *args: (jax.vmap(lambda *a: loss(fn)(*a))(*args)).sum()))(*args)
        assert jax.typeof(gradient).sharding.spec[0] == "b"
        return out, gradient


def _sharded_loss(fn, m, specs):
    """A loss over shards; x is scaled by a replicated w, so that operands of both kinds meet in the kernel calls."""

    def body(w, x, *others):
        axes = tuple(None if spec == P() else 0 for spec in specs)
        size = next(a.shape[0] for a, axis in zip((x, *others), axes, strict=True) if axis == 0)
        return jax.lax.psum(jax.vmap(loss(fn), in_axes=axes, axis_size=size)(x * w, *others).sum(), "b")

    return jax.shard_map(body, mesh=m, in_specs=(P(), *specs), out_specs=P())


# Here the reference is sharded, too, because the gradient of w is a large sum, whose rounding depends on how devices
# share it.
@check()
def shard_map(fn, case):
    n = len(case.example())
    f = _sharded_loss(fn, mesh(AxisType.Auto), [P("b")] * n)
    return jax.jit(jax.value_and_grad(f, (0, 1)))(jnp.float32(1), *case.examples(BATCH))


@check()
def shard_map_with_mixed_operands(fn, case):
    n = len(case.example())
    results = []
    for sharded in range(n):
        specs = [P("b") if i == sharded else P() for i in range(n)]
        args = [
            many if i == sharded else one
            for i, (many, one) in enumerate(zip(case.examples(BATCH), case.example(), strict=True))
        ]
        f = _sharded_loss(fn, mesh(AxisType.Auto), specs)
        results.append(jax.jit(jax.value_and_grad(f, (0, 1)))(jnp.float32(1), *args))
    return results


@check(expected=lambda fn, case: values(fn, case, BATCH))
def vmap_with_spmd_axis_name(fn, case):
    m = mesh(AxisType.Auto)
    inside = lambda *args: jax.lax.with_sharding_constraint(fn(*args), NamedSharding(m, P()))
    return jax.jit(jax.vmap(inside, in_axes=1, spmd_axis_name="b"))(*case.examples(BATCH, 1))


# ---- Export ---------------------------------------------------------------------------------------------------------


def _round_trip(exported):
    if importlib.util.find_spec("flatbuffers") is None:  # what serialisation needs
        return exported
    return jax.export.deserialize(exported.serialize(vjp_order=1))


def _export(fn, *args):
    return _round_trip(jax.export.export(jax.jit(fn), disabled_checks=jaxgpuops.export_checks())(*args))


@check(expected=lambda fn, case: (value(fn, case), gradient(fn, case)))
def export(fn, case):
    args = case.example()
    restored = _export(loss(fn), *args)
    return _export(fn, *args).call(*args), jax.grad(lambda x: restored.call(x, *args[1:]))(args[0])


@check(expected=lambda fn, case: (values(fn, case), gradients(fn, case)))
def export_with_symbolic_batch(fn, case):
    (b,) = jax.export.symbolic_shape("b")
    args = case.examples(3)
    structs = [jax.ShapeDtypeStruct((b, *a.shape[1:]), a.dtype) for a in args]
    restored = _export(jax.vmap(loss(fn)), *structs)
    gradient = jax.grad(lambda x: restored.call(x, *args[1:]).sum())(args[0])
    return _export(jax.vmap(fn), *structs).call(*args), gradient
