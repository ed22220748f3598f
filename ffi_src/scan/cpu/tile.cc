// Moves elements between memory and planes, with transposition and conversion.
#include "scan/cpu/tile.h"

#include <type_traits>

#include "common/cpu/narrow_float.h"
#include "common/cpu/transpose.h"
#include "common/rounding.h"

namespace jaxgpuops::scan::cpu {
namespace {

// ---- Movement -------------------------------------------------------------------------------------------------------

// The steps [first, last) of lane w whose positions exist.
struct Steps {
  Steps(const Tile& tile, int64_t w, int64_t begin, int64_t end, int64_t shift) {
    const int64_t position = tile.position(w) + shift;
    first = std::clamp<int64_t>(-position, begin, end);
    last = std::clamp<int64_t>(tile.length - position, first, end);
  }
  int64_t first, last;
};

// A rectangle of a tile, of neighbouring runs of lanes and neighbouring steps, in which all positions exist.
struct Block {
  int64_t first_run, runs, first_step, steps;

  // Finds the steps that exist in all lanes or, if lanes share rows, the lanes in which all steps exist.
  Block(const Tile& tile, int64_t begin, int64_t end, int64_t shift) {
    const int64_t all = tile.lanes / tile.run;
    const Steps first(tile, 0, begin, end, shift);
    if (tile.spread == 0) {
      first_run = 0, runs = all, first_step = first.first, steps = first.last - first.first;
      return;
    }
    first_run = std::min(ceil_div(std::max<int64_t>(-(tile.first + shift + begin), 0), tile.spread), all);
    const int64_t room = tile.length - (tile.first + shift + end);  // positions after those of the first part
    runs = std::max<int64_t>(std::min(room < 0 ? 0 : room / tile.spread + 1, all) - first_run, 0);
    first_step = begin, steps = end - begin;
  }

