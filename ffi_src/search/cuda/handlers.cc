// CUDA handlers of the search family: each checks its buffers, plans the call and launches the kernels.
#include "common/cuda/device.h"
#include "search/call.h"
#include "search/cuda/launch.h"

namespace jaxgpuops::search {
namespace {

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

ffi::Error unique(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::RemainingRets results,
                  int64_t axis, bool index, bool inverse) {
  return handle("jaxgpuops.unique", [&] {
    const UniqueCall call = unique_call(x, rest, results, axis, index, inverse);
    const ffi::AnyBuffer workspace = require_buffer("workspace", results, 2 + index + inverse);
    const int64_t bytes = require_workspace(workspace, x, axis);
    const Device device = current_device();
    const UniquePlan plan = plan_unique(call.problem, device.gpu());
    if (plan.algorithm == Finding::kNone)
      throw invalid("the different elements of rows of ", call.problem.rows.length, " are found by other calls here");
    const char* const name = kFindingNames[static_cast<int>(plan.algorithm)];
    require_enough(bytes, plan.workspace_bytes, name);
    require_launched(launch_unique(stream, plan, call.problem, call.buffers, workspace.untyped_data()), name,
                     call.problem.rows, x, device);
  });
}

XLA_FFI_DEFINE_HANDLER(kSearch, searchsorted, search_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kChoose, choose, choose_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kPick, pick, pick_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kUnique, unique, unique_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Target> cuda_targets() {
  return {{"jaxgpuops.searchsorted", kSearch},
          {"jaxgpuops.choose", kChoose},
          {"jaxgpuops.pick", kPick},
          {"jaxgpuops.unique", kUnique}};
}

}  // namespace jaxgpuops::search
