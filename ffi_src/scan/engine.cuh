// The scan kernels, for any policy (policy.h), element and layout (shape.h). Operands are read once, results written
// once (two passes: read twice, the second time from L2).
//
// A block takes tiles. A lane folds its runs of positions in registers; the lanes of a warp fold theirs with shuffles,
// warps through shared memory, tiles by digits (shape.h). That gives each run the fold of all that comes before, with
// which its lane goes over it again for the results. What comes before a tile is known
//
//   tile        because nothing does: the axis is one tile
//   loop        because the block has walked over it
//   two_pass    from the tiles' sums, that a first kernel wrote
//   look_ahead  from the sums that other blocks publish in words of 32 bits each, with a tag beside it that says so:
//   one
//               64-bit store, so nothing has to be ordered. A block takes its tile from a counter and publishes before
//               it waits: whoever it waits for is running and not waiting for it. (After the look-ahead of CCCL's
//               warpspeed scan; only sums are ever waited for, so what is folded is always the same.)
//
// Positions count in the direction of the scan. Positions beyond the end hold whatever they do: nothing comes after.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "scan/plan.h"
#include "scan/policy.h"
#include "scan/scan.h"

namespace jaxgpuops::scan {

constexpr int kThreads = 32 * kWarps;
constexpr unsigned kAllLanes = 0xffffffffu;

enum class Phase { kSum, kScan, kLookAhead };

struct Parameters {
  const void* operands[3];
  void* results[2];
  const void* h0;
  const uint8_t* starts;
  unsigned* counter;
  uint64_t* words;
  Broadcast a, starts_at;
  Options options;
  int64_t inner, columns;  // columns: outer * inner
  int64_t length;
  int tile, tiles;
  unsigned strips;
  int run_bits, axis_warps, column_bits, per_lane, levels, folds;
  unsigned level_at[kMaxLevels];  // first word of a level
  Phase phase;
  bool backward;                            // positions count from the end of the array
  bool aligned;                             // whole packs are aligned to 16 bytes
  bool starts_aligned;                      // and the bytes of starts that belong to them, to their number
  int a_inner_stride, starts_inner_stride;  // kAcross
  bool neighbour_before;                    // the policy's neighbour is at the position before, else after
  int start_offset;                         // the boundary that the policy asks for is at starts[index + this]
};

// ---- Device facilities ----------------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ uint4 scan_shared_memory[];
  return reinterpret_cast<unsigned char*>(scan_shared_memory);
}

