"""The lab of the row engine: softmax and the reductions."""

import ctypes
import math
import os
import time

import numpy as np
from machine import Gpu, Host, Sweep, build, kernels, library, random_rows, random_shape, replay
from operands import DTYPE, broadcast
from softmax_in_float64 import expected_reduction, expected_softmax, logits_of

SOURCES = [
    *kernels("softmax"),
    *kernels("reduce"),
    *(f"ffi_src/row_engine/{name}.cc" for name in ("plan", "plan_rows", "plan_columns", "cuda/launch")),
    "ffi_src/softmax/plan.cc",
    "ffi_src/reduce/plan.cc",
    "tools/lab/softmax_lab.cc",
]

SOFTMAX_OPS = [  # as in softmax.h and reduce.h
    "softmax",
    "log_softmax",
    "logsumexp",
    "cross_entropy",
    "cross_entropy_grad",
    "softmax_jvp",
    "log_softmax_jvp",
]
REDUCE_OPS = ["sum", "max", "min", "dot"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]


# ---- Calls -----------------------------------------------------------------------------------------------------------


PARTS = ("scale", "bias", "where", "row_where", "cotangent")
TUNING = ("vectors", "cluster", "block_warps", "split")
FACTS = ("algorithm", "vectors", "lanes", "spans", "block_warps", "blocks", "vector", "workspace")
DEFAULTS = {
    "factor": 1.0,
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "transpose": False,
    "wide": False,
    "queries": 0,
    "query_stride": 1,
    "shapes": {},
}


def rows_of(call):
    shape, axis = call["shape"], call["axis"]
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def results_of(call):
    """Returns {name of a result: (whether it has one number for each row, its storage)}."""
    op, dtype = call["op"], call["dtype"]
    wide = np.dtype(np.float64 if dtype.name == "float64" else np.float32)
    if op in REDUCE_OPS:
        return {"out": (True, wide if call["wide"] else dtype.storage)}
    parts = dict.fromkeys(("maximum", "log_sum"), (True, wide))
    if op == "logsumexp":
        return parts if call["wide"] else {"lse": (True, dtype.storage)}
    if op == "cross_entropy":
        return {"loss": (True, wide), **parts}
    rows = {"loss": (True, wide)} if op == "cross_entropy_grad" else {}
    return {"out": (False, dtype.storage), **rows}


def storage_of(call, result):
    """Returns the same for a result of `run`, in which lse has been computed from its two summands."""
    results = results_of(call)
    return results.get(result, results.get("log_sum"))[1]


