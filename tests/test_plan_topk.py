"""The plan of top-k, argmax and the gate: see test_plan.py."""

import itertools
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from plans import BITS, CAPABILITIES, KS, LENGTHS, OUTER, SHARED_LIMIT, plan_argmax, plan_topk

import jaxgpuops

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # last: the installed jaxgpuops comes first
from benchmarks import topk as benchmark

ALGORITHMS = {
    "empty",
    "argmax",
    "rows",
    "few",
    "sort",
    "compare",
    "held",
    "stream",
    "wave",
    "sieve",
    "columns",
    "buckets",
    "radix",
    "digits",
}
ALGORITHMS |= {"short", "block", "sweep"}  # kernels of the sort family, which sort whole rows
INNER = (1, 5, 256)


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
    elif k > 64 and outer <= 132 and SHARED_LIMIT[capability] == 227:
        expected = {"sieve"}
    else:
        expected = {"stream", "buckets"}
    if (
        k > 1 and SHARED_LIMIT[capability] < 163
    ):  # if the best kernel does not fit, the next best one may take its place
        expected |= {"stream", "buckets", "radix", "block", "sweep"}
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
        # Clusters need compute capability 9.0; blocks that share a row in the held, stream and digits kernels are one.
        if plan["algorithm"] in ("held", "stream", "digits") and plan["slices"] > 1:
            assert capability >= 90, call
            assert plan["slices"] in (2, 4, 8, 16), (call, plan)
        if plan["algorithm"] == "sieve":
            assert plan["workspace_bytes"] % 16 == 0, (call, plan)  # the workspace of the next row follows it
        # The workspace has at most two composites of value and index for each element, and some room for counters. Rows
        # that are sorted whole have two of both, counters of 256 digits for each tile, and columns turned into rows.
        key, composite = bits // 8, 16 if bits == 64 else 8
        most = 2 * composite * length + length // 256
        if plan["algorithm"] in ("block", "sweep"):
            most = (2 * (key + 4) + 1024 * key / 1536 + (2 * key + 4) * (inner > 1)) * length
        assert 0 <= plan["workspace_bytes"] <= (most + 65536) * inner, (call, plan)


