// Top-k of long rows for large k, in one read of the row, and of long columns of which few lie side by side, for any k.
//
// Each thread samples elements of the row at places that depend on nothing but the length, as if by chance. The best
// ones of the threads give a threshold that somewhat more than k elements of the row reach. It is a key with an index,
// as all candidates are, so that elements that tie with it do not matter. The blocks of a row read it and stage what
// reaches the threshold in shared memory. For large k, the threads' best samples, sorted, divide that into buckets:
// each block counts its candidates, the blocks meet, and move the candidates to their buckets. If these buckets would
// be large, or a block has no room, the blocks append their candidates to one list first, of which a sample, sorted,
// divides it. A second kernel sorts neighbouring buckets in shared memory, and writes. For results in the order of
// indices, what it has selected is divided and sorted once more, with indices above keys.
//
// Columns have as many blocks as if they were rows. Those of a column find its threshold; then those of all columns
// side by side read them together, and append to the list of each column what reaches its threshold. From there on
// columns are rows.
//
// If fewer than k elements reach the threshold, or more than there is room for, digits of the composites find another
// one, with a read of the row each. If buckets have too many candidates for shared memory, they are sorted in the
// workspace. Both hardly ever happen, and are slow.
//
// If candidates are few, they are not divided: one block sorts the whole list. If one block has all k candidates, it
// also sorts them for results in the order of indices.
//
// Bytes moved: the input once, k results (value and index), and each candidate, of which there are 1.5 to 4 times k
// (more where k is a small part of the row), two to five times. All composites are distinct, so neither the order of
// the list nor timing can change a result. Sources: sample sort (Frazer & McKellar 1970), Floyd & Rivest's SELECT
// (1975).
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
template <class C>
constexpr uint32_t kStaged = buckets_staged(sizeof(C));  // candidates that a block stages
template <class C>
constexpr uint32_t kRoom = buckets_room(sizeof(C));

struct Buckets : Call {
  int64_t first_row;
  uint32_t slices;  // blocks that share a row
  uint32_t sample, reach, splitters, room;
  uint32_t alone;   // the most candidates of a row that are not divided
  uint32_t window;  // places within which buckets begin that one block sorts
  bool direct;      // the sample divides the candidates
  int64_t starts, list, in_order;
  bool by_index;  // the list has the k elements of the result, with their indices above their keys
};

// Loads what other blocks have written.
template <class C>
__device__ __forceinline__ C load_published(const C* from) {
  if constexpr (sizeof(C) == 16) {
    return bits_as<C>(__ldcg(reinterpret_cast<const uint4*>(from)));
  } else {
    return __ldcg(from);
  }
}

// What the blocks of a row publish for each other, in the workspace.
template <class C>
struct Exchange {
  uint32_t* arrivals;
  uint32_t* found;   // candidates on the list, or that found no place there
  C* threshold;      // of a column
  uint32_t* counts;  // of digits, then of buckets
  uint32_t* starts;  // where buckets begin, and where the last one ends
  C* list;
  C* sorted;  // the list in the order of buckets

