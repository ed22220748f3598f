// Whole rows (inner = 1) of at most a tile, for any policy: as in Chunks (chunks.cuh), a lane has one run of 64 bytes
// (32 if there are many operands). Runs are loaded and stored through shared memory, 16 bytes at a time. A warp has
// several rows, or several warps share a row. Each warp loads what it works on, so only the warps of one row wait for
// each other.
#pragma once

#include "common/cuda/async_copy.cuh"
#include "scan/cuda/block.cuh"
#include "scan/cuda/odd_rows.cuh"
#include "scan/cuda/runs.h"

namespace jaxgpuops::scan {

// kByVectors: how rows that are not aligned are copied: by vectors (odd_rows.cuh), or element by element. Elements of
// one byte are copied by vectors; those of two are if a warp has several rows, in a kernel of its own, since in one
// kernel the calls would slow other rows by up to a sixth.
//
// Runs are folded as quads of packs (runs.h) where the order of folding matters, since few.cuh has the same rows.
template <class Policy, bool kByVectors>
class Rows : public BetweenWarps<Policy> {
 public:
  using Element = typename Policy::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using State = typename Policy::State;
  using Base = BetweenWarps<Policy>;
  using Base::p;

  static constexpr int kInPack = 16 / sizeof(Bits);
  static constexpr int kPacks = run_shape(Layout::kAlong, Policy::kOperands, sizeof(Bits)).per_lane;
  static constexpr int kRun = kPacks * kInPack, kOfWarp = 32 * kRun;
  static constexpr int kBytesOfWarp = Policy::kOperands * 32 * kPacks * 16;
  static constexpr bool kQuads = kByQuads<Policy>;

  struct Tile {
    Pack operand[Policy::kOperands][kPacks];
    Acc neighbour;  // the neighbour of the run, outside of it
    uint32_t starts;
  };

  // Folds of the warp's part of the row: of what comes before the run, and including the run.
  struct Folds {
    State before, inclusive;
    Kept<Policy, kRun> kept;
    State packs[3];  // kQuads: of the packs of the run before its second, third and fourth
  };

  __device__ Rows(const Parameters& p, unsigned strip) : Base(p, 32 >> p.run_bits << p.column_bits) {
    const int lanes = 1 << p.run_bits, warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    run = lane & (lanes - 1);
    axis_warp = warp >> p.column_bits;
    column_warp = warp & ((1 << p.column_bits) - 1);
    part = p.backward ? p.axis_warps - 1 - axis_warp : axis_warp;
    slot = p.backward ? lane ^ (lanes - 1) : lane;
    length = static_cast<int>(p.length);
    first = ((int64_t{strip} << p.column_bits) + column_warp) << (5 - p.run_bits);
    const bool last = strip + 1 == p.strips;
    rows = last ? static_cast<int>(p.columns - first) : 32;
    packs = reinterpret_cast<Pack*>(dynamic_shared_memory()) + warp * (kBytesOfWarp / 16);
    origin = (p.backward ? length - p.tile : 0) + part * kOfWarp;
    const Where pack = where(lane * kInPack);
    moved = pack.row * length + pack.at;
    if (last || p.length != p.tile) {
      there = 0;
#pragma unroll
      for (int u = 0; u < kPacks; ++u)
        if (where((u * 32 + lane) * kInPack).there) there |= 1u << u;
    }
  }

