"""The lab of top-k."""

import ctypes
import itertools
import math
import os
import sys

import numpy as np
from machine import ROOT, Sweep, build, kernels, library, log_uniform, random_rows, replay

SOURCES = [
    *(kernel for family in ("topk", "sort", "select", "common") for kernel in kernels(family)),
    *(
        str(plan.relative_to(ROOT))
        for family in ("topk", "sort", "select")
        for plan in sorted((ROOT / "ffi_src" / family).glob("plan*.cc"))
    ),
    "tools/lab/topk_lab.cc",
]
DISTRIBUTIONS = ["normal", "rising", "falling", "equal", "two", "relu", "nan", "high bits", "period", "tail", "bits"]


def grid():
    """Lists (rows, length, dtype, k): the points of the benchmark whose axis is the last."""
    sys.path.append(str(ROOT))
    from benchmarks.topk import GPU

    return [(*shape, dtype, k) for shape, axis, dtype, k, *_ in GPU if axis == len(shape) - 1]


class Lab:
    def __init__(self):
        import torch

        self.torch = torch
        self.kernels = ctypes.CDLL(str(library("topk")))
        self.kernels.lab_error.restype = self.kernels.lab_name.restype = ctypes.c_char_p
        names = itertools.takewhile(
            lambda name: name != "?", (self.kernels.lab_name(i).decode() for i in itertools.count())
        )
        self.algorithms = {name: i for i, name in enumerate(names)}
        self.workspace = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")

    def run(self, x, values, indices, rows, k, largest=True, sorted=True, capability=90, forced=None):
        """Runs a call by an algorithm. If x is a dtype, only returns the plan: (algorithm, threads, slices, lanes,
        workspace)."""
        torch, pointer = self.torch, lambda a: ctypes.c_void_p(None if a is None else a.data_ptr())
        dtype = x if isinstance(x, torch.dtype) else x.dtype
        kind = 2 if dtype.is_floating_point else 1 if dtype.is_signed else 0
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        plan = (ctypes.c_int64 * 5)(-1 if forced is None else self.algorithms[forced])
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

    def time(self, rows, k, dtype, distribution="normal", forced=None):
        """Microseconds of one call."""
        torch = self.torch
        dtype = getattr(torch, dtype)
        outer, length, inner = rows
        size = math.prod(rows) * dtype.itemsize
        inputs = [
            self.make(distribution, (outer, inner, length), dtype, i).mT.contiguous()
            for i in range(max(2, min(64, -(-(200 << 20) // size))))
        ]
        values = torch.empty(outer * k * inner, dtype=dtype, device="cuda")
        indices = torch.empty(outer * k * inner, dtype=torch.int32, device="cuda")
        run = lambda i: self.run(inputs[i % len(inputs)], values, indices, rows, k, forced=forced)
        return replay(torch, run, len(inputs) * max(1, min(256, int(4e9 / size)) // len(inputs)))


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
    return wrong


def show(lab, distribution="normal"):
    for rows, length, dtype, k in grid():
        plan = lab.run(getattr(lab.torch, dtype), None, None, (rows, length, 1), k)
        us = lab.time((rows, length, 1), k, dtype, distribution)
        print(f"{distribution:10} {rows:6} x {length:<10} {dtype:9} k = {k:<5} {us:9.2f} us  {plan}", flush=True)


def random_points(count):
    rng = np.random.default_rng(int(os.environ.get("SEED", "0")))
    for _ in range(count):
        rows = random_rows(rng)
        yield rows, log_uniform(rng, 1, rows[1]), str(rng.choice(["float32", "bfloat16", "float64"]))


def sweep(lab):
    seen = Sweep()
    points = [((rows, length, 1), k, dtype) for rows, length, dtype, k in grid()]
    for rows, k, dtype in [*points, *random_points(int(os.environ.get("CASES", "100")))]:
        problem = f"{rows} k {k} {dtype}"
        if os.environ.get("ONLY", "") not in problem:
            continue

        def choose(forced, rows=rows, k=k, dtype=dtype):
            *plan, workspace = lab.run(getattr(lab.torch, dtype), None, None, rows, k, forced=forced)
            return plan[0] if workspace <= lab.workspace.numel() else "too large"

        planned = choose(None)
        choices = [a for a in lab.algorithms if a not in ("empty", "argmax", planned) and choose(a) == a]
        if k > 1 and choices:
            others = [(lab.time(rows, k, dtype, forced=a), a) for a in choices]
            seen.add(problem, (lab.time(rows, k, dtype), planned), others)
    seen.end()


def compiled():
    """Compiles the kernels with nvcc. No GPU is needed."""
    build("topk", SOURCES)


def check_on_gpu():
    """Compares every kernel with torch.sort, on hostile data."""
    return check(Lab())


def times():
    """The benchmark's grid."""
    show(Lab())


def hostile():
    """Times the grid on data that defeats thresholds."""
    lab = Lab()
    for distribution in DISTRIBUTIONS[1:]:
        show(lab, distribution)


def sweep_on_gpu():
    """The grid and random problems: where the plan lost more than 5 % to another algorithm."""
    sweep(Lab())


STAGES = {"build": compiled, "check": check_on_gpu, "time": times, "hostile": hostile, "sweep": sweep_on_gpu}
