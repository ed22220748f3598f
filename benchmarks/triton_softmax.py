"""Softmax of rows that fit the registers of a block: the kernel of Triton's tutorial, a peer."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rows(x, y, length, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * length
    columns = tl.arange(0, SIZE)
    inside = columns < length
    z = tl.load(x + row + columns, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(z - tl.max(z, axis=0))
    tl.store(y + row + columns, (e / tl.sum(e, axis=0)).to(y.dtype.element_ty), mask=inside)


def softmax(x: torch.Tensor) -> torch.Tensor:
    rows, length = x.shape
    size = triton.next_power_of_2(length)
    y = torch.empty_like(x)
    _rows[(rows,)](x, y, length, SIZE=size, num_warps=4 if size < 2048 else 8 if size < 8192 else 16)
    return y
