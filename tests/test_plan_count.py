"""The plans of counts, segments, selection by rank and sorts of segments: see test_plan.py."""

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
        ((1, 15_000, 1, 14_000), "global"), ((6, 37_000, 1, 33_000), "global"), ((1, 1 << 18, 1, 1 << 14), "global"), ((1, 1 << 18, 1, (1 << 14) - 1), "tables"),
        ((40, 60_000, 1, 10_000), "tables"), ((1, 1 << 19, 1, 14_000), "tables"), ((1, 15_000, 1, 1800), "tables"), ((1, 4000, 1, 500), "global"),
        ((5, 5009, 1, 1521), "global"), ((7, 55_129, 1, 1018), "tables"), ((16, 4096, 1, 1000), "tables"), ((60, 2048, 1, 1500), "tables"),
    ):  # fmt: skip
        assert plan(*rows)["algorithm"] == algorithm
    # Clusters count ranges of bins of few rows. (rows, bins, ranges)
    for outer, length, bins, ranges in [
        (1, 518_276, 35_547, 6), (2, 300_000, 30_000, 3), (3, (1 << 18) + 1, 8192, 2), (1, 1 << 20, (1 << 16) - 1, 6),
        (1, 1 << 20, 1 << 14, 6), (1, 800_000, 90_000, 6),
    ]:  # fmt: skip
        found = plan(outer, length, 1, bins)
        if capability in (90, 100):
            assert [found[name] for name in ("algorithm", "cluster", "slices", "ranges")] == ["tables", 16, 16, ranges]
            assert 4 * bins <= found["shared_bytes"] * ranges < (4 * bins + 4 * ranges) <= ranges * 227 << 10
        else:
            assert found["cluster"] == 1
    for outer, length, bins in [
        (4, 300_000, 30_000), (1, 1 << 18, 9000), (1, (1 << 20) + 1, 35_547), (1, 300_000, 8191), (1, 300_000, 1 << 16),
        (1, 1 << 20, (1 << 14) - 1), (1, 800_000, 90_001),
    ]:  # fmt: skip
        assert plan(outer, length, 1, bins)["cluster"] == 1
    # Few ids for very many bins. (rows, bins, whether atomics on the result take less time)
    for outer, length, bins, atomics in [
        (1, 300_000, 100_000, True), (2, 500_000, 80_000, True), (1, 1 << 19, 1 << 16, True),
        (1, (1 << 19) + 1, 1 << 16, False), (1, 5 << 18, 200_000, True), (1, (5 << 18) + 1, 200_000, False),
        (3, 300_000, 100_000, False),
    ]:  # fmt: skip
        if 4 * bins <= 4 * SHARED_LIMIT[capability] << 10:
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
def test_plans_of_selections(capability):
    cpu = jaxgpuops._native.modules["cpu"]
    plan = lambda *args: cpu.plan_select(*args, capability)
    assert plan(0, 5, 1, 3, 32)["algorithm"] == plan(3, 5000, 1, 0, 32)["algorithm"] == "empty"
    for rows in (
        (3, 4096, 1, 10, 32),
        (4097, 8, 1, 3, 64),
        (1000, 8, 300, 3, 64),
        (9, 512, 1, 4, 32),
        (9, 600, 1, 4, 16),
    ):
        assert plan(*rows)["algorithm"] == "none"
    for length, inner, bits in itertools.product((9, 16, 17, 33, 64), (1, 5), (8, 16, 32, 64)):
        few, many = plan(3, length, inner, 3, bits), plan(100_000, length, inner, 9, bits)
        if (length, bits, capability) == (64, 32, 75):  # the tables do not fit
            assert few["algorithm"] == many["algorithm"] == "none"
            continue
        assert few["algorithm"] == "warp"
        assert many["algorithm"] == ("none" if bits == 64 else "thread")
        assert not many["turns"] and many["shared_bytes"] <= min(67, SHARED_LIMIT[capability]) << 10
    for length, inner, bits in itertools.product((2, 8), (1, 5), (8, 64)):  # few rows are not sorted first
        found = plan(200, length, inner, 3, bits)
        assert (found["algorithm"], found["workspace_bytes"]) == ("warp", 0)
        for rows, count in ((1500, 3), (50_000, 3), (10**6, 1), (10**6, 2), (50_000, 4)):
            selects = bits == 8 and (count == 1 or rows * inner <= 1 << 18) and count <= 3
            by_warp = bits == 64 and rows * inner <= 4096
            expected = "thread" if selects else "warp" if by_warp else "none"
            assert plan(rows, length, inner, count, bits)["algorithm"] == expected
    # A part of a batch has a kernel if the batch has, and makes do with its part of the workspace.
    for length, count, inner, bits in itertools.product((5, 9, 20, 64, 65, 128, 129, 700), (3, 4), (1, 5), (8, 32, 64)):
        parts = [plan(outer, length, inner, count, bits) for outer in (1 << 20, 4000, 1500, 300, 1)]
        for whole, part in itertools.pairwise(parts):
            if whole["algorithm"] != "none":
                assert part["algorithm"] != "none" and part["workspace_bytes"] <= whole["workspace_bytes"]
    # A warp compares the elements of short rows, sorts others if they are few, and bisects most others.
    for (rows, length, bits), bisects in {
        (300, 50, 32): False,
        (300, 51, 32): True,
        (1024, 17, 16): False,
        (1025, 17, 16): True,
        (300, 64, 64): False,
        (300, 65, 64): True,
        (2048, 128, 32): False,
        (2049, 128, 32): True,
        (10**6, 65, 16): True,
        (1000, 256, 16): False,
        (1001, 256, 16): True,
        (1000, 256, 32): True,
        (30_000, 256, 64): True,
        (1000, 1024, 8): True,
        (1001, 257, 32): False,
    }.items():
        for count in (1, 3):
            found = plan(rows, length, 1, count, bits)
            assert (found["algorithm"], found["bisects"]) == ("warp", bisects), (rows, length, bits)
            steps = not bisects and length > 256
            assert found["shared_bytes"] == (16 * -(-length // 128) * 128 if steps else 0)
    assert plan(9, 600, 2, 4, 32)["algorithm"] == "warp" and not plan(9, 600, 2, 4, 32)["bisects"]
    for length, inner, bits in itertools.product((129, 1024), (1, 5), (8, 64)):
        found = plan(30_000, length, inner, 3, bits)
        assert (found["algorithm"], found["turns"], found["workspace_bytes"]) == ("warp", False, 0)
        keys = 1024 + 8 * (inner * bits > 128)
        assert found["shared_bytes"] == (4 * max(bits, 32) // 8 * keys if length == 1024 else 0)
    for inner, (length, bits) in itertools.product((1, 5), ((1025, 64), (4096, 64), (15_000, 8))):
        if length * bits // 8 + 32 + 9 * 2048 + 3072 > SHARED_LIMIT[capability] << 10:
            continue
        found = plan(3, length, inner, 9, bits)
        assert found["algorithm"] == "block" and found["threads"] == {1025: 256, 4096: 256, 15_000: 512}[length]
        assert plan(10_000, length, inner, 9, bits)["threads"] == {1025: 128, 4096: 128, 15_000: 384}[length]
        assert plan(10_000, length, inner, 3, bits)["threads"] == {1025: 64, 4096: 128, 15_000: 384}[length]
        assert length * bits // 8 + 16 + 9 * 2048 <= found["shared_bytes"] < SHARED_LIMIT[capability] << 10
        assert found["turns"] == (inner > 1) and found["workspace_bytes"] // 256 == (inner > 1) * -(
            -length * inner * bits // 2048
        )
        part = cpu.plan_sort(3, length, inner, 64, True, False, capability, 7)
        if bits == 64:
            assert (part["algorithm"], part["threads"], part["turns"]) == (
                "part",
                max(512, found["threads"]),
                inner > 1,
            )
        bytes_of = lambda n, inner=inner: cpu.plan_sort(3, n, inner, 8, True, False, capability, 7)["algorithm"]
        assert (bytes_of(1499), bytes_of(1500)) == ("part", "block")  # of bytes a sort takes less time
    for inner, bits, length in itertools.product(
        (1, 5), (16, 32), (1025, 2048, 2049, 4096, 4097, 6144, 8192, 8193, 16_384)
    ):
        few, many = plan(3, length, inner, 3, bits), plan(700, length, inner, 9, bits)
        part = cpu.plan_sort(3, length, inner, bits, True, False, capability, 7)
        assert (many["algorithm"], many["turns"], many["shared_bytes"]) == ("registers", inner * bits > 128, 0)
        in_place = inner * bits <= 128 or 3 * length * inner <= (1 << 22) // bits
        assert (few["algorithm"], few["turns"]) == ("registers", not in_place)
        assert few["threads"] == (256 if length < 4096 else 512)
        assert many["threads"] == max(64, 1 << (length - 1).bit_length() - 5) and part["algorithm"] == "part"
        if bits == 32 and length % 4 == 0 and length <= 6144:
            assert (part["threads"], part["shared_bytes"]) == (256, 4 * length)
        elif length <= 8192:
            assert part["threads"] == 512 and part["shared_bytes"] > length * bits // 8
    assert plan(3000, 7000, 1, 3, 32)["algorithm"] == "block" and plan(3000, 7000, 1, 3, 16)["algorithm"] == "registers"
    assert [plan(rows, 5000, 1, 3, 32)["threads"] for rows in (100, 2000)] == [512, 256]
    assert plan(3, 16_385, 1, 9, 16)["algorithm"] == "block"
    for outer, inner, length, count, bits in itertools.product(
        (1, 100), (1, 5), (250_000, 1 << 20, (1 << 31) - 1), (1, 3, 9), (8, 16, 64)
    ):
        found, part = plan(outer, length, inner, count, bits), plan(1, length, inner, count, bits)
        assert part["workspace_bytes"] <= found["workspace_bytes"]
        if found["algorithm"] == "cluster":  # see test_plans_of_clusters()
            assert part["algorithm"] == "cluster"
            continue
        assert found["algorithm"] == "long"
        kept = 512 * (found["kept"] // 32 * bits // 8 + 2 * found["kept_steps"])  # bytes of 512 threads
        assert bits > 8 or kept == 0
        assert found["shared_bytes"] == max(2048 * count + (kept if bits > 8 else 2048 * count), 2048 * (5 + bits // 8))
        assert found["shared_bytes"] < SHARED_LIMIT[capability] << 10 and found["kept"] % 32 == 0
        assert found["kept_steps"] <= 32 and (SHARED_LIMIT[capability] < 163 or bits == 8 or found["kept"] > 0)
        assert 1 <= found["slices"] <= 264 and found["workspace_bytes"] >= inner * count * (
            4 * 3 * 512 + (4 + bits // 8) * 2048
        )
        if part["algorithm"] == "long":
            assert part["slices"] >= found["slices"]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_plans_of_teams(capability):
    """Many rows have a team of warps each, where the copy engine brings them to shared memory."""
    cpu = jaxgpuops._native.modules["cpu"]
    plan = lambda *args: cpu.plan_select(*args, capability)
    part = lambda *args: cpu.plan_sort(*args, True, False, capability, args[1] // 2)
    room = SHARED_LIMIT[capability] << 10
    teams = 0
    for rows, length, inner, count, bits in itertools.product(
        (1, 131, 132, 1056, 2112, 4092, 8184, 100_000), (256, 257, 512, 513, 1024, 1025, 2049, 3073, 4097, 6145, 8193),
        (1, 5), (1, 3, 7), (8, 16, 32, 64),
    ):  # fmt: skip
        found = plan(rows, length, inner, count, bits)
        if found["algorithm"] != "teams":
            continue
        teams += 1
        assert capability >= 90 and bits in (16, 32) and 256 < length <= (6144 if bits == 32 else 8192)
        few = 264 if count == 1 else 1
        assert rows * inner >= (few if 512 < length <= 1024 else 1056 if length <= 512 else 2112)
        assert inner == 1 or length > 1024
        assert found["turns"] == (inner > 1) and found["blocks"] == min(rows * inner, 132)
        own = -(-length * bits // 128) * 16 + 16 + 2048  # the row, wherever it begins, and the counts
        warps = found["threads"] // 32
        assert found["team"] == (2 if length > 4096 else 1) and warps <= (32 if found["team"] == 1 else 24)
        assert found["shared_bytes"] == warps // found["team"] * own <= room - 6144
        assert warps // found["team"] == min(
            rows * inner // 132 + (rows * inner % 132 > 0), (room - 6144) // own, 32
        ) or (found["team"] == 2 and warps == 24)
        # A part of a batch makes do with its part of the workspace.
        assert plan(1, length, inner, count, bits)["workspace_bytes"] <= found["workspace_bytes"]
    assert (teams > 0) == (capability >= 90)
    if capability >= 90:
        parts = part(2112, 1025, 1, 32)
        assert (parts["algorithm"], parts["blocks"]) == ("part", 132)
        assert parts["threads"] == 32 * min(2112 // 132, (room - 6144) // (4112 + 16 + 2048))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_plans_of_clusters(capability):
    cpu = jaxgpuops._native.modules["cpu"]
    plan = lambda *args: cpu.plan_select(*args, capability)
    most = {90: 16, 100: 16, 120: 8}.get(capability, 1)  # blocks of a cluster
    found = [plan(*rows, 32)["algorithm"] for rows in ((1, 30_000, 1, 3), (8, 30_000, 9, 3), (1, 100_000, 1, 3))]
    few = "block" if SHARED_LIMIT[capability] > 128 else "long"  # without clusters
    assert found == (["cluster", "block" if most == 16 else "long", "cluster"] if most > 1 else [few, few, "long"])
    for outer, length, inner, count, bits in itertools.product(
        (1, 7, 30, 100, 3000), (9000, 60_000, 131_072, 327_680, 327_681, 800_000), (1, 3), (1, 3, 9), (8, 16, 32, 64)
    ):
        found, part = plan(outer, length, inner, count, bits), plan(1, length, inner, count, bits)
        if found["algorithm"] != "cluster":
            continue
        blocks, vectors = found["blocks"], length * bits // 128 + 2
        assert blocks in (2, 4, 8, most) and found["threads"] in (512, 1024) and found["turns"] == (inner > 1)
        assert found["shared_bytes"] == 16 * -(-vectors // blocks) + 2048 * count
        assert found["shared_bytes"] <= (SHARED_LIMIT[capability] - 8) << 10
        assert found["workspace_bytes"] // 256 == (inner > 1) * -(-length * inner * bits // 2048)
        # A part of a batch makes do with its part of the workspace.
        assert part["workspace_bytes"] <= found["workspace_bytes"]
        assert part["algorithm"] == "block" or part["blocks"] >= blocks
        alone = outer * inner * blocks <= (132 if blocks == 2 else 120)
        assert (alone and length <= 50_000 * blocks) or (
            count > 3 and length <= {16: 240_000, 32: 90_000}.get(bits, 327_680)
        )
    # Of partitions, a cluster takes all that it has room for.
    part = lambda *rows: cpu.plan_sort(*rows, True, False, capability, 7)
    for outer, length, inner, bits in itertools.product((1, 3000), (60_000, 2_000_000, 1 << 24), (1, 3), (16, 32, 64)):
        found = part(outer, length, inner, bits)
        assert found["algorithm"] == "part"
        # Of a longer row: its head, tables and list, and what its tiles publish, which begin at whole vectors.
        of_row = (
            -(-(1024 + 3 * 2048 + (4 + bits // 8) * 2048 + 8 * -(-(length + 128 // bits - 1) // 8192)) // 256) * 256
        )
        if inner == 1:
            held = length == 60_000 and (most > 1 or length * bits // 8 < (SHARED_LIMIT[capability] - 6) << 10)
            assert found["workspace_bytes"] == (0 if held else of_row)
        else:
            assert found["workspace_bytes"] >= inner * length * bits // 4  # x and the values, turned
    assert part(3, 4_000_000, 1, 8)["algorithm"] == "sweep"  # a pass sorts bytes


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_plans_of_sorts_of_segments(capability):
    cpu = jaxgpuops._native.modules["cpu"]
    plan = lambda *args: cpu.plan_sort_segments(*args, capability)
    assert plan(3, 0, 1, 5, 32)["algorithm"] == "empty"
    for length, bits, threads in [
        (1024, 32, 256), (1024, 64, 256), (1025, 16, 512), (4096, 32, 512), (1025, 64, 1024), (8192, 64, 1024),
        (4097, 32, 1024), (16_384, 16, 1024),
    ]:  # fmt: skip
        found = plan(100, length, 1, 70, bits)
        if found["algorithm"] != "segments":
            assert SHARED_LIMIT[capability] < 163 and threads == 1024
            assert found["algorithm"] == ("merge" if length > 8192 else "none")
            continue
        assert (found["algorithm"], found["threads"], found["workspace_bytes"]) == ("segments", threads, 0)
        assert 6 * length < found["shared_bytes"] < SHARED_LIMIT[capability] << 10
    # Few elements are compared, unless there are few segments. (rows, elements, offsets, bits, whether they are)
    for outer, length, count, bits, compares in [
        (1, 1, 1, 8, True), (19, 13, 2, 32, True), (300, 100, 2, 16, True), (128, 256, 2, 32, True),
        (256, 256, 2, 64, True), (1, 370, 2, 32, True),
        (1, 2000, 1, 64, True), (1, 2049, 1, 32, False), (1, 2048, 1, 8, False), (1, 2048, 2, 8, True),
        (8, 4096, 15, 32, False), (8, 4096, 16, 32, True), (4, 8192, 16, 32, True), (5, 8192, 999, 32, False),
        (1, 16_384, 8, 8, False), (1, 16_384, 16, 8, True), (2, 16_384, 999, 8, False), (1, 16_384, 999, 64, False),
    ]:  # fmt: skip
        found = plan(outer, length, 1, count, bits)
        assert (found["algorithm"] == "compare") == compares or SHARED_LIMIT[capability] < 80
        if compares and found["algorithm"] == "compare":
            assert outer * length <= 256 * found["blocks"] <= 256 * 8 * 132 and found["workspace_bytes"] == 0
            assert found["shared_bytes"] < SHARED_LIMIT[capability] << 10
    assert plan(3, 100, 2, 9, 32)["algorithm"] == "none"
    for outer, length, count, bits in [(3, 16_385, 70, 8), (3, 8193, 2, 64), (1000, 70_000, 110, 32)]:
        found = plan(outer, length, 1, count, bits)
        assert found["algorithm"] == "merge"
        # A part of the batch, with the workspace of all, has enough of it.
        assert plan(1, length, 1, count, bits)["workspace_bytes"] == found["workspace_bytes"] > 8 * length
    # Those of any number of short rows are, too, if all rows have the same ones, and their length or number keeps the
    # longest of them short.
    for outer, length, count, bits, compares in [
        (129, 256, 999, 32, True), (1 << 20, 64, 2, 32, True), (1 << 20, 65, 2, 32, False), (70_000, 256, 8, 32, True),
        (70_000, 256, 7, 32, False), (70_000, 257, 999, 16, False), (1 << 20, 64, 2, 64, True), (1 << 20, 65, 4, 64, False),
        (257, 256, 999, 64, True), (1 << 24, 3, 2, 32, True), (1773, 128, 112, 16, True), (9000, 128, 112, 16, False),
        (1 << 20, 32, 4, 16, True), (1 << 20, 32, 3, 8, False), (1 << 20, 33, 99, 8, False),
    ]:  # fmt: skip
        found = plan(outer, length, 1, count, bits)
        assert (found["algorithm"] == "compare") == compares
        if compares:
            assert found["blocks"] <= 8 * 132 and found["workspace_bytes"] == 0 and found["shared_bytes"] <= 16 << 10
            own = cpu.plan_sort_segments(outer, length, 1, count, bits, capability, shared=False)
            assert own["algorithm"] in ("none", "segments")
            # In a program for several devices, the handler sees offsets for each row.
            own = cpu.plan_sort_segments(outer, length, 1, count, bits, capability, shared=False, workspace_bytes=0)
            assert own["algorithm"] in ("compare", "segments") and own["workspace_bytes"] == 0
    for outer, length, inner, bits in [(3, 300, 2, 32), (10_000, 300, 1, 32), (3, 70_000, 2, 32)]:
        assert plan(outer, length, inner, 7, bits)["algorithm"] == "none"
    for outer, length, count, bits, algorithm in [
        (1000, 70_000, 45, 32, "sweep"), (1000, 70_000, 46, 32, "none"), (3, 70_000, 45, 32, "sweep"),
        (3, 70_000, 46, 32, "merge"), (3, 70_000, 45, 16, "sweep"), (9, 70_000, 46, 8, "none"),
        (7, 70_000, 2, 64, "merge"), (8, 70_000, 8, 64, "sweep"),
        (8, 70_000, 9, 64, "none"),
    ]:  # fmt: skip
        found = plan(outer, length, 1, count, bits)
        assert found["algorithm"] == algorithm
        if algorithm == "sweep":  # and so is a part of the batch, with the workspace of the whole
            given = found["workspace_bytes"]
            one = cpu.plan_sort_segments(1, length, 1, count, bits, capability, workspace_bytes=given)
            assert one["algorithm"] == "sweep" and one["workspace_bytes"] <= given
            assert found["blocks"] >= outer * (count + length // 9000)


def test_plans_of_long_rows_of_segments():
    plan = lambda *args, **given: jaxgpuops._native.modules["cpu"].plan_sort_segments(*args, 90, **given)
    for outer, length, count, bits, algorithm in [
        (8, 16_384, 6, 32, "sweep"), (32, 16_384, 6, 32, "sweep"), (33, 16_384, 6, 32, "segments"),
        (8, 8192, 3, 32, "segments"), (8, 12_000, 100, 32, "merge"), (41, 9834, 76, 16, "merge"),
        (60, 9000, 40, 32, "segments"), (2, 16_384, 7, 8, "sweep"), (2, 16_384, 500, 8, "merge"),
        (20, 9000, 9, 16, "segments"),
    ]:  # fmt: skip
        found = plan(outer, length, 1, count, bits)
        assert found["algorithm"] == algorithm
        part = plan(1, length, 1, count, bits, workspace_bytes=found["workspace_bytes"])
        assert part["workspace_bytes"] <= found["workspace_bytes"]
        assert part["algorithm"] in (algorithm, "compare")
    # Blocks of few rows have more threads, and each of them fewer elements.
    few, many = plan(132, 8192, 1, 70, 32), plan(133, 8192, 1, 70, 32)
    assert (few["threads"], many["threads"]) == (1024, 512)
    assert few["shared_bytes"] > many["shared_bytes"] > 6 * 8192


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
        # Blocks that only fill run at the same time, if tiles leave room for them.
        filling = found["blocks"] - outer * tiles
        assert filling % outer == 0 and filling // outer <= (size - 1) // 16384
        assert filling > 0 or size == 7 or outer == 5000
        assert capability != 90 or filling <= max(264 - outer * tiles, 132)
        # All blocks that a multiprocessor is to hold fit, and few turns suffice if a tile can be large.
        blocks = 1 if few else 2 if starts else 3
        assert blocks * (found["shared_bytes"] + 2048) <= (SHARED_LIMIT[capability] + 1) << 10
        assert (
            few
            or units * (136 if starts else 132) + 32 * found["list"] == found["shared_bytes"]
            and found["list"] >= 512
        )
        if capability == 90 and not few and outer * length <= 1 << 26:
            assert outer * tiles <= blocks * 132
        # A part of a batch makes do with its part of the workspace.
        assert (
            found["workspace_bytes"]
            == plan(1, length, 1, size, starts)["workspace_bytes"]
            >= (8 if starts else 4) * tiles * (tiles > 1)
        )


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_plans_of_more_rows_than_a_grid_has_blocks(capability):
    """A grid has at most 2^31 - 1 blocks."""
    cpu, many = jaxgpuops._native.modules["cpu"], 1 << 31
    assert cpu.plan_histogram(many - 1, 2, 1, 3, "float32", capability)["algorithm"] == "tables"
    assert cpu.plan_histogram(many, 2, 1, 3, "float32", capability)["algorithm"] == "none"
    assert cpu.plan_bincount(many, 2, 1, 700, "int8", capability)["algorithm"] == "rows"
    assert cpu.plan_bincount(many, 2, 1, 2000, "int8", capability)["algorithm"] == "global"
    assert cpu.plan_choose(many - 1, 128, 1, 1, False, capability)["algorithm"] == "recount"
    assert cpu.plan_choose(many, 128, 1, 1, False, capability)["algorithm"] == "none"
    assert cpu.plan_segment_softmax(many - 1, 2, 1, 3, "float32", False, capability)["algorithm"] == "cells"
    assert cpu.plan_segment_softmax(many, 2, 1, 3, "float32", False, capability)["algorithm"] == "none"
    assert cpu.plan_segments("segment_sum", many, 2, 1, 1, "float32", False, False, capability)["algorithm"] == "match"
    for inner, segments, chunks in [(17, 1, 3), (33, 2000, 2), (5, 10**6, 1)]:  # chunks of 8 or 32 columns
        found = cpu.plan_segments("segment_sum", many, 2, inner, segments, "float32", False, False, capability)
        assert found["algorithm"] == "few" and found["batch"] == (many - 1) // (found["tiles"] * chunks)


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
        ("segment_sum", "float32", 40_000, 100, 100, "lanes"), ("segment_sum", "int32", 52_000, 100, 100, "lanes"),
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
        ("segment_max", "float32", 1_982_628, 28, 950, True), ("segment_max", "float32", 528 * 950 - 1, 28, 950, False),
        ("segment_min", "bfloat16", 528 * 64, 2, 5, True), ("segment_min", "bfloat16", 528 * 64 - 1, 2, 5, False),
        ("segment_max", "int8", 40_000, 128, 60, True), ("segment_max", "int8", 40_000, 129, 60, False),
        ("segment_sum", "int32", 260_045, 12, 111, True), ("segment_sum", "int64", 10**6, 7, 111, False),
        ("segment_max", "float64", 10**6, 2, 8000, False), ("segment_sum", "float32", 10**6, 28, 950, False),
    ]:  # fmt: skip
        one, three, many = (plan(op, outer, length, inner, segments, dtype, False) for outer in (1, 3, 1000))
        wide = wide and 4 * inner * segments < (SHARED_LIMIT[capability] - 1) << 10
        assert (one["algorithm"] == "tables" and one["columns"] == inner) == wide
        if wide:  # a part of a batch has its part of the workspace
            assert one["workspace_bytes"] == three["workspace_bytes"] == many["workspace_bytes"]
            assert [found["tiles"] for found in (one, three, many)] == [132, 44, 1]
            assert one["rows"] * one["tiles"] >= length and plan(op, 1, length, inner, segments, dtype, True) != one
    softmax_plan = jaxgpuops._native.modules["cpu"].plan_segment_softmax
    plan_softmax = lambda *args, dtype="float32", sorted=False: softmax_plan(*args, dtype, sorted, capability)
    # Softmax folds largest elements, so its tiles are not those of sums.
    tiles = [plan(op, 1, 1 << 20, 8, 65536, "float32", True)["rows"] for op in ("segment_sum", "segment_max")]
    assert plan_softmax(1, 1 << 20, 8, 65536, sorted=True)["rows"] == tiles[1] != tiles[0]
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
        ("segment_sum", "int64", 1, 20_000, 1, 2000, (4, 20)), ("segment_max", "int32", 1, 1500, 5, 3000, (1, 47)),
        ("segment_max", "float32", 1, 1024, 1, 32, "few"), ("segment_max", "float32", 1, 1025, 1, 32, (1, 5)),
        ("segment_sum", "int64", 1, 2048, 1, 4, "few"), ("segment_sum", "int32", 2, 1191, 1, 16, "few"),
        ("segment_max", "float32", 1, 2048, 17, 16, "few"), ("segment_max", "float32", 1, 2048, 17, 17, (4, 34)),
        ("segment_max", "int32", 1, 9001, 12, 43, "atomics"),
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
        (3, 8193, "picks"),
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
    found = [plan("segment_max", outer, 12_000, 1, 60, "float32", False)["algorithm"] for outer in (1, 132, 133)]
    assert found == ["scatter", "tables", "lanes"]
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
        (10**6, "float64", 6144, "tables"), (100_000, "float32", 1562, "tables"), (600_000, "float32", 9376, "atomics"),
        (1 << 23, "int16", 12_288, "atomics"),
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
        (1 << 22, 5000, "bfloat16", 2), (1 << 20, 3000, "float32", 0),
    ]:  # fmt: skip
        found = plan("segment_sum", 1, length, 1, segments, dtype, False)
        if SHARED_LIMIT[capability] == 227:
            assert (found["algorithm"], found["shared_bytes"]) == ("atomics", 4 * words * segments)
    for op, dtype in [("segment_max", "float64"), ("segment_min", "int8"), ("segment_sum", "int32")]:
        assert plan(op, 1, 10**6, 64, 10**6, dtype, False)["algorithm"] == "atomics"
        assert plan(op, 1, 10**6, 65, 10**6, dtype, False)["algorithm"] == "ordered"
    # Sums of float64 have room for numbers of any size, unless that is far more than the data.
    for inner, length, segments, algorithm in [
        (1, 10**6, 1537, "atomics"), (1, 10**6, 160_000, "atomics"), (1, 10**6, 162_000, "ordered"),
        (1, 1 << 22, 200_000, "atomics"), (1, 1 << 22, 500_000, "ordered"), (3, 10**6, 50_000, "atomics"), (4, 10**6, 30_000, "ordered"),
        (1, (1 << 26) + 1, 3000, "ordered"),
    ]:  # fmt: skip
        one, many = (plan("segment_sum", outer, length, inner, segments, "float64", False) for outer in (1, 1000))
        assert one == many and one["algorithm"] == algorithm
    for inner, segments, dtype in [(1, 10**6, "float32"), (9, 129, "float32")]:
        assert plan("segment_sum", 3, 10**6, inner, segments, dtype, False)["algorithm"] == "ordered"
    assert plan("segment_sum", 3, 50_000, 1, 5, "float32", True)["algorithm"] == "sorted"
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
        ("float32", 2, 1 << 22, 10**6, 2048), ("float64", 1000, 1 << 20, 10**6, 252), ("bfloat16", 4096, 65_536, 10**5, 172),
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
