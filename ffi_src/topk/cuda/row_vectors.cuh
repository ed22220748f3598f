// A row as vectors, mostly of 16 bytes, that start at the first boundary of so many bytes. The elements before the
// first vector and after the last one are loose: fewer than two vectors.
#pragma once

#include <cstdint>

namespace jaxgpuops::topk {

template <class Key, uint32_t kBytes = 16>
struct RowVectors {
  static constexpr uint32_t kVector = kBytes / sizeof(Key);  // elements of a vector
  const Key* x;
  uint32_t length;   // in elements
  uint32_t head;     // loose elements before the first vector
  uint32_t vectors;  // how many there are

  // If elements are not `neighbours` in memory, alignment does not matter: a vector is any kVector elements, and there
  // is no head.
  __device__ __forceinline__ RowVectors(const Key* row, uint32_t elements, bool neighbours = true)
      : x(row), length(elements) {
    const auto misaligned =
        neighbours ? static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row) % kBytes / sizeof(Key)) : 0;
    head = min(length, misaligned ? kVector - misaligned : 0);
    vectors = (length - head) / kVector;
  }
  __device__ __forceinline__ const uint4* body() const { return reinterpret_cast<const uint4*>(x + head); }
  // The index of a vector's first element.
  __device__ __forceinline__ uint32_t index(uint32_t vector) const { return head + vector * kVector; }
  // How many elements are loose, and the index of one of them.
  __device__ __forceinline__ uint32_t loose() const { return length - vectors * kVector; }
  __device__ __forceinline__ uint32_t loose_index(uint32_t i) const { return i < head ? i : vectors * kVector + i; }
};

}  // namespace jaxgpuops::topk
