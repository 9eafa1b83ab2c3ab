// launch.cu -- the only calls of the CUDA runtime, and the kernels without arithmetic. See family.cuh.
#include <cuda_runtime_api.h>

#include <stdexcept>

#include "family.cuh"
#include "launch.h"

namespace pycomm::cuda {

namespace {

void check(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  cudaGetLastError(); // not to be found by the next caller
  throw std::runtime_error(std::string(call) + " failed: " + cudaGetErrorName(result) + " (" +
                           cudaGetErrorString(result) + ")");
}

const void* kernel_of(const KernelKey& key) {
  for (auto* family : {plain_kernel, floating_kernel, wide_kernel, narrow_kernel})
    if (const void* found = family(key)) return found;
  return nullptr;
}

}  // namespace

const void* plain_kernel(const KernelKey& key) { return kernel_of_family<Family::plain>(key); }

bool built_with_cuda() { return true; }

void* driver_symbol(const char* name, int cuda_version) {
  void* entry_point = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t result =
      cudaGetDriverEntryPointByVersion(name, &entry_point, cuda_version, cudaEnableDefault, &found);
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
  for (int kernel = 0; kernel <= static_cast<int>(Kernel::recv); ++kernel)
    for (int dtype = 0; dtype < num_dtypes; ++dtype)
      for (int op = 0; op < num_reduce_ops; ++op) {
        cudaFuncAttributes attributes;
        const void* found =
            kernel_of({static_cast<Kernel>(kernel), static_cast<DType>(dtype), static_cast<ReduceOp>(op)});
        if (found) check(cudaFuncGetAttributes(&attributes, found), "cudaFuncGetAttributes");
      }
}

void launch(const KernelKey& key, const Args& args, int blocks, int threads, Stream stream) {
  const void* kernel = kernel_of(key);
  if (!kernel) throw std::logic_error("pycomm: there is no such kernel");
  void* parameters[] = {const_cast<Args*>(&args)};
  check(cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), parameters, 0, stream), "cudaLaunchKernel");
}

}  // namespace pycomm::cuda
