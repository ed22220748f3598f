"""Compares the bytes that cross between GPUs with those of plain JAX: for every op of the table in
tests/test_sharding_axis.py, and for the unchanged programs of tests/test_sharding_programs.py after `install()`. No GPU
is needed.

    python -P tools/collectives.py [parts of the names of ops] [--devices N] [--target FILE] [--seconds N] [--hlo
    FOLDER]

XLA compiles each op, split in each way of the table, for N GPUs (by default 8; a multiple of 2). For each, the tool
prints the bytes and the number of collectives of our program and of plain JAX's, and MORE where ours moves more bytes,
or the same bytes by more collectives. The exit status is 1 if there is such a case, or if one of ours did not compile
in time.

Needs a build with CUDA, and JAX's CUDA plugin of jaxlib's version. The GPUs are H100s, or those that the text of a
`GpuTargetConfigProto` in FILE describes. With --hlo, the compiled programs are written to FOLDER.
"""

import argparse
import contextlib
import functools
import multiprocessing
import pathlib
import sys

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  shared_memory_per_core: 233472  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9  minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@functools.cache
def setup(devices: int, target: str):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))
    import jax

    jax.config.update("jax_platforms", "cpu")
    import numpy as np
    import test_sharding_axis as table
    import test_sharding_programs as programs
    from jax.experimental import topologies

    from jaxgpuops import _native

    if why := _native.missing("cuda"):
        sys.exit(f"There are no CUDA kernels to compare: {why}")
    gpus = topologies.get_topology_desc("gpus", platform="cuda", target_config=target, topology=f"1x1x{devices}")
    types = (jax.sharding.AxisType.Auto,) * 2
    return table, programs, jax.sharding.Mesh(np.array(gpus.devices).reshape(-1, 2), ("a", "b"), axis_types=types)


def names(devices: int, target: str):
    table, programs, _ = setup(devices, target)
    ops = {name: (plain is not None, table.SPECS) for name, (_, plain, _) in table.OPS.items()}
    return ops | {f"installed {name}": (True, table.SPECS[:2]) for name in programs.INSTALLED}


def compiled(devices: int, target: str, name: str, number: int, spec, folder):
    """Bytes and number of collectives of our function (number 0) or plain JAX's (1)."""
    import jax

    import jaxgpuops

    table, programs, mesh = setup(devices, target)
    key = name.removeprefix("installed ")
    if installed := key != name:
        shape, function = (
            programs.example().shape,
            lambda x: programs.INSTALLED[key](x),
        )  # a new function, which JAX has not traced before
    else:
        shape, function = table.SHAPE, table.OPS[name][number]
    x = jax.ShapeDtypeStruct(shape, "float32", sharding=jax.sharding.NamedSharding(mesh, spec))
    with jaxgpuops.install(programs.ROUTED) if installed and number == 0 else contextlib.nullcontext():
        hlo = jax.jit(function).lower(x).compile().as_text()
    if folder:
        side = ("ours", "plain")[number]
        pathlib.Path(folder, f"{name} {spec} {side}.txt".replace(" ", "_")).write_text(hlo)
    return table.moved(hlo)


class Compiler:
    """A process that compiles. It is ended if that takes too long, because XLA cannot be asked to stop."""

    def __init__(self, seconds: float):
        self.seconds, self.pool = seconds, None

    def __call__(self, function, *arguments):
        self.pool = self.pool or multiprocessing.get_context("spawn").Pool(1)
        try:
            return self.pool.apply_async(function, arguments).get(self.seconds)
        except multiprocessing.TimeoutError:
            self.end()
            return f"not in {self.seconds:g} s"
        except Exception as error:  # XLA or JAX refuse the program
            return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"

    def end(self):
        if self.pool:
            self.pool.terminate()
            self.pool = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="parts of the names of ops")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--target", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=60, help="for one program to compile in")
    parser.add_argument("--hlo", type=pathlib.Path)
    options = parser.parse_args()
    target = options.target.read_text() if options.target else H100
    if options.hlo:
        options.hlo.mkdir(parents=True, exist_ok=True)
    compiler, bad = Compiler(options.seconds), []
    described = compiler(names, options.devices, target)
    if isinstance(described, str):
        sys.exit(described)
    for name, (has_plain, specs) in described.items():
        if options.only and not any(part in name for part in options.only):
            continue
        for spec in specs:
            case = (options.devices, target, name)
            own = compiler(compiled, *case, 0, spec, options.hlo)
            their = compiler(compiled, *case, 1, spec, options.hlo) if has_plain else "none"
            more = isinstance(own, str) or (isinstance(their, tuple) and own > their)
            if more:
                bad.append((name, spec))
            print(f"{name}, {spec}: ours {own}, plain {their}{', MORE' if more else ''}", flush=True)
    compiler.end()
    print(f"{len(bad)} cases in which ours moves more, or does not compile")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
