// The row engine: everything that is made of statistics of a row, such as its maximum and a sum, and of its elements.
// An operation is a policy (below); row_plan.h says how rows are divided.
//
// A lane loads all it holds of a row, in the row's own type, before it looks at any of it. Lanes merge their statistics
// with shuffles, warps through shared memory, blocks through that of their cluster, so that a row is read once and its
// result written once. Split algorithms have three kernels: statistics of parts go to the workspace, a block per row
// merges them, and a second sweep, backwards, writes the results of what is still in the L2 cache.
//
//   struct Policy {
//     using Element = ..;                     // scan/element.h
//     static constexpr int kOperands;         // full arrays that are read: x, y
//     static constexpr bool kPeak;            // the first statistic is a maximum, relative to which sums are taken
//     static constexpr int kSums;             // the others are sums
//     static constexpr bool kDecoded;         // elements are kept as what decode() makes of them
//     static constexpr bool kMasked;          // there may be masks
//     static constexpr bool kHole;            // one element of a row may be left out of the statistics
//     static constexpr bool kOutput;          // there may be full results
//     static constexpr bool kPackedPeak;      // 16-bit elements are compared two at a time, as they are stored
//     static constexpr bool kPlainSum;        // the last sum, where add_plain(args), is that of all elements, hole too
//     static constexpr bool kFast, kLarge, kPackColumns, kSingleColumns;  // which kernels there are: RowTraits
//     static constexpr bool kAlignedRows;     // and one for rows that are aligned, which is faster
//     static constexpr bool kAlong;           // and one for statistics only, of vectors of columns
//     struct Args;                            // of the call
//     struct Row;                             // of a row, known before its statistics
//     struct Final;                           // of a row, from its statistics
//     static Row row(args, outer, i, length, inner);
//     static void with_args(args, f);         // calls f with args, or with a type that knows more of them
//     static bool skip(row);                  // nothing of the row is read
//     static int64_t hole(row);               // -1: none
//     static Bits pad(args, operand);         // in place of what is missing or masked: adds nothing to statistics
//     static Acc value(args, x);              // an element, from what is stored; or decode(args, row, x, bias)
//     static Acc larger(a, b), lowest();
//     static uint32_t ordered_pair(args, word), larger_pair(a, b);  // kPackedPeak: what is compared, and how
//     static Acc ordered_value(args, x);      // kPackedPeak: value(), of what ordered_pair() made
//     static Shift guard(peak);               // of a part, or a row: what add() gets
//     static Acc add(args, k, sum, x, y, shift), scaled(k, sum, weight), weight(peak, shift of the whole row);
//     static Final finish(args, row, stat);
//     static void write_row(args, index, row, final);
//     static Acc output(args, row, final, x, y), masked_output(args), hole_output(args, row, final);
//   };
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "common/broadcast.h"
#include "common/intrinsics.cuh"
#include "common/launch.cuh"
#include "common/pairs.cuh"
#include "common/row_plan.h"
#include "scan/element.h"

namespace jaxgpuops::row_engine {

using scan::get;
using scan::Pack;
using scan::set;

enum class Phase { kWhole, kPartial, kFinish };

// Operands that are there for some calls only.
struct Extras {
  const void* bias = nullptr;
  const uint8_t* where = nullptr;
  Broadcast bias_at, where_at;
  int64_t queries = 0, query_stride = 1;  // causal: see softmax.h

  __host__ __device__ bool masks() const { return where || queries; }
  // Positions from this one on are masked.
  __device__ int64_t limit(int64_t outer, int64_t length) const {
    return queries ? min(length, outer / query_stride % queries + 1) : length;
  }
};

template <class P>
struct Parameters {
  const void* operands[2];
  void* out;  // null: results are numbers a row
  typename P::Args args;
  Extras extras;
  int64_t columns, length, inner;  // columns: outer * inner
  int64_t first;                   // column of the first block
  unsigned char* workspace;
  int64_t workspace_stride;  // bytes an outer index
  int64_t finals_at;         // in them
  int spans, units;
  int lane_bits, blocks, unit_warps;
  int column_lane_bits, column_warp_bits, axis_warps;
  int64_t part_length;  // along_kernel: positions of a block
  bool cluster;         // blocks that share a row are one
  bool aligned;         // every vector is, in every row
  Phase phase;
};

template <class P>
struct Stat {
  static constexpr int kCount = P::kSums + (P::kPeak ? 1 : 0);
  using Acc = typename P::Element::Acc;
  Acc of[kCount];

  static __device__ Stat none() {
    Stat stat = {};
    if constexpr (P::kPeak) stat.of[0] = P::lowest();
    return stat;
  }
  __device__ Acc peak() const { return of[0]; }
  __device__ Acc& sum(int k) { return of[k + (P::kPeak ? 1 : 0)]; }
  __device__ Acc sum(int k) const { return of[k + (P::kPeak ? 1 : 0)]; }
};

// ---- What a lane holds ----------------------------------------------------------------------------------------------

// kCount units of 16 bytes, or (not kPacks) of an element. Rows: units of one row; columns: positions of kWidth
// columns.
template <class P, int kCount, bool kPacks>
struct Held {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using Unit = std::conditional_t<kPacks, Pack, Bits>;
  static constexpr int kWidth = kPacks ? 16 / sizeof(Bits) : 1;
  static constexpr int kElements = kCount * kWidth;

  Unit raw[P::kOperands][kCount];
  Acc z[P::kDecoded ? kCount : 1][P::kDecoded ? kWidth : 1];
  uint32_t masks[P::kMasked ? (kElements + 31) / 32 : 1];

