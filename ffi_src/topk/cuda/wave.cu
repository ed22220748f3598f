// Top-k of few long rows, k <= kMaxWaveK. One wave of blocks reads the rows, and each block publishes a short list.
//
// A thread keeps the best element at each place of its vectors, and a bound of the others. A warp keeps the four
// threads with the best elements, and a bound of all its other elements. A block publishes the elements of its 4 to 48
// best threads, and a bound of all its other elements. The k-th largest of the published elements is a threshold that k
// elements of the row reach; if the lists are long enough, few others do. A second kernel takes the published elements
// that reach it. A warp whose bound reaches the threshold may have more such elements, so the kernel reads the elements
// of that warp again, the warps with the best elements first. While the row is read for the first time, no element is
// compared with a threshold and no block waits for another one.
//
// The best elements may be neighbours (sorted rows, ties). So neighbouring parts of 64 bytes (of 16-bit keys: 32)
// go to different blocks, where four threads keep all their elements. These take longer to read than larger parts, so
// if threads read many elements (wave_places() says where), or bytes, they keep only the best one, and
// neighbouring parts of 256 or 512 bytes go to different blocks. Then, and if the lists lack elements for another
// reason, two things help. If threads read many elements, a block also publishes a bound of its own, the k-th best of
// its threads' elements. And elements that are read again raise the threshold. If the threshold has the largest key of
// the row, the k first elements of that key are the result, and mostly stand together.
//
// Bytes moved: the input once (that of a few warps twice), some 200 bytes of each block to the workspace and back, and
// k results (value and index). Source: Dr. Top-k's delegates (arXiv 2109.08219).
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "topk/cuda/candidates.cuh"
#include "topk/cuda/delegates.cuh"
#include "topk/cuda/kernels.h"
#include "topk/cuda/row_vectors.cuh"
#include "topk/cuda/wave_best.cuh"
#include "topk/cuda/wave_shape.h"

namespace jaxgpuops::topk {
namespace {

struct Wave : Call {
  uint32_t slices;
  uint32_t lanes;        // threads whose elements a block publishes
  uint32_t told;         // elements that it publishes
  bool deep;             // threads read many vectors, so blocks also publish a bound of their own
  uint32_t beside_bits;  // the lanes of a warp that read neighbouring vectors are 1 << beside_bits
};

constexpr int kThreads = kWaveThreads;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kBoardOfWarp = 4;  // threads of a warp on the board of the block

// A row whose vectors are dealt out to the threads of all its blocks, in rounds.
template <class Key>
struct Dealt : RowVectors<Key, sizeof(Vector<Key>)> {
  uint32_t threads, rounds, beside_bits;

  __device__ Dealt(const Wave& a, int64_t row)
      : RowVectors<Key, sizeof(Vector<Key>)>(static_cast<const Key*>(a.x) + row * a.length, a.length),
        threads(a.slices * kThreads),
        rounds((this->vectors + threads - 1) / threads),
        beside_bits(a.beside_bits) {}
  __device__ __forceinline__ Vector<Key> load(uint32_t vector) const {
    return __ldcs(reinterpret_cast<const Vector<Key>*>(this->body()) + vector);
  }
  // The vector that a lane reads in the first round.
  __device__ __forceinline__ uint32_t first(uint32_t share, uint32_t lane) const {
    return ((lane >> beside_bits) * (threads / 32) + share << beside_bits) + (lane & ((1u << beside_bits) - 1));
  }
};

// Returns the share of each round that a warp of a block reads. Neighbouring shares go to different blocks. So
// neighbouring elements are spread over many lists, and in a periodic row no block has the same part of every period.
__device__ __forceinline__ uint32_t share_of_warp(uint32_t block, uint32_t warp, uint32_t blocks) {
  uint32_t turned = block + warp;
  while (turned >= blocks) turned -= blocks;
  return warp * blocks + turned;
}

// The data that the blocks of a row publish. told[i * slices + b], for i < a.told, are the elements of the best threads
// of block b. After these come, for each block, two bounds (each of a part of the block's other elements) and a key
// that k elements of the block reach.
template <class Key>
struct Exchange {
  using C = Composite<Key>;
  C* told;
  C* first;  // the best element of each warp

