// Top-k of rows that are too long for a warp, for k up to kMaxStreamK (or any k if a block holds a whole row).
//
// A block reads the tiles of a row once. Asynchronous copies bring them to shared memory, several tiles ahead, and each
// warp goes through them at its own pace. Elements that reach a threshold are appended to a buffer of candidates.
//
// The threshold is found as follows. The largest element that a thread has read is a delegate. If k delegates reach a
// key, at least k elements do. So for k up to half the number of threads, the k-th largest delegate is a threshold,
// which rises at tiles 0, 4, 16, 64 and so on. For larger k, the number of delegates above a key tells about how many
// elements are above it. A threshold chosen in this way is a guess, set five standard deviations too low; if too few
// elements reach it, the tiles are read again without it. Whenever the buffer is full, the block synchronises, and the
// threshold rises to about the k-th candidate. Tiles are read in a scattered order, so that sorted rows behave like
// random ones. If the delegates of the first tile show that the row is in order, scattered elements give the first
// threshold (a guess only of 64 bits). If many delegates tie with it, or some do and there are many tiles, the elements
// of the first tile are counted and an index is added to the threshold.
//
// Blocks that share a row take its tiles in turn. Each publishes a key that some of its delegates reach; enough of
// these keys give a bound for the whole row. They are a cluster, whose first block collects the candidates that reach
// the bound from the shared memory of the others.
//
// Bytes moved: the input once (twice after a wrong guess), and k results (value and index). Sources: DeepSelect's
// running threshold, Dr. Top-k's delegates (arXiv 2109.08219), AIR's histograms (SC'23).
#include <cooperative_groups.h>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "topk/cuda/candidates.cuh"
#include "topk/cuda/kernels.h"
#include "topk/cuda/row_vectors.cuh"
#include "topk/cuda/scatter.cuh"
#include "topk/cuda/stream_shape.h"

