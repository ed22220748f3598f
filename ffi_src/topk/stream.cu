// Top-k of rows too long for a warp, k <= kMaxStreamK (or any k where a block holds a whole row).
//
// A block streams its slice of a row once, in tiles that asynchronous copies bring to shared memory several ahead.
// Elements at or above a threshold go to a candidate buffer. Each thread's maximum is a delegate: k delegates at or
// above t are k elements at or above t, so for k up to half the threads the k-th delegate is the threshold, raised at
// tiles 0, 4, 16, 64, … For larger k the delegates' number above t tells where about the k-th element is: that
// threshold is a guess, five standard deviations low, and where too few elements reach it the slice is read again
// without. Whenever the buffer passes `keep` candidates, the threshold rises to about the k-th of them. Tiles are
// visited in a scattered order, so that a sorted row looks like a random one.
//
// Blocks that share a row: within a cluster (kStream) one block gathers the others' candidates through distributed
// shared memory; without (kGrid), or for larger k, each leaves its k best as a sorted list, and one block, of the
// cluster or of a second kernel, reads the entries above a common bound.
//
// Bytes moved: the input once (twice after a wrong guess), k (value + index) out; kGrid adds slices * k composites
// written and mostly not read. After: DeepSelect's running threshold, Dr. Top-k's delegates (arXiv 2109.08219), AIR's
// histograms (SC'23).
#include <cooperative_groups.h>
#include <cuda_pipeline.h>

#include "common/launch.cuh"
#include "topk/candidates.cuh"
#include "topk/kernels.h"
#include "topk/stream_shape.h"

namespace jaxgpuops::topk {
namespace {

namespace cg = cooperative_groups;

struct Stream {
  const void* x;
  void* values;
  int32_t* indices;
  void* lists;  // kGrid: [row][slice][k] composites
  KeyOrder order;
  int64_t inner;
  uint32_t length, k, slices, slice;  // slice: elements of one (the last may have fewer)
  uint32_t keep, room;                // candidates: where the threshold rises, and what the buffer holds
  uint32_t stages;                    // tiles in flight
  bool sorted, cluster;
};

// Writes the k largest of buffer[0, s.count) to the output, in the order asked for.
template <int kThreads, class Key>
__device__ void write_result(Shared<kThreads, Composite<Key>>& s, const Stream& a, Packing<Key> packing,
                             Composite<Key>* buffer, Composite<Key>* scratch, uint32_t room, int64_t row) {
  if (a.k <= kThreads / 2) prune<kThreads, Key>(s, buffer, packing, a.k);
  sort_candidates<kThreads>(s, buffer, a.k, scratch, room);
  if (!a.sorted) {
    for (uint32_t i = threadIdx.x; i < a.k; i += kThreads) buffer[i] = packing.by_index(buffer[i]);
    if (threadIdx.x == 0) s.count = a.k;
    __syncthreads();
    sort_candidates<kThreads>(s, buffer, a.k, scratch, room);
  }
  const int64_t base = row / a.inner * a.k * a.inner + row % a.inner;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < a.k; i += kThreads) {
    const Composite<Key> c = a.sorted ? buffer[i] : packing.from_by_index(buffer[i]);
    static_cast<Key*>(a.values)[base + i * a.inner] = decode(packing.key(c), a.order);
    a.indices[base + i * a.inner] = static_cast<int32_t>(packing.index(c));
  }
}

// The tiles at which the delegates, standing for ever more elements, raise the threshold.
__device__ __forceinline__ bool refreshes(uint32_t step) {
  return step == 0 || ((step & (step - 1)) == 0 && (step & 0x55555554u));
}

template <class Key, int kThreads, bool kStrided>
__global__ void __launch_bounds__(kThreads) stream_kernel(const Stream a) {
  using C = Composite<Key>;
  using Word = typename Filter<Key>::Word;
  constexpr uint32_t kPer = tile_elements(sizeof(Key), 1);  // elements of a tile that one thread copies and reads
  constexpr uint32_t kVector = 16 / sizeof(Key), kLoads = kPer / kVector;
  constexpr uint32_t kLoadWords = 16 / sizeof(Word);
  constexpr uint32_t kTileVectors = kThreads * kLoads;
  static_assert(sizeof(Shared<kThreads, C>) <= stream_control_bytes(sizeof(C), kThreads));
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& s = *reinterpret_cast<Shared<kThreads, C>*>(shared_bytes);
  uint4* ring = reinterpret_cast<uint4*>(shared_bytes + stream_control_bytes(sizeof(C), kThreads));
  C* buffer = reinterpret_cast<C*>(ring + a.stages * kTileVectors);
  C* scratch = buffer + a.keep;  // once the slice has been read

  const uint32_t tid = threadIdx.x;
  const int64_t row = blockIdx.x / a.slices;
  const uint32_t rank = blockIdx.x % a.slices;
  const Packing<Key> packing = Packing<Key>::make(a.length);
  const uint32_t begin = rank * a.slice, count = min(a.slice, a.length - begin);
  const uint32_t k = min(a.k, count);
  const Key* x = static_cast<const Key*>(a.x) + row / a.inner * a.length * a.inner + row % a.inner + begin * a.inner;

  // Whole vectors start at the first 16-byte boundary; what stands before and after them is read one by one.
  const uint32_t misaligned = kStrided ? 0 : static_cast<uint32_t>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(Key));
  const uint32_t head = min(count, misaligned ? kVector - misaligned : 0);
  const uint32_t vectors = (count - head) / kVector, loose = count - vectors * kVector;
  const uint32_t tiles = (vectors + kTileVectors - 1) / kTileVectors, stride = scattered_stride(tiles);

