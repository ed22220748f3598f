// The phases of the digits kernel, see digits.cu: those of a block, which may share a row with the other blocks of its
// cluster.
#pragma once

#include <algorithm>

#include "common/cuda/cluster.cuh"
#include "common/cuda/intrinsics.cuh"
#include "sort/cuda/digits.cuh"
#include "topk/cuda/composite.cuh"
#include "topk/cuda/digits_shape.h"
#include "topk/cuda/kernels.h"
#include "topk/cuda/scatter.cuh"

namespace jaxgpuops::topk {
namespace {

struct Digits : Call {
  uint32_t blocks;  // of a cluster
  uint32_t part;    // elements of a block
  uint32_t reach;   // the number of samples that shall reach the first guess; 0: no guess
  bool narrows;     // the sample also tells the range of keys of 32 bits
};

template <int kThreads>
struct DigitsControl {
  alignas(16) uint32_t bins[kThreads * kDigitsBins];
  uint32_t of_digit[sort::kDigits];
  uint32_t sums[32], reaching[32], tying[32];                         // of the warps
  uint32_t of_block[kMaxDigitsBlocks], block_ties[kMaxDigitsBlocks];  // of the blocks
  uint32_t digit, above, kept;  // the digit of the k-th key, elements with a higher one, and with this one
  uint32_t top;                 // the largest key that is listed
};

template <class Use>
__device__ __forceinline__ void for_marks(uint32_t marks, Use use) {
  for (; marks; marks &= marks - 1) use(__ffs(static_cast<int>(marks)) - 1);
}

// The same in another order for each lane, so that lanes whose words have many marks read different banks.
template <class Use>
__device__ __forceinline__ void for_marks_by_turns(uint32_t marks, uint32_t lane, Use use) {
  for_marks(__funnelshift_r(marks, marks, lane), [&](int j) { use((j + lane) % 32); });
}

// The functions are called in their order, by all threads.
template <class Key, int kThreads, int kItems>
struct DigitsBlock {
  static constexpr uint32_t kVector = 16 / sizeof(Key), kWarps = kThreads / 32, kBins = kThreads * kDigitsBins;
  static constexpr uint32_t kRoom = kThreads * kItems;  // of the block's share of the list
  // If a word has so many marks, the lanes of a warp share words. Else each lane lists those of a word, in scattered
  // places, which takes longest for results in memory.
  static constexpr int kMany = kItems > 0 ? 12 : 6;
  static constexpr int kBits = 8 * sizeof(Key), kBinBits = digits_bin_bits(kThreads, kBits);
  using Control = DigitsControl<kThreads>;
  static_assert(sizeof(Control) <= kBins * 4 + kDigitsControl && kBins >= 1u << kBinBits);

  const Digits& a;
  const uint32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const uint32_t blocks = a.blocks, rank = blockIdx.x % blocks;  // of the cluster; of the block in it
  const int64_t row = blockIdx.x / blocks, inner = a.inner;
  unsigned char* const memory = dynamic_shared_memory();
  Control& s = *reinterpret_cast<Control*>(memory);
  uint32_t* const list = reinterpret_cast<uint32_t*>(memory + kBins * 4 + kDigitsControl);
  uint32_t* const indices = list + kRoom;
  uint4* const held = reinterpret_cast<uint4*>(indices + kRoom);
  uint32_t* const marks = reinterpret_cast<uint32_t*>(held + a.part / kVector + 1);
  const Key* const whole = static_cast<const Key*>(a.x) + row / inner * a.length * inner + row % inner;
  const uint32_t begin = min(rank * a.part, a.length), own = min(a.part, a.length - begin);  // the block's part
  const Key* const x = whole + begin * inner;
  // Elements lie in shared memory at the same distance from a multiple of 16 bytes as in global memory: slot i holds
  // element i - skipped of the part. A mark is a bit of a slot: the element may be among the k best.
  const uint32_t skipped = inner > 1 ? 0 : static_cast<uint32_t>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(Key));
  Key* const slots = reinterpret_cast<Key*>(held);
  const uint32_t end = skipped + own, vectors = (end + kVector - 1) / kVector, words = (end + 31) / 32;  // of marks
  const int64_t results = a.place(row, 0);
  // What select() finds: the least key of the list; whether only some of the elements that equal it are needed, and how
  // many; and how many elements the list has.
  uint32_t least = 0, need = a.k, reached = a.k;
  bool exact = false;
  // Keys of 32 bits are told apart by their distance from `low`, which has `key_bits` bits: the keys of the sample lie
  // between `low` and `high`. So integers of a small range have one digit. Keys beyond the two count as equal to them.
  static constexpr bool kWide = sizeof(Key) == 4;
  uint32_t low = 0, high = ~0u;
  int key_bits = kBits;

