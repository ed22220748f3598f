"""A gather of tokens to the rows of their experts, a program a row and part: a peer."""

import torch
import triton
import triton.language as tl


@triton.jit
def _gather(x, order, y, k, length, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = columns < length
    token = tl.load(order + row).to(tl.int64) // k
    tl.store(y + row * length + columns, tl.load(x + token * length + columns, mask=inside), mask=inside)


def gather_rows(x: torch.Tensor, order: torch.Tensor, k: int) -> torch.Tensor:
    rows, length = order.shape[0], x.shape[1]
    size = min(2048, triton.next_power_of_2(length))
    y = x.new_empty(rows, length)
    _gather[(rows, triton.cdiv(length, size))](x, order, y, k, length, SIZE=size, num_warps=4)
    return y
