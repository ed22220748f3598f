// Top-k, argmax and argmin on the CPU: how rows are divided among threads and brought into the cache. The selection
// itself is in selector.h.
#include <algorithm>
#include <memory>

#include "common/cpu/simd.h"
#include "common/rounding.h"
#include "topk/call.h"
#include "topk/cpu/selector.h"

namespace jaxgpuops::topk {
namespace {

constexpr int64_t kCacheLine = 64;           // in bytes
constexpr int64_t kTaskElements = 1 << 16;   // target number of input elements of a task of short rows
constexpr int64_t kSliceElements = 1 << 15;  // the least number of elements in a slice of a long row
constexpr int64_t kTileElements = 1 << 18;   // elements of a chunk of a strip

// Divides the work into tasks. A strip is some neighbouring columns of one outer index, read together so that every
// cache line is used whole; if the axis is the last, it is a single row. If there are few strips, each is cut into
// slices along the axis, so that all threads have work. If there are many short ones, a task takes several.
struct Cut {
  Cut(const Rows& rows, int64_t max_width, int64_t min_slice, int64_t threads) {
    width = std::min(rows.inner, max_width);
    strips_per_outer = ceil_div(rows.inner, width);
    strips = rows.outer * strips_per_outer;
    if (rows.elements() > kTaskElements && strips < 2 * threads)
      slices = std::clamp<int64_t>(rows.length / min_slice, 1, ceil_div(2 * threads, strips));
    slice_length = ceil_div(rows.length, slices);
    slices = ceil_div(rows.length, slice_length);
    strips_per_task = slices > 1 ? 1 : std::max<int64_t>(1, kTaskElements / (width * rows.length));
    tasks = ceil_div(strips, strips_per_task) * slices;
  }

  int64_t width, strips_per_outer, strips, slices = 1, slice_length, strips_per_task, tasks;
};

struct Strip {
  int64_t outer, column, width;
};

Strip strip_at(const Cut& cut, const Rows& rows, int64_t number) {
  if (rows.inner == 1) return {number, 0, 1};  // a shortcut that saves two divisions for each short row
  const int64_t column = number % cut.strips_per_outer * cut.width;
  return {number / cut.strips_per_outer, column, std::min(cut.width, rows.inner - column)};
}

// ---- top-k ----------------------------------------------------------------------------------------------------------

template <class Key>
struct Topk {
  const Problem& problem;
  const Key* x;
  Key* values;
  int32_t* indices;

  // The working memory of a thread for one strip.
  struct Desk {
    Desk(const Problem& problem, int64_t width, int64_t length, int64_t chunk) : chunk(chunk) {
      for (int64_t w = 0; w < width; ++w) selectors.emplace_back(problem.k, length, problem.order);
      scratch.reset(new Composite<Key>[selectors[0].scratch_elements()]);
      if (problem.rows.inner > 1) tile.reset(new Key[width * tile_stride()]);
    }
    // An odd number of cache lines, so that the columns of a tile do not compete for the same sets of the cache.
    int64_t tile_stride() const { return (ceil_div(chunk * sizeof(Key), kCacheLine) | 1) * kCacheLine / sizeof(Key); }

    const int64_t chunk;
    std::vector<Selector<Key>> selectors;
    std::unique_ptr<Composite<Key>[]> scratch;
    std::unique_ptr<Key[]> tile;  // a chunk of each column, one column after the other
  };

  // Offers x[begin, end) of each column of the strip to the column's selector.
  void select(const Strip& strip, int64_t begin, int64_t end, Desk& desk) const {
    const auto [outer, length, inner] = problem.rows;
    for (int64_t w = 0; w < strip.width; ++w) desk.selectors[w].reset();
    if (inner == 1)
      return desk.selectors[0].offer(x + strip.outer * length + begin, end - begin, begin, desk.scratch.get());
    const Key* from = x + strip.outer * length * inner + strip.column;
    int64_t at = begin;
    do {
      offer_chunk(from, at, std::min(desk.chunk, end - at), strip.width, desk);
      at += desk.chunk;
    } while (at < end && !filter_lines(from, at, end, strip.width, desk));
  }

  // Offers n elements of each column, copied to a tile in which each column is contiguous.
  void offer_chunk(const Key* x, int64_t first, int64_t n, int64_t width, Desk& desk) const {
    const int64_t inner = problem.rows.inner, stride = desk.tile_stride();
    for (int64_t j = 0; j < n; ++j)
      for (int64_t w = 0; w < width; ++w) desk.tile[w * stride + j] = x[(first + j) * inner + w];
    for (int64_t w = 0; w < width; ++w) desk.selectors[w].offer(&desk.tile[w * stride], n, first, desk.scratch.get());
  }

