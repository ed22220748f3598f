"""Merges several axes to one, so that ops along any number of axes can use kernels that work along one."""

from __future__ import annotations

import functools
import itertools
import math

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jaxgpuops._primitive import as_automatic, merge


class Merged:
    """Merges the ``axes`` of arrays of one shape, or of arrays that broadcast to it, to the one axis number ``axis``.

    Neighbouring axes are merged where they are, which costs nothing. Others are first moved to the end, which copies.
    No axes at all become one axis of length 1 at the end.
    """

    def __init__(self, shape: tuple, axes: tuple[int, ...]):
        self.axes = axes
        others = tuple(d for d in range(len(shape)) if d not in axes)
        together = not axes or axes == tuple(range(axes[0], axes[0] + len(axes)))
        self._order = tuple(range(len(shape))) if together else (*others, *axes)
        self._shape, self._sizes = tuple(shape[d] for d in self._order), shape
        self.axis = axes[0] if together and axes else len(others)
        # The axes, in the arrays that `together` returns.
        self.neighbours = tuple(range(self.axis, self.axis + len(axes)))

    def together(self, x: jax.Array) -> jax.Array:
        """Returns an array, which broadcasts to the shape and has its rank, with the axes as neighbours."""
        return x if len(self.axes) == 1 else x.transpose(self._order)

    def merge(self, x: jax.Array) -> jax.Array:
        """Merges the axes of an array that broadcasts to the shape and has its rank. An array that has only some of the
        axes is expanded to all of them."""
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
        """The inverse of `merge`, for arrays of the whole shape."""
        if len(self.axes) == 1:
            return y
        sharding = jax.typeof(y).sharding
        spec = list(sharding.spec)
        own: list = [None for _ in self.axes]
        if self.axes and (names := spec[self.axis]):  # the first axis that can be split so
            parts = math.prod(sharding.mesh.shape[n] for n in (names if isinstance(names, tuple) else (names,)))
            if (first := next((i for i, d in enumerate(self.axes) if self._sizes[d] % parts == 0), None)) is not None:
                own[first] = names
        spec[self.axis : self.axis + 1] = own
        y = as_automatic(lambda y: y.reshape(self._shape), PartitionSpec(*spec), y)
        return y.transpose([self._order.index(d) for d in range(len(self._order))])

    def reduced(self, y: jax.Array, keepdims: bool) -> jax.Array:
        """Returns a result that lacks the merged axis; with ``keepdims``, it gets the original axes with size 1."""
        return lax.expand_dims(y, self.axes) if keepdims else y
