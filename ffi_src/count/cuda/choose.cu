// choose: the places of what a mask chooses, or of elements that differ from the one before, in order.
//
// A block turns a tile of a row into bits, in units of one word for each lane of a warp. It counts the set bits, finds
// out how many are set before its tile, and writes the places of its own, one unit by each warp at a time. The results
// of a row are cut into parts, and those behind the last place get the fill value: the block of the row's last tile
// fills the part in which the places end, and each block without a tile fills one other part.
//
// If there is little to read (kRecount), a tile has one unit for each warp, and each block itself counts what is chosen
// before its tile. Otherwise (kLookBack), tiles are so large that blocks take few turns. The bits of a tile, or lists
// of its places, stay in shared memory until the blocks before have published their counts. So blocks wait for each
// other once, not once for each of many small tiles.
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
  int64_t workspace_bytes;  // of a row
  int64_t length, size;
  uint32_t outer, tiles, units, parts;  // `units`: of a tile
  uint32_t list;                        // places that a warp of kLookBack has room to list
  bool early;                           // whether that warp lists places while it reads
  IndexMap fill_at;
  uint32_t bytes;            // of an element
  uint64_t sign, nan_above;  // those of ArgOrder, of a word
};

// ---- Bits -----------------------------------------------------------------------------------------------------------

// A row of a mask, as words of bits. Bit 0 of word 0 stands for the byte at the last multiple of 16 bytes before the
// row, so `past` zeros come before the row's first element.
class Mask {
 public:
  static constexpr int kBlocks = kMaskBlocks;
  static constexpr bool kNear = true;  // the units of a warp are neighbours

