// dispatch copies each token to its rows, and scales it if asked. combine adds up the weighted rows of each token.
//
// Bytes moved: each token, or row, is read once, and each result is written once. Both kernels go through the tokens in
// order: in the order of rows, the tokens of neighbouring rows could lie further apart than L2 reaches. A thread of
// combine loads its units from several rows before it adds, so that these loads overlap. A unit is a vector of 16
// bytes, or less if rows are not multiples of that; neighbouring threads have neighbouring units. Sums are in float32
// (float64 for float64) and in the order of choices, so that every run gives the same bits. Without scales, dispatch
// copies bytes for any dtype; if these are many, the copy engine does it.
//
// A small call takes about as long as its first loads, each of which also waits for the code before it and for the
// parameters that it needs. So that code is short, and those parameters come first.
#include <algorithm>
#include <type_traits>

#include "common/cuda/bulk_copy.cuh"
#include "common/cuda/dispatch.cuh"
#include "common/cuda/element.h"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/warp.cuh"
#include "moe/cuda/combine_vjp.cuh"
#include "moe/cuda/launch.h"
#include "moe/cuda/rows.cuh"

namespace jaxgpuops::moe {
namespace {

constexpr int kThreads = 256;  // threads of a block of dispatch
constexpr int kCombineThreads = 128;
// Blocks of combine that a multiprocessor holds, if all choices are loaded together. Without this number, the compiler
// saves registers by asking for some rows only after it has added others.
constexpr int kCombineBlocks = 7;
constexpr int kColumns = 4;                // units of a row that a thread has if units are small
constexpr int kAhead = 4;                  // rows whose indices, or elements, a thread loads before it uses them
constexpr int64_t kManyThreads = 1 << 17;  // with so many threads, each may do more work
constexpr int64_t kWideRow = 96;           // if a token has so many threads or more, no block has several tokens
constexpr int64_t kMostLines = 65535;      // of the second dimension of a grid
constexpr int64_t kManyBytes = 48 << 20;   // from so many bytes of rows on, the copy engine is faster
constexpr int64_t kManyChoices = 6;        // if a token has so many rows
// Vectors of a row, and rows, beyond which a warp of the gradient of combine has a row.
constexpr int64_t kLongRow = 512, kManyRows = 132 * 16;
// Dispatch goes through rows, not tokens, if units have less than 16 bytes, a row has at most kNarrowRow of them, or
// kSharedRow if a token has two to four rows, and there are at least kManyNarrow rows. A thread then has kNarrowUnits
// units. (150000 rows of 19 units, four to a token, took 7.9 us so, and 14.1 by tokens; 120000 of 33, eight to a token,
// 10.4 and 8.7.)
constexpr int64_t kNarrowRow = 8, kSharedRow = 24, kManyNarrow = 1 << 15;
constexpr uint32_t kNarrowUnits = 4;
constexpr int64_t kStrip = 16 << 10;  // the most bytes that a block of the copy engine's has of a token

// The line of the grid in which a block is. A line has the parts of a token, or of several narrow ones: see Shares.
__device__ __forceinline__ uint32_t line_of_grid() { return blockIdx.z * gridDim.y + blockIdx.y; }
__device__ __forceinline__ uint32_t token_of_thread() { return line_of_grid() * blockDim.y + threadIdx.y; }
// The first unit of the token that the thread has.
__device__ __forceinline__ uint32_t unit_of_thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

// The place of a row, for a pointer to the same place of row 0. Rows have less than 4 GB, so that this is one
// instruction; the compiler takes the product apart.
template <class V>
__device__ __forceinline__ V* row_at(V* rows, uint32_t row, uint32_t units) {
  size_t address = __cvta_generic_to_global(rows);
  asm("mad.wide.u32 %0, %1, %2, %0;" : "+l"(address) : "r"(row), "r"(units * static_cast<uint32_t>(sizeof(V))));
  return static_cast<V*>(__cvta_global_to_generic(address));
}

// Neighbouring numbers that are loaded together.
template <class T, int kCount>
struct alignas(kCount * sizeof(T) % 16 == 0  ? 16
               : kCount * sizeof(T) % 8 == 0 ? 8
                                             : sizeof(T)) Several {
  T of[kCount];
};
// If `kAll`, a token has kCount choices: all are loaded, and together. Else those from the j-th on; others get `none`.
template <bool kAll, int kCount, class T>
__device__ __forceinline__ Several<T, kCount> numbers_from(const T* of_token, uint32_t j, uint32_t choices, T none) {
  if constexpr (kAll) {
    return *reinterpret_cast<const Several<T, kCount>*>(of_token);
  } else {
    Several<T, kCount> found;
#pragma unroll
    for (int n = 0; n < kCount; ++n) found.of[n] = j + n < choices ? of_token[j + n] : none;
    return found;
  }
}

// ---- dispatch -------------------------------------------------------------------------------------------------------

// What dispatch writes to a row: its token, or the token times the assignment's weight.
struct Copied {
  __device__ __forceinline__ int factor(const MoveProblem&, int64_t) const { return 1; }
  template <class V>
  __device__ __forceinline__ V operator()(const V& v, int) const {
    return v;
  }
};

template <class Element>
struct Scaled {
  const void* weights;
  __device__ __forceinline__ typename Element::Acc factor(const MoveProblem& p, int64_t at) const {
    return Weight<Element>::load(p, weights, at).number(p);
  }
  template <class V>
  __device__ __forceinline__ V operator()(V v, typename Element::Acc factor) const {
#pragma unroll
    for (auto& bits : v.bits) bits = Element::store(factor * Element::load(bits));
    return v;
  }
};

// The first lines of the grid copy tokens, the others search for rows that have no token.
template <class V, int kEach, bool kAll, int kTogether, class Made>
__global__ void __launch_bounds__(kThreads)
    dispatch_kernel(const V* __restrict__ x, const int32_t* __restrict__ row_of_assignment, V* __restrict__ out,
                    uint32_t units, uint32_t threads, uint32_t choices, uint32_t rows, uint32_t tokens, uint32_t lines,
                    Made made, const int32_t* __restrict__ assignment_of_row, const __grid_constant__ MoveProblem p) {
  const uint32_t line = line_of_grid(), first = unit_of_thread(), token = token_of_thread();
  if (__builtin_expect(line >= lines, false))  // so that its code stands after that of the others
    return fill(p, int64_t{line - lines} * gridDim.x + blockIdx.x, assignment_of_row, units, out);
  if (first >= threads || token >= tokens) return;
  int64_t a = int64_t{token} * choices;
  row_of_assignment += a;
  x += uint64_t{token} * units + first;
  out += first;
  if (p.outer != 1) {
    const Shift shift = shift_of_batch(p, token);
    row_of_assignment += shift.index;
    out += shift.row * units;
    a += shift.weight;  // from here on, where the token's weights begin
  }
  V v[kEach];
#pragma unroll
  for (int n = 0; n < kEach; ++n)
    if (first + n * threads < units) v[n] = x[n * threads];
#pragma unroll 1
  for (uint32_t j = 0; kAll ? j == 0 : j < choices; j += kTogether) {
    const auto row = numbers_from<kAll, kTogether, int32_t>(row_of_assignment, j, choices, -1);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (static_cast<uint32_t>(row.of[i]) >= rows) continue;  // skips -1, too
      const auto factor = made.factor(p, a + j + i);
#pragma unroll
      for (int n = 0; n < kEach; ++n)
        if (first + n * threads < units) row_at(out, row.of[i], units)[n * threads] = made(v[n], factor);
    }
  }
}

// A warp brings a strip of a token into shared memory, from where it goes to all rows.
__global__ void __launch_bounds__(32)
    dispatch_bulk_kernel(const uint4* __restrict__ x, const int32_t* __restrict__ row_of_assignment,
                         uint4* __restrict__ out, uint32_t units, uint32_t strip, uint32_t choices, uint32_t rows,
                         uint32_t tokens, const int32_t* __restrict__ assignment_of_row,
                         const __grid_constant__ MoveProblem p) {
  // Bulk copies are slow if memory and shared memory are not aligned alike. So the barrier comes after the strip.
  uint4* const held = reinterpret_cast<uint4*>(dynamic_shared_memory());
  uint64_t* const copied = reinterpret_cast<uint64_t*>(held + strip);
  const uint32_t token = line_of_grid(), first = blockIdx.x * strip, lane = threadIdx.x;
  if (token >= tokens) return fill(p, int64_t{token - tokens} * gridDim.x + blockIdx.x, assignment_of_row, units, out);
  const uint32_t bytes = min(strip, units - first) * static_cast<uint32_t>(sizeof(uint4));
  if (lane == 0) {
    make_copy_barrier(copied);
    make_barriers_visible();
    expect_copies(copied, bytes);
    copy_bulk(held, x + uint64_t{token} * units + first, bytes, copied);
  }
  row_of_assignment += int64_t{token} * choices;
  out += first;
  if (p.outer != 1) {
    const Shift shift = shift_of_batch(p, token);
    row_of_assignment += shift.index;
    out += shift.row * units;
  }
  uint32_t row = lane < choices ? row_of_assignment[lane] : ~0u;
  __syncwarp();
  wait_for_copies(copied, 0);
  for (uint32_t j = lane; j < choices; j += 32) {
    if (row < rows) copy_bulk_back(row_at(out, row, units), held, bytes);
    row = j + 32 < choices ? row_of_assignment[j + 32] : ~0u;
  }
  wait_for_copies_back();
}

// Of many narrow rows: a thread has units of rows, and reads the tokens whose rows they are. Neighbouring threads write
// neighbouring units; by dispatch_kernel, a token would write its few bytes to places far apart. (134995 x 2 float32
// to 6 rows each took 14.9 us by that.)
template <class V, class Made>
__global__ void __launch_bounds__(kThreads)
    dispatch_narrow_kernel(const V* __restrict__ x, const int32_t* __restrict__ assignment_of_row, V* __restrict__ out,
                           uint32_t units, uint32_t choices, uint32_t count, uint32_t assignments, Made made,
                           const __grid_constant__ MoveProblem p) {
  const uint32_t first = blockIdx.x * (kThreads * kNarrowUnits) + threadIdx.x;
  uint32_t unit[kNarrowUnits], a[kNarrowUnits];
#pragma unroll
  for (uint32_t n = 0; n < kNarrowUnits; ++n) {
    const uint32_t i = min(first + n * kThreads, count - 1), row = i / units;
    unit[n] = i - row * units;
    a[n] = assignment_of_row[row];
  }
  V v[kNarrowUnits];
#pragma unroll
  for (uint32_t n = 0; n < kNarrowUnits; ++n) {
    v[n] = V{};
    if (a[n] < assignments) v[n] = made(x[a[n] / choices * units + unit[n]], made.factor(p, a[n]));  // others are -1
  }
#pragma unroll
  for (uint32_t n = 0; n < kNarrowUnits; ++n)
    if (first + n * kThreads < count) out[first + n * kThreads] = v[n];
}

// ---- combine --------------------------------------------------------------------------------------------------------

// Loads what is at `at`, or returns zeros. The load is predicated, so there is no branch.
__device__ __forceinline__ uint4 load_or_zeros(const uint4* at, bool there) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(__cvta_generic_to_global(at)), "r"(static_cast<uint32_t>(there)));
  return v;
}

