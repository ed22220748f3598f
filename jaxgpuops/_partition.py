"""Calls that XLA splits over devices.

The operands of a kernel are rows along one axis, and all other dimensions are independent. XLA's partitioner does not
know that, and would gather an array that is split in any other way than along its first dimensions. So in programs for
several devices, and only there, a primitive is lowered to one call of a target that the partitioner asks us about. It
says how arrays are split. We answer with how they should be split, and with a program for each device: the kernel on
that device's part or, if the axis is split, what the kernel's `Rule` does with collectives.

Dimensions other than the axis are split freely, and nothing moves. The axis, and a dimension whose index matters (that
of the queries of a causal mask), are split if the kernel has a rule and the rule pays; otherwise they are gathered.

The partitioner speaks of device numbers, not of a mesh with names. `_Meshes` invents names: its axes have prime sizes,
so that they refine the program's own mesh, or meshes, whatever these are.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import itertools
import math
import os
import types
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

# All private names of JAX that partitioning needs. If one is missing, `missing` says so, and calls are lowered with the
# contract of `_primitive._sharding_contract`: right, but the axis and the dimensions after it are gathered.
try:
    from jax._src import custom_partitioning as _jax
    from jax._src import mesh as _mesh
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import hlo
    from jax._src.sharding_impls import SPMDAxisContext, parse_flatten_op_sharding
    from jax._src.xla_bridge import register_plugin_callbacks
    from jax.interpreters import mlir

    _register = xla_client.register_custom_call_partitioner
    _callbacks = _jax._sharding_callbacks
    _propagate = _jax._custom_partitioning_propagate_user_sharding
    _partition = _jax._custom_partitioning_partition
    _infer = _jax._custom_partitioning_infer_sharding_from_operands
    _parse_rule, _rule_attribute = _jax.str_to_sdy_sharding_rule, _jax.sdy_sharding_rule_to_mlir
    _without_mesh = functools.partial(_mesh.use_abstract_mesh, _mesh.empty_abstract_mesh)
    missing = ""
except (ImportError, AttributeError) as error:  # this JAX is newer than the package knows
    missing = str(error)

_TARGET = "jaxgpuops.partition"
try:
    _VERSION = version("jaxgpuops")
except PackageNotFoundError:  # the package is used from a source tree
    _VERSION = "0+unknown"

# ---- Rules ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Split:
    """A dimension that is split over devices, as seen by one device: it has number ``index()`` of ``shards`` equal
    parts.

    If parts would not be equal, arrays are padded at the end, with any values.

    It is also the param of calls inside `jax.shard_map` with ``axis_name``: each device has its part of operands and
    results, and all devices have the same where a result has no parts. ``checked`` says whether JAX knows that
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
        _note("all-gather", x, self.shards)
        return _as_bits(lambda x: lax.all_gather(x, self.names, axis=dim, tiled=True), x)

    def exchange(self, x: jax.Array, dim: int, axis: int) -> jax.Array:
        """Exchanges parts: a device gets one part of dimension ``dim`` from all devices, which follow each other along
        ``axis``."""
        _note("all-to-all", x)
        return _as_bits(lambda x: lax.all_to_all(x, self.names, dim, axis, tiled=True), x)

    def sum(self, x: jax.Array) -> jax.Array:
        _note("all-reduce", x)
        return lax.psum(x, self.names)

    def sums(self, *xs: jax.Array) -> Sequence[jax.Array]:
        """Returns the sums of several arrays. XLA adds them up in one collective, or drops those that nothing needs."""
        # XLA for GPUs joins collectives after it has fused what is around them. Without the barrier, a fusion might make
        # one array from the sum of another, too.
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
        # XLA for GPUs sends 16 bits as 32 when it adds up; so two numbers are sent as one.
        if x.dtype.itemsize == 2 and x.size % 2 == 0:
            pairs = lax.bitcast_convert_type(x.reshape(-1, 2), np.uint32)
            return lax.bitcast_convert_type(self.sum(pairs), x.dtype).reshape(x.shape)
        return _as_bits(self.sum, x)

    def join_parts(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns this device's part of what `join` gives."""
        if x.dtype.itemsize == 2 and x.shape[-1] % 2 == 0 and dim < x.ndim - 1:
            pairs = lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), np.uint32)
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
        # `ppermute` takes names in the order of the mesh only, where the i-th part is on the order[i]-th device.
        in_mesh = tuple(name for name in self.mesh.axis_names if name in self.names)
        devices = np.arange(self.shards).reshape([self.mesh.shape[name] for name in in_mesh])
        order = devices.transpose([in_mesh.index(name) for name in self.names]).ravel().tolist()
        order = order[::-1] if reverse else order
        _note("collective-permute", x)
        return lax.ppermute(x, in_mesh, list(itertools.pairwise(order)))


