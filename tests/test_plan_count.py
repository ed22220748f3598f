"""The plans of counts, histograms and segments: see test_plan.py."""

import itertools

import numpy as np
import pytest
from plans import CAPABILITIES, SHARED_LIMIT

import jaxgpuops


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
        ((1, 15_000, 1, 14_000), "global"), ((6, 37_000, 1, 33_000), "global"), ((1, 1 << 17, 1, 1 << 13), "global"), ((1, 1 << 17, 1, (1 << 13) - 1), "tables"),
        ((40, 60_000, 1, 10_000), "tables"), ((1, 1 << 19, 1, 14_000), "tables"), ((1, 15_000, 1, 1800), "tables"), ((1, 4000, 1, 500), "global"),
        ((5, 5009, 1, 1521), "global"), ((7, 55_129, 1, 1018), "tables"), ((16, 4096, 1, 1000), "tables"), ((60, 2048, 1, 1500), "tables"),
    ):  # fmt: skip
        assert plan(*rows)["algorithm"] == algorithm
    # Clusters count ranges of bins of few rows. (rows, bins, ranges)
    for outer, length, bins, ranges in [
        (1, 518_276, 35_547, 6), (2, 300_000, 30_000, 3), (3, 1 << 18, 8192, 2), (1, 1 << 20, (1 << 16) - 1, 6),
        (1, 1 << 20, 1 << 14, 6), (1, 800_000, 90_000, 6), (4, 300_000, 30_000, 1), (6, 334_474, 57_130, 1),
    ]:  # fmt: skip
        found = plan(outer, length, 1, bins)
        if capability in (90, 100):
            assert [found[name] for name in ("algorithm", "cluster", "slices", "ranges")] == ["tables", 16, 16, ranges]
            assert 4 * bins <= found["shared_bytes"] * ranges < (4 * bins + 4 * ranges) <= ranges * 227 << 10
        else:
            assert found["cluster"] == 1
    for outer, length, bins in [
        (4, 300_000, 60_000), (7, 300_000, 30_000), (1, (1 << 18) - 1, 20_000), (1, (1 << 20) + 1, 35_547), (1, 300_000, 8191), (1, 300_000, 1 << 16),
        (1, 1 << 20, (1 << 14) - 1), (1, 800_000, 90_001),
    ]:  # fmt: skip
        assert plan(outer, length, 1, bins)["cluster"] == 1
    # Few ids for very many bins. (rows, bins, whether atomics on the result take less time)
    for outer, length, bins, atomics in [
        (1, 300_000, 100_000, True), (2, 500_000, 80_000, True), (1, 1 << 19, 1 << 16, True),
        (1, (1 << 19) + 1, 1 << 16, False), (1, 5 << 18, 200_000, True), (1, (5 << 18) + 1, 200_000, False),
        (3, 300_000, 100_000, False), (5, 334_474, 57_130, True), (4, 400_000, 1 << 15, False), (4, 200_000, 1 << 15, True),
        (5, 400_000, 57_130, False), (30, 50_000, 70_000, False), (4, 100_000, (1 << 15) - 1, False),
    ]:  # fmt: skip
        if 4 * bins <= 4 * SHARED_LIMIT[capability] << 10:
            atomics &= outer <= 2 or capability not in (90, 100) or length < 1 << 18  # which clusters count
            assert plan(outer, length, 1, bins)["algorithm"] == ("global" if atomics else "tables")
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
    if capability == 90:  # parts are smaller where they give work to more multiprocessors
        for outer, length, bins, parts in [
            (2, 1 << 20, 260_652, 32), (2, 1_250_681, 534_348, 17), (1, 3 * 10**6, 300_000, 19), (8, 1 << 19, 400_000, 13),
        ]:  # fmt: skip
            assert plan(outer, length, 1, bins)["ranges"] == parts
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
def test_plans_of_segments(capability):
    plan = lambda *args: jaxgpuops._native.modules["cpu"].plan_segments(*args, False, capability)
    assert plan("segment_sum", 3, 5, 0, 5, "float32", False)["algorithm"] == "empty"
    # (columns, segments, columns that a lane has)
    for inner, segments, columns in [(1, 512, 1), (2, 192, 2), (2, 193, 1), (3, 512, 1), (8, 192, 2), (33, 128, 1)]:
        one, many = (plan("segment_sum", outer, 10**7, inner, segments, "float32", False) for outer in (1, 1000))
        assert one == many and (one["algorithm"], one["columns"]) == ("lanes", columns)
        assert 128 * columns * segments * one["warps"] == one["shared_bytes"] <= SHARED_LIMIT[capability] << 10
        assert one["rows"] * one["tiles"] >= 10**7 and one["workspace_bytes"] >= 4 * one["tiles"] * segments * inner
    # A kernel that has been tried before leaves nothing in the plan.
    few = plan("segment_sum", 1, 50_133, 2, 32, "float16", False)
    assert (few["algorithm"], few["tiles"]) == ("lanes", 6)
    # Many floats in wide rows are put in order rather than added up in large tables.
    for op, dtype, *sizes, algorithm in [
        ("segment_sum", "float32", 60_000, 100, 65, "ordered"), ("segment_sum", "float32", 60_000, 100, 64, "lanes"),
        ("segment_sum", "float32", 10**6, 63, 100, "lanes"), ("segment_sum", "float32", 10**6, 64, 100, "ordered"),
        ("segment_sum", "float32", 40_000, 100, 100, "lanes"), ("segment_sum", "int32", 13_000, 100, 100, "lanes"),
        ("segment_sum", "float64", 60_000, 100, 64, "lanes"), ("segment_sum", "bfloat16", 10**6, 64, 128, "ordered"),
        # Very few rows are compared with all segments.
        ("segment_sum", "float64", 139, 1, 78, "match"), ("segment_sum", "float32", 640, 1, 800, "match"),
        ("segment_sum", "float32", 641, 1, 9, "few"), ("segment_sum", "float32", 640, 1, 832, "few"),
        ("segment_sum", "float32", 300, 16, 14, "match"), ("segment_sum", "float32", 300, 17, 14, "few"),
        ("segment_sum", "float32", 256, 1, 32, "match"), ("segment_sum", "float32", 257, 1, 32, "few"),
        ("segment_max", "bfloat16", 443, 7, 7, "match"), ("segment_sum", "float32", 0, 1, 7, "match"),
    ]:  # fmt: skip
        one, many = (plan(op, outer, *sizes, dtype, False) for outer in (1, 1000))
        assert one == many and one["algorithm"] == algorithm, (op, dtype, sizes)
    # Tables of all columns for blocks. (operation, dtype, rows, columns, segments, whether they are taken)
    for op, dtype, length, inner, segments, wide in [
        ("segment_max", "float32", 1_982_628, 28, 950, True), ("segment_max", "float32", 132 * 950 - 1, 28, 950, False),
        ("segment_max", "float32", 132 * 950, 28, 950, True), ("segment_max", "float32", 28_227, 51, 3, True),
        ("segment_min", "bfloat16", 8193, 2, 5, True), ("segment_min", "bfloat16", 8192, 2, 5, False),
        ("segment_max", "int8", 2049, 65, 15, True), ("segment_max", "int8", 2048, 65, 15, False),
        ("segment_max", "int8", 40_000, 128, 60, True), ("segment_max", "int8", 40_000, 129, 60, False),
        ("segment_sum", "int32", 260_045, 12, 111, True), ("segment_sum", "int64", 10**6, 7, 111, False),
        ("segment_max", "float64", 10**6, 2, 8000, False), ("segment_sum", "float32", 10**6, 28, 950, False),
    ]:  # fmt: skip
        one, three, many = (plan(op, outer, length, inner, segments, dtype, False) for outer in (1, 3, 1000))
        wide = wide and 4 * inner * segments < (SHARED_LIMIT[capability] - 1) << 10
        assert (one["algorithm"] == "tables" and one["columns"] == inner) == wide
        if wide:  # a part of a batch has its part of the workspace
            assert one["workspace_bytes"] == three["workspace_bytes"] == many["workspace_bytes"]
            rows = [-(-length // blocks) for blocks in (132, 44, 1)]
            assert [found["tiles"] for found in (one, three, many)] == [-(-length // own) for own in rows]
            assert one["rows"] * one["tiles"] >= length and plan(op, 1, length, inner, segments, dtype, True) != one
    softmax_plan = jaxgpuops._native.modules["cpu"].plan_segment_softmax
    plan_softmax = lambda *args, dtype="float32", sorted=False: softmax_plan(*args, dtype, sorted, capability)
    # Softmax folds largest elements, so its tiles are not those of sums.
    tiles = [plan(op, 1, 1 << 20, 8, 65536, "float32", True)["rows"] for op in ("segment_sum", "segment_max")]
    assert plan_softmax(1, 1 << 20, 8, 65536, sorted=True)["rows"] == tiles[1] != tiles[0]
    # Numbers of 16 bits have the same cells as float32, and tiles of their own vectors.
    for dtype in ("bfloat16", "float16"):
        assert plan_softmax(1, 5000, 8, 300, dtype=dtype) == plan_softmax(1, 5000, 8, 300)
        narrow = plan("segment_max", 1, 1 << 20, 8, 65536, dtype, True)
        assert plan_softmax(1, 1 << 20, 8, 65536, dtype=dtype, sorted=True)["rows"] == narrow["rows"]
    # Clusters take rows that their blocks cannot hold, too, if the blocks fill half the GPU: each pass reads them again.
    for length, inner, segments, clusters in [
        (16_384, 60, 300, True), (20_000, 40, 90, True), (131_072, 1, 738, False), (65_536, 1, 738, True),
    ]:  # fmt: skip
        found = plan_softmax(1, length, inner, segments)
        assert found["algorithm"] == "cells"
        if capability in (90, 100):
            assert (found["workspace_bytes"] == 0) == clusters
    for op, dtype, length in [
        ("segment_sum", "float64", 1 << 14), ("segment_sum", "float32", 4096), ("segment_max", "int16", 4096),
    ]:  # fmt: skip
        assert plan(op, 7, length, 1, 3000, dtype, False)["algorithm"] == "few"
        assert plan(op, 7, 20 * length, 1, 3000, dtype, False)["algorithm"] in ("atomics", "ordered")
        assert plan(op, 7, 8192, 1, 3000, dtype, True)["algorithm"] == "few"
    # (operation, dtype, batch, rows, columns, segments, rows of a thread and blocks of a row of ids, or another kernel)
    for op, dtype, *sizes, expected in [
        ("segment_max", "float64", 2, 0, 7, 3000, (1, 1)), ("segment_max", "int64", 1, 0, 300, 32, "few"),
        ("segment_sum", "int32", 1, 4421, 1, 616, (1, 18)), ("segment_max", "float32", 7, 2048, 1, 3000, (1, 8)),
        ("segment_min", "float64", 1, 577, 228, 101, (4, 130)), ("segment_sum", "uint32", 1, 4000, 17, 1, (4, 67)),
        ("segment_sum", "int64", 1, 20_000, 1, 2000, (1, 79)), ("segment_sum", "int64", 1, 50_000, 1, 2000, (4, 49)), ("segment_max", "int32", 1, 1500, 5, 3000, (1, 47)),
        ("segment_max", "float32", 1, 1024, 1, 32, "few"), ("segment_max", "float32", 1, 1025, 1, 32, (1, 5)),
        ("segment_sum", "int64", 1, 2048, 1, 4, "few"), ("segment_sum", "int32", 2, 1191, 1, 16, "few"),
        ("segment_max", "float32", 1, 2048, 17, 16, "few"), ("segment_max", "float32", 1, 2048, 17, 17, (4, 34)),
        ("segment_max", "int32", 1, 9001, 12, 43, "tables"), ("segment_max", "int16", 1, 9001, 12, 69, "atomics"),
        ("segment_max", "int32", 1, 1 << 16, 8, 9000, (4, 512)), ("segment_max", "int32", 1, 65_537, 8, 9000, "atomics"),
        ("segment_max", "int32", 1, 8192, 32, 300, (4, 256)), ("segment_max", "int32", 1, 8193, 32, 300, "atomics"),
        ("segment_sum", "int32", 1, 2048, 512, 65, (4, 1024)), ("segment_sum", "int32", 1, 2048, 512, 64, "ranges"),
        ("segment_sum", "float32", 1, 4421, 1, 616, "few"), ("segment_max", "int16", 1, 4096, 1, 616, "few"),
    ]:  # fmt: skip
        found = [plan(op, *sizes, dtype, is_sorted) for is_sorted in (False, True)]
        if isinstance(expected, str):
            assert found[0]["algorithm"] == expected
        else:
            assert ("scatter", *expected, 0) == tuple(
                found[0][name] for name in ("algorithm", "rows", "tiles", "workspace_bytes")
            )
            assert found[1] == found[0] or sizes[1] > 8192
    for rows in [(1, 17, 3), (2048, 1, 65), (0, 7, 3000), (57, 512, 31), (1, 16384, 1), (100, 383, 1 << 20)]:
        one, many = (plan("segment_sum", outer, *rows, "float64", False) for outer in (1, 1000))
        assert one == many and (one["algorithm"], one["workspace_bytes"]) == ("few", 0)
        assert one["rows"] * one["tiles"] >= rows[2] > one["rows"] * (one["tiles"] - 1)
        assert one["shared_bytes"] <= SHARED_LIMIT[75] << 10 and 1 <= one["warps"] <= 16
    assert plan("segment_sum", 1, 4285, 198, 6344, "float32", False)["algorithm"] == "ranges"
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
    # More than 2048 rows have a cluster, if all blocks run at once.
    for outer, length, cluster in [(1, 4096, True), (1, 2049, True), (1, 2048, False), (100, 4096, False)]:
        found = plan_softmax(outer, length, 2, 137)
        assert (found["cluster"] > 1) == (cluster and capability >= 90) and found["workspace_bytes"] == 0
    # One launch of clusters of blocks. (rows, columns, segments, blocks of a cluster, columns of a block)
    for length, inner, segments, cluster, columns in [
        (65_536, 7, 1386, 16, 1), (16_384, 1, 3, 16, 1), (6000, 20, 1000, 8, 2), (8192, 1, 2000, 8, 1), (4097, 3, 90, 8, 1),
    ]:  # fmt: skip
        for outer in (1, 1000):
            found = plan_softmax(outer, length, inner, segments)
            assert found["algorithm"] == "cells"
            has_cluster = capability in (90, 100) and outer == 1
            assert (found["cluster"] > 1) == (found["workspace_bytes"] == 0) == has_cluster or capability == 120
            if has_cluster:
                assert (found["cluster"], found["tiles"], found["columns"]) == (cluster, cluster, columns)
                assert found["shared_bytes"] == 12 * segments * columns
                assert found["rows"] * columns <= 4 * 32 * found["warps"] <= 4096 and found["rows"] * cluster >= length
    # A part of a batch has no workspace if the whole has none.
    has_cluster = [plan_softmax(outer, 4200, 2, 9)["cluster"] > 1 for outer in (1, 8, 64, 1000)]
    assert has_cluster == sorted(has_cluster, reverse=True) and has_cluster[0] == (capability >= 90)
    assert not has_cluster[-1]
    # Blocks that share the rows: with cells in shared memory, or without.
    for length, inner, segments in [
        (524_288, 1, 5), (524_288, 17, 45), (10**6, 8, 1000), (10**6, 1, 10**6), (10**5, 3, 50_000),
    ]:  # fmt: skip
        one, many = (plan_softmax(outer, length, inner, segments) for outer in (1, 1000))
        assert one["algorithm"] == many["algorithm"] == "cells"
        assert one["workspace_bytes"] == many["workspace_bytes"] >= 16 * segments * inner
        for found in (one, many):
            assert found["rows"] * found["tiles"] >= length > found["rows"] * (found["tiles"] - 1)
            assert found["columns"] <= min(inner, 32) and found["shared_bytes"] <= SHARED_LIMIT[capability] << 10
            assert (found["shared_bytes"] > 0) == (segments <= 1000) or SHARED_LIMIT[capability] < 163
    # Cells in shared memory, if that leaves enough blocks.
    for length, inner, segments, shared in [
        (16_384, 1, 2000, True), (65_536, 1, 2000, True), (65_536, 1, 8000, False), (1 << 18, 1, 3000, True),
        (1 << 18, 1, 16_000, False), (16_384, 8, 100, True), (16_384, 8, 1000, False), (8192, 64, 20, True),
        (8192, 64, 200, False), (4200, 512, 500, False),
    ]:  # fmt: skip
        found = plan_softmax(1000, length, inner, segments)
        assert (found["algorithm"], found["shared_bytes"] > 0, found["cluster"]) == ("cells", shared, 1)
    # Many numbers in more cells than L2 holds are put in order.
    for length, inner, segments, algorithm in [
        (1 << 22, 1, 1 << 20, "cells"), (1 << 22, 1, 1 << 21, "ordered"), (4 * 10**6, 1, 1 << 21, "cells"),
        (1 << 21, 3, 1 << 20, "ordered"), (1 << 20, 2, 3 * 10**6, "cells"),
    ]:  # fmt: skip
        assert plan_softmax(1, length, inner, segments)["algorithm"] == algorithm
    wide = [plan_softmax(1, length, 3, 9, dtype="float64")["algorithm"] for length in (1, 1024, 1025, 10**6)]
    assert wide == ["cells", "cells", "none", "none"]
    for op, (length, inner, segments) in itertools.product(
        ("segment_sum", "segment_max"), ((1668, 383, 3166), (33, 402, 56), (2048, 1, 20_000))
    ):
        one, many = (plan(op, outer, length, inner, segments, "bfloat16", False) for outer in (1, 1000))
        assert one == many and one["algorithm"] == "few" and one["shared_bytes"] <= 20 << 10
        assert one["rows"] == (24 if segments > 256 else 16)
    assert plan("segment_sum", 1, 100, 16_384, 20, "float32", False)["rows"] == 20
    # A few thousand rows: blocks pick those of eight segments, or order those of a range of them.
    for op, dtype, *sizes, algorithm in [
        ("segment_sum", "float32", 5000, 6, 100, "few"), ("segment_sum", "float32", 3200, 6, 100, "few"),
        ("segment_sum", "float32", 30_000, 4, 300, "picks"),
        ("segment_sum", "float32", 7941, 192, 148, "picks"), ("segment_sum", "float32", 4244, 34, 1092, "ranges"), ("segment_sum", "float32", 3000, 20, 50, "few"),
        ("segment_sum", "float32", 65_536, 1, 100, "picks"), ("segment_sum", "float32", 65_537, 1, 100, "lanes"),
        ("segment_sum", "float64", 9995, 1, 131, "few"), ("segment_sum", "bfloat16", 10_000, 16, 500, "picks"),
        ("segment_sum", "float32", 5000, 6, 31, "lanes"), ("segment_sum", "float32", 13_149, 23, 66, "lanes"),
        ("segment_sum", "float32", 4273, 270, 2337, "ranges"), ("segment_max", "float16", 6000, 100, 5000, "ranges"),
        ("segment_sum", "float64", 8192, 8, 3000, "ranges"), ("segment_sum", "float32", 12_289, 64, 4000, "ordered"),
        ("segment_sum", "float32", 4273, 400, 2337, "ordered"), ("segment_sum", "float32", 428, 894, 63, "ranges"),
        ("segment_sum", "float32", 428, 383, 63, "few"), ("segment_sum", "float32", 428, 894, 23, "few"),
        ("segment_sum", "float32", 100, 8192, 300, "ranges"), ("segment_sum", "float32", 20, 16_384, 4000, "ordered"),
        ("segment_sum", "bfloat16", 20, 16_384, 2000, "ranges"),
    ]:  # fmt: skip
        one, many = (plan(op, outer, *sizes, dtype, False) for outer in (1, 1000))
        assert one == many and one["algorithm"] == algorithm, (op, dtype, sizes)
        if algorithm in ("picks", "ranges"):
            assert one["workspace_bytes"] == 0 and one["shared_bytes"] <= SHARED_LIMIT[75] << 10
            assert one["rows"] * one["tiles"] >= sizes[2] > one["rows"] * (one["tiles"] - 1)
            assert plan(op, 1, *sizes, dtype, True)["algorithm"] in ("few", "sorted")
    for outer in (1, 1000):
        assert plan("segment_sum", outer, 30_000, 3, 300, "float32", False)["algorithm"] == "atomics"
    # What is the same in any order may depend on the batch.
    for op, dtype, length, segments, algorithms in [
        ("segment_max", "float32", 4000, 8, ["scatter"] * 2), ("segment_max", "float32", 4258, 8, ["tables"] * 2),
        ("segment_max", "float32", 9000, 8, ["scatter", "tables"]), ("segment_max", "int16", 4258, 256, ["tables"] * 2),
        ("segment_sum", "int64", 14_000, 200, ["scatter", "tables"]),
        ("segment_sum", "int64", 14_000, 15, ["scatter", "lanes"]),
    ]:  # fmt: skip
        found = [plan(op, outer, length, 1, segments, dtype, False) for outer in (1, 5)]
        assert [one["algorithm"] for one in found] == algorithms
        assert all(one["tiles"] == 1 and one["warps"] == 32 for one in found if length == 4258)
    for inner, length, algorithm in [
        (1, 50_000, "tables"),
        (3, 8192, "tables"),
        (3, 8193, "tables"),
        (9, 8192, "atomics"),
    ]:
        assert plan("segment_min", 1, length, inner, 40, "int8", False)["algorithm"] == algorithm
    # Lanes take many short rows, and a part of them makes do with its part of the workspace.
    for op, dtype, segments, inner, length in itertools.product(
        ("segment_sum", "segment_max"), ("int8", "int32", "int64", "float64"), (3, 16, 64, 500), (1, 3),
        (2500, 4097, 8192, 8193, 12_000, 16_384, 20_001),
    ):  # fmt: skip
        sizes = [plan(op, outer, length, inner, segments, dtype, False) for outer in (600, 133, 132, 9, 8, 3, 1)]
        sizes = [one["workspace_bytes"] for one in sizes]
        assert sizes == sorted(sizes, reverse=True)
    for length, algorithm in [((1 << 31) - 1, "ordered"), (1 << 31, "none")]:  # the order of rows is one of int32
        assert plan("segment_sum", 1, length, 64, 10**6, "float32", False)["algorithm"] == algorithm
        assert plan_softmax(1, length, 64, 10**6)["algorithm"] == algorithm
    found = [plan("segment_max", outer, 12_000, 1, 60, "float32", False)["algorithm"] for outer in (1, 132, 133)]
    assert found == ["scatter", "tables", "lanes"]
    for length, inner in itertools.product((8193, 10**6), (1, 3, 100)):
        one, many = (plan_softmax(outer, length, inner, 300, sorted=True) for outer in (1, 1000))
        assert one == many and one["algorithm"] == "sorted" and one["rows"] * one["tiles"] >= length
        assert one["workspace_bytes"] >= 16 * one["tiles"] * inner + 8 * 300 * inner
    # Sums of floats are exact, but for those of float64 in few segments: there, folds of equal ids take less time.
    for inner, segments in [(1, 513), (1, 1536), (8, 600)]:
        assert plan("segment_sum", 3, 10**6, inner, segments, "float32", False)["algorithm"] == "atomics"
    assert plan("segment_sum", 3, 10**6, 3, 500, "float64", False)["algorithm"] == "tables"
    for dtype, length, inner, segments in itertools.product(
        ("float16", "float32"),
        (2049, 9000, 16_385, 40_000, 65_537, 10**6),
        range(1, 9),
        (33, 100, 513, 700, 1100, 1536),
    ):
        assert plan("segment_sum", 1, length, inner, segments, dtype, False)["algorithm"] != "tables"
    # Sums of integers have one table a block, so there may be more segments.
    for dtype, segments, algorithm in [
        ("int32", 12_288, "tables"),
        ("uint8", 12_288, "tables"),
        ("int64", 6144, "tables"),
        ("int32", 30_304, "atomics"),
        ("int64", 15_152, "atomics"),
    ]:
        assert plan("segment_sum", 3, 10**6, 1, segments, dtype, False)["algorithm"] == algorithm
    # Where a multiprocessor has room for one table only, the tables take up to 16 bytes for each number.
    for op, dtype, length, segments in [
        ("segment_sum", "int32", 10**6, 30_303), ("segment_sum", "int64", 10**6, 15_151), ("segment_sum", "uint8", 6 * 10**6, 32_194),
        ("segment_max", "int16", 10**7, 50_000), ("segment_min", "float32", 1 << 19, 12_289),
        ("segment_max", "int16", 1 << 23, 12_288), ("segment_max", "float32", (1 << 22) + 1, 1537),
    ]:  # fmt: skip
        one, many = (plan(op, outer, length, 1, segments, dtype, False) for outer in (1, 1000))
        has_room = segments * max(4, np.dtype(dtype).itemsize) < SHARED_LIMIT[capability] << 10
        assert one["algorithm"] == many["algorithm"] == ("tables" if has_room else "atomics")
        assert one["workspace_bytes"] == many["workspace_bytes"] <= 16 * length
        if has_room:
            assert (one["tiles"], many["tiles"], one["warps"]) == (132, 1, 32)
    assert plan("segment_sum", 1, 320_000, 1, 5000, "int32", False)["algorithm"] == "tables"
    assert plan("segment_sum", 1, 319_999, 1, 5000, "int32", False)["algorithm"] == "scatter"
    # So do extremes, except of very many rows. A few rows are cut into more slices, of larger blocks.
    for length, dtype, segments, algorithm in [
        (10**6, "int16", 2277, "tables"), (10**6, "float32", 12_288, "tables"),
        (10**6, "float64", 6144, "tables"), (100_000, "float32", 1562, "tables"), (600_000, "float32", 9376, "atomics"),
        (10**6, "float64", 6145, "atomics"),
    ]:  # fmt: skip
        one, many = (plan("segment_max", outer, length, 1, segments, dtype, False) for outer in (1, 1000))
        assert one["algorithm"] == many["algorithm"] == algorithm
        assert one["workspace_bytes"] == many["workspace_bytes"]
        if algorithm == "tables":
            assert one["rows"] % 4 == 0 and one["tiles"] == -(-length // one["rows"]) <= 264
            assert one["warps"] == (32 if dtype == "float64" else 16) and (many["warps"], many["tiles"]) == (16, 1)
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
        (1 << 22, 5000, "bfloat16", 4), (1 << 20, 3000, "float32", 4), (1 << 20, 10_000, "float32", 0),
        (1 << 17, 1000, "float32", 2),
    ]:  # fmt: skip
        found = plan("segment_sum", 1, length, 1, segments, dtype, False)
        if SHARED_LIMIT[capability] == 227:
            assert (found["algorithm"], found["shared_bytes"]) == ("atomics", 4 * words * segments)
    for op, dtype in [("segment_max", "float64"), ("segment_min", "int8"), ("segment_sum", "int32")]:
        assert plan(op, 1, 10**6, 64, 10**6, dtype, False)["algorithm"] == "atomics"
        assert plan(op, 1, 10**6, 65, 10**6, dtype, False)["algorithm"] == "ordered"
    # Sums of float64 have room for numbers of any size, unless that is far more than the data.
    for inner, length, segments, algorithm in [
        (1, 10**6, 1537, "atomics"), (1, 10**6, 160_000, "atomics"), (1, 10**6, 162_000, "buckets"),
        (1, 1 << 22, 200_000, "atomics"), (1, 1 << 22, 500_000, "buckets"), (3, 10**6, 50_000, "atomics"), (4, 10**6, 30_000, "ordered"),
        (1, (1 << 26) + 1, 3000, "ordered"),
    ]:  # fmt: skip
        one, many = (plan("segment_sum", outer, length, inner, segments, "float64", False) for outer in (1, 1000))
        assert one == many and one["algorithm"] == algorithm
    assert plan("segment_sum", 3, 10**6, 9, 129, "float32", False)["algorithm"] == "ordered"
    assert plan("segment_sum", 3, 50_000, 1, 5, "float32", True)["algorithm"] == "sorted"
    # Rows of few bytes are moved to buckets, by tiles as large as shared memory allows.
    for dtype, inner, length, segments, algorithm in [
        ("float32", 4, 1 << 20, 200_000, "buckets"), ("float32", 5, 1 << 20, 200_000, "ordered"),
        ("bfloat16", 4, 1 << 20, 300_000, "buckets"), ("bfloat16", 3, 1 << 20, 300_000, "ordered"),
        ("float64", 2, 1 << 20, 200_000, "buckets"), ("float64", 3, 1 << 20, 200_000, "ordered"),
        ("float32", 4, 1 << 16, 50_000, "buckets"), ("float32", 4, (1 << 16) - 1, 50_000, "ordered"),
    ]:  # fmt: skip
        one, many = (plan("segment_sum", outer, length, inner, segments, dtype, False) for outer in (1, 1000))
        assert one == many and one["algorithm"] == algorithm
        if algorithm == "buckets":
            assert one["shared_bytes"] <= (SHARED_LIMIT[capability] - 1) << 10 and one["rows"] == 256 * one["warps"]
            assert one["workspace_bytes"] >= length * (inner * np.dtype(dtype).itemsize + 2)
        assert plan("segment_sum", 1, length, inner, segments, dtype, True)["algorithm"] == "sorted"
    # One launch orders few rows, if blocks hold the counts of all segments.
    for length, segments, order in [
        (2049, 10**6, "block"), (16_385, 10**6, "sweep"), (12_289, 5000, "ranges"), (65_536, 5000, "ranges"),
        (65_537, 5000, "sweep"), (10**6, 10**5, "sweep"), (16_385, 10**5, "ranges"),
    ]:  # fmt: skip
        found = plan("segment_max", 1, length, 65, segments, "bfloat16", False)
        if order == "ranges" and SHARED_LIMIT[capability] < (200 if segments == 10**5 else 99):
            order = "sweep"
        assert (found["algorithm"], found["order"]) == ("ordered", order)
        assert found["workspace_bytes"] >= 8 * length
    # Teams of a block have shares of 8 to 32 rows, short ones where tiles would be few, or gaps are likely. Rows of many
    # vectors, or whose teams would leave threads idle, have tiles of whole turns of warps. (type, columns, rows,
    # segments, rows of a tile)
    for dtype, inner, length, segments, rows in [
        ("float32", 128, 1 << 20, 1 << 16, 256), ("bfloat16", 128, 1 << 20, 1 << 16, 512),
        ("float32", 18, 1 << 20, 10**5, 896), ("float32", 18, 1 << 20, 1 << 20, 224), ("float64", 16, 40_000, 5000, 256),
        ("bfloat16", 8, 1 << 22, 10**6, 2048), ("float64", 1000, 1 << 20, 10**6, 252), ("bfloat16", 4096, 65_536, 10**5, 172),
        ("float64", 134, 1 << 20, 10**6, 180),
    ]:  # fmt: skip
        one, many = (plan("segment_sum", outer, length, inner, segments, dtype, False) for outer in (1, 40))
        assert (one["algorithm"], one["rows"], many["rows"]) == ("ordered", rows, rows)
    # As many tiles of other folds as make whole turns of warps.
    assert plan("segment_max", 1, 1 << 20, 128, 1 << 16, "float32", False)["rows"] == 256
    for op, length, inner, dtype in itertools.product(
        ("segment_sum", "segment_min"), (33_000, 50_000, 1 << 22), (1, 3, 128, 5000), ("int8", "float16", "float64")
    ):
        one, many = (plan(op, outer, length, inner, 5000, dtype, True) for outer in (1, 1000))
        assert one == many and one["rows"] * one["tiles"] >= length > one["rows"] * (one["tiles"] - 1)
        part = max(4, np.dtype(dtype).itemsize) if op == "segment_sum" else np.dtype(dtype).itemsize
        assert one["workspace_bytes"] >= (2 * one["tiles"] * inner * part if one["tiles"] > 1 else 0)
