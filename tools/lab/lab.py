"""The kernel lab: top-k kernels without JAX, for the minutes between an idea and a number.

    python tools/lab/lab.py build         with nvcc, no GPU needed: build/lab/liblab.so (CUDAARCH, default 90)
    python tools/lab/lab.py check         on a GPU: every kernel against torch.sort, on hostile data
    python tools/lab/lab.py time          the benchmark's grid, CUDA graph replay, inputs rotating over more than L2
    python tools/lab/lab.py hostile       the same on data that defeats thresholds
    python tools/lab/lab.py sweep         other geometries than the plan's

What ships is measured by `python -m benchmarks`; this is for choosing what ships. Needs torch.
"""

import contextlib
import ctypes
import itertools
import math
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build" / "lab" / "liblab.so"
SWEPT = ("stream", "grid", "wave")  # algorithms with a geometry to choose

DISTRIBUTIONS = ["normal", "rising", "falling", "equal", "two", "relu", "nan", "high bits", "period", "tail", "bits"]


def grid():
    """(rows, length, dtype, k): the points of the benchmark whose axis is the last."""
    sys.path.append(str(ROOT))
    from benchmarks.topk import GPU

    return [(*shape, dtype, k) for shape, axis, dtype, k, *_ in GPU if axis == len(shape) - 1]


