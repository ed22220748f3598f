// CUDA handler of the sort: it checks its buffers, plans the call and launches the kernels.
#include "common/cuda/device.h"
#include "sort/call.h"
#include "sort/cuda/launch.h"
#include "sort/plan.h"

namespace jaxgpuops::sort {
namespace {

ffi::Error sort(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingRets results, int64_t axis, bool descending,
                bool values, bool indices, int64_t kth) {
  return handle("jaxgpuops.sort", [&] {
    const Call call = sort_call(x, results, axis, descending, values, indices, kth);
    const ffi::AnyBuffer workspace = require_buffer("workspace", results, values + indices);
    const int64_t workspace_bytes = require_workspace(workspace, x, axis);
    const Device device = current_device();
    const Plan plan = plan_sort(call.problem, device.gpu(), workspace_bytes);
    require_enough(workspace_bytes, plan.workspace_bytes, name(plan.algorithm));
    const cudaError_t status =
        launch_sort(stream, plan, call.problem, call.x, call.values, call.indices, workspace.untyped_data());
    require_launched(status, name(plan.algorithm), call.problem.rows, x, device);
  });
}

XLA_FFI_DEFINE_HANDLER(kSort, sort,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .RemainingRets()        // values, indices, workspace
                           .Attr<int64_t>("axis")
                           .Attr<bool>("descending")
                           .Attr<bool>("values")
                           .Attr<bool>("indices")
                           .Attr<int64_t>("kth"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Target> cuda_targets() { return {{"jaxgpuops.sort", kSort}}; }

}  // namespace jaxgpuops::sort
