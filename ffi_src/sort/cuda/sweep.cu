// Radix sort of rows of any length, by a digit of eight bits at a time from the lowest up. A first kernel counts all
// digits; then one pass over the row sorts it by each digit. A pass in which all elements of a row have the same digit
// is skipped, which the first kernel decides.
//
// In a pass a block takes a tile of a row, sorts it by the digit in shared memory, and writes each group of equal
// digits to where it belongs. It learns these positions by decoupled look-back: each tile publishes its digit counts as
// soon as it has them, and soon after their sums over all tiles before it. The first pass makes the indices, or reads
// the numbers that are carried instead. The last pass does not write keys that are not wanted.
//
// If all blocks of a pass run at the same time, no kernel counts before the passes, and no block looks back: each block
// waits for the digit counts of all tiles of its row, most of which neighbouring tiles have added up to sums. No pass
// is skipped then.
//
// Integers of 8 bits that are sorted without indices need no pass: the counts say which elements a row has, and a
// second kernel writes them.
//
// Bytes moved: the keys are read once for counting; each pass reads and writes keys and indices once. The algorithm is
// that of Adinets and Merrill, "Onesweep" (2022).
#include "common/cuda/residents.cuh"
#include "count/cuda/launch.h"
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
  __shared__ uint32_t counts[kPasses * kDigits], active;
  __shared__ bool last;
  const int64_t blocks = (a.length + a.elements - 1) / a.elements;
  const int64_t row = blockIdx.x / blocks, block = blockIdx.x % blocks;
  for (int c = threadIdx.x; c < kPasses * kDigits; c += kCountThreads) counts[c] = 0;
  let_dependents_start();
  __syncthreads();

  const Key* const x = static_cast<const Key*>(a.x) + row * a.length;
  const int64_t begin = block * a.elements, end = min(begin + a.elements, a.length);
  const auto count = [&](Key bits) {
#pragma unroll
    for (int p = 0; p < kPasses; ++p)
      atomicAdd(counts + p * kDigits + digit_of<Key>(word_of(bits, a.order), digits_of<Key>(p, a.order)), 1u);
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
#pragma unroll 1
  for (; at < end; at += kCountThreads) count(x[at]);

  wait_for_predecessor();  // the predecessor sets the workspace to zero
  // Sets this block's share of the status words, by which tiles communicate later, to zero.
  const int64_t words = a.tiles * kPasses * kDigits, share = (words + blocks - 1) / blocks;
  uint32_t* const status = a.status + row * words;
#pragma unroll 2
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
  // Each warp adds up the counts of a pass: each lane those of neighbouring digits.
  constexpr int kOfLane = kDigits / 32;
  static_assert(kPasses <= kCountThreads / 32);
  if (const uint32_t p = threadIdx.x / 32; p < kPasses) {
    const uint32_t turn = turn_of<Key>(p, a.order), first = threadIdx.x % 32 * kOfLane;
    uint32_t own[kOfLane], total = 0;
    bool differ = false;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      own[i] = counts[p * kDigits + ((first + i) ^ turn)];
      differ |= own[i] != 0 && own[i] != a.length;
      total += own[i];
    }
    uint32_t less = sum_up_to_lane(total) - total;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      all[p * kDigits + ((first + i) ^ turn)] = less;
      less += own[i];
    }
    if (differ) atomicOr(&active, 1u << p);
  }
  __syncthreads();
  // At least one pass must run, since it copies the elements to the results.
  if (threadIdx.x == 0) a.heads[row].active = active ? active : 1;
}

// ---- Passes ---------------------------------------------------------------------------------------------------------

// A status word says what a tile has published about a digit: 0 means nothing yet; with the bit kSum it is the count of
// this tile and all before it; else it is the tile's own count plus 1.
constexpr uint32_t kSum = 1u << 31;
constexpr int kLook = 4, kSmallLook = 8;  // status words that a thread loads at once
// The sum of a group says in its upper bits how many tiles have added their counts to it.
constexpr int kArrivedBits = 24;