  __device__ Exchange(const Buckets& a, int64_t row) {
    unsigned char* bytes = a.workspace_of(row);
    arrivals = reinterpret_cast<uint32_t*>(bytes);
    found = arrivals + 1;
    threshold = reinterpret_cast<C*>(arrivals + 8);
    counts = arrivals + 16;
    starts = reinterpret_cast<uint32_t*>(bytes + a.starts);
    list = reinterpret_cast<C*>(bytes + a.list);
    sorted = reinterpret_cast<C*>(bytes + a.in_order);
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
// Elements of the row are `step` apart from x on. `target` as for meet().
template <class Key>
__device__ __noinline__ Composite<Key> search(const Buckets& a, Shared<kThreads, Composite<Key>>& s, int64_t row,
                                              const Key* x, uint32_t step, uint32_t rank, uint32_t& target) {
  using C = Composite<Key>;
  const Exchange<C> exchange(a, row);
  const Packing<Key> packing = Packing<Key>::make(a.length);
  const uint32_t tid = threadIdx.x;
  int bits = packing.shift() + 8 * static_cast<int>(sizeof(Key));
  const int top = bits;
  C prefix = 0;
  uint32_t need = a.k, reached;
  meet(exchange.arrivals, a.slices, target);  // now all blocks have read the number of candidates
  do {
    const int above = bits, digit = min(bits, 11);
    bits -= digit;
#pragma unroll 1
    for (uint32_t i = tid; i < kBucketsDigits; i += kThreads) {
      s.histogram[i] = 0;
      if (rank == 0) exchange.counts[i] = 0;
    }
    meet(exchange.arrivals, a.slices, target);
#pragma unroll 1
    for (uint64_t i = rank * kThreads + tid; i < a.length; i += a.slices * kThreads) {
      const C c = packing.pack(encode(x[i * step], a.order), static_cast<uint32_t>(i));
      const uint32_t value = static_cast<uint32_t>(c >> bits) & ((1u << digit) - 1);
      if (above == top || c >> above == prefix) atomicAdd(&s.histogram[value], 1u);
    }
    __syncthreads();
#pragma unroll 1
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
#pragma unroll 1
    for (uint32_t b = tid; b < kBucketsDigits || b <= a.splitters; b += kThreads) exchange.counts[b] = 0;
  }
  meet(exchange.arrivals, a.slices, target);
  return prefix << bits;
}

// The state of a block. The functions are the phases of the kernel, in the order in which they run.
template <class Key, bool kColumns>
struct Block {
  using C = Composite<Key>;
  using Row = RowVectors<Key>;
  using Word = typename Filter<Key>::Word;
  static constexpr uint32_t kVector = Row::kVector, kWords = 16 / sizeof(Word);
  static constexpr uint32_t kLoads = sizeof(Key) == 1 ? 2 : 4;  // 32 elements at most, one bit each

  const Buckets& a;
  Shared<kThreads, C>& s;
  C* const buffer;
  const uint32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int64_t row = a.first_row + blockIdx.x / a.slices;
  const uint32_t rank = blockIdx.x % a.slices;
  const uint32_t beside = kColumns ? static_cast<uint32_t>(a.inner) : 1;  // columns side by side,
  const uint32_t column = kColumns ? static_cast<uint32_t>(row % beside) : 0;
  const Row all{static_cast<const Key*>(a.x) + (row - column) * a.length, a.length * beside};  // and all their elements
  const Packing<Key> packing = Packing<Key>::make(a.length);
  const Exchange<C> exchange{a, row};
  uint32_t target = 0;  // arrivals at the barriers of the row, see meet()
  C threshold = 0;

  __device__ __forceinline__ Block(const Buckets& a, unsigned char* shared_bytes)
      : a(a),
        s(*reinterpret_cast<Shared<kThreads, C>*>(shared_bytes)),
        buffer(reinterpret_cast<C*>(shared_bytes + buckets_control(sizeof(C)))) {
    static_assert(sizeof(Shared<kThreads, C>) <= buckets_control(sizeof(C)));
  }

  // Element i of the row or column.
  __device__ __forceinline__ Key element(uint32_t i) const {
    return __ldg(all.x + (kColumns ? static_cast<uint64_t>(i) * beside + column : i));
  }
  __device__ __forceinline__ C at(uint32_t i) const { return packing.pack(encode(element(i), a.order), i); }

  __device__ __forceinline__ void begin() const {
    if (rank != 0) return;
    if (tid == 0) *exchange.arrivals = 0, *exchange.found = a.by_index ? a.k : 0;
#pragma unroll 1
    for (uint32_t b = tid; b <= a.splitters; b += kThreads) exchange.counts[b] = 0;
  }

  // Every block finds the same threshold, so that the blocks of a row need not wait for each other.
  __device__ __forceinline__ void sample() {
    Key keys[kBucketsSample];
    uint32_t places[kBucketsSample];
#pragma unroll
    for (uint32_t j = 0; j < kBucketsSample; ++j) {
      places[j] = scatter(min(j, a.sample - 1) * kThreads + tid, a.length);
      keys[j] = element(places[j]);
    }
    C best = 0;
#pragma unroll
    for (uint32_t j = 0; j < kBucketsSample; ++j)
      best = larger(best, packing.pack(encode(keys[j], a.order), places[j]));
    if (a.direct) {
      threshold = sorted(samples(), kThreads, [&](uint32_t) { return best; })[a.reach - 1];
    } else {
      threshold = kth_of_composites<kThreads>(best, a.reach);
    }
  }

  // If the sample divides the candidates, it stays behind what the block stages, in order.
  __device__ __forceinline__ C* samples() const { return buffer + kStaged<C>; }

  // Sorts so many values, a power of two, from `to` on, where there must be room for them twice, and returns where they
  // are. Each warp sorts 32 of them at a time. Then neighbouring runs are merged: a value's place is its rank in its
  // own run plus that in the other one, behind the equal values of an earlier run. (Threads may sample the same
  // element.)
  template <class Load>
  __device__ __forceinline__ C* sorted(C* to, uint32_t count, Load load) const {
    C* merged = to + count;
#pragma unroll 1
    for (uint32_t i = tid; i < count; i += kThreads) {
      C mine = load(i);
#pragma unroll 1
      for (uint32_t size = 2; size <= 32; size *= 2) {
#pragma unroll 1
        for (uint32_t stride = size / 2; stride; stride /= 2) {
          const C other = shuffle_xor(mine, stride);
          const bool first = !(lane & stride), downwards = !(lane & size);
          mine = first == downwards ? larger(mine, other) : smaller(mine, other);
        }
      }
      to[i] = mine;
    }
    __syncthreads();
    // The rank of c in a run, whose size is a power of two.
    const auto above = [](const C* run, uint32_t size, C c, bool later) {
      uint32_t rank = 0;
      const auto before = [&](C other) { return other > c || (later && other == c); };
#pragma unroll 1
      for (uint32_t half = size / 2; half; half /= 2)
        if (before(run[rank + half - 1])) rank += half;
      return rank + before(run[rank]);
    };
#pragma unroll 1
    for (uint32_t size = 32; size < count; size *= 2) {
#pragma unroll 1
      for (uint32_t i = tid; i < count; i += kThreads) {
        const C mine = to[i];
        const uint32_t run = i & ~(size - 1);
        merged[(run & ~size) + (i - run) + above(to + (run ^ size), size, mine, i & size)] = mine;
      }
      __syncthreads();
      C* const from = to;
      to = merged;
      merged = from;
    }
    return to;
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
    if (tid == 0) s.count = 0, s.full = ~0u;
    __syncthreads();
    if (warp == 0 && rank == 0) {
      const uint32_t i = all.loose_index(lane);
      const bool hit = lane < all.loose() && at(i) >= threshold;
      const uint32_t hits = __ballot_sync(kEveryLane, hit);
      uint32_t place = 0;
      if (lane == 0 && hits) place = atomicAdd(&s.count, __popc(hits));
      place = __shfl_sync(kEveryLane, place, 0) + __popc(hits & ((1u << lane) - 1));
      if (hit) buffer[place] = at(i);
    }
    constexpr uint32_t kChunk = 32 * kLoads;  // vectors that a warp reads in a step
    const uint32_t step = a.slices * kWarps * kChunk;
#pragma unroll 1
    for (uint32_t start = (warp * a.slices + rank) * kChunk; start < all.vectors; start += step) {
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
      if (!late && index(kLoads * kVector - 1) > last)
        for (uint32_t rest = hits; rest; rest &= rest - 1)
          if (at(index(__ffs(rest) - 1)) < threshold) hits &= ~(rest & -rest);
      const uint32_t mine = __popc(hits), upto = sum_up_to_lane(mine), sum = __shfl_sync(kEveryLane, upto, 31);
      if (!sum) continue;
      C* to = buffer;
      uint32_t place = 0;
      if (lane == 0) place = atomicAdd(&s.count, sum);
      place = __shfl_sync(kEveryLane, place, 0);
      if (place + sum > kStaged<C>) {  // there is no room, now or later
        if (lane == 0) atomicMin(&s.full, place);
        to = exchange.list;
        place = reserve(sum);
        if (place + upto > a.room) hits = 0;
      }
      place += upto - mine;
#pragma unroll
      for (uint32_t j = 0; j < kLoads * kVector; ++j) {
        const Word word = words[j / kVector][j % kVector / Filter<Key>::kPerWord];
        const Key bits = static_cast<Key>(word >> (j % Filter<Key>::kPerWord * Filter<Key>::kBits));
        if (hits >> j & 1) to[place++] = packing.pack(encode(bits, a.order), index(j));
      }
    }
    __syncthreads();
  }

  // Appends what the block has staged to the list.
  __device__ __forceinline__ void append() {
    const uint32_t staged = min(s.count, s.full);
    if (tid == 0) s.above = atomicAdd(exchange.found, staged);
    __syncthreads();
#pragma unroll 2
    for (uint32_t i = tid; i < staged; i += kThreads)
      if (s.above + i < a.room) exchange.list[s.above + i] = buffer[i];
    meet(exchange.arrivals, a.slices, target);
  }

  // Moves what the blocks have staged to its buckets, between which the samples lie. Returns false, and moves nothing,
  // if a block had no room, or if the threshold is of no use.
  __device__ __forceinline__ bool divide_staged() {
    const uint32_t staged = min(s.count, s.full);
    uint32_t *const places = reinterpret_cast<uint32_t*>(samples() + 2 * kThreads), *const starts = places + kThreads;
    const auto bucket_of = [&](C c) {
      uint32_t above = 0;
#pragma unroll 1
      for (uint32_t half = kThreads / 2; half; half /= 2)
        if (samples()[above + half - 1] > c) above += half;
      return above;  // at most kThreads - 1, since the last sample is below the threshold
    };
    places[tid] = 0;
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = tid; i < staged; i += kThreads) atomicAdd(&places[bucket_of(buffer[i])], 1u);
    __syncthreads();
    // The atomic returns the bucket's count without this block. That is where this block's candidates begin in it.
    if (places[tid]) places[tid] = atomicAdd(&exchange.counts[tid], places[tid]);
    meet(exchange.arrivals, a.slices, target);
    const uint32_t size = __ldcg(&exchange.counts[tid]), before = sum_before<kThreads>(size, s.sums);
    starts[tid] = before;
    places[tid] += before;
    if (tid == kThreads - 1) s.kept = before + size;
    __syncthreads();
    const uint32_t total = s.kept;
    if (__ldcg(exchange.found) || total < a.k || total > a.room) {
      meet(exchange.arrivals, a.slices, target);  // now all blocks have read the counts
      if (rank == 0) exchange.counts[tid] = 0;
      return false;
    }
    let_dependents_start();
    if (rank == 0) {
      exchange.starts[tid] = before;
      for (uint32_t b = kThreads + tid; b <= a.splitters + 1; b += kThreads) exchange.starts[b] = total;
    }
#pragma unroll 1
    for (uint32_t i = tid; i < staged; i += kThreads) {
      const C c = buffer[i];
      const uint32_t bucket = bucket_of(c), place = atomicAdd(&places[bucket], 1u);
      if (starts[bucket] < a.k) exchange.sorted[place] = c;
    }
    return true;
  }

  // The same for all columns side by side. All columns have equally many blocks, so that a step of these blocks
  // together reads whole rows of columns, and a thread meets the same columns in each step.
  __device__ __forceinline__ void filter_columns() {
    constexpr uint32_t kPerWord = Filter<Key>::kPerWord, kBits = 8 * sizeof(Key);
    // The block stages candidates in shared memory. A candidate's tag holds its column and its number within the
    // column.
    constexpr uint32_t kAll = (kBucketsStagedBytes - kMostBeside * (sizeof(C) + 4)) / (sizeof(C) + 4);
    C* const thresholds = buffer + kAll;
    uint32_t* const counts = reinterpret_cast<uint32_t*>(thresholds + kMostBeside);
    uint32_t* const tags = counts + kMostBeside;
    const auto of_column = [&](uint32_t c) { return Exchange<C>(a, row - column + c); };
    if (tid < beside) thresholds[tid] = load_published(of_column(tid).threshold), counts[tid] = 0;
    if (tid == 0) s.count = 0;
    __syncthreads();
    // Appends an element if it reaches the threshold of its column.
    const auto take = [&](uint32_t element) {
      const uint32_t i = element / beside, of = element - i * beside;
      const C c = packing.pack(encode(__ldg(all.x + element), a.order), i);
      if (c < thresholds[of]) return;
      const uint32_t place = atomicAdd(&s.count, 1u);
      if (place < kAll) {
        buffer[place] = c;
        tags[place] = atomicAdd(&counts[of], 1u) * kMostBeside + of;
      } else {
        const Exchange<C> to = of_column(of);
        const uint32_t at = atomicAdd(to.found, 1u);
        if (at < a.room) to.list[at] = c;
      }
    };
    constexpr uint32_t kChunk = 32 * kLoads;  // vectors that a warp reads in a step
    const uint32_t step = beside * a.slices * kWarps * kChunk, of_all = column * a.slices + rank;
    const uint32_t own = (of_all * kWarps + warp) * kChunk + lane;
    if (of_all == 0 && tid < all.loose()) take(all.loose_index(tid));
    // The keys of the thresholds, one for each element of the thread. If a word has several elements, each of these
    // keys is less by one: then a maximum shows whether any is exceeded. `always`: a key is 0, so it cannot be less.
    Word floors[kLoads][kWords];
    bool always = false;
    uint32_t c = all.index(own) % beside;
#pragma unroll
    for (uint32_t u = 0; u < kLoads; ++u) {
#pragma unroll
      for (uint32_t w = 0; w < kWords; ++w) {
        floors[u][w] = 0;
#pragma unroll
        for (uint32_t e = 0; e < kPerWord; ++e) {
          const Key key = packing.key(thresholds[c]), below = static_cast<Key>(kPerWord > 1 && key ? key - 1 : key);
          floors[u][w] |= static_cast<Word>(below) << (e * kBits);
          always |= kPerWord > 1 && key == 0;
          c = c + 1 == beside ? 0 : c + 1;
        }
      }
      c = (c + 31 * kVector) % beside;
    }
    const auto keys = [&](Word word) {
      if constexpr (kPerWord == 1) {
        return encode(word, a.order);
      } else {
        constexpr uint32_t kOnes = ~0u / ((1u << kBits) - 1);  // 1 in each element
        const uint32_t magnitude = static_cast<Key>(a.order.magnitude), flip = static_cast<Key>(a.order.flip);
        return word ^ ((word >> (kBits - 1) & kOnes) * magnitude) ^ (flip * kOnes);
      }
    };
#pragma unroll 1
    for (uint32_t first = own; first - lane < all.vectors; first += step) {
      alignas(16) Word words[kLoads][kWords];
#pragma unroll
      for (uint32_t u = 0; u < kLoads; ++u)
        *reinterpret_cast<uint4*>(words[u]) = __ldcs(all.body() + min(first + u * 32, all.vectors - 1));
      bool any = always;
#pragma unroll
      for (uint32_t u = 0; u < kLoads; ++u)
#pragma unroll
        for (uint32_t w = 0; w < kWords; ++w) {
          words[u][w] = keys(words[u][w]);
          if constexpr (kPerWord == 1) {
            any |= words[u][w] >= floors[u][w];
          } else {
            any |= (kPerWord == 2 ? __vmaxu2(words[u][w], floors[u][w]) : __vmaxu4(words[u][w], floors[u][w])) !=
                   floors[u][w];
          }
        }
      if (!any) continue;
      uint32_t hits = 0;
#pragma unroll
      for (uint32_t u = 0; u < kLoads; ++u) {
        if (first + u * 32 >= all.vectors) break;
#pragma unroll
        for (uint32_t e = 0; e < kVector; ++e) {
          const Key key = static_cast<Key>(words[u][e / kPerWord] >> (e % kPerWord * kBits));
          const Key floor = static_cast<Key>(floors[u][e / kPerWord] >> (e % kPerWord * kBits));
          hits |= static_cast<uint32_t>(kPerWord == 1 ? key >= floor : always || key > floor) << (u * kVector + e);
        }
      }
      for (; hits; hits &= hits - 1) {
        const uint32_t j = __ffs(hits) - 1;
        take(all.index(first + j / kVector * 32) + j % kVector);
      }
    }
    __syncthreads();
    if (tid < beside) counts[tid] = atomicAdd(of_column(tid).found, counts[tid]);
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = tid; i < min(s.count, kAll); i += kThreads) {
      const uint32_t of = tags[i] % kMostBeside, at = counts[of] + tags[i] / kMostBeside;
      if (at < a.room) of_column(of).list[at] = buffer[i];
    }
    cg::this_grid().sync();
  }

