// Top-k of rows of 16-bit keys that a block holds whole in shared memory, for k up to kMaxSieveK. It works like
// sieve.cu, but is simpler, because the row can be read again.
//
// The first quarter of each of 64 streams is a sample. From the threads' largest keys of the sample follows a
// threshold, which fewer than k elements of the row hardly ever reach. The elements that reach it survive: a list keeps
// their numbers, of 16 bits each. The 32-bit word of an element, which holds its key and its index, is made again
// whenever it is needed. Counts of the survivors in bins over the range above the threshold give each survivor a place
// in a list, and comparisons within its bin give its rank.
//
// If there are fewer than k survivors, more than there is room for, or a crowded bin, the exact selection runs: counts
// over the row find a better threshold, or the k-th key and how many elements with that key are needed. The elements
// that reach it are listed in the order of their indices, and sorted by digits of their keys.
//
// Bytes moved: the input once, k results (value and index).
#include <algorithm>
#include <cmath>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "topk/cuda/candidates.cuh"
#include "topk/cuda/delegates.cuh"
#include "topk/cuda/kernels.h"
#include "topk/cuda/row_vectors.cuh"
#include "topk/cuda/sieve_shape.h"

namespace jaxgpuops::topk {
namespace {

using Key = uint16_t;

struct Whole : Call {
  uint32_t reach;  // the number of delegates that must reach the threshold

  __device__ __forceinline__ void write(uint32_t rank,
                                        // `c` has the key in its upper bits and the mirrored index below it.
                                        uint32_t c) const {
    const int64_t to = place(blockIdx.x, rank);
    static_cast<Key*>(values)[to] = decode(static_cast<Key>(c >> 16), order);
    indices[to] = static_cast<int32_t>(length - 1 - (c & 0xffff));
  }
};

constexpr int kThreads = kSieveThreads, kLoads = kSieveLoads;
constexpr uint32_t kWarps = kThreads / 32, kVector = 8, kElements = kLoads * kVector;  // elements of a thread in a step
constexpr uint32_t kSpread = kMaxWholeLength / kVector / kLoads;  // vectors between a thread's loads
constexpr uint32_t kSteps = kSpread / kThreads;
constexpr uint32_t kPerThread = kSieveBins / kThreads, kAtOnce = 3584 / kThreads;
static_assert(kElements == 32 && kSieveBins == 1 << 12);

// Returns the index of the element with a number. The fields of a number, from the highest bits down, are: warp, step,
// lane, load of the thread, element of the vector. In the index, the load is the highest field.
__device__ __forceinline__ uint32_t index_of(uint32_t number) {
  const uint32_t element = number & (kVector - 1), load = number / kVector & (kLoads - 1);
  return number / kElements * kVector | element | load * (kSpread * kVector);
}

struct Control {
  // Elements that do not count go to one of the bins above kSieveBins, which are never read. That costs less than a
  // branch.
  alignas(16) uint32_t bins[kSieveBins + 32];
  uint32_t sums[kWarps], tops[kWarps], lows[kWarps];
  uint32_t count, kept;
};
static_assert(sizeof(Control) <= kWholeControl);

// A row, and its copy in shared memory, which is placed so that its vectors are aligned there, too.
struct Row : RowVectors<Key> {
  Key* keys;  // address of element 0 in the copy
  KeyOrder order;

