// Radix sort by keys of 64 bits in all, of which only the permutation is wanted: by two keys of 32 bits, or by one of
// 64. Passes are those of sweep.cuh, whose look-back and early launches they have.
//
// An element of a pass has the digits that later passes need, the next one first, and its index, so it becomes shorter
// from pass to pass: two words, and 16 bits more in the first two passes if more than six of eight digits differ. The
// first kernel counts the digits of all keys before anything is sorted. So no pass sorts by a digit that all elements
// of a row share, none gathers a key at random places, and digits are bytes at a place that is known at compile time.
//
// Bytes moved: the keys are read twice; each pass writes and reads 8 bytes, the first two up to 10, the last writes 4.
#include "common/cuda/launch.cuh"
#include "common/cuda/set_words.h"
#include "sort/cuda/counts.cuh"
#include "sort/cuda/digits.cuh"
#include "sort/cuda/keys.h"

namespace jaxgpuops::sort {
namespace {

constexpr int kBytes = kKeysBytes;

// The state of a row. It is set to zero before every sort.
struct KeysHead {
  uint32_t tickets[kBytes];  // used in the first row only: for each pass, how many tiles blocks have taken
  uint32_t counted;          // how many blocks have finished counting in this row
  uint32_t passes;           // how many bytes of the keys differ
  uint32_t select[2];        // which ones, as selectors of __byte_perm: of the first four passes, and of the others
  uint32_t most;             // in the first row only: the most passes of a row
  uint32_t padding[3];
};
static_assert(sizeof(KeysHead) == kKeysHeadBytes);

struct Source {
  const void* high;
  const uint32_t* low;  // null if there is one key, of 64 bits
  SortOrder high_order, low_order;

  // Returns the low and the high word of a number by which elements are sorted.
  template <bool kOne>
  __device__ __forceinline__ uint2 read(int64_t at) const {
    if constexpr (kOne) {
      const uint64_t key = sort_key(static_cast<const uint64_t*>(high)[at], high_order);
      return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
    }
    return {sort_key(low[at], low_order), sort_key(static_cast<const uint32_t*>(high)[at], high_order)};
  }
};

// ---- Counts ---------------------------------------------------------------------------------------------------------

struct KeysCountArgs {
  Source source;
  KeysHead* heads;
  uint32_t* counts;  // [row][byte][digit]: how many elements have this digit; after counting: how many have a lower one
  uint32_t* status;  // the status words of pass_kernel, which count_kernel sets to zero
  int64_t length, tiles;
  int64_t elements;  // elements that a block counts
};

template <bool kOne>
__global__ void __launch_bounds__(kCountThreads) keys_count_kernel(const __grid_constant__ KeysCountArgs a) {
  __shared__ uint32_t counts[kBytes * kDigits], active;
  __shared__ bool last;
  for (int c = threadIdx.x; c < kBytes * kDigits; c += kCountThreads) counts[c] = 0;
  let_dependents_start();
  const int64_t blocks = (a.length + a.elements - 1) / a.elements;
  const int64_t row = blockIdx.x / blocks, part = blockIdx.x % blocks;
  const int64_t begin = row * a.length + part * a.elements, end = min(begin + a.elements, (row + 1) * a.length);
  __syncthreads();

  const auto count = [&](uint32_t word, uint32_t* counts) {
#pragma unroll
    for (int p = 0; p < 4; ++p) atomicAdd(counts + p * kDigits + __byte_perm(word, 0, 0x4440 | p), 1u);
  };
  constexpr int kUnroll = 8;
#pragma unroll 1
  for (int64_t at = begin + threadIdx.x; at < end; at += kUnroll * kCountThreads) {
    uint2 key[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) key[u] = a.source.read<kOne>(min(at + u * kCountThreads, end - 1));
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * kCountThreads >= end) continue;
      count(key[u].x, counts);
      count(key[u].y, counts + 4 * kDigits);
    }
  }

