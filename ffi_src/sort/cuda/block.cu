// Radix sort of rows that fit into the registers of a block, or of segments of longer rows. All passes, each by a digit
// of eight bits from the lowest up, run in shared memory. A pass in which all elements of the row have the same digit
// is skipped.
//
// Bytes moved: every element is read once, and every result is written once.
#include "sort/cuda/digits.cuh"
#include "sort/cuda/kernels.h"
#include "sort/cuda/raised.cuh"

namespace jaxgpuops::sort {
namespace {

template <class Key, int kThreads, int kItems>
struct BlockShared {
  uint32_t counts[kThreads / 32 * kDigits];
  Word<Key> words[kThreads * kItems];
  uint16_t indices[kThreads * kItems];
  uint32_t warps[kDigits / 32];
};

struct BlockArgs {
  const void* x;
  void* values;
  int32_t* indices;
  const int32_t* carried;  // numbers that are written in place of indices; null: none
  uint32_t length, k;
  SortOrder order;
  bool bytes;  // elements have 8 bits, and are the upper half of a key
  // Of segments; then `length` is that of rows. A block sorts those of more elements than `above` that fit into it.
  const int32_t* offsets;  // ascending
  IndexMap offsets_at;
  uint32_t segments, above;  // segments: of a row
};

// Blocks of a multiprocessor.
constexpr int block_count(int key_bytes, int threads, int items) {
  return key_bytes < 8 && items <= 8 && threads == 256 ? 6 : 1024 / threads;
}

template <class Key, int kThreads, int kItems, bool kSegments>
__global__ void __launch_bounds__(kThreads, block_count(sizeof(Key), kThreads, kItems))
    block_kernel(const __grid_constant__ BlockArgs a) {
  static_assert(kThreads >= kDigits);
  auto& shared = *reinterpret_cast<BlockShared<Key, kThreads, kItems>*>(dynamic_shared_memory());
  __shared__ volatile Digits digits;
  const bool bytes = sizeof(Key) == 2 && a.bytes;
  int64_t row = int64_t{blockIdx.x} * a.length;
  uint32_t length = a.length, begin = 0;
  if constexpr (kSegments) {
    const uint32_t outer = blockIdx.x / a.segments, number = blockIdx.x - outer * a.segments;
    const int32_t* const offsets = a.offsets + a.offsets_at(outer) + number;
    const auto place = [&](int32_t offset) {
      return static_cast<uint32_t>(min(max(offset, 0), static_cast<int32_t>(a.length)));
    };
    begin = place(offsets[0]);
    length = place(offsets[1]) - begin;
    if (length <= a.above || length > kThreads * kItems) return;
    row = int64_t{outer} * a.length + begin;
  }
  const uint32_t warp = threadIdx.x / 32, first = warp * 32 * kItems + threadIdx.x % 32;
  const auto is_there = [&](int i) { return first + i * 32 < length; };
  Word<Key> words[kItems];
  Key some;
  if (bytes) {
    const auto* const from = static_cast<const uint8_t*>(a.x) + row;
    some = static_cast<Key>(from[0] << 8);
    const auto* const own = from + first;
#pragma unroll
    for (int i = 0; i < kItems; ++i) words[i] = is_there(i) ? own[i * 32] << 8 : 0;
  } else {
    const Key* const from = static_cast<const Key*>(a.x) + row;
    some = from[0];
    const Key* const own = from + first;
#pragma unroll
    for (int i = 0; i < kItems; ++i) words[i] = is_there(i) ? own[i * 32] : Key{0};
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) words[i] = word_of(static_cast<Key>(words[i]), a.order);
  const auto key = [&](Word<Key> word) {
    return sizeof(Key) == 2 ? static_cast<Key>(word >> 16) : sort_key(static_cast<Key>(word), a.order);
  };
  const Key first_key = key(word_of(some, a.order));
  Key differ = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i)
    if (is_there(i)) differ |= static_cast<Key>(key(words[i]) ^ first_key);
  differ = fold_lanes(differ, [](Key a, Key b) { return static_cast<Key>(a | b); });
  if (threadIdx.x % 32 == 0) shared.counts[warp] = static_cast<uint32_t>(differ);
  if (sizeof(Key) == 8 && threadIdx.x % 32 == 0)
    shared.counts[kThreads / 32 + warp] = static_cast<uint32_t>(static_cast<uint64_t>(differ) >> 32);
  __syncthreads();
  differ = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    uint64_t word = shared.counts[w];
    if (sizeof(Key) == 8) word |= static_cast<uint64_t>(shared.counts[kThreads / 32 + w]) << 32;
    differ |= static_cast<Key>(word);
  }
  const bool live = first - threadIdx.x % 32 < length;
  bool moved = false;
#pragma unroll 1
  for (int pass = bytes; pass < static_cast<int>(sizeof(Key)); ++pass) {
    if ((differ >> (pass * kDigitBits) & (kDigits - 1)) == 0) continue;
    const uint32_t turn = turn_of<Key>(pass, a.order);
    const Word<Key> last = last_word<Key>(pass, a.order);
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (!is_there(i)) words[i] = last;
    __syncthreads();
    clear_counts(shared.counts);
    set_digits<Key>(digits, pass, a.order);
    Indices<kItems> indices;
    if (a.indices) indices.read(shared.indices, first, moved);
    __syncthreads();
    place_by_digit<kThreads, kItems>(
        shared.counts, shared.warps, digits, turn, live,
        [&](int i, const Digits& digits) { return digit_of<Key>(words[i], digits); }, [](uint32_t) {},
        [&](int i, uint32_t place) {
          shared.words[place] = words[i];
          if (a.indices) shared.indices[place] = indices[i];
        });
    moved = true;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) words[i] = (shared.words + first)[i * 32];
  }
  const int64_t to = (kSegments ? row : int64_t{blockIdx.x} * a.k) + first;
  const auto is_wanted = [&](int i) { return first + i * 32 < (kSegments ? length : a.k); };
  if (a.values && bytes) {
    auto* const values = static_cast<uint8_t*>(a.values) + to;
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (is_wanted(i)) values[i * 32] = static_cast<uint8_t>(words[i] >> 8);
  } else if (a.values) {
    Key* const values = static_cast<Key*>(a.values) + to;
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (is_wanted(i)) values[i * 32] = static_cast<Key>(words[i]);
  }
  if (a.indices) {
    int32_t* const indices = a.indices + to;
    const uint16_t* const own = shared.indices + first;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!is_wanted(i)) continue;
      const uint32_t from = moved ? own[i * 32] : first + i * 32;
      indices[i * 32] = a.carried ? a.carried[row + from] : static_cast<int32_t>(begin + from);
    }
  }
}