  // Every thread reads what it copied itself: no barrier stands between the copies and their use.
  const auto copy = [&](uint32_t tile, uint32_t stage) {
    for (uint32_t u = 0; u < kLoads; ++u) {
      const uint32_t v = tile * kTileVectors + u * kThreads + tid;
      if (v >= vectors) break;
      uint4* to = ring + (stage * kLoads + u) * kThreads + tid;
      if constexpr (kStrided) {
        for (uint32_t e = 0; e < kVector; ++e) reinterpret_cast<Key*>(to)[e] = x[(v * kVector + e) * a.inner];
      } else {
        __pipeline_memcpy_async(to, x + head + v * kVector, 16);
      }
    }
  };
  const auto advance = [&](uint32_t tile) { return tile + stride >= tiles ? tile + stride - tiles : tile + stride; };
  // For a k past half the threads the delegates still tell where about the k-th of the slice will be. That is a guess:
  // where too few elements reach it, the slice is read again without.
  const bool delegates = k <= kThreads / 2;
  bool guesses = !delegates && count > 8 * k;
  const float share = static_cast<float>(k) / count;

  Key best;  // of this thread's elements: its delegate
  for (;; guesses = false) {
    best = 0;
    uint32_t ahead = 0;  // the tile to copy next
    for (uint32_t stage = 0; stage < a.stages; ++stage) {
      if (stage < tiles) copy(ahead, stage);
      __pipeline_commit();
      ahead = advance(ahead);
    }

    if (tid == 0) s.count = 0;
    __syncthreads();
    if (loose) {
      const uint32_t at = tid < head ? tid : vectors * kVector + tid;
      if (tid < loose) best = encode(x[at * a.inner], a.order);
      append_hits(s, buffer, tid < loose, [&](int) { return packing.pack(best, begin + at); });
    }

    C threshold = 0;
    Filter<Key> filter(0, a.order);
    for (uint32_t step = 0, tile = 0, stage = 0; step < tiles; ++step, tile = advance(tile)) {
      __pipeline_wait_prior(a.stages - 1);
      const uint4* loads = ring + stage * kTileVectors + tid;
      const auto element = [&](uint32_t j) {  // the thread's j-th of this tile
        return encode(reinterpret_cast<const Key*>(loads + j / kVector * kThreads)[j % kVector], a.order);
      };
      const auto index = [&](uint32_t j) {
        return begin + head + (tile * kTileVectors + j / kVector * kThreads + tid) * kVector + j % kVector;
      };
      const uint32_t first = tile * kTileVectors + tid;
      const uint32_t loaded = first < vectors ? min(kLoads, (vectors - first + kThreads - 1) / kThreads) : 0;
      if (step == 0 && (delegates || guesses))
        for (uint32_t j = 0; j < loaded * kVector; ++j) best = larger(best, element(j));
      if ((delegates || guesses) && refreshes(step)) {
        uint32_t reach = k;
        if (guesses) {  // the share of the threads that have seen an element among the k largest, and five deviations
          const float seen = 1 - powf(1 - share, kPer * (step + 1.0f));
          reach = static_cast<uint32_t>(kThreads * seen + 5 * sqrtf(kThreads * seen * (1 - seen))) + 1;
        }
        if (reach <= kThreads * 3 / 4) {
          threshold = larger(threshold, packing.lowest(kth_of_block<kThreads>(best, reach)));
          filter = Filter<Key>(packing.key(threshold), a.order);
        }
      }
      uint32_t hits = 0;
#pragma unroll
      for (uint32_t u = 0; u < kLoads; ++u) {
        alignas(16) Word words[kLoadWords];
        *reinterpret_cast<uint4*>(words) = loads[u * kThreads];
#pragma unroll
        for (uint32_t w = 0; w < kLoadWords; ++w) {
          const uint32_t bits = filter.passes(words[w]);
          hits |= bits << (u * kVector + w * Filter<Key>::kPerWord);
        }
      }
      hits &= (1u << (loaded * kVector)) - 1;
      if (packing.lowest(packing.key(threshold)) != threshold) {  // ties with the threshold are decided by the index
        for (uint32_t rest = hits; rest; rest &= rest - 1) {
          const uint32_t j = __ffs(rest) - 1;
          if (packing.pack(element(j), index(j)) < threshold) hits &= ~(1u << j);
        }
      }
      const uint32_t filled = append_hits(s, buffer, hits, [&](uint32_t j) {
        best = larger(best, element(j));
        return packing.pack(element(j), index(j));
      });
      if (step + a.stages < tiles) copy(ahead, stage);
      __pipeline_commit();
      ahead = advance(ahead);
      stage = stage + 1 == a.stages ? 0 : stage + 1;
      // The warp that filled the buffer past `keep` saw it: one barrier counts the tile and decides.
      if (__syncthreads_or(filled > a.keep) && step + 1 < tiles) {
        threshold = reselect<kThreads, Key>(s, buffer, packing, k, a.keep);
        filter = Filter<Key>(packing.key(threshold), a.order);
      }
    }
    __syncthreads();
    const bool enough = s.count >= k;
    __syncthreads();
    if (enough) break;
  }

