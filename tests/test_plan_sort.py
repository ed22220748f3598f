"""The plans of sorts of segments, of ranks and of masks: see test_plan.py."""

import itertools

import pytest
from plans import CAPABILITIES, SHARED_LIMIT

import jaxgpuops

BOTH = ((False, True),) * 2


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
            if count > 1 and rows >= 8192 and bits == 16:  # networks sort so many rows
                assert found["algorithm"] == "none"
                continue
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
        few, many = plan(3, length, inner, 3, bits), plan(400, length, inner, 9, bits)
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
            assert part["slices"] >= found["slices"] or part["counts"]
    for outer, length, bits, counts in (
        (2, 1 << 20, 16, True),
        (1, 8 << 20, 16, True),
        (2, 8 << 20, 16, False),
        (2, 1 << 20, 32, False),
    ):
        found = plan(outer, length, 1, 3, bits)
        assert (found["algorithm"], found["counts"] and capability == 90) == ("long", counts and capability == 90)
        if found["counts"]:  # no block has more elements than a count of 16 bits
            assert length < (found["slices"] << 16)


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
        if count > 3:
            assert length <= (3072 if bits == 32 else 4096) and (length <= 2048 or rows * inner >= 4092)
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


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_plans_of_values_of_segments(capability):
    """If only values are wanted, networks sort the segments of many rows that a few warps hold, and of short ones of
    longer rows."""
    cpu = jaxgpuops._native.modules["cpu"]
    plan = lambda *args, **given: cpu.plan_sort_segments(*args, capability, True, False, **given)
    for outer, length, bits, threads, blocks in [
        (12_000, 33, 32, 32, 388), (6215, 1024, 32, 32, 6215), (4000, 512, 8, 32, 2000), (4000, 1025, 16, 64, 4000),
        (130, 3072, 16, 96, 130), (384, 1024, 8, 32, 384), (536, 7109, 32, 224, 536), (48, 8192, 32, 256, 48),
        (2000, 256, 64, 32, 1000), (2000, 513, 64, 64, 2000), (96, 4096, 64, 256, 96),
    ]:  # fmt: skip
        for count, shared in itertools.product((1, 2, 99), (True, False)):
            found = plan(outer, length, 1, count, bits, shared=shared)
            assert (found["algorithm"], found["threads"], found["blocks"]) == ("network", threads, blocks)
            assert found["workspace_bytes"] == 0 and found["shared_bytes"] <= 36 << 10
        # Parts of the batch have a kernel, too, whatever they know of offsets.
        for part, shared in itertools.product((outer // 2, outer // 3, 270, 3), (True, False)):
            found = plan(part, length, 1, 3, bits, shared=shared, workspace_bytes=0)
            fits = found["algorithm"] in ("network", "compare", "segments")
            assert fits and found["workspace_bytes"] == 0
    for outer, length, bits in [
        (383, 1024, 32), (20_000, 32, 32), (200, 3073, 16), (48, 8193, 32), (200, 4097, 64),
    ]:  # fmt: skip
        assert plan(outer, length, 1, 9, bits)["algorithm"] != "network"
    for outer, length, count, bits in [(3, 100_000, 500, 32), (300, 70_000, 400, 16), (2, 70_000, 400, 64)]:
        found = plan(outer, length, 1, count, bits)
        assert found["algorithm"] == "merge"
        part = plan(1, length, 1, count, bits, workspace_bytes=found["workspace_bytes"])
        assert part["algorithm"] == "merge" and part["workspace_bytes"] == found["workspace_bytes"]
    for rows, count, bits, algorithm in [
        (9, 109, 8, "sweep"), (9, 110, 8, "merge"), (29, 110, 8, "merge"), (30, 110, 8, "none"),
        (9, 99, 16, "sweep"), (9, 100, 16, "merge"), (15, 100, 16, "none"), (30, 68, 32, "sweep"), (30, 69, 32, "none"),
    ]:  # fmt: skip
        assert plan(rows, 70_000, 1, count, bits)["algorithm"] == algorithm
    sort = lambda *args: cpu.plan_sort(*args, 64, True, False, capability)
    assert sort(600, 2048, 1)["algorithm"] == sort(200, 4096, 2)["algorithm"] == "network"
    assert sort(140, 2048, 1)["algorithm"] != "network"


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
def test_plans_of_different_elements(capability):
    plan = lambda *args: jaxgpuops._native.modules["cpu"].plan_unique(*args, False, capability)
    assert plan(1, 1 << 20, 1, 0, 32, False, False)["algorithm"] == "empty"
    for rows in ((2, 1 << 20, 1), (1, 1 << 20, 2), (1, 5000, 1), (300, 1000, 1)):
        assert plan(*rows, 3, 32, False, False)["algorithm"] == "none"
    assert plan(1, 100_000, 1, 3000, 32, False, False)["algorithm"] == "none"
    for bits, index, inverse in itertools.product((8, 16, 32, 64), *BOTH):
        if bits <= 16 and not index and not inverse:
            assert plan(1, 1000, 1, 70_000, bits, index, inverse)["algorithm"] == "counts"
        for outer, length in ((1, 1), (1, 1024), (16, 1000), (200, 100)):
            found = plan(outer, length, 1, 1 << 18, bits, index, inverse)
            if capability != 90 and outer > 16:  # fewer multiprocessors
                continue
            assert found["algorithm"] == "compare" and found["blocks"] * 32 >= length
            assert 1 << found["slot_bits"] >= 2 * length and found["workspace_bytes"] == 0
    for bits in (8, 16):
        assert plan(1, 5000, 1, 7, bits, False, False)["algorithm"] == "counts"
        assert plan(4, 1 << 14, 1, 7, bits, False, False)["algorithm"] == "counts"
        assert plan(300, 1 << 14, 1, 7, bits, False, False)["algorithm"] == "none"
        assert plan(2, (1 << 14) + 1, 1, 7, bits, False, False)["algorithm"] == "none"
        for length in ((1 << 14) + 1, 1 << 20, (1 << 31) - 1):
            found = plan(1, length, 1, 1 << 20, bits, False, False)
            if bits == 8 or capability == 90:
                assert found["algorithm"] == "counts" and found["chunk"] % 16 == 0
                assert found["blocks"] > (1 << bits) / 4096 and found["workspace_bytes"] >= 4 << bits
            else:  # a block may have no room for the counts
                assert found["algorithm"] in ("counts", "none", "table")
    for length, bits, index, inverse in itertools.product((1 << 19, 3_000_001, (1 << 31) - 1), (8, 16, 32, 64), *BOTH):
        found = plan(1, length, 1, 7, bits, index, inverse)
        if bits <= 16 and not index and not inverse and found["algorithm"] == "counts":
            continue
        assert found["algorithm"] == "table"
        assert found["chunk"] * (found["blocks"] - 1) < length <= found["chunk"] * found["blocks"]
        assert capability != 90 or found["blocks"] <= 264
        # The sorted row, its order, and bits of the choice are in the workspace.
        assert found["workspace_bytes"] >= length * bits // 8 + 4 * length * (index or inverse) + length // 8 * inverse
        # The bound is that of about 2560 elements, of which the sample has enough.
        least = bits >= 32 and not index and not inverse
        assert (found["samples"] > 0) == least or capability != 90
        if found["samples"]:
            assert least
            assert 2 <= found["sampled_rank"] <= min(32, found["samples"])
            assert found["samples"] == 256 or 2000 < found["sampled_rank"] * found["chunk"] / found["samples"] < 2700
    assert plan(1, 1 << 18, 1, 1024, 32, False, False)["samples"] == 0  # a sort takes less time


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
