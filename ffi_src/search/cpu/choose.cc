// choose and pick on the CPU: what is chosen is counted in each part of a row, then the results of each part are
// written.
#include <algorithm>
#include <vector>

#include "search/call.h"
#include "search/cpu/loops.h"

namespace jaxgpuops::search {
namespace {

constexpr int64_t kPart = 1 << 16;

// is_chosen(row, i) is 1 or 0.
template <class IsChosen>
void choose_if(const Choose& problem, const ChooseBuffers& buffers, const Workers& workers, const IsChosen& is_chosen) {
  const auto [outer, length, inner] = problem.rows;
  const int64_t size = problem.size, parts = std::max<int64_t>(1, (length + kPart - 1) / kPart);
  struct Chosen {
    int64_t count = 0, last = -1;  // up to the end of a part of a row
  };
  std::vector<Chosen> chosen(outer * parts);
  const auto for_parts = [&](auto body) {
    parallel_for(workers, outer * parts, [&](int64_t task) {
      const int64_t begin = task % parts * kPart;
      body(task, task / parts, begin, std::min(begin + kPart, length));
    });
  };
  for_parts([&](int64_t task, int64_t row, int64_t begin, int64_t end) {
    int64_t count = 0;
    for (int64_t i = begin; i < end; ++i) count += is_chosen(row, i);
    chosen[task].count = count;
    if (!problem.starts) return;
    while (end > begin && !is_chosen(row, end - 1)) --end;
    if (end > begin) chosen[task].last = end - 1;
  });
  for (int64_t task = 0; task < outer * parts; ++task) {
    if (task % parts == 0) continue;
    chosen[task].count += chosen[task - 1].count;
    chosen[task].last = std::max(chosen[task].last, chosen[task - 1].last);
  }
  for_parts([&](int64_t task, int64_t row, int64_t begin, int64_t end) {
    const Chosen before = task % parts == 0 ? Chosen() : chosen[task - 1], own = chosen[task];
    const auto place_in = [&](auto* out) { return out + row * size; };
    // One more start than is wanted says how often the last element is there.
    const int64_t first = std::min(before.count, size + problem.starts);
    const int64_t stop = std::min(own.count, size + problem.starts), wanted = std::min(stop, size);
    std::vector<int32_t> list(problem.arrays ? stop - first : 0);
    int32_t* const places = problem.arrays ? list.data() : place_in(static_cast<int32_t*>(buffers.out[0])) + first;
    for (int64_t i = begin, at = first; at < stop; ++i) {
      places[at - first] = static_cast<int32_t>(i);  // the next element takes this place if this one is not chosen
      at += is_chosen(row, i);
    }
    for (int k = 0; k < std::max(problem.arrays, 1); ++k) {
      with_width(problem.bytes[k], [&](auto width) {
        using T = decltype(width);
        T* const to = place_in(static_cast<T*>(buffers.out[k]));
        const auto* const from = static_cast<const T*>(buffers.array[k]) + row * length;
        if (problem.arrays)
          for (int64_t at = first; at < wanted; ++at) to[at] = from[places[at - first]];
        if (end < length || wanted == size) return;
        int64_t fill_at = problem.fill[k](row);
        if (problem.is_row[k] && own.count > 0)
          for (int64_t i = 0; !is_chosen(row, i); ++i) ++fill_at;
        std::fill(to + wanted, to + size, static_cast<const T*>(buffers.fill[k])[fill_at]);
      });
    }
    if (!problem.starts) return;
    int32_t* const counts = place_in(buffers.counts);
    for (int64_t at = std::max<int64_t>(first, 1), last = before.last; at < stop; ++at) {
      counts[at - 1] = static_cast<int32_t>(places[at - first] - (at > first ? places[at - first - 1] : last));
    }
    if (end < length) return;
    std::fill(counts + wanted, counts + size, 0);
    if (own.count > 0 && own.count <= size) counts[own.count - 1] = static_cast<int32_t>(length - own.last);
  });
}

}  // namespace

void choose(const Choose& problem, const ChooseBuffers& buffers, const Workers& workers) {
  const int64_t length = problem.rows.length;
  if (!problem.starts) {
    const auto* const mask = static_cast<const uint8_t*>(buffers.x);
    choose_if(problem, buffers, workers, [=](int64_t row, int64_t i) { return mask[row * length + i]; });
    return;
  }
  with_width(problem.bits / 8, [&](auto width) {
    const auto* const elements = static_cast<const decltype(width)*>(buffers.x);
    choose_if(problem, buffers, workers, [=, &problem](int64_t row, int64_t i) {
      const auto* const at = elements + row * length + i;
      return i == 0 || sort_key(at[-1], problem.order) != sort_key(at[0], problem.order);
    });
  });
}

}  // namespace jaxgpuops::search