struct PassArgs {
  const void* x;
  const int32_t* carried;  // numbers that the first pass takes for indices; null: it makes indices
  void* keys[2];           // buffers: all passes but the last write to the two in turn
  int32_t* indices[2];     // buffers of indices, used in turn like those of keys
  void* values;            // where the last pass writes the sorted elements; null: not wanted
  int32_t* last_indices;   // where the last pass writes the indices
  int64_t k;               // the last pass writes only the first k of each row
  RowHead* heads;
  const uint32_t* counts;
  uint32_t* status;
  uint32_t* sums;  // [row][pass][group][digit], if tiles exchange their counts
  int64_t length, tiles, group, groups;
  int pass;
  bool tickets;    // whether there may be more blocks than run at the same time
  bool exchanges;  // whether all tiles of a row tell each other their counts, and no kernel has counted digits
  SortOrder order;
};

template <class Key, int kItems>
struct PassShared {
  static constexpr int kTile = kSweepThreads * kItems;
  uint32_t counts[kSweepThreads / 32 * kDigits];
  Word<Key> words[kTile];
  int32_t indices[kTile];  // must be the last member: calls without indices allocate shared memory only up to here
};

template <class Key, bool kIndices, bool kSmall, bool kExchanges>
__global__ void __launch_bounds__(kSweepThreads, sweep_blocks(sizeof(Key), kSmall, kIndices))
    pass_kernel(const __grid_constant__ PassArgs a) {
  constexpr int kItems = sweep_items(sizeof(Key), kSmall, kIndices);
  constexpr int kPasses = sizeof(Key), kTile = kSweepThreads * kItems;
  auto& shared = *reinterpret_cast<PassShared<Key, kItems>*>(dynamic_shared_memory());
  __shared__ uint32_t warps[kDigits / 32], ticket;
  __shared__ volatile Digits digits;
  // For each digit: the position of its elements in the row minus that in the tile.
  __shared__ int32_t shift_of[kDigits];
  clear_counts(shared.counts);
  set_digits<Key>(digits, a.pass, a.order);
  const bool exchanges = kExchanges && a.exchanges;
  // The kernel that sets the words of an exchange to zero has already waited for the kernel that makes `x`.
  const bool begins = exchanges && a.pass == 0;
  if (a.tickets || (a.pass == 0 && !begins)) wait_for_predecessor();
  if (a.tickets && threadIdx.x == 0) ticket = atomicAdd(&a.heads->tickets[a.pass], 1u);
  __syncthreads();
  // Neighbouring blocks have neighbouring tiles, whose short runs meet in the same sectors of the L2 cache.
  const auto tiles = static_cast<uint32_t>(a.tiles), number = a.tickets ? ticket : blockIdx.x;
  const uint32_t row = number / tiles, tile = number - row * tiles;
  // The pass before has waited for the kernel that counts before it let this one start.
  const uint32_t active = exchanges ? (1u << kPasses) - 1 : __ldcg(&a.heads[row].active), this_pass = 1u << a.pass;
  if (!begins) wait_for_predecessor();
  let_dependents_start();
  if (!(active & this_pass)) return;
  const bool is_first = !(active & (this_pass - 1)), is_last = active < 2 * this_pass;
  const int to = __popc(active >> a.pass) % 2 == 1 ? 0 : 1;  // 0 for the last pass, whose buffers may be the results
  const int64_t begin = int64_t{tile} * kTile;
  const uint32_t first = threadIdx.x / 32 * 32 * kItems + threadIdx.x % 32;
  const int64_t at = row * a.length + begin + first;
  const Key* const from_keys = (is_first ? static_cast<const Key*>(a.x) : static_cast<const Key*>(a.keys[1 - to])) + at;
  const int32_t* const from_indices = kIndices ? (is_first ? a.carried : a.indices[1 - to]) + at : nullptr;
  const bool makes_indices = is_first && a.carried == nullptr;
  const auto there = static_cast<uint32_t>(min(int64_t{kTile}, a.length - begin));
  const uint32_t turn = turn_of<Key>(a.pass, a.order);

  Word<Key> words[kItems];
  int32_t index[kIndices ? kItems : 1];
  // `whole`: there is a whole tile, so that nothing has to be compared.
  const auto is_there = [&](int i) { return first + i * 32 < there; };
  const auto load = [&](auto whole) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) words[i] = whole || is_there(i) ? from_keys[i * 32] : Key{0};
    if constexpr (kIndices) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        index[i] = static_cast<int32_t>(begin + first + i * 32);
        if (!makes_indices && (whole || is_there(i))) index[i] = from_indices[i * 32];
      }
    }
  };
  const bool is_whole = there == kTile;
  is_whole ? load(std::true_type{}) : load(std::false_type{});
