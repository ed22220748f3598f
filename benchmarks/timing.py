"""Time of one call, in microseconds.

On a GPU this is device time. Wall time around a call would be mostly the host's: its wake-up and the allocation of
results cost 10 to 600 us. So a program holds many calls over distinct inputs, the GPU runs it as one CUDA graph, many
runs are in flight, and one wait ends them all. The inputs together are larger than the L2 cache ("cold"), or one input
serves all calls ("warm"). Each timer takes the arguments of every call of the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

REPEATS = 5  # each result is the median of this many measurements
SECONDS = 0.02  # on a GPU, each measurement takes at least this long
TURNS = 15  # measurements on a CPU


def _median(measure: Callable[[int], float]) -> float:
    """``measure(runs)`` gives the seconds of a number of runs; returns seconds per run."""
    runs = _enough(measure)
    return statistics.median(measure(runs) / runs for _ in range(REPEATS))


def _enough(measure: Callable[[int], float]) -> int:
    measure(1)  # compile, load, allocate
    return min(max(int(SECONDS / max(measure(2) / 2, 1e-6)), 3), 1000)


def _median_of_more(measure: Callable[[int], float], agree: Callable[[int], int] = int) -> float:
    """Returns the seconds per run of work that the host starts and waits for. They follow from how much longer three
    times as many runs take.

    The host's way to the first run and its wake-up after the last, 0.3 to 2 ms together, are in both and drop out.
    ``agree`` makes the number of runs the same in all processes that take part.
    """
    runs = agree(_enough(measure))
    return statistics.median((measure(3 * runs) - measure(runs)) / (2 * runs) for _ in range(REPEATS))


@functools.cache
def _keep_memory() -> None:
    """Keeps large blocks in the heap of the whole process. Otherwise glibc may or may not return them to the system,
    and the page faults of a result of 16 MiB take as long as a softmax of it.
    """
    with contextlib.suppress(OSError, AttributeError):  # this is another C library
        mallopt = ctypes.CDLL(None).mallopt
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


def wall(calls: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Times functions that return when they are done. They take turns, so that other work of the machine delays all of
    them alike."""
    _keep_memory()

    def seconds(call, runs):
        start = time.perf_counter()
        for _ in range(runs):
            call()
        return time.perf_counter() - start

    runs = {name: _enough(functools.partial(seconds, call)) for name, call in calls.items()}
    turns = [{name: seconds(call, runs[name]) / runs[name] for name, call in calls.items()} for _ in range(TURNS)]
    return {name: statistics.median(turn[name] for turn in turns) * 1e6 for name in calls}


