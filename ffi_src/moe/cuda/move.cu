// dispatch gathers whole rows, and scales them if asked. combine adds up the weighted rows of each token.
//
// Bytes moved: each row is read once and each result written once; a token that several rows copy is read again from
// L2. Loads in flight hide the latency of memory: a dispatch thread has several vectors of rows, a combine thread has
// one vector of a token and loads it from several rows before it adds. Sums are in float32 (float64 for float64) and in
// the order of choices, so that every run gives the same bits. Without scales, dispatch copies bytes for any dtype.
#include "common/cuda/dispatch.cuh"
#include "common/cuda/element.h"
#include "common/cuda/launch.cuh"
#include "common/cuda/warp.cuh"
#include "moe/cuda/launch.h"

namespace jaxgpuops::moe {
namespace {

constexpr int kThreads = 256;
constexpr int kMoves = 4;  // vectors that a thread of dispatch copies
constexpr int kAhead = 4;  // rows that a thread of combine loads before it adds

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Most calls are small enough for a 32-bit division, which is much faster than one of 64 bits.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b, bool narrow) {
  return narrow ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
}

// ---- dispatch -------------------------------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(kThreads)
    move_kernel(MoveProblem p, int64_t units, bool narrow, const T* __restrict__ x, const int32_t* __restrict__ index,
                T* __restrict__ out) {
  const int64_t count = p.outer * p.rows * units, first = int64_t{blockIdx.x} * (kThreads * kMoves) + threadIdx.x;
  T moved[kMoves];
#pragma unroll
  for (int n = 0; n < kMoves; ++n) {
    const int64_t at = first + n * kThreads;
    if (at >= count) break;
    const int64_t line = quotient(at, units, narrow), o = quotient(line, p.rows, narrow);
    const int32_t a = index[p.index(o) + line - o * p.rows];
    const int64_t token = o * p.tokens + a / static_cast<int32_t>(p.choices);
    moved[n] = a < 0 ? T{} : x[token * units + at - line * units];
  }
#pragma unroll
  for (int n = 0; n < kMoves; ++n)
    if (first + n * kThreads < count) out[first + n * kThreads] = moved[n];
}

// Neighbouring elements that are loaded and stored together.
template <class Element, int kVector>
struct alignas(kVector * sizeof(typename Element::Bits)) Vector {
  typename Element::Bits bits[kVector];
};

template <class Element, int kVector>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(MoveProblem p, bool narrow, const Vector<Element, kVector>* __restrict__ x,
                 const int32_t* __restrict__ index, const typename Element::Acc* __restrict__ weights,
                 Vector<Element, kVector>* __restrict__ out) {
  const int64_t units = p.inner / kVector, count = p.outer * p.rows * units;
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kMoves) + threadIdx.x;
#pragma unroll
  for (int n = 0; n < kMoves; ++n) {
    const int64_t at = first + n * kThreads;
    if (at >= count) break;
    const int64_t line = quotient(at, units, narrow), o = quotient(line, p.rows, narrow);
    const int32_t a = index[p.index(o) + line - o * p.rows];
    Vector<Element, kVector> v = {};
    if (a >= 0) {
      v = x[(o * p.tokens + a / static_cast<int32_t>(p.choices)) * units + at - line * units];
      const auto scale = weights[p.weight(o) + a];
#pragma unroll
      for (auto& bits : v.bits) bits = Element::store(scale * Element::load(bits));
    }
    out[at] = v;
  }
}

// ---- combine --------------------------------------------------------------------------------------------------------

template <class Element, int kVector>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(MoveProblem p, bool narrow, const Vector<Element, kVector>* __restrict__ y,
                   const int32_t* __restrict__ index, const typename Element::Acc* __restrict__ weights,
                   Vector<Element, kVector>* __restrict__ out) {
  using Acc = typename Element::Acc;
  const int64_t units = p.inner / kVector, at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= p.outer * p.tokens * units) return;
  const int64_t line = quotient(at, units, narrow), o = quotient(line, p.tokens, narrow);
  const int32_t choices = static_cast<int32_t>(p.choices);
  const int64_t a = (line - o * p.tokens) * choices;
  const int32_t* const rows = index + p.index(o) + a;
  if (weights) weights += p.weight(o) + a;
  y += o * p.rows * units + at - line * units;
  Acc sums[kVector] = {};
  for (int32_t j = 0; j < choices; j += kAhead) {
    Vector<Element, kVector> v[kAhead];
    Acc scale[kAhead];
    bool there[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int32_t row = j + n < choices ? rows[j + n] : -1;
      there[n] = row >= 0;
      if (there[n]) v[n] = y[row * units];
      scale[n] = there[n] && weights ? weights[j + n] : Acc{1};
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      if (!there[n]) continue;
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i] += scale[n] * Element::load(v[n].bits[i]);
    }
  }
  Vector<Element, kVector> result;
