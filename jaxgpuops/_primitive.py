"""The factory: one JAX primitive per kernel.

Everything that kernels share is here, once: shapes and shardings of results, batching, per-platform lowering, the
plain-JAX fallback, hidden workspaces, sharding contracts, eager calls and derivatives. A kernel works along one axis of
its operands. XLA hands it row-major buffers, which it reads as (outer, length, inner): the dimensions before the axis,
the axis, and the dimensions after it. So batching never moves data, it only shifts the axis. If a kernel's results lack
the axis, or have another one in its place, ``axis`` may also be a tuple of neighbouring axes; these are merged where
the call is lowered, on each device, so that any of them may be split over devices.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxgpuops import _native, _partition, _split
from jaxgpuops._private import (
    Primitive,
    ShardingContext,
    ShardingTypeError,
    SPMDAxisContext,
    broadcast_in_dim,
    lower_per_platform,
    lower_with_sharding_in_types,
    use_abstract_mesh,
    vary,
)
from jaxgpuops._split import ends, needs_x64, whole_shape

KERNELS: dict[str, Kernel] = {}  # the kernels by name
_MADE_OF_OTHERS = "made of other kernels"
LEFT = "XLA's own kernels are faster"
_OTHERS = "other kernels are faster"
# As jit's `inline`: inlines a function while its caller is traced, so that lowering rules see where operands come from
# and what reads them. (In jax 0.11 and later, True would lower it as a function of its own first.)
INLINE = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)
MAX_GROUPS = 8  # IndexMap::kMaxGroups of ffi_src/common/broadcast.h


@dataclasses.dataclass(frozen=True)
class Lowering:
    """How one call was lowered: to a kernel with its plan, or to plain JAX for a reason."""

    op: str
    shape: tuple
    dtype: str
    params: dict[str, Any]
    platform: str
    kernel: str | None  # name of the custom call; None if plain JAX is used
    plan: dict[str, Any]  # what the kernel's planner chose; empty if there is no choice
    why: str  # why plain JAX is used; empty if a kernel is used
    partitioned: bool = False  # whether XLA is asked how to split it over devices
    part: tuple | None = None  # shape of one device's part, if the array is split
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)  # bytes that a device receives, by kind

    def __str__(self) -> str:
        call = ", ".join(
            [f"{self.dtype}[{','.join(map(str, self.shape))}]", *(f"{k}={v}" for k, v in self.params.items())]
        )
        plan = f" {self.plan}" if self.plan else ""
        other = self.why if self.why == _MADE_OF_OTHERS else f"plain JAX, because {self.why}"
        taken = other if self.kernel is None else f"{self.kernel}{plan}"
        moved = "".join(f", {kind} of {size} bytes" for kind, size in self.collectives.items()) or ", nothing moves"
        part = "" if self.part is None else f", each device has {[*self.part]}{moved}"
        return f"{self.op}({call}) on {self.platform}: {taken}{part}"


_recorder: contextvars.ContextVar[list[Lowering] | None] = contextvars.ContextVar("jaxgpuops_recorder", default=None)


def record(lowering: Lowering) -> None:
    """Tells `explain`, and the log of JAXGPUOPS_LOG=1, about a lowering."""
    if (recorder := _recorder.get()) is not None:
        recorder.append(lowering)
    if os.environ.get("JAXGPUOPS_LOG", "0") not in ("", "0"):
        print(f"jaxgpuops: {lowering}", file=sys.stderr)


class recording:
    """Context manager that collects the lowerings made inside it in a list."""

    def __enter__(self) -> list[Lowering]:
        lowerings: list[Lowering] = []
        self._token = _recorder.set(lowerings)
        return lowerings

    def __exit__(self, *exc) -> None:
        _recorder.reset(self._token)


@functools.cache
def _warn_missing_cuda(reason: str) -> None:  # cached, so that each reason is warned of once
    warnings.warn(
        f"jaxgpuops uses plain JAX on CUDA: {reason}. To rebuild it, with a CUDA toolkit at hand: {_native.REBUILD}",
        stacklevel=2,
    )


@functools.cache
def _warn_missing_partitioner() -> None:
    warnings.warn(
        f"jaxgpuops gathers arrays that are split in other than their first dimensions: it does not know this jax, "
        f"{jax.__version__}, well enough ({_partition.missing}). Upgrade jaxgpuops.",
        stacklevel=2,
    )


class Kernel:
    """A kernel as a function of JAX arrays: ``kernel(*operands, axis=..., **params)`` returns a list of arrays.

    All operands have one rank. In dimensions other than the axis they agree, or have size 1 where another one does not:
    most often the first operand has all of them.

    Args:
      name: the op; the custom call and the primitive are called ``jaxgpuops.<name>``.
      results: ``results(*avals, axis, **params)`` returns one ``(length, dtype)`` for each result: its length along the
        axis, or None if the result lacks the axis. ``(length, dtype, dims)`` is a result that is a sum over these
        dimensions, in which it has size 1; if they are split, the devices add their sums up.
      fallback: the same function in plain JAX, for every platform and case without a kernel; returns a sequence.
      accepts: whether the kernel takes first operands of a dtype. None: there is no kernel, the fallback is made of
        other kernels; it is a primitive to have its own derivative.
      attributes: the params that the handler reads; the others only shape results.
      dimensions: the params that are numbers of dimensions before the axis, or None, for which the handler reads -1. A
        result depends on the index along such a dimension, which is therefore not split over devices. A param may also
        be a tuple of dimensions: the handler does not get it, and these dimensions may be split.
      lies: the param that is the number of a dimension up to the axis: the handler, which reads it, writes results whose
        axis is before that dimension. The lowering moves it back; where the user moves it there, XLA does neither.
        (Where XLA may split the program, the handler writes results of the ordinary shape.)
      aliases: ``{operand: result}``, by index: pairs that share memory. XLA copies an operand that lives on. So an
        argument of the program that is not donated shares no memory: it would be copied for nothing. (On a GPU, neither
        does an operand of less than 64 MiB: there a copy is one more kernel.)
      broadcasts: ``broadcasts(count, **params)`` gives which of ``count`` operands may have size 1 where others have
        more: under vmap, they are not copied for each element of a batch that they do not depend on.
      shortest: length of the shortest rows that the CPU handler takes. For shorter ones the fallback is faster, since
        XLA fuses it with the operations around it.
      plan: ``plan(rows, avals, compute_capability, axis, **params)`` gives the algorithm that the CUDA handler takes
        for operands of types ``avals``, with rows = (outer, length, inner), and ``workspace_bytes``, the scratch memory
        it needs per outer index. The handler gets it as one more uint8 result. Algorithm "none": the fallback, which is
        made of other kernels, is faster. None: the handler takes no such result.
      leaves: ``leaves(rows, avals, **params)`` says whether XLA's own kernels are faster on a GPU than those of
        the CUDA handler. It is not asked where XLA may split the program: there the kernel's `Rule` holds, and it is
        asked again for each device's part.
      left: the plain JAX that runs where ``leaves`` is True, if that is not the fallback.
      others: the plain JAX that runs on a GPU where the plan's algorithm is "none", if that is not the fallback.
      reindexes: whether the axis of the results is another one than that of the operands. Over an explicit mesh, the
        results are then split along it only as the param ``along`` says, if the kernel has it; without ``reindexes``,
        and in calls whose param ``permutes`` is True, they are split as the operands are.
      splits_as_one: for a kernel whose fallback is made of other kernels: whether XLA is asked once how to split all of
        it over devices, and not once for each of these kernels, where the fallback runs.
      known: ``known(operands, axis, **params)`` gives the results if the way in which operands are made tells them,
        else None; all of these are MLIR values.
    """

    looks_at_uses = False  # whether the lowering looks at what reads operands

    def __init__(
        self,
        name: str,
        *,
        results: Callable[..., Sequence[tuple[Any, Any]]],
        fallback: Callable[..., Sequence[jax.Array]],
        accepts: Callable[[np.dtype], bool] | None,
        attributes: tuple[str, ...] = (),
        dimensions: tuple[str, ...] = (),
        lies: str | None = None,
        aliases: dict[int, int] | None = None,
        broadcasts: Callable[..., Sequence[int]] = lambda count, **params: (),
        shortest: int = 0,
        plan: Callable[..., dict[str, Any]] | None = None,
        leaves: Callable[..., bool] | None = None,
        left: Callable[..., Sequence[jax.Array]] | None = None,
        others: Callable[..., Sequence[jax.Array]] | None = None,
        reindexes: bool = False,
        splits_as_one: bool = False,
        known: Callable[..., Sequence[Any] | None] | None = None,
    ):
        self.name = name
        self.target = f"jaxgpuops.{name}"
        self.results = results
        self.fallback = fallback
        self.accepts = accepts
        self.attributes = attributes
        self.dimensions = dimensions
        self.lies = lies
        self.aliases = aliases or {}
        self.broadcasts = broadcasts
        self.shortest = shortest
        self.plan = plan
        self.leaves = leaves
        self.left = left or fallback
        self.others = others or fallback
        self.reindexes = reindexes
        self.splits_as_one = splits_as_one
        self.known = known
        self.primitive = p = Primitive(self.target)
        p.multiple_results = True
        p.def_impl(self._eager)
        p.def_abstract_eval(self._abstract_eval)
        batching.primitive_batchers[p] = self._batch
        # JAX lowers a cacheable rule into a function of its own. There, an operand does not show whether it is an
        # argument of the program, which `_is_kept` must know, nor how it is made, which `known` looks at, nor whether
        # anything else reads it.
        if self.aliases or self.known or self.splits_as_one or self.looks_at_uses:
            mlir.register_lowering(p, self._lower_uncached, cacheable=False)
        else:
            for platform, rule in self._rules.items():
                mlir.register_lowering(p, rule, platform=platform)
            mlir.register_lowering(p, functools.partial(self._lower, None))  # for any other platform
        KERNELS[name] = self

    def __call__(self, *operands: jax.Array, axis: int | tuple[int, ...], split=None, **params: Any) -> list[jax.Array]:
        """Calls the kernel. With ``split``, the `_split.Split` that ``axis_name`` gives, operands and results are
        this device's parts."""
        if split is None:
            return self.primitive.bind(*vary(*operands), axis=axis, **params)
        # Makes all operands vary over the mesh axes, so that each device's cotangents are summands of the whole.
        *operands, _ = vary(*operands, jax.lax.axis_index(split.names))
        return self.primitive.bind(*operands, axis=axis, split=split, **params)

    # ---- Eager calls and result types -------------------------------------------------------------------------------

    def _eager(self, *operands, **params):
        call = self._jitted(tuple(params.items()))
        # The user disabled jit for the surrounding program; without jit this call would call itself forever.
        if jax.config.jax_disable_jit:
            with jax.disable_jit(False):
                return call(*operands)
        return call(*operands)

    @functools.cache  # noqa: B019  kernels live as long as the process
    def _jitted(self, params):
        return jax.jit(functools.partial(self.primitive.bind, **dict(params)))

    def _abstract_eval(self, *avals, axis, split=None, **params):
        # Operands may have their axes in different dimensions, such as a table and the indices of its rows.
        reindexes = self.reindexes and not params.get("permutes")
        spec = _merged_spec(avals, axis if reindexes else None)
        x, whole = avals[0], whole_shape(avals, axis)
        first, after = ends(axis)
        mesh = next((aval.sharding for aval in avals if any(aval.sharding.spec)), x.sharding)
        # A result of another length than the operands is whole along the axis.
        along = lambda n: params.get("along") if reindexes else spec[first] if n == whole[first] else None

        # `update` keeps what a new aval would lose: the mesh of an explicit sharding, and the varying manual axes.
        def result(length, dtype, summed=()):
            own = () if length is None else ((length, None if summed else along(length)),)
            others = [(1, None) if d in summed else each for d, each in enumerate(zip(whole, spec, strict=True))]
            dims = (*others[:first], *own, *others[after:])
            own_spec = _checked_spec(tuple(name for _, name in dims), avals)
            sharding = mesh.update(spec=mesh.spec.update(partitions=own_spec))
            shape = tuple(size for size, _ in dims)
            aval = x.update(shape=shape, dtype=np.dtype(dtype), weak_type=False, sharding=sharding)
            keeps = length is not None and getattr(_split.rule_of(self, params), "keeps", False)
            is_part = split is None or not split.checked or keeps
            return aval if is_part else _split.invarying(aval, split.names)

        return [result(*each) for each in self.results(*avals, axis=axis, **params)]

    # ---- vmap -------------------------------------------------------------------------------------------------------

    def _batch(self, operands, dims, *, axis, **params):
        # The batch dimension stays where the first batched operand has it, and the axis is shifted if it comes after.
        # The batch dimension of other operands is moved there; operands without one are broadcast, by the kernel where
        # it can. (For take_along_axis with a batch of indices only, folding the batch into the axis would avoid copying
        # x, but would repeat indices, and transposition relies on distinct ones.)
        home = next(d for d in dims if d is not None)
        first, after = ends(axis)
        home = first if first < home < after else home  # the batch dimension must not stand between several axes
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        broadcast = self.broadcasts(len(operands), **params)

        def place(i, x, d):
            if d is not None:
                return jnp.moveaxis(x, d, home)
            if i in broadcast:
                return jnp.expand_dims(x, home)
            shape = (*x.shape[:home], size, *x.shape[home:])
            return jax.lax.broadcast_in_dim(x, shape, [i for i in range(len(shape)) if i != home])

        operands = [place(i, x, d) for i, (x, d) in enumerate(zip(operands, dims, strict=True))]
        axis = first + (home <= first) if isinstance(axis, int) else tuple(d + (home <= first) for d in axis)
        shifted = lambda d: tuple(map(shifted, d)) if isinstance(d, tuple) else d if d is None else d + (home <= d)
        params |= {name: shifted(params[name]) for name in (*self.dimensions, *([self.lies] if self.lies else []))}
        outs = self(*operands, axis=axis, **params)
        # If a result lacks the axis, the dimensions after it have moved forward.
        return outs, [home - (operands[0].ndim - out.ndim if home >= after else 0) for out in outs]

    # ---- Lowering ---------------------------------------------------------------------------------------------------

    def choose(self, platform: str, avals, *, axis: int, partitioned: bool = False, **params) -> Lowering:
        """Returns whether a call on a platform takes the kernel or plain JAX, and why. No GPU is needed to ask.
        ``partitioned``: whether XLA may split the call over devices."""
        x, whole = avals[0], whole_shape(avals, axis)
        length = x.shape[axis]
        planned = platform == "cuda" and self.plan is not None
        if self.accepts is None:
            why = "it has no kernel of its own"
        elif _native.disabled(self.name):
            why = "JAXGPUOPS_DISABLE is set"
        elif why := _native.missing(platform, self.target):
            pass
        elif not self.accepts(x.dtype):
            why = f"no kernel takes {x.dtype}"
        elif any(jax.export.is_symbolic_dim(params.get(name)) for name in self.attributes):
            why = "the kernel's parameters must be known"
        elif platform == "cpu" and not jax.export.is_symbolic_dim(length) and 0 < length < self.shortest:
            why = f"it is faster at rows of {length}"
        elif planned and any(
            map(jax.export.is_symbolic_dim, [*itertools.chain(*(a.shape[axis:] for a in avals)), *params.values()])
        ):
            why = "the plan must know the axis and what follows it"
        elif (
            platform == "cuda" and not partitioned and self.leaves and self.leaves(_rows(whole, axis), avals, **params)
        ):
            why = LEFT
        plan = {}
        if planned and not why:
            plan = self.plan(_rows(whole, axis), avals, _native.compute_capability(), axis, **params)
            if plan.get("algorithm") == "none":
                why, plan = _OTHERS, {}
        if why and self.splits_as_one:
            why = _MADE_OF_OTHERS
        kernel = None if why else self.target
        return Lowering(self.name, whole, str(x.dtype), {"axis": axis, **params}, platform, kernel, plan, why)

    @property
    def _rules(self):
        return {platform: functools.partial(self._lower, platform) for platform in ("cpu", "cuda")}

    def _lower_uncached(self, ctx, *operands, **params):
        """Lowers for any platform, or for several. JAX 0.11 and 0.12 fail if a primitive has a rule for each of several
        platforms that must not be cached: they add a tuple of types to a list."""
        rules, others = self._rules, functools.partial(self._lower, None)
        platforms = ctx.platforms or ctx.module_context.platforms
        if len(platforms) == 1:
            return rules.get(platforms[0], others)(ctx, *operands, **params)
        ctx = ctx.replace(avals_out=list(ctx.avals_out))
        return lower_per_platform(ctx, self.target, rules, others, frozenset(), *operands, **params)

    def _lower(self, platform, ctx, *operands, axis, split=None, **params):
        if split is not None:
            outs = _lower_fun(
                ctx,
                functools.partial(_split.run_manually, self, split, ctx.avals_out, axis=axis, **params),
                operands,
            )
            return [lower_with_sharding_in_types(ctx, y, aval) for y, aval in zip(outs, ctx.avals_out, strict=True)]
        if self.known and (outs := self.known(operands, axis=axis, **params)):
            return [lower_with_sharding_in_types(ctx, y, aval) for y, aval in zip(outs, ctx.avals_out, strict=True)]
        platform = platform or "/".join(ctx.platforms or ctx.module_context.platforms)
        partitioned = asks_partitioner(ctx)
        avals, first = ctx.avals_in, axis
        if not isinstance(axis, int):
            first = axis[0]
            merged = lambda *xs: [merge(x, xs[0].shape, axis) for x in xs]
            if not partitioned or _partition.missing:
                outs = _lower_fun(ctx, lambda *xs: self.primitive.bind(*merged(*xs), axis=first, **params), operands)
                return [lower_with_sharding_in_types(ctx, y, aval) for y, aval in zip(outs, ctx.avals_out, strict=True)]
            avals = jax.eval_shape(merged, *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals))
        choice = self.choose(platform, avals, axis=first, partitioned=partitioned, **params)
        own = partitioned and bool(choice.kernel or self.splits_as_one)
        choice = dataclasses.replace(choice, partitioned=own and not _partition.missing)
        # If a call is made of others, those are recorded in its place, unless XLA splits it as one.
        if choice.kernel or partitioned or not self.splits_as_one:
            record(choice)
        if own and _partition.missing:
            _warn_missing_partitioner()
        if choice.partitioned:
            beside = ((), ())
            if (rule := _split.rule_of(self, params)) and rule.beside:
                function = functools.partial(rule.beside, axis=axis, **params)
                shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in ctx.avals_in]
                beside = jax.eval_shape(function, *shapes), _lower_fun(ctx, function, operands)
            outs = _partition.lower(self, ctx, operands, choice, beside, axis=axis, **params)
        elif choice.kernel:
            outs = self._custom_call(ctx, operands, choice, axis=axis, **params)
        else:
            if platform == "cuda" and _native.missing("cuda"):
                _warn_missing_cuda(choice.why)
            plain = {LEFT: self.left, _OTHERS: self.others}.get(choice.why, self.fallback)
            outs = _lower_fun(ctx, functools.partial(plain, axis=axis, **params), operands)
        return [lower_with_sharding_in_types(ctx, out, aval) for out, aval in zip(outs, ctx.avals_out, strict=True)]

    def _custom_call(self, ctx, operands, choice, *, axis, **params):
        whole = whole_shape(ctx.avals_in, axis)
        numbers = {name: -1 if params[name] is None else params[name] for name in self.dimensions}
        batch_dims = min([axis, *(d for d in numbers.values() if d >= 0)])
        if _is_partitioned(ctx):
            # XLA would split a dimension of size 1 too, and pad: all devices but the first would read zeros.
            ctx, operands = _expand(ctx, operands, lambda shape: (*whole[:batch_dims], *shape[batch_dims:]))
        ctx, operands = _expand(ctx, operands, lambda shape: _readable(shape, whole, axis))
        ins = [(aval, True) for aval in ctx.avals_in]
        outs = [(aval, aval.ndim == len(whole)) for aval in ctx.avals_out]
        if choice.plan:
            # One row of bytes per outer index, so that the workspace partitions with the batch.
            workspace = (*whole[:axis], choice.plan["workspace_bytes"])
            outs.append((jax.core.ShapedArray(workspace, np.uint8), True))
        contract = _partition.contract(ctx, axis, batch_dims, len(whole), ins, outs)
        aliases = {
            i: out for i, out in self.aliases.items() if _may_be_worth_a_copy(choice.platform, ctx, i, operands[i])
        }
        count, to = len(ctx.avals_out), axis
        if self.lies:
            whole_program = _is_partitioned(ctx) or ctx.module_context.lowering_parameters.for_export
            to = numbers[self.lies] = axis if whole_program else params[self.lies]
        if to != axis:
            contract = None  # nothing splits the call
            moved = [aval.update(shape=tuple(_moved(aval.shape, axis, to))) for aval in ctx.avals_out]
            outs[:count] = [(aval, True) for aval in moved]
        lower = jax.ffi.ffi_lowering(self.target, extra_attributes=contract, operand_output_aliases=aliases)
        attributes = {name: _attribute(params[name]) for name in self.attributes}
        attributes |= {name: np.int64(d) for name, d in (numbers | {"axis": axis}).items()}
        results = lower(ctx.replace(avals_out=[aval for aval, _ in outs]), *operands, **attributes)[:count]
        if to == axis:
            return results
        return _lower_fun(ctx.replace(avals_in=moved), lambda *ys: [jnp.moveaxis(y, to, axis) for y in ys], results)


