// Cells in shared memory, to which threads fold numbers in any order: each has the fold of a segment and a column.
//
// Integers and extremes take one pass of atomics. Sums of floats take two: the first finds the largest exponent of each
// cell. The second adds up the numbers as integers, in units that are 2^kBelow times smaller than the last bit of the
// cell's largest number; what is smaller still is cut off each number. So the sum does not depend on the order, and what
// is cut off is far below what the result is rounded to.
#pragma once

#include "segments/cuda/atomics.cuh"
#include "segments/cuda/exact.cuh"

namespace jaxgpuops::segments {

template <class Monoid, bool kExact = is_exact<Monoid>>
struct Cells {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  using Value = std::conditional_t<sizeof(Acc) == 8, uint64_t, uint32_t>;  // what is folded
  static constexpr bool kTwice = false;
  static constexpr int64_t kBytes = order_free_bytes(false, sizeof(Bits));

  Value* words;
  int count;

  __device__ Cells(unsigned char* memory, int count) : words(reinterpret_cast<Value*>(memory)), count(count) {}
  __device__ void clear(int thread, int threads) const {
    for (int i = thread; i < count; i += threads) words[i] = 0;
  }
  __device__ void raise(int, Bits) const {}
  __device__ Value value(int, Bits bits, const Keys& keys) const { return Monoid::load(bits, keys); }
  __device__ static Value fold(Value a, Value b) {
    if constexpr (is_extreme<Monoid>) return max(a, b);
    return a + b;
  }
  __device__ void put(int cell, Value value) const {
    if constexpr (!is_extreme<Monoid> && sizeof(Value) == 8) {
      auto* const halves = reinterpret_cast<uint32_t*>(words + cell);
      add_halves(halves, halves + 1, value);
    } else {
      atomic_fold<is_extreme<Monoid>>(words + cell, value);
    }
  }
  __device__ Acc result(int cell) const { return static_cast<Acc>(words[cell]); }
};

template <class E>
struct Cells<Sum<E>, true> {
  using Bits = typename E::Bits;
  using Acc = typename E::Acc;
  static constexpr bool kTwice = true, kWide = sizeof(Bits) == 8;
  static constexpr int64_t kBytes = order_free_bytes(true, sizeof(Bits));
  using Value = std::conditional_t<kWide, __int128, int64_t>;
  static constexpr int kWords = sizeof(Value) / 4;
  // The bits of the largest number, these, and those of up to 2^16 rows fit in a Value.
  static constexpr int kBelow = (kWide ? 107 : 45) - Parts<E>::kMantissa;
  // In place of an exponent: there are infinities or NaNs. Then they are counted, in fields of so many bits.
  static constexpr uint32_t kSpecial = 0xffff;
  static constexpr int kField = 20;

  uint32_t* keys;   // of each cell: the place of its largest number, plus 1
  uint32_t* words;  // [word][cell]
  int count;

  __device__ Cells(unsigned char* memory, int count)
      : keys(reinterpret_cast<uint32_t*>(memory)), words(keys + count), count(count) {}
  __device__ void clear(int thread, int threads) const {
    for (int i = thread; i < (1 + kWords) * count; i += threads) keys[i] = 0;
  }
  __device__ void raise(int cell, Bits bits) const {
    const Parts<E> parts(bits);
    atomic_fold<true>(keys + cell, parts.special ? kSpecial : parts.place + 1);
  }
  __device__ Value value(int cell, Bits bits, const Keys&) const {
    const Parts<E> parts(bits);
    const uint32_t key = keys[cell];
    if (key == kSpecial)
      return !parts.special ? 0 : Value{1} << kField * (parts.special == kNan ? 2 : parts.special == kMinusInfinity);
    const int up = kBelow - static_cast<int>(key - 1 - parts.place);
    const auto size = static_cast<Value>(parts.integer);
    const Value cut = up >= 0 ? size << up : size >> min(-up, 63);
    return parts.negative ? -cut : cut;
  }
  __device__ static Value fold(Value a, Value b) { return a + b; }
  __device__ void put(int cell, Value value) const {
    uint32_t carry = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint64_t more = (static_cast<uint64_t>(value >> 32 * i) & 0xffffffff) + carry;
      const auto part = static_cast<uint32_t>(more);
      carry = static_cast<uint32_t>(more >> 32);
      if (part) carry += atomicAdd(words + i * count + cell, part) + part < part;
    }
  }
  __device__ Acc result(int cell) const {
    using Float = std::conditional_t<kWide, Float64, Float32>;
    constexpr int kUp = least_exponent(E::kDType) - least_exponent(Float::kDType);
    const uint32_t key = keys[cell];
    if (key == 0) return 0;
    unsigned __int128 bits = 0;
#pragma unroll
    for (int i = kWords - 1; i >= 0; --i) bits = bits << 32 | words[i * count + cell];
    const auto total = static_cast<Value>(bits);
    if (key == kSpecial) {
      const auto has = [&](int field) { return static_cast<uint64_t>(total >> kField * field) % (1 << kField) != 0; };
      return special_sum((has(0) ? kInfinity : 0) | (has(1) ? kMinusInfinity : 0) | (has(2) ? kNan : 0));
    }
    const auto size = static_cast<unsigned __int128>(total < 0 ? -total : total);
    return bits_as<Acc>(rounded<Float>(size, false, total < 0, static_cast<int>(key) - 1 - kBelow + kUp));
  }
};

// Folds a value of each lane that has a cell (not kNoCell) to it. All lanes of the warp must call it. If several lanes
// have the segment that the first lane has, they fold their values first; lanes `team` apart have the same column.
constexpr uint32_t kNoCell = ~0u;
template <class Own>
__device__ __forceinline__ void put_together(const Own& cells, uint32_t segment, int cell, int team,
                                             typename Own::Value value) {
  constexpr int kManyLanes = 8;
  const uint32_t hot = __shfl_sync(kEveryLane, segment, 0);
  const bool mine = segment == hot && segment != kNoCell;
  if (__popc(__ballot_sync(kEveryLane, mine)) >= max(kManyLanes, 2 * team)) {
    typename Own::Value all = mine ? value : 0;
#pragma unroll 1
    for (int lanes = team; lanes < 32; lanes *= 2) all = Own::fold(all, shuffle_xor(all, lanes));
    if (mine && static_cast<int>(threadIdx.x) % 32 < team) cells.put(cell, all);
    if (mine) segment = kNoCell;
  }
  if (segment != kNoCell) cells.put(cell, value);
}

}  // namespace jaxgpuops::segments
