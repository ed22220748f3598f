// moe_plan: a stable counting sort of the assignments by expert, without atomics.
//
// Each warp has a chunk of the assignments, and a counter for each expert in shared memory. It counts 32 assignments at
// a time: lanes whose assignments go to the same expert find each other by __match_any_sync, and the first of them adds
// their number to the counter. Then the counters are summed over the warps for each expert, and the experts' totals
// become the offsets of groups. A second pass over the assignments finds the row of each: the offset of its group, plus
// the assignments of the same expert in earlier warps, earlier in its warp, and in lower lanes.
//
// If there are few assignments, or many plans, one block does all of it in one launch. Otherwise blocks share a plan,
// and there are three launches: count, sum and place. Bytes moved: assignments are read twice (the second time from
// L2), each row and assignment is written once, and counters are written and read.
#include "common/cuda/launch.cuh"
#include "moe/cuda/launch.h"

namespace jaxgpuops::moe {
namespace {

// Experts of a block of route_sum_kernel, and the parts into which it divides the warps.
constexpr int kSumExperts = 32, kSumParts = 32;

extern __shared__ int32_t shared[];

// The assignments of a warp.
struct Chunk {
  const int32_t* experts;
  int64_t begin, end;
  int32_t count;  // number of experts

  // Calls see(assignment, its expert or -1, lanes with the same expert) in all lanes, for 32 assignments at a time.
  template <class See>
  __device__ __forceinline__ void each(const See& see) const {
    const int lane = threadIdx.x % 32;
    for (int64_t first = begin; first < end; first += 32) {
      const int64_t a = first + lane;
      const int32_t e = a < end ? experts[a] : -1;
      const bool valid = e >= 0 && e < count;
      const uint32_t same = __match_any_sync(0xffffffffu, valid ? e : -1);
      see(a, valid ? e : -1, same);
      __syncwarp();
    }
  }
};

__device__ __forceinline__ Chunk chunk_of(const PlanProblem& p, const int32_t* experts, int64_t chunk, int64_t warp) {
  const int64_t begin = min(warp * chunk, p.assignments), end = min(begin + chunk, p.assignments);
  return {experts, begin, end, static_cast<int32_t>(p.experts)};
}

__device__ __forceinline__ void count(const Chunk& chunk, int32_t* counters) {
  chunk.each([&](int64_t, int32_t e, uint32_t same) {
    if (e >= 0 && static_cast<int>(threadIdx.x % 32) == __ffs(same) - 1) counters[e] += __popc(same);
  });
}

// Finds the row of each assignment of a chunk. `counters` hold how many assignments each expert has in earlier warps,
// and `offsets` where its group begins.
__device__ __forceinline__ void place(const PlanProblem& p, const Chunk& chunk, int32_t* counters,
                                      const int32_t* offsets, int32_t* row_of_assignment, int32_t* assignment_of_row) {
  const int lane = threadIdx.x % 32;
  chunk.each([&](int64_t a, int32_t e, uint32_t same) {
    const int32_t before = e >= 0 ? counters[e] : 0;
    __syncwarp();
    if (e >= 0 && lane == __ffs(same) - 1) counters[e] = before + __popc(same);
    const int64_t rank = before + __popc(same & ((1u << lane) - 1));
    const bool kept = e >= 0 && (p.capacity < 0 || rank < p.capacity);
    const int64_t row = kept ? offsets[e] + rank : -1;
    if (a < chunk.end) row_of_assignment[a] = static_cast<int32_t>(row);
    if (kept && row < p.rows) assignment_of_row[row] = static_cast<int32_t>(a);
  });
}

// Returns the sum over all lower threads, and sets `total` to the sum over all threads. All threads of the block must
// call it; a block has whole warps, at most 32.
__device__ __forceinline__ int64_t exclusive_sum(int64_t value, int64_t& total) {
  __shared__ int64_t sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int64_t sum = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int64_t before = 0;
  total = 0;
  for (int w = 0; w < warps; ++w) {
    if (w == warp) before = total;
    total += sums[w];
  }
  return before + sum - value;
}

// Replaces the totals of experts in `offsets`, which is in shared memory, by the offsets of their groups, and also
// writes these and the sizes of groups to memory unless the pointers are null.
__device__ __forceinline__ void find_offsets(const PlanProblem& p, int32_t* offsets, int32_t* sizes,
                                             int32_t* group_offsets) {
  const int64_t each = (p.experts + blockDim.x - 1) / blockDim.x;
  const int64_t first = min(threadIdx.x * each, p.experts), last = min(first + each, p.experts);
  int64_t sum = 0, total;
  for (int64_t e = first; e < last; ++e) sum += p.padded(offsets[e]);
  int64_t offset = exclusive_sum(sum, total);
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

// Sets rows to -1, the value that rows without an assignment keep.
__device__ __forceinline__ void clear(int32_t* assignment_of_row, int64_t begin, int64_t end) {
  for (int64_t r = begin + threadIdx.x; r < end; r += blockDim.x) assignment_of_row[r] = -1;
}

__device__ __forceinline__ Routes routes_of(const PlanProblem& p, const Routes& all, int64_t o) {
  return {all.experts + o * p.assignments,           all.assignment_of_row + o * p.rows,
          all.row_of_assignment + o * p.assignments, all.sizes + o * p.experts,
          all.offsets + o * (p.experts + 1),         all.workspace};
}

__global__ void __launch_bounds__(1024) route_kernel(PlanProblem p, Routes all, int64_t chunk) {
  const Routes routes = routes_of(p, all, blockIdx.x);
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int32_t* const offsets = shared;  // offsets[expert]; counters[warp][expert] follow in shared memory
  int32_t* const counters = shared + p.experts;
  for (int64_t i = threadIdx.x; i < warps * p.experts; i += blockDim.x) counters[i] = 0;
  clear(routes.assignment_of_row, 0, p.rows);
  __syncthreads();
  const Chunk mine = chunk_of(p, routes.experts, chunk, warp);
  count(mine, counters + warp * p.experts);
  __syncthreads();
  for (int64_t e = threadIdx.x; e < p.experts; e += blockDim.x) {
    int32_t sum = 0;
    for (int w = 0; w < warps; ++w) {
      const int32_t found = counters[w * p.experts + e];
      counters[w * p.experts + e] = sum;
      sum += found;
    }
    offsets[e] = sum;
  }
  __syncthreads();
  find_offsets(p, offsets, routes.sizes, routes.offsets);
  place(p, mine, counters + warp * p.experts, offsets, routes.row_of_assignment, routes.assignment_of_row);
}

// Returns a plan's workspace, which has counters[warp][expert] for the warps of all blocks, then totals[expert].
__device__ __forceinline__ int32_t* counters_of(const PlanProblem& p, const Routes& all, int64_t warps) {
  return all.workspace + blockIdx.y * p.experts * (warps + 1);
}

__global__ void __launch_bounds__(1024) route_count_kernel(PlanProblem p, Routes all, int64_t chunk) {
  const Routes routes = routes_of(p, all, blockIdx.y);
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t part = (p.rows + gridDim.x - 1) / gridDim.x;
  clear(routes.assignment_of_row, min(blockIdx.x * part, p.rows), min((blockIdx.x + 1) * part, p.rows));
  for (int64_t i = threadIdx.x; i < warps * p.experts; i += blockDim.x) shared[i] = 0;
  __syncthreads();
  count(chunk_of(p, routes.experts, chunk, int64_t{blockIdx.x} * warps + warp), shared + warp * p.experts);
  __syncthreads();
  int32_t* const counters = counters_of(p, all, int64_t{gridDim.x} * warps) + blockIdx.x * warps * p.experts;
  for (int64_t i = threadIdx.x; i < warps * p.experts; i += blockDim.x) counters[i] = shared[i];
}

// Turns the counters of warps into sums over earlier warps. In a block, x is the expert, and y the part of the warps.
__global__ void __launch_bounds__(kSumExperts* kSumParts) route_sum_kernel(PlanProblem p, Routes all, int64_t warps) {
  __shared__ int32_t sums[kSumParts][kSumExperts];
  int32_t* const counters = counters_of(p, all, warps);
  const int64_t e = int64_t{blockIdx.x} * kSumExperts + threadIdx.x, each = (warps + kSumParts - 1) / kSumParts;
  const int64_t first = min(threadIdx.y * each, warps), last = e < p.experts ? min(first + each, warps) : first;
  int32_t sum = 0;
#pragma unroll 4
  for (int64_t w = first; w < last; ++w) sum += counters[w * p.experts + e];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  int32_t before = 0;
  for (int part = 0; part < kSumParts; ++part) {
    if (part == static_cast<int>(threadIdx.y)) sum = before;
    before += sums[part][threadIdx.x];
  }
#pragma unroll 4
  for (int64_t w = first; w < last; ++w) {
    const int32_t found = counters[w * p.experts + e];
    counters[w * p.experts + e] = sum;
    sum += found;
  }
  if (threadIdx.y == 0 && e < p.experts) counters[warps * p.experts + e] = before;
}

__global__ void __launch_bounds__(1024) route_place_kernel(PlanProblem p, Routes all, int64_t chunk) {
  const Routes routes = routes_of(p, all, blockIdx.y);
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t all_warps = int64_t{gridDim.x} * warps;
  int32_t* const offsets = shared;
  int32_t* const mine = shared + p.experts;
  const int32_t* const counters = counters_of(p, all, all_warps);
  for (int64_t e = threadIdx.x; e < p.experts; e += blockDim.x) offsets[e] = counters[all_warps * p.experts + e];
  for (int64_t i = threadIdx.x; i < warps * p.experts; i += blockDim.x)
    mine[i] = counters[blockIdx.x * warps * p.experts + i];
  __syncthreads();
  const bool tells = blockIdx.x == 0;
  find_offsets(p, offsets, tells ? routes.sizes : nullptr, tells ? routes.offsets : nullptr);
  place(p, chunk_of(p, routes.experts, chunk, int64_t{blockIdx.x} * warps + warp), mine + warp * p.experts, offsets,
        routes.row_of_assignment, routes.assignment_of_row);
}

}  // namespace

cudaError_t launch_route(cudaStream_t stream, const Plan& plan, const PlanProblem& problem, const Routes& routes) {
  if (problem.outer == 0) return cudaSuccess;
  const dim3 block(32 * plan.warps);
  const auto shared_bytes = static_cast<size_t>(plan.shared_bytes);
  const auto outer = static_cast<unsigned>(problem.outer), blocks = static_cast<unsigned>(plan.blocks);
  if (plan.blocks == 1)
    return launch(stream, {dim3(outer), block, shared_bytes}, route_kernel, problem, routes, plan.chunk);
  const dim3 grid(blocks, outer);
  if (const auto status = launch(stream, {grid, block, shared_bytes}, route_count_kernel, problem, routes, plan.chunk);
      status != cudaSuccess)
    return status;
  const auto columns = static_cast<unsigned>((problem.experts + kSumExperts - 1) / kSumExperts);
  if (const auto status = launch(stream, {dim3(columns, outer), dim3(kSumExperts, kSumParts)}, route_sum_kernel,
                                 problem, routes, plan.blocks * plan.warps);
      status != cudaSuccess)
    return status;
  return launch(stream, {grid, block, shared_bytes}, route_place_kernel, problem, routes, plan.chunk);
}

}  // namespace jaxgpuops::moe