namespace jaxgpuops::topk {
namespace {

namespace cg = cooperative_groups;

constexpr uint32_t kSampled = 8;  // elements of a thread's sample

struct Stream : Call {
  uint32_t slices;
  uint32_t reach, quorum;  // if `reach` elements of each of `quorum` slices reach a key, at least k of the row do
  uint32_t keep, room;     // candidates that a full buffer is cut to; candidates that the buffer holds
  uint32_t stages;         // tiles in flight
};

// Waits for the oldest of the tiles in flight. (The instruction contains the number of later tiles that may still be in
// flight.)
__device__ __forceinline__ void wait_for_tile(uint32_t stages) {
  static_assert(kMaxStages == 5);
  if (stages == 5) {
    wait_for_async_copies<4>();
  } else if (stages == 4) {
    wait_for_async_copies<3>();
  } else if (stages == 3) {
    wait_for_async_copies<2>();
  } else if (stages == 2) {
    wait_for_async_copies<1>();
  } else {
    wait_for_async_copies<0>();
  }
}

// Whether neighbours are alike: four neighbours reach the threshold, and none of some warp, or, if the largest elements
// shall not be at the beginning, none of the first one.
__device__ __forceinline__ bool is_in_order(bool reaches, bool later) {
  const uint32_t lanes = __ballot_sync(kEveryLane, reaches), pairs = lanes & lanes >> 1, fours = pairs & pairs >> 2;
  return __syncthreads_or(fours & 0x11111111) && __syncthreads_or(lanes == 0 && !(later && threadIdx.x >= 32));
}

// The largest of some elements that are anywhere in the row. Threads have different ones.
template <class Key, int kThreads>
__device__ __noinline__ Key largest_of_sample(const Key* x, uint32_t length, int64_t inner, KeyOrder order) {
  Key bits[kSampled], most = 0;
#pragma unroll
  for (uint32_t i = 0; i < kSampled; ++i)
    bits[i] = __ldg(x + scatter_apart(i * kThreads + threadIdx.x, kSampled * kThreads, length) * inner);
#pragma unroll
  for (uint32_t i = 0; i < kSampled; ++i) most = larger(most, encode(bits[i], order));
  return most;
}

// Appends the candidates of several lists that reach the threshold. List i has counts[i] candidates, and `longest` is
// the largest of these counts. At most a.keep candidates stay in the buffer, among them the k largest. Starts and ends
// with the block in step.
template <int kThreads, class Key, class At>
__device__ void collect(Shared<kThreads, Composite<Key>>& s, Composite<Key>* buffer, Packing<Key> packing,
                        const Stream& a, Composite<Key> threshold, uint32_t lists, const uint32_t* counts,
                        uint32_t longest, At at) {
  using C = Composite<Key>;
  constexpr uint32_t kReads = sizeof(C) == 16 ? 6 : 12;  // candidates that a lane reads before the warp appends them
  const uint32_t lane = threadIdx.x % 32, parts = max(1, (longest + 31) / 32);
  const uint32_t reciprocal = ~0u / parts + 1;  // exact for the few parts there are
#pragma unroll 1
  for (uint32_t start = 0; start < lists * parts; start += kReads * (kThreads / 32)) {
    C c[kReads];
    uint32_t hits = 0;
#pragma unroll
    for (uint32_t j = 0; j < kReads; ++j) {
      const uint32_t part = start + j * (kThreads / 32) + threadIdx.x / 32;
      const uint32_t from = parts == 1 ? part : __umulhi(part, reciprocal), i = (part - from * parts) * 32 + lane;
      const bool there = from < lists && i < counts[from];
      c[j] = there ? at(from, i) : C{0};
      hits |= static_cast<uint32_t>(there) << j;
    }
    while (true) {
#pragma unroll
      for (uint32_t j = 0; j < kReads; ++j)
        if (c[j] < threshold) hits &= ~(1u << j);
      if (__any_sync(kEveryLane, hits)) {
#pragma unroll
        for (uint32_t j = 0; j < kReads; ++j) {
          if (!(hits >> j & 1)) continue;
          const uint32_t place = atomicAdd(&s.count, 1u);
          if (place >= a.room) continue;
          buffer[place] = c[j];
          hits &= ~(1u << j);
        }
      }
      if (!__syncthreads_or(hits)) break;
      threshold = larger(threshold, make_room<kThreads, Key>(s, buffer, packing, a.k, a.keep, a.room));
    }
  }
  if (s.count > a.keep) reselect<kThreads, Key>(s, buffer, packing, a.k, a.keep);
}

// The state of a thread in stream_kernel. The functions are the phases of the kernel, in the order in which they run.
template <class Key, int kThreads, bool kStrided>
struct Block {
  using C = Composite<Key>;
  using Word = typename Filter<Key>::Word;
  static constexpr uint32_t kPer = tile_elements(sizeof(Key), 1);  // elements of a tile that a thread copies and reads
  static constexpr uint32_t kVector = 16 / sizeof(Key), kLoads = kPer / kVector;
  static constexpr uint32_t kLoadWords = 16 / sizeof(Word);
  static constexpr uint32_t kTileVectors = kThreads * kLoads;
  // The number of tiles after which delegates raise the threshold for the second time.
  static constexpr uint32_t kFirstStop = 4;
  static_assert(kPer <= 32);
  static_assert(sizeof(Shared<kThreads, C>) <= stream_control_bytes(sizeof(C), kThreads));

  const Stream& a;
  Shared<kThreads, C>& s;
  uint4* const ring;  // tiles in flight
  C* const buffer;    // candidates
  const uint32_t tid = threadIdx.x;
  const int64_t row = blockIdx.x / a.slices;
  const uint32_t rank = blockIdx.x % a.slices;
  const Packing<Key> packing = Packing<Key>::make(a.length);
  const Key* const x = static_cast<const Key*>(a.x) + row / a.inner * a.length * a.inner + row % a.inner;

  const RowVectors<Key> all{x, a.length, !kStrided};

  // The number of loose elements of the row if this is its first block, which takes them; else 0.
  uint32_t loose;
  uint32_t tiles;   // tiles of this block; the last may lie past the end of the row
  uint32_t stride;  // the step from one visited tile to the next
  uint32_t count;   // how many elements this block has
  uint32_t k;       // k, but at most `count`

