// look_ahead for columns of 32 bits, sums of columns of 64 bits, and rows of three operands of 32 bits. Blocks share
// the axis, and each takes the next free tile from a counter. A tile goes through three steps: it is loaded into shared
// memory; its sum is folded and published; its results are written, once other warps of the block (the lookers) have
// folded all that comes before it. The steps of a block's tiles overlap. Operands are read once, results written once.
// That pays where there is little to compute and an array is larger than the L2 cache; twice.cuh has the other calls.
//
// If there are many strips, a block stays with one strip and takes its next tile. It remembers the fold up to its last
// tile, so it needs only the sums of later tiles. Otherwise a block takes the next tile of any strip.
//
// The i-th tile of a block is loaded in step i - 1, its sum is published in step i, and its results are written in step
// i + p.late. So there are p.late + 2 tiles in shared memory. There are p.late + 1 lookers, who take tiles in turn;
// where the block stays with a strip, there is one.
#pragma once

#include "scan/cuda/columns.cuh"
#include "scan/plan.h"
#include "scan/cuda/sums.cuh"

namespace jaxgpuops::scan {

constexpr int kTickets = 8;  // a ring of tickets: those of tiles i - p.late to i + 2
constexpr int kMostLookers = kMostLate + 1;

// How many warps a looker has, in a block in which `movers` threads work on tiles.
template <class Work>
constexpr int looker_warps(int movers) {
  return Work::kLookerWarps * (movers > kThreads ? movers / kThreads : 1);
}

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
        movers(32 * p.axis_warps << p.column_bits),
        team(32 * looker_warps<Work>(movers)),
        stages(p.late + 2),
        tickets(reinterpret_cast<volatile unsigned*>(work.totals(p.late + 2))),
        all_tickets(p.strips * static_cast<unsigned>(p.tiles)),
        counter(blockIdx.x % p.counters),
        lookers(p.counters > 1 ? 1 : p.late + 1) {}

  __device__ void run() const {
    // While another kernel clears the counters, prefetches the first tiles into the L2 cache, whichever blocks will
    // take them. (With only one tile for each block, that was slower.)
    if constexpr (Work::kNear) {
      if (gridDim.x < all_tickets && threadIdx.x < movers) {
        const Part first = part(blockIdx.x);
        work.let_come_near(first.strip, work.span(first.tile));
      }
    }
    wait_for_predecessor();
    if (threadIdx.x == 0) tickets[0] = next_ticket();
    __syncthreads();
    if (threadIdx.x < movers) {
      move();
    } else {
      look();
    }
  }

 private:
  // Named barriers: the movers tell a looker that a step has ended; the looker tells them that the carry of a tile is
  // ready.
  static constexpr int kAmongMovers = 1, kStepEnded = 2, kBaseThere = kStepEnded + kMostLookers;

  struct Part {
    unsigned strip;
    int tile;
  };
  __device__ Part part(unsigned ticket) const { return {ticket % p.strips, static_cast<int>(ticket / p.strips)}; }
  __device__ unsigned ticket_of(int i) const { return tickets[i % kTickets]; }
  __device__ unsigned next_ticket() const { return atomicAdd(p.counters_at + counter, 1u) * p.counters + counter; }

  __device__ void move() const {
    int looker = 0;                            // the looker that had tile i - p.late and gets tile i + 1
    int coming_stage = 0, stage = stages - 1;  // stages of tiles i + 1 and i
    typename Work::Place place;
    unsigned placed = ~0u;  // the strip of `place`, which seldom changes
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
        if constexpr (Work::kNear) {  // also prefetches the tile that the block may get in the next round
          const unsigned later = coming + gridDim.x;
          if (later < all_tickets) work.let_come_near(part(later).strip, work.span(part(later).tile));
        }
      }
      commit_async_copies();
      unsigned next = all_tickets;
      if (threadIdx.x == 0 && coming < all_tickets) next = next_ticket();

