// Entry points of this family's CUDA kernels, one per file; launch.cu chooses among them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sort/plan.h"
#include "sort/cuda/shape.h"
#include "sort/sort.h"

namespace jaxgpuops::sort {

struct Buffers {
  const void* x;
  void* values;      // null where only indices are wanted
  int32_t* indices;  // null where only values are
  void* workspace;
};

// to[o, c, r] = from[o, r, c], of elements of 8, 16, 32 or 64 bits.
cudaError_t launch_turn(cudaStream_t, const void* from, void* to, int64_t outer, int64_t rows, int64_t columns,
                        int bits);

// Of rows that lie in one piece: `inner` is 1.
cudaError_t launch_block(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_sweep(cudaStream_t, const Problem&, const Buffers&);

}  // namespace jaxgpuops::sort
