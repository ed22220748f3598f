// Top-k of long rows for large k, in one read of the row.
//
// Each thread samples elements of the row at places that depend on nothing but the length, as if by chance. The best
// ones of the threads give a threshold that somewhat more than k elements of the row reach. It is a key with an index,
// as all candidates are, so that elements that tie with it do not matter. The blocks of a row read it and append what
// reaches the threshold to one list. Then a sample of the list, sorted, divides it into buckets: each block counts its
// share of the list, the blocks meet, and move the candidates to their buckets. A second kernel sorts neighbouring
// buckets in shared memory, and writes.
//
// If fewer than k elements reach the threshold, or more than there is room for, digits of the composites find another
// one, with a read of the row each. If buckets have too many candidates for shared memory, they are sorted in the
// workspace. Both hardly ever happen, and are slow.
//
// Bytes moved: the input once, k results (value and index), and each candidate, of which there are 1.5 to 4 times k
// (more where k is a small part of the row), five times. All composites are distinct, so neither the order of the list
// nor timing can change a result. Sources: sample sort (Frazer & McKellar 1970), Floyd & Rivest's SELECT (1975).
#include <cooperative_groups.h>

#include <algorithm>
#include <utility>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "topk/cuda/buckets_shape.h"
#include "topk/cuda/candidates.cuh"
#include "topk/cuda/kernels.h"
#include "topk/cuda/meet.cuh"
#include "topk/cuda/row_vectors.cuh"

namespace jaxgpuops::topk {
namespace {

namespace cg = cooperative_groups;

constexpr int kThreads = kBucketsThreads;
constexpr uint32_t kWarps = kThreads / 32;
using C = uint64_t;
static_assert(sizeof(Shared<kThreads, C>) <= kBucketsControl);

struct Buckets : Call {
  int64_t first_row;
  uint32_t slices;  // blocks that share a row
  uint32_t sample, reach, splitters, room;
  int64_t starts, list, sorted;
};

// What the blocks of a row publish for each other, in the workspace.
struct Exchange {
  uint32_t* arrivals;
  uint32_t* found;   // candidates on the list, or that found no place there
  uint32_t* counts;  // of digits, then of buckets
  uint32_t* starts;  // where buckets begin, and where the last one ends
  C* list;
  C* sorted;  // the list in the order of buckets

  __device__ Exchange(const Buckets& a, int64_t row) {
    unsigned char* bytes = a.workspace_of(row);
    arrivals = reinterpret_cast<uint32_t*>(bytes);
    found = arrivals + 1;
    counts = arrivals + 16;
    starts = reinterpret_cast<uint32_t*>(bytes + a.starts);
    list = reinterpret_cast<C*>(bytes + a.list);
    sorted = reinterpret_cast<C*>(bytes + a.sorted);
  }
};

// Some number that depends on i as if by chance, below `range`.
__device__ __forceinline__ uint32_t scatter(uint32_t i, uint32_t range) {
  i *= 0x9e3779b1u;
  i ^= i >> 15;
  i *= 0x85ebca77u;
  i ^= i >> 13;
  return __umulhi(i * 0xc2b2ae3du, range);
}

// Finds a threshold that at least k elements reach, and no more than there is room for, by digits of the composites.
// `target` as for meet().
template <class Key>
__device__ __noinline__ C search(const Buckets& a, Shared<kThreads, C>& s, int64_t row, uint32_t rank,
                                 uint32_t& target) {
  const Exchange exchange(a, row);
  const Packing<Key> packing = Packing<Key>::make(a.length);
  const Key* x = static_cast<const Key*>(a.x) + row * a.length;
  const uint32_t tid = threadIdx.x;
  int bits = packing.shift() + 8 * static_cast<int>(sizeof(Key));
  const int top = bits;
  C prefix = 0;
  uint32_t need = a.k, reached;
  meet(exchange.arrivals, a.slices, target);  // now all blocks have read the number of candidates
  do {
    const int above = bits, digit = min(bits, 11);
    bits -= digit;
    for (uint32_t i = tid; i < kBucketsDigits; i += kThreads) {
      s.histogram[i] = 0;
      if (rank == 0) exchange.counts[i] = 0;
    }
    meet(exchange.arrivals, a.slices, target);
    for (uint64_t i = rank * kThreads + tid; i < a.length; i += a.slices * kThreads) {
      const C c = packing.pack(encode(x[i], a.order), static_cast<uint32_t>(i));
      if (above == top || c >> above == prefix) atomicAdd(&s.histogram[(c >> bits) & ((1u << digit) - 1)], 1u);
    }
    __syncthreads();
    for (uint32_t i = tid; i < kBucketsDigits; i += kThreads)
      if (s.histogram[i]) atomicAdd(&exchange.counts[i], s.histogram[i]);
    meet(exchange.arrivals, a.slices, target);
    find_digit<kThreads, kBucketsDigits>(s, need, [&](uint32_t d) { return __ldcg(&exchange.counts[d]); });
    need -= s.above;
    prefix = prefix << digit | s.boundary;
    reached = a.k - need + s.kept;
    meet(exchange.arrivals, a.slices, target);  // now all blocks have read the counts
  } while (reached > a.room && bits > 0);
  if (rank == 0) {
    if (tid == 0) *exchange.found = 0;
    for (uint32_t b = tid; b < kBucketsDigits || b <= a.splitters; b += kThreads) exchange.counts[b] = 0;
  }
  meet(exchange.arrivals, a.slices, target);
  return prefix << bits;
}

// The state of a block. The functions are the phases of the kernel, in the order in which they run.
template <class Key>
struct Block {
  using Row = RowVectors<Key>;
  using Word = typename Filter<Key>::Word;
  static constexpr uint32_t kVector = Row::kVector, kLoads = 4, kWords = 16 / sizeof(Word);
  static constexpr uint32_t kElements = kLoads * kVector;  // elements that a thread reads in a step

