// Columns (inner > 1) of the row engine: a lane holds some positions of one column, or of 16 bytes of neighbouring
// columns. The array is read once and written once; if columns are split, this is the kernel of both sweeps.
#pragma once

#include "row_engine/cuda/parts.cuh"

namespace jaxgpuops::row_engine {

// Merges the statistics of a warp, for each column of a lane. `plain` is what the lane adds to the plain sum
// (P::kPlainSum).
template <class P, int kCount, bool kPacks>
__device__ __forceinline__ void warp_statistics(const Parameters<P>& p, Held<P, kCount, kPacks>& lane,
                                                typename P::Element::Acc plain,
                                                Stat<P> (&stat)[Held<P, kCount, kPacks>::kWidth]) {
  using Acc = typename P::Element::Acc;
  constexpr int kWidth = Held<P, kCount, kPacks>::kWidth;
  Acc peak[kWidth] = {};
  if constexpr (P::kPeak) lane.peaks(p.args, peak);
  lane.forget();
  // The shuffles of all columns are issued together, since those of one column wait for each other.
  if constexpr (P::kPeak) {
    for (int bit = p.column_lane_bits; bit < 5; ++bit)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) peak[i] = P::larger(peak[i], shuffle_xor(peak[i], 1 << bit));
#pragma unroll
    for (int i = 0; i < kWidth; ++i) stat[i].of[0] = peak[i];
  }
  P::with_args(p.args, [&](const auto& args) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
#pragma unroll
      for (int k = 0; k < P::kSums; ++k) {
        const bool is_plain = P::kPlainSum && k == P::kSums - 1;
        stat[i].sum(k) = is_plain ? plain : lane.sum(args, k, P::guard(peak[i]), i, i + 1);
      }
      if (sizeof(typename P::Element::Bits) == 2 && i % 2 == 1)
        lane.forget();  // only two columns are in work at a time, which saves registers
    }
  });
  for (int bit = p.column_lane_bits; bit < 5; ++bit)
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
#pragma unroll
      for (int k = 0; k < P::kSums; ++k) stat[i].sum(k) = stat[i].sum(k) + shuffle_xor(stat[i].sum(k), 1 << bit);
}

// Half a warp merges the statistics of one column: at most kMaxColumnWarps units, of which `count` exist. Their
// statistics are at [columns][places]. Calls f(column, unit, statistics) with all lanes of the half.
template <class P, class F>
__device__ __forceinline__ void merge_by_halves(const Stat<P>* stats, int places, int columns, int count, F f) {
  const int half = threadIdx.x / 16, halves = blockDim.x / 16;
  const int tasks = (count + kMaxColumnWarps - 1) / kMaxColumnWarps * columns;
  for (int first = 0; first < tasks; first += halves) {
    const int task = min(first + half, tasks - 1);
    const int unit = task >> (31 - __clz(columns)),
              c = task & (columns - 1);  // the number of columns is a power of two
    const Stat<P>* const from = stats + c * places + unit * kMaxColumnWarps;
    const auto merged =
        merge_by_half_warp<P>([&](int u) { return from[u]; }, min(kMaxColumnWarps, count - unit * kMaxColumnWarps));
    if (first + half < tasks) f(c, unit, merged);
  }
}

