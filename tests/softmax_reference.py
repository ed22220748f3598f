"""The softmax family in NumPy, in the widest float there is, with bounds on what rounding may do to the results."""

import math

import numpy as np
import scan_reference

wide = np.longdouble
NAN = wide(np.nan)


class Logits:
    """The logits z of a call along one axis, which entries count, the factor between x and z, and the error bound of
    z."""

    def __init__(self, x, axis, where=None, scale=None, bias=None, causal=False):
        self.dtype, self.axis = np.dtype(x.dtype), axis
        self.mask = np.ones(x.shape, bool) if where is None else np.broadcast_to(where, x.shape)
        if causal:
            self.mask = self.mask & np.tri(*x.shape[-2:], dtype=bool)
        self.factor = wide(1) if scale is None else np.asarray(scale).astype(wide)
        x = np.where(self.mask, x.astype(wide), 0)
        with np.errstate(invalid="ignore", over="ignore"):
            z = x * self.factor
            size = abs(z)
            if bias is not None:
                bias = np.broadcast_to(np.asarray(bias).astype(wide), x.shape)
                z, size = z + bias, size + abs(bias)
        self.x, self.z = x, np.where(self.mask, z, -np.inf)
        exact = scale is None and bias is None
        size = np.where(np.isfinite(size), size, 0)
        self.off = scan_reference.eps(self.dtype) * (0 if exact else 2) * size

    def _exponentials(self):
        with np.errstate(invalid="ignore"):
            m = self.z.max(self.axis, keepdims=True, initial=-np.inf)
            finite = np.where(np.isfinite(m), m, 0)
            e = np.where(self.mask, np.exp(self.z - m), 0)
            return m, finite, e, e.sum(self.axis, keepdims=True)

    def softmax(self):
        _, _, e, total = self._exponentials()
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.mask, e / total, 0)

    def log_softmax(self):
        m, _, _, total = self._exponentials()
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.mask, self.z - m - np.log(total), -np.inf)

    def logsumexp(self):
        _, m, _, _ = self._exponentials()
        with np.errstate(invalid="ignore", divide="ignore"):
            return (m + np.log(np.exp(self.z - m).sum(self.axis, keepdims=True))).squeeze(self.axis)

    # ---- How far results in the dtype may be off ----

    def _exponent(self):
        """The error of the exponents, which is the relative error of the exponentials, for each entry and for the
        row."""
        eps = scan_reference.eps(self.dtype)
        m = self.z.max(self.axis, keepdims=True, initial=-np.inf)
        with np.errstate(invalid="ignore"):
            distance = np.nan_to_num(m - self.z, nan=0, posinf=0, neginf=0)
        off = self.off + eps * distance
        return (
            off + off.max(self.axis, keepdims=True, initial=0) + eps * (8 + 2 * math.log2(self.z.shape[self.axis] + 1))
        )

    def softmax_bound(self):
        y = np.nan_to_num(self.softmax())
        return y * self._exponent() + scan_reference.rounding(self.dtype, y) + tiny(self.dtype)

    def log_softmax_bound(self):
        y = np.nan_to_num(self.log_softmax(), nan=0, neginf=0, posinf=0)
        return (
            2 * self._exponent() + scan_reference.rounding(self.dtype, y) + 2 * scan_reference.eps(self.dtype) * abs(y)
        )

    def logsumexp_bound(self):
        y = np.nan_to_num(self.logsumexp(), nan=0, neginf=0, posinf=0)
        rounding = scan_reference.rounding(self.dtype, y) + 2 * scan_reference.eps(self.dtype) * abs(y)
        return 2 * self._exponent().max(self.axis, initial=0) + rounding

    # ---- Cotangents of z ----

    def softmax_cotangent(self, ct):
        y = self.softmax()
        return np.where(y == 0, 0, y * (ct - (y * ct).sum(self.axis, keepdims=True)))

    def log_softmax_cotangent(self, ct):
        ct = np.where(self.mask, ct, 0)
        return np.where(self.mask, ct - self.softmax() * ct.sum(self.axis, keepdims=True), 0)

    def logsumexp_cotangent(self, ct):
        return np.nan_to_num(self.softmax()) * np.expand_dims(ct, self.axis)


def tiny(dtype):
    """The magnitude below which numbers count as 0, because floats lose digits there, or are flushed to 0."""
    return float(np.finfo(np.float64 if np.dtype(dtype) == np.float64 else np.float32).tiny)


def cross_entropy(logits, labels, axis, where=None, label_smoothing=0.0, z_loss=0.0):
    """Loss and lse of each row, and the gradient of the sum of losses, exact where 1 - p is small."""
    z = np.moveaxis(logits.astype(wide), axis, -1)
    labels = labels[..., None].astype(np.int64)
    n = z.shape[-1]
    counts = np.ones(labels.shape, bool) if where is None else np.broadcast_to(where, labels.shape[:-1])[..., None]
    z = np.where(counts, z, 0)
    valid = (labels >= 0) & (labels < n)
    m = z.max(-1, keepdims=True)
    e = np.exp(z - m)
    is_label = np.arange(n) == labels
    others = np.where(is_label, 0, e).sum(-1, keepdims=True)
    total = e.sum(-1, keepdims=True)
    lse = m + np.log(total)
    nll = np.where(
        np.where(is_label, z, -np.inf).max(-1, keepdims=True) == m,
        np.log1p(np.where(valid, others, 0)),
        (m - np.where(is_label, z, 0).sum(-1, keepdims=True)) + np.log(total),
    )
    of_mean = (m - z).mean(-1, keepdims=True) + np.log(total)
    loss = (1 - label_smoothing) * nll + label_smoothing * of_mean + z_loss * lse**2
    p = e / total
    slope = np.where(is_label, -others / total + label_smoothing, p) - label_smoothing / n + p * (2 * z_loss * lse)
    loss, slope = np.where(valid, loss, NAN), np.where(valid, slope, NAN)
    loss, lse, slope = (np.where(counts, a, 0) for a in (loss, lse, slope))
    return loss[..., 0], lse[..., 0], np.moveaxis(slope, -1, axis)