  // Finds another threshold, where the sampled one is of no use, and lists what reaches it.
  __device__ __forceinline__ void repair() {
    uint32_t arrivals = target;
    threshold = search<Key>(a, s, row, all.x + column, beside, rank, arrivals);
    target = arrivals;
#pragma unroll 1
    for (uint64_t i = rank * kThreads + tid; i - lane < a.length; i += a.slices * kThreads) {
      const C c = at(static_cast<uint32_t>(min(i, uint64_t{a.length - 1})));
      const bool hit = i < a.length && c >= threshold;
      const uint32_t hits = __ballot_sync(kEveryLane, hit);
      if (!hits) continue;
      const uint32_t place = reserve(__popc(hits)) + __popc(hits & ((1u << lane) - 1));
      if (hit && place < a.room) exchange.list[place] = c;
    }
    meet(exchange.arrivals, a.slices, target);
  }

  // Moves the candidates from the list to their buckets.
  __device__ __forceinline__ void divide() {
    const uint32_t found = __ldcg(exchange.found), buckets = a.splitters + 1;
    uint32_t* const counts = reinterpret_cast<uint32_t*>(buffer + 2 * kMostSplitters);
    uint32_t* const starts = counts + kMostSplitters + 4;
#pragma unroll 1
    for (uint32_t b = tid; b < buckets; b += kThreads) counts[b] = 0;
    const C* const splitters = sorted(buffer, a.splitters, [&](uint32_t i) {
      return load_published(exchange.list + static_cast<uint64_t>(i) * found / a.splitters);
    });
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
        for (int j = 0; j < kAtOnce; ++j) c[j] = load_published(exchange.list + min(i + j * step, found - 1));
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
    // The atomic returns the bucket's count without this block. That is where this block's candidates begin in it.
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

template <class Key, bool kColumns>
__global__ void __launch_bounds__(kThreads, kBucketsResident) buckets_kernel(const __grid_constant__ Buckets a) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Block<Key, kColumns> block(a, shared_bytes);
  block.begin();
  if (a.by_index) {
    cg::this_grid().sync();
  } else {
    if constexpr (kColumns) {
      block.sample();
      if (block.rank == 0 && threadIdx.x == 0) *block.exchange.threshold = block.threshold;
      cg::this_grid().sync();
      block.filter_columns();
    } else {
      auto token = cg::this_grid().barrier_arrive();
      block.sample();
      cg::this_grid().barrier_wait(std::move(token));
      block.filter();
      if (a.direct && block.divide_staged()) return;
      block.append();
    }
    const uint32_t found = __ldcg(block.exchange.found);
    if (found < a.k || found > a.room) block.repair();
    if (a.alone && __ldcg(block.exchange.found) <= a.alone) return let_dependents_start();
  }
  block.divide();
}

// Writes the candidates in_order[0, count) as the results from place `from` on. If these are to be in the order of
// indices, and are not yet, it lists them instead.
template <class Key>
__device__ __forceinline__ void write(const Buckets& a, const Composite<Key>* in_order, int64_t row, uint32_t from,
                                      uint32_t count) {
  const Packing<Key> packing = Packing<Key>::make(a.length);
  Composite<Key>* const list = Exchange<Composite<Key>>(a, row).list + from;
  const int64_t at = (row / a.inner * a.k + from) * a.inner + row % a.inner;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const Composite<Key> c = a.by_index ? packing.from_by_index(in_order[i]) : in_order[i];
    if (!a.sorted && !a.by_index) {
      list[i] = packing.by_index(c);
    } else {
      static_cast<Key*>(a.values)[at + i * a.inner] = decode(packing.key(c), a.order);
      a.indices[at + i * a.inner] = static_cast<int32_t>(packing.index(c));
    }
  }
}

