// Small sums of floats. Those of 8 bits, and flat rows: the kernels of row_engine/cuda/small.cuh. Others: each thread
// has the positions of a column that a lane of a walking kernel has there (row_engine/cuda/columns_walk.cuh), all of
// them on their way before the first is used, and adds them up in the same order. One read; the parameters fill one
// line.
#include "row_engine/cuda/small.cuh"
#include "reduce/cuda/dispatch.cuh"

namespace jaxgpuops::reduce {
namespace {

template <class P>
struct SmallSums {
  const void* x;
  uint32_t columns, length, inner;
  Quotient outer_of;
  typename P::Args args;
};

// A block has 32 columns. Warp `part` of it has the positions part, part + parts, ..; they are at most kMost.
template <class P, int kMost>
__global__ void __launch_bounds__(32 * kSmallWarps) small_sums_kernel(const __grid_constant__ SmallSums<P> p) {
  using Bits = typename P::Bits;
  using Stat = row_engine::Stat<P>;
  constexpr int kCount = row_engine::Walk<P>::kCount;  // positions that are added up first
  const uint32_t lane = threadIdx.x, part = threadIdx.y, parts = blockDim.y;
  const uint32_t own = blockIdx.x * 32 + lane, column = min(own, p.columns - 1);  // lanes without one take the last
  const uint32_t first = (once(p.outer_of(column)) * (p.length - 1) + part) * p.inner + column;
  const uint32_t apart = once(parts * p.inner);
  const Bits* const from = static_cast<const Bits*>(p.x) + first;
  row_engine::Held<P, kCount, false> held[kMost / kCount];
#pragma unroll
  for (int n = 0; n < kMost; ++n)
    held[n / kCount].raw[0][n % kCount] = part + n * parts < p.length ? from[n * apart] : P::pad(p.args, 0);
  Stat stat = Stat::none();
#pragma unroll
  for (int batch = 0; batch < kMost / kCount; ++batch) {
    if (batch && part + batch * kCount * parts >= p.length) break;
    row_engine::take_in<P>(stat, typename P::Acc(0),
                           [&](int k, const auto& shift) { return held[batch].sum(p.args, k, shift, 0, 1); });
  }
  if (parts > 1) {
    __shared__ Stat all[kSmallWarps * 32];
    all[part * 32 + lane] = stat;
    __syncthreads();
    if (part > 0) return;
    stat = row_engine::merge_serially<P>([&](int w) { return all[w * 32 + lane]; }, 0, 1, parts);
  }
  if (own == column) P::write_row(p.args, column, {}, P::finish(p.args, {}, stat));
}

template <class P>
cudaError_t launch_sums(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  const auto all = parameters_of<P>(problem, buffers);
  const Rows& rows = problem.rows;
  if constexpr (sizeof(typename P::Bits) == 1)
    return row_engine::run_small<P>(stream, plan, rows, all.operands[0], all.out, all.args);
  if (plan.flat) return row_engine::run_small_flat<P>(stream, plan, rows, all.operands[0], all.out, all.args);
  const SmallSums<P> p = {buffers.x,
                          static_cast<uint32_t>(rows.count()),
                          static_cast<uint32_t>(rows.length),
                          static_cast<uint32_t>(rows.inner),
                          Quotient(rows.inner),
                          all.args};
  const int64_t most = (rows.length + plan.axis_warps - 1) / plan.axis_warps;
  Launch launched;
  launched.grid = dim3(static_cast<unsigned>((rows.count() + 31) / 32));
  launched.block = dim3(32, plan.axis_warps);
  return launch(stream, launched,
                most <= 8    ? small_sums_kernel<P, 8>
                : most <= 16 ? small_sums_kernel<P, 16>
                             : small_sums_kernel<P, kHeldWalk>,
                p);
}

}  // namespace

cudaError_t launch_small(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  const auto run = [&](auto element) {
    return launch_sums<Sum<decltype(element), false>>(stream, plan, problem, buffers);
  };
  return is_float8(problem.dtype) ? with_float8(problem.dtype, run) : with_float(problem.dtype, run);
}

}  // namespace jaxgpuops::reduce