// With kAll, a missing row counts as zeros with a weight of zero: branches that skip missing rows make a small call 5
// to 12 % slower. Loops over the choices, and kernels of wide or narrow elements, are faster with branches.
//
// W: float16 or bfloat16 like Element, or the type of the sums. It is not chosen by a branch as for other kernels,
// since that took 3 to 5 %, also without weights.
template <class Element, class W, int kVector, int kEach, bool kAll, int kTogether>
__global__ void __launch_bounds__(kCombineThreads, kAll ? kCombineBlocks : 0)
    combine_kernel(const Vector<Element, kVector>* __restrict__ y, const int32_t* __restrict__ index,
                   const W* __restrict__ weights, Vector<Element, kVector>* __restrict__ out, uint32_t units,
                   uint32_t threads, uint32_t choices, uint32_t tokens, const __grid_constant__ MoveProblem p) {
  using V = Vector<Element, kVector>;
  // Vectors are held as they were loaded. As elements of 8 or 16 bits they would be taken apart, and waited for, before
  // the next one is asked for.
  using Held = std::conditional_t<sizeof(V) == 16, uint4, V>;
  using Acc = typename Element::Acc;
  const auto number = [](W weight) -> Acc {
    if constexpr (std::is_same_v<W, Acc>)
      return weight;
    else
      return Element::load(weight);
  };
  const uint32_t first = unit_of_thread(), token = token_of_thread();
  if (first >= threads || token >= tokens) return;
  index += int64_t{token} * choices;
  if (weights) weights += int64_t{token} * choices;
  y += first;
  if (p.outer != 1) {
    const Shift shift = shift_of_batch(p, token);
    index += shift.index;
    if (weights) weights += shift.weight;
    y += shift.row * units;
  }
  const auto within = [&](int c) { return first + c * threads < units; };
  Acc sums[kEach][kVector] = {};
  Several<W, kTogether> scale;
  const auto load_weights = [&](uint32_t j) {
    if (weights) {
      scale = numbers_from<kAll, kTogether, W>(weights, j, choices, W{});
    } else {
#pragma unroll
      for (auto& one : scale.of) one = W{1};  // narrow weights are never null
    }
  };
  constexpr bool kWeightsFirst =
      kTogether > kAhead;  // what the compiler makes of the other order takes up to 15 % more
#pragma unroll 1
  for (uint32_t j = 0; kAll ? j == 0 : j < choices; j += kTogether) {
    const auto row = numbers_from<kAll, kTogether, int32_t>(index, j, choices, -1);
    if (kWeightsFirst) load_weights(j);
    Held held[kTogether][kEach];
#pragma unroll
    for (int n = 0; n < kTogether; ++n)
#pragma unroll
      for (int c = 0; c < kEach; ++c) {
        if constexpr (kAll)
          held[n][c] = load_or_zeros(reinterpret_cast<const Held*>(row_at(y, row.of[n], units)) + c * threads,
                                     row.of[n] >= 0 && within(c));
        else if (row.of[n] >= 0 && within(c))
          held[n][c] = reinterpret_cast<const Held*>(row_at(y, row.of[n], units))[c * threads];
      }
    if (!kWeightsFirst) load_weights(j);
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      if (!kAll && row.of[n] < 0) continue;
      const Acc factor = !kAll || row.of[n] >= 0 ? number(scale.of[n]) : Acc{0};
#pragma unroll
      for (int c = 0; c < kEach; ++c) {
        const auto v = bits_as<V>(held[n][c]);
#pragma unroll
        for (int i = 0; i < kVector; ++i) sums[c][i] += factor * Element::load(v.bits[i]);
      }
    }
  }
  out += uint64_t{token} * units + first;
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    if (!within(c)) continue;
    V result;
