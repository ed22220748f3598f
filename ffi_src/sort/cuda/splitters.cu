// Sort of rows in one launch, of so few elements that each multiprocessor has one tile at most. Samples of the row
// divide its keys into buckets, one for each block. A block sends the elements of its tile to their buckets, and then
// sorts its own bucket. Elements that equal a splitter are in their final places when they are sent.
//
// Blocks wait for each other three times: for the splitters, for the counts of all tiles of the row, most of which
// neighbouring tiles have added up to sums, and for the elements of their buckets. Every block reads all samples, but
// ranks only its share of them: those of the right ranks are splitters, which it sends to the others. What is sent is a
// parcel with a tag, which says that it has arrived, so no barrier, fence or launch is needed. A bucket is sorted in
// shared memory: by splitters again, which are elements of it, and then each element is compared with those between the
// same two; or, if it has more than some hundred elements of 32 bits, by digits.
//
// If a bucket is too long, since the samples say little about the other elements, the row is sorted in passes by digits
// of eight bits, as in sweep.cuh, but blocks stay: each sends its elements to their tiles as parcels, and waits for its
// own. One buffer of parcels is enough: a tile whose counts are known has read its parcels of the pass before. A pass
// in which all elements of a row have the same digit moves none.
//
// Bytes moved: the elements are read and written once. In the L2 cache, a parcel is written and read for each element,
// of 8 bytes for 32 bits, and of 16 for 64 bits; every block reads the samples, up to 2048 elements.
#include <algorithm>

#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "common/cuda/set_words.h"
#include "sort/cuda/counts.cuh"
#include "sort/cuda/digits.cuh"
#include "sort/cuda/kernels.h"

namespace jaxgpuops::sort {
namespace {

struct SplitArgs {
  const void* x;
  const int32_t* carried;  // numbers that take the place of the indices in the end; null: indices are wanted
  void* values;            // null: not wanted
  int32_t* indices;
  uint64_t sample_step;      // see place_of_sample()
  unsigned char* splitters;  // parcels: kSplitters for each row
  unsigned char* parcels;
  // Of each exchange of counts, the sums of all rows and then the counts of all: [row][group][digit] is a sum, above
  // which is how many tiles have added theirs; [row][tile][digit] is a count plus 1.
  uint32_t* words;
  const uint32_t* needed;  // of Buffers
  int64_t exchange_words;  // from one exchange to the next
  int64_t length, k;
  uint32_t rows, tiles, group, groups;
  uint32_t inner;  // from one element of a row of x, or of the results, to the next
  SortOrder order;
};

// ---- Parcels --------------------------------------------------------------------------------------------------------

constexpr int kPlaceBits = 28;  // of a word that has a tag above an index

// An element on its way: a word, its index, and a tag, which is not 0. Both halves of a parcel of 128 bits have the
// tag, since halves may arrive one after the other.
template <class Key, bool kIndices>
struct Parcel {
  static constexpr int kBytes = sizeof(Key) == 8 ? 16 : 8;
  uint64_t low = 0, high = 0;

  __device__ __forceinline__ static Parcel of(Key word, uint32_t tag, uint32_t index) {
    const uint32_t lower = kIndices ? tag << kPlaceBits | index : tag;
    if constexpr (sizeof(Key) == 8) return {word << 32 | lower, (word & 0xffffffff00000000u) | lower};
    return {uint64_t{word} << 32 | lower, 0};
  }
  __device__ __forceinline__ bool has(uint32_t tag) const {
    const auto is = [&](uint64_t half) { return (static_cast<uint32_t>(half) >> (kIndices ? kPlaceBits : 0)) == tag; };
    return is(low) && (sizeof(Key) < 8 || is(high));
  }
  __device__ __forceinline__ Key word() const {
    if constexpr (sizeof(Key) == 8) return low >> 32 | (high & 0xffffffff00000000u);
    return static_cast<Key>(low >> 32);
  }
  __device__ __forceinline__ uint32_t index() const {
    return kIndices ? static_cast<uint32_t>(low) & ((1u << kPlaceBits) - 1) : 0;
  }

