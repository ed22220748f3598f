// Gradients of softmax and log_softmax from x and the cotangent, for rows that no cluster holds, and for few columns
// that lie side by side. If a cluster holds the columns of an outer index, or all multiprocessors hold all elements,
// these are read once. Otherwise they are read twice, the second time backwards, from L2 where they are still there.
// (From the forward result, which takes three times the memory traffic of x to make, they would be read twice, too.)
//
// An outer index is a flat row of length * inner elements. It is cut into units, a block has one. It finds the largest
// logit of each column of its unit, the peak, and the sums that both gradients are made from, relative to it. The
// blocks of the second kernel each merge all units of their row, always in the same order, and write results.
//
// Of two or four columns, and of rows of 16 bits that are whole vectors, a lane takes vectors of 16 bytes, counted from
// the beginning of the flat row, which may lie anywhere in memory. An element of a vector always has the same column,
// so a lane has a share for each column. Else it takes elements one by one, and a warp goes on by a multiple of inner,
// so that all of a lane's elements have one column.
#include <cooperative_groups.h>

#include <type_traits>

#include "common/cuda/residents.cuh"
#include "softmax/cuda/gradient_share.cuh"
#include "softmax/cuda/gradient_split.h"
#include "softmax/plan.h"

namespace jaxgpuops::softmax {
namespace {

struct SplitParameters {
  const void *x, *cotangent;
  void* out;
  void* workspace;
  int64_t length, unit_length, result_length;  // elements of a flat row
  int inner, units;
  bool logs;  // log_softmax
};

// Lanes of a warp of which every `kinds`-th one is of the same kind. (Lanes that are left over belong to no group.)
// kKinds: how many kinds there are, or 0 if that is only known at run time.
template <int kKinds>
struct Group {
  int kinds, groups, lanes, kind, group;  // lanes: how many lanes of a warp are in groups

  __device__ explicit Group(int of_call) : kinds(kKinds > 0 ? kKinds : of_call), groups(32 / kinds) {
    const int lane = threadIdx.x % 32;
    lanes = groups * kinds;
    group = lane / kinds;
    kind = lane - group * kinds;
  }

  // All lanes get what the lanes of their kind have together.
  template <class F>
  __device__ float fold(float value, F f) const {
    if constexpr (kKinds > 0 && 32 % (kKinds > 0 ? kKinds : 1) == 0) {
#pragma unroll
      for (int step = 16; step >= kKinds; step /= 2) value = f(value, shuffle_xor(value, step));
      return value;
    } else {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        const float other = shuffle_from(value, (threadIdx.x + step * kinds) % 32);
        if (group + step < groups) value = f(value, other);
      }
      return shuffle_from(value, kind);
    }
  }
  __device__ float sum(float value) const {
    return fold(value, [](float a, float b) { return a + b; });
  }
  __device__ float largest(float value) const {
    if constexpr (kKinds == 1) return largest_of_warp(value);
    return fold(value, [](float a, float b) { return larger_number(a, b); });
  }
};

// The elements of a lane. kInner: the number of columns, kWholeRows, or 0 if it is only known at run time.
template <class E, int kInner>
struct Form {
  using Bits = typename E::Bits;
  static constexpr bool kByVectors = takes_vectors(kInner);
  static constexpr bool kOneKind = kByVectors || kInner == 1;        // all lanes have the same columns
  static constexpr int kWidth = kByVectors ? 16 / sizeof(Bits) : 1;  // of a vector
  static constexpr int kVectors = gradient_each(sizeof(Bits), kInner) / kWidth;
  static constexpr int kShares = kByVectors && kInner > 0 ? kInner : 1;  // element j of a vector has share j % kShares
  static constexpr int kMostColumns = kInner == 0 ? kGradientColumns : kInner == kWholeRows ? 1 : kInner;
  using Columns = Group<kInner == kWholeRows ? 1 : kInner>;
  using Peers = Group<kOneKind ? 1 : kInner>;  // lanes that have the same columns
};

// Sums of several numbers over all lanes: 32 / kCount neighbouring lanes get the first sum, the next ones the second,
// and so on. A lane sends half of its numbers and keeps the other half, until it has one.
template <int kStep = 16, int kCount>
__device__ __forceinline__ float sum_of_each(const float (&numbers)[kCount]) {
  if constexpr (kStep == 0) {
    return numbers[0];
  } else if constexpr (kCount == 1) {
    const float sum[1] = {numbers[0] + shuffle_xor(numbers[0], kStep)};
    return sum_of_each<kStep / 2>(sum);
  } else {
    constexpr int kHalf = kCount / 2;
    const bool upper = threadIdx.x & kStep;
    float kept[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float sent = upper ? numbers[i] : numbers[i + kHalf];
      kept[i] = (upper ? numbers[i + kHalf] : numbers[i]) + shuffle_xor(sent, kStep);
    }
    return sum_of_each<kStep / 2>(kept);
  }
}

// Adds up the shares of the lanes of a kind, which have the same peak.
template <int kKinds>
__device__ __forceinline__ void sum_lanes(Share& share, const Group<kKinds>& of) {
  for (float* each : {&share.count, &share.own, &share.others, &share.weighted}) *each = of.sum(*each);
}

// Returns what `sets` sets of shares of all columns are together: each lane gets the share of its column.
template <int kKinds>
__device__ __forceinline__ Share merged(const Share* shares, int sets, const Group<kKinds>& columns, bool logs) {
  const int lane = threadIdx.x % 32, end = columns.group < columns.groups ? sets * columns.kinds : 0;
  auto all = lane < end ? shares[lane] : Share::none();
#pragma unroll 1
  for (int s = lane + columns.lanes; s < end; s += columns.lanes) all.add(shares[s], logs);
  all.raise(columns.largest(all.peak), logs);
  sum_lanes(all, columns);
  return all;
}

// What a block makes of the shares of its lanes. The first warp does the work, so that the others take no instructions.
template <class E, int kInner>
struct Merge {
  using Form = softmax::Form<E, kInner>;
  const typename Form::Peers& peers;
  const typename Form::Columns& columns;

