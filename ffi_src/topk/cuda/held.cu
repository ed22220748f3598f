// Top-k of long rows, k <= 64. A block, or a cluster of blocks, holds a row on chip: half of it in registers, the other
// half in shared memory. The loads of both halves are issued at once. Rows are so long that each block has a
// multiprocessor to itself.
//
// The two halves alternate along the row, in pieces of 2 KB. When the first half has arrived, it is divided into 128
// parts, whose maxima are delegates. The k-th largest delegate is a threshold, which k elements reach, and in random
// data few more. It is found while the second half arrives, whose pieces are then compared with it. So little is left
// to do after the last byte: each block gets the few candidates of all blocks, and ranks its own by comparing them with
// all.
//
// A block that has too many candidates keeps its best k, which it finds by a bisection with counts. If its candidates
// do not even fit in its list, it collects them again. In that case, if most delegates tie with the threshold, it takes
// the elements above the threshold and the first ones that tie with it. Otherwise the k-th largest of the threads' best
// elements is the new threshold. Equal keys are told apart by their index, so the elements that reach this threshold
// belong to k threads.
//
// Bytes moved: the input once, and k results (value and index). Source: Dr. Top-k's delegates (arXiv 2109.08219).
#include "common/cuda/bulk_copy.cuh"
#include "common/cuda/launch.cuh"
#include "common/rounding.h"
#include "topk/cuda/candidates.cuh"
#include "topk/cuda/delegates.cuh"
#include "topk/cuda/held_shape.h"
#include "topk/cuda/kernels.h"
#include "topk/cuda/row_vectors.cuh"

namespace jaxgpuops::topk {
namespace {

struct Args : Call {
  uint32_t blocks;
  uint32_t block_bits;  // the number of blocks is 2^block_bits
  uint32_t share;       // vectors of a row that a block has
  uint32_t zero;        // 0, but hidden from the compiler
  int index_bits;       // bits of the index in a packed candidate
};

template <int kThreads>
struct Board {
  static constexpr uint32_t kRoom = held_room(kThreads);
  uint64_t list[kRoom];             // candidates
  uint64_t copies[kHeldLoads / 2];  // barriers that wait for the copies of the second half
  uint64_t bounded, counted, told;  // barriers that wait for the bounds, counts and candidates of other blocks
  uint64_t chosen[kMaxHeldK];
  uint32_t delegates[kHeldDelegates];
  uint32_t bounds[2][kMaxHeldBlocks], counts[kMaxHeldBlocks];
  uint32_t count, totals[3];
  unsigned long long top;
};
static_assert(sizeof(Board<256>) == held_board_bytes(256));

// The part of a row that a block has: whole vectors. The first block also has the loose elements before and after them.
template <class Key>
struct Part {
  static constexpr uint32_t kVector = RowVectors<Key>::kVector;
  static constexpr uint32_t kChunk = 128;  // vectors of a piece, which is in registers or in shared memory
  const RowVectors<Key> row;
  const uint4* body;
  uint32_t begin, vectors;  // the index of the first element of `body`; its number of vectors
  uint32_t loose;           // the number of loose elements of the row if this block takes them, else 0

