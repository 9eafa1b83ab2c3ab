// stub.cc -- takes the place of launch.cu in builds without nvcc.
#include "launch.h"

namespace pycomm::cuda {

bool built_with_cuda() { return false; }
void* driver_symbol(const char*, int) { return nullptr; }

}  // namespace pycomm::cuda
