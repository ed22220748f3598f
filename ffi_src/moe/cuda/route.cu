// moe_plan: a counting sort of assignments by expert, stable, in one launch.
//
// A warp has a chunk of the assignments and a counter for each expert in shared memory. It looks at 32 assignments at a
// time: lanes whose assignments go to the same expert find each other by a vote on each bit of the expert's number, and
// the first of these lanes adds their number to the counter. So each lane learns how many of the warp's assignments
// before its own go to the same expert, and keeps that in a register. For each expert, the counters are then summed up
// over the warps, and from the experts' totals follow the offsets of their groups.
//
// Blocks that share a plan exchange their totals, so that each knows the totals over all blocks and over those before
// it. In a cluster, each block writes its totals to the shared memory of every block. If there are no clusters, or the
// problem is too large for one, all blocks run at the same time and exchange totals through the workspace: each block
// adds up all of them or, if they are many, clusters add up theirs first (of very many experts, each block adds up
// those of some experts, for all blocks).
//
// A block that has many assignments first puts them into order in shared memory, so that neighbouring
// threads write neighbouring rows. A chunk that does not fit in registers is read twice. Few experts have counters in
// registers (route_few.cuh), and few assignments need none (route_warp.cuh).
//
// Bytes moved: assignments are read once, each row and assignment is written once, plus totals.
#include <cooperative_groups.h>

#include <algorithm>

#include "common/cuda/counting.cuh"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "common/rounding.h"
#include "moe/cuda/launch.h"
#include "moe/cuda/route.cuh"
#include "moe/cuda/route_few.cuh"
#include "moe/cuda/route_warp.cuh"

namespace jaxgpuops::moe {
namespace {

namespace cg = cooperative_groups;

constexpr int kAtOnce = 2;  // assignments that a lane ranks together
constexpr int kBatch = 8;   // loads that a thread has in flight together

// Arrays in shared memory that have a number for each expert.
struct Board {
  int32_t experts, each;  // each: experts of a thread
  int32_t* starts;        // the row of the block's first assignment to the expert
  int32_t* ends;          // the end of the rows that the expert's assignments take
  // First how many assignments the block has for the expert; then, if staged, where these begin among all of the
  // block's.
  int32_t* places;
  int32_t* told;      // for each block of the cluster, a row of how many assignments it has for each expert
  int32_t* counters;  // a row for each warp
  int32_t* staged;    // the block's assignments in the order of experts

  __device__ __forceinline__ Board(const PlanProblem& p, const Geometry& g) {
    extern __shared__ int32_t shared[];
    experts = static_cast<int32_t>(p.experts);
    each = g.each;
    starts = shared;
    ends = starts + experts;
    places = g.staged ? ends + experts : ends;
    told = places + experts;
    counters = told + g.told_rows * experts;
    staged = counters + blockDim.x / 32 * experts;
  }
};

// Calls body(e) for the experts of this thread, which are neighbours.
template <class Body>
__device__ __forceinline__ void for_own_experts(const Board& board, const Body& body) {
  const int32_t first = min(static_cast<int32_t>(threadIdx.x) * board.each, board.experts);
  const int32_t last = min(first + board.each, board.experts);
  for (int32_t e = first; e < last; ++e) body(e);
}

// For each key (an expert): how many assignments to it come before the lane's, in earlier calls, which the warp's
// counters hold, in earlier keys, and in lower lanes. A key of -1 means no assignment. All lanes must call it.
template <int kKeys>
__device__ __forceinline__ void rank_in_warp(const int32_t (&key)[kKeys], int bits, int32_t* counters,
                                             int32_t (&rank)[kKeys]) {
  unsigned same[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) same[i] = __ballot_sync(kEveryLane, key[i] >= 0);
#pragma unroll 1
  for (int bit = 0; bit < bits; ++bit) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const bool set = key[i] >> bit & 1;
      const unsigned lanes = __ballot_sync(kEveryLane, set);
      same[i] &= set ? lanes : ~lanes;
    }
  }
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const unsigned lower = same[i] & lanes_below();
    const int32_t before = key[i] >= 0 ? counters[key[i]] : 0;
    __syncwarp();
    if (key[i] >= 0 && lower == 0) counters[key[i]] = before + __popc(same[i]);
    __syncwarp();
    rank[i] = before + __popc(lower);
  }
}