  __device__ __forceinline__ Part(const Args& a, uint32_t r, uint32_t rank)
      : row(static_cast<const Key*>(a.x) + static_cast<int64_t>(r) * a.length, a.length) {
    const uint32_t before = min(row.vectors, rank * a.share);
    begin = row.index(before);
    body = reinterpret_cast<const uint4*>(row.x + begin);
    vectors = min(row.vectors - before, a.share);
    loose = rank == 0 ? row.loose() : 0;
  }
};

template <class Key>
__device__ __forceinline__ Key element(const uint4& v, uint32_t e) {
  constexpr uint32_t kPerWord = 4 / sizeof(Key);
  const uint32_t w = e / kPerWord, word = w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w;
  return static_cast<Key>(word >> (8 * sizeof(Key) * (e % kPerWord)));
}

// Appends the candidates of some lanes to the list, as long as there is room. All lanes of the warp are in step.
template <int kThreads>
__device__ __forceinline__ void append(Board<kThreads>& board, bool wanted, uint64_t candidate) {
  const uint32_t lanes = __ballot_sync(kEveryLane, wanted), lane = threadIdx.x % 32;
  if (!lanes) return;
  uint32_t at = 0;
  if (lane == 0) at = atomicAdd(&board.count, __popc(lanes));
  at = __shfl_sync(kEveryLane, at, 0) + __popc(lanes & ((1u << lane) - 1));
  if (wanted && at < board.kRoom) board.list[at] = candidate;
}

// Returns the largest of the values of all threads. All threads call it, and there must be another barrier before the
// next call.
template <int kThreads>
__device__ __forceinline__ uint64_t most_of_block(Board<kThreads>& board, uint64_t value) {
  if (threadIdx.x == 0) board.top = 0;
  value = largest_of_warp(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) atomicMax(&board.top, static_cast<unsigned long long>(value));
  __syncthreads();
  return board.top;
}

// Shortens a list of m candidates to the best ones, from k to 2 * kMaxHeldK of them, and returns a bound that these
// reach. All threads call it.
template <int kThreads>
__device__ __noinline__ uint64_t keep_best(Board<kThreads>& board, uint32_t m, uint32_t k, uint64_t low) {
  constexpr uint32_t kOwn = held_room(kThreads) / kThreads;
  uint64_t own[kOwn], high = 0;
#pragma unroll
  for (uint32_t o = 0; o < kOwn; ++o) {
    const uint32_t i = o * kThreads + threadIdx.x;
    own[o] = i < m ? board.list[i] : 0;
    high = larger(high, own[o]);
  }
  if (threadIdx.x == 0) board.totals[0] = 0;
  high = most_of_block(board, high);
  if (threadIdx.x == 0) board.count = 0;
#pragma unroll 1
  for (uint32_t step = 0; low < high; ++step) {
    const uint64_t middle = high - (high - low) / 2;
    uint32_t reach = 0;
#pragma unroll
    for (uint32_t o = 0; o < kOwn; ++o) reach += own[o] >= middle;
    reach = sum_of_warp(reach);
    if (threadIdx.x == 0) board.totals[(step + 1) % 3] = 0;
    if (threadIdx.x % 32 == 0 && reach) atomicAdd(&board.totals[step % 3], reach);
    __syncthreads();
    const uint32_t reached = board.totals[step % 3];
    if (reached < k) {
      high = middle - 1;
    } else {
      low = middle;
      if (reached <= 2 * kMaxHeldK) break;
    }
  }
  __syncthreads();
#pragma unroll
  for (uint32_t o = 0; o < kOwn; ++o) append(board, own[o] >= low && own[o], own[o]);
  __syncthreads();
  return low;
}

// Collects the candidates of a block in which most delegates tie with the threshold, and returns their number. It takes
// all elements above the threshold, for which there is usually room, and as many of the first ties as are needed.
template <class Key, int kThreads>
__device__ __noinline__ uint32_t take_ties(const Args& a, Board<kThreads>& board, uint32_t r, uint32_t rank,
                                           Key floor) {
  constexpr uint32_t kVector = Part<Key>::kVector;
  const Part<Key> part(a, r, rank);
  const Packing<Key> packing{a.length - 1, a.index_bits};
  const Filter<Key> filter(floor, a.order);
  const uint32_t tid = threadIdx.x;
  const auto load = [&](uint32_t v) { return v < part.vectors ? __ldg(part.body + v) : make_uint4(0, 0, 0, 0); };
  const auto bits_of = [&](uint4 vector, uint32_t v, auto take) {  // returns a bit for each element: whether to take it
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t e = 0; e < kVector; ++e)
      bits |= static_cast<uint32_t>(take(encode(element<Key>(vector, e), a.order))) << e;
    return v < part.vectors ? bits : 0;
  };
  if (tid == 0) board.count = 0;
  __syncthreads();
#pragma unroll 1
  for (uint32_t start = tid; start < part.vectors; start += 4 * kThreads) {
    uint4 vectors[4];
#pragma unroll
    for (uint32_t u = 0; u < 4; ++u) vectors[u] = load(start + u * kThreads);
#pragma unroll
    for (uint32_t u = 0; u < 4; ++u) {
      const uint4 w = vectors[u];
      if (!filter.exceeds(filter.most(filter.most(filter.most(filter.most(0, w.x), w.y), w.z), w.w))) continue;
      const uint32_t v = start + u * kThreads;
#pragma unroll 1
      for (uint32_t hits = bits_of(w, v, [&](Key key) { return key > floor; }); hits; hits &= hits - 1) {
        const uint32_t e = __ffs(hits) - 1, at = atomicAdd(&board.count, 1u);
        if (at >= board.kRoom) break;
        board.list[at] = packing.pack(encode(element<Key>(w, e), a.order), part.begin + v * kVector + e);
      }
    }
  }
  __syncthreads();
  const uint32_t above = board.count;
  uint32_t found = above;
#pragma unroll 1
  for (uint32_t start = 0; start < part.vectors && found < a.k; start += kThreads) {
    const uint32_t v = start + tid;
    uint32_t hits = bits_of(load(v), v, [&](Key key) { return key == floor; });
    uint32_t* const sums = board.delegates + start / kThreads % 2 * 32;  // the delegates are no longer needed
    uint32_t at = found + sum_before<kThreads>(__popc(hits), sums);
    for (; hits && at < a.k; hits &= hits - 1)
      board.list[at++] = packing.pack(floor, part.begin + v * kVector + __ffs(hits) - 1);
    found += sum_of_warp(tid % 32 < kThreads / 32 ? sums[tid % 32] : 0);
  }
  if (above > board.kRoom - kThreads) return board.kRoom + 1;
  __syncthreads();
  if (tid == 0) board.count = max(above, min(found, a.k));
  __syncthreads();
  const Key loose = tid < part.loose ? encode(part.row.x[part.row.loose_index(tid)], a.order) : Key{0};
  append(board, tid < part.loose && loose >= floor, packing.pack(loose, part.row.loose_index(tid)));
  __syncthreads();
  return board.count;
}

// Collects the candidates of a block that found too many, and returns their number. This is rare, so it is not inlined.
template <class Key, int kThreads>
__device__ __noinline__ uint32_t collect_again(const Args& a, Board<kThreads>& board, uint32_t r, uint32_t rank,
                                               Key floor, const uint4* half) {
  const Part<Key> part(a, r, rank);
  constexpr uint32_t kVector = Part<Key>::kVector, kChunk = Part<Key>::kChunk;
  const Packing<Key> packing{a.length - 1, a.index_bits};
  const uint32_t tid = threadIdx.x, mine = tid / kChunk * 2 * kChunk + tid % kChunk;
  if (__syncthreads_count(tid < kHeldDelegates && board.delegates[tid] == floor) > kHeldDelegates / 4) {
    const uint32_t m = take_ties<Key, kThreads>(a, board, r, rank, floor);
    if (m <= board.kRoom) return m;
  }
  const auto place = [&](uint32_t j) { return j / 2 * 2 * kThreads + mine + j % 2 * kChunk; };
  const auto load = [&](uint32_t j) { return j % 2 ? half[j / 2 * kThreads + tid] : __ldg(part.body + place(j)); };
  const auto composite = [&](const uint4& vector, uint32_t v, uint32_t e) {
    return packing.pack(encode(element<Key>(vector, e), a.order), part.begin + v * kVector + e);
  };
  // The thread's best element: the first one with the largest key.
  const Lanes<Key> lanes(a.order);
  uint32_t most = 0, where = 0;
#pragma unroll 4
  for (uint32_t j = 0; j < 2 * kHeldLoads; ++j) {
    if (place(j) >= part.vectors) continue;
    const uint4 v = load(j);
    const uint32_t keys[4] = {lanes.encode(v.x), lanes.encode(v.y), lanes.encode(v.z), lanes.encode(v.w)};
    const uint32_t key = lanes.largest(lanes.max(lanes.max(keys[0], keys[1]), lanes.max(keys[2], keys[3])));
    if (key > most) most = key, where = j;
  }
  uint64_t best = 0;
  if (place(where) < part.vectors) {
    const uint4 vector = load(where);
#pragma unroll
    for (uint32_t e = 0; e < kVector; ++e) best = larger(best, composite(vector, place(where), e));
  }
  uint64_t low = packing.lowest(floor), high = most_of_block(board, best);
#pragma unroll 1
  while (low < high) {
    const uint64_t middle = high - (high - low) / 2;
    const uint32_t reached = __syncthreads_count(best >= middle);
    if (reached < a.k) {
      high = middle - 1;
    } else {
      low = middle;
      if (reached <= a.k + a.k / 8) break;
    }
  }
  if (tid == 0) board.count = 0;
  __syncthreads();
  constexpr uint32_t kAtOnce = 4;
  static_assert(2 * kHeldLoads % kAtOnce == 0);
  uint32_t any = 0, used = 0;  // the most places of the list
#pragma unroll 1
  for (uint32_t j = 0; j < 2 * kHeldLoads; ++j) {
    if (j % kAtOnce == 0) {  // usually none of the next vectors has a candidate
      const Filter<Key> filter(packing.key(low), a.order);
      any = 0;
#pragma unroll
      for (uint32_t u = 0; u < kAtOnce; ++u) {
        if (place(j + u) >= part.vectors) continue;
        const uint4 v = load(j + u);
        const uint32_t most_of = filter.most(filter.most(filter.most(filter.most(0, v.x), v.y), v.z), v.w);
        // If all indices of the vector are larger than that of `low`, keys that equal that of `low` do not reach it.
        const bool late = part.begin + place(j + u) * kVector > packing.index(low);
        if (late ? filter.exceeds(most_of) : filter.reaches(most_of)) any |= 1u << u;
      }
      if (!__syncthreads_or(any)) {
        j += kAtOnce - 1;
        continue;
      }
    }
    const bool there = any >> j % kAtOnce & 1;
    const uint32_t more = __syncthreads_count(there) * kVector;
    used += more;
    if (used + kThreads <= board.kRoom ? !__any_sync(kEveryLane, there) : more == 0) continue;
    uint4 vector = make_uint4(0, 0, 0, 0);
    if (there) vector = load(j);
#pragma unroll 1
    for (uint32_t e = 0; e < kVector; ++e) {
      const uint64_t c = composite(vector, place(j), e);
      append(board, there && c >= low, c);
      if (used + kThreads <= board.kRoom) continue;
      __syncthreads();
      const uint32_t m = board.count;
      __syncthreads();
      if (m + kThreads > board.kRoom) low = keep_best<kThreads>(board, m, a.k, low);
    }
  }
  uint64_t c = 0;
  if (tid < part.loose) {
    const uint32_t index = part.row.loose_index(tid);
    c = packing.pack(encode(part.row.x[index], a.order), index);
  }
  append(board, tid < part.loose && c >= low, c);
  __syncthreads();
  if (board.count > kHeldKeep) keep_best<kThreads>(board, board.count, a.k, low);
  return board.count;
}

// The state of a block in held_kernel. The functions are the phases of the kernel, in the order in which they run.
template <class Key, int kThreads>
struct Block {
  static constexpr uint32_t kVector = Part<Key>::kVector, kChunk = Part<Key>::kChunk;
  static constexpr uint32_t kPerWord = 4 / sizeof(Key), kWarps = kThreads / 32;

