// host_words.cc -- see host_words.h.
#include "host_words.h"

#include <cstring>

#include "device/spare.h"
#include "sync_words.h"

namespace pycomm::cuda {

void HostWords::share() {
  if (setup_.uses_sync_words() || setup_.topology.one_process())
    shared_ = allocate_registered(setup_.comm, nbytes());
}

void HostWords::make() {
  constexpr unsigned flags = flag::host_portable | flag::host_device_map;
  void* const memory = allocate_host_block(setup_.device, sizeof(ErrorWord), flags);
  error_ = static_cast<ErrorWord*>(memory);
  std::memset(memory, 0, sizeof(ErrorWord));
  if (!setup_.uses_sync_words()) return;
  std::byte* words = shared_.memory->data();  // rank 0's part serves all
  PYCOMM_CUDA_CHECK(setup_.driver, cuMemHostRegister, words, nbytes(), flags);
  DevicePtr on_device = 0;
  const int result = setup_.driver.cuMemHostGetDevicePointer(&on_device, words, 0);
  if (result != result::success) setup_.driver.cuMemHostUnregister(words);
  check(result, "cuMemHostGetDevicePointer");
  on_device_ = on_device;
}

void HostWords::give_back() {
  if (on_device_)
    when_quiet(setup_.device, [memory = shared_.memory, driver = &setup_.driver] {
      driver->cuMemHostUnregister(memory->data());
    });
  free_host_block(setup_.device, error_, sizeof(ErrorWord));
  shared_ = {};
}

ErrorWord* HostWords::error_on_device() const {
  DevicePtr error = 0;
  ContextGuard guard(setup_.device);
  PYCOMM_CUDA_CHECK(setup_.driver, cuMemHostGetDevicePointer, &error, error_, 0);
  return reinterpret_cast<ErrorWord*>(error);
}

// Sync words, then a busy word per rank and line: of collectives, of each sending and each receiving.
size_t HostWords::num_words() const {
  const size_t n = setup_.world_size();
  return sync_words(setup_.world_size()) + n * (1 + 2 * n);
}

size_t HostWords::nbytes() const {
  return round_up_to(num_words() * sizeof(uint32_t) + (setup_.world_size() + 1) * sizeof(uint64_t), 4096);
}

std::atomic<uint32_t>& HostWords::word(size_t index) const {
  return reinterpret_cast<std::atomic<uint32_t>*>(shared_.memory->data())[index];
}

size_t HostWords::busy_word(int line) const {
  return sync_words(setup_.world_size()) + setup_.rank() * (1 + 2 * setup_.world_size()) + line;
}

std::atomic<uint64_t>& HostWords::stream_in_use(int rank) const {
  const size_t before = round_up_to(num_words() * sizeof(uint32_t), sizeof(uint64_t));
  return reinterpret_cast<std::atomic<uint64_t>*>(shared_.memory->data() + before)[rank];
}

void HostWords::stop_device() const {
  __atomic_store_n(&error_->stop, 1, __ATOMIC_RELEASE);
  if (!setup_.uses_sync_words()) return;
  const int n = setup_.world_size();
  for (int set = 0; set < num_sync_sets; ++set)
    for (int p = 0; p < n; ++p) word(sync_word(n, set, p, setup_.rank())).store(1);
}

}  // namespace pycomm::cuda
