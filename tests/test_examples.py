"""The demo, the examples, the code in the documentation and the benchmarks run, and hold what they assert."""

import dataclasses
import doctest
import json
import pathlib
import re
import runpy
import shutil
import sys

import jax
import numpy as np
import pytest

from jaxgpuops import _demo

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT))  # last: the installed jaxgpuops comes first
from benchmarks import count, moe, report, runner, scan, sharded, softmax, sort, timing, topk


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_digits_are_classified_as_by_jax_lax(capsys):
    _demo.classify_digits()  # raises if one prediction differs
    out = capsys.readouterr().out
    right = [float(percent) for percent in re.findall(r"([\d.]+)%", out)]
    assert len(right) == 2 and min(right) > 97


def test_demo_times_this_device(monkeypatch, capsys):
    monkeypatch.setattr(_demo, "milliseconds", lambda fn, *args: float(np.asarray(fn(*args)[1]).min()))
    _demo.time_topk()
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_readme_example():
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    names = {}
    exec(code, names)
    x = names["x"]
    expected = np.asarray(jax.lax.top_k(x, 50)[1])
    np.testing.assert_array_equal(names["indices"], expected)
    np.testing.assert_array_equal(names["rows"], expected)
    np.testing.assert_array_equal(np.sort(expected), names["some_order"].indices)
    assert names["smallest"].values.shape == (3, x.shape[1])
    assert names["gradient"].sum() == 50 * len(x)
    np.testing.assert_array_equal(names["best"], np.asarray(jax.lax.top_k(x, 5)[0]))
    exact = np.cumsum(np.asarray(x, np.float64), 1)
    np.testing.assert_allclose(names["sums"], exact, atol=1e-2)
    np.testing.assert_allclose(names["totals"][0], np.asarray(x, np.float64).sum(0), atol=1e-4)
    np.testing.assert_allclose(names["states"][:, 1:], 0.9 * names["states"][:, :-1] + x[:, 1:], atol=1e-5)


def test_tutorial():
    results = doctest.testfile(str(ROOT / "docs" / "tutorial.md"), module_relative=False)
    assert results.attempted and not results.failed


@pytest.fixture
def hasty(monkeypatch):
    """Times are there, and nobody looks at them."""
    monkeypatch.setattr(timing, "SECONDS", 0)


@pytest.mark.usefixtures("hasty")
def test_benchmark_times_right_results_only():
    case = topk.topk_case((8, 64), 1, "float32", 4)
    row = runner.measure(case, ["jaxgpuops", "jax"])
    assert not row["errors"] and min(row["us"].values()) > 0 and {"jaxgpuops", "jax"} <= set(row["us"])
    wrong = dataclasses.replace(case, functions=case.functions | {"jax": lambda x: (x[:, :4],)})
    row = runner.measure(wrong, ["jaxgpuops", "jax"])
    assert "jax" not in row["us"] and "not that of jaxgpuops" in row["errors"]["jax"]


