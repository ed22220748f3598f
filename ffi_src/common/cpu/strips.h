// How the CPU sees rows that are reduced: strips of neighbouring columns, cut into blocks that fit into a core's cache.
//
// Whatever inner is, a block of a strip is brought into scratch memory without gaps, position after position, and its
// elements are added up in lanes: element i in lane i % lanes, where lanes is a multiple of the strip's width, so that
// a lane has elements of one column only and the compiler vectorises over lanes. The lanes of a column are combined at
// the end of the block, the blocks at the end of the row. All of it depends on length and inner only, hence so does
// the order in which the elements of a row are added up.
//
// Short rows are turned: transposed as they come and go, those of (outer, length, inner) are the columns of a problem
// (1, length, outer inner).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "common/broadcast.h"
#include "common/cpu/parallel.h"
#include "common/rows.h"

namespace jaxgpuops {

constexpr int64_t kRowLanes = 64;             // where a strip is one column
constexpr int64_t kTurnedElements = 1 << 12;  // of a block of turned rows, but of no more columns than this:
constexpr int64_t kTurnedWidth = 1008;        // not a page
constexpr int64_t kTurnedArray = 64;          // the largest length inner that is turned where inner > 1

// The sizes that suit a job.
struct StripShape {
  int64_t turned;                   // the longest row that is turned where inner is 1; 0: none
  int64_t row_elements;             // of a block where inner is small
  int64_t column_elements;          // and where it is large: many positions of each column
  int64_t least_width, most_width;  // of strips, then: long runs of memory
  int64_t resident = 0;             // elements of a strip that a thread can keep
};

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

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
      count = (rows.inner + width - 1) / width;
      steps = length;
      blocks = 1;
      resident = true;
      return;
    }
    const int64_t inner = std::max<int64_t>(rows.inner, 1);
    elements = inner <= kRowLanes ? shape.row_elements : shape.column_elements;
    const int64_t most =
        inner <= kRowLanes ? inner : std::clamp(elements / length, shape.least_width, shape.most_width);
    count = (inner + most - 1) / most;
    width = count == 1 ? inner : round_up((inner + count - 1) / count, 16);
    count = (inner + width - 1) / width;
    steps = elements / width;
    blocks = (length + steps - 1) / steps;
    resident = blocks * elements <= shape.resident + elements;
  }

  // Lanes of a strip of this width. In turned rows each column is a lane, so that the last, narrower strip adds in the
  // same order as the others.
  static int64_t lanes(int64_t width) {
    const int64_t unit = width <= 16 ? std::lcm<int64_t>(width, 16) : width;
    return round_up(kRowLanes, unit);
  }

  // Where the element with these indices is in memory.
  int64_t at(int64_t outer, int64_t position, int64_t inner) const {
    return (outer * memory.length + position) * memory.inner + inner;
  }

  bool turned;
  Rows memory, rows;  // as they are, and as they are seen
  int64_t elements;   // of a block, at most
  int64_t width;      // columns of a strip; the last one may have fewer
  int64_t count;      // strips of an outer index
  int64_t steps;      // positions of a block
  int64_t blocks;     // of a row, at least 1
  bool resident;      // a thread can keep all blocks of a strip
};

// The rows that a thread takes at a time: a strip, or the same strip of several outer indices if a block holds that
// many rows.
struct Unit {
  int64_t outer, outers;
  int64_t inner, width;

  int64_t columns() const { return outers * width; }
  // The number of the unit's first row among all rows; the others follow it.
  int64_t first_row(const Rows& rows) const { return outer * rows.inner + inner; }
};

// Calls body(column of the unit, its outer index in memory, its inner index in memory).
template <class Body>
void for_columns(const Strips& strips, const Unit& unit, const Body& body) {
  const int64_t width = strips.turned ? strips.memory.inner : unit.width, outers = unit.columns() / width;
  const int64_t outer = strips.turned ? unit.inner / width : unit.outer, inner = strips.turned ? 0 : unit.inner;
  for (int64_t r = 0; r < outers; ++r)
    for (int64_t i = 0; i < width; ++i) body(r * width + i, outer + r, inner + i);
}

class Units {
 public:
  // No unit of several outer indices has more columns than this.
  static constexpr int64_t kMaxColumns = 1024;

  explicit Units(const Strips& strips) : strips_(strips) {
    const Rows& rows = strips.rows;
    outers_ = 1;
    if (strips.count == 1 && strips.blocks == 1) {
      const int64_t elements = round_up(std::max<int64_t>(rows.length * rows.inner, 1), 16);
      outers_ = std::max<int64_t>(std::min(strips.elements / elements, kMaxColumns / strips.width), 1);
    }
    count = (rows.outer + outers_ - 1) / outers_ * strips.count;
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

// The elements of a strip in an operand that broadcasts.
template <class T>
class StripOperand {
 public:
  StripOperand(const void* data, const Broadcast& at, const Strips& strips)
      : data_(static_cast<const T*>(data)), at_(at), strips_(strips) {}

  explicit operator bool() const { return data_; }

  // The elements at positions [first, first + steps) of the unit's columns at one outer index, without gaps: in place
  // if memory has them so, otherwise copied to `scratch`.
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

// Runs a Job over all rows, on several threads. Of a Job:
//
// - Stats(job, unit): what is known of a unit's rows; Scratch(job): of a thread.
// - partial(stats, block, scratch, keep): finds what the block says. keep: output(.., kept) of this scratch follows.
// - kTaskElements: about as many as a task takes.
// - finish(stats): all blocks are there.
// - output(stats, block, scratch, kept): writes what the block's elements become, where has_output().
template <class Job>
void run_strips(const Job& job, const Strips& strips, const Workers& workers) {
  constexpr int64_t kTaskElements = Job::kTaskElements;
  const Units units(strips);
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
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
  // Few long rows: several threads share each.
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
