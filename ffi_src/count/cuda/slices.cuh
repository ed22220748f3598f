// What the kernels of lanes.cu and tables.cu know of a call. Both cut each row of ids into slices, and the second
// kernel of tables.cu folds the tables that the slices leave in the workspace.
#pragma once

#include "count/cuda/launch.h"
#include "count/cuda/monoid.cuh"

namespace jaxgpuops::count {

struct Slices {
  const void* data;
  const int32_t* ids;
  IndexMap ids_at, data_at;
  void* out;
  char* workspace;
  int64_t workspace_bytes, length, inner;
  int64_t slice, slices;  // ids of a slice, and how many slices a row has
  int segments;
  Keys keys;
};

inline Slices slices_of(const SegmentsPlan& plan, const Segments& problem, const SegmentsBuffers& buffers) {
  Slices a = {};
  a.data = buffers.data;
  a.ids = buffers.ids;
  a.ids_at = problem.ids;
  a.data_at = problem.data;
  a.out = buffers.out;
  a.workspace = buffers.workspace;
  a.workspace_bytes = buffers.workspace_bytes;
  a.length = problem.rows.length;
  a.inner = problem.rows.inner;
  a.slice = plan.rows;
  a.slices = plan.tiles;
  a.segments = static_cast<int>(problem.segments);
  a.keys = keys_of(problem);
  return a;
}

}  // namespace jaxgpuops::count
