// Sort of rows in one launch, of so few elements that each multiprocessor has one tile at most. Elements of 64 bits are
// split: samples of the row divide its keys into buckets, one for each block. A block sends the elements of its tile to
// their buckets, and then sorts its own bucket. Elements that equal a splitter are in their final places when they are
// sent.
//
// Blocks wait for each other twice: for the counts of all tiles of the row, most of which neighbouring tiles have added
// up to sums, and for the elements of their buckets. An element is sent as a parcel with a tag, which says that it has
// arrived, so no barrier, fence or launch is needed. A bucket is sorted in shared memory, by splitters again, which are
// elements of it: then each element is compared with those between the same two splitters.
//
// Elements of 32 bits are sorted in passes by digits of eight bits, as in sweep.cuh, but blocks stay: each sends its
// elements to their tiles as parcels, and waits for its own. So are those of 64 bits if a bucket is too long, since the
// samples say little about the other elements. One buffer of parcels is enough: a tile whose counts are known has read
// its parcels of the pass before. A pass in which all elements of a row have the same digit moves none.
//
// Bytes moved: the elements are read and written once. In the L2 cache, 16 bytes for an element of 64 bits are written,
// and read three times; in each pass, 8 bytes for one of 32 bits are written and read.
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

constexpr uint32_t kSamples = 2 * kSplitThreads;
constexpr uint32_t kSplitters = 128;  // one of which is not used, so that there are less than kDigits buckets

// Returns the place of a sample in its row: one in each of kSamples equal parts, at a different place of each.
__device__ __forceinline__ uint32_t place_of_sample(uint32_t i, int64_t length) {
  static_assert(kSamples == 1 << 10);
  return static_cast<uint32_t>((uint64_t{i} << 16 | (i * 2654435761u) >> 16) * length >> 26);
}

