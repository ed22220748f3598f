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

// The sum of a tile whose warps have published theirs, by a thread, which leaves each warp the fold of those before it.
template <class Policy>
__device__ typename Policy::State row_total(const Chunks<Policy>& work, const Parameters& p, int slot) {
  typename Policy::State warps[kWarps], fold = Policy::identity(p.options);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) warps[w] = work.totals(slot)[w];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    work.totals(slot)[w] = fold;
    fold = Policy::combine(fold, warps[w]);
  }
  return fold;
}

// What comes before a warp, from that and what comes before the tile.
template <class Policy>
__device__ void before_warp(const Chunks<Policy>& work, int slot, typename Policy::State (&base)[1]) {
  base[0] = Policy::combine(work.carry(slot)[0], work.totals(slot)[threadIdx.x % kThreads / 32]);
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
  before_warp<Policy>(work, team, base);
  work.finish(place, span, tile, starts, folds, base);
}

// look_ahead along rows of one or two operands: a block has a ring of tiles in shared memory, and three kinds of warps.
// Eight fold a tile when it has landed, and publish its sum; lookers, in turns, find out what comes before a tile;
// eight more write its results, once that is known, and at once let another tile come in its place. None waits for more
// than it needs: sums are published as early as memory allows, since what bounds this algorithm is not memory but how
// long it takes until all earlier sums are there. Moves 2 n bytes, or those of all operands.
//
// A ticket is taken when there is room for the tile: a sum that others wait for is always on its way.
template <class Policy>
constexpr int kRowBlocks = row_blocks(Policy::kOperands, Policy::kCut);
constexpr int kLookers = 3;      // or as many as there are tiles in the ring; four were slower
constexpr int kTicketRing = 16;  // those of the tiles in shared memory, and some before

template <class Policy>
class RowLookAhead {
 public:
  using Work = Chunks<Policy>;
  using State = typename Policy::State;
  using Tile = typename Work::Tile;

  static constexpr int kControlBytes = 8 * kMostStages + 4 * kTicketRing;  // of shared memory, besides tiles
  static_assert(kControlBytes % 16 == 0);

  __device__ explicit RowLookAhead(const Parameters& p)
      : p(p),
        work(p),
        sums{p},
        landed(reinterpret_cast<uint64_t*>(shared_memory() + p.staging_at)),
        tickets(reinterpret_cast<volatile unsigned*>(landed + kMostStages)),
        all_tickets(p.strips * static_cast<unsigned>(p.tiles)),
        lookers((static_cast<int>(blockDim.x) - 2 * kThreads) / 32) {}

  __device__ void run() const {
    if (threadIdx.x < p.stages) make_landing(threadIdx.x);
    __syncthreads();
    if (threadIdx.x < kThreads) {
      wait_for_previous();
      finish();
    } else if (threadIdx.x < 2 * kThreads) {
      fold();
    } else {
      look();
    }
  }

 private:
  // Barriers: of those that fold, and that finish; for each stage, that what comes before its tile is known; and that
  // it has landed, where the device cannot tell so by itself.
  static constexpr int kAmongFolders = 1, kAmongFinishers = 2, kReady = 3, kLanded = kReady + kMostStages;
  static_assert(kLanded + kMostStages <= 16);
  static constexpr int kOfStage = 2 * kThreads + 32;

  // Whether the tiles of the next round come to the level 2 cache meanwhile. Memory is kept busy then where all wait
  // for one tile that is late. (Three rounds were slower than none: results push them out of the cache. So was one of
  // two operands.)
  static constexpr bool kNear = Policy::kOperands == 1;

  // Counts tiles, and where they are.
  struct Turn {
    int tile, stage;
    unsigned phase;
    __device__ void skip(int count, int stages) {
      tile += count;
      stage += count;
      if (stage >= stages) {
        stage -= stages;
        phase ^= 1;
      }
    }
  };

  struct Part {
    unsigned row;
    int tile;
  };
  __device__ Part part(unsigned ticket) const { return {ticket % p.strips, static_cast<int>(ticket / p.strips)}; }
  __device__ unsigned ticket_of(int i) const { return tickets[i % kTicketRing]; }
  __device__ unsigned next_ticket() const { return atomicAdd(p.counters_at, 1u); }

  // A tile has landed when the copies of all threads that finish have ended; they do not wait for that.
  __device__ void make_landing(int stage) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(landing(stage)), "r"(kThreads + kWarps) : "memory");
#endif
  }
  __device__ void tell_landing(int stage) const {  // of what this warp has copied, and stored
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(landing(stage)) : "memory");
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(landing(stage)) : "memory");
#else
    pass_barrier(kLanded + stage, kOfStage);