__device__ __forceinline__ uint64_t load_word(const uint64_t* word) {
#if defined(__CUDA_ARCH__)
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

__device__ __forceinline__ void store_word(uint64_t* word, uint64_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
#endif
}

// Lets the next kernel start, where it was launched to overlap; and waits for the end of the one before.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <class T>
struct Words {
  static_assert(sizeof(T) % 4 == 0);
  uint32_t word[sizeof(T) / 4];
};

template <class T>
__device__ __forceinline__ T shuffle_up(T value, int delta) {
  auto words = bits_as<Words<T>>(value);
#pragma unroll
  for (auto& word : words.word) word = __shfl_up_sync(kAllLanes, word, delta);
  return bits_as<T>(words);
}

template <class T>
__device__ __forceinline__ T shuffle(T value, int lane) {
  auto words = bits_as<Words<T>>(value);
#pragma unroll
  for (auto& word : words.word) word = __shfl_sync(kAllLanes, word, lane);
  return bits_as<T>(words);
}

// ---- The engine -----------------------------------------------------------------------------------------------------

// One thread's part of a block's work.
template <class Policy, Layout kLayout>
class Engine {
 public:
  using Element = typename Policy::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using State = typename Policy::State;

  static constexpr bool kAlong = kLayout == Layout::kAlong, kAcross = kLayout == Layout::kAcross;
  static constexpr RunShape kShape = run_shape(kLayout, Policy::kOperands, sizeof(Bits));
  static constexpr int kRun = kShape.run, kWidth = kShape.width, kPerLane = kShape.per_lane;
  static constexpr int kUnits = kAcross ? kRun : kPerLane;              // loads of an operand
  static constexpr int kInUnit = kAlong ? kRun : kAcross ? kWidth : 1;  // elements of one
  static constexpr int kLines = kAcross ? kWidth : kPerLane;            // folds of a lane
  static constexpr int kExtras = kAcross ? 1 : kPerLane;
  using Unit = std::conditional_t<kLayout == Layout::kSingle, Bits, Pack>;
  using Extra = std::conditional_t<kAcross, Pack, Bits>;
  using Bytes = std::conditional_t<kWidth == 8, uint64_t, std::conditional_t<kWidth == 4, uint32_t, uint16_t>>;

  struct Tile {
    Unit operand[Policy::kOperands][kUnits];
    Extra extra[Policy::kNeighbour ? kExtras : 1];  // neighbours that no unit has
  };

  // Where the columns of this thread are.
  struct Place {
    bool active;
    int64_t column;         // outer * inner + the inner index
    int64_t at, a, starts;  // offsets of position 0 of the array
    int64_t i;              // inner index
  };

  __device__ explicit Engine(const Parameters& p) : p(p) {
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

  __device__ int block_columns() const { return (32 >> p.run_bits << p.column_bits) * kWidth; }

  __device__ Place place(unsigned strip) const {
    Place place;
    const int64_t vector = int64_t{strip} * (32 >> p.run_bits << p.column_bits) + column_in_block;
    place.column = vector * kWidth;
    place.active = place.column < p.columns;
    const int64_t outer = kAlong ? vector : place.column / p.inner;
    place.i = kAlong ? 0 : place.column - outer * p.inner;
    place.at = outer * p.length * p.inner + place.i;
    if (Policy::kBroadcast && place.active) place.a = p.a.outer(outer) + inner_offset(p.a.inner, place.i);
    if (Policy::kStarts && p.starts && place.active)
      place.starts = p.starts_at.outer(outer) + inner_offset(p.starts_at.inner, place.i);
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
    load_units(static_cast<const Bits*>(p.operands[0]), place.at, p.inner, true, place, span, tile.operand[0]);
    if constexpr (Policy::kBroadcast) {
      const bool adjacent = !kAcross || p.a_inner_stride == 1;
      load_units(static_cast<const Bits*>(p.operands[1]), place.a + (kAcross && adjacent ? place.i : 0),
                 p.a.axis_stride, adjacent, place, span, tile.operand[1]);
    } else {
#pragma unroll
      for (int o = 1; o < Policy::kOperands; ++o)
        load_units(static_cast<const Bits*>(p.operands[o]), place.at, p.inner, true, place, span, tile.operand[o]);
    }
    if constexpr (Policy::kNeighbour) {
      const auto* y = static_cast<const Bits*>(p.operands[Policy::kOperands - 1]) + place.at;
#pragma unroll
      for (int e = 0; e < kExtras; ++e) {
        tile.extra[e] = {};
        const int q = position(e) + (p.neighbour_before ? -1 : kRun);
        if (!place.active || e >= p.per_lane || span.begin + q < 0 || q >= span.left) continue;
        if constexpr (kAcross) {
          tile.extra[e] = load_across(y + index(span, q) * p.inner, true);
        } else {
          tile.extra[e] = y[index(span, q) * p.inner];
        }
      }
    }
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
        const int q = kAcross ? position(0) + u : position(u);
        if (!place.active || (!kAcross && u >= p.per_lane) || q >= span.left) continue;
        Bits* const to = data + place.at + index(span, q) * p.inner;
        if constexpr (!kAcross) {
          *to = units[u];
        } else if (p.aligned) {
          *reinterpret_cast<Pack*>(to) = units[u];
        } else {
#pragma unroll
          for (int v = 0; v < kWidth; ++v) to[v] = get<Bits>(units[u], v);
        }
      }
    }
  }

  // Packs come as they lie in memory: call this before they are used.
  __device__ void turn(Tile& tile) const {
    if constexpr (kAlong) {
      if (!p.backward || !p.aligned) return;
#pragma unroll
      for (auto& units : tile.operand)
#pragma unroll
        for (auto& unit : units) unit = reversed<Bits>(unit);
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
    if constexpr (kAcross) {
      // Columns share a byte, or have bytes beside each other.
      const bool shared = p.starts_inner_stride == 0;
      const uint8_t* const from = p.starts + place.starts + (shared ? 0 : place.i);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const int q = position(0) + u;
        const int64_t at = index(span, q) + p.start_offset;
        if (q >= span.left || at <= 0 || at >= p.length) continue;
        if (shared) {
          if (from[at * stride]) starts.bits[u] = (1u << kWidth) - 1;
        } else if (p.starts_aligned) {
          const auto bytes = *reinterpret_cast<const Bytes*>(from + at * stride);
#pragma unroll
          for (int v = 0; v < kWidth; ++v)
            if (bytes >> (8 * v) & 255) starts.bits[u] |= 1u << v;
        } else {
#pragma unroll 1
          for (int v = 0; v < kWidth; ++v)
            if (from[at * stride + v]) starts.bits[u] |= 1u << v;
        }
      }
    } else {
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
    }
    return starts;
  }

  // ---- Folds

  __device__ State identity() const { return Policy::identity(p.options); }

  // The fold before each run, within the warp, and that of the whole warp, for each column.
  struct Folds {
    State before[kLines];
    State warp[kWidth];
  };

  __device__ Folds fold(const Place& place, const Span& span, const Tile& tile, const Starts& starts) const {
    Folds folds;
#pragma unroll
    for (int line = 0; line < kLines; ++line) folds.before[line] = identity();
    if constexpr (kAcross) {
#pragma unroll
      for (int u = 0; u < kRun; ++u) {
#pragma unroll
        for (int v = 0; v < kWidth; ++v) {
          const In<Acc> in = input(place, span, tile, starts, u, v);
          if (u == 0) {
            folds.before[v] = Policy::first(in, p.options);
          } else {
            Policy::step(folds.before[v], in, p.options);
          }
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        if (j >= p.per_lane) continue;
        folds.before[j] = Policy::first(input(place, span, tile, starts, j, 0), p.options);
#pragma unroll
        for (int i = 1; i < kRun; ++i) Policy::step(folds.before[j], input(place, span, tile, starts, j, i), p.options);
      }
    }
#pragma unroll
    for (int v = 0; v < kWidth; ++v) folds.warp[v] = identity();
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
      // (No branches on what is the same for all threads: they would keep the lines from overlapping.)
      State inclusive = folds.before[line];
#pragma unroll
      for (int bit = 0; bit < 5; ++bit) {
        if (kAcross && bit >= p.run_bits) continue;
        const State left = shuffle_up(inclusive, run_stride << bit);
        if (run >= 1 << bit) inclusive = Policy::combine(left, inclusive);
      }
      State before = shuffle_up(inclusive, run_stride);
      if (run == 0) before = identity();
      const State all = shuffle(inclusive, last_run_lane);
      if constexpr (kAcross) {
        folds.before[line] = before;
        folds.warp[line] = all;
      } else {
        folds.before[line] = Policy::combine(folds.warp[0], before);
        const State with = Policy::combine(folds.warp[0], all);
        if (line < p.per_lane) folds.warp[0] = with;
      }
    }
    return folds;
  }

  // Writes the results of a tile, of which `base` is the fold of what comes before the warp's part.
  __device__ void finish(const Place& place, const Span& span, Tile& tile, const Starts& starts, const Folds& folds,
                         const State (&base)[kWidth]) const {
    if constexpr (kAcross) {
      State state[kWidth];
#pragma unroll
      for (int v = 0; v < kWidth; ++v) state[v] = Policy::combine(base[v], folds.before[v]);
#pragma unroll
      for (int u = 0; u < kRun; ++u) {
        Pack first = {}, second = {};
#pragma unroll
        for (int v = 0; v < kWidth; ++v) {
          const Out<Acc> out = Policy::step(state[v], input(place, span, tile, starts, u, v), p.options);
          set<Bits>(first, v, Element::store(out.first));
          if (Policy::kResults == 2) set<Bits>(second, v, Element::store(out.second));
        }
        tile.operand[0][u] = first;
        if constexpr (Policy::kResults == 2) tile.operand[1][u] = second;
      }
    } else {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        if (j >= p.per_lane) continue;
        State state = Policy::combine(base[0], folds.before[j]);
        Unit first = {}, second = {};
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
          const Out<Acc> out = Policy::step(state, input(place, span, tile, starts, j, i), p.options);
          if constexpr (kAlong) {
            set<Bits>(first, i, Element::store(out.first));
            if (Policy::kResults == 2) set<Bits>(second, i, Element::store(out.second));
          } else {
            first = Element::store(out.first);
            if (Policy::kResults == 2) second = Element::store(out.second);
          }
        }
        tile.operand[0][j] = first;
        if constexpr (Policy::kResults == 2) tile.operand[1][j] = second;
      }
    }
    store(place, span, 0, tile.operand[0]);
    if constexpr (Policy::kResults == 2) store(place, span, 1, tile.operand[1]);
  }

  // ---- Between warps. Shared memory:
  //   staging  packs of misaligned rows   (kAlong, only where they are)
  //   totals   of warps: [2][axis_warps][columns], of this tile and the last
  //   carry    what comes before the tile: [2][columns]
  //   folds    of each level, or in two passes of each group of tiles: [folds][columns]   (only where blocks share)

  __device__ State* totals(int parity) const { return states() + parity * p.axis_warps * block_columns(); }
  __device__ State* carry(int parity) const { return states() + (2 * p.axis_warps + parity) * block_columns(); }
  __device__ State* level_folds() const { return states() + (2 * p.axis_warps + 2) * block_columns(); }
  __device__ void* after_states() const { return level_folds() + p.folds * block_columns(); }

  __device__ void publish_warp(int parity, const Folds& folds) const {
    if (run != 0) return;
#pragma unroll
    for (int v = 0; v < kWidth; ++v)
      totals(parity)[axis_warp * block_columns() + column_in_block * kWidth + v] = folds.warp[v];
  }

  // `base` of a thread: what comes before the tile, and its earlier warps.
  __device__ void earlier_warps(int parity, int carry_parity, State (&base)[kWidth]) const {
#pragma unroll
    for (int v = 0; v < kWidth; ++v) {
      State fold = identity();
#pragma unroll
      for (int w = 0; w < kWarps - 1; ++w) {
        if (w >= axis_warp) continue;
        fold = Policy::combine(fold, totals(parity)[w * block_columns() + column_in_block * kWidth + v]);
      }
      base[v] = Policy::combine(carry(carry_parity)[column_in_block * kWidth + v], fold);
    }
  }

  __device__ State tile_total(int parity, int column) const {
    State fold = identity();
    for (int w = 0; w < p.axis_warps; ++w) fold = Policy::combine(fold, totals(parity)[w * block_columns() + column]);
    return fold;
  }

  // The state before the first position.
  __device__ State initial(int64_t column) const {
    if constexpr (Policy::kInitial) {
      if (p.h0 && column < p.columns) return Policy::constant(Element::load(static_cast<const Bits*>(p.h0)[column]));
    }
    return identity();
  }

  const Parameters& p;
  int run, column_in_warp, run_stride, last_run_lane;
  int axis_warp, column_in_block;

  static constexpr int kStagingBytes = kWarps * kPerLane * 32 * 16;

 private:
  __device__ State* states() const {
    return reinterpret_cast<State*>(shared_memory() + (kAlong && !p.aligned ? kStagingBytes : 0));
  }

  // Columns beside each other, or that share an element.
  __device__ Pack load_across(const Bits* data, bool adjacent) const {
    if (adjacent && p.aligned) return *reinterpret_cast<const Pack*>(data);
    Pack pack = {};
#pragma unroll
    for (int v = 0; v < kWidth; ++v) set<Bits>(pack, v, data[adjacent ? v : 0]);
    return pack;
  }

  // kAcross has the strides of columns, 0 or 1, in the parameters.
  __device__ static int64_t inner_offset(const IndexMap& map, int64_t i) {
    return kLayout == Layout::kSingle ? map(i) : 0;
  }

  __device__ void load_units(const Bits* data, int64_t at, int64_t stride, bool adjacent, const Place& place,
                             const Span& span, Unit (&units)[kUnits]) const {
    if constexpr (kAlong) {
      if (Policy::kBroadcast && stride == 0) {
        const Bits value = place.active ? data[at] : Bits{};
#pragma unroll
        for (auto& unit : units)
#pragma unroll
          for (int i = 0; i < kRun; ++i) set<Bits>(unit, i, value);
        return;
      }
      if (!p.aligned) return load_misaligned(data, at, place, span, units);
#pragma unroll
      for (int j = 0; j < kUnits; ++j) {
        units[j] = {};
        const int q = position(j);
        if (!place.active || j >= p.per_lane || q >= span.left) continue;
        if (q + kRun <= span.left) {
          units[j] =
              *reinterpret_cast<const Pack*>(data + at + (p.backward ? index(span, q + kRun - 1) : index(span, q)));
        } else {
#pragma unroll
          for (int i = 0; i < kRun; ++i) {
            if (q + i >= span.left) continue;
            const Bits bits = data[at + index(span, q + i)];
            if (p.backward) {
              set<Bits>(units[j], kRun - 1 - i, bits);
            } else {
              set<Bits>(units[j], i, bits);
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        units[u] = {};
        const int q = kAcross ? position(0) + u : position(u);
        if (!place.active || (!kAcross && u >= p.per_lane) || q >= span.left) continue;
        if constexpr (kAcross) {
          units[u] = load_across(data + at + index(span, q) * stride, adjacent);
        } else {
          units[u] = data[at + index(span, q) * stride];
        }
      }
    }
  }

  // Rows whose packs are not aligned are loaded and stored element by element, neighbouring lanes neighbouring
  // elements, and become packs in shared memory.
  static constexpr int kStagingOfWarp = kPerLane * 32 * 16;

  __device__ Bits* staging() const {
    return reinterpret_cast<Bits*>(shared_memory() + threadIdx.x / 32 * kStagingOfWarp);
  }

  // Calls body(element of the staging area, its offset in the array) for the elements that this lane moves.
  template <class Body>
  __device__ void each_staged(int64_t at, const Place& place, const Span& span, Body body) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int element = i * 32 + lane, owner = element / kRun;
      const int64_t owner_at = shuffle(at, owner);
      const bool owner_active = shuffle(static_cast<uint32_t>(place.active), owner);
      const int owner_run = owner & ((1 << p.run_bits) - 1);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int q = (((axis_warp * p.per_lane + j) << p.run_bits) + owner_run) * kRun + element % kRun;
        if (j < p.per_lane && owner_active && q < span.left)
          body(i, j, j * 32 * kRun + element, owner_at + index(span, q));
      }
    }
  }

  __device__ void load_misaligned(const Bits* data, int64_t at, const Place& place, const Span& span,
                                  Unit (&units)[kUnits]) const {
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
      for (int j = 0; j < kUnits; ++j) units[j] = reinterpret_cast<const Pack*>(staging())[j * 32 + lane];
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
  __device__ In<Acc> input(const Place& place, const Span& span, const Tile& tile, const Starts& starts, int u,
                           int e) const {
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
      Bits before, after;
      int q;
      if constexpr (kAlong) {
        q = position(u) + e;
        before = e > 0 ? bits(kLast, u, e - 1) : tile.extra[u];
        after = e < kRun - 1 ? bits(kLast, u, e + 1) : tile.extra[u];
      } else if constexpr (kAcross) {
        q = position(0) + u;
        before = u > 0 ? bits(kLast, u - 1, e) : get<Bits>(tile.extra[0], e);
        after = u < kRun - 1 ? bits(kLast, u + 1, e) : get<Bits>(tile.extra[0], e);
      } else {
        q = position(u);
        before = after = tile.extra[u];
      }
      in.neighbour = Element::load(p.neighbour_before ? before : after);
      if (p.neighbour_before ? span.begin + q == 0 : q == span.left - 1) {
        in.neighbour = Policy::edge(p.options);
        if (p.h0 && place.active)
          in.neighbour = Element::load(static_cast<const Bits*>(p.h0)[place.column + (kAcross ? e : 0)]);
      }
    }
    return in;
  }
};

