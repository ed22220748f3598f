// How a team of threads selects from a row in registers (rows.cu): its delegates, the elements that reach a threshold,
// and the exact selection of few candidates.
#pragma once

#include "topk/cuda/candidates.cuh"
#include "topk/cuda/delegates.cuh"
#include "topk/cuda/kernels.h"
#include "topk/cuda/rows_shape.h"

namespace jaxgpuops::topk {
namespace {

struct Args : Call {
  int64_t rows;
  uint32_t one, minus_one;  // 1 and -1, hidden from the compiler
};

constexpr uint32_t kSlack = 12;        // teams of a warp rank at most 2 * k + kSlack candidates
constexpr uint32_t kNaN = 0x7fc00000;  // the float32 NaN that computations yield
constexpr uint32_t kExponent = 0x7f800000;

// Arrays that the threads of a team share.
template <class Word, int kTeam, int kMostK, bool kHalves>
struct alignas(16) Board {
  static constexpr int kMaxK = kTeam > 32 ? kMostK : 2 * kTeam;
  static constexpr int kDelegates = kTeam <= 32 ? 1 : kMostK > kMaxRowsK ? 4 * kMostK : 128;  // of a row
  // Room for candidates. If the k best stand together, a vector of them may be one delegate. A block has room for k
  // vectors of 16 or 32 bits, k <= kMaxRowsK; bytes mostly tie.
  static constexpr uint32_t kCapacity = kTeam > 32 ? (kHalves ? 576 : 256) : 2 * kMaxK + kSlack;
  Word words[kCapacity + 4];
  uint32_t indices[kCapacity + 4];
  // Composites: the index in the upper half, the word below; in place of one of 64 bits, its place in `words`.
  unsigned long long chosen[kMaxK];
  Word delegates[kTeam > 32 && kTeam > kDelegates ? kTeam : kDelegates];
  Word tops[2][(kTeam + 31) / 32];  // see Team::fold()
  uint32_t sums[2][(kTeam + 31) / 32], count;
};

// kMostK: the largest k of a block. kIsRagged: rows are loaded as vectors, but may begin and end within
// one.
template <class Key, int kTeam, int kElements, bool kVectors, bool kFloat, int kMostK, bool kIsRagged>
struct Team {
  static constexpr bool kBlock = kTeam > 32;
  static constexpr bool kFloats = kFloat && !kBlock;  // candidates are ranked as floats
  static constexpr int kThreads = kBlock ? kTeam : kRowsBlock;
  using Element = Key;
  static constexpr int kSize = kTeam, kLanes = kBlock ? 32 : kTeam;
  static_assert(kSize % kLanes == 0);
  static constexpr int kVector = kVectors ? 16 / sizeof(Key) : 1;
  static constexpr int kLoads = kElements / kVector;
  static constexpr int kPerWord = kVectors && sizeof(Key) < 4 ? 4 / sizeof(Key) : 1;
  static constexpr int kWords = kElements / kPerWord;
  static constexpr int kMasks = (kElements + 31) / 32;
  using Order = Ranked<Key>;
  using Word = typename Order::Word;
  using SharedBoard = Board<Word, kTeam, kMostK, sizeof(Key) == 2>;
  static constexpr int kDelegates = SharedBoard::kDelegates;
  static constexpr bool kRagged = kIsRagged;
  static constexpr bool kRefinesVectors = kVectors && sizeof(Key) < (kTeam <= 64 ? 8 : 2);  // by refine_vectors()

  const Args& a;
  SharedBoard& board;
  uint32_t t;  // this thread's place in the team
  Word words[kWords];
  uint32_t step = 0;  // how often fold() has been called
  // Positions count from the first whole vector in memory on: those of the row are skipped to end - 1.
  uint32_t skipped = 0, end = a.length;

  __device__ __forceinline__ void begin(const Key* row) {
    if constexpr (kRagged)
      skipped = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(Key)), end = skipped + a.length;
  }
  __device__ __forceinline__ bool has(uint32_t position) const { return position >= skipped && position < end; }

