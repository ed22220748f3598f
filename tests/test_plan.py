"""The plan of the CUDA kernels: a pure function of shapes, so it is tested where there is no GPU."""

import itertools
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from plans import CAPABILITIES, LENGTHS, OUTER, SCANS, SHARED_LIMIT, plan_scan

import jaxgpuops

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # last: the installed jaxgpuops comes first
from benchmarks import topk as benchmark

plan_topk = jaxgpuops._native.modules["cpu"].plan_topk
plan_argmax = jaxgpuops._native.modules["cpu"].plan_argmax

ALGORITHMS = {
    "empty",
    "argmax",
    "rows",
    "few",
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
    ((2769, 18, 22), 4, "bfloat16", "few"),
    ((2769, 18, 22), 4, "float32", "few"),
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
    ((518, 378, 1), 4, "float64", "few"),
    ((1, 512, 1), 170, "float32", "compare"),
    ((64, 512, 1), 170, "float32", "compare"),
    ((256, 512, 1), 170, "float32", "sort"),
    ((8, 2048, 1), 682, "float32", "compare"),
    ((1, 8192, 1), 1024, "float64", "compare"),
    ((16, 512, 1), 32, "bfloat16", "compare"),
    ((16, 512, 1), 2, "bfloat16", "rows"),
    ((1, 2048, 1), 32, "float32", "rows"),
    ((5, 49, 651), 32, "bfloat16", "compare"),
    ((4, 128, 256), 2, "float32", "few"),
    ((21_396, 11, 22), 2, "float16", "few"),
    ((80_953, 61, 1), 2, "float64", "few"),
    ((872, 512, 1), 8, "float64", "sort"),
    ((52_595, 16, 1), 2, "float32", "few"),
    ((60_000, 32, 1), 4, "float16", "rows"),
    ((125_000, 24, 1), 4, "float32", "few"),
    ((1071, 400, 7), 4, "float32", "few"),
    ((125, 400, 60), 2, "float32", "columns"),
    ((117, 16, 16), 6, "bfloat16", "compare"),
    ((34, 131_072, 1), 6532, "float16", "buckets"),
    ((34, 131_072, 1), 13_107, "bfloat16", "sweep"),
    ((34, 131_072, 1), 9000, "uint8", "sweep"),
    ((1, 1 << 20, 1), 52_428, "float16", "sweep"),
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
    ((200, 1100, 1), 8, "float64", "stream"),
    ((600, 1100, 1), 8, "float64", "sort"),
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


@pytest.mark.parametrize(
    "rows,length,k,bits,sorted,warp",
    [
        *[(4000, 700, 100, 32, True, True), (4000, 700, 300, 32, True, False), (4000, 700, 300, 32, False, True)],
        *[(4000, 700, 100, 64, True, True), (4000, 700, 100, 64, False, False), (4000, 700, 100, 8, True, False)],
        *[(4000, 700, 100, 16, True, True), (400, 700, 100, 16, True, False), (4000, 1025, 100, 32, True, False)],
    ],
)
def test_a_warp_selects_from_rows_that_fit(rows, length, k, bits, sorted, warp):
    plan = plan_topk(rows, length, 1, k, bits, sorted, 90)
    assert plan["algorithm"] == "sort"
    assert (plan["threads"] == 256 and plan["blocks"] == rows // 8) == warp


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
    for op, dtype in (("cumprod", "int32"), ("cummax", "int16"), ("cumsum", "uint8")):
        for length, inner, most in ((64, 3, 3 << 15), (1000, 3, 1 << 18), (457, 1, 1 << 16)):
            takes = none if inner == 1 and dtype == "int32" else few
            assert small(scan_planner(op, dtype, False), length, inner, most) == takes, (op, length, inner)
        assert small(scan_planner(op, dtype, False), 464, 1) == none  # rows of whole vectors
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
