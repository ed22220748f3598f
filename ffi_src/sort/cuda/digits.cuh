// The part that the radix sorts share: where the elements of a block go in a stable sort by one digit of eight bits.
//
// Elements are in warp order: warp w has 32 * kItems neighbouring elements, of which lane l holds number l, l + 32 and
// so on. Slots past the end of the row come after all elements and get the last digit, so that every pass leaves them
// behind.
#pragma once

#include <type_traits>

#include "common/cuda/intrinsics.cuh"
#include "sort/sort.h"

namespace jaxgpuops::sort {
namespace {

constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;

// ---- Digits ---------------------------------------------------------------------------------------------------------

// An element while it is sorted: its bits. Those of 8 and 16 bits have their key in the upper half of the word.
template <class Key>
using Word = std::conditional_t<(sizeof(Key) < 4), uint32_t, Key>;

template <class Key>
__device__ __forceinline__ Word<Key> word_of(Key bits, const SortOrder& order) {
  if constexpr (sizeof(Key) < 4) return bits | static_cast<uint32_t>(sort_key(bits, order)) << 16;
  return bits;
}

// What a pass makes its digits with. It is in shared memory: where it is read anew, the compiler makes the digits of
// all elements again, in fewer instructions than it would take to spill them. Masks, since votes need all predicates.
struct Digits {
  uint32_t select;   // selects the byte of a word: of its upper half if bit 16 is set
  uint32_t floats;   // all ones if elements are floats of 32 or 64 bits, else 0
  uint32_t numbers;  // all ones if, besides, -0 is +0 and all NaNs are one; else 0, as in top-k's total order
  float zero;        // 0
};

template <class Key>
__device__ __forceinline__ Digits digits_of(int pass, const SortOrder& order) {
  const auto byte = static_cast<uint32_t>(sizeof(Key) < 4 ? pass + 2 : pass);
  return {0x4440 | byte % 4 | byte / 4 << 16, order.ascending.order.magnitude != 0 ? ~0u : 0,
          order.ascending.sign != 0 ? ~0u : 0, 0.f};
}
template <class Key>
__device__ __forceinline__ void set_digits(volatile Digits& digits, int pass, const SortOrder& order) {
  if (threadIdx.x != 0) return;
  const Digits own = digits_of<Key>(pass, order);
  digits.select = own.select;
  digits.floats = own.floats;
  digits.numbers = own.numbers;
  digits.zero = own.zero;
}
__device__ __forceinline__ Digits read_anew(const volatile Digits& digits) {
  return {digits.select, digits.floats, digits.numbers, digits.zero};
}

// Digits of integers are bytes of their bits, and those of floats nearly so: an exclusive or with `turn` puts them into
// the order of the sort. It costs nothing where the counts of all digits are added up.
template <class Key>
__device__ __forceinline__ uint32_t turn_of(int pass, const SortOrder& order) {
  if constexpr (sizeof(Key) < 4) return 0;
  return static_cast<uint32_t>((order.ascending.order.flip ^ order.invert) >> (pass * kDigitBits)) & (kDigits - 1);
}

__device__ __forceinline__ uint32_t choose(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }

template <class Key>
__device__ __forceinline__ uint32_t digit_of(Word<Key> word, const Digits& digits) {
  auto half = static_cast<uint32_t>(word);
  if constexpr (sizeof(Key) == 4) {
    // the sum turns -0 into 0, and any NaN into the largest one
    const uint32_t number = __float_as_uint(__fadd_rn(__uint_as_float(word), digits.zero));
    half = choose(digits.numbers, number, half);
    half ^= sign_mask(half) & digits.floats & 0x7fffffff;
  }
  if constexpr (sizeof(Key) == 8) {
    const uint32_t upper = 0u - (digits.select >> 16), magnitude = ~(upper & 1u << 31);
    const double element = __longlong_as_double(static_cast<long long>(word));
    const auto number = static_cast<uint64_t>(__double_as_longlong(__dadd_rn(element, digits.zero)));
    const uint32_t high =
        choose(digits.numbers, static_cast<uint32_t>(number >> 32), static_cast<uint32_t>(word >> 32));
    const uint32_t low = choose(digits.numbers, static_cast<uint32_t>(number), half);
    half = choose(upper, high, low) ^ (sign_mask(high) & magnitude & digits.floats);
    if (isnan(element)) half = choose(digits.numbers, magnitude, half);
  }
  return __byte_perm(half, 0, digits.select);
}

// Returns a word whose digit in this pass is the last in the order.
template <class Key>
__device__ __forceinline__ Word<Key> last_word(int pass, const SortOrder& order) {
  uint32_t byte = turn_of<Key>(pass, order) ^ (kDigits - 1);
  const bool is_float = sizeof(Key) >= 4 && order.ascending.order.magnitude != 0;
  if (is_float && pass == sizeof(Key) - 1 && byte >= 128) byte ^= 127;  // the digit of a negative number
  return Word<Key>{byte} << (kDigitBits * (sizeof(Key) < 4 ? pass + 2 : pass));
}

// ---- Ranks ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t lanes_up_to_this() {
  uint32_t mask;
  asm("mov.u32 %0, %%lanemask_le;" : "=r"(mask));
  return mask;
}
__device__ __forceinline__ uint32_t lanes_after() {
  uint32_t mask;
  asm("mov.u32 %0, %%lanemask_gt;" : "=r"(mask));
  return mask;
}
__device__ __forceinline__ uint32_t in_all(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t all;
  asm("lop3.b32 %0, %1, %2, %3, 0x80;" : "=r"(all) : "r"(a), "r"(b), "r"(c));
  return all;
}

// Returns the lanes whose element has the same digit. One vote for each bit is faster than match.any. Logic is what
// bounds a sort, so the complement of a vote is a product and a sum: -lanes - 1, where the compiler must not know that
// `ones` is -1.
__device__ __forceinline__ uint32_t lanes_with(uint32_t digit, uint32_t ones) {
  uint32_t same[kDigitBits];
#pragma unroll
  for (int bit = 0; bit < kDigitBits; ++bit)
    asm volatile(
        "{\n.reg .pred set;\n.reg .b32 own;\nand.b32 own, %1, %2;\nsetp.ne.u32 set, own, 0;\n"
        "vote.sync.ballot.b32 %0, set, 0xffffffff;\n@!set mad.lo.u32 %0, %0, %3, %3;\n}"
        : "=r"(same[bit])
        : "r"(digit), "r"(1u << bit), "r"(ones));
  return in_all(in_all(same[0], same[1], same[2]), in_all(same[3], same[4], same[5]), same[6] & same[7]);
}

// Returns the sum of `value` over all lower threads, for the first 256 threads. All threads of the block must call it.
__device__ __forceinline__ uint32_t sum_before(uint32_t value, uint32_t* warps) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t sum = sum_up_to_lane(value);
  if (lane == 31 && warp < kDigits / 32) warps[warp] = sum;
  __syncthreads();
  uint32_t before = 0;
#pragma unroll
  for (int w = 0; w < kDigits / 32; ++w) before += w < warp ? warps[w] : 0;
  return before + sum - value;
}

