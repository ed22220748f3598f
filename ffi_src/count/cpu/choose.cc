// choose on the CPU: the elements of each part of a row are counted, then the places of each part are written.
#include <algorithm>
#include <numeric>
#include <vector>

#include "count/cpu/loops.h"

namespace jaxgpuops::count {
namespace {

constexpr int64_t kPart = 1 << 16;

}  // namespace

void choose(const Choose& problem, const uint8_t* mask, int32_t* places, const Workers& workers) {
  const auto [outer, length, inner] = problem.rows;
  const int64_t size = problem.size, parts = std::max<int64_t>(1, (length + kPart - 1) / kPart);
  std::vector<int64_t> counts(outer * parts);
  const auto for_parts = [&](auto body) {
    parallel_for(workers, outer * parts, [&](int64_t task) {
      const int64_t begin = task % parts * kPart;
      body(task, task / parts, begin, std::min(begin + kPart, length));
    });
  };
  for_parts([&](int64_t task, int64_t row, int64_t begin, int64_t end) {
    counts[task] = std::accumulate(mask + row * length + begin, mask + row * length + end, int64_t{0});
  });
  for (int64_t row = 0; row < outer; ++row)
    std::partial_sum(counts.begin() + row * parts, counts.begin() + (row + 1) * parts, counts.begin() + row * parts);
  for_parts([&](int64_t task, int64_t row, int64_t begin, int64_t end) {
    const uint8_t* const own = mask + row * length;
    int32_t* const to = places + row * size;
    const int64_t stop = std::min(counts[task], size);
    int64_t at = task % parts == 0 ? 0 : counts[task - 1];
    for (int64_t i = begin; at < stop; ++i) {
      to[at] = static_cast<int32_t>(i);  // the next element takes this place if this one is not chosen
      at += own[i];
    }
    if (end == length) std::fill(to + stop, to + size, static_cast<int32_t>(length));
  });
}

}  // namespace jaxgpuops::count
