// What the kernels of moe_plan share: which part of a batch a block works on, and rows that no assignment takes.
#pragma once

#include "common/cuda/counting.cuh"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/warp.cuh"
#include "moe/cuda/launch.h"

namespace jaxgpuops::moe {

constexpr int kGreatestCluster = 16;

struct Geometry {
  int64_t chunk;  // assignments of a warp
  int expert_bits;
  int told_rows;
  bool staged;
  bool twice;
  int each;  // experts of a thread
};

__device__ __forceinline__ Routes routes_of(const PlanProblem& p, const Routes& all, int64_t o) {
  return {all.experts + o * p.assignments,           all.assignment_of_row + o * p.rows,
          all.row_of_assignment + o * p.assignments, all.sizes + o * p.experts,
          all.offsets + o * (p.experts + 1),         all.workspace + o * (gridDim.x + 1) * p.experts};
}

// Marks the rows that no assignment takes: those by which groups are rounded up, and those after the last group. Each
// block does a part of them.
template <class EndOf>
__device__ __forceinline__ void fill(const PlanProblem& p, const EndOf& end_of, int64_t total,
                                     int32_t* assignment_of_row) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t r = total + thread; r < p.rows; r += threads) assignment_of_row[r] = -1;
  if (p.align == 1) return;
  for (int64_t e = thread / 32; e < p.experts; e += threads / 32) {
    const int64_t end = end_of(static_cast<int32_t>(e)), next = min((end + p.align - 1) / p.align * p.align, p.rows);
    for (int64_t r = end + threadIdx.x % 32; r < next; r += 32) assignment_of_row[r] = -1;
  }
}

}  // namespace jaxgpuops::moe
