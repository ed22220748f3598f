// Top-k of rows that are short enough for registers, k <= 128, and of few columns of such lengths. A team of threads
// holds a row or column. A thread loads 32 or 64 of its elements at once. A team is a part of a warp, which then has
// several rows, or it is a block.
//
// First the team finds a threshold that k elements of the row reach, and few more. The delegates are the maxima of
// parts of the row; the k-th largest of G delegates is reached by about G ln(G / (G - k)) elements. For k <= 8 and few
// elements, the threshold is the k-th key itself: a sorting network in each thread finds its eight best elements, and
// merges between pairs of threads give those of the team. The elements that reach the threshold are candidates. They go
// to shared memory and are ranked by comparing all with all. If there are too many candidates (because of ties, or data
// for which the delegates work badly), counts raise the threshold, at most to the k-th key. If too many elements equal
// that key, the index up to which they are taken belongs to the threshold.
//
// Bytes moved: the input once, and k results (value and index); candidates are read again, mostly from the L1 cache.
// Columns are read element by element, so a sector of neighbouring columns is read for each of them.
// Sources: Dr. Top-k's delegates (arXiv 2109.08219), bitonic top-k (Shanbhag et al., SIGMOD 2018).
#include <algorithm>

#include "common/cuda/launch.cuh"
#include "topk/cuda/candidates.cuh"
#include "topk/cuda/delegates.cuh"
#include "topk/cuda/kernels.h"
#include "topk/cuda/network.cuh"
#include "topk/cuda/rows_shape.h"
#include "topk/cuda/rows_team.cuh"

namespace jaxgpuops::topk {
namespace {

// Returns the eight best elements of the team, in order, to each of its threads. An element is a word that has a narrow
// key above its mirrored index.
template <class Key, class T>
__device__ __forceinline__ void best_of_team(const T& team, uint32_t (&best)[kBest]) {
  const Network network{team.a.one, team.a.minus_one};
  const Lanes<Key> lanes(team.a.order);
#pragma unroll
  for (int start = 0; start < T::kWords * T::kPerWord; start += kBest) {
    uint32_t group[kBest];
    if constexpr (sizeof(Key) == 2 && T::kVector > 1) {
#pragma unroll
      for (int i = 0; i < kBest; i += 2) {
        const uint32_t pair = lanes.encode(team.words[(start + i) / 2]);
        group[i] = pair * 65536 + (0xffff - team.index_of_first(start + i));
        group[i + 1] = (pair & 0xffff0000) | (0xffff - team.index_of_first(start + i + 1));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kBest; ++i) {
        const int j = start + i;
        group[i] = T::Order::word(encode(team.raw(j), team.a.order), team.index_of_first(j));
      }
    }
    network.sort(group);
#pragma unroll
    for (int i = 0; i < kBest; ++i) best[i] = start ? max(best[i], group[kBest - 1 - i]) : group[i];
    if (start) network.merge(best);
  }
  // The indices so far were those of the first thread, which are constants. The offset of this thread is added now; it
  // is the same for all elements of the thread, so their order stays.
#pragma unroll
  for (int i = 0; i < kBest; ++i) best[i] ^= team.t * T::kVector;
  best_of_lanes<T::kSize>(network, best);
}

template <int kTeam, int kElements, class Key, bool kVectors>
constexpr int kResident =  // blocks per multiprocessor, by the registers that the elements and the rest take
    (kElements * (kVectors || sizeof(Key) == 8 ? sizeof(Key) : 4) > 128 ? 640 : 1024) /
    (kTeam > 32 ? kTeam : kRowsBlock);

// Where the results of a row are written. For floats, a word is the element itself.
template <class Order, class Key, bool kFloats>
struct Output {
  const Args& a;
  int64_t base;
  uint32_t stride;

