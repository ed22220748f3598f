// What a block does with a tile of a scan, for any policy (policy.h), element and layout (shape.h): load it, fold it,
// and write its results, once it knows the fold of what comes before. algorithms.cuh puts these together.
//
// A lane folds its runs of positions in registers; the lanes of a warp fold theirs with shuffles, warps through shared
// memory, tiles by digits (shape.h). That gives each run the fold of all that comes before, with which its lane goes
// over it again for the results.
//
// Positions count in the direction of the scan. Positions beyond the end hold zeros: nothing comes after, but a run
// that ends there may be computed from its maximum, say.
#pragma once

#include <cstdint>
#include <type_traits>

#include "scan/block.cuh"

namespace jaxgpuops::scan {

// One thread's part of a block's work: kSingle, and kAlong where rows are so tiny that a lane has one run of 16 bytes.
template <class Policy, Layout kLayout>
class Engine : public BetweenWarps<Policy> {
 public:
  using Base = BetweenWarps<Policy>;
  using Base::identity, Base::p, Base::totals;

  using Element = typename Policy::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using State = typename Policy::State;

  static constexpr bool kOneColumn = false, kNear = false;
  static constexpr bool kAlong = kLayout == Layout::kAlong;
  static constexpr RunShape kShape = run_shape(kLayout, Policy::kOperands, sizeof(Bits));
  static constexpr int kRun = kShape.run, kWidth = 1, kPerLane = kAlong ? 1 : kShape.per_lane, kUnits = kPerLane;
  static constexpr int kInUnit = kAlong ? kRun : 1;  // elements of a load
  static constexpr int kTileExtras = Policy::kNeighbour ? kPerLane : 1;
  using Unit = std::conditional_t<kAlong, Pack, Bits>;
  using Extra = Bits;

  struct Tile {
    Unit operand[Policy::kOperands][kUnits];
    Extra extra[kTileExtras];  // neighbours that no unit has
  };

  // The fold before each run, within the warp, and that of the whole warp.
  struct Folds {
    State before[kPerLane];
    State warp;
  };

  // Where loaded units go: to registers, or to a place in shared memory that the thread alone uses.
  struct ToRegisters {
    Unit* units;
    __device__ void put(int u, Unit unit) const { units[u] = unit; }
  };
  struct ToShared {
    Unit* units;
    __device__ void put(int u, Unit unit) const { units[u * kThreads] = unit; }
  };

  // A tile in shared memory: units, extras, and the folds before each run.
  static constexpr int kExtrasAt = Policy::kOperands * kUnits * kThreads * sizeof(Unit);
  static constexpr int kFoldsAt = kExtrasAt + (Policy::kNeighbour ? kPerLane * kThreads * sizeof(Extra) : 0);
  static constexpr int kStageBytes = stage_bytes(kLayout, Policy::kOperands, sizeof(Bits), sizeof(State));
  static_assert(kAlong || kFoldsAt + kPerLane * kThreads * sizeof(State) <= kStageBytes);

  template <class T>
  __device__ T* in_stage(int stage, int at) const {
    return reinterpret_cast<T*>(dynamic_shared_memory() + stage * kStageBytes + at) + threadIdx.x;
  }

  // Where the columns of this thread are.
  struct Place {
    bool active;
    int64_t column;         // outer * inner + the inner index
    int64_t at, a, starts;  // offsets of position 0 of the array
  };

  __device__ explicit Engine(const Parameters& p) : Base(p, 32 >> p.run_bits << p.column_bits) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int columns = 32 >> p.run_bits;
    if (kAlong) {
      run = lane & ((1 << p.run_bits) - 1);
      column_in_warp = lane >> p.run_bits;
      run_stride = 1;
      last_run_lane = lane | ((1 << p.run_bits) - 1);
    } else {
      run = lane >> (5 - p.run_bits);
      column_in_warp = lane & (columns - 1);
      run_stride = columns;
      last_run_lane = column_in_warp | (32 - columns);
    }
    axis_warp = warp >> p.column_bits;
    const int column_warp = warp & ((1 << p.column_bits) - 1);
    column_in_block = column_warp * columns + column_in_warp;
  }

  __device__ Place place(unsigned strip) const {
    Place place;
    const int64_t column = int64_t{strip} * (32 >> p.run_bits << p.column_bits) + column_in_block;
    place.column = column;
    place.active = column < p.columns;
    const int64_t outer = kAlong ? column : column / p.inner, i = kAlong ? 0 : column - outer * p.inner;
    place.at = outer * p.length * p.inner + i;
    if (Policy::kBroadcast && place.active) place.a = p.a.outer(outer) + (kAlong ? 0 : p.a.inner(i));
    if (Policy::kStarts && p.starts && place.active)
      place.starts = p.starts_at.outer(outer) + (kAlong ? 0 : p.starts_at.inner(i));
    return place;
  }

