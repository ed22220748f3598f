// Short rows (inner == 1) of the row engine that are not whole vectors of 16 bytes, or so many vectors that a team of
// lanes would leave some of its lanes without work: a block takes neighbouring rows. The array is read once and written
// once.
//
// In memory these rows are one piece, a tile, which is copied in aligned vectors wherever rows begin. The block copies
// it to shared memory, where each team of lanes takes its row into registers, computes statistics, and overwrites the
// row with results. Then the tile is copied back.
//
// Lanes, their vectors, and the order in which statistics are merged are those of rows_kernel, and so are all bits.
#pragma once

#include "common/cuda/async_copy.cuh"
#include "row_engine/cuda/in_registers.cuh"

namespace jaxgpuops::row_engine {

// Whether a policy has these kernels: its rows need nothing but their elements, and it has results of the full shape,
// or no other kernel, or it is a sum of one array. Such a sum has one kernel only, as XLA takes those of the shortest
// rows.
template <class P>
constexpr bool kTiledForms = P::kOutput || !P::kFast;
template <class P>
constexpr bool kTiled =
    !P::kMasked && !P::kDecoded && !P::kHole && (kTiledForms<P> || (P::kSums > 0 && P::kOperands == 1));

template <class P>
struct TileParameters {
  Parameters<P> of;
  int rows;           // rows of a block
  int operand_bytes;  // shared memory of one operand's tile, with room for a partly filled vector at each end and one
                      // more
};

// The state of a block in tile_kernel. The functions are the phases of the kernel, in the order in which they run.
// kVectors: the most vectors of a row that a lane has. kWhole: all rows are whole vectors, in aligned arrays.
template <class P, int kVectors, bool kWhole>
struct TileBlock {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using Lane = Held<P, kVectors, true>;
  static constexpr int kWidth = Lane::kWidth, kItem = sizeof(Bits);

  const TileParameters<P>& t;
  const Parameters<P>& p = t.of;
  const int length = static_cast<int>(p.length), lane_bits = p.lane_bits, lanes = 1 << lane_bits;
  const int slot = threadIdx.x & (lanes - 1);
  unsigned char* const tile = dynamic_shared_memory();
  const int64_t first = int64_t{blockIdx.x} * t.rows, at = first * length;
  const int rows = static_cast<int>(min(int64_t{t.rows}, p.columns - first));
  const bool writes = P::kOutput && p.out != nullptr;
  // In shared memory, the tile begins as far from a multiple of 16 bytes as the results do in global memory (without
  // results: as the operand does).
  const int shift =
      static_cast<int>(reinterpret_cast<uintptr_t>(static_cast<const Bits*>(writes ? p.out : p.operands[0]) + at) & 15);
  const int end = shift + rows * length * kItem;