  __device__ __forceinline__ explicit DigitsBlock(const Digits& a) : a(a) {}

  __device__ __forceinline__ void meet_cluster() const {
    if (blocks == 1) return __syncthreads();
    arrive_at_cluster_barrier();
    wait_at_cluster_barrier();
  }
  __device__ __forceinline__ void clear() const {
#pragma unroll
    for (uint32_t i = 0; i < kDigitsBins / 4; ++i)
      reinterpret_cast<uint4*>(s.bins)[i * kThreads + tid] = uint4{0, 0, 0, 0};
    if (tid == 0) s.digit = ~0u, s.top = 0;
  }
  __device__ __forceinline__ uint32_t distance(uint32_t key) const {
    return kWide ? min(max(key, low), high) - low : key;
  }
  __device__ __forceinline__ int first_digit_at() const { return max(key_bits - kBinBits, 0); }
  __device__ __forceinline__ uint32_t first_digit(uint32_t key) const { return distance(key) >> first_digit_at(); }
  // The least key at this distance.
  __device__ __forceinline__ uint32_t key_at(uint32_t distance) const { return distance ? distance + low : 0; }
  // Whether different keys may have this distance.
  __device__ __forceinline__ bool is_beyond(uint32_t distance) const {
    return (distance == 0 && low > 0) || (distance == high - low && high < ~0u);
  }

  // Loads the part. Returns a first digit that more than k elements reach, almost certainly: it follows from a sample.
  __device__ __forceinline__ uint32_t load() {
    clear();
    Key samples[kDigitsSamples];
    const bool narrows = kWide && a.narrows;
    if (a.reach || narrows) {
#pragma unroll
      for (uint32_t i = 0; i < kDigitsSamples; ++i)
        samples[i] = __ldg(whole + scatter(i * kThreads + tid, a.length) * inner);
    }
    inner > 1 ? load_column() : load_row();
    if (!a.reach && !narrows) return 0;
    if (narrows) {
      uint32_t most = 0, rest = 0;
#pragma unroll
      for (uint32_t i = 0; i < kDigitsSamples; ++i) {
        const uint32_t key = encode(samples[i], a.order);
        most = max(most, key), rest = max(rest, ~key);
      }
      most = largest_of_warp(most), rest = largest_of_warp(rest);
      if (lane == 0) s.reaching[warp] = most, s.tying[warp] = rest;
    }
    __syncthreads();
    if (narrows) {
      const uint32_t most = largest_of_warp(lane < kWarps ? s.reaching[lane] : 0);
      const uint32_t least = ~largest_of_warp(lane < kWarps ? s.tying[lane] : 0);
      low = least - min(least, 1u), high = most + min(~most, 1u);
      key_bits = 32 - __clz(static_cast<int>(high - low));
    }
    if (!a.reach) return 0;
#pragma unroll
    for (uint32_t i = 0; i < kDigitsSamples; ++i) atomicAdd(&s.bins[first_digit(encode(samples[i], a.order))], 1u);
    find(a.reach, 1u << kBinBits, 1);
    const uint32_t floor = s.digit;
    __syncthreads();
    clear();
    return floor;
  }
  __device__ __forceinline__ void load_column() {
    constexpr int kLoads = 8;
#pragma unroll 1
    for (uint32_t i = tid; i < own; i += kLoads * kThreads) {
      Key bits[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u) bits[u] = __ldg(x + min(i + u * kThreads, own - 1) * inner);
#pragma unroll
      for (int u = 0; u < kLoads; ++u)
        if (i + u * kThreads < own) slots[i + u * kThreads] = encode(bits[u], a.order);
    }
  }
  __device__ __forceinline__ void load_row() {
    const uint32_t head = skipped ? min(kVector - skipped, own) : 0, vectors = (own - head) / kVector;
    if (tid < own - vectors * kVector) {
      const uint32_t i = tid < head ? tid : vectors * kVector + tid;
      slots[skipped + i] = encode(x[i], a.order);
    }
    const uint4* const from = reinterpret_cast<const uint4*>(x + head);
    uint4* const to = reinterpret_cast<uint4*>(slots + skipped + head);
    constexpr int kLoads = 4;
#pragma unroll 1
    for (uint32_t v = tid; v < vectors; v += kLoads * kThreads) {
      uint4 loaded[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u) loaded[u] = __ldcs(from + min(v + u * kThreads, vectors - 1));
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        if (v + u * kThreads >= vectors) break;
        Key* const e = reinterpret_cast<Key*>(&loaded[u]);
#pragma unroll
        for (uint32_t j = 0; j < kVector; ++j) e[j] = encode(e[j], a.order);
        to[v + u * kThreads] = loaded[u];
      }
    }
  }

