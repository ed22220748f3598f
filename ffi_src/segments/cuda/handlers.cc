// CUDA handlers of the segments family: each checks its buffers, plans the call and launches the kernels.
#include "common/cuda/device.h"
#include "segments/call.h"
#include "segments/cuda/launch.h"

namespace jaxgpuops::segments {
namespace {

template <Op op>
ffi::Error segments(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer ids, ffi::Result<ffi::AnyBuffer> out,
                    ffi::Result<ffi::AnyBuffer> workspace, int64_t axis, bool sorted) {
  return handle(target_name(op).c_str(), [&] {
    const Segments problem = segments_of(op, data, ids, *out, axis, sorted);
    const Device device = current_device();
    const SegmentsPlan plan = plan_segments(problem, device.gpu());
    if (plan.algorithm == Segmenting::kNone) throw invalid("ids of type uint8 are to be int32 here");
    const int64_t bytes = require_workspace(*workspace, *out, axis);
    require_enough(bytes, plan.workspace_bytes, kSegmentingNames[static_cast<int>(plan.algorithm)]);
    const SegmentsBuffers buffers = {data.untyped_data(), static_cast<const int32_t*>(ids.untyped_data()),
                                     out->untyped_data(), static_cast<char*>(workspace->untyped_data()), bytes};
    require_launched(launch_segments(stream, plan, problem, buffers),
                     kSegmentingNames[static_cast<int>(plan.algorithm)], problem.rows, data, device);
  });
}

template <bool logs>
ffi::Error segment_softmax(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer ids,
                           ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace, int64_t axis,
                           bool sorted, int64_t length) {
  return handle(logs ? "jaxgpuops.segment_logsumexp" : "jaxgpuops.segment_softmax", [&] {
    const Segments problem = softmax_of(data, ids, *out, axis, length, sorted, logs);
    const Device device = current_device();
    const SegmentsPlan plan = plan_segment_softmax(problem, device.gpu());
    if (plan.algorithm == Segmenting::kNone)
      throw invalid(problem.rows.length, " rows are to be reduced by other calls here");
    const int64_t bytes = require_workspace(*workspace, *out, axis);
    require_enough(bytes, plan.workspace_bytes, kSegmentingNames[static_cast<int>(plan.algorithm)]);
    const SegmentsBuffers buffers = {data.untyped_data(), static_cast<const int32_t*>(ids.untyped_data()),
                                     out->untyped_data(), static_cast<char*>(workspace->untyped_data()), bytes};
    const auto launch = plan.algorithm == Segmenting::kCells ? launch_cells_softmax : launch_tiles_softmax;
    require_launched(launch(stream, plan, problem, buffers, logs), kSegmentingNames[static_cast<int>(plan.algorithm)],
                     problem.rows, data, device);
  });
}

XLA_FFI_DEFINE_HANDLER(kSum, segments<Op::kSum>, segments_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMax, segments<Op::kMax>, segments_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMin, segments<Op::kMin>, segments_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kSoftmax, segment_softmax<false>, softmax_binding<OnCuda>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kLogSumExp, segment_softmax<true>, softmax_binding<OnCuda>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Target> cuda_targets() {
  return {{"jaxgpuops.segment_sum", kSum},
          {"jaxgpuops.segment_max", kMax},
          {"jaxgpuops.segment_min", kMin},
          {"jaxgpuops.segment_softmax", kSoftmax},
          {"jaxgpuops.segment_logsumexp", kLogSumExp}};
}

}  // namespace jaxgpuops::segments