  // The column of the lane's share k.
  __device__ int column_of(int k) const { return Form::kByVectors ? k : columns.kind; }

  // Lanes of the first warp get the share of their column in the block.
  __device__ Share of_block(Share (&mine)[Form::kShares], bool logs) const {
    __shared__ Share of_warps[kPartWarps * Form::kMostColumns];
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    if constexpr (Form::kOneKind) {
      constexpr int kSums = 4 * Form::kShares, kLanes = 32 / kSums;  // lanes that have the same sum
      float sums[kSums];
#pragma unroll
      for (int k = 0; k < Form::kShares; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[4 * k + i] = mine[k].sum(i);
        if (lane == 0) of_warps[warp * Form::kShares + k].peak = mine[k].peak;
      }
      const float sum = sum_of_each(sums);
      if (lane % kLanes == 0) of_warps[warp * Form::kShares + lane / kLanes / 4].sum(lane / kLanes % 4) = sum;
    } else {
      sum_lanes(mine[0], peers);
      if (peers.group == 0) of_warps[warp * columns.kinds + columns.kind] = mine[0];
    }
    __syncthreads();
    return warp == 0 ? merged(of_warps, warps, columns, logs) : Share::none();
  }

  // All threads get the gradients of the lane's columns, given the shares of the row's units.
  template <class Gradient>
  __device__ void gradients(const Share* of_units, int units, bool logs, Gradient (&of_lane)[Form::kShares]) const {
    __shared__ Share of_warps[kPartWarps * Form::kMostColumns];
    __shared__ Gradient of_columns[Form::kMostColumns];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool few = units <= kMaxCluster;
    if (!few) {
      auto all = Share::none();
      if (columns.group < columns.groups)
#pragma unroll 1
        for (int u = warp * columns.groups + columns.group; u < units; u += kPartWarps * columns.groups)
          all.add(of_units[u * columns.kinds + columns.kind], logs);
      all.raise(columns.largest(all.peak), logs);
      sum_lanes(all, columns);
      if (columns.group == 0) of_warps[warp * columns.kinds + columns.kind] = all;
      __syncthreads();
    }
    if (warp == 0) {
      const Share row = merged(few ? of_units : of_warps, few ? units : kPartWarps, columns, logs);
      if (lane < columns.kinds) of_columns[lane] = Gradient(row, logs);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < Form::kShares; ++k) of_lane[k] = of_columns[column_of(k)];
  }
};

// 16 bytes, or one element. Words are taken apart where elements are used: each of 16 bits would take a register.
template <class Bits, int kWidth>
struct Vector {
  static constexpr int kOfWord = kWidth == 1 ? 1 : 4 / sizeof(Bits), kShift = 8 * sizeof(Bits) % 32;
  uint32_t word[kWidth / kOfWord];

