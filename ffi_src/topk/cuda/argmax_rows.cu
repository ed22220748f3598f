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

// Vectors that a lane loads at a time, and those of a block if blocks hold their slices, or are many that have few
// bytes each.
constexpr uint32_t kFewLoads = 4, kManyLoads = 8;
constexpr int64_t kManyBlocks = 1320, kManyLoadsBytes = 96 << 10;

// A team has a row or a slice of a row: a warp, or a block. kHeld: a batch is all that a lane has, so it looks the
// element up in its registers.
template <class Key, bool kWarps, uint32_t kBatch, bool kHeld>
__global__ void __launch_bounds__(kWarps ? kArgmaxRowThreads : kArgmaxMostThreads, kWarps ? 8 : 2)
    argmax_rows(const __grid_constant__ Argmax a, const __grid_constant__ ArgOrder order, uint32_t units) {
  constexpr uint32_t kVector = 16 / sizeof(Key);
  const uint32_t team = kWarps ? 32 : blockDim.x, lane = kWarps ? threadIdx.x % 32 : threadIdx.x;
  const uint32_t own = kWarps ? blockIdx.x * (kArgmaxRowThreads / 32) + threadIdx.x / 32 : blockIdx.x;
  const uint32_t unit = smaller(own, units - 1);  // a team without a row reads the last one
  const uint32_t row = a.slices == 1 ? unit : unit / a.slices, part = unit - row * a.slices;
  if (!kWarps && a.cluster) {
    arrive_at_cluster_start();
  } else {
    let_dependents_start();
  }
  const uint32_t length = a.length;
  const uint32_t begin = part * a.slice, count = min(a.slice, length - begin);
  const Key* x = static_cast<const Key*>(a.x) + static_cast<int64_t>(row) * length + begin;
  const RowVectors<Key> all(x, count);
  const uint32_t vectors = all.vectors;
  const uint4* body = all.body();

  Candidate<Key> c = {0, ~0u};
  for (uint32_t i = lane; i < all.loose(); i += team) {
    const uint32_t at = all.loose_index(i);
    c.merge({encode_arg(x[at], order), begin + at});
  }

  // The last batch repeats the last vector, which changes nothing.
  Key best = 0;
  uint32_t batch = lane, v = lane;
  const auto place = [&](uint32_t v, uint32_t u) { return min(v + u * team, vectors - 1); };
  uint4 loaded[kBatch];
  const auto look = [&](auto whole) {
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) loaded[u] = __ldg(body + (whole ? v + u * team : place(v, u)));
    const Key most = largest_key<Key>(loaded, order);
    if (most > best) best = most, batch = v;
    v += kBatch * team;
  };
  if constexpr (kHeld) {
    if (vectors > 0) look(std::false_type());
  } else {
    if constexpr (!kWarps) {
#pragma unroll 1
      while (v + (kBatch - 1) * team < vectors) look(std::true_type());
    }
#pragma unroll 1
    while (v < vectors) look(std::false_type());
  }

  // The largest key of the team first: then only lanes that have it look the element up.
  Word<Key> most = largest_of_warp(larger<Word<Key>>(c.key, best));
  __shared__ Word<Key> of_warps[kWarps ? 1 : kArgmaxMostThreads / 32];
  __shared__ uint32_t of_block;
  if constexpr (!kWarps) {
    if (lane == 0) of_block = ~0u;
    if (lane % 32 == 0) of_warps[lane / 32] = most;
    __syncthreads();
    most = largest_of_warp(of_warps[lane % 32 & (team / 32 - 1)]);
  }
  uint32_t index = c.key == most ? c.index : ~0u;
  if (best == most && lane < vectors) {
    // All elements with this key have the same bits, except for zeros and NaNs.
    const Key sign = static_cast<Key>(order.sign), found = decode(best, order.order);
    const bool nan = sign && best == static_cast<Key>(~Key{0});
    const Key drop = nan || static_cast<Key>(found & ~sign) == 0 ? sign : 0;
    const Key from = static_cast<Key>(nan ? order.nan_above + 1 : found & ~drop);
    const Key span = static_cast<Key>(nan ? ~sign - from : 0);
    uint32_t first = 0;
#pragma unroll(kWarps && !kHeld ? 1 : kBatch)
    for (int u = kBatch - 1; u >= 0; --u) {
      Key elements[kVector];
      *reinterpret_cast<uint4*>(elements) = kHeld ? loaded[u] : __ldg(body + place(batch, u));
#pragma unroll
      for (int e = kVector - 1; e >= 0; --e)
        if (static_cast<Key>((elements[e] & ~drop) - from) <= span) first = place(batch, u) * kVector + e;
    }
    index = smaller(index, begin + all.head + first);
  }
  index = smallest_of_warp(index);
  if constexpr (!kWarps) {
    if (lane % 32 == 0 && index != ~0u) atomicMin(&of_block, index);
    __syncthreads();
    index = of_block;
    if (a.cluster) {
      __shared__ Candidate<Key> of_blocks[kArgmaxMostCluster];
      wait_at_cluster_barrier();
      if (lane == 0) store_in_cluster(&of_blocks[part], 0, Candidate<Key>{most, index});
      arrive_at_cluster_barrier();
      if (part != 0 || lane >= 32) return;
      wait_at_cluster_barrier();
      Candidate<Key> best_of_blocks = of_blocks[smaller(lane, a.slices - 1)];
      merge_team(best_of_blocks, 32);
      if (lane == 0) write<Key>(a, row, 0, best_of_blocks.index);
      return;
    }
  }
  if (lane == 0 && own == unit) finish<Key>(a, row, 0, part, {most, index});
}

}  // namespace

cudaError_t launch_argmax_rows(cudaStream_t stream, const ArgmaxShape& shape, const ArgProblem& problem,
                               const Argmax& a) {
  const int64_t units = a.outer * a.slices, threads = shape.threads;
  Launch blocks = {dim3(static_cast<unsigned>(((units << shape.lane_bits) + threads - 1) / threads)),
                   dim3(static_cast<unsigned>(threads))};
  if (a.cluster) blocks.cluster = static_cast<int>(a.slices);
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    const int64_t vectors = (a.slice * int64_t{sizeof(Key)} + 15) / 16;
    const bool held = a.cluster && vectors > kFewLoads * threads && vectors <= kManyLoads * threads;
    auto kernel = argmax_rows<Key, false, kFewLoads, false>;
    if (held) kernel = argmax_rows<Key, false, kManyLoads, true>;
    if constexpr (sizeof(Key) == 2 || sizeof(Key) == 4)
      if (units > kManyBlocks && 16 * vectors <= kManyLoadsBytes) kernel = argmax_rows<Key, false, kManyLoads, false>;
    if (shape.lane_bits == 5) kernel = argmax_rows<Key, true, kFewLoads, false>;
    const cudaError_t status = allow_cluster(reinterpret_cast<const void*>(kernel), blocks.cluster);
    if (status != cudaSuccess) return status;
    return launch(stream, blocks, kernel, a, problem.order, static_cast<uint32_t>(units));
  });
}

}  // namespace jaxgpuops::topk
