// Long rows (inner == 1) of the row engine, in one persistent kernel: a cluster of blocks takes one row after the
// other, and each of its warps has the same spans of every row. A block has a ring of stages in shared memory, each for
// one span. The copy engine fills them, so that later spans are loaded while a row is worked on. A warp that is done
// with a stage fetches the span that comes into it next, even if another warp will use it.
//
// Statistics are merged in the order of rows_kernel, where each lane of a warp first merges a chain: every 32nd span. A
// block has all spans of some chains. The last of its warps to finish a row merges these chains and sends them to all
// blocks of the cluster, each of which waits for all 32 chains. (Before, each warp merged all spans, which was a tenth
// of the time.) A warp publishes statistics of a row only after it has read those of the row before, and a block sends
// statistics of the next row only after it has received all of this row. So two places for statistics, used in turn,
// are enough, and no other barrier is needed. (A barrier of the cluster would also wait until results are written.)
//
// Multiprocessors are not equally fast, since neighbours share a path to memory. So a counter in the workspace gives
// the next row to whichever cluster asks first, and neighbouring rows are read at about the same time. (A fixed share
// for each cluster took up to 5 % longer.) The number of a later row is sent along with statistics, so no thread waits
// for the counter.
//
// Spans and the order in which they are merged are those of rows_kernel, and so are all bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/cuda/bulk_copy.cuh"
#include "common/cuda/residents.cuh"
#include "row_engine/cuda/in_registers.cuh"

namespace jaxgpuops::row_engine {

template <class P>
struct StreamParameters {
  Parameters<P> of;
  int part;  // the most spans of a row that a block has
  int stages;
  unsigned* counter;  // counts the rows taken; null: each of n clusters has every n-th row
  int64_t apart;      // clocks from the start of one cluster to that of the next
};

constexpr int kStreamSlots = 2;  // rows whose statistics can be in flight
constexpr int kStreamAhead = 4;  // spans are loaded for at most so many rows after the row that is being written
// Together with the statistics of a row, a cluster gets the number of the row that it works on kStreamKnown rows later.
constexpr int kStreamKnown = kStreamAhead + 2;
constexpr int kStreamRows = 16;  // a ring of row numbers, from the row before the present one to kStreamKnown later
constexpr int kStreamClockBytes = 4096;  // clocks between the starts of clusters: the bytes of a row divided by this
constexpr int kStreamUnroll = 4;         // vectors that a lane works on at once; more would make the code long

// The layout of shared memory: statistics of the block's spans [kStreamSlots][part] and of all chains
// [kStreamSlots][kStreamChains]; row numbers [kStreamRows]; counts of the spans that are done [kStreamSlots]; barriers
// of the statistics [kStreamSlots] and of the stages; the stages.
template <class P, int kVectors, bool kAligned>
struct StreamLayout {
  // A span that is not aligned covers only a part of its first and last windows of 16 bytes.
  static constexpr int kOperandBytes = kVectors * 32 * 16 + (kAligned ? 0 : 16);
  static constexpr int kStageBytes = P::kOperands * kOperandBytes;

