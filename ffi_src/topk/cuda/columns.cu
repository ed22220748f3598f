// Top-k along an axis that is not the last, for k <= 64 and columns of up to 16 KB, unless these are many and long
// (columns_stream.cu). A block copies neighbouring columns to shared memory, transposed, and 4 to 32 lanes of a warp
// select from each.
//
// Each lane splits its elements into four interleaved parts. The maximum of a part is its delegate. The k-th largest
// delegate is a threshold that k elements reach, and in random data about k more. These elements are in parts whose
// delegate reaches the threshold; only those parts, about k of them, are read again. The elements found are candidates,
// which are ranked by comparing all with all. If there are more of them than there is room for (because of ties, or
// because large elements share a part), a radix select by digits of 8 bits finds the k-th key, and elements that equal
// it are taken in the order of their indices.
//
// Bytes moved: the input once, and k results (value and index). Source: Dr. Top-k's delegates (arXiv 2109.08219).
#include "common/cuda/async_copy.cuh"
#include "common/cuda/launch.cuh"
#include "topk/cuda/candidates.cuh"
#include "topk/cuda/columns_shape.h"
#include "topk/cuda/delegates.cuh"
#include "topk/cuda/kernels.h"

namespace jaxgpuops::topk {
namespace {

struct Args : Call {
  uint32_t capacity, pitch, tile_bytes, bytes;  // shared memory, see ColumnsShape
};

// The whole warp selects the k largest of one row: it finds the k-th key, and then gathers the elements in the order of
// their indices. Usually `floor` is the k-th key, and elements that equal it have caused the overflow. Otherwise a
// radix select finds the key, from the highest digit down.
template <class Key>
__device__ __noinline__ void radix_select(const Key* row, uint32_t length, uint32_t k, Key floor, KeyOrder order,
                                          uint32_t* words, uint32_t* indices, uint32_t* histogram) {
  const uint32_t lane = threadIdx.x & 31;
  uint32_t above = 0;
#pragma unroll 4
  for (uint32_t i = lane; i < length; i += 32) above += encode(row[i], order) > floor;
  above = sum_of_warp(above);
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
      const uint32_t same = __match_any_sync(kEveryLane, digit);
      if (counts && lane == __ffs(same) - 1) atomicAdd(&histogram[digit], __popc(same));
    }
    __syncwarp();
    // Lane l adds up the counts of eight digits, from 255 - 8 l downwards. The k-th key has the digit at which the
    // running count reaches `needed`.
    uint32_t sum = 0;
    for (int j = 0; j < 8; ++j) sum += histogram[255 - lane * 8 - j];
    uint32_t higher = sum_up_to_lane(sum) - sum, digit = 0, rest = 0;
    for (int j = 0; j < 8; ++j) {
      const uint32_t count = histogram[255 - lane * 8 - j];
      if (higher < needed && higher + count >= needed) digit = 255 - lane * 8 - j, rest = needed - higher;
      higher += count;
    }
    const uint32_t owner = __ffs(__ballot_sync(kEveryLane, rest != 0)) - 1;
    digit = __shfl_sync(kEveryLane, digit, owner);
    needed = __shfl_sync(kEveryLane, rest, owner);
    prefix = static_cast<Key>(prefix | static_cast<Key>(digit) << shift);
    known = static_cast<Key>(known | Key{255} << shift);
    __syncwarp();
  }
  uint32_t filled = 0;
  for (uint32_t start = 0; start < length && filled < k; start += 32) {
    const uint32_t i = start + lane, before = (1u << lane) - 1;
    const Key key = i < length ? encode(row[i], order) : Key{0};
    const uint32_t ties = __ballot_sync(kEveryLane, i < length && key == prefix);
    const bool taken = i < length && (key > prefix || (key == prefix && __popc(ties & before) < needed));
    const uint32_t all = __ballot_sync(kEveryLane, taken);
    const uint32_t at = filled + __popc(all & before);
    if (taken) words[at] = Ranked<Key>::word(key, i), indices[at] = i;
    filled += __popc(all);
    needed -= min(needed, static_cast<uint32_t>(__popc(ties)));
  }
  __syncwarp();
}

// The state of a thread in columns_kernel. The functions are the phases of the kernel, in the order in which they run.
// A warp has kRows columns, which are rows in shared memory. A group of kLanes lanes has one of these rows.
template <class Key, int kLanes, bool kVectors>
struct Warp {
  using Order = Ranked<Key>;
  static constexpr uint32_t kRows = 32 / kLanes;
  static constexpr uint32_t kTile = kColumnWarps * kRows;  // columns of a block
  static constexpr uint32_t kVector = kVectors ? 16 / sizeof(Key) : 1;

