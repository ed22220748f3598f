// Sorts the segments of a tile in the registers of a block, each by itself, by a network whose comparators all put the
// smaller key first. Such a network also sorts any run of neighbouring places if comparators that lead out of the run
// are left out: they would do nothing if smaller keys stood before it, and larger ones behind it. So keys need no
// numbers of segments: bits at the places where segments begin say which comparators to leave out.
//
// A thread has kEach neighbouring places, a bit of one word each. Threads sort theirs, and then merge over lanes by
// shuffles up to the length of the longest segment. Longer parts of a warp would only join segments that begin in one
// part and end in the next one: these are merged all at once. Segments that go on in other warps are then merged
// through shared memory.
#pragma once

#include "common/cuda/intrinsics.cuh"
#include "sort/cuda/kernels.h"
#include "sort/cuda/raised.cuh"
#include "topk/cuda/sort_team.cuh"

namespace jaxgpuops::sort {
namespace {

// Neighbouring places of a thread, each of which has a bit of a word.
template <class Key>
constexpr int kSegmentEach = kNetworkEach * 4 / sizeof(Key);
static_assert(kSegmentEach<uint32_t> == 32);

// The shared memory of a tile of up to kThreads threads. A buffer of the tile's elements stands beside it, with one key
// more for each thread than the thread has places (tile_slot).
template <int kThreads>
struct SegmentBits {
  uint32_t begins[kThreads];            // of each thread, a bit for each place where a segment begins
  uint32_t with_begins[kThreads / 32];  // a bit for each thread that has such a place
  uint32_t sums[kThreads / 32];         // of warps
};

// Where a place of a tile is in the buffer: neither neighbouring threads nor neighbouring places meet in a bank.
template <class Key>
__device__ __forceinline__ uint32_t tile_slot(uint32_t place) {
  return place + place / kSegmentEach<Key>;
}

// The bits of the places from `begin` up to `end` of 32 places, of which `first` is the first.
__device__ __forceinline__ uint32_t place_bits(uint32_t first, uint32_t begin, uint32_t end) {
  const uint32_t from = min(max(begin, first) - first, 32u), to = min(max(end, first) - first, 32u);
  const auto below = [](uint32_t n) { return n < 32 ? (1u << n) - 1 : ~0u; };
  return below(to) & ~below(from);
}

// A thread of a tile. All threads of the block call its functions together. `Bits` has the members of SegmentBits.
template <class Key, class Bits>
struct SegmentNetwork {
  static constexpr int kEach = kSegmentEach<Key>, kEachBits = kEach == 32 ? 5 : 4, kTogether = 16 / sizeof(Key);
  struct alignas(16) Vector {
    Key key[kTogether];
  };

  Bits& bits;
  Vector* buffer;
  uint32_t threads, t;      // of the block; this thread
  uint32_t begins;          // the places where a segment begins
  uint32_t head, tail;      // the places before all these, and from the last of these on
  uint32_t previous, next;  // the nearest other threads in which segments begin

  __device__ static __forceinline__ uint32_t head_of(uint32_t begins) { return (begins & (0u - begins)) - 1; }
  __device__ static __forceinline__ uint32_t tail_of(uint32_t begins) {
    return begins ? ~0u << (31 - __clz(static_cast<int>(begins))) : ~0u;
  }

  // `begins` has bits for all places outside segments, and behind the tile. The first place of the tile has one.
  __device__ __forceinline__ SegmentNetwork(Bits& bits, Key* buffer, uint32_t threads, uint32_t begins)
      : bits(bits),
        buffer(reinterpret_cast<Vector*>(buffer)),
        threads(threads),
        t(threadIdx.x),
        begins(begins),
        head(head_of(begins)),
        tail(tail_of(begins)) {
    const uint32_t lane = t % 32, warp = t / 32, with = __ballot_sync(kEveryLane, begins != 0);
    if (lane == 0) bits.with_begins[warp] = with;
    bits.begins[t] = begins;
    __syncthreads();
    uint32_t before = with & ((1u << lane) - 1), after = with & (~1u << lane), w = warp;
    while (before == 0 && w > 0) before = bits.with_begins[--w];
    previous = before ? w * 32 + 31 - __clz(static_cast<int>(before)) : 0;
    for (w = warp; after == 0 && w + 1 < threads / 32;) after = bits.with_begins[++w];
    next = after ? w * 32 + __ffs(static_cast<int>(after)) - 1 : threads;
  }

