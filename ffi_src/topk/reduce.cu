// k = 1: argmax, argmin and top-1, one read of the input.
//
// Each thread finds the largest key of its elements, and which batch of a few loads had it first; only lanes that have
// the largest of their warp look the element up again. From there on a result is a composite (key, then lower index);
// shuffles and shared memory finish the row. A row belongs to 8 or 32 lanes, to a block, or to several blocks that
// leave one composite each for a second kernel. With an inner dimension, neighbouring threads read neighbouring columns
// and a block's rows of threads share the axis. The composite order is total, so the order of the reduction does not
// matter.
//
// Bytes moved: the input once. About five instructions for each word of it: integers, too, run at memory speed.
#include "common/launch.cuh"
#include "topk/candidates.cuh"
#include "topk/delegates.cuh"
#include "topk/kernels.h"

namespace jaxgpuops::topk {
namespace {

struct Reduce {
  const void* x;
  void* values;  // null: indices only
  int32_t* indices;
  void* partial;  // [row][slice] composites, when slices > 1
  ArgOrder order;
  Rows rows;
  uint32_t slices, slice;  // blocks that share a row, and the elements of each
};

// Best of the elements seen so far. Elements arrive in rising order of index, so a tie never replaces.
template <class Key>
struct Best {
  Key key = 0;
  uint32_t index = 0;
  bool any = false;
  __device__ __forceinline__ void see(Key k, uint32_t i) {
    const bool better = k > key || !any;
    key = better ? k : key;
    index = better ? i : index;
    any = true;
  }
};

template <class Key>
__device__ __forceinline__ Composite<Key> pack(Packing<Key> packing, Best<Key> best) {
  return best.any ? packing.pack(best.key, best.index) : 0;
}

template <class Key>
__device__ void write(const Reduce& a, Packing<Key> packing, int64_t row, Composite<Key> best) {
  if (a.values) static_cast<Key*>(a.values)[row] = decode(packing.key(best), a.order.order);
  a.indices[row] = static_cast<int32_t>(packing.index(best));
}

template <class C>
__device__ __forceinline__ C largest_of_group(C c, int lanes) {
  for (int d = lanes / 2; d; d /= 2) c = larger(c, shuffle_xor(c, d));
  return c;
}

// kLanes lanes, 8 or 32, share a row's slice.
template <class Key, int kThreads, int kLanes>
__global__ void __launch_bounds__(kThreads) reduce_short_rows(const Reduce a) {
  using C = Composite<Key>;
  constexpr uint32_t kVector = 16 / sizeof(Key);
  constexpr int kRows = kThreads / kLanes;
  const uint32_t lane = threadIdx.x % kLanes;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kLanes;
  const int64_t row = unit / a.slices;
  const uint32_t part = static_cast<uint32_t>(unit % a.slices);
  const uint32_t length = static_cast<uint32_t>(a.rows.length);
  const Packing<Key> packing = Packing<Key>::make(length);
  const bool live = row < a.rows.count();
  Best<Key> best;
  if (live) {
    const uint32_t begin = part * a.slice, count = min(a.slice, length - begin);
    const Key* x = static_cast<const Key*>(a.x) + row * length + begin;
    const uint32_t misaligned = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(Key));
    const uint32_t head = min(count, misaligned ? kVector - misaligned : 0);
    const uint32_t vectors = (count - head) / kVector;
    for (uint32_t i = lane; i < head; i += kLanes) best.see(encode_arg(x[i], a.order), begin + i);
    constexpr uint32_t kUnroll = sizeof(Key) == 1 ? 2 : 4;
    uint32_t v = lane;
    for (; v + (kUnroll - 1) * kLanes < vectors; v += kUnroll * kLanes) {
      Key keys[kUnroll][kVector];
#pragma unroll
      for (uint32_t u = 0; u < kUnroll; ++u)
        *reinterpret_cast<uint4*>(keys[u]) = __ldg(reinterpret_cast<const uint4*>(x + head) + v + u * kLanes);
#pragma unroll
      for (uint32_t u = 0; u < kUnroll; ++u)
#pragma unroll
        for (uint32_t e = 0; e < kVector; ++e)
          best.see(encode_arg(keys[u][e], a.order), begin + head + (v + u * kLanes) * kVector + e);
    }
    for (; v < vectors; v += kLanes)
      for (uint32_t e = 0; e < kVector; ++e)
        best.see(encode_arg(x[head + v * kVector + e], a.order), begin + head + v * kVector + e);
    for (uint32_t i = head + vectors * kVector + lane; i < count; i += kLanes)
      best.see(encode_arg(x[i], a.order), begin + i);
  }
  const C c = largest_of_group(pack(packing, best), kLanes);
  if (!live || lane != 0) return;
  if (a.slices == 1) {
    write(a, packing, row, c);
  } else {
    static_cast<C*>(a.partial)[unit] = c;
  }
}

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
    // By plain keys, several in a word. The order of argmax puts no number elsewhere (at most two side by side are
    // equal), only negative NaNs: the least key tells whether there are any.
    const Lanes<Key> lanes(order.order);
    uint32_t most = 0, least = ~0u;
#pragma unroll
    for (const uint4& v : vectors) {
#pragma unroll
      for (const uint32_t word : {v.x, v.y, v.z, v.w}) {
        const uint32_t keys = lanes.encode(word);
        most = lanes.max(most, keys);
        least = sizeof(Key) == 4   ? smaller(least, keys)
                : sizeof(Key) == 2 ? __vminu2(least, keys)
                                   : __vminu4(least, keys);
      }
    }
    const Key ends[2] = {static_cast<Key>(lanes.largest(most)), static_cast<Key>(~lanes.largest(~least))};
    return larger(encode_arg(decode(ends[0], order.order), order), encode_arg(decode(ends[1], order.order), order));
  }
}

