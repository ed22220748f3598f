// Columns (inner > 1) along an axis of up to some hundred positions. Each lane has a few columns and walks along them,
// and neighbouring lanes have neighbouring columns; so no position need be aligned. On a short axis a thread walks its
// columns alone; on a longer one the warps of a block share them. The array is read once and written once. Works on any
// GPU.
//
// If a warp has so few positions that its lanes can hold them in registers, results are made from these registers.
// Otherwise, blocks walk a second time, backwards, and find in the caches what they have just read.
#pragma once

#include <algorithm>
#include <cstdint>

#include "row_engine/cuda/columns_flat.cuh"
#include "row_engine/cuda/in_registers.cuh"

namespace jaxgpuops::row_engine {

// Whether an operation has walking kernels.
template <class P>
constexpr bool kWalks = !P::kMasked && !P::kDecoded;

template <class P>
struct Walk {
  using Bits = typename P::Element::Bits;
  static constexpr int kColumns = walk_columns(sizeof(Bits), P::kHole);  // columns of a lane, 32 apart
  static constexpr int kCount = (kColumns == 4 ? 4 : 8) / P::kOperands;  // positions that a lane loads at a time
};

// An outer index, and a column in it.
struct WalkPlace {
  int64_t outer, i;

  template <class P>
  __device__ WalkPlace(const Parameters<P>& p, int64_t column) {
    if (p.columns <= UINT32_MAX) {
      outer = static_cast<uint32_t>(column) / static_cast<uint32_t>(p.inner);
    } else {
      outer = column / p.inner;
    }
    i = column - outer * p.inner;
  }
};

// For axes of at most held_positions(): a thread holds its columns in registers. The array is read once and written
// once. (Only positions that exist are computed: on an axis of length 2, padding would be most of a full batch.)
template <class P>
__global__ void __launch_bounds__(32 * kWalkWarps, 4) held_walk_kernel(const __grid_constant__ Parameters<P> p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  constexpr int kColumns = Walk<P>::kColumns, kHeld = held_positions(P::kOperands);
  const int64_t first = (int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32) * 32 * kColumns + threadIdx.x % 32;
  const int length = static_cast<int>(p.length);
  int64_t at[kColumns];
  typename P::Row row[kColumns];
  Bits held[P::kOperands][kHeld][kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const WalkPlace place(p, min(first + 32 * c, p.columns - 1));
    at[c] = place.outer * length * p.inner + place.i;
    row[c] = P::row(p.args, place.outer, place.i, length, p.inner);
  }
#pragma unroll
  for (int j = 0; j < kHeld; ++j)
    if (j < length) {
#pragma unroll
      for (int o = 0; o < P::kOperands; ++o)
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
          held[o][j][c] =
              P::skip(row[c]) ? P::pad(p.args, o) : static_cast<const Bits*>(p.operands[o])[at[c] + j * p.inner];
    }
  const auto y = [&](int j, int c) { return Element::load(held[P::kOperands - 1][j][c]); };
  typename P::Final final[kColumns];
  P::with_sum_args(p.args, [&](const auto& args) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const auto x = [&](int j) { return P::value(args, Element::load(held[0][j][c])); };
      const auto counts = [&](int j) {
        if constexpr (P::kHole) return j < length && j != P::hole(row[c]);
        return j < length;
      };
      Stat<P> stat = Stat<P>::none();
      if constexpr (P::kPeak) {
        // The statistics of no elements.
        if constexpr (P::kSums == 0) stat.of[0] = P::value(args, Element::load(P::pad(args, 0)));
#pragma unroll
        for (int j = 0; j < kHeld; ++j)
          if (counts(j)) stat.of[0] = P::larger(stat.peak(), x(j));
      }
      const auto shift = P::guard(stat.peak());
#pragma unroll
      for (int k = 0; k < P::kSums; ++k) {
        [[maybe_unused]] const bool is_plain = P::kPlainSum && k == P::kSums - 1;
        Acc sum = Acc(0);
#pragma unroll
        for (int j = 0; j < kHeld; ++j) {
          if constexpr (P::kPlainSum) {
            if (is_plain && P::add_plain(args) && !P::skip(row[c]) && j < length) sum += x(j);
          }
          if constexpr (P::kSums > 0)
            if (!is_plain && counts(j)) sum = P::add(args, k, sum, x(j), y(j, c), shift);
        }
        stat.sum(k) = sum;
      }
      final[c] = P::finish(p.args, row[c], stat);
      if (first + 32 * c < p.columns) P::write_row(p.args, first + 32 * c, row[c], final[c]);
    }
  });
  if constexpr (P::kOutput) {
    if (p.out == nullptr) return;
    P::with_args(p.args, [&](const auto& args) {
#pragma unroll
      for (int j = 0; j < kHeld; ++j)
        if (j < length) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            Acc value = P::output(args, row[c], final[c], P::value(args, Element::load(held[0][j][c])), y(j, c));
            if constexpr (P::kHole)
              if (j == P::hole(row[c])) value = P::hole_output(args, row[c], final[c]);
            if (first + 32 * c < p.columns) static_cast<Bits*>(p.out)[at[c] + j * p.inner] = Element::store(value);
          }
        }
    });
  }
}