  // Finds the digit of the wanted key from the counts in the bins of `among` blocks (the cluster, or 1). If digits are
  // many, each block adds up those of some. Lower blocks and threads have higher digits. If the bins have fewer
  // elements than `wanted`, s.digit stays ~0.
  __device__ __forceinline__ void find(uint32_t wanted, uint32_t digits, uint32_t among) {
    const bool shared = among > 1 && digits > kThreads;
    const uint32_t adder = shared ? rank : 0;
    among > 1 ? meet_cluster() : __syncthreads();
    const uint32_t share = shared ? max(digits / among, 1u) : digits, each = (share + kThreads - 1) / kThreads;
    const bool has = tid * each < share && adder * share < digits;
    const uint32_t highest = digits - 1 - adder * share - tid * each;
    uint32_t sum = 0;
    if (has) {
#pragma unroll 1
      for (uint32_t j = 0; j < each; ++j) {
        uint32_t count = s.bins[highest - j];
        if (among > 1) {
          count = 0;
#pragma unroll 4
          for (uint32_t b = 0; b < among; ++b) count += load_in_cluster(&s.bins[highest - j], b);
          if (shared) s.bins[highest - j] = count;
        }
        sum += count;
      }
    }
    uint32_t before = sum_before<kThreads>(sum, s.sums);
    if (shared) {
      if (tid == kThreads - 1)
        for (uint32_t b = 0; b < among; ++b) store_in_cluster(&s.of_block[rank], b, before + sum);
      meet_cluster();
      before += sum_of_warp(lane < rank ? s.of_block[lane] : 0);
    }
    if (has && before < wanted && before + sum >= wanted) {
      uint32_t digit = highest, count = sum;
      if (each > 1)
        while (count = s.bins[digit], before + count < wanted) before += count, --digit;
      if (!shared) {
        s.digit = digit, s.above = before, s.kept = count;
      } else {
        for (uint32_t b = 0; b < among; ++b) {
          store_in_cluster(&s.digit, b, digit);
          store_in_cluster(&s.above, b, before);
          store_in_cluster(&s.kept, b, count);
        }
      }
    }
    shared ? meet_cluster() : __syncthreads();
  }

