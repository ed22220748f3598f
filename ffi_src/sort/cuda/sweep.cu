// Radix sort of rows of any length, by a digit of eight bits at a time from the lowest up. A first kernel counts all
// digits; then one pass over the row sorts it by each digit. A pass in which all elements of a row have the same digit
// is skipped, which the first kernel decides.
//
// In a pass a block takes a tile of a row, sorts it by the digit in shared memory, and writes each group of equal
// digits to where it belongs. It learns these positions by decoupled look-back: each tile publishes its digit counts as
// soon as it has them, and soon after their sums over all tiles before it. The first pass makes the indices. The last
// pass does not write keys that are not wanted.
//
// Bytes moved: the keys are read once for counting; each pass reads and writes keys and indices once. The algorithm is
// that of Adinets and Merrill, "Onesweep" (2022).
#include "sort/cuda/digits.cuh"
#include "sort/cuda/kernels.h"

namespace jaxgpuops::sort {
namespace {

// ---- Counts ---------------------------------------------------------------------------------------------------------

constexpr int kCountThreads = 512;

struct CountArgs {
  const void* x;
  RowHead* heads;
  uint32_t* counts;  // [row][pass][digit]: how many elements have this digit; after counting: how many have a lower one
  uint32_t* status;  // the status words of pass_kernel, which count_kernel sets to zero
  int64_t rows, length, tiles;
  int64_t elements;  // elements that a block counts
  SortOrder order;
};

template <class Key>
__global__ void __launch_bounds__(kCountThreads) count_kernel(const __grid_constant__ CountArgs a) {
  constexpr int kPasses = sizeof(Key);
  __shared__ uint32_t counts[kPasses * kDigits], warps[kDigits / 32], active;
  __shared__ bool last;
  const int64_t blocks = (a.length + a.elements - 1) / a.elements;
  const int64_t row = blockIdx.x / blocks, block = blockIdx.x % blocks;
  for (int c = threadIdx.x; c < kPasses * kDigits; c += kCountThreads) counts[c] = 0;
  let_dependents_start();
  __syncthreads();

  const Key* const x = static_cast<const Key*>(a.x) + row * a.length;
  const int64_t begin = block * a.elements, end = min(begin + a.elements, a.length);
  const auto count = [&](Key bits) {
    const Key key = sort_key(bits, a.order);
#pragma unroll
    for (int p = 0; p < kPasses; ++p) atomicAdd(counts + p * kDigits + digit_of(key, p * kDigitBits), 1u);
  };
  constexpr int kUnroll = 8;
  int64_t at = begin + threadIdx.x;
  for (; at + (kUnroll - 1) * kCountThreads < end; at += kUnroll * kCountThreads) {
    Key bits[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) bits[u] = x[at + u * kCountThreads];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) count(bits[u]);
  }
  for (; at < end; at += kCountThreads) count(x[at]);

  // Sets this block's share of the status words, by which tiles communicate later, to zero.
  const int64_t words = a.tiles * kPasses * kDigits, share = (words + blocks - 1) / blocks;
  uint32_t* const status = a.status + row * words;
  for (int64_t w = block * share + threadIdx.x; w < min((block + 1) * share, words); w += kCountThreads) status[w] = 0;
  __syncthreads();

  uint32_t* const all = a.counts + row * kPasses * kDigits;
  if (blocks > 1) {
    for (int c = threadIdx.x; c < kPasses * kDigits; c += kCountThreads)
      if (counts[c]) atomicAdd(all + c, counts[c]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&a.heads[row].counted, 1u) == blocks - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int c = threadIdx.x; c < kPasses * kDigits; c += kCountThreads) counts[c] = __ldcg(all + c);
  }
  if (threadIdx.x == 0) active = 0;
  __syncthreads();
#pragma unroll 1
  for (int p = 0; p < kPasses; ++p) {
    const uint32_t own = threadIdx.x < kDigits ? counts[p * kDigits + threadIdx.x] : 0;
    const uint32_t less = sum_before(own, warps);
    if (own != 0 && own != a.length) atomicOr(&active, 1u << p);
    if (threadIdx.x < kDigits) all[p * kDigits + threadIdx.x] = less;
    __syncthreads();
  }
  // At least one pass must run, since it copies the elements to the results.
  if (threadIdx.x == 0) a.heads[row].active = active ? active : 1;
}

// ---- Passes ---------------------------------------------------------------------------------------------------------

// A status word says what a tile has published about a digit: 0 means nothing yet; with the bit kSum it is the count of
// this tile and all before it; else it is the tile's own count plus 1.
constexpr uint32_t kSum = 1u << 31;
constexpr int kLook = 4, kSmallLook = 8;  // status words that a thread loads at once