// Whether an operation has the kernel whose lanes hold packs.
template <class P>
constexpr bool kHoldsPacks = kWalks<P> && P::kFast && P::kOutput && !P::kHole;

// For axes of at most kMost positions, too, but a lane has 16 bytes of neighbouring columns, and a warp a strip of
// them; positions need not be aligned. (Where lanes had single columns, results of two positions took four times as
// long as their memory traffic alone.)
template <class P, int kMost>
__global__ void __launch_bounds__(32 * kWalkWarps, 3) held_packs_kernel(const __grid_constant__ Parameters<P> p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using Lane = Held<P, kMost, true>;
  constexpr int kWidth = Lane::kWidth, kStrip = 32 * kWidth;
  constexpr int kTogether = sizeof(Bits) == 2 ? 2 : 1;  // columns in a word
  const int length = static_cast<int>(p.length);
  const auto strips = static_cast<uint32_t>((p.inner + kStrip - 1) / kStrip);  // strips of an outer index
  const uint32_t strip = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, outer = strip / strips;
  if (outer * p.inner >= p.columns) return;
  const int64_t first = int64_t{strip - outer * strips} * kStrip, own = first + threadIdx.x % 32 * kWidth;
  const int64_t at = outer * p.length * p.inner;  // index of the first position's element
  const int mine = static_cast<int>(min(int64_t{kWidth}, p.inner - own));

  Lane held;
#pragma unroll
  for (int o = 0; o < P::kOperands; ++o) {
    const Bits* const from = static_cast<const Bits*>(p.operands[o]) + at + own;
    if (p.aligned && mine == kWidth) {
#pragma unroll
      for (int j = 0; j < kMost; ++j)
        if (j < length) held.raw[o][j] = load_pack(reinterpret_cast<const Pack*>(from + j * p.inner));
    } else if (mine == kWidth) {
#pragma unroll
      for (int j = 0; j < kMost; ++j)
        if (j < length) held.raw[o][j] = load_across(from + j * p.inner);
    } else {
#pragma unroll
      for (int j = 0; j < kMost; ++j)
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          if (j < length) held.set_bits(o, j, i, i < mine ? from[j * p.inner + i] : Bits{});
    }
  }

#pragma unroll
  for (int w = 0; w < kWidth; w += kTogether) {  // results replace the elements they are made of
    typename P::Row row[kTogether];
    typename P::Final final[kTogether];
    P::with_sum_args(p.args, [&](const auto& args) {
#pragma unroll
      for (int c = 0; c < kTogether; ++c) {
        const int64_t column = min(own + w + c, p.inner - 1);
        row[c] = P::row(p.args, outer, column, length, p.inner);
        Stat<P> stat = Stat<P>::none();
        if constexpr (P::kPeak) {
#pragma unroll
          for (int j = 0; j < kMost; ++j)
            if (j < length) stat.of[0] = P::larger(stat.peak(), held.x(args, j, w + c));
        }
        const auto shift = P::guard(stat.peak());  // `shift` is not used if the operation has no peak
#pragma unroll
        for (int k = 0; k < P::kSums; ++k) {
          Acc sum = Acc(0);
#pragma unroll
          for (int j = 0; j < kMost; ++j)
            if (j < length) sum = P::add(args, k, sum, held.x(args, j, w + c), held.y(j, w + c), shift);
          stat.sum(k) = sum;
        }
        final[c] = P::finish(p.args, row[c], stat);
        if (w + c < mine) P::write_row(p.args, outer * p.inner + column, row[c], final[c]);
      }
    });
    P::with_args(p.args, [&](const auto& args) {
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        if (j >= length) continue;
        Acc value[kTogether];
#pragma unroll
        for (int c = 0; c < kTogether; ++c)
          value[c] = P::output(args, row[c], final[c], held.x(args, j, w + c), held.y(j, w + c));
        if constexpr (kTogether == 2) {
          held.raw[0][j].word[w / 2] = pair_of<Element>(value[0], value[1]);
        } else {
          held.set_bits(0, j, w, Element::store(value[0]));
        }
      }
    });
  }
  Bits* const to = static_cast<Bits*>(p.out) + at;
  if (p.aligned) {
#pragma unroll
    for (int j = 0; j < kMost; ++j)
      if (j < length && mine == kWidth) store_pack(reinterpret_cast<Pack*>(to + j * p.inner + own), held.raw[0][j]);
  } else {
    const Span<P, 1, false, false> span(5);
    const int left = static_cast<int>(min(int64_t{kStrip}, p.inner - first));
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      if (j >= length) continue;
      Pack packs[1] = {held.raw[0][j]};
      span.store(to + j * p.inner + first, left, packs);
    }
  }
}

