// The place of an element in its segment, by comparing it with the others.
#pragma once

#include "sort/cuda/offsets.cuh"

namespace jaxgpuops::sort {
namespace {

constexpr uint32_t kShortSegment = 8;  // elements that a lane compares one by one

// Returns how many keys of a range come before, of those that this lane of a team looks at.
template <class Key, class Before>
__device__ __forceinline__ uint32_t count_keys(const Key* keys, Range range, uint32_t lane, uint32_t lanes,
                                               Before before) {
  struct alignas(16) Vector {
    Key key[16 / sizeof(Key)];
  };
  constexpr uint32_t kKeys = 16 / sizeof(Key);
  const uint32_t first = min((range.begin + kKeys - 1) / kKeys * kKeys, range.end);
  const uint32_t last = max(first, range.end / kKeys * kKeys);
  uint32_t found[kKeys] = {};
  for (uint32_t i = range.begin + lane; i < first; i += lanes) found[0] += before(keys[i]);
  for (uint32_t i = last + lane; i < range.end; i += lanes) found[0] += before(keys[i]);
#pragma unroll 4
  for (uint32_t i = first / kKeys + lane; i < last / kKeys; i += lanes) {
    const Vector some = reinterpret_cast<const Vector*>(keys)[i];
#pragma unroll
    for (uint32_t j = 0; j < kKeys; ++j) found[j] += before(some.key[j]);
  }
  uint32_t sum = 0;
#pragma unroll
  for (const uint32_t count : found) sum += count;
  return sum;
}

// Returns how many elements of a segment come before element i of it, of those that this lane looks at. Of equal
// elements, those before it do.
template <class Key>
__device__ __forceinline__ uint32_t rank_in(const Key* keys, Range segment, uint32_t i, uint32_t lane, uint32_t lanes) {
  const Key key = keys[i];
  if (segment.end - segment.begin > kShortSegment * lanes)
    return count_keys(keys, {segment.begin, i}, lane, lanes, [&](Key other) { return other <= key; }) +
           count_keys(keys, {i + 1, segment.end}, lane, lanes, [&](Key other) { return other < key; });
  uint32_t rank = 0;
  for (uint32_t j = segment.begin + lane; j < segment.end; j += lanes)
    rank += keys[j] < key || (keys[j] == key && j < i);
  return rank;
}

}  // namespace
}  // namespace jaxgpuops::sort
