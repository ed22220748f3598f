// A span of memory: some positions of all columns beside each other, for any policy, element and number of columns. A
// lane has one run of positions of one column, so that lanes have few folds to exchange.
//
// A span is contiguous, so it is copied to shared memory as it is, 16 bytes at a time, by any thread; results go back
// the same way. Operands that are not contiguous or not aligned are loaded by the lanes that need them, and such
// results stored by the lanes that have them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/cuda/async_copy.cuh"
#include "scan/cuda/block.cuh"
#include "scan/cuda/runs.h"

namespace jaxgpuops::scan {

// kShort: a lane has all positions of a short axis.
template <class Policy, bool kShort = false>
class Spans : public BetweenWarps<Policy> {
 public:
  using Element = typename Policy::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using State = typename Policy::State;
  using Base = BetweenWarps<Policy>;
  using Base::identity, Base::p, Base::totals;

  static constexpr bool kFoldsAll = true;
  static constexpr bool kOneColumn = false, kFewColumns = true;  // a block may have few columns
  static constexpr int kWidth = 2, kLaneColumns = 1, kLaneStates = 1, kThreadsAtMost = kThreads, kLoopBlocks = 3;
  static constexpr int kInPack = 16 / sizeof(Bits), kInLine = kLineBytes / sizeof(Bits);
  // Positions that are in registers at a time: only two for rare policies of wide elements, to keep the code small, and
  // for gradients of float64, for want of registers.
  static constexpr int kTogether = (kRare<Policy> || Policy::kOperands > 2) && sizeof(Bits) >= 8 ? 2
                                   : kByParts<Policy> && sizeof(Bits) >= 8                       ? 4
                                   : Policy::kOperands * sizeof(Bits) <= 8                       ? 8
                                                                                                 : 4;

  // Whether they are taken together, for which two are too few: a part of logsumexps has two exponentials of its own.
  static constexpr bool kParts = kTogether > 2 && (kByParts<Policy> || kCutParts<Policy>);

  // Whether steps of recurrences are compiled for their most common options. (Parts of kTogether positions, which short
  // axes have, take longer then.)
  static constexpr bool kConstants = Policy::kKind == Kind::kLinear && !kRare<Policy> && !kShort;
  // Whether positions that are taken together are a run (runs.h).
  static constexpr bool kRuns =
      (kByParts<Policy> && kParts) || kAnyWeights<Policy> || kAnyOperator<Policy> || kConstants;

  static constexpr int kBytes = sizeof(Bits), kMany = Policy::kOperands == 1 && kBytes <= 4 ? 1 : 2;

  struct Extra {};
  struct Starts {};
  struct Tile {
    int stage;
  };
  struct Folds {
    State before, warp;  // folds of the warp's positions of the column: of those before the run, and of all
  };

  // Where the column of a lane is.
  struct Place {
    bool active;
    int64_t column;         // outer * inner + the inner index
    int64_t at, a, starts;  // offsets of position 0 of the array
    int64_t base;           // offset of position 0 of the first column of the strip
    Bits factor;            // the element of a at all positions, if it is_one()
  };

  // A column, and its outer and inner index.
  struct Cursor {
    int64_t column, outer, i;
  };

  struct Span {
    int64_t begin;
    int left;  // how many positions of the axis there are from `begin` on
  };

  // The part of an array that is in shared memory: elements from `begin` to `end`, counted from `origin`, which is
  // aligned.
  struct Image {
    int64_t origin;
    int begin, end;
  };

  // A lane's positions of a column, from position `first` on, in the direction of the scan. In shared memory its
  // elements are at byte `at`, at + by, ..
  struct Run {
    int64_t first;
    int rows, at, by;
  };

  // `thread` is one of those that share a tile.
  __device__ explicit Spans(const Parameters& p, unsigned thread = threadIdx.x)
      : Base(p, p.width), thread(static_cast<int>(thread)) {
    const int lane = thread % 32, warp = thread / 32;
    axis_warp = warp >> p.column_bits;
    run = p.column_bits == 0 ? lane / p.width : 0;
    column = p.column_bits == 0 ? lane - run * p.width : (warp & ((1 << p.column_bits) - 1)) * 32 + lane;
    step = p.column_bits == 0 ? p.width : 32;  // from a lane to the one with the next run of the column
  }

