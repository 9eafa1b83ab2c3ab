// kernels_avx2.cc -- kernels.inc with 32-byte vectors. Every CPU with AVX2 has F16C, which not every compiler
// can ask about.
#if defined(__x86_64__)
#include "kernels.h"

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

#define SIMD_BYTES 32
#define SIMD_F16C 1
#define FIND_KERNEL find_kernel_avx2
#include "kernels.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
