"""Gradient boosting of decision trees on histograms, as LightGBM does it, in JAX: tumours are told apart by 30
measurements.

Values become bins. A tree grows leaf by leaf, always where a split gains most. The gain of a split is computed from
sums of gradients and hessians by bin. One `segment_sum` makes these sums for the smaller child; those of its sibling
are the difference from their parent's. `argsort` finds the rows of the child, and `cumsum` adds up bins.

Rows may be split over devices, as in LightGBM's data-parallel mode: each device adds up its own, one reduce-scatter
gives each the sums of some features, and the best of their best splits is taken. Gradients are whole numbers
(LightGBM's "quantized training"), so sums are exact in any order: the trees are those of one device.
"""

import contextlib
import functools
import importlib
import importlib.util
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxgpuops

with contextlib.suppress(RuntimeError):  # JAX has started already
    jax.config.update("jax_num_cpu_devices", 8)

BINS, LEAVES, RATE, LEAST_ROWS, LEAST_HESSIAN = 255, 31, 0.1, 20, 1e-3  # LightGBM's defaults


class Split(NamedTuple):
    """The best split of a leaf: rows whose bin of the feature is above the threshold go right. left: the sums of the
    others."""

    gain: jax.Array
    feature: jax.Array
    threshold: jax.Array
    left: jax.Array


class Tree(NamedTuple):
    """Split i turns its leaf into that leaf, on the left, and leaf i + 1."""

    leaf: jax.Array
    feature: jax.Array
    threshold: jax.Array
    value: jax.Array  # the score of each leaf


# ---- Bins -----------------------------------------------------------------------------------------------------------


def edges_of(x):
    """Upper edges of all bins but the last, [features, BINS - 1]: about as many values lie in each."""
    return np.quantile(x, np.linspace(0, 1, BINS + 1)[1:-1], axis=0).T.astype(np.float32)


@jax.jit
def binned(x, edges):
    """The bin of each value, [features, rows]."""
    return jax.vmap(jnp.searchsorted)(edges, x.T).astype(np.uint8)


def padded(array, multiple, axis):
    """Appends zeros at the end of the axis."""
    width = [(0, -array.shape[d] % multiple if d == axis else 0) for d in range(array.ndim)]
    return np.pad(array, width)


# ---- One tree; functions of what a device has of rows, in a mesh with the axis "rows" ------------------------------------


def histogram(bins, pairs, mine):
    """Sums of the pairs of gradient and hessian by feature and bin, of rows that are mine, over all devices.

    [features of this device, BINS, 2]. The work is that of twice as many rows as are mine, at most: the sizes of arrays
    are known before the program runs, so there is a form of it for each half, quarter, .. of the rows.
    """
    order = jaxgpuops.argsort(~mine)  # mine come first

    def of_first(size):
        def sums(order):
            some = order[:size]
            ids = jnp.where(mine[some], bins[:, some].astype(np.int32), -1)  # rows with id -1 are dropped
            return jax.vmap(lambda ids: jaxgpuops.segment_sum(pairs[some], ids, BINS))(ids)

        return sums

    sizes = [mine.size >> i for i in range(max(1, mine.size.bit_length() - 6))]
    smallest = sum((mine.sum() <= size).astype(np.int32) for size in sizes) - 1
    own = lax.switch(smallest, [of_first(size) for size in sizes], order)
    return lax.psum_scatter(own, "rows", scatter_dimension=0, tiled=True)


def gain_of(pair, scale):
    gradient, hessian = pair[..., 0] / scale, pair[..., 1] / scale
    return gradient**2 / jnp.maximum(hessian, LEAST_HESSIAN)