// What comes before the next tile of a column, for the thread that keeps it: folds of the levels below. See kGroup.
template <class Policy>
class Counter {
 public:
  using State = typename Policy::State;

  __device__ explicit Counter(const Parameters& p) : p(p) {
    low = high = Policy::identity(p.options);
    for (int level = 0; level < kMaxLevels; ++level) levels[level] = low;
  }

  // Adds tile t. Returns the fold up to it.
  __device__ State add(int t, State tile) {
    low = Policy::combine(low, tile);
    if ((t + 1) % kGroup == 0) {
      State sum = low;
      low = Policy::identity(p.options);
      int level = 1;
      for (; ((t + 1) >> (kGroupBits * level)) % kGroup == 0 && level < p.levels - 1; ++level) {
        sum = Policy::combine(levels[level], sum);
        levels[level] = Policy::identity(p.options);
      }
      levels[level] = Policy::combine(levels[level], sum);
      high = Policy::identity(p.options);
      for (level = p.levels - 1; level > 0; --level) high = Policy::combine(high, levels[level]);
    }
    return Policy::combine(high, low);
  }

 private:
  const Parameters& p;
  State low, high;  // of level 0; of the others
  State levels[kMaxLevels];
};

// Blocks that registers must leave room for. What hides the latency of memory is other blocks, or, across columns,
// where blocks are few, the next tile of a loop, loaded early.
template <class Policy, Layout kLayout>
constexpr int kTileBlocks =
    Policy::kOperands == 1 && sizeof(typename Policy::State) <= 8 && kLayout != Layout::kAcross ? 5
    : Policy::kOperands == 1                                                                    ? 4
                                                                                                : 3;
