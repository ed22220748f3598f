// Short rows (inner == 1) of the row engine that are not whole vectors of 16 bytes: a block takes neighbouring rows.
// The array is read once and written once.
//
// In memory these rows are one piece, a tile, which is copied in aligned vectors wherever rows begin. The block copies
// it to shared memory, where teams of lanes compute statistics of their rows. If a lane has at most one vector of a
// row, it overwrites that with results. For longer rows, a team stores what the results need from the row's statistics,
// and then results are computed by whole vectors, which may hold elements of several rows. Then the tile is copied
// back.
//
// Lanes, their vectors, and the order in which statistics are merged are those of rows_kernel, and so are all bits.
#pragma once

#include "common/cuda/async_copy.cuh"
#include "row_engine/cuda/in_registers.cuh"

namespace jaxgpuops::row_engine {

// Whether a policy has these kernels: its rows need nothing but their elements, and it has results of the full shape,
// or no other kernel.
template <class P>
constexpr bool kTiled = !P::kMasked && !P::kDecoded && !P::kHole && (P::kOutput || !P::kFast);

// What the results of a row need from its statistics.
template <class P>
struct alignas(16) TileRow {
  typename P::Final final;
  typename P::Row row;
};

// Shared memory: a tile of each operand, with room for partly filled vectors at both ends and one more. If a row has
// several vectors, also a TileRow for each row of the tile, and for as many rows as the last vector may reach beyond
// it.
template <class P>
struct TileParameters {
  static constexpr int kItem = sizeof(typename P::Element::Bits), kWidth = 16 / kItem;

  Parameters<P> of;
  int rows;           // rows of a block
  int operand_bytes;  // bytes of one operand's tile

  int shared_bytes(bool single) const {
    const int known = P::kOutput && !single ? rows + kWidth : 0;
    return P::kOperands * operand_bytes + known * static_cast<int>(sizeof(TileRow<P>));
  }
};

// The state of a block in tile_kernel. The functions are the phases of the kernel, in the order in which they run.
// kSingle: a lane has one vector of a row.
template <class P, bool kSingle>
struct TileBlock {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using Unit = Held<P, 1, true>;
  static constexpr int kWidth = Unit::kWidth, kItem = sizeof(Bits);

  const TileParameters<P>& t;
  const Parameters<P>& p = t.of;
  const int length = static_cast<int>(p.length), lane_bits = p.lane_bits, lanes = 1 << lane_bits;
  const int slot = threadIdx.x & (lanes - 1);
  unsigned char* const tile = dynamic_shared_memory();
  TileRow<P>* const known = reinterpret_cast<TileRow<P>*>(tile + P::kOperands * t.operand_bytes);
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

