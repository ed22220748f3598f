// Top-k of short columns, of short rows of 64-bit elements, and of many very short rows, for k of at most 8. A lane, or
// several of one warp, reads a row or column from its end to its beginning, and keeps the best elements in order in
// registers. Each element takes its place among them by k comparisons, which do not wait for each other. Lanes that
// share a row then merge what they have by bitonic networks, and all of them have the result.
//
// Since indices fall, an element goes before all those that have the same key. The places that have no element yet have
// key 0, and so they come after any.
//
// Bytes moved: the input once, and k results (value and index).
#include <type_traits>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/rounding.h"
#include "topk/cuda/few_shape.h"
#include "topk/cuda/kernels.h"

namespace jaxgpuops::topk {
namespace {

struct Few : Call {
  uint32_t rows;       // rows or columns in all
  uint32_t lane_bits;  // the logarithm of FewShape::lanes
};

constexpr uint32_t kNone = ~0u;  // the index of a place that has no element

// The best elements so far, the first one at place 0.
template <class Word, int kBest>
struct Best {
  Word keys[kBest];
  uint32_t indices[kBest];

  __device__ __forceinline__ Best() {
#pragma unroll
    for (int s = 0; s < kBest; ++s) keys[s] = 0, indices[s] = kNone;
  }

  // Adds an element whose index is less than those of all others.
  __device__ __forceinline__ void add(Word key, uint32_t index) {
    bool before[kBest];
#pragma unroll
    for (int s = 0; s < kBest; ++s) before[s] = key >= keys[s];
#pragma unroll
    for (int s = kBest - 1; s >= 0; --s) {
      const int previous = s ? s - 1 : 0;
      const bool moves = s && before[previous];
      keys[s] = moves ? keys[previous] : before[s] ? key : keys[s];
      indices[s] = moves ? indices[previous] : before[s] ? index : indices[s];
    }
  }

  // Orders two places.
  __device__ __forceinline__ void exchange(int s, int t) {
    const bool swaps = keys[t] > keys[s] || (keys[t] == keys[s] && indices[t] < indices[s]);
    const Word key = keys[s];
    const uint32_t index = indices[s];
    keys[s] = swaps ? keys[t] : key, indices[s] = swaps ? indices[t] : index;
    keys[t] = swaps ? key : keys[t], indices[t] = swaps ? index : indices[t];
  }

  // Keeps the best of this lane and of the one whose number differs by `distance`. The best of two lists are the better
  // ones of each element of one and its counterpart in the other one, which is in reverse order.
  __device__ __forceinline__ void merge(uint32_t distance) {
    Word other_keys[kBest];
    uint32_t others[kBest];
#pragma unroll
    for (int s = 0; s < kBest; ++s) {
      other_keys[s] = __shfl_xor_sync(kEveryLane, keys[kBest - 1 - s], distance);
      others[s] = __shfl_xor_sync(kEveryLane, indices[kBest - 1 - s], distance);
    }
#pragma unroll
    for (int s = 0; s < kBest; ++s) {
      const bool better = other_keys[s] > keys[s] || (other_keys[s] == keys[s] && others[s] < indices[s]);
      if (better) keys[s] = other_keys[s], indices[s] = others[s];
    }
#pragma unroll
    for (int stride = kBest / 2; stride; stride /= 2)
#pragma unroll
      for (int s = 0; s < kBest; ++s)
        if (!(s & stride)) exchange(s, s + stride);
  }
};

template <class Key, int kBest>
__global__ void __launch_bounds__(kFewThreads) few_kernel(const __grid_constant__ Few a) {
  using Word = std::conditional_t<sizeof(Key) == 8, uint64_t, uint32_t>;
  // The lanes of a row are neighbours. Of columns, those that read the same row of neighbouring columns are.
  const uint32_t lane = threadIdx.x % 32, lanes = 1u << a.lane_bits, row_bits = 5 - a.lane_bits;
  const bool columns = a.inner > 1;
  const uint32_t own = columns ? lane >> row_bits : lane & (lanes - 1);
  const uint32_t place = columns ? lane & ((1u << row_bits) - 1) : lane >> a.lane_bits;
  const uint32_t first = (blockIdx.x * (kFewThreads / 32) + threadIdx.x / 32) << row_bits;
  if (first >= a.rows) return;  // the whole warp
  const uint32_t row = min(first + place, a.rows - 1), inner = static_cast<uint32_t>(a.inner);
  const uint32_t outer = columns ? row / inner : row, column = columns ? row - outer * inner : 0;
  const Key* const x = static_cast<const Key*>(a.x) + int64_t{outer} * a.length * inner + column;

  Best<Word, kBest> best;
  const int64_t step = a.inner << a.lane_bits;                   // from one element of the lane to the next
  const uint32_t steps = (a.length + lanes - 1) >> a.lane_bits;  // its elements
  uint32_t start = (steps - 1) / kFewLoads * kFewLoads;          // the first one of those that it loads at once
  const Key* from = x + (int64_t{start} << a.lane_bits) * inner + int64_t{own} * inner;
#pragma unroll 1
  for (;; start -= kFewLoads, from -= kFewLoads * step) {
    const uint32_t index = (start << a.lane_bits) + own;
    Key bits[kFewLoads];
    const Key* at = from;
#pragma unroll
    for (uint32_t u = 0; u < kFewLoads; ++u, at += step)
      bits[u] = index + (u << a.lane_bits) < a.length ? __ldg(at) : Key{0};
#pragma unroll
    for (int u = kFewLoads - 1; u >= 0; --u) {
      if (start + u >= steps) continue;
      // Only a lane's first element may be beyond the end. It takes an empty place, and goes behind all others.
      const uint32_t i = index + (u << a.lane_bits);
      best.add(i < a.length ? encode(bits[u], a.order) : Key{0}, i);
    }
    if (start == 0) break;
  }
#pragma unroll 1
  for (uint32_t distance = 1; distance < lanes; distance *= 2) best.merge(columns ? distance << row_bits : distance);

  if (first + place >= a.rows) return;
  const int64_t to = int64_t{outer} * a.k * inner + column;
#pragma unroll
  for (int s = 0; s < kBest; ++s) {
    if ((s & (lanes - 1)) != own || s >= a.k) continue;
    uint32_t at = s;
    if (!a.sorted) {  // the number of results with lesser indices
      at = 0;
#pragma unroll
      for (int t = 0; t < kBest; ++t) at += t < a.k && best.indices[t] < best.indices[s];
    }
    if (a.values)
      static_cast<Key*>(a.values)[to + int64_t{at} * inner] = decode(static_cast<Key>(best.keys[s]), a.order);
    a.indices[to + int64_t{at} * inner] = static_cast<int32_t>(best.indices[s]);
  }
}

}  // namespace

cudaError_t launch_few(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  Few a = {call_of(problem, buffers)};
  a.rows = static_cast<uint32_t>(problem.rows.count());
  a.lane_bits = bits_for(plan.lanes);
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(kFewThreads);
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    const auto kernel = problem.k <= 2 ? few_kernel<Key, 2> : problem.k <= 4 ? few_kernel<Key, 4> : few_kernel<Key, 8>;
    return launch(stream, config, kernel, a);
  });
}

}  // namespace jaxgpuops::topk