  __device__ Exchange(const Wave& a, int64_t row) {
    told = reinterpret_cast<C*>(a.workspace_of(row));
    first = told + a.slices * (a.told + kWaveBounds);
  }
};

template <class Key, int kEach>
__global__ void __launch_bounds__(kThreads, 2) wave_kernel(const Wave a) {
  using C = Composite<Key>;
  constexpr int kLoads = kWaveLoads * (sizeof(Key) == 2 && kEach == 1 ? 2 : 1);
  let_dependents_start();
  const int64_t row = blockIdx.x / a.slices;
  const uint32_t rank = blockIdx.x % a.slices, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const Dealt<Key> dealt(a, row);
  const uint32_t mine = dealt.first(share_of_warp(rank, warp, a.slices), lane);
  const Packing<Key> packing = Packing<Key>::make(a.length);

  uint32_t filler = static_cast<uint32_t>(decode(Key{0}, a.order)),
           filler_high = filler;  // the filler loses every comparison
  if constexpr (sizeof(Key) == 8) filler_high = static_cast<uint32_t>(decode(Key{0}, a.order) >> 32);
#pragma unroll
  for (int bits = 8 * sizeof(Key); bits < 32; bits *= 2) filler_high = filler |= filler << bits;
  const auto load = [&](Vector<Key>(&tile)[kLoads], uint32_t vector) {
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const uint32_t v = vector + u * dealt.threads;
      if constexpr (sizeof(Key) == 2) {
        tile[u] = make_uint2(filler, filler);
      } else {
        tile[u] = make_uint4(filler, filler_high, filler, filler_high);
      }
      if (v < dealt.vectors) tile[u] = dealt.load(v);
    }
  };
  Vector<Key> ahead[kLoads];
  load(ahead, mine);
  Best<Key, Dealt<Key>, kEach> best{dealt, a.order, packing, mine};
#pragma unroll 1
  for (uint32_t vector = mine; vector < dealt.vectors; vector += kLoads * dealt.threads) {
    Vector<Key> tile[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) tile[u] = ahead[u];
    if (vector + kLoads * dealt.threads < dealt.vectors) load(ahead, vector + kLoads * dealt.threads);
    best.add(tile, vector);
  }

