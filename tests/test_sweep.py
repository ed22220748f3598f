"""The sweep and the whole programs of the benchmarks: what they call right is right, and what they count."""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT))  # last: the installed jaxgpuops comes first
from benchmarks import problems, programs, report, sweep


@pytest.fixture(autouse=True)
def wide():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)  # what is right is measured in float64
    yield
    jax.config.update("jax_enable_x64", before)


def results_of(problem):
    """Operands, results, and the function that says whether results are right, compiled as in the sweep."""
    pool = jax.random.normal(jax.random.key(0), (1 << 13,))
    operands = jax.jit(problem.draw)(pool, 5)
    return operands, jax.tree.leaves(jax.jit(problem.ours)(*operands)), jax.jit(problem.right)


@pytest.mark.parametrize("family", problems.FAMILIES)
def test_random_problems(family):
    problem = problems.drawn(family, 7, 1, 1 << 11)
    operands, results, right = results_of(problem)
    assert right(operands, results)


WRONG = {
    "topk": problems.topk((3, 40), 1, "float32", k=5, data="ties"),
    "topk smallest": problems.topk((3, 40, 4), 1, "uint8", k=9, largest=False, sorted=False),
    "argmax": problems.arg((3, 40), 1, "bfloat16"),
    "argmin": problems.arg((3, 40), 1, "int32", op="argmin"),
    **{op: problems.rank((3, 40), 1, "float32", op=op, k=7) for op in ("kth_value", "partition", "median", "quantile")},
    **{op: problems.places((3, 40), 1, "int32", op=op, size=30) for op in ("searchsorted", "nonzero", "unique")},
    **{op: problems.scan((3, 40), 1, "float32", op=op) for op in ("cumsum", "cumprod", "cummax", "cumlogsumexp")},
    "cummin": problems.scan((3, 40, 2), 1, "int32", op="cummin", reverse=True),
    "linear_scan": problems.linear((3, 40), 1, "float32"),
    **{op: problems.softmax((3, 40), 1, "bfloat16", op=op) for op in ("softmax", "log_softmax", "logsumexp")},
    "cross-entropy": problems.ce((3, 40), 1, "float32"),
    "gate": problems.gate((5, 16), 1, "float32", k=4),
    **{op: problems.reduce((3, 40), 1, "float32", op=op) for op in ("sum", "mean", "max")},
    "bincount": problems.count((3, 40), 1, "int32", op="bincount", bins=9),
    **{op: problems.count((300, 4), 0, "float32", op=op, bins=9) for op in ("segment_sum", "segment_max")},
    "sort of segments": problems.ragged((3, 40), 1, "float32", count=5),
    "topk of lengths": problems.ragged((3, 40), 1, "int16", op="topk", k=5),
    "softmax of segments": problems.ragged((3, 40), 1, "float32", op="softmax", count=5),
    "moe_plan": problems.moe((30, 2), 0, "int32", experts=8, k=2),
    "moe rows": problems.moe((30, 4), 0, "float32", experts=8, k=2, op="rows"),
    **{f"gradient of {op}": problems.grad((3, 40), 1, "float32", op=op, k=3) for op in ("topk", "cummax", "softmax")},
}


@pytest.mark.parametrize("problem", WRONG.values(), ids=WRONG)
def test_wrong_results_are_seen(problem):
    """Makes one element of each result wrong, by a fiftieth of it or by 1."""
    operands, results, right = results_of(problem)
    assert right(operands, results)
    for i, result in enumerate(results):
        at = (-1,) * result.ndim
        step = 1 if jnp.issubdtype(result.dtype, jnp.integer) else 0.02 * (abs(result).max() + 1)
        changed = results[:i] + [result.at[at].add(jnp.asarray(step, result.dtype))] + results[i + 1 :]
        assert not right(operands, changed)


def test_a_derivative_of_products_is_held_to_its_roundings():
    """The error of an element is measured by its own size, not by that of the largest one."""
    operands, [result], right = results_of(problems.grad((3, 1000), 1, "float32", op="cumprod"))
    assert right(operands, [result])
    assert not right(operands, [result.at[-1, -1].multiply(1.001)])


def test_quantiles_between_subnormal_numbers_are_held_to_their_rounding():
    problem = problems.rank((1, 2), 1, "float16", op="median")
    steps = jnp.array([[-481, -196]], jnp.float16) * jnp.finfo("float16").smallest_subnormal
    assert problem.right((steps,), (problem.ours(steps),))
    assert not problem.right((steps,), (steps[:, 0],))


