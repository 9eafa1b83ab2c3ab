// launch.h -- what only a build with nvcc has: launch.cu implements it over the CUDA runtime, stub.cc says no in builds without. The tests
// on machines without a GPU link a third implementation, which runs the kernels on the CPU (tests/cpp/cuda/fake_launch.cc).
#pragma once

#include <string>

#include "driver.h"
#include "layout.h"

namespace pycomm::cuda {

struct KernelKey {
  Kernel kernel;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
};

bool built_with_cuda();

// The driver's entry point of that name in the form that CUDA `version` (as in 12030 for 12.3) introduced; nullptr without a driver or
// where the driver is older. Implemented by cudaGetDriverEntryPointByVersion.
void* driver_symbol(const char* name, int cuda_version);

// Is there such a kernel? For sm_90 and later only: multimem.
bool has_kernel(const KernelKey& key);

// Loads every kernel onto the current device, which launching for the first time would do while other ranks' kernels may already wait for
// this one: loading can wait for them in turn. Throws std::runtime_error.
void load_kernels();

// Enqueues on `stream` of the current device. Throws std::runtime_error with the runtime's reason.
void launch(const KernelKey& key, const Args& args, int blocks, int threads, Stream stream);

}  // namespace pycomm::cuda