// Replaces the first operand by the results. `hole`: the position of the hole, or -1 if there is none.
template <class P, int kCount, bool kPacks>
__device__ __forceinline__ void make_results(const Parameters<P>& p, Held<P, kCount, kPacks>& lane,
                                             const typename P::Row* row, const typename P::Final* finals, int hole) {
  using Element = typename P::Element;
  using Acc = typename Element::Acc;
  lane.forget();
  P::with_args(p.args, [&](const auto& args) {
    const auto value = [&](int j, int i, const typename P::Final& final) {
      Acc value = P::output(args, row[i], final, lane.x(args, j, i), lane.y(j, i));
      if constexpr (P::kMasked) value = lane.masked(j, i) ? P::masked_output(args) : value;
      if constexpr (P::kHole) value = j == hole ? P::hole_output(args, row[i], final) : value;
      return value;
    };
    if constexpr (kPacks && sizeof(typename Element::Bits) == 2) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const typename P::Final low = finals[2 * w], high = finals[2 * w + 1];
#pragma unroll
        for (int j = 0; j < kCount; ++j)
          lane.raw[0][j].word[w] = pair_of<Element>(value(j, 2 * w, low), value(j, 2 * w + 1, high));
      }
    } else {
#pragma unroll
      for (int i = 0; i < Held<P, kCount, kPacks>::kWidth; ++i) {
        const typename P::Final final = finals[i];
#pragma unroll
        for (int j = 0; j < kCount; ++j) lane.set_bits(0, j, i, Element::store(value(j, i, final)));
      }
    }
  });
}

// The state of a thread in columns_kernel. The functions are the phases of the kernel, in the order in which they run.
template <class P, bool kPacks>
struct ColumnsThread {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  static constexpr int kCount = column_vectors(P::kOperands);
  using Lane = Held<P, kCount, kPacks>;
  using Unit = typename Lane::Unit;
  static constexpr int kWidth = Lane::kWidth;
  static_assert(kWidth == 1 || (!P::kDecoded && !P::kHole));

  const Parameters<P>& p;
  const int warp_lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int axis_warp = warp >> p.column_warp_bits, axis_lane = warp_lane >> p.column_lane_bits;
  const int block_columns = kWidth << (p.column_warp_bits + p.column_lane_bits);
  const int column_of_block = (((warp & ((1 << p.column_warp_bits) - 1)) << p.column_lane_bits) +
                               (warp_lane & ((1 << p.column_lane_bits) - 1))) *
                              kWidth;
  const unsigned index = p.phase == Phase::kFinish ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int block = index % static_cast<unsigned>(p.blocks);
  const int64_t strip = int64_t{index / static_cast<unsigned>(p.blocks)} * block_columns;
  const int64_t column = strip + column_of_block;  // the first of kWidth columns of the lane
  const bool exists = column < p.columns;
  const int64_t outer = exists ? column / p.inner : 0, i0 = exists ? column - outer * p.inner : 0;
  // The first of kCount positions of the lane, and its element.
  const int64_t first = ((int64_t{block} * p.axis_warps + axis_warp) * (32 >> p.column_lane_bits) + axis_lane) * kCount;
  const int64_t at = (outer * p.length + first) * p.inner + i0;
  // How many positions exist, how many are not masked, and how many belong to the statistics.
  const int here = left(p.length);
  int unmasked, wanted;
  typename P::Row row[kWidth];
  Lane lane;
  Acc plain = Acc(0);  // the lane's part of the plain sum
  int hole = -1;       // position of the hole, or -1

