// choose: the places of what a mask chooses, or of elements that differ from the one before, in order.
//
// A block makes bits of a tile of a row, one word for each thread. It counts them, learns how many come before the
// tile, and writes the places of its own. The results behind them are divided into parts; the first are filled by the
// block that has the last tile of the row, others by blocks that have no tile. Blocks learn what comes before them by
// decoupled look-back, while they already load their next tile; if there is little to read, each counts it for itself.
//
// Bytes moved: every element is read once, and every result is written once.
#include <cuda_runtime.h>

#include <algorithm>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/warp.cuh"
#include "count/cuda/launch.h"

namespace jaxgpuops::count {
namespace {

struct ChooseArgs {
  const void* x;
  const int32_t* fill;
  int32_t* places;
  char* workspace;
  int64_t workspace_bytes;  // of a row; at the front of the first one is the ticket
  int64_t length, size;
  uint32_t outer, tiles, parts;
  IndexMap fill_at;
  uint32_t bytes;            // of an element
  uint64_t sign, nan_above;  // those of ArgOrder, of a word
};

// ---- Bits -----------------------------------------------------------------------------------------------------------

// A row of a mask, as words of bits. Bit 0 of word 0 stands for the byte at the last multiple of 16 bytes before the
// row, so `past` zeros come before the row's first element.
class Mask {
 public:
  static constexpr int kBlocks = kChooseBlocks;

  __device__ Mask(const ChooseArgs& a, uint32_t row) {
    const auto* const first = static_cast<const uint8_t*>(a.x) + row * a.length;
    past_ = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(first)) % 16;
    bytes_ = first - past_;
    end_ = past_ + static_cast<uint32_t>(a.length);
  }

  __device__ int past() const { return static_cast<int>(past_); }

