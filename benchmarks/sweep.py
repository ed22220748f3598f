"""The sweep: random problems, or the shapes of programs, ours beside `jax.lax` and torch.

    python -m benchmarks sweep --seed 1 --problems 900          on a GPU: times, and whether results are right
    python -m benchmarks sweep --shapes programs                the same for the list of shapes of real programs
    python -m benchmarks sweep --seed 1 --check                 on a GPU or CPU: only whether plans launch and are right
    python -m benchmarks sweep --seed 1 --only topk/17          that problem again

The benchmark's grid says how fast the kernels are where they were tuned; this says how slow they may be elsewhere. All
programs are compiled first, in threads, and then measured with nothing else on the GPU. Times are those of kernels
(`timing.kernels`). Inputs rotate: over more than the L2 cache, unless a dozen of them are smaller. The floor: the bytes
that must move, at the rate of a large copy, and the time of the smallest kernel.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import json
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import report, runner, timing
from benchmarks.problems import FAMILIES, Problem, drawn, of_programs
from jaxgpuops._primitive import recording

INPUTS = 12  # the most inputs of one problem
SECONDS = 0.1  # all runs of one problem in one library should take at most this long
SLOW = 1.0  # what takes more seconds is run once, and timed by the clock
OPERANDS = 24 << 30  # the most bytes of all operands
ELEMENTS = {"gpu": 1 << 26, "cpu": 1 << 14}


def listed(shapes: str, families: Sequence[str], seed: int, count: int, only: str, check: bool) -> list[Problem]:
    """Lists the problems to try. Families take turns, so that the problems that there is time for come from all of
    them."""
    if shapes == "programs":
        every = of_programs()
        return [problem for problem in every if problem.family in families and only in problem.name]
    elements, shortest = ELEMENTS[jax.default_backend()], 1 if check else 2
    names = [(family, i) for i in range(-(-count // len(families))) for family in families][:count]
    if only:
        family, _, index = only.partition("/")
        names = [(family, int(index))]
    return [drawn(family, seed, i, elements, shortest) for family, i in names]


def _pool(problem_list) -> jax.Array:
    """Returns normal random numbers, a few more than the largest operand has elements, so that operands can start at
    different ones."""
    largest = max(math.prod(operand.shape) for problem in problem_list for operand in problem.operands())
    return jax.block_until_ready(jax.jit(lambda key: jax.random.normal(key, (largest + 4096,)))(jax.random.key(0)))


class Prepared:
    """A problem with its programs. Each is compiled, or is the exception that compiling raised."""

    def __init__(self, problem: Problem, pool: jax.ShapeDtypeStruct, check: bool):
        operands = problem.operands()
        self.problem = problem
        self.draw = self._compiled(problem.draw, pool, jax.ShapeDtypeStruct((), jnp.int32), hasty=True)
        with recording() as self.calls:
            self.ours = self._compiled(problem.ours, *operands)
        results = jax.eval_shape(problem.ours, *operands)
        right = lambda operands, results: problem.right(operands, jax.tree.leaves(results))
        self.right = self._compiled(right, tuple(operands), results, hasty=True)
        self.jax = None if check or problem.jax is None else self._compiled(problem.jax, *operands)

    @staticmethod
    def _compiled(function, *args, hasty=False):
        def fresh(*args):  # no cache knows this function, so `recording` sees its calls
            return function(*args)

        try:
            return jax.jit(fresh).lower(*args).compile({"xla_llvm_disable_expensive_passes": hasty})
        except Exception as error:
            return error

    def row(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "name": problem.name,
            "family": problem.family,
            "call": problem.call,
            "shape": problem.shape,
            "axis": problem.axis,
            "dtype": problem.dtype,
            "data": problem.data,
            "bytes": problem.bytes,
            "plan": [call.plan.get("algorithm", call.op) if call.kernel else None for call in self.calls],
            "why": "; ".join(dict.fromkeys(call.why for call in self.calls if not call.kernel)),
            "us": {},
            "errors": {},
        }


def _run(program, *args):
    if isinstance(program, Exception):
        raise program
    return jax.block_until_ready(program(*args))


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:300]


def _drawn(prepared: Prepared, pool: jax.Array, count: int) -> list[tuple]:
    return [_run(prepared.draw, pool, jnp.int32(4096 // count * i)) for i in range(count)]


def checked(prepared: Prepared, operands: tuple, row: dict[str, Any]) -> None:
    """Adds to the row whether the plan launches and whether its results are right."""
    try:
        results = _run(prepared.ours, *operands)
        if not _run(prepared.right, operands, results):
            row["errors"]["jaxgpuops"] = "wrong results"
    except Exception as error:
        row["errors"]["jaxgpuops"] = _message(error)


def _kernels(call, inputs) -> tuple[float, float]:
    start = time.perf_counter()
    jax.block_until_ready(call(*inputs[0]))
    if (took := time.perf_counter() - start) > SLOW:
        return 1e6 * took, math.nan
    start = time.perf_counter()
    jax.block_until_ready(call(*inputs[1 % len(inputs)]))
    runs = max(2, min(len(inputs), int(SECONDS / (time.perf_counter() - start))))
    return timing.kernels(lambda i: call(*inputs[i % len(inputs)]), runs)


def timed(prepared: Prepared, inputs: list[tuple], row: dict[str, Any]) -> None:
    problem = prepared.problem
    if "jaxgpuops" not in row["errors"]:
        row["us"]["jaxgpuops"], row["launches"] = _kernels(lambda *args: _run(prepared.ours, *args), inputs)
    if problem.jax is not None:
        try:
            row["us"]["jax"], _ = _kernels(lambda *args: _run(prepared.jax, *args), inputs)
        except Exception as error:
            row["errors"]["jax"] = _message(error)
    if problem.torch is None:
        return
    import torch

    try:
        theirs = [tuple(map(torch.from_dlpack, args)) for args in inputs]

        def call(*args):
            problem.torch(*args)
            torch.cuda.synchronize()

        row["us"]["torch"], _ = _kernels(call, theirs)
    except Exception as error:
        row["errors"]["torch"] = _message(error)
    del theirs
    torch.cuda.empty_cache()


def run(
    *,
    shapes: str,
    families: Sequence[str],
    seed: int,
    problems: int,
    only: str,
    check: bool,
    seconds: float | None,
    commit: str | None,
    out: str | os.PathLike,
) -> None:
    gpu = jax.default_backend() == "gpu"
    if not gpu and not check:
        sys.exit("the sweep times kernels on GPUs; on a CPU it can --check")
    jax.config.update("jax_enable_x64", True)  # float64 is also the measure of what is right
    started = time.monotonic()
    problem_list = listed(shapes, families, seed, problems, only, check)
    pool = _pool(problem_list)
    threads = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    jobs = [threads.submit(Prepared, problem, jax.typeof(pool), check) for problem in problem_list]
    if check:
        failed = _check(jobs, pool, started, seconds)
        threads.shutdown(cancel_futures=True)
        sys.exit(1 if failed else 0)

    # If there is a limit, compiling takes the first half of the time; programs that are not ready then are left out.
    concurrent.futures.wait(jobs, seconds and seconds / 2)
    ready = [job for job in jobs if job.done()]
    threads.shutdown(cancel_futures=True)
    print(f"{len(ready)} of {len(jobs)} problems compiled after {time.monotonic() - started:.0f} s", flush=True)
    rate, least = timing.floor_of_kernels()
    runner.free_caches()
    result = runner.environment("sweep", commit, ["torch"]) | {
        "timing": "kernels",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "problems": shapes if shapes != "random" else f"seed {seed}",
        "copy_rate": rate / 1e6,
        "least_us": least,
    }
    print(f"{result['device']}: large copy {rate / 1e6:.2f} TB/s, smallest kernel {least:.2f} us", flush=True)
    rows = []
    for job in ready:
        if seconds and time.monotonic() - started > seconds:
            break
        prepared = job.result()
        row = prepared.row()
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in prepared.problem.operands())
        inputs = _drawn(prepared, pool, max(2, min(INPUTS, -(-runner.ROTATE // size), OPERANDS // size)))
        row["floor"] = row["bytes"] / rate + least
        try:
            checked(prepared, inputs[0], row)
            timed(prepared, inputs, row)
        except KeyboardInterrupt:  # the results so far are kept
            print(f"interrupted in {prepared.problem}", flush=True)
            break
        rows.append(row)
        if "jaxgpuops" in row["errors"]:
            print(f"FAILED {prepared.problem}: {row['errors']['jaxgpuops']}", flush=True)
        del inputs
    suffix = "" if shapes == "random" else f"-{shapes}"
    path = runner.result_path(out, f"sweep{suffix}")
    result["rows"] = sorted(rows, key=lambda row: FAMILIES.index(row["family"]))
    lines = ",\n".join(json.dumps(row) for row in result["rows"])  # each row on a line of its own, since there are many
    head = json.dumps(result | {"rows": []}, indent=1, ensure_ascii=False)
    path.write_text(head.replace('"rows": []', f'"rows": [\n{lines}\n]') + "\n")
    print(f"{len(rows)} problems after {time.monotonic() - started:.0f} s, written to {path}\n")
    for columns, which in ((report.SWEEP_COLUMNS, "families"), (report.WORST_COLUMNS, "worst")):
        print(report.table(result, columns.split(), which))
    if any("jaxgpuops" in row["errors"] for row in rows):
        sys.exit("some problems failed, see above")


def _check(jobs, pool, started, seconds) -> int:
    ran = failed = 0
    for job in concurrent.futures.as_completed(jobs):
        if seconds and time.monotonic() - started > seconds:
            break
        prepared = job.result()
        row = prepared.row()
        start = random.Random(prepared.problem.name).randrange(4096)
        checked(prepared, _run(prepared.draw, pool, jnp.int32(start)), row)
        ran += 1
        if row["errors"]:
            failed += 1
            print(f"FAILED {prepared.problem}: {row['errors']['jaxgpuops']} {row['plan']}", flush=True)
        jobs.remove(job)  # this also frees the job's programs
        del prepared, job
    print(f"{ran - failed} of {ran} problems are right, after {time.monotonic() - started:.0f} s")
    return failed
