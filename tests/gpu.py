"""Functions that the files of tests for GPUs share. These files test what only a GPU can show: every kernel and every
form of it, at sizes that would take minutes on a CPU, determinism, CUDA graphs, more than 2^31 elements. A file that
imports this module is skipped where there is no GPU."""

import contextlib
import functools
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxgpuops

if jax.default_backend() != "gpu":
    pytest.skip("needs a CUDA device; JAX has none here", allow_module_level=True)

HERE = pathlib.Path(__file__).parent


def plan(fn, *args):
    [call] = jaxgpuops.explain(fn, *args)
    assert call.platform == "cuda" and call.kernel, call.why
    return call.plan


@jax.jit
def same_bits(a, b):
    def one(a, b):
        unsigned = f"uint{8 * a.dtype.itemsize}"
        return (jax.lax.bitcast_convert_type(a, unsigned) == jax.lax.bitcast_convert_type(b, unsigned)).all()

    return jnp.stack([one(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]).all()


def in_subprocess(*command, **environment):
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | environment
    command = [sys.executable, "-P", *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def run_in_command_buffers(module):
    """Runs command_buffers() of the test file in a process in which XLA captures even single calls into CUDA graphs."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_graph_min_graph_size=1"
    program = f"import sys; sys.path.append({str(HERE)!r}); import {module}; {module}.command_buffers(); print('done')"
    assert "done" in in_subprocess("-c", program, XLA_FLAGS=flags)


@contextlib.contextmanager
def busy_stream():
    """Gives a function that keeps another stream of this process busy for a while."""
    torch = pytest.importorskip("torch", reason="needs a second stream of this process: torch's")
    matrix = torch.randn(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()

    def keep_busy():
        with torch.cuda.stream(stream):
            for _ in range(3):
                matrix @ matrix

    yield keep_busy
    stream.synchronize()


def memory():
    return jax.local_devices()[0].memory_stats()["bytes_limit"]


def needs_memory(gibibytes):
    if memory() < gibibytes << 30:
        pytest.skip(f"needs {gibibytes} GiB of GPU memory for JAX, has {memory() >> 30}")


# Arrays of more than 2^31 elements: (shape, axis).
LARGE = {
    "many rows": (((1 << 21) + 5, 1031), 1),
    "long rows": ((3, (1 << 30) + 3), 1),
    "a row longer than 2^31": (((1 << 31) + 5,), 0),
    "many columns": ((3, 1031, (1 << 20) + 8), 1),
    "long columns": (((1 << 28) + 3, 9), 0),
}


def noise(shape):
    """Numbers below 256 that are computed from their places: random ones would need more memory."""
    places = (jax.lax.broadcasted_iota(jnp.uint32, shape, d) for d in range(len(shape)))
    return sum(at * jnp.uint32(2654435761 + 2 * d) for d, at in enumerate(places)) >> 24


def expected_topk(x, k, axis, largest, sorted):
    """The expected top-k, by JAX's stable sort of integer keys on the GPU."""
    bits = jax.lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
    keys = x
    if jnp.issubdtype(x.dtype, jnp.floating):
        keys = jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)  # ascending as signed integers
    iota = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    indices = jax.lax.sort((~keys if largest else keys, iota), dimension=axis, is_stable=True, num_keys=1)[1]
    indices = jax.lax.slice_in_dim(indices, 0, k, axis=axis)
    if not sorted:
        indices = jnp.sort(indices, axis)
    return jnp.take_along_axis(bits, indices, axis), indices


@functools.partial(jax.jit, static_argnums=(1, 2))
def spread(rows, shape, axis, shift):
    """An array whose rows along the axis are these rows, in turns, beginning with rows[shift]."""
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    which = (jnp.arange(outer * inner) + shift) % len(rows)
    turns = rows[which.reshape(outer, inner)]  # (outer, inner, length)
    return jnp.moveaxis(turns, 2, 1).reshape(*shape[:axis], rows.shape[1], *shape[axis + 1 :])