template <class Policy, Layout kLayout>
constexpr int kLoopBlocks = kLayout == Layout::kAcross ? 2 : kTileBlocks<Policy, kLayout>;

// Axes of one tile.
template <class Policy, Layout kLayout>
__global__ void __launch_bounds__(kThreads, (kTileBlocks<Policy, kLayout>))
    scan_tile(const __grid_constant__ Parameters p) {
  using Work = Engine<Policy, kLayout>;
  const Work work(p);
  const auto place = work.place(blockIdx.x);
  const auto span = work.span(0);
  typename Work::Tile tile;
  work.load(place, span, tile);
  work.turn(tile);
  const auto starts = work.starts(place, span);
  const auto folds = work.fold(place, span, tile, starts);
  typename Work::State base[Work::kWidth];
  if (p.axis_warps == 1) {
#pragma unroll
    for (int v = 0; v < Work::kWidth; ++v) base[v] = work.initial(place.column + v);
  } else {
    const int columns = work.block_columns();
    if (threadIdx.x < columns) work.carry(0)[threadIdx.x] = work.initial(int64_t{blockIdx.x} * columns + threadIdx.x);
    work.publish_warp(0, folds);
    __syncthreads();
    work.earlier_warps(0, 0, base);
  }
  work.finish(place, span, tile, starts, folds, base);
}

