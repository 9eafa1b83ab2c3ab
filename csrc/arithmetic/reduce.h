// reduce.h -- element-wise reduction of n sources in rank order. The only place that knows how two elements
// combine.
#pragma once

#include "../types.h"

namespace pycomm {

// How two elements combine.
struct Arithmetic {
  DType dtype;
  ReduceOp op;
  double factor = 1;  // avg, premul_sum
};

// out[i] = srcs[0][i] op srcs[1][i] op ... op srcs[num_srcs-1][i], folded strictly from left to right, so
// that every rank that reduces the same sources gets the same bits. 16-bit floats accumulate in fp32 and
// round once at the end. Denormals are kept and results rounded to nearest, whatever the mode of the calling
// thread (float_mode.h).
//
//   avg        : the sum, divided by `factor` (the world size); integers divide with truncation towards zero
//   premul_sum : each source is multiplied by `factor` before it is added (floating and complex types)
//
// `out` may equal one of the sources exactly; a partial overlap is not allowed. Pointers need only the
// alignment of a byte. num_srcs >= 1. Throws std::invalid_argument when (dtype, op) is not supported, see
// `reduce_supported`.
void reduce(const Arithmetic& arithmetic, const void* const* srcs, int num_srcs, void* out, size_t count);

// False for: f8 with any op; band/bor/bxor on floating and complex types; min/max on complex types;
// premul_sum on integers and bool. bool: sum and max are "or", product and min are "and", avg is not
// supported.
bool reduce_supported(DType dtype, ReduceOp op);

// Copies nbytes; `stream` writes around the cache (non-temporal), for destinations that will not be read
// soon. A release store after a streamed copy is ordered: the copy ends with sfence.
void copy(void* dst, const void* src, size_t nbytes, bool stream = false);

// "avx512", "avx2" or "baseline": what run-time dispatch chose; `limit` (same words, or nullptr) caps it, for
// tests.
const char* simd_level();
void set_simd_limit(const char* limit);

}  // namespace pycomm
