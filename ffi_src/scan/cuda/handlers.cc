// CUDA handlers of the scans: each checks its buffers, plans the call and launches the kernels.
#include "common/cuda/device.h"
#include "scan/call.h"
#include "scan/cuda/launch.h"

namespace jaxgpuops::scan {
namespace {

void run(cudaStream_t stream, const Call& call, ffi::AnyBuffer main, ffi::AnyBuffer workspace, int64_t axis) {
  const int64_t workspace_bytes = require_workspace(workspace, main, axis);
  const Device device = current_device();
  const Plan plan = plan_scan(call.problem, device.gpu(), workspace_bytes);
  const cudaError_t status = launch_scan(stream, plan, call.problem, call.buffers, workspace.untyped_data());
  require_launched(status, name(plan.algorithm), call.problem.rows, main, device);
}

template <Op op>
ffi::Error cumulative(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                      ffi::Result<ffi::AnyBuffer> workspace, int64_t axis, bool reverse, bool exclusive) {
  return handle(target_name(Kind::kCumulative, op),
                [&] { run(stream, cumulative_call(op, x, rest, *y, axis, reverse, exclusive), x, *workspace, axis); });
}

template <Op op>
ffi::Error tangent(cudaStream_t stream, ffi::AnyBuffer t, ffi::AnyBuffer x, ffi::RemainingArgs rest,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace, int64_t axis, bool reverse,
                   bool exclusive, bool transpose) {
  return handle(target_name(Kind::kTangent, op), [&] {
    const Call call = tangent_call(op, t, x, rest, *out, axis, reverse, exclusive, transpose);
    if (call.problem.from_x && !takes_x(call.problem, current_device().gpu())) throw invalid("y is missing");
    run(stream, call, t, *workspace, axis);
  });
}

ffi::Error linear(cudaStream_t stream, ffi::AnyBuffer b, ffi::AnyBuffer a, ffi::RemainingArgs rest,
                  ffi::Result<ffi::AnyBuffer> h, ffi::Result<ffi::AnyBuffer> workspace, int64_t axis, bool reverse,
                  bool transpose, bool initial) {
  return handle(target_name(Kind::kLinear, Op{}), [&] {
    run(stream, linear_call(b, a, rest, *h, axis, reverse, transpose, initial), b, *workspace, axis);
  });
}

ffi::Error linear_vjp(cudaStream_t stream, ffi::AnyBuffer g, ffi::AnyBuffer a, ffi::AnyBuffer h,
                      ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> da, ffi::Result<ffi::AnyBuffer> db,
                      ffi::Result<ffi::AnyBuffer> workspace, int64_t axis, bool reverse, bool initial) {
  return handle(target_name(Kind::kLinearVjp, Op{}), [&] {
    run(stream, linear_vjp_call(g, a, h, rest, *da, *db, axis, reverse, initial), g, *workspace, axis);
  });
}

XLA_FFI_DEFINE_HANDLER(kSum, cumulative<Op::kSum>, cumulative_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kProd, cumulative<Op::kProd>, cumulative_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMax, cumulative<Op::kMax>, cumulative_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMin, cumulative<Op::kMin>, cumulative_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kLogSumExp, cumulative<Op::kLogSumExp>, cumulative_binding<OnCuda>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kProdJvp, tangent<Op::kProd>, tangent_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMaxJvp, tangent<Op::kMax>, tangent_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMinJvp, tangent<Op::kMin>, tangent_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kLogSumExpJvp, tangent<Op::kLogSumExp>, tangent_binding<OnCuda>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kLinear, linear, linear_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kLinearVjp, linear_vjp, linear_vjp_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Target> cuda_targets() {
  return {{"jaxgpuops.cumsum", kSum},
          {"jaxgpuops.cumprod", kProd},
          {"jaxgpuops.cummax", kMax},
          {"jaxgpuops.cummin", kMin},
          {"jaxgpuops.cumlogsumexp", kLogSumExp},
          {"jaxgpuops.cumprod_jvp", kProdJvp},
          {"jaxgpuops.cummax_jvp", kMaxJvp},
          {"jaxgpuops.cummin_jvp", kMinJvp},
          {"jaxgpuops.cumlogsumexp_jvp", kLogSumExpJvp},
          {"jaxgpuops.linear_scan", kLinear},
          {"jaxgpuops.linear_scan_vjp", kLinearVjp}};
}

}  // namespace jaxgpuops::scan