// A block shares a row's slice.
template <class Key, int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) reduce_long_rows(const __grid_constant__ Reduce a) {
  using C = Composite<Key>;
  constexpr uint32_t kVector = 16 / sizeof(Key);
  const uint32_t lane = threadIdx.x;
  const int64_t unit = blockIdx.x;
  const int64_t row = unit / a.slices;
  const uint32_t part = static_cast<uint32_t>(unit % a.slices);
  const uint32_t length = static_cast<uint32_t>(a.rows.length);
  const Packing<Key> packing = Packing<Key>::make(length);
  const uint32_t begin = part * a.slice, count = min(a.slice, length - begin);
  const Key* x = static_cast<const Key*>(a.x) + row * length + begin;
  const uint32_t misaligned = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(Key));
  const uint32_t head = min(count, misaligned ? kVector - misaligned : 0);
  const uint32_t vectors = (count - head) / kVector;
  const uint4* body = reinterpret_cast<const uint4*>(x + head);

  C c = 0;
  // What is no whole vector.
  for (uint32_t i = lane; i < count - vectors * kVector; i += kThreads) {
    const uint32_t at = i < head ? i : i + vectors * kVector;
    c = larger(c, packing.pack(encode_arg(x[at], a.order), begin + at));
  }

  // The last batch repeats the last vector, which changes nothing.
  constexpr uint32_t kBatch = 8;
  Key best = 0;
  uint32_t batch = lane;
  const auto place = [&](uint32_t v, uint32_t u) { return min(v + u * kThreads, vectors - 1); };
  const auto look = [&](uint32_t v, auto whole) {
    uint4 loaded[kBatch];
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) loaded[u] = __ldg(body + (whole ? v + u * kThreads : place(v, u)));
    const Key most = largest_key<Key>(loaded, a.order);
    if (most > best) best = most, batch = v;
  };
  uint32_t v = lane;
  for (; v + (kBatch - 1) * kThreads < vectors; v += kBatch * kThreads) look(v, std::true_type());
  if (v < vectors) look(v, std::false_type());

  if (best == largest_of_group(best, 32) && lane < vectors) {
    // Elements with this key have one pattern of bits, but for zeros and NaNs.
    const Key sign = static_cast<Key>(a.order.sign), found = decode(best, a.order.order);
    const bool nan = sign && best == static_cast<Key>(~Key{0});
    const Key drop = nan || static_cast<Key>(found & ~sign) == 0 ? sign : 0;
    const Key from = static_cast<Key>(nan ? a.order.nan_above + 1 : found & ~drop);
    const Key span = static_cast<Key>(nan ? ~sign - from : 0);
    uint32_t first = 0;
#pragma unroll
    for (int u = kBatch - 1; u >= 0; --u) {
      Key elements[kVector];
      *reinterpret_cast<uint4*>(elements) = __ldg(body + place(batch, u));
#pragma unroll
      for (int e = kVector - 1; e >= 0; --e)
        if (static_cast<Key>((elements[e] & ~drop) - from) <= span) first = place(batch, u) * kVector + e;
    }
    c = larger(c, packing.pack(best, begin + head + first));
  }
  c = largest_of_group(c, 32);
  __shared__ C warps[kThreads / 32];
  if (lane % 32 == 0) warps[lane / 32] = c;
  __syncthreads();
  if (lane != 0) return;
  for (int w = 0; w < kThreads / 32; ++w) c = larger(c, warps[w]);
  if (a.slices == 1) {
    write(a, packing, row, c);
  } else {
    static_cast<C*>(a.partial)[unit] = c;
  }
}