  wait_for_predecessor();  // the predecessor sets the workspace to zero
  const int64_t words = a.tiles * kBytes * kDigits, share = (words + blocks - 1) / blocks;
  uint32_t* const status = a.status + row * words;
#pragma unroll 2
  for (int64_t w = part * share + threadIdx.x; w < min((part + 1) * share, words); w += kCountThreads) status[w] = 0;
  __syncthreads();

  uint32_t* const all = a.counts + row * kBytes * kDigits;
  if (!add_to_row<kBytes>(counts, all, &a.heads[row].counted, blocks, last)) return;
  sum_counts<kBytes>(counts, all, a.length, active, [](uint32_t) { return 0u; });
  if (threadIdx.x > 0) return;
  KeysHead& head = a.heads[row];
  const uint32_t bytes = active ? active : 1;  // at least one pass must run, since it writes the result
  uint64_t select = 0;
  uint32_t passes = 0;
  for (uint32_t b = 0; b < kBytes; ++b)
    if (bytes >> b & 1) select |= uint64_t{b} << 4 * passes++;
  head.passes = passes;
  atomicMax(&a.heads->most, passes);
  head.select[0] = static_cast<uint32_t>(select) & 0xffff;
  head.select[1] = static_cast<uint32_t>(select >> 16);
}

// ---- Passes ---------------------------------------------------------------------------------------------------------

// Digit n is that of the pass n passes later. An element between two passes has four digits in its first word. Its
// second word has the index, and a fifth digit above it. If there are more, a half has up to two of them. In the first
// pass, the second word has the place in the tile and, above it, digits 4 and 5.
struct KeysArgs {
  Source source;
  uint2* words[2];  // buffers that passes write in turn
  uint16_t* halves[2];
  int32_t* out;
  KeysHead* heads;
  uint32_t* counts;
  uint32_t* status;  // [row][pass][tile][digit]
  int64_t length, tiles;
  int64_t status_tiles;  // from the status words of a pass to those of the next
  int pass;
  bool tickets;  // whether there may be more blocks than run at the same time
};

template <int kItems>
struct KeysShared {
  static constexpr int kTile = kKeysThreads * kItems;
  uint32_t counts[kKeysThreads / 32 * kDigits];
  uint2 words[kTile];
  uint16_t halves[kTile];  // must be the last member: passes whose elements have none allocate up to here
};

enum KeysPass { kFirstPass, kWidePass, kNarrowPass };  // only wide passes, and the first, have halves

