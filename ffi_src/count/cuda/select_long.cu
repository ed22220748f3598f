// select for rows that are too long for one block, by the steps of select.cuh. A first kernel finds intervals from a
// sample. In the second, the blocks that share a row run at the same time. Each has a slice of the row, counts its keys
// in tables in shared memory, and adds these to the row's tables in the workspace; the last block to finish finds the
// next intervals and tells the others. In the end few elements, or only equal ones, are left for each rank. If few are
// left, the blocks list them, and the last block sorts them. If only equal ones are left, each block counts those of
// its slice, and the last block finds the wanted one in the slice that has it.
//
// Each step reads the row once, and so do the lists, from the L2 cache as far as it goes. Most often there is one step.
#include <cuda_runtime.h>

#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "count/cuda/select.cuh"

namespace jaxgpuops::count {
namespace {

constexpr int kThreads = kLongThreads, kWarps = kThreads / 32;
constexpr uint32_t kLargeSampled = 1 << 20;  // the length of rows with a large sample
// What stands first in a row's workspace.
template <class T>
struct Head {
  Found<T> found;
  uint32_t finished;  // how many blocks have finished the step
  uint32_t step;      // the last step whose results are in `found`
  uint32_t listed[kMostRanks];
  uint32_t last_of_largest;  // the last index of a largest key
};

template <class T>
struct Args {
  Select problem;
  const T* x;
  const int32_t* ranks;
  T* values;
  int32_t* indices;
  char* workspace;  // heads and tables of all rows, and then lists
  SelectPlan plan;
  int64_t first_row;

  __device__ char* own(int64_t row) const { return workspace + row * plan.list_at; }
  __device__ Head<T>& head(int64_t row) const { return *reinterpret_cast<Head<T>*>(own(row)); }
  __device__ uint32_t* tables(int64_t row) const { return reinterpret_cast<uint32_t*>(own(row) + plan.table_at); }
  // The list of a rank: the indices of the elements that are left, or how many equal elements each slice has.
  __device__ uint32_t* list(int64_t row, int r) const {
    return reinterpret_cast<uint32_t*>(own(problem.rows.count())) + (row * problem.count + r) * plan.list_size;
  }
};

// The aligned vectors of 16 bytes that a row touches. Elements in them that are not of the row are replaced by copies
// of the row's first element.
template <class T>
struct Packs {
  // A thread reads 16 elements at a time (8 of 64 bits).
  static constexpr int kPack = 16 / sizeof(T), kPacks = sizeof(T) < 4 ? sizeof(T) : 4;
  struct alignas(16) Pack {
    T element[kPack];
  };

  const T* x;
  uint32_t length, past;
  int64_t packs;

  __device__ Packs(const T* row, int64_t elements)
      : x(row),
        length(static_cast<uint32_t>(elements)),
        past(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T)),
        packs((past + elements + kPack - 1) / kPack) {}
  __device__ uint32_t copies() const { return static_cast<uint32_t>(packs * kPack - length); }

  // Calls `visit(key, has, at)` for the vectors of a slice, kPacks of a thread at a time: key[i] are the keys of vector
  // i, which counts if has[i]; its first element is number at[i] of the row. `backward`: from the slice's end.
  template <bool kBackward, class Visit>
  __device__ __forceinline__ void visit_slice(const Args<T>& a, int64_t slice, Visit visit) const {
    using Word = typename Found<T>::Word;
    constexpr int64_t kStep = kPacks * kThreads;
    const SortOrder order = one_flip<T>(a.problem.order);
    const int64_t begin = slice * a.plan.slice_packs, end = min(begin + a.plan.slice_packs, packs);
    const int64_t steps = (end - begin + kStep - 1) / kStep;
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t start = begin + threadIdx.x + (kBackward ? steps - 1 - step : step) * kStep;
      Word key[kPacks][kPack];
      bool has[kPacks];
      uint32_t at[kPacks];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const int64_t first = (start + i * kThreads) * kPack - past;
        has[i] = start + i * kThreads < end;
        at[i] = static_cast<uint32_t>(first);
        Pack pack = {};
        if (has[i] && first >= 0 && first + kPack <= length) {
          pack = *reinterpret_cast<const Pack*>(x + first);
        } else if (has[i]) {
#pragma unroll
          for (int e = 0; e < kPack; ++e) pack.element[e] = x[at[i] + e < length ? at[i] + e : 0];
        }
#pragma unroll
        for (int e = 0; e < kPack; ++e) key[i][e] = sort_key(pack.element[e], order);
      }
      visit(key, has, at);
    }
  }
};

