// The geometry of the buckets kernels that the plan, the launch and the kernels must agree on.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "topk/cuda/stream_shape.h"

namespace jaxgpuops::topk {

constexpr int64_t kMaxBucketsK = 1 << 19;
constexpr int64_t kMostBeside = 128;  // the most columns side by side
constexpr int kBucketsThreads = 512;
constexpr int kBucketsResident = 2;  // blocks that a multiprocessor runs at the same time
// The fewest elements that a block reads, if a multiprocessor runs one block; kBucketsSliceOfTwo if it runs two.
constexpr int64_t kBucketsSlice = 1 << 13, kBucketsSliceOfTwo = 1 << 16;
constexpr uint32_t kBucketsSample = 16;                           // the most elements of a row that a thread samples
constexpr uint32_t kFewestSplitters = 64, kMostSplitters = 2048;  // a row has one bucket more
constexpr uint32_t kBucketsDigits = 1 << 11;
constexpr size_t kBucketsStagedBytes = 60 << 10;  // candidates that a block collects before it lists them
constexpr uint32_t buckets_staged(size_t composite) { return static_cast<uint32_t>(kBucketsStagedBytes / composite); }
// A block sorts the buckets that begin within so many places,
constexpr uint32_t buckets_window(size_t composite) { return static_cast<uint32_t>((16 << 10) / composite); }
// in shared memory if they have at most so many candidates. Up to so many candidates of a row are not divided: a block
// sorts all of them.
constexpr uint32_t buckets_room(size_t composite) { return static_cast<uint32_t>((40 << 10) / composite); }

struct BucketsShape {
  uint32_t sample = 0;     // elements that a thread samples
  uint32_t reach = 0;      // the number of threads whose best one reaches the threshold, and somewhat more may
  uint32_t splitters = 0;  // a power of two
  int64_t room = 0;        // candidates that a row has room for
  bool alone = false;      // whether these are so few that a block can sort them
  bool direct = false;     // else, whether the sample divides them into buckets that are small enough
  int64_t window = 0;      // then, the most places within which buckets may begin that one block sorts
  int64_t starts = 0, list = 0, in_order = 0;  // byte offsets within a row's workspace
  int64_t bytes = 0;
};

// Each thread samples so many elements that about half of the threads, or fewer, see one of the row's k best. `reach`
// is that number plus six standard deviations, which is hardly ever exceeded; the threshold is a key that so many
// threads reach (kth_of_composites() may add up to a half). From it follows how many elements of the row reach the
// threshold, with five standard deviations to spare: `room`.
inline BucketsShape sampled_shape(int64_t length, int64_t k, int key_bytes, uint32_t most_samples) {
  const int64_t composite = composite_bytes(key_bytes);
  BucketsShape shape;
  const double share = static_cast<double>(k) / static_cast<double>(length);
  shape.sample = static_cast<uint32_t>(std::clamp(0.7 / share, 1., static_cast<double>(most_samples)));
  const double threads = kBucketsThreads, each = shape.sample, seen = 1 - std::pow(1 - share, each);
  shape.reach =
      static_cast<uint32_t>(std::min(threads * seen + 6 * std::sqrt(threads * seen * (1 - seen)) + 6, threads - 8));
  const double reached = shape.reach + shape.reach / (shape.reach <= 64 ? 2 : 8);
  const double most = reached + 5 * std::sqrt(reached * std::max(0., 1 - reached / threads));
  const double reaching = 1 - std::pow(std::max(1 - most / threads, 0.02), 1 / each);
  shape.room = std::min(length, static_cast<int64_t>(reaching * static_cast<double>(length)) + 1024) / 2 * 2;
  // Hardly ever are there 18 times as many elements between two samples as on the average of the least ones.
  const int64_t between = length / shape.sample / (kBucketsThreads - shape.reach);
  shape.alone = shape.room <= buckets_room(composite);
  const int64_t left = buckets_room(composite) - 18 * between;
  shape.window = buckets_window(composite);
  while (shape.window > left && shape.window > buckets_window(composite) / 4) shape.window /= 2;
  shape.direct = !shape.alone && k > 1024 && shape.window <= left;
  // There are at most k splitters, up to 512. More than 512 are taken only while buckets of k elements would not fit
  // into shared memory.
  shape.splitters = kFewestSplitters;
  while (shape.splitters < kMostSplitters &&
         (shape.splitters < 512 ? 2 * shape.splitters <= k : int64_t{shape.splitters} * 1024 < k * composite))
    shape.splitters *= 2;
  // Counters, the digits of the exact search or the counts of the buckets, and where the buckets begin.
  shape.starts = 64 + (kMostSplitters + 4) * 4;
  shape.list = shape.starts + (kMostSplitters + 4) * 4;
  shape.in_order = shape.list + shape.room * composite;
  shape.bytes = shape.in_order + shape.room * composite;
  return shape;
}
// The fewest samples that will do: all blocks of a row read them.
inline BucketsShape buckets_shape(int64_t length, int64_t k, int key_bytes) {
  BucketsShape shape;
  for (uint32_t most = 4; most <= kBucketsSample; most *= 2) {
    shape = sampled_shape(length, k, key_bytes, most);
    if (shape.alone || shape.direct) break;
  }
  return shape;
}
static_assert(kBucketsDigits <= kMostSplitters && kFewestSplitters <= buckets_room(16));

// Bytes of shared memory: bins and counters, then what the block has staged, or the splitters (twice) and two numbers
// for each bucket; in the second kernel, candidates (twice).
constexpr size_t buckets_control(size_t composite) { return stream_control_bytes(composite, kBucketsThreads); }
constexpr size_t buckets_shared(size_t composite) {
  return buckets_control(composite) + std::max<size_t>(kBucketsStagedBytes + kBucketsThreads * (2 * composite + 8),
                                                       kMostSplitters * 2 * composite + (kMostSplitters + 4) * 8);
}
constexpr size_t buckets_sort_shared(size_t composite) {
  return buckets_control(composite) + 2 * buckets_room(composite) * composite;
}

}  // namespace jaxgpuops::topk
