// Gradients of softmax and log_softmax from x and the cotangent, for short rows: the forward result, which nothing else
// needs, is made on the way and stays in registers. Both arrays are read once, and the gradient is written once.
//
// A team of lanes holds a row, as in rows_kernel. The forward result is rounded as it would be in memory, and sums are
// added up in the order of rows_kernel, so the bits are those of the two kernels whose place this one takes.
//
// Small problems, and the shortest rows: gradient_spread.cuh. Longer rows: gradient_wide.cuh if they are few or not
// much longer, else gradient_rows.cuh. Rows that no cluster holds, and few long columns of float32: gradient_split.cu.
// Columns of few positions: gradient_columns.cu; of more: gradient_parts.cu. Rows of 16 and 32 bits that are not whole
// vectors: loose_gradient.cu.
#include "common/cuda/residents.cuh"
#include "common/rounding.h"
#include "softmax/cuda/dispatch.cuh"
#include "softmax/cuda/gradient_args.cuh"
#include "softmax/cuda/gradient_columns.h"
#include "softmax/cuda/gradient_rows.cuh"
#include "softmax/cuda/gradient_spread.cuh"
#include "softmax/cuda/gradient_split.h"
#include "softmax/cuda/gradient_wide.cuh"
#include "softmax/cuda/single.h"
#include "softmax/plan.h"