  // Marks the elements whose first digit reaches the floor, and counts their digits. A thread marks eight at a time.
  __device__ __forceinline__ void mark(uint32_t floor) {
    constexpr uint32_t kEight = 8;
    const uint32_t from = key_at(floor << first_digit_at());
#pragma unroll 1
    for (uint32_t o = tid; o < words * 4; o += kThreads) {
      alignas(16) Key e[kEight];
      if constexpr (sizeof(Key) == 1) {
        *reinterpret_cast<uint2*>(e) = reinterpret_cast<const uint2*>(held)[min(o, 2 * vectors - 1)];
      } else {
#pragma unroll
        for (uint32_t v = 0; v < kEight / kVector; ++v)
          reinterpret_cast<uint4*>(e)[v] = held[min(o * (kEight / kVector) + v, vectors - 1)];
      }
      uint32_t hits = 0;
#pragma unroll
      for (uint32_t j = 0; j < kEight; ++j) hits |= static_cast<uint32_t>(e[j] >= from) << j;
      if (o * kEight < skipped) hits &= ~0u << min(skipped - o * kEight, kEight);
      if (end < (o + 1) * kEight) hits &= o * kEight < end ? (1u << (end - o * kEight)) - 1 : 0;
      reinterpret_cast<uint8_t*>(marks)[o] = static_cast<uint8_t>(hits);
      for_marks(hits, [&](int j) { atomicAdd(&s.bins[first_digit(slots[o * kEight + j])], 1u); });
    }
  }
  // Counts a digit of the marked elements that have the prefix, and drops those below it.
  __device__ __forceinline__ void count(uint32_t prefix, int prefix_at, int digit_at, uint32_t digits) {
#pragma unroll 1
    for (uint32_t w = tid; w < words; w += kThreads) {
      uint32_t kept = marks[w];
      for_marks_by_turns(kept, lane, [&](uint32_t j) {
        const uint32_t key = distance(slots[w * 32 + j]), top = key >> prefix_at;
        if (top < prefix) kept ^= 1u << j;
        if (top == prefix) atomicAdd(&s.bins[key >> digit_at & (digits - 1)], 1u);
      });
      marks[w] = kept;
    }
  }

  // Finds the k-th key digit by digit, or stops where the list has room for all elements that reach the digits so far.
  __device__ __forceinline__ void select(uint32_t floor) {
    uint32_t prefix = 0;
    int bits = key_bits;
#pragma unroll 1
    while (true) {
      const int above = bits, digit_bits = min(bits, kBinBits);
      const uint32_t digits = 1u << digit_bits;
      bits -= digit_bits;
      __syncthreads();
      above == key_bits ? mark(floor) : count(prefix, above, bits, digits);
      find(need, digits, blocks);
      if (s.digit == ~0u) {  // the sample misled, which happens hardly ever
        floor = 0;
        bits = key_bits;
      } else {
        need -= s.above;
        prefix = prefix << digit_bits | s.digit;
        reached = a.k - need + s.kept;
        exact = s.kept != need && (bits == 0 || reached > kRoom * blocks);
        if (!exact || (bits == 0 && !is_beyond(prefix))) break;
        if (bits == 0) {  // the k-th key is beyond the sample, which is as rare
          low = 0, high = ~0u, floor = 0, prefix = 0, need = a.k;
          bits = key_bits = kBits;
        }
      }
      meet_cluster();  // all threads have read what was found
      clear();
    }
    least = key_at(prefix << bits);
    if (exact) reached = a.k;
  }

