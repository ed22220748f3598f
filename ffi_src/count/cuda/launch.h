// The functions by which the handlers launch this family's CUDA kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "count/plan.h"

namespace jaxgpuops::count {

cudaError_t launch_bincount(cudaStream_t stream, const BincountPlan& plan, const Bincount& problem, const void* x,
                            int32_t* counts);

cudaError_t launch_search(cudaStream_t stream, const Search& problem, const void* queries, const void* sorted,
                          int32_t* places);

struct SegmentsBuffers {
  const void* data;
  const int32_t* ids;
  void* out;
  char* workspace;
  int64_t workspace_bytes;  // for each outer index
};

cudaError_t launch_segments(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                            const SegmentsBuffers& buffers);

cudaError_t launch_segment_tables(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                  const SegmentsBuffers& buffers);

// Sorts the ids, which launch_segments does first if they are not sorted: writes the keys and positions of each row of
// ids, in the stable order of the ids, to the row's workspace.
cudaError_t launch_order(cudaStream_t stream, const OrderPlan& plan, const Segments& problem,
                         const SegmentsBuffers& buffers);

}  // namespace jaxgpuops::count
