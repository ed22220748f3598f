// Gradients of cumulative products, extremes and logsumexps from x, along axes of 4 to 32 positions: a lane has a
// column. x and the cotangent are read once, the gradient is written once; the forward result stays in the block.
//
// Rows that a pack holds whole come to registers as packs. Other columns of which less than 128 bytes lie side by side
// (32 along up to eight positions, or if not aligned) come to shared memory as they lie in memory; lanes load the rest
// themselves. Each scan steps over the positions one after the other, as the kernels for short axes do, so the bits are
// those of two kernels.
#pragma once

#include <cstdint>

#include "common/cuda/async_copy.cuh"
#include "scan/cuda/algorithms.cuh"
#include "scan/cuda/runs.h"
#include "scan/cuda/tangents.h"

namespace jaxgpuops::scan {

constexpr int kTurn = 8;  // positions that a lane has in registers

struct ShortFromX {
  const void *t, *x;
  void* out;
  int64_t columns;
  int length, inner, block_columns;
  int image_bytes;  // shared memory of an operand
  bool staged;      // operands come to shared memory as they lie in memory; else each lane brings its own column
  bool packed;      // rows are whole packs there, with 16 bytes between lines
  bool aligned;     // blocks begin at whole packs
  bool backward;    // of the forward scan
  bool one_by_one;  // logsumexps: the forward kernel takes no positions together
  Options options;
};

template <class Forward, class W>
struct ShortColumn {
  using Element = typename W::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using Gradient = Tangent<W>;

  __device__ static Options options_of(const ShortFromX& p) {
    Options o = {};
    o.sign = p.options.sign;
    o.smaller = p.options.smaller;
    o.transpose = true;
    return o;
  }

  // Folds `count` (at most n) positions on, and sets their results.
  template <int n>
  __device__ __forceinline__ static void forward(typename Forward::State& fold, const Bits* x, int count, bool together,
                                                 Acc* y, const Options& o) {
    const auto put = [&](int j, const Out<Acc>& out) { y[j] = Element::load(Element::store(out.first)); };
    if constexpr (kByParts<Forward> && n == kTurn) {
      const auto at = [&](int j) { return In<Acc>{Element::load(x[j])}; };
      if (together && count == n) return step_run<Forward, n>(fold, at, o, put);
      if (together && count == 4) return step_run<Forward, 4>(fold, at, o, put);
    }
#pragma unroll
    for (int j = 0; j < n; ++j)
      if (j < count) put(j, Forward::step(fold, {Element::load(x[j])}, o));
  }

  // Goes back over them. `before`: the result before the first of them. The gradient replaces t.
  template <int n>
  __device__ __forceinline__ static void back(typename Gradient::State& state, Bits* t, const Bits* x, int count,
                                              const Acc* y, Acc before, const Options& o) {
#pragma unroll
    for (int j = n - 1; j >= 0; --j) {
      if (j >= count) continue;
      In<Acc> in = {};
      in.x = Element::load(t[j]);
      in.a = Element::load(x[j]);
      in.y = y[j];
      in.neighbour = j > 0 ? y[j > 0 ? j - 1 : 0] : before;
      t[j] = Element::store(Gradient::step(state, in, o).first);
    }
  }

  // A whole column of n positions.
  template <int n>
  __device__ __forceinline__ static void whole(Bits* t, const Bits* x, const Options& o) {
    Acc y[n];
    auto fold = Forward::identity(o);
    forward<n>(fold, x, n, false, y, o);
    auto state = Gradient::identity(o);
    back<n>(state, t, x, n, y, W::edge(o), o);
  }
};

// Rows of four elements, or of a pack.
template <class Forward, class W>
__global__ void __launch_bounds__(kThreads) scan_packs_from_x(const __grid_constant__ ShortFromX p) {
  using Column = ShortColumn<Forward, W>;
  using Bits = typename Column::Bits;
  constexpr int n = 16 / sizeof(Bits);
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * n, left = p.columns * p.length - first;
  if (left <= 0) return;
  const bool whole = p.aligned && left >= n;
  const Options o = Column::options_of(p);
  Bits *const out = static_cast<Bits*>(p.out) + first, t[n], x[n];
  const auto load = [&](const void* data, Bits(&to)[n]) {
    const Bits* const from = static_cast<const Bits*>(data) + first;
    Pack pack = {};
    if (whole) {
      pack = *reinterpret_cast<const Pack*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i)
        if (i < left) set<Bits>(pack, i, from[i]);
    }
    if (p.backward) pack = reversed<Bits>(pack);
#pragma unroll
    for (int i = 0; i < n; ++i) to[i] = get<Bits>(pack, i);
  };
  load(p.t, t);
  load(p.x, x);
  if (n > 4 && p.length == 4) {
#pragma unroll
    for (int i = 0; i < n; i += 4) Column::template whole<4>(t + i, x + i, o);
  } else {
    Column::template whole<n>(t, x, o);
  }
  Pack pack = {};
#pragma unroll
  for (int i = 0; i < n; ++i) set<Bits>(pack, i, t[i]);
  if (p.backward) pack = reversed<Bits>(pack);
  if (whole) {
    *reinterpret_cast<Pack*>(out) = pack;
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (i < left) out[i] = get<Bits>(pack, i);
  }
}