  // The most candidates that raising the threshold may leave.
  __device__ __forceinline__ uint32_t most() const { return kBlock ? 256 : 2 * a.k + kSlack; }

  // The loads of a thread are permuted, so that in data whose period is the length of a team not all large elements
  // fall to one thread.
  __device__ __forceinline__ uint32_t place(uint32_t load) const {
    return load * kTeam + (t ^ (load & (kTeam < 32 ? kTeam - 1 : 31)));
  }
  __device__ __forceinline__ uint32_t index(uint32_t j) const {
    constexpr uint32_t kTurned = (kTeam < 32 ? kTeam : 32) * kVector - 1;
    return (j & ~(kVector - 1u)) * kTeam + ((t * kVector) ^ (j & kTurned)) - skipped;
  }

  // Returns the index of element j of the first thread, in teams smaller than a warp. For thread t, the bits of t *
  // kVector are added.
  __device__ static constexpr uint32_t index_of_first(uint32_t j) {
    const uint32_t load = j / kVector;
    return (load * kTeam + (load & (kTeam - 1) & 31)) * kVector + j % kVector;
  }

  __device__ __forceinline__ Key raw(int j) const {
    return static_cast<Key>(words[j / kPerWord] >> (8 * sizeof(Key) * (j % kPerWord)));
  }

  // The distance of a row's elements in memory. It is that of neighbours where these are loaded as vectors.
  __device__ __forceinline__ uint32_t stride() const { return kVectors ? 1 : static_cast<uint32_t>(a.inner); }
  __device__ __forceinline__ Key element(const Key* row, uint32_t index) const {
    const uint32_t bytes = stride() * static_cast<uint32_t>(sizeof(Key));
    return __ldg(
        reinterpret_cast<const Key*>(reinterpret_cast<const char*>(row) + static_cast<uint64_t>(index) * bytes));
  }

  __device__ __forceinline__ void load(const Key* row, bool live) {
    // This stands for elements that do not exist. It loses every comparison that matters.
    Word filler = kFloat ? __float_as_uint(-INFINITY) : static_cast<Word>(decode(Key{0}, a.order));
#pragma unroll
    for (int bits = 8 * sizeof(Key); kVectors && bits < 32; bits *= 2) filler |= filler << bits;
    begin(row);
    const uint32_t first = skipped > 0, loads = live ? end / kVector : 0;
    if constexpr (kRagged) row -= skipped;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const uint32_t v = place(u);
      if constexpr (kVectors && sizeof(Key) == 8) {
        ulonglong2 vector = make_ulonglong2(filler, filler);
        if (v < loads) vector = __ldg(reinterpret_cast<const ulonglong2*>(row) + v);
        words[2 * u] = vector.x, words[2 * u + 1] = vector.y;
      } else if constexpr (kVectors) {
        uint4 vector = make_uint4(filler, filler, filler, filler);
        if (v < loads && (!kRagged || v >= first)) vector = __ldg(reinterpret_cast<const uint4*>(row) + v);
        words[4 * u] = vector.x, words[4 * u + 1] = vector.y, words[4 * u + 2] = vector.z, words[4 * u + 3] = vector.w;
      } else {
        words[u] = v < loads ? static_cast<Word>(element(row, v)) : filler;
      }
    }
    if constexpr (kRagged) {
      if (live && first) load_part(row, 0, filler);
      if (live && end % kVector && (loads || !first)) load_part(row, loads, filler);
    }
  }
  // Loads a vector of which only a part is the row's, element by element.
  __device__ __forceinline__ void load_part(const Key* from, uint32_t vector, uint32_t filler) {
    const int load = static_cast<int>(vector / kTeam);
    if (place(load) != vector) return;
    uint32_t part[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      part[w] = filler;
#pragma unroll
      for (int e = 0; e < kPerWord; ++e) {
        const uint32_t position = vector * kVector + w * kPerWord + e;
        constexpr uint32_t kMask = (1u << (8 * sizeof(Key))) - 1;
        if (has(position))
          part[w] = (part[w] & ~(kMask << (8 * sizeof(Key) * e))) |
                    (static_cast<uint32_t>(__ldg(from + position)) & kMask) << (8 * sizeof(Key) * e);
      }
    }
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      if (u != load) continue;
#pragma unroll
      for (int w = 0; w < 4; ++w) words[4 * u + w] = part[w];
    }
  }

  // The largest elements of kCount parts of what the thread holds: as floats, NaN for a part of these; or their keys,
  // where that is 0.
  template <int kCount>
  __device__ __forceinline__ void delegates(float (&most)[kCount]) const {
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      const float number = __uint_as_float(words[j]);
      most[j % kCount] = j < kCount ? number : fmaxf(most[j % kCount], number);
    }
  }
  template <int kCount>
  __device__ __forceinline__ void delegates(Word (&best)[kCount]) const {
    if constexpr (sizeof(Key) == 8) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        const Word key = encode(words[j], a.order);
        best[j % kCount] = j < kCount ? key : max(best[j % kCount], key);
      }
    } else if constexpr (kFloat) {
      float most[kCount];
      delegates(most);
#pragma unroll
      for (int p = 0; p < kCount; ++p) best[p] = most[p] == most[p] ? encode(__float_as_uint(most[p]), a.order) : 0;
    } else {
      const Lanes<Key> lanes(a.order);
      uint32_t packed[kCount] = {};
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t keys = kVectors ? lanes.encode(words[w]) : encode(static_cast<Key>(words[w]), a.order);
        packed[w % kCount] = kVectors ? lanes.max(packed[w % kCount], keys) : max(packed[w % kCount], keys);
      }