def _moved(dims: Sequence[int], source: int, to: int) -> list[int]:
    """Returns the dimensions of an array, of which one is moved."""
    others = [d for i, d in enumerate(dims) if i != source]
    return [*others[:to], dims[source], *others[to:]]


def merge(x: jax.Array, whole: tuple, axis) -> jax.Array:
    """x with several neighbouring axes as one; of an array that has only some of them, expanded to all of ``whole``."""
    first, after = ends(axis)
    own = x.shape[first:after]
    if own != whole[first:after] and any(n != 1 for n in own):
        own = whole[first:after]
        x = jnp.broadcast_to(x, (*x.shape[:first], *own, *x.shape[after:]))
    return x.reshape(*x.shape[:first], math.prod(own), *x.shape[after:])


def _lower_fun(ctx, function, operands):
    """Lowers plain JAX with explicit mesh axes as automatic ones, since explicit types refuse much that XLA can do."""
    meshes = {aval.sharding.mesh for aval in ctx.avals_in if any(aval.sharding.spec)}
    context = contextlib.nullcontext()
    if meshes:
        [mesh] = meshes
        mesh = mesh.update_axis_types(dict.fromkeys(_explicit_axes(mesh), AxisType.Auto))
        untyped = lambda aval: aval.update(sharding=NamedSharding(mesh, PartitionSpec(*[None] * aval.ndim)))
        ctx = ctx.replace(avals_in=list(map(untyped, ctx.avals_in)), avals_out=list(map(untyped, ctx.avals_out)))
        context = use_abstract_mesh(mesh)
    with context, jax.enable_x64(needs_x64(ctx.avals_in)):
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def _attribute(value):
    """Converts a number to 64 bits, as handlers read it. JAX would pass a float in 32 bits."""
    if isinstance(value, int) and not isinstance(value, bool):
        return np.int64(value)
    return np.float64(value) if isinstance(value, float) else value


