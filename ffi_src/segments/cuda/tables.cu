// A moderate number of segments, whose rows have few columns. A block has one column and a slice of the ids, which its
// warps share in neighbouring parts. For sums of float64, each warp has a table of all segments in shared memory. Lanes
// of a warp with equal ids find each other with match_any and fold their numbers in a tree, so that a table has one
// writer for a segment at a time. The tables of a block are folded in the order of its warps, and a second kernel folds
// those of the slices in their order. So the order of additions follows from the length and the ids. If one segment has
// most of the ids, a fold of 32 of them takes five steps. Sums of other floats are exact (atomics.cu).
//
// The largest of numbers is the same in any order, and so is a sum of integers, so for them a block has one table. Most
// numbers are not larger than what is there; the others take an atomic.
//
// Bytes moved: each id and each number is read once, and each slice writes a table, which is read again.
#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "segments/cuda/tables.cuh"

namespace jaxgpuops::segments {
namespace {

constexpr int kSliceThreads = 256;
constexpr int kSteps = 8;  // groups of 32 ids that a warp loads before it folds them

using Args = Slices;

template <class Monoid>
using Word = TableWord<Monoid>;
template <class Monoid>
constexpr bool kOne = has_one_table<Monoid>;
template <class Monoid>
constexpr bool kHalves = has_halves<Monoid>;
template <class Monoid>
constexpr int kTables = kOne<Monoid> ? 1 : kTableThreads / 32;

// Shuffles a number of any width.
template <class T>
__device__ __forceinline__ T shuffled(T value, int lane) {
  if constexpr (sizeof(T) < 4) {
    return static_cast<T>(__shfl_sync(kEveryLane, static_cast<uint32_t>(value), lane));
  } else {
    return shuffle_from(value, lane);
  }
}

// Four numbers of neighbouring rows.
template <class Bits>
struct alignas(sizeof(Bits) < 8 ? 4 * sizeof(Bits) : 16) Four {
  Bits value[4];
};

template <class Monoid>
__global__ void __launch_bounds__(kOne<Monoid> ? kExtremeThreads : kTableThreads) segment_tables_kernel(Args a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  auto* tables = reinterpret_cast<Word<Monoid>*>(dynamic_shared_memory());
  auto* const low = reinterpret_cast<uint32_t*>(tables);  // for kHalves
  const int64_t column = blockIdx.x % a.inner, slice = blockIdx.x / a.inner % a.slices;
  const int64_t o = blockIdx.x / a.inner / a.slices;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, threads = blockDim.x, warps = threads / 32;
  for (int s = threadIdx.x; s < kTables<Monoid> * a.segments; s += threads) tables[s] = Monoid::identity();
  __syncthreads();

  const int32_t* ids = a.ids + a.ids_at(o);
  const Bits* data = static_cast<const Bits*>(a.data) + a.data_at(o) + column;
  const int64_t first = slice * a.slice, stop = min(a.length, first + a.slice);
  // With one table the order does not matter. Then the warps of a block take neighbouring groups of rows in turn, which
  // memory delivers faster than rows far apart, and every other warp begins at the end of the slice: if numbers rise or
  // fall along it, the block soon meets the largest ones, and most others take no atomic.
  constexpr int kGroup = 32 * kSteps;
  const int64_t share = ((a.slice + warps - 1) / warps + 31) / 32 * 32;
  const int64_t begin = kOne<Monoid> ? first : first + warp * share;
  const int64_t end = kOne<Monoid> ? stop : min(stop, begin + share), groups = (end - begin + kGroup - 1) / kGroup;
  const bool vectors = kOne<Monoid> && a.inner == 1 && reinterpret_cast<uintptr_t>(ids + first) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(data + first) % alignof(Four<Bits>) == 0;
  for (int64_t turn = kOne<Monoid> ? warp : 0; turn < groups; turn += kOne<Monoid> ? warps : 1) {
    const int64_t group = !kOne<Monoid> ? turn : turn % 2 ? groups - 1 - turn / 2 : turn / 2;
    const int64_t start = begin + group * kGroup;
    uint32_t id[kSteps];
    Acc number[kSteps];
    if (vectors && start + kGroup <= end) {
#pragma unroll
      for (int i = 0; i < kSteps; i += 4) {
        const int64_t at = start + 32 * i + 4 * lane;
        const auto own = *reinterpret_cast<const Four<uint32_t>*>(ids + at);
        const auto numbers = *reinterpret_cast<const Four<Bits>*>(data + at);
#pragma unroll
        for (int j = 0; j < 4; ++j) id[i + j] = own.value[j], number[i + j] = Monoid::load(numbers.value[j], a.keys);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int64_t at = start + 32 * i + lane;
        id[i] = at < end ? static_cast<uint32_t>(ids[at]) : ~0u;
        number[i] = at < end ? Monoid::load(data[at * a.inner], a.keys) : Monoid::identity();
      }
    }
    if constexpr (is_extreme<Monoid>) {
      Word<Monoid> seen[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const bool has = id[i] < static_cast<uint32_t>(a.segments);
        seen[i] = has ? tables[id[i]] : Monoid::kAll;
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        if (seen[i] < number[i]) atomic_fold<true>(tables + id[i], static_cast<Word<Monoid>>(number[i]));
      continue;
    } else if constexpr (kOne<Monoid>) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        // Lanes with one id would wait for each other.
        const bool same = __all_sync(kEveryLane, id[i] == __shfl_sync(kEveryLane, id[i], 0));
        if constexpr (kHalves<Monoid>) {
          if (same) number[i] = sum_of_lanes(number[i]);
        } else {
          if (same) number[i] = sum_of_warp(number[i]);
        }
        if (id[i] < static_cast<uint32_t>(a.segments) && (!same || lane == 0)) {
          if constexpr (kHalves<Monoid>) {
            add_halves(low + id[i], low + a.segments + id[i], number[i]);
          } else {
            atomicAdd(tables + id[i], number[i]);
          }
        }
      }
      continue;
    }
    Word<Monoid>* const table = tables + warp * a.segments;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const unsigned peers = __match_any_sync(kEveryLane, id[i]);
      const unsigned before = peers & ((1u << lane) - 1);
      unsigned after = peers & ~(before | 1u << lane);
      int rank = __popc(before);
      while (__any_sync(kEveryLane, after != 0)) {
        const int next = __ffs(after);
        const Acc other = shuffled(number[i], next ? next - 1 : lane);
        if (next) number[i] = Monoid::fold(number[i], other);
        after &= __ballot_sync(kEveryLane, (rank & 1) == 0);
        rank /= 2;
      }
      if (before == 0 && id[i] < static_cast<uint32_t>(a.segments))
        table[id[i]] = Monoid::fold(table[id[i]], number[i]);
      __syncwarp();
    }
  }
  __syncthreads();

