// The facts about a GPU that plans use, one table row for each generation. docs/another-gpu.md says how to tune a row.
//
// Results do not depend on these numbers: which kernel runs, and with how many blocks, does not change the order in
// which a row's elements are combined. So a row can be tuned without checking results again.
#pragma once

#include <cstdint>

namespace jaxgpuops {

struct Gpu {
  int compute_capability;         // 10 * major + minor
  int64_t multiprocessors;        // multiprocessors over which plans distribute the work
  int64_t shared_bytes;           // shared memory that the device allows a block
  int64_t multiprocessor_shared;  // shared memory of a multiprocessor; each block takes 1 KiB more than it asks for
  int max_cluster;                // the most blocks of a thread-block cluster; 1 if there are no clusters
  bool bulk_copy;                 // whether there are cp.async.bulk and mbarriers
  bool dependent_launch;          // whether a kernel may start before the previous one ends (griddepcontrol)
};

// Every row has the H200's number of multiprocessors, since the other generations are not tuned yet. 12.x has 8 as its
// largest cluster, because only some of its products have clusters of 16 blocks.
constexpr Gpu kGpus[] = {
    {75, 132, 64 << 10, 64 << 10, 1, false, false},   {80, 132, 163 << 10, 164 << 10, 1, false, false},
    {86, 132, 99 << 10, 100 << 10, 1, false, false},  {87, 132, 163 << 10, 164 << 10, 1, false, false},
    {89, 132, 99 << 10, 100 << 10, 1, false, false},  {90, 132, 227 << 10, 228 << 10, 16, true, true},
    {100, 132, 227 << 10, 228 << 10, 16, true, true}, {120, 132, 99 << 10, 100 << 10, 8, true, true},
};

constexpr int64_t kMostBlocks = 0x7fffffff;  // the most blocks of a grid

// Returns the row of the latest generation that is not newer than this compute capability.
constexpr Gpu gpu_of(int compute_capability) {
  Gpu gpu = kGpus[0];
  for (const Gpu& row : kGpus)
    if (row.compute_capability <= compute_capability) gpu = row;
  gpu.compute_capability = compute_capability;
  return gpu;
}

}  // namespace jaxgpuops
