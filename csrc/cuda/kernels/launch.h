// launch.h -- what only a build with nvcc has: launch.cu implements it over the CUDA runtime, stub.cc says no
// in builds without. The tests on machines without a GPU link a third implementation, which runs the kernels
// on the CPU (tests/cpp/cuda/fake_launch.cc).
#pragma once

#include <string>

#include "../device/driver.h"
#include "key.h"

namespace pycomm::cuda {

// Is there such a kernel? For sm_90 and later only: multimem.
bool has_kernel(const KernelKey& key);

// Loads every kernel onto the current device, which launching for the first time would do while other ranks'
// kernels may already wait for this one: loading can wait for them in turn. Throws std::runtime_error.
void load_kernels();

// Enqueues on `stream` of the current device. Throws std::runtime_error with the runtime's reason.
void launch(const KernelKey& key, const Args& args, int blocks, int threads, Stream stream);

}  // namespace pycomm::cuda
