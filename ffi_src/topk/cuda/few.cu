// Top-k of short columns, of short rows of 64-bit elements, and of many very short rows, for k of at most 8. A lane, or
// several of one warp, reads a row or column from its end to its beginning, and keeps the best elements in order in
// registers. Each element takes its place among them by k comparisons, which do not wait for each other. Lanes that
// share a row then merge what they have by bitonic networks, and all of them have the result. Long columns are shared
// by all warps of a block, which then merge their lists; the largest elements of the lanes give a threshold early, and
// only elements that reach it are compared.
//
// Since indices fall, an element goes before all those that have the same key. The places that have no element yet have
// key 0, and so they come after any.
//
// Bytes moved: the input once, and k results (value and index).
#include <algorithm>
#include <type_traits>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/rounding.h"
#include "topk/cuda/few_shape.h"
#include "topk/cuda/kernels.h"
#include "topk/cuda/quotient.cuh"

namespace jaxgpuops::topk {
namespace {

struct Few : Call {
  uint32_t rows;       // rows or columns in all
  uint32_t lane_bits;  // the logarithm of the number of lanes of a warp that share a row
  uint32_t warp_bits;  // that of the number of warps that do
  // For tiles: their rows and the bytes of these, whether rows have a gap between them, the units of a row, and their
  // reciprocal.
  uint32_t tile, tile_bytes;
  bool gap;
  uint32_t row_units, reciprocal;
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

// Returns the k-th largest of the keys that the lanes of a block have for a column, one each. `parts` lanes do: 64 or
// 128.
template <class Word>
__device__ __noinline__ Word kth_of_columns(Word key, uint32_t column, uint32_t part, uint32_t parts, uint32_t k) {
  constexpr int kEach = 128 / 32;
  __shared__ Word keys[kFewColumns][kEach * 32], kth[kFewColumns];
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  keys[column][part] = key;
  __syncthreads();
  if (warp < kFewColumns) {
    Word own[kEach], most = 0;
#pragma unroll
    for (uint32_t j = 0; j < kEach; ++j) own[j] = j * 32 < parts ? keys[warp][j * 32 + lane] : Word{0};
#pragma unroll 1
    for (uint32_t i = 0; i < k; ++i) {
      Word mine = own[0];
#pragma unroll
      for (int j = 1; j < kEach; ++j) mine = max(mine, own[j]);
      most = largest_of_warp(mine);
      if (lane + 1 != __ffs(static_cast<int>(__ballot_sync(kEveryLane, mine == most)))) continue;
      bool taken = false;
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (!taken && own[j] == most) own[j] = 0, taken = true;
    }
    if (lane == 0) kth[warp] = most;
  }
  __syncthreads();
  return kth[column];
}

// Writes the results of a row, or a lane's share of them: `to` is where the first one belongs, `step` how far apart
// they are.
template <class Key, class Word, int kBest>
__device__ __forceinline__ void write(const Few& a, const Best<Word, kBest>& best, int64_t to, uint32_t step,
                                      uint32_t writers, uint32_t writer) {
#pragma unroll
  for (int s = 0; s < kBest; ++s) {
    if ((s & (writers - 1)) != writer || s >= a.k) continue;
    uint32_t at = s;
    if (!a.sorted) {  // the number of results with lesser indices
      at = 0;
#pragma unroll
      for (int t = 0; t < kBest; ++t) at += t < a.k && best.indices[t] < best.indices[s];
    }
    if (a.values)
      static_cast<Key*>(a.values)[to + int64_t{at} * step] = decode(static_cast<Key>(best.keys[s]), a.order);
    a.indices[to + int64_t{at} * step] = static_cast<int32_t>(best.indices[s]);
  }
}

// Copies results from shared memory to where they belong, in whole vectors if these are aligned.
template <class T>
__device__ __forceinline__ void copy_out(T* to, const T* from, uint32_t count) {
  constexpr uint32_t kVector = 16 / sizeof(T);
  const uint32_t vectors = reinterpret_cast<uintptr_t>(to) % 16 == 0 ? count / kVector : 0;
  for (uint32_t v = threadIdx.x; v < vectors; v += kFewThreads)
    reinterpret_cast<uint4*>(to)[v] = reinterpret_cast<const uint4*>(from)[v];
  for (uint32_t i = vectors * kVector + threadIdx.x; i < count; i += kFewThreads) to[i] = from[i];
}

// Many short rows: a block copies neighbouring rows to shared memory in whole vectors. A lane has each row, or several;
// then results leave in whole vectors, too. Rows whose length is an even number of units have one unit more between
// them, so that lanes read from different banks.
template <class Key, int kBest>
__global__ void __launch_bounds__(kFewThreads) few_tile_kernel(const __grid_constant__ Few a) {
  using Word = std::conditional_t<sizeof(Key) == 8, uint64_t, uint32_t>;
  constexpr uint32_t kUnits = 16 / sizeof(Word), kVector = 16 / sizeof(Key);
  struct alignas(16) Vector {
    Word unit[kUnits];
  };
  auto* const units = reinterpret_cast<Word*>(dynamic_shared_memory());
  const uint32_t first = blockIdx.x * a.tile, rows = min(a.rows - first, a.tile);
  const Key* const x = static_cast<const Key*>(a.x) + int64_t{first} * a.length;
  const auto* const in = reinterpret_cast<const Vector*>(x);
  const bool aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0;
  const uint32_t elements = rows * a.length, vectors = aligned ? elements / kVector : 0;
  // The place of a unit of the tile in shared memory.
  const auto place = [&](uint32_t unit) { return unit + (a.gap ? quotient(unit, a.row_units, a.reciprocal) : 0u); };
#pragma unroll 4
  for (uint32_t v = threadIdx.x; v < vectors; v += kFewThreads) {
    const Vector vector = in[v];
    if (!a.gap) {
      reinterpret_cast<Vector*>(units)[v] = vector;
      continue;
    }
#pragma unroll
    for (uint32_t u = 0; u < kUnits; ++u) units[place(v * kUnits + u)] = vector.unit[u];
  }
  constexpr uint32_t kEach = sizeof(Word) / sizeof(Key);  // elements of a unit
  for (uint32_t e = vectors * kVector + threadIdx.x; e < elements; e += kFewThreads)
    reinterpret_cast<Key*>(units + place(e / kEach))[e % kEach] = x[e];
  __syncthreads();
  const bool collects = a.tile > kFewThreads;
  const int64_t to = int64_t{first} * a.k;
  Few results = a;  // the results of the tile, in shared memory or where they belong
  results.indices += to;
  if (a.values) results.values = static_cast<Key*>(a.values) + to;
  if (collects) {
    results.indices = reinterpret_cast<int32_t*>(dynamic_shared_memory() + a.tile_bytes);
    results.values = a.values ? results.indices + a.tile * a.k : nullptr;
  }
#pragma unroll 1
  for (uint32_t r = threadIdx.x; r < rows; r += kFewThreads) {
    const Key* const row = reinterpret_cast<const Key*>(units + (a.gap ? r : 0)) + r * a.length;
    Best<Word, kBest> best;
    uint32_t i = a.length;
#pragma unroll 1
    for (; i >= kFewLoads; i -= kFewLoads) {
      Key bits[kFewLoads];
#pragma unroll
      for (uint32_t u = 0; u < kFewLoads; ++u) bits[u] = row[i - 1 - u];
#pragma unroll
      for (uint32_t u = 0; u < kFewLoads; ++u) best.add(encode(bits[u], a.order), i - 1 - u);
    }
#pragma unroll 1
    for (; i > 0; --i) best.add(encode(row[i - 1], a.order), i - 1);
    write<Key>(results, best, int64_t{r} * a.k, 1, 1, 0);
  }
  if (!collects) return;
  __syncthreads();
  copy_out(a.indices + to, results.indices, rows * a.k);
  if (a.values) copy_out(static_cast<Key*>(a.values) + to, static_cast<const Key*>(results.values), rows * a.k);
}

// kShared: all warps of a block share its rows.
template <class Key, int kBest, bool kShared>
__global__ void __launch_bounds__(kShared ? 1024 : kFewThreads) few_kernel(const __grid_constant__ Few a) {
  using Word = std::conditional_t<sizeof(Key) == 8, uint64_t, uint32_t>;
  constexpr int kLoads = kShared && sizeof(Key) < 8 ? 2 * kFewLoads : kFewLoads;
  // The lanes of a row are neighbours. Of columns, those that read the same row of neighbouring columns are.
  const uint32_t lane = threadIdx.x % 32, lanes = 1u << a.lane_bits, row_bits = 5 - a.lane_bits;
  const bool columns = a.inner > 1;
  const uint32_t own = columns ? lane >> row_bits : lane & (lanes - 1);
  const uint32_t place = columns ? lane & ((1u << row_bits) - 1) : lane >> a.lane_bits;
  const uint32_t warp = threadIdx.x / 32, inner = static_cast<uint32_t>(a.inner);
  const uint32_t first = (kShared ? blockIdx.x : blockIdx.x * (kFewThreads / 32) + warp) << row_bits;
  if (first >= a.rows) return;  // the whole warp, or block
  uint32_t row = min(first + place, a.rows - 1), outer = columns ? row / inner : row;
  uint32_t column = columns ? row - outer * inner : 0;
  const Key* const x = static_cast<const Key*>(a.x) + int64_t{outer} * a.length * inner + column;

  Best<Word, kBest> best;
  // The places of the row are dealt out to the parts that read it, of which the lane is one.
  const uint32_t part_bits = a.lane_bits + a.warp_bits, part = (kShared ? warp << a.lane_bits : 0) + own;
  const int64_t step = a.inner << part_bits;                               // from one element of the lane to the next
  const uint32_t steps = (a.length + (1u << part_bits) - 1) >> part_bits;  // its elements
  uint32_t start = (steps - 1) / kLoads * kLoads;  // the first one of those that it loads at once
  const Key* from = x + (int64_t{start} << part_bits) * inner + int64_t{part} * inner;
  Word floor = 0, top = 0;  // k elements of the row reach `floor`; the lane's largest key
  int rounds = 0;
#pragma unroll 1
  for (;; start -= kLoads, from -= kLoads * step) {
    const uint32_t index = (start << part_bits) + part;
    Key bits[kLoads];
    const Key* at = from;
#pragma unroll
    for (uint32_t u = 0; u < kLoads; ++u, at += step)
      bits[u] = index + (u << part_bits) < a.length ? __ldg(at) : Key{0};
    if constexpr (kShared) {
      if (rounds++ < 2) {  // the first round may be short
#pragma unroll
        for (uint32_t u = 0; u < kLoads; ++u)
          if (index + (u << part_bits) < a.length) top = max(top, Word{encode(bits[u], a.order)});
        floor = kth_of_columns(top, place, part, 1u << part_bits, a.k);
      }
    }
#pragma unroll
    for (int u = kLoads - 1; u >= 0; --u) {
      if (start + u >= steps) continue;
      // Only a lane's first element may be beyond the end. It takes an empty place, and goes behind all others.
      const uint32_t i = index + (u << part_bits);
      const Word key = i < a.length ? encode(bits[u], a.order) : Key{0};
      if (!kShared || __any_sync(kEveryLane, key >= floor)) best.add(key, i);
    }
    if (start == 0) break;
  }
#pragma unroll 1
  for (uint32_t distance = 1; distance < lanes; distance *= 2) best.merge(columns ? distance << row_bits : distance);

  uint32_t writers = lanes, writer = own;  // the lanes that write a row's results
  bool live = first + place < a.rows;
  if constexpr (kShared) {
    __shared__ Word keys[kFewColumns][32][kBest];
    __shared__ uint32_t indices[kFewColumns][32][kBest];
    if (own == 0) {
#pragma unroll
      for (int s = 0; s < kBest; ++s) keys[place][warp][s] = best.keys[s], indices[place][warp][s] = best.indices[s];
    }
    __syncthreads();
    const uint32_t warps = 1u << a.warp_bits, of = threadIdx.x / warps;  // so many lanes merge a column
    if (of >= kFewColumns) return;
#pragma unroll
    for (int s = 0; s < kBest; ++s)
      best.keys[s] = keys[of][lane % warps][s], best.indices[s] = indices[of][lane % warps][s];
#pragma unroll 1
    for (uint32_t distance = 1; distance < warps; distance *= 2) best.merge(distance);
    row = min(first + of, a.rows - 1), outer = columns ? row / inner : row, column = columns ? row - outer * inner : 0;
    writers = warps, writer = lane % warps, live = first + of < a.rows;
  }

  if (live) write<Key>(a, best, int64_t{outer} * a.k * inner + column, inner, writers, writer);
}

}  // namespace

cudaError_t launch_few(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  Few a = {call_of(problem, buffers)};
  a.rows = static_cast<uint32_t>(problem.rows.count());
  const bool shared = plan.threads > kFewThreads;  // by all warps of a block
  a.lane_bits = bits_for(shared ? 32 / kFewColumns : plan.lanes);
  a.warp_bits = bits_for(shared ? plan.threads / 32 : 1);
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(plan.threads);
  config.shared_bytes = plan.shared_bytes;
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    if (plan.shared_bytes > 0) {
      constexpr int64_t kUnit = std::max<int64_t>(4, sizeof(Key));
      const int64_t bytes = problem.rows.length * sizeof(Key);
      a.tile = static_cast<uint32_t>(few_tile(a.rows, problem.rows.length, sizeof(Key)));
      a.tile_bytes = static_cast<uint32_t>(few_tile_bytes(a.tile, problem.rows.length, sizeof(Key)));
      a.gap = bytes % (2 * kUnit) == 0;
      a.row_units = static_cast<uint32_t>(bytes / kUnit);
      a.reciprocal = a.gap ? reciprocal(a.row_units) : 0;
      return launch(stream, config,
                    problem.k <= 2   ? few_tile_kernel<Key, 2>
                    : problem.k <= 4 ? few_tile_kernel<Key, 4>
                                     : few_tile_kernel<Key, 8>,
                    a);
    }
    const auto pick = [&](auto is_shared) {
      constexpr bool kShared = is_shared;
      return problem.k <= 2   ? few_kernel<Key, 2, kShared>
             : problem.k <= 4 ? few_kernel<Key, 4, kShared>
                              : few_kernel<Key, 8, kShared>;
    };
    return launch(stream, config, shared ? pick(std::true_type()) : pick(std::false_type()), a);
  });
}

}  // namespace jaxgpuops::topk