def build():
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    arch = os.environ.get("CUDAARCH", "90")
    flags = ["-std=c++17", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC", "-I", "ffi_src"]
    flags += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    sources = [*map(str, (ROOT / "ffi_src" / "topk").glob("*.cu")), "ffi_src/topk/plan.cc", "tools/lab/lab.cc"]
    command = [
        "nvcc",
        *flags,
        "-x",
        "cu",
        "--threads",
        "0",
        "-shared",
        "-cudart",
        "static",
        "-o",
        str(LIBRARY),
        *sources,
    ]
    subprocess.run(command, cwd=ROOT, check=True)


class Lab:
    def __init__(self):
        import torch

        self.torch = torch
        self.kernels = ctypes.CDLL(str(LIBRARY))
        self.kernels.lab_error.restype = self.kernels.lab_name.restype = ctypes.c_char_p
        names = itertools.takewhile(
            lambda name: name != "?", (self.kernels.lab_name(i).decode() for i in itertools.count())
        )
        self.algorithms = {name: i for i, name in enumerate(names)}
        self.workspace = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")

    def run(self, x, values, indices, rows, k, largest=True, sorted=True, capability=90, forced=(-1, -1, -1, -1)):
        """One call; with x None, the plan: (algorithm's name, threads, slices, lanes). x is (dtype) or an array."""
        torch, pointer = self.torch, lambda a: ctypes.c_void_p(None if a is None else a.data_ptr())
        dtype = x if isinstance(x, torch.dtype) else x.dtype
        kind = 2 if dtype.is_floating_point else 1 if dtype.is_signed else 0
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        plan = (ctypes.c_int * 4)(*forced)
        array = None if isinstance(x, torch.dtype) else x
        status = self.kernels.lab_topk(
            *(stream, pointer(array), pointer(values), pointer(indices), pointer(self.workspace)),
            *(ctypes.c_int64(v) for v in (*rows, k)),
            *(kind, 8 * dtype.itemsize, ctypes.c_bool(largest), ctypes.c_bool(sorted), capability, plan),
        )
        if status:
            raise RuntimeError(self.kernels.lab_error(status).decode())
        return (self.kernels.lab_name(plan[0]).decode(), *plan[1:])

    def make(self, distribution, shape, dtype, seed=0):
        torch = self.torch
        g = torch.Generator(device="cuda").manual_seed(seed)
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        n = shape[-1]
        if distribution == "bits":
            size = (math.prod(shape) * dtype.itemsize,)
            return torch.randint(0, 256, size, dtype=torch.uint8, device="cuda", generator=g).view(dtype).view(shape)
        x = torch.randn(shape, device="cuda", generator=g)
        place = torch.arange(n, device="cuda")
        x = {
            "normal": lambda: x,
            "rising": lambda: x.sort(-1)[0],
            "falling": lambda: x.sort(-1, descending=True)[0],
            "equal": lambda: torch.ones_like(x),
            "two": lambda: (x > 1).float(),
            "relu": lambda: x.clamp(min=0),
            "nan": lambda: torch.where(x > 0.3, float("nan"), x),
            "high bits": lambda: 1 + x.abs() * 1e-4,
            "period": lambda: x + 5 * ((place % 128) < 4),
            "tail": lambda: x + 5 * (place > n - n // 16),
        }[distribution]()
        if not dtype.is_floating_point:
            x = (torch.nan_to_num(x) * (20 if dtype.itemsize == 1 else 1000)).long()
        return x.to(dtype)

    def check(self, x, k, axis, **flags):
        torch = self.torch
        shape = [*x.shape]
        rows = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
        shape[axis] = k
        values = torch.empty(shape, dtype=x.dtype, device="cuda")
        indices = torch.full(shape, -1, dtype=torch.int32, device="cuda")
        self.run(x, values, indices, rows, k, **flags)
        integer = getattr(torch, f"int{8 * x.dtype.itemsize}")
        bits = x.view(integer).long()
        if x.dtype.is_floating_point:
            bits = torch.where(bits < 0, bits ^ torch.iinfo(integer).max, bits)
        elif not x.dtype.is_signed:
            bits = bits & 255  # uint8 is the one unsigned dtype here
        keys = bits if flags.get("largest", True) else ~bits
        expected = keys.sort(dim=axis, descending=True, stable=True)[1].narrow(axis, 0, k)
        if not flags.get("sorted", True):
            expected = expected.sort(dim=axis)[0]
        same = torch.equal(indices, expected.int()) and torch.equal(
            values.view(integer), x.view(integer).gather(axis, expected)
        )
        if not same:
            print("WRONG", tuple(x.shape), x.dtype, f"k={k} axis={axis}", flags, self.run(x.dtype, None, None, rows, k))
        return same

    def time(self, rows, length, dtype, k, distribution="normal", forced=(-1, -1, -1, -1)):
        """Microseconds of one call: the median of five replays of a CUDA graph of many."""
        torch = self.torch
        dtype = getattr(torch, dtype)
        size = rows * length * dtype.itemsize
        inputs = [
            self.make(distribution, (rows, length), dtype, i) for i in range(max(2, min(64, -(-(200 << 20) // size))))
        ]
        values = torch.empty(rows * k, dtype=dtype, device="cuda")
        indices = torch.empty(rows * k, dtype=torch.int32, device="cuda")
        calls = len(inputs) * max(1, min(256, int(4e9 / size)) // len(inputs))
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            self.run(inputs[0], values, indices, (rows, length, 1), k, forced=forced)
            with torch.cuda.graph(graph, stream=stream):
                for i in range(calls):
                    self.run(inputs[i % len(inputs)], values, indices, (rows, length, 1), k, forced=forced)
        times = []
        for _ in range(7):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / calls)
        del graph
        torch.cuda.empty_cache()
        return sorted(times[2:])[2]


def check(lab):
    shapes = [
        *[((7, 64), 6, 1), ((33, 50), 8, 1), ((5, 257), 8, 1), ((9, 1024), 32, 1), ((6, 4096), 64, 1)],
        *[((3, 4095), 17, 1), ((5, 100), 100, 1), ((3, 8192), 3000, 1), ((300, 5000), 70, 1), ((3, 20000), 300, 1)],
        *[((20, 131072), 50, 1), ((2, 300000), 2048, 1), ((1, 1 << 20), 64, 1), ((1, 1000003), 100, 1)],
        *[((12, 128256), 50, 1), ((5, 77), 1, 1), ((1, 1 << 20), 1, 1), ((3, 20000), 5000, 1), ((2, 9000), 9000, 1)],
        *[((3, 500, 7), 9, 1), ((2000, 50), 20, 0), ((2, 4096, 40), 32, 1), ((3, 9001, 7), 4000, 1)],
        *[((9, 64), 8, 1), ((7, 128), 8, 1), ((1000, 256), 8, 1), ((5, 500), 3, 1), ((9, 1000), 7, 1), ((3, 3), 2, 1)],
        *[((9, 200), 16, 1), ((9, 400), 30, 1), ((9, 4000), 2, 1), ((3, 8000), 64, 1), ((3, 16000), 64, 1)],
        *[((4, 32000), 10, 1), ((2, 65535), 33, 1), ((2, 100000), 64, 1), ((3, 131072), 64, 1)],
    ]
    right = wrong = 0
    for distribution, (shape, k, axis) in itertools.product(DISTRIBUTIONS, shapes):
        for dtype in ("float32", "bfloat16", "int64", "uint8"):
            x = lab.make(distribution, shape, dtype)
            for flags in ({}, {"largest": False, "sorted": False}, {"capability": 80}):
                if lab.check(x, k, axis, **flags):
                    right += 1
                else:
                    wrong += 1
    print(f"{right} right, {wrong} wrong")


def show(lab, distribution="normal"):
    for rows, length, dtype, k in grid():
        plan = lab.run(getattr(lab.torch, dtype), None, None, (rows, length, 1), k)
        us = lab.time(rows, length, dtype, k, distribution)
        print(f"{distribution:10} {rows:6} x {length:<10} {dtype:9} k = {k:<5} {us:9.2f} us  {plan}", flush=True)


def sweep(lab):
    for rows, length, dtype, k in grid():
        planned = lab.run(getattr(lab.torch, dtype), None, None, (rows, length, 1), k)[0]
        if planned in SWEPT:
            slices = [s for s in (1, 2, 4, 8, 16, 33, 66, 132, 264) if rows * s <= 1100 and length // s >= max(k, 3500)]
            in_clusters, in_grids = lab.algorithms["stream"], lab.algorithms["grid"]
            forced = [(in_clusters, t, s, -1) for t in (256, 512) for s in slices if s <= 8]
            forced += [(in_grids, t, s, -1) for t in (256, 512) for s in slices if 1 < s <= t]
        else:
            continue
        times = []
        for choice in forced:
            with contextlib.suppress(RuntimeError):  # a geometry that does not fit
                times.append((round(lab.time(rows, length, dtype, k, forced=choice), 1), choice))
        print(f"{rows} x {length} {dtype} k = {k}:", *sorted(times)[:5], flush=True)


def main():
    for stage in sys.argv[1:] or ["check", "time"]:
        if stage == "build":
            build()
            continue
        lab = Lab()
        if stage == "hostile":
            for distribution in DISTRIBUTIONS[1:]:
                show(lab, distribution)
        else:
            {"check": check, "time": show, "sweep": sweep}[stage](lab)


if __name__ == "__main__":
    main()
