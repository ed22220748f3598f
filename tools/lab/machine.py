"""The parts that the labs share: they build kernels without XLA, place arrays, and time and compare calls."""

import ctypes
import os
import pathlib
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]


def library(family):
    """Returns the path of the library that has the family's kernels behind a C interface. JAXGPUOPS_LAB may name
    another one, for example one that runs them on the host."""
    return pathlib.Path(os.environ.get("JAXGPUOPS_LAB", ROOT / "build" / "lab" / f"lib{family}.so"))


def kernels(family):
    """Returns the CUDA sources of a family."""
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "ffi_src" / family / "cuda").glob("*.cu"))]


def build(family, sources):
    """Compiles sources (.cu, or .cc as CUDA) on all cores. CUDAARCH is the architecture; NVCC_FLAGS are added."""
    target = library(family)
    folder = target.parent / family
    folder.mkdir(parents=True, exist_ok=True)
    arch = os.environ.get("CUDAARCH", "90")
    flags = ["-std=c++17", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC", "-I", "ffi_src"]
    flags += ["-gencode", f"arch=compute_{arch},code=sm_{arch}", *os.environ.get("NVCC_FLAGS", "").split()]
    objects = [str(folder / (source.replace("/", "_") + ".o")) for source in sources]
    running, failed = [], False
    for source, compiled in zip(sources, objects, strict=True):
        running.append(subprocess.Popen(["nvcc", *flags, "-x", "cu", "-c", source, "-o", compiled], cwd=ROOT))
        while len(running) >= (os.cpu_count() or 1):
            failed |= running.pop(0).wait() != 0
    for process in running:
        failed |= process.wait() != 0
    if failed:
        sys.exit("failed")
    link = ["nvcc", "-shared", "-cudart", "static", "-Xlinker=-z,defs"]  # a symbol that no object has is an error here
    subprocess.run([*link, "-o", str(target), *objects], cwd=ROOT, check=True)


class Host:
    """Runs emulated kernels on NumPy's memory."""

    stream = None

    def put(self, array):
        return array

    def get(self, array):
        return array

    def empty(self, bytes):
        return np.full(bytes, 0xCD, np.uint8)

    def pointer(self, array):
        return array.ctypes.data


class Gpu:
    """Runs kernels on torch's memory and stream."""

    def __init__(self):
        import torch

        self.torch = torch
        self.workspace = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")

    def put(self, array):
        return self.torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).reshape(-1)).cuda()

    def get(self, array):
        return array.cpu().numpy()

    def empty(self, bytes):
        return self.torch.full((bytes,), 0xCD, dtype=self.torch.uint8, device="cuda")

    def pointer(self, array):
        return array.data_ptr()

    @property
    def stream(self):
        return ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)


def replay(torch, call, count):
    """Microseconds of call(i): the median of five replays of a CUDA graph that has `count` calls."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call(0)
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                call(i)
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    del graph
    torch.cuda.empty_cache()
    return sorted(times[2:])[2]


class Sweep:
    """Counts the problems, and prints those for which a choice other than the plan's takes 5 % less time."""

    def __init__(self):
        self.problems = self.lost = 0

    def add(self, problem, planned, others):
        """planned: (microseconds, choice); others: a list of such pairs."""
        self.problems += 1
        best = min(others, default=planned, key=lambda timed: timed[0])
        if best[0] < 0.95 * planned[0]:
            self.lost += 1
            print(f"{problem}: {planned[0]:.2f} us by {planned[1]}, {best[0]:.2f} by {best[1]}", flush=True)

    def end(self):
        print(f"the plan lost more than 5 % at {self.lost} of {self.problems} problems")


def log_uniform(rng, least, most):
    return int(round(least * (most / least) ** rng.random()))


def random_rows(rng):
    """Draws (outer, length, inner) of at most 32 Mi elements."""
    inner = 1 if rng.random() < 0.6 else log_uniform(rng, 2, 4096)
    length = log_uniform(rng, 2, 1 << 22)
    return log_uniform(rng, 1, max(1, (1 << 25) // (length * inner))), length, inner


def random_shape(rng, largest):
    """An array of at most about `largest` elements, and an axis; there may be several dimensions on each side of it."""
    size = int(np.exp(rng.uniform(0, np.log(largest))))
    length = int(np.exp(rng.uniform(0, np.log(size + 1))))
    if rng.random() < 0.45:  # near a power of two
        length = max(1, (1 << length.bit_length() - 1) + int(rng.integers(-1, 2)))
    if rng.random() < 0.3:
        length = -(-length // 16) * 16
    outside = max(1, size // length)
    inner = 1 if rng.random() < 0.55 else int(np.exp(rng.uniform(0, np.log(outside + 1))))
    if inner > 1 and rng.random() < 0.6:
        inner = -(-inner // 16) * 16
    inner_dims = (inner,) if rng.random() < 0.6 else ((4, inner // 4) if inner % 4 == 0 else (1, inner))
    outer = max(1, outside // inner)
    outer_dims = (outer,) if rng.random() < 0.6 else (2, -(-outer // 2))
    outer_dims, inner_dims = outer_dims if outer > 1 else (), inner_dims if inner > 1 else ()
    shape = (*outer_dims, length, *inner_dims)
    return shape, len(outer_dims)
