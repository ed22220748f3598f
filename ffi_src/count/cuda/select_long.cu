// select for rows that are too long for one block: one launch for each step of select.cuh. Each block has a slice of a
// row, counts its keys in tables in shared memory, and adds these to the row's tables in the workspace; the last block
// to finish finds the next intervals. Launches after the last step that a row needs do nothing. In the end few
// elements, or only equal ones, are left for each rank. If few are left, the blocks list them, and the last block
// compares them with each other. If only equal ones are left, each block counts those of its slice, and the last block
// finds the wanted one in the slice that has it.
//
// Each step reads the row once, and so do the lists. Most often there are two steps.
#include <cuda_runtime.h>

#include "common/cuda/launch.cuh"
#include "count/cuda/select.cuh"

namespace jaxgpuops::count {
namespace {

constexpr int kThreads = kLongThreads, kWarps = kThreads / 32, kBins = kLongBins;
constexpr int kLaneSample = 8;  // elements of the row's sample that a lane takes

// What stands first in a row's workspace.
template <class T>
struct Head {
  Found<T> found;
  uint32_t to_do;     // a bit for each rank that needs another step; and kLargest
  uint32_t finished;  // how many blocks have finished the step
  uint32_t listed[kMostRanks];
  uint32_t last_of_largest;  // the last index of a largest key
};
constexpr uint32_t kLargest = 1u << 31;  // the first step finds the largest key

template <class T>
struct Args {
  Select problem;
  const T* x;
  const int32_t* ranks;
  T* values;
  int32_t* indices;
  char* workspace;
  SelectPlan plan;