template <int kItems, KeysPass kPass, bool kOne = false>
__global__ void __launch_bounds__(kKeysThreads, kItems == kFewKeys ? 3 : 2)
    keys_pass_kernel(const __grid_constant__ KeysArgs a) {
  constexpr int kTile = kKeysThreads * kItems;
  constexpr bool kFirst = kPass == kFirstPass;
  if (!kFirst && a.pass >= static_cast<int>(__ldcg(&a.heads->most))) {
    wait_for_predecessor();
    return;
  }
  auto& shared = *reinterpret_cast<KeysShared<kItems>*>(dynamic_shared_memory());
  __shared__ uint32_t warps[kDigits / 32], ticket;
  __shared__ volatile Digits digits;
  __shared__ int32_t
      shift_of[kDigits];  // for each digit: the position of its elements in the row minus that in the tile
  clear_counts(shared.counts);
  if (a.tickets || kFirst) wait_for_predecessor();
  if (a.tickets && threadIdx.x == 0) ticket = atomicAdd(&a.heads->tickets[a.pass], 1u);
  __syncthreads();
  const auto tiles = static_cast<uint32_t>(a.tiles), number = a.tickets ? ticket : blockIdx.x;
  const uint32_t row = number / tiles, tile = number - row * tiles;
  const int64_t base = row * a.length;
  const uint32_t begin = tile * kTile, there = static_cast<uint32_t>(min(int64_t{kTile}, a.length - begin));
  // The pass before has waited for the kernel that counts before it let this one start.
  const KeysHead* const head = a.heads + row;
  const uint32_t passes = __ldcg(&head->passes), low_select = __ldcg(&head->select[0]),
                 high_select = __ldcg(&head->select[1]);
  if (!kFirst) wait_for_predecessor();
  let_dependents_start();
  const uint32_t pass = kFirst ? 0 : a.pass;
  if (pass >= passes) return;
  const bool is_last = pass + 1 == passes;
  const bool has_half = kFirst ? passes > 6 : kPass == kWidePass && passes - pass > 5;
  const bool writes_half = passes - pass > 6;
  const uint32_t lead = threadIdx.x / 32 * 32 * kItems + threadIdx.x % 32;
  const int64_t at = base + begin + lead;
  const uint32_t from = 1 - pass % 2, to_buffer = pass % 2;

  uint32_t first[kItems], second[kItems];
  const auto is_there = [&](int i) { return lead + i * 32 < there; };
  const auto load = [&](auto whole) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      first[i] = kDigits - 1, second[i] = 0;
      if (!whole && !is_there(i)) continue;
      if constexpr (kFirst) {
        const uint2 key = a.source.read<kOne>(at + i * 32);
        first[i] = __byte_perm(key.x, key.y, low_select);
        second[i] = (lead + i * 32) | __byte_perm(key.x, key.y, high_select) << 16;
      } else {
        const uint2 words = (a.words[from] + at)[i * 32];
        first[i] = words.x;
        second[i] = words.y;
      }
    }
  };
  const bool is_whole = there == kTile;
  is_whole ? load(std::true_type{}) : load(std::false_type{});

  const uint32_t byte = ((pass < 4 ? low_select : high_select) >> 4 * (pass % 4)) & 7;
  uint32_t* const status = a.status + ((int64_t{row} * kBytes + pass) * a.status_tiles) * kDigits + threadIdx.x;
  uint32_t before = 0, own = 0;
  const auto publish = [&](uint32_t count) {
    constexpr uint32_t kOfWarp = 32 * kItems;
    own = count - (threadIdx.x == kDigits - 1 ? (there + kOfWarp - 1) / kOfWarp * kOfWarp - there : 0);
    if (tile == 0) {
      before = a.counts[(int64_t{row} * kBytes + byte) * kDigits + threadIdx.x];
      store_relaxed(status, kSum | (before + own));
    } else {
      store_relaxed(status + int64_t{tile} * kDigits, own + 1);
    }
  };
  const uint32_t begin_of_digit = place_by_digit<kKeysThreads, kItems>(
      shared.counts, warps, digits, 0, lead - threadIdx.x % 32 < there,
      [&](int i, const Digits&) { return first[i] & (kDigits - 1); }, publish,
      [&](int i, uint32_t place) {
        shared.words[place] = uint2{first[i], second[i]};
        first[i] = place;
      });
  if (has_half) {
    uint32_t half[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!is_there(i)) continue;
      if constexpr (kFirst) {
        const uint2 key = a.source.read<kOne>(at + i * 32);
        half[i] = __byte_perm(key.x, key.y, high_select >> 8);
      } else {
        half[i] = (a.halves[from] + at)[i * 32];
      }
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (is_there(i)) shared.halves[first[i]] = static_cast<uint16_t>(half[i]);
  }
  if (threadIdx.x < kDigits) {
    if (tile > 0) before = sum_of_tiles_before<kItems == kFewKeys ? 8 : 4>(status, tile, own);
    shift_of[threadIdx.x] = static_cast<int32_t>(before - begin_of_digit);
  }
  __syncthreads();

  uint2* const to_words = a.words[to_buffer] + base;
  uint16_t* const to_halves = a.halves[to_buffer] + base;
  int32_t* const out = a.out + base;
  const auto store = [&](int i, bool whole, bool last, bool wide) {
    const uint32_t place = threadIdx.x + i * kKeysThreads;
    if (!whole && place >= there) return;
    const uint2 words = shared.words[place];
    const uint32_t to = place + shift_of[words.x & (kDigits - 1)];
    const uint32_t index = kFirst ? begin + (words.y & 0xffff) : words.y & 0xffffff;
    if (last) {
      out[to] = static_cast<int32_t>(index);
      return;
    }
    const uint32_t half = wide ? shared.halves[place] : 0;
    const uint32_t next = __byte_perm(words.x, words.y, kFirst ? 0x6321 : 0x7321);
    to_words[to] = uint2{next, index | (kFirst ? words.y & 0xff000000 : half << 24)};
    if (wide && writes_half) to_halves[to] = static_cast<uint16_t>(kFirst ? half : half >> 8);
  };
  const auto store_all = [&](bool last, bool wide) {
    if (is_whole) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) store(i, true, last, wide);
    } else {
#pragma unroll 4
      for (int i = 0; i < kItems; ++i) store(i, false, last, wide);
    }
  };
  if (is_last)
    store_all(true, false);
  else if (has_half)
    store_all(false, true);
  else
    store_all(false, false);
}