  __device__ __forceinline__ Row(const Whole& a, Key* room)
      : RowVectors<Key>(static_cast<const Key*>(a.x) + static_cast<int64_t>(blockIdx.x) * a.length, a.length),
        keys(room + (kVector - head) % kVector),
        order(a.order) {}
  __device__ __forceinline__ uint4* ring() const { return reinterpret_cast<uint4*>(keys + head); }
  __device__ __forceinline__ uint32_t key(uint32_t i) const { return static_cast<Key>(encode(keys[i], order)); }
  // Element i as one word: its key in the upper half, its mirrored index in the lower half.
  __device__ __forceinline__ uint32_t operator[](uint32_t i) const { return key(i) << 16 | (length - 1 - i); }
};

// Sorts list[0, m) by keys, descending and stably: a radix sort of key minus `least` by up to two digits of eight bits,
// which leaves out digits that all keys share. Each warp counts a part of the list; its lanes find the other lanes with
// the same digit by a vote. Returns where the result is, in `list` or in `other`.
__device__ __forceinline__ uint32_t* sort_stably(Control& s, uint32_t* list, uint32_t* other, uint16_t* places,
                                                 uint32_t m, uint32_t least) {
  constexpr uint32_t kDigits = 256;
  static_assert(kWarps * kDigits == kSieveBins && kThreads == 2 * kDigits);
  const uint32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const uint32_t part = (m + kThreads - 1) / kThreads * 32, from = warp * part, to = min(from + part, m);
  uint32_t* const counts = s.bins + warp * kDigits;
  uint32_t differ = 0;
  for (uint32_t i = tid; i < m; i += kThreads) differ |= ((list[i] >> 16) - least) ^ ((list[0] >> 16) - least);
#pragma unroll 1
  for (int shift = 0; shift < 16; shift += 8) {
    const auto digit = [&](uint32_t c) { return kDigits - 1 - (((c >> 16) - least) >> shift & (kDigits - 1)); };
    if (!__syncthreads_or(differ >> shift & (kDigits - 1))) continue;
#pragma unroll
    for (uint32_t d = lane; d < kDigits; d += 32) counts[d] = 0;
    __syncwarp();
#pragma unroll 1
    for (uint32_t start = from + lane; start - lane < to; start += 64) {
      uint32_t mine[2], alike[2];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const bool there = start + u * 32 < to;
        mine[u] = there ? digit(list[start + u * 32]) : 0;
        alike[u] = __ballot_sync(kEveryLane, there) & __match_any_sync(kEveryLane, mine[u]);
      }
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const uint32_t before = __popc(alike[u] & ((1u << lane) - 1)), counted = counts[mine[u]];
        __syncwarp();
        if (start + u * 32 < to) {
          places[start + u * 32] = static_cast<uint16_t>(counted + before);
          if (before == 0) counts[mine[u]] = counted + __popc(alike[u]);
        }
        __syncwarp();
      }
    }
    __syncthreads();
    // Two threads add up the counts of each digit, each over half of the warps.
    uint32_t* const column = s.bins + tid % 2 * (kSieveBins / 2) + tid / 2;
    uint32_t of_warp[kWarps / 2], sum = 0;
#pragma unroll
    for (uint32_t w = 0; w < kWarps / 2; ++w) sum += of_warp[w] = column[w * kDigits];
    uint32_t start = sum_before<kThreads>(sum, s.sums);
#pragma unroll
    for (uint32_t w = 0; w < kWarps / 2; ++w) {
      column[w * kDigits] = start;
      start += of_warp[w];
    }
    __syncthreads();
#pragma unroll 2
    for (uint32_t i = from + lane; i < to; i += 32) other[counts[digit(list[i])] + places[i]] = list[i];
    __syncthreads();
    uint32_t* const sorted = other;
    other = list;
    list = sorted;
  }
  return list;
}

