// choose: the places of what a mask chooses, in order. pick: the elements of one or two arrays at these places, or at
// those of elements that differ from the one before, with how far it is from each place to the next.
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
#include <type_traits>

#include "common/cuda/set_words.h"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/warp.cuh"
#include "search/cuda/choose_bits.cuh"
#include "search/cuda/launch.h"

namespace jaxgpuops::search {
namespace {

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

// Calls f with a zero of the unsigned type that has the width of an array's elements.
template <class F>
__device__ __forceinline__ void with_bytes(int bytes, F f) {
  if (bytes == 4) {
    f(uint32_t{});
  } else if (bytes == 8) {
    f(uint64_t{});
  } else if (bytes == 2) {
    f(uint16_t{});
  } else {
    f(uint8_t{});
  }
}

// Where the chosen elements of a unit go: the first of them is number `before` of its row. `first`: the place of the
// unit's first bit; `last`: one more than the last place that is chosen before the unit, or 0. Only kStarts needs it.
struct Unit {
  uint32_t row, before, last;
  int32_t first;
};

// Calls f(from, to) for each array, with the elements of a unit and where its results go.
template <class F>
__device__ __forceinline__ void for_arrays(const ChooseArgs& a, const Unit& unit, F f) {
#pragma unroll 1  // fewer instructions to fetch
  for (int k = 0; k < a.arrays; ++k) {
    with_bytes(a.array_bytes[k], [&](auto element) {
      using T = decltype(element);
      f(static_cast<const T*>(a.buffers.array[k]) + unit.row * a.length + unit.first,
        static_cast<T*>(a.buffers.out[k]) + unit.row * a.size + unit.before);
    });
  }
}

// Writes the results of the `count` listed places of a unit; all lanes of a warp call this.
template <bool kPicks, bool kStarts>
__device__ __forceinline__ void copy_listed(const ChooseArgs& a, const Unit& unit, const uint16_t* list,
                                            uint32_t count) {
  const uint32_t lane = threadIdx.x % 32;
  if (unit.before < a.size) {
    const auto wanted = static_cast<uint32_t>(min(int64_t{count}, a.size - unit.before));
    if constexpr (kPicks) {
      for_arrays(a, unit, [&](const auto* from, auto* to) {
        constexpr int kTogether = 4;
        for (uint32_t i = lane; i < wanted; i += 32 * kTogether) {
          std::remove_pointer_t<decltype(to)> element[kTogether];
#pragma unroll
          for (uint32_t j = 0; j < kTogether; ++j) element[j] = from[list[min(i + j * 32, wanted - 1)]];
#pragma unroll
          for (uint32_t j = 0; j < kTogether; ++j)
            if (i + j * 32 < wanted) to[i + j * 32] = element[j];
        }
      });
    } else {
      int32_t* const to = static_cast<int32_t*>(a.buffers.out[0]) + unit.row * a.size + unit.before;
      for (uint32_t i = lane; i < wanted; i += 32) to[i] = unit.first + list[i];
    }
  }
  if constexpr (kStarts) {  // one start more than is wanted says how often the last element is there
    int32_t* const to = a.buffers.counts + unit.row * a.size + unit.before;
    const auto known = static_cast<uint32_t>(min(int64_t{count}, a.size + 1 - unit.before));
    for (uint32_t i = lane; i < known; i += 32) {
      const int32_t last = i > 0 ? list[i - 1] : static_cast<int32_t>(unit.last) - 1 - unit.first;
      if (i + unit.before > 0) to[static_cast<int32_t>(i) - 1] = list[i] - last;
    }
  }
}

// Lists the places of a unit and writes the results; all lanes of a warp call this. To list more than kMost places
// would take long, so the lanes then write without a list, one word after the other.
template <bool kPicks, bool kStarts, uint32_t kMost>
__device__ __forceinline__ void write_unit(const ChooseArgs& a, const Unit& unit, uint32_t word, uint32_t up_to,
                                           uint16_t* list) {
  const uint32_t count = shuffle_from(up_to, 31), lane = threadIdx.x % 32;
  if (count == 0 || unit.before >= a.size + kStarts) return;
  if (count <= kMost) {
    __syncwarp();
    list_places(word, up_to, list);
    __syncwarp();
    copy_listed<kPicks, kStarts>(a, unit, list, count);
    return;
  }
  const auto wanted = static_cast<uint32_t>(min(int64_t{count}, a.size - unit.before));
  const uint32_t at = up_to - __popc(word), below = (1u << lane) - 1;
  // Calls f(place in the unit, number of the result in it) for the lane's bits.
  const auto for_bits = [&](auto f) {
#pragma unroll 4
    for (int i = 0; i < 32; ++i) {
      const uint32_t other = shuffle_from(word, i), next = shuffle_from(at, i) + __popc(other & below);
      f(i, other, next);
    }
  };
  if constexpr (kPicks) {
    for_arrays(a, unit, [&](const auto* from, auto* to) {
      for_bits([&](int i, uint32_t other, uint32_t next) {
        if ((other >> lane & 1) && next < wanted) to[next] = from[i * 32 + lane];
      });
    });
  } else {
    int32_t* const to = static_cast<int32_t*>(a.buffers.out[0]) + unit.row * a.size + unit.before;
    for_bits([&](int i, uint32_t other, uint32_t next) {
      if ((other >> lane & 1) && next < wanted) to[next] = unit.first + i * 32 + static_cast<int32_t>(lane);
    });
  }
  if constexpr (kStarts) {
    int32_t* const to = a.buffers.counts + unit.row * a.size + unit.before;
    const auto known = static_cast<uint32_t>(min(int64_t{count}, a.size + 1 - unit.before));
    int32_t last = static_cast<int32_t>(unit.last) - 1 - unit.first;
    const auto last_of = [](int i, uint32_t bits) { return i * 32 + 31 - __clz(static_cast<int>(bits)); };
    for_bits([&](int i, uint32_t other, uint32_t next) {
      const int32_t before = other & below ? last_of(i, other & below) : last;
      if ((other >> lane & 1) && next < known && next + unit.before > 0)
        to[static_cast<int32_t>(next) - 1] = i * 32 + static_cast<int32_t>(lane) - before;
      if (other) last = last_of(i, other);
    });
  }
}

// Fills results from `begin` on and before `end`.
template <class T>
__device__ __forceinline__ void fill_results(T* to, uint32_t begin, uint32_t end, T fill) {
  constexpr uint32_t kVector = 16 / sizeof(T);
  const uint32_t past = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(to + begin) / sizeof(T)) % kVector;
  const uint32_t head = min(end - begin, (kVector - past) % kVector), vectors = (end - begin - head) / kVector;
  struct alignas(16) Vector {
    T element[kVector];
  } vector;
#pragma unroll
  for (T& element : vector.element) element = fill;
  auto* const whole = reinterpret_cast<uint4*>(to + begin + head);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < vectors; i += blockDim.x) whole[i] = bits_as<uint4>(vector);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < end - begin - kVector * vectors; i += blockDim.x)
    to[begin + (i < head ? i : i + kVector * vectors)] = fill;
}

