// Sort on the CPU. A row becomes a list of keys with their indices, which is sorted by radix digits or, if it is short,
// by comparing all elements with each other. If the axis is not the last, a strip of neighbouring columns at a time is
// transposed in the cache. If there are only a few long rows, all threads sort each row together. Segments are sorted
// one by one.
#include <algorithm>
#include <memory>

#include "common/cpu/composite.h"
#include "common/cpu/transpose.h"
#include "common/rounding.h"
#include "sort/call.h"

namespace jaxgpuops::sort {
namespace {

constexpr int64_t kTaskElements = 1 << 15;   // target number of elements of a task of short rows
constexpr int64_t kPartElements = 1 << 16;   // the least number of elements in a part of a row that threads share
constexpr int64_t kFewElements = 16;         // of a segment that is sorted by insertion
constexpr int64_t kStripElements = 1 << 18;  // the largest number of elements of a strip that has several columns

template <class Key>
struct Sort {
  using Item = Composite<Key>;  // composites are compared as integers; larger ones come first

  const Problem& problem;
  const Key* x;
  Key* values;
  int32_t* indices;
  const int32_t* carried = nullptr;  // numbers in place of indices, if there are any

  Item item(const Key* row, int64_t i) const {
    return compose<Key>(static_cast<Key>(~sort_key(row[i], problem.order)), static_cast<uint32_t>(i));
  }
  // `numbers`: the carried number of the first element of the row, from which the others are `stride` apart.
  void write(const Key* row, const Item* items, int64_t begin, int64_t end, Key* to, int32_t* at,
             const int32_t* numbers, int64_t stride = 1) const {
    if (values)
      for (int64_t i = begin; i < end; ++i) to[i] = row[index_of<Key>(items[i])];
    if (carried)
      for (int64_t i = begin; i < end; ++i) at[i] = numbers[index_of<Key>(items[i]) * stride];
    else if (indices)
      for (int64_t i = begin; i < end; ++i) at[i] = index_of<Key>(items[i]);
  }

  // Sorts a row that is contiguous, with contiguous results. `items` and `scratch` have room for its elements.
  void sort_row(const Key* row, Key* to, int32_t* at, Item* items, Item* scratch, const int32_t* numbers,
                int64_t stride = 1) const {
    const int64_t n = problem.rows.length;
    for (int64_t i = 0; i < n; ++i) items[i] = item(row, i);
    sort_by_key<Key>(items, n, scratch);
    write(row, items, 0, n, to, at, numbers, stride);
  }

  // Sorts all rows, which are contiguous: `inner` is 1.
  void sort_rows(const Workers& workers) const {
    const int64_t n = problem.rows.length, rows = problem.rows.outer;
    const int64_t rows_per_task = std::max<int64_t>(1, kTaskElements / n);
    parallel_for(workers, ceil_div(rows, rows_per_task), [&](int64_t task) {
      const std::unique_ptr<Item[]> items(new Item[2 * n]);
      for (int64_t r = task * rows_per_task; r < std::min(rows, (task + 1) * rows_per_task); ++r)
        sort_row(x + r * n, values + r * n, indices + r * n, items.get(), items.get() + n, carried + r * n);
    });
  }

  // Transposes as many neighbouring columns as a cache line has, sorts them as rows and transposes the results back.
  void sort_columns(const Workers& workers) const {
    const auto [outer, n, inner] = problem.rows;
    const int64_t most = std::clamp<int64_t>(kStripElements / n, 1, 64 / static_cast<int64_t>(sizeof(Key)));
    const int64_t strips = ceil_div(inner, most);
    parallel_for(workers, outer * strips, [&](int64_t task) {
      const int64_t column = task % strips * most, width = std::min(most, inner - column);
      const int64_t first = task / strips * n * inner + column;
      const std::unique_ptr<Item[]> items(new Item[2 * n]);
      const std::unique_ptr<Key[]> rows(new Key[2 * width * n]);
      const std::unique_ptr<int32_t[]> at(new int32_t[indices ? width * n : 0]);
      Key* const to = rows.get() + width * n;
      transpose(x + first, inner, n, width, rows.get(), n);
      for (int64_t c = 0; c < width; ++c)
        sort_row(rows.get() + c * n, to + c * n, at.get() + c * n, items.get(), items.get() + n, carried + first + c,
                 inner);
      if (values) transpose(to, n, width, n, values + first, inner);
      if (indices) transpose(at.get(), n, width, n, indices + first, inner);
    });
  }