def test_only_clusters_are_missing_on_older_gpus():
    """Kernels exist beside those that need more shared memory: for the largest k of the sieve, and for 64-bit
    elements."""
    for call in calls():
        _, length, inner, k, bits, sorted = call
        new, old = plan_topk(*call, 90), plan_topk(*call, 80)
        if all(new[key] == old[key] for key in ("algorithm", "lanes", "threads", "slices")):
            continue
        if inner > 1 and new["workspace_bytes"] >= inner * length * bits // 8:
            continue  # columns that are transposed, since kernels that not all GPUs have take rows
        if new["algorithm"] == "held" and length <= 16384 and bits <= 16:
            assert old["algorithm"] == "rows", call  # which reads elements that are not aligned one by one
        elif new["algorithm"] in ("held", "sieve"):
            assert old["algorithm"] in (
                ("stream", "buckets", "wave") if k <= 2048 else ("buckets", "radix", "sweep")
            ), call
        elif new["algorithm"] == "digits":
            assert bits < 64 and (k > 64 or inner > 1), call
        elif new["algorithm"] == "compare":
            assert not sorted and 1 < new["slices"] <= 8, call
        elif new["algorithm"] == "argmax":
            assert new["slices"] > 1 and new["workspace_bytes"] == 0 and old["algorithm"] == "argmax", call
        elif bits == 64:
            assert new["algorithm"] in ("stream", "buckets"), call
            assert old["algorithm"] in ("stream", "buckets", "radix"), call
        else:
            assert new["algorithm"] == "stream", call  # a block has fewer threads where two share a multiprocessor
            assert old["algorithm"] in (("buckets", "radix") if new["slices"] > 1 else ("stream",)), call


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
    # Words of columns of 8 or 16 bits have narrow blocks, of which more share columns.
    for outer, length, inner, bits, slices in (
        (23, 1024, 1679, 8, 3),
        (8, 500, 3001, 16, 2),
        (30, 250, 2002, 16, 1),
        (8, 1000, 3001, 16, 8),  # positions that begin equally far from a vector: every eighth
        (8, 1000, 3002, 16, 4),
        (8, 1000, 3001, 32, 1),
    ):
        assert plan_argmax(outer, length, inner, bits, 90)["slices"] == slices, (outer, length, inner, bits)
    # Clusters that share some tens of rows need no workspace.
    for outer, length, bits, slices in (
        (35, 131_072, 8, 2),
        (50, 65_536, 32, 4),
        (66, 65_536, 8, 2),
        (67, 65_536, 8, 1),
        (25, 131_072, 32, 16),
        (9, 262_144, 16, 16),
    ):
        plan = plan_argmax(outer, length, 1, bits, 90)
        assert (plan["slices"], plan["workspace_bytes"]) == (slices, 0), (outer, length, bits)
    # So do those that share long columns of few numbers; where there are none, other kernels take the longest.
    for length, slices, threads in ((257, 1, 64), (4096, 1, 512), (4097, 4, 256), (16_384, 8, 256), (131_072, 16, 512)):
        plan = plan_argmax(1, length, 3, 32, 90)
        assert (plan["slices"], plan["threads"], plan["workspace_bytes"]) == (slices, threads, 0), (length, plan)
        plan = plan_argmax(1, length, 3, 32, 80)
        assert (plan["workspace_bytes"] > 0) == (length > 16_384), (length, plan)
    # A column has a block or a cluster, unless too many sectors then come from memory. Of others, blocks share all columns
    # by vectors that have each column, and have more threads if there is much to read; or by single elements.
    for outer, length, inner, bits, slices, threads, workspace in (
        (1133, 2048, 2, 32, 1, 256, 0),
        (3, 15_182, 8, 32, 8, 256, 0),
        (1, 131_072, 9, 8, 16, 512, 0),
        (6, 4096, 22, 64, 1, 512, 0),
        (1, 330_000, 2, 32, 322, 128, 2 * 322 * 8),
        (1, 524_288, 2, 32, 256, 256, 2 * 256 * 8),
        (1, 1_048_576, 9, 32, 528, 252, 9 * 528 * 8),
    ):
        plan = plan_argmax(outer, length, inner, bits, 90)
        found = plan["slices"], plan["lanes"], plan["workspace_bytes"]
        assert found == (slices, threads, workspace), (outer, length, inner, bits, plan)
    # Slices of other long rows have at least 16 KiB, and fill the device together.
    for outer, length, bits, slices in (
        (1, 262_144, 64, 128),
        (1, 1 << 20, 32, 128),
        (1, 1 << 23, 32, 512),
        (3, 524_288, 16, 64),
        (8, 1 << 20, 16, 64),
        (26, 355_716, 16, 16),
    ):
        plan = plan_argmax(outer, length, 1, bits, 90)
        assert (plan["slices"], plan["threads"]) == (slices, 256), (outer, length, bits, plan)