class Lab:
    def __init__(self, machine):
        self.machine = machine
        self.kernels = ctypes.CDLL(str(library("softmax")))
        for name in ("lab_error", "lab_name"):
            getattr(self.kernels, name).restype = ctypes.c_char_p

    def launch(self, call, buffers, capability=90, general=False, **tuning):
        """Runs a call. buffers: {name: address}; None: only the plan is made."""
        op = call["op"]
        family = op in REDUCE_OPS
        number = (REDUCE_OPS if family else SOFTMAX_OPS).index(op)
        words = [family, number, call["dtype"].number, *rows_of(call), capability, call["transpose"], call["wide"]]
        words += [call["queries"], call["query_stride"], *(tuning.get(name, 0) for name in TUNING), general]
        numbers = (ctypes.c_double * 3)(*(call[name] for name in ("factor", "label_smoothing", "z_loss")))
        maps = []
        for part in PARTS:
            shape, axis = call["shape"], call["axis"]
            if part in ("row_where", "cotangent"):
                shape = (*shape[:axis], 1, *shape[axis + 1 :])
            maps += broadcast(shape, axis, call["shapes"].get(part, (1,) * len(shape)))
        pointers = None
        if buffers is not None:
            names = ("x", "y", "scale", "bias", "where", "labels", "row_where", "cotangent", "out", "loss", "lse", "ws")
            names += ("maximum", "log_sum")
            pointers = (ctypes.c_void_p * len(names))(*(buffers.get(name) for name in names))
        chosen = (ctypes.c_int64 * 8)()
        status = self.kernels.lab_softmax(
            self.machine.stream,
            pointers,
            (ctypes.c_int64 * 16)(*map(int, words)),
            numbers,
            (ctypes.c_int64 * len(maps))(*maps),
            chosen,
        )
        if status:
            raise RuntimeError(f"{self.kernels.lab_error(status).decode()}: {call}, {tuning}, {list(chosen)}")
        plan = dict(zip(FACTS, chosen, strict=True))
        plan["algorithm"] = self.kernels.lab_name(plan["algorithm"]).decode()
        return plan

    def run(self, call, operands, offset=0, in_place=False, **kwargs):
        """Returns {name of a result: its bits}. `offset` elements before x, y and full results make them misaligned."""
        m = self.machine
        shift = offset * call["dtype"].storage.itemsize
        held, buffers = [], {}
        for name, array in operands.items():
            before = shift if name in ("x", "y") else 0
            raw = np.concatenate([np.zeros(before, np.uint8), np.ascontiguousarray(array).view(np.uint8).reshape(-1)])
            held.append(m.put(np.concatenate([raw, np.full(64, 0xCD, np.uint8)])))
            buffers[name] = m.pointer(held[-1]) + before
        outer, _, inner = rows_of(call)
        outs = {}
        for name, (is_row, storage) in results_of(call).items():
            size = (outer * inner if is_row else math.prod(call["shape"])) * storage.itemsize
            before = 0 if is_row else shift
            if name == "out" and in_place:
                outs[name] = held[0], before, size, storage, is_row
            else:
                outs[name] = m.empty(before + size + 64), before, size, storage, is_row
            buffers[name] = m.pointer(outs[name][0]) + before
        # The plan may depend on `general`, so the workspace has the larger of two sizes.
        needs = [self.launch(call, None, general=g, **kwargs)["workspace"] for g in (False, True)]
        workspace = m.empty(outer * max(needs) + 16)
        plan = self.launch(call, buffers | {"ws": m.pointer(workspace)}, **kwargs)
        results = {}
        for name, (array, before, size, storage, is_row) in outs.items():
            raw = m.get(array)
            around = np.concatenate([raw[:before] if not in_place else raw[:0], raw[before + size :]])
            assert (around == 0xCD).all(), f"wrote outside of {name}"
            shape = (outer, 1, inner) if is_row else rows_of(call)
            results[name] = raw[before : before + size].copy().view(storage).reshape(shape)
        if "log_sum" in results:
            results["lse"] = results.pop("maximum") + results.pop("log_sum")
        return results, plan


# ---- Check -----------------------------------------------------------------------------------------------------------


def random_call(rng, largest):
    family = rng.random() < 0.35
    op = str(rng.choice(REDUCE_OPS if family else SOFTMAX_OPS))
    if family:
        names = [n for n in DTYPE if not n.startswith("complex") and (n != "bool" or op in ("max", "min"))]
        dtype = DTYPE[str(rng.choice(names if rng.random() < 0.5 else FLOATS))]
    else:
        dtype = DTYPE[str(rng.choice(FLOATS))]
    shape, axis = random_shape(rng, largest)
    call = DEFAULTS | {"op": op, "dtype": dtype, "shape": shape, "axis": axis, "shapes": {}}
    thin = lambda p: tuple(1 if rng.random() < p else s for s in shape)
    row = (*shape[:axis], 1, *shape[axis + 1 :])
    thin_row = lambda p: tuple(1 if rng.random() < p else s for s in row)
    shapes = call["shapes"]
    narrow = dtype.storage.itemsize <= 2 and not dtype.integer
    if op in REDUCE_OPS:
        if rng.random() < 0.3:
            shapes["where"] = thin(0.3)
        call["wide"] = bool(op in ("sum", "dot") and narrow and rng.random() < 0.5)
        return call
    if op.startswith("cross"):
        call["label_smoothing"] = float(rng.choice([0, 0, 0.1]))
        call["z_loss"] = float(rng.choice([0, 0, 1e-2]))
        if rng.random() < 0.4:
            shapes["row_where"] = thin_row(0.3)
        if op == "cross_entropy_grad":
            shapes["cotangent"] = thin_row(0.3)
        return call
    call["factor"] = float(rng.choice([1, 1, 0.125, 0.3, -2])) if rng.random() < 0.5 else 1.0
    if rng.random() < 0.25:
        shapes["scale"] = thin_row(0.4)
    if op in ("softmax", "log_softmax", "logsumexp") and rng.random() < 0.25:
        shapes["bias"] = thin(0.4)
    if op != "softmax_jvp":
        if rng.random() < 0.25:
            shapes["where"] = thin(0.3)
        if axis and rng.random() < 0.2:
            at = int(rng.integers(axis))
            call["queries"] = shape[at]
            call["query_stride"] = math.prod(shape[at + 1 : axis])
    call["transpose"] = bool(op == "log_softmax_jvp" and rng.random() < 0.5)
    call["wide"] = bool(op == "logsumexp" and rng.random() < 0.5)
    return call


