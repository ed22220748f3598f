// From a plan to its kernel.
#include "scan/cuda/launch.h"

#include <algorithm>

#include "scan/cuda/algorithms.cuh"
#include "scan/cuda/kernels.h"
#include "scan/plan_parts.h"

namespace jaxgpuops::scan {
namespace {

bool is_aligned(const void* pointer, int bytes = 16) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// kSpans: bit o is set if operand o is copied to shared memory as it lies in global memory. No bit is set if results
// cannot be copied back in that way.
int staged_operands(const Plan& plan, const Problem& problem, const Buffers& buffers) {
  if (plan.span_bytes == 0) return 0;
  if (!is_aligned(buffers.x) || !is_aligned(buffers.y) || !is_aligned(buffers.out) || !is_aligned(buffers.out2))
    return 0;
  int operands = 1 | (buffers.y ? 4 : 0);
  const auto [outer, length, inner] = problem.rows;
  const auto is_dense = [](const IndexMap& map, int64_t count, int64_t stride) {
    return count == 1 || (map.groups == 1 && map.stride[0] == stride);
  };
  const bool all_of_a = problem.kind != Kind::kLinear ||
                        (is_dense(problem.a.inner, inner, 1) && (length == 1 || problem.a.axis_stride == inner) &&
                         is_dense(problem.a.outer, outer, length * inner));
  if (buffers.a && all_of_a) {
    if (is_aligned(buffers.a)) return operands | 2;
    if (buffers.out2) return 0;  // out2 would need the place of an operand in shared memory, and none is left
  }
  return operands;
}

// The mask for which x ^ mask, as a signed number, has the order of integers x (reversed if `smaller`).
uint64_t order_mask(DType dtype, bool smaller) {
  const int bits = 8 * bytes_of(dtype);
  const uint64_t all = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1, sign = uint64_t{1} << (bits - 1);
  const bool is_unsigned =
      dtype == DType::kUint8 || dtype == DType::kUint16 || dtype == DType::kUint32 || dtype == DType::kUint64;
  return (smaller ? all : 0) ^ (is_unsigned ? sign : 0);
}

}  // namespace

Parameters parameters_of(const Plan& plan, const Problem& problem, const Buffers& buffers, void* workspace) {
  const auto [outer, length, inner] = problem.rows;
  const bool linear = problem.kind == Kind::kLinear, vjp = problem.kind == Kind::kLinearVjp;
  const bool tangent = problem.kind == Kind::kTangent;
  Parameters p = {};
  p.operands[0] = buffers.x;
  p.operands[1] = buffers.a;
  p.operands[2] = buffers.y;
  p.results[0] = buffers.out;
  p.results[1] = buffers.out2;
  p.h0 = problem.initial ? buffers.h0 : nullptr;
  p.wide_h0 = h0_dtype(problem) != problem.dtype;
  p.starts = problem.segmented ? buffers.starts : nullptr;
  p.counters_at = static_cast<unsigned*>(workspace);
  p.words = reinterpret_cast<uint64_t*>(static_cast<unsigned char*>(workspace) + kWorkspaceHeader);
  p.a = problem.a;
  if (outer == 1) {  // no stride is used; with this one, rows follow each other in memory
    p.a.outer.groups = 1;
    p.a.outer.stride[0] = length * inner;
  }
  p.a_axis_stride = problem.a.axis_stride;
  p.a_outer_stride = p.a.outer.groups == 0 ? 0 : p.a.outer.groups == 1 ? p.a.outer.stride[0] : -1;
  p.starts_at = problem.starts;
  p.options.op = problem.op == Op::kSum         ? Options::kSum
                 : problem.op == Op::kProd      ? Options::kProduct
                 : problem.op == Op::kLogSumExp ? Options::kLogSumExp
                                                : Options::kExtreme;
  p.options.exclusive = problem.exclusive;
  p.options.transpose = problem.transpose;
  p.options.segmented = problem.segmented;
  p.options.sign = problem.op == Op::kMin ? -1.0f : 1.0f;
  p.options.smaller = problem.op == Op::kMin;
  p.options.mask = order_mask(problem.dtype, p.options.smaller);
  p.inner = inner;
  p.columns = outer * inner;
  p.length = length;
  p.tile = plan.tile;
  p.tiles = static_cast<int>(plan.tiles);
  p.strips = static_cast<unsigned>(plan.strips);
  p.run_bits = plan.run_bits;
  p.axis_warps = plan.axis_warps;
  p.column_bits = plan.column_bits;
  p.per_lane = plan.per_lane;
  p.levels = plan.levels;
  p.late = plan.late;
  p.stages = plan.stages;
  p.copies = resident_copies(plan.tiles);
  p.threads = plan.threads();
  p.runs = plan.runs;
  p.width = plan.columns;
  p.parts = static_cast<unsigned>(plan.parts);
  p.block_columns = plan.block_columns;
  p.outer_step = p.threads / inner;
  p.inner_step = p.threads % inner;
  p.span_bytes = plan.span_bytes;
  p.padding = plan.padding;
  p.stage_bytes = plan.stage_bytes;
  if (plan.layout == Layout::kSpans) p.staged = staged_operands(plan, problem, buffers);
  p.packed = inner == 1 && p.padding > 0 && bytes_of(problem.dtype) > 1;
  if (plan.algorithm == Algorithm::kPacks) {
    for (int i = 0; i < 64; ++i) p.row_begins |= static_cast<uint64_t>(i % length == 0) << i;
    // Of rows of one element, which begin everywhere, the remainder may be 1.
    p.of_length = UINT32_MAX / static_cast<uint32_t>(length) + (length > 1 ? 1 : 0);
    p.row_lanes = row_lanes(length * bytes_of(problem.dtype));
    p.lanes_before = row_lanes_before(length * bytes_of(problem.dtype));
  }

  p.backward = vjp || (tangent && problem.transpose) ? !problem.reverse : problem.reverse;
  // Which boundary separates a position from earlier ones: the one before the position in the direction of the scan,
  // or, if `after`, the one after it.
  const bool after = (linear && problem.transpose) || vjp || (tangent && problem.transpose && !problem.exclusive);
  p.start_offset = p.backward != after ? 1 : 0;
  // The neighbour of a position is the one before it in the direction of the forward call; for exclusive tangents, the
  // one after it.
  p.neighbour_before = (p.backward == problem.reverse) != (tangent && problem.exclusive);

  p.by_words = plan.layout == Layout::kAcross && inner * bytes_of(problem.dtype) % 16 != 0;
  const int alignment = p.by_words ? std::max(4, bytes_of(problem.dtype)) : 16;
  p.aligned = true;
  for (const void* buffer :
       {buffers.x, buffers.a, buffers.y, const_cast<const void*>(buffers.out), const_cast<const void*>(buffers.out2)})
    p.aligned = p.aligned && is_aligned(buffer, alignment);
  p.starts_aligned = is_aligned(buffers.starts);
  p.a_inner_stride = problem.a.inner.groups == 0 ? 0 : static_cast<int>(problem.a.inner.stride[0]);
  p.starts_inner_stride = problem.starts.inner.groups == 0 ? 0 : static_cast<int>(problem.starts.inner.stride[0]);
  if (plan.layout == Layout::kAlong && length * bytes_of(problem.dtype) % 16 != 0) {
    p.at_vectors = p.aligned && is_exact(problem) && plan.algorithm != Algorithm::kRows;
    // Tiles are whole packs, so that one row from its first element on is aligned. (kRows has no partial packs.)
    const bool one = outer == 1 && !p.backward && plan.algorithm != Algorithm::kRows;
    p.aligned = p.aligned && (one || p.at_vectors);
  }
  return p;
}

cudaError_t launch_scan(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                        void* workspace) {
  if (plan.algorithm == Algorithm::kEmpty) return cudaSuccess;
  if (is_paired(problem) && plan.layout == Layout::kAlong) {
    if (is_aligned(buffers.x, 8) && is_aligned(buffers.h0, 8) && is_aligned(buffers.out, 8))
      return launch_scan(stream, plan, paired(problem), buffers, workspace);
    // XLA's buffers are aligned; others, as only tests have, get other bits.
    const Plan spans = plan_scan(problem, gpu_of(75), -1, static_cast<int>(Algorithm::kSpans));
    return launch_sum(stream, spans, problem, buffers, nullptr);
  }
  if (problem.kind == Kind::kTangent && plan.algorithm == Algorithm::kPieces)
    return launch_tangent_pieces(stream, plan, problem, buffers);
  if (plan.algorithm == Algorithm::kSmall || plan.algorithm == Algorithm::kLanes ||
      plan.algorithm == Algorithm::kPieces || plan.algorithm == Algorithm::kFew)
    return launch_small(stream, plan, problem, buffers);
  if (plan.algorithm == Algorithm::kLaneRows) return launch_lane_rows(stream, plan, problem, buffers);
  if (problem.from_x) return launch_gradient_from_x(stream, plan, problem, buffers);
  switch (problem.kind) {
    case Kind::kTangent: return launch_tangent(stream, plan, problem, buffers, workspace);
    case Kind::kLinear: return launch_linear(stream, plan, problem, buffers, workspace);
    case Kind::kLinearVjp: return launch_linear_vjp(stream, plan, problem, buffers, workspace);
    case Kind::kCumulative: break;
  }
  if (is_general(problem)) return launch_general(stream, plan, problem, buffers, workspace);
  switch (problem.op) {
    case Op::kSum: return launch_sum(stream, plan, problem, buffers, workspace);
    case Op::kProd: return launch_product(stream, plan, problem, buffers, workspace);
    case Op::kMax:
    case Op::kMin: return launch_extreme(stream, plan, problem, buffers, workspace);
    case Op::kLogSumExp: return launch_logsumexp(stream, plan, problem, buffers, workspace);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxgpuops::scan