  __device__ __forceinline__ static Parcel load(const unsigned char* parcels, int64_t i) {
    Parcel parcel;
    if constexpr (kBytes == 16)
      asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                   : "=l"(parcel.low), "=l"(parcel.high)
                   : "l"(parcels + i * kBytes)
                   : "memory");
    else
      parcel.low = load_relaxed(reinterpret_cast<const uint64_t*>(parcels) + i);
    return parcel;
  }
  // Waits until a parcel with this tag has arrived.
  __device__ __forceinline__ static Parcel await(const unsigned char* parcels, int64_t i, uint32_t tag) {
    Parcel parcel = load(parcels, i);
    while (!parcel.has(tag)) parcel = load(parcels, i);
    return parcel;
  }
  __device__ __forceinline__ void store(unsigned char* parcels, int64_t i) const {
    if constexpr (kBytes == 16)
      asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(parcels + i * kBytes), "l"(low), "l"(high)
                   : "memory");
    else
      store_relaxed(reinterpret_cast<uint64_t*>(parcels) + i, low);
  }
};

// ---- Splitters ------------------------------------------------------------------------------------------------------

constexpr uint32_t kSplitters = kMostBuckets;  // one of which is not used, so that there are less than kDigits buckets

// Returns the place of a sample in its row: one in each part of the row, at a different place of each. `step` is the
// length of a part times 2^20.
__device__ __forceinline__ uint32_t place_of_sample(uint32_t i, uint64_t step) {
  return static_cast<uint32_t>((uint64_t{i} << 16 | (i * 2654435761u) >> 16) * step >> 36);
}

// Returns the bucket of a key: 2 * i + 1 if it equals splitter i, else twice the number of smaller ones. There are
// `count` splitters, and those after them are the largest key.
template <class Key>
__device__ __forceinline__ uint32_t bucket_of(const Key* splitters, uint32_t count, Key key) {
  uint32_t less = 0;
#pragma unroll
  for (uint32_t step = kSplitters / 2; step > 0; step /= 2)
    if (splitters[less + step - 1] < key) less += step;
  return 2 * less + (less < count && splitters[less] == key);
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

template <class Key, bool kIndices, int kItems>
struct SplitShared {
  static constexpr int kTile = kSplitThreads * kItems, kMost = split_most(sizeof(Key), kItems);
  static constexpr int kMoved = sorts_by_digits(sizeof(Key), kItems) ? kMost : 1, kCompared = kMoved > 1 ? 1 : kMost;
  uint32_t counts[kSplitThreads / 32 * kDigits];
  union {
    struct {
      Key words[kTile];
      uint32_t indices[kTile];
      uint8_t buckets[kTile];
    };
    struct {
      Key keys[kCompared];     // in the order of buckets
      Key arrived[kCompared];  // words in the order of their parcels
      uint32_t arrived_indices[kIndices ? kCompared : 1];
      uint16_t from[kCompared];  // for each of the keys, its parcel
      uint8_t bucket_of_arrived[kCompared];
    };
    struct {
      Key two[2][kMoved];  // each pass moves the elements from one buffer to the other
      uint32_t two_indices[2][kIndices ? kMoved : 1];
    };
    Key samples[kSplitters * split_samples(sizeof(Key), kItems)];
  };
  Key splitters[kSplitters];
  uint32_t in_group[kDigits];  // for each digit, the elements of the tiles of the group before this one
  int32_t shift_of[kDigits];   // the position of its elements in the row minus that in the tile
  uint32_t lows[kDigits + 1];  // how many elements of the bucket are in lower buckets
  uint32_t warps[kDigits / 32];
  uint32_t begin, count;  // of the block's bucket
  Key least, most;        // of its keys
};

// Calls arrived(i, parcel) for the parcels of a bucket, as they arrive.
template <class P, class Arrived>
__device__ __forceinline__ void await_bucket(const unsigned char* parcels, uint32_t count, uint32_t tag,
                                             Arrived arrived) {
  constexpr int kAhead = 4;
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < count; first += kAhead * kSplitThreads) {
    P parcel[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      if (first + j * kSplitThreads < count) parcel[j] = P::load(parcels, first + j * kSplitThreads);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const uint32_t i = first + j * kSplitThreads;
      if (i >= count) break;
      if (!parcel[j].has(tag)) parcel[j] = P::await(parcels, i, tag);
      arrived(i, parcel[j]);
    }
  }
}