  __device__ char* own(int64_t row) const { return workspace + row * plan.row_bytes; }
  __device__ Head<T>& head(int64_t row) const { return *reinterpret_cast<Head<T>*>(own(row)); }
  __device__ uint32_t* tables(int64_t row) const { return reinterpret_cast<uint32_t*>(own(row) + plan.table_at); }
  // The list of a rank: the indices of the elements that are left, or how many equal elements each slice has.
  __device__ uint32_t* list(int64_t row, int r) const {
    return reinterpret_cast<uint32_t*>(own(row) + plan.list_at) + r * plan.list_size;
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

// Copies what the step before has found to shared memory. Loads go past the L1 cache: a kernel that starts before that
// step ends may have old words there.
template <class T>
__device__ __forceinline__ void load_found(Found<T>& to, const Found<T>& from) {
  for (uint32_t w = threadIdx.x; w < sizeof(to) / 4; w += kThreads)
    reinterpret_cast<uint32_t*>(&to)[w] = __ldcg(reinterpret_cast<const uint32_t*>(&from) + w);
  __syncthreads();
}

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

template <class T>
__global__ void __launch_bounds__(kThreads) select_begin_kernel(const __grid_constant__ Args<T> a) {
  __shared__ uint32_t sample[32 * kLaneSample];
  const int64_t row = blockIdx.x, inner = a.problem.rows.inner;
  const auto wanted = static_cast<int>(a.problem.count);
  const auto length = static_cast<uint32_t>(a.problem.rows.length);
  Head<T>& head = a.head(row);
  let_dependents_start();
  if (threadIdx.x < wanted) head.listed[threadIdx.x] = 0;
  if (threadIdx.x == 0) head.finished = head.last_of_largest = 0;
  uint32_t* const tables = a.tables(row);
  for (int b = threadIdx.x; b < wanted * kBins; b += kThreads) tables[b] = 0;
  if (threadIdx.x >= 32) return;
  set_first_tables<kBins, kLaneSample>(a.problem, a.x + row * length, length, a.ranks, row / inner, row % inner, sample,
                                       head.found);
  if (threadIdx.x == 0) {
    const uint32_t ends = head.found.ends;
    head.to_do = (((1u << wanted) - 1) & ~ends) | (ends ? kLargest : 0);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) select_step_kernel(const __grid_constant__ Args<T> a) {
  using Word = typename Found<T>::Word;
  auto* const counts = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  const int64_t row = blockIdx.x / a.plan.slices, slice = blockIdx.x % a.plan.slices;
  const auto wanted = static_cast<int>(a.problem.count);
  const Packs<T> packs(a.x + row * a.problem.rows.length, a.problem.rows.length);
  Head<T>& head = a.head(row);
  __shared__ Found<T> found;
  for (int b = threadIdx.x; b < wanted * kBins; b += kThreads) counts[b] = 0;
  wait_for_predecessor();
  let_dependents_start();
  const uint32_t to_do = __ldcg(&head.to_do);
  if (to_do == 0) return;
  load_found(found, head.found);
  const uint32_t used = found.used;
  if (slice == 0 && threadIdx.x < 32 && (used >> threadIdx.x & 1)) {
    const Word key = sort_key(packs.x[0], a.problem.order);
    atomicAdd(counts + threadIdx.x * kBins + part_of(found, threadIdx.x, key), 0u - packs.copies());
  }
  Word highest = 0;
  packs.template visit_slice<false>(a, slice, [&](auto& key, auto& has, auto&) {
    if (to_do & kLargest) {
#pragma unroll
      for (int i = 0; i < Packs<T>::kPacks; ++i) {
        if (!has[i]) continue;
#pragma unroll
        for (int e = 0; e < Packs<T>::kPack; ++e) highest = max(highest, key[i][e]);
      }
    }
    for_bits(used, [&](int t) { count_keys<kBins>(counts, found, t, key, has); });
  });
  if (to_do & kLargest) {
    highest = largest_of_lanes(highest);
    if (threadIdx.x % 32 == 0) atomicMax(&found.largest, highest);
  }
  __syncthreads();
  uint32_t* const tables = a.tables(row);
  for_bits(used, [&](int t) {
    for (int b = t * kBins + threadIdx.x; b < (t + 1) * kBins; b += kThreads)
      if (counts[b]) atomicAdd(tables + b, counts[b]);
  });
  if (threadIdx.x == 0 && (to_do & kLargest)) atomicMax(&head.found.largest, found.largest);
  if (!is_last(a, head)) return;

  for_bits(used, [&](int t) {
#pragma unroll 8
    for (int b = t * kBins + threadIdx.x; b < (t + 1) * kBins; b += kThreads) counts[b] = __ldcg(tables + b);
    for (int b = t * kBins + threadIdx.x; b < (t + 1) * kBins; b += kThreads) tables[b] = 0;
  });
  __syncthreads();
  for (int r = threadIdx.x / 32; r < wanted; r += kWarps)
    if (to_do >> r & 1) find_part<kBins, kLongFew>(counts, found, r);
  __syncthreads();
  if (threadIdx.x < 32) {
    choose_tables(found);
    const int t = threadIdx.x;
    if (found.used >> t & 1) set_table<kBins>(found, t, found.first[t], found.first[t] + found.last[t]);
    __syncwarp();
    if (t == 0) head.to_do = found.more, found.more = 0, found.largest = __ldcg(&head.found.largest);
  }
  __syncthreads();
  for (uint32_t w = threadIdx.x; w < sizeof(found) / 4; w += kThreads)
    reinterpret_cast<uint32_t*>(&head.found)[w] = reinterpret_cast<const uint32_t*>(&found)[w];
}

// Sorts upwards the first `size` keys with their indices; the whole block calls this. The arrays have room for the next
// power of two.
template <class T>
__device__ __forceinline__ void sort_in_block(T* keys, uint32_t* indices, uint32_t size) {
  uint32_t all = 1;
  while (all < size) all *= 2;
  for (uint32_t i = size + threadIdx.x; i < all; i += kThreads) keys[i] = static_cast<T>(~T{0}), indices[i] = ~0u;
  __syncthreads();
  for (uint32_t run = 2; run <= all; run *= 2) {
    for (uint32_t step = run / 2; step > 0; step /= 2) {
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

template <class T>
__global__ void __launch_bounds__(kThreads) select_end_kernel(const __grid_constant__ Args<T> a) {
  __shared__ uint32_t equal_of[kMostRanks], at_of[kLongFew];
  __shared__ T key_of[kLongFew];
  const int64_t row = blockIdx.x / a.plan.slices, slice = blockIdx.x % a.plan.slices, inner = a.problem.rows.inner;
  const auto wanted = static_cast<int>(a.problem.count);
  const Packs<T> packs(a.x + row * a.problem.rows.length, a.problem.rows.length);
  const T* const x = packs.x;
  Head<T>& head = a.head(row);
  __shared__ Found<T> found;
  __shared__ uint32_t last_of_largest;
  if (threadIdx.x < kMostRanks) equal_of[threadIdx.x] = 0;
  if (threadIdx.x == 0) last_of_largest = 0;
  wait_for_predecessor();
  load_found(found, head.found);
  const uint32_t ends = found.ends, first_end = __ffs(ends) - 1;
  if (threadIdx.x < wanted && (ends >> threadIdx.x & 1))
    found.first[threadIdx.x] = found.largest, found.last[threadIdx.x] = 0, found.size[threadIdx.x] = 0;
  __syncthreads();
  // What the step before has read last is still in the L2 cache.
  packs.template visit_slice<true>(a, slice, [&](auto& key, auto& has, auto& at) {
    for (int r = 0; r < wanted; ++r) {
      const bool is_end = ends >> r & 1;
      if (is_end && r != first_end) continue;
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

  const auto write = [&](int r, uint32_t at) {
    const int64_t to = (row / inner * wanted + r) * inner + row % inner;
    a.values[to] = x[at];
    a.indices[to] = static_cast<int32_t>(at);
  };
  for (int r = 0; r < wanted; ++r) {
    if (ends >> r & 1) {
      if (threadIdx.x == 0) write(r, __ldcg(&head.last_of_largest));
      continue;
    }
    const uint32_t* const list = a.list(row, r);
    const uint32_t size = found.size[r];
    uint32_t left = found.left[r];
    __syncthreads();  // no thread reads the shared arrays of the rank before any more
    if (size <= kLongFew) {
      for (uint32_t i = threadIdx.x; i < size; i += kThreads) {
        at_of[i] = __ldcg(list + i);
        key_of[i] = sort_key(x[at_of[i]], a.problem.order);
      }
      sort_in_block(key_of, at_of, size);
      if (threadIdx.x == 0) write(r, at_of[left]);
      continue;
    }
    // Finds the slice that has the wanted element; all threads do the same.
    int64_t of = 0;
    for (; of + 1 < a.plan.slices; ++of) {
      const uint32_t own = __ldcg(list + of);
      if (left < own) break;
      left -= own;
    }
    constexpr int kPack = Packs<T>::kPack;
    const int64_t begin = max(of * a.plan.slice_packs * kPack - packs.past, int64_t{0});
    const int64_t end = min((of + 1) * a.plan.slice_packs * kPack - packs.past, int64_t{packs.length});
    const auto first = static_cast<T>(found.first[r]);
    for (int64_t start = begin; start < end; start += kThreads) {
      const int64_t at = start + threadIdx.x;
      const bool is_equal = at < end && sort_key(x[at], a.problem.order) == first;
      uint32_t total = 0;
      const uint32_t before = sum_before(static_cast<uint32_t>(is_equal), at_of, kWarps, total);
      if (is_equal && before == left) write(r, static_cast<uint32_t>(at));
      if (left < total) break;
      left -= total;
    }
  }
}

}  // namespace

cudaError_t launch_select_long(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                               const int32_t* ranks, void* values, int32_t* indices, void* workspace) {
  return dispatch_key(problem.bits, [&](auto width) {
    using T = decltype(width);
    static_assert(sizeof(Head<T>) <= kLongHeadBytes);
    const Args<T> args{problem, static_cast<const T*>(x),      ranks, static_cast<T*>(values),
                       indices, static_cast<char*>(workspace), plan};
    const int64_t rows = problem.rows.count();
    Launch config;
    config.block = dim3(kThreads);
    config.grid = dim3(static_cast<unsigned>(rows));
    cudaError_t error = launch(stream, config, select_begin_kernel<T>, args);
    config.grid = dim3(static_cast<unsigned>(rows * plan.slices));
    config.overlap = plan.overlap;
    config.shared_bytes = plan.shared_bytes;
    for (int step = 0; step < plan.steps && error == cudaSuccess; ++step)
      error = launch(stream, config, select_step_kernel<T>, args);
    config.shared_bytes = 0;
    return error == cudaSuccess ? launch(stream, config, select_end_kernel<T>, args) : error;
  });
}

}  // namespace jaxgpuops::count
