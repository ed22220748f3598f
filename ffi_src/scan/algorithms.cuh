// The algorithms of scans: which block takes which tiles, and how it knows the fold of what comes before one.
//
//   tile        nothing does: the axis is one tile
//   loop        the block has walked over it
//   look_ahead  blocks share the axis, each taking the next tile that is left from a counter. A tile passes through a
//               block in three steps that overlap with those of the block's other tiles: it is loaded into shared
//               memory; its sum is folded and published; its results are written. A warp of its own (or some) finds out
//               what comes before a tile from the sums that other blocks published, one step ahead of the others.
//
// A sum is published in words of 32 bits each, with a tag beside it that says so: one 64-bit store, so nothing has to
// be ordered. To publish a sum a block waits for nothing but tiles that come before in the counter's order, so there is
// always one that can go on, whatever blocks are running. Only sums are ever waited for, never what comes before
// another tile, so what is folded is always the same, and there is no chain from tile to tile. (Look-ahead and its
// warps are those of CCCL's warpspeed scan; the levels of sums, and hence the fixed order of folds, are not.)
//
// Operands are read once, results written once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "scan/chunks.cuh"
#include "scan/columns.cuh"
#include "scan/engine.cuh"
#include "scan/plan.h"

namespace jaxgpuops::scan {

// ---- Folds of tiles -------------------------------------------------------------------------------------------------
//
// Always the same, however tiles come to be folded (shape.h): for each digit of the tile's number the fold of the
// groups that it counts, as those of the digit's bits, each a balanced tree; then the folds of digits.

// For a thread that has the tiles of a column one after the other.
template <class Policy>
class Counter {
 public:
  using State = typename Policy::State;

  __device__ explicit Counter(const Parameters& p) : p(p) {}

  // Adds tile t, after those before it.
  __device__ void add(int t, State sum) {
    int bit = 0;
    for (; t >> bit & 1; ++bit) sum = Policy::combine(trees[bit], sum);
    trees[bit] = sum;
  }

  // The fold of all, `count` of them.
  __device__ State fold(int count) const {
    State all = Policy::identity(p.options);
    for (int level = 0; count >> (kGroupBits * level); ++level) {
      State digit = Policy::identity(p.options);
      for (int b = kGroupBits * level; b < kGroupBits * (level + 1); ++b)
        if (count >> b & 1) digit = Policy::combine(trees[b], digit);
      all = Policy::combine(digit, all);
    }
    return all;
  }

 private:
  const Parameters& p;
  State trees[kGroupBits * kMaxLevels];  // of 2^bit tiles
};

// For a warp that has the sums of a group in its lanes: those up to each lane.
template <class Policy, class State>
__device__ __forceinline__ State scan_group(State sum) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int bit = 0; bit < kGroupBits; ++bit) {
    const State left = shuffle(sum, (lane >> bit << bit) - 1);
    if (lane >> bit & 1) sum = Policy::combine(left, sum);
  }
  return sum;
}

// For a warp that has sums one after the other, of tiles (level 0) or of groups of them.
template <class Policy>
class Digits {
 public:
  using State = typename Policy::State;

  // Takes the sum of a level that comes next; all lanes have it.
  __device__ void add(int level, int index, State sum) {
    for (;; ++level) {
      if (threadIdx.x % 32 == index % kGroup) sums[level] = sum;
      if (index % kGroup != kGroup - 1 || level == kMaxLevels - 1) return;
      sum = shuffle(scan_group<Policy>(sums[level]), kGroup - 1);
      index /= kGroup;
    }
  }

  // The fold of what comes before tile t, of which `state` is that of the digits below `level`.
  __device__ State before(int level, int t, State state) const {
    for (; t >> (kGroupBits * level); ++level) {
      const int digit = (t >> (kGroupBits * level)) % kGroup;
      if (digit != 0) state = Policy::combine(shuffle(scan_group<Policy>(sums[level]), digit - 1), state);
    }
    return state;
  }

 private:
  State sums[kMaxLevels];  // of a level, in the lane of its number
};

// Blocks that registers must leave room for: other blocks hide the latency of memory. More of a kernel that has one
// tile only, all of it in registers.
template <class Policy>
constexpr int kLoopBlocks = Policy::kOperands > 1                 ? 3
                            : sizeof(typename Policy::State) <= 8 ? 5
                                                                  : 4;