// Turns the counts of each warp and digit, or bucket, into the place before the first element that the warp has of it.
// To thread t of the first 256, the first place of digit t is returned.
__device__ __forceinline__ uint32_t places_of_counts(uint32_t* counts, uint32_t* warps) {
  constexpr int kWarps = kSplitThreads / 32;
  uint32_t total = 0, of_warp[kWarps];
  if (threadIdx.x < kDigits)
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += of_warp[w] = counts[w * kDigits + threadIdx.x];
  const uint32_t begin = sum_before(total, warps);
  if (threadIdx.x < kDigits) {
    uint32_t last = begin - 1;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      counts[w * kDigits + threadIdx.x] = last;
      last += of_warp[w];
    }
  }
  __syncthreads();
  return begin;
}

// Calls put(i, place) for the elements of a bucket with their places in a stable sort by digit(i), after `own_counts`
// of the warp has got the place before its first element of each. Warps have neighbouring elements, in `rounds`.
template <class Digit, class Put>
__device__ __forceinline__ void place_in_bucket(uint32_t* own_counts, uint32_t first, uint32_t rounds, uint32_t count,
                                                Digit digit, Put put) {
  const uint32_t after = lanes_after(), up_to_this = lanes_up_to_this(), ones = after | up_to_this;
#pragma unroll 2
  for (uint32_t r = 0, i = first; r < rounds; ++r, i += 32) {
    const uint32_t own = i < count ? digit(i) : kDigits - 1;  // slots past the end come last
    const uint32_t same = lanes_with(own, ones), place = own_counts[own] + __popc(same & up_to_this);
    __syncwarp();
    if ((same & after) == 0) own_counts[own] = place;
    if (i < count) put(i, place);
    __syncwarp();
  }
}

// Sorts the `count` elements of a bucket by splitters and comparisons. Calls write(place, word, index).
template <class Key, bool kIndices, int kItems, class Write>
__device__ __forceinline__ void compare_bucket(SplitShared<Key, kIndices, kItems>& shared, const unsigned char* parcels,
                                               uint32_t count, uint32_t tag, const SortOrder& order, Write write) {
  using P = Parcel<Key, kIndices>;
  constexpr int kLanes = kSplitThreads / kSplitters;
  await_bucket<P>(parcels, count, tag, [&](uint32_t i, const P& parcel) {
    shared.arrived[i] = parcel.word();
    if constexpr (kIndices) shared.arrived_indices[i] = parcel.index();
  });
  __syncthreads();
  // Four lanes compare a splitter with the others.
  Key* const drawn = shared.keys;
  const auto place_of = [](uint32_t i) { return i + i / (kSplitters / kLanes); };  // so that lanes meet in no bank
  if (threadIdx.x < kSplitters)
    drawn[place_of(threadIdx.x)] = sort_key(shared.arrived[threadIdx.x * count / kSplitters], order);
  __syncthreads();
  const uint32_t own = threadIdx.x / kLanes, part = threadIdx.x % kLanes * (kSplitters / kLanes);
  const Key splitter = drawn[place_of(own)];
  uint32_t less = 0;
#pragma unroll 8
  for (uint32_t i = 0; i < kSplitters / kLanes; ++i) {
    const Key other = drawn[place_of(part) + i];
    less += other < splitter || (other == splitter && part + i < own);
  }
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) less += __shfl_xor_sync(kEveryLane, less, lanes);
  if (threadIdx.x % kLanes == 0) shared.splitters[less] = splitter;
  __syncthreads();

  const uint32_t rounds = (count + kSplitThreads - 1) / kSplitThreads;
  const uint32_t first = threadIdx.x / 32 * 32 * rounds + threadIdx.x % 32;
  uint32_t* const own_counts = shared.counts + threadIdx.x / 32 * kDigits;
