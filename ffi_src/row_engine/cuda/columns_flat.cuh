// Columns (inner > 1) of which few are beside each other, along an axis of any length: an outer index is a flat row of
// length * inner elements, read in packs of 16 bytes. After `period` packs, which are `turns` positions, a pack has the
// same columns again; so a thread that goes on by whole periods keeps statistics of the columns of one pack, whatever
// inner is. The threads' statistics of a column are merged at the end.
//
// A block has a whole flat row, and reads it again for the results (from the L1 or L2 cache); or blocks have parts of
// it and exchange statistics: in a cluster, or else by the workspace. Then a second kernel merges statistics, and a
// third goes over the array backwards and writes the results. If columns are few, each block of the third merges what
// it needs, and the second is left out. The array is read and written once, and read once more if it is larger than the
// L2 cache. If a period has more packs than a block has threads, each block has a slice of it. Works on any GPU.
//
// A flat row may begin anywhere. For statistics, the first pack begins with the row; packs that are not aligned are put
// together from two aligned ones, so the bits do not depend on where the row begins. Results are written in aligned
// packs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/bulk_copy.cuh"
#include "row_engine/cuda/columns.cuh"

namespace jaxgpuops::row_engine {

// Whether an operation has these kernels.
template <class P>
constexpr bool kFlat = !P::kMasked && !P::kDecoded && !P::kHole;

template <class P>
struct FlatParameters {
  Parameters<P> of;
  int period, turns;
  int across, deep;  // a block takes `across` packs of each of `deep` periods at a time
  int slices;        // blocks that share a period
  int64_t ahead;     // bytes of its part that a block prefetches while it waits for its first loads
  bool late;         // flat_results_kernel: each block merges statistics of parts for itself
  int stage;         // flat_kernel, if kStaged: where in shared memory the block's part is
};

// The least blocks of kFlatWarps warps that a multiprocessor has registers for.
template <class P>
constexpr int kFlatResident = sizeof(typename P::Element::Acc) == 8 && P::kOutput ? 1 : 2;

// Which part of which flat row a block has, and where in it a thread begins.
struct FlatPlace {
  int64_t outer, begin, end;  // `begin` to `end`: the elements of the flat row that the block has
  int slice, part, pack, deep;
  bool active;

  template <class P>
  __device__ FlatPlace(const FlatParameters<P>& f, unsigned index) {
    const unsigned slices = f.slices, parts = f.of.blocks;
    const unsigned whole = slices == 1 ? index : index / slices;
    slice = index - whole * slices;
    outer = whole / parts;
    part = whole - outer * parts;
    deep = threadIdx.x / f.across;
    pack = slice * f.across + threadIdx.x % f.across;
    active = deep < f.deep && pack < f.period;
    begin = part * f.of.part_length * f.of.inner;
    end = min(begin + f.of.part_length * f.of.inner, f.of.length * f.of.inner);
  }
};

// Loads 16 bytes at any address, from the two aligned packs that have them (twice the same one if the address is
// aligned). No branch stands between the loads, so all are in flight together.
template <class Bits>
__device__ __forceinline__ Pack load_across(const Bits* from) {
  const auto address = reinterpret_cast<uintptr_t>(from);
  const Pack* const packs = reinterpret_cast<const Pack*>(address & ~uintptr_t{15});
  const Pack low = load_pack(packs), high = load_pack(packs + (address & 15 ? 1 : 0));  // without a branch
  uint32_t word[8] = {low.word[0],  low.word[1],  low.word[2],  low.word[3],
                      high.word[0], high.word[1], high.word[2], high.word[3]};
#pragma unroll
  for (int w = 0; w < 6; ++w) word[w] = address & 8 ? word[w + 2] : word[w];
#pragma unroll
  for (int w = 0; w < 5; ++w) word[w] = address & 4 ? word[w + 1] : word[w];
  Pack pack;
  const int bits = 8 * static_cast<int>(address & 3);
#pragma unroll
  for (int w = 0; w < 4; ++w) pack.word[w] = sizeof(Bits) < 4 ? funnel_right(word[w], word[w + 1], bits) : word[w];
  return pack;
}

// Loads packs, which are `apart` elements from each other, while j * step < room, and leaves the others as they are.
// (To count them would take a division first.)
template <class Bits, int kCount>
__device__ __forceinline__ void load_packs(Pack (&packs)[kCount], const Bits* from, int64_t apart, int64_t step,
                                           int64_t room) {
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (j * step < room) packs[j] = load_pack(reinterpret_cast<const Pack*>(from + j * apart));
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (j * step < room) packs[j] = load_across(from + j * apart);
  }
}