#pragma unroll
    for (int i = 0; i < kVector; ++i) result.bits[i] = Element::store(sums[c][i]);
    out[c * threads] = result;
  }
}

// ---- launches -------------------------------------------------------------------------------------------------------

// Returns the alignment in bytes, up to 16, that both arrays and all of their rows have.
int alignment(int64_t row_bytes, const void* a, const void* b) {
  const uintptr_t all =
      static_cast<uintptr_t>(row_bytes) | reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b);
  int bytes = 16;
  while (all % bytes) bytes /= 2;
  return bytes;
}

// Calls f with the element class of a float dtype, including float8, which with_float() lacks.
template <class F>
cudaError_t with_any_float(DType dtype, F f) {
  return is_float8(dtype) ? with_float8(dtype, f) : with_float(dtype, f);
}

// Calls f with an element class and the number of elements that it loads together: as many as 16 bytes hold if rows
// are aligned to that, else a pair of 16 or 32 bits each, if they suit pairs, or one.
template <class F>
cudaError_t dispatch_vector(DType dtype, int alignment, F f) {
  return with_any_float(dtype, [&](auto element) {
    constexpr int kBytes = sizeof(typename decltype(element)::Bits);
    if (alignment == 16) return f(element, std::integral_constant<int, 16 / kBytes>());
    if constexpr (kBytes == 2 || kBytes == 4)
      if (alignment >= 2 * kBytes) return f(element, std::integral_constant<int, 2>());
    return f(element, std::integral_constant<int, 1>());
  });
}

