// Where an operand that broadcasts against a (outer, length, inner) problem has its elements. With it, kernels read
// such an operand as it is, and no copy of full size is made.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define JAXGPUOPS_HOST_DEVICE __host__ __device__
#else
#define JAXGPUOPS_HOST_DEVICE
#endif

namespace jaxgpuops {

// Maps an outer (or inner) index of the problem to an offset in the operand. The index counts several dimensions in
// row-major order, and the operand may lack some of them. Neighbouring dimensions that the operand has, or lacks, form
// one group: `size` and `stride` are those of the groups, innermost first, and a lacking group has stride 0.
struct IndexMap {
  static constexpr int kMaxGroups = 8;
  int groups = 0;
  int64_t size[kMaxGroups] = {};
  int64_t stride[kMaxGroups] = {};

  JAXGPUOPS_HOST_DEVICE int64_t operator()(int64_t index) const {
    if (groups == 1) return index * stride[0];
    int64_t offset = 0;
#if defined(__CUDACC__)
#pragma unroll 1  // the loop body has two divisions, which are many instructions each
#endif
    for (int g = 0; g < groups; ++g) {
      const int64_t next = index / size[g];
      offset += (index - next * size[g]) * stride[g];
      index = next;
    }
    return offset;
  }
};

// An element has the offset outer(o) + position * axis_stride + inner(i), where o, position and i are its outer index,
// its position along the axis and its inner index.
struct Broadcast {
  IndexMap outer, inner;
  int64_t axis_stride = 0;  // 0 if one value serves the whole axis

  JAXGPUOPS_HOST_DEVICE int64_t operator()(int64_t o, int64_t position, int64_t i) const {
    return outer(o) + position * axis_stride + inner(i);
  }
};

}  // namespace jaxgpuops