  // Sorts n elements of a row, from `first` on, with all threads. For each digit, every thread counts the elements of
  // its part of them by digit, and then moves them: the start of each digit in a part follows from the counts of the
  // parts before it.
  void sort_together(const Key* row, int64_t first, int64_t n, Key* to, int32_t* at, const int32_t* numbers,
                     const Workers& workers) const {
    const int64_t parts = std::min(workers.threads, ceil_div(n, kPartElements)), part = ceil_div(n, parts);
    const std::unique_ptr<Item[]> lists(new Item[2 * n]);
    Item *items = lists.get(), *other = lists.get() + n;
    struct Counts {
      int32_t of[256];
    };
    std::vector<Counts> counts(parts);
    const auto for_each_part = [&](auto body) {
      parallel_for(workers, parts, [&](int64_t p) { body(p, p * part, std::min(n, (p + 1) * part)); });
    };
    for_each_part([&](int64_t, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) items[i] = item(row, first + i);
    });
    for (int digit = 0; digit < static_cast<int>(sizeof(Key)); ++digit) {
      const int shift = 32 + 8 * digit;
      for_each_part([&](int64_t p, int64_t begin, int64_t end) {
        Counts own = {};
        for (int64_t i = begin; i < end; ++i) ++own.of[static_cast<uint8_t>(items[i] >> shift)];
        counts[p] = own;
      });
      int32_t start = 0;
      bool constant = false;
      for (int value = 255; value >= 0; --value) {
        const int32_t before = start;
        for (Counts& own : counts) start += std::exchange(own.of[value], start);
        constant |= start - before == n;
      }
      if (constant) continue;
      for_each_part([&](int64_t p, int64_t begin, int64_t end) {
        Counts own = counts[p];
        for (int64_t i = begin; i < end; ++i) other[own.of[static_cast<uint8_t>(items[i] >> shift)]++] = items[i];
      });
      std::swap(items, other);
    }
    for_each_part(
        [&](int64_t, int64_t begin, int64_t end) { write(row, items, begin, end, to + first, at + first, numbers); });
  }

  // Sorts the segments of all rows. If rows are few, threads share the segments of each, and all sort a long one
  // together.
  void sort_segments(const int32_t* offsets, const Workers& workers) const {
    const auto [outer, n, inner] = problem.rows;
    const int64_t count = problem.offsets;
    const bool few = outer * inner < workers.threads;
    const auto is_long = [&](int64_t size) { return few && inner == 1 && size >= 2 * kPartElements; };
    const auto sort_one_row = [&](int64_t r) {
      const int64_t o = r / inner, c = r % inner, start = o * n * inner + c;
      const Key* const row = x + start;
      const auto put = [&](int64_t place, int64_t index) {
        if (values) values[start + place * inner] = row[index * inner];
        if (indices) indices[start + place * inner] = static_cast<int32_t>(index);
      };
      std::vector<int64_t> bounds(count);
      int64_t most = 0;
      for (int64_t i = 0; i < count; ++i)
        bounds[i] = most = std::max(most, std::clamp<int64_t>(offsets[problem.offsets_at(o, i, c)], 0, n));
      for (int64_t i = 0; i < bounds.front(); ++i) put(i, i);
      for (int64_t i = most; i < n; ++i) put(i, i);
      // Parts have the segments that begin in equal stretches of the row.
      const int64_t parts = few ? ceil_div(n, kTaskElements) : 1, stretch = ceil_div(n, parts);
      parallel_for(few ? workers : Workers{}, parts, [&](int64_t part) {
        std::vector<Item> items;
        auto at = std::lower_bound(bounds.begin(), bounds.end(), part * stretch);
        for (; at < bounds.end() - 1 && *at < (part + 1) * stretch; ++at) {
          const int64_t begin = *at, size = at[1] - begin;
          if (size == 0 || is_long(size)) continue;
          if (static_cast<int64_t>(items.size()) < 2 * size) items.resize(2 * size);
          for (int64_t i = 0; i < size; ++i)
            items[i] = compose<Key>(static_cast<Key>(~sort_key(row[(begin + i) * inner], problem.order)),
                                    static_cast<uint32_t>(begin + i));
          if (size > kFewElements) {
            sort_by_key<Key>(items.data(), size, items.data() + size);
          } else {
            for (int64_t i = 1; i < size; ++i)
              for (int64_t j = i; j > 0 && items[j - 1] < items[j]; --j) std::swap(items[j - 1], items[j]);
          }
          for (int64_t i = 0; i < size; ++i) put(begin + i, index_of<Key>(items[i]));
        }
      });
      for (int64_t i = 0; i + 1 < count; ++i)
        if (const int64_t size = bounds[i + 1] - bounds[i]; is_long(size))
          sort_together(row, bounds[i], size, values + start, indices + start, nullptr, workers);
    };
    parallel_for(few ? Workers{} : workers, outer * inner, sort_one_row);
  }