  // ---- Where things are

  // The outer index of a strip, and its first column.
  __device__ unsigned outer_of(unsigned strip) const { return p.parts == 1 ? strip : strip / p.parts; }
  __device__ int64_t first_of(unsigned strip) const { return p.parts == 1 ? 0 : int64_t{strip % p.parts} * p.width; }

  __device__ int64_t column_of(unsigned strip, int member) const {
    const int64_t i = first_of(strip) + member;
    return i < p.inner && member < p.width ? outer_of(strip) * p.inner + i : p.columns;
  }

  __device__ Place place(unsigned strip) const {
    const int64_t outer = outer_of(strip), first = first_of(strip), i = first + column;
    const bool inside = run < p.runs && column < p.width && i < p.inner;
    Place place = place_at({inside ? outer * p.inner + i : p.columns, outer, i});
    place.base = outer * p.length * p.inner + first;
    if constexpr (Policy::kBroadcast)
      if (is_one() && place.active) place.factor = static_cast<const Bits*>(p.operands[1])[place.a];
    return place;
  }

  __device__ Place place_of(int64_t column) const { return place_at(cursor(column)); }

  __device__ Cursor cursor(int64_t column) const {
    int64_t outer = column, i = 0;
    if (kShort && p.parts > 0) {
      outer = blockIdx.x / p.parts;
      i = column - outer * p.inner;
    } else if (p.inner > 1) {
      outer = p.columns >> 32 ? column / p.inner : static_cast<uint32_t>(column) / static_cast<uint32_t>(p.inner);
      i = column - outer * p.inner;
    }
    return {column, outer, i};
  }

  // Moves to the column that is p.threads further.
  __device__ void advance(Cursor& cursor) const {
    cursor.column += p.threads;
    cursor.outer += p.outer_step;
    cursor.i += p.inner_step;
    if (cursor.i < p.inner) return;
    cursor.i -= p.inner;
    ++cursor.outer;
  }

  __device__ Place place_at(const Cursor& cursor) const {
    Place place = {};
    place.column = cursor.column;
    place.active = cursor.column < p.columns;
    if (!place.active) return place;
    place.at = cursor.outer * p.length * p.inner + cursor.i;
    if (Policy::kBroadcast && !(p.staged & 2)) place.a = p.outer_of_a(cursor.outer) + p.a.inner(cursor.i);
    if (Policy::kStarts && p.starts) place.starts = p.starts_at.outer(cursor.outer) + p.starts_at.inner(cursor.i);
    return place;
  }

  __device__ Span span(int t) const {
    const int64_t begin = static_cast<int64_t>(t) * p.tile;
    return {begin, static_cast<int>(min(p.length - begin, static_cast<int64_t>(INT32_MAX)))};
  }

  __device__ static Image image(int64_t at, int count) {
    const int begin = static_cast<int>(at & (kInLine - 1));
    return {at - begin, begin, begin + count};
  }

  // ---- Shared memory

  // Starts to load the elements of an image, and the rest of their 16 bytes, unless that lies outside the array.
  __device__ void copy_in(int stage, const Image& image) const {
    const int64_t there = p.columns * p.length - image.origin;
    const int packs = static_cast<int>(min(int64_t{(image.end + kInPack - 1) / kInPack}, there / kInPack));
#pragma unroll
    for (int o = 0; o < Policy::kOperands; ++o) {
      if (!(p.staged >> o & 1)) continue;
      const Bits* const from = static_cast<const Bits*>(p.operands[o]) + image.origin;
      unsigned char* const to = staging(stage, o);
      int pack = image.begin / kInPack + thread;
      for (; pack + 3 * p.threads < packs; pack += 4 * p.threads)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          copy_async(to + padded(16 * (pack + i * p.threads)), from + (pack + i * p.threads) * kInPack);
#pragma unroll 1
      for (; pack < packs; pack += p.threads) copy_async(to + padded(16 * pack), from + pack * kInPack);
      if (thread == 0 && packs * kInPack < image.end)
        copy_async_part(to + padded(16 * packs), from + packs * kInPack,
                        static_cast<int>(there - packs * kInPack) * kBytes);
    }
  }