  if (s.count > a.keep) {
    reselect<kThreads, Key>(s, buffer, packing, k, a.keep);
  } else if (delegates && s.count > kThreads / 2) {
    compact<kThreads>(s, buffer, packing.lowest(kth_of_block<kThreads>(best, k)));
  }
  if (a.slices == 1) {
    write_result<kThreads, Key>(s, a, packing, buffer, scratch, a.keep, row);
    return;
  }
  const bool gathers = a.cluster && a.k <= kMaxGatherK;
  if (gathers) {
    if (s.count > a.keep / a.slices) reselect<kThreads, Key>(s, buffer, packing, k, a.keep / a.slices);
  } else {
    sort_candidates<kThreads>(s, buffer, k, scratch, a.keep);
    if (!a.cluster) {
      C* list = static_cast<C*>(a.lists) + (row * a.slices + rank) * a.k;
      for (uint32_t i = tid; i < k; i += kThreads) list[i] = buffer[i];
    }
  }
  if (!a.cluster) return;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const cg::cluster_group cluster = cg::this_cluster();
  cluster.sync();
  if (rank == 0) {
    if (gathers) {
      if (tid < a.slices) s.sums[tid] = *cluster.map_shared_rank(&s.count, tid);
      __syncthreads();
      const uint32_t team = kThreads / a.slices, from = tid / team;  // a part of the block to each block of the cluster
      uint32_t at = 0, total = 0;
      for (uint32_t other = 0; other < a.slices; ++other) {
        at += other < from ? s.sums[other] : 0;
        total += s.sums[other];
      }
      if (from > 0 && from < a.slices) {
        const C* other = cluster.map_shared_rank(buffer, from);
        for (uint32_t i = tid % team; i < s.sums[from]; i += team) buffer[at + i] = other[i];
      }
      __syncthreads();
      if (tid == 0) s.count = total;
    } else {
      merge_lists<kThreads, Key>(
          s, scratch, packing, a.slices, a.k, a.keep, a.room - a.keep,
          [&](uint32_t i) { return cluster.map_shared_rank(buffer, i); },
          [&](uint32_t i) { return min(a.k, min(a.slice, a.length - i * a.slice)); });
    }
  }
  cluster.sync();  // the others' candidates have been read
  if (rank) return;
  write_result<kThreads, Key>(s, a, packing, gathers ? buffer : scratch, gathers ? scratch : buffer, a.keep, row);
#endif
}

