// Top-k along an axis that is not the last, k <= 64, columns of up to 16 KB. Many long columns are streamed, see below.
// Otherwise a block brings neighbouring columns to shared memory together, transposed on the way, and 4 to 32 lanes of
// a warp select from each.
//
// Each lane splits its elements into four interleaved parts and keeps each part's maximum, its delegate. The k-th
// largest delegate is a threshold that k elements reach and few more do (about k for random data), all of them in parts
// whose delegate reaches it: only those parts, about k of them, are read again. The survivors are ranked by comparing
// all with all. Where more arrive than there is room for (ties, or large values that share a part), a radix select by
// 8-bit digits finds the k-th key exactly, and ties at it are taken in index order.
//
// Bytes moved: the input once, k (value + index) out. After: Dr. Top-k's delegates (arXiv 2109.08219).
#include "common/cuda/async_copy.cuh"
#include "common/cuda/launch.cuh"
#include "topk/cuda/candidates.cuh"
#include "topk/cuda/columns_shape.h"
#include "topk/cuda/delegates.cuh"
#include "topk/cuda/kernels.h"

namespace jaxgpuops::topk {
namespace {

struct Args {
  const void* x;
  void* values;
  int32_t* indices;
  KeyOrder order;
  int64_t inner;
  uint32_t length, k, capacity;
  uint32_t pitch, tile_bytes, bytes;  // shared memory, see ColumnsShape
  bool sorted;
};

// The whole warp selects exactly the k largest of one row: it finds the k-th key, then gathers in index order. Mostly
// `floor` is the k-th key, and its ties caused the overflow; otherwise a radix select finds the key, from the highest
// digit down.
template <class Key>
__device__ __noinline__ void radix_select(const Key* row, uint32_t length, uint32_t k, Key floor, KeyOrder order,
                                          uint32_t* words, uint32_t* indices, uint32_t* histogram) {
  const uint32_t lane = threadIdx.x & 31;
  uint32_t above = 0;
#pragma unroll 4
  for (uint32_t i = lane; i < length; i += 32) above += encode(row[i], order) > floor;
  above = __shfl_sync(kFullWarp, inclusive_scan_warp(above), 31);
  const bool found = above < k;
  Key prefix = found ? floor : 0, known = 0;
  uint32_t needed = found ? k - above : k;
  for (int shift = 8 * sizeof(Key) - 8; shift >= 0 && !found; shift -= 8) {
    for (uint32_t i = lane; i < 256; i += 32) histogram[i] = 0;
    __syncwarp();
    for (uint32_t start = 0; start < length; start += 32) {
      const uint32_t i = start + lane;
      const Key key = i < length ? encode(row[i], order) : Key{0};
      const bool counts = i < length && (key & known) == prefix;
      const uint32_t digit = counts ? (key >> shift) & 255 : 256;
      const uint32_t same = __match_any_sync(kFullWarp, digit);
      if (counts && lane == __ffs(same) - 1) atomicAdd(&histogram[digit], __popc(same));
    }
    __syncwarp();
    // Lane l sums the counts of digits 255 - 8 l downwards; the digit of the k-th key is where the running count
    // reaches `needed`.
    uint32_t sum = 0;
    for (int j = 0; j < 8; ++j) sum += histogram[255 - lane * 8 - j];
    uint32_t higher = inclusive_scan_warp(sum) - sum, digit = 0, rest = 0;
    for (int j = 0; j < 8; ++j) {
      const uint32_t count = histogram[255 - lane * 8 - j];
      if (higher < needed && higher + count >= needed) digit = 255 - lane * 8 - j, rest = needed - higher;
      higher += count;
    }
    const uint32_t owner = __ffs(__ballot_sync(kFullWarp, rest != 0)) - 1;
    digit = __shfl_sync(kFullWarp, digit, owner);
    needed = __shfl_sync(kFullWarp, rest, owner);
    prefix = static_cast<Key>(prefix | static_cast<Key>(digit) << shift);
    known = static_cast<Key>(known | Key{255} << shift);
    __syncwarp();
  }
  uint32_t filled = 0;
  for (uint32_t start = 0; start < length && filled < k; start += 32) {
    const uint32_t i = start + lane, before = (1u << lane) - 1;
    const Key key = i < length ? encode(row[i], order) : Key{0};
    const uint32_t ties = __ballot_sync(kFullWarp, i < length && key == prefix);
    const bool taken = i < length && (key > prefix || (key == prefix && __popc(ties & before) < needed));
    const uint32_t all = __ballot_sync(kFullWarp, taken);
    const uint32_t at = filled + __popc(all & before);
    if (taken) words[at] = Ranked<Key>::word(key, i), indices[at] = i;
    filled += __popc(all);
    needed -= min(needed, static_cast<uint32_t>(__popc(ties)));
  }
  __syncwarp();
}

template <class Key, int kLanes, bool kVectors>
__global__ void __launch_bounds__(32 * kColumnWarps) columns_kernel(const Args a) {
  using Order = Ranked<Key>;
  constexpr uint32_t kRows = 32 / kLanes;
  constexpr uint32_t kOwn = 4;  // candidates that a lane ranks at once
  constexpr uint32_t kVector = kVectors ? 16 / sizeof(Key) : 1;
  constexpr uint32_t kWarps = kColumnWarps;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32, group = lane / kLanes, g = lane % kLanes;
  unsigned char* mine = shared_bytes + a.tile_bytes + warp * a.bytes;
  constexpr uint32_t kTile = kWarps * kRows;  // columns of a block
  const int64_t tiles = (a.inner + kTile - 1) / kTile, outer = blockIdx.x / tiles;
  const int64_t first = blockIdx.x % tiles * kTile;
  const uint32_t columns = static_cast<uint32_t>(min(static_cast<int64_t>(kTile), a.inner - first));
  Key* tile = reinterpret_cast<Key*>(shared_bytes);
  const uint32_t column = threadIdx.x % kTile;
  const Key* from = static_cast<const Key*>(a.x) + outer * a.length * a.inner + first + column;
  if (column < columns) {
#pragma unroll 8
    for (uint32_t i = threadIdx.x / kTile; i < a.length; i += 32 * kWarps / kTile) {
      if constexpr (sizeof(Key) == 4) {
        copy_async<4>(&tile[column * a.pitch + i], &from[i * a.inner]);
      } else {
        tile[column * a.pitch + i] = from[i * a.inner];
      }
    }
  }
  commit_async_copies();
  wait_for_async_copies<0>();
  __syncthreads();
  Key* data = tile + warp * kRows * a.pitch;  // this warp's columns, now rows a.pitch apart
  const uint32_t rows = min(kRows, columns - min(columns, warp * kRows));
  if (rows == 0) return;

  // Candidates of the warp's rows: words, then indices; counters; the digit histogram of the rare radix select, where
  // the parts to read again are listed before any digit is counted; and, for index order, what was chosen.
  uint32_t* all_words = reinterpret_cast<uint32_t*>(mine);
  uint32_t* all_indices = all_words + kRows * a.capacity;
  uint32_t* counts = all_indices + kRows * a.capacity;
  uint32_t* histogram = counts + kRows;
  uint32_t* words_of = all_words + group * a.capacity;
  uint32_t* indices = all_indices + group * a.capacity;
  uint32_t* chosen = histogram + 256 + group * a.k;
  uint32_t* chosen_indices = histogram + 256 + (kRows + group) * a.k;
  uint8_t* parts = reinterpret_cast<uint8_t*>(histogram) + group * kLanes * kParts;

  if (lane < kRows) counts[lane] = 0;
  __syncwarp();
  const bool live = group < rows;
  const Key* row = data + (live ? group : 0) * a.pitch;
  const uint32_t loads = a.length / kVector;
  // A part is one 32-bit word of each of a lane's 16-byte loads, or every fourth of its single elements.
  const uint32_t* words = reinterpret_cast<const uint32_t*>(row);
  const Lanes<Key> lanes(a.order);

  uint32_t delegates[kParts] = {};
  if constexpr (kVectors) {
    uint32_t packed[kParts] = {};
#pragma unroll 4
    for (uint32_t v = g; v < loads; v += kLanes) {
      const uint4 load = *reinterpret_cast<const uint4*>(words + v * 4);
      packed[0] = lanes.max(packed[0], lanes.encode(load.x));
      packed[1] = lanes.max(packed[1], lanes.encode(load.y));
      packed[2] = lanes.max(packed[2], lanes.encode(load.z));
      packed[3] = lanes.max(packed[3], lanes.encode(load.w));
    }
#pragma unroll
    for (int d = 0; d < kParts; ++d) delegates[d] = lanes.largest(packed[d]);
  } else {
#pragma unroll
    for (uint32_t d = 0; d < kParts; ++d)
      for (uint32_t i = g + d * kLanes; i < loads; i += kParts * kLanes)
        delegates[d] = max(delegates[d], static_cast<uint32_t>(encode(row[i], a.order)));
  }
  const uint32_t mates = kLanes == 32 ? kFullWarp : ((1u << kLanes) - 1) << (group * kLanes);
  const uint32_t floor = kth_of_group<kLanes>(delegates, a.k, mates);

  // Lists the parts to read again, so that lanes share them evenly.
  uint32_t listed = 0;
#pragma unroll
  for (int d = 0; d < kParts; ++d) {
    const uint32_t reach = __ballot_sync(kFullWarp, live && delegates[d] >= floor) & mates;
    if (reach >> lane & 1) parts[listed + __popc(reach & ((1u << lane) - 1))] = static_cast<uint8_t>(g * kParts + d);
    listed += __popc(reach);
  }
  __syncwarp();
  const Filter<Key> filter(static_cast<Key>(floor), a.order);
  constexpr uint32_t kPerRead = kVectors ? 4 / sizeof(Key) : 1, kReads = 32 / kPerRead;
  for (uint32_t p = g; p < listed; p += kLanes) {
    const uint32_t part = parts[p], owner = part / kParts, d = part % kParts;
    const uint32_t first = kVectors ? owner : owner + d * kLanes, step = kVectors ? kLanes : kParts * kLanes;
    for (uint32_t start = first; start < loads; start += kReads * step) {
      uint32_t hits = 0;
#pragma unroll
      for (uint32_t u = 0; u < kReads; ++u) {
        const uint32_t v = start + u * step;
        if (v >= loads) break;
        hits |= (kVectors ? filter.passes(words[v * 4 + d]) : filter.passes(row[v]) & 1) << (u * kPerRead);
      }
      while (hits) {
        const uint32_t bit = __ffs(hits) - 1, v = start + bit / kPerRead * step;
        hits &= hits - 1;
        const uint32_t at = kVectors ? v * kVector + d * kPerRead + bit % kPerRead : v;
        const uint32_t slot = atomicAdd(&counts[group], 1u);
        if (slot < a.capacity - 4) words_of[slot] = Order::word(encode(row[at], a.order), at), indices[slot] = at;
      }
    }
  }
  __syncwarp();
  uint32_t m = live ? counts[group] : 0;
  uint32_t crowded = __ballot_sync(kFullWarp, m > a.capacity - 4);
  if (m > a.capacity - 4) m = a.k;
  while (crowded) {  // the whole warp, one row after another
    const uint32_t r = (__ffs(crowded) - 1) / kLanes;
    const Key bound = static_cast<Key>(__shfl_sync(kFullWarp, floor, r * kLanes));
    crowded &= ~((kLanes == 32 ? kFullWarp : (1u << kLanes) - 1) << (r * kLanes));
    radix_select(data + r * a.pitch, a.length, a.k, bound, a.order, all_words + r * a.capacity,
                 all_indices + r * a.capacity, histogram);
  }
  if (live && g < 4) words_of[m + g] = 0;  // the comparison reads four at a time
  __syncwarp();

  const int64_t base = outer * a.k * a.inner + first + warp * kRows + group;
  const auto write = [&](uint32_t rank, uint32_t word, uint32_t index) {
    static_cast<Key*>(a.values)[base + rank * a.inner] = decode(Order::key(word), a.order);
    a.indices[base + rank * a.inner] = static_cast<int32_t>(Order::index(word, index));
  };
  const auto emit = [&](uint32_t rank, uint32_t word, uint32_t index) {
    if (rank >= a.k) return;
    if (a.sorted) {
      write(rank, word, index);
    } else {
      chosen[rank] = word;
      chosen_indices[rank] = Order::index(word, index);
    }
  };
  uint32_t ranks = 0;  // their sum
  for (uint32_t start = g; start < m; start += kOwn * kLanes) {
    uint32_t own[kOwn], rank[kOwn] = {};
#pragma unroll
    for (uint32_t o = 0; o < kOwn; ++o) own[o] = start + o * kLanes < m ? words_of[start + o * kLanes] : ~0u;
    for (uint32_t j = 0; j < m; j += 4) {
      const uint4 other = *reinterpret_cast<const uint4*>(words_of + j);
#pragma unroll
      for (uint32_t o = 0; o < kOwn; ++o)
        rank[o] += (other.x > own[o]) + (other.y > own[o]) + (other.z > own[o]) + (other.w > own[o]);
    }
#pragma unroll
    for (uint32_t o = 0; o < kOwn; ++o) {
      const uint32_t i = start + o * kLanes;
      if (i >= m) break;
      ranks += rank[o];
      if (Order::kDistinct || a.sorted) emit(rank[o], own[o], Order::kDistinct ? 0 : indices[i]);
    }
  }
  if constexpr (!Order::kDistinct) {
    // Ranks of distinct keys are 0 … m - 1. Ties sum to less: then the row is ranked again, equal keys by index (and at
    // once for index order, where two must not be put in one place).
    for (int lanes = kLanes / 2; lanes; lanes /= 2) ranks += __shfl_xor_sync(kFullWarp, ranks, lanes);
    __syncwarp();
    if (m && (!a.sorted || ranks != m * (m - 1) / 2)) {
      for (uint32_t i = g; i < m; i += kLanes) {
        uint32_t rank = 0;
        for (uint32_t j = 0; j < m; ++j)
          rank += words_of[j] > words_of[i] || (words_of[j] == words_of[i] && indices[j] < indices[i]);
        emit(rank, words_of[i], indices[i]);
      }
    }
  }
  if (a.sorted) return;
  __syncwarp();
  for (uint32_t i = g; live && i < a.k; i += kLanes) {
    uint32_t rank = 0;
    for (uint32_t j = 0; j < a.k; ++j) rank += chosen_indices[j] < chosen_indices[i];
    write(rank, chosen[i], chosen_indices[i]);
  }
}

// ---- Many or long columns: streamed --------------------------------------------------------------------------------
//
// A block streams 32 neighbouring columns past thresholds that rise. A warp reads whole lines; a thread has every
// fourth element of one column and keeps those above the column's threshold in a list of its own, in shared memory.
// When a list might not take what comes next, four lanes to a column count by bisection how many of its candidates
// reach what, and drop those below a new threshold that k reach, and few more. An element that ties with the threshold
// comes after k others and is none of the result: ties and rising columns cost more such rounds, but no second reading.

constexpr uint32_t kStreamed = 32;                         // columns of a block
constexpr uint32_t kApart = kStreamedThreads / kStreamed;  // threads of a column
constexpr uint32_t kBatch = 24;                            // elements of a thread that are loaded together
constexpr uint32_t kHeld = 56;                             // candidates of a thread
constexpr uint32_t kRoom = 80;                             // candidates of a column that may stay
static_assert(kRoom >= kMaxColumnsK + kMaxColumnsK / 4 && kBatch * kApart >= kMaxColumnsK);

template <class Key>
struct Lists {
  using Order = Ranked<Key>;
  static constexpr uint32_t kPitch = kApart * kHeld + 1;  // odd: what neighbouring threads write is on different banks
  uint32_t words[kStreamed * kPitch];
  uint16_t indices[Order::kDistinct ? 1 : kStreamed * kPitch];
  uint8_t counts[kApart][kStreamed];
  uint32_t floors[kStreamed];                  // words that k candidates reach
  uint8_t found[kStreamed][kRoom];             // places of the last candidates
  uint8_t order[kStreamed][kMaxColumnsK + 4];  // and of the k best, in the order asked for

