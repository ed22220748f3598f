// unique on the CPU: a hash table of the elements of a row, whose entries are sorted.
#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "search/call.h"
#include "search/cpu/loops.h"

namespace jaxgpuops::search {

void unique(const Unique& problem, const UniqueBuffers& buffers, const Workers& workers) {
  const int64_t length = problem.rows.length, size = problem.size;
  parallel_for(workers, problem.rows.outer, [&](int64_t row) {
    with_width(problem.bits / 8, [&](auto width) {
      using T = decltype(width);
      struct Equal {
        int64_t first = 0;
        int32_t count = 0, rank = 0;
      };
      const T* const x = static_cast<const T*>(buffers.x) + row * length;
      std::unordered_map<T, Equal> found;
      for (int64_t i = 0; i < length; ++i) {
        Equal& equal = found[sort_key(x[i], problem.order)];
        if (equal.count++ == 0) equal.first = i;
      }
      std::vector<std::pair<T, Equal>> all(found.begin(), found.end());
      std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      const int64_t smallest = all.empty() ? 0 : all[0].second.first;
      const auto count = static_cast<int64_t>(all.size());
      for (int64_t i = 0; problem.inverse && i < count; ++i) found[all[i].first].rank = static_cast<int32_t>(i);
      for (int64_t i = 0; problem.inverse && i < length; ++i)
        buffers.inverse[row * length + i] = found[sort_key(x[i], problem.order)].rank;
      for (int64_t i = 0; i < size; ++i) {
        const Equal own = i < count ? all[i].second : Equal{smallest};
        const bool is_fill = i >= count && problem.has_fill;
        static_cast<T*>(buffers.out)[row * size + i] =
            is_fill ? static_cast<const T*>(buffers.fill)[problem.fill(row)] : x[own.first];
        if (problem.index) buffers.index[row * size + i] = static_cast<int32_t>(own.first);
        buffers.counts[row * size + i] = own.count;
      }
    });
  });
}

}  // namespace jaxgpuops::search