  // Stores the results, which have replaced operands in shared memory. All threads call this.
  __device__ void copy_out(int stage, const Image& image) const {
    wait();
    const int first = (image.begin + kInPack - 1) / kInPack, last = image.end / kInPack;  // whole packs
    const int rest = thread;
#pragma unroll
    for (int o = 0; o < Policy::kResults; ++o) {
      Bits* const to = static_cast<Bits*>(p.results[o]) + image.origin;
      unsigned char* const from = staging(stage, o);
#pragma unroll 4
      for (int pack = thread; pack < last; pack += p.threads)
        if (pack >= first)
          *reinterpret_cast<Pack*>(to + pack * kInPack) = *reinterpret_cast<const Pack*>(from + padded(16 * pack));
      if (kInPack == 1 || rest >= kInPack) continue;
      const int head = image.begin + rest, tail = max(first, last) * kInPack + rest;
      if (head < min(first * kInPack, image.end)) to[head] = *in(from, padded(head * kBytes));
      if (tail < image.end) to[tail] = *in(from, padded(tail * kBytes));
    }
  }

  // A barrier for the threads that work on tiles.
  __device__ void wait() const { wait_at_barrier(1, p.threads); }

  // ---- Runs

  __device__ Run run_from(const Place& place, const Image& image, int64_t first, int rows) const {
    Run run = {first, rows, 0, 0};
    run.at = static_cast<int>(place.at + index(first) * p.inner - image.origin) * kBytes;
    run.by = static_cast<int>(p.backward ? -p.inner : p.inner) * kBytes;
    return run;
  }

  // The fold of a run. kStaged: all operands are in shared memory, which is faster if the compiler knows it.
  template <bool kStaged>
  __device__ State fold_of(int stage, const Place& place, const Image& image, const Run& run) const {
    if (!place.active || run.rows <= 0) return identity();
    Words<1> words;
    read<kStaged>(stage, place, image, run, 0, words);
    State state = Policy::first(input(words, 0), p.options);
    int r = 1;  // one position is done; most runs have an odd length, so the rest is a multiple of kTogether
#pragma unroll 1
    for (; r + kTogether <= run.rows; r += kTogether) {
      Words<kTogether> words;
      read<kStaged>(stage, place, image, run, r, words);
      if constexpr (kCutParts<Policy> && kParts) {
        if (words.starts == 0) {
          fold_on<typename Policy::Uncut, kTogether, true>(
              state.value, [&](int j) { return input(words, j); }, p.options);
          continue;
        }
      }
      if constexpr (kRuns) {
        fold_on<Policy, kTogether, !kConstants>(state, [&](int j) { return input(words, j); }, p.options);
      } else {
#pragma unroll
        for (int j = 0; j < kTogether; ++j) Policy::step(state, input(words, j), p.options);
      }
    }
#pragma unroll 1
    for (; r < run.rows; ++r) {
      read<kStaged>(stage, place, image, run, r, words);
      Policy::step(state, input(words, 0), p.options);
    }
    return state;
  }

  // Computes the results of a run that follows `state`, and writes them to shared memory, or to where they belong.
  template <bool kStaged>
  __device__ void step_over(int stage, const Place& place, const Image& image, const Run& run, State state) const {
    if (!place.active) return;
    int r = 0;
#pragma unroll 1
    for (; r + kTogether <= run.rows; r += kTogether) {
      Words<kTogether> words;
      read<kStaged>(stage, place, image, run, r, words);
      Bits results[Policy::kResults][kTogether];
      step_some<kTogether>(state, words, kTogether, results);
      write<kStaged>(stage, place, run, r, kTogether, results);
    }
#pragma unroll 1
    for (; r < run.rows; ++r) {
      Words<1> words;
      read<kStaged>(stage, place, image, run, r, words);
      Bits results[Policy::kResults][1];
      step_some<1>(state, words, 1, results);
      write<kStaged>(stage, place, run, r, 1, results);
    }
  }