// Sorts the buckets that begin within a window of places, or a list that was not divided, and writes them.
template <class C>
__global__ void __launch_bounds__(kThreads, kBucketsResident)
    buckets_sort_kernel(const __grid_constant__ Buckets a, uint32_t windows, int key_bits) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  __shared__ uint32_t begin, end;
  auto& s = *reinterpret_cast<Shared<kThreads, C>*>(shared_bytes);
  C* buffer = reinterpret_cast<C*>(shared_bytes + buckets_control(sizeof(C)));
  const int64_t row = blockIdx.x / windows;
  const uint32_t window = blockIdx.x % windows, from = window * a.window, to = min(a.k, from + a.window);
  const Exchange<C> exchange(a, row);
  wait_for_predecessor();
  const uint32_t found = *exchange.found;
  const bool alone = a.alone && found <= a.alone;
  if (alone) {
    if (window) return;
    if (threadIdx.x == 0) begin = 0, end = found;
  } else {
    // If several buckets have the same start, only the first of them meets these conditions. The last start is at least
    // k.
    for (uint32_t b = threadIdx.x; b <= a.splitters + 1; b += kThreads) {
      const uint32_t start = exchange.starts[b], before = b ? exchange.starts[b - 1] : 0;
      if (start >= from && (b == 0 || before < from)) begin = start;
      if (start >= to && before < to) end = start;
    }
  }
  __syncthreads();
  if (begin >= to) return;
  const uint32_t m = end - begin, count = min(m, a.k - begin);
  C* in_order = (alone ? exchange.list : exchange.sorted) + begin;
  if (m <= kRoom<C>) {
    for (uint32_t i = threadIdx.x; i < m; i += kThreads) buffer[i] = in_order[i];
    if (threadIdx.x == 0) s.count = m;
    __syncthreads();
    sort_candidates<kThreads>(s, buffer, count, buffer + kRoom<C>, kRoom<C>);
  } else {
    sort_descending<kThreads>(in_order, m);
  }
  const bool has_all = !a.sorted && windows == 1;  // the block has all k elements, and sorts them by index
  if (m > kRoom<C> && has_all) {
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) buffer[i] = in_order[i];
    __syncthreads();
  }
  if (m <= kRoom<C> || has_all) in_order = buffer;
  const auto finish = [&](auto key) {
    using Key = decltype(key);
    if (has_all) {
      write_selected<kThreads, Key>(s, a, Packing<Key>::make(a.length), buffer, buffer + kRoom<C>, kRoom<C>, row);
    } else {
      write<Key>(a, in_order, row, begin, count);
    }
  };
  if constexpr (sizeof(C) == 16) {
    finish(uint64_t{});
  } else {
    key_bits == 32 ? finish(uint32_t{}) : key_bits == 16 ? finish(uint16_t{}) : finish(uint8_t{});
  }
}

