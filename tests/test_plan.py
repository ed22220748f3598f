"""The plan of the CUDA kernels: a pure function of shapes, so it is tested where there is no GPU."""

import itertools
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jaxgpuops

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # last: the installed jaxgpuops comes first
from benchmarks import topk as benchmark

plan_topk = jaxgpuops._native.modules["cpu"].plan_topk
plan_argmax = jaxgpuops._native.modules["cpu"].plan_argmax

ALGORITHMS = {
    "empty",
    "argmax",
    "rows",
    "sort",
    "compare",
    "held",
    "stream",
    "grid",
    "wave",
    "sieve",
    "columns",
    "buckets",
    "radix",
}
ALGORITHMS |= {"short", "block", "sweep"}  # kernels of the sort family, which sort whole rows
# KB of shared memory that a block may have, from the table of compute capabilities in the CUDA programming guide.
SHARED_LIMIT = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
CAPABILITIES = tuple(SHARED_LIMIT)

OUTER = (1, 3, 100, 600, 65536)
LENGTHS = (2, 33, 256, 1000, 4096, 16385, 50_000, 128256, 1 << 20, (1 << 31) - 1)
INNER = (1, 5, 256)
KS = (1, 2, 32, 65, 2048, 2049, 100_000)
BITS = (8, 16, 32, 64)


def calls():
    """A grid over everything that the plan depends on, except for the compute capability."""
    for outer, length, inner, k, bits, sorted in itertools.product(OUTER, LENGTHS, INNER, KS, BITS, (True, False)):
        if outer * length * inner < 1 << 40:
            yield outer, length, inner, min(k, length), bits, sorted


def rows(shape, axis):
    return int(np.prod(shape[:axis])), shape[axis], int(np.prod(shape[axis + 1 :]))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("point", benchmark.GPU, ids=lambda point: benchmark.name_of(*point[:4]))