  __device__ Bits bits(int operand, int j, int i) const {
    if constexpr (kPacks) {
      return get<Bits>(raw[operand][j], i);
    } else {
      return raw[operand][j];
    }
  }
  __device__ void set_bits(int operand, int j, int i, Bits to) {
    if constexpr (kPacks) {
      set<Bits>(raw[operand][j], i, to);
    } else {
      raw[operand][j] = to;
    }
  }
  __device__ Acc x(const typename P::Args& args, int j, int i) const {
    if constexpr (P::kDecoded) {
      return z[j][i];
    } else {
      return P::value(args, Element::load(bits(0, j, i)));
    }
  }
  __device__ Acc y(int j, int i) const {
    if constexpr (P::kOperands == 2) {
      return Element::load(bits(1, j, i));
    } else {
      return Acc(0);
    }
  }
  __device__ void mask(int j, int i) { masks[(j * kWidth + i) / 32] |= 1u << (j * kWidth + i) % 32; }
  __device__ bool masked(int j, int i) const { return masks[(j * kWidth + i) / 32] >> (j * kWidth + i) % 32 & 1; }

  // After the masks are known. bias(j, i) is called where there is one.
  template <class Bias>
  __device__ void decode(const typename P::Args& args, const typename P::Row& row, bool biased, Bias bias) {
    if constexpr (P::kDecoded) {
#pragma unroll
      for (int j = 0; j < kCount; ++j)
#pragma unroll
        for (int i = 0; i < kWidth; ++i) z[j][i] = P::decode(args, row, Element::load(bits(0, j, i)));
      if (biased) {
#pragma unroll
        for (int j = 0; j < kCount; ++j)
#pragma unroll
          for (int i = 0; i < kWidth; ++i) z[j][i] = rounded_sum(z[j][i], bias(j, i));
      }
    }
  }
  __device__ void leave_out(const typename P::Args& args, int j, int i) {
    if constexpr (P::kDecoded) {
      z[j][i] = P::lowest();
    } else {
#pragma unroll
      for (int o = 0; o < P::kOperands; ++o) set_bits(o, j, i, P::pad(args, o));
    }
  }

  // What was computed from packs is computed again after this: there are not registers for all of it.
  __device__ void forget() {
    if constexpr (kPacks && !P::kDecoded) {
#pragma unroll
      for (auto& units : raw)
#pragma unroll
        for (auto& unit : units)
#pragma unroll
          for (auto& word : unit.word) asm volatile("" : "+r"(word));
    }
  }

  // Of every column.
  __device__ void peaks(const typename P::Args& args, Acc (&peak)[kWidth]) const {
    if constexpr (P::kPackedPeak && kPacks) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t pair = P::ordered_pair(args, raw[0][0].word[w]);
#pragma unroll
        for (int j = 1; j < kCount; ++j) pair = P::larger_pair(pair, P::ordered_pair(args, raw[0][j].word[w]));
#pragma unroll
        for (int i = 0; i < 2; ++i)
          peak[2 * w + i] =
              P::larger(P::lowest(), P::ordered_value(args, Element::load(static_cast<Bits>(pair >> 16 * i))));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        peak[i] = P::lowest();
#pragma unroll
        for (int j = 0; j < kCount; ++j) peak[i] = P::larger(peak[i], x(args, j, i));
      }
    }
  }
  // Of all columns.
  __device__ Acc peak(const typename P::Args& args) const {
    Acc of_columns[kWidth];
    peaks(args, of_columns);
    Acc peak = of_columns[0];
#pragma unroll
    for (int i = 1; i < kWidth; ++i) peak = P::larger(peak, of_columns[i]);
    return peak;
  }
  // Of the columns in [from, to).
  template <class Args, class Shift>
  __device__ Acc sum(const Args& args, int k, const Shift& shift, int from, int to) const {
    Acc sum = Acc(0);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      Acc of_unit = Acc(0);
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if constexpr (P::kSums > 0)
          if (i >= from && i < to) of_unit = P::add(args, k, of_unit, x(args, j, i), y(j, i), shift);
      sum = j == 0 ? of_unit : sum + of_unit;
    }
    return sum;
  }
};

