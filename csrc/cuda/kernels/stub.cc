// stub.cc -- takes the place of launch.cu in builds without nvcc.
#include <stdexcept>

#include "kernels.cuh"
#include "launch.h"

namespace pycomm::cuda {

namespace {
[[noreturn]] void refuse() { throw std::runtime_error("pycomm was built without CUDA (no nvcc was found)"); }
}  // namespace

bool built_with_cuda() { return false; }
void* driver_symbol(const char*, int) { return nullptr; }
bool has_kernel(const KernelKey& key) {  // for explain(): what a build with CUDA would have
  return visit_kernel(key, [&]<Kernel kernel, class T, ReduceOp op>() {});
}
void load_kernels() { refuse(); }
void launch(const KernelKey&, const Args&, int, int, Stream) { refuse(); }

}  // namespace pycomm::cuda
