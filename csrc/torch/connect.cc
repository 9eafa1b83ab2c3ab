// connect.cc -- see connect.h.
#include "connect.h"

#include "interpreter.h"

namespace pycomm {

namespace {

std::shared_ptr<Communicator> join(Store& store, int rank, int world_size, const TransportOptions& options,
                                   const Makers& makers) {
  Joining joining(store, rank, world_size, options);
  if (joining.one_host()) return make_communicator(joining.transport());
  NcclPlace place;
  const MakeWires make_wires = [&](const WireRequest& request) {
    place = {request.placement, request.attempt};
    return makers.wires(request);
  };
  auto comm = join_hosts(joining, store, options, makers.wires ? make_wires : MakeWires());
  comm->attach(std::make_unique<NcclSide>(*comm, std::move(place), makers.nccl, makers.checks));
  return comm;
}

}  // namespace

std::shared_ptr<Communicator> connect(Store& store, int rank, int world_size, const TransportOptions& options,
                                      const Makers& makers) {
  std::shared_ptr<Communicator> comm = join(store, rank, world_size, options, makers);
  Communicator* address = comm.get();
  return {address, [comm = std::move(comm)](Communicator*) mutable {
            WithoutGilIfHeld no_gil;
            comm.reset();
          }};
}

}  // namespace pycomm
