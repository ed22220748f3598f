// Launches the kernel of segments that the plan names; those that read rows in the order of their ids are compiled
// here.
#include "segments/cuda/tiles.cuh"

namespace jaxgpuops::segments {

cudaError_t launch_segments(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                            const SegmentsBuffers& buffers) {
  if (plan.algorithm == Segmenting::kEmpty) return cudaSuccess;
  if (plan.algorithm == Segmenting::kMatch) return launch_segment_match(stream, plan, problem, buffers);
  if (plan.algorithm == Segmenting::kFew) return launch_segment_few(stream, plan, problem, buffers);
  if (plan.algorithm == Segmenting::kPicks) return launch_segment_picks(stream, plan, problem, buffers);
  if (plan.algorithm == Segmenting::kRanges) return launch_segment_ranges(stream, plan, problem, buffers);
  if (plan.algorithm == Segmenting::kAtomics) return launch_segment_atomics(stream, plan, problem, buffers);
  if (plan.algorithm == Segmenting::kBuckets) return launch_segment_buckets(stream, plan, problem, buffers);
  if (plan.algorithm == Segmenting::kScatter) return launch_segment_scatter(stream, plan, problem, buffers);
  if (plan.algorithm == Segmenting::kLanes || plan.algorithm == Segmenting::kTables) {
    const auto run = plan.algorithm == Segmenting::kLanes ? launch_segment_lanes : launch_segment_tables;
    const cudaError_t status = run(stream, plan, problem, buffers);
    if (status != cudaSuccess || plan.tiles == 1) return status;
    return launch_segment_slices(stream, plan, problem, buffers);
  }
  cudaError_t status;
  const Args a(stream, plan, problem, buffers, status);
  if (status != cudaSuccess) return status;
  return dispatch_monoid(problem, [&](auto monoid) { return run<decltype(monoid)>(stream, a); });
}

}  // namespace jaxgpuops::segments