  __device__ __forceinline__ explicit ColumnsThread(const Parameters<P>& p) : p(p) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      row[i] = exists ? P::row(p.args, outer, i0 + i, p.length, p.inner) : typename P::Row{};
    unmasked = P::kMasked ? left(p.extras.limit(outer, p.length)) : here;
    wanted = exists && P::skip(row[0]) ? 0 : unmasked;
  }

  __device__ __forceinline__ int left(int64_t end) const {
    return exists ? static_cast<int>(max(int64_t{0}, min(end - first, int64_t{kCount}))) : 0;
  }

  __device__ __forceinline__ void load() {
#pragma unroll
    for (int o = 0; o < P::kOperands; ++o) {
      const Bits* from = static_cast<const Bits*>(p.operands[o]) + at;
      Unit padding;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if constexpr (kPacks) {
          set<Bits>(padding, i, P::pad(p.args, o));
        } else {
          padding = P::pad(p.args, o);
        }
      }
      if (!kPacks || p.aligned) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          lane.raw[o][j] = padding;
          if (j >= wanted) continue;
          const auto* unit = reinterpret_cast<const Unit*>(from + j * p.inner);
          if constexpr (kPacks) {
            lane.raw[o][j] = load_once(unit);
          } else {
            lane.raw[o][j] = *unit;
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          lane.raw[o][j] = padding;
          if (j >= wanted) continue;
#pragma unroll
          for (int i = 0; i < kWidth; ++i) lane.set_bits(o, j, i, from[j * p.inner + i]);
        }
      }
    }
  }

  // Applies masks and biases, and leaves out the hole.
  __device__ __forceinline__ void prepare() {
    if constexpr (P::kMasked) {
      for (auto& word : lane.masks) word = 0;
      if (!kPacks && p.extras.masks()) {
        const auto& where_at = p.extras.where_at;
        const uint8_t* where = p.extras.where && exists ? p.extras.where + where_at(outer, first, i0) : nullptr;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          if (j >= here) continue;
          if (j >= unmasked || (where && !where[j * where_at.axis_stride])) lane.mask(j, 0);
        }
      }
    }
    if constexpr (P::kDecoded) {
      const auto& bias_at = p.extras.bias_at;
      const Bits* bias =
          p.extras.bias && exists ? static_cast<const Bits*>(p.extras.bias) + bias_at(outer, first, i0) : nullptr;
      lane.decode(p.args, row[0], bias != nullptr && here > 0,
                  [&](int j, int) { return Element::load(bias[min(j, here - 1) * bias_at.axis_stride]); });
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        if (j >= wanted) lane.z[j][0] = P::lowest();
    }
    if constexpr (P::kMasked && !kPacks) {
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        if (lane.masked(j, 0)) lane.leave_out(p.args, j, 0);
    }
    if constexpr (P::kPlainSum) {
      if (P::add_plain(p.args)) {
#pragma unroll
        for (int j = 0; j < kCount; ++j)
          if (j < wanted) plain += lane.x(p.args, j, 0);
      }
    }
    if constexpr (P::kHole) {
      const int64_t element = exists ? P::hole(row[0]) - first : -1;
      if (element >= 0 && element < here) hole = static_cast<int>(element);
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        if (j == hole) lane.leave_out(p.args, j, 0);
    }
  }

  // Merges the statistics of warps, and of the blocks of a cluster. Returns the finals of this lane's columns. For
  // split columns (kPartial) it stores the block's statistics for a later kernel, and returns null.
  __device__ __forceinline__ const typename P::Final* merge() {
    Stat<P> stat[kWidth];
    warp_statistics<P>(p, lane, plain, stat);
    // Shared memory, for each column: statistics of warps, and of blocks (each with one place left over, so that
    // columns are in different banks), and finals.
    const int warp_places = p.axis_warps + 1, block_places = p.cluster ? p.blocks + 1 : 0;
    auto* const of_warps = reinterpret_cast<Stat<P>*>(dynamic_shared_memory());
    auto* const of_blocks = of_warps + warp_places * block_columns;
    auto* const of_columns = reinterpret_cast<typename P::Final*>(of_blocks + block_places * block_columns);
    if (p.axis_warps == 1 && p.blocks == 1) {
      if (exists && axis_lane == 0) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const auto final = P::finish(p.args, row[i], stat[i]);
          of_columns[column_of_block + i] = final;
          P::write_row(p.args, column + i, row[i], final);
        }
      }
      __syncwarp();
    } else {
      if (axis_lane == 0) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) of_warps[(column_of_block + i) * warp_places + axis_warp] = stat[i];
      }
      __syncthreads();
      if (p.phase == Phase::kPartial) let_dependents_start();
      if (p.cluster) wait_at_cluster_barrier();
      const int half_lane = threadIdx.x % 16;
      const auto finish = [&](int c, const Stat<P>& all) {
        const int64_t mine = strip + c;
        if (half_lane != 0 || mine >= p.columns) return;
        const auto mine_row = P::row(p.args, mine / p.inner, mine % p.inner, p.length, p.inner);
        of_columns[c] = P::finish(p.args, mine_row, all);
        if (block == 0) P::write_row(p.args, mine, mine_row, of_columns[c]);
      };
      merge_by_halves<P>(of_warps, warp_places, block_columns, p.axis_warps, [&](int c, int, const Stat<P>& merged) {
        if (p.phase == Phase::kPartial) {
          const int64_t mine = strip + c;
          if (half_lane == 0 && mine < p.columns) *stat_at(p, mine / p.inner, block, mine % p.inner) = merged;
        } else if (p.cluster) {
          if (half_lane < p.blocks) store_in_cluster(&of_blocks[c * block_places + block], half_lane, merged);
        } else {
          finish(c, merged);
        }
      });
      if (p.phase == Phase::kPartial) {
        wait_for_predecessor();
        return nullptr;
      }
      if (p.cluster) {
        arrive_at_cluster_barrier();
        wait_at_cluster_barrier();
        merge_by_halves<P>(of_blocks, block_places, block_columns, p.blocks,
                           [&](int c, int, const Stat<P>& all) { finish(c, all); });
        if (P::kHole && p.out != nullptr) {  // after this, other blocks may overwrite what row() has read
          arrive_at_cluster_barrier();
          wait_at_cluster_barrier();
        }
      }
      __syncthreads();
    }
    return of_columns + column_of_block;
  }

  __device__ __forceinline__ void write(const typename P::Final* finals) {
    make_results<P>(p, lane, row, finals, hole);
    Bits* const to = static_cast<Bits*>(p.out) + at;
    if (!kPacks || p.aligned) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (j >= here) continue;
        auto* unit = reinterpret_cast<Unit*>(to + j * p.inner);
        if constexpr (kPacks) {
          store_once(unit, lane.raw[0][j]);
        } else {
          *unit = lane.raw[0][j];
        }
      }
    } else if constexpr (kPacks) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (j >= here) continue;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) to[j * p.inner + i] = get<Bits>(lane.raw[0][j], i);
      }
    }
  }
};