// Other short columns. kOne: of at most kTurn positions, which stay in registers. The result of a longer column passes
// through shared memory.
template <class Forward, class W, bool kOne>
__global__ void __launch_bounds__(kThreads) scan_short_from_x(const __grid_constant__ ShortFromX p) {
  using Column = ShortColumn<Forward, W>;
  using Element = typename Column::Element;
  using Bits = typename Column::Bits;
  using Acc = typename Column::Acc;
  constexpr int kBytes = sizeof(Bits), n = 16 / kBytes;
  const Options o = Column::options_of(p);
  const int thread = threadIdx.x, threads = blockDim.x, length = p.length, inner = p.inner;
  unsigned char *const xs = dynamic_shared_memory(), *const ts = xs + p.image_bytes;
  Bits* const ys = reinterpret_cast<Bits*>(ts + p.image_bytes) + thread;  // position k at k * threads
  const int64_t first = int64_t{blockIdx.x} * p.block_columns, begin = first * length;
  const int columns = static_cast<int>(min(int64_t{p.block_columns}, p.columns - first)), elements = columns * length;
  const int packs = p.aligned ? elements / n : 0;
  const auto in = [&](unsigned char* image, int element) {
    const int byte = element * kBytes;
    return reinterpret_cast<Bits*>(image + (p.packed ? byte + (byte >> kLineBits << 4) : byte));
  };
  const Bits *const x = static_cast<const Bits*>(p.x), *const t = static_cast<const Bits*>(p.t);
  Bits* const out = static_cast<Bits*>(p.out);

  if (p.staged) {
#pragma unroll 2
    for (int i = thread; i < packs; i += threads) {
      copy_async(in(xs, i * n), x + begin + i * n);
      copy_async(in(ts, i * n), t + begin + i * n);
    }
    commit_async_copies();
#pragma unroll 1
    for (int i = packs * n + thread; i < elements; i += threads) {
      *in(xs, i) = x[begin + i];
      *in(ts, i) = t[begin + i];
    }
    wait_for_async_copies<0>();
    __syncthreads();
  }
  if (thread < columns) {
    // Where position 0 of the lane's column is, in the direction of the forward scan, and how far from the next one: in
    // memory, and in shared memory.
    int64_t global = 0;
    int at = thread, by = threads;
    const int ahead = p.backward ? -inner : inner;
    const int skipped = p.backward ? (length - 1) * inner : 0;
    if (p.staged) {
      at = thread + thread / inner * (length - 1) * inner + skipped;
      by = ahead;
    } else {
      const int64_t column = first + thread;
      const int64_t outer =
          column >> 32 ? column / inner : static_cast<uint32_t>(column) / static_cast<uint32_t>(inner);
      global = column + outer * (length - 1) * inner + skipped;
    }
    const auto load = [&](const Bits* from, int k, int count, Bits(&to)[kTurn]) {
#pragma unroll
      for (int j = 0; j < kTurn; ++j)
        if (j < count) to[j] = from[global + int64_t{k + j} * ahead];
    };
    const auto pack_at = [&](unsigned char* image, int k) {
      return reinterpret_cast<Pack*>(in(image, at + k * by - (p.backward ? n - 1 : 0)));
    };
    const auto read = [&](const Bits* from, unsigned char* image, int k, int count, Bits(&to)[kTurn]) {
      if (kOne && !p.staged) {
        load(from, k, count, to);
      } else if (p.packed) {
#pragma unroll
        for (int j = 0; j < kTurn; j += n) {
          if (j >= count) break;
          Pack pack = *pack_at(image, k + j);
          if (p.backward) pack = reversed<Bits>(pack);
#pragma unroll
          for (int i = 0; i < n; ++i) to[j + i] = get<Bits>(pack, i);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kTurn; ++j)
          if (j < count) to[j] = *in(image, at + (k + j) * by);
      }
    };
    const auto write = [&](int k, int count, const Bits(&from)[kTurn]) {
      if (!p.staged) {
#pragma unroll
        for (int j = 0; j < kTurn; ++j)
          if (j < count) out[global + int64_t{k + j} * ahead] = from[j];
      } else if (p.packed) {
#pragma unroll
        for (int j = 0; j < kTurn; j += n) {
          if (j >= count) break;
          Pack pack = {};
#pragma unroll
          for (int i = 0; i < n; ++i) set<Bits>(pack, i, from[j + i]);
          *pack_at(ts, k + j) = p.backward ? reversed<Bits>(pack) : pack;
        }
      } else {
#pragma unroll
        for (int j = 0; j < kTurn; ++j)
          if (j < count) *in(ts, at + (k + j) * by) = from[j];
      }
    };

    Bits of_x[kTurn], of_t[kTurn];
    Acc y[kTurn];
    auto fold = Forward::identity(o);
    auto state = Column::Gradient::identity(o);
    // The kernels for short axes take four positions together only if there are no more.
    const auto together = [&](int count) { return !p.one_by_one && (count == kTurn || length == 4); };
    if constexpr (kOne) {
      read(x, xs, 0, length, of_x);
      read(t, ts, 0, length, of_t);
      Column::template forward<kTurn>(fold, of_x, length, together(length), y, o);
      Column::template back<kTurn>(state, of_t, of_x, length, y, W::edge(o), o);
      write(0, length, of_t);
    } else {
      if (!p.staged) {
#pragma unroll 2
        for (int k = 0; k < length; k += kTurn) {
          const int count = min(length - k, kTurn);
          load(x, k, count, of_x);
          load(t, k, count, of_t);
#pragma unroll
          for (int j = 0; j < kTurn; ++j) {
            if (j >= count) break;
            *in(xs, at + (k + j) * by) = of_x[j];
            *in(ts, at + (k + j) * by) = of_t[j];
          }
        }
      }
#pragma unroll 1
      for (int k = 0; k < length; k += kTurn) {
        const int count = min(length - k, kTurn);
        read(x, xs, k, count, of_x);
        Column::template forward<kTurn>(fold, of_x, count, together(count), y, o);
#pragma unroll
        for (int j = 0; j < kTurn; ++j)
          if (j < count) ys[(k + j) * threads] = Element::store(y[j]);
      }
#pragma unroll 1
      for (int k = (length - 1) / kTurn * kTurn; k >= 0; k -= kTurn) {
        const int count = min(length - k, kTurn);
        read(x, xs, k, count, of_x);
        read(t, ts, k, count, of_t);
#pragma unroll
        for (int j = 0; j < kTurn; ++j)
          if (j < count) y[j] = Element::load(ys[(k + j) * threads]);
        const Acc before = k > 0 ? Element::load(ys[(k - 1) * threads]) : W::edge(o);
        Column::template back<kTurn>(state, of_t, of_x, count, y, before, o);
        write(k, count, of_t);
      }
    }
  }
  if (p.staged) {
    __syncthreads();
#pragma unroll 2
    for (int i = thread; i < packs; i += threads)
      *reinterpret_cast<Pack*>(out + begin + i * n) = *reinterpret_cast<const Pack*>(in(ts, i * n));
#pragma unroll 1
    for (int i = packs * n + thread; i < elements; i += threads) out[begin + i] = *in(ts, i);
  }
}