  const Buckets& a;
  Shared<kThreads, C>& s;
  C* const buffer;
  const uint32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int64_t row = a.first_row + blockIdx.x / a.slices;
  const uint32_t rank = blockIdx.x % a.slices;
  const Row all{static_cast<const Key*>(a.x) + row * a.length, a.length};
  const Packing<Key> packing = Packing<Key>::make(a.length);
  const Exchange exchange{a, row};
  uint32_t target = 0;  // arrivals at the barriers of the row, see meet()
  C threshold = 0;
  uint32_t staged = 0;  // candidates that this warp has staged

  __device__ __forceinline__ Block(const Buckets& a, unsigned char* shared_bytes)
      : a(a),
        s(*reinterpret_cast<Shared<kThreads, C>*>(shared_bytes)),
        buffer(reinterpret_cast<C*>(shared_bytes + kBucketsControl)) {}

  __device__ __forceinline__ C at(uint32_t i) const { return packing.pack(encode(__ldg(all.x + i), a.order), i); }

  // Every block finds the same threshold, so that blocks need not wait for each other.
  __device__ __forceinline__ void sample() {
    if (rank == 0) {
      if (tid == 0) *exchange.arrivals = *exchange.found = 0;
      for (uint32_t b = tid; b <= a.splitters; b += kThreads) exchange.counts[b] = 0;
    }
    auto token = cg::this_grid().barrier_arrive();
    Key keys[kBucketsSample];
    uint32_t places[kBucketsSample];
#pragma unroll
    for (uint32_t j = 0; j < kBucketsSample; ++j) {
      places[j] = scatter(min(j, a.sample - 1) * kThreads + tid, a.length);
      keys[j] = __ldg(all.x + places[j]);
    }
    C best = 0;
#pragma unroll
    for (uint32_t j = 0; j < kBucketsSample; ++j)
      best = larger(best, packing.pack(encode(keys[j], a.order), places[j]));
    threshold = kth_of_composites<kThreads>(best, a.reach);
    cg::this_grid().barrier_wait(std::move(token));
  }

  // Appends what the warp has staged to the list, from place `at` on.
  __device__ __forceinline__ void append(uint32_t at) {
    __syncwarp();
    for (uint32_t i = lane; i < staged; i += 32)
      if (at + i < a.room) exchange.list[at + i] = buffer[warp * kBucketsStaged + i];
    __syncwarp();
    staged = 0;
  }
  __device__ __forceinline__ uint32_t reserve(uint32_t count) {
    uint32_t at = 0;
    if (lane == 0) at = atomicAdd(exchange.found, count);
    return __shfl_sync(kEveryLane, at, 0);
  }

