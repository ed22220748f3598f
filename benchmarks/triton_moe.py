"""Peers in Triton: a gather of tokens to the rows of their experts, a program a row and part; the sum of a token's
rows, a program a token and part; and the gradient of that sum, a program a row."""

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


@triton.jit
def _sum(y, inverse, weights, out, length, K: tl.constexpr, WEIGHTED: tl.constexpr, SIZE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = columns < length
    total = tl.zeros([SIZE], tl.float32)
    for i in tl.static_range(K):
        row = tl.load(inverse + token * K + i).to(tl.int64)
        part = tl.load(y + row * length + columns, mask=inside).to(tl.float32)
        total += part * tl.load(weights + token * K + i) if WEIGHTED else part
    tl.store(out + token * length + columns, total.to(out.dtype.element_ty), mask=inside)


def sum_rows(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    (tokens, k), length = inverse.shape, y.shape[1]
    size = min(1024, triton.next_power_of_2(length))
    out = y.new_empty(tokens, length)
    grid = (tokens, triton.cdiv(length, size))
    _sum[grid](y, inverse, weights, out, length, K=k, WEIGHTED=weights is not None, SIZE=size, num_warps=4)
    return out


@triton.jit
def _sum_gradient(y, ct, inverse, weights, dy, dw, length, K: tl.constexpr, SIZE: tl.constexpr):
    assignment = tl.program_id(0).to(tl.int64)
    row = tl.load(inverse + assignment).to(tl.int64)
    weight = tl.load(weights + assignment)
    dots = tl.zeros([SIZE], tl.float32)
    for first in range(0, length, SIZE):
        columns = first + tl.arange(0, SIZE)
        inside = columns < length
        of_token = tl.load(ct + assignment // K * length + columns, mask=inside, other=0).to(tl.float32)
        dots += of_token * tl.load(y + row * length + columns, mask=inside, other=0).to(tl.float32)
        tl.store(dy + row * length + columns, (weight * of_token).to(dy.dtype.element_ty), mask=inside)
    tl.store(dw + assignment, tl.sum(dots))


def sum_rows_gradient(
    y: torch.Tensor, weights: torch.Tensor, ct: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    size = min(2048, triton.next_power_of_2(y.shape[1]))
    dy, dw = torch.empty_like(y), torch.empty_like(weights)
    grid = (inverse.numel(),)
    _sum_gradient[grid](y, ct, inverse, weights, dy, dw, y.shape[1], K=inverse.shape[1], SIZE=size, num_warps=8)
    return dy, dw
