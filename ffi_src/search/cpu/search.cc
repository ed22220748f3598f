// searchsorted on the CPU: a binary search for each query.
#include <algorithm>

#include "search/call.h"
#include "search/cpu/loops.h"

namespace jaxgpuops::search {
namespace {

constexpr int64_t kTaskQueries = 1 << 12;
constexpr int kTogether = 16;  // searches that advance together, so that their waits for memory overlap

// All searches in rows of one length take the same steps, without branches. A search's result is in [first, first +
// left].
template <class T>
void search_range(const Search& problem, const T* queries, const T* sorted, int32_t* places, int64_t begin,
                  int64_t end) {
  const int64_t inner = problem.rows.inner, size = problem.rows.length * inner, stride = problem.sorted.axis_stride;
  for (; begin < end; begin += kTogether) {
    const int count = static_cast<int>(std::min<int64_t>(kTogether, end - begin));
    const T* row[kTogether];
    T key[kTogether];
    int64_t first[kTogether] = {};
    for (int q = 0; q < count; ++q) {
      const int64_t at = begin + q, outer = at / size;
      row[q] = sorted + problem.sorted(outer, 0, inner == 1 ? 0 : (at - outer * size) % inner);
      key[q] = sort_key(queries[at], problem.order);
    }
    int64_t left = problem.length;
    while (left > 1) {
      const int64_t half = left / 2;
      for (int q = 0; q < count; ++q)
        first[q] += problem.before(row[q][(first[q] + half - 1) * stride], key[q]) ? half : 0;
      left -= half;
    }
    for (int q = 0; q < count; ++q)
      places[begin + q] =
          static_cast<int32_t>(first[q] + (left == 1 && problem.before(row[q][first[q] * stride], key[q])));
  }
}

}  // namespace

void search(const Search& problem, const void* queries, const void* sorted, int32_t* places, const Workers& workers) {
  const int64_t count = problem.rows.elements();
  with_width(problem.bits / 8, [&](auto width) {
    using T = decltype(width);
    parallel_for(workers, (count + kTaskQueries - 1) / kTaskQueries, [&](int64_t task) {
      search_range(problem, static_cast<const T*>(queries), static_cast<const T*>(sorted), places, task * kTaskQueries,
                   std::min(count, (task + 1) * kTaskQueries));
    });
  });
}

}  // namespace jaxgpuops::search
