// From a plan to its kernel.
#include "scan/launch.h"

#include "scan/algorithms.cuh"
#include "scan/kernels.h"

namespace jaxgpuops::scan {
namespace {

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// In integers x ^ mask, as a signed number, is larger where x is (or smaller).
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
  p.starts = problem.segmented ? buffers.starts : nullptr;
  p.counters_at = static_cast<unsigned*>(workspace);
  p.words = reinterpret_cast<uint64_t*>(static_cast<unsigned char*>(workspace) + kWorkspaceHeader);
  p.a = problem.a;
  p.starts_at = problem.starts;
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

  p.backward = vjp || (tangent && problem.transpose) ? !problem.reverse : problem.reverse;
  // The boundary before a position, in the direction of the scan, or after it where what is passed on is cut.
  const bool after = (linear && problem.transpose) || vjp || (tangent && problem.transpose && !problem.exclusive);
  p.start_offset = p.backward != after ? 1 : 0;
  // Positions before, in the direction of the forward call; after for the exclusive tangent of logsumexp.
  p.neighbour_before = (p.backward == problem.reverse) != (tangent && problem.exclusive);

  p.aligned = is_aligned(buffers.x) && is_aligned(buffers.a) && is_aligned(buffers.y) && is_aligned(buffers.out) &&
              is_aligned(buffers.out2);
  p.starts_aligned = is_aligned(buffers.starts);
  p.a_inner_stride = problem.a.inner.groups == 0 ? 0 : static_cast<int>(problem.a.inner.stride[0]);
  p.starts_inner_stride = problem.starts.inner.groups == 0 ? 0 : static_cast<int>(problem.starts.inner.stride[0]);
  if (plan.layout == Layout::kAlong && length * bytes_of(problem.dtype) % 16 != 0) p.aligned = false;
  return p;
}

cudaError_t launch_scan(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                        void* workspace) {
  if (plan.algorithm == Algorithm::kEmpty) return cudaSuccess;
  switch (problem.kind) {
    case Kind::kTangent: return launch_tangent(stream, plan, problem, buffers, workspace);
    case Kind::kLinear: return launch_linear(stream, plan, problem, buffers, workspace);
    case Kind::kLinearVjp: return launch_linear_vjp(stream, plan, problem, buffers, workspace);
    case Kind::kCumulative: break;
  }
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
