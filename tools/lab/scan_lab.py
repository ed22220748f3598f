"""The lab of the scans."""

import ctypes
import itertools
import math
import os
import time

import numpy as np
from machine import Gpu, Host, Sweep, build, kernels, library, random_rows, random_shape, replay
from operands import DTYPE, DTYPES, broadcast
from scan_in_float64 import reference

SOURCES = [*kernels("scan"), "ffi_src/scan/plan.cc", "ffi_src/scan/plan_few.cc", "tools/lab/scan_lab.cc"]

KINDS = ["cumulative", "tangent", "linear", "linear_vjp"]  # as in scan.h
OPS = ["sum", "prod", "max", "min", "logsumexp"]


def accepts(kind, op, dtype):
    narrow = dtype.name.startswith("float8")
    if kind == "cumulative":
        if op == "logsumexp":
            return not dtype.integer and not dtype.complex
        return not dtype.complex if op in ("max", "min") else dtype.name != "bool"
    if kind == "tangent":
        return op != "sum" and not dtype.integer and not narrow and (op == "prod" or not dtype.complex)
    return not dtype.integer and not narrow


# ---- Calls -----------------------------------------------------------------------------------------------------------


class Lab:
    def __init__(self, machine):
        self.machine = machine
        self.kernels = ctypes.CDLL(str(library("scan")))
        for name in ("lab_error", "lab_name", "lab_layout"):
            getattr(self.kernels, name).restype = ctypes.c_char_p
        names = (self.kernels.lab_name(i).decode() for i in itertools.count())
        self.algorithms = {name: i for i, name in enumerate(itertools.takewhile(lambda name: name != "?", names))}

    def choices(self, call):
        """Lists the algorithms that can take the call."""
        return [a for a in self.algorithms if a != "empty" and self.launch(call, None, forced=a)["algorithm"] == a]

    def numbers(self, call, capability=90, forced=None):
        shape, axis = call["shape"], call["axis"]
        rows = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
        flags = (call["reverse"], call["exclusive"], call["transpose"], call["initial"], call["segmented"])
        forced = -1 if forced is None else self.algorithms[forced]
        numbers = (KINDS.index(call["kind"]), OPS.index(call["op"]), call["dtype"].number, *rows, *flags)
        return (ctypes.c_int64 * 13)(*map(int, numbers), capability, forced)

    def launch(self, call, buffers, **kwargs):
        """Runs a call. buffers: addresses of x, a, y, h0, starts, out, out2, workspace; None: only the plan is made."""
        chosen = (ctypes.c_int64 * 7)()
        maps = [broadcast(call["shape"], call["axis"], call[part]) for part in ("a_shape", "starts_shape")]
        pointers = None if buffers is None else (ctypes.c_void_p * 8)(*buffers)
        status = self.kernels.lab_scan(self.machine.stream, pointers, self.numbers(call, **kwargs), *maps, chosen)
        if status:
            raise RuntimeError(self.kernels.lab_error(status).decode())
        names = ("algorithm", "layout", "threads", "tile", "tiles", "strips", "workspace")
        plan = dict(zip(names, chosen))
        plan["algorithm"] = self.kernels.lab_name(plan["algorithm"]).decode()
        plan["layout"] = self.kernels.lab_layout(plan["layout"]).decode()
        return plan

    def run(self, call, x, a, y, h0, starts, offset=0, **kwargs):
        """Results as arrays of bits. `offset` elements before each operand make it misaligned."""
        m, storage = self.machine, call["dtype"].storage
        shift = offset * storage.itemsize

        def put(array):
            if array is None:
                return None, None
            raw = np.concatenate([np.zeros(shift, np.uint8), np.ascontiguousarray(array).view(np.uint8).reshape(-1)])
            raw = m.put(raw)
            return raw, m.pointer(raw) + shift

        held = [put(array) for array in (x, a, y, h0)]
        marks = None if starts is None else m.put(starts.astype(np.uint8))
        size = x.size * storage.itemsize
        outs = [m.empty(size + shift + 64) for _ in range(2 if call["kind"] == "linear_vjp" else 1)]
        plan = self.launch(call, None, **kwargs)
        workspace = m.empty(math.prod(call["shape"][: call["axis"]]) * plan["workspace"] + 16)
        pointers = (
            [p for _, p in held]
            + [None if marks is None else m.pointer(marks)]
            + [m.pointer(o) + shift for o in outs]
            + [None] * (2 - len(outs))
        )
        self.launch(call, [*pointers, m.pointer(workspace)], **kwargs)
        raws = [m.get(o) for o in outs]
        assert all((r[:shift] == 0xCD).all() and (r[shift + size :] == 0xCD).all() for r in raws), "wrote outside"
        return [r[shift : shift + size].view(storage).reshape(x.shape) for r in raws], plan