  __device__ __forceinline__ void put(uint32_t place, uint32_t word, uint32_t index) {
    words[place] = word;
    if constexpr (!Order::kDistinct) indices[place] = static_cast<uint16_t>(index);
  }
  __device__ __forceinline__ uint32_t index(uint32_t place) const {
    return Order::index(words[place], Order::kDistinct ? 0 : indices[place]);
  }

  // Spreads candidates that sit in a few lists over all lists of the column.
  __device__ __noinline__ uint32_t spread(uint32_t mine) {
    const uint32_t column = threadIdx.x / kApart, part = threadIdx.x % kApart, first = column * kPitch + part * kHeld;
    uint32_t own[kHeld], places[kHeld];
#pragma unroll
    for (uint32_t i = 0; i < kHeld; ++i)
      own[i] = i < mine ? words[first + i] : 0, places[i] = i < mine ? index(first + i) : 0;
    const uint32_t end = inclusive_scan(mine);
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < kHeld; ++i) {
      const uint32_t at = end - mine + i;
      if (i < mine) put(column * kPitch + at % kApart * kHeld + at / kApart, own[i], places[i]);
    }
    return (__shfl_sync(kFullWarp, end, kApart - 1, kApart) + kApart - 1 - part) / kApart;
  }

  // Over the lanes of a column.
  __device__ static __forceinline__ uint32_t inclusive_scan(uint32_t v) {
#pragma unroll
    for (uint32_t d = 1; d < kApart; d *= 2) {
      const uint32_t up = __shfl_up_sync(kFullWarp, v, d, kApart);
      if (threadIdx.x % kApart >= d) v += up;
    }
    return v;
  }

