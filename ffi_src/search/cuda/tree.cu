// searchsorted of many queries of 16, 32 or 64 bits in rows along the last axis. A block keeps splitters of its row in
// shared memory: its elements, or the last of each group of 2^group_bits neighbours. They form a search tree that
// stands level by level, so that the lanes of a warp, which search in different subtrees, mostly read different banks.
// The group that a query belongs to is then searched in global memory.
//
// If queries ascend or descend, a block needs no tree. So it checks whether the first queries of its warps are in
// order. If they are, each warp takes up to 256 neighbouring queries at a time, and searches in a window of the row.
// The warp keeps this window in shared memory, and moves it when queries leave it. If later queries are out of order,
// this is slow, but still correct.
//
// Otherwise, a warp takes 128 queries at a time, and goes down the tree with the least and the largest of them as long
// as both take the same way. If few elements are left there, as in long sorted runs, the warp copies these elements to
// shared memory and searches only them. For queries that lie far apart, the cost is the number of 32-byte sectors that
// come from L2. So a group of 32 elements is searched by sectors: two for each query, where a binary search would read
// three.
//
// Bytes moved: queries are read once and places written once; each block reads a sector for each splitter, or, if
// queries are in order, the elements among which they lie.
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "search/cuda/launch.h"

namespace jaxgpuops::search {
namespace {

constexpr int kOwn = kTreeTurn / 32;       // queries that a thread searches for at a time
constexpr int kBatch = 8;                  // splitters that a thread loads at a time
constexpr int kPair = 2;                   // queries that it searches by sectors at a time
constexpr int kVector = 8;                 // elements of 32 bits in a sector
constexpr int kApartBits = 14;             // L1 may hold all of 2^14 elements
constexpr int kInOrder = kOrderTurn / 32;  // the same as kOwn, if queries are in order

template <class T>  // what bounds are compared as, by all lanes of a warp
using Word = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
struct SortedRow {
  const T* elements;
  uint32_t length;
  const SortOrder& order;

