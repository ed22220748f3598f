// Many segments, whose rows have few columns and are in no order: there is an accumulator for each segment and column,
// and atomics fold rows into it. They only add integers or take the larger of two, so the result does not depend on
// their order. A warp keeps the fold of its hot segment (atomics_rows.cuh) in registers.
//
// Sums of floats are exact, and rounded once. A float is an integer times a power of two. A sum has several
// accumulators of 64 bits, each for `width` neighbouring exponents: the number's exponent chooses one, to which the
// integer is added, shifted by the exponent's distance from the accumulator's lowest. `width` is so small that no
// accumulator overflows even if it gets all rows. Infinities and NaN set bits of one accumulator more. Where there are
// many numbers and few sums, a block adds most of its numbers to a table in shared memory, and the table to memory in
// the end.
//
// Moves each id and number once, and without a table one sector of 32 bytes for each row and column between L2 and its
// atomic units; accumulators are cleared and read once.
#include <cuda_runtime.h>

#include "common/cuda/set_words.h"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "segments/cuda/atomics.cuh"
#include "segments/cuda/atomics_rows.cuh"
#include "segments/cuda/exact.cuh"

namespace jaxgpuops::segments {
namespace {

constexpr int kCellThreads = 1024;

// A cell is one accumulator. It lies in the result itself if the result's elements are wide enough, and is an element
// there; in the workspace, extremes are keys.
template <class Monoid, bool kLargest>
struct Whole {
  using Bits = typename Monoid::Bits;
  using Word = std::conditional_t<sizeof(Bits) == 8, uint64_t, uint32_t>;
  static constexpr bool kFromEnds = kLargest;
  static constexpr int kBlocks = 4, kSteps = 8;
  static constexpr bool kInPlace = sizeof(Word) == sizeof(Bits), kHasTable = false;
  using Plain = Whole;

  const Args& a;
  int64_t o;
  int column;
  Word* words;  // accumulators of the column
  uint32_t hot = kNone;
  Word sum = 0;  // sum of those of the lane's rows that are in the hot segment

  __device__ static Word* words_of(const Args& a, int64_t o) {
    if constexpr (kInPlace) return static_cast<Word*>(a.out) + o * a.cells();
    return reinterpret_cast<Word*>(a.workspace + o * a.workspace_bytes);
  }
  __device__ Whole(const Args& args, int64_t row, int own)
      : a(args), o(row), column(own), words(words_of(args, row) + own) {}

  __device__ static Word fold(Word x, Word y) { return kLargest ? (x > y ? x : y) : x + y; }

  __device__ void begin(Bits) {}

  // The accumulator as it is now: most numbers are not larger, and need no atomic. Called for several rows at a time,
  // so that the loads overlap.
  __device__ Word peek(uint32_t id) const { return kLargest && a.looks && id != kNone ? words[id * a.inner] : Word{0}; }
  __device__ Word key_of(Word seen) const {
    if constexpr (kLargest && kInPlace) return Monoid::load(seen, a.keys);
    return seen;
  }
  __device__ void put(uint32_t id, Word word) const {
    Word* const to = words + id * a.inner;
    if constexpr (kLargest && kInPlace) {
      atomic_extreme(to, extreme_operand<Monoid>(word, a.keys), a.keys);
    } else if constexpr (kLargest) {
      atomicMax(to, word);
    } else {
      atomic_fold<false>(to, word);
    }
  }

  __device__ void add(uint32_t id, Bits bits, bool is_hot, Word seen) {
    const Word word = Monoid::load(bits, a.keys);
    if (is_hot) {
      sum = fold(sum, word);
    } else if (id != kNone && (!kLargest || !a.looks || key_of(seen) < word)) {
      put(id, word);
    }
  }
  __device__ void flush() {
    if (hot == kNone) return;
    for (int lanes = 1 << a.team_bits; lanes < 32; lanes *= 2) sum = fold(sum, shuffle_xor(sum, lanes));
    const bool has = (threadIdx.x & 31) >> a.team_bits == 0 && sum;
    if (has && !(kLargest && key_of(words[hot * a.inner]) >= sum)) put(hot, sum);
    sum = 0;
  }
  __device__ void end() {}

  __device__ static void finish(const Args& a, int64_t o, int64_t cell) {
    using Acc = typename Monoid::Acc;
    const Word word = words_of(a, o)[cell];
    static_cast<Bits*>(a.out)[o * a.cells() + cell] = Monoid::store(static_cast<Acc>(word), a.keys);
  }
};

// Accumulators of a block in shared memory: of all cells, `bins` neighbouring ones from number `first` on. Shared
// memory has no additions of 64 bits, so an accumulator is two words; the low one begins in the middle of its range, so
// that it rarely carries.
struct BlockTable {
  static constexpr uint32_t kMiddle = 1u << 31;
  uint32_t first, bins, cells;
  uint32_t *low, *high;

