// kernels_floating.cu -- the kernels that reduce floating-point and complex numbers. See family.cuh.
#include "family.cuh"

namespace pycomm::cuda {

const void* floating_kernel(const KernelKey& key) { return kernel_of_family<Family::floating>(key); }

}  // namespace pycomm::cuda
