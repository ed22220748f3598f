// Blocks that share a row (inner = 1). A strip is a row, and a single warp finds the fold of all before a tile. Both
// algorithms fold in the same order: for each digit of the tile's number, the sums that come before it in its group.
//
//   resident    all tiles are on the GPU at the same time: each publishes its sum, and reads the sums before it
//   look_ahead  as in look_ahead.cuh, for one or two operands; some warps make sums, others results
#pragma once

#include <cooperative_groups.h>

#include <utility>

#include "scan/cuda/chunks.cuh"
#include "scan/plan.h"
#include "scan/cuda/sums.cuh"

namespace jaxgpuops::scan {

// One thread folds the sum of a tile from the sums of its warps, and stores for each warp the fold of the warps before
// it.
template <class Policy, class Work>
__device__ typename Policy::State row_total(const Work& work, const Parameters& p, int slot) {
  typename Policy::State warps[kWarps], fold = Policy::identity(p.options);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) warps[w] = work.totals(slot)[w];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    work.totals(slot)[w] = fold;
    fold = Policy::combine(fold, warps[w], p.options);
  }
  return fold;
}

// The fold of all before a warp, from the fold of earlier warps and that of earlier tiles.
template <class Policy, class Work>
__device__ void before_warp(const Work& work, const Parameters& p, int slot, typename Policy::State (&base)[1]) {
  base[0] = Policy::combine(work.carry(slot)[0], work.totals(slot)[threadIdx.x % kThreads / 32], p.options);
}

template <class Policy, class Work, class State>
__device__ State with_initial(const Work& work, const Parameters& p, unsigned row, int tile, State before) {
  const State initial = work.initial(row);
  return tile == 0 ? initial : Policy::combine(initial, before, p.options);
}

// resident: rows so few and so short that all tiles are on the GPU at the same time. A block has one or two tiles, with
// 256 threads each. Operands are read once, results written once, by one kernel: it clears the tags of the sums itself,
// and a barrier of the grid (a cooperative launch) comes before the first read of a tag. An additional warp, the first
// of a block, clears the tags and waits at that barrier while the tiles are being loaded.
constexpr int kMostTeams = 2;
constexpr int kResidentThreads = 32 + kMostTeams * kThreads;

// The fold of all before tile t of a row, by all threads of the tile: each warp folds some groups of sums as soon as
// they are published, and leaves the result in `groups`.
template <class Policy>
__device__ __forceinline__ typename Policy::State before_resident(const Parameters& p, const uint64_t* words, int t,
                                                                  int warp, int barrier,
                                                                  typename Policy::State* groups) {
  using State = typename Policy::State;
  const int lane = threadIdx.x % 32, group = t / kGroup, digit = t % kGroup;
  const State none = Policy::identity(p.options);
  for (int g = warp; g <= group; g += kWarps) {
    WordsOf<State> sum = bits_as<WordsOf<State>>(none);
    if (g < group || lane < digit)
      while (!Sums<Policy>::load(words + (g * kGroup + lane) * Sums<Policy>::kWords, sum)) {
      }
    __syncwarp();
    const State all =
        shuffle_from(scan_group<Policy>(p.options, bits_as<State>(sum)), g < group ? kGroup - 1 : max(digit - 1, 0));
    if (lane == 0) groups[g] = all;
  }
  wait_at_barrier(barrier, kThreads);
  State before = none;
  if (digit != 0) before = Policy::combine(groups[group], before, p.options);
  if (group != 0) {
    const State all = scan_group<Policy>(p.options, lane < group ? groups[lane] : none, group);
    before = Policy::combine(shuffle_from(all, group - 1), before, p.options);
  }
  return before;
}

