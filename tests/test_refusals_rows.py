"""Wrong calls of the handlers of scans, softmax and reductions; refusals.py says what they must do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import F32, S32, S, X, call, refuses

# target -> names of its operands, results and attributes. The operands starts and h0 are optional and come last; the
# attribute axis comes first.
CUMULATIVE = ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"]
SCANS = {
    **{name: (["x"], ["y"], ["reverse", "exclusive"]) for name in CUMULATIVE},
    **{f"{name}_jvp": (["t", "x", "y"], ["out"], ["reverse", "exclusive", "transpose"]) for name in CUMULATIVE[1:]},
    "linear_scan": (["b", "a"], ["h"], ["reverse", "transpose", "initial"]),
    "linear_scan_vjp": (["g", "a", "h"], ["da", "db"], ["reverse", "initial"]),
}


def call_scan(target, operands=(), results=None, axis=1, x=X, **flags):
    """Operands and results by name: those that differ from x, and those that are optional."""
    names, result_names, attributes = SCANS[target]
    operands, results = dict(operands), dict(results or {})
    arguments = [operands.pop(name, x) for name in names] + list(operands.values())
    flags = {**dict.fromkeys(attributes, False), **flags}
    return call(target, [results.get(name, x) for name in result_names], *arguments, axis=axis, **flags)


@pytest.mark.parametrize("target", SCANS)
def test_scans_refuse(target):
    names, result_names, _ = SCANS[target]
    with refuses(target, "axis 2 is not an axis"):
        call_scan(target, axis=2)
    for name in result_names + names[1:]:
        where = "results" if name in result_names else "operands"
        with refuses(target, f"{name} has element type S32"):
            call_scan(target, **{where: {name: S((4, 8), S32)}})
        with refuses(target, f"{name} has shape \\(4, 7\\), (expected|which does not broadcast to) \\(4, 8\\)"):
            call_scan(target, **{where: {name: S((4, 7), F32)}})


@pytest.mark.parametrize("target", SCANS)
@pytest.mark.parametrize(
    "starts, message",
    {
        S((4, 8), jnp.uint8): "(starts|h0) has element type U8, expected (PRED|F32)",
        S((8,), bool): r"starts has shape \(8,\), which does not broadcast to \(4, 8\)",
        S((4, 1), bool): "starts has length 1 at the axis, expected 8",
    }.items(),
)
def test_scans_refuse_starts(target, starts, message):
    with refuses(target, message):
        call_scan(target, {"starts": starts})


@pytest.mark.parametrize("target", SCANS)
def test_scans_refuse_further_operands(target):
    with refuses(target, "there are 1 operands too many"):
        call_scan(target, {"starts": S((4, 8), bool), "another": X})


@pytest.mark.parametrize("target", ["linear_scan", "linear_scan_vjp"])
def test_linear_scans_refuse_h0(target):
    with refuses(target, "h0 is missing"):
        call_scan(target, initial=True)
    with refuses(target, r"h0 has shape \(4, 8\), expected \(4, 1\)"):
        call_scan(target, {"h0": X}, initial=True)
    with refuses(target, "h0 has element type F16, expected F32"):
        call_scan(target, {"h0": S((4, 1), jnp.float16)}, initial=True)


@pytest.mark.parametrize("target", CUMULATIVE)
def test_cumulative_scans_refuse_h0(target):
    """h0 is in the place of starts, from which its dtype, which is not bool, tells it apart. For sums of 16-bit floats
    it is float32."""
    extreme = target in ("cummax", "cummin")
    with refuses(target, r"h0 has shape \(4, 8\), expected \(4, 1\)"):
        call_scan(target, {"h0": X})
    with refuses(target, "h0 has element type F16, expected F32"):
        call_scan(target, {"h0": S((4, 1), jnp.float16)})
    short, expected = S((4, 8), jnp.float16), "F16" if extreme else "F32"
    with refuses(target, f"h0 has element type S32, expected {expected}"):
        call_scan(target, {"h0": S((4, 1), S32)}, x=short)
    if extreme:
        with refuses(target, "h0 has element type S8, expected U8"):
            call_scan(target, {"h0": S((4, 1), jnp.int8)}, x=S((4, 8), bool))
    with refuses(target, "there are 1 operands too many"):
        call_scan(target, {"h0": S((4, 1), F32), "starts": S((4, 8), bool), "another": X})


def test_linear_scan_refuses_h0_where_it_is_transposed():
    with refuses("linear_scan", "a transposed recurrence has no h0"):
        call_scan("linear_scan", {"h0": S((4, 1), F32)}, initial=True, transpose=True)


@pytest.mark.parametrize(
    "target, dtype",
    [
        ("cumsum", bool),
        ("cumlogsumexp", S32),
        ("cummax", jnp.complex64),
        ("cummin_jvp", jnp.complex64),
        ("linear_scan", bool),
        ("linear_scan", S32),
        ("linear_scan_vjp", jnp.float8_e5m2),
    ],
)
def test_scans_refuse_types(target, dtype):
    with refuses(target, ". has element type"):
        call_scan(target, x=S((4, 8), dtype))


@pytest.mark.parametrize("target", SCANS)
@pytest.mark.parametrize("shape, axis", [((0, 8), 1), ((4, 0), 1), ((4, 8, 0), 1), ((0,), 0)])
def test_scans_of_empty_arrays(target, shape, axis):
    x = S(shape, F32)
    assert call_scan(target, x=x, axis=axis)[0].shape == shape
    assert call_scan(target, {"starts": S(shape, bool)}, x=x, axis=axis)[0].shape == shape


# ---- Softmax and reductions -----------------------------------------------------------------------------------------

LOGITS = {"factor": 1.0, "scaled": False, "biased": False, "masked": False, "query_axis": -1}
LOSSES = {"label_smoothing": 0.0, "z_loss": 0.0, "masked": False}
LABELS, ROW, LOSS = S((4, 1), S32), S((4, 1), F32), S((4,), F32)
# target -> its operands by name, its results by name, and its attributes
ROWS = {
    "softmax": ({"x": X}, {"y": X}, LOGITS),
    "log_softmax": ({"x": X}, {"y": X}, LOGITS),
    "logsumexp": ({"x": X}, {"y": LOSS}, LOGITS | {"parts": False}),
    "softmax_jvp": ({"t": X, "y": X}, {"out": X}, {"factor": 1.0, "scaled": False, "of_logits": False}),
    "log_softmax_jvp": (
        {"t": X, "y": X},
        {"out": X},
        {
            "factor": 1.0,
            "scaled": False,
            "masked": False,
            "query_axis": -1,
            "transpose": False,
            "of_logits": False,
        },
    ),
    "cross_entropy": (
        {"logits": X, "labels": LABELS},
        {"loss": LOSS, "maximum": LOSS, "log_sum": LOSS},
        LOSSES,
    ),
    "cross_entropy_grad": (
        {"logits": X, "labels": LABELS, "cotangent": ROW},
        {"gradient": X, "loss": LOSS},
        LOSSES,
    ),
    "sum": ({"x": X}, {"out": LOSS}, {"masked": False, "divisor": 1}),
    "max": ({"x": X}, {"out": LOSS}, {"masked": False}),
    "min": ({"x": X}, {"out": LOSS}, {"masked": False}),
    "dot": ({"x": X, "y": X}, {"out": LOSS}, {"masked": False}),
}
OPTIONAL = {  # operand -> its flag, and its type
    "scale": ("scaled", ROW),
    "bias": ("biased", X),
    "where": ("masked", S((4, 8), bool)),
}


def call_rows(target, changed=(), more=(), **flags):
    """Calls a handler with the right operands and results, but for those that are given by name, and with further
    operands."""
    operands, results, attributes = ROWS[target]
    operands, results = ({k: dict(changed).get(k, v) for k, v in d.items()} for d in (operands, results))
    return call(target, list(results.values()), *operands.values(), *more, **{"axis": 1} | attributes | flags)


def where_of(target):
    """The mask of cross-entropy has one entry for each row."""
    return S((4, 1), bool) if target.startswith("cross") else S((4, 8), bool)


@pytest.mark.parametrize("target", ROWS)
def test_rows_refuse(target):
    operands, results, attributes = ROWS[target]
    refused = functools.partial(refuses, target)
    with refused("axis 2 is not an axis"):
        call_rows(target, axis=2)
    with refused("(x|t|logits) has (an )?element type"):
        call_rows(target, dict.fromkeys(operands, S((4, 8), jnp.complex64)))
    for name, right in [*list(operands.items())[1:], *results.items()]:
        with refused(f"{name} has element type U16, expected"):
            call_rows(target, {name: S(right.shape, jnp.uint16)})
        shape = (7, *right.shape[1:])
        with refused(rf"{name} has shape \(7(, \d)?,?\), (expected|which does not broadcast to) \(4"):
            call_rows(target, {name: S(shape, right.dtype)})
    with refused("there are 1 operands too many"):
        call_rows(target, more=[X])
    for name, (flag, right) in OPTIONAL.items():
        if flag not in attributes:
            continue
        right = where_of(target) if name == "where" else right
        with refused(f"{name} is missing"):
            call_rows(target, **{flag: True})
        with refused(f"{name} has element type U16, expected"):
            call_rows(target, more=[S(right.shape, jnp.uint16)], **{flag: True})
        with refused(rf"{name} has shape \(4, 7\), which does not broadcast to \(4, [18]\)"):
            call_rows(target, more=[S((4, 7), right.dtype)], **{flag: True})
        call_rows(target, more=[S((1, 1), right.dtype)], **{flag: True})
    if "query_axis" in attributes:
        with refused("query_axis 1 is not before axis 1"):
            call_rows(target, query_axis=1)
    if "of_logits" in attributes:
        with refused("of_logits is for (rows|GPUs)"):
            call_rows(target, of_logits=True, factor=2.0)


def test_parts_of_logsumexp_are_checked():
    refused = functools.partial(refuses, "logsumexp")
    flags = LOGITS | {"axis": 1, "parts": True}
    half = S((4, 8), jnp.bfloat16)
    call("logsumexp", [LOSS, LOSS], half, **flags)
    for results, message in [
        ([LOSS], "log_sum" if jax.default_backend() == "cpu" else "log_sum has element type U8"),
        ([S((4,), jnp.bfloat16), LOSS], "maximum has element type BF16, expected F32"),
        ([LOSS, S((3,), F32)], r"log_sum has shape \(3,\), expected \(4,\)"),
    ]:
        with refused(message):
            call("logsumexp", results, half, **flags)


def test_gradients_of_logsumexp_refuse():
    """Python calls this handler on GPUs only."""
    refused = functools.partial(refuses, "logsumexp_grad")
    grad = functools.partial(call, "logsumexp_grad")
    if jax.default_backend() == "cpu":
        with refused("it is for GPUs"):
            grad([X], X, ROW, axis=1)
        return
    grad([X], X, ROW, axis=1)
    with refused("axis 2 is not an axis"):
        grad([X], X, ROW, axis=2)
    with refused("cotangent has element type BF16, expected F32"):
        grad([X], X, S((4, 1), jnp.bfloat16), axis=1)
    with refused(r"cotangent has shape \(3, 1\), which does not broadcast to \(4, 1\)"):
        grad([X], X, S((3, 1), F32), axis=1)
    with refused(r"out has shape \(4, 7\), expected \(4, 8\)"):
        grad([S((4, 7), F32)], X, ROW, axis=1)


@pytest.mark.parametrize("target", ROWS)
@pytest.mark.parametrize("shape, axis", [((0, 8), 1), ((4, 0), 1), ((4, 8, 0), 1), ((0,), 0)])
def test_rows_of_empty_arrays(target, shape, axis):
    operands, results, _ = ROWS[target]
    without, one = (*shape[:axis], *shape[axis + 1 :]), (*shape[:axis], 1, *shape[axis + 1 :])
    shapes = {X.shape: shape, LABELS.shape: one, LOSS.shape: without}
    changed = {name: S(shapes[a.shape], a.dtype) for name, a in (operands | results).items()}
    if target in ("max", "min") and shape[axis] == 0:
        with refuses(target, "x has length 0 at the axis"):
            call_rows(target, changed, axis=axis)
        return
    outs = call_rows(target, changed, axis=axis)
    assert [out.shape for out in outs[: len(results)]] == [changed[name].shape for name in results]
    if target in ("sum", "dot"):
        assert not outs[0].any()
    if target == "logsumexp":
        assert np.all(np.asarray(outs[0]) == -np.inf)