// 16 bytes of what is nearest to values.
template <class Element>
__device__ __forceinline__ Pack packed(const typename Element::Acc (&value)[16 / sizeof(typename Element::Bits)]) {
  using Bits = typename Element::Bits;
  Pack pack;
  if constexpr (sizeof(Bits) == 2 && std::is_floating_point_v<typename Element::Acc>) {
#pragma unroll
    for (int w = 0; w < 4; ++w) pack.word[w] = pair_of<Element>(value[2 * w], value[2 * w + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < static_cast<int>(16 / sizeof(Bits)); ++i) set<Bits>(pack, i, Element::store(value[i]));
  }
  return pack;
}

// ---- Merging --------------------------------------------------------------------------------------------------------

// Of the lanes whose numbers differ in the bits [from, to) only; all of them get the same bits.
template <class P, class Acc>
__device__ __forceinline__ Acc merged_peak(Acc peak, int from, int to) {
#pragma unroll
  for (int bit = 0; bit < 5; ++bit)
    if (bit >= from && bit < to) peak = P::larger(peak, shuffle_xor(peak, 1 << bit));
  return peak;
}
template <class Acc>
__device__ __forceinline__ Acc merged_sum(Acc sum, int from, int to) {
#pragma unroll
  for (int bit = 0; bit < 5; ++bit)
    if (bit >= from && bit < to) sum = sum + shuffle_xor(sum, 1 << bit);
  return sum;
}

template <class P, class Shift>
__device__ __forceinline__ void add_stat(Stat<P>& to, const Stat<P>& from, const Shift& shift) {
  typename Stat<P>::Acc weight = 1;
  if constexpr (P::kPeak && P::kSums > 0) weight = P::weight(from.peak(), shift);
#pragma unroll
  for (int k = 0; k < P::kSums; ++k) to.sum(k) = to.sum(k) + P::scaled(k, from.sum(k), weight);
}

// Of what stat(begin), stat(begin + step), .. below count are.
template <class P, class Get>
__device__ __forceinline__ Stat<P> merge_serially(Get stat, int begin, int step, int count) {
  Stat<P> all = Stat<P>::none();
  if constexpr (P::kPeak)
    for (int u = begin; u < count; u += step) all.of[0] = P::larger(all.of[0], stat(u).peak());
  const auto shift = P::guard(all.peak());  // without a peak there is nothing to guard, and it is not used
  for (int u = begin; u < count; u += step) add_stat<P>(all, stat(u), shift);
  return all;
}

// By a warp, all of whose lanes get it.
template <class P>
__device__ __forceinline__ Stat<P> merge_lanes(Stat<P> mine) {
  Stat<P> all = Stat<P>::none();
  if constexpr (P::kPeak) all.of[0] = merged_peak<P>(mine.peak(), 0, 5);
  add_stat<P>(all, mine, P::guard(all.peak()));
#pragma unroll
  for (int k = 0; k < P::kSums; ++k) all.sum(k) = merged_sum(all.sum(k), 0, 5);
  return all;
}
template <class P, class Get>
__device__ __forceinline__ Stat<P> merge_by_warp(Get stat, int count) {
  return merge_lanes<P>(merge_serially<P>(stat, threadIdx.x % 32, 32, count));
}

// By half a warp, all of whose lanes get it; at most kMaxColumnWarps.
template <class P, class Get>
__device__ __forceinline__ Stat<P> merge_by_half_warp(Get stat, int count) {
  static_assert(kMaxColumnWarps == 16);
  const int lane = threadIdx.x % 16;
  Stat<P> mine = Stat<P>::none(), all = mine;
  if (lane < count) mine = stat(lane);
  if constexpr (P::kPeak) all.of[0] = merged_peak<P>(mine.peak(), 0, 4);
  add_stat<P>(all, mine, P::guard(all.peak()));
#pragma unroll
  for (int k = 0; k < P::kSums; ++k) all.sum(k) = merged_sum(all.sum(k), 0, 4);
  return all;
}

// The workspace of an outer index: units * inner statistics, then inner finals.
template <class P>
__device__ __forceinline__ Stat<P>* stat_at(const Parameters<P>& p, int64_t outer, int64_t unit, int64_t i) {
  return reinterpret_cast<Stat<P>*>(p.workspace + outer * p.workspace_stride) + unit * p.inner + i;
}
template <class P>
__device__ __forceinline__ typename P::Final* final_at(const Parameters<P>& p, int64_t outer, int64_t i) {
  return reinterpret_cast<typename P::Final*>(p.workspace + outer * p.workspace_stride + p.finals_at) + i;
}

// ---- Rows -----------------------------------------------------------------------------------------------------------

// 16 of the 32 bytes of a and b, from byte `at` on, 0 to 16.
template <int kItemBytes>
__device__ __forceinline__ Pack between(const Pack& a, const Pack& b, int at) {
  uint32_t word[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    word[i] = at & 16 ? b.word[i] : a.word[i];
    word[i + 4] = b.word[i];
  }
  if constexpr (kItemBytes <= 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) word[i] = at & 8 ? word[i + 2] : word[i];
  }
  if constexpr (kItemBytes <= 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) word[i] = at & 4 ? word[i + 1] : word[i];
  }
  Pack pack;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pack.word[i] = kItemBytes < 4 ? funnel_right(word[i], word[i + 1], 8 * (at & 3)) : word[i];
  return pack;
}

// A lane's part of a span: unit j has the kWidth elements from element(j) on.
template <class P, int kVectors, bool kAligned>
class Span {
 public:
  using Bits = typename P::Element::Bits;
  static constexpr int kWidth = 16 / sizeof(Bits);

  __device__ explicit Span(int lane_bits)
      : lanes(1 << lane_bits), slot(threadIdx.x & (lanes - 1)), team(threadIdx.x % 32 & ~(lanes - 1)) {}

  __device__ int element(int j) const { return (j * lanes + slot) * kWidth; }
  __device__ int size() const { return kVectors * lanes * kWidth; }

  // The first `left` elements from `from` on, and `pad` for the others. Nothing is read from beyond them where the
  // array may end there (`last`), else what is in the same 16 bytes.
  __device__ void load(const Bits* from, int left, bool last, Bits pad, Pack (&units)[kVectors]) const {
    Pack padding;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) set<Bits>(padding, i, pad);
    if constexpr (kAligned) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        units[j] = element(j) < left ? load_once(reinterpret_cast<const Pack*>(from + element(j))) : padding;
    } else {
      // Aligned windows, of which neighbouring lanes hold neighbours, and then what is between two of them.
      const int shift = reinterpret_cast<uintptr_t>(from) & 15;
      const auto* windows = reinterpret_cast<const Pack*>(reinterpret_cast<uintptr_t>(from) - shift);
      const int end = left > 0 ? left * static_cast<int>(sizeof(Bits)) + shift : 0;
      const int whole = last ? end & ~15 : end;
      const auto window = [&](int w) { return w * 16 < whole ? load_once(windows + w) : padding; };
#pragma unroll
      for (int j = 0; j < kVectors; ++j) units[j] = window(j * lanes + slot);
      Pack beyond = window(kVectors * lanes);
      if (whole < end) {
        Pack part = padding;
        const int begin = max(shift - whole, 0) / static_cast<int>(sizeof(Bits));
#pragma unroll
        for (int i = 0; i < kWidth - 1; ++i)
          if (i >= begin && whole + i * static_cast<int>(sizeof(Bits)) < end)
            set<Bits>(part, i, reinterpret_cast<const Bits*>(windows + whole / 16)[i]);
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
          if (j * lanes + slot == whole / 16) units[j] = part;
        if (kVectors * lanes == whole / 16) beyond = part;
      }
      const int next_lane = team | ((slot + 1) & (lanes - 1));
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        Pack next = units[j];
        if (slot == 0) next = j + 1 < kVectors ? units[j + 1 < kVectors ? j + 1 : j] : beyond;
        next = shuffle_from(next, next_lane);
        units[j] = between<sizeof(Bits)>(units[j], next, shift);
      }
    }
    if constexpr (!kAligned || P::kMasked) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int rest = left - element(j);
        if (rest <= 0) {
          units[j] = padding;
        } else if (rest < kWidth) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i)
            if (i >= rest) set<Bits>(units[j], i, pad);
        }
      }
    }
  }

  __device__ void store(Bits* to, int left, Pack (&units)[kVectors]) const {
    if constexpr (kAligned) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        if (element(j) < left) store_once(reinterpret_cast<Pack*>(to + element(j)), units[j]);
    } else {
      store_shifted(to, left, units);
    }
  }

  const int lanes, slot, team;

 private:
  __device__ void store_shifted(Bits* to, int left, Pack (&units)[kVectors]) const {
    const int shift = reinterpret_cast<uintptr_t>(to) & 15, tail = shift / static_cast<int>(sizeof(Bits));
    const int end = min(left, size());
    if (slot == lanes - 1) {  // the window after the last belongs to the next span, but for this
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const int e = element(kVectors - 1) + i;
        if (i >= kWidth - tail && e < end) to[e] = get<Bits>(units[kVectors - 1], i);
      }
    }
    const int previous_lane = team | ((slot - 1) & (lanes - 1));
