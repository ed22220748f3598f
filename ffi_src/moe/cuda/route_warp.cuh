// A plan of few assignments whose groups are not rounded up. A warp has 32 neighbouring experts, and looks at all
// assignments by itself, so that no warp waits for another. Lane l counts those of the warp's expert l, by the votes of
// route.cu. The experts of earlier warps take as many rows as they have assignments; if they have a capacity, the warp
// counts what each of them keeps.
#pragma once

#include "moe/cuda/route.cuh"

namespace jaxgpuops::moe {

__global__ void __launch_bounds__(32) route_warp_kernel(PlanProblem p, Routes all) {
  const Routes routes = routes_of(p, all, blockIdx.y);
  const auto experts = static_cast<int32_t>(p.experts), assignments = static_cast<int32_t>(p.assignments);
  const int32_t lane = threadIdx.x, own = blockIdx.x;
  constexpr int kItems = kWarpMost / 32;
  int32_t key[kItems], rank[kItems];
  int32_t before = 0, kept = 0;  // of what earlier warps' experts keep, a part; what the lane's expert keeps
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int32_t a = 32 * i + lane, e = a < assignments ? routes.experts[a] : -1;
    key[i] = e >= 0 && e < experts ? e : -1;
    if (p.capacity < 0 && key[i] >= 0 && key[i] < 32 * own) ++before;
  }
#pragma unroll 1
  for (int32_t part = p.capacity < 0 ? own : 0; part <= own; ++part) {
    before += kept;
    int32_t count = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (32 * i >= assignments) break;
      unsigned of_lane = __ballot_sync(kEveryLane, key[i] >> 5 == part), of_key = of_lane;
#pragma unroll
      for (int bit = 0; bit < 5; ++bit) {
        const unsigned set = __ballot_sync(kEveryLane, key[i] >> bit & 1);
        of_lane &= lane >> bit & 1 ? set : ~set;
        of_key &= key[i] >> bit & 1 ? set : ~set;
      }
      rank[i] = __shfl_sync(kEveryLane, count, key[i] & 31) + __popc(of_key & lanes_below());
      count += __popc(of_lane);
    }
    kept = static_cast<int32_t>(p.kept(count));
  }
  const auto first = static_cast<int32_t>(sum_of_warp(static_cast<uint32_t>(before)));
  const int32_t end = first + sum_up_to_lane(kept), start = end - kept, e = 32 * own + lane;
  if (e < experts) routes.sizes[e] = kept, routes.offsets[e] = start;
  if (own == gridDim.x - 1) {
    const int32_t total = __shfl_sync(kEveryLane, end, 31);
    if (lane == 0) routes.offsets[experts] = total;
    for (int64_t r = total + lane; r < p.rows; r += 32) routes.assignment_of_row[r] = -1;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (32 * i >= assignments) break;
    const int32_t a = 32 * i + lane, row = __shfl_sync(kEveryLane, start, key[i] & 31) + rank[i];
    const bool is_kept = row < __shfl_sync(kEveryLane, end, key[i] & 31);
    if (key[i] >> 5 == own) {
      routes.row_of_assignment[a] = is_kept ? row : -1;
      if (is_kept) routes.assignment_of_row[row] = a;
    } else if (own == 0 && key[i] < 0 && a < assignments) {
      routes.row_of_assignment[a] = -1;
    }
  }
}

}  // namespace jaxgpuops::moe
