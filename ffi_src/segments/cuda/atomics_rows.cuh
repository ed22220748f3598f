// How warps share rows, and go through them, where atomics fold them: of atomics.cu and atomics_wide.cu. A policy says
// what an accumulator is, and how a row is folded into one.
//
// If many lanes of a warp have the same segment, their atomics would wait for each other. So a warp has one hot
// segment, which many of its rows had recently, and folds the rows of that segment before it takes an atomic.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "segments/cuda/args.cuh"

namespace jaxgpuops::segments {
namespace {

constexpr int kThreads = 256;
// A warp loads Policy::kSteps groups of 32 rows at a time, of which so many look at their accumulators together, before
// any of their atomics. With more, an accumulator is older when it is compared, so more rows seem to be larger and take
// an atomic.
constexpr int kLooks = 2;
// A segment becomes hot if it has so many of the rows just loaded; for fewer, atomics one by one are as fast.
constexpr int kMany = 8;
constexpr uint32_t kNone = ~0u;

struct Args : SegmentArgs {
  int64_t run, runs;  // rows of a warp; warps that share the rows of a chunk of columns
  int64_t chunks;
  int team_bits;  // 2^team_bits lanes have a row
  bool looks;     // whether accumulators of extremes are looked at before an atomic
  ExactShape exact;
  int table_bins;  // bins that a block has in shared memory

  // The rows of an outer index, in the order in which warps share them.
  Args(const SegmentsPlan& plan, const Segments& problem, const SegmentsBuffers& buffers)
      : SegmentArgs(problem, buffers),
        run(plan.rows),
        runs(plan.tiles),
        chunks((inner + (int64_t{1} << plan.team_bits) - 1) >> plan.team_bits),
        team_bits(plan.team_bits),
        looks(plan.looks),
        exact(plan.exact),
        table_bins(plan.table_bins) {}

  JAXGPUOPS_HOST_DEVICE int64_t cells() const { return segments * inner; }
  // The word of an outer index that has a bit for each accumulator that any segment has used.
  __device__ uint32_t* marks(int64_t o) const { return reinterpret_cast<uint32_t*>(workspace + o * workspace_bytes); }
};

// Folds rows from `begin` on and before `end`. All lanes of a warp call it.
template <class Policy>
__device__ __forceinline__ void fold_rows(const Args& a, Policy& policy, int64_t begin, int64_t end) {
  using Bits = typename Policy::Bits;
  constexpr int kSteps = Policy::kSteps;
  const int lane = threadIdx.x & 31, of_team = lane & ((1 << a.team_bits) - 1), step = 32 >> a.team_bits;
  const bool live = policy.column < a.inner;
  const int looked = step < 4 ? kSteps : 1, many = max(3, kMany >> a.team_bits);
  const int32_t* const ids = a.ids + a.ids_at(policy.o);
  const Bits* const data = static_cast<const Bits*>(a.data) + a.data_at(policy.o) + policy.column;
  for (int64_t start = begin; start < end; start += step * kSteps) {
    uint32_t id[kSteps];
    Bits bits[kSteps];
    // How many of the rows just loaded have the id `own`.
    const auto rows_with = [&](uint32_t own) {
      int rows = 0;
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        if (i < looked) rows += __popc(__ballot_sync(kEveryLane, id[i] == own && of_team == 0));
      return rows;
    };
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int64_t at = start + step * i + (lane >> a.team_bits);
      const bool has = at < end && live;
      id[i] = has ? static_cast<uint32_t>(ids[at]) : kNone;
      bits[i] = has ? data[at * a.inner] : Bits{0};
    }
    wait_for_predecessor();  // which sets the accumulators
    policy.begin(bits[0]);
#pragma unroll
    for (uint32_t& own : id)
      if (own >= a.segments) own = kNone;
    // If nine rows in ten have one segment, the first row may be the tenth.
    bool is_cold = rows_with(policy.hot) < many;
#pragma unroll
    for (int from = 0; from < 32 && is_cold; from += 16) {
      const uint32_t candidate = __shfl_sync(kEveryLane, id[0], from);
      if (candidate == policy.hot || rows_with(candidate) < many) continue;
      policy.flush();
      policy.hot = candidate;
      is_cold = false;
    }
#pragma unroll
    for (int first = 0; first < kSteps; first += kLooks) {
      decltype(policy.peek(0)) seen[kLooks];
#pragma unroll
      for (int i = 0; i < kLooks; ++i) seen[i] = policy.peek(id[first + i]);
#pragma unroll
      for (int i = 0; i < kLooks; ++i) {
        const uint32_t own = id[first + i];
        if (step * (first + i) < end - start)
          policy.add(own, bits[first + i], own == policy.hot && own != kNone, seen[i]);
      }
    }
  }
}

template <class Policy>
__global__ void __launch_bounds__(kThreads, Policy::kBlocks) segment_atomics_kernel(const __grid_constant__ Args a) {
  // For extremes, blocks take rows from both ends of the array in turn. If numbers rise or fall along the array, the
  // first blocks then meet the largest ones, and most later numbers take no atomic.
  unsigned block = blockIdx.x;
  if (Policy::kFromEnds) block = block % 2 ? gridDim.x - 1 - block / 2 : block / 2;
  const int64_t warp = (static_cast<int64_t>(block) * kThreads + threadIdx.x) / 32;
  // Divisions of 64-bit numbers would take as long as some rows.
  int64_t place = warp, chunk = 0, o = 0;
  if (a.chunks > 1) place = warp / a.chunks, chunk = warp - place * a.chunks;
  if (place >= a.runs) o = a.outer > 1 ? place / a.runs : 1;
  const int64_t run = place - o * a.runs;
  if (o >= a.outer) return;
  Policy policy(a, o, static_cast<int>(chunk << a.team_bits) + (threadIdx.x & ((1 << a.team_bits) - 1)));
  fold_rows(a, policy, run * a.run, min(a.length, (run + 1) * a.run));
  if constexpr (!Policy::kInPlace) let_dependents_start();  // segment_finish_kernel
  policy.flush();
  policy.end();
}

template <class Policy>
__global__ void __launch_bounds__(kThreads) segment_finish_kernel(const __grid_constant__ Args a) {
  wait_for_predecessor();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads, cells = a.cells();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < a.outer * cells; i += stride)
    Policy::finish(a, a.outer > 1 ? i / cells : 0, a.outer > 1 ? i % cells : i);
}

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>(std::clamp<int64_t>((threads + kThreads - 1) / kThreads, 1, 132 * 8));
}

}  // namespace
}  // namespace jaxgpuops::segments