dim3 grid_of(int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); }

// A grid of so many lines of blocks.
dim3 grid_of(int64_t parts, int64_t lines) {
  const int64_t planes = std::max<int64_t>(ceil_div(lines, kMostLines), 1);
  return dim3(static_cast<unsigned>(parts), static_cast<unsigned>(ceil_div(lines, planes)),
              static_cast<unsigned>(planes));
}

// How blocks of about `most` threads share tokens of `units` units, `each` of which belong to a thread. The blocks of a
// line have the parts of a token, or the only block has several narrow tokens.
struct Shares {
  int64_t threads, parts = 1, tokens_at_once = 1, lines;
  dim3 block;

  Shares(const MoveProblem& p, int64_t units, int64_t each, int64_t most) : threads(ceil_div(units, each)) {
    int64_t wide = threads;
    if (threads >= kWideRow) {
      parts = ceil_div(threads, most);
      wide = ceil_div(ceil_div(threads, parts), 32) * 32;
    } else {
      tokens_at_once = most / threads;
    }
    block = dim3(static_cast<unsigned>(wide), static_cast<unsigned>(tokens_at_once));
    lines = ceil_div(p.outer * p.tokens, tokens_at_once);
  }
};

// Whether the numbers of a token's assignments, up to 16 bytes of them, lie where a vector of so many may be loaded.
bool aligned_numbers(const void* numbers, const MoveProblem& p, const IndexMap& map) {
  if (reinterpret_cast<uintptr_t>(numbers) % 16) return false;
  const auto whole = [](int64_t stride) { return stride % 8 == 0; };
  return p.outer == 1 || std::all_of(map.stride, map.stride + map.groups, whole);
}

