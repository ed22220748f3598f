// Top-k along an axis that is not the last, for k <= 64 and many long columns. Each element is read once.
//
// A block reads 32 neighbouring columns from their first element to the last and compares the elements with a threshold
// for each column, which rises. A warp reads whole lines. A thread has every fourth element of one column, and keeps
// those above the column's threshold in a list of its own in shared memory. When a list might lack room for the next
// elements, the four threads of each column find a new threshold, by bisection and counting: k candidates of the column
// reach it, and few more. The other candidates are dropped. A later element that equals the threshold comes after k
// others, so it is not in the result. Ties and rising columns therefore make such rounds more frequent, but no element
// is read twice.
//
// Bytes moved: the input once, and k results (value and index).
#include "common/cuda/launch.cuh"
#include "topk/cuda/candidates.cuh"
#include "topk/cuda/columns_shape.h"
#include "topk/cuda/delegates.cuh"
#include "topk/cuda/kernels.h"

namespace jaxgpuops::topk {
namespace {

constexpr uint32_t kStreamed = 32;                         // columns of a block
constexpr uint32_t kApart = kStreamedThreads / kStreamed;  // threads of a column
constexpr uint32_t kBatch = 24;                            // elements of a thread that are loaded together
constexpr uint32_t kHeld = 56;                             // candidates of a thread
constexpr uint32_t kRoom = 80;                             // candidates of a column that may stay after a round
static_assert(kRoom >= kMaxColumnsK + kMaxColumnsK / 4 && kBatch * kApart >= kMaxColumnsK);

template <class Key>
struct Lists {
  using Order = Ranked<Key>;
  static constexpr uint32_t kPitch = kApart * kHeld + 1;  // odd, so that neighbouring threads write to different banks
  uint32_t words[kStreamed * kPitch];
  uint16_t indices[Order::kDistinct ? 1 : kStreamed * kPitch];
  uint8_t counts[kApart][kStreamed];
  uint32_t floors[kStreamed];                  // words that k candidates reach
  uint8_t found[kStreamed][kRoom];             // places of the candidates that are left
  uint8_t order[kStreamed][kMaxColumnsK + 4];  // places of the k best, in the order asked for

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
    const uint32_t end = sum_up_to_lane<kApart>(mine);
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < kHeld; ++i) {
      const uint32_t at = end - mine + i;
      if (i < mine) put(column * kPitch + at % kApart * kHeld + at / kApart, own[i], places[i]);
    }
    return (__shfl_sync(kEveryLane, end, kApart - 1, kApart) + kApart - 1 - part) / kApart;
  }

  // Drops candidates of all columns. At least k of each column stay, and at most k + slack, or kRoom if k + slack would
  // take long. All threads call it between barriers.
  __device__ __forceinline__ void prune(uint32_t k, uint32_t slack) {
    const uint32_t column = threadIdx.x / kApart, part = threadIdx.x % kApart, m = counts[part][column];
    const uint32_t first = column * kPitch + part * kHeld;
    uint32_t own[kHeld], high = 0;
#pragma unroll
    for (uint32_t i = 0; i < kHeld; ++i) {
      own[i] = i < m ? words[first + i] : 0;
      high = max(high, own[i]);
    }
    high = largest_of_lanes<kApart>(high);
    constexpr uint32_t kHalf = kHeld / 2;
    const bool more = __any_sync(kEveryLane, m > kHalf);
    const auto count = [&](auto add) {
      uint32_t c = 0;
#pragma unroll
      for (uint32_t i = 0; i < kHalf; ++i) add(c, i);
      if (more) {
#pragma unroll
        for (uint32_t i = kHalf; i < kHeld; ++i) add(c, i);
      }
      return sum_of_lanes<kApart>(c);
    };
    // k candidates reach low; fewer reach high + 1.
    uint32_t low = floors[column], reached = sum_of_lanes<kApart>(m);
    bool open = reached > k + slack && low < high;
    for (int step = 0; __any_sync(kEveryLane, open); ++step) {
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
    // There are too many ties, of which those with the lowest indices stay.
    uint32_t last = 0xffff;
    if constexpr (!Order::kDistinct) {
      if (__any_sync(kEveryLane, reached > kRoom)) {
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
    if (__any_sync(kEveryLane, kept > kHeld - kBatch)) kept = spread(kept);
    __syncwarp();  // now all threads have read the counts that are overwritten next
    counts[part][column] = static_cast<uint8_t>(kept);
    if (part == 0) floors[column] = low;
  }

  // Lists the places of the k best of up to kRoom candidates of each column, in the order asked for.
  __device__ __forceinline__ void sort(uint32_t k, bool by_value) {
    const uint32_t column = threadIdx.x / kApart, part = threadIdx.x % kApart, mine = counts[part][column];
    uint32_t m = sum_up_to_lane<kApart>(mine);
    for (uint32_t i = 0; i < mine; ++i) found[column][m - mine + i] = static_cast<uint8_t>(part * kHeld + i);
    m = __shfl_sync(kEveryLane, m, kApart - 1, kApart);
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
    k = min(k, m);  // a thread beyond the last column has no candidates, so k becomes 0
    for (uint32_t i = part; i < k; i += kApart) found[column][i] = order[column][i];
    __syncwarp();
    rank(k, found[column], order[column], [&](uint32_t place) { return 0xffffu - index(place); });
  }
};

template <class Key>
__global__ void __launch_bounds__(kStreamedThreads, 4) columns_stream_kernel(const __grid_constant__ Call a) {
  using Order = Ranked<Key>;
  using L = Lists<Key>;
  constexpr uint32_t kTile = kApart * kBatch;  // elements of a column in a tile
  __shared__ L lists;
  const uint32_t column = threadIdx.x % kStreamed, part = threadIdx.x / kStreamed;
  const uint32_t groups = static_cast<uint32_t>((a.inner + kStreamed - 1) / kStreamed);
  const int64_t outer = blockIdx.x / groups, first = int64_t{blockIdx.x % groups} * kStreamed;
  const bool live = first + column < a.inner;
  const Key* from = static_cast<const Key*>(a.x) + (outer * a.length + part) * a.inner + first + column;
  const int64_t step = kApart * a.inner;
  const Key filler = decode(Key{0}, a.order);  // an element that exceeds no threshold
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

template <class Key>
cudaError_t run(cudaStream_t stream, int64_t outer, const Call& a) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(outer * ((a.inner + kStreamed - 1) / kStreamed)));
  config.block = dim3(kStreamedThreads);
  return launch(stream, config, columns_stream_kernel<Key>, a);
}

}  // namespace

cudaError_t launch_columns_stream(cudaStream_t stream, const Problem& problem, const Buffers& buffers) {
  const Call a = call_of(problem, buffers);
  return dispatch_key(problem.key_bits, [&](auto key) -> cudaError_t {
    if constexpr (sizeof(key) == 8) {
      return cudaErrorInvalidValue;  // plans choose other kernels for 64-bit keys
    } else {
      return run<decltype(key)>(stream, problem.rows.outer, a);
    }
  });
}

}  // namespace jaxgpuops::topk