template <class Key, bool kColumns>
cudaError_t run(cudaStream_t stream, const Problem& problem, bool overlap, Buckets a) {
  using C = Composite<Key>;
  const int64_t rows = problem.rows.count(), beside = problem.rows.inner;
  Launch shape;
  shape.block = dim3(kThreads);
  shape.shared_bytes = buckets_shared(sizeof(C));
  static Residents of_kernel;
  int fitting = 0;
  cudaError_t status = of_kernel.count(reinterpret_cast<const void*>(buckets_kernel<Key, kColumns>), shape, &fitting);
  if (status != cudaSuccess) return status;
  if (fitting < beside) return cudaErrorCooperativeLaunchTooLarge;
  // If the device cannot run that many blocks at the same time, a row gets fewer blocks, or rows take turns.
  a.slices = std::min(a.slices, static_cast<uint32_t>(fitting / beside));
  const int64_t together = fitting / (a.slices * beside) * beside;
  shape.together = true;
  // Blocks that would have to stage too many candidates list them first.
  a.direct = a.direct && !kColumns && a.room / a.slices + 1024 <= kStaged<C>;
  a.window = buckets_window(sizeof(C)) / (a.direct && a.sorted ? 4 : 1);
  const uint32_t windows = (a.k + a.window - 1) / a.window;
  a.alone = !a.direct && (a.sorted || windows == 1) ? kRoom<C> : 0;
  if (a.direct) a.splitters = std::max<uint32_t>(a.splitters, kThreads);
  Launch last = {dim3(static_cast<unsigned>(rows * windows)), dim3(kThreads), buckets_sort_shared(sizeof(C))};
  last.overlap = overlap;
  for (;; a.by_index = true) {
    for (a.first_row = 0; a.first_row < rows && status == cudaSuccess; a.first_row += together) {
      shape.grid = dim3(static_cast<unsigned>(std::min(together, rows - a.first_row) * a.slices));
      status = launch(stream, shape, buckets_kernel<Key, kColumns>, a);
    }
    if (status == cudaSuccess) status = launch(stream, last, buckets_sort_kernel<C>, a, windows, problem.key_bits);
    if (status != cudaSuccess || a.sorted || a.by_index || windows == 1) return status;
  }
}

}  // namespace

cudaError_t launch_buckets(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const BucketsShape shape = buckets_shape(problem.rows.length, problem.k, problem.key_bits / 8);
  Buckets a = {call_of(problem, buffers)};
  a.row_bytes = shape.bytes;
  a.slices = static_cast<uint32_t>(plan.slices);
  a.sample = shape.sample;
  a.reach = shape.reach;
  a.splitters = shape.splitters;
  a.room = static_cast<uint32_t>(shape.room);
  a.direct = shape.direct;
  a.starts = shape.starts;
  a.list = shape.list;
  a.in_order = shape.in_order;
  const auto start = [&](auto key) {
    using Key = decltype(key);
    return problem.rows.inner > 1 ? run<Key, true>(stream, problem, plan.overlap, a)
                                  : run<Key, false>(stream, problem, plan.overlap, a);
  };
  return dispatch_key(problem.key_bits, start);
}

}  // namespace jaxgpuops::topk