  // Drops candidates of all columns until at least k of each are left, and no more than k + slack, or kRoom if that
  // takes long. For all threads, between barriers.
  __device__ __forceinline__ void prune(uint32_t k, uint32_t slack) {
    const uint32_t column = threadIdx.x / kApart, part = threadIdx.x % kApart, m = counts[part][column];
    const uint32_t first = column * kPitch + part * kHeld;
    const auto sum = [](uint32_t v) {
#pragma unroll
      for (uint32_t lanes = 1; lanes < kApart; lanes *= 2) v += __shfl_xor_sync(kFullWarp, v, lanes);
      return v;
    };
    uint32_t own[kHeld], high = 0;
#pragma unroll
    for (uint32_t i = 0; i < kHeld; ++i) {
      own[i] = i < m ? words[first + i] : 0;
      high = max(high, own[i]);
    }
#pragma unroll
    for (uint32_t lanes = 1; lanes < kApart; lanes *= 2) high = max(high, __shfl_xor_sync(kFullWarp, high, lanes));
    constexpr uint32_t kHalf = kHeld / 2;
    const bool more = __any_sync(kFullWarp, m > kHalf);
    const auto count = [&](auto add) {
      uint32_t c = 0;
#pragma unroll
      for (uint32_t i = 0; i < kHalf; ++i) add(c, i);
      if (more) {
#pragma unroll
        for (uint32_t i = kHalf; i < kHeld; ++i) add(c, i);
      }
      return sum(c);
    };
    // k candidates reach low; fewer reach high + 1.
    uint32_t low = floors[column], reached = sum(m);
    bool open = reached > k + slack && low < high;
    for (int step = 0; __any_sync(kFullWarp, open); ++step) {
      const uint32_t middle = high - (high - low) / 2;
      const uint32_t c = count([&](uint32_t& n, uint32_t i) { count_less(n, middle - 1, own[i]); });
      if (!open) continue;
      if (c >= k) {
        low = middle, reached = c;
      } else {
        high = middle - 1;
      }
      open = low < high && (reached > kRoom || (reached > k + slack && step < 16));
    }
    // Too many ties: those with the least indices.
    uint32_t last = 0xffff;
    if constexpr (!Order::kDistinct) {
      if (__any_sync(kFullWarp, reached > kRoom)) {
        const auto ties = [&](uint32_t to) {
          return count([&](uint32_t& n, uint32_t i) { n += i < m && own[i] == low && indices[first + i] <= to; });
        };
        const uint32_t above = count([&](uint32_t& n, uint32_t i) { count_less(n, low, own[i]); });
        uint32_t from = 0;
        for (int bit = 0; bit < 16; ++bit) {
          const uint32_t middle = (from + last) / 2, c = above + ties(middle);
          if (reached <= kRoom || from == last) continue;
          if (c >= k) {
            last = middle;
          } else {
            from = middle + 1;
          }
        }
      }
    }
    uint32_t kept = 0;
#pragma unroll
    for (uint32_t i = 0; i < kHeld; ++i) {
      if (i == kHalf && !more) break;
      if (i >= m || own[i] < low) continue;
      uint32_t place = 0;
      if constexpr (!Order::kDistinct) {
        place = indices[first + i];
        if (own[i] == low && place > last) continue;
      }
      put(first + kept++, own[i], place);
    }
    if (__any_sync(kFullWarp, kept > kHeld - kBatch)) kept = spread(kept);
    __syncwarp();  // all have read what is written over
    counts[part][column] = static_cast<uint8_t>(kept);
    if (part == 0) floors[column] = low;
  }