// 32 columns a block, kThreads / 32 threads along the axis.
template <class Key, int kThreads>
__global__ void __launch_bounds__(kThreads) reduce_columns(const Reduce a) {
  using C = Composite<Key>;
  constexpr uint32_t kDeep = kThreads / 32;
  const uint32_t length = static_cast<uint32_t>(a.rows.length);
  const Packing<Key> packing = Packing<Key>::make(length);
  const uint32_t lane = threadIdx.x % 32, depth = threadIdx.x / 32;
  const int64_t tiles = (a.rows.inner + 31) / 32;  // of 32 columns
  int64_t unit = blockIdx.x;
  const uint32_t part = static_cast<uint32_t>(unit % a.slices);
  unit /= a.slices;
  const int64_t outer = unit / tiles, inner = unit % tiles * 32 + lane;
  Best<Key> best;
  if (inner < a.rows.inner) {
    const Key* x = static_cast<const Key*>(a.x) + outer * length * a.rows.inner + inner;
    const uint32_t begin = part * a.slice, end = min(length, begin + a.slice);
#pragma unroll 8
    for (uint32_t i = begin + depth; i < end; i += kDeep) best.see(encode_arg(x[i * a.rows.inner], a.order), i);
  }
  __shared__ C all[kDeep][33];
  all[depth][lane] = pack(packing, best);
  __syncthreads();
  if (depth || inner >= a.rows.inner) return;
  C c = all[0][lane];
  for (uint32_t d = 1; d < kDeep; ++d) c = larger(c, all[d][lane]);
  const int64_t row = outer * a.rows.inner + inner;
  if (a.slices == 1) {
    write(a, packing, row, c);
  } else {
    static_cast<C*>(a.partial)[row * a.slices + part] = c;
  }
}

template <class Key>
__global__ void __launch_bounds__(256) finish_rows(const Reduce a) {
  using C = Composite<Key>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  if (row >= a.rows.count()) return;
  C c = 0;
  for (uint32_t i = threadIdx.x % 32; i < a.slices; i += 32)
    c = larger(c, static_cast<const C*>(a.partial)[row * a.slices + i]);
  c = largest_of_group(c, 32);
  if (threadIdx.x % 32 == 0) write(a, Packing<Key>::make(static_cast<uint32_t>(a.rows.length)), row, c);
}

template <class Key>
cudaError_t run(cudaStream_t stream, const Plan& plan, const Reduce& a) {
  const auto blocks = [](int64_t n) { return dim3(static_cast<unsigned>(n)); };
  const int64_t units = a.rows.count() * a.slices;
  cudaError_t status;
  if (a.rows.inner > 1) {
    const int64_t tiles = a.rows.outer * ((a.rows.inner + 31) / 32) * a.slices;
    status = launch(stream, {blocks(tiles), dim3(256)}, reduce_columns<Key, 256>, a);
  } else if (plan.lanes == 8) {
    status = launch(stream, {blocks((units + 31) / 32), dim3(256)}, reduce_short_rows<Key, 256, 8>, a);
  } else if (plan.lanes == 32) {
    status = launch(stream, {blocks((units + 7) / 8), dim3(256)}, reduce_short_rows<Key, 256, 32>, a);
  } else {
    status = launch(stream, {blocks(units), dim3(kArgmaxBlock)}, reduce_long_rows<Key, kArgmaxBlock>, a);
  }
  if (status != cudaSuccess || a.slices == 1) return status;
  return launch(stream, {blocks((a.rows.count() + 7) / 8), dim3(256)}, finish_rows<Key>, a);
}

}  // namespace

cudaError_t launch_reduce(cudaStream_t stream, const Plan& plan, Rows rows, int key_bits, ArgOrder order,
                          const Buffers& buffers) {
  Reduce a = {};
  a.x = buffers.x;
  a.values = buffers.values;
  a.indices = buffers.indices;
  a.partial = buffers.workspace;
  a.order = order;
  a.rows = rows;
  a.slice = static_cast<uint32_t>(((rows.length + plan.slices - 1) / plan.slices + 15) / 16 * 16);
  a.slices = static_cast<uint32_t>((rows.length + a.slice - 1) / a.slice);  // none is empty
  return dispatch_key(key_bits, [&](auto key) { return run<decltype(key)>(stream, plan, a); });
}

}  // namespace jaxgpuops::topk
