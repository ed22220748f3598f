// Few elements in all, of rows or columns that are not long: a lane has one. One read, one write.
//
// Statistics are those of the kernels that walk, bit for bit: each lane makes the summand of its element, and all lanes
// add up those of their column in the order of a walk. (common/cuda/small.cuh)
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/cuda/small.cuh"
#include "row_engine/cuda/columns_walk.cuh"
#include "row_engine/small.h"

namespace jaxgpuops::row_engine {

// Of which operations there are kernels.
template <class P>
constexpr bool kSmall = kWalks<P> && P::kOperands == 1 && !P::kHole && P::kSums <= 1;

template <class P>
struct SmallParameters {
  const void* x;
  void* out;  // null: results are numbers a row
  uint32_t columns, length, inner;
  int column_bits;  // 2^n columns beside each other share a warp
  Quotient outer_of;
  uint32_t positions;  // of a part, at most
  uint32_t batch;      // positions that a walk adds up at a time, a power of two
  typename P::Args args;
};

// A warp has a part of some columns, as a warp that walks has: positions threadIdx.y, threadIdx.y + blockDim.y, ..
template <class P>
__global__ void __launch_bounds__(32 * kSmallWarps) small_kernel(const __grid_constant__ SmallParameters<P> p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  const uint32_t lane = threadIdx.x, part = threadIdx.y, parts = blockDim.y;
  const uint32_t beside = once(1u << p.column_bits), first = once(lane & (beside - 1));
  const uint32_t own = ((blockIdx.x * blockDim.z + threadIdx.z) << p.column_bits) + first;
  const uint32_t column = once(min(own, p.columns - 1));  // who has none has the last one
  const uint32_t position = (lane >> p.column_bits) * parts + part;
  const auto outer = once(p.outer_of(column));
  const uint32_t at = once((outer * (p.length - 1) + position) * p.inner + column);
  const bool there = position < p.length;
  const Acc x = P::value(p.args, Element::load(there ? static_cast<const Bits*>(p.x)[at] : P::pad(p.args, 0)));

  // Of the lanes of a column: the peak of some neighbours, and the sum of those in [from, end), one after the other.
  const auto largest = [&](Acc peak, uint32_t lanes) {
    if constexpr (P::kPeak) {
#pragma unroll 1
      for (uint32_t d = beside; d < lanes; d *= 2) peak = P::larger(peak, shuffle_xor(peak, d));
    }
    return peak;
  };
  const auto added = [&](Acc summand, uint32_t from, uint32_t end) {
    Acc sum = Acc(0);
#pragma unroll 1
    for (; from < end; from += kSmallStep * beside)
#pragma unroll
      for (uint32_t k = 0; k < kSmallStep; ++k) sum = sum + shuffle_from(summand, from + k * beside);
    return sum;
  };

  Stat<P> stat = Stat<P>::none();
  if constexpr (P::kSums == 0) {
    stat.of[0] = largest(x, 32);
  } else {
    const uint32_t batch = p.batch << p.column_bits;  // lanes of a batch of a walk
    const uint32_t end = p.positions << p.column_bits;
    const Acc peak = P::kPeak ? largest(x, min(batch, 32u)) : Acc(0);
#pragma unroll 1
    for (uint32_t from = 0; from < end; from += batch) {
      if constexpr (P::kPeak) {
        const Acc larger = P::larger(stat.peak(), shuffle_from(peak, from + first));
        if (from && !(larger == stat.peak())) stat.sum(0) = P::scaled(0, stat.sum(0), P::weight(stat.peak(), P::guard(larger)));
        stat.of[0] = larger;
      }
      const Acc summand = P::add(p.args, 0, Acc(0), x, Acc(0), P::guard(stat.peak()));
      stat.sum(0) = stat.sum(0) + added(summand, from + first, min(from + batch, end));
    }
  }
  if (parts > 1) {
    __shared__ Stat<P> all[kSmallWarps * kSmallBeside];
    Stat<P>* const of_column = all + threadIdx.z * parts * beside + first;
    if (lane < beside) of_column[part * beside] = stat;
    __syncthreads();
    const uint32_t mine = lane >> p.column_bits;
    stat = mine < parts ? of_column[mine * beside] : Stat<P>::none();
    Acc summand = stat.of[Stat<P>::kCount - 1];
    if constexpr (P::kPeak) {
      const Acc peak = largest(stat.peak(), 32);
      if constexpr (P::kSums > 0) summand = P::scaled(0, summand, P::weight(stat.peak(), P::guard(peak)));
      stat.of[0] = peak;
    }
    if constexpr (P::kSums > 0) stat.sum(0) = added(summand, first, min(parts << p.column_bits, 32u));
  }
  if (own != column) return;
  const int64_t i = column - outer * p.inner;
  const auto row = P::row(p.args, outer, i, p.length, p.inner);
  const auto final = P::finish(p.args, row, stat);
  if (position == 0) P::write_row(p.args, column, row, final);
  if constexpr (P::kOutput)
    if (p.out && there) static_cast<Bits*>(p.out)[at] = Element::store(P::output(p.args, row, final, x, Acc(0)));
}

template <class P>
cudaError_t run_small(cudaStream_t stream, const RowPlan& plan, const Rows& rows, Parameters<P> p) {
  p.length = rows.length, p.inner = rows.inner, p.columns = rows.count();
  if constexpr (kSmall<P>) {
    SmallParameters<P> s = {p.operands[0], p.out};
    s.columns = static_cast<uint32_t>(p.columns);
    s.length = static_cast<uint32_t>(p.length);
    s.inner = static_cast<uint32_t>(p.inner);
    s.column_bits = plan.column_lane_bits;
    s.outer_of = Quotient(p.inner);
    s.positions = (s.length + plan.axis_warps - 1) / plan.axis_warps;
    s.batch = p.length <= held_positions(1) ? held_positions(1) : Walk<P>::kCount;
    s.args = p.args;
    const int groups = plan.block_warps / plan.axis_warps;  // of a block
    const int64_t columns = int64_t{groups} << plan.column_lane_bits;
    Launch launched;
    launched.grid = dim3(static_cast<unsigned>((p.columns + columns - 1) / columns));
    launched.block = dim3(32, plan.axis_warps, groups);
    return launch(stream, launched, small_kernel<P>, s);
  } else {
    return cudaErrorInvalidValue;
  }
}

}  // namespace jaxgpuops::row_engine