  // Returns word number `at`. For all threads of a warp, `at` minus the thread's number must be the same.
  __device__ __forceinline__ uint32_t word(uint32_t at) const {
    // Neighbouring lanes load neighbouring vectors; then each gets the two halves of its word.
    const uint32_t lane = threadIdx.x % 32, first = 2 * at - lane, second = first + 32;
    const uint4 a = whole(first), b = whole(second);
    uint32_t halves = bits_of(a) | bits_of(b) << 16;
    if (is_part(first)) halves |= bits_of_part(first);
    if (is_part(second)) halves |= bits_of_part(second) << 16;
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
  static constexpr int kBlocks = 2;  // with registers for many loads at once

  __device__ Starts(const ChooseArgs& a, uint32_t row)
      : a_(a),
        row_(static_cast<const char*>(a.x) + row * a.length * a.bytes),
        length_(static_cast<uint32_t>(a.length)) {}

  __device__ int past() const { return 0; }

  static constexpr bool kCounts = false;
  __device__ uint32_t count(uint32_t) const { return 0; }

  __device__ __forceinline__ uint32_t word(uint32_t at) const {
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

// ---- Results --------------------------------------------------------------------------------------------------------

// Writes the places (within the tile) of the set bits of each thread's word to chosen[at] and after it. The caller
// makes the lists of the threads follow each other.
__device__ __forceinline__ void list_places(uint32_t word, uint32_t at, uint16_t* chosen) {
  const uint32_t own = __popc(word), lane = threadIdx.x % 32;
  constexpr uint32_t kDense = 1008;  // of the 1024 bits of a warp
  if (sum_of_warp(own) < kDense) {
    for (; word; word &= word - 1)
      chosen[at++] = static_cast<uint16_t>(threadIdx.x * 32 + __ffs(static_cast<int>(word)) - 1);
    return;
  }
  // If most words are full, lanes that each list their own word write to the same banks. So all lanes of the warp list
  // one word together, then the next.
  uint32_t next = shuffle_from(at, 0);
#pragma unroll 2
  for (uint32_t i = 0; i < 32; ++i) {
    const uint32_t other = shuffle_from(word, static_cast<int>(i));
    if (other >> lane & 1)
      chosen[next + __popc(other & ((1u << lane) - 1))] = static_cast<uint16_t>((threadIdx.x - lane + i) * 32 + lane);
    next += __popc(other);
  }
}

// Fills results from `begin` on and before `end`.
__device__ __forceinline__ void fill_results(int32_t* to, uint32_t begin, uint32_t end, int32_t fill) {
  const uint32_t head =
      min(end - begin, static_cast<uint32_t>((16 - reinterpret_cast<uintptr_t>(to + begin) % 16) / 4 % 4));
  const uint32_t vectors = (end - begin - head) / 4;
  auto* const whole = reinterpret_cast<int4*>(to + begin + head);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < vectors; i += blockDim.x) whole[i] = {fill, fill, fill, fill};
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < end - begin - 4 * vectors; i += blockDim.x)
    to[begin + (i < head ? i : i + 4 * vectors)] = fill;
}

// Writes the results of a tile, or the fill of a block that has no tile. `before` elements are chosen before the tile,
// and `count` in it; `chosen` lists their places.
__device__ __forceinline__ void write_results(const ChooseArgs& a, uint32_t row, uint32_t tile, uint32_t part, int past,
                                              uint32_t before, uint32_t count, const uint16_t* chosen, int32_t fill) {
  const bool is_tile = tile < a.tiles;
  int32_t* const to = a.places + row * a.size;
  if (is_tile) {
    const auto first = static_cast<int32_t>(tile * blockDim.x * 32) - past;
    const auto wanted = static_cast<uint32_t>(max(min(int64_t{count}, a.size - before), int64_t{0}));
    for (uint32_t i = threadIdx.x; i < wanted; i += blockDim.x) to[before + i] = first + chosen[i];
  }
  if (tile + 1 < a.tiles) return;
  // The last tile fills the part in which its places end.
  const uint32_t total = before + count;
  if (is_tile) part = total / kChooseFill;
  const uint32_t begin = is_tile ? total : part * kChooseFill;
  if (begin < total + !is_tile) return;
  const auto end = static_cast<uint32_t>(min(int64_t{part + 1} * kChooseFill, a.size));
  if (begin < end) fill_results(to, begin, end, fill);
}

// ---- Few elements ---------------------------------------------------------------------------------------------------

template <class Bits>
__global__ void __launch_bounds__(kMostChooseThreads, 2) choose_recount_kernel(const __grid_constant__ ChooseArgs a) {
  __shared__ uint32_t sums[kMostChooseThreads / 32];
  auto* const chosen = reinterpret_cast<uint16_t*>(dynamic_shared_memory());  // places in a tile
  const uint32_t threads = blockDim.x, all_tiles = a.outer * a.tiles;
  const auto warps = static_cast<int>(threads / 32);
  const bool is_tile = blockIdx.x < all_tiles;
  const uint32_t row = is_tile ? blockIdx.x / a.tiles : (blockIdx.x - all_tiles) / (a.parts - 1);
  const uint32_t tile = is_tile ? blockIdx.x - row * a.tiles : a.tiles;
  const int32_t fill = a.fill[a.fill_at(row)];
  const Bits bits(a, row);
  uint32_t word = 0, earlier = bits.count(tile * threads);
  for (uint32_t t = Bits::kCounts ? tile : 0; t <= tile; ++t) {
    earlier += __popc(word);
    const uint32_t own = t * threads + threadIdx.x;
    word = t < a.tiles ? bits.word(own) : 0;
  }
  uint32_t count = 0, before = 0, at = 0;
  if (is_tile) at = sum_before(static_cast<uint32_t>(__popc(word)), sums, warps, count);
  if (tile > 0) sum_before(earlier, sums, warps, before);
  if (is_tile && before < a.size) list_places(word, at, chosen);
  __syncthreads();
  const uint32_t part = is_tile ? 0 : 1 + (blockIdx.x - all_tiles) - row * (a.parts - 1);
  write_results(a, row, tile, part, bits.past(), before, count, chosen, fill);
}

// ---- Many elements --------------------------------------------------------------------------------------------------

// A status word says what a tile has published: 0 means nothing yet; with the bit kSum it is the count of this tile and
// all before it; else it is the tile's own count plus 1.
constexpr uint32_t kSum = 1u << 31;

// Returns how many are chosen before the tile. A whole warp must call it.
__device__ __forceinline__ uint32_t look_back(const uint32_t* status, uint32_t tile) {
  uint32_t before = 0;
  for (int t = static_cast<int>(tile - 1 - threadIdx.x % 32);; t -= 32) {
    uint32_t word;
    do {
      word = t < 0 ? kSum : load_relaxed(status + t);
    } while (__any_sync(kEveryLane, word == 0));
    const uint32_t sums = __ballot_sync(kEveryLane, word & kSum);
    const bool is_sum = word & kSum, counts = static_cast<int>(threadIdx.x % 32) < __ffs(static_cast<int>(sums));
    before += sum_of_warp(sums && !counts ? 0 : is_sum ? word & ~kSum : word - 1);
    if (sums) return before;
  }
}

template <class Bits>
__global__ void __launch_bounds__(kMostChooseThreads, Bits::kBlocks)
    choose_look_back_kernel(const __grid_constant__ ChooseArgs a) {
  __shared__ uint32_t sums[kMostChooseThreads / 32];
  __shared__ uint32_t before_tile, tickets[2];
  auto* const chosen = reinterpret_cast<uint16_t*>(dynamic_shared_memory());  // places in a tile
  const uint32_t threads = blockDim.x;
  const auto warps = static_cast<int>(threads / 32);
  const uint32_t all_tiles = a.outer * a.tiles, turns = all_tiles + a.outer * (a.parts - 1);
  const auto row_of = [&](uint32_t turn) {
    return turn < all_tiles ? turn / a.tiles : (turn - all_tiles) / max(a.parts - 1, 1u);
  };
  const auto tile_of = [&](uint32_t turn, uint32_t row) { return turn < all_tiles ? turn - row * a.tiles : a.tiles; };
  // Each turn but the first begins with the word that was loaded in the turn before.
  uint32_t turn = turns, word = 0;
  int32_t fill = 0;
  for (uint32_t number = 0;; ++number) {
    const bool is_tile = turn < all_tiles;
    const uint32_t row = row_of(turn), tile = tile_of(turn, row);
    auto* const status = reinterpret_cast<uint32_t*>(a.workspace + row * a.workspace_bytes) + 1;
    uint32_t count = 0, at = 0;
    if (is_tile) {
      at = sum_before(static_cast<uint32_t>(__popc(word)), sums, warps, count);
      if (threadIdx.x == 0) store_relaxed(status + tile, tile == 0 ? kSum | count : count + 1);
    }
    uint32_t& ticket = tickets[number % 2];  // the other one may still be read
    if (threadIdx.x == 0) ticket = atomicAdd(reinterpret_cast<uint32_t*>(a.workspace), 1u);
    __syncthreads();
    const uint32_t next = ticket;
    uint32_t next_word = 0;
    int32_t next_fill = 0;
    if (next < turns) {
      const uint32_t next_row = row_of(next), next_tile = tile_of(next, next_row);
      if (next_tile + 1 >= a.tiles) next_fill = a.fill[a.fill_at(next_row)];
      if (next_tile < a.tiles) next_word = Bits(a, next_row).word(next_tile * threads + threadIdx.x);
    }
    if (number > 0) {
      if (turn >= turns) return;
      if (threadIdx.x < 32) {
        const uint32_t before = look_back(status, tile);
        if (threadIdx.x == 0) {
          if (is_tile) store_relaxed(status + tile, kSum | (before + count));
          before_tile = before;
        }
      }
      if (is_tile) list_places(word, at, chosen);
      __syncthreads();
      const uint32_t part = is_tile ? 0 : 1 + (turn - all_tiles) - row * (a.parts - 1);
      write_results(a, row, tile, part, is_tile ? Bits(a, row).past() : 0, before_tile, count, chosen, fill);
    }
    turn = next, word = next_word, fill = next_fill;
  }
}

}  // namespace

cudaError_t launch_choose(cudaStream_t stream, const ChoosePlan& plan, const Choose& problem, const void* x,
                          const int32_t* fill, int32_t* places, void* workspace) {
  if (plan.algorithm == Choosing::kEmpty) return cudaSuccess;
  ChooseArgs a = {};
  a.x = x;
  a.fill = fill;
  a.places = places;
  a.workspace = static_cast<char*>(workspace);
  a.workspace_bytes = plan.workspace_bytes;
  a.length = problem.rows.length;
  a.size = problem.size;
  a.outer = static_cast<uint32_t>(problem.rows.outer);
  a.tiles = static_cast<uint32_t>(plan.tiles);
  a.parts = static_cast<uint32_t>(plan.parts);
  a.fill_at = problem.fill;
  a.bytes = problem.bits / 8;
  const int raised = std::max(32 - problem.bits, 0);
  a.sign = problem.order.ascending.sign << raised;
  a.nan_above = (problem.order.ascending.nan_above + 1 << raised) - 1;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(plan.threads);
  config.shared_bytes = plan.threads * 32 * sizeof(uint16_t);
  const bool recounts = plan.algorithm == Choosing::kRecount;
  if (!recounts) {
    const cudaError_t error = cudaMemsetAsync(workspace, 0, a.outer * a.workspace_bytes, stream);
    if (error != cudaSuccess) return error;
  }
  const auto run = [&](auto bits) {
    using Bits = typename decltype(bits)::type;
    return launch(stream, config, recounts ? choose_recount_kernel<Bits> : choose_look_back_kernel<Bits>, a);
  };
  if (!problem.starts) return run(std::common_type<Mask>{});
  if (problem.bits <= 32) return run(std::common_type<Starts<uint32_t>>{});
  return run(std::common_type<Starts<uint64_t>>{});
}

}  // namespace jaxgpuops::count
