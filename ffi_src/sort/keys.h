// Sorts the elements of each row by two keys of 32 bits, or by one of 64, of which only the permutation is wanted: the
// problem, its plan, and the geometry on which the plan and the kernels must agree.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "common/rounding.h"
#include "common/rows.h"
#include "common/sort_order.h"
#include "sort/sort.h"

namespace jaxgpuops::sort {

// The sort is stable. Elements whose high keys are equal are in the order of their low ones.
struct KeysProblem {
  Rows rows;
  SortOrder high, low;
  bool one = false;  // the high key has 64 bits, and there is no other
};

constexpr int kKeysThreads = 384;
// Elements of a thread, if there are many in all (in passes whose elements may have halves, and in others), or few.
constexpr int kManyWideKeys = 20, kManyKeys = 23, kFewKeys = 8;
constexpr int64_t kMostKeys = int64_t{1} << 24;  // elements of a row, whose indices have 24 bits
constexpr int64_t kKeysCountStep = 1 << 12;      // a block counts a multiple of so many elements
constexpr int64_t kKeysHeadBytes = 64, kKeysBytes = 8;

struct KeysPlan {
  bool taken = false;  // else sorting twice is faster, or the only way
  int items = 0;       // elements of a thread
  int64_t blocks = 0;
  int64_t counted = 0;          // how many elements a block counts
  int64_t workspace_bytes = 0;  // workspace of one outer index
  bool tickets = false;         // blocks take tickets, as they may be more than run at the same time
  bool overlap = false;         // whether a pass may start before the one before it ends
};

// `workspace_bytes` is what the caller has for one outer index; a negative number asks whether these kernels are the
// best.
KeysPlan plan_keys(const KeysProblem& problem, const Gpu& gpu, int64_t workspace_bytes = -1);

// The same for a sort of elements of 64 bits by which only the permutation is wanted; else nothing is taken.
KeysPlan plan_keys(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes = -1);

// The shared memory of a pass: counts of each warp, and elements.
constexpr int64_t keys_shared_bytes(int items, bool wide) {
  return kKeysThreads / 32 * 1024 + int64_t{kKeysThreads} * items * (wide ? 10 : 8);
}

// The offset of each part of a workspace, and its total size in bytes. Passes write to two buffers in turn.
struct KeysShape {
  KeysShape(int64_t rows, int64_t length, int items) : tiles(ceil_div(length, int64_t{kKeysThreads} * items)) {
    counts = aligned(rows * kKeysHeadBytes);
    status = counts + rows * kKeysBytes * 1024;
    words[0] = status + rows * tiles * kKeysBytes * 1024;
    words[1] = words[0] + aligned(rows * length * 8);
    halves[0] = words[1] + aligned(rows * length * 8);
    halves[1] = halves[0] + aligned(rows * length * 2);
    bytes = halves[1] + aligned(rows * length * 2);
  }

  int64_t tiles;                                // of a row, at most
  int64_t counts, status, words[2], halves[2];  // offsets of the parts; KeysHeads are at 0
  int64_t bytes;
};

}  // namespace jaxgpuops::sort