# ---- Check -----------------------------------------------------------------------------------------------------------


def random_call(rng, largest):
    while True:
        dtype = DTYPES[rng.choice(17, p=np.array([1, 1, 1, 2, 2, 1, 1, 1, 1, 1, 1, 6, 8, 12, 5, 5, 2]) / 51)]
        kind, op = KINDS[rng.choice(4, p=[0.35, 0.3, 0.2, 0.15])], OPS[rng.integers(5)]
        if accepts(kind, op, dtype):
            break
    op = op if kind in ("cumulative", "tangent") else "sum"
    shape, axis = random_shape(rng, largest)
    thin = lambda p: tuple(1 if rng.random() < p and i != axis else s for i, s in enumerate(shape))
    a_shape = thin(0.3) if kind == "linear" and rng.random() < 0.5 else shape
    if kind == "linear" and rng.random() < 0.2:
        a_shape = (*a_shape[:axis], 1, *a_shape[axis + 1 :])
    tangent_or_scan = kind in ("cumulative", "tangent")
    transpose = kind in ("tangent", "linear") and rng.random() < 0.5
    call = {
        "kind": kind,
        "op": op,
        "dtype": dtype,
        "shape": shape,
        "axis": axis,
        "a_shape": a_shape,
        "starts_shape": thin(0.4),
    }
    call |= {"reverse": rng.random() < 0.5, "exclusive": tangent_or_scan and rng.random() < 0.4, "transpose": transpose}
    call["segmented"] = rng.random() < 0.35
    call["initial"] = not tangent_or_scan and not transpose and rng.random() < 0.5
    return call


def random_values(rng, call, role, shape):
    dtype, kind, op = call["dtype"], call["kind"], call["op"]
    if dtype.name == "bool":
        return rng.random(shape) < 0.5
    if dtype.integer:
        info = np.iinfo(dtype.storage)
        if op == "prod" or kind == "linear":
            return rng.integers(-3 if info.min else 0, 4, shape).astype(dtype.storage)
        return rng.integers(info.min, info.max, shape, dtype.storage, endpoint=True)
    x = rng.standard_normal(shape)
    if dtype.complex:
        x = x + 1j * rng.standard_normal(shape)
    if role == "factor":  # the operand is a factor
        sizes = rng.choice([1.0, 1.0, 0.875, 0.5, 1.125], shape, p=[0.5, 0.2, 0.2, 0.05, 0.05])
        x = x / np.maximum(abs(x), 1e-3) * sizes
        x = np.where(rng.random(shape) < 0.01, 0, x)
    elif op == "logsumexp" and role == "x":
        x = np.where(rng.random(shape) < 0.05, -np.inf, x * 4)
    elif op in ("max", "min") and role == "x":
        x = np.round(x * 4) / 4
        if rng.random() < 0.2:
            x = np.where(rng.random(shape) < 0.002, np.nan, x)
    return x