def is_iota(operand, axis: int) -> bool:
    """Whether an MLIR value is an array of places along the axis."""
    if not isinstance(operand, mlir.ir.OpResult) or operand.owner.operation.name != "stablehlo.iota":
        return False
    return mlir.ir.IntegerAttr(operand.owner.attributes["iota_dimension"]).value == axis


def is_unused(operand) -> bool:
    """Whether an MLIR value is the result of an operation and nothing reads it, of what has been lowered so far."""
    return isinstance(operand, mlir.ir.OpResult) and next(iter(operand.uses), None) is None


def _may_be_worth_a_copy(platform, ctx, i, operand) -> bool:
    """Whether aliasing an operand may save enough memory to be worth the copy that XLA makes if the operand lives
    on."""
    aval = ctx.avals_in[i]
    count = math.prod(aval.shape)
    large = jax.export.is_symbolic_dim(count) or count * aval.dtype.itemsize >= 64 << 20
    return (large or platform != "cuda") and not _is_kept(ctx, operand)


def _is_kept(ctx, operand) -> bool:
    """Whether a value is an argument of the whole program that is not donated, so that it lives on. JAX does not tell
    lowering rules, but the function that it is writing has attributes that say so."""
    if not isinstance(ctx.module_context.axis_context, ShardingContext):  # not a whole program, but that of one device
        return False
    while isinstance(operand, mlir.ir.OpResult) and operand.owner.operation.name == "stablehlo.reshape":
        [operand] = operand.owner.operation.operands
    if not isinstance(operand, mlir.ir.BlockArgument):
        return False
    function = operand.owner.owner
    if function.operation.name != "func.func" or function.name.value != "main":
        return False
    own = function.arg_attrs[operand.arg_number]
    return "jax.buffer_donor" not in own and "tf.aliasing_output" not in own