  // The thread's places that are in the same segment as those of thread `other`, whose head (or tail, if it comes
  // before this thread) is `theirs`.
  __device__ __forceinline__ uint32_t shared_with(uint32_t other, uint32_t theirs) const {
    if (other == t) return 0;
    return other > t ? (next >= other ? tail & theirs : 0) : (previous <= other ? head & theirs : 0);
  }
  __device__ static __forceinline__ uint32_t reversed(uint32_t mask) { return __brev(mask) >> (32 - kEach); }
  // Keeps the larger or the smaller keys of the places of a mask.
  __device__ static __forceinline__ void choose(Key& own, Key other, bool larger, uint32_t mask, int place) {
    if constexpr (sizeof(Key) == 8) {  // two comparisons would take more instructions
      own = (mask >> place & 1) != 0 && (other > own) == larger ? other : own;
    } else if (mask >> place & 1) {
      own = larger ? max(own, other) : min(own, other);
    }
  }

  // Compares places with those of another thread of the warp, one by one; if kBackwards, with these in reverse order.
  // Returns whether there was any to compare in the warp.
  template <bool kBackwards>
  __device__ __forceinline__ bool exchange(Key (&v)[kEach], uint32_t other) const {
    if ((other ^ t) >= 32) other = t;  // there is none
    const int lane = static_cast<int>(other % 32);
    // The other lane wants to know the head of this one if that comes later.
    uint32_t theirs = __shfl_sync(kEveryLane, other < t ? head : tail, lane);
    if (kBackwards) theirs = reversed(theirs);
    const uint32_t mask = shared_with(other, theirs);
    if (!__any_sync(kEveryLane, mask != 0)) return false;
    const bool larger = other < t;
#pragma unroll
    for (int i = 0; i < kEach / 2; ++i) {
      const int j = kEach - 1 - i;
      const Key a = __shfl_sync(kEveryLane, v[kBackwards ? j : i], lane);
      const Key b = __shfl_sync(kEveryLane, v[kBackwards ? i : j], lane);
      choose(v[i], a, larger, mask, i);
      choose(v[j], b, larger, mask, j);
    }
    return true;
  }

  // Shows all threads of the block the keys.
  __device__ __forceinline__ void publish(const Key (&v)[kEach]) const {
    __syncthreads();
#pragma unroll
    for (int q = 0; q < kEach / kTogether; ++q) {
      Vector together;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) together.key[i] = v[kTogether * q + i];
      buffer[q * threads + t] = together;
    }
    __syncthreads();
  }
  // As exchange(), with any thread of the block that has shown its keys, or with none.
  template <bool kBackwards>
  __device__ __forceinline__ void exchange_published(Key (&v)[kEach], uint32_t other) const {
    if (other >= threads) return;
    uint32_t theirs = other > t ? head_of(bits.begins[other]) : tail_of(bits.begins[other]);
    if (kBackwards) theirs = reversed(theirs);
    const uint32_t mask = shared_with(other, theirs);
    if (mask == 0) return;
    const bool larger = other < t;
#pragma unroll
    for (int q = 0; q < kEach / kTogether; ++q) {
      const Vector together = buffer[q * threads + other];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int place = kBackwards ? kEach - 1 - kTogether * q - i : kTogether * q + i;
        choose(v[place], together.key[i], larger, mask, place);
      }
    }
  }

  template <class Network, size_t kI>
  __device__ __forceinline__ void run(Key (&v)[kEach], uint32_t begins) const {
    if constexpr (kI < Network::kAll.size) {
      // Tests of pairs that come again would be kept until then, for which there are too few registers.
      if constexpr (kI % 16 == 0) begins = const_cast<const volatile uint32_t&>(bits.begins[t]);
      constexpr int kFirst = Network::kAll.first[kI], kSecond = Network::kAll.second[kI];
      constexpr uint32_t kBetween = ((2u << kSecond) - 1) & ~((2u << kFirst) - 1);
      const Key first = v[kFirst], second = v[kSecond];
      const bool swap = (begins & kBetween) == 0 && first > second;
      v[kFirst] = swap ? second : first;
      v[kSecond] = swap ? first : second;
      run<Network, kI + 1>(v, begins);
    }
  }
  template <class Network>
  __device__ __forceinline__ void run(Key (&v)[kEach]) const {
    run<Network, 0>(v, 0);
  }

