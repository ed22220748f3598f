// Tiles: how the CPU scans access memory.
//
// Rows are scanned side by side in lanes, so that the compiler can vectorise any recurrence. A tile is some steps of
// every lane. It is loaded into a plane of scratch memory, where all lanes of a step are together, and converted to the
// type in which it is computed. Results go back the same way. Lanes are one of
//   columns: neighbouring inner indices, if inner is large
//   rows:    all inner indices of neighbouring outer indices, if rows are short
//   parts:   the parts of a section of one long row (or of a few columns)
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
// A plane has one more step before and after those of the tile. Planes are not a multiple of a page apart, so that they
// do not compete for the same cache sets.
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

// The rows that are lanes of a strip. A run is neighbouring inner indices. Runs follow each other, each for the next
// outer index or for the next part of the same rows.
struct Lanes {
  int64_t count = 0, run = 1;
  int64_t outer = 0, inner = 0;  // outer and inner index of the first lane
  bool parts = false;

  int64_t outer_of(int64_t w) const { return outer + (parts ? 0 : w / run); }
  int64_t inner_of(int64_t w) const { return inner + w % run; }
};

struct Tile {
  int64_t lanes, run, steps;
  int64_t length;      // length of the axis
  int64_t first;       // position of the first step of the first lane
  int64_t spread = 0;  // positions from one part to the next; 0 if there are no parts

  int64_t position(int64_t w) const { return spread == 0 ? first : first + w / run * spread; }
};

// The tile that has the single step of an array of length 1.
inline Tile first_step(const Lanes& lanes) {
  Tile tile;
  tile.lanes = lanes.count;
  tile.run = lanes.run;
  tile.steps = tile.length = 1;
  tile.first = 0;
  return tile;
}

// An operand or a result, as the lanes of a strip access it. Offsets and distances are in elements.
struct Operand {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t step = 0;    // distance from one position to the next
  int64_t origin = 0;  // offset of the first lane at position 0
  bool even = false;   // lanes are evenly spaced; `neighbour` and `pitch` say how
  // Distance from a lane to the next in its run; from a run to the next, unless they are parts.
  int64_t neighbour = 0, pitch = 0;
  int64_t origins[kMaxLanes];  // if not even: the offset of each lane at position 0

  // Binds an operand that has the shape of the problem to the lanes.
  void bind(const Lanes& lanes, const Rows& rows, bool backward) {
    const int64_t last = backward ? rows.length - 1 : 0;
    step = backward ? -rows.inner : rows.inner;
    even = true;
    origin = (lanes.outer * rows.length + last) * rows.inner + lanes.inner;
    neighbour = 1;
    pitch = lanes.parts ? 0 : rows.length * rows.inner;
  }

  // Binds an operand that broadcasts to the lanes.
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

// Loads the steps [begin, end) of the tile from positions that are `shift` higher. Positions that do not exist give 0.
// C is float for all floats of up to 32 bits, and else the unsigned integer, float or complex type as wide as the
// element.
template <class C>
void load(const Operand& from, const Tile& tile, int64_t begin, int64_t end, int64_t shift, C* plane);

// Loads bytes as flags: 1 where a byte is not 0, else 0.
template <class C>
void load_flags(const Operand& from, const Tile& tile, int64_t begin, int64_t end, int64_t shift, C* plane);

// Stores the steps of the tile whose positions exist.
template <class C>
void store(const Operand& to, const Tile& tile, const C* plane);

// Sets the elements that have the given position, if it is among the steps [begin, end), to value(lane).
template <class C, class Value>
void set_at(const Tile& tile, int64_t begin, int64_t end, int64_t position, C* plane, const Value& value) {
  int64_t s = position - tile.first;
  for (int64_t first = 0; first < tile.lanes; first += tile.run, s -= tile.spread) {
    if (s < begin || s >= end) continue;
    for (int64_t w = first; w < first + tile.run; ++w) plane[s * tile.lanes + w] = value(w);
  }
}

}  // namespace jaxgpuops::scan::cpu