#endif
  }
  __device__ void wait_for_landing(const Turn& turn) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t done;
    do {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
#if __CUDA_ARCH__ >= 900
          "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
#else
          "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#endif
          "selp.u32 %0, 1, 0, p;\n"
          "}"
          : "=r"(done)
          : "r"(landing(turn.stage)), "r"(turn.phase)
          : "memory");
    } while (!done);
#else
    wait_at_barrier(kLanded + turn.stage, kOfStage);
#endif
  }
#if defined(__CUDA_ARCH__)
  __device__ uint32_t landing(int stage) const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(landed + stage));
  }
#endif

  // Lets tile i come, of which the first of those that finish has taken the ticket.
  __device__ void fetch(int i, int stage, unsigned ticket) const {
    if (threadIdx.x == 0) tickets[i % kTicketRing] = ticket;
    wait_at_barrier(kAmongFinishers, kThreads);
    ticket = ticket_of(i);
    if (ticket < all_tickets) {
      const Part at = part(ticket);
      typename Work::Extra extra[1];
      work.fetch(stage, work.place(at.row), work.span(at.tile), extra);
      work.put_extras(stage, extra);
    }
    tell_landing(stage);
    if constexpr (kNear) {
      const unsigned later = ticket + gridDim.x;
      if (threadIdx.x == 0 && i >= p.stages - 1 && later < all_tickets) {
        const Part at = part(later);
        work.let_come_near(work.place(at.row), work.span(at.tile));
      }
    }
  }

  __device__ void finish() const {
    for (int i = 0; i < p.stages; ++i) fetch(i, i, threadIdx.x == 0 ? next_ticket() : 0);
    for (Turn turn = {};; turn.skip(1, p.stages)) {
      const unsigned ticket = ticket_of(turn.tile);
      if (ticket >= all_tickets) return;
      wait_at_barrier(kReady + turn.stage, kOfStage);
      const unsigned next = threadIdx.x == 0 ? next_ticket() : 0;
      const Part at = part(ticket);
      const auto place = work.place(at.row);
      const auto span = work.span(at.tile);
      Tile tile;
      work.take(turn.stage, place, span, tile);
      typename Work::Folds folds;
      work.take_folds(turn.stage, folds);
      State base[1];
      before_warp<Policy>(work, turn.stage, base);
      work.finish(place, span, tile, work.starts(place, span), folds, base);
      fetch(turn.tile + p.stages, turn.stage, next);
    }
  }

  // After the last tile each looker waits for an empty one.
  __device__ void fold() const {
    int empty = 0;
    for (Turn turn = {}; empty < lookers; turn.skip(1, p.stages)) {
      wait_for_landing(turn);
      const unsigned ticket = ticket_of(turn.tile);
      if (ticket >= all_tickets) {
        ++empty;
        continue;
      }
      const Part at = part(ticket);
      const auto place = work.place(at.row);
      const auto span = work.span(at.tile);
      Tile tile;
      work.take(turn.stage, place, span, tile);
      const auto folds = work.fold(place, span, tile, work.starts(place, span));
      work.put_folds(turn.stage, folds);
      work.publish_warp(turn.stage, folds);
      wait_at_barrier(kAmongFolders, kThreads);
      if (threadIdx.x == kThreads) sums.publish(0, at.tile, at.row, row_total<Policy>(work, p, turn.stage));
      pass_barrier(kReady + turn.stage, kOfStage);
    }
  }

  __device__ void look() const {
    Turn turn = {};
    for (turn.skip(static_cast<int>(threadIdx.x) / 32 - 2 * kWarps, p.stages);; turn.skip(lookers, p.stages)) {
      wait_for_landing(turn);
      const unsigned ticket = ticket_of(turn.tile);
      if (ticket >= all_tickets) return;
      const Part at = part(ticket);
      const State before = Before<Policy>(p, at.tile, at.row).find();
      const State base = with_initial<Policy>(work, at.row, at.tile, before);
      if (threadIdx.x % 32 == 0) work.carry(turn.stage)[0] = base;
      __syncwarp();
      pass_barrier(kReady + turn.stage, kOfStage);
    }
  }

  const Parameters& p;
  const Work work;
  const Sums<Policy> sums;
  uint64_t* const landed;
  volatile unsigned* const tickets;
  const unsigned all_tickets;
  const int lookers;
};

template <class Policy>
__global__ void __launch_bounds__((2 * kThreads + 32 * kLookers), kRowBlocks<Policy>)
    scan_row_look_ahead(const __grid_constant__ Parameters p) {
  RowLookAhead<Policy>(p).run();
}

}  // namespace jaxgpuops::scan
