// spare.h -- memory of a device, and memory of the host that it addresses, given back without a wait.
//
// [Note: calls that wait for the device] cuMemFree, cuMemFreeHost and cuMemHostUnregister wait for all
// kernels that run in the process. Where ranks are threads that share a device, the kernel of a peer may wait
// for the very rank that frees: neither goes on until the timeout. So while such a process has groups open,
// nothing is given to the driver. A block is kept and given to the next who wants that size on that device:
// groups have arenas of equal sizes. What cannot be used again is kept, too. All of it is freed when the last
// group on the device has closed, since no kernel of this library is under way then; blocks also where the
// device has no memory left, with a wait that ends by the timeouts of the operations.
//
// All functions may be called by any thread. The lock is held during calls of the driver, and nothing else is
// taken inside it.
#pragma once

#include <functional>

#include "driver.h"

namespace pycomm::cuda {

// A rank of a group that is open: from before its first kernel until none is left.
class OpenRank {
 public:
  // ranks_here: of the group, threads of this process on this device.
  OpenRank(Device device, int ranks_here);
  ~OpenRank();
  OpenRank(const OpenRank&) = delete;
  void keep_for_ever() { pid_ = 0; }  // its kernels do not end, so it stays open

 private:
  const Device device_;
  int pid_;
};

// Does any group that is open have several ranks of this process on the device?
bool ranks_are_threads(Device device);

DevicePtr allocate_block(Device device, size_t nbytes);  // cuMemAlloc; throws
void free_block(Device device, DevicePtr block, size_t nbytes) noexcept;
void* allocate_host_block(Device device, size_t nbytes, unsigned flags);  // cuMemHostAlloc; throws
void free_host_block(Device device, void* block, size_t nbytes) noexcept;
// Does it now or when the last group on the device has closed.
void when_quiet(Device device, std::function<void()> undo);

}  // namespace pycomm::cuda
