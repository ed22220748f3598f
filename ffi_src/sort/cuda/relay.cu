// Radix sort of rows in one launch, of so few elements that each multiprocessor has one tile at most: the passes of
// sweep.cuh, by a digit of eight bits each, whose blocks do not end after a pass. A tile stays with its block.
//
// Blocks wait for each other twice in a pass. After they have counted their digits, each waits for the counts of all
// tiles of its row, most of which neighbouring tiles have added up to sums. Then it writes its elements to where they
// belong, each as a parcel that has the number of the pass in it, and reads the parcels at the places of its own tile,
// each as soon as it is there. So no barrier, fence or launch lies between two passes. One buffer is enough: a tile
// whose counts are known has read its parcels of the pass before. A pass in which all elements of a row have the same
// digit moves none.
//
// Bytes moved, in the L2 cache: each pass writes and reads 8 bytes for an element, 16 if it has 64 bits.
#include <algorithm>

#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "common/cuda/set_words.h"
#include "sort/cuda/counts.cuh"
#include "sort/cuda/digits.cuh"
#include "sort/cuda/kernels.h"

namespace jaxgpuops::sort {
namespace {

constexpr int kTagBits = 4, kPlaceBits = 32 - kTagBits;  // of a word with the number of a pass and an index
constexpr uint32_t kPlaces = (1u << kPlaceBits) - 1;

// An element on its way: its word and index, and a tag, which is the number of the pass plus 1. Each half of those of
// 128 bits has the tag, since halves may arrive one after the other.
template <class Key, bool kIndices>
struct Parcel {
  uint64_t low = 0, high = 0;

  static constexpr int kBytes = sizeof(Key) == 8 ? 16 : 8;

  __device__ __forceinline__ static Parcel of(Word<Key> word, uint32_t tag) {
    if constexpr (sizeof(Key) == 8)
      return {word << 32 | tag, (word & 0xffffffff00000000u) | tag};
    else
      return {uint64_t{word} << 32 | tag, 0};
  }
  __device__ __forceinline__ uint32_t tag() const { return static_cast<uint32_t>(low); }
  __device__ __forceinline__ bool has(uint32_t number) const {
    const auto is = [&](uint64_t half) {
      return (kIndices ? static_cast<uint32_t>(half) >> kPlaceBits : static_cast<uint32_t>(half)) == number;
    };
    return is(low) && (sizeof(Key) < 8 || is(high));
  }
  __device__ __forceinline__ Word<Key> word() const {
    if constexpr (sizeof(Key) == 8) return low >> 32 | (high & 0xffffffff00000000u);
    else return static_cast<uint32_t>(low >> 32);
  }
};

template <class P>
__device__ __forceinline__ P load_parcel(const unsigned char* from) {
  P parcel;
  if constexpr (P::kBytes == 16)
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(parcel.low), "=l"(parcel.high)
                 : "l"(from)
                 : "memory");
  else
    parcel.low = load_relaxed(reinterpret_cast<const uint64_t*>(from));
  return parcel;
}
template <class P>
__device__ __forceinline__ void store_parcel(unsigned char* to, const P& parcel) {
  if constexpr (P::kBytes == 16)
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(parcel.low), "l"(parcel.high)
                 : "memory");
  else
    store_relaxed(reinterpret_cast<uint64_t*>(to), parcel.low);
}

struct RelayArgs {
  const void* x;
  const int32_t* carried;  // numbers that take the place of the indices in the end; null: indices are wanted
  void* values;            // null: not wanted
  int32_t* indices;
  unsigned char* parcels;
  // Of each pass, the sums of all rows and then the counts of all: [row][group][digit] is a sum, above which is how
  // many tiles have added theirs; [row][tile][digit] is a count plus 1.
  uint32_t* words;
  int64_t pass_words;  // from one pass to the next
  int64_t length, k;
  uint32_t rows, tiles, group, groups;
  uint32_t inner;  // from one element of a row of x, or of the results, to the next
  SortOrder order;
};

template <class Key, int kThreads, int kItems>
struct RelayShared {
  static constexpr int kTile = kThreads * kItems;
  uint32_t counts[kThreads / 32 * kDigits];
  Word<Key> words[kTile];
  uint32_t indices[kTile];  // must be the last member: calls without indices allocate shared memory only up to here
};