// Sorts the samples, two of each thread, by a bitonic network, and leaves them in shared memory.
template <class Key>
__device__ __forceinline__ void sort_samples(Key (&own)[2], Key* samples) {
  const uint32_t first = 2 * threadIdx.x;
#pragma unroll
  for (uint32_t size = 2; size <= kSamples; size *= 2) {
    const bool rises = (first & size) == 0;
#pragma unroll
    for (uint32_t stride = size / 2; stride > 1; stride /= 2) {
      const bool takes_less = ((first & stride) == 0) == rises;
      Key other[2];
      if (stride > 32) {
        samples[first] = own[0], samples[first + 1] = own[1];
        __syncthreads();
        other[0] = samples[first ^ stride], other[1] = samples[(first ^ stride) + 1];
        __syncthreads();
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) other[i] = __shfl_xor_sync(kEveryLane, own[i], stride / 2);
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

template <class Key, int kItems>
struct SplitShared {
  static constexpr int kTile = kSplitThreads * kItems, kMost = split_most(sizeof(Key), kItems);
  uint32_t counts[kSplitThreads / 32 * kDigits];
  union {
    struct {
      Key words[kTile];
      uint32_t indices[kTile];
      uint8_t buckets[kTile];
    };
    struct {
      Key keys[kMost];
      uint32_t from[kMost];  // the place before the sort, and above it the bucket
    };
    Key samples[kSamples];
  };
  Key splitters[kSplitters];
  uint32_t in_group[kDigits];  // for each digit, the elements of the tiles of the group before this one
  int32_t shift_of[kDigits];   // the position of its elements in the row minus that in the tile
  uint32_t lows[kDigits + 1];  // how many elements of the bucket are in lower buckets
  uint32_t warps[kDigits / 32];
  uint32_t begin, count;  // of the block's bucket
};

// Sorts `count` elements, whose parcels arrive. Calls write(place, parcel).
template <class Key, bool kIndices, int kItems, class Write>
__device__ __forceinline__ void sort_bucket(SplitShared<Key, kItems>& shared, const unsigned char* parcels,
                                            uint32_t count, uint32_t tag, const SortOrder& order, Write write) {
  using P = Parcel<Key, kIndices>;
  constexpr int kWarps = kSplitThreads / 32, kLanes = kSplitThreads / kSplitters;
  const auto key_of = [&](const P& parcel) { return sort_key(parcel.word(), order); };
  clear_counts(shared.counts);
  __syncthreads();  // the tile is no longer needed
  // Four lanes compare a splitter with the others.
  Key* const drawn = shared.keys;
  const auto place_of = [](uint32_t i) { return i + i / (kSplitters / kLanes); };  // so that lanes meet in no bank
  if (threadIdx.x < kSplitters)
    drawn[place_of(threadIdx.x)] = key_of(P::await(parcels, threadIdx.x * count / kSplitters, tag));
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

  // Each warp has neighbouring elements. Calls f(i, key, bucket) for those of this thread; of slots past the end, the
  // bucket is the last.
  const uint32_t rounds = (count + kSplitThreads - 1) / kSplitThreads;
  const uint32_t first = threadIdx.x / 32 * 32 * rounds + threadIdx.x % 32;
  const auto each = [&](auto f) {
    constexpr int kAhead = 4;
#pragma unroll 1
    for (uint32_t r = 0; r < rounds; r += kAhead) {
      P parcel[kAhead];
      const auto at = [&](int j) { return first + (r + j) * 32; };
      const auto is_there = [&](int j) { return r + j < rounds && at(j) < count; };
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        if (is_there(j)) parcel[j] = P::load(parcels, at(j));
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (r + j >= rounds) break;
        if (is_there(j) && !parcel[j].has(tag)) parcel[j] = P::await(parcels, at(j), tag);
        const Key key = key_of(parcel[j]);
        f(at(j), key, is_there(j) ? bucket_of(shared.splitters, kSplitters - 1, key) : kDigits - 1);
      }
    }
  };
  uint32_t* const own_counts = shared.counts + threadIdx.x / 32 * kDigits;
  each([&](uint32_t i, Key, uint32_t bucket) {
    if (i < count) atomicAdd(own_counts + bucket, 1u);
  });
  __syncthreads();
  uint32_t total = 0, of_warp[kWarps];
  if (threadIdx.x < kDigits)
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += of_warp[w] = shared.counts[w * kDigits + threadIdx.x];
  const uint32_t low = sum_before(total, shared.warps);
  if (threadIdx.x < kDigits) {
    shared.lows[threadIdx.x] = low;
    uint32_t last = low - 1;  // the place of the last element before those of the warp and the bucket
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      shared.counts[w * kDigits + threadIdx.x] = last;
      last += of_warp[w];
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
  for (uint32_t place = threadIdx.x; place < count; place += kSplitThreads) {
    const uint32_t from = shared.from[place], bucket = from >> 16;
    const P parcel = P::load(parcels, from & 0xffff);
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
    write(rank, parcel);
  }
}

template <class Key, bool kIndices, int kItems>
__global__ void __launch_bounds__(kSplitThreads, 1) splitters_kernel(const __grid_constant__ SplitArgs a) {
  constexpr int kPasses = sizeof(Key), kTile = kSplitThreads * kItems;
  constexpr bool kSplits = has_splitters(sizeof(Key));
  constexpr int kExchanges = kPasses + kSplits;
  constexpr uint32_t kSent = kPasses + 1;  // a tag; those of passes are lower
  using P = Parcel<Key, kIndices>;
  using Shared = SplitShared<Key, kItems>;
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

  // The kernel that sets the words of the first exchange to zero has already waited for the kernel that makes `x`.
  Key words[kItems], sample[2];
  uint32_t index[kItems];
  const Key* const x = static_cast<const Key*>(a.x) + outer * a.length * a.inner + column;
#pragma unroll
  for (int i = 0; i < 2 * kSplits; ++i)
    sample[i] = x[int64_t{place_of_sample(2 * threadIdx.x + i, a.length)} * a.inner];
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
  for (uint32_t e = 1 + threadIdx.x / kDigits; e < kExchanges; e += kSplitThreads / kDigits) {
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

  if constexpr (kSplits) {
#pragma unroll
    for (int i = 0; i < 2; ++i) sample[i] = sort_key(sample[i], a.order);
    sort_samples(sample, shared.samples);
    const uint32_t parts = min(a.tiles, kSplitters);
    if (threadIdx.x < kSplitters)
      shared.splitters[threadIdx.x] =
          threadIdx.x + 1 < parts ? shared.samples[(threadIdx.x + 1) * kSamples / parts] : static_cast<Key>(~Key{0});
    clear_counts(shared.counts);
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
      const uint32_t begin = shared.begin;
      if (tile < parts && shared.count > 0)
        sort_bucket<Key, kIndices>(
            shared, parcels + int64_t{begin} * P::kBytes, shared.count, kSent, a.order,
            [&](uint32_t to, const P& parcel) { write(begin + to, parcel.word(), parcel.index()); });
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
        [&](uint32_t count) { publish(pass + kSplits, own_digit, count); },
        [&](int i, uint32_t place) {
          shared.words[place] = words[i];
          if constexpr (kIndices) shared.indices[place] = index[i];
        });
    uint32_t all;
    await_counts(pass + kSplits, own_digit, begin_of_digit, all);
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
  static_assert(sizeof(SplitShared<Key, kItems>) <= split_shared_bytes(sizeof(Key), kItems));
  const SplitShape shape(rows.count(), rows.length, sizeof(Key), kItems);
  auto* const workspace = static_cast<unsigned char*>(buffers.workspace);
  SplitArgs a = {};
  a.x = buffers.x;
  a.carried = buffers.carried;
  a.values = buffers.values;
  a.indices = buffers.indices;
  a.needed = buffers.needed;
  a.parcels = workspace + shape.parcels;
  a.words = reinterpret_cast<uint32_t*>(workspace);
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
  error = launch_set_words(stream, a.words, a.exchange_words, 0, 0);
  return error == cudaSuccess ? launch(stream, config, kernel, a) : error;
}

template <class Key, bool kIndices>
cudaError_t run_items(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  constexpr int kFew = split_items(sizeof(Key), true), kMany = split_items(sizeof(Key), false);
  return plan.items == kFew ? run<Key, kIndices, kFew>(stream, plan, problem, buffers)
                            : run<Key, kIndices, kMany>(stream, plan, problem, buffers);
}

}  // namespace

cudaError_t launch_splitters(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const auto run = problem.key_bits == 64 ? (buffers.indices ? run_items<uint64_t, true> : run_items<uint64_t, false>)
                                          : (buffers.indices ? run_items<uint32_t, true> : run_items<uint32_t, false>);
  return run(stream, plan, problem, buffers);
}

}  // namespace jaxgpuops::sort