#pragma unroll
    for (int j = kVectors - 1; j >= 0; --j) {
      Pack previous = units[j];
      if (slot == lanes - 1 && j > 0) previous = units[j > 0 ? j - 1 : 0];
      previous = shuffle_from(previous, previous_lane);
      units[j] = between<sizeof(Bits)>(previous, units[j], 16 - shift);
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int e = element(j) - tail;  // of the window
      if (e >= 0 && e + kWidth <= end) {
        store_once(reinterpret_cast<Pack*>(to + e), units[j]);
      } else {
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          if (e + i >= 0 && e + i < end) to[e + i] = get<Bits>(units[j], i);
      }
    }
  }
};

// kAligned: every row is, to 16 bytes. The bits of the results are the same.
template <class P, int kVectors, bool kAligned>
__global__ void __launch_bounds__(32 * kMaxBlockWarps) rows_kernel(const __grid_constant__ Parameters<P> p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using Lane = Held<P, kVectors, true>;
  constexpr int kWidth = Lane::kWidth;
  const int warp = threadIdx.x / 32, block_warps = blockDim.x / 32;
  const Span<P, kVectors, kAligned> span(p.lane_bits);
  if (p.cluster) arrive_at_cluster_barrier();  // until all blocks have begun, their memory is not there

  int64_t outer;
  int number = 0, block = 0;
  if (p.spans == 1) {
    outer = (int64_t{blockIdx.x} * block_warps + warp) * (32 >> p.lane_bits) + (threadIdx.x % 32 >> p.lane_bits);
  } else {
    // The last results first: the last of what was read is still in the cache.
    const unsigned index = p.phase == Phase::kFinish ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    outer = index / static_cast<unsigned>(p.blocks);
    block = index % static_cast<unsigned>(p.blocks);
    number = block * block_warps + warp;
  }
  outer += p.first;
  const bool exists = outer < p.columns;
  typename P::Row row = {};
  if (exists) row = P::row(p.args, outer, 0, p.length, 1);
  const int64_t first = int64_t{number} * span.size();
  const auto left = [&](int64_t end) {  // elements of the span that are before `end`
    return exists ? static_cast<int>(max(int64_t{0}, min(end - first, static_cast<int64_t>(span.size())))) : 0;
  };
  const int here = left(p.length);
  const int unmasked = P::kMasked ? left(p.extras.limit(outer, p.length)) : here;
  const int wanted = exists && P::skip(row) ? 0 : unmasked;
  const int64_t at = outer * p.length + first;

  Lane lane;
#pragma unroll
  for (int o = 0; o < P::kOperands; ++o)
    span.load(static_cast<const Bits*>(p.operands[o]) + at, wanted, outer + 1 == p.columns, P::pad(p.args, o),
              lane.raw[o]);

  const bool masks = P::kMasked && p.extras.masks();
  if constexpr (P::kMasked) {
    for (auto& word : lane.masks) word = 0;
    if (masks) {
      const int64_t stride = p.extras.where_at.axis_stride;
      const uint8_t* where =
          p.extras.where && exists ? p.extras.where + p.extras.where_at.outer(outer) + first * stride : nullptr;
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const int e = span.element(j) + i;
          if (e >= here) continue;
          if (e >= unmasked || (where && !where[e * stride])) lane.mask(j, i);
        }
    }
  }
  if constexpr (P::kDecoded) {
    const int64_t stride = p.extras.bias_at.axis_stride;
    const Bits* bias = p.extras.bias && exists
                           ? static_cast<const Bits*>(p.extras.bias) + p.extras.bias_at.outer(outer) + first * stride
                           : nullptr;
    lane.decode(p.args, row, bias != nullptr, [&](int j, int i) {
      const int e = span.element(j) + i;
      return Element::load(bias[min(e, max(here - 1, 0)) * stride]);
    });
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (span.element(j) + i >= wanted) lane.z[j][i] = P::lowest();
  }
  if (masks) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (lane.masked(j, i)) lane.leave_out(p.args, j, i);
  }

  Acc plain = Acc(0);
  if constexpr (P::kPlainSum) {
    if (P::add_plain(p.args)) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          if (span.element(j) + i < wanted) plain += lane.x(p.args, j, i);
    }
  }
  int hole = -1;  // j * kWidth + i
  if constexpr (P::kHole) {
    const int64_t element = exists ? P::hole(row) - first : -1;
    if (element >= 0 && element < here) {
      const int vector = static_cast<int>(element) / kWidth;
      if ((vector & (span.lanes - 1)) == span.slot)
        hole = (vector >> p.lane_bits) * kWidth + static_cast<int>(element) % kWidth;
    }
    if (hole >= 0) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          if (j * kWidth + i == hole) lane.leave_out(p.args, j, i);
    }
  }

  typename P::Final final;
  if (P::kOutput && p.phase == Phase::kFinish) {
    let_dependents_start();
    wait_for_predecessor();
    final = *final_at(p, outer, 0);
  } else {
    Stat<P> stat;
    Acc peak = Acc(0);
    if constexpr (P::kPeak) {
      peak = merged_peak<P>(lane.peak(p.args), 0, p.lane_bits);
      stat.of[0] = peak;
    }
    const auto shift = P::guard(peak);
    P::with_args(p.args, [&](const auto& args) {
#pragma unroll
      for (int k = 0; k < P::kSums; ++k) {
        const bool is_plain = P::kPlainSum && k == P::kSums - 1;
        stat.sum(k) = is_plain ? plain : lane.sum(args, k, shift, 0, kWidth);
      }
    });
#pragma unroll
    for (int k = 0; k < P::kSums; ++k) stat.sum(k) = merged_sum(stat.sum(k), 0, p.lane_bits);
    auto* const stats = reinterpret_cast<Stat<P>*>(dynamic_shared_memory());
    if (p.phase == Phase::kPartial) {
      let_dependents_start();
      if (p.unit_warps == 1) {
        if (threadIdx.x % 32 == 0 && number < p.spans) *stat_at(p, outer, number, 0) = stat;
      } else {
        if (threadIdx.x % 32 == 0) stats[warp] = stat;
        __syncthreads();
        stat = merge_by_warp<P>([&](int u) { return stats[u]; }, min(block_warps, p.spans - block * block_warps));
        if (threadIdx.x == 0) *stat_at(p, outer, block, 0) = stat;
      }
      wait_for_predecessor();
      return;
    }
    if (p.spans > 1) {
      if (p.cluster) {
        wait_at_cluster_barrier();
        if (number < p.spans)
          for (int rank = threadIdx.x % 32; rank < p.blocks; rank += 32) store_in_cluster(&stats[number], rank, stat);
        arrive_at_cluster_barrier();
        wait_at_cluster_barrier();
      } else {
        if (threadIdx.x % 32 == 0 && number < p.spans) stats[number] = stat;
        __syncthreads();
      }
      stat = merge_by_warp<P>([&](int u) { return stats[u]; }, p.spans);
    }
    final = P::finish(p.args, row, stat);
    if (exists && number == 0 && span.slot == 0) P::write_row(p.args, outer, row, final);
  }

  if (!P::kOutput || p.out == nullptr) return;
  lane.forget();
  P::with_args(p.args, [&](const auto& args) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      Acc value[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        value[i] = P::output(args, row, final, lane.x(args, j, i), lane.y(j, i));
        if constexpr (P::kMasked) value[i] = lane.masked(j, i) ? P::masked_output(args) : value[i];
      }
      lane.raw[0][j] = packed<Element>(value);
    }
  });
  if constexpr (P::kHole) {
    if (hole >= 0) {
      const Bits value = Element::store(P::hole_output(p.args, row, final));
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          if (j * kWidth + i == hole) set<Bits>(lane.raw[0][j], i, value);
    }
  }
  span.store(static_cast<Bits*>(p.out) + at, here, lane.raw[0]);
}

