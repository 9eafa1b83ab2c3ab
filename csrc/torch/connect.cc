// connect.cc -- see connect.h.
#include "connect.h"

#include "interpreter.h"

namespace pycomm {

std::shared_ptr<Communicator> connect(Store& store, int rank, int world_size,
                                      const TransportOptions& options) {
  std::shared_ptr<Communicator> comm = make_communicator(store, rank, world_size, options);
  Communicator* address = comm.get();
  return {address, [comm = std::move(comm)](Communicator*) mutable {
            WithoutGilIfHeld no_gil;
            comm.reset();
          }};
}

}  // namespace pycomm
