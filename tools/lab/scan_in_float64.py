"""Scans in float64, one position after the other: the results that the lab of the scans expects."""

import itertools

import numpy as np


def take(x, k):
    return None if x is None else x[:, k]


def logaddexp(a, b):
    return np.where((a == b) & np.isinf(a), a, np.logaddexp(a, b))


def reference(call, x, a, y, h0, starts):
    """Computes a call on (outer, length, inner) arrays one position after the other. Returns the results, and the sizes
    of the numbers that were added up."""
    kind, op, reverse, exclusive, transpose = (call[k] for k in ("kind", "op", "reverse", "exclusive", "transpose"))
    n = x.shape[1]
    cut = np.zeros(x.shape, bool)  # cut[k]: nothing passes between k - 1 and k
    if starts is not None:
        cut[:, 1:] = np.broadcast_to(starts, x.shape)[:, 1:]
    order = range(n - 1, -1, -1) if reverse else range(n)  # the order of the forward call
    begins = np.zeros(x.shape, bool)  # whether a segment begins at the position, in that order
    begins[:, order[0]] = True
    begins |= np.concatenate([cut[:, 1:], cut[:, :1]], 1) if reverse else cut
    ends = np.zeros(x.shape, bool)  # whether a segment ends at the position, in that order
    for k, after in itertools.pairwise(order):
        ends[:, k] = begins[:, after]
    out, out2, scale = np.zeros_like(x), np.zeros_like(x), np.zeros(x.shape)
    total = np.zeros(x[:, 0].shape)

    if kind == "cumulative":
        floats = x.dtype.kind in "fc"
        if op in ("max", "min"):
            low = call["lowest"] if op == "max" else call["highest"]
        identity = {"sum": 0, "prod": 1, "logsumexp": -np.inf}.get(op, 0) if op not in ("max", "min") else low

        def minimum(u, v):  # -0 is less than +0
            least = np.where(np.isnan(u) | np.isnan(v), np.nan, np.minimum(u, v)) if floats else np.minimum(u, v)
            return np.where((u == v) & np.signbit(u), u, least) if floats else least

        fold = {"sum": np.add, "prod": np.multiply, "logsumexp": logaddexp, "min": minimum}
        fold["max"] = (lambda u, v: -minimum(-u, -v)) if floats else np.maximum
        state = np.full(x[:, 0].shape, identity, x.dtype)
        for k in order:
            before = np.where(begins[:, k], np.asarray(identity, x.dtype), state)
            total = np.where(begins[:, k], 0, total) + abs(x[:, k]) if op == "sum" and floats else total
            state = fold[op](before, x[:, k])
            out[:, k], scale[:, k] = (before if exclusive else state), total
        return out, None, scale

    if kind == "linear" and not transpose:
        state = np.zeros_like(x[:, 0])
        for k in order:
            first = k == order[0]
            drop = (begins[:, k] & (not first)) | (a[:, k] == 0)
            before = h0[:, 0] if first and h0 is not None else np.zeros_like(state) if first else state
            state = np.where(drop, x[:, k], a[:, k] * before + x[:, k])
            total = np.where(drop, 0, abs(a[:, k]) * (total if not first else abs(before))) + abs(x[:, k])
            out[:, k], scale[:, k] = state, total
        return out, None, scale

    if kind == "linear":  # of the forward call, in which g is the cotangent of b, this is the other direction
        passed = np.zeros_like(x[:, 0])
        for k in order:
            out[:, k] = x[:, k] + passed
            total = total + abs(x[:, k])
            scale[:, k] = total
            drop = (a[:, k] == 0) | ends[:, k]
            passed = np.where(drop, 0, a[:, k] * out[:, k])
            total = np.where(drop, 0, abs(a[:, k]) * total)
        return out, None, scale

    if kind == "linear_vjp":
        passed = np.zeros_like(x[:, 0])
        scale2 = np.zeros(x.shape)
        for i, k in reversed(list(enumerate(order))):
            out2[:, k] = x[:, k] + passed
            total = total + abs(x[:, k])
            if i == 0:
                before = h0[:, 0] if h0 is not None else np.zeros_like(passed)
            else:
                before = np.where(begins[:, k], 0, y[:, order[i - 1]])
            out[:, k] = out2[:, k] * before
            scale[:, k], scale2[:, k] = total * abs(before), total
            drop = (a[:, k] == 0) | begins[:, k]
            passed = np.where(drop, 0, a[:, k] * out2[:, k])
            total = np.where(drop, 0, abs(a[:, k]) * total)
        return (out, out2, scale, scale2)

    # Tangents, for which x is t and a is x. Builds the matrix of the map from its definition, column by column in the
    # order of the scan.
    t, x = x, a
    with np.errstate(all="ignore"):
        taken = (x == y) | np.isnan(x)
        if exclusive and op in ("max", "min"):
            taken |= x > y if op == "max" else x < y
        for i, k in enumerate(order):
            if op == "prod":
                previous = y[:, order[i - 1]] if i else np.ones_like(y[:, k])
                weight = y[:, k] if exclusive else np.where(begins[:, k], 1, previous)
                factor = x[:, k]
            elif op in ("max", "min"):
                weight, factor = taken[:, k] * 1.0, 1.0 - taken[:, k]
            else:
                after = (y[:, order[i + 1]] if i + 1 < n else np.full_like(y[:, k], np.inf)) if exclusive else y[:, k]
                after = np.where(ends[:, k], np.inf, after) if exclusive else after
                before = y[:, k] if exclusive else (y[:, order[i - 1]] if i else np.full_like(y[:, k], -np.inf))
                ratio = lambda u, v: np.exp(np.minimum(np.where(u == v, 0, u - v), 0))
                weight = np.where(np.isneginf(x[:, k]), 0, ratio(x[:, k], after))
                factor = ratio(before, after)
            out2[:, k] = weight
            scale[:, k] = abs(factor)
            if k == order[0]:
                factors = np.zeros_like(t)
            factors[:, k] = factor
        weights, result, size = out2.copy(), np.zeros_like(t), np.zeros(t.shape)
        scaled = lambda f, v: np.where(f == 0, 0, f * v)
        state = np.zeros_like(t[:, 0])
        for k in order if not transpose else reversed(order):
            f, w = factors[:, k], weights[:, k]
            if exclusive:
                cut_here = ends[:, k] if transpose else begins[:, k]
                state, total = np.where(cut_here, 0, state), np.where(cut_here, 0, total)
                result[:, k] = scaled(w, state) if transpose else state
                size[:, k] = abs(w) * total if transpose else total
                inner = t[:, k] if transpose else scaled(w, t[:, k])
                state, total = scaled(f, state) + inner, abs(f) * total + abs(inner)
            elif transpose:
                q, total = state + t[:, k], total + abs(t[:, k])
                result[:, k], size[:, k] = scaled(w, q), abs(w) * total
                f = np.where(begins[:, k], 0, f)
                state, total = scaled(f, q), abs(f) * total
            else:
                f = np.where(begins[:, k], 0, f)
                inner = scaled(w, t[:, k])
                state, total = scaled(f, state) + inner, abs(f) * total + abs(inner)
                result[:, k], size[:, k] = state, total
    return result, None, size