  template <int kRows>
  static constexpr int kColumns = kBytes == 1         ? 2
                                  : kRows < 8 / kMany ? 8 / kMany / kRows
                                                      : 1;  // columns that a lane has at a time

  // Computes the results of whole short columns, p.threads apart, kRows positions at a time. All loads are issued
  // before any result is computed. Moves to the column after these.
  template <int kRows>
  __device__ void step_columns(const Image& image, Cursor& cursor, int64_t end) const {
    constexpr int kAtOnce = kColumns<kRows>;
    Place places[kAtOnce];
    Run runs[kAtOnce];
    State states[kAtOnce];
    const int length = static_cast<int>(p.length);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if constexpr (Policy::kOperands == 1) {
        places[k] = place_at(cursor);
        places[k].active = cursor.column < end;
        advance(cursor);
      } else {  // registers are scarce: it is faster to divide again
        places[k] = place_of(cursor.column < end ? cursor.column : p.columns);
        cursor.column += p.threads;
      }
      if (!places[k].active) continue;
      runs[k] = run_from(places[k], image, 0, length);
      states[k] = this->initial(places[k].column);
    }
#pragma unroll 1
    for (int r = 0; r < length; r += kRows) {
      const int count = min(length - r, kRows);
      Words<kRows> words[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (places[k].active) read<false>(0, places[k], image, runs[k], r, words[k], count);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (!places[k].active) continue;
        Bits results[Policy::kResults][kRows];
        step_some<kRows>(states[k], words[k], count, results);
        write<false>(0, places[k], runs[k], r, count, results);
      }
    }
  }

  // ---- Tiles of columns that lanes share, as Columns has them

  __device__ void fetch(int stage, const Place& place, const Span& span, Extra (&)[1]) const {
    if (p.staged) copy_in(stage, image_of(place, span));
  }
  __device__ void put_extras(int, const Extra (&)[1]) const {}
  __device__ void take(int stage, const Place&, const Span&, Tile& tile) const {
    if (p.staged) wait();
    tile.stage = stage;
  }
  __device__ Starts starts(const Place&, const Span&) const { return {}; }

  __device__ Folds fold(const Place& place, const Span& span, const Tile& tile, const Starts&) const {
    Folds folds;
    const Image image = image_of(place, span);
    const Run of_lane = run_of(place, image, span);
    State inclusive = all_staged() ? fold_of<kSplit>(tile.stage, place, image, of_lane)
                                   : fold_of<false>(tile.stage, place, image, of_lane);
    folds.before = identity();
    folds.warp = inclusive;
    if (p.runs == 1) return folds;
#pragma unroll
    for (int bit = 0; bit < 5; ++bit) {
      if (1 << bit >= p.runs) break;
      const State left = shuffle_up(inclusive, step << bit);
      if (run >= 1 << bit) inclusive = Policy::combine(left, inclusive, p.options);
    }
    const State before = shuffle_up(inclusive, step);
    if (run > 0) folds.before = before;
    folds.warp = inclusive;  // the lane with the last run has the fold of all
    return folds;
  }

  __device__ void publish_warp(int slot, const Folds& folds) const {
    if (run == p.runs - 1 && column < p.width) totals(slot)[axis_warp * p.width + column] = folds.warp;
  }

  // The lane's column, counted in the block.
  __device__ int own_column() const { return column; }
  __device__ State carry_of_thread(int slot) const { return this->carry(slot)[column]; }

  // Sets a thread's `base`: the fold of all before the tile, and that of the tile's earlier warps.
  __device__ void earlier_warps(int slot, State (&base)[2]) const {
    if (column >= p.width) return;
    base[0] = carry_of_thread(slot);
    base[1] = Base::before_in_tile(slot, axis_warp, column);
  }

  // Sets a thread's `before`: the fold of the tile's positions before the thread's.
  __device__ void before_in_tile(int slot, const Folds& folds, State (&before)[1]) const {
    State base[2];
    earlier_warps(slot, base);
    before[0] = Policy::combine(base[1], folds.before, p.options);
  }