def _rows(shape, axis) -> tuple[int, int, int]:
    outer = math.prod(shape[:axis])
    if jax.export.is_symbolic_dim(outer):
        outer = 1 << 20  # a plan for many rows serves any number of them
    return outer, shape[axis], math.prod(shape[axis + 1 :])


def _is_partitioned(ctx) -> bool:
    """Whether XLA may split the program over devices."""
    context = ctx.module_context.axis_context
    if isinstance(context, ShardingContext):
        return context.num_devices > 1
    if isinstance(context, SPMDAxisContext):  # inside shard_map, dimensions are already split over the manual axes
        return any(n > 1 for name, n in context.mesh.shape.items() if name not in context.manual_axes)
    return False


def asks_partitioner(ctx) -> bool:
    """Whether XLA's partitioner can ask how to split a call. Where an exported program is compiled, it cannot."""
    return _is_partitioned(ctx) and not ctx.module_context.lowering_parameters.for_export


def _expand(ctx, operands, target):
    """Broadcasts every operand to ``target(shape of the operand)``."""

    def expand(aval, operand):
        shape = target(aval.shape)
        if shape == aval.shape:
            return aval, operand
        aval = aval.update(shape=shape)
        return aval, broadcast_in_dim(ctx, operand, aval, broadcast_dimensions=range(aval.ndim))

    avals, operands = zip(*map(expand, ctx.avals_in, operands), strict=True)
    return ctx.replace(avals_in=avals), operands


