// Long columns of the row engine, in one persistent kernel. A tile is what one block of columns_kernel has: one unit (a
// part of the axis) of a strip of columns. A block takes every n-th tile. kStreamStages tiles are in shared memory: one
// waits for the statistics of the other units of its strip, one is being worked on, and the others are being loaded, so
// loads never pause. The array is read once and written once. Each thread loads what it will work on itself, so loads
// need no barrier.
//
// Units exchange statistics through the workspace, in words of 64 bits that are 0 until they are written. So no fences
// are needed, and no clusters, which would leave multiprocessors idle. All blocks run at the same time (a cooperative
// launch), and a tile waits only for tiles of the same round, whose statistics are published before any block waits for
// them. The words are cleared first, while the first tiles are being loaded. The L2 cache is asked to keep the words:
// loaded from memory, they would queue behind the tiles in every round.
//
// The blocks of a strip are a group. Groups work on neighbouring strips if together these are whole rows, or long
// pieces of them. Otherwise each group has its own part of the array, since short pieces that lie near each other are
// read more slowly.
//
// Statistics are merged as in columns_kernel. Compute capability 9.0.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>
#include <cstdint>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/bulk_copy.cuh"
#include "common/cuda/residents.cuh"
#include "common/rounding.h"
#include "row_engine/cuda/columns.cuh"

namespace jaxgpuops::row_engine {

constexpr int kStreamStages = 3;
constexpr int kMostColumnLaneBits = 4;
constexpr int kBesideBytes = 8 << 10;

template <class P>
struct ColumnsStreamParameters {
  Parameters<P> of;
  uint64_t* words;  // [columns][units][Told::kWords]
  int unit_bits;
  int64_t strips, groups;
  bool beside;  // whether groups work on neighbouring strips at the same time
  // The distance from one tile of a block to the next: in columns, in outer and inner indices, and in elements; and the
  // distance to the next outer index where the inner one wraps around.
  int64_t columns_apart, outers_apart, i_apart, elements_apart, elements_to_next_outer;
};

// Shared memory: the tiles [kStreamStages][operands][kCount][threads]; for each column of a strip, statistics of the
// warps (and one unused place, so that columns are in different banks); the finals.
template <class P>
struct ColumnsStreamLayout {
  static constexpr int kThreads = 32 * kMaxColumnWarps, kCount = column_vectors(P::kOperands);
  static constexpr int kStagePacks = P::kOperands * kCount * kThreads, kWarpPlaces = kMaxColumnWarps + 1;
  int columns, finals_at, bytes;

  __host__ __device__ explicit ColumnsStreamLayout(int column_lane_bits)
      : columns(Held<P, kCount, true>::kWidth << column_lane_bits) {
    finals_at = kStreamStages * kStagePacks * 16 + columns * kWarpPlaces * static_cast<int>(sizeof(Stat<P>));
    finals_at = (finals_at + 15) / 16 * 16;
    bytes = finals_at + columns * static_cast<int>(sizeof(typename P::Final));
  }
};

// A cache policy that asks the L2 cache to evict these lines last.
__device__ __forceinline__ uint64_t keep_in_cache() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// A statistic in the workspace: two numbers in each word, with their bits inverted, since 0 says that the word has not
// been written. (Only two NaNs would invert to 0; that word is stored as 1.)
template <class P>
struct Told {
  static constexpr int kWords = (Stat<P>::kCount + 1) / 2;
  uint64_t word[kWords];

  __device__ static void tell(uint64_t* to, const Stat<P>& stat) {
    Told told = {};
    memcpy(told.word, stat.of, sizeof(stat.of));
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint64_t word = max(~told.word[w], uint64_t{1});
      store(to + w, word);
    }
  }
  __device__ static void store(uint64_t* to, uint64_t word) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.relaxed.gpu.global.L2::cache_hint.u64 [%0], %1, %2;" ::"l"(to), "l"(word), "l"(keep_in_cache())
                 : "memory");
#endif
  }
  __device__ void load(const uint64_t* from) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#if __CUDA_ARCH__ >= 900
      asm volatile("ld.relaxed.gpu.global.L2::cache_hint.u64 %0, [%1], %2;"
                   : "=l"(word[w])
                   : "l"(from + w), "l"(keep_in_cache())
                   : "memory");
#endif
    }
  }
  __device__ bool there() const {
    bool all = true;
#pragma unroll
    for (int w = 0; w < kWords; ++w) all = all && word[w] != 0;
    return all;
  }
  __device__ Stat<P> stat() const {
    uint64_t words[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = ~word[w];
    Stat<P> stat;
    memcpy(stat.of, words, sizeof(stat.of));
    return stat;
  }
};

