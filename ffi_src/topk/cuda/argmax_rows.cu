// The form "rows" of argmax.cu.
#include "common/cuda/residents.cuh"
#include "topk/cuda/argmax.cuh"
#include "topk/cuda/delegates.cuh"
#include "topk/cuda/row_vectors.cuh"

namespace jaxgpuops::topk {
namespace {

// The largest key of some vectors, in the order of argmax.
template <class Key, uint32_t kVectors>
__device__ __forceinline__ Key largest_key(const uint4 (&vectors)[kVectors], const ArgOrder& order) {
  if constexpr (sizeof(Key) == 8) {
    Key most = 0;
#pragma unroll
    for (const uint4& v : vectors) {
      most = larger(most, encode_arg(static_cast<Key>(v.y) << 32 | v.x, order));
      most = larger(most, encode_arg(static_cast<Key>(v.w) << 32 | v.z, order));
    }
    return most;
  } else {
    // Compares plain keys, several in a word. They order numbers as argmax does, except that argmax has two equal
    // zeros. Only negative NaNs are out of order; they have the least keys, so the least key shows whether there are
    // any.
    const Lanes<Key> lanes(order.order);
    uint32_t most = 0, least = ~0u;
    const auto of_all = [&](auto see) {
#pragma unroll
      for (const uint4& v : vectors) {
#pragma unroll
        for (const uint32_t word : {v.x, v.y, v.z, v.w}) see(lanes.encode(word));
      }
    };
    if constexpr (sizeof(Key) == 1) {  // as numbers of 16 bits, for which there are instructions
      of_all([&](uint32_t keys) { most = __vmaxu2(__vmaxu2(most, keys & 0xff00ff00), keys << 8 & 0xff00ff00); });
      most = larger(most >> 16, most & 0xffff) >> 8;
      if (!order.sign) return encode_arg(decode(static_cast<Key>(most), order.order), order);
      of_all([&](uint32_t keys) { least = __vminu2(__vminu2(least, keys & 0xff00ff00), keys << 8 & 0xff00ff00); });
      least = smaller(least >> 16, least & 0xffff) >> 8;
    } else {
      of_all([&](uint32_t keys) {
        most = lanes.max(most, keys);
        least = sizeof(Key) == 4 ? smaller(least, keys) : __vminu2(least, keys);
      });
      most = lanes.largest(most);
      least = ~lanes.largest(~least);
    }
    const Key ends[2] = {static_cast<Key>(most), static_cast<Key>(least)};
    return larger(encode_arg(decode(ends[0], order.order), order), encode_arg(decode(ends[1], order.order), order));
  }
}

constexpr uint32_t kLoads = 4;  // vectors that a thread loads at a time

// A warp has a row.
template <class Key>
__global__ void __launch_bounds__(kArgmaxRowThreads, 8)
    argmax_rows(const __grid_constant__ Argmax a, const __grid_constant__ ArgOrder order, uint32_t rows) {
  constexpr uint32_t kVector = 16 / sizeof(Key);
  const uint32_t lane = threadIdx.x % 32, own = blockIdx.x * (kArgmaxRowThreads / 32) + threadIdx.x / 32;
  const uint32_t row = smaller(own, rows - 1);  // a warp without a row reads the last one
  const Key* x = static_cast<const Key*>(a.x) + static_cast<int64_t>(row) * a.length;
  const RowVectors<Key> all(x, a.length);
  const uint32_t vectors = all.vectors;
  const uint4* body = all.body();

  Candidate<Key> c = {0, ~0u};
  for (uint32_t i = lane; i < all.loose(); i += 32) {
    const uint32_t at = all.loose_index(i);
    c.merge({encode_arg(x[at], order), at});
  }

  // The last batch repeats the last vector, which changes nothing.
  Key best = 0;
  uint32_t batch = lane;
  const auto place = [&](uint32_t v, uint32_t u) { return min(v + u * 32, vectors - 1); };
#pragma unroll 1
  for (uint32_t v = lane; v < vectors; v += kLoads * 32) {
    uint4 loaded[kLoads];
#pragma unroll
    for (uint32_t u = 0; u < kLoads; ++u) loaded[u] = __ldg(body + place(v, u));
    const Key most = largest_key<Key>(loaded, order);
    if (most > best) best = most, batch = v;
  }

  // The largest key of the warp first: then only lanes that have it look the element up.
  const Word<Key> most = largest_of_warp(larger<Word<Key>>(c.key, best));
  uint32_t index = c.key == most ? c.index : ~0u;
  if (best == most && lane < vectors) {
    // All elements with this key have the same bits, except for zeros and NaNs.
    const Key sign = static_cast<Key>(order.sign), found = decode(best, order.order);
    const bool nan = sign && best == static_cast<Key>(~Key{0});
    const Key drop = nan || static_cast<Key>(found & ~sign) == 0 ? sign : 0;
    const Key from = static_cast<Key>(nan ? order.nan_above + 1 : found & ~drop);
    const Key span = static_cast<Key>(nan ? ~sign - from : 0);
    uint32_t first = 0;
#pragma unroll 1
    for (int u = kLoads - 1; u >= 0; --u) {
      Key elements[kVector];
      *reinterpret_cast<uint4*>(elements) = __ldg(body + place(batch, u));
#pragma unroll
      for (int e = kVector - 1; e >= 0; --e)
        if (static_cast<Key>((elements[e] & ~drop) - from) <= span) first = place(batch, u) * kVector + e;
    }
    index = smaller(index, all.head + first);
  }
  index = smallest_of_warp(index);
  if (lane == 0 && own == row) write<Key>(a, row, 0, index);
}

struct SharedRowsCall {
  const void* x;
  int32_t* indices;
  void* values;      // null where only indices are wanted
  void* candidates;  // workspace: [row][slice]
  uint32_t length, slice, slices;
  bool cluster;
};

// A block has a row, or a slice of one. Few rows mostly wait for the code and for memory once, so the code is short: a
// thread compares every element, and looks none up again.
template <class Key>
__global__ void __launch_bounds__(kArgmaxMostThreads, 2)
    argmax_shared_rows(const __grid_constant__ SharedRowsCall a, const __grid_constant__ Ranks<Key> ranks) {
  constexpr uint32_t kVector = 16 / sizeof(Key);
  const uint32_t thread = threadIdx.x, team = blockDim.x;
  const uint32_t row = a.slices == 1 ? blockIdx.x : blockIdx.x / a.slices, part = blockIdx.x - row * a.slices;
  if (a.cluster) {
    arrive_at_cluster_start();
  } else {
    let_dependents_start();
  }
  const uint32_t begin = part * a.slice;
  const Key* const of_row = static_cast<const Key*>(a.x) + static_cast<int64_t>(row) * a.length;
  const RowVectors<Key> all(of_row + begin, smaller(a.slice, a.length - begin));
  // A thread has at most one loose element. It is compared at the end, so that vectors need not wait for it.
  const uint32_t last = all.vectors - 1, loose_at = all.loose_index(thread);
  const bool loose = thread < all.loose();
  const Key element = loose ? __ldg(all.x + loose_at) : Key{0};
  const uint4* const body = all.body();
  Places<Key> places;
#pragma unroll
  for (uint32_t& step : places.steps) step = thread;
  // The last batch repeats the last vector, which changes nothing.
#pragma unroll 1
  for (uint32_t v = thread; v < all.vectors; v += kLoads * team) {
    uint4 loaded[kLoads];
#pragma unroll
    for (uint32_t u = 0; u < kLoads; ++u) loaded[u] = __ldg(body + smaller(v + u * team, last));
#pragma unroll
    for (uint32_t u = 0; u < kLoads; ++u) places.see(loaded[u], ranks, smaller(v + u * team, last));
  }
  Candidate<Key> c = {0, ~0u};
#pragma unroll
  for (uint32_t e = 0; e < kVector; ++e) c.key = larger(c.key, places.at(e).key);
#pragma unroll
  for (uint32_t e = 0; e < kVector; ++e)
    if (places.at(e).key == c.key) c.index = smaller(c.index, places.steps[e] * kVector + e);
  c.index = thread < all.vectors ? c.index + begin + all.head : ~0u;
  if (loose) {
    const Word<Key> rank = ranks(ranks.word(element));
    c.merge({kPairs<Key> ? rank & 0xffff : rank, begin + loose_at});
  }
  merge_team(c, team);
  if (a.cluster) {
    if (!merge_cluster(c, part, a.slices)) return;
  } else if (a.slices > 1) {
    if (thread == 0) static_cast<Candidate<Key>*>(a.candidates)[blockIdx.x] = c;
    return;
  }
  if (thread != 0) return;
  a.indices[row] = static_cast<int32_t>(c.index);
  if (a.values) static_cast<Key*>(a.values)[row] = of_row[c.index];
}

constexpr uint32_t kFinishThreads = 128;

// A block has a row.
template <class Key>
__global__ void __launch_bounds__(kFinishThreads) argmax_finish_rows(const __grid_constant__ SharedRowsCall a) {
  const uint32_t row = blockIdx.x;
  const auto* const from = static_cast<const Candidate<Key>*>(a.candidates) + uint64_t{row} * a.slices;
  wait_for_predecessor();
  Candidate<Key> c = {0, ~0u};
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < a.slices; i += kFinishThreads) c.merge(from[i]);
  merge_team(c, kFinishThreads);
  if (threadIdx.x != 0) return;
  a.indices[row] = static_cast<int32_t>(c.index);
  if (a.values) static_cast<Key*>(a.values)[row] = (static_cast<const Key*>(a.x) + uint64_t{row} * a.length)[c.index];
}

}  // namespace