__device__ __forceinline__ void tell(uint32_t* to, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
__device__ __forceinline__ uint32_t ask(const uint32_t* from) {
  uint32_t word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}

struct PassArgs {
  const void* x;
  void* keys[2];          // buffers: all passes but the last write to the two in turn
  int32_t* indices[2];    // buffers of indices, used in turn like those of keys
  void* values;           // where the last pass writes the sorted elements; null: not wanted
  int32_t* last_indices;  // where the last pass writes the indices
  int64_t k;              // the last pass writes only the first k of each row
  RowHead* heads;
  const uint32_t* counts;
  uint32_t* status;
  int64_t rows, length, tiles;
  int pass;
  bool tickets;  // whether there may be more blocks than run at the same time
  SortOrder order;
};

template <class Key, int kItems>
struct PassShared {
  static constexpr int kTile = kSweepThreads * kItems;
  uint32_t counts[kSweepThreads / 32 * kDigits];
  Key keys[kTile];
  int32_t indices[kTile];  // must be the last member: calls without indices allocate shared memory only up to here
};

template <class Key, bool kIndices, int kItems>
__global__ void __launch_bounds__(kSweepThreads, kSweepBlocks) pass_kernel(const __grid_constant__ PassArgs a) {
  constexpr int kPasses = sizeof(Key), kTile = kSweepThreads * kItems;
  constexpr bool kSmall = kItems == sweep_items(sizeof(Key), true);
  auto& shared = *reinterpret_cast<PassShared<Key, kItems>*>(dynamic_shared_memory());
  __shared__ uint32_t warps[kDigits / 32], ticket;
  // For each digit: the position of its elements in the row minus that in the tile.
  __shared__ int32_t shift_of[kDigits];
  if (a.tickets || a.pass == 0) wait_for_predecessor();
  if (a.tickets) {
    if (threadIdx.x == 0) ticket = atomicAdd(&a.heads->tickets[a.pass], 1u);
    __syncthreads();
  }
  // consecutive blocks take tiles of different rows, which gives earlier tiles time to publish
  const auto rows = static_cast<uint32_t>(a.rows);
  const uint32_t number = a.tickets ? ticket : blockIdx.x, tile = number / rows, row = number - tile * rows;
  // The pass before has waited for the kernel that counts before it let this one start.
  const uint32_t active = __ldcg(&a.heads[row].active), this_pass = 1u << a.pass;
  wait_for_predecessor();
  let_dependents_start();
  if (!(active & this_pass)) return;
  const bool is_first = !(active & (this_pass - 1)), is_last = active < 2 * this_pass;
  const int to = __popc(active >> a.pass) % 2 == 1 ? 0 : 1;  // 0 for the last pass, whose buffers may be the results
  const Key* const from_keys =
      (is_first ? static_cast<const Key*>(a.x) : static_cast<const Key*>(a.keys[1 - to])) + row * a.length;
  const int32_t* const from_indices = kIndices ? a.indices[1 - to] + row * a.length : nullptr;

  const int64_t begin = int64_t{tile} * kTile;
  const auto there = static_cast<uint32_t>(min(int64_t{kTile}, a.length - begin));
  const uint32_t warp = threadIdx.x / 32, first = warp * 32 * kItems + threadIdx.x % 32;
  const int shift = a.pass * kDigitBits;
  Key bits[kItems];
  int32_t index[kItems];
  uint32_t digit[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) bits[i] = first + i * 32 < there ? from_keys[begin + first + i * 32] : Key{0};
#pragma unroll
  for (int i = 0; i < kItems; ++i)
    digit[i] = digit_of(sort_key(bits[i], a.order), shift) | (first + i * 32 < there ? 0 : kDigits - 1);
  uint32_t* const counts = shared.counts + warp * kDigits;
  rank_in_warp(digit, counts);
  if constexpr (kIndices) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      index[i] = static_cast<int32_t>(begin + first + i * 32);
      if (!is_first && first + i * 32 < there) index[i] = from_indices[begin + first + i * 32];
    }
  }
  __syncthreads();
  uint32_t begin_of_digit;
  uint32_t own = begin_of_digits<kSweepThreads / 32>(shared.counts, warps, begin_of_digit);
  const int64_t row_pass = int64_t{row} * kPasses + a.pass;
  uint32_t* const status = a.status + row_pass * a.tiles * kDigits + threadIdx.x;
  uint32_t before = 0;
  if (threadIdx.x < kDigits) {
    if (threadIdx.x == kDigits - 1) own -= kTile - there;
    if (tile == 0) {
      before = a.counts[row_pass * kDigits + threadIdx.x];
      tell(status, kSum | (before + own));
    } else {
      tell(status + int64_t{tile} * kDigits, own + 1);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t place = place_of(digit[i], counts);
    shared.keys[place] = bits[i];
    if constexpr (kIndices) shared.indices[place] = index[i];
  }
  if (threadIdx.x < kDigits) {
    if (tile > 0) {
      constexpr int kAhead = kSmall ? kSmallLook : kLook;
      for (auto t = static_cast<int32_t>(tile) - 1; t >= 0;) {
        uint32_t words[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) words[j] = ask(status + int64_t{max(t - j, 0)} * kDigits);
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          if (t < 0 || words[j] == 0) break;
          const bool is_sum = words[j] & kSum;
          before += is_sum ? words[j] & ~kSum : words[j] - 1;
          t = is_sum ? -1 : t - 1;
        }
      }
      tell(status + int64_t{tile} * kDigits, kSum | (before + own));
    }
    shift_of[threadIdx.x] = static_cast<int32_t>(before - begin_of_digit);
  }
  __syncthreads();
  const auto wanted = static_cast<uint32_t>(is_last ? a.k : a.length);
  Key* to_keys = static_cast<Key*>(is_last ? a.values : a.keys[to]);
  int32_t* to_indices = is_last ? a.last_indices : a.indices[to];
  const bool writes_keys = to_keys != nullptr;
  to_keys += int64_t{row} * wanted;
  to_indices += int64_t{row} * wanted;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    bits[i] = shared.keys[threadIdx.x + i * kSweepThreads];
    if constexpr (kIndices) index[i] = shared.indices[threadIdx.x + i * kSweepThreads];
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i)
    digit[i] = shift_of[digit_of(sort_key(bits[i], a.order), shift)] + threadIdx.x + i * kSweepThreads;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const bool writes = threadIdx.x + i * kSweepThreads < there && digit[i] < wanted;
    if (writes && writes_keys) to_keys[digit[i]] = bits[i];
    if constexpr (kIndices)
      if (writes) to_indices[digit[i]] = index[i];
  }
}

