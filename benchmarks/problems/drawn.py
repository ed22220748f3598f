"""Random problems of every family."""

import math
import random

from benchmarks.problems.counting import count
from benchmarks.problems.experts import moe
from benchmarks.problems.gradients import MOVED, grad
from benchmarks.problems.problem import Problem
from benchmarks.problems.rows import ce, gate, reduce, softmax
from benchmarks.problems.scans import linear, scan
from benchmarks.problems.segments import ragged
from benchmarks.problems.selection import arg, places, rank, sort, topk

FLOATS = ["float32"] * 4 + ["bfloat16"] * 3 + ["float16", "float64"]
DTYPES = FLOATS * 2 + ["int32"] * 3 + ["int8", "uint8", "int16", "int64"]
DATA = ["normal"] * 4 + ["ties", "constant", "rising", "falling"]  # "ties": of some 25 values
EXPERTS = [8, 16, 60, 64, 128, 160, 256, 384, 512]


def _log_uniform(source: random.Random, low: int, high: int) -> int:
    return round(math.exp(source.uniform(math.log(low), math.log(max(low, high)))))


def _shape(source: random.Random, elements: int, shortest: int) -> tuple[int, ...]:
    """Rows along axis 1, half of them as long as a power of two, a quarter with a dimension after them."""
    length = _log_uniform(source, shortest, min(elements, 1 << 24))
    if source.random() < 0.5:
        length = max(shortest, 1 << length.bit_length() - 1)
    rows = _log_uniform(source, 1, max(1, elements // length))
    if rows > 1 and source.random() < 0.25:
        inner = _log_uniform(source, 2, rows)
        return max(1, rows // inner), length, inner
    return rows, length


def _drawn_ragged(source, shape, dtype, about):
    rows, n = shape[:2]
    op = source.choice(["sort", "sort", "topk", "softmax"])
    dtype = source.choice(FLOATS) if op == "softmax" and dtype not in FLOATS else dtype
    rows = min(rows, 256) if op == "softmax" else rows
    k = _log_uniform(source, 1, min(n, 1024))
    return ragged((rows, n), 1, dtype, op=op, count=_log_uniform(source, 1, n), k=k, **about)


def _drawn_moe(source, elements, dtype, about):
    experts, k = source.choice(EXPERTS), source.choice([1, 2, 4, 6, 8])
    dtype = dtype if dtype in FLOATS else source.choice(FLOATS)
    tokens = _log_uniform(source, 1, max(1, elements // 64 // k))
    width = _log_uniform(source, 1, max(1, min(8192, elements // tokens // k)))
    op = source.choice(["plan", "rows"])
    return moe((tokens, width), 0, dtype, experts=experts, k=k, op=op, **about)


def drawn(family: str, seed: int, index: int, elements: int, shortest: int = 2) -> Problem:
    """A random problem of a family, the same for the same arguments, of up to so many elements."""
    source = random.Random(f"{seed} {family} {index}")
    elements = elements // 2 if family in ("linear", "grad") else elements  # JAX needs several arrays more
    shape = _shape(source, elements, shortest)
    dtype = source.choice(DTYPES)
    # Most programs take few of many; some take all.
    k = source.choice([_log_uniform(source, 1, min(shape[1], 4096)), _log_uniform(source, 1, shape[1])])
    about = {"data": source.choice(DATA), "name": f"{family}/{index}"}
    if family in ("linear", "softmax", "ce", "gate", "grad") and dtype not in FLOATS:
        dtype = source.choice(FLOATS)
    if family == "topk":
        return topk(shape, 1, dtype, k=k, largest=source.random() < 0.8, sorted=source.random() < 0.8, **about)
    if family == "sort":
        return sort(shape, 1, dtype, op=source.choice(["sort", "argsort"]), **about)
    if family == "arg":
        return arg(shape, 1, dtype, op=source.choice(["argmax", "argmin"]), **about)
    if family == "rank":
        op = source.choice(["kth_value", "kth_value", "partition", "median", "quantile"])
        dtype = source.choice(FLOATS) if op in ("median", "quantile") and dtype not in FLOATS else dtype
        return rank(shape, 1, dtype, op=op, k=source.choice([shape[1] // 2, source.randrange(shape[1])]), **about)
    if family == "places":
        op, size = source.choice(["searchsorted", "searchsorted", "nonzero", "unique"]), math.prod(shape)
        rows = source.choice([1, max(1, min(shape[0], elements // shape[1]))])
        size = _log_uniform(source, 1, size // rows if op == "searchsorted" else size)
        return places((rows, shape[1]), 1, dtype, op=op, size=size, **about)
    if family == "scan":
        op = source.choice(["cumsum", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
        dtype = source.choice(FLOATS) if op == "cumlogsumexp" and dtype not in FLOATS else dtype
        return scan(shape, 1, dtype, op=op, reverse=source.random() < 0.3, **about)
    if family == "linear":
        return linear(shape, 1, dtype, reverse=source.random() < 0.3, **about)
    if family == "softmax":
        return softmax(shape, 1, dtype, op=source.choice(["softmax", "softmax", "log_softmax", "logsumexp"]), **about)
    if family == "ce":
        rows, classes = _log_uniform(source, 16, 16384), _log_uniform(source, 100, min(262144, elements))
        return ce((max(1, min(rows, 4 * elements // classes)), classes), 1, dtype, **about)
    if family == "gate":
        experts, rows = source.choice(EXPERTS), _log_uniform(source, 16, 1 << 17)
        rows = max(1, min(rows, elements // experts))
        return gate((rows, experts), 1, dtype, k=source.choice([1, 2, 4, 6, 8]), **about)
    if family == "reduce":
        op = source.choice(["sum", "max", "min", "mean"])
        dtype = source.choice(FLOATS) if op == "mean" and dtype not in FLOATS else dtype
        return reduce(shape, 1, dtype, op=op, **about)
    if family == "count":
        op = source.choice(["bincount", "bincount", "segment_sum", "segment_sum", "segment_max", "segment_min"])
        if op != "bincount":
            rows = _log_uniform(source, 1, elements)
            features = source.choice([1, _log_uniform(source, 1, max(1, elements // rows))])
            bins = _log_uniform(source, 1, min(2 * rows, max(1, elements // features)))
            return count((rows, min(features, 16384)), 0, dtype, op=op, bins=bins, **about)
        bins = _log_uniform(source, 1, min(1 << 20, max(2 * shape[1], 512)))
        return count((min(shape[0], max(1, elements // bins)), shape[1]), 1, "int32", op=op, bins=bins, **about)
    if family == "ragged":
        return _drawn_ragged(source, shape, dtype, about)
    if family == "moe":
        return _drawn_moe(source, elements, dtype, about)
    op = source.choice([*MOVED, "softmax", "log_softmax"])
    return grad(shape, 1, dtype, op=op, k=min(k, 4096), **about)


FAMILIES = [
    "topk",
    "sort",
    "arg",
    "rank",
    "places",
    "scan",
    "linear",
    "softmax",
    "ce",
    "gate",
    "reduce",
    "count",
    "ragged",
    "moe",
    "grad",
]
