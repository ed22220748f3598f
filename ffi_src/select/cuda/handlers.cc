// CUDA handlers of the select family: each checks its buffers, plans the call and launches the kernels.
#include "common/cuda/device.h"
#include "select/call.h"
#include "select/cuda/launch.h"

namespace jaxgpuops::select {
namespace {

void run(cudaStream_t stream, const Select& problem, ffi::AnyBuffer x, ffi::AnyBuffer ranks,
         const SelectResults& results, ffi::AnyBuffer workspace, int64_t axis) {
  const int64_t bytes = require_workspace(workspace, x, axis);
  const Device device = current_device();
  const SelectPlan plan = plan_select(problem, device.gpu());
  if (plan.algorithm == Selecting::kNone) throw invalid("rows of ", problem.rows.length, " are to be sorted here");
  require_enough(bytes, plan.workspace_bytes, kSelectingNames[static_cast<int>(plan.algorithm)]);
  require_launched(launch_select(stream, plan, problem, x.untyped_data(),
                                 static_cast<const int32_t*>(ranks.untyped_data()), results, workspace.untyped_data()),
                   kSelectingNames[static_cast<int>(plan.algorithm)], problem.rows, x, device);
}

ffi::Error select(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer ranks, ffi::Result<ffi::AnyBuffer> values,
                  ffi::Result<ffi::AnyBuffer> indices, ffi::Result<ffi::AnyBuffer> workspace, int64_t axis) {
  return handle("jaxgpuops.select", [&] {
    const SelectResults results = {values->untyped_data(), static_cast<int32_t*>(indices->untyped_data())};
    run(stream, select_of(x, ranks, *values, *indices, axis), x, ranks, results, *workspace, axis);
  });
}

ffi::Error quantile(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer ranks, ffi::AnyBuffer shares,
                    ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace, int64_t axis, bool midpoint,
                    int64_t before) {
  return handle("jaxgpuops.quantile", [&] {
    const Select problem = quantile_of(x, ranks, shares, *out, axis, midpoint, before);
    const SelectResults results = {out->untyped_data(), nullptr, shares.untyped_data(), beside_of(x, axis, before)};
    run(stream, problem, x, ranks, results, *workspace, axis);
  });
}

XLA_FFI_DEFINE_HANDLER(kSelect, select, select_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kQuantile, quantile, quantile_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Target> cuda_targets() { return {{"jaxgpuops.select", kSelect}, {"jaxgpuops.quantile", kQuantile}}; }

}  // namespace jaxgpuops::select
