// Few numbers of 32 or 64 bits whose fold is the same in any order: atomics fold them into the results. A thread has
// one row of a column, or four neighbouring ones, of which it folds those of one segment. Up to 16 columns belong to a
// team of lanes. If several teams of a warp have rows of the segment that the first lane has, the lanes fold these,
// too. So if one segment has most rows, few atomics wait for each other.
//
// Passes: one, after a launch that sets the results. Bytes moved: each id and number is read once, and each result is
// written twice.
#include <cuda_runtime.h>

#include "common/cuda/set_words.h"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "segments/cuda/args.cuh"
#include "segments/cuda/atomics.cuh"

namespace jaxgpuops::segments {
namespace {

constexpr uint32_t kNone = ~0u;  // the row is in no segment

struct Args : SegmentArgs {
  using SegmentArgs::SegmentArgs;
  uint32_t blocks;       // of an outer index
  uint32_t team, width;  // lanes of a team, threads that have a row
};

template <class Monoid, int kRows>
__global__ void __launch_bounds__(kScatterThreads) segment_scatter_kernel(const __grid_constant__ Args a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  const uint32_t o = blockIdx.x / a.blocks, place = (blockIdx.x - o * a.blocks) * kScatterThreads + threadIdx.x;
  const uint32_t group = place / a.width, column = place - group * a.width;
  const int32_t* const ids = a.ids + a.ids_at(o);
  const Bits* const data = static_cast<const Bits*>(a.data) + a.data_at(o) + column;
  uint32_t id[kRows];
  Bits bits[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = int64_t{group} * kRows + i;
    const bool has = row < a.length && column < a.inner;
    id[i] = has ? static_cast<uint32_t>(ids[row]) : kNone;
    bits[i] = has ? data[row * a.inner] : Bits{0};
  }
  Acc acc[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) acc[i] = Monoid::load(bits[i], a.keys);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (id[i] >= a.segments) id[i] = kNone;
#pragma unroll
    for (int j = 0; j < i; ++j) {
      if (id[j] == kNone || id[j] != id[i]) continue;
      acc[i] = Monoid::fold(acc[i], acc[j]);
      id[j] = kNone;
    }
  }
  uint32_t hot = kNone;  // the segment that lanes fold
  Acc sum = Monoid::identity();
  if (a.team <= kMostScatterTeam) {
    hot = __shfl_sync(kEveryLane, id[kRows - 1], 0);
    bool has = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (id[i] != hot || hot == kNone) continue;
      sum = acc[i];
      has = true;
    }
    if (static_cast<uint32_t>(__popc(__ballot_sync(kEveryLane, has))) > a.team) {
      for (uint32_t lanes = a.team; lanes < 32; lanes *= 2) sum = Monoid::fold(sum, shuffle_xor(sum, lanes));
#pragma unroll
      for (uint32_t& own : id)
        if (own == hot) own = kNone;
    } else {
      hot = kNone;
    }
    if (threadIdx.x % 32 >= a.inner) hot = kNone;
  }
  const auto operand_of = [&](Acc x) {
    if constexpr (is_extreme<Monoid>) return extreme_operand<Monoid>(x, a.keys);
    return x;
  };
  sum = operand_of(sum);
#pragma unroll
  for (Acc& own : acc) own = operand_of(own);
  wait_for_predecessor();  // which sets the results
  Bits* const out = static_cast<Bits*>(a.out) + int64_t{o} * a.segments * a.inner + column;
  const auto put = [&](uint32_t to, Acc operand) {
    if (to == kNone) return;
    if constexpr (is_extreme<Monoid>) {
      atomic_extreme(out + to * a.inner, operand, a.keys);
    } else {
      atomic_fold<false>(out + to * a.inner, operand);
    }
  };
  put(hot, sum);
#pragma unroll
  for (int i = 0; i < kRows; ++i) put(id[i], acc[i]);
}

}  // namespace

cudaError_t launch_segment_scatter(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                   const SegmentsBuffers& buffers) {
  Args a(problem, buffers);
  a.blocks = static_cast<uint32_t>(plan.tiles);
  a.team = 1u << plan.team_bits;
  a.width = a.team <= kMostScatterTeam ? a.team : static_cast<uint32_t>(a.inner);
  const int64_t words = a.outer * a.segments * a.inner * bytes_of(problem.dtype) / 4;
  const auto empty = static_cast<uint32_t>(a.keys.empty);
  const cudaError_t status =
      launch_set_words(stream, static_cast<uint32_t*>(a.out), words, empty,
                       bytes_of(problem.dtype) == 8 ? static_cast<uint32_t>(a.keys.empty >> 32) : empty);
  if (status != cudaSuccess) return status;
  Launch config;
  config.block = dim3(kScatterThreads);
  config.grid = dim3(static_cast<unsigned>(a.outer * a.blocks));
  config.overlap = plan.overlap;
  return dispatch_monoid(problem, [&](auto monoid) {
    using Monoid = decltype(monoid);
    if constexpr (sizeof(typename Monoid::Bits) < 4 || is_exact<Monoid>) {
      return cudaErrorInvalidValue;  // plans never choose this kernel for them
    } else {
      const auto kernel =
          plan.rows == 1 ? segment_scatter_kernel<Monoid, 1> : segment_scatter_kernel<Monoid, kScatterRows>;
      return launch(stream, config, kernel, a);
    }
  });
}

}  // namespace jaxgpuops::segments