      if (i >= 0 && ticket_of(i) < all_tickets) {
        wait_for_async_copies<1>();
        const Part at = part(ticket_of(i));
        publish(stage, at, place_of(at.strip));
      }
      if (threadIdx.x == 0) tickets[(i + 2) % kTickets] = next;
      if (i < p.late) {
        wait_at_barrier(kAmongMovers, movers);
      } else {
        const unsigned ready = ticket_of(i - p.late);
        if (ready >= all_tickets) return;
        wait_at_barrier(kBaseThere + looker, movers + team);
        const Part at = part(ready);
        finish(coming_stage + 1 == stages ? 0 : coming_stage + 1, at, place_of(at.strip));
      }
      if (coming < all_tickets) work.put_extras(coming_stage, extra);
      pass_barrier(kStepEnded + looker, movers + team);
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
    wait_at_barrier(kAmongMovers, movers);
    const int member = static_cast<int>(threadIdx.x);
    const int64_t column = work.column_of(at.strip, member);
    if (column < p.columns) sums.template publish<Work::kOneColumn>(0, at.tile, column, work.tile_total(stage, member));
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
    const int looker = (static_cast<int>(threadIdx.x) - movers) / team;
    const int member = static_cast<int>(threadIdx.x) - movers - looker * team;
    Counter<Policy> known(p);
    int count = 0;  // how many tiles' sums `known` has
    for (int j = looker, stage = looker;; j += lookers) {
      const int turn = j % (p.late + 1);
      wait_at_barrier(kStepEnded + turn, movers + team);
      const unsigned ticket = ticket_of(j);
      if (ticket >= all_tickets) return;
      const Part at = part(ticket);
      State* const carry = work.carry(stage);
      if constexpr (Work::kOneColumn) {
        const State before = Before<Policy>(p, at.tile, at.strip).find();
        if (member == 0) carry[0] = with_initial(at.tile, at.strip, before);
      } else if (p.counters > 1) {
        const int64_t column = work.column_of(at.strip, member);
        if (column < p.columns) {
          sums.template each<false>(0, count, at.tile - count, column,  // (two words at a time were slower here)
                                    [&](int i, State sum) { known.add(count + i, sum); });
          count = at.tile;
          carry[member] = with_initial(at.tile, column, known.fold(at.tile));
        }
      } else {
        for (int c = member; c < columns; c += team) {
          const int64_t column = work.column_of(at.strip, c);
          if (column < p.columns) carry[c] = base_of(at.tile, column);
        }
      }
      pass_barrier(kBaseThere + turn, movers + team);
      stage = (stage + lookers) % stages;
    }
  }

  __device__ State with_initial(int tile, int64_t column, State before) const {
    const State initial = work.initial(column);
    return tile == 0 ? initial : Policy::combine(initial, before, p.options);
  }

  // Returns the fold of all that comes before a tile of a column. One thread computes it alone.
  __device__ State base_of(int tile, int64_t column) const {
    const auto fold = [&](int level, State state) {
      const int index = tile >> (kGroupBits * level);
      return sums.fold(level, index / kGroup * kGroup, index % kGroup, column, state);
    };
    if (tile % kGroup == kGroup - 1 && p.levels > 1) {
      State sum = sums.fold(0, tile, 1, column, work.identity());
      for (int level = 0; (tile >> (kGroupBits * level)) % kGroup == kGroup - 1 && level + 1 < p.levels; ++level) {
        sum = fold(level, sum);
        sums.template publish<false>(level + 1, tile >> (kGroupBits * (level + 1)), column, sum);
      }
    }
    State state = work.identity();
    for (int level = 0; tile >> (kGroupBits * level); ++level)
      state = Policy::combine(fold(level, work.identity()), state, p.options);
    return with_initial(tile, column, state);
  }

  const Parameters& p;
  const Work work;
  const Sums<Policy> sums;
  const int columns, movers, team, stages;
  volatile unsigned* const tickets;
  const unsigned all_tickets, counter;
  const int lookers;
};

// How many blocks share a multiprocessor. (A block of twice the width has one alone.)
constexpr int kSharedBlocks = 2;
template <class Work>
constexpr int look_ahead_threads(int movers, int lookers) {
  return movers + 32 * looker_warps<Work>(movers) * lookers;
}
template <class Work>
constexpr int kMostThreads = look_ahead_threads<Work>(Work::kThreadsAtMost, kMostLookers);

template <class Policy, class Work>
__global__ void __launch_bounds__(kMostThreads<Work>, Work::kLookBlocks)
    scan_look_ahead(const __grid_constant__ Parameters p) {
  LookAhead<Policy, Work>(p).run();
}

}  // namespace jaxgpuops::scan