def _as_bits(move: Callable, x: jax.Array) -> jax.Array:
    """Moves floats as integers: XLA's CPU backend moves narrow floats as wide ones, which changes NaNs."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return move(x)
    bits = lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))
    return lax.bitcast_convert_type(move(bits), x.dtype)


_noted: contextvars.ContextVar[dict[str, int] | None] = contextvars.ContextVar("jaxgpuops_noted", default=None)


def _note(collective: str, x: jax.Array, times: int = 1) -> None:
    """Notes the bytes of a collective's result, for `explain`."""
    if (noted := _noted.get()) is not None:
        noted[collective] = noted.get(collective, 0) + x.size * x.dtype.itemsize * times


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a kernel does if its axis, or a dimension whose index matters, is split over devices.

    Args:
      local: ``local(splits, *operands, axis, **params)`` gives this device's part of the results from its part of the
        operands; ``splits`` has a `Split` for each dimension that is split, with the rank of rows as key for units (see
        ``free``). Never called where only dimensions off the axis are, but where a result is a sum over one of these and
        parts are not equal. It adds up such sums of all devices. Where ``axis`` is several, some of them are split.
      operands: which operands are split with the axis if they have all of it, by index; None: every one. Where the
        first is none of them, the axis is that of the results.
      keeps: whether results are split along the axis. Others have all of it, if they have it, on every device.
      pays: ``pays(split, avals, **params)``, with the axis' split and what one device has of the operands and, after
        these, of the results: whether this moves less than gathering the axis. Of several axes it is asked once.
      free: ``{array: size}`` of operands (0, 1, ..) and results (~0, ~1, ..) whose axis is another one, of units of that
        size that do not depend on each other. They are split in equal parts, of whole units, as dimensions off the axis are;
        of size 0 never.
      scatters: whether other dimensions may be split along mesh axes along which the axis is split, too, if no array has
        both: each device gets its part of what all add up.
      gathers: operands, by index, that are never split along mesh axes along which the axis is split.
      moves: ``moves(splits, avals, axis, **params)``, with avals as for ``pays``: the bytes that ``local`` moves, or infinity
        if it cannot split the call so. If given, it takes the place of ``pays``: of all ways to split the call, that is
        taken which moves least, with what XLA moves to split operands so, and results as they are wanted.
      beside: ``beside(*operands, axis, **params)``: what XLA computes of whole arrays beside the call, where it may know
        more of them than we do, as that they are constants. These are further operands of ``local``, which drops those that
        it does not need, and are not split along the axis. Where ``axis_name`` is given there are none.
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
        raise ValueError(
            f"{op}: axis_name must be of axes of the mesh of a jax.shard_map around the call, of {manual_axes}; got "
            f"{', '.join(map(repr, unknown))}"
        )
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


def ends(axis) -> tuple[int, int]:
    """Returns the first axis, and the dimension after the last axis."""
    return (axis, axis + 1) if isinstance(axis, int) else (axis[0], axis[-1] + 1)


def whole_shape(avals, axis) -> tuple:
    """The shape that operands broadcast to, with the axis of the first one."""
    first, after = ends(axis)
    sizes = zip(*(aval.shape for aval in avals), strict=True)
    most = (next((n for n in each if not (isinstance(n, int) and n == 1)), 1) for each in sizes)
    return tuple(n if first <= d < after else m for d, (n, m) in enumerate(zip(avals[0].shape, most, strict=True)))


# ---- One call -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Part:
    """What one device has of a call's operands, and the bytes that its rule moves, by kind of collective."""

    shape: tuple
    collectives: dict[str, int]