template <class Key, bool kIndices, int kThreads, int kItems>
__global__ void __launch_bounds__(kThreads, 1) relay_kernel(const __grid_constant__ RelayArgs a) {
  constexpr int kPasses = sizeof(Key), kTile = kThreads * kItems;
  using P = Parcel<Key, kIndices>;
  auto& shared = *reinterpret_cast<RelayShared<Key, kThreads, kItems>*>(dynamic_shared_memory());
  __shared__ uint32_t warps[kDigits / 32];
  __shared__ volatile Digits digits[kPasses];
  __shared__ uint32_t in_group[kDigits];  // for each digit, the elements of the tiles of the group before this one
  __shared__ int32_t shift_of[kDigits];   // the position of its elements in the row minus that in the tile
  const uint32_t row = blockIdx.x / a.tiles, tile = blockIdx.x - row * a.tiles;
  const uint32_t begin = tile * kTile, there = min(static_cast<uint32_t>(a.length) - begin, uint32_t{kTile});
  const uint32_t first = threadIdx.x / 32 * 32 * kItems + threadIdx.x % 32;
  const auto is_there = [&](int i) { return first + i * 32 < there; };
  const uint32_t outer = row / a.inner, column = row - outer * a.inner;

  // The kernel that sets the words of the first pass to zero has already waited for the kernel that makes `x`.
  Word<Key> words[kItems];
  uint32_t index[kItems];
  const Key* const x = static_cast<const Key*>(a.x) + outer * a.length * a.inner + column;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    index[i] = begin + first + i * 32;
    words[i] = is_there(i) ? x[int64_t{index[i]} * a.inner] : Key{0};
  }
  // The words of later passes, and the parcels, are set to zero by the tiles to which they belong: other tiles wait for
  // the first counts of this one before they read or write them.
  unsigned char* const parcels = a.parcels + row * a.length * P::kBytes;
  const auto sums_of = [&](int pass) { return a.words + pass * a.pass_words + row * a.groups * kDigits; };
  const auto counts_of = [&](int pass) {
    return a.words + pass * a.pass_words + (a.rows * a.groups + row * a.tiles) * kDigits;
  };
  for (int pass = 0; pass < kPasses; ++pass) set_digits<Key>(digits[pass], pass, a.order);
  wait_for_predecessor();
  let_dependents_start();
#pragma unroll
  for (int i = 0; i < kItems; ++i)
    if (is_there(i)) store_parcel(parcels + int64_t{index[i]} * P::kBytes, P{});
  for (uint32_t p = 1 + threadIdx.x / kDigits; p < kPasses; p += kThreads / kDigits) {
    sums_of(p)[threadIdx.x % kDigits + tile / a.group * kDigits] = 0;
    counts_of(p)[threadIdx.x % kDigits + tile * kDigits] = 0;
  }
  __threadfence();
#pragma unroll
  for (int i = 0; i < kItems; ++i) words[i] = word_of(static_cast<Key>(words[i]), a.order);
  __syncthreads();

