// take and put. take is one gather: it reads each index and writes each result once. put writes its output once, in one
// kernel: zeros together with the updates. If there are many updates, put is two kernels instead, one that writes zeros
// and one that scatters, so that updated elements are written twice.
//
// Elements are moved without being interpreted, so kernels are compiled for each element width, not for each dtype. The
// alignment of a pointer may be that of an element only.
#include "along_axis/cuda/launch.h"

#include <algorithm>

#include "common/cuda/launch.cuh"
#include "common/rounding.h"

namespace jaxgpuops::along_axis {
namespace {

constexpr int kThreads = 256;

// ---- take -----------------------------------------------------------------------------------------------------------

constexpr int kTakesPerThread = 4;

template <class T>
__global__ void __launch_bounds__(kThreads) take_kernel(Rows rows, int64_t k, const T* __restrict__ x,
                                                        const int32_t* __restrict__ indices, T* __restrict__ out) {
  const int64_t count = rows.outer * k * rows.inner;
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kTakesPerThread) + threadIdx.x;
#pragma unroll
  for (int n = 0; n < kTakesPerThread; ++n) {
    const int64_t at = first + n * kThreads;  // index into (outer, k, inner)
    if (at >= count) return;
    const int64_t outer = at / (k * rows.inner);
    const int64_t i = rows.inner == 1 ? 0 : at % rows.inner;
    out[at] = x[(outer * rows.length + indices[at]) * rows.inner + i];
  }
}

template <class T>
cudaError_t take(cudaStream_t stream, const Problem& problem, const void* x, const int32_t* indices, void* out) {
  const int64_t count = problem.rows.count() * problem.k;
  if (count == 0) return cudaSuccess;
  const int64_t blocks = ceil_div(count, kThreads * kTakesPerThread);
  return launch(stream, {dim3(blocks), dim3(kThreads)}, take_kernel<T>, problem.rows, problem.k,
                static_cast<const T*>(x), indices, static_cast<T*>(out));
}

// ---- put ------------------------------------------------------------------------------------------------------------

// A box is a part of the output that one block writes alone: its zeros, and the updates that fall into it. The fields
// are its extent, and the number of boxes along the axis and across it.
struct Box {
  int64_t outer, length, inner;
  uint32_t parts, strips;
};

constexpr int64_t kBoxBytes = 32 << 10;
constexpr int64_t kLeastBoxBytes = 4 << 10;
// If there would be fewer boxes than this, which is two for each multiprocessor of an H200, boxes are made smaller.
constexpr int64_t kFewBoxes = 264;
constexpr int64_t kLineBytes = 128;  // width of a strip, which is that of a cache line
constexpr int64_t kReadShare = 4;    // a box writes at least this many times the bytes of the indices that it reads

__device__ int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Reads take long while memory is busy with writes. So each block prefetches the updates of a block that runs much
// later, which then finds them in L2.
constexpr uint32_t kBlocksAhead = 768;

__device__ void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// A few updates for each thread, loaded together. Update n is read from address(n), and with index j it goes to
// place(n, j) of the box; a negative place means that the update belongs to another box. `all` says that every update
// belongs to this box. ask() only issues loads, resolve() waits for them.
template <class T>
struct Batch {
  static constexpr int kSize = 4;

  template <class AddressOf>
  __device__ void ask(const T* updates, const int32_t* indices, uint32_t first, uint32_t count, bool all,
                      AddressOf address) {
#pragma unroll
    for (int b = 0; b < kSize; ++b) {
      const uint32_t n = first + b * kThreads + threadIdx.x;
      if (n < count) axis[b] = indices[address(n)];
      if (n < count && all) values[b] = updates[address(n)];
    }
  }

  template <class AddressOf, class PlaceOf>
  __device__ void resolve(const T* updates, uint32_t first, uint32_t count, bool all, AddressOf address,
                          PlaceOf place) {
#pragma unroll
    for (int b = 0; b < kSize; ++b) {
      const uint32_t n = first + b * kThreads + threadIdx.x;
      places[b] = n < count ? place(n, axis[b]) : -1;
      if (places[b] >= 0 && !all) values[b] = updates[address(n)];
    }
  }