// Like merge_by_half_warp(), but by a team of kTeam neighbouring lanes, each of which first merges kEach statistics:
// the same sums in the same order, with fewer instructions.
template <class P, int kTeam, int kEach>
__device__ __forceinline__ Stat<P> merge_by_team(const Stat<P> (&each)[kEach]) {
  static_assert(kTeam * kEach == kMaxColumnWarps);
  Stat<P> all = Stat<P>::none();
  if constexpr (P::kPeak) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) all.of[0] = P::larger(all.peak(), each[e].peak());
#pragma unroll
    for (int apart = 1; apart < kTeam; apart *= 2) all.of[0] = P::larger(all.peak(), shuffle_xor(all.peak(), apart));
  }
  const auto shift = P::guard(all.peak());
  Stat<P> scaled[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    scaled[e] = Stat<P>::none();
    add_stat<P>(scaled[e], each[e], shift);
  }
#pragma unroll
  for (int k = 0; k < P::kSums; ++k) {
#pragma unroll
    for (int apart = 1; apart < kEach; apart *= 2)
#pragma unroll
      for (int e = 0; e < kEach; e += 2 * apart) scaled[e].sum(k) = scaled[e].sum(k) + scaled[e + apart].sum(k);
    all.sum(k) = scaled[0].sum(k);
#pragma unroll
    for (int apart = 1; apart < kTeam; apart *= 2) all.sum(k) = all.sum(k) + shuffle_xor(all.sum(k), apart);
  }
  return all;
}

// The state of a block in columns_stream_kernel. The functions are the phases of the kernel, in the order in which they
// run.
template <class P>
struct ColumnsStreamBlock {
  using Layout = ColumnsStreamLayout<P>;
  using Bits = typename P::Element::Bits;
  static constexpr int kCount = Layout::kCount, kThreads = Layout::kThreads;
  using Lane = Held<P, kCount, true>;
  static constexpr int kWidth = Lane::kWidth;
  static_assert(!P::kDecoded && !P::kMasked && !P::kHole && !P::kPlainSum);
  // Statistics of a column of the strip are merged by a team of lanes.
  static constexpr int kTeam = kThreads / (kWidth << kMostColumnLaneBits), kEach = kMaxColumnWarps / kTeam;

  const ColumnsStreamParameters<P>& s;
  const Parameters<P>& p = s.of;
  const int warp_lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int axis_lane = warp_lane >> p.column_lane_bits;
  const int column_of_block = (warp_lane & ((1 << p.column_lane_bits) - 1)) * kWidth;
  const int units = 1 << s.unit_bits, lag = units > 1 ? 1 : 0;
  const Layout layout{p.column_lane_bits};
  const int columns = layout.columns;
  unsigned char* const memory = dynamic_shared_memory();
  Pack* const stages = reinterpret_cast<Pack*>(memory) + threadIdx.x;
  Stat<P>* const of_warps = reinterpret_cast<Stat<P>*>(memory + kStreamStages * Layout::kStagePacks * 16);
  typename P::Final* const of_columns = reinterpret_cast<typename P::Final*>(memory + layout.finals_at);
  const int team_lane = threadIdx.x % kTeam, team_column = threadIdx.x / kTeam;

  // A block has the same unit of all its strips, and a thread the same positions: `here` of them from `first` on.
  // (There is no branch on here == kCount, because code of ptxas 13.0 took it in lanes without positions, too.)
  const int unit = blockIdx.x & (units - 1);
  const int first = ((unit * kMaxColumnWarps + warp) * (32 >> p.column_lane_bits) + axis_lane) * kCount;
  const int here = max(0, min(static_cast<int>(p.length) - first, kCount));
  // How many tiles the block has, in how many of them this thread has a column, and in how many its team has one.
  const int64_t group = blockIdx.x >> s.unit_bits;
  const int64_t first_column = begin(group), end = s.beside ? p.columns : min(p.columns, begin(group + 1));
  const int rounds = rounds_from(first_column), mine = rounds_from(first_column + column_of_block);
  const int of_team = team_column < columns ? rounds_from(first_column + team_column) : 0;
  // Where units publish their statistics of the team's column in tile i.
  uint64_t* words = s.words + ((first_column + team_column) * units) * Told<P>::kWords;
  const int64_t words_apart = s.columns_apart * units * Told<P>::kWords;
  // Where this thread is in a tile: its column (outer, i0), and the element of its first position.
  struct Place {
    int64_t outer, i0, at;
  };
  Place done;  // where this thread is in tile i - lag, which is written next
  Place next;  // where this thread is in the tile that is loaded next

  __device__ __forceinline__ explicit ColumnsStreamBlock(const ColumnsStreamParameters<P>& s) : s(s) {
    done.outer = (first_column + column_of_block) / p.inner;
    done.i0 = first_column + column_of_block - done.outer * p.inner;
    done.at = (done.outer * p.length + first) * p.inner + done.i0;
    next = done;
  }

