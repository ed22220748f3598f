// A tile of a long axis with inner = 1, for any policy. A lane has one run of 64 bytes (32 if there are many operands),
// so that lanes have few folds to exchange. Each warp copies its own part of a tile to shared memory, 16 bytes a lane,
// neighbouring lanes from neighbouring memory. Lanes read their runs from there, and results go back the same way. The
// vectors are placed so that neither access has bank conflicts.
#pragma once

#include "common/cuda/async_copy.cuh"
#include "scan/cuda/block.cuh"
#include "scan/cuda/odd_rows.cuh"
#include "scan/cuda/runs.h"

namespace jaxgpuops::scan {

// How rows that are not aligned are copied.
enum class OddRows {
  kNone,     // there are none
  kEach,     // element by element
  kTaken,    // by vectors, which lanes shift when they take their runs from shared memory (OddPart)
  kShifted,  // by vectors, which are shifted when they are in shared memory, for lanes that take their runs twice
};
// Three operands have too few registers for kShifted. Elements of 4 bytes are copied asynchronously one by one, which
// takes less than to shift them. Where the order of folding does not matter (kCutAtVectors), only arrays that are not
// aligned are copied so, as no buffer of XLA is.
template <class Policy>
constexpr OddRows kOddRows = kExact<Policy> || sizeof(typename Policy::Element::Bits) == 4 ||
                                     (Policy::kOperands > 2 && sizeof(typename Policy::Element::Bits) > 4)
                                 ? OddRows::kEach
                             : Policy::kOperands <= 2 ? OddRows::kShifted
                                                      : OddRows::kTaken;

// kPackwise: whether lanes go over a run pack by pack (runs.h).
template <class Policy, OddRows kOdd = kOddRows<Policy>, bool kPackwise = false>
class Chunks : public BetweenWarps<Policy> {
 public:
  using Element = typename Policy::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using State = typename Policy::State;
  using Base = BetweenWarps<Policy>;
  using Base::p;

  static constexpr int kInPack = 16 / sizeof(Bits);
  static constexpr int kPacks = run_shape(Layout::kAlong, Policy::kOperands, sizeof(Bits)).per_lane;
  static constexpr int kRun = kPacks * kInPack, kOfWarp = 32 * kRun, kTile = kWarps * kOfWarp;
  static constexpr int kWidth = 1, kTileExtras = 1, kLaneColumns = 1, kLaneStates = 2;
  static constexpr bool kOneColumn = true, kNear = false, kFewColumns = true;
  static constexpr int kThreadsAtMost = kThreads, kLookerWarps = 1, kLookBlocks = 1;
  using Extra = Bits;

  struct Tile {
    Pack operand[Policy::kOperands][kPacks];
    Bits extra[1];  // the neighbour of the run, outside it
    int stage;
  };

  struct Place {
    int64_t column;         // the outer index
    int64_t at, a, starts;  // offsets of the first element of the axis
    int lead = 0;           // kCutAtVectors: elements of the first tile that come before the row, in its direction
    static constexpr bool active = true;
  };

  struct Span {
    int64_t begin;  // position at which the tile begins
    // Index of the tile's first element in memory; negative if a reversed tile reaches beyond the array.
    int64_t memory;
    bool whole;
  };

  struct Folds {
    State before[1];  // the fold of the warp's positions before the run
    State warp[1];
  };

  static constexpr int kExtrasAt = Policy::kOperands * kTile * static_cast<int>(sizeof(Bits));
  static constexpr int kFoldsAt = kExtrasAt + (Policy::kNeighbour ? kThreads * static_cast<int>(sizeof(Bits)) : 0);
  static constexpr int kStageBytes = stage_bytes(Layout::kAlong, Policy::kOperands, sizeof(Bits), sizeof(State));
  static_assert(kFoldsAt + kThreads * sizeof(State) <= kStageBytes);

  // `thread` is one of the 256 that share a tile.
  __device__ explicit Chunks(const Parameters& p, unsigned thread_of_block = threadIdx.x) : Base(p, 1) {
    thread = thread_of_block % kThreads;
    lane = thread % 32;
    part = p.backward ? kWarps - 1 - thread / 32 : thread / 32;
  }

  __device__ int64_t column_of(unsigned strip, int member) const { return member == 0 ? strip : p.columns; }

