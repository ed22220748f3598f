// CUDA handlers of top-k and argmax: each checks its buffers, plans the call and launches the kernels.
#include "common/cuda/device.h"
#include "topk/call.h"
#include "topk/cuda/launch.h"

namespace jaxgpuops::topk {
namespace {

ffi::Error topk(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                ffi::Result<ffi::AnyBuffer> indices, ffi::Result<ffi::AnyBuffer> workspace, int64_t axis, bool largest,
                bool sorted) {
  return handle("jaxgpuops.topk", [&] {
    const Problem problem = topk_problem(x, *values, *indices, axis, largest, sorted);
    const int64_t workspace_bytes = require_workspace(*workspace, x, axis);
    const Device device = current_device();
    const Plan plan = plan_topk(problem.rows, problem.k, problem.key_bits, sorted, device.gpu(), workspace_bytes);
    require_enough(workspace_bytes, plan.workspace_bytes, name(plan.algorithm));
    const cudaError_t status = launch_topk(stream, plan, problem, x.untyped_data(), values->untyped_data(),
                                           static_cast<int32_t*>(indices->untyped_data()), workspace->untyped_data());
    require_launched(status, name(plan.algorithm), problem.rows, x, device);
  });
}

ffi::Error argmax(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> indices,
                  ffi::Result<ffi::AnyBuffer> workspace, int64_t axis, bool largest) {
  return handle("jaxgpuops.argmax", [&] {
    const ArgProblem problem = argmax_problem(x, *indices, axis, largest);
    const int64_t workspace_bytes = require_workspace(*workspace, x, axis);
    const Device device = current_device();
    const Plan plan = plan_argmax(problem.rows, problem.key_bits, device.gpu(), workspace_bytes);
    require_enough(workspace_bytes, plan.workspace_bytes, name(plan.algorithm));
    const cudaError_t status = launch_argmax(stream, plan, problem, x.untyped_data(),
                                             static_cast<int32_t*>(indices->untyped_data()), workspace->untyped_data());
    require_launched(status, name(plan.algorithm), problem.rows, x, device);
  });
}

XLA_FFI_DEFINE_HANDLER(kTopk, topk, topk_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kArgmax, argmax, argmax_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Target> cuda_targets() { return {{"jaxgpuops.topk", kTopk}, {"jaxgpuops.argmax", kArgmax}}; }

}  // namespace jaxgpuops::topk
