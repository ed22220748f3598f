"""The problems of the sweep, and the checks of results that several families share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call along an axis of an array.

    call: what is called, as text.
    bytes: what has to be moved at least.
    ours, jax, torch: for each library, a function of its arrays, which returns a tree of arrays. Those of JAX and torch
      may be missing.
    right: ``right(operands, results)`` is a boolean scalar, in JAX.
    others: kind, shape and dtype of operands after the first: "values", "labels" (indices along the axis), "cotangent",
      "ids below 9" (or another number), "offsets" (which ascend, up to the length of the axis), "sorted" (values that
      do).
    kind: that of the first operand: "values", "factors" (whose products neither vanish nor overflow), "decay" (in 0 to
      1) or ids.
    data: the distribution of values, one of `drawn.DATA`.
    """

    family: str
    call: str
    shape: tuple[int, ...]
    axis: int
    dtype: str
    bytes: int
    ours: Callable
    jax: Callable | None
    right: Callable
    torch: Callable | None = None
    others: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    kind: str = "values"
    data: str = "normal"
    name: str = ""

    def __str__(self) -> str:
        axis = f" axis {self.axis}" if self.axis < len(self.shape) - 1 else ""
        return f"{self.name}: {self.call} {'x'.join(map(str, self.shape))}{axis} {self.dtype} {self.data}"

    def _operands(self):
        return [(self.kind, self.shape, self.dtype), *self.others]

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in self._operands()]

    def draw(self, pool: jax.Array, start: jax.Array) -> tuple[jax.Array, ...]:
        """Returns operands, made of the normal numbers of ``pool`` from ``start`` on.

        No random numbers are made here: that would take longer to compile than the call itself.
        """
        return tuple(
            self._drawn(kind, jax.lax.dynamic_slice(pool, (start + i,), (math.prod(shape),)).reshape(shape), dtype)
            for i, (kind, shape, dtype) in enumerate(self._operands())
        )

    def _drawn(self, kind, x, dtype):
        n = self.shape[self.axis]
        if kind == "labels":
            return (_mixed_bits(x) % n).astype(dtype)
        if kind == "offsets":
            return jnp.sort(_mixed_bits(x) % (n + 1)).astype(dtype)
        if kind == "sorted":
            return jnp.sort(self._drawn("values", x, dtype), self.axis)
        if kind.startswith("ids below "):
            return (_mixed_bits(self._values(x)) % int(kind.split()[-1])).astype(dtype)
        if kind == "decay":
            return jax.nn.sigmoid(x).astype(dtype)
        if kind != "cotangent":
            x = self._values(x)
        if not jnp.issubdtype(dtype, jnp.floating):
            if self.data == "normal":  # any bits
                return _mixed_bits(x).astype(dtype)
            return (8 * x + 32 * (dtype == "uint8")).astype("int32").astype(dtype)
        if kind == "factors":
            x = 1 + x / (4 * math.sqrt(n) if self.data in ("normal", "ties") else n)
        return x.astype(dtype)

    def _values(self, x):
        if self.data == "ties":
            return jnp.round(4 * x) / 4
        if self.data == "constant":
            return jnp.full_like(x, 0.5)
        if self.data in ("rising", "falling"):
            axis = min(self.axis, x.ndim - 1)  # ids may have no other axis
            place = jax.lax.broadcasted_iota(jnp.float32, x.shape, axis)
            return (6 * place / x.shape[axis] - 3) * (1 if self.data == "rising" else -1)
        return x


def _mixed_bits(x):
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) * jnp.uint32(2654435761)
    return (bits ^ bits >> 15) * jnp.uint32(2246822519)


def bytes_of(shape, dtype):
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def rounding_of(dtype):
    """The relative error that one result, and the arithmetic before it, may have."""
    own = float(jnp.finfo(dtype).eps)
    return own, min(own, float(jnp.finfo(jnp.float32).eps))


def is_near(actual, wanted, tolerance):
    """Compares all elements, except where the wanted one is near the largest number of the dtype, or beyond it. Numbers
    are allowed one step between subnormal ones more than the tolerance, which is relative as a rule."""
    about = jnp.finfo(actual.dtype)
    beyond = ~(abs(wanted) < 0.99 * float(about.max))
    near = abs(actual.astype(jnp.float64) - wanted) <= tolerance + float(about.smallest_subnormal)
    return (near | beyond).all()


def as_ordered(x):
    """Integers in the order of the elements: that of IEEE 754's total order."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, integer)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)
