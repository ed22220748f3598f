"""Argument checks that every op shares. Messages name the op, the argument, what came and what is allowed."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np

Axis = int | Sequence[int] | None  # the axis argument of functions that take one axis, several, or all
AxisName = str | tuple[str, ...] | None  # the axis_name argument: the mesh axes that the axis is split along

# The dtypes that kernels take.
INTEGERS: frozenset[Any] = frozenset(
    map(np.dtype, ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
)
FLOATS: frozenset[Any] = frozenset(map(np.dtype, [ml_dtypes.bfloat16, "float16", "float32", "float64"]))
FLOATS8: frozenset[Any] = frozenset(map(np.dtype, [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]))
COMPLEX: frozenset[Any] = frozenset(map(np.dtype, ["complex64", "complex128"]))
ORDERED_DTYPES: frozenset[Any] = INTEGERS | FLOATS | FLOATS8 | {np.dtype(bool)}


def wide(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which elements of a float dtype are computed: at least float32."""
    return np.dtype(np.float32) if dtype in FLOATS8 or dtype in FLOATS and dtype.itemsize == 2 else dtype


def inexact(dtype: np.dtype) -> np.dtype:
    """Returns the float dtype to which JAX converts integers and bools: float64 for those of 64 bits, else float32."""
    return np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)


def int32(size: Any) -> Any:
    """Returns a size as int32: a number, or an array if it is a symbolic dimension of an export."""
    return jnp.asarray(size, np.int32) if jax.export.is_symbolic_dim(size) else np.int32(size)


def given(*operands: jax.Array | None) -> list[jax.Array]:
    """Returns the operands that are not None."""
    return [x for x in operands if x is not None]


def array(op: str, name: str, x: Any, keys: bool = False) -> jax.Array:
    """Converts any array-like to a JAX array. Tracers and JAX arrays are returned as they are; those of random keys
    only where ``keys`` are allowed."""
    if isinstance(x, jax.Array):
        if not keys and not isinstance(x.dtype, np.dtype):
            raise TypeError(f"{op}: {name} must be an array of numbers or booleans, got one of dtype {x.dtype}")
        return x
    if getattr(x, "dtype", None) == jax.dtypes.float0:
        raise TypeError(f"{op}: {name} has dtype float0, the tangent type of integers, which has no values")
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{op}: {name} must be an array of numbers or booleans, got {x!r}") from error


def optional(op: str, name: str, x: Any) -> jax.Array | None:
    """Converts an argument that may be None, which stays None, like `array`."""
    return None if x is None else array(op, name, x)


def labels(op: str, name: str, x: Any) -> jax.Array:
    """Converts any array-like of class numbers, or of places. Where JAX would truncate 64 bits to 32, numbers that do
    not fit become -1 or 2^31 - 1, which are out of range, too, so that those in ascending order stay in it."""
    if not isinstance(x, jax.Array) and not jax.config.jax_enable_x64:
        try:
            wide = np.asarray(x)
        except (TypeError, ValueError, OverflowError):  # `array` reports what is wrong
            wide = np.zeros(0)
        if wide.dtype in (np.int64, np.uint64):
            x = np.clip(wide, -1 if wide.dtype == np.int64 else 0, 2**31 - 1).astype(np.int32)
    return array(op, name, x)