  // The logarithm of a length that no segment, as far as it is in the warp, exceeds.
  __device__ __forceinline__ int longest_bits() const {
    const uint32_t lane = t % 32;
    uint32_t inside = ~begins << (32 - kEach);  // places such that no segment begins at any of the last 1 << k
    int k = 0;
#pragma unroll 1
    for (; k < 5 + kEachBits && __any_sync(kEveryLane, inside != 0); ++k) {
      const uint32_t lanes = k < kEachBits ? 1 : 1u << (k - kEachBits);
      uint32_t before = __shfl_up_sync(kEveryLane, inside, lanes);
      if (lane < lanes) before = 0;
      inside &= k < kEachBits ? inside << (1 << k) | before >> (kEach - (1 << k)) : before;
    }
    return k;
  }

  // Whether any segment has places in two warps (1), or in three (2).
  __device__ __forceinline__ int warps_of_segments() const {
    int most = 0;
    for (uint32_t warp = 1; warp < threads / 32; ++warp) {
      if (bits.with_begins[warp] == 0) return 2;
      if (!(bits.begins[warp * 32] & 1)) most = 1;
    }
    return most;
  }

  __device__ __forceinline__ void sort(Key (&v)[kEach]) const {
    if (__any_sync(kEveryLane, begins != ~0u >> (32 - kEach))) run<topk::SortingNetwork<kEach>>(v);
    // Merges sorted runs of twos, fours and so on, until a run (`part`) is as long as the longest segment. A segment
    // may then reach into the next part, but not into two, so one more merge across all borders of parts ends the sort.
    const uint32_t part = 1u << max(longest_bits() - kEachBits, 0);
    const int across = warps_of_segments();
    bool borders = false;
#pragma unroll 1
    for (uint32_t merged = 2;; merged *= 2) {
      const bool in_warp = merged <= 32;
      if (!in_warp && (borders || across == 0 || merged >= 2 * threads)) break;
      borders = in_warp ? merged > part : across == 1;
      if (!in_warp) publish(v);
      bool any = !in_warp;
#pragma unroll 1
      for (int odd = 0; odd <= borders; ++odd) {
        const uint32_t shift = odd ? merged / 2 : 0, other = ((t + shift) ^ (merged - 1)) - shift;
        if (in_warp) {
          any |= exchange<true>(v, other);
        } else {
          exchange_published<true>(v, other);
        }
      }
      uint32_t lanes = merged / 4;
#pragma unroll 1
      for (; lanes >= 32; lanes /= 2) {
        if (borders) continue;
        publish(v);
        exchange_published<false>(v, t ^ lanes);
      }
      if (any) {
#pragma unroll 1
        for (; lanes; lanes /= 2) exchange<false>(v, t ^ lanes);
        run<topk::MergingNetwork<kEach>>(v);
      }
      if (in_warp && (borders || merged == 32)) borders = false, merged = 32;
    }
  }

  // The sum of the numbers of the threads before this one.
  __device__ __forceinline__ uint32_t sum_before(uint32_t number) const {
    uint32_t sum = number;
#pragma unroll 1
    for (uint32_t lanes = 1; lanes < 32; lanes *= 2) {
      const uint32_t up = __shfl_up_sync(kEveryLane, sum, lanes);
      if (t % 32 >= lanes) sum += up;
    }
    __syncthreads();
    if (t % 32 == 31) bits.sums[t / 32] = sum;
    __syncthreads();
    for (uint32_t w = 0; w < t / 32; ++w) sum += bits.sums[w];
    return sum - number;
  }
};

// The elements of a tile in memory, of `bytes` bytes each: in the tile they are the upper parts of words.
template <class Key>
struct TileElements {
  const void* x;
  void* values;
  int64_t base;    // the number of the first element
  uint32_t count;  // how many there are
  int bytes;

