// Tiles: how the CPU scans see memory.
//
// Rows are scanned side by side, in lanes, so that the compiler can vectorise any recurrence. A tile is some steps of
// each lane. It is brought into a plane of scratch memory, step by step and all lanes of a step together, converted to
// the type that is computed with; the results go back the same way. Lanes are
//   columns: neighbouring rows, where inner > 1 makes them contiguous
//   rows:    any rows, where they are short
//   parts:   the parts of a chunk of one long row (or of a few columns)
// Positions along the axis are counted in the direction of the scan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/simd.h"
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

// Where the lanes of a strip are in the problem: anywhere, or each is the next outer or inner index, and only the first
// is there.
enum class Along { kAnywhere, kOuter, kInner };
struct Lanes {
  int64_t count = 0;
  Along along = Along::kAnywhere;
  int64_t outer[kMaxLanes], inner[kMaxLanes];

  int64_t outer_of(int64_t w) const {
    return along == Along::kAnywhere ? outer[w] : outer[0] + (along == Along::kOuter ? w : 0);
  }
  int64_t inner_of(int64_t w) const {
    return along == Along::kAnywhere ? inner[w] : inner[0] + (along == Along::kInner ? w : 0);
  }
};

struct Tile {
  int64_t lanes, steps;
  int64_t length;            // of the axis
  bool uniform;              // all lanes are at the same positions
  int64_t first[kMaxLanes];  // the position of each lane's first step; where uniform, the first lane's only

  int64_t position(int64_t w) const { return first[uniform ? 0 : w]; }
};

// The tile that has the one step of an array of length 1.
inline Tile first_step(const Lanes& lanes) {
  Tile tile;
  tile.lanes = lanes.count;
  tile.steps = tile.length = 1;
  tile.uniform = true;
  tile.first[0] = 0;
  return tile;
}

// An operand or a result as the lanes of a strip see it.
struct Operand {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t step = 0;         // from one position to the next, in elements
  bool contiguous = false;  // lanes are neighbours
  bool even = false;        // lanes are so far apart
  int64_t pitch = 0;
  int64_t first[kMaxLanes];  // each lane's element at position 0; where even, the first one's only

  int64_t first_of(int64_t lane) const { return even ? first[0] + lane * pitch : first[lane]; }

  // An operand of the shape of the problem.
  void bind(const Lanes& lanes, const Rows& rows, bool backward) {
    step = backward ? -rows.inner : rows.inner;
    const int64_t origin = (backward ? rows.length - 1 : 0) * rows.inner;
    find(lanes, true, [&](int64_t o, int64_t i) { return o * rows.length * rows.inner + i + origin; });
  }
  void bind(const Lanes& lanes, const Rows& rows, bool backward, const Broadcast& at) {
    step = backward ? -at.axis_stride : at.axis_stride;
    const int64_t position = backward ? rows.length - 1 : 0;
    find(lanes, (lanes.along == Along::kOuter ? at.outer : at.inner).groups <= 1,
         [&](int64_t o, int64_t i) { return at(o, position, i); });
  }

 private:
  template <class Place>
  void find(const Lanes& lanes, bool linear, const Place& place) {
    const auto lane = [&](int64_t w) { return place(lanes.outer_of(w), lanes.inner_of(w)); };
    even = lanes.along != Along::kAnywhere && linear;
    first[0] = lane(0);
    if (even) {
      pitch = lanes.count > 1 ? lane(1) - first[0] : 1;
      contiguous = pitch == 1;
      return;
    }
    contiguous = true;
    for (int64_t w = 1; w < lanes.count; ++w) {
      first[w] = lane(w);
      contiguous &= first[w] == first[0] + w;
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
  if (tile.uniform && (position - tile.first[0] < begin || position - tile.first[0] >= end)) return;
  for (int64_t w = 0; w < tile.lanes; ++w) {
    const int64_t s = position - tile.position(w);
    if (s >= begin && s < end) plane[s * tile.lanes + w] = value(w);
  }
}

}  // namespace jaxgpuops::scan::cpu