def _readable(shape, whole, axis):
    """Returns the shape if the kernels' IndexMap can describe it, else the whole shape with this length of the axis."""
    before, after = slice(axis), slice(axis + 1, None)
    if max(_groups(shape[before], whole[before]), _groups(shape[after], whole[after])) <= MAX_GROUPS:
        return shape
    return (*whole[before], shape[axis], *whole[after])


def _groups(shape, whole):
    """Counts the groups that an IndexMap needs for an operand of that shape: runs of dimensions that it has, or
    lacks."""
    has = (n != 1 for n, m in zip(shape, whole, strict=True) if m != 1)
    return sum(1 for _ in itertools.groupby(has))


def groups_after(avals, axis) -> int:
    """Returns how many groups of dimensions after the axis the IndexMap has, for the operand that needs the most."""
    x, *others = (aval.shape for aval in avals)
    most = max((_groups(shape[axis + 1 :], x[axis + 1 :]) for shape in others), default=0)
    return most if most <= MAX_GROUPS else 1  # with more groups, `_readable` broadcasts the operand


# ---- Explicit meshes ------------------------------------------------------------------------------------------------


def _explicit_axes(mesh) -> tuple[str, ...]:
    return tuple(n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit)


def _merged_spec(avals, apart=None):
    """Returns the explicit sharding of each dimension: that of any operand that is sharded there. It is None for the
    dimension, or the dimensions, ``apart``."""
    spec, apart = [], () if apart is None else range(*ends(apart))
    for dim, parts in enumerate(zip(*(a.sharding.spec for a in avals), strict=True)):
        named = {part for part in parts if part is not None and dim not in apart}
        if len(named) > 1:
            raise ShardingTypeError(f"jaxgpuops: operands are sharded differently in dimension {dim}: {avals}")
        spec.append(named.pop() if named else None)
    return _checked_spec(spec, avals)


