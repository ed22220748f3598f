"""What pip installs, and how it builds."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parent.parent


def test_what_is_installed():
    distribution = importlib.metadata.distribution("jaxgpuops")
    names = {file.name for file in distribution.files}
    assert {"LICENSE", "py.typed"} <= names
    tags = re.findall(r"^Tag: (.*)", distribution.read_text("WHEEL"), re.MULTILINE)
    assert tags and all(("-abi3-" in tag) == (sys.version_info >= (3, 12)) for tag in tags), tags


def required(name):
    """The distributions that are installed with one, without extras."""
    names, todo = set(), [name]
    while todo:
        name = canonicalize_name(todo.pop())
        if name in names:
            continue
        names.add(name)
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return names


def test_it_runs_with_what_it_requires(tmp_path):
    """Runs in an environment in which only the requirements are installed."""
    there = required("jaxgpuops")
    missing = {
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if there.isdisjoint(map(canonicalize_name, distributions))
    }
    assert "pytest" in missing and not {"jax", "jaxlib", "jaxgpuops", "numpy"} & missing
    program = """
        import sys

        class Missing:
            names = set(sys.argv[1:])

            def find_spec(self, name, path, target=None):
                if name.partition(".")[0] in self.names:
                    raise ModuleNotFoundError(name)

        sys.meta_path.insert(0, Missing())
        import jax.numpy as jnp

        before = set(sys.modules)
        import jaxgpuops

        slow = "jax.extend", "jax.scipy", "jax._src.pallas"  # to import: ours takes some 30 ms without them
        assert not [name for name in set(sys.modules) - before if name.startswith(slow)]
        values, indices = jaxgpuops.topk(jnp.array([3.0, 1.0, 2.0]), 2)
        print(values.tolist(), indices.tolist())
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(program), *sorted(missing)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "[3.0, 2.0] [0, 2]"


def test_private_names_of_jax_are_in_one_place():
    files = [path for folder in ("jaxgpuops", "tools", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    assert [path.name for path in files if "jax._src" in path.read_text()] == ["_private.py"]


def test_a_jax_without_a_private_name(tmp_path):
    """One that all needs is an error that says what to do; without those of partitioning, arrays are gathered."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    for module, name, expected in (
        ("mesh", "use_abstract_mesh", "ImportError: this jaxgpuops does not know jax"),
        ("custom_partitioning", "str_to_sdy_sharding_rule", "has no attribute 'str_to_sdy_sharding_rule'"),
    ):
        program = f"""
            import jax
            from jax._src import {module}
            del {module}.{name}
            import jaxgpuops
            raise SystemExit(jaxgpuops._partition.missing)
        """
        command = [sys.executable, "-P", "-c", textwrap.dedent(program)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
        assert expected in done.stderr and done.returncode == 1, done.stderr


def test_a_source_tree_says_that_it_has_no_kernels(tmp_path):
    """Python started in a clone imports that, and would fall back without a word."""
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "jaxgpuops", clone / "jaxgpuops", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jaxgpuops"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=clone, env=environment, check=False)
    text = " ".join(done.stderr.split())
    assert f"jaxgpuops was imported from {clone / 'jaxgpuops'}, where there are no kernels" in text
    assert "-P" in text and "Install it" in text
    # The demo does not compare plain JAX with itself.
    assert done.returncode == 1 and "there are none to run: jaxgpuops._cpu was not built" in text
    assert " ms" not in done.stdout


def test_cuda_is_demanded_where_there_is_no_nvcc(tmp_path):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "JAXGPUOPS"))}
    environment |= {"JAXGPUOPS_CUDA": "ON", "CUDACXX": ""}  # an empty CUDACXX hides every nvcc
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT]
    built = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert built.returncode != 0
    text = " ".join((built.stdout + built.stderr).split())  # CMake wraps its lines
    assert "JAXGPUOPS_CUDA=ON, but there was no nvcc" in text
    assert "JAXGPUOPS_CUDA_WHEELS=1" in text
    assert not list(tmp_path.glob("*.whl"))