# Problems at the edges of the regions of the kernels, and which was the fastest on an H200 of those that could take
# them, by 15 to 300 %.
FASTEST = [
    ((10, 5000, 1), 2374, "float64", "sweep"),
    ((7, 12_778, 1), 1015, "int64", "stream"),
    ((11, 812, 1), 12, "int64", "rows"),
    ((1, 811, 22), 14, "int64", "rows"),
    ((103, 2048, 1), 555, "float32", "block"),
    ((25, 21_613, 1), 1971, "bfloat16", "digits"),
    ((1, 66_383, 1), 384, "float16", "sweep"),
    ((3, 9388, 1), 592, "float32", "sweep"),
    ((5, 8192, 1), 2393, "int32", "sweep"),
    ((12, 65_536, 1), 645, "int8", "sweep"),
    ((1, 11_824, 3), 2010, "bfloat16", "sweep"),
    ((1, 262_144, 1), 44_515, "float32", "sweep"),
    ((6, 6818, 1), 457, "float32", "sort"),
    ((23, 4795, 1), 1695, "int64", "sort"),
    ((7, 9167, 1), 3036, "bfloat16", "sweep"),
    ((11, 124_061, 1), 194, "float16", "sieve"),
    ((4, 139_549, 1), 64, "uint8", "sweep"),
    ((1, 4_194_304, 1), 742_110, "int32", "radix"),
    ((5, 6_796_947, 1), 2_625_119, "float64", "radix"),
    ((11, 1_914_461, 1), 133_707, "bfloat16", "radix"),
    ((9, 181_633, 1), 65_868, "float32", "sweep"),
    ((7, 987_198, 1), 23_490, "float64", "buckets"),
    ((500_000, 50, 1), 2, "uint8", "few"),
    ((229_393, 62, 1), 3, "float32", "rows"),
    ((4, 371, 1), 30, "float64", "compare"),
    ((85, 131_072, 1), 943, "uint8", "stream"),
    ((1, 100_003, 1), 2000, "bfloat16", "sweep"),
    ((15, 178_461, 1), 402, "bfloat16", "digits"),
    ((2, 23_283, 4), 170, "float32", "sieve"),
    ((43, 3042, 2), 5, "bfloat16", "rows"),
    ((6, 6272, 5), 8, "bfloat16", "rows"),
    ((16, 7046, 30), 3, "bfloat16", "rows"),
    ((56, 7589, 6), 7, "float16", "rows"),
    ((1, 7046, 30), 28, "int8", "rows"),
    ((1, 2048, 294), 1235, "bfloat16", "block"),
    ((2, 4096, 1100), 2457, "float32", "block"),
    ((2, 2048, 1100), 68, "int8", "block"),
    ((1, 4096, 60), 819, "int8", "digits"),
    ((1, 600, 294), 200, "bfloat16", "digits"),
    ((3, 16_384, 7), 3276, "int8", "digits"),
    ((1, 2048, 60), 68, "float32", "rows"),
    ((300, 4096, 1), 20, "float64", "rows"),
    ((5, 1024, 1), 8, "int64", "rows"),
    ((1, 208_462, 1), 21, "bfloat16", "held"),
    ((9, 524_288, 1), 3, "bfloat16", "held"),
    ((9, 262_144, 1), 20, "float32", "held"),
    ((50, 262_144, 1), 27, "uint8", "held"),
    ((9, 262_144, 1), 20, "uint8", "wave"),
    ((1, 3_339_765, 1), 14, "int8", "wave"),
    ((2, 1 << 23, 1), 250, "int8", "buckets"),
    ((28, 3159, 4), 28, "float32", "rows"),
    ((23, 2433, 36), 10, "bfloat16", "rows"),
    ((459, 1141, 12), 39, "bfloat16", "rows"),
    ((459, 1000, 12), 39, "bfloat16", "columns"),
    ((4, 8192, 1), 2374, "float64", "sweep"),
    ((3, 36_435, 1), 3247, "float64", "sweep"),
    ((1, 65_536, 1), 398, "int64", "sweep"),
    ((1, 13_901, 2), 3698, "float32", "sweep"),
    ((99, 16_384, 1), 3231, "int64", "radix"),
    ((192, 20_271, 1), 2788, "float32", "radix"),
    ((3, 143_099, 1), 29, "uint8", "sweep"),
    ((189, 8192, 8), 2, "bfloat16", "rows"),
    ((3, 1115, 958), 719, "bfloat16", "block"),
    ((14, 2597, 41), 162, "float32", "sort"),
    ((1342, 4185, 2), 2, "float64", "few"),
    ((112_762, 115, 1), 8, "float64", "rows"),
    ((9004, 20, 1), 2, "bfloat16", "few"),
    ((4, 822, 4), 5, "bfloat16", "rows"),
    ((2, 6, 622), 5, "bfloat16", "compare"),
    ((8, 3080, 38), 3, "float32", "columns"),
    ((2769, 18, 22), 4, "bfloat16", "few"),
    ((2769, 18, 22), 4, "float32", "few"),
    ((356, 195, 7), 6, "bfloat16", "columns"),
    ((4165, 351, 5), 51, "float32", "rows"),
    ((12116, 459, 3), 18, "bfloat16", "sort"),
    ((1423, 393, 4), 5, "bfloat16", "sort"),
    ((340, 2570, 1), 7, "bfloat16", "rows"),
    ((1187, 14977, 1), 16, "bfloat16", "rows"),
    ((30, 854, 1), 24, "bfloat16", "rows"),
    ((1676, 1631, 1), 3, "bfloat16", "rows"),
    ((338, 1984, 1), 9, "bfloat16", "rows"),
    ((2, 4, 1), 4, "float32", "compare"),
    ((2, 4, 1), 4, "bfloat16", "compare"),
    ((1783, 32, 1), 32, "float32", "compare"),
    ((34044, 17, 1), 17, "float32", "sort"),
    ((10972, 48, 1), 48, "bfloat16", "sort"),
    ((602, 2617, 1), 2, "float64", "rows"),
    ((106, 3853, 1), 13, "float64", "rows"),
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
    ((872, 512, 1), 8, "float64", "rows"),
    ((52_595, 16, 1), 2, "float32", "few"),
    ((60_000, 32, 1), 4, "float16", "few"),
    ((125_000, 24, 1), 4, "float32", "few"),
    ((1071, 400, 7), 4, "float32", "few"),
    ((125, 400, 60), 2, "float32", "columns"),
    ((33, 818, 256), 3, "int16", "few"),
    ((6, 461, 1000), 8, "bfloat16", "columns"),
    ((53, 5018, 1), 16, "uint8", "rows"),
    ((26, 4404, 1), 64, "int8", "rows"),
    ((117, 16, 16), 6, "bfloat16", "compare"),
    ((34, 131_072, 1), 6532, "float16", "digits"),
    ((34, 131_072, 1), 13_107, "bfloat16", "digits"),
    ((34, 131_072, 1), 9000, "uint8", "sweep"),
    ((1, 1 << 20, 1), 52_428, "float16", "sweep"),
    ((132, 4096, 1), 200, "bfloat16", "block"),
    ((2000, 4096, 1), 200, "bfloat16", "sort"),
    ((2000, 3000, 1), 900, "float32", "block"),
    ((528, 4096, 1), 66, "float32", "rows"),
    ((1056, 2048, 1), 100, "float32", "rows"),
    ((100_000, 97, 1), 12, "float16", "sort"),
    ((100_000, 96, 1), 10, "float16", "rows"),
    ((132, 20_000, 1), 600, "float32", "sieve"),
    ((600, 16_384, 1), 1000, "bfloat16", "sieve"),
    ((60, 10_876, 1), 1059, "bfloat16", "digits"),
    ((60, 10_876, 1), 2100, "bfloat16", "block"),  # no sieve, since k is large
    ((102, 14_656, 1), 315, "uint8", "digits"),
    ((102, 14_656, 1), 127, "uint8", "rows"),
    ((600, 14_656, 1), 256, "uint8", "digits"),
    ((600, 9000, 1), 300, "bfloat16", "digits"),
    ((600, 9000, 1), 64, "bfloat16", "rows"),
    ((600, 9000, 1), 2100, "bfloat16", "block"),
    ((58, 22_091, 1), 73, "float32", "sieve"),  # one block for each row
    ((58, 70_000, 1), 73, "float32", "sieve"),
    ((87, 131_072, 1), 196, "int32", "sieve"),
    ((45, 369_702, 1), 72, "float32", "sieve"),
    ((202, 83_022, 1), 133, "bfloat16", "sieve"),
    ((4, 3_360_204, 1), 244, "bfloat16", "sieve"),
    ((5, 524_288, 1), 209, "int32", "wave"),
    ((60, 275_537, 1), 138, "uint8", "buckets"),
    ((192, 87_117, 1), 274, "int8", "buckets"),
    ((4, 15_768, 1), 183, "int32", "sweep"),
    ((4, 8192, 1), 662, "float32", "sweep"),
    ((1115, 8192, 1), 134, "uint8", "digits"),
    ((600, 32_768, 1), 66, "bfloat16", "sieve"),
    ((600, 16_384, 1), 66, "bfloat16", "rows"),
    ((7, 1 << 20, 1), 60, "float32", "wave"),
    ((16, 511_133, 1), 59, "float32", "wave"),
    ((17, 511_133, 1), 59, "float32", "stream"),
    *[((34, 198_986, 1), 20, "float32", "wave"), ((14, 10_247, 1), 38, "int64", "wave")],
    *[((65, 70_000, 1), 5, "float64", "stream"), ((80, 300, 1), 30, "float16", "compare")],
    ((14, 1 << 22, 1), 18, "uint8", "wave"),
    ((14, 65_536, 1), 5, "int16", "held"),
    ((14, 65_536, 1), 5, "int64", "wave"),
    ((300, 9001, 1), 9000, "float32", "block"),
    ((7, 1 << 20, 1), 100, "float32", "wave"),
    ((30, 11_590, 1), 790, "float32", "buckets"),
    ((600, 11_590, 1), 790, "float32", "digits"),
    ((600, 11_590, 1), 500, "float32", "stream"),
    ((150, 40_000, 1), 1600, "uint8", "digits"),
    ((22, 113_005, 1), 997, "uint8", "digits"),
    ((85, 131_072, 1), 943, "uint8", "stream"),
    ((2, 192_635, 1), 862, "int8", "sweep"),
    ((1194, 8793, 1), 2865, "int8", "block"),
    ((2, 131_072, 1), 6648, "int32", "buckets"),
    ((1, 52_054, 1), 10_862, "float32", "sweep"),
    ((150, 40_000, 1), 1700, "uint8", "digits"),
    ((9, 4735, 37), 77, "bfloat16", "rows"),
    ((9, 4735, 37), 77, "float32", "rows"),
    ((34, 11_302, 13), 304, "bfloat16", "digits"),
    ((34, 11_302, 13), 60, "bfloat16", "rows"),
    ((97, 1503, 37), 470, "int32", "sort"),
    ((600, 8192, 1), 250, "float32", "sort"),
    ((600, 5000, 1), 250, "float32", "stream"),
    ((100, 8192, 1), 250, "float32", "stream"),
    ((3000, 64, 1), 33, "bfloat16", "compare"),
    ((7000, 64, 1), 33, "bfloat16", "sort"),
    ((90, 128, 17), 62, "int32", "compare"),
    ((3, 88_939, 4), 8432, "bfloat16", "digits"),
    ((3, 88_939, 4), 2432, "bfloat16", "digits"),
    ((7, 131_072, 13), 251, "float16", "buckets"),
    ((1, 118_035, 4), 2, "bfloat16", "held"),
    ((52, 15_138, 5), 1829, "int32", "digits"),
    ((10, 16_384, 8), 241, "float32", "sieve"),
    ((2, 10_137, 120), 2399, "int32", "block"),
    ((50, 568_943, 1), 70_994, "int32", "radix"),
    ((50, 568_943, 1), 170_994, "int32", "radix"),
    ((3, 1284, 1), 25, "int16", "rows"),
    ((13, 846, 1), 15, "bfloat16", "rows"),
    ((1, 16_384, 64), 20, "float32", "rows"),
    ((2, 16_384, 64), 20, "float32", "rows"),
    ((1, 131_072, 2), 4, "float32", "wave"),
    ((40, 32_768, 4), 20, "int64", "stream"),
    ((1, 78_375, 9), 192, "float64", "buckets"),
    ((1, 65_536, 8), 9, "float64", "wave"),
    ((200, 1100, 1), 8, "float64", "rows"),
    ((600, 1100, 1), 8, "float64", "rows"),
    # Rows that teams compare, beside those that networks, insertion and sorts take.
    ((64, 16, 1), 4, "float32", "compare"),
    ((8000, 16, 1), 4, "float32", "compare"),
    ((20_000, 16, 1), 6, "bfloat16", "compare"),
    ((20_000, 16, 1), 4, "bfloat16", "few"),
    ((20_000, 20, 1), 4, "int8", "few"),
    ((20_000, 20, 1), 4, "bfloat16", "rows"),
    ((20_000, 33, 1), 4, "int8", "rows"),
    ((20, 24, 1), 2, "float32", "compare"),
    ((3000, 24, 1), 2, "float32", "rows"),
    ((20, 64, 1), 6, "float32", "rows"),
    ((20, 64, 1), 20, "float32", "compare"),
    ((600, 48, 1), 40, "int8", "compare"),
    ((130, 128, 1), 40, "bfloat16", "compare"),
    ((20_000, 100, 1), 99, "float32", "sort"),
    ((130, 256, 1), 6, "bfloat16", "rows"),
    ((280, 32, 1), 6, "float64", "compare"),
    ((500, 64, 20), 2, "float32", "few"),
    # Long columns that a block reads by eights, and rows that a few lanes read, beside those that others take.
    ((3, 16_384, 216), 5, "float32", "few"),
    ((3, 16_384, 216), 9, "float32", "rows"),
    ((3, 16_384, 119), 5, "float32", "rows"),
    ((90, 16_384, 4), 5, "float32", "rows"),
    ((54, 4096, 64), 6, "float32", "columns"),
    ((1784, 2388, 6), 5, "float64", "few"),
    ((182, 2295, 5), 2, "float64", "few"),
    ((110, 2295, 5), 2, "float64", "rows"),
    ((1, 1299, 1109), 4, "float64", "few"),
    ((1, 1299, 1109), 6, "float64", "rows"),
    ((21, 26_191, 30), 3, "bfloat16", "few"),
    ((575, 13_230, 2), 7, "float16", "rows"),
    ((6, 181, 1), 3, "float32", "few"),
    ((6, 181, 1), 5, "float32", "rows"),
    ((1024, 320, 1), 4, "int32", "few"),
    ((1025, 320, 1), 4, "int32", "rows"),
    ((6, 321, 1), 2, "float32", "rows"),
    # Columns, and k above 64, that the rows kernel takes, beside those that it does not.
    ((300, 4096, 3), 40, "float32", "rows"),
    ((44, 4096, 6), 40, "float32", "rows"),
    ((2000, 400, 5), 10, "float32", "rows"),
    ((5, 4096, 100), 10, "float32", "columns"),
    ((1, 200, 5), 3, "float32", "few"),
    ((2, 900, 60), 3, "bfloat16", "rows"),
    ((264, 4096, 1), 100, "int8", "block"),
    ((1000, 4096, 1), 100, "int8", "rows"),
    ((1000, 8192, 1), 80, "float32", "rows"),
    ((1000, 1024, 1), 100, "float32", "sort"),
    ((1000, 8192, 1), 130, "float32", "sort"),
]


