// Counts on the CPU, and the handlers of the family.
#include <algorithm>
#include <cstring>
#include <vector>

#include "count/call.h"
#include "count/cpu/loops.h"

namespace jaxgpuops::count {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kTaskElements = 1 << 16;

// ---- Counts ---------------------------------------------------------------------------------------------------------

template <class T>
void count_range(const Bincount& problem, const T* x, int32_t* counts, int64_t begin, int64_t end) {
  const int64_t inner = problem.rows.inner;
  const auto limit = problem.limit();
  if (inner == 1) {
    for (int64_t j = begin; j < end; ++j)
      if (x[j] < limit) ++counts[x[j]];
    return;
  }
  for (int64_t j = begin; j < end; ++j)
    for (int64_t i = 0; i < inner; ++i) {
      const T id = x[j * inner + i];
      if (id < limit) ++counts[static_cast<int64_t>(id) * inner + i];
    }
}

// Integers have the same sum in any order, so if there are few rows, threads count parts of a row in tables of their
// own.
template <class T>
void bincount(const Bincount& problem, const T* x, int32_t* counts, const Workers& workers) {
  const Rows& rows = problem.rows;
  const int64_t size = problem.bins * rows.inner, row = rows.length * rows.inner;
  int64_t parts = 1;
  if (rows.outer < workers.threads && size > 0)
    parts = std::max<int64_t>(1, std::min({workers.threads, row / kTaskElements, row / (2 * size)}));
  const int64_t part = ceil_div(std::max<int64_t>(rows.length, 1), parts);
  std::vector<int32_t> tables(parts > 1 ? parts * size : 0);
  for (int64_t first = 0; first < (parts > 1 ? rows.outer : 1); ++first) {
    const int64_t outers = parts > 1 ? 1 : rows.outer;
    parallel_for(workers, outers * parts, [&](int64_t task) {
      const int64_t o = first + task / parts, p = task % parts;
      int32_t* to = parts > 1 ? tables.data() + p * size : counts + o * size;
      std::memset(to, 0, size * sizeof(int32_t));
      count_range(problem, x + o * row, to, std::min(rows.length, p * part), std::min(rows.length, (p + 1) * part));
    });
    if (parts == 1) continue;
    const int64_t strips = std::min(workers.threads, ceil_div(size, 4096)), strip = ceil_div(size, strips);
    parallel_for(workers, strips, [&](int64_t task) {
      int32_t* to = counts + first * size;
      const int64_t end = std::min(size, (task + 1) * strip);
      for (int64_t b = task * strip; b < end; ++b) {
        uint32_t total = 0;
        for (int64_t p = 0; p < parts; ++p) total += static_cast<uint32_t>(tables[p * size + b]);
        to[b] = static_cast<int32_t>(total);
      }
    });
  }
}

// ---- Handlers -------------------------------------------------------------------------------------------------------

ffi::Error bincount_handler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> counts, int64_t axis) {
  return handle("jaxgpuops.bincount", [&] {
    const Bincount problem = bincount_of(x, *counts, axis);
    with_width(problem.bytes, [&](auto width) {
      bincount(problem, static_cast<const decltype(width)*>(x.untyped_data()),
               static_cast<int32_t*>(counts->untyped_data()), workers_of(pool));
    });
  });
}

ffi::Error search_handler(ffi::ThreadPool pool, ffi::AnyBuffer queries, ffi::AnyBuffer sorted,
                          ffi::Result<ffi::AnyBuffer> places, int64_t axis, bool right) {
  return handle("jaxgpuops.searchsorted", [&] {
    search(search_of(queries, sorted, *places, axis, right), queries.untyped_data(), sorted.untyped_data(),
           static_cast<int32_t*>(places->untyped_data()), workers_of(pool));
  });
}

ffi::Error select_handler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer ranks,
                          ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> indices, int64_t axis) {
  return handle("jaxgpuops.select", [&] {
    select(select_of(x, ranks, *values, *indices, axis), x.untyped_data(),
           static_cast<const int32_t*>(ranks.untyped_data()), values->untyped_data(),
           static_cast<int32_t*>(indices->untyped_data()), workers_of(pool));
  });
}

template <Op op>
ffi::Error segments_handler(ffi::ThreadPool pool, ffi::AnyBuffer data, ffi::AnyBuffer ids,
                            ffi::Result<ffi::AnyBuffer> out, int64_t axis, bool sorted) {
  return handle(target_name(op).c_str(), [&] {
    reduce_segments(segments_of(op, data, ids, *out, axis, sorted), data.untyped_data(),
                    static_cast<const int32_t*>(ids.untyped_data()), out->untyped_data(), workers_of(pool));
  });
}

auto segments_binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()  // data
      .Arg<ffi::AnyBuffer>()  // ids
      .Ret<ffi::AnyBuffer>()  // out
      .Attr<int64_t>("axis")
      .Attr<bool>("sorted");
}
XLA_FFI_DEFINE_HANDLER(kBincount, bincount_handler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Ret<ffi::AnyBuffer>()  // counts
                           .Attr<int64_t>("axis"));
XLA_FFI_DEFINE_HANDLER(kSearch, search_handler, search_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kSelect, select_handler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // ranks
                           .Ret<ffi::AnyBuffer>()  // values
                           .Ret<ffi::AnyBuffer>()  // indices
                           .Attr<int64_t>("axis"));
XLA_FFI_DEFINE_HANDLER(kSum, segments_handler<Op::kSum>, segments_binding());
XLA_FFI_DEFINE_HANDLER(kMax, segments_handler<Op::kMax>, segments_binding());
XLA_FFI_DEFINE_HANDLER(kMin, segments_handler<Op::kMin>, segments_binding());

}  // namespace

std::vector<Target> cpu_targets() {
  return {{"jaxgpuops.bincount", kBincount}, {"jaxgpuops.searchsorted", kSearch}, {"jaxgpuops.segment_sum", kSum},
          {"jaxgpuops.segment_max", kMax},   {"jaxgpuops.segment_min", kMin},     {"jaxgpuops.select", kSelect}};
}

}  // namespace jaxgpuops::count