  __device__ __forceinline__ int64_t begin(int64_t group) const {
    return (s.beside ? group : group * s.strips / s.groups) * columns;
  }
  __device__ __forceinline__ int rounds_from(int64_t column) const {
    return column < end ? static_cast<int>((end - column + s.columns_apart - 1) / s.columns_apart) : 0;
  }
  __device__ __forceinline__ void go_on(Place& place) const {
    place.outer += s.outers_apart;
    place.i0 += s.i_apart;
    place.at += s.elements_apart;
    if (place.i0 < p.inner) return;
    ++place.outer;
    place.i0 -= p.inner;
    place.at += s.elements_to_next_outer;
  }

  __device__ __forceinline__ Pack* pack(int stage, int o, int j) const {
    return stages + (stage * P::kOperands * kCount + o * kCount + j) * kThreads;
  }
  __device__ __forceinline__ void fetch(int stage, bool exists, const Place& place) const {
    const int count = exists ? here : 0;
#pragma unroll
    for (int o = 0; o < P::kOperands; ++o) {
      const Bits* from = static_cast<const Bits*>(p.operands[o]) + place.at;
#pragma unroll
      for (int j = 0; j < kCount; ++j, from += p.inner)
        if (j < count) copy_async(pack(stage, o, j), from);
    }
    commit_async_copies();
  }
  __device__ __forceinline__ Lane take(int stage, bool exists) const {
    Lane lane;
#pragma unroll
    for (int o = 0; o < P::kOperands; ++o)
#pragma unroll
      for (int j = 0; j < kCount; ++j) lane.raw[o][j] = *pack(stage, o, j);
    if (!exists || here < kCount) {
#pragma unroll
      for (int o = 0; o < P::kOperands; ++o)
#pragma unroll
        for (int j = 0; j < kCount; ++j)
#pragma unroll
          for (int v = 0; v < kWidth; ++v)
            if (!exists || j >= here) lane.set_bits(o, j, v, P::pad(p.args, o));
    }
    return lane;
  }

  // Fetches the first tiles, and clears the words.
  __device__ __forceinline__ void start() {
    for (int n = 0; n < kStreamStages - lag; ++n, go_on(next)) fetch(n, n < mine, next);
    if (!lag) return;
    const int64_t count = p.columns * units * Told<P>::kWords;
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads)
      Told<P>::store(s.words + i, 0);
    cooperative_groups::this_grid().sync();
  }

  // Loads what units have published of tile i - 1, before it is needed.
  __device__ __forceinline__ void ask_for(int i, Told<P> (&told)[kEach]) const {
    if (!lag || i == 0 || i > of_team) return;
#pragma unroll
    for (int e = 0; e < kEach; ++e)
      if (team_lane * kEach + e < units) told[e].load(words - words_apart + (team_lane * kEach + e) * Told<P>::kWords);
  }

  // Computes the warps' statistics of tile i.
  __device__ __forceinline__ void measure(int i, int stage) const {
    if (i >= rounds) return;
    Lane lane = take(stage, i < mine);
    Stat<P> stat[kWidth];
    warp_statistics<P>(p, lane, 0, stat);
    if (axis_lane == 0) {
#pragma unroll
      for (int v = 0; v < kWidth; ++v) of_warps[(column_of_block + v) * Layout::kWarpPlaces + warp] = stat[v];
    }
  }

  __device__ __forceinline__ void finish(int i, const Stat<P>& all) const {
    if (team_lane != 0 || i >= of_team) return;
    const int64_t column = first_column + team_column + i * s.columns_apart, outer = column / p.inner;
    const auto row = P::row(p.args, outer, column - outer * p.inner, p.length, p.inner);
    of_columns[team_column] = P::finish(p.args, row, all);
    if (unit == 0) P::write_row(p.args, column, row, of_columns[team_column]);
  }

  // Merges the warps' statistics of tile i and publishes them for other units. If there are no other units, finishes
  // the tile.
  __device__ __forceinline__ void merge_warps(int i) const {
    if (i >= rounds || team_column >= columns) return;
    Stat<P> each[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) each[e] = of_warps[team_column * Layout::kWarpPlaces + team_lane * kEach + e];
    const auto merged = merge_by_team<P, kTeam>(each);
    if (!lag) {
      finish(i, merged);
    } else if (team_lane == 0 && i < of_team) {
      Told<P>::tell(words + unit * Told<P>::kWords, merged);
    }
  }

  // Waits for the statistics of all units of tile i - 1, and finishes it.
  __device__ __forceinline__ void merge_units(int i, Told<P> (&told)[kEach]) const {
    if (!lag || i == 0 || team_column >= columns) return;
    Stat<P> each[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      each[e] = Stat<P>::none();
      if (i > of_team || team_lane * kEach + e >= units) continue;
      while (!told[e].there()) told[e].load(words - words_apart + (team_lane * kEach + e) * Told<P>::kWords);
      each[e] = told[e].stat();
    }
    finish(i - 1, merge_by_team<P, kTeam>(each));
  }

  // Writes the results of tile i - lag, which is in the oldest stage, and fetches the next tile into that stage.
  __device__ __forceinline__ void write(int i, int oldest) {
    const bool exists = i - lag < mine;
    if (i >= lag) {
      Lane lane = take(oldest, exists);
      lane.forget();
      fetch(oldest, i - lag + kStreamStages < mine, next);
      typename P::Row row[kWidth];
#pragma unroll
      for (int v = 0; v < kWidth; ++v)
        row[v] = exists ? P::row(p.args, done.outer, done.i0 + v, p.length, p.inner) : typename P::Row{};
      make_results<P>(p, lane, row, of_columns + column_of_block, -1);
      Bits* out = static_cast<Bits*>(p.out) + done.at;
      const int count = exists ? here : 0;
#pragma unroll
      for (int j = 0; j < kCount; ++j, out += p.inner)
        if (j < count) store_once(reinterpret_cast<Pack*>(out), lane.raw[0][j]);
      go_on(done);
    } else {
      fetch(oldest, i - lag + kStreamStages < mine, next);
    }
    go_on(next);
  }
};