  __host__ __device__ static int rows_at(int part) {
    return (kStreamSlots * (part + kStreamChains) * static_cast<int>(sizeof(Stat<P>)) + 15) / 16 * 16;
  }
  __host__ __device__ static int barriers_at(int part) { return rows_at(part) + 4 * (kStreamRows + kStreamSlots); }
  __host__ __device__ static int stages_at(int part, int stages) {
    return (barriers_at(part) + 8 * (kStreamSlots + stages) + 127) / 128 * 128;
  }
};

// Warps per multiprocessor for __launch_bounds__: the warps of two blocks, or of three small blocks if there are two
// operands. More warps would leave a lane only 64 registers, and it would spill. (Gradients then took up to a quarter
// longer.)
template <class P>
constexpr int kStreamResident =
    P::kOperands == 2 && (P::kOutput || sizeof(typename P::Element::Bits) == 2) ? 24 : 2 * kStreamWarps;

// Returns the statistics of a span, which begins `shift` bytes after the start of its stage. kWhole: all elements of
// the span belong to the statistics, except for the hole. Elements that do not belong are replaced by `padding`, which
// adds nothing.
template <class P, int kVectors, bool kAligned, bool kWhole>
__device__ __forceinline__ Stat<P> measure_span(const Parameters<P>& p, unsigned char* stage, int shift, int wanted,
                                                int hole, const Pack (&padding)[P::kOperands]) {
  using Bits = typename P::Element::Bits;
  using Acc = typename P::Element::Acc;
  using Layout = StreamLayout<P, kVectors, kAligned>;
  using Unit = Held<P, 1, true>;
  using Units = Held<P, kStreamUnroll, true>;
  static_assert(kVectors % kStreamUnroll == 0);
  constexpr int kWidth = Unit::kWidth;
  [[maybe_unused]] constexpr int kPlain = P::kPlainSum ? P::kSums - 1 : P::kSums;  // sums from this one on are plain
  const int lane = threadIdx.x % 32;
  const auto load = [&](int j, auto& units, int u) {
    const int e = (j * 32 + lane) * kWidth;
#pragma unroll
    for (int o = 0; o < P::kOperands; ++o) {
      const auto* from = reinterpret_cast<const Pack*>(stage + o * Layout::kOperandBytes) + j * 32 + lane;
      Pack pack = from[0];
      if constexpr (!kAligned) pack = between<sizeof(Bits), 15>(pack, from[1], shift);
      if (!kWhole && e + kWidth > wanted) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          if (e + i >= wanted) set<Bits>(pack, i, get<Bits>(padding[o], i));
      }
      units.raw[o][u] = pack;
    }
  };
  Stat<P> stat;
#pragma unroll
  for (int k = 0; k < P::kSums; ++k) stat.sum(k) = Acc(0);
  if constexpr (P::kPlainSum) {
    if (P::add_plain(p.args)) {
#pragma unroll 1
      for (int j = 0; j < kVectors; ++j) {
        Unit unit;
        load(j, unit, 0);
        Acc of_unit = Acc(0);
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          if ((j * 32 + lane) * kWidth + i < wanted) of_unit += unit.x(p.args, 0, i);
        stat.sum(kPlain) += of_unit;
      }
      stat.sum(kPlain) = merged_sum(stat.sum(kPlain), 0, 5);
    }
  }
  if constexpr (P::kHole) {
    if (hole >= 0) {
      __syncwarp();
      if (lane < P::kOperands)
        reinterpret_cast<Bits*>(stage + lane * Layout::kOperandBytes + shift)[hole] = P::pad(p.args, lane);
      order_with_copies();
      __syncwarp();
    }
  }
  Acc peak = Acc(0);
  if constexpr (P::kPeak) {
    peak = P::lowest();
#pragma unroll 1
    for (int j = 0; j < kVectors; j += kStreamUnroll) {
      Units units;
#pragma unroll
      for (int u = 0; u < kStreamUnroll; ++u) load(j + u, units, u);
      peak = P::larger(peak, units.peak(p.args));
    }
    peak = peak_of_warp<P>(peak);
    stat.of[0] = peak;
  }
  if constexpr (P::kSums > 0) {
    const auto guarded = P::guard(peak);
    P::with_args(p.args, [&](const auto& args) {
#pragma unroll kStreamUnroll
      for (int j = 0; j < kVectors; ++j) {
        Unit unit;
        load(j, unit, 0);
#pragma unroll
        for (int k = 0; k < kPlain; ++k) {
          const Acc of_unit = unit.sum(args, k, guarded, 0, kWidth);
          stat.sum(k) = j == 0 ? of_unit : stat.sum(k) + of_unit;
        }
      }
    });
#pragma unroll
    for (int k = 0; k < kPlain; ++k) stat.sum(k) = merged_sum(stat.sum(k), 0, 5);
  }
  return stat;
}

