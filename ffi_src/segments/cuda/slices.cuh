// Arguments of the kernels of lanes.cu and tables.cu. Both cut each row of ids into slices, and the second kernel of
// tables.cu folds the tables that the slices leave in the workspace.
#pragma once

#include "segments/cuda/args.cuh"

namespace jaxgpuops::segments {

struct Slices : SegmentArgs {
  int64_t slice, slices;  // ids of a slice, and how many slices a row has
  int segments;           // how many segments a table in shared memory holds

  Slices(const SegmentsPlan& plan, const Segments& problem, const SegmentsBuffers& buffers)
      : SegmentArgs(problem, buffers),
        slice(plan.rows),
        slices(plan.tiles),
        segments(static_cast<int>(problem.segments)) {}
};

}  // namespace jaxgpuops::segments
