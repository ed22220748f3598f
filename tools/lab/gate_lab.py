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
GROUPED = [(256, 8, (8, 4)), (160, 6, (8, 3)), (12, 4, (6, 2))]
GROUPED += [
    (8, 3, (8, 3)),
    (60, 7, (4, 3)),
    (512, 16, (16, 5)),
    (64, 6, (64, 9)),
    (1024, 64, (32, 2)),
    (384, 33, (3, 1)),
]
SCORES = ["softmax", "sigmoid", "sqrt_softplus"]
TIMES = [  # rows, length, k, dtype, target in microseconds
    (32768, 256, 8, "float32", 15),
    (4096, 64, 6, "float32", 3.2),
    (32768, 128, 8, "bfloat16", None),
    (32768, 256, 8, "bfloat16", None),
    (8192, 160, 6, "float32", None),
    (65536, 8, 2, "float32", None),
    (8192, 512, 10, "float32", None),
    (8192, 1024, 64, "float32", None),
    (32, 128, 8, "float32", None),
    (512, 256, 8, "bfloat16", None),
]


SOURCES = ["ffi_src/topk_softmax/cuda/topk_softmax.cu", "ffi_src/topk_softmax/plan.cc", "tools/lab/gate_lab.cc"]


class Lab:
    def __init__(self, machine):
        self.machine = machine
        self.launch = ctypes.CDLL(str(library("gate"))).lab_gate

    def call(self, dtype, rows, k, score, normalize, groups=(1, 1)):
        return (ctypes.c_int64 * 9)(DTYPES[dtype], *rows, k, SCORES.index(score), normalize, *groups)

    def run(self, x, k, score="softmax", normalize=True, bias=None, groups=(1, 1), offset=0, sums=True):
        """Weights, indices and, if ``sums``, log-sums of x (outer, length, inner); offset: elements before x in its
        buffer."""
        m, dtype = self.machine, x.dtype
        outer, _, inner = x.shape
        buffer = np.concatenate([np.zeros(offset, dtype), x.ravel()])
        held = m.put(buffer)
        pointer = ctypes.c_void_p(m.pointer(held) + offset * dtype.itemsize)
        sizes = [(k, dtype), (k, np.int32), *([(1, np.float32)] if sums else [])]
        out = [m.put(np.zeros(outer * n * inner, t)) for n, t in sizes]
        given = None if bias is None else m.put(bias)
        status = self.launch(
            m.stream,
            self.call(dtype.name, x.shape, k, score, normalize, groups),
            pointer,
            None if bias is None else ctypes.c_void_p(m.pointer(given)),
            *(ctypes.c_void_p(m.pointer(array)) for array in out),
            *([] if sums else [None]),
        )
        assert status == 0, status
        return [m.get(a).view(np.uint8).view(t).reshape(outer, n, inner) for a, (n, t) in zip(out, sizes, strict=True)]


def expected_scores(x, score):
    with np.errstate(all="ignore"):
        z = x.astype(np.float64)
        if score == "sigmoid":
            return 1 / (1 + np.exp(-z))
        if score == "sqrt_softplus":
            return np.sqrt(np.logaddexp(0, z))
        e = np.exp(z - np.max(z, 1, keepdims=True))
        return e / e.sum(1, keepdims=True)


def expected_groups(keys, groups, best):
    """Returns whether each group is chosen, by the sum of its ``best`` largest keys."""
    count, chosen = groups
    rows = np.moveaxis(keys, 1, -1)
    largest = np.sort(rows.reshape(*rows.shape[:-1], count, -1), -1)[..., -best:].sum(-1)
    order = np.argsort(-largest, -1, kind="stable")[..., :chosen]
    return largest, np.moveaxis((order[..., None] == np.arange(count)).any(-2), -1, 1)