  __device__ __forceinline__ Key operator()(uint32_t place) const {
    Key element = 0;
    dispatch_bytes<Key>(bytes, [&](auto type) {
      using Bits = decltype(type);
      element = Key{(static_cast<const Bits*>(x) + base)[place]} << 8 * (sizeof(Key) - sizeof(Bits));
    });
    return element;
  }
  __device__ __forceinline__ void load(Key* buffer, uint32_t threads) const {
    dispatch_bytes<Key>(bytes, [&](auto type) {
      using Bits = decltype(type);
      const Bits* const from = static_cast<const Bits*>(x) + base;
#pragma unroll 8
      for (uint32_t place = threadIdx.x; place < count; place += threads)
        buffer[tile_slot<Key>(place)] = Key{from[place]} << 8 * (sizeof(Key) - sizeof(Bits));
    });
  }
  // Writes the elements of the buffer that are in `finished`, and calls other(place, word, element) for the others.
  template <class Other>
  __device__ __forceinline__ void store(const Key* buffer, uint32_t threads, Range finished, Other other) const {
    dispatch_bytes<Key>(bytes, [&](auto type) {
      using Bits = decltype(type);
      Bits* const to = static_cast<Bits*>(values) + base;
#pragma unroll 8
      for (uint32_t place = threadIdx.x; place < count; place += threads) {
        const Key word = buffer[tile_slot<Key>(place)];
        const auto element = static_cast<Bits>(word >> 8 * (sizeof(Key) - sizeof(Bits)));
        if (place >= finished.begin && place < finished.end)
          to[place] = element;
        else
          other(place, word, element);
      }
    });
  }
};

// Loads keys into registers, sorts the segments of a tile, and leaves the sorted elements in the buffer, whose slots
// had the elements, as the upper parts of words, in order. Zeros of either sign are equal, and so are NaNs. If a tile
// has such elements, the q-th of them in the tile becomes the q-th of them in the sorted tile: each segment has as many
// of them before as after. They are read once more then, by read(place).
template <class Key, class Bits, class Read>
__device__ __forceinline__ void sort_segments(Bits& bits, Key* buffer, uint32_t threads, uint32_t begins,
                                              uint32_t there, const SortOrder& order, Read read) {
  constexpr int kEach = kSegmentEach<Key>;
  const SegmentNetwork<Key, Bits> network(bits, buffer, threads, begins);
  const uint32_t first = threadIdx.x * kEach;
  Key* const own = buffer + tile_slot<Key>(first);
  Key v[kEach], differ = 0;  // whether elements have other bits than their keys give back
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const Key element = first + j < there ? own[j] : 0;
    v[j] = raised_key(element, order);
    differ |= v[j] ^ encode(element, order.ascending.order) ^ static_cast<Key>(order.invert);
  }
  const bool has_equals = __syncthreads_or(differ != 0);
  network.sort(v);
  uint32_t done = 0;  // which of them are elements, and not keys
  if (has_equals) {
    const uint32_t are_there = place_bits(first, 0, there);  // the places of the thread that the tile has
    __syncthreads();
#pragma unroll 1
    for (int nans = 0; nans < 2; ++nans) {
      const Key key = raised_key(nans ? static_cast<Key>(order.ascending.nan_above + 1) : Key{0}, order);
      uint32_t are = 0, come = 0;  // which elements have the key before the sort, and after it
#pragma unroll 4
      for (int j = 0; j < kEach; ++j)
        if (are_there >> j & 1) are |= static_cast<uint32_t>(raised_key(read(first + j), order) == key) << j;
      uint32_t rank = network.sum_before(__popc(are));
#pragma unroll 1
      for (; are; are &= are - 1) buffer[rank++] = read(first + __ffs(static_cast<int>(are)) - 1);
#pragma unroll
      for (int j = 0; j < kEach; ++j) come |= static_cast<uint32_t>(v[j] == key) << j;
      come &= are_there & ~done;
      rank = network.sum_before(__popc(come));
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (come >> j & 1) v[j] = buffer[rank++];
      done |= come;
    }
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    own[j] = done >> j & 1 ? v[j] : decode(v[j] ^ static_cast<Key>(order.invert), order.ascending.order);
  __syncthreads();
}

}  // namespace
}  // namespace jaxgpuops::sort