// Replaces the counter of each warp and expert by the sum of that expert's counters over earlier warps; the sum over
// all warps goes to `places`.
__device__ __forceinline__ void sum_warps(const Board& board) {
  const int warps = blockDim.x / 32;
  for_own_experts(board, [&](int32_t e) {
    int32_t *counter = board.counters + e, sum = 0;
    const auto next = [&](auto count) {  // without a question for each counter, which took a microsecond
      int32_t found[count()];
#pragma unroll
      for (int j = 0; j < count(); ++j) found[j] = counter[j * board.experts];
#pragma unroll
      for (int j = 0; j < count(); ++j) {
        counter[j * board.experts] = sum;
        sum += found[j];
      }
      counter += count() * board.experts;
    };
    int w = 0;
#pragma unroll 1
    for (; w + kBatch <= warps; w += kBatch) next(std::integral_constant<int, kBatch>());
#pragma unroll 1
    for (; w < warps; ++w) next(std::integral_constant<int, 1>());
    board.places[e] = sum;
  });
}

// Sends the totals of block `rank` to each of the `size` blocks of the cluster.
__device__ __forceinline__ void tell_cluster(const Board& board, unsigned rank, unsigned size) {
  for_own_experts(board, [&](int32_t e) {
    const int32_t own = board.places[e];
    for (unsigned r = 0; r < size; ++r) store_in_cluster(board.told + rank * board.experts + e, r, own);
  });
  __syncwarp();
  arrive_at_cluster_barrier();
  wait_at_cluster_barrier();
}

// Each block adds up the totals of all blocks in `ends`, and those of the blocks before it in `starts`.
__device__ __forceinline__ void tell_grid(const Board& board, int32_t* totals) {
  const auto experts = static_cast<uint32_t>(board.experts), count = gridDim.x * experts;
  for_own_experts(board, [&](int32_t e) {
    totals[blockIdx.x * experts + e] = board.places[e];
    board.ends[e] = board.starts[e] = 0;
  });
  cg::this_grid().sync();
  for (uint32_t first = threadIdx.x; first < count; first += kBatch * blockDim.x) {
    int32_t found[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const uint32_t i = first + j * blockDim.x;
      found[j] = i < count ? totals[i] : 0;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (found[j] == 0) continue;
      const uint32_t i = first + j * blockDim.x, e = i % experts;
      atomicAdd(board.ends + e, found[j]);
      if (i / experts < blockIdx.x) atomicAdd(board.starts + e, found[j]);
    }
  }
  __syncthreads();
}

// The same where totals are many: a warp adds up those of an expert for all blocks, and all wait once more.
__device__ __forceinline__ void tell_grid_twice(const Board& board, int32_t* totals) {
  const auto blocks = static_cast<int32_t>(gridDim.x), warps = static_cast<int32_t>(blockDim.x / 32);
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = blockIdx.x;
  int32_t* const sums = totals + blocks * board.experts;
  for_own_experts(board, [&](int32_t e) { totals[e * blocks + block] = board.places[e]; });
  cg::this_grid().sync();
  for (int32_t e = warp * blocks + block; e < board.experts; e += warps * blocks) {
    int32_t* const own = totals + e * blocks;
    int32_t sum = 0;
    for (int32_t first = 0; first < blocks; first += kBatch * 32) {
      int32_t found[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int32_t b = first + 32 * j + lane;
        found[j] = b < blocks ? own[b] : 0;
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int32_t b = first + 32 * j + lane, up_to = sum_up_to_lane(found[j]);
        if (b < blocks) own[b] = sum + up_to - found[j];
        sum += __shfl_sync(kEveryLane, up_to, 31);
      }
    }
    if (lane == 0) sums[e] = sum;
  }
  cg::this_grid().sync();
  for_own_experts(board, [&](int32_t e) {
    board.ends[e] = __ldcg(sums + e);
    board.starts[e] = __ldcg(totals + e * blocks + block);
  });
  __syncthreads();
}