template <class Policy, Layout kLayout>
__global__ void __launch_bounds__(kThreads, (kLoopBlocks<Policy, kLayout>))
    scan_loop(const __grid_constant__ Parameters p) {
  using Work = Engine<Policy, kLayout>;
  using State = typename Work::State;
  const Work work(p);
  const auto place = work.place(blockIdx.x);
  const int columns = work.block_columns();
  const bool keeps = threadIdx.x < columns;  // what comes before the next tile, for a column
  constexpr bool kAhead = kLayout == Layout::kAcross;
  typename Work::Tile tile, next;
  Counter<Policy> counter(p);
  const State initial = keeps ? work.initial(int64_t{blockIdx.x} * columns + threadIdx.x) : work.identity();
  if (keeps) work.carry(0)[threadIdx.x] = initial;

  for (int t = kAhead ? -1 : 0;; ++t) {  // with kAhead there is only a next tile at first
    const bool more = t + 1 < p.tiles;
    if (kAhead && more) work.load(place, work.span(t + 1), next);
    if (t >= 0) {
      const auto span = work.span(t);
      if (!kAhead) work.load(place, span, tile);
      work.turn(tile);
      const auto starts = work.starts(place, span);
      const auto folds = work.fold(place, span, tile, starts);
      work.publish_warp(t % 2, folds);
      __syncthreads();
      State base[Work::kWidth];
      work.earlier_warps(t % 2, t % 2, base);
      if (more && keeps)
        work.carry((t + 1) % 2)[threadIdx.x] =
            Policy::combine(initial, counter.add(t, work.tile_total(t % 2, threadIdx.x)));
      work.finish(place, span, tile, starts, folds, base);
    }
    if (!more) return;
    if (kAhead) tile = next;
  }
}

