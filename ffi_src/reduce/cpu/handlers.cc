// CPU handlers of the reductions.
#include "reduce/cpu/run.h"

#include "reduce/call.h"

namespace jaxgpuops::reduce {
namespace {

template <Op op>
ffi::Error reduction(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                     int64_t axis, bool masked) {
  return handle(target_name(op), [&] {
    const Call call = reduce_call(op, x, nullptr, rest, *out, axis, masked);
    cpu::run(call.problem, call.buffers, workers_of(pool));
  });
}

ffi::Error sum(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
               int64_t axis, bool masked, int64_t divisor) {
  return handle(target_name(Op::kSum), [&] {
    const Call call = reduce_call(Op::kSum, x, nullptr, rest, *out, axis, masked, divisor);
    cpu::run(call.problem, call.buffers, workers_of(pool));
  });
}

ffi::Error dot(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer y, ffi::RemainingArgs rest,
               ffi::Result<ffi::AnyBuffer> out, int64_t axis, bool masked) {
  return handle(target_name(Op::kDot), [&] {
    const Call call = reduce_call(Op::kDot, x, &y, rest, *out, axis, masked);
    cpu::run(call.problem, call.buffers, workers_of(pool));
  });
}

XLA_FFI_DEFINE_HANDLER(kSum, sum, sum_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kMax, reduction<Op::kMax>, reduce_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kMin, reduction<Op::kMin>, reduce_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kDot, dot, dot_binding<OnCpu>());

}  // namespace

std::vector<Target> cpu_targets() {
  return {{"jaxgpuops.sum", kSum}, {"jaxgpuops.max", kMax}, {"jaxgpuops.min", kMin}, {"jaxgpuops.dot", kDot}};
}

}  // namespace jaxgpuops::reduce
