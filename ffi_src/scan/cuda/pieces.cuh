// Arrays of few elements in all, along longer axes, for cumulative calls and recurrences without segments: a block has
// some whole columns. All their elements come to shared memory at once; then a lane has one run of a column. So there
// is one wait for memory, and nothing to learn from other blocks. Operands are read once, results written once.
//
// Runs are folded in the order of the kernels for more elements: the runs of a warp of theirs, its group, by a scan;
// the groups of a tile one after the other; and tiles as in folds.cuh. Loops are short, since most of the time of a
// longer kernel would go into fetching its code (common/cuda/small.cuh).
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/cuda/small.cuh"
#include "scan/cuda/folds.cuh"
#include "scan/cuda/runs.h"

namespace jaxgpuops::scan {

struct PieceParameters {
  const void *x, *a;
  void* out;
  const void* h0;
  uint32_t columns, length, inner;
  uint32_t a_outer, a_axis, a_inner;  // strides of the operand a
  int column_bits;                    // a block has 2^column_bits columns
  uint32_t run, runs;                 // positions of a run, 8 i or 8 i + 1; runs of a group
  uint32_t slots;                     // groups of a warp
  uint32_t groups, of_tile;           // groups of a column; groups of a tile
  uint32_t tiles;                     // at most kGroup
  uint32_t stride;  // elements of a column in shared memory; positions beyond its end are not initialized
  int pad_shift;    // after 2^pad_shift elements one is left free
  Quotient of_inner, of_runs, tile_of;
  bool wide_h0, backward;
  Options options;
};

template <class Policy>
__global__ void __launch_bounds__(kPieceThreads) scan_pieces(const __grid_constant__ PieceParameters p) {
  using Element = typename Policy::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using State = typename Policy::State;
  constexpr uint32_t kMoves = 4, kTogether = kRare<Policy> ? 1 : 8;
  constexpr bool kPair = Policy::kOperands == 2;
  const State none = Policy::identity(p.options);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = once(1u << p.column_bits);
  const uint32_t block = blockIdx.x << p.column_bits;  // the first column
  Acc* const data = reinterpret_cast<Acc*>(dynamic_shared_memory());
  Acc* const factors = data + (kPair ? width * p.stride : 0);                  // a; data has x
  State* const totals = reinterpret_cast<State*>(factors + width * p.stride);  // of groups
  State* const sums = totals + width * p.groups;                               // of all tiles up to and including one
  const auto placed = [&](uint32_t k) { return k + (k >> p.pad_shift); };

  // A thread moves elements `first`, `first + step`, .. of one column between memory and shared memory, kMoves at a
  // time. Beyond the end of the column it moves the last element again.
  const uint32_t step = once(blockDim.x >> p.column_bits), first = threadIdx.x >> p.column_bits;
  const uint32_t moved = threadIdx.x & (width - 1), own = once(min(block + moved, p.columns - 1));
  const uint32_t last = once(p.length - 1), moved_at = once(moved * p.stride);
  const uint32_t stride = once(p.backward ? 0 - p.inner : p.inner);
  const uint32_t at = once((p.of_inner(own) * last + (p.backward ? last : 0)) * p.inner + own);
  const auto each_moved = [&](auto body) {
#pragma unroll 1
    for (uint32_t k = first; k < p.length; k += kMoves * step) {
      uint32_t ks[kMoves];
#pragma unroll
      for (uint32_t i = 0; i < kMoves; ++i) ks[i] = min(k + i * step, last);
      body(ks);
    }
  };
  uint32_t a_at = 0, a_stride = 0;
  if constexpr (kPair) {
    const uint32_t outer = p.of_inner(own);
    a_at = once(outer * p.a_outer + (own - outer * p.inner) * p.a_inner + (p.backward ? last * p.a_axis : 0));
    a_stride = once(p.backward ? 0 - p.a_axis : p.a_axis);
  }
  each_moved([&](const uint32_t (&k)[kMoves]) {
    Bits bits[kMoves];
    [[maybe_unused]] Bits of_a[kMoves];
#pragma unroll
    for (uint32_t i = 0; i < kMoves; ++i) {
      bits[i] = static_cast<const Bits*>(p.x)[at + k[i] * stride];
      if constexpr (kPair) of_a[i] = static_cast<const Bits*>(p.a)[a_at + k[i] * a_stride];
    }
#pragma unroll
    for (uint32_t i = 0; i < kMoves; ++i) {
      data[moved_at + placed(k[i])] = Element::load(bits[i]);
      if constexpr (kPair) factors[moved_at + placed(k[i])] = Element::load(of_a[i]);
    }
  });
  __syncthreads();

  // The lane's run: run r of group g of column c.
  const uint32_t part = p.of_runs(lane), r = lane - part * p.runs, slot = warp * p.slots + part;
  const uint32_t g = once(slot >> p.column_bits), c = once(slot & (width - 1));
  const bool active = part < p.slots && g < p.groups;
  const uint32_t run_at = c * p.stride + placed((g * p.runs + r) * p.run);
  Acc *const run = data + run_at, *const run_factors = factors + run_at;
  // Calls body(position of the run, operands), which returns a result, for all
  // positions. kTogether of them are read before any result is written, because
  // the compiler cannot know that results are not the factors that come next.
  const auto each = [&](auto writes, auto body) {
    const auto some = [&](auto count, uint32_t i) {
      constexpr int n = decltype(count)::value;
      In<Acc> in[n] = {};
#pragma unroll
      for (int j = 0; j < n; ++j) {
        in[j].x = run[i + j];
        if constexpr (kPair) in[j].a = run_factors[i + j];
      }
#pragma unroll
      for (int j = 0; j < n; ++j) in[j].x = body(i + j, in[j]);
      if constexpr (decltype(writes)::value)
#pragma unroll
        for (int j = 0; j < n; ++j) run[i + j] = in[j].x;
    };
    if (p.run & 1) some(std::integral_constant<int, 1>(), 0);
#pragma unroll 1
    for (uint32_t i = p.run & 1; i < p.run; i += kTogether) some(std::integral_constant<int, kTogether>(), i);
  };
  State inclusive = none;
  if (active)
    with_call<Policy>(p.options, [&](const Options& o) {
      each(std::false_type(), [&](uint32_t i, const In<Acc>& in) {
        // A step from the identity is the first element, except for factors
        // that are not finite.
        if (kPair && i == 0) {
          inclusive = Policy::first(in, o);
        } else {
          Policy::step(inclusive, in, o);
        }
        return in.x;
      });
    });
#pragma unroll 1
  for (uint32_t d = 1; d < p.runs; d *= 2) {
    const State left = shuffle_up(inclusive, d);
    if (r >= d) inclusive = Policy::combine(left, inclusive, p.options);
  }
  State before = shuffle_up(inclusive, 1);
  if (r == 0) before = none;
  if (active && r == p.runs - 1) totals[c * p.groups + g] = inclusive;
  __syncthreads();

  if (p.tiles > 1) {
#pragma unroll 1
    for (uint32_t c = warp; c < width; c += blockDim.x / 32) {
      State sum = none;
#pragma unroll 1
      for (uint32_t g = lane * p.of_tile; g < min((lane + 1) * p.of_tile, p.groups); ++g)
        sum = Policy::combine(sum, totals[c * p.groups + g], p.options);
      sum = scan_group<Policy>(p.options, sum);
      if (lane < p.tiles) sums[c * p.tiles + lane] = sum;
    }
    __syncthreads();
  }

  if (active) {
    State state = none;
    if constexpr (Policy::kInitial) {
      if (p.h0) {
        const uint32_t column = min(block + c, p.columns - 1);
        Acc h0;
        if constexpr (is_float(Element::kDType) && sizeof(Bits) < sizeof(float)) {
          h0 = p.wide_h0 ? static_cast<const float*>(p.h0)[column]
                         : Element::load(static_cast<const Bits*>(p.h0)[column]);
        } else {
          h0 = Element::load(static_cast<const Bits*>(p.h0)[column]);
        }
        state = Policy::initial(h0, p.options);
      }
    }
    uint32_t w = 0;
    if (p.tiles > 1) {
      const uint32_t t = p.tile_of(g);
      w = t * p.of_tile;
      if (t > 0) state = Policy::combine(state, Policy::combine(sums[c * p.tiles + t - 1], none, p.options), p.options);
    }
    State earlier = none;  // groups of the tile
#pragma unroll 1
    for (; w < g; ++w) earlier = Policy::combine(earlier, totals[c * p.groups + w], p.options);
    state = Policy::combine(state, Policy::combine(earlier, before, p.options), p.options);
    with_call<Policy>(p.options, [&](const Options& o) {
      each(std::true_type(), [&](uint32_t, const In<Acc>& in) { return Policy::step(state, in, o).first; });
    });
  }
  __syncthreads();

  each_moved([&](const uint32_t (&k)[kMoves]) {
#pragma unroll
    for (uint32_t i = 0; i < kMoves; ++i)
      static_cast<Bits*>(p.out)[at + k[i] * stride] = Element::store(data[moved_at + placed(k[i])]);
  });
}

}  // namespace jaxgpuops::scan