  // Appends all elements of this block's part of the row that reach the threshold to the list of the row.
  __device__ __forceinline__ void filter() {
    const Filter<Key> filter(packing.key(threshold), a.order);
    constexpr Word kOne = Word{1} << (Filter<Key>::kWordBits - Filter<Key>::kBits);
    const uint32_t last = packing.index(threshold);  // the last of the elements that tie with the threshold
    if (warp == 0 && rank == 0) {
      const uint32_t i = all.loose_index(lane);
      const bool hit = lane < all.loose() && at(i) >= threshold;
      const uint32_t hits = __ballot_sync(kEveryLane, hit);
      if (hit) buffer[__popc(hits & ((1u << lane) - 1))] = at(i);
      staged = __popc(hits);
    }
    constexpr uint32_t kChunk = 32 * kLoads;  // vectors that a warp reads in a step
    const uint32_t step = a.slices * kWarps * kChunk;
#pragma unroll 1
    for (uint32_t start = (rank * kWarps + warp) * kChunk; start < all.vectors; start += step) {
      const uint32_t first = start + lane;
      alignas(16) Word words[kLoads][kWords];
#pragma unroll
      for (uint32_t u = 0; u < kLoads; ++u)
        *reinterpret_cast<uint4*>(words[u]) = __ldcs(all.body() + min(first + u * 32, all.vectors - 1));
      Word most = 0;
#pragma unroll
      for (uint32_t u = 0; u < kLoads; ++u)
#pragma unroll
        for (uint32_t w = 0; w < kWords; ++w) most = filter.most(most, words[u][w]);
      // Beyond the last tie, elements must exceed the threshold's key.
      const bool late = all.index(first) > last;
      Filter<Key> own = filter;
      if (late) own.floor += kOne;
      const bool none = late && own.floor == 0;
      if (!__any_sync(kEveryLane, !none && own.reaches(most))) continue;
      uint32_t hits = 0;
#pragma unroll
      for (uint32_t u = 0; u < kLoads; ++u) {
        uint32_t of_vector = 0;
#pragma unroll
        for (uint32_t w = 0; w < kWords; ++w) of_vector |= own.passes(words[u][w]) << (w * Filter<Key>::kPerWord);
        if (first + u * 32 < all.vectors) hits |= of_vector << (u * kVector);
      }
      if (none) hits = 0;
      const auto index = [&](uint32_t j) { return all.index(first + j / kVector * 32) + j % kVector; };
      if (!late && index(kElements - 1) > last)
        for (uint32_t rest = hits; rest; rest &= rest - 1)
          if (at(index(__ffs(rest) - 1)) < threshold) hits &= ~(rest & -rest);
      // Few hits are staged; many go to the list at once.
      const uint32_t mine = __popc(hits), upto = sum_up_to_lane(mine), sum = __shfl_sync(kEveryLane, upto, 31);
      C* to = buffer + warp * kBucketsStaged;
      uint32_t place = upto - mine;
      if (sum > kBucketsStaged / 2) {
        place += reserve(sum);
        if (place + mine > a.room) hits = 0;
        to = exchange.list;
      } else {
        if (staged + sum > kBucketsStaged) append(reserve(staged));
        place += staged;
        staged += sum;
      }
#pragma unroll
      for (uint32_t j = 0; j < kElements; ++j) {
        const Word word = words[j / kVector][j % kVector / Filter<Key>::kPerWord];
        const Key bits = static_cast<Key>(word >> (j % Filter<Key>::kPerWord * Filter<Key>::kBits));
        if (hits >> j & 1) to[place++] = packing.pack(encode(bits, a.order), index(j));
      }
    }
    // What is left, by one addition for the block: there are many blocks.
    if (lane == 0) s.sums[warp] = staged;
    __syncthreads();
    const uint32_t left = lane < kWarps ? s.sums[lane] : 0, before = sum_up_to_lane(left) - left;
    if (warp == 0 && lane == kWarps - 1) s.above = atomicAdd(exchange.found, before + left);
    __syncthreads();
    append(s.above + __shfl_sync(kEveryLane, before, warp));
    meet(exchange.arrivals, a.slices, target);
  }

