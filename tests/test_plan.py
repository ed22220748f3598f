"""The plan of the CUDA kernels: a pure function of shapes, so it is tested where there is no GPU.

Here are the plans of softmax and reductions, and what holds for the plans of all families. test_plan_topk.py,
test_plan_scan.py, test_plan_count.py and test_plan_sort.py have those of their families.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from plans import BITS, KS, LENGTHS, SCANS, plan_argmax, plan_scan, plan_topk

import jaxgpuops

plan_softmax = jaxgpuops._native.modules["cpu"].plan_softmax
plan_reduce = jaxgpuops._native.modules["cpu"].plan_reduce


def softmax_planner(op, dtype, masked):
    return lambda *args: plan_softmax(op, *args[:3], dtype, 1.0, False, False, masked, *args[3:])


def reduce_planner(op, dtype, masked):
    return lambda *args: plan_reduce(op, *args[:3], dtype, masked, *args[3:])


def test_columns():
    """Short axes are walked along, few columns read as flat rows, others in vectors; masks have kernels of their
    own."""
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
                    small = other["algorithm"] == "small"  # in the same order
                    assert small or {k: other[k] for k in same} == same, (op, length, inner, dtype, outer)
            masked = plan_softmax(op, 3, length, inner, dtype, 1.0, False, False, True, 90)
            assert masked["algorithm"] in ("columns", "columns_split"), (op, length, inner, dtype, masked)
    for dtype, length, inner in itertools.product(("int8", "int32", "float64"), (2, 40, 100_000), (3, 257)):
        plan = plan_reduce("sum", 700_000, length, inner, dtype, False, 90)
        tiled = dtype == "float64" and (length, inner) != (40, 257)  # of those that are walked
        walked = ("rows_tiles",) if tiled else ("columns_walk",)
        assert plan["algorithm"] in (walked if length <= 40 else ("columns_flat",)), (dtype, length, inner)


def walks(plan):
    """Whether columns are walked along, or take the kernel of the same order of additions."""
    return plan["algorithm"] in ("columns_walk", "rows_tiles")


@pytest.mark.parametrize("capability", [80, 90])
def test_log_sum_exps_of_columns_without_elements(capability):
    """They are all -inf: there is something to write, but nothing to divide among blocks."""
    plan_softmax = jaxgpuops._native.modules["cpu"].plan_softmax
    for dtype, outer, inner in itertools.product(("float16", "float32", "float64"), (1, 103), (2, 7, 93, 100_003)):
        plan = plan_softmax("logsumexp", outer, 0, inner, dtype, 1.0, False, False, False, capability)
        assert plan["algorithm"] not in ("empty", "rows_tiles")


def test_tiles_of_columns():
    """Columns that would be walked go through shared memory if an outer index is not too large. Both kernels give the
    same bits, so the plan may depend on the batch."""
    for op, dtype, length, inner, tiled in (
        ("softmax", "float32", 16, 5, True),
        ("log_softmax", "bfloat16", 24, 3, True),
        ("log_softmax", "bfloat16", 25, 3, False),  # by two threads
        ("log_softmax", "float32", 25, 3, True),
        ("softmax", "float32", 24, 170, True),
        ("softmax", "float32", 24, 171, False),  # more than 16 KiB
        ("logsumexp", "float32", 24, 511, True),
        ("logsumexp", "float32", 24, 513, False),  # more than 48 KiB
        ("softmax", "float64", 16, 5, False),  # exponentials take more time than memory
        ("logsumexp", "float64", 16, 5, False),
        ("logsumexp", "float32", 100, 7, True),
        ("sum", "float64", 16, 5, True),
        ("sum", "bfloat16", 60, 5, True),
        ("sum", "int32", 16, 5, False),
        ("max", "float32", 16, 5, False),
        ("dot", "float32", 16, 5, False),
        ("softmax_jvp", "float32", 16, 5, False),
        ("cross_entropy", "float32", 16, 5, False),
    ):
        rows = op in ("sum", "max", "dot")
        planner = (reduce_planner if rows else softmax_planner)(op, dtype, False)
        for capability in (80, 90):
            plan = planner(100_000, length, inner, capability)
            assert plan["algorithm"] == ("rows_tiles" if tiled else "columns_walk"), (op, dtype, length, inner, plan)
        masked = (reduce_planner if rows else softmax_planner)(op, dtype, True)(100_000, length, inner, 90)
        assert masked["algorithm"] != "rows_tiles", (op, dtype, length, inner, masked)


def test_few_flat_rows():
    """Clusters share flat rows of several thousand elements if they are few, where there are clusters."""
    for op, dtype, length, inner, most in (
        ("log_softmax", "float32", 4347, 3, 33),
        ("softmax", "bfloat16", 2000, 7, 33),
        ("softmax", "float16", 2001, 9, 33),
        ("softmax", "float64", 1000, 11, 0),  # a block holds them
        ("softmax", "float32", 800, 5, 0),
        ("sum", "float32", 1000, 11, 0),
    ):
        planner = (reduce_planner if op == "sum" else softmax_planner)(op, dtype, False)
        for outer, capability in itertools.product((1, 33, 34), (80, 90)):
            plan = planner(outer, length, inner, capability)
            shared = outer <= most and capability == 90
            assert (plan["blocks"] == 8) == shared, (op, dtype, length, inner, outer, plan)
            assert plan["workspace_bytes"] == 0


def test_clusters_of_flat_columns():
    """Up to eight blocks that share a flat row are a cluster if there are few of them; else they leave their statistics
    for another kernel. A row has the same parts either way, and any batch has the same workspace."""
    for op, dtype, length, inner in (
        ("softmax", "bfloat16", 8192, 12),
        ("log_softmax_jvp", "float32", 2500, 13),
        ("logsumexp", "float32", 2048, 13),
    ):
        plans = {
            (outer, capability): plan_softmax(op, outer, length, inner, dtype, 1.0, False, False, False, capability)
            for outer, capability in itertools.product((1, 40, 132, 2000), (80, 90))
        }
        for plan in plans.values():
            assert plan["algorithm"] == "columns_flat" and 3 <= plan["blocks"] <= 8, (op, plan)
            assert plan["blocks"] == plans[1, 90]["blocks"], (op, plan)
            assert plan["workspace_bytes"] == plans[1, 90]["workspace_bytes"] > 0, (op, plan)
        # Blocks that write results read their parts from shared memory, if blocks are few.
        staged = [plans[outer, 90]["staged"] for outer in (1, 132)]
        assert staged == [op == "softmax", False] and not plans[1, 80]["staged"], (op, staged)
    # The least parts would be 13, which are too many for a cluster, and are made longer.
    assert plan_reduce("sum", 1, 4096, 13, "int32", False, 90)["blocks"] == 8
    assert plan_reduce("sum", 1, 6000, 13, "int32", False, 90)["blocks"] > 16


def test_loose_columns():
    """The parts of a long column, and the workspace, follow from the length and the number of columns, in any batch."""
    for (length, inner), dtype, parts in (
        ((3011, 123), "float16", 16),
        ((5525, 521), "bfloat16", 44),
        ((66_670, 3), "bfloat16", 8),
        ((1500, 2100), "bfloat16", 8),
    ):
        for outer, capability in itertools.product((1, 40, 2000), (80, 90)):
            plan = plan_reduce("sum", outer, length, inner, dtype, False, capability)
            assert (plan["algorithm"], plan["blocks"]) == ("columns_flat", parts), (outer, length, inner, plan)
            first = plan_reduce("sum", 1, length, inner, dtype, False, 90)
            assert plan["workspace_bytes"] == first["workspace_bytes"] > 0
            assert plan["threads"] <= 512


def test_columns_of_integers():
    """Maxima of 32-bit integers along long axes are read in vectors of columns."""
    for op, dtype, length, inner, algorithm in (
        ("max", "int32", 247, 12_700, "columns"),
        ("min", "uint32", 96, 3000, "columns"),
        ("max", "int32", 95, 3000, "columns_walk"),
        ("max", "int32", 247, 12_702, "columns_walk"),  # not whole vectors
        ("max", "int16", 247, 12_704, "columns_walk"),
        ("sum", "int32", 247, 12_700, "columns_walk"),
    ):
        plan = reduce_planner(op, dtype, False)(9, length, inner, 90)
        assert plan["algorithm"] == algorithm, (op, dtype, length, inner, plan)


def test_few_long_rows():
    """Few rows are shared by more blocks with fewer warps, and some by blocks that leave their sums for a second
    kernel."""
    for op, dtype, outer, length, algorithm, blocks in (
        ("logsumexp", "float32", 10, 16_384, "rows", 4),
        ("logsumexp", "float32", 100, 16_384, "rows", 2),
        ("sum", "float32", 13, 16_384, "rows", 1),
        ("sum", "float32", 300, 16_384, "rows", 2),
        ("sum", "float32", 40, 25_600, "rows", 4),
        ("sum", "float64", 47, 5151, "rows", 1),
        ("softmax", "bfloat16", 2, 104_372, "rows", 16),
        ("softmax", "float32", 20, 47_058, "rows", 8),
        ("softmax", "float16", 8, 1_013_030, "rows_split", 62),  # and not a cluster that fills its registers
        ("sum", "float32", 8, 524_288, "rows_split", 64),
        ("sum", "float32", 7, 524_288, "rows", 16),
        ("logsumexp", "bfloat16", 2, 1_000_000, "rows_split", 123),
    ):
        planner = (reduce_planner if op == "sum" else softmax_planner)(op, dtype, False)
        plan = planner(outer, length, 1, 90)
        assert (plan["algorithm"], plan["blocks"]) == (algorithm, blocks), (op, dtype, outer, length, plan)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_narrow_columns(dtype):
    """Few columns side by side, along a long enough axis, are read as flat rows, however large the batch is."""
    item = np.dtype(jnp.dtype(dtype)).itemsize
    for op, longest in (("softmax", {32: 8192}), ("softmax_jvp", {16: 1499, 32: 8192})):
        for outer, beside in itertools.product((1, 70, 5000), longest):
            for length, flat in ((longest[beside], False), (longest[beside] + 1, True)):
                plan = plan_softmax(op, outer, length, beside // item, dtype, 1.0, False, False, False, 90)
                assert (plan["algorithm"] in ("columns_flat", "small")) == flat, (op, outer, length, plan)
        plan = plan_softmax(op, 5000, 4100, 64 // item, dtype, 1.0, False, False, False, 90)
        assert plan["algorithm"] != "columns_flat", (op, plan)
    # So are those that are summed up, along axes that are not walked.
    sums = reduce_planner("sum", dtype, False)
    for planner in (softmax_planner("logsumexp", dtype, False), sums):
        for outer, length in itertools.product((1, 5000), (8192, 100_000)):
            narrow, wide = (planner(outer, length, beside // item, 90) for beside in (16, 32))
            assert narrow["algorithm"] in ("columns_flat", "small") and wide["algorithm"].startswith("columns")
            flat = planner is sums and length == 8192  # 256 KiB
            assert (wide["algorithm"] == "columns_flat") == flat, (outer, length, wide)
        assert walks(planner(5000, 128, 16 // item, 90))
    assert reduce_planner("max", dtype, False)(5000, 4096, 16 // item, 90)["algorithm"] == "columns"


def test_few_rows_of_statistics():
    """If there are few rows, each has a block for its statistics, whose lanes have two vectors; those of long 16-bit rows
    that are not aligned have one, unless rows are more."""
    for op, length, dtype, warps, most in (
        ("logsumexp", 10_001, "bfloat16", 20, 8),
        ("sum", 1000, "bfloat16", 4, 0),
        ("logsumexp", 2984, "bfloat16", 6, 20),
        ("logsumexp", 2080, "float32", 9, 8),
        ("logsumexp", 4525, "float32", 18, 8),
        ("logsumexp", 6400, "float32", 25, 0),
        ("sum", 516, "float32", 3, 0),
    ):
        planner = (reduce_planner if op == "sum" else softmax_planner)(op, dtype, False)
        rows = most * 132 // warps
        found = [planner(outer, length, 1, 90)["threads"] == 32 * warps for outer in (max(1, rows), rows + 1)]
        assert found == [most > 0, False], (op, length, dtype, found)


def test_sums_of_rows_that_are_not_whole_vectors():
    """The length decides how many warps share a row; if rows are few, up to eight times as many."""
    for dtype, length, groups in (
        ("float16", 513, [8, 8, 4]),  # a warp has a row, and a block four
        ("float16", 2305, [8, 8, 4]),
        ("float16", 2307, [16, 2, 2]),
        ("float32", 1153, [16, 2, 2]),
        ("float32", 257, [8, 8, 4]),
        ("bfloat16", 9217, [32, 4, 4]),
        ("bfloat16", 9219, [32, 8, 8]),
        ("bfloat16", 36_863, [32, 16, 16]),
        ("float16", 353, [8, 8, 4]),
    ):
        planner = reduce_planner("sum", dtype, False)
        found = [planner(rows, length, 1, 90) for rows in (65, 2 * 132, 10_000)]
        assert [plan["threads"] for plan in found] == [32 * n for n in groups], (dtype, length, found)
        assert {plan["algorithm"] for plan in found} == {"rows"} and not found[0]["workspace_bytes"]
    # Longer rows have parts of 16 KiB, however many rows there are.
    for dtype, length, parts in (("bfloat16", 36_867, 5), ("float32", 58_007, 15), ("float16", 1_048_575, 128)):
        for rows, capability in itertools.product((1, 1145), (80, 90)):
            plan = reduce_planner("sum", dtype, False)(rows, length, 1, capability)
            assert (plan["threads"], plan["blocks"]) == (256, parts), (dtype, length, plan)
            assert 0 <= plan["workspace_bytes"] - 4 * parts < 16, (dtype, length, plan)


def test_softmax_of_rows_that_are_not_whole_vectors():
    """The length decides how many warps share a row; if rows are few, up to four times as many."""
    for dtype, length, few, many in (
        ("bfloat16", 257, 2, 4),  # a warp has a row, and a block four
        ("float16", 515, 3, 4),
        ("float32", 511, 4, 4),
        ("bfloat16", 1101, 6, 2),
        ("float16", 2202, 9, 3),
        ("float32", 1101, 9, 3),
        ("bfloat16", 4099, 6, 6),
        ("float32", 6999, 14, 14),
    ):
        # Other operations take such rows of fewer lengths.
        size = length * (4 if dtype == "float32" else 2)
        others = ("cross_entropy_grad", "logsumexp_grad", "logsumexp") if 1024 < size <= 10 << 10 else ()
        for op in ("softmax", "log_softmax", *others):
            plans = [softmax_planner(op, dtype, False)(rows, length, 1, 90) for rows in (4, 100_000)]
            assert [plan["threads"] for plan in plans] == [32 * few, 32 * many], (op, dtype, length, plans)
            assert {plan["algorithm"] for plan in plans} == {"rows"}, (op, dtype, length)


def test_few_columns_that_a_block_holds():
    """However many outer indices there are, since bits depend on it."""
    for op, dtype, length, inner, threads in (
        ("softmax", "float32", 173, 4, 128),
        ("log_softmax", "bfloat16", 335, 3, 128),
        ("softmax", "float16", 700, 5, 512),
        ("softmax", "float64", 96, 53, 1024),
        ("logsumexp", "float32", 1024, 9, 1024),
    ):
        for outer, capability in itertools.product((1, 40, 100_000), (80, 90)):
            plan = softmax_planner(op, dtype, False)(outer, length, inner, capability)
            assert plan["algorithm"] == "columns" and plan["threads"] == threads, (op, dtype, length, inner, plan)
            assert plan["blocks"] == 1 and not plan["workspace_bytes"]


def test_lanes_that_share_short_rows():
    """Lanes have one vector of a row if rows are few, else two, or four of longer rows; if rows are many, what one lane
    has depends on the op alone. Rows are added up in the same order."""
    for op, dtype, length, lanes, few, many in (
        ("softmax", "float32", 64, 4, 8 * 132 * 2, 64 * 132 * 4),
        ("log_softmax", "bfloat16", 100, 4, None, None),  # of rows that are not aligned, lanes have one vector, or many
        ("softmax", "float32", 256, 16, 0, 64 * 132),
        ("softmax", "float64", 120, 16, 0, 64 * 132),
        ("logsumexp", "float32", 200, 8, 0, 16 * 132),
        ("logsumexp", "float32", 60, 4, 8 * 132 * 2, 16 * 132 * 4),
        ("logsumexp", "float64", 64, 8, 8 * 132, 16 * 132 * 2),
    ):
        planner = softmax_planner(op, dtype, False)
        plans = {
            outer: planner(outer, length, 1, 90) for outer in (1, few or 1, (few or 0) + 1, many or 1, (many or 0) + 1)
        }
        assert all(plan["lanes"] == lanes and plan["algorithm"] == "rows" for plan in plans.values()), (op, plans)
        each = {outer: plan["each"] for outer, plan in plans.items()}
        if few is None:
            assert set(each.values()) == {1}, (op, each)
        else:
            assert few == 0 or each[few] == 1, (op, each)
            assert each[few + 1] == 2 and each[many] == 2 and each[many + 1] in (0, 4), (op, each)


def test_few_short_rows():
    """Few rows of up to some hundred elements have a block each, whose lanes have one vector."""
    for dtype, length, warps, most in (
        ("bfloat16", 1000, 4, 8),
        ("float32", 300, 3, 8),
        ("float32", 512, 4, 8),
    ):
        rows = most * 132 // warps
        found = [softmax_planner("softmax", dtype, False)(n, length, 1, 90)["threads"] for n in (1, rows, rows + 1)]
        assert found[:2] == [32 * warps] * 2 and found[2] != 32 * warps, (dtype, length, found)


def test_results_that_all_blocks_make_together():
    """Few long rows are held by all multiprocessors at once. Any batch has room for their statistics."""
    for dtype, spans, least in (("float32", 1024, 160), ("bfloat16", 2048, 160), ("float64", 256, 129)):
        for length in (
            (least - 1) * spans,
            least * spans,
            500 * spans,
            1000 * spans + 1,
            4096 * spans,
            4096 * spans + 1,
        ):
            plans = [softmax_planner("softmax", dtype, False)(outer, length, 1, 90) for outer in (1, 4, 100, 20_000)]
            together = [plan["algorithm"] == "rows_together" for plan in plans]
            all_spans = -(-length // spans)
            most = (16 if dtype == "float64" else 24) * 132
            expected = [least <= all_spans <= 4096 and outer * all_spans <= most for outer in (1, 4, 100, 20_000)]
            assert together == expected, (dtype, length, plans)
            assert len({plan["workspace_bytes"] for plan in plans}) == 1, (dtype, length, plans)
    for op in ("logsumexp", "cross_entropy_grad", "softmax_jvp"):
        assert softmax_planner(op, "float32", False)(1, 500_000, 1, 90)["algorithm"] != "rows_together"
    assert softmax_planner("softmax", "float32", True)(1, 500_000, 1, 90)["algorithm"] != "rows_together"


def test_sums_by_two_kernels():
    """A long row is summed in parts by two kernels. Batches of it have a workspace for that, too, so that one of its rows
    alone can be planned in the same room."""
    for dtype, length, outer, split in (
        ("float32", 58_008, 1145, False),
        ("bfloat16", 1 << 20, 1, True),
        ("bfloat16", 1 << 20, 2, False),
        ("bfloat16", 484_776, 1, False),
    ):
        plan = plan_reduce("sum", outer, length, 1, dtype, False, 90)
        assert (plan["algorithm"] == "rows_split") == split, (dtype, length, outer, plan)
        assert plan["workspace_bytes"] == plan_reduce("sum", 1, length, 1, dtype, False, 90)["workspace_bytes"]


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
            plan = plan_softmax(op, 30_000, length, inner, dtype, 1.0, False, False, False, 90)
            assert walks(plan) == (length in walked), (op, length, inner, plan)
    for op, walked, flat in (
        (
            "sum",
            [(128, 3), (256, 19), (500, 33 if half else 19), (1000, 123)],
            [(5463, 3), (863, 19), (1025, 123), *([(531, 31)] if half else [])],
        ),
        *(
            [
                ("softmax", [(64, 3), (500, 65), (1000, 257)], [(573, 7), (500, 63), (1000, 123)]),
                ("softmax_jvp", [(48, 3), (500, 65), (1000, 257)], [(49, 7), (500, 63), (1000, 123)]),
            ]
            if half
            else [
                ("softmax", [(64, 3), (112, 70), (500, 65)], [(1334, 3), (573, 7), (500, 63), (1000, 257)]),
                ("softmax_jvp", [(48, 3), (112, 7), (1000, 257)], [(49, 3), (113, 7), (500, 63)]),
            ]
        ),
    ):
        planner = (reduce_planner if op == "sum" else softmax_planner)(op, dtype, False)
        assert all(walks(planner(5000, *shape, 90)) for shape in walked), op
        if op == "sum":  # also of whole vectors, if an outer index is not large
            assert walks(planner(5000, 100, 64, 90)) and not walks(planner(5000, 100, 128, 90)) or half
        for shape in flat:
            assert planner(5000, *shape, 90)["algorithm"] == "columns_flat", (op, shape)


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
        ("softmax", "bfloat16", 249, 3),
        ("softmax", "float64", 6, 3),
        ("log_softmax", "float64", 8, 3),
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
        ("softmax_jvp", "float32", 12),
        ("logsumexp", "float32", 12),
        ("logsumexp", "bfloat16", 33),
        ("max", "float32", 33),
        ("dot", "float32", 33),
    ):
        planner = (reduce_planner if op in ("max", "dot") else softmax_planner)(op, dtype, False)
        assert planner(10_000_000, length, 1, 90)["algorithm"] == "rows", (op, dtype, length)


def test_long_rows_of_float64():
    """Results are left to a third kernel where blocks that hold a row would be too large, however many rows there
    are."""
    for op, outer in itertools.product(("softmax", "cross_entropy_grad", "softmax_jvp"), (1, 100, 10_000)):
        planner = softmax_planner(op, "float64", False)
        assert planner(outer, 32_768, 1, 90)["algorithm"] == "rows", (op, outer)
        together = op == "softmax" and outer == 1
        assert planner(outer, 32_769, 1, 90)["algorithm"] == ("rows_together" if together else "rows_split"), (
            op,
            outer,
        )
    assert softmax_planner("cross_entropy_grad", "float32", False)(10, 32_769, 1, 90)["algorithm"] == "rows"


def test_few_rows_with_labels():
    """A lane has one vector if there are few warps per multiprocessor so, else two, or as many as it holds; lanes of
    short rows share a warp."""
    planner = softmax_planner("cross_entropy_grad", "float32", False)
    plans = [planner(outer, 364, 1, 90) for outer in (616, 617, 1056, 1057)]
    assert [plan["threads"] for plan in plans] == [96, 64, 64, 32]
    assert [planner(outer, 64, 1, 90)["each"] for outer in (4224, 4225)] == [1, 0]  # whole vectors
    assert [planner(outer, 62, 1, 90)["each"] for outer in (21_120, 21_121)] == [1, 0]
    # Of longer rows, blocks would be too large.
    assert [planner(20, length, 1, 90)["threads"] for length in (1536, 1540, 5120, 5124)] == [384, 224, 640, 192]
    assert [planner(outer, 4964, 1, 90)["threads"] for outer in (132, 133)] == [640, 160]
    # Clusters of more blocks, if there are multiprocessors for them.
    assert [planner(outer, 12_000, 1, 90)["blocks"] for outer in (33, 34)] == [4, 2]

    half = softmax_planner("cross_entropy_grad", "bfloat16", False)
    assert [half(outer, 118, 1, 90)["each"] for outer in (29_568, 29_569)] == [1, 0]
    assert [half(outer, 249, 1, 90)["each"] for outer in (1452, 1453)] == [1, 0]
    assert [half(20, length, 1, 90)["threads"] for length in (2048, 2056)] == [256, 288]
    double = softmax_planner("cross_entropy_grad", "float64", False)
    assert [double(outer, 130, 1, 90)["threads"] for outer in (352, 353)] == [96, 64]
    assert double(100_000, 280, 1, 90)["threads"] == 96  # the second span of a row would be almost empty


def test_gradients_from_x():
    def planned(outer, length, inner=1, dtype="float32", compute_capability=90):
        options = 1.0, False, False, False, compute_capability
        plan = plan_softmax("softmax_jvp", outer, length, inner, dtype, *options, of_logits=True)
        return plan["algorithm"], plan.get("vectors"), plan.get("threads"), plan.get("blocks")

    assert planned(264, 4096) == ("rows", 2, 512, 1)  # few rows
    assert planned(265, 4096) == ("rows", 8, 128, 1)
    assert planned(100_000, 1792) == ("rows", 2, 224, 1)
    assert planned(100_000, 1793) == ("rows", 8, 64, 1)
    assert planned(10_000, 16_384) == ("rows", 8, 256, 2)
    assert planned(2, 1 << 18) == ("rows", 8, 512, 16)
    assert planned(2, 1 << 18, compute_capability=80)[0] == "none"  # there are no clusters
    assert planned(2, 1 << 14, compute_capability=80) == ("rows", 8, 512, 1)
    assert planned(2, (1 << 18) + 1)[0] == "rows_split"
    # Lanes take four vectors of rows of 16 bits that are whole vectors, and eight elements of others.
    for length, dtype, units in (
        (1_000_000, "bfloat16", 123),
        (1_000_001, "bfloat16", 489),
        (1_000_000, "float32", 489),
    ):
        assert planned(1, length, dtype=dtype) == ("rows_split", 1, 256, units), (length, dtype)
    # Of 16 bits, many rows, too, where other kernels would leave most of a span empty.
    lengths = {1032: (2, 96), 1536: (2, 96), 1544: (8, 32), 2056: (2, 160), 3072: (2, 192), 3080: (8, 64)}
    for length, expected in lengths.items():
        assert planned(100_000, length, dtype="bfloat16")[1:3] == expected, length
    for outer, length, taken in (
        (10**6, 32, True),
        (100_000, 1026, True),
        (1, 1 << 16, True),
        (1, (1 << 16) + 1, False),
    ):
        assert (planned(outer, length, dtype="float64")[0] == "rows") == taken, (outer, length)
    assert planned(10_000, 1000, dtype="float64") == ("rows", 4, 128, 1)
    assert planned(31, 512, dtype="float64") == ("rows", 2, 128, 1)
    for dtype, most in (("float32", 24), ("bfloat16", 24), ("float64", 16)):
        for length in (3, most):
            assert planned(9, length, 5, dtype)[0] == ("columns_walk" if dtype == "float32" else "small")
            assert planned(9000, length, 5, dtype)[0] == "columns_walk"
        assert planned(9, most + 1, 8, dtype)[0] == "none"
        # Warps share longer columns, in any batch.
        longest = 256 if dtype == "float64" else 512
        for length, warps in ((most + 1, -(-(most + 1) // (longest // 32))), (longest, 32)):
            for outer in (1, 100_000):
                assert planned(outer, length, 9, dtype)[0] == "columns_walk"
            assert planned(1, length, 9, dtype)[2] == 32 * warps, (dtype, length)
        assert planned(9, longest + 1, 9, dtype)[0] == ("columns" if dtype == "float32" else "none")
    # A flat row is cut into units. A cluster has up to 16 of them; all multiprocessors hold more of few rows; others are
    # split.
    for dtype, size, unit in (("float32", 4, 2048), ("bfloat16", 2, 4096), ("float16", 2, 4096)):
        for inner in (2, 4):
            least, of_cluster = 512 // size // inner, 16 * unit // inner
            assert planned(10**5, least, inner, dtype) == ("columns_flat", 1, 32, 1)
            assert planned(1, least - 1, inner, dtype)[0] == "none"
            assert planned(10**4, of_cluster, inner, dtype) == ("columns_flat", 1, 256, 16)
            assert planned(1, of_cluster + 1, inner, dtype) == ("columns_flat", 1, 256, 17)
        assert planned(1, 1 << 20, 9, dtype)[0] == "none"
    # Blocks hold the parts of longer columns: a cluster, or as many as run at the same time. Any batch has the same.
    for length, inner, dtype, threads, blocks in (
        (3000, 15, "float32", 512, 12),
        (8192, 70, "float32", 512, 74),
        (8192, 70, "bfloat16", 512, 74),
        (513, 250, "float16", 512, 33),
        (60_000, 30, "float32", 512, 221),  # twice as many elements of a thread
        (3000, 20, "float32", 512, 15),
        (20_000, 40, "float32", 480, 105),
    ):
        for outer, capability in itertools.product((1, 7, 1000), (80, 90)):
            plan = planned(outer, length, inner, dtype, capability)
            assert (plan[0], *plan[2:]) == ("columns", threads, blocks), (outer, length, inner, dtype, plan)
    for length, inner, dtype in (
        (3000, 15, "bfloat16"),  # few columns of 16 bits
        (3000, 257, "bfloat16"),  # many
        (3000, 72, "bfloat16"),  # vectors of columns
        (3000, 32, "float32"),
        (3000, 15, "float64"),
        (200_000, 15, "float32"),  # more than blocks hold
        (600, 513, "float32"),
    ):
        assert planned(1, length, inner, dtype)[0] == "none", (length, inner, dtype)
    assert planned(10, 4100) == ("rows", 8, 64, 4)  # of more than 16 KiB, lanes have more vectors, even if rows are few
    taken = {("float32", 170): False, ("float32", 171): True, ("bfloat16", 87_381): False, ("bfloat16", 87_382): True}
    for (dtype, length), expected in taken.items():
        assert (planned(1, length, 3, dtype)[0] == "columns_flat") == expected, (dtype, length)
    assert planned(1, 400_000, 3, "bfloat16")[0] == planned(1, 60_000, 5, "bfloat16")[0] == "none"
    assert planned(10**4, 7 * 640, 3) == ("columns_flat", 1, 256, 7)


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
                    orders.add(("walk" if walks(plan) else plan["algorithm"].removesuffix("_stream"), plan["blocks"]))
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
    """Arrays of few elements have kernels of their own, for calls that are walked; scans also where bits do not depend
    on the order."""

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
            if (dtype, length) == ("float64", 64):
                takes = none  # a block holds them
            assert small(softmax_planner(op, dtype, False), length, inner, most) == takes, (op, dtype, length, inner)
            assert small(softmax_planner(op, dtype, True), length, inner) == none
        for op in ("cross_entropy", "softmax_jvp", "log_softmax_jvp"):
            assert small(softmax_planner(op, dtype, False), length, inner) == none
        most = 1 << 13 if length <= 8 else 1 << 16
        assert small(reduce_planner("sum", dtype, False), length, inner, most) == few
        for op, masked in (("max", False), ("dot", False), ("sum", True)):
            assert small(reduce_planner(op, dtype, masked), length, inner) == none, (op, dtype)
    # If flat rows are whole vectors, their sums take another kernel for so many rows.
    for dtype, (length, inner) in itertools.product(("bfloat16", "float64"), ((136, 3), (600, 5), (601, 5))):
        whole = length * inner % (8 if dtype == "bfloat16" else 2) == 0
        found = [
            reduce_planner("sum", dtype, False)(n, length, inner, 90)["algorithm"] == "small" for n in (1, 528, 529)
        ]
        assert found == [True, True, not whole], (dtype, length, inner)
    for dtype, length, inner, most in (
        ("float32", 9, 64, 17),
        ("float32", 24, 64, 16),
        ("float32", 24, 63, 17),
        ("float32", 32, 64, 16),
        ("float32", 64, 64, 18),
        ("bfloat16", 16, 64, 17),
        ("bfloat16", 24, 64, 15),
        ("bfloat16", 32, 64, 15),
        ("bfloat16", 64, 64, 16),
    ):
        assert small(softmax_planner("softmax", dtype, False), length, inner, 1 << most) == few, (dtype, length, inner)
    assert small(softmax_planner("softmax", "float32", False), 65, 64) == none
    assert small(softmax_planner("softmax", "bfloat16", False), 81, 64) == none
    planner = softmax_planner("softmax", "float32", False)
    assert [planner(34, length, 5, 90)["algorithm"] for length in (1638, 1639)] == ["small", "columns_flat"]
    assert small(reduce_planner("sum", "float32", False), 8, 1) == none  # rows of floats are added in another order
    for op in ("cumsum", "cumprod", "cummax", "linear_scan", "linear_scan_vjp", "cummin_jvp"):
        exact = op == "cummax"
        for length, inner, most in (
            (1, 1, 3 << 15),
            (7, 9, 3 << 15),
            (9, 4, 1 << 17),
            (31, 1, 1 << (17 if op.endswith(("vjp", "jvp")) else 18 if exact else 16)),
            # Whole lanes of packs would share the rows.
            (32, 1, 1 << 17 if op.endswith(("vjp", "jvp")) else 1 << 18 if exact else 3 << 13),
        ):
            assert small(scan_planner(op, "float32", False), length, inner, most) == few, (op, length, inner)
            assert small(scan_planner(op, "float32", True), length, inner) == none  # calls with segments
        for length, inner in ((33, 3), (1024, 3), (1025, 3), (4096, 3), (4097, 3), (33, 1), (1025, 33)):
            takes = few if exact and inner > 1 and length <= 1024 else none
            if exact and (length, inner) == (33, 3):
                takes = [True, False, False]  # many columns
            assert small(scan_planner(op, "float32", False), length, inner, 1 << 16) == takes, (op, length, inner)
    for op, dtype in (("cumprod", "int32"), ("cummax", "int16"), ("cumsum", "uint8")):
        for length, inner, most in ((64, 3, 3 << 15), (1000, 3, 1 << 18), (457, 1, 1 << 16)):
            takes = none if inner == 1 and dtype != "uint8" else few
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


def test_gradients_of_logsumexp_take_the_kernels_of_softmax():
    for rows, algorithm in (
        ((111, 11, 1), "rows"), ((1 << 20, 11, 1), "rows_tiles"), ((3, 5, 70), "small"), ((64, 64, 4096), "columns_walk"),
        ((4, 60_000, 6), "columns_flat"), ((1, 1 << 19, 1), "rows_together"), ((6, 1 << 21, 1), "rows_split"),
    ):  # fmt: skip
        for dtype in ("bfloat16", "float32"):
            plans = [
                plan_softmax(op, *rows, dtype, 1.0, False, False, False, 90) for op in ("softmax", "logsumexp_grad")
            ]
            assert [plan["algorithm"] for plan in plans] == [algorithm] * 2, (rows, dtype, plans)