// ---- Columns --------------------------------------------------------------------------------------------------------

template <class P, bool kPacks>
__global__ void __launch_bounds__(32 * kMaxColumnWarps, kPacks ? 2 : 1)
    columns_kernel(const __grid_constant__ Parameters<P> p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  constexpr int kCount = column_vectors(P::kOperands);
  using Lane = Held<P, kCount, kPacks>;
  using Unit = typename Lane::Unit;
  constexpr int kWidth = Lane::kWidth;
  static_assert(kWidth == 1 || (!P::kDecoded && !P::kHole));
  if (p.cluster) arrive_at_cluster_barrier();

  const int warp_lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int axis_warp = warp >> p.column_warp_bits, axis_lane = warp_lane >> p.column_lane_bits;
  const int column_bits = p.column_warp_bits + p.column_lane_bits;
  const int block_columns = kWidth << column_bits;
  const int column_of_block = (((warp & ((1 << p.column_warp_bits) - 1)) << p.column_lane_bits) +
                               (warp_lane & ((1 << p.column_lane_bits) - 1))) *
                              kWidth;
  const unsigned index = p.phase == Phase::kFinish ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int block = index % static_cast<unsigned>(p.blocks);
  const int64_t strip = p.first + int64_t{index / static_cast<unsigned>(p.blocks)} * block_columns;
  const int64_t column = strip + column_of_block;
  const bool exists = column < p.columns;
  const int64_t outer = exists ? column / p.inner : 0, i0 = exists ? column - outer * p.inner : 0;
  const int64_t first = ((int64_t{block} * p.axis_warps + axis_warp) * (32 >> p.column_lane_bits) + axis_lane) * kCount;
  const int64_t at = (outer * p.length + first) * p.inner + i0;
  const auto left = [&](int64_t end) {
    return exists ? static_cast<int>(max(int64_t{0}, min(end - first, int64_t{kCount}))) : 0;
  };
  const int here = left(p.length);

  typename P::Row row[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    row[i] = exists ? P::row(p.args, outer, i0 + i, p.length, p.inner) : typename P::Row{};
  const int unmasked = P::kMasked ? left(p.extras.limit(outer, p.length)) : here;
  const int wanted = exists && P::skip(row[0]) ? 0 : unmasked;

  Lane lane;
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
  Acc plain = Acc(0);
  if constexpr (P::kPlainSum) {
    if (P::add_plain(p.args)) {
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        if (j < wanted) plain += lane.x(p.args, j, 0);
    }
  }
  int hole = -1;
  if constexpr (P::kHole) {
    const int64_t element = exists ? P::hole(row[0]) - first : -1;
    if (element >= 0 && element < here) hole = static_cast<int>(element);
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (j == hole) lane.leave_out(p.args, j, 0);
  }

  const typename P::Final* finals;  // of this lane's columns
  if (P::kOutput && p.phase == Phase::kFinish) {
    let_dependents_start();
    wait_for_predecessor();
    finals = final_at(p, outer, i0);
  } else {
    Stat<P> stat[kWidth];
    Acc peak[kWidth] = {};
    if constexpr (P::kPeak) lane.peaks(p.args, peak);
    lane.forget();
    // The shuffles of all columns together: one alone would wait for itself.
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
        if (sizeof(Bits) == 2 && i % 2 == 1) lane.forget();  // two columns after the other
      }
    });
    for (int bit = p.column_lane_bits; bit < 5; ++bit)
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
#pragma unroll
        for (int k = 0; k < P::kSums; ++k) stat[i].sum(k) = stat[i].sum(k) + shuffle_xor(stat[i].sum(k), 1 << bit);
    // Shared memory, of each column: statistics of warps, of blocks (each with one place left over, so that columns
    // are in different banks), and finals.
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
      // Half a warp has a column.
      const int half = threadIdx.x / 16, half_lane = threadIdx.x % 16, halves = blockDim.x / 16;
      const auto finish = [&](int c, const Stat<P>& all) {
        const int64_t mine = strip + c;
        if (half_lane != 0 || mine >= p.columns) return;
        const auto mine_row = P::row(p.args, mine / p.inner, mine % p.inner, p.length, p.inner);
        of_columns[c] = P::finish(p.args, mine_row, all);
        if (block == 0) P::write_row(p.args, mine, mine_row, of_columns[c]);
      };
      for (int first_half = 0; first_half < block_columns; first_half += halves) {
        const int c = min(first_half + half, block_columns - 1);
        const auto merged = merge_by_half_warp<P>([&](int w) { return of_warps[c * warp_places + w]; }, p.axis_warps);
        if (first_half + half >= block_columns) continue;
        if (p.phase == Phase::kPartial) {
          const int64_t mine = strip + c;
          if (half_lane == 0 && mine < p.columns) *stat_at(p, mine / p.inner, block, mine % p.inner) = merged;
        } else if (p.cluster) {
          if (half_lane < p.blocks) store_in_cluster(&of_blocks[c * block_places + block], half_lane, merged);
        } else {
          finish(c, merged);
        }
      }
      if (p.phase == Phase::kPartial) {
        wait_for_predecessor();
        return;
      }
      if (p.cluster) {
        arrive_at_cluster_barrier();
        wait_at_cluster_barrier();
        for (int first_half = 0; first_half < block_columns; first_half += halves) {
          const int c = min(first_half + half, block_columns - 1);
          const auto all = merge_by_half_warp<P>([&](int b) { return of_blocks[c * block_places + b]; }, p.blocks);
          if (first_half + half < block_columns) finish(c, all);
        }
        if (P::kHole && p.out != nullptr) {  // row() has read what the others may write over now
          arrive_at_cluster_barrier();
          wait_at_cluster_barrier();
        }
      }
      __syncthreads();
    }
    finals = of_columns + column_of_block;
  }

  if (!P::kOutput || p.out == nullptr) return;
  lane.forget();
  Bits* const to = static_cast<Bits*>(p.out) + at;
  P::with_args(p.args, [&](const auto& args) {
    const auto value = [&](int j, int i, const typename P::Final& final) {
      Acc value = P::output(args, row[i], final, lane.x(args, j, i), lane.y(j, i));
      if constexpr (P::kMasked) value = lane.masked(j, i) ? P::masked_output(args) : value;
      if constexpr (P::kHole) value = j == hole ? P::hole_output(args, row[i], final) : value;
      return value;
    };
    if constexpr (kPacks && sizeof(Bits) == 2) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const typename P::Final low = finals[2 * w], high = finals[2 * w + 1];
#pragma unroll
        for (int j = 0; j < kCount; ++j)
          lane.raw[0][j].word[w] = pair_of<Element>(value(j, 2 * w, low), value(j, 2 * w + 1, high));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const typename P::Final final = finals[i];
#pragma unroll
        for (int j = 0; j < kCount; ++j) lane.set_bits(0, j, i, Element::store(value(j, i, final)));
      }
    }
  });
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