#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
    clear_counts(shared.counts);
    if (there < kTile) {
      const Word<Key> last = last_word<Key>(pass, a.order);
#pragma unroll
      for (int i = 0; i < kItems; ++i)
        if (!is_there(i)) words[i] = last;
    }
    const uint32_t turn = turn_of<Key>(pass, a.order), own_digit = threadIdx.x % kDigits ^ turn;
    uint32_t *const sums = sums_of(pass) + own_digit, *const counts = counts_of(pass) + own_digit;
    const auto publish = [&](uint32_t count) {
      // only warps that have elements count, and only they have slots past the end
      constexpr uint32_t kOfWarp = 32 * kItems;
      const uint32_t own =
          count - (threadIdx.x == kDigits - 1 ? (there + kOfWarp - 1) / kOfWarp * kOfWarp - there : 0);
      tell(counts, sums, tile, a.group, own);
    };
    const uint32_t begin_of_digit = place_by_digit<kThreads, kItems>(
        shared.counts, warps, digits[pass], turn, first - threadIdx.x % 32 < there,
        [&](int i, const Digits& digits) { return digit_of<Key>(words[i], digits); }, publish,
        [&](int i, uint32_t place) {
          shared.words[place] = words[i];
          if constexpr (kIndices) shared.indices[place] = index[i];
        });
    uint32_t all = 0, before = 0;
    if (threadIdx.x < kDigits) {
      add_groups(sums, a.tiles, a.group, tile / a.group, all, before);
    } else if (threadIdx.x < 2 * kDigits) {
      in_group[threadIdx.x - kDigits] = sum_in_group(counts, tile, a.group);
    }
    const uint32_t lower = sum_before(all, warps);  // the elements of lower digits in all tiles
    if (threadIdx.x < kDigits)
      shift_of[own_digit] = static_cast<int32_t>(lower + before + in_group[threadIdx.x] - begin_of_digit);
    const bool is_last = pass == kPasses - 1;
    if (__syncthreads_or(all == a.length) && !is_last) continue;

    const Digits again = read_anew(digits[pass]);
    if (is_last) {
      const auto k = static_cast<uint32_t>(a.k);
      const int64_t base = int64_t{outer} * k * a.inner + column;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const uint32_t place = threadIdx.x + i * kThreads;
        if (place >= there) break;
        const Word<Key> word = shared.words[place];
        const uint32_t to = place + shift_of[digit_of<Key>(word, again)];
        if (to >= k) continue;
        const int64_t at = base + int64_t{to} * a.inner;
        if (!kIndices || a.values) static_cast<Key*>(a.values)[at] = static_cast<Key>(word);
        if constexpr (kIndices) {
          const uint32_t own = shared.indices[place];
          a.indices[at] = a.carried ? a.carried[row * a.length + own] : static_cast<int32_t>(own);
        }
      }
      return;
    }
    const uint32_t number = pass + 1;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t place = threadIdx.x + i * kThreads;
      if (place >= there) break;
      const Word<Key> word = shared.words[place];
      const uint32_t to = place + shift_of[digit_of<Key>(word, again)];
      const uint32_t tag = kIndices ? number << kPlaceBits | shared.indices[place] : number;
      store_parcel(parcels + int64_t{to} * P::kBytes, P::of(word, tag));
    }
    P parcel[kItems];
    const unsigned char* const own = parcels + int64_t{begin + first} * P::kBytes;
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (is_there(i)) parcel[i] = load_parcel<P>(own + i * 32 * P::kBytes);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!is_there(i)) continue;
      while (!parcel[i].has(number)) parcel[i] = load_parcel<P>(own + i * 32 * P::kBytes);
      words[i] = parcel[i].word();
      if constexpr (kIndices) index[i] = parcel[i].tag() & kPlaces;
    }
  }
}

template <class Key, bool kIndices, int kThreads, int kItems>
cudaError_t run(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const Rows& rows = problem.rows;
  const auto kernel = relay_kernel<Key, kIndices, kThreads, kItems>;
  const RelayShape shape(rows.count(), rows.length, sizeof(Key), kThreads * kItems);
  auto* const workspace = static_cast<unsigned char*>(buffers.workspace);
  RelayArgs a = {};
  a.x = buffers.x;
  a.carried = buffers.carried;
  a.values = buffers.values;
  a.indices = buffers.indices;
  a.parcels = workspace + shape.parcels;
  a.words = reinterpret_cast<uint32_t*>(workspace);
  a.pass_words = shape.pass_bytes / 4;
  a.length = rows.length;
  a.k = problem.k;
  a.rows = static_cast<uint32_t>(rows.count());
  a.tiles = static_cast<uint32_t>(shape.tiles);
  a.group = static_cast<uint32_t>(shape.group);
  a.groups = static_cast<uint32_t>(shape.groups);
  a.inner = static_cast<uint32_t>(rows.inner);
  a.order = problem.order;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(rows.count() * shape.tiles));
  config.block = dim3(kThreads);
  config.shared_bytes = relay_shared_bytes(sizeof(Key), kThreads, kItems, kIndices);
  config.overlap = plan.overlap;
  config.together = true;
  static Residents residents;
  int fitting = 0;
  cudaError_t error = residents.count(reinterpret_cast<const void*>(kernel), config, &fitting);
  if (error != cudaSuccess) return error;
  if (config.grid.x > static_cast<unsigned>(fitting)) return launch_sweep(stream, plan, problem, buffers);
  error = launch_set_words(stream, a.words, a.pass_words, 0, 0);
  return error == cudaSuccess ? launch(stream, config, kernel, a) : error;
}

template <class Key, bool kIndices>
cudaError_t run_items(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const auto own = plan.items == kRelayItems[0]   ? run<Key, kIndices, kRelayThreads, kRelayItems[0]>
                   : plan.items == kRelayItems[1] ? run<Key, kIndices, kRelayThreads, kRelayItems[1]>
                                                  : run<Key, kIndices, kRelayThreads, kRelayItems[2]>;
  return own(stream, plan, problem, buffers);
}

}  // namespace

cudaError_t launch_relay(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = std::conditional_t<sizeof(key) == 1, uint16_t, decltype(key)>;  // bytes are never planned so
    return buffers.indices ? run_items<Key, true>(stream, plan, problem, buffers)
                           : run_items<Key, false>(stream, plan, problem, buffers);
  });
}

}  // namespace jaxgpuops::sort