#pragma unroll
  for (int i = 0; i < kItems; ++i) words[i] = word_of(static_cast<Key>(words[i]), a.order);
  if (!is_whole) {
    const Word<Key> last = last_word<Key>(a.pass, a.order);
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (!is_there(i)) words[i] = last;
  }
  if (begins) wait_for_predecessor();

  const int64_t row_pass = int64_t{row} * kPasses + a.pass;
  const uint32_t own_digit = threadIdx.x ^ turn;
  uint32_t* const status = a.status + row_pass * a.tiles * kDigits + own_digit;
  uint32_t* const sums = a.sums + row_pass * a.groups * kDigits + own_digit;
  const auto group = static_cast<uint32_t>(a.group);
  uint32_t before = 0, own = 0;
  const auto publish = [&](uint32_t count) {
    constexpr uint32_t kOfWarp =
        32 * kItems;  // only warps that have elements count, and only they have slots past the end
    own = count - (threadIdx.x == kDigits - 1 ? (there + kOfWarp - 1) / kOfWarp * kOfWarp - there : 0);
    if (tile == 0 && !exchanges) {
      before = a.counts[row_pass * kDigits + own_digit];
      store_relaxed(status, kSum | (before + own));
    } else {
      store_relaxed(status + int64_t{tile} * kDigits, own + 1);
      if (exchanges) atomicAdd(sums + tile / group * kDigits, (1u << kArrivedBits) + own);
    }
  };
  const uint32_t begin_of_digit = place_by_digit<kSweepThreads, kItems>(
      shared.counts, warps, digits, turn, first - threadIdx.x % 32 < there,
      [&](int i, const Digits& digits) { return digit_of<Key>(words[i], digits); }, publish,
      [&](int i, uint32_t place) {
        shared.words[place] = words[i];
        if constexpr (kIndices) shared.indices[place] = index[i];
      });
  if (exchanges) {
    uint32_t all = 0;
    const uint32_t own_group = tile / group, groups = (tiles - 1) / group + 1;
    // Calls f(i, word) for words first to last - 1 as soon as is_there(i, word).
    const auto read = [&](const uint32_t* words, uint32_t first, uint32_t last, auto is_there, auto f) {
#pragma unroll 1
      for (uint32_t t = first; t < last; t += kSmallLook) {
        uint32_t word[kSmallLook];
        const auto ask = [&](int j) { word[j] = load_relaxed(words + min(t + j, last - 1) * kDigits); };
#pragma unroll
        for (int j = 0; j < kSmallLook; ++j) ask(j);
#pragma unroll
        for (int j = 0; j < kSmallLook; ++j) {
          while (!is_there(min(t + j, last - 1), word[j])) ask(j);
          if (t + j < last) f(t + j, word[j]);
        }
      }
    };
    if (threadIdx.x < kDigits) {
      read(
          sums, 0, groups,
          [&](uint32_t g, uint32_t word) { return word >> kArrivedBits == min(group, tiles - g * group); },
          [&](uint32_t g, uint32_t word) {
            const uint32_t sum = word & ((1u << kArrivedBits) - 1);
            all += sum;
            if (g < own_group) before += sum;
          });
      read(
          status, own_group * group, tile, [](uint32_t, uint32_t word) { return word != 0; },
          [&](uint32_t, uint32_t word) { before += word - 1; });
    }
    before += sum_before(all, warps);  // the elements of lower digits in all tiles, too
  }
  if (threadIdx.x < kDigits) {
    if (tile > 0 && !exchanges) {
      constexpr int kAhead = kSmall ? kSmallLook : kLook;
      for (auto t = static_cast<int32_t>(tile) - 1; t >= 0;) {
        uint32_t published[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) published[j] = load_relaxed(status + int64_t{max(t - j, 0)} * kDigits);
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          if (t < 0 || published[j] == 0) break;
          const bool is_sum = published[j] & kSum;
          before += is_sum ? published[j] & ~kSum : published[j] - 1;
          t = is_sum ? -1 : t - 1;
        }
      }
      store_relaxed(status + int64_t{tile} * kDigits, kSum | (before + own));
    }
    shift_of[own_digit] = static_cast<int32_t>(before - begin_of_digit);
  }
  __syncthreads();

  const auto wanted = static_cast<uint32_t>(is_last ? a.k : a.length);
  Key* to_keys = static_cast<Key*>(is_last ? a.values : a.keys[to]);
  int32_t* to_indices = is_last ? a.last_indices : a.indices[to];
  const bool writes_keys = !kIndices || to_keys != nullptr;
  to_keys += int64_t{row} * wanted;
  to_indices += int64_t{row} * wanted;
  const Digits again = read_anew(digits);
  const auto store = [&](int i, bool whole) {
    const uint32_t place = threadIdx.x + i * kSweepThreads;
    const Word<Key> word = shared.words[place];
    const uint32_t to = place + shift_of[digit_of<Key>(word, again)];
    if (!whole && (place >= there || to >= wanted)) return;
    if (writes_keys) to_keys[to] = static_cast<Key>(word);
    if constexpr (kIndices) to_indices[to] = shared.indices[place];
  };
  if (is_whole && wanted == a.length) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) store(i, true);
  } else {
#pragma unroll 4
    for (int i = 0; i < kItems; ++i) store(i, false);
  }
}