// The first chosen place of a row, or 0. All threads of the block call this.
template <class Bits>
__device__ __forceinline__ uint32_t first_place(const ChooseArgs& a, const Bits& bits) {
  __shared__ uint32_t firsts[kMostChooseThreads / 32];
  const uint32_t lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (uint32_t first = 0; first * 32 < a.length + bits.past(); first += blockDim.x) {
    const uint32_t at = first + threadIdx.x, word = bits.word(at, bits.load(at));
    if (!__syncthreads_or(word != 0)) continue;
    const uint32_t place = at * 32 + __ffs(static_cast<int>(word)) - 1 - bits.past();
    const uint32_t of_warp = largest_of_warp(word ? ~place : 0);
    if (lane == 0) firsts[threadIdx.x / 32] = of_warp;
    __syncthreads();
    return ~largest_of_warp(lane < warps ? firsts[lane] : 0);
  }
  return 0;
}

// The fills of a row. If a fill is a row itself, it is its element at the first chosen place.
struct Fills {
  uint64_t bits[Choose::kMostArrays];

  template <class Bits>
  __device__ __forceinline__ Fills(const ChooseArgs& a, uint32_t row, const Bits& words, bool needed) {
    if (!needed) return;
    uint32_t first = 0;
    if (!Bits::kStarts && (a.is_row[0] || a.is_row[1])) first = first_place(a, words);
#pragma unroll
    for (int k = 0; k < Choose::kMostArrays; ++k) {
      if (k >= max(a.arrays, 1)) break;
      with_bytes(a.array_bytes[k], [&](auto element) {
        bits[k] =
            static_cast<const decltype(element)*>(a.buffers.fill[k])[a.fill_at[k](row) + (a.is_row[k] ? first : 0)];
      });
    }
  }
};

