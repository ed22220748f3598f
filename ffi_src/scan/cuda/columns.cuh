// A tile of neighbouring columns, for any policy. A lane has a run of positions of one column (of two columns if
// elements have 16 bits), so lanes exchange nothing. Each warp loads its own positions into shared memory, line after
// line of its lanes' columns, 16 bytes at a time, or 4 bytes if rows are not aligned to 16. Results are written from
// registers, line by line.
#pragma once

#include "common/cuda/async_copy.cuh"
#include "scan/cuda/block.cuh"
#include "scan/cuda/runs.h"

namespace jaxgpuops::scan {

// kShared: blocks share the axis, and others wait for the tile's sum.
template <class Policy, bool kShared = false>
class Columns : public BetweenWarps<Policy> {
 public:
  using Element = typename Policy::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using State = typename Policy::State;
  using Base = BetweenWarps<Policy>;
  using Base::p;

  static constexpr RunShape kShape = run_shape(Layout::kAcross, Policy::kOperands, sizeof(Bits));
  static constexpr int kRun = kShape.run, kWidth = kShape.width, kLaneColumns = kWidth, kLaneStates = kWidth,
                       kTileExtras = 1;
  static constexpr int kThreadsAtMost = kWideThreads, kLoopBlocks = 1, kLookerWarps = kWidth, kLookBlocks = 1;
  static constexpr bool kOneColumn = false, kFoldsAll = false, kFewColumns = false;
  using Word = std::conditional_t<sizeof(Bits) == 8, uint64_t, uint32_t>;  // the lane's part of a line
  static constexpr int kLine = 32 * sizeof(Word), kInPack = 16 / sizeof(Bits), kPacks = kLine / 16;
  static constexpr int kStageBytes = stage_bytes(Layout::kAcross, Policy::kOperands, sizeof(Bits), sizeof(State));
  static constexpr int kTogether = kRun < 8 ? kRun : 8;  // positions that are in registers at a time

  // Policies with little to compute: loops over a run are unrolled, and the next tiles are prefetched into the L2
  // cache. (cumlogsumexp and elements of 16 bits were slower with that.)
  static constexpr bool kNear = kShared && Policy::kOperands == 1 && !kByParts<Policy> && sizeof(Bits) == 4;
  static constexpr int kLoops = kNear ? 4 : 1;

  struct Extra {};
  struct Tile {
    int stage;
  };

  struct Place {
    bool active, loads;    // the lane's columns, and those that it loads, are in the array
    int64_t column;        // outer * inner + the inner index
    int64_t at, starts;    // offsets of position 0 of the array
    int64_t from, from_a;  // offsets of the columns that the lane loads
  };

  struct Span {
    int64_t begin;
    int left;  // positions of the axis from the lane's first one on
  };

  struct Starts {
    uint32_t bits[kWidth];
  };

  struct Folds {
    State warp[kWidth];
  };

  __device__ explicit Columns(const Parameters& p)
      : Base(p, (32 << p.column_bits) * kWidth),
        bytes_of_stage(kStageBytes * max(1, (p.axis_warps << p.column_bits) / kWarps)) {
    const int warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    axis_warp = warp >> p.column_bits;
    column_warp = warp & ((1 << p.column_bits) - 1);
  }

  __device__ int64_t column_of(unsigned strip, int member) const {
    return member < this->columns ? int64_t{strip} * this->columns + member : p.columns;
  }

  __device__ Place place(unsigned strip) const {
    Place place = {};
    const int64_t first = ((int64_t{strip} << p.column_bits) + column_warp) * (32 * kWidth);
    place.column = first + lane * kWidth;
    place.active = place.column < p.columns;
    if (place.active) {
      const int64_t outer = outer_of(place.column), i = place.column - outer * p.inner;
      place.at = outer * p.length * p.inner + i;
      if (Policy::kStarts && p.starts) place.starts = p.starts_at.outer(outer) + (p.starts_inner_stride ? i : 0);
    }
    const int64_t loaded = p.by_words ? place.column : first + lane % kPacks * kInPack;
    place.loads = loaded < p.columns;
    if (place.loads) {
      const int64_t outer = outer_of(loaded), i = loaded - outer * p.inner;
      place.from = outer * p.length * p.inner + i;
      if (Policy::kBroadcast) place.from_a = p.outer_of_a(outer) + (p.a_inner_stride ? i : 0);
    }
    return place;
  }

  __device__ Span span(int t) const {
    const int64_t begin = static_cast<int64_t>(t) * p.tile;
    return {begin, static_cast<int>(min(p.length - begin, static_cast<int64_t>(INT32_MAX)))};
  }

