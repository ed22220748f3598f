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
#include "sort/cuda/rank_in.cuh"

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

// ---- Splitters ------------------------------------------------------------------------------------------------------

constexpr uint32_t kSamples = 1024, kSplitters = 128;  // the last splitter is not used

// Returns the place of a sample in its row: one in each of kSamples equal parts, at a different place of each.
__device__ __forceinline__ uint32_t place_of_sample(uint32_t i, int64_t length) {
  return static_cast<uint32_t>((uint64_t{i} << 16 | (i * 2654435761u) >> 16) * length >> 26);
}

template <class Key>
__device__ __forceinline__ Key shuffle_xor(Key value, uint32_t lanes) {
  return __shfl_xor_sync(kEveryLane, value, lanes);
}

// Sorts the samples, two of each thread, and leaves them in shared memory.
template <class Key>
__device__ __forceinline__ void sort_samples(Key (&own)[2], Key* samples) {
  const uint32_t first = 2 * threadIdx.x;
#pragma unroll 1
  for (uint32_t size = 2; size <= kSamples; size *= 2) {
    const bool rises = (first & size) == 0;
#pragma unroll 1
    for (uint32_t stride = size / 2; stride > 1; stride /= 2) {
      const bool takes_less = ((first & stride) == 0) == rises;
      Key other[2];
      if (stride > 32) {
        samples[first] = own[0], samples[first + 1] = own[1];
        __syncthreads();
        other[0] = samples[first ^ stride], other[1] = samples[(first ^ stride) + 1];
        __syncthreads();
      } else {
        other[0] = shuffle_xor(own[0], stride / 2), other[1] = shuffle_xor(own[1], stride / 2);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) own[i] = takes_less ? min(own[i], other[i]) : max(own[i], other[i]);
    }
    const Key less = min(own[0], own[1]), more = max(own[0], own[1]);
    own[0] = rises ? less : more, own[1] = rises ? more : less;
  }
  samples[first] = own[0], samples[first + 1] = own[1];
  __syncthreads();
}

// Returns the bucket of a key: 2 * i + 1 if it equals splitter i, else twice the number of smaller ones. There are
// `count` splitters; those after them are the largest key.
template <class Key>
__device__ __forceinline__ uint32_t bucket_of(const Key* splitters, uint32_t count, Key key) {
  uint32_t less = 0;
#pragma unroll
  for (uint32_t step = kSplitters / 2; step > 0; step /= 2)
    if (splitters[less + step - 1] < key) less += step;
  return 2 * less + (less < count && splitters[less] == key);
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
  static constexpr int kTile = kThreads * kItems, kMost = kRelayMost * kTile;
  uint32_t counts[kThreads / 32 * kDigits];
  union {
    struct {
      Word<Key> words[kTile];
      uint32_t indices[kTile];
    };
    struct {
      Key keys[kMost];
      uint32_t from[kMost];
    };
    Key samples[kSamples];
  };
};