// Statistics only, of columns of 16 bytes beside each other. A lane goes along the axis and merges some positions at a
// time into statistics of its own; lanes are merged at the end. Reads the array once. Where several blocks share a
// column, what they make of their parts goes to the workspace.
template <class P>
__global__ void __launch_bounds__(32 * kAlongWarps, 3) along_kernel(const __grid_constant__ Parameters<P> p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  constexpr int kCount = column_vectors(P::kOperands);
  using Lane = Held<P, kCount, true>;
  constexpr int kWidth = Lane::kWidth;
  const int bits = p.column_lane_bits, across = threadIdx.x & ((1 << bits) - 1), along = threadIdx.x >> bits;
  const int step = 32 * kAlongWarps >> bits, block_columns = kWidth << bits;
  const unsigned strips = gridDim.x / static_cast<unsigned>(p.blocks), part = blockIdx.x / strips;
  const int64_t strip = p.first + int64_t{blockIdx.x % strips} * block_columns, column = strip + across * kWidth;
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

  // Lanes of a warp that have the same columns, then warps.
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

// ---- Between the sweeps of a split row ------------------------------------------------------------------------------

// A lane per column, where few units are merged.
template <class P>
__global__ void __launch_bounds__(32 * kAlongWarps) merge_few_kernel(const __grid_constant__ Parameters<P> p) {
  wait_for_predecessor();
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= p.columns) return;
  const int64_t outer = column / p.inner, i = column - outer * p.inner;
  const auto row = P::row(p.args, outer, i, p.length, p.inner);
  const auto all = merge_serially<P>([&](int u) { return *stat_at(p, outer, u, i); }, 0, 1, p.units);
  P::write_row(p.args, column, row, P::finish(p.args, row, all));
}