  __device__ void add(uint32_t cell, int64_t value) const {
    add_halves(low + cell, high + cell, static_cast<uint64_t>(value));
  }
  __device__ int64_t sum(uint32_t cell) const {
    return static_cast<int64_t>(uint64_t{high[cell]} << 32 | low[cell]) - kMiddle;
  }
};

// Exact sums of floats. With kTable, a block adds most numbers to a table of its own first.
template <class Float, bool kTable>
struct Exact {
  using Element = Float;
  using Bits = typename Element::Bits;
  using Plain = Exact<Float, false>;
  static constexpr bool kFromEnds = false;
  static constexpr int kBlocks = 4, kSteps = kTable ? 4 : 8;
  static constexpr bool kInPlace = false, kHasTable = kTable;

  const Args& a;
  int64_t o;
  int column;
  uint64_t* words;  // accumulators of the column
  BlockTable table = {};
  uint32_t hot = kNone;
  int64_t sums[kMostTableBins] = {};  // of the lane's rows in the hot segment, in accumulators from `table.first` on
  uint32_t touched = 0;               // a bit for each accumulator that this lane has used

  __device__ static uint64_t* words_of(const Args& a, int64_t o) {
    return reinterpret_cast<uint64_t*>(a.workspace + o * a.workspace_bytes + ExactShape::kHeadBytes);
  }
  __device__ Exact(const Args& args, int64_t row, int own)
      : a(args), o(row), column(own), words(words_of(args, row) + own) {}

  __device__ void add_to(uint32_t id, uint32_t bin, int64_t value) {
    touched |= 1u << bin;
    if (kTable && bin - table.first < table.bins) {
      table.add((bin - table.first) * table.cells + id * static_cast<uint32_t>(a.inner) + column, value);
      return;
    }
    auto* const word = reinterpret_cast<unsigned long long*>(words + (bin * a.segments + id) * a.inner);
    atomicAdd(word, static_cast<unsigned long long>(value));
  }

  __device__ uint32_t bin_of(const Parts<Element>& parts) const { return parts.place * a.exact.reciprocal >> 16; }

  // Without a table, the first number of each lane says which accumulators hot sums are for: the largest and the next.
  __device__ void begin(Bits bits) {
    if (kTable || table.bins > 0) return;
    const Parts<Element> parts(bits);
    const uint32_t bin = parts.special ? 0 : bin_of(parts);
    table.first = max(fold_lanes(bin, [](uint32_t x, uint32_t y) { return max(x, y); }), 1u) - 1;
    table.bins = kMostTableBins;
  }
  __device__ bool peek(uint32_t) const { return false; }

  __device__ void add(uint32_t id, Bits bits, bool is_hot, bool) {
    if (id == kNone) return;
    const Parts<Element> parts(bits);
    const uint32_t bin = bin_of(parts);
    int64_t value = static_cast<int64_t>(parts.integer) << (parts.place - bin * a.exact.width);
    if (parts.negative) value = -value;
    if (parts.special) {
      auto* const word = words + (a.exact.bins * a.segments + id) * a.inner;
      atomicOr(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(parts.special));
      touched |= 1u << 31;
    } else if (is_hot && bin - table.first < kMostTableBins) {
#pragma unroll
      for (uint32_t b = 0; b < kMostTableBins; ++b)
        if (bin - table.first == b) sums[b] += value;
    } else if (value) {
      add_to(id, bin, value);
    }
  }
  __device__ void flush() {
    if (hot == kNone) return;
#pragma unroll
    for (uint32_t b = 0; b < kMostTableBins; ++b) {
      for (int lanes = 1 << a.team_bits; lanes < 32; lanes *= 2) sums[b] += shuffle_xor(sums[b], lanes);
      if ((threadIdx.x & 31) >> a.team_bits == 0 && sums[b]) add_to(hot, table.first + b, sums[b]);
      sums[b] = 0;
    }
  }
  __device__ void end() {
    const uint32_t all = fold_lanes(touched, [](uint32_t x, uint32_t y) { return x | y; });
    uint32_t* const marks = a.marks(o);
    if ((threadIdx.x & 31) == 0 && (all & ~__ldcg(marks))) atomicOr(marks, all);
  }

