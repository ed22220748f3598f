// What plans know of a GPU: one row a generation. docs/another-gpu.md says how to tune a row.
//
// Results do not depend on these numbers: which kernel runs, and in how many blocks, does not change the order in which
// a row's elements are combined. So a row may be tuned without a test of results.
#pragma once

#include <cstdint>

namespace jaxgpuops {

struct Gpu {
  int compute_capability;         // 10 * major + minor
  int64_t multiprocessors;        // over which plans spread the work
  int64_t shared_bytes;           // shared memory that a block may have
  int64_t multiprocessor_shared;  // shared memory of a multiprocessor; each of its blocks takes 1 KiB more than asked
  int64_t cached_bytes;           // what the L2 cache can be trusted to hold from one sweep to the next
  int max_cluster;                // blocks of a thread-block cluster; 1: there are no clusters
  bool bulk_copy;                 // cp.async.bulk and mbarriers
  bool dependent_launch;          // a kernel may start before the one before it ends (griddepcontrol)
};

// The number of multiprocessors is the H200's in every row: nobody has tuned the others. 12.x has 16-block clusters on
// some products only.
constexpr Gpu kGpus[] = {
    {75, 132, 64 << 10, 64 << 10, 24 << 20, 1, false, false},
    {80, 132, 163 << 10, 164 << 10, 24 << 20, 1, false, false},
    {86, 132, 99 << 10, 100 << 10, 24 << 20, 1, false, false},
    {87, 132, 163 << 10, 164 << 10, 24 << 20, 1, false, false},
    {89, 132, 99 << 10, 100 << 10, 24 << 20, 1, false, false},
    {90, 132, 227 << 10, 228 << 10, 24 << 20, 16, true, true},
    {100, 132, 227 << 10, 228 << 10, 24 << 20, 16, true, true},
    {120, 132, 99 << 10, 100 << 10, 24 << 20, 8, true, true},
};

// The row of a compute capability: that of the latest generation which is not newer.
constexpr Gpu gpu_of(int compute_capability) {
  Gpu gpu = kGpus[0];
  for (const Gpu& row : kGpus)
    if (row.compute_capability <= compute_capability) gpu = row;
  gpu.compute_capability = compute_capability;
  return gpu;
}

}  // namespace jaxgpuops