  // Vector u of the row of `size` elements that begins at byte `begin` of the tile.
  __device__ __forceinline__ Unit load(int begin, int size, int u) const {
    Unit unit;
#pragma unroll
    for (int o = 0; o < P::kOperands; ++o) {
      const Bits pad = P::pad(p.args, o);
      Pack& pack = unit.raw[o][0];
      if constexpr (kItem >= 4) {
        const auto* const elements = reinterpret_cast<const Bits*>(tile + o * t.operand_bytes + begin);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) set<Bits>(pack, i, u * kWidth + i < size ? elements[u * kWidth + i] : pad);
      } else {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) set<Bits>(pack, i, pad);
        if (u * kWidth >= size) continue;
        const auto* const windows = reinterpret_cast<const Pack*>(tile + o * t.operand_bytes + (begin & ~15)) + u;
        const Pack padding = pack;
        pack = between<kItem>(windows[0], windows[1], begin & 15);
        if (u * kWidth + kWidth > size) {
#pragma unroll
          for (int i = 1; i < kWidth; ++i)
            if (u * kWidth + i >= size) set<Bits>(pack, i, get<Bits>(padding, i));
        }
      }
    }
    return unit;
  }

  // Statistics of that row, computed by its team of lanes.
  __device__ __forceinline__ Stat<P> statistics(int begin, int size) const {
    const auto each = [&](auto f) {  // calls f for each vector of this lane
      if constexpr (kSingle) {
        f(load(begin, size, slot));
      } else {
#pragma unroll 1
        for (int u = slot; u * kWidth < size; u += lanes) f(load(begin, size, u));
      }
    };
    Stat<P> stat;
    Acc peak = Acc(0);
    if constexpr (P::kPeak) {
      peak = P::lowest();
      each([&](const Unit& unit) { peak = P::larger(peak, unit.peak(p.args)); });
      peak = merged_peak<P>(peak, 0, lane_bits);
      stat.of[0] = peak;
    }
    if constexpr (P::kSums > 0) {
      const auto guarded = P::guard(peak);
#pragma unroll
      for (int k = 0; k < P::kSums; ++k) stat.sum(k) = Acc(0);
      P::with_sum_args(p.args, [&](const auto& args) {
        each([&](const Unit& unit) {
#pragma unroll
          for (int k = 0; k < P::kSums; ++k) stat.sum(k) = stat.sum(k) + unit.sum(args, k, guarded, 0, kWidth);
        });
      });
#pragma unroll
      for (int k = 0; k < P::kSums; ++k) stat.sum(k) = merged_sum(stat.sum(k), 0, lane_bits);
    }
    return stat;
  }

  // Finishes the rows. Where lanes have single vectors, overwrites these with results.
  __device__ __forceinline__ void work() {
    // All threads make the same number of turns, since statistics() needs whole warps.
#pragma unroll 1
    for (int base = 0; base < rows; base += kTileThreads >> lane_bits) {
      const int mine = base + (threadIdx.x >> lane_bits);
      const bool exists = mine < rows;
      const int size = exists ? length : 0, begin = shift + mine * length * kItem;
      const Stat<P> stat = statistics(begin, size);
      if (!exists) continue;
      const auto row = P::row(p.args, first + mine, 0, length, 1);
      const auto final = P::finish(p.args, row, stat);
      if (slot == 0) P::write_row(p.args, first + mine, row, final);
      if constexpr (P::kOutput) {
        if constexpr (!kSingle) {
          if (slot == 0) known[mine] = {final, row};
        } else if (writes) {
          const Unit unit = load(begin, size, slot);
          Bits* const to = reinterpret_cast<Bits*>(tile + begin) + slot * kWidth;
          P::with_args(p.args, [&](const auto& args) {
#pragma unroll
            for (int i = 0; i < kWidth; ++i)
              if (slot * kWidth + i < length)
                to[i] = Element::store(P::output(args, row, final, unit.x(args, 0, i), unit.y(0, i)));
          });
        }
      }
    }
  }

  // Finishes rows that are shorter than a vector: a thread has a row, and computes only with elements that exist. (Of
  // rows of three 16-bit elements, padding was most of the work.)
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

  // Writes the tile. Single vectors have been replaced by results already.
  __device__ __forceinline__ void write() const {
    if constexpr (kSingle) {
      for (int b = threadIdx.x * 16; b < end; b += kTileThreads * 16)
        store(b, *reinterpret_cast<const Pack*>(tile + b));
      return;
    }
    const float inverse = 1.f / static_cast<float>(length);
    P::with_args(p.args, [&](const auto& args) {
#pragma unroll 1
      for (int b = threadIdx.x * 16; b < end; b += kTileThreads * 16) {
        Unit unit;
#pragma unroll
        for (int o = 0; o < P::kOperands; ++o)
          unit.raw[o][0] = *reinterpret_cast<const Pack*>(tile + o * t.operand_bytes + b);
        // `e` is negative in the first vector; it is below 2^14, so the quotient of floats is exact.
        const int e = (b - shift) / kItem;
        int r = static_cast<int>((static_cast<float>(max(e, 0)) + .5f) * inverse);
        int left = (r + 1) * length - e;
        TileRow<P> of = known[r];
        Acc values[kWidth];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (left == i) {
            of = known[++r];
            left += length;
          }
          values[i] = P::output(args, of.row, of.final, unit.x(args, 0, i), unit.y(0, i));
        }
        store(b, packed<Element>(values));
      }
    });
  }
};

template <class P>
__global__ void __launch_bounds__(kTileThreads) part_tile_kernel(const __grid_constant__ TileParameters<P> t) {
  TileBlock<P, true> block(t);
  block.fetch();
  block.work_on_parts();
  if constexpr (P::kOutput) {
    if (!block.writes) return;
    __syncthreads();
    block.write();
  }
}

template <class P, bool kSingle>
__global__ void __launch_bounds__(kTileThreads, P::kOperands == 1 ? 10 : 8)
    tile_kernel(const __grid_constant__ TileParameters<P> t) {
  TileBlock<P, kSingle> block(t);
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
    const bool single = bytes <= 16 << plan.lane_bits;
    launched.shared_bytes = t.shared_bytes(single);
    const auto kernel = bytes < 16 ? part_tile_kernel<P> : single ? tile_kernel<P, true> : tile_kernel<P, false>;
    return launch(stream, launched, kernel, t);
  } else {
    return cudaErrorInvalidValue;
  }
}

}  // namespace jaxgpuops::row_engine
