// Radix sort of the segments of rows that fit into the registers of a block. The row is sorted as a whole, by digits of
// eight bits from the lowest up: first by those of the keys, then by one or two of the numbers of segments. So it does
// not matter how long segments are. Numbers are counted from bits at the places where segments begin. A pass in which
// all elements have the same digit is skipped.
//
// What is sorted are keys and indices; in the end, results are read from the row by the sorted indices. So elements of
// up to 32 bits have one kernel.
//
// Bytes moved: every element is read twice, the second time from the caches; offsets are read once a row, and every
// result is written once.
#include "sort/cuda/digits.cuh"
#include "sort/cuda/kernels.h"
#include "sort/cuda/offsets.cuh"
#include "sort/cuda/raised.cuh"

namespace jaxgpuops::sort {
namespace {

constexpr uint32_t kWords = 512;  // words that have a bit for each place of the longest row

struct SegmentsArgs {
  const void* x;
  void* values;      // null: not wanted
  int32_t* indices;  // null: not wanted
  const int32_t* offsets;
  IndexMap offsets_at;
  int64_t count;  // of offsets
  uint32_t length;
  int bytes;  // of an element
  SortOrder order;
};

template <class Key, int kThreads, int kItems>
struct SegmentsShared {
  uint32_t counts[kThreads / 32 * kDigits];
  uint32_t begins[kWords], before[kWords];  // see Numbers
  Key keys[kThreads * kItems];
  uint16_t indices[kThreads * kItems];
  uint32_t warps[kDigits / 32], of_warps[kThreads / 32];
  Key any, all;  // bits that any key has, and that all have
};

// Folds a key of each thread into one in shared memory.
template <class Key, class Atomic, class Fold>
__device__ __forceinline__ void fold_words(Key* to, Key key, Atomic atomic, Fold fold) {
  key = fold_lanes(key, fold);
  if (threadIdx.x % 32 != 0) return;
  auto* const words = reinterpret_cast<uint32_t*>(to);
  atomic(words, static_cast<uint32_t>(key));
  if constexpr (sizeof(Key) == 8) atomic(words + 1, static_cast<uint32_t>(key >> 32));
}

// The numbers of the segments of a row, by bits at the places where they begin.
struct Numbers {
  uint32_t *begins, *before;  // words of 32 places; how many bits words before have
  uint32_t first, end;        // the places between which the segments are