def check_call(lab, rng, call):
    dtype, shape, axis, kind, op = (call[k] for k in ("dtype", "shape", "axis", "kind", "op"))
    rows = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
    if not dtype.complex:
        floats = dtype.table is None
        if dtype.integer:
            info = np.iinfo(dtype.storage) if dtype.name != "bool" else None
            call["lowest"], call["highest"] = (info.min, info.max) if info else (False, True)
        else:
            low = np.inf if floats or "e5m2" in dtype.name else 448
            call["lowest"], call["highest"] = -low, low
    value = lambda role, s: dtype.encode(random_values(rng, call, role, s))
    full = lambda bits, s=shape: np.broadcast_to(dtype.decode(bits), s).reshape(rows)
    x = a = y = h0 = starts = None
    starts_bits = rng.random(call["starts_shape"]) < 1 / rng.choice([2, 10, 100]) if call["segmented"] else None
    if starts_bits is not None:
        starts = np.broadcast_to(starts_bits, shape).reshape(rows)
    x = value("factor" if kind == "cumulative" and op == "prod" else "x" if kind == "cumulative" else "t", shape)
    if kind == "tangent":
        a = value("factor" if op == "prod" else "x", shape)
        forward = dict(call, kind="cumulative")
        with np.errstate(all="ignore"):
            y = dtype.encode(reference(forward, full(a).copy(), None, None, None, starts)[0].reshape(shape))
    elif kind in ("linear", "linear_vjp"):
        a = value("factor", call["a_shape"])
        if kind == "linear_vjp":
            y = value("t", shape)
        if call["initial"]:
            h0 = value("t", (*shape[:axis], 1, *shape[axis + 1 :]))
    decoded = [None if b is None else full(b).copy() for b in (x, a, y)]
    h0_full = None if h0 is None else dtype.decode(h0).reshape(rows[0], 1, rows[2])
    with np.errstate(all="ignore"):
        expected = reference(call, *decoded, h0_full, starts)
    scales = expected[2:] if kind == "linear_vjp" else expected[2:3]

    offset = int(rng.choice([0, 0, 0, 1, 3]))
    results, bits = [], None
    # Sums of two float32 columns are sums of complex rows, unless they are not aligned, or spans are forced.
    paired = (kind, op, dtype.name, rows[2], call["segmented"]) == ("cumulative", "sum", "float32", 2, False)
    if paired:
        offset = 0
    for forced in [None, *([] if paired else lab.choices(call))]:  # None: the plan's own, which may be a cluster
        capability = int(rng.choice([90, 80]))
        results.append(lab.run(call, x, a, y, h0, starts_bits, offset, forced=forced, capability=capability))
    if rows[0] > 1 and kind != "linear" and (starts_bits is None or starts_bits.shape[:axis] == shape[:axis]):
        # A part of the batch: the first indices of the outermost dimension.
        part = lambda array: None if array is None else array[:1]
        alone = dict(call, shape=(1, *shape[1:]), a_shape=(1, *shape[1:]))
        alone["starts_shape"] = (1, *call["starts_shape"][1:])
        results.append(lab.run(alone, *map(part, (x, a, y, h0, starts_bits))))
    bad = ""
    for outs, plan in results:
        raw = [o.view(np.uint8) for o in outs]
        bits = bits or raw
        if any(not np.array_equal(b[: len(r)], r) for b, r in zip(bits, raw)):
            bad += f" bits of {plan['algorithm']} {plan['layout']} differ from {results[0][1]['algorithm']}'s;"
    for out, want, scale in zip(results[0][0], [e for e in expected[:2] if e is not None], scales):
        got = dtype.decode(out).reshape(rows)
        if dtype.integer:
            wrong = got != want
        else:
            with np.errstate(all="ignore"):
                if dtype.table is not None or dtype.name in ("float16", "bfloat16"):
                    want = dtype.decode(dtype.encode(want))  # overflows where the kernel's result does
                tolerance = dtype.tolerance * (abs(want) + scale + (1e-2 if dtype.table is None else 0.05))
                if op == "prod" or kind != "cumulative":
                    tolerance = tolerance * (1 + 0.02 * rows[1] ** 0.5)
                if op == "logsumexp":
                    tolerance = tolerance * 4
                same = (got == want) | (np.isnan(got) & np.isnan(want)) | (abs(got - want) <= tolerance)
                if dtype.table is not None or dtype.name == "float16":
                    # The dtype is so narrow that a rounding may decide whether a sum overflows.
                    edge = {"float8_e4m3fn": 350, "float8_e5m2": 45000, "float16": 50000}[dtype.name]
                    same |= ~np.isfinite(got) & (abs(want) > edge) | ~np.isfinite(want) & (abs(got) > edge)
                wrong = ~same
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0])
            bad += f" {wrong.sum()} of {wrong.size} wrong, first at {at}: {got[at]}, not {want[at]};"
    if bad:
        shown = {k: v.name if k == "dtype" else v for k, v in call.items() if k not in ("lowest", "highest")}
        print(f"WRONG:{bad}\n  {shown} offset {offset}\n  {results[0][1]}", flush=True)
    return not bad, [plan for _, plan in results]