  const Args& a;
  uint4* const half;  // the second half of the part
  Board<kThreads>& board;
  uint64_t* const gathered;  // candidates of all blocks of a cluster
  const uint32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32, blocks = a.blocks;
  const uint32_t rank = blocks > 1 ? block_of_cluster() : 0, r = blockIdx.x >> a.block_bits;
  const Part<Key> part{a, r, rank};
  const Packing<Key> packing{a.length - 1, a.index_bits};
  const uint32_t mine = tid / kChunk * 2 * kChunk + tid % kChunk;  // the thread's first vector
  // Whether the later half of a thread's loads brings anything new. Beyond the end of the part, a thread loads its
  // first vector again.
  const bool many = kHeldLoads * kThreads < part.vectors;
  uint4 held[kHeldLoads];  // the thread's vectors of the first half
  Key loose = 0;
  uint32_t best = 0;  // the thread's delegate: its best element

  __device__ __forceinline__ Block(const Args& a, unsigned char* shared_bytes)
      : a(a),
        half(reinterpret_cast<uint4*>(shared_bytes)),
        board(*reinterpret_cast<Board<kThreads>*>(half + kHeldLoads * kThreads)),
        gathered(reinterpret_cast<uint64_t*>(&board + 1)) {}

  // Loads the first half of the part into registers. Beyond the end of the part, a thread loads its first vector again.
  __device__ __forceinline__ void load_first_half() {
#pragma unroll
    for (int u = 0; u < kHeldLoads; ++u) {
      const uint32_t v = u * 2 * kThreads + mine;
      held[u] = __ldg(part.body + (v < part.vectors ? v : mine < part.vectors ? mine : 0));
    }
    if (tid < part.loose) loose = __ldg(part.row.x + part.row.loose_index(tid));
  }

