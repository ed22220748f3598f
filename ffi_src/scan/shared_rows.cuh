// Blocks that share a row (inner = 1): a strip is a row, and one warp can know what comes before a tile. What that is,
// is the same in both algorithms: for each digit of the tile's number, the fold of those that come before in its group.
//
//   resident    all tiles are on the GPU at a time: all publish their sums, wait for a barrier of the grid, and read
//               what they need
//   look_ahead  as in look_ahead.cuh, of one or two operands, with warps of their own for sums and for results
#pragma once

#include <cooperative_groups.h>

#include "scan/chunks.cuh"
#include "scan/plan.h"
#include "scan/sums.cuh"

namespace jaxgpuops::scan {

// The sum of a tile whose warps have published theirs.
template <class Policy>
__device__ typename Policy::State row_total(const Chunks<Policy>& work, const Parameters& p, int slot) {
  typename Policy::State warps[kWarps], fold = Policy::identity(p.options);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) warps[w] = work.totals(slot)[w];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) fold = Policy::combine(fold, warps[w]);
  return fold;
}

template <class Policy, class State>
__device__ State with_initial(const Chunks<Policy>& work, unsigned row, int tile, State before) {
  const State initial = work.initial(row);
  return tile == 0 ? initial : Policy::combine(initial, before);
}

// resident: rows so few and so short that all tiles are on the GPU at a time, each with 256 threads of a block of one
// or two tiles. Moves 2 n bytes, or those of all operands, and is one kernel: the barrier of the grid between the sums
// and who reads them is the driver's, so there is nothing to clear.
constexpr int kMostTeams = 2;

template <class Policy>
__global__ void __launch_bounds__(kMostTeams* kThreads, 2) scan_resident(const __grid_constant__ Parameters p) {
  using Work = Chunks<Policy>;
  using State = typename Work::State;
  using StateWords = Words<State>;
  const Work work(p);
  const int teams = static_cast<int>(blockDim.x) / kThreads, team = static_cast<int>(threadIdx.x) / kThreads;
  const int blocks = (p.tiles + teams - 1) / teams;  // of a row
  const unsigned row = blockIdx.x / blocks;
  const int t = static_cast<int>(blockIdx.x % blocks) * teams + team;  // may be beyond the row: then it is empty
  const auto place = work.place(row);
  const auto span = work.span(t);
  typename Work::Extra extra[1];
  work.fetch(team, place, span, extra);
  commit_copies();
  work.put_extras(team, extra);
  wait_for_copies<0>();
  typename Work::Tile tile;
  work.take(team, place, span, tile);
  const auto starts = work.starts(place, span);
  const auto folds = work.fold(place, span, tile, starts);
  work.publish_warp(team, folds);
  wait_at_barrier(1 + team, kThreads);
  StateWords* const sums = reinterpret_cast<StateWords*>(p.words) + int64_t{row} * p.tiles;
  if (threadIdx.x % kThreads == 0 && t < p.tiles) sums[t] = bits_as<StateWords>(row_total<Policy>(work, p, team));
  cooperative_groups::this_grid().sync();
  if (t >= p.tiles) return;

  const int warp = threadIdx.x % kThreads / 32, lane = threadIdx.x % 32, group = t / kGroup, digit = t % kGroup;
  State* const groups = work.totals(teams) + team * kGroup;  // the folds of those before, and of what is of its own
  for (int g = warp; g <= group; g += kWarps) {
    StateWords words = bits_as<StateWords>(work.identity());
    if (g < group || lane < digit) {
#pragma unroll
      for (int w = 0; w < static_cast<int>(sizeof(State) / 4); ++w)
        words.word[w] = __ldcg(&sums[g * kGroup + lane].word[w]);
    }
    const State all = scan_group<Policy>(bits_as<State>(words));
    const State sum = shuffle(all, g < group ? kGroup - 1 : max(digit - 1, 0));
    if (lane == 0) groups[g] = sum;
  }
  wait_at_barrier(1 + team, kThreads);
  if (warp == 0) {
    State before = work.identity();
    if (digit != 0) before = Policy::combine(groups[group], before);
    if (group != 0) {
      const State all = scan_group<Policy>(lane < group ? groups[lane] : work.identity());
      before = Policy::combine(shuffle(all, group - 1), before);
    }
    if (lane == 0) work.carry(team)[0] = with_initial<Policy>(work, row, t, before);
  }
  wait_at_barrier(1 + team, kThreads);
  State base[1];
  work.earlier_warps(team, base);
  work.finish(place, span, tile, starts, folds, base);
}