def best_split(sums, total, rows, scale):
    """The best split of a leaf by any device's features; ``sums`` are those of this device's, [features, BINS, 2]."""
    left = jaxgpuops.cumsum(sums, axis=1)
    right = total - left
    gain = gain_of(left, scale) + gain_of(right, scale) - gain_of(total, scale)
    for side in (left, right):  # hessians give an estimate of the number of rows, as in LightGBM
        hessian = side[..., 1].astype(np.float32)
        allowed = (jnp.round(hessian * (rows / total[1])) >= LEAST_ROWS) & (hessian >= LEAST_HESSIAN * scale)
        gain = jnp.where(allowed, gain, -jnp.inf)
    place = jnp.argmax(gain)
    feature, threshold = place // BINS, place % BINS
    device = lax.axis_index("rows")
    own = Split(gain.max(), feature + device * len(sums), threshold, left[feature, threshold])
    # The device with the largest gain, the first of several.
    gain = lax.pmax(own.gain, "rows")
    first = lax.pmin(jnp.where(own.gain == gain, device, lax.axis_size("rows")), "rows")
    said = lambda x: lax.psum(jnp.where(device == first, x, jnp.zeros_like(x)), "rows")
    return Split(gain, *map(said, own[1:]))


def grow(bins, pairs, counts, scale):
    """A tree for these pairs, and the leaf of each row. counts: which rows are there; the others are padding."""
    rows, total = lax.psum((counts.sum(), pairs.sum(0)), "rows")
    sums = histogram(bins, pairs, counts)
    empty = lambda x: jnp.zeros((LEAVES, *jnp.shape(x)), x.dtype)
    put = lambda array, i, x: array.at[i].set(x)
    best = jax.tree.map(lambda x: put(empty(x), 0, x), best_split(sums, total, rows, scale))
    best = best._replace(gain=jnp.where(jnp.arange(LEAVES) == 0, best.gain, -jnp.inf))
    none = jnp.full(LEAVES - 1, -1, np.int32)
    leaf_of = jnp.where(counts, 0, -1)
    totals, numbers, all_sums = (put(empty(x), 0, x) for x in (total, rows, sums))

    def can_gain(state):
        i, best, *_ = state
        return (i < LEAVES) & (best.gain.max() > 0)

    def split(state):
        i, best, totals, numbers, all_sums, leaf_of, tree = state
        leaf = jnp.argmax(best.gain).astype(np.int32)
        _, feature, threshold, left = jax.tree.map(lambda x: x[leaf], best)
        tree = tree._replace(
            leaf=put(tree.leaf, i - 1, leaf),
            feature=put(tree.feature, i - 1, feature),
            threshold=put(tree.threshold, i - 1, threshold),
        )
        leaf_of = jnp.where((leaf_of == leaf) & (bins[feature] > threshold), i, leaf_of)
        children = jnp.stack([leaf, i])
        right_rows = lax.psum((leaf_of == i).sum(), "rows")
        rows = jnp.stack([numbers[leaf] - right_rows, right_rows])
        smaller = jnp.argmin(rows)
        sums = histogram(bins, pairs, leaf_of == children[smaller])
        both = jnp.stack([sums, all_sums[leaf] - sums])  # the sums of its sibling are the rest
        both = jnp.where(smaller == 0, both, both[::-1])
        pair = jnp.stack([left, totals[leaf] - left])
        best_of_both = jax.vmap(best_split, in_axes=(0, 0, 0, None))(both, pair, rows, scale)
        best = jax.tree.map(lambda array, x: put(array, children, x), best, best_of_both)
        states = zip((totals, numbers, all_sums), (pair, rows, both), strict=True)
        return i + 1, best, *(put(array, children, x) for array, x in states), leaf_of, tree

    start = Tree(none, none, none, jnp.zeros(LEAVES, np.float32))
    _, _, totals, _, _, leaf_of, tree = lax.while_loop(
        can_gain, split, (np.int32(1), best, totals, numbers, all_sums, leaf_of, start)
    )
    hessian = jnp.maximum(totals[:, 1] / scale, LEAST_HESSIAN)
    return tree._replace(value=-RATE * totals[:, 0] / scale / hessian), leaf_of


# ---- Boosting -------------------------------------------------------------------------------------------------------


