// Gradients of softmax and log_softmax from x and the cotangent, as in gradient.cu, where a lane has one vector of a
// row: it runs little code, which is most of the time of a small problem, and rows of up to four vectors, which one
// lane would have, are read as whole lines of the cache. All rows of float16 are spread so.
//
// Lanes merge numbers through shared memory, in the order of rows_kernel.
#pragma once

#include "softmax/cuda/dispatch.cuh"
#include "softmax/cuda/gradient_args.cuh"
#include "softmax/plan.h"

namespace jaxgpuops::softmax {

struct GradientParameters {
  const void *x, *cotangent;
  void* out;
  int64_t rows;
  int length, lane_bits, vector_bits;
  int blocks;  // gradient_rows.cuh: blocks that share a row
};

// Whether any element is likely (see Tangent), given the forward results that a lane holds.
template <class Q, class Known, class Lane>
__device__ __forceinline__ bool any_likely(const Known& known, const Lane& lane) {
  using Acc = typename Q::Acc;
  bool likely = false;
  if constexpr (Q::kTails) {
#pragma unroll
    for (int j = 0; j < Lane::kUnits; ++j)
#pragma unroll
      for (int i = 0; i < Lane::kWidth; ++i) likely |= Q::add(known, 2, Acc(0), Acc(1), lane.y(j, i), Acc(0)) != 0;
  }
  return likely;
}

constexpr int kSpreadThreads = 32 * kGradientWarps;

// Merges a number of each lane: first those of vectors that one lane of rows_kernel has, one after the other, then
// those of its lanes. All threads of a row get the result,
// and whether `*any` is true in the block.
template <class Acc, class Add>
__device__ __forceinline__ Acc merged(Acc (&shared)[kSpreadThreads], Acc mine, const GradientParameters& p, Add add,
                                      bool* any = nullptr) {
  shared[threadIdx.x] = mine;
  if (any) {
    *any = __syncthreads_or(*any);
  } else {
    __syncthreads();
  }
  const int lanes = 1 << p.lane_bits;
  const int first = threadIdx.x & ((lanes - 1) | -(lanes << p.vector_bits));
  Acc all = shared[first];
#pragma unroll 1
  for (int j = 1; j < 1 << p.vector_bits; ++j) all = add(all, shared[first + j * lanes]);
#pragma unroll 1
  for (int lane = 1; lane < lanes; lane *= 2) all = add(all, shuffle_xor(all, lane));
  return all;
}

template <class P, class Q, Op op, bool kAligned>
__global__ void __launch_bounds__(kSpreadThreads) spread_gradient_kernel(const __grid_constant__ GradientParameters p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  constexpr int kWidth = 16 / sizeof(Bits);
  __shared__ Acc shared[2 + Q::kSums][kSpreadThreads];
  const int bits = p.lane_bits + p.vector_bits, u = threadIdx.x & ((1 << bits) - 1);
  const int64_t row = int64_t{blockIdx.x} * (blockDim.x >> bits) + (threadIdx.x >> bits);
  const int left = row < p.rows ? p.length - u * kWidth : 0;
  const int64_t at = row * p.length + u * kWidth;
  // Rows of four elements of 16 bits are half a vector.
  const auto is_half = [&](const Bits* row) {
    return !kAligned && sizeof(Bits) == 2 && p.length == kWidth / 2 && reinterpret_cast<uintptr_t>(row) % 8 == 0;
  };
  const auto load = [&](const void* array, Bits pad, Pack& pack) {
    const Bits* const from = static_cast<const Bits*>(array) + at;
    if (kAligned && left > 0) {
      pack = row_engine::load_pack(reinterpret_cast<const Pack*>(from));
    } else if (left > 0 && is_half(from)) {
      const uint2 half = *reinterpret_cast<const uint2*>(from);
      const uint32_t word = static_cast<uint32_t>(pad) * 0x10001u;
      pack = {{half.x, half.y, word, word}};
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) set<Bits>(pack, i, !kAligned && i < left ? from[i] : pad);
    }
  };

  const auto args = forward_args<P>(op);
  row_engine::Held<P, 1, true> forward;
  row_engine::Held<Q, 1, true> backward;  // the cotangent, and the forward result
  load(p.x, P::pad(args, 0), forward.raw[0][0]);
  load(p.cotangent, Bits{}, backward.raw[0][0]);

  const auto plus = [](Acc a, Acc b) { return a + b; };
  Stat<P> stat;
  stat.of[0] = merged(shared[0], forward.peak(args), p, [](Acc a, Acc b) { return P::larger(a, b); });
  const Acc peak = stat.peak();
  stat.sum(0) = merged(shared[1], row_engine::sum_and_keep<P>(args, 0, forward, peak), p, plus);
  const typename P::Row plain = {1};
  const auto final = P::finish(args, plain, stat);
  const Acc factor = row_engine::factor_of<P>(final, peak);
  Acc values[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] = row_engine::result_of<P>(args, plain, final, factor, forward, 0, i);
  backward.raw[1][0] = row_engine::packed<Element>(values);

  const auto of_result = backward_args<Q>();
  const typename Q::Row unscaled = {1};
  Stat<Q> sums = {};
  Q::with_args(of_result, [&](const auto& known) {
    const auto sum_of_lane = [&](int k) { return backward.sum(known, k, Acc(0), 0, kWidth); };
    // Only rows with a likely element (see Tangent) need the sums after the first.
    bool likely = any_likely<Q>(known, backward);
    sums.sum(0) = merged(shared[2], sum_of_lane(0), p, plus, Q::kTails ? &likely : nullptr);
    if (likely) {
#pragma unroll
      for (int k = 1; k < Q::kSums; ++k) sums.sum(k) = merged(shared[2 + k], sum_of_lane(k), p, plus);
    }
    const auto total = Q::finish(known, unscaled, sums);
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      values[i] = Q::output(known, unscaled, total, backward.x(known, 0, i), backward.y(0, i));
  });
  const Pack pack = row_engine::packed<Element>(values);
  Bits* const to = static_cast<Bits*>(p.out) + at;
  if (kAligned && left > 0) row_engine::store_pack(reinterpret_cast<Pack*>(to), pack);
  if (left > 0 && is_half(to)) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack.word[0], pack.word[1]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    if (!kAligned && i < left) to[i] = get<Bits>(pack, i);
}

}  // namespace jaxgpuops::softmax