#pragma unroll 2
  for (uint32_t i = first; i < min(count, first + 32 * rounds); i += 32) {
    const uint32_t bucket = bucket_of(shared.splitters, kSplitters - 1, sort_key(shared.arrived[i], order));
    shared.bucket_of_arrived[i] = static_cast<uint8_t>(bucket);
    atomicAdd(own_counts + bucket, 1u);
  }
  __syncthreads();
  const uint32_t begin_of_bucket = places_of_counts(shared.counts, shared.warps);
  if (threadIdx.x < kDigits) shared.lows[threadIdx.x] = begin_of_bucket;
  place_in_bucket(
      own_counts, first, rounds, count, [&](uint32_t i) { return shared.bucket_of_arrived[i]; },
      [&](uint32_t i, uint32_t place) {
        shared.keys[place] = sort_key(shared.arrived[i], order);
        shared.from[place] = static_cast<uint16_t>(i);
      });
  __syncthreads();
  for (uint32_t place = threadIdx.x; place < count; place += kSplitThreads) {
    const uint32_t from = shared.from[place], bucket = shared.bucket_of_arrived[from];
    uint32_t rank = place;  // of an element that equals a splitter
    if (bucket % 2 == 0) {
      const Key key = shared.keys[place];
      const uint32_t begin = shared.lows[bucket], end = shared.lows[bucket + 1];
      rank = begin;
#pragma unroll 4
      for (uint32_t i = begin; i < end; ++i) {
        const Key other = shared.keys[i];
        rank += other < key || (other == key && i < place);
      }
    }
    write(rank, shared.arrived[from], kIndices ? shared.arrived_indices[from] : 0);
  }
}

// The same by digits of the difference from the least key, from the lowest digit up.
template <class Key, bool kIndices, int kItems, class Write>
__device__ __forceinline__ void pass_bucket(SplitShared<Key, kIndices, kItems>& shared, const unsigned char* parcels,
                                            uint32_t count, uint32_t tag, const SortOrder& order, Write write) {
  using P = Parcel<Key, kIndices>;
  static_assert(sizeof(Key) == 4);
  Key least = ~Key{0}, most = 0;
  await_bucket<P>(parcels, count, tag, [&](uint32_t i, const P& parcel) {
    const Key key = sort_key(parcel.word(), order);
    least = min(least, key), most = max(most, key);
    shared.two[0][i] = parcel.word();
    if constexpr (kIndices) shared.two_indices[0][i] = parcel.index();
  });
  least = fold_lanes(least, [](Key a, Key b) { return min(a, b); });
  most = fold_lanes(most, [](Key a, Key b) { return max(a, b); });
  if (threadIdx.x % 32 == 0) atomicMin(&shared.least, least), atomicMax(&shared.most, most);
  __syncthreads();
  least = shared.least;
  const Key range = shared.most - least;
  const uint32_t rounds = (count + kSplitThreads - 1) / kSplitThreads;
  const uint32_t first = threadIdx.x / 32 * 32 * rounds + threadIdx.x % 32;
  uint32_t* const own_counts = shared.counts + threadIdx.x / 32 * kDigits;
  int at = 0;
#pragma unroll 1
  for (int shift = 0; shift < 8 * static_cast<int>(sizeof(Key)) && range >> shift != 0; shift += kDigitBits, at ^= 1) {
    const Key* const words = shared.two[at];
    const auto digit = [&](uint32_t i) {
      return static_cast<uint32_t>((sort_key(words[i], order) - least) >> shift) & (kDigits - 1);
    };
#pragma unroll 4
    for (uint32_t i = first; i < min(count, first + 32 * rounds); i += 32) atomicAdd(own_counts + digit(i), 1u);
    __syncthreads();
    places_of_counts(shared.counts, shared.warps);
    place_in_bucket(own_counts, first, rounds, count, digit, [&](uint32_t i, uint32_t place) {
      shared.two[at ^ 1][place] = words[i];
      if constexpr (kIndices) shared.two_indices[at ^ 1][place] = shared.two_indices[at][i];
    });
    clear_counts(shared.counts);
    __syncthreads();
  }
  for (uint32_t place = threadIdx.x; place < count; place += kSplitThreads)
    write(place, shared.two[at][place], kIndices ? shared.two_indices[at][place] : 0);
}

