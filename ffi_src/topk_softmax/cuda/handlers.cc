// CUDA handler of the gate: checks its buffers, plans the call and launches the kernel.
#include "common/cuda/device.h"
#include "topk_softmax/call.h"
#include "topk_softmax/cuda/launch.h"

namespace jaxgpuops::topk_softmax {
namespace {

ffi::Error topk_softmax(cudaStream_t stream, ffi::AnyBuffer logits, ffi::RemainingArgs rest,
                        ffi::Result<ffi::AnyBuffer> weights, ffi::Result<ffi::AnyBuffer> indices,
                        ffi::RemainingRets more, int64_t axis, int64_t score, bool normalize, bool biased,
                        int64_t groups, int64_t topk_groups, double scale, bool log_sums) {
  return handle("jaxgpuops.topk_softmax", [&] {
    const Options options{axis, score, normalize, biased, groups, topk_groups, scale, log_sums};
    const Call call = call_of(logits, rest, *weights, *indices, more, options);
    const size_t results = log_sums ? 2 : 1;
    // Checked only: this kernel uses no workspace.
    require_workspace(require_buffer("workspace", more, results - 1), logits, axis);
    if (more.size() > results) throw invalid("there are too many results");
    const Plan plan = plan_topk_softmax(call.problem.rows, call.problem.k, call.problem.groups, biased,
                                        call.problem.sums_rows(biased, log_sums));
    require_launched(launch_topk_softmax(stream, plan, call.problem, call.buffers), "rows", call.problem.rows, logits,
                     current_device());
  });
}

XLA_FFI_DEFINE_HANDLER(kTopkSoftmax, topk_softmax, gate_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Target> cuda_targets() { return {{"jaxgpuops.topk_softmax", kTopkSoftmax}}; }

}  // namespace jaxgpuops::topk_softmax