  __device__ void store(T* box) const {
#pragma unroll
    for (int b = 0; b < kSize; ++b)
      if (places[b] >= 0) box[places[b]] = values[b];
  }

  int32_t axis[kSize];
  T values[kSize];
  int places[kSize];
};

// Writes boxes that are contiguous in memory: some whole outer indices where these are small, else a part of the axis
// of one. A block assembles its box in shared memory, so that global memory is written once, in 16-byte vectors.
template <class T>
__global__ void __launch_bounds__(kThreads, 6) put_runs(Rows rows, int64_t k, Box box, const T* __restrict__ updates,
                                                        const int32_t* __restrict__ indices, T* out) {
  const uint32_t parts = box.parts;
  // most calls have one part, and skip the wait for a division
  const uint32_t whole = parts == 1 ? blockIdx.x : blockIdx.x / parts;
  const int64_t o0 = whole * box.outer, o1 = smaller(o0 + box.outer, rows.outer);
  const int64_t j0 = (blockIdx.x - whole * parts) * box.length, j1 = smaller(j0 + box.length, rows.length);
  const int64_t row_updates = k * rows.inner, row_size = rows.length * rows.inner;
  T* const first = out + o0 * row_size + j0 * rows.inner;
  const int64_t size = (o1 - 1 - o0) * row_size + (j1 - j0) * rows.inner;

  // The image in shared memory has the same alignment as the box in global memory; begin and end are its byte offsets.
  constexpr int kSlot = 16;
  extern __shared__ uint4 slots[];
  unsigned char* const image = reinterpret_cast<unsigned char*>(slots);
  const int begin = static_cast<int>(reinterpret_cast<uintptr_t>(first) % kSlot);
  const int end = begin + static_cast<int>(size * sizeof(T));

  const auto count = static_cast<uint32_t>((o1 - o0) * row_updates);
  const auto address = [&](uint32_t n) { return o0 * row_updates + n; };
  const auto place = [&](uint32_t n, int32_t j) {
    if (j < j0 || j >= j1) return -1;
    const uint32_t o = n / static_cast<uint32_t>(row_updates);
    const uint32_t i = rows.inner == 1 ? 0 : n % static_cast<uint32_t>(rows.inner);
    return static_cast<int>(o * row_size + (j - j0) * rows.inner + i);
  };
  Batch<T> batch;
  batch.ask(updates, indices, 0, count, parts == 1, address);

  const int64_t later = (blockIdx.x + kBlocksAhead) * box.outer;
  if (count <= batch.kSize * kThreads && parts == 1 && later < rows.outer) {
    const int64_t stop = smaller(later + box.outer, rows.outer) * row_updates;
    constexpr int kStep = kLineBytes / sizeof(T);
    for (int64_t n = later * row_updates + threadIdx.x * kStep; n < stop; n += kThreads * kStep) {
      prefetch(updates + n);
      prefetch(indices + n);
    }
  }

  for (int at = threadIdx.x * kSlot; at < end; at += kThreads * kSlot) slots[at / kSlot] = make_uint4(0, 0, 0, 0);
  batch.resolve(updates, 0, count, parts == 1, address, place);
  __syncthreads();
  batch.store(reinterpret_cast<T*>(image + begin));
  for (uint32_t n = batch.kSize * kThreads; n < count; n += batch.kSize * kThreads) {
    batch.ask(updates, indices, n, count, parts == 1, address);
    batch.resolve(updates, n, count, parts == 1, address, place);
    batch.store(reinterpret_cast<T*>(image + begin));
  }
  __syncthreads();

  unsigned char* const target = reinterpret_cast<unsigned char*>(first) - begin;
  for (int at = threadIdx.x * kSlot; at < end; at += kThreads * kSlot) {
    if (at >= begin && at + kSlot <= end) {
      __stcs(reinterpret_cast<uint4*>(target + at),
             slots[at / kSlot]);  // a streaming store, to keep L2 for the updates
    } else {
      for (int e = at; e < at + kSlot; e += sizeof(T))
        if (e >= begin && e < end) *reinterpret_cast<T*>(target + e) = *reinterpret_cast<const T*>(image + e);
    }
  }
}

// For short rows that are so few that all blocks run at the same time. The launch then takes as long as one block: it
// waits for its updates and fetches its instructions. So the code is short, each warp assembles its rows without
// waiting for other warps, and rows must be whole 16-byte vectors.
struct ShortRows {
  static constexpr int64_t kUpdates = 64, kSlots = 128;  // the most updates and 16-byte vectors that a warp has
  static constexpr int64_t kAllBytes = 16 << 20;         // the bytes that all resident warps of an H200 hold
  uint32_t rows, length, k;
  uint32_t each;     // rows that a warp assembles
  uint32_t inverse;  // 2^31 / k, rounded up: a multiplication replaces the division by k
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    put_short(ShortRows a, const T* __restrict__ updates, const int32_t* __restrict__ indices, T* out) {
  constexpr uint32_t kWarps = kThreads / 32, kPerSlot = 16 / sizeof(T);
  constexpr uint32_t kOwnUpdates = ShortRows::kUpdates / 32, kOwnSlots = ShortRows::kSlots / 32;
  __shared__ uint4 images[kWarps][ShortRows::kSlots];
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t first = (blockIdx.x * kWarps + warp) * a.each;
  if (first >= a.rows) return;
  const uint32_t rows = min(a.each, a.rows - first), count = rows * a.k, slots = rows * a.length / kPerSlot;
  const T* const values = updates + first * a.k;
  const int32_t* const places = indices + first * a.k;
  T value[kOwnUpdates];
  uint32_t place[kOwnUpdates];
#pragma unroll
  for (uint32_t b = 0; b < kOwnUpdates; ++b) {
    const uint32_t n = b * 32 + lane;
    if (n < count) place[b] = places[n], value[b] = values[n];
  }
  uint4* const image = images[warp];
#pragma unroll
  for (uint32_t b = 0; b < kOwnSlots; ++b) image[b * 32 + lane] = make_uint4(0, 0, 0, 0);
  __syncwarp();
#pragma unroll
  for (uint32_t b = 0; b < kOwnUpdates; ++b) {
    const uint32_t n = b * 32 + lane, row = static_cast<uint32_t>(n * uint64_t{a.inverse} >> 31);
    if (n < count && place[b] < a.length) reinterpret_cast<T*>(image)[row * a.length + place[b]] = value[b];
  }
  __syncwarp();
  uint4* const target = reinterpret_cast<uint4*>(out) + first * (a.length / kPerSlot);
#pragma unroll
  for (uint32_t b = 0; b < kOwnSlots; ++b)
    if (b * 32 + lane < slots) __stcs(target + b * 32 + lane, image[b * 32 + lane]);
}

// Writes boxes that are strips, for an axis that is not the last. A strip is one cache line wide, and so long along the
// axis that most of the updates a block reads belong to its box. Boxes are assembled in shared memory, as in put_runs.
template <class T>
__global__ void __launch_bounds__(kThreads, 6) put_strips(Rows rows, int64_t k, Box box, const T* __restrict__ updates,
                                                          const int32_t* __restrict__ indices, T* out) {
  // Neighbouring blocks write neighbouring strips, and thus neighbouring memory.
  constexpr uint32_t kWidth = kLineBytes / sizeof(T);
  const uint32_t strips = box.strips, parts = box.parts;
  const int64_t o = blockIdx.x / strips / parts;
  const int64_t j0 = blockIdx.x / strips % parts * box.length, i0 = blockIdx.x % strips * box.inner;
  const auto length = static_cast<uint32_t>(smaller(box.length, rows.length - j0));
  const auto width = static_cast<uint32_t>(smaller(box.inner, rows.inner - i0));

  // Where a strip is narrower than a cache line, the surplus threads repeat the load of its last column, and store
  // nothing.
  const auto count = static_cast<uint32_t>(k) * kWidth;
  const auto address = [&](uint32_t n) { return (o * k + n / kWidth) * rows.inner + i0 + min(n % kWidth, width - 1); };
  const auto place = [&](uint32_t n, int32_t j) {
    const uint32_t at = static_cast<uint32_t>(j) - static_cast<uint32_t>(j0);
    return at < length && n % kWidth < width ? static_cast<int>(at * kWidth + n % kWidth) : -1;
  };
  Batch<T> batch;
  batch.ask(updates, indices, 0, count, parts == 1, address);

  const uint32_t later = blockIdx.x + kBlocksAhead, later_o = later / strips / parts;
  if (count <= batch.kSize * kThreads && later_o < rows.outer) {
    for (int64_t j = threadIdx.x; j < k; j += kThreads) {
      const int64_t at = (int64_t{later_o} * k + j) * rows.inner + later % strips * box.inner;
      prefetch(updates + at);
      prefetch(indices + at);
    }
  }

  extern __shared__ uint4 slots[];
  T* const image = reinterpret_cast<T*>(slots);
  for (uint32_t at = threadIdx.x; at < length * (kLineBytes / 16); at += kThreads) slots[at] = make_uint4(0, 0, 0, 0);
  batch.resolve(updates, 0, count, parts == 1, address, place);
  __syncthreads();
  batch.store(image);
  for (uint32_t n = batch.kSize * kThreads; n < count; n += batch.kSize * kThreads) {
    batch.ask(updates, indices, n, count, parts == 1, address);
    batch.resolve(updates, n, count, parts == 1, address, place);
    batch.store(image);
  }
  __syncthreads();

  // Stores with 16-byte vectors if every line of the strip is aligned to them, else element by element.
  const auto write = [&](auto slot) {
    constexpr uint32_t kLanes = kLineBytes / sizeof(slot), kElements = sizeof(slot) / sizeof(T);
    const uint32_t i = threadIdx.x % kLanes * kElements;
    if (i >= width) return;
    T* const to = out + (o * rows.length + j0) * rows.inner + i0 + i;
#pragma unroll 4
    for (uint32_t j = threadIdx.x / kLanes; j < length; j += kThreads / kLanes)
      __stcs(reinterpret_cast<decltype(slot)*>(to + j * rows.inner),
             *reinterpret_cast<const decltype(slot)*>(image + j * kWidth + i));
  };
  if (reinterpret_cast<uintptr_t>(out) % 16 == 0 && rows.inner * sizeof(T) % 16 == 0) {
    write(uint4{});
  } else {
    write(T{});
  }
}

// For many updates: stores them into zeros, which put_runs or put_strips has written before without updates (k = 0).
template <class T>
__global__ void __launch_bounds__(kThreads)
    scatter(Rows rows, int64_t k, const T* __restrict__ updates, const int32_t* __restrict__ indices, T* out) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= rows.outer * k * rows.inner) return;
  const int64_t j = indices[at];
  if (j < 0 || j >= rows.length) return;
  const int64_t outer = at / (k * rows.inner);
  const int64_t i = rows.inner == 1 ? 0 : at % rows.inner;
  out[(outer * rows.length + j) * rows.inner + i] = updates[at];
}

