// Launches the kernels of a plan.
#include "sort/cuda/launch.h"

#include "select/cuda/launch.h"
#include "sort/cuda/kernels.h"
#include "topk/cuda/sort_rows.h"

namespace jaxgpuops::sort {
namespace {

// Sorts with top-k's kernel, where k is the length of the row. That kernel puts larger keys first, so the order is
// inverted.
cudaError_t launch_team(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  topk::Plan team;
  team.algorithm = topk::Algorithm::kSort;
  team.sort = plan.team;
  team.threads = plan.threads;
  team.blocks = plan.blocks;
  team.shared_bytes = plan.shared_bytes;
  topk::Problem all;
  all.rows = problem.rows;
  all.k = problem.rows.length;
  all.key_bits = problem.key_bits;
  SortOrder order = problem.order;
  order.invert = ~order.invert;
  return topk::launch_sort(stream, team, all, order, {buffers.x, buffers.values, buffers.indices, nullptr});
}

cudaError_t launch_networks(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const bool segments = problem.offsets > 0 || problem.key_bits == 64;
  return (segments ? launch_network_segments : launch_network)(stream, plan, problem, buffers);
}

cudaError_t launch_rows(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  if (plan.algorithm == Algorithm::kPart) {
    select::Select select;
    select.rows = problem.rows;
    select.count = 1;
    select.bits = problem.key_bits;
    select.order = problem.order;
    select.kth = problem.kth;
    return select::launch_select(stream, plan.select, select, buffers.x, nullptr, {buffers.values, buffers.indices},
                                 buffers.workspace);
  }
  if (plan.algorithm == Algorithm::kNetwork) return launch_networks(stream, plan, problem, buffers);
  if (plan.algorithm == Algorithm::kBlock) return launch_block(stream, plan, problem, buffers);
  if (plan.items > 0) return launch_splitters(stream, plan, problem, buffers);
  return launch_sweep(stream, plan, problem, buffers);
}

}  // namespace

cudaError_t launch_sort(cudaStream_t stream, const Plan& plan, const Problem& problem, const void* x, void* values,
                        int32_t* indices, void* workspace, const int32_t* offsets, const int32_t* carried,
                        const uint32_t* needed) {
  const Buffers buffers{x, values, indices, workspace, offsets, carried, needed};
  if (plan.algorithm == Algorithm::kEmpty) return cudaSuccess;
  if (plan.algorithm == Algorithm::kShort) return launch_short(stream, problem, buffers);
  if (plan.algorithm == Algorithm::kNetwork && !plan.turns) return launch_networks(stream, plan, problem, buffers);
  if (plan.algorithm == Algorithm::kTeam) return launch_team(stream, plan, problem, buffers);
  if (plan.algorithm == Algorithm::kSegments) return launch_segments(stream, plan, problem, buffers);
  if (plan.algorithm == Algorithm::kCompare) return launch_compare(stream, plan, problem, buffers);
  if (plan.algorithm == Algorithm::kMerge) return launch_merge(stream, plan, problem, buffers);
  if (problem.offsets > 0) return launch_sweep_segments(stream, plan, problem, buffers);
  if (!plan.turns) return launch_rows(stream, plan, problem, buffers);

  const auto [outer, length, inner] = problem.rows;
  const TurnShape shape(problem.rows, problem.k, problem.key_bits / 8, problem.values, problem.indices);
  auto* const bytes = static_cast<unsigned char*>(workspace);
  Problem turned = problem;
  turned.rows = {outer * inner, length, 1};
  Buffers parts{bytes, nullptr, nullptr, bytes + shape.bytes};
  if (values) parts.values = bytes + shape.values;
  if (indices) parts.indices = reinterpret_cast<int32_t*>(bytes + shape.indices);
  cudaError_t error = launch_turn(stream, x, bytes, outer, length, inner, problem.key_bits);
  if (error == cudaSuccess) error = launch_rows(stream, plan, turned, parts);
  if (error == cudaSuccess && values)
    error = launch_turn(stream, parts.values, values, outer, inner, problem.k, problem.key_bits);
  if (error == cudaSuccess && indices) error = launch_turn(stream, parts.indices, indices, outer, inner, problem.k, 32);
  return error;
}

}  // namespace jaxgpuops::sort