def test_many_narrow_rows_have_fewer_threads():
    for bits, rows, threads in (
        (16, 500, 128),
        (16, 600, 64),
        (8, 600, 64),
        (32, 500, 64),
        (32, 600, 64),
        (64, 600, 128),
    ):
        plan = plan_topk(rows, 4096, 1, 64, bits, True, 90)
        assert (plan["algorithm"], plan["threads"], plan["blocks"]) == ("rows", threads, rows)


def test_teams_compare_rows_whole():
    """Rows of up to 128 elements have a team of lanes each, in blocks of 128 threads: the time of a small call depends
    on nothing else."""
    for length, lanes in ((2, 4), (5, 8), (16, 16), (17, 32), (33, 32), (64, 32), (65, 128), (128, 128)):
        for outer, inner in ((70, 1), (1, 70), (7, 10)):
            plan = plan_topk(outer, length, inner, min(length, 9), 32, True, 90)
            blocks = -(-70 * lanes // 128)
            if not (inner >= 32 and length <= 8):  # sorted by a thread each
                assert plan["algorithm"] == "compare", (outer, length, inner)
                assert (plan["lanes"], plan["threads"], plan["blocks"], plan["shared_bytes"]) == (lanes, 128, blocks, 0)
        # In the order of indices, all of a row are the row.
        assert plan_topk(70, length, 1, length, 32, False, 90)["threads"] != 128 or length > 128


@pytest.mark.parametrize("sorted", [True, False])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows,k", [((1, 1 << 23, 9), 5), ((3, 3_000_001, 24), 2), ((1, 600_001, 128), 60)])
def test_long_columns_are_read_together(rows, k, bits, sorted):
    """In large arrays. In others, they are transposed."""
    assert plan_topk(*rows, k, bits, sorted, 90)["algorithm"] == "buckets"
    assert plan_topk(rows[0], rows[1], 129, k, bits, sorted, 90)["algorithm"] != "buckets"
    assert plan_topk(rows[0], 8192, rows[2], k, bits, sorted, 90)["algorithm"] != "buckets"


@pytest.mark.parametrize(
    "rows,length,k,bits,sorted,warp",
    [
        *[(4000, 700, 100, 32, True, True), (4000, 700, 300, 32, True, True), (4000, 700, 300, 32, False, True)],
        *[(400, 700, 300, 32, True, False), (4000, 700, 300, 64, True, False), (5000, 700, 300, 16, True, True)],
        *[(4000, 700, 100, 64, True, True), (4000, 700, 100, 64, False, False), (4000, 700, 100, 8, True, False)],
        *[(4000, 700, 100, 16, True, True), (400, 700, 100, 16, True, False), (4000, 1025, 100, 32, True, False)],
    ],
)
def test_a_warp_selects_from_rows_that_fit(rows, length, k, bits, sorted, warp):
    plan = plan_topk(rows, length, 1, k, bits, sorted, 90)
    assert plan["algorithm"] == "sort"
    assert (plan["threads"] == 256 and plan["blocks"] == rows // 8) == warp


def test_large_parts_of_rows_are_not_divided():
    """Where results are in the order of indices, it is faster to read a row twice."""
    assert plan_topk(915, 48_229, 1, 17_845, 8, False, 90)["algorithm"] == "radix"
    assert plan_topk(32, 262_144, 1, 60_113, 16, False, 90)["algorithm"] == "radix"
    assert plan_topk(47, 890_052, 1, 58_051, 16, False, 90)["algorithm"] == "radix"
    assert plan_topk(4, 1 << 23, 1, 6868, 32, False, 90)["algorithm"] == "buckets"
    assert plan_topk(193, 24_990, 1, 3657, 64, False, 90)["algorithm"] == "radix"


@pytest.mark.parametrize(
    "rows,k,bits,takes",
    [
        *[((4, 65_536, 1), 1658, 16, True), ((4, 65_536, 1), 128, 16, False), ((4, 65_536, 1), 30_000, 16, True)],
        *[((34, 131_072, 1), 6532, 16, True), ((34, 131_072, 1), 6532, 32, False), ((4, 300_000, 1), 6532, 16, True)],
        *[((33, 65_536, 1), 800, 32, True), ((34, 65_536, 1), 800, 32, False), ((138, 16_384, 1), 709, 32, True)],
        *[((4, 4096, 1), 300, 16, False), ((4, 65_536, 1), 1658, 64, False), ((107, 32_768, 1), 2463, 8, True)],
    ],
)
def test_results_in_the_order_of_indices_are_not_sorted(rows, k, bits, takes):
    assert (plan_topk(*rows, k, bits, False, 90)["algorithm"] == "digits") == takes
    assert plan_topk(*rows, k, bits, False, 80)["algorithm"] != "digits"  # no clusters


@pytest.mark.parametrize(
    "rows,k,dtype,algorithm",
    [
        *[((22, 262_144, 1), 3488, "float32", "sieve"), ((117, 24_255, 1), 101, "float32", "sieve")],
        *[((180, 65_536, 1), 1133, "int16", "sieve"), ((9, 65_536, 1), 144, "int16", "digits")],
        *[((26, 304_138, 1), 228, "int32", "sieve"), ((1, 4_646_238, 1), 305, "bfloat16", "sieve")],
        *[((5, 71_530, 1), 10_368, "float32", "digits"), ((10, 65_536, 5), 10_430, "float32", "digits")],
        *[((11, 31_455, 1), 638, "float64", "radix"), ((4, 73_141, 1), 743, "float64", "radix")],
    ],
)
def test_the_fastest_where_results_are_in_the_order_of_indices(rows, k, dtype, algorithm):
    assert plan_topk(*rows, k, 8 * jnp.dtype(dtype).itemsize, False, 90)["algorithm"] == algorithm


@pytest.mark.parametrize("rows,k,dtype,algorithm", FASTEST)
def test_the_fastest_of_the_kernels(rows, k, dtype, algorithm):
    assert plan_topk(*rows, k, 8 * jnp.dtype(dtype).itemsize, True, 90)["algorithm"] == algorithm


def test_columns_become_rows():
    """Where they are, the workspace has the array, turned, and the results."""
    for rows, k, bits, sorted, algorithm in [
        ((2, 12_316, 546), 1338, 16, True, "digits"),
        ((38, 10_830, 158), 290, 64, True, "stream"),
        ((11, 214_604, 9), 4095, 16, False, "sieve"),
        ((1, 200_001, 3), 50, 32, True, "wave"),
        ((13, 32_768, 3), 11, 16, False, "held"),
        ((1, 65_536, 128), 60, 32, True, "held"),
        ((1, 40_522, 32), 1262, 32, True, "sieve"),
        ((1, 8192, 47), 354, 32, True, "stream"),
        ((12, 8192, 48), 26, 32, False, "rows"),
    ]:
        plan = plan_topk(*rows, k, bits, sorted, 90)
        turned = rows[2] * (rows[1] * bits // 8 + k * (bits // 8 + 4))
        assert plan["algorithm"] == algorithm and plan["workspace_bytes"] >= turned
        # A part of the batch makes do with its part of the workspace.
        part = plan_topk(1, *rows[1:], k, bits, sorted, 90, plan["workspace_bytes"])
        assert part["workspace_bytes"] <= plan["workspace_bytes"]
    assert plan_topk(20, 10_121, 34, 896, 8, True, 90)["workspace_bytes"] == 0


def test_topk_softmax():
    def plan_of(rows, k, groups=1, biased=False, sums_rows=False):
        return jaxgpuops._native.modules["cpu"].plan_topk_softmax(*rows, k, groups, biased, sums_rows)

    for length in (1, 8, 64, 65, 128, 129, 256, 257, 512, 513, 1024):
        for k in {min(k, length) for k in (1, 8, 16, 17, 32, 33, 64)}:
            many, few = (10**6, length, 1), (1, length, 3)
            plan = plan_of(many, k)
            assert plan["algorithm"] == "rows" and plan["workspace_bytes"] == 0
            short = length <= 16 and k <= 8  # a lane has a row alone
            assert (plan["lanes"] == 1) == short and plan["lanes"] * plan["elements"] >= length
            assert plan["elements"] >= k if short else 2 * plan["lanes"] >= k
            # Rows have the same bits in every batch. Where these depend on the lanes of a row, the plan does not depend
            # on the number of rows.
            plan = plan_of(many, k, biased=True)
            assert plan == plan_of(many, k, sums_rows=True) == plan_of(few, k, sums_rows=True)
            assert plan["lanes"] * plan["elements"] >= length and 2 * plan["lanes"] >= k
            for biased in (False, True):
                fits = length <= 256 and k <= 16
                faster = biased or 64 < length <= 128 or (length > 64 and k > 1)
                plan = plan_of(few, k, biased=biased)
                ranked = not biased and length <= 64 and (k > 8 or length <= 16)
                assert plan["algorithm"] == ("ranked" if ranked else "few" if fits and faster else "rows")
                assert plan["lanes"] * plan["elements"] >= length and 2 * plan["lanes"] >= k
            for groups in (2, 8, 64):
                plan = plan_of(many, k, groups)
                assert plan["elements"] == 32 and 32 * plan["lanes"] >= length and 2 * plan["lanes"] >= k
    # A lane has no logits of two groups.
    for length, groups, algorithm in [(128, 8, "few"), (128, 64, "rows"), (160, 5, "few"), (160, 8, "rows")]:
        assert plan_of((32, length, 1), 6, groups)["algorithm"] == algorithm
    for rows, k in [((0, 5, 1), 2), ((3, 5, 0), 2), ((3, 5, 1), 0)]:
        assert plan_of(rows, k)["algorithm"] == "empty"


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
            if plan["algorithm"] == "digits":
                assert plan["slices"] <= 16 and capability in (90, 100), (call, plan)
            assert 0 <= plan["workspace_bytes"] <= whole["workspace_bytes"], (call, plan)
