"""Wrong calls of the handlers of selections, sorts, counts and experts; refusals.py says what they must do."""

import functools

import jax
import jax.numpy as jnp
import pytest
from refusals import F32, S32, S, X, call, refuses

WRONG_TOPK = {
    "k above n": (X, S((4, 9), F32), S((4, 9), S32), 1, "k is 9 but x has length 8"),
    "values dtype": (X, S((4, 2), jnp.float16), S((4, 2), S32), 1, "values has element type F16, expected F32"),
    "values rank": (X, S((8,), F32), S((8,), S32), 1, "values has rank 1, expected 2"),
    "values shape": (X, S((3, 2), F32), S((3, 2), S32), 1, r"values has shape \(3, 2\), expected \(4, 2\)"),
    "indices dtype": (X, S((4, 2), F32), S((4, 2), jnp.uint32), 1, "indices has element type U32, expected S32"),
    "indices shape": (X, S((4, 2), F32), S((4, 3), S32), 1, r"indices has shape \(4, 3\), expected \(4, 2\)"),
    "axis": (X, S((4, 2), F32), S((4, 2), S32), 2, "axis 2 is not an axis of x, which has rank 2"),
    "negative axis": (X, S((4, 2), F32), S((4, 2), S32), -1, "axis -1 is not an axis of x"),
    "dtype": (
        S((4, 8), jnp.complex64), S((4, 2), jnp.complex64), S((4, 2), S32), 1,
        "x has an element type without an order: C64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("x, values, indices, axis, message", WRONG_TOPK.values(), ids=WRONG_TOPK)
def test_topk_refuses(x, values, indices, axis, message):
    with refuses("topk", message):
        call("topk", [values, indices], x, axis=axis, largest=True, sorted=True)


WRONG_ARGMAX = {
    "empty axis": (S((4, 0), F32), S((4,), S32), "the axis is empty"),
    "shape": (X, S((8,), S32), r"indices has shape \(8,\), expected \(4,\)"),
    "dtype": (X, S((4,), jnp.float32), "indices has element type F32, expected S32"),
}


@pytest.mark.parametrize("x, indices, message", WRONG_ARGMAX.values(), ids=WRONG_ARGMAX)
def test_argmax_refuses(x, indices, message):
    with refuses("argmax", message):
        call("argmax", [indices], x, axis=1, largest=True)


PAIR = S((4, 2), F32), S((4, 2), S32)
# logits, weights, indices, further operands, whether there is a bias, message
WRONG_GATE = {
    "dtype": (S((4, 8), S32), *PAIR, [], False, "logits has element type S32, which is not supported here"),
    "k above n": (X, S((4, 9), F32), S((4, 9), S32), [], False, "k is 9 but logits has length 8"),
    "weights dtype": (X, S((4, 2), jnp.float16), PAIR[1], [], False, "weights has element type F16, expected F32"),
    "indices shape": (X, PAIR[0], S((4, 3), S32), [], False, r"indices has shape \(4, 3\), expected \(4, 2\)"),
    "no bias": (X, *PAIR, [], True, "bias is missing"),
    "bias dtype": (X, *PAIR, [S((1, 8), S32)], True, "bias has element type S32, expected F32"),
    "bias shape": (X, *PAIR, [S((4, 7), F32)], True, r"bias has shape \(4, 7\), which does not broadcast to \(4, 8\)"),
    "more": (X, *PAIR, [X], False, "there are 1 operands too many"),
}


@pytest.mark.parametrize("logits, weights, indices, more, biased, message", WRONG_GATE.values(), ids=WRONG_GATE)
def test_gate_refuses(logits, weights, indices, more, biased, message):
    with refuses("topk_softmax", message):
        call("topk_softmax", [weights, indices], logits, *more, axis=1, **GATE | {"biased": biased})


GATE = {"score": 0, "normalize": True, "biased": False, "groups": 1, "topk_groups": 1, "scale": 1.0, "log_sums": False}
# attributes, results after the indices, message
WRONG_GATE_OPTIONS = {
    "score": ({"score": 3}, [], "score is 3, expected 0, 1 or 2"),
    "no groups": ({"groups": 0}, [], "groups is 0, which does not divide 8"),
    "groups": ({"groups": 3}, [], "groups is 3, which does not divide 8"),
    "no chosen groups": ({"groups": 4, "topk_groups": 0}, [], "topk_groups is 0, expected 1 to 4"),
    "chosen groups": ({"groups": 4, "topk_groups": 5}, [], "topk_groups is 5, expected 1 to 4"),
    "few experts": ({"groups": 8}, [], "k is 2 but 1 groups have 1 experts"),
    "no sums": ({"log_sums": True}, [], "log_sums"),
    "sums dtype": ({"log_sums": True}, [S((4,), S32)], "log_sums has element type S32, expected F32"),
    "sums shape": ({"log_sums": True}, [S((4, 1), F32)], r"log_sums has shape \(4, 1\), expected \(4,\)"),
    # On a GPU, the superfluous result is taken for the workspace.
    "results": ({}, [S((4,), F32)], "(there are too many results|workspace has element type F32, expected U8)"),
}


@pytest.mark.parametrize("options, more, message", WRONG_GATE_OPTIONS.values(), ids=WRONG_GATE_OPTIONS)
def test_gate_refuses_options(options, more, message):
    with refuses("topk_softmax", message):
        call("topk_softmax", [*PAIR, *more], X, axis=1, **GATE | options)


# target -> the names of its long and of its short side, and the order of (long, short, indices) in the call
ALONG_AXIS = {
    "take_along_axis": ("x", "out", lambda long, short, indices: ([short], long, indices)),
    "put_along_axis": ("out", "updates", lambda long, short, indices: ([long], short, indices)),
}
WRONG_ALONG_AXIS = {
    "short rank": (X, S((8,), F32), S((8,), S32), 1, "{short} has rank 1, expected 2"),
    "short shape": (X, S((3, 2), F32), S((3, 2), S32), 1, r"{short} has shape \(3, 2\), expected \(4, 2\)"),
    "short dtype": (X, S((4, 2), S32), S((4, 2), S32), 1, "{short} has element type S32, expected F32"),
    "indices dtype": (X, S((4, 2), F32), S((4, 2), jnp.int16), 1, "indices has element type S16, expected S32"),
    "indices shape": (X, S((4, 2), F32), S((4, 3), S32), 1, r"indices has shape \(4, 3\), expected \(4, 2\)"),
    "axis": (X, S((4, 2), F32), S((4, 2), S32), 5, "axis 5 is not an axis of {long}, which has rank 2"),
    "width": (
        S((4, 8), jnp.complex128), S((4, 2), jnp.complex128), S((4, 2), S32), 1,
        "{long} has elements that are not 1, 2, 4 or 8 bytes wide: C128",
    ),
}  # fmt: skip


@pytest.mark.parametrize("target", ALONG_AXIS)
@pytest.mark.parametrize("whole, part, indices, axis, message", WRONG_ALONG_AXIS.values(), ids=WRONG_ALONG_AXIS)
def test_along_axis_refuses(target, whole, part, indices, axis, message):
    whole_name, part_name, arguments = ALONG_AXIS[target]
    message = message.replace("{long}", whole_name).replace("{short}", part_name)
    results, *operands = arguments(whole, part, indices)
    with jax.enable_x64(True), refuses(target, message):
        call(target, results, *operands, axis=axis)


SORTED = {"descending": False, "values": True, "indices": True, "kth": -1}
PLACES = S((4, 8), S32)
WRONG_SORTS = {
    "axis": (X, [X, PLACES], {"axis": 2}, "axis 2 is not an axis of x, which has rank 2"),
    "no order": (S((4, 8), jnp.complex64), [X, PLACES], {}, "x has an element type without an order: C64"),
    "nothing": (X, [X, PLACES], {"values": False, "indices": False}, "neither values nor indices are asked for"),
    "values dtype": (X, [PLACES, PLACES], {}, "values has element type S32, expected F32"),
    "values shape": (X, [S((4, 7), F32), PLACES], {}, r"values has shape \(4, 7\), expected \(4, 8\)"),
    "indices dtype": (X, [X, X], {}, "indices has element type F32, expected S32"),
    "indices shape": (X, [X, S((3, 8), S32)], {}, r"indices has shape \(3, 8\), expected \(4, 8\)"),
    "kth": (X, [X, PLACES], {"kth": 8}, "kth is 8, x has 8 elements along axis 1"),
}


@pytest.mark.parametrize("x, results, flags, message", WRONG_SORTS.values(), ids=WRONG_SORTS)
def test_sort_refuses(x, results, flags, message):
    with refuses("sort", message):
        call("sort", results, x, **{"axis": 1} | SORTED | flags)


WRONG_KEYS = {
    "bits": (PLACES, S((4, 8), jnp.int16), PLACES, "low has elements of 16 bits, expected 32"),
    "no order": (S((4, 8), jnp.complex64), PLACES, PLACES, "high has an element type without an order: C64"),
    "shape": (PLACES, S((4, 7), F32), PLACES, r"low has shape \(4, 7\), expected \(4, 8\)"),
    "indices dtype": (PLACES, X, X, "indices has element type F32, expected S32"),
    "indices shape": (PLACES, X, S((3, 8), S32), r"indices has shape \(3, 8\), expected \(4, 8\)"),
}


@pytest.mark.parametrize("high, low, indices, message", WRONG_KEYS.values(), ids=WRONG_KEYS)
def test_lexsort_refuses(high, low, indices, message):
    with refuses("lexsort", message):
        call("lexsort", [indices], high, low, axis=1, descending=False)


WRONG_CARRIED = {
    "dtype": (X, {}, "carried has element type F32, expected S32"),
    "shape": (S((4, 7), S32), {}, r"carried has shape \(4, 7\), expected \(4, 8\)"),
    "no indices": (PLACES, {"indices": False}, "carried numbers take the place of the indices of a whole sort"),
    "kth": (PLACES, {"kth": 3}, "carried numbers take the place of the indices of a whole sort"),
}


@pytest.mark.parametrize("carried, flags, message", WRONG_CARRIED.values(), ids=WRONG_CARRIED)
def test_sort_refuses_to_carry(carried, flags, message):
    with refuses("sort", message):
        call("sort", [X, PLACES], X, carried, **{"axis": 1} | SORTED | flags)


OFFSETS = S((1, 4), S32)
WRONG_SEGMENT_SORTS = {
    "axis": (X, OFFSETS, [X, PLACES], {"axis": 2}, "axis 2 is not an axis of x, which has rank 2"),
    "values shape": (X, OFFSETS, [S((4, 7), F32), PLACES], {}, r"values has shape \(4, 7\), expected \(4, 8\)"),
    "offsets dtype": (X, S((1, 4), F32), [X, PLACES], {}, "offsets has element type F32, expected S32"),
    "offsets rank": (X, S((4,), S32), [X, PLACES], {}, "offsets has rank 1, expected 2"),
    "offsets shape": (X, S((3, 4), S32), [X, PLACES], {}, r"offsets has shape \(3, 4\), which does not broadcast"),
    "no offsets": (X, S((1, 0), S32), [X, PLACES], {}, "offsets is empty along axis 1"),
}


@pytest.mark.parametrize("x, offsets, results, flags, message", WRONG_SEGMENT_SORTS.values(), ids=WRONG_SEGMENT_SORTS)
def test_sort_segments_refuses(x, offsets, results, flags, message):
    given = {"axis": 1, "descending": False, "values": True, "indices": True} | flags
    with refuses("sort_segments", message):
        call("sort_segments", results, x, offsets, **given)


SEGMENTS = ("segment_sum", "segment_max", "segment_min")
IDS = S((8, 1), S32)
ROWS_OF_SEGMENTS, SUMS = S((8, 3), F32), S((5, 3), F32)
WRONG_SEGMENTS = {
    "axis": (ROWS_OF_SEGMENTS, IDS, SUMS, 2, "axis 2 is not an axis of data, which has rank 2"),
    "dtype": (S((8, 3), jnp.complex64), IDS, SUMS, 0, "data has element type C64, which is not supported here"),
    "ids dtype": (ROWS_OF_SEGMENTS, S((8, 1), F32), SUMS, 0, "ids has element type F32, expected S32"),
    "ids shape": (ROWS_OF_SEGMENTS, S((7, 1), S32), SUMS, 0, r"ids has shape \(7, 1\), which does not broadcast"),
    "ids inner": (ROWS_OF_SEGMENTS, S((8, 3), S32), SUMS, 0, r"ids has shape \(8, 3\): it must have all of axis 0"),
    "out dtype": (ROWS_OF_SEGMENTS, IDS, S((5, 3), S32), 0, "out has element type S32, expected F32"),
    "out shape": (ROWS_OF_SEGMENTS, IDS, S((5, 4), F32), 0, r"out has shape \(5, 4\), expected \(5, 3\)"),
    "ids rank": (ROWS_OF_SEGMENTS, S((8,), S32), SUMS, 0, "ids has rank 1, expected 2"),
    "shared data": (
        S((2, 8, 3), F32),
        S((4, 8, 1), S32),
        S((2, 5, 3), F32),
        1,
        r"ids has shape \(4, 8, 1\), which does",
    ),
    "shared out": (S((1, 8, 3), F32), S((4, 8, 1), S32), S((1, 5, 3), F32), 1, r"out .* expected \(4, 5, 3\)"),
}


@pytest.mark.parametrize("target", SEGMENTS)
@pytest.mark.parametrize("data, ids, out, axis, message", WRONG_SEGMENTS.values(), ids=WRONG_SEGMENTS)
def test_segments_refuse(target, data, ids, out, axis, message):
    with refuses(target, message):
        call(target, [out], data, ids, axis=axis, sorted=False)


ROWS_SEARCHED, FOUND = S((4, 7), F32), S((4, 3), S32)
WRONG_SEARCHES = {
    "axis": (S((4, 3), F32), ROWS_SEARCHED, FOUND, 2, "axis 2 is not an axis of queries, which has rank 2"),
    "dtype": (S((4, 3), jnp.complex64), ROWS_SEARCHED, FOUND, 1, "queries has an element type without an order: C64"),
    "sorted dtype": (S((4, 3), S32), ROWS_SEARCHED, FOUND, 1, "sorted has element type F32, expected S32"),
    "sorted rank": (S((4, 3), F32), S((7,), F32), FOUND, 1, "sorted has rank 1, expected 2"),
    "sorted shape": (S((4, 3), F32), S((3, 7), F32), FOUND, 1, r"sorted has shape \(3, 7\), which does not broadcast"),
    "places dtype": (S((4, 3), F32), ROWS_SEARCHED, S((4, 3), F32), 1, "places has element type F32, expected S32"),
    "places shape": (S((4, 3), F32), ROWS_SEARCHED, S((4, 7), S32), 1, r"places has shape \(4, 7\), expected \(4, 3\)"),
}


@pytest.mark.parametrize("queries, rows, places, axis, message", WRONG_SEARCHES.values(), ids=WRONG_SEARCHES)
def test_searchsorted_refuses(queries, rows, places, axis, message):
    with refuses("searchsorted", message):
        call("searchsorted", [places], queries, rows, axis=axis, right=False)


MASK, FILL = S((4, 7), jnp.bool_), S((1, 1), S32)
WRONG_CHOICES = {
    "axis": (MASK, FILL, FOUND, 2, "axis 2 is not an axis of x, which has rank 2"),
    "dtype": (S((4, 7), jnp.int8), FILL, FOUND, 1, "x has element type S8, expected PRED"),
    "columns": (MASK, FILL, S((3, 7), S32), 0, "x has dimensions after axis 0"),
    "fill dtype": (MASK, S((1, 1), F32), FOUND, 1, "fill has element type F32, expected S32"),
    "fill rank": (MASK, S((1,), S32), FOUND, 1, "fill has rank 1, expected 2"),
    "fill shape": (MASK, S((3, 1), S32), FOUND, 1, r"fill has shape \(3, 1\), which does not broadcast"),
    "places dtype": (MASK, FILL, S((4, 3), F32), 1, "places has element type F32, expected S32"),
    "places rank": (MASK, FILL, S((4,), S32), 1, "places has rank 1, expected 2"),
    "places shape": (MASK, FILL, S((3, 3), S32), 1, r"places has shape \(3, 3\), expected \(4, 3\)"),
}


@pytest.mark.parametrize("mask, fill, places, axis, message", WRONG_CHOICES.values(), ids=WRONG_CHOICES)
def test_choose_refuses(mask, fill, places, axis, message):
    with refuses("choose", message):
        call("choose", [places], mask, fill, axis=axis)


ARRAY, PICKED, PICKED_FILL = S((4, 7), F32), S((4, 3), F32), S((4, 1), F32)
WRONG_PICKS = {
    "operands": ([PICKED], (MASK, ARRAY), False, "there are 1 operands after x, expected 2 or 4"),
    "dtype": ([PICKED, FOUND], (S((4, 7), jnp.complex64), ARRAY, PICKED_FILL), True, "x has an element type without"),
    "mask": ([PICKED], (ARRAY, ARRAY, PICKED_FILL), False, "x has element type F32, expected PRED"),
    "array": ([PICKED], (MASK, S((4, 6), F32), PICKED_FILL), False, r"array has shape \(4, 6\), expected \(4, 7\)"),
    "fill": (
        [PICKED],
        (MASK, ARRAY, S((4, 0), F32)),
        False,
        "fill has 0 elements along axis 1, expected 1 or as many as x",
    ),
    "fill dtype": ([PICKED], (MASK, ARRAY, S((4, 1), S32)), False, "fill has element type S32, expected F32"),
    "fill shape": ([PICKED], (MASK, ARRAY, S((3, 1), F32)), False, r"fill has shape \(3, 1\), which does not"),
    "result": ([FOUND], (MASK, ARRAY, PICKED_FILL), False, "result has element type S32, expected F32"),
    "result shape": (
        [S((3, 3), F32)],
        (MASK, ARRAY, PICKED_FILL),
        False,
        r"result has shape \(3, 3\), expected \(4, 3\)",
    ),
    "counts": ([PICKED, S((4, 4), S32)], (ARRAY, ARRAY, PICKED_FILL), True, r"counts has shape \(4, 4\), expected"),
}


@pytest.mark.parametrize("results, operands, starts, message", WRONG_PICKS.values(), ids=WRONG_PICKS)
def test_pick_refuses(results, operands, starts, message):
    with refuses("pick", message):
        call("pick", results, *operands, axis=1, starts=starts)


WRONG_UNIQUES = {
    "axis": ([PICKED, FOUND], (ARRAY,), 2, False, "axis 2 is not an axis of x, which has rank 2"),
    "inner": ([PICKED, FOUND], (ARRAY,), 0, False, "x has dimensions after axis 0"),
    "dtype": ([PICKED, FOUND], (S((4, 7), jnp.complex64),), 1, False, "x has an element type without an order: C64"),
    "result": ([FOUND, FOUND], (ARRAY,), 1, False, "result has element type S32, expected F32"),
    "result shape": ([S((3, 3), F32), FOUND], (ARRAY,), 1, False, r"result has shape \(3, 3\), expected \(4, 3\)"),
    "index": ([PICKED, PICKED, FOUND], (ARRAY,), 1, True, "index has element type F32, expected S32"),
    "counts": ([PICKED, S((4, 4), S32)], (ARRAY,), 1, False, r"counts has shape \(4, 4\), expected \(4, 3\)"),
    "fill": ([PICKED, FOUND], (ARRAY, S((4, 1), S32)), 1, False, "fill has element type S32, expected F32"),
    "fill shape": ([PICKED, FOUND], (ARRAY, S((3, 1), F32)), 1, False, r"fill has shape \(3, 1\), which does not"),
    "nothing": ([PICKED, FOUND], (S((4, 0), F32),), 1, False, "x has no elements and there is no fill"),
}


@pytest.mark.parametrize("results, operands, axis, index, message", WRONG_UNIQUES.values(), ids=WRONG_UNIQUES)
def test_unique_refuses(results, operands, axis, index, message):
    with refuses("unique", message):
        call("unique", results, *operands, axis=axis, index=index, inverse=False)


RANKS, CHOSEN, CHOSEN_AT = S((1, 3), S32), S((4, 3), F32), S((4, 3), S32)
WRONG_SELECTIONS = {
    "axis": (ROWS_SEARCHED, RANKS, CHOSEN, CHOSEN_AT, 2, "axis 2 is not an axis of x, which has rank 2"),
    "dtype": (S((4, 7), jnp.complex64), RANKS, CHOSEN, CHOSEN_AT, 1, "x has an element type without an order: C64"),
    "ranks dtype": (ROWS_SEARCHED, S((1, 3), F32), CHOSEN, CHOSEN_AT, 1, "ranks has element type F32, expected S32"),
    "ranks rank": (ROWS_SEARCHED, S((3,), S32), CHOSEN, CHOSEN_AT, 1, "ranks has rank 1, expected 2"),
    "ranks shape": (ROWS_SEARCHED, S((3, 3), S32), CHOSEN, CHOSEN_AT, 1, r"ranks has shape \(3, 3\), which does not"),
    "values dtype": (ROWS_SEARCHED, RANKS, CHOSEN_AT, CHOSEN_AT, 1, "values has element type S32, expected F32"),
    "values shape": (
        ROWS_SEARCHED,
        RANKS,
        S((4, 7), F32),
        CHOSEN_AT,
        1,
        r"values has shape \(4, 7\), expected \(4, 3\)",
    ),
    "indices dtype": (ROWS_SEARCHED, RANKS, CHOSEN, CHOSEN, 1, "indices has element type F32, expected S32"),
    "no elements": (S((4, 0), F32), RANKS, CHOSEN, CHOSEN_AT, 1, "x has no elements along axis 1"),
}


@pytest.mark.parametrize("x, ranks, values, indices, axis, message", WRONG_SELECTIONS.values(), ids=WRONG_SELECTIONS)
def test_select_refuses(x, ranks, values, indices, axis, message):
    with refuses("select", message):
        call("select", [values, indices], x, ranks, axis=axis)


SHARES, BETWEEN = S((1, 1), F32), S((4, 1), F32)
WRONG_QUANTILES = {
    "dtype": (S((4, 7), S32), RANKS, SHARES, BETWEEN, "x has element type S32, which is not supported here"),
    "bits": (
        S((4, 7), jnp.float8_e5m2),
        RANKS,
        SHARES,
        BETWEEN,
        "x has element type F8E5M2, which is not supported here",
    ),
    "ranks": (
        ROWS_SEARCHED,
        S((1, 4), S32),
        SHARES,
        BETWEEN,
        "ranks has 4 along axis 1, expected one or two for each of 1",
    ),
    "shares dtype": (ROWS_SEARCHED, RANKS, RANKS, BETWEEN, "shares has element type S32, expected F32"),
    "shares of float64": (S((4, 7), jnp.float64), RANKS, SHARES, BETWEEN, "shares has element type F32, expected F64"),
    "shares shape": (ROWS_SEARCHED, RANKS, S((3, 1), F32), BETWEEN, r"shares has shape \(3, 1\), which does not"),
    "out dtype": (ROWS_SEARCHED, RANKS, SHARES, S((4, 1), S32), "out has element type S32, expected F32"),
    "out shape": (ROWS_SEARCHED, RANKS, SHARES, CHOSEN, r"out has shape \(4, 3\), expected \(4, 1\)"),
}


@pytest.mark.parametrize("x, ranks, shares, out, message", WRONG_QUANTILES.values(), ids=WRONG_QUANTILES)
def test_quantile_refuses(x, ranks, shares, out, message):
    with jax.enable_x64(True), refuses("quantile", message):
        call("quantile", [out], x, ranks, shares, axis=1, midpoint=False, before=1)


def test_quantile_refuses_a_place_behind_the_axis():
    with refuses("quantile", "before must be between 0 and 1, got 2"):
        call("quantile", [BETWEEN], ROWS_SEARCHED, RANKS, SHARES, axis=1, midpoint=False, before=2)


WRONG_COUNTS = {
    "axis": (PLACES, S((4, 5), S32), 2, "axis 2 is not an axis of x, which has rank 2"),
    "floats": (X, S((4, 5), S32), 1, "x has element type F32, expected integers"),
    "counts dtype": (PLACES, S((4, 5), F32), 1, "counts has element type F32, expected S32"),
    "counts shape": (PLACES, S((3, 5), S32), 1, r"counts has shape \(3, 5\), expected \(4, 5\)"),
}


@pytest.mark.parametrize("x, counts, axis, message", WRONG_COUNTS.values(), ids=WRONG_COUNTS)
def test_bincount_refuses(x, counts, axis, message):
    with refuses("bincount", message):
        call("bincount", [counts], x, axis=axis)


SEGMENT_SOFTMAX = ("segment_softmax", "segment_logsumexp")
COLUMN = S((4, 1), S32)
WRONG_SOFTMAX = {
    "axis": (X, COLUMN, S((4, 8), F32), 2, 4, "axis 2 is not an axis of data, which has rank 2"),
    "dtype": (S((4, 8), S32), COLUMN, S((4, 8), S32), 0, 4, "data has element type S32, which is not supported here"),
    "out dtype": (S((4, 8), jnp.float16), COLUMN, S((4, 8), F32), 0, 4, "out has element type F32, expected F16"),
    "ids dtype": (X, S((4, 1), jnp.uint8), S((4, 8), F32), 0, 4, "ids has element type U8, expected S32"),
    "shape": (
        X,
        COLUMN,
        S((5, 8), F32),
        0,
        4,
        r"out has (shape \(5, 8\), expected \(4, 8\)|5 along axis 0, expected 4)",
    ),
    "length": (X, COLUMN, S((4, 8), F32), 0, -1, "length is -1, expected 0 or more"),
}


@pytest.mark.parametrize("name", SEGMENT_SOFTMAX)
@pytest.mark.parametrize("data, ids, out, axis, length, message", WRONG_SOFTMAX.values(), ids=WRONG_SOFTMAX)
def test_segment_softmax_refuses(name, data, ids, out, axis, length, message):
    with refuses(name, message):
        call(name, [out], data, ids, axis=axis, length=length, sorted=False)


WRONG_HISTOGRAMS = {
    "axis": (X, S((4, 6), F32), S((4, 5), S32), 2, "axis 2 is not an axis of x, which has rank 2"),
    "integers": (PLACES, S((4, 6), S32), S((4, 5), S32), 1, "x has element type S32, which is not supported here"),
    "counts dtype": (X, S((4, 6), F32), S((4, 5), F32), 1, "counts has element type F32, expected S32"),
    "counts shape": (X, S((4, 6), F32), S((3, 5), S32), 1, r"counts has shape \(3, 5\), expected \(4, 5\)"),
    "edges dtype": (X, S((4, 6), jnp.float16), S((4, 5), S32), 1, "edges has element type F16, expected F32"),
    "edges": (X, S((4, 5), F32), S((4, 5), S32), 1, r"edges has shape \(4, 5\): it must have 6 along axis 1"),
    "edges rows": (X, S((3, 6), F32), S((4, 5), S32), 1, r"edges has shape \(3, 6\), which does not broadcast"),
}


@pytest.mark.parametrize("x, edges, counts, axis, message", WRONG_HISTOGRAMS.values(), ids=WRONG_HISTOGRAMS)
def test_histogram_refuses(x, edges, counts, axis, message):
    with refuses("histogram", message):
        call("histogram", [counts], x, edges, axis=axis)


EXPERTS, ROWS_OF_EXPERTS = S((2, 6), S32), S((2, 8), S32)
PLANS = [ROWS_OF_EXPERTS, EXPERTS, S((2, 3), S32), S((2, 4), S32)]
WRONG_PLANS = {
    "axis": (EXPERTS, PLANS, {"axis": 2}, "axis 2 is not an axis of experts, which has rank 2"),
    "not last": (S((2, 6, 1), S32), PLANS, {"axis": 0}, "experts has shape .*: axis 0 must be the last"),
    "experts dtype": (S((2, 6), F32), PLANS, {}, "experts has element type F32, expected S32"),
    "rows dtype": (EXPERTS, [S((2, 8), F32), *PLANS[1:]], {}, "assignment_of_row has element type F32"),
    "inverse": (EXPERTS, [PLANS[0], S((2, 5), S32), *PLANS[2:]], {}, r"row_of_assignment has shape \(2, 5\), expected"),
    "offsets": (EXPERTS, [*PLANS[:3], S((2, 3), S32)], {}, r"group_offsets has shape \(2, 3\), expected \(2, 4\)"),
    "room": (EXPERTS, [S((2, 5), S32), *PLANS[1:]], {}, "assignment_of_row has 5 rows, expected 6 or more"),
    "align": (EXPERTS, PLANS, {"align": 0}, "align is 0, expected 1 or more"),
}


@pytest.mark.parametrize("experts, results, flags, message", WRONG_PLANS.values(), ids=WRONG_PLANS)
def test_moe_plan_refuses(experts, results, flags, message):
    with refuses("moe_plan", message):
        call("moe_plan", results, experts, **{"axis": 1, "capacity": -1, "align": 1} | flags)


TOKENS, MOVED = S((3, 5), F32), S((8, 5), F32)  # 3 tokens with 2 choices, 8 rows
ROW_INDICES, TOKEN_INDICES, SCALES = S((8, 1), S32), S((6, 1), S32), S((6, 1), F32)
MOVES = {  # target -> names of its result, its operand, the indices that it follows, and those of its transpose
    "moe_dispatch": (MOVED, TOKENS, ROW_INDICES, TOKEN_INDICES),
    "moe_combine": (TOKENS, MOVED, TOKEN_INDICES, ROW_INDICES),
}


@pytest.mark.parametrize("target", MOVES)
def test_moe_moves_refuse(target):
    out, x, index, other = MOVES[target]
    refused = functools.partial(refuses, target)
    call(target, [out], x, index, other, SCALES, axis=0, choices=2)
    with refused("axis 2 is not an axis of"):
        call(target, [out], x, index, other, axis=2, choices=2)
    with refused("choices is 0, expected 1 or more"):
        call(target, [out], x, index, other, axis=0, choices=0)
    with refused("(x|out) has element type S32"):
        call(target, [S(out.shape, S32)], S(x.shape, S32), index, other, axis=0, choices=2)
    with refused("(out|y) has element type F16, expected F32|y has element type F32, expected F16"):
        call(target, [S(out.shape, jnp.float16)], x, index, other, axis=0, choices=2)
    with refused("(out|y) has shape"):
        call(target, [S((out.shape[0], 4), F32)], x, index, other, axis=0, choices=2)
    with refused("(assignment_of_row|row_of_assignment) has element type F32, expected S32"):
        call(target, [out], x, S(index.shape, F32), other, axis=0, choices=2)
    with refused("(assignment_of_row|row_of_assignment) has shape"):
        call(target, [out], x, S((5, 1), S32), other, axis=0, choices=2)
    with refused("weights has element type F16, expected F32"):
        call(target, [out], x, index, other, S((6, 1), jnp.float16), axis=0, choices=2)
    with refused("weights has shape"):
        call(target, [out], x, index, other, S((4, 1), F32), axis=0, choices=2)
    with refused("there are 1 operands too many"):
        call(target, [out], x, index, other, SCALES, SCALES, axis=0, choices=2)


def test_moe_combine_vjp_refuses():
    operands, results = [MOVED, TOKENS, TOKEN_INDICES, ROW_INDICES, SCALES], [MOVED, SCALES]

    def refused(message, results=results, choices=2, axis=0, **changed):
        given = [changed.get(f"operand{i}", x) for i, x in enumerate(operands)]
        with refuses("moe_combine_vjp", message):
            call("moe_combine_vjp", results, *given, axis=axis, choices=choices)

    call("moe_combine_vjp", results, *operands, axis=0, choices=2)
    refused("axis 2 is not an axis of ct", axis=2)
    refused("choices is 0, expected 1 or more", choices=0)
    refused("ct has element type S32", operand1=S((3, 5), S32), operand0=S((8, 5), S32))
    refused("y has element type F16, expected F32", operand0=S((8, 5), jnp.float16))
    refused("y has shape", operand0=S((8, 4), F32))
    refused("row_of_assignment has shape", operand2=S((5, 1), S32))
    refused("assignment_of_row has element type F32, expected S32", operand3=S((8, 1), F32))
    refused("assignment_of_row has shape", operand3=S((7, 1), S32))
    refused("weights has element type F16, expected F32", operand4=S((6, 1), jnp.float16))
    refused(r"dy has shape \(7, 5\), expected \(8, 5\)", results=[S((7, 5), F32), SCALES])
    refused(r"dw has shape \(6, 5\), expected \(6, 1\)", results=[MOVED, S((6, 5), F32)])