  // Once every column has a threshold, few lines have an element that reaches one, and reading x in place is faster
  // than copying it to a tile. Returns whether it did so.
  bool filter_lines(const Key* x, int64_t begin, int64_t end, int64_t width, Desk& desk) const {
    Key floors[kLine<Key>];
    if (width != kLine<Key>) return false;
    for (int64_t w = 0; w < width; ++w)
      if ((floors[w] = desk.selectors[w].floor()) == 0) return false;
    const int64_t inner = problem.rows.inner;
    uint8_t reached[kLine<Key>];
    for (int64_t at = begin; (at = find_line(x, at, end, inner, problem.order, floors, reached)) < end; ++at)
      for_each_reached(reached, width, [&](int64_t w) {
        desk.selectors[w].take(x[at * inner + w], at, desk.scratch.get());
        floors[w] = desk.selectors[w].floor();
      });
    return true;
  }

  // Writes a column of the results. `best` has its k elements in the order of their indices.
  void write(int64_t outer, int64_t column, Composite<Key>* best, Composite<Key>* scratch) const {
    const int64_t k = problem.k, inner = problem.rows.inner;
    if (problem.sorted) sort_by_key<Key>(best, k, scratch);
    for (int64_t j = 0; j < k; ++j) {
      const int64_t at = (outer * k + j) * inner + column;
      values[at] = decode(key_of<Key>(best[j]), problem.order);
      indices[at] = index_of<Key>(best[j]);
    }
  }