template <class Policy>
constexpr int kTileBlocks = Policy::kOperands == 3 && sizeof(typename Policy::State) <= 8 ? 4 : kLoopBlocks<Policy>;

// Axes of one tile.
template <class Policy, Layout kLayout>
__global__ void __launch_bounds__(kThreads, kTileBlocks<Policy>) scan_tile(const __grid_constant__ Parameters p) {
  using Work = Engine<Policy, kLayout>;
  const Work work(p);
  const auto place = work.place(blockIdx.x);
  const auto span = work.span(0);
  typename Work::Tile tile;
  work.load(place, span, tile);
  work.turn(place, span, tile);
  const auto starts = work.starts(place, span);
  const auto folds = work.fold(place, span, tile, starts);
  typename Work::State base[Work::kWidth];
  if (p.axis_warps == 1) {
#pragma unroll
    for (int v = 0; v < Work::kWidth; ++v) base[v] = work.initial(place.column + v);
  } else {
    const int columns = work.block_columns();
    if (threadIdx.x < columns) work.carry(0)[threadIdx.x] = work.initial(int64_t{blockIdx.x} * columns + threadIdx.x);
    work.publish_warp(0, folds);
    __syncthreads();
    work.earlier_warps(0, base);
  }
  work.finish(place, span, tile, starts, folds, base);
}

template <class Policy>
__global__ void __launch_bounds__(kThreads, kLoopBlocks<Policy>) scan_loop(const __grid_constant__ Parameters p) {
  using Work = Engine<Policy, Layout::kSingle>;
  using State = typename Work::State;
  const Work work(p);
  const auto place = work.place(blockIdx.x);
  const int columns = work.block_columns();
  const bool keeps = threadIdx.x < columns;  // what comes before the next tile, for a column
  Counter<Policy> counter(p);
  const State initial = keeps ? work.initial(int64_t{blockIdx.x} * columns + threadIdx.x) : work.identity();
  if (keeps) work.carry(0)[threadIdx.x] = initial;
  for (int t = 0; t < p.tiles; ++t) {
    const auto span = work.span(t);
    typename Work::Tile tile;
    work.load(place, span, tile);
    const auto starts = work.starts(place, span);
    const auto folds = work.fold(place, span, tile, starts);
    work.publish_warp(t % 2, folds);
    __syncthreads();
    State base[1];
    work.earlier_warps(t % 2, base);
    if (t + 1 < p.tiles && keeps) {
      counter.add(t, work.tile_total(t % 2, threadIdx.x));
      work.carry((t + 1) % 2)[threadIdx.x] = Policy::combine(initial, counter.fold(t + 1));
    }
    work.finish(place, span, tile, starts, folds, base);
  }
}

