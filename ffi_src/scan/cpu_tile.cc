// Between memory and planes: transposition and conversion.
#include "scan/cpu_tile.h"

#include <type_traits>

#include "common/narrow_float.h"
#include "common/transpose.h"

namespace jaxgpuops::scan::cpu {
namespace {

// ---- Movement -------------------------------------------------------------------------------------------------------

// The steps of lane w that exist.
struct Steps {
  Steps(const Tile& tile, int64_t w, int64_t begin, int64_t end, int64_t shift) {
    const int64_t position = tile.position(w) + shift;
    first = std::clamp<int64_t>(-position, begin, end);
    last = std::clamp<int64_t>(tile.length - position, first, end);
  }
  int64_t first, last;
};

// Moves elements between a plane and lanes that are not beside each other. Calls, of steps that exist,
//   square(w, s)  for lanes [w, w + side) and steps [s, s + side); squares may overlap
//   single(w, s)  for one
template <class T, class Square, class Single>
JAXGPUOPS_INLINE void for_lanes(const Operand& operand, const Tile& tile, int64_t begin, int64_t end, int64_t shift,
                                const Square& square, const Single& single) {
  const bool rows = kSide<T> > 1 && (operand.step == 1 || operand.step == -1) && tile.lanes >= kSide<T>;
  const int64_t side = rows ? kSide<T> : 1;
  Steps common(tile, 0, begin, end, shift), steps = common;
  for (int64_t group = 0; group < tile.lanes; group += side) {
    const int64_t lane = std::min(group, tile.lanes - side);
    for (int64_t w = lane; !tile.uniform && w < lane + side; ++w) {
      steps = Steps(tile, w, begin, end, shift);
      common.first = w == lane ? steps.first : std::max(common.first, steps.first);
      common.last = w == lane ? steps.last : std::min(common.last, steps.last);
    }
    const bool squares = rows && common.last - common.first >= side;
    for (int64_t s = common.first; squares && s < common.last; s += side) square(lane, std::min(s, common.last - side));
    if (squares && tile.uniform) continue;
    for (int64_t w = lane; w < lane + side; ++w) {
      if (!tile.uniform) steps = Steps(tile, w, begin, end, shift);
      for (int64_t s = steps.first; s < steps.last; ++s) {
        if (squares && s == common.first) s = common.last;
        if (s < steps.last) single(w, s);
      }
    }
  }
}

// Clears the steps of a plane that do not exist.
template <class T>
void clear_missing(const Tile& tile, int64_t begin, int64_t end, int64_t shift, T* plane) {
  const int64_t lanes = tile.lanes;
  if (tile.uniform) {
    const Steps steps(tile, 0, begin, end, shift);
    std::fill(plane + begin * lanes, plane + steps.first * lanes, T{});
    std::fill(plane + steps.last * lanes, plane + end * lanes, T{});
    return;
  }
  for (int64_t w = 0; w < lanes; ++w) {
    const Steps steps(tile, w, begin, end, shift);
    for (int64_t s = begin; s < steps.first; ++s) plane[s * lanes + w] = T{};
    for (int64_t s = steps.last; s < end; ++s) plane[s * lanes + w] = T{};
  }
}

// Moves the steps of evenly spaced lanes at the same positions: `lane` is where the first has its first step.
template <class T>
JAXGPUOPS_SIMD void take_lanes(const T* lane, const Operand& from, int64_t lanes, int64_t steps, T* plane) {
  if (from.step == 1) return transpose(lane, from.pitch, lanes, steps, plane, lanes);
  const int64_t last = steps - 1;
  if (from.step == -1) return transpose(lane - last, from.pitch, lanes, steps, plane + last * lanes, -lanes);
  for (int64_t s = 0; s < steps; ++s)
    for (int64_t w = 0; w < lanes; ++w) plane[s * lanes + w] = lane[s * from.step + w * from.pitch];
}

template <class T>
void put_lanes(const T* plane, const Operand& to, int64_t lanes, int64_t steps, T* lane) {
  if (to.step == 1) return transpose(plane, lanes, steps, lanes, lane, to.pitch);
  const int64_t last = steps - 1;
  if (to.step == -1) return transpose(plane + last * lanes, -lanes, steps, lanes, lane - last, to.pitch);
  for (int64_t s = 0; s < steps; ++s)
    for (int64_t w = 0; w < lanes; ++w) lane[s * to.step + w * to.pitch] = plane[s * lanes + w];
}

template <class T>
void gather(const Operand& from, const Tile& tile, int64_t begin, int64_t end, int64_t shift, T* plane) {
  const T* data = static_cast<const T*>(from.data);
  const int64_t lanes = tile.lanes, step = from.step;
  clear_missing(tile, begin, end, shift, plane);
  if (tile.uniform && from.contiguous) {
    const Steps steps(tile, 0, begin, end, shift);
    const T* x = data + from.first[0] + (tile.position(0) + shift) * step;
    for (int64_t s = steps.first; s < steps.last; ++s) std::memcpy(plane + s * lanes, x + s * step, lanes * sizeof(T));
    return;
  }
  if (tile.uniform && from.even) {
    const Steps steps(tile, 0, begin, end, shift);
    const T* x = data + from.first[0] + (tile.position(0) + shift + steps.first) * step;
    return take_lanes(x, from, lanes, steps.last - steps.first, plane + steps.first * lanes);
  }
  const auto at = [&](int64_t w, int64_t s) { return data + from.first_of(w) + (tile.position(w) + shift + s) * step; };
  constexpr int64_t kLast = kSide<T> - 1;
  for_lanes<T>(
      from, tile, begin, end, shift,
      [&](int64_t w, int64_t s) {
        T* to = plane + s * lanes + w;
        if (step > 0) {
          move_square<T>([&](int64_t i) { return at(w + i, s); }, [&](int64_t j) { return to + j * lanes; });
        } else {
          move_square<T>([&](int64_t i) { return at(w + i, s + kLast); },
                         [&](int64_t j) { return to + (kLast - j) * lanes; });
        }
      },
      [&](int64_t w, int64_t s) { plane[s * lanes + w] = *at(w, s); });
}

template <class T>
void scatter(const Operand& to, const Tile& tile, const T* plane) {
  T* data = static_cast<T*>(to.data);
  const int64_t lanes = tile.lanes, step = to.step;
  if (tile.uniform && to.contiguous) {
    const Steps steps(tile, 0, 0, tile.steps, 0);
    T* x = data + to.first[0] + tile.position(0) * step;
    for (int64_t s = steps.first; s < steps.last; ++s) std::memcpy(x + s * step, plane + s * lanes, lanes * sizeof(T));
    return;
  }
  if (tile.uniform && to.even) {
    const Steps steps(tile, 0, 0, tile.steps, 0);
    T* x = data + to.first[0] + (tile.position(0) + steps.first) * step;
    return put_lanes(plane + steps.first * lanes, to, lanes, steps.last - steps.first, x);
  }
  const auto at = [&](int64_t w, int64_t s) { return data + to.first_of(w) + (tile.position(w) + s) * step; };
  constexpr int64_t kLast = kSide<T> - 1;
  for_lanes<T>(
      to, tile, 0, tile.steps, 0,
      [&](int64_t w, int64_t s) {
        const T* from = plane + s * lanes + w;
        if (step > 0) {
          move_square<T>([&](int64_t i) { return from + i * lanes; }, [&](int64_t j) { return at(w + j, s); });
        } else {
          move_square<T>([&](int64_t i) { return from + (kLast - i) * lanes; },
                         [&](int64_t j) { return at(w + j, s + kLast); });
        }
      },
      [&](int64_t w, int64_t s) { *at(w, s) = plane[s * lanes + w]; });
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
