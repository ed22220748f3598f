// The geometry of the rows kernel that the plan and the launch must agree on.
#pragma once

#include <cstdint>

namespace jaxgpuops::topk {

constexpr int64_t kMaxRowsK = 64;
constexpr int64_t kMostRowsK = 128;   // the largest k, with more delegates, and a block for each row
constexpr int kRowsBlock = 64;        // threads of a block whose teams are parts of its warps
constexpr uint32_t kFewBlocks = 256;  // so many blocks, of a row each, run at the same time
constexpr int kManyElements = 64;     // elements of a thread
constexpr int kMaxTeam = 256;
constexpr int64_t max_rows_length(int key_bytes) { return kMaxTeam * (key_bytes == 8 ? 32 : kManyElements); }

constexpr int few_elements(int key_bytes) { return key_bytes >= 4 ? 32 : kManyElements; }

struct RowsShape {
  bool network = false;  // true: sorting networks select; false: delegates
  int team = 0;          // threads of a block that share a row
  int elements = 0;      // elements of a thread
};

// Chooses few threads for a row, so that one step of a warp serves several rows; but a thread must have registers for
// its elements, and a row needs two delegates for each of k. Teams smaller than a warp are faster if threads have few
// elements.
constexpr RowsShape rows_shape(int64_t rows, int64_t length, int64_t k, int key_bytes) {
  RowsShape shape;
  if (k > kMaxRowsK) {
    shape.team = 64;
    shape.elements = kManyElements;
    while (shape.elements * shape.team < length) shape.team *= 2;
    return shape;
  }
  shape.elements = few_elements(key_bytes);
  shape.network = key_bytes < 8 && k <= 8 && length <= (key_bytes == 4 ? 64 : 1024);
  if (shape.network) {
    shape.team = key_bytes == 4 ? 8 : 4;
    while (key_bytes < 4 && 32 * shape.team < length) shape.team *= 2;
  } else if (length <= 32 * shape.elements) {
    shape.team = 4;
    while (shape.elements * shape.team < length || 2 * shape.team < k) shape.team *= 2;
  } else {
    if (key_bytes < 8) shape.elements = kManyElements;
    // For a few narrow rows, twice as many threads as needed take less time; for many, more.
    shape.team = key_bytes == 4 ? 32 : key_bytes < 4 && rows > 2 * int64_t{kFewBlocks} ? 64 : 128;
    while (shape.elements * shape.team < length) shape.team *= 2;
  }
  return shape;
}

}  // namespace jaxgpuops::topk