// A block per column.
template <class P>
__global__ void __launch_bounds__(32 * kMaxBlockWarps) merge_kernel(const __grid_constant__ Parameters<P> p) {
  let_dependents_start();
  wait_for_predecessor();
  const int64_t column = p.first + blockIdx.x, outer = column / p.inner, i = column - outer * p.inner;
  const auto stat = [&](int u) { return *stat_at(p, outer, u, i); };
  Stat<P> all = merge_lanes<P>(merge_serially<P>(stat, threadIdx.x, blockDim.x, p.units));
  if (blockDim.x > 32) {
    auto* const of_warps = reinterpret_cast<Stat<P>*>(dynamic_shared_memory());
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = all;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    all = merge_by_warp<P>([&](int w) { return of_warps[w]; }, blockDim.x / 32);
  }
  if (threadIdx.x != 0) return;
  const auto row = P::row(p.args, outer, i, p.length, p.inner);
  const auto final = P::finish(p.args, row, all);
  P::write_row(p.args, column, row, final);
  *final_at(p, outer, i) = final;
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

// How many clusters (or blocks) of a kernel a device has at a time. To ask takes microseconds: the last answer is kept,
// for each device, with what it was asked for.
class Residents {
 public:
  cudaError_t count(const void* kernel, const Launch& shape, int* count) {
    int device = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess) return status;
    const uint64_t asked = shape.shared_bytes << 12 | shape.block.x / 32 << 6 | shape.cluster;
    std::atomic<uint64_t>& last = last_[std::min(device, kDevices)];
    const uint64_t known = last.load(std::memory_order_relaxed);
    *count = static_cast<int>(known & kMost);
    if (known >> kCountBits == asked) return cudaSuccess;
    status = ask(kernel, shape, device, count);
    if (status == cudaSuccess && device < kDevices) last.store(asked << kCountBits | *count, std::memory_order_relaxed);
    return status;
  }

 private:
  static constexpr int kDevices = 32, kCountBits = 24, kMost = (1 << kCountBits) - 1;

  static cudaError_t ask(const void* kernel, const Launch& shape, int device, int* count) {
    cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes));
    if (status != cudaSuccess) return status;
    if (shape.cluster == 1) {
      int processors = 0;
      status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      if (status == cudaSuccess)
        status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, kernel, shape.block.x, shape.shared_bytes);
      *count *= processors;
    } else {
      cudaLaunchConfig_t config = {};
      config.gridDim = dim3(shape.cluster);
      config.blockDim = shape.block;
      config.dynamicSmemBytes = shape.shared_bytes;
      cudaLaunchAttribute attribute;
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = shape.cluster;
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
      config.attrs = &attribute;
      config.numAttrs = 1;
      status = cudaOccupancyMaxActiveClusters(count, kernel, &config);
    }
    *count = std::clamp(*count, 1, kMost);
    return status;
  }

  std::atomic<uint64_t> last_[kDevices + 1] = {};  // the last one is of all others, and stays 0
};

// Allows clusters of more than 8 blocks.
inline cudaError_t allow_cluster(const void* kernel, int blocks) {
  return blocks > 8 ? cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) : cudaSuccess;
}

template <class P>
struct Call {
  cudaStream_t stream;
  const RowPlan& plan;
  Rows shape;
  Parameters<P> p;

  using Kernel = void (*)(Parameters<P>);

  template <int kVectors>
  Kernel rows() const {
    if constexpr (P::kAlignedRows)
      if (p.aligned) return rows_kernel<P, kVectors, true>;
    return rows_kernel<P, kVectors, false>;
  }

  Kernel kernel() const {
    if (plan.algorithm == RowAlgorithm::kRows || plan.algorithm == RowAlgorithm::kRowsSplit) {
      if constexpr (P::kFast) {
        if (plan.vectors == 1) return rows<1>();
        if constexpr (P::kLarge)
          if (plan.vectors == 8) return rows<8>();
      }
      return plan.vectors == kOnlyVectors ? rows<kOnlyVectors>() : nullptr;
    }
    if constexpr (P::kAlong)
      if (plan.along) return along_kernel<P>;
    if constexpr (P::kPackColumns)
      if (plan.vector && !plan.along) return columns_kernel<P, true>;
    if constexpr (P::kSingleColumns)
      if (!plan.vector) return columns_kernel<P, false>;
    return nullptr;
  }