// Whether the calling block is the last of its row to finish. The last one sees what the others have written.
template <class T>
__device__ __forceinline__ bool is_last(const Args<T>& a, Head<T>& head) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&head.finished, 1u) == a.plan.slices - 1;
  __syncthreads();
  if (!last) return false;
  __threadfence();
  if (threadIdx.x == 0) head.finished = 0;
  return true;
}

// Copies what was found last to shared memory. Loads go past the L1 cache, which may have old words.
template <class T>
__device__ __forceinline__ void load_found(const Head<T>& head, Found<T>& found) {
#pragma unroll 1
  for (uint32_t w = threadIdx.x; w < sizeof(found) / 4; w += kThreads)
    reinterpret_cast<uint32_t*>(&found)[w] = __ldcg(reinterpret_cast<const uint32_t*>(&head.found) + w);
  __syncthreads();
}

// Tells the other blocks of the row what the last one has found in a step.
template <class T>
__device__ __forceinline__ void tell_found(Head<T>& head, const Found<T>& found, uint32_t step) {
  __syncthreads();
#pragma unroll 1
  for (uint32_t w = threadIdx.x; w < sizeof(found) / 4; w += kThreads)
    reinterpret_cast<uint32_t*>(&head.found)[w] = reinterpret_cast<const uint32_t*>(&found)[w];
  __syncthreads();
  if (threadIdx.x > 0) return;
  __threadfence();
  store_relaxed(&head.step, step);
}

template <class T>
__device__ __forceinline__ void wait_for_found(Head<T>& head, Found<T>& found, uint32_t step) {
  if (threadIdx.x == 0) {
    while (load_relaxed(&head.step) < step) {
    }
    __threadfence();
  }
  __syncthreads();
  load_found(head, found);
}

// Sorts upwards the first `size` keys with their indices; the whole block calls this. The arrays have room for the next
// power of two.
template <class T>
__device__ __forceinline__ void sort_in_block(T* keys, uint32_t* indices, uint32_t size) {
  uint32_t all = 1;
  while (all < size) all *= 2;
#pragma unroll 1
  for (uint32_t i = size + threadIdx.x; i < all; i += kThreads) keys[i] = static_cast<T>(~T{0}), indices[i] = ~0u;
  __syncthreads();
#pragma unroll 1
  for (uint32_t run = 2; run <= all; run *= 2) {
#pragma unroll 1
    for (uint32_t step = run / 2; step > 0; step /= 2) {
#pragma unroll 1
      for (uint32_t p = threadIdx.x; p < all / 2; p += kThreads) {
        const uint32_t i = 2 * p - (p & (step - 1)), j = step == run / 2 ? i ^ (run - 1) : i + step;
        const bool wrong = keys[j] < keys[i] || (keys[j] == keys[i] && indices[j] < indices[i]);
        if (!wrong) continue;
        const T key = keys[i];
        const uint32_t index = indices[i];
        keys[i] = keys[j], indices[i] = indices[j];
        keys[j] = key, indices[j] = index;
      }
      __syncthreads();
    }
  }
}