// ---- Elements by their counts ---------------------------------------------------------------------------------------

constexpr int kFillThreads = 256;

struct FillArgs {
  uint8_t* values;
  const uint32_t* counts;  // [row][key]: how many elements have a lower key
  int64_t length, k;
  uint32_t blocks;  // of a row
  SortOrder order;
};

// A thread writes a vector of 16 elements.
__global__ void __launch_bounds__(kFillThreads) fill_kernel(const __grid_constant__ FillArgs a) {
  __shared__ uint32_t ends[kDigits];  // for each key, how many elements have it or a lower one
  const int64_t row = blockIdx.x / a.blocks, block = blockIdx.x - row * a.blocks;
  wait_for_predecessor();
  let_dependents_start();
  ends[threadIdx.x] = threadIdx.x + 1 < kDigits ? a.counts[row * kDigits + threadIdx.x + 1] : a.length;
  __syncthreads();
  uint8_t* const to = a.values + row * a.k;
  const int64_t place = (block * kFillThreads + threadIdx.x) * 16 - reinterpret_cast<uintptr_t>(to) % 16;
  const auto begin = static_cast<uint32_t>(max(place, int64_t{0}));
  const auto end = static_cast<uint32_t>(min(place + 16, a.k));
  if (place >= a.k || end <= begin) return;
  uint32_t key = 0;  // of the first element: the least key up to which there are more elements than before it
#pragma unroll
  for (uint32_t step = kDigits / 2; step > 0; step /= 2)
    if (ends[key + step - 1] <= begin) key += step;
  const auto element = [&] {
    return static_cast<uint8_t>(decode(static_cast<uint8_t>(key ^ a.order.invert), a.order.ascending.order));
  };
  uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) words[w] = element() * 0x01010101u;
  if (place + 16 > ends[key] || end - begin < 16) {
#pragma unroll 1
    for (uint32_t at = begin; at < end; ++at) {
      while (ends[key] <= at) ++key;
      to[at] = element();
    }
  } else {
    *reinterpret_cast<uint4*>(to + place) = uint4{words[0], words[1], words[2], words[3]};
  }
}

