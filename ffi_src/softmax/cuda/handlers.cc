// CUDA handlers of the softmax family: each checks its buffers, plans the call and launches the kernel.
#include "common/cuda/device.h"
#include "softmax/call.h"
#include "softmax/cuda/launch.h"

namespace jaxgpuops::softmax {
namespace {

void run(cudaStream_t stream, const Call& call, ffi::AnyBuffer main, ffi::AnyBuffer workspace, int64_t axis) {
  const int64_t workspace_bytes = require_workspace(workspace, main, axis);
  const Device device = current_device();
  const RowPlan plan = plan_softmax(call.problem, device.gpu(), workspace_bytes);
  require_enough(workspace_bytes, plan.workspace_bytes, name(plan.algorithm));
  const cudaError_t status = launch_softmax(stream, plan, call.problem, call.buffers, workspace.untyped_data());
  require_launched(status, name(plan.algorithm), call.problem.rows, main, device);
}

template <Op op>
ffi::Error forward(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                   ffi::Result<ffi::AnyBuffer> workspace, int64_t axis, double factor, bool scaled, bool biased,
                   bool masked, int64_t query_axis) {
  return handle(target_name(op), [&] {
    const Call call = softmax_call(op, x, rest, *y, axis, factor, scaled, biased, masked, query_axis);
    run(stream, call, x, *workspace, axis);
  });
}

ffi::Error log_sum_exp(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::RemainingRets results,
                       int64_t axis, double factor, bool scaled, bool biased, bool masked, bool parts,
                       int64_t query_axis) {
  return handle(target_name(Op::kLogSumExp), [&] {
    const Call call = log_sum_exp_call(x, rest, results, axis, factor, scaled, biased, masked, parts, query_axis);
    run(stream, call, x, require_buffer("workspace", results, parts ? 2 : 1), axis);
  });
}

ffi::Error softmax_jvp(cudaStream_t stream, ffi::AnyBuffer t, ffi::AnyBuffer y, ffi::RemainingArgs rest,
                       ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace, int64_t axis,
                       double factor, bool scaled, bool of_logits) {
  return handle(target_name(Op::kSoftmaxJvp), [&] {
    const Call call = jvp_call(Op::kSoftmaxJvp, t, y, rest, *out, axis, factor, scaled, false, -1, false, of_logits);
    run(stream, call, t, *workspace, axis);
  });
}

ffi::Error log_softmax_jvp(cudaStream_t stream, ffi::AnyBuffer t, ffi::AnyBuffer y, ffi::RemainingArgs rest,
                           ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace, int64_t axis,
                           double factor, bool scaled, bool masked, int64_t query_axis, bool transpose,
                           bool of_logits) {
  return handle(target_name(Op::kLogSoftmaxJvp), [&] {
    const Call call =
        jvp_call(Op::kLogSoftmaxJvp, t, y, rest, *out, axis, factor, scaled, masked, query_axis, transpose, of_logits);
    run(stream, call, t, *workspace, axis);
  });
}

ffi::Error cross_entropy(cudaStream_t stream, ffi::AnyBuffer logits, ffi::AnyBuffer labels, ffi::RemainingArgs rest,
                         ffi::Result<ffi::AnyBuffer> loss, ffi::Result<ffi::AnyBuffer> maximum,
                         ffi::Result<ffi::AnyBuffer> log_sum, ffi::Result<ffi::AnyBuffer> workspace, int64_t axis,
                         double label_smoothing, double z_loss, bool masked) {
  return handle(target_name(Op::kCrossEntropy), [&] {
    const Call call =
        cross_entropy_call(logits, labels, rest, *loss, *maximum, *log_sum, axis, label_smoothing, z_loss, masked);
    run(stream, call, logits, *workspace, axis);
  });
}

ffi::Error cross_entropy_grad(cudaStream_t stream, ffi::AnyBuffer logits, ffi::AnyBuffer labels,
                              ffi::AnyBuffer cotangent, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> gradient,
                              ffi::Result<ffi::AnyBuffer> loss, ffi::Result<ffi::AnyBuffer> workspace, int64_t axis,
                              double label_smoothing, double z_loss, bool masked) {
  return handle(target_name(Op::kCrossEntropyGrad), [&] {
    const Call call = cross_entropy_grad_call(logits, labels, cotangent, rest, *gradient, *loss, axis, label_smoothing,
                                              z_loss, masked);
    run(stream, call, logits, *workspace, axis);
  });
}

ffi::Error log_sum_exp_grad(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer cotangent,
                            ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace, int64_t axis) {
  return handle(target_name(Op::kLogSumExpGrad),
                [&] { run(stream, log_sum_exp_grad_call(x, cotangent, *out, axis), x, *workspace, axis); });
}

XLA_FFI_DEFINE_HANDLER(kSoftmax, forward<Op::kSoftmax>, forward_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kLogSoftmax, forward<Op::kLogSoftmax>, forward_binding<OnCuda>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kLogSumExp, log_sum_exp, log_sum_exp_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kSoftmaxJvp, softmax_jvp, softmax_jvp_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kLogSoftmaxJvp, log_softmax_jvp, log_softmax_jvp_binding<OnCuda>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kCrossEntropy, cross_entropy, cross_entropy_binding<OnCuda>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kCrossEntropyGrad, cross_entropy_grad, cross_entropy_grad_binding<OnCuda>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kLogSumExpGrad, log_sum_exp_grad, log_sum_exp_grad_binding<OnCuda>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Target> cuda_targets() {
  return {{"jaxgpuops.softmax", kSoftmax},
          {"jaxgpuops.log_softmax", kLogSoftmax},
          {"jaxgpuops.logsumexp", kLogSumExp},
          {"jaxgpuops.softmax_jvp", kSoftmaxJvp},
          {"jaxgpuops.log_softmax_jvp", kLogSoftmaxJvp},
          {"jaxgpuops.cross_entropy", kCrossEntropy},
          {"jaxgpuops.cross_entropy_grad", kCrossEntropyGrad},
          {"jaxgpuops.logsumexp_grad", kLogSumExpGrad}};
}

}  // namespace jaxgpuops::softmax
