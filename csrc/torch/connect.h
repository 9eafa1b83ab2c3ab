// connect.h -- how Python's side makes a communicator, for the native API and for the backend.
#pragma once

#include <memory>

#include "../collectives/collectives.h"
#include "../hosts/join.h"

namespace pycomm {

// Blocks until all ranks have come. Collective. `make_wires` where they are on several hosts; it may be
// empty. Whoever lets go of the last reference may hold Python's lock: the end of the group, which waits for
// its threads, then runs without it.
std::shared_ptr<Communicator> connect(Store& store, int rank, int world_size, const TransportOptions& options,
                                      const MakeWires& make_wires);

}  // namespace pycomm