  const Args& a;
  Key* const tile;  // all columns of the block, a.pitch apart
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32, group = lane / kLanes, g = lane % kLanes;
  const uint32_t mates = kLanes == 32 ? kEveryLane : ((1u << kLanes) - 1) << (group * kLanes);
  const uint32_t loads = a.length / kVector;
  int64_t outer, first;    // the outer index of the block's columns, and the inner index of the first one
  uint32_t columns, rows;  // how many columns of the block exist, and how many of the warp
  bool live;               // whether the group has a column
  const Key* row;
  uint32_t delegates[kParts] = {};

  // The shared memory of the warp: the words and the indices of its rows' candidates; counters; the histogram of the
  // rare radix select, or, before it, the list of the parts to read again; for results in the order of indices, the
  // chosen elements.
  uint32_t* const all_words;
  uint32_t* const all_indices = all_words + kRows * a.capacity;
  uint32_t* const counts = all_indices + kRows * a.capacity;
  uint32_t* const histogram = counts + kRows;
  uint32_t* const words_of = all_words + group * a.capacity;
  uint32_t* const indices = all_indices + group * a.capacity;
  uint32_t* const chosen = histogram + 256 + group * a.k;
  uint32_t* const chosen_indices = histogram + 256 + (kRows + group) * a.k;
  uint8_t* const parts = reinterpret_cast<uint8_t*>(histogram) + group * kLanes * kParts;

  __device__ __forceinline__ Warp(const Args& a, unsigned char* shared_bytes)
      : a(a),
        tile(reinterpret_cast<Key*>(shared_bytes)),
        all_words(reinterpret_cast<uint32_t*>(shared_bytes + a.tile_bytes + warp * a.bytes)) {
    const int64_t tiles = (a.inner + kTile - 1) / kTile;
    outer = blockIdx.x / tiles;
    first = blockIdx.x % tiles * kTile;
    columns = static_cast<uint32_t>(min(static_cast<int64_t>(kTile), a.inner - first));
    rows = min(kRows, columns - min(columns, warp * kRows));
    live = group < rows;
    row = tile + (warp * kRows + (live ? group : 0)) * a.pitch;
  }