def test_every_benchmark_has_a_fitting_kernel(point, capability):
    shape, axis, dtype, k, *_ = point
    outer, length, inner = rows(shape, axis)
    bits = 8 * jnp.dtype(dtype).itemsize
    plan = plan_topk(outer, length, inner, k, bits, True, capability)
    if k == 1:
        expected = {"argmax"}
    elif inner > 1:
        expected = {"columns"}
    elif k <= 256 and outer <= 4 and length * bits >= 1 << 20:
        expected = {"wave"}
    elif k <= 64 and length <= 16384:
        expected = {"rows"}
    elif k <= 64 and length <= 131072 and capability in (90, 100):
        expected = {"held"}
    elif k > 256 and SHARED_LIMIT[capability] == 227:
        expected = {"sieve"}
    else:
        expected = {"stream", "grid", "buckets"}
    if (
        k > 1 and SHARED_LIMIT[capability] < 163
    ):  # if the best kernel does not fit, the next best one may take its place
        expected |= {"stream", "grid", "buckets", "radix", "block", "sweep"}
    assert plan["algorithm"] in expected
    if length <= 4096:
        assert plan["slices"] == 1
    # Scratch memory that would show in a memory profile, or in the time, is a bug.
    if plan["algorithm"] not in ("buckets", "radix", "sweep"):
        assert outer * plan["workspace_bytes"] <= max(8 << 20, outer * length * inner * bits // 8 // 20)


def test_every_algorithm_is_reached():
    others = [(0, 5, 1, 2, 32, True), (3, 9000, 1, 9000, 32, True)]
    found = {plan_topk(*call, 90)["algorithm"] for call in [*calls(), *others]}
    assert found == ALGORITHMS


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_forms(capability):
    for call in calls():
        _, length, inner, _, bits, _ = call
        plan = plan_topk(*call, capability)
        assert set(plan) == {"algorithm", "lanes", "threads", "slices", "blocks", "workspace_bytes", "shared_bytes"}, (
            call
        )
        assert plan["algorithm"] in ALGORITHMS - {"empty"}, call
        assert 1 <= plan["lanes"] <= 1024 and 32 <= plan["threads"] <= 1024 and plan["threads"] % 32 == 0, (call, plan)
        assert plan["slices"] >= 1, call
        assert plan["slices"] <= length, (call, plan)
        # Clusters need compute capability 9.0; blocks that share a row in the held and stream kernels are one.
        if plan["algorithm"] in ("held", "stream") and plan["slices"] > 1:
            assert capability >= 90, call
            assert plan["slices"] in (2, 4, 8, 16), (call, plan)
        if plan["algorithm"] == "sieve":
            assert plan["workspace_bytes"] % 16 == 0, (call, plan)  # the workspace of the next row follows it
        # The workspace has at most two composites of value and index for each element, and some room for counters. Rows
        # that are sorted whole have two of both, counters of 256 digits for each tile, and columns turned into rows.
        key, composite = bits // 8, 16 if bits == 64 else 8
        most = 2 * composite * length + length // 256
        if plan["algorithm"] in ("block", "sweep"):
            most = (2 * (key + 4) + 1024 * key / 3072 + (2 * key + 4) * (inner > 1)) * length
        assert 0 <= plan["workspace_bytes"] <= (most + 65536) * inner, (call, plan)


def test_only_clusters_are_missing_on_older_gpus():
    """Kernels exist beside those that need more shared memory: for the largest k of the sieve, and for 64-bit elements."""
    for call in calls():
        _, _, _, k, bits, sorted = call
        new, old = plan_topk(*call, 90), plan_topk(*call, 80)
        if all(new[key] == old[key] for key in ("algorithm", "lanes", "threads", "slices")):
            continue
        if new["algorithm"] in ("held", "sieve"):
            assert old["algorithm"] in (
                ("stream", "grid", "buckets") if k <= 2048 else ("buckets", "radix", "sweep")
            ), call
        elif new["algorithm"] == "compare":
            assert not sorted and 1 < new["slices"] <= 8, call
        elif new["algorithm"] == "argmax":
            assert new["slices"] > 1 and new["workspace_bytes"] == 0 and old["algorithm"] == "argmax", call
        elif bits == 64:
            assert new["algorithm"] in ("stream", "grid", "buckets"), call
            assert old["algorithm"] in ("stream", "grid", "buckets", "radix"), call
        else:
            assert new["algorithm"] == "stream", call  # a block has fewer threads where two share a multiprocessor
            assert old["algorithm"] in (("grid", "buckets") if new["slices"] > 1 else ("stream",)), call


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_shared_memory_is_there(capability):
    for call in calls():
        plan = plan_topk(*call, capability)
        assert 0 <= plan["shared_bytes"] <= SHARED_LIMIT[capability] * 1024 - 1024, (call, plan)  # static shared memory


def test_nothing_to_do():
    for outer, length, inner, k in [(0, 5, 1, 2), (3, 5, 0, 2), (3, 5, 1, 0), (3, 0, 1, 0)]:
        plan = plan_topk(outer, length, inner, k, 32, True, 90)
        assert plan["algorithm"] == "empty" and plan["workspace_bytes"] == 0


def test_pure():
    """The same call gets the same plan, whatever was planned before: a program may be compiled more than once."""
    some = list(calls())[::7]
    forward = [plan_topk(*call, 90) for call in some]
    backward = [plan_topk(*call, 90) for call in reversed(some)]
    assert forward == backward[::-1]


def test_argmax():
    for outer, length, inner, bits in itertools.product(OUTER, LENGTHS, INNER, BITS):
        plan = plan_argmax(outer, length, inner, bits, 90)
        assert plan["algorithm"] == "argmax" and plan["slices"] >= 1
        assert 0 <= plan["workspace_bytes"] <= inner * (length * bits // 8 // 16 + 16)
        assert plan == plan_topk(outer, length, inner, 1, bits, True, 90)  # k = 1 takes the kernels of argmax
    assert plan_argmax(0, 5, 1, 32, 90)["algorithm"] == "empty"


def test_argmax_keeps_the_device_busy():
    # Blocks that have the columns of an outer index: the more there are, the fewer threads they have.
    for outer, length, inner, bits, threads in (
        (220, 426, 32, 64, 256),
        (1717, 426, 32, 32, 64),
        (6822, 426, 16, 16, 32),
        (3321, 2000, 7, 16, 64),  # 63, since a warp would have four lanes too few
        (600, 20_000, 2, 8, 96),
    ):
        assert plan_argmax(outer, length, inner, bits, 90)["threads"] == threads, (outer, length, inner, bits)
    # Clusters that share some tens of rows need no workspace.
    for outer, length, bits, slices in (
        (35, 131_072, 8, 2),
        (50, 65_536, 32, 4),
        (66, 65_536, 8, 2),
        (67, 65_536, 8, 1),
    ):
        plan = plan_argmax(outer, length, 1, bits, 90)
        assert (plan["slices"], plan["workspace_bytes"]) == (slices, 0), (outer, length, bits)


# Problems at the edges of the regions of the kernels, and which was the fastest on an H200 of those that could take
# them, by 15 to 300 %.
FASTEST = [
    ((43, 3042, 2), 5, "bfloat16", "stream"),
    ((6, 6272, 5), 8, "bfloat16", "stream"),
    ((16, 7046, 30), 3, "bfloat16", "stream"),
    ((28, 3159, 4), 28, "float32", "stream"),
    ((23, 2433, 36), 10, "bfloat16", "columns"),
    ((459, 1141, 12), 39, "bfloat16", "columns"),
    ((8, 3080, 38), 3, "float32", "columns"),
    ((2769, 18, 22), 4, "bfloat16", "sort"),
    ((2769, 18, 22), 4, "float32", "sort"),
    ((356, 195, 7), 6, "bfloat16", "columns"),
    ((4165, 351, 5), 51, "float32", "columns"),
    ((12116, 459, 3), 18, "bfloat16", "sort"),
    ((1423, 393, 4), 5, "bfloat16", "sort"),
    ((340, 2570, 1), 7, "bfloat16", "held"),
    ((1187, 14977, 1), 16, "bfloat16", "held"),
    ((30, 854, 1), 24, "bfloat16", "held"),
    ((1676, 1631, 1), 3, "bfloat16", "rows"),
    ((338, 1984, 1), 9, "bfloat16", "rows"),
    ((2, 4, 1), 4, "float32", "rows"),
    ((2, 4, 1), 4, "bfloat16", "rows"),
    ((1783, 32, 1), 32, "float32", "rows"),
    ((34044, 17, 1), 17, "float32", "sort"),
    ((10972, 48, 1), 48, "bfloat16", "sort"),
    ((602, 2617, 1), 2, "float64", "stream"),
    ((106, 3853, 1), 13, "float64", "stream"),
    ((502, 3161, 1), 123, "float64", "sort"),
    ((518, 378, 1), 4, "float64", "sort"),
    ((1, 512, 1), 170, "float32", "compare"),
    ((64, 512, 1), 170, "float32", "compare"),
    ((256, 512, 1), 170, "float32", "sort"),
    ((8, 2048, 1), 682, "float32", "compare"),
    ((1, 8192, 1), 1024, "float64", "compare"),
    ((16, 512, 1), 32, "bfloat16", "compare"),
    ((16, 512, 1), 2, "bfloat16", "rows"),
    ((1, 2048, 1), 32, "float32", "rows"),
    ((5, 49, 651), 32, "bfloat16", "compare"),
    ((4, 128, 256), 2, "float32", "columns"),
    ((132, 4096, 1), 200, "bfloat16", "block"),
    ((2000, 4096, 1), 200, "bfloat16", "sort"),
    ((2000, 3000, 1), 900, "float32", "block"),
    ((528, 4096, 1), 66, "float32", "stream"),
    ((1056, 2048, 1), 100, "float32", "sort"),
    ((100_000, 97, 1), 12, "float16", "sort"),
    ((100_000, 96, 1), 10, "float16", "rows"),
    ((132, 20_000, 1), 600, "float32", "sieve"),
    ((600, 16_384, 1), 1000, "bfloat16", "sieve"),
    ((60, 10_876, 1), 1059, "bfloat16", "block"),  # no sieve, since k is large
    ((102, 14_656, 1), 315, "uint8", "block"),
    ((102, 14_656, 1), 127, "uint8", "stream"),
    ((600, 14_656, 1), 256, "uint8", "stream"),
    ((600, 9000, 1), 300, "bfloat16", "buckets"),
    ((600, 9000, 1), 1200, "bfloat16", "block"),
    ((58, 22_091, 1), 73, "float32", "sieve"),  # one block for each row
    ((58, 70_000, 1), 73, "float32", "stream"),
    ((600, 32_768, 1), 66, "bfloat16", "sieve"),
    ((600, 16_384, 1), 66, "bfloat16", "stream"),
    ((7, 1 << 20, 1), 60, "float32", "grid"),
    ((7, 1 << 20, 1), 100, "float32", "buckets"),
    ((30, 11_590, 1), 790, "float32", "buckets"),
    ((600, 11_590, 1), 790, "float32", "stream"),
    ((600, 8192, 1), 250, "float32", "sort"),
    ((600, 5000, 1), 250, "float32", "stream"),
    ((100, 8192, 1), 250, "float32", "stream"),
    ((3000, 64, 1), 33, "bfloat16", "compare"),
    ((7000, 64, 1), 33, "bfloat16", "sort"),
    ((90, 128, 17), 62, "int32", "compare"),
    ((3, 88_939, 4), 8432, "bfloat16", "sweep"),
    ((3, 88_939, 4), 2432, "bfloat16", "buckets"),
    ((50, 568_943, 1), 70_994, "int32", "buckets"),
    ((50, 568_943, 1), 170_994, "int32", "sweep"),
    ((3, 1284, 1), 25, "int16", "rows"),
    ((13, 846, 1), 15, "bfloat16", "held"),
    ((1, 16_384, 64), 20, "float32", "stream"),
    ((2, 16_384, 64), 20, "float32", "buckets"),
    ((1, 131_072, 2), 4, "float32", "stream"),
    ((40, 32_768, 4), 20, "int64", "stream"),
    ((1, 78_375, 9), 192, "float64", "buckets"),
    ((1, 65_536, 8), 9, "float64", "stream"),
]


@pytest.mark.parametrize("sorted", [True, False])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "rows,k", [((1, 1 << 19, 16), 5), ((1, 453_507, 7), 9), ((3, 1 << 20, 3), 2), ((1, 65536, 128), 60)]
)
def test_long_columns_are_read_together(rows, k, bits, sorted):
    assert plan_topk(*rows, k, bits, sorted, 90)["algorithm"] == "buckets"
    assert plan_topk(rows[0], rows[1], 129, k, bits, sorted, 90)["algorithm"] != "buckets"
    assert plan_topk(rows[0], 8192, rows[2], k, bits, sorted, 90)["algorithm"] != "buckets"


def test_bytes_of_many_rows_are_counted():
    """Buckets of candidates would be few and large."""
    assert plan_topk(915, 48_229, 1, 12_845, 8, False, 90)["algorithm"] == "radix"
    assert plan_topk(215, 48_229, 1, 12_845, 8, False, 90)["algorithm"] == "buckets"


@pytest.mark.parametrize("rows,k,dtype,algorithm", FASTEST)
def test_the_fastest_of_the_kernels(rows, k, dtype, algorithm):
    assert plan_topk(*rows, k, 8 * jnp.dtype(dtype).itemsize, True, 90)["algorithm"] == algorithm


def test_topk_softmax():
    plan_topk_softmax = jaxgpuops._native.modules["cpu"].plan_topk_softmax
    for length in (1, 8, 64, 65, 128, 129, 256, 257, 512, 513, 1024):
        for k in {min(k, length) for k in (1, 8, 16, 17, 32, 33, 64)}:
            plan = plan_topk_softmax(1000, length, 1, k)
            assert plan["algorithm"] == "rows" and plan["workspace_bytes"] == 0
            assert plan["lanes"] * plan["elements"] >= length and 2 * plan["lanes"] >= k
            assert plan == plan_topk_softmax(1, length, 3, k)  # rows have the same bits in every batch
            for groups in (2, 8, 64):
                plan = plan_topk_softmax(1000, length, 1, k, groups)
                assert plan["elements"] == 32 and 32 * plan["lanes"] >= length and 2 * plan["lanes"] >= k
    for rows in [(0, 5, 1), (3, 5, 0)]:
        assert plan_topk_softmax(*rows, 2)["algorithm"] == "empty"
    assert plan_topk_softmax(3, 5, 1, 0)["algorithm"] == "empty"


# ---- Scans ------------------------------------------------------------------------------------------------------------

plan_scan = jaxgpuops._native.modules["cpu"].plan_scan

SCANS = ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "linear_scan", "linear_scan_vjp"]
SCANS += ["cumprod_jvp", "cummax_jvp", "cummin_jvp", "cumlogsumexp_jvp"]
# The points of the benchmark: rows, dtype, and the kernel that they should take.
SCAN_POINTS = [
    ((1, 1 << 27, 1), "float32", "row_look_ahead"),
    ((1, 1 << 20, 1), "float32", "resident"),
    ((1024, 65536, 1), "float32", "row_look_ahead"),
    ((1024, 65536, 1), "bfloat16", "walk"),
    ((4096, 16384, 1), "float32", "walk"),
    ((65536, 1024, 1), "float32", "rows"),
    ((65536, 1024, 1), "bfloat16", "rows"),
    ((8, 4096, 2048), "float32", "columns"),
    ((1, 65536, 1024), "float32", "column_look_ahead"),
    ((16, 128256, 1), "float32", "resident"),
    ((4096, 128, 1), "float32", "rows"),
    ((1, 1000, 3), "float32", "pieces"),
    ((600, 1000, 3), "float32", "spans"),
    ((1, 512, 301), "float16", "pieces"),
    ((1, 2048, 88), "bfloat16", "pieces"),
    ((1, 4096, 40), "float32", "column_twice"),
    ((1, 100_000, 3), "float32", "span_twice"),
    ((1, 100_000, 34), "float32", "column_twice"),
    ((1, 100_000, 35), "bfloat16", "span_twice"),
    ((1 << 20, 32, 1), "float32", "short"),
    ((1 << 20, 2, 1), "bfloat16", "packs"),
    ((1 << 20, 3, 1), "float32", "short"),
    ((1 << 17, 8, 1), "float32", "packs"),
    ((1, 1000, 5), "int32", "small"),
    ((1, 3000, 5), "int32", "pieces"),
    ((100, 2, 1 << 20), "float32", "short"),
]


# Element types of every width, and those of one width that take different kernels; recurrences take floats only.
SCANNED = {False: ("int8", "float16", "float32", "int32", "float64"), True: ("float16", "float32", "float64")}


def scan_calls():
    """A grid over everything that the plan of a scan depends on, except for the compute capability."""
    for target, segmented, rows in itertools.product(
        SCANS, (False, True), itertools.product(OUTER, LENGTHS, (1, 3, 256))
    ):
        for dtype in (
            ("bfloat16", "float32", "float64")
            if "logsumexp" in target
            else SCANNED[not target.startswith("cum") or target.endswith("jvp")]
        ):
            if np.prod(rows, dtype=object) < 1 << 38:
                yield target, *rows, dtype, segmented, 1