// Fills the results behind the `total` elements that are chosen in a row. The block of the last tile fills the part in
// which they end; each block without a tile fills one other part. `last`: one more than the last place that is chosen.
template <bool kStarts>
__device__ __forceinline__ void fill_part(const ChooseArgs& a, uint32_t row, bool is_tile, uint32_t part,
                                          uint32_t total, uint32_t last, const Fills& fills) {
  if (is_tile) part = total / a.fill;
  int32_t* const counts = a.buffers.counts + row * a.size;
  if (kStarts && is_tile && threadIdx.x == 0 && total > 0 && total <= a.size)
    counts[total - 1] = static_cast<int32_t>(a.length - last + 1);
  const uint32_t begin = is_tile ? total : part * a.fill;
  if (begin < total + !is_tile) return;
  const auto end = static_cast<uint32_t>(min(int64_t{part + 1} * a.fill, a.size));
  if (begin >= end) return;
#pragma unroll
  for (int k = 0; k < Choose::kMostArrays; ++k) {
    if (k >= max(a.arrays, 1)) break;
    with_bytes(a.array_bytes[k], [&](auto element) {
      using T = decltype(element);
      fill_results(static_cast<T*>(a.buffers.out[k]) + row * a.size, begin, end, static_cast<T>(fills.bits[k]));
    });
  }
  if (kStarts) fill_results(counts, begin, end, 0);
}

// One more than the place of the last bit of a warp's words, which begin at `first`, or 0 if there is none.
__device__ __forceinline__ uint32_t last_of_words(uint32_t word, int32_t first) {
  const uint32_t lane = threadIdx.x % 32;
  return largest_of_warp(word ? static_cast<uint32_t>(first) + lane * 32 + 32 - __clz(static_cast<int>(word)) : 0);
}

// What a block does: it has a tile, or a part of a row's results other than the first part.
struct Turn {
  uint32_t row, tile, part;
  bool is_tile;
  bool counts;  // whether the block must know what is chosen before it: not for a part that has only fills in any case

  __device__ Turn(const ChooseArgs& a, uint32_t number) {
    const uint32_t tiles = a.outer * a.tiles;
    is_tile = number < tiles;
    row = is_tile ? number / a.tiles : (number - tiles) / (a.parts - 1);
    tile = is_tile ? number - row * a.tiles : a.tiles;
    part = is_tile ? 0 : 1 + (number - tiles) - row * (a.parts - 1);
    counts = int64_t{part} * a.fill < a.length;
  }
};

// ---- Few elements ---------------------------------------------------------------------------------------------------

