// Top-k of few elements in all: each element is compared with all others of its row, and the number of those that come
// before it is its place in the result. No step waits for the result of another one, so this takes less time than any
// other kernel while the device has room for the comparisons; and equal elements take as long as others.
//
// A block loads a tile (compare_shape.h) as words that compare like keys. A key of up to 16 bits shares its word with
// the mirrored index, so no two words are equal. Wider keys fill their words and may be equal; then the lower index
// comes first. So a chunk is compared with the elements before it by >=, and with those after it by >. For results in
// the order of indices, blocks of a cluster tell each other which elements are selected.
//
// Bytes moved: the input once for each slice of a tile, mostly from the L2 cache, and k results (value and index).
#include "common/cuda/intrinsics.cuh"
#include "topk/cuda/compare_shape.h"
#include "topk/cuda/kernels.h"
#include "topk/cuda/quotient.cuh"
#include "topk/cuda/ranks.cuh"

namespace jaxgpuops::topk {
namespace {

struct Args : Call {
  int64_t outer;
  uint32_t rows, chunks, own, slices, pitch;  // see CompareShape
  uint32_t lane_bits, part_bits;              // logarithms of lanes and parts
  // Element e of a tile, in the order of memory, is `stride` * q + r elements behind the first one, where e = `run` * q
  // + r: of a row each, q is the row, and r the index; of columns, the reverse.
  uint32_t stride, run;
  uint32_t per_run, per_chunks;  // reciprocals: the high word of i * per_run is i / run
  bool bytes;                    // elements have 8 bits, which become the upper ones of 16
};

template <class Key>
using Word = std::conditional_t<sizeof(Key) == 8, uint64_t, uint32_t>;

template <class Key>
__global__ void __launch_bounds__(kCompareThreads, 2) compare_kernel(const __grid_constant__ Args a) {
  using W = Word<Key>;
  constexpr bool kNarrow = sizeof(Key) == 2;
  constexpr uint32_t kEachBits = kCompareEach / 2;
  static_assert(kCompareEach == 1 << kEachBits);
  constexpr uint32_t kBatch = 4;                   // loads of a thread before the first is waited for
  constexpr int kDeep = sizeof(Key) == 8 ? 2 : 4;  // the same, of vectors in shared memory
  const uint32_t lanes = 1u << a.lane_bits, chunk_bits = a.lane_bits + kEachBits, chunk = 1u << chunk_bits;
  const uint32_t own_elements = a.own << chunk_bits;
  const uint32_t bit_words = ((a.rows * a.chunks << chunk_bits) + 31) / 32;
  W* const words = reinterpret_cast<W*>(dynamic_shared_memory());
  uint32_t* const counts = reinterpret_cast<uint32_t*>(words + a.rows * a.pitch);  // of the slice's elements
  uint32_t* const bits = counts + own_elements;  // a bit for each element of the tile that is selected
  uint32_t* const before = bits + bit_words;     // how many are selected before each word of these
  const uint32_t slice = blockIdx.x;
  const bool shares = !a.sorted && a.slices > 1;
  if (shares) arrive_at_cluster_start();

  // The tile's rows, and where they begin.
  const int64_t outer = a.inner == 1 ? blockIdx.y * a.rows : blockIdx.z;
  const uint32_t inner = a.inner == 1 ? 0 : blockIdx.y * a.rows;
  const auto there = static_cast<uint32_t>(min(int64_t{a.rows}, a.inner == 1 ? a.outer - outer : a.inner - inner));
  const int64_t from = outer * a.length * a.inner + inner;
  const bool columns = a.inner > 1;
  const uint32_t loads = (columns ? a.rows : there) * a.length, last = columns ? there : a.length;
  for (uint32_t start = threadIdx.x; start < loads; start += kBatch * blockDim.x) {
    Key raw[kBatch];
    uint32_t q[kBatch], r[kBatch];
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      const uint32_t e = start + b * blockDim.x;
      q[b] = quotient(e, a.run, a.per_run), r[b] = e < loads ? e - q[b] * a.run : last;
      const int64_t at = from + (r[b] < last ? q[b] * a.stride + r[b] : 0);
      if (sizeof(Key) == 2 && a.bytes) {
        raw[b] = static_cast<Key>(__ldg(static_cast<const uint8_t*>(a.x) + at) << 8);
      } else {
        raw[b] = __ldg(static_cast<const Key*>(a.x) + at);
      }
    }
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      if (r[b] >= last) continue;
      const Key key = encode(raw[b], a.order);
      const uint32_t row = columns ? r[b] : q[b], index = columns ? q[b] : r[b];
      words[row * a.pitch + index] = kNarrow ? static_cast<W>(key) << 16 | (0xffff - index) : static_cast<W>(key);
    }
  }
  // Elements that do not exist stand behind all others.
#pragma unroll 1
  for (uint32_t e = threadIdx.x; e < 4 * there; e += blockDim.x)
    if (a.length + e % 4 < a.pitch) words[e / 4 * a.pitch + a.length + e % 4] = 0;
  if (a.part_bits) {
#pragma unroll 1
    for (uint32_t e = threadIdx.x; e < own_elements; e += blockDim.x) counts[e] = 0;
  }
  __syncthreads();

