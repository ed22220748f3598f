// A plan for at most 32 * kGroups experts, without counters in shared memory: lane l counts, by the votes of route.cu,
// how many assignments of its warp go to the experts l, l + 32 and so on. Warps then exchange only these counts.
#pragma once

#include "moe/cuda/route.cuh"

namespace jaxgpuops::moe {

// Returns the number that is kept for expert e, from the lane that keeps it.
template <int kGroups>
__device__ __forceinline__ int32_t number_of(const int32_t (&numbers)[kGroups], int32_t e) {
  int32_t found = __shfl_sync(kEveryLane, numbers[0], e & 31);
#pragma unroll
  for (int n = 1; n < kGroups; ++n) {
    const int32_t other = __shfl_sync(kEveryLane, numbers[n], e & 31);
    if (e >> 5 == n) found = other;
  }
  return found;
}

// For each key (an expert, or -1): how many of the warp's assignments to it come before the lane's; and for each of the
// lane's experts, how many the warp has.
template <int kItems, int kGroups>
__device__ __forceinline__ void rank_by_votes(const int32_t (&key)[kItems], int bits, int32_t (&rank)[kItems],
                                              int32_t (&counts)[kGroups]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    unsigned of_lane = __ballot_sync(kEveryLane, key[i] >= 0), of_key = of_lane, of_group[kGroups];
#pragma unroll
    for (int bit = 0; bit < 5; ++bit) {
      if (kGroups == 1 && bit >= bits) break;
      const unsigned set = __ballot_sync(kEveryLane, key[i] >> bit & 1);
      of_lane &= lane >> bit & 1 ? set : ~set;
      of_key &= key[i] >> bit & 1 ? set : ~set;
    }
#pragma unroll
    for (auto& lanes : of_group) lanes = of_lane;
#pragma unroll
    for (int bit = 0; 1 << bit < kGroups; ++bit) {
      const unsigned set = __ballot_sync(kEveryLane, key[i] >> (5 + bit) & 1);
      of_key &= key[i] >> (5 + bit) & 1 ? set : ~set;
#pragma unroll
      for (int n = 0; n < kGroups; ++n) of_group[n] &= n >> bit & 1 ? set : ~set;
    }
    rank[i] = number_of(counts, key[i]) + __popc(of_key & lanes_below());
#pragma unroll
    for (int n = 0; n < kGroups; ++n) counts[n] += __popc(of_group[n]);
  }
}

template <Algorithm kAlgorithm, int kItems, int kGroups>
__global__ void __launch_bounds__(1024) route_few_kernel(PlanProblem p, Routes all, Geometry g) {
  __shared__ int32_t of_warps[32][kGroups][32], of_blocks[kGreatestCluster][kGroups][32];
  if constexpr (kAlgorithm == Algorithm::kCluster) arrive_at_cluster_start();
  const Routes routes = routes_of(p, all, blockIdx.y);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const auto experts = static_cast<int32_t>(p.experts), assignments = static_cast<int32_t>(p.assignments);
  const auto chunk = static_cast<int32_t>(g.chunk);
  const int32_t first = (blockIdx.x * warps + warp) * chunk + lane;
  int32_t key[kItems], rank[kItems], counts[kGroups] = {};
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int32_t a = first + 32 * i, e = 32 * i < chunk && a < assignments ? routes.experts[a] : -1;
    key[i] = e >= 0 && e < experts ? e : -1;
  }
  rank_by_votes(key, g.expert_bits, rank, counts);
#pragma unroll
  for (int n = 0; n < kGroups; ++n) of_warps[warp][n][lane] = 32 * n + lane < experts ? counts[n] : 0;
  __syncthreads();
  int32_t before[kGroups] = {}, found[kGroups] = {};
#pragma unroll 4
  for (int w = 0; w < warps; ++w) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const int32_t count = of_warps[w][n][lane];
      found[n] += count;
      if (w < warp) before[n] += count;
    }
  }
  if constexpr (kAlgorithm == Algorithm::kCluster) {
    wait_at_cluster_barrier();  // until all blocks of the cluster have begun
    for (unsigned r = warp; r < gridDim.x; r += warps) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) store_in_cluster(&of_blocks[blockIdx.x][n][lane], r, found[n]);
    }
    __syncwarp();
    arrive_at_cluster_barrier();
    wait_at_cluster_barrier();
#pragma unroll
    for (auto& count : found) count = 0;
#pragma unroll 4
    for (unsigned r = 0; r < gridDim.x; ++r) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        const int32_t count = of_blocks[r][n][lane];
        found[n] += count;
        if (r < blockIdx.x) before[n] += count;
      }
    }
  }
  int32_t total = 0, starts[kGroups], ends[kGroups];
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    const auto kept = static_cast<int32_t>(p.kept(found[n])), padded = static_cast<int32_t>(p.padded(found[n]));
    const int32_t up_to = sum_up_to_lane(padded), offset = total + up_to - padded, e = 32 * n + lane;
    starts[n] = offset + before[n];
    ends[n] = offset + kept;
    total += __shfl_sync(kEveryLane, up_to, 31);
    if (blockIdx.x == 0 && warp == 0 && e < experts) routes.sizes[e] = kept, routes.offsets[e] = offset;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) routes.offsets[experts] = total;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int32_t a = first + 32 * i, row = number_of(starts, key[i]) + rank[i], end = number_of(ends, key[i]);
    const bool there = key[i] >= 0 && row < end && row < p.rows;
    if (32 * i < chunk && a < assignments) routes.row_of_assignment[a] = there ? row : -1;
    if (there) routes.assignment_of_row[row] = a;
  }
  fill(p, [&](int32_t e) { return number_of(ends, e); }, total, routes.assignment_of_row);
}

}  // namespace jaxgpuops::moe
