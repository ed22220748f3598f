"""Several axes as one: how ops that work along any number of axes reach kernels that work along one."""

from __future__ import annotations

import functools
import itertools

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jaxgpuops._primitive import as_automatic, merge


class Merged:
    """Arrays of one shape, or that broadcast to it, with ``axes`` merged into one, number ``axis``.

    Neighbouring axes are merged where they are, which costs nothing. Others are moved to the end first: a copy. No axes
    at all are one of length 1 at the end.
    """

    def __init__(self, shape: tuple, axes: tuple[int, ...]):
        self.axes = axes
        others = tuple(d for d in range(len(shape)) if d not in axes)
        together = not axes or axes == tuple(range(axes[0], axes[0] + len(axes)))
        self._order = tuple(range(len(shape))) if together else (*others, *axes)
        self._shape = tuple(shape[d] for d in self._order)
        self.axis = axes[0] if together and axes else len(others)
        self.neighbours = tuple(range(self.axis, self.axis + len(axes)))  # the axes of arrays that are `together`

    def together(self, x: jax.Array) -> jax.Array:
        """An array that broadcasts to the shape and has its rank, with the axes as neighbours."""
        return x if len(self.axes) == 1 else x.transpose(self._order)

    def merge(self, x: jax.Array) -> jax.Array:
        """Of an array that broadcasts to the shape and has its rank. Expanded if it has some of the axes only."""
        if len(self.axes) == 1:
            return x
        x, end = self.together(x), self.axis + len(self.axes)
        merged = functools.partial(merge, whole=self._shape, axis=self.neighbours) if self.axes else self._with_axis
        spec = jax.typeof(x).sharding.spec
        names = itertools.chain(*(s if isinstance(s, tuple) else (s,) for s in spec[self.axis : end] if s))
        return as_automatic(merged, PartitionSpec(*spec[: self.axis], tuple(names) or None, *spec[end:]), x)

    def _with_axis(self, x):
        return lax.expand_dims(x, (self.axis,))

    def split(self, y: jax.Array) -> jax.Array:
        """The inverse, for arrays of the whole shape."""
        if len(self.axes) == 1:
            return y
        spec = list(jax.typeof(y).sharding.spec)
        spec[self.axis : self.axis + 1] = (spec[self.axis], *(None for _ in self.axes[1:])) if self.axes else ()
        y = as_automatic(lambda y: y.reshape(self._shape), PartitionSpec(*spec), y)
        return y.transpose([self._order.index(d) for d in range(len(self._order))])

    def reduced(self, y: jax.Array, keepdims: bool) -> jax.Array:
        """A result without the axis, with the axes of size 1 if ``keepdims``."""
        return lax.expand_dims(y, self.axes) if keepdims else y