  // Lists the elements that reach the least key, in the order of their indices: writes them, or puts them to the list.
  // If not all that equal it are needed, the first ones are.
  __device__ __forceinline__ void list_selected() {
    const uint32_t per_warp = (words + kWarps - 1) / kWarps;
    const uint32_t from = min(warp * per_warp, words), to = min(from + per_warp, words);
    uint32_t more = 0, ties = 0;
#pragma unroll 1
    for (uint32_t w = from + lane; w < to; w += 32) {
      uint32_t kept = marks[w];
      for_marks_by_turns(kept, lane, [&](uint32_t j) {
        const uint32_t key = slots[w * 32 + j];
        if (key < least) kept ^= 1u << j;
        if (exact && key == least) ++ties;
      });
      marks[w] = kept;
      more += __popc(kept);
    }
    // How many elements are before those of the warp.
    more = sum_of_warp(more - ties);
    ties = sum_of_warp(ties);
    if (lane == 0) s.reaching[warp] = more, s.tying[warp] = ties;
    __syncthreads();
    const uint32_t warp_more = lane < kWarps ? s.reaching[lane] : 0, warp_ties = lane < kWarps ? s.tying[lane] : 0;
    more = sum_of_warp(lane < warp ? warp_more : 0);
    ties = sum_of_warp(lane < warp ? warp_ties : 0);
    if (blocks > 1) {
      const uint32_t of_block = sum_of_warp(warp_more), block_ties = sum_of_warp(warp_ties);
      if (warp == 0 && lane < blocks) {
        store_in_cluster(&s.of_block[rank], lane, of_block);
        store_in_cluster(&s.block_ties[rank], lane, block_ties);
      }
      meet_cluster();
      more += sum_of_warp(lane < rank ? s.of_block[lane] : 0);
      ties += sum_of_warp(lane < rank ? s.block_ties[lane] : 0);
    }
    uint32_t top = 0;
#pragma unroll 1
    for (uint32_t start = from; start < to; start += 32) {
      const uint32_t w = min(start + lane, to - 1), hits = start + lane < to ? marks[w] : 0;
      if (!__any_sync(kEveryLane, hits)) continue;
      uint32_t equal = 0;
      if (exact)
        for_marks_by_turns(hits, lane,
                           [&](uint32_t j) { equal |= static_cast<uint32_t>(slots[w * 32 + j] == least) << j; });
      const uint32_t both = __popc(hits & ~equal) | __popc(equal) << 16, up_to = sum_up_to_lane(both);
      const uint32_t all = shuffle_from(up_to, 31);
      uint32_t m = more + ((up_to - both) & 0xffff), t = ties + ((up_to - both) >> 16);
      const auto list = [&](uint32_t place, Key key, uint32_t slot) {
        const uint32_t index = begin + slot - skipped;
        if constexpr (kItems > 0) {
          put(place, key, index);
          top = max(top, uint32_t{key});
        } else {
          write(place, key, index);
        }
      };
      if (__any_sync(kEveryLane, __popc(hits) >= kMany)) {  // lanes share each word, and list neighbouring places
        constexpr uint32_t kAtOnce = 4;
        const uint32_t before = (1u << lane) - 1;
#pragma unroll 1
        for (uint32_t i = 0; i < min(32u, to - start); i += kAtOnce) {
          Key keys[kAtOnce];
          uint32_t places[kAtOnce], listed = 0;
#pragma unroll
          for (uint32_t u = 0; u < kAtOnce; ++u) {
            const uint32_t word = shuffle_from(hits, i + u), same = exact ? shuffle_from(equal, i + u) : 0;
            const uint32_t rank = exact ? shuffle_from(t, i + u) + __popc(same & before) : 0;
            places[u] = shuffle_from(m, i + u) + __popc(word & ~same & before) + min(rank, need);
            const bool wanted = (word >> lane & 1) && (!(same >> lane & 1) || rank < need);
            listed |= static_cast<uint32_t>(wanted) << u;
            keys[u] = wanted ? slots[(start + i + u) * 32 + lane] : Key{0};
          }
#pragma unroll
          for (uint32_t u = 0; u < kAtOnce; ++u)
            if (listed >> u & 1) list(places[u], keys[u], (start + i + u) * 32 + lane);
        }
      } else {
        for_marks(ties >= need ? hits & ~equal : hits, [&](int j) {
          const bool is_tie = equal >> j & 1, wanted = !is_tie || t < need;
          const uint32_t place = m + min(t, need);
          is_tie ? ++t : ++m;
          if (wanted) list(place, slots[w * 32 + j], w * 32 + j);
        });
      }
      more += all & 0xffff;
      ties += all >> 16;
    }
    if constexpr (kItems > 0) {
      top = largest_of_warp(top);
      if (lane == 0) atomicMax(&s.top, top);
    }
  }
  __device__ __forceinline__ void write(uint32_t place, Key key, uint32_t index) const {
    const int64_t to = results + int64_t{place} * a.beside;
    static_cast<Key*>(a.values)[to] = decode(key, a.order);
    a.indices[to] = static_cast<int32_t>(index);
  }
  // The list is divided among the blocks.
  __device__ __forceinline__ void put(uint32_t place, uint32_t word, uint32_t index) const {
    if (blocks > 1) {
      store_in_cluster(list + place % kRoom, place / kRoom, word);
      store_in_cluster(indices + place % kRoom, place / kRoom, index);
    } else {
      list[place] = word;
      indices[place] = index;
    }
  }