// Stores a sorted sample of the row, of which each thread of a block takes kOwn elements.
template <int kOwn, class T>
__device__ __forceinline__ void sample_in_block(const SortOrder& order, const T* x, uint32_t length, uint32_t* sample) {
  constexpr int kSample = kOwn * kThreads;
  uint32_t own[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own[i] = sampled_word<kSample>(order, x, length, i * kThreads + threadIdx.x);
  sort_in_warp(own);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sample[threadIdx.x * kOwn + i] = own[i];
  __syncthreads();
#pragma unroll 1
  for (int run = 64 * kOwn; run <= kSample; run *= 2) {
#pragma unroll 1
    for (int step = run / 2; step > 0; step /= 2) {
#pragma unroll 1
      for (int p = threadIdx.x; p < kSample / 2; p += kThreads) {
        const int i = 2 * p - (p & (step - 1)), j = step == run / 2 ? i ^ (run - 1) : i + step;
        const uint32_t low = sample[i], high = sample[j];
        sample[i] = min(low, high), sample[j] = max(low, high);
      }
      __syncthreads();
    }
  }
}

// Returns the index of number `left` of the elements from `begin` to `end` that have a key. The whole block calls this;
// there is room for kWarps + 1 words at `sums`.
template <class T>
__device__ __forceinline__ uint32_t find_equal(const T* __restrict__ x, const SortOrder& order, T key, int64_t begin,
                                               int64_t end, uint32_t left, uint32_t* sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  // Each warp counts in its part, and then all share the part that has the element.
  for (;;) {
    const int64_t part = (end - begin + kThreads - 1) / kThreads * 32, from = begin + warp * part;
    const int64_t to = min(from + part, end);
    uint32_t own = 0;
#pragma unroll 4
    for (int64_t at = from + lane; at < to; at += 32) own += sort_key(x[at], order) == key;
    own = sum_of_warp(own);
    __syncthreads();  // all threads are past their last use of `sums`
    if (lane == 0) sums[warp] = own;
    __syncthreads();
    const uint32_t up_to = sum_up_to_lane(lane < kWarps ? sums[lane] : 0);
    const int of = __ffs(static_cast<int>(__ballot_sync(kEveryLane, up_to > left))) - 1;
    if (of > 0) left -= shuffle_from(up_to, of - 1);
    begin += of * part;
    end = min(begin + part, end);
    if (part > 32) continue;
    if (warp == 0) {
      const bool is_equal = begin + lane < end && sort_key(x[begin + lane], order) == key;
      const unsigned lanes = __ballot_sync(kEveryLane, is_equal);
      if (is_equal && __popc(lanes & ((1u << lane) - 1)) == left) sums[kWarps] = static_cast<uint32_t>(begin) + lane;
    }
    __syncthreads();
    return sums[kWarps];
  }
}

// Finds the first intervals of a row from a sample, and clears its counts.
template <class T>
__global__ void __launch_bounds__(kThreads) select_sample_kernel(const __grid_constant__ Args<T> a) {
  __shared__ uint32_t sample[4 * kThreads];
  const uint32_t row = blockIdx.x, inner = static_cast<uint32_t>(a.problem.rows.inner), outer = row / inner;
  const auto length = static_cast<uint32_t>(a.problem.rows.length);
  const T* const x = a.x + int64_t{row} * length;
  const int bin_bits = a.plan.bin_bits, all_bins = static_cast<int>(a.problem.count) << bin_bits;
  Head<T>& head = a.head(row);
  let_dependents_start();
  for (int b = threadIdx.x; b < all_bins; b += kThreads) a.tables(row)[b] = 0;
  const bool is_large = length >= kLargeSampled;
  if (is_large)
    sample_in_block<4>(a.problem.order, x, length, sample);
  else
    sample_in_block<1>(a.problem.order, x, length, sample);
  if (threadIdx.x >= 32) return;
  const int32_t* const ranks = a.ranks + ranks_at(a.problem.ranks, outer, row - outer * inner);
  if (is_large)
    set_first_tables<4 * kThreads>(bin_bits, 4, a.problem, length, ranks, sample, head.found);
  else
    set_first_tables<kThreads>(bin_bits, 4, a.problem, length, ranks, sample, head.found);
  if (threadIdx.x < kMostRanks) head.listed[threadIdx.x] = 0;
  if (threadIdx.x == 0) head.finished = head.step = head.last_of_largest = 0;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) select_long_kernel(const __grid_constant__ Args<T> a) {
  using Word = typename Found<T>::Word;
  __shared__ Found<T> found;
  __shared__ uint32_t equal_of[kMostRanks], sums[kWarps + 1], last_of_largest;
  __shared__ uint32_t chunk_sums[kMostRanks * 8];  // of the chunks of tables
  // Tables of counts; in the end, the keys of a list and their indices.
  auto* const counts = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  const auto slices = static_cast<uint32_t>(a.plan.slices), in_launch = blockIdx.x / slices;
  const int64_t row = a.first_row + in_launch, slice = blockIdx.x - in_launch * slices;
  const auto inner = static_cast<uint32_t>(a.problem.rows.inner), outer = static_cast<uint32_t>(row) / inner;
  const uint32_t column = static_cast<uint32_t>(row) - outer * inner;
  const auto wanted = static_cast<int>(a.problem.count);
  const Packs<T> packs(a.x + row * a.problem.rows.length, a.problem.rows.length);
  const T* const x = packs.x;
  const int bin_bits = a.plan.bin_bits, all_bins = wanted << bin_bits;
  Head<T>& head = a.head(row);
  uint32_t* const tables = a.tables(row);
  if (threadIdx.x < kMostRanks) equal_of[threadIdx.x] = 0;
  if (threadIdx.x == 0) last_of_largest = 0;
#pragma unroll 1
  for (int b = threadIdx.x; b < all_bins; b += kThreads) counts[b] = 0;
  wait_for_predecessor();
  load_found(head, found);
  const uint32_t ends = found.ends;
  uint32_t to_do = ((1u << wanted) - 1) & ~ends;  // a bit for each rank that needs a step
  bool first = true;
  Word highest = 0;
#pragma unroll 1
  for (uint32_t step = 1; first || to_do; ++step) {
    const uint32_t used = found.used;
    if (slice == 0 && threadIdx.x < 32 && (used >> threadIdx.x & 1)) {
      const Word key = sort_key(x[0], a.problem.order);
      atomicAdd(counts + (threadIdx.x << bin_bits) + found.parts[threadIdx.x](key), 0u - packs.copies());
    }
    packs.template visit_slice<false>(a, slice, [&](auto& key, auto& has, auto&) {
      if (first && ends) {
#pragma unroll
        for (int i = 0; i < Packs<T>::kPacks; ++i) {
          if (!has[i]) continue;
#pragma unroll
          for (int e = 0; e < Packs<T>::kPack; ++e) highest = max(highest, key[i][e]);
        }
      }
      for_bits(used, [&](int t) { count_keys(bin_bits, counts, found, t, key, has); });
    });
    if (first && ends) {
      const Word of_warp = largest_of_lanes(highest);
      if (threadIdx.x % 32 == 0) atomicMax(&found.largest, of_warp);
    }
    __syncthreads();
    for_bits(used, [&](int t) {
#pragma unroll 1
      for (int b = (t << bin_bits) + threadIdx.x; b < (t + 1) << bin_bits; b += kThreads)
        if (counts[b]) atomicAdd(tables + b, counts[b]);
    });
    if (first && ends && threadIdx.x == 0) atomicMax(&head.found.largest, found.largest);
    if (is_last(a, head)) {
      static_assert(kThreads == 512);
      if (threadIdx.x < kMostRanks * 8) chunk_sums[threadIdx.x] = 0;
      __syncthreads();
      for_bits(used, [&](int t) {
#pragma unroll 8
        for (int b = (t << bin_bits) + threadIdx.x; b < (t + 1) << bin_bits; b += kThreads)
          counts[b] = __ldcg(tables + b);
#pragma unroll 1
        for (int b = (t << bin_bits) + threadIdx.x; b < (t + 1) << bin_bits; b += kThreads) {
          tables[b] = 0;
          const uint32_t sum = sum_of_warp(counts[b]);
          if (threadIdx.x % 32 == 0) atomicAdd(chunk_sums + b / kChunk, sum);
        }
      });
      if (threadIdx.x == 0) found.more = 0, found.largest = __ldcg(&head.found.largest);
      __syncthreads();
#pragma unroll 1
      for (int r = threadIdx.x / 32; r < wanted; r += kWarps)
        if (to_do >> r & 1) find_part<kLongFew>(bin_bits, counts, chunk_sums, found, r);
      __syncthreads();
      if (threadIdx.x < 32) {
        choose_tables(found);
        const int t = threadIdx.x;
        if (found.used >> t & 1)
          found.parts[t] = Parts<Word>::template between<T>(bin_bits, found.first[t], found.first[t] + found.last[t]);
      }
      tell_found(head, found, step);
    } else {
      wait_for_found(head, found, step);
    }
    first = false;
    to_do = found.more;
    if (to_do)
#pragma unroll 1
      for (int b = threadIdx.x; b < all_bins; b += kThreads) counts[b] = 0;
    __syncthreads();
  }

  const uint32_t first_end = __ffs(ends) - 1;
  if (threadIdx.x < 32) {
    const int r = threadIdx.x;
    if (r < wanted && (ends >> r & 1)) found.first[r] = found.largest, found.last[r] = 0, found.size[r] = 0;
    __syncwarp();
    choose_lists(found, wanted);
  }
  __syncthreads();
  const Word largest = found.largest;
  // What the step before has read last is still in the L2 cache.
  packs.template visit_slice<true>(a, slice, [&](auto& key, auto& has, auto& at) {
#pragma unroll 1
    for (int r = 0; r < wanted; ++r) {
      const bool is_end = ends >> r & 1;
      if (is_end ? r != first_end || highest != largest : found.table[r] != r) continue;
      uint32_t is_left = keys_between(key, has, found.first[r], found.last[r]);
      if (is_left == 0) continue;
#pragma unroll
      for (int i = 0; i < Packs<T>::kPacks; ++i)
#pragma unroll
        for (int e = 0; e < Packs<T>::kPack; ++e)
          if (at[i] + e >= packs.length) is_left &= ~(1u << (i * Packs<T>::kPack + e));
      if (found.size[r] > kLongFew) {
        atomicAdd(equal_of + r, __popc(is_left));
        continue;
      }
#pragma unroll
      for (int i = 0; i < Packs<T>::kPacks; ++i) {
        uint32_t own = is_left >> (i * Packs<T>::kPack) & ((1u << Packs<T>::kPack) - 1);
        if (is_end && own) atomicMax(&last_of_largest, at[i] + 31 - __clz(static_cast<int>(own)));
        for (; own && !is_end; own &= own - 1)
          a.list(row, r)[atomicAdd(head.listed + r, 1u)] = at[i] + __ffs(static_cast<int>(own)) - 1;
      }
    }
  });
  __syncthreads();
  if (ends && threadIdx.x == 0) atomicMax(&head.last_of_largest, last_of_largest);
  if (threadIdx.x < wanted && found.size[threadIdx.x] > kLongFew)
    a.list(row, threadIdx.x)[slice] = equal_of[threadIdx.x];
  if (!is_last(a, head)) return;

  auto* const key_of = reinterpret_cast<T*>(counts);
  auto* const at_of = reinterpret_cast<uint32_t*>(key_of + kLongFew);
#pragma unroll 1
  for (int r = 0, of_list = -1; r < wanted; ++r) {
    const int table = found.table[r];
    const uint32_t* const list = a.list(row, table);
    const uint32_t size = found.size[r];
    uint32_t left = found.left[r], at = 0;
    if (ends >> r & 1) {
      at = __ldcg(&head.last_of_largest);
    } else if (size <= kLongFew) {
      if (of_list != table) {
        __syncthreads();  // no thread reads the list before any more
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < size; i += kThreads) {
          at_of[i] = __ldcg(list + i);
          key_of[i] = sort_key(x[at_of[i]], a.problem.order);
        }
        sort_in_block(key_of, at_of, size);
        of_list = table;
      }
      at = at_of[left];
    } else {
      // Finds the slice that has the wanted element.
      of_list = -1;
      __syncthreads();
      int64_t slice_of = 0;
#pragma unroll 1
      for (int64_t start = 0; start < a.plan.slices; start += kThreads) {
        const int64_t s = start + threadIdx.x;
        uint32_t total = 0;
        const uint32_t own = s < a.plan.slices ? __ldcg(list + s) : 0, before = sum_before(own, at_of, kWarps, total);
        if (left >= before && left - before < own) counts[0] = static_cast<uint32_t>(s), counts[1] = left - before;
        __syncthreads();
        if (left < total) {
          slice_of = counts[0], left = counts[1];
          break;
        }
        left -= total;
      }
      constexpr int kPack = Packs<T>::kPack;
      const int64_t begin = max(slice_of * a.plan.slice_packs * kPack - packs.past, int64_t{0});
      const int64_t end = min((slice_of + 1) * a.plan.slice_packs * kPack - packs.past, int64_t{packs.length});
      at = find_equal(x, a.problem.order, static_cast<T>(found.first[r]), begin, end, left, sums);
    }
    if (threadIdx.x == 0) {
      const int64_t to = (int64_t{outer} * wanted + r) * inner + column;
      a.values[to] = x[at];
      a.indices[to] = static_cast<int32_t>(at);
    }
  }
}

}  // namespace