  const Exchange<Key> exchange(a, row);
  C rest = 0, floor = 0;
  if (mine < dealt.vectors) {
    best.list();
    rest = best.rest();
  }
  C head = best.head();
  if (kEach == 1 && a.deep) floor = kth_of_composites<kThreads>(head, a.k);
  // The board has the best elements of some threads, and all elements that these threads keep.
  constexpr uint32_t kBoard = kWarps * kBoardOfWarp;
  __shared__ C board[kBoard], all[kEach > 1 ? kBoard : 1][kEach], rests[kWarps];
  C kept = 0;
#pragma unroll
  for (uint32_t i = 0; i < kBoardOfWarp; ++i) {
    const C most = largest_of_warp(head);
    if (lane == i) kept = most;
    if (head != most) continue;
    head = 0;
    if constexpr (kEach > 1) {
#pragma unroll
      for (int p = 0; p < kEach; ++p) all[warp * kBoardOfWarp + i][p] = best.left[p], best.left[p] = 0;
    }
  }
  rest = largest_of_warp(larger(head, rest));
  if (lane < kBoardOfWarp) board[warp * kBoardOfWarp + lane] = kept;
  if (lane == 0) {
    rests[warp] = rest;
    exchange.first[rank * kWarps + warp] = kept;
  }
  __syncthreads();
  static_assert(4 * kBoard < kThreads && kWarps < 32 && kEach <= 4);
  if (tid < 4 * kBoard) {  // four threads rank a thread on the board
    const uint32_t place = tid / 4, part = tid % 4;
    const C one = board[place];
    uint32_t above = 0;
#pragma unroll 4
    // Some elements of the board may be 0.
    for (uint32_t i = part; i < kBoard; i += 4) above += board[i] + (i < place) > one;
    above = sum_of_lanes<4>(above);
    if (above < a.lanes && part < kEach)
      exchange.told[(above * kEach + part) * a.slices + rank] = kEach > 1 ? all[place][part] : one;
    if (above == a.lanes && part == 0) exchange.told[a.told * a.slices + rank] = one;
  } else if (warp == kWarps - 1) {
    rest = largest_of_warp(lane < kWarps ? rests[lane] : C{0});
    if (lane == 0) exchange.told[(a.told + 1) * a.slices + rank] = rest;
    if (lane == 1) exchange.told[(a.told + 2) * a.slices + rank] = floor;
  }
}

// Writes the k largest of up to kThreads candidates, in the order asked for. The 16 places after the last candidate are
// 0.
template <class Key>
__device__ __forceinline__ void write_best(const Wave& a, Composite<Key>* buffer, uint32_t count,
                                           const Packing<Key>& packing, int64_t row) {
  // One, two or four threads rank a candidate.
  const uint32_t split_bits = count <= kThreads / 4 ? 2 : count <= kThreads / 2 ? 1 : 0, split = 1u << split_bits;
  const uint32_t candidate = threadIdx.x >> split_bits, part = threadIdx.x & (split - 1);
  const auto sum_of_parts = [&](uint32_t value) {
    if (split_bits) value += shuffle_xor(value, 1);
    if (split_bits > 1) value += shuffle_xor(value, 2);
    return value;
  };
  const Composite<Key> one = buffer[candidate];
  const uint32_t index = packing.index(one);
  uint32_t above = 0;
#pragma unroll 1
  for (uint32_t i = part; i < count; i += 4 * split) {
#pragma unroll
    for (uint32_t u = 0; u < 4; ++u) above += buffer[i + u * split] > one;
  }
  above = sum_of_parts(above);
  const bool chosen = part == 0 && candidate < count && above < a.k;
  uint32_t at = above;
  if (!a.sorted) {
    static_assert(kMaxWaveK * sizeof(uint32_t) <= (wave_room(sizeof(one)) - kThreads - 16) * sizeof(one));
    uint32_t* const indices = reinterpret_cast<uint32_t*>(buffer + kThreads + 16);
    if (chosen) indices[above] = index;
    __syncthreads();
    at = 0;
#pragma unroll 4
    for (uint32_t i = part; i < a.k; i += split) at += indices[i] < index;
    at = sum_of_parts(at);
  }
  if (chosen) {
    const int64_t to = a.place(row, at);
    static_cast<Key*>(a.values)[to] = decode(packing.key(one), a.order);
    a.indices[to] = static_cast<int32_t>(index);
  }
}

template <class C>
__device__ __noinline__ C raise(C value, uint32_t k, C floor) {
  return kth_of_composites<kThreads>(value, k, floor);
}

// The shared memory after the candidates. It says which elements are read again.
template <class Key>
struct Again {
  uint32_t* warps;      // warps whose elements are read again now
  uint32_t* blocks;     // blocks that may hold more than they published
  unsigned char* more;  // for each block, whether it is in `blocks`

