// bincount, segments and searchsorted on the CPU. For sums, threads divide the work by segments and columns and never
// by the terms of a sum, so that each sum adds its terms in order of appearance, however many threads there are.
#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "common/cpu/narrow_float.h"
#include "common/cpu/simd.h"
#include "count/call.h"
#include "count/cpu/search.h"

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

// ---- Segments -------------------------------------------------------------------------------------------------------

struct Add {
  template <class T>
  static T identity() {
    return T{0};
  }
  template <class T>
  static JAXGPUOPS_INLINE T fold(T a, T b) {
    return static_cast<T>(a + b);
  }
};

struct Larger {
  template <class T>
  static T identity() {
    return std::numeric_limits<T>::has_infinity ? -std::numeric_limits<T>::infinity() : std::numeric_limits<T>::min();
  }
  template <class T>
  static JAXGPUOPS_INLINE T fold(T a, T b) {
    return b > a || b != b ? b : a;
  }
};

struct Smaller {
  template <class T>
  static T identity() {
    return std::numeric_limits<T>::has_infinity ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::max();
  }
  template <class T>
  static JAXGPUOPS_INLINE T fold(T a, T b) {
    return b < a || b != b ? b : a;
  }
};

// Folds the rows whose id is in [first, first + count) into sums that are `stride` elements apart.
template <class Fold, class Format, class Acc>
JAXGPUOPS_SIMD void fold_rows(const int32_t* ids, int64_t length, int64_t first, int64_t count,
                              const typename Format::Bits* x, int64_t inner, int64_t width, Acc* sums, int64_t stride) {
  for (int64_t j = 0; j < length; ++j, x += inner) {
    const auto s = static_cast<uint64_t>(ids[j] - first);
    if (s >= static_cast<uint64_t>(count)) continue;
    Acc* sum = sums + s * stride;
    if (width == 1) {
      *sum = Fold::fold(*sum, static_cast<Acc>(Format::decode(*x)));
      continue;
    }
    prefetch(x, width, bytes_ahead<typename Format::Bits>(width, inner));
    JAXGPUOPS_INDEPENDENT
    for (int64_t i = 0; i < width; ++i) sum[i] = Fold::fold(sum[i], static_cast<Acc>(Format::decode(x[i])));
  }
}

template <class Fold, class Format>
void reduce(const Segments& problem, const void* data_, const int32_t* ids_, void* out_, const Workers& workers) {
  using Bits = typename Format::Bits;
  using Acc = decltype(Format::decode(Bits{}));
  const auto* data = static_cast<const Bits*>(data_);
  auto* out = static_cast<Bits*>(out_);
  const Rows& rows = problem.rows;
  const int64_t inner = rows.inner, segments = problem.segments;
  if (rows.outer == 0 || inner == 0 || segments == 0) return;

  // A task has some columns of some segments of one outer index, and reads all ids. So the columns are divided first.
  int64_t column_parts = 1, segment_parts = 1;
  const int64_t wanted = std::min(ceil_div(workers.threads, rows.outer), ceil_div(rows.elements(), kTaskElements));
  if (wanted > 1) {
    column_parts = std::min(wanted, std::max<int64_t>(1, inner * static_cast<int64_t>(sizeof(Bits)) / 1024));
    // Reading an id takes about as long as adding a few numbers.
    if (inner >= 8) segment_parts = std::min(segments, wanted / column_parts);
  }
  const int64_t columns = ceil_div(inner, column_parts), share = ceil_div(segments, segment_parts);
  parallel_for(workers, rows.outer * column_parts * segment_parts, [&](int64_t task) {
    const int64_t o = task / (column_parts * segment_parts), c = task / segment_parts % column_parts;
    const int64_t s0 = std::min(segments, task % segment_parts * share), s1 = std::min(segments, s0 + share);
    const int64_t i0 = std::min(inner, c * columns), width = std::min(inner, i0 + columns) - i0;
    const int32_t* ids = ids_ + problem.ids(o);
    const Bits* from = data + o * rows.length * inner + i0;
    Bits* to = out + (o * segments + s0) * inner + i0;

    // Floats of 16 bits are added in float32, in a table that the task owns.
    constexpr bool kInPlace = std::is_same_v<Acc, Bits>;
    std::vector<Acc> table(kInPlace ? 0 : (s1 - s0) * width);
    Acc* sums = kInPlace ? reinterpret_cast<Acc*>(to) : table.data();
    const int64_t stride = kInPlace ? inner : width;
    for (int64_t s = 0; s < s1 - s0; ++s) std::fill_n(sums + s * stride, width, Fold::template identity<Acc>());
    fold_rows<Fold, Format>(ids, rows.length, s0, s1 - s0, from, inner, width, sums, stride);
    if constexpr (!kInPlace)
      for (int64_t s = 0; s < s1 - s0; ++s)
        for (int64_t i = 0; i < width; ++i) to[s * inner + i] = Format::encode(sums[s * width + i]);
  });
}

template <class Fold, class Body>
void with_number(DType dtype, const Body& body) {
  // Integer sums wrap, so signed and unsigned integers are treated alike.
  constexpr bool kWraps = std::is_same_v<Fold, Add>;
  switch (dtype) {
    case DType::kInt8: return body(std::conditional_t<kWraps, Whole<uint8_t>, Whole<int8_t>>{});
    case DType::kInt16: return body(std::conditional_t<kWraps, Whole<uint16_t>, Whole<int16_t>>{});
    case DType::kInt32: return body(std::conditional_t<kWraps, Whole<uint32_t>, Whole<int32_t>>{});
    case DType::kInt64: return body(std::conditional_t<kWraps, Whole<uint64_t>, Whole<int64_t>>{});
    case DType::kUint8: return body(Whole<uint8_t>{});
    case DType::kUint16: return body(Whole<uint16_t>{});
    case DType::kUint32: return body(Whole<uint32_t>{});
    case DType::kUint64: return body(Whole<uint64_t>{});
    default: return with_format(dtype, body);
  }
}

template <class Fold>
void run(const Segments& problem, const void* data, const int32_t* ids, void* out, const Workers& workers) {
  with_number<Fold>(problem.dtype,
                    [&](auto format) { reduce<Fold, decltype(format)>(problem, data, ids, out, workers); });
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

template <Op op>
ffi::Error segments_handler(ffi::ThreadPool pool, ffi::AnyBuffer data, ffi::AnyBuffer ids,
                            ffi::Result<ffi::AnyBuffer> out, int64_t axis, bool sorted) {
  return handle(target_name(op).c_str(), [&] {
    using Fold = std::conditional_t<op == Op::kSum, Add, std::conditional_t<op == Op::kMax, Larger, Smaller>>;
    run<Fold>(segments_of(op, data, ids, *out, axis, sorted), data.untyped_data(),
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
XLA_FFI_DEFINE_HANDLER(kSum, segments_handler<Op::kSum>, segments_binding());
XLA_FFI_DEFINE_HANDLER(kMax, segments_handler<Op::kMax>, segments_binding());
XLA_FFI_DEFINE_HANDLER(kMin, segments_handler<Op::kMin>, segments_binding());

}  // namespace

std::vector<Target> cpu_targets() {
  return {{"jaxgpuops.bincount", kBincount},
          {"jaxgpuops.searchsorted", kSearch},
          {"jaxgpuops.segment_sum", kSum},
          {"jaxgpuops.segment_max", kMax},
          {"jaxgpuops.segment_min", kMin}};
}

}  // namespace jaxgpuops::count