def _checked_spec(spec, avals):
    """Returns a sharding if no two dimensions are split along one mesh axis."""
    names = list(itertools.chain(*(each if isinstance(each, tuple) else (each,) for each in spec if each)))
    if len(set(names)) < len(names):
        raise ShardingTypeError(f"jaxgpuops: operands are sharded along one mesh axis in several dimensions: {avals}")
    return spec


def align(*operands: jax.Array, apart: int | None = None) -> list[jax.Array]:
    """Makes operands of one rank vary over the same manual axes, and be split alike in all dimensions that they have.
    The dimension ``apart`` means something else in each operand, so it stays split as it is."""
    operands = vary(*operands)
    avals = [jax.typeof(x) for x in operands]
    if not any(any(aval.sharding.spec) for aval in avals):
        return operands
    # A dimension may be empty in some operands, and have size 1 in others.
    sizes = [next((n for n in each if n != 1), 1) for each in zip(*(a.shape for a in avals), strict=True)]
    spec = _merged_spec(avals, apart)

    def aligned(x, aval):
        own = [s if n == m else None for s, n, m in zip(spec, aval.shape, sizes, strict=True)]
        own = PartitionSpec(*(aval.sharding.spec[d] if d == apart else s for d, s in enumerate(own)))
        same = own == aval.sharding.spec
        return x if same else jax.sharding.reshard(x, NamedSharding(_mesh_of(avals), own))

    return list(map(aligned, operands, avals))


