// A kernel that several families launch before those that add to memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxgpuops {

// Sets words at even places to one number, those at odd places to another. The next kernel may overlap.
cudaError_t launch_set_words(cudaStream_t stream, uint32_t* words, int64_t count, uint32_t even, uint32_t odd);

}  // namespace jaxgpuops