def check(lab, largest=1 << 21, seed=0):
    right, wrong, seen = 0, 0, {}
    begin = time.time()
    for case in range(seed, seed + int(os.environ.get("CASES", "1500"))):
        rng = np.random.default_rng(case)
        call = random_call(rng, largest)
        good, plans = check_call(lab, rng, call)
        right, wrong = right + good, wrong + (not good)
        if not good:
            print(f"  (case {case})", flush=True)
        for plan in plans:
            key = (call["kind"], plan["algorithm"], plan["layout"])
            seen[key] = seen.get(key, 0) + 1
    for key in sorted(seen):
        print(*key, seen[key])
    print(f"{right} right, {wrong} wrong, {time.time() - begin:.0f} s")
    return wrong


def check_large(lab):
    """Checks the grid of the targets: all algorithms give the same bits, and the first and last rows match float64."""
    torch, m = lab.machine.torch, lab.machine
    wrong = 0
    for point in [*GRID, *(("tangent", "prod", *point[2:]) for point in GRID), ("linear_vjp", "sum", *GRID[1][2:])]:
        call = grid_call(point)
        dtype, shape, axis = call["dtype"], call["shape"], call["axis"]
        rows = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
        t = getattr(torch, dtype.name)
        torch.manual_seed(0)
        # Factors that neither overflow nor let much of the past vanish.
        operands = [torch.randn(shape, device="cuda").to(t)]
        operands += [(torch.rand(shape, device="cuda") * 0.1 + 0.9).to(t) for _ in range(2)]
        names = lab.choices(call)
        outs = [[torch.full(shape, 7, device="cuda").to(t) for _ in range(2)] for _ in names]
        first = lab.launch(call, None)
        for out, forced in zip(outs, names):
            m.workspace.fill_(0xCD)
            pointers = [*map(m.pointer, operands), None, None, *map(m.pointer, out), m.pointer(m.workspace)]
            lab.launch(call, pointers, forced=forced)
        torch.cuda.synchronize()
        same = [all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(outs[0], o)) for o in outs]
        report = "" if all(same) else f" bits differ: {names} {same}"
        if rows[1] <= 1 << 17:
            pick = lambda x, rows=rows: torch.stack([x.view(rows)[i, :, j] for i in (0, -1) for j in (0, -1)])
            with np.errstate(all="ignore"):
                want = reference(call, *(pick(x).double().cpu().numpy()[..., None] for x in operands), None, None)
            for out, expected, scale in zip(outs[0], want[:2], (want[2], want[-1])):
                if expected is not None:
                    error = abs(pick(out).double().cpu().numpy()[..., None] - expected) / (abs(expected) + scale + 1e-2)
                    if not error.max() <= 10 * dtype.tolerance:
                        report += f" error {error.max()}"
        elif call["kind"] == "cumulative":
            expected = operands[0].double().cumsum(axis)
            error = (outs[0][0].double() - expected).abs().max().item()
            if not error <= 1e-5 * rows[1] ** 0.5 * 10:
                report += f" error {error}"
        wrong += bool(report)
        print(
            "WRONG" if report else "right", *map(str, (*point[:2], shape, axis, dtype.name)), first, report, flush=True
        )
        del operands, outs
        torch.cuda.empty_cache()
    return wrong


# ---- Time ------------------------------------------------------------------------------------------------------------

