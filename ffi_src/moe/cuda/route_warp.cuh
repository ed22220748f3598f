// A plan of at most 32 assignments. Each warp of each block holds all of them, one a lane, so that no warp waits for
// another. A thread has an expert, and adds up the rows of the groups before the expert's, of which the first
// assignment of each group knows how many they are. The first warp also does so for the experts of its lanes'
// assignments.
#pragma once

#include "moe/cuda/route.cuh"

namespace jaxgpuops::moe {

__global__ void __launch_bounds__(256) route_warp_kernel(PlanProblem p, Routes all) {
  const Routes routes = routes_of(p, all, blockIdx.y);
  const auto experts = static_cast<int32_t>(p.experts), assignments = static_cast<int32_t>(p.assignments);
  const int32_t lane = threadIdx.x % 32, e = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  const int32_t found = lane < assignments ? routes.experts[lane] : -1, own = found < experts ? found : -1;
  const unsigned same = __match_any_sync(kEveryLane, own);
  const int32_t rank = __popc(same & lanes_below()), count = own < 0 ? 0 : __popc(same);
  const auto kept = static_cast<int32_t>(p.kept(count));
  const int32_t taken = rank == 0 ? static_cast<int32_t>(p.padded(count)) : 0;
  int32_t size = 0, offset = 0, before_own = 0;
#pragma unroll 4
  for (int32_t j = 0; j < assignments; ++j) {
    const int32_t other = __shfl_sync(kEveryLane, own, j), rows = __shfl_sync(kEveryLane, taken, j);
    const int32_t other_kept = __shfl_sync(kEveryLane, kept, j);
    if (other == e) size = other_kept;
    if (other < e) offset += rows;
    if (other < own) before_own += rows;
  }
  const auto total = static_cast<int32_t>(sum_of_warp(static_cast<uint32_t>(taken)));
  if (e < experts) {
    routes.sizes[e] = size;
    for (auto r = offset + size; r < offset + static_cast<int32_t>(p.padded(size)); ++r)
      routes.assignment_of_row[r] = -1;
  }
  if (e <= experts) routes.offsets[e] = offset;
  if (e < assignments) {
    const int32_t row = own >= 0 && rank < kept ? before_own + rank : -1;
    routes.row_of_assignment[e] = row;
    if (row >= 0) routes.assignment_of_row[row] = e;
  }
  for (int64_t r = total + e; r < p.rows; r += gridDim.x * blockDim.x) routes.assignment_of_row[r] = -1;
}

}  // namespace jaxgpuops::moe