template <class Key, bool kIndices, int kItems>
__global__ void __launch_bounds__(kSplitThreads, 1) splitters_kernel(const __grid_constant__ SplitArgs a) {
  constexpr int kPasses = sizeof(Key), kTile = kSplitThreads * kItems;
  constexpr uint32_t kSamples = split_samples(sizeof(Key), kItems);  // of each bucket, and that each block ranks
  constexpr uint32_t kSamplesEach = kSplitters * kSamples / kSplitThreads;
  constexpr uint32_t kSent = kPasses + 1;  // a tag; those of passes are lower
  using P = Parcel<Key, kIndices>;
  using Shared = SplitShared<Key, kIndices, kItems>;
  auto& shared = *reinterpret_cast<Shared*>(dynamic_shared_memory());
  __shared__ volatile Digits digits[kPasses];
  if (a.needed != nullptr && *a.needed == 0) {
    wait_for_predecessor();
    return;
  }
  const uint32_t row = blockIdx.x / a.tiles, tile = blockIdx.x - row * a.tiles;
  const uint32_t begin = tile * kTile, there = min(static_cast<uint32_t>(a.length) - begin, uint32_t{kTile});
  const uint32_t first = threadIdx.x / 32 * 32 * kItems + threadIdx.x % 32;
  const auto is_there = [&](int i) { return first + i * 32 < there; };
  const bool live = first - threadIdx.x % 32 < there;  // the warp has elements
  const uint32_t outer = row / a.inner, column = row - outer * a.inner;

  // The kernel that sets the splitters and the first exchange to zero has already waited for the kernel that makes `x`.
  Key words[kItems], sample[kSamplesEach];
  uint32_t index[kItems];
  const Key* const x = static_cast<const Key*>(a.x) + outer * a.length * a.inner + column;
  const uint32_t parts = min(a.tiles, kSplitters), samples = parts * kSamples;
#pragma unroll
  for (uint32_t i = 0; i < kSamplesEach; ++i) {
    const uint32_t number = threadIdx.x + i * kSplitThreads;
    if (number < samples) sample[i] = x[int64_t{place_of_sample(number, a.sample_step)} * a.inner];
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    index[i] = begin + first + i * 32;
    words[i] = is_there(i) ? x[int64_t{index[i]} * a.inner] : Key{0};
  }
  for (int pass = 0; pass < kPasses; ++pass) set_digits<Key>(digits[pass], pass, a.order);
  // The words of later exchanges, and the parcels, are set to zero by the tiles to which they belong: other tiles wait
  // for the first counts of this one before they read or write them.
  unsigned char* const parcels = a.parcels + row * a.length * P::kBytes;
  const auto sums_of = [&](int exchange) { return a.words + exchange * a.exchange_words + row * a.groups * kDigits; };
  const auto counts_of = [&](int exchange) {
    return a.words + exchange * a.exchange_words + (a.rows * a.groups + row * a.tiles) * kDigits;
  };
  wait_for_predecessor();
  let_dependents_start();
#pragma unroll
  for (int i = 0; i < kItems; ++i)
    if (is_there(i)) P{}.store(parcels, index[i]);
  for (uint32_t e = 1 + threadIdx.x / kDigits; e <= kPasses; e += kSplitThreads / kDigits) {
    sums_of(e)[threadIdx.x % kDigits + tile / a.group * kDigits] = 0;
    counts_of(e)[threadIdx.x % kDigits + tile * kDigits] = 0;
  }
  __threadfence();

  const auto write = [&](uint32_t to, Key word, uint32_t index) {
    const auto k = static_cast<uint32_t>(a.k);
    if (to >= k) return;
    const int64_t at = (int64_t{outer} * k + to) * a.inner + column;
    if (!kIndices || a.values) static_cast<Key*>(a.values)[at] = word;
    if constexpr (kIndices) a.indices[at] = a.carried ? a.carried[row * a.length + index] : static_cast<int32_t>(index);
  };
  const auto publish = [&](int exchange, uint32_t digit, uint32_t count) {
    // only warps that have elements count, and only they have slots past the end
    constexpr uint32_t kOfWarp = 32 * kItems;
    const uint32_t own = count - (threadIdx.x == kDigits - 1 ? (there + kOfWarp - 1) / kOfWarp * kOfWarp - there : 0);
    tell(counts_of(exchange) + digit, sums_of(exchange) + digit, tile, a.group, own);
  };
  // Waits for the counts of all tiles. Returns how many elements of the row have a lower digit than this thread's, and
  // in `all` how many have that.
  const auto await_counts = [&](int exchange, uint32_t digit, uint32_t begin_of_digit, uint32_t& all) {
    uint32_t before = 0;
    all = 0;
    if (threadIdx.x < kDigits)
      add_groups(sums_of(exchange) + digit, a.tiles, a.group, tile / a.group, all, before);
    else
      shared.in_group[threadIdx.x - kDigits] = sum_in_group(counts_of(exchange) + digit, tile, a.group);
    const uint32_t lower = sum_before(all, shared.warps);
    if (threadIdx.x < kDigits)
      shared.shift_of[digit] = static_cast<int32_t>(lower + before + shared.in_group[threadIdx.x] - begin_of_digit);
    return lower;
  };
  static_assert(kSplitThreads == 2 * kDigits);

  {
#pragma unroll
    for (uint32_t i = 0; i < kSamplesEach; ++i) {
      const uint32_t number = threadIdx.x + i * kSplitThreads;
      if (number < samples) shared.samples[number] = sort_key(sample[i], a.order);
    }
    __syncthreads();
    unsigned char* const splitters = a.splitters + row * kSplitters * P::kBytes;
    // A warp ranks a sample: the last of each kSamples in order is a splitter.
    static_assert(kSamples <= kSplitThreads / 32);
    if (tile < parts && threadIdx.x / 32 < kSamples) {
      const uint32_t own = tile * kSamples + threadIdx.x / 32;
      const Key key = shared.samples[own];
      uint32_t rank = 0;
#pragma unroll 8
      for (uint32_t i = threadIdx.x % 32; i < samples; i += 32) {
        const Key other = shared.samples[i];
        rank += other < key || (other == key && i <= own);
      }
      rank = sum_of_warp(rank);
      if (threadIdx.x % 32 == 0 && rank % kSamples == 0) P::of(key, kSent, 0).store(splitters, rank / kSamples - 1);
    }
    clear_counts(shared.counts);
    if (threadIdx.x < kSplitters)
      shared.splitters[threadIdx.x] =
          threadIdx.x + 1 < parts ? P::await(splitters, threadIdx.x, kSent).word() : static_cast<Key>(~Key{0});
    __syncthreads();
    uint32_t bucket[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      bucket[i] = is_there(i) ? bucket_of(shared.splitters, parts - 1, sort_key(words[i], a.order)) : kDigits - 1;
    const uint32_t begin_of_digit = place_by_digit<kSplitThreads, kItems>(
        shared.counts, shared.warps, digits[0], 0, live, [&](int i, const Digits&) { return bucket[i]; },
        [&](uint32_t count) { publish(0, threadIdx.x, count); },
        [&](int i, uint32_t place) {
          shared.words[place] = words[i];
          shared.buckets[place] = static_cast<uint8_t>(bucket[i]);
          if constexpr (kIndices) shared.indices[place] = index[i];
        });
    uint32_t all;
    const uint32_t lower = await_counts(0, threadIdx.x % kDigits, begin_of_digit, all);
    if (threadIdx.x == 2 * tile) shared.begin = lower, shared.count = all;
    if (!__syncthreads_or(threadIdx.x % 2 == 0 && all > Shared::kMost)) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const uint32_t place = threadIdx.x + i * kSplitThreads;
        if (place >= there) break;
        const uint32_t bucket = shared.buckets[place], to = place + shared.shift_of[bucket];
        const uint32_t own = kIndices ? shared.indices[place] : 0;
        if (bucket % 2 == 1)
          write(to, shared.words[place], own);
        else
          P::of(shared.words[place], kSent, own).store(parcels, to);
      }
      const uint32_t begin = shared.begin, count = shared.count;
      if (tile >= parts || count == 0) return;
      const unsigned char* const own = parcels + int64_t{begin} * P::kBytes;
      const auto put = [&](uint32_t place, Key word, uint32_t from) { write(begin + place, word, from); };
      if (threadIdx.x == 0) shared.least = ~Key{0}, shared.most = 0;
      clear_counts(shared.counts);
      __syncthreads();  // the tile is no longer needed
      if constexpr (sorts_by_digits(sizeof(Key), kItems))
        pass_bucket(shared, own, count, kSent, a.order, put);
      else
        compare_bucket(shared, own, count, kSent, a.order, put);
      return;
    }
  }

