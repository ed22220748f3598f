"""Several axes as one: how ops that work along any number of axes reach kernels that work along one."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxgpuops._primitive import as_automatic


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

    def _split_at(self, shape):
        end = self.axis + len(self.axes)
        return shape[: self.axis], shape[self.axis : end], shape[end:]

    def merge(self, x: jax.Array) -> jax.Array:
        """Of an array that broadcasts to the shape and has its rank. Expanded if it has some of the axes only."""
        if len(self.axes) == 1:
            return x
        x = x.transpose(self._order)
        before, own, after = self._split_at(x.shape)
        _, whole, _ = self._split_at(self._shape)
        if own != whole and any(n != 1 for n in own):
            own = whole
            x = jnp.broadcast_to(x, (*before, *own, *after))
        merge = lambda x: x.reshape(*before, math.prod(own), *after)
        first, second, third = self._split_at(jax.typeof(x).sharding.spec)
        names = itertools.chain(*(s if isinstance(s, tuple) else (s,) for s in second if s))
        return as_automatic(merge, PartitionSpec(*first, tuple(names) or None, *third), x)

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