  // Calls body(lane) for the lanes outside of the block.
  template <class Body>
  void for_other_lanes(const Tile& tile, const Body& body) const {
    for (int64_t w = 0; w < first_run * tile.run; ++w) body(w);
    for (int64_t w = (first_run + runs) * tile.run; w < tile.lanes; ++w) body(w);
  }
};

// Calls single(w, s) for the elements outside of the block whose positions exist.
template <class Single>
void for_others(const Tile& tile, const Block& block, int64_t begin, int64_t end, int64_t shift, const Single& single) {
  block.for_other_lanes(tile, [&](int64_t w) {
    const Steps steps(tile, w, begin, end, shift);
    for (int64_t s = steps.first; s < steps.last; ++s) single(w, s);
  });
}

// Sets the steps of a plane whose positions do not exist to zero.
template <class T>
void clear_missing(const Tile& tile, const Block& block, int64_t begin, int64_t end, int64_t shift, T* plane) {
  const int64_t lanes = tile.lanes;
  if (tile.spread == 0) {
    std::fill(plane + begin * lanes, plane + block.first_step * lanes, T{});
    std::fill(plane + (block.first_step + block.steps) * lanes, plane + end * lanes, T{});
    return;
  }
  block.for_other_lanes(tile, [&](int64_t w) {
    const Steps steps(tile, w, begin, end, shift);
    for (int64_t s = begin; s < steps.first; ++s) plane[s * lanes + w] = T{};
    for (int64_t s = steps.last; s < end; ++s) plane[s * lanes + w] = T{};
  });
}

// Where a block is in memory.
template <class T>
struct Place {
  Place(const Operand& operand, const Tile& tile, const Block& block, int64_t shift)
      : step(operand.step), pitch(tile.spread == 0 ? operand.pitch : tile.spread * operand.step) {
    first = static_cast<T*>(operand.data) + operand.origin + (tile.first + shift + block.first_step) * step +
            block.first_run * pitch;
    const bool neighbours = tile.run == 1 || operand.neighbour == 1;
    contiguous = neighbours && (block.runs == 1 || pitch == tile.run);
    transposed = neighbours && (step == tile.run || step == -tile.run);
  }
  T* first;
  const int64_t step, pitch;
  bool contiguous;  // the lanes of a step are contiguous
  bool transposed;  // the steps of a run are contiguous
};

template <class T>
void take(const Operand& from, const Tile& tile, const Block& block, int64_t shift, T* plane) {
  const Place<const T> at(from, tile, block, shift);
  const int64_t lanes = tile.lanes, run = tile.run, last = block.steps - 1;
  plane += block.first_step * lanes + block.first_run * run;
  if (at.contiguous) {
    for (int64_t s = 0; s < block.steps; ++s)
      std::memcpy(plane + s * lanes, at.first + s * at.step, block.runs * run * sizeof(T));
  } else if (at.transposed && at.step > 0) {
    transpose(at.first, at.pitch, block.runs, block.steps, run, plane, lanes);
  } else if (at.transposed) {
    transpose(at.first + last * at.step, at.pitch, block.runs, block.steps, run, plane + last * lanes, -lanes);
  } else {
    // The operand broadcasts, or its lanes are evenly spaced. Runs of one lane each are treated as one run.
    const int64_t runs = run == 1 ? 1 : block.runs, width = block.runs * run / runs;
    const int64_t apart = run == 1 ? at.pitch : from.neighbour;
    for (int64_t s = 0; s < block.steps; ++s) {
      for (int64_t r = 0; r < runs; ++r) {
        const T* x = at.first + s * at.step + r * at.pitch;
        T* to = plane + s * lanes + r * width;
        if (apart == 0) {
          std::fill_n(to, width, *x);
        } else {
          for (int64_t i = 0; i < width; ++i) to[i] = x[i * apart];
        }
      }
    }
  }
}

template <class T>
void gather(const Operand& from, const Tile& tile, int64_t begin, int64_t end, int64_t shift, T* plane) {
  const Block block(tile, begin, end, shift);
  clear_missing(tile, block, begin, end, shift, plane);
  const T* data = static_cast<const T*>(from.data);
  const int64_t lanes = tile.lanes;
  if (!from.even) {
    for (int64_t w = 0; w < lanes; ++w) {
      const Steps steps(tile, w, begin, end, shift);
      const T* x = data + from.origins[w] + (tile.position(w) + shift) * from.step;
      for (int64_t s = steps.first; s < steps.last; ++s) plane[s * lanes + w] = x[s * from.step];
    }
    return;
  }
  if (block.runs > 0 && block.steps > 0) take(from, tile, block, shift, plane);
  for_others(tile, block, begin, end, shift, [&](int64_t w, int64_t s) {
    const int64_t position = tile.position(w) + shift + s;
    plane[s * lanes + w] = data[from.origin + w % tile.run * from.neighbour + position * from.step];
  });
}

// Results have the shape of the problem, so they never broadcast.
template <class T>
void put(const Operand& to, const Tile& tile, const Block& block, const T* plane) {
  const Place<T> at(to, tile, block, 0);
  const int64_t lanes = tile.lanes, run = tile.run, last = block.steps - 1;
  plane += block.first_step * lanes + block.first_run * run;
  if (at.contiguous) {
    for (int64_t s = 0; s < block.steps; ++s)
      std::memcpy(at.first + s * at.step, plane + s * lanes, block.runs * run * sizeof(T));
  } else if (at.step > 0) {
    transpose(plane, lanes, block.steps, block.runs, run, at.first, at.pitch);
  } else {
    transpose(plane + last * lanes, -lanes, block.steps, block.runs, run, at.first + last * at.step, at.pitch);
  }
}

template <class T>
void scatter(const Operand& to, const Tile& tile, const T* plane) {
  const Block block(tile, 0, tile.steps, 0);
  T* data = static_cast<T*>(to.data);
  if (block.runs > 0 && block.steps > 0) put(to, tile, block, plane);
  for_others(tile, block, 0, tile.steps, 0, [&](int64_t w, int64_t s) {
    data[to.origin + w % tile.run + (tile.position(w) + s) * to.step] = plane[s * tile.lanes + w];
  });
}

// ---- Floats of 8 and 16 bits ----------------------------------------------------------------------------------------
template <class Format>
JAXGPUOPS_SIMD void decode_all(const typename Format::Bits* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = Format::decode(from[i]);
}

template <class Format>
JAXGPUOPS_SIMD void encode_all(const float* from, int64_t n, typename Format::Bits* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = Format::encode(from[i]);
}

template <class Format>
void load_narrow(const Operand& from, const Tile& tile, int64_t begin, int64_t end, int64_t shift, float* plane) {
  typename Format::Bits raw[kPlane];
  gather(from, tile, begin, end, shift, raw + kMaxLanes);
  const int64_t first = begin * tile.lanes;
  decode_all<Format>(raw + kMaxLanes + first, end * tile.lanes - first, plane + first);
}

template <class Format>
void store_narrow(const Operand& to, const Tile& tile, const float* plane) {
  typename Format::Bits raw[kPlane];
  encode_all<Format>(plane, tile.steps * tile.lanes, raw);
  scatter(to, tile, raw);
}

template <class C>
JAXGPUOPS_SIMD void widen_flags(const uint8_t* from, int64_t n, C* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<C>(from[i] != 0);
}

}  // namespace

template <class C>
void load(const Operand& from, const Tile& tile, int64_t begin, int64_t end, int64_t shift, C* plane) {
  if constexpr (std::is_same_v<C, float>) {
    switch (from.dtype) {
      case DType::kFloat8E4M3FN: return load_narrow<Float8E4M3FN>(from, tile, begin, end, shift, plane);
      case DType::kFloat8E5M2: return load_narrow<Float8E5M2>(from, tile, begin, end, shift, plane);
      case DType::kFloat16: return load_narrow<Float16>(from, tile, begin, end, shift, plane);
      case DType::kBFloat16: return load_narrow<BFloat16>(from, tile, begin, end, shift, plane);
      default: break;
    }
  }
  gather(from, tile, begin, end, shift, plane);
}

template <class C>
void load_flags(const Operand& from, const Tile& tile, int64_t begin, int64_t end, int64_t shift, C* plane) {
  uint8_t raw[kPlane];
  gather(from, tile, begin, end, shift, raw + kMaxLanes);
  const int64_t first = begin * tile.lanes;
  widen_flags(raw + kMaxLanes + first, end * tile.lanes - first, plane + first);
}

template <class C>
void store(const Operand& to, const Tile& tile, const C* plane) {
  if constexpr (std::is_same_v<C, float>) {
    switch (to.dtype) {
      case DType::kFloat8E4M3FN: return store_narrow<Float8E4M3FN>(to, tile, plane);
      case DType::kFloat8E5M2: return store_narrow<Float8E5M2>(to, tile, plane);
      case DType::kFloat16: return store_narrow<Float16>(to, tile, plane);
      case DType::kBFloat16: return store_narrow<BFloat16>(to, tile, plane);
      default: break;
    }
  }
  scatter(to, tile, plane);
}

#define JAXGPUOPS_INSTANTIATE(C)                                                        \
  template void load(const Operand&, const Tile&, int64_t, int64_t, int64_t, C*);       \
  template void load_flags(const Operand&, const Tile&, int64_t, int64_t, int64_t, C*); \
  template void store(const Operand&, const Tile&, const C*);
JAXGPUOPS_INSTANTIATE(uint8_t)
JAXGPUOPS_INSTANTIATE(uint16_t)
JAXGPUOPS_INSTANTIATE(uint32_t)
JAXGPUOPS_INSTANTIATE(uint64_t)
JAXGPUOPS_INSTANTIATE(float)
JAXGPUOPS_INSTANTIATE(double)
JAXGPUOPS_INSTANTIATE(Complex<float>)
JAXGPUOPS_INSTANTIATE(Complex<double>)
#undef JAXGPUOPS_INSTANTIATE

}  // namespace jaxgpuops::scan::cpu