#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
    clear_counts(shared.counts);
    if (there < kTile) {
      const Key last = last_word<Key>(pass, a.order);
#pragma unroll
      for (int i = 0; i < kItems; ++i)
        if (!is_there(i)) words[i] = last;
    }
    const uint32_t turn = turn_of<Key>(pass, a.order), own_digit = threadIdx.x % kDigits ^ turn;
    const uint32_t begin_of_digit = place_by_digit<kSplitThreads, kItems>(
        shared.counts, shared.warps, digits[pass], turn, live,
        [&](int i, const Digits& digits) { return digit_of<Key>(words[i], digits); },
        [&](uint32_t count) { publish(pass + 1, own_digit, count); },
        [&](int i, uint32_t place) {
          shared.words[place] = words[i];
          if constexpr (kIndices) shared.indices[place] = index[i];
        });
    uint32_t all;
    await_counts(pass + 1, own_digit, begin_of_digit, all);
    const bool is_last = pass == kPasses - 1;
    if (__syncthreads_or(all == a.length) && !is_last) continue;
    const Digits again = read_anew(digits[pass]);
    const uint32_t tag = pass + 1;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t place = threadIdx.x + i * kSplitThreads;
      if (place >= there) break;
      const Key word = shared.words[place];
      const uint32_t to = place + shared.shift_of[digit_of<Key>(word, again)];
      const uint32_t own = kIndices ? shared.indices[place] : 0;
      if (is_last)
        write(to, word, own);
      else
        P::of(word, tag, own).store(parcels, to);
    }
    if (is_last) return;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!is_there(i)) continue;
      const P parcel = P::await(parcels, begin + first + i * 32, tag);
      words[i] = parcel.word();
      if constexpr (kIndices) index[i] = parcel.index();
    }
  }
}