template <class P, bool kPacks>
__global__ void __launch_bounds__(32 * kMaxColumnWarps, kPacks ? 2 : 1)
    columns_kernel(const __grid_constant__ Parameters<P> p) {
  if (p.cluster) arrive_at_cluster_barrier();
  ColumnsThread<P, kPacks> thread(p);
  thread.load();
  thread.prepare();
  const typename P::Final* finals;  // finals of this lane's columns
  if (P::kOutput && p.phase == Phase::kFinish) {
    let_dependents_start();
    wait_for_predecessor();
    finals = final_at(p, thread.outer, thread.i0);
  } else {
    finals = thread.merge();
    if (finals == nullptr) return;
  }
  if (P::kOutput && p.out != nullptr) thread.write(finals);
}

// Statistics only. A lane has 16 bytes of neighbouring columns, goes along the axis, and merges some positions at a
// time into its statistics; in the end the statistics of lanes are merged. The array is read once. Where several blocks
// share a column, the statistics of their parts go to the workspace.
template <class P>
__global__ void __launch_bounds__(32 * kAlongWarps, along_resident(sizeof(typename P::Element::Bits)))
    along_kernel(const __grid_constant__ Parameters<P> p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  constexpr int kCount = column_vectors(P::kOperands);
  using Lane = Held<P, kCount, true>;
  constexpr int kWidth = Lane::kWidth;
  const int bits = p.column_lane_bits, across = threadIdx.x & ((1 << bits) - 1), along = threadIdx.x >> bits;
  const int step = 32 * kAlongWarps >> bits, block_columns = kWidth << bits;
  const unsigned strips = gridDim.x / static_cast<unsigned>(p.blocks), part = blockIdx.x / strips;
  const int64_t strip = int64_t{blockIdx.x % strips} * block_columns, column = strip + across * kWidth;
  const bool exists = column < p.columns;
  const int64_t outer = exists ? column / p.inner : 0, i0 = exists ? column - outer * p.inner : 0;
  const int64_t begin = part * p.part_length + along, end = min((part + 1) * p.part_length, p.length);

  Pack padding[P::kOperands];
#pragma unroll
  for (int o = 0; o < P::kOperands; ++o)
#pragma unroll
    for (int i = 0; i < kWidth; ++i) set<Bits>(padding[o], i, P::pad(p.args, o));
  Stat<P> stat[kWidth];
#pragma unroll
  for (auto& of_column : stat) of_column = Stat<P>::none();
  const Bits* from[P::kOperands];
#pragma unroll
  for (int o = 0; o < P::kOperands; ++o)
    from[o] = static_cast<const Bits*>(p.operands[o]) + (outer * p.length + begin) * p.inner + i0;
  P::with_args(p.args, [&](const auto& args) {
    const int64_t apart = step * p.inner;
    int64_t left = exists ? (end - begin + step - 1) / step : 0;  // positions of this lane
#pragma unroll 1
    for (; left > 0; left -= kCount) {
      Lane lane;
#pragma unroll
      for (int o = 0; o < P::kOperands; ++o) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          lane.raw[o][j] = padding[o];
          if (j >= left) continue;
          if (p.aligned) {
            lane.raw[o][j] = load_once(reinterpret_cast<const Pack*>(from[o] + j * apart));
          } else {
#pragma unroll
            for (int i = 0; i < kWidth; ++i) lane.set_bits(o, j, i, from[o][j * apart + i]);
          }
        }
        from[o] += kCount * apart;
      }
      [[maybe_unused]] Acc peak[kWidth] = {};
      if constexpr (P::kPeak) lane.peaks(args, peak);
      lane.forget();
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        Stat<P> all = Stat<P>::none();
        if constexpr (P::kPeak) all.of[0] = P::larger(stat[i].peak(), peak[i]);
        const auto shift = P::guard(all.peak());
        add_stat<P>(all, stat[i], shift);
#pragma unroll
        for (int k = 0; k < P::kSums; ++k) all.sum(k) = all.sum(k) + lane.sum(args, k, shift, i, i + 1);
        stat[i] = all;
      }
    }
  });

  // Merges the statistics of lanes of a warp that have the same columns, then those of warps.
  for (int bit = bits; bit < 5; ++bit)
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const auto other = shuffle_xor(stat[i], 1 << bit);
      Stat<P> all = Stat<P>::none();
      if constexpr (P::kPeak) all.of[0] = P::larger(stat[i].peak(), other.peak());
      const auto shift = P::guard(all.peak());
      add_stat<P>(all, stat[i], shift);
      add_stat<P>(all, other, shift);
      stat[i] = all;
    }
  auto* const of_warps = reinterpret_cast<Stat<P>*>(dynamic_shared_memory());
  const int warp_lanes = max(0, 5 - bits), places = step >> warp_lanes;
  if ((along & ((1 << warp_lanes) - 1)) == 0) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) of_warps[(along >> warp_lanes) * block_columns + across * kWidth + i] = stat[i];
  }
  __syncthreads();
  if (p.phase == Phase::kPartial) let_dependents_start();
  for (int c = threadIdx.x; c < block_columns; c += blockDim.x) {
    const int64_t mine = strip + c;
    if (mine >= p.columns) continue;
    const auto all = merge_serially<P>([&](int w) { return of_warps[w * block_columns + c]; }, 0, 1, places);
    const int64_t its_outer = mine / p.inner, i = mine - its_outer * p.inner;
    if (p.phase == Phase::kPartial) {
      *stat_at(p, its_outer, part, i) = all;
    } else {
      const auto row = P::row(p.args, its_outer, i, p.length, p.inner);
      P::write_row(p.args, mine, row, P::finish(p.args, row, all));
    }
  }
  if (p.phase == Phase::kPartial) wait_for_predecessor();
}

}  // namespace jaxgpuops::row_engine
