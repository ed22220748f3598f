"""Measures the cases of a family on the device at hand, beside every peer that is installed, and writes JSON.

The file is written anew after each case, so that an interrupted run keeps what it has; a run of some cases (``--only``)
updates the file of the same commit and device.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import jaxgpuops
from benchmarks import timing

FAMILIES = ["topk", "scan", "softmax", "sort", "count", "moe"]

ROTATE = 128 << 20  # bytes of distinct inputs: about twice the largest L2 cache
MAX_CALLS = 256  # the most calls in one program
PROGRAM = 4 << 30  # bytes that a program should move, so that the cost of starting it does not count
# The most small calls in a program; the host takes longer to start 32 calls of 3 us than the GPU to run them.
SOME_CALLS = 128
SOME_KERNELS = 32  # the most inputs whose kernels are timed one by one
WARM = 24 << 20  # bytes of an input that stays in L2 if nothing evicts it

# Libraries whose functions take JAX arrays; "loop" is `jax.lax.scan`, "rewritten" is plain JAX that few people write.
OF_JAX = ("jaxgpuops", "jax", "rewritten", "loop")
OF_TORCH = ("torch", "torch.compile", "triton")  # libraries whose functions take torch tensors


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a family's table.

    inputs: arguments of one call, as JAX arrays (or what JAX makes of them, if only JAX gets them), from a random key.
    functions: by library (those of OF_JAX and OF_TORCH, "cupy", "numpy") the function of these arguments, which the
      library gets as arrays of its own. It returns a tuple of arrays; what a library returns must equal what jaxgpuops
      returns in the same place.
    bytes: the least number of bytes to move: operands and results, each once.
    floor: ("read" | "copy" | "write", size): the kernel and its bytes that the time is compared with.
    target: time to reach on a GPU, as a multiple of the floor's.
    tolerance: by how much results may differ, relative to the largest of them: rounding, where orders of it differ.
    in_place: in JAX's programs the first result takes the memory of the first argument, which nothing needs any more.
    hostile: by name, functions that turn these arguments into others of the same shapes, which may take us longer;
        timed on GPUs only.
    facts: more about the case, for its row in the JSON file.
    """

    name: str
    inputs: Callable[[jax.Array], tuple]
    functions: dict[str, Callable]
    bytes: int
    floor: tuple[str, int]
    target: float | None = None
    tolerance: float = 0.0
    in_place: bool = False
    hostile: dict[str, Callable[..., tuple]] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def array_name(shape: Sequence[int], axis: int, dtype: str) -> str:
    size = lambda n: f"2^{n.bit_length() - 1}" if n >= 1 << 20 and n & (n - 1) == 0 else str(n)
    where = f", axis {axis}" if axis < len(shape) - 1 else ""
    return f"{' x '.join(map(size, shape))} {dtype}{where}"


# Two functions: one converts an array of JAX to one of the library, the other converts that to JAX's or NumPy's, which
# are compared.
def _library(name: str) -> tuple[Callable, Callable]:
    if name in OF_TORCH:
        import torch

        # Arguments that only JAX takes stay what they are.
        to = lambda x: torch.from_dlpack(x) if isinstance(x, jax.Array) else x
        return to, lambda y: jax.dlpack.from_dlpack(y.contiguous())
    if name == "cupy":
        import cupy

        return cupy.from_dlpack, cupy.asnumpy
    if name == "numpy":
        return np.asarray, np.asarray
    return lambda x: x, lambda y: y


def _installed(name: str) -> bool:
    # The library runs on the other kind of device.
    if {"cupy": "cpu", "numpy": "gpu"}.get(name) == jax.default_backend():
        return False
    return name in OF_JAX or importlib.util.find_spec(name.partition(".")[0]) is not None


def free_caches() -> None:
    """Frees the memory that torch and CuPy cache, since other libraries could not use it."""
    if "torch" in sys.modules and jax.default_backend() == "gpu":
        sys.modules["torch"].cuda.empty_cache()
    if "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()


