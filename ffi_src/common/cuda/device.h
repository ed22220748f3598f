// The device on which a CUDA handler runs, and the text of its failures. Only .cc files include this; no kernel needs
// it.
#pragma once

#include <array>
#include <atomic>
#include <cstdlib>
#include <utility>

#include <cuda_runtime_api.h>

#include "common/gpu.h"
#include "ffi.h"

namespace jaxgpuops {

struct Device {
  int ordinal = 0;
  int compute_capability = 0;  // 10 * major + minor

  Gpu gpu() const { return gpu_of(compute_capability); }
};

// XLA makes the device of the stream current before it calls a handler. The compute capability is cached for each
// device, since a process may use several kinds. The environment variable JAXGPUOPS_COMPUTE_CAPABILITY=80 makes plans
// choose what they would for compute capability 8.0, so that kernels for older GPUs can be tested on a newer one.
inline Device current_device() {
  static std::array<std::atomic<int>, 64> cache{};
  const auto require = [](cudaError_t status) {
    if (status != cudaSuccess) throw failure(ffi::ErrorCode::kInternal, cudaGetErrorString(status));
  };
  Device device;
  require(cudaGetDevice(&device.ordinal));
  if (const char* pretended = std::getenv("JAXGPUOPS_COMPUTE_CAPABILITY")) {
    device.compute_capability = std::atoi(pretended);
    return device;
  }
  const bool cached = device.ordinal < static_cast<int>(cache.size());
  if (cached) device.compute_capability = cache[device.ordinal].load(std::memory_order_relaxed);
  if (device.compute_capability == 0) {
    int major = 0, minor = 0;
    require(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.ordinal));
    require(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.ordinal));
    device.compute_capability = 10 * major + minor;
    if (cached) cache[device.ordinal].store(device.compute_capability, std::memory_order_relaxed);
  }
  return device;
}

// The CUDA counterpart of OnCpu. The last result of a CUDA custom call is its workspace.
struct OnCuda {
  static auto start() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

  template <class Binding>
  static auto scratch(Binding&& binding) {
    return std::move(binding).template Ret<ffi::AnyBuffer>();
  }
};

// Throws if a plan needs a larger workspace than the call has.
inline void require_enough(int64_t workspace_bytes, int64_t needed, const char* kernel) {
  if (workspace_bytes < needed)
    throw invalid("workspace has ", workspace_bytes, " bytes, kernel ", kernel, " needs ", needed);
}

// Throws if a launch failed. The text says which kernel was launched, for which problem and on which device.
inline void require_launched(cudaError_t status, const char* kernel, const Rows& rows, ffi::AnyBuffer x,
                             const Device& device) {
  if (status == cudaSuccess) return;
  throw failure(ffi::ErrorCode::kInternal, cudaGetErrorString(status), " (kernel ", kernel, ", outer ", rows.outer,
                ", length ", rows.length, ", inner ", rows.inner, ", ", printable(x.element_type()), ", device ",
                device.ordinal, ", compute capability ", device.compute_capability, ")");
}

}  // namespace jaxgpuops