  // Lists the places of the k best, of up to kRoom candidates a column, in the order asked for.
  __device__ __forceinline__ void sort(uint32_t k, bool by_value) {
    const uint32_t column = threadIdx.x / kApart, part = threadIdx.x % kApart, mine = counts[part][column];
    uint32_t m = inclusive_scan(mine);
    for (uint32_t i = 0; i < mine; ++i) found[column][m - mine + i] = static_cast<uint8_t>(part * kHeld + i);
    m = __shfl_sync(kFullWarp, m, kApart - 1, kApart);
    __syncwarp();
    constexpr uint32_t kOwn = 10;
    const auto rank = [&](uint32_t count, const uint8_t* from, uint8_t* to, auto key) {
      for (uint32_t start = 0; start < count; start += kOwn * kApart) {
        decltype(key(0u)) own[kOwn];
        uint32_t before[kOwn] = {};
#pragma unroll
        for (uint32_t o = 0; o < kOwn; ++o)
          own[o] = key(column * kPitch + from[min(start + o * kApart + part, count - 1)]);
#pragma unroll 4
        for (uint32_t j = 0; j < count; ++j) {
          const auto other = key(column * kPitch + from[j]);
#pragma unroll
          for (uint32_t o = 0; o < kOwn; ++o) before[o] += other > own[o];
        }
#pragma unroll
        for (uint32_t o = 0; o < kOwn; ++o) {
          const uint32_t i = start + o * kApart + part;
          if (i < count && before[o] < k) to[before[o]] = from[i];
        }
      }
      __syncwarp();
    };
    rank(m, found[column], order[column], [&](uint32_t place) {
      if constexpr (Order::kDistinct) {
        return words[place];
      } else {
        return static_cast<uint64_t>(words[place]) << 32 | (0xffffu - indices[place]);
      }
    });
    if (by_value) return;
    k = min(k, m);  // 0 beyond the last column
    for (uint32_t i = part; i < k; i += kApart) found[column][i] = order[column][i];
    __syncwarp();
    rank(k, found[column], order[column], [&](uint32_t place) { return 0xffffu - index(place); });
  }
};

template <class Key>
__global__ void __launch_bounds__(kStreamedThreads, 4) streamed_columns_kernel(const __grid_constant__ Args a) {
  using Order = Ranked<Key>;
  using L = Lists<Key>;
  constexpr uint32_t kTile = kApart * kBatch;  // elements of a column
  __shared__ L lists;
  const uint32_t column = threadIdx.x % kStreamed, part = threadIdx.x / kStreamed;
  const uint32_t groups = static_cast<uint32_t>((a.inner + kStreamed - 1) / kStreamed);
  const int64_t outer = blockIdx.x / groups, first = int64_t{blockIdx.x % groups} * kStreamed;
  const bool live = first + column < a.inner;
  const Key* from = static_cast<const Key*>(a.x) + (outer * a.length + part) * a.inner + first + column;
  const int64_t step = kApart * a.inner;
  const Key filler = decode(Key{0}, a.order);  // exceeds nothing
  const uint32_t length = live ? a.length : 0;

  Key next[kBatch];
  const auto load = [&](uint32_t start) {
    if (start + kTile <= length) {
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j, from += step) next[j] = __ldg(from);
    } else {
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j, from += step)
        next[j] = start + j * kApart + part < length ? __ldg(from) : filler;
    }
  };
  const uint32_t list = column * L::kPitch + part * kHeld;
  uint32_t held = 0;
  const auto keep = [&](Key bits, uint32_t i) { lists.put(list + held++, Order::word(encode(bits, a.order), i), i); };
  const auto prune = [&](uint32_t slack) {
    lists.counts[part][column] = static_cast<uint8_t>(held);
    __syncthreads();
    lists.prune(a.k, slack);
    __syncthreads();
    held = lists.counts[part][column];
  };

  load(0);
  if (threadIdx.x < kStreamed) lists.floors[threadIdx.x] = 0;