template <class Key, bool kIndices, int kThreads, int kItems>
__global__ void __launch_bounds__(kThreads, 1) relay_kernel(const __grid_constant__ RelayArgs a) {
  constexpr int kPasses = sizeof(Key), kTile = kThreads * kItems;
  constexpr uint32_t kSplitTag = kPasses + 1, kMost = kRelayMost * kTile;
  using P = Parcel<Key, kIndices>;
  auto& shared = *reinterpret_cast<RelayShared<Key, kThreads, kItems>*>(dynamic_shared_memory());
  __shared__ uint32_t warps[kDigits / 32];
  __shared__ volatile Digits digits[kPasses];
  __shared__ uint32_t in_group[kDigits];  // for each digit, the elements of the tiles of the group before this one
  __shared__ int32_t shift_of[kDigits];   // the position of its elements in the row minus that in the tile
  __shared__ Key splitters[kSplitters];
  __shared__ uint8_t buckets[kTile];
  __shared__ uint32_t own_begin, own_count, lows[kDigits + 1];
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
  Key sample[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    sample[i] = sort_key(x[int64_t{place_of_sample(2 * threadIdx.x + i, a.length)} * a.inner], a.order);
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
  for (uint32_t p = 1 + threadIdx.x / kDigits; p <= kPasses; p += kThreads / kDigits) {
    sums_of(p)[threadIdx.x % kDigits + tile / a.group * kDigits] = 0;
    counts_of(p)[threadIdx.x % kDigits + tile * kDigits] = 0;
  }
  __threadfence();
#pragma unroll
  for (int i = 0; i < kItems; ++i) words[i] = word_of(static_cast<Key>(words[i]), a.order);
  __syncthreads();

  const auto k = static_cast<uint32_t>(a.k);
  const int64_t base = int64_t{outer} * k * a.inner + column;
  const auto write = [&](uint32_t to, Word<Key> word, uint32_t index) {
    if (to >= k) return;
    const int64_t at = base + int64_t{to} * a.inner;
    if (!kIndices || a.values) static_cast<Key*>(a.values)[at] = static_cast<Key>(word);
    if constexpr (kIndices) a.indices[at] = a.carried ? a.carried[row * a.length + index] : static_cast<int32_t>(index);
  };
  const auto publish_to = [&](int pass, uint32_t digit, uint32_t count) {
    // only warps that have elements count, and only they have slots past the end
    constexpr uint32_t kOfWarp = 32 * kItems;
    const uint32_t own = count - (threadIdx.x == kDigits - 1 ? (there + kOfWarp - 1) / kOfWarp * kOfWarp - there : 0);
    tell(counts_of(pass) + digit, sums_of(pass) + digit, tile, a.group, own);
  };
  // Waits for the counts of all tiles. Returns how many elements of the row have a lower digit than this thread's, and
  // how many have that.
  const auto await_counts = [&](int pass, uint32_t digit, uint32_t begin_of_digit, uint32_t& all) {
    uint32_t before = 0;
    all = 0;
    if (threadIdx.x < kDigits)
      add_groups(sums_of(pass) + digit, a.tiles, a.group, tile / a.group, all, before);
    else if (threadIdx.x < 2 * kDigits)
      in_group[threadIdx.x - kDigits] = sum_in_group(counts_of(pass) + digit, tile, a.group);
    const uint32_t lower = sum_before(all, warps);
    if (threadIdx.x < kDigits)
      shift_of[digit] = static_cast<int32_t>(lower + before + in_group[threadIdx.x] - begin_of_digit);
    return lower;
  };
  const bool live = first - threadIdx.x % 32 < there;  // the warp has elements

  {
    sort_samples(sample, shared.samples);
    const uint32_t parts = min(a.tiles, kSplitters);
    if (threadIdx.x < kSplitters)
      splitters[threadIdx.x] =
          threadIdx.x + 1 < parts ? shared.samples[(threadIdx.x + 1) * kSamples / parts] : static_cast<Key>(~Key{0});
    clear_counts(shared.counts);
    __syncthreads();
    uint32_t bucket[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      bucket[i] = is_there(i) ? bucket_of(splitters, parts - 1, sort_key(static_cast<Key>(words[i]), a.order)) : kDigits - 1;
    const uint32_t begin_of_digit = place_by_digit<kThreads, kItems>(
        shared.counts, warps, digits[0], 0, live, [&](int i, const Digits&) { return bucket[i]; },
        [&](uint32_t count) { publish_to(0, threadIdx.x, count); },
        [&](int i, uint32_t place) {
          shared.words[place] = words[i];
          buckets[place] = static_cast<uint8_t>(bucket[i]);
          if constexpr (kIndices) shared.indices[place] = index[i];
        });
    uint32_t all;
    const uint32_t lower = await_counts(0, threadIdx.x % kDigits, begin_of_digit, all);
    if (threadIdx.x == 2 * tile && tile < parts) own_begin = lower, own_count = all;
    if (!__syncthreads_or(threadIdx.x < kDigits && threadIdx.x % 2 == 0 && all > kMost)) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const uint32_t place = threadIdx.x + i * kThreads;
        if (place >= there) break;
        const uint32_t bucket = buckets[place], to = place + shift_of[bucket];
        const uint32_t own = kIndices ? shared.indices[place] : 0;
        if (bucket % 2 == 1)
          write(to, shared.words[place], own);
        else
          store_parcel(parcels + int64_t{to} * P::kBytes,
                       P::of(shared.words[place], kIndices ? kSplitTag << kPlaceBits | own : kSplitTag));
      }
      if (tile >= parts || own_count == 0) return;
      const uint32_t count = own_count;
      const unsigned char* const from = parcels + int64_t{own_begin} * P::kBytes;
      const auto await = [&](uint32_t i) {
        P parcel = load_parcel<P>(from + i * P::kBytes);
        while (!parcel.has(kSplitTag)) parcel = load_parcel<P>(from + i * P::kBytes);
        return parcel;
      };
      const auto key_of = [&](const P& parcel) { return sort_key(static_cast<Key>(parcel.word()), a.order); };
      // Samples of the bucket are its splitters. Four lanes compare each with the others.
      __syncthreads();
      Key* const drawn = shared.keys;
      if (threadIdx.x < kSplitters) {
        drawn[threadIdx.x + threadIdx.x / 32] = key_of(await(threadIdx.x * count / kSplitters));
      }
      clear_counts(shared.counts);
      __syncthreads();
      {
        const uint32_t own = threadIdx.x / 4, part = threadIdx.x % 4;
        const Key key = drawn[own + own / 32];
        uint32_t rank = 0;
#pragma unroll 8
        for (uint32_t i = 0; i < 32; ++i) {
          const Key other = drawn[part * 33 + i];
          rank += other < key || (other == key && part * 32 + i < own);
        }
        rank += shuffle_xor(rank, 1);
        rank += shuffle_xor(rank, 2);
        if (part == 0) splitters[rank] = key;
      }
      __syncthreads();
      // Each warp has neighbouring elements.
      const uint32_t rounds = (count + kThreads - 1) / kThreads;
      const uint32_t begin = threadIdx.x / 32 * 32 * rounds + threadIdx.x % 32;
      uint32_t* const own_counts = shared.counts + threadIdx.x / 32 * kDigits;
      const auto each = [&](auto f) {
        constexpr int kAhead = 4;
#pragma unroll 1
        for (uint32_t r = 0; r < rounds; r += kAhead) {
          P parcel[kAhead];
#pragma unroll
          for (int j = 0; j < kAhead; ++j)
            if (const uint32_t i = begin + (r + j) * 32; r + j < rounds && i < count)
              parcel[j] = load_parcel<P>(from + i * P::kBytes);
#pragma unroll
          for (int j = 0; j < kAhead; ++j) {
            if (r + j >= rounds) break;
            const uint32_t i = begin + (r + j) * 32;
            if (i < count && !parcel[j].has(kSplitTag)) parcel[j] = await(i);
            const Key key = key_of(parcel[j]);
            f(i, key, i < count ? bucket_of(splitters, kSplitters - 1, key) : kDigits - 1);
          }
        }
      };
      each([&](uint32_t i, Key, uint32_t bucket) {
        if (i < count) atomicAdd(own_counts + bucket, 1u);
      });
      __syncthreads();
      uint32_t total = 0;
      if (threadIdx.x < kDigits)
        for (int w = 0; w < kThreads / 32; ++w) total += shared.counts[w * kDigits + threadIdx.x];
      const uint32_t low = sum_before(total, warps);
      if (threadIdx.x < kDigits) {
        lows[threadIdx.x] = low;
        uint32_t last = low - 1;
#pragma unroll
        for (int w = 0; w < kThreads / 32; ++w) {
          const uint32_t count = shared.counts[w * kDigits + threadIdx.x];
          shared.counts[w * kDigits + threadIdx.x] = last;
          last += count;
        }
      }
      __syncthreads();
      const uint32_t after = lanes_after(), up_to_this = lanes_up_to_this(), ones = after | up_to_this;
      each([&](uint32_t i, Key key, uint32_t bucket) {
        const uint32_t same = lanes_with(bucket, ones), place = own_counts[bucket] + __popc(same & up_to_this);
        __syncwarp();
        if ((same & after) == 0) own_counts[bucket] = place;
        if (i < count) shared.keys[place] = key, shared.from[place] = i | bucket << 16;
        __syncwarp();
      });
      __syncthreads();
      for (uint32_t place = threadIdx.x; place < count; place += kThreads) {
        const uint32_t word = shared.from[place], bucket = word >> 16;
        const P parcel = load_parcel<P>(from + (word & 0xffff) * P::kBytes);
        uint32_t rank = place;
        if (bucket % 2 == 0)
          rank = lows[bucket] + rank_in(shared.keys, {lows[bucket], lows[bucket + 1]}, place, 0, 1);
        write(own_begin + rank, parcel.word(), kIndices ? parcel.tag() & kPlaces : 0);
      }
      return;
    }
  }

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
    const uint32_t begin_of_digit = place_by_digit<kThreads, kItems>(
        shared.counts, warps, digits[pass], turn, live,
        [&](int i, const Digits& digits) { return digit_of<Key>(words[i], digits); },
        [&](uint32_t count) { publish_to(pass + 1, own_digit, count); },
        [&](int i, uint32_t place) {
          shared.words[place] = words[i];
          if constexpr (kIndices) shared.indices[place] = index[i];
        });
    uint32_t all;
    await_counts(pass + 1, own_digit, begin_of_digit, all);
    const bool is_last = pass == kPasses - 1;
    if (__syncthreads_or(all == a.length) && !is_last) continue;

    const Digits again = read_anew(digits[pass]);
    if (is_last) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const uint32_t place = threadIdx.x + i * kThreads;
        if (place >= there) break;
        const Word<Key> word = shared.words[place];
        write(place + shift_of[digit_of<Key>(word, again)], word, kIndices ? shared.indices[place] : 0);
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
  config.shared_bytes = relay_shared_bytes(sizeof(Key), kThreads, kItems);
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
    using Key = std::conditional_t<sizeof(key) < 4, uint32_t, decltype(key)>;  // others are never planned so
    return buffers.indices ? run_items<Key, true>(stream, plan, problem, buffers)
                           : run_items<Key, false>(stream, plan, problem, buffers);
  });
}

}  // namespace jaxgpuops::sort
