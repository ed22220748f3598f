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

import dataclasses
import functools
import itertools
import math
import os
import types
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.export
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxgpuops import _private as private
from jaxgpuops._private import SPMDAxisContext, missing
from jaxgpuops._split import Split, all_axes, ends, needs_x64, noting, rule_of, whole_shape

_TARGET = "jaxgpuops.partition"
try:
    _VERSION = version("jaxgpuops")
except PackageNotFoundError:  # the package is used from a source tree
    _VERSION = "0+unknown"

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
        self.x64 = needs_x64(avals_in)  # the setting may be one of this thread only
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
            whole[name := f"u{unit}"] = None
            if self.lengths[d] == 1:  # Shardy takes no factor of size 1 beside another one
                return name
            sizes[name] = unit
            if 1 not in self.units.values():  # no dimension says how many units there are
                sizes[f"d{d}"] = self.lengths[d]
            return f"(d{d} {name})"

        factors = [
            [" ".join(factor(d, self.units.get(~i if is_result else i)) for d in rows) for i, rows in enumerate(side)]
            for side, is_result in ((self.in_rows, False), (self.out_rows, True))
        ]
        return private.parse_rule(" -> ".join(map(", ".join, factors)), need_replication_factors=tuple(whole), **sizes)

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
            with noting(part.collectives):
                return tuple(own(*operands, axis=self.axis, **self.params))

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
        """Returns the mesh axes along which each dimension of rows is split: those of the first array that is split
        there. No mesh axis is used twice."""
        names: dict[int, tuple] = {}
        for rows, spec in arrays:
            for d, entry in zip(rows, spec, strict=True):
                if entry and d is not None and d not in names and not {*entry} & self._used(names, d):
                    names[d] = entry
        return names

    def _ways(self, arrays, mesh):
        """Yields the ways to split the call, each a dict of mesh axes by dimension of rows.

        The call may be split as its operands are, or as its results are wanted; with the axis split, or without. If
        the axis and other dimensions are split along the same mesh axes, one of the two must give them up. It then
        takes unused mesh axes in their place, or none.
        """
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
    """Returns replacements to try for the mesh axes that are in both sets: unused ones of the same sizes, if there are
    enough of them, and None for each, which drops it."""
    unused, other = [name for name in mesh.axis_names if name not in axes | others], {}
    for name in sorted(axes & others):
        other[name] = next((n for n in unused if mesh.shape[n] == mesh.shape[name]), None)
        unused = [n for n in unused if n != other[name]]
    nothing = dict.fromkeys(other)
    return [] if not other else [nothing] if None in other.values() else [other, nothing]


def _resharded(aval, mesh, before, after) -> int:
    """Returns the bytes that a device gets where an array that is split along some mesh axes becomes split along
    others: none where parts are only split further. XLA gathers one dimension after the other, the last one first.
    Where devices that follow each other do not have neighbouring parts, it first exchanges these."""
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
                return full, free, [_entries(private.parse_flatten_op_sharding(s, free)[0], len(n)) for n, s in arrays]
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


# ---- Without JAX's private names ------------------------------------------------------------------------------------


def contract(ctx, axis, batch_dims, rank, ins, outs):
    """Returns attributes that tell the partitioner to split a call along the first ``batch_dims`` dimensions only.

    XLA splits the first ``num_batch_dims`` dimensions of a call to a batch-partitionable target, and Shardy propagates
    shardings by the rule. Both are needed: either alone has no effect. Later dimensions are gathered first
    (``need_replication``), because a larger ``num_batch_dims`` would split the axis, with wrong results.

    ``ins`` and ``outs`` list ``(aval, whether it has the axis)``; ``rank`` is the rank of the operands.
    """
    if any(jax.export.is_symbolic_dim(d) for aval, _ in (*ins, *outs) for d in aval.shape):
        return None
    # Shardy's factors: one for each dimension before and after the axis, which all arrays share; and one for each
    # array's axis and for each dimension in which an array broadcasts. The first array has the full shape.
    fresh = itertools.count(rank - 1)
    sizes: dict[int, int] = {}

    def factors(aval, has_axis):
        mapped = []
        for d, n in enumerate(aval.shape):
            i = d - (has_axis and d > axis)
            if (has_axis and d == axis) or sizes.get(i, n) != n:
                i = next(fresh)
            sizes[i] = n
            mapped.append(i)
        return f"[{', '.join(map(_factor, mapped))}]"

    mapping = "->".join(f"({', '.join(itertools.starmap(factors, side))})" for side in (ins, outs))
    dims = ", ".join(f"{_factor(i)}={size}" for i, size in sorted(sizes.items()))
    whole = ", ".join(_factor(i) for i in sorted(sizes) if i >= batch_dims)
    with ctx.module_context.context:
        rule = mlir.ir.Attribute.parse(f"#sdy.op_sharding_rule<{mapping} {{{dims}}} need_replication={{{whole}}}>")
        return {
            "mhlo.frontend_attributes": mlir.ir_attribute({"num_batch_dims": str(batch_dims)}),
            "sdy.sharding_rule": rule,
        }


def _factor(i: int) -> str:
    """Returns Shardy's name for factor i: i, j, .. z, z_1, z_2, .."""
    return chr(ord("i") + i) if i < 18 else f"z_{i - 17}"


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
    call = private.callbacks[key] = _calls[key]

    types_of = lambda avals: [private.ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in avals]
    op = private.hlo.CustomCallOp(
        types_of(avals_out),
        [*operands, *beside[1]],
        call_target_name=private.ir.StringAttr.get(_TARGET),
        has_side_effect=private.ir.BoolAttr.get(False),
        api_version=mlir.i32_attr(2),
        called_computations=private.ir.ArrayAttr.get([]),
        backend_config=private.ir.StringAttr.get(key),
    )
    if jax.config.jax_use_shardy_partitioner:
        types_in = types_of((*avals_in, *avals_beside))
        op.attributes["sdy.sharding_rule"] = private.rule_attribute(call.sharding_rule(), types_in, types_of(avals_out))
    return list(op.results)


def _partition_once(*arguments):
    programs = private.callbacks[arguments[-1]].programs
    asked = repr([str(argument) for argument in arguments[:-1]])
    call = private.callbacks[arguments[-1]]
    if asked not in programs:
        # XLA may call this in a thread in which the mesh of `jax.set_mesh` is set; the program must not see that mesh.
        with private.without_mesh(), jax.enable_x64(call.x64):
            programs[asked] = private.partition(*arguments)
        call.parts[asked] = call.part
    for listener in listeners:
        listener(call.choice, call.parts[asked])
    return programs[asked]


if not missing:
    _registered = {
        "prop_user_sharding": private.propagate_sharding,
        "partition": _partition_once,
        "infer_sharding_from_operands": private.infer_sharding,
        "can_side_effecting_have_replicated_sharding": True,
    }
    private.register_partitioner(_TARGET, *_registered.values())
    private.register_plugin_callbacks(functools.partial(private.register_partitioner, name=_TARGET, **_registered))