# name, op, shape, axis, dtype, target in microseconds; ratio is to a copy of the bytes.
GRID = [
    ("cumulative", "sum", (1 << 27,), 0, "float32", 290),
    ("cumulative", "sum", (1, 1 << 20), 1, "float32", 5),
    ("cumulative", "sum", (1024, 65536), 1, "float32", 146),
    ("cumulative", "sum", (65536, 1024), 1, "float32", 143),
    ("cumulative", "sum", (65536, 1024), 1, "bfloat16", 75),
    ("cumulative", "sum", (8, 4096, 2048), 1, "float32", 148),
    ("cumulative", "sum", (65536, 1024), 0, "float32", 155),
    ("cumulative", "sum", (16, 128256), 1, "float32", 7),
    ("cumulative", "sum", (4096, 128), 1, "float32", 3.2),
    ("linear", "sum", (8, 2048, 4096), 2, "float32", 190),
    ("linear", "sum", (8, 4096, 2048), 1, "float32", 190),
    ("linear", "sum", (8, 2048, 4096), 2, "bfloat16", 98),
    ("linear", "sum", (8, 2048, 1024), 2, "float32", 52),
    ("linear", "sum", (32, 1024, 256), 2, "float32", 30),
    ("linear", "sum", (1, 2048, 65536), 2, "float32", 385),
    ("linear", "sum", (1, 16, 65536), 2, "float32", 9),
    ("linear", "sum", (1, 1, 1 << 24), 2, "float32", 52),
]
MORE = [
    *(("cumulative", op, *point[2:]) for op in ("max", "prod", "logsumexp") for point in GRID[:9]),
    *((*point[:4], "bfloat16", None) for point in GRID[:9] if point[4] == "float32"),
    *((*point[:4], "float64", None) for point in GRID[1:9] if point[4] == "float32"),
    *(("tangent", op, *point[2:5], None) for op in ("prod", "max", "logsumexp") for point in GRID[2:8]),
    *(("linear_vjp", "sum", *point[2:5], None) for point in GRID[9:]),
    ("cumulative", "sum", (65536, 1023), 1, "float32", None),
    ("cumulative", "sum", (65536, 1023), 1, "bfloat16", None),
    ("cumulative", "sum", (1 << 20, 31), 1, "float32", None),
    ("cumulative", "sum", (1024, 65535), 1, "float32", None),
    ("cumulative", "sum", (1 << 20, 5), 1, "float32", None),
    ("cumulative", "sum", (1 << 22, 3), 0, "float32", None),
    ("cumulative", "sum", (1 << 20, 8, 4), 1, "float32", None),
    ("cumulative", "sum", (4096, 64), 0, "float32", None),
    ("cumulative", "sum", (100, 4096, 100), 1, "float32", None),
    ("cumulative", "sum", (300, 131072), 1, "float32", None),
    ("cumulative", "sum", (100, 1 << 18), 1, "float32", None),
    ("cumulative", "sum", (64, 32768), 1, "float32", None),
    ("cumulative", "sum", (128, 8192), 1, "float32", None),
]