  // A sweep over the columns [first, end).
  cudaError_t sweep(Kernel kernel, Phase phase, int64_t first, int64_t end, bool overlap) {
    p.phase = phase;
    p.first = first;
    p.columns = end;
    Launch launched;
    launched.block = dim3(plan.threads());
    launched.overlap = overlap;
    const bool whole = phase == Phase::kWhole;
    const int64_t stat = sizeof(Stat<P>);
    int64_t groups;  // of columns
    if (shape.inner == 1) {
      groups = end - first;
      if (plan.spans == 1) {
        const int64_t teams = plan.block_warps * (32 >> plan.lane_bits);
        groups = (groups + teams - 1) / teams;
      } else {
        launched.shared_bytes = (whole ? plan.spans : plan.block_warps) * stat;
      }
    } else if (plan.along) {
      const int64_t columns = int64_t{16 / sizeof(typename P::Element::Bits)} << plan.column_lane_bits;
      groups = (end - first + columns - 1) / columns;
      launched.shared_bytes = 16 / sizeof(typename P::Element::Bits) * plan.threads() * stat;
    } else {
      const int64_t columns = (plan.vector ? 16 / sizeof(typename P::Element::Bits) : 1)
                              << (plan.column_lane_bits + plan.column_warp_bits);
      groups = (end - first + columns - 1) / columns;
      if (phase != Phase::kFinish)
        launched.shared_bytes =
            columns * ((plan.axis_warps + 1 + (p.cluster ? plan.blocks + 1 : 0)) * stat + sizeof(typename P::Final));
    }
    const int64_t blocks = groups * plan.blocks;
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    launched.grid = dim3(static_cast<unsigned>(blocks));
    if (p.cluster) {
      launched.cluster = static_cast<int>(plan.blocks);
      const cudaError_t status = allow_cluster(reinterpret_cast<const void*>(kernel), launched.cluster);
      if (status != cudaSuccess) return status;
    }
    return launch(stream, launched, kernel, p);
  }

  cudaError_t merge(int64_t first, int64_t end) {
    p.first = first;
    p.columns = end;
    Launch launched;
    launched.overlap = plan.overlap;
    if constexpr (P::kAlong) {
      if (plan.along && plan.units <= kMaxSerialUnits) {
        const int threads = 32 * kAlongWarps;
        launched.grid = dim3(static_cast<unsigned>((end - first + threads - 1) / threads));
        launched.block = dim3(threads);
        return launch(stream, launched, merge_few_kernel<P>, p);
      }
    }
    launched.grid = dim3(static_cast<unsigned>(end - first));
    launched.block = dim3(plan.units <= kMaxFlatSpans ? 32 : 32 * kMaxBlockWarps);
    launched.shared_bytes = kMaxBlockWarps * sizeof(Stat<P>);
    return launch(stream, launched, merge_kernel<P>, p);
  }
};

// Of RowAlgorithm::kRowsStream: row_stream.cuh.
template <class P>
cudaError_t run_stream(cudaStream_t stream, const RowPlan& plan, const Parameters<P>& p);

// Runs a call whose parameters are set but for what the plan says.
template <class P>
cudaError_t run(cudaStream_t stream, const RowPlan& plan, const Rows& rows, Parameters<P> p, void* workspace) {
  if (plan.algorithm == RowAlgorithm::kEmpty) return cudaSuccess;
  if (plan.traits.stat_bytes != static_cast<int>(sizeof(Stat<P>)) ||
      plan.traits.final_bytes < static_cast<int>(sizeof(typename P::Final)))
    return cudaErrorInvalidValue;
  const bool split = plan.algorithm == RowAlgorithm::kRowsSplit || plan.algorithm == RowAlgorithm::kColumnsSplit;
  if (plan.algorithm == RowAlgorithm::kRowsStream) {
    const auto differ = [&](const void* pointer) {  // all but where there is no such array
      return pointer && (reinterpret_cast<uintptr_t>(pointer) ^ reinterpret_cast<uintptr_t>(p.operands[0])) % 16 != 0;
    };
    if (differ(p.operands[1]) || differ(p.out)) return run<P>(stream, held_in_registers(plan), rows, p, workspace);
  }
  const auto is_aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  p.length = rows.length;
  p.inner = rows.inner;
  p.columns = rows.count();
  p.first = 0;
  p.workspace = static_cast<unsigned char*>(workspace);
  p.workspace_stride = plan.workspace_bytes;
  p.finals_at = (rows.inner * plan.units * static_cast<int64_t>(sizeof(Stat<P>)) + 15) / 16 * 16;
  p.spans = static_cast<int>(plan.spans);
  p.units = static_cast<int>(plan.units);
  p.lane_bits = plan.lane_bits;
  p.blocks = static_cast<int>(plan.blocks);
  p.unit_warps = plan.unit_warps;
  p.column_lane_bits = plan.column_lane_bits;
  p.column_warp_bits = plan.column_warp_bits;
  p.axis_warps = plan.axis_warps;
  p.part_length = (rows.length + plan.blocks - 1) / plan.blocks;
  p.cluster = !split && plan.blocks > 1;
  p.aligned = is_aligned(p.operands[0]) && is_aligned(p.operands[1]) && is_aligned(p.out) &&
              (rows.inner == 1 ? rows.length : rows.inner) * sizeof(typename P::Element::Bits) % 16 == 0;
  if (plan.algorithm == RowAlgorithm::kRowsStream) return run_stream<P>(stream, plan, p);
  Call<P> call{stream, plan, rows, p};
  const auto kernel = call.kernel();
  if (!kernel) return cudaErrorInvalidValue;
  if (!split) return call.sweep(kernel, Phase::kWhole, 0, rows.count(), false);
  for (int64_t outer = 0; outer < rows.outer; outer += plan.round) {
    const int64_t first = outer * rows.inner, end = std::min(rows.outer, outer + plan.round) * rows.inner;
    cudaError_t status = call.sweep(kernel, Phase::kPartial, first, end, plan.overlap && outer > 0);
    if (status == cudaSuccess) status = call.merge(first, end);
    if (status == cudaSuccess && p.out) status = call.sweep(kernel, Phase::kFinish, first, end, plan.overlap);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// ---- Exponentials ---------------------------------------------------------------------------------------------------

// e^x for elements of a type: to its precision.
template <class Element>
__device__ __forceinline__ typename Element::Acc exponential(typename Element::Acc x) {
  if constexpr (sizeof(typename Element::Bits) == 8) {
    return exp(x);
  } else if constexpr (sizeof(typename Element::Bits) == 4) {
    return expf(x);
  } else {
    return fast_exp2(rounded_product(x, 1.44269504f));
  }
}

}  // namespace jaxgpuops::row_engine
