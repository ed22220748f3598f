// Short rows (inner == 1) of the row engine with results. Rows have at most 32 vectors of 16 bytes, and each lane has
// one vector. The array is read once and written once.
//
// The vectors that one lane has in rows_kernel are spread over neighbouring lanes here. So each lane runs little code,
// which is most of the time of a small problem, and a warp reads whole cache lines. Statistics are merged in the order
// of rows_kernel: first the vectors that would be one lane's there, one after the other. So all bits are the same.
//
// wide_kernel does the same for longer rows, if they are few: a block has a row, and a lane two vectors. The sums of
// each vector and the statistics of each span of rows_kernel are in shared memory. (Sums of few rows have a kernel of
// their own, reduce/cuda/short_rows.cu.)
#pragma once

#include "row_engine/cuda/in_registers.cuh"

namespace jaxgpuops::row_engine {

// Whether an operation has these kernels.
template <class P>
constexpr bool kSpread = P::kShort && P::kOutput && !P::kMasked && !P::kDecoded;
// Whether there is also a wide_kernel whose lanes have one vector.
template <class P>
constexpr bool kOneVector = kSpread<P> && P::kOperands == 1;

// Loads the first `left` elements of 16 bytes at any address from the two aligned packs that have them (twice the same
// one if that has all); the others become `pad`.
template <class Bits>
__device__ __forceinline__ Pack load_part(const Bits* from, int left, Bits pad) {
  constexpr int kWidth = 16 / sizeof(Bits);
  Pack pack = {};
  if (left > 0) {
    const auto first = reinterpret_cast<uintptr_t>(from), last = first + min(left, kWidth) * sizeof(Bits) - 1;
    const Pack low = load_pack(reinterpret_cast<const Pack*>(first & ~uintptr_t{15}));
    const Pack high = load_pack(reinterpret_cast<const Pack*>(last & ~uintptr_t{15}));
    pack = between<sizeof(Bits), 15>(low, high, static_cast<int>(first & 15));
  }
  if (left < kWidth) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      if (i >= left) set<Bits>(pack, i, pad);
  }
  return pack;
}

template <class P, bool kAligned>
__global__ void __launch_bounds__(32 * kSpreadWarps) spread_kernel(const __grid_constant__ Parameters<P> p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using Unit = Held<P, 1, true>;
  constexpr int kWidth = Unit::kWidth;
  const int bits = p.lane_bits + p.vector_bits, lanes = 1 << bits, u = threadIdx.x & (lanes - 1);
  const int64_t outer = int64_t{blockIdx.x} * (blockDim.x >> bits) + (threadIdx.x >> bits);
  const bool exists = outer < p.columns;
  const int left = exists ? static_cast<int>(p.length) - u * kWidth : 0;
  const int64_t at = outer * p.length + u * kWidth;
  typename P::Row row = {};
  if constexpr (P::kHole)
    if (exists) row = P::begun(p.args, outer, 0, p.length, 1);
  const int wanted = P::kHole && P::skip(row) ? 0 : left;
  Unit unit;
#pragma unroll
  for (int o = 0; o < P::kOperands; ++o) {
    const Bits* const from = static_cast<const Bits*>(p.operands[o]) + at;
    Pack& pack = unit.raw[o][0];
    if (kAligned && wanted > 0) {
      pack = load_pack(reinterpret_cast<const Pack*>(from));
    } else if (P::kHole && !kAligned && sizeof(Bits) == 2) {
      pack = load_part(from, wanted, P::pad(p.args, o));
    } else {
      const Bits pad = P::pad(p.args, o);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) set<Bits>(pack, i, !kAligned && i < wanted ? from[i] : pad);
    }
  }
  Acc plain = Acc(0);
  if constexpr (P::kPlainSum) {
    if (P::add_plain(p.args)) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (i < wanted) plain += unit.x(p.args, 0, i);
    }
  }
  int64_t hole = -1;  // its place among the elements of the lane
  if constexpr (P::kHole) {
    hole = P::hole(row) - u * kWidth;
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      if (i == hole && i < wanted) unit.leave_out(p.args, 0, i);
  }

  Stat<P> stat;
  Acc peak = Acc(0);
  if constexpr (P::kPeak) {
    peak = merged_peak<P>(unit.peak(p.args), 0, bits);
    stat.of[0] = peak;
  }
  P::with_sum_args(p.args, [&](const auto& args) {
#pragma unroll
    for (int k = 0; k < P::kSums; ++k)
      stat.sum(k) = P::kPlainSum && k == P::kSums - 1 ? plain : sum_and_keep<P>(args, k, unit, peak);
  });
  if constexpr (P::kHole) {
    if (exists) row = P::completed(p.args, row, outer, 0, p.length, 1);
  }
