// The function by which the handler launches the kernels that sort by two keys.
#pragma once

#include <cuda_runtime_api.h>

#include "sort/keys.h"

namespace jaxgpuops::sort {

struct KeysBuffers {
  const void* high;
  const uint32_t* low;  // null if there is one key, of 64 bits
  int32_t* indices;
  void* workspace;
};

// Rows are contiguous: `inner` is 1.
cudaError_t launch_keys(cudaStream_t stream, const KeysPlan& plan, const KeysProblem& problem,
                        const KeysBuffers& buffers);

}  // namespace jaxgpuops::sort