// Writes the results of a span, which begins `tail` elements after the start of its stage and has `left` elements.
template <class P, int kVectors, bool kAligned>
__device__ __forceinline__ void write_span(const Parameters<P>& p, const unsigned char* stage, int64_t at, int tail,
                                           int left, int hole, const typename P::Row& row,
                                           const typename P::Final& final) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using Layout = StreamLayout<P, kVectors, kAligned>;
  using Unit = Held<P, 1, true>;
  constexpr int kWidth = Unit::kWidth;
  const int lane = threadIdx.x % 32;
  Bits* const to = static_cast<Bits*>(p.out) + at;
  const int windows = (left + tail + kWidth - 1) / kWidth;
  // The results of a skipped row are 0. Its words are cleared, which is easier than clearing its elements.
  typename P::Row counted = row;
  uint32_t kept = ~0u;
  if constexpr (P::kHole) {
    kept = P::skip(row) ? 0u : ~0u;
    counted = P::counted(row);
  }
  const auto write_window = [&](const auto& args, int w) {
    Unit unit;
#pragma unroll
    for (int o = 0; o < P::kOperands; ++o)
      unit.raw[o][0] = reinterpret_cast<const Pack*>(stage + o * Layout::kOperandBytes)[w];
    const int e = w * kWidth - tail;
    Acc values[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = P::output(args, counted, final, unit.x(args, 0, i), unit.y(0, i));
    Pack pack = packed<Element>(values);
    if constexpr (P::kHole) {
#pragma unroll
      for (auto& word : pack.word) word &= kept;
    }
    if (kAligned ? e < left : e >= 0 && e + kWidth <= left) {
      // Stores without advice to the caches, as load_pack() loads, except where results may replace what was read.
      if constexpr (P::kHole) {
        store_once(reinterpret_cast<Pack*>(to + e), pack);
      } else {
        store_whole(reinterpret_cast<Pack*>(to + e), pack);
      }
    } else if (!kAligned) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (e + i >= 0 && e + i < left) to[e + i] = get<Bits>(pack, i);
    }
  };
  P::with_args(p.args, [&](const auto& args) {
#pragma unroll kStreamUnroll
    for (int j = 0; j < kVectors; ++j) write_window(args, j * 32 + lane);
    if constexpr (!kAligned)
      if (windows > kVectors * 32 && lane == 0) write_window(args, kVectors * 32);
  });
  if constexpr (P::kHole) {  // this overwrites the hole, which the same lane has written
    if (hole >= 0 && (hole + tail) / kWidth % 32 == lane) to[hole] = Element::store(P::hole_output(p.args, row, final));
  }
}

// Which spans of every row a block has, and what depends on where a row begins in memory.
template <class P, int kVectors, bool kAligned>
struct StreamPart {
  using Bits = typename P::Element::Bits;
  static constexpr int kItem = sizeof(Bits), kSpan = kVectors * 32 * (16 / kItem);

  const Parameters<P>& p;
  const int block = blockIdx.x % static_cast<unsigned>(p.blocks);
  // How many chains and spans of a row this block has. The number of blocks is a power of two.
  const int chains = kStreamChains / p.blocks, chain_bits = bits_of(chains);
  const int count =
      (p.spans / kStreamChains << chain_bits) + ((p.spans % kStreamChains + p.blocks - 1 - block) >> (5 - chain_bits));

  __device__ static __forceinline__ int bits_of(int power) { return __ffs(power) - 1; }
  __device__ __forceinline__ int chain_at(int c) const { return c * p.blocks + block; }
  __device__ __forceinline__ int64_t begin(int span) const {
    return int64_t{(span >> chain_bits) * kStreamChains + chain_at(span & (chains - 1))} * kSpan;
  }
  __device__ __forceinline__ int size(int span) const {
    return static_cast<int>(min(p.length - begin(span), int64_t{kSpan}));
  }
  // Bytes of the span's first window that lie before the span.
  __device__ __forceinline__ int shift_of(int64_t at) const {
    return kAligned ? 0
                    : static_cast<int>(reinterpret_cast<uintptr_t>(static_cast<const Bits*>(p.operands[0]) + at) & 15);
  }
  __device__ __forceinline__ int hole_of(const typename P::Row& row, int span) const {
    if constexpr (P::kHole) {
      const int64_t hole = P::hole(row) - begin(span);
      if (hole >= 0 && hole < size(span)) return static_cast<int>(hole);
    }
    return -1;
  }
};

