// moe_plan: a counting sort of assignments by expert, stable, in one launch.
//
// A warp has a chunk of the assignments and a counter for each expert in shared memory. It looks at 32 assignments at a
// time: lanes whose assignments go to the same expert find each other by __match_any_sync, and the first of them adds
// their number to the counter. So each lane learns how many of the warp's assignments go to this expert before its own,
// and keeps that in a register. Counters are then summed up, warp by warp, for each expert, and experts' totals become
// the offsets of groups.
//
// Where assignments are many, blocks share a plan: all run at once, each tells the others its counters, and after a
// barrier of the grid each sums up what all blocks have, and what those before it have. Sums of integers: atomics that
// add them give the same in any order. Chunks that no registers hold are looked at twice.
//
// Bytes moved: assignments are read once, each row and assignment is written once, plus counters.
#include <cooperative_groups.h>

#include <algorithm>

#include "common/cuda/counting.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "moe/cuda/launch.h"

namespace jaxgpuops::moe {
namespace {

namespace cg = cooperative_groups;

constexpr int kItems = kMostHeld / 32;  // of a lane, in registers

extern __shared__ int32_t shared[];

// From totals of experts, which they overwrite, to the offsets of groups, in shared memory; `sizes` and `group_offsets`
// may be null.
__device__ __forceinline__ void find_offsets(const PlanProblem& p, int32_t* offsets, int32_t* sizes,
                                             int32_t* group_offsets) {
  __shared__ int64_t sums[32];
  const int64_t each = (p.experts + blockDim.x - 1) / blockDim.x;
  const int64_t first = min(threadIdx.x * each, p.experts), last = min(first + each, p.experts);
  int64_t sum = 0, total;
  for (int64_t e = first; e < last; ++e) sum += p.padded(offsets[e]);
  int64_t offset = sum_before(sum, sums, blockDim.x / 32, total);
  for (int64_t e = first; e < last; ++e) {
    const int64_t found = offsets[e];
    offsets[e] = static_cast<int32_t>(offset);
    if (sizes) sizes[e] = static_cast<int32_t>(p.kept(found));
    if (group_offsets) group_offsets[e] = static_cast<int32_t>(offset);
    offset += p.padded(found);
  }
  if (group_offsets && threadIdx.x == 0) group_offsets[p.experts] = static_cast<int32_t>(total);
  __syncthreads();
}

// Rows that no assignment takes keep this. Each block has a part of them.
__device__ __forceinline__ void clear(const PlanProblem& p, int32_t* assignment_of_row) {
  const int64_t part = (p.rows + gridDim.x - 1) / gridDim.x;
  const int64_t begin = min(blockIdx.x * part, p.rows), end = min(begin + part, p.rows);
  for (int64_t r = begin + threadIdx.x; r < end; r += blockDim.x) assignment_of_row[r] = -1;
}

__device__ __forceinline__ Routes routes_of(const PlanProblem& p, const Routes& all, int64_t o) {
  return {all.experts + o * p.assignments,           all.assignment_of_row + o * p.rows,
          all.row_of_assignment + o * p.assignments, all.sizes + o * p.experts,
          all.offsets + o * (p.experts + 1),         all.workspace + o * gridDim.x * p.experts};
}

// From the counters of warps to what the block's earlier warps have of each expert, and what all have in `totals`.
__device__ __forceinline__ void sum_warps(const PlanProblem& p, int32_t* counters, int32_t* totals) {
  const int warps = blockDim.x / 32;
  for (int64_t e = threadIdx.x; e < p.experts; e += blockDim.x) {
    int32_t sum = 0;
    for (int w = 0; w < warps; ++w) {
      const int32_t found = counters[w * p.experts + e];
      counters[w * p.experts + e] = sum;
      sum += found;
    }
    totals[e] = sum;
  }
}

// From the block's totals to those of all blocks, and what earlier blocks have in `before`. `told` has the totals of
// each block.
__device__ __forceinline__ void sum_blocks(const PlanProblem& p, int32_t* told, int32_t* totals, int32_t* before) {
  for (int64_t e = threadIdx.x; e < p.experts; e += blockDim.x) {
    told[blockIdx.x * p.experts + e] = totals[e];
    totals[e] = 0;
  }
  cg::this_grid().sync();
  const auto experts = static_cast<uint32_t>(p.experts), count = gridDim.x * experts;
  constexpr int kBatch = 8;  // loads that a thread waits for at once
  for (uint32_t first = threadIdx.x; first < count; first += kBatch * blockDim.x) {
    int32_t found[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const uint32_t i = first + j * blockDim.x;
      found[j] = i < count ? told[i] : 0;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (found[j] == 0) continue;
      const uint32_t i = first + j * blockDim.x, e = i % experts;
      atomicAdd(totals + e, found[j]);
      if (i / experts < blockIdx.x) atomicAdd(before + e, found[j]);
    }
  }
}

// Assignments as an expert or -1, and where they go.
struct Place {
  const PlanProblem& p;
  const Routes& routes;
  const int32_t* offsets;
  const int32_t* before;