  void run(const Workers& workers) const {
    const Rows& rows = problem.rows;
    const int64_t k = problem.k;
    if (rows.count() == 0 || k == 0) return;
    const int64_t chunk = std::min(rows.length, Selector<Key>::seed_elements(k));
    const int64_t max_width = std::clamp<int64_t>(kTileElements / chunk, 1, kLine<Key>);
    const Cut cut(rows, max_width, std::max(kSliceElements, 8 * k), workers.threads);

    if (cut.slices == 1) {
      parallel_for(workers, cut.tasks, [&](int64_t task) {
        Desk desk(problem, cut.width, rows.length, chunk);
        const int64_t last = std::min(cut.strips, (task + 1) * cut.strips_per_task);
        for (int64_t number = task * cut.strips_per_task; number < last; ++number) {
          const Strip strip = strip_at(cut, rows, number);
          select(strip, 0, rows.length, desk);
          for (int64_t w = 0; w < strip.width; ++w)
            write(strip.outer, strip.column + w, desk.selectors[w].finish(desk.scratch.get()), desk.scratch.get());
        }
      });
      return;
    }

    // Selects the best k of each slice, then the best k of those. All lists are in the order of indices, so that ties
    // go to the lower one.
    std::vector<std::vector<Composite<Key>>> lists(rows.count() * cut.slices);
    parallel_for(workers, cut.tasks, [&](int64_t task) {
      const int64_t slice = task % cut.slices, begin = slice * cut.slice_length;
      const Strip strip = strip_at(cut, rows, task / cut.slices);
      Desk desk(problem, cut.width, cut.slice_length, chunk);
      select(strip, begin, std::min(rows.length, begin + cut.slice_length), desk);
      for (int64_t w = 0; w < strip.width; ++w) {
        const auto* best = desk.selectors[w].finish(desk.scratch.get());
        lists[(strip.outer * rows.inner + strip.column + w) * cut.slices + slice].assign(
            best, best + desk.selectors[w].size());
      }
    });
    parallel_for(workers, rows.count(), [&](int64_t row) {
      std::vector<Composite<Key>> all;
      for (int64_t slice = 0; slice < cut.slices; ++slice) {
        const auto& list = lists[row * cut.slices + slice];
        all.insert(all.end(), list.begin(), list.end());
      }
      std::vector<Composite<Key>> scratch(all.size());
      keep_best(all.data(), static_cast<int64_t>(all.size()), k, scratch.data());
      write(row / rows.inner, row % rows.inner, all.data(), scratch.data());
    });
  }
};

// ---- argmax and argmin ----------------------------------------------------------------------------------------------

// Does what encode_arg() does, but without branches, so that the compiler can vectorise its callers.
template <class Key>
JAXGPUOPS_INLINE Key encode_as(Key bits, ArgOrder arg) {
  const auto all_if = [](bool condition) { return condition ? static_cast<Key>(~Key{0}) : Key{0}; };
  const Key magnitude = static_cast<Key>(bits & static_cast<Key>(~arg.sign));
  const Key number = static_cast<Key>(bits & all_if(magnitude != 0));
  return static_cast<Key>(encode(number, arg.order) | all_if(magnitude > static_cast<Key>(arg.nan_above)));
}

// Integers need none of the rules for NaN and zeros.
template <class Key>
JAXGPUOPS_INLINE Key encode_as(Key bits, KeyOrder order) {
  return encode(bits, order);
}

template <class Key, class Order>
JAXGPUOPS_SIMD Key largest_key(const Key* x, int64_t n, Order order) {
  Key largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, encode_as(x[i], order));
  return largest;
}

// Finds the largest key of x[begin, end) and the first index that has it.
template <class Key, class Order>
void argmax_row(const Key* x, int64_t begin, int64_t end, Order order, Key* best, int32_t* index) {
  constexpr int64_t kShort = 32, kChunk = 4096;
  Key key = encode_as(x[begin], order);
  int64_t at = begin;
  if (end - begin <= kShort) {
    for (int64_t i = begin + 1; i < end; ++i) {
      const Key other = encode_as(x[i], order);
      at = other > key ? i : at;
      key = std::max(key, other);
    }
  } else {
    // Most chunks have no larger key than the chunks before, so only the maximum of a chunk is computed at first.
    for (int64_t i = begin; i < end; i += kChunk) {
      const Key largest = largest_key(x + i, std::min(kChunk, end - i), order);
      if (largest <= key) continue;
      key = largest;
      for (at = i; encode_as(x[at], order) != key;) ++at;
    }
  }
  *best = key;
  *index = static_cast<int32_t>(at);
}

// Finds the same for `width` neighbouring columns, whose rows are `stride` elements apart.
template <class Key, class Order>
JAXGPUOPS_SIMD void argmax_columns(const Key* x, int64_t begin, int64_t end, int64_t stride, int64_t width, Order order,
                                   Key* __restrict best, int32_t* __restrict index) {
  std::fill(best, best + width, Key{0});
  std::fill(index, index + width, static_cast<int32_t>(begin));
  for (int64_t j = begin; j < end; ++j)
    for (int64_t w = 0; w < width; ++w) {
      const Key key = encode_as(x[j * stride + w], order);
      const bool better = key > best[w];
      best[w] = better ? key : best[w];
      index[w] = better ? static_cast<int32_t>(j) : index[w];
    }
}

template <class Key, class Order>
void argmax_all(const Rows& rows, Order order, const Key* x, int32_t* indices, const Workers& workers) {
  const int64_t count = rows.count();
  if (count == 0) return;
  const Cut cut(rows, 16 * kLine<Key>, kSliceElements, workers.threads);
  const bool sliced = cut.slices > 1;
  std::vector<Key> slice_best(sliced ? cut.slices * count : 0);
  std::vector<int32_t> slice_index(slice_best.size());

  parallel_for(workers, cut.tasks, [&](int64_t task) {
    const int64_t slice = task % cut.slices, first = task / cut.slices * cut.strips_per_task;
    const int64_t begin = slice * cut.slice_length, end = std::min(rows.length, begin + cut.slice_length);
    std::vector<Key> unsliced_best(cut.width);
    for (int64_t number = first; number < std::min(cut.strips, first + cut.strips_per_task); ++number) {
      const Strip strip = strip_at(cut, rows, number);
      const int64_t row = strip.outer * rows.inner + strip.column;
      Key* best = sliced ? &slice_best[slice * count + row] : unsliced_best.data();
      int32_t* index = sliced ? &slice_index[slice * count + row] : indices + row;
      const Key* from = x + strip.outer * rows.length * rows.inner + strip.column;
      if (rows.inner == 1) {
        argmax_row(from, begin, end, order, best, index);
      } else {
        argmax_columns(from, begin, end, rows.inner, strip.width, order, best, index);
      }
    }
  });

  for (int64_t row = 0; sliced && row < count; ++row) {
    int64_t best = row;
    for (int64_t at = row; at < cut.slices * count; at += count)
      if (slice_best[at] > slice_best[best]) best = at;
    indices[row] = slice_index[best];
  }
}

// ---- Handlers -------------------------------------------------------------------------------------------------------

ffi::Error topk(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                ffi::Result<ffi::AnyBuffer> indices, int64_t axis, bool largest, bool sorted) {
  return handle("jaxgpuops.topk", [&] {
    const Problem problem = topk_problem(x, *values, *indices, axis, largest, sorted);
    with_width(problem.key_bits / 8, [&](auto width) {
      using Key = decltype(width);
      Topk<Key>{problem, static_cast<const Key*>(x.untyped_data()), static_cast<Key*>(values->untyped_data()),
                static_cast<int32_t*>(indices->untyped_data())}
          .run(workers_of(pool));
    });
  });
}

ffi::Error argmax(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> indices, int64_t axis,
                  bool largest) {
  return handle("jaxgpuops.argmax", [&] {
    const ArgProblem problem = argmax_problem(x, *indices, axis, largest);
    with_width(problem.key_bits / 8, [&](auto width) {
      const auto run = [&](auto order) {
        argmax_all(problem.rows, order, static_cast<const decltype(width)*>(x.untyped_data()),
                   static_cast<int32_t*>(indices->untyped_data()), workers_of(pool));
      };
      problem.order.sign ? run(problem.order) : run(problem.order.order);
    });
  });
}

XLA_FFI_DEFINE_HANDLER(kTopk, topk, topk_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kArgmax, argmax, argmax_binding<OnCpu>());

}  // namespace

std::vector<Target> cpu_targets() { return {{"jaxgpuops.topk", kTopk}, {"jaxgpuops.argmax", kArgmax}}; }

}  // namespace jaxgpuops::topk
