// family.cuh -- the kernels as CUDA launches them, in families. Compiling them is slow, so they are divided
// among several .cu files, which are compiled at the same time: each instantiates one Family, and gives it
// out as plain pointers.
//
// Compiled for sm_80 and sm_90, with PTX for what comes later. __launch_bounds__(max_threads, 1): with the
// default ptxas aims at three blocks per multiprocessor and spills; so it does with two.
#pragma once

#include "kernels.cuh"

namespace pycomm::cuda {

enum class Family { plain, floating, wide, narrow };  // wide, narrow: integers of 4 and 8 bytes, of 1 and 2

template <Kernel kernel, class T>
constexpr Family family_of() {
  if (!reduces(kernel)) return Family::plain;
  if (!std::is_integral_v<Acc<T>>) return Family::floating;
  return sizeof(T) < 4 ? Family::narrow : Family::wide;
}

// The kernels of one family, for cudaLaunchKernel; nullptr for any other key.
const void* plain_kernel(const KernelKey& key);  // launch.cu
const void* floating_kernel(const KernelKey& key);  // kernels_floating.cu
const void* wide_kernel(const KernelKey& key);  // kernels_wide.cu
const void* narrow_kernel(const KernelKey& key);  // kernels_narrow.cu

namespace {

template <Kernel kernel, class T, ReduceOp op>
__global__ void __launch_bounds__(max_threads, 1) global_kernel(const __grid_constant__ Args args) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (kernel == Kernel::multimem) return;
  else
#endif
  {
    CudaCtx c;
    run_kernel<kernel, T, op>(c, args);
  }
}

template <Family family>
const void* kernel_of_family(const KernelKey& key) {
  const void* found = nullptr;
  visit_kernel(key, [&]<Kernel kernel, class T, ReduceOp op>() {
    if constexpr (family_of<kernel, T>() == family)
      found = reinterpret_cast<const void*>(&global_kernel<kernel, T, op>);
  });
  return found;
}

}  // namespace

}  // namespace pycomm::cuda
