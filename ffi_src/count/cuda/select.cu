// select: a block keeps the keys of a row in shared memory, and finds all ranks together. The element of a rank has its
// key in an interval, which gets narrower from step to step until few elements, or equal ones, are left in it.
//
// The first interval comes from a sample of the row, which a warp sorts while the row is read: the rank is between two
// elements of the sample but in a few rows of a thousand. A step then counts the keys below the interval, and those in
// each of 512 equal parts of it; so it does not matter how keys are distributed over the row, and few of them need an
// atomic. A warp finds the part that the rank falls in. A rank that the interval missed has all keys to one side of it.
// In the end the elements that are left are listed and compared with each other; of equal ones, the one wanted is found
// by counting, as they are in order of appearance.
//
// After: Floyd and Rivest, "Expected time bounds for selection" (1975).
#include <cuda_runtime.h>

#include <type_traits>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/warp.cuh"
#include "count/cuda/launch.h"

namespace jaxgpuops::count {
namespace {

constexpr int kBins = kSelectBins, kBinBits = 9;
static_assert(kBins == 1 << kBinBits && kSelectFew <= kBins);
constexpr int kSample = 256, kLaneSample = kSample / 32;  // of a row

// ---- The sample -----------------------------------------------------------------------------------------------------

// Sorts upwards what a warp has, eight words a lane.
__device__ __forceinline__ void sort_in_warp(uint32_t (&v)[kLaneSample]) {
  const auto exchange = [&](int i, int j) {
    const uint32_t least = min(v[i], v[j]);
    v[j] = max(v[i], v[j]);
    v[i] = least;
  };
#pragma unroll
  for (int size = 2; size <= kLaneSample; size *= 2) {
#pragma unroll
    for (int i = 0; i < kLaneSample; ++i)
      if (i % size < size / 2) exchange(i, i ^ (size - 1));
#pragma unroll
    for (int step = size / 4; step > 0; step /= 2)
#pragma unroll
      for (int i = 0; i < kLaneSample; ++i)
        if (i % (2 * step) < step) exchange(i, i + step);
  }
  const int lane = threadIdx.x & 31;
#pragma unroll 1  // what runs once waits for its instructions more than for anything else
  for (int lanes = 2; lanes <= 32; lanes *= 2) {
#pragma unroll 1
    for (int step = lanes / 2; step > 0; step /= 2) {
      const bool mirrored = step == lanes / 2, lower = (lane & step) == 0;
      uint32_t other[kLaneSample];
#pragma unroll
      for (int i = 0; i < kLaneSample; ++i)
        other[i] = __shfl_xor_sync(kEveryLane, mirrored ? v[kLaneSample - 1 - i] : v[i], mirrored ? lanes - 1 : step);
#pragma unroll
      for (int i = 0; i < kLaneSample; ++i) v[i] = lower ? min(v[i], other[i]) : max(v[i], other[i]);
    }
#pragma unroll
    for (int step = kLaneSample / 2; step > 0; step /= 2)
#pragma unroll
      for (int i = 0; i < kLaneSample; ++i)
        if (i % (2 * step) < step) exchange(i, i + step);
  }
}

// A word of a key in its order: the high half, if it has 64 bits.
template <class T>
__device__ __forceinline__ uint32_t word_of(T key) {
  return static_cast<uint32_t>(sizeof(T) == 8 ? static_cast<uint64_t>(key) >> 32 : key);
}

// ---- Selection ------------------------------------------------------------------------------------------------------

template <class T>
struct Found {
  using Word = std::conditional_t<sizeof(T) == 8, unsigned long long, uint32_t>;

