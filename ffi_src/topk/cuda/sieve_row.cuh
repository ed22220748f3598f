// How the blocks of sieve.cu share a row, and the exact selection that they fall back to.
#pragma once

#include "topk/cuda/candidates.cuh"
#include "topk/cuda/kernels.h"
#include "topk/cuda/meet.cuh"
#include "topk/cuda/row_vectors.cuh"
#include "topk/cuda/sieve_shape.h"

namespace jaxgpuops::topk {
namespace {

struct Sieve : Call {
  int64_t first_row;
  uint32_t slices, steps;
  bool by_streams;           // delegates are the largest keys of the streams' parts of the sample, not of the threads'
  uint32_t reach;            // the number of delegates that must reach the threshold
  uint32_t ties;             // the number of elements of a sample that must reach it, if most of these tie with it
  uint32_t reach_scattered;  // the number of threads whose second samples must reach the threshold
};

constexpr int kThreads = kSieveThreads;
constexpr uint32_t kWarps = kThreads / 32, kPerThread = kSieveBins / kThreads;

using C = uint64_t;

struct Control {
  Shared<kThreads, C> shared;
  uint32_t counts[32];  // survivors, each in one of 32 lists that are interleaved
  uint32_t tops[kWarps], bits[kWarps];
  uint32_t found, before;
  C most;
};
static_assert(kSieveKeep * sizeof(C) <= kSieveRing);
static_assert(sizeof(Control) <= kSieveControl && Shared<kThreads, C>::kBins == kSieveBins);

// The data in the workspace that the blocks of a row publish for each other.
struct Exchange {
  uint32_t* arrivals;
  uint32_t* failed;
  uint32_t* crowded;
  uint32_t* total;
  uint32_t* found;
  C* most;
  C* told;  // four of each block: the threshold from its sample, its largest composite, its threshold at the end, and
            // the bits of its sample's keys
  uint32_t* bins;
  C* list;

  __device__ Exchange(const Sieve& a, int64_t row) {
    unsigned char* bytes = a.workspace_of(row);
    arrivals = reinterpret_cast<uint32_t*>(bytes);
    failed = arrivals + 1;
    crowded = arrivals + 2;
    total = arrivals + 3;
    found = arrivals + 4;
    most = reinterpret_cast<C*>(bytes + 64);
    bins = reinterpret_cast<uint32_t*>(bytes + 128);
    list = reinterpret_cast<C*>(bins + kSieveBins);
    told = list + kSieveKeep;
  }
};

// The part of a row that a block reads. Streams, of which a step reads 32 neighbouring vectors each, are spread evenly
// over the row.
template <class Key>
struct Share : RowVectors<Key> {
  uint32_t first, spread, steps;