// Chooses the boxes. A box that is a part of an axis reads all updates of its outer index, so that these should be few
// against what it writes. If the box would be too large for that, zeros and updates become two launches.
template <class T>
cudaError_t put(cudaStream_t stream, const Problem& problem, const void* updates_, const int32_t* indices, void* out_) {
  const auto [outer, length, inner] = problem.rows;
  const auto* updates = static_cast<const T*>(updates_);
  auto* out = static_cast<T*>(out_);
  const int64_t bytes = sizeof(T), outer_bytes = length * inner * bytes;
  if (problem.rows.elements() == 0) return cudaSuccess;

  const int64_t least_length = kReadShare * 4 * problem.k / bytes;
  int64_t k = problem.k <= length ? problem.k : 0;  // more updates than elements: most go nowhere
  cudaError_t status;
  if (inner * bytes > kLineBytes && outer_bytes > kBoxBytes) {
    Box box{1, kBoxBytes / kLineBytes, kLineBytes / bytes};
    if (box.length < least_length) box.length *= 2;
    if (box.length < std::min(length, least_length / kReadShare)) box.length /= 2, k = 0;
    box.length = std::min(length, box.length);
    box.parts = ceil_div(length, box.length);
    box.strips = ceil_div(inner, box.inner);
    const int64_t boxes = outer * box.parts * box.strips;
    const size_t shared = box.length * kLineBytes;
    status = launch(stream, {dim3(boxes), dim3(kThreads), shared}, put_strips<T>, problem.rows, k, box, updates,
                    indices, out);
  } else {
    constexpr int64_t kWarpBytes = ShortRows::kSlots * 16;
    const int64_t each = inner > 1 || k < 1 ? 0 : std::min(kWarpBytes / outer_bytes, ShortRows::kUpdates / k);
    const bool slots = outer_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
    if (slots && 2 * each * outer_bytes >= kWarpBytes && outer * outer_bytes <= ShortRows::kAllBytes) {
      ShortRows rows;
      rows.rows = static_cast<uint32_t>(outer);
      rows.length = static_cast<uint32_t>(length);
      rows.k = static_cast<uint32_t>(k);
      rows.each = static_cast<uint32_t>(each);
      rows.inverse = (1u << 31) / rows.k + 1;  // the quotient is exact for numbers this small
      return launch(stream, {dim3(ceil_div(outer, each * (kThreads / 32))), dim3(kThreads)}, put_short<T>, rows,
                    updates, indices, out);
    }
    int64_t box_bytes = kBoxBytes;
    while (box_bytes > kLeastBoxBytes && outer * outer_bytes < kFewBoxes * box_bytes) box_bytes /= 2;
    Box box{1, length, inner};
    if (outer_bytes <= box_bytes) {
      box.outer = std::min(outer, box_bytes / outer_bytes);
    } else {
      box.length = std::max<int64_t>(1, box_bytes / (inner * bytes));
      if (box.length < least_length) box.length = std::min(length, kBoxBytes / (inner * bytes));
      if (box.length < std::min(length, least_length)) k = 0;
    }
    box.parts = ceil_div(length, box.length);
    const int64_t boxes = ceil_div(outer, box.outer) * box.parts;
    // room for whole 16-byte vectors at any alignment
    const size_t shared = (box.outer * box.length * inner * bytes + 15) / 16 * 16 + 16;
    status =
        launch(stream, {dim3(boxes), dim3(kThreads), shared}, put_runs<T>, problem.rows, k, box, updates, indices, out);
  }
  if (status != cudaSuccess || k == problem.k) return status;
  return launch(stream, {dim3(ceil_div(problem.rows.count() * problem.k, kThreads)), dim3(kThreads)}, scatter<T>,
                problem.rows, problem.k, updates, indices, out);
}

}  // namespace

cudaError_t launch_take(cudaStream_t stream, const Problem& problem, const void* x, const int32_t* indices, void* out) {
  return dispatch_key(8 * problem.bytes,
                      [&](auto width) { return take<decltype(width)>(stream, problem, x, indices, out); });
}

cudaError_t launch_put(cudaStream_t stream, const Problem& problem, const void* updates, const int32_t* indices,
                       void* out) {
  return dispatch_key(8 * problem.bytes,
                      [&](auto width) { return put<decltype(width)>(stream, problem, updates, indices, out); });
}

}  // namespace jaxgpuops::along_axis