  // Called by all lanes of a warp.
  __device__ void load(Tile& tile) const {
    constexpr int kLast = Policy::kOperands - 1;
    // The neighbour of the warp's part of the row. It is loaded first, since the compiler would move the load to where
    // the copies have ended: rows took an eighth longer.
    Bits beside = {};
    if constexpr (Policy::kNeighbour) {
      const int q = position() + (p.neighbour_before ? -1 : kRun);
      if (lane == (p.neighbour_before ? 0 : 31) && row() < p.columns && q >= 0 && q < length)
        beside = static_cast<const Bits*>(p.operands[kLast])[row() * p.length + index(q)];
    }
    if (p.aligned) {
      const int64_t from = first * p.length + moved;
#pragma unroll
      for (int o = 0; o < Policy::kOperands; ++o)
        if (!Policy::kBroadcast || o != 1 || dense_a()) fetch(o, static_cast<const Bits*>(p.operands[o]) + from);
    } else {
#pragma unroll
      for (int o = 0; o < Policy::kOperands; ++o)
        if (!Policy::kBroadcast || o != 1 || dense_a())
          fetch_each(o, static_cast<const Bits*>(p.operands[o]) + first * p.length,
                     [&](int row) { return row * length; });
    }
    if constexpr (Policy::kBroadcast)
      if (!dense_a()) fetch_rows(1, static_cast<const Bits*>(p.operands[1]), row() < p.columns ? p.a.outer(row()) : 0);
    commit_async_copies();
    tile.starts = starts();
    wait_for_async_copies<0>();
    __syncwarp();
    if constexpr (Policy::kNeighbour) {
      const int i = length - position();
      if (!p.neighbour_before && i > 0 && i < kRun) {
        auto* const pack = reinterpret_cast<Bits*>(run_order(kLast, i / kInPack));
        pack[p.backward ? kInPack - 1 - i % kInPack : i % kInPack] = this->edge(row());
      }
    }
    take(tile);
    if constexpr (Policy::kNeighbour) {
      const auto& y = tile.operand[kLast];
      const Acc before = shuffle_up(Element::load(get<Bits>(y[kPacks - 1], kInPack - 1)), 1);
      const Acc after = shuffle_from(Element::load(get<Bits>(y[0], 0)), (lane + 1) % 32);
      tile.neighbour = p.neighbour_before ? before : after;
      if (lane == (p.neighbour_before ? 0 : 31)) tile.neighbour = Element::load(beside);
      if (p.neighbour_before ? position() == 0 : position() + kRun == length)
        tile.neighbour = Element::load(this->edge(row()));
    }
  }

  __device__ Folds fold(const Tile& tile) const {
    Folds folds;
    const auto at = [&](int i) { return input(tile, i); };
    State inclusive;
    if constexpr (kQuads) {
      inclusive = fold_quad<Policy, kInPack>(at, p.options, folds.packs);
    } else {
      inclusive = fold_run<Policy, kRun>(at, p.options, folds.kept);
    }
#pragma unroll
    for (int bit = 0; bit < 5; ++bit) {
      const State left = kQuads ? shuffle_from(inclusive, (lane >> bit << bit) - 1) : shuffle_up(inclusive, 1 << bit);
      if (kQuads ? run >> bit & 1 : run >= 1 << bit) inclusive = Policy::combine(left, inclusive, p.options);
    }
    folds.before = shuffle_up(inclusive, 1);
    if (run == 0) folds.before = this->identity();
    folds.inclusive = inclusive;
    return folds;
  }

  // The fold of what comes before the warp in its row. The warps of a row exchange their folds through shared memory.
  __device__ State earlier_warps(const Folds& folds) const {
    const State initial = this->initial(row());
    if (p.axis_warps == 1) return initial;
    State* const totals = this->totals(0) + column_warp * kWarps;
    if (lane == 31) totals[axis_warp] = folds.inclusive;
    wait_at_barrier(1 + column_warp, 32 * p.axis_warps);
    if (axis_warp == 0) return initial;
    const int w = lane % kWarps;
    State fold = totals[w < axis_warp ? w : 0];
#pragma unroll
    for (int step = 1; step < kWarps; step *= 2) {
      if (step >= p.axis_warps) break;
      const State right = shuffle_from(fold, lane + step);
      if (w + step < axis_warp) fold = Policy::combine(fold, right, p.options);
    }
    return Policy::combine(initial, shuffle_from(fold, 0), p.options);
  }