// How the warps of a cluster exchange statistics, and which rows they take.
template <class P, int kVectors, bool kAligned>
struct StreamExchange {
  using Layout = StreamLayout<P, kVectors, kAligned>;

  const StreamParameters<P>& s;
  const StreamPart<P, kVectors, kAligned>& part;
  const Parameters<P>& p = s.of;
  const int lane = threadIdx.x % 32;
  Stat<P>* const of_spans = reinterpret_cast<Stat<P>*>(dynamic_shared_memory());
  Stat<P>* const of_chains = of_spans + kStreamSlots * s.part;
  unsigned* const numbers = reinterpret_cast<unsigned*>(dynamic_shared_memory() + Layout::rows_at(s.part));
  unsigned* const done = numbers + kStreamRows;
  uint64_t* const there = reinterpret_cast<uint64_t*>(dynamic_shared_memory() + Layout::barriers_at(s.part));
  const int all_chains = min(p.spans, kStreamChains);
  const int receivers = min(p.blocks, all_chains);  // how many blocks have spans of a row
  const uint32_t bytes = all_chains * static_cast<int>(sizeof(Stat<P>)) + sizeof(unsigned);
  // With the statistics of a row, the first block of a cluster sends the others the number of the row that is
  // kStreamKnown rows later. It took that number from the counter one row before.
  const bool leads = part.block == 0 && threadIdx.x < 32;
  unsigned later = 0;

  __device__ __forceinline__ int cluster() const { return blockIdx.x / static_cast<unsigned>(p.blocks); }
  __device__ __forceinline__ int clusters() const { return gridDim.x / static_cast<unsigned>(p.blocks); }
  // The outer index of the cluster's i-th row; past the end if there are no more rows.
  __device__ __forceinline__ int64_t outer_of(int i) const { return static_cast<int64_t>(numbers[i % kStreamRows]); }
  __device__ __forceinline__ bool exists(int i) const { return outer_of(i) < p.columns; }

  __device__ __forceinline__ void clear() const {
    if (threadIdx.x < kStreamKnown)
      numbers[threadIdx.x] = static_cast<unsigned>(min(p.columns, cluster() + int64_t{clusters()} * threadIdx.x));
    if (threadIdx.x < kStreamSlots) {
      make_copy_barrier(there + threadIdx.x);
      done[threadIdx.x] = 0;
    }
  }
  __device__ __forceinline__ void ask_for(int i) {
    if (!leads || lane != 0) return;
    const int64_t first = int64_t{clusters()} * i;
    if (s.counter) {
      later = clusters() * kStreamKnown + atomicAdd(s.counter, 1u);
    } else {
      later = static_cast<unsigned>(min(p.columns, first + cluster()));
    }
  }
  // Stores the statistics of a span of the i-th row. The last warp of the block to do so merges the block's chains, and
  // sends them to all blocks.
  __device__ __forceinline__ void give(int i, int span, const Stat<P>& stat) {
    const int slot = i % kStreamSlots;
    Stat<P>* const mine = of_spans + slot * s.part;
    if (leads && span == 0) {
      unsigned* const number = numbers + (i + kStreamKnown) % kStreamRows;
      const unsigned told = shuffle_from(later, 0);
      if (p.blocks == 1) {
        if (lane == 0) *number = told;
      } else if (lane < receivers) {
        copy_to_block(number, there + slot, lane, told);
      }
      ask_for(i + 1 + kStreamKnown);
    }
    bool last = false;
    if (lane == 0) {
      mine[span] = stat;
      last = count_in_turn(done + slot, part.count) == part.count - 1;
    }
    if (!__any_sync(kEveryLane, last)) return;
    __syncwarp();
    // A lane sends one chain of this block to one block.
    const int chain = lane & (part.chains - 1), rank = lane >> part.chain_bits;
    Stat<P> all = merge_serially<P>([&](int u) { return mine[u]; }, chain, part.chains, part.count);
    Stat<P>* const to = of_chains + slot * kStreamChains;
    if (p.blocks > 1) {
      if (rank < receivers && part.chain_at(chain) < all_chains)
        copy_to_block(to + part.chain_at(chain), there + slot, rank, all);
    } else {
      all = merge_lanes<P>(all);
      if (lane == 0) {
        *to = all;
        arrive_at(there + slot);
      }
    }
  }
  // Waits for the statistics of all spans of the i-th row.
  __device__ __forceinline__ void wait(int i) const { wait_for_copies(there + i % kStreamSlots, i / kStreamSlots & 1); }
  __device__ __forceinline__ Stat<P> all_of(int i) const {
    const Stat<P>* const parts = of_chains + i % kStreamSlots * kStreamChains;
    return p.blocks == 1 ? *parts : merge_lanes<P>(lane < all_chains ? parts[lane] : Stat<P>::none());
  }
};