  const uint32_t first = slice * a.own, end = min(first + a.own, there * a.chunks);
  const uint32_t lane = threadIdx.x & (lanes - 1), parts = 1u << a.part_bits;
  const uint32_t share = (a.length + 4 * parts - 1) >> (a.part_bits + 2) << 2;  // of a row, that a team compares with
#pragma unroll 1
  for (uint32_t unit = threadIdx.x >> a.lane_bits;; unit += blockDim.x >> a.lane_bits) {
    const uint32_t c = (unit >> a.part_bits) + first;
    if (c >= end) break;
    const uint32_t row = quotient(c, a.chunks, a.per_chunks), start = (c - row * a.chunks) << chunk_bits;
    const W* const all = words + row * a.pitch;
    W own[kCompareEach];
    float count[kCompareEach] = {};
#pragma unroll
    for (uint32_t q = 0; q < kCompareEach; ++q) own[q] = all[min(start + q * lanes + lane, a.length - 1)];
    const uint32_t low = (unit & (parts - 1)) * share, high = min(low + share, a.length);
    const auto compare = [&](uint32_t from, uint32_t to, auto add) {
#pragma unroll kDeep
      for (uint32_t j = from; j < to; j += 4) {
        const auto four = *reinterpret_cast<const Four<W>*>(all + j);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i)
#pragma unroll
          for (uint32_t q = 0; q < kCompareEach; ++q) add(count[q], four.word[i], own[q], j + i, q);
      }
    };
    const auto above = [](float& n, W other, W own, uint32_t, uint32_t) { count_above(n, other, own); };
    if constexpr (kNarrow) {
      compare(low, high, above);
    } else {
      compare(low, min(high, start),
              [](float& n, W other, W own, uint32_t, uint32_t) { count_reaching(n, other, own); });
      compare(max(low, start), min(high, start + chunk), [&](float& n, W other, W own, uint32_t j, uint32_t q) {
        count_before(n, other, j, own, start + q * lanes + lane);
      });
      compare(max(low, start + chunk), high, above);
    }
#pragma unroll
    for (uint32_t q = 0; q < kCompareEach; ++q) {
      uint32_t* const to = counts + ((c - first) << chunk_bits) + q * lanes + lane;
      if (!a.part_bits) {
        *to = static_cast<uint32_t>(count[q]);
      } else {
        atomicAdd(to, static_cast<uint32_t>(count[q]));
      }
    }
  }
  if (shares) wait_at_cluster_barrier();  // the others have started, so their shared memory may be written
  __syncthreads();

  const auto each = [&](auto f) {  // f(place in the slice, row, index, whether it is selected)
#pragma unroll 1
    for (uint32_t start = 0; start < own_elements; start += blockDim.x) {
      const uint32_t e = start + threadIdx.x, c = first + (e >> chunk_bits);
      const uint32_t row = quotient(c, a.chunks, a.per_chunks);
      const uint32_t index = ((c - row * a.chunks) << chunk_bits) + (e & (chunk - 1));
      f(e, row, index, e < own_elements && c < end && index < a.length && counts[e] < a.k);
    }
  };
  if (!a.sorted) {
    each([&](uint32_t e, uint32_t, uint32_t, bool selected) {
      const uint32_t mask = __ballot_sync(kEveryLane, selected), at = ((first << chunk_bits) + e) / 32;
      if (threadIdx.x % 32 || e >= own_elements || at >= bit_words) return;
      if (shares) {
        for (uint32_t b = 0; b < a.slices; ++b) store_in_cluster(bits + at, b, mask);
      } else {
        bits[at] = mask;
      }
    });
    if (shares) {
      arrive_at_cluster_barrier();
      wait_at_cluster_barrier();
    } else {
      __syncthreads();
    }
    if (threadIdx.x < 32) {
      uint32_t sum = 0;
#pragma unroll 1
      for (uint32_t start = 0; start < bit_words; start += 32) {
        const uint32_t at = start + threadIdx.x, mine = at < bit_words ? __popc(bits[at]) : 0;
        const uint32_t inclusive = sum_up_to_lane<32>(mine);
        if (at < bit_words) before[at] = sum + inclusive - mine;
        sum += __shfl_sync(kEveryLane, inclusive, 31);
      }
    }
    __syncthreads();
  }
  each([&](uint32_t e, uint32_t row, uint32_t index, bool selected) {
    if (!selected) return;
    uint32_t at = counts[e];
    if (!a.sorted) {
      const uint32_t place = (first << chunk_bits) + e;
      at = before[place / 32] + __popc(bits[place / 32] & ((1u << place % 32) - 1)) - row * a.k;
    }
    const int64_t to = a.inner == 1 ? (outer + row) * a.k + at : (outer * a.k + at) * a.inner + inner + row;
    const W word = words[row * a.pitch + index];
    const Key raw = decode(static_cast<Key>(kNarrow ? word >> 16 : word), a.order);
    if (sizeof(Key) == 2 && a.bytes) {
      static_cast<uint8_t*>(a.values)[to] = static_cast<uint8_t>(raw >> 8);
    } else {
      static_cast<Key*>(a.values)[to] = raw;
    }
    a.indices[to] = static_cast<int32_t>(index);
  });
}

}  // namespace

