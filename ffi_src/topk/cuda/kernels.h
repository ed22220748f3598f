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
  int64_t beside = 0;  // rows are columns that have been transposed, so many side by side; 0: they are not
};

// Arguments that all kernels of the family take. The kernels' own structs add to them.
struct Call {
  const void* x;
  void* values;
  int32_t* indices;
  KeyOrder order;
  int64_t inner;
  uint32_t length, k;
  uint32_t beside;  // columns side by side in the results: `inner`, or that of columns that have been transposed
  bool sorted;
  unsigned char* workspace;
  int64_t row_bytes = 0;  // workspace bytes of a row; set by kernels whose blocks share rows

  // The place of a result.
  __device__ int64_t place(int64_t row, uint32_t rank) const {
    if (beside == 1) return row * k + rank;
    const uint32_t outer = static_cast<uint32_t>(row) / beside;
    return (int64_t{outer} * k + rank) * beside + (static_cast<uint32_t>(row) - outer * beside);
  }
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
          static_cast<uint32_t>(buffers.beside ? buffers.beside : problem.rows.inner),
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
cudaError_t launch_sieve(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_sieve_whole(cudaStream_t, const Problem&, const Buffers&);
cudaError_t launch_wave(cudaStream_t, const Plan&, const Problem&, const Buffers&);

}  // namespace jaxgpuops::topk
