// join.cc -- see join.h.
#include "join.h"

#include "../collectives/collectives.h"
#include "across.h"
#include "messages.h"

namespace pycomm {

namespace {

Placement placement_of(const std::vector<Record>& records) {
  std::vector<std::string> hosts, labels;
  for (const Record& record : records) {
    hosts.push_back(record.host);
    labels.push_back(record.label);
  }
  return Placement::of(hosts, labels);
}

double left_until(std::chrono::steady_clock::time_point deadline) {
  return std::chrono::duration<double>(deadline - std::chrono::steady_clock::now()).count();
}

std::shared_ptr<Communicator> join_inside(Joining& joining, Store& store, TransportOptions options,
                                          const Placement& placement) {
  const int rank = joining.identity().rank, host = placement.host_of[rank];
  options.whole = {placement.world_size(), placement.ranks[host], placement.names[host]};
  options.place = joining.rendezvous().attempt() + "/host" + std::to_string(host) + "/";
  options.timeout = std::max(0.001, left_until(joining.scope().deadline));
  Joining inside(store, placement.local_of[rank], placement.size_of(host), options);
  auto comm = make_communicator(inside.transport());
  comm->transport().set_timeout(joining.scope().timeout);
  return comm;
}

Wires connect_ranks(Joining& joining, const WireRequest& request, const MakeWires& make_wires) {
  try {
    return make_wires(request);
  } catch (const RankLost& loss) {
    joining.identity().raise(ErrorKind::peer, {}, loss.rank,
                             "creating the group: " + std::string(loss.what()));
  }
}

}  // namespace

std::shared_ptr<Communicator> join_hosts(Joining& joining, Store& store, const TransportOptions& options,
                                         const MakeWires& make_wires) {
  return joining.telling([&] {
    Placement placement = placement_of(joining.records());
    if (!make_wires)
      throw std::runtime_error("the ranks are on " + placement.describe() +
                               ", and this store offers no way to connect hosts");
    const int rank = joining.identity().rank;
    std::shared_ptr<Communicator> inside = join_inside(joining, store, options, placement);
    const WireRequest request{placement,
                              rank,
                              options.name,
                              joining.rendezvous().attempt(),
                              std::max(0.001, left_until(joining.scope().deadline)),
                              [&] { joining.rendezvous().look(); }};
    Wires wires = connect_ranks(joining, request, make_wires);
    std::shared_ptr<Communicator> comm(
        new Communicator(inside->shared_transport(), &run, rank, placement.world_size()),
        release_communicator);
    auto across = std::make_unique<Across>(std::move(placement), rank, std::move(inside), std::move(wires));
    auto messages = std::make_unique<AcrossMessages>(*comm, *across);
    comm->attach(std::move(across));
    comm->attach(std::move(messages));
    // All have read all records, and the wire works.
    Op first;
    first.kind = OpKind::barrier;
    first.timeout = std::max(0.001, left_until(joining.scope().deadline));
    comm->run(std::move(first));
    joining.rendezvous().complete();
    return comm;
  });
}

}  // namespace pycomm
