// CPU handlers of selections by rank.
#include "select/call.h"
#include "select/cpu/loops.h"

namespace jaxgpuops::select {
namespace {

ffi::Error select_handler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer ranks,
                          ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> indices, int64_t axis) {
  return handle("jaxgpuops.select", [&] {
    select(select_of(x, ranks, *values, *indices, axis), x.untyped_data(),
           static_cast<const int32_t*>(ranks.untyped_data()), values->untyped_data(),
           static_cast<int32_t*>(indices->untyped_data()), workers_of(pool));
  });
}

ffi::Error quantile_handler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer ranks, ffi::AnyBuffer shares,
                            ffi::Result<ffi::AnyBuffer> out, int64_t axis, bool midpoint, int64_t before) {
  return handle("jaxgpuops.quantile", [&] {
    quantile(quantile_of(x, ranks, shares, *out, axis, midpoint, before), beside_of(x, axis, before), x.untyped_data(),
             static_cast<const int32_t*>(ranks.untyped_data()), shares.untyped_data(), out->untyped_data(),
             workers_of(pool));
  });
}

XLA_FFI_DEFINE_HANDLER(kSelect, select_handler, select_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kQuantile, quantile_handler, quantile_binding<OnCpu>());

}  // namespace

std::vector<Target> cpu_targets() { return {{"jaxgpuops.select", kSelect}, {"jaxgpuops.quantile", kQuantile}}; }

}  // namespace jaxgpuops::select
