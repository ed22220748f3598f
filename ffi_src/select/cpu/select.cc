// select on the CPU: the elements of a row are counted by the highest digit of their keys; the digit of a rank follows,
// and `std::nth_element` finds the rank's element among those with that digit.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/cpu/narrow_float.h"
#include "common/rounding.h"
#include "select/call.h"
#include "select/cpu/loops.h"
#include "select/quantile.h"

namespace jaxgpuops::select {
namespace {

constexpr int64_t kTaskElements = 1 << 15, kTile = 16;  // columns that are copied together

template <class Key>
struct Row {
  static constexpr int kBits = 8 * sizeof(Key);
  int digit_bits = 0;
  std::vector<Key> keys;
  std::vector<int64_t> ends;   // for each digit: how many elements have it or a lower one
  std::vector<int32_t> slots;  // for each digit: its slot if it is chosen, else 0
  // Where each slot begins in `some`, and where its next element goes; slot 0 is one last place, for all others.
  std::vector<int64_t> begins, places;
  std::vector<std::pair<Key, int32_t>> some;  // the elements whose digit is chosen

  explicit Row(int64_t length)
      : digit_bits(std::min(kBits, length < 1 << 14 ? 10 : 12)), keys(length), ends(int64_t{1} << digit_bits) {}

  int64_t digit(Key key) const { return static_cast<int64_t>(key >> (kBits - digit_bits)); }
  int64_t digit_of(int64_t rank) const { return std::upper_bound(ends.begin(), ends.end(), rank) - ends.begin(); }
  int64_t begin_of(int64_t digit) const { return digit ? ends[digit - 1] : 0; }

  template <class RankOf>
  void choose(int64_t ranks, const RankOf& rank_of) {
    std::fill(ends.begin(), ends.end(), 0);
    for (const Key key : keys) ++ends[digit(key)];
    std::partial_sum(ends.begin(), ends.end(), ends.begin());
    slots.assign(ends.size(), 0);
    begins.assign(1, 0);
    int64_t total = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      const int64_t wanted = digit_of(rank_of(r));
      if (slots[wanted]) continue;
      slots[wanted] = static_cast<int32_t>(begins.size());
      begins.push_back(total);
      total += ends[wanted] - begin_of(wanted);
    }
    some.resize(total + 1);
    begins[0] = total;
    places = begins;
    const auto length = static_cast<int32_t>(keys.size());
    for (int32_t j = 0; j < length; ++j) {
      const int32_t slot = slots[digit(keys[j])];
      some[places[slot]] = {keys[j], j};
      places[slot] += slot != 0;
    }
  }

  // The index of the element of a rank, which must be one of those whose digits were chosen.
  int32_t find(int64_t rank) {
    const int64_t wanted = digit_of(rank), slot = slots[wanted];
    const auto first = some.begin() + begins[slot];
    // Pairs compare by index where keys are equal.
    std::nth_element(first, first + (rank - begin_of(wanted)), some.begin() + places[slot]);
    return first[rank - begin_of(wanted)].second;
  }
};

// Calls `visit(outer, column, at)` for each row, with the numbers of the elements of its ranks.
template <class T, class Visit>
void for_rows(const Select& problem, const T* x, const int32_t* ranks, const Workers& workers, const Visit& visit) {
  const Rows& rows = problem.rows;
  if (rows.count() == 0 || problem.count == 0) return;
  const int64_t inner = rows.inner, tile = std::min(inner, kTile), tiles = ceil_div(inner, tile);
  const int64_t units = rows.outer * tiles, each = std::max<int64_t>(1, kTaskElements / (rows.length * tile));
  parallel_for(workers, ceil_div(units, each), [&](int64_t task) {
    std::vector<Row<T>> own(tile, Row<T>(rows.length));
    std::vector<int32_t> at(problem.count);
    for (int64_t unit = task * each; unit < std::min(units, (task + 1) * each); ++unit) {
      const int64_t o = unit / tiles, first = unit % tiles * tile, columns = std::min(tile, inner - first);
      const T* from = x + o * rows.length * inner + first;
      for (int64_t j = 0; j < rows.length; ++j)
        for (int64_t c = 0; c < columns; ++c) own[c].keys[j] = sort_key(from[j * inner + c], problem.order);
      for (int64_t c = 0; c < columns; ++c) {
        const auto rank_of = [&](int64_t r) { return problem.rank_of(ranks[problem.ranks(o, r, first + c)]); };
        own[c].choose(problem.count, rank_of);
        for (int64_t r = 0; r < problem.count; ++r) at[r] = own[c].find(rank_of(r));
        visit(o, first + c, at.data());
      }
    }
  });
}

}  // namespace

void select(const Select& problem, const void* x_, const int32_t* ranks, void* values_, int32_t* indices,
            const Workers& workers) {
  const auto [outer, length, inner] = problem.rows;
  with_width(problem.bits / 8, [&](auto width) {
    using T = decltype(width);
    const auto* x = static_cast<const T*>(x_);
    auto* values = static_cast<T*>(values_);
    for_rows(problem, x, ranks, workers, [&](int64_t o, int64_t column, const int32_t* at) {
      for (int64_t r = 0; r < problem.count; ++r) {
        const int64_t to = (o * problem.count + r) * inner + column;
        values[to] = x[(o * length + at[r]) * inner + column];
        indices[to] = at[r];
      }
    });
  });
}

void quantile(const Select& problem, int64_t beside, const void* x_, const int32_t* ranks, const void* shares_,
              void* out_, const Workers& workers) {
  const auto [outer, length, inner] = problem.rows;
  with_format(problem.dtype, [&](auto format) {
    using Format = decltype(format);
    using Bits = typename Format::Bits;
    using Number = decltype(Format::decode(Bits{}));
    using T =
        std::conditional_t<sizeof(Bits) == 8, uint64_t, std::conditional_t<sizeof(Bits) == 4, uint32_t, uint16_t>>;
    const auto* x = static_cast<const Bits*>(x_);
    const auto* shares = static_cast<const Number*>(shares_);
    auto* out = static_cast<Bits*>(out_);
    for_rows(problem, static_cast<const T*>(x_), ranks, workers, [&](int64_t o, int64_t column, const int32_t* at) {
      const auto number = [&](int64_t r) { return Format::decode(x[(o * length + at[r]) * inner + column]); };
      const auto rank = [&](int64_t r) { return problem.rank_of(ranks[problem.ranks(o, r, column)]); };
      const Number last = number(problem.count - 1);
      for (int64_t j = 0; j < problem.quantiles; ++j) {
        const Number share = shares[problem.shares(o, j, column)], low = number(j);
        const int64_t upper = problem.upper(j);
        Number y = rank(j) == rank(upper) ? low : number_between(low, number(upper), share, problem.midpoint);
        if (std::isnan(last) || std::isnan(share)) y = std::numeric_limits<Number>::quiet_NaN();
        out[quantile_at(o * inner + column, j, problem.quantiles, beside)] = Format::encode(y);
      }
    });
  });
}

}  // namespace jaxgpuops::select