cudaError_t launch_argmax_rows(cudaStream_t stream, const ArgmaxShape& shape, const ArgProblem& problem,
                               const Argmax& a, bool overlap) {
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    if (shape.lane_bits == 5) {
      constexpr int64_t kRows = kArgmaxRowThreads / 32;  // of a block
      const Launch blocks = {dim3(static_cast<unsigned>((a.outer + kRows - 1) / kRows)), dim3(kArgmaxRowThreads)};
      return launch(stream, blocks, argmax_rows<Key>, a, problem.order, static_cast<uint32_t>(a.outer));
    }
    const SharedRowsCall call = {a.x, a.indices, a.values, a.workspace, a.length, a.slice, a.slices, a.cluster};
    Launch blocks = {dim3(static_cast<unsigned>(a.outer * a.slices)), dim3(1u << shape.lane_bits)};
    if (a.cluster) blocks.cluster = static_cast<int>(a.slices);
    const auto kernel = argmax_shared_rows<Key>;
    cudaError_t status = allow_cluster(reinterpret_cast<const void*>(kernel), blocks.cluster);
    if (status == cudaSuccess) status = launch(stream, blocks, kernel, call, Ranks<Key>(problem.order));
    if (status != cudaSuccess || a.slices == 1 || a.cluster) return status;
    Launch last = {dim3(static_cast<unsigned>(a.outer)), dim3(kFinishThreads)};
    last.overlap = overlap;
    return launch(stream, last, argmax_finish_rows<Key>, call);
  });
}

}  // namespace jaxgpuops::topk
