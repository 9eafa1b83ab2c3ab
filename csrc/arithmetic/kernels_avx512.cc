// kernels_avx512.cc -- kernels.inc with 64-byte vectors, for Skylake-SP, Zen 4 and later.
#if defined(__x86_64__)
#include "kernels.h"

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#define SIMD_BYTES 64
#define SIMD_F16C 1
#define FIND_KERNEL find_kernel_avx512
#include "kernels.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