// The stages of a block, and which span goes into which.
template <class P, int kVectors, bool kAligned>
struct StreamRing {
  using Bits = typename P::Element::Bits;
  using Layout = StreamLayout<P, kVectors, kAligned>;
  static constexpr int kItem = sizeof(Bits);

  const StreamParameters<P>& s;
  const StreamPart<P, kVectors, kAligned>& part;
  const StreamExchange<P, kVectors, kAligned>& exchange;
  const Parameters<P>& p = s.of;
  uint64_t* const filled = exchange.there + kStreamSlots;
  unsigned char* const ring = dynamic_shared_memory() + Layout::stages_at(s.part, s.stages);
  const int stages = min(part.count * kStreamAhead, s.stages);

  // How often a row fills the ring, and how many whole rows the ring holds; the remainders are kept, too. (Computed
  // while the first spans are being loaded.)
  int row_turns, rows_ahead;
  __device__ __forceinline__ void plan() {
    row_turns = part.count / max(stages, 1);
    rows_ahead = stages / max(part.count, 1);
  }

  // The stage of a span, and how often the ring was filled before. It is computed from the place before, because a
  // division takes longer than a merge.
  struct Place {
    int stage, turn;
  };
  __device__ __forceinline__ Place beyond(Place place, int spans) const {  // `spans` is at most the number of stages
    place.stage += spans;
    if (place.stage >= stages) {
      place.stage -= stages;
      ++place.turn;
    }
    return place;
  }
  __device__ __forceinline__ Place a_row_later(Place place) const {
    return beyond({place.stage, place.turn + row_turns}, part.count - row_turns * stages);
  }
  __device__ __forceinline__ unsigned char* at(Place place) const { return ring + place.stage * Layout::kStageBytes; }

  __device__ __forceinline__ void fetch(int i, int span, int stage) const {
    if (threadIdx.x % 32 != 0 || !exchange.exists(i)) return;
    const int64_t at = exchange.outer_of(i) * p.length + part.begin(span);
    const int shift = part.shift_of(at), end = part.size(span) * kItem + shift;
    const bool last = !kAligned && at + part.size(span) == p.columns * p.length;
    // Copies whole windows, but nothing beyond the end of the array.
    const int bytes = last ? end & ~15 : (end + 15) & ~15;
    unsigned char* const to = ring + stage * Layout::kStageBytes;
    const auto windows = [&](int o) {
      return reinterpret_cast<const unsigned char*>(static_cast<const Bits*>(p.operands[o]) + at) - shift;
    };
    if (last) {
#pragma unroll
      for (int o = 0; o < P::kOperands; ++o)
#pragma unroll 1
        for (int b = max(bytes, shift); b < end; b += kItem)
          *reinterpret_cast<Bits*>(to + o * Layout::kOperandBytes + b) = *reinterpret_cast<const Bits*>(windows(o) + b);
    }
    expect_copies(filled + stage, P::kOperands * bytes);
    if (bytes == 0) return;
#pragma unroll
    for (int o = 0; o < P::kOperands; ++o) copy_bulk(to + o * Layout::kOperandBytes, windows(o), bytes, filled + stage);
  }
  // Fetches the span that follows a span of the i-th row in its stage.
  __device__ __forceinline__ void refill(int i, int span, int stage) const {
    const int later = span + stages - rows_ahead * part.count, over = later >= part.count ? 1 : 0;
    fetch(i + rows_ahead + over, later - over * part.count, stage);
  }
};