  __device__ Bits operator[](int j) const { return static_cast<Bits>(word[j / kOfWord] >> (j % kOfWord * kShift)); }
  // Calls element(j) for each element.
  template <class Element>
  __device__ void make(Element element) {
#pragma unroll
    for (int w = 0; w < kWidth / kOfWord; ++w) {
      word[w] = element(w * kOfWord);
      if constexpr (kOfWord == 2) word[w] |= static_cast<uint32_t>(element(w * kOfWord + 1)) << kShift;
    }
  }

  // Loads what is there of a vector; the rest is `fill`.
  __device__ void load(const Bits* from, int left, Bits fill) {
    const auto address = reinterpret_cast<uintptr_t>(from);
    if constexpr (kWidth == 1) {
      make([&](int) { return left > 0 ? *from : fill; });
    } else if (left < kWidth) {
      make([&](int j) { return j < left ? from[j] : fill; });
    } else if (address % 16 == 0) {
      const auto words = *reinterpret_cast<const uint4*>(from);
      word[0] = words.x, word[1] = words.y, word[2] = words.z, word[3] = words.w;
    } else {
      const auto* const words = reinterpret_cast<const uint32_t*>(address / 4 * 4);
#pragma unroll
      for (int w = 0; w < 4; ++w) word[w] = words[w];
      if (address % 4 != 0) {  // 16 bits: five words contain the vector
        const uint32_t last = words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) word[w] = funnel_right(word[w], w < 3 ? word[w + 1] : last, 16);
      }
    }
  }

  __device__ void store(Bits* to, int left) const {
    const auto address = reinterpret_cast<uintptr_t>(to);
    if (kWidth == 1 || left < kWidth || address % 4 != 0) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        if (j < left) to[j] = (*this)[j];
    } else if constexpr (kWidth > 1) {
      if (address % 16 == 0) {
        *reinterpret_cast<uint4*>(to) = uint4{word[0], word[1], word[2], word[3]};
      } else {
        auto* const words = reinterpret_cast<uint32_t*>(to);
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = word[w];
      }
    }
  }
};

// The vectors that a lane takes at a time, which are `lanes` of its warp apart.
template <class E, int kInner>
struct Turn {
  using Form = softmax::Form<E, kInner>;
  using Bits = typename E::Bits;
  static constexpr int kWidth = Form::kWidth, kVectors = Form::kVectors, kShares = Form::kShares;
  Vector<Bits, kWidth> x[kVectors], cotangent[kVectors];

  // Calls body(vector, its first element, how many elements are left from there on) for vectors of this lane. Elements
  // are counted from the warp's first one on.
  template <class Body>
  __device__ static void each(const typename Form::Peers& peers, int64_t first, int64_t end, Body body) {
    const int lane = threadIdx.x % 32;
    const int left = lane < peers.lanes ? static_cast<int>(min(end - first, int64_t{32 * kVectors * kWidth})) : 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int at = (v * peers.lanes + lane) * kWidth;
      body(v, at, left - at);
    }
  }

  // Loads what is below `end`, from the warp's first element on; the rest is -inf, and 0.
  __device__ void load(const SplitParameters& p, const typename Form::Peers& peers, int64_t row, int64_t first,
                       int64_t end) {
    const auto* const from = static_cast<const Bits*>(p.x) + row * p.length + first;
    const auto* const cotangents = static_cast<const Bits*>(p.cotangent) + row * p.length + first;
    const Bits lowest = E::store(-infinity<typename E::Acc>());
    each(peers, first, end, [&](int v, int at, int left) { x[v].load(from + at, left, lowest); });
    each(peers, first, end, [&](int v, int at, int left) { cotangent[v].load(cotangents + at, left, Bits{}); });
  }

  // The lanes of a kind have the same peaks.
  __device__ void take_into(Share (&shares)[kShares], const typename Form::Peers& peers, bool logs) const {
#pragma unroll
    for (int k = 0; k < kShares; ++k) {
      auto peak = shares[k].peak;
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
#pragma unroll
        for (int j = k; j < kWidth; j += kShares) peak = larger_number(peak, E::load(x[v][j]));
      shares[k].raise(peers.largest(peak), logs);
    }
    const auto add = [&](auto is_log) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
          shares[j % kShares].template add<decltype(is_log)::value>(E::load(x[v][j]), E::load(cotangent[v][j]));
    };
    if (logs) {
      add(std::true_type());
    } else {
      add(std::false_type());
    }
  }

  // Stores the gradients of what load() has loaded.
  __device__ void store(const SplitParameters& p, const typename Form::Peers& peers, int64_t row, int64_t first,
                        int64_t end, const Gradient<E> (&gradients)[kShares]) const {
    Bits* const to = static_cast<Bits*>(p.out) + row * p.length + first;
    const auto store = [&](auto logs) {
      each(peers, first, end, [&](int v, int at, int left) {
        Vector<Bits, kWidth> out;
        out.make([&](int j) {
          return E::store(
              gradients[j % kShares].template at<decltype(logs)::value>(E::load(x[v][j]), E::load(cotangent[v][j])));
        });
        out.store(to + at, left);
      });
    };
    if (p.logs) {
      store(std::true_type());
    } else {
      store(std::false_type());
    }
  }
};

