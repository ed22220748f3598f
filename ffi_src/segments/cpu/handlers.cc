// CPU handlers of segments.
#include <vector>

#include "segments/call.h"
#include "segments/cpu/loops.h"

namespace jaxgpuops::segments {
namespace {

template <Op op>
ffi::Error segments_handler(ffi::ThreadPool pool, ffi::AnyBuffer data, ffi::AnyBuffer ids,
                            ffi::Result<ffi::AnyBuffer> out, int64_t axis, bool sorted) {
  return handle(target_name(op).c_str(), [&] {
    const Segments problem = segments_of(op, data, ids, *out, axis, sorted);
    std::vector<int32_t> wide;
    if (problem.byte_ids) {
      const auto* bytes = static_cast<const uint8_t*>(ids.untyped_data());
      wide.assign(bytes, bytes + ids.element_count());
    }
    reduce_segments(problem, data.untyped_data(),
                    problem.byte_ids ? wide.data() : static_cast<const int32_t*>(ids.untyped_data()),
                    out->untyped_data(), workers_of(pool));
  });
}

template <bool logs>
ffi::Error softmax_handler(ffi::ThreadPool pool, ffi::AnyBuffer data, ffi::AnyBuffer ids,
                           ffi::Result<ffi::AnyBuffer> out, int64_t axis, bool sorted, int64_t length) {
  return handle(logs ? "jaxgpuops.segment_logsumexp" : "jaxgpuops.segment_softmax", [&] {
    segment_softmax(softmax_of(data, ids, *out, axis, length, sorted, logs), data.untyped_data(),
                    static_cast<const int32_t*>(ids.untyped_data()), out->untyped_data(), logs, workers_of(pool));
  });
}

XLA_FFI_DEFINE_HANDLER(kSum, segments_handler<Op::kSum>, segments_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kMax, segments_handler<Op::kMax>, segments_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kMin, segments_handler<Op::kMin>, segments_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kSoftmax, softmax_handler<false>, softmax_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kLogSumExp, softmax_handler<true>, softmax_binding<OnCpu>());

}  // namespace

std::vector<Target> cpu_targets() {
  return {{"jaxgpuops.segment_sum", kSum},
          {"jaxgpuops.segment_max", kMax},
          {"jaxgpuops.segment_min", kMin},
          {"jaxgpuops.segment_softmax", kSoftmax},
          {"jaxgpuops.segment_logsumexp", kLogSumExp}};
}

}  // namespace jaxgpuops::segments