  __device__ __forceinline__ int32_t expert_of(int64_t a, int64_t end) const {
    const int32_t e = a < end ? routes.experts[a] : -1;
    return e >= 0 && e < p.experts ? e : -1;
  }
  // `rank`: how many of the expert's assignments the block has before this one.
  __device__ __forceinline__ void put(int64_t a, int32_t e, int64_t rank) const {
    if (e >= 0) rank += before[e];
    const bool kept = e >= 0 && (p.capacity < 0 || rank < p.capacity);
    const int64_t row = kept ? offsets[e] + rank : -1;
    routes.row_of_assignment[a] = static_cast<int32_t>(row);
    if (kept && row < p.rows) routes.assignment_of_row[row] = static_cast<int32_t>(a);
  }
};

template <bool kHeld>
__global__ void __launch_bounds__(1024) route_kernel(PlanProblem p, Routes all, int64_t chunk) {
  const Routes routes = routes_of(p, all, blockIdx.y);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int32_t* const offsets = shared;  // one for each expert, as `before`; then counters[warp][expert]
  int32_t* const before = offsets + p.experts;
  int32_t* const counters = before + p.experts;
  int32_t* const own = counters + warp * p.experts;
  for (int64_t i = threadIdx.x; i < (warps + 1) * p.experts; i += blockDim.x) before[i] = 0;
  clear(p, routes.assignment_of_row);
  __syncthreads();

  const Place place{p, routes, offsets, before};
  const int64_t begin = min((int64_t{blockIdx.x} * warps + warp) * chunk, p.assignments);
  const int64_t end = min(begin + chunk, p.assignments);
  int32_t held[kItems];  // experts, then what is known of their assignments: expert and rank, or -1
  if constexpr (kHeld) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) held[i] = place.expert_of(begin + 32 * i + lane, end);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (begin + 32 * i >= end) continue;
      const int32_t rank = rank_in_warp(held[i], own);
      if (held[i] >= 0) held[i] = held[i] << 16 | rank;
    }
  } else {
    for (int64_t first = begin; first < end; first += 32) rank_in_warp(place.expert_of(first + lane, end), own);
  }
  __syncthreads();
  sum_warps(p, counters, offsets);
  if (gridDim.x > 1) sum_blocks(p, routes.workspace, offsets, before);
  __syncthreads();
  const bool tells = blockIdx.x == 0;
  find_offsets(p, offsets, tells ? routes.sizes : nullptr, tells ? routes.offsets : nullptr);

  if constexpr (kHeld) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t a = begin + 32 * i + lane;
      const int32_t e = held[i] >> 16;  // of -1, -1
      if (a < end) place.put(a, e, e < 0 ? 0 : own[e] + (held[i] & 0xffff));
    }
  } else {
    for (int64_t first = begin; first < end; first += 32) {
      const int64_t a = first + lane;
      const int32_t e = place.expert_of(a, end), rank = rank_in_warp(e, own);
      if (a < end) place.put(a, e, rank);
    }
  }
}

// The blocks that run at once, whichever form of the kernel they run.
cudaError_t count_residents(const Launch& shape, int64_t& blocks) {
  static Residents of_held, of_looked_at_twice;
  int held = 0, looked_at_twice = 0;
  auto status = of_held.count(reinterpret_cast<const void*>(route_kernel<true>), shape, &held);
  if (status == cudaSuccess)
    status = of_looked_at_twice.count(reinterpret_cast<const void*>(route_kernel<false>), shape, &looked_at_twice);
  blocks = std::min(held, looked_at_twice);
  return status;
}

}  // namespace

cudaError_t launch_route(cudaStream_t stream, const Plan& plan, const PlanProblem& problem, const Routes& routes) {
  if (problem.outer == 0) return cudaSuccess;
  Launch shape;
  shape.block = dim3(32 * plan.warps);
  shape.shared_bytes = static_cast<size_t>(plan.shared_bytes);
  int64_t blocks = plan.blocks;
  if (blocks > 1) {
    int64_t fitting = 0;
    if (const auto status = count_residents(shape, fitting); status != cudaSuccess) return status;
    blocks = std::max<int64_t>(std::min(blocks, fitting / problem.outer), 1);
  }
  shape.grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(problem.outer));
  shape.together = blocks > 1;
  const int64_t chunk = chunk_of(problem, blocks * plan.warps);
  return launch(stream, shape, chunk <= kMostHeld ? route_kernel<true> : route_kernel<false>, problem, routes, chunk);
}

}  // namespace jaxgpuops::moe