template <class P, int kVectors, bool kAligned>
__global__ void __launch_bounds__(32 * kStreamResident<P>)
    stream_kernel(const __grid_constant__ StreamParameters<P> s) {
  using Bits = typename P::Element::Bits;
  using Part = StreamPart<P, kVectors, kAligned>;
  using Ring = StreamRing<P, kVectors, kAligned>;
  using Place = typename Ring::Place;
  static_assert(!P::kMasked && !P::kDecoded);
  const Parameters<P>& p = s.of;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const Part part{p};
  StreamExchange<P, kVectors, kAligned> exchange{s, part};
  Ring ring{s, part, exchange};
  const int count = part.count;

  exchange.clear();
  if (threadIdx.x < s.stages) make_copy_barrier(ring.filled + threadIdx.x);
  make_barriers_visible();
  __syncthreads();
  arrive_at_cluster_start();  // from now on other blocks may send statistics
  if (s.apart > 0) {
    const int64_t start = clock64();
    while (clock64() - start < exchange.cluster() * s.apart) {
    }
  }
  if (count > 0) {
#pragma unroll 1
    for (int n = warp; n < ring.stages; n += warps) ring.fetch(n / count, n % count, n);
  }

  Pack padding[P::kOperands];
#pragma unroll
  for (int o = 0; o < P::kOperands; ++o)
#pragma unroll
    for (int i = 0; i < 16 / Part::kItem; ++i) set<Bits>(padding[o], i, P::pad(p.args, o));

  // Statistics of a span of the i-th row of this block.
  const auto measure = [&](int i, typename P::Row& row, int span, Place place) {
    const int wanted = P::skip(row) ? 0 : part.size(span), hole = part.hole_of(row, span);
    const int64_t at = exchange.outer_of(i) * p.length + part.begin(span);
    unsigned char* const stage = ring.at(place);
    wait_for_copies(ring.filled + place.stage, place.turn & 1);
    const Stat<P> stat =
        wanted == Part::kSpan
            ? measure_span<P, kVectors, kAligned, true>(p, stage, part.shift_of(at), wanted, hole, padding)
            : measure_span<P, kVectors, kAligned, false>(p, stage, part.shift_of(at), wanted, hole, padding);
    // Waits for all loads of row(), since other blocks may overwrite what they read once they go on.
    if constexpr (P::kHole) row = shuffle_from(row, 0);
    if (p.out == nullptr) {
      __syncwarp();
      ring.refill(i, span, place.stage);
    }
    return stat;
  };

  wait_at_cluster_barrier();
  if (warp >= count) return;
  ring.plan();
  // While statistics of a row are in flight, a warp computes those of its first span of the next row, if the ring has
  // room for that span.
  const bool fetched_early = count + warp < ring.stages;
  bool early = false;
  Stat<P> stat;
  exchange.ask_for(kStreamKnown);
  // The loads of row() are issued early, too: `begun` two rows ahead, and the loads that depend on it one row ahead.
  typename P::Row row = P::row(p.args, exchange.outer_of(0), 0, p.length, 1);
  typename P::Row measured = row, following = row, begun = row;
  const auto look_ahead = [&](int i) {
    if constexpr (P::kHole) {
      if (exchange.exists(i)) following = P::completed(p.args, begun, exchange.outer_of(i), 0, p.length, 1);
      if (exchange.exists(i + 1)) begun = P::begun(p.args, exchange.outer_of(i + 1), 0, p.length, 1);
    } else {
      if (exchange.exists(i)) following = P::row(p.args, exchange.outer_of(i), 0, p.length, 1);
    }
  };
  if constexpr (P::kHole) {
    if (exchange.exists(1)) begun = P::begun(p.args, exchange.outer_of(1), 0, p.length, 1);
  }
  Place of_row = ring.beyond({0, 0}, warp);  // place of the warp's first span of a row
  for (int i = 0; exchange.exists(i); ++i, row = measured) {
    const int64_t outer = exchange.outer_of(i);
    const bool more = exchange.exists(i + 1);
    if (p.blocks > 1 && threadIdx.x == 0) expect_copies(exchange.there + i % kStreamSlots, exchange.bytes);
    const Place of_next = ring.a_row_later(of_row);
    Place place = of_row;
    for (int span = warp;; span += warps, place = ring.beyond(place, warps)) {
      if (!early) {
        const bool next = span >= count;
        if (next) look_ahead(i + 1);
        early = next && more && fetched_early;
        if (next && more) measured = following;
        if (next && !early) break;
        stat = measure(next ? i + 1 : i, measured, next ? warp : span, next ? of_next : place);
        if (next) break;
      }
      early = false;
      exchange.give(i, span, stat);
    }
    place = of_row;
    of_row = of_next;
    exchange.wait(i);
    if (p.out == nullptr && (part.block != i % exchange.receivers || warp != 0)) continue;
    const auto final = P::finish(p.args, row, exchange.all_of(i));
    if ((p.out == nullptr || part.block == 0) && threadIdx.x == 0) P::write_row(p.args, outer, row, final);
    if (p.out == nullptr) continue;
    for (int span = warp; span < count; span += warps, place = ring.beyond(place, warps)) {
      const int64_t at = outer * p.length + part.begin(span);
      write_span<P, kVectors, kAligned>(p, ring.at(place), at, part.shift_of(at) / Part::kItem, part.size(span),
                                        part.hole_of(row, span), row, final);
      __syncwarp();
      ring.refill(i, span, place.stage);
    }
  }
}