template <class V, class Made>
cudaError_t dispatch(cudaStream_t stream, const MoveProblem& p, int64_t units, Made made, const void* x,
                     const int32_t* row_of_assignment, const int32_t* assignment_of_row, void* out) {
  const auto start = [&](auto each, auto all, auto together) {
    const Shares shares(p, units, each, kThreads);
    const int64_t more = ceil_div(fill_blocks(p, shares.block.x * shares.block.y), shares.parts);
    return launch(stream, {grid_of(shares.parts, shares.lines + more), shares.block},
                  dispatch_kernel<V, each, all, together, Made>, static_cast<const V*>(x), row_of_assignment,
                  static_cast<V*>(out), units, shares.threads, p.choices, p.rows, p.outer * p.tokens, shares.lines,
                  made, assignment_of_row, p);
  };
  const int64_t narrow = p.choices > 1 && p.choices <= 4 ? kSharedRow : kNarrowRow;
  if (const int64_t count = p.rows * units;
      sizeof(V) < 16 && p.outer == 1 && units <= narrow && p.rows >= kManyNarrow && count <= INT32_MAX) {
    return launch(stream, {grid_of(ceil_div(count, kThreads * kNarrowUnits)), dim3(kThreads)},
                  dispatch_narrow_kernel<V, Made>, static_cast<const V*>(x), assignment_of_row, static_cast<V*>(out),
                  units, p.choices, count, p.assignments(), made, p);
  }
  const std::integral_constant<int, 1> one;
  const std::integral_constant<int, kAhead> ahead;
  // A thread that has one small unit does too little work, unless it writes that unit to many rows.
  if constexpr (sizeof(V) < 16)
    if (units > 2 && p.choices <= 4) return start(std::integral_constant<int, kColumns>(), std::false_type(), ahead);
  if constexpr (std::is_same_v<V, uint4>) {
    if (aligned_numbers(row_of_assignment, p, p.index)) {
      switch (p.choices) {
        case 2: return start(one, std::true_type(), std::integral_constant<int, 2>());
        case 4: return start(one, std::true_type(), std::integral_constant<int, 4>());
        case 6: return start(one, std::true_type(), std::integral_constant<int, 6>());
        case 8: return start(one, std::true_type(), std::integral_constant<int, 8>());
      }
    }
  }
  return start(one, std::false_type(), ahead);
}

