// Which kernel a call takes, with which geometry and how much workspace. Pure functions of shapes and of a few device
// facts, so that Python can size the workspace and explain a call where there is no GPU, and tests can walk every
// regime. The handler calls the same functions.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "common/rows.h"
#include "topk/cuda/sort_shape.h"

namespace jaxgpuops::topk {

enum class Algorithm {
  kEmpty,    // nothing to write
  kArgmax,   // k = 1: one reduction
  kRows,     // short rows: each in the registers of a part of a warp or of a block
  kSort,     // short rows of large k, or of 64 bits: teams of threads sort them in registers
  kHeld,     // longer ones: in registers and shared memory of a block or of a cluster
  kStream,   // one block, or one cluster of blocks, streams a row past a rising threshold
  kGrid,     // the same with many blocks a row and a second kernel that merges their lists
  kWave,     // few long rows, k <= 256: a wave of blocks reads them, and each tells a second kernel its best
  kSieve,    // k of 257 to 4096: blocks keep what reaches a threshold, and rank it together
  kColumns,  // the axis is not the last: neighbouring columns are read together
  kRadix,    // large k: radix select by digits, ordered compaction, then a sort of k
};

const char* name(Algorithm algorithm);

struct Plan {
  Algorithm algorithm = Algorithm::kEmpty;
  int lanes = 32;               // that share a row or a column (kArgmax; kRows, kColumns: of a warp)
  int threads = 0;              // threads of a block
  int slices = 1;               // blocks that share a row
  int64_t blocks = 0;           // of the largest launch
  bool overlap = false;         // a kernel of several may start before the one before it ends (kArgmax, kGrid, kWave)
  int64_t workspace_bytes = 0;  // per outer index
  int64_t shared_limit = 0;     // shared memory that a block may have on the device
  SortShape sort;               // (kSort)
  int64_t shared_bytes = 0;     // that the largest kernel of the plan asks for when it is launched
};

// `workspace_bytes` < 0 asks for the best plan; otherwise it is what the caller has, and the plan makes do with it
// (a sharded call is planned for the whole batch but runs on a part of it). `forced` is for experiments: an Algorithm
// to take where it can; kEmpty comes back where it cannot.
Plan plan_topk(Rows rows, int64_t k, int key_bits, bool sorted, const Gpu& gpu, int64_t workspace_bytes = -1,
               int forced = -1);
Plan plan_argmax(Rows rows, int key_bits, const Gpu& gpu, int64_t workspace_bytes = -1);

}  // namespace jaxgpuops::topk