  // Moves the candidates from the list to their buckets.
  __device__ __forceinline__ void divide() {
    const uint32_t found = __ldcg(exchange.found), buckets = a.splitters + 1;
    C* const splitters = buffer;
    C* const runs = buffer + kMostSplitters;
    uint32_t* const counts = reinterpret_cast<uint32_t*>(runs + kMostSplitters);
    uint32_t* const starts = counts + kMostSplitters + 4;
    for (uint32_t b = tid; b < buckets; b += kThreads) counts[b] = 0;
    // Each warp sorts 32 of the splitters at a time; the rank of a splitter is the sum of its ranks in these runs.
    for (uint32_t i = tid; i < a.splitters; i += kThreads) {
      C mine = __ldcg(&exchange.list[static_cast<uint64_t>(i) * found / a.splitters]);
#pragma unroll
      for (uint32_t size = 2; size <= 32; size *= 2) {
#pragma unroll
        for (uint32_t stride = size / 2; stride; stride /= 2) {
          const C other = shuffle_xor(mine, stride);
          const bool first = !(lane & stride), downwards = !(lane & size);
          mine = first == downwards ? larger(mine, other) : smaller(mine, other);
        }
      }
      runs[i] = mine;
    }
    __syncthreads();
    for (uint32_t i = tid; i < a.splitters; i += kThreads) {
      const C mine = runs[i];
      uint32_t place = 0;
#pragma unroll 4
      for (const C* run = runs; run < runs + a.splitters; run += 32) {
        uint32_t above = 0;
#pragma unroll
        for (uint32_t half = 16; half; half /= 2) above += run[above + half - 1] > mine ? half : 0;
        place += above + (run[above] > mine);
      }
      splitters[place] = mine;
    }
    __syncthreads();
    // Calls use(c, bucket) for each candidate of this block's share. A bucket's number is that of the splitters above
    // it.
    const auto each = [&](auto use) {
      constexpr int kAtOnce = 4;
      const uint32_t step = a.slices * kThreads;
#pragma unroll 1
      for (uint32_t i = rank * kThreads + tid; i - lane < found; i += kAtOnce * step) {
        C c[kAtOnce];
        uint32_t above[kAtOnce] = {};
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) c[j] = __ldcg(&exchange.list[min(i + j * step, found - 1)]);
#pragma unroll 1
        for (uint32_t half = a.splitters / 2; half; half /= 2)
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j)
            if (splitters[above[j] + half - 1] > c[j]) above[j] += half;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) use(i + j * step < found, c[j], above[j] + (splitters[above[j]] > c[j]));
      }
    };
    // Adds to the count of the bucket, and returns what it was. Where equal elements stand on the list in their order,
    // all lanes have the same bucket.
    const auto add = [&](bool there, uint32_t bucket) {
      int same;
      __match_all_sync(kEveryLane, there ? bucket : ~0u, &same);
      if (!same) return there ? atomicAdd(&counts[bucket], 1u) : 0;
      uint32_t at = 0;
      if (there && lane == 0) at = atomicAdd(&counts[bucket], 32u);
      return __shfl_sync(kEveryLane, at, 0) + lane;
    };
    each([&](bool there, C, uint32_t bucket) { add(there, bucket); });
    __syncthreads();
    // The count of a bucket before this block's was added is the place of this block's candidates in the bucket.
    for (uint32_t b = tid; b < buckets; b += kThreads)
      if (counts[b]) counts[b] = atomicAdd(&exchange.counts[b], counts[b]);
    meet(exchange.arrivals, a.slices, target);
    constexpr uint32_t kEach = kMostSplitters / kThreads + 1;
    uint32_t sizes[kEach], sum = 0;
#pragma unroll
    for (uint32_t j = 0; j < kEach; ++j) {
      const uint32_t b = tid * kEach + j;
      sum += sizes[j] = b < buckets ? __ldcg(&exchange.counts[b]) : 0;
    }
    uint32_t before = sum_before<kThreads>(sum, s.sums);
#pragma unroll
    for (uint32_t j = 0; j < kEach; ++j) {
      const uint32_t b = tid * kEach + j;
      if (b <= buckets) {
        if (rank == 0) exchange.starts[b] = before;
        starts[b] = before;
      }
      before += sizes[j];
    }
    __syncthreads();
    let_dependents_start();
    each([&](bool there, C c, uint32_t bucket) {
      const uint32_t place = starts[bucket] + add(there, bucket);
      if (there && starts[bucket] < a.k) exchange.sorted[place] = c;
    });
  }
};

template <class Key>
__global__ void __launch_bounds__(kThreads, kBucketsResident) buckets_kernel(const __grid_constant__ Buckets a) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Block<Key> block(a, shared_bytes);
  block.sample();
  for (bool searched = false;; searched = true) {
    block.filter();
    const uint32_t found = __ldcg(block.exchange.found);
    if (searched || (found >= a.k && found <= a.room)) break;
    uint32_t target = block.target;
    block.threshold = search<Key>(a, block.s, block.row, block.rank, target);
    block.target = target;
  }
  block.divide();
}