template <class Policy, OddRows kOdd>
__global__ void __launch_bounds__(kResidentThreads, 2) scan_resident(const __grid_constant__ Parameters p) {
  using Work = Chunks<Policy, kOdd>;
  using State = typename Work::State;
  constexpr int kWords = Sums<Policy>::kWords;
  const auto grid = cooperative_groups::this_grid();
  const int teams = static_cast<int>(blockDim.x) / kThreads;
  const unsigned row = blockIdx.y;
  // `row_words`: words of one copy of a row's sums; the copies follow each other.
  const int row_words = p.tiles * kWords;
  uint64_t* const words = p.words + row * p.copies * row_words;
  if (threadIdx.x < 32) {
    const int team = static_cast<int>(threadIdx.x) / kMostCopies, copy = threadIdx.x % kMostCopies;
    const int t = static_cast<int>(blockIdx.x) * teams + team;
    if (team < teams && copy < p.copies && t < p.tiles)
      for (int w = 0; w < kWords; ++w) store_relaxed(words + copy * row_words + t * kWords + w, 0);
    grid.barrier_wait(grid.barrier_arrive());
    return;
  }
  const int thread = static_cast<int>(threadIdx.x) - 32, team = thread / kThreads;
  const Work work(p, thread);
  const int t = static_cast<int>(blockIdx.x) * teams + team;  // may lie beyond the row: then it is empty
  const auto place = work.place(row);
  const auto span = work.span(t);
  typename Work::Extra extra[1];
  work.fetch(team, place, span, extra);
  commit_async_copies();
  auto arrived = grid.barrier_arrive();
  work.put_extras(team, extra);
  wait_for_async_copies<0>();
  typename Work::Tile tile;
  work.take(team, place, span, tile);
  const auto starts = work.starts(place, span);
  Kept<Policy, Work::kRun> kept;
  const auto folds = work.fold(place, span, tile, starts, kept);
  const int warp = thread % kThreads / 32;
  work.publish_warp(team, folds);
  wait_at_barrier(1 + team, kThreads);
  State sum = work.identity(), earlier = sum;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) earlier = sum;
    sum = Policy::combine(sum, work.totals(team)[w], p.options);
  }
  if (const int copy = thread % kThreads; copy < p.copies && t < p.tiles)
    Sums<Policy>::set(words + copy * row_words + t * kWords, sum);
  grid.barrier_wait(std::move(arrived));
  if (t >= p.tiles) return;
  State* const groups = work.totals(teams) + team * kGroup;
  const uint64_t* const copy = words + (blockIdx.x & (p.copies - 1)) * row_words;
  const State before = before_resident<Policy>(p, copy, t, warp, 1 + team, groups);
  State base[1] = {Policy::combine(with_initial<Policy>(work, p, row, t, before), earlier, p.options)};
  work.finish(place, span, tile, starts, folds, base, kept);
}

// look_ahead along rows of one or two operands: a block has a ring of tiles in shared memory, and three kinds of warps.
// Eight warps fold a tile when it has been loaded, and publish its sum. Lookers take turns to fold what comes before a
// tile. Eight more warps then write the tile's results, and at once start to load another tile into its place. Sums are
// published as early as possible, since the speed of this algorithm is limited by the wait for all earlier sums, not by
// memory. Operands are read once, results written once.
//
// A ticket is taken only when there is room for its tile, so the sum of every tile that has a ticket will be published.
template <class Policy>
constexpr int kRowBlocks = row_blocks(Policy::kKind, Policy::kOp, Policy::kCut, Policy::Element::kDType);
template <class Policy>
constexpr int kLookers = Policy::kOperands == 2 ? 4 : 3;  // lookers of a block; not more than the ring has tiles
constexpr int kTicketRing = 16;  // tickets of the tiles in shared memory, and of some before them

template <class Policy, OddRows kOdd>
class RowLookAhead {
 public:
  using Work = Chunks<Policy, kOdd, kByPacks<Policy>>;
  using State = typename Policy::State;
  using Tile = typename Work::Tile;

  static constexpr int kControlBytes = 8 * kMostStages + 4 * kTicketRing;  // bytes of shared memory, besides tiles
  static_assert(kControlBytes % 16 == 0);