  __device__ __forceinline__ void clear_board() {
    if (tid == 0) {
      for (int p = 0; p < kHeldLoads / 2; ++p) make_copy_barrier(&board.copies[p], 2 * kThreads / kChunk);
      make_copy_barrier(&board.bounded);
      make_copy_barrier(&board.counted);
      make_copy_barrier(&board.told);
      make_barriers_visible();
      expect_copies(&board.bounded, 8 * blocks);
      expect_copies(&board.counted, 4 * blocks);
      board.count = 0;
    }
    if (tid < kHeldDelegates) board.delegates[tid] = 0;
    if (blocks > 1) arrive_at_cluster_start();
    __syncthreads();
  }

  // Issues the copy of a chunk of the second half.
  __device__ __forceinline__ void ask(uint32_t chunk) {
    const uint32_t first = (2 * chunk + 1) * kChunk;
    const uint32_t bytes = first < part.vectors ? 16 * min(kChunk, part.vectors - first) : 0;
    uint64_t* const barrier = &board.copies[chunk / (2 * kThreads / kChunk)];
    expect_copies(barrier, bytes);
    if (bytes) copy_bulk(half + chunk * kChunk, part.body + first, bytes, barrier);
  }

  // Computes the delegates of the first half. As soon as some of its loads have arrived, each warp starts to load two
  // pieces of the second half. So the first half arrives first, and memory is never idle.
  __device__ __forceinline__ void take_delegates() {
    constexpr int kAskFirst = 2;  // a warp starts to load the second half when so many of its loads have arrived
    const Lanes<Key> lanes(a.order);
    const auto look = [&](int u) {
      best = lanes.max(best, lanes.encode(held[u].x));
      best = lanes.max(best, lanes.encode(held[u].y));
      best = lanes.max(best, lanes.encode(held[u].z));
      best = lanes.max(best, lanes.encode(held[u].w));
    };
#pragma unroll
    for (int u = 0; u < kHeldLoads / 2; ++u) {
      if (u == kAskFirst && lane == 0 && best >= a.zero) ask(warp);
      look(u);
    }
    if (many) look(kHeldLoads / 2);
    if (lane == 0 && best >= a.zero) ask(kWarps + warp);
    if (many) {
#pragma unroll
      for (int u = kHeldLoads / 2 + 1; u < kHeldLoads; ++u) look(u);
    }
    best = mine < part.vectors ? lanes.largest(best) : 0;
    atomicMax(&board.delegates[tid % kHeldDelegates], best);
    if (blocks > 1) wait_at_cluster_barrier();
    __syncthreads();
  }

