// Segments on the CPU. The order of additions follows from the sizes of the problem, however many threads there are: a
// segment's rows are added in order of appearance. If rows have few columns, they are cut into parts: each part is
// added up in order of appearance, and then the parts in their order.
#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "common/cpu/narrow_float.h"
#include "common/cpu/simd.h"
#include "common/rounding.h"
#include "segments/cpu/loops.h"

namespace jaxgpuops::segments {
namespace {

constexpr int64_t kTaskElements = 1 << 16;
// With so many columns or more, looking at an id takes less time than adding up its row.
constexpr int64_t kWideColumns = 17;

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

// The comparison of a and b alone is one instruction, such as maxss, where a branch would often be predicted wrongly.
// Whether b is NaN can be predicted.
struct Larger {
  template <class T>
  static T identity() {
    return std::numeric_limits<T>::has_infinity ? -std::numeric_limits<T>::infinity() : std::numeric_limits<T>::min();
  }
  template <class T>
  static JAXGPUOPS_INLINE T fold(T a, T b) {
    const T larger = b > a ? b : a;
    return b != b ? b : larger;
  }
};

struct Smaller {
  template <class T>
  static T identity() {
    return std::numeric_limits<T>::has_infinity ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::max();
  }
  template <class T>
  static JAXGPUOPS_INLINE T fold(T a, T b) {
    const T smaller = b < a ? b : a;
    return b != b ? b : smaller;
  }
};

// Adds up many rows of few columns in a table of all segments. Small tables are kept kTables times and used in turns,
// so that an addition need not wait for the one before it. Rows whose id is out of range go to one more segment.
template <class Fold, class Format, int kWidth, int kTables, class Acc>
JAXGPUOPS_SIMD void fold_narrow(const int32_t* ids, int64_t length, int64_t segments, const typename Format::Bits* x,
                                int64_t width, Acc* tables) {
  if (kWidth > 0) width = kWidth;
  const int64_t table = (segments + 1) * width;
  const auto limit = static_cast<uint32_t>(segments);
  for (int64_t j = 0; j < length; j += kTables) {
#pragma GCC unroll 4
    for (int t = 0; t < kTables; ++t) {
      if (j + t >= length) break;
      Acc* sum = tables + t * table + static_cast<int64_t>(std::min(static_cast<uint32_t>(ids[j + t]), limit)) * width;
      const typename Format::Bits* row = x + (j + t) * width;
      JAXGPUOPS_INDEPENDENT
#pragma GCC unroll 1  // unrolled, this loop would not be vectorised
      for (int64_t i = 0; i < width; ++i) sum[i] = Fold::fold(sum[i], static_cast<Acc>(Format::decode(row[i])));
    }
  }
}

// The rows are cut into parts, as many as the sizes of the problem say. Each part has its own table, and the tables are
// added up in order.
template <class Fold, class Format>
void reduce_narrow(const Segments& problem, const typename Format::Bits* data, const int32_t* ids,
                   typename Format::Bits* out, const Workers& workers) {
  using Acc = decltype(Format::decode(typename Format::Bits{}));
  const Rows& rows = problem.rows;
  const int64_t width = rows.inner, segments = problem.segments, size = segments * width, table = size + width;
  const bool several =
      width <= 2 && table * static_cast<int64_t>(sizeof(Acc)) <= 16 << 10 && rows.length >= 4 * segments;
  const int tables = several ? 4 : 1;
  // Each part has a table, which is filled, written and added to the others. So that this takes no longer than adding
  // up the rows, a part has several rows for each segment: more of several columns, which are added up as vectors.
  const int64_t least = std::max<int64_t>(kTaskElements / width, (width == 1 ? 8 : 32) * segments);
  const int64_t parts = std::clamp<int64_t>(rows.length / least, 1, 256), part = ceil_div(rows.length, parts);
  const auto add_up = [&](const Acc* from, int64_t count, int64_t stride, auto put) {
    for (int64_t i = 0; i < size; ++i) {
      Acc sum = from[i];
      for (int64_t t = 1; t < count; ++t) sum = Fold::fold(sum, from[t * stride + i]);
      put(i, sum);
    }
  };
  std::vector<Acc> partials(parts > 1 ? rows.outer * parts * size : 0);
  // Outer indices that share data take the same part of it one after the other, so that it stays in the cache.
  const int64_t group = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, part * width + size));
  const int64_t groups = ceil_div(rows.outer, group);
  parallel_for(workers, parts * groups, [&](int64_t task) {
    const int64_t p = task / groups, begin = std::min(rows.length, p * part), end = std::min(rows.length, begin + part);
    const std::unique_ptr<Acc[]> own(new Acc[tables * table]);
    for (int64_t o = task % groups * group; o < std::min(rows.outer, (task % groups + 1) * group); ++o) {
      std::fill_n(own.get(), tables * table, Fold::template identity<Acc>());
      const auto fold = [&](auto kernel) {
        kernel(ids + problem.ids(o) + begin, end - begin, segments, data + problem.data(o) + begin * width, width,
               own.get());
      };
      switch (several ? width : -width) {
        case 1: fold(fold_narrow<Fold, Format, 1, 4, Acc>); break;
        case 2: fold(fold_narrow<Fold, Format, 2, 4, Acc>); break;
        case -1: fold(fold_narrow<Fold, Format, 1, 1, Acc>); break;
        case -2: fold(fold_narrow<Fold, Format, 2, 1, Acc>); break;
        case -4: fold(fold_narrow<Fold, Format, 4, 1, Acc>); break;
        case -8: fold(fold_narrow<Fold, Format, 8, 1, Acc>); break;
        case -16: fold(fold_narrow<Fold, Format, 16, 1, Acc>); break;
        default: fold(fold_narrow<Fold, Format, 0, 1, Acc>);
      }
      if (parts > 1) {
        Acc* to = partials.data() + (o * parts + p) * size;
        add_up(own.get(), tables, table, [&](int64_t i, Acc sum) { to[i] = sum; });
      } else {
        auto* to = out + o * size;
        add_up(own.get(), tables, table, [&](int64_t i, Acc sum) { to[i] = Format::encode(sum); });
      }
    }
  });
  if (parts == 1) return;
  parallel_for(workers, rows.outer, [&](int64_t o) {
    auto* to = out + o * size;
    add_up(partials.data() + o * parts * size, parts, size, [&](int64_t i, Acc sum) { to[i] = Format::encode(sum); });
  });
}