  __device__ __forceinline__ T key(uint32_t at) const { return sort_key(elements[at], order); }
};

// Searches groups of up to 32 elements for kPair queries, a sector at a time. The elements before place[i] come before
// query i, and those behind the group do not. A round looks at the sector in the middle of those that are left.
__device__ __forceinline__ void search_sectors(const SortedRow<uint32_t>& row, int bits, const uint32_t* bound,
                                               uint32_t* place) {
  uint32_t left[kPair];  // sectors; place[i] is the first element of the first of them
#pragma unroll
  for (int i = 0; i < kPair; ++i) left[i] = 1u << (bits - 3);
#pragma unroll 1
  for (int round = 3; round <= bits; ++round) {
    uint4 half[kPair][2];
    uint32_t at[kPair];
#pragma unroll
    for (int i = 0; i < kPair; ++i) {
      at[i] = place[i] + (left[i] - 1) / 2 * kVector;
      if (left[i] == 0 || at[i] + kVector > row.length) continue;
      half[i][0] = *reinterpret_cast<const uint4*>(row.elements + at[i]);
      half[i][1] = *reinterpret_cast<const uint4*>(row.elements + at[i] + kVector / 2);
    }
#pragma unroll
    for (int i = 0; i < kPair; ++i) {
      if (left[i] == 0) continue;
      const auto below = [&](uint32_t element) { return sort_key(element, row.order) < bound[i]; };
      uint32_t found = 0;
      if (at[i] + kVector <= row.length) {
        const bool upper = below(half[i][0].w), pair = below(upper ? half[i][1].y : half[i][0].y);
        const uint32_t single = pair ? (upper ? half[i][1].z : half[i][0].z) : (upper ? half[i][1].x : half[i][0].x);
        found = 4 * upper + 2 * pair + below(single);
        if (found == kVector - 1) found += below(half[i][1].w);
      } else {
        while (at[i] + found < row.length && row.key(at[i] + found) < bound[i]) ++found;
      }
      if (found == kVector) {
        place[i] = at[i] + kVector;
        left[i] /= 2;
      } else if (found > 0) {
        place[i] = at[i] + found;
        left[i] = 0;
      } else {
        left[i] = (left[i] - 1) / 2;
      }
    }
  }
}

// Whether the places of a warp are so far from each other that most sectors come from L2: neither are those of
// neighbours in two neighbouring groups, nor do all fit in L1.
__device__ __forceinline__ bool are_apart(uint32_t place, int bits) {
  const uint32_t other = __shfl_xor_sync(kEveryLane, place, 1), distance = max(place, other) - min(place, other);
  const uint32_t span = largest_of_warp(place) + largest_of_warp(~place) + 1;
  return span > 1u << kApartBits && __popc(__ballot_sync(kEveryLane, distance > 2u << bits)) > 8;
}

// Returns whether the intervals of the block's warps, one after the other, ascend or descend. All threads call this.
__device__ __forceinline__ bool are_in_order(uint32_t low, uint32_t high, uint32_t* shared, bool& ascend) {
  const uint32_t warps = blockDim.x / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) shared[2 * warp] = low, shared[2 * warp + 1] = high;
  __syncthreads();
  const uint32_t next = min(lane + 1, warps - 1), own = next > 0 ? next - 1 : 0;
  ascend = __all_sync(kEveryLane, shared[2 * own + 1] <= shared[2 * next]);
  const bool descend = __all_sync(kEveryLane, shared[2 * own] >= shared[2 * next + 1]);
  __syncthreads();
  return ascend || descend;
}

// Finds how many of `count` elements are below each of two bounds. All lanes of a warp call this.
template <class Element>
__device__ __forceinline__ void find_both(Element element, uint32_t count, uint32_t low, uint32_t high, uint32_t& first,
                                          uint32_t& last) {
  first = last = 0;
  // The results are in [first, first + left] and [last, last + left].
  for (uint32_t left = count; left > 0;) {
    const uint32_t step = (left + 31) / 32, at = (threadIdx.x % 32 + 1) * step - 1;
    const uint32_t a = first + at, b = last + at;
    const auto of_a = element(min(a, count - 1)), of_b = element(min(b, count - 1));
    first += step * __popc(__ballot_sync(kEveryLane, a < count && of_a < low));
    last += step * __popc(__ballot_sync(kEveryLane, b < count && of_b < high));
    left = step - 1;
  }
}

// Returns the bound of a query: elements below it come before the query. `all`: no such bound exists, since all
// elements come before the query.
template <class T>
__device__ __forceinline__ T bound_of(T query, const Search& problem, bool& all) {
  const T key = sort_key(query, problem.order);
  all = problem.right && key == static_cast<T>(~T{0});
  return static_cast<T>(key + (problem.right && !all));
}

// Reverses an array if `reverses`.
template <class T>
__device__ __forceinline__ void reverse_if(bool reverses, T (&x)[kInOrder]) {
  if (!reverses) return;
#pragma unroll
  for (int i = 0; i < kInOrder / 2; ++i) {
    const T low = x[i];
    x[i] = x[kInOrder - 1 - i], x[kInOrder - 1 - i] = low;
  }
}

// Finds the places of a warp's queries, which ascend or descend. The warp keeps a window of 2^near_bits elements in
// `near`, so many that it rarely has to move the window. If whole vectors of queries can be loaded, each thread has
// neighbouring ones; if these are dense, it searches for the first one and walks on from there.
template <class T>
__device__ __forceinline__ void search_in_order(const Search& problem, const SortedRow<T>& row, const T* queries,
                                                int32_t* places, int count, bool ascend, T* near, int near_bits) {
  constexpr T kAll = static_cast<T>(~T{0});
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint32_t most = 1u << near_bits;
  uint32_t window = 0, held = 0;  // the first element of the window, and how many it has
  struct alignas(16) Vector {
    T query[16 / sizeof(T)];
  };
  constexpr int kVectors = kInOrder * sizeof(T) / 16;
  const bool aligned = (reinterpret_cast<uintptr_t>(queries) | reinterpret_cast<uintptr_t>(places)) % 16 == 0;
  const auto is_whole = [&](int start) { return aligned && start + kOrderTurn <= count; };
  T query[kInOrder];
  const auto load = [&](int start) {  // repeats the last query behind the end
    if (is_whole(start)) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const Vector vector = reinterpret_cast<const Vector*>(queries + start)[lane * kVectors + v];
#pragma unroll
        for (int i = 0; i < kInOrder / kVectors; ++i) query[v * (kInOrder / kVectors) + i] = vector.query[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kInOrder; ++i) query[i] = queries[min(start + lane + i * 32, count - 1)];
    }
  };
  if (count > 0) load(0);
#pragma unroll 1
  for (int start = 0; start < count; start += kOrderTurn) {
    const int own = count - start;
    T bound[kInOrder];
    uint32_t all = 0, place[kInOrder], low = ~0u, high = 0;
#pragma unroll
    for (int i = 0; i < kInOrder; ++i) {
      bool is_last;
      bound[i] = bound_of(query[i], problem, is_last);
      all |= uint32_t{is_last} << i;
      low = min(low, uint32_t{bound[i]});
      high = max(high, uint32_t{bound[i]});
    }
    if (own > kOrderTurn) load(start + kOrderTurn);
    reverse_if(!ascend, bound);
    bool walks = is_whole(start);  // whether the thread's queries are in order
#pragma unroll
    for (int i = 1; i < kInOrder; ++i) walks = walks && bound[i - 1] <= bound[i];
    low = ~largest_of_warp(~low);
    high = largest_of_warp(high);
    const auto in_row = [&](uint32_t at) { return row.key(at); };
    const auto in_window = [&](uint32_t at) { return near[at]; };
    uint32_t first, last;
    bool has = held > 0 && (window == 0 || near[0] < low) && (window + held == row.length || near[held - 1] >= high);
    if (!has) {
      find_both(in_row, row.length, low, high, first, last);
      // The window begins before these places, or ends behind them if queries descend. It is to last for the turns that
      // are left.
      const uint32_t turns = min(static_cast<uint32_t>(own - 1) / kOrderTurn + 1, most);
      const uint32_t wanted = min(min(last - first, most) * turns * 5 / 4 + 2, most);
      const uint32_t end = ascend ? min(max(first, 1u) - 1 + wanted, row.length) : min(last + 1, row.length);
      window = ascend ? max(first, 1u) - 1 : max(end, wanted) - wanted;
      held = end - window;
      has = (window == 0 || window < first) && (window + held == row.length || last < window + held);
      if (has) {
        __syncwarp();
#pragma unroll 8
        for (uint32_t i = threadIdx.x % 32; i < held; i += 32) near[i] = row.key(window + i);
        __syncwarp();
      }
    }
    const auto search = [&](auto element) {
#pragma unroll
      for (int i = 0; i < kInOrder; ++i) place[i] = first;
#pragma unroll 1
      for (uint32_t left = last - first; left > 0;) {  // a place is in [place[i], place[i] + left]
        const uint32_t half = (left + 1) / 2;
#pragma unroll
        for (int i = 0; i < kInOrder; ++i)
          if (element(place[i] + half - 1) < bound[i]) place[i] += half;
        left -= half;
      }
    };
    if (has) {
      find_both(in_window, held, low, high, first, last);
      if (first < last && last - first <= kOrderTurn && __all_sync(kEveryLane, walks)) {
        uint32_t at = first;
#pragma unroll 1
        for (uint32_t left = last - first; left > 0;) {
          const uint32_t half = (left + 1) / 2;
          if (near[at + half - 1] < bound[0]) at += half;
          left -= half;
        }
        const auto element = [&] { return at < last ? near[at] : kAll; };
        T next = element();
#pragma unroll
        for (int i = 0; i < kInOrder; ++i) {
          while (next < bound[i]) ++at, next = element();
          place[i] = at;
        }
      } else {
        search(in_window);
      }
#pragma unroll
      for (int i = 0; i < kInOrder; ++i) place[i] += window;
    } else {
      held = 0;
      search(in_row);
    }
    reverse_if(!ascend, place);
#pragma unroll
    for (int i = 0; i < kInOrder; ++i) place[i] = all >> i & 1 ? row.length : place[i];
    if (is_whole(start)) {
      auto* const to = reinterpret_cast<uint4*>(places + start + lane * kInOrder);
#pragma unroll
      for (int i = 0; i < kInOrder; i += 4) to[i / 4] = uint4{place[i], place[i + 1], place[i + 2], place[i + 3]};
    } else {
#pragma unroll
      for (int i = 0; i < kInOrder; ++i)
        if (start + lane + i * 32 < count) places[start + lane + i * 32] = static_cast<int32_t>(place[i]);
    }
  }
}