def random_values(rng, call, shape):
    dtype = call["dtype"]
    if dtype.name == "bool":
        return rng.random(shape) < 0.5
    if dtype.integer:
        info = np.iinfo(dtype.storage)
        return rng.integers(info.min, info.max, shape, dtype.storage, endpoint=True)
    x = rng.standard_normal(shape) * rng.choice([0.1, 1, 1, 5, 30])
    kind = rng.random()
    if kind < 0.1:
        x = np.full(shape, float(rng.standard_normal()))
    elif kind < 0.2:
        x = np.sort(x.reshape(-1)).reshape(shape)
    elif kind < 0.25:
        x = x * 1e4
    if rng.random() < 0.25 and call["op"] in (*SOFTMAX_OPS[:5], "max", "min"):
        x = np.where(rng.random(shape) < rng.choice([0.01, 0.5, 0.95]), -np.inf, x)
    if rng.random() < 0.15:
        x = np.where(rng.random(shape) < 3 / x.size, rng.choice([np.inf, np.nan, -np.inf]), x)
    return x


def random_operands(rng, call):
    """Returns {name of an operand: its bits as they are stored}."""
    op, dtype, shape, axis = (call[k] for k in ("op", "dtype", "shape", "axis"))
    wide = np.float64 if dtype.name == "float64" else np.float32
    operands = {"x": dtype.encode(random_values(rng, call, shape))}
    row = (*shape[:axis], 1, *shape[axis + 1 :])
    if op in ("softmax_jvp", "log_softmax_jvp"):
        y = rng.standard_normal(shape) * rng.choice([1, 10])
        with np.errstate(all="ignore"):
            y = y - np.log(np.exp(y).sum(axis, keepdims=True))
        y = np.exp(y) if op == "softmax_jvp" else y
        if op == "softmax_jvp" and rng.random() < 0.5:
            y = np.where(rng.random(shape) < 0.3, 0, y)
            y = y / np.maximum(y.sum(axis, keepdims=True), 1e-300)
            if rng.random() < 0.5:
                t = dtype.decode(operands["x"])
                operands["x"] = dtype.encode(np.where(dtype.decode(dtype.encode(y)) == 0, np.inf, t))
        operands["y"] = dtype.encode(y)
    if op == "dot":
        operands["y"] = dtype.encode(random_values(rng, call, shape))
    if op.startswith("cross"):
        operands["labels"] = rng.integers(0, shape[axis], row).astype(np.int32)
        if rng.random() < 0.2:
            wrong = rng.random(row) < 0.2
            operands["labels"] = np.where(wrong, rng.choice([-1, shape[axis]]), operands["labels"]).astype(np.int32)
    for name, part in call["shapes"].items():
        if name in ("where", "row_where"):
            operands[name] = (rng.random(part) < rng.choice([0.05, 0.5, 0.9])).astype(np.uint8)
        elif name == "bias":
            operands[name] = dtype.encode(rng.standard_normal(part) * 2)
        else:
            operands[name] = rng.standard_normal(part).astype(wide)
    if op == "log_softmax_jvp":  # y is what log_softmax gives: the probabilities of what is not masked add up to 1
        outer, length, inner = rows_of(call)
        where = operands.get("where")
        if where is not None:
            where = np.broadcast_to(where != 0, shape).reshape(outer, length, inner)
        rows = y.reshape(outer, length, inner)
        masked = logits_of(dict(call, factor=1), rows, None, None, where)[1]
        total = np.where(masked, 0, np.exp(rows)).sum(1, keepdims=True)
        operands["y"] = dtype.encode((rows - np.log(np.where(total > 0, total, 1))).reshape(shape))
    return operands