def flag(op: str, name: str, value: Any) -> bool:
    """Checks that the value is a Python or NumPy bool, and not a number, an array or a traced value."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(
        f"{op}: {name} must be True or False, known at trace time, got {value!r} of type {type(value).__name__}"
    )


def choice(op: str, name: str, value: Any, allowed: Collection[str | None]) -> Any:
    """Checks that the value is one of a few words, or None where that is allowed."""
    if (value is None or isinstance(value, str)) and value in allowed:
        return value
    words = list(map(repr, allowed))
    raise ValueError(f"{op}: {name} must be {', '.join(words[:-1])} or {words[-1]}, got {value!r}")


def integer(op: str, name: str, value: Any) -> int:
    """Checks that the value is an integer or a symbolic dimension of an export, and not a bool or a traced value."""
    if jax.export.is_symbolic_dim(value):
        return value
    try:
        if not isinstance(value, bool | np.bool_):
            return operator.index(value)
    except TypeError:  # a traced value raises a subclass of TypeError
        pass
    raise TypeError(
        f"{op}: {name} must be an integer known at trace time, got {value!r} of type {type(value).__name__}"
    )


def size(op: str, name: str, value: Any, least: int = 0) -> int:
    """Checks that the value is an integer from ``least`` to 2**31 - 1, or a symbolic dimension of an export."""
    value = integer(op, name, value)
    if isinstance(value, int) and not least <= value < 1 << 31:
        raise ValueError(f"{op}: {name} must be between {least} and {(1 << 31) - 1}, got {value}")
    return value


def number(op: str, name: str, value: Any) -> float:
    """Checks that the value is a Python or NumPy number, and not a bool or an array; returns it as a float."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise ValueError(f"{op}: {name} must be in the range of float64, got {value!r}") from error
    raise TypeError(f"{op}: {name} must be a number known at trace time, got {value!r} of type {type(value).__name__}")


def axes(op: str, value: Any) -> int | tuple[int, ...] | None:
    """Checks that the value is one axis, several, or None, all known at trace time."""
    if isinstance(value, tuple | list):
        return tuple(integer(op, "each axis", axis) for axis in value)
    return None if value is None else integer(op, "axis", value)


def one_axis(op: str, names: tuple[str, ...] | None, axes: tuple[int, ...]) -> bool:
    """Returns whether ``names`` are given, and checks that there is one axis then."""
    if names is not None and len(axes) != 1:
        raise ValueError(f"{op}: axis_name works with one axis, got {len(axes)}")
    return names is not None


def names(op: str, value: Any) -> tuple[str, ...] | None:
    """Checks that the value is one name of a mesh axis, several, or None; returns a tuple of names, or None."""
    value = (value,) if isinstance(value, str) else value
    if value is None or isinstance(value, tuple | list) and value and all(isinstance(name, str) for name in value):
        return None if value is None else tuple(value)
    raise TypeError(f"{op}: axis_name must be a name of a mesh axis, or several, or None, got {value!r}")


def dtype(op: str, name: str, dtype: np.dtype, allowed: Collection[np.dtype]) -> None:
    """Checks that ``dtype``, which the argument ``name`` has, is allowed."""
    if dtype not in allowed:
        raise TypeError(f"{op}: {name} has dtype {dtype}; allowed are {', '.join(sorted(map(str, allowed)))}")


def promoted(op: str, **arrays: jax.Array) -> np.dtype:
    """Returns the dtype to which JAX promotes arrays, and checks that there is one."""
    try:
        return jnp.result_type(*arrays.values())
    except (TypeError, ValueError) as error:
        dtypes = ", ".join(f"{name} has {x.dtype}" for name, x in arrays.items())
        raise TypeError(f"{op}: JAX does not promote the dtypes of the arguments to one: {dtypes}") from error


def axis_of(op: str, name: str, shape: tuple, axis: int, argument: str = "axis") -> int:
    """Checks that the array ``name``, of this shape, has the axis; returns the axis counted from the front. The axis
    itself is called ``argument``."""
    rank = len(shape)
    if rank == 0:
        raise ValueError(f"{op}: {name} must have at least one dimension, got a scalar")
    if not -rank <= axis < rank:
        raise ValueError(
            f"{op}: {argument} must be between {-rank} and {rank - 1} for {name} of shape {shape}, got {axis}"
        )
    return axis % rank