// Prefetches what lies between two elements into the L2 cache, `most` bytes at most.
template <class Bits>
__device__ __forceinline__ void prefetch_part(const Bits* from, const Bits* to, int64_t most) {
  const auto begin = reinterpret_cast<uintptr_t>(from) & ~uintptr_t{15};
  const int64_t bytes = min(static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) - begin), most) & ~int64_t{15};
  if (bytes > 0) prefetch_bulk(reinterpret_cast<const void*>(begin), static_cast<uint32_t>(bytes));
}

// Writes the results of the block's part. finals[i] belongs to column i.
template <class P>
__device__ __forceinline__ void write_flat(const FlatParameters<P>& f, const FlatPlace& place,
                                           const typename P::Final* finals,
                                           const typename P::Element::Bits* const (&from)[P::kOperands]) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  const Parameters<P>& p = f.of;
  constexpr int kCount = flat_vectors(P::kOperands);
  using Lane = Held<P, kCount, true>;
  constexpr int kWidth = Lane::kWidth;
  const int64_t flat_row = place.outer * p.length * p.inner;
  Bits* const to = static_cast<Bits*>(p.out) + flat_row;
  const int before = -static_cast<int>(reinterpret_cast<uintptr_t>(to + place.begin) / sizeof(Bits)) & (kWidth - 1);
  const int64_t aligned = min(place.begin + before, place.end), packs = (place.end - aligned) / kWidth;
  const auto row_of = [&](int i) { return P::row(p.args, place.outer, i, p.length, p.inner); };
  // The column of an element of the part. (kWidth lines have less than 2^32 elements; longer lines are walked.)
  const auto column_at = [&](uint32_t element) { return static_cast<int>(element % static_cast<uint32_t>(p.inner)); };

  if (place.slice == 0 && threadIdx.x < 2 * kWidth) {  // elements before the first aligned pack, and after the last
    const bool is_before = threadIdx.x < kWidth;
    const int64_t element = is_before ? place.begin + threadIdx.x : aligned + packs * kWidth + threadIdx.x - kWidth;
    if (element < (is_before ? aligned : place.end)) {
      // The part begins with column 0, and ends with the last one.
      const int i =
          column_at(is_before ? threadIdx.x
                              : kWidth * static_cast<uint32_t>(p.inner) - static_cast<uint32_t>(place.end - element));
      P::with_args(p.args, [&](const auto& args) {
        const auto x = P::value(args, Element::load(from[0][element]));
        const auto y = P::kOperands == 2 ? Element::load(from[P::kOperands - 1][element]) : x;
        to[element] = Element::store(P::output(args, row_of(i), finals[i], x, y));
      });
    }
  }
  if (!place.active) return;
  typename P::Row row[kWidth];
  typename P::Final final[kWidth];
  int i = column_at(before + static_cast<uint32_t>(place.pack) * kWidth);
#pragma unroll
  for (int v = 0; v < kWidth; ++v) {
    row[v] = row_of(i);
    final[v] = finals[i];
    i = i + 1 == p.inner ? 0 : i + 1;
  }
  const int64_t step = int64_t{f.period} * f.deep, apart = step * kWidth;
#pragma unroll 1
  for (int64_t pack = int64_t{f.period} * place.deep + place.pack; pack < packs; pack += kCount * step) {
    const int64_t at = aligned + pack * kWidth;
    Lane lane;
#pragma unroll
    for (int o = 0; o < P::kOperands; ++o) {
#pragma unroll
      for (auto& unit : lane.raw[o]) unit = Pack{};
      load_packs(lane.raw[o], from[o] + at, apart, step, packs - pack);
    }
    make_results<P>(p, lane, row, final, -1);
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (j * step < packs - pack) store_pack(reinterpret_cast<Pack*>(to + at + j * apart), lane.raw[0][j]);
  }
}

// Merges rows of statistics in shared memory. kFold of them are merged into one, again and again, until one is left.
template <class P>
__device__ __forceinline__ void fold_flat(Stat<P>* stats, int rows, int columns) {
  constexpr int kFold = 8;
#pragma unroll 1
  while (rows > 1) {
    const int kept = (rows + kFold - 1) / kFold, apart = kept * columns, end = rows * columns;
    for (int c = threadIdx.x; c < apart; c += blockDim.x) {
      Stat<P> part[kFold], merged = Stat<P>::none();
#pragma unroll
      for (int t = 0; t < kFold; ++t) {
        part[t] = c + t * apart < end ? stats[c + t * apart] : Stat<P>::none();
        if constexpr (P::kPeak) merged.of[0] = P::larger(merged.peak(), part[t].peak());
      }
      const auto shift = P::guard(merged.peak());
#pragma unroll
      for (int t = 0; t < kFold; ++t) add_stat<P>(merged, part[t], shift);
      stats[c] = merged;
    }
    __syncthreads();
    rows = kept;
  }
}