  // Starts to load a tile into shared memory.
  __device__ void fetch(int stage, const Place& place, const Span& span, Extra (&)[1]) const {
    fetch_operand(stage, 0, place.from, p.inner, true, place, span);
    if constexpr (Policy::kBroadcast) {
      fetch_operand(stage, 1, place.from_a, p.a_axis_stride, p.a_inner_stride != 0, place, span);
    } else {
#pragma unroll
      for (int o = 1; o < Policy::kOperands; ++o) fetch_operand(stage, o, place.from, p.inner, true, place, span);
    }
    if constexpr (Policy::kNeighbour) {
      const int q = position() + (p.neighbour_before ? -1 : kRun);
      if (place.loads && span.begin + q >= 0 && q < span.left) {
        const auto* y =
            static_cast<const Bits*>(p.operands[Policy::kOperands - 1]) + place.from + index(span, q) * p.inner;
        Pack* const to = line(stage, Policy::kOperands - 1, q - position());
        if (p.by_words) {
          fetch_word(to, y, true);
        } else if (lane < kPacks) {
          fetch_pack(to + lane, y, true);
        }
      }
    }
  }
  // Prefetches a later tile of the first operand into the L2 cache; each thread takes one line of one position. (A bulk
  // prefetch took 90 clocks, and those of a warp come one after the other.)
  __device__ void let_come_near(unsigned strip, const Span& span) const {
#if __CUDA_ARCH__ >= 900
    constexpr int kInLine = 128 / sizeof(Bits);
    const int lines = this->columns / kInLine, q = static_cast<int>(threadIdx.x) / lines;
    if (!p.aligned || p.by_words || q >= min(p.tile, span.left)) return;
    const int64_t first = int64_t{strip} * this->columns + static_cast<int>(threadIdx.x) % lines * kInLine;
    if (first >= p.columns) return;
    const int64_t outer = outer_of(first);
    const Bits* const from =
        static_cast<const Bits*>(p.operands[0]) + first + (outer * (p.length - 1) + index(span, q)) * p.inner;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)) : "memory");