def expected_of(call, operands):
    dtype, rows = call["dtype"], rows_of(call)
    given = dict.fromkeys(("x", "y", *PARTS, "labels"))
    for name, array in operands.items():
        row = (rows[0], 1, rows[2])
        if name in ("x", "y", "bias"):
            array = dtype.decode(array)
        if name in ("where", "row_where"):
            array = array != 0
        shape, axis = call["shape"], call["axis"]
        whole = (*shape[:axis], 1, *shape[axis + 1 :])
        if name in ("x", "y", "bias", "where"):
            given[name] = np.broadcast_to(array, shape).reshape(rows)
        else:
            given[name] = np.broadcast_to(array, whole).reshape(row)
    with np.errstate(all="ignore"):
        if call["op"] in REDUCE_OPS:
            return expected_reduction(call, given["x"], given["y"], given["where"])
        names = ("x", "y", "scale", "bias", "where", "labels", "row_where", "cotangent")
        return expected_softmax(call, *(given[name] for name in names))


def tolerance_of(call, result, want, expected):
    """The error that a result of a call may have."""
    dtype, op = call["dtype"], call["op"]
    exact = 1e-13 if dtype.name == "float64" else 4e-7  # the error of intermediate results
    storage = storage_of(call, result)
    last = 0 if storage in (np.float32, np.float64) else dtype.tolerance  # the error of the last rounding
    if dtype.storage.itemsize == 1:
        last *= 2  # with so few digits, another order of additions often rounds to another neighbour
    with np.errstate(all="ignore"):
        if op in REDUCE_OPS:
            size = call.get("size", 0)
            return last * abs(want) + exact * 8 * size
        if op in ("softmax", "cross_entropy_grad", "softmax_jvp") and result == "out":
            if op == "softmax":
                slack = 1e-4 if dtype.storage.itemsize == 2 else exact * 4
                below = np.where(want > 0, -np.log(want), 0)  # how far the logit is below the maximum: it is rounded
                least = 6e-8 if dtype.name == "float16" else 1e-37  # denormals
                return (last + slack + exact / 4 * below) * abs(want) + least
            size = np.nanmax(np.where(np.isfinite(want), abs(want), 0)) if want.size else 0
            return (last + exact * 10) * abs(want) + 20 * exact * (size + 1)
        if op == "log_softmax_jvp":
            return last * abs(want) + 40 * exact * (call["size"] + 1)
        return (last + exact * 2) * abs(want) + exact * 4


def geometries(lab, rng, call):
    """Ways to run a call that must give the same bits."""
    plan = lab.launch(call, None)
    yield {"capability": 90}
    yield {"capability": 80}
    if plan["algorithm"] in ("rows", "rows_stream") and plan["spans"] > 1:
        for cluster in (1, 2, 4, 8, 16):
            if 1 <= -(-plan["spans"] // cluster) <= 32 and rng.random() < 0.5:
                yield {"cluster": cluster}
    elif plan["algorithm"] == "rows":
        yield {"block_warps": int(rng.choice([1, 2, 8]))}
    elif plan["algorithm"].startswith("columns"):
        yield {"cluster": 1}  # streamed, however few
    yield {"split": True}


def check_call(lab, rng, call):
    operands = random_operands(rng, call)
    dtype, op = call["dtype"], call["op"]
    with np.errstate(all="ignore"):
        expected = expected_of(call, operands)
    offset = int(rng.choice([0, 0, 1, 3, 5]))
    runs = []
    for kwargs in geometries(lab, rng, call):
        in_place = op == "cross_entropy_grad" and rng.random() < 0.5
        runs.append((kwargs, *lab.run(call, operands, offset, in_place, **kwargs)))
    other = int(rng.choice([0, 1, 2, 4]))
    runs.append(({"offset": other}, *lab.run(call, operands, other)))
    shape, axis = call["shape"], call["axis"]
    if axis > 0 and shape[0] > 1 and not (call["queries"] and axis == 1):  # a part of the batch
        first = lambda s: (1, *s[1:])
        alone = dict(call, shape=first(shape), shapes={k: first(s) for k, s in call["shapes"].items()})
        runs.append(({"alone": True}, *lab.run(alone, {k: a[:1] for k, a in operands.items()}, offset)))
    bad = ""
    for name, bits in runs[0][1].items():
        for kwargs, results, plan in runs[1:]:
            # The parts of broadcast operands are equal where a part of the batch is taken.
            mine, others = results[name].view(np.uint8), bits.view(np.uint8)[: len(results[name])]
            if not np.array_equal(mine, others):
                bad += f" {name}: bits with {kwargs} {plan} differ;"
        want = expected[name]
        storage = storage_of(call, name)
        if dtype.integer:
            got = bits
            wrong = got != want
        else:
            got = bits.astype(np.float64) if storage in (np.float32, np.float64) else dtype.decode(bits)
            with np.errstate(all="ignore"):
                if storage not in (np.float32, np.float64):
                    want = dtype.decode(dtype.encode(want))
                elif storage == np.float32:
                    want = want.astype(np.float32).astype(np.float64)
                tolerance = tolerance_of(call, name, want, expected)
                same = (got == want) | (np.isnan(got) & np.isnan(want)) | (abs(got - want) <= tolerance)
                edge = {"float8_e4m3fn": 350, "float8_e5m2": 45000, "float16": 60000}.get(dtype.name, 3e38)
                same |= ~np.isfinite(got) & (abs(want) > edge) | ~np.isfinite(want) & (abs(got) > edge)
                wrong = ~same
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0])
            bad += f" {name}: {wrong.sum()} of {wrong.size} wrong, first at {at}: {got[at]!r}, not {want[at]!r};"
    if bad:
        shown = {k: v.name if k == "dtype" else v for k, v in call.items() if k != "size" and v != DEFAULTS.get(k)}
        print(f"WRONG:{bad[:1500]}\n  {shown} offset {offset}\n  {runs[0][2]}", flush=True)
    return not bad, [plan for _, _, plan in runs]