template <class Bits, bool kPicks>
__global__ void __launch_bounds__(kMostChooseThreads, 2) choose_recount_kernel(const __grid_constant__ ChooseArgs a) {
  constexpr bool kStarts = Bits::kStarts;
  __shared__ uint32_t sums[kMostChooseThreads / 32];
  __shared__ uint32_t lasts[kStarts ? kMostChooseThreads / 32 : 1],
      earlier_lasts[kStarts ? kMostChooseThreads / 32 : 1];
  auto* const list = reinterpret_cast<uint16_t*>(dynamic_shared_memory()) + threadIdx.x / 32 * kRecountList;
  const uint32_t threads = blockDim.x;
  const auto warps = static_cast<int>(threads / 32);
  const Turn turn(a, blockIdx.x);
  const Bits bits(a, turn.row);
  const bool is_last = turn.tile + 1 >= a.tiles;
  const Fills fills(a, turn.row, bits, is_last);
  uint32_t word = 0, earlier = bits.count(turn.counts ? turn.tile * threads : 0), last = 0;
  for (uint32_t t = Bits::kCounts ? turn.tile : 0; t <= turn.tile && turn.counts; ++t) {
    earlier += __popc(word);
    if (kStarts && word) last = ((t - 1) * threads + threadIdx.x) * 32 + 32 - __clz(static_cast<int>(word));
    const uint32_t word_at = t * threads + threadIdx.x;
    word = t < a.tiles ? bits.word(word_at, bits.load(word_at)) : 0;
  }
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto first = static_cast<int32_t>((turn.tile * threads + warp * 32) * 32) - bits.past();
  if (kStarts && turn.is_tile) {  // the barrier of sum_before() is between the stores and the loads
    const uint32_t own = last_of_words(word, first), of_warp = largest_of_warp(last);
    if (lane == 0) lasts[warp] = own, earlier_lasts[warp] = of_warp;
  }
  uint32_t count = 0, before = 0, at = 0;
  if (turn.is_tile) at = sum_before(static_cast<uint32_t>(__popc(word)), sums, warps, count);
  if (turn.tile > 0 && turn.counts) sum_before(earlier, sums, warps, before);
  if (turn.is_tile) {
    const uint32_t before_unit = shuffle_from(at, 0);
    uint32_t before_last = 0;
    if constexpr (kStarts) {
      const uint32_t own = lane < warps ? lasts[lane] : 0, of_earlier = lane < warps ? earlier_lasts[lane] : 0;
      before_last = largest_of_warp(max(of_earlier, lane < warp ? own : 0));
      last = largest_of_warp(max(of_earlier, own));
    }
    write_unit<kPicks, kStarts, kRecountList>(a, {turn.row, before + before_unit, before_last, first}, word,
                                              at - before_unit + __popc(word), list);
  }
  if (is_last) fill_part<kStarts>(a, turn.row, turn.is_tile, turn.part, before + count, last, fills);
}

// ---- Many elements --------------------------------------------------------------------------------------------------

// Writes the results for a row of few different elements. A warp finds the place of one: how many have smaller keys.
__device__ __noinline__ void write_distinct(const ChooseArgs& a, Distinct& distinct) {
  constexpr uint32_t kWarps = kMostChooseThreads / 32;
  const uint32_t lane = threadIdx.x % 32, count = distinct.count, warps = gridDim.x * kWarps;
  auto* const keys = reinterpret_cast<uint64_t*>(dynamic_shared_memory());
  for (uint32_t i = threadIdx.x; i < count; i += kMostChooseThreads) keys[i] = distinct.listed_keys[i];
  __syncthreads();
  const auto first_of = [&](uint32_t i) { return ~distinct.firsts[distinct.listed[i]]; };
  const auto* const x = static_cast<const char*>(a.elements);
  for (uint32_t i = blockIdx.x * kWarps + threadIdx.x / 32; i < count; i += warps) {
    const uint64_t own = keys[i];
    uint32_t before = 0;
    for (uint32_t j = lane; j < count; j += 32) before += keys[j] < own;
    before = sum_of_warp(before);
    if (lane == 0) distinct.ranks[distinct.listed[i]] = before;
    if (lane > 0 || before >= a.size) continue;
    const uint32_t first = first_of(i);
    with_bytes(a.array_bytes[0], [&](auto element) {
      using T = decltype(element);
      static_cast<T*>(a.buffers.out[0])[before] = reinterpret_cast<const T*>(x)[first];
    });
    if (a.arrays > 1) static_cast<uint32_t*>(a.buffers.out[1])[before] = first;
    a.buffers.counts[before] = static_cast<int32_t>(distinct.counts[distinct.listed[i]]);
  }
  const auto size = static_cast<uint32_t>(a.size);
  if (count < size) {  // each block fills an equal share of what is left
    uint64_t least = ~uint64_t{0};
    for (uint32_t j = lane; j < count; j += 32) least = min(least, keys[j]);
    least = ~largest_of_warp(~least);
    uint32_t smallest = 0;  // its number among those listed
    for (uint32_t j = lane; j < count; j += 32) smallest = keys[j] == least ? j : smallest;
    const uint32_t first = first_of(largest_of_warp(smallest));
    const uint32_t share = (size - count + gridDim.x - 1) / gridDim.x;
    const uint32_t begin = min(size, count + blockIdx.x * share), end = min(size, begin + share);
    with_bytes(a.array_bytes[0], [&](auto element) {
      using T = decltype(element);
      const T fill = a.is_row[0] ? reinterpret_cast<const T*>(x)[first]
                                 : static_cast<const T*>(a.buffers.fill[0])[a.fill_at[0](0)];
      fill_results(static_cast<T*>(a.buffers.out[0]), begin, end, fill);
    });
    if (a.arrays > 1) fill_results(static_cast<uint32_t*>(a.buffers.out[1]), begin, end, first);
    fill_results(a.buffers.counts, begin, end, 0);
  }
  wait_for_predecessor();
}

