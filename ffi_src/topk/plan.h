// Chooses the kernel of a call, its geometry and the size of its workspace. A plan is a pure function of shapes and a
// few facts about the device: Python sizes the workspace and explains a call with it where there is no GPU, tests visit
// every regime, and the CUDA handler calls the same functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "common/gpu.h"
#include "common/rows.h"
#include "sort/plan.h"
#include "topk/cuda/compare_shape.h"
#include "topk/cuda/digits_shape.h"
#include "topk/cuda/sort_shape.h"

namespace jaxgpuops::topk {

enum class Algorithm {
  kEmpty,    // there is nothing to write
  kArgmax,   // k = 1: one reduction
  kRows,     // short rows, each in the registers of some lanes or of a block
  kFew,      // k <= 8 of columns and short rows: lanes keep the best in registers; limits.h says which
  kSort,     // short rows with large k or 64-bit elements: teams of lanes sort them in registers
  kCompare,  // few elements in all: each is compared with all others of its row
  kHeld,     // longer rows, held in the registers and shared memory of a block or a cluster
  kStream,   // one block or cluster streams a row and keeps the elements above a rising threshold
  kWave,     // few long rows, k <= 256: one wave of blocks reads them; a second kernel merges the best of each
  kSieve,    // k from 257 to 4096, or from 65 with a block a row: keeps what reaches a threshold, and ranks it by bins
  kColumns,  // the axis is not the last: a block reads neighbouring columns together
  kBuckets,  // large k: candidates above a sampled threshold, divided into buckets that blocks sort
  kDigits,   // k of hundreds to thousands: a block or a cluster holds a row, selects by digits, and sorts by digits
  kRadix,    // large k in long rows: select/ finds the k elements, in order of appearance, and sort/ sorts them
  kShort,    // columns of a few elements, each sorted by a thread: kShort of sort/plan.h
  kBlock,    // k near the length: the row is sorted whole by kBlock of sort/plan.h, which writes the first k
  kSweep,    // the row is sorted whole, by kSweep of sort/plan.h
};

// The names, in the order of the enumeration.
constexpr const char* kNames[] = {"empty",  "argmax", "rows",  "few",   "sort",    "compare",
                                  "held",   "stream", "wave",  "sieve", "columns", "buckets",
                                  "digits", "radix",  "short", "block", "sweep"};
static_assert(std::size(kNames) == static_cast<size_t>(Algorithm::kSweep) + 1);
constexpr const char* name(Algorithm algorithm) {
  return algorithm <= Algorithm::kSweep ? kNames[static_cast<size_t>(algorithm)] : "?";
}

struct Plan {
  Algorithm algorithm = Algorithm::kEmpty;
  int lanes = 32;               // lanes that share a row or a column; kRows, kColumns: at most those of a warp
  int threads = 0;              // threads of a block
  int slices = 1;               // blocks that share a row
  int64_t blocks = 0;           // blocks of the largest launch
  bool overlap = false;         // a kernel may start before the previous one ends (kArgmax, kWave, kSieve, kBuckets)
  int64_t workspace_bytes = 0;  // workspace of one outer index
  int64_t shared_limit = 0;     // shared memory that the device allows a block
  SortShape sort;               // used by kSort
  CompareShape compare;         // used by kCompare
  DigitsShape digits;           // used by kDigits
  sort::Plan whole;             // used by kShort, kBlock and kSweep
  int64_t shared_bytes = 0;     // dynamic shared memory of the plan's largest kernel
};

// The caller has a workspace of `workspace_bytes`, and the plan needs no more. (A sharded call is planned for the whole
// batch, but runs on a part of it.) A negative number asks for the best plan. `forced` is for experiments: the
// Algorithm to use if it can take the problem; if it cannot, the plan's algorithm is kEmpty.
Plan plan_topk(Rows rows, int64_t k, int key_bits, bool sorted, const Gpu& gpu, int64_t workspace_bytes = -1,
               int forced = -1);
Plan plan_argmax(Rows rows, int key_bits, const Gpu& gpu, int64_t workspace_bytes = -1);

}  // namespace jaxgpuops::topk