# The kernels of scans by layout: those in which a block has all of an axis, and those whose blocks share it.
SCAN_KERNELS = {
    "along": ({"rows", "walk"}, {"resident", "row_look_ahead", "chunk_look_ahead", "chunk_twice"}),
    "across": ({"small", "pieces", "columns"}, {"column_look_ahead", "column_twice"}),
    "spans": ({"small", "short", "packs", "pieces", "spans"}, {"span_twice"}),
}


@pytest.mark.parametrize("rows,dtype,algorithm", SCAN_POINTS)
def test_scan_benchmarks(rows, dtype, algorithm):
    plan = plan_scan("cumsum", *rows, dtype, False, 1, 90)
    assert plan["algorithm"] == algorithm
    assert rows[0] * plan["workspace_bytes"] <= max(1 << 20, np.prod(rows) * jnp.dtype(dtype).itemsize // 20)


@pytest.mark.parametrize("capability", (75, 90))
def test_scan_forms(capability):
    found = set()
    for call in scan_calls():
        length = call[2]
        plan = plan_scan(*call, capability)
        alone, shared = SCAN_KERNELS[plan["layout"]]
        found.add(plan["algorithm"])
        assert plan["algorithm"] in alone | shared, (call, plan)
        most = 1024 if plan["algorithm"] in ("small", "pieces") else 512 if plan["layout"] == "across" else 256
        assert plan["threads"] % 32 == 0 and 32 <= plan["threads"] <= most, (call, plan)
        assert (plan["tiles"] - 1) * plan["tile"] < length <= plan["tiles"] * plan["tile"], (call, plan)
        if plan["tiles"] == 1:
            assert plan["algorithm"] in alone - {"walk"}, (call, plan)
        assert (plan["workspace_bytes"] > 0) == (plan["algorithm"] in shared), (call, plan)
    expected = set().union(*(alone | shared for alone, shared in SCAN_KERNELS.values()))
    # In the shared memory of 7.5 there is no room for two tiles of columns, nor of spans of two operands.
    assert found == expected - ({"column_look_ahead"} if capability == 75 else set())


def test_scans_of_rows_in_packs():
    call = 1 << 19, 2, 1, "bfloat16", False, 1, 90
    assert plan_scan("linear_scan", *call)["algorithm"] == "packs"
    assert plan_scan("linear_scan", *call, dense=False)["algorithm"] == "short"
    assert plan_scan("cumsum", *call, initial=True)["algorithm"] == "short"
    for dtype, length, packs in (("float32", 8, 1), ("float32", 12, 0), ("float16", 32, 1), ("float32", 32, 0)):
        call = 1 << 17, length, 1, dtype, False, 1, 90
        assert plan_scan("linear_scan_vjp", *call)["algorithm"] == ("packs" if packs else "short")
        assert plan_scan("cumprod_jvp", *call)["algorithm"] == "short"


def test_scans_in_pieces():
    """Columns of few elements have blocks of their own, for operations of one operand; the order of folding stays."""
    for op, dtype, rows, most in (
        ("cumsum", "float32", (5000, 3), 1 << 20),
        ("cumprod", "float64", (900, 7), 1 << 20),
        ("cummax", "int16", (9000, 1), 1 << 20),
        ("cummax", "float32", (2000, 3), 1 << 19),
        ("cumsum", "bfloat16", (200, 100), 1 << 18),
    ):
        outer = most // (rows[0] * rows[1])
        plans = [plan_scan(op, many, *rows, dtype, False, 1, 90) for many in (1, outer, outer + 1)]
        assert [plan["algorithm"] == "pieces" for plan in plans] == [True, True, False]
        assert len({(plan["tile"], plan["tiles"]) for plan in plans}) == 1
        assert plan_scan(op, 1, *rows, dtype, True, 1, 90)["algorithm"] != "pieces"  # segments
    for op in ("cumlogsumexp", "linear_scan", "cummax_jvp"):
        assert plan_scan(op, 1, 500, 3, "float32", False, 1, 90)["algorithm"] == "spans"
    assert plan_scan("cumsum", 1, 500, 1, "float32", False, 1, 90)["algorithm"] == "rows"
    for length, inner in ((8193, 3), (2049, 64), (5000, 30), (8192, 9)):  # too many lines of memory for a block
        assert plan_scan("cumsum", 1, length, inner, "float32", False, 1, 90)["algorithm"] != "pieces"
    # A column of 64 KB, with what is beside it, is more than the shared memory of a block of 7.5.
    plans = [plan_scan("cumprod", 5, 16_384, 1, "int32", False, 1, capability) for capability in (75, 80)]
    assert [plan["algorithm"] for plan in plans] == ["span_twice", "pieces"]


def test_scans_of_few_columns():
    """Blocks share the axis of few columns if it has two tiles or more; the tiles are those of larger batches."""
    for call, dtype, rows in (
        ("linear_scan", "float32", (14_608, 5)),
        ("linear_scan", "bfloat16", (65_536, 2)),
        ("cumsum", "float8_e5m2", (338_129, 1)),
        ("cumprod_jvp", "float16", (6_729, 75)),
    ):
        plans = [plan_scan(call, outer, *rows, dtype, False, 1, 90) for outer in (1, 40, 1000)]
        assert [plan["algorithm"] for plan in plans] == ["span_twice", "span_twice", "spans"]
        assert len({(plan["tile"], plan["tiles"]) for plan in plans}) == 1
    # Exact results do not depend on the order of folding: few rows have more tiles, if the workspace has room for them.
    for call, dtype, rows, tiles in (
        ("cummax", "float16", (12_165, 3), (17, 5, 3)),
        ("cumprod", "int32", (8192, 20), (114, 32, 32)),
        ("cumsum", "int8", (338_129, 1), (147, 21, 21)),
    ):
        plans = [plan_scan(call, outer, *rows, dtype, False, 1, 90) for outer in (1, 40, 1000)]
        assert tuple(plan["tiles"] for plan in plans) == tiles
    # One tile of exact numbers has few warps with long runs.
    for rows, threads, tile in (
        ((1091, 1), 32, 1120),
        ((2000, 1), 32, 2016),
        ((5000, 1), 96, 5088),
        ((1000, 3), 64, 1020),
    ):
        plan = plan_scan("cumprod", 2000, *rows, "int8", False, 1, 90)
        assert (plan["algorithm"], plan["threads"], plan["tile"]) == ("spans", threads, tile)
    # Columns whose blocks would share few tiles have a block each, and so have spans where these are many enough.
    for outer, length, inner, algorithm in (
        (40, 300, 64, "columns"),
        (40, 1000, 64, "column_twice"),
        (60, 1000, 64, "columns"),
        (45, 4000, 64, "column_twice"),
        (60, 4000, 64, "columns"),
        (180, 20_000, 3, "span_twice"),
        (200, 20_000, 3, "spans"),
    ):
        assert plan_scan("linear_scan", outer, length, inner, "float32", False, 1, 90)["algorithm"] == algorithm
    # The more there is to compute for a byte, the longer it pays to read spans twice.
    for call, dtype, outer in (
        ("cumsum", "float32", 264),
        ("cumsum", "bfloat16", 396),
        ("cumlogsumexp", "float32", 396),
        ("cumprod", "int16", 396),
        ("cumsum", "float64", 181),
    ):
        plans = [plan_scan(call, many, 40_000, 3, dtype, False, 1, 90) for many in (outer - 1, outer)]
        assert [plan["algorithm"] for plan in plans] == ["span_twice", "spans"]


def test_scans_whose_blocks_share_the_axis():
    for call, dtype, rows, algorithm in (
        # Large columns are read once, where there is a kernel for that.
        ("cumsum", "float32", (1, 40_000, 128), "column_twice"),
        ("cumsum", "float32", (1, 65_536, 128), "column_look_ahead"),
        ("cumsum", "bfloat16", (1, 220_000, 128), "column_twice"),
        ("cumlogsumexp", "float32", (1, 65_536, 128), "column_look_ahead"),
        ("linear_scan", "float32", (1, 65_536, 128), "column_twice"),
        ("cumsum", "float64", (1, 65_536, 128), "column_look_ahead"),
        ("cumprod", "float64", (1, 65_536, 128), "column_twice"),
        # Rows of three operands.
        ("linear_scan_vjp", "float32", (190, 40_000, 1), "chunk_look_ahead"),
        ("linear_scan_vjp", "bfloat16", (190, 40_000, 1), "chunk_twice"),
        ("linear_scan_vjp", "float32", (200, 40_000, 1), "walk"),
        ("linear_scan", "float32", (200, 40_000, 1), "row_look_ahead"),
        # Long odd rows of 16 bits.
        ("cumsum", "bfloat16", (300, 100_000, 1), "walk"),
        ("cumsum", "bfloat16", (300, 100_001, 1), "row_look_ahead"),
        ("cumsum", "bfloat16", (300, 50_001, 1), "walk"),
        ("linear_scan_vjp", "bfloat16", (300, 100_001, 1), "walk"),
        ("cumsum", "float32", (300, 100_001, 1), "walk"),
    ):
        assert plan_scan(call, *rows, dtype, False, 1, 90)["algorithm"] == algorithm, (call, dtype, rows)


def test_scan_tiles_do_not_depend_on_the_batch():
    """The order in which numbers are added is that of the tiles: a row gets the same bits alone and in a batch."""
    for target, outer, *rest in scan_calls():
        exact = not rest[3] and (target in ("cummax", "cummin") or rest[2].startswith("int"))
        if outer == 1 and not exact:
            plans = [plan_scan(target, many, *rest, capability) for many in (1, 2, 1000) for capability in (75, 90)]
            assert len({(plan["layout"], plan["tile"], plan["tiles"]) for plan in plans}) == 1


def test_rare_scans():
    """Calls that docs/scan.md names as rare take one layout whatever their rows are; others take that of their rows."""
    rare = {
        ("cumsum", "int8", False),
        ("cumsum", "complex128", False),
        ("cumprod", "int32", False),
        ("cummax", "int32", True),
        ("cumlogsumexp", "bfloat16", True),
        ("cumsum", "float16", True),
        ("cumlogsumexp", "float64", False),
        ("cumprod_jvp", "complex64", False),
        ("cummax_jvp", "float64", False),
        ("linear_scan_vjp", "float64", False),
        ("linear_scan_vjp", "complex64", True),
        ("cumprod_jvp", "float32", True),
    }
    others = {
        ("cumsum", "int32", False),
        ("cumsum", "bfloat16", True),
        ("cummax", "float64", True),
        ("cumprod", "complex64", False),
        ("cumlogsumexp", "float32", False),
        ("cumprod_jvp", "float32", False),
        ("linear_scan", "float32", True),
        ("linear_scan", "float64", False),
        ("linear_scan", "complex64", False),
        ("linear_scan_vjp", "bfloat16", True),
    }
    for op, dtype, segmented in rare | others:
        layouts = [plan_scan(op, 9, 5000, inner, dtype, segmented, 1, 90)["layout"] for inner in (1, 256)]
        assert layouts == (["spans"] * 2 if (op, dtype, segmented) in rare else ["along", "across"]), (op, dtype)
    for options in ({"exclusive": True}, {"transpose": False}):  # options of tangents
        assert plan_scan("cumprod_jvp", 9, 5000, 1, "float32", False, 1, 90, **options)["layout"] == "spans"
        assert plan_scan("linear_scan", 9, 5000, 1, "float32", False, 1, 90, **options)["layout"] == "along"


def test_short_rows_of_few_elements():
    """Exact operations along an axis that would go through shared memory take the small kernel for more elements."""
    for call, dtype, length, most in (
        ("cumprod", "int64", 4, 1 << 18),
        ("cumprod", "int64", 2, 3 << 15),
        ("cummax", "int8", 20, 1 << 18),
        ("cumsum", "int32", 16, 3 << 15),  # packs
        ("cumprod", "float32", 9, 1 << 17),
    ):
        plans = [
            plan_scan(call, outer, length, 1, dtype, False, 1, 90) for outer in (most // length, most // length + 1)
        ]
        assert [plan["algorithm"] == "small" for plan in plans] == [True, False], (call, dtype, length)


def test_scan_nothing_to_do():
    for rows in [(0, 5, 1), (3, 5, 0), (3, 0, 1)]:
        plan = plan_scan("cumsum", *rows, "float32", False, 1, 90)
        assert plan["algorithm"] == "empty" and plan["workspace_bytes"] == 0


def test_scan_that_is_none():
    with pytest.raises(ValueError, match="no such op: cummean"):
        plan_scan("cummean", 1, 5, 1, "float32", False, 1, 90)


# ---- Parts of a batch -------------------------------------------------------------------------------------------------

plan_softmax = jaxgpuops._native.modules["cpu"].plan_softmax
plan_reduce = jaxgpuops._native.modules["cpu"].plan_reduce


def softmax_planner(op, dtype, masked):
    return lambda *args: plan_softmax(op, *args[:3], dtype, 1.0, False, False, masked, *args[3:])


def reduce_planner(op, dtype, masked):
    return lambda *args: plan_reduce(op, *args[:3], dtype, masked, *args[3:])


def test_columns():
    """Short axes are walked along, few columns read as flat rows, others in vectors; masks have kernels of their own."""
    for (length, inner), dtype, expected in [
        ((2, 388_374), "bfloat16", "columns_walk"),
        ((21, 262_145), "float64", "columns_walk"),
        ((810, 1054), "float64", "columns_walk"),
        ((262_144, 89), "bfloat16", "columns_flat"),
        ((8_388_608, 2), "float64", "columns_flat"),
        ((1 << 20, 4), "float32", "columns_flat"),
        ((1024, 256), "float32", "columns"),
    ]:
        for op in ("softmax", "logsumexp", "softmax_jvp", "log_softmax_jvp"):
            if op == "logsumexp" and expected == "columns_flat" and (inner, dtype) == (4, "float32"):
                continue  # the kernel of vectors takes axes of any length
            plan = plan_softmax(op, 3, length, inner, dtype, 1.0, False, False, False, 90)
            assert plan["algorithm"] == expected, (op, length, inner, dtype, plan)
            # Which parts are merged, in which order, does not depend on the batch, nor on the device.
            if expected != "columns":
                same = {k: v for k, v in plan.items() if k in ("algorithm", "blocks", "units")}
                for outer, capability in ((1, 90), (700, 90), (3, 80)):
                    other = plan_softmax(op, outer, length, inner, dtype, 1.0, False, False, False, capability)
                    assert {k: other[k] for k in same} == same, (op, length, inner, dtype, outer)
            masked = plan_softmax(op, 3, length, inner, dtype, 1.0, False, False, True, 90)
            assert masked["algorithm"] in ("columns", "columns_split"), (op, length, inner, dtype, masked)
    for dtype, length, inner in itertools.product(("int8", "int32", "float64"), (2, 40, 100_000), (3, 257)):
        plan = plan_reduce("sum", 700_000, length, inner, dtype, False, 90)
        assert plan["algorithm"] == ("columns_walk" if length <= 32 else plan["algorithm"]), (dtype, length, inner)
        assert plan["algorithm"] in ("columns_walk", "columns_flat"), (dtype, length, inner)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_narrow_columns(dtype):
    """Few columns side by side, along a long enough axis, are read as flat rows, however large the batch is."""
    item = np.dtype(jnp.dtype(dtype)).itemsize
    for op, longest in (("softmax", {16: 199, 32: 8192}), ("softmax_jvp", {16: 1499, 32: 8192})):
        for outer, beside in itertools.product((1, 70, 5000), (16, 32)):
            for length, flat in ((longest[beside], False), (longest[beside] + 1, True)):
                plan = plan_softmax(op, outer, length, beside // item, dtype, 1.0, False, False, False, 90)
                assert (plan["algorithm"] in ("columns_flat", "small")) == flat, (op, outer, length, plan)
        plan = plan_softmax(op, 5000, 2050, 64 // item, dtype, 1.0, False, False, False, 90)
        assert plan["algorithm"] != "columns_flat", (op, plan)


def test_few_rows_of_statistics():
    """If there are few rows, each has a block for its statistics, whose lanes have two vectors."""
    for op, length, dtype, warps, most in (
        ("logsumexp", 2982, "bfloat16", 6, 20),
        ("logsumexp", 2080, "float32", 9, 8),
        ("logsumexp", 2079, "float32", 9, 20),
        ("logsumexp", 4525, "float32", 18, 8),
        ("logsumexp", 6399, "float32", 25, 0),
        ("sum", 1030, "float32", 5, 50),
        ("sum", 515, "float32", 3, 16),
        ("sum", 516, "float32", 3, 0),
    ):
        planner = (reduce_planner if op == "sum" else softmax_planner)(op, dtype, False)
        rows = most * 132 // warps
        found = [planner(outer, length, 1, 90)["threads"] == 32 * warps for outer in (max(1, rows), rows + 1)]
        assert found == [most > 0, False], (op, length, dtype, found)


def test_few_rows_of_float32_not_aligned():
    """Few rows have a block each, whose lanes have two vectors, as long as fewer, fuller lanes are not faster."""
    for length, warps, most in (
        (301, 2, 16),
        (915, 4, 24),
        (1201, 5, 64),
        (1401, 6, 32),
        (1775, 7, 24),
        (2501, 10, 10),
    ):
        rows = most * 132 // warps
        found = [softmax_planner("softmax", "float32", False)(n, length, 1, 90)["threads"] for n in (rows, rows + 1)]
        assert (found[0] == 32 * warps) and (found[1] != 32 * warps), (length, found)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_columns_of_short_axes(dtype):
    """Threads walk along short axes, wherever columns begin, if lanes with vectors would hold padding. Other axes
    are read in vectors."""
    half = dtype == "bfloat16"
    for op, walked in (
        ("softmax", {*range(1, 25 if half else 8), *range(33, 81 if half else 65)}),
        ("logsumexp", range(1, 8)),
        ("softmax_jvp", {*range(1, 5), *range(17 if half else 9, 49 if half else 129)}),
    ):
        for length, inner in itertools.product(range(1, 130), (48, 388_376)):
            plan = plan_softmax(op, 3000, length, inner, dtype, 1.0, False, False, False, 90)
            assert (plan["algorithm"] == "columns_walk") == (length in walked), (op, length, inner, plan)
    for op, walked, flat in (
        ("sum", [(128, 3), (500, 19), (1000, 123)], [(129, 3), (513, 19), (1025, 123)]),
        *(
            [
                ("softmax", [(64, 3), (500, 65), (1000, 257)], [(65, 7), (500, 63), (1000, 123)]),
                ("softmax_jvp", [(48, 3), (500, 65), (1000, 257)], [(49, 7), (500, 63), (1000, 123)]),
            ]
            if half
            else [
                ("softmax", [(64, 3), (112, 7), (500, 65)], [(65, 3), (113, 7), (500, 63), (1000, 257)]),
                ("softmax_jvp", [(48, 3), (112, 7), (1000, 257)], [(49, 3), (113, 7), (500, 63)]),
            ]
        ),
    ):
        planner = (reduce_planner if op == "sum" else softmax_planner)(op, dtype, False)
        for shapes, algorithm in ((walked, "columns_walk"), (flat, "columns_flat")):
            for shape in shapes:
                assert planner(5000, *shape, 90)["algorithm"] == algorithm, (op, shape)


def test_tiles_of_short_rows():
    """Rows that are not whole vectors, and large arrays of rows of a vector less than a team of lanes has, go through
    shared memory; of rows without results those for which that is faster."""
    for op, dtype, length, least in (
        ("softmax", "float32", 5, 3),
        ("softmax", "float32", 33, 3),
        ("softmax", "float32", 12, 8),
        ("log_softmax", "float32", 28, 16),
        ("softmax", "float32", 60, 32),
        ("softmax", "bfloat16", 24, 8),
        ("softmax", "bfloat16", 49, 3),
        ("softmax", "bfloat16", 329, 6),
        ("softmax", "float32", 237, 16),
        ("softmax", "bfloat16", 577, 3),
        ("softmax", "bfloat16", 721, 12),
        ("softmax", "float64", 6, 8),
        ("softmax_jvp", "float32", 33, 3),
        ("logsumexp", "float32", 33, 10),
        ("logsumexp", "bfloat16", 12, 10),
        ("sum", "float32", 33, 10),
        ("sum", "bfloat16", 201, 10),
    ):
        planner = (reduce_planner if op == "sum" else softmax_planner)(op, dtype, False)
        outer = -(-(least << 20) // (length * np.dtype(dtype if dtype != "bfloat16" else "int16").itemsize))
        found = [planner(rows, length, 1, 90)["algorithm"] for rows in (outer - 1, outer)]
        assert found == ["rows", "rows_tiles"], (op, dtype, length, found)
    for op, dtype, length in (
        ("softmax", "float32", 20),
        ("softmax", "float32", 124),
        ("log_softmax", "float32", 154),
        ("softmax", "float32", 221),
        ("log_softmax", "float32", 333),
        ("softmax", "float32", 389),
        ("softmax_jvp", "float32", 12),
        ("logsumexp", "float32", 12),
        ("logsumexp", "bfloat16", 33),
        ("max", "float32", 33),
        ("dot", "float32", 33),
    ):
        planner = (reduce_planner if op in ("max", "dot") else softmax_planner)(op, dtype, False)
        assert planner(10_000_000, length, 1, 90)["algorithm"] == "rows", (op, dtype, length)


def test_long_rows_of_float64():
    """Results are left to a third kernel where blocks that hold a row would be too large, however many rows there are."""
    for op, outer in itertools.product(("softmax", "cross_entropy_grad", "softmax_jvp"), (1, 100, 10_000)):
        planner = softmax_planner(op, "float64", False)
        assert planner(outer, 32_768, 1, 90)["algorithm"] == "rows", (op, outer)
        assert planner(outer, 32_769, 1, 90)["algorithm"] == "rows_split", (op, outer)
    assert softmax_planner("cross_entropy_grad", "float32", False)(10, 32_769, 1, 90)["algorithm"] == "rows"


def test_the_order_of_sums_does_not_depend_on_the_batch():
    """Rows are divided among lanes, and columns take the kernels of one order, however many there are."""
    rng = np.random.default_rng(0)
    shapes = [(length, inner) for length in range(1, 140, 3) for inner in (1, 3, 4, 8, 16, 48, 63, 256)]
    shapes += [(int(np.exp(rng.uniform(0, 14))), int(np.exp(rng.uniform(0, 7)))) for _ in range(200)]
    ops = ("softmax", "logsumexp", "cross_entropy_grad", "softmax_jvp", "sum", "max", "dot")
    for op, dtype in itertools.product(ops, ("bfloat16", "float32", "float64")):
        planner = (softmax_planner if op in ops[:4] else reduce_planner)(op, dtype, False)
        for length, inner in shapes:
            orders = set()
            for outer in (1, 2, 40, 300, 5000, 1 << 20):
                plan = planner(outer, length, inner, 90)
                if inner == 1:
                    orders.add((plan["vectors"], plan["lanes"]))
                elif plan["algorithm"] != "small":  # adds up in the order of the kernel that it replaces
                    orders.add((plan["algorithm"].removesuffix("_stream"), plan["blocks"]))
            assert len(orders) <= 1, (op, dtype, length, inner, orders)


def scan_planner(op, dtype, segmented):
    return lambda *args: plan_scan(op, *args[:3], dtype, segmented, 1, *args[3:])


def topk_planner(k, bits, sorted):
    return lambda *args: plan_topk(*args[:3], min(k, args[1]), bits, sorted, *args[3:])


# ``plan(outer, length, inner, compute_capability, workspace_bytes)`` of every family and of the forms of its calls.
PLANNERS = {
    **{f"topk {k} {bits} {s}": topk_planner(k, bits, s) for k in KS for bits in BITS for s in (True, False)},
    **{f"argmax {bits}": lambda *args, bits=bits: plan_argmax(*args[:3], bits, *args[3:]) for bits in BITS},
    **{
        f"{op} {dtype} {masked}": softmax_planner(op, dtype, masked)
        for op in ("softmax", "log_softmax", "logsumexp", "cross_entropy", "cross_entropy_grad", "softmax_jvp")
        + ("log_softmax_jvp",)
        for dtype in ("bfloat16", "float32", "float64")
        for masked in (True, False)
    },
    **{
        f"{op} {dtype} {masked}": reduce_planner(op, dtype, masked)
        for op in ("sum", "max", "min", "dot")
        for dtype in ("int8", "bfloat16", "float32", "int32", "float64")
        for masked in (True, False)
    },
    **{
        f"{op} {dtype} {segmented}": scan_planner(op, dtype, segmented)
        for op in SCANS
        for dtype in ("bfloat16", "float32", "float64")
        for segmented in (True, False)
    },
}


def test_few_elements():
    """Arrays of few elements have kernels of their own, for calls that are walked; scans also where bits do not depend on
    the order."""

    def small(planner, length, inner, most=1 << 17):
        """The kernel that one column takes, as many columns as have `most` elements, and more."""
        some = (1, most // (length * inner), most // (length * inner) + 1)
        return [planner(outer, length, inner, 90)["algorithm"] == "small" for outer in some]

    few, none = [True, True, False], [False] * 3
    for dtype, (length, inner) in itertools.product(("bfloat16", "float64"), ((2, 2), (8, 16), (16, 3), (64, 3))):
        # Statistics along eight positions of many columns take the kernel that reads columns in vectors.
        walked = few if inner < 16 or dtype == "float64" else none
        for op in ("softmax", "log_softmax", "logsumexp"):
            takes = walked if op == "logsumexp" else few
            # Results have another limit along axes that several warps walk, and along axes that are long for one warp.
            most = 1 << (16 if op != "logsumexp" and dtype == "bfloat16" and length == 64 else 17)
            assert small(softmax_planner(op, dtype, False), length, inner, most) == takes, (op, dtype, length, inner)
            assert small(softmax_planner(op, dtype, True), length, inner) == none
        for op in ("cross_entropy", "softmax_jvp", "log_softmax_jvp"):
            assert small(softmax_planner(op, dtype, False), length, inner) == none
        most = 1 << 13 if length <= 8 else 1 << 16
        assert small(reduce_planner("sum", dtype, False), length, inner, most) == walked
        for op, masked in (("max", False), ("dot", False), ("sum", True)):
            assert small(reduce_planner(op, dtype, masked), length, inner) == none, (op, dtype)
    for op, dtype in itertools.product(("softmax", "logsumexp", "sum"), ("bfloat16", "float64")):
        planner = (reduce_planner if op == "sum" else softmax_planner)(op, dtype, False)
        most = 264 if op == "softmax" else 132
        for length, inner in ((130, 3), (600, 5)):
            takes = [planner(outer, length, inner, 90)["algorithm"] == "small" for outer in (1, most, most + 1)]
            assert takes == few, (op, dtype, length, inner)
    for dtype, length, inner, most in (
        ("float32", 9, 64, 17),
        ("float32", 24, 64, 16),
        ("float32", 24, 63, 17),
        ("float32", 64, 64, 18),
        ("bfloat16", 16, 64, 17),
        ("bfloat16", 24, 64, 15),
        ("bfloat16", 64, 64, 16),
    ):
        assert small(softmax_planner("softmax", dtype, False), length, inner, 1 << most) == few, (dtype, length, inner)
    assert small(softmax_planner("softmax", "float32", False), 25, 64) == none
    planner = softmax_planner("softmax", "float32", False)
    assert [planner(1, length, 5, 90)["algorithm"] for length in (1638, 1639)] == ["small", "columns_flat"]
    assert small(reduce_planner("sum", "float32", False), 8, 1) == none  # rows of floats are added in another order
    for op in ("cumsum", "cumprod", "cummax", "linear_scan", "linear_scan_vjp", "cummin_jvp"):
        exact = op == "cummax"
        for length, inner, most in (
            (1, 1, 3 << 15),
            (7, 9, 3 << 15),
            (9, 4, 1 << 17),
            (32, 1, 1 << (18 if exact else 17)),
        ):
            assert small(scan_planner(op, "float32", False), length, inner, most) == few, (op, length, inner)
            assert small(scan_planner(op, "float32", True), length, inner) == none  # calls with segments
        for length, inner in ((33, 3), (1024, 3), (1025, 3), (4096, 3), (4097, 3), (33, 1), (1025, 33)):
            takes = few if exact and inner > 1 and length <= 1024 else none
            assert small(scan_planner(op, "float32", False), length, inner, 1 << 16) == takes, (op, length, inner)
    for op, dtype in (("cumprod", "int32"), ("cummax", "int16"), ("cumsum", "uint8")):  # rows have no other kernels
        for length, inner in ((64, 3), (457, 1)):
            assert small(scan_planner(op, dtype, False), length, inner, 1 << 18) == few
    assert small(scan_planner("cumlogsumexp", "float32", False), 8, 1) == none


WHOLE = (1, 7, 64, 131, 1024, 1 << 20)  # rows of a whole batch; the last stands for a symbolic one


@pytest.mark.parametrize("capability", (75, 80, 89, 90, 100, 120))
def test_parts_of_a_batch_make_do_with_their_workspace(capability):
    """A call is planned for the whole batch, and each device plans again for the rows that it has, however many."""
    rng = np.random.default_rng(capability)
    reached = set()
    for name, plan in PLANNERS.items():
        for whole in WHOLE:
            lengths = (*LENGTHS, *np.exp(rng.uniform(0, np.log(1 << 24), 3)).astype(int).tolist())
            for length, inner in itertools.product(lengths, (1, 3, 256)):
                if whole * length * inner > 1 << 40:
                    continue
                given = plan(whole, length, inner, capability, -1)["workspace_bytes"]
                for part in {1, 9, 100, 132, int(rng.integers(1, whole + 1))}:
                    if part <= whole:
                        of_part = plan(part, length, inner, capability, given)
                        assert of_part["workspace_bytes"] <= given, (name, whole, part, length, inner, of_part)
                        reached.add((name.split()[0], of_part["algorithm"]))
    if capability == 90:
        for op in ("logsumexp", "cross_entropy", "sum"):
            assert {a for o, a in reached if o == op} >= {"rows", "rows_stream", "rows_split"}, op


# ---- What a device can launch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_topk_plans_can_be_launched(capability):
    """Random problems, whole and in parts: shared memory, grids, clusters and workspaces are within limits."""
    rng = np.random.default_rng(capability)
    for _ in range(3000):
        outer, length, inner = np.exp2(rng.uniform(0, 37) * rng.dirichlet((1, 1, 1))).astype(int).tolist()
        length = min(max(2, length if rng.integers(2) else 1 << length.bit_length() - 1), (1 << 31) - 1)
        inner = inner if rng.integers(2) else 1
        k = int(length ** rng.uniform(0, 1)) if rng.integers(3) else max(1, length - length // int(rng.integers(2, 9)))
        bits, sorted, part = int(rng.choice(BITS)), bool(rng.integers(2)), int(rng.integers(1, outer + 1))
        if outer * inner * (length * bits // 8 + k * (bits // 8 + 4)) > 1 << 38:  # no device has as much memory
            continue
        whole = plan_topk(outer, length, inner, k, bits, sorted, capability)
        some = plan_topk(part, length, inner, k, bits, sorted, capability, whole["workspace_bytes"])
        for plan in (whole, some):
            call = (outer, length, inner, k, bits, sorted, part)
            assert 0 <= plan["shared_bytes"] <= SHARED_LIMIT[capability] * 1024 - 1024, (call, plan)
            assert plan["algorithm"] == "argmax" or 0 < plan["blocks"] < 1 << 31, (call, plan)
            assert 32 <= plan["threads"] <= 1024, (call, plan)
            if plan["algorithm"] in ("held", "stream"):  # blocks that share a row are a cluster
                assert plan["slices"] <= (8 if capability in (90, 100) else 1), (call, plan)
            assert 0 <= plan["workspace_bytes"] <= whole["workspace_bytes"], (call, plan)


# ---- Counts and segments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_plans_of_counts(capability):
    plan = lambda *args: jaxgpuops._native.modules["cpu"].plan_bincount(*args, "int32", capability)
    assert plan(0, 5, 1, 5)["algorithm"] == plan(3, 5, 1, 0)["algorithm"] == "empty"
    assert plan(3, 5, 2, 5)["algorithm"] == plan(3, 5, 1, 1 << 20)["algorithm"] == "global"
    for rows, bins in (((32 * 700, 30), 700), ((64, 1), 1), ((70_000, 40), 256)):
        found = plan(*rows, 1, bins)
        assert found["algorithm"] == "rows"
        assert found["threads"] * bins <= found["shared_bytes"] <= min(48, SHARED_LIMIT[capability]) << 10
    assert plan(510, 2, 1, 296)["algorithm"] == "tables"  # whose counts some blocks write
    for rows, bins, words in (
        ((178_930, 291), 8, 8), ((16_000, 1000), 8, 256), ((8613, 512), 141, 141), ((2048, 4096), 33, 33),
        ((200_000, 100), 100, 100), ((70_000, 255), 8, 8), ((200, 300), 8, 8),
    ):  # fmt: skip
        found = plan(*rows, 1, bins)
        assert found["algorithm"] == "warps"
        assert found["shared_bytes"] == 4 * words * found["threads"] // 32 <= 48 << 10
    for rows, bins in (((100, 291), 8), ((178_930, 60_000), 8), ((9000, 300), 40_000), ((1000, 1000), 8)):
        assert plan(*rows, 1, bins)["algorithm"] == "tables"
    assert plan(524_288, 32, 1, 64)["algorithm"] == plan(167_772, 100, 1, 48)["algorithm"] == "rows"
    for outer, length, bins in itertools.product((1, 100, 70_000), (256, 3000, 1 << 26), (1, 256, 5000, 40_000)):
        found = plan(outer, length, 1, bins)
        if found["algorithm"] == "tables":
            assert (
                4 * bins <= found["ranges"] * found["shared_bytes"] <= found["ranges"] * SHARED_LIMIT[capability] << 10
            )
            assert found["slices"] == 1 or length >= 4096 * found["slices"]
    for rows, algorithm in (
        ((1, 15_000, 1, 14_000), "global"), ((6, 37_000, 1, 33_000), "global"), ((1, 1 << 18, 1, 1 << 14), "global"), ((1, 1 << 18, 1, (1 << 14) - 1), "tables"),
        ((40, 60_000, 1, 10_000), "tables"), ((1, 1 << 19, 1, 14_000), "tables"), ((1, 15_000, 1, 1800), "tables"), ((1, 4000, 1, 500), "global"),
        ((5, 5009, 1, 1521), "global"), ((7, 55_129, 1, 1018), "tables"), ((16, 4096, 1, 1000), "tables"), ((60, 2048, 1, 1500), "tables"),
    ):  # fmt: skip
        assert plan(*rows)["algorithm"] == algorithm
    for outer, length, bins in (
        (61, 1 << 20, 400_000),
        (1, 1 << 21, 1 << 19),
        (8, 1 << 18, 300_000),
        (1, 1 << 26, 400_000),
    ):
        found = plan(outer, length, 1, bins)
        assert found["algorithm"] == "parts" and found["ranges"] * found["shared_bytes"] >= 4 * bins
        assert found["shared_bytes"] <= SHARED_LIMIT[capability] << 10 and found["ranges"] <= 32
        assert found["workspace_bytes"] == plan(1000, length, 1, bins)["workspace_bytes"] >= 2 * length
        assert 1 <= found["slices"] <= found["tiles"] and (found["slices"] == 1 or outer < 10)
    for rows in (
        (1, 1 << 20, 1, 1 << 20),
        (100, 1 << 15, 1, 400_000),
        (4, 1 << 20, 3, 400_000),
        (4, 1 << 20, 1, 1 << 22),
    ):
        assert plan(*rows)["algorithm"] == "global"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_plans_of_histograms(capability):
    plan = lambda *args: jaxgpuops._native.modules["cpu"].plan_histogram(*args, capability)
    assert plan(0, 5, 1, 5, "float32")["algorithm"] == plan(3, 5, 1, 0, "float32")["algorithm"] == "empty"
    assert plan(3, 5, 2, 5, "float32")["algorithm"] == plan(3, 5, 1, 1 << 20, "float32")["algorithm"] == "none"
    for outer, length, bins, dtype in itertools.product(
        (1, 100), (1, 1 << 26), (1, 256, 1000), ("bfloat16", "float64")
    ):
        found = plan(outer, length, 1, bins, dtype)
        assert found["algorithm"] == "tables" and found["ranges"] == 1
        room = found["shared_bytes"] - 4 * found["tables"] * bins
        assert room >= (bins + 2) * (8 if dtype == "float64" else 4)
        assert found["shared_bytes"] <= SHARED_LIMIT[capability] << 10


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_plans_of_selections(capability):
    cpu = jaxgpuops._native.modules["cpu"]
    plan = lambda *args: cpu.plan_select(*args, capability)
    assert plan(0, 5, 1, 3, 32)["algorithm"] == plan(3, 5000, 1, 0, 32)["algorithm"] == "empty"
    for rows in (
        (3, 4096, 1, 10, 32),
        (3, 8, 1, 3, 32),
        (10**6, 100, 1, 3, 16),
        (9, 512, 1, 4, 32),
        (9, 600, 1, 4, 16),
    ):
        assert plan(*rows)["algorithm"] == "none"
    for length, inner, bits in itertools.product((9, 16, 17, 33, 64), (1, 5), (8, 16, 32, 64)):
        few, many = plan(3, length, inner, 3, bits), plan(100_000, length, inner, 9, bits)
        if (length, bits, capability) == (64, 32, 75):  # the tables do not fit
            assert few["algorithm"] == many["algorithm"] == "none"
            continue
        assert few["algorithm"] == ("thread" if bits < 64 and length <= 16 else "warp")
        assert many["algorithm"] == ("none" if bits == 64 else "thread")
        assert not many["turns"] and many["shared_bytes"] <= min(67, SHARED_LIMIT[capability]) << 10
    # A part of a batch has a kernel if the batch has, and makes do with its part of the workspace.
    for length, count, inner, bits in itertools.product((9, 20, 64, 65, 128, 129, 700), (3, 4), (1, 5), (8, 32, 64)):
        parts = [plan(outer, length, inner, count, bits) for outer in (1 << 20, 4000, 1500, 300, 1)]
        for whole, part in itertools.pairwise(parts):
            if whole["algorithm"] != "none":
                assert part["algorithm"] != "none" and part["workspace_bytes"] <= whole["workspace_bytes"]
    for length, inner, bits in itertools.product((129, 1024), (1, 5), (8, 64)):
        found = plan(30_000, length, inner, 3, bits)
        assert found["algorithm"] == "warp" and found["turns"] == (inner > 1)
        assert not plan(12, length, inner, 3, bits)["turns"]  # few columns are read as they are
        assert 4 * length * max(bits, 32) // 8 <= found["shared_bytes"] <= 32 << 10
    for inner, (length, bits) in itertools.product((1, 5), ((1025, 64), (4096, 32), (20_000, 16))):
        found = plan(3, length, inner, 9, bits)
        assert found["algorithm"] == "block" and found["threads"] == {1025: 128, 4096: 256, 20_000: 1024}[length]
        assert plan(10_000, length, inner, 9, bits)["threads"] == {1025: 64, 4096: 128, 20_000: 1024}[length]
        assert length * bits // 8 + 16 + 9 * 2048 <= found["shared_bytes"] < SHARED_LIMIT[capability] << 10
        assert found["turns"] == (inner > 1) and found["workspace_bytes"] // 256 == (inner > 1) * -(
            -length * inner * bits // 2048
        )
        part = cpu.plan_sort(3, length, inner, bits, True, False, capability, 7)
        assert (part["algorithm"], part["threads"], part["turns"]) == ("part", max(512, found["threads"]), inner > 1)
        bytes_of = lambda n, inner=inner: cpu.plan_sort(3, n, inner, 8, True, False, capability, 7)["algorithm"]
        assert (bytes_of(1499), bytes_of(1500)) == ("part", "block")  # of bytes a sort takes less time
    for outer, inner, length, count, bits in itertools.product(
        (1, 100), (1, 5), (250_000, 1 << 20, (1 << 31) - 1), (1, 9), (8, 64)
    ):
        found = plan(outer, length, inner, count, bits)
        assert found["algorithm"] == "long"
        kept = 512 * (found["kept"] // 32 * bits // 8 + 2 * found["kept_steps"])  # bytes of 512 threads
        assert found["shared_bytes"] == max(2048 * count + kept, 2048 * (4 + bits // 8) + 2048)
        assert found["shared_bytes"] < SHARED_LIMIT[capability] << 10 and found["kept"] % 32 == 0
        assert found["kept_steps"] <= 32 and (SHARED_LIMIT[capability] < 163 or found["kept"] > 0)
        assert 1 <= found["slices"] <= 264 and found["workspace_bytes"] >= inner * count * 4 * (512 + 2048)
        part = plan(1, length, inner, count, bits)
        assert part["slices"] >= found["slices"] and part["workspace_bytes"] <= found["workspace_bytes"]
        assert cpu.plan_sort(outer, length, inner, bits, True, False, capability, 7)["algorithm"] == "sweep"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_plans_of_sorts_of_segments(capability):
    plan = lambda *args: jaxgpuops._native.modules["cpu"].plan_sort_segments(*args, capability)
    assert plan(3, 0, 1, 5, 32)["algorithm"] == "empty"
    for length, bits, threads in [
        (1, 8, 256), (1024, 32, 256), (1024, 64, 256), (1025, 16, 512), (4096, 32, 512), (1025, 64, 1024),
        (8192, 64, 1024), (4097, 32, 1024), (16_384, 16, 1024),
    ]:  # fmt: skip
        found = plan(100, length, 1, 70, bits)
        if found["algorithm"] == "none":
            assert SHARED_LIMIT[capability] < 163 and threads == 1024
            continue
        assert (found["algorithm"], found["threads"], found["workspace_bytes"]) == ("segments", threads, 0)
        assert 6 * length < found["shared_bytes"] < SHARED_LIMIT[capability] << 10
    for outer, length, inner, bits in [(3, 16_385, 1, 8), (3, 8193, 1, 64), (3, 300, 2, 32), (10_000, 300, 1, 32)]:
        assert plan(outer, length, inner, 70, bits)["algorithm"] == "none"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_plans_of_choices(capability):
    plan = lambda *args: jaxgpuops._native.modules["cpu"].plan_choose(*args, capability)
    assert plan(0, 5, 1, 3, False)["algorithm"] == plan(3, 5, 1, 0, True)["algorithm"] == "empty"
    assert plan(3, 5000, 2, 3, True)["algorithm"] == plan(5000, 127, 1, 3, False)["algorithm"] == "none"
    for (outer, length), starts, size in itertools.product(
        ((1, 0), (1, 1), (5000, 128), (9, 17_000), (3, 1 << 14), (1, 1 << 26), (1, (1 << 31) - 1)),
        (False, True),
        (7, 10**6),
    ):
        found = plan(outer, length, 1, size, starts)
        tiles, units = found["tiles"], found["units"]
        few = length + 15 < 1 << 14 or outer * length <= (1 << 14 if starts else 1 << 16)
        assert found["algorithm"] == ("recount" if few else "look_back")
        assert tiles * units * 1024 >= length + 15 > (tiles - 1) * units * 1024
        assert found["threads"] in range(32, 513, 32) and units >= found["threads"] // 32
        assert found["blocks"] == outer * (tiles + (size - 1) // 16384)
        # All blocks that a multiprocessor is to hold fit, and few turns suffice if a tile can be large.
        blocks = 1 if few else 2 if starts else 3
        assert blocks * (found["shared_bytes"] + 2048) <= (SHARED_LIMIT[capability] + 1) << 10
        assert few or units * 132 + 32 * found["list"] == found["shared_bytes"] and found["list"] >= 512
        if capability == 90 and not few and outer * length <= 1 << 26:
            assert outer * tiles <= blocks * 132
        # A part of a batch makes do with its part of the workspace.
        assert (
            found["workspace_bytes"] == plan(1, length, 1, size, starts)["workspace_bytes"] >= 4 * tiles * (tiles > 1)
        )


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_plans_of_segments(capability):
    plan = lambda *args: jaxgpuops._native.modules["cpu"].plan_segments(*args, False, capability)
    assert plan("segment_sum", 3, 5, 0, 5, "float32", False)["algorithm"] == "empty"
    # (columns, segments, columns that a lane has)
    for inner, segments, columns in [(1, 512, 1), (2, 192, 2), (2, 193, 1), (3, 512, 1), (8, 192, 2), (33, 128, 1)]:
        one, many = (plan("segment_sum", outer, 10**7, inner, segments, "float32", False) for outer in (1, 1000))
        assert one == many and (one["algorithm"], one["columns"]) == ("lanes", columns)
        assert 128 * columns * segments * one["warps"] == one["shared_bytes"] <= SHARED_LIMIT[capability] << 10
        assert one["rows"] * one["tiles"] >= 10**7 and one["workspace_bytes"] >= 4 * one["tiles"] * segments * inner
    softmax_plan = jaxgpuops._native.modules["cpu"].plan_segment_softmax
    plan_softmax = lambda *args, dtype="float32", sorted=False: softmax_plan(*args, dtype, sorted, capability)
    for op, dtype, length in [
        ("segment_sum", "float64", 1 << 14), ("segment_sum", "float32", 4096), ("segment_max", "int16", 4096),
        ("segment_max", "float32", 2048), ("segment_sum", "int64", 2048),
    ]:  # fmt: skip
        assert plan(op, 7, length, 1, 3000, dtype, False)["algorithm"] == "few"
        assert plan(op, 7, 20 * length, 1, 3000, dtype, False)["algorithm"] in ("atomics", "ordered")
        assert plan(op, 7, 8192, 1, 3000, dtype, True)["algorithm"] == "few"
    for rows in [(1, 3, 3), (2048, 1, 65), (0, 7, 3000), (57, 512, 31), (1, 16384, 1), (100, 5000, 1 << 20)]:
        one, many = (plan("segment_sum", outer, *rows, "float64", False) for outer in (1, 1000))
        assert one == many and (one["algorithm"], one["workspace_bytes"]) == ("few", 0)
        assert one["rows"] * one["tiles"] >= rows[2] > one["rows"] * (one["tiles"] - 1)
        assert one["shared_bytes"] <= SHARED_LIMIT[75] << 10 and 1 <= one["warps"] <= 16
    assert plan("segment_sum", 1, 4285, 198, 6344, "float32", False)["algorithm"] == "ordered"
    assert plan_softmax(7, 0, 7, 3000)["algorithm"] == plan_softmax(7, 10**7, 1, 3)["algorithm"] == "none"
    assert plan_softmax(7, 10**6, 256, 100)["algorithm"] == "none"
    assert plan_softmax(7, 10**6, 8, 65_536)["algorithm"] == plan_softmax(7, 10**5, 64, 9999)["algorithm"] == "ordered"
    # One launch, of blocks that have all rows of up to eight columns. (rows, columns, segments, columns of a block)
    for length, inner, segments, columns in [
        (1, 1, 1, 1), (2, 118, 1, 8), (1024, 1024, 5, 4), (512, 2048, 90, 8), (99, 256, 73, 2), (4096, 256, 70, 1),
        (1025, 3, 3000, 1), (57, 512, 31, 4),
    ]:  # fmt: skip
        for is_sorted in (False, True) if length <= 2048 else (False,):
            found = plan_softmax(1, length, inner, segments, sorted=is_sorted)
            assert (found["algorithm"], found["columns"], found["tiles"]) == ("cells", columns, 1)
            assert found["workspace_bytes"] == 0 and found["rows"] == length
            assert found["shared_bytes"] == 12 * segments * columns <= SHARED_LIMIT[capability] << 10
            per_thread = 1 if length * columns <= 1024 else 4
            assert length * columns <= 32 * per_thread * found["warps"] <= 4096
    assert plan_softmax(1000, 99, 256, 73)["columns"] == 8
    # Blocks that share the rows: with cells in shared memory, or without.
    for length, inner, segments in [
        (4097, 1, 5), (524_288, 17, 45), (10**6, 8, 1000), (10**6, 1, 10**6), (10**5, 3, 50_000),
    ]:  # fmt: skip
        one, many = (plan_softmax(outer, length, inner, segments) for outer in (1, 1000))
        assert one["algorithm"] == many["algorithm"] == "cells"
        assert one["workspace_bytes"] == many["workspace_bytes"] >= 16 * segments * inner
        for found in (one, many):
            assert found["rows"] * found["tiles"] >= length > found["rows"] * (found["tiles"] - 1)
            assert found["columns"] <= min(inner, 32) and found["shared_bytes"] <= SHARED_LIMIT[capability] << 10
            assert (found["shared_bytes"] > 0) == (segments <= 1000) or SHARED_LIMIT[capability] < 163
    wide = [plan_softmax(1, length, 3, 9, dtype="float64")["algorithm"] for length in (1, 1024, 1025, 10**6)]
    assert wide == ["cells", "cells", "none", "none"]
    for op, (length, inner, segments) in itertools.product(
        ("segment_sum", "segment_max"), ((1668, 456, 3166), (958, 16_384, 73), (33, 402, 56), (2048, 1, 20_000))
    ):
        one, many = (plan(op, outer, length, inner, segments, "float32", False) for outer in (1, 1000))
        assert one == many and one["algorithm"] == "few" and one["shared_bytes"] <= 20 << 10
        assert one["rows"] == (24 if segments > 256 else 16)
    assert plan("segment_sum", 1, 100, 16_384, 60, "float32", False)["rows"] == 60
    # What is the same in any order may depend on the batch.
    for op, dtype, length, segments in [("segment_max", "float32", 4258, 8), ("segment_sum", "int64", 14_000, 200)]:
        found = [plan(op, outer, length, 1, segments, dtype, False)["algorithm"] for outer in (1, 4)]
        assert found == ["atomics", "lanes"]
    for length, inner in itertools.product((8193, 10**6), (1, 3, 100)):
        one, many = (plan_softmax(outer, length, inner, 300, sorted=True) for outer in (1, 1000))
        assert one == many and one["algorithm"] == "sorted" and one["rows"] * one["tiles"] >= length
        assert one["workspace_bytes"] >= 16 * one["tiles"] * inner + 8 * 300 * inner
    for inner, segments in [(1, 513), (1, 1536), (8, 600)]:
        assert plan("segment_sum", 3, 10**6, inner, segments, "float32", False)["algorithm"] == "tables"
    # Sums of integers have one table a block, so there may be more segments.
    for dtype, segments, algorithm in [
        ("int32", 3906, "tables"),
        ("uint8", 3906, "tables"),
        ("int32", 3907, "atomics"),
    ]:
        assert plan("segment_sum", 3, 10**6, 1, segments, dtype, False)["algorithm"] == algorithm
    assert plan("segment_sum", 3, 10**7, 1, 12_289, "int32", False)["algorithm"] == "atomics"
    # So do extremes, except of very many rows. A few rows are cut into more slices, of larger blocks.
    for length, dtype, segments, algorithm in [
        (10**6, "int16", 2277, "tables"), (10**6, "float32", 12_288, "tables"), (10**6, "float32", 12_289, "atomics"),
        (10**6, "float64", 6144, "tables"), (100_000, "float32", 1562, "tables"), (100_000, "float32", 1563, "atomics"),
        (1 << 23, "int16", 12_288, "atomics"),
    ]:  # fmt: skip
        one, many = (plan("segment_max", outer, length, 1, segments, dtype, False) for outer in (1, 1000))
        assert one["algorithm"] == many["algorithm"] == algorithm
        assert one["workspace_bytes"] == many["workspace_bytes"]
        if algorithm == "tables":
            assert one["tiles"] == min(length // (2 * segments), 132) and one["warps"] == 32
            assert many["tiles"] == length // (8 * segments) and many["warps"] == 8
            assert one["workspace_bytes"] >= one["tiles"] * segments * np.dtype(dtype).itemsize
    for op, dtype, segments, words in [
        ("segment_sum", "float32", 1537, 14), ("segment_sum", "bfloat16", 20_000, 9), ("segment_max", "float64", 10**7, 0),
        ("segment_min", "int8", 10**7, 0.5), ("segment_sum", "int32", 10**7, 0),
    ]:  # fmt: skip
        one, many = (plan(op, outer, 10**6, 3, segments, dtype, False) for outer in (1, 1000))
        # Whether a block has a table depends on the batch: exact sums do not.
        assert {**one, "shared_bytes": 0} == {**many, "shared_bytes": 0} and one["algorithm"] == "atomics"
        assert 0 <= one["workspace_bytes"] - 24 * words * segments <= (1024 if words else 0)
    for length, segments, dtype, words in [
        (1 << 24, 3000, "float32", 4), (1 << 22, 3000, "float16", 2), (1 << 23, 5000, "bfloat16", 4),
        (1 << 22, 5000, "bfloat16", 2), (1 << 20, 3000, "float32", 0),
    ]:  # fmt: skip
        found = plan("segment_sum", 1, length, 1, segments, dtype, False)
        if SHARED_LIMIT[capability] == 227:
            assert (found["algorithm"], found["shared_bytes"]) == ("atomics", 4 * words * segments)
    for op, dtype in [("segment_max", "float64"), ("segment_min", "int8"), ("segment_sum", "int32")]:
        assert plan(op, 1, 10**6, 64, 10**6, dtype, False)["algorithm"] == "atomics"
        assert plan(op, 1, 10**6, 65, 10**6, dtype, False)["algorithm"] == "ordered"
    for inner, segments, dtype in [(1, 1537, "float64"), (1, 10**6, "float32"), (9, 129, "float32")]:
        assert plan("segment_sum", 3, 10**6, inner, segments, dtype, False)["algorithm"] == "ordered"
    assert plan("segment_sum", 3, 50_000, 1, 5, "float32", True)["algorithm"] == "sorted"
    # One launch orders few rows, if blocks hold the counts of all segments.
    for length, segments, order in [
        (2049, 10**6, "block"), (16_385, 10**6, "sweep"), (2049, 5000, "ranges"), (65_536, 5000, "ranges"),
        (65_537, 5000, "sweep"), (10**6, 10**5, "sweep"), (16_385, 10**5, "ranges"),
    ]:  # fmt: skip
        found = plan("segment_max", 1, length, 65, segments, "bfloat16", False)
        if order == "ranges" and SHARED_LIMIT[capability] < (200 if segments == 10**5 else 99):
            order = "block" if length <= 1 << 14 else "sweep"
        assert (found["algorithm"], found["order"]) == ("ordered", order)
        assert found["workspace_bytes"] >= 8 * length
    # Tiles are short where segments have few rows.
    for length, segments, rows in [(43_056, 7826, 8), (40_000, 5000, 16), (40_000, 5001, 8)]:
        plans = [plan("segment_sum", outer, length, 16, segments, "float64", False) for outer in (1, 40)]
        assert plans[0]["rows"] == plans[1]["rows"] == rows
    # As many tiles as make whole turns of warps. (type, columns, rows of a tile)
    for dtype, inner, rows in [
        ("float32", 128, 256),
        ("bfloat16", 128, 172),
        ("float32", 18, 72),
        ("float64", 1000, 252),
    ]:
        found = plan("segment_sum", 1, 1 << 20, inner, 10**6, dtype, False)
        assert (found["algorithm"], found["rows"]) == ("ordered", rows)
    for op, length, inner, dtype in itertools.product(
        ("segment_sum", "segment_min"), (33_000, 50_000, 1 << 22), (1, 3, 128, 5000), ("int8", "float16", "float64")
    ):
        one, many = (plan(op, outer, length, inner, 5000, dtype, True) for outer in (1, 1000))
        assert one == many and one["rows"] * one["tiles"] >= length > one["rows"] * (one["tiles"] - 1)
        part = max(4, np.dtype(dtype).itemsize) if op == "segment_sum" else np.dtype(dtype).itemsize
        assert one["workspace_bytes"] >= (2 * one["tiles"] * inner * part if one["tiles"] > 1 else 0)
