// Small calls of softmax, log_softmax and logsumexp, and those of few columns side by side: the kernels of
// row_engine/cuda/small.cuh and columns_tiles.cuh.
#include "row_engine/cuda/columns_tiles.cuh"
#include "row_engine/cuda/small.cuh"
#include "softmax/cuda/dispatch.cuh"

namespace jaxgpuops::softmax {
namespace {

template <class P, class Given>
struct LaneColumnParameters {
  const void* x;
  void* out;
  SmallColumns columns;
  Given given;
};

// Columns of at most kHeld positions of small arrays: a lane has a column, in the order of held_walk_kernel.
template <class P, class Given, int kHeld>
__global__ void __launch_bounds__(32 * kSpreadWarps)
    lane_columns_kernel(const __grid_constant__ LaneColumnParameters<P, Given> p) {
  using Bits = typename P::Bits;
  using Acc = typename P::Acc;
  const SmallColumns& c = p.columns;
  const uint32_t column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= c.columns) return;
  const uint32_t inner = once(c.inner), length = once(c.length);
  const uint32_t at = once(c.outer_of(column) * (length - 1) * inner + column);
  const typename P::Args& args = p.given;
  Bits raw[kHeld];
#pragma unroll
  for (uint32_t j = 0; j < kHeld; ++j)
    raw[j] = j < length ? static_cast<const Bits*>(p.x)[at + j * inner] : P::pad(args, 0);
  Acc value[kHeld];
  Stat<P> stat = Stat<P>::none();
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    value[j] = P::value(args, P::Element::load(raw[j]));
    stat.of[0] = P::larger(stat.peak(), value[j]);
  }
  const auto shift = P::guard(stat.peak());
  stat.sum(0) = Acc(0);
#pragma unroll
  for (uint32_t j = 0; j < kHeld; ++j)
    if (j < length) stat.sum(0) = P::add(args, 0, stat.sum(0), value[j], Acc(0), shift);
  const auto final = P::finish(args, {}, stat);
  P::write_row(args, column, {}, final);
  if (p.out == nullptr) return;
#pragma unroll
  for (uint32_t j = 0; j < kHeld; ++j)
    if (j < length)
      static_cast<Bits*>(p.out)[at + j * inner] = P::Element::store(P::output(args, {}, final, value[j], Acc(0)));
}

template <class P, class Given>
cudaError_t run_lane_columns(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                             const Given& given) {
  const LaneColumnParameters<P, Given> p = {buffers.x, buffers.out, SmallColumns(problem.rows, 5, 0), given};
  Launch launched;
  launched.grid = dim3(static_cast<unsigned>((problem.rows.count() + plan.threads() - 1) / plan.threads()));
  launched.block = dim3(plan.threads());
  const auto kernel =
      problem.rows.length <= 4 ? lane_columns_kernel<P, Given, 4> : lane_columns_kernel<P, Given, held_positions(1)>;
  return launch(stream, launched, kernel, p);
}

}  // namespace

cudaError_t launch_small(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto element) {
    using P = Softmax<decltype(element), false>;
    return with_op(problem.op, [&](auto op) {
      const auto given = given_op<P, decltype(op)::value>(problem, buffers);
      if (plan.algorithm == RowAlgorithm::kRowsTiles)
        return row_engine::run_column_tiles<P>(stream, plan, problem.rows, buffers.x, buffers.out, given);
      if constexpr (P::kFast)
        if (plan.single) return run_lane_columns<P>(stream, plan, problem, buffers, given);
      return row_engine::run_small<P>(stream, plan, problem.rows, buffers.x, buffers.out, given);
    });
  });
}

}  // namespace jaxgpuops::softmax