// Merges the statistics of the blocks of a cluster, for `columns` columns. stats[c] is what this block has of column c.
// `of_blocks` has room for (p.blocks + 1) * columns. Calls f(column, statistics) with one thread of the block for each
// column. All blocks must have arrived at the cluster barrier. The order is that of merge_kernel.
template <class P, class F>
__device__ __forceinline__ void merge_cluster(const Parameters<P>& p, int block, const Stat<P>* stats,
                                              Stat<P>* of_blocks, int columns, F f) {
  const int places = p.blocks + 1;  // one is left over, so that columns are in different banks
  wait_at_cluster_barrier();
  for (int t = threadIdx.x; t < columns * p.blocks; t += blockDim.x) {
    const int c = t / p.blocks;
    store_in_cluster(&of_blocks[c * places + block], t - c * p.blocks, stats[c]);
  }
  arrive_at_cluster_barrier();
  wait_at_cluster_barrier();
  const int half = threadIdx.x / 16, halves = blockDim.x / 16;
  for (int first = 0; first < columns; first += halves) {
    const int c = min(first + half, columns - 1);
    const auto all = merge_by_half_warp<P>([&](int u) { return of_blocks[c * places + u]; }, p.blocks);
    if (first + half < columns && threadIdx.x % 16 == 0) f(c, all);
  }
}

// Copies the block's part to shared memory, as far from a multiple of 16 bytes as it was, so that all of it is on its
// way at once and is read from memory only once. Makes flat_rows begin where the flat row would begin in shared memory.
template <class P>
__device__ __forceinline__ void stage_part(const FlatParameters<P>& f, const FlatPlace& place,
                                           const typename P::Element::Bits* (&flat_rows)[P::kOperands]) {
  using Bits = typename P::Element::Bits;
  const int64_t bytes = (place.end - place.begin) * static_cast<int64_t>(sizeof(Bits));
  unsigned char* stage = dynamic_shared_memory() + f.stage;
#pragma unroll
  for (int o = 0; o < P::kOperands; ++o) {
    const auto* const part = reinterpret_cast<const unsigned char*>(flat_rows[o] + place.begin);
    const int before = static_cast<int>(reinterpret_cast<uintptr_t>(part) % 16), end = before + static_cast<int>(bytes);
    const int whole = end / 16;
    for (int v = threadIdx.x; v < whole; v += blockDim.x) copy_async(stage + 16 * v, part - before + 16 * v);
    for (int b = 16 * whole + threadIdx.x * static_cast<int>(sizeof(Bits)); b < end; b += blockDim.x * sizeof(Bits))
      *reinterpret_cast<Bits*>(stage + b) = *reinterpret_cast<const Bits*>(part - before + b);
    flat_rows[o] = reinterpret_cast<const Bits*>(stage + before) - place.begin;
    stage += (end + 15) / 16 * 16;
  }
  commit_async_copies();
  wait_for_async_copies<0>();
  __syncthreads();
}