def time_call(lab, call, forced=None):
    """Returns the microseconds of the call, those of a copy of as many bytes, and the plan."""
    torch, m = lab.machine.torch, lab.machine
    dtype, shape = call["dtype"], call["shape"]
    operands = {"cumulative": 1, "linear": 2}.get(call["kind"], 3)
    outs = 2 if call["kind"] == "linear_vjp" else 1
    size = math.prod(shape)
    t = getattr(torch, dtype.name)
    sets = max(2, min(64, -(-(200 << 20) // (size * dtype.storage.itemsize * operands))))

    def operand(i):
        x = torch.randn(size, device="cuda") if i == 0 else torch.rand(size, device="cuda") * 0.1 + 0.9
        return x.to(t)

    inputs = [[operand(i) for i in range(operands)] for _ in range(sets)]
    results = [[torch.empty(size, dtype=t, device="cuda") for _ in range(outs)] for _ in range(sets)]
    copied = size * (operands + outs) // 2
    source = [torch.empty(copied, dtype=t, device="cuda") for _ in range(sets)]
    target = [torch.empty(copied, dtype=t, device="cuda") for _ in range(sets)]
    plan = lab.launch(call, None, forced=forced)
    assert math.prod(shape[: call["axis"]]) * plan["workspace"] <= m.workspace.numel()

    def run(i):
        pointers = [m.pointer(x) for x in inputs[i % sets]] + [None] * (5 - operands)
        pointers += [m.pointer(x) for x in results[i % sets]] + [None] * (2 - outs) + [m.pointer(m.workspace)]
        lab.launch(call, pointers, forced=forced)

    count = sets * max(1, min(256, int(4e9 / (size * dtype.storage.itemsize))) // sets)
    us = replay(torch, run, count)
    copy = replay(torch, lambda i: target[i % sets].copy_(source[i % sets]), count)
    return us, copy, plan


def grid_call(point):
    kind, op, shape, axis, dtype, _ = point
    call = {
        "kind": kind,
        "op": op,
        "dtype": DTYPE[dtype],
        "shape": shape,
        "axis": axis,
        "a_shape": shape,
        "starts_shape": shape,
    }
    flags = ("reverse", "exclusive", "transpose", "initial", "segmented")
    return call | dict.fromkeys(flags, False) | {"transpose": kind == "tangent"}


def show(lab, points):
    for point in points:
        kind, op, shape, axis, dtype, target = point
        name = f"{kind}{'' if kind.startswith('linear') else ' ' + op} {shape} axis {axis} {dtype}"
        if os.environ.get("ONLY", "") not in name:
            continue
        us, copy, plan = time_call(lab, grid_call(point))
        if op == "logsumexp" and target and kind == "cumulative":
            target = round(1.15 * point[5], 1)
        mark = " " if target is None or us <= target else "!"
        print(
            f"{name:58} {us:8.2f} us{mark} target {target or '-':>6} copy {copy:8.2f} = {copy / us:4.0%}  {plan}",
            flush=True,
        )


def random_points(count):
    rng = np.random.default_rng(int(os.environ.get("SEED", "0")))
    for _ in range(count):
        kind = str(rng.choice(KINDS))
        op = str(rng.choice(["sum", "max", "logsumexp"])) if kind in ("cumulative", "tangent") else "sum"
        yield kind, op, random_rows(rng), 1, str(rng.choice(["float32", "bfloat16", "float64"])), None


def sweep(lab):
    seen = Sweep()
    for point in [*GRID, *MORE, *random_points(int(os.environ.get("CASES", "100")))]:
        call = grid_call(point)
        planned = lab.launch(call, None)
        choices = lab.choices(call)
        if os.environ.get("ONLY", "") not in str(point) or planned["tiles"] == 1:
            continue
        timed = {algorithm: time_call(lab, call, algorithm)[0] for algorithm in choices}
        others = [(us, algorithm) for algorithm, us in timed.items() if algorithm != planned["algorithm"]]
        seen.add(point[:5], (time_call(lab, call)[0], planned["algorithm"]), others)
    seen.end()


def compiled():
    """Compiles the kernels with nvcc. No GPU is needed."""
    build("scan", SOURCES)


def check_on_gpu():
    """Random calls of every kind against float64, and the grid; every algorithm must give the same bits."""
    lab = Lab(Gpu())
    return check(lab, int(os.environ.get("LARGEST", "100000"))) + check_large(lab)


def emulate():
    """Checks the random calls with kernels that were built for the host."""
    return check(Lab(Host()), 1 << 15, int(os.environ.get("SEED", "0")))


def times():
    """The targets' grid, and a copy of as many bytes."""
    show(Lab(Gpu()), GRID)


def more():
    """Times points outside the grid."""
    show(Lab(Gpu()), MORE)


def sweep_on_gpu():
    """Grid, other points and random ones: where the plan lost more than 5 % to another algorithm."""
    sweep(Lab(Gpu()))


STAGES = {"build": compiled, "check": check_on_gpu, "emulate": emulate}
STAGES |= {"time": times, "more": more, "sweep": sweep_on_gpu}