// A GPU starts blocks in the order of their numbers, so a block only waits for blocks that have started before it. The
// workspace has a word for each tile of each row: the tile's count plus 1, or 0 until the count is known. With kStarts,
// the word has 64 bits, and above the count one more than the last place in the tile, or 0.
template <class Bits, bool kPicks>
__global__ void __launch_bounds__(kMostChooseThreads, Bits::kBlocks)
    choose_look_back_kernel(const __grid_constant__ ChooseArgs a) {
  constexpr bool kStarts = Bits::kStarts;
  constexpr uint32_t kWarps = kMostChooseThreads / 32;
  using Status = std::conditional_t<kStarts, uint64_t, uint32_t>;
  __shared__ uint32_t sums[kWarps], lasts_of_warps[kStarts ? kWarps : 1], earlier_lasts[kStarts ? kWarps : 1];
  auto* const words = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  uint32_t* const counts = words + a.units * 32;  // of each unit; later, of all units before it in the tile
  uint32_t* const lasts = counts + a.units;       // of each unit, for kStarts: one more than the last place, or 0
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto* const list = reinterpret_cast<uint16_t*>(lasts + (kStarts ? a.units : 0)) + warp * a.list;
  if (kStarts && a.distinct != nullptr && a.distinct->sorts == 0) {
    if (a.distinct->many == 0) write_distinct(a, *a.distinct);
    return;
  }
  const Turn turn(a, blockIdx.x);
  const Bits bits(a, turn.row);
  const bool fills = turn.tile + 1 >= a.tiles;
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
    if constexpr (kStarts) {
      if (a.bits != nullptr) a.bits[word_at] = word;
      const uint32_t last = last_of_words(word, static_cast<int32_t>((first_unit + unit) * 1024));
      if (lane == 0) lasts[unit] = last;
    }
    if (is_listed(count)) {
      list_places(word, up_to, list + listed, kNear ? (unit - own_unit) * 1024 : 0);
      listed += count;
    } else {
      words[unit * 32 + lane] = word;
    }
  }
  __syncthreads();
  uint32_t count = 0, before = 0, earlier = 0, own_last = 0, before_last = 0;
  const bool has_unit = threadIdx.x < units;
  if constexpr (kStarts) {
    const uint32_t last = largest_of_warp(has_unit ? lasts[threadIdx.x] : 0);
    if (lane == 0) lasts_of_warps[warp] = last;
  }
  const uint32_t at = sum_before(has_unit ? counts[threadIdx.x] : 0, sums, static_cast<int>(kWarps), count);
  if (has_unit) counts[threadIdx.x] = at;
  wait_for_predecessor();  // the predecessor sets the workspace to 0
  if constexpr (kStarts) own_last = largest_of_warp(lane < kWarps ? lasts_of_warps[lane] : 0);
  auto* const status = reinterpret_cast<Status*>(a.workspace + turn.row * a.workspace_bytes);
  if (threadIdx.x == 0 && turn.is_tile) {
    Status word = count + 1;
    if constexpr (kStarts) word |= static_cast<Status>(own_last) << 32;
    store_relaxed(status + turn.tile, word);
  }
  for (uint32_t t = threadIdx.x; t < turn.tile && turn.counts; t += kMostChooseThreads) {
    Status word;
    do {
      word = load_relaxed(status + t);
    } while (word == 0);
    earlier += static_cast<uint32_t>(word) - 1;
    if constexpr (kStarts) before_last = max(before_last, static_cast<uint32_t>(word >> 32));
  }
  if constexpr (kStarts) {
    before_last = largest_of_warp(before_last);
    if (lane == 0) earlier_lasts[warp] = before_last;
  }
  sum_before(earlier, sums, static_cast<int>(kWarps), before);
  if constexpr (kStarts) before_last = largest_of_warp(lane < kWarps ? earlier_lasts[lane] : 0);
  if (kStarts && a.bits != nullptr && has_unit) a.before[first_unit + threadIdx.x] = before + counts[threadIdx.x];
  // The units that are listed come before the others. If they are neighbours, they have one list, which is written at
  // once.
  const auto unit_at = [&](uint32_t unit) -> Unit {
    uint32_t last = 0;
    if constexpr (kStarts) {  // of the nearest unit before that has one
      for (uint32_t end = unit; end > 0 && last == 0; end = end > 32 ? end - 32 : 0)
        last = largest_of_warp(lane < end ? lasts[end - 1 - lane] : 0);
      last = max(last, before_last);
    }
    return {turn.row, before + counts[unit], last, static_cast<int32_t>((first_unit + unit) * 1024) - bits.past()};
  };
  if (kNear && listed > 0) {
    __syncwarp();
    copy_listed<kPicks, kStarts>(a, unit_at(own_unit), list, listed);
    __syncwarp();
  }
  listed = 0;
  lists = a.early;