// Columns, of one tile or more: the next p.stages - 1 tiles are on their way while one is worked on.
template <class Policy>
__global__ void __launch_bounds__(kThreads, 2) scan_columns(const __grid_constant__ Parameters p) {
  using Work = Columns<Policy>;
  using State = typename Work::State;
  const Work work(p);
  const auto place = work.place(blockIdx.x);
  const int columns = work.block_columns();
  const bool shared = p.axis_warps > 1, keeps = shared && threadIdx.x < columns;
  Counter<Policy> counter(p);
  const State initial = keeps ? work.initial(int64_t{blockIdx.x} * columns + threadIdx.x) : work.identity();
  if (keeps) work.carry(0)[threadIdx.x] = initial;
  typename Work::Extra extra[1];
  const auto fetch = [&](int t) {
    if (t < p.tiles) work.fetch(t % p.stages, place, work.span(t), extra);
    commit_copies();
  };
  for (int t = 0; t < p.stages - 1; ++t) fetch(t);
  for (int t = 0; t < p.tiles; ++t) {
    fetch(t + p.stages - 1);
    if (p.stages == 3) {
      wait_for_copies<2>();
    } else if (p.stages == 2) {
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    const auto span = work.span(t);
    typename Work::Tile tile;
    work.take(t % p.stages, place, span, tile);
    const auto starts = work.starts(place, span);
    typename Work::Folds folds;
    State base[Work::kWidth];
    if (shared) {
      folds = work.fold(place, span, tile, starts);
      work.publish_warp(t % 2, folds);
      __syncthreads();
      work.earlier_warps(t % 2, base);
      if (t + 1 < p.tiles && keeps) {
        counter.add(t, work.tile_total(t % 2, threadIdx.x));
        work.carry((t + 1) % 2)[threadIdx.x] = Policy::combine(initial, counter.fold(t + 1));
      }
    } else {
#pragma unroll
      for (int v = 0; v < Work::kWidth; ++v) base[v] = work.initial(place.column + v);
    }
    work.finish(place, span, tile, starts, folds, base);
  }
}

// The same for long axes with inner = 1: the next tile is on its way while one is worked on.
template <class Policy>
__global__ void __launch_bounds__(kThreads, kLoopBlocks<Policy>) scan_walk(const __grid_constant__ Parameters p) {
  using Work = Chunks<Policy>;
  using State = typename Work::State;
  const Work work(p);
  const auto place = work.place(blockIdx.x);
  typename Work::Extra extra[1];
  work.fetch(0, place, work.span(0), extra);
  commit_copies();
  work.put_extras(0, extra);
  Digits<Policy> digits;  // of the first warp
  const State initial = work.initial(blockIdx.x);
  if (threadIdx.x == 0) work.carry(0)[0] = initial;
  for (int t = 0; t < p.tiles; ++t) {
    const bool more = t + 1 < p.tiles;
    if (more) work.fetch((t + 1) % 2, place, work.span(t + 1), extra);
    commit_copies();
    wait_for_copies<1>();
    const auto span = work.span(t);
    typename Work::Tile tile;
    work.take(t % 2, place, span, tile);
    const auto starts = work.starts(place, span);
    const auto folds = work.fold(place, span, tile, starts);
    work.publish_warp(t % 2, folds);
    __syncthreads();
    State base[1];
    work.earlier_warps(t % 2, base);
    if (more && threadIdx.x < 32) {
      digits.add(0, t, work.tile_total(t % 2, 0));
      const State next = Policy::combine(initial, digits.before(0, t + 1, work.identity()));
      if (threadIdx.x == 0) work.carry((t + 1) % 2)[0] = next;
    }
    work.finish(place, span, tile, starts, folds, base);
    if (more) work.put_extras((t + 1) % 2, extra);
  }
}

// ---- Blocks that share an axis --------------------------------------------------------------------------------------

constexpr uint64_t kThere = uint64_t{1} << 32;

// The sums of tiles and of groups of them, in global memory.
template <class Policy>
struct Sums {
  using State = typename Policy::State;
  static constexpr int kWords = sizeof(State) / 4;
  static constexpr int kBatch = kWords >= 8 ? 2 : 16 / kWords;  // loaded together

  const Parameters& p;

  __device__ uint64_t* at(int level, int index, int64_t column) const {
    return p.words + ((p.level_at[level] + static_cast<int64_t>(index)) * p.columns + column) * kWords;
  }

  __device__ void publish(int level, int index, int64_t column, State state) const {
    const auto words = bits_as<Words<State>>(state);
    uint64_t* to = at(level, index, column);
#pragma unroll
    for (int w = 0; w < kWords; ++w) store_word(to + w, kThere | words.word[w]);
  }

  // Calls body(i, sum i) for `count` sums of a level, one after the other; waits until they are there.
  template <class Body>
  __device__ void each(int level, int first, int count, int64_t column, Body body) const {
    for (int begin = 0; begin < count; begin += kBatch) {
      Words<State> words[kBatch];
      bool there[kBatch], all;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) there[i] = begin + i >= count;
      do {
        all = true;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (!there[i]) there[i] = load(at(level, first + begin + i, column), words[i]);
          all = all && there[i];
        }
      } while (!all);
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (begin + i < count) body(begin + i, bits_as<State>(words[i]));
    }
  }

  // The fold of `count` sums of a level, from the first of a group on, and of `state` after them.
  __device__ State fold(int level, int first, int count, int64_t column, State state) const {
    State trees[kGroupBits];
    each(level, first, count, column, [&](int i, State sum) {
      bool carry = true;
#pragma unroll
      for (int bit = 0; bit < kGroupBits; ++bit) {
        if (!carry) continue;
        carry = i >> bit & 1;
        if (carry) {
          sum = Policy::combine(trees[bit], sum);
        } else {
          trees[bit] = sum;
        }
      }
    });
#pragma unroll
    for (int bit = 0; bit < kGroupBits; ++bit)
      if (count >> bit & 1) state = Policy::combine(trees[bit], state);
    return state;
  }

  // Loads a sum, if it is there.
  __device__ static bool load(const uint64_t* from, Words<State>& words) {
    bool there = true;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint64_t word = load_word(from + w);
      there = there && word >= kThere;
      words.word[w] = static_cast<uint32_t>(word);
    }
    return there;
  }
};