cudaError_t dispatch_by_copies(cudaStream_t stream, const MoveProblem& p, int64_t units, const void* x,
                               const int32_t* row_of_assignment, const int32_t* assignment_of_row, void* out) {
  const int64_t strips = ceil_div(units * 16, kStrip), strip = ceil_div(units, strips);
  const int64_t tokens = p.outer * p.tokens, more = ceil_div(fill_blocks(p, 32), strips);
  Launch shape;
  shape.grid = grid_of(strips, tokens + more);
  shape.block = dim3(32);
  shape.shared_bytes = static_cast<size_t>(16 * strip + 16);
  return launch(stream, shape, dispatch_bulk_kernel, static_cast<const uint4*>(x), row_of_assignment,
                static_cast<uint4*>(out), units, strip, p.choices, p.rows, tokens, assignment_of_row, p);
}

}  // namespace

cudaError_t launch_dispatch(cudaStream_t stream, const Gpu& gpu, const MoveProblem& p, const void* x,
                            const int32_t* row_of_assignment, const int32_t* assignment_of_row, const void* weights,
                            void* out) {
  if (p.outer * p.rows * p.inner == 0) return cudaSuccess;
  if (!countable(p)) return cudaErrorInvalidValue;
  const int64_t row_bytes = p.inner * bytes_of(p.dtype);
  const int bytes = alignment(row_bytes, x, out);
  const auto copy = [&](auto unit) {
    using V = decltype(unit);
    return dispatch<V>(stream, p, row_bytes / static_cast<int64_t>(sizeof(V)), Copied{}, x, row_of_assignment,
                       assignment_of_row, out);
  };
  if (!weights) {
    if (gpu.bulk_copy && bytes == 16 && p.choices >= kManyChoices && p.outer * p.rows * row_bytes >= kManyBytes)
      return dispatch_by_copies(stream, p, row_bytes / 16, x, row_of_assignment, assignment_of_row, out);
    switch (bytes) {
      case 16: return copy(uint4{});
      case 8: return copy(uint2{});
      case 4: return copy(uint32_t{});
      case 2: return copy(uint16_t{});
      default: return copy(uint8_t{});
    }
  }
  return dispatch_vector(p.dtype, bytes, [&](auto element, auto vector) {
    using Element = decltype(element);
    const Scaled<Element> made{weights};
    return dispatch<Vector<Element, vector>>(stream, p, p.inner / vector, made, x, row_of_assignment, assignment_of_row,
                                             out);
  });
}

cudaError_t launch_combine(cudaStream_t stream, const MoveProblem& p, const void* y, const int32_t* index,
                           const void* weights, void* out) {
  if (p.outer * p.tokens * p.inner == 0) return cudaSuccess;
  if (!countable(p)) return cudaErrorInvalidValue;
  const int bytes = alignment(p.inner * bytes_of(p.dtype), y, out);
  const bool aligned = aligned_numbers(index, p, p.index) && aligned_numbers(weights, p, p.weight);
  return dispatch_vector(p.dtype, bytes, [&](auto element, auto vector) {
    using Element = decltype(element);
    using V = Vector<Element, vector>;
    const int64_t units = p.inner / vector;
    const auto start = [&](auto each, auto all, auto together) {
      const Shares shares(p, units, each, kCombineThreads);
      const auto with = [&](auto weight) {
        using W = decltype(weight);
        return launch(stream, {grid_of(shares.parts, shares.lines), shares.block},
                      combine_kernel<Element, W, vector, each, all, together>, static_cast<const V*>(y), index,
                      static_cast<const W*>(weights), static_cast<V*>(out), units, shares.threads, p.choices,
                      p.outer * p.tokens, p);
      };
      if constexpr (sizeof(typename Element::Bits) == 2)
        if (p.narrow) return with(typename Element::Bits{});
      return with(typename Element::Acc{});
    };
    const std::false_type some;
    const std::integral_constant<int, 1> one;
    const std::integral_constant<int, 2> two;
    const std::integral_constant<int, kAhead> ahead;
    constexpr int64_t kBytes = sizeof(typename Element::Bits);
    if constexpr (vector * kBytes == 16) {
      if constexpr (kBytes == 2 || kBytes == 4) {
        if (aligned) {
          switch (p.choices) {
            case 1: return start(two, std::true_type(), one);
            case 2: return start(two, std::true_type(), two);
            case 4: return start(one, std::true_type(), ahead);
            case 6: return start(one, std::true_type(), std::integral_constant<int, 6>());
            case 8: return start(one, std::true_type(), std::integral_constant<int, 8>());
          }
        }
      } else if (p.choices <= 2) {
        return start(two, some, two);
      }
      if constexpr (kBytes > 1)  // a vector of bytes becomes too many numbers for so many rows
        if (p.choices > kAhead) return start(one, some, std::integral_constant<int, 2 * kAhead>());
      return start(one, some, ahead);
    } else {
      // In a small call, each wait for rows counts, and there are threads enough for one unit each.
      if (p.choices > kAhead && (units <= 2 || p.outer * p.tokens * units <= kManyThreads))
        return start(one, some, std::integral_constant<int, 2 * kAhead>());
      return units > 2 ? start(std::integral_constant<int, kColumns>(), some, ahead) : start(one, some, ahead);
    }
  });
}