// The exact selection. Counts over the row find a key that at least k elements reach but not too many to sort, or else
// the k-th key itself. The first guess is the threshold from the sample, which is mostly right: this function runs
// because many elements equal that key, or lie closely above it. The elements above the key, and as many of the first
// ones that equal it as are needed, are listed in the order of their indices and sorted by their keys. The k-th key is
// expected between `bottom` and `top`.
__device__ __noinline__ void search(const Whole& a, Row row, Control& s, uint32_t* list, uint32_t* other,
                                    uint16_t* places, uint32_t guess, uint32_t bottom, uint32_t top) {
  __builtin_assume(__isShared(row.keys) && __isShared(&s) && __isShared(list));
  __builtin_assume(__isShared(other) && __isShared(places));
  const uint32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  // Treats the row as a multiple of the vectors that the warps read in one step. Places outside the row count as the
  // least key.
  const uint32_t skipped = (kVector - row.head) % kVector, end = skipped + row.length;
  const uint32_t vectors = (end + kVector * 32 - 1) / (kVector * 32) * 32;
  Key* const keys = row.keys - skipped;
  if (tid < skipped) keys[tid] = static_cast<Key>(decode(Key{0}, row.order));
  if (tid < vectors * kVector - end) keys[end + tid] = static_cast<Key>(decode(Key{0}, row.order));
  const auto words_of = [&](uint32_t v) { return reinterpret_cast<const uint4*>(keys)[v]; };
  // The vectors that a warp reads in one step are neighbours, so the counts of these steps show where the step's
  // elements go in the list. A count has two halves, for the lower and the upper elements of words. The low byte of a
  // half counts elements that reach the key, the high byte those above it.
  uint32_t* const counts = s.bins;
  uint32_t* const starts = s.bins + kThreads;
  uint32_t low = 0, high = 0xffff, middle = guess, flips, reached, passed;
#pragma unroll 1
  while (true) {
    __syncthreads();
    flips = Filter<Key>(static_cast<Key>(middle), row.order).flips;
    const uint32_t same = middle * 0x10001, less = middle ? same - 0x10001 : 0;
    const uint32_t more = middle < 0xffff ? same + 0x10001 : same;
    uint32_t of_warp[2] = {};
#pragma unroll 2
    for (uint32_t start = warp * 32; start < vectors; start += kThreads) {
      const uint4 words = words_of(start + lane);
      uint32_t nears = 0, lessers = 0;  // counts for both elements of a word, one in each half
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t near = __vminu2(__vmaxu2(reinterpret_cast<const uint32_t*>(&words)[w] ^ flips, less), more);
        nears += near;
        lessers += __vminu2(near, same);
      }
      uint32_t count = lessers - 4 * (same - 0x10001) + (nears - lessers) * 256;
      count = sum_of_warp(count);
      if (lane == 0) counts[start / 32] = count;
#pragma unroll
      for (int i = 0; i < 2; ++i) of_warp[i] += count >> (8 * i) & 0xff00ff;
    }
    if (lane == 0) s.lows[warp] = of_warp[0], s.tops[warp] = of_warp[1];
    __syncthreads();
    const uint32_t lows = s.lows[lane % kWarps], tops = s.tops[lane % kWarps];
    reached = sum_of_warp((lows & 0xffff) + (lows >> 16)) / 2, passed = sum_of_warp((tops & 0xffff) + (tops >> 16)) / 2;
    if (reached >= a.k && (reached <= kWholeSort || passed < a.k)) break;
    if (reached < a.k) {
      high = middle - 1;
    } else {
      low = middle + 1;
    }
    const uint32_t least = low < bottom && bottom <= high ? bottom : low, most = low <= top && top < high ? top : high;
    middle = most - (most - least) / 2;
  }
  // The number of elements equal to the key that are needed.
  const uint32_t need = (reached <= kWholeSort ? reached : a.k) - passed;
  const uint32_t of_step = tid * 32 < vectors ? counts[tid] : 0, step_above = (of_step >> 8 & 255) + (of_step >> 24);
  uint32_t step_like = (of_step & 255) + (of_step >> 16 & 255) - step_above;
  if (middle == 0 && tid == 0) step_like -= skipped;
  const uint32_t before_step = sum_before<kThreads>(step_above << 17 | step_like, s.sums);
  const uint32_t like_before = min(before_step & 0x1ffff, need);
  const bool none = step_above == 0 && (step_like == 0 || like_before == need);
  starts[tid] = none ? ~0u : before_step >> 17 << 16 | like_before;
  __syncthreads();
#pragma unroll 1
  for (uint32_t start = warp * 32; start < vectors; start += kThreads) {
    const uint32_t before_warp = starts[start / 32];
    if (before_warp == ~0u) continue;
    const uint32_t v = start + lane;
    // `above` and `reach` have a bit for each element, the first element in the highest bit.
    uint32_t above = 0, reach = 0, like_to = before_warp & 0xffff;
    const uint4 words = words_of(v);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t word = reinterpret_cast<const uint32_t*>(&words)[w] ^ flips;
      push_reaches(above, word << 16, middle << 16 | 0xffff);
      push_reaches(above, word, middle << 16 | 0xffff);
      push_reaches(reach, word << 16, (middle << 16) - 1);
      push_reaches(reach, word, (middle << 16) - 1);
    }
    // Leaves out the places before the row. Those after it come last anyway.
    if (middle == 0) reach = v ? 0xff : 0xff >> skipped;
    if (like_to == need) reach = above;
    const uint32_t mine = static_cast<uint32_t>(__popc(above)) << 16 | __popc(reach & ~above);
    const uint32_t before_lane = sum_up_to_lane(mine) - mine;
    uint32_t above_to = (before_warp >> 16) + (before_lane >> 16);
    like_to = min(like_to + (before_lane & 0xffff), need);
    while (reach) {
      const uint32_t bit = 31 - __clz(reach);
      const bool like = !(above >> bit & 1);
      reach ^= 1u << bit;
      if (like && like_to == need) continue;
      list[above_to + like_to] = row[v * kVector + (kVector - 1 - bit) - skipped];
      above_to += !like;
      like_to += like;
    }
  }
  __syncthreads();
  const uint32_t* const best = sort_stably(s, list, other, places, passed + need, middle);
