// Arguments that all kernels of segments take. Each kernel adds its own geometry to them.
#pragma once

#include "segments/cuda/launch.h"
#include "segments/cuda/monoid.cuh"

namespace jaxgpuops::segments {

struct SegmentArgs {
  const void* data;
  const int32_t* ids;
  IndexMap ids_at, data_at;
  void* out;
  char* workspace;
  int64_t workspace_bytes, outer, length, inner, segments;
  Keys keys;

  SegmentArgs(const Segments& problem, const SegmentsBuffers& buffers)
      : data(buffers.data),
        ids(buffers.ids),
        ids_at(problem.ids),
        data_at(problem.data),
        out(buffers.out),
        workspace(buffers.workspace),
        workspace_bytes(buffers.workspace_bytes),
        outer(problem.rows.outer),
        length(problem.rows.length),
        inner(problem.rows.inner),
        segments(problem.segments),
        keys(keys_of(problem)) {}

  __device__ bool is_segment(int32_t id) const { return static_cast<uint32_t>(id) < static_cast<uint32_t>(segments); }
};

}  // namespace jaxgpuops::segments