  // Of each table: it counts keys from `low` to `low + width`, each part of them of 2^shift, and those below.
  Word low[kMostRanks], width[kMostRanks];
  uint32_t shift[kMostRanks], below[kMostRanks];
  Word least[kMostRanks], most[kMostRanks];  // keys there
  // Of each rank: its table, or that of a smaller one if both are in one interval; kNone if it needs no more.
  uint32_t rank[kMostRanks], table[kMostRanks];
  // Its element is number `left` of `size` elements with keys from `first` to `first + last`.
  Word first[kMostRanks], last[kMostRanks];
  uint32_t size[kMostRanks], left[kMostRanks];
};
constexpr uint32_t kNone = ~0u;

// Sets the interval of a table whose lowest and highest key are given.
template <class T, class Word>
__device__ __forceinline__ void set_table(Found<T>& found, int t, Word low, Word high) {
  const Word width = high - low;
  const int bits = sizeof(Word) == 8 ? 64 - __clzll(static_cast<long long>(width)) : 32 - __clz(static_cast<int>(width));
  found.low[t] = low;
  found.width[t] = width;
  found.shift[t] = max(bits - kBinBits, 0);
}

// Finds the part that rank `r` falls in; a warp does. `all`: the largest key.
template <class T>
__device__ __forceinline__ void find_part(const uint32_t* counts, Found<T>& found, int r, uint32_t length) {
  using Word = typename Found<T>::Word;
  constexpr int kOwn = kBins / 32;
  constexpr Word kAll = static_cast<T>(~T{0});
  const int lane = threadIdx.x & 31;
  const uint32_t t = found.table[r], rank = found.rank[r], below = found.below[t];
  const Word low = found.low[t], width = found.width[t];
  const int shift = found.shift[t];
  uint32_t count[kOwn], own = 0;
#pragma unroll
  for (int i = 0; i < kOwn; i += 4) {
    const uint4 four = reinterpret_cast<const uint4*>(counts + t * kBins + lane * kOwn)[i / 4];
    count[i] = four.x, count[i + 1] = four.y, count[i + 2] = four.z, count[i + 3] = four.w;
    own += four.x + four.y + four.z + four.w;
  }
  const uint32_t up_to = below + sum_up_to_lane(own), inside = shuffle_from(up_to, 31);
  const auto save = [&](Word first, Word last, uint32_t size, uint32_t left) {
    found.first[r] = first;
    found.last[r] = last - first;
    found.size[r] = size;
    found.left[r] = left;
  };
  if (rank < below) {
    if (lane == 0) save(0, low - 1, below, rank);
  } else if (rank >= inside) {
    if (lane == 0) save(low + width + 1, kAll, length - inside, rank - inside);
  } else if (rank < up_to && rank >= up_to - own) {
    uint32_t left = rank - (up_to - own), size = count[0], part = 0;
#pragma unroll
    for (int i = 0, past = 0; i + 1 < kOwn; ++i) {
      past |= left < count[i];
      if (past) continue;
      left -= count[i];
      size = count[i + 1];
      ++part;
    }
    const Word first = low + (static_cast<Word>(lane * kOwn + part) << shift);
    save(first, min(first + ((Word{1} << shift) - 1), low + width), size, left);
  }
}

template <class T>
__global__ void SELECT_REGS
    select_kernel(Select problem, const T* __restrict__ x, const int32_t* __restrict__ ranks, T* __restrict__ values,
                  int32_t* __restrict__ indices, uint32_t table_at) {
  using Word = typename Found<T>::Word;
  constexpr int kPack = 16 / sizeof(T), kPacks = SELECT_PACKS;
  constexpr Word kAll = static_cast<T>(~T{0});
  __shared__ uint32_t sample[kSample];
  __shared__ Found<T> found;
  __shared__ uint32_t listed[kMostRanks];
  const int threads = blockDim.x, warps = threads / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const auto length = static_cast<uint32_t>(problem.rows.length);
  const auto wanted = static_cast<int>(problem.count);
  const int64_t row = blockIdx.x;
  x += row * length;

  // Keys lie in shared memory as elements do in global memory, relative to 16 bytes. What is left of the first and the
  // last pack has copies of the first element, which are subtracted where they are counted.
  struct alignas(16) Pack {
    T element[kPack];
  };
  const auto past = static_cast<int>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
  auto* const held = reinterpret_cast<Pack*>(dynamic_shared_memory());
  T* const keys = reinterpret_cast<T*>(held) + past;
  auto* const tables = reinterpret_cast<uint32_t*>(dynamic_shared_memory() + table_at);
  const int packs = static_cast<int>((past + length + kPack - 1) / kPack);
  const uint32_t copies = packs * kPack - length;

  for (int p = threadIdx.x; p < packs; p += threads) {
    const int at = p * kPack - past;
    if (at >= 0 && at + kPack <= static_cast<int>(length)) {
      copy_async(held + p, x + at);
    } else {
#pragma unroll
      for (int e = 0; e < kPack; ++e)
        held[p].element[e] = x[static_cast<uint32_t>(at + e) < length ? at + e : 0];
    }
  }
  commit_async_copies();
  const auto clear_tables = [&](int first) {
    for (int b = threadIdx.x - first; b < wanted * kBins / 4; b += threads - first)
      reinterpret_cast<uint4*>(tables)[b] = uint4{0, 0, 0, 0};
  };
  if (warp == 0) {
    uint32_t own[kLaneSample];
#pragma unroll
    for (int i = 0; i < kLaneSample; ++i) {  // one of each of so many parts of the row, anywhere in it
      const uint32_t part = i * 32 + lane, share = part * 40503u & 0xffff;
      own[i] = word_of(sort_key(x[(part * uint64_t{length} + (share * uint64_t{length} >> 16)) / kSample], problem.order));
    }
    sort_in_warp(own);
#pragma unroll
    for (int i = 0; i < kLaneSample; ++i) sample[lane * kLaneSample + i] = own[i];
    __syncwarp();
    int middle = 0;
    if (lane < wanted) {
      const auto rank = static_cast<uint32_t>(problem.rank_of(ranks[problem.ranks(row, lane, 0)]));
      middle = static_cast<int>((rank * uint64_t{kSample} + kSample / 2) / length);
      // three standard deviations of how many of the sample come before the rank, and a little
      const float share = (rank + 0.5f) / length;
      const int to_side = static_cast<int>(3.f * sqrtf(kSample * share * (1 - share))) + 2;
      const int from = middle - to_side, to = middle + to_side;
      const uint32_t lowest = sample[max(from, 0)], highest = sample[min(to, kSample - 1)];
      const uint32_t most = sizeof(T) == 8 ? ~0u : static_cast<uint32_t>(kAll), distance = highest - lowest;
      // Beyond the ends of the sample, the interval is as wide once more.
      Word low = from < 0 ? lowest - min(distance, lowest) : lowest;
      Word high = to >= kSample ? highest + min(distance, most - highest) : highest;
      if (sizeof(T) == 8) low <<= sizeof(T) * 4, high = high << sizeof(T) * 4 | 0xffffffff;
      set_table(found, lane, low, high);
      found.rank[lane] = rank;
      found.below[lane] = 0;
    }
    uint32_t table = lane;
    for (int q = wanted - 1; q >= 0; --q)
      if (abs(__shfl_sync(kEveryLane, middle, q) - middle) <= 1 && q < lane) table = q;
    if (lane < wanted) found.table[lane] = table;
  } else {
    clear_tables(32);
  }
  wait_for_async_copies<0>();
  __syncthreads();

  // Whether it is the table of a rank.
  const auto is_used = [&](int t) {
    bool used = false;
    for (int r = t; r < wanted; ++r) used |= found.table[r] == t;
    return used;
  };
  // Calls `visit(key, has, p)` for all keys, some at a time; has[i]: whether the thread has pack i of them.
  const auto for_keys = [&](bool raw, auto visit) {
    for (int start = warp * 32; start < packs; start += kPacks * threads) {
      Word key[kPacks][kPack];
      bool has[kPacks];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const int p = start + i * threads + lane;
        has[i] = p < packs;
        Pack pack = {};
        if (has[i]) pack = held[p];
        if (raw) {
#pragma unroll
          for (int e = 0; e < kPack; ++e) pack.element[e] = sort_key(pack.element[e], problem.order);
          if (has[i]) held[p] = pack;
        }
#pragma unroll
        for (int e = 0; e < kPack; ++e) key[i][e] = pack.element[e];
      }
      visit(key, has, start);
    }
  };

#pragma unroll 1
  for (bool raw = true;; raw = false) {
    if (threadIdx.x < wanted && copies && is_used(threadIdx.x)) {
      const int t = threadIdx.x;
      const Word key = sort_key(x[0], problem.order), past_low = key - found.low[t];
      if (key < found.low[t]) atomicAdd(found.below + t, 0u - copies);
      if (past_low <= found.width[t]) atomicAdd(tables + t * kBins + (past_low >> found.shift[t]), 0u - copies);
    }
    for_keys(raw, [&](auto& key, auto& has, int) {
      for (int t = 0; t < wanted; ++t) {
        if (!is_used(t)) continue;
        const Word low = found.low[t], width = found.width[t];
        const int shift = found.shift[t];
        uint32_t* const counts = tables + t * kBins;
        uint32_t below = 0, equal = 0;
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          if (!has[i]) continue;
#pragma unroll
          for (int e = 0; e < kPack; ++e) {
            below += key[i][e] < low;
            const Word past_low = key[i][e] - low;
            if (width == 0) {
              equal += past_low == 0;
            } else if (past_low <= width) {
              atomicAdd(counts + static_cast<uint32_t>(past_low >> shift), 1u);
            }
          }
        }
        below = sum_of_warp(below);
        if (lane == 0 && below) atomicAdd(found.below + t, below);
        if (width == 0) {
          equal = sum_of_warp(equal);
          if (lane == 0 && equal) atomicAdd(counts, equal);
        }
      }
    });
    __syncthreads();
    for (int r = warp; r < wanted; r += warps)
      if (found.table[r] != kNone) find_part(tables, found, r, length);
    __syncthreads();

