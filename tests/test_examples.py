"""The demo, the examples, the code in the documentation and the benchmarks run, and hold what they assert."""

import dataclasses
import pathlib
import re
import runpy
import sys

import jax
import numpy as np
import pytest

from jaxgpuops import _demo

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT))  # last: the installed jaxgpuops comes first
from benchmarks import report, runner, topk


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
    exec(code, names)  # noqa: S102
    x = names["x"]
    expected = np.asarray(jax.lax.top_k(x, 50)[1])
    np.testing.assert_array_equal(names["indices"], expected)
    np.testing.assert_array_equal(names["rows"], expected)
    np.testing.assert_array_equal(np.sort(expected), names["some_order"].indices)
    assert names["smallest"].values.shape == (3, x.shape[1])
    assert names["gradient"].sum() == 50 * len(x)
    np.testing.assert_array_equal(names["best"], expected[:, 0])


def test_benchmark_times_right_results_only():
    case = topk.topk_case((8, 64), 1, "float32", 4)
    row = runner.measure(case, ["jaxgpuops", "jax"])
    assert not row["errors"] and min(row["us"].values()) > 0 and {"jaxgpuops", "jax"} <= set(row["us"])
    wrong = dataclasses.replace(case, functions=case.functions | {"jax": lambda x: (x[:, :4],)})
    row = runner.measure(wrong, ["jaxgpuops", "jax"])
    assert "jax" not in row["us"] and "not that of jaxgpuops" in row["errors"]["jax"]


def test_benchmark_tables_are_those_of_the_results():
    report.fill_tables(check=True)
