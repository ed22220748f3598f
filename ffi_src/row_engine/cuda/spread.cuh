// Short rows (inner == 1) of the row engine with results, of at most 32 vectors of 16 bytes: a lane has one of them.
// One read, one write.
//
// What rows_kernel gives to a lane of few, neighbouring lanes have here: little code for each, which is most of what a
// small problem waits for, and whole lines of memory. Statistics are merged in its order, first those of what would be
// a lane, one vector after the other: all bits are the same.
#pragma once

#include "row_engine/cuda/in_registers.cuh"

namespace jaxgpuops::row_engine {

template <class P>
constexpr bool kSpread = P::kOutput && !P::kMasked && !P::kDecoded && !P::kHole;

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
  Unit unit;
#pragma unroll
  for (int o = 0; o < P::kOperands; ++o) {
    const Bits* const from = static_cast<const Bits*>(p.operands[o]) + at;
    Pack& pack = unit.raw[o][0];
    if (kAligned && left > 0) {
      pack = load_pack(reinterpret_cast<const Pack*>(from));
    } else {
      const Bits pad = P::pad(p.args, o);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) set<Bits>(pack, i, !kAligned && i < left ? from[i] : pad);
    }
  }

  Stat<P> stat;
  Acc peak = Acc(0);
  if constexpr (P::kPeak) {
    peak = merged_peak<P>(unit.peak(p.args), 0, bits);
    stat.of[0] = peak;
  }
  const auto guarded = P::guard(peak);
  P::with_sum_args(p.args, [&](const auto& args) {
#pragma unroll
    for (int k = 0; k < P::kSums; ++k) stat.sum(k) = unit.sum(args, k, guarded, 0, kWidth);
  });
#pragma unroll
  for (int k = 0; k < P::kSums; ++k) {
    const int slot = threadIdx.x & ((31 & -lanes) | ((1 << p.lane_bits) - 1));
    Acc sum = shuffle_from(stat.sum(k), slot);
#pragma unroll 1
    for (int j = 1; j < 1 << p.vector_bits; ++j) sum = sum + shuffle_from(stat.sum(k), slot + (j << p.lane_bits));
    stat.sum(k) = merged_sum(sum, 0, p.lane_bits);
  }
  if (!exists) return;
  const auto row = P::row(p.args, outer, 0, p.length, 1);
  const auto final = P::finish(p.args, row, stat);
  if (u == 0) P::write_row(p.args, outer, row, final);
  if (left <= 0) return;
  Acc values[kWidth];
  P::with_args(p.args, [&](const auto& args) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = P::output(args, row, final, unit.x(args, 0, i), unit.y(0, i));
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

}  // namespace jaxgpuops::row_engine