#pragma unroll 2
  for (uint32_t i = tid; i < a.k; i += kThreads) a.write(i, best[i]);
}

// The state of a block in whole_kernel. The functions are the phases of the kernel, in the order in which they run.
struct Block {
  const Whole& a;
  Control& s;
  uint16_t* const survivors;  // numbers of elements
  uint32_t* const list;       // the survivors in the order of their bins
  const uint32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  Row row;
  uint4* ring;  // the row's vectors in shared memory
  const uint32_t first = warp * (kSteps * 32) + lane;
  uint32_t bottom, top, least;  // the least and the largest delegate; the key that enough delegates reach
  uint32_t threshold, high;     // the range that bins divide
  int shift;

  __device__ __forceinline__ Block(const Whole& a, unsigned char* shared_bytes)
      : a(a),
        s(*reinterpret_cast<Control*>(shared_bytes)),
        survivors(reinterpret_cast<uint16_t*>(shared_bytes + kWholeControl + kWholeRow)),
        list(reinterpret_cast<uint32_t*>(survivors + kWholeRoom)),
        row(a, reinterpret_cast<Key*>(shared_bytes + kWholeControl)) {
    ring = row.ring();
  }

  // Each thread copies the vectors that it will read itself, so no barrier is needed between the copies and the reads.
  __device__ __forceinline__ void copy(uint32_t step) {
#pragma unroll
    for (uint32_t u = 0; u < kLoads; ++u) {
      const uint32_t vector = first + u * kSpread + step * 32;
      if (vector < row.vectors) copy_async(ring + vector, row.body() + vector);
    }
    commit_async_copies();
  }

  // Waits for the sample, and issues the loads of the rest of the row.
  __device__ __forceinline__ void start() {
    copy(0);
    if (tid == 0) s.count = 0;
#pragma unroll
    for (uint32_t i = 0; i < kPerThread / 4; ++i)
      reinterpret_cast<uint4*>(s.bins)[i * kThreads + tid] = make_uint4(0, 0, 0, 0);
    if (tid < row.loose()) row.keys[row.loose_index(tid)] = row.x[row.loose_index(tid)];
    wait_for_async_copies<0>();  // this waits for all loads, so it comes before the next loads are issued
#pragma unroll 1
    for (uint32_t step = 1; step < kSteps; ++step) copy(step);
  }

