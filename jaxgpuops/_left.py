"""Calls that are left to XLA on a GPU: where it was measured to be faster and no kernel of reasonable size changes that.

This is the last resort. A region is here with what was measured, and holds for the GPUs on which it was measured. Only
exact results may be left: of sums, XLA's bits depend on the number of rows, ours do not. The fallback must therefore
have the same bits as the kernel on a GPU, too. Programs for several devices keep the kernel: the region speaks of whole
arrays, not of a device's part.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.export


class Region(NamedTuple):
    """Problems whose three sizes and dtype are in these, each size from the first to the second number."""

    compute_capability: int
    dtypes: frozenset[str]
    outer: tuple[int, int]
    length: tuple[int, int]
    inner: tuple[int, int]
    measured: str  # the times, ours and XLA's, at one point or more, and on which GPU

    def has(self, rows: tuple[int, int, int], dtype: str, compute_capability: int) -> bool:
        ranges = (self.outer, self.length, self.inner)
        inside = all(least <= size <= most for size, (least, most) in zip(rows, ranges, strict=True))
        return inside and dtype in self.dtypes and compute_capability == self.compute_capability


REGIONS: dict[str, tuple[Region, ...]] = {}  # by the kernel's name


def why(kernel: str, rows: tuple, dtype: str, compute_capability: int) -> str:
    """Returns why a call is left to XLA, or an empty string if it is not."""
    if any(map(jax.export.is_symbolic_dim, rows)):
        return ""
    for region in REGIONS.get(kernel, ()):
        if region.has(rows, dtype, compute_capability):
            return f"XLA was faster at such rows: {region.measured}"
    return ""
