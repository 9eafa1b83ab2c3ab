// one_level.cc -- for programs with a sanitizer: of the SIMD levels of csrc/arithmetic only the one that this
// CPU takes is compiled, PYCOMM_LEVEL_<name>. Whoever asks for another ends.
#include <cstdlib>

#include "../../csrc/arithmetic/kernels.h"

namespace pycomm {

#ifndef PYCOMM_LEVEL_baseline
Kernel find_kernel_baseline(DType, ReduceOp) { std::abort(); }
#endif
#ifndef PYCOMM_LEVEL_avx2
Kernel find_kernel_avx2(DType, ReduceOp) { std::abort(); }
#endif
#ifndef PYCOMM_LEVEL_avx512
Kernel find_kernel_avx512(DType, ReduceOp) { std::abort(); }
#endif

}  // namespace pycomm