  __device__ explicit Again(Composite<Key>* buffer) {
    warps = reinterpret_cast<uint32_t*>(buffer + wave_room(sizeof(Composite<Key>)));
    blocks = warps + kWaveAgain;
    more = reinterpret_cast<unsigned char*>(blocks + kMaxWaveSlices);
  }
};

// The general path, for any number of candidates. The buffer holds all candidates except those that must be read again.
// If neighbours are the best elements, many warps may have more candidates than were published, and far more than k
// elements reach the threshold. So the elements of warps are read again in the order of their best ones, a few warps at
// a time, and raise the threshold before they are kept. Once the k best elements have been read, the best elements of
// few other warps reach the threshold.
template <class Key>
__device__ __noinline__ void finish_any(const Wave& a, unsigned char* shared_bytes, Composite<Key> threshold,
                                        bool again) {
  using C = Composite<Key>;
  constexpr uint32_t kVector = Dealt<Key>::kVector;
  auto& s = *reinterpret_cast<Shared<kThreads, C>*>(shared_bytes);
  C* buffer = reinterpret_cast<C*>(shared_bytes + stream_control_bytes(sizeof(C), kThreads));
  const Again<Key> list(buffer);
  const uint32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int64_t row = blockIdx.x;
  const Packing<Key> packing = Packing<Key>::make(a.length);
  const Exchange<Key> exchange(a, row);
  const Dealt<Key> dealt(a, row);

  if (again) {
    const auto push = [&](uint32_t hits, auto at) {
      while (true) {
        hits = append_hits(s, buffer, wave_room(sizeof(C)), hits, at);
        if (!__syncthreads_or(hits)) break;
        threshold =
            larger(threshold, make_room<kThreads, Key>(s, buffer, packing, a.k, kWaveKeep, wave_room(sizeof(C))));
        for (uint32_t rest = hits; rest; rest &= rest - 1)
          if (at(__ffs(rest) - 1) < threshold) hits &= ~(rest & -rest);
      }
    };
    const uint32_t firsts = s.full * kWarps;
#pragma unroll 1
    for (uint32_t most = kWarps;; most = min(4 * most, kWaveAgain)) {
      C from = threshold;
      bool last = true;
      while (true) {
        C best = 0;
#pragma unroll 1
        for (uint32_t i = tid; i < firsts; i += kThreads) {  // a thread looks at the same warps each time
          const uint32_t block = list.blocks[i / kWarps], at = block * kWarps + i % kWarps;
          const C first = exchange.first[at];
          if (first < from) continue;
          best = larger(best, first);
          const uint32_t place = atomicAdd(&s.above, 1u);
          if (place >= kWaveAgain) continue;
          list.warps[place] = share_of_warp(block, i % kWarps, a.slices);
          if (!last) exchange.first[at] = 0;
        }
        __syncthreads();
        if (!last || s.above <= most) break;
        // There are too many warps, so only those with the best elements are read again now.
        from = raise(best, most / 2, threshold);
        last = false;
        if (tid == 0) s.above = 0;
        __syncthreads();
      }
      constexpr uint32_t kReads = kVector < 4 ? 8 : 32 / kVector;  // vectors that a thread reads at once
      const uint32_t chosen = min(s.above, kWaveAgain), reads = chosen * ((dealt.rounds + kReads - 1) / kReads);
#pragma unroll 1
      for (uint32_t start = 0; start < reads; start += kWarps) {
        const uint32_t read = start + warp, round = read / chosen * kReads;
        const uint32_t vector = round * dealt.threads + dealt.first(list.warps[read % chosen], lane);
        const uint32_t rounds = max(dealt.rounds, round) - round;  // the number of rounds left, 0 beyond the last one
        const auto index = [&](uint32_t j) { return dealt.index(vector + j / kVector * dealt.threads) + j % kVector; };
        const auto at = [&](uint32_t j) { return packing.pack(encode(dealt.x[index(j)], a.order), index(j)); };
        Vector<Key> words[kReads];
#pragma unroll
        for (uint32_t u = 0; u < kReads; ++u) {
          if (u >= rounds) break;
          words[u] = dealt.load(min(vector + u * dealt.threads, dealt.vectors - 1));
        }
        uint32_t found;
#pragma unroll 1
        for (bool raised = false;; raised = true) {
          C best = 0;
          found = 0;
#pragma unroll
          for (uint32_t j = 0; j < kReads * kVector; ++j) {
            if (j / kVector >= rounds) break;
            const C c = packing.pack(encode(reinterpret_cast<const Key*>(words)[j], a.order), index(j));
            if (c < threshold || vector + j / kVector * dealt.threads >= dealt.vectors) continue;
            found |= 1u << j;
            best = larger(best, c);
          }
          if (raised || __syncthreads_count(found) <= a.k + a.k / 2) break;
          threshold = raise(best, a.k, threshold);
        }
        push(found, at);
      }
      if (last) break;
      if (tid == 0) s.above = 0;
      __syncthreads();
    }
  }

  while (s.count > kThreads) {  // each time, fewer threads have several candidates that stay
    constexpr uint32_t kMine = wave_room(sizeof(C)) / kThreads;
    C mine[kMine], best = 0;
#pragma unroll
    for (uint32_t j = 0; j < kMine; ++j) {
      const uint32_t i = tid + j * kThreads;
      mine[j] = i < s.count ? buffer[i] : C{0};
      best = larger(best, mine[j]);
    }
    threshold = raise(best, a.k, threshold);
    if (tid == 0) s.count = 0;
    __syncthreads();
#pragma unroll
    for (uint32_t j = 0; j < kMine; ++j)
      if (mine[j] >= threshold) buffer[atomicAdd(&s.count, 1u)] = mine[j];
    __syncthreads();
  }
  if (tid < 16) buffer[s.count + tid] = 0;
  __syncthreads();
  write_best<Key>(a, buffer, s.count, packing, row);
}

// Writes the first k elements of this key, the row's largest, which so many have. They begin at `from`. Returns whether
// it found them; it does not look far.
template <class Key>
__device__ __noinline__ bool write_first(const Wave& a, Shared<kThreads, Composite<Key>>& s, Key key, uint32_t from,
                                         int64_t row) {
  constexpr uint32_t kEach = 8, kSteps = 8;
  const Key* const x = static_cast<const Key*>(a.x) + row * a.length;
  const Key bits = decode(key, a.order);
  uint32_t found = 0;
#pragma unroll 1
  for (uint32_t step = 0; step < kSteps && found < a.k && from < a.length; ++step, from += kEach * kThreads) {
    const uint32_t first = from + threadIdx.x * kEach;
    uint32_t hits = 0;
#pragma unroll
    for (uint32_t e = 0; e < kEach; ++e)
      hits |= static_cast<uint32_t>(first + e < a.length && x[min(first + e, a.length - 1)] == bits) << e;
    uint32_t all, at = found + sum_before<uint32_t>(__popc(hits), s.sums, kWarps, all);
    for (; hits && at < a.k; hits &= hits - 1, ++at) {
      const int64_t to = a.place(row, at);
      static_cast<Key*>(a.values)[to] = bits;
      a.indices[to] = static_cast<int32_t>(first + __ffs(hits) - 1);
    }
    found += all;
  }
  return found >= a.k;
}

// The usual case: there are few candidates, and all of them have been published. Code that runs once mostly waits for
// its instructions to be fetched, so the code of this case is contiguous.
template <class Key>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ Wave a) {
  using C = Composite<Key>;
  constexpr uint32_t kMine = max_wave_entries(sizeof(C)) / kThreads;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& s = *reinterpret_cast<Shared<kThreads, C>*>(shared_bytes);
  C* buffer = reinterpret_cast<C*>(shared_bytes + stream_control_bytes(sizeof(C), kThreads));
  const uint32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int64_t row = blockIdx.x;
  const Packing<Key> packing = Packing<Key>::make(a.length);
  const Exchange<Key> exchange(a, row);
  const Dealt<Key> dealt(a, row);
  C loose = 0;
  if (tid < dealt.loose()) {
    const uint32_t at = dealt.loose_index(tid);
    loose = packing.pack(encode(dealt.x[at], a.order), at);
  }
  buffer[tid] = 0;
  if (tid < 16) buffer[kThreads + tid] = 0;
  if (tid == 0) s.count = 0;
  wait_for_predecessor();

  const uint32_t all = a.told * a.slices, bounds = all + 2 * a.slices, entries = bounds + a.slices;
  const uint32_t own = lane / 4 * (4 * kWarps) + warp * 4 + lane % 4;  // each warp ranks a part of the best elements
  C told[kMine], best = 0, floor = 1, bound = 0;  // the composite 0 sorts last and is never in the result
#pragma unroll
  for (uint32_t j = 0; j < kMine; ++j) {
    const uint32_t i = own + j * kThreads;
    told[j] = i < entries ? exchange.told[i] : C{0};
  }
#pragma unroll
  for (uint32_t j = 0; j < kMine; ++j) {
    const uint32_t i = own + j * kThreads;
    if (j * kThreads >= entries) break;
    if (i >= bounds) {
      floor = larger(floor, told[j]);
    } else if (i >= all) {
      bound = larger(bound, told[j]);
    } else {
      best = larger(best, told[j]);
    }
  }
  const C top = largest_of_warp(larger(best, loose));
  if (lane == 0) s.high[warp] = top;
  C threshold = larger(kth_of_composites<kThreads>(best, a.k), floor);
  if (a.deep) {
    floor = largest_of_warp(threshold);
    if (lane == 0) s.low[warp] = floor;
    __syncthreads();
    threshold = largest_of_warp(s.low[lane % kWarps]);
  }
  const auto put = [&](C c) {
    if (c >= threshold) buffer[atomicAdd(&s.count, 1u)] = c;
  };
  // There is room for the elements that may reach the threshold, and for the loose elements.
  static_assert(kMaxWaveK * 9 / 8 * kMine + 32 <= wave_room(sizeof(C)));
#pragma unroll
  for (uint32_t j = 0; j < kMine; ++j) {
    if (j * kThreads >= all) break;
    if (own + j * kThreads < all) put(told[j]);
  }
  put(loose);
  const bool again = __syncthreads_or(bound >= threshold);
  if (again) {
    // If so many elements equal the largest one, the first of them are the result.
    const C first = largest_of_warp(s.high[lane % kWarps]);
    if (packing.key(first) == packing.key(threshold) &&
        write_first<Key>(a, s, packing.key(first), packing.index(first), row))
      return;
    // Elements of blocks that may hold more are read again, so they are left out here.
    const Again<Key> list(buffer);
    for (uint32_t i = tid; i < a.slices; i += kThreads) list.more[i] = 0;
    if (tid == 0) s.count = s.full = s.above = 0;
    __syncthreads();
#pragma unroll
    for (uint32_t j = 0; j < kMine; ++j) {
      const uint32_t i = own + j * kThreads;
      if (i < all || i >= bounds || told[j] < threshold) continue;
      list.more[i - all < a.slices ? i - all : i - all - a.slices] = 1;
    }
    __syncthreads();
    for (uint32_t i = tid; i < a.slices; i += kThreads)
      if (list.more[i]) list.blocks[atomicAdd(&s.full, 1u)] = i;
    uint32_t block = own % a.slices;
#pragma unroll
    for (uint32_t j = 0; j < kMine; ++j) {
      if (own + j * kThreads < all && !list.more[block]) put(told[j]);
      block += kThreads % a.slices;
      if (block >= a.slices) block -= a.slices;
    }
    put(loose);
    __syncthreads();
  }
  if (again || s.count > kThreads) {
    finish_any<Key>(a, shared_bytes, threshold, again);
    return;
  }
  write_best<Key>(a, buffer, s.count, packing, row);
}

