// choose on the CPU: the elements of each part of a row are counted, then the places of each part are written.
#include <algorithm>
#include <numeric>
#include <vector>

#include "count/call.h"
#include "count/cpu/loops.h"

namespace jaxgpuops::count {
namespace {

constexpr int64_t kPart = 1 << 16;

// is_chosen(row, i) is 1 or 0.
template <class IsChosen>
void choose_if(const Choose& problem, const int32_t* fill, int32_t* places, const Workers& workers,
               const IsChosen& is_chosen) {
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
    int64_t count = 0;
    for (int64_t i = begin; i < end; ++i) count += is_chosen(row, i);
    counts[task] = count;
  });
  for (int64_t row = 0; row < outer; ++row)
    std::partial_sum(counts.begin() + row * parts, counts.begin() + (row + 1) * parts, counts.begin() + row * parts);
  for_parts([&](int64_t task, int64_t row, int64_t begin, int64_t end) {
    int32_t* const to = places + row * size;
    const int64_t stop = std::min(counts[task], size);
    int64_t at = task % parts == 0 ? 0 : counts[task - 1];
    for (int64_t i = begin; at < stop; ++i) {
      to[at] = static_cast<int32_t>(i);  // the next element takes this place if this one is not chosen
      at += is_chosen(row, i);
    }
    if (end == length) std::fill(to + stop, to + size, fill[problem.fill(row)]);
  });
}

}  // namespace

void choose(const Choose& problem, const void* x, const int32_t* fill, int32_t* places, const Workers& workers) {
  const int64_t length = problem.rows.length;
  if (!problem.starts) {
    const auto* const mask = static_cast<const uint8_t*>(x);
    choose_if(problem, fill, places, workers, [=](int64_t row, int64_t i) { return mask[row * length + i]; });
    return;
  }
  with_width(problem.bits / 8, [&](auto width) {
    const auto* const elements = static_cast<const decltype(width)*>(x);
    choose_if(problem, fill, places, workers, [=, &problem](int64_t row, int64_t i) {
      const auto* const at = elements + row * length + i;
      return i == 0 || sort_key(at[-1], problem.order) != sort_key(at[0], problem.order);
    });
  });
}

}  // namespace jaxgpuops::count