  __device__ __forceinline__ void operator()(uint32_t at, typename Order::Word word, uint32_t index) const {
    const int64_t to = base + static_cast<uint64_t>(at) * stride;
    static_cast<Key*>(a.values)[to] = kFloats ? static_cast<Key>(word) : decode(Order::key(word), a.order);
    a.indices[to] = static_cast<int32_t>(Order::index(word, index));
  }
};

// Writes the k best of the m candidates on a board, in the order asked for.
template <class T, class Output>
__device__ __forceinline__ void write_candidates(T& team, const typename T::Element* row, uint32_t in_team, uint32_t m,
                                                 typename T::Element floor, bool ties, Output write) {
  using Order = typename T::Order;
  using Key = typename T::Element;
  using Word = typename T::Word;
  const Args& a = team.a;
  auto& board = team.board;
  for (uint32_t start = in_team; start < m; start += 2 * T::kSize) {
    uint32_t index[2];
    Key raw[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {  // registers cannot be indexed, so elements are read again, from L1
      index[i] = board.indices[min(start + i * T::kSize, m - 1)];
      raw[i] = team.element(row, index[i]);
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i)
      if (start + i * T::kSize < m)
        board.words[start + i * T::kSize] = T::kFloats ? raw[i] : Order::word(encode(raw[i], a.order), index[i]);
  }
  if (in_team < 4) {  // clears four more places, since ranks compare four candidates at a time
    board.words[m + in_team] = T::kFloats ? decode(Key{0}, a.order) : 0;
    board.indices[m + in_team] = ~0u;
  }
  team.sync();
  // Ranks each candidate by counting those that come before it, in the order of their words, or of words and indices. A
  // thread ranks several candidates at the same time; in a block, several lanes share the counting for the same
  // candidates. Floats are compared as in float_hits(), which treats those that it cannot tell apart, such as NaNs, as
  // equal.
  constexpr uint32_t kSplit = T::kSize == 64 ? 2 : T::kBlock ? 4 : 1, kApart = T::kSize / kSplit;
  constexpr uint32_t kOwn = T::kSize == 32 || kApart == 64 ? 2 : kApart <= 32 ? 3 : 1;
  float scale = 0;
  if constexpr (T::kFloats)
    scale = __uint_as_float(min((314u << 23) - (decode(floor, a.order) & kExponent), 254u << 23));
  const auto rank_all = [&](auto with_indices) {
    if constexpr (T::kFloats && with_indices) {
      for (uint32_t i = in_team; i < m + 4; i += T::kSize) board.words[i] = encode(board.words[i], a.order);
      team.sync();
    }
    constexpr bool kFloats = T::kFloats && !with_indices;
    uint32_t sum = 0;
    for (uint32_t start = 0; start < m; start += kOwn * kApart) {
      const uint32_t first = start + in_team / kSplit;
      Word own[kOwn];
      uint32_t index[kOwn], before[kOwn];
      float offset[kOwn], higher[kOwn];
#pragma unroll
      for (uint32_t o = 0; o < kOwn; ++o) {
        const uint32_t i = min(first + o * kApart, m);
        own[o] = board.words[i], index[o] = board.indices[i], before[o] = 0;
        offset[o] = __uint_as_float(static_cast<uint32_t>(own[o])) * -scale, higher[o] = 8388608;
      }
      for (uint32_t j = in_team % kSplit * 4; j < m; j += 4 * kSplit) {
        struct alignas(16) Four {
          Word x, y, z, w;
        };
        const Four other = *reinterpret_cast<const Four*>(board.words + j);
        if constexpr (with_indices) {
          const uint4 place = *reinterpret_cast<const uint4*>(board.indices + j);
#pragma unroll
          for (uint32_t o = 0; o < kOwn; ++o) {
            count_before(before[o], own[o], index[o], other.x, place.x);
            count_before(before[o], own[o], index[o], other.y, place.y);
            count_before(before[o], own[o], index[o], other.z, place.z);
            count_before(before[o], own[o], index[o], other.w, place.w);
          }
        } else if constexpr (kFloats) {
#pragma unroll
          for (uint32_t o = 0; o < kOwn; ++o) {
            higher[o] += __saturatef(fmaf(__uint_as_float(other.x), scale, offset[o]));
            higher[o] += __saturatef(fmaf(__uint_as_float(other.y), scale, offset[o]));
            higher[o] += __saturatef(fmaf(__uint_as_float(other.z), scale, offset[o]));
            higher[o] += __saturatef(fmaf(__uint_as_float(other.w), scale, offset[o]));
          }
        } else {
#pragma unroll
          for (uint32_t o = 0; o < kOwn; ++o) {
            count_less(before[o], own[o], other.x);
            count_less(before[o], own[o], other.y);
            count_less(before[o], own[o], other.z);
            count_less(before[o], own[o], other.w);
          }
        }
      }
#pragma unroll
      for (uint32_t o = 0; o < kOwn; ++o) {
        if constexpr (kFloats) before[o] = __float_as_uint(higher[o]) & 0x7fffff;
        before[o] = sum_of_lanes<kSplit>(before[o]);
        if (first + o * kApart >= m || in_team % kSplit) continue;
        sum += before[o];
        if (before[o] >= a.k) continue;
        // A word of 64 bits would not fit, so its place stands for it.
        const uint32_t word = sizeof(Key) == 8             ? first + o * kApart
                              : T::kFloats && with_indices ? decode(static_cast<Key>(own[o]), a.order)
                                                           : own[o];
        // An atomic is used because equal candidates have the same place until the row is ranked again.
        atomicExch(&board.chosen[before[o]],
                   static_cast<unsigned long long>(Order::index(own[o], index[o])) << 32 | word);
      }
    }
    return sum;
  };
  if constexpr (sizeof(Key) < 4) {
    rank_all(std::bool_constant<!Order::kDistinct>());
  } else if (sizeof(Key) == 8 || !a.sorted || ties || (T::kBlock && gridDim.x <= kFewBlocks)) {
    rank_all(std::true_type());
  } else {
    // The ranks of distinct words are 0 to m - 1. If some words are equal, the sum of the ranks is less; then the row
    // is ranked again by word and index. (That is done at once for results in the order of indices, since they need the
    // indices anyway, and for a few blocks, whose threads would have to wait for each other once more.)
    const uint32_t ranks = team.fold(rank_all(std::false_type()));
    if constexpr (!T::kBlock) team.sync();
    const bool tied = m && ranks != m * (m - 1) / 2;
    if (T::kBlock ? tied : __any_sync(kEveryLane, tied)) rank_all(std::true_type());
  }
  team.sync();  // so that neighbouring lanes write neighbouring results
  for (uint32_t i = in_team; m && i < a.k; i += T::kSize) {
    const unsigned long long best = board.chosen[i];
    const auto index = static_cast<uint32_t>(best >> 32);
    uint32_t at = i;
    if (!a.sorted) {
      at = 0;
      for (uint32_t j = 0; j < a.k; ++j) at += static_cast<uint32_t>(board.chosen[j] >> 32) < index;
    }
    const auto word = static_cast<uint32_t>(best);
    write(at, sizeof(Key) == 8 ? board.words[word] : word, index);
  }
}

// Selects the k best by a network, and writes them.
template <class Key, class T>
__device__ __forceinline__ void select_by_network(const T& team, const Key* row, uint32_t in_team, bool live,
                                                  Output<typename T::Order, Key, false> write) {
  using Order = typename T::Order;
  const Args& a = team.a;
  if constexpr (Order::kDistinct) {
    uint32_t best[kBest];
    best_of_team<Key>(team, best);
    if (!live) return;
#pragma unroll
    for (uint32_t start = 0; start < kBest; start += T::kSize) {
      uint32_t mine = 0, at = start + in_team;
#pragma unroll
      for (uint32_t j = 0; j < kBest; ++j)
        if (at == j) mine = best[j];
      if (at >= a.k) return;
      if (!a.sorted) {
        at = 0;
#pragma unroll
        for (uint32_t j = 0; j < kBest; ++j) at += j < a.k && Order::index(best[j], 0) < Order::index(mine, 0);
      }
      write(at, mine, 0);
    }
  } else {
    static_assert(T::kSize == kBest && T::kWords == kBest);
    uint32_t keys[kBest], key, index;
#pragma unroll
    for (int i = 0; i < kBest; ++i) keys[i] = encode(team.words[i], a.order);
    best_of_short_row(
        Network{a.one, a.minus_one}, keys, live ? a.length : 0, a.k, [&](int i) { return team.index(i); },
        [&](uint32_t i) { return encode(static_cast<uint32_t>(team.element(row, i)), a.order); }, key, index);
    uint32_t at = in_team;
    if (!a.sorted) {
      at = 0;
      for (uint32_t j = 0; j < a.k; ++j) at += __shfl_sync(kEveryLane, index, j, kBest) < index;
    }
    if (live && in_team < a.k) write(at, key, index);
  }
}

template <class Key, int kTeam, int kElements, bool kVectors, bool kFloat, bool kNetwork, int kMostK,
          bool kRagged = false>
__global__ void __launch_bounds__(kTeam > 32 ? kTeam : kRowsBlock, kResident<kTeam, kElements, Key, kVectors>)
    rows_kernel(const __grid_constant__ Args a) {
  using T = Team<Key, kTeam, kElements, kVectors, kFloat, kMostK, kRagged>;
  using Order = typename T::Order;
  constexpr uint32_t kTeams = T::kThreads / kTeam;
  using Word = typename T::Word;
  __shared__ typename T::SharedBoard boards[kTeams];
  const uint32_t lane = threadIdx.x & 31, in_team = threadIdx.x % kTeam, in_block = threadIdx.x / kTeam;
  const uint32_t mates = kTeam >= 32 ? kEveryLane : ((1u << (kTeam & 31)) - 1) << (lane / kTeam * kTeam);
  typename T::SharedBoard& board = boards[in_block];
  T team{a, board, in_team};

  const int64_t r = static_cast<int64_t>(blockIdx.x) * kTeams + in_block;
  if (kTeam >= 32 ? r >= a.rows : !__any_sync(kEveryLane, r < a.rows)) return;
  const bool live = kTeam >= 32 || r < a.rows;
  int64_t start = r, offset = 0;  // the row begins behind so many whole rows and so many elements
  if (!kVectors && a.inner > 1) offset = static_cast<uint32_t>(r) % static_cast<uint32_t>(a.inner), start = r - offset;
  const Key* row = static_cast<const Key*>(a.x) + (live ? start * a.length + offset : 0);
  const Output<Order, Key, T::kFloats> write{a, live ? a.place(r, 0) : 0, a.beside};
  if constexpr (kNetwork) {
    team.load(row, live);
    select_by_network(team, row, in_team, live, write);
  } else {
    const auto find_floor = [&]() -> Key {
      if constexpr (T::kBlock) {
        // If a row has more threads than delegates, two threads share a delegate. They are not neighbours, so that
        // neighbouring vectors of large elements count for several.
        constexpr int kDelegates = T::kDelegates, kOwn = kTeam < kDelegates ? kDelegates / kTeam : 1;
        static_assert(kTeam <= 2 * kDelegates);
        Word best[kOwn];
        team.delegates(best);
#pragma unroll
        for (int p = 0; p < kOwn; ++p) board.delegates[team.t + p * kTeam] = best[p];
        team.sync();
        Word all[kDelegates / 32];
#pragma unroll
        for (int p = 0; p < kDelegates / 32; ++p) {
          all[p] = board.delegates[p * 32 + lane];
          if constexpr (kTeam > kDelegates) all[p] = max(all[p], board.delegates[kDelegates + p * 32 + lane]);
        }
        return static_cast<Key>(kth_of_group<32>(all, a.k, kEveryLane));
      } else if (a.k <= kTeam) {
        using Best = std::conditional_t<kFloat, float, Word>;
        Best best[2];
        team.delegates(best);
        if constexpr (kFloat) {  // fmaxf drops NaNs
          const float kth = kth_of_pairs<kTeam>(fmaxf(best[0], -INFINITY), fmaxf(best[1], -INFINITY), a.k);
          return encode(__float_as_uint(kth), a.order);
        } else {
          return static_cast<Key>(kth_of_pairs<kTeam>(best[0], best[1], a.k));
        }
      } else {
        Word best[kParts];
        team.delegates(best);
        return static_cast<Key>(kth_of_group<kTeam>(best, a.k, mates));
      }
    };
    Key floor = 0;
    uint32_t hits[T::kMasks];              // a bit for each element that is taken
    uint32_t above[T::kMasks], found = 0;  // those above the threshold; the number of candidates
    bool again = false, ties = false;
    const auto any = [](bool b) -> bool { return T::kBlock ? b : __any_sync(kEveryLane, b); };
    if (T::kBlock && in_team == 0) board.count = 0;
    const auto take = [&] {
      found = team.append(hits);
      team.sync();
      if constexpr (T::kBlock) found = board.count;
    };
    // If a warp has too many candidates, a second round finds those above the threshold. It reads the row again, from
    // L1, and runs the same code, which is already fetched. (Where the compiler would need more registers for the loop,
    // or a block has the row, that took longer for random rows.)
    constexpr bool kTwice = kVectors && !T::kBlock && sizeof(Key) <= 4;
    const uint32_t room = T::kBlock && gridDim.x > kFewBlocks ? team.most() : T::SharedBoard::kCapacity;
#pragma unroll 1
    for (bool second = false;; second = true) {
      team.hide(row);
      team.load(row, live);
      if (!second) floor = find_floor();
      const bool highest = floor == static_cast<Key>(~Key{0});
      team.reach(static_cast<Key>(floor + (second && !highest)), live, above);
#pragma unroll
      for (int i = 0; i < T::kMasks; ++i) {
        if (!second) hits[i] = above[i];
        if (highest) above[i] = 0;
      }
      if (second) break;
      take();
      again = live && (found > room || found < a.k);
      if (!kTwice || !any(again)) break;
    }
    if (any(again)) {
      if constexpr (kTwice) {
        uint32_t more = team.count(above);
        if (kFloat && any(again && more < a.k)) {
          if (more < a.k) team.drop_lowest(row, floor, above, hits);
          more = team.count(above);
        }
        // Most often, too many equal the k-th key. Then the first of them are taken.
        ties = again && found >= a.k && more < a.k;
        if (any(ties)) team.take_first(ties, more, found - more, above, hits);
      }
      const bool left = again && !ties;
      if (any(left)) {
        Refined refined;
        if constexpr (T::kRefinesVectors) {
          refined = refine_vectors<T>(a, board, row, team.t, left, floor);
        } else {
          refined = refine_by_loop<T>(a, board, row, team.t, left, floor);
        }
        if (left) {
          ties = refined.tied;
          split(refined.hits, hits);
        }
      }
      ties |= !T::kBlock;  // all teams of a warp rank in the same way
      team.sync();
      if (T::kBlock && in_team == 0) board.count = 0;
      team.sync();
      take();
    }
    write_candidates(team, row, in_team, found, floor, ties, write);
  }
}

template <class Key, int kTeam, int kElements, bool kFloat, bool kNetwork, int kMostK = kMaxRowsK>
cudaError_t run(cudaStream_t stream, const Args& a) {
  constexpr int kThreads = kTeam > 32 ? kTeam : kRowsBlock, kTeams = kThreads / kTeam;
  Launch config;
  config.grid = dim3(static_cast<unsigned>((a.rows + kTeams - 1) / kTeams));
  config.block = dim3(kThreads);
  const bool vectors = a.inner == 1 && reinterpret_cast<uintptr_t>(a.x) % 16 == 0 && a.length * sizeof(Key) % 16 == 0;
  if constexpr (sizeof(Key) < 4 && !kNetwork) {
    // Rows of narrow keys are read as vectors wherever they begin, if the team has room for one more.
    if (a.inner == 1 && !vectors && a.length + 16 / sizeof(Key) <= kTeam * kElements)
      return launch(stream, config, rows_kernel<Key, kTeam, kElements, true, kFloat, kNetwork, kMostK, true>, a);
  }
  return launch(stream, config,
                vectors ? rows_kernel<Key, kTeam, kElements, true, kFloat, kNetwork, kMostK>
                        : rows_kernel<Key, kTeam, kElements, false, kFloat, kNetwork, kMostK>,
                a);
}

template <class Key>
cudaError_t run_network(cudaStream_t stream, const RowsShape& shape, const Args& a) {
  if constexpr (sizeof(Key) == 4) {
    return run<Key, 8, 8, false, true>(stream, a);
  } else {
    switch (shape.team) {
      case 4: return run<Key, 4, 32, false, true>(stream, a);
      case 8: return run<Key, 8, 32, false, true>(stream, a);
      case 16: return run<Key, 16, 32, false, true>(stream, a);
      default: return run<Key, 32, 32, false, true>(stream, a);
    }
  }
}

// For k above kMaxRowsK.
template <class Key, bool kFloat>
cudaError_t run_many(cudaStream_t stream, const RowsShape& shape, const Args& a) {
  switch (shape.team) {
    case 64: return run<Key, 64, kManyElements, kFloat, false, kMostRowsK>(stream, a);
    case 128: return run<Key, 128, kManyElements, kFloat, false, kMostRowsK>(stream, a);
    default: return run<Key, 256, kManyElements, kFloat, false, kMostRowsK>(stream, a);
  }
}

template <class Key, bool kFloat>
cudaError_t run_threshold(cudaStream_t stream, const RowsShape& shape, const Args& a) {
  constexpr int kFew = few_elements(sizeof(Key)),
                kMany = kManyElements;  // threads have the same number of narrow elements in all teams
  if (a.k > kMaxRowsK) return run_many<Key, kFloat>(stream, shape, a);
  switch (shape.team) {
    case 4:  // for narrow elements, networks take k up to 8, and larger k more lanes
      if constexpr (sizeof(Key) == 4) return run<Key, 4, kFew, kFloat, false>(stream, a);
      return cudaErrorInvalidValue;
    case 8: return run<Key, 8, kFew, kFloat, false>(stream, a);
    case 16: return run<Key, 16, kFew, kFloat, false>(stream, a);
    case 32:
      return shape.elements == kFew ? run<Key, 32, kFew, kFloat, false>(stream, a)
                                    : run<Key, 32, kMany, kFloat, false>(stream, a);
    case 64: return run<Key, 64, kMany, kFloat, false>(stream, a);
    case 128: return run<Key, 128, kMany, kFloat, false>(stream, a);
    default: return run<Key, 256, kMany, kFloat, false>(stream, a);
  }
}

cudaError_t run_wide(cudaStream_t stream, const RowsShape& shape, const Args& a) {
  constexpr int kFew = few_elements(8);
  switch (shape.team) {
    case 4: return run<uint64_t, 4, kFew, false, false>(stream, a);
    case 8: return run<uint64_t, 8, kFew, false, false>(stream, a);
    case 16: return run<uint64_t, 16, kFew, false, false>(stream, a);
    case 32: return run<uint64_t, 32, kFew, false, false>(stream, a);
    case 128: return run<uint64_t, 128, kFew, false, false>(stream, a);
    default: return run<uint64_t, 256, kFew, false, false>(stream, a);
  }
}

}  // namespace

cudaError_t launch_rows(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const RowsShape shape = rows_shape(problem.rows.count(), problem.rows.length, problem.k, problem.key_bits / 8);
  Args a = {call_of(problem, buffers)};
  a.rows = problem.rows.count();
  a.one = 1;
  a.minus_one = ~0u;
  return dispatch_key(problem.key_bits, [&](auto key) -> cudaError_t {
    using Key = decltype(key);
    if constexpr (sizeof(Key) == 8) {
      return run_wide(stream, shape, a);
    } else {
      if (shape.network) return run_network<Key>(stream, shape, a);
      if constexpr (sizeof(Key) == 4) {
        const bool largest = problem.order.flip >> 31 & 1;
        if (problem.order.magnitude && largest) return run_threshold<Key, true>(stream, shape, a);
      }
      return run_threshold<Key, false>(stream, shape, a);
    }
  });
}

}  // namespace jaxgpuops::topk