// The kColumns columns of a lane, 32 apart. Its warp has their positions axis_warp, axis_warp + p.axis_warps, ..
template <class P, int kColumns>
struct WalkColumns {
  const Parameters<P>& p;
  const int warp = threadIdx.x / 32, axis_warp = warp >> p.column_warp_bits;
  const int block_columns = 32 * kColumns << p.column_warp_bits;
  const int column_of_block = (warp & ((1 << p.column_warp_bits) - 1)) * 32 * kColumns + threadIdx.x % 32;
  const int64_t strip = int64_t{blockIdx.x} * block_columns;  // the block's first column
  const int length = static_cast<int>(p.length);
  bool exists[kColumns];
  int64_t at[kColumns];  // indices of the elements of this warp's first position
  typename P::Row row[kColumns];

  __device__ __forceinline__ explicit WalkColumns(const Parameters<P>& p) : p(p) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int64_t column = strip + column_of_block + 32 * c;
      exists[c] = column < p.columns;
      const WalkPlace place(p, min(column, p.columns - 1));  // a lane without a column has the place of the last one
      at[c] = (place.outer * length + axis_warp) * p.inner + place.i;
      row[c] = P::row(p.args, place.outer, place.i, length, p.inner);
    }
  }

  // Merges the statistics of the warps that share columns, and writes what a row has of them.
  __device__ __forceinline__ void finish(const Stat<P> (&stat)[kColumns], typename P::Final (&final)[kColumns]) const {
    if (p.axis_warps == 1) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        final[c] = P::finish(p.args, row[c], stat[c]);
        if (exists[c]) P::write_row(p.args, strip + column_of_block + 32 * c, row[c], final[c]);
      }
      return;
    }
    auto* const of_warps = reinterpret_cast<Stat<P>*>(dynamic_shared_memory());
    auto* const of_columns = reinterpret_cast<typename P::Final*>(
        dynamic_shared_memory() + (p.axis_warps * block_columns * sizeof(Stat<P>) + 15) / 16 * 16);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) of_warps[axis_warp * block_columns + column_of_block + 32 * c] = stat[c];
    __syncthreads();
    for (int c = threadIdx.x; c < block_columns && strip + c < p.columns; c += blockDim.x) {
      const auto all = merge_serially<P>([&](int w) { return of_warps[w * block_columns + c]; }, 0, 1, p.axis_warps);
      const WalkPlace place(p, strip + c);
      const auto its_row = P::row(p.args, place.outer, place.i, length, p.inner);
      of_columns[c] = P::finish(p.args, its_row, all);
      P::write_row(p.args, strip + c, its_row, of_columns[c]);
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) final[c] = of_columns[column_of_block + 32 * c];
  }
};

