// CUDA handlers of the sort: each checks its buffers, plans the call and launches the kernels.
#include "common/cuda/device.h"
#include "sort/call.h"
#include "sort/cuda/keys.h"
#include "sort/cuda/launch.h"
#include "sort/plan.h"

namespace jaxgpuops::sort {
namespace {

void run(cudaStream_t stream, const Call& call, ffi::AnyBuffer x, ffi::RemainingRets results, int64_t axis) {
  const Problem& problem = call.problem;
  const ffi::AnyBuffer workspace = require_buffer("workspace", results, problem.values + problem.indices);
  const int64_t workspace_bytes = require_workspace(workspace, x, axis);
  const Device device = current_device();
  if (const KeysPlan keys = plan_keys(problem, device.gpu(), workspace_bytes); keys.taken) {
    KeysProblem one;
    one.rows = problem.rows;
    one.high = problem.order;
    one.one = true;
    const cudaError_t status =
        launch_keys(stream, keys, one, {call.x, nullptr, call.indices, workspace.untyped_data()});
    return require_launched(status, "keys", problem.rows, x, device);
  }
  const Plan plan = plan_sort(problem, device.gpu(), workspace_bytes);
  if (plan.algorithm == Algorithm::kNone)
    throw invalid("rows of ", problem.rows.length, " are to be sorted by other calls here");
  require_enough(workspace_bytes, plan.workspace_bytes, name(plan.algorithm));
  const cudaError_t status = launch_sort(stream, plan, problem, call.x, call.values, call.indices,
                                         workspace.untyped_data(), call.offsets, call.carried);
  require_launched(status, name(plan.algorithm), problem.rows, x, device);
}

ffi::Error sort(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs carried, ffi::RemainingRets results,
                int64_t axis, bool descending, bool values, bool indices, int64_t kth) {
  return handle("jaxgpuops.sort", [&] {
    run(stream, carrying_call(x, carried, results, axis, descending, values, indices, kth), x, results, axis);
  });
}

ffi::Error sort_segments(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer offsets, ffi::RemainingRets results,
                         int64_t axis, bool descending, bool values, bool indices) {
  return handle("jaxgpuops.sort_segments", [&] {
    run(stream, segments_call(x, offsets, results, axis, descending, values, indices), x, results, axis);
  });
}

ffi::Error lexsort(cudaStream_t stream, ffi::AnyBuffer high, ffi::AnyBuffer low, ffi::Result<ffi::AnyBuffer> indices,
                   ffi::Result<ffi::AnyBuffer> workspace, int64_t axis, bool descending) {
  return handle("jaxgpuops.lexsort", [&] {
    const KeysCall call = keys_call(high, low, *indices, axis, descending);
    const KeysProblem& problem = call.problem;
    const int64_t workspace_bytes = require_workspace(*workspace, high, axis);
    if (problem.rows.elements() == 0) return;
    const Device device = current_device();
    const KeysPlan plan = plan_keys(problem, device.gpu(), workspace_bytes);
    if (!plan.taken)
      throw invalid("rows of ", problem.rows.length, " are to be sorted by one key after the other here");
    require_enough(workspace_bytes, plan.workspace_bytes, "keys");
    const cudaError_t status =
        launch_keys(stream, plan, problem, {call.high, call.low, call.indices, workspace->untyped_data()});
    require_launched(status, "keys", problem.rows, high, device);
  });
}

XLA_FFI_DEFINE_HANDLER(kLexsort, lexsort, keys_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kSort, sort,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .RemainingArgs()        // numbers that are carried in place of indices
                           .RemainingRets()        // values, indices, workspace
                           .Attr<int64_t>("axis")
                           .Attr<bool>("descending")
                           .Attr<bool>("values")
                           .Attr<bool>("indices")
                           .Attr<int64_t>("kth"),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kSortSegments, sort_segments,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // offsets
                           .RemainingRets()        // values, indices, workspace
                           .Attr<int64_t>("axis")
                           .Attr<bool>("descending")
                           .Attr<bool>("values")
                           .Attr<bool>("indices"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Target> cuda_targets() {
  return {{"jaxgpuops.sort", kSort}, {"jaxgpuops.sort_segments", kSortSegments}, {"jaxgpuops.lexsort", kLexsort}};
}

}  // namespace jaxgpuops::sort