// look_ahead along rows of one or two operands: a block has a ring of tiles in shared memory, and three kinds of warps.
// Eight fetch tiles, fold them as they land, and publish their sums; lookers, in turns, find out what comes before a
// tile; eight more write the results of a tile, once that is known. So sums are published long before anybody waits for
// them, which hides how long it takes until all others' are there: that, not memory, is what bounds this algorithm.
// Moves 2 n bytes, or those of all operands.
template <class Policy>
constexpr int kRowBlocks = row_blocks(Policy::kOperands, Policy::kCut);
constexpr int kLookers = 3;
constexpr int kRing = 16;  // of tickets: those of the tiles in shared memory, and some before and after

// kDeep: rows of more than kFewLevels levels. (If all were, the others would spill registers.)
template <class Policy, bool kDeep>
class RowLookAhead {
 public:
  using Work = Chunks<Policy>;
  using State = typename Policy::State;
  using Tile = typename Work::Tile;

  static constexpr int kControlBytes = 4 * (kRing + 4);  // of shared memory, besides tiles

  __device__ explicit RowLookAhead(const Parameters& p)
      : p(p),
        work(p),
        sums{p},
        tickets(reinterpret_cast<volatile unsigned*>(shared_memory() + p.staging_at)),
        known(reinterpret_cast<volatile int*>(tickets + kRing)),
        all_tickets(p.strips * static_cast<unsigned>(p.tiles)) {}

  __device__ void run() const {
    wait_for_previous();
    if (threadIdx.x == 0) {
      tickets[0] = next_ticket();
      *known = 0;
    }
    __syncthreads();
    if (threadIdx.x < kThreads) {
      fold();
    } else if (threadIdx.x < 2 * kThreads) {
      finish();
    } else {
      look();
    }
  }

 private:
  // Barriers: of those that fold; for each stage, that its tile is folded and what comes before it known; and that it
  // is free again.
  static constexpr int kAmongFolders = 1, kReady = 2, kFree = kReady + kMostStages;
  static_assert(kFree + kMostStages <= 16);
  static constexpr int kOfReady = 2 * kThreads + 32, kOfFree = 2 * kThreads;

  struct Part {
    unsigned row;
    int tile;
  };
  __device__ Part part(unsigned ticket) const { return {ticket % p.strips, static_cast<int>(ticket / p.strips)}; }
  __device__ unsigned ticket_of(int i) const { return tickets[i % kRing]; }
  __device__ unsigned next_ticket() const { return atomicAdd(p.counters_at, 1u); }
  __device__ int next_stage(int stage) const { return stage + 1 == p.stages ? 0 : stage + 1; }