def boost(scores, bins, labels, counts, scale):
    """One more tree, for log loss."""
    p = jax.nn.sigmoid(scores)
    pairs = jnp.where(counts[:, None], jnp.stack([p - labels, p * (1 - p)], 1), 0)
    tree, leaf_of = grow(bins, jnp.round(pairs * scale).astype(np.int32), counts, scale)
    return scores + jnp.where(counts, tree.value[leaf_of], 0), tree


@functools.partial(jax.jit, static_argnums=(3, 4))
def fit(bins, labels, counts, rounds, mesh):
    """The score without trees, and the trees. Rows and features are multiples of the number of devices."""
    scale = 2.0 ** (30 - counts.size.bit_length())  # so that no sum passes 2^30

    def program(bins, labels, counts):
        ones, rows = lax.psum(((labels * counts).sum(), counts.sum()), "rows")
        first = jnp.log(ones / (rows - ones))
        scores = jnp.where(counts, first, 0)
        step = lambda scores, _: boost(scores, bins, labels, counts, scale)
        return first, lax.scan(step, scores, length=rounds)[1]

    specs = P(None, "rows"), P("rows"), P("rows")
    return jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=P())(bins, labels, counts)


@jax.jit
def predict(first, trees, bins):
    """Scores of rows: above 0 for class 1."""

    def add(scores, tree):
        def split(i, leaf_of):
            right = (leaf_of == tree.leaf[i]) & (bins[tree.feature[i]] > tree.threshold[i])
            return jnp.where(right, i + 1, leaf_of)

        leaf_of = lax.fori_loop(0, LEAVES - 1, split, jnp.zeros(bins.shape[1], np.int32))
        return scores + tree.value[leaf_of], None

    return lax.scan(add, jnp.full(bins.shape[1], first), trees)[0]


# ---- Tumours --------------------------------------------------------------------------------------------------------

ROUNDS = 60


def mesh_of(devices):
    return jax.make_mesh((devices,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def classified(known, labels, new, mesh):
    """The class of new rows by 60 trees for the known ones."""
    edges = edges_of(known)
    bins, counts = binned(known, edges), np.ones(len(known), bool)
    devices = len(jax.devices())
    bins = padded(padded(bins, devices, 0), 16 * devices, 1)
    labels, counts = (padded(x, 16 * devices, 0) for x in (labels.astype(np.float32), counts))
    first, trees = fit(bins, labels, counts, ROUNDS, mesh)
    return predict(first, trees, binned(new, edges)) > 0, trees


def main():
    from sklearn.datasets import load_breast_cancer
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.model_selection import StratifiedKFold
    from threadpoolctl import threadpool_limits

    x, y = load_breast_cancer(return_X_y=True)
    x = x.astype(np.float32)
    alone, together = mesh_of(1), mesh_of(len(jax.devices()))
    peers: dict[str, Any] = {"scikit-learn": HistGradientBoostingClassifier(max_iter=ROUNDS)}
    if importlib.util.find_spec("lightgbm"):
        lightgbm = importlib.import_module("lightgbm")
        peers["LightGBM"] = lightgbm.LGBMClassifier(n_estimators=ROUNDS, n_jobs=1, verbose=-1)
    right = dict.fromkeys(["jaxgpuops", *peers], 0)
    for known, new in StratifiedKFold(5, shuffle=True, random_state=0).split(x, y):
        classes, trees = classified(x[known], y[known], x[new], alone)
        right["jaxgpuops"] += int((classes == y[new]).sum())
        for name, peer in peers.items():
            with threadpool_limits(1):  # for so few rows, threads do not pay
                right[name] += int((peer.fit(x[known], y[known]).predict(x[new]) == y[new]).sum())
    for name, count in right.items():
        print(
            f"{name:<13} {count} of {len(y)} tumours right ({count / len(y):.1%}), each by trees that have not seen it"
        )
        assert abs(count - right["jaxgpuops"]) <= 0.01 * len(y)

    _, split = classified(x[known], y[known], x[new], together)
    jax.tree.map(np.testing.assert_array_equal, trees, split)
    print(f"{int((trees.leaf >= 0).sum())} splits of {ROUNDS} trees: the same on {together.size} devices")


if __name__ == "__main__":
    main()
