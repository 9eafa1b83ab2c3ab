// connect.h -- how Python's side makes a communicator, for the native API and for the backend.
#pragma once

#include <memory>

#include "../collectives/collectives.h"

namespace pycomm {

// As make_communicator (collectives.h). Whoever lets go of the last reference may hold Python's lock: the end
// of the group, which waits for its threads, then runs without it.
std::shared_ptr<Communicator> connect(Store& store, int rank, int world_size,
                                      const TransportOptions& options);

}  // namespace pycomm
