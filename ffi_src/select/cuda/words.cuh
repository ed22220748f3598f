// What select's kernels share that cut a row into parts of numbers: words of 32 bits for its elements, and the parts.
#pragma once

#include <cfloat>

#include "select/cuda/select.cuh"

namespace jaxgpuops::select {
namespace {

constexpr float kMagic = 8388608;  // 2^23: the low bits of floats from here on are those of an integer
constexpr uint32_t kMagicBits = 0x4b000000;
constexpr uint32_t kMostCrowd = 5;  // elements of the sample in a part, besides others of the same key

// Returns x * y + z, at least 0 and at most 1; 0 instead of NaN.
__device__ __forceinline__ float saturated_fma(float x, float y, float z) {
  float result;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(x), "f"(y), "f"(z));
  return result;
}

__device__ __forceinline__ uint32_t word_of_half(uint32_t element) {
  float number;
  asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(static_cast<uint16_t>(element)));
  return __float_as_uint(number);
}

// Elements become words of 32 bits: integers are extended, and floats become float32, which keeps their order.
struct WordOrder {
  bool is_float, is_half;
  uint32_t sign_bits;  // of an integer with a sign: those that are extended
  uint32_t flip;       // what turns words (of floats: after their magnitudes) into keys

  __device__ __forceinline__ WordOrder(const Select& problem) {
    const ArgOrder& rules = problem.order.ascending;
    is_float = rules.sign != 0;
    is_half = is_float && problem.bits == 16 && rules.nan_above == 0x7c00;
    const bool is_signed = rules.order.flip != 0;
    sign_bits = problem.bits == 16 && is_signed ? 0x8000 : 0;
    flip = (is_signed ? 0x80000000 : 0) ^ static_cast<uint32_t>(problem.order.invert ? ~0u : 0u);
  }
  __device__ __forceinline__ uint32_t word_of_short(uint32_t element) const {
    return is_half ? word_of_half(element) : is_float ? element << 16 : (element ^ sign_bits) - sign_bits;
  }
  // Turns elements of 16 bits into words.
  template <int kElements>
  __device__ __forceinline__ void extend(uint32_t (&element)[kElements]) const {
    if (is_half) {
#pragma unroll
      for (auto& its : element) its = word_of_half(its);
    } else if (is_float) {
#pragma unroll
      for (auto& its : element) its <<= 16;
    } else {
#pragma unroll
      for (auto& its : element) its = (its ^ sign_bits) - sign_bits;
    }
  }
};

// How a row is cut into parts.
struct Cut {
  bool by_value;
  float scale, offset;  // by value: `scale` times a number and `offset`, saturated, go from the last part to the first
  float step, start;    // and these times `step` and `start` are kMagic and the number of the part
  Parts<uint32_t> by_key;

  // Returns kMagicBits and the number of a part. The function is monotonic, so elements in lower parts come first.
  __device__ __forceinline__ uint32_t part_bits(uint32_t word) const {
    return __float_as_uint(fmaf(saturated_fma(__uint_as_float(word), scale, offset), step, start));
  }
};

// Returns a cut of a row into 2^kBits parts, from 32 sampled elements, of which each lane of the warp that calls this
// has one: its word and its key. `flip`: what turns numbers into keys.
template <int kBits>
__device__ __forceinline__ Cut cut_of_sample(uint32_t sampled, uint32_t key, bool is_float, bool descending,
                                             uint32_t flip) {
  constexpr int kLast = (1 << kBits) - 1;
  const uint32_t low = ~largest_of_warp(~key), high = largest_of_warp(key);
  Cut cut;
  cut.by_key = Parts<uint32_t>::between<uint32_t>(kBits, low, high);
  const auto number_of = [&](uint32_t of) { return __uint_as_float(decode(of, KeyOrder{0x7fffffff, flip})); };
  const float first = number_of(low), last = number_of(high);
  const float least = fminf(first, last), most = fmaxf(first, last), more = (most - least) / 4;
  cut.scale = __frcp_rn(least - most - 2 * more), cut.offset = (most + more) * -cut.scale;
  cut.step = descending ? kLast : -kLast, cut.start = kMagic + (descending ? 0 : kLast);
  // How many other elements of the sample, of other keys, are in the same part. (No comparison with NaN is true.)
  const auto lanes_of = [](uint32_t its) { return static_cast<uint32_t>(__popc(__match_any_sync(kEveryLane, its))); };
  const uint32_t crowd = largest_of_warp(lanes_of(cut.part_bits(sampled)) - lanes_of(key));
  cut.by_value = is_float && first - last == first - last && -cut.scale > 0 && -cut.scale < FLT_MAX &&
                 fabsf(cut.offset) < FLT_MAX && crowd <= kMostCrowd;
  return cut;
}

}  // namespace
}  // namespace jaxgpuops::select