namespace jaxgpuops::softmax {
namespace {

// P is the policy of the forward pass, Q that of its derivative.
template <class P, class Q, Op op, bool kAligned>
__global__ void __launch_bounds__(32 * kPartWarps) gradient_kernel(const __grid_constant__ GradientParameters p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  constexpr int kWidth = 16 / sizeof(Bits);
  const row_engine::Span<P, kOnlyVectors, kAligned, true> span(p.lane_bits);
  // Rows of float32 that are not aligned are loaded by elements, which took up to a fifth less time.
  const row_engine::Span<P, kOnlyVectors, kAligned, true, false, row_engine::kByElements<P>> loaded(p.lane_bits);
  const int64_t row = int64_t{blockIdx.x} * (blockDim.x >> p.lane_bits) + (threadIdx.x >> p.lane_bits);
  const bool last = row + 1 == p.rows;
  const int left = row < p.rows ? p.length : 0;
  const int64_t at = row * p.length;

  const auto args = forward_args<P>(op);
  row_engine::Held<P, kOnlyVectors, true> forward;
  row_engine::Held<Q, kOnlyVectors, true> backward;  // the cotangent, and the forward result
  loaded.load(static_cast<const Bits*>(p.x) + at, left, last, P::pad(args, 0), forward.raw[0]);
  loaded.load(static_cast<const Bits*>(p.cotangent) + at, left, last, Bits{}, backward.raw[0]);

  Stat<P> stat;
  stat.of[0] = row_engine::merged_peak<P>(forward.peak(args), 0, p.lane_bits);
  const Acc peak = stat.peak();
  stat.sum(0) = row_engine::merged_sum(row_engine::sum_and_keep<P>(args, 0, forward, peak), 0, p.lane_bits);
  const typename P::Row plain = {1};
  const auto final = P::finish(args, plain, stat);
  const Acc factor = row_engine::factor_of<P>(final, peak);
#pragma unroll
  for (int j = 0; j < kOnlyVectors; ++j) {
    Acc values[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = row_engine::result_of<P>(args, plain, final, factor, forward, j, i);
    backward.raw[1][j] = row_engine::packed<Element>(values);
  }

  const auto of_result = backward_args<Q>();
  const typename Q::Row unscaled = {1};
  Stat<Q> sums;
  Q::with_sum_args(of_result, [&](const auto& known) {
#pragma unroll
    for (int k = 0; k < Q::kSums; ++k)
      sums.sum(k) = row_engine::merged_sum(backward.sum(known, k, Acc(0), 0, kWidth), 0, p.lane_bits);
  });
  const auto total = Q::finish(of_result, unscaled, sums);
  Pack packs[kOnlyVectors];
  Q::with_args(of_result, [&](const auto& known) {
#pragma unroll
    for (int j = 0; j < kOnlyVectors; ++j) {
      Acc values[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        values[i] = Q::output(known, unscaled, total, backward.x(known, j, i), backward.y(j, i));
      packs[j] = row_engine::packed<Element>(values);
    }
  });
  span.store(static_cast<Bits*>(p.out) + at, left, packs);
}

template <class P, class Q, Op op>
cudaError_t launch_kernel(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  GradientParameters p = {buffers.y,
                          buffers.x,
                          buffers.out,
                          problem.rows.outer,
                          static_cast<int>(problem.rows.length),
                          plan.lane_bits,
                          0,
                          static_cast<int>(plan.blocks)};
  p.vector_bits = bits_for(plan.vectors);
  const auto past_vector = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16; };
  const bool aligned = past_vector(p.x) + past_vector(p.cotangent) + past_vector(p.out) == 0 &&
                       problem.rows.length * plan.traits.item_bytes % 16 == 0;
  const int64_t rows = plan.threads() >> (p.lane_bits + (plan.spread ? p.vector_bits : 0));
  const int64_t blocks = (p.rows + rows - 1) / rows;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  Launch launched;
  launched.grid = dim3(static_cast<unsigned>(blocks));
  launched.block = dim3(plan.threads());
  if (plan.spread)
    return launch(stream, launched,
                  aligned ? spread_gradient_kernel<P, Q, op, true> : spread_gradient_kernel<P, Q, op, false>, p);
  if (plan.wide) {
    if (p.rows > INT32_MAX) return cudaErrorInvalidConfiguration;
    launched.grid = dim3(static_cast<unsigned>(p.rows));
    launched.shared_bytes =
        forward_shared_bytes<P>(plan.block_warps) + row_engine::wide_shared_bytes<Q>(plan.block_warps);
    if (aligned) return launch(stream, launched, wide_gradient_kernel<P, Q, op, true, false>, p);
    if constexpr (row_engine::kByElements<P>)
      if (plan.block_warps <= kElementWarps)
        return launch(stream, launched, wide_gradient_kernel<P, Q, op, false, true>, p);
    return launch(stream, launched, wide_gradient_kernel<P, Q, op, false, false>, p);
  }
  if (plan.spans > 1 || plan.vectors > kOnlyVectors) {
    if (p.rows * plan.blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    launched.grid = dim3(static_cast<unsigned>(p.rows * plan.blocks));
    launched.cluster = static_cast<int>(plan.blocks);
    launched.packed = plan.packed;
    const auto kernel = aligned ? rows_gradient_kernel<P, Q, op, true> : rows_gradient_kernel<P, Q, op, false>;
    if (launched.cluster > 1) {
      const cudaError_t status = allow_cluster(reinterpret_cast<const void*>(kernel), launched.cluster);
      if (status != cudaSuccess) return status;
    }
    return launch(stream, launched, kernel, p);
  }
  if constexpr (std::is_same_v<typename P::Element, Float16>) {
    return cudaErrorInvalidValue;  // plans always spread shorter rows, so no other kernel is compiled
  } else {
    return launch(stream, launched, aligned ? gradient_kernel<P, Q, op, true> : gradient_kernel<P, Q, op, false>, p);
  }
}

template <class E>
cudaError_t launch_of(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  using P = Softmax<E, false>;
  if (problem.op == Op::kSoftmaxJvp)
    return launch_kernel<P, SoftmaxTangent<E>, Op::kSoftmax>(stream, plan, problem, buffers);
  return launch_kernel<P, LogSoftmaxTangent<E, false>, Op::kLogSoftmax>(stream, plan, problem, buffers);
}

}  // namespace

cudaError_t launch_gradient(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                            void* workspace) {
  if (plan.algorithm == RowAlgorithm::kEmpty) return cudaSuccess;
  if (plan.algorithm == RowAlgorithm::kColumnsWalk || plan.algorithm == RowAlgorithm::kSmall)
    return launch_gradient_of_columns(stream, plan, problem, buffers);
  if (plan.single && plan.spread) return launch_loose_gradient(stream, plan, problem, buffers);
  if (plan.algorithm == RowAlgorithm::kColumns) return launch_gradient_parts(stream, plan, problem, buffers, workspace);
  if (plan.algorithm == RowAlgorithm::kRowsSplit || plan.algorithm == RowAlgorithm::kColumnsFlat)
    return launch_gradient_split(stream, plan, problem, buffers, workspace);
  switch (problem.dtype) {
    case DType::kFloat16: return launch_of<Float16>(stream, plan, problem, buffers);
    case DType::kBFloat16: return launch_of<BFloat16>(stream, plan, problem, buffers);
    case DType::kFloat32: return launch_of<Float32>(stream, plan, problem, buffers);
    case DType::kFloat64: return launch_of<Float64>(stream, plan, problem, buffers);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace jaxgpuops::softmax
