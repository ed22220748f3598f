"""The compiled modules: the facts that they report, the guard at import, and raw calls of handlers: empty arrays, a
missing attribute, several at once."""

import ast
import concurrent.futures
import pathlib
import re
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from refusals import F32, S32, S, X, call

from jaxgpuops import _native


@pytest.mark.parametrize(
    "shape, axis", [((4, 100), 1), ((4, 3000), 1), ((1, 100_000), 1), ((3, 9000, 20), 1), ((2, 9000, 3), 1)]
)
def test_a_row_has_the_same_bits_in_a_batch(shape, axis):
    """Rows have the same bits however many there are, and so however threads share them."""
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    if jax.default_backend() != "cpu":
        pytest.skip("test_gpu_scan.py has this for the kernels")
    for target in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
        outs = []
        for batch in (x[:1], x, np.tile(x, (16, 1, 1)[: x.ndim])):
            run = jax.ffi.ffi_call(f"jaxgpuops.{target}", [S(batch.shape, F32)])
            outs.append(np.asarray(run(batch, axis=np.int64(axis), reverse=False, exclusive=False)[0]))
        np.testing.assert_array_equal(outs[0], outs[1][:1])
        np.testing.assert_array_equal(outs[2], np.tile(outs[1], (16, 1, 1)[: x.ndim]))


def test_an_attribute_is_missing():
    with pytest.raises(jax.errors.JaxRuntimeError, match="axis, largest"):
        call("topk", [S((4, 2), F32), S((4, 2), S32)], X, axis=1, largest=True)


@pytest.mark.parametrize("shape, axis", [((0, 8), 1), ((4, 0), 1), ((4, 8, 0), 1), ((0,), 0)])
def test_empty_arrays(shape, axis):
    k = min(2, shape[axis])
    out = S((*shape[:axis], k, *shape[axis + 1 :]), F32)
    indices = S(out.shape, S32)
    values, _ = call("topk", [out, indices], S(shape, F32), axis=axis, largest=True, sorted=True)[:2]
    assert values.shape == out.shape
    assert call("take_along_axis", [out], S(shape, F32), indices, axis=axis)[0].shape == out.shape
    assert not call("put_along_axis", [S(shape, F32)], out, indices, axis=axis)[0].any()


def test_calls_at_once():
    """Handlers share a thread pool that they may themselves run on: none may wait for a task that none can start."""

    @jax.jit
    def several(x):
        runs = [
            jax.ffi.ffi_call("jaxgpuops.topk", [S((64, 8), F32), S((64, 8), S32)])(
                x + i, axis=np.int64(1), largest=True, sorted=True
            )
            for i in range(8)
        ]
        return [values for values, _ in runs]

    if jax.default_backend() != "cpu":
        pytest.skip("only CPU handlers use a thread pool")
    x = np.random.default_rng(0).standard_normal((64, 5000), dtype=np.float32)
    expected = -np.sort(-x, axis=1)[:, :8]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for values in pool.map(several, [x] * 24, timeout=120):
            np.testing.assert_allclose([v - i for i, v in enumerate(values)], [expected] * 8, atol=1e-5)


def test_the_modules_describe_themselves():
    cpu, cuda = _native.modules["cpu"], _native.modules["cuda"]
    info = cpu.build_info()
    assert info["ffi_api_version"] == cpu.ffi_api_version() <= _native.running_ffi_api()
    assert info["compiler"]
    assert info["cuda"] == (cuda is not None)
    if cuda:
        assert cuda.targets().keys() == cpu.targets().keys()
        assert cuda.build_info() == info
        assert info["cuda_version"] and info["cuda_architectures"] and not info["cuda_reason"]
    else:
        assert info["cuda_reason"]


def test_stubs_say_what_the_modules_have():
    for name, module in _native.modules.items():
        if module is None:
            continue
        stub = ast.parse((pathlib.Path(_native.__file__).parent / f"_{name}.pyi").read_text())
        said = {f.name: [arg.arg for arg in f.args.args] for f in stub.body if isinstance(f, ast.FunctionDef)}
        there = {
            function: re.findall(r"(\w+): ", getattr(module, function).__nb_signature__[0][0].partition("(")[2])
            for function in dir(module)
            if not function.startswith("__")
        }
        assert said == there


def test_newer_headers_are_refused_before_registration():
    program = """
        import sys, types
        import jax

        fake = types.ModuleType("jaxgpuops._cpu")
        fake.ffi_api_version = lambda: (0, 99)
        fake.build_info = lambda: {"cuda_reason": ""}
        fake.targets = lambda: sys.exit("targets were asked for")
        sys.modules["jaxgpuops._cpu"] = fake
        try:
            import jaxgpuops
        except ImportError as error:
            print(error)
        assert jax.numpy.arange(3).sum() == 3  # JAX itself is unharmed
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    running = ".".join(map(str, _native.running_ffi_api()))
    for part in ("0.99", running, jax.lib.__version__, "pip install"):
        assert part in done.stdout


def test_the_package_can_be_loaded_again():
    program = """
        import importlib, sys
        import jax, numpy as np
        import jaxgpuops

        def results(package):
            x = np.float32([[3, 1, 2], [0, 5, 4]])
            gradient = jax.grad(lambda x: package.softmax(x)[0, 0])(x)
            return [np.asarray(y).tolist() for y in (*package.topk(x, 2), package.cumsum(x), gradient)]

        expected = results(jaxgpuops)
        assert results(importlib.reload(jaxgpuops)) == expected
        for name in [name for name in sys.modules if name.split(".")[0] == "jaxgpuops"]:
            del sys.modules[name]
        again = importlib.import_module("jaxgpuops")
        assert again is not jaxgpuops and results(again) == results(jaxgpuops) == expected
        with again.install("top_k"), jaxgpuops.install("top_k"):
            assert jax.lax.top_k(np.arange(4), 1)[1].tolist() == [3]
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