template <class Forward, class W>
cudaError_t launch_short_from_x(cudaStream_t stream, const Problem& problem, const Buffers& buffers) {
  using Bits = typename W::Element::Bits;
  constexpr int kBytes = sizeof(Bits), n = 16 / kBytes;
  const auto [outer, length, inner] = problem.rows;
  const Plan forward = plan_scan(forward_of(problem), gpu_of(90));
  const Parameters of_call = parameters_of(forward, problem, buffers, nullptr);
  ShortFromX p = {};
  p.t = buffers.x;
  p.x = buffers.a;
  p.out = buffers.out;
  p.columns = outer * inner;
  p.length = static_cast<int>(length);
  p.inner = static_cast<int>(inner);
  p.backward = problem.reverse;
  p.one_by_one = forward.algorithm == Algorithm::kPacks;
  p.options = of_call.options;
  p.aligned = of_call.aligned;
  if constexpr (n >= 4)
    if (inner == 1 && (length == 4 || length == n)) {
      const int64_t block = int64_t{kThreads} * n;
      const dim3 grid(static_cast<unsigned>((p.columns * length + block - 1) / block));
      return launch(stream, {grid, dim3(kThreads)}, scan_packs_from_x<Forward, W>, p);
    }
  const bool one = length <= kTurn;
  int threads = length * kBytes > kLineBytes ? kThreads / 4 : one ? kThreads : kThreads / 2;
  p.staged = inner * kBytes < (one || !p.aligned ? 32 : kLineBytes);
  while (threads > (p.staged && inner > 1 ? 128 : 64) && p.columns < 264 * threads) threads /= 2;
  p.block_columns = threads;
  if (p.staged) {
    int64_t outers = threads / inner;
    if (outers > n) outers -= outers % n;
    p.block_columns = static_cast<int>(outers * inner);
    p.packed = inner == 1 && n > 1 && length % n == 0;
    p.aligned = p.aligned && p.block_columns * length * kBytes % 16 == 0;
    const int bytes = static_cast<int>(p.block_columns * length * kBytes);
    p.image_bytes = (bytes + (p.packed ? bytes / kLineBytes * 16 : 0) + 31) / 16 * 16;
  } else if (!one) {
    p.image_bytes = static_cast<int>(threads * length * kBytes);
  }
  Launch shape{dim3(static_cast<unsigned>((p.columns + p.block_columns - 1) / p.block_columns)), dim3(threads)};
  shape.shared_bytes = 2 * p.image_bytes + (one ? 0 : threads * length * kBytes);
  return one ? launch(stream, shape, scan_short_from_x<Forward, W, true>, p)
             : launch(stream, shape, scan_short_from_x<Forward, W, false>, p);
}

}  // namespace jaxgpuops::scan