  // Writes the results. `base` is the fold of what comes before the warp in its row.
  __device__ void finish(Tile& tile, const Folds& folds, const State& base) const {
    if constexpr (kTwice) take(tile);
    State state = Policy::combine(base, folds.before, p.options);
    Acc results[Policy::kResults][kRun];
    const auto put = [&](int i, Out<Acc> out) {
      results[0][i] = out.first;
      if constexpr (Policy::kResults == 2) results[1][i] = out.second;
    };
    const auto at = [&](int i) {
      if constexpr (kByParts<Policy>) {
        return input_again(i);
      } else {
        return input(tile, i);
      }
    };
    if constexpr (kQuads) {
      static_assert(kPacks == 4);
      step_quad<Policy, kInPack>(state, at, p.options, put, folds.packs);
    } else {
      step_run<Policy, kRun>(state, at, p.options, put, folds.kept);
    }
    Pack packed[Policy::kResults][kPacks];
#pragma unroll
    for (int r = 0; r < Policy::kResults; ++r)
#pragma unroll
      for (int j = 0; j < kPacks; ++j) packed[r][j] = pack_of<Element>(results[r] + j * kInPack);
    if (p.backward) reverse_each<Bits>(packed);
#pragma unroll
    for (int r = 0; r < Policy::kResults; ++r)
#pragma unroll
      for (int j = 0; j < kPacks; ++j) *run_order(r, j) = packed[r][j];
    __syncwarp();
#pragma unroll
    for (int r = 0; r < Policy::kResults; ++r) store(r, static_cast<Bits*>(p.results[r]) + first * p.length);
  }

 private:
  // The lane's row, which may be beyond the last one.
  __device__ int64_t row() const { return first + (lane >> p.run_bits); }
  // Position at which the run begins.
  __device__ int position() const { return ((axis_warp << p.run_bits) + run) * kRun; }
  __device__ int index(int position) const { return p.backward ? length - 1 - position : position; }

  // Whether the second pass reads operands from shared memory again. (Otherwise the compiler converts 16-bit elements
  // once, and keeps the floats: twice as many registers, more than there are.)
  static constexpr bool kTwice = sizeof(Bits) <= 2 && !kByParts<Policy>;

  __device__ void take(Tile& tile) const {
#pragma unroll
    for (int o = 0; o < Policy::kOperands; ++o)
#pragma unroll
      for (int j = 0; j < kPacks; ++j) tile.operand[o][j] = *run_order(o, j);
    if (p.backward) reverse_each<Bits>(tile.operand);
  }

  // Where pack number `pack` (in the order of memory) of the warp's part of an operand stands in shared memory. Neither
  // 8 neighbouring packs, nor one pack of each of 8 runs, share a bank.
  __device__ Pack* place(int operand, int pack) const {
    return packs + operand * (32 * kPacks) + permuted<kPacks>(pack);
  }
  // The j-th of the kPacks packs of the lane's run.
  __device__ Pack* run_order(int operand, int j) const {
    return place(operand, slot * kPacks + (p.backward ? kPacks - 1 - j : j));
  }
  // The u-th of the kPacks packs that the lane copies, which are neighbours of other lanes' packs in memory.
  __device__ Pack* memory_order(int operand, int u) const { return place(operand, u * 32 + lane); }
  // The i-th of the elements that the lane copies one by one: every 32nd element.
  __device__ Bits* element(int operand, int i) const {
    return reinterpret_cast<Bits*>(place(operand, i * (32 / kInPack) + lane / kInPack)) + lane % kInPack;
  }