template <class E, int kInner>
__global__ void __launch_bounds__(32 * kPartWarps, gradient_blocks(kInner))
    shares_kernel(const __grid_constant__ SplitParameters p) {
  using Turn = softmax::Turn<E, kInner>;
  const typename Turn::Form::Peers peers(p.inner);
  const typename Turn::Form::Columns columns(p.inner);
  const int64_t row = blockIdx.x / static_cast<unsigned>(p.units), unit = blockIdx.x % static_cast<unsigned>(p.units);
  const int64_t begin = unit * p.unit_length, end = min(p.length, begin + p.unit_length);
  const int of_warp = peers.lanes * Turn::kWidth * Turn::kVectors;
  Share mine[Turn::kShares];
#pragma unroll
  for (Share& share : mine) share = Share::none();
#pragma unroll 1
  for (int64_t first = begin + threadIdx.x / 32 * of_warp; first < end; first += kPartWarps * of_warp) {
    Turn turn;
    turn.load(p, peers, row, first, end);
    turn.take_into(mine, peers, p.logs);
  }
  let_dependents_start();
  const Share share = Merge<E, kInner>{peers, columns}.of_block(mine, p.logs);
  if (threadIdx.x < columns.kinds)
    static_cast<Share*>(p.workspace)[int64_t{blockIdx.x} * columns.kinds + threadIdx.x] = share;
}

template <class E, int kInner>
__global__ void __launch_bounds__(32 * kPartWarps, gradient_blocks(kInner))
    results_kernel(const __grid_constant__ SplitParameters p) {
  using Turn = softmax::Turn<E, kInner>;
  const typename Turn::Form::Peers peers(p.inner);
  const typename Turn::Form::Columns columns(p.inner);
  const auto parts = static_cast<unsigned>((p.length + p.result_length - 1) / p.result_length);
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const int64_t row = block / parts, begin = block % parts * p.result_length;
  const int64_t end = min(p.length, begin + p.result_length);
  const int of_warp = peers.lanes * Turn::kWidth * Turn::kVectors, of_block = kPartWarps * of_warp;
  int64_t first = begin + threadIdx.x / 32 * of_warp + (end - 1 - begin) / of_block * of_block;
  // The first elements are on their way while shares are merged.
  Turn turn;
  turn.load(p, peers, row, first, end);
  wait_for_predecessor();
  const Merge<E, kInner> merge{peers, columns};
  Gradient<E> gradients[Turn::kShares];
  const auto* const of_units = static_cast<const Share*>(p.workspace) + row * p.units * columns.kinds;
  merge.gradients(of_units, p.units, p.logs, gradients);
#pragma unroll 1
  for (;;) {
    turn.store(p, peers, row, first, end, gradients);
    first -= of_block;
    if (first < begin) break;
    turn.load(p, peers, row, first, end);
  }
}

// A block holds its unit, of which each warp has one turn, and waits for the shares of the others. So the arrays are
// read once, and there is one launch. The blocks of a flat row are a cluster (kCluster), or, if flat rows are long and
// few, the launch is cooperative, and shares go through memory.
template <class E, int kInner, bool kCluster>
__global__ void __launch_bounds__(32 * kPartWarps, gradient_blocks(kInner))
    held_kernel(const __grid_constant__ SplitParameters p) {
  using Turn = softmax::Turn<E, kInner>;
  using Merge = softmax::Merge<E, kInner>;
  __shared__ Share of_cluster[kCluster ? kMaxCluster * Turn::Form::kMostColumns : 1];
  if constexpr (kCluster) arrive_at_cluster_start();
  const typename Turn::Form::Peers peers(p.inner);
  const typename Turn::Form::Columns columns(p.inner);
  const int64_t row = blockIdx.x / static_cast<unsigned>(p.units);
  const int unit = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.units));
  const int64_t begin = unit * p.unit_length, end = min(p.length, begin + p.unit_length);
  const int64_t first = begin + threadIdx.x / 32 * (peers.lanes * Turn::kWidth * Turn::kVectors);
  Turn turn;
  turn.load(p, peers, row, first, end);
  Share mine[Turn::kShares];