template <class Key>
cudaError_t run(cudaStream_t stream, const Plan& plan, const Problem& problem, const Wave& a) {
  using C = Composite<Key>;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(kThreads);
  constexpr int kMany = wave_places(sizeof(Key), 0, 1);
  cudaError_t status = launch(stream, config, a.told == a.lanes ? wave_kernel<Key, 1> : wave_kernel<Key, kMany>, a);
  config.grid = dim3(static_cast<unsigned>(problem.rows.count()));
  config.overlap = plan.overlap;
  config.shared_bytes = wave_shared_bytes(sizeof(C));
  if (status == cudaSuccess) status = launch(stream, config, finish_kernel<Key>, a);
  return status;
}

}  // namespace

cudaError_t launch_wave(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  Wave a = {call_of(problem, buffers)};
  a.slices = static_cast<uint32_t>(plan.slices);
  const int bytes = problem.key_bits / 8;
  a.deep = is_wave_deep(problem.rows.length * bytes, plan.slices);
  const uint32_t places = wave_places(bytes, problem.rows.length * bytes, plan.slices);
  a.lanes = wave_lanes(problem.k, plan.slices, places);
  a.told = a.lanes * places;
  a.beside_bits = places > 1 ? 2 : 5;
  a.row_bytes = wave_exchange_bytes(problem.k, plan.slices, places, composite_bytes(bytes));
  return dispatch_key(problem.key_bits, [&](auto key) { return run<decltype(key)>(stream, plan, problem, a); });
}

}  // namespace jaxgpuops::topk