@functools.partial(jax.jit, static_argnums=2)
def _equal(actual, wanted, tolerance):
    if not tolerance:
        return (actual == wanted).all()
    actual, wanted = (x.astype(np.float32) if x.dtype.itemsize < 4 else x for x in (actual, wanted))
    return abs(actual - wanted).max() <= tolerance * abs(wanted).max()


def _check(name: str, results, expected, tolerance: float) -> None:
    for i, (actual, wanted) in enumerate(zip(results, expected, strict=False)):
        if actual.shape != wanted.shape or not _equal(actual, wanted, tolerance):
            raise AssertionError(f"result {i} of {name} is not that of jaxgpuops")


# ---- Measuring ------------------------------------------------------------------------------------------------------


def _cpu_call(name: str, fn: Callable, args: tuple, in_place: bool) -> Callable[[], None]:
    if in_place and name in OF_JAX:
        return timing.in_place(fn, args)
    wait = jax.block_until_ready if name in OF_JAX else lambda y: y
    return lambda: wait(fn(*args))


def _gpu_times(name: str, fn: Callable, inputs: list[tuple], case: Case) -> dict[str, float]:
    if case.in_place and name in OF_JAX:
        return {name: timing.jax_in_place_on_gpu(fn, inputs)}
    count = max(len(inputs), 4, min(SOME_CALLS, PROGRAM // case.bytes))
    calls = [inputs[i % len(inputs)] for i in range(count)]
    if name in OF_TORCH:
        return {name: timing.torch_on_gpu(fn, calls)}
    if name == "cupy":
        return {name: timing.cupy_on_gpu(fn, calls[:2])}
    if name == "jax":  # sorts compile slowly, so the program has no more calls than a good measurement needs
        jitted = jax.jit(fn)
        once = timing.wall({name: lambda: jax.block_until_ready(jitted(*inputs[0]))})[name]
        calls = calls[: max(2, min(16, int(500 / once)))]
    timer = timing.jax_on_gpu(fn, calls)
    times = {name: timer(calls)}
    if name == "jaxgpuops" and case.bytes <= WARM:
        times["jaxgpuops, warm"] = timer([inputs[0]] * len(calls))
    if name == "jaxgpuops":
        for kind, made_of in case.hostile.items():
            hostile = [jax.jit(made_of)(*args) for args in inputs]
            times[f"jaxgpuops, {kind}"] = timer([hostile[i % len(inputs)] for i in range(count)])
    return times


def _kernel_times(name: str, fn: Callable, inputs: list[tuple], case: Case, programs: Programs) -> dict[str, float]:
    """The time in which kernels run, of calls one by one: no program of many calls has to be compiled for it."""
    runs = max(len(inputs), 8)
    time = lambda inputs: timing.kernels(lambda i: fn(*inputs[i % len(inputs)]), runs)[0]
    times = {name: time(inputs)}
    if name == "jaxgpuops":
        if case.bytes <= WARM:
            times["jaxgpuops, warm"] = time(inputs[:1])
        for kind, made_of in case.hostile.items():
            made_of = programs.get((case.name, kind)) or jax.jit(made_of)
            times[f"jaxgpuops, {kind}"] = time([jax.block_until_ready(made_of(*args)) for args in inputs])
    return times


# What JAX runs for a case, compiled: by the case's name and a library, a kind of hostile arguments, or "inputs".
Programs = dict[tuple[str, str], Callable]


def _compiled(cases: Sequence[Case], libraries: Sequence[str]) -> Programs:
    """Compiles the programs of cases, several at a time: timing kernels takes less time than that. A program that JAX
    cannot compile is left out."""
    key = jax.random.key(0)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        started = {}
        for case in cases:
            args = jax.eval_shape(case.inputs, key)
            named = {name: case.functions[name] for name in OF_JAX if name in case.functions and name in libraries}
            for name, fn in {**named, **case.hostile}.items():
                started[case.name, name] = pool.submit(lambda fn, args: jax.jit(fn).lower(*args).compile(), fn, args)
            started[case.name, "inputs"] = pool.submit(lambda fn: jax.jit(fn).lower(key).compile(), case.inputs)
    return {about: program.result() for about, program in started.items() if not program.exception()}


def measure(
    case: Case,
    libraries: Sequence[str],
    kernels: tuple[float, float] | None = None,
    programs: Programs | None = None,
) -> dict[str, Any]:
    """``kernels``: what `timing.floor_of_kernels` returns, if kernels alone are to be timed. Programs that are not
    among ``programs`` are compiled here."""
    programs = programs or {}
    gpu = jax.default_backend() == "gpu"
    if why := jaxgpuops._native.missing("cuda" if gpu else "cpu"):
        raise RuntimeError(f"this would measure plain JAX: {why}")
    make = programs.get((case.name, "inputs")) or jax.jit(case.inputs)
    one = jax.block_until_ready(make(jax.random.key(0)))
    count = max(2, min(SOME_KERNELS if kernels else MAX_CALLS, -(-ROTATE // case.bytes))) if gpu else 1
    inputs = [one] + [make(jax.random.key(i)) for i in range(1, count)]
    jax.block_until_ready(inputs)

    row = {"name": case.name, "bytes": case.bytes, "us": {}, "errors": {}, **case.facts}
    calls = jaxgpuops.explain(case.functions["jaxgpuops"], *one)
    row["plan"] = [call.plan for call in calls]
    if kernels:
        rate, least = kernels
        row["floor"] = {"kind": "copy", "us": case.bytes / rate + least}
        row["target_ratio"] = case.target
    elif gpu and _installed("cupy"):
        kind, moved = case.floor
        row["floor"] = {"kind": kind, "us": timing.floor_on_gpu(kind, moved, max(-(-ROTATE // moved), 4))}
        row["target_ratio"] = case.target
        free_caches()
    expected = None
    cpu_calls = {}
    for name in libraries:
        if name not in case.functions:
            continue
        fn = case.functions[name]
        if name in OF_JAX:
            fn = programs.get((case.name, name)) or jax.jit(fn)
        to, back = _library(name)
        try:
            theirs = [tuple(map(to, args)) for args in inputs]
            results = [back(y) for y in fn(*theirs[0])]
            if expected is None:
                expected = results
            _check(name, results, expected, case.tolerance)
            del results
            if kernels:
                row["us"] |= _kernel_times(name, fn, theirs, case, programs)
            elif gpu:
                row["us"] |= _gpu_times(name, fn, theirs, case)
            else:
                cpu_calls[name] = _cpu_call(name, fn, theirs[0], case.in_place)
        except Exception as error:
            row["errors"][name] = f"{type(error).__name__}: {error}".split("\n")[0][:300]
        theirs = None
        free_caches()
    if cpu_calls:
        row["us"] |= timing.wall(cpu_calls)
    return row


def _line(row: dict[str, Any]) -> str:
    times = [f"{name} {us:.4g}" for name, us in row["us"].items()]
    if "floor" in row:
        floor = row["floor"]["us"]
        times.append(f"floor {floor:.4g}")
        if row["target_ratio"]:
            times.append(f"target {row['target_ratio'] * floor:.4g}")
    if row.get("goal"):
        times.append(f"target {row['goal']}")
    if "jaxgpuops" in row["us"]:
        times.append(f"{row['bytes'] / row['us']['jaxgpuops'] / 1e3:.0f} GB/s")
        if "jax" in row["us"]:
            times.append(f"{row['us']['jax'] / row['us']['jaxgpuops']:.2f}x jax")
    if algorithms := [plan["algorithm"] for plan in row["plan"] if plan]:
        times.append("/".join(algorithms))
    errors = [f"{name} FAILED: {error}" for name, error in row["errors"].items()]
    return f"{row['name']:<34} " + "; ".join([", ".join(times), *errors])


# ---- Files ----------------------------------------------------------------------------------------------------------


def _commit() -> str:
    if commit := os.environ.get("JAXGPUOPS_COMMIT"):
        return commit
    git = lambda *args: subprocess.run(["git", *args], capture_output=True, text=True, check=True).stdout.strip()
    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_model() -> str:
    try:
        return re.search(r"model name\s*:\s*(.*)", pathlib.Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        return platform.machine()


def _version(name: str) -> str:
    if name == "jaxgpuops":  # this package may run from a source tree, without metadata
        return jaxgpuops.__version__
    names = [name] if name != "cupy" else list(importlib.metadata.packages_distributions().get(name, [name]))
    return importlib.metadata.version(names[0])


def environment(family: str, commit: str | None, libraries: Sequence[str]) -> dict[str, Any]:
    device = jax.devices()[0]
    gpu = device.platform == "gpu"
    packages = sorted({*libraries, "jax", "jaxlib", "numpy", "jaxgpuops"} - {"rewritten", "loop", "torch.compile"})
    return {
        "family": family,
        "device": device.device_kind if gpu else f"{_cpu_model()}, {os.cpu_count()} cores",
        "timing": "device" if gpu else "wall",
        "commit": commit or _commit(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
    }


def result_path(folder: str | os.PathLike, family: str) -> pathlib.Path:
    """The JSON file of a family's results on this device; its folder is made."""
    device = jax.devices()[0]
    kind = device.device_kind if device.platform == "gpu" else "cpu"
    path = pathlib.Path(folder) / f"{re.sub('[^a-z0-9]+', '-', kind.lower())}-{family}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def run(
    family: str,
    *,
    only: str = "",
    libraries: Sequence[str] | None = None,
    commit: str | None = None,
    out: str | os.PathLike,
    keep: Sequence[str] = (),
    kernels: bool = False,
) -> None:
    if kernels and jax.default_backend() != "gpu":
        sys.exit("kernels are timed on a GPU; JAX has none here")
    cases = importlib.import_module(f"benchmarks.{family}").cases(jax.default_backend())
    libraries = libraries or list(dict.fromkeys(name for case in cases for name in case.functions))
    libraries = [name for name in libraries if _installed(name)]
    result = environment(family, commit, libraries)
    if kernels:
        result["timing"] = "kernels"
    least = None
    path = result_path(out, family)
    rows, kept = {}, {}
    if path.exists():
        before = json.loads(path.read_text())
        # Times of another kind would not be comparable.
        if keep and all(before[key] == result[key] for key in ("device", "timing")):
            kept = {
                row["name"]: {name: row["us"][name] for name in keep if name in row["us"]} for row in before["rows"]
            }
            result["versions"] |= {name: v for name, v in before["versions"].items() if name in keep}
        if all(before.get(key) == value for key, value in result.items()):
            rows = {row["name"]: row for row in before["rows"]}
        about = {"commit": before["commit"], "date": before["date"]}
        result |= {"kept": {name: before.get("kept", {}).get(name, about) for name in keep}} if kept else {}
    print(f"{result['device']}; " + ", ".join(f"{k} {v}" for k, v in result["versions"].items()))
    if kernels:
        least = timing.floor_of_kernels()
        result["copy_rate"] = least[0] / 1e6
        print(f"large copy: {result['copy_rate']:.2f} TB/s; times in us of kernels")
    elif result["timing"] == "device":
        if not _installed("cupy"):
            print("no floors and targets: they are measured with CuPy, which is not installed")
        else:
            result["copy_rate"] = 2 * (1 << 30) / timing.floor_on_gpu("copy", 1 << 30, 4) / 1e6
            print(f"large copy: {result['copy_rate']:.2f} TB/s; times in us of device time")
            free_caches()
    result["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")

    failed = False
    start = time.monotonic()
    chosen = [case for case in cases if only in case.name]
    programs = _compiled(chosen, libraries) if kernels else {}
    for case in chosen:
        rows[case.name] = row = measure(case, libraries, least, programs)
        row["us"] |= kept.get(case.name, {})
        failed |= bool(row["errors"])
        print(f"{time.monotonic() - start:5.0f} s  {_line(row)}", flush=True)
        ordered = [rows[c.name] for c in cases if c.name in rows]
        path.write_text(json.dumps(result | {"rows": ordered}, indent=1, ensure_ascii=False) + "\n")
    print(f"written to {path}")
    if failed:
        sys.exit("some measurements failed, see above")