// ---- Launches -------------------------------------------------------------------------------------------------------

template <class Key, bool kIndices, int kItems>
cudaError_t run(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const Rows& rows = problem.rows;
  const auto kernel = splitters_kernel<Key, kIndices, kItems>;
  static_assert(sizeof(SplitShared<Key, kIndices, kItems>) <= split_shared_bytes(sizeof(Key), kItems));
  const SplitShape shape(rows.count(), rows.length, sizeof(Key), kItems);
  auto* const workspace = static_cast<unsigned char*>(buffers.workspace);
  SplitArgs a = {};
  a.x = buffers.x;
  a.carried = buffers.carried;
  a.values = buffers.values;
  a.indices = buffers.indices;
  const auto samples = std::min<uint64_t>(shape.tiles, kSplitters) * split_samples(sizeof(Key), kItems);
  a.sample_step = (static_cast<uint64_t>(rows.length) << 20) / samples;
  a.splitters = workspace;
  a.needed = buffers.needed;
  a.parcels = workspace + shape.parcels;
  a.words = reinterpret_cast<uint32_t*>(workspace + shape.exchanges);
  a.exchange_words = shape.exchange_bytes / 4;
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
  config.block = dim3(kSplitThreads);
  config.shared_bytes = split_shared_bytes(sizeof(Key), kItems);
  config.overlap = plan.overlap;
  config.together = true;
  static Residents residents;
  int fitting = 0;
  cudaError_t error = residents.count(reinterpret_cast<const void*>(kernel), config, &fitting);
  if (error != cudaSuccess) return error;
  if (config.grid.x > static_cast<unsigned>(fitting)) return launch_sweep(stream, plan, problem, buffers);
  // The splitters, and the first exchange.
  error =
      launch_set_words(stream, reinterpret_cast<uint32_t*>(workspace), shape.exchanges / 4 + a.exchange_words, 0, 0);
  return error == cudaSuccess ? launch(stream, config, kernel, a) : error;
}

template <class Key, bool kIndices>
cudaError_t run_items(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  if (plan.items == 4) return run<Key, kIndices, 4>(stream, plan, problem, buffers);
  if (sizeof(Key) == 4 && plan.items == 1)
    return run<Key, kIndices, sizeof(Key) == 4 ? 1 : 2>(stream, plan, problem, buffers);
  return run<Key, kIndices, 2>(stream, plan, problem, buffers);
}

}  // namespace

cudaError_t launch_splitters(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const auto run = problem.key_bits == 64 ? (buffers.indices ? run_items<uint64_t, true> : run_items<uint64_t, false>)
                                          : (buffers.indices ? run_items<uint32_t, true> : run_items<uint32_t, false>);
  return run(stream, plan, problem, buffers);
}

}  // namespace jaxgpuops::sort
