"""The labs build, check and time the kernels of a family without JAX, so that an idea is measured within minutes.

    python tools/lab topk build          with nvcc, no GPU needed: build/lab/libtopk.so (CUDAARCH, default 90)
    python tools/lab topk check time     on a GPU: is it right, and how long does the benchmark's grid take
    python tools/lab scan sweep          on a GPU: where did the plan lose more than 5 % to another choice

Families are topk, gate, scan and softmax (with the reductions); `python tools/lab FAMILY` lists a family's stages. What
ships is measured by `python -m benchmarks`; this is for choosing what ships. Needs torch and NumPy on a GPU machine.
The environment variable ONLY (a part of a name) selects problems; SEED and CASES choose the random ones.
"""

import importlib
import sys

FAMILIES = ("topk", "gate", "scan", "softmax")


def main(family="", *stages):
    if family not in FAMILIES:
        sys.exit(__doc__)
    stage_of = importlib.import_module(f"{family}_lab").STAGES
    listing = "\n".join(f"{name:10} {function.__doc__.splitlines()[0]}" for name, function in stage_of.items())
    if unknown := set(stages) - set(stage_of):
        sys.exit(f"{family} has no {', '.join(unknown)}, but\n{listing}")
    if not stages:
        print(listing)
    for stage in stages:
        if stage_of[stage]():
            sys.exit(f"{family} {stage}: wrong")


if __name__ == "__main__":
    main(*sys.argv[1:])