  // If k exceeds half the threads, the delegates still show roughly where the k-th element of the slice lies. That is a
  // guess: if too few elements reach it, the slice is read again without it.
  bool delegates, guesses;
  bool samples;          // scattered elements give the first threshold if the row is in order
  bool ordered = false;  // it is: neighbours are alike, so delegates do not show how many elements are above a key
  uint32_t start;        // the first tile
  Key best;              // the largest of this thread's elements: its delegate
  C threshold;
  Filter<Key> filter{0, a.order};
  uint32_t last;   // index of the threshold
  uint32_t left;   // hits of the present tile that found no place
  uint32_t ahead;  // the tile to copy next
  uint32_t step, tile, stage;

  __device__ __forceinline__ Block(const Stream& a, unsigned char* shared_bytes)
      : a(a),
        s(*reinterpret_cast<Shared<kThreads, C>*>(shared_bytes)),
        ring(reinterpret_cast<uint4*>(shared_bytes + stream_control_bytes(sizeof(C), kThreads))),
        buffer(reinterpret_cast<C*>(ring + a.stages * kTileVectors)) {
    loose = rank == 0 ? all.loose() : 0;
    const uint32_t row_tiles = (all.vectors + kTileVectors - 1) / kTileVectors;
    tiles = (row_tiles + a.slices - 1) / a.slices;
    stride = scattered_stride(tiles);
    count = loose;
    if (rank < row_tiles) {
      const uint32_t mine = (row_tiles - 1 - rank) / a.slices + 1;
      const bool last = (row_tiles - 1) % a.slices == rank;
      count += (mine * kTileVectors - (last ? row_tiles * kTileVectors - all.vectors : 0)) * kVector;
    }
    k = max(1, min(a.k, count));
    delegates = k <= kThreads / 2;
    guesses = !delegates && count > 8 * k;
    // Among equal elements the first ones are in the result, so the first tile is read first. But without a sample, a
    // guess needs a typical tile, which is the middle one. (100 x 2^20 float32, rising, k = 256: 133 us, and 232 with a
    // sample. Elements of 64 bits gain by it.)
    samples = delegates || sizeof(Key) == 8;
    start = samples || tiles == 0 ? 0 : (tiles - 1) / 2;
  }

  __device__ __forceinline__ uint32_t first_vector(uint32_t tile) const {
    return (tile * a.slices + rank) * kTileVectors + tid;
  }
  __device__ __forceinline__ uint32_t advance(uint32_t tile) const {
    return tile + stride >= tiles ? tile + stride - tiles : tile + stride;
  }

  // Each thread copies the vectors that it will read itself, so no barrier is needed between the copies and the reads.
  __device__ __forceinline__ void copy(uint32_t tile, uint32_t stage) {
    const uint32_t v = first_vector(tile);
    uint4* to = ring + stage * kTileVectors + tid;
    if constexpr (kStrided) {
      for (uint32_t u = 0; u < kLoads && v + u * kThreads < all.vectors; ++u)
        for (uint32_t e = 0; e < kVector; ++e)
          reinterpret_cast<Key*>(to + u * kThreads)[e] = x[((v + u * kThreads) * kVector + e) * a.inner];
    } else {
      const uint4* from = all.body() + v;
      if (v + (kLoads - 1) * kThreads < all.vectors) {
#pragma unroll
        for (uint32_t u = 0; u < kLoads; ++u) copy_async(to + u * kThreads, from + u * kThreads);
      } else {
#pragma unroll 1
        for (uint32_t u = 0; v + u * kThreads < all.vectors; ++u) copy_async(to + u * kThreads, from + u * kThreads);
      }
    }
  }
  __device__ __forceinline__ void fill(uint32_t from, uint32_t to) {
    for (uint32_t stage = from; stage < to; ++stage) {
      if (stage < tiles) copy(ahead, stage);
      commit_async_copies();
      ahead = advance(ahead);
    }
  }

