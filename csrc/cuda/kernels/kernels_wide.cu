// kernels_wide.cu -- the kernels that reduce integers of 32 and 64 bits. See family.cuh.
#include "family.cuh"

namespace pycomm::cuda {

const void* wide_kernel(const KernelKey& key) { return kernel_of_family<Family::wide>(key); }

}  // namespace pycomm::cuda
