// CUDA handler: buffers -> plan -> launch.
#include "common/cuda/device.h"
#include "topk_softmax/call.h"
#include "topk_softmax/cuda/launch.h"

namespace jaxgpuops::topk_softmax {
namespace {

ffi::Error topk_softmax(cudaStream_t stream, ffi::AnyBuffer logits, ffi::RemainingArgs rest,
                        ffi::Result<ffi::AnyBuffer> weights, ffi::Result<ffi::AnyBuffer> indices,
                        ffi::Result<ffi::AnyBuffer> workspace, int64_t axis, int64_t score, bool normalize,
                        bool biased) {
  return handle("jaxgpuops.topk_softmax", [&] {
    const Call call = call_of(logits, rest, *weights, *indices, axis, score, normalize, biased);
    require_workspace(*workspace, logits, axis);  // which this kernel does without
    const Plan plan = plan_topk_softmax(call.problem.rows, call.problem.k);
    require_launched(launch_topk_softmax(stream, plan, call.problem, call.buffers), "rows", call.problem.rows, logits,
                     current_device());
  });
}

XLA_FFI_DEFINE_HANDLER(kTopkSoftmax, topk_softmax, gate_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Target> cuda_targets() { return {{"jaxgpuops.topk_softmax", kTopkSoftmax}}; }

}  // namespace jaxgpuops::topk_softmax