cudaError_t launch_combine_vjp(cudaStream_t stream, const MoveProblem& p, const void* y, const void* ct,
                               const int32_t* row_of_assignment, const int32_t* assignment_of_row, const void* weights,
                               void* dy, void* dw) {
  if (p.outer == 0 || p.rows * p.inner == 0 && p.assignments() == 0) return cudaSuccess;
  if (!countable(p)) return cudaErrorInvalidValue;
  const int64_t row_bytes = p.inner * bytes_of(p.dtype);
  const bool whole = alignment(row_bytes, y, dy) == 16 && alignment(row_bytes, ct, ct) == 16;
  // The number of threads of a row depends on sizes alone, since it decides the order of additions. Together they take
  // the whole row at a time, or equal parts of it.
  const int64_t units = std::max<int64_t>(ceil_div(row_bytes, 16), 1),
                times = ceil_div(units, kUnits * kGradientThreads);
  const int64_t threads = ceil_div(ceil_div(units, kUnits * times), 32) * 32;
  // If there are few tokens, several blocks share the rows of a token.
  const int64_t least = ceil_div(p.choices, kGradientRows);
  const int64_t shared = kManyThreads / std::max<int64_t>(p.outer * p.tokens * threads, 1);
  const int64_t each = ceil_div(p.choices, std::clamp(shared, least, p.choices)), parts = ceil_div(p.choices, each);
  const bool by_warp =
      whole && times == 1 && units > kLongRow && p.choices > 1 && p.outer * p.tokens * p.choices > kManyRows;
  return with_any_float(p.dtype, [&](auto element) {
    if constexpr (sizeof(typename decltype(element)::Bits) > 1) {
      if (by_warp) {
        using Element = decltype(element);
        using Bits = typename Element::Bits;
        const int64_t parts = ceil_div(p.choices, kRowWarps), block = 32 * ceil_div(p.choices, parts);
        const int64_t blocks = p.outer * p.tokens * parts;
        Launch shape;
        shape.grid = grid_of(blocks + fill_blocks(p, block));
        shape.block = grid_of(block);
        shape.shared_bytes = static_cast<size_t>(row_bytes);
        return launch(stream, shape, combine_vjp_by_warp_kernel<Element>, p, blocks, parts, static_cast<const Bits*>(y),
                      static_cast<const Bits*>(ct), row_of_assignment, assignment_of_row, weights,
                      static_cast<Bits*>(dy), dw);
      }
    }
    const auto start = [&](auto whole, auto by_row) {
      using Element = decltype(element);
      using Bits = typename Element::Bits;
      const int64_t blocks = p.outer * (by_row ? p.rows : p.tokens * parts);
      const int64_t more = by_row ? ceil_div(p.outer * p.assignments(), threads) : fill_blocks(p, threads);
      return launch(stream, {grid_of(blocks + more), grid_of(threads)}, combine_vjp_kernel<Element, whole, by_row>, p,
                    blocks, parts, each, static_cast<const Bits*>(y), static_cast<const Bits*>(ct), row_of_assignment,
                    assignment_of_row, weights, static_cast<Bits*>(dy), dw);
    };
    if (!whole) return start(std::false_type(), std::false_type());
    if constexpr (sizeof(typename decltype(element)::Bits) > 1)  // others load no row early
      if (each == 1 && parts > 1) return start(std::true_type(), std::true_type());
    return start(std::true_type(), std::false_type());
  });
}

}  // namespace jaxgpuops::moe
