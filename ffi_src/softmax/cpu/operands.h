// The parts that forward.cc and tangent.cc share: how the rows of a call are cut into blocks, and how blocks are
// loaded, summed and stored.
#pragma once

#include <tuple>
#include <type_traits>

#include "common/cpu/transpose.h"
#include "softmax/cpu/kernels.h"
#include "softmax/softmax.h"

namespace jaxgpuops::softmax::cpu {

// The type in which elements of a format are computed.
template <class Format>
using Computed = std::conditional_t<std::is_same_v<Format, Whole<double>>, double, float>;

// Returns how the rows of a call are cut into strips and blocks.
inline Strips strips_of(const Problem& problem) {
  StripShape shape = kShape;
  if (problem.op == Op::kCrossEntropy || problem.op == Op::kCrossEntropyGrad) shape.turned = kTurnedEntropy;
  // a causal mask gives each row its own number of elements, so rows are not transposed
  if (problem.queries != 0) shape.turned = 0;
  return Strips(problem.rows, shape);
}

// How many positions of the block a causal mask leaves visible to the rows of this outer index.
inline int64_t visible_steps(const Problem& problem, int64_t outer, int64_t first, int64_t steps) {
  if (problem.queries == 0) return steps;
  return std::clamp<int64_t>(outer / problem.query_stride % problem.queries + 1 - first, 0, steps);
}

// factor * scale of each row of a unit.
template <class C>
std::vector<C> multipliers(const Problem& problem, const Buffers& buffers, const Strips& strips, const Unit& unit) {
  std::vector<C> result(unit.columns(), static_cast<C>(problem.factor));
  const C* scale = static_cast<const C*>(buffers.scale);
  if (scale)
    for_columns(strips, unit, [&](int64_t c, int64_t o, int64_t i) { result[c] *= scale[problem.scale(o, 0, i)]; });
  return result;
}

// One number for each column, repeated until `lanes` numbers are filled.
template <class C>
struct Lanes {
  const C* spread(const C* from, int64_t width, int64_t lanes) {
    for (int64_t at = 0; at < lanes; at += width) std::copy(from, from + width, value + at);
    return value;
  }
  C value[kMaxLanes];
};

// Where a block is in memory and in scratch memory. In scratch memory, outer indices are `stride` elements apart.
struct Place {
  Place(const Strips& strips, const Unit& unit, int64_t block)
      : unit(unit),
        rows(strips.rows),
        turned(strips.turned),
        run(strips.memory.inner),
        lanes(turned ? unit.width : Strips::lanes(unit.width)) {
    first = block * strips.steps;
    steps = std::min(strips.steps, rows.length - first);
    stride = round_up(steps * unit.width, 16);
    origin = turned ? unit.inner * rows.length : strips.at(unit.outer, first, unit.inner);
  }

  bool dense() const { return !turned && unit.width == rows.inner; }
  bool single() const { return !turned && unit.width == 1; }
  int64_t offset(int64_t r) const { return origin + r * rows.length * rows.inner; }

