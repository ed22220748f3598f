"""take_along_axis and put_along_axis: how tangents follow the indices of a selection, and cotangents return.

Indices are made by this package: int32, in range, and distinct along the axis. So each op is the transpose of the
other, and put scatters without atomics. If the axis is split over devices, some indices of put are out of range on a
device, because they belong to other devices: these updates are dropped (the param ``drops`` tells plain JAX). If the
indices permute the whole axis, as those of sorts do (the param ``permutes``), all arrays may be split along it;
otherwise only the operand of take and the result of put, which have the whole axis.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jaxgpuops._derivatives import def_linear
from jaxgpuops._primitive import Kernel, is_iota
from jaxgpuops._split import RULES, Rule, by_rows
from jaxgpuops.lax.order import from_bits, moved, to_bits


def _take_fallback(x, indices, *, axis, permutes=False):
    others = tuple(d for d in range(x.ndim) if d != axis)
    dims = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(axis,),
        start_index_map=(axis,),
        operand_batching_dims=others,
        start_indices_batching_dims=others,
    )
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    take = lambda x: lax.gather(x, indices[..., None], dims, (1,) * x.ndim, mode=mode)
    return (moved(take, x),)


def _put_fallback(updates, indices, *, axis, length, along=None, permutes=False, drops=False):
    others = tuple(d for d in range(updates.ndim) if d != axis)
    # The param `length` is that of the whole axis, even if this is a part of a split axis.
    length = updates.shape[axis] if permutes else length
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(axis,),
        scatter_dims_to_operand_dims=(axis,),
        operand_batching_dims=others,
        scatter_indices_batching_dims=others,
    )
    shape = (*updates.shape[:axis], length, *updates.shape[axis + 1 :])
    mode = lax.GatherScatterMode.FILL_OR_DROP if drops else lax.GatherScatterMode.PROMISE_IN_BOUNDS
    scatter = functools.partial(lax.scatter, unique_indices=True, mode=mode)
    return (moved(lambda x: scatter(jnp.zeros(shape, x.dtype), indices[..., None], x, dims), updates),)


def _accepts(dtype):
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or dtype.itemsize not in (1, 2, 4, 8):
        return False
    if jnp.issubdtype(dtype, jnp.complexfloating) or dtype == np.dtype(bool):
        return True
    # XLA packs numbers of 2 and 4 bits; NumPy gives each a byte.
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return info(dtype).bits >= 8


def _known_places(operands, *, axis, **_):
    """Places taken by indices are these indices, as in `jnp.lexsort`, which sorts an iota by the keys."""
    x, indices = operands
    return [indices] if is_iota(x, axis) and x.type == indices.type else None


take_along_axis_p = Kernel(
    "take_along_axis",
    reindexes=True,
    known=_known_places,
    results=lambda x, indices, *, axis, permutes: [(indices.shape[axis], x.dtype)],
    fallback=_take_fallback,
    accepts=_accepts,
)

put_along_axis_p = Kernel(
    "put_along_axis",
    reindexes=True,
    results=lambda updates, indices, *, axis, length, along, permutes, drops=False: [
        (indices.shape[axis] if permutes else length, updates.dtype)
    ],
    fallback=_put_fallback,
    accepts=_accepts,
)


def take_along_axis(x: jax.Array, indices: jax.Array, axis: int, split=None, permutes=False) -> jax.Array:
    """Returns ``out[..., j, ...] = x[..., indices[..., j, ...], ...]`` along ``axis``."""
    return take_along_axis_p(x, indices, axis=axis, permutes=permutes, split=split)[0]


def put_along_axis(
    updates: jax.Array, indices: jax.Array, axis: int, length: int, along=None, split=None, permutes=False
) -> jax.Array:
    """Returns zeros of length ``length`` along ``axis``, with ``out[..., indices[..., j, ...], ...] = updates[..., j,
    ...]``.

    Over an explicit mesh, the axis of the result is split ``along`` this mesh axis, or these.
    """
    params = {"axis": axis, "length": length, "along": along, "permutes": permutes}
    return put_along_axis_p(updates, indices, split=split, **params)[0]


def along(x: jax.Array, axis: int):
    """Returns the axes of an explicit mesh along which x is split in dimension ``axis``."""
    return jax.typeof(x).sharding.spec[axis]


def gathered(x: jax.Array, axis: int) -> jax.Array:
    """Returns x, gathered along ``axis`` if an explicit mesh splits that dimension."""
    if along(x, axis) is None:
        return x
    sharding = jax.typeof(x).sharding
    spec = sharding.spec.update(partitions=[None if d == axis else s for d, s in enumerate(sharding.spec)])
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))


def _take_transpose(ct, x, indices, *, axis, permutes, split=None):
    ct = ct if split is None or permutes else split.cotangent(ct)
    return put_along_axis(ct, indices, axis, x.shape[axis], x.sharding.spec[axis], split, permutes)


def _put_transpose(ct, updates, indices, *, axis, permutes, split=None, **_):
    if split is None or permutes:
        return take_along_axis(ct, indices, axis, split, permutes)
    own, mine = _own(split, indices)
    return jnp.where(mine, take_along_axis(ct, own, axis), np.zeros((), ct.dtype))


def_linear(take_along_axis_p, _take_transpose)
def_linear(put_along_axis_p, _put_transpose)


# ---- A split axis -----------------------------------------------------------------------------------------------------


def _take_pays(split, avals, *, axis, **_):
    x, indices, *_ = avals
    dtype = x.dtype
    return not jnp.issubdtype(dtype, jnp.complexfloating) and indices.shape[axis] < split.length


def _own(split, indices):
    """Returns indices in this device's part (0 for those of other parts), and which indices are in this part."""
    own = indices - split.start()
    mine = (own >= 0) & (own < split.part)
    return jnp.where(mine, own, 0), mine


def _take_split(splits, x, indices, *, axis, permutes):
    """Each device gives the elements of its part, and zeros for others. Adding their bits as integers changes no
    element."""
    split = splits[axis]
    own, mine = _own(split, indices)
    bits = to_bits(take_along_axis(x, own, axis))
    return (from_bits(split.sum(jnp.where(mine, bits, np.zeros((), bits.dtype))), x.dtype),)


def _put_split(splits, updates, indices, *, axis, length, along, permutes):
    """Each device puts what falls into its part; the kernel drops the rest."""
    split = splits[axis]
    own = indices - split.start()
    params = {"axis": axis, "length": split.part, "along": along, "permutes": permutes}
    return put_along_axis_p.primitive.bind(updates, own, drops=True, **params)


def _rule(kernel, selects):
    permuting = by_rows(kernel)
    return lambda permutes, **_: permuting if permutes else selects


RULES["take_along_axis"] = _rule(take_along_axis_p, Rule(_take_split, operands=(0,), pays=_take_pays))
RULES["put_along_axis"] = _rule(put_along_axis_p, Rule(_put_split, operands=(), keeps=True))