  // Tile i is folded while the next one or two land.
  __device__ void fold() const {
    const int ahead = min(3 - kRowBlocks<Policy>, p.stages - 1);
    int coming_stage = 0, stage = 0;
    for (int coming = 0;; ++coming) {
      const int i = coming - ahead;
      const unsigned ticket = ticket_of(coming);
      if (coming >= p.stages) wait_at_barrier(kFree + coming_stage, kOfFree);
      unsigned next = all_tickets;
      typename Work::Extra extra[1];
      if (ticket < all_tickets) {
        if (threadIdx.x == 0) next = next_ticket();
        const Part at = part(ticket);
        work.fetch(coming_stage, work.place(at.row), work.span(at.tile), extra);
      }
      commit_copies();
      if (ticket < all_tickets) work.put_extras(coming_stage, extra);
      coming_stage = next_stage(coming_stage);
      if (i < 0) {
        tell(coming + 1, next);
        wait_at_barrier(kAmongFolders, kThreads);
        continue;
      }
      if (ticket_of(i) >= all_tickets) {
        for (int j = 1; j <= kLookers; ++j) tell(i + j, all_tickets);
        if (threadIdx.x == 0) *known = INT32_MAX;
        pass_barrier(kReady + stage, kOfReady);
        return;
      }
      if (ahead == 2) {
        wait_for_copies<2>();
      } else {
        wait_for_copies<1>();
      }
      const Part at = part(ticket_of(i));
      const auto place = work.place(at.row);
      const auto span = work.span(at.tile);
      Tile tile;
      work.take(stage, place, span, tile);
      const auto folds = work.fold(place, span, tile, work.starts(place, span));
      work.put_folds(stage, folds);
      work.publish_warp(stage, folds);
      tell(coming + 1, next);
      wait_at_barrier(kAmongFolders, kThreads);
      if (threadIdx.x == 0) sums.publish(0, at.tile, at.row, row_total<Policy>(work, p, stage));
      pass_barrier(kReady + stage, kOfReady);
      stage = next_stage(stage);
    }
  }

  // The ticket of tile i. Whoever looks may begin with those before it: their stages are free.
  __device__ void tell(int i, unsigned ticket) const {
    if (threadIdx.x != 0) return;
    tickets[i % kRing] = ticket;
    __threadfence_block();
    *known = i;
  }

  __device__ void finish() const {
    for (int i = 0, stage = 0;; ++i, stage = next_stage(stage)) {
      wait_at_barrier(kReady + stage, kOfReady);
      const unsigned ticket = ticket_of(i);
      if (ticket >= all_tickets) return;
      const Part at = part(ticket);
      const auto place = work.place(at.row);
      const auto span = work.span(at.tile);
      Tile tile;
      work.take(stage, place, span, tile);
      typename Work::Folds folds;
      work.take_folds(stage, folds);
      State base[1];
      work.earlier_warps(stage, base);
      work.finish(place, span, tile, work.starts(place, span), folds, base);
      pass_barrier(kFree + stage, kOfFree);
    }
  }

  __device__ void look() const {
    for (int i = static_cast<int>(threadIdx.x) / 32 - 2 * kWarps;; i += kLookers) {
      while (*known <= i) pause();
      __threadfence_block();
      __syncwarp();
      const unsigned ticket = ticket_of(i);
      const int stage = i % p.stages;
      if (ticket < all_tickets) {
        const Part at = part(ticket);
        const State before = Before<Policy>(p, at.tile, at.row).template find<kDeep>();
        const State base = with_initial<Policy>(work, at.row, at.tile, before);
        if (threadIdx.x % 32 == 0) work.carry(stage)[0] = base;
        __syncwarp();
      } else if (i > 0 && ticket_of(i - 1) >= all_tickets) {
        return;
      }
      pass_barrier(kReady + stage, kOfReady);
      if (ticket >= all_tickets) return;
    }
  }

  __device__ static void pause() {
#if defined(__CUDA_ARCH__)
    __nanosleep(20);
#endif
  }

  const Parameters& p;
  const Work work;
  const Sums<Policy> sums;
  volatile unsigned* const tickets;
  volatile int* const known;  // tiles whose tickets are there, and stages
  const unsigned all_tickets;
};

template <class Policy, bool kDeep>
__global__ void __launch_bounds__((2 * kThreads + 32 * kLookers), kRowBlocks<Policy>)
    scan_row_look_ahead(const __grid_constant__ Parameters p) {
  RowLookAhead<Policy, kDeep>(p).run();
}

}  // namespace jaxgpuops::scan