#pragma unroll
  for (int i = 0; i < kVector; ++i) result.bits[i] = Element::store(sums[i]);
  out[at] = result;
}

// ---- the gradient of combine ----------------------------------------------------------------------------------------

// A block has a token, whose cotangent stays in L1 while the block reads a few of the token's rows of y at a time. For
// each of these rows it adds up the product with the cotangent, and writes the scaled cotangent. It also writes zeros
// to its share of the rows that have no assignment. The order of additions depends on `inner` and the dtype alone, even
// if rows are not aligned to vectors.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    combine_vjp_kernel(MoveProblem p, bool whole, const typename Element::Bits* __restrict__ y,
                       const typename Element::Bits* __restrict__ ct, const int32_t* __restrict__ row_of_assignment,
                       const int32_t* __restrict__ assignment_of_row, const typename Element::Acc* __restrict__ weights,
                       typename Element::Bits* __restrict__ dy, typename Element::Acc* __restrict__ dw) {
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  constexpr int kVector = 16 / sizeof(Bits);
  using V = Vector<Element, kVector>;
  __shared__ Acc sums[kAhead][kThreads / 32];
  const int64_t units = (p.inner + kVector - 1) / kVector;
  const auto read = [&](const Bits* line, int64_t u) {
    V v = {};
    if (whole) {
      v = reinterpret_cast<const V*>(line)[u];
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (u * kVector + i < p.inner) v.bits[i] = line[u * kVector + i];
    }
    return v;
  };
  const auto write = [&](Bits* line, int64_t u, const V& v) {
    if (whole) {
      reinterpret_cast<V*>(line)[u] = v;
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (u * kVector + i < p.inner) line[u * kVector + i] = v.bits[i];
    }
  };

  const int64_t blocks = p.tokens > 0 ? p.tokens : 1, o = blockIdx.x / blocks, t = blockIdx.x - o * blocks;
  y += o * p.rows * p.inner;
  dy += o * p.rows * p.inner;
  const int64_t share = (p.rows + blocks - 1) / blocks, last = min(p.rows, (t + 1) * share);
  for (int64_t r = t * share; r < last; ++r)
    if (assignment_of_row[p.other(o) + r] < 0)
      for (int64_t u = threadIdx.x; u < units; u += blockDim.x) write(dy + r * p.inner, u, V{});
  if (t >= p.tokens) return;

  const int32_t choices = static_cast<int32_t>(p.choices);
  const int32_t* const rows = row_of_assignment + p.index(o) + t * choices;
  ct += (o * p.tokens + t) * p.inner;
  weights += p.weight(o) + t * choices;
  dw += (o * p.tokens + t) * choices;
  for (int32_t j = 0; j < choices; j += kAhead) {
    int64_t row[kAhead];
    Acc scale[kAhead], dot[kAhead] = {};
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      row[n] = j + n < choices ? rows[j + n] : -1;
      scale[n] = row[n] >= 0 ? weights[j + n] : Acc{0};
    }
    for (int64_t u = threadIdx.x; u < units; u += blockDim.x) {
      const V token = read(ct, u);
      V v[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n)
        if (row[n] >= 0) v[n] = read(y + row[n] * p.inner, u);
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        if (row[n] < 0) continue;
        V scaled;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const Acc c = Element::load(token.bits[i]);
          dot[n] += c * Element::load(v[n].bits[i]);
          scaled.bits[i] = Element::store(scale[n] * c);
        }
        write(dy + row[n] * p.inner, u, scaled);
      }
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      dot[n] = sum_of_lanes(dot[n]);
      if (threadIdx.x % 32 == 0) sums[n][threadIdx.x / 32] = dot[n];
    }
    __syncthreads();
    const int n = threadIdx.x;
    if (n < kAhead && j + n < choices) {
      Acc total = 0;
      for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += sums[n][warp];
      dw[j + n] = total;
    }
    __syncthreads();  // before the next iteration overwrites the sums
  }
}

// ---- launches -------------------------------------------------------------------------------------------------------

bool narrow_of(int64_t count) { return count < int64_t{1} << 32; }

// Returns the alignment in bytes, up to 16, that both arrays and all of their rows have.
int alignment(int64_t row_bytes, const void* a, const void* b) {
  const uintptr_t all =
      static_cast<uintptr_t>(row_bytes) | reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b);
  int bytes = 16;
  while (all % bytes) bytes /= 2;
  return bytes;
}

// The same as with_float(), and also for float8.
template <class F>
cudaError_t with_any_float(DType dtype, F f) {
  return is_float8(dtype) ? with_float8(dtype, f) : with_float(dtype, f);
}