#pragma unroll
  for (int k = 0; k < P::kSums; ++k) {
    const int slot = threadIdx.x & ((31 & -lanes) | ((1 << p.lane_bits) - 1));
    Acc sum = shuffle_from(stat.sum(k), slot);
#pragma unroll 1
    for (int j = 1; j < 1 << p.vector_bits; ++j) sum = sum + shuffle_from(stat.sum(k), slot + (j << p.lane_bits));
    stat.sum(k) = merged_sum(sum, 0, p.lane_bits);
  }
  if (!exists) return;
  if constexpr (!P::kHole) row = P::row(p.args, outer, 0, p.length, 1);
  const auto final = P::finish(p.args, row, stat);
  if (u == 0) P::write_row(p.args, outer, row, final);
  if (left <= 0 || (P::kHole && p.out == nullptr)) return;
  Acc values[kWidth];
  const Acc factor = factor_of<P>(final, peak);
  P::with_args(p.args, [&](const auto& args) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      values[i] = result_of<P>(args, row, final, factor, unit, 0, i);
      if constexpr (P::kHole)
        if (i == hole) values[i] = P::hole_output(args, row, final);
    }
  });
  const Pack pack = packed<Element>(values);
  Bits* const to = static_cast<Bits*>(p.out) + at;
  if constexpr (kAligned) {
    store_pack(reinterpret_cast<Pack*>(to), pack);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      if (i < left) to[i] = get<Bits>(pack, i);
  }
}

// In wide_kernel, lanes load and store vectors of rows that are not aligned element by element if these are of at least
// 4 bytes. On an H200 softmax of 2000 x 333 float32 took 3.5 us so, and 4.3 where two aligned windows were put together
// for each vector; but of 1000 x 777 float16 it took 6.5 us, and 3.6.
template <class P>
constexpr bool kByElements = sizeof(typename P::Element::Bits) >= 4;

// Loads and stores what a warp has of a row of one array: `left` elements from the warp's first one on. Each lane has
// kEach vectors. With kParts, a lane loads those that are not aligned for itself (load_part()): with windows and
// shuffles, the sum of 2 x 4418 bfloat16 took a tenth longer.
template <class P, bool kElements = kByElements<P>, int kEach = kWideVectors, bool kParts = false>
struct WideSpan {
  using Bits = typename P::Element::Bits;
  const Span<P, kEach, true, false> aligned{5};
  const Span<P, kEach, false, false> shifted{5};

  // `last`: the array may end after these elements.
  __device__ __forceinline__ void load(const Bits* from, int left, bool is_aligned, bool last, Bits pad,
                                       Pack (&packs)[kEach]) const {
    if (is_aligned) {
      aligned.load(from, left, false, pad, packs);
    } else if constexpr (kElements) {
      aligned.load_elements(from, left, pad, packs);
    } else if constexpr (kParts) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) packs[j] = load_part(from + aligned.element(j), left - aligned.element(j), pad);
    } else {
      shifted.load(from, left, last, pad, packs);
    }
  }

  __device__ __forceinline__ void store(Bits* to, int left, bool is_aligned, Pack (&packs)[kEach]) const {
    if (is_aligned) {
      aligned.store(to, left, packs);
    } else if constexpr (kElements || kEach == 1) {
      aligned.store_elements(to, left, packs);
    } else {
      shifted.store(to, left, packs);
    }
  }
};

template <class P>
struct WideShared {
  static constexpr int kMostSpans = kMaxBlockWarps * kWideVectors / kOnlyVectors;
  Stat<P> of_spans[kMostSpans];
  typename P::Element::Acc peaks[kMaxBlockWarps];  // the peak of each warp
  // For each sum, the summands of all lanes. The array is as long as the shared memory allows, not as declared.
  typename P::Element::Acc sums[1];
};
template <class P>
__host__ __device__ constexpr int64_t wide_shared_bytes(int warps, int each = kWideVectors) {
  using Acc = typename P::Element::Acc;
  return sizeof(WideShared<P>) + (int64_t{P::kSums} * warps * each * 32 - 1) * sizeof(Acc);
}

// Whether wide_kernel stores rows that are not aligned by store_by_warp().
template <class P, int kEach>
constexpr bool kStages =
    P::kOutput && !P::kHole && kOneVector<P> && kEach == kWideVectors && sizeof(typename P::Element::Bits) == 4;