// Sets the counts of the thread's warp to zero, which place_by_digit() expects.
__device__ __forceinline__ void clear_counts(uint32_t* counts) {
  auto* const own = reinterpret_cast<uint4*>(counts + threadIdx.x / 32 * kDigits) + threadIdx.x % 32;
  own[0] = own[32] = uint4{0, 0, 0, 0};
  __syncwarp();
}

// Calls put(i, place) for each element of the thread with its place in the sorted block. digit(i, digits) returns its
// digit. `live`: the thread's warp has elements; a vote tells the compiler that the warp agrees. `counts` has a number
// for each digit of each warp. Before elements are placed, counted(n) tells thread t of the first 256 how many elements
// have the digit t ^ turn; to this thread, the place of the first of them is returned.
template <int kThreads, int kItems, class Digit, class Counted, class Put>
__device__ __forceinline__ uint32_t place_by_digit(uint32_t* counts, uint32_t* warps, const volatile Digits& digits,
                                                   uint32_t turn, bool live, Digit digit, Counted counted, Put put) {
  constexpr int kWarps = kThreads / 32;
  uint32_t* const own = counts + threadIdx.x / 32 * kDigits;
  if (__any_sync(kEveryLane, live)) {
    const Digits first = read_anew(digits);
#pragma unroll
    for (int i = 0; i < kItems; ++i) atomicAdd(own + digit(i, first), 1u);
  }
  __syncthreads();
  uint32_t* const of_digit = counts + (threadIdx.x ^ turn);
  constexpr bool kHolds = kWarps <= 12;  // registers hold the counts of all warps
  uint32_t of_warp[kHolds ? kWarps : 1], total = 0;
  if (threadIdx.x < kDigits) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += of_warp[kHolds ? w : 0] = of_digit[w * kDigits];
    counted(total);
  }
  const uint32_t begin = sum_before(total, warps);
  if (threadIdx.x < kDigits) {
    uint32_t last = begin - 1;  // the place of the last element before those of the warp and the digit
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const uint32_t count = kHolds ? of_warp[kHolds ? w : 0] : of_digit[w * kDigits];
      of_digit[w * kDigits] = last;
      last += count;
    }
  }
  __syncthreads();
  if (__any_sync(kEveryLane, live)) {
    const Digits again = read_anew(digits);
    const uint32_t after = lanes_after(), up_to_this = lanes_up_to_this(), ones = after | up_to_this;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t d = digit(i, again), same = lanes_with(d, ones);
      const uint32_t place = own[d] + __popc(same & up_to_this);
      __syncwarp();
      if ((same & after) == 0) own[d] = place;
      put(i, place);
      __syncwarp();
    }
  }
  return begin;
}

// The indices of the elements of a thread, two in each word.
template <int kItems>
struct Indices {
  static_assert(kItems % 2 == 0);
  uint32_t words[kItems / 2];

  // Reads them from `indices` of the block; before the first pass, they are the places of the elements. `first`: the
  // place of the thread's first element.
  __device__ __forceinline__ void read(const uint16_t* indices, uint32_t first, bool moved) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t own = moved ? (indices + first)[i * 32] : first + i * 32;
      words[i / 2] = i % 2 ? words[i / 2] | own << 16 : own;
    }
  }
  __device__ __forceinline__ uint16_t operator[](int i) const {
    return static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
  }
};

}  // namespace
}  // namespace jaxgpuops::sort
