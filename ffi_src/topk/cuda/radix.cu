// Top-k for large k: radix select by digits, ordered compaction, and a sort of the selected elements.
//
// Selection: for each byte of the key, from the highest, a kernel makes a histogram, which adds that byte to the known
// prefix of the k-th key. Then one kernel counts, for each tile, the elements above the k-th key and those equal to it,
// another one adds up these counts over the tiles, and a third gathers the elements in the order of their indices,
// which also decides which of the equal ones are taken. Sorting: blocks sort tiles of 32 KB of composites in shared
// memory. Merge passes then double the length of the sorted runs; each block finds its part of two runs by a search
// along a diagonal.
//
// Bytes moved: selection reads the input key_bytes + 2 times. Sorting reads and writes 8 bytes for each composite (16
// for 64-bit keys), 1 + ceil(log2(k / tile)) times. All counts are integers, and all composites are distinct, so
// neither atomics nor the order of blocks can change a bit of the result. Sources: PyTorch's radix select and gather;
// the two-pass block merge; merge path (Green et al. 2012).
#include <algorithm>

#include "common/cuda/launch.cuh"
#include "topk/cuda/candidates.cuh"
#include "topk/cuda/kernels.h"
#include "topk/cuda/radix_shape.h"

namespace jaxgpuops::topk {
namespace {

constexpr int kThreads = 512;
template <class Key>
constexpr uint32_t kTile = radix_tile(sizeof(Key));
template <class Key>
constexpr int kPer = kTile<Key> / kThreads;  // elements of a thread
constexpr uint32_t kStayingBlocks = 512;     // as many as keep a device busy

struct Radix : Call {
  int64_t first_row;  // the first row of this launch
  int64_t histograms, counts, first, second;
  uint32_t tiles;
  uint32_t to_sort;  // how many elements are sorted: those selected, or 0 if the order of indices is asked for
  uint32_t run;      // length of the sorted runs that a merge pass finds
};

__device__ int64_t row_index(const Radix& a) { return a.first_row + blockIdx.y; }

template <class T>
__device__ T* part(const Radix& a, int64_t offset) {
  return reinterpret_cast<T*>(a.workspace_of(row_index(a)) + offset);
}

template <class Key>
__device__ const Key* row_of(const Radix& a) {
  const int64_t row = row_index(a);
  return static_cast<const Key*>(a.x) + row / a.inner * a.length * a.inner + row % a.inner;
}

template <class Key>
__device__ void write(const Radix& a, uint32_t rank, Key key, uint32_t index) {
  const int64_t row = row_index(a), at = (row / a.inner * a.k + rank) * a.inner + row % a.inner;
  static_cast<Key*>(a.values)[at] = decode(key, a.order);
  a.indices[at] = static_cast<int32_t>(index);
}

__global__ void clear_kernel(const Radix a, uint32_t words) {
  uint32_t* histograms = part<uint32_t>(a, a.histograms);
  for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) histograms[i] = 0;
}

// Computes, from the histograms so far, the top `digits` bytes of the k-th key, and how many elements with that prefix
// are still needed. All threads of a block call it.
template <class Key>
__device__ void find_prefix(const Radix& a, int digits, Key* prefix, uint32_t* needed) {
  __shared__ uint32_t warps[8], digit_found, rest;
  const uint32_t* histograms = part<uint32_t>(a, a.histograms);
  const uint32_t tid = threadIdx.x;
  Key found = 0;
  uint32_t wanted = a.k;
  for (int d = 0; d < digits; ++d) {
    const uint32_t digit = 255 - tid, count = tid < 256 ? histograms[d * 256 + digit] : 0;
    const uint32_t inclusive = sum_up_to_lane(count);
    if (tid < 256 && tid % 32 == 31) warps[tid / 32] = inclusive;
    __syncthreads();
    if (tid < 256) {
      uint32_t above = inclusive - count;
      for (uint32_t w = 0; w < tid / 32; ++w) above += warps[w];
      if (above < wanted && above + count >= wanted) digit_found = digit, rest = wanted - above;
    }
    __syncthreads();
    found = static_cast<Key>((found << 8) | digit_found);
    wanted = rest;
  }
  *prefix = found;
  *needed = wanted;
}

// The first tile of a block, and the step to its next one.
template <class Key>
__device__ uint32_t first_tile() {
  return blockIdx.x * kTile<Key>;
}
template <class Key>
__device__ uint32_t tile_step() {
  return gridDim.x * kTile<Key>;
}

// Each lane has counters of its own, in a bank of its own: equal digits of a warp do not wait for each other.
template <class Key>
__global__ void __launch_bounds__(kThreads) histogram_kernel(const Radix a, int digit) {
  constexpr int kBits = 8 * sizeof(Key);
  __shared__ uint32_t histogram[256][32];
  for (uint32_t i = threadIdx.x; i < 32 * 256; i += kThreads) (&histogram[0][0])[i] = 0;
  Key prefix;
  uint32_t needed;
  find_prefix<Key>(a, digit, &prefix, &needed);
  __syncthreads();
  const Key* x = row_of<Key>(a);
  const int shift = kBits - 8 * (digit + 1);
#pragma unroll 1
  for (uint32_t begin = first_tile<Key>(); begin < a.length; begin += tile_step<Key>()) {
    Key keys[kPer<Key>];
#pragma unroll
    for (int j = 0; j < kPer<Key>; ++j) {
      const uint32_t i = begin + j * kThreads + threadIdx.x;
      keys[j] = encode(x[min(i, a.length - 1) * a.inner], a.order);
    }
#pragma unroll
    for (int j = 0; j < kPer<Key>; ++j)
      if (begin + j * kThreads + threadIdx.x < a.length &&
          (digit == 0 || static_cast<Key>(keys[j] >> (shift + 8)) == prefix))
        atomicAdd(&histogram[(keys[j] >> shift) & 255][threadIdx.x % 32], 1u);
  }
  __syncthreads();
  uint32_t* all = part<uint32_t>(a, a.histograms) + digit * 256;
  for (uint32_t i = threadIdx.x / 32; i < 256; i += kThreads / 32) {
    const uint32_t sum = sum_of_warp(histogram[i][threadIdx.x % 32]);
    if (sum && threadIdx.x % 32 == 0) atomicAdd(&all[i], sum);
  }
}

template <class Key>
__global__ void __launch_bounds__(kThreads) count_kernel(const Radix a) {
  __shared__ uint32_t above, ties;
  Key kth;
  uint32_t needed;
  find_prefix<Key>(a, sizeof(Key), &kth, &needed);
  const Key* x = row_of<Key>(a);
#pragma unroll 1
  for (uint32_t begin = first_tile<Key>(); begin < a.length; begin += tile_step<Key>()) {
    if (threadIdx.x == 0) above = ties = 0;
    __syncthreads();
    uint32_t more = 0, same = 0;
#pragma unroll
    for (int j = 0; j < kPer<Key>; ++j) {
      const uint32_t i = begin + j * kThreads + threadIdx.x;
      const Key key = encode(x[min(i, a.length - 1) * a.inner], a.order);
      more += __popc(__ballot_sync(kEveryLane, i < a.length && key > kth));
      same += __popc(__ballot_sync(kEveryLane, i < a.length && key == kth));
    }
    if (threadIdx.x % 32 == 0) {
      atomicAdd(&above, more);
      atomicAdd(&ties, same);
    }
    __syncthreads();
    if (threadIdx.x == 0) part<uint2>(a, a.counts)[begin / kTile<Key>] = make_uint2(above, ties);
    __syncthreads();
  }
}

// Replaces each tile's counts by the sums over the tiles before it.
__global__ void __launch_bounds__(1024) scan_kernel(const Radix a) {
  __shared__ uint2 warps[32];
  uint2* counts = part<uint2>(a, a.counts);
  uint2 before = make_uint2(0, 0);
  for (uint32_t start = 0; start < a.tiles; start += 1024) {
    const uint32_t i = start + threadIdx.x;
    const uint2 mine = i < a.tiles ? counts[i] : make_uint2(0, 0);
    const uint32_t more = sum_up_to_lane(mine.x), same = sum_up_to_lane(mine.y);
    if (threadIdx.x % 32 == 31) warps[threadIdx.x / 32] = make_uint2(more, same);
    __syncthreads();
    uint2 sum = make_uint2(before.x + more - mine.x, before.y + same - mine.y);
    for (uint32_t w = 0; w < 32; ++w) {
      if (w < threadIdx.x / 32) sum.x += warps[w].x, sum.y += warps[w].y;
      before.x += warps[w].x, before.y += warps[w].y;
    }
    if (i < a.tiles) counts[i] = sum;
    __syncthreads();
  }
}

// Gathers the selected elements in the order of their indices. They go to the output if that order is asked for,
// otherwise to the workspace as composites.
template <class Key>
__global__ void __launch_bounds__(kThreads) gather_kernel(const Radix a) {
  constexpr int kWarps = kThreads / 32;
  __shared__ uint32_t more[kPer<Key>][kWarps], same[kPer<Key>][kWarps];
  Key kth;
  uint32_t needed;
  find_prefix<Key>(a, sizeof(Key), &kth, &needed);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, lower = (1u << lane) - 1;
  const Key* x = row_of<Key>(a);
  const Packing<Key> packing = Packing<Key>::make(a.length);
  Composite<Key>* out = part<Composite<Key>>(a, a.first);
#pragma unroll 1
  for (uint32_t begin = first_tile<Key>(); begin < a.length; begin += tile_step<Key>()) {
    Key keys[kPer<Key>];
    uint32_t above[kPer<Key>], ties[kPer<Key>];
#pragma unroll
    for (int j = 0; j < kPer<Key>; ++j) {
      const uint32_t i = begin + j * kThreads + threadIdx.x;
      keys[j] = encode(x[min(i, a.length - 1) * a.inner], a.order);
      above[j] = __ballot_sync(kEveryLane, i < a.length && keys[j] > kth);
      ties[j] = __ballot_sync(kEveryLane, i < a.length && keys[j] == kth);
      if (lane == 0) more[j][warp] = __popc(above[j]), same[j][warp] = __popc(ties[j]);
    }
    __syncthreads();
    const uint2 before = part<uint2>(a, a.counts)[begin / kTile<Key>];
    uint32_t greater = before.x, equal = before.y;  // elements before the j-th of each thread
#pragma unroll
    for (int j = 0; j < kPer<Key>; ++j) {
      // These also count elements of earlier threads.
      uint32_t g = greater + __popc(above[j] & lower), e = equal + __popc(ties[j] & lower);
#pragma unroll
      for (uint32_t w = 0; w < kWarps; ++w) {
        if (w < warp) g += more[j][w], e += same[j][w];
        greater += more[j][w];
        equal += same[j][w];
      }
      const bool tie = ties[j] >> lane & 1;
      if (!(above[j] >> lane & 1) && !(tie && e < needed)) continue;
      const uint32_t at = g + min(e, needed), i = begin + j * kThreads + threadIdx.x;
      if (a.sorted) {
        out[at] = packing.pack(keys[j], i);
      } else {
        write(a, at, keys[j], i);
      }
    }
    __syncthreads();
  }
}

// Sorts one tile of the gathered composites.
template <class Key>
__global__ void __launch_bounds__(kThreads) sort_tiles_kernel(const Radix a, bool last) {
  using C = Composite<Key>;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  C* buffer = reinterpret_cast<C*>(shared_bytes);
  const Packing<Key> packing = Packing<Key>::make(a.length);
  const uint32_t begin = blockIdx.x * kTile<Key>;
  const uint32_t m = min(kTile<Key>, a.to_sort - begin);
  C* run = part<C>(a, a.first) + begin;
  for (uint32_t i = threadIdx.x; i < m; i += kThreads) buffer[i] = run[i];
  sort_descending<kThreads>(buffer, m);
  for (uint32_t i = threadIdx.x; i < m; i += kThreads) {
    if (!last) {
      run[i] = buffer[i];
    } else if (i < a.k) {
      write(a, i, packing.key(buffer[i]), packing.index(buffer[i]));
    }
  }
}

// Returns how many of the first `diagonal` outputs of merging two descending runs are from the first run.
template <class C>
__device__ uint32_t split(const C* one, uint32_t ones, const C* two, uint32_t twos, uint32_t diagonal) {
  uint32_t low = diagonal > twos ? diagonal - twos : 0, high = min(diagonal, ones);
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (one[middle] > two[diagonal - 1 - middle]) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class Key>
__global__ void __launch_bounds__(kThreads) merge_pass_kernel(const Radix a, bool last) {
  using C = Composite<Key>;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ uint32_t ends[2];
  C* buffer = reinterpret_cast<C*>(shared_bytes);
  const Packing<Key> packing = Packing<Key>::make(a.length);
  const C* from = part<C>(a, a.first);
  C* to = part<C>(a, a.second);
  const uint32_t begin = blockIdx.x * kTile<Key>;  // index of this block's first output
  const uint32_t m = min(kTile<Key>, a.to_sort - begin);
  const uint64_t start = begin / (2ull * a.run) * (2ull * a.run);  // index at which the two runs begin
  const C* one = from + start;
  const uint32_t ones = min(a.run, static_cast<uint32_t>(a.to_sort - start));
  const C* two = one + ones;
  const uint32_t twos = min(a.run, static_cast<uint32_t>(a.to_sort - start - ones));
  const uint32_t offset = static_cast<uint32_t>(begin - start);
  if (threadIdx.x < 2) ends[threadIdx.x] = split(one, ones, two, twos, offset + (threadIdx.x ? m : 0));
  __syncthreads();
  const uint32_t one_begin = ends[0], from_one = ends[1] - ends[0];
  const uint32_t two_begin = offset - one_begin;
  for (uint32_t i = threadIdx.x; i < m; i += kThreads)
    buffer[i] = i < from_one ? one[one_begin + i] : two[two_begin + i - from_one];
  __syncthreads();
  // An element's place is its rank in its own part plus the number of larger elements in the other part.
  for (uint32_t i = threadIdx.x; i < m; i += kThreads) {
    const C c = buffer[i];
    const bool first = i < from_one;
    uint32_t low = first ? from_one : 0, high = first ? m : from_one;
    const uint32_t base = low;
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (buffer[middle] > c) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const uint32_t at = begin + (first ? i : i - from_one) + low - base;
    if (!last) {
      to[at] = c;
    } else if (at < a.k) {
      write(a, at, packing.key(c), packing.index(c));
    }
  }
}

template <class Key>
cudaError_t run(cudaStream_t stream, uint32_t rows, Radix a) {
  using C = Composite<Key>;
  const auto launch_blocks = [&](int64_t blocks, size_t shared_bytes, auto kernel, auto... arguments) {
    return launch(stream, {dim3(static_cast<unsigned>(blocks), rows), dim3(kThreads), shared_bytes}, kernel,
                  arguments...);
  };
  // Blocks that select stay, since all of them begin by finding the prefix.
  const int64_t staying = std::min<int64_t>(a.tiles, (kStayingBlocks + rows - 1) / rows);
  cudaError_t status =
      launch(stream, {dim3(1, rows), dim3(256)}, clear_kernel, a, static_cast<uint32_t>(sizeof(Key) * 256));
  for (int digit = 0; digit < static_cast<int>(sizeof(Key)) && status == cudaSuccess; ++digit)
    status = launch_blocks(staying, 0, histogram_kernel<Key>, a, digit);
  if (status == cudaSuccess) status = launch_blocks(staying, 0, count_kernel<Key>, a);
  if (status == cudaSuccess) status = launch(stream, {dim3(1, rows), dim3(1024)}, scan_kernel, a);
  if (status == cudaSuccess) status = launch_blocks(staying, 0, gather_kernel<Key>, a);
  if (status != cudaSuccess || a.to_sort == 0) return status;
  const size_t shared_bytes = kTile<Key> * sizeof(C);
  const int64_t sorted_tiles = (a.to_sort + kTile<Key> - 1) / kTile<Key>;
  a.run = kTile<Key>;
  bool last = a.run >= a.to_sort;
  status = launch_blocks(sorted_tiles, shared_bytes, sort_tiles_kernel<Key>, a, last);
  while (!last && status == cudaSuccess) {
    last = 2ull * a.run >= a.to_sort;
    status = launch_blocks(sorted_tiles, shared_bytes, merge_pass_kernel<Key>, a, last);
    const int64_t written = a.second;
    a.second = a.first;
    a.first = written;
    a.run *= 2;
  }
  return status;
}

}  // namespace

cudaError_t launch_radix(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const RadixShape shape = radix_shape(problem.rows.length, problem.k, problem.key_bits / 8, problem.sorted);
  Radix a = {call_of(problem, buffers)};
  a.row_bytes = shape.bytes;
  a.histograms = shape.histograms;
  a.counts = shape.counts;
  a.first = shape.first;
  a.second = shape.second;
  a.to_sort = static_cast<uint32_t>(shape.sorted);
  a.tiles = static_cast<uint32_t>(shape.tiles);
  for (a.first_row = 0; a.first_row < problem.rows.count(); a.first_row += kMaxRadixRows) {
    const uint32_t rows = static_cast<uint32_t>(std::min(kMaxRadixRows, problem.rows.count() - a.first_row));
    const cudaError_t status =
        dispatch_key(problem.key_bits, [&](auto key) { return run<decltype(key)>(stream, rows, a); });
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace jaxgpuops::topk