// ---- Blocks that share an axis --------------------------------------------------------------------------------------

constexpr uint64_t kThere = uint64_t{1} << 32;

// The sums of tiles and of groups of them, in global memory.
template <class Policy>
struct Sums {
  using State = typename Policy::State;
  static constexpr int kWords = sizeof(State) / 4;
  static constexpr int kBatch = kWords >= 8 ? 2 : 16 / kWords;  // loaded together

  const Parameters& p;

  __device__ uint64_t* at(int level, int index, int64_t column) const {
    return p.words + ((p.level_at[level] + static_cast<int64_t>(index)) * p.columns + column) * kWords;
  }

  __device__ void publish(int level, int index, int64_t column, State state) const {
    const auto words = bits_as<Words<State>>(state);
    uint64_t* to = at(level, index, column);
#pragma unroll
    for (int w = 0; w < kWords; ++w) store_word(to + w, kThere | words.word[w]);
  }

  // The same by a warp, for a block of one column: one load for all, so that blocks that wait do not crowd the cache.
  __device__ State fold_by_warp(int level, int first, int count, int64_t column) const {
    const int lane = threadIdx.x % 32;
    const uint64_t* from = at(level, first + min(lane, max(count - 1, 0)), column);
    Words<State> words;
    bool there;
    do {
      there = true;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint64_t word = load_word(from + w);
        there = there && (word >= kThere || lane >= count);
        words.word[w] = static_cast<uint32_t>(word);
      }
    } while (!__all_sync(kAllLanes, there));
    const State mine = bits_as<State>(words);
    State state = Policy::identity(p.options);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const State with = Policy::combine(state, shuffle(mine, i));
      if (i < count) state = with;
    }
    return state;
  }

  // The fold of `count` sums of a level from `first` on; waits until they are there.
  __device__ State fold(int level, int first, int count, int64_t column) const {
    State state = Policy::identity(p.options);
    for (int begin = 0; begin < count; begin += kBatch) {
      Words<State> words[kBatch];
      bool there;
      do {
        there = true;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (begin + i >= count) continue;
          const uint64_t* from = at(level, first + begin + i, column);
#pragma unroll
          for (int w = 0; w < kWords; ++w) {
            const uint64_t word = load_word(from + w);
            there = there && word >= kThere;
            words[i].word[w] = static_cast<uint32_t>(word);
          }
        }
      } while (!there);
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (begin + i < count) state = Policy::combine(state, bits_as<State>(words[i]));
    }
    return state;
  }
};

