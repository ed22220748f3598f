// Kernel launches that report their own status (never an earlier kernel's), and dispatch on a key's width.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxgpuops {

struct Launch {
  dim3 grid, block;
  size_t shared_bytes = 0;
  int cluster = 1;        // blocks per cluster; above 1 needs compute capability 9.0, above 8 allow_cluster() before
  bool packed = false;    // blocks of a cluster may share a multiprocessor, and need not wait for one each
  bool overlap = false;   // starts when the kernel before says so (griddepcontrol), not at its end; needs 9.0, too
  bool together = false;  // all blocks run at the same time, or the launch fails: they may have a barrier of the grid
};

// Returns how many attributes a launch as a cluster has: two at most.
inline int set_cluster(cudaLaunchAttribute* attributes, const Launch& shape) {
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = shape.cluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  if (!shape.packed) return 1;
  attributes[1].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
  attributes[1].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicyLoadBalancing;
  return 2;
}

template <class... Parameters, class... Arguments>
cudaError_t launch(cudaStream_t stream, const Launch& shape, void (*kernel)(Parameters...), Arguments... arguments) {
  const void* symbol = reinterpret_cast<const void*>(kernel);
  if (shape.shared_bytes > 0) {  // beyond 48 KB, which the kernel's own variables count to, too
    const cudaError_t status =
        cudaFuncSetAttribute(symbol, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes));
    if (status != cudaSuccess) return status;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[4];
  config.attrs = attributes;
  if (shape.cluster > 1) config.numAttrs = set_cluster(attributes, shape);
  if (shape.overlap) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.together) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

// Calls f with a zero of the unsigned type that is `bits` wide.
template <class F>
cudaError_t dispatch_key(int bits, F f) {
  switch (bits) {
    case 8: return f(uint8_t{});
    case 16: return f(uint16_t{});
    case 32: return f(uint32_t{});
    case 64: return f(uint64_t{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxgpuops
