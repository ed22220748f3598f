// CUDA handlers of the reductions: each checks its buffers, plans the call and launches the kernel.
#include "common/cuda/device.h"
#include "reduce/call.h"
#include "reduce/cuda/launch.h"

namespace jaxgpuops::reduce {
namespace {

void run(cudaStream_t stream, const Call& call, ffi::AnyBuffer x, ffi::AnyBuffer workspace, int64_t axis) {
  const int64_t workspace_bytes = require_workspace(workspace, x, axis);
  const Device device = current_device();
  const RowPlan plan = plan_reduce(call.problem, device.gpu(), workspace_bytes);
  require_enough(workspace_bytes, plan.workspace_bytes, name(plan.algorithm));
  const cudaError_t status = launch_reduce(stream, plan, call.problem, call.buffers, workspace.untyped_data());
  require_launched(status, name(plan.algorithm), call.problem.rows, x, device);
}

template <Op op>
ffi::Error reduce(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Result<ffi::AnyBuffer> workspace, int64_t axis, bool masked) {
  return handle(target_name(op),
                [&] { run(stream, reduce_call(op, x, nullptr, rest, *out, axis, masked), x, *workspace, axis); });
}

ffi::Error sum(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
               ffi::Result<ffi::AnyBuffer> workspace, int64_t axis, bool masked, int64_t divisor) {
  return handle(target_name(Op::kSum), [&] {
    run(stream, reduce_call(Op::kSum, x, nullptr, rest, *out, axis, masked, divisor), x, *workspace, axis);
  });
}

ffi::Error dot(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer y, ffi::RemainingArgs rest,
               ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace, int64_t axis, bool masked) {
  return handle(target_name(Op::kDot),
                [&] { run(stream, reduce_call(Op::kDot, x, &y, rest, *out, axis, masked), x, *workspace, axis); });
}

XLA_FFI_DEFINE_HANDLER(kSum, sum, sum_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMax, reduce<Op::kMax>, reduce_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMin, reduce<Op::kMin>, reduce_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kDot, dot, dot_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Target> cuda_targets() {
  return {{"jaxgpuops.sum", kSum}, {"jaxgpuops.max", kMax}, {"jaxgpuops.min", kMin}, {"jaxgpuops.dot", kDot}};
}

}  // namespace jaxgpuops::reduce
