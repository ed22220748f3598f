// Between memory and planes: transposition and conversion.
#include "scan/cpu_tile.h"

#include <type_traits>

#include "common/narrow_float.h"
#include "scan/cpu_square.h"

namespace jaxgpuops::scan::cpu {
namespace {

// ---- Movement -------------------------------------------------------------------------------------------------------

// The steps of lane w that exist.
struct Steps {
  Steps(const Tile& tile, int64_t w, int64_t begin, int64_t end, int64_t shift) {
    const int64_t position = tile.position[w] + shift;
    first = std::clamp<int64_t>(-position, begin, end);
    last = std::clamp<int64_t>(tile.length - position, first, end);
  }
  int64_t first, last;
};

template <int kBytes>
struct BitsOf;
template <>
struct BitsOf<1> : std::common_type<uint8_t> {};
template <>
struct BitsOf<2> : std::common_type<uint16_t> {};
template <>
struct BitsOf<4> : std::common_type<uint32_t> {};
template <>
struct BitsOf<8> : std::common_type<uint64_t> {};

// to(j)[i] = from(i)[j], where from and to return pointers.
template <class T, class From, class To>
JAXGPUOPS_INLINE void move_square([[maybe_unused]] const From& from, [[maybe_unused]] const To& to) {
#ifdef JAXGPUOPS_SQUARES
  if constexpr (kSide<T> > 1) {
    using V = Vector<typename BitsOf<sizeof(T)>::type>;
    V rows[kSide<T>];
    for (int64_t i = 0; i < kSide<T>; ++i) std::memcpy(&rows[i], from(i), sizeof(V));
    transpose<kSide<T>>(rows);
    for (int64_t i = 0; i < kSide<T>; ++i) std::memcpy(to(i), &rows[i], sizeof(V));
  }
#endif
}

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

// Whether lanes have too few steps for squares.
template <class T>
bool is_short(const Tile& tile) {
  return kSide<T> == 1 || tile.length < kSide<T>;
}

template <class T, class Pitch>
JAXGPUOPS_INLINE void take_every(const T* from, Pitch pitch, int64_t lanes, T* to) {
  JAXGPUOPS_INDEPENDENT
  for (int64_t w = 0; w < lanes; ++w) to[w] = from[w * pitch];
}

// The compiler vectorises those for pitches that it knows.
template <class T>
JAXGPUOPS_SIMD void take_lanes(const T* from, int64_t pitch, int64_t lanes, T* to) {
  if (pitch == 2) return take_every(from, std::integral_constant<int64_t, 2>(), lanes, to);
  if (pitch == 3) return take_every(from, std::integral_constant<int64_t, 3>(), lanes, to);
  take_every(from, pitch, lanes, to);
}

template <class T>
void put_lanes(const T* from, int64_t pitch, int64_t lanes, T* to) {
  JAXGPUOPS_INDEPENDENT
  for (int64_t w = 0; w < lanes; ++w) to[w * pitch] = from[w];
}

template <class T>
void gather(const Operand& from, const Tile& tile, int64_t begin, int64_t end, int64_t shift, T* plane) {
  const T* data = static_cast<const T*>(from.data);
  const int64_t lanes = tile.lanes, step = from.step;
  clear_missing(tile, begin, end, shift, plane);
  if (tile.uniform && from.contiguous) {
    const Steps steps(tile, 0, begin, end, shift);
    const T* x = data + from.first[0] + (tile.position[0] + shift) * step;
    for (int64_t s = steps.first; s < steps.last; ++s) std::memcpy(plane + s * lanes, x + s * step, lanes * sizeof(T));
    return;
  }
  if (tile.uniform && from.even && is_short<T>(tile)) {
    const Steps steps(tile, 0, begin, end, shift);
    const T* x = data + from.first[0] + (tile.position[0] + shift) * step;
    for (int64_t s = steps.first; s < steps.last; ++s) take_lanes(x + s * step, from.pitch, lanes, plane + s * lanes);
    return;
  }
  const auto at = [&](int64_t w, int64_t s) { return data + from.first_of(w) + (tile.position[w] + shift + s) * step; };
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
    T* x = data + to.first[0] + tile.position[0] * step;
    for (int64_t s = steps.first; s < steps.last; ++s) std::memcpy(x + s * step, plane + s * lanes, lanes * sizeof(T));
    return;
  }
  if (tile.uniform && to.even && is_short<T>(tile)) {
    const Steps steps(tile, 0, 0, tile.steps, 0);
    T* x = data + to.first[0] + tile.position[0] * step;
    for (int64_t s = steps.first; s < steps.last; ++s) put_lanes(plane + s * lanes, to.pitch, lanes, x + s * step);
    return;
  }
  const auto at = [&](int64_t w, int64_t s) { return data + to.first_of(w) + (tile.position[w] + s) * step; };
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