  // These return the thread's element j of the present tile, its index, and a bit for each element of the thread that
  // exists.
  __device__ __forceinline__ Key element(uint32_t j) const {
    return encode(reinterpret_cast<const Key*>(ring + (stage * kLoads + j / kVector) * kThreads + tid)[j % kVector],
                  a.order);
  }
  __device__ __forceinline__ uint32_t index(uint32_t j) const {
    return all.index(first_vector(tile) + j / kVector * kThreads) + j % kVector;
  }
  __device__ __forceinline__ uint32_t present() const {
    const uint32_t first = first_vector(tile);
    const uint32_t loaded = first < all.vectors ? min(kLoads, (all.vectors - first + kThreads - 1) / kThreads) : 0;
    return loaded * kVector == 32 ? ~0u : (1u << (loaded * kVector)) - 1;
  }

  // Returns a threshold with an index: of the elements of the tile that have this key or a larger one, only the first k
  // reach it.
  __device__ __forceinline__ C ties(Key key) {
    const uint32_t there = present();
    uint32_t found = 0;
#pragma unroll 1
    for (uint32_t u = 0; u < kLoads && found < k; ++u) {
      uint32_t hits = 0;
#pragma unroll
      for (uint32_t e = 0; e < kVector; ++e) hits |= static_cast<uint32_t>(element(u * kVector + e) >= key) << e;
      hits &= there >> (u * kVector);
      const uint32_t before = found + sum_before<kThreads>(__popc(hits), s.sums), after = before + __popc(hits);
      if (before < k && after >= k) {
        for (uint32_t more = k - 1 - before; more; --more) hits &= hits - 1;
        s.boundary = index(u * kVector + __ffs(hits) - 1);
      }
      if (tid == kThreads - 1) s.above = after;
      __syncthreads();
      found = s.above;
    }
    return found < k ? packing.lowest(key) : packing.pack(key, s.boundary);
  }

  // Starts to load the first tiles, and appends the loose elements. (If it started to load all tiles at once, the later
  // ones would delay the loose elements.)
  __device__ __forceinline__ void begin(uint32_t early) {
    best = 0;
    ahead = start;
    fill(0, early);
    if (tid == 0) s.count = s.full = 0;
    __syncthreads();
    if (loose) {
      const uint32_t at = all.loose_index(tid);
      if (tid < loose) best = encode(x[at * a.inner], a.order);
      append_hits(s, buffer, a.room, tid < loose, [&](int) { return packing.pack(best, at); });
    }
    threshold = 0;
    filter = Filter<Key>(0, a.order);
    left = 0;
    last = a.length;
    step = 0, tile = start, stage = 0;
  }

  // Reads tiles up to number `stop`, and appends the elements that reach the threshold. Each warp does so at its own
  // pace, but stops when the buffer is full, possibly with hits that found no place. Returns whether any thread has
  // such hits.
  __device__ __forceinline__ bool take_tiles(uint32_t stop) {
    for (; step < stop; ++step) {
      wait_for_tile(a.stages);
      const uint32_t full = tid % 32 == 0 ? atomicOr(&s.full, 0) : 0;  // other threads may set it at the same time
      alignas(16) Word words[kLoads][kLoadWords];
      Word most = 0;
#pragma unroll
      for (uint32_t u = 0; u < kLoads; ++u) {
        *reinterpret_cast<uint4*>(words[u]) = ring[(stage * kLoads + u) * kThreads + tid];
#pragma unroll
        for (uint32_t w = 0; w < kLoadWords; ++w) most = filter.most(most, words[u][w]);
      }
      // If all indices of the tile are larger than that of the threshold, keys that equal the threshold's do not reach
      // it.
      const bool late = all.index(first_vector(tile)) > last;
      if (__any_sync(kEveryLane, (late ? filter.exceeds(most) : filter.reaches(most)) || full || left)) {
        if (__any_sync(kEveryLane, full)) break;
        uint32_t hits = left;
        const bool again = __any_sync(kEveryLane, left);
        if (!again) {
#pragma unroll
          for (uint32_t u = 0; u < kLoads; ++u)
#pragma unroll
            for (uint32_t w = 0; w < kLoadWords; ++w)
              hits |= filter.passes(words[u][w]) << (u * kVector + w * Filter<Key>::kPerWord);
          hits &= present();
        }
        if (again || packing.lowest(packing.key(threshold)) != threshold) {
          // The index decides whether a key that equals the threshold's reaches it.
          for (uint32_t rest = hits; rest; rest &= rest - 1) {
            const uint32_t j = __ffs(rest) - 1;
            if (packing.pack(element(j), index(j)) < threshold) hits &= ~(1u << j);
          }
        }
        left = append_hits(s, buffer, a.room, hits, [&](uint32_t j) {
          best = larger(best, element(j));
          return packing.pack(element(j), index(j));
        });
        if (__any_sync(kEveryLane, left)) {
          if (tid % 32 == 0) atomicOr(&s.full, 1);
          break;
        }
      }
      if (step + a.stages < tiles) copy(ahead, stage);
      commit_async_copies();
      ahead = advance(ahead);
      tile = advance(tile);
      stage = stage + 1 == a.stages ? 0 : stage + 1;
    }
    return __syncthreads_or(step < stop);
  }