  __device__ Mask(const ChooseArgs& a, uint32_t row) {
    const auto* const first = static_cast<const uint8_t*>(a.x) + row * a.length;
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
    uint32_t halves = bits_of(loaded.half[0]) | bits_of(loaded.half[1]) << 16;
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
  static constexpr int kBlocks = kStartsBlocks;  // with registers for many loads at once
  static constexpr bool kNear = false;           // those of all warps take turns

  __device__ Starts(const ChooseArgs& a, uint32_t row)
      : a_(a),
        row_(static_cast<const char*>(a.x) + row * a.length * a.bytes),
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

// ---- Results --------------------------------------------------------------------------------------------------------

// Lists the places of the set bits of a unit, of which each lane has a word. `up_to`: how many bits are set in the
// words of all lanes up to this one; `first`: the place of the first bit. A lane lists its last place first, since the
// highest set bit is found fastest.
__device__ __forceinline__ void list_places(uint32_t word, uint32_t up_to, uint16_t* list, uint32_t first = 0) {
  for (uint16_t* end = list + up_to; word;) {
    const int bit = 31 - __clz(static_cast<int>(word));
    word ^= 1u << bit;
    *--end = static_cast<uint16_t>(first + threadIdx.x % 32 * 32 + bit);
  }
}

// Writes the `count` listed places of a unit; all lanes of a warp call this. `first`: the place of the unit's first
// bit. `before`: how many elements of the row are chosen before the unit.
__device__ __forceinline__ void copy_places(const ChooseArgs& a, uint32_t row, const uint16_t* list, uint32_t count,
                                            int32_t first, uint32_t before) {
  if (before >= a.size) return;
  const auto wanted = static_cast<uint32_t>(min(int64_t{count}, a.size - before));
  int32_t* const to = a.places + row * a.size + before;
  for (uint32_t i = threadIdx.x % 32; i < wanted; i += 32) to[i] = first + list[i];
}

// Lists the places of a unit and writes them; all lanes of a warp call this. To list more than kMost places would take
// long, so the lanes then write the places without a list, one word after the other.
template <uint32_t kMost>
__device__ __forceinline__ void write_places(const ChooseArgs& a, uint32_t row, uint32_t word, uint32_t up_to,
                                             int32_t first, uint32_t before, uint16_t* list) {
  const uint32_t count = shuffle_from(up_to, 31), lane = threadIdx.x % 32;
  if (count == 0 || before >= a.size) return;
  if (count <= kMost) {
    __syncwarp();
    list_places(word, up_to, list);
    __syncwarp();
    copy_places(a, row, list, count, first, before);
    return;
  }
  const auto wanted = static_cast<uint32_t>(min(int64_t{count}, a.size - before));
  int32_t* const to = a.places + row * a.size + before;
  const uint32_t at = up_to - __popc(word);
#pragma unroll 4
  for (int i = 0; i < 32; ++i) {
    const uint32_t other = shuffle_from(word, i), next = shuffle_from(at, i) + __popc(other & ((1u << lane) - 1));
    if ((other >> lane & 1) && next < wanted) to[next] = first + i * 32 + static_cast<int32_t>(lane);
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

// Fills the results behind the `total` places of a row. The block of the last tile fills the part in which the places
// end; each block without a tile fills one other part.
__device__ __forceinline__ void fill_part(const ChooseArgs& a, uint32_t row, bool is_tile, uint32_t part,
                                          uint32_t total, int32_t fill) {
  if (is_tile) part = total / kChooseFill;
  const uint32_t begin = is_tile ? total : part * kChooseFill;
  if (begin < total + !is_tile) return;
  const auto end = static_cast<uint32_t>(min(int64_t{part + 1} * kChooseFill, a.size));
  if (begin < end) fill_results(a.places + row * a.size, begin, end, fill);
}

// What a block does: it has a tile, or a part of a row's results other than the first part.
struct Turn {
  uint32_t row, tile, part;
  bool is_tile;

  __device__ Turn(const ChooseArgs& a, uint32_t number) {
    const uint32_t tiles = a.outer * a.tiles;
    is_tile = number < tiles;
    row = is_tile ? number / a.tiles : (number - tiles) / (a.parts - 1);
    tile = is_tile ? number - row * a.tiles : a.tiles;
    part = is_tile ? 0 : 1 + (number - tiles) - row * (a.parts - 1);
  }
};

// ---- Few elements ---------------------------------------------------------------------------------------------------

template <class Bits>
__global__ void __launch_bounds__(kMostChooseThreads, 2) choose_recount_kernel(const __grid_constant__ ChooseArgs a) {
  __shared__ uint32_t sums[kMostChooseThreads / 32];
  auto* const list = reinterpret_cast<uint16_t*>(dynamic_shared_memory()) + threadIdx.x / 32 * kRecountList;
  const uint32_t threads = blockDim.x;
  const auto warps = static_cast<int>(threads / 32);
  const Turn turn(a, blockIdx.x);
  const int32_t fill = a.fill[a.fill_at(turn.row)];
  const Bits bits(a, turn.row);
  uint32_t word = 0, earlier = bits.count(turn.tile * threads);
  for (uint32_t t = Bits::kCounts ? turn.tile : 0; t <= turn.tile; ++t) {
    earlier += __popc(word);
    const uint32_t word_at = t * threads + threadIdx.x;
    word = t < a.tiles ? bits.word(word_at, bits.load(word_at)) : 0;
  }
  uint32_t count = 0, before = 0, at = 0;
  if (turn.is_tile) at = sum_before(static_cast<uint32_t>(__popc(word)), sums, warps, count);
  if (turn.tile > 0) sum_before(earlier, sums, warps, before);
  if (turn.is_tile) {
    const auto first = static_cast<int32_t>((turn.tile * threads + threadIdx.x / 32 * 32) * 32) - bits.past();
    const uint32_t before_unit = shuffle_from(at, 0);
    write_places<kRecountList>(a, turn.row, word, at - before_unit + __popc(word), first, before + before_unit, list);
  }
  if (turn.tile + 1 >= a.tiles) fill_part(a, turn.row, turn.is_tile, turn.part, before + count, fill);
}

// ---- Many elements --------------------------------------------------------------------------------------------------

// A GPU starts blocks in the order of their numbers, so a block only waits for blocks that have started before it. The
// workspace has a word for each tile of each row: the tile's count plus 1, or 0 until the count is known.
template <class Bits>
__global__ void __launch_bounds__(kMostChooseThreads, Bits::kBlocks)
    choose_look_back_kernel(const __grid_constant__ ChooseArgs a) {
  __shared__ uint32_t sums[kMostChooseThreads / 32];
  auto* const words = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  uint32_t* const counts = words + a.units * 32;  // of each unit; later, of all units before it in the tile
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr uint32_t kWarps = kMostChooseThreads / 32;
  auto* const list = reinterpret_cast<uint16_t*>(counts + a.units) + warp * a.list;
  const Turn turn(a, blockIdx.x);
  const Bits bits(a, turn.row);
  const bool fills = turn.tile + 1 >= a.tiles;
  const int32_t fill = fills ? a.fill[a.fill_at(turn.row)] : 0;
  const uint32_t units = turn.is_tile ? a.units : 0, first_unit = turn.tile * a.units;
  // While elements arrive, a warp with several units already lists the places of its units, as long as there is room.
  // It keeps the words of units for which there is no room.
  uint32_t listed = 0;
  bool lists = a.early;
  const auto is_listed = [&](uint32_t count) {
    return lists = lists && count <= kChooseList && listed + count <= a.list;
  };
  constexpr bool kNear = Bits::kNear;
  const uint32_t each = kNear ? (units + kWarps - 1) / kWarps : 1, step = kNear ? 1 : kWarps;
  const uint32_t own_unit = warp * each, own_end = kNear ? min(units, own_unit + each) : units;
  typename Bits::Loaded next = {};
  if (own_unit < own_end) next = bits.load((first_unit + own_unit) * 32 + lane);
#pragma unroll 1
  for (uint32_t unit = own_unit; unit < own_end; unit += step) {
    const auto loaded = next;
    const uint32_t word_at = (first_unit + unit) * 32 + lane;
    if (unit + step < own_end) next = bits.load(word_at + step * 32);
    const uint32_t word = bits.word(word_at, loaded), up_to = sum_up_to_lane(static_cast<uint32_t>(__popc(word)));
    const uint32_t count = shuffle_from(up_to, 31);
    if (lane == 0) counts[unit] = count;
    if (is_listed(count)) {
      list_places(word, up_to, list + listed, kNear ? (unit - own_unit) * 1024 : 0);
      listed += count;
    } else {
      words[unit * 32 + lane] = word;
    }
  }
  __syncthreads();
  uint32_t count = 0, before = 0, earlier = 0;
  const bool has_unit = threadIdx.x < units;
  const uint32_t at = sum_before(has_unit ? counts[threadIdx.x] : 0, sums, static_cast<int>(kWarps), count);
  if (has_unit) counts[threadIdx.x] = at;
  wait_for_predecessor();  // the predecessor sets the workspace to 0
  auto* const status = reinterpret_cast<uint32_t*>(a.workspace + turn.row * a.workspace_bytes);
  if (threadIdx.x == 0 && turn.is_tile) store_relaxed(status + turn.tile, count + 1);
  for (uint32_t t = threadIdx.x; t < turn.tile; t += kMostChooseThreads) {
    uint32_t word;
    do {
      word = load_relaxed(status + t);
    } while (word == 0);
    earlier += word - 1;
  }
  sum_before(earlier, sums, static_cast<int>(kWarps), before);
  // The units that are listed come before the others. If they are neighbours, they have one list, which is written at
  // once.
  const auto place_of = [&](uint32_t unit) { return static_cast<int32_t>((first_unit + unit) * 1024) - bits.past(); };
  if (kNear && listed > 0) {
    __syncwarp();
    copy_places(a, turn.row, list, listed, place_of(own_unit), before + counts[own_unit]);
    __syncwarp();
  }
  listed = 0;
  lists = a.early;
#pragma unroll 1
  for (uint32_t unit = own_unit; unit < own_end; unit += step) {
    const int32_t first = place_of(unit);
    const uint32_t own = (unit + 1 < units ? counts[unit + 1] : count) - counts[unit];
    if (is_listed(own)) {
      if (!kNear) copy_places(a, turn.row, list + listed, own, first, before + counts[unit]);
      listed += own;
    } else {
      const uint32_t word = words[unit * 32 + lane], up_to = sum_up_to_lane(static_cast<uint32_t>(__popc(word)));
      write_places<kChooseList>(a, turn.row, word, up_to, first, before + counts[unit], list);
    }
  }
  if (fills) fill_part(a, turn.row, turn.is_tile, turn.part, before + count, fill);
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
  a.units = static_cast<uint32_t>(plan.units);
  a.list = static_cast<uint32_t>(plan.list);
  a.early = plan.early;
  a.parts = static_cast<uint32_t>(plan.parts);
  a.fill_at = problem.fill;
  a.bytes = problem.bits / 8;
  const int raised = std::max(32 - problem.bits, 0);
  a.sign = problem.order.ascending.sign << raised;
  a.nan_above = (problem.order.ascending.nan_above + 1 << raised) - 1;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(plan.threads);
  config.shared_bytes = plan.shared_bytes;
  const bool recounts = plan.algorithm == Choosing::kRecount;
  if (!recounts) {
    config.overlap = plan.overlap;
    const cudaError_t error =
        launch_set(stream, reinterpret_cast<uint32_t*>(a.workspace), a.outer * a.workspace_bytes / 4, 0, 0);
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
