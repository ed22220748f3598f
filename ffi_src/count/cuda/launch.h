// The functions by which the handlers launch this family's CUDA kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "count/plan.h"

namespace jaxgpuops::count {

cudaError_t launch_bincount(cudaStream_t stream, const BincountPlan& plan, const Bincount& problem, const void* x,
                            int32_t* counts, char* workspace, int64_t workspace_bytes);

// The form of launch_bincount for long rows in many bins, if the result was set to 0 before in case of several slices.
cudaError_t launch_bincount_parts(cudaStream_t stream, const BincountPlan& plan, const Bincount& problem, const void* x,
                                  int32_t* counts, char* workspace, int64_t workspace_bytes);

// Sets words at even places to one number, those at odd places to another. The next kernel may overlap.
cudaError_t launch_set(cudaStream_t stream, uint32_t* words, int64_t count, uint32_t even, uint32_t odd);

cudaError_t launch_histogram(cudaStream_t stream, const BincountPlan& plan, const Histogram& problem, const void* x,
                             const void* edges, int32_t* counts);

// The form of launch_bincount for many short rows.
cudaError_t launch_bincount_rows(cudaStream_t stream, const BincountPlan& plan, const Bincount& problem, const void* x,
                                 int32_t* counts);

cudaError_t launch_search(cudaStream_t stream, const SearchPlan& plan, const Search& problem, const void* queries,
                          const void* sorted, int32_t* places);

// The forms of launch_search for short rows, for many queries of a row, and for still more of 8 or 16 bits.
cudaError_t launch_search_rows(cudaStream_t stream, const SearchPlan& plan, const Search& problem, const void* queries,
                               const void* sorted, int32_t* places);

cudaError_t launch_search_tree(cudaStream_t stream, const SearchPlan& plan, const Search& problem, const void* queries,
                               const void* sorted, int32_t* places);

cudaError_t launch_search_table(cudaStream_t stream, const SearchPlan& plan, const Search& problem, const void* queries,
                                const void* sorted, int32_t* places);

cudaError_t launch_choose(cudaStream_t stream, const ChoosePlan& plan, const Choose& problem,
                          const ChooseBuffers& buffers, void* workspace);

struct SelectResults {
  void* values;
  int32_t* indices;              // not of quantiles
  const void* shares = nullptr;  // of quantiles
};

cudaError_t launch_select(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                          const int32_t* ranks, const SelectResults& results, void* workspace);

// The form of launch_select for rows that a team of warps holds in shared memory: along the last axis, or turned.
cudaError_t launch_select_teams(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                                const int32_t* ranks, const SelectResults& results);

// The form of launch_select for rows that the registers of a block hold: along the last axis, or turned.
cudaError_t launch_select_registers(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                                    const int32_t* ranks, const SelectResults& results);

// The form of launch_select for rows that a cluster of blocks holds: along the last axis, or turned.
cudaError_t launch_select_cluster(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                                  const int32_t* ranks, const SelectResults& results);

// The form of launch_select for rows that several blocks share: along the last axis, or turned.
cudaError_t launch_select_long(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                               const int32_t* ranks, const SelectResults& results, void* workspace);

// The form of launch_select for short rows. A thread has a row along any axis, or a warp has a row along the last axis.
cudaError_t launch_select_short(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                                const int32_t* ranks, const SelectResults& results);

// The form of launch_select_short for rows of 65 to kMostWarpSelect elements.
cudaError_t launch_select_bisect(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                                 const int32_t* ranks, const SelectResults& results);

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

cudaError_t launch_segment_scatter(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                   const SegmentsBuffers& buffers);

// If a row has several slices: folds the tables that the kernels of lanes and tables left for them.
cudaError_t launch_segment_slices(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                  const SegmentsBuffers& buffers);

}  // namespace jaxgpuops::count