// Calls f with an element class and the number of elements that it loads together: as many as 16 bytes hold, or one.
template <class F>
cudaError_t dispatch_vector(DType dtype, bool whole, F f) {
  return with_any_float(dtype, [&](auto element) {
    constexpr int kVector = 16 / sizeof(typename decltype(element)::Bits);
    return whole ? f(element, std::integral_constant<int, kVector>()) : f(element, std::integral_constant<int, 1>());
  });
}

template <class T>
cudaError_t move(cudaStream_t stream, const MoveProblem& p, int64_t row_bytes, const void* x, const int32_t* index,
                 void* out) {
  const int64_t units = row_bytes / static_cast<int64_t>(sizeof(T)), count = p.outer * p.rows * units;
  return launch(stream, {dim3(static_cast<unsigned>(ceil_div(count, kThreads * kMoves))), dim3(kThreads)},
                move_kernel<T>, p, units, narrow_of(count), static_cast<const T*>(x), index, static_cast<T*>(out));
}

}  // namespace

cudaError_t launch_dispatch(cudaStream_t stream, const MoveProblem& p, const void* x, const int32_t* index,
                            const void* weights, void* out) {
  if (p.outer * p.rows * p.inner == 0) return cudaSuccess;
  const int64_t row_bytes = p.inner * bytes_of(p.dtype);
  const int bytes = alignment(row_bytes, x, out);
  if (!weights) {
    switch (bytes) {
      case 16: return move<uint4>(stream, p, row_bytes, x, index, out);
      case 8: return move<uint2>(stream, p, row_bytes, x, index, out);
      case 4: return move<uint32_t>(stream, p, row_bytes, x, index, out);
      case 2: return move<uint16_t>(stream, p, row_bytes, x, index, out);
      default: return move<uint8_t>(stream, p, row_bytes, x, index, out);
    }
  }
  return dispatch_vector(p.dtype, bytes == 16, [&](auto element, auto vector) {
    using Element = decltype(element);
    using V = Vector<Element, vector>;
    const int64_t count = p.outer * p.rows * (p.inner / vector);
    return launch(stream, {dim3(static_cast<unsigned>(ceil_div(count, kThreads * kMoves))), dim3(kThreads)},
                  scale_kernel<Element, vector>, p, narrow_of(count), static_cast<const V*>(x), index,
                  static_cast<const typename Element::Acc*>(weights), static_cast<V*>(out));
  });
}

cudaError_t launch_combine(cudaStream_t stream, const MoveProblem& p, const void* y, const int32_t* index,
                           const void* weights, void* out) {
  if (p.outer * p.tokens * p.inner == 0) return cudaSuccess;
  const bool whole = alignment(p.inner * bytes_of(p.dtype), y, out) == 16;
  return dispatch_vector(p.dtype, whole, [&](auto element, auto vector) {
    using Element = decltype(element);
    using V = Vector<Element, vector>;
    const int64_t count = p.outer * p.tokens * (p.inner / vector);
    return launch(stream, {dim3(static_cast<unsigned>(ceil_div(count, kThreads))), dim3(kThreads)},
                  combine_kernel<Element, vector>, p, narrow_of(count), static_cast<const V*>(y), index,
                  static_cast<const typename Element::Acc*>(weights), static_cast<V*>(out));
  });
}

cudaError_t launch_combine_vjp(cudaStream_t stream, const MoveProblem& p, const void* y, const void* ct,
                               const int32_t* row_of_assignment, const int32_t* assignment_of_row, const void* weights,
                               void* dy, void* dw) {
  if (p.outer == 0 || p.rows * p.inner == 0 && p.assignments() == 0) return cudaSuccess;
  const int64_t row_bytes = p.inner * bytes_of(p.dtype);
  const bool whole = alignment(row_bytes, y, dy) == 16 && alignment(row_bytes, ct, ct) == 16;
  // A row gets one thread for each vector, up to the most of a block. The number depends on sizes alone, since it
  // decides the order of additions.
  const int64_t warps = ceil_div(ceil_div(row_bytes, 16), 32);
  const auto threads = static_cast<unsigned>(std::clamp<int64_t>(32 * warps, 32, kThreads));
  const auto blocks = static_cast<unsigned>(p.outer * std::max<int64_t>(p.tokens, 1));
  return with_any_float(p.dtype, [&](auto element) {
    using Element = decltype(element);
    using Bits = typename Element::Bits;
    using Acc = typename Element::Acc;
    return launch(stream, {dim3(blocks), dim3(threads)}, combine_vjp_kernel<Element>, p, whole,
                  static_cast<const Bits*>(y), static_cast<const Bits*>(ct), row_of_assignment, assignment_of_row,
                  static_cast<const Acc*>(weights), static_cast<Bits*>(dy), static_cast<Acc*>(dw));
  });
}

}  // namespace jaxgpuops::moe