  __device__ Share(const Sieve& a, int64_t row, uint32_t rank)
      : RowVectors<Key>(static_cast<const Key*>(a.x) + row * a.length, a.length) {
    steps = a.steps;
    first = (threadIdx.x / 32 * a.slices + rank) * (a.steps * 32) + threadIdx.x % 32;
    spread = kWarps * a.slices * (a.steps * 32);
  }
  __device__ __forceinline__ uint32_t vector(uint32_t step, int load) const {
    return first + load * spread + step * 32;
  }
};

template <class Key>
__device__ __forceinline__ void write(const Sieve& a, Packing<Key> packing, int64_t row, uint32_t rank, C c) {
  const int64_t to = a.place(row, rank);
  static_cast<Key*>(a.values)[to] = decode(packing.key(c), a.order);
  a.indices[to] = static_cast<int32_t>(packing.index(c));
}

// The exact selection, by all blocks of a row together. It selects from the survivors that reach `floor`; if the
// survivors may lack some of the k best, from the whole row. `few` is shared memory for kSieveKeep composites.
template <class Key>
__device__ __noinline__ void search(const Sieve& a, int64_t row, uint32_t rank, Control& control, const C* survivors,
                                    uint32_t held, C floor, bool of_row, C* few, bool alone, uint32_t target) {
  auto& s = control.shared;
  constexpr int kDigit = 11;
  constexpr uint32_t kDigits = 1 << kDigit;
  const uint32_t tid = threadIdx.x;
  const Share<Key> share(a, row, rank);
  const Packing<Key> packing = Packing<Key>::make(a.length);
  const Exchange exchange(a, row);
  C* const list = alone ? few : exchange.list;
  uint32_t* const found = alone ? &control.found : exchange.found;
  const auto each = [&](auto use) {
    if (!of_row) {
      for (uint32_t i = tid; i < held; i += kThreads)
        if (i / 32 < control.counts[i % 32] && survivors[i] >= floor) use(survivors[i]);
      return;
    }
#pragma unroll 1
    for (uint32_t step = 0; step < share.steps; ++step) {
      uint4 tile[kSieveLoads];
#pragma unroll
      for (int u = 0; u < kSieveLoads; ++u)
        if (share.vector(step, u) < share.vectors) tile[u] = __ldcs(share.body() + share.vector(step, u));
#pragma unroll
      for (int u = 0; u < kSieveLoads; ++u) {
        if (share.vector(step, u) >= share.vectors) continue;
        const uint32_t index = share.index(share.vector(step, u));
#pragma unroll
        for (int e = 0; e < static_cast<int>(Share<Key>::kVector); ++e)
          use(packing.pack(encode(reinterpret_cast<const Key*>(&tile[u])[e], a.order), index + e));
      }
    }
    if (rank == 0 && tid < share.loose()) {
      const uint32_t index = share.loose_index(tid);
      use(packing.pack(encode(share.x[index], a.order), index));
    }
  };
  const int top = packing.shift() + 8 * static_cast<int>(sizeof(Key));
  int bits = top;
  C prefix = 0;
  uint32_t need = a.k;
  meet(exchange.arrivals, a.slices, target);  // now all blocks have read the bins
  while (true) {
    const int digit = min(kDigit, bits);
    for (uint32_t i = tid; i < kDigits; i += kThreads) s.histogram[i] = 0;
    if (!alone)
      for (uint32_t i = rank * kThreads + tid; i < kDigits; i += a.slices * kThreads) exchange.bins[i] = 0;
    meet(exchange.arrivals, a.slices, target);
    const int above = bits;
    bits -= digit;
    each([&](C c) {
      if (above == top || c >> above == prefix) atomicAdd(&s.histogram[(c >> bits) & ((1u << digit) - 1)], 1u);
    });
    __syncthreads();
    if (!alone) {
      for (uint32_t i = tid; i < kDigits; i += kThreads)
        if (s.histogram[i]) atomicAdd(&exchange.bins[i], s.histogram[i]);
      meet(exchange.arrivals, a.slices, target);
      for (uint32_t i = tid; i < kDigits; i += kThreads) s.histogram[i] = __ldcg(&exchange.bins[i]);
      __syncthreads();
    }
    find_digit<kThreads, kDigits>(s, need, [&](uint32_t d) { return s.histogram[d]; });
    need -= s.above;
    prefix = prefix << digit | s.boundary;
    const uint32_t reached = a.k - need + s.kept;
    meet(exchange.arrivals, a.slices, target);  // now all blocks have read the bins
    if (reached <= kSieveKeep || bits == 0) break;
  }
  const C threshold = prefix << bits;
  each([&](C c) {
    if (c >= threshold) list[atomicAdd(found, 1u)] = c;
  });
  meet(exchange.arrivals, a.slices, target);
  if (rank) return;
  const uint32_t m = *static_cast<volatile uint32_t*>(found);
  if (!alone)
    for (uint32_t i = tid; i < m; i += kThreads) few[i] = __ldcg(&list[i]);
  __syncthreads();
  sort_descending<kThreads>(few, m);
  for (uint32_t i = tid; i < a.k; i += kThreads) write(a, packing, row, i, few[i]);
}

}  // namespace
}  // namespace jaxgpuops::topk
