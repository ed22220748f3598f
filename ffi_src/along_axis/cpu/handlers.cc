// take and put on the CPU.
#include <algorithm>
#include <cstring>

#include "along_axis/call.h"
#include "common/rounding.h"

namespace jaxgpuops::along_axis {
namespace {

constexpr int64_t kTaskElements = 1 << 16;

// A line is the `inner` neighbouring elements of one outer index and one position along the axis. The function splits
// the lines [begin, end) where the outer index changes, and calls body(outer, begin, end) for each group.
template <class Body>
void for_each_outer(int64_t begin, int64_t end, int64_t lines_per_outer, const Body& body) {
  while (begin < end) {
    const int64_t outer = begin / lines_per_outer, stop = std::min(end, (outer + 1) * lines_per_outer);
    body(outer, begin, stop);
    begin = stop;
  }
}

template <class T>
void take(const Problem& problem, const T* x, const int32_t* indices, T* out, const Workers& workers) {
  const Rows& rows = problem.rows;
  const int64_t inner = rows.inner, lines = rows.outer * problem.k;
  if (lines == 0 || inner == 0) return;
  const int64_t lines_per_task = std::max<int64_t>(1, kTaskElements / inner);
  parallel_for(workers, ceil_div(lines, lines_per_task), [&](int64_t task) {
    const int64_t first = task * lines_per_task, last = std::min(lines, first + lines_per_task);
    for_each_outer(first, last, problem.k, [&](int64_t outer, int64_t begin, int64_t end) {
      const T* from = x + outer * rows.length * inner;
      if (inner == 1) {
        for (int64_t at = begin; at < end; ++at) out[at] = from[indices[at]];
      } else {
        for (int64_t line = begin; line < end; ++line)
          for (int64_t i = 0, at = line * inner; i < inner; ++i, ++at) out[at] = from[indices[at] * inner + i];
      }
    });
  });
}

// A task owns a contiguous part of the output: some whole outer indices or, where these are few and large, a part of
// the axis of one. It fills its part with zeros and then stores the updates that belong there, while that part is in
// the cache.
template <class T>
void put(const Problem& problem, const T* updates, const int32_t* indices, T* out, const Workers& workers) {
  const Rows& rows = problem.rows;
  const int64_t k = problem.k, inner = rows.inner, size = rows.length * inner;  // size: elements of one outer index
  if (rows.elements() == 0) return;
  int64_t parts = 1;
  if (rows.outer < 2 * workers.threads) parts = std::min(workers.threads, ceil_div(size, kTaskElements));
  const int64_t part_length = ceil_div(rows.length, parts);
  parts = ceil_div(rows.length, part_length);
  const int64_t outer_per_task = parts > 1 ? 1 : std::max<int64_t>(1, kTaskElements / size);

  parallel_for(workers, ceil_div(rows.outer, outer_per_task) * parts, [&](int64_t task) {
    const int64_t o0 = task / parts * outer_per_task, o1 = std::min(rows.outer, o0 + outer_per_task);
    const int64_t j0 = task % parts * part_length, j1 = std::min(rows.length, j0 + part_length);
    std::memset(out + o0 * size + j0 * inner, 0, ((o1 - 1 - o0) * size + (j1 - j0) * inner) * sizeof(T));
    for_each_outer(o0 * k, o1 * k, k, [&](int64_t outer, int64_t begin, int64_t end) {
      T* to = out + outer * size;
      for (int64_t line = begin; line < end; ++line)
        for (int64_t i = 0, at = line * inner; i < inner; ++i, ++at)
          if (indices[at] >= j0 && indices[at] < j1) to[indices[at] * inner + i] = updates[at];
    });
  });
}

ffi::Error take_handler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer indices, ffi::Result<ffi::AnyBuffer> out,
                        int64_t axis) {
  return handle("jaxgpuops.take_along_axis", [&] {
    const Problem problem = problem_of("x", x, "out", *out, indices, axis);
    with_width(problem.bytes, [&](auto width) {
      using T = decltype(width);
      take(problem, static_cast<const T*>(x.untyped_data()), static_cast<const int32_t*>(indices.untyped_data()),
           static_cast<T*>(out->untyped_data()), workers_of(pool));
    });
  });
}

ffi::Error put_handler(ffi::ThreadPool pool, ffi::AnyBuffer updates, ffi::AnyBuffer indices,
                       ffi::Result<ffi::AnyBuffer> out, int64_t axis) {
  return handle("jaxgpuops.put_along_axis", [&] {
    const Problem problem = problem_of("out", *out, "updates", updates, indices, axis);
    with_width(problem.bytes, [&](auto width) {
      using T = decltype(width);
      put(problem, static_cast<const T*>(updates.untyped_data()), static_cast<const int32_t*>(indices.untyped_data()),
          static_cast<T*>(out->untyped_data()), workers_of(pool));
    });
  });
}

XLA_FFI_DEFINE_HANDLER(kTake, take_handler, binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kPut, put_handler, binding<OnCpu>());

}  // namespace

std::vector<Target> cpu_targets() { return {{"jaxgpuops.take_along_axis", kTake}, {"jaxgpuops.put_along_axis", kPut}}; }

}  // namespace jaxgpuops::along_axis
