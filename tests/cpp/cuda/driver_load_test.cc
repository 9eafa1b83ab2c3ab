// driver_load_test.cc -- how driver.cc loads the table: driver_load_test none | old | broken | whole, each a
// driver that this file plays.
//
// Prints driver_problem(), or "usable".
#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "../../../csrc/cuda/device/driver.h"
#include "fake_driver.h"

namespace {
std::string machine;
std::atomic<int> initialised{0};
}  // namespace

namespace pycomm::cuda {

bool built_with_cuda() { return true; }

void* driver_symbol(const char* name, int version) {
  if (machine == "none" || (machine == "old" && version >= 12000)) return nullptr;
  if (!std::strcmp(name, "cuInit")) {
    int (*init)(unsigned int) = [](unsigned int) {
      return ++initialised, machine == "broken" ? result::unknown : result::success;
    };
    return reinterpret_cast<void*>(init);
  }
#define PYCOMM_CUDA_FIND(function, version, parameters) \
  if (!std::strcmp(name, #function)) return reinterpret_cast<void*>(fake_driver()->function);
  PYCOMM_CUDA_DRIVER_FUNCTIONS(PYCOMM_CUDA_FIND)
#undef PYCOMM_CUDA_FIND
  return nullptr;
}

}  // namespace pycomm::cuda

int main(int, char** arguments) {
  machine = arguments[1];
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) threads.emplace_back([] { pycomm::cuda::driver(); });
  for (auto& thread : threads) thread.join();
  const bool usable = pycomm::cuda::driver() != nullptr;
  std::printf("%s; cuInit called %d times\n", usable ? "usable" : pycomm::cuda::driver_problem().c_str(),
              initialised.load());
}
