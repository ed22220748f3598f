// Kernel launches that return their own status, not that of an earlier kernel, and dispatch on the width of a key.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxgpuops {

struct Launch {
  dim3 grid, block;
  size_t shared_bytes = 0;
  int cluster = 1;  // blocks per cluster; more than 1 needs compute capability 9.0, more than 8 also allow_cluster()
  // Blocks of a cluster may share a multiprocessor, so that the cluster need not wait for one for each block.
  bool packed = false;
  bool overlap = false;  // starts when the previous kernel allows it (griddepcontrol), not at its end; needs 9.0
  // Cooperative: all blocks run at the same time, so that they may wait for each other, or the launch fails.
  bool together = false;
};

// Sets the attributes that launch a kernel in clusters, and returns their number, which is at most two.
inline int set_cluster(cudaLaunchAttribute* attributes, const Launch& shape) {
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = shape.cluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  if (!shape.packed) return 1;
  attributes[1].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
  attributes[1].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicyLoadBalancing;
  return 2;
}

// Launches a kernel whose arguments are at `arguments`, one after the other.
inline cudaError_t launch_pointers(cudaStream_t stream, const Launch& shape, const void* kernel, void** arguments) {
  if (shape.shared_bytes > 0) {  // needed if static and dynamic shared memory together exceed 48 KB
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes));
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
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

template <class... Values>
cudaError_t launch_values(cudaStream_t stream, const Launch& shape, const void* kernel, const Values&... values) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&values))...};
  return launch_pointers(stream, shape, kernel, pointers);
}

template <class... Parameters, class... Arguments>
cudaError_t launch(cudaStream_t stream, const Launch& shape, void (*kernel)(Parameters...),
                   const Arguments&... arguments) {
  return launch_values(stream, shape, reinterpret_cast<const void*>(kernel), static_cast<Parameters>(arguments)...);
}

// Calls f with a zero of the unsigned type that has `bits` bits.
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
