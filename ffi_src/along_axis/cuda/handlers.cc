// CUDA handlers of take and put: each checks its buffers and launches the kernel.
#include "along_axis/call.h"
#include "along_axis/cuda/launch.h"
#include "common/cuda/device.h"

namespace jaxgpuops::along_axis {
namespace {

ffi::Error take(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer indices, ffi::Result<ffi::AnyBuffer> out,
                int64_t axis) {
  return handle("jaxgpuops.take_along_axis", [&] {
    const Problem problem = problem_of("x", x, "out", *out, indices, axis);
    const cudaError_t status = launch_take(stream, problem, x.untyped_data(),
                                           static_cast<const int32_t*>(indices.untyped_data()), out->untyped_data());
    require_launched(status, "take", problem.rows, x, current_device());
  });
}

ffi::Error put(cudaStream_t stream, ffi::AnyBuffer updates, ffi::AnyBuffer indices, ffi::Result<ffi::AnyBuffer> out,
               int64_t axis) {
  return handle("jaxgpuops.put_along_axis", [&] {
    const Problem problem = problem_of("out", *out, "updates", updates, indices, axis);
    const cudaError_t status = launch_put(stream, problem, updates.untyped_data(),
                                          static_cast<const int32_t*>(indices.untyped_data()), out->untyped_data());
    require_launched(status, "put", problem.rows, updates, current_device());
  });
}

XLA_FFI_DEFINE_HANDLER(kTake, take, binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kPut, put, binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Target> cuda_targets() {
  return {{"jaxgpuops.take_along_axis", kTake}, {"jaxgpuops.put_along_axis", kPut}};
}

}  // namespace jaxgpuops::along_axis