  auto* partial = reinterpret_cast<Acc*>(a.workspace + o * a.workspace_bytes) + slice * a.segments * a.inner + column;
  Bits* out = static_cast<Bits*>(a.out) + o * a.segments * a.inner + column;
  for (int s = threadIdx.x; s < a.segments; s += threads) {
    auto total = static_cast<Acc>(tables[s]);
    if constexpr (kHalves<Monoid>) total = static_cast<Acc>(low[a.segments + s]) << 32 | low[s];
    for (int w = 1; w < kTables<Monoid>; ++w) total = Monoid::fold(total, tables[w * a.segments + s]);
    if (a.slices == 1) {
      out[s * a.inner] = Monoid::store(total, a.keys);
    } else {
      partial[s * a.inner] = total;
    }
  }
}

// A block folds the tables of all slices for 32 cells (a cell is one column of one segment); each of its warps has
// neighbouring slices.
template <class Monoid>
__global__ void __launch_bounds__(kSliceThreads) segment_slices_kernel(Args a) {
  using Acc = typename Monoid::Acc;
  constexpr int kWarps = kSliceThreads / 32;
  __shared__ Acc totals[kWarps][32];
  const int64_t cells = a.segments * a.inner, blocks = (cells + 31) / 32, o = blockIdx.x / blocks;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int64_t cell = blockIdx.x % blocks * 32 + lane;
  const auto* partial = reinterpret_cast<const Acc*>(a.workspace + o * a.workspace_bytes) + cell;
  const int64_t share = (a.slices + kWarps - 1) / kWarps, end = min(a.slices, (warp + 1) * share);
  Acc total = Monoid::identity();
  if (cell < cells) {
#pragma unroll 8
    for (int64_t slice = warp * share; slice < end; ++slice) total = Monoid::fold(total, partial[slice * cells]);
  }
  totals[warp][lane] = total;
  __syncthreads();
  if (warp != 0 || cell >= cells) return;
  for (int w = 1; w < kWarps; ++w) total = Monoid::fold(total, totals[w][lane]);
  static_cast<typename Monoid::Bits*>(a.out)[o * cells + cell] = Monoid::store(total, a.keys);
}

}  // namespace

cudaError_t launch_segment_tables(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                  const SegmentsBuffers& buffers) {
  if (plan.columns > 1) return launch_segment_wide_tables(stream, plan, problem, buffers);
  const Args a(plan, problem, buffers);
  return dispatch_monoid(problem, [&](auto monoid) {
    using Monoid = decltype(monoid);
    if constexpr (is_exact<Monoid> && sizeof(typename Monoid::Bits) < 8) {
      return cudaErrorInvalidValue;  // kAtomics has these sums
    } else {
      Launch config;
      config.block = dim3(32 * plan.warps);
      config.grid = dim3(static_cast<unsigned>(problem.rows.count() * a.slices));
      config.shared_bytes = kTables<Monoid> * a.segments * sizeof(Word<Monoid>);
      return launch(stream, config, segment_tables_kernel<Monoid>, a);
    }
  });
}

cudaError_t launch_segment_slices(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                  const SegmentsBuffers& buffers) {
  const Args a(plan, problem, buffers);
  return dispatch_monoid(problem, [&](auto monoid) {
    Launch config;
    config.block = dim3(kSliceThreads);
    config.grid = dim3(static_cast<unsigned>(problem.rows.outer * ((a.segments * a.inner + 31) / 32)));
    return launch(stream, config, segment_slices_kernel<decltype(monoid)>, a);
  });
}

}  // namespace jaxgpuops::segments
