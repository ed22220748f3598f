// CUDA handlers of the count family: each checks its buffers, plans the call and launches the kernels.
#include "common/cuda/device.h"
#include "count/call.h"
#include "count/cuda/launch.h"

namespace jaxgpuops::count {
namespace {

ffi::Error bincount(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> counts,
                    ffi::Result<ffi::AnyBuffer> workspace, int64_t axis) {
  return handle("jaxgpuops.bincount", [&] {
    const Bincount problem = bincount_of(x, *counts, axis);
    const int64_t bytes = require_workspace(*workspace, x, axis);
    const Device device = current_device();
    const BincountPlan plan = plan_bincount(problem, device.gpu());
    const char* const name = kCountingNames[static_cast<int>(plan.algorithm)];
    require_enough(bytes, plan.workspace_bytes, name);
    require_launched(
        launch_bincount(stream, plan, problem, x.untyped_data(), static_cast<int32_t*>(counts->untyped_data()),
                        static_cast<char*>(workspace->untyped_data()), bytes),
        name, problem.rows, x, device);
  });
}

ffi::Error histogram(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer edges, ffi::Result<ffi::AnyBuffer> counts,
                     ffi::Result<ffi::AnyBuffer> workspace, int64_t axis) {
  return handle("jaxgpuops.histogram", [&] {
    const Histogram problem = histogram_of(x, edges, *counts, axis);
    require_workspace(*workspace, x, axis);  // checked only: this kernel uses none
    const Device device = current_device();
    const BincountPlan plan = plan_histogram(problem, device.gpu());
    if (plan.algorithm == Counting::kNone)
      throw invalid("bins of ", problem.bins, " are to be computed before the call");
    require_launched(launch_histogram(stream, plan, problem, x.untyped_data(), edges.untyped_data(),
                                      static_cast<int32_t*>(counts->untyped_data())),
                     kCountingNames[static_cast<int>(plan.algorithm)], problem.rows, x, device);
  });
}

ffi::Error searchsorted(cudaStream_t stream, ffi::AnyBuffer queries, ffi::AnyBuffer sorted,
                        ffi::Result<ffi::AnyBuffer> places, int64_t axis, bool right) {
  return handle("jaxgpuops.searchsorted", [&] {
    const Search problem = search_of(queries, sorted, *places, axis, right);
    const Device device = current_device();
    const SearchPlan plan = plan_search(problem, device.gpu());
    require_launched(launch_search(stream, plan, problem, queries.untyped_data(), sorted.untyped_data(),
                                   static_cast<int32_t*>(places->untyped_data())),
                     kSearchingNames[static_cast<int>(plan.algorithm)], problem.rows, queries, device);
  });
}

void run(cudaStream_t stream, const ChooseCall& call, ffi::AnyBuffer x, ffi::AnyBuffer workspace, int64_t axis) {
  const int64_t bytes = require_workspace(workspace, x, axis);
  const Device device = current_device();
  const ChoosePlan plan = plan_choose(call.problem, device.gpu());
  require_enough(bytes, plan.workspace_bytes, kChoosingNames[static_cast<int>(plan.algorithm)]);
  require_launched(launch_choose(stream, plan, call.problem, call.buffers, workspace.untyped_data()),
                   kChoosingNames[static_cast<int>(plan.algorithm)], call.problem.rows, x, device);
}

ffi::Error choose(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer fill, ffi::Result<ffi::AnyBuffer> places,
                  ffi::Result<ffi::AnyBuffer> workspace, int64_t axis) {
  return handle("jaxgpuops.choose", [&] { run(stream, choose_call(x, fill, *places, axis), x, *workspace, axis); });
}

ffi::Error pick(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs operands, ffi::RemainingRets results,
                int64_t axis, bool starts) {
  return handle("jaxgpuops.pick", [&] {
    const ChooseCall call = pick_call(x, operands, results, axis, starts);
    run(stream, call, x, require_buffer("workspace", results, call.problem.arrays + starts), axis);
  });
}

void run(cudaStream_t stream, const Select& problem, ffi::AnyBuffer x, ffi::AnyBuffer ranks,
         const SelectResults& results, ffi::AnyBuffer workspace, int64_t axis) {
  const int64_t bytes = require_workspace(workspace, x, axis);
  const Device device = current_device();
  const SelectPlan plan = plan_select(problem, device.gpu());
  if (plan.algorithm == Selecting::kNone) throw invalid("rows of ", problem.rows.length, " are to be sorted here");
  require_enough(bytes, plan.workspace_bytes, kSelectingNames[static_cast<int>(plan.algorithm)]);
  require_launched(launch_select(stream, plan, problem, x.untyped_data(),
                                 static_cast<const int32_t*>(ranks.untyped_data()), results, workspace.untyped_data()),
                   kSelectingNames[static_cast<int>(plan.algorithm)], problem.rows, x, device);
}

ffi::Error select(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer ranks, ffi::Result<ffi::AnyBuffer> values,
                  ffi::Result<ffi::AnyBuffer> indices, ffi::Result<ffi::AnyBuffer> workspace, int64_t axis) {
  return handle("jaxgpuops.select", [&] {
    const SelectResults results = {values->untyped_data(), static_cast<int32_t*>(indices->untyped_data())};
    run(stream, select_of(x, ranks, *values, *indices, axis), x, ranks, results, *workspace, axis);
  });
}

ffi::Error quantile(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer ranks, ffi::AnyBuffer shares,
                    ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace, int64_t axis,
                    bool midpoint) {
  return handle("jaxgpuops.quantile", [&] {
    const SelectResults results = {out->untyped_data(), nullptr, shares.untyped_data()};
    run(stream, quantile_of(x, ranks, shares, *out, axis, midpoint), x, ranks, results, *workspace, axis);
  });
}

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

XLA_FFI_DEFINE_HANDLER(kBincount, bincount, bincount_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kHistogram, histogram, histogram_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kSearch, searchsorted, search_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kChoose, choose, choose_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kPick, pick, pick_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kSelect, select, select_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kQuantile, quantile, quantile_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kSum, segments<Op::kSum>, segments_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMax, segments<Op::kMax>, segments_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMin, segments<Op::kMin>, segments_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kSoftmax, segment_softmax<false>, softmax_binding<OnCuda>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kLogSumExp, segment_softmax<true>, softmax_binding<OnCuda>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Target> cuda_targets() {
  return {{"jaxgpuops.bincount", kBincount},
          {"jaxgpuops.histogram", kHistogram},
          {"jaxgpuops.searchsorted", kSearch},
          {"jaxgpuops.choose", kChoose},
          {"jaxgpuops.segment_sum", kSum},
          {"jaxgpuops.segment_max", kMax},
          {"jaxgpuops.segment_min", kMin},
          {"jaxgpuops.select", kSelect},
          {"jaxgpuops.quantile", kQuantile},
          {"jaxgpuops.segment_softmax", kSoftmax},
          {"jaxgpuops.segment_logsumexp", kLogSumExp},
          {"jaxgpuops.pick", kPick}};
}

}  // namespace jaxgpuops::count