  __device__ __forceinline__ explicit TileBlock(const TileParameters<P>& t) : t(t) {}

  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int o = 0; o < P::kOperands; ++o) {
      const Bits* const from = static_cast<const Bits*>(p.operands[o]) + at;
      unsigned char* const to = tile + o * t.operand_bytes;
      int copied = shift;  // up to this byte, the tile has been copied
      if ((reinterpret_cast<uintptr_t>(from) & 15) == shift) {
        // Reads nothing beyond the end of the array.
        const int whole = first + rows == p.columns ? end & ~15 : (end + 15) & ~15;
        const auto* const windows = reinterpret_cast<const unsigned char*>(from) - shift;
#pragma unroll 4
        for (int b = threadIdx.x * 16; b < whole; b += kTileThreads * 16) copy_async(to + b, windows + b);
        commit_async_copies();
        copied = max(whole, shift);
      }
#pragma unroll 1
      for (int b = copied + threadIdx.x * kItem; b < end; b += kTileThreads * kItem)
        *reinterpret_cast<Bits*>(to + b) = from[(b - shift) / kItem];
    }
    wait_for_async_copies<0>();
    __syncthreads();
  }

  // Loads what this lane has of the row of `size` elements that begins at byte `begin` of the tile.
  __device__ __forceinline__ void load(int begin, int size, Lane& lane) const {
#pragma unroll
    for (int o = 0; o < P::kOperands; ++o) {
      const Bits pad = P::pad(p.args, o);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int u = slot + j * lanes, left = size - u * kWidth;
        const unsigned char* const from = tile + o * t.operand_bytes + begin + u * 16;
        Pack& pack = lane.raw[o][j];
        if constexpr (kItem >= 4 && !kWhole) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i) set<Bits>(pack, i, i < left ? reinterpret_cast<const Bits*>(from)[i] : pad);
        } else {
#pragma unroll
          for (int i = 0; i < kWidth; ++i) set<Bits>(pack, i, pad);
          if (left <= 0) continue;
          if constexpr (kWhole) {
            pack = *reinterpret_cast<const Pack*>(from);
          } else {
            const Pack padding = pack;
            const auto past = static_cast<int>(reinterpret_cast<uintptr_t>(from) & 3);
            const auto* const words = reinterpret_cast<const uint32_t*>(from - past);
#pragma unroll
            for (int w = 0; w < 4; ++w) pack.word[w] = funnel_right(words[w], words[w + 1], 8 * past);
            if (left < kWidth) {
#pragma unroll
              for (int i = 1; i < kWidth; ++i)
                if (i >= left) set<Bits>(pack, i, get<Bits>(padding, i));
            }
          }
        }
      }
    }
  }

  // Statistics of a row, computed by its team of lanes.
  __device__ __forceinline__ Stat<P> statistics(Lane& lane) const {
    Stat<P> stat;
    Acc peak = Acc(0);
    if constexpr (P::kPeak) stat.of[0] = peak = merged_peak<P>(lane.peak(p.args), 0, lane_bits);
    if constexpr (P::kSums > 0) {
      P::with_sum_args(p.args, [&](const auto& args) {
#pragma unroll
        for (int k = 0; k < P::kSums; ++k) stat.sum(k) = sum_and_keep<P>(args, k, lane, peak);
      });
#pragma unroll
      for (int k = 0; k < P::kSums; ++k) stat.sum(k) = merged_sum(stat.sum(k), 0, lane_bits);
    }
    return stat;
  }

  // Finishes the rows, and overwrites them with results.
  __device__ __forceinline__ void work() {
    // All threads make the same number of turns, since statistics() needs whole warps.
#pragma unroll 1
    for (int base = 0; base < rows; base += kTileThreads >> lane_bits) {
      const int mine = base + (threadIdx.x >> lane_bits);
      const bool exists = mine < rows;
      const int begin = shift + mine * length * kItem;
      Lane lane;
      load(begin, exists ? length : 0, lane);
      const Stat<P> stat = statistics(lane);
      if (!exists) continue;
      const auto row = P::row(p.args, first + mine, 0, length, 1);
      const auto final = P::finish(p.args, row, stat);
      if (slot == 0) P::write_row(p.args, first + mine, row, final);
      if constexpr (P::kOutput) {
        if (!writes) continue;
        const Acc factor = factor_of<P>(final, stat.of[0]);
        lane.forget();
        P::with_args(p.args, [&](const auto& args) {
#pragma unroll
          for (int j = 0; j < kVectors; ++j) {
            const int u = slot + j * lanes;
            if (kVectors > 1 && u * kWidth >= length) continue;
            Acc values[kWidth];
#pragma unroll
            for (int i = 0; i < kWidth; ++i) values[i] = result_of<P>(args, row, final, factor, lane, j, i);
            const Pack pack = packed<Element>(values);
            unsigned char* const to = tile + begin + u * 16;
            if constexpr (kWhole) {
              *reinterpret_cast<Pack*>(to) = pack;
            } else {
#pragma unroll
              for (int i = 0; i < kWidth; ++i)
                if (u * kWidth + i < length) reinterpret_cast<Bits*>(to)[i] = get<Bits>(pack, i);
            }
          }
        });
      }
    }
  }

  // Finishes rows that are shorter than a vector. A thread has a row and computes only with elements that exist:
  // padding them to a vector made most of the work for rows of three 16-bit elements.
  __device__ __forceinline__ void work_on_parts() {
    constexpr int kMost = kWidth > 1 ? kWidth - 1 : 1;
#pragma unroll 1
    for (int mine = threadIdx.x; mine < rows; mine += kTileThreads) {
      Bits held[P::kOperands][kMost];
      const auto element = [&](int o, int i) {
        return reinterpret_cast<Bits*>(tile + o * t.operand_bytes + shift) + mine * length + i;
      };
#pragma unroll
      for (int o = 0; o < P::kOperands; ++o)
#pragma unroll
        for (int i = 0; i < kMost; ++i)
          if (i < length) held[o][i] = *element(o, i);
      const auto x = [&](const auto& args, int i) { return P::value(args, Element::load(held[0][i])); };
      const auto y = [&](int i) { return Element::load(held[P::kOperands - 1][i]); };
      Stat<P> stat = Stat<P>::none();
      if constexpr (P::kPeak) {
        if constexpr (P::kSums == 0)
          stat.of[0] = P::value(p.args, Element::load(P::pad(p.args, 0)));  // statistics of no elements
#pragma unroll
        for (int i = 0; i < kMost; ++i)
          if (i < length) stat.of[0] = P::larger(stat.peak(), x(p.args, i));
      }
      if constexpr (P::kSums > 0) {
        const auto guarded = P::guard(stat.peak());  // not used if the operation has no peak
        P::with_sum_args(p.args, [&](const auto& args) {
#pragma unroll
          for (int k = 0; k < P::kSums; ++k) {
            Acc sum = Acc(0);
#pragma unroll
            for (int i = 0; i < kMost; ++i)
              if (i < length) sum = P::add(args, k, sum, x(args, i), y(i), guarded);
            stat.sum(k) = sum;
          }
        });
      }
      const auto row = P::row(p.args, first + mine, 0, length, 1);
      const auto final = P::finish(p.args, row, stat);
      P::write_row(p.args, first + mine, row, final);
      if constexpr (P::kOutput) {
        if (!writes) continue;
        P::with_args(p.args, [&](const auto& args) {
#pragma unroll
          for (int i = 0; i < kMost; ++i)
            if (i < length) *element(0, i) = Element::store(P::output(args, row, final, x(args, i), y(i)));
        });
      }
    }
  }

  // Stores the vector at byte b of the tile to global memory.
  __device__ __forceinline__ void store(int b, const Pack& pack) const {
    unsigned char* const out = reinterpret_cast<unsigned char*>(static_cast<Bits*>(p.out) + at) - shift;
    if (b >= shift && b + 16 <= end) {
      store_pack(reinterpret_cast<Pack*>(out + b), pack);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (b + i * kItem >= shift && b + i * kItem < end)
          *reinterpret_cast<Bits*>(out + b + i * kItem) = get<Bits>(pack, i);
    }
  }

  // Writes the tile, whose rows have been replaced by results.
  __device__ __forceinline__ void write() const {
    for (int b = threadIdx.x * 16; b < end; b += kTileThreads * 16) store(b, *reinterpret_cast<const Pack*>(tile + b));
  }
};

