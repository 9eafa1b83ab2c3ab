// kernels_baseline.cc -- kernels.inc for every CPU: 16-byte vectors, which are SSE2 on x86-64 and NEON on
// aarch64.
#include "kernels.h"

#define SIMD_BYTES 16
#define SIMD_F16C 0
#define FIND_KERNEL find_kernel_baseline
#include "kernels.inc"
