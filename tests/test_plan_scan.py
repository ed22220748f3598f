"""The plan of scans: see test_plan.py."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from plans import LENGTHS, OUTER, SCANS, plan_scan

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
    ((1, 500, 88), "bfloat16", "pieces"),
    ((1, 2048, 88), "bfloat16", "resident"),
    ((1, 4096, 40), "float32", "resident"),
    ((1, 8192, 40), "float32", "column_twice"),
    ((1, 100_000, 3), "float32", "resident"),
    ((3, 400_000, 3), "float32", "span_twice"),
    ((1, 100_000, 34), "float32", "span_twice"),
    ((1, 100_000, 36), "float32", "column_twice"),
    ((1, 100_000, 35), "bfloat16", "span_twice"),
    ((1 << 20, 32, 1), "float32", "short"),
    ((3371, 32, 1), "float64", "packs"),
    ((4481, 4, 51), "int16", "lanes"),
    ((1 << 20, 2, 1), "bfloat16", "packs"),
    ((1 << 20, 3, 1), "float32", "packs"),
    ((1 << 20, 13, 1), "int8", "packs"),
    ((80_000, 256, 1), "int8", "lane_rows"),
    ((1000, 20_000, 1), "int16", "walk"),
    ((1000, 20_000, 3), "int16", "spans"),
    ((9, 524_288, 1), "int8", "row_look_ahead"),
    ((4, 262_144, 1), "int8", "resident"),
    ((2, 898_434, 1), "int16", "resident"),
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


# The kernels of scans by layout: those in which a block has all of an axis, and those whose blocks share it. Clusters
# ("resident" of few tiles) are neither: they need no workspace.
SCAN_KERNELS = {
    "along": (
        {"small", "few", "lane_rows", "rows", "walk"},
        {"resident", "row_look_ahead", "chunk_look_ahead", "chunk_twice"},
    ),
    "across": ({"small", "pieces", "columns"}, {"column_look_ahead", "column_twice"}),
    "spans": ({"small", "short", "lanes", "packs", "pieces", "few", "spans"}, {"resident", "span_twice"}),
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
        if plan["algorithm"] == "resident" and plan["workspace_bytes"] == 0:
            assert capability >= 90 and 2 <= plan["tiles"] <= 16, (call, plan)
            assert plan["strips"] * plan["tiles"] <= 32 * 132, (call, plan)
            continue
        assert plan["algorithm"] in alone | shared, (call, plan)
        most = 1024 if plan["algorithm"] in ("small", "pieces") else 512 if plan["layout"] == "across" else 256
        assert plan["threads"] % 32 == 0 and 32 <= plan["threads"] <= most, (call, plan)
        # Rows whose tiles begin at vectors of memory may begin almost a vector after their first tile.
        lead = 16 // jnp.dtype(call[4]).itemsize - 1 if plan["layout"] == "along" and plan["tiles"] > 1 else 0
        assert (plan["tiles"] - 1) * plan["tile"] < length + lead, (call, plan)
        assert length <= plan["tiles"] * plan["tile"], (call, plan)
        if plan["tiles"] == 1:
            assert plan["algorithm"] in alone - {"walk"}, (call, plan)
        assert (plan["workspace_bytes"] > 0) == (plan["algorithm"] in shared), (call, plan)
    expected = set().union(*(alone | shared for alone, shared in SCAN_KERNELS.values()))
    # In the shared memory of 7.5 there is no room for two tiles of columns, nor of spans of two operands.
    assert found == expected - ({"column_look_ahead"} if capability == 75 else set())


def test_scans_of_rows_in_packs():
    call = 1 << 19, 2, 1, "bfloat16", False, 1, 90
    assert plan_scan("linear_scan", *call)["algorithm"] == "packs"
    assert plan_scan("linear_scan", *call, dense=False)["algorithm"] == "packs"  # one factor
    assert plan_scan("linear_scan", *call, dense=False, a_outer_stride=1)["algorithm"] == "short"
    assert plan_scan("cumsum", *call, initial=True)["algorithm"] == "short"
    for op, dtype, lengths in (  # the longest rows that take packs, and some that do not
        ("linear_scan", "float32", (21, 25)),
        ("cumsum", "float64", (12, 13)),
        ("cummax", "bfloat16", (32, None)),
        ("cumsum", "int8", (32, None)),
        ("cumsum", "int16", (20, 21)),
        ("cumlogsumexp", "bfloat16", (16, 17)),
        ("cumlogsumexp", "float32", (8, 9)),
        ("cumprod", "int32", (20, 25)),
    ):
        plans = [plan_scan(op, 1 << 18, length, 1, dtype, False, 1, 90) for length in lengths if length]
        assert [plan["algorithm"] for plan in plans] == ["packs", "short"][: len(plans)], (op, dtype)
    for op, dtype, length, most in (  # the most elements of longer rows
        ("linear_scan", "float32", 32, 1 << 22),
        ("cumprod", "int32", 25, 1 << 20),
        ("cumsum", "int32", 25, 1 << 22),
        ("cumsum", "float64", 31, 1 << 19),
        ("cummax", "int64", 32, 1 << 19),
    ):
        plans = [plan_scan(op, outer, length, 1, dtype, False, 1, 90) for outer in (most // length, most // length + 1)]
        assert [plan["algorithm"] for plan in plans] == ["packs", "short"], (op, dtype)
    # Lanes that read memory directly have no more columns than are in flight at a time.
    for rows, blocks in (((13_443, 4, 51), 1345), ((8962, 8, 51), 1793), ((134_430, 4, 5), 264)):
        plan = plan_scan("cumprod", *rows, "int16", False, 1, 90)
        assert (plan["algorithm"], plan["strips"]) == ("short", blocks), (rows, plan)
    for dtype, length, packs in (("float32", 8, 1), ("float32", 12, 0), ("float16", 32, 1), ("float32", 32, 0)):
        call = 1 << 17, length, 1, dtype, False, 1, 90
        assert plan_scan("linear_scan_vjp", *call)["algorithm"] == ("packs" if packs else "short")
        assert plan_scan("cumprod_jvp", *call)["algorithm"] == "short"


def test_short_columns_in_lanes():
    """Few short columns that lanes read directly have a kernel of little code."""
    for op, dtype, length, inner, most in (
        ("cumprod", "int16", 4, 51, 1 << 21),
        ("cumsum", "float32", 8, 1000, 1 << 21),
        ("linear_scan", "float32", 8, 171, 3 << 18),
    ):
        outer = most // (length * inner)
        plans = [plan_scan(op, many, length, inner, dtype, False, 1, 90) for many in (outer, outer + 1)]
        assert [plan["algorithm"] for plan in plans] == ["lanes", "short"], (op, dtype)
        assert plans[0]["strips"] == -(-outer * inner // 256) and plans[0]["threads"] == 256
        assert plan_scan(op, outer, length, inner, dtype, True, 1, 90)["algorithm"] == "short"  # segments
        assert plan_scan(op, outer // 3, min(32, 2 * length + 1), inner, dtype, False, 1, 90)["algorithm"] == "short"
    for outer, length, inner in ((1000, 32, 386), (100_000, 30, 130), (1, 9, 1 << 19), (10_000, 16, 16)):  # bytes
        assert plan_scan("cumprod", outer, length, inner, "uint8", False, 1, 90)["algorithm"] == "lanes"
        assert plan_scan("cumprod", outer, length, inner, "uint8", True, 1, 90)["algorithm"] == "short"
    for outer, length, inner in ((10_000, 16, 15), (1, 4, 1 << 21), (1 << 24, 2, 128)):
        assert plan_scan("cumprod", outer, length, inner, "uint8", False, 1, 90)["algorithm"] == "short"
    assert plan_scan("cumlogsumexp", 400, 8, 100, "float32", False, 1, 90)["algorithm"] == "short"
    assert plan_scan("linear_scan", 400, 8, 100, "bfloat16", False, 1, 90)["algorithm"] == "short"
    assert plan_scan("linear_scan_vjp", 400, 8, 100, "float32", False, 1, 90)["algorithm"] == "short"


def test_scans_in_pieces():
    """If columns are few, blocks share their axis in pieces, which are folded in the same order as whole columns.
    `most` is the number of elements up to which that is so."""
    for op, dtype, rows, most in (
        ("cumsum", "float32", (5000, 3), 1 << 20),
        ("cumprod", "float64", (900, 7), 1 << 20),
        ("cummax", "int16", (3000, 3), 1 << 20),
        ("cumprod", "bfloat16", (300, 11), 1 << 19),
        ("cumprod", "bfloat16", (100, 11), 1 << 20),
        ("cummax", "float32", (2000, 3), 1 << 19),
        ("cumsum", "bfloat16", (200, 104), 3 << 18),
        ("cumsum", "bfloat16", (300, 104), 1 << 18),
        ("linear_scan", "float32", (1000, 5), 1 << 19),
        ("linear_scan", "float64", (100, 5), 1 << 17),
        ("linear_scan", "float32", (1300, 3), 1 << 18),  # one tile
        ("linear_scan", "bfloat16", (1500, 5), 1 << 18),  # one tile, too
        ("linear_scan", "bfloat16", (3000, 5), 1 << 15),
        ("linear_scan", "float32", (1500, 5), 1 << 14),
        ("linear_scan", "bfloat16", (256, 34), 1 << 17),
        ("linear_scan", "float32", (256, 34), 1 << 15),
        ("linear_scan", "float32", (100, 34), 1 << 19),
    ):
        outer = most // (rows[0] * rows[1])
        plans = [plan_scan(op, many, *rows, dtype, False, 1, 80) for many in (1, outer, outer + 1)]
        assert [plan["algorithm"] == "pieces" for plan in plans] == [True, True, False]
        assert len({(plan["tile"], plan["tiles"]) for plan in plans}) == 1
        assert plan_scan(op, 1, *rows, dtype, True, 1, 80)["algorithm"] != "pieces"  # segments
    # Clusters take columns of two tiles or more if their lines or the array are large, except for gradients.
    for op, dtype, rows, first in (
        ("cumsum", "float32", (5000, 3), 11),  # elements
        ("cumsum", "float32", (2000, 10), 1),  # lines
        ("linear_scan", "float32", (700, 20), 12),
        ("cumsum", "float32", (300, 128), 7),
    ):
        for outer in (first - 1, first) if first > 1 else (first,):
            algorithm = "pieces" if outer < first else "resident"
            assert plan_scan(op, outer, *rows, dtype, False, 1, 90)["algorithm"] == algorithm, (op, rows, outer)
    assert plan_scan("cumprod_jvp", 3, 2000, 10, "float32", False, 1, 90)["algorithm"] == "pieces"
    for op in ("cumlogsumexp", "linear_scan_vjp"):
        assert plan_scan(op, 1, 500, 3, "float32", False, 1, 90)["algorithm"] == "spans"
    gradients = "cumprod_jvp", "cumlogsumexp_jvp"
    for dtype in ("bfloat16", "float32", "float64"):  # gradients of many elements, if a few columns have them
        shapes = (512, 128, 4), (513, 128, 4), (44, 1024, 3), (1, 128, 40)
        taken = [
            [plan_scan(op, *rows, dtype, False, 1, 90)["algorithm"] == "pieces" for rows in shapes] for op in gradients
        ]
        assert taken[0] == [True, False, True, True], dtype
        assert taken[1] == [dtype != "float64", False, dtype != "float64", False], dtype
    for length, inner in ((8193, 3), (2049, 64), (5000, 30), (8192, 9)):  # too many lines of memory for a block
        assert plan_scan("cumsum", 1, length, inner, "float32", False, 1, 90)["algorithm"] != "pieces"
    # A column of 64 KB, with what is beside it, is more than the shared memory of a block of 7.5.
    plans = [plan_scan("cummax", 5, 16_384, 1, "bool", False, 1, capability) for capability in (75, 80)]
    assert [plan["algorithm"] for plan in plans] == ["spans", "pieces"]


def test_few_rows_and_short_columns():
    """Few rows that one warp has in `rows` have a lane for each 16 bytes, in the same order; rows that are not whole
    vectors may be more."""
    for op, dtype, length, most, threads in (
        ("cumsum", "float32", 64, 3 << 16, 128),  # 16 lanes have a row
        ("linear_scan", "bfloat16", 256, 3 << 16, 128),
        ("linear_scan", "float32", 512, 1 << 15, 128),  # four warps have a row
        ("cumprod", "float64", 100, 1 << 15, 64),
        ("cumsum", "bfloat16", 443, 1 << 19, 64),
        ("cummax", "float32", 257, 1 << 18, 96),
        ("linear_scan", "float64", 151, 1 << 16, 96),
        ("cumprod", "int16", 101, 1 << 19, 128),
    ):
        plans = [plan_scan(op, most // length + i, length, 1, dtype, False, 1, 90) for i in (0, 1)]
        assert [plan["algorithm"] for plan in plans] == ["few", "rows"], (op, dtype, length)
        assert plans[0]["threads"] == threads and plans[0]["tile"] == plans[1]["tile"]
        assert plan_scan(op, 1, length, 1, dtype, True, 1, 90)["algorithm"] != "few"  # segments
    for op, dtype, length in (
        ("cumsum", "float32", 513),  # two warps in `rows`
        ("linear_scan", "bfloat16", 4097),
        ("linear_scan", "bfloat16", 2056),  # whole vectors
        ("cumlogsumexp", "float32", 100),
        ("linear_scan_vjp", "float32", 100),
    ):
        assert plan_scan(op, 2, length, 1, dtype, False, 1, 90)["algorithm"] == "rows", (op, dtype, length)
    for op, dtype, length, threads in (  # longer rows of 16 bits
        ("linear_scan", "bfloat16", 1025, 160),
        ("cumsum", "float16", 2048, 256),
        ("cummax", "int16", 4095, 512),
    ):
        most = min(200, (9 << 16) // length)
        plans = [plan_scan(op, outer, length, 1, dtype, False, 1, 90) for outer in (1, most, most + 1)]
        assert [plan["algorithm"] for plan in plans] == ["few", "few", "rows"], (op, dtype, length)
        assert plans[0]["threads"] == threads and plans[0]["tile"] == plans[2]["tile"]
    # Other kernels would fold these columns in another order, so `few` takes them however many they are.
    for dtype, length, inner, few in (
        ("float32", 64, 20, True),
        ("bfloat16", 33, 39, True),
        ("float64", 64, 3, True),
        ("float32", 65, 20, False),
        ("float32", 64, 21, False),
        ("complex64", 64, 3, False),
    ):
        for outer in (1, 1 << 20):
            plan = plan_scan("linear_scan", outer, length, inner, dtype, False, 1, 90)
            assert (plan["algorithm"] == "few") == few, (outer, dtype, length, inner)


def test_scans_of_few_columns():
    """Blocks share the axis of few columns if it has two tiles or more; the tiles are those of larger batches."""
    for call, dtype, rows in (
        ("linear_scan", "float32", (14_608, 5)),
        ("linear_scan", "bfloat16", (65_536, 2)),
        ("cumsum", "float8_e5m2", (338_129, 1)),
        ("cumprod_jvp", "float16", (6_729, 75)),
    ):
        plans = [plan_scan(call, outer, *rows, dtype, False, 1, 80) for outer in (1, 40, 1000)]  # without clusters
        first = "resident" if call == "linear_scan" else "span_twice"
        assert [plan["algorithm"] for plan in plans] == [first, "span_twice", "spans"]
        assert len({(plan["tile"], plan["tiles"]) for plan in plans}) == 1
    # Exact results do not depend on the order of folding: few rows have more tiles, if the workspace has room for them.
    for call, dtype, rows, tiles in (
        ("cummax", "float16", (12_165, 3), (17, 5, 3)),
        ("cumprod", "int32", (8192, 20), (114, 32, 32)),
        ("cumsum", "int8", (112_710, 3), (157, 22, 22)),
    ):
        plans = [plan_scan(call, outer, *rows, dtype, False, 1, 90) for outer in (1, 40, 1000)]
        assert tuple(plan["tiles"] for plan in plans) == tiles
    # Runs of 17 positions, or of 9 along short axes, but for logsumexps of 16 bits: a warp has 6 of 5 columns.
    for dtype, length, run in (("bfloat16", 45, 17), ("float16", 300, 17), ("float32", 300, 17), ("float32", 45, 9)):
        tile = plan_scan("cumlogsumexp", 1000, length, 5, dtype, False, 1, 90)["tile"]
        assert tile == -(-length // (6 * run)) * 6 * run
    # One tile of exact numbers has few warps with long runs.
    for rows, threads, tile in (
        ((1091, 1), 32, 1120),
        ((2000, 1), 32, 2016),
        ((5000, 1), 96, 5088),
        ((1000, 3), 64, 1020),
    ):
        plan = plan_scan("cummax", 2000, *rows, "bool", False, 1, 90)
        assert (plan["algorithm"], plan["threads"], plan["tile"]) == ("spans", threads, tile)
    # Columns whose blocks would share few tiles have a block each, and so have spans where these are many enough.
    for outer, length, inner, algorithm in (
        (20, 300, 64, "column_twice"),
        (70, 300, 64, "columns"),
        (40, 1000, 64, "column_twice"),
        (60, 1000, 64, "columns"),
        (45, 4000, 64, "column_twice"),
        (60, 4000, 64, "columns"),
        (180, 20_000, 3, "span_twice"),
        (200, 20_000, 3, "spans"),
    ):
        assert plan_scan("linear_scan", outer, length, inner, "float32", False, 1, 80)["algorithm"] == algorithm
    # The more there is to compute for a byte, the longer it pays to read spans twice.
    for call, dtype, outer in (
        ("cumsum", "float32", 264),
        ("cumsum", "bfloat16", 396),
        ("cumlogsumexp", "float32", 396),
        ("cumprod", "int16", 396),
        ("cumsum", "float64", 181),
    ):
        plans = [plan_scan(call, many, 40_000, 3, dtype, False, 1, 80) for many in (outer - 1, outer)]
        assert [plan["algorithm"] for plan in plans] == ["span_twice", "spans"]


def test_many_columns_of_few_elements():
    """Blocks of `pieces` read columns side by side, which `small` does not; the results are the same."""
    for dtype, least in (("int32", 192), ("bfloat16", 192), ("float64", 1 << 20), ("int8", 1 << 20)):
        for columns in (64, 150, 191, 192, 700):
            plan = plan_scan("cummax", 1, 40, columns, dtype, False, 1, 90)
            assert plan["algorithm"] == ("pieces" if columns >= least else "small"), (dtype, columns)
    for rows, algorithm in (((4, 63), "small"), ((4, 64), "pieces"), ((117, 3), "small"), ((118, 3), "pieces")):  # fmt: skip
        plan = plan_scan("cummax", rows[0], 40, rows[1], "int32", False, 1, 90)
        assert plan["algorithm"] == algorithm, rows


def test_many_rows_of_few_bytes():
    """A lane has a row, in the order in which few rows are folded; whole vectors have it only where `rows` wastes
    lanes."""
    for op, dtype, length, least in (
        ("linear_scan", "bfloat16", 70, 256 * 70),
        ("cumsum", "float16", 127, 256 * 127),
        ("cummax", "int16", 99, 256 * 99),
        ("cumprod", "bfloat16", 72, 1024 * 72),
        ("cumsum", "int8", 250, 256 * 250),
        ("cumsum", "uint8", 128, 256 * 128),
        ("linear_scan", "float16", 113, None),
        ("cumsum", "bfloat16", 128, None),
        ("cumsum", "bfloat16", 129, None),
        ("cumsum", "float32", 61, None),
        ("cummax", "bool", 61, None),
        ("cumlogsumexp", "bfloat16", 61, None),
        ("linear_scan_vjp", "bfloat16", 61, None),
    ):
        many = plan_scan(op, least or 1 << 20, length, 1, dtype, False, 1, 90)
        assert (many["algorithm"] == "lane_rows") == (least is not None), (op, dtype, length, many)
        if least:
            fewer = plan_scan(op, least - 1, length, 1, dtype, False, 1, 90)
            assert fewer["algorithm"] == "rows" and fewer["tile"] == many["tile"]
            assert plan_scan(op, least, length, 1, dtype, True, 1, 90)["algorithm"] != "lane_rows"  # segments
    call = 1 << 20, 70, 1, "bfloat16", False, 1, 90
    assert plan_scan("linear_scan", *call, dense=False)["algorithm"] == "rows"


def test_sums_of_two_columns_are_sums_of_complex_rows():
    for outer, length in ((1, 100), (9, 3000), (3, 20_000), (300, 9000), (2, 3_000_000)):
        pairs = plan_scan("cumsum", outer, length, 2, "float32", False, 1, 90)
        assert pairs == plan_scan("cumsum", outer, length, 1, "complex64", False, 1, 90)
        assert pairs["layout"] == "along"
    for op, length, inner, segmented in (("cumprod", 3000, 2, False), ("cumsum", 3000, 3, False),
                                         ("cumsum", 32, 2, False), ("cumsum", 3000, 2, True)):  # fmt: skip
        assert plan_scan(op, 9, length, inner, "float32", segmented, 1, 90)["layout"] == "spans"


def test_long_lines_of_small_elements():
    """Lines of more than 256 columns that are no whole words are cut into narrow spans, whatever the batch is."""
    for op, dtype, inner in (
        ("cumprod", "bfloat16", 1121),
        ("linear_scan_vjp", "float16", 301),
        ("linear_scan", "bfloat16", 257),
        ("cummax", "int8", 512),
    ):
        plans = [plan_scan(op, outer, 710, inner, dtype, False, 1, 90) for outer in (1, 9, 200)]
        assert {(plan["layout"], plan["tile"]) for plan in plans} == {("spans", 264)}
    assert plan_scan("cumprod", 9, 710, 255, "bfloat16", False, 1, 90)["tile"] != 264


def test_spans_that_are_resident():
    """If the GPU has all tiles of few columns at a time, one kernel takes them; its tiles are those of larger
    batches."""
    for call, dtype, rows, most in (
        ("linear_scan", "float32", (21_158, 4), 19),  # 396 tiles in all
        ("linear_scan", "bfloat16", (459_413, 2), 3),
        ("cumsum", "float64", (6937, 6), 36),
        ("cumlogsumexp", "bfloat16", (20_000, 9), 30),
    ):
        plans = [plan_scan(call, outer, *rows, dtype, False, 1, 80) for outer in (1, most, most + 1)]
        assert [plan["algorithm"] for plan in plans] == ["resident", "resident", "span_twice"], (call, rows, plans)
        assert len({(plan["tile"], plan["tiles"], plan["workspace_bytes"]) for plan in plans}) == 1
    for call, dtype, rows, segmented in (
        ("linear_scan", "float32", (14_191, 17), False),  # a block would read too many sums
        ("cumsum", "float32", (2_000_000, 3), False),  # too many tiles
        ("cummax", "int16", (60_000, 3), False),  # rare
    ):
        plan = plan_scan(call, 1, *rows, dtype, segmented, 1, 90)
        assert plan["algorithm"] == "span_twice", (call, rows, plan)


def test_scans_in_clusters():
    """The blocks of a cluster have up to sixteen tiles, without a workspace and without other tiles than a larger batch
    has."""
    for call, dtype, rows, most in (
        # All clusters run at the same time: three blocks on a multiprocessor.
        ("linear_scan", "float32", (8192, 1), 132),  # 2 tiles
        ("linear_scan", "float32", (32_768, 1), 49),  # 8 tiles
        ("cumsum", "float32", (8192, 1), 132),
        ("cumsum", "float32", (65_536, 1), 24),  # 16 tiles
        ("cumlogsumexp", "float64", (4000, 3), 132),
        # They take turns where a block would walk along a row: 6 blocks for each multiprocessor, or 32 where there is
        # much to compute.
        ("cumsum", "float32", (12_288, 1), 264),
        ("cumprod", "int16", (20_000, 1), 264),
        ("linear_scan_vjp", "bfloat16", (16_000, 1), 198),
        ("cumlogsumexp", "float32", (8192, 1), 2112),
        ("cumprod_jvp", "bfloat16", (16_000, 1), 1056),
        # And where columns would be read twice, or a block would walk along few tiles of spans.
        ("linear_scan", "float32", (2000, 64), 49),
        ("cumlogsumexp", "float32", (2000, 64), 49),
        ("linear_scan", "float32", (7000, 5), 180),
        ("linear_scan", "bfloat16", (65_536, 2), 264),
        ("cumsum", "float32", (5000, 3), 1056),
        ("cumlogsumexp", "bfloat16", (1024, 20), 528),
    ):
        plans = [plan_scan(call, outer, *rows, dtype, False, 1, 90) for outer in (most, most + 1)]
        names = [plan["algorithm"] for plan in plans]
        assert names[0] == "resident" and plans[0]["workspace_bytes"] == 0, (call, rows, plans)
        assert names[1] != "resident" or plans[1]["workspace_bytes"] > 0, (call, rows, plans)
        assert plans[0]["tile"] == plans[1]["tile"] and 2 <= plans[0]["tiles"] <= 16
        before = plan_scan(call, most, *rows, dtype, False, 1, 80)
        assert (before["algorithm"] != "resident" or before["workspace_bytes"] > 0) and before["tile"] == plans[0][
            "tile"
        ]
    # Of few exact numbers, tiles may be smaller, and need no workspace. The handler, which gets none, has the same plan.
    plan = plan_scan("cummax", 9, 2048, 10, "float32", False, 1, 90)
    assert plan["algorithm"] == "resident" and plan["workspace_bytes"] == 0 and plan["tiles"] == 10, plan


def test_one_factor_for_all_positions():
    """Tiles of spans have about twice as many positions if a column has one factor for all of them."""
    call = "linear_scan", 138, 8192, 12
    plans = [
        plan_scan(*call, "float32", False, 1, 90, **options)
        for options in ({}, {"dense": False, "a_axis_stride": 1}, {"dense": False})
    ]
    assert [plan["tiles"] for plan in plans] == [31, 31, 16]
    assert [plan["algorithm"] for plan in plans] == ["span_twice", "span_twice", "resident"]
    plans = [plan_scan(*call, "bfloat16", False, 1, 90, dense=dense) for dense in (True, False)]
    assert plans[0]["tile"] == plans[1]["tile"]


def test_lines_of_odd_length():
    """Cumulative operations take lines that are not whole vectors as they lie in memory."""
    for call, dtype, inner, layout in (
        ("cumsum", "float32", 46, "spans"),
        ("cumsum", "float32", 48, "across"),
        ("cummax", "bfloat16", 100, "spans"),
        ("cummax", "bfloat16", 104, "across"),
        ("cumprod", "float64", 35, "spans"),
        ("cumsum", "float32", 126, "spans"),
        ("cumsum", "float32", 130, "across"),
        ("cumlogsumexp", "float32", 46, "across"),
        ("linear_scan", "float32", 46, "across"),
        ("cummax_jvp", "float32", 46, "across"),
    ):
        assert plan_scan(call, 50, 2000, inner, dtype, False, 1, 90)["layout"] == layout, (call, dtype, inner)
    # So do logsumexps and recurrences of up to 4 bytes, but only along long axes.
    for call, dtype, length, inner, layout in (
        ("linear_scan", "float32", 4095, 85, "across"),
        ("linear_scan", "float32", 4096, 85, "spans"),
        ("linear_scan", "bfloat16", 65_536, 42, "spans"),
        ("linear_scan", "float64", 65_536, 35, "across"),
        ("linear_scan", "float32", 65_536, 130, "across"),
        ("cumlogsumexp", "float32", 65_536, 85, "spans"),
        ("cumlogsumexp", "float16", 32_768, 250, "spans"),
        ("cumlogsumexp", "float16", 32_768, 256, "across"),
        ("linear_scan_vjp", "float32", 65_536, 85, "across"),
    ):
        for outer in (1, 300):
            plan = plan_scan(call, outer, length, inner, dtype, False, 1, 90)
            assert plan["layout"] == layout, (call, dtype, length, inner)


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
        # Rows that would fill the GPU a few times.
        ("cumsum", "float32", (300, 65_536, 1), "row_look_ahead"),
        ("cumsum", "float64", (300, 65_536, 1), "row_look_ahead"),
        ("cummax", "int64", (300, 65_536, 1), "row_look_ahead"),
        ("cumsum", "float64", (300, 20_000, 1), "walk"),
        ("linear_scan", "float64", (300, 65_536, 1), "walk"),
        # The fewer tiles, the fewer rows have a block each.
        ("linear_scan", "float32", (133, 12_000, 1), "walk"),
        ("linear_scan", "float32", (190, 20_000, 1), "row_look_ahead"),
        ("linear_scan", "float32", (198, 20_000, 1), "walk"),
        ("cumsum", "float32", (250, 40_000, 1), "row_look_ahead"),
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
        ("cummax", "bool", False),
        ("cumsum", "complex128", False),
        ("cumprod", "int64", True),
        ("cummax", "int32", True),
        ("cumlogsumexp", "bfloat16", True),
        ("cumsum", "float16", True),
        ("cumlogsumexp", "float64", True),
        ("cumprod_jvp", "complex64", False),
        ("cummax_jvp", "float64", True),
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
        ("cumlogsumexp", "float64", False),
        ("cumprod_jvp", "float32", False),
        ("cumlogsumexp_jvp", "float64", False),
        ("linear_scan", "float32", True),
        ("linear_scan", "float64", False),
        ("linear_scan", "complex64", False),
        ("linear_scan_vjp", "bfloat16", True),
    }
    for op, dtype, segmented in rare | others:
        layouts = [plan_scan(op, 9, 9000, inner, dtype, segmented, 1, 90)["layout"] for inner in (1, 256)]
        assert layouts == (["spans"] * 2 if (op, dtype, segmented) in rare else ["along", "across"]), (op, dtype)
    for op, dtype in (("cumsum", "int8"), ("cummin", "uint16"), ("cumprod", "int32")):
        for shape, segmented, layout in (
            ((4096, 1), False, "along"),
            ((70_000, 1), False, "along"),
            ((70_000, 1), True, "spans"),
            ((4096, 256), False, "spans"),
        ):
            assert plan_scan(op, 900, *shape, dtype, segmented, 1, 90)["layout"] == layout, (op, dtype, shape)
    for options in ({"exclusive": True}, {"transpose": False}):  # options of tangents
        assert plan_scan("cumprod_jvp", 9, 5000, 1, "float32", False, 1, 90, **options)["layout"] == "spans"
        assert plan_scan("linear_scan", 9, 5000, 1, "float32", False, 1, 90, **options)["layout"] == "along"


def test_short_rows_of_few_elements():
    """Exact operations along an axis that would go through shared memory take the small kernel for more elements."""
    for call, dtype, length, most in (
        ("cummax", "bool", 20, 1 << 18),
        ("cumprod", "int64", 2, 3 << 15),  # packs
        ("cumsum", "int32", 8, 3 << 15),
        ("cumprod", "float32", 9, 1 << 16),
        ("cumprod_jvp", "float32", 9, 1 << 17),
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


def test_derivatives_make_y_of_x():
    """The kernel must have whole rows, or columns of few elements, and fold them in the order of the forward kernel."""

    def takes(op, rows, dtype="float32", segmented=False):
        return plan_scan(op, *rows, dtype, segmented, 1, 90, from_x=True)["algorithm"]

    for op in ("cumprod_jvp", "cummax_jvp", "cummin_jvp"):
        for dtype in ("bfloat16", "float32", "float64"):
            assert takes(op, (7, 4, 1), dtype) == takes(op, (1, 32, 90), dtype) == "small"
        assert takes(op, (7, 33, 1), segmented=True) == "none"
        assert takes(op, (7, 33, 1), "float64") == "rows"
        assert takes(op, (9000, 31, 1), "float64") == "short" and takes(op, (40, 33, 3), "float64") == "pieces"
    for n, logsumexps in ((4, "none"), (33, "rows"), (1024, "rows"), (1025, "none")):
        assert takes("cumprod_jvp", (7, n, 1), "complex64") == "none"
        assert takes("cumlogsumexp_jvp", (7, n, 1), "float64") == logsumexps
    for op in ("cumprod_jvp", "cummax_jvp", "cummin_jvp", "cumlogsumexp_jvp"):
        for dtype, size in (("bfloat16", 2), ("float16", 2), ("float32", 4)):
            for n in (40, 136, 513, 8192 // size):
                assert takes(op, (7, n, 1), dtype) == takes(op, (1 << 14, n, 1), dtype) == "rows"
            for n in (33, 511):
                assert takes(op, (7, n, 1), dtype) == ("none" if size == 2 else "rows")
            assert takes(op, (1 << 16, 16 // size, 1), dtype) == "packs"
            for rows in ((1 << 14, 31, 1), (1 << 16, 5, 1), (1 << 14, 4, 7), (1 << 12, 32, 90)):
                assert takes(op, rows, dtype) == "short"
            assert takes(op, (1 << 16, 3, 7), dtype) == "none"
            for rows in ((40, 33, 3), (2, 512, 16), (2, 8192, 2)):
                assert takes(op, rows, dtype) == "pieces"
            # Across columns, a lane of the forward logsumexp takes other numbers together.
            assert takes(op, (7, 100, 64), dtype) == ("none" if op == "cumlogsumexp_jvp" else "pieces")
            assert takes(op, (700, 100, 64), dtype) == takes(op, (400, 500, 3), dtype) == "none"
            assert takes(op, (7, 8192 // size + 1, 1), dtype) == "none"  # one kernel would take as long as two
    assert takes("cummax", (7, 4, 1)) == takes("linear_scan_vjp", (7, 4, 1)) == "none"


def test_tiles_of_clusters_have_a_block_each():
    for op, dtype, rows, length, tiles in (
        ("cummax", "float32", 7, 4428, 2),
        ("cummin", "bfloat16", 17, 13_022, 2),
        ("cummax", "bfloat16", 37, 32_768, 4),
        ("linear_scan", "float32", 7, 4428, 2),
    ):
        plan = plan_scan(op, rows, length, 1, dtype, False, 1, 90)
        assert (plan["algorithm"], plan["tiles"], plan["threads"]) == ("resident", tiles, 256), (op, rows, plan)


def test_rows_of_slow_logsumexps_are_read_twice():
    """Those of float64, if blocks share them and do not all run at the same time."""
    for dtype, algorithm in (("float32", "row_look_ahead"), ("float64", "chunk_twice")):
        assert plan_scan("cumlogsumexp", 15, 1 << 20, 1, dtype, False, 1, 90)["algorithm"] == algorithm
        assert plan_scan("cumlogsumexp", 3, 300_000, 1, dtype, False, 1, 90)["algorithm"] == "resident"