def _mesh_of(avals):
    return next(aval.sharding.mesh for aval in avals if any(aval.sharding.spec))


def as_automatic(function: Callable, specs, *operands: jax.Array):
    """Calls a function that the types of an explicit mesh may refuse, as if the mesh were automatic. ``specs``, a tree,
    say how its results are split."""
    avals = [jax.typeof(x) for x in operands]
    if not any(any(aval.sharding.spec) for aval in avals):
        return function(*operands)
    mesh = _mesh_of(avals)
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    return jax.sharding.auto_axes(function, axes=_explicit_axes(mesh), out_sharding=shardings)(*operands)


def like(x: jax.Array, aval, split=None) -> jax.Array:
    """Returns x expanded to the shape of ``aval`` and split over an explicit mesh like it."""
    x = jnp.broadcast_to(x, aval.shape)
    if split is not None:
        x, _ = vary(x, jax.lax.axis_index(split.names))
    same = jax.typeof(x).sharding.spec == aval.sharding.spec
    return x if same else jax.sharding.reshard(x, aval.sharding)


# ---- Batches of indices -----------------------------------------------------------------------------------------------


def batch_first(kernel: Kernel, always: bool = False) -> None:
    """Sets the batching rule of a kernel whose operands after the first have size 1 after the axis, where they cannot
    have a batch. If one of these has a batch, it is moved to the front of all operands. A batch of the first operand
    alone stays where it is, unless there is no other operand, or ``always`` is True."""

    def batch(operands, dims, **params):
        if always or any(d is not None for d in dims[1:]) or len(dims) == 1:
            operands = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
            dims = [None if d is None else 0 for d in dims]
        return kernel._batch(operands, dims, **params)

    batching.primitive_batchers[kernel.primitive] = batch
