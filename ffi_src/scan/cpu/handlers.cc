// CPU handlers of the scans.
#include "scan/cpu/run.h"

#include "scan/call.h"

namespace jaxgpuops::scan {
namespace {

template <Op op>
ffi::Error cumulative(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                      int64_t axis, bool reverse, bool exclusive) {
  return handle(target_name(Kind::kCumulative, op), [&] {
    const Call call = cumulative_call(op, x, rest, *y, axis, reverse, exclusive);
    cpu::run_cumulative(call.problem, call.buffers, workers_of(pool));
  });
}

template <Op op>
ffi::Error tangent(ffi::ThreadPool pool, ffi::AnyBuffer t, ffi::AnyBuffer x, ffi::RemainingArgs rest,
                   ffi::Result<ffi::AnyBuffer> out, int64_t axis, bool reverse, bool exclusive, bool transpose) {
  return handle(target_name(Kind::kTangent, op), [&] {
    const Call call = tangent_call(op, t, x, rest, *out, axis, reverse, exclusive, transpose);
    if (call.problem.from_x) throw invalid("y is missing");
    cpu::run_tangent(call.problem, call.buffers, workers_of(pool));
  });
}

ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer b, ffi::AnyBuffer a, ffi::RemainingArgs rest,
                  ffi::Result<ffi::AnyBuffer> h, int64_t axis, bool reverse, bool transpose, bool initial) {
  return handle(target_name(Kind::kLinear, Op{}), [&] {
    const Call call = linear_call(b, a, rest, *h, axis, reverse, transpose, initial);
    cpu::run_linear(call.problem, call.buffers, workers_of(pool));
  });
}

ffi::Error linear_vjp(ffi::ThreadPool pool, ffi::AnyBuffer g, ffi::AnyBuffer a, ffi::AnyBuffer h,
                      ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> da, ffi::Result<ffi::AnyBuffer> db,
                      int64_t axis, bool reverse, bool initial) {
  return handle(target_name(Kind::kLinearVjp, Op{}), [&] {
    const Call call = linear_vjp_call(g, a, h, rest, *da, *db, axis, reverse, initial);
    cpu::run_linear_vjp(call.problem, call.buffers, workers_of(pool));
  });
}

XLA_FFI_DEFINE_HANDLER(kCumsum, cumulative<Op::kSum>, cumulative_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kCumprod, cumulative<Op::kProd>, cumulative_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kCummax, cumulative<Op::kMax>, cumulative_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kCummin, cumulative<Op::kMin>, cumulative_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kCumlogsumexp, cumulative<Op::kLogSumExp>, cumulative_binding<OnCpu>());

XLA_FFI_DEFINE_HANDLER(kCumprodJvp, tangent<Op::kProd>, tangent_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kCummaxJvp, tangent<Op::kMax>, tangent_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kCumminJvp, tangent<Op::kMin>, tangent_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kCumlogsumexpJvp, tangent<Op::kLogSumExp>, tangent_binding<OnCpu>());

XLA_FFI_DEFINE_HANDLER(kLinear, linear, linear_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kLinearVjp, linear_vjp, linear_vjp_binding<OnCpu>());

}  // namespace

std::vector<Target> cpu_targets() {
  return {{"jaxgpuops.cumsum", kCumsum},
          {"jaxgpuops.cumprod", kCumprod},
          {"jaxgpuops.cummax", kCummax},
          {"jaxgpuops.cummin", kCummin},
          {"jaxgpuops.cumlogsumexp", kCumlogsumexp},
          {"jaxgpuops.cumprod_jvp", kCumprodJvp},
          {"jaxgpuops.cummax_jvp", kCummaxJvp},
          {"jaxgpuops.cummin_jvp", kCumminJvp},
          {"jaxgpuops.cumlogsumexp_jvp", kCumlogsumexpJvp},
          {"jaxgpuops.linear_scan", kLinear},
          {"jaxgpuops.linear_scan_vjp", kLinearVjp}};
}

}  // namespace jaxgpuops::scan