// kColumns: columns of a lane. If columns are few, one makes more blocks, with the same bits.
template <class P, int kColumns = Walk<P>::kColumns>
__global__ void __launch_bounds__(32 * kMaxColumnWarps, 2) walk_kernel(const __grid_constant__ Parameters<P> p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  constexpr int kCount = Walk<P>::kCount;
  using Lane = Held<P, kCount, false>;

  const WalkColumns<P, kColumns> own(p);
  const auto& exists = own.exists;
  const auto& at = own.at;
  const auto& row = own.row;
  const int length = own.length, axis_warp = own.axis_warp, last_batch = (length - 1) / (p.axis_warps * kCount);
  // Position j of a batch of this warp; beyond the end of the axis it is padding.
  const auto position = [&](int batch, int j) { return (batch * kCount + j) * p.axis_warps + axis_warp; };
  const auto load = [&](int batch, Lane(&lane)[kColumns]) {
#pragma unroll
    for (int o = 0; o < P::kOperands; ++o) {
      const Bits* const from =
          static_cast<const Bits*>(p.operands[o]) + int64_t{batch} * kCount * p.axis_warps * p.inner;
#pragma unroll
      for (int j = 0; j < kCount; ++j)
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const bool there = exists[c] && !P::skip(row[c]) && position(batch, j) < length;
          lane[c].raw[o][j] = there ? from[at[c] + j * p.axis_warps * p.inner] : P::pad(p.args, o);
        }
    }
  };

  Stat<P> stat[kColumns];
#pragma unroll
  for (auto& of_column : stat) of_column = Stat<P>::none();
  P::with_sum_args(p.args, [&](const auto& args) {
#pragma unroll 1
    for (int batch = 0; batch <= last_batch; ++batch) {
      Lane lane[kColumns];
      load(batch, lane);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        [[maybe_unused]] Acc plain = Acc(0);
        if constexpr (P::kPlainSum) {
          if (P::add_plain(args)) {
#pragma unroll
            for (int j = 0; j < kCount; ++j)
              if (exists[c] && position(batch, j) < length) plain += lane[c].x(args, j, 0);
          }
        }
        if constexpr (P::kHole) {
#pragma unroll
          for (int j = 0; j < kCount; ++j)
            if (position(batch, j) == P::hole(row[c])) lane[c].leave_out(args, j, 0);
        }
        Acc peak[1] = {};
        if constexpr (P::kPeak) lane[c].peaks(args, peak);
        take_in<P>(stat[c], peak[0], [&](int k, const auto& shift) {
          return P::kPlainSum && k == P::kSums - 1 ? plain : lane[c].sum(args, k, shift, 0, 1);
        });
      }
    }
  });

  typename P::Final final[kColumns];
  own.finish(stat, final);

  if constexpr (P::kOutput) {
    if (p.out == nullptr) return;
    P::with_args(p.args, [&](const auto& args) {
#pragma unroll 1
      for (int batch = last_batch; batch >= 0; --batch) {
        Lane lane[kColumns];
        load(batch, lane);
        Bits* const to = static_cast<Bits*>(p.out) + int64_t{batch} * kCount * p.axis_warps * p.inner;
#pragma unroll
        for (int j = 0; j < kCount; ++j)
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            if (!exists[c] || position(batch, j) >= length) continue;
            Acc value = P::output(args, row[c], final[c], lane[c].x(args, j, 0), lane[c].y(j, 0));
            if constexpr (P::kHole)
              if (position(batch, j) == P::hole(row[c])) value = P::hole_output(args, row[c], final[c]);
            to[at[c] + j * p.axis_warps * p.inner] = Element::store(value);
          }
      }
    });
  }
}

constexpr int64_t kLargeWalk = 24 << 20;  // bytes of an array

// Whether an operation has walk_once_kernel, which holds what it walks over.
template <class P>
constexpr bool kWalksOnce = kWalks<P> && P::kFast && P::kOutput && !P::kHole;
// Columns of a lane of walk_once_kernel, 32 apart. One column of two arrays has as many elements as two of one array.
template <class P>
constexpr int kColumnsOnce = P::kOperands == 1 ? Walk<P>::kColumns : 1;