// Folds rows into the sums of segments from `first` on, which are `stride` apart. `chosen` lists the rows to fold;
// null: all rows.
template <class Fold, class Format, class Acc>
JAXGPUOPS_SIMD void fold_rows(const int32_t* ids, const int32_t* chosen, int64_t length, int64_t first, int64_t count,
                              const typename Format::Bits* x, int64_t inner, int64_t width, Acc* sums, int64_t stride) {
  constexpr int64_t kAhead = 8;  // how many rows ahead data is prefetched
  const int64_t ahead = bytes_ahead<typename Format::Bits>(width, inner);
  for (int64_t n = 0; n < length; ++n) {
    const int64_t j = chosen ? chosen[n] : n;
    const auto s = static_cast<uint64_t>(ids[j] - first);
    if (s >= static_cast<uint64_t>(count)) continue;
    const typename Format::Bits* row = x + j * inner;
    Acc* sum = sums + s * stride;
    if (chosen) {
      if (n + kAhead < length) prefetch(x + chosen[n + kAhead] * inner, width, 0);
    } else {
      prefetch(row, width, ahead);
    }
    JAXGPUOPS_INDEPENDENT
    for (int64_t i = 0; i < width; ++i) sum[i] = Fold::fold(sum[i], static_cast<Acc>(Format::decode(row[i])));
  }
}

// Lists the rows whose id is one of `count` from `first` on. It has no branches, since the processor would predict them
// wrongly.
JAXGPUOPS_SIMD int64_t choose_rows(const int32_t* ids, int64_t length, int64_t first, int64_t count, int32_t* chosen) {
  int64_t n = 0;
  for (int64_t j = 0; j < length; ++j) {
    chosen[n] = static_cast<int32_t>(j);
    n += static_cast<uint64_t>(ids[j] - first) < static_cast<uint64_t>(count);
  }
  return n;
}