cudaError_t launch_select_long(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                               const int32_t* ranks, void* values, int32_t* indices, void* workspace) {
  return dispatch_key(problem.bits, [&](auto width) {
    using T = decltype(width);
    static_assert(sizeof(Head<T>) <= kLongHeadBytes);
    const int64_t rows = problem.rows.count();
    Args<T> a{problem, static_cast<const T*>(x),      ranks, static_cast<T*>(values),
              indices, static_cast<char*>(workspace), plan,  0};
    const auto kernel = select_long_kernel<T>;
    Launch config;
    config.block = dim3(kThreads);
    config.shared_bytes = plan.shared_bytes;
    config.overlap = plan.overlap;
    cudaError_t error = launch(stream, {dim3(static_cast<unsigned>(rows)), dim3(kThreads)}, select_sample_kernel<T>, a);
    if (error != cudaSuccess) return error;
    int64_t together = rows;  // rows of a launch
    if (plan.slices > 1) {
      static Residents residents;
      int fitting = 0;
      error = residents.count(reinterpret_cast<const void*>(kernel), config, &fitting);
      if (error != cudaSuccess) return error;
      // If the device cannot run that many blocks at the same time, a row gets fewer blocks, or rows take turns.
      a.plan.slices = std::min<int64_t>(plan.slices, fitting);
      a.plan.slice_packs = (plan.slice_packs * plan.slices + a.plan.slices - 1) / a.plan.slices;
      together = fitting / a.plan.slices;
      config.together = true;
    }
    for (; a.first_row < rows && error == cudaSuccess; a.first_row += together) {
      config.grid = dim3(static_cast<unsigned>(std::min(together, rows - a.first_row) * a.plan.slices));
      error = launch(stream, config, kernel, a);
    }
    return error;
  });
}

}  // namespace jaxgpuops::count
