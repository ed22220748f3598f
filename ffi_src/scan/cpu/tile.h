// Tiles: how the CPU scans see memory.
//
// Rows are scanned side by side, in lanes, so that the compiler can vectorise any recurrence. A tile is some steps of
// each lane. It is brought into a plane of scratch memory, step by step and all lanes of a step together, converted to
// the type that is computed with; the results go back the same way. Lanes are
//   columns: neighbouring inner indices, where inner is large
//   rows:    all inner indices of neighbouring outer indices, where rows are short
//   parts:   the parts of a chunk of one long row (or of a few columns)
// Positions along the axis are counted in the direction of the scan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/cpu/simd.h"
#include "scan/scan.h"

namespace jaxgpuops::scan::cpu {

constexpr int64_t kMaxLanes = 512;
constexpr int64_t kTileElements = 1024;
// A plane has a step more before and after the tile; planes are not a multiple of a page apart.
constexpr int64_t kPlane = kTileElements + 2 * kMaxLanes + 64;

template <class T>
struct Complex {
  T re, im;
  Complex() = default;
  JAXGPUOPS_INLINE Complex(T re, T im = 0) : re(re), im(im) {}
  friend JAXGPUOPS_INLINE Complex operator+(Complex a, Complex b) { return {a.re + b.re, a.im + b.im}; }
  friend JAXGPUOPS_INLINE Complex operator*(Complex a, Complex b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
  friend JAXGPUOPS_INLINE bool operator==(Complex a, Complex b) { return a.re == b.re && a.im == b.im; }
  friend JAXGPUOPS_INLINE bool operator!=(Complex a, Complex b) { return !(a == b); }
};

// Which rows the lanes of a strip are: runs of neighbouring inner indices, one run after the other of the next outer
// index, or of the next part of the same rows.
struct Lanes {
  int64_t count = 0, run = 1;
  int64_t outer = 0, inner = 0;  // of the first
  bool parts = false;

  int64_t outer_of(int64_t w) const { return outer + (parts ? 0 : w / run); }
  int64_t inner_of(int64_t w) const { return inner + w % run; }
};

struct Tile {
  int64_t lanes, run, steps;
  int64_t length;      // of the axis
  int64_t first;       // the position of the first lane's first step
  int64_t spread = 0;  // positions from a part to the next; 0 where there are no parts

  int64_t position(int64_t w) const { return spread == 0 ? first : first + w / run * spread; }
};

// The tile that has the one step of an array of length 1.
inline Tile first_step(const Lanes& lanes) {
  Tile tile;
  tile.lanes = lanes.count;
  tile.run = lanes.run;
  tile.steps = tile.length = 1;
  tile.first = 0;
  return tile;
}

// An operand or a result as the lanes of a strip see it.
struct Operand {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  // In elements:
  int64_t step = 0;                  // from one position to the next
  int64_t origin = 0;                // of the first lane at position 0
  bool even = false;                 // lanes are evenly spaced:
  int64_t neighbour = 0, pitch = 0;  // .. from one lane of a run to the next; from a run to the next, but for parts
  int64_t origins[kMaxLanes];        // else: of each lane at position 0

  // An operand of the shape of the problem.
  void bind(const Lanes& lanes, const Rows& rows, bool backward) {
    const int64_t last = backward ? rows.length - 1 : 0;
    step = backward ? -rows.inner : rows.inner;
    even = true;
    origin = (lanes.outer * rows.length + last) * rows.inner + lanes.inner;
    neighbour = 1;
    pitch = lanes.parts ? 0 : rows.length * rows.inner;
  }

  // One that broadcasts.
  void bind(const Lanes& lanes, const Rows& rows, bool backward, const Broadcast& at) {
    const auto origin_of = [&](int64_t w) {
      return at(lanes.outer_of(w), backward ? rows.length - 1 : 0, lanes.inner_of(w));
    };
    step = backward ? -at.axis_stride : at.axis_stride;
    const bool runs = lanes.count > lanes.run && !lanes.parts;
    even = (at.outer.groups <= 1 || !runs) && (at.inner.groups <= 1 || lanes.run == 1);
    origin = origin_of(0);
    if (even) {
      neighbour = lanes.run > 1 ? origin_of(1) - origin : 0;
      pitch = runs ? origin_of(lanes.run) - origin : 0;
    } else {
      for (int64_t w = 0; w < lanes.count; ++w) origins[w] = origin_of(w);
    }
  }
};

// Reads the steps [begin, end) of the tile, from positions that are `shift` further; 0 where there is no such position.
// C is float for all types up to 32 bits that are computed with as float, and otherwise as wide as the element.
template <class C>
void load(const Operand& from, const Tile& tile, int64_t begin, int64_t end, int64_t shift, C* plane);

// The same for bytes that are 0 or not.
template <class C>
void load_flags(const Operand& from, const Tile& tile, int64_t begin, int64_t end, int64_t shift, C* plane);

// Writes the steps of the tile that exist.
template <class C>
void store(const Operand& to, const Tile& tile, const C* plane);

// Sets the element of each lane that has the position within the steps [begin, end): value(lane).
template <class C, class Value>
void set_at(const Tile& tile, int64_t begin, int64_t end, int64_t position, C* plane, const Value& value) {
  int64_t s = position - tile.first;
  for (int64_t first = 0; first < tile.lanes; first += tile.run, s -= tile.spread) {
    if (s < begin || s >= end) continue;
    for (int64_t w = first; w < first + tile.run; ++w) plane[s * tile.lanes + w] = value(w);
  }
}

}  // namespace jaxgpuops::scan::cpu
