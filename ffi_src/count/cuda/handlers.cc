// CUDA handlers of the family that counts: each checks its buffers, plans the call and launches the kernels.
#include "common/cuda/device.h"
#include "count/call.h"
#include "count/cuda/launch.h"

namespace jaxgpuops::count {
namespace {

ffi::Error bincount(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> counts,
                    ffi::Result<ffi::AnyBuffer> workspace, int64_t axis) {
  return handle("jaxgpuops.bincount", [&] {
    const Bincount problem = bincount_of(x, *counts, axis);
    const int64_t bytes = require_workspace(*workspace, x, axis);
    const Device device = current_device();
    const BincountPlan plan = plan_bincount(problem, device.gpu());
    const char* const name = kCountingNames[static_cast<int>(plan.algorithm)];
    require_enough(bytes, plan.workspace_bytes, name);
    require_launched(
        launch_bincount(stream, plan, problem, x.untyped_data(), static_cast<int32_t*>(counts->untyped_data()),
                        static_cast<char*>(workspace->untyped_data()), bytes),
        name, problem.rows, x, device);
  });
}

ffi::Error histogram(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer edges, ffi::Result<ffi::AnyBuffer> counts,
                     ffi::Result<ffi::AnyBuffer> workspace, int64_t axis) {
  return handle("jaxgpuops.histogram", [&] {
    const Histogram problem = histogram_of(x, edges, *counts, axis);
    require_workspace(*workspace, x, axis);  // checked only: this kernel uses none
    const Device device = current_device();
    const BincountPlan plan = plan_histogram(problem, device.gpu());
    if (plan.algorithm == Counting::kNone)
      throw invalid("bins of ", problem.bins, " are to be computed before the call");
    require_launched(launch_histogram(stream, plan, problem, x.untyped_data(), edges.untyped_data(),
                                      static_cast<int32_t*>(counts->untyped_data())),
                     kCountingNames[static_cast<int>(plan.algorithm)], problem.rows, x, device);
  });
}

XLA_FFI_DEFINE_HANDLER(kBincount, bincount, bincount_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kHistogram, histogram, histogram_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Target> cuda_targets() { return {{"jaxgpuops.bincount", kBincount}, {"jaxgpuops.histogram", kHistogram}}; }

}  // namespace jaxgpuops::count