def in_flight(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Times programs of JAX as they are. Each run starts while the one before is at work; programs take turns; results
    are dropped.

    A program that keeps its device busy for longer than the host takes to start it (some 30 us) costs that.
    """

    def seconds(call, runs):
        start = time.perf_counter()
        for _ in range(runs):
            result = call()
        jax.block_until_ready(result)
        return time.perf_counter() - start

    runs = {name: _enough(functools.partial(seconds, call)) for name, call in calls.items()}
    turns = [
        {
            name: (seconds(call, 3 * runs[name]) - seconds(call, runs[name])) / (2 * runs[name])
            for name, call in calls.items()
        }
        for _ in range(REPEATS)
    ]
    return {name: statistics.median(turn[name] for turn in turns) * 1e6 for name in calls}


def _chained(run: Callable, kept, in_turn: bool = False) -> Callable[[int], float]:
    """Returns what measures the seconds of a number of runs, each of which takes the result of the one before it.

    ``in_turn``: a run starts when the one before has ended, not while it is at work.
    """

    def measure(runs):
        nonlocal kept
        jax.block_until_ready(kept)
        start = time.perf_counter()
        for _ in range(runs):
            kept = run(kept)
            if in_turn:
                jax.block_until_ready(kept)
        jax.block_until_ready(kept)
        return time.perf_counter() - start

    return measure


def jax_on_gpu(fn: Callable, calls: Sequence[tuple]) -> Callable[[Sequence[tuple]], float]:
    """Compiles a program of ``fn`` on each of the calls' arguments; the timer takes them, or others of the same shapes.

    Results stay inside the program, so that running it allocates nothing: what leaves it is one element of each, at an
    index that the compiler does not know, in a buffer that the next run overwrites. One kernel picks those of so many
    results; of more at once XLA would make a kernel for each.
    """
    results_at_once = 32

    def program(kept, index, calls):
        results = [result for args in calls for result in jax.tree.leaves(fn(*args))]
        sums = []
        for first, before in zip(range(0, len(results), results_at_once), kept, strict=True):
            # Without the barrier, the last operation of a call might compute only that element.
            some = jax.lax.optimization_barrier(results[first : first + results_at_once])
            elements = [jax.lax.dynamic_slice(x.reshape(-1), (index,), (1,)).astype(jnp.float32) for x in some]
            sums.append(before + jnp.concatenate(elements))
        return sums

    count = len(calls) * len(jax.tree.leaves(jax.eval_shape(fn, *calls[0])))
    index = jnp.uint32(0)
    run = jax.jit(program, donate_argnums=0)

    def timer(calls):
        calls = list(calls)
        kept = [jnp.zeros(min(results_at_once, count - first)) for first in range(0, count, results_at_once)]
        return _median_of_more(_chained(lambda kept: run(kept, index, calls), kept)) / len(calls) * 1e6

    return timer


def jax_on_mesh(
    fn: Callable, args: tuple, mesh: Mesh, calls: int, options: Mapping[str, object], agree: Callable[[int], int]
) -> float:
    """Returns the microseconds of a call of ``fn``, in a program of many calls, one after another, whose arguments lie
    on a mesh.

    All processes of the mesh run it. The calls have the same arguments, which are in the L2 cache where they fit. As in
    `jax_on_gpu`, one element of each result of each device leaves the program. ``options`` are those of the compiler.
    """
    specs = [s.spec for s in jax.tree.leaves(jax.jit(fn).lower(*args).compile().output_shardings)]

    def elements(kept, index, *results):
        # Without the barrier, the last operation of a call might compute only that element.
        results = jax.lax.optimization_barrier(results)
        some = [jax.lax.dynamic_slice(x.reshape(-1), (index,), (1,)).astype(jnp.float32) for x in results]
        return kept + sum(some)

    own = PartitionSpec(mesh.axis_names)  # each device has an element
    add = jax.shard_map(elements, mesh=mesh, in_specs=(own, PartitionSpec(), *specs), out_specs=own, check_vma=False)

    def program(kept, index, args):
        for _ in range(calls):
            # A call begins after the one before, and the compiler does not know that their arguments are the same.
            args, kept = jax.lax.optimization_barrier((args, kept))
            kept = add(kept, index, *jax.tree.leaves(fn(*args)))
        return kept

    place = NamedSharding(mesh, own)
    kept = jax.jit(lambda: jnp.zeros(mesh.size), out_shardings=place)()
    index = np.uint32(0)
    run = jax.jit(program, donate_argnums=0, out_shardings=place).lower(kept, index, args).compile(dict(options))
    in_turn = mesh.devices.flat[0].platform == "cpu"  # two runs of virtual devices may wait for each other's threads
    return _median_of_more(_chained(lambda kept: run(kept, index, args), kept, in_turn), agree) / calls * 1e6


def in_place(fn: Callable, args: tuple) -> Callable[[], None]:
    """Returns, for wall(), a call whose first result takes the memory of its first argument, and is the argument of the
    next call."""
    run = jax.jit(lambda x, *others: fn(x, *others), donate_argnums=0)
    x = jnp.copy(args[0])

    def call():
        nonlocal x
        x, *rest = run(x, *args[1:])
        jax.block_until_ready((x, rest))

    return call


def jax_in_place_on_gpu(fn: Callable, calls: Sequence[tuple]) -> float:
    """Times a program with one such call for each of these arguments."""

    def program(firsts, others, kept):
        results = [fn(x, *rest) for x, rest in zip(firsts, others, strict=True)]
        more = [jnp.ravel(y)[0].astype(jnp.float32) for _, *rest in results for y in rest]
        return [x for x, *_ in results], kept + jnp.stack(more)

    firsts, others = [jnp.copy(x) for x, *_ in calls], [rest for _, *rest in calls]
    kept = jnp.zeros(len(calls) * (len(jax.eval_shape(fn, *calls[0])) - 1))
    run = jax.jit(program, donate_argnums=(0, 2))
    return _median_of_more(_chained(lambda state: run(state[0], others, state[1]), (firsts, kept))) / len(calls) * 1e6


def torch_on_gpu(fn: Callable, calls: Sequence[tuple]) -> float:
    """Times replays of a CUDA graph between CUDA events."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn(*calls[0])  # lazy initialisation is not allowed during capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for args in calls:
            fn(*args)

    def measure(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(runs):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return _median(measure) / len(calls) * 1e6


def cupy_on_gpu(fn: Callable, calls: Sequence[tuple]) -> float:
    """Times calls between CUDA events, without a graph, because functions of CuPy allocate and synchronise."""
    import cupy

    def measure(runs):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        for _ in range(runs):
            for args in calls:
                fn(*args)
        end.record()
        end.synchronize()
        return cupy.cuda.get_elapsed_time(start, end) / 1e3

    return _median(measure) / len(calls) * 1e6


# ---- Floors: the fastest that plain kernels move bytes ---------------------------------------------------------------

_FLOORS = r"""
template <class Step> __device__ void each(long long n, Step step) {
  const long long stride = (long long)gridDim.x * blockDim.x;
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < n; i += 4 * stride) step(i, stride, 4);
  for (; i < n; i += stride) step(i, stride, 1);
}

extern "C" __global__ void read(const uint4* x, uint4* y, long long n) {
  unsigned sum = 0;
  each(n, [&](long long i, long long stride, int count) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = j < count ? x[i + j * stride] : uint4{0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 4; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  });
  if (sum == 0x9e3779b9u) y[0].x = sum;  // almost never, but the compiler cannot know
}

extern "C" __global__ void copy(const uint4* x, uint4* y, long long n) {
  each(n, [&](long long i, long long stride, int count) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) if (j < count) v[j] = x[i + j * stride];
#pragma unroll
    for (int j = 0; j < 4; ++j) if (j < count) y[i + j * stride] = v[j];
  });
}

extern "C" __global__ void write(const uint4* x, uint4* y, long long n) {
  each(n, [&](long long i, long long stride, int count) {
#pragma unroll
    for (int j = 0; j < 4; ++j) if (j < count) y[i + j * stride] = uint4{0, 0, 0, 0};
  });
}
"""


def floor_on_gpu(kind: str, size: int, buffers: int) -> float:
    """Times a kernel that only reads, copies or writes ``size`` bytes, over this many buffers in a CUDA graph."""
    import cupy

    module = cupy.RawModule(code=_FLOORS, options=("--std=c++17",))
    kernel = module.get_function(kind)
    vectors = max(size // 16, 1)
    # Zeros may move faster than random data.
    mixed = cupy.arange(4 * vectors, dtype=cupy.uint32) * cupy.uint32(2654435761)
    source = [mixed + cupy.uint32(i) for i in range(buffers)]
    target = [cupy.empty_like(mixed) for _ in range(1 if kind == "read" else buffers)]
    blocks = min(-(-vectors // 1024), 8 * cupy.cuda.Device().attributes["MultiProcessorCount"])
    cupy.cuda.Device().synchronize()

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        kernel((blocks,), (256,), (source[0], target[0], cupy.int64(vectors)))
        stream.begin_capture()
        for i in range(buffers):
            kernel((blocks,), (256,), (source[i], target[i % len(target)], cupy.int64(vectors)))
        graph = stream.end_capture()

        def measure(runs):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            for _ in range(runs):
                graph.launch(stream)
            end.record(stream)
            end.synchronize()
            return cupy.cuda.get_elapsed_time(start, end) / 1e3

        return _median(measure) / buffers * 1e6


# ---- Kernels alone --------------------------------------------------------------------------------------------------


def kernels(call: Callable[[int], object], runs: int) -> tuple[float, float]:
    """Microseconds in which any kernel of a call runs, and how many kernels it has, as CUPTI sees them.

    ``call(i)``, of JAX or torch, is the i-th of so many, each on inputs of its own. This neither counts what the host
    takes nor needs a program of many calls: for many problems, each measured once. A kernel that starts early and waits
    for the one before it is not counted twice. All calls run once before: the first to read inputs that were just made
    waits while L2 writes them back to memory.
    """
    import torch

    for i in range(runs):
        jax.block_until_ready(call(i))
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(runs):
            jax.block_until_ready(call(i))
        torch.cuda.synchronize()
    on_gpu = [event.time_range for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    total, end = 0.0, -math.inf
    for span in sorted(on_gpu, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total / runs, len(on_gpu) / runs


def floor_of_kernels() -> tuple[float, float]:
    """Returns the bytes that a large copy moves in a microsecond, and the microseconds of the smallest kernel."""
    import torch

    source = torch.randn(1 << 28, device="cuda")
    target, small = torch.empty_like(source), torch.zeros(32, device="cuda")

    def of_large():
        return kernels(lambda i: target.copy_(source), 5)[0]

    def of_small():
        return kernels(lambda i: small.add_(1), 20)[0]

    of_large(), of_small()  # the first kernels that a profiler sees are slow
    return 2 * source.nbytes / of_large(), of_small()