BlockArgs args_of(const Problem& problem, const Buffers& buffers) {
  const bool bytes = problem.key_bits == 8;
  return {buffers.x,
          buffers.values,
          buffers.indices,
          buffers.carried,
          static_cast<uint32_t>(problem.rows.length),
          static_cast<uint32_t>(problem.k),
          bytes ? raised(problem.order, 8) : problem.order,
          bytes};
}

template <class Key, int kThreads, int kItems>
cudaError_t run(cudaStream_t stream, const Problem& problem, const Buffers& buffers) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(problem.rows.count()));
  config.block = dim3(kThreads);
  static_assert(sizeof(BlockShared<Key, kThreads, kItems>) <= block_shared_bytes(sizeof(Key), kThreads, kItems));
  config.shared_bytes = block_shared_bytes(sizeof(Key), kThreads, kItems);
  return launch(stream, config, block_kernel<Key, kThreads, kItems, false>, args_of(problem, buffers));
}

template <class Key, int kThreads, int kItems>
cudaError_t run_segments(cudaStream_t stream, const Problem& problem, const Buffers& buffers, int64_t above) {
  BlockArgs a = args_of(problem, buffers);
  a.offsets = buffers.offsets;
  a.offsets_at = problem.offsets_at.outer;
  a.segments = static_cast<uint32_t>(problem.offsets - 1);
  a.above = static_cast<uint32_t>(above);
  Launch config;
  config.grid = dim3(static_cast<unsigned>(problem.rows.count() * (problem.offsets - 1)));
  config.block = dim3(kThreads);
  config.shared_bytes = block_shared_bytes(sizeof(Key), kThreads, kItems);
  return launch(stream, config, block_kernel<Key, kThreads, kItems, true>, a);
}

}  // namespace

cudaError_t launch_block(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const auto sort = [&](auto key) {
    using Key = decltype(key);
    constexpr int kItems = sizeof(Key) == 8 ? 8 : 16;
    if constexpr (sizeof(Key) < 8) {
      if (plan.items == 6) return run<Key, 256, 6>(stream, problem, buffers);
      if (plan.items == 8)
        return plan.threads == 256 ? run<Key, 256, 8>(stream, problem, buffers)
                                   : run<Key, 512, 8>(stream, problem, buffers);
    }
    switch (plan.threads) {
      case 256: return run<Key, 256, kItems>(stream, problem, buffers);
      case 512: return run<Key, 512, kItems>(stream, problem, buffers);
      case 1024: return run<Key, 1024, kItems>(stream, problem, buffers);
    }
    return cudaErrorInvalidValue;
  };
  switch (problem.key_bits) {
    case 32: return sort(uint32_t{});
    case 64: return sort(uint64_t{});
  }
  return sort(uint16_t{});
}

cudaError_t launch_block_segments(cudaStream_t stream, const Plan& plan, const Problem& problem,
                                  const Buffers& buffers) {
  const auto sort = [&](auto key) {
    using Key = decltype(key);
    constexpr int kThreads = sizeof(Key) == 8 ? 512 : 256, kItems = sizeof(Key) == 8 ? 8 : 16;
    static_assert(kThreads * kItems == kBlockSegments);
    const cudaError_t error = run_segments<Key, kThreads, kItems>(stream, problem, buffers, 0);
    if (error != cudaSuccess || plan.in_blocks == kBlockSegments) return error;
    return run_segments<Key, 2 * kThreads, kItems>(stream, problem, buffers, kBlockSegments);
  };
  switch (problem.key_bits) {
    case 32: return sort(uint32_t{});
    case 64: return sort(uint64_t{});
  }
  return sort(uint16_t{});
}

}  // namespace jaxgpuops::sort
