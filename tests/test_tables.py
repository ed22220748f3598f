"""Every op is in every table: what a new one is easily left out of. docs/adding-an-op.md lists these places."""

import pathlib
import re

import pytest
import test_native

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
    """Checks that tests/test_native.py calls each handler with arguments that it refuses."""
    tables = test_native.SEGMENTS, test_native.ALONG_AXIS, test_native.SCANS, test_native.ROWS
    others = {"topk", "argmax", "topk_softmax", "sort", "bincount", "histogram", "searchsorted", "select"}
    assert others.union(test_native.MOE, test_native.SEGMENT_SOFTMAX, *tables) == TARGETS


@pytest.mark.parametrize("module", ["_cpu", "_cuda"])
def test_sources_are_compiled(module):
    lists = (ROOT / "CMakeLists.txt").read_text()
    listed = set(re.search(rf"jaxgpuops_add_module\({module}\n(.*?)\)", lists, re.DOTALL)[1].split())
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ffi_src").rglob("*.c[cu]")}
    other = "cuda" if module == "_cpu" else "cpu"
    assert listed == {path for path in there if other not in path}


def test_functions_are_documented():
    page = (ROOT / "docs" / "functions.md").read_text()
    functions = {*dir(jaxgpuops), *dir(jaxgpuops.lax)} - NO_OPS
    assert not {name for name in functions if not re.search(rf"\b{name}\b", page)}
    for module in (jaxgpuops, jaxgpuops.lax):
        assert all(">>> " in getattr(module, name).__doc__ for name in {*dir(module)} - NO_OPS)
