// kernels.h -- what the three compilations of kernels.inc share with reduce.cc. Private to this folder.
//
// Included before a level's target pragma, so that nothing inline from here or from the standard library is
// compiled for a CPU the program may not run on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "reduce.h"

// [Note: no fma] A level that fuses a*b+c rounds once where another rounds twice; ranks on unlike machines
// would then disagree.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

namespace pycomm {

using Kernel = void (*)(const void* const* srcs, int num_srcs, void* out, size_t count, double factor);

// The kernel of one level, or nullptr for what reduce.cc maps to another (dtype, op): see `reduce`.
Kernel find_kernel_baseline(DType dtype, ReduceOp op);
Kernel find_kernel_avx2(DType dtype, ReduceOp op);
Kernel find_kernel_avx512(DType dtype, ReduceOp op);

}  // namespace pycomm