  void run(const Workers& workers) const {
    const Rows& rows = problem.rows;
    if (rows.elements() == 0) return;
    if (rows.inner > 1) return sort_columns(workers);
    if (rows.outer >= workers.threads || rows.length < 2 * kPartElements) return sort_rows(workers);
    for (int64_t r = 0; r < rows.outer; ++r)
      sort_together(x + r * rows.length, 0, rows.length, values + r * rows.length, indices + r * rows.length,
                    carried + r * rows.length, workers);
  }
};

ffi::Error sort(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs carried, ffi::RemainingRets results,
                int64_t axis, bool descending, bool values, bool indices, int64_t kth) {
  return handle("jaxgpuops.sort", [&] {
    const Call call = carrying_call(x, carried, results, axis, descending, values, indices, kth);
    with_width(call.problem.key_bits / 8, [&](auto width) {
      using Key = decltype(width);
      Sort<Key>{call.problem, static_cast<const Key*>(call.x), static_cast<Key*>(call.values), call.indices,
                call.carried}
          .run(workers_of(pool));
    });
  });
}

ffi::Error sort_segments(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer offsets, ffi::RemainingRets results,
                         int64_t axis, bool descending, bool values, bool indices) {
  return handle("jaxgpuops.sort_segments", [&] {
    const Call call = segments_call(x, offsets, results, axis, descending, values, indices);
    if (call.problem.rows.elements() == 0) return;
    with_width(call.problem.key_bits / 8, [&](auto width) {
      using Key = decltype(width);
      const Sort<Key> sort{call.problem, static_cast<const Key*>(call.x), static_cast<Key*>(call.values), call.indices};
      sort.sort_segments(call.offsets, workers_of(pool));
    });
  });
}

// Sorts by the low key, and then, since sorts are stable, by the high one.
ffi::Error lexsort(ffi::ThreadPool pool, ffi::AnyBuffer high, ffi::AnyBuffer low, ffi::Result<ffi::AnyBuffer> indices,
                   int64_t axis, bool descending) {
  return handle("jaxgpuops.lexsort", [&] {
    const KeysCall call = keys_call(high, low, *indices, axis, descending);
    const auto [outer, n, inner] = call.problem.rows;
    const Workers workers = workers_of(pool);
    Problem one;
    one.rows = call.problem.rows;
    one.k = n;
    one.values = false;
    one.order = call.problem.low;
    const int64_t elements = outer * n * inner;
    const std::unique_ptr<int32_t[]> order(new int32_t[elements]);
    const std::unique_ptr<uint32_t[]> moved(new uint32_t[elements]);
    Sort<uint32_t>{one, call.low, nullptr, order.get()}.run(workers);
    parallel_for(workers, ceil_div(elements, kTaskElements), [&](int64_t task) {
      for (int64_t at = task * kTaskElements; at < std::min(elements, (task + 1) * kTaskElements); ++at)
        moved[at] = call.high[(at / (n * inner) * n + order[at]) * inner + at % inner];
    });
    one.order = call.problem.high;
    one.carries = true;
    Sort<uint32_t>{one, moved.get(), nullptr, call.indices, order.get()}.run(workers);
  });
}

XLA_FFI_DEFINE_HANDLER(kLexsort, lexsort, keys_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kSort, sort,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .RemainingArgs()        // numbers that are carried in place of indices
                           .RemainingRets()        // values, indices
                           .Attr<int64_t>("axis")
                           .Attr<bool>("descending")
                           .Attr<bool>("values")
                           .Attr<bool>("indices")
                           .Attr<int64_t>("kth"));
XLA_FFI_DEFINE_HANDLER(kSortSegments, sort_segments,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // offsets
                           .RemainingRets()        // values, indices
                           .Attr<int64_t>("axis")
                           .Attr<bool>("descending")
                           .Attr<bool>("values")
                           .Attr<bool>("indices"));

}  // namespace

std::vector<Target> cpu_targets() {
  return {{"jaxgpuops.sort", kSort}, {"jaxgpuops.sort_segments", kSortSegments}, {"jaxgpuops.lexsort", kLexsort}};
}

}  // namespace jaxgpuops::sort