  // Loads the block's columns into shared memory.
  __device__ __forceinline__ void bring_columns() {
    const uint32_t column = threadIdx.x % kTile;
    const Key* from = static_cast<const Key*>(a.x) + outer * a.length * a.inner + first + column;
    if (column < columns) {
#pragma unroll 8
      for (uint32_t i = threadIdx.x / kTile; i < a.length; i += 32 * kColumnWarps / kTile) {
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
  }

  // Finds the largest element of each part that the lane has: a part is one 32-bit word of each of its 16-byte loads,
  // or every fourth of its single elements. Returns a key that k delegates reach, and few more.
  __device__ __forceinline__ uint32_t take_delegates() {
    if (lane < kRows) counts[lane] = 0;
    __syncwarp();
    const uint32_t* words = reinterpret_cast<const uint32_t*>(row);
    const Lanes<Key> lanes(a.order);
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
    return kth_of_group<kLanes>(delegates, a.k, mates);
  }

  // Lists the parts to read again, so that the lanes share them evenly. Returns the number of parts.
  __device__ __forceinline__ uint32_t list_parts(uint32_t floor) {
    uint32_t listed = 0;
#pragma unroll
    for (int d = 0; d < kParts; ++d) {
      const uint32_t reach = __ballot_sync(kEveryLane, live && delegates[d] >= floor) & mates;
      if (reach >> lane & 1) parts[listed + __popc(reach & ((1u << lane) - 1))] = static_cast<uint8_t>(g * kParts + d);
      listed += __popc(reach);
    }
    __syncwarp();
    return listed;
  }

  // Reads the listed parts again and collects the elements that reach the floor. Returns the number of candidates of
  // the row.
  __device__ __forceinline__ uint32_t collect(uint32_t floor, uint32_t listed) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(row);
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
    uint32_t crowded = __ballot_sync(kEveryLane, m > a.capacity - 4);
    if (m > a.capacity - 4) m = a.k;
    while (crowded) {  // the whole warp takes the crowded rows, one after another
      const uint32_t r = (__ffs(crowded) - 1) / kLanes;
      const Key bound = static_cast<Key>(__shfl_sync(kEveryLane, floor, r * kLanes));
      crowded &= ~((kLanes == 32 ? kEveryLane : (1u << kLanes) - 1) << (r * kLanes));
      radix_select(tile + (warp * kRows + r) * a.pitch, a.length, a.k, bound, a.order, all_words + r * a.capacity,
                   all_indices + r * a.capacity, histogram);
    }
    if (live && g < 4) words_of[m + g] = 0;  // clears four more places, since ranks compare four candidates at a time
    __syncwarp();
    return m;
  }

  __device__ __forceinline__ void write(uint32_t rank, uint32_t word, uint32_t index) {
    const int64_t base = outer * a.k * a.inner + first + warp * kRows + group;
    static_cast<Key*>(a.values)[base + rank * a.inner] = decode(Order::key(word), a.order);
    a.indices[base + rank * a.inner] = static_cast<int32_t>(Order::index(word, index));
  }

  // Ranks the m candidates. Writes the k best, or keeps them for write_by_index().
  __device__ __forceinline__ void rank(uint32_t m) {
    constexpr uint32_t kOwn = 4;  // candidates that a lane ranks at once
    const auto emit = [&](uint32_t rank, uint32_t word, uint32_t index) {
      if (rank >= a.k) return;
      if (a.sorted) {
        write(rank, word, index);
      } else {
        chosen[rank] = word;
        chosen_indices[rank] = Order::index(word, index);
      }
    };
    uint32_t ranks = 0;  // the sum of the lane's ranks
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
      // The ranks of distinct keys are 0 to m - 1. If some keys are equal, the sum of the ranks is less; then the row
      // is ranked again by key and index. (For results in the order of indices this is done at once, since no two
      // elements may share a place.)
      ranks = sum_of_lanes<kLanes>(ranks);
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
  }

  __device__ __forceinline__ void write_by_index() {
    __syncwarp();
    for (uint32_t i = g; live && i < a.k; i += kLanes) {
      uint32_t rank = 0;
      for (uint32_t j = 0; j < a.k; ++j) rank += chosen_indices[j] < chosen_indices[i];
      write(rank, chosen[i], chosen_indices[i]);
    }
  }
};

template <class Key, int kLanes, bool kVectors>
__global__ void __launch_bounds__(32 * kColumnWarps) columns_kernel(const Args a) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  Warp<Key, kLanes, kVectors> warp(a, shared_bytes);
  warp.bring_columns();
  if (warp.rows == 0) return;
  const uint32_t floor = warp.take_delegates();
  const uint32_t listed = warp.list_parts(floor);
  const uint32_t candidates = warp.collect(floor, listed);
  warp.rank(candidates);
  if (!a.sorted) warp.write_by_index();
}

template <class Key, int kLanes>
cudaError_t run(cudaStream_t stream, const Launch& config, const Args& a) {
  const bool vectors = a.length * sizeof(Key) % 16 == 0;
  return launch(stream, config, vectors ? columns_kernel<Key, kLanes, true> : columns_kernel<Key, kLanes, false>, a);
}

}  // namespace

cudaError_t launch_columns(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  if (plan.lanes == 1) return launch_columns_stream(stream, problem, buffers);
  const ColumnsShape shape =
      columns_shape(problem.rows.length, problem.k, problem.key_bits / 8, problem.sorted, plan.lanes);
  Args a = {call_of(problem, buffers)};
  a.capacity = static_cast<uint32_t>(columns_capacity(problem.k));
  a.pitch = static_cast<uint32_t>(shape.pitch);
  a.tile_bytes = static_cast<uint32_t>(shape.tile_bytes);
  a.bytes = static_cast<uint32_t>(shape.bytes);
  Launch config;
  const int columns = shape.columns * kColumnWarps;  // columns of a block
  config.grid = dim3(static_cast<unsigned>(problem.rows.outer * ((a.inner + columns - 1) / columns)));
  config.block = dim3(32 * kColumnWarps);
  config.shared_bytes = shape.tile_bytes + shape.bytes * kColumnWarps;
  return dispatch_key(problem.key_bits, [&](auto key) -> cudaError_t {
    using Key = decltype(key);
    if constexpr (sizeof(Key) == 8) {
      return cudaErrorInvalidValue;  // plans choose other kernels for 64-bit keys
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
