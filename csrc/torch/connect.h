// connect.h -- how Python's side makes a communicator, for the native API and for the backend.
#pragma once

#include <memory>

#include "../collectives/collectives.h"
#include "../hosts/join.h"
#include "nccl_side.h"

namespace pycomm {

// How the hosts of a group are connected: for CPU tensors, and for CUDA tensors. Each may be empty.
struct Makers {
  MakeWires wires;
  MakeNccl nccl;
  Checks checks = Checks::beside;
};

// Blocks until all ranks have come. Collective. `makers` where they are on several hosts. Whoever lets go of
// the last reference may hold Python's lock: the end of the group, which waits for its threads, then runs
// without it.
std::shared_ptr<Communicator> connect(Store& store, int rank, int world_size, const TransportOptions& options,
                                      const Makers& makers);

}  // namespace pycomm