  const Unit& unit;
  const Rows& rows;
  bool turned;
  int64_t run;  // if turned, the number of columns that are neighbours in memory
  int64_t lanes, first, steps, stride, origin;
};

// Copies the first `visible` positions of the block, for outer index r, to scratch memory.
template <class Format, class C>
void load_block(const void* data, const Place& place, int64_t r, int64_t visible, C* to) {
  const auto* from = static_cast<const typename Format::Bits*>(data) + place.offset(r);
  const int64_t width = place.unit.width;
  if (place.dense()) return decode_rows<Format>(from, 0, 1, visible * width, to, 0);
  decode_rows<Format>(from, place.rows.inner, visible, width, to, width);
}

// Copies the whole block, for all outer indices of the unit, to scratch memory.
template <class Format, class C>
void load_blocks(const void* data, const Place& place, C* to) {
  if (place.turned) {
    using Bits = typename Format::Bits;
    const auto* from = static_cast<const Bits*>(data) + place.offset(0);
    const int64_t width = place.unit.width;
    const int64_t stride = place.steps * place.run, outers = width / place.run;
    if constexpr (std::is_same_v<Bits, C>) return transpose(from, stride, outers, place.steps, place.run, to, width);
    Bits columns[kTurnedElements];
    transpose(from, stride, outers, place.steps, place.run, columns, width);
    return decode_rows<Format>(columns, 0, 1, place.steps * width, to, 0);
  }
  if (!place.dense()) return load_block<Format>(data, place, 0, place.steps, to);
  const auto* from = static_cast<const typename Format::Bits*>(data) + place.offset(0);
  decode_rows<Format>(from, place.rows.length * place.rows.inner, place.unit.outers, place.steps * place.unit.width, to,
                      place.stride);
}

// Writes the results of the block. Each of `of_column` has one coefficient for each column; outer index r has count[r]
// elements.
template <class Format, class Result, class C, class... Number>
void store_block(const C* z, const C* y, const Place& place, const int64_t* count, void* data,
                 const Number*... of_column) {
  auto* to = static_cast<typename Format::Bits*>(data) + place.offset(0);
  const int64_t width = place.unit.width, outer_stride = place.rows.length * place.rows.inner;
  if (place.single() && place.dense())
    return store_rows<Format, Result>(z, y, {place.unit.outers, place.stride, count}, to, outer_stride, of_column...);
  Lanes<C> lanes[sizeof...(Number)];
  for (int64_t r = 0; r < place.unit.outers; ++r) {
    const C *x = z + r * place.stride, *x2 = y + r * place.stride;
    const auto store = [&](const auto*... of_lane) {
      if (place.turned) {
        typename Format::Bits columns[kTurnedElements];
        store_columns<Format, Result>(x, x2, 1, count[r], place.lanes, columns, 0, of_lane...);
        transpose(columns, width, place.steps, width / place.run, place.run, to, place.steps * place.run);
      } else if (place.dense()) {
        store_columns<Format, Result>(x, x2, 1, count[r], place.lanes, to + r * outer_stride, 0, of_lane...);
      } else {
        store_columns<Format, Result>(x, x2, count[r] / width, width, place.lanes, to, place.rows.inner, of_lane...);
      }
    };
    Lanes<C>* next = lanes;
    const auto spread = [&](const C* numbers) { return next++->spread(numbers + r * width, width, place.lanes); };
    std::apply(store, std::tuple{spread(of_column)...});
  }
}

// Sums each Term over the block, separately for each column. m may be null. in_memory says that z is read in place, so
// that the next block is worth a prefetch.
template <bool kKeep, class... Term, class C>
void sum_block(const C* z, const C* y, const Place& place, const int64_t* count, const C* m, C* terms,
               C* const (&result)[sizeof...(Term)], bool in_memory = false) {
  const int64_t width = place.unit.width, next = (place.unit.outers - 1) * place.stride + place.steps * width;
  const int64_t ahead = in_memory ? next : 0;
  if (place.single())
    return sum_rows<kKeep, Term...>(z, y, {place.unit.outers, place.stride, count}, m, terms, result, ahead);
  Lanes<C> maximum;
  if (!m) std::fill(maximum.value, maximum.value + place.lanes, C(0));
  for (int64_t r = 0; r < place.unit.outers; ++r) {
    const int64_t at = r * place.stride;
    if (m) maximum.spread(m + r * width, width, place.lanes);
    sum_columns<kKeep, Term...>(z + at, y + at, count[r], width, place.lanes, maximum.value, terms + at, result,
                                r * width, ahead);
  }
}

// Sets the elements of the block from position `visible` on, for outer index r.
template <class Bits>
void fill_from(Bits* data, const Place& place, int64_t r, int64_t visible, Bits value) {
  Bits* to = data + place.offset(r);
  for (int64_t p = visible; p < place.steps; ++p)
    std::fill(to + p * place.rows.inner, to + p * place.rows.inner + place.unit.width, value);
}

}  // namespace jaxgpuops::softmax::cpu
