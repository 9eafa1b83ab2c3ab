// connect.cc -- see connect.h.
#include "connect.h"

#include "interpreter.h"

namespace pycomm {

namespace {

std::shared_ptr<Communicator> join(Store& store, int rank, int world_size, const TransportOptions& options,
                                   const MakeWires& make_wires) {
  Joining joining(store, rank, world_size, options);
  return joining.one_host() ? make_communicator(joining.transport())
                            : join_hosts(joining, store, options, make_wires);
}

}  // namespace

std::shared_ptr<Communicator> connect(Store& store, int rank, int world_size, const TransportOptions& options,
                                      const MakeWires& make_wires) {
  std::shared_ptr<Communicator> comm = join(store, rank, world_size, options, make_wires);
  Communicator* address = comm.get();
  return {address, [comm = std::move(comm)](Communicator*) mutable {
            WithoutGilIfHeld no_gil;
            comm.reset();
          }};
}

}  // namespace pycomm
