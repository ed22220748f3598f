// Sums of few longer rows (RowPlan::wide): wide_kernel of row_engine/cuda/spread.cuh for this one operation. One read,
// in the same order of additions.
//
// Most of the time of such a call is that of one row: the kernel waits for its parameters, for its code, and for one
// load. So the parameters fill one line, and rows that are aligned have a kernel of their own.
#include "common/rounding.h"
#include "reduce/cuda/dispatch.cuh"

namespace jaxgpuops::reduce {
namespace {

template <class P>
struct ShortSums {
  const void* x;
  int length, lane_bits, vector_bits, spans;
  typename P::Args args;
};

template <class P, int kEach, bool kAligned>
__global__ void __launch_bounds__(32 * kMaxBlockWarps) short_sums_kernel(const __grid_constant__ ShortSums<P> p) {
  using Bits = typename P::Bits;
  using Unit = row_engine::Held<P, 1, true>;
  const int first = threadIdx.x / 32 * (32 * kEach * Unit::kWidth);
  const auto* const from = static_cast<const Bits*>(p.x) + int64_t{blockIdx.x} * p.length + first;
  const row_engine::WideSpan<P, row_engine::kByElements<P>, kEach, true> span;
  Pack packs[kEach];
  span.load(from, max(0, p.length - first), kAligned, blockIdx.x + 1 == gridDim.x, P::pad(p.args, 0), packs);
  Unit unit[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) unit[j].raw[0][0] = packs[j];
  auto& shared = *reinterpret_cast<row_engine::WideShared<P>*>(dynamic_shared_memory());
  typename P::Acc peak;
  const auto stat = row_engine::wide_statistics<P>(p.args, unit, p.vector_bits, p.spans, shared, peak, p.lane_bits);
  if (threadIdx.x == 0) P::write_row(p.args, blockIdx.x, {}, P::finish(p.args, {}, stat));
}

template <class P, int kEach>
cudaError_t launch_each(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  ShortSums<P> p = {buffers.x,
                    static_cast<int>(problem.rows.length),
                    plan.lane_bits,
                    bits_for(plan.vectors),
                    static_cast<int>(plan.spans),
                    parameters_of<P>(problem, buffers).args};
  const bool aligned = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.length * sizeof(typename P::Bits) % 16 == 0;
  Launch launched;
  launched.grid = dim3(static_cast<unsigned>(problem.rows.outer));
  launched.block = dim3(plan.threads());
  launched.shared_bytes = row_engine::wide_shared_bytes<P>(plan.block_warps, kEach);
  return launch(stream, launched, aligned ? short_sums_kernel<P, kEach, true> : short_sums_kernel<P, kEach, false>, p);
}

}  // namespace

cudaError_t launch_short(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto element) {
    using P = Sum<decltype(element), false>;
    if constexpr (P::kFast) {
      return plan.wide == 1 ? launch_each<P, 1>(stream, plan, problem, buffers)
                            : launch_each<P, kWideVectors>(stream, plan, problem, buffers);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace jaxgpuops::reduce