def check(lab, largest):
    seed, cases = int(os.environ.get("SEED", "0")), int(os.environ.get("CASES", "1500"))
    right, wrong, seen, begin = 0, 0, {}, time.time()
    for case in range(seed, seed + cases):
        rng = np.random.default_rng(case)
        call = random_call(rng, largest)
        if os.environ.get("ONLY", "") not in call["op"]:
            continue
        good, plans = check_call(lab, rng, call)
        right, wrong = right + good, wrong + (not good)
        if not good:
            print(f"  (case {case})", flush=True)
        for plan in plans:
            key = (plan["algorithm"], "vector" if plan["vector"] else f"V{plan['vectors']}")
            seen[key] = seen.get(key, 0) + 1
    for key in sorted(seen):
        print(*key, seen[key])
    print(f"{right} right, {wrong} wrong, {time.time() - begin:.0f} s", flush=True)
    return wrong


# ---- Time ------------------------------------------------------------------------------------------------------------

# op, shape, axis, dtype, target in microseconds (negative: times the floor)
SHAPES = [
    ((32768, 256), 1, (9.3, 18.2)),
    ((32768, 1024), 1, (35, 67)),
    ((32768, 4096), 1, (131, 258)),
    ((16384, 16384), 1, (258, 515)),
    ((8192, 65536), 1, (513, 1022)),
]
GRID = [
    *(("softmax", s, a, d, t[i]) for s, a, t in SHAPES for i, d in enumerate(("bfloat16", "float32"))),
    ("softmax", (4096, 262144), 1, "bfloat16", 1040),
    ("softmax", (2048, 262144), 1, "float32", 1040),
    ("softmax", (64, 128256), 1, "bfloat16", 10.5),
    ("softmax", (64, 128256), 1, "float32", 19),
    ("softmax", (1, 128256), 1, "float32", 4.5),
    ("softmax", (1, 1 << 26), 1, "float32", 234),
    ("softmax", (4096, 32768), 0, "float32", -1.06),
    ("softmax", (64, 1024, 2048), 1, "float32", -1.06),
    ("softmax_jvp", (32768, 256), 1, "float32", 25),
    ("softmax_jvp", (16384, 16384), 1, "bfloat16", 370),
    ("softmax_jvp", (16384, 16384), 1, "float32", 735),
    ("softmax_jvp", (8192, 131072), 1, "bfloat16", 1520),
    ("softmax_jvp", (2048, 262144), 1, "float32", 1520),
    ("softmax_jvp", (64, 128256), 1, "float32", 27),
    ("cross_entropy", (8192, 128256), 1, "bfloat16", 490),
    ("cross_entropy_grad", (8192, 128256), 1, "bfloat16", 1100),
    ("cross_entropy_grad", (4096, 262144), 1, "bfloat16", 1130),
    *(("logsumexp", s, a, d, -1.08) for s, a, _ in SHAPES for d in ("bfloat16", "float32")),
    ("logsumexp", (2048, 262144), 1, "float32", -1.08),
    ("logsumexp", (64, 128256), 1, "float32", -1.08),
    ("logsumexp", (1, 128256), 1, "float32", -1.08),
    ("logsumexp", (1, 1 << 26), 1, "float32", -1.08),
    ("logsumexp", (4096, 32768), 0, "float32", -1.08),
    ("logsumexp", (64, 1024, 2048), 1, "float32", -1.08),
]
MORE = [
    *(("sum", s, a, "float32", -1.05) for s, a, _ in SHAPES),
    ("sum", (1 << 28,), 0, "float32", -1.05),
    ("sum", (65536, 1024), 0, "float32", -1.05),
    ("sum", (65536, 1024), 0, "bfloat16", -1.05),
    ("sum", (16384, 16384), 1, "bfloat16", -1.05),
    ("sum", (16384, 16384), 1, "int32", -1.05),
    ("sum", (16384, 16384), 1, "int8", -1.05),
    ("max", (16384, 16384), 1, "float32", -1.05),
    ("max", (16384, 16384), 1, "bfloat16", -1.05),
    ("dot", (16384, 16384), 1, "float32", -1.05),
    ("log_softmax", (16384, 16384), 1, "bfloat16", 258),
    ("log_softmax", (16384, 16384), 1, "float32", 515),
    ("log_softmax_jvp", (16384, 16384), 1, "bfloat16", 370),
    ("softmax", (16384, 16384), 1, "float64", -1.1),
    ("softmax", (16384, 50257), 1, "bfloat16", -1.1),
    ("softmax", (16384, 50257), 1, "float32", -1.1),
    ("softmax", (32768, 1001), 1, "bfloat16", -1.1),
    ("softmax", (32768, 1001), 1, "float32", -1.1),
    ("softmax", (8192, 151936), 1, "bfloat16", -1.1),
    ("softmax", (1 << 20, 64), 1, "float32", -1.1),
    ("softmax", (1 << 22, 17), 1, "float32", -1.1),
    ("softmax", (1 << 24, 4), 1, "float32", -1.1),
    ("softmax", (16, 1 << 20), 1, "float32", -1.5),
    ("softmax", (256, 1 << 20), 1, "float32", -1.5),
    ("softmax", (1 << 20, 32, 4), 1, "float32", -1.5),
    ("softmax", (64, 4096, 100), 1, "float32", -1.3),
    ("softmax", (8, 65536, 128), 1, "float32", -1.5),
    ("softmax", (256, 8, 65536), 1, "float32", -1.1),
    ("softmax_jvp", (4096, 32768), 0, "float32", -1.1),
    ("softmax_jvp", (4096, 32768), 0, "bfloat16", -1.1),
    ("softmax_jvp", (64, 1024, 2048), 1, "float32", -1.1),
    ("log_softmax_jvp", (64, 1024, 2048), 1, "float32", -1.1),
    ("softmax_jvp", (16384, 50257), 1, "bfloat16", -1.1),
    ("softmax masked", (32, 16, 1024, 1024), 3, "bfloat16", -1.3),
    ("softmax causal", (32, 16, 1024, 1024), 3, "bfloat16", -1.0),
    ("softmax biased", (32, 16, 1024, 1024), 3, "bfloat16", -1.5),
]