  // Finds a threshold that k elements of the row reach. Each block finds two bounds: one that k of its elements reach,
  // and a higher one that its share of k elements reach. The largest of the former is a threshold for the row, and so
  // is the least of the latter.
  __device__ __forceinline__ uint32_t agree_on_floor() {
    if (warp < 2 && warp < blocks) {
      uint32_t all[kParts];
#pragma unroll
      for (int p = 0; p < kParts; ++p) all[p] = board.delegates[p * 32 + lane];
      const uint32_t bound = kth_of_group<32>(all, warp == 0 ? a.k : (a.k + blocks - 1) / blocks, kEveryLane);
      if (blocks == 1) {
        board.bounds[0][0] = bound;
      } else if (lane < blocks) {
        copy_to_block(&board.bounds[warp][rank], &board.bounded, lane, bound);
      }
    }
    if (blocks == 1) {
      __syncthreads();
      return board.bounds[0][0];
    }
    wait_for_copies(&board.bounded, 0);
    uint32_t floor = 0, least = ~0u;
    for (uint32_t b = 0; b < blocks; ++b) {
      floor = max(floor, board.bounds[0][b]);
      least = min(least, board.bounds[1][b]);
    }
    return max(floor, least);
  }

  // Lists the elements that reach the threshold; those of the second half as they arrive. Returns the number of
  // candidates.
  __device__ __forceinline__ uint32_t collect(uint32_t floor) {
    const Filter<Key> filter(static_cast<Key>(floor), a.order);
    const auto most = [&](uint32_t word, const uint4& v) {
      return filter.most(filter.most(filter.most(filter.most(word, v.x), v.y), v.z), v.w);
    };
    // Lanes append one by one, since few of them have candidates.
    const auto put = [&](uint4 vector, uint32_t v) {
      asm(""
          : "+r"(vector.x), "+r"(vector.y), "+r"(vector.z),
            "+r"(vector.w));  // without this, the compiler would keep all keys in registers
      if (v >= part.vectors || *static_cast<volatile uint32_t*>(&board.count) > board.kRoom)
        return;  // too many candidates: all threads will collect them again, in another way
      uint32_t hits = filter.passes(vector.x) | filter.passes(vector.y) << kPerWord |
                      filter.passes(vector.z) << (2 * kPerWord) | filter.passes(vector.w) << (3 * kPerWord);
      const uint32_t number = __popc(hits);
      uint32_t at = atomicAdd(&board.count, number);
      if (at + number > board.kRoom) return;
#pragma unroll 1
      for (; hits; hits &= hits - 1) {
        const uint32_t e = __ffs(hits) - 1;
        board.list[at++] = packing.pack(encode(element<Key>(vector, e), a.order), part.begin + v * kVector + e);
      }
    };
    if (best >= floor) {
#pragma unroll
      for (int u = 0; u < kHeldLoads; ++u) {
        if (u == kHeldLoads / 2 && !many) break;
        if (filter.reaches(most(0, held[u]))) put(held[u], u * 2 * kThreads + mine);
      }
    }
    if (tid < part.loose) {
      const uint32_t index = part.row.loose_index(tid);
      const Key key = encode(loose, a.order);
      if (key >= floor) {
        const uint32_t at = atomicAdd(&board.count, 1u);
        if (at < board.kRoom) board.list[at] = packing.pack(key, index);
      }
    }
#pragma unroll 1
    for (uint32_t p = 0; p < kHeldLoads && p * 2 * kThreads + kChunk < part.vectors; p += 2) {
      wait_for_copies(&board.copies[p / 2], 0);
      const uint4* const vectors = half + p * kThreads + tid;
      const uint4 one = vectors[0], two = vectors[kThreads];
      if (filter.reaches(most(0, one))) put(one, p * 2 * kThreads + mine + kChunk);
      if (filter.reaches(most(0, two))) put(two, (p + 1) * 2 * kThreads + mine + kChunk);
    }
    __syncthreads();
    uint32_t m = board.count;
    if (m > board.kRoom) m = collect_again<Key, kThreads>(a, board, r, rank, static_cast<Key>(floor), half);
    if (m > kHeldKeep) {
      keep_best<kThreads>(board, m, a.k, packing.lowest(static_cast<Key>(floor)));
      m = board.count;
    }
    return m;
  }

