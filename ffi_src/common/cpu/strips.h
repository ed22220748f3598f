// How the CPU divides rows that are reduced: into strips of neighbouring columns, and these into blocks that fit into a
// core's cache.
//
// For any `inner`, a block of a strip is read into scratch memory without gaps, position after position, and its
// elements are added in lanes: element i in lane i % lanes. The number of lanes is a multiple of the strip's width, so
// that a lane has elements of one column only, and the compiler vectorises over lanes. The lanes of a column are
// combined at the end of the block, and the blocks at the end of the row. The division depends on length and inner
// only, so the order in which the elements of a row are added does too.
//
// Short rows are turned, that is transposed when they are loaded and stored: the rows of a problem (outer, length,
// inner) become the columns of a problem (1, length, outer * inner).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "common/broadcast.h"
#include "common/cpu/parallel.h"
#include "common/rounding.h"
#include "common/rows.h"

namespace jaxgpuops {

constexpr int64_t kRowLanes = 64;             // lanes of a strip that is one column
constexpr int64_t kTurnedElements = 1 << 12;  // elements of a block of turned rows
// The most columns of such a block: less than 1024, at which positions of float32 would be a 4 KiB page apart.
constexpr int64_t kTurnedWidth = 1008;
constexpr int64_t kTurnedArray = 64;  // the largest length * inner that is turned if inner > 1

// The sizes that suit a job: elements of blocks and columns of strips.
struct StripShape {
  int64_t turned;                   // the longest row that is turned if inner is 1; 0: no row is turned
  int64_t row_elements;             // elements of a block if inner is at most kRowLanes
  int64_t column_elements;          // elements of a block otherwise: many positions of each column
  int64_t least_width, most_width;  // columns of a strip if inner is larger: enough for long contiguous reads
  int64_t resident = 0;             // elements of a strip that a thread can keep
};

struct Strips {
  Strips(const Rows& memory, const StripShape& shape)
      : turned(memory.elements() > 0 && shape.turned > 0 &&
               memory.length * memory.inner <= (memory.inner == 1 ? shape.turned : kTurnedArray)),
        memory(memory),
        rows(turned ? Rows{1, memory.length, memory.count()} : memory) {
    const int64_t length = std::max<int64_t>(rows.length, 1);
    if (turned) {
      elements = kTurnedElements;
      width = std::min(elements / length / 16 * 16, kTurnedWidth) / memory.inner * memory.inner;
      count = ceil_div(rows.inner, width);
      steps = length;
      blocks = 1;
      resident = true;
      return;
    }
    const int64_t inner = std::max<int64_t>(rows.inner, 1);
    elements = inner <= kRowLanes ? shape.row_elements : shape.column_elements;
    const int64_t most =
        inner <= kRowLanes ? inner : std::clamp(elements / length, shape.least_width, shape.most_width);
    count = ceil_div(inner, most);
    width = count == 1 ? inner : round_up(ceil_div(inner, count), 16);
    count = ceil_div(inner, width);
    steps = elements / width;
    blocks = ceil_div(length, steps);
    resident = blocks * elements <= shape.resident + elements;
  }

  // Returns the number of lanes of a strip of this width. It does not apply to turned rows: there each column is a
  // lane, so that the last, narrower strip adds in the same order as the others.
  static int64_t lanes(int64_t width) {
    const int64_t unit = width <= 16 ? std::lcm<int64_t>(width, 16) : width;
    return round_up(kRowLanes, unit);
  }

  // Returns the offset in memory of the element with these indices.
  int64_t at(int64_t outer, int64_t position, int64_t inner) const {
    return (outer * memory.length + position) * memory.inner + inner;
  }

  bool turned;
  Rows memory, rows;  // the problem, and the problem as it is divided (transposed if turned)
  int64_t elements;   // elements of a block, at most
  int64_t width;      // columns of a strip; the last strip of an outer index may have fewer
  int64_t count;      // strips of an outer index
  int64_t steps;      // positions along the axis that a block has
  int64_t blocks;     // blocks of a row, at least 1
  bool resident;      // whether a thread can keep all blocks of a strip
};

// The rows that a thread takes at a time: a strip or, if all rows of an outer index fit into a block, several outer
// indices.
struct Unit {
  int64_t outer, outers;
  int64_t inner, width;

  int64_t columns() const { return outers * width; }
  // Returns the number of the unit's first row among all rows; the unit's other rows follow it.
  int64_t first_row(const Rows& rows) const { return outer * rows.inner + inner; }
};

// For each column of the unit, calls body(column, outer, inner) with the column's outer and inner index in memory.
template <class Body>
void for_columns(const Strips& strips, const Unit& unit, const Body& body) {
  const int64_t width = strips.turned ? strips.memory.inner : unit.width, outers = unit.columns() / width;
  const int64_t outer = strips.turned ? unit.inner / width : unit.outer, inner = strips.turned ? 0 : unit.inner;
  for (int64_t r = 0; r < outers; ++r)
    for (int64_t i = 0; i < width; ++i) body(r * width + i, outer + r, inner + i);
}

class Units {
 public:
  // The most columns of a unit that has several outer indices.
  static constexpr int64_t kMaxColumns = 1024;

  explicit Units(const Strips& strips) : strips_(strips) {
    const Rows& rows = strips.rows;
    outers_ = 1;
    if (strips.count == 1 && strips.blocks == 1) {
      const int64_t elements = round_up(std::max<int64_t>(rows.length * rows.inner, 1), 16);
      outers_ = std::max<int64_t>(std::min(strips.elements / elements, kMaxColumns / strips.width), 1);
    }
    count = ceil_div(rows.outer, outers_) * strips.count;
  }