// Makes all words say that nothing is there.
static __global__ void clear_workspace(unsigned* counters, uint64_t* words, int64_t count) {
  let_next_start();
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (first < kMostCounters) counters[first] = 0;
  for (int64_t i = first; i < count; i += int64_t{gridDim.x} * blockDim.x) words[i] = 0;
}

// Where there are many strips, a block stays with one, and takes the next tile of that; it knows the sums up to its
// last tile, and so needs only those since. Otherwise it takes the next of all.
//
// A block's tiles are counted; tile i is loaded in step i - 1, its sum published in step i, and its results written in
// step i + p.late. So there are p.late + 2 tiles in shared memory, and as many warps look ahead as tiles wait for what
// comes before them, each at every so many tiles (one at all, where the block stays with a strip).
constexpr unsigned kManyStrips = 16;
constexpr int kTickets = 8;  // a ring of those from tile i - p.late to i + 2
template <class Policy, class Work>
constexpr int kMostLookers = most_late(Work::kOneColumn ? Layout::kAlong : Layout::kAcross, Policy::kOperands) + 1;

// Warps of a looker: for 32 columns each.
template <class Work>
constexpr int kTeam = Work::kWidth;

template <class Policy, class Work>
class LookAhead {
 public:
  using State = typename Policy::State;
  using Tile = typename Work::Tile;

  __device__ explicit LookAhead(const Parameters& p)
      : p(p),
        work(p),
        sums{p},
        columns(work.block_columns()),
        stages(p.late + 2),
        tickets(reinterpret_cast<volatile unsigned*>(work.totals(p.late + 2))),
        all_tickets(p.strips * static_cast<unsigned>(p.tiles)),
        counter(blockIdx.x % p.counters),
        lookers(p.counters > 1 ? 1 : p.late + 1) {}

  __device__ void run() const {
    wait_for_previous();
    if (threadIdx.x == 0) tickets[0] = next_ticket();
    __syncthreads();
    if (threadIdx.x < kThreads) {
      move();
    } else {
      look();
    }
  }

 private:
  // Barriers: those that move tell a looker that a step has ended, and it tells them that a base is there.
  static constexpr int kAmongMovers = 1, kStepEnded = 2, kBaseThere = kStepEnded + kMostLookers<Policy, Work>;
  static constexpr int kWithLooker = kThreads + 32 * kTeam<Work>;

  static constexpr int kTogether = 3;  // levels: enough for 2^15 tiles

  struct Part {
    unsigned strip;
    int tile;
  };
  __device__ Part part(unsigned ticket) const { return {ticket % p.strips, static_cast<int>(ticket / p.strips)}; }
  __device__ unsigned ticket_of(int i) const { return tickets[i % kTickets]; }
  __device__ unsigned next_ticket() const { return atomicAdd(p.counters_at + counter, 1u) * p.counters + counter; }