template <class Key, int kThreads>
__global__ void __launch_bounds__(kThreads) merge_kernel(const Stream a) {
  using C = Composite<Key>;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& s = *reinterpret_cast<Shared<kThreads, C>*>(shared_bytes);
  C* buffer = reinterpret_cast<C*>(shared_bytes + stream_control_bytes(sizeof(C), kThreads));
  const int64_t row = blockIdx.x;
  const Packing<Key> packing = Packing<Key>::make(a.length);
  const C* lists = static_cast<const C*>(a.lists) + row * a.slices * a.k;
  merge_lists<kThreads, Key>(
      s, buffer, packing, a.slices, a.k, a.keep, a.room - a.keep,
      [&](uint32_t i) { return lists + static_cast<int64_t>(i) * a.k; },
      [&](uint32_t i) { return min(a.k, min(a.slice, a.length - i * a.slice)); });
  write_result<kThreads, Key>(s, a, packing, buffer, buffer + a.room - a.keep, a.keep, row);
}

template <class Key, int kThreads>
cudaError_t run(cudaStream_t stream, const Plan& plan, const Problem& problem, Stream a) {
  const StreamShape shape = stream_shape(sizeof(Key), kThreads, a.length, a.k, a.slices, plan.shared_limit);
  a.keep = shape.keep;
  a.room = shape.room;
  a.stages = shape.stages;
  const bool strided = a.inner > 1;
  Launch config;
  config.block = dim3(kThreads);
  config.grid = dim3(static_cast<unsigned>(problem.rows.count() * a.slices));
  config.shared_bytes = shape.shared_bytes;
  config.cluster = a.cluster ? static_cast<int>(a.slices) : 1;
  const cudaError_t status =
      launch(stream, config, strided ? stream_kernel<Key, kThreads, true> : stream_kernel<Key, kThreads, false>, a);
  if (status != cudaSuccess || plan.algorithm != Algorithm::kGrid) return status;
  config.grid = dim3(static_cast<unsigned>(problem.rows.count()));
  return launch(stream, config, merge_kernel<Key, kThreads>, a);
}

}  // namespace

cudaError_t launch_stream(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  Stream a = {};
  a.x = buffers.x;
  a.values = buffers.values;
  a.indices = buffers.indices;
  a.lists = buffers.workspace;
  a.order = problem.order;
  a.inner = problem.rows.inner;
  a.length = static_cast<uint32_t>(problem.rows.length);
  a.k = static_cast<uint32_t>(problem.k);
  a.slice = slice_elements(a.length, static_cast<uint32_t>(plan.slices), problem.key_bits / 8);
  a.slices = (a.length + a.slice - 1) / a.slice;  // none is empty
  a.sorted = problem.sorted;
  a.cluster = plan.algorithm == Algorithm::kStream && a.slices > 1;
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    return plan.threads == 256 ? run<Key, 256>(stream, plan, problem, a) : run<Key, 512>(stream, plan, problem, a);
  });
}

}  // namespace jaxgpuops::topk