#pragma unroll
      for (int p = 0; p < kCount; ++p) best[p] = kVectors ? lanes.largest(packed[p]) : packed[p];
    }
  }

  // Sets a bit for each element at or above the threshold, whether the element exists or not.
  __device__ __forceinline__ void exactly(Key floor, uint32_t (&hits)[kMasks]) const {
    const Filter<Key> filter(floor, a.order);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (w * kPerWord % 32 == 0) hits[w * kPerWord / 32] = 0;
      const uint32_t passes =
          kVectors || sizeof(Key) == 8 ? filter.passes(words[w]) : encode(static_cast<Key>(words[w]), a.order) >= floor;
      hits[w * kPerWord / 32] |= passes << (w * kPerWord % 32);
    }
  }

  // Hides from the compiler that a loop loads the same row again. Otherwise registers would hold it all the time.
  __device__ __forceinline__ void hide(const Key*& row) {
    asm("" : "+l"(row));
    asm("" : "+r"(t));
  }

  // Returns a bit for each of 32 floats that is not below a number. The differences are scaled so that the least
  // possible one is 1, and saturate at 0 or 1; NaNs give 0. This uses multiply-adds alone, whose pipe has twice the
  // throughput of comparisons.
  __device__ static __forceinline__ uint32_t float_hits(const uint32_t* words, uint32_t least) {
    const float scale = __uint_as_float((278u << 23) - (least & kExponent)), scaled = __uint_as_float(least) * scale;
    float misses[2] = {8388608, 8388608};
#pragma unroll
    for (int j = 0; j < 32; ++j)
      misses[j / 16] = fmaf(__saturatef(fmaf(__uint_as_float(words[j]), -scale, scaled)),
                            static_cast<float>(1 << j % 16), misses[j / 16]);
    return ~__byte_perm(__float_as_uint(misses[0]), __float_as_uint(misses[1]), 0x5410);
  }

  // Sets a bit for each existing element at or above the threshold. Negative NaNs, which rank last, may also get one.
  __device__ __forceinline__ void reach(Key floor, bool live, uint32_t (&hits)[kMasks]) const {
    if constexpr (kFloat) {
      const uint32_t least = decode(floor, a.order);
      if ((least & kExponent) - (24u << 23) <= 230u << 23) {  // neither too small to scale nor infinite
#pragma unroll
        for (int i = 0; i < kMasks; ++i) hits[i] = float_hits(words + 32 * i, least);
        return;
      }
    }
    uint32_t there[kMasks];
    exactly(floor, hits);
    present(live, there);
#pragma unroll
    for (int i = 0; i < kMasks; ++i) hits[i] &= there[i];
  }

  __device__ __forceinline__ void sync() const {
    if constexpr (!kBlock) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // Returns the sum of v over the team, and replaces `top` by the largest. All threads of the block (or of the warp)
  // call it, in step. The warps of a block tell each other at two places by turns, so that one barrier is enough.
  __device__ __forceinline__ uint32_t fold(uint32_t v, Word* top = nullptr) {
    if constexpr (kLanes < 32) {
      v = sum_of_lanes<kLanes>(v);
      if (top) *top = largest_of_lanes<kLanes>(*top);
    } else {
      v = sum_of_warp(v);
      if (top) *top = largest_of_warp(*top);
    }
    if constexpr (kBlock) {
      constexpr uint32_t kWarps = kTeam / 32;
      uint32_t (&sums)[kWarps] = board.sums[step % 2];
      Word(&tops)[kWarps] = board.tops[step++ % 2];
      if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = v;
        if (top) tops[threadIdx.x / 32] = *top;
      }
      sync();
      v = sum_of_lanes<kWarps>(sums[threadIdx.x % kWarps]);
      if (top) *top = largest_of_lanes<kWarps>(tops[threadIdx.x % kWarps]);
    }
    return v;
  }

  // A bit for each element that exists.
  __device__ __forceinline__ void present(bool live, uint32_t (&mask)[kMasks]) const {
#pragma unroll
    for (int i = 0; i < kMasks; ++i) mask[i] = 0;
#pragma unroll
    for (int u = 0; u < kLoads; ++u)
      if constexpr (kRagged) {
        const uint32_t at = place(u) * kVector, after = live ? min(max(end, at) - at, uint32_t{kVector}) : 0;
        const uint32_t before = u == 0 && at == 0 ? min(skipped, after) : 0;
        mask[u * kVector / 32] |= ((1u << after) - (1u << before)) << (u * kVector % 32);
      } else {
        if (live && place(u) < a.length / kVector)
          mask[u * kVector / 32] |= ((1u << kVector) - 1) << (u * kVector % 32);
      }
  }

  // Returns the number of elements of the team that have a bit.
  __device__ __forceinline__ uint32_t count(const uint32_t (&mask)[kMasks]) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kMasks; ++i) bits += __popc(mask[i]);
    return fold(bits);
  }

  // Drops the negative NaNs that reach() has put above the threshold. There are few bits.
  __device__ __forceinline__ void drop_lowest(const Key* row, Key floor, uint32_t (&above)[kMasks],
                                              uint32_t (&hits)[kMasks]) const {
#pragma unroll
    for (int i = 0; i < kMasks; ++i) {
#pragma unroll 1
      for (uint32_t bits = above[i]; bits; bits &= bits - 1) {
        if (encode(element(row, index(32 * i + __ffs(bits) - 1)), a.order) > floor) continue;
        above[i] &= ~(bits & -bits), hits[i] &= ~(bits & -bits);
      }
    }
  }

  // Of `tied` elements that are in `hits` but not above the threshold, keeps the first ones, so that at least k
  // elements stay, and no more than are ranked. `more` elements are above it. `wanted` says whether this team takes
  // part; all lanes of the warp must call it.
  __device__ __forceinline__ void take_first(bool wanted, uint32_t more, uint32_t tied, const uint32_t (&above)[kMasks],
                                             uint32_t (&hits)[kMasks]) {
    uint32_t first[kMasks];
    // A thread has its elements in the order of their positions, so its ties up to a position are its first ones.
    const auto up_to = [&](uint32_t last) {
      const uint32_t load = last / (kTeam * kVector), rest = last % (kTeam * kVector);
      const uint32_t mine = place(load) - load * kTeam, there = rest / kVector;
      const uint32_t some = mine < there ? kVector : mine == there ? rest % kVector + 1 : 0;
      const uint32_t end_of_mine = load * kVector + some;
#pragma unroll
      for (int i = 0; i < kMasks; ++i) {
        const uint32_t ones = end_of_mine >= 32 * (i + 1) ? ~0u
                              : end_of_mine <= 32 * i     ? 0u
                                                          : (1u << (end_of_mine - 32 * i)) - 1;
        first[i] = hits[i] & ~above[i] & ones;
      }
    };
    uint32_t from = 0, to = end - 1;
    // The first guess assumes that ties are spread evenly, and adds a little. It need not be exact.
    uint32_t last = min(to, static_cast<uint32_t>(1.1f * a.length * (a.k - more) / max(tied, 1u)) + 2);
    bool open = wanted;
#pragma unroll 1
    while (true) {
      up_to(last);
      const bool any = kBlock ? open : __any_sync(kEveryLane, open);
      if (!any) break;
      const uint32_t found = more + count(first);
      if (open) {
        if (found >= a.k) {
          to = last;
        } else {
          from = last + 1;
        }
        open = from < to && !(found >= a.k && found <= most());
      }
      last = open ? from + (to - from) / 2 : to;
    }
    if (wanted) {
#pragma unroll
      for (int i = 0; i < kMasks; ++i) hits[i] = first[i] | above[i];
    }
  }

  // Finds the k largest elements, or at most kCapacity elements that include them. By counting, it bisects the key
  // until few enough elements reach it. If that is the k-th key itself and too many elements equal it, it bisects the
  // index as well. `wanted` says whether this team takes part; all lanes of the warp must call it.
  __device__ __forceinline__ bool refine(bool wanted, Key floor, uint32_t (&hits)[kMasks]) {
    uint32_t there[kMasks], above[kMasks] = {};
    present(wanted, there);
    const auto any = [](bool b) -> bool { return kBlock ? b : __any_sync(kEveryLane, b); };
    // The largest delegate. It is usually the largest element; if not, all larger ones are NaN.
    Word best[1];
    delegates(best);
    fold(0, &best[0]);
    const Key top = static_cast<Key>(best[0]);
    // Invariant: k elements reach `low`, and fewer than k reach high + 1. The elements that reach `low` are in `hits`,
    // those above it in `above`.
    Key low = 0, high = static_cast<Key>(~Key{0}), middle = floor;
    uint32_t more = 0, tied = 0;
    bool open = wanted, ties = false;
    int probe = kFloat ? 0 : 1;
#pragma unroll
    for (int i = 0; i < kMasks; ++i) hits[i] = there[i];
    while (any(open)) {
      uint32_t reach[kMasks], beyond[kMasks];
      exactly(middle, reach);
      exactly(static_cast<Key>(middle + 1), beyond);
#pragma unroll
      for (int i = 0; i < kMasks; ++i) {
        reach[i] &= there[i];
        beyond[i] = middle == static_cast<Key>(~Key{0}) ? 0 : beyond[i] & there[i];
      }
      const uint32_t reached = count(reach), passed = count(beyond);
      if (open) {
        if (reached >= a.k) {
          low = middle, more = passed, tied = reached - passed;
#pragma unroll
          for (int i = 0; i < kMasks; ++i) hits[i] = reach[i], above[i] = beyond[i];
          ties = reached > most() && passed < a.k;
          open = reached > most() && !ties;
        } else {
          high = static_cast<Key>(middle - 1);
        }
        middle = probe == 0                 ? encode(static_cast<Key>(kNaN), a.order)
                 : probe == 1 && top < low  ? high
                 : probe == 1 && top < high ? static_cast<Key>(top + 1)
                                            : static_cast<Key>(high - (high - low) / 2);
        ++probe;
      }
    }
    if (any(ties)) take_first(ties, more, tied, above, hits);
    return ties;
  }

  // Puts the indices of the hits on the board. Returns their number; to a block, in board.count.
  __device__ __forceinline__ uint32_t append(const uint32_t (&hits)[kMasks]) const {
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kMasks; ++i) mine += __popc(hits[i]);
    const uint32_t lane = threadIdx.x & 31, inclusive = sum_up_to_lane<kLanes>(mine);
    const uint32_t total = __shfl_sync(kEveryLane, inclusive, lane | (kLanes - 1));
    uint32_t at = inclusive - mine;
    if constexpr (kBlock) {
      uint32_t base = 0;
      if (total && lane == 0) base = atomicAdd(&board.count, total);
      at += __shfl_sync(kEveryLane, base, 0);
    }
    // If there are too many hits, the threshold is raised first, with all threads.
    if (at - (inclusive - mine) + total > SharedBoard::kCapacity) return total;