template <class P>
__global__ void __launch_bounds__(32 * kMaxColumnWarps, 1)
    columns_stream_kernel(const __grid_constant__ ColumnsStreamParameters<P> s) {
  using Block = ColumnsStreamBlock<P>;
  Block block(s);
  const int lag = block.lag;
  block.start();
  int stage = 0, oldest = lag ? kStreamStages - 1 : 0;  // stages of tiles i and i - lag
#pragma unroll 1
  for (int i = 0; i < block.rounds + lag; ++i) {
    if (lag) {
      wait_for_async_copies<kStreamStages - 2>();
    } else {
      wait_for_async_copies<kStreamStages - 1>();
    }
    Told<P> told[Block::kEach];
    block.ask_for(i, told);
    block.measure(i, stage);
    __syncthreads();
    block.merge_warps(i);
    block.merge_units(i, told);
    block.words += block.words_apart;
    __syncthreads();
    block.write(i, oldest);
    oldest = stage;
    stage = stage + 1 == kStreamStages ? 0 : stage + 1;
    if (!lag) oldest = stage;
  }
}

template <class P>
cudaError_t run_columns_stream(cudaStream_t stream, const RowPlan& plan, const Parameters<P>& p) {
  if constexpr (P::kPackColumns && P::kOutput) {
    const auto kernel = columns_stream_kernel<P>;
    const ColumnsStreamLayout<P> layout(p.column_lane_bits);
    if (plan.axis_warps != kMaxColumnWarps || plan.blocks > kMaxColumnWarps || p.column_lane_bits > kMostColumnLaneBits)
      return cudaErrorInvalidValue;
    Launch launched;
    launched.block = dim3(plan.threads());
    launched.shared_bytes = layout.bytes;
    launched.together = plan.blocks > 1;
    static Residents of_kernel;
    int resident = 0;
    const cudaError_t status = of_kernel.count(reinterpret_cast<const void*>(kernel), launched, &resident);
    if (status != cudaSuccess) return status;
    if (resident < plan.blocks) return cudaErrorCooperativeLaunchTooLarge;
    const int64_t strips = (p.columns + layout.columns - 1) / layout.columns;
    const int64_t together = std::min<int64_t>(strips, resident / plan.blocks);
    ColumnsStreamParameters<P> s = {p};
    s.words = reinterpret_cast<uint64_t*>(p.workspace);
    s.unit_bits = bits_for(plan.blocks);
    s.strips = strips;
    s.groups = together;
    s.beside =
        together * layout.columns >= std::min<int64_t>(p.inner, kBesideBytes / sizeof(typename P::Element::Bits));
    s.columns_apart = (s.beside ? together : 1) * layout.columns;
    s.outers_apart = s.columns_apart / p.inner;
    s.i_apart = s.columns_apart % p.inner;
    s.elements_apart = s.outers_apart * p.length * p.inner + s.i_apart;
    s.elements_to_next_outer = (p.length - 1) * p.inner;
    launched.grid = dim3(static_cast<unsigned>(together * plan.blocks));
    return launch(stream, launched, kernel, s);
  } else {
    return cudaErrorInvalidValue;
  }
}

}  // namespace jaxgpuops::row_engine