// Makes results where a warp has at most kHeldWalk positions: each lane first loads all elements of its columns, and
// keeps them. The array is read once and written once. Statistics and results have the bits of walk_kernel.
template <class P>
__global__ void __launch_bounds__(32 * kOnceWarps, 1) walk_once_kernel(const __grid_constant__ Parameters<P> p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  constexpr int kColumns = kColumnsOnce<P>, kCount = Walk<P>::kCount;
  using Lane = Held<P, kCount, false>;
  const WalkColumns<P, kColumns> own(p);
  const auto& exists = own.exists;
  const auto& at = own.at;
  const int mine = (own.length - own.axis_warp + p.axis_warps - 1) / p.axis_warps;  // positions of this warp
  const int64_t apart = p.axis_warps * p.inner;

  Lane held[kHeldWalk / kCount][kColumns];
#pragma unroll
  for (int o = 0; o < P::kOperands; ++o) {
    const Bits* from[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) from[c] = static_cast<const Bits*>(p.operands[o]) + at[c];
#pragma unroll
    for (int n = 0; n < kHeldWalk; ++n)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        held[n / kCount][c].raw[o][n % kCount] = n < mine ? *from[c] : P::pad(p.args, o);
        from[c] += apart;
      }
  }

  Stat<P> stat[kColumns];
  P::with_sum_args(p.args, [&](const auto& args) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      stat[c] = Stat<P>::none();
#pragma unroll
      for (int batch = 0; batch < kHeldWalk / kCount; ++batch) {
        if (batch * kCount >= mine) continue;
        const Lane& lane = held[batch][c];
        Acc peak[1] = {};
        if constexpr (P::kPeak) lane.peaks(args, peak);
        take_in<P>(stat[c], peak[0], [&](int k, const auto& shift) { return lane.sum(args, k, shift, 0, 1); });
      }
    }
  });
  typename P::Final final[kColumns];
  own.finish(stat, final);

  P::with_args(p.args, [&](const auto& args) {
    Bits* to[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) to[c] = static_cast<Bits*>(p.out) + at[c];
#pragma unroll
    for (int n = 0; n < kHeldWalk; ++n) {
      if (n >= mine) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const Lane& lane = held[n / kCount][c];
        const Acc value = P::output(args, own.row[c], final[c], lane.x(args, n % kCount, 0), lane.y(n % kCount, 0));
        if (exists[c]) *to[c] = Element::store(value);
        to[c] += apart;
      }
    }
  });
}

// Whether an operation has the kernel that walks strips.
template <class P>
constexpr bool kStrips =
    kWalks<P> && !P::kOutput && !P::kHole && P::kOperands == 1 && sizeof(typename P::Element::Bits) < 4 &&
    (P::kFast || std::is_integral_v<typename P::Element::Acc>);

// Statistics only. A warp has a strip: neighbouring columns of one outer index. So a lane finds its columns by adding
// constants to one address; walk_kernel divides for each column, which is most of its work on a short axis. The bits
// are the same.
template <class P>
__global__ void __launch_bounds__(32 * kMaxColumnWarps, 2) strip_kernel(const __grid_constant__ Parameters<P> p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  constexpr int kColumns = kStripColumns, kStrip = 32 * kColumns;
  // Positions that walk_kernel takes at a time; positions that this kernel loads at a time.
  constexpr int kCount = Walk<P>::kCount, kTogether = 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, axis_warp = warp >> p.column_warp_bits;
  const int strip_of_block = warp & ((1 << p.column_warp_bits) - 1);
  const auto strips = static_cast<uint32_t>((p.inner + kStrip - 1) / kStrip);  // strips of an outer index
  const uint32_t strip = (blockIdx.x << p.column_warp_bits) + strip_of_block, outer = strip / strips;
  const int64_t first = int64_t{strip - outer * strips} * kStrip + lane;
  const int left = outer * p.inner < p.columns ? static_cast<int>(min(p.inner - first, int64_t{kStrip})) : 0;
  const int length = static_cast<int>(p.length);
  const int64_t apart = p.axis_warps * p.inner;
  const Bits* from = static_cast<const Bits*>(p.operands[0]) + (int64_t{outer} * length + axis_warp) * p.inner + first;

  Stat<P> stat[kColumns];
#pragma unroll
  for (auto& of_column : stat) of_column = Stat<P>::none();
#pragma unroll 1
  for (int position = axis_warp; position < length;) {
    Acc sum[kColumns] = {};  // the sums of kCount positions
#pragma unroll 1
    for (int end = position + kCount * p.axis_warps; position < min(end, length);
         position += kTogether * p.axis_warps) {
      Bits x[kTogether][kColumns];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const bool there = position + j * p.axis_warps < length;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) x[j][c] = there && 32 * c < left ? from[32 * c] : P::pad(p.args, 0);
        from += apart;
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const Acc value = P::value(p.args, Element::load(x[j][c]));
          if constexpr (P::kPeak) stat[c].of[0] = P::larger(stat[c].of[0], value);
          if constexpr (P::kSums > 0) sum[c] = P::add(p.args, 0, sum[c], value, Acc(0), Acc(0));
        }
    }
    if constexpr (P::kSums > 0) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) stat[c].of[0] = stat[c].of[0] + sum[c];
    }
  }

  if (p.axis_warps > 1) {
    auto* const stats =
        reinterpret_cast<Stat<P>*>(dynamic_shared_memory()) + strip_of_block * p.axis_warps * kStrip + lane;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) stats[axis_warp * kStrip + 32 * c] = stat[c];
    __syncthreads();
    if (axis_warp > 0) return;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      stat[c] = merge_serially<P>([&](int w) { return stats[w * kStrip + 32 * c]; }, 0, 1, p.axis_warps);
  }
  const typename P::Row row{};
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (32 * c < left) P::write_row(p.args, outer * p.inner + first + 32 * c, row, P::finish(p.args, row, stat[c]));
}

