// kernels_narrow.cu -- the kernels that reduce integers of 8 and 16 bits, and bool. See family.cuh.
#include "family.cuh"

namespace pycomm::cuda {

const void* narrow_kernel(const KernelKey& key) { return kernel_of_family<Family::narrow>(key); }

}  // namespace pycomm::cuda