  // How many threads shall reach a threshold if each has read so many elements.
  __device__ __forceinline__ uint32_t reach_of(float elements) const {
    if (!guesses) return k;
    // The expected share of threads that have read one of the k largest, and five deviations more.
    const float share = static_cast<float>(k) / count, seen = 1 - __expf(-share * elements);
    return static_cast<uint32_t>(kThreads * seen + 5 * sqrtf(kThreads * seen * (1 - seen))) + 1;
  }

  // Raises the threshold after `stop` tiles, by the delegates of this block.
  __device__ __forceinline__ void raise(uint32_t stop) {
    constexpr uint32_t kMost = kThreads * 3 / 4;
    if (!delegates && (!guesses || ordered)) return;
    if (stop == 0) {
      const uint32_t there = present();
#pragma unroll
      for (uint32_t j = 0; j < kPer; ++j)
        if (there >> j & 1) best = larger(best, element(j));
    }
    const uint32_t reach = reach_of(kPer * (stop + 1.0f));
    if (reach > kMost) return;
    Key most = best, kth = kth_of_block<kThreads>(best, reach);
    ordered = samples && stop == 0 && tiles >= kFirstStop && k == a.k && a.length >= kSampled * kThreads &&
              reach_of(kSampled) <= kMost && is_in_order(best >= kth, delegates);
    if (ordered) {
      most = largest_of_sample<Key, kThreads>(x, a.length, a.inner, a.order);
      const Key of_sample = kth_of_block<kThreads>(most, reach_of(kSampled));
      kth = guesses ? of_sample : larger(kth, of_sample);
    }
    threshold = larger(threshold, packing.lowest(kth));
    if (stop > 0) return;
    // If all tiles have as many ties as the first one, they would soon fill the buffer.
    const uint32_t tied = __syncthreads_count(most == kth);
    if (tied > kThreads / 8 || (tied > kThreads / 64 && tied * tiles > kThreads / 2))
      threshold = larger(threshold, ties(kth));
  }

  // Collects the elements of this block's tiles that reach a threshold. Afterwards either there are at least k
  // candidates, or the threshold is a proven bound and the candidates are all elements that reach it.
  __device__ __forceinline__ void read() {
    const uint32_t early = min(2, a.stages);
    for (;; guesses = false) {
      begin(early);
      for (uint32_t stop = 0;;) {
        const bool full = take_tiles(stop);
        if (!full && stop == tiles) break;
        if (full) {
          threshold = larger(threshold, make_room<kThreads, Key>(s, buffer, packing, k, a.keep, a.room));
        } else {
          if (stop == 0) {
            wait_for_tile(early);
            fill(early, a.stages);
          }
          raise(stop);
          stop = min(stop ? 4 * stop : kFirstStop, tiles);
        }
        filter = Filter<Key>(packing.key(threshold), a.order);
        last = packing.index(threshold);
      }
      if (!guesses) break;
      // Drops elements below the last guess, which the buffer has from before that guess: later tiles may have had more
      // elements that are as large, and did not append them.
      compact<kThreads>(s, buffer, threshold);
      if (s.count >= k) break;
      __syncthreads();
    }
  }