  // Where an element of the warp's part is, in the order of memory: its row, its place in the row, and whether it
  // exists. The row is that of element e - lane % 32, too.
  struct Where {
    int row, at;
    bool there;
  };
  __device__ Where where(int e, int in_row) const {
    const int row = in_row / kRun >> p.run_bits;
    const int at = origin + e - (row * kRun << p.run_bits);
    return {row, at, row < rows && static_cast<unsigned>(at) < static_cast<unsigned>(length)};
  }
  __device__ Where where(int e) const { return where(e, e); }
  // The i-th of the elements that the lane copies one by one. A row has more than 32, so its row is that of other
  // lanes. kOneRow: the warp has only one row.
  template <bool kOneRow>
  __device__ Where where_element(int i) const {
    if (!kOneRow) return where(i * 32 + lane, i * 32);
    const int at = origin + i * 32 + lane;
    return {0, at, rows > 0 && static_cast<unsigned>(at) < static_cast<unsigned>(length)};
  }

  // What the warp has of its rows.
  __device__ Parts parts() const {
    const int begin = max(origin, 0), end = min(origin + (kRun << p.run_bits), length);
    return {max(0, min(rows, 32 >> p.run_bits)), p.run_bits, length, origin, begin, end};
  }

  // The distance from the first pack that a lane copies to the u-th: 32 * u packs further in the row, or in later rows.
  __device__ int step(int u) const {
    static_assert(kPacks == 2 || kPacks == 4);
    const int bits = p.run_bits + kPacks / 2;  // log2 of the packs of a row
    const int one = bits > 5 ? 32 * kInPack : length << (5 - bits);
    const int two = bits > 6 ? 64 * kInPack : length << (6 - bits);
    return (u & 1 ? one : 0) + (u & 2 ? two : 0);
  }

  // Whether rows of the operand a follow each other in memory.
  __device__ bool dense_a() const {
    return p.a.axis_stride != 0 && p.a.outer.groups == 1 && p.a.outer.stride[0] == p.length;
  }

  // Starts to load the warp's part of an operand, of which the lane copies `from` first.
  __device__ void fetch(int operand, const Bits* from) const {
#pragma unroll
    for (int u = 0; u < kPacks; ++u) copy_async_or_clear(memory_order(operand, u), from + step(u), there >> u & 1);
  }

  // Starts to load an operand whose rows do not follow each other in memory, or have one element for the whole row. The
  // lane's row begins at data[at].
  __device__ void fetch_rows(int operand, const Bits* data, int64_t at) const {
    if (Policy::kBroadcast && operand == 1 && p.a.axis_stride == 0) {
      const Bits value = data[at];
      Pack pack = {};
#pragma unroll
      for (int i = 0; i < kInPack; ++i) set<Bits>(pack, i, value);
#pragma unroll
      for (int j = 0; j < kPacks; ++j) *run_order(operand, j) = pack;
      return;
    }
    if (p.aligned) {
#pragma unroll
      for (int u = 0; u < kPacks; ++u) {
        const Where from = where((u * 32 + lane) * kInPack);
        const Bits* const pack = data + shuffle_from(at, from.row << p.run_bits) + from.at;
        copy_async_or_clear(memory_order(operand, u), pack, from.there);
      }
    } else {
      fetch_each(operand, data, [&](int row) { return shuffle_from(at, row << p.run_bits); });
    }
  }

  // `row_at(row)` is where a row begins in `data`.
  template <class RowAt>
  __device__ void fetch_each(int operand, const Bits* data, RowAt row_at) const {
    if constexpr (kByVectors) {
      // Only the maximum of a part of a run may include what is past the end.
      fetch_parts<kPacks, kByParts<Policy>>(place(operand, 0), data + row_at(lane >> p.run_bits), parts());
    } else if (sizeof(Bits) == 2 || p.run_bits == 5) {
      fetch_elements<true>(operand, data + row_at(0), row_at);
    } else {
      fetch_elements<false>(operand, data, row_at);
    }
  }
  template <bool kOneRow, class RowAt>
  __device__ void fetch_elements(int operand, const Bits* data, RowAt row_at) const {
    constexpr int kAtOnce = kRun < 16 ? kRun : 16;
#pragma unroll
    for (int begin = 0; begin < kRun; begin += kAtOnce) {
      Bits values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const Where from = where_element<kOneRow>(begin + i);
        const Bits* const row = kOneRow ? data : data + row_at(from.row);
        values[i] = from.there ? row[from.at] : Bits{};
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) *element(operand, begin + i) = values[i];
    }
  }

