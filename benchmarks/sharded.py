"""Arrays whose axis is split over all devices of this machine: our functions beside plain JAX.

    python -m benchmarks sharded                  in one process
    python -m benchmarks sharded --processes 4    a process for each of four GPUs, as on several machines

A program makes many calls, one after another, so that the host's time for the first one does not count. It is timed as
it is and, where this XLA can do that, as a CUDA graph with its collectives. Arguments that fit into the L2 cache stay
there. Bytes are those of the collectives' results in the compiled program of one device. They are compared with the
rate of an all-gather of 256 MiB, which is measured here, as is the time of the smallest all-reduce. With one device all
is local. The time of one device's part alone is the time that a split would take if it cost nothing. Before anything is
timed, values that a collective might change go through our functions: results must have the bits of arrays that are not
split.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import math
import multiprocessing
import os
import re
import socket
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
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
    labels = np.arange(shape[0], dtype=np.int32) * 15

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
    """The names of checks whose results have other bits than those of arrays that each device has whole."""
    found = []
    of_all = jax.jit(lambda x: {name: _bits(f(x)) for name, f in CHECKS.items()})
    # It is not specified which zero these results are.
    any_zero = jax.jit(
        lambda x: {name: f(x) == 0 for name, f in CHECKS.items() if name in ("max", "min", "segment_max")}
    )
    equal = jax.jit(lambda a, b: {name: _equal(a[name], b[name]) for name in a})
    for dtype in ("float32", "bfloat16", "float16"):
        for kind, x in values(jnp.dtype(dtype)).items():
            place = lambda *spec, x=x: jax.make_array_from_callback(
                x.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda i: x[i]
            )
            split, whole = place(None, "x"), place()
            same = equal(of_all(split), of_all(whole))
            if kind == "zeros":
                same |= equal(any_zero(split), any_zero(whole))
            found += [f"{name} of {dtype}, {kind}" for name, is_same in same.items() if not is_same]
    return found


def _equal(a, b):
    return jnp.array([(x == y).all() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)]).all()


def _text(shape):
    return " × ".join(map(str, shape))


# ---- The machine ----------------------------------------------------------------------------------------------------


GRAPHS = {  # options for a program with its collectives in CUDA graphs
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUSTOM_CALL,COLLECTIVES",
    "xla_gpu_graph_min_graph_size": 1,
}


def _us(function, arguments, mesh, options=(), calls=None) -> float:
    calls = calls or (8 if jax.default_backend() == "gpu" else 2)
    return timing.jax_on_mesh(function, arguments, mesh, calls, dict(options), _most)


def _most(runs: int) -> int:
    """The largest number of any process."""
    return int(multihost_utils.process_allgather(np.int32(runs)).max())


def link_rate(mesh, small) -> float | None:
    """The bytes in a microsecond that a device receives in an all-gather; None if there is one device."""
    if mesh.size == 1:
        return None
    x = _normal((1 << (12 if small else 26),), jnp.float32, mesh)
    gather = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))
    us = _us(gather, (x,), mesh, calls=1)  # of several, XLA makes one: they gather the same
    return x.nbytes * (mesh.size - 1) / mesh.size / us


def least_collective(mesh) -> float | None:
    """The microseconds of an all-reduce of 64 numbers; None if there is one device."""
    if mesh.size == 1:
        return None
    split = PartitionSpec("x")
    add = jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=split, out_specs=PartitionSpec())
    return _us(add, (_normal((64 * mesh.size,), jnp.float32, mesh),), mesh)


def keeps_nan(mesh) -> bool:
    """Whether a collective maximum of floats is NaN if one device has a NaN. Our functions do not rely on it: they move
    order keys."""
    last = lambda: jnp.where(jax.lax.axis_index("x") == mesh.size - 1, jnp.nan, 1.0)
    top = jax.shard_map(lambda: jax.lax.pmax(last(), "x"), mesh=mesh, in_specs=(), out_specs=PartitionSpec())
    return bool(jnp.isnan(jax.jit(top)()))


def agree(actual, expected, tolerance) -> bool:
    """Compares a program as `programs.compared` does, on the devices."""

    @jax.jit
    def error(a, e):
        a, e = a.astype(jnp.float32), e.astype(jnp.float32)
        return jnp.abs(a - e).max() <= tolerance * jnp.abs(e).max()

    pairs = zip(*map(jax.tree.leaves, (actual, expected)), strict=True)
    return all(error(a, e) for a, e in pairs)


def run(*, processes: int = 1, only: str = "", commit: str | None = None, out: str | os.PathLike) -> None:
    """Measures in this process, or in so many new ones with a GPU each, and writes the results."""
    if processes == 1:
        return measure(only, commit, out)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=one_of, args=(i, processes, address, only, commit, out)) for i in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        sys.exit("a process failed, see above")


def one_of(process: int, processes: int, address: str, only, commit, out) -> None:
    jax.distributed.initialize(address, processes, process, local_device_ids=[process])
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if process else sys.stdout):
        measure(only, commit, out)


def measure(only, commit, out) -> None:
    mesh, small = mesh_of_all(), jax.default_backend() != "gpu"
    own = Mesh([jax.local_devices()[0]], ("x",))
    result = runner.environment("sharded", commit, []) | {"timing": "program", "devices": mesh.size}
    result["processes"], first = jax.process_count(), jax.process_index() == 0
    result["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    result["bytes_a_us"], result["max_keeps_nan"] = rate, nan = link_rate(mesh, small), keeps_nan(mesh)
    result["us_a_collective"] = least = least_collective(mesh)
    result["wrong"] = errors = wrong(mesh)
    result["rows"] = rows = []
    path = runner.result_path(out, f"x{mesh.size}-sharded")
    speed = "one device"
    if rate is not None:
        speed = f"{mesh.size} devices, {rate / 1e3:.4g} GB/s into each in an all-gather, {least:.4g} µs for the smallest all-reduce"
    print(f"{speed}; a collective maximum {'keeps' if nan else 'LOSES'} NaNs")
    print(f"other bits than of whole arrays: {'; '.join(errors) or 'none'}")
    for make in PROGRAMS:
        if only not in make.__name__:
            continue
        case = make(mesh, small)
        forms = {"jax": (case.plain, {}), "jaxgpuops": (case.ours, {})}
        row = {"name": case.name, "errors": {}}
        if not small:
            forms["jaxgpuops, graphs"] = (case.ours, GRAPHS)
            if make in NOT_COMPILED:
                row["errors"]["jax"] = NOT_COMPILED[make]
                del forms["jax"]
        whole = jax.jit(lambda *args: args, out_shardings=NamedSharding(mesh, PartitionSpec()))(*case.arguments)
        expected = jax.jit(case.plain)(*whole)
        programs = {}
        for name, (f, options) in forms.items():
            try:
                programs[name] = jax.jit(f).lower(*case.arguments).compile(dict(options))
            except Exception as error:  # this XLA does not have the options, or cannot do it
                if not options:
                    raise
                row["errors"][name] = str(error)[:500]
        row["wrong"] = [n for n, f in programs.items() if not agree(f(*case.arguments), expected, case.tolerance)]
        del whole, expected
        if bad := [name for name in row["wrong"] if name != "jax"]:
            raise AssertionError(f"{case.name}: {' and '.join(bad)} give other results than plain JAX of whole arrays")
        us = {name: _us(forms[name][0], case.arguments, mesh, forms[name][1]) for name in programs}
        part = jax.device_put(
            [x.addressable_shards[0].data for x in case.arguments], NamedSharding(own, PartitionSpec())
        )
        us["a part"] = _us(case.ours, tuple(part), own)
        size = {name: moved(program.as_text()) for name, program in programs.items()}
        rows.append(row | {"us": us, "moved": size})
        share = lambda name: "" if rate is None else f", {size[name] / us[name] / rate:.0%} of the link"
        text = "; ".join(f"{name} {us[name]:.4g} µs, {size[name]} bytes{share(name)}" for name in programs)
        text += f"; one device's part alone {us['a part']:.4g} µs"
        notes = "  MORE" * (size["jaxgpuops"] > size.get("jax", math.inf)) + "  JAX IS WRONG" * bool(row["wrong"])
        print(f"{case.name:<50} {text}{notes}", flush=True)
        for name, error in row["errors"].items():
            print(f"  {name}: {error}")
        if first:
            path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"written to {path}\n\n{report.table(result, report.SHARDED_COLUMNS.split())}")
    if errors:
        sys.exit("a collective changes values, see above")