  // Finds the threshold. Returns false if elements of all threads reach it.
  __device__ __forceinline__ bool sample() {
    const Lanes<Key> lanes(a.order);
    uint32_t most = 0;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      if (first + u * kSpread >= row.vectors) continue;
      const uint4 words = ring[first + u * kSpread];
#pragma unroll
      for (int w = 0; w < 4; ++w) most = lanes.max(most, lanes.encode(reinterpret_cast<const uint32_t*>(&words)[w]));
    }
    const uint32_t best = lanes.largest(most), warp_top = largest_of_warp(best), warp_low = ~largest_of_warp(~best);
    if (lane == 0) s.tops[warp] = warp_top, s.lows[warp] = warp_low;
    __syncthreads();
    top = largest_of_warp(s.tops[lane % kWarps]);
    bottom = ~largest_of_warp(~s.lows[lane % kWarps]);
    least = bottom;
    for (uint32_t upper = top; least < upper;) {
      const uint32_t middle = upper - (upper - least) / 2, reached = __syncthreads_count(best >= middle);
      if (reached >= a.reach) {
        least = middle;
        if (reached <= a.reach + a.reach / 16) break;
      } else {
        upper = middle - 1;
      }
    }
    threshold = larger(least << 16, 1u);
    high = top << 16 | (a.length - 1);
    high += smaller((high - threshold) / 8, ~high);  // the row may have larger keys than its sample
    shift = max(0, 32 - __clz(high - threshold) - 12);
    return least != bottom;
  }

  // Lists the numbers of the elements that reach the threshold, as long as there is room.
  __device__ __forceinline__ void filter() {
    const Filter<Key> filter(static_cast<Key>(least), a.order);
    const uint32_t below = filter.floor - 1;
#pragma unroll 1
    for (uint32_t step = 0; step < kSteps; ++step) {
      wait_for_async_copies<kSteps - 1>();
      const uint32_t vector = first + step * 32;
      uint32_t hits = 0;  // a bit for each element, the first element in the highest bit
#pragma unroll
      for (uint32_t u = 0; u < kLoads; ++u) {
        const uint4 words = ring[vector + u * kSpread];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const uint32_t word = reinterpret_cast<const uint32_t*>(&words)[w] ^ filter.flips;
          push_reaches(hits, word << 16, below);
          push_reaches(hits, word, below);
        }
      }
      if (row.vectors < kLoads * kSpread) {  // some vectors lie beyond the end of the row
#pragma unroll
        for (uint32_t u = 0; u < kLoads; ++u)
          if (vector + u * kSpread >= row.vectors) hits &= u ? ~0u << (kElements - u * kVector) : 0;
      }
      const uint32_t mine = __popc(hits), upto = sum_up_to_lane(mine);
      uint32_t at = 0;
      if (lane == 31)  // atomicAdd would look for more lanes
        asm volatile("atom.shared.add.u32 %0, [%1], %2;"
                     : "=r"(at)
                     : "r"(shared_address(&s.count)), "r"(upto)
                     : "memory");
      at = __shfl_sync(kEveryLane, at, 31) + upto - mine;
      if (at + mine > kWholeRoom) hits = 0;  // the list is full; the count, which exceeds the room, shows that later
      const uint32_t last = ((warp * kSteps + step) * 32 + lane + 1) * kElements - 1;
      for (uint16_t* to = survivors + at; hits; ++to) {
        const uint32_t bit = 31 - __clz(hits);
        hits ^= 1u << bit;
        *to = static_cast<uint16_t>(last - bit);
      }
      commit_async_copies();
    }
    __syncthreads();
  }

  __device__ __forceinline__ uint32_t bin_of(uint32_t c) const { return c >= high ? 0 : (high - c) >> shift; }

  // Turns the counts in bins into the starts of bins. Returns false if there are fewer than k survivors, or a bin is
  // crowded.
  __device__ __forceinline__ bool add_up_bins() {
    alignas(16) uint32_t starts[kPerThread];
    uint4* const mine = reinterpret_cast<uint4*>(s.bins) + tid * (kPerThread / 4);
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t v = 0; v < kPerThread / 4; ++v) reinterpret_cast<uint4*>(starts)[v] = mine[v];
#pragma unroll
    for (uint32_t j = 0; j < kPerThread; ++j) sum += starts[j];
    uint32_t before = sum_before<kThreads>(sum, s.sums);
    bool failed = false;
    const bool has_last = before < a.k && before + sum >= a.k;
#pragma unroll
    for (uint32_t j = 0; j < kPerThread; ++j) {
      const uint32_t in_bin = starts[j];
      starts[j] = before;
      failed |= before < a.k && in_bin > kWholeCrowd;
      before += in_bin;
    }
    if (tid == kThreads - 1) failed |= before < a.k;
    if (has_last) {
      uint32_t end = before;
#pragma unroll
      for (uint32_t j = kPerThread - 1; j; --j)
        if (starts[j] >= a.k) end = starts[j];
      s.kept = end;
    }
#pragma unroll
    for (uint32_t v = 0; v < kPerThread / 4; ++v) mine[v] = reinterpret_cast<const uint4*>(starts)[v];
    return !__syncthreads_or(failed);
  }

  // Lists the survivors of the bins that hold the k best, in the order of bins. Returns false if there are too few or
  // too many survivors, or a bin is crowded.
  __device__ __forceinline__ bool deal_out() {
    const uint32_t m = s.count, nobody = kSieveBins + lane;
    if (m > kWholeRoom || m + row.loose() < a.k) return false;
    // Lanes take survivors far apart: neighbours may be alike, and then their atomic counts would wait for each other.
    const uint32_t stride = (m + 31) / 32 | 1, at = lane * stride + warp;
    const auto survivor = [&](uint32_t i) { return row[row.head + index_of(survivors[i])]; };
    const auto is_one = [&](uint32_t j) { return warp + j * kWarps < stride && at + j * kWarps < m; };
    // A loose element, which belongs to no vector.
    const uint32_t single = tid < row.loose() ? row[row.loose_index(tid)] : 0;
    uint32_t c[kAtOnce], bin[kAtOnce];
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; ++j)
      c[j] = survivor(min(at + j * kWarps, kWholeRoom - 1));  // beyond the list: any value
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; ++j) {
      bin[j] = is_one(j) ? bin_of(c[j]) : nobody;
      atomicAdd(&s.bins[bin[j]], 1u);
    }