def grid_call(point):
    op, shape, axis, dtype, _ = point
    op, _, extra = op.partition(" ")
    call = DEFAULTS | {"op": op, "dtype": DTYPE[dtype], "shape": shape, "axis": axis, "shapes": {}}
    if extra == "masked":
        call["shapes"]["where"] = (shape[0], 1, *shape[2:])
    if extra == "biased":
        call["shapes"]["bias"] = (1, *shape[1:])
    if extra == "causal":
        call["queries"] = shape[2]
    if op == "cross_entropy_grad":
        call["shapes"]["cotangent"] = (1,) * len(shape)
    return call


def full_passes(call):
    """Full arrays that are read, and written."""
    op = call["op"]
    return 2 if op.endswith("jvp") or op == "dot" else 1, 0 if results_of(call)[next(iter(results_of(call)))][0] else 1


def device_operands(torch, call, seed=0):
    """Returns {name of an operand: its tensor}."""
    dtype, shape, axis = call["dtype"], call["shape"], call["axis"]
    torch.manual_seed(seed)
    t = getattr(torch, dtype.name)
    full = lambda s: torch.randn(s, device="cuda").to(t) if not dtype.integer else torch.ones(s, device="cuda").to(t)
    row = (*shape[:axis], 1, *shape[axis + 1 :])
    operands = {"x": full(shape)}
    if full_passes(call)[0] == 2:
        operands["y"] = full(shape) if call["op"] != "softmax_jvp" else torch.rand(shape, device="cuda").to(t)
    if call["op"].startswith("cross"):
        operands["labels"] = torch.randint(shape[axis], row, device="cuda", dtype=torch.int32)
    for name, part in call["shapes"].items():
        if name == "where":
            operands[name] = torch.rand(part, device="cuda") < 0.5
        elif name == "bias":
            operands[name] = full(part)
        else:
            operands[name] = torch.ones(part, device="cuda")
    return operands


