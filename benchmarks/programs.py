"""Whole programs: as JAX alone runs them, the same after `jaxgpuops.install()`, and written with our functions.

    python -m benchmarks programs

XLA fuses its own reductions, softmaxes and short scans with the operations around them; a custom call costs one more
write, read and launch. Times of kernels alone do not show that. Times are of calls in flight, one after another, with
one wait at the end: what a program costs that keeps the device busy.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.util
import json
import os
import pathlib
import time
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jaxgpuops
from benchmarks import report, runner, timing
from benchmarks.scan import associative_scan

SLOWER = 1.03  # an installed program may take this many times as long as the plain one


@dataclasses.dataclass(frozen=True)
class Program:
    """plain and ours: the functions of the arguments, in JAX alone and with our functions; trees of arrays.

    tolerance: by how much results may differ, relative to the largest of each.
    """

    name: str
    arguments: tuple
    plain: Callable
    ours: Callable
    tolerance: float = 0.0


def _normal(key, *shapes, dtype=jnp.float32):
    keys = jax.random.split(key, len(shapes))
    return tuple(jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True))


# A function for each program: ``small`` are sizes for a test on a CPU.


# ---- Language models ------------------------------------------------------------------------------------------------


def training(key, small) -> Program:
    tokens, width, words = (16, 32, 128) if small else (512, 512, 32000)
    shapes = [(words, width), *[(width, width)] * 4, (width, 4 * width), (4 * width, width)]
    parameters = [x / shape[0] ** 0.5 for x, shape in zip(_normal(key, *shapes), shapes, strict=True)]

    def attention(x, weights, softmax):
        q, k, v, out = weights
        scores = jnp.einsum("bqd,bkd->bqk", x @ q, x @ k) / width**0.5
        return x + jnp.einsum("bqk,bkd->bqd", softmax(scores), x @ v) @ out

    def step(softmax, cross_entropy):
        def loss(parameters, tokens):
            embedding, *weights, up, down = (x.astype(jnp.bfloat16) for x in parameters)
            x = attention(embedding[tokens[:, :-1]], weights, softmax)
            x = x + jax.nn.gelu(x @ up) @ down
            return cross_entropy(x @ embedding.T, tokens[:, 1:])

        def updated(parameters, tokens):
            value, gradient = jax.value_and_grad(loss)(parameters, tokens)
            return value, [p - 0.1 * g for p, g in zip(parameters, gradient, strict=True)]

        return updated

    def of_jax(logits, labels):  # the formula of optax
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.take_along_axis(log_p, labels[..., None], -1).mean()

    return Program(
        "training step of a language model",
        (parameters, jax.random.randint(key, (8, tokens + 1), 0, words)),
        step(jax.nn.softmax, of_jax),
        step(jaxgpuops.softmax, lambda *args: jaxgpuops.softmax_cross_entropy(*args, reduction="mean")),
        tolerance=2e-2,
    )


def _decoding(key, small, name, plain, ours) -> Program:
    """Decodes eight tokens one after another, each from the state that the one before leaves."""
    texts, width, words = (2, 16, 256) if small else (16, 1024, 128256)
    shapes = (texts, width), (width, words), (words, width)

    def decode(choose):
        def next_token(hidden, output, embedding, key):
            token = choose(key, hidden @ output)
            return jnp.tanh(hidden + embedding[token]), token

        def program(hidden, output, embedding):
            step = lambda hidden, key: next_token(hidden, output, embedding, key)
            return jax.lax.scan(step, hidden, jax.random.split(jax.random.key(1), 8))[1]

        return program

    return Program(name, tuple(x / 16 for x in _normal(key, *shapes, dtype=jnp.bfloat16)), decode(plain), decode(ours))


def decoding_by_topk(key, small) -> Program:
    def choose(topk):
        def chosen(key, logits):
            values, tokens = topk(logits, 50)
            place = jax.random.categorical(key, values.astype(jnp.float32) / 0.8)
            return jnp.take_along_axis(tokens, place[:, None], 1)[:, 0]

        return chosen

    return _decoding(key, small, "decoding by top-k", choose(jax.lax.top_k), choose(jaxgpuops.topk))


def greedy_decoding(key, small) -> Program:
    plain = lambda key, logits: jnp.argmax(logits, -1)
    ours = lambda key, logits: jaxgpuops.lax.argmax(logits, 1, jnp.int32)
    return _decoding(key, small, "greedy decoding", plain, ours)


def beam_search(key, small) -> Program:
    texts, beams, width, words = (2, 3, 16, 128) if small else (16, 5, 512, 50257)

    def step(log_softmax, topk):
        def best(hidden, output, scores):
            log_p = log_softmax(hidden @ output / 8) + scores[..., None]
            values, at = topk(log_p.reshape(texts, -1), beams)
            return values, at % words, jnp.take_along_axis(hidden, (at // words)[..., None], 1)

        return best

    return Program(
        "beam search",
        _normal(key, (texts, beams, width), (width, words), (texts, beams)),
        step(jax.nn.log_softmax, jax.lax.top_k),
        step(jaxgpuops.log_softmax, jaxgpuops.topk),
        tolerance=1e-4,
    )


def gate(key, small) -> Program:
    """The gate, and the load of each expert."""
    tokens, width, experts = (64, 16, 16) if small else (32768, 1024, 128)

    def routed(gate):
        def program(x, router):
            weights, chosen = gate(x @ router / 32)
            hot = jax.nn.one_hot(chosen, experts, dtype=weights.dtype)
            return weights, chosen, (hot * weights[..., None]).sum((0, 1))

        return program

    def plain(logits):
        values, chosen = jax.lax.top_k(jax.nn.softmax(logits), 8)
        return values / values.sum(-1, keepdims=True), chosen

    return Program(
        "gate of a mixture of experts",
        _normal(key, (tokens, width), (width, experts)),
        routed(plain),
        routed(lambda logits: jaxgpuops.topk_softmax(logits, 8)),
        tolerance=1e-3,
    )


# ---- Vectors and images ---------------------------------------------------------------------------------------------


def neighbours(key, small) -> Program:
    queries, points, width = (16, 300, 8) if small else (1024, 60_000, 64)

    def distances(queries, points):
        return (points**2).sum(1) - 2 * queries @ points.T

    return Program(
        "nearest neighbours",
        _normal(key, (queries, width), (points, width)),
        lambda *args: jax.lax.top_k(-distances(*args), 10)[1],
        lambda *args: jaxgpuops.topk(distances(*args), 10, largest=False).indices,
    )


def segmentation(key, small) -> Program:
    images, classes, width, size = (1, 5, 4, 8) if small else (8, 19, 32, 256)
    labels = jax.random.randint(key, (images, size, size), 0, classes)

    def step(cross_entropy, argmax):
        def loss(weights, features, labels):
            logits = jnp.einsum("cw,bwyx->bcyx", weights, features)
            return cross_entropy(logits, labels), (argmax(logits) == labels).mean()

        return jax.value_and_grad(loss, has_aux=True)

    def of_jax(logits, labels):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits, 1), labels[:, None], 1).mean()

    return Program(
        "segmentation: loss, gradient, accuracy",
        (*_normal(key, (classes, width), (images, width, size, size)), labels),
        step(of_jax, lambda x: jnp.argmax(x, 1)),
        step(
            lambda *args: jaxgpuops.softmax_cross_entropy(*args, axis=1, reduction="mean"),
            lambda x: jaxgpuops.lax.argmax(x, 1, jnp.int32),
        ),
        tolerance=1e-3,
    )


def detection(key, small) -> Program:
    """Keeps the best boxes of each image, where a box loses weight by better ones that it overlaps (matrix non-maximum
    suppression)."""
    images, anchors, count = (2, 200, 50) if small else (8, 120_000, 1000)
    scores, corner, size = _normal(key, (images, anchors), (images, anchors, 2), (images, anchors, 2))

    def boxes(topk):
        def best(scores, boxes):
            values, at = topk(jax.nn.sigmoid(scores), count)
            boxes = jnp.take_along_axis(boxes, at[..., None], 1)
            low = jnp.maximum(boxes[:, :, None, :2], boxes[:, None, :, :2])
            high = jnp.minimum(boxes[:, :, None, 2:], boxes[:, None, :, 2:])
            common = jnp.maximum(high - low, 0).prod(-1)
            area = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
            overlap = jnp.triu(common / (area[:, :, None] + area[:, None, :] - common), 1)
            return values * (1 - overlap.max(1)), boxes

        return best

    return Program(
        "detection",
        (scores, jnp.concatenate([corner * 100, corner * 100 + abs(size) * 30 + 1], -1)),
        boxes(jax.lax.top_k),
        boxes(jaxgpuops.topk),
        tolerance=1e-4,
    )


# ---- Sequences ------------------------------------------------------------------------------------------------------


def returns(key, small) -> Program:
    """The growth of 128 series, and the deepest fall of each from a peak."""

    def figures(cumsum, cummax):
        def program(returns):
            value = cumsum(jnp.log1p(returns))
            return jnp.exp(value), (cummax(value) - value).max(1)

        return program

    return Program(
        "returns",
        tuple(x / 100 for x in _normal(key, (4, 64) if small else (128, 4096))),
        figures(lambda x: jnp.cumsum(x, 1), lambda x: jax.lax.cummax(x, 1)),
        figures(jaxgpuops.cumsum, jaxgpuops.cummax),
        tolerance=1e-3,
    )


def moving_average(key, small) -> Program:
    """A moving average by differences of prefix sums."""

    def average(cumsum):
        def program(x):
            sums = cumsum(x)
            return (sums[:, 64:] - sums[:, :-64]) / 64

        return program

    return Program(
        "moving average of a signal",
        _normal(key, (4, 500) if small else (64, 1 << 20)),
        average(lambda x: jnp.cumsum(x, 1)),
        average(jaxgpuops.cumsum),
        tolerance=1e-3,
    )


def state_space(key, small) -> Program:
    batch, steps, width = (2, 32, 8) if small else (8, 2048, 1024)

    def layer(scan):
        def program(x, decay, out):
            a = jnp.exp(-jax.nn.softplus(decay + x))
            return jax.nn.silu(scan(a, (1 - a) * x)) @ (out / width**0.5)

        return program

    return Program(
        "state-space layer",
        _normal(key, (batch, steps, width), (width,), (width, width)),
        layer(lambda a, b: associative_scan(a, b, 1)),
        layer(lambda a, b: jaxgpuops.linear_scan(a, b, axis=1)),
        tolerance=1e-3,
    )


# ---- Tables ---------------------------------------------------------------------------------------------------------


def _example(ops):
    """Loads `examples/boosted_trees.py` with these functions in place of ours."""
    path = pathlib.Path(__file__).parents[1] / "examples/boosted_trees.py"
    spec = importlib.util.spec_from_file_location("boosted_trees", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.jaxgpuops = ops
    return module


def boosted_trees(key, small) -> Program:
    """One round of boosting on 28 features of 255 bins. Sums are of integers, so all results are equal."""
    rows, features = (1 << 11, 4) if small else (10_000_000, 28)
    keys = jax.random.split(key)
    bins = jax.random.randint(keys[0], (features, rows), 0, 255, jnp.uint8)
    noise = jax.random.normal(keys[1], (rows,))
    labels = (bins[0].astype(jnp.float32) + bins[1] + 60 * noise > 255).astype(jnp.float32)
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])

    def one_round(ops):
        return lambda bins, labels, counts: _example(ops).fit(bins, labels, counts, 1, mesh)

    of_jax = types.SimpleNamespace(argsort=jnp.argsort, cumsum=jnp.cumsum, segment_sum=jax.ops.segment_sum)
    return Program(
        "a round of boosted trees",
        (bins, labels, jnp.ones(rows, bool)),
        one_round(of_jax),
        one_round(jaxgpuops),
    )


PROGRAMS = [
    training,
    decoding_by_topk,
    greedy_decoding,
    beam_search,
    gate,
    neighbours,
    segmentation,
    detection,
    returns,
    moving_average,
    state_space,
    boosted_trees,  # this program takes longer than all others together
]


# ---- Measuring ------------------------------------------------------------------------------------------------------


def compared(name, actual, expected, tolerance) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = (np.asarray(x, np.float64) for x in (a, e))
        if a.shape != e.shape or abs(a - e).max() > tolerance * abs(e).max():
            raise AssertionError(f"{name}: not the results of plain JAX")


def forms(case: Program) -> dict[str, Callable]:
    """Compiles each form of a program, and checks that its results are those of the first within the tolerance."""
    args = case.arguments

    def compiled(function):
        return jax.jit(lambda *args: function(*args)).lower(*args).compile()

    with jaxgpuops.install():
        installed = compiled(case.plain)
    programs = {"plain": compiled(case.plain), "installed": installed, "jaxgpuops": compiled(case.ours)}
    expected = programs["plain"](*args)
    for name in ("installed", "jaxgpuops"):
        compared(f"{case.name}, {name}", programs[name](*args), expected, case.tolerance)
    return programs


def run(*, only: str = "", commit: str | None = None, out: str | os.PathLike) -> None:
    small = jax.default_backend() != "gpu"
    result = runner.environment("programs", commit, []) | {"timing": "in flight"}
    result["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    result["rows"] = rows = []
    path = runner.result_path(out, "programs")
    start = time.monotonic()
    for make in PROGRAMS:
        if only not in make.__name__:
            continue
        case = make(jax.random.key(0), small)
        programs = forms(case)
        with jaxgpuops.install():
            calls = jaxgpuops.explain(case.plain, *case.arguments)
        us = timing.in_flight({name: functools.partial(program, *case.arguments) for name, program in programs.items()})
        rows.append({"name": case.name, "us": us, "calls": list(dict.fromkeys(map(str, calls)))})
        text = ", ".join(f"{name} {t:.4g}" for name, t in us.items())
        slower = us["installed"] > SLOWER * us["plain"]
        print(f"{time.monotonic() - start:5.0f} s  {case.name:<40} {text}{'  SLOWER' * slower}", flush=True)
        for call in rows[-1]["calls"]:
            print(f"          {call}")
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"written to {path}\n\n{report.table(result, report.PROGRAM_COLUMNS.split())}")