  __device__ explicit RowLookAhead(const Parameters& p)
      : p(p),
        work(p),
        sums{p},
        landed(reinterpret_cast<uint64_t*>(dynamic_shared_memory() + p.staging_at)),
        tickets(reinterpret_cast<volatile unsigned*>(landed + kMostStages)),
        all_tickets(p.strips * static_cast<unsigned>(p.tiles)),
        lookers((static_cast<int>(blockDim.x) - 2 * kThreads) / 32) {}

  __device__ void run() const {
    if (threadIdx.x < p.stages) make_landing(threadIdx.x);
    __syncthreads();
    if (threadIdx.x < kThreads) {
      if (threadIdx.x == 0)
        // Prefetches a tile for whichever block takes it, while another kernel clears the counter.
        let_come_near(blockIdx.x);
      wait_for_predecessor();
      finish();
    } else if (threadIdx.x < 2 * kThreads) {
      fold();
    } else {
      look();
    }
  }

 private:
  // Named barriers: one for the warps that fold, one for those that finish; for each stage one that says that the fold
  // before its tile is known, and one that says that the tile has landed (where no mbarrier can).
  static constexpr int kAmongFolders = 1, kAmongFinishers = 2, kReady = 3, kLanded = kReady + kMostStages;
  static_assert(kLanded + kMostStages <= 16);
  static constexpr int kOfStage = 2 * kThreads + 32;

  // Counts the tiles of a block, and keeps the stage of the current one.
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
  __device__ Part part(unsigned ticket) const {
    // With one strip, no division is needed, which would take long.
    if (p.strips == 1) return {0, static_cast<int>(ticket)};
    return {ticket % p.strips, static_cast<int>(ticket / p.strips)};
  }
  __device__ unsigned ticket_of(int i) const { return tickets[i % kTicketRing]; }
  __device__ unsigned next_ticket() const { return atomicAdd(p.counters_at, 1u); }

  // A tile has landed when the copies of all finishing threads have ended. These threads do not wait for it themselves.
  __device__ void make_landing(int stage) const {
#if __CUDA_ARCH__ >= 800
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(landing(stage)), "r"(kThreads + kWarps) : "memory");
#endif
  }
  __device__ void tell_landing(int stage) const {  // tells that this warp's copies and stores have landed
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(landing(stage)) : "memory");
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(landing(stage)) : "memory");
#else
    pass_barrier(kLanded + stage, kOfStage);
#endif
  }
  __device__ void wait_for_landing(const Turn& turn) const {
#if __CUDA_ARCH__ >= 800
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
  __device__ uint32_t landing(int stage) const { return shared_address(landed + stage); }

  __device__ void let_come_near(unsigned ticket) const {
    if (ticket >= all_tickets) return;
    const Part at = part(ticket);
    work.let_come_near(work.place(at.row), work.span(at.tile));
  }

  // Issues the copies of tile i, whose ticket the first finishing thread has taken.
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
    // Prefetch the tile of the next round into the L2 cache: so memory has work even while all blocks wait for one tile
    // that is late. (To prefetch three rounds was slower than none: results push them out of the cache.)
    if (threadIdx.x == 0 && i >= p.stages - 1) let_come_near(ticket + gridDim.x);
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
      work.take_again(turn.stage, place, span, tile);
      typename Work::Folds folds;
      work.take_folds(turn.stage, folds);
      State base[1];
      before_warp<Policy>(work, p, turn.stage, base);
      work.finish(place, span, tile, work.starts(place, span), folds, base);
      fetch(turn.tile + p.stages, turn.stage, next);
    }
  }

  // After the last tile, each looker waits for an empty one, which ends its loop.
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
      const State base = with_initial<Policy>(work, p, at.row, at.tile, before);
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

template <class Policy, OddRows kOdd>
__global__ void __launch_bounds__((2 * kThreads + 32 * kLookers<Policy>), kRowBlocks<Policy>)
    scan_row_look_ahead(const __grid_constant__ Parameters p) {
  RowLookAhead<Policy, kOdd>(p).run();
}

}  // namespace jaxgpuops::scan