def wrong(x, k, score, normalize, bias, groups, weights, indices, log_sums):
    """Names the first results that are wrong, or returns None."""
    take = lambda a: np.take_along_axis(a, indices, 1)
    scores = expected_scores(x, score)
    if (indices < 0).any() or (indices >= x.shape[1]).any() or (np.diff(np.sort(indices, 1), axis=1) == 0).any():
        return "indices"
    if groups[0] > 1:  # the data has no NaNs then
        keys = x.astype(np.float64) if bias is None else scores + bias[:, None]
        size = x.shape[1] // groups[0]
        largest, kept = expected_groups(keys, groups, 1 if bias is None else min(2, size))
        cut = np.sort(largest, -1)[..., ::-1]
        clear = cut[..., groups[1] - 1] - cut[..., groups[1]] > (
            0 if bias is None else 1e-6
        )  # the groups are not equal within rounding
        clear |= bias is None
        of = np.take_along_axis(kept, indices // size, 1) | ~clear[:, None]
        if not of.all():
            return "groups"
        keys = np.where(np.repeat(kept, size, 1), keys, -np.inf)
        best = np.take_along_axis(keys, np.argsort(-keys, 1, kind="stable")[:, :k], 1)
        if not (np.isclose(take(keys), best, rtol=0, atol=1e-6) | ~clear[:, None]).all():
            return "choice in groups"
    elif bias is None:
        if not np.array_equal(indices, reference.topk(x, k, 1)[1]):
            return "order"
    else:
        keys = scores + bias[:, None]
        best = np.take_along_axis(keys, np.argsort(-keys, 1, kind="stable")[:, :k], 1)
        if not np.allclose(take(keys), best, rtol=0, atol=1e-6, equal_nan=True):
            return "choice"
    with np.errstate(all="ignore"):
        want = take(scores)
        chosen = take(x).astype(np.float64)
        if normalize and score == "sigmoid":
            chosen = -np.logaddexp(0, -chosen)
        if normalize and score == "sqrt_softplus":
            chosen = np.where(chosen < -500, chosen, np.log(np.logaddexp(0, chosen))) / 2
        want = expected_scores(chosen, "softmax") if normalize else want
        top = np.max(x.astype(np.float64), 1, keepdims=True)
        sums = np.where(np.isinf(top), top, top + np.log(np.exp(x.astype(np.float64) - top).sum(1, keepdims=True)))
    if not np.allclose(log_sums, sums, rtol=2e-6, atol=2e-6, equal_nan=True):
        return "log-sums"
    finfo = ml_dtypes.finfo(x.dtype)
    rtol = max(4e-6, float(finfo.eps))
    if not np.allclose(
        weights.astype(np.float64), want, rtol=rtol, atol=2 * float(finfo.smallest_normal), equal_nan=True
    ):
        return "weights"


def cases_of(length, dtype, rows):
    """Returns {name of a case: (logits, bias)}."""
    rng = np.random.default_rng(length)
    hostile = np.stack(list(reference.adversarial(rng, length, dtype).values()))[..., None]
    normal = (3 * rng.standard_normal((rows, length, 1))).astype(dtype)
    columns = normal.reshape(3, -1, length).swapaxes(1, 2).copy()
    bias = rng.uniform(-0.1, 0.1, length).astype(np.float32)
    return {
        "normal": (normal, None),
        "hostile": (hostile, None),
        "columns": (columns, None),
        "hostile columns": (np.ascontiguousarray(hostile.swapaxes(0, 2)), None),
        "biased": (normal, bias),
        "biased ties": (np.round(normal), np.zeros_like(bias)),
        "biased columns": (columns, bias),
    }


def check(lab, rows=36):
    bad = count = 0
    calls = [(length, k, (1, 1)) for length, k in SIZES] + GROUPED
    for (length, k, groups), name in itertools.product(calls, DTYPES):
        cases = cases_of(length, np.dtype(getattr(ml_dtypes, name, name)), rows)
        if groups[0] > 1:
            cases = {case: of for case, of in cases.items() if "hostile" not in case}
            normal = cases["normal"][0]
            cases["ties"] = (np.round(normal) + normal.dtype.type(0), None)  # no -0, which comes after 0
        for score, normalize, case in itertools.product(SCORES, (False, True), cases):
            x, given = cases[case]
            out = lab.run(x, k, score, normalize, given, groups)
            what = wrong(x, k, score, normalize, given, groups, *out)
            shifted = lab.run(x, k, score, normalize, given, groups, offset=1)
            if not all(a.tobytes() == b.tobytes() for a, b in zip(out, shifted, strict=True)):
                what = "other bits where misaligned"
            alone = lab.run(x, k, score, normalize, given, groups, sums=False)  # few rows may have another kernel
            if not all(a.tobytes() == b.tobytes() for a, b in zip(out[:2], alone, strict=True)):
                what = "other bits without log-sums"
            count += 1
            if what:
                bad += 1
                print("WRONG", what, case, length, k, groups, name, score, normalize)
    print(f"{count - bad} right, {bad} wrong")
    return bad


def time(lab, rows, length, k, dtype, score, normalize, biased, groups):
    """Microseconds of a call."""
    torch, t = lab.machine.torch, getattr(lab.machine.torch, dtype)
    pointer = lambda array: ctypes.c_void_p(array.data_ptr())
    copies = min(256, max(2, -(-(128 << 20) // (rows * length * t.itemsize))))
    xs = [torch.randn(rows, length, device="cuda").to(t) for _ in range(copies)]
    bias = torch.rand(length, device="cuda") / 10
    out = torch.empty(rows, k, dtype=t, device="cuda"), torch.empty(rows, k, dtype=torch.int32, device="cuda")
    call = lab.call(dtype, (rows, length, 1), k, score, normalize, groups)
    others = (pointer(bias) if biased else None, *map(pointer, out), None)

    def run(i):
        assert lab.launch(lab.machine.stream, call, pointer(xs[i % copies]), *others) == 0

    return replay(torch, run, 5 * copies)


def show(lab):
    kinds = {"": ("softmax", True, False, (1, 1)), "dense": ("softmax", False, False, (1, 1))}
    kinds |= {"sigmoid + bias": ("sigmoid", True, True, (1, 1)), "root + bias": ("sqrt_softplus", True, True, (1, 1))}
    kinds["8 groups"] = ("sigmoid", True, True, (8, 4))
    for (rows, length, k, dtype, target), (name, kind) in itertools.product(TIMES, kinds.items()):
        if k > length * kind[3][1] // kind[3][0]:
            continue
        us = time(lab, rows, length, k, dtype, *kind)
        print(f"{rows} x {length} {dtype} k {k} {name:<15} {us:7.2f}" + (f", target {target}" if target else ""))


def check_on_gpu():
    """Compares every form of the kernel with float64 in NumPy, also on hostile data."""
    return check(Lab(Gpu()), 999)


def emulate():
    """The same checks with kernels that were built for the host."""
    return check(Lab(Host()))


def times():
    """Sizes of public models."""
    show(Lab(Gpu()))


def compiled():
    """Compiles the kernels with nvcc. No GPU is needed."""
    build("gate", SOURCES)


STAGES = {
    "build": compiled,
    "check": check_on_gpu,
    "emulate": emulate,
    "time": times,
}  # there is one kernel, so there is nothing to sweep