  // Sorts the list by its keys' differences to the largest one, stably, a digit of eight bits at a time, and writes the
  // first k.
  __device__ __forceinline__ void sort_list() {
    meet_cluster();
    const uint32_t top = blocks > 1 ? largest_of_warp(lane < blocks ? load_in_cluster(&s.top, lane) : 0) : s.top;
    const int bits = 32 - __clz(static_cast<int>(top - least));
    if (bits == 0) meet_cluster();  // all blocks have read
    const uint32_t first = warp * 32 * kItems + lane, place = rank * kRoom + first;
    const bool live = place - lane < reached;
    // Places behind the list have the last digit in every pass, so that they stay behind it.
    uint32_t keys[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) keys[i] = place + i * 32 < reached ? top - list[first + i * 32] : ~0u;
    uint32_t* const counts = s.bins + warp * sort::kDigits;
#pragma unroll 1
    for (int shift = 0; shift < bits; shift += sort::kDigitBits) {
      const auto digit = [&](int i) { return keys[i] >> shift & (sort::kDigits - 1); };
      uint32_t own_indices[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) own_indices[i] = indices[first + i * 32];
      reinterpret_cast<uint4*>(counts)[lane] = reinterpret_cast<uint4*>(counts)[32 + lane] = uint4{0, 0, 0, 0};
      __syncwarp();
      if (live) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) atomicAdd(counts + digit(i), 1u);
      }
      __syncthreads();
      place_digits();
      __syncthreads();
      if (live) {
        const uint32_t after = sort::lanes_after(), up_to_this = sort::lanes_up_to_this(), ones = after | up_to_this;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const uint32_t d = digit(i), same = sort::lanes_with(d, ones), to = counts[d] + __popc(same & up_to_this);
          __syncwarp();
          if ((same & after) == 0) counts[d] = to;
          put(to, keys[i], own_indices[i]);
          __syncwarp();
        }
      }
      meet_cluster();
#pragma unroll
      for (int i = 0; i < kItems; ++i) keys[i] = list[first + i * 32];
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (place + i * 32 < a.k) write(place + i * 32, static_cast<Key>(top - keys[i]), indices[first + i * 32]);
  }
  // Turns each warp's count of a digit into the place of the last element before its elements of that digit. Each of
  // the first threads does so for some digits.
  __device__ __forceinline__ void place_digits() {
    const bool has = tid < sort::kDigits;
    uint32_t* const of_digit = s.bins + tid;
    uint32_t before = 0, all = 0;
    if (has) {
#pragma unroll
      for (uint32_t w = 0; w < kWarps; ++w) all += of_digit[w * sort::kDigits];
    }
    if (blocks > 1) {
      if (has) s.of_digit[tid] = all;
      meet_cluster();
      all = 0;
      if (has) {
#pragma unroll 4
        for (uint32_t b = 0; b < blocks; ++b) {
          const uint32_t count = load_in_cluster(&s.of_digit[tid], b);
          all += count;
          if (b < rank) before += count;
        }
      }
    }
    before += sum_before<kThreads>(all, s.sums);
    if (!has) return;
    uint32_t last = before - 1;
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w) {
      const uint32_t count = of_digit[w * sort::kDigits];
      of_digit[w * sort::kDigits] = last;
      last += count;
    }
  }
};

}  // namespace
}  // namespace jaxgpuops::topk
