// launch.cu -- the kernels as nvcc builds them, and the only calls of the CUDA runtime.
//
// Compiled for sm_80 and sm_90, with PTX for what comes later. __launch_bounds__(max_threads, 1): with the default ptxas aims at three
// blocks per multiprocessor and spills.
#include <cuda_runtime_api.h>

#include <stdexcept>

#include "kernels.cuh"
#include "launch.h"

namespace pycomm::cuda {

namespace {

template <Kernel kernel, class T, ReduceOp op>
__global__ void __launch_bounds__(max_threads, 1) entry(const __grid_constant__ Args args) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (kernel == Kernel::multimem) return;
  else
#endif
  {
    CudaCtx c;
    run_kernel<kernel, T, op>(c, args);
  }
}

void check(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // not to be found by the next caller
  throw std::runtime_error(std::string(call) + " failed: " + cudaGetErrorName(result) + " (" + cudaGetErrorString(result) + ")");
}

// Visits every kernel once.
template <class Visit>
void for_each_kernel(const Visit& visit) {
  for (int kernel = 0; kernel <= static_cast<int>(Kernel::recv); ++kernel)
    for (int dtype = 0; dtype < num_dtypes; ++dtype)
      for (int op = 0; op < num_reduce_ops; ++op) {
        const KernelKey key{static_cast<Kernel>(kernel), static_cast<DType>(dtype), static_cast<ReduceOp>(op)};
        if (reduces(key.kernel) || (dtype == 0 && op == 0)) visit_kernel(key, visit);
      }
}

}  // namespace

bool built_with_cuda() { return true; }

void* driver_symbol(const char* name, int cuda_version) {
  void* entry_point = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t result = cudaGetDriverEntryPointByVersion(name, &entry_point, cuda_version, cudaEnableDefault, &found);
  if (result != cudaSuccess) cudaGetLastError();
  return result == cudaSuccess && found == cudaDriverEntryPointSuccess ? entry_point : nullptr;
}

bool has_kernel(const KernelKey& key) {
  return visit_kernel(key, [&]<Kernel kernel, class T, ReduceOp op>() {});
}

void load_kernels() {
  int device = 0, major = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  for_each_kernel([&]<Kernel kernel, class T, ReduceOp op>() {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&entry<kernel, T, op>)), "cudaFuncGetAttributes");
  });
}

void launch(const KernelKey& key, const Args& args, int blocks, int threads, Stream stream) {
  const bool found = visit_kernel(key, [&]<Kernel kernel, class T, ReduceOp op>() {
    void* parameters[] = {const_cast<Args*>(&args)};
    check(cudaLaunchKernel(reinterpret_cast<const void*>(&entry<kernel, T, op>), dim3(blocks), dim3(threads), parameters, 0, stream),
          "cudaLaunchKernel");
  });
  if (!found) throw std::logic_error("pycomm: there is no such kernel");
}

}  // namespace pycomm::cuda