#pragma unroll 1
  for (uint32_t unit = own_unit; unit < own_end; unit += step) {
    const uint32_t own = (unit + 1 < units ? counts[unit + 1] : count) - counts[unit];
    if (own == 0) continue;
    if (is_listed(own)) {
      if (!kNear && before + counts[unit] < a.size + kStarts)
        copy_listed<kPicks, kStarts>(a, unit_at(unit), list + listed, own);
      listed += own;
    } else {
      const uint32_t word = words[unit * 32 + lane], up_to = sum_up_to_lane(static_cast<uint32_t>(__popc(word)));
      write_unit<kPicks, kStarts, kChooseList>(a, unit_at(unit), word, up_to, list);
    }
  }
  if (fills)
    fill_part<kStarts>(a, turn.row, turn.is_tile, turn.part, before + count, max(own_last, before_last),
                       Fills(a, turn.row, bits, true));
}

}  // namespace

cudaError_t launch_choose(cudaStream_t stream, const ChoosePlan& plan, const Choose& problem,
                          const ChooseBuffers& buffers, void* workspace, const ChooseDistinct& distinct) {
  if (plan.algorithm == Choosing::kEmpty) return cudaSuccess;
  ChooseArgs a = {};
  a.buffers = buffers;
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
  a.fill = static_cast<uint32_t>(plan.fill);
  a.arrays = problem.arrays;
  a.distinct = distinct.found;
  a.elements = distinct.x;
  a.bits = distinct.bits;
  a.before = distinct.before;
  for (int i = 0; i < Choose::kMostArrays; ++i) {
    a.array_bytes[i] = problem.bytes[i];
    a.fill_at[i] = problem.fill[i];
    a.is_row[i] = problem.is_row[i];
  }
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
        launch_set_words(stream, reinterpret_cast<uint32_t*>(a.workspace), a.outer * a.workspace_bytes / 4, 0, 0);
    if (error != cudaSuccess) return error;
  }
  const auto run = [&](auto bits, auto picks) {
    using Bits = typename decltype(bits)::type;
    constexpr bool kPicks = picks.value;
    return launch(stream, config,
                  recounts ? choose_recount_kernel<Bits, kPicks> : choose_look_back_kernel<Bits, kPicks>, a);
  };
  if (problem.arrays == 0) return run(std::common_type<Mask>{}, std::false_type{});
  if (!problem.starts) return run(std::common_type<Mask>{}, std::true_type{});
  if (problem.bits <= 32) return run(std::common_type<Starts<uint32_t>>{}, std::true_type{});
  return run(std::common_type<Starts<uint64_t>>{}, std::true_type{});
}

}  // namespace jaxgpuops::search