  __device__ __forceinline__ void write() {
    write_result<kThreads, Key>(s, a, packing, buffer, buffer + a.keep, a.keep, row);
  }

  // Writes the result, if the block has a whole row.
  __device__ __forceinline__ void write_alone() {
    if (s.count > a.keep) {
      reselect<kThreads, Key>(s, buffer, packing, k, a.keep);
    } else if (delegates && s.count > kThreads / 2) {
      compact<kThreads>(s, buffer, packing.lowest(kth_of_block<kThreads>(best, k)));
    }
    write();
  }

  // In a cluster, the first block collects the candidates of all blocks.
  __device__ __forceinline__ void gather_and_write() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    __shared__ uint32_t counts[kStreamBlocks];  // how many candidates the other blocks have
    const cg::cluster_group cluster = cg::this_cluster();
    if (a.reach) {
      const Key mine = kth_of_block<kThreads>(best, a.reach);
      if (tid == 0) s.low[0] = packing.lowest(mine);
      cluster.sync();
      // The largest bound that a quorum of the blocks told. Each warp finds it.
      const uint32_t lane = tid % 32;
      const C told = lane < a.slices ? *cluster.map_shared_rank(&s.low[0], lane) : C{0};
      uint32_t reaching = 0;
#pragma unroll
      for (uint32_t b = 0; b < kStreamBlocks; ++b) reaching += b < a.slices && shuffle_from(told, b) >= told;
      threshold = larger(threshold, largest_of_warp(reaching >= a.quorum ? told : C{0}));
      compact<kThreads>(s, buffer, threshold);
    }
    cluster.sync();
    if (rank == 0) {
      uint32_t longest = 0;
      if (tid + 1 < a.slices) counts[tid] = *cluster.map_shared_rank(&s.count, tid + 1);
      __syncthreads();
      for (uint32_t i = 0; i + 1 < a.slices; ++i) longest = max(longest, counts[i]);
      collect<kThreads, Key>(s, buffer, packing, a, threshold, a.slices - 1, counts, longest,
                             [&](uint32_t from, uint32_t i) { return cluster.map_shared_rank(buffer, from + 1)[i]; });
    }
    cluster.sync();  // now all candidates of the other blocks have been read
    if (rank == 0) write();
#endif
  }
};

template <class Key, int kThreads, bool kStrided>
__global__ void __launch_bounds__(kThreads, 512 / kThreads) stream_kernel(const Stream a) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Block<Key, kThreads, kStrided> block(a, shared_bytes);
  block.read();
  if (a.slices == 1) {
    block.write_alone();
  } else {
    block.gather_and_write();
  }
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
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.shared_bytes = shape.shared_bytes;
  config.cluster = static_cast<int>(a.slices);
  const auto kernel = strided ? stream_kernel<Key, kThreads, true> : stream_kernel<Key, kThreads, false>;
  return launch(stream, config, kernel, a);
}

}  // namespace

cudaError_t launch_stream(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  Stream a = {call_of(problem, buffers)};
  a.slices = static_cast<uint32_t>(plan.slices);
  // Each block publishes a key that twice its share of k elements reach. So half of the blocks suffice for a bound, and
  // nobody waits for the slowest ones. Where delegates are few, the key is for one share.
  const uint32_t even = (a.k + a.slices - 1) / a.slices, twice = (2 * a.k + a.slices - 1) / a.slices;
  const uint32_t threads = static_cast<uint32_t>(plan.threads);
  a.reach = twice <= threads / 4 ? twice : even <= threads * 3 / 4 ? even : 0;
  if (a.reach) a.quorum = (a.k + a.reach - 1) / a.reach;
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    return plan.threads == 256 ? run<Key, 256>(stream, plan, problem, a) : run<Key, 512>(stream, plan, problem, a);
  });
}

}  // namespace jaxgpuops::topk
