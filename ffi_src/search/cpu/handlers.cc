// CPU handlers of searches and of chosen places.
#include "search/call.h"
#include "search/cpu/loops.h"

namespace jaxgpuops::search {
namespace {

ffi::Error search_handler(ffi::ThreadPool pool, ffi::AnyBuffer queries, ffi::AnyBuffer sorted,
                          ffi::Result<ffi::AnyBuffer> places, int64_t axis, bool right) {
  return handle("jaxgpuops.searchsorted", [&] {
    search(search_of(queries, sorted, *places, axis, right), queries.untyped_data(), sorted.untyped_data(),
           static_cast<int32_t*>(places->untyped_data()), workers_of(pool));
  });
}

ffi::Error choose_handler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer fill,
                          ffi::Result<ffi::AnyBuffer> places, int64_t axis) {
  return handle("jaxgpuops.choose", [&] {
    const ChooseCall call = choose_call(x, fill, *places, axis);
    choose(call.problem, call.buffers, workers_of(pool));
  });
}

ffi::Error pick_handler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs operands, ffi::RemainingRets results,
                        int64_t axis, bool starts) {
  return handle("jaxgpuops.pick", [&] {
    const ChooseCall call = pick_call(x, operands, results, axis, starts);
    choose(call.problem, call.buffers, workers_of(pool));
  });
}

ffi::Error unique_handler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::RemainingRets results,
                          int64_t axis, bool index, bool inverse) {
  return handle("jaxgpuops.unique", [&] {
    const UniqueCall call = unique_call(x, rest, results, axis, index, inverse);
    unique(call.problem, call.buffers, workers_of(pool));
  });
}

XLA_FFI_DEFINE_HANDLER(kSearch, search_handler, search_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kChoose, choose_handler, choose_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kPick, pick_handler, pick_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kUnique, unique_handler, unique_binding<OnCpu>());

}  // namespace

std::vector<Target> cpu_targets() {
  return {{"jaxgpuops.searchsorted", kSearch},
          {"jaxgpuops.choose", kChoose},
          {"jaxgpuops.pick", kPick},
          {"jaxgpuops.unique", kUnique}};
}

}  // namespace jaxgpuops::search