  __device__ static void finish(const Args& a, int64_t o, int64_t cell) {
    uint64_t* const words = words_of(a, o) + cell;
    const uint32_t touched = *a.marks(o), finite = touched & ~(1u << 31);
    // Most often few accumulators are not zero: those from `low` on.
    const int low = finite ? __ffs(finite) - 1 : 0, bins = 32 - __clz(finite | 1) - low, width = a.exact.width;
    auto result = rounded_to_float<Element>(words + low * a.cells(), a.cells(), bins, width, low * width);
    if (touched >> 31) {
      const uint64_t what = words[a.exact.bins * a.cells()];
      if (what) result = special_sum(static_cast<uint32_t>(what));
    }
    static_cast<Bits*>(a.out)[o * a.cells() + cell] = Element::store(result);
  }
};

// Exact sums of many rows in few segments. A block has a table of the accumulators that most numbers of a sample need,
// and in the end adds it to those in the workspace. Blocks of an outer index take runs of rows in turn.
template <class Policy>
__global__ void __launch_bounds__(kCellThreads, 1) segment_cells_kernel(const __grid_constant__ Args a) {
  using Element = typename Policy::Element;
  __shared__ uint32_t sampled;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int64_t blocks = gridDim.x / a.outer, o = blockIdx.x / blocks, block = blockIdx.x % blocks;
  BlockTable table = {0, static_cast<uint32_t>(a.table_bins), static_cast<uint32_t>(a.cells()), nullptr, nullptr};
  const uint32_t size = table.bins * table.cells;
  table.low = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  table.high = table.low + size;
  for (uint32_t i = threadIdx.x; i < size; i += kCellThreads) table.low[i] = BlockTable::kMiddle, table.high[i] = 0;
  if (warp == 0) {
    const int64_t size = a.length * a.inner, at = size / 32 * lane + (block * 0x9e3779b9u >> 8) % (size / 32);
    const Parts<Element> parts(static_cast<const typename Element::Bits*>(a.data)[a.data_at(o) + at]);
    const uint32_t bin = parts.special || !parts.integer ? 64 : parts.place * a.exact.reciprocal >> 16;
    // The bin that most have, and of its neighbours the one that more have.
    const auto having = [&](uint32_t b) { return static_cast<uint32_t>(__popc(__ballot_sync(kEveryLane, bin == b))); };
    uint32_t most = 0, best = 0;
    for (int b = 0; b < a.exact.bins; ++b)
      if (having(b) > most) most = having(b), best = b;
    const bool is_last = best + 1 == static_cast<uint32_t>(a.exact.bins);
    if (table.bins > 1 && best > 0 && (is_last || having(best - 1) >= having(best + 1))) --best;
    if (lane == 0) sampled = best;
  }
  __syncthreads();
  table.first = sampled;

  const int64_t tasks = a.runs * a.chunks;
  for (int64_t task = block * (kCellThreads / 32) + warp; task < tasks; task += blocks * (kCellThreads / 32)) {
    const int64_t run = task / a.chunks, chunk = task - run * a.chunks;
    Policy policy(a, o, static_cast<int>(chunk << a.team_bits) + (threadIdx.x & ((1 << a.team_bits) - 1)));
    policy.table = table;
    fold_rows(a, policy, run * a.run, min(a.length, (run + 1) * a.run));
    policy.flush();
    policy.end();
  }
  wait_for_predecessor();
  __syncthreads();
  auto* const words = reinterpret_cast<unsigned long long*>(Policy::words_of(a, o)) + table.first * a.cells();
  for (uint32_t i = threadIdx.x; i < size; i += kCellThreads) {
    const int64_t sum = table.sum(i);
    if (sum) atomicAdd(words + i, static_cast<unsigned long long>(sum));
  }
}

template <class Policy>
cudaError_t run(cudaStream_t stream, const SegmentsPlan& plan, const Args& a) {
  const int64_t bytes = Policy::kInPlace ? a.outer * a.cells() * static_cast<int64_t>(sizeof(typename Policy::Bits))
                                         : a.outer * a.workspace_bytes;
  auto* const words = static_cast<uint32_t*>(Policy::kInPlace ? a.out : a.workspace);
  const uint64_t start = Policy::kInPlace ? a.keys.empty : 0;
  const auto even = static_cast<uint32_t>(start);
  cudaError_t status = launch_set_words(stream, words, bytes / 4, even,
                                        sizeof(typename Policy::Bits) == 8 ? static_cast<uint32_t>(start >> 32) : even);
  Launch config;
  config.block = dim3(kThreads);
  config.overlap = plan.overlap;
  if constexpr (Policy::kHasTable) {
    Launch cells = config;
    cells.block = dim3(kCellThreads);
    cells.grid = dim3(static_cast<unsigned>(a.outer * plan.blocks));
    cells.shared_bytes = plan.shared_bytes;
    if (status == cudaSuccess) status = launch(stream, cells, segment_cells_kernel<Policy>, a);
  } else {
    const int64_t warps = a.outer * a.runs * a.chunks;
    config.grid = dim3(static_cast<unsigned>((32 * warps + kThreads - 1) / kThreads));
    if (status == cudaSuccess && warps > 0) status = launch(stream, config, segment_atomics_kernel<Policy>, a);
  }
  if constexpr (!Policy::kInPlace) {
    config.grid = dim3(blocks_for(a.outer * a.cells()));
    if (status == cudaSuccess) status = launch(stream, config, segment_finish_kernel<typename Policy::Plain>, a);
  }
  return status;
}

}  // namespace

cudaError_t launch_segment_atomics(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                   const SegmentsBuffers& buffers) {
  const Args a(plan, problem, buffers);
  return dispatch_monoid(problem, [&](auto monoid) {
    using Monoid = decltype(monoid);
    if constexpr (std::is_same_v<Monoid, Sum<Float64>>) {
      return launch_segment_wide_sums(stream, plan, problem, buffers);
    } else if constexpr (is_exact<Monoid>) {
      using Element = typename Monoid::Element;
      return plan.table_bins > 0 ? run<Exact<Element, true>>(stream, plan, a)
                                 : run<Exact<Element, false>>(stream, plan, a);
    } else {
      return run<Whole<Monoid, is_extreme<Monoid>>>(stream, plan, a);
    }
  });
}

}  // namespace jaxgpuops::segments
