// launch.h -- what only a build with nvcc has: launch.cu implements it over the CUDA runtime, stub.cc says no in builds without.
#pragma once

namespace pycomm::cuda {

bool built_with_cuda();

// The driver's entry point of that name in the form that CUDA `version` (as in 12030 for 12.3) introduced; nullptr without a driver or
// where the driver is older. Implemented by cudaGetDriverEntryPointByVersion.
void* driver_symbol(const char* name, int cuda_version);

}  // namespace pycomm::cuda
