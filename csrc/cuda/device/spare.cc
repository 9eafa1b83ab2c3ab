// spare.cc -- see spare.h.
#include "spare.h"

#include <unistd.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace pycomm::cuda {

namespace {

struct Spare {
  int open = 0;         // ranks of groups
  bool threads = false;  // some group had several
  std::multimap<size_t, DevicePtr> blocks;
  std::multimap<size_t, void*> host_blocks;
  std::vector<std::function<void()>> undo;

  bool keeps() const { return open > 0 && threads; }
};

struct Spares {
  std::mutex mutex;
  std::map<Device, Spare> of_device;
  pid_t pid = ::getpid();
};

// Never destroyed: groups may end later than static objects do.
Spares& spares() {
  static auto* all = new Spares;
  return *all;
}

// With the lock held. A forked child has none of its parent's.
Spare& spare_of(Spares& all, Device device) {
  if (all.pid != ::getpid()) {
    all.of_device.clear();
    all.pid = ::getpid();
  }
  return all.of_device[device];
}

template <class Block>
Block take(std::multimap<size_t, Block>& from, size_t nbytes) {
  const auto found = from.find(nbytes);
  if (found == from.end()) return {};
  const Block block = found->second;
  from.erase(found);
  return block;
}

bool free_blocks(Spare& spare) {
  if (spare.blocks.empty()) return false;
  for (const auto& [nbytes, block] : std::exchange(spare.blocks, {})) require_driver().cuMemFree(block);
  return true;
}

void free_all(Spare& spare, Device device) {
  if (spare.blocks.empty() && spare.host_blocks.empty() && spare.undo.empty()) return;
  ContextGuard guard(device);
  free_blocks(spare);
  for (const auto& [nbytes, block] : std::exchange(spare.host_blocks, {}))
    require_driver().cuMemFreeHost(block);
  for (const auto& undo : std::exchange(spare.undo, {})) undo();
}

}  // namespace

OpenRank::OpenRank(Device device, int ranks_here) : device_(device), pid_(::getpid()) {
  Spares& all = spares();
  std::lock_guard lock(all.mutex);
  Spare& spare = spare_of(all, device);
  ++spare.open;
  spare.threads |= ranks_here > 1;
}

OpenRank::~OpenRank() {
  if (pid_ != ::getpid()) return;
  Spares& all = spares();
  std::lock_guard lock(all.mutex);
  Spare& spare = spare_of(all, device_);
  if (--spare.open > 0) return;
  spare.threads = false;
  try {
    free_all(spare, device_);
  } catch (const std::exception&) {
    // The driver is gone or broken, and the memory with it.
  }
}

bool ranks_are_threads(Device device) {
  Spares& all = spares();
  std::lock_guard lock(all.mutex);
  return spare_of(all, device).threads;
}

DevicePtr allocate_block(Device device, size_t nbytes) {
  Spares& all = spares();
  std::lock_guard lock(all.mutex);
  Spare& spare = spare_of(all, device);
  if (const DevicePtr kept = take(spare.blocks, nbytes)) return kept;
  ContextGuard guard(device);
  DevicePtr block = 0;
  int result = require_driver().cuMemAlloc(&block, nbytes);
  if (result == result::out_of_memory && free_blocks(spare))
    result = require_driver().cuMemAlloc(&block, nbytes);
  check(result, "cuMemAlloc");
  return block;
}

void free_block(Device device, DevicePtr block, size_t nbytes) noexcept try {
  Spares& all = spares();
  std::lock_guard lock(all.mutex);
  Spare& spare = spare_of(all, device);
  if (spare.keeps()) {
    spare.blocks.emplace(nbytes, block);
  } else {
    ContextGuard guard(device);
    require_driver().cuMemFree(block);
  }
} catch (const std::exception&) {
  // As above.
}

void* allocate_host_block(Device device, size_t nbytes, unsigned flags) {
  Spares& all = spares();
  std::lock_guard lock(all.mutex);
  if (void* const kept = take(spare_of(all, device).host_blocks, nbytes)) return kept;
  ContextGuard guard(device);
  void* block = nullptr;
  PYCOMM_CUDA_CHECK(require_driver(), cuMemHostAlloc, &block, nbytes, flags);
  return block;
}

void free_host_block(Device device, void* block, size_t nbytes) noexcept try {
  Spares& all = spares();
  std::lock_guard lock(all.mutex);
  Spare& spare = spare_of(all, device);
  if (spare.keeps()) {
    spare.host_blocks.emplace(nbytes, block);
  } else {
    ContextGuard guard(device);
    require_driver().cuMemFreeHost(block);
  }
} catch (const std::exception&) {
  // As above.
}

void when_quiet(Device device, std::function<void()> undo) {
  Spares& all = spares();
  std::lock_guard lock(all.mutex);
  Spare& spare = spare_of(all, device);
  if (spare.keeps()) spare.undo.push_back(std::move(undo));
  else undo();
}

}  // namespace pycomm::cuda
