"""Wheels, as a user builds and installs them: with pip and its build isolation, from the index pip is set up for."""

import os
import pathlib
import subprocess
import sys
import textwrap
import venv

ROOT = pathlib.Path(__file__).parent.parent


def run(*command, **environment):
    """Runs a command outside the source tree, whose `jaxgpuops` folder would be imported from inside it."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "JAXGPUOPS", "XLA"))}
    command = [str(part) for part in command]
    environment = kept | {"PIP_NO_COMPILE": "1"} | environment  # most of what is installed is never imported
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent, env=environment, check=False)


def build_wheel(folder, **environment):
    """Without optimisation, which is most of the time of a build and nothing to the packaging."""
    environment["SKBUILD_CMAKE_BUILD_TYPE"] = "None"
    return run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, ROOT, **environment)


def test_a_wheel_in_an_empty_environment(tmp_path):
    built = build_wheel(tmp_path, JAXGPUOPS_CUDA="OFF")
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert ("-cp312-abi3-" in wheel.name) == (sys.version_info >= (3, 12))

    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    installed = run(python, "-m", "pip", "install", wheel)
    assert installed.returncode == 0, installed.stdout + installed.stderr

    program = """
        import importlib.metadata, pathlib, sys
        import jax.numpy as jnp
        import jaxgpuops
        from jaxgpuops import _native

        assert pathlib.Path(jaxgpuops.__file__).is_relative_to(sys.prefix), jaxgpuops.__file__
        assert "jaxgpuops.topk" in _native.targets("cpu")
        assert "JAXGPUOPS_CUDA=OFF" in _native.missing("cuda")  # the package knows why
        assert any(str(file).endswith("LICENSE") for file in importlib.metadata.files("jaxgpuops"))
        assert (pathlib.Path(jaxgpuops.__file__).parent / "py.typed").exists()
        values, indices = jaxgpuops.topk(jnp.array([3.0, 1.0, 2.0]), 2)
        print(values.tolist(), indices.tolist())
    """
    done = run(python, "-c", textwrap.dedent(program), JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "[3.0, 2.0] [0, 2]"


def test_cuda_is_demanded_where_there_is_no_nvcc(tmp_path):
    built = build_wheel(tmp_path, JAXGPUOPS_CUDA="ON", CUDACXX="")  # an empty CUDACXX hides every nvcc
    assert built.returncode != 0
    text = " ".join((built.stdout + built.stderr).split())  # CMake wraps its lines
    assert "JAXGPUOPS_CUDA=ON, but there was no nvcc" in text
    assert "JAXGPUOPS_CUDA_WHEELS=1" in text
    assert not list(tmp_path.glob("*.whl"))
