// Code for newer CPUs beside the portable one, chosen when the module is loaded. For loops the compiler can vectorise.
#pragma once

#include <cstdint>  // defines __GLIBC__ where it is the C library

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define JAXGPUOPS_SIMD __attribute__((target_clones("avx2", "default")))
#else
#define JAXGPUOPS_SIMD
#endif

// For what such loops call: a function that is not part of its caller is compiled for the oldest CPU only.
#define JAXGPUOPS_INLINE inline __attribute__((always_inline))