// Clears the counter for the stream_kernel that follows.
template <class Counter>
__global__ void clear_kernel(Counter* counter) {
  *counter = 0;
}

template <class P, int kVectors, bool kAligned>
cudaError_t launch_stream(cudaStream_t stream, const RowPlan& plan, StreamParameters<P> s) {
  using Layout = StreamLayout<P, kVectors, kAligned>;
  const auto kernel = stream_kernel<P, kVectors, kAligned>;
  Launch launched;
  launched.block = dim3(plan.threads());
  launched.shared_bytes = Layout::stages_at(plan.part, plan.stages) + plan.stages * Layout::kStageBytes;
  launched.cluster = static_cast<int>(plan.blocks);
  launched.packed = true;
  cudaError_t status = allow_cluster(reinterpret_cast<const void*>(kernel), launched.cluster);
  if (status != cudaSuccess) return status;
  static Residents of_kernel;
  int resident = 0;
  status = of_kernel.count(reinterpret_cast<const void*>(kernel), launched, &resident);
  if (status != cudaSuccess) return status;
  const int64_t clusters = std::min<int64_t>(s.of.columns, resident);
  launched.grid = dim3(static_cast<unsigned>(clusters * plan.blocks));
  // Clusters that start together would all read at the same time, then all exchange statistics, then all write, in
  // every round. So if some clusters take a second row, they start one after the other. The delay between two starts is
  // less than the time in which memory delivers a row (an H200 delivers about 2500 bytes in a clock), so memory is
  // never idle. (With few rows, this took up to 20 % less time.)
  if (s.of.out && s.of.columns > clusters)
    s.apart = s.of.length * P::kOperands * static_cast<int>(sizeof(typename P::Element::Bits)) / kStreamClockBytes;
  if (s.of.columns <= clusters * kStreamKnown) s.counter = nullptr;
  if (s.counter) {
    status = launch(stream, Launch{dim3(1), dim3(1)}, clear_kernel<unsigned>, s.counter);
    if (status != cudaSuccess) return status;
  }
  return launch(stream, launched, kernel, s);
}

template <class P>
cudaError_t run_stream(cudaStream_t stream, const RowPlan& plan, const Parameters<P>& p) {
  if constexpr (P::kFast && !P::kMasked && !P::kDecoded) {
    auto* const counter = reinterpret_cast<unsigned*>(plan.workspace_bytes ? p.workspace : nullptr);
    const StreamParameters<P> s{p, plan.part, plan.stages, counter, 0};
    constexpr int kVectors = P::kLarge ? 8 : kOnlyVectors;
    if (plan.vectors != kVectors) return cudaErrorInvalidValue;
    if constexpr (P::kAlignedRows)
      if (p.aligned) return launch_stream<P, kVectors, true>(stream, plan, s);
    return launch_stream<P, kVectors, false>(stream, plan, s);
  } else {
    return cudaErrorInvalidValue;
  }
}

}  // namespace jaxgpuops::row_engine
