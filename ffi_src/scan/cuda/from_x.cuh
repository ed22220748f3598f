// Gradients of cumulative products, extremes and logsumexps from x, along rows of one tile: one kernel runs the forward
// scan and then that of the gradient. The forward result passes through the memory of the gradient, which replaces it,
// so it stays in the caches. x and the cotangent are read from memory once, and the gradient is written once. Each of
// the two scans is that of a kernel of its own, in the same order, so the bits are those of two kernels.
#pragma once

#include "scan/cuda/algorithms.cuh"

namespace jaxgpuops::scan {

struct FromX {
  Parameters forward, gradient;
};

template <class Policy, class Forward, bool kByVectors>
__global__ void __launch_bounds__(kThreads, kWholeRowBlocks<Policy>) scan_rows_from_x(const __grid_constant__ FromX p) {
  if (threadIdx.x < p.forward.threads) scan_whole_rows<Forward, kByVectors>(p.forward);
  __syncthreads();
  scan_whole_rows<Policy, kByVectors>(p.gradient);
}

// Lays out the shared memory of rows, and returns its size.
template <class Policy>
size_t bytes_of_rows(Parameters& p) {
  p.states_at = static_cast<unsigned>(p.threads / 32 * Rows<Policy, false>::kBytesOfWarp);
  const size_t states = p.axis_warps == 1 ? 0 : kWarps << p.column_bits;
  return p.states_at + states * sizeof(typename Policy::State);
}

template <class Policy, class Forward>
cudaError_t launch_rows_from_x(cudaStream_t stream, Launch shape, FromX& p) {
  shape.shared_bytes = std::max(bytes_of_rows<Forward>(p.forward), bytes_of_rows<Policy>(p.gradient));
  if constexpr (sizeof(typename Policy::Element::Bits) == 2)
    if (!p.gradient.aligned && p.forward.run_bits < 5)
      return launch(stream, shape, scan_rows_from_x<Policy, Forward, true>, p);
  return launch(stream, shape, scan_rows_from_x<Policy, Forward, false>, p);
}

template <class Policy, class Forward>
cudaError_t launch_tile_from_x(cudaStream_t stream, const Plan& plan, const Problem& problem, Buffers buffers) {
  Buffers of_forward;
  of_forward.x = buffers.a;
  of_forward.out = buffers.out;
  buffers.y = buffers.out;
  FromX p{parameters_of(plan_forward(problem, plan), forward_of(problem), of_forward, nullptr),
          parameters_of(plan, problem, buffers, nullptr)};
  const Launch shape{dim3(p.gradient.strips), dim3(plan.threads())};
  if (plan.algorithm != Algorithm::kRows) return cudaErrorInvalidValue;
  return launch_rows_from_x<Policy, Forward>(stream, shape, p);
}

}  // namespace jaxgpuops::scan
