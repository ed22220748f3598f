"""The order of values as an order of unsigned integers, in plain JAX."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def to_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of ``x`` as unsigned integers. Plain JAX moves elements as bits, since XLA's CPU backend flushes
    denormal 16-bit floats to zero when it moves them."""
    bits = np.dtype(f"uint{8 * x.dtype.itemsize}")
    return x.astype(bits) if x.dtype == np.dtype(bool) else lax.bitcast_convert_type(x, bits)


def from_bits(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    return bits.astype(dtype) if dtype == np.dtype(bool) else lax.bitcast_convert_type(bits, dtype)


def moved(move: Callable, *arrays: jax.Array) -> jax.Array:
    """Returns ``move(*arrays)``, which moves elements of arrays of one dtype. Floats of 8 and 16 bits are moved as bits:
    XLA's CPU backend may make wider floats of them, which changes NaNs, and flushes denormals to zero."""
    dtype = arrays[0].dtype
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits not in (8, 16):
        return move(*arrays)
    return from_bits(move(*map(to_bits, arrays)), dtype)


def to_keys(x: jax.Array) -> jax.Array:
    """Returns unsigned integers in the total order of ``x``: -NaN < -inf < .. < -0 < +0 < .. < inf < NaN."""
    bits = to_bits(x)
    if x.dtype == np.dtype(bool) or np.issubdtype(x.dtype, np.unsignedinteger):
        return bits
    sign = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    if np.issubdtype(x.dtype, np.signedinteger):
        return bits ^ sign
    return jax.numpy.where(bits & sign, ~bits, bits | sign)


def from_keys(keys: jax.Array, dtype: np.dtype) -> jax.Array:
    if np.issubdtype(dtype, np.unsignedinteger) or dtype == np.dtype(bool):
        return keys.astype(dtype)
    sign = keys.dtype.type(1 << (8 * dtype.itemsize - 1))
    if np.issubdtype(dtype, np.signedinteger):
        return lax.bitcast_convert_type(keys ^ sign, dtype)
    return lax.bitcast_convert_type(jax.numpy.where(keys & sign, keys ^ sign, ~keys), dtype)


def identity(name, dtype):
    """Returns the maximum or minimum of a row without entries that count: the lowest or highest value."""
    if dtype == np.dtype(bool):
        return np.array(name == "min")
    if jnp.issubdtype(dtype, jnp.floating):
        infinity = np.array(np.inf, dtype)
        largest = jnp.finfo(dtype).max if np.isnan(infinity) else infinity
        return np.array(largest if name == "min" else -largest, dtype)
    info = jnp.iinfo(dtype)
    return np.array(info.max if name == "min" else info.min, dtype)


def sort_keys(x):
    """Returns unsigned integers in the order of `jax.lax.sort`: NaNs are equal and last, -0 and +0 are equal."""
    keys = to_keys(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return keys
    # -0 and NaNs are found by their keys: XLA's CPU backend treats denormals as zeros where it compares floats, and
    # where it makes float comparisons of tests of bits.
    unsigned = keys.dtype.type
    zero = unsigned(1 << (8 * keys.dtype.itemsize - 1))
    infinity = np.array(np.inf, x.dtype)
    largest = jnp.finfo(x.dtype).max.astype(x.dtype) if np.isnan(infinity) else infinity
    most = largest.view(keys.dtype) | zero
    keys = jnp.where(keys == zero - unsigned(1), zero, keys)
    return jnp.where((keys > most) | (keys < ~most), unsigned(np.iinfo(keys.dtype).max), keys)
