// Entry points of this family's CUDA kernels, one per file; launch.cu chooses among them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "topk/plan.h"
#include "topk/topk.h"

namespace jaxgpuops::topk {

struct Buffers {
  const void* x;
  void* values;  // null if only indices are wanted
  int32_t* indices;
  void* workspace;
};

// Arguments that all kernels of the family take. The kernels' own structs add to them.
struct Call {
  const void* x;
  void* values;
  int32_t* indices;
  KeyOrder order;
  int64_t inner;
  uint32_t length, k;
  bool sorted;
  unsigned char* workspace;
  int64_t row_bytes = 0;  // workspace bytes of a row; set by kernels whose blocks share rows

  __device__ unsigned char* workspace_of(int64_t row) const { return workspace + row * row_bytes; }
};

inline Call call_of(const Problem& problem, const Buffers& buffers) {
  return {buffers.x,
          buffers.values,
          buffers.indices,
          problem.order,
          problem.rows.inner,
          static_cast<uint32_t>(problem.rows.length),
          static_cast<uint32_t>(problem.k),
          problem.sorted,
          static_cast<unsigned char*>(buffers.workspace)};
}

cudaError_t launch_argmax_kernels(cudaStream_t, const Plan&, const ArgProblem&, const Buffers&);
cudaError_t launch_rows(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_few(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_sort(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_compare(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_compare_team(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_held(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_columns(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_columns_stream(cudaStream_t, const Problem&, const Buffers&);
cudaError_t launch_stream(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_buckets(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_digits(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_reorder(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_radix(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_turn_back(cudaStream_t, const Problem&, const void* values, const int32_t* indices, const Buffers&);
cudaError_t launch_sieve(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_sieve_whole(cudaStream_t, const Problem&, const Buffers&);
cudaError_t launch_wave(cudaStream_t, const Plan&, const Problem&, const Buffers&);

}  // namespace jaxgpuops::topk
