// Macros for functions whose loops the compiler can vectorise. Such a function is compiled for newer CPUs and for any
// CPU, and the version that suits the CPU at hand is selected when the module is loaded.
#pragma once

#include <cstdint>  // defines __GLIBC__ if that is the C library

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define JAXGPUOPS_SIMD __attribute__((target_clones("avx2", "default")))
#if __GNUC__ >= 12
// JAXGPUOPS_SIMD with fused multiply-adds, which round once: for functions whose results may differ by that rounding.
#define JAXGPUOPS_SIMD_FMA __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define JAXGPUOPS_SIMD_FMA JAXGPUOPS_SIMD
#endif
#else
#define JAXGPUOPS_SIMD
#define JAXGPUOPS_SIMD_FMA
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define JAXGPUOPS_INDEPENDENT _Pragma("GCC ivdep")  // asserts that the iterations of the next loop are independent
#else
#define JAXGPUOPS_INDEPENDENT
#endif

// For functions that such loops call: a function that is not inlined is compiled for the oldest CPU only.
#define JAXGPUOPS_INLINE inline __attribute__((always_inline))

namespace jaxgpuops {

// Prefetches the memory that a loop will read (or write, kToWrite) `ahead` bytes later. The default is 4 KiB, since
// hardware prefetchers stop at the end of a page.
constexpr int64_t kPrefetchBytes = 4096, kCacheLine = 64;
template <bool kToWrite = false, class T>
JAXGPUOPS_INLINE void prefetch(const T* from, int64_t count, int64_t ahead = kPrefetchBytes) {
#if defined(__GNUC__)
  const char* bytes = reinterpret_cast<const char*>(from) + ahead;
  for (int64_t at = 0; at < count * static_cast<int64_t>(sizeof(T)); at += kCacheLine)
    __builtin_prefetch(bytes + at, kToWrite);
#endif
}

// The `ahead` of prefetch() for a loop over segments of `count` elements that are `stride` elements apart.
template <class T>
JAXGPUOPS_INLINE int64_t bytes_ahead(int64_t count, int64_t stride) {
  const int64_t item = sizeof(T), bytes = count * item;
  return bytes >= kPrefetchBytes || bytes == 0 ? stride * item : (kPrefetchBytes + bytes - 1) / bytes * stride * item;
}

}  // namespace jaxgpuops
