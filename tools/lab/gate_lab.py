"""The lab of the gate, topk_softmax."""

import ctypes
import itertools
import sys

import ml_dtypes
import numpy as np
from machine import ROOT, Gpu, Host, build, library, replay

DTYPES = {"float16": 11, "bfloat16": 12, "float32": 13}  # as in common/dtype.h
sys.path.append(str(ROOT / "tests"))
import reference

SIZES = [(1, 1), (8, 2), (7, 3), (60, 4), (64, 6), (64, 16), (65, 8), (128, 8), (129, 9), (160, 6), (256, 8), (256, 16)]
SIZES += [(257, 8), (200, 17), (512, 32), (513, 5), (384, 33), (1000, 64), (1024, 10), (100, 63), (256, 1), (64, 1)]
TIMES = [  # rows, length, k, dtype, target in microseconds
    (32768, 256, 8, "float32", 15),
    (4096, 64, 6, "float32", 3.2),
    (32768, 128, 8, "bfloat16", None),
    (32768, 256, 8, "bfloat16", None),
    (8192, 160, 6, "float32", None),
    (65536, 8, 2, "float32", None),
    (8192, 512, 10, "float32", None),
    (8192, 1024, 64, "float32", None),
]


SOURCES = ["ffi_src/topk_softmax/cuda/topk_softmax.cu", "ffi_src/topk_softmax/plan.cc", "tools/lab/gate_lab.cc"]


class Lab:
    def __init__(self, machine):
        self.machine = machine
        self.launch = ctypes.CDLL(str(library("gate"))).lab_gate

    def call(self, dtype, rows, k, sigmoid, normalize):
        return (ctypes.c_int64 * 7)(DTYPES[dtype], *rows, k, sigmoid, normalize)

    def run(self, x, k, sigmoid=False, normalize=True, bias=None, offset=0):
        """Weights and indices of x (outer, length, inner); offset: elements before x in its buffer."""
        m, dtype = self.machine, x.dtype
        outer, _, inner = x.shape
        buffer = np.concatenate([np.zeros(offset, dtype), x.ravel()])
        held = m.put(buffer)
        pointer = ctypes.c_void_p(m.pointer(held) + offset * dtype.itemsize)
        out = [m.put(np.zeros(outer * k * inner, t)) for t in (dtype, np.int32)]
        given = None if bias is None else m.put(bias)
        status = self.launch(
            m.stream,
            self.call(dtype.name, x.shape, k, sigmoid, normalize),
            pointer,
            None if bias is None else ctypes.c_void_p(m.pointer(given)),
            *(ctypes.c_void_p(m.pointer(array)) for array in out),
        )
        assert status == 0, status
        views = [m.get(a).view(np.uint8).view(t) for a, t in zip(out, (dtype, np.int32), strict=True)]
        return [v.reshape(outer, k, inner) for v in views]


def expected_scores(x, sigmoid):
    with np.errstate(all="ignore"):
        z = x.astype(np.float64)
        if sigmoid:
            return 1 / (1 + np.exp(-z))
        e = np.exp(z - np.max(z, 1, keepdims=True))
        return e / e.sum(1, keepdims=True)


def wrong(x, k, sigmoid, normalize, bias, weights, indices):
    """What is, or nothing."""
    take = lambda a: np.take_along_axis(a, indices, 1)
    scores = expected_scores(x, sigmoid)
    if bias is None:
        if not np.array_equal(indices, reference.topk(x, k, 1)[1]):
            return "indices"
    else:
        if (indices < 0).any() or (indices >= x.shape[1]).any() or (np.diff(np.sort(indices, 1), axis=1) == 0).any():
            return "indices"
        keys = scores + bias[:, None]
        best = np.take_along_axis(keys, np.argsort(-keys, 1, kind="stable")[:, :k], 1)
        if not np.allclose(take(keys), best, rtol=0, atol=1e-6, equal_nan=True):
            return "choice"
    with np.errstate(all="ignore"):
        want = take(scores)
        if normalize:
            chosen = take(x).astype(np.float64)
            want = expected_scores(-np.logaddexp(0, -chosen) if sigmoid else chosen, False)
    finfo = ml_dtypes.finfo(x.dtype)
    rtol = max(4e-6, float(finfo.eps))
    if not np.allclose(
        weights.astype(np.float64), want, rtol=rtol, atol=2 * float(finfo.smallest_normal), equal_nan=True
    ):
        return "weights"