// The same where blocks are in clusters: a cluster adds up its totals, and then clusters exchange the sums.
__device__ __forceinline__ void tell_clusters(const Board& board, int32_t* totals, unsigned size) {
  const unsigned rank = blockIdx.x % size, own = blockIdx.x / size, clusters = gridDim.x / size;
  tell_cluster(board, rank, size);
  for_own_experts(board, [&](int32_t e) {
    int32_t found = 0, before = 0;
#pragma unroll 8
    for (unsigned r = 0; r < size; ++r) {
      const int32_t told = board.told[r * board.experts + e];
      found += told;
      if (r < rank) before += told;
    }
    if (rank == 0) totals[own * board.experts + e] = found;
    board.starts[e] = before;
  });
  cg::this_grid().sync();
  for_own_experts(board, [&](int32_t e) {
    int32_t found = 0, before = board.starts[e];
#pragma unroll 8
    for (unsigned c = 0; c < clusters; ++c) {
      const int32_t total = __ldcg(totals + c * board.experts + e);
      found += total;
      if (c < own) before += total;
    }
    board.ends[e] = found;
    board.starts[e] = before;
  });
  __syncthreads();
}

// From the blocks' totals, computes where each group begins and where the block's part of it begins. Returns where the
// last group ends and, if assignments are staged, how many the block has.
template <Algorithm kAlgorithm, class Sum>
__device__ __forceinline__ int2 find_starts(const PlanProblem& p, const Board& board, const Routes& routes) {
  __shared__ Sum sums[32];
  const bool tells = blockIdx.x == 0;
  constexpr bool kStaged = sizeof(Sum) == 8;  // the low half of a sum counts the block's own assignments
  constexpr int kRows = kStaged ? 32 : 0;
  Sum sum = 0, total;
  for_own_experts(board, [&](int32_t e) {
    int32_t found = board.places[e], before = 0;
    if constexpr (kAlgorithm == Algorithm::kCluster) {
      found = 0;
#pragma unroll 8
      for (unsigned r = 0; r < gridDim.x; ++r) {
        const int32_t told = board.told[r * board.experts + e];
        found += told;
        if (r < blockIdx.x) before += told;
      }
    }
    if constexpr (kAlgorithm == Algorithm::kGrid) found = board.ends[e], before = board.starts[e];
    board.starts[e] = before;
    board.ends[e] = found;
    sum += (static_cast<Sum>(p.padded(found)) << kRows) + (kStaged ? board.places[e] : 0);
  });
  const int with_experts = min(blockDim.x, board.experts + 31) / 32;  // warps whose threads have experts
  Sum at = sum_before(sum, sums, with_experts, total);
  for_own_experts(board, [&](int32_t e) {
    const int32_t found = board.ends[e], own = board.places[e], offset = static_cast<int32_t>(at >> kRows);
    const auto kept = static_cast<int32_t>(p.kept(found));
    board.starts[e] += offset;
    board.ends[e] = offset + kept;
    if (kStaged) board.places[e] = static_cast<int32_t>(at);
    if (tells) routes.sizes[e] = kept, routes.offsets[e] = offset;
    at += (static_cast<Sum>(p.padded(found)) << kRows) + (kStaged ? own : 0);
  });
  if (tells && threadIdx.x == 0) routes.offsets[board.experts] = static_cast<int32_t>(total >> kRows);
  __syncthreads();
  return {static_cast<int32_t>(total >> kRows), static_cast<int32_t>(total)};
}