// Where the vectors of store_by_warp() are in shared memory, and how many bytes that takes in all.
template <class P, int kEach>
__host__ __device__ constexpr int64_t stage_at(int warps) {
  return (wide_shared_bytes<P>(warps, kEach) + 15) / 16 * 16;
}
template <class P, int kEach>
constexpr int64_t staged_shared_bytes(int warps) {
  return stage_at<P, kEach>(warps) + int64_t{32} * warps * kEach * 16;
}

// Stores what a warp has of a row. The warp first puts its vectors side by side in shared memory, so that its stores
// cover whole sectors. (Where each lane stored its own elements one by one, softmax of 8 x 4001 float32 took 3.4 us,
// and takes 2.9; only around 1500 elements, 6 % more.)
template <class P, int kEach>
__device__ __forceinline__ void store_by_warp(typename P::Element::Bits* to, int left, const Pack (&packs)[kEach]) {
  using Bits = typename P::Element::Bits;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto* const stages = reinterpret_cast<Pack*>(dynamic_shared_memory() + stage_at<P, kEach>(blockDim.x / 32));
  Pack* const mine = stages + warp * (32 * kEach);
#pragma unroll
  for (int j = 0; j < kEach; ++j) mine[j * 32 + lane] = packs[j];
  __syncwarp();
  const int end = min(left, static_cast<int>(32 * kEach * 16 / sizeof(Bits)));
#pragma unroll 8
  for (int e = lane; e < end; e += 32) to[e] = reinterpret_cast<const Bits*>(mine)[e];
}

constexpr int kMostVectors = 8;  // the most vectors of a lane of rows_kernel

// Returns the statistics of a row, of which each thread of the block has kEach vectors, in the order of rows_kernel.
// There, a lane has 2^vector_bits vectors of each of `spans` spans, and a span has a warp, or 2^lane_bits lanes (from 8
// on) if the row is shorter. All threads get the statistics, and the peak of their own span. The units may keep
// summands: see sum_and_keep(). `plain` is what they add to the plain sum (P::kPlainSum).
template <class P, int kEach>
__device__ __forceinline__ Stat<P> wide_statistics(const typename P::Args& all_args, Held<P, 1, true> (&unit)[kEach],
                                                   int vector_bits, int spans, WideShared<P>& shared,
                                                   typename P::Element::Acc& peak, int lane_bits = 5,
                                                   const typename P::Element::Acc (&plain)[kEach] = {}) {
  using Acc = typename P::Element::Acc;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, vectors = blockDim.x * kEach;
  // The peak of the vectors that would be one span in rows_kernel.
  const int span_bits = vector_bits - (kEach - 1);  // 2^span_bits warps have a span
  static_assert(kEach == 1 || kEach == 2);
  const auto peak_of_span = [&](int span) {
    const int first = span << span_bits, last = min(first + (1 << span_bits), static_cast<int>(blockDim.x / 32)) - 1;
    if constexpr (P::kPeak && sizeof(Acc) == 4) {
      return peak_of_warp<P>(shared.peaks[min(first + (lane & ((1 << span_bits) - 1)), last)]);
    } else {
      Acc peak = shared.peaks[first];
      if constexpr (P::kPeak)
#pragma unroll
        for (int w = 1; w < kMostVectors / kEach; ++w) peak = P::larger(peak, shared.peaks[min(first + w, last)]);
      return peak;
    }
  };
  peak = Acc(0);
  if constexpr (P::kPeak) {
    peak = unit[0].peak(all_args);
    if constexpr (kEach == 2) peak = P::larger(peak, unit[1].peak(all_args));
    peak = peak_of_warp<P>(peak);
    if (lane == 0) shared.peaks[warp] = peak;
    __syncthreads();
    peak = peak_of_span(warp >> span_bits);
  }
  P::with_sum_args(all_args, [&](const auto& args) {
#pragma unroll
    for (int k = 0; k < P::kSums; ++k)
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const bool is_plain = P::kPlainSum && k == P::kSums - 1;
        shared.sums[k * vectors + (warp * kEach + j) * 32 + lane] =
            is_plain ? plain[j] : sum_and_keep<P>(args, k, unit[j], peak);
      }
  });
  __syncthreads();
  // If there is one span, each warp merges it for itself.
  const bool alone = spans == 1;
  Stat<P> stat;
  if (alone || warp < spans) {
    const int span = alone ? 0 : warp, lanes = 1 << lane_bits;
    const int first = (span << vector_bits) * 32 + (lane & (lanes - 1));
    if constexpr (P::kPeak) stat.of[0] = alone ? peak : peak_of_span(span);
#pragma unroll
    for (int k = 0; k < P::kSums; ++k) {
      Acc next[kMostVectors];
#pragma unroll
      for (int v = 0; v < kMostVectors; ++v) {
        const bool exists = v < 1 << vector_bits && first + v * lanes < vectors;
        next[v] = exists ? shared.sums[k * vectors + first + v * lanes] : Acc(0);
      }
      Acc sum = next[0];
#pragma unroll
      for (int v = 1; v < kMostVectors; ++v) sum = sum + next[v];
      stat.sum(k) = merged_sum(merged_sum(sum, 0, 3), 3, lane_bits);
    }
    if (!alone && lane == 0) shared.of_spans[warp] = stat;
  }
  if (!alone) {  // merges in the order of merge_by_warp()
    __syncthreads();
    stat = lane < spans ? shared.of_spans[lane] : Stat<P>::none();
    Stat<P> mine = Stat<P>::none();
    if constexpr (P::kPeak) mine.of[0] = stat.peak();
    add_stat<P>(mine, stat, P::guard(mine.peak()));
    stat = merge_lanes<P>(mine);
  }
  return stat;
}

