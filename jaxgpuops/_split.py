"""An axis that is split over devices, as rules of kernels see it.

A kernel's `Rule` says what the kernel does on each device if its axis is split: most often a local call, a collective
of little, and a local finish. Rules stand beside the kernels, in `RULES`. They serve arrays of a mesh, of which XLA's
partitioner asks (`_partition`), and `axis_name`, with which a program inside `jax.shard_map` says so itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType


@dataclasses.dataclass(frozen=True)
class Split:
    """A dimension that is split over devices in ``shards`` equal parts, as seen by the device that has part number
    ``index()``.

    If parts would not be equal, arrays are padded at the end, with any values.

    A `Split` is also the param of calls inside `jax.shard_map` with ``axis_name``: each device has its part of operands
    and results, and all devices have the same result where it has no parts. ``checked`` says whether JAX knows that
    (``check_vma``).
    """

    mesh: AbstractMesh
    names: tuple[str, ...]  # mesh axes along which it is split, the slowest first
    length: int  # length of the whole dimension
    checked: bool = True

    @property
    def shards(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self.names)

    @property
    def part(self) -> int:
        return -(-self.length // self.shards)

    @property
    def uneven(self) -> bool:
        return self.part * self.shards != self.length

    def index(self) -> jax.Array:
        return lax.axis_index(self.names)

    def start(self) -> jax.Array:
        return self.index().astype(np.int32) * np.int32(self.part)

    def positions(self, shape: tuple, dim: int) -> jax.Array:
        """Returns the indices of this part along the whole dimension, in an array that broadcasts against ``shape``."""
        shape = tuple(n if d == dim else 1 for d, n in enumerate(shape))
        return self.start() + lax.broadcasted_iota(np.int32, shape, dim)

    def is_padding(self, shape: tuple, dim: int) -> jax.Array:
        """Returns where this part is padding that makes parts equal, in an array that broadcasts against ``shape``."""
        own = [min(self.part, max(0, self.length - i * self.part)) for i in range(self.shards)]
        shape = tuple(n if d == dim else 1 for d, n in enumerate(shape))
        return lax.broadcasted_iota(np.int32, shape, dim) >= jnp.asarray(own, np.int32)[self.index()]

    def fill(self, x: jax.Array, dim: int, value) -> jax.Array:
        """Returns x with this value in place of padding."""
        if not self.uneven or x.shape[dim] != self.part:
            return x
        return jnp.where(self.is_padding(x.shape, dim), jnp.asarray(value, x.dtype), x)

    def padded(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns a whole array with zeros at its end, so that it can be split into equal parts."""
        more = self.part * self.shards - self.length
        return lax.pad(x, np.zeros((), x.dtype), [(0, more if d == dim else 0, 0) for d in range(x.ndim)])

    def gather(self, x: jax.Array, dim: int) -> jax.Array:
        if x.shape[dim] == 0:  # JAX refuses to gather nothing
            return x
        _note("all-gather", x, self.shards)
        return _as_bits(lambda x: lax.all_gather(x, self.names, axis=dim, tiled=True), x)

    def exchange(self, x: jax.Array, dim: int, axis: int) -> jax.Array:
        """Exchanges parts: a device gets its part of dimension ``dim`` from every device, and joins these along
        ``axis``."""
        _note("all-to-all", x)
        return _as_bits(lambda x: lax.all_to_all(x, self.names, dim, axis, tiled=True), x)

    def sum(self, x: jax.Array) -> jax.Array:
        _note("all-reduce", x)
        return lax.psum(x, self.names)

    def sums(self, *xs: jax.Array) -> Sequence[jax.Array]:
        """Returns the sums of several arrays. XLA adds them up in one collective, or drops those that nothing needs."""
        # XLA for GPUs joins collectives after it has fused what is around them. Without the barrier, a fusion might
        # make one array from the sum of another, too.
        return [self.sum(x) for x in lax.optimization_barrier(xs)]

    def sum_parts(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns this device's part of the sum."""
        y = lax.psum_scatter(x, self.names, scatter_dimension=dim, tiled=True)
        _note("reduce-scatter", y)
        return y

    def only(self, names: Sequence[str]) -> Split:
        """Returns this for collectives along some of the mesh axes; its parts have no meaning."""
        return dataclasses.replace(self, names=tuple(name for name in self.names if name in names))

    def join(self, x: jax.Array) -> jax.Array:
        """Returns each element from the one device that does not have 0 there. Bits are added as integers, so they do
        not change."""

        def joined(x):
            # XLA for GPUs sends 16 bits as 32 when it adds up; so two numbers are sent as one.
            if x.dtype.itemsize == 2 and x.size % 2 == 0:
                pairs = lax.bitcast_convert_type(x.reshape(-1, 2), np.uint32)
                return lax.bitcast_convert_type(self.sum(pairs), x.dtype).reshape(x.shape)
            return _as_bits(self.sum, x)

        return _linear(joined, self.sum, x)

    def join_parts(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns this device's part of what `join` gives."""
        if x.dtype.itemsize == 2 and x.shape[-1] % 2 == 0 and dim < x.ndim - 1:
            pairs = lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2), np.uint32)
            y = lax.bitcast_convert_type(self.sum_parts(pairs, dim), x.dtype)
            return y.reshape(*y.shape[:-2], x.shape[-1])
        return _as_bits(lambda x: self.sum_parts(x, dim), x)

    def max(self, x: jax.Array) -> jax.Array:
        _note("all-reduce", x)
        return lax.pmax(x, self.names)

    def cotangent(self, ct: jax.Array) -> jax.Array:
        """Returns the cotangent of a result that all devices have. Each device has only a part of it, a summand, unless
        JAX knows that all have the same."""
        return ct if self.checked else self.sum(ct)

    def part_of(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns this device's part of a whole array."""
        return lax.dynamic_slice_in_dim(x, self.start(), self.part, dim)

    def is_first(self, reverse: bool = False) -> jax.Array:
        return self.index() == (self.shards - 1 if reverse else 0)

    def from_previous(self, x: jax.Array, reverse: bool = False) -> jax.Array:
        """Returns the x of the previous device, or zeros on the first device."""
        # `ppermute` takes names in the order of the mesh only. In that order, order[i] is the device of the i-th part.
        in_mesh = tuple(name for name in self.mesh.axis_names if name in self.names)
        devices = np.arange(self.shards).reshape([self.mesh.shape[name] for name in in_mesh])
        order = devices.transpose([in_mesh.index(name) for name in self.names]).ravel().tolist()
        order = order[::-1] if reverse else order
        _note("collective-permute", x)
        return lax.ppermute(x, in_mesh, list(itertools.pairwise(order)))


def _linear(bits: Callable, move: Callable, x: jax.Array) -> jax.Array:
    """Returns ``bits(x)``, which moves the bits of floats as ``move`` moves floats. To JAX, bits have no derivative: the
    tangent is moved as it is."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return bits(x)
    moved = jax.custom_jvp(bits)
    moved.defjvp(lambda primals, tangents: (moved(*primals), move(*tangents)))
    return moved(x)


def _as_bits(move: Callable, x: jax.Array) -> jax.Array:
    """Moves floats as integers: XLA's CPU backend moves narrow floats as wide ones, which changes NaNs."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return move(x)

    def bits(x):
        moved = move(lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}")))
        return lax.bitcast_convert_type(moved, x.dtype)

    return _linear(bits, move, x)


_noted: contextvars.ContextVar[dict[str, int] | None] = contextvars.ContextVar("jaxgpuops_noted", default=None)


@contextlib.contextmanager
def noting(collectives: dict[str, int]):
    """Adds up in ``collectives`` the bytes that collectives inside this context move, by their kind, for `explain`."""
    token = _noted.set(collectives)
    try:
        yield
    finally:
        _noted.reset(token)


def _note(collective: str, x: jax.Array, times: int = 1) -> None:
    """Notes the bytes of a collective's result."""
    if (noted := _noted.get()) is not None:
        noted[collective] = noted.get(collective, 0) + x.size * x.dtype.itemsize * times


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a kernel does if its axis, or a dimension whose index matters, is split over devices.

    Args:
      local: ``local(splits, *operands, axis, **params)`` gives this device's part of the results from its part of the
        operands; ``splits`` has a `Split` for each dimension that is split, with the rank of rows as key for units (see
        ``free``). It is called if the axis is split (of several axes, any), or a dimension whose index matters, or
        units. If only other dimensions are split, it is called for a result that is a sum over one of them whose parts
        are not equal; it then adds up the sums of all devices.
      operands: which operands are split with the axis if they have all of it, by index; None: every one. If the first
        operand is not one of them, the axis is that of the results.
      keeps: whether results that have the axis are split along it. Otherwise every device has all of them.
      pays: ``pays(split, avals, **params)`` says whether ``local`` moves fewer bytes than gathering the axis. It gets
        the split of the axis, and the types of one device's part of the operands and, after these, of the results. For
        several axes it is called once.
      free: ``{array: size}`` for operands (0, 1, ..) and results (~0, ~1, ..) whose axis is not that of the others.
        This axis consists of units of that size, which do not depend on each other. So it is split like a dimension off
        the axis, in equal parts of whole units; never if the size is 0.
      scatters: whether a dimension off the axis may be split along the same mesh axes as the axis is, if no array has
        both. Each device then gets its part of that dimension, of the sum of what all devices have.
      gathers: operands, by index, that are never split along mesh axes along which the axis is split.
      moves: ``moves(splits, avals, axis, **params)``, with avals as for ``pays``, returns the bytes that ``local``
        moves, or infinity if it cannot split the call in this way. It takes the place of ``pays``: the call is split in
        the way that moves the fewest bytes, including those that XLA moves to split the operands in this way, and the
        results as they are wanted.
      beside: ``beside(*operands, axis, **params)`` returns arrays that XLA computes from the whole operands, outside
        the call, since it may know more about them (for instance that they are constants). ``local`` gets them as
        further operands, not split along the axis, and may ignore them. With ``axis_name`` there are none.
    """

    local: Callable[..., Sequence[jax.Array]]
    operands: tuple[int, ...] | None = None
    keeps: bool = False
    pays: Callable[..., bool] = lambda split, avals, **params: True
    free: dict[int, int] = dataclasses.field(default_factory=dict)
    scatters: bool = False
    gathers: tuple[int, ...] = ()
    moves: Callable[..., float] | None = None
    beside: Callable[..., Sequence[jax.Array]] | None = None


# By the kernel's name: the rule, or a function that returns the rule for the call's params.
RULES: dict[str, Rule | Callable[..., Rule]] = {}


def rule_of(kernel, params) -> Rule | None:
    rule = RULES.get(kernel.name)
    return rule if rule is None or isinstance(rule, Rule) else rule(**params)


def filled_axes(splits: dict[int, Split], x: jax.Array, axis, value) -> jax.Array:
    """Returns x with this value in place of the padding of the axis, or of several axes."""
    for d in axis if isinstance(axis, tuple) else (axis,):
        x = splits[d].fill(x, d, value) if d in splits else x
    return x


def all_axes(splits: dict[int, Split], axis) -> Split:
    """Returns the `Split` of the axis, for collectives. For several axes its names are all their mesh axes, and its
    parts have no meaning."""
    if not isinstance(axis, tuple):
        return splits[axis]
    own = [splits[d] for d in axis if d in splits]
    return dataclasses.replace(own[0], names=(*itertools.chain(*(split.names for split in own)),))


def plain_rule(kernel, keeps: bool = False, **options) -> Rule:
    """Returns the rule of a kernel whose fallback takes a `Split`."""

    def local(splits, *operands, axis, **params):
        return kernel.fallback(*operands, axis=axis, split=splits[axis], **params)

    return Rule(local, keeps=keeps, **options)


def by_rows(kernel) -> Rule:
    """Returns the rule of a kernel whose operands and results all have the axis: each device exchanges its part of the
    axis for a part of the rows, as XLA does for its own sort, and back. If no other dimension has equal parts, the axis
    is gathered.
    """

    def rows(split, shape, axis):
        return next((d for d, n in enumerate(shape) if d != axis and n and n % split.shards == 0), None)

    def local(splits, *operands, axis, **params):
        split = splits[axis]
        dim = rows(split, operands[0].shape, axis)
        there = [lax.slice_in_dim(split.exchange(x, dim, axis), 0, split.length, axis=axis) for x in operands]
        outs = kernel.primitive.bind(*there, axis=axis, **params)
        return tuple(split.exchange(split.padded(y, axis), axis, dim) for y in outs)

    return Rule(
        local, keeps=True, pays=lambda split, avals, *, axis, **_: rows(split, avals[0].shape, axis) is not None
    )


def manual(op: str, names: tuple[str, ...] | None, part: int) -> Split | None:
    """Returns the `Split` of an axis that ``axis_name`` describes, where each device of `jax.shard_map` has ``part`` of
    it."""
    if names is None:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    manual_axes = [n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Manual]
    if unknown := [name for name in names if name not in manual_axes]:
        around = f"of a jax.shard_map around the call, which has {manual_axes}" if manual_axes else "of a jax.shard_map"
        raise ValueError(f"{op}: axis_name must be a mesh axis {around}; got {', '.join(map(repr, unknown))}")
    split = Split(
        mesh, names, part * math.prod(mesh.shape[name] for name in names), bool(varying(lax.axis_index(names)))
    )
    if split.length >= 1 << 31:
        raise ValueError(f"{op}: an axis that is split must be shorter than 2**31, got {split.length}")
    return split


def varying(x: jax.Array) -> frozenset[str]:
    """Returns the manual mesh axes along which JAX knows x to vary."""
    aval = jax.typeof(x)
    return aval.mat.varying if hasattr(aval, "mat") else aval.vma


def invarying(aval, names: tuple[str, ...]):
    """Returns the type of an array that does not vary along these mesh axes."""
    if hasattr(aval, "mat"):
        return aval.update(manual_axis_type=aval.mat.update(varying=aval.mat.varying - {*names}))
    return aval.update(vma=aval.vma - {*names})


def run_manually(kernel, split: Split, results: Sequence, *operands, axis, **params):
    """Computes a kernel whose axis is split as ``axis_name`` says, in plain JAX, other kernels and collectives.
    ``results`` are the types of its results."""
    rule = rule_of(kernel, params)
    assert rule is not None  # callers give `axis_name` only for kernels that have a rule
    own = range(len(operands)) if rule.operands is None else rule.operands
    if rule.moves:
        pays = rule.moves({axis: split}, [*operands, *results], axis=axis, **params) <= split.shards * sum(
            operands[i].size * operands[i].dtype.itemsize for i in own
        )
    else:
        pays = rule.pays(split, [*operands, *results], axis=axis, **params)
    if pays:
        return tuple(rule.local({axis: split}, *operands, axis=axis, **params))
    whole = lambda i, x: split.gather(x, axis) if i in own and x.shape[axis] == split.part else x
    outs = kernel.primitive.bind(*itertools.starmap(whole, enumerate(operands)), axis=axis, **params)
    return tuple(split.part_of(y, axis) if rule.keeps and y.ndim == operands[0].ndim else y for y in outs)


_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64")))


def needs_x64(avals) -> bool:
    """Whether functions of such arrays must be traced with x64 enabled. Sorts join keys to integers of 64 bits, also
    where the user has not enabled these."""
    return jax.config.jax_enable_x64 or any(aval.dtype in _WIDE for aval in avals)


def ends(axis) -> tuple[int, int]:
    """Returns the first axis, and the dimension after the last axis."""
    return (axis, axis + 1) if isinstance(axis, int) else (axis[0], axis[-1] + 1)


def whole_shape(avals, axis) -> tuple:
    """The shape that operands broadcast to, with the axis of the first one."""
    first, after = ends(axis)
    sizes = zip(*(aval.shape for aval in avals), strict=True)
    most = (next((n for n in each if not (isinstance(n, int) and n == 1)), 1) for each in sizes)
    return tuple(n if first <= d < after else m for d, (n, m) in enumerate(zip(avals[0].shape, most, strict=True)))