cudaError_t run_bytes(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const int64_t rows = problem.rows.count(), length = problem.rows.length;
  auto* const workspace = static_cast<unsigned char*>(buffers.workspace);
  const SweepShape shape(rows, length, problem.k, 1, true, false, plan.small);
  auto* const counts = reinterpret_cast<uint32_t*>(workspace + shape.counts);
  cudaError_t error = count::launch_set(stream, reinterpret_cast<uint32_t*>(workspace), shape.status / 4, 0, 0);
  if (error != cudaSuccess) return error;
  Launch config;
  config.overlap = plan.overlap;
  config.block = dim3(kCountThreads);
  config.grid = dim3(static_cast<unsigned>(rows * ((length + plan.counted - 1) / plan.counted)));
  error = launch(stream, config, count_kernel<uint8_t>,
                 CountArgs{buffers.x, reinterpret_cast<RowHead*>(workspace), counts, nullptr, rows, length, 0,
                           plan.counted, problem.order});
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<uint32_t>((problem.k + 15) / (16 * kFillThreads) + 1);
  config.block = dim3(kFillThreads);
  config.grid = dim3(static_cast<unsigned>(rows * blocks));
  return launch(stream, config, fill_kernel,
                FillArgs{static_cast<uint8_t*>(buffers.values), counts, length, problem.k, blocks, problem.order});
}

// ---- Launches -------------------------------------------------------------------------------------------------------

template <class Key, bool kIndices>
cudaError_t run(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const int64_t rows = problem.rows.count(), length = problem.rows.length;
  const SweepShape shape(rows, length, problem.k, sizeof(Key), buffers.values != nullptr, kIndices, plan.small);
  auto* const workspace = static_cast<unsigned char*>(buffers.workspace);
  auto* const heads = reinterpret_cast<RowHead*>(workspace);
  auto* const counts = reinterpret_cast<uint32_t*>(workspace + shape.counts);
  auto* const status = reinterpret_cast<uint32_t*>(workspace + shape.status);
  PassArgs a = {};
  a.x = buffers.x;
  a.carried = buffers.carried;
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
  a.length = length;
  a.tiles = shape.tiles;
  a.sums = reinterpret_cast<uint32_t*>(workspace + shape.sums);
  a.group = shape.group;
  a.groups = shape.groups;
  a.tickets = plan.tickets;
  a.order = problem.order;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(rows * shape.tiles));
  config.block = dim3(kSweepThreads);
  config.shared_bytes = sweep_shared_bytes(sizeof(Key), plan.small, kIndices);
  // Large tiles of 16 bits have a kernel that cannot exchange counts, since what it takes to do so costs registers.
  constexpr bool kHasSmall = sizeof(Key) > 1, kCan = sizeof(Key) <= 2, kAlways = sizeof(Key) == 1;
  const auto kernel = plan.small       ? pass_kernel<Key, kIndices, kHasSmall, true>
                      : plan.exchanges ? pass_kernel<Key, kIndices, false, kCan>
                                       : pass_kernel<Key, kIndices, false, kAlways>;
  cudaError_t error = cudaSuccess;
  if (plan.exchanges) {
    static Residents residents;
    int fitting = 0;
    error = residents.count(reinterpret_cast<const void*>(kernel), config, &fitting);
    if (error != cudaSuccess) return error;
    a.exchanges = config.together = rows * shape.tiles <= fitting;
  }
  // A kernel clears the workspace instead of a memset, since the next kernel may start before this one ends.
  error = count::launch_set(stream, reinterpret_cast<uint32_t*>(workspace),
                            (a.exchanges ? shape.keys : shape.status) / 4, 0, 0);
  if (error != cudaSuccess) return error;
  config.overlap = plan.overlap;
  const int64_t blocks = (length + plan.counted - 1) / plan.counted;
  if (!a.exchanges) {
    Launch count;
    count.grid = dim3(static_cast<unsigned>(rows * blocks));
    count.block = dim3(kCountThreads);
    count.overlap = plan.overlap;
    error = launch(stream, count, count_kernel<Key>,
                   CountArgs{buffers.x, heads, counts, status, rows, length, shape.tiles, plan.counted, problem.order});
  }
  for (a.pass = 0; a.pass < shape.passes && error == cudaSuccess; ++a.pass) error = launch(stream, config, kernel, a);
  return error;
}

}  // namespace

cudaError_t launch_sweep(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    if constexpr (sizeof(Key) == 1)
      if (!buffers.indices && !plan.exchanges && problem.order.ascending.sign == 0)
        return run_bytes(stream, plan, problem, buffers);
    return buffers.indices ? run<Key, true>(stream, plan, problem, buffers)
                           : run<Key, false>(stream, plan, problem, buffers);
  });
}

}  // namespace jaxgpuops::sort
