"""``python -m benchmarks <family> | sweep | programs | sharded | table | plot``; run it in the root of the source tree,
with jaxgpuops installed."""

import argparse
import os
import pathlib
import sys

# Python may have put the source tree first on the path, but its jaxgpuops has no compiled modules: use the installed
# one.
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:] = [path for path in sys.path if pathlib.Path(path).resolve() != ROOT] + [str(ROOT)]
# torch and CuPy need memory, too; before JAX starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

from benchmarks import problems, programs, report, runner, sharded, sweep


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    commands = parser.add_subparsers(dest="command", required=True)
    for family in runner.FAMILIES:
        measure = commands.add_parser(family, help=f"measure {family} on this machine's GPU, or CPU")
        measure.add_argument("--only", default="", help="cases whose name contains this text")
        measure.add_argument("--libraries", help="comma-separated; default: jaxgpuops and every peer that is installed")
        measure.add_argument("--keep", help="comma-separated; keep what the file that is there says of these libraries")
        measure.add_argument("--commit", help="what is measured; default: JAXGPUOPS_COMMIT, or what git says")
        measure.add_argument("--out", default=report.RESULTS, help="folder for the JSON file")
        measure.add_argument(
            "--kernels", action="store_true", help="on a GPU, only the time in which kernels run, by torch's profiler"
        )
    swept = commands.add_parser("sweep", help="random problems, or the shapes of programs: how slow, and whether right")
    swept.add_argument("families", nargs="*", default=problems.FAMILIES, help=f"of {', '.join(problems.FAMILIES)}")
    swept.add_argument("--shapes", choices=["random", "programs"], default="random")
    swept.add_argument("--seed", type=int, default=0)
    swept.add_argument("--problems", type=int, default=900, help="how many random ones")
    swept.add_argument(
        "--only", default="", help="one random problem, as topk/17; or programs whose name contains this"
    )
    swept.add_argument(
        "--check", action="store_true", help="only whether each plan launches and is right; on a CPU, too"
    )
    swept.add_argument("--seconds", type=float, help="leave out what takes longer")
    swept.add_argument("--commit", help="what is measured; default: JAXGPUOPS_COMMIT, or what git says")
    swept.add_argument("--out", default=report.RESULTS, help="folder for the JSON file")
    whole = commands.add_parser("programs", help="whole programs: plain, after install(), and with our functions")
    whole.add_argument("--only", default="", help="programs whose name contains this text")
    whole.add_argument("--commit", help="what is measured; default: JAXGPUOPS_COMMIT, or what git says")
    whole.add_argument("--out", default=report.RESULTS, help="folder for the JSON file")
    split = commands.add_parser("sharded", help="arrays that are split over all devices, along the axis")
    split.add_argument("--processes", type=int, default=1, help="so many processes, with a GPU each")
    split.add_argument("--only", default="", help="programs whose name contains this text")
    split.add_argument("--commit", help="what is measured; default: JAXGPUOPS_COMMIT, or what git says")
    split.add_argument("--out", default=report.RESULTS, help="folder for the JSON file")
    table = commands.add_parser("table", help="fill the benchmark tables of README.md and docs/ from the JSON files")
    table.add_argument("--check", action="store_true", help="fail if a table or a plot is out of date, change nothing")
    commands.add_parser("plot", help="draw an SVG of each GPU's JSON files, beside them")
    args = parser.parse_args()
    if args.command == "table":
        report.fill_tables(check=args.check)
    elif args.command == "plot":
        report.plot()
    elif args.command in ("sweep", "programs", "sharded"):
        measure = {"sweep": sweep, "programs": programs, "sharded": sharded}[args.command]
        measure.run(**{name: value for name, value in vars(args).items() if name != "command"})
    else:
        libraries, keep = (names.split(",") if names else None for names in (args.libraries, args.keep))
        runner.run(
            args.command,
            only=args.only,
            libraries=libraries,
            commit=args.commit,
            out=args.out,
            keep=keep or (),
            kernels=args.kernels,
        )


if __name__ == "__main__":
    main()