def axes_of(op: str, name: str, shape: tuple, axes: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Checks that the argument ``name``, of this shape, has the axes (None: all of them); returns them in ascending
    order, counted from the front."""
    if axes is None:
        return tuple(range(len(shape)))
    found = sorted(axis_of(op, name, shape, axis) for axis in (axes if isinstance(axes, tuple) else (axes,)))
    if len(set(found)) < len(found):
        raise ValueError(f"{op}: axis has duplicates for {name} of shape {shape}: {axes}")
    return tuple(found)


def ordered(op: str, name: str, x: jax.Array, axis: int) -> int:
    """Checks that ``x`` can be ordered along ``axis``; returns the axis counted from the front."""
    dtype(op, name, x.dtype, ORDERED_DTYPES)
    return indexed_axis(op, name, x, axis)


def indexed_axis(op: str, name: str, x: jax.Array, axis: int, argument: str = "axis") -> int:
    """Checks that int32 can index ``x`` along ``axis``; returns the axis counted from the front."""
    axis = axis_of(op, name, x.shape, axis, argument)
    indexed_length(op, x.shape[axis], x.shape, axis, argument)
    return axis


def indexed_length(op: str, length: Any, shape: tuple, axis: Any, argument: str = "axis") -> None:
    """Checks that int32 can index so many elements, those of the axis, or of several, of an array of this shape."""
    if isinstance(length, int) and length >= 1 << 31:
        raise ValueError(
            f"{op}: indices are int32, so an axis must be shorter than 2**31; got shape {shape} and {argument}={axis}"
        )


def count(op: str, name: str, k: int, x: jax.Array, axis: int, split=None) -> int:
    """Checks that k is between 0 and the length of the axis."""
    length = x.shape[axis] if split is None else split.length
    if jax.export.is_symbolic_dim(k) or jax.export.is_symbolic_dim(length):
        in_range = not (isinstance(k, int) and k < 0)  # symbolic lengths cannot be compared here
    else:
        in_range = 0 <= k <= length
    if not in_range:
        raise ValueError(
            f"{op}: {name} must be between 0 and {length}, the length of axis {axis} of shape {x.shape}, got {k}"
        )
    return k


def _padded(shape: tuple, to: tuple) -> tuple | None:
    """Returns the shape with ones in front, up to the rank of ``to``, or None if it does not broadcast to ``to``."""
    padded = (1,) * (len(to) - len(shape)) + shape
    fits = len(padded) == len(to) and all(d in (1, n) for d, n in zip(padded, to, strict=True))
    return padded if fits else None


def broadcasting(op: str, name: str, x: jax.Array, shape: tuple) -> jax.Array:
    """Checks that ``x`` broadcasts to ``shape``; returns it with that rank, but not expanded."""
    padded = _padded(x.shape, shape)
    if padded is None:
        raise ValueError(f"{op}: {name} must broadcast to shape {shape}, got {x.shape}")
    return x.reshape(padded)


def mask(op: str, name: str, x: jax.Array | None, shape: tuple) -> jax.Array | None:
    """Checks that ``x`` is None or a boolean array that broadcasts to ``shape``; returns it with that rank."""
    if x is None:
        return None
    if x.dtype != np.dtype(bool):
        raise TypeError(f"{op}: {name} must be a mask of dtype bool, got {x.dtype}")
    return broadcasting(op, name, x, shape)


def offsets(op: str, x: Any) -> jax.Array | None:
    """Checks that ``x`` is None or the offsets of segments: integers of one dimension, at least one of them."""
    if x is None:
        return None
    x = labels(op, "offsets", x)
    dtype(op, "offsets", x.dtype, INTEGERS)
    if x.ndim != 1 or x.shape[0] == 0:
        raise ValueError(f"{op}: offsets must have shape (segments + 1,), got {x.shape}")
    return x


def starts(op: str, starts: jax.Array | None, shape: tuple, axis: int) -> jax.Array | None:
    """Checks that segment starts are None or booleans that broadcast to ``shape`` and have all of the axis; returns
    them with that rank."""
    if starts is None:
        return None
    if starts.dtype != np.dtype(bool):
        raise TypeError(f"{op}: segment_starts must be a mask of dtype bool, got {starts.dtype}")
    padded = _padded(starts.shape, shape)
    if padded is None or padded[axis] != shape[axis]:
        raise ValueError(
            f"{op}: segment_starts must broadcast to shape {shape} and have all of axis {axis}, got {starts.shape}"
        )
    return starts.reshape(padded)
