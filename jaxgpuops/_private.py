"""All names of JAX that are not public, in one place, and what each is for.

Without the first ones nothing works, so a JAX that lacks one of them is refused at import. Those that partitioning
needs may be missing: then `missing` says which, and arrays that are split along the axis or after it are gathered. If
JAX moves a name, import it here from where it was and from where it is.
"""

from __future__ import annotations

import functools

import jax

__all__ = [
    "Primitive",
    "SPMDAxisContext",
    "ShardingContext",
    "ShardingTypeError",
    "broadcast_in_dim",
    "callbacks",
    "hlo",
    "infer_sharding",
    "ir",
    "lower_per_platform",
    "lower_with_sharding_in_types",
    "lowerings",
    "missing",
    "parse_flatten_op_sharding",
    "parse_rule",
    "partition",
    "platform_lowerings",
    "propagate_sharding",
    "register_partitioner",
    "register_plugin_callbacks",
    "rule_attribute",
    "uncacheable",
    "use_abstract_mesh",
    "vary",
    "without_mesh",
]

try:
    from jax._src import core as _core

    # `Primitive` is public as `jax.extend.core.Primitive`, but importing that takes longer than importing all of this
    # package, since it imports Pallas.
    from jax._src.core import Primitive, ShardingTypeError

    # No public API looks up or removes a lowering rule, as `install` does.
    from jax._src.interpreters.mlir import _lowerings as lowerings
    from jax._src.interpreters.mlir import _platform_specific_lowerings as platform_lowerings
    from jax._src.interpreters.mlir import _uncacheable_primitives as uncacheable

    # `lower_per_platform` lowers what JAX itself fails to lower (`Kernel._lower_uncached`);
    # `lower_with_sharding_in_types` makes the compiled program keep the shardings that explicit-mesh types promise.
    from jax._src.interpreters.mlir import broadcast_in_dim, lower_per_platform, lower_with_sharding_in_types

    # Sets the mesh axes while functions are traced.
    from jax._src.mesh import use_abstract_mesh

    # They say how many devices a program is for.
    from jax._src.sharding_impls import ShardingContext, SPMDAxisContext

    # Aligns operands that vary over different axes of a shard_map mesh; called `standard_insert_pvary` before jax 0.10.
    vary = getattr(_core, "auto_insert_reshard", None) or _core.standard_insert_pvary
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"this jaxgpuops does not know jax {jax.__version__} ({error}): upgrade jaxgpuops, or install an older jax"
    ) from error

try:
    from jax._src import custom_partitioning as _partitioning
    from jax._src.lib import xla_client as _xla_client
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import hlo
    from jax._src.mesh import empty_abstract_mesh as _empty_mesh
    from jax._src.sharding_impls import parse_flatten_op_sharding
    from jax._src.xla_bridge import register_plugin_callbacks

    register_partitioner = _xla_client.register_custom_call_partitioner
    callbacks = _partitioning._sharding_callbacks
    propagate_sharding = _partitioning._custom_partitioning_propagate_user_sharding
    partition = _partitioning._custom_partitioning_partition
    infer_sharding = _partitioning._custom_partitioning_infer_sharding_from_operands
    parse_rule, rule_attribute = _partitioning.str_to_sdy_sharding_rule, _partitioning.sdy_sharding_rule_to_mlir
    without_mesh = functools.partial(use_abstract_mesh, _empty_mesh)
    missing = ""
except (ImportError, AttributeError) as error:
    missing = str(error)
