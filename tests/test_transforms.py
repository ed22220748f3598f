"""Every op of both tiers, through the table of transforms.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transforms import CHECKS, Case, assert_same, distinct_integers, leaves_of

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
    return Case(name, fn, reference, x_only, forward=False)


def lax_top_k_case(k, axis):
    fn, reference = (
        functools.partial(jaxgpuops.lax.top_k, k=k, axis=axis),
        functools.partial(jax.lax.top_k, k=k, axis=axis),
    )
    return Case(f"lax.top_k-k={k}-axis={axis}", fn, reference, x_only)


CASES = [
    topk_case(k=2, axis=-1),
    topk_case(k=3, axis=0, largest=False),
    topk_case(k=2, axis=1, sorted=False),
    lax_top_k_case(k=2, axis=-1),
    lax_top_k_case(k=2, axis=1),
    *(
        Case(
            f"lax.{name}",
            functools.partial(getattr(jaxgpuops.lax, name), axis=1, index_dtype=np.int32),
            functools.partial(getattr(jax.lax, name), axis=1, index_dtype=np.int32),
            x_only,
        )
        for name in ("argmax", "argmin")
    ),
    Case(
        "take_along_axis",
        functools.partial(take_along_axis, axis=1),
        functools.partial(jnp.take_along_axis, axis=1),
        x_and_indices,
    ),
    Case("put_along_axis", functools.partial(put_along_axis, axis=1, length=5), put_reference, updates_and_indices),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_transform(case, check):
    if check.forward and not case.forward:
        with pytest.raises(TypeError, match="forward-mode"):
            check.run(leaves_of(case.fn), case)
        return
    assert_same(check.run(leaves_of(case.fn), case), check.run(leaves_of(case.reference), case))