  __device__ void move() const {
    int looker = 0;                            // that step i is for: of tile i + 1, and of tile i - p.late
    int coming_stage = 0, stage = stages - 1;  // of tiles i + 1 and i
    typename Work::Place place;
    unsigned placed = ~0u;  // the strip where that is, which is mostly the same
    const auto place_of = [&](unsigned strip) {
      if (Work::kOneColumn || strip != placed) place = work.place(strip);
      placed = strip;
      return place;
    };
    for (int i = -1;; ++i) {
      const unsigned coming = ticket_of(i + 1);
      typename Work::Extra extra[Work::kTileExtras];
      if (coming < all_tickets) {
        const Part at = part(coming);
        work.fetch(coming_stage, place_of(at.strip), work.span(at.tile), extra);
      }
      commit_copies();
      unsigned next = all_tickets;
      if (threadIdx.x == 0 && coming < all_tickets) next = next_ticket();

      if (i >= 0 && ticket_of(i) < all_tickets) {
        wait_for_copies<1>();
        const Part at = part(ticket_of(i));
        publish(stage, at, place_of(at.strip));
      }
      if (threadIdx.x == 0) tickets[(i + 2) % kTickets] = next;
      if (i < p.late) {
        wait_at_barrier(kAmongMovers, kThreads);
      } else {
        const unsigned ready = ticket_of(i - p.late);
        if (ready >= all_tickets) return;
        wait_at_barrier(kBaseThere + looker, kWithLooker);
        const Part at = part(ready);
        finish(coming_stage + 1 == stages ? 0 : coming_stage + 1, at, place_of(at.strip));
      }
      if (coming < all_tickets) work.put_extras(coming_stage, extra);
      pass_barrier(kStepEnded + looker, kWithLooker);
      looker = looker == p.late ? 0 : looker + 1;
      stage = coming_stage;
      coming_stage = coming_stage + 1 == stages ? 0 : coming_stage + 1;
    }
  }

  __device__ void publish(int stage, Part at, const typename Work::Place& place) const {
    const auto span = work.span(at.tile);
    Tile tile;
    work.take(stage, place, span, tile);
    const auto folds = work.fold(place, span, tile, work.starts(place, span));
    work.put_folds(stage, folds);
    work.publish_warp(stage, folds);
    wait_at_barrier(kAmongMovers, kThreads);
    const int64_t column = int64_t{at.strip} * columns + threadIdx.x;
    if (threadIdx.x < columns && column < p.columns)
      sums.publish(0, at.tile, column, work.tile_total(stage, threadIdx.x));
  }

  __device__ void finish(int stage, Part at, const typename Work::Place& place) const {
    const auto span = work.span(at.tile);
    Tile tile;
    work.take(stage, place, span, tile);
    typename Work::Folds folds;
    work.take_folds(stage, folds);
    State base[Work::kWidth];
    work.earlier_warps(stage, base);
    work.finish(place, span, tile, work.starts(place, span), folds, base);
  }

  __device__ void look() const {
    const int looker = (static_cast<int>(threadIdx.x) / 32 - kWarps) / kTeam<Work>;
    const int member = (static_cast<int>(threadIdx.x) - kThreads) % (32 * kTeam<Work>);
    Counter<Policy> known(p);
    int count = 0;  // of sums that are known
    for (int j = looker, stage = looker;; j += lookers) {
      const int turn = j % (p.late + 1);
      wait_at_barrier(kStepEnded + turn, kWithLooker);
      const unsigned ticket = ticket_of(j);
      if (ticket >= all_tickets) return;
      const Part at = part(ticket);
      State* const carry = work.carry(stage);
      if constexpr (Work::kOneColumn) {
        const State base = base_by_warp(at);
        if (member == 0) carry[0] = base;
      } else {
        const int64_t column = int64_t{at.strip} * columns + member;
        if (member < columns && column < p.columns) {
          if (p.counters > 1) {
            sums.each(0, count, at.tile - count, column, [&](int i, State sum) { known.add(count + i, sum); });
            count = at.tile;
            carry[member] = with_initial(at.tile, column, known.fold(at.tile));
          } else {
            carry[member] = base_of(at.tile, column);
          }
        }
      }
      pass_barrier(kBaseThere + turn, kWithLooker);
      stage = (stage + lookers) % stages;
    }
  }

  __device__ State with_initial(int tile, int64_t column, State before) const {
    const State initial = work.initial(column);
    return tile == 0 ? initial : Policy::combine(initial, before);
  }

  // What comes before a tile: for each digit of its number, the sums of those that come before in its group. Who has
  // the last tile of a group publishes the sum of the group, at once and of as many levels as end there.

