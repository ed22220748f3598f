"""Every op is in every table. A new op is easily left out of one; docs/adding-an-op.md lists the tables."""

import pathlib
import re

import test_refusals_rows

import jaxgpuops
from jaxgpuops import _native, _primitive

ROOT = pathlib.Path(__file__).parents[1]
TARGETS = {target.removeprefix("jaxgpuops.") for target in _native.targets("cpu")}
TUPLES = {"MoEExchange", "MoELosses", "MoEPlan", "RaggedSizes", "TopK", "TopKSoftmax"}
NO_OPS = TUPLES | {"__version__", "lax", "install", "uninstall", "explain", "export_checks"}


def test_targets_are_kernels_of_both_backends():
    assert _primitive.KERNELS.keys() >= TARGETS
    without = {name for name, kernel in _primitive.KERNELS.items() if kernel.accepts is None}
    assert _primitive.KERNELS.keys() - without == TARGETS
    if _native.modules["cuda"]:
        assert _native.targets("cuda") == _native.targets("cpu")


def test_handlers_are_called_wrongly():
    """Checks that tests/test_refusals*.py name each target, which they call with arguments that it refuses."""
    files = "\n".join(path.read_text() for path in (ROOT / "tests").glob("test_refusals*.py"))
    assert {*re.findall(r'"(\w+)"', files), *test_refusals_rows.SCANS} >= TARGETS


def test_files_of_a_new_family():
    """Checks that docs/adding-an-op.md names at most 20 files that every family has, that those of an own folder are
    what the folders there have, and that the files for all families are there.
    """
    page = (ROOT / "docs" / "adding-an-op.md").read_text()
    places = dict(re.findall(r"^\| `([^`]+)`(?: \*)? \|[^|]*\| ([^|]+) \|", page, re.MULTILINE))
    always = {place for place, needed_by in places.items() if needed_by == "any"}
    assert 15 < len(always) <= 20
    assert all((ROOT / place).exists() for place in places if "<" not in place)
    folder = {place.removeprefix("ffi_src/<family>/") for place in always if place.startswith("ffi_src/<family>/")}
    for call in (ROOT / "ffi_src").glob("*/call.h"):
        family = call.parent.name
        for file in folder - {"cuda/<algorithm>.cu"}:
            assert (call.parent / file.replace("<family>", family)).exists(), (family, file)
        assert any(call.parent.glob("cuda/*.cu"))


def test_functions_are_documented():
    page = (ROOT / "docs" / "functions.md").read_text()
    functions = {*dir(jaxgpuops), *dir(jaxgpuops.lax)} - NO_OPS
    assert not {name for name in functions if not re.search(rf"\b{name}\b", page)}
    for module in (jaxgpuops, jaxgpuops.lax):
        assert all(">>> " in getattr(module, name).__doc__ for name in {*dir(module)} - NO_OPS)