  Unit operator[](int64_t index) const {
    Unit unit;
    unit.outer = index / strips_.count * outers_;
    unit.outers = std::min(outers_, strips_.rows.outer - unit.outer);
    unit.inner = index % strips_.count * strips_.width;
    unit.width = std::min(strips_.width, strips_.rows.inner - unit.inner);
    return unit;
  }

  int64_t count;

 private:
  Strips strips_;
  int64_t outers_;
};

// Reads the elements of a strip from an operand that broadcasts.
template <class T>
class StripOperand {
 public:
  StripOperand(const void* data, const Broadcast& at, const Strips& strips)
      : data_(static_cast<const T*>(data)), at_(at), strips_(strips) {}

  explicit operator bool() const { return data_; }

  // Returns the elements at positions [first, first + steps) of the unit's columns at one outer index, without gaps: a
  // pointer into the operand if it stores them so, otherwise a copy in `scratch`.
  const T* block(const Unit& unit, int64_t outer, int64_t first, int64_t steps, T* scratch) {
    bind(unit);
    const T* from = data_ + at_.outer(outer) + first * at_.axis_stride;
    const int64_t width = unit.width;
    if (neighbours_ && at_.axis_stride == width) return from + offset_[0];
    if (constant_ && at_.axis_stride == 0) {
      std::fill(scratch, scratch + steps * width, from[offset_[0]]);
      return scratch;
    }
    for (int64_t p = 0; p < steps; ++p, from += at_.axis_stride) {
      T* to = scratch + p * width;
      if (neighbours_) {
        std::copy(from + offset_[0], from + offset_[0] + width, to);
      } else if (constant_) {
        std::fill(to, to + width, from[offset_[0]]);
      } else {
        for (int64_t i = 0; i < width; ++i) to[i] = from[offset_[i]];
      }
    }
    return scratch;
  }

 private:
  void bind(const Unit& unit) {
    if (unit.inner == inner_ && static_cast<int64_t>(offset_.size()) == unit.width) return;
    inner_ = unit.inner;
    offset_.resize(unit.width);
    neighbours_ = constant_ = true;
    const bool turned = strips_.turned;
    if (turned) for_columns(strips_, unit, [&](int64_t c, int64_t o, int64_t i) { offset_[c] = at_(o, 0, i); });
    for (int64_t i = 0; i < unit.width; ++i) {
      if (!turned) offset_[i] = at_.inner(unit.inner + i);
      neighbours_ &= offset_[i] == offset_[0] + i;
      constant_ &= offset_[i] == offset_[0];
    }
  }

  const T* data_;
  const Broadcast& at_;
  const Strips& strips_;
  int64_t inner_ = -1;
  std::vector<int64_t> offset_;
  bool neighbours_ = false, constant_ = false;
};

// Runs a Job over all rows, on several threads. A Job has these members:
//
// - Stats(job, unit): the statistics of a unit's rows.
// - Scratch(job): the working memory of a thread.
// - partial(stats, block, scratch, keep): computes the statistics of a block. `keep` promises that output() follows,
//   with the same scratch and kept = true.
// - kTaskElements: the target number of elements of a task.
// - finish(stats): merges the statistics of all blocks.
// - has_output(), output(stats, block, scratch, kept): writes the results of a block's elements.
template <class Job>
void run_strips(const Job& job, const Strips& strips, const Workers& workers) {
  constexpr int64_t kTaskElements = Job::kTaskElements;
  const Units units(strips);
  if (strips.blocks == 1 || units.count >= 4 * workers.threads) {
    const int64_t elements = std::max<int64_t>(strips.rows.elements() / std::max<int64_t>(units.count, 1), 1);
    const int64_t share = std::max<int64_t>(kTaskElements / elements, 1);
    parallel_for(workers, ceil_div(units.count, share), [&](int64_t task) {
      typename Job::Scratch scratch(job);
      for (int64_t i = task * share; i < std::min((task + 1) * share, units.count); ++i) {
        typename Job::Stats stats(job, units[i]);
        for (int64_t b = 0; b < strips.blocks; ++b) job.partial(stats, b, scratch, true);
        job.finish(stats);
        if (job.has_output())
          for (int64_t b = 0; b < strips.blocks; ++b) job.output(stats, b, scratch, true);
      }
    });
    return;
  }
  // There are a few long rows, and several threads share each.
  std::vector<typename Job::Stats> stats;
  stats.reserve(units.count);
  for (int64_t i = 0; i < units.count; ++i) stats.emplace_back(job, units[i]);
  const int64_t share = std::max<int64_t>(kTaskElements / strips.elements, 1), shares = ceil_div(strips.blocks, share);
  const auto for_blocks = [&](const auto& body) {
    parallel_for(workers, units.count * shares, [&](int64_t task) {
      typename Job::Scratch scratch(job);
      const int64_t first = task % shares * share, last = std::min(first + share, strips.blocks);
      for (int64_t b = first; b < last; ++b) body(stats[task / shares], b, scratch);
    });
  };
  for_blocks([&](auto& unit, int64_t b, auto& scratch) { job.partial(unit, b, scratch, false); });
  for (auto& unit : stats) job.finish(unit);
  if (job.has_output()) for_blocks([&](auto& unit, int64_t b, auto& scratch) { job.output(unit, b, scratch, false); });
}

}  // namespace jaxgpuops