// kStaged: see RowPlan::staged.
template <class P, bool kStaged>
__global__ void __launch_bounds__(32 * kFlatWarps, kFlatResident<P>)
    flat_kernel(const __grid_constant__ FlatParameters<P> f) {
  using Bits = typename P::Element::Bits;
  using Acc = typename P::Element::Acc;
  const Parameters<P>& p = f.of;
  constexpr int kCount = flat_vectors(P::kOperands);
  using Lane = Held<P, kCount, true>;
  constexpr int kWidth = Lane::kWidth;
  const bool cluster = p.cluster && p.phase == Phase::kWhole;
  if (cluster) arrive_at_cluster_start();
  const FlatPlace place(f, blockIdx.x);
  const Bits* flat_rows[P::kOperands];
#pragma unroll
  for (int o = 0; o < P::kOperands; ++o)
    flat_rows[o] = static_cast<const Bits*>(p.operands[o]) + place.outer * p.length * p.inner;
  if constexpr (kStaged) stage_part<P>(f, place, flat_rows);

  Stat<P> stat[kWidth];
#pragma unroll
  for (auto& of_column : stat) of_column = Stat<P>::none();
  if (place.active) {
    const int64_t apart = int64_t{f.period} * f.deep * kWidth;
    int64_t at = place.begin + (int64_t{f.period} * place.deep + place.pack) * kWidth;
    int64_t room = place.end - at;  // elements from this thread's next pack on
    const Bits* from[P::kOperands];
#pragma unroll
    for (int o = 0; o < P::kOperands; ++o) from[o] = flat_rows[o] + at;
    if (f.ahead > 0 && threadIdx.x == 0) {
#pragma unroll
      for (int o = 0; o < P::kOperands; ++o) prefetch_part(from[o] + kCount * apart, from[o] - at + place.end, f.ahead);
    }
    P::with_sum_args(p.args, [&](const auto& args) {
#pragma unroll 1
      for (; room > 0; room -= kCount * apart) {
        Lane lane;
#pragma unroll
        for (int o = 0; o < P::kOperands; ++o) {
#pragma unroll
          for (int j = 0; j < kCount; ++j)
#pragma unroll
            for (int i = 0; i < kWidth; ++i) lane.set_bits(o, j, i, P::pad(p.args, o));
          load_packs(lane.raw[o], from[o], apart, apart, room - (kWidth - 1));
          if (room < (kCount - 1) * apart + kWidth) {  // the last pack of the part may be loose elements
#pragma unroll
            for (int j = 0; j < kCount; ++j) {
              const int64_t loose = room - j * apart;
              if (loose <= 0 || loose >= kWidth) continue;
#pragma unroll
              for (int i = 0; i < kWidth; ++i)
                if (i < loose) lane.set_bits(o, j, i, from[o][j * apart + i]);
            }
          }
          from[o] += kCount * apart;
        }
        [[maybe_unused]] Acc peak[kWidth] = {};
        if constexpr (P::kPeak) lane.peaks(args, peak);
        lane.forget();
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          take_in<P>(stat[i], peak[i], [&](int k, const auto& shift) { return lane.sum(args, k, shift, i, i + 1); });
      }
    });
  }

  // The `deep` rows of threads have statistics of the same columns.
  auto* const stats = reinterpret_cast<Stat<P>*>(dynamic_shared_memory());
  const int all = f.across * f.deep * kWidth;
  const int columns = f.slices == 1 ? static_cast<int>(p.inner) : f.across * kWidth;
  if (place.deep < f.deep) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) stats[threadIdx.x * kWidth + i] = stat[i];
  }
  __syncthreads();
  fold_flat<P>(stats, all / columns, columns);
  if (p.phase == Phase::kPartial) let_dependents_start();
  auto* const finals =
      reinterpret_cast<typename P::Final*>(dynamic_shared_memory() + (all * sizeof(Stat<P>) + 15) / 16 * 16);
  const auto finish = [&](int i, const Stat<P>& of_column) {
    const auto row = P::row(p.args, place.outer, i, p.length, p.inner);
    const auto final = P::finish(p.args, row, of_column);
    if (!cluster || place.part == 0) P::write_row(p.args, place.outer * p.inner + i, row, final);
    if constexpr (P::kOutput)
      if (p.out != nullptr) finals[i] = final;  // without results there is no room for finals
  };
  if (cluster) {
    const int64_t room = P::kOutput && p.out != nullptr ? columns * sizeof(typename P::Final) : 0;
    auto* const of_blocks = reinterpret_cast<unsigned char*>(finals) + (room + 15) / 16 * 16;
    merge_cluster<P>(p, place.part, stats, reinterpret_cast<Stat<P>*>(of_blocks), columns, finish);
  } else {
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
      const int of_period = place.slice * f.across * kWidth + c;
      const int turn = f.slices == 1 ? 0 : of_period / static_cast<int>(p.inner);
      const int i = of_period - turn * static_cast<int>(p.inner);
      if (turn >= f.turns) continue;
      if (p.phase == Phase::kPartial) {
        *stat_at(p, place.outer, f.slices == 1 ? place.part : place.part * f.turns + turn, i) = stats[c];
      } else {
        finish(c, stats[c]);
      }
    }
  }
  if constexpr (P::kOutput) {
    if (p.phase == Phase::kPartial || p.out == nullptr) return;
    __syncthreads();
    write_flat<P>(f, place, finals, flat_rows);
  }
}

template <class P>
__global__ void __launch_bounds__(32 * kFlatWarps, kFlatResident<P>)
    flat_results_kernel(const __grid_constant__ FlatParameters<P> f) {
  const FlatPlace place(f, gridDim.x - 1 - blockIdx.x);
  wait_for_predecessor();
  const Parameters<P>& p = f.of;
  auto* finals = final_at(p, place.outer, 0);
  if (f.late) {
    finals = reinterpret_cast<typename P::Final*>(dynamic_shared_memory());
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < p.inner; i += blockDim.x / 32) {
      const auto all =
          merge_few_by_warp<P, kMostFlatParts / 32>([&](int u) { return *stat_at(p, place.outer, u, i); }, p.units);
      if (threadIdx.x % 32 == 0) finals[i] = P::finish(p.args, P::row(p.args, place.outer, i, p.length, p.inner), all);
    }
    __syncthreads();
  }
  const typename P::Element::Bits* flat_rows[P::kOperands];
#pragma unroll
  for (int o = 0; o < P::kOperands; ++o)
    flat_rows[o] = static_cast<const typename P::Element::Bits*>(p.operands[o]) + place.outer * p.length * p.inner;
  write_flat<P>(f, place, finals, flat_rows);
}

}  // namespace jaxgpuops::row_engine