// Each lane holds kItems assignments in registers. If kItems is 0, the chunk is read twice instead.
template <Algorithm kAlgorithm, int kItems>
__global__ void __launch_bounds__(1024) route_kernel(PlanProblem p, Routes all, Geometry g) {
  if constexpr (kAlgorithm != Algorithm::kBlock) arrive_at_cluster_start();
  const Routes routes = routes_of(p, all, blockIdx.y);
  const Board board(p, g);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int32_t* const own = board.counters + warp * board.experts;
  const int64_t first_of_block = int64_t{blockIdx.x} * warps * g.chunk;
  const int64_t begin = min(first_of_block + warp * g.chunk, p.assignments);
  const int64_t end = min(begin + g.chunk, p.assignments);
  const auto expert_of = [&](int64_t a) {
    const int32_t e = a < end ? routes.experts[a] : -1;
    return e >= 0 && e < board.experts ? e : -1;
  };
  // The row of the block's assignment number `rank` to expert e, or -1 if it is not kept.
  const auto row_of = [&](int32_t e, int32_t rank) {
    const int32_t row = board.starts[e] + rank;
    return row < board.ends[e] ? row : -1;
  };
  const auto put = [&](int32_t row, int64_t a) {
    if (row >= 0 && row < p.rows) routes.assignment_of_row[row] = static_cast<int32_t>(a);
  };

  constexpr bool kHeld = kItems > 0;
  // First the expert of each assignment, later the expert and the rank in one word, or -1.
  int32_t held[kHeld ? kItems : 1];
  if constexpr (kHeld) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) held[i] = expert_of(begin + 32 * i + lane);
  }
  for (int32_t e = lane; e < board.experts; e += 32) own[e] = 0;
  __syncwarp();
  if constexpr (kHeld) {
#pragma unroll
    for (int i = 0; i < kItems; i += kAtOnce) {
      if (begin + 32 * i >= end) break;
      int32_t key[kAtOnce], rank[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) key[j] = held[i + j];
      rank_in_warp(key, g.expert_bits, own, rank);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) held[i + j] = key[j] >= 0 ? key[j] << 16 | rank[j] : -1;
    }
  } else {
    for (int64_t first = begin; first < end; first += 32) {
      const int32_t key[1] = {expert_of(first + lane)};
      int32_t rank[1];
      rank_in_warp(key, g.expert_bits, own, rank);
    }
  }
  __syncthreads();
  if constexpr (kAlgorithm != Algorithm::kBlock)
    wait_at_cluster_barrier();  // until all blocks of the cluster have begun
  sum_warps(board);
  if constexpr (kAlgorithm == Algorithm::kCluster) tell_cluster(board, blockIdx.x, gridDim.x);
  if constexpr (kAlgorithm == Algorithm::kGrid) {
    if (g.told_rows)
      tell_clusters(board, routes.workspace, g.told_rows);
    else if (g.twice)
      tell_grid_twice(board, routes.workspace);
    else
      tell_grid(board, routes.workspace);
  }
  const auto [total, count] = kHeld && g.staged ? find_starts<kAlgorithm, int64_t>(p, board, routes)
                                                : find_starts<kAlgorithm, int32_t>(p, board, routes);

  if constexpr (kHeld) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t a = begin + 32 * i + lane;
      if (a >= end) break;
      const int32_t e = held[i] >> 16;  // the expert of the assignment, or -1 if the word is -1
      const int32_t rank = e < 0 ? 0 : own[e] + (held[i] & 0xffff), row = e < 0 ? -1 : row_of(e, rank);
      routes.row_of_assignment[a] = row;
      if (!g.staged)
        put(row, a);
      else if (e >= 0)
        board.staged[board.places[e] + rank] = e << 16 | static_cast<int32_t>(a - first_of_block);
    }
  } else {
    for (int64_t first = begin; first < end; first += 32) {
      const int64_t a = first + lane;
      const int32_t key[1] = {expert_of(a)};
      int32_t rank[1];
      rank_in_warp(key, g.expert_bits, own, rank);
      if (a >= end) continue;
      const int32_t row = key[0] < 0 ? -1 : row_of(key[0], rank[0]);
      routes.row_of_assignment[a] = row;
      put(row, a);
    }
  }
  fill(p, [&](int32_t e) { return board.ends[e]; }, total, routes.assignment_of_row);
  if (kHeld && g.staged) {
    __syncthreads();
    for (int32_t i = threadIdx.x; i < count; i += blockDim.x) {
      const int32_t word = board.staged[i], e = word >> 16;
      put(row_of(e, i - board.places[e]), first_of_block + (word & 0xffff));
    }
  }
}

// How many blocks of kGrid the GPU runs at once, for any form of the kernel.
cudaError_t count_residents(const Launch& shape, int64_t& blocks) {
  static Residents of_held, of_looked_at_twice;
  int held = 0, looked_at_twice = 0;
  auto status =
      of_held.count(reinterpret_cast<const void*>(route_kernel<Algorithm::kGrid, kMostHeld / 32>), shape, &held);
  if (status == cudaSuccess)
    status = of_looked_at_twice.count(reinterpret_cast<const void*>(route_kernel<Algorithm::kGrid, 0>), shape,
                                      &looked_at_twice);
  blocks = int64_t{shape.cluster} * std::min(held, looked_at_twice);
  return status;
}