// Makes all words say that nothing is there.
static __global__ void clear_workspace(unsigned* counter, uint64_t* words, int64_t count) {
  let_next_start();
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (first == 0) *counter = 0;
  for (int64_t i = first; i < count; i += int64_t{gridDim.x} * blockDim.x) words[i] = 0;
}

// A tile a block.
template <class Policy, Layout kLayout>
__global__ void __launch_bounds__(kThreads, (kTileBlocks<Policy, kLayout>))
    scan_shared(const __grid_constant__ Parameters p) {
  using Work = Engine<Policy, kLayout>;
  using State = typename Work::State;
  const Work work(p);
  const Sums<Policy> sums{p};
  const int columns = work.block_columns();
  const bool look_ahead = p.phase == Phase::kLookAhead;
  unsigned ticket = blockIdx.x;
  if (look_ahead) {
    auto* const slot = reinterpret_cast<unsigned*>(work.after_states());
    wait_for_previous();
    if (threadIdx.x == 0) *slot = atomicAdd(p.counter, 1u);
    __syncthreads();
    ticket = *slot;
  } else if (p.phase == Phase::kSum) {
    let_next_start();
  }

  const unsigned strip = ticket % p.strips;
  const int t = static_cast<int>(ticket / p.strips);
  const auto place = work.place(strip);
  const auto span = work.span(t);
  typename Work::Tile tile;
  work.load(place, span, tile);
  const int64_t column = int64_t{strip} * columns + threadIdx.x;  // that this thread keeps
  const bool keeps = threadIdx.x < columns && column < p.columns;
  work.turn(tile);
  const auto starts = work.starts(place, span);
  const auto folds = work.fold(place, span, tile, starts);
  work.publish_warp(0, folds);
  __syncthreads();

  State total = work.identity();
  if (keeps) {
    total = work.tile_total(0, threadIdx.x);
    if (p.phase != Phase::kScan) sums.publish(0, t, column, total);
  }
  if (p.phase == Phase::kSum) return;

  // Folds of levels; in two passes, where there are sums of tiles only, of the groups of tiles that come before. What
  // others wait for comes first, by threads that wait for nothing else: the sum of a level that ends here.
  if (p.phase == Phase::kScan) wait_for_previous();
  const int groups = look_ahead ? p.levels : (t + kGroup - 1) / kGroup;
  const auto first_of = [&](int group) {
    return look_ahead ? (t >> (kGroupBits * group)) / kGroup * kGroup : group * kGroup;
  };
  const auto count_of = [&](int group) {
    return min((look_ahead ? t >> (kGroupBits * group) : t) - first_of(group), kGroup);
  };
  const auto fold_up = [&](auto fold) {  // the sums of levels that end with this tile
    State sum = total;
    for (int level = 0;; ++level) {
      const State before = fold(level);
      if (level == 0 && keeps) work.level_folds()[threadIdx.x] = before;
      if (count_of(level) != kGroup - 1 || level + 1 >= p.levels) break;
      sum = Policy::combine(before, sum);
      if (keeps) sums.publish(level + 1, (t >> (kGroupBits * level)) / kGroup, column, sum);
    }
  };
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (columns == 1) {
    const int64_t at = strip;
    const auto fold = [&](int group) {
      return sums.fold_by_warp(look_ahead ? group : 0, first_of(group), count_of(group), at);
    };
    if (look_ahead && warp == 0) fold_up(fold);
    for (int group = look_ahead ? (warp == 0 ? groups : warp) : warp; group < groups;
         group += look_ahead ? warps - 1 : warps) {
      const State sum = fold(group);
      if (threadIdx.x % 32 == 0) work.level_folds()[group] = sum;
    }
  } else {
    const int keepers = look_ahead ? (columns + 31) / 32 * 32 : 0;  // threads of the warps that fold up
    if (look_ahead && keeps)
      fold_up([&](int level) { return sums.fold(level, first_of(level), count_of(level), column); });
    for (int i = static_cast<int>(threadIdx.x) - keepers + (look_ahead ? columns : 0);
         threadIdx.x >= keepers && i < groups * columns; i += blockDim.x - keepers) {
      const int group = i / columns, c = i - group * columns;
      const int64_t at = int64_t{strip} * columns + c;
      if (at < p.columns)
        work.level_folds()[i] = sums.fold(look_ahead ? group : 0, first_of(group), count_of(group), at);
    }
  }
  __syncthreads();

  if (keeps) {
    const auto fold = [&](int i) { return work.level_folds()[i * columns + threadIdx.x]; };
    State low = work.identity(), high = work.identity();
    if (look_ahead) {
      for (int level = p.levels - 1; level > 0; --level) high = Policy::combine(high, fold(level));
      low = fold(0);
    } else {
      const int full = t / kGroup;
      State level2 = work.identity(), level1 = work.identity();
      for (int group = 0; group < full; ++group) {
        level1 = Policy::combine(level1, fold(group));
        if ((group + 1) % kGroup == 0) {
          level2 = Policy::combine(level2, level1);
          level1 = work.identity();
        }
      }
      high = Policy::combine(p.levels > 2 ? Policy::combine(high, level2) : high, level1);
      if (t % kGroup != 0) low = fold(full);
    }
    work.carry(0)[threadIdx.x] = Policy::combine(work.initial(column), Policy::combine(high, low));
  }
  __syncthreads();

  State base[Work::kWidth];
  work.earlier_warps(0, 0, base);
  work.finish(place, span, tile, starts, folds, base);
}

