// Gradients of a mean or a sum of cross-entropies of rows that a team of lanes, a block or a cluster holds, without
// label smoothing and z_loss: the kernels of the row engine, with less code and fewer parameters. A kernel waits for
// both, which is most of the time of a small call.
#include <algorithm>

#include "softmax/cuda/cross_entropy.cuh"

namespace jaxgpuops::softmax {
namespace {

using row_engine::rows_kernel;
using row_engine::Sharing;

// The kernel that the plan asks for.
template <class P>
auto plain_kernel(const RowPlan& plan, bool aligned) -> void (*)(Parameters<P>) {
  using Bits = typename P::Bits;
  if (plan.spread) return aligned ? row_engine::spread_kernel<P, true> : row_engine::spread_kernel<P, false>;
  if (plan.wide == 1) return row_engine::wide_kernel<P, 1>;
  if (plan.wide) return row_engine::wide_kernel<P, kWideVectors>;
  const auto rows = [&](auto vectors, auto sharing) -> void (*)(Parameters<P>) {
    constexpr int kVectors = decltype(vectors)::value;
    constexpr Sharing kSharing = decltype(sharing)::value;
    if (aligned) return rows_kernel<P, kVectors, kSharing, true>;
    if constexpr (sizeof(Bits) >= 4 && kVectors > 1)
      if (plan.single) return rows_kernel<P, kVectors, kSharing, false, true>;
    return rows_kernel<P, kVectors, kSharing, false>;
  };
  const std::integral_constant<Sharing, Sharing::kTeam> team;
  const std::integral_constant<Sharing, Sharing::kBlocks> blocks;
  const std::integral_constant<int, kOnlyVectors> some;
  if constexpr (P::kFast) {
    const std::integral_constant<int, 8> many;
    if (plan.spans > 1) return rows(many, blocks);
    if (plan.vectors == 1) return rows(std::integral_constant<int, 1>(), team);
    if (plan.vectors == 8) return rows(many, team);
  } else if (plan.spans > 1) {
    return rows(some, blocks);
  }
  if (plan.vectors == kOnlyVectors) return rows(some, team);
  return nullptr;
}

// Whether the operand has the same element for all rows, or (is_whole) one for each row, in their order.
bool is_one(const IndexMap& map) {
  return std::all_of(map.stride, map.stride + map.groups, [](int64_t stride) { return stride == 0; });
}
bool is_whole(const IndexMap& map) { return map.groups == 0 || (map.groups == 1 && map.stride[0] == 1); }

}  // namespace

bool is_plain_entropy(const RowPlan& plan, const Problem& problem) {
  return problem.op == Op::kCrossEntropyGrad && plan.algorithm == RowAlgorithm::kRows && problem.label_smoothing == 0 &&
         problem.z_loss == 0 && is_one(problem.cotangent.outer) && is_whole(problem.row_where.outer);
}

cudaError_t launch_plain_cross_entropy(cudaStream_t stream, const RowPlan& plan, const Problem& problem,
                                       const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto element) {
    using P = CrossEntropy<decltype(element), true>;
    auto p = parameters_of<P>(problem, buffers);
    p.args = entropy_args_of<P>(problem, buffers);
    row_engine::RowKernels kernels;
    kernels.item_bytes = sizeof(typename P::Bits);
    kernels.stat_bytes = sizeof(row_engine::Stat<P>);
    kernels.final_bytes = sizeof(typename P::Final);
    kernels.wide_shared_bytes = row_engine::wide_shared_bytes<P>(plan.block_warps, plan.wide);
    row_engine::set_parameters(p, plan, problem.rows, kernels, nullptr);
    kernels.sweep = reinterpret_cast<const void*>(plain_kernel<P>(plan, p.aligned));
    return row_engine::run_sweeps(stream, plan, problem.rows, p, kernels);
  });
}

}  // namespace jaxgpuops::softmax