def assert_wrong_results_are_seen(case):
    functions = case.functions | {"jax": lambda *args: (case.functions["jax"](*args)[0] + 1,)}
    row = runner.measure(dataclasses.replace(case, functions=functions), ["jaxgpuops", "jax"])
    assert "not that of jaxgpuops" in row["errors"]["jax"]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "case",
    [
        scan.case("cumsum", (8, 64), 1, "float32"),
        scan.case("cummin", (8, 64), 1, "bfloat16"),
        scan.case("linear_scan", (2, 64, 8), 1, "float32"),
        *(scan.gradient_case(name, (8, 64), 1, "float32") for name in [*scan.NUMPY, "linear_scan"] if name != "cummin"),
    ],
    ids=lambda case: case.name,
)
def test_benchmark_of_scans(case):
    peers = set(case.functions) & {"jaxgpuops", "jax", "loop", "numpy"}
    if jax.default_backend() != "cpu":
        peers -= {"loop", "numpy"}
    row = runner.measure(case, sorted(peers, key=list(case.functions).index))
    assert not row["errors"] and peers <= set(row["us"])
    assert_wrong_results_are_seen(case)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "case",
    [
        softmax.softmax_case((8, 64), 0, "float32"),
        softmax.gradient_case((8, 64), 1, "bfloat16"),
        softmax.logsumexp_case((8, 64), 1, "float32"),
        softmax.cross_entropy_case((8, 64), "bfloat16"),
        softmax.cross_entropy_gradient_case((8, 64), "float32"),
        softmax.gate_case((8, 64), "float32", 4),
        *(softmax.reduction_case(name, (8, 64), 1, "float32") for name in ("sum", "max", "dot")),
    ],
    ids=lambda case: case.name,
)
def test_benchmark_of_softmax(case):
    row = runner.measure(case, ["jaxgpuops", "jax"])
    assert not row["errors"] and {"jaxgpuops", "jax"} <= set(row["us"])
    assert_wrong_results_are_seen(case)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "case",
    [
        sort.sort_case((8, 64), 0, "float32"),
        sort.argsort_case((8, 64), 1, "int32"),
        sort.key_val_case((8, 64), 1, "float32"),
        sort.two_keys_case(3000),
        sort.segments_case(3000, 40),
        count.bincount_case(3000, 9),
        count.weighted_case(3000, 9),
        count.histogram_case(3000, 9),
        *(
            count.segments_case(f"segment_{op}", 300, 4, 9, "float32", op == "sum")
            for op in ("sum", "max", "softmax", "logsumexp")
        ),
        count.take_case(300, 4, 9, "bfloat16"),
        *moe.cases_of(40, 2, 6, 32),
    ],
    ids=lambda case: case.name.partition(" (")[0],
)
def test_benchmark_of_sorts_counts_and_experts(case):
    peers = {"jaxgpuops", "jax", "rewritten", "numpy"} & set(case.functions)
    if jax.default_backend() != "cpu":
        peers -= {"numpy"}
    row = runner.measure(case, [name for name in case.functions if name in peers])
    assert not row["errors"] and peers <= set(row["us"])
    assert_wrong_results_are_seen(case)
    for hostile in case.hostile.values():
        args = case.inputs(jax.random.key(0))
        assert [x.shape for x in hostile(*args)] == [x.shape for x in args]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="sizes are those of several GPUs")
def test_benchmark_of_sharded_arrays(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "_median_of_more", lambda measure, agree: measure(agree(1)))
    sharded.run(out=tmp_path)
    [result] = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert result["devices"] == len(jax.devices()) and len(result["rows"]) == len(sharded.PROGRAMS)
    assert all(0 < row["moved"]["jaxgpuops"] <= row["moved"]["jax"] for row in result["rows"])
    assert "MORE" not in capsys.readouterr().out


def test_benchmark_grids():
    for platform in ("cpu", "gpu"):
        for family in (topk, scan, softmax, sort, count, moe):
            cases = family.cases(platform)
            names = [case.name for case in cases]
            assert len(set(names)) == len(names)
            assert all({"jaxgpuops", "jax"} <= set(case.functions) for case in cases)
        for family in (scan, softmax):
            assert {case.name for case in family.cases(platform)} >= family.HEADLINES or platform == "cpu"


def test_tables_and_plots_are_those_of_the_results():
    report.fill_tables(check=True)


def test_results_that_are_not_in_the_plot(monkeypatch, tmp_path):
    for path in report.RESULTS.iterdir():
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert not report.stale_plots()
    for family in ("topk", "scan", "softmax"):
        path = tmp_path / f"nvidia-h200-{family}.json"
        before = path.read_text()
        path.write_text(json.dumps(json.loads(before) | {"commit": "measured later"}))
        with pytest.raises(SystemExit, match=r"nvidia-h200\.svg.* plot"):
            report.fill_tables(check=True)
        path.write_text(before)
