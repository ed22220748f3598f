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

constexpr int kSegmentEach = kNetworkEach;
static_assert(kSegmentEach == 32);  // a word has a bit for each place of a thread

// What a tile of up to kThreads threads has in shared memory, besides a buffer of 33 words for 32 places.
template <int kThreads>
struct SegmentBits {
  uint32_t begins[kThreads];            // a bit for each place where a segment begins
  uint32_t with_begins[kThreads / 32];  // a bit for each thread that has such a place
  uint32_t sums[kThreads / 32];         // of warps
};

// Where a place of a tile is in the buffer: neither neighbouring threads nor neighbouring places meet in a bank.
__device__ __forceinline__ uint32_t tile_slot(uint32_t place) { return place + place / kSegmentEach; }

// The bits of the places from `begin` up to `end` of 32 places, of which `first` is the first.
__device__ __forceinline__ uint32_t place_bits(uint32_t first, uint32_t begin, uint32_t end) {
  const uint32_t from = min(max(begin, first) - first, 32u), to = min(max(end, first) - first, 32u);
  const auto below = [](uint32_t n) { return n < 32 ? (1u << n) - 1 : ~0u; };
  return below(to) & ~below(from);
}

// A thread of a tile. All threads of the block call its functions together. `Bits` has the members of SegmentBits.
template <class Bits>
struct SegmentNetwork {
  Bits& bits;
  uint4* buffer;
  uint32_t threads, t;      // of the block; this thread
  uint32_t begins;          // the places where a segment begins
  uint32_t head, tail;      // the places before all these, and from the last of these on
  uint32_t previous, next;  // the nearest other threads in which segments begin

  __device__ static __forceinline__ uint32_t head_of(uint32_t begins) { return (begins & (0u - begins)) - 1; }
  __device__ static __forceinline__ uint32_t tail_of(uint32_t begins) {
    return begins ? ~0u << (31 - __clz(static_cast<int>(begins))) : ~0u;
  }

  // `begins` has bits for all places outside segments, and behind the tile. The first place of the tile has one.
  __device__ __forceinline__ SegmentNetwork(Bits& bits, uint32_t* buffer, uint32_t threads, uint32_t begins)
      : bits(bits),
        buffer(reinterpret_cast<uint4*>(buffer)),
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
  // Keeps the larger or the smaller keys of the places of a mask.
  __device__ static __forceinline__ void choose(uint32_t& own, uint32_t other, bool larger, uint32_t mask, int place) {
    if (mask >> place & 1) own = larger ? max(own, other) : min(own, other);
  }

  // Compares places with those of another lane, one by one; if kBackwards, with these in reverse order. Returns whether
  // there was any to compare in the warp.
  template <bool kBackwards>
  __device__ __forceinline__ bool exchange(uint32_t (&v)[kSegmentEach], uint32_t lane) const {
    const uint32_t other = (t & ~31u) + lane;
    // The other lane wants to know the head of this one if that comes later.
    uint32_t theirs = __shfl_sync(kEveryLane, other < t ? head : tail, static_cast<int>(lane));
    if (kBackwards) theirs = __brev(theirs);
    const uint32_t mask = shared_with(other, theirs);
    if (!__any_sync(kEveryLane, mask != 0)) return false;
    const bool larger = other < t;
#pragma unroll
    for (int i = 0; i < kSegmentEach / 2; ++i) {
      const int j = kSegmentEach - 1 - i;
      const uint32_t a = __shfl_sync(kEveryLane, v[kBackwards ? j : i], static_cast<int>(lane));
      const uint32_t b = __shfl_sync(kEveryLane, v[kBackwards ? i : j], static_cast<int>(lane));
      choose(v[i], a, larger, mask, i);
      choose(v[j], b, larger, mask, j);
    }
    return true;
  }