// A task has some columns of some segments of one outer index, and adds up their rows in order of appearance.
template <class Fold, class Format>
void reduce_wide(const Segments& problem, const typename Format::Bits* data, const int32_t* all_ids,
                 typename Format::Bits* out, const Workers& workers) {
  using Bits = typename Format::Bits;
  using Acc = decltype(Format::decode(Bits{}));
  const Rows& rows = problem.rows;
  const int64_t inner = rows.inner, segments = problem.segments;
  int64_t column_parts = 1, segment_parts = 1;
  const int64_t wanted =
      std::min(ceil_div(workers.threads, rows.outer), ceil_div(rows.elements() + segments * inner, kTaskElements));
  if (wanted > 1) {
    column_parts = std::min(wanted, std::max<int64_t>(1, inner * static_cast<int64_t>(sizeof(Bits)) / 1024));
    segment_parts = std::min(segments, wanted / column_parts);
  }
  const int64_t columns = ceil_div(inner, column_parts);
  parallel_for(workers, rows.outer * column_parts * segment_parts, [&](int64_t task) {
    const int64_t o = task / (column_parts * segment_parts), c = task / segment_parts % column_parts;
    const int64_t i0 = std::min(inner, c * columns), width = std::min(inner, i0 + columns) - i0;
    const int32_t* ids = all_ids + problem.ids(o);
    const Bits* from = data + problem.data(o) + i0;

    // If the ids ascend, the segments are cut so that all tasks have about as many rows.
    const bool ranges = problem.sorted && segment_parts > 1 && rows.length > 0;
    const auto border = [&](int64_t part) -> int64_t {
      if (part == 0 || part == segment_parts) return part ? segments : 0;
      if (!ranges) return std::min(segments, part * ceil_div(segments, segment_parts));
      return std::clamp<int64_t>(ids[rows.length * part / segment_parts], 0, segments);
    };
    const int64_t s0 = border(task % segment_parts), s1 = std::max(s0, border(task % segment_parts + 1));
    std::vector<int32_t> chosen(segment_parts > 1 && !ranges ? rows.length : 0);
    int64_t begin = 0, length = rows.length;
    if (ranges) {
      begin = std::lower_bound(ids, ids + rows.length, s0) - ids;
      length = std::lower_bound(ids + begin, ids + rows.length, s1) - ids - begin;
    } else if (segment_parts > 1) {
      length = choose_rows(ids, rows.length, s0, s1 - s0, chosen.data());
    }

    // Floats of 16 bits are added up as float32, in a table of the task.
    Bits* to = out + (o * segments + s0) * inner + i0;
    constexpr bool kInPlace = std::is_same_v<Acc, Bits>;
    std::vector<Acc> table(kInPlace ? 0 : (s1 - s0) * width);
    Acc* sums = kInPlace ? reinterpret_cast<Acc*>(to) : table.data();
    const int64_t stride = kInPlace ? inner : width;
    if (stride == width) {
      std::fill_n(sums, (s1 - s0) * width, Fold::template identity<Acc>());
    } else {
      for (int64_t s = 0; s < s1 - s0; ++s) std::fill_n(sums + s * stride, width, Fold::template identity<Acc>());
    }
    fold_rows<Fold, Format>(ids + begin, chosen.empty() ? nullptr : chosen.data(), length, s0, s1 - s0,
                            from + begin * inner, inner, width, sums, stride);
    if constexpr (!kInPlace)
      for (int64_t s = 0; s < s1 - s0; ++s)
        for (int64_t i = 0; i < width; ++i) to[s * inner + i] = Format::encode(sums[s * width + i]);
  });
}

template <class Fold, class Format>
void reduce(const Segments& problem, const void* data_, const int32_t* ids, void* out_, const Workers& workers) {
  const auto* data = static_cast<const typename Format::Bits*>(data_);
  auto* out = static_cast<typename Format::Bits*>(out_);
  if (problem.rows.count() == 0 || problem.segments == 0) return;
  if (problem.rows.inner < kWideColumns) {
    reduce_narrow<Fold, Format>(problem, data, ids, out, workers);
  } else {
    reduce_wide<Fold, Format>(problem, data, ids, out, workers);
  }
}

template <class Fold, class Body>
void with_number(DType dtype, const Body& body) {
  // Sums wrap around, so signed and unsigned integers need no different loops.
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

}  // namespace

void reduce_segments(const Segments& problem, const void* data, const int32_t* ids, void* out, const Workers& workers) {
  switch (problem.op) {
    case Op::kSum: return run<Add>(problem, data, ids, out, workers);
    case Op::kMax: return run<Larger>(problem, data, ids, out, workers);
    case Op::kMin: return run<Smaller>(problem, data, ids, out, workers);
  }
}

}  // namespace jaxgpuops::segments
