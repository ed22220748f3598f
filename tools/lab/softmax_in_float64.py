"""Softmax and reductions in float64: the results that the lab of the row engine expects.

Arrays are (outer, length, inner); row arrays (outer, 1, inner).
"""

import numpy as np


def logits_of(call, x, scale, bias, where):
    """Returns the logits, and which of them are masked."""
    wide = np.float64 if call["dtype"].name == "float64" else np.float32
    factor = wide(call["factor"]) if scale is None else (wide(call["factor"]) * scale.astype(wide)).astype(wide)
    z = (x.astype(wide) * factor).astype(wide)
    if bias is not None:
        z = (z + bias.astype(wide)).astype(wide)
    masked = np.zeros(x.shape, bool) if where is None else ~np.broadcast_to(where, x.shape)
    if call["queries"]:
        query = np.arange(x.shape[0]) // call["query_stride"] % call["queries"]
        masked = masked | (np.arange(x.shape[1])[None, :, None] > query[:, None, None])
    z = z.astype(np.float64)
    z[masked] = -np.inf
    return z, masked


def peak_and_sum(z):
    peak = np.fmax.reduce(z, axis=1, keepdims=True, initial=-np.inf)
    guarded = np.clip(peak, -np.finfo(np.float64).max, np.finfo(np.float64).max)
    return guarded, np.exp(z - guarded).sum(1, keepdims=True)


def expected_softmax(call, x, y, scale, bias, where, labels, row_where, cotangent):
    """Returns {name of a result: its values}."""
    op = call["op"]
    if op in ("softmax_jvp", "log_softmax_jvp"):
        factor = call["factor"] if scale is None else call["factor"] * scale
        masked = logits_of(dict(call, factor=1), x, None, None, where)[1]
        t = np.where(masked, 0, x)
        if op == "softmax_jvp":
            zero = masked | (y == 0)
            total = np.where(zero, 0, y * t).sum(1, keepdims=True)
            return {"out": np.where(zero, 0, y * (t - total) * factor)}
        e = np.where(masked, 0, np.exp(y))
        total = (t if call["transpose"] else np.where(masked, 0, e * t)).sum(1, keepdims=True)
        call["size"] = np.nanmax(np.where(np.isfinite(t), abs(factor * t), 0), initial=0)
        return {"out": np.where(masked, 0, factor * (t - e * total if call["transpose"] else t - total))}
    if op in ("cross_entropy", "cross_entropy_grad"):
        n, smoothing, z_loss = x.shape[1], call["label_smoothing"], call["z_loss"]
        counts = np.ones(labels.shape, bool) if row_where is None else np.broadcast_to(row_where, labels.shape)
        x = np.where(counts, x, 0.0)
        valid = (labels >= 0) & (labels < n)
        at = np.where(valid, labels, 0)
        is_label = valid & (np.arange(n)[None, :, None] == at)
        z_label = np.where(valid, np.take_along_axis(x, at.astype(np.int64), 1), np.nan)
        shift, total = peak_and_sum(x)
        lse = shift + np.log(total)
        loss = (1 - smoothing) * (lse - z_label) + z_loss * lse**2
        if smoothing:
            loss = loss + smoothing * (lse - x.mean(1, keepdims=True))
        results = {"loss": np.where(counts, loss, 0), "lse": np.where(counts, lse, 0)}
        if op == "cross_entropy_grad":
            e = np.exp(x - shift)
            others = np.where(is_label, 0, e).sum(1, keepdims=True)
            pull = 2 * z_loss * lse if z_loss else 0.0
            away = e / total * (1 + pull) - smoothing / n
            label = (pull * e - others) / total + smoothing - smoothing / n
            gradient = cotangent * np.where(is_label, label, away)
            gradient = np.where(valid & (total < np.inf), gradient, np.nan)
            results["out"] = np.where(counts, gradient, 0)
        return results
    z, masked = logits_of(call, x, scale, bias, where)
    shift, total = peak_and_sum(z)
    if op == "logsumexp":
        return {"lse": shift + np.log(total)}
    total = np.where(total < np.inf, total, np.nan)
    out = np.exp(z - shift) / total if op == "softmax" else (z - shift) - np.log(total)
    return {"out": np.where(masked, 0 if op == "softmax" else -np.inf, out)}


def expected_reduction(call, x, y, where):
    op, dtype = call["op"], call["dtype"]
    mask = np.ones(x.shape, bool) if where is None else np.broadcast_to(where, x.shape)
    if op in ("sum", "dot"):
        product = x if op == "sum" else x * y
        product = np.where(mask, product, np.zeros((), x.dtype))
        total = product.sum(1, keepdims=True, dtype=x.dtype)
        if not dtype.integer:
            call["size"] = abs(product).sum(1, keepdims=True)
        return {"out": total}
    if dtype.integer:
        info = np.iinfo(x.dtype) if x.dtype != bool else None
        low, high = (info.min, info.max) if info else (False, True)
    else:
        low, high = (-448, 448) if dtype.name == "float8_e4m3fn" else (-np.inf, np.inf)
    x = np.where(mask, x, np.asarray(low if op == "max" else high, x.dtype))
    return {"out": (np.max if op == "max" else np.min)(x, axis=1, keepdims=True)}