#pragma unroll
    for (int i = 0; i < kMasks; ++i) {
      for (uint32_t rest = hits[i]; rest;) {
        const uint32_t bit = 31 - __clz(rest);
        rest ^= 1u << bit;
        board.indices[at++] = index(32 * i + bit);
      }
    }
    return total;
  }
};

// What raising the threshold yields: a bit for each element that is taken, and whether some of those that equal the
// threshold are not.
struct Refined {
  uint64_t hits;
  bool tied;
};

template <int kMasks>
__device__ __forceinline__ uint64_t joined(const uint32_t (&masks)[kMasks]) {
  static_assert(kMasks <= 2);
  return kMasks == 2 ? static_cast<uint64_t>(masks[kMasks - 1]) << 32 | masks[0] : masks[0];
}
template <int kMasks>
__device__ __forceinline__ void split(uint64_t mask, uint32_t (&masks)[kMasks]) {
#pragma unroll
  for (int i = 0; i < kMasks; ++i) masks[i] = static_cast<uint32_t>(mask >> (32 * i));
}

// The rare path of rows of up to 32 bits that up to 64 threads load as vectors, and of all such rows of bytes. Steps in
// registers take less time there than a loop that reads the row again: many rows share their instructions, and bytes
// need few steps. It is not inlined and loads the row once more, so that the common path need not keep it in registers.
template <class T>
__device__ __noinline__ Refined refine_vectors(const Args& a, typename T::SharedBoard& board,
                                               const typename T::Element* row, uint32_t t, bool wanted,
                                               typename T::Element floor) {
  T team{a, board, t};
  team.load(row, wanted);
  uint32_t hits[T::kMasks];
  const bool tied = team.refine(wanted, floor, hits);
  return {joined(hits), tied};
}