// ---- Launches -------------------------------------------------------------------------------------------------------

template <class Policy, Layout kLayout>
cudaError_t launch_layout(cudaStream_t stream, const Plan& plan, Parameters p) {
  using Work = Engine<Policy, kLayout>;
  const size_t columns = (32 >> p.run_bits << p.column_bits) * Work::kWidth;
  const size_t staging = kLayout == Layout::kAlong && !p.aligned ? Work::kStagingBytes : 0;
  const auto shared = [&](size_t folds) {
    return staging + (2 * p.axis_warps + 2 + folds) * columns * sizeof(typename Policy::State);
  };
  const dim3 block(plan.threads());
  if (plan.algorithm == Algorithm::kLoop) {
    if (plan.tiles > 1) return launch(stream, {dim3(p.strips), block, shared(0)}, scan_loop<Policy, kLayout>, p);
    const size_t bytes = plan.axis_warps == 1 ? staging : shared(0);
    return launch(stream, {dim3(p.strips), block, bytes}, scan_tile<Policy, kLayout>, p);
  }

  const unsigned tickets = p.strips * static_cast<unsigned>(p.tiles);
  const bool small = plan.algorithm == Algorithm::kTwoPass;
  p.folds = small ? static_cast<int>((plan.tiles + kGroup - 1) / kGroup) : plan.levels;
  unsigned tiles = 0;
  for (int level = 0; level < plan.levels; ++level) {
    p.level_at[level] = tiles;
    tiles += static_cast<unsigned>(((plan.tiles - 1) >> (kGroupBits * level)) + 1);
  }
  Launch shape{dim3(tickets), block, shared(p.folds) + 16};
  cudaError_t status;
  if (small) {
    p.phase = Phase::kSum;
    status = launch(stream, shape, scan_shared<Policy, kLayout>, p);
    p.phase = Phase::kScan;
  } else {
    const int64_t words = tiles * p.columns * Sums<Policy>::kWords;
    const auto blocks = static_cast<unsigned>((words + 2047) / 2048);
    status = launch(stream, {dim3(blocks), dim3(256)}, clear_workspace, p.counter, p.words, words);
    p.phase = Phase::kLookAhead;
  }
  if (status != cudaSuccess) return status;
  shape.overlap = plan.overlap;
  return launch(stream, shape, scan_shared<Policy, kLayout>, p);
}

// Everything a kernel needs that does not depend on the policy.
Parameters parameters_of(const Plan& plan, const Problem& problem, const Buffers& buffers, void* workspace);

// As is_rare() of the plan.
template <class Policy>
constexpr bool kRare = is_rare(Policy::kKind, Policy::kProduct, Policy::kCut, Policy::Element::kDType);

template <class Policy>
cudaError_t launch_policy(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                          void* workspace) {
  const Parameters p = parameters_of(plan, problem, buffers, workspace);
  if constexpr (!kRare<Policy>) {
    if (plan.layout == Layout::kAlong) return launch_layout<Policy, Layout::kAlong>(stream, plan, p);
    if (plan.layout == Layout::kAcross) return launch_layout<Policy, Layout::kAcross>(stream, plan, p);
  }
  return launch_layout<Policy, Layout::kSingle>(stream, plan, p);
}

}  // namespace jaxgpuops::scan