  // Shows all threads of the block the keys.
  __device__ __forceinline__ void publish(const uint32_t (&v)[kSegmentEach]) const {
    __syncthreads();
#pragma unroll
    for (int q = 0; q < kSegmentEach / 4; ++q)
      buffer[q * threads + t] = make_uint4(v[4 * q], v[4 * q + 1], v[4 * q + 2], v[4 * q + 3]);
    __syncthreads();
  }
  // As exchange(), with any thread of the block that has shown its keys, or with none.
  template <bool kBackwards>
  __device__ __forceinline__ void exchange_published(uint32_t (&v)[kSegmentEach], uint32_t other) const {
    if (other >= threads) return;
    uint32_t theirs = other > t ? head_of(bits.begins[other]) : tail_of(bits.begins[other]);
    if (kBackwards) theirs = __brev(theirs);
    const uint32_t mask = shared_with(other, theirs);
    if (mask == 0) return;
    const bool larger = other < t;
#pragma unroll
    for (int q = 0; q < kSegmentEach / 4; ++q) {
      const uint4 four = buffer[q * threads + other];
      const int i = kBackwards ? kSegmentEach - 1 - 4 * q : 4 * q, step = kBackwards ? -1 : 1;
      choose(v[i], four.x, larger, mask, i);
      choose(v[i + step], four.y, larger, mask, i + step);
      choose(v[i + 2 * step], four.z, larger, mask, i + 2 * step);
      choose(v[i + 3 * step], four.w, larger, mask, i + 3 * step);
    }
  }

  template <int kFirst, int kSecond>
  __device__ __forceinline__ void order(uint32_t (&v)[kSegmentEach]) const {
    constexpr uint32_t kBetween = ((2u << kSecond) - 1) & ~((2u << kFirst) - 1);
    // Four instructions. The compiler would keep the tests of all pairs, as bits, for the next time.
    asm volatile(
        "{\n.reg .pred p;\n.reg .u32 t;\nand.b32 t, %2, %3;\nsetp.eq.u32 p, t, 0;\n"
        "setp.gt.and.u32 p, %0, %1, p;\nselp.u32 t, %1, %0, p;\nselp.u32 %1, %0, %1, p;\nmov.u32 %0, t;\n}"
        : "+r"(v[kFirst]), "+r"(v[kSecond])
        : "r"(begins), "n"(kBetween));
  }
  template <class Network, size_t... kI>
  __device__ __forceinline__ void run(uint32_t (&v)[kSegmentEach], std::index_sequence<kI...>) const {
    (order<Network::kAll.first[kI], Network::kAll.second[kI]>(v), ...);
  }
  template <class Network>
  __device__ __forceinline__ void run(uint32_t (&v)[kSegmentEach]) const {
    run<Network>(v, std::make_index_sequence<Network::kAll.size>());
  }

  // Finishes the merge of parts of 2 * `lanes` lanes, whose halves have exchanged their keys.
  __device__ __forceinline__ void merge(uint32_t (&v)[kSegmentEach], uint32_t lanes) const {
#pragma unroll 1
    for (; lanes; lanes /= 2) exchange<false>(v, (t % 32) ^ lanes);
    run<topk::MergingNetwork<kSegmentEach>>(v);
  }

  // The logarithm of a length that no segment, as far as it is in the warp, exceeds.
  __device__ __forceinline__ int longest_bits() const {
    const uint32_t lane = t % 32;
    uint32_t inside = ~begins;  // places such that no segment begins at any of the last 1 << k
    int k = 0;
#pragma unroll 1
    for (; k < 10 && __any_sync(kEveryLane, inside != 0); ++k) {
      const uint32_t lanes = k < 5 ? 1 : 1u << (k - 5);
      uint32_t before = __shfl_up_sync(kEveryLane, inside, lanes);
      if (lane < lanes) before = 0;
      inside &= k < 5 ? __funnelshift_l(before, inside, 1u << k) : before;
    }
    return k;
  }

  __device__ __forceinline__ void sort(uint32_t (&v)[kSegmentEach]) const {
    const uint32_t lane = t % 32;
    run<topk::SortingNetwork<kSegmentEach>>(v);
    const uint32_t part = 1u << max(longest_bits() - 5, 0);  // lanes
#pragma unroll 1
    for (uint32_t merged = 2; merged <= part; merged *= 2)
      if (exchange<true>(v, lane ^ (merged - 1))) merge(v, merged / 4);
    if (part < 32) {
      // Of each part, the segment that begins before it and the one that ends behind it.
      const uint32_t across = ((lane + part) ^ (2 * part - 1)) - part;
      const bool even = exchange<true>(v, lane ^ (2 * part - 1)), odd = exchange<true>(v, across < 32 ? across : lane);
      if (even || odd) merge(v, part / 2);
    }
    if (threads > 32) sort_across(v);
  }