#pragma unroll
  for (Share& share : mine) share = Share::none();
  turn.take_into(mine, peers, p.logs);
  const Merge merge{peers, columns};
  const Share share = merge.of_block(mine, p.logs);
  Gradient<E> gradients[Turn::kShares];
  if constexpr (kCluster) {
    wait_at_cluster_barrier();  // the others have started, so their shared memory may be written
    if (threadIdx.x < columns.lanes)
      for (int s = threadIdx.x; s < p.units * columns.kinds; s += columns.lanes)
        store_in_cluster(&of_cluster[unit * columns.kinds + columns.kind], s / columns.kinds, share);
    arrive_at_cluster_barrier();
    wait_at_cluster_barrier();
    merge.gradients(of_cluster, p.units, p.logs, gradients);
  } else {
    auto* const shares = static_cast<Share*>(p.workspace) + row * p.units * columns.kinds;
    if (threadIdx.x < columns.kinds) shares[unit * columns.kinds + threadIdx.x] = share;
    cooperative_groups::this_grid().sync();
    merge.gradients(shares, p.units, p.logs, gradients);
  }
  turn.store(p, peers, row, first, end, gradients);
}

template <class E, int kInner>
cudaError_t launch_split(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                         void* workspace) {
  if (plan.traits.stat_bytes != static_cast<int>(sizeof(Share))) return cudaErrorInvalidValue;
  const SplitParameters p = {buffers.y,
                             buffers.x,
                             buffers.out,
                             workspace,
                             problem.rows.length * problem.rows.inner,
                             plan.part_length,
                             plan.result_length,
                             static_cast<int>(problem.rows.inner),
                             static_cast<int>(plan.units),
                             problem.op == Op::kLogSoftmaxJvp};
  const int64_t blocks = problem.rows.outer * plan.units;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  Launch launched;
  launched.block = dim3(plan.threads());
  launched.grid = dim3(static_cast<unsigned>(blocks));
  if constexpr (kInner != 1 && kInner != kWholeRows) {  // rows are too long for a cluster
    if (!plan.split && plan.workspace_bytes == 0) {
      const auto kernel = held_kernel<E, kInner, true>;
      launched.cluster = static_cast<int>(plan.units);
      const cudaError_t status = allow_cluster(reinterpret_cast<const void*>(kernel), launched.cluster);
      return status == cudaSuccess ? launch(stream, launched, kernel, p) : status;
    }
  }
  if (!plan.split) return row_engine::launch_together<held_kernel<E, kInner, false>>(stream, launched, p);
  const cudaError_t status = launch(stream, launched, shares_kernel<E, kInner>, p);
  if (status != cudaSuccess) return status;
  const int64_t parts = (p.length + p.result_length - 1) / p.result_length;
  launched.grid = dim3(static_cast<unsigned>(problem.rows.outer * parts));
  launched.overlap = plan.overlap;
  return launch(stream, launched, results_kernel<E, kInner>, p);
}

template <class E>
cudaError_t launch_split(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                         void* workspace) {
  switch (problem.rows.inner) {
    case 1:
      if constexpr (sizeof(typename E::Bits) == 2)
        if (plan.vector) return launch_split<E, kWholeRows>(stream, plan, problem, buffers, workspace);
      return launch_split<E, 1>(stream, plan, problem, buffers, workspace);
    case 2: return launch_split<E, 2>(stream, plan, problem, buffers, workspace);
    case 4: return launch_split<E, 4>(stream, plan, problem, buffers, workspace);
    default: return launch_split<E, 0>(stream, plan, problem, buffers, workspace);
  }
}

}  // namespace

cudaError_t launch_gradient_split(cudaStream_t stream, const RowPlan& plan, const Problem& problem,
                                  const Buffers& buffers, void* workspace) {
  switch (problem.dtype) {
    case DType::kFloat16: return launch_split<Float16>(stream, plan, problem, buffers, workspace);
    case DType::kBFloat16: return launch_split<BFloat16>(stream, plan, problem, buffers, workspace);
    case DType::kFloat32: return launch_split<Float32>(stream, plan, problem, buffers, workspace);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace jaxgpuops::softmax
