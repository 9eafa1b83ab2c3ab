// registered.h -- buffers that every rank of a group has mapped, so that collectives on them copy nothing
// twice.
#pragma once

#include "communicator.h"

namespace pycomm {

struct RegisteredBuffer {
  std::shared_ptr<SharedMemory> memory;  // keeps the memory mapped
  std::byte* data = nullptr;         // this rank's part
  size_t stride = 0;                 // bytes from one rank's part to the next
  uint32_t region = 0;               // for Transport::drop_region, when the buffer is no longer used
};

// Collective: all ranks must call it with the same nbytes. Memory is zeroed, page-aligned, first touched by
// its owner. In a group that spans hosts, the ranks of a host have mapped each other's parts. Its end is
// described in [Note: end of a registered region] (transport/regions.h).
RegisteredBuffer allocate_registered(Communicator& comm, size_t nbytes);

}  // namespace pycomm
