// What is chosen, as bits: the elements of a mask that are True, or those of a row that differ from the one before.
#pragma once

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/warp.cuh"
#include "search/cuda/launch.h"

namespace jaxgpuops::search {

struct ChooseArgs {
  ChooseBuffers buffers;
  char* workspace;
  int64_t workspace_bytes;  // of a row
  int64_t length, size;
  uint32_t outer, tiles, units, parts, fill;  // `units`: of a tile
  uint32_t list;                              // places that a warp of kLookBack has room to list
  bool early;                                 // whether that warp lists places while it reads
  int arrays;
  int array_bytes[Choose::kMostArrays];  // of an element of a result
  IndexMap fill_at[Choose::kMostArrays];
  bool is_row[Choose::kMostArrays];
  uint32_t bytes;            // of an element of x
  uint64_t sign, nan_above;  // those of ArgOrder, of a word
  Distinct* distinct;        // null, or the different elements of `elements`, the only row
  const void* elements;
  uint32_t *bits, *before;  // null, or where the words of all units go, and how many bits are set before each unit
};

// A row of a mask, as words of bits. Bit 0 of word 0 stands for the byte at the last multiple of 16 bytes before the
// row, so `past` zeros come before the row's first element.
class Mask {
 public:
  static constexpr int kBlocks = kMaskBlocks;
  static constexpr bool kNear = true;     // the units of a warp are neighbours
  static constexpr bool kStarts = false;  // the results have no counts

  __device__ Mask(const ChooseArgs& a, uint32_t row) {
    const auto* const first = static_cast<const uint8_t*>(a.buffers.x) + row * a.length;
    past_ = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(first)) % 16;
    bytes_ = first - past_;
    end_ = past_ + static_cast<uint32_t>(a.length);
  }

  __device__ int past() const { return static_cast<int>(past_); }

  // For all threads of a warp, the argument `at` of load() and of word(), minus the thread's number, must be the same.
  // Loaded: what a thread loads for its word; neighbouring lanes load neighbouring vectors.
  struct Loaded {
    uint4 half[2];
  };
  __device__ __forceinline__ Loaded load(uint32_t at) const {
    const uint32_t first = 2 * at - threadIdx.x % 32;
    return {{whole(first), whole(first + 32)}};
  }
  __device__ __forceinline__ uint32_t word(uint32_t at, const Loaded& loaded) const {
    const uint32_t lane = threadIdx.x % 32, first = 2 * at - lane, second = first + 32;
    uint32_t parts = 0;  // loaded first, while the whole vectors arrive
    if (is_part(first)) parts = bits_of_part(first);
    if (is_part(second)) parts |= bits_of_part(second) << 16;
    const uint32_t halves = parts | bits_of(loaded.half[0]) | bits_of(loaded.half[1]) << 16;
    const uint32_t low = shuffle_from(halves, 2 * lane % 32), high = shuffle_from(halves, (2 * lane + 1) % 32);
    return __byte_perm(low, high, lane < 16 ? 0x5410 : 0x7632);
  }

  // Returns how many bits the thread finds in its share of the words before word number `end`. This waits for memory
  // less often than word() would.
  static constexpr bool kCounts = true;
  __device__ __forceinline__ uint32_t count(uint32_t end) const {
    uint32_t found = 0;
#pragma unroll 8
    for (uint32_t v = (past_ > 0) + threadIdx.x; v < min(2 * end, end_ / 16); v += blockDim.x) {
      const uint4 four = load_once(vector(v));
      found += __popc(four.x) + __popc(four.y) + __popc(four.z) + __popc(four.w);
    }
    // The vectors that have ends of the row are those of one thread each.
    const uint32_t v = threadIdx.x == 0 ? 0 : end_ / 16;
    if (threadIdx.x < 2 && v < 2 * end && is_part(v) && (threadIdx.x == 0 || v > 0)) found += __popc(bits_of_part(v));
    return found;
  }

 private:
  // Four bytes that are 0 or 1, as four bits.
  static __device__ __forceinline__ uint32_t nibble(uint32_t bytes) { return bytes * 0x10204080u >> 28; }
  static __device__ __forceinline__ uint32_t bits_of(uint4 four) {
    return nibble(four.x) | nibble(four.y) << 4 | nibble(four.z) << 8 | nibble(four.w) << 12;
  }

