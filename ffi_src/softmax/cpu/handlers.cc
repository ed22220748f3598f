// CPU handlers of the softmax family.
#include "softmax/cpu/run.h"

#include "softmax/call.h"

namespace jaxgpuops::softmax {
namespace {

template <Op op>
ffi::Error forward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                   int64_t axis, double factor, bool scaled, bool biased, bool masked, int64_t query_axis) {
  return handle(target_name(op), [&] {
    const Call call = softmax_call(op, x, rest, *y, axis, factor, scaled, biased, masked, query_axis);
    cpu::run_forward(call.problem, call.buffers, workers_of(pool));
  });
}

ffi::Error log_sum_exp(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::RemainingRets results,
                       int64_t axis, double factor, bool scaled, bool biased, bool masked, bool parts,
                       int64_t query_axis) {
  return handle(target_name(Op::kLogSumExp), [&] {
    const Call call = log_sum_exp_call(x, rest, results, axis, factor, scaled, biased, masked, parts, query_axis);
    cpu::run_forward(call.problem, call.buffers, workers_of(pool));
  });
}

ffi::Error softmax_jvp(ffi::ThreadPool pool, ffi::AnyBuffer t, ffi::AnyBuffer y, ffi::RemainingArgs rest,
                       ffi::Result<ffi::AnyBuffer> out, int64_t axis, double factor, bool scaled, bool of_logits) {
  return handle(target_name(Op::kSoftmaxJvp), [&] {
    if (of_logits) throw invalid("of_logits is for GPUs");
    const Call call = jvp_call(Op::kSoftmaxJvp, t, y, rest, *out, axis, factor, scaled, false, -1, false, of_logits);
    cpu::run_tangent(call.problem, call.buffers, workers_of(pool));
  });
}

ffi::Error log_softmax_jvp(ffi::ThreadPool pool, ffi::AnyBuffer t, ffi::AnyBuffer y, ffi::RemainingArgs rest,
                           ffi::Result<ffi::AnyBuffer> out, int64_t axis, double factor, bool scaled, bool masked,
                           int64_t query_axis, bool transpose, bool of_logits) {
  return handle(target_name(Op::kLogSoftmaxJvp), [&] {
    if (of_logits) throw invalid("of_logits is for GPUs");
    const Call call =
        jvp_call(Op::kLogSoftmaxJvp, t, y, rest, *out, axis, factor, scaled, masked, query_axis, transpose, of_logits);
    cpu::run_tangent(call.problem, call.buffers, workers_of(pool));
  });
}

ffi::Error cross_entropy(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::AnyBuffer labels, ffi::RemainingArgs rest,
                         ffi::Result<ffi::AnyBuffer> loss, ffi::Result<ffi::AnyBuffer> maximum,
                         ffi::Result<ffi::AnyBuffer> log_sum, int64_t axis, double label_smoothing, double z_loss,
                         bool masked) {
  return handle(target_name(Op::kCrossEntropy), [&] {
    const Call call =
        cross_entropy_call(logits, labels, rest, *loss, *maximum, *log_sum, axis, label_smoothing, z_loss, masked);
    cpu::run_forward(call.problem, call.buffers, workers_of(pool));
  });
}

ffi::Error cross_entropy_grad(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::AnyBuffer labels,
                              ffi::AnyBuffer cotangent, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> gradient,
                              ffi::Result<ffi::AnyBuffer> loss, int64_t axis, double label_smoothing, double z_loss,
                              bool masked) {
  return handle(target_name(Op::kCrossEntropyGrad), [&] {
    const Call call = cross_entropy_grad_call(logits, labels, cotangent, rest, *gradient, *loss, axis, label_smoothing,
                                              z_loss, masked);
    cpu::run_forward(call.problem, call.buffers, workers_of(pool));
  });
}

ffi::Error log_sum_exp_grad(ffi::ThreadPool, ffi::AnyBuffer, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>, int64_t) {
  return handle(target_name(Op::kLogSumExpGrad), [] { throw invalid("it is for GPUs"); });
}

XLA_FFI_DEFINE_HANDLER(kSoftmax, forward<Op::kSoftmax>, forward_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kLogSoftmax, forward<Op::kLogSoftmax>, forward_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kLogSumExp, log_sum_exp, log_sum_exp_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kSoftmaxJvp, softmax_jvp, softmax_jvp_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kLogSoftmaxJvp, log_softmax_jvp, log_softmax_jvp_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kCrossEntropy, cross_entropy, cross_entropy_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kCrossEntropyGrad, cross_entropy_grad, cross_entropy_grad_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kLogSumExpGrad, log_sum_exp_grad, log_sum_exp_grad_binding<OnCpu>());

}  // namespace

std::vector<Target> cpu_targets() {
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