template <class P, int kEach>
__global__ void __launch_bounds__(32 * kMaxBlockWarps) wide_kernel(const __grid_constant__ Parameters<P> p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using Unit = Held<P, 1, true>;
  constexpr int kWidth = Unit::kWidth;
  const int warp = threadIdx.x / 32;
  const int64_t outer = blockIdx.x, first = warp * (32 * kEach * kWidth), at = outer * p.length + first;
  const int left = max(0, static_cast<int>(p.length - first));
  auto& shared = *reinterpret_cast<WideShared<P>*>(dynamic_shared_memory());

  const WideSpan<P, kByElements<P>, kEach, kOneVector<P> && kEach == 1> span;
  typename P::Row row;
  if constexpr (P::kHole) row = P::begun(p.args, outer, 0, p.length, 1);
  const int wanted = P::kHole && P::skip(row) ? 0 : left;
  Unit unit[kEach];
#pragma unroll
  for (int o = 0; o < P::kOperands; ++o) {
    Pack packs[kEach];
    const Bits* const from = static_cast<const Bits*>(p.operands[o]) + at;
    span.load(from, wanted, p.aligned, outer + 1 == p.columns, P::pad(p.args, o), packs);
#pragma unroll
    for (int j = 0; j < kEach; ++j) unit[j].raw[o][0] = packs[j];
  }
  int64_t hole = -1;  // its place among the elements of the warp
  Acc plain[kEach] = {};
  if constexpr (P::kHole) {
    row = P::completed(p.args, row, outer, 0, p.length, 1);
    hole = P::hole(row) - first;
  } else {
    row = P::row(p.args, outer, 0, p.length, 1);
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j)
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const int e = span.aligned.element(j) + i;
      if constexpr (P::kPlainSum)
        if (P::add_plain(p.args) && e < wanted) plain[j] += unit[j].x(p.args, 0, i);
      if constexpr (P::kHole)
        if (e == hole) unit[j].leave_out(p.args, 0, i);
    }

  Acc peak;
  const auto stat = wide_statistics<P>(p.args, unit, p.vector_bits, p.spans, shared, peak, p.lane_bits, plain);
  const auto final = P::finish(p.args, row, stat);
  if (threadIdx.x == 0) P::write_row(p.args, outer, row, final);
  if constexpr (P::kOutput) {
    if (p.out == nullptr) return;
    Pack packs[kEach];
    const Acc factor = factor_of<P>(final, peak);
    P::with_args(p.args, [&](const auto& args) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        Acc values[kWidth];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          values[i] = result_of<P>(args, row, final, factor, unit[j], 0, i);
          if constexpr (P::kHole)
            if (span.aligned.element(j) + i == hole) values[i] = P::hole_output(args, row, final);
        }
        packs[j] = packed<Element>(values);
      }
    });
    Bits* const to = static_cast<Bits*>(p.out) + at;
    if constexpr (kStages<P, kEach>) {
      if (p.aligned) {
        span.aligned.store(to, left, packs);
      } else {
        store_by_warp<P>(to, left, packs);
      }
    } else {
      span.store(to, left, p.aligned, packs);
    }
  }
}

}  // namespace jaxgpuops::row_engine
