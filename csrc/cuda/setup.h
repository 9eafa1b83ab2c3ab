// setup.h -- what is settled when a group is made, and never changes: on which device each rank is, by which
// protocol they wait for each other, and what their settings are.
#pragma once

#include "../communicator/communicator.h"
#include "budget.h"
#include "protocol.h"

namespace pycomm::cuda {

// Read by all parts of a group, without a lock.
struct Setup {
  Communicator& comm;
  Device device;
  const Driver& driver;
  Topology topology;
  ProtocolChoice protocol;
  std::shared_ptr<Places> places;  // of this rank's resident kernels on a shared device; else nullptr

  int rank() const { return comm.rank(); }
  int world_size() const { return comm.world_size(); }
  bool stream_ordered() const { return protocol.protocol == Protocol::stream_ordered; }
  // Are stream memory operations used, for all operations or for messages?
  bool uses_sync_words() const { return stream_ordered() || protocol.messages_in_order; }
  // Do ranks address whatever buffers their peers pass? Two devices of one process reach each other's arenas,
  // but not what an allocator made.
  bool pointers() const { return topology.one_process() && topology.ranks_on_my_device() == world_size(); }
};

// Collective. Throws on all ranks where one cannot use its device, no protocol works, or settings differ.
Setup agree_on_setup(Communicator& comm, Device device);

// Of the staging of one rank: as the user wants it, or the default.
size_t staging_bytes(const Communicator& comm);

}  // namespace pycomm::cuda