  // Merges what warps have sorted.
  __device__ __forceinline__ void sort_across(uint32_t (&v)[kSegmentEach]) const {
    const uint32_t warps = threads / 32, lane = t % 32, warp = t / 32;
    // Whether any segment has places in two warps, or in three.
    bool two = false, three = false;
    for (uint32_t w = 1; w < warps; ++w) {
      two |= !(bits.begins[w * 32] & 1);
      three |= bits.with_begins[w] == 0;
    }
    if (!two) return;
    if (!three) {
      publish(v);
      const uint32_t left = warp * 64 - 1 - t, right = left + 64;  // opposite a border; there is none before the tile
      exchange_published<true>(v, left);
      exchange_published<true>(v, right);
      merge(v, 16);
      return;
    }
#pragma unroll 1
    for (uint32_t merged = 64; merged < 2 * threads; merged *= 2) {
      publish(v);
      exchange_published<true>(v, t ^ (merged - 1));
#pragma unroll 1
      for (uint32_t lanes = merged / 4; lanes >= 32; lanes /= 2) {
        publish(v);
        exchange_published<false>(v, t ^ lanes);
      }
      merge(v, 16);
    }
  }

  // The sum of the numbers of the threads before this one.
  __device__ __forceinline__ uint32_t sum_before(uint32_t number) const {
    uint32_t sum = number;
#pragma unroll
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

// Loads keys into registers, sorts the segments of a tile, and leaves the sorted elements in the buffer, whose slots
// had the elements, as the upper parts of words, in order. Zeros of either sign are equal, and so are NaNs. If a tile
// has such elements, the q-th of them in the tile becomes the q-th of them in the sorted tile: each segment has as many
// of them before as after. They are read once more then, by read(place).
template <class Bits, class Read>
__device__ __forceinline__ void sort_segments(Bits& bits, uint32_t* buffer, uint32_t threads, uint32_t begins,
                                              uint32_t there, const SortOrder& order, Read read) {
  const SegmentNetwork<Bits> network(bits, buffer, threads, begins);
  const uint32_t first = threadIdx.x * kSegmentEach;
  uint32_t* const own = buffer + tile_slot(first);
  uint32_t v[kSegmentEach], differ = 0;  // whether elements have other bits than their keys give back
#pragma unroll
  for (int j = 0; j < kSegmentEach; ++j) {
    const uint32_t element = first + j < there ? own[j] : 0;
    v[j] = raised_key(element, order);
    differ |= v[j] ^ encode(element, order.ascending.order) ^ static_cast<uint32_t>(order.invert);
  }
  network.sort(v);
  uint32_t done = 0;  // which of them are elements, and not keys
  if (__syncthreads_or(differ != 0)) {
#pragma unroll 1
    for (int nans = 0; nans < 2; ++nans) {
      const uint32_t key =
          raised_key(nans ? static_cast<uint32_t>(order.ascending.nan_above) + 1 : 0, order);
      uint32_t are = 0, come = 0;  // which elements have the key before the sort, and after it
#pragma unroll 4
      for (int j = 0; j < kSegmentEach; ++j)
        if (first + j < there) are |= static_cast<uint32_t>(raised_key(read(first + j), order) == key) << j;
      uint32_t rank = network.sum_before(__popc(are));
#pragma unroll 1
      for (; are; are &= are - 1) buffer[rank++] = read(first + __ffs(static_cast<int>(are)) - 1);
#pragma unroll
      for (int j = 0; j < kSegmentEach; ++j)
        if (first + j < there) come |= static_cast<uint32_t>(v[j] == key) << j;
      come &= ~done;
      rank = network.sum_before(__popc(come));
#pragma unroll
      for (int j = 0; j < kSegmentEach; ++j)
        if (come >> j & 1) v[j] = buffer[rank++];
      done |= come;
    }
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kSegmentEach; ++j)
    own[j] = done >> j & 1 ? v[j] : decode(v[j] ^ static_cast<uint32_t>(order.invert), order.ascending.order);
  __syncthreads();
}

}  // namespace
}  // namespace jaxgpuops::sort