// Without kGroups, which is for 32 bits, all elements are splitters. Without kLooks, blocks do not check whether their
// queries are in order. Kernels without either let more warps share a multiprocessor. Those of 64 bits never look: the
// queries of a turn would take too many registers.
template <class T, bool kGroups, bool kLooks>
__global__ void __launch_bounds__(1024)
    search_tree_kernel(const __grid_constant__ Search problem, const __grid_constant__ SearchPlan plan,
                       const T* __restrict__ queries, const T* __restrict__ sorted, int32_t* __restrict__ places) {
  constexpr T kAll = static_cast<T>(~T{0});
  T* const tree = reinterpret_cast<T*>(dynamic_shared_memory());
  const auto blocks = static_cast<uint32_t>(plan.blocks);
  const int64_t row_at = blockIdx.x / blocks, part = blockIdx.x % blocks;
  const int levels = plan.levels, bits = kGroups ? plan.group_bits : 0;
  const SortedRow<T> row = {sorted + problem.sorted(row_at, 0, 0), static_cast<uint32_t>(problem.length),
                            problem.order};
  const int64_t first = part * plan.chunk, count = min(plan.chunk, plan.queries - first);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  queries += row_at * plan.queries + first;
  places += row_at * plan.queries + first;
  // Without the levels below, splitters are numbered from 1, and a level has those with odd numbers. Node k of the
  // level is the k-th of them.
  const uint32_t splitters = 1u << levels;
  if constexpr (kLooks) {
    if (plan.near_bits > 0) {
      const int64_t share = (plan.chunk / (blockDim.x / 32) + 31) / 32 * 32, from = min(warp * share, count);
      const uint32_t key = sort_key(queries[min(from + lane, count - 1)], problem.order);
      bool ascend;
      if (are_in_order(~largest_of_warp(~key), largest_of_warp(key), reinterpret_cast<uint32_t*>(tree), ascend)) {
        search_in_order(problem, row, queries + from, places + from, static_cast<int>(min(share, count - from)), ascend,
                        tree + (warp << plan.near_bits), plan.near_bits);
        return;
      }
    }
  }
  for (uint32_t start = threadIdx.x; start < splitters; start += kBatch * blockDim.x) {
    T element[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      element[i] = row.elements[min(((start + i * blockDim.x) << bits) - 1, row.length - 1)];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t splitter = start + i * blockDim.x;
      if (splitter == 0 || splitter >= splitters) continue;
      const bool exists = (splitter << bits) - 1 < row.length;
      tree[(splitters + splitter) >> __ffs(static_cast<int>(splitter))] =
          exists ? sort_key(element[i], problem.order) : kAll;
    }
  }
  __syncthreads();

  const bool aligned = reinterpret_cast<uintptr_t>(row.elements) % 16 == 0;
  T* const near = tree + splitters + (warp << kNearBits);  // of the warp
  int patience = 0;  // for so many turns, the warp does not check whether its queries lie close together
  // Whole warps enter the loop; queries past the end are the last one.
  for (int64_t start = warp * kTreeTurn; start < count; start += int64_t{kOwn} * blockDim.x) {
    T bound[kOwn];
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) bound[i] = queries[min(start + lane + i * 32, count - 1)];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      bool is_last;
      bound[i] = bound_of(bound[i], problem, is_last);
      all |= uint32_t{is_last} << i;
    }
    uint32_t top = 1;  // the node under which all of the warp's queries are
    int level = 0;
    if (patience == 0) {
      Word<T> low = bound[0], high = bound[0];
#pragma unroll
      for (int i = 1; i < kOwn; ++i) low = min(low, Word<T>{bound[i]}), high = max(high, Word<T>{bound[i]});
      low = ~largest_of_warp(~low);
      high = largest_of_warp(high);
#pragma unroll 1
      for (; level < levels; ++level) {
        const Word<T> splitter = tree[top];
        const bool upper = splitter < low;
        if (!upper && splitter < high) break;
        top = 2 * top + upper;
      }
      if (level < 4) patience = 8;
    } else {
      --patience;
    }
    uint32_t place[kOwn];
    // For each query: advances by `size` elements if all of these come before the query, that is, if the last one does.
    const auto step = [&](uint32_t size) {
      T element[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) element[i] = row.elements[min(place[i] + size, row.length) - 1];
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        if (place[i] + size <= row.length && sort_key(element[i], problem.order) < bound[i]) place[i] += size;
    };
    const int rest = levels - level + bits;  // the node has 2^rest elements
    bool sectors = false;
    if (kGroups && bits > 0 && rest <= kNearBits) {
      const uint32_t first_near = (top - (1u << level)) << rest;
#pragma unroll 4
      for (uint32_t i = lane; i < 1u << rest; i += 32)
        near[i] = first_near + i < row.length ? row.key(first_near + i) : kAll;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kOwn; ++i) place[i] = 0;