using Kernel = void (*)(PlanProblem, Routes, Geometry);

template <Algorithm kAlgorithm, int kItems>
Kernel kernel_that_holds(const PlanProblem& problem, const Geometry& g) {
  constexpr int kRanked = std::max(kItems, kAtOnce);
  if (g.staged) return route_kernel<kAlgorithm, kRanked>;
  return problem.experts <= 32    ? route_few_kernel<kAlgorithm, kItems, 1>
         : problem.experts <= 64  ? route_few_kernel<kAlgorithm, kItems, 2>
         : problem.experts <= 128 ? route_few_kernel<kAlgorithm, kItems, 4>
                                  : route_kernel<kAlgorithm, kRanked>;
}

// Chooses the kernel whose lanes hold as many assignments as needed, or few more, since instructions for more
// assignments take time even if they are skipped.
template <Algorithm kAlgorithm>
Kernel kernel_of(const PlanProblem& problem, const Geometry& g) {
  if constexpr (kAlgorithm == Algorithm::kBlock)
    if (g.chunk <= 32) return kernel_that_holds<kAlgorithm, 1>(problem, g);
  if constexpr (kAlgorithm != Algorithm::kGrid) {
    if (g.chunk <= 64) return kernel_that_holds<kAlgorithm, 2>(problem, g);
    if (g.chunk <= kClusterHeld) return kernel_that_holds<kAlgorithm, kClusterHeld / 32>(problem, g);
  }
  if constexpr (kAlgorithm == Algorithm::kCluster)
    return nullptr;  // plans give a warp of a cluster no more
  else
    return g.chunk <= kMostHeld ? route_kernel<kAlgorithm, kMostHeld / 32> : route_kernel<kAlgorithm, 0>;
}

template <Algorithm kAlgorithm>
cudaError_t launch_with(cudaStream_t stream, const Plan& plan, const PlanProblem& problem, const Routes& routes) {
  Launch shape;
  shape.block = dim3(32 * plan.warps);
  shape.shared_bytes = static_cast<size_t>(plan.shared_bytes);
  int64_t blocks = plan.blocks;
  if (kAlgorithm == Algorithm::kGrid) {
    int64_t fitting = 0;
    shape.cluster = plan.cluster;
    if (const auto status = count_residents(shape, fitting); status != cudaSuccess) return status;
    blocks = std::max<int64_t>(std::min(blocks, fitting / problem.outer) / plan.cluster, 1) * plan.cluster;
    shape.together = true;
  }
  // Fewer blocks than planned would have no room to put more assignments into order.
  Geometry geometry{chunk_of(problem, blocks * plan.warps), 0, static_cast<int>(told_rows(plan)),
                    plan.staged && blocks == plan.blocks, plan.twice};
  geometry.each = static_cast<int>(ceil_div(problem.experts, shape.block.x));
  geometry.expert_bits = bits_for(problem.experts);
  const auto kernel = kernel_of<kAlgorithm>(problem, geometry);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  if (kAlgorithm == Algorithm::kCluster) {
    shape.cluster = static_cast<int>(blocks);
    const auto status = allow_cluster(reinterpret_cast<const void*>(kernel), shape.cluster);
    if (status != cudaSuccess) return status;
  }
  shape.grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(problem.outer));
  return launch(stream, shape, kernel, problem, routes, geometry);
}

}  // namespace

cudaError_t launch_route(cudaStream_t stream, const Plan& plan, const PlanProblem& problem, const Routes& routes) {
  if (problem.outer == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(problem.outer));
  switch (plan.algorithm) {
    case Algorithm::kWarp: return launch(stream, {grid, dim3(32)}, route_warp_kernel, problem, routes);
    case Algorithm::kBlock: return launch_with<Algorithm::kBlock>(stream, plan, problem, routes);
    case Algorithm::kCluster: return launch_with<Algorithm::kCluster>(stream, plan, problem, routes);
    default: return launch_with<Algorithm::kGrid>(stream, plan, problem, routes);
  }
}

}  // namespace jaxgpuops::moe