template <class P>
__global__ void __launch_bounds__(kTileThreads) part_tile_kernel(const __grid_constant__ TileParameters<P> t) {
  TileBlock<P, 1, false> block(t);
  block.fetch();
  block.work_on_parts();
  if constexpr (P::kOutput) {
    if (!block.writes) return;
    __syncthreads();
    block.write();
  }
}

template <class P, int kVectors, bool kWhole>
__global__ void __launch_bounds__(kTileThreads, P::kOperands == 1 && sizeof(typename P::Element::Acc) < 8 ? 10 : 8)
    tile_kernel(const __grid_constant__ TileParameters<P> t) {
  TileBlock<P, kVectors, kWhole> block(t);
  block.fetch();
  block.work();
  if constexpr (P::kOutput) {
    if (!block.writes) return;
    __syncthreads();
    block.write();
  }
}

template <class P>
cudaError_t run_tiles(cudaStream_t stream, const RowPlan& plan, const Parameters<P>& p) {
  if constexpr (kTiled<P>) {
    const int bytes = static_cast<int>(p.length * sizeof(typename P::Element::Bits));
    TileParameters<P> t{p};
    t.rows = kTileThreads >> plan.lane_bits;
    // If rows are so short that tiles would be small, each team of lanes has several rows.
    t.rows *= std::clamp(kTileBytes / std::max(1, t.rows * bytes), 1, kTileTurns);
    t.operand_bytes = (t.rows * bytes + 15) / 16 * 16 + 32;
    Launch launched;
    launched.block = dim3(kTileThreads);
    const int64_t blocks = (p.columns + t.rows - 1) / t.rows;
    if (plan.spans > 1 || blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    launched.grid = dim3(static_cast<unsigned>(blocks));
    launched.shared_bytes = P::kOperands * t.operand_bytes;
    void (*kernel)(TileParameters<P>) = tile_kernel<P, kOnlyVectors, false>;
    if constexpr (kTiledForms<P>) {
      constexpr bool kOne = P::kFast || !P::kOutput;  // other plans have kOnlyVectors, of which rows of tiles fill some
      if (bytes < 16) {
        kernel = part_tile_kernel<P>;
      } else if (kOne && bytes <= 16 << plan.lane_bits) {
        if constexpr (kOne) kernel = tile_kernel<P, 1, false>;
      } else if constexpr (P::kOutput && P::kOperands == 1) {
        if (p.aligned) kernel = tile_kernel<P, kOnlyVectors, true>;
      }
    }
    return launch(stream, launched, kernel, t);
  } else {
    return cudaErrorInvalidValue;
  }
}

}  // namespace jaxgpuops::row_engine
