// What plan_topk() asks about a problem: which kernels can take it, and which of them take less time. The limits were
// measured on an H200; plan_limits.cc says how.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "topk/plan.h"

namespace jaxgpuops::topk {

// The held kernel takes rows of at least so many times k elements, since it relies on a row having whole vectors of 16
// bytes wherever it begins. (Forced on rows of two elements, it would read beyond them.)
constexpr int64_t kLeastHeld = 16;

// Fewer columns of a few elements are compared in less time than a thread sorts each.
constexpr int64_t kLeastShort = 1 << 13;

bool holds_wide(Rows rows, int64_t k);
bool sorts(Rows rows, int64_t k, int key_bytes, const Gpu& gpu);
bool sorts_by_digits(Rows rows, int64_t k, int key_bytes, const Gpu& gpu);
bool sorts_columns_by_digits(Rows rows, int64_t k, int key_bytes, const Gpu& gpu);
bool compares_in_teams(Rows rows, int64_t k, int key_bytes, bool sorted);
bool holds_columns(Rows rows, int64_t k, int key_bytes);
bool holds_many(Rows rows, int64_t k, int key_bytes, const Gpu& gpu);
bool compares(Rows rows, int64_t k, int key_bytes, bool sorted, const Gpu& gpu);
bool streams_columns(Rows rows, int key_bytes, const Gpu& gpu);
int64_t longest_held(Rows rows, int key_bytes);
bool takes_few(Rows rows, int64_t k);
bool prefers_few(Rows rows, int64_t k, int key_bytes);
bool has_clusters(const Gpu& gpu);
bool has_few(Rows rows, int64_t k, const Gpu& gpu);
int64_t most_slices(Rows rows, int64_t k, int key_bytes, int threads, const Gpu& gpu);
int64_t idle_blocks(Rows rows, int64_t k, int key_bytes, const Gpu& gpu);
bool prefers_wave(Rows rows, int64_t k, int key_bytes, bool sorted, const Gpu& gpu);
bool sieves_short(Rows rows, int64_t k, int key_bytes, const Gpu& gpu);
bool sorts_narrow(Rows rows, int64_t k, int key_bytes, const Gpu& gpu);
bool sweeps_narrow(Rows rows, int64_t k, int key_bytes);
bool prefers_digits(Rows rows, int64_t k, int key_bytes, bool sorted, const Gpu& gpu);
bool sorts_at_once(Rows rows, int64_t k, int key_bytes);
bool gathers_wide(Rows rows, int64_t k, int key_bytes, bool sorted);
bool takes_buckets(Rows rows, int64_t k, int key_bytes, bool sorted, const Gpu& gpu);
bool prefers_buckets(Rows rows, int64_t k, int key_bytes, const Gpu& gpu);
bool selects_first(Rows rows, int64_t k, int key_bytes);
bool turns_columns(Rows rows, int64_t k, int key_bytes, bool sorted, Algorithm in_place, Algorithm of_rows);
bool sorts_whole(Rows rows, int64_t k, int key_bytes, bool divides);

}  // namespace jaxgpuops::topk