  __device__ void finish(const Place& place, const Span& span, const Tile& tile, const Starts& starts,
                         const Folds& folds, const State (&base)[2]) const {
    const State carry[1] = {base[0]}, before[1] = {Policy::combine(base[1], folds.before, p.options)};
    finish(place, span, tile, starts, carry, before);
  }

  // `carry` is the fold of all that comes before the tile.
  __device__ void finish(const Place& place, const Span& span, const Tile& tile, const Starts&, const State (&carry)[1],
                         const State (&before)[1]) const {
    const Image image = image_of(place, span);
    const Run of_lane = run_of(place, image, span);
    const State state = Policy::combine(carry[0], before[0], p.options);
    if (all_staged()) {
      step_over<kSplit>(tile.stage, place, image, of_lane, state);
    } else {
      step_over<false>(tile.stage, place, image, of_lane, state);
    }
    if (!(p.staged & 1)) return;
    copy_out(tile.stage, image);
    wait();  // after this barrier, the next tile may be loaded
  }

 private:
  // Whether there is code of its own for tiles that are in shared memory with all their operands.
  static constexpr bool kSplit = !kRare<Policy>;
  __device__ bool all_staged() const { return kSplit && (p.staged | is_one() << 1) == (1 << Policy::kOperands) - 1; }

  // Whether a column has one element of a for all positions, which its lanes load once.
  __device__ bool is_one() const { return Policy::kBroadcast && !kShort && !(p.staged & 2) && p.a_axis_stride == 0; }

  __device__ int64_t index(int64_t position) const { return p.backward ? p.length - 1 - position : position; }

  __device__ Image image_of(const Place& place, const Span& span) const {
    const int n = min(p.tile, span.left);
    const int64_t lowest = p.backward ? p.length - span.begin - n : span.begin;
    return image(place.base + lowest * p.inner, n * p.width);
  }

  __device__ Run run_of(const Place& place, const Image& image, const Span& span) const {
    const int first = (axis_warp * p.runs + run) * p.per_lane, n = min(p.tile, span.left);
    return run_from(place, image, span.begin + first, min(p.per_lane, n - first));
  }

  __device__ unsigned char* staging(int stage, int operand) const {
    return dynamic_shared_memory() + stage * p.stage_bytes + operand * p.span_bytes;
  }

  // Where a byte of an image is in shared memory. If short rows are a multiple of 16 bytes long, lanes would meet in a
  // bank; so 16 bytes after each line are left free.
  __device__ int padded(int byte) const { return kShort && p.padding ? byte + (byte >> kLineBits << 4) : byte; }
  __device__ static Bits* in(unsigned char* staging, int byte) { return reinterpret_cast<Bits*>(staging + byte); }

  // Reads `count` (at most n) elements that are `by` bytes apart: one by one, or 16 bytes at a time.
  template <int n>
  __device__ void read_staged(unsigned char* from, int at, int by, int count, Bits (&to)[n]) const {
    if constexpr (kShort && kInPack > 1 && n % kInPack == 0) {
      if (p.packed) {
#pragma unroll
        for (int j = 0; j < n; j += kInPack) {
          if (j >= count) break;
          Pack pack = *pack_at(from, at + j * by);
          if (p.backward) pack = reversed<Bits>(pack);
#pragma unroll
          for (int i = 0; i < kInPack; ++i) to[j + i] = get<Bits>(pack, i);
        }
        return;
      }
    }
    if (kShort && p.padding) {
#pragma unroll
      for (int j = 0; j < n; ++j)
        if (j < count) to[j] = *in(from, padded(at + j * by));
    } else {
#pragma unroll
      for (int j = 0; j < n; ++j)
        if (j < count) to[j] = *in(from, at + j * by);
    }
  }

