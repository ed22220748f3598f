"""Arrays whose axis is split over all devices of this machine: our functions beside plain JAX.

    python -m benchmarks sharded

On GPUs, times are of calls in flight; also of programs whose collectives are in CUDA graphs, where this XLA does that.
Bytes are those of the collectives' results in the compiled program of one device; the rate of the link that they are
compared with is that of an all-gather of 256 MiB, measured here. With one device all is local. The time of one device's
part alone is the time that a split would take if it cost nothing. First, values that a collective might change go through
our functions: results must have the bits of one device.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxgpuops
from benchmarks import report, runner, timing
from benchmarks.programs import Program

_COLLECTIVE = re.compile(r" = (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-done)?\(")


def moved(text: str) -> int:
    """The bytes of the results of all collectives in a compiled program."""
    shapes = [s for result in _COLLECTIVE.findall(text) for s in re.findall(r"[a-z]+(\d*)\w*\[([\d,]*)\]", result)]
    size = lambda dims: math.prod(int(n) for n in dims.split(",") if n)
    return sum(int(bits or 8) // 8 * size(dims) for bits, dims in shapes)


def mesh_of_all() -> Mesh:
    return jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(AxisType.Auto,))


# ---- Programs: functions of arrays whose last axis is split. ``small`` are sizes for a CPU. ---------------------


def _normal(shape, dtype, mesh):
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - 1), "x"))
    make = jax.jit(lambda: jax.random.normal(jax.random.key(0), shape, dtype), out_shardings=sharding)
    return make()


def cross_entropy(mesh, small) -> Program:
    shape = (16, 1024) if small else (8192, 128256)
    logits = _normal(shape, jnp.bfloat16, mesh)
    labels = jnp.arange(shape[0], dtype=np.int32) * 15

    def of_jax(logits):  # the formula of optax
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.take_along_axis(log_p, labels[:, None], 1).mean()

    ours = lambda logits: jaxgpuops.softmax_cross_entropy(logits, labels, reduction="mean")
    name = f"cross-entropy and gradient {_text(shape)} bfloat16"
    return Program(name, (logits,), jax.value_and_grad(of_jax), jax.value_and_grad(ours), 2e-2)


def top_k(mesh, small) -> Program:
    shape = (4, 1024) if small else (64, 128256)
    return Program(
        f"top-k {_text(shape)} float32, k = 50",
        (_normal(shape, jnp.float32, mesh),),
        lambda x: jax.lax.top_k(x, 50),
        lambda x: tuple(jaxgpuops.topk(x, 50)),
    )


def argmax(mesh, small) -> Program:
    shape = (4, 1024) if small else (64, 128256)
    return Program(
        f"argmax {_text(shape)} float32",
        (_normal(shape, jnp.float32, mesh),),
        lambda x: jnp.argmax(x, 1),
        lambda x: jaxgpuops.lax.argmax(x, 1, np.int32),
    )


def softmax(mesh, small) -> Program:
    shape = (16, 1024) if small else (8192, 65536)
    x = _normal(shape, jnp.bfloat16, mesh)
    return Program(f"softmax {_text(shape)} bfloat16", (x,), jax.nn.softmax, jaxgpuops.softmax, 2e-2)


def cumsum(mesh, small) -> Program:
    shape = (1 << 12,) if small else (1 << 30,)
    x = _normal(shape, jnp.float32, mesh)
    return Program(f"cumsum {_text(shape)} float32", (x,), jnp.cumsum, jaxgpuops.cumsum, 1e-4)


def categorical(mesh, small) -> Program:
    """A categorical sample, the argmax of logits and noise, with JAX unchanged and after `install()`."""
    shape = (4, 1024) if small else (64, 128256)
    x = _normal(shape, jnp.float32, mesh)

    def ours(x):
        noise = jax.random.gumbel(jax.random.key(1), x.shape, x.dtype)
        return jaxgpuops.lax.argmax(noise + x, 1, np.int32)

    return Program(
        f"categorical {_text(shape)} float32", (x,), functools.partial(jax.random.categorical, jax.random.key(1)), ours
    )


def sort(mesh, small) -> Program:
    shape = (8, 1024) if small else (64, 1 << 20)
    x = _normal(shape, jnp.float32, mesh)
    return Program(f"sort {_text(shape)} float32", (x,), jnp.sort, jaxgpuops.sort)


def bincount(mesh, small) -> Program:
    shape, bins = ((1 << 12,), 64) if small else ((1 << 28,), 4096)
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    x = jax.jit(lambda: jax.random.randint(jax.random.key(0), shape, 0, bins), out_shardings=sharding)()
    ours = functools.partial(jaxgpuops.bincount, length=bins)
    return Program(
        f"bincount {_text(shape)} int32, {bins} bins", (x,), functools.partial(jnp.bincount, length=bins), ours
    )


# What XLA (jax 0.12.0) did not compile for two GPUs in 200 s, at a length of 2^16.
NOT_COMPILED = {cumsum: "XLA does not compile a split jnp.cumsum for GPUs in reasonable time"}
PROGRAMS = (cross_entropy, top_k, argmax, softmax, categorical, sort, bincount, cumsum)


# ---- Values that a collective might change --------------------------------------------------------------------------


def _bits(tree):
    """The bits of an array of floats; other arrays stay what they are."""
    floats = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    unsigned = lambda x: np.dtype(f"uint{8 * x.dtype.itemsize}")
    return jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, unsigned(x)) if floats(x) else x, tree)


CHECKS = {
    "topk": lambda x: tuple(jaxgpuops.topk(x, 7)),
    "argmax": lambda x: jaxgpuops.lax.argmax(x, 1, np.int32),
    "max": lambda x: jnp.nan_to_num(jaxgpuops.max(x), nan=3),  # it is not specified which NaN the result is
    "min": lambda x: jnp.nan_to_num(jaxgpuops.min(x), nan=3),
    "segment_max": lambda x: jnp.nan_to_num(jaxgpuops.segment_max(x.T, jnp.arange(x.shape[1]) % 3, 3), nan=3),
    "cummax": lambda x: jnp.nan_to_num(jaxgpuops.cummax(x, axis=1), nan=3),
    "sort": lambda x: jaxgpuops.sort(x),
    "gradient of topk": jax.grad(lambda x: (jaxgpuops.topk(x, 7).values * jnp.arange(7, dtype=x.dtype)).sum()),
}


def values(dtype) -> dict[str, np.ndarray]:
    """Rows of random bits, with NaNs of all kinds; rows of zeros of both signs; and rows of numbers with one NaN."""
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 1 << 16, (8, 256 * np.dtype(dtype).itemsize // 2), np.uint16).view(dtype)
    zeros = np.where(rng.integers(0, 2, (8, 256)) == 0, -0.0, 0.0).astype(dtype)
    one = rng.standard_normal((8, 256)).astype(dtype)
    one[:, 200] = np.nan
    return {"bits": anything, "zeros": zeros, "a NaN": one}


def wrong(mesh) -> list[str]:
    """The names of checks whose results have other bits than on one device."""
    found = []
    for dtype in ("float32", "bfloat16", "float16"):
        for kind, x in values(jnp.dtype(dtype)).items():
            split = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "x")))
            whole = jax.device_put(x, mesh.devices.flat[0])
            for name, f in CHECKS.items():
                run = jax.jit(lambda x, f=f: _bits(f(x)))
                # It is not specified which zero the result is.
                if name in ("max", "min", "segment_max") and kind == "zeros":
                    run = jax.jit(lambda x, f=f: f(x) == 0)
                same = jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), run(split), run(whole))
                if not all(jax.tree.leaves(same)):
                    found.append(f"{name} of {dtype}, {kind}")
    return found


def _text(shape):
    return " × ".join(map(str, shape))


# ---- The machine ----------------------------------------------------------------------------------------------------


def _us(calls) -> dict[str, float]:
    if jax.default_backend() == "gpu":
        return timing.in_flight(calls)
    # The programs run one at a time, because virtual devices of a CPU wait for each other in its few threads.
    return timing.wall({name: lambda call=call: jax.block_until_ready(call()) for name, call in calls.items()})


def link_rate(mesh, small) -> float | None:
    """The bytes in a microsecond that a device receives in an all-gather; None if there is one device."""
    if mesh.size == 1:
        return None
    x = _normal((1 << (12 if small else 26),), jnp.float32, mesh)
    gather = jax.jit(lambda x: x + 0, out_shardings=NamedSharding(mesh, PartitionSpec())).lower(x).compile()
    us = _us({"gather": functools.partial(gather, x)})["gather"]
    return x.nbytes * (mesh.size - 1) / mesh.size / us


def keeps_nan(mesh) -> bool:
    """Whether a collective maximum of floats is NaN if one device has a NaN. Our functions do not rely on it: they move
    order keys."""
    values = jnp.where(jnp.arange(mesh.size) == mesh.size - 1, jnp.nan, 1.0)
    split, whole = PartitionSpec("x"), PartitionSpec()
    top = jax.shard_map(lambda x: jax.lax.pmax(x, "x"), mesh=mesh, in_specs=split, out_specs=whole)
    return bool(jnp.isnan(jax.jit(top)(values))[0])


def agree(actual, expected, tolerance) -> bool:
    """Compares a program as `programs.compared` does, on the devices."""

    @jax.jit
    def error(a, e):
        a, e = a.astype(jnp.float32), e.astype(jnp.float32)
        return jnp.abs(a - e).max() <= tolerance * jnp.abs(e).max()

    pairs = zip(*map(jax.tree.leaves, (actual, expected)), strict=True)
    return all(error(a, jax.device_put(e, a.sharding)) for a, e in pairs)


def in_graphs(function, arguments):
    """Compiles the program with its collectives in CUDA graphs."""
    options = {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUSTOM_CALL,COLLECTIVES",
        "xla_gpu_graph_min_graph_size": 1,
    }
    return jax.jit(function).lower(*arguments).compile(compiler_options=options)


def run(*, only: str = "", commit: str | None = None, out: str | os.PathLike) -> None:
    mesh, small = mesh_of_all(), jax.default_backend() != "gpu"
    result = runner.environment("sharded", commit, []) | {"timing": "in flight", "devices": mesh.size}
    result["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    result["bytes_a_us"], result["max_keeps_nan"] = rate, nan = link_rate(mesh, small), keeps_nan(mesh)
    result["wrong"] = errors = wrong(mesh)
    result["rows"] = rows = []
    path = runner.result_path(out, f"x{mesh.size}-sharded")
    speed = "one device" if rate is None else f"{mesh.size} devices, {rate / 1e3:.4g} GB/s into each in an all-gather"
    print(f"{speed}; a collective maximum {'keeps' if nan else 'LOSES'} NaNs")
    print(f"other bits than on one device: {'; '.join(errors) or 'none'}")
    for make in PROGRAMS:
        if only not in make.__name__:
            continue
        case = make(mesh, small)
        forms = {"jax": case.plain, "jaxgpuops": case.ours}
        row = {"name": case.name, "errors": {}}
        if not small and make in NOT_COMPILED:
            row["errors"]["jax"] = NOT_COMPILED[make]
            del forms["jax"]
        programs = {name: jax.jit(f).lower(*case.arguments).compile() for name, f in forms.items()}
        if not small:
            try:
                programs["jaxgpuops, graphs"] = in_graphs(case.ours, case.arguments)
            except Exception as error:  # this XLA does not have the option, or cannot do it
                row["errors"]["jaxgpuops, graphs"] = str(error)[:500]
        one_device = jax.jit(case.plain)(*jax.device_put(case.arguments, mesh.devices.flat[0]))
        row["wrong"] = [
            name for name, f in programs.items() if not agree(f(*case.arguments), one_device, case.tolerance)
        ]
        del one_device
        if bad := [name for name in row["wrong"] if name != "jax"]:
            raise AssertionError(f"{case.name}: {' and '.join(bad)} give other results than plain JAX on one device")
        calls = {name: functools.partial(program, *case.arguments) for name, program in programs.items()}
        part = [x.addressable_shards[0].data for x in case.arguments]
        us = _us(calls | {"a part": functools.partial(jax.jit(case.ours), *part)})
        size = {name: moved(program.as_text()) for name, program in programs.items()}
        rows.append(row | {"us": us, "moved": size})
        share = lambda name: "" if rate is None else f", {size[name] / us[name] / rate:.0%} of the link"
        text = "; ".join(f"{name} {us[name]:.4g} µs, {size[name]} bytes{share(name)}" for name in programs)
        text += f"; one device's part alone {us['a part']:.4g} µs"
        notes = "  MORE" * (size["jaxgpuops"] > size.get("jax", math.inf)) + "  JAX IS WRONG" * bool(row["wrong"])
        print(f"{case.name:<50} {text}{notes}", flush=True)
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        for name, error in row["errors"].items():
            print(f"  {name}: {error}")
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"written to {path}\n\n{report.table(result, report.SHARDED_COLUMNS.split())}")
    if errors:
        sys.exit("a collective changes values, see above")