  __device__ uint32_t of(uint32_t place) const {
    return before[place / 32] + __popc(begins[place / 32] & ((2u << place % 32) - 1));
  }
};

// Finds the segments of a row. All threads of the block call it.
template <int kThreads, class Shared>
__device__ __forceinline__ Numbers find_segments(const SegmentsArgs& a, Shared& shared) {
  const uint32_t thread = threadIdx.x;
  for (uint32_t w = thread; w < kWords; w += kThreads) shared.begins[w] = 0;
  const auto mark = [&](uint32_t place) {
    if (place < a.length) atomicOr(shared.begins + place / 32, 1u << place % 32);
  };
  const int32_t* const offsets = a.offsets + a.offsets_at(blockIdx.x);
  const Range range = mark_offsets<kThreads>(offsets, a.count, a.length, shared.of_warps, mark);
  __syncthreads();
  const uint32_t pair = 2 * thread;
  const bool has = pair < kWords;
  const uint32_t own = has ? __popc(shared.begins[pair]) : 0, next = has ? __popc(shared.begins[pair + 1]) : 0;
  const uint32_t sum = sum_before(own + next, shared.warps);
  if (has) shared.before[pair] = sum, shared.before[pair + 1] = sum + own;
  __syncthreads();
  return {shared.begins, shared.before, range.begin, range.end};
}

template <class Key, int kThreads, int kItems>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) segments_kernel(const __grid_constant__ SegmentsArgs a) {
  static_assert(kThreads >= kDigits && kThreads * kItems <= 32 * kWords);
  auto& shared = *reinterpret_cast<SegmentsShared<Key, kThreads, kItems>*>(dynamic_shared_memory());
  __shared__ volatile Digits digits;                // place_by_digit() reads it, but digits are bytes of keys here
  constexpr Key kLast = static_cast<Key>(~Key{0});  // for slots past the end of the row, in every pass
  const int64_t row = int64_t{blockIdx.x} * a.length;
  const uint32_t first = threadIdx.x / 32 * 32 * kItems + threadIdx.x % 32;
  const bool live = first - threadIdx.x % 32 < a.length;
  const auto is_there = [&](int i) { return first + i * 32 < a.length; };
  constexpr int kBytes = sizeof(Key);
  // Loops over places that are not unrolled keep the kernel small.
  Key any = 0, all = kLast;
  dispatch_bytes<Key>(a.bytes, [&](auto type) {
    using Bits = decltype(type);
    const Bits* const from = static_cast<const Bits*>(a.x) + row;
#pragma unroll 2
    for (uint32_t place = threadIdx.x; place < a.length; place += kThreads) {
      const Key key = raised_key(Key{from[place]} << 8 * (sizeof(Key) - sizeof(Bits)), a.order);
      shared.keys[place] = key;
      any |= key;
      all &= key;
    }
  });
  if (threadIdx.x == 0) shared.any = 0, shared.all = kLast;
  const Numbers numbers = find_segments<kThreads>(a, shared);
  const auto with_any = [](uint32_t* to, uint32_t word) { atomicOr(to, word); };
  const auto with_all = [](uint32_t* to, uint32_t word) { atomicAnd(to, word); };
  fold_words(&shared.any, any, with_any, [](Key x, Key y) { return x | y; });
  fold_words(&shared.all, all, with_all, [](Key x, Key y) { return x & y; });
  __syncthreads();
  const Key differ = shared.any ^ shared.all;
  Key keys[kItems];
  const auto read = [&] {
#pragma unroll
    for (int i = 0; i < kItems; ++i) keys[i] = is_there(i) ? (shared.keys + first)[i * 32] : kLast;
  };
  read();
  const uint32_t last = numbers.of(a.length - 1);

  bool moved = false;
#pragma unroll 1
  for (int pass = kBytes - a.bytes; pass < kBytes + 2; ++pass) {
    const int shift = pass % kBytes * kDigitBits;
    if (pass == kBytes) {
      if (!moved) break;  // all keys are equal, so that segments are in order
      __syncthreads();    // all threads have read the keys
#pragma unroll 1
      for (uint32_t place = threadIdx.x; place < a.length; place += kThreads)
        shared.keys[place] = static_cast<Key>(numbers.of(shared.indices[place]));
      __syncthreads();
      read();
    }
    if ((pass < kBytes ? differ >> shift & (kDigits - 1) : last >> shift) == 0) continue;
    __syncthreads();
    clear_counts(shared.counts);
    Indices<kItems> indices;
    indices.read(shared.indices, first, moved);
    __syncthreads();
    place_by_digit<kThreads, kItems>(
        shared.counts, shared.warps, digits, 0, live,
        [&](int i, const Digits&) { return static_cast<uint32_t>(keys[i] >> shift) & (kDigits - 1); }, [](uint32_t) {},
        [&](int i, uint32_t place) {
          shared.keys[place] = keys[i];
          shared.indices[place] = indices[i];
        });
    moved = true;
    __syncthreads();
    read();
  }

  const auto index_at = [&](uint32_t place) {
    const bool inside = place - numbers.first < numbers.end - numbers.first;
    return moved && inside ? uint32_t{shared.indices[place]} : place;
  };
  const uint32_t end = min(first + 32 * kItems, a.length);
  if (a.indices) {
#pragma unroll 2
    for (uint32_t place = first; place < end; place += 32)
      a.indices[row + place] = static_cast<int32_t>(index_at(place));
  }
  if (!a.values) return;
  dispatch_bytes<Key>(a.bytes, [&](auto type) {
    using Bits = decltype(type);
    const Bits* const from = static_cast<const Bits*>(a.x) + row;
    Bits* const to = static_cast<Bits*>(a.values) + row;
#pragma unroll 2
    for (uint32_t place = first; place < end; place += 32) to[place] = from[index_at(place)];
  });
}

template <class Key, int kThreads, int kItems>
cudaError_t run(cudaStream_t stream, const Problem& problem, const SegmentsArgs& a) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(problem.rows.count()));
  config.block = dim3(kThreads);
  static_assert(sizeof(SegmentsShared<Key, kThreads, kItems>) <= segments_shared_bytes(sizeof(Key), kThreads, kItems));
  config.shared_bytes = segments_shared_bytes(sizeof(Key), kThreads, kItems);
  return launch(stream, config, segments_kernel<Key, kThreads, kItems>, a);
}

}  // namespace

cudaError_t launch_segments(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  SegmentsArgs a = {buffers.x, buffers.values, buffers.indices, buffers.offsets};
  a.offsets_at = problem.offsets_at.outer;
  a.count = problem.offsets;
  a.length = static_cast<uint32_t>(problem.rows.length);
  a.bytes = problem.key_bits / 8;
  a.order = raised(problem.order, a.bytes == 8 ? 0 : 32 - problem.key_bits);
  if (plan.threads == 256)
    return a.bytes == 8 ? run<uint64_t, 256, 4>(stream, problem, a) : run<uint32_t, 256, 4>(stream, problem, a);
  if (plan.threads == 512 && a.bytes < 8) return run<uint32_t, 512, 8>(stream, problem, a);
  return a.bytes == 8 ? run<uint64_t, 1024, 8>(stream, problem, a) : run<uint32_t, 1024, 16>(stream, problem, a);
}

}  // namespace jaxgpuops::sort