#pragma unroll
  for (uint32_t j = 0; j < kBatch; ++j)
    if (const uint32_t i = j * kApart + part; i < length) keep(next[j], i);
  Filter<Key> filter(Key{0}, a.order);
  if (kTile < a.length) load(kTile);
  for (uint32_t start = kTile; start < a.length; start += kTile) {
    if (__syncthreads_or(start == kTile || held > kHeld - kBatch)) {
      prune(a.k / 4);
      filter = Filter<Key>(Order::key(lists.floors[column]), a.order);
    }
    Key now[kBatch];
#pragma unroll
    for (uint32_t j = 0; j < kBatch; ++j) now[j] = next[j];
    if (start + kTile < a.length) load(start + kTile);
#pragma unroll
    for (uint32_t j = 0; j < kBatch; ++j) {
      const bool exceeds = (static_cast<uint32_t>(now[j]) ^ filter.flips) << (32 - 8 * sizeof(Key)) > filter.floor;
      if (exceeds) keep(now[j], start + j * kApart + part);
    }
  }
  prune(a.k / 16);
  lists.sort(a.k, a.sorted);
  __syncthreads();
  for (uint32_t r = part; live && r < a.k; r += kApart) {
    const uint32_t place = column * L::kPitch + lists.order[column][r];
    const int64_t to = (outer * a.k + r) * a.inner + first + column;
    static_cast<Key*>(a.values)[to] = decode(Order::key(lists.words[place]), a.order);
    a.indices[to] = static_cast<int32_t>(lists.index(place));
  }
}