// Writes the candidates in_order[0, count) as the results from place `at` on.
template <class Key>
__device__ __forceinline__ void write(const Buckets& a, const C* in_order, int64_t at, uint32_t count) {
  const Packing<Key> packing = Packing<Key>::make(a.length);
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    static_cast<Key*>(a.values)[at + i] = decode(packing.key(in_order[i]), a.order);
    a.indices[at + i] = static_cast<int32_t>(packing.index(in_order[i]));
  }
}

// Sorts the buckets that begin within a window of places, and writes them.
__global__ void __launch_bounds__(kThreads, kBucketsResident)
    buckets_sort_kernel(const __grid_constant__ Buckets a, uint32_t windows, int key_bits) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  __shared__ uint32_t begin, end;
  auto& s = *reinterpret_cast<Shared<kThreads, C>*>(shared_bytes);
  C* buffer = reinterpret_cast<C*>(shared_bytes + kBucketsControl);
  const int64_t row = blockIdx.x / windows;
  const uint32_t window = blockIdx.x % windows, from = window * kBucketsWindow, to = min(a.k, from + kBucketsWindow);
  const Exchange exchange(a, row);
  wait_for_predecessor();
  // Of equal starts, the first one tells where others end; the last one is at least k.
  for (uint32_t b = threadIdx.x; b <= a.splitters + 1; b += kThreads) {
    const uint32_t start = exchange.starts[b], before = b ? exchange.starts[b - 1] : 0;
    if (start >= from && (b == 0 || before < from)) begin = start;
    if (start >= to && before < to) end = start;
  }
  __syncthreads();
  if (begin >= to) return;
  const uint32_t m = end - begin;
  C* in_order = exchange.sorted + begin;
  if (m <= kBucketsRoom) {
    for (uint32_t i = threadIdx.x; i < m; i += kThreads) buffer[i] = in_order[i];
    if (threadIdx.x == 0) s.count = m;
    __syncthreads();
    sort_candidates<kThreads>(s, buffer, m, buffer + kBucketsRoom, kBucketsRoom);
    in_order = buffer;
  } else {
    sort_descending<kThreads>(in_order, m);
  }
  const int64_t at = row * a.k + begin;
  const uint32_t count = min(m, a.k - begin);
  switch (key_bits) {
    case 16: return write<uint16_t>(a, in_order, at, count);
    case 32: return write<uint32_t>(a, in_order, at, count);
  }
}

template <class Key>
cudaError_t run(cudaStream_t stream, const Problem& problem, bool overlap, Buckets a) {
  const int64_t rows = problem.rows.count();
  Launch shape;
  shape.block = dim3(kThreads);
  shape.shared_bytes = kBucketsShared;
  static Residents of_kernel;
  int fitting = 0;
  cudaError_t status = of_kernel.count(reinterpret_cast<const void*>(buckets_kernel<Key>), shape, &fitting);
  if (status != cudaSuccess) return status;
  // If the device cannot run that many blocks at the same time, a row gets fewer blocks, or rows take turns.
  a.slices = std::min(a.slices, static_cast<uint32_t>(fitting));
  const int64_t together = fitting / a.slices;
  shape.together = true;
  for (; a.first_row < rows && status == cudaSuccess; a.first_row += together) {
    shape.grid = dim3(static_cast<unsigned>(std::min(together, rows - a.first_row) * a.slices));
    status = launch(stream, shape, buckets_kernel<Key>, a);
  }
  if (status != cudaSuccess) return status;
  const uint32_t windows = (a.k + kBucketsWindow - 1) / kBucketsWindow;
  Launch last = {dim3(static_cast<unsigned>(rows * windows)), dim3(kThreads), kBucketsSortShared};
  last.overlap = overlap;
  return launch(stream, last, buckets_sort_kernel, a, windows, problem.key_bits);
}

}  // namespace

cudaError_t launch_buckets(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const BucketsShape shape = buckets_shape(problem.rows.length, problem.k);
  Buckets a = {call_of(problem, buffers)};
  a.row_bytes = shape.bytes;
  a.slices = static_cast<uint32_t>(plan.slices);
  a.sample = shape.sample;
  a.reach = shape.reach;
  a.splitters = shape.splitters;
  a.room = static_cast<uint32_t>(shape.room);
  a.starts = shape.starts;
  a.list = shape.list;
  a.sorted = shape.sorted;
  switch (problem.key_bits) {
    case 16: return run<uint16_t>(stream, problem, plan.overlap, a);
    case 32: return run<uint32_t>(stream, problem, plan.overlap, a);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxgpuops::topk
