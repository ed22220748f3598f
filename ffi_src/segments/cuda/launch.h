// The functions by which the handlers launch this family's CUDA kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "segments/plan.h"

namespace jaxgpuops::segments {

struct SegmentsBuffers {
  const void* data;
  const int32_t* ids;
  void* out;
  char* workspace;
  int64_t workspace_bytes;  // workspace of one outer index
};

cudaError_t launch_segments(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                            const SegmentsBuffers& buffers);

cudaError_t launch_segment_lanes(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                 const SegmentsBuffers& buffers);

cudaError_t launch_segment_tables(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                  const SegmentsBuffers& buffers);

// The form of launch_segment_tables for several columns of a row at a time.
cudaError_t launch_segment_wide_tables(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                       const SegmentsBuffers& buffers);

cudaError_t launch_segment_match(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                 const SegmentsBuffers& buffers);

cudaError_t launch_segment_few(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                               const SegmentsBuffers& buffers);

cudaError_t launch_segment_picks(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                 const SegmentsBuffers& buffers);

cudaError_t launch_segment_ranges(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                  const SegmentsBuffers& buffers);

// Orders rows by id, if the plan has ranges for that: writes the sorted ids and the positions of their rows. An id out
// of range is written as the number of segments, and comes last.
cudaError_t launch_segment_order(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                 const int32_t* ids, int32_t* sorted, int32_t* positions);

// Softmax of segments, or the logarithms of their sums of exponentials: of rows in no order, or in the order of the
// ids, as the plan says. `problem` describes the largest element of each segment.
cudaError_t launch_cells_softmax(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                 const SegmentsBuffers& buffers, bool logs);

cudaError_t launch_tiles_softmax(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                 const SegmentsBuffers& buffers, bool logs);

cudaError_t launch_segment_atomics(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                   const SegmentsBuffers& buffers);

// The form of launch_segment_atomics for sums of float64.
cudaError_t launch_segment_wide_sums(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                     const SegmentsBuffers& buffers);

cudaError_t launch_segment_buckets(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                   const SegmentsBuffers& buffers);

cudaError_t launch_segment_scatter(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                   const SegmentsBuffers& buffers);

// If a row has several slices: folds the tables that the kernels of lanes and tables left for them.
cudaError_t launch_segment_slices(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                  const SegmentsBuffers& buffers);

}  // namespace jaxgpuops::segments