  // By a warp, a lane for each of a group. The first tries of all levels overlap.
  __device__ State base_by_warp(Part at) const {
    const int lane = threadIdx.x % 32;
    const int64_t column = at.strip;
    Words<State> words[kTogether];
    bool there[kTogether];
    const auto load = [&](int level, Words<State>& words) {
      const int index = at.tile >> (kGroupBits * level), digit = index % kGroup;
      const bool wanted = lane < digit || (level == 0 && digit == kGroup - 1);  // the latter with the tile's own sum
      return !wanted || sums.load(sums.at(level, index - digit + lane, column), words);
    };
#pragma unroll
    for (int level = 0; level < kTogether; ++level)
      if (level < p.levels) there[level] = load(level, words[level]);
    State before = work.identity(), sum = before;
    bool ends = true;  // with this tile, a group of the level below, whose sum is `sum`
    const auto fold = [&](int level, Words<State>& words, bool there) {
      const int index = at.tile >> (kGroupBits * level), digit = index % kGroup;
      while (!__all_sync(kAllLanes, there))
        if (!there) there = load(level, words);
      State mine = bits_as<State>(words);
      if (level > 0 && lane == kGroup - 1) mine = sum;
      const State all = scan_group<Policy>(mine);
      ends = ends && digit == kGroup - 1 && level + 1 < p.levels;
      if (ends) {
        sum = shuffle(all, kGroup - 1);
        if (lane == 0) sums.publish(level + 1, index / kGroup, column, sum);
      }
      if (digit != 0) before = Policy::combine(shuffle(all, digit - 1), before);
    };
#pragma unroll
    for (int level = 0; level < kTogether; ++level)
      if (level < p.levels) fold(level, words[level], there[level]);
#pragma unroll 1
    for (int level = kTogether; level < p.levels; ++level) {
      Words<State> more;
      const bool there = load(level, more);
      fold(level, more, there);
    }
    return with_initial(at.tile, column, before);
  }

  // By a thread.
  __device__ State base_of(int tile, int64_t column) const {
    const auto fold = [&](int level, State state) {
      const int index = tile >> (kGroupBits * level);
      return sums.fold(level, index / kGroup * kGroup, index % kGroup, column, state);
    };
    if (tile % kGroup == kGroup - 1 && p.levels > 1) {
      State sum = sums.fold(0, tile, 1, column, work.identity());
      for (int level = 0; (tile >> (kGroupBits * level)) % kGroup == kGroup - 1 && level + 1 < p.levels; ++level) {
        sum = fold(level, sum);
        sums.publish(level + 1, tile >> (kGroupBits * (level + 1)), column, sum);
      }
    }
    State state = work.identity();
    for (int level = 0; tile >> (kGroupBits * level); ++level)
      state = Policy::combine(fold(level, work.identity()), state);
    return with_initial(tile, column, state);
  }

  const Parameters& p;
  const Work work;
  const Sums<Policy> sums;
  const int columns, stages;
  volatile unsigned* const tickets;
  const unsigned all_tickets, counter;
  const int lookers;
};

// (The folds of exponentials need more registers than three blocks leave them.)
template <class Policy, class Work>
constexpr int kSharedBlocks = Policy::kOperands == 1 && Work::kOneColumn && !kByParts<Policy> ? 3 : 2;

template <class Policy, class Work>
__global__ void __launch_bounds__((kThreads + 32 * kTeam<Work> * kMostLookers<Policy, Work>),
                                  (kSharedBlocks<Policy, Work>)) scan_look_ahead(const __grid_constant__ Parameters p) {
  LookAhead<Policy, Work>(p).run();
}

// ---- Launches -------------------------------------------------------------------------------------------------------

// Shared memory of a kernel that has some tiles on their way and folds of some; sets where they are.
template <class Policy, class Work>
size_t layout_shared(Parameters& p, int stages, size_t staging, int slots, size_t columns) {
  p.staging_at = static_cast<unsigned>(stages * Work::kStageBytes);
  p.states_at = p.staging_at + static_cast<unsigned>(staging);
  return p.states_at + slots * (p.axis_warps + 1) * columns * sizeof(typename Policy::State);
}