template <class P>
cudaError_t run_walk(cudaStream_t stream, const RowPlan& plan, const Parameters<P>& p) {
  if constexpr (kWalks<P>) {
    Launch launched;
    launched.block = dim3(plan.threads());
    int64_t columns = int64_t{32} * Walk<P>::kColumns << plan.column_warp_bits;  // columns of a block
    int64_t blocks = (p.columns + columns - 1) / columns;
    auto kernel = p.length <= held_positions(P::kOperands) ? held_walk_kernel<P> : walk_kernel<P>;
    if constexpr (kWalksOnce<P>) {
      // For large arrays, blocks with the most warps are faster if they hold less, since then more blocks share a
      // multiprocessor.
      const bool large = plan.axis_warps == kMaxColumnWarps &&
                         p.columns * p.length * int64_t{sizeof(typename P::Element::Bits)} > kLargeWalk;
      if (p.length > held_positions(P::kOperands) && p.length <= kHeldWalk * plan.axis_warps && p.out != nullptr &&
          !large) {
        kernel = walk_once_kernel<P>;
        columns = int64_t{32} * kColumnsOnce<P> << plan.column_warp_bits;
        blocks = (p.columns + columns - 1) / columns;
      }
    }
    if (plan.single && kernel == walk_kernel<P>) {
      kernel = walk_kernel<P, 1>;
      columns = int64_t{32} << plan.column_warp_bits;
      blocks = (p.columns + columns - 1) / columns;
    }
    if (plan.vector) {  // a warp has a strip of an outer index
      int64_t strip = 32 * 16 / sizeof(typename P::Element::Bits);
      if constexpr (kHoldsPacks<P>) {
        if (p.length > held_positions(P::kOperands) || p.out == nullptr) return cudaErrorInvalidValue;
        kernel = p.length <= kFewPacks ? held_packs_kernel<P, kFewPacks>
                                       : held_packs_kernel<P, held_positions(P::kOperands)>;
      } else if constexpr (kStrips<P>) {
        strip = 32 * kStripColumns;
        kernel = strip_kernel<P>;
      } else {
        return cudaErrorInvalidValue;
      }
      columns = strip << plan.column_warp_bits;
      const int64_t strips = p.columns / p.inner * ((p.inner + strip - 1) / strip);
      blocks = (strips + (1 << plan.column_warp_bits) - 1) >> plan.column_warp_bits;
    }
    if (blocks > INT32_MAX / kWalkWarps) return cudaErrorInvalidConfiguration;
    launched.grid = dim3(static_cast<unsigned>(blocks));
    if (plan.axis_warps > 1)
      launched.shared_bytes =
          (plan.axis_warps * columns * sizeof(Stat<P>) + 15) / 16 * 16 + columns * sizeof(typename P::Final);
    return launch(stream, launched, kernel, p);
  } else {
    return cudaErrorInvalidValue;
  }
}

}  // namespace jaxgpuops::row_engine