def test_values_are_of_every_distribution():
    pool = jax.random.normal(jax.random.key(0), (1 << 13,))
    for dtype in ("float32", "bfloat16", "uint8", "int64"):
        drawn = {}
        for data in set(problems.DATA):
            [x] = dataclasses.replace(problems.arg((4, 50), 1, dtype), data=data).draw(pool, 0)
            assert x.dtype == dtype
            drawn[data] = x
        assert (drawn["constant"] == drawn["constant"][0, 0]).all()
        assert (jnp.sort(drawn["rising"], 1) == drawn["rising"]).all()
        assert (jnp.sort(drawn["falling"], 1)[:, ::-1] == drawn["falling"]).all()
        assert len(jnp.unique(drawn["ties"])) < 40 < len(jnp.unique(drawn["normal"]))


def test_problems_are_the_same_for_the_same_seed():
    draw = lambda seed: [
        str(problems.drawn(family, seed, i, 1 << 20)) for family in problems.FAMILIES for i in range(20)
    ]
    assert draw(1) == draw(1) and len(set(draw(1)) | set(draw(2))) == 2 * len(set(draw(1)))


@pytest.mark.parametrize("dtype, others", [("float16", {"torch"}), ("int8", set()), ("float32", {"jax", "torch"})])
def test_sums_that_take_others_minutes_are_ours_alone(dtype, others):
    crowded, sparse = (problems.counting.count((n, 1), 0, dtype, bins=28) for n in (20_000_000, 400_000))
    assert {library for library in ("jax", "torch") if getattr(crowded, library)} == others
    assert sparse.jax and sparse.torch


def test_shapes_of_programs_are_calls():
    listed = problems.of_programs()
    assert {problem.family for problem in listed} == set(problems.FAMILIES)
    for problem in listed:
        for function in (problem.ours, problem.jax):
            jax.eval_shape(function, *problem.operands())


def test_check_reports_what_fails(monkeypatch, capsys, tmp_path):
    options = {
        "shapes": "random",
        "families": ["topk"],
        "seed": 0,
        "problems": 3,
        "only": "",
        "commit": "",
        "out": tmp_path,
    }
    monkeypatch.setitem(sweep.ELEMENTS, jax.default_backend(), 1 << 9)
    with pytest.raises(SystemExit, match="0"):
        sweep.run(**options, check=True, seconds=None)
    assert "3 of 3 problems are right" in capsys.readouterr().out
    made = problems.drawn
    monkeypatch.setattr(
        sweep, "drawn", lambda *args: dataclasses.replace(made(*args), right=lambda *args: jnp.bool(False))
    )
    with pytest.raises(SystemExit, match="1"):
        sweep.run(**options, check=True, seconds=None)
    assert "FAILED topk/0" in capsys.readouterr().out


def row(family, ours, floor=1.0, plan="rows", **others):
    about = {"call": family, "shape": [2, 3], "axis": 1, "dtype": "float32", "data": "normal", "errors": {}}
    return about | {"family": family, "us": {"jaxgpuops": ours, **others}, "floor": floor, "plan": [plan]}


def test_table_of_a_sweep():
    rows = [
        row("topk", 2.0, jax=8.0, torch=1.0),  # behind torch by more than a tenth and half a microsecond
        row("topk", 2.0, jax=1.5),  # behind JAX by less than half a microsecond
        row("arg", 30.0, jax=20.0, floor=5.0, plan=None),
        row("arg", 19.0, jax=76.0, floor=4.0),
    ]
    result = {"rows": rows, "versions": {}, "commit": "abc", "timing": "kernels", "device": "a GPU", "date": "today"}
    lines = report.table(result, report.SWEEP_COLUMNS.split(), "families").splitlines()
    assert lines[2:5] == [
        "| topk | 2 | 0 | 0 | 1 | 0 | 1.73 | 2 | 0 |",
        "| arg | 2 | 0 | 1 | 1 | 0 | 1.63 | 5.34 | 1 |",
        "| all | 4 | 0 | 1 | 2 | 0 | 1.68 | 3.27 | 1 |",
    ]
    worst = report.table(result, report.WORST_COLUMNS.split(), "worst").splitlines()[2:4]
    assert worst[0] == "| topk 2 × 3 float32, normal | **2** | 8 | 1 | 1 | rows |" and "plain JAX" in worst[1]


@pytest.mark.parametrize("make", programs.PROGRAMS, ids=lambda make: make.__name__)
def test_programs_have_the_same_results(make):
    with jax.enable_x64(False):
        programs.forms(make(jax.random.key(0), small=True))


def test_programs_with_other_results_are_refused():
    with jax.enable_x64(False):
        case = programs.returns(jax.random.key(0), small=True)
        wrong = dataclasses.replace(case, ours=lambda x: jax.tree.map(lambda y: 1.01 * y, case.plain(x)))
        with pytest.raises(AssertionError, match="returns, jaxgpuops: not the results of plain JAX"):
            programs.forms(wrong)