  __device__ __forceinline__ const uint4* vector(uint32_t v) const {
    return reinterpret_cast<const uint4*>(bytes_) + v;
  }
  __device__ __forceinline__ bool is_whole(uint32_t v) const { return v >= (past_ > 0) && v < end_ / 16; }
  __device__ __forceinline__ bool is_part(uint32_t v) const { return !is_whole(v) && v * 16 < end_; }
  __device__ __forceinline__ uint4 whole(uint32_t v) const {
    return is_whole(v) ? load_once(vector(v)) : uint4{0, 0, 0, 0};
  }
  __device__ __forceinline__ uint32_t bits_of_part(uint32_t v) const {
    return loose(bytes_ + v * 16, v == 0 ? past_ : 0, end_ - v * 16);
  }
  // Returns the bits of a vector of which only bytes [from, end) are in the row.
  static __device__ __noinline__ uint32_t loose(const uint8_t* bytes, uint32_t from, uint32_t end) {
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i)
      if (i >= from && i < end) bits |= uint32_t{bytes[i]} << i;
    return bits;
  }

  const uint8_t* bytes_;
  uint32_t past_, end_;
};

// A row of elements; those that differ from the element before are chosen. Elements of 8 and 16 bits are compared as
// the upper bits of a word.
template <class Word>
class Starts {
 public:
  static constexpr int kBlocks = kStartsBlocks;  // with registers for many loads at once
  static constexpr bool kNear = false;           // units of one warp do not lie side by side
  static constexpr bool kStarts = true;

  __device__ Starts(const ChooseArgs& a, uint32_t row)
      : a_(a),
        row_(static_cast<const char*>(a.buffers.x) + row * a.length * a.bytes),
        length_(static_cast<uint32_t>(a.length)) {}

  __device__ int past() const { return 0; }

  static constexpr bool kCounts = false;
  __device__ uint32_t count(uint32_t) const { return 0; }

  struct Loaded {};  // empty, since word() itself loads what it needs
  __device__ __forceinline__ Loaded load(uint32_t) const { return {}; }
  __device__ __forceinline__ uint32_t word(uint32_t at, const Loaded&) const {
    const uint32_t lane = threadIdx.x % 32, first = (at - lane) * 32 + lane;
    uint32_t own = 0;
    if (first - lane >= length_) return own;
    Word last = 0;  // the element before those of the step
    if (lane == 0 && first > 0) last = load_some<1>(first - 1)[0];
#pragma unroll 1
    for (uint32_t w = 0; w < 32 && first - lane + w * 32 < length_; w += kLoads) {
      const auto words = load_some<kLoads>(first + w * 32);
      if (w == 0) last = equal_word(last);  // not before the other loads, which would wait for it
#pragma unroll
      for (uint32_t j = 0; j < kLoads; ++j) {
        const uint32_t i = first + (w + j) * 32;
        const Word element = equal_word(words[j]), turned = shuffle_from(element, static_cast<int>(lane + 31) % 32);
        const bool differs = element != (lane == 0 ? last : turned);
        const uint32_t bits = __ballot_sync(kEveryLane, i < length_ && (differs || i == 0));
        last = turned;
        if (lane == w + j) own = bits;
      }
    }
    return own;
  }

 private:
  static constexpr uint32_t kLoads = 64 / sizeof(Word);
  template <int kCount>
  struct Words {
    Word word[kCount];
    __device__ Word operator[](int j) const { return word[j]; }
  };

  // Loads elements that are 32 apart; those past the end are anything.
  template <int kCount>
  __device__ __forceinline__ Words<kCount> load_some(uint32_t first) const {
    Words<kCount> words;
    const auto load = [&](auto element, int up) {
      using Element = decltype(element);
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        words.word[j] = Word{reinterpret_cast<const Element*>(row_)[min(first + j * 32, length_ - 1)]} << up;
    };
    if (sizeof(Word) == 8 || a_.bytes == 4) {
      load(Word{}, 0);
    } else if (a_.bytes == 2) {
      load(uint16_t{}, 16);
    } else {
      load(uint8_t{}, 24);
    }
    return words;
  }
  // Returns a word that is the same of equal elements: of both zeros, and of all NaNs.
  __device__ __forceinline__ Word equal_word(Word bits) const {
    const Word magnitude = bits & ~static_cast<Word>(a_.sign);
    return magnitude > static_cast<Word>(a_.nan_above) ? ~Word{0} : magnitude ? bits : 0;
  }

  const ChooseArgs& a_;
  const char* row_;
  uint32_t length_;
};

}  // namespace jaxgpuops::search
