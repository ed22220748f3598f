// Counts on the CPU, and their handlers.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/cpu/parallel.h"
#include "common/cuda/element.h"
#include "common/rounding.h"
#include "count/call.h"

namespace jaxgpuops::count {
namespace {

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

// The bin of a number: a multiplication guesses it, and the edges decide.
template <class Element>
void count_range(const Histogram& problem, const typename Element::Bits* x, const typename Element::Acc* edges,
                 int32_t* counts, int64_t begin, int64_t end) {
  using Real = typename Element::Acc;
  const int64_t inner = problem.rows.inner, bins = problem.bins;
  const Real first = edges[0], last = edges[bins], scale = static_cast<Real>(bins) / (last - first);
  for (int64_t j = begin * inner; j < end * inner; ++j) {
    const Real value = Element::load(x[j]);
    if (!(value >= first && value <= last)) continue;
    const Real guess = (value - first) * scale;
    int64_t bin = guess > 0 && guess < static_cast<Real>(bins) ? static_cast<int64_t>(guess) : guess > 0 ? bins - 1 : 0;
    while (bin > 0 && value < edges[bin]) --bin;
    while (bin + 1 < bins && value >= edges[bin + 1]) ++bin;
    ++counts[bin * inner + j % inner];
  }
}

// Calls `count(o, counts, begin, end)` for all elements of each row; `count` adds the elements from begin to end to
// `counts`. If there are few rows, threads count parts of a row, each in its own table; the sum of integers is the same
// in any order.
template <class Count>
void count_rows(const Rows& rows, int64_t bins, int32_t* counts, const Workers& workers, const Count& count) {
  const int64_t size = bins * rows.inner, row = rows.length * rows.inner;
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
      count(o, to, std::min(rows.length, p * part), std::min(rows.length, (p + 1) * part));
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

template <class T>
void bincount(const Bincount& problem, const T* x, int32_t* counts, const Workers& workers) {
  const int64_t row = problem.rows.length * problem.rows.inner;
  count_rows(problem.rows, problem.bins, counts, workers, [&](int64_t o, int32_t* to, int64_t begin, int64_t end) {
    count_range(problem, x + o * row, to, begin, end);
  });
}

template <class Element>
void histogram(const Histogram& problem, const void* x, const void* edges, int32_t* counts, const Workers& workers) {
  using Bits = typename Element::Bits;
  const int64_t row = problem.rows.length * problem.rows.inner;
  if (problem.bins == 0) return;
  count_rows(problem.rows, problem.bins, counts, workers, [&](int64_t o, int32_t* to, int64_t begin, int64_t end) {
    const Bits* from = static_cast<const Bits*>(edges) + problem.edges(o);
    std::vector<typename Element::Acc> own(problem.bins + 1);
    std::transform(from, from + own.size(), own.begin(), [](Bits bits) { return Element::load(bits); });
    count_range<Element>(problem, static_cast<const Bits*>(x) + o * row, own.data(), to, begin, end);
  });
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

ffi::Error histogram_handler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer edges,
                             ffi::Result<ffi::AnyBuffer> counts, int64_t axis) {
  return handle("jaxgpuops.histogram", [&] {
    const Histogram problem = histogram_of(x, edges, *counts, axis);
    const auto run = [&](auto element) {
      histogram<decltype(element)>(problem, x.untyped_data(), edges.untyped_data(),
                                   static_cast<int32_t*>(counts->untyped_data()), workers_of(pool));
    };
    switch (problem.dtype) {
      case DType::kFloat16: return run(Float16{});
      case DType::kBFloat16: return run(BFloat16{});
      case DType::kFloat32: return run(Float32{});
      default: return run(Float64{});
    }
  });
}

XLA_FFI_DEFINE_HANDLER(kBincount, bincount_handler, bincount_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kHistogram, histogram_handler, histogram_binding<OnCpu>());

}  // namespace

std::vector<Target> cpu_targets() { return {{"jaxgpuops.bincount", kBincount}, {"jaxgpuops.histogram", kHistogram}}; }

}  // namespace jaxgpuops::count
