// join_group.h -- how the ranks of a test come together: on one host, or on hosts that are only said to be
// several, with a wire between threads whose messages may be late.
#pragma once

#include <string>

#include "../../csrc/collectives/collectives.h"
#include "../../csrc/hosts/join.h"
#include "../../csrc/hosts/loop_wire.h"
#include "../../csrc/transport/join.h"

namespace pycomm {

inline std::shared_ptr<Communicator> join_group(Store& store, int rank, int world_size,
                                                const TransportOptions& options) {
  return make_communicator(Joining(store, rank, world_size, options).transport());
}

// `hosts` has a digit for each rank; none: all are on one.
inline std::shared_ptr<Communicator> join_group_on(const std::string& hosts, Store& store, int rank,
                                                   TransportOptions options) {
  constexpr int latest_us = 300;
  options.host_id = "host" + hosts.substr(rank, 1);
  Joining joining(store, rank, static_cast<int>(hosts.size()), options);
  if (joining.one_host()) return make_communicator(joining.transport());
  return join_hosts(joining, store, options, [](const WireRequest& request) {
    const int rank = request.rank, host = request.placement.host_of[rank];
    auto wire = [&](const char* name, int size, int end) {
      return LoopNetwork::named(request.attempt + name, size, latest_us)->wire(end);
    };
    Wires wires{wire("/data", request.placement.world_size(), rank), nullptr};
    if (request.placement.ranks[host][0] == rank)
      wires.control = wire("/control", request.placement.hosts(), host);
    return wires;
  });
}

}  // namespace pycomm