  template <int n>
  __device__ void write_staged(unsigned char* to, int at, int by, int count, const Bits (&from)[n]) const {
    if constexpr (kShort && kInPack > 1 && n % kInPack == 0) {
      if (p.packed) {
#pragma unroll
        for (int j = 0; j < n; j += kInPack) {
          if (j >= count) break;
          Pack pack = {};
#pragma unroll
          for (int i = 0; i < kInPack; ++i) set<Bits>(pack, i, from[j + i]);
          *pack_at(to, at + j * by) = p.backward ? reversed<Bits>(pack) : pack;
        }
        return;
      }
    }
    if (kShort && p.padding) {
#pragma unroll
      for (int j = 0; j < n; ++j)
        if (j < count) *in(to, padded(at + j * by)) = from[j];
    } else {
#pragma unroll
      for (int j = 0; j < n; ++j)
        if (j < count) *in(to, at + j * by) = from[j];
    }
  }

  // The 16 bytes whose first element, in the direction of the scan, is the one at byte `at`.
  __device__ Pack* pack_at(unsigned char* staging, int at) const {
    return reinterpret_cast<Pack*>(staging + padded(p.backward ? at + kBytes - 16 : at));
  }

  // The operands of n positions. The last operand has one element more: the neighbour outside the run.
  template <int n>
  struct Words {
    Bits operand[Policy::kOperands][n];
    Bits beside;
    int count;  // how many of the n positions exist
    uint32_t starts;
  };

  // Reads `count` (at most n) positions, from position r of the run on.
  template <bool kStaged, int n>
  __device__ void read(int stage, const Place& place, const Image& image, const Run& run, int r, Words<n>& words,
                       int count = n) const {
    const int at = run.at + r * run.by;
    words.count = count;
#pragma unroll
    for (int o = 0; o < Policy::kOperands; ++o) {
      if (Policy::kBroadcast && o == 1 && is_one()) {
#pragma unroll
        for (int j = 0; j < n; ++j) words.operand[o][j] = place.factor;
      } else if (kStaged || p.staged >> o & 1) {
        read_staged(staging(stage, o), at, run.by, count, words.operand[o]);
      } else {
        read_operand(o, place, run.first + r, count, words.operand[o]);
      }
    }
    if constexpr (Policy::kNeighbour) {
      constexpr int kLast = Policy::kOperands - 1;
      const int beside = p.neighbour_before ? at - run.by : at + count * run.by;
      const int64_t q = run.first + (p.neighbour_before ? r - 1 : r + count);
      if (q < 0 || q >= p.length) {
        words.beside = this->edge(place.column);
      } else if ((p.staged >> kLast & 1) && beside >= image.begin * kBytes && beside < image.end * kBytes) {
        words.beside = *in(staging(stage, kLast), padded(beside));
      } else {
        words.beside = static_cast<const Bits*>(p.operands[kLast])[place.at + index(q) * p.inner];
      }
    }
    words.starts = 0;
    if (!Policy::kStarts || !p.starts) return;
    const uint8_t* const starts = p.starts + place.starts;
    const int64_t first = index(run.first + r) + p.start_offset;
#pragma unroll
    for (int j = 0; j < n; ++j) {
      const int64_t boundary = p.backward ? first - j : first + j;
      if (j < count && boundary > 0 && boundary < p.length && starts[boundary * p.starts_at.axis_stride])
        words.starts |= 1u << j;
    }
  }

  template <int n>
  __device__ void read_operand(int o, const Place& place, int64_t first, int count, Bits (&to)[n]) const {
    const bool broadcast = Policy::kBroadcast && o == 1;
    const int64_t stride = broadcast ? p.a_axis_stride : p.inner, by = p.backward ? -stride : stride;
    const Bits* from =
        static_cast<const Bits*>(p.operands[o]) + (broadcast ? place.a : place.at) + index(first) * stride;
#pragma unroll
    for (int j = 0; j < n; ++j, from += by)
      if (j < count) to[j] = *from;
  }

  template <int n>
  __device__ In<Acc> input(const Words<n>& words, int j) const {
    const auto load = [&](int o, int j) { return Element::load(words.operand[o][j]); };
    In<Acc> in;
    in.x = load(0, j);
    if (Policy::kOperands > 1) in.a = load(1, j);
    if (Policy::kOperands > 2) in.y = load(2, j);
    in.start = Policy::kStarts && (words.starts >> j & 1);
    if constexpr (Policy::kNeighbour) {
      constexpr int kLast = Policy::kOperands - 1;
      const Acc beside = Element::load(words.beside);
      const Acc before = j > 0 ? load(kLast, j > 0 ? j - 1 : 0) : beside;
      const Acc after = j + 1 < n && j + 1 < words.count ? load(kLast, j + 1 < n ? j + 1 : 0) : beside;
      in.neighbour = p.neighbour_before ? before : after;
    }
    return in;
  }