cudaError_t launch_compare(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  if (plan.compare.in_teams) return launch_compare_team(stream, plan, problem, buffers);
  const CompareShape& shape = plan.compare;
  Args a = {call_of(problem, buffers)};
  a.outer = problem.rows.outer;
  a.rows = static_cast<uint32_t>(shape.rows);
  a.chunks = static_cast<uint32_t>(shape.chunks);
  a.own = static_cast<uint32_t>(shape.own);
  a.slices = static_cast<uint32_t>(shape.slices);
  a.pitch = static_cast<uint32_t>(shape.pitch);
  while (shape.lanes >> a.lane_bits > 1) ++a.lane_bits;
  while (shape.parts >> a.part_bits > 1) ++a.part_bits;
  a.stride = a.inner == 1 ? a.length : static_cast<uint32_t>(a.inner);
  a.run = a.inner == 1 ? a.length : a.rows;
  a.per_run = reciprocal(a.run);
  a.per_chunks = reciprocal(a.chunks);
  Launch config;
  const int64_t outers = a.inner == 1 ? 1 : a.outer;
  config.grid =
      dim3(a.slices, static_cast<unsigned>(plan.blocks / shape.slices / outers), static_cast<unsigned>(outers));
  config.block = dim3(plan.threads);
  config.shared_bytes = plan.shared_bytes;
  if (!problem.sorted) config.cluster = static_cast<int>(shape.slices);
  a.bytes = problem.key_bits == 8;
  if (a.bytes) a.order = {a.order.magnitude << 8, a.order.flip << 8};
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = std::conditional_t<sizeof(key) == 1, uint16_t, decltype(key)>;
    return launch(stream, config, compare_kernel<Key>, a);
  });
}

}  // namespace jaxgpuops::topk