def check(lab, rows=36):
    bad = count = 0
    for (length, k), name in itertools.product(SIZES, DTYPES):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        rng = np.random.default_rng(length)
        hostile = np.stack(list(reference.adversarial(rng, length, dtype).values()))[..., None]
        normal = (3 * rng.standard_normal((rows, length, 1))).astype(dtype)
        columns = normal.reshape(3, -1, length).swapaxes(1, 2).copy()
        bias = rng.uniform(-0.1, 0.1, length).astype(np.float32)
        cases = {
            "normal": (normal, None),
            "hostile": (hostile, None),
            "columns": (columns, None),
            "hostile columns": (np.ascontiguousarray(hostile.swapaxes(0, 2)), None),
            "biased": (normal, bias),
            "biased ties": (np.round(normal), np.zeros_like(bias)),
            "biased columns": (columns, bias),
        }
        for sigmoid, normalize, case in itertools.product((False, True), (False, True), cases):
            x, given = cases[case]
            out = lab.run(x, k, sigmoid, normalize, given)
            what = wrong(x, k, sigmoid, normalize, given, *out)
            shifted = lab.run(x, k, sigmoid, normalize, given, offset=1)
            if not all(a.tobytes() == b.tobytes() for a, b in zip(out, shifted, strict=True)):
                what = "other bits where misaligned"
            count += 1
            if what:
                bad += 1
                print("WRONG", what, case, length, k, name, "sigmoid" if sigmoid else "softmax", normalize)
    print(f"{count - bad} right, {bad} wrong")
    return bad


def time(lab, rows, length, k, dtype, sigmoid, normalize, biased):
    """Microseconds of a call."""
    torch, t = lab.machine.torch, getattr(lab.machine.torch, dtype)
    pointer = lambda array: ctypes.c_void_p(array.data_ptr())
    copies = min(256, max(2, -(-(128 << 20) // (rows * length * t.itemsize))))
    xs = [torch.randn(rows, length, device="cuda").to(t) for _ in range(copies)]
    bias = torch.rand(length, device="cuda") / 10
    out = torch.empty(rows, k, dtype=t, device="cuda"), torch.empty(rows, k, dtype=torch.int32, device="cuda")
    call = lab.call(dtype, (rows, length, 1), k, sigmoid, normalize)
    others = (pointer(bias) if biased else None, *map(pointer, out))

    def run(i):
        assert lab.launch(lab.machine.stream, call, pointer(xs[i % copies]), *others) == 0

    return replay(torch, run, 5 * copies)


def show(lab):
    kinds = {"": (False, True, False), "dense": (False, False, False), "sigmoid + bias": (True, True, True)}
    for (rows, length, k, dtype, target), (name, kind) in itertools.product(TIMES, kinds.items()):
        us = time(lab, rows, length, k, dtype, *kind)
        print(f"{rows} x {length} {dtype} k {k} {name:<15} {us:7.2f}" + (f", target {target}" if target else ""))


def check_on_gpu():
    """Every form against float64 in NumPy, on hostile data too."""
    return check(Lab(Gpu()), 999)


def emulate():
    """The same with kernels that were built for the host."""
    return check(Lab(Host()))


def times():
    """Sizes of public models."""
    show(Lab(Gpu()))


def compiled():
    """With nvcc; no GPU needed."""
    build("gate", SOURCES)


STAGES = {"build": compiled, "check": check_on_gpu, "emulate": emulate, "time": times}  # one kernel: nothing to sweep