template <class Policy, class Work>
cudaError_t launch_look_ahead(cudaStream_t stream, const Plan& plan, Parameters p, size_t columns) {
  unsigned tiles = 0;
  for (int level = 0; level < plan.levels; ++level) {
    p.level_at[level] = tiles;
    tiles += static_cast<unsigned>(((plan.tiles - 1) >> (kGroupBits * level)) + 1);
  }
  const int64_t words = tiles * p.columns * Sums<Policy>::kWords;
  const auto clearing = static_cast<unsigned>((words + 2047) / 2048);
  cudaError_t status = launch(stream, {dim3(clearing), dim3(256)}, clear_workspace, p.counters_at, p.words, words);
  if (status != cudaSuccess) return status;
  const size_t bytes = layout_shared<Policy, Work>(p, p.late + 2, 0, p.late + 2, columns) + kTickets * sizeof(unsigned);
  int device = 0, multiprocessors = 0;
  if ((status = cudaGetDevice(&device)) != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  // As many blocks as run at once: more would find nothing left.
  const int fitting = static_cast<int>((size_t{227} << 10) / (bytes + 1024));
  const unsigned blocks = multiprocessors * std::max(1, std::min(kSharedBlocks<Policy, Work>, fitting));
  unsigned grid = std::min(blocks, p.strips * static_cast<unsigned>(p.tiles));
  const unsigned staying = blocks / p.strips * p.strips;  // if as many stay with each strip
  const bool stay =
      !Work::kOneColumn && p.strips >= kManyStrips && p.strips <= kMostCounters && staying >= blocks / 4 * 3;
  p.counters = stay ? p.strips : 1;
  if (stay) grid = std::min(staying, grid);
  Launch shape{dim3(grid), dim3(kThreads + 32 * kTeam<Work> * (stay ? 1 : p.late + 1)), bytes};
  shape.overlap = plan.overlap;
  return launch(stream, shape, scan_look_ahead<Policy, Work>, p);
}

template <class Policy>
cudaError_t launch_columns(cudaStream_t stream, const Plan& plan, Parameters p) {
  using Work = Columns<Policy>;
  const size_t columns = (32 << p.column_bits) * Work::kWidth;
  if (plan.algorithm == Algorithm::kLookAhead) return launch_look_ahead<Policy, Work>(stream, plan, p, columns);
  const size_t bytes = layout_shared<Policy, Work>(p, p.stages, 0, plan.axis_warps == 1 ? 0 : 2, columns);
  return launch(stream, {dim3(p.strips), dim3(plan.threads()), bytes}, scan_columns<Policy>, p);
}

template <class Policy, Layout kLayout>
cudaError_t launch_layout(cudaStream_t stream, const Plan& plan, Parameters p) {
  using Work = Engine<Policy, kLayout>;
  const size_t columns = 32 >> p.run_bits << p.column_bits;
  if constexpr (kLayout == Layout::kAlong) {
    if (plan.tiles > 1) {
      if (plan.algorithm == Algorithm::kLookAhead) return launch_look_ahead<Policy, Chunks<Policy>>(stream, plan, p, 1);
      const size_t bytes = layout_shared<Policy, Chunks<Policy>>(p, 2, 0, 2, 1);
      return launch(stream, {dim3(p.strips), dim3(kThreads), bytes}, scan_walk<Policy>, p);
    }
  } else {
    if (plan.algorithm == Algorithm::kLookAhead) return launch_look_ahead<Policy, Work>(stream, plan, p, columns);
  }
  const size_t staging = kLayout == Layout::kAlong && !p.aligned ? Work::kStagingBytes : 0;
  const int slots = plan.tiles > 1 ? 2 : plan.axis_warps == 1 ? 0 : 1;
  Launch shape{dim3(p.strips), dim3(plan.threads()), layout_shared<Policy, Work>(p, 0, staging, slots, columns)};
  if constexpr (kLayout == Layout::kSingle) {
    if (plan.tiles > 1) return launch(stream, shape, scan_loop<Policy>, p);
  }
  return launch(stream, shape, scan_tile<Policy, kLayout>, p);
}

// Everything a kernel needs that does not depend on the policy.
Parameters parameters_of(const Plan& plan, const Problem& problem, const Buffers& buffers, void* workspace);

// As is_rare() of the plan.
template <class Policy>
constexpr bool kRare = is_rare(Policy::kKind, Policy::kProduct, Policy::kCut, Policy::Element::kDType);

template <class Policy>
cudaError_t launch_policy(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                          void* workspace) {
  const Parameters p = parameters_of(plan, problem, buffers, workspace);
  if constexpr (!kRare<Policy>) {
    if (plan.layout == Layout::kAlong) return launch_layout<Policy, Layout::kAlong>(stream, plan, p);
    if (plan.layout == Layout::kAcross) return launch_columns<Policy>(stream, plan, p);
  }
  return launch_layout<Policy, Layout::kSingle>(stream, plan, p);
}

}  // namespace jaxgpuops::scan
