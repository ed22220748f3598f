// Counts the blocks that a device runs at the same time, which is how many blocks a persistent kernel has.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common/cuda/launch.cuh"

namespace jaxgpuops {

// Counts the clusters (or blocks) of a kernel that a device runs at the same time. CUDA takes microseconds to answer,
// so the last answer for each device is kept together with the launch shape that it belongs to.
class Residents {
 public:
  constexpr Residents() = default;  // static objects are constant-initialised, so they need no guards
  cudaError_t count(const void* kernel, const Launch& shape, int* count) {
    int device = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess) return status;
    const uint64_t asked = shape.shared_bytes << 12 | shape.block.x / 32 << 6 | shape.cluster;
    std::atomic<uint64_t>& last = last_[std::min(device, kDevices)];
    const uint64_t known = last.load(std::memory_order_relaxed);
    *count = static_cast<int>(known & kMost);
    if (known >> kCountBits == asked) return cudaSuccess;
    status = ask(kernel, shape, device, count);
    if (status == cudaSuccess && device < kDevices) last.store(asked << kCountBits | *count, std::memory_order_relaxed);
    return status;
  }

 private:
  static constexpr int kDevices = 32, kCountBits = 24, kMost = (1 << kCountBits) - 1;

  static cudaError_t ask(const void* kernel, const Launch& shape, int device, int* count) {
    cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes));
    if (status != cudaSuccess) return status;
    if (shape.cluster == 1) {
      int processors = 0;
      status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      if (status == cudaSuccess)
        status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, kernel, shape.block.x, shape.shared_bytes);
      *count *= processors;
    } else {
      cudaLaunchConfig_t config = {};
      config.gridDim = dim3(shape.cluster);
      config.blockDim = shape.block;
      config.dynamicSmemBytes = shape.shared_bytes;
      cudaLaunchAttribute attributes[2];
      config.attrs = attributes;
      config.numAttrs = set_cluster(attributes, shape);
      status = cudaOccupancyMaxActiveClusters(count, kernel, &config);
    }
    *count = std::clamp(*count, 1, kMost);
    return status;
  }

  // The extra slot serves devices beyond kDevices. It stays 0, so that they always ask CUDA.
  std::atomic<uint64_t> last_[kDevices + 1] = {};
};

// Allows the kernel to be launched in clusters of more than 8 blocks.
inline cudaError_t allow_cluster(const void* kernel, int blocks) {
  return blocks > 8 ? cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) : cudaSuccess;
}

}  // namespace jaxgpuops