  template <int n>
  __device__ void step_some(State& state, const Words<n>& words, int count,
                            Bits (&results)[Policy::kResults][n]) const {
    const auto put = [&](int j, Out<Acc> out) {
      results[0][j] = Element::store(out.first);
      if constexpr (Policy::kResults == 2) results[1][j] = Element::store(out.second);
    };
    if constexpr (kCutParts<Policy> && kParts && n > 1)
      if (count == n && words.starts == 0)
        return step_run<typename Policy::Uncut, n>(state.value, [&](int j) { return input(words, j); }, p.options, put);
    if constexpr (kRuns && n > 1)
      if (count == n)
        return step_run<Policy, n, !kConstants>(state, [&](int j) { return input(words, j); }, p.options, put);
#pragma unroll
    for (int j = 0; j < n; ++j)
      if (j < count) put(j, Policy::step(state, input(words, j), p.options));
  }

  template <bool kStaged, int n>
  __device__ void write(int stage, const Place& place, const Run& run, int r, int count,
                        const Bits (&results)[Policy::kResults][n]) const {
#pragma unroll
    for (int o = 0; o < Policy::kResults; ++o) {
      if (kStaged || p.staged & 1) {
        write_staged(staging(stage, o), run.at + r * run.by, run.by, count, results[o]);
      } else {
        const int64_t by = p.backward ? -p.inner : p.inner;
        Bits* to = static_cast<Bits*>(p.results[o]) + place.at + index(run.first + r) * p.inner;
#pragma unroll
        for (int j = 0; j < n; ++j, to += by)
          if (j < count) *to = results[o][j];
      }
    }
  }

  const int thread;
  int axis_warp, run, column, step;
};

// Short axes: a lane has a whole column. Operands are read once, results written once. A block has neighbouring
// columns: either all columns of some outer indices, which it loads into shared memory, or some columns of one outer
// index, which lanes read directly.
template <class Policy, int kRows>
__device__ void scan_short_rows(const Parameters& p) {
  using Work = Spans<Policy, true>;
  const Work work(p);
  int64_t first = int64_t{blockIdx.x} * p.block_columns, end = min(first + p.block_columns, p.columns);
  if (p.parts > 0) {
    const int64_t row = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
    first = row * p.inner + part * p.block_columns;
    end = min(first + p.block_columns, (row + 1) * p.inner);
  }
  const bool staged = p.staged & 1;
  const auto image = Work::image(first * p.length, staged ? static_cast<int>((end - first) * p.length) : 0);
  if (staged) {
    work.copy_in(0, image);
    commit_async_copies();
    wait_for_async_copies<0>();
    __syncthreads();
  }
  for (auto cursor = work.cursor(first + threadIdx.x); cursor.column < end;)
    work.template step_columns<kRows>(image, cursor, end);
  if (staged) work.copy_out(0, image);
}

template <class Policy>
__global__ void __launch_bounds__(kThreads, sizeof(typename Policy::State) > 8 ? 3 : 4)
    scan_short(const __grid_constant__ Parameters p) {
  constexpr bool kFew = kRare<Policy> ? kAnyOperator<Policy> && Spans<Policy>::kBytes > 1 : !Policy::kCut;
  if constexpr (kFew) {
    if (p.length <= 2) return scan_short_rows<Policy, 2>(p);
    if (Spans<Policy>::kTogether > 4 && p.length <= 4) return scan_short_rows<Policy, 4>(p);
  }
  // Bytes have many columns and take much computing for little memory: positions that the axis lacks would cost most of
  // it.
  scan_short_rows<Policy, Spans<Policy>::kBytes == 1 ? 2 : Spans<Policy>::kTogether>(p);
}

}  // namespace jaxgpuops::scan