  __device__ Place place(unsigned strip) const {
    Place place;
    place.column = strip;
    place.at = place.column * p.length;
    if (Policy::kBroadcast) place.a = p.outer_of_a(place.column);
    if (Policy::kStarts && p.starts) place.starts = p.starts_at.outer(place.column);
    if (kCutAtVectors<Policy> && p.at_vectors)
      place.lead = static_cast<int>(p.backward ? -(place.at + p.length) : place.at) & (kInPack - 1);
    return place;
  }

  __device__ Span span(int t) const {
    const int64_t begin = static_cast<int64_t>(t) * kTile;
    return {begin, p.backward ? p.length - begin - kTile : begin, begin + kTile <= p.length};
  }

  // Starts to load a tile into shared memory. The extra neighbour goes to a register, from which put_extras() stores
  // it.
  __device__ void fetch(int stage, const Place& place, const Span& nominal, Extra (&extra)[1]) const {
    const Span span = cut(place, nominal);
#pragma unroll
    for (int o = 0; o < Policy::kOperands; ++o) {
      if (is_one(o)) {
        Pack pack = {};
#pragma unroll
        for (int i = 0; i < kInPack; ++i) set<Bits>(pack, i, *axis(o, place));
#pragma unroll
        for (int u = 0; u < kPacks; ++u) memory_order(stage, o)[u * 32] = pack;
      } else {
        fetch_operand(stage, o, axis(o, place), span);
      }
    }
    if constexpr (Policy::kNeighbour) {
      const int64_t q = position(span) + (p.neighbour_before ? -1 : kRun);
      extra[0] = {};
      if (q < 0 || q == p.length)
        extra[0] = this->edge(place.column);
      else if (q < p.length)
        extra[0] = static_cast<const Bits*>(p.operands[Policy::kOperands - 1])[place.at + index(q)];
    }
  }

  // Prefetches a later tile into the L2 cache, on GPUs that can. Called by one thread.
  __device__ void let_come_near(const Place& place, const Span& nominal) const {
#if __CUDA_ARCH__ >= 900
    const Span span = cut(place, nominal);
    if (!span.whole) return;
#pragma unroll
    for (int o = 0; o < Policy::kOperands; ++o) {
      if (is_one(o)) continue;
      const auto* const from = axis(o, place) + span.memory;
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from) & ~size_t{15}),
                   "n"(kTile * static_cast<int>(sizeof(Bits)))
                   : "memory");
    }