class _Call:
    """A call of a kernel: how XLA may split it, and what each device then does.

    It has the attributes that JAX's own callbacks look for. It lives as long as the process, because programs may be
    compiled again from lowerings that are kept; so it must not hold a lowering context.
    """

    static_args = ()
    mesh = None
    propagate_user_sharding = None

    def __init__(self, kernel, avals_in, avals_beside, avals_out, platforms, meshes, *, axis, **params):
        self.kernel, self.axis, self.params = kernel, axis, params
        self.axes = axis if isinstance(axis, tuple) else (axis,)
        # These params concern the types of an explicit mesh, which do not exist in a device's program.
        if "along" in params:
            self.params = params | {"along": None}
        self.rule = rule_of(kernel, params)
        self.avals_in, self.avals_out, self.meshes = avals_in, avals_out, meshes
        self.indexed = {d for name in kernel.dimensions if isinstance(d := params[name], int)}
        self.whole = list(whole_shape(avals_in, axis))
        if self.rule and self.rule.operands is not None and 0 not in self.rule.operands:
            self.whole[axis] = avals_out[0].shape[axis]
        self.units = self.rule.free if self.rule else {}
        # First the length of each dimension of the rows; then, if an axis is made of units, how many units it has.
        self.lengths = list(self.whole)
        arrays = [*enumerate(avals_in), *((~i, a) for i, a in enumerate(avals_out))]
        self.lengths += [a.shape[ends(axis)[0]] // unit for i, a in arrays if (unit := self.units.get(i))][:1]
        self.in_rows = [self._rows_of(a, i, False) for i, a in enumerate(avals_in)]
        self.in_rows += [[None if d in self.axes else d for d in self._rows_of(a, 0, False)] for a in avals_beside]
        self.out_rows = [self._rows_of(a, i, True) for i, a in enumerate(avals_out)]
        results = kernel.results(*avals_in, axis=axis, **params)
        self.summed = [tuple(d for dims in each[2:] for d in dims if self.whole[d] != 1) for each in results]
        self.in_tree = jax.tree.structure((0,) * len(self.in_rows))
        self.out_tree = jax.tree.structure((0,) * len(avals_out))
        self.module_context = types.SimpleNamespace(platforms=platforms, backend=None)
        self.x64 = jax.config.jax_enable_x64  # may be set for this thread only
        # Keys are the partitioner's questions, so that equal layers of a model are traced once.
        self.programs: dict[str, Any] = {}
        self.parts: dict[str, Part] = {}  # by the same keys

    def _rows_of(self, aval, i, is_result) -> list[int | None]:
        """Returns, for each dimension of an array, the dimension of rows with which it is split; None if it is never
        split."""
        first, after = ends(self.axis)
        along_axis = aval.ndim - len(self.whole) + len(self.axes)  # a result may have one dimension for several axes
        own = [*range(first + along_axis), *range(after, len(self.whole))]
        free = [self._may_split(aval.shape[j], d, i, is_result) for j, d in enumerate(own)]
        rows = [d if f else None for d, f in zip(own, free, strict=True)]
        if (~i if is_result else i) in self.units:
            rows[first] = len(self.whole) if self.units[~i if is_result else i] else None
        return rows

    def _may_split(self, size, d, i, is_result) -> bool:
        if size != self.whole[d]:  # the array broadcasts, or its axis is another one
            return False
        if d not in self.axes:
            return self.rule is not None or d not in self.indexed
        if self.rule is None:
            return False
        return self.rule.keeps if is_result else self.rule.operands is None or i in self.rule.operands

    def sharding_rule(self):
        """Returns the rule in Shardy's form: a factor for each dimension of rows, and factors that must not be split
        for all other dimensions and for the elements of a unit."""
        fixed = itertools.count()
        whole: dict[str, None] = {}  # a dict, because it keeps the order in which names are added
        sizes = {}

        def factor(d, unit):
            if d is None:
                whole[name := f"z{next(fixed)}"] = None
                return name
            if d < len(self.whole) or unit == 1:
                return f"d{d}"
            whole[name := f"u{unit}"], sizes[f"u{unit}"] = None, unit
            if 1 not in self.units.values():  # no dimension says how many units there are
                sizes[f"d{d}"] = self.lengths[d]
            return f"(d{d} {name})"

        factors = [
            [" ".join(factor(d, self.units.get(~i if is_result else i)) for d in rows) for i, rows in enumerate(side)]
            for side, is_result in ((self.in_rows, False), (self.out_rows, True))
        ]
        return _parse_rule(" -> ".join(map(", ".join, factors)), need_replication_factors=tuple(whole), **sizes)

    # ---- What JAX's callbacks ask for

    def unflatten_arg_shape(self, shape, sharding):
        return shape.dimensions(), sharding

    def unflatten_arg_shapes(self, shapes, shardings):
        return self.in_tree.unflatten(list(map(self.unflatten_arg_shape, shapes, shardings)))

    def infer_sharding_from_operands(self, mesh, args, results):
        _, _, _, outs = self._plan(args, ())
        return outs

    def partition(self, mesh, args, results):
        mesh, splits, ins, outs = self._plan(args, results)
        uneven = [d for d in itertools.chain(*self.summed) if d in splits and splits[d].uneven]
        if self.rule and (uneven or any(d in splits for d in (*self.axes, *self.indexed, len(self.whole)))):
            own = functools.partial(self.rule.local, splits)
        else:
            own = functools.partial(self._of_rows, splits)
        self.part = part = Part(tuple(self.whole), {})

        def run(*operands):
            part.shape = whole_shape(operands[: len(self.avals_in)], self.axis)
            part.collectives.clear()
            token = _noted.set(part.collectives)
            try:
                return tuple(own(*operands, axis=self.axis, **self.params))
            finally:
                _noted.reset(token)

        return mesh, run, outs, ins

    def _of_rows(self, splits, *operands, **params):
        """Runs the kernel on rows that are whole on each device. Results that are sums over split dimensions are added
        up over devices."""
        outs = self.kernel.primitive.bind(*operands[: len(self.avals_in)], **params)
        return [
            all_axes(splits, dims).sum(out) if any(d in splits for d in dims) else out
            for out, dims in zip(outs, self.summed, strict=True)
        ]

    def _used(self, names, d) -> set[str]:
        """Returns the mesh axes of other dimensions of rows, along which dimension d cannot be split."""

        def excludes(e):
            if not (self.rule and self.rule.scatters) or not {d, e} & {*self.axes}:
                return True
            return any(d in rows and e in rows for rows in (*self.in_rows, *self.out_rows))

        return {*itertools.chain(*(own for e, own in names.items() if excludes(e)))}

    def _names(self, arrays) -> dict[int, tuple]:
        """Returns for each dimension of rows the mesh axes along which the first array is split there; none is used
        twice."""
        names: dict[int, tuple] = {}
        for rows, spec in arrays:
            for d, entry in zip(rows, spec, strict=True):
                if entry and d is not None and d not in names and not {*entry} & self._used(names, d):
                    names[d] = entry
        return names

    def _ways(self, arrays, mesh):
        """Returns what may be split along which mesh axes: as operands are, or as results are wanted; the axis, too, or
        not. Where the axis and other dimensions are split along the same mesh axes, either may be split along unused ones
        in place of these, or not along these."""
        for names in (self._names(arrays), self._names(arrays[::-1])):
            axes, others = ({d: e for d, e in names.items() if (d in self.axes) == own} for own in (True, False))
            yield others
            for place in _places(mesh, *({*itertools.chain(*part.values())} for part in (axes, others))):
                change = lambda part, place=place: {
                    d: tuple(place.get(n, n) for n in e if place.get(n, n)) for d, e in part.items()
                }
                yield change(axes) | others
                yield axes | change(others)
            yield names

    def _splits(self, mesh, names) -> dict[int, Split]:
        splits = {d: Split(mesh, n, self.lengths[d]) for d, n in names.items() if n}
        if (units := splits.get(len(self.whole))) and units.uneven:
            del splits[len(self.whole)]
        return splits

    def _entries(self, splits, array, rows) -> list[tuple[str, ...]]:
        """Returns the mesh axes along which each dimension of an array is split."""
        not_of = ()
        if self.rule and array in self.rule.gathers:
            not_of = {*itertools.chain(*(splits[d].names for d in self.axes if d in splits))}
        return [tuple(n for n in splits[d].names if n not in not_of) if d in splits else () for d in rows]

    def _parts(self, splits):
        """Returns what one device has of operands and results."""
        part = lambda n, d: -(-n // splits[d].shards) if d in splits else n
        arrays = [*zip(self.avals_in, self.in_rows, strict=False), *zip(self.avals_out, self.out_rows, strict=True)]
        return [jax.core.ShapedArray(tuple(map(part, aval.shape, rows)), aval.dtype) for aval, rows in arrays]

    def _moved(self, splits, mesh, specs) -> float:
        """Returns the bytes that move if the call is split so, from operands and to results as XLA has them."""
        moved = 0
        if any(d in splits for d in self.axes):
            moved = self.rule.moves(splits, self._parts(splits), axis=self.axis, **self.params)
        for i, (aval, rows, spec) in enumerate(zip(self.avals_in, self.in_rows, specs, strict=False)):
            moved += _resharded(aval, mesh, spec, self._entries(splits, i, rows))
        for i, (aval, rows, spec) in enumerate(
            zip(self.avals_out, self.out_rows, specs[len(self.in_rows) :], strict=False)
        ):
            moved += _resharded(aval, mesh, self._entries(splits, ~i, rows), spec)
        return moved

    def _plan(self, args, results):
        """Returns the mesh, the splits of rows, and the shardings of operands and results, given the shardings that XLA
        has."""
        full, free, specs = self.meshes.decode([*args, *results])
        arrays = [*zip([*self.in_rows, *self.out_rows], specs, strict=False)]
        without_axes = lambda splits: {d: split for d, split in splits.items() if d not in self.axes}
        if self.rule and self.rule.moves:
            ways = [self._splits(full, names) for names in self._ways(arrays, free)]
            splits = min(ways, key=lambda splits: self._moved(splits, full, specs))
        else:
            splits = self._splits(full, self._names(arrays))
            pays = lambda: self.rule.pays(
                all_axes(splits, self.axis), self._parts(splits), axis=self.axis, **self.params
            )
            if any(d in splits for d in self.axes) and not pays():
                splits = without_axes(splits)
        if not all(splits[d].length for d in self.axes if d in splits):
            splits = without_axes(splits)

        sharding = lambda i, rows: NamedSharding(
            free, PartitionSpec(*(n or None for n in self._entries(splits, i, rows)))
        )
        ins = tuple(sharding(i, rows) for i, rows in enumerate(self.in_rows))
        return full, splits, ins, tuple(sharding(~i, rows) for i, rows in enumerate(self.out_rows))


def _places(mesh, axes: set[str], others: set[str]) -> list[dict[str, str | None]]:
    """Returns what may take the place of the mesh axes that are in both sets: unused ones of the same sizes, if there are
    so many, and nothing."""
    unused, other = [name for name in mesh.axis_names if name not in axes | others], {}
    for name in sorted(axes & others):
        other[name] = next((n for n in unused if mesh.shape[n] == mesh.shape[name]), None)
        unused = [n for n in unused if n != other[name]]
    nothing = dict.fromkeys(other)
    return [] if not other else [nothing] if None in other.values() else [other, nothing]


def _resharded(aval, mesh, before, after) -> int:
    """Returns the bytes that a device gets where an array that is split along some mesh axes becomes split along others:
    none where parts are only split further. XLA gathers one dimension after the other, the last one first. Parts that are
    not neighbours it first sends to where they are."""
    shards = lambda names: math.prod(mesh.shape[name] for name in names)
    size = lambda entries: (
        aval.dtype.itemsize * math.prod(-(-n // shards(names)) for n, names in zip(aval.shape, entries, strict=True))
    )
    moved = 0
    for d, (old, new) in enumerate(zip(before, after, strict=True)):
        if new[: len(old)] == old:
            continue
        moved += size([*before[:d], *after[d:]])
        if new != old[: len(new)] and shards(new) != shards(old):
            moved += size([*before[: d + 1], *after[d + 1 :]])
    return moved


# The exceptions by which JAX's parser says that a sharding does not belong to a mesh. Which of them it is depends on
# the step that fails.
_NOT_OF_THE_MESH = (AssertionError, KeyError, NotImplementedError, ValueError)


class _Meshes:
    """Meshes whose axes have prime sizes, so that one of them refines whatever mesh the program's shardings belong to.

    Each is a pair of meshes. Collectives use the axes of the full mesh. If a `shard_map` is manual along some axes,
    XLA's shardings use only the other axes, which are those of the free mesh.
    """

    def __init__(self, context):
        if isinstance(context, SPMDAxisContext):
            sizes = [(p, name in context.manual_axes) for name, n in context.mesh.shape.items() for p in _primes(n)]
            self.orders = [tuple(sizes)]
        else:
            self.orders = _orders(tuple((p, False) for p in _primes(context.num_devices)))

    def __repr__(self):
        return repr(self.orders)

    def __iter__(self):
        for order in self.orders:
            axes = [(p, f"d{i}", manual) for i, (p, manual) in enumerate(order)]
            full = AbstractMesh(tuple(p for p, _, _ in axes), tuple(name for _, name, _ in axes))
            free = [(p, name) for p, name, manual in axes if not manual]
            yield full, AbstractMesh(tuple(p for p, _ in free), tuple(name for _, name in free))

    def decode(self, arrays):
        """Returns a full and a free mesh, and the mesh axes along which each dimension of each ``(shape, HloSharding)``
        is split."""
        for full, free in self:
            try:
                return full, free, [_entries(parse_flatten_op_sharding(s, free)[0], len(n)) for n, s in arrays]
            except _NOT_OF_THE_MESH:
                continue
        return full, free, [[()] * len(shape) for shape, _ in arrays]  # gathering is slow, but right


def _entries(spec, rank) -> list[tuple[str, ...]]:
    entries = [n if isinstance(n, tuple) else () if n is None else (n,) for n in spec]
    return [*entries, *[()] * (rank - len(entries))]


def _primes(n: int) -> tuple[int, ...]:
    return next(((p, *_primes(n // p)) for p in range(2, n + 1) if n % p == 0), ())


def _orders(items: tuple) -> list[tuple]:
    """Returns the distinct orders of items."""
    if not items:
        return [()]
    first = {item: items.index(item) for item in items}
    return [(item, *rest) for item, i in first.items() for rest in _orders((*items[:i], *items[i + 1 :]))]


# ---- Lowering -------------------------------------------------------------------------------------------------------

_calls: dict[bytes, _Call] = {}  # by key; this keeps calls alive, since JAX's own dictionary is weak
# These functions are called for each call that is partitioned, in the thread in which XLA does it.
listeners: list[Callable[[Any, Part], None]] = []


def lower(kernel, ctx, operands, choice, beside=((), ()), *, axis, **params):
    """Lowers a call for which `choice` is what `Kernel.choose` says of the whole arrays; see the top of this file.

    ``beside``: types and values of what the rule's function of that name gives.
    """
    # New objects, which hold no reference to ctx.
    shapes = lambda avals: tuple(jax.core.ShapedArray(a.shape, a.dtype) for a in avals)
    avals_in, avals_beside, avals_out = map(shapes, (ctx.avals_in, beside[0], ctx.avals_out))
    platforms, meshes = ctx.module_context.platforms, _Meshes(ctx.module_context.axis_context)
    # The key has everything that a device's program depends on, because compiled programs are found by it, on disk too.
    settings = [os.environ.get(name) for name in ("JAXGPUOPS_DISABLE", "JAXGPUOPS_COMPUTE_CAPABILITY")]
    text = (_VERSION, str(choice), axis, sorted(params.items()), avals_in, avals_out, platforms, meshes, settings)
    key = repr((*text, jax.config.jax_enable_x64)).encode()
    if key not in _calls:
        _calls[key] = _Call(kernel, avals_in, avals_beside, avals_out, platforms, meshes, axis=axis, **params)
        _calls[key].choice = choice
    call = _callbacks[key] = _calls[key]

    types_of = lambda avals: [ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in avals]
    op = hlo.CustomCallOp(
        types_of(avals_out),
        [*operands, *beside[1]],
        call_target_name=ir.StringAttr.get(_TARGET),
        has_side_effect=ir.BoolAttr.get(False),
        api_version=mlir.i32_attr(2),
        called_computations=ir.ArrayAttr.get([]),
        backend_config=ir.StringAttr.get(key),
    )
    if jax.config.jax_use_shardy_partitioner:
        types_in = types_of((*avals_in, *avals_beside))
        op.attributes["sdy.sharding_rule"] = _rule_attribute(call.sharding_rule(), types_in, types_of(avals_out))
    return list(op.results)


def _partition_once(*arguments):
    programs = _callbacks[arguments[-1]].programs
    asked = repr([str(argument) for argument in arguments[:-1]])
    call = _callbacks[arguments[-1]]
    if asked not in programs:
        # XLA may call this in a thread in which the mesh of `jax.set_mesh` is set; the program must not see that mesh.
        with _without_mesh(), jax.enable_x64(call.x64):
            programs[asked] = _partition(*arguments)
        call.parts[asked] = call.part
    for listener in listeners:
        listener(call.choice, call.parts[asked])
    return programs[asked]


if not missing:
    _registered = {
        "prop_user_sharding": _propagate,
        "partition": _partition_once,
        "infer_sharding_from_operands": _infer,
        "can_side_effecting_have_replicated_sharding": True,
    }
    _register(_TARGET, *_registered.values())
    register_plugin_callbacks(functools.partial(_register, name=_TARGET, **_registered))
