// Code for newer CPUs beside the portable one, chosen when the module is loaded. For loops the compiler can vectorise.
#pragma once

#include <cstdint>  // defines __GLIBC__ where it is the C library

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define JAXGPUOPS_SIMD __attribute__((target_clones("avx2", "default")))
#if __GNUC__ >= 12
// The same with fused multiply-adds, which round once: for code whose results may differ by that.
#define JAXGPUOPS_SIMD_FMA __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define JAXGPUOPS_SIMD_FMA JAXGPUOPS_SIMD
#endif
#else
#define JAXGPUOPS_SIMD
#define JAXGPUOPS_SIMD_FMA
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define JAXGPUOPS_INDEPENDENT _Pragma("GCC ivdep")  // the iterations of the loop that follows
#else
#define JAXGPUOPS_INDEPENDENT
#endif

// For what such loops call: a function that is not part of its caller is compiled for the oldest CPU only.
#define JAXGPUOPS_INLINE inline __attribute__((always_inline))

namespace jaxgpuops {

// Asks for memory that a loop over memory comes to 4 KiB later, or `ahead` bytes: hardware does not look beyond a page.
constexpr int64_t kPrefetchBytes = 4096, kCacheLine = 64;
template <bool kToWrite = false, class T>
JAXGPUOPS_INLINE void prefetch(const T* from, int64_t count, int64_t ahead = kPrefetchBytes) {
#if defined(__GNUC__)
  const char* bytes = reinterpret_cast<const char*>(from) + ahead;
  for (int64_t at = 0; at < count * static_cast<int64_t>(sizeof(T)); at += kCacheLine)
    __builtin_prefetch(bytes + at, kToWrite);
#endif
}

// The same for a loop over segments of `count` elements that are `stride` apart.
template <class T>
JAXGPUOPS_INLINE int64_t bytes_ahead(int64_t count, int64_t stride) {
  const int64_t item = sizeof(T), bytes = count * item;
  return bytes >= kPrefetchBytes || bytes == 0 ? stride * item : (kPrefetchBytes + bytes - 1) / bytes * stride * item;
}

}  // namespace jaxgpuops