#endif
  }

  __device__ void put_extras(int stage, const Extra (&extra)[1]) const {
    if constexpr (Policy::kNeighbour) in_stage<Bits>(stage, kExtrasAt)[0] = extra[0];
  }

  // Called by all lanes of a warp, after their copies have ended.
  __device__ void take(int stage, const Place& place, const Span& span, Tile& tile) const {
    if (kOdd == OddRows::kShifted && !p.aligned) {
      __syncwarp();
#pragma unroll 1
      for (int o = 0; o < Policy::kOperands; ++o)
        if (!is_one(o)) odd_part(stage, o, span).to_packs(axis(o, place) + first_of_part(span));
    }
    if constexpr (kOdd == OddRows::kTaken)
      if (!p.aligned) return take_vectors(stage, place, span, tile);
    take_again(stage, place, span, tile);
  }

  // The same for a tile that has been taken before.
  __device__ void take_again(int stage, const Place& place, const Span& span, Tile& tile) const {
    __syncwarp();
    tile.stage = stage;
    if constexpr (kCutAtVectors<Policy>) {
      if (span.begin == 0 && thread == 0) {
        auto* const pack = reinterpret_cast<Bits*>(run_order(stage, 0, 0));
#pragma unroll 1
        for (int i = 0; i < place.lead; ++i)
          pack[p.backward ? kInPack - 1 - i : i] = Element::store(Policy::neutral(p.options));
      }
    }
    if constexpr (Policy::kNeighbour) {
      const int64_t end = p.length - position(span);
      if (!p.neighbour_before && end > 0 && end < kRun) {
        const int i = static_cast<int>(end), e = i % kInPack;
        auto* const pack = reinterpret_cast<Bits*>(run_order(stage, Policy::kOperands - 1, i / kInPack));
        pack[p.backward ? kInPack - 1 - e : e] = this->edge(place.column);
      }
    }
    if constexpr (!kPackwise) {
#pragma unroll
      for (int o = 0; o < Policy::kOperands; ++o)
#pragma unroll
        for (int j = 0; j < kPacks; ++j) tile.operand[o][j] = *run_order(stage, o, j);
      if (p.backward) reverse_each<Bits>(tile.operand);
    }
    if constexpr (Policy::kNeighbour) tile.extra[0] = in_stage<Bits>(stage, kExtrasAt)[0];
  }

  // The same of vectors as they are in memory.
  __device__ void take_vectors(int stage, const Place& place, const Span& span, Tile& tile) const {
    __syncwarp();
    tile.stage = stage;
#pragma unroll
    for (int o = 0; o < Policy::kOperands; ++o)
      odd_part(stage, o, span).take(axis(o, place) + first_of_part(span), tile.operand[o]);
    if (p.backward) reverse_each<Bits>(tile.operand);
    if constexpr (Policy::kNeighbour) {
      const int64_t end = p.length - position(span);
      if (!p.neighbour_before && end > 0 && end < kRun)
        set_element(tile.operand[Policy::kOperands - 1], static_cast<int>(end), this->edge(place.column));
      tile.extra[0] = in_stage<Bits>(stage, kExtrasAt)[0];
    }
  }

  __device__ void put_folds(int stage, const Folds& folds) const {
    in_stage<State>(stage, kFoldsAt)[0] = folds.before[0];
  }
  __device__ void take_folds(int stage, Folds& folds) const { folds.before[0] = in_stage<State>(stage, kFoldsAt)[0]; }

  // A bit for each element of the run: whether there is a boundary.
  __device__ uint32_t starts(const Place& place, const Span& span) const {
    uint32_t bits = 0;
    if (!Policy::kStarts || !p.starts) return bits;
    const uint8_t* const from = p.starts + place.starts;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int64_t q = position(span) + i, at = index(q) + p.start_offset;
      if (q < p.length && at > 0 && at < p.length && from[at * p.starts_at.axis_stride]) bits |= 1u << i;
    }
    return bits;
  }

  // `kept` receives values that finish() would otherwise compute again.
  template <class... Kept>
  __device__ Folds fold(const Place& place, const Span& span, const Tile& tile, uint32_t starts, Kept&... kept) const {
    State inclusive;
    if constexpr (kPackwise) {
      inclusive = fold_packs<Policy, kPacks>(taker(tile.stage), starts, p.options);
    } else {
      inclusive = fold_run<Policy, kRun>([&](int i) { return input(tile, starts, i); }, p.options, kept...);
    }
#pragma unroll
    for (int bit = 0; bit < 5; ++bit) {
      const State left = shuffle_up(inclusive, 1 << bit);
      if (lane >= 1 << bit) inclusive = Policy::combine(left, inclusive, p.options);
    }
    Folds folds;
    folds.before[0] = shuffle_up(inclusive, 1);
    if (lane == 0) folds.before[0] = Policy::identity(p.options);
    folds.warp[0] = shuffle_from(inclusive, 31);
    return folds;
  }

  __device__ void publish_warp(int slot, const Folds& folds) const {
    if (lane == 0) this->totals(slot)[thread / 32] = folds.warp[0];
  }

  __device__ void earlier_warps(int slot, State (&base)[1]) const { base[0] = this->before_warp(slot, thread / 32, 0); }

  __device__ State carry_of_thread(int slot) const { return this->carry(slot)[0]; }

  // Sets a thread's `before`: the folds of the tile's earlier warps, and of the warp's positions before the run.
  __device__ void before_in_tile(int slot, const Folds& folds, State (&before)[2]) const {
    before[0] = Base::before_in_tile(slot, thread / 32, 0);
    before[1] = folds.before[0];
  }

  // `carry` is the fold of all that comes before the tile.
  __device__ void finish(const Place& place, const Span& span, Tile& tile, uint32_t starts, const State (&carry)[1],
                         const State (&before)[2]) const {
    Folds folds;
    folds.before[0] = before[1];
    const State base[1] = {Policy::combine(carry[0], before[0], p.options)};
    finish(place, span, tile, starts, folds, base);
  }

  // Writes the results of a tile. `base` is the fold of all that comes before the warp's part.
  template <class... Kept>
  __device__ void finish(const Place& place, const Span& span, Tile& tile, uint32_t starts, const Folds& folds,
                         const State (&base)[1], const Kept&... kept) const {
    State state = Policy::combine(base[0], folds.before[0], p.options);
    Pack results[Policy::kResults][kPacks];
    if constexpr (kPackwise) {
      step_packs<Policy, kPacks>(state, taker(tile.stage), starts, p.options, [&](int j, const Pack& result) {
        *run_order(tile.stage, 0, j) = p.backward ? reversed<Bits>(result) : result;
      });
      if (kOdd == OddRows::kShifted && !p.aligned)
#pragma unroll
        for (int j = 0; j < kPacks; ++j) results[0][j] = *run_order(tile.stage, 0, j);
    } else {
      step_over(tile, starts, state, results, kept...);
    }
#pragma unroll
    for (int r = 0; r < Policy::kResults; ++r) {
      if ((kOdd == OddRows::kShifted || kOdd == OddRows::kTaken) && !p.aligned) {
        const Bits* const first = static_cast<const Bits*>(p.results[r]) + place.at + first_of_part(span);
        odd_part(tile.stage, r, span).to_vectors(first, results[r]);
      } else if constexpr (!kPackwise) {
#pragma unroll
        for (int j = 0; j < kPacks; ++j) *run_order(tile.stage, r, j) = results[r][j];
      }
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < Policy::kResults; ++r)
      store_result(tile.stage, r, static_cast<Bits*>(p.results[r]) + place.at, cut(place, span));
    __syncwarp();  // after this, the next tile may overwrite the stage
  }

 private:
  // Where a tile is if the row's first tile begins with `place.lead` elements that are not in the row.
  __device__ Span cut(const Place& place, const Span& span) const {
    if constexpr (!kCutAtVectors<Policy>) return span;
    const int64_t begin = span.begin - place.lead;
    return {begin, p.backward ? p.length - begin - kTile : begin, begin >= 0 && begin + kTile <= p.length};
  }

  template <class... Kept>
  __device__ void step_over(const Tile& tile, uint32_t starts, State state, Pack (&results)[Policy::kResults][kPacks],
                            const Kept&... kept) const {
    const auto put = [&](int i, Out<Acc> out) {
      set<Bits>(results[0][i / kInPack], i % kInPack, Element::store(out.first));
      if constexpr (Policy::kResults == 2) set<Bits>(results[1][i / kInPack], i % kInPack, Element::store(out.second));
    };
    if constexpr (kByParts<Policy> && sizeof...(Kept) > 0) {
      step_run<Policy, kRun>(state, [&](int i) { return input_again(tile.stage, i); }, p.options, put, kept...);
    } else {
      step_run<Policy, kRun>(state, [&](int i) { return input(tile, starts, i); }, p.options, put, kept...);
    }
    if (p.backward) reverse_each<Bits>(results);
  }

  template <class T>
  __device__ T* in_stage(int stage, int at) const {
    return reinterpret_cast<T*>(dynamic_shared_memory() + stage * kStageBytes + at) + thread;
  }

  // The warp's part of an operand, in packs.
  __device__ Pack* of_warp(int stage, int operand) const {
    return reinterpret_cast<Pack*>(dynamic_shared_memory() + stage * kStageBytes) +
           (operand * kWarps + part) * (32 * kPacks);
  }
  // Pack j of the lane's run.
  __device__ Pack* run_order(int stage, int operand, int j) const {
    const int run = p.backward ? 31 - lane : lane;
    if (p.backward) j ^= kPacks - 1;
    return of_warp(stage, operand) + permuted<kPacks>(run * kPacks + j);
  }
  // Loads the j-th pack of the run, of each operand, in the direction of the scan.
  __device__ auto taker(int stage) const {
    return [this, stage](int j, Pack(&packs)[Policy::kOperands]) {
#pragma unroll
      for (int o = 0; o < Policy::kOperands; ++o) packs[o] = *run_order(stage, o, j);
      if (!p.backward) return;
#pragma unroll
      for (int o = 0; o < Policy::kOperands; ++o) packs[o] = reversed<Bits>(packs[o]);
    };
  }
  // Pack number `lane` of the warp's part in the order of memory; number u * 32 + lane is u * 32 packs after it.
  __device__ Pack* memory_order(int stage, int operand) const {
    const int j = lane & (kPacks - 1);
    return of_warp(stage, operand) + (lane - j) + (j ^ (lane / 8 & (kPacks - 1)));
  }
  // Element e of the warp's part, in the order of memory.
  __device__ Bits* element(int stage, int operand, int e) const {
    return reinterpret_cast<Bits*>(of_warp(stage, operand) + permuted<kPacks>(e / kInPack)) + e % kInPack;
  }

  // Element i * 32 + lane, of 4 bytes.
  __device__ Bits* element_of(int stage, int operand, int i) const {
    const int pack = lane / kInPack ^ (i & (kPacks - 1));
    return reinterpret_cast<Bits*>(of_warp(stage, operand) + i * (32 / kInPack)) + pack * kInPack + lane % kInPack;
  }

  __device__ int64_t position(const Span& span) const {  // position at which the run begins
    return span.begin + thread * kRun;
  }
  __device__ int64_t index(int64_t position) const { return p.backward ? p.length - 1 - position : position; }

  // Whether an operand has one element for the whole axis; and where the axis begins.
  __device__ bool is_one(int operand) const { return Policy::kBroadcast && operand == 1 && p.a_axis_stride == 0; }
  __device__ const Bits* axis(int operand, const Place& place) const {
    return static_cast<const Bits*>(p.operands[operand]) + (Policy::kBroadcast && operand == 1 ? place.a : place.at);
  }

  // Where the warp's part of the tile begins in memory.
  __device__ int64_t first_of_part(const Span& span) const { return span.memory + part * kOfWarp; }
  // Which elements of the warp's part are inside the array.
  struct Inside {
    int begin, end;
    __device__ bool has(int e) const { return e >= begin && e < end; }
  };
  __device__ Inside inside_part(const Span& span) const {
    const auto in_part = [](int64_t e) { return static_cast<int>(max(int64_t{0}, min(e, int64_t{kOfWarp}))); };
    const int64_t first = first_of_part(span);
    return {span.whole ? 0 : in_part(-first), span.whole ? kOfWarp : in_part(p.length - first)};
  }
  __device__ OddPart<kPacks, Bits> odd_part(int stage, int operand, const Span& span) const {
    const Inside inside = inside_part(span);
    return {of_warp(stage, operand), beyond(stage, operand), inside.begin, inside.end, p.backward};
  }
  // The vector beyond the warp's part. It has the place of the folds, which are not known yet, or have been taken.
  __device__ Pack* beyond(int stage, int operand) const {
    return reinterpret_cast<Pack*>(dynamic_shared_memory() + stage * kStageBytes + kFoldsAt +
                                   thread / 32 * 32 * static_cast<int>(sizeof(State))) +
           operand;
  }

  // Whether `count` elements of the tile, from `first` in the order of memory, are inside the array.
  __device__ bool inside(const Span& span, int e, int count) const {
    return span.whole || (span.memory + e >= 0 && span.memory + e + count <= p.length);
  }

  // How many elements of a pack that is not inside the array are, for the only row if it ends with a part of a pack.
  __device__ int part_inside(const Span& span, int e) const {
    const int64_t left = p.length - span.memory - e;
    return p.length % kInPack != 0 && left > 0 && left < kInPack ? static_cast<int>(left) : 0;
  }

  __device__ void fetch_operand(int stage, int operand, const Bits* axis, const Span& span) const {
    if (kCutAtVectors<Policy> && p.at_vectors && !span.whole) {
      odd_part(stage, operand, span).copy(axis + first_of_part(span));
    } else if (kOdd == OddRows::kNone || p.aligned) {
      Pack* const to = memory_order(stage, operand);
      const int first = part * kOfWarp + lane * kInPack;
      const Bits* const from = axis + span.memory + first;
      if (span.whole) {
#pragma unroll
        for (int u = 0; u < kPacks; ++u) copy_async(to + u * 32, from + u * 32 * kInPack);
      } else {
#pragma unroll 1
        for (int u = 0; u < kPacks; ++u) {
          const int e = u * 32 * kInPack, count = part_inside(span, first + e);
          const int there = count > 0 ? count : inside(span, first + e, kInPack) ? kInPack : 0;
          copy_async_part(to + u * 32, from + e, there * static_cast<int>(sizeof(Bits)));
        }
      }
    } else if constexpr (kOdd != OddRows::kEach) {
      odd_part(stage, operand, span).copy(axis + first_of_part(span));
    } else {
      if (sizeof(Bits) == 4 && span.whole) {
        const Bits* const from = axis + span.memory + part * kOfWarp + lane;
#pragma unroll
        for (int i = 0; i < kRun; ++i) copy_async<4>(element_of(stage, operand, i), from + i * 32);
        return;
      }
      const Inside inside = inside_part(span);
      const Bits* const from = axis + first_of_part(span);
#pragma unroll 4
      for (int i = 0; i < kRun; ++i) {
        const int e = i * 32 + lane;
        Bits* const to = element(stage, operand, e);
        if (inside.has(e)) {
          if constexpr (sizeof(Bits) < 4) {
            *to = from[e];
          } else {
            copy_async<sizeof(Bits)>(to, from + e);
          }
        } else {
          *to = Bits{};
        }
      }
    }
  }

  __device__ void store_result(int stage, int result, Bits* axis, const Span& span) const {
    if (kCutAtVectors<Policy> && p.at_vectors && !span.whole) {
      odd_part(stage, result, span).store(axis + first_of_part(span));
    } else if (kOdd == OddRows::kNone || p.aligned) {
      const Pack* const from = memory_order(stage, result);
      const int first = part * kOfWarp + lane * kInPack;
      Bits* const to = axis + span.memory + first;
      if (span.whole) {
#pragma unroll
        for (int u = 0; u < kPacks; ++u) *reinterpret_cast<Pack*>(to + u * 32 * kInPack) = from[u * 32];
      } else {
#pragma unroll 1
        for (int u = 0; u < kPacks; ++u) {
          const int e = first + u * 32 * kInPack;
          if (inside(span, e, kInPack)) {
            *reinterpret_cast<Pack*>(to + u * 32 * kInPack) = from[u * 32];
          } else {
#pragma unroll 1
            for (int i = part_inside(span, e) - 1; i >= 0; --i)
              to[u * 32 * kInPack + i] = reinterpret_cast<const Bits*>(from + u * 32)[i];
          }
        }
      }
    } else if constexpr (kOdd != OddRows::kEach) {
      odd_part(stage, result, span).store(axis + first_of_part(span));
    } else {
      if (sizeof(Bits) == 4 && span.whole) {
        Bits* const to = axis + span.memory + part * kOfWarp + lane;
        Bits values[kRun];
#pragma unroll
        for (int i = 0; i < kRun; ++i) values[i] = *element_of(stage, result, i);
#pragma unroll
        for (int i = 0; i < kRun; ++i) to[i * 32] = values[i];
        return;
      }
      const Inside inside = inside_part(span);
      Bits* const to = axis + first_of_part(span);
#pragma unroll 4
      for (int i = 0; i < kRun; ++i) {
        const int e = i * 32 + lane;
        if (inside.has(e)) to[e] = *element(stage, result, e);
      }
    }
  }

  // Element i of the run.
  __device__ In<Acc> input(const Tile& tile, uint32_t starts, int i) const {
    const auto bits = [&](int operand, int i) { return get<Bits>(tile.operand[operand][i / kInPack], i % kInPack); };
    In<Acc> in;
    in.x = Element::load(bits(0, i));
    if (Policy::kOperands > 1) in.a = Element::load(bits(1, i));
    if (Policy::kOperands > 2) in.y = Element::load(bits(2, i));
    in.start = Policy::kStarts && (starts >> i & 1);
    if constexpr (Policy::kNeighbour) {
      constexpr int kLast = Policy::kOperands - 1;
      const Bits before = i > 0 ? bits(kLast, i - 1) : tile.extra[0];
      const Bits after = i < kRun - 1 ? bits(kLast, i + 1) : tile.extra[0];
      in.neighbour = Element::load(p.neighbour_before ? before : after);
    }
    return in;
  }

  // Element i of the run, read again from shared memory, which holds it until results replace it. It is needed so
  // rarely that registers should not hold the run for it.
  __device__ In<Acc> input_again(int stage, int i) const {
    const auto* const pack = reinterpret_cast<const Bits*>(run_order(stage, 0, i / kInPack));
    In<Acc> in;
    in.x = Element::load(pack[p.backward ? kInPack - 1 - i % kInPack : i % kInPack]);
    in.start = false;
    return in;
  }

  int thread, lane;  // the thread's number among those of the tile, and its lane
  int part;          // number of the warp's part of the tile, in the order of memory
};

}  // namespace jaxgpuops::scan