  template <bool kOneRow>
  __device__ void store_elements(int result, Bits* data) const {
    constexpr int kAtOnce = kRun < 16 ? kRun : 16;
#pragma unroll
    for (int begin = 0; begin < kRun; begin += kAtOnce) {
      Bits values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) values[i] = *element(result, begin + i);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const Where to = where_element<kOneRow>(begin + i);
        if (to.there) data[to.row * length + to.at] = values[i];
      }
    }
  }

  __device__ void store(int result, Bits* data) const {
    if (p.aligned) {
      Pack values[kPacks];
#pragma unroll
      for (int u = 0; u < kPacks; ++u) values[u] = *memory_order(result, u);
#pragma unroll
      for (int u = 0; u < kPacks; ++u)
        if (there >> u & 1) *reinterpret_cast<Pack*>(data + moved + step(u)) = values[u];
    } else if constexpr (kByVectors) {
      store_parts<kPacks>(place(result, 0), data, parts());
    } else if (sizeof(Bits) == 2 || p.run_bits == 5) {
      store_elements<true>(result, data);
    } else {
      store_elements<false>(result, data);
    }
  }

  // A bit for each element of the run: whether there is a boundary.
  __device__ uint32_t starts() const {
    uint32_t bits = 0;
    if (!Policy::kStarts || !p.starts || row() >= p.columns) return bits;
    const uint8_t* const from = p.starts + p.starts_at.outer(row());
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int q = position() + i, at = index(q) + p.start_offset;
      if (q < length && at > 0 && at < length && from[at * p.starts_at.axis_stride]) bits |= 1u << i;
    }
    return bits;
  }

  // Element i of the run.
  __device__ In<Acc> input(const Tile& tile, int i) const {
    const auto load = [&](int operand, int i) {
      return Element::load(get<Bits>(tile.operand[operand][i / kInPack], i % kInPack));
    };
    In<Acc> in;
    in.x = load(0, i);
    if (Policy::kOperands > 1) in.a = load(1, i);
    if (Policy::kOperands > 2) in.y = load(2, i);
    in.start = Policy::kStarts && (tile.starts >> i & 1);
    if constexpr (Policy::kNeighbour) {
      constexpr int kLast = Policy::kOperands - 1;
      const Acc before = i > 0 ? load(kLast, i - 1) : tile.neighbour;
      const Acc after = i < kRun - 1 ? load(kLast, i + 1) : tile.neighbour;
      in.neighbour = p.neighbour_before ? before : after;
    }
    return in;
  }

  // Element i of the run, read again from shared memory, which holds it until results replace it. It is needed so
  // rarely that registers should not hold the run for it.
  __device__ In<Acc> input_again(int i) const {
    const auto* const pack = reinterpret_cast<const Bits*>(run_order(0, i / kInPack));
    In<Acc> in;
    in.x = Element::load(pack[p.backward ? kInPack - 1 - i % kInPack : i % kInPack]);
    in.start = false;
    return in;
  }

  int lane, run, axis_warp, column_warp;
  int part, slot;  // number of the warp's part in its row, and of the lane's run in that part, in the order of memory
  int length, rows, origin;  // `origin`: where the warp's part begins in its first row, in the order of memory
  int64_t first;             // the warp's first row; it has `rows` rows, or fewer at the end
  Pack* packs;               // the warp's part of shared memory
  int moved;                 // offset, from the first row on, of the first pack that the lane copies
  uint32_t there = ~0u;      // a bit for each pack that the lane copies: whether it is in the array
};

}  // namespace jaxgpuops::scan
