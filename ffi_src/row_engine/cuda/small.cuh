// Kernels for arrays of few elements in all, rows or columns alike (see common/cuda/small.cuh). The array is read once
// and written once.
//
// A lane has one element and computes its summand, and all lanes of a column add up these summands in the order of the
// walking kernels, so the bits are theirs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/cuda/small.cuh"
#include "row_engine/cuda/columns_flat.cuh"
#include "row_engine/cuda/columns_walk.cuh"
#include "row_engine/cuda/policy.cuh"

namespace jaxgpuops::row_engine {

// `Given` is what the arguments of the operation are made of (P::Args, or less).
template <class P, class Given>
struct SmallParameters {
  const void* x;
  void* out;  // null: the call has no results of the full shape
  SmallColumns columns;
  uint32_t positions;  // the most positions of a part
  uint32_t batch;      // positions that a walk adds up at a time, a power of two
  uint32_t alike;      // positions that share a peak: a batch, or all, of which each pair of batches is added up first
  Given given;
};

// A warp has the same part of some columns as a warp of a walking kernel: positions threadIdx.y, threadIdx.y +
// blockDim.y, ..
template <class P, class Given>
__global__ void __launch_bounds__(32 * kSmallWarps) small_kernel(const __grid_constant__ SmallParameters<P, Given> p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  const SmallColumns& c = p.columns;
  const typename P::Args& args = p.given;
  const uint32_t lane = threadIdx.x, part = threadIdx.y, parts = blockDim.y;
  const uint32_t beside = once(1u << c.column_bits), first = once(lane & (beside - 1)), mine = lane >> c.column_bits;
  const uint32_t own = ((blockIdx.x * blockDim.z + threadIdx.z) << c.column_bits) + first;
  const uint32_t column = once(min(own, c.columns - 1));  // lanes without a column take the last one
  const uint32_t position = mine * parts + part;
  const uint32_t outer = once(c.outer_of(column));
  const uint32_t at = once((outer * (c.length - 1) + position) * c.inner + column);
  const bool there = position < c.length;
  const Acc x = P::value(args, Element::load(there ? static_cast<const Bits*>(p.x)[at] : P::pad(args, 0)));

  // Over lanes of the same column: the peak of groups of `lanes` neighbouring lanes, and the sum over the lanes in
  // [from, end), one after the other.
  const auto largest = [&](Acc peak, uint32_t lanes) {
    if constexpr (P::kPeak) {
#pragma unroll 1
      for (uint32_t d = beside; d < lanes; d *= 2) peak = P::larger(peak, shuffle_xor(peak, d));
    }
    return peak;
  };
  const auto added = [&](Acc summand, uint32_t from, uint32_t end) {
    Acc sum = Acc(0);
#pragma unroll 1
    for (; from < end; from += kSmallStep * beside) {
      Acc next[kSmallStep];
#pragma unroll
      for (uint32_t k = 0; k < kSmallStep; ++k) next[k] = shuffle_from(summand, from + k * beside);
#pragma unroll
      for (uint32_t k = 0; k < kSmallStep; ++k) sum = sum + next[k];
    }
    return sum;
  };

  Stat<P> stat = Stat<P>::none();
  // Batches and positions, counted in lanes.
  const uint32_t batch = p.batch << c.column_bits, end = p.positions << c.column_bits;
  const Acc peak = P::kPeak ? largest(x, min(p.alike << c.column_bits, 32u)) : Acc(0);
  Acc pair = Acc(0);
#pragma unroll 1
  for (uint32_t from = 0; from < end; from += batch) {
    if constexpr (P::kPeak) {
      const Acc larger = P::larger(stat.peak(), shuffle_from(peak, from + first));
      if (from && !(larger == stat.peak()))
        stat.sum(0) = P::scaled(0, stat.sum(0), P::weight(stat.peak(), P::guard(larger)));
      stat.of[0] = larger;
    }
    const Acc summand = P::add(args, 0, Acc(0), x, Acc(0), P::guard(stat.peak()));
    pair = pair + added(summand, from + first, min(from + batch, end));
    if (p.alike == 32 && (from & batch) == 0 && from + batch < end) continue;
    stat.sum(0) = stat.sum(0) + pair;
    pair = Acc(0);
  }
  if (parts > 1) {
    __shared__ Stat<P> all[kSmallWarps * kSmallBeside];
    Stat<P>* const of_column = all + threadIdx.z * parts * beside + first;
    if (lane < beside) of_column[part * beside] = stat;
    __syncthreads();
    stat = mine < parts ? of_column[mine * beside] : Stat<P>::none();
    Acc summand = stat.sum(0);
    if constexpr (P::kPeak) {
      const Acc peak = largest(stat.peak(), 32);
      summand = P::scaled(0, summand, P::weight(stat.peak(), P::guard(peak)));
      stat.of[0] = peak;
    }
    stat.sum(0) = added(summand, first, min(parts << c.column_bits, 32u));
  }
  if (own != column) return;
  const auto row = P::row(args, outer, column - outer * c.inner, c.length, c.inner);
  const auto final = P::finish(args, row, stat);
  if (position == 0) P::write_row(args, column, row, final);
  if constexpr (P::kOutput)
    if (p.out && there) static_cast<Bits*>(p.out)[at] = Element::store(P::output(args, row, final, x, Acc(0)));
}

// Few columns along an axis that walks do not take: a block has a flat row, as in flat_kernel, and adds up in its
// order. There a thread has all elements of a pack of columns, and here the elements of one column of that pack.
template <class P, class Given>
struct SmallFlatParameters {
  const void* x;
  void* out;      // null: the call has no results of the full shape
  uint32_t size;  // elements of a flat row
  uint32_t inner, length;
  uint32_t apart;   // elements from one pack of a thread of flat_kernel to its next
  uint32_t blocks;  // shared_flat_kernel: of a cluster
  uint32_t group;   // shared_flat_kernel: how many statistics are left when kFlatFold have been merged into each
  uint32_t slice;   // shared_flat_kernel: how many of these a block makes
  Given given;
};

template <class P, class Given>
__global__ void __launch_bounds__(32 * kSmallFlatWarps)
    small_flat_kernel(const __grid_constant__ SmallFlatParameters<P, Given> p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using Lane = Held<P, flat_vectors(1), false>;
  const typename P::Args& args = p.given;
  const uint32_t size = once(p.size), inner = once(p.inner), apart = once(p.apart), thread = threadIdx.x;
  const Bits* const from = static_cast<const Bits*>(p.x) + uint64_t{blockIdx.x} * size;
  const auto load = [&](Lane& lane, uint32_t at) {
#pragma unroll
    for (int j = 0; j < flat_vectors(1); ++j, at += apart) lane.raw[0][j] = at < size ? from[at] : P::pad(args, 0);
  };

  // Statistics of the elements first, first + apart, .. for every `first` below `apart`.
  auto* const stats = reinterpret_cast<Stat<P>*>(dynamic_shared_memory());
  auto* const finals =
      reinterpret_cast<typename P::Final*>(dynamic_shared_memory() + (apart * sizeof(Stat<P>) + 15) / 16 * 16);
  uint32_t first = thread, at = first;
  Lane lane, next;
  Stat<P> stat = Stat<P>::none();
  load(next, at);
#pragma unroll 1
  while (first < apart) {
    lane = next;
    const uint32_t mine = first;
    at += flat_vectors(1) * apart;
    const bool last = at >= size;
    if (last) at = first += blockDim.x;
    load(next, at);
    Acc peak[1] = {};
    if constexpr (P::kPeak) lane.peaks(args, peak);
    take_in<P>(stat, peak[0], [&](int k, const auto& shift) { return lane.sum(args, k, shift, 0, 1); });
    if (last) {
      stats[mine] = stat;
      stat = Stat<P>::none();
    }
  }
  __syncthreads();
  fold_flat<P>(stats, apart / inner, inner);

  for (uint32_t c = thread; c < inner; c += blockDim.x) {
    const auto row = P::row(args, blockIdx.x, c, p.length, inner);
    const auto final = P::finish(args, row, stats[c]);
    P::write_row(args, int64_t{blockIdx.x} * inner + c, row, final);
    if constexpr (P::kOutput)
      if (p.out != nullptr) finals[c] = final;  // without results there is no room for finals
  }
  if constexpr (P::kOutput) {
    if (p.out == nullptr) return;
    __syncthreads();
    Bits* const to = static_cast<Bits*>(p.out) + uint64_t{blockIdx.x} * size;
    const uint32_t step = blockDim.x % inner;
    uint32_t c = thread % inner;
    const auto row = P::row(args, blockIdx.x, 0, p.length, inner);
#pragma unroll 2
    for (uint32_t e = thread; e < size; e += blockDim.x) {
      const Acc x = P::value(args, Element::load(from[e]));
      to[e] = Element::store(P::output(args, row, finals[c], x, Acc(0)));
      c += step;
      c -= c < inner ? 0 : inner;
    }
  }
}

constexpr int kFlatFold = 8;  // how many statistics fold_flat() merges into one at a time

// Longer flat rows, if they are few: the blocks of a cluster share a flat row. A block makes all of the kFlatFold
// statistics that fold_flat() merges into one, so that blocks exchange one of them.
template <class P, class Given>
__global__ void __launch_bounds__(32 * kSmallFlatWarps)
    shared_flat_kernel(const __grid_constant__ SmallFlatParameters<P, Given> p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using Lane = Held<P, flat_vectors(1), false>;
  arrive_at_cluster_start();
  const typename P::Args& args = p.given;
  const uint32_t size = once(p.size), inner = once(p.inner), apart = once(p.apart), group = once(p.group);
  const uint32_t slice = once(p.slice), width = blockDim.x / kFlatFold, turn = threadIdx.x / width;
  const uint32_t block = static_cast<uint32_t>(block_of_cluster()), outer = blockIdx.x / p.blocks;
  const Bits* const from = static_cast<const Bits*>(p.x) + uint64_t{outer} * size;
  auto* const own = reinterpret_cast<Stat<P>*>(dynamic_shared_memory());  // kFlatFold rows of `slice`
  Stat<P>* const stats = own + kFlatFold * slice;                         // `group`, of all blocks
  auto* const finals = reinterpret_cast<typename P::Final*>(stats + (group + 1) / 2 * 2);
  const uint32_t begin = block * slice, end = min(begin + slice, group), mine = begin + (threadIdx.x - turn * width);

#pragma unroll 1
  for (uint32_t c = mine; c < begin + slice; c += width) {
    Stat<P> stat = Stat<P>::none();
    const uint32_t first = turn * group + c;
    if (c < end && first < apart) {
#pragma unroll 1
      for (uint32_t at = first; at < size; at += flat_vectors(1) * apart) {
        Lane lane;
#pragma unroll
        for (int j = 0; j < flat_vectors(1); ++j)
          lane.raw[0][j] = at + j * apart < size ? from[at + j * apart] : P::pad(args, 0);
        Acc peak[1] = {};
        if constexpr (P::kPeak) lane.peaks(args, peak);
        take_in<P>(stat, peak[0], [&](int k, const auto& shift) { return lane.sum(args, k, shift, 0, 1); });
      }
    }
    own[turn * slice + c - begin] = stat;
  }
  __syncthreads();
  fold_flat<P>(own, kFlatFold, slice);
  wait_at_cluster_barrier();
  if (turn < p.blocks) {  // to block `turn`
#pragma unroll 1
    for (uint32_t c = mine; c < end; c += width) store_in_cluster(&stats[c], turn, own[c - begin]);
  }
  arrive_at_cluster_barrier();
  wait_at_cluster_barrier();
  fold_flat<P>(stats, group / inner, inner);

  for (uint32_t c = threadIdx.x; c < inner; c += blockDim.x) {
    const auto row = P::row(args, outer, c, p.length, inner);
    const auto final = P::finish(args, row, stats[c]);
    if (block == 0) P::write_row(args, int64_t{outer} * inner + c, row, final);
    if constexpr (P::kOutput)
      if (p.out != nullptr) finals[c] = final;  // without results there is no room for finals
  }
  if constexpr (P::kOutput) {
    if (p.out == nullptr) return;
    __syncthreads();
    Bits* const to = static_cast<Bits*>(p.out) + uint64_t{outer} * size;
    const auto row = P::row(args, outer, 0, p.length, inner);
#pragma unroll 1
    for (uint32_t c = mine; c < end; c += width) {
      const uint32_t first = turn * group + c;
      if (first >= apart) break;
      const auto final = finals[c % inner];
#pragma unroll 4
      for (uint32_t at = first; at < size; at += apart)
        to[at] = Element::store(P::output(args, row, final, P::value(args, Element::load(from[at])), Acc(0)));
    }
  }
}

template <class P, class Given>
cudaError_t run_small_flat(cudaStream_t stream, const RowPlan& plan, const Rows& rows, const void* x, void* out,
                           const Given& given) {
  static_assert(is_policy<P>() && kFlat<P> && P::kOperands == 1);
  constexpr int kWidth = 16 / sizeof(typename P::Element::Bits);
  SmallFlatParameters<P, Given> s = {x, out, 0, 0, 0, 0, static_cast<uint32_t>(plan.blocks), 0, 0, given};
  s.size = static_cast<uint32_t>(rows.length * rows.inner);
  s.inner = static_cast<uint32_t>(rows.inner);
  s.length = static_cast<uint32_t>(rows.length);
  s.apart = static_cast<uint32_t>(plan.period * plan.deep * kWidth);
  if (plan.split || rows.outer > INT32_MAX) return cudaErrorInvalidValue;
  Launch launched;
  launched.grid = dim3(static_cast<unsigned>(rows.outer));
  launched.block = dim3(plan.threads());
  const int64_t finals = out ? rows.inner * sizeof(typename P::Final) : 0;
  if (plan.blocks > 1) {
    s.group = (s.apart / s.inner + kFlatFold - 1) / kFlatFold * s.inner;
    s.slice = (s.group + s.blocks - 1) / s.blocks;
    launched.grid.x *= s.blocks;
    launched.cluster = static_cast<int>(s.blocks);
    launched.shared_bytes = (kFlatFold * s.slice + (s.group + 1) / 2 * 2) * sizeof(Stat<P>) + finals;
    return launch(stream, launched, shared_flat_kernel<P, Given>, s);
  }
  launched.shared_bytes = (s.apart * sizeof(Stat<P>) + 15) / 16 * 16 + finals;
  return launch(stream, launched, small_flat_kernel<P, Given>, s);
}

// Runs a call. `given` becomes P::Args.
template <class P, class Given>
cudaError_t run_small(cudaStream_t stream, const RowPlan& plan, const Rows& rows, const void* x, void* out,
                      const Given& given) {
  static_assert(is_policy<P>() && kWalks<P> && P::kOperands == 1 && !P::kHole);
  if (plan.flat) return run_small_flat<P>(stream, plan, rows, x, out, given);
  const SmallColumns columns(rows, plan.column_lane_bits, plan.lane_bits);
  const int groups = plan.block_warps / plan.axis_warps;  // groups of columns in a block
  SmallParameters<P, Given> s = {x, out, columns, 0, 0, 0, given};
  s.positions = static_cast<uint32_t>((rows.length + plan.axis_warps - 1) / plan.axis_warps);
  s.batch = rows.length <= held_positions(1) ? held_positions(1) : Walk<P>::kCount;
  s.alike = plan.vector ? 32 : s.batch;
  const int64_t of_block = int64_t{groups} << plan.column_lane_bits;
  Launch launched;
  launched.grid = dim3(static_cast<unsigned>((rows.count() + of_block - 1) / of_block));
  launched.block = dim3(32, plan.axis_warps, groups);
  return launch(stream, launched, small_kernel<P, Given>, s);
}

}  // namespace jaxgpuops::row_engine
