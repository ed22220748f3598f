"""A training step on a mesh, for one process with all devices, or as a program for two that have half of them each.

On a CPU there are eight virtual devices. If JAX_PLATFORMS begins with cuda, each process has a GPU.
"""

import functools
import os
import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxgpuops


def step(hidden, head, labels, sequence):
    """A loss whose vocabulary is split, its gradients, the best words, and a scan along a split axis."""

    def loss(hidden, head):
        return jaxgpuops.softmax_cross_entropy(hidden @ head, labels, reduction="mean")

    value, gradients = jax.value_and_grad(loss, (0, 1))(hidden, head)
    best = jaxgpuops.topk(hidden @ head, 5)
    return value, gradients, tuple(best), jaxgpuops.cumsum(sequence, axis=0)


def operands(mesh):
    """Operands of small integers, whose products and sums are exact in any order."""
    integers = functools.partial(np.random.default_rng(0).integers, -2, 3)
    arrays = {
        "hidden": (integers((16, 8)).astype(np.float32), P("a")),
        "head": (integers((8, 512)).astype(np.float32), P(None, ("b", "a"))),
        "labels": (np.arange(16, dtype=np.int32) * 31, P("a")),
        "sequence": (integers((256, 4)).astype(np.float32), P(("a", "b"))),
    }
    make = lambda x, spec: jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])
    return {name: make(*pair) for name, pair in arrays.items()}


def lowered():
    devices = jax.devices()[: 8 if jax.default_backend() == "cpu" else 2]
    mesh = jax.make_mesh((len(devices) // 2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    arguments = operands(mesh)
    return jax.jit(step, out_shardings=NamedSharding(mesh, P())).lower(**arguments), arguments


def main(process, address, path):
    on_gpus = os.environ["JAX_PLATFORMS"].startswith("cuda")
    if not on_gpus:
        jax.config.update("jax_num_cpu_devices", 4)
    own = {"local_device_ids": [int(process)]} if on_gpus else {}
    jax.distributed.initialize(address, 2, int(process), **own)
    assert len(jax.devices()) == (2 if on_gpus else 8)
    jax.config.update("jax_default_matmul_precision", "highest")  # as in conftest.py
    program, arguments = lowered()
    outs = jax.tree.map(np.asarray, jax.tree.leaves(program.compile()(**arguments)))
    np.savez(path, *outs, text=program.as_text())


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main(*sys.argv[1:])