template <int kWideItems, int kItems, bool kOne>
cudaError_t run(cudaStream_t stream, const KeysPlan& plan, const KeysProblem& problem, const KeysBuffers& buffers) {
  const int64_t rows = problem.rows.count(), length = problem.rows.length;
  const KeysShape shape(rows, length, kWideItems);
  auto* const workspace = static_cast<unsigned char*>(buffers.workspace);
  KeysArgs a = {};
  a.source = {buffers.high, buffers.low, problem.high, problem.low};
  for (int b = 0; b < 2; ++b) {
    a.words[b] = reinterpret_cast<uint2*>(workspace + shape.words[b]);
    a.halves[b] = reinterpret_cast<uint16_t*>(workspace + shape.halves[b]);
  }
  a.out = buffers.indices;
  a.heads = reinterpret_cast<KeysHead*>(workspace);
  a.counts = reinterpret_cast<uint32_t*>(workspace + shape.counts);
  a.status = reinterpret_cast<uint32_t*>(workspace + shape.status);
  a.length = length;
  a.status_tiles = shape.tiles;
  a.tickets = plan.tickets;
  cudaError_t error = launch_set_words(stream, reinterpret_cast<uint32_t*>(workspace), shape.status / 4, 0, 0);
  if (error != cudaSuccess) return error;
  Launch config;
  config.overlap = plan.overlap;
  config.block = dim3(kCountThreads);
  config.grid = dim3(static_cast<unsigned>(rows * ceil_div(length, plan.counted)));
  error = launch(stream, config, keys_count_kernel<kOne>,
                 KeysCountArgs{a.source, a.heads, a.counts, a.status, length, shape.tiles, plan.counted});
  config.block = dim3(kKeysThreads);
  constexpr int kWidePasses = 3;  // after which there are five digits at most
  for (a.pass = 0; a.pass < kBytes && error == cudaSuccess; ++a.pass) {
    const bool wide = a.pass < kWidePasses;
    const int items = wide ? kWideItems : kItems;
    a.tiles = ceil_div(length, int64_t{kKeysThreads} * items);
    config.grid = dim3(static_cast<unsigned>(rows * a.tiles));
    config.shared_bytes = keys_shared_bytes(items, wide);
    error = launch(stream, config,
                   a.pass == 0 ? keys_pass_kernel<kWideItems, kFirstPass, kOne>
                   : wide      ? keys_pass_kernel<kWideItems, kWidePass>
                               : keys_pass_kernel<kItems, kNarrowPass>,
                   a);
  }
  return error;
}

}  // namespace

cudaError_t launch_keys(cudaStream_t stream, const KeysPlan& plan, const KeysProblem& problem,
                        const KeysBuffers& buffers) {
  const auto run_with = [&](auto one) {
    return plan.items == kFewKeys ? run<kFewKeys, kFewKeys, one>(stream, plan, problem, buffers)
                                  : run<kManyWideKeys, kManyKeys, one>(stream, plan, problem, buffers);
  };
  return problem.one ? run_with(std::true_type{}) : run_with(std::false_type{});
}

}  // namespace jaxgpuops::sort
