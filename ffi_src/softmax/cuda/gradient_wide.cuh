// Gradients of softmax and log_softmax from x and the cotangent, as in gradient.cu, of rows that are longer, if they
// are few, of float32 and up to 7 KiB, or of 16 bits and up to 6 KiB: a block has a row, and a lane two vectors, as in
// wide_kernel. Both arrays are read once, and the gradient is written once.
#pragma once

#include "softmax/cuda/dispatch.cuh"
#include "softmax/cuda/gradient_args.cuh"
#include "softmax/cuda/gradient_spread.cuh"

namespace jaxgpuops::softmax {

// How many vectors a lane of rows_kernel has of rows that are longer than those of gradient_kernel: 2^ these.
template <class P>
constexpr int kForwardBits = P::kLarge ? 3 : 2;
constexpr int kBackwardBits = 2;

// Rows that are not aligned are loaded element by element if a block has at most this many warps. (On an H200,
// gradients of 264 rows of 2751 float32 took 6.5 us either way; of 2112 x 703, 8.3 us by elements and 10.4 by shifted
// windows; of 264 x 5055, 11.4 and 9.7.)
constexpr int kElementWarps = 11;

// The derivative Q, but for the sums after the first.
template <class Q>
struct FirstSum : Q {
  static constexpr int kSums = 1;
};

// Shared memory of a block: of the forward pass (a multiple of 16 bytes), and of the gradient.
template <class P>
__host__ __device__ constexpr int64_t forward_shared_bytes(int warps) {
  return (row_engine::wide_shared_bytes<P>(warps) + 15) / 16 * 16;
}

// kAligned: whether all rows are aligned. kElements: whether other rows are loaded and stored element by element.
template <class P, class Q, Op op, bool kAligned, bool kElements>
__global__ void __launch_bounds__(32 * kMaxBlockWarps)
    wide_gradient_kernel(const __grid_constant__ GradientParameters p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  constexpr int kWidth = 16 / sizeof(Bits), kOfWarp = 32 * kWideVectors * kWidth;
  const int warp = threadIdx.x / 32, left = max(0, p.length - warp * kOfWarp);
  const int64_t row = blockIdx.x, at = row * p.length + warp * kOfWarp;
  constexpr bool kOneShift = sizeof(Bits) == 2;  // see Span::with_words(); of 3000 x 1501 bfloat16 13.5 -> 12.8 us
  const row_engine::Span<P, kWideVectors, kAligned, false, false, kElements, kOneShift> span(5);
  const auto load = [&](const void* array, Bits pad, Pack(&packs)[kWideVectors]) {
    span.load(static_cast<const Bits*>(array) + at, left, row + 1 == p.rows, pad, packs);
  };

  const auto args = forward_args<P>(op);
  Pack of_x[kWideVectors], of_cotangent[kWideVectors];
  load(p.x, P::pad(args, 0), of_x);
  load(p.cotangent, Bits{}, of_cotangent);
  row_engine::Held<P, 1, true> forward[kWideVectors];
  row_engine::Held<Q, 1, true> backward[kWideVectors];  // the cotangent, and the forward result
#pragma unroll
  for (int j = 0; j < kWideVectors; ++j) {
    forward[j].raw[0][0] = of_x[j];
    backward[j].raw[0][0] = of_cotangent[j];
  }
  const auto spans = [&](int bits) {
    const int of_span = kWidth << (bits + 5);
    return (p.length + of_span - 1) / of_span;
  };

  auto& of_forward = *reinterpret_cast<row_engine::WideShared<P>*>(dynamic_shared_memory());
  Acc peak;
  const auto stat =
      row_engine::wide_statistics<P>(args, forward, kForwardBits<P>, spans(kForwardBits<P>), of_forward, peak);
  const typename P::Row plain = {1};
  const auto final = P::finish(args, plain, stat);
  const Acc factor = row_engine::factor_of<P>(final, peak);
#pragma unroll
  for (int j = 0; j < kWideVectors; ++j) {
    Acc values[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = row_engine::result_of<P>(args, plain, final, factor, forward[j], 0, i);
    backward[j].raw[1][0] = row_engine::packed<Element>(values);
  }

  const auto of_result = backward_args<Q>();
  const typename Q::Row unscaled = {1};
  auto& of_backward =
      *reinterpret_cast<row_engine::WideShared<Q>*>(dynamic_shared_memory() + forward_shared_bytes<P>(blockDim.x / 32));
  // Only rows with a likely element (see Tangent) need the sums after the first.
  bool likely = false;
  if constexpr (Q::kTails) {
    Q::with_args(of_result, [&](const auto& known) {
      for (const auto& unit : backward) likely |= any_likely<Q>(known, unit);
    });
    likely = __syncthreads_or(likely);
  }
  const auto sums_of = [&](auto& units, auto& of_units) {
    Acc none;
    return row_engine::wide_statistics(of_result, units, kBackwardBits, spans(kBackwardBits), of_units, none);
  };
  Stat<Q> sums = {};
  if (!Q::kTails || likely) {
    sums = sums_of(backward, of_backward);
  } else {
    using First = FirstSum<Q>;
    row_engine::Held<First, 1, true> units[kWideVectors];
#pragma unroll
    for (int j = 0; j < kWideVectors; ++j)
#pragma unroll
      for (int o = 0; o < 2; ++o) units[j].raw[o][0] = backward[j].raw[o][0];
    sums.sum(0) = sums_of(units, reinterpret_cast<row_engine::WideShared<First>&>(of_backward)).sum(0);
  }
  Pack packs[kWideVectors];
  Q::with_args(of_result, [&](const auto& known) {
    const auto total = Q::finish(known, unscaled, sums);
#pragma unroll
    for (int j = 0; j < kWideVectors; ++j) {
      Acc values[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        values[i] = Q::output(known, unscaled, total, backward[j].x(known, 0, i), backward[j].y(0, i));
      packs[j] = row_engine::packed<Element>(values);
    }
  });
  span.store(static_cast<Bits*>(p.out) + at, left, packs);
}

}  // namespace jaxgpuops::softmax