#pragma unroll 2
      for (uint32_t size = 1u << rest >> 1; size; size /= 2) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
          if (near[place[i] + size - 1] < bound[i]) place[i] += size;
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) place[i] += first_near;
      __syncwarp();
    } else {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) place[i] = top;
#pragma unroll 2
      for (; level < levels; ++level) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) place[i] = 2 * place[i] + (tree[place[i]] < bound[i]);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) place[i] = (place[i] - (1u << levels)) << bits;
      if constexpr (kGroups) {
        if (sizeof(T) == 4 && bits >= 3 && rest > kApartBits && aligned) sectors = are_apart(place[0], bits);
#pragma unroll 1
        for (uint32_t size = 1u << bits >> 1; size >= (sectors ? 4 * kVector : 1); size /= 2) step(size);
        if constexpr (sizeof(T) == 4) {
          if (sectors) {
#pragma unroll
            for (int i = 0; i < kOwn; i += kPair) search_sectors(row, min(bits, 5), bound + i, place + i);
          }
        }
      }
    }
    // The last element may be no splitter, and no step so far was for it.
    bool ends = false;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) ends |= place[i] + 1 == row.length;
    if (!sectors && ends) step(1);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int64_t at = start + lane + i * 32;
      if (at < count) places[at] = static_cast<int32_t>(all >> i & 1 ? row.length : place[i]);
    }
  }
}

}  // namespace

cudaError_t launch_search_tree(cudaStream_t stream, const SearchPlan& plan, const Search& problem, const void* queries,
                               const void* sorted, int32_t* places) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.rows * plan.blocks));
  config.block = dim3(plan.threads);
  config.shared_bytes = plan.shared_bytes;
  const auto run = [&](auto width, auto kernel) {
    using T = decltype(width);
    return launch(stream, config, kernel, problem, plan, static_cast<const T*>(queries), static_cast<const T*>(sorted),
                  places);
  };
  const bool looks = plan.near_bits > 0;
  if (problem.bits == 16)
    return run(uint16_t{},
               looks ? search_tree_kernel<uint16_t, true, true> : search_tree_kernel<uint16_t, true, false>);
  if (problem.bits == 64) return run(uint64_t{}, search_tree_kernel<uint64_t, true, false>);
  if (plan.group_bits > 0) return run(uint32_t{}, search_tree_kernel<uint32_t, true, true>);
  return run(uint32_t{},
             looks ? search_tree_kernel<uint32_t, false, true> : search_tree_kernel<uint32_t, false, false>);
}

}  // namespace jaxgpuops::search