template <class Key, int kLanes>
cudaError_t run(cudaStream_t stream, const Launch& config, const Args& a) {
  const bool vectors = a.length * sizeof(Key) % 16 == 0;
  return launch(stream, config, vectors ? columns_kernel<Key, kLanes, true> : columns_kernel<Key, kLanes, false>, a);
}

template <class Key>
cudaError_t run_streamed(cudaStream_t stream, int64_t outer, const Args& a) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(outer * ((a.inner + kStreamed - 1) / kStreamed)));
  config.block = dim3(kStreamedThreads);
  return launch(stream, config, streamed_columns_kernel<Key>, a);
}

}  // namespace

cudaError_t launch_columns(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const ColumnsShape shape =
      columns_shape(problem.rows.length, problem.k, problem.key_bits / 8, problem.sorted, plan.lanes);
  Args a = {};
  a.x = buffers.x;
  a.values = buffers.values;
  a.indices = buffers.indices;
  a.order = problem.order;
  a.inner = problem.rows.inner;
  a.length = static_cast<uint32_t>(problem.rows.length);
  a.k = static_cast<uint32_t>(problem.k);
  a.capacity = static_cast<uint32_t>(columns_capacity(problem.k));
  a.pitch = static_cast<uint32_t>(shape.pitch);
  a.tile_bytes = static_cast<uint32_t>(shape.tile_bytes);
  a.bytes = static_cast<uint32_t>(shape.bytes);
  a.sorted = problem.sorted;
  Launch config;
  if (plan.lanes == 1)
    return dispatch_key(problem.key_bits, [&](auto key) -> cudaError_t {
      if constexpr (sizeof(key) == 8) {
        return cudaErrorInvalidValue;
      } else {
        return run_streamed<decltype(key)>(stream, problem.rows.outer, a);
      }
    });
  const int columns = shape.columns * kColumnWarps;  // of a block
  config.grid = dim3(static_cast<unsigned>(problem.rows.outer * ((a.inner + columns - 1) / columns)));
  config.block = dim3(32 * kColumnWarps);
  config.shared_bytes = shape.tile_bytes + shape.bytes * kColumnWarps;
  return dispatch_key(problem.key_bits, [&](auto key) -> cudaError_t {
    using Key = decltype(key);
    if constexpr (sizeof(Key) == 8) {
      return cudaErrorInvalidValue;  // the plan sends 64-bit keys elsewhere
    } else {
      switch (plan.lanes) {
        case 4: return run<Key, 4>(stream, config, a);
        case 8: return run<Key, 8>(stream, config, a);
        case 16: return run<Key, 16>(stream, config, a);
        default: return run<Key, 32>(stream, config, a);
      }
    }
  });
}

}  // namespace jaxgpuops::topk