def device_results(torch, call):
    outer, _, inner = rows_of(call)
    types = {2: torch.int16, 4: torch.float32, 8: torch.float64, 1: torch.uint8}
    return {
        name: torch.empty(
            outer * inner if is_row else call["shape"],
            device="cuda",
            dtype=types[storage.itemsize] if is_row else getattr(torch, call["dtype"].name),
        )
        for name, (is_row, storage) in results_of(call).items()
    }


_floors = {}


def floor_of(lab, size, passes):
    """Microseconds to read (passes[1] == 0) or to copy the same bytes, with a plain kernel."""
    key = size, passes
    if key not in _floors:
        torch, m = lab.machine.torch, lab.machine
        moved = size * sum(passes)
        each = moved // (2 if passes[1] else 1) // 16 * 16
        sets = max(2, min(64, -(-(200 << 20) // each)))
        pairs = [
            [torch.zeros(each if i == 0 or passes[1] else 16, dtype=torch.uint8, device="cuda") for i in range(2)]
            for _ in range(sets)
        ]
        run = lambda i: lab.kernels.lab_floor(
            m.stream,
            *(ctypes.c_void_p(m.pointer(x)) for x in pairs[i % sets]),
            ctypes.c_int64(each),
            int(passes[1] > 0),
        )
        _floors[key] = replay(torch, run, sets * max(1, min(256, int(4e9 / moved)) // sets))
        del pairs
    return _floors[key]


def time_call(lab, call, **tuning):
    torch, m = lab.machine.torch, lab.machine
    size = math.prod(call["shape"]) * call["dtype"].storage.itemsize
    passes = full_passes(call)
    sets = max(2, min(64, -(-(200 << 20) // (size * sum(passes)))))
    plan = lab.launch(call, None, general=False, **tuning)
    assert rows_of(call)[0] * plan["workspace"] <= m.workspace.numel()
    inputs = [device_operands(torch, call, i) if i < 4 else None for i in range(sets)]
    for i in range(4, sets):
        inputs[i] = {name: tensor.clone() for name, tensor in inputs[i % 4].items()}
    outs = [device_results(torch, call) for _ in range(sets)]
    pointers = [
        {n: m.pointer(t) for n, t in (i | o).items()} | {"ws": m.pointer(m.workspace)} for i, o in zip(inputs, outs)
    ]
    count = sets * max(1, min(256, int(4e9 / (size * sum(passes)))) // sets)
    return replay(torch, lambda i: lab.launch(call, pointers[i % sets], **tuning), count), plan


def show(lab, points):
    for point in points:
        op, shape, axis, dtype, target = point
        name = f"{op} {shape} axis {axis} {dtype}"
        if os.environ.get("ONLY", "") not in name:
            continue
        call = grid_call(point)
        floor = floor_of(lab, math.prod(shape) * call["dtype"].storage.itemsize, full_passes(call))
        us, plan = time_call(lab, call)
        goal = -target * floor if target < 0 else target
        mark = " " if us <= goal else "!"
        shown = " ".join(str(plan[k]) for k in FACTS[:-1])
        print(
            f"{name:56} {us:8.2f} us{mark} target {goal:8.2f} floor {floor:8.2f} = {floor / us:4.0%}  {shown}",
            flush=True,
        )


def random_points(count):
    rng = np.random.default_rng(int(os.environ.get("SEED", "0")))
    for _ in range(count):
        op = str(rng.choice(["softmax", "logsumexp", "softmax_jvp", "sum", "max", "dot"]))
        yield op, random_rows(rng), 1, str(rng.choice(["float32", "bfloat16", "float64"])), -1


def other_geometries(lab, call):
    """Tunings that are compiled for this call, beside the plan's."""
    plan = lab.launch(call, None)
    if plan["algorithm"] != "rows":
        return
    for vectors in (1, 4, 8) if call["op"] in ("softmax", "logsumexp", "sum", "log_softmax") else (1, 4):
        planned = lab.launch(call, None, vectors=vectors)
        if planned["spans"] > 1:
            yield from (
                {"vectors": vectors, "cluster": c}
                for c in (1, 2, 4, 8, 16)
                if -(-planned["spans"] // c) <= 32 and planned["spans"] >= 2 * c
            )
        elif planned["lanes"] * vectors >= 4:
            yield from ({"vectors": vectors, "block_warps": warps} for warps in (1, 2, 4, 8))


def sweep(lab):
    seen = Sweep()
    for point in [*GRID, *MORE, *random_points(int(os.environ.get("CASES", "100")))]:
        call = grid_call(point)
        if os.environ.get("ONLY", "") not in str(point):
            continue
        tunings = list(other_geometries(lab, call))
        if tunings:
            others = [(time_call(lab, call, **tuning)[0], tuning) for tuning in tunings]
            seen.add(point[:4], time_call(lab, call), others)
    seen.end()


def check_large(lab):
    """The targets' shapes, the first and last rows against float64."""
    torch, m = lab.machine.torch, lab.machine
    wrong = 0
    for point in GRID + MORE:
        call = grid_call(point)
        if call["shapes"] or call["queries"] or call["op"].startswith("cross"):
            continue
        operands, outs = device_operands(torch, call), device_results(torch, call)
        buffers = {n: m.pointer(t) for n, t in (operands | outs).items()} | {"ws": m.pointer(m.workspace)}
        m.workspace.fill_(0xCD)
        plan = lab.launch(call, buffers)
        torch.cuda.synchronize()
        rows = rows_of(call)
        pick = lambda x, r: torch.stack([x.reshape(r)[i, :, j] for i in (0, -1) for j in (0, -1)])
        host = lambda t: t.double().cpu().numpy()[..., None]
        dtype = call["dtype"]
        if dtype.integer:
            host = lambda t, dtype=dtype: t.cpu().numpy().astype(dtype.storage)[..., None]
        x, y = (host(pick(operands[n], rows)) if n in operands else None for n in ("x", "y"))
        local = dict(call, shape=(4, rows[1]), axis=1)
        with np.errstate(all="ignore"):
            if call["op"] in REDUCE_OPS:
                expected = expected_reduction(local, x, y, None)
            else:
                expected = expected_softmax(local, x, y, None, None, None, None, None, None)
        for name, want in expected.items():
            is_row, storage = results_of(call)[name]
            got = pick(outs[name], (rows[0], 1, rows[2]) if is_row else rows).cpu()
            got = got.view(torch.int16).numpy().view(np.uint16) if got.element_size() == 2 else got.numpy()
            got = dtype.decode(got.view(storage)).astype(np.float64)[..., None]
            error = abs(got - want)
            limit = tolerance_of(local, name, want, expected)
            good = (error <= limit * (1 + 0.001 * rows[1] ** 0.5)).all()
            wrong += not good
            print(
                "right" if good else f"WRONG {np.max(error)} of {np.max(want)}", *map(str, point[:4]), plan, flush=True
            )
        del operands, outs
        torch.cuda.empty_cache()
    return wrong


def compiled():
    """Compiles the kernels with nvcc. No GPU is needed."""
    build("softmax", SOURCES)


def check_on_gpu():
    """Random calls of every kind, on hostile data, against float64; every geometry must give the same bits."""
    return check(Lab(Gpu()), int(os.environ.get("LARGEST", str(1 << 19))))


def emulate():
    """The same checks with kernels that were built for the host."""
    return check(Lab(Host()), int(os.environ.get("LARGEST", str(1 << 15))))


def large():
    """The shapes of the targets against float64."""
    return check_large(Lab(Gpu()))


def times():
    """The targets' grid, and the time to move as many bytes."""
    show(Lab(Gpu()), GRID)


def more():
    """Times points outside the grid."""
    show(Lab(Gpu()), MORE)


def sweep_on_gpu():
    """Grid, other points and random ones: where the plan lost more than 5 % to another geometry."""
    sweep(Lab(Gpu()))


STAGES = {"build": compiled, "check": check_on_gpu, "emulate": emulate, "large": large}
STAGES |= {"time": times, "more": more, "sweep": sweep_on_gpu}
