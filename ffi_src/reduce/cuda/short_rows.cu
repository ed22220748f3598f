// Sums of few longer rows (RowPlan::wide): a block has a row. One read, in the order of additions of rows_kernel and
// sweep_kernel, whose lanes have kOfSpan vectors of a span.
//
// Most of the time of such a call is that of one row: the kernel waits for its parameters, for its code, and for one
// load. So the parameters fill one line, and there is a kernel for each way to load a row, with little code.
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

// A lane has kEach vectors: all that a lane of the other kernels has of a span, or fewer. Then the sums of vectors go
// through shared memory.
template <class P, int kEach, bool kAligned>
__global__ void __launch_bounds__(32 * kMaxBlockWarps) short_sums_kernel(const __grid_constant__ ShortSums<P> p) {
  using Bits = typename P::Bits;
  using Acc = typename P::Acc;
  using Lane = row_engine::Held<P, 1, true>;
  constexpr int kWidth = Lane::kWidth, kApart = 32 * kWidth, kOfSpan = P::kLarge ? 8 : kOnlyVectors;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = (warp * 32 * kEach + lane) * kWidth, left = p.length - first;
  const auto* const from = static_cast<const Bits*>(p.x) + int64_t{blockIdx.x} * p.length + first;
  Lane unit[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    Pack& pack = unit[j].raw[0][0];
    if constexpr (!kAligned && sizeof(Bits) < 4) {
      pack = row_engine::load_part<Bits>(from + j * kApart, left - j * kApart, 0);
    } else if constexpr (kAligned) {
      pack = j * kApart < left ? row_engine::load_pack(reinterpret_cast<const Pack*>(from + j * kApart)) : Pack{};
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) set<Bits>(pack, i, j * kApart + i < left ? from[j * kApart + i] : Bits(0));
    }
  }

  // Adds up the vectors of a lane of a span, then its lanes.
  __shared__ Acc of_spans[kMaxBlockWarps];
  Acc sum[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) sum[j] = unit[j].sum(p.args, 0, Acc(0), 0, kWidth);
  if constexpr (kEach == kOfSpan) {
#pragma unroll
    for (int j = 1; j < kEach; ++j) sum[0] = sum[0] + sum[j];
  } else {
    Acc* const sums = reinterpret_cast<Acc*>(dynamic_shared_memory());
#pragma unroll
    for (int j = 0; j < kEach; ++j) sums[(warp * kEach + j) * 32 + lane] = sum[j];
    __syncthreads();
    if (warp >= p.spans) return;
    const int lanes = 1 << p.lane_bits, begin = (warp << p.vector_bits) * 32 + (lane & (lanes - 1));
    const int vectors = min(lanes << p.vector_bits, static_cast<int>(blockDim.x) * kEach - begin);
    Acc next[kOfSpan];
#pragma unroll
    for (int v = 0; v < kOfSpan; ++v) next[v] = v * lanes < vectors ? sums[begin + v * lanes] : Acc(0);
    sum[0] = next[0];
#pragma unroll
    for (int v = 1; v < kOfSpan; ++v) sum[0] = sum[0] + next[v];
  }
  row_engine::Stat<P> stat = {row_engine::merged_sum(sum[0], 0, p.lane_bits)};
  if (p.spans > 1) {  // merges in the order of merge_by_warp()
    if (lane == 0) of_spans[warp] = stat.sum(0);
    __syncthreads();  // for all warps that have not returned
    if (warp > 0) return;
    stat = row_engine::merge_lanes<P>({Acc(0) + (lane < p.spans ? of_spans[lane] : Acc(0))});
  }
  if (lane == 0) P::write_row(p.args, blockIdx.x, {}, P::finish(p.args, {}, stat));
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
  if (kEach < plan.vectors) launched.shared_bytes = plan.threads() * kEach * sizeof(typename P::Acc);
  return launch(stream, launched, aligned ? short_sums_kernel<P, kEach, true> : short_sums_kernel<P, kEach, false>, p);
}

}  // namespace

cudaError_t launch_short(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto element) {
    using P = Sum<decltype(element), false>;
    if constexpr (P::kFast) {
      if (plan.wide == 1) return launch_each<P, 1>(stream, plan, problem, buffers);
      if (plan.wide == kWideVectors) return launch_each<P, kWideVectors>(stream, plan, problem, buffers);
    }
    return launch_each<P, P::kLarge ? 8 : kOnlyVectors>(stream, plan, problem, buffers);
  });
}

}  // namespace jaxgpuops::reduce