#endif
  }
  __device__ void put_extras(int, const Extra (&)[1]) const {}

  // Called by all lanes of a warp, after their copies have ended.
  __device__ void take(int stage, const Place& place, const Span& span, Tile& tile) const {
    __syncwarp();
    tile.stage = stage;
    if constexpr (Policy::kNeighbour) {
      const int end = p.neighbour_before ? -1 : span.left - position();
      if (p.neighbour_before ? span.begin + position() == 0 : end > 0 && end <= kRun) {
        auto* const to = reinterpret_cast<Bits*>(line(stage, Policy::kOperands - 1, end)) + lane * kWidth;
#pragma unroll
        for (int v = 0; v < kWidth; ++v) to[v] = this->edge(place.column + v);
      }
    }
  }

  __device__ void put_folds(int, const Folds&) const {}
  __device__ void take_folds(int, Folds&) const {}

  // A bit for each position of the run: whether there is a boundary.
  __device__ Starts starts(const Place& place, const Span& span) const {
    Starts starts = {};
    if (!Policy::kStarts || !p.starts || !place.active) return starts;
    const uint8_t* const from = p.starts + place.starts;
#pragma unroll 16
    for (int r = 0; r < kRun; ++r) {
      const int q = position() + r;
      const int64_t at = index(span, q) + p.start_offset;
      if (q >= span.left || at <= 0 || at >= p.length) continue;
#pragma unroll
      for (int v = 0; v < kWidth; ++v)
        if (from[at * p.starts_at.axis_stride + (p.starts_inner_stride ? v : 0)]) starts.bits[v] |= 1u << r;
    }
    return starts;
  }

  __device__ Folds fold(const Place& place, const Span& span, const Tile& tile, const Starts& starts) const {
    Folds folds;
#pragma unroll kLoops
    for (int r = 0; r < kRun; r += kTogether) {
      Words words[kTogether];
      read(tile, r, words);
#pragma unroll
      for (int v = 0; v < kWidth; ++v) {
        const auto at = [&](int j) { return input(words[j], starts.bits[v] >> r, j, v); };
        if (r == 0) {
          folds.warp[v] = fold_run<Policy, kTogether>(at, p.options);
        } else {
          fold_on<Policy, kTogether>(folds.warp[v], at, p.options);
        }
      }
    }
    return folds;
  }

  __device__ void publish_warp(int slot, const Folds& folds) const {
#pragma unroll
    for (int v = 0; v < kWidth; ++v) this->totals(slot)[axis_warp * this->columns + column() + v] = folds.warp[v];
  }

  // The lane's first column, counted in the block.
  __device__ int own_column() const { return (column_warp * 32 + lane) * kWidth; }

  // Sets a thread's `base`: the fold of all before the tile and of the tile's earlier warps.
  __device__ void earlier_warps(int slot, State (&base)[kWidth]) const {
#pragma unroll
    for (int v = 0; v < kWidth; ++v) base[v] = this->before_warp(slot, axis_warp, column() + v);
  }

  // Sets a thread's `before`: the fold of the tile's positions before the thread's.
  __device__ void before_in_tile(int slot, const Folds&, State (&before)[kWidth]) const {
#pragma unroll
    for (int v = 0; v < kWidth; ++v) before[v] = Base::before_in_tile(slot, axis_warp, column() + v);
  }

  __device__ void finish(const Place& place, const Span& span, const Tile& tile, const Starts& starts, const Folds&,
                         const State (&base)[kWidth]) const {
    finish(place, span, tile, starts, base);
  }

  // `carry` is the fold of all that comes before the tile.
  __device__ void finish(const Place& place, const Span& span, const Tile& tile, const Starts& starts,
                         const State (&carry)[kWidth], const State (&before)[kWidth]) const {
    State base[kWidth];
#pragma unroll
    for (int v = 0; v < kWidth; ++v) base[v] = Policy::combine(carry[v], before[v], p.options);
    finish(place, span, tile, starts, base);
  }

  // Writes the results of a tile. `base` is the fold of all that comes before the warp's part.
  __device__ void finish(const Place& place, const Span& span, const Tile& tile, const Starts& starts,
                         const State (&base)[kWidth]) const {
    State state[kWidth];
#pragma unroll
    for (int v = 0; v < kWidth; ++v) state[v] = base[v];
    const int rows = span.left - position();
    const int64_t step = p.backward ? -p.inner : p.inner;
    Bits* to[Policy::kResults];
#pragma unroll
    for (int o = 0; o < Policy::kResults; ++o)
      to[o] = static_cast<Bits*>(p.results[o]) + place.at + index(span, position()) * p.inner;
#pragma unroll kLoops
    for (int r = 0; r < kRun && r < rows; r += kTogether) {
      Words words[kTogether];
      read(tile, r, words);
      Word results[Policy::kResults][kTogether] = {};
#pragma unroll
      for (int v = 0; v < kWidth; ++v) {
        const auto at = [&](int j) { return input(words[j], starts.bits[v] >> r, j, v); };
        step_run<Policy, kTogether>(state[v], at, p.options, [&](int j, Out<Acc> out) {
          results[0][j] |= static_cast<Word>(Element::store(out.first)) << (8 * sizeof(Bits) * v);
          if constexpr (Policy::kResults == 2)
            results[1][j] |= static_cast<Word>(Element::store(out.second)) << (8 * sizeof(Bits) * v);
        });
      }
      if (!place.active) continue;
      const auto write = [&](auto one) {
#pragma unroll
        for (int j = 0; j < kTogether; ++j)
#pragma unroll
          for (int o = 0; o < Policy::kResults; ++o) {
            one(r + j, to[o], results[o][j]);
            to[o] += step;
          }
      };
      // Of one column of 4 bytes or more, a store needs no branch, and two forms of it took longer.
      if ((kNear || (kWidth > 1 && p.aligned)) && r + kTogether <= rows) {
        write([](int, Bits* to, Word word) { *reinterpret_cast<Word*>(to) = word; });
      } else {
        write([&](int q, Bits* to, Word word) {
          if (q < rows) store(to, word);
        });
      }
    }
    __syncwarp();  // after this, the next tile may overwrite the stage
  }

 private:
  __device__ int position() const { return axis_warp * kRun; }  // position in the tile at which the run begins
  __device__ int column() const { return own_column(); }
  __device__ int64_t index(const Span& span, int position) const {
    return p.backward ? p.length - 1 - span.begin - position : span.begin + position;
  }
  __device__ int64_t outer_of(int64_t column) const {
    if (p.columns >> 32) return column / p.inner;
    return static_cast<uint32_t>(column) / static_cast<uint32_t>(p.inner);
  }

  // Line r of the warp's part of an operand. The last operand has one line more, -1 or kRun: the neighbours outside the
  // run.
  static constexpr int kLines = Policy::kOperands * kRun + (Policy::kNeighbour ? 1 : 0);
  static_assert(kWarps * kLines * kLine <= kStageBytes);
  __device__ Pack* line(int stage, int operand, int r) const {
    unsigned char* const warps = dynamic_shared_memory() + stage * bytes_of_stage + threadIdx.x / 32 * (kLines * kLine);
    if (Policy::kNeighbour && operand == Policy::kOperands - 1 && p.neighbour_before) ++r;
    return reinterpret_cast<Pack*>(warps + (operand * kRun + r) * kLine);
  }
  __device__ Word word(int stage, int operand, int r) const {
    return reinterpret_cast<const Word*>(line(stage, operand, r))[lane];
  }

  __device__ void fetch_pack(Pack* to, const Bits* from, bool adjacent) const {
    if (adjacent && p.aligned) return copy_async(to, from);
    Pack pack;
#pragma unroll
    for (int v = 0; v < kInPack; ++v) set<Bits>(pack, v, from[adjacent ? v : 0]);
    *to = pack;
  }

  // Loads the lane's part of a line where rows are not aligned to 16 bytes.
  __device__ void fetch_word(Pack* line, const Bits* from, bool adjacent) const {
    Word* const to = reinterpret_cast<Word*>(line) + lane;
    if (adjacent && p.aligned) return copy_async<sizeof(Word)>(to, from);
    Word word = 0;
#pragma unroll
    for (int v = 0; v < kWidth; ++v) word |= static_cast<Word>(from[adjacent ? v : 0]) << (8 * sizeof(Bits) * v);
    *to = word;
  }

  __device__ void fetch_operand(int stage, int operand, int64_t at, int64_t stride, bool adjacent, const Place& place,
                                const Span& span) const {
    constexpr int kAtOnce = 32 / kPacks;  // lines that are loaded at once
    if (!place.loads) return;
    if (p.by_words) {
      const Bits* from = static_cast<const Bits*>(p.operands[operand]) + at + index(span, position()) * stride;
      const int64_t step = p.backward ? -stride : stride;
#pragma unroll 4
      for (int r = 0; r < kRun; ++r, from += step) {
        if (position() + r < span.left) {
          fetch_word(line(stage, operand, r), from, adjacent);
        } else {
          reinterpret_cast<Word*>(line(stage, operand, r))[lane] = 0;
        }
      }
      return;
    }
    const int first = position() + lane / kPacks;
    Pack* const to = line(stage, operand, 0) + lane;
    const Bits* from = static_cast<const Bits*>(p.operands[operand]) + at + index(span, first) * stride;
    const int64_t step = (p.backward ? -kAtOnce : kAtOnce) * stride;
    // Clears what is past the end, since the maximum of a run may include it, and an earlier tile may have left large
    // numbers there.
    if (adjacent && p.aligned) {
#pragma unroll
      for (int u = 0; u < kRun / kAtOnce; ++u, from += step)
        copy_async_or_clear(to + u * 32, from, first + u * kAtOnce < span.left);
    } else {
#pragma unroll 1
      for (int u = 0; u < kRun / kAtOnce; ++u, from += step)
        if (first + u * kAtOnce < span.left) {
          fetch_pack(to + u * 32, from, adjacent);
        } else {
          to[u * 32] = Pack{};
        }
    }
  }

  // Stores both 16-bit columns at once, if they are aligned.
  __device__ void store(Bits* to, Word word) const {
    if (kWidth == 1 || p.aligned) {
      *reinterpret_cast<Word*>(to) = word;
    } else {
#pragma unroll
      for (int v = 0; v < kWidth; ++v) to[v] = static_cast<Bits>(word >> (8 * sizeof(Bits) * v));
    }
  }

  // The operands of a position, for all columns of the lane.
  struct Words {
    Word operand[Policy::kOperands], neighbour;
  };

  // Reads the operands of several positions, from position r of the run on.
  __device__ void read(const Tile& tile, int r, Words (&words)[kTogether]) const {
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
#pragma unroll
      for (int o = 0; o < Policy::kOperands; ++o) words[j].operand[o] = word(tile.stage, o, r + j);
      if constexpr (Policy::kNeighbour)
        words[j].neighbour = word(tile.stage, Policy::kOperands - 1, r + j + (p.neighbour_before ? -1 : 1));
    }
  }

  // The operands of column v of the lane.
  __device__ In<Acc> input(const Words& words, uint32_t starts, int j, int v) const {
    const auto load = [&](Word word) { return Element::load(static_cast<Bits>(word >> (8 * sizeof(Bits) * v))); };
    In<Acc> in;
    in.x = load(words.operand[0]);
    if (Policy::kOperands > 1) in.a = load(words.operand[1]);
    if (Policy::kOperands > 2) in.y = load(words.operand[2]);
    if constexpr (Policy::kNeighbour) in.neighbour = load(words.neighbour);
    in.start = Policy::kStarts && (starts >> j & 1);
    return in;
  }

  const int bytes_of_stage;
  int lane, axis_warp, column_warp;
};

}  // namespace jaxgpuops::scan