template <class Key, bool kIndices>
cudaError_t run(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const int64_t rows = problem.rows.count(), length = problem.rows.length;
  const bool small = sweeps_small(problem.rows);
  const SweepShape shape(rows, length, problem.k, sizeof(Key), buffers.values != nullptr, kIndices, small);
  auto* const workspace = static_cast<unsigned char*>(buffers.workspace);
  auto* const heads = reinterpret_cast<RowHead*>(workspace);
  auto* const counts = reinterpret_cast<uint32_t*>(workspace + shape.counts);
  auto* const status = reinterpret_cast<uint32_t*>(workspace + shape.status);
  cudaError_t error = cudaMemsetAsync(workspace, 0, shape.status, stream);
  if (error != cudaSuccess) return error;
  const int64_t blocks = (length + plan.counted - 1) / plan.counted;
  error = launch(stream, {dim3(static_cast<unsigned>(rows * blocks)), dim3(kCountThreads)}, count_kernel<Key>,
                 CountArgs{buffers.x, heads, counts, status, rows, length, shape.tiles, plan.counted, problem.order});
  PassArgs a = {};
  a.x = buffers.x;
  a.values = buffers.values;
  a.last_indices = buffers.indices;
  a.k = problem.k;
  const bool whole = problem.k == length;
  a.keys[0] = whole && a.values ? a.values : workspace + shape.more_keys;
  a.keys[1] = workspace + shape.keys;
  a.indices[0] = whole ? a.last_indices : reinterpret_cast<int32_t*>(workspace + shape.more_indices);
  a.indices[1] = reinterpret_cast<int32_t*>(workspace + shape.indices);
  a.heads = heads;
  a.counts = counts;
  a.status = status;
  a.rows = rows;
  a.length = length;
  a.tiles = shape.tiles;
  a.tickets = plan.tickets;
  a.order = problem.order;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(rows * shape.tiles));
  config.block = dim3(kSweepThreads);
  config.shared_bytes = sweep_shared_bytes(sizeof(Key), small, kIndices);
#ifndef NO_OVERLAP
  config.overlap = plan.overlap;
#endif
  const auto kernel = small ? pass_kernel<Key, kIndices, sweep_items(sizeof(Key), true)>
                            : pass_kernel<Key, kIndices, sweep_items(sizeof(Key), false)>;
  for (a.pass = 0; a.pass < shape.passes && error == cudaSuccess; ++a.pass) error = launch(stream, config, kernel, a);
  return error;
}

}  // namespace

cudaError_t launch_sweep(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    return buffers.indices ? run<Key, true>(stream, plan, problem, buffers)
                           : run<Key, false>(stream, plan, problem, buffers);
  });
}

}  // namespace jaxgpuops::sort
