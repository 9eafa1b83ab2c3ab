// setup.h -- what is settled when a group is made, and never changes: on which device each rank is, by which
// protocol they wait for each other, and what their settings are.
#pragma once

#include "../communicator/communicator.h"
#include "protocol.h"

namespace pycomm::cuda {

// Read by all parts of a group, without a lock.
struct Setup {
  Communicator& comm;
  Device device;
  const Driver& driver;
  Topology topology;
  ProtocolChoice protocol;

  int rank() const { return comm.rank(); }
  int world_size() const { return comm.world_size(); }
  bool stream_ordered() const { return protocol.protocol == Protocol::stream_ordered; }
};

// Collective. Throws on all ranks where one cannot use its device, no protocol works, or settings differ.
Setup agree_on_setup(Communicator& comm, Device device);

// Of the staging of one rank: as the user wants it, or the default.
size_t staging_bytes(const Communicator& comm);

}  // namespace pycomm::cuda