#pragma unroll 1
    for (uint32_t j = kAtOnce; is_one(j); ++j) atomicAdd(&s.bins[bin_of(survivor(at + j * kWarps))], 1u);
    if (single >= threshold) atomicAdd(&s.bins[bin_of(single)], 1u);
    __syncthreads();
    if (!add_up_bins()) return false;

    const uint32_t kept = s.kept;
    const auto put = [&](uint32_t c, uint32_t bin) {
      const uint32_t place = atomicAdd(&s.bins[bin], 1u);
      if (place < kept) list[place] = c;
    };
    uint32_t place[kAtOnce];
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; ++j) place[j] = atomicAdd(&s.bins[bin[j]], 1u);
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; ++j)
      if (place[j] < kept && bin[j] < kSieveBins) list[place[j]] = c[j];
#pragma unroll 1
    for (uint32_t j = kAtOnce; is_one(j); ++j) {
      const uint32_t c = survivor(at + j * kWarps);
      put(c, bin_of(c));
    }
    if (single >= threshold) put(single, bin_of(single));
    __syncthreads();  // a bin's number is now where it ends, and where the next one starts
    return true;
  }

  // Ranks each listed survivor within its bin, and writes those that are among the k best.
  __device__ __forceinline__ void rank_and_write() {
    const uint32_t kept = s.kept;
    constexpr int kRanked = 2048 / kThreads;
#pragma unroll 1
    for (uint32_t i = tid; i < kept; i += kRanked * kThreads) {
      uint32_t mine[kRanked], at[kRanked], end[kRanked], place[kRanked], longest = 0;
#pragma unroll
      for (int j = 0; j < kRanked; ++j) mine[j] = list[min(i + j * kThreads, kept - 1)];
#pragma unroll
      for (int j = 0; j < kRanked; ++j) {
        const uint32_t bin = bin_of(mine[j]);
        place[j] = at[j] = bin ? s.bins[bin - 1] : 0;
        end[j] = s.bins[bin];
        longest = max(longest, end[j] - at[j]);
      }
#pragma unroll 1
      for (; longest; --longest) {
#pragma unroll
        for (int j = 0; j < kRanked; ++j) {
          if (at[j] < end[j]) place[j] += list[at[j]] > mine[j];
          ++at[j];
        }
      }
#pragma unroll
      for (int j = 0; j < kRanked; ++j)
        if (i + j * kThreads < kept && place[j] < a.k) a.write(place[j], mine[j]);
    }
  }
};

__global__ void __launch_bounds__(kThreads, 1) whole_kernel(const __grid_constant__ Whole a) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Block block(a, shared_bytes);
  block.start();
  if (block.sample()) {
    block.filter();
    if (block.deal_out()) return block.rank_and_write();
  }
  wait_for_async_copies<0>();
  search(a, block.row, block.s, block.list, block.list + kWholeSort, block.survivors, block.least, block.bottom,
         block.top);
}

}  // namespace

cudaError_t launch_sieve_whole(cudaStream_t stream, const Problem& problem, const Buffers& buffers) {
  Whole a = {call_of(problem, buffers)};
  // The number of threads that have one of the k best elements in their part of the sample: the expected number and
  // five standard deviations more.
  const double of_thread = a.length / static_cast<double>(kThreads * kSteps);  // elements of a thread's sample
  const double share = static_cast<double>(a.k) / a.length, seen = 1 - std::exp(-share * of_thread);
  const double reach = kThreads * seen + 5 * std::sqrt(kThreads * seen * (1 - seen)) + 5;
  a.reach = static_cast<uint32_t>(std::min(reach, kThreads * 63.0 / 64));
  Launch shape;
  shape.grid = dim3(static_cast<unsigned>(problem.rows.count()));
  shape.block = dim3(kThreads);
  shape.shared_bytes = kWholeShared;
  return launch(stream, shape, whole_kernel, a);
}

}  // namespace jaxgpuops::topk