// The rare path of other rows: finds a threshold that at least k elements of a row reach, and few enough to be ranked.
// Returns a bit for each element that reaches it. If too many elements equal the k-th key, only the first of them get a
// bit. `floor`: the first threshold.
//
// A loop reads the row again, mostly from L1. For a few rows, fetching the code of steps in registers takes longer.
// Each pass counts the elements that reach a key, and those above it. The second key is the largest one of the row, of
// which there may be many. Then a line through the last two counts tells where the wanted number is; by turns, the key
// is in the middle of those that are left, or the highest of them. All threads of the block (or of the warp) call it.
template <class T>
__device__ __noinline__ Refined refine_by_loop(const Args& a, typename T::SharedBoard& board,
                                               const typename T::Element* row, uint32_t t, bool live,
                                               typename T::Element floor) {
  using Key = typename T::Element;
  using Word = typename T::Word;
  constexpr uint32_t kVector = T::kVector;
  // A step of the loop.
  constexpr uint32_t kElements = kVector == 1 || sizeof(Key) == 8 ? 8 : 16, kTogether = kElements / kVector;
  T team{a, board, t};
  const uint32_t most = team.most();
  team.begin(row);
  const uint32_t loads = live ? (team.end + kVector - 1) / kVector : 0;
  const bool ragged = T::kRagged && (team.skipped || team.end % kVector);
  const auto any = [](bool b) -> bool { return T::kBlock ? b : __any_sync(kEveryLane, b); };
  // Invariant: `reached` elements, at least k, reach `low`, and `more` elements, fewer than k, are above `high`.
  Key low = 0, high = static_cast<Key>(~Key{0}), key = floor;
  uint32_t reached = a.length, more = 0;
  uint64_t hits = 0, ties = 0;  // a bit for each element that is taken, and for those of which only some are
  bool open = live, tied = false;
#pragma unroll 1
  for (uint32_t pass = 0; any(open); ++pass) {
    uint64_t reach = 0, above = 0;
    Word top = 0;  // in the first pass, the largest key of all; else that of the elements that do not reach `key`
#pragma unroll 1
    for (uint32_t u = 0; u < T::kLoads && team.place(u) < loads; u += kTogether) {
      alignas(16) Key raw[kElements];
#pragma unroll
      for (uint32_t i = 0; i < kTogether; ++i) {
        const uint32_t v = min(team.place(u + i), loads - 1);
        if constexpr (kVector > 1) {
          if (ragged) {
#pragma unroll
            for (uint32_t e = 0; e < kVector; ++e) {
              const uint32_t position = min(max(v * kVector + e, team.skipped), team.end - 1);
              raw[i * kVector + e] = team.element(row, position - team.skipped);
            }
            continue;
          }
          *reinterpret_cast<uint4*>(raw + i * kVector) = __ldg(reinterpret_cast<const uint4*>(row) + v);
        } else {
          raw[i] = team.element(row, v);
        }
      }
      uint32_t reaching = 0, exceeding = 0;
#pragma unroll
      for (uint32_t j = 0; j < kElements; ++j) {
        const Key one = encode(raw[j], a.order);
        const uint32_t load = team.place(u + j / kVector);
        const bool there = T::kRagged ? team.has(load * kVector + j % kVector) : load < loads;
        reaching |= static_cast<uint32_t>(there && one >= key) << j;
        exceeding |= static_cast<uint32_t>(there && one > key) << j;
        if (!pass || one < key) top = max(top, static_cast<Word>(one));
      }
      reach |= static_cast<uint64_t>(reaching) << (u * kVector);
      above |= static_cast<uint64_t>(exceeding) << (u * kVector);
    }
    const uint32_t both = team.fold(__popcll(reach) + (static_cast<uint32_t>(__popcll(above)) << 16), &top);
    if (!open) continue;
    const uint32_t count = both & 0xffff, beyond = both >> 16;
    if (count >= a.k) {
      const bool many = count > most;
      tied = many && beyond < a.k;
      open = many && beyond > most;
      hits = many ? above : reach, ties = reach ^ above;
      reached = tied ? count : beyond;
      if (tied) more = beyond;
      low = static_cast<Key>(key + 1);
      if (!pass) high = static_cast<Key>(top);
    } else {
      high = min(static_cast<Key>(top), static_cast<Key>(key - 1)), more = count;
    }
    const Key span = static_cast<Key>(high - low);
    if (pass % 4 == 0) {
      key = high;
    } else if (pass % 4 == 2) {
      key = static_cast<Key>(high - span / 2);
    } else {
      const float part = (static_cast<float>(reached) - (a.k + most) / 2) / static_cast<float>(reached - more);
      key = static_cast<Key>(low + min(static_cast<Key>(max(part, 0.f) * static_cast<float>(span)), span));
    }
  }
  if (any(tied)) {
    uint32_t above[T::kMasks], taken[T::kMasks];
    split(hits, above);
    split(tied ? hits | ties : hits, taken);
    team.take_first(tied, more, reached - more, above, taken);
    hits = joined(taken);
  }
  return {hits, tied};
}

}  // namespace
}  // namespace jaxgpuops::topk