    const auto needs_more = [&](int r) { return found.size[r] > kSelectFew && found.last[r] != 0; };
    bool more = false;
    for (int r = 0; r < wanted; ++r) more |= needs_more(r);
    if (!more) break;

    // The next intervals are from the least key left for a rank to the largest.
    if (threadIdx.x < wanted) {
      const int r = threadIdx.x;
      uint32_t table = r;
      for (int q = r - 1; q >= 0; --q)
        if (found.first[q] == found.first[r] && found.last[q] == found.last[r]) table = q;
      found.table[r] = needs_more(r) ? table : kNone;
      found.least[r] = kAll;
      found.most[r] = 0;
      found.below[r] = 0;
    }
    clear_tables(0);
    __syncthreads();
    for_keys(false, [&](auto& key, auto& has, int) {
      for (int t = 0; t < wanted; ++t) {
        if (!is_used(t)) continue;
        Word least = kAll, most = 0;
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
#pragma unroll
          for (int e = 0; e < kPack; ++e) {
            if (!has[i] || key[i][e] - found.first[t] > found.last[t]) continue;
            least = min(least, key[i][e]);
            most = max(most, key[i][e]);
          }
        }
        if (least > most) continue;
        atomicMin(found.least + t, least);
        atomicMax(found.most + t, most);
      }
    });
    __syncthreads();
    if (threadIdx.x < wanted && is_used(threadIdx.x))
      set_table(found, threadIdx.x, found.least[threadIdx.x], found.most[threadIdx.x]);
    __syncthreads();
  }

  const auto write = [&](int r, int at) {
    values[row * wanted + r] = x[at];
    indices[row * wanted + r] = at;
  };
  if (threadIdx.x < wanted) listed[threadIdx.x] = 0;
  __syncthreads();
  for_keys(false, [&](auto& key, auto& has, int start) {
    for (int r = 0; r < wanted; ++r) {
      if (found.size[r] > kSelectFew) continue;
      const Word first = found.first[r], last = found.last[r];
      uint32_t is_left = 0;
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
#pragma unroll
        for (int e = 0; e < kPack; ++e)
          if (has[i] && key[i][e] - first <= last) is_left |= 1u << (i * kPack + e);
      for (; is_left; is_left &= is_left - 1) {
        const int place = __ffs(is_left) - 1;
        const int at = (start + place / kPack * threads + lane) * kPack + place % kPack - past;
        if (static_cast<uint32_t>(at) < length) tables[r * kBins + atomicAdd(listed + r, 1u)] = at;
      }
    }
  });
  __syncthreads();
  for (int r = warp; r < wanted; r += warps) {
    const uint32_t size = found.size[r], left = found.left[r];
    if (size > kSelectFew) continue;
    const uint32_t* const list = tables + r * kBins;
    for (uint32_t i = lane; i < size; i += 32) {
      const uint32_t at = list[i];
      const T key = keys[at];
      uint32_t before = 0;
      for (uint32_t j = 0; j < size; ++j) {
        const uint32_t other = list[j];
        const T its = keys[other];
        before += its < key || (its == key && other < at);
      }
      if (before == left) write(r, static_cast<int>(at));
    }
  }

  // Many equal elements. Each warp has a part of the row.
  const uint32_t part = (length + threads - 1) / threads * 32, begin = warp * part, end = min(begin + part, length);
  for (int r = 0; r < wanted; ++r) {
    if (found.size[r] <= kSelectFew) continue;
    const Word first = found.first[r];
    const auto lanes_that_have = [&](uint32_t start) {
      return __ballot_sync(kEveryLane, start + lane < end && keys[min(start + lane, length - 1)] == first);
    };
    uint32_t own = 0;
    for (uint32_t start = begin; start < end; start += 32) own += __popc(lanes_that_have(start));
    if (lane == 0) tables[r * kBins + warp] = own;
    __syncthreads();
    const uint32_t sum = sum_up_to_lane(lane < warps ? tables[r * kBins + lane] : 0);
    const uint32_t left = found.left[r] - (shuffle_from(sum, warp) - own);
    if (left >= own) continue;
    uint32_t before = 0;
    for (uint32_t start = begin; start < end && before <= left; start += 32) {
      const unsigned lanes = lanes_that_have(start);
      const uint32_t mine = before + __popc(lanes & ((1u << lane) - 1));
      if ((lanes >> lane & 1) && mine == left) write(r, static_cast<int>(start + lane));
      before += __popc(lanes);
    }
  }
}

}  // namespace

cudaError_t launch_select(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                          const int32_t* ranks, void* values, int32_t* indices) {
  if (plan.algorithm == Selecting::kEmpty) return cudaSuccess;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(problem.rows.outer));
  config.block = dim3(plan.threads);
  config.shared_bytes = plan.shared_bytes;
  return dispatch_key(problem.bits, [&](auto width) {
    using T = decltype(width);
    return launch(stream, config, select_kernel<T>, problem, static_cast<const T*>(x), ranks, static_cast<T*>(values),
                  indices, static_cast<uint32_t>(plan.table_at));
  });
}

}  // namespace jaxgpuops::count
