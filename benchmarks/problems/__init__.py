"""Problems of the sweep: calls of every family on any shape, random ones and those of real programs.

A problem knows our function of its operands, that of JAX and that of torch, how to draw operands, how many bytes have
to move, and how to tell whether results are right. The last needs no other library's results: it is cheaper to see that
results are right than to find them. Top-k is right if its elements are in order and as many as k are not below the
last, a scan if each result follows from the one before. Derivatives are compared with those of JAX in float64.

A file has families that are alike, with what tells whether their results are right.
"""

from benchmarks.problems.counting import count
from benchmarks.problems.drawn import DATA, FAMILIES, drawn
from benchmarks.problems.experts import moe
from benchmarks.problems.gradients import grad
from benchmarks.problems.problem import Problem
from benchmarks.problems.rows import ce, gate, reduce, softmax
from benchmarks.problems.scans import linear, scan
from benchmarks.problems.segments import ragged
from benchmarks.problems.selection import arg, places, rank, sort, topk
from benchmarks.problems.shapes import of_programs

__all__ = [
    "DATA",
    "FAMILIES",
    "Problem",
    "arg",
    "ce",
    "count",
    "drawn",
    "gate",
    "grad",
    "linear",
    "moe",
    "of_programs",
    "places",
    "ragged",
    "rank",
    "reduce",
    "scan",
    "softmax",
    "sort",
    "topk",
]