  // ---- Memory

  // Positions are those in a tile. This is that of the first element of a run.
  __device__ int position(int line) const { return (((axis_warp * p.per_lane + line) << p.run_bits) + run) * kRun; }

  // A tile: how many positions are left from its first on, and where they are in the array.
  struct Span {
    int64_t begin;
    int left;
  };

  __device__ Span span(int t) const {
    const int64_t begin = static_cast<int64_t>(t) * p.tile;
    return {begin, static_cast<int>(min(p.length - begin, static_cast<int64_t>(INT32_MAX)))};
  }

  __device__ int64_t index(const Span& span, int position) const {
    return p.backward ? p.length - 1 - span.begin - position : span.begin + position;
  }

  __device__ void load(const Place& place, const Span& span, Tile& tile) const {
    load_operands(place, span, [&](int operand) { return ToRegisters{tile.operand[operand]}; });
    load_extras(place, span, tile.extra);
  }

  // Starts to load a tile into shared memory. Its extras go to registers; put_extras() takes them there later.
  __device__ void fetch(int stage, const Place& place, const Span& span, Extra (&extra)[kTileExtras]) const {
    Unit* const units = in_stage<Unit>(stage, 0);
    load_operands(place, span, [&](int operand) { return ToShared{units + operand * kUnits * kThreads}; });
    load_extras(place, span, extra);
  }

  __device__ void put_extras(int stage, const Extra (&extra)[kTileExtras]) const {
    if constexpr (Policy::kNeighbour) {
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) in_stage<Extra>(stage, kExtrasAt)[e * kThreads] = extra[e];
    }
  }

  __device__ void take(int stage, const Place&, const Span&, Tile& tile) const {
#pragma unroll
    for (int o = 0; o < Policy::kOperands; ++o)
#pragma unroll
      for (int u = 0; u < kUnits; ++u) tile.operand[o][u] = in_stage<Unit>(stage, 0)[(o * kUnits + u) * kThreads];
    if constexpr (Policy::kNeighbour) {
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) tile.extra[e] = in_stage<Extra>(stage, kExtrasAt)[e * kThreads];
    }
  }

  __device__ void put_folds(int stage, const Folds& folds) const {
#pragma unroll
    for (int line = 0; line < kPerLane; ++line) in_stage<State>(stage, kFoldsAt)[line * kThreads] = folds.before[line];
  }
  __device__ void take_folds(int stage, Folds& folds) const {
#pragma unroll
    for (int line = 0; line < kPerLane; ++line) folds.before[line] = in_stage<State>(stage, kFoldsAt)[line * kThreads];
  }

  __device__ void store(const Place& place, const Span& span, int result, Unit (&units)[kUnits]) const {
    auto* data = static_cast<Bits*>(p.results[result]);
    if constexpr (kAlong) {
      if (!p.aligned) return store_misaligned(data, place, span, units);
#pragma unroll
      for (int j = 0; j < kUnits; ++j) {
        const int q = position(j);
        if (!place.active || j >= p.per_lane || q >= span.left) continue;
        const Pack pack = p.backward ? reversed<Bits>(units[j]) : units[j];
        if (q + kRun <= span.left) {
          *reinterpret_cast<Pack*>(data + place.at + (p.backward ? index(span, q + kRun - 1) : index(span, q))) = pack;
        } else {
#pragma unroll
          for (int i = 0; i < kRun; ++i)
            if (q + i < span.left) data[place.at + index(span, q + i)] = get<Bits>(units[j], i);
        }
      }
    } else {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const int q = position(u);
        if (!place.active || u >= p.per_lane || q >= span.left) continue;
        data[place.at + index(span, q) * p.inner] = units[u];
      }
    }
  }

  // Packs come as they lie in memory: call this before they are used.
  __device__ void turn(const Place& place, const Span& span, Tile& tile) const {
    if constexpr (kAlong) {
      if (p.backward && p.aligned) reverse_each<Bits>(tile.operand);
      if constexpr (Policy::kNeighbour) {
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
          const int beyond = span.left - position(j);
          if (p.neighbour_before || beyond <= 0 || beyond >= kRun) continue;
#pragma unroll
          for (int i = 1; i < kRun; ++i)
            if (i == beyond) set<Bits>(tile.operand[Policy::kOperands - 1][j], i, this->edge(place.column));
        }
      }
    }
  }

  // A bit for each element of a unit: whether there is a boundary.
  struct Starts {
    uint32_t bits[kUnits];
  };

  __device__ Starts starts(const Place& place, const Span& span) const {
    Starts starts = {};
    if (!Policy::kStarts || !p.starts || !place.active) return starts;
    const int64_t stride = p.starts_at.axis_stride;
    const uint8_t* const from = p.starts + place.starts;
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      if (j >= p.per_lane) continue;
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const int q = position(j) + i;
        const int64_t at = index(span, q) + p.start_offset;
        if (q < span.left && at > 0 && at < p.length && from[at * stride]) starts.bits[j] |= 1u << i;
      }
    }
    return starts;
  }

  // ---- Folds

  __device__ Folds fold(const Place& place, const Span& span, const Tile& tile, const Starts& starts) const {
    Folds folds;
#pragma unroll
    for (int line = 0; line < kPerLane; ++line) folds.before[line] = identity();
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (j >= p.per_lane) continue;
      folds.before[j] = fold_run<Policy, kRun>([&](int i) { return input(tile, starts, j, i); }, p.options);
    }
    folds.warp = identity();