  // Sends the block's candidates to every block of the cluster.
  __device__ __forceinline__ void gather(uint32_t m) {
    static_assert(kMaxHeldBlocks == 8);
    for (uint32_t i = tid / 8; i < m && tid % 8 < blocks; i += kThreads / 8)
      copy_to_block(&gathered[rank * kHeldKeep + i], &board.told, tid % 8, board.list[i]);
    if (tid < blocks) copy_to_block(&board.counts[rank], &board.counted, tid, m);
    wait_for_copies(&board.counted, 0);
    if (tid == 0) {
      uint32_t all = 0;
      for (uint32_t b = 0; b < blocks; ++b) all += board.counts[b];
      expect_copies(&board.told, 8 * all);
    }
    wait_for_copies(&board.told, 0);
  }

  __device__ __forceinline__ void write(uint32_t at, uint64_t candidate) {
    const int64_t to = a.place(r, at);
    static_cast<Key*>(a.values)[to] = decode(packing.key(candidate), a.order);
    a.indices[to] = static_cast<int32_t>(packing.index(candidate));
  }

  // Each block ranks its own candidates among those of all blocks, and writes the results they are. For results in the
  // order of indices, the first block ranks all of them.
  __device__ __forceinline__ void rank_and_write(uint32_t m) {
    const auto list = [&](uint32_t b) { return blocks > 1 ? gathered + b * kHeldKeep : board.list; };
    const auto count = [&](uint32_t b) { return blocks > 1 ? board.counts[b] : m; };
    // Eight lanes rank a candidate.
    constexpr uint32_t kSplit = 8;
    const auto rank_list = [&](uint32_t of, auto emit) {
      const uint32_t n = count(of);
      for (uint32_t start = 0; start < n; start += kThreads / kSplit) {
        const uint32_t i = start + tid / kSplit;
        const uint64_t own = i < n ? list(of)[i] : 0;
        uint32_t above = 0;
        for (uint32_t b = 0; b < blocks; ++b) {
          const uint64_t* others = list(b);
          const uint32_t end = count(b);
#pragma unroll 2
          for (uint32_t j = tid % kSplit * 2; j < end; j += 2 * kSplit) {
            const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(others + j);
            above += (two.x > own) + (j + 1 < end && two.y > own);
          }
        }
        above = sum_of_lanes<kSplit>(above);
        if (tid % kSplit == 0 && i < n && above < a.k) emit(above, own);
      }
    };
    if (a.sorted) {
      rank_list(rank, [&](uint32_t at, uint64_t own) { write(at, own); });
    } else if (rank == 0) {
      for (uint32_t b = 0; b < blocks; ++b) rank_list(b, [&](uint32_t at, uint64_t own) { board.chosen[at] = own; });
      __syncthreads();
      if (tid < a.k) {
        const uint64_t own = board.chosen[tid];
        uint32_t at = 0;
        for (uint32_t j = 0; j < a.k; ++j) at += packing.index(board.chosen[j]) < packing.index(own);
        write(at, own);
      }
    }
  }
};

template <class Key, int kThreads>
__global__ void __launch_bounds__(kThreads, kHeldThreads / kThreads) held_kernel(const __grid_constant__ Args a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Block<Key, kThreads> block(a, shared_bytes);
  block.load_first_half();
  block.clear_board();
  block.take_delegates();
  const uint32_t floor = block.agree_on_floor();
  const uint32_t candidates = block.collect(floor);
  if (block.blocks > 1) block.gather(candidates);
  block.rank_and_write(candidates);
#endif
}

template <class Key>
cudaError_t run(cudaStream_t stream, const Launch& config, const Args& a) {
  switch (config.block.x) {
    case 256:
      if constexpr (sizeof(Key) < 4) return launch(stream, config, held_kernel<Key, 256>, a);
      return cudaErrorInvalidValue;
    case 512: return launch(stream, config, held_kernel<Key, 512>, a);
    default: return launch(stream, config, held_kernel<Key, 1024>, a);
  }
}

}  // namespace

cudaError_t launch_held(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  Args a = {call_of(problem, buffers)};
  a.blocks = static_cast<uint32_t>(plan.slices);
  a.block_bits = bits_for(a.blocks);
  const uint32_t vector = 128 / problem.key_bits;
  a.share = (a.length / vector + a.blocks - 1) / a.blocks;
  a.index_bits = Packing<uint8_t>::make(a.length).index_bits;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(plan.threads);
  config.shared_bytes = plan.shared_bytes;
  config.cluster = static_cast<int>(a.blocks);
  return dispatch_key(problem.key_bits, [&](auto key) -> cudaError_t {
    using Key = decltype(key);
    if constexpr (sizeof(Key) == 8) {
      return cudaErrorInvalidValue;  // plans choose other kernels for 64-bit keys
    } else {
      return run<Key>(stream, config, a);
    }
  });
}

}  // namespace jaxgpuops::topk