#pragma unroll
    for (int line = 0; line < kPerLane; ++line) {
      // (No branches on what is the same for all threads: they would keep the lines from overlapping.)
      State inclusive = folds.before[line];
#pragma unroll
      for (int bit = 0; bit < 5; ++bit) {
        const State left = shuffle_up(inclusive, run_stride << bit);
        if (run >= 1 << bit) inclusive = Policy::combine(left, inclusive);
      }
      State before = shuffle_up(inclusive, run_stride);
      if (run == 0) before = identity();
      const State all = shuffle_from(inclusive, last_run_lane);
      folds.before[line] = Policy::combine(folds.warp, before);
      const State with = Policy::combine(folds.warp, all);
      if (line < p.per_lane) folds.warp = with;
    }
    return folds;
  }

  // Writes the results of a tile, of which `base` is the fold of what comes before the warp's part.
  __device__ void finish(const Place& place, const Span& span, Tile& tile, const Starts& starts, const Folds& folds,
                         const State (&base)[kWidth]) const {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (j >= p.per_lane) continue;
      State state = Policy::combine(base[0], folds.before[j]);
      Unit first = {}, second = {};
      const auto put = [&](int i, Out<Acc> out) {
        if constexpr (kAlong) {
          set<Bits>(first, i, Element::store(out.first));
          if (Policy::kResults == 2) set<Bits>(second, i, Element::store(out.second));
        } else {
          first = Element::store(out.first);
          if (Policy::kResults == 2) second = Element::store(out.second);
        }
      };
      step_run<Policy, kRun>(state, [&](int i) { return input(tile, starts, j, i); }, p.options, put);
      tile.operand[0][j] = first;
      if constexpr (Policy::kResults == 2) tile.operand[1][j] = second;
    }
    store(place, span, 0, tile.operand[0]);
    if constexpr (Policy::kResults == 2) store(place, span, 1, tile.operand[1]);
  }

  __device__ void publish_warp(int slot, const Folds& folds) const {
    if (run != 0) return;
    totals(slot)[axis_warp * this->columns + column_in_block] = folds.warp;
  }

  // `base` of a thread: what comes before the tile, and its earlier warps.
  __device__ void earlier_warps(int slot, State (&base)[kWidth]) const {
    base[0] = this->before_warp(slot, axis_warp, column_in_block);
  }

  int run, column_in_warp, run_stride, last_run_lane;
  int axis_warp, column_in_block;

  static constexpr int kStagingBytes = kWarps * kPerLane * 32 * 16;

 private:
  // to(operand) is a ToRegisters or a ToShared.
  template <class To>
  __device__ void load_operands(const Place& place, const Span& span, To to) const {
    load_units(static_cast<const Bits*>(p.operands[0]), place.at, p.inner, place, span, to(0));
    if constexpr (Policy::kBroadcast) {
      load_units(static_cast<const Bits*>(p.operands[1]), place.a, p.a.axis_stride, place, span, to(1));
    } else {
#pragma unroll
      for (int o = 1; o < Policy::kOperands; ++o)
        load_units(static_cast<const Bits*>(p.operands[o]), place.at, p.inner, place, span, to(o));
    }
  }

  __device__ void load_extras(const Place& place, const Span& span, Extra (&extra)[kTileExtras]) const {
    if constexpr (Policy::kNeighbour) {
      const auto* y = static_cast<const Bits*>(p.operands[Policy::kOperands - 1]) + place.at;
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) {
        extra[e] = {};
        const int q = position(e) + (p.neighbour_before ? -1 : kRun);
        if (!place.active || e >= p.per_lane || q > span.left) continue;
        extra[e] = span.begin + q < 0 || q == span.left ? this->edge(place.column) : y[index(span, q) * p.inner];
      }
    }
  }

  template <class To>
  __device__ void load_units(const Bits* data, int64_t at, int64_t stride, const Place& place, const Span& span,
                             To to) const {
    if constexpr (kAlong) {
      if (Policy::kBroadcast && stride == 0) {
        const Bits value = place.active ? data[at] : Bits{};
        Pack pack = {};
#pragma unroll
        for (int i = 0; i < kRun; ++i) set<Bits>(pack, i, value);
#pragma unroll
        for (int j = 0; j < kUnits; ++j) to.put(j, pack);
        return;
      }
      if (!p.aligned) return load_misaligned(data, at, place, span, to);
#pragma unroll
      for (int j = 0; j < kUnits; ++j) {
        const int q = position(j);
        if (!place.active || j >= p.per_lane || q >= span.left) {
          to.put(j, Pack{});
        } else if (q + kRun <= span.left) {
          to.put(j,
                 *reinterpret_cast<const Pack*>(data + at + (p.backward ? index(span, q + kRun - 1) : index(span, q))));
        } else {
          Pack pack = {};
#pragma unroll
          for (int i = 0; i < kRun; ++i) {
            if (q + i >= span.left) continue;
            const Bits bits = data[at + index(span, q + i)];
            if (p.backward) {
              set<Bits>(pack, kRun - 1 - i, bits);
            } else {
              set<Bits>(pack, i, bits);
            }
          }
          to.put(j, pack);
        }
      }
    } else {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const int q = position(u);
        if (!place.active || u >= p.per_lane || q >= span.left) {
          to.put(u, Unit{});
        } else {
          to.put(u, data[at + index(span, q) * stride]);
        }
      }
    }
  }

  // Rows whose packs are not aligned are loaded and stored element by element, neighbouring lanes neighbouring
  // elements, and become packs in shared memory.
  static constexpr int kStagingOfWarp = kPerLane * 32 * 16;

  __device__ Bits* staging() const {
    return reinterpret_cast<Bits*>(dynamic_shared_memory() + p.staging_at + threadIdx.x / 32 * kStagingOfWarp);
  }

  // Calls body(element of the staging area, its offset in the array) for the elements that this lane moves.
  template <class Body>
  __device__ void each_staged(int64_t at, const Place& place, const Span& span, Body body) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int element = i * 32 + lane, owner = element / kRun;
      const int64_t owner_at = shuffle_from(at, owner);
      const bool owner_active = shuffle_from(static_cast<uint32_t>(place.active), owner);
      const int owner_run = owner & ((1 << p.run_bits) - 1);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int q = (((axis_warp * p.per_lane + j) << p.run_bits) + owner_run) * kRun + element % kRun;
        if (j < p.per_lane && owner_active && q < span.left)
          body(i, j, j * 32 * kRun + element, owner_at + index(span, q));
      }
    }
  }

  template <class To>
  __device__ void load_misaligned(const Bits* data, int64_t at, const Place& place, const Span& span, To to) const {
    if constexpr (kAlong) {
      Bits values[kRun][kPerLane] = {};
      each_staged(at, place, span, [&](int i, int j, int, int64_t offset) { values[i][j] = data[offset]; });
      __syncwarp();
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int i = 0; i < kRun; ++i)
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) staging()[j * 32 * kRun + i * 32 + lane] = values[i][j];
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kUnits; ++j) to.put(j, reinterpret_cast<const Pack*>(staging())[j * 32 + lane]);
    }
  }

  __device__ void store_misaligned(Bits* data, const Place& place, const Span& span, Unit (&units)[kUnits]) const {
    if constexpr (kAlong) {
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kUnits; ++j) reinterpret_cast<Pack*>(staging())[j * 32 + threadIdx.x % 32] = units[j];
      __syncwarp();
      each_staged(place.at, place, span,
                  [&](int, int, int element, int64_t offset) { data[offset] = staging()[element]; });
    }
  }

  // Element e of unit u.
  __device__ In<Acc> input(const Tile& tile, const Starts& starts, int u, int e) const {
    const auto bits = [&](int operand, int u, int e) {
      if constexpr (kLayout == Layout::kSingle) {
        return tile.operand[operand][u];
      } else {
        return get<Bits>(tile.operand[operand][u], e);
      }
    };
    In<Acc> in;
    in.x = Element::load(bits(0, u, e));
    if (Policy::kOperands > 1) in.a = Element::load(bits(1, u, e));
    if (Policy::kOperands > 2) in.y = Element::load(bits(2, u, e));
    in.start = Policy::kStarts && (starts.bits[u] >> e & 1);
    if constexpr (Policy::kNeighbour) {
      constexpr int kLast = Policy::kOperands - 1;
      const Bits before = e > 0 ? bits(kLast, u, e - 1) : tile.extra[u];
      const Bits after = e < kInUnit - 1 ? bits(kLast, u, e + 1) : tile.extra[u];
      in.neighbour = Element::load(p.neighbour_before ? before : after);
    }
    return in;
  }
};

}  // namespace jaxgpuops::scan
